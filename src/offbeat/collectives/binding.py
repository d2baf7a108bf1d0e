"""A program bound to memory: which tensor is read into which.

A chunk that others read from this rank is *exposed*: it lies in shared memory, either because the tensor itself does
(`Call.place`: nothing is copied) or in the arena, where it is staged: copied in before, and out again if it was
written. All other chunks are read straight into the caller's tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from offbeat.collectives.calls import Call, copy
from offbeat.collectives.transport import ARENA, SharedMemory
from offbeat.schedules.projection import Mark, Program, Put, Read, Wait

WAIT, MARK, RUN, TAKE = range(4)

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
    ) -> None:
        self.transport = transport
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
            written = [c for c in self.program.written if c in self.staged[self.program.rank] and self._items(c)]
            bound.stage_out = [(c, self.spans[c], self._chunk(self.program.rank, c)) for c in written]
            if self.all_in_a_row and self.program.written == self.program.exposed:
                bound.whole_out = bound.whole_in
        scratch: dict[int, Tensor] = {}
        reads: list[Read] = []
        for now in self.program.instructions:
            if isinstance(now, Read):
                bound.received[now.peer] += self._items(now.chunk) * self.item
            if isinstance(now, Read) and now.scratch is None:
                reads.append(now)
                continue
            bound.steps += self._reads(reads)
            reads = []
            if isinstance(now, Wait):
                bound.steps.append((WAIT, now.peer, now.mark))
            elif isinstance(now, Mark):
                bound.steps.append((MARK, now.mark))
            elif isinstance(now, Read):
                assert now.scratch is not None
                theirs = self._chunk(now.peer, now.chunk)
                scratch[now.scratch] = torch.empty_like(theirs)
                bound.steps.append((RUN, copy, scratch[now.scratch], theirs))
            elif isinstance(now, Put):
                bound.steps.append(self._into(now.chunk, now.reduce, scratch[now.scratch]))
        bound.steps += self._reads(reads)
        return bound

    # --- where chunks are ----------------------------------------------------------------------------------------

    def _items(self, chunk: int) -> int:
        return self.spans[chunk][1] - self.spans[chunk][0]

    def _staged(self, rank: int) -> dict[int, int]:
        """Where in its arena (bytes into the segment) a rank keeps each of its exposed chunks."""
        at, places = self.transport.arena_at, {}
        for chunk in self.call.plan.exposed(rank):
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
        assert at is not None, "a schedule that reads what is not exposed"
        return self._tensor(rank, at, self._items(chunk) if items is None else items)

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

    def _follows(self, last: Read, read: Read) -> bool:
        """Whether a read goes on where the last one ended, there and here."""
        if (read.peer, read.reduce) != (last.peer, last.reduce):
            return False
        ends = [(self._at(rank, last.chunk), self._at(rank, read.chunk)) for rank in (self.program.rank, last.peer)]
        return all(one is not None and one + self._items(last.chunk) * self.item == other for one, other in ends)


def part(call: Call, chunk: int, span: Span, *, given: bool) -> Tensor:
    """Items of a chunk of the caller's tensors."""
    if call.whole is not None:
        start = chunk * call.items // len(call.sizes)
        return call.whole[start + span[0] : start + span[1]]
    return (call.give if given else call.take)[chunk][span[0] : span[1]]
