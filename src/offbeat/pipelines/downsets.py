"""The downsets of a graph, and the cheapest chain of them.

A downset has with every node all that it needs: it is what the first stages of a pipeline compute. Cutting a graph into
stages is choosing a chain of downsets, each larger than the one before it. A chain graph of n nodes has n + 1 of them,
n independent nodes have 2**n.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import ge
from typing import NamedTuple

MOST_DOWNSETS = 100_000
_GUESSES = (1 / 64, 1 / 8, 1.0)  # of the way from the lower bound to what is known to be possible


class Downsets:
    """All downsets as bit masks, smaller ones first; `below[d]` are those with one node less.

    `exact` is False where there are more than `most`: then only the prefixes of the order of the nodes are there.
    """

    def __init__(self, nodes: int, edges: Iterable[tuple[int, int]], most: int = MOST_DOWNSETS) -> None:
        self.nodes = nodes
        needs, feeds = [0] * nodes, [0] * nodes
        for source, target in edges:
            needs[target] |= 1 << source
            feeds[source] |= 1 << target
        self.feeds = feeds
        found = _all_of(nodes, needs, most)
        self.exact = found is not None
        self.masks = found if found is not None else [(1 << count) - 1 for count in range(nodes + 1)]
        place = {mask: at for at, mask in enumerate(self.masks)}
        self.below: list[list[int]] = [
            [place[smaller] for node in _bits(mask) if (smaller := mask & ~(1 << node)) in place] for mask in self.masks
        ]

    def sums(self, values: Sequence[float]) -> list[float]:
        """Of each downset, the sum of its nodes' values; of the whole always added up in the same order."""
        found = [0.0] * len(self.masks)
        for at, mask in enumerate(self.masks):
            found[at] = math.fsum(values[node] for node in _bits(mask)) if mask else 0.0
        return found

    def crossing(self, sizes: Sequence[int]) -> list[int]:
        """Of each downset, the sizes of the nodes in it whose output is needed outside."""
        return [sum(sizes[node] for node in _bits(mask) if self.feeds[node] & ~mask) for mask in self.masks]


def _bits(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _all_of(nodes: int, needs: Sequence[int], most: int) -> list[int] | None:
    level, found = [0], [0]
    for _ in range(nodes):
        above: set[int] = set()
        for mask in level:
            for node in range(nodes):
                if not mask >> node & 1 and needs[node] & ~mask == 0:
                    above.add(mask | 1 << node)
        level = sorted(above)
        found += level
        if len(found) > most:
            return None
    return found


class Limit(NamedTuple):
    """Of stage k, between the downsets d and e: over[k][e] - under[k][d] is at most `most[k]`."""

    over: Sequence[Sequence[float]]
    under: Sequence[Sequence[float]]
    most: Sequence[float]


class Pace(NamedTuple):
    """The time of stage k, between the downsets d and e, is over[k][e] - under[k][d].

    `turns` times the slowest stage is added to the cost of a chain. No slowest stage is faster than `least`, and none
    of stage k and those after it than `after[k][d]`, if stage k begins at the downset d.
    """

    over: Sequence[Sequence[float]]
    under: Sequence[Sequence[float]]
    turns: int
    least: float
    after: Sequence[Sequence[float]]


class _Entry(NamedTuple):
    """Stages up to a downset: what they cost, the slowest of them, and how much room they leave to the next."""

    cost: float
    slowest: float
    rooms: tuple[float, ...]  # under[k][d], of the pace and of each limit: more is better
    ends: tuple[int, ...]  # the downsets that end the stages


def cheapest_chain(
    downsets: Downsets,
    stages: int,
    cost: Sequence[Sequence[float]],
    limits: Sequence[Limit] = (),
    pace: Pace | None = None,
    below: float = math.inf,
) -> tuple[int, ...] | None:
    """The downsets that end the stages, with the least sum of `cost[k][d]` plus what the pace adds, within all limits.

    None where there is none that costs less than `below`.
    """
    ahead = _costs_ahead(downsets, stages, cost)
    bound = ahead[0][0] + (pace.turns * pace.least if pace else 0.0)
    # The less a chain may cost, the sooner most are dropped: a first guess is near the lower bound.
    for share in _GUESSES if bound < below < math.inf else (1.0,):
        found = _chain_below(downsets, stages, cost, limits, pace, bound + share * (below - bound), ahead)
        if found is not None:
            return found
    return None


def _chain_below(
    downsets: Downsets,
    stages: int,
    cost: Sequence[Sequence[float]],
    limits: Sequence[Limit],
    pace: Pace | None,
    below: float,
    ahead: Sequence[Sequence[float]],
) -> tuple[int, ...] | None:
    """By dynamic programming: what ends a stage is handed on to all larger downsets, as a front of entries of which
    none is better in every respect. What cannot become cheaper than `below` is dropped.
    """
    last = len(downsets.masks) - 1
    starts = [_Entry(0.0, pace.least if pace else 0.0, (), ())]
    ended: dict[int, list[_Entry]] = {0: starts}
    first = 1 if pace else 0  # where the limits begin among the rooms
    for stage in range(stages):
        bounds: list[Pace | Limit] = [*([pace] if pace else []), *limits]
        floors = [_least_above(bound.over[stage], downsets) for bound in bounds]
        fronts: list[list[_Entry]] = []
        reached: dict[int, list[_Entry]] = {}
        for at in range(last + 1):
            merged = [entry for lower in downsets.below[at] for entry in fronts[lower]]
            if merged and (stage < stages - 1 or at == last):
                over = [bound.over[stage][at] for bound in bounds]
                found = []
                for entry in merged:
                    taken = [most - room for most, room in zip(over, entry.rooms, strict=True)]
                    if all(took <= limit.most[stage] for took, limit in zip(taken[first:], limits, strict=True)):
                        slowest = max(entry.slowest, taken[0]) if pace else entry.slowest
                        found.append(_Entry(entry.cost + cost[stage][at], slowest, (), (*entry.ends, at)))
                if found:
                    reached[at] = _front(found)
            for entry in ended.get(at, ()):
                slowest = max(entry.slowest, pace.after[stage][at]) if pace else 0.0
                rooms = tuple(bound.under[stage][at] for bound in bounds)
                merged.append(entry._replace(slowest=slowest, rooms=rooms))
            alive = []
            for entry in merged:
                least = [floor[at] - room for floor, room in zip(floors, entry.rooms, strict=True)]
                if any(took > limit.most[stage] for took, limit in zip(least[first:], limits, strict=True)):
                    continue
                total = entry.cost + ahead[stage][at]
                if pace:
                    total += pace.turns * max(entry.slowest, least[0])
                if total < below:
                    alive.append(entry)
            fronts.append(_front(alive) if len(alive) > 1 else alive)
        ended = reached
    turns = pace.turns if pace else 0
    final = [entry for entry in ended.get(last, ()) if entry.cost + turns * entry.slowest < below]
    return min(final, key=lambda one: one.cost + turns * one.slowest).ends if final else None


def _costs_ahead(downsets: Downsets, stages: int, cost: Sequence[Sequence[float]]) -> list[list[float]]:
    """Of each stage and downset at which it may still go on: the least that this stage and those after it cost."""
    last = len(downsets.masks) - 1
    after = [math.inf] * last + [0.0]
    ahead = []
    for stage in reversed(range(stages)):
        after = _least_above([one + other for one, other in zip(cost[stage], after, strict=True)], downsets)
        ahead.append(after)
    return ahead[::-1]


def _least_above(values: Sequence[float], downsets: Downsets) -> list[float]:
    """Of each downset, the least value of itself and of those that contain it."""
    least = list(values)
    for at in range(len(least) - 1, -1, -1):
        for lower in downsets.below[at]:
            if least[at] < least[lower]:
                least[lower] = least[at]
    return least


def _front(entries: list[_Entry]) -> list[_Entry]:
    """Only those than which no other is as good in cost, pace and rooms."""
    kept: list[_Entry] = []
    for entry in sorted(set(entries), key=lambda one: (one.cost, one.slowest, [-room for room in one.rooms])):
        for one in kept:
            if one.slowest <= entry.slowest and all(map(ge, one.rooms, entry.rooms)):
                break
        else:
            kept.append(entry)
    return kept
