"""Messages between two ranks: send, receive, receive from anybody.

For every rank that it has sent to, a rank owns a mailbox: a ring of bytes in its memory, which the receiver empties.
A message is a header (tag, bytes) and its bytes, padded to 16. Messages of one rank arrive in the order in which they
were sent; a receive takes the first one with its tag, and what is in the way of it is put aside. A send is done
when its bytes are in the mailbox, so a large one waits until somebody receives it.

Whoever posts a message moves what can be moved at once; the rest is moved by a thread that sleeps on its rank's bell.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.collectives import memory
from offbeat.collectives.calls import Flat
from offbeat.collectives.memory import Segment
from offbeat.collectives.overlap import PendingCall, at_exit
from offbeat.collectives.sync import Word, fence
from offbeat.collectives.transport import BELL, BLAME, MAILBOX, PAGE, SharedMemory
from offbeat.errors import PeerError, RequestError

_HEAD, _TAIL = 0, 8  # words of a mailbox: bytes put in, bytes taken out
_HEADER = struct.Struct("<qq")  # tag, bytes
RING_BYTES = 1024 * 1024
_YIELD_S = 0.0005


@dataclass(slots=True)
class _Sending:
    tag: int
    payload: Tensor
    work: PendingCall
    done: int = -1  # bytes; before the header, -1


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

    def filled(self) -> int:
        return int(self.words[_HEAD] - self.words[_TAIL])

    def header_at(self, word: int) -> int:
        """Where in the segment the next header is. None has a break in it, since messages are padded."""
        return PAGE + int(self.words[word] % RING_BYTES)

    def move(self, word: int, payload: Tensor, done: int, most: int) -> int:
        """Bytes of a payload into the ring (`_HEAD`) or out of it (`_TAIL`), until a break; how many are done then."""
        place, size = self.words[word] % RING_BYTES, payload.numel()
        count = min(most, size - done, RING_BYTES - place)
        here, there = self.bytes[place : place + count], payload[done : done + count]
        if word == _HEAD:
            here.copy_(there)
        else:
            there.copy_(here)
        done += count
        self.advance(word, count + (-size % _HEADER.size if done == size else 0))
        return done

    def advance(self, word: int, count: int) -> None:
        fence()
        self.words[word] += count


class Messages:
    """All messages of one rank of one group."""

    def __init__(self, transport: SharedMemory) -> None:
        self._transport = transport
        self._out: dict[int, _Ring] = {}
        self._in: dict[int, _Ring] = {}
        self._sending: dict[int, deque[_Sending]] = defaultdict(deque)
        self._posted: list[_Posted] = []
        self._coming: dict[int, _Coming] = {}
        self._aside: list[_Coming] = []  # whole messages that came before they were asked for
        self._since: dict[int, float] = {}
        self._lock = threading.RLock()
        self._some = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._bells = [Word(side.words, BELL, side.segment.address) for side in transport.sides]
        at_exit(self.close)

    def send(self, payload: Tensor, to: int, tag: int) -> PendingCall:
        """Bytes to a rank. The tensor must stay as it is until the work is done."""
        self._transport.check()
        self._check_near(to)
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
        self._check_near(source)
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

    def _check_near(self, peer: int | None) -> None:
        """Messages do not leave the host. One from any rank could come from another host, so that is refused too."""
        transport = self._transport
        if transport.remote is not None and (peer is None or peer in transport.remote.ranks):
            who = "any rank" if peer is None else transport.name(peer)
            raise RequestError(f"send and receive work only within one host, not with {who}: use a collective")

    def close(self) -> None:
        """What is not done fails."""
        with self._lock:
            self._closed = True
            self._fail_all(PeerError("this group was destroyed"))
        self._some.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._bells[self._transport.rank].set(time.monotonic_ns())
            self._thread.join(1.0)

    # --- moving ----------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Move what can be moved; leave the rest to the thread."""
        while self._move():
            pass
        if self._busy():
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="offbeat messages", daemon=True)
                self._thread.start()
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

    def _move(self) -> bool:
        moved = False
        try:
            for to, queue in self._sending.items():
                if queue and self._put(to, queue):
                    moved = True
                    self._since[to] = time.monotonic()
                    self._bells[to].set(time.monotonic_ns())
            wanted = {one.source for one in self._posted}
            sources = self._transport.near if None in wanted else [*wanted, *self._coming]
            for source in set(sources):
                if source is not None and self._get(source):
                    moved = True
                    self._bells[source].set(time.monotonic_ns())
        except Exception as error:  # whatever it is, nobody must wait for a thread that died of it
            self._transport.give_up(f"{type(error).__name__} in a message")
            self._fail_all(error)
        return moved

    def _put(self, to: int, queue: deque[_Sending]) -> bool:
        ring, moved = self._out[to], False
        while queue and not self._closed and (free := RING_BYTES - ring.filled()):
            one, moved = queue[0], True
            if one.done < 0:
                _HEADER.pack_into(ring.segment.map, ring.header_at(_HEAD), one.tag, one.payload.numel())
                one.done = 0
                ring.advance(_HEAD, _HEADER.size)
                continue
            one.done = ring.move(_HEAD, one.payload, one.done, free)
            if one.done == one.payload.numel():
                queue.popleft()
                one.work.finish()
        return moved

    def _get(self, source: int) -> bool:
        ring = self._inbox(source)
        moved = False
        while ring is not None and not self._closed and (filled := ring.filled()):
            fence()
            coming = self._coming.get(source)
            if coming is None:
                tag, size = _HEADER.unpack_from(ring.segment.map, ring.header_at(_TAIL))
                coming = self._start(source, tag, size)
                if coming is None:
                    break  # nobody asks for anything from there: it stays where it is
                self._coming[source] = coming
                ring.advance(_TAIL, _HEADER.size)
                filled -= _HEADER.size
            coming.done = ring.move(_TAIL, coming.payload, coming.done, filled)
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
        if straight is None or straight.numel() != size:
            straight = torch.empty(size, dtype=torch.uint8)
        return _Coming(source, tag, straight, posted, time.monotonic())

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

    def _inbox(self, source: int) -> _Ring | None:
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

        A message that is given up half-way leaves its other half in the mailbox: with it the group is over.
        """
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
                if queue[0].done >= 0:
                    transport.give_up(f"a message to {transport.name(to)} was sent incomplete")
                while queue:
                    queue.popleft().work.finish(self._error(to, to in gone))

    def _error(self, peer: int | None, lost: bool) -> PeerError:
        transport = self._transport
        if peer is None:
            return PeerError("no message arrived: the other ranks are gone" if lost else "no message arrived in time")
        if not transport.own.words[BLAME]:
            transport.own.words[BLAME] = peer + 1  # whoever misses this rank later knows why
        what = "is gone" if lost else f"did nothing within the group's {transport.timeout_s:g} s"
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


def _is_late(work: PendingCall, timeout_s: float) -> bool:
    return work.waited_since is not None and time.monotonic() - work.waited_since > timeout_s


def _fits(posted: _Posted, source: int, tag: int) -> bool:
    return posted.source in (None, source) and posted.tag == tag
