"""Runs a rank's program on tensors, through shared memory.

A call that does not fit the arena is run in rounds; round k of R works on the items [k*n//R, (k+1)*n//R) of each chunk
of n items. The cut into chunks, and so the order in which items are added, does not depend on R, nor on where
anything lies, nor on who comes first: the bits are the same on all ranks and in all runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from offbeat.collectives.binding import MARK, RUN, WAIT, Binder, Bound, part
from offbeat.collectives.calls import Call, describe
from offbeat.collectives.sync import Patience
from offbeat.collectives.transport import ARENA, Note, SharedMemory
from offbeat.schedules.projection import Program

_KEPT = 256  # programs bound to memory that are kept


class Executor:
    """Runs calls on one group, one at a time. `arrived(call, stamps)` is told when each rank came to a call."""

    def __init__(self, transport: SharedMemory, arrived: Callable[[Call, list[int]], None]) -> None:
        self.transport = transport
        self.base = 1  # the mark of the next start
        self.calls = 0
        self._arrived = arrived
        self._bound: OrderedDict[tuple[object, ...], Bound] = OrderedDict()

    def run(self, call: Call, patience: Patience) -> None:
        """The whole of one call. When it returns, the tensors are the caller's again."""
        transport = self.transport
        transport.check()
        self.calls += 1
        transport.start(self.calls)
        program = call.plan.program(transport.rank)
        wanted = rounds = 1 if call.place else self._rounds(program, call)
        own = call.place or (ARENA, transport.arena_at)
        bound = self._bind(program, call, rounds, 0, {transport.rank: own}, only_stage=True)
        self._stage_in(bound, call)
        note = Note(self.calls, call.what, call.items, call.detail, call.plan.way, wanted, *own, call.since_ns)
        transport.write_note(note)
        transport.mark(self.base)
        places, stamps, wishes = {transport.rank: own}, [call.since_ns] * transport.ranks, {wanted}
        for peer in transport.others:
            transport.wait(peer, self.base, patience)
            theirs = transport.read_note(peer, self.calls)
            if theirs[:5] != note[:5]:
                self._differ(peer, theirs, note)
            places[peer] = theirs.buffer, theirs.offset_bytes
            stamps[peer] = theirs.since_ns
            wishes.add(theirs.rounds)
        self._arrived(call, stamps)
        rounds = max(wishes)
        if len(wishes) > 1:  # somebody needs more rounds than others thought
            if wanted != rounds:
                self._stage_in(self._bind(program, call, rounds, 0, places, only_stage=True), call)
            self.base += 1
            self._start_round(patience)
        for number in range(rounds):
            bound = self._bind(program, call, rounds, number, places)
            if number:
                self._stage_in(bound, call)
                self._start_round(patience)
            self._execute(bound, call, patience)
            self._stage_out(bound, call)
            self.base += program.marks
            for peer, size_bytes in bound.received.items():
                transport.count(peer, size_bytes)
        transport.end()

    def forget(self) -> None:
        """Let go of all memory that programs were bound to."""
        self._bound.clear()

    # --- running -------------------------------------------------------------------------------------------------

    def _start_round(self, patience: Patience) -> None:
        self.transport.mark(self.base)
        for peer in self.transport.others:
            self.transport.wait(peer, self.base, patience)

    def _execute(self, bound: Bound, call: Call, patience: Patience) -> None:
        transport, base = self.transport, self.base
        for step in bound.steps:
            kind = step[0]
            if kind == RUN:
                step[1](step[2], step[3])
            elif kind == WAIT:
                transport.wait(step[1], base + step[2], patience)
            elif kind == MARK:
                transport.mark(base + step[1])
            else:
                _, into, chunk, span, theirs = step
                into(part(call, chunk, span, given=False), theirs)

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

    def _differ(self, peer: int, theirs: Note, mine: Note) -> None:
        t = self.transport
        said = [describe(theirs.what, theirs.items), describe(mine.what, mine.items)]
        if said[0] == said[1]:
            why = "with another root or other sizes" if theirs.detail != mine.detail else "with another schedule"
            said[0] += f" {why}"
        here = f"{t.name(t.rank)} {said[1]} (call {mine.call} of the group)"
        t.fail(f"{t.name(peer)} called {said[0]}, but {here}", ranks=())

    # --- binding -------------------------------------------------------------------------------------------------

    def _rounds(self, program: Program, call: Call) -> int:
        """In how many rounds the exposed chunks fit the arena."""
        item = call.dtype.itemsize
        payload = sum(call.sizes[chunk] for chunk in program.exposed) * item
        room = self.transport.arena_bytes - len(program.exposed) * item
        if room < item:
            self.transport.fail(f"the arena is too small for {len(program.exposed)} chunks", ranks=())
        return max(1, -(-payload // room))

    def _bind(
        self,
        program: Program,
        call: Call,
        rounds: int,
        number: int,
        places: dict[int, tuple[int, int]],
        *,
        only_stage: bool = False,
    ) -> Bound:
        """The program of one round, with the memory that it works on. Kept, since the same calls come back."""
        key = (
            call.plan, call.dtype, call.reduction, call.sizes, rounds, number, only_stage, call.whole is None,
            tuple(sorted(places.items())),
        )  # fmt: skip
        known = self._bound.get(key)
        if known is not None:
            return known
        binder = Binder(self.transport, program, call, rounds, number, places)
        bound = binder.staging() if only_stage else binder.bind()
        self._bound[key] = bound
        if len(self._bound) > _KEPT:
            self._bound.popitem(last=False)
        return bound
