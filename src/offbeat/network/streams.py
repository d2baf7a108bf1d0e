"""The streams that join two processes: memory goes out in pieces, and comes in as pieces, in the same order.

What is sent is not copied: it is read when the kernel takes it, and `sent` says how many sends are through. Up to what
the kernel takes at once, the caller sends by itself; the rest waits in one queue, from which each stream's thread takes
the next piece when it is free, so that a slow stream does not hold up the others.

Before each piece goes a header: a tag of the caller, which must be the same on both sides; which send this is of all on
this link; where in it the piece starts, and how long it is. The receiver asks for pieces in order and finds the stream
that has the next one. What it did not ask for stays in the kernel, so a fast sender is held back by TCP itself, and
nothing that is received sizes memory.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

PIECE_BYTES = 512 * 1024
TAG_BYTES = 40
_HEADER = struct.Struct(f"<4sIQQ{TAG_BYTES}s")  # magic, size, send, offset, tag
HEADER_BYTES = _HEADER.size
_MAGIC = b"obp1"
SLICE_S = 0.02  # how long to wait before looking around
_SLICE = struct.pack("@ll", 0, int(SLICE_S * 1e6))


class ClosedError(Exception):
    """The other side has closed the connection, or does not answer."""


class MismatchError(Exception):
    """Another piece came than the one that was expected; `tag` is the sender's."""

    def __init__(self, tag: bytes) -> None:
        super().__init__("received another piece than expected")
        self.tag = tag


class _Piece(NamedTuple):
    send: int
    header: bytes
    memory: memoryview
    kept: object  # what the memory belongs to


class _Header(NamedTuple):
    size: int
    send: int
    offset: int
    tag: bytes


def pieces_of(size_bytes: int) -> list[tuple[int, int]]:
    """Offset and size of each piece of a send."""
    return [(at, min(PIECE_BYTES, size_bytes - at)) for at in range(0, size_bytes, PIECE_BYTES)]


class Link:
    """The streams to one peer. One thread sends and receives; `shut` may be called by any."""

    def __init__(self, streams: Sequence[socket.socket]) -> None:
        self.sends = 0  # begun
        self.received = 0  # sends of the peer that have wholly come
        self._streams = list(streams)
        self._queue: deque[_Piece] = deque()
        self._begun: deque[_Piece] = deque()  # what is left of a piece that the first stream has begun
        self._ended = False
        self._threads: list[threading.Thread] = []
        self._through = threading.Condition()
        self._left: dict[int, int] = {}  # send -> pieces that have not been handed to the kernel
        self._broken = ""
        self._headers: list[_Header | None] = [None] * len(self._streams)
        self._scratch = bytearray(HEADER_BYTES)
        for one in self._streams:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SLICE)

    # --- out --------------------------------------------------------------------------------------------------------

    def send(self, tag: bytes, memory: memoryview, kept: object) -> None:
        """Begin to send memory, which stays as it is until `wait_sent`; `kept` is what it belongs to."""
        number, self.sends = self.sends, self.sends + 1
        pieces: deque[_Piece] = deque()
        for offset, size in pieces_of(len(memory)):
            header = _HEADER.pack(_MAGIC, size, number, offset, tag)
            pieces.append(_Piece(number, header, memory[offset : offset + size], kept))
        with self._through:
            idle = not self._left
        rest: _Piece | None = None
        while idle and pieces:
            rest = self._send_now(pieces[0])
            if rest is pieces[0]:
                break
            pieces.popleft()
            if rest is not None:
                self._begun.append(rest)
                break
        left = len(pieces) + len(self._begun) if idle else len(pieces)
        if not left:
            return
        with self._through:
            self._left[number] = left
            self._queue.extend(pieces)
            self._through.notify_all()
        self._start()

    def _send_now(self, piece: _Piece) -> _Piece | None:
        """As much as the kernel takes at once: what is left of the piece."""
        try:
            taken = self._streams[0].sendmsg([piece.header, piece.memory], [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return piece
        except OSError as error:
            self._break(error)
            return piece
        header, memory = piece.header[taken:], piece.memory[max(0, taken - len(piece.header)) :]
        return _Piece(piece.send, header, memory, piece.kept) if header or len(memory) else None

    def _start(self) -> None:
        if not self._threads:
            for stream in range(len(self._streams)):
                thread = threading.Thread(target=self._run, args=(stream,), name="offbeat sender", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _run(self, stream: int) -> None:
        """A stream's thread."""
        out = self._streams[stream]
        while (piece := self._next(stream)) is not None:
            try:
                self._send_all(out, piece)
            except OSError as error:
                self._break(error)
                return
            with self._through:
                self._left[piece.send] -= 1
                if not self._left[piece.send]:
                    del self._left[piece.send]
                    self._through.notify_all()
            del piece

    def _next(self, stream: int) -> _Piece | None:
        """What this stream is to send next; None at the end."""
        with self._through:
            while not self._ended:
                if stream == 0 and self._begun:
                    return self._begun.popleft()
                if self._queue:
                    return self._queue.popleft()
                self._through.wait()
            return None

    def _send_all(self, out: socket.socket, piece: _Piece) -> None:
        header, memory = piece.header, piece.memory
        while header or len(memory):
            taken = out.sendmsg([header, memory])
            memory = memory[max(0, taken - len(header)) :]
            header = header[taken:]

    def wait_sent(self, sends: int, look: Callable[[], None]) -> None:
        """Until the first so many sends have left the caller's memory; `look()` is called between slices of time."""
        while True:
            with self._through:
                if self._is_through(sends) or (self._through.wait(SLICE_S) and self._is_through(sends)):
                    return
            self._check()
            look()

    def _is_through(self, sends: int) -> bool:
        return not self._left or min(self._left) >= sends

    # --- in ---------------------------------------------------------------------------------------------------------

    def receive(self, tag: bytes, offset: int, memory: memoryview, look: Callable[[], None]) -> None:
        """The next piece of the peer's current send, into memory of its size."""
        wanted = _Header(len(memory), self.received, offset, tag)
        if len(self._streams) == 1:
            self._receive_next(wanted, memory, look)
            return
        stream = self._find(wanted, look)
        self._fill(self._streams[stream], memory, look)
        self._headers[stream] = None

    def end_receive(self) -> None:
        """The current send has come wholly: the next piece is of the next one."""
        self.received += 1

    def _receive_next(self, wanted: _Header, memory: memoryview, look: Callable[[], None]) -> None:
        """The header and its piece at once, where there is one stream only."""
        header, got, size = memoryview(self._scratch), 0, HEADER_BYTES + len(memory)
        while got < size:
            before = got
            got += self._take_in(self._streams[0], [header[got:], memory[max(0, got - HEADER_BYTES) :]], look)
            if before < HEADER_BYTES <= got and (came := self._parse_header()) != wanted:
                raise MismatchError(came.tag)

    def _find(self, wanted: _Header, look: Callable[[], None]) -> int:
        """The stream that has this piece next."""
        while True:
            for stream, header in enumerate(self._headers):
                if header == wanted:
                    return stream
                if header is not None and (header.send < wanted.send or header[1:3] == wanted[1:3]):
                    raise MismatchError(header.tag)
            free = [stream for stream, header in enumerate(self._headers) if header is None]
            if not free:
                raise MismatchError(next(header.tag for header in self._headers if header is not None))
            readable = self._readable(free)
            for stream in readable:
                self._fill(self._streams[stream], memoryview(self._scratch), look)
                self._headers[stream] = self._parse_header()
            if not readable:
                self._check()
                look()

    def _readable(self, streams: Sequence[int]) -> list[int]:
        watch = select.poll()
        numbers = {self._streams[stream].fileno(): stream for stream in streams}
        for number in numbers:
            watch.register(number, select.POLLIN)
        return [numbers[number] for number, _ in watch.poll(1000 * SLICE_S)]

    def _parse_header(self) -> _Header:
        magic, *rest = _HEADER.unpack(self._scratch)
        header = _Header(*rest)
        if magic != _MAGIC or header.size > PIECE_BYTES:
            raise ClosedError("received data that is not a piece of this protocol")
        return header

    def _fill(self, one: socket.socket, memory: memoryview, look: Callable[[], None]) -> None:
        got = 0
        while got < len(memory):
            got += self._take_in(one, [memory[got:]], look)

    def _take_in(self, one: socket.socket, into: list[memoryview], look: Callable[[], None]) -> int:
        """Wait until all of it is filled, or time has passed: how many bytes came."""
        while True:
            try:
                got = one.recvmsg_into(into, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                self._check()
                look()
                continue
            except OSError as error:
                raise ClosedError(_why(error)) from None
            if not got:
                raise ClosedError("closed")
            return got

    # --- the end ----------------------------------------------------------------------------------------------------

    def _break(self, error: OSError) -> None:
        with self._through:
            self._broken = self._broken or _why(error)
            self._through.notify_all()

    def _check(self) -> None:
        if self._broken:
            raise ClosedError(self._broken)

    def shut(self) -> None:
        """Close the connections; what is being sent or received here ends with an error."""
        self._break(ConnectionAbortedError("this side has left"))
        for one in self._streams:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self, timeout_s: float = 1.0) -> None:
        """After `shut`: wait for the threads, and let go of the sockets."""
        with self._through:
            self._ended = True
            self._through.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)
        for one in self._streams:
            one.close()

    def drop(self) -> None:
        """In a forked child: the sockets are the parent's, and are only closed here."""
        for one in self._streams:
            one.close()

    def filenos(self) -> list[int]:
        return [one.fileno() for one in self._streams]


def _why(error: OSError) -> str:
    told: Any = error.strerror
    return str(told or error)
