"""What waits to be sent to another host, by one thread: bytes of regions in pieces, and messages after them."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from offbeat.server.remote.frames import GRADIENTS, PIECE_BYTES, Header

LEAST_BYTES = 32 * 1024
QUICK_S, SLOW_S = 0.0025, 0.01
_LOOK_S = 0.2  # where there is nothing to send
_MOST_PARTS = 64  # of memory, in one frame


class Pace:
    """How much of a gradient the kernel is given at a time. What it has taken can be cancelled no more, but large
    pieces cost less: one is to take `QUICK_S` to `SLOW_S` on this connection, and the kernel keeps about one unsent.
    """

    def __init__(self) -> None:
        self.piece_bytes = LEAST_BYTES

    def begin(self, one: socket.socket) -> None:
        """On a new connection."""
        self._one = one
        self._set(LEAST_BYTES)

    def _set(self, piece_bytes: int) -> None:
        self.piece_bytes = piece_bytes
        self._one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, piece_bytes)

    def sent(self, size_bytes: int, seconds: float) -> None:
        """A piece of so many bytes has been given to the kernel, in so long."""
        if size_bytes < self.piece_bytes:
            return
        if seconds < QUICK_S and self.piece_bytes < PIECE_BYTES:
            self._set(2 * self.piece_bytes)
        elif seconds > SLOW_S and self.piece_bytes > LEAST_BYTES:
            self._set(self.piece_bytes // 2)


class _Write:
    """Bytes of a region that are to be sent: parts that lie side by side in it, each wherever it is in memory here."""

    def __init__(self, header: Header, offset: int, data: memoryview) -> None:
        self.header = header  # without its offset and size
        self._parts = {offset: data}
        self._start, self._end = offset, offset + len(data)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def take(self, offset: int, data: memoryview) -> bool:
        """Whether this is sent with it: beside the others, or in place of those that it covers."""
        end = offset + len(data)
        if end < self._start or offset > self._end:
            return False
        covered, at = [], max(offset, self._start)
        while at < min(end, self._end):
            if at not in self._parts:
                return False
            covered.append(at)
            at += len(self._parts[at])
        if at > max(end, self._start):  # it covers only a part of the last one
            return False
        for one in covered:
            del self._parts[one]
        self._parts[offset] = data
        self._start, self._end = min(offset, self._start), max(end, self._end)
        return True

    def piece(self, most_bytes: int) -> tuple[Header, list[memoryview]]:
        """So much of it from its beginning, which is left out from then on."""
        offset = self._start
        found: list[memoryview] = []
        while self._parts and self._start - offset < most_bytes and len(found) < _MOST_PARTS:
            data = self._parts.pop(self._start)
            taken = min(len(data), most_bytes - (self._start - offset))
            found.append(data[:taken])
            self._start += taken
            if taken < len(data):
                self._parts[self._start] = data[taken:]
        return self.header._replace(size=self._start - offset, offset=offset), found


class Outgoing:
    """What waits to be sent on UP_DATA, in order: bytes of regions, and messages that follow them."""

    def __init__(self) -> None:
        self._queue: deque[_Write | tuple[Header, bytes]] = deque()
        self._changed = threading.Condition()
        self._minibatch = 0  # the latest of which gradients were written
        self._busy = False

    def write(self, header: Header, data: memoryview) -> None:
        """These bytes, as they are when they are sent. Gradients of earlier minibatches are not wanted by then."""
        what = header._replace(size=0, offset=0)
        with self._changed:
            if header.region in GRADIENTS and header.number > self._minibatch:
                self._minibatch = header.number
                self._queue = deque(one for one in self._queue if not self._is_late(one))
            last = self._queue[-1] if self._queue else None
            if not (isinstance(last, _Write) and last.header == what and last.take(header.offset, data)):
                self._queue.append(_Write(what, header.offset, data))
            self._changed.notify()

    def _is_late(self, one: _Write | tuple[Header, bytes]) -> bool:
        return isinstance(one, _Write) and one.header.region in GRADIENTS and one.header.number < self._minibatch

    def add(self, header: Header, payload: bytes) -> None:
        with self._changed:
            if (header, payload) not in self._queue:  # said again, while it waits
                self._queue.append((header, payload))
            self._changed.notify()

    def next(
        self, cancelled: int, piece_bytes: int = PIECE_BYTES
    ) -> tuple[Header, Sequence[memoryview | bytes]] | None:
        """The next frame, in some time; None: there is none yet. Gradients of minibatches up to `cancelled` are
        left out."""
        with self._changed:
            self._busy = False
            if not self._queue:
                self._changed.notify_all()
                self._changed.wait(_LOOK_S)
            while self._queue:
                first = self._queue[0]
                if isinstance(first, tuple):
                    self._queue.popleft()
                    self._busy = True
                    return first[0], [first[1]]
                if first.header.region in GRADIENTS and first.header.number <= cancelled:
                    self._queue.popleft()
                    continue
                found = first.piece(piece_bytes)
                if not first:
                    self._queue.popleft()
                self._busy = True
                return found
            return None

    def drain(self, timeout_s: float) -> None:
        """Until all is sent, or time has passed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue and not self._busy, timeout_s)


class Droppable(Protocol):
    """What has connections."""

    def drop(self) -> None:
        """In a forked child: they are the parent's."""


def close_in_children(link: Droppable) -> None:
    """A process that is forked off (to load data) must not keep the connections open when its parent dies."""
    known = weakref.ref(link)

    def close() -> None:
        mine = known()
        if mine is not None:
            mine.drop()

    os.register_at_fork(after_in_child=close)
