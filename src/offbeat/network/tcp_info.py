"""What the kernel counts of TCP connections, and how fast a connection is by that.

A connection's rate is what was acknowledged over the time in which there was something to send and the receiver had
room for it: a sender that waits for its own work, and a receiver that does not read, do not make it slower.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from offbeat.network.tls import Stream

_INFO = struct.Struct("=120xQQ32xQQ")  # of `tcp_info` in linux/tcp.h
WINDOW_BYTES = 8 * 1024 * 1024  # over which a rate is measured
_LARGE_BYTES = 64 * 1024  # of smaller sends the latency would be measured
_BUSY_S = 0.04  # at least so long: the kernel counts in ticks of some milliseconds
_WINDOWS = 8  # of which the fastest counts: a busy machine only makes a connection slower


class TcpCounts(NamedTuple):
    """Of one connection since it began: bytes of payload; seconds of sending, and of those without room over there."""

    acked_bytes: int
    received_bytes: int
    busy_s: float
    no_room_s: float


def read_counts(one: Stream) -> TcpCounts:
    acked, received, busy_us, no_room_us = _INFO.unpack(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    return TcpCounts(acked, received, busy_us / 1e6, no_room_us / 1e6)


class SendRate:
    """How fast memory goes to one peer over the streams to it."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = list(streams)
        self._rates: deque[float] = deque(maxlen=_WINDOWS)
        self._sent_bytes = self._sends = 0
        self._before = self._read()

    @property
    def bytes_per_s(self) -> float:
        """The fastest of the last windows; 0 before there is one."""
        return max(self._rates, default=0.0)

    def count(self, size_bytes: int) -> bool:
        """So much was sent; whether that completes a window, so that the rate is another one."""
        self._sent_bytes += size_bytes
        self._sends += 1
        if self._sent_bytes < WINDOW_BYTES:
            return False
        now = self._read()
        acked, busy_s = progress(self._before, now)
        large = self._sent_bytes >= _LARGE_BYTES * self._sends
        if large and busy_s < _BUSY_S:
            return False
        self._before, self._sent_bytes, self._sends = now, 0, 0
        if large:
            self._rates.append(acked / busy_s)
        return large

    def _read(self) -> dict[int, TcpCounts]:
        """By the number of the stream; without those that are closed, and nothing of a kernel that does not count."""
        found = {}
        for number, one in enumerate(self._streams):
            with contextlib.suppress(OSError, struct.error):
                found[number] = read_counts(one)
        return found


def progress(before: Mapping[int, TcpCounts], now: Mapping[int, TcpCounts]) -> tuple[int, float]:
    """Bytes and seconds of all streams together, which send at the same time."""
    pairs = [(before[number], now[number]) for number in before.keys() & now.keys()]
    acked = sum(new.acked_bytes - old.acked_bytes for old, new in pairs)
    busy_s = [(new.busy_s - old.busy_s) - (new.no_room_s - old.no_room_s) for old, new in pairs]
    return acked, max(busy_s, default=0.0)
