"""A port that stays open while a run lasts, and how one connects to it.

Whoever connects shows the key (`network.tls`), if there is one, and sends a greeting of fixed size. Then its connection
is handed on, as a `Guest`; what the greeting says is for others to judge. Without a key nothing is encrypted and
everybody who can reach the port may greet, so a port beyond loopback is refused unless the network is trusted.

Laws. Nobody is waited for: all who greet do so together, in one thread. Who has not greeted within `GREETING_S` is
dropped, and so is the oldest of them where there are more than `MOST_GREETING` from one address, or more than
`MOST_GREETING_IN_ALL`: from where most come. A stranger is not answered.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import select
import socket
import ssl
import time
from collections import Counter
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.errors import PeerError, RequestError
from offbeat.network import keys
from offbeat.network.connections import (
    GREETING_S,
    MOST_GREETING,
    MOST_GREETING_IN_ALL,
    AnyConnection,
    Dropped,
    Place,
    Wait,
    family_of,
    receive_steps,
    secure,
    send_at_once,
    send_steps,
    set_up,
)
from offbeat.network.keys import KEY, OPEN, TRUST, RunKey
from offbeat.network.streams import ClosedError
from offbeat.network.tls import TlsConnection, context_of

_BACKLOG = 256
_ACCEPTED_AT_ONCE = 32


class Guest(NamedTuple):
    """Who has shown the key and greeted. Its connection waits in the kernel from now on."""

    connection: AnyConnection
    greeting: bytes
    address: str


class RefusedError(PeerError):
    """Nobody listens there."""


@dataclass(slots=True)
class _Newcomer:
    steps: Generator[Wait, None, Guest]
    wait: Wait
    one: socket.socket
    address: str
    end_s: float


# --- addresses --------------------------------------------------------------------------------------------------------


def parse_place(text: str, what: str) -> Place:
    """`10.0.0.1:7000`, `[::1]:7000` or `name:7000`; `what` names the option."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or len(port) > 5 or int(port) > 65535:
        raise RequestError(f"{what}: expected ADDRESS:PORT, such as 10.0.0.1:7000; got '{text[:200]}'")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a host name"
        raise RequestError(f"{what}: '{host}' is not an address: {why}") from None
    return Place(str(found[0][4][0]), int(port))


def check_trust(place: Place, key: RunKey | None, *, is_open: bool, what: str) -> None:
    """`RequestError` where a connection would leave this host without a key, and the network is not said to be open."""
    if key is None and not is_open and not ipaddress.ip_address(place.address.partition("%")[0]).is_loopback:
        raise RequestError(
            f"{what}: {place.address} is not loopback, and there is no key; make one with `offbeat keys FILE` and give "
            f"--key FILE ({KEY}) on all hosts, or trust the network: --network-trust {OPEN} ({TRUST}={OPEN})"
        )


def listen(place: Place, what: str) -> socket.socket:
    """A listening socket; port 0 is one that the kernel chooses."""
    one = socket.socket(family_of(place.address), socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(place)
        one.listen(_BACKLOG)
    except OSError as error:
        one.close()
        raise RequestError(f"{what}: cannot listen on {format_place(place)}: {error.strerror}") from None
    return one


def open_port(address: str, what: str) -> socket.socket:
    """Listen at `ADDRESS:PORT`. `RequestError` where that cannot be, or must not be without a key."""
    place = parse_place(address, what)
    check_trust(place, keys.key_of(), is_open=keys.is_open(), what=what)
    return listen(place, what)


def format_place(place: Place) -> str:
    return f"[{place.address}]:{place.port}" if ":" in place.address else f"{place.address}:{place.port}"


# --- the side that listens --------------------------------------------------------------------------------------------


class Port:
    """See the module's text. `greeting_bytes` is the size of the greeting."""

    def __init__(self, listener: socket.socket, key: RunKey | None, greeting_bytes: int) -> None:
        self._listener, self._key, self._greeting_bytes = listener, key, greeting_bytes
        self._context = None if key is None else context_of(key, server=True)
        self._newcomers: list[_Newcomer] = []
        listener.setblocking(False)

    def poll(self, timeout_s: float, also: Collection[int] = ()) -> list[Guest]:
        """Who has greeted meanwhile. It waits no longer than that, nor when there is something at one of `also`."""
        watch = select.poll()
        for number in (self._listener.fileno(), *also):
            watch.register(number, select.POLLIN)
        for newcomer in self._newcomers:
            assert newcomer.wait.one is not None
            watch.register(newcomer.wait.one.fileno(), newcomer.wait.events)
        ready = {number for number, _ in watch.poll(1000 * timeout_s)}
        guests: list[Guest] = []
        now = time.monotonic()
        for newcomer in tuple(self._newcomers):
            if now > newcomer.end_s:  # first: one that sends a byte now and then has no more time than others
                self._drop(newcomer)
            elif newcomer.one.fileno() in ready:
                self._go_on(newcomer, guests)
        if self._listener.fileno() in ready:
            self._accept()
        return guests

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                one, where = self._listener.accept()
            except OSError as error:  # nobody is there, or it has gone again
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    for newcomer in tuple(self._newcomers):
                        self._drop(newcomer)
                return
            send_at_once(one)
            address = str(where[0]).partition("%")[0]
            crowds = Counter(newcomer.address for newcomer in self._newcomers)
            if crowds[address] >= MOST_GREETING:
                self._drop_oldest(address)
            elif crowds.total() >= MOST_GREETING_IN_ALL:
                self._drop_oldest(crowds.most_common(1)[0][0])
            steps = self._admit(one, address)
            end_s = time.monotonic() + GREETING_S
            self._newcomers.append(_Newcomer(steps, Wait(one, select.POLLIN), one, address, end_s))

    def _admit(self, one: socket.socket, address: str) -> Generator[Wait, None, Guest]:
        secured: AnyConnection = one
        if self._key is not None and self._context is not None:
            secured = yield from secure(one, self._key, self._context, server=True)
        greeting = yield from receive_steps(secured, one, self._greeting_bytes)
        return Guest(secured, greeting, address)

    def _go_on(self, newcomer: _Newcomer, guests: list[Guest]) -> None:
        try:
            newcomer.wait = next(newcomer.steps)
        except StopIteration as end:
            self._newcomers.remove(newcomer)
            set_up(newcomer.one)
            guests.append(end.value)
        except (OSError, Dropped):
            self._drop(newcomer)

    def _drop_oldest(self, address: str) -> None:
        self._drop(next(newcomer for newcomer in self._newcomers if newcomer.address == address))

    def _drop(self, newcomer: _Newcomer) -> None:
        self._newcomers.remove(newcomer)
        newcomer.steps.close()
        newcomer.one.close()

    def close(self) -> None:
        """Who has not greeted yet is dropped; the listening socket is the caller's."""
        for newcomer in tuple(self._newcomers):
            self._drop(newcomer)


# --- the side that connects -------------------------------------------------------------------------------------------


def dial(place: Place, key: RunKey | None, greeting: bytes, timeout_s: float) -> AnyConnection:
    """Connect, show the key and greet. `PeerError` where that fails; `RefusedError` where nobody listens."""
    where = format_place(place)
    one = socket.socket(family_of(place.address), socket.SOCK_STREAM)
    steps = _dial(one, place, key, greeting)
    end_s = time.monotonic() + timeout_s
    try:
        send_at_once(one)
        while True:
            wait = next(steps)
            watch = select.poll()
            watch.register(one.fileno(), wait.events)
            if not watch.poll(1000 * max(0.0, end_s - time.monotonic())):
                raise PeerError(f"{where} did not answer within {timeout_s:g} s")
    except StopIteration as end:
        set_up(one)
        connection: AnyConnection = end.value
        return connection
    except BaseException as error:
        one.close()
        if isinstance(error, ConnectionRefusedError):
            raise RefusedError(f"nobody listens on {where}") from None
        if isinstance(error, ssl.SSLError):
            raise PeerError(f"{where} does not have the same key ({error.reason or error})") from None
        if isinstance(error, OSError):
            raise PeerError(f"cannot reach {where}: {error.strerror or error}") from None
        if isinstance(error, Dropped):
            raise PeerError(f"{where} closed the connection; is the key the same?") from None
        raise


def _dial(
    one: socket.socket, place: Place, key: RunKey | None, greeting: bytes
) -> Generator[Wait, None, AnyConnection]:
    wrong = one.connect_ex(place)
    if wrong == errno.EINPROGRESS:
        yield Wait(one, select.POLLOUT)
        wrong = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if wrong:
        raise OSError(wrong, os.strerror(wrong))
    secured: AnyConnection = one
    if key is not None:
        secured = yield from secure(one, key, context_of(key, server=False), server=False)
    yield from send_steps(secured, one, greeting)
    return secured


# --- a connection that has greeted: blocking, one thread at each end --------------------------------------------------


def raw_of(one: AnyConnection) -> socket.socket:
    """The socket below."""
    return one.raw if isinstance(one, TlsConnection) else one


def send_all(one: AnyConnection, parts: Sequence[memoryview | bytes]) -> None:
    """All of it; `OSError` where the connection is gone."""
    left = [memoryview(part).cast("B") for part in parts]
    while left:
        taken = one.sendmsg(left)
        while left and taken >= len(left[0]):
            taken -= len(left.pop(0))
        if taken:
            left[0] = left[0][taken:]


def receive_all(one: AnyConnection, into: memoryview) -> None:
    """So much as there is room for; `ClosedError` where the other side has closed before."""
    got = 0
    while got < len(into):
        came = one.recvmsg_into([into[got:]], 0, socket.MSG_WAITALL)[0]
        if not came:
            raise ClosedError("closed")
        got += came


def shut(one: AnyConnection) -> None:
    """Whoever sends or receives on it, here or there, is told."""
    with contextlib.suppress(OSError):
        raw_of(one).shutdown(socket.SHUT_RDWR)
