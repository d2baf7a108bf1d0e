"""Runs a rank's program on tensors, in shared memory and over the streams to other hosts.

A chunk that others read from this rank is *exposed*: it lies in shared memory, either because the tensor itself does
(`Call.place`: nothing is copied) or in the arena, where it is staged: copied in before, and out again if it was
written. All other chunks are read straight into the caller's tensor. Ranks on other hosts are sent chunks from
wherever these lie; a chunk that comes from another host is received into its place, or added to it piece by piece.
`binding` finds the memory of all that; `coded_binding` does so where payloads are sent in the place of chunks.

A call is run in rounds that fit the arena, and the processor's cache; round k of R works on the items
[k*n//R, (k+1)*n//R) of each chunk of n items. The cut into chunks, and so the order in which items are added, does not
depend on R, nor on where anything lies, nor on who comes first: the bits are the same on all ranks and in all runs.
At the start of a round the ranks of a host wait for each other, and for nobody else. All ranks compute the same R.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offbeat.codecs.coder import Coder
from offbeat.collectives.binding import (
    DECODE,
    ENCODE,
    MARK,
    RECEIVE,
    RUN,
    SEND,
    TAKE,
    WAIT,
    Binder,
    Bound,
    Piece,
    Place,
    Span,
    part,
)
from offbeat.collectives.calls import Call, describe, exposed_by, program_of
from offbeat.collectives.coded_binding import CodedBinder, arena_bytes
from offbeat.collectives.sync import Patience
from offbeat.collectives.transport import ARENA, TAG, Note, SharedMemory, bytes_view
from offbeat.network.streams import PIECE_BYTES, MismatchError
from offbeat.schedules.projection import Program

_ROUND_BYTES = 4 * 1024 * 1024  # what a rank reduces is read by the others while it is in the cache
_KEPT = 128  # kinds of calls of which the bound programs are kept
_KEPT_CODED = 32  # of those with a codec, which have memory of their own
_PLACES = 8  # and in how many places of memory each


@dataclass(slots=True)
class _Kind:
    """Calls that differ in nothing but their time: the same calls come back, and are bound to memory once."""

    program: Program
    own: Place
    wanted: int
    staging: Bound
    bound: dict[tuple[int, tuple[Place, ...]], list[Bound]] = field(default_factory=dict)


class Executor:
    """Runs calls on one group, one at a time.

    `arrived(iteration, stamps)` is told when each rank of this host came to a call: this rank first, then the others.
    """

    def __init__(self, transport: SharedMemory, arrived: Callable[[int, list[int]], None]) -> None:
        self.transport = transport
        self.base = 1  # the mark of the next start
        self.calls = 0
        self._arrived = arrived
        self._bounce = torch.empty(PIECE_BYTES if transport.remote else 0, dtype=torch.uint8)  # pieces on their way in
        self._kinds: OrderedDict[tuple[object, ...], _Kind] = OrderedDict()
        self._coded_kinds: OrderedDict[tuple[object, ...], _Kind] = OrderedDict()
        self._coders: dict[str, Coder] = {}

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
        if call.codec is not None:
            self._coder(call).seed(call.seed)
        if call.place is None:
            self._stage_in(kind.staging, call)
        note = Note(
            self.calls, call.what, call.items, call.detail, call.plan.way, kind.wanted, *kind.own, call.since_ns
        )
        transport.write_note(note)
        if transport.remote is not None:
            transport.tag(note)
        transport.mark(self.base)
        places, stamps = [kind.own] * transport.ranks, [call.since_ns]
        rounds, alike = kind.wanted, True
        for peer in transport.near:
            transport.wait(peer, self.base, patience)
            theirs = transport.read_note(peer, self.calls)
            if theirs[:5] != note[:5]:
                self._differ(peer, theirs[:5], call)
            places[peer] = theirs.buffer, theirs.offset_bytes
            stamps.append(theirs.since_ns)
            if theirs.rounds != rounds:
                rounds, alike = max(rounds, theirs.rounds), False
        self._arrived(call.iteration, stamps)
        if transport.hear_all():
            self.forget()
            kind = self._kind(call)
        if call.codec is not None and not alike:  # what is encoded is not encoded again
            transport.fail("ranks of one host have arenas of different sizes; use the same arena_bytes", ranks=())
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
        self._coded_kinds.clear()

    # --- running -------------------------------------------------------------------------------------------------

    def _start_round(self, patience: Patience) -> None:
        self.transport.mark(self.base)
        for peer in self.transport.near:
            self.transport.wait(peer, self.base, patience)

    def _execute(self, bound: Bound, call: Call, patience: Patience) -> None:
        transport, base = self.transport, self.base
        before = {peer: transport.sends(peer) for peer in bound.sent} if bound.sent else bound.sent
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
            elif kind == ENCODE:
                self._encode(step, call)
            elif kind == DECODE:
                _, chunk, span, payload, add, memory = step
                mine = part(call, chunk, span, given=False) if memory is None else memory
                (self._coder(call).add if add else self._coder(call).decode)(payload, mine)
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

    def _encode(self, step: tuple[Any, ...], call: Call) -> None:
        _, chunk, span, payload, take, memory = step
        mine = part(call, chunk, span, given=True) if memory is None else memory
        start = chunk * call.items // len(call.sizes)
        residual = None if call.residual is None else call.residual[start + span[0] : start + span[1]]
        self._coder(call).encode(mine, payload, residual, take=take)

    def _coder(self, call: Call) -> Coder:
        assert call.codec is not None
        if call.codec.line not in self._coders:
            self._coders[call.codec.line] = call.codec.coder()
        return self._coders[call.codec.line]

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
        else:
            for chunk, span, arena in bound.stage_in:
                if call.whole is not None or chunk in call.give:
                    arena.copy_(part(call, chunk, span, given=True))
        for step in bound.first:
            self._encode(step, call)

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
        kinds, most = (self._kinds, _KEPT) if call.codec is None else (self._coded_kinds, _KEPT_CODED)
        known = kinds.get(key)
        if known is None:
            transport = self.transport
            program = program_of(call.plan, transport.rank, transport.hosts)
            own = call.place or (ARENA, transport.arena_at)
            wanted = self._rounds(program, call)
            binder = Binder if call.codec is None else CodedBinder
            staging = binder(transport, program, call, wanted, 0, {transport.rank: own}, self._bounce).staging()
            known = kinds[key] = _Kind(program, own, wanted, staging)
            if len(kinds) > most:
                kinds.popitem(last=False)
        elif len(kinds) == most:  # the next new one takes the place of the one that was not used for longest
            kinds.move_to_end(key)
        return known

    def _rounds(self, program: Program, call: Call) -> int:
        """In how many rounds this rank wants to do it: staged chunks must fit the arena.

        Ranks on other hosts cannot be asked, so across hosts all compute what the one with most to stage wants.
        """
        hosts = self.transport.hosts
        if call.codec is not None:
            return self._coded_rounds(call)
        if hosts is None:
            return self._rounds_for(program.exposed, call, placed=call.place is not None)
        exposed = [exposed_by(call.plan, rank, hosts) for rank in range(self.transport.ranks)]
        room = self.transport.arena_bytes  # a network is no faster for what is in the cache
        return max(self._rounds_for(chunks, call, placed=False, room=room) for chunks in exposed)

    def _coded_rounds(self, call: Call) -> int:
        assert call.codec is not None
        hosts, many = self.transport.hosts, 1
        for rank in range(self.transport.ranks):
            total, more = arena_bytes(call.codec, call.plan, rank, hosts, call.sizes)
            room = min(_ROUND_BYTES if hosts is None else self.transport.arena_bytes, self.transport.arena_bytes - more)
            if total and room < PIECE_BYTES // 16:
                self.transport.fail(
                    f"arena_bytes is too small for {len(call.sizes)} chunks; use a larger value in offbeat.Options",
                    ranks=(),
                )
            many = max(many, -(-total // room)) if total else many
        return many

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
            binder = Binder if call.codec is None else CodedBinder
            binders = [
                binder(self.transport, kind.program, call, rounds, number, at, self._bounce) for number in range(rounds)
            ]
            known = [one.bind() for one in binders]
            if len(kind.bound) >= _PLACES:
                kind.bound.clear()
            kind.bound[rounds, places] = known
        return known
