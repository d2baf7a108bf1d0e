"""How bytes come from one rank to another: shared memory inside a host, and streams to ranks on others (`remote`).

Each rank owns one segment, mapped by all of its host:

    line 0    mark: how far this rank is (`schedules.projection`)
    line 1    whom it blames, whether it left, for whom and for which mark it waits, how many calls it has finished: for
              finding who is at fault; and how much it has announced
    line 2,4  two notes: what this rank calls, how, and since when; the note of call n is at n % 2
    line 6    its bell: rung when there is something for its messages (`messages`)
    line 8..  for each rank: bytes read from it in collectives, in messages; bytes a second at which it is sent to, if
              it is on another host
    arena     what it stages for others to read

Two notes are enough: a rank writes the note of call n+2 when it has seen all notes of call n+1, so everybody had
then finished call n and read its notes.

Further buffers (a gradient bucket that was moved into shared memory, a mailbox) are announced over the socket to the
peer, with their descriptor, before a note or a word speaks of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from torch import Tensor

from offbeat.collectives import memory, sync
from offbeat.collectives.memory import Segment
from offbeat.collectives.remote import PER_RANK, RemoteRanks
from offbeat.collectives.rendezvous import Peer
from offbeat.collectives.sync import Patience, Word
from offbeat.errors import OffbeatError, PeerError
from offbeat.network.streams import TAG_BYTES, ClosedError
from offbeat.processes.child import state_of

_LINE = 8  # words
MARK, BLAME, LEFT, WAITS_FOR, WAITS_MARK, DONE, ANNOUNCED, BELL = 0, 8, 9, 10, 11, 12, 13, 6 * _LINE
_NOTE_BYTES = (2 * _LINE * 8, 4 * _LINE * 8)
_NOTE = struct.Struct("<9q")
_ANNOUNCED = struct.Struct("<BQQ")  # what, number, bytes
BUFFER, MAILBOX, FORGET = range(3)
GAVE_UP = 2  # in LEFT
TAG = struct.Struct("<5q")  # of what is sent to other hosts: the first five of a note
_NEVER = 2**62  # a mark that nobody comes to: who waits for a stream waits for no mark
_SAYS_S = 1.0  # between two words to other hosts of one that waits
_LAST_WORDS_S = 0.5  # a stream has ended: so long may it take until it is known why
ARENA = 0  # the number of the buffer that every rank starts with
PAGE = 4096


class Note(NamedTuple):
    """What a rank calls: it must be the same on all, but for the last four."""

    call: int  # the how-manieth call of this group
    what: int  # kind, reduction and type of item in one number
    items: int
    detail: int  # root, or a checksum of the sizes
    way: int  # a checksum of the schedule
    rounds: int  # in how many rounds its staged data fits its arena
    buffer: int
    offset_bytes: int
    since_ns: int  # when it was called


def control_bytes(ranks: int) -> int:
    """What the words of a segment take, in whole pages."""
    return -(-(PER_RANK + 3 * ranks) * 8 // PAGE) * PAGE


@dataclass(slots=True)
class _Side:
    """One rank's memory, as this process sees it."""

    segment: Segment
    words: memoryview
    mark: Word
    buffers: dict[int, Segment]
    mailbox: Segment | None = None


class SharedMemory:
    """The ranks of one group: those on this host, and the `remote` ones, where there are any.

    Not for two threads at once, but for `look`, `announce` and `hear`.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[int],
        own: Segment,
        peers: Sequence[Peer],
        timeout_s: float,
        arena_bytes: int,
        remote: RemoteRanks | None = None,
    ) -> None:
        self.rank = rank
        self.ranks = len(names)
        self.names = tuple(names)
        self.timeout_s = timeout_s
        self.arena_bytes = arena_bytes
        self.arena_at = control_bytes(self.ranks)
        self.others = tuple(peer for peer in range(self.ranks) if peer != rank)
        self.remote = remote
        self.near = tuple(peer for peer in self.others if remote is None or peer not in remote.ranks)  # on this host
        self.hosts = None if remote is None else remote.hosts
        self.sockets = {peer.rank: peer.socket for peer in peers}
        self._pids = {peer.rank: peer.pid for peer in peers}
        theirs = {peer.rank: memory.receive(peer.descriptor, peer.size_bytes, sealed=True) for peer in peers}
        if remote is not None:
            theirs |= {peer: remote.words(peer) for peer in remote.ranks}
        segments = [own if each == rank else theirs[each] for each in range(self.ranks)]
        self.sides = [_Side(s, s.words, Word(s.words, MARK, s.address), {ARENA: s}) for s in segments]
        self.own = self.sides[rank]
        self.patience = Patience.of(self.ranks)
        self.broken: PeerError | None = None
        self._deadline = 0.0
        self._awaited = self._call = 0
        self._tag = bytes(TAG_BYTES)
        self._says_at = self._told_s = 0.0
        self.received_s: dict[int, float] = {}  # when the last of each rank on another host came
        self._heard = [0] * self.ranks
        self.forgot = False  # memory that programs may still be bound to
        self._hearing = threading.Lock()
        _alive.add(self)

    # --- marks ---------------------------------------------------------------------------------------------------

    def start(self, call: int) -> None:
        """A call begins: from now on, `timeout_s` is left for waiting."""
        self._call = call
        now = time.monotonic()
        self._deadline, self._says_at = now + self.timeout_s, now + _SAYS_S

    def end(self) -> None:
        """The call is over for this rank: all it has to do for others is done."""
        self.own.words[DONE] = self._call

    def mark(self, value: int) -> None:
        self.own.mark.set(value)

    def wait(self, peer: int, value: int, patience: Patience) -> None:
        """Until the peer has come to this mark; `PeerError` if it dies or the time is over."""
        word = self.sides[peer].mark
        if word.view[MARK] < value:
            self._awaited = peer
            sync.wait(word, value, patience, self._look_around)
            self.own.words[WAITS_FOR] = 0
        else:
            sync.fence()

    def _look_around(self, word: Word, value: int) -> None:
        self._check_waiting(self._awaited, value, lambda: word.get() < value)

    def _check_waiting(self, awaited: int, mark: int, waits: Callable[[], bool]) -> None:
        """Between the slices of a wait: whether it can still end well. `waits` says if it is still needed."""
        if self.broken is not None:  # by another thread: the group was left, or aborted
            raise self.broken
        self.own.words[WAITS_MARK] = mark
        self.own.words[WAITS_FOR] = awaited + 1
        # Whoever has finished this call may go; whoever has not is missed, by others if not by this rank.
        gone = [peer for peer in self.gone() if self.sides[peer].words[DONE] < self._call]
        if gone and waits():
            self.blame(gone)
        now = time.monotonic()
        if self.remote is not None and now > self._says_at:  # the others will know for whom this rank waits
            self._says_at = now + _SAYS_S
            self.remote.say(self.own.words)
        if now > self._deadline and waits():
            late = self._late(awaited)
            state = _state_of(self._pids.get(late))
            self.fail(
                f"{self.name(late)} made no progress within the group's timeout of {self.timeout_s:g} s{state}",
                ranks=(late,),
            )

    def _late(self, peer: int) -> int:
        """Who keeps everybody waiting: follow who waits for whom until somebody does not, or need not any more."""
        for _ in range(self.ranks):
            words = self.sides[peer].words
            onto = words[WAITS_FOR] - 1
            if onto < 0 or onto == self.rank or self.sides[onto].words[MARK] >= words[WAITS_MARK]:
                return peer
            peer = onto
        return peer

    # --- across hosts --------------------------------------------------------------------------------------------

    def send(self, peer: int, what: memoryview, kept: object) -> None:
        """Begin to send memory to a rank on another host; it stays as it is until `wait_sent`. `kept` owns it."""
        assert self.remote is not None
        self.remote.link(peer).send(self._tag, what, kept)

    def sends(self, peer: int) -> int:
        assert self.remote is not None
        return self.remote.link(peer).sends

    def wait_sent(self, peer: int, sends: int) -> None:
        """Until the first so many sends to a rank have left this memory."""
        assert self.remote is not None
        try:
            self.remote.link(peer).wait_sent(sends, lambda: self._check_waiting(peer, _NEVER, _always))
        except ClosedError as closed:
            self._lost(peer, closed)
        self.own.words[WAITS_FOR] = 0

    def receive(self, peer: int, offset_bytes: int, into: memoryview, *, last: bool) -> None:
        """The next piece of what a rank on another host sends, into memory of its size; `last`: of this send."""
        assert self.remote is not None
        link = self.remote.link(peer)
        try:
            link.receive(self._tag, offset_bytes, into, lambda: self._check_waiting(peer, _NEVER, _always))
        except ClosedError as closed:
            self._lost(peer, closed)
        if last:
            link.end_receive()
            self.received_s[peer] = time.perf_counter()
            self.own.words[WAITS_FOR] = 0

    def tag(self, note: Note) -> None:
        """What this rank calls, for those on other hosts to compare with what they call."""
        self._tag = TAG.pack(*note[:5])

    def _lost(self, peer: int, why: ClosedError) -> NoReturn:
        """A stream has ended: say who is to blame, which may be another rank."""
        if self.broken is not None:
            raise self.broken
        end = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < end and peer not in (gone := self.gone()):
            time.sleep(0.005)
        if self.broken is not None:
            raise self.broken
        if peer in gone:
            self.blame([peer for peer in gone if self.sides[peer].words[DONE] < self._call] or gone)
        self.fail(f"the connection to {self.name(peer)} ended: {why}", ranks=(peer,))

    # --- notes ---------------------------------------------------------------------------------------------------

    def write_note(self, note: Note) -> None:
        _NOTE.pack_into(self.own.segment.map, _NOTE_BYTES[note.call & 1], *note)

    def read_note(self, peer: int, call: int) -> Note:
        return Note._make(_NOTE.unpack_from(self.sides[peer].segment.map, _NOTE_BYTES[call & 1]))

    # --- buffers -------------------------------------------------------------------------------------------------

    def buffer(self, rank: int, number: int) -> Segment:
        """A buffer of a rank, by the number under which it was announced."""
        side = self.sides[rank]
        if number not in side.buffers:
            self.hear(rank)
            if number not in side.buffers:
                self.fail(f"{self.name(rank)} refers to memory that it did not announce", ranks=(rank,))
        return side.buffers[number]

    def announce(self, what: int, number: int, size_bytes: int, descriptor: int | None, to: Sequence[int]) -> None:
        """Tell peers of memory, or that it is to be forgotten. A peer that has died is not told; waiting will tell."""
        message = _ANNOUNCED.pack(what, number, size_bytes)
        for peer in to:
            room = select.poll()
            try:
                room.register(self.sockets[peer], select.POLLOUT)
                if not room.poll(1000 * self.timeout_s):  # it has not heard of the last hundreds yet
                    self.fail(f"{self.name(peer)} does not accept shared memory", ranks=(peer,))
                socket.send_fds(self.sockets[peer], [message], [] if descriptor is None else [descriptor])
            except ConnectionError:  # it has died; whoever waits for it will say so
                continue
            except (OSError, ValueError) as error:
                self.fail(f"{self.name(peer)} cannot receive shared memory: {error}", ranks=(peer,))
        sync.fence()
        with self._hearing:  # calls and messages may announce at the same time
            self.own.words[ANNOUNCED] += 1

    def hear_all(self) -> bool:
        """Take in what was announced lately; whether any memory is to be forgotten, here or there."""
        for peer in self.near:
            self.hear(peer)
        forgot, self.forgot = self.forgot, False
        return forgot

    def hear(self, rank: int) -> None:
        """Take in what a peer announced since the last time."""
        side = self.sides[rank]
        announced = side.words[ANNOUNCED]
        if announced == self._heard[rank]:
            return
        with self._hearing:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                while self._take_in(rank, side):
                    pass
            self._heard[rank] = announced

    def _take_in(self, rank: int, side: _Side) -> bool:
        """One announcement; False where the peer has left."""
        message, descriptors, _, _ = socket.recv_fds(self.sockets[rank], _ANNOUNCED.size, 4)
        if not message:
            return False
        what, number, size_bytes = _ANNOUNCED.unpack(message)
        if what == FORGET:
            side.buffers.pop(number, None)
            self.forgot = True
        elif not descriptors:
            raise OffbeatError(f"the shared memory of {self.name(rank)} did not arrive; are too many files open?")
        elif what == BUFFER:
            side.buffers[number] = memory.receive(descriptors[0], size_bytes, sealed=False)
        else:
            side.mailbox = memory.receive(descriptors[0], size_bytes, sealed=True)
        return True

    # --- counters ------------------------------------------------------------------------------------------------

    def count(self, source: int, size_bytes: int) -> None:
        """So many bytes were read from a rank by a collective."""
        self.own.words[PER_RANK + source] += size_bytes

    def count_sent(self, target: int, size_bytes: int) -> None:
        """So many bytes were sent to a rank on another host: who reads there is counted here."""
        self.sides[target].words[PER_RANK + self.rank] += size_bytes
        if self.remote is not None and (rate := self.remote.rate(target)).count(size_bytes):
            self.own.words[PER_RANK + 2 * self.ranks + target] = int(rate.bytes_per_s)
            now = time.monotonic()
            if now - self._told_s > _SAYS_S:
                self._told_s = now
                self.remote.gone()  # takes in what the others said: it must not pile up
                self.remote.say(self.own.words)

    def count_message(self, source: int, size_bytes: int) -> None:
        self.own.words[PER_RANK + self.ranks + source] += size_bytes

    def count_message_sent(self, target: int, size_bytes: int) -> None:
        """The same of a message to a rank on another host."""
        self.sides[target].words[PER_RANK + self.ranks + self.rank] += size_bytes

    def counted(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes read from each rank by this one, and from this one by each rank, as the readers counted them."""
        received = [self._counted(self.own, peer) for peer in range(self.ranks)]
        sent = [self._counted(side, self.rank) for side in self.sides]
        return tuple(received), tuple(sent)

    def send_rates(self) -> list[list[float]]:
        """Bytes a second from each rank to each on another host, as the senders measured them; 0: nothing yet."""
        if self.remote is not None:
            self.remote.gone()
        start = PER_RANK + 2 * self.ranks
        return [[float(rate) for rate in side.words[start : start + self.ranks]] for side in self.sides]

    def _counted(self, reader: _Side, source: int) -> int:
        words = reader.words
        return int(words[PER_RANK + source] + words[PER_RANK + self.ranks + source])

    # --- faults --------------------------------------------------------------------------------------------------

    def name(self, rank: int) -> str:
        """As the user counts: by rank in the world; where it is, if that is another host."""
        far = self.remote is not None and rank in self.remote.ranks
        return (
            f"rank {self.names[rank]} ({self.remote.where(rank)})"
            if far and self.remote
            else f"rank {self.names[rank]}"
        )

    def gone(self) -> tuple[int, ...]:
        """Peers whose process has ended, or that have left the group."""
        watch = select.poll()
        peers = {one.fileno(): peer for peer, one in self.sockets.items()}
        try:
            for number in peers:
                watch.register(number, select.POLLRDHUP)
        except ValueError:  # this rank itself is leaving, in another thread
            return ()
        far = [] if self.remote is None else self.remote.gone()
        return tuple(sorted([*far, *(peers[number] for number, _ in watch.poll(0))]))

    def blame(self, gone: Sequence[int]) -> NoReturn:
        """Fail for ranks that are gone: not for those that ended because they saw another one gone."""
        first = tuple(peer for peer in gone if not self.sides[peer].words[BLAME])
        blamed = {self.sides[peer].words[BLAME] - 1 for peer in gone if self.sides[peer].words[BLAME]} - {self.rank}
        guilty = tuple(sorted(set(first) | blamed)) or tuple(gone)
        names = " and ".join(self.name(peer) for peer in guilty)
        if not set(guilty) & set(self.gone()):
            how = (
                f"made no progress, and {self.name(gone[0])} gave up waiting for "
                f"it{_state_of(self._pids.get(guilty[0]))}"
            )
        elif any(self.sides[peer].words[LEFT] == GAVE_UP for peer in guilty):
            how = f"was interrupted in a collective while {self.name(self.rank)} was waiting for it"
        elif all(self.sides[peer].words[LEFT] for peer in guilty):
            how = f"left the group while {self.name(self.rank)} was waiting for it"
        elif self.remote is not None and set(guilty) <= set(self.remote.ranks):
            how = f"disconnected while {self.name(self.rank)} was waiting for it"
        else:
            how = f"died (its process has ended) while {self.name(self.rank)} was waiting for it"
        self.fail(f"{names} {how}", ranks=guilty)

    def fail(self, message: str, *, ranks: tuple[int, ...]) -> NoReturn:
        """This group is over: now and for every later call."""
        if ranks and not self.own.words[BLAME]:
            self.own.words[BLAME] = ranks[0] + 1
        self.broken = PeerError(message, ranks=tuple(self.names[peer] for peer in ranks))
        if self.remote is not None:  # who waits on another host sees no memory of this one
            self.own.words[LEFT] = self.own.words[LEFT] or GAVE_UP
            self.remote.leave(self.own.words)
        raise self.broken

    def give_up(self, why: str) -> None:
        """A call was broken off: what this rank published of it is not to be trusted. The others are told."""
        if self.broken is None:
            self.own.words[LEFT] = GAVE_UP
            self.broken = PeerError(f"a collective was aborted ({why})")
            self.drop()

    def check(self) -> None:
        """Raise what broke the group, if anything did."""
        if self.broken is not None:
            raise PeerError(f"this group failed before: {self.broken}", ranks=self.broken.ranks)

    def close(self) -> None:
        """Leave. The memory goes when the last rank has gone and the last view of it has."""
        if self.broken is None:
            self.own.words[LEFT] = 1
        self.drop()
        self.broken = self.broken or PeerError("this group was destroyed")

    def drop(self) -> None:
        """Close the sockets: in a forked child too, or the peers would take it for this process."""
        for one in self.sockets.values():
            one.close()
        if self.remote is not None:
            self.remote.close(self.own.words)
        _alive.discard(self)


def bytes_view(tensor: Tensor) -> memoryview:
    """The memory of a flat tensor. (Not through numpy, after which torch would not resize the tensor any more.)"""
    assert tensor.device.type == "cpu", "a GPU's tensor goes through a copy in this host's memory"
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _always() -> bool:
    return True


def _state_of(pid: int | None) -> str:
    """`: its process 17 is stopped`, where that is so."""
    return f": its process {pid} is stopped" if pid and state_of(pid) in ("T", "t") else ""


_alive: weakref.WeakSet[SharedMemory] = weakref.WeakSet()


def _after_fork() -> None:
    for transport in list(_alive):
        if transport.remote is not None:
            transport.remote.drop()
            transport.remote = None
        transport.drop()
        transport.broken = PeerError("a group of the parent process cannot be used in a forked child")


os.register_at_fork(after_in_child=_after_fork)
