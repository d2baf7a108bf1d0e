"""Messages between two ranks: send, receive, receive from anybody.

For every rank of its host that it has sent to, a rank owns a mailbox: a ring of bytes in its memory, which the receiver
empties. To each rank on another host there is a TCP connection for messages alone. A message is a header (tag, bytes)
and its bytes, in a mailbox padded to 16. Messages of one rank arrive in the order in which they were sent; a receive
takes the first one with its tag, and what is in the way of it is put aside. A send is done when its bytes are in the
mailbox, or in the kernel's buffers, so a large one waits until somebody receives it.

Whoever posts a message moves what can be moved at once; the rest is moved by a thread that sleeps on its rank's bell.
Where there are other hosts, a second thread rings that bell when a connection has something to read or room to write.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from offbeat.collectives import memory
from offbeat.collectives.calls import Flat
from offbeat.collectives.memory import Segment
from offbeat.collectives.overlap import PendingCall, at_exit
from offbeat.collectives.remote import RemoteRanks
from offbeat.collectives.sync import Word, fence
from offbeat.collectives.transport import BELL, BLAME, MAILBOX, PAGE, SharedMemory, bytes_view
from offbeat.errors import PeerError
from offbeat.network.tls import Stream, fileno_out

_HEAD, _TAIL = 0, 8  # words of a mailbox: bytes put in, bytes taken out
_HEADER = struct.Struct("<qq")  # tag, bytes
RING_BYTES = 1024 * 1024
MOST_ASIDE_BYTES = 1 << 30  # of messages from other hosts whose size is not what a receive expects
_YIELD_S = 0.0005


@dataclass(slots=True)
class _Sending:
    tag: int
    payload: Tensor
    work: PendingCall
    done: int = -_HEADER.size  # bytes of the payload; below 0 for what is left of the header


@dataclass(slots=True)
class _Posted:
    flat: Flat
    source: int | None
    tag: int
    work: PendingCall
    timeout_s: float


@dataclass(slots=True)
class _Coming:
    """A message that is being read; `posted` is None while nobody has asked for it."""

    source: int
    tag: int
    payload: Tensor
    posted: _Posted | None
    since: float  # when its last bytes came
    done: int = 0


class _Ring:
    """One mailbox, seen from either side."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.words = segment.words
        self.bytes = segment.tensor(torch.uint8, RING_BYTES, PAGE)

    def put(self, one: _Sending) -> bool:
        """As much of a message as there is room for; whether there was any."""
        free = RING_BYTES - self._filled()
        if not free:
            return False
        if one.done < 0:
            _HEADER.pack_into(self.segment.map, self._header_at(_HEAD), one.tag, one.payload.numel())
            self._advance(_HEAD, _HEADER.size)
            one.done, free = 0, free - _HEADER.size
        one.done = self._move(_HEAD, one.payload, one.done, free)
        return True

    def header(self) -> tuple[int, int] | None:
        """Tag and bytes of the message that comes next, if one does."""
        if not self._filled():
            return None
        fence()
        tag, size = _HEADER.unpack_from(self.segment.map, self._header_at(_TAIL))
        return tag, size

    def drop_header(self) -> None:
        self._advance(_TAIL, _HEADER.size)

    def take(self, one: _Coming) -> bool:
        """As much of a message as has come; whether anything has."""
        filled = self._filled()
        if not filled:
            return False
        fence()
        one.done = self._move(_TAIL, one.payload, one.done, filled)
        return True

    def _filled(self) -> int:
        return int(self.words[_HEAD] - self.words[_TAIL])

    def _header_at(self, word: int) -> int:
        """Where in the segment the next header is. None has a break in it, since messages are padded."""
        return PAGE + int(self.words[word] % RING_BYTES)

    def _move(self, word: int, payload: Tensor, done: int, most: int) -> int:
        """Bytes of a payload into the ring (`_HEAD`) or out of it (`_TAIL`), until a break; how many are done then."""
        place, size = self.words[word] % RING_BYTES, payload.numel()
        count = min(most, size - done, RING_BYTES - place)
        here, there = self.bytes[place : place + count], payload[done : done + count]
        if word == _HEAD:
            here.copy_(there)
        else:
            there.copy_(here)
        done += count
        self._advance(word, count + (-size % _HEADER.size if done == size else 0))
        return done

    def _advance(self, word: int, count: int) -> None:
        fence()
        self.words[word] += count


class _Connection:
    """The connection to a rank on another host, used as a mailbox in both directions."""

    def __init__(self, one: Stream) -> None:
        self.socket = one
        self.ended = False  # the other side has closed it, or does not answer
        self._header = b""

    def put(self, one: _Sending) -> bool:
        parts = [_HEADER.pack(one.tag, one.payload.numel())[one.done :]] if one.done < 0 else []
        try:
            taken = self.socket.sendmsg([*parts, bytes_view(one.payload)[max(0, one.done) :]], [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            self.ended = True
            return False
        one.done += taken
        return True

    def header(self) -> tuple[int, int] | None:
        if len(self._header) < _HEADER.size:
            came = bytearray(_HEADER.size - len(self._header))
            self._header += came[: self._receive(memoryview(came))]
        if len(self._header) < _HEADER.size:
            return None
        tag, size = _HEADER.unpack(self._header)
        return tag, size

    def drop_header(self) -> None:
        self._header = b""

    def take(self, one: _Coming) -> bool:
        came = self._receive(bytes_view(one.payload)[one.done :])
        one.done += came
        return came > 0

    def _receive(self, into: memoryview) -> int:
        try:
            came = self.socket.recv_into(into, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            came = 0
        self.ended = self.ended or not came
        return came


class Messages:
    """All messages of one rank of one group."""

    def __init__(self, transport: SharedMemory) -> None:
        self._transport = transport
        self._far = {} if transport.remote is None else _connections(transport.remote)
        self._out: dict[int, _Ring | _Connection] = dict(self._far)
        self._in: dict[int, _Ring | _Connection] = dict(self._far)
        self._sending: dict[int, deque[_Sending]] = defaultdict(deque)
        self._posted: list[_Posted] = []
        self._coming: dict[int, _Coming] = {}
        self._aside: list[_Coming] = []  # whole messages that came before they were asked for
        self._since: dict[int, float] = {}
        self._lock = threading.RLock()
        self._some = threading.Event()
        self._threads: list[threading.Thread] = []
        self._end = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if self._far else -1
        self._closed = False
        self._bells = [Word(side.words, BELL, side.segment.address) for side in transport.sides]
        at_exit(self.close)

    def send(self, payload: Tensor, to: int, tag: int) -> PendingCall:
        """Bytes to a rank. The tensor must stay as it is until the work is done."""
        self._transport.check()
        work = PendingCall(None)
        with self._lock:
            if to not in self._out:
                self._open(to)
            self._sending[to].append(_Sending(tag, payload, work))
            self._since[to] = time.monotonic()
            self._go_on()
        return work

    def receive(self, flat: Flat, source: int | None, tag: int, timeout_s: float | None = None) -> PendingCall:
        """Bytes from a rank, or from any; the work then knows whose."""
        self._transport.check()
        work = PendingCall(None)
        seconds = self._transport.timeout_s if timeout_s is None else timeout_s
        with self._lock:
            posted = _Posted(flat, source, tag, work, seconds)
            ready = next((one for one in self._aside if _fits(posted, one.source, one.tag)), None)
            if ready is not None:
                self._aside.remove(ready)
                self._take(posted, ready)
            else:
                self._posted.append(posted)
                self._go_on()
        return work

    def close(self) -> None:
        """What is not done fails."""
        with self._lock:
            self._closed = True
            self._fail_all(PeerError("this group was destroyed"))
        self._some.set()
        self._bells[self._transport.rank].set(time.monotonic_ns())
        if self._end >= 0:
            os.eventfd_write(self._end, 1)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(1.0)
        if self._end >= 0 and not any(thread.is_alive() for thread in self._threads):
            os.close(self._end)
            self._end = -1

    # --- moving ----------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Move what can be moved; leave the rest to the thread."""
        while self._move():
            pass
        if self._busy():
            if not self._threads:
                for run in (self._loop, self._ring) if self._far else (self._loop,):
                    self._threads.append(threading.Thread(target=run, name="offbeat messages", daemon=True))
                    self._threads[-1].start()
            self._some.set()
            self._bells[self._transport.rank].set(time.monotonic_ns())

    def _busy(self) -> bool:
        return bool(self._posted) or bool(self._coming) or any(self._sending.values())

    def _loop(self) -> None:
        bell, transport = self._bells[self._transport.rank], self._transport
        moved_at = time.perf_counter()
        while not self._closed:
            seen = bell.get()
            gone = transport.gone() if time.perf_counter() - moved_at > _YIELD_S else ()
            with self._lock:
                moved = self._move()
                busy = self._busy()
                if busy and not moved:
                    self._check_waiting(gone)
                if not busy and not self._closed:
                    self._some.clear()
            if moved:
                moved_at = time.perf_counter()
            elif not busy:
                self._some.wait()
            elif time.perf_counter() - moved_at > _YIELD_S:
                bell.sleep(seen)
            else:
                time.sleep(0)

    def _ring(self) -> None:
        """Ring this rank's bell whenever a connection to another host has changed: each change is told once."""
        changes = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
        numbers = [{one.socket.fileno(), fileno_out(one.socket)} for one in self._far.values()]
        with select.epoll() as watch:
            watch.register(self._end, select.EPOLLIN)
            for number in chain.from_iterable(numbers):
                with contextlib.suppress(OSError, ValueError):  # the group has failed meanwhile, and closed it
                    watch.register(number, changes)
            while not self._closed:
                watch.poll()
                self._bells[self._transport.rank].set(time.monotonic_ns())

    def _move(self) -> bool:
        moved = False
        try:
            for to, queue in self._sending.items():
                if queue and self._put(to, queue):
                    moved = True
                    self._since[to] = time.monotonic()
                    if to not in self._far:
                        self._bells[to].set(time.monotonic_ns())
            wanted = {one.source for one in self._posted}
            sources = self._transport.others if None in wanted else [*wanted, *self._coming]
            for source in set(sources):
                if source is not None and self._get(source):
                    moved = True
                    if source not in self._far:
                        self._bells[source].set(time.monotonic_ns())
        except Exception as error:  # whatever it is, nobody must wait for a thread that died of it
            self._transport.give_up(f"{type(error).__name__} in a message")
            self._fail_all(error)
        return moved

    def _put(self, to: int, queue: deque[_Sending]) -> bool:
        road, moved = self._out[to], False
        while queue and not self._closed and road.put(queue[0]):
            moved = True
            if queue[0].done == queue[0].payload.numel():
                one = queue.popleft()
                if to in self._far:
                    self._transport.count_message_sent(to, one.done)
                one.work.finish()
        return moved

    def _get(self, source: int) -> bool:
        road = self._inbox(source)
        moved = False
        while road is not None and not self._closed:
            coming = self._coming.get(source)
            if coming is None:
                header = road.header()
                coming = None if header is None else self._start(source, *header)
                if coming is None:
                    break  # nobody asks for anything from there: it stays where it is
                self._coming[source] = coming
                road.drop_header()
                moved = True
            if coming.done < coming.payload.numel():
                if not road.take(coming):
                    break
                coming.since = time.monotonic()
                moved = True
            if coming.done == coming.payload.numel():
                del self._coming[source]
                self._transport.count_message(source, coming.done)
                taker = coming.posted or self._claim(source, coming.tag)  # it may have been asked for meanwhile
                if taker is None:
                    self._aside.append(coming)
                else:
                    self._take(taker, coming)
        return moved

    def _start(self, source: int, tag: int, size: int) -> _Coming | None:
        """The message that begins here, for whoever asks for it, or for another one behind it."""
        posted = self._claim(source, tag)
        if posted is None and not any(one.source in (None, source) for one in self._posted):
            return None
        straight = None if posted is None else posted.flat.tensor
        if straight is None or straight.numel() != size or (source in self._far and straight.device.type != "cpu"):
            try:
                if source in self._far and (straight is None or straight.numel() != size):
                    self._check_size(source, size)
                straight = torch.empty(size, dtype=torch.uint8)
            except Exception:
                self._posted += [] if posted is None else [posted]  # it fails with the others
                raise
        return _Coming(source, tag, straight, posted, time.monotonic())

    def _check_size(self, source: int, size: int) -> None:
        """What another host says sizes no memory beyond a bound."""
        held = sum(one.payload.numel() for one in self._aside if one.source in self._far)
        if not 0 <= size <= MOST_ASIDE_BYTES - held:
            raise PeerError(
                f"{self._transport.name(source)} announced a message of {size} bytes that nobody expects; at most"
                f" {MOST_ASIDE_BYTES >> 20} MiB of such messages are kept",
                ranks=(self._transport.names[source],),
            )

    def _claim(self, source: int, tag: int) -> _Posted | None:
        """The first receive that waits for such a message: it waits no longer."""
        posted = next((one for one in self._posted if _fits(one, source, tag)), None)
        if posted is not None:
            self._posted.remove(posted)
        return posted

    def _take(self, posted: _Posted, coming: _Coming) -> None:
        mine, theirs = posted.flat.tensor, coming.payload
        if mine.numel() != theirs.numel():
            who, me = self._transport.name(coming.source), self._transport.name(self._transport.rank)
            posted.work.finish(PeerError(f"{who} sent {theirs.numel()} bytes, but {me} expects {mine.numel()}"))
            return
        if theirs is not mine:
            mine.copy_(theirs)
        posted.flat.back()
        posted.work.source = coming.source
        posted.work.finish()

    # --- mailboxes -------------------------------------------------------------------------------------------------

    def _open(self, to: int) -> None:
        transport = self._transport
        segment, descriptor = memory.create(PAGE + RING_BYTES, "a mailbox")
        try:
            transport.announce(MAILBOX, to, PAGE + RING_BYTES, descriptor, [to])
        finally:
            os.close(descriptor)
        self._out[to] = _Ring(segment)

    def _inbox(self, source: int) -> _Ring | _Connection | None:
        if source not in self._in:
            self._transport.hear(source)
            mailbox = self._transport.sides[source].mailbox
            if mailbox is None:
                return None
            self._in[source] = _Ring(mailbox)
        return self._in[source]

    # --- faults ----------------------------------------------------------------------------------------------------

    def _check_waiting(self, gone: tuple[int, ...]) -> None:
        """Fail what waits for a rank that is gone, or has waited too long.

        A message that is given up half-way leaves its other half in the mailbox: with it the group is over. What a
        rank on another host has sent before it left may still be on its way, so it is gone when its connection ends.
        """
        gone = (*(one for one in gone if one not in self._far), *(one for one, to in self._far.items() if to.ended))
        if self._transport.broken is not None:
            self._fail_all(self._transport.broken)
            return
        transport, late = self._transport, time.monotonic() - self._transport.timeout_s
        for posted in list(self._posted):
            lost = len(gone) == len(transport.others) if posted.source is None else posted.source in gone
            if lost or _is_late(posted.work, posted.timeout_s):
                self._posted.remove(posted)
                posted.work.finish(self._error(posted.source, lost))
        for source, coming in list(self._coming.items()):
            if coming.posted is not None and (
                source in gone or (coming.since < late and _is_late(coming.posted.work, transport.timeout_s))
            ):
                del self._coming[source]
                coming.posted.work.finish(self._error(source, source in gone))
                transport.give_up(f"a message from {transport.name(source)} arrived incomplete")
        for to, queue in self._sending.items():
            waited_for = any(_is_late(one.work, transport.timeout_s) for one in queue)
            if queue and (to in gone or (self._since[to] < late and waited_for)):
                if queue[0].done > -_HEADER.size:
                    transport.give_up(f"a message to {transport.name(to)} was sent incomplete")
                while queue:
                    queue.popleft().work.finish(self._error(to, to in gone))

    def _error(self, peer: int | None, lost: bool) -> PeerError:
        transport = self._transport
        if peer is None:
            return PeerError("no message arrived: the other ranks are gone" if lost else "no message arrived in time")
        if not transport.own.words[BLAME]:
            transport.own.words[BLAME] = peer + 1  # whoever misses this rank later knows why
        what = "is gone" if lost else f"made no progress within the group's timeout of {transport.timeout_s:g} s"
        me = transport.name(transport.rank)
        return PeerError(f"{transport.name(peer)} {what} while {me} was exchanging a message with it",
                         ranks=(transport.names[peer],))  # fmt: skip

    def _fail_all(self, error: Exception) -> None:
        works = [one.work for queue in self._sending.values() for one in queue]
        works += [coming.posted.work for coming in self._coming.values() if coming.posted is not None]
        works += [posted.work for posted in self._posted]
        for queue in self._sending.values():
            queue.clear()
        self._coming.clear()
        self._posted.clear()
        for work in works:
            work.finish(error)


def _connections(remote: RemoteRanks) -> Mapping[int, _Connection]:
    return {rank: _Connection(remote.messages(rank)) for rank in remote.ranks}


def _is_late(work: PendingCall, timeout_s: float) -> bool:
    return work.waited_since is not None and time.monotonic() - work.waited_since > timeout_s


def _fits(posted: _Posted, source: int, tag: int) -> bool:
    return posted.source in (None, source) and posted.tag == tag
