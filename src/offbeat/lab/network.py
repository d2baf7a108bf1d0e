"""The network of a lab as a value, and the commands that build and change it as text. Nothing is run here.

Every host has one link to the switch, a bridge. The link is shaped at both its ends by a token bucket: `eth0` in the
host limits what goes out, its port on the switch limits what comes in.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from offbeat.errors import RequestError
from offbeat.spec import parse_count, parse_rate

Direction = Literal["out", "in", "both"]  # as the host sees it

MOST_HOSTS = 64
MTU = 1500
CONGESTION_CONTROL = "cubic"
FRAME_BYTES = MTU + 14  # with the Ethernet header, as the kernel counts
PAYLOAD_BYTES = MTU - 52  # without the headers of IP and TCP, and timestamps
_LEAST_BURST, _MOST_BURST = 16 * 1024, 128 * 1024
_LEAST_QUEUE, _MOST_QUEUE = 128 * 1024, 16 * 2**20
_BURST_S, _QUEUE_S = 0.5e-3, 50e-3
_LEAST_RATE = 8000.0  # bytes per second: a packet a fifth of a second
_SUBNET = "10.0.0"
INTERFACE = "eth0"  # of every host
_PLACEHOLDER = re.compile(r"\{host(\d*)\}")


def _check_hosts(hosts: int) -> None:
    if not 1 <= hosts <= MOST_HOSTS:
        raise RequestError(f"a lab has 1 to {MOST_HOSTS} hosts; got {hosts}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The bandwidth of each host's link, in bytes per second and alike both ways; None: not shaped."""

    bandwidths: tuple[float | None, ...]

    def __post_init__(self) -> None:
        _check_hosts(len(self.bandwidths))

    @classmethod
    def of(cls, *, hosts: int, bandwidth: str | None = None, slow: Sequence[str] = ()) -> Self:
        """`slow` are links that differ, like `host=2,bandwidth=100Mbit/s`."""
        _check_hosts(hosts)
        common = None if bandwidth is None else parse_bandwidth(bandwidth)
        bandwidths = [common] * hosts
        for text in slow:
            host, rate = _parse_slow(text)
            if host >= hosts:
                raise RequestError(f"'{text}': there are {hosts} hosts, numbered from 0")
            bandwidths[host] = rate
        return cls(bandwidths=tuple(bandwidths))

    @property
    def hosts(self) -> int:
        return len(self.bandwidths)

    @property
    def burst_bytes(self) -> int:
        """What passes a link at once after a pause: half a millisecond of the fastest one, but 16 to 128 KiB.

        A small burst keeps small messages honest: with 128 KiB at 10 Mbit/s the first tenth of a second would be free.
        """
        fastest = max(_MOST_BURST / _BURST_S if rate is None else rate for rate in self.bandwidths)
        return int(min(max(fastest * _BURST_S, _LEAST_BURST), _MOST_BURST))

    @property
    def segment_bytes(self) -> int:
        """What TCP hands to a link at once; the kernel counts its headers packet by packet.

        A segment larger than the burst would be cut up inside the token bucket, packet by packet: on a busy machine a
        link then carried a fifth of its rate. So burst and segment are those of the fastest link.
        """
        return self.burst_bytes // 2

    def name(self, host: int) -> str:
        return f"host{host}"

    def address(self, host: int) -> str:
        return f"{_SUBNET}.{host + 1}"

    def fill(self, words: Sequence[str], host: int) -> list[str]:
        """A command as one host runs it: `{host0}` is the address of host 0, `{host}` this host's own number."""

        def value(found: re.Match[str]) -> str:
            if not found[1]:
                return str(host)
            if int(found[1]) >= self.hosts:
                raise RequestError(f"'{found[0]}': there are {self.hosts} hosts, numbered from 0")
            return self.address(int(found[1]))

        return [_PLACEHOLDER.sub(value, word) for word in words]


def _parse_slow(text: str) -> tuple[int, float]:
    words = dict(word.partition("=")[::2] for word in text.split(","))
    if set(words) != {"host", "bandwidth"}:
        raise RequestError(f"expected a link like host=2,bandwidth=100Mbit/s; got '{text}'")
    return parse_host(words["host"]), parse_bandwidth(words["bandwidth"])


def parse_host(text: str) -> int:
    """The number of a host, 0 or more."""
    return 0 if text == "0" else parse_count(text)


def parse_bandwidth(text: str) -> float:
    """The bandwidth of a link in bytes per second."""
    rate = parse_rate(text)
    if rate < _LEAST_RATE:
        raise RequestError(f"the bandwidth of a link must be at least {format_bandwidth(_LEAST_RATE)}; got '{text}'")
    return rate


def format_bandwidth(bytes_per_s: float) -> str:
    """`1 Gbit/s`; `parse_rate` reads it back."""
    bits = 8 * bytes_per_s
    size, unit = (1e9, "Gbit/s") if bits >= 1e9 else (1e6, "Mbit/s") if bits >= 1e6 else (1e3, "kbit/s")
    return f"{bits / size:.4g} {unit}"


# --- shaping --------------------------------------------------------------------------------------------------------


def queue_bytes(bytes_per_s: float) -> int:
    """What waits before packets are dropped: 50 ms of it, but 128 KiB to 16 MiB."""
    return int(min(max(bytes_per_s * _QUEUE_S, _LEAST_QUEUE), _MOST_QUEUE))


def payload_rate(bytes_per_s: float) -> float:
    """What TCP carries of a bandwidth, in full packets."""
    return bytes_per_s * PAYLOAD_BYTES / FRAME_BYTES


def shape(device: str, bytes_per_s: float | None, burst_bytes: int) -> str:
    """The command that limits what leaves by this device. 0 cuts it: packets vanish, and no sender is told."""
    discipline = "noqueue"
    if bytes_per_s == 0:
        discipline = "blackhole"
    elif bytes_per_s is not None:
        discipline = f"tbf rate {round(8 * bytes_per_s)}bit burst {burst_bytes} limit {queue_bytes(bytes_per_s)}"
    return f"tc qdisc replace dev {device} root {discipline}\n"


def port(host: int) -> str:
    """The switch's end of a link."""
    return f"port{host}"


# --- scripts for sh -------------------------------------------------------------------------------------------------


def switch_script() -> str:
    return (
        "mount --make-rprivate /\n"
        "ip link add switch type bridge stp_state 0 forward_delay 0 mcast_snooping 0\n"
        f"ip link set switch mtu {MTU} up\n"
    )


def plug_script(network: Network, host: int, pid: int) -> str:
    """On the switch: a link to the host whose first process is `pid`."""
    return (
        f"ip link add {port(host)} mtu {MTU} type veth peer name eth0 mtu {MTU} "
        f"address 02:00:00:00:00:{host + 1:02x} netns {pid}\n"
        f"ip link set {port(host)} gso_max_size {network.segment_bytes} master switch up\n"
    )


def unplug_script(host: int) -> str:
    """On the switch: the port of a host that is gone. The kernel removes it too, some time later."""
    return f"ip link delete {port(host)} 2>/dev/null || true\n"


def mount_script(network: Network) -> str:
    """On a host: its own view of processes and interfaces, its own shared memory, the names of all hosts.

    Needs no network, and is what a container most often forbids.
    """
    names = ["127.0.0.1 localhost"]
    for host in range(network.hosts):
        names.append(f"{network.address(host)} {network.name(host)}")
        names.append(f"::ffff:{network.address(host)} {network.name(host)}.lab")  # torch's store looks these up
    lines = shlex.quote("".join(f"{line}\n" for line in names))
    return (
        "mount --make-rprivate /\n"
        "mount -t proc proc /proc\n"
        "mount -t sysfs sysfs /sys\n"
        "mount -t tmpfs -o mode=1777 shm /dev/shm\n"
        "if test -e /etc/hosts; then\n"
        f"  printf %s {lines} > /dev/shm/hosts\n"
        "  mount --bind /dev/shm/hosts /etc/hosts\n"
        "  rm /dev/shm/hosts\n"
        "fi\n"
    )


def address_script(network: Network, host: int) -> str:
    """On a host: its interfaces. Congestion control is set by route, which needs no right outside of the namespace."""
    address = network.address(host)
    return (
        "if test -e /proc/sys/net/ipv6; then echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; fi\n"
        "ip link set lo up\n"
        f"ip link set eth0 gso_max_size {network.segment_bytes} up\n"
        f"ip address add {address}/24 dev eth0\n"
        f"ip route change {_SUBNET}.0/24 dev eth0 proto kernel scope link src {address} congctl {CONGESTION_CONTROL}\n"
    )
