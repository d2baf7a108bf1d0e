"""The loop of a simulated server with all that can happen written out, for large simulations.

It is a second loop beside `Simulation.turns` for speed alone: with 10,000 learners it takes half of the time or less
(benchmarks/simulator.py). A test over every row of the table holds the two to the same decisions and the same result.

Its queue of events is a calendar queue (Brown 1988). Time is cut into slots. Entries of later slots lie unsorted; one
slot is sorted when its time has come (`today`). The order is that of the entries as tuples, exactly as from a heap. The
hot loop does the adding and taking itself; what falls into today goes in by `bisect.insort`.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable
from typing import TYPE_CHECKING

from offbeat.policies import Apply, Cancel, Command, Drop, Pushed, Resume, Send, Stopped, Wake, Woke
from offbeat.policies.failures import is_foreign
from offbeat.simulate.engine import END, FINISH, WAKE

if TYPE_CHECKING:
    from offbeat.simulate.server import Simulation

Entry = tuple[float, int, int, int, float, int]  # time, kind, learner, number; when and at which version it began


class Calendar:
    """`slots[int(time * slots_per_s)]` are lists of entries; `today` is the sorted list of the slot that is on."""

    def __init__(self, entries: Iterable[Entry], *, slots_per_s: float) -> None:
        self.slots_per_s = slots_per_s
        self.slots: dict[int, list[Entry]] = {}
        self.today: list[Entry] = []
        self.days: list[int] = []  # a heap of the slots that have entries
        for entry in entries:
            slot = int(entry[0] * slots_per_s)
            (self.slots.get(slot) or self.begin_slot(slot)).append(entry)

    def begin_slot(self, slot: int) -> list[Entry]:
        """The (empty) list of a slot that had none."""
        heapq.heappush(self.days, slot)
        found: list[Entry] = []
        self.slots[slot] = found
        return found

    def begin_day(self) -> int:
        """Fill `today` (the same list) with the next slot, sorted; its number, or -1 when nothing is left."""
        if not self.days:
            return -1
        day = heapq.heappop(self.days)
        self.today[:] = sorted(self.slots.pop(day))
        return day

    def left(self, taken: int) -> Iterable[Entry]:
        """All entries but those of today that were taken, in no order."""
        yield from self.today[taken:]
        for entries in self.slots.values():
            yield from entries


def go_quickly(simulation: Simulation) -> None:
    """Good where communication takes no time, nobody fails, every minibatch is pushed, no spans are kept, and only what
    has just been pushed is dropped. Nearly
    all entries are then minibatches that finish and are answered by one `Send` to their learner: the inner loop.
    There an entry itself holds when and at which version its minibatch began, since arrays of 10,000 learners would
    cost more, and entries lie in a calendar, which is quicker than a heap of that size and has the same order. The
    arrays are right for whoever was sent weights outside the inner loop, which is whoever can be cancelled, and for
    all when the loop ends.
    """
    policy, handle, turn, doing = simulation.policy, simulation.handle, simulation.turn, simulation.doing
    version, since, samples = simulation.version, simulation.since, simulation.samples
    blocks, refill, updates = simulation.draws.blocks, simulation.draws.refill, simulation.updates
    new = tuple.__new__
    entries = [(at, kind, one, number, since[one], version[one]) for at, kind, one, number in simulation.heap]
    calendar = Calendar(entries, slots_per_s=simulation.cluster.learners / 64 / _typical_wait(simulation))
    slots, today, begin_slot, begin_day = calendar.slots, calendar.today, calendar.begin_slot, calendar.begin_day
    ticket = at_entry = day = 0
    per_s = calendar.slots_per_s
    # Where nobody cancels, no entry is void; where nobody waits, a single command is a `Send` to who has pushed.
    cancels, waits = policy.cancels, policy.waits
    foreign = is_foreign(policy)  # of one from outside it is looked at; the tests hold ours to it
    computed = waited = wasted = now = 0.0
    patience, idle, at_update = simulation.patience, 0, 0
    stopped: list[tuple[int, int]] = []
    while policy.version < updates:
        while True:
            while at_entry == len(today):
                at_entry = 0
                day = begin_day()
                if day < 0 or ticket - at_update > patience:
                    simulation.now = now
                    raise simulation.stands_still()
            now, kind, learner, number, began, at_version = today[at_entry]
            at_entry += 1
            if kind != FINISH or (cancels and number != turn[learner]):
                woken = kind == WAKE and number == simulation.wake
                commands: tuple[Command, ...] = handle(Woke(now)) if woken else ()
                break
            ticket += 1
            computed += now - began
            commands = handle(new(Pushed, (learner, ticket, at_version, samples[learner], None, None, now)))
            if waits or len(commands) != 1 or (foreign and commands[0].__class__ is not Send):
                doing[learner] = "wait"
                since[learner] = now
                break
            at = now + (blocks[learner] or refill(learner)).pop()
            slot = int(at * per_s)
            if slot > day:
                (slots.get(slot) or begin_slot(slot)).append((at, FINISH, learner, number, now, policy.version))
            else:
                if at_entry > 4096:  # a long day: forget what is over
                    del today[:at_entry]
                    at_entry = 0
                insort(today, (at, FINISH, learner, number, now, policy.version), at_entry)
        if kind == END:
            break
        idle += 1
        if idle > patience:
            simulation.now = now
            raise simulation.stands_still()
        for command in commands:
            if isinstance(command, (Send, Resume)):  # first, since most are
                other = command.learner
                waited += now - since[other]
                doing[other] = "compute"
                since[other] = now
                if type(command) is Send:
                    version[other] = policy.version
                at = now + (blocks[other] or refill(other)).pop()
                slot = int(at * per_s)
                entry = (at, FINISH, other, turn[other], now, version[other])
                if slot > day:
                    (slots.get(slot) or begin_slot(slot)).append(entry)
                else:
                    if at_entry > 4096:
                        del today[:at_entry]
                        at_entry = 0
                    insort(today, entry, at_entry)
            elif isinstance(command, Cancel):
                other = command.learner
                cut_short = now - since[other]
                computed += cut_short
                wasted += cut_short
                doing[other] = "wait"
                since[other] = now
                turn[other] += 1
                stopped.append((other, version[other]))
            elif isinstance(command, Apply):
                simulation.count_update(len(command.tickets))
                idle, at_update = 0, ticket
            elif isinstance(command, Drop):  # what was pushed just now
                simulation.tally.dropped += 1
                wasted += now - began
            else:
                if not isinstance(command, Wake):
                    raise simulation.no_command(command)
                simulation.wake += 1
                entry = (max(now, command.at_s), WAKE, 0, simulation.wake, now, 0)
                slot = int(entry[0] * per_s)
                if slot > day:
                    (slots.get(slot) or begin_slot(slot)).append(entry)
                else:
                    insort(today, entry, at_entry)
        if stopped:
            simulation.tally.cancelled += len(stopped)
            for other, old in sorted(stopped) if policy.version < updates else ():
                handle(new(Stopped, (other, old, now)))
            stopped.clear()
    for _, kind, learner, number, began, at_version in calendar.left(at_entry):
        if kind == FINISH and number == turn[learner]:
            since[learner], version[learner] = began, at_version
    simulation.now, simulation.ticket, simulation.events, simulation.updates = now, ticket, ticket, policy.version
    simulation.tally.seconds["compute"] += computed
    simulation.tally.seconds["wait"] += waited
    simulation.tally.waste_s += wasted


def _typical_wait(simulation: Simulation) -> float:
    """How far ahead entries lie, about: the calendar is right with any number, and quick with a good one."""
    ahead = sorted(at - simulation.now for at, kind, _, _ in simulation.heap if kind == FINISH)
    return max(ahead[len(ahead) // 2], 1e-9) if ahead else 1.0
