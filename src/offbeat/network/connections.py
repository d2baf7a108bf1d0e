"""How processes on different hosts come to be connected, each to each.

Each listens on a port that the kernel chooses, only until all have met; those with higher numbers connect to those with
lower ones. With a key, every connection is mutual TLS with it (`network.tls`); whoever connects must then also know the
group's token, and so must whoever is connected to. `DEAD_AFTER_S` without an answer from the other host, the kernel
ends a connection: a link that was cut is noticed, whether anything is being sent or not.

Laws. Nobody is waited for: all connections that are being made go on together, in one thread. Who does not show the
key, greet in this protocol and know the token within `GREETING_S` is dropped. So is the oldest of those who have not
greeted yet, where there are more than `MOST_GREETING` from one address of a peer, or from all other addresses together,
or more than `MOST_GREETING_IN_ALL`: from where most come. A peer that was dropped among strangers tries again.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.network.keys import RunKey
from offbeat.network.tls import Stream, TlsConnection, TlsStream, context_of

PROTOCOL = 2
DEAD_AFTER_S = 7.0
GREETING_S = 5.0  # for whoever connects to say who it is
MOST_GREETING = 64  # connections from one address that have not said who they are,
MOST_GREETING_IN_ALL = 256
_HELLO = struct.Struct("<8sIIII16s")  # magic, protocol, group rank of the greeter and of the greeted, number, token
_MAGIC = b"offbeat\1"
_BACKLOG = 256
_ACCEPTED_AT_ONCE = 32
_GLANCE_S = 0.05
_ATTEMPTS = 8  # to connect, with pauses from _PAUSE_S that double
_PAUSE_S = 0.02


class Unreachable(Exception):  # noqa: N818 - it names a state, and is turned into a PeerError by whoever knows the ranks
    """A peer could not be connected to, or did not connect, in time."""

    def __init__(self, peer: int, why: str) -> None:
        super().__init__(why)
        self.peer = peer


class Place(NamedTuple):
    """Where a process listens."""

    address: str
    port: int


class Wait(NamedTuple):
    """What a connection that is being made waits for: an event of its socket, or a moment."""

    one: socket.socket | None
    events: int = 0
    until_s: float = 0.0


class Dropped(Exception):  # noqa: N818 - a state of the other side
    """The other side has closed a connection before it was greeted."""


Steps = Generator[Wait, None, None]
AnyConnection = socket.socket | TlsConnection


@dataclass(slots=True)
class _Task:
    """A connection that is being made; `address` is where an accepted one came from."""

    steps: Steps
    wait: Wait
    accepted: socket.socket | None = None
    address: str = ""
    end_s: float = float("inf")


class Listener:
    """Where a process can be reached until all have met."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(family_of(address), socket.SOCK_STREAM)
        self._socket.bind((address, 0))
        self._socket.listen(_BACKLOG)
        self._socket.setblocking(False)
        self.place = Place(address, self._socket.getsockname()[1])

    def meet(
        self,
        rank: int,
        others: Mapping[int, Place],
        streams: int,
        token: bytes,
        timeout_s: float,
        key: RunKey | None = None,
    ) -> dict[int, list[Stream]]:
        """So many streams to each of the others, in the same order on both sides. `Unreachable` names who failed.

        Strangers are not answered.
        """
        meeting = _Meeting(self, rank, others, streams, token, timeout_s, key)
        try:
            meeting.run()
            return meeting.streams()
        except BaseException:
            meeting.close()
            raise

    def accept(self) -> tuple[socket.socket, str] | None:
        """The next who has connected, and from which address; None where there is nobody."""
        try:
            one, where = self._socket.accept()
        except BlockingIOError:
            return None
        except OSError:  # it has gone again
            return None
        send_at_once(one)
        return one, str(where[0]).partition("%")[0]

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


class _Meeting:
    """All connections of one rank, while they are made."""

    def __init__(
        self,
        listener: Listener,
        rank: int,
        others: Mapping[int, Place],
        streams: int,
        token: bytes,
        timeout_s: float,
        key: RunKey | None,
    ) -> None:
        self._listener, self._rank, self._others, self._token = listener, rank, others, token
        self._streams, self._key, self._timeout_s = streams, key, timeout_s
        self._end_s = time.monotonic() + timeout_s
        self._each = streams if key is None else 2 * streams  # TLS has a connection for each direction
        self._met: dict[int, dict[int, AnyConnection]] = {peer: {} for peer in others}
        self._tasks = [_Task(self._reach(peer), Wait(None)) for peer in sorted(others) if peer < rank]
        self._expected_from = {place.address.partition("%")[0] for peer, place in others.items() if peer > rank}
        self._opened: set[socket.socket] = set()
        self._contexts = {} if key is None else {side: context_of(key, server=side) for side in (False, True)}

    def run(self) -> None:
        """Until all are met."""
        while missing := [peer for peer in sorted(self._others) if len(self._met[peer]) < self._each]:
            now = time.monotonic()
            if now > self._end_s:
                self._raise_late(missing[0])
            watch = select.poll()
            watch.register(self._listener.fileno(), select.POLLIN)
            for task in self._tasks:
                if task.wait.one is not None:
                    watch.register(task.wait.one.fileno(), task.wait.events)
            pauses = [task.wait.until_s for task in self._tasks if task.wait.one is None]
            ready = {
                number for number, _ in watch.poll(1000 * min(_GLANCE_S, max(0.0, min(pauses, default=1e9) - now)))
            }
            now = time.monotonic()
            for task in tuple(self._tasks):
                one = task.wait.one
                if now > task.end_s:
                    self._drop(task)
                elif (now >= task.wait.until_s) if one is None else (one.fileno() in ready):
                    self._go_on(task)
            if self._listener.fileno() in ready:
                self._accept()
        for task in tuple(self._tasks):  # strangers
            self._drop(task)

    def streams(self) -> dict[int, list[Stream]]:
        """What was met, ready for use."""
        for connected in self._met.values():
            for one in connected.values():
                set_up(one.raw if isinstance(one, TlsConnection) else one)
        return {peer: list(self._of(peer, connected)) for peer, connected in self._met.items()}

    def _of(self, peer: int, connected: Mapping[int, AnyConnection]) -> Iterator[Stream]:
        """Of each two connections under TLS, the first is for what the lower rank sends."""
        each = [connected[number] for number in range(self._each)]
        yield from (one for one in each if isinstance(one, socket.socket))
        secured = [one for one in each if isinstance(one, TlsConnection)]
        for first, second in zip(secured[::2], secured[1::2], strict=True):
            yield TlsStream(first, second) if self._rank < peer else TlsStream(second, first)

    def close(self) -> None:
        for task in self._tasks:
            task.steps.close()
        for one in self._opened:
            one.close()

    # --- connecting -------------------------------------------------------------------------------------------------

    def _reach(self, peer: int) -> Steps:
        """Every connection to a lower rank, one after the other."""
        where = "{}:{}".format(*self._others[peer])
        for number in range(self._each):
            for attempt in range(_ATTEMPTS):
                if attempt:
                    yield Wait(None, until_s=time.monotonic() + _PAUSE_S * 2**attempt)
                try:
                    yield from self._connect(peer, number)
                    break
                except Dropped:
                    continue
                except ssl.SSLError as error:
                    raise Unreachable(peer, f"{where} does not have the same key ({error.reason or error})") from None
                except OSError as error:
                    raise Unreachable(peer, f"{where}: {error.strerror or error}") from None
            else:
                raise Unreachable(peer, f"{where} did not answer as a rank of this group")

    def _connect(self, peer: int, number: int) -> Steps:
        place = self._others[peer]
        one = socket.socket(family_of(place.address), socket.SOCK_STREAM)
        self._opened.add(one)
        try:
            send_at_once(one)
            one.bind((self._listener.place.address, 0))
            wrong = one.connect_ex(place)
            if wrong == errno.EINPROGRESS:
                yield Wait(one, select.POLLOUT)
                wrong = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if wrong:
                raise OSError(wrong, os.strerror(wrong))
            try:
                secured = yield from self._secure(one, server=False)
                yield from send_steps(secured, one, self._hello(peer, number))
                answer = yield from receive_steps(secured, one, _HELLO.size)
            except (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError, ssl.SSLZeroReturnError):
                raise Dropped from None
            if self._greeting(answer) != (peer, number):
                raise Dropped
        except BaseException:
            self._opened.discard(one)
            one.close()
            raise
        self._met[peer][number] = secured

    # --- accepting --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            came = self._listener.accept()
            if came is None:
                return
            one, where = came
            self._opened.add(one)
            address = where if where in self._expected_from else "elsewhere"
            crowds = Counter(task.address for task in self._tasks if task.accepted is not None)
            if crowds[address] >= MOST_GREETING:
                self._drop_oldest(address)
            elif crowds.total() >= MOST_GREETING_IN_ALL:
                self._drop_oldest(crowds.most_common(1)[0][0])
            task = _Task(self._admit(one), Wait(one, select.POLLIN), one, address, time.monotonic() + GREETING_S)
            self._tasks.append(task)

    def _admit(self, one: socket.socket) -> Steps:
        """Whoever has connected becomes a peer, or is dropped."""
        try:
            secured = yield from self._secure(one, server=True)
            came = self._greeting((yield from receive_steps(secured, one, _HELLO.size)))
            expects = came is not None and came[0] > self._rank and came[1] < self._each
            if came is not None and expects and came[1] not in self._met.get(came[0], {came[1]: one}):
                yield from send_steps(secured, one, self._hello(*came))
                self._met[came[0]][came[1]] = secured
                return
        except (OSError, Dropped):
            pass
        self._opened.discard(one)
        one.close()

    def _drop_oldest(self, address: str) -> None:
        self._drop(next(task for task in self._tasks if task.accepted is not None and task.address == address))

    def _drop(self, task: _Task) -> None:
        if task.accepted is None:
            return
        self._tasks.remove(task)
        task.steps.close()
        self._opened.discard(task.accepted)
        task.accepted.close()

    # --- both -------------------------------------------------------------------------------------------------------

    def _go_on(self, task: _Task) -> None:
        try:
            task.wait = next(task.steps)
        except StopIteration:
            self._tasks.remove(task)

    def _secure(self, one: socket.socket, *, server: bool) -> Generator[Wait, None, AnyConnection]:
        """The same connection under TLS, if there is a key. `SSLError` where the other side does not have it."""
        if self._key is None:
            return one
        return (yield from secure(one, self._key, self._contexts[server], server=server))

    def _hello(self, peer: int, number: int) -> bytes:
        return _HELLO.pack(_MAGIC, PROTOCOL, self._rank, peer, number, self._token)

    def _greeting(self, hello: bytes) -> tuple[int, int] | None:
        """Rank and number of whoever greets properly; None for anybody else."""
        magic, protocol, peer, greeted, number, theirs = _HELLO.unpack(hello)
        right = magic == _MAGIC and protocol == PROTOCOL and greeted == self._rank
        return (peer, number) if right and secrets.compare_digest(theirs, self._token) else None

    def _raise_late(self, peer: int) -> None:
        how = "it did not connect" if peer > self._rank else "it did not answer"
        raise Unreachable(peer, f"{how} within {self._timeout_s:g} s")


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def secure(
    one: socket.socket, key: RunKey, context: ssl.SSLContext, *, server: bool
) -> Generator[Wait, None, TlsConnection]:
    """The same connection under TLS. `SSLError` where the other side does not have the key."""
    secured = TlsConnection(one, context, server=server)
    for events in secured.handshake(key):
        yield Wait(one, events)
    return secured


def send_steps(one: AnyConnection, below: socket.socket, data: bytes) -> Steps:
    while True:
        try:
            if one.send(data, socket.MSG_DONTWAIT) < len(data):
                raise Dropped
            return
        except BlockingIOError:
            yield Wait(below, select.POLLOUT)


def receive_steps(one: AnyConnection, below: socket.socket, size_bytes: int) -> Generator[Wait, None, bytes]:
    got = b""
    while len(got) < size_bytes:
        try:
            came = one.recv(size_bytes - len(got), socket.MSG_DONTWAIT)
        except BlockingIOError:
            yield Wait(below, select.POLLIN)
            continue
        if not came:
            raise Dropped
        got += came
    return got


def send_at_once(one: socket.socket) -> None:
    """Without waiting for room, nor for more to send."""
    one.setblocking(False)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def set_up(one: socket.socket) -> None:
    """Who is to wait waits in the kernel, and a silent host is given up."""
    one.settimeout(None)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, int(DEAD_AFTER_S))
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * DEAD_AFTER_S))
