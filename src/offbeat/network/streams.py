"""The streams that join two processes: memory goes out in pieces, and comes in as pieces, in the same order.

What is sent is not copied: it is read when the kernel takes it, and `wait_sent` says when that is over. Up to what
the kernel takes at once, the caller sends by itself. What is left waits in one queue. With one stream, and a caller
that does nothing but send and receive (an `Outbox` for all of its links), the caller goes on with it whenever it waits
for anything: no thread has to be woken. Otherwise each stream has a thread, which takes the next piece when it is free,
so that a slow stream does not hold up the others.

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
from statistics import median
from typing import Any, NamedTuple

from offbeat.network.tls import Stream, TlsStream, fileno_out, has_pending

PIECE_BYTES = 512 * 1024
TAG_BYTES = 40
_HEADER = struct.Struct(f"<4sIQQ{TAG_BYTES}s")  # magic, size, send, offset, tag
HEADER_BYTES = _HEADER.size
_MAGIC = b"obp1"
STREAMS = (1, 2, 4, 8)  # to one peer: what is tried
_MOST_STREAMS = 64  # of a process, where more than one is tried
_WORTH_IT = 1.05  # so much faster must twice as many streams be,
_TURNS = 5  # each measured so often
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


def streams_for(peers: int) -> int:
    """How many streams to each of so many peers are opened, of which some are kept."""
    return max(count for count in STREAMS if count == 1 or count * peers <= _MOST_STREAMS)


def streams_worth_it(most: int, most_s: float, time_s: Callable[[int], float]) -> int:
    """How many streams to use: twice as many as long as they are worth it, and while `most_s` of time is left.

    `time_s(streams)` makes a measurement and says how long it took. The two that are compared take turns, and the
    larger must win by its fastest and by its median: on a busy machine, one of them alone is chance.
    """
    best, spent_s = STREAMS[0], 0.0
    for count in STREAMS[1:]:
        if count > most or spent_s > most_s:
            break
        few_s: list[float] = []
        many_s: list[float] = []
        while len(few_s) < _TURNS and spent_s <= most_s:
            few_s.append(time_s(best))
            many_s.append(time_s(count))
            spent_s += few_s[-1] + many_s[-1]
        if min(few_s) < _WORTH_IT * min(many_s) or median(few_s) < _WORTH_IT * median(many_s):
            break
        best = count
    return best


class Outbox:
    """The links on which the caller's own thread sends: while it waits for one of them it goes on with all."""

    def __init__(self) -> None:
        self.waiting: list[Link] = []  # that have something to send

    def push(self) -> bool:
        """A piece of each, or what the kernel takes of it: whether anything is left."""
        for link in tuple(self.waiting):
            link.push()
        return bool(self.waiting)

    def wait(self, source: Stream | None) -> bool:
        """Until more can be sent, or something has come from the source; False where a slice of time has passed."""
        wanted = {link.fileno_out(): select.POLLOUT for link in self.waiting}
        if source is not None:  # which may be one of them
            wanted[source.fileno()] = wanted.get(source.fileno(), 0) | select.POLLIN
        watch = select.poll()
        try:
            for number, events in wanted.items():
                watch.register(number, events)
        except ValueError:  # another thread has closed one of them
            return False
        return bool(watch.poll(1000 * SLICE_S))


class Link:
    """The streams to one peer. One thread sends and receives; `shut` may be called by any.

    With an outbox, that thread is where most of its time goes, and the first stream needs none of its own.
    """

    def __init__(self, streams: Sequence[Stream], outbox: Outbox | None = None) -> None:
        self.sends = 0  # begun
        self.received = 0  # sends of the peer that have wholly come
        self._streams = list(streams)
        self._used = len(self._streams)
        self._outbox = outbox
        self._own: deque[_Piece] = deque()  # what the caller's thread has to send
        self._queue: deque[_Piece] = deque()  # what threads have
        self._begun: deque[_Piece] = deque()  # what is left of a piece that the first stream has begun
        self._ended = False
        self._threads: list[threading.Thread] = []
        self._through = threading.Condition()
        self._left: dict[int, int] = {}  # send -> pieces that have not been handed to the kernel
        self._broken = ""
        self._headers: list[_Header | None] = [None] * len(self._streams)
        self._closed: set[int] = set()  # streams that the peer has closed
        self._scratch = bytearray(HEADER_BYTES)
        for one in self._streams:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SLICE)

    # --- out --------------------------------------------------------------------------------------------------------

    def use(self, streams: int) -> None:
        """Send and receive on the first so many streams from now on; on both sides, while nothing is under way."""
        self._used = streams

    def keep(self, streams: int) -> None:
        """The same for good: the others are closed."""
        spare, self._streams = self._streams[streams:], self._streams[:streams]
        self.use(streams)
        with self._through:
            self._through.notify_all()
        for one in spare:
            one.close()

    def send(self, tag: bytes, memory: memoryview, kept: object) -> None:
        """Begin to send memory, which stays as it is until `wait_sent`; `kept` is what it belongs to."""
        number, self.sends = self.sends, self.sends + 1
        pieces: deque[_Piece] = deque()
        for offset, size in pieces_of(len(memory)):
            header = _HEADER.pack(_MAGIC, size, number, offset, tag)
            pieces.append(_Piece(number, header, memory[offset : offset + size], kept))
        if self._outbox is not None and self._used == 1:
            idle = not self._own
            self._own += pieces
            if idle and pieces:
                self._outbox.waiting.append(self)
                self.push()
            return
        encrypts = isinstance(self._streams[0], TlsStream)
        with self._through:
            idle = not self._left and (not encrypts or self._used == 1 or len(pieces) == 1)  # or they encrypt together
        rest: _Piece | None = None
        while idle and pieces:
            rest = self._send_now(pieces[0])
            if rest is pieces[0] and not encrypts:  # what TLS has begun for a stream cannot go on another one
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

    @property
    def _by_caller(self) -> Outbox | None:
        """The outbox, where the caller's thread is the only one that sends."""
        return self._outbox if self._used == 1 else None

    def push(self) -> None:
        """In the caller's thread: send a piece, or what the kernel takes of it at once.

        Only one: what comes meanwhile is to be taken while it is in the processor's cache, and makes room for more.
        """
        assert self._outbox is not None
        rest = self._send_now(self._own[0])
        if rest is None:
            self._own.popleft()
        elif self._broken:
            self._own.clear()  # whoever waits for it is told
        else:
            self._own[0] = rest
        if not self._own:
            self._outbox.waiting.remove(self)

    def _send_now(self, piece: _Piece) -> _Piece | None:
        """As much as the kernel takes at once: what is left of the piece."""
        try:
            taken = self._streams[0].sendmsg([piece.header, piece.memory], [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return piece
        except OSError as error:
            self._break(error)
            return piece
        if taken == len(piece.header) + len(piece.memory):
            return None
        header, memory = piece.header[taken:], piece.memory[max(0, taken - len(piece.header)) :]
        return _Piece(piece.send, header, memory, piece.kept)

    def _start(self) -> None:
        if len(self._threads) < self._used:
            for stream in range(len(self._threads), self._used):
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
            while not self._ended and stream < len(self._streams):
                if stream >= self._used:
                    self._through.wait()
                    continue
                if stream == 0 and self._begun:
                    return self._begun.popleft()
                if self._queue:
                    return self._queue.popleft()
                self._through.wait()
            return None

    def _send_all(self, out: Stream, piece: _Piece) -> None:
        header, memory = piece.header, piece.memory
        while header or len(memory):
            taken = out.sendmsg([header, memory])
            memory = memory[max(0, taken - len(header)) :]
            header = header[taken:]

    def wait_sent(self, sends: int, look: Callable[[], None]) -> None:
        """Until the first so many sends have left the caller's memory; `look()` is called between slices of time."""
        while self._by_caller is not None:
            if not self._own or self._own[0].send >= sends:
                self._check()
                return
            self._by_caller.push()
            if self._own and not self._by_caller.wait(None):
                self._check()
                look()
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
        if self._used == 1 and self._headers[0] is None:
            self._receive_next(_HEADER.pack(_MAGIC, len(memory), self.received, offset, tag), memory, look)
            return
        stream = self._find(_Header(len(memory), self.received, offset, tag), look)
        self._fill(self._streams[stream], memory, look)
        self._headers[stream] = None

    def end_receive(self) -> None:
        """The current send has come wholly: the next piece is of the next one."""
        self.received += 1

    def _receive_next(self, wanted: bytes, memory: memoryview, look: Callable[[], None]) -> None:
        """The header and its piece at once, where there is one stream only."""
        one, header, size = self._streams[0], memoryview(self._scratch), HEADER_BYTES + len(memory)
        got = 0
        while got < HEADER_BYTES:
            got += self._take_in(one, [header[got:], memory], look)
        if self._scratch != wanted:
            raise MismatchError(self._parse_header().tag)
        while got < size:
            got += self._take_in(one, [memory[got - HEADER_BYTES :]], look)

    def _find(self, wanted: _Header, look: Callable[[], None]) -> int:
        """The stream that has this piece next."""
        while True:
            for stream, header in enumerate(self._headers[: self._used]):
                if header == wanted:
                    return stream
                if header is not None and (header.send < wanted.send or header[1:3] == wanted[1:3]):
                    raise MismatchError(header.tag)
            free = [stream for stream, header in enumerate(self._headers[: self._used]) if header is None]
            if not free:
                raise MismatchError(next(header.tag for header in self._headers if header is not None))
            open_ones = [stream for stream in free if stream not in self._closed]
            if not open_ones:
                raise ClosedError("closed")
            readable = self._readable(open_ones)
            for stream in readable:
                try:
                    self._fill(self._streams[stream], memoryview(self._scratch), look)
                except ClosedError:  # what is wanted may have come on another one before
                    self._closed.add(stream)
                    continue
                self._headers[stream] = self._parse_header()
            if not readable:
                self._check()
                look()

    def _readable(self, streams: Sequence[int]) -> list[int]:
        if ready := [stream for stream in streams if has_pending(self._streams[stream])]:
            return ready
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

    def _fill(self, one: Stream, memory: memoryview, look: Callable[[], None]) -> None:
        got = 0
        while got < len(memory):
            got += self._take_in(one, [memory[got:]], look)

    def _take_in(self, one: Stream, into: list[memoryview], look: Callable[[], None]) -> int:
        """Wait until all of it is filled, or time has passed: how many bytes came."""
        while True:
            outbox = self._outbox if self._outbox and self._outbox.waiting and self._outbox.push() else None
            try:
                got = one.recvmsg_into(into, 0, socket.MSG_DONTWAIT if outbox else socket.MSG_WAITALL)[0]
            except BlockingIOError:
                if outbox is None or not outbox.wait(one):
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

    def fileno_out(self) -> int:
        """Of the first stream."""
        return fileno_out(self._streams[0])


def _why(error: OSError) -> str:
    told: Any = error.strerror
    return str(told or error)
