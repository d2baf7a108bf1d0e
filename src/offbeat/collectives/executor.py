"""Runs a rank's program on tensors, through shared memory.

A call is run in rounds that fit the arena, and the processor's cache; round k of R works on the items
[k*n//R, (k+1)*n//R) of each chunk of n items. The cut into chunks, and so the order in which items are added, does not
depend on R, nor on where anything lies, nor on who comes first: the bits are the same on all ranks and in all runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from offbeat.collectives.binding import MARK, RUN, WAIT, Binder, Bound, Place, part
from offbeat.collectives.calls import Call, describe
from offbeat.collectives.sync import Patience
from offbeat.collectives.transport import ARENA, Note, SharedMemory
from offbeat.schedules.projection import Program

_ROUND_BYTES = 4 * 1024 * 1024  # what a rank reduces is read by the others while it is in the cache
_KEPT = 128  # kinds of calls of which the bound programs are kept
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
    """Runs calls on one group, one at a time. `arrived(call, stamps)` is told when each rank came to a call."""

    def __init__(self, transport: SharedMemory, arrived: Callable[[Call, list[int]], None]) -> None:
        self.transport = transport
        self.base = 1  # the mark of the next start
        self.calls = 0
        self._arrived = arrived
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
        transport.mark(self.base)
        places, stamps, rounds, alike = (
            [kind.own] * transport.ranks,
            [call.since_ns] * transport.ranks,
            kind.wanted,
            True,
        )
        for peer in transport.others:
            transport.wait(peer, self.base, patience)
            theirs = transport.read_note(peer, self.calls)
            if theirs[:5] != note[:5]:
                self._differ(peer, theirs, note)
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
        transport.end()

    def forget(self) -> None:
        """Let go of all memory that programs were bound to."""
        self._kinds.clear()

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

    def _kind(self, call: Call) -> _Kind:
        key = call.plan, call.dtype, call.reduction, call.sizes, call.place, call.whole is None
        known = self._kinds.get(key)
        if known is None:
            transport = self.transport
            program = call.plan.program(transport.rank)
            own = call.place or (ARENA, transport.arena_at)
            wanted = self._rounds(program, call)
            staging = Binder(transport, program, call, wanted, 0, {transport.rank: own}).staging()
            known = self._kinds[key] = _Kind(program, own, wanted, staging)
            if len(self._kinds) > _KEPT:
                self._kinds.popitem(last=False)
        return known

    def _rounds(self, program: Program, call: Call) -> int:
        """In how many rounds this rank wants to do it: staged chunks must fit the arena."""
        item = call.dtype.itemsize
        payload = sum(call.sizes[chunk] for chunk in program.exposed) * item
        if call.place is not None:
            return max(1, -(-payload // _ROUND_BYTES))
        room = min(_ROUND_BYTES, self.transport.arena_bytes - len(program.exposed) * item)
        if room < item:
            self.transport.fail(f"the arena is too small for {len(program.exposed)} chunks", ranks=())
        return max(1, -(-payload // room))

    def _bind(self, kind: _Kind, call: Call, rounds: int, places: tuple[Place, ...]) -> list[Bound]:
        """The program of each round, with the memory that it works on."""
        known = kind.bound.get((rounds, places))
        if known is None:
            at = dict(enumerate(places))
            known = [Binder(self.transport, kind.program, call, rounds, number, at).bind() for number in range(rounds)]
            if len(kind.bound) >= _PLACES:
                kind.bound.clear()
            kind.bound[rounds, places] = known
        return known
