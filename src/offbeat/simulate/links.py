"""One link that simultaneous transfers share fairly, each also bound by a cap of its own.

Max-min fairness: everybody gets the same rate, except those whose cap is lower; what they leave goes to the others.
Transfers with the same cap run at the same rate, so they form a class with one clock of bytes: a transfer that starts
when the clock stands at c ends when it stands at c + size. A change costs the number of classes, not of transfers.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

_ENDLESS = 1e30  # stands for an infinite rate, of which no difference can be taken


@dataclass(slots=True)
class _Class:
    cap: float
    clock: float = 0.0  # bytes that a transfer open since the beginning would have moved
    bytes_per_s: float = 0.0
    waiting: list[tuple[float, int, int]] = field(default_factory=list)  # clock at the end, order of start, who


class FairLink:
    """Transfers begin by `start` and are taken by `finish`; in between `next_end_s` says when the next one ends."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = min(bytes_per_s, _ENDLESS)
        self.classes: dict[float, _Class] = {}
        self.now_s = 0.0
        self.started = 0
        self.is_full = False  # transfers would be faster if it were

    def start(self, now_s: float, who: int, size_bytes: float, cap: float = math.inf) -> None:
        self._advance(now_s)
        cap = min(cap, _ENDLESS)
        group = self.classes.setdefault(cap, _Class(cap))
        self.started += 1
        heapq.heappush(group.waiting, (group.clock + size_bytes, self.started, who))
        self._share()

    def next_end_s(self) -> float:
        """When the next transfer ends if nothing else starts; infinity when none is open."""
        ends = [
            self.now_s + (group.waiting[0][0] - group.clock) / group.bytes_per_s
            for group in self.classes.values()
            if group.waiting
        ]
        return max(self.now_s, min(ends, default=math.inf))

    def remove(self, now_s: float, who: int) -> bool:
        """Give a transfer up; whether it was open."""
        self._advance(now_s)
        found = False
        for group in self.classes.values():
            kept = [entry for entry in group.waiting if entry[2] != who]
            if len(kept) < len(group.waiting):
                heapq.heapify(kept)
                group.waiting = kept
                found = True
        self._share()
        return found

    def finish(self, now_s: float) -> list[int]:
        """Those whose transfers have ended by now, in order of their start."""
        self._advance(now_s)
        done: list[tuple[int, int]] = []
        for group in self.classes.values():
            # What is left is less than a hundredth of a byte, or too little for the clock of time to show.
            slack = max(0.01, group.bytes_per_s * 4e-16 * now_s)
            while group.waiting and group.waiting[0][0] - group.clock <= slack:
                _, order, who = heapq.heappop(group.waiting)
                done.append((order, who))
            if not group.waiting:
                group.clock = 0.0  # a fresh start keeps the clock exact
        self._share()
        return [who for _, who in sorted(done)]

    def _advance(self, now_s: float) -> None:
        for group in self.classes.values():
            if group.waiting:
                group.clock += group.bytes_per_s * (now_s - self.now_s)
        self.now_s = now_s

    def _share(self) -> None:
        """Fill the classes from the lowest cap up."""
        left = self.bytes_per_s
        groups = sorted((group for group in self.classes.values() if group.waiting), key=lambda group: group.cap)
        many = sum(len(group.waiting) for group in groups)
        for group in groups:
            group.bytes_per_s = min(group.cap, left / many)
            left -= group.bytes_per_s * len(group.waiting)
            many -= len(group.waiting)
        self.is_full = bool(groups) and left <= 1e-9 * self.bytes_per_s < 1e-9 * _ENDLESS
