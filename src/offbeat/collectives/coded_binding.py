"""Binds programs in which chunks are sent as payloads (`codecs`).

Values lie where they lie without a codec; a chunk that others of this host read as it is lies in the arena. The payload
of a chunk lies in the arena, behind these, if others of this host read it, and otherwise in memory of this rank alone.
What is to be added comes in through a buffer of its own. Rounds cut chunks at whole blocks, so that the payloads of all
rounds together have the size that was priced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.codecs import BLOCK, Codec
from offbeat.codecs.table import ITEM_BYTES
from offbeat.collectives.binding import (
    DECODE,
    ENCODE,
    MARK,
    RECEIVE,
    RUN,
    SEND,
    SENT,
    WAIT,
    Binder,
    Bound,
    Piece,
    Place,
    Span,
)
from offbeat.collectives.calls import Call, Plan, copy, exposed_by, payloads_read_from
from offbeat.collectives.transport import ARENA, SharedMemory, bytes_view
from offbeat.network.streams import pieces_of
from offbeat.schedules.projection import Encode, Mark, Program, Put, Read, Receive, Send, Sent, Wait

_LINE = 64  # where payloads start


def arena_bytes(
    codec: Codec, way: Plan, rank: int, hosts: tuple[int, ...] | None, sizes: Sequence[int]
) -> tuple[int, int]:
    """What a rank keeps in the arena in all rounds together, and what each round may need more than its share."""
    plain, coded = exposed_by(way, rank, hosts), payloads_read_from(way, rank, hosts)
    total = sum(sizes[chunk] * ITEM_BYTES for chunk in plain) + sum(codec.size_bytes(sizes[chunk]) for chunk in coded)
    return total, len(plain) * BLOCK * ITEM_BYTES + len(coded) * (codec.size_bytes(BLOCK) + _LINE) + _LINE


class CodedBinder(Binder):
    """See the module's text."""

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
        super().__init__(transport, program, call, rounds, number, places, buffer)
        assert call.codec is not None
        self.codec = call.codec
        self._slots = {rank: self._slots_of(rank) for rank in places}  # bytes into the segment of each payload
        self._kept: dict[int, Tensor] = {}  # payloads that only this rank reads
        self._coming = torch.empty(0, dtype=torch.uint8)

    def _span(self, items: int, rounds: int, number: int) -> Span:
        blocks = -(-items // BLOCK)
        return min(items, number * blocks // rounds * BLOCK), min(items, (number + 1) * blocks // rounds * BLOCK)

    def staging(self) -> Bound:
        bound = super().staging()
        bound.first = [self._encode(now) for now in self.program.first if self._items(now.chunk)]
        return bound

    def bind(self) -> Bound:
        bound = self.staging()
        if self.program.rank in self.staged:
            staged = [c for c in self.program.written if c in self.staged[self.program.rank] and self._items(c)]
            bound.stage_out = [(c, self.spans[c], self._chunk(self.program.rank, c)) for c in staged]
        sends: dict[int, list[bool]] = defaultdict(list)
        scratch: dict[int, Tensor] = {}
        written: set[int] = set()
        for now in self.program.instructions:
            if isinstance(now, Wait):
                bound.steps.append((WAIT, now.peer, now.mark))
            elif isinstance(now, Mark):
                if self.transport.near:
                    bound.steps.append((MARK, now.mark))
            elif isinstance(now, Sent):
                bound.steps.append((SENT, now.peer, sum(sends[now.peer][: now.sends])))
            elif isinstance(now, Send):
                sends[now.peer].append(bool(self._items(now.chunk)))
            if isinstance(now, Wait | Mark | Sent) or not self._items(now.chunk):
                continue
            if isinstance(now, Read | Receive):
                bound.received[now.peer] += self._bytes(now.chunk, coded=now.coded)
                written.add(now.chunk)
            if isinstance(now, Send):
                bound.sent[now.peer] += self._bytes(now.chunk, coded=now.coded)
                mine = self._payload(now.chunk) if now.coded else self._own(now.chunk)
                view = None if mine is None else bytes_view(mine)
                where = now.chunk, self.spans[now.chunk], now.chunk not in written
                bound.steps.append((SEND, now.peer, where, mine, view))
            elif isinstance(now, Encode):
                bound.steps.append(self._encode(now))
            elif isinstance(now, Put):
                bound.steps += self._put(now, scratch[now.scratch])
            elif isinstance(now, Receive):
                bound.steps += self._received(now, scratch) if now.coded else self._receives([now], scratch)
            elif now.coded:
                bound.steps += self._read(now, scratch)
            elif now.scratch is None:
                bound.steps += self._reads([now])
            else:
                theirs = self._chunk(now.peer, now.chunk)
                scratch[now.scratch] = torch.empty_like(theirs)
                bound.steps.append((RUN, copy, scratch[now.scratch], theirs))
        return bound

    # --- payloads ----------------------------------------------------------------------------------------------------

    def _bytes(self, chunk: int, *, coded: bool) -> int:
        items = self._items(chunk)
        return self.codec.size_bytes(items) if coded else items * self.item

    def _slots_of(self, rank: int) -> dict[int, int]:
        used = sum(self._items(chunk) * self.item for chunk in exposed_by(self.call.plan, rank, self.transport.hosts))
        at, slots = self.transport.arena_at + used, {}
        for chunk in payloads_read_from(self.call.plan, rank, self.transport.hosts):
            at = -(-at // _LINE) * _LINE
            slots[chunk] = at
            at += self._bytes(chunk, coded=True)
        return slots

    def _payload(self, chunk: int, rank: int | None = None) -> Tensor:
        """A rank's payload of a chunk; mine, if no rank is named."""
        owner = self.program.rank if rank is None else rank
        size = self._bytes(chunk, coded=True)
        if chunk in self._slots[owner]:
            return self.transport.buffer(owner, ARENA).tensor(torch.uint8, size, self._slots[owner][chunk])
        assert rank is None, "the schedule reads a payload that its owner does not expose"
        if chunk not in self._kept:
            self._kept[chunk] = torch.empty(size, dtype=torch.uint8)
        return self._kept[chunk]

    def _encode(self, now: Encode) -> tuple[Any, ...]:
        return ENCODE, now.chunk, self.spans[now.chunk], self._payload(now.chunk), now.take, self._own(now.chunk)

    def _decode(self, chunk: int, payload: Tensor, *, reduce: bool) -> tuple[Any, ...]:
        return DECODE, chunk, self.spans[chunk], payload, reduce, self._own(chunk)

    def _read(self, now: Read, scratch: dict[int, Tensor]) -> Iterator[tuple[Any, ...]]:
        theirs = self._payload(now.chunk, now.peer)
        if now.scratch is not None:
            scratch[now.scratch] = torch.empty_like(theirs)
            yield RUN, copy, scratch[now.scratch], theirs
        elif now.reduce:
            yield self._decode(now.chunk, theirs, reduce=True)
        else:  # the payload is taken over, to be passed on
            mine = self._payload(now.chunk)
            yield RUN, copy, mine, theirs
            yield self._decode(now.chunk, mine, reduce=False)

    def _put(self, now: Put, held: Tensor) -> Iterator[tuple[Any, ...]]:
        if not now.coded:
            yield self._into(now.chunk, now.reduce, held)
        elif now.reduce:
            yield self._decode(now.chunk, held, reduce=True)
        else:
            mine = self._payload(now.chunk)
            yield RUN, copy, mine, held
            yield self._decode(now.chunk, mine, reduce=False)

    def _received(self, now: Receive, scratch: dict[int, Tensor]) -> Iterator[tuple[Any, ...]]:
        size = self._bytes(now.chunk, coded=True)
        if now.scratch is not None:
            into = scratch[now.scratch] = torch.empty(size, dtype=torch.uint8)
        elif now.reduce:
            if len(self._coming) < size:
                self._coming = torch.empty(size, dtype=torch.uint8)
            into = self._coming[:size]
        else:
            into = self._payload(now.chunk)
        for offset, length in pieces_of(size):
            view = bytes_view(into[offset : offset + length])
            last = offset + length == size
            yield RECEIVE, Piece(now.peer, offset, last, now.chunk, self.spans[now.chunk], into, None, None, view)
        if now.scratch is None:
            yield self._decode(now.chunk, into, reduce=now.reduce)
