"""What waits to be sent to another host, by one thread: bytes of regions in pieces, and messages after them."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from offbeat.server.remote.frames import GRADIENTS, PIECE_BYTES, Header

LEAST_BYTES = 128 * 1024
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


class _Extent(NamedTuple):
    """Bytes of a region, wherever they are in memory here."""

    offset: int
    data: memoryview

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


@dataclass(slots=True)
class _Write:
    """Bytes of a region that are to be sent: parts that lie side by side in it, in order."""

    header: Header  # without its offset and size
    parts: deque[_Extent]

    def take(self, new: _Extent) -> bool:
        """Whether this is sent with it: beside the others, or in place of those that it covers."""
        if new.end == self.parts[0].offset:
            self.parts.appendleft(new)
            return True
        if new.offset == self.parts[-1].end:
            self.parts.append(new)
            return True
        before = [one for one in self.parts if one.end <= new.offset]
        after = [one for one in self.parts if one.offset >= new.end]
        covered = [one for one in self.parts if new.offset <= one.offset and one.end <= new.end]
        if not covered or len(before) + len(covered) + len(after) < len(self.parts):
            return False
        self.parts = deque((*before, new, *after))
        return True

    def piece(self, most_bytes: int) -> tuple[Header, list[memoryview]]:
        """So much of it from its beginning, which is left out from then on."""
        offset, size = self.parts[0].offset, 0
        found: list[memoryview] = []
        while self.parts and size < most_bytes and len(found) < _MOST_PARTS:
            at, data = self.parts.popleft()
            taken = min(len(data), most_bytes - size)
            found.append(data[:taken])
            size += taken
            if taken < len(data):
                self.parts.appendleft(_Extent(at + taken, data[taken:]))
        return self.header._replace(size=size, offset=offset), found


class Outgoing:
    """What waits to be sent on UP_DATA, in order: bytes of regions, and messages that follow them."""

    def __init__(self) -> None:
        self._queue: deque[_Write | tuple[Header, bytes]] = deque()
        self._changed = threading.Condition()
        self._busy = False

    def write(self, header: Header, data: memoryview) -> None:
        """These bytes, as they are when they are sent."""
        what, part = header._replace(size=0, offset=0), _Extent(header.offset, data)
        with self._changed:
            last = self._queue[-1] if self._queue else None
            if not (isinstance(last, _Write) and last.header == what and last.take(part)):
                self._queue.append(_Write(what, deque([part])))
            self._changed.notify()

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
                if not first.parts:
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
