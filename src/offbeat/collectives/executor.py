"""Binds a rank's program to shared memory and to the streams to other hosts, and runs it on tensors.

A chunk that others read from this rank is *exposed*: it lies in shared memory, either because the tensor itself does
(`Call.place`: nothing is copied) or in the arena, where it is staged: copied in before, and out again if it was
written. All other chunks are read straight into the caller's tensor. Ranks on other hosts are sent chunks from
wherever these lie; a chunk that comes from another host is received into its place, or added to it piece by piece.

A call is run in rounds that fit the arena, and the processor's cache; round k of R works on the items
[k*n//R, (k+1)*n//R) of each chunk of n items. The cut into chunks, and so the order in which items are added, does not
depend on R, nor on where anything lies, nor on who comes first: the bits are the same on all ranks and in all runs.
At the start of a round the ranks of a host wait for each other, and for nobody else. All ranks compute the same R.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, zip_longest
from typing import Any

import torch
from torch import Tensor

from offbeat.collectives.calls import Call, copy, describe, exposed_by, program_of
from offbeat.collectives.sync import Patience
from offbeat.collectives.transport import ARENA, TAG, Note, SharedMemory, bytes_view
from offbeat.network.streams import PIECE_BYTES, MismatchError, pieces_of
from offbeat.schedules.projection import Mark, Program, Put, Read, Receive, Send, Sent, Wait

_ROUND_BYTES = 4 * 1024 * 1024  # what a rank reduces is read by the others while it is in the cache
_KEPT = 128  # kinds of calls of which the bound programs are kept
_PLACES = 8  # and in how many places of memory each


WAIT, MARK, RUN, TAKE, SEND, SENT, RECEIVE = range(7)

Span = tuple[int, int]  # items of a chunk: from, to
Place = tuple[int, int]  # a buffer, and bytes into it


@dataclass(slots=True)
class Bound:
    """A program bound to memory: what to do, and what to stage before and after (chunk, items of it, arena)."""

    steps: list[tuple[Any, ...]] = field(default_factory=list)
    stage_in: list[tuple[int, Span, Tensor]] = field(default_factory=list)
    stage_out: list[tuple[int, Span, Tensor]] = field(default_factory=list)
    whole_in: Tensor | None = None
    whole_out: Tensor | None = None
    received: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # to other hosts


@dataclass(slots=True)
class Piece:
    """A piece of what another host sends: where it goes, and how (None: it is received there).

    It is received `through` a buffer, or into its own memory, or into the caller's tensor, which is another one in each
    call; `view` is the memory of the first two.
    """

    peer: int
    offset_bytes: int
    last: bool  # of this send
    chunk: int
    items: Span
    memory: Tensor | None  # None: it is in the caller's tensor
    into: Callable[[Tensor, Tensor], object] | None
    through: Tensor | None
    view: memoryview | None


class Binder:
    """Binds one round of one call: finds the memory of every chunk, and joins what lies side by side."""

    def __init__(
        self,
        transport: SharedMemory,
        program: Program,
        call: Call,
        rounds: int,
        number: int,
        places: dict[int, Place],
        buffer: Tensor,
    ) -> None:
        self.transport = transport
        self.buffer = buffer  # for pieces that are added to something
        self.program = program
        self.call = call
        self.places = places
        self.item = call.dtype.itemsize
        self.spans = [(number * n // rounds, (number + 1) * n // rounds) for n in call.sizes]
        self.starts = list(accumulate(call.sizes, initial=0))
        self.staged = {rank: self._staged(rank) for rank, place in places.items() if place[0] == ARENA}
        self.all_in_a_row = rounds == 1 and call.whole is not None and program.exposed == tuple(range(len(call.sizes)))

    def staging(self) -> Bound:
        """Only what is copied in before the start: all that can be bound before the others have come."""
        bound = Bound()
        rank = self.program.rank
        if rank not in self.staged:
            return bound
        if self.all_in_a_row:
            bound.whole_in = self._tensor(rank, self.transport.arena_at, self.starts[-1])
        bound.stage_in = [(c, self.spans[c], self._chunk(rank, c)) for c in self.program.exposed if self._items(c)]
        return bound

    def bind(self) -> Bound:
        bound = self.staging()
        if self.program.rank in self.staged:
            staged = [c for c in self.program.written if c in self.staged[self.program.rank] and self._items(c)]
            bound.stage_out = [(c, self.spans[c], self._chunk(self.program.rank, c)) for c in staged]
            if self.all_in_a_row and self.program.written == self.program.exposed:
                bound.whole_out = bound.whole_in
        scratch: dict[int, Tensor] = {}
        reads: list[Read] = []
        receives: list[Receive] = []
        sends: dict[int, list[bool]] = defaultdict(list)  # to each peer: which of them are not empty
        written: set[int] = set()
        for now in self.program.instructions:
            if isinstance(now, Read | Receive):
                bound.received[now.peer] += self._items(now.chunk) * self.item
                written.add(now.chunk)
            if isinstance(now, Receive):
                bound.steps += self._reads(reads)
                reads = []
                receives.append(now)
                continue
            bound.steps += self._receives(receives, scratch)
            receives = []
            if isinstance(now, Read) and now.scratch is None:
                reads.append(now)
                continue
            bound.steps += self._reads(reads)
            reads = []
            if isinstance(now, Wait):
                bound.steps.append((WAIT, now.peer, now.mark))
            elif isinstance(now, Mark):
                if self.transport.near:
                    bound.steps.append((MARK, now.mark))
            elif isinstance(now, Send):
                sends[now.peer].append(bool(self._items(now.chunk)))
                if self._items(now.chunk):
                    bound.sent[now.peer] += self._items(now.chunk) * self.item
                    mine = self._own(now.chunk)
                    view = None if mine is None else bytes_view(mine)
                    where = now.chunk, self.spans[now.chunk], now.chunk not in written
                    bound.steps.append((SEND, now.peer, where, mine, view))
            elif isinstance(now, Sent):
                bound.steps.append((SENT, now.peer, sum(sends[now.peer][: now.sends])))
            elif isinstance(now, Read):
                assert now.scratch is not None
                theirs = self._chunk(now.peer, now.chunk)
                scratch[now.scratch] = torch.empty_like(theirs)
                bound.steps.append((RUN, copy, scratch[now.scratch], theirs))
            elif isinstance(now, Put):
                bound.steps.append(self._into(now.chunk, now.reduce, scratch[now.scratch]))
        bound.steps += self._receives(receives, scratch)
        bound.steps += self._reads(reads)
        return bound

    # --- where chunks are ----------------------------------------------------------------------------------------

    def _items(self, chunk: int) -> int:
        return self.spans[chunk][1] - self.spans[chunk][0]

    def _staged(self, rank: int) -> dict[int, int]:
        """Where in its arena (bytes into the segment) a rank keeps each of its exposed chunks."""
        at, places = self.transport.arena_at, {}
        for chunk in exposed_by(self.call.plan, rank, self.transport.hosts):
            places[chunk] = at
            at += self._items(chunk) * self.item
        return places

    def _at(self, rank: int, chunk: int) -> int | None:
        """Bytes into the buffer that a rank's chunk lies in; None for a chunk of mine that is not in shared memory."""
        if rank in self.staged:
            return self.staged[rank].get(chunk)
        return self.places[rank][1] + (self.starts[chunk] + self.spans[chunk][0]) * self.item

    def _tensor(self, rank: int, at: int, items: int) -> Tensor:
        return self.transport.buffer(rank, self.places[rank][0]).tensor(self.call.dtype, items, at)

    def _chunk(self, rank: int, chunk: int, items: int | None = None) -> Tensor:
        """A rank's chunk, or so many items from its start."""
        at = self._at(rank, chunk)
        assert at is not None, "the schedule reads a chunk that its owner does not expose"
        return self._tensor(rank, at, self._items(chunk) if items is None else items)

    def _own(self, chunk: int) -> Tensor | None:
        """My chunk; None where it is in the caller's tensor, which is another one in each call."""
        return None if self._at(self.program.rank, chunk) is None else self._chunk(self.program.rank, chunk)

    # --- what is done with them ----------------------------------------------------------------------------------

    def _into(self, chunk: int, reduce: bool, theirs: Tensor) -> tuple[Any, ...]:
        into = self.call.into if reduce else copy
        if self._at(self.program.rank, chunk) is None:
            return TAKE, into, chunk, self.spans[chunk], theirs
        return RUN, into, self._chunk(self.program.rank, chunk, theirs.numel()), theirs

    def _reads(self, reads: Sequence[Read]) -> Iterator[tuple[Any, ...]]:
        """The reads between two waits or marks; those of chunks in a row become one."""
        rows: list[list[Read]] = []
        for read in reads:
            if rows and self._follows(rows[-1][-1], read):
                rows[-1].append(read)
            elif self._items(read.chunk):
                rows.append([read])
        for row in rows:
            first, items = row[0], sum(self._items(read.chunk) for read in row)
            yield self._into(first.chunk, first.reduce, self._chunk(first.peer, first.chunk, items))

    def _receives(self, receives: Sequence[Receive], scratch: dict[int, Tensor]) -> Iterator[tuple[Any, ...]]:
        """The receives between two other instructions, piece by piece.

        The pieces of several peers are taken in turns, so that none of them is held up, unless what is added to one
        place would then be added in another order.
        """
        by_peer: dict[int, list[Piece]] = defaultdict(list)
        in_order: list[Piece] = []
        for now in receives:
            pieces = list(self._pieces(now, scratch))
            by_peer[now.peer] += pieces
            in_order += pieces
        turns = [piece for piece in chain.from_iterable(zip_longest(*by_peer.values())) if piece is not None]
        if _order_by_place(turns) != _order_by_place(in_order):
            turns = in_order
        for piece in turns:
            yield RECEIVE, piece

    def _pieces(self, now: Receive, scratch: dict[int, Tensor]) -> Iterator[Piece]:
        start, items = self.spans[now.chunk][0], self._items(now.chunk)
        if now.scratch is not None:
            scratch[now.scratch] = torch.empty(items, dtype=self.call.dtype)
        whole = self._own(now.chunk) if now.scratch is None else scratch[now.scratch]
        into = self.call.into if now.reduce and now.scratch is None else None
        for offset, size in pieces_of(items * self.item):
            first, end = offset // self.item, (offset + size) // self.item
            mine = None if whole is None else whole[first:end]
            through = None if into is None else self.buffer[:size].view(self.call.dtype)
            at = mine if through is None else through
            view = None if at is None else bytes_view(at)
            span = start + first, start + end
            yield Piece(now.peer, offset, end == items, now.chunk, span, mine, into, through, view)

    def _follows(self, last: Read, read: Read) -> bool:
        """Whether a read goes on where the last one ended, there and here."""
        if (read.peer, read.reduce) != (last.peer, last.reduce):
            return False
        ends = [(self._at(rank, last.chunk), self._at(rank, read.chunk)) for rank in (self.program.rank, last.peer)]
        return all(one is not None and one + self._items(last.chunk) * self.item == other for one, other in ends)


def _order_by_place(pieces: Sequence[Piece]) -> dict[tuple[int, int], list[int]]:
    """For each place: from whom it gets something, in order."""
    order: dict[tuple[int, int], list[int]] = defaultdict(list)
    for piece in pieces:
        order[piece.chunk, piece.items[0]].append(piece.peer)
    return order


def part(call: Call, chunk: int, span: Span, *, given: bool) -> Tensor:
    """Items of a chunk of the caller's tensors."""
    if call.whole is not None:
        start = chunk * call.items // len(call.sizes)
        return call.whole[start + span[0] : start + span[1]]
    return (call.give if given else call.take)[chunk][span[0] : span[1]]


@dataclass(slots=True)
class _Kind:
    """Calls that differ in nothing but their time: the same calls come back, and are bound to memory once."""

    program: Program
    own: Place
    wanted: int
    staging: Bound
    bound: dict[tuple[int, tuple[Place, ...]], list[Bound]] = field(default_factory=dict)


class Executor:
    """Runs calls on one group, one at a time. `arrived(call, stamps)` is told when each rank came to a call."""

    def __init__(self, transport: SharedMemory, arrived: Callable[[Call, list[int]], None]) -> None:
        self.transport = transport
        self.base = 1  # the mark of the next start
        self.calls = 0
        self._arrived = arrived
        self._bounce = torch.empty(PIECE_BYTES if transport.remote else 0, dtype=torch.uint8)  # pieces on their way in
        self._kinds: OrderedDict[tuple[object, ...], _Kind] = OrderedDict()

    def run(self, call: Call, patience: Patience) -> None:
        """The whole of one call. When it returns, the tensors are the caller's again.

        Whatever interrupts it (Ctrl-C, a lack of descriptors) ends the group: the others may have read half of it.
        """
        self.transport.check()
        try:
            self._run(call, patience)
        except BaseException as error:
            self.transport.give_up(f"{type(error).__name__} in {call}")
            raise

    def _run(self, call: Call, patience: Patience) -> None:
        transport = self.transport
        self.calls += 1
        transport.start(self.calls)
        kind = self._kind(call)
        if call.place is None:
            self._stage_in(kind.staging, call)
        note = Note(
            self.calls, call.what, call.items, call.detail, call.plan.way, kind.wanted, *kind.own, call.since_ns
        )
        transport.write_note(note)
        if transport.remote is not None:
            transport.tag(note)
        transport.mark(self.base)
        places, stamps, rounds, alike = (
            [kind.own] * transport.ranks,
            [call.since_ns] * transport.ranks,
            kind.wanted,
            True,
        )
        for peer in transport.near:
            transport.wait(peer, self.base, patience)
            theirs = transport.read_note(peer, self.calls)
            if theirs[:5] != note[:5]:
                self._differ(peer, theirs[:5], call)
            places[peer] = theirs.buffer, theirs.offset_bytes
            stamps[peer] = theirs.since_ns
            if theirs.rounds != rounds:
                rounds, alike = max(rounds, theirs.rounds), False
        self._arrived(call, stamps)
        if transport.hear_all():
            self.forget()
            kind = self._kind(call)
        bound = self._bind(kind, call, rounds, tuple(places))
        if not alike:  # somebody needs more rounds than others thought
            if kind.wanted != rounds:
                self._stage_in(bound[0], call)
            self.base += 1
            self._start_round(patience)
        for number, one in enumerate(bound):
            if transport.broken is not None:  # by another thread
                raise transport.broken
            if number:
                self._stage_in(one, call)
                self._start_round(patience)
            self._execute(one, call, patience)
            self._stage_out(one, call)
            self.base += kind.program.marks
            for peer, size_bytes in one.received.items():
                transport.count(peer, size_bytes)
            for peer, size_bytes in one.sent.items():
                transport.count_sent(peer, size_bytes)
        transport.end()

    def forget(self) -> None:
        """Let go of all memory that programs were bound to."""
        self._kinds.clear()

    # --- running -------------------------------------------------------------------------------------------------

    def _start_round(self, patience: Patience) -> None:
        self.transport.mark(self.base)
        for peer in self.transport.near:
            self.transport.wait(peer, self.base, patience)

    def _execute(self, bound: Bound, call: Call, patience: Patience) -> None:
        transport, base = self.transport, self.base
        before = {peer: transport.sends(peer) for peer in bound.sent}
        whole = bytes_view(call.whole) if transport.remote is not None and call.whole is not None else None
        for step in bound.steps:
            kind = step[0]
            if kind == RUN:
                step[1](step[2], step[3])
            elif kind == WAIT:
                transport.wait(step[1], base + step[2], patience)
            elif kind == MARK:
                transport.mark(base + step[1])
            elif kind == TAKE:
                _, into, chunk, span, theirs = step
                into(part(call, chunk, span, given=False), theirs)
            elif kind == RECEIVE:
                self._receive(step[1], call, whole)
            elif kind == SEND:
                _, peer, (chunk, span, given), mine, view = step
                if view is None:
                    mine, view = self._callers(call, whole, chunk, span, given=given)
                transport.send(peer, view, mine)
            elif step[2]:
                transport.wait_sent(step[1], before[step[1]] + step[2])

    def _receive(self, piece: Piece, call: Call, whole: memoryview | None) -> None:
        view = piece.view
        if view is None:
            _, view = self._callers(call, whole, piece.chunk, piece.items, given=False)
        try:
            self.transport.receive(piece.peer, piece.offset_bytes, view, last=piece.last)
        except MismatchError as other:
            self._differ(piece.peer, TAG.unpack(other.tag), call)
        if piece.into is not None and piece.through is not None:
            mine = part(call, piece.chunk, piece.items, given=False) if piece.memory is None else piece.memory
            piece.into(mine, piece.through)

    def _callers(
        self, call: Call, whole: memoryview | None, chunk: int, span: Span, *, given: bool
    ) -> tuple[Tensor, memoryview]:
        """Items of a chunk of the caller's, and their memory; `whole` is that of all."""
        if whole is None or call.whole is None:
            mine = part(call, chunk, span, given=given)
            return mine, bytes_view(mine)
        start, item = chunk * call.items // len(call.sizes), call.dtype.itemsize
        return call.whole, whole[(start + span[0]) * item : (start + span[1]) * item]

    def _stage_in(self, bound: Bound, call: Call) -> None:
        if bound.whole_in is not None and call.whole is not None:
            bound.whole_in.copy_(call.whole)
            return
        for chunk, span, arena in bound.stage_in:
            if call.whole is not None or chunk in call.give:
                arena.copy_(part(call, chunk, span, given=True))

    def _stage_out(self, bound: Bound, call: Call) -> None:
        if bound.whole_out is not None and call.whole is not None:
            call.whole.copy_(bound.whole_out)
            return
        for chunk, span, arena in bound.stage_out:
            part(call, chunk, span, given=False).copy_(arena)

    def _differ(self, peer: int, theirs: tuple[int, ...], mine: Call) -> None:
        """Two ranks make different calls: say which. `theirs` are the first five of a note."""
        t = self.transport
        number, what, items, detail, _ = theirs
        said = [describe(what, items), describe(mine.what, mine.items)]
        if said[0] == said[1]:
            why = "with a different root or different sizes" if detail != mine.detail else "with a different schedule"
            said[0] += f" as call {number}" if number != self.calls else f" {why}"
        here = f"{t.name(t.rank)} {said[1]} (call {self.calls} of the group)"
        t.fail(f"{t.name(peer)} called {said[0]}, but {here}", ranks=())

    # --- binding -------------------------------------------------------------------------------------------------

    def _kind(self, call: Call) -> _Kind:
        key = call.plan, call.dtype, call.reduction, call.sizes, call.place, call.whole is None
        known = self._kinds.get(key)
        if known is None:
            transport = self.transport
            program = program_of(call.plan, transport.rank, transport.hosts)
            own = call.place or (ARENA, transport.arena_at)
            wanted = self._rounds(program, call)
            staging = Binder(transport, program, call, wanted, 0, {transport.rank: own}, self._bounce).staging()
            known = self._kinds[key] = _Kind(program, own, wanted, staging)
            if len(self._kinds) > _KEPT:
                self._kinds.popitem(last=False)
        return known

    def _rounds(self, program: Program, call: Call) -> int:
        """In how many rounds this rank wants to do it: staged chunks must fit the arena.

        Ranks on other hosts cannot be asked, so across hosts all compute what the one with most to stage wants.
        """
        hosts = self.transport.hosts
        if hosts is None:
            return self._rounds_for(program.exposed, call, placed=call.place is not None)
        exposed = [exposed_by(call.plan, rank, hosts) for rank in range(self.transport.ranks)]
        room = self.transport.arena_bytes  # a network is no faster for what is in the cache
        return max(self._rounds_for(chunks, call, placed=False, room=room) for chunks in exposed)

    def _rounds_for(self, exposed: Sequence[int], call: Call, *, placed: bool, room: int = _ROUND_BYTES) -> int:
        item = call.dtype.itemsize
        payload = sum(call.sizes[chunk] for chunk in exposed) * item
        if placed:
            return max(1, -(-payload // _ROUND_BYTES))
        room = min(room, self.transport.arena_bytes - len(exposed) * item)
        if room < item:
            self.transport.fail(
                f"arena_bytes is too small for {len(exposed)} chunks; use a larger value in offbeat.Options", ranks=()
            )
        return max(1, -(-payload // room))

    def _bind(self, kind: _Kind, call: Call, rounds: int, places: tuple[Place, ...]) -> list[Bound]:
        """The program of each round, with the memory that it works on."""
        known = kind.bound.get((rounds, places))
        if known is None:
            near = (self.transport.rank, *self.transport.near)
            at = {rank: places[rank] for rank in near}
            binders = [
                Binder(self.transport, kind.program, call, rounds, number, at, self._bounce) for number in range(rounds)
            ]
            known = [binder.bind() for binder in binders]
            if len(kind.bound) >= _PLACES:
                kind.bound.clear()
            kind.bound[rounds, places] = known
        return known
