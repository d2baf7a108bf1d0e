"""How processes on different hosts come to be connected, each to each.

Each listens on a port that the kernel chooses, only until all have met; those with higher numbers connect to those with
lower ones. Whoever connects must know the group's token, and so must whoever is connected to. `DEAD_AFTER_S` without an
answer from the other host, the kernel ends a connection: a link that was cut is noticed, whether anything is being sent
or not.
"""

from __future__ import annotations

import secrets
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import NamedTuple

PROTOCOL = 1
DEAD_AFTER_S = 7.0
_HELLO = struct.Struct("<8sIIII16s")  # magic, protocol, group rank of the greeter and of the greeted, stream, token
_MAGIC = b"offbeat\1"
_GLANCE_S = 0.2
_GREETING_S = 2.0  # for whoever connects to say who it is


class Unreachable(Exception):  # noqa: N818 - it names a state, and is turned into a PeerError by whoever knows the ranks
    """A peer could not be connected to, or did not connect, in time."""

    def __init__(self, peer: int, why: str) -> None:
        super().__init__(why)
        self.peer = peer


class Place(NamedTuple):
    """Where a process listens."""

    address: str
    port: int


class Listener:
    """Where a process can be reached until all have met."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(_family(address), socket.SOCK_STREAM)
        self._socket.bind((address, 0))
        self._socket.listen(256)
        self.place = Place(address, self._socket.getsockname()[1])

    def meet(
        self, rank: int, others: Mapping[int, Place], streams: int, token: bytes, timeout_s: float
    ) -> dict[int, list[socket.socket]]:
        """So many connections to each of the others, in the same order on both sides. `Unreachable` names who failed.

        Strangers are not answered.
        """
        end = time.monotonic() + timeout_s
        met: dict[int, dict[int, socket.socket]] = {peer: {} for peer in others}
        with ExitStack() as on_failure:
            for peer in sorted(other for other in others if other < rank):
                for stream in range(streams):
                    one = on_failure.enter_context(socket.socket(_family(others[peer].address), socket.SOCK_STREAM))
                    self._connect(one, rank, peer, others[peer], stream, token, end)
                    met[peer][stream] = one
            while missing := sorted(peer for peer in others if peer > rank and len(met[peer]) < streams):
                self._socket.settimeout(_GLANCE_S)
                try:
                    one = on_failure.enter_context(self._socket.accept()[0])
                except TimeoutError:
                    if time.monotonic() > end:
                        raise Unreachable(missing[0], f"it did not connect within {timeout_s:g} s") from None
                    continue
                one.settimeout(_GREETING_S)
                came = _greeted_by(one, rank, token)
                if came is None or came[0] not in missing or not 0 <= came[1] < streams or came[1] in met[came[0]]:
                    one.close()
                    continue
                try:
                    one.sendall(_HELLO.pack(_MAGIC, PROTOCOL, rank, came[0], came[1], token))
                except OSError as error:
                    raise Unreachable(came[0], str(error)) from None
                met[came[0]][came[1]] = one
            on_failure.pop_all()
        for connected in met.values():
            for one in connected.values():
                _set_up(one)
        return {peer: [connected[stream] for stream in range(streams)] for peer, connected in met.items()}

    def _connect(
        self, one: socket.socket, rank: int, peer: int, place: Place, stream: int, token: bytes, end: float
    ) -> None:
        try:
            one.settimeout(max(0.001, end - time.monotonic()))
            one.bind((self.place.address, 0))
            one.connect(place)
            one.sendall(_HELLO.pack(_MAGIC, PROTOCOL, rank, peer, stream, token))
        except OSError as error:
            raise Unreachable(peer, f"{place.address}:{place.port}: {error}") from None
        if _greeted_by(one, rank, token) != (peer, stream):
            raise Unreachable(peer, f"{place.address}:{place.port} did not answer as a rank of this group")

    def close(self) -> None:
        self._socket.close()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _greeted_by(one: socket.socket, rank: int, token: bytes) -> tuple[int, int] | None:
    """Rank and stream of whoever greets properly; None for anybody else."""
    try:
        hello = one.recv(_HELLO.size, socket.MSG_WAITALL)
    except OSError:
        return None
    if len(hello) != _HELLO.size:
        return None
    magic, protocol, peer, greeted, stream, theirs = _HELLO.unpack(hello)
    if magic != _MAGIC or protocol != PROTOCOL or greeted != rank or not secrets.compare_digest(theirs, token):
        return None
    return peer, stream


def _set_up(one: socket.socket) -> None:
    """Small messages go at once, and a silent host is given up."""
    one.settimeout(None)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, int(DEAD_AFTER_S))
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * DEAD_AFTER_S))
