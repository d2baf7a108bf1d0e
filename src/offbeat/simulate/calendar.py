"""A queue of events by time, for many entries: a calendar queue (Brown 1988).

Time is cut into slots. Entries of later slots lie unsorted; a slot is sorted when its time has come (`today`). The
order is that of the entries as tuples, exactly as from a heap. What falls into today goes in by `bisect.insort`.

The hot loop of `server` does the adding and taking itself; here is what it does seldom.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

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
