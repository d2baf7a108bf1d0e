"""By which address this host is reached: read from the kernel, never from a name.

The address of a process is the local one of the connection over which it reached the group's store: the others have
reached that store too, so they can reach this address. No hostname is resolved: many hosts resolve their own to
loopback.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import RequestError, unknown

INTERFACE = "OFFBEAT_INTERFACE"
_ESTABLISHED = "01"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An address of this host; the interface that has it, and its rate where the kernel knows one."""

    address: str
    interface: str = ""
    bits_per_s: int | None = None

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def own_address(store_port: int | None, environment: Mapping[str, str] | None = None) -> Address:
    """This host's address: that of OFFBEAT_INTERFACE, or the one from which this process reached the store."""
    wanted = (os.environ if environment is None else environment).get(INTERFACE, "")
    if wanted:
        address = _address_of(wanted)
        if address is None:
            names = [name for _, name in socket.if_nameindex()]
            if wanted not in names:
                raise unknown(f"network interface ({INTERFACE})", wanted, names)
            raise RequestError(f"{INTERFACE}: the interface '{wanted}' has no IPv4 address")
        return _described(address, wanted)
    found = addresses_that_reached(store_port) if store_port is not None else []
    beyond = [one for one in found if not ipaddress.ip_address(one).is_loopback]
    if not found:
        raise RequestError(
            f"cannot find the address of this process: it has no connection to the group's store; set {INTERFACE}"
        )
    address = (beyond or found)[0]
    names = [name for _, name in socket.if_nameindex() if _address_of(name) == address]
    return _described(address, names[0] if names else "")


def address_towards(host: str) -> str:
    """This host's address towards another one: that of OFFBEAT_INTERFACE, or what the kernel's routes say. Nothing is
    sent.
    """
    if os.environ.get(INTERFACE):
        return own_address(None).address
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as one:
            one.connect(place)
            return str(one.getsockname()[0])
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a host name"
        raise RequestError(
            f"cannot find the address by which '{host}' reaches this host ({why}); give --listen ADDRESS:PORT"
        ) from None


def addresses_that_reached(port: int) -> list[str]:
    """The local addresses of this process's connections to that port, wherever it is."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(str(entry.readlink()))
    found = []
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                local, remote, state, inode = words[1], words[2], words[3], words[9]
                reached = state == _ESTABLISHED and int(remote.split(":")[1], 16) == port
                if reached and f"socket:[{inode}]" in own:
                    found.append(_parse(local.split(":")[0]))
    return found


def _parse(text: str) -> str:
    """As the kernel writes an address: words of 32 bits, each in the machine's own order."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            answer = fcntl.ioctl(one.fileno(), _GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _described(address: str, interface: str) -> Address:
    rate = None
    if interface:
        with contextlib.suppress(OSError, ValueError):
            megabits = int(Path(f"/sys/class/net/{interface}/speed").read_text(encoding="ascii"))
            rate = megabits * 1_000_000 if megabits > 0 else None
    return Address(address=address, interface=interface, bits_per_s=rate)
