"""Binds a rank's program to memory: where each chunk lies, and what is done with it, as a list of plain steps.

A program is bound once for each kind of call, and run many times. What lies in the caller's tensor, which is another
one in each call, is named by its chunk and items; everything else is a tensor by now.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, zip_longest
from typing import Any

import torch
from torch import Tensor

from offbeat.collectives.calls import Call, copy, exposed_by
from offbeat.collectives.transport import ARENA, SharedMemory, bytes_view
from offbeat.network.streams import pieces_of
from offbeat.schedules.projection import Mark, Program, Put, Read, Receive, Send, Sent, Wait

WAIT, MARK, RUN, TAKE, SEND, SENT, RECEIVE, ENCODE, DECODE = range(9)

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
    first: list[tuple[Any, ...]] = field(default_factory=list)  # what is encoded before others may read


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
        self.spans = [self._span(n, rounds, number) for n in call.sizes]
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

    def _span(self, items: int, rounds: int, number: int) -> Span:
        """The items of a chunk that a round works on."""
        return number * items // rounds, (number + 1) * items // rounds

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
