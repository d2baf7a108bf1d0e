"""Ring orders that fit a mesh of direct links.

A directed ring visits every rank once over direct links between ranks, in one direction. Rings that share
no lane run side by side at full speed, so the number of them is how many times the bandwidth of one lane a
ring all-reduce can have. No set of rings is larger than the lanes that leave some part of the ranks: the
cut bound.

A small mesh, such as a cube mesh of 8, is searched through. The rings of a larger one in which all ranks are linked
alike are written down; in any other, rings are packed greedily by (seeded) chance, and for a bounded time. The answer
is only "at least" then, unless it meets the bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np

from offbeat.errors import RequestError
from offbeat.topology import Topology

Lanes = dict[int, dict[int, int]]  # lanes[source][target]
Order = tuple[int, ...]

_MOST_CYCLES = 5_000
_MOST_TRIES = 200_000
_ATTEMPTS = 12
_MOST_LOOKS = 20_000_000  # at a lane, while rings are packed: seconds
_MOST_RANKS_FOR_CUTS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Rings:
    """The largest set of edge-disjoint directed rings found.

    `proved` tells whether no larger one exists. `cut` is a part of the ranks that only `bound` lanes leave
    (or enter), with `cut_bytes_per_s` together.
    """

    orders: tuple[Order, ...]
    proved: bool
    bound: int
    cut: Order
    cut_bytes_per_s: float


def find_rings(topology: Topology) -> Rings:
    """Search the direct links of `topology`; a `RequestError` where ranks have none."""
    lanes: Lanes = {rank: {} for rank in range(topology.ranks)}
    for (source, target), link in topology.links.items():
        if isinstance(source, int) and isinstance(target, int):
            lanes[source][target] = link.lanes
    if not topology.is_mesh():
        raise RequestError(
            f"topology '{topology.name}' has no direct links between its {topology.ranks} rank(s): "
            "look for rings in a mesh, like dgx1"
        )
    bound, cut = _smallest_cut(lanes)
    cycles = list(islice(_cycles(lanes, _MOST_TRIES), _MOST_CYCLES + 1)) if bound else []
    if len(cycles) > _MOST_CYCLES or None in cycles:  # too many to try all sets of them
        chosen = _zigzags(lanes)
        looks = Looks(0 if chosen else _MOST_LOOKS)
        for attempt in range(max(1, min(_ATTEMPTS, 1000 // topology.ranks))):
            if len(chosen) == bound or looks.left <= 0:
                break
            chosen = max(chosen, _pack(lanes, bound, attempt, looks), key=len)
        return _result(topology, chosen, len(chosen) == bound, bound, cut)
    every = [cycle for cycle in cycles if cycle is not None]
    proved = True
    for wanted in range(bound, 0, -1):
        found, exhausted = _choose(lanes, every, wanted)
        if found is not None:
            return _result(topology, found, proved, bound, cut)
        proved = proved and exhausted
    return _result(topology, (), proved, bound, cut)


@dataclass(slots=True)
class Looks:
    """How often a lane may still be looked at."""

    left: int


def _zigzags(lanes: Lanes) -> tuple[Order, ...]:
    """Where all ranks are linked alike: Walecki's rings (1890s), each both ways; all lanes, or all but one of a rank.

    One rank stays in the middle, the others stand in a circle and the ring goes to and fro across it: i, i + 1, i - 1,
    i + 2, ... The two ends of an edge of it add up to 2i or 2i + 1, so no two of these rings share one.
    """
    around = len(lanes) - 1
    alike = {count for targets in lanes.values() for count in targets.values()}
    if len(alike) != 1 or any(len(targets) != around for targets in lanes.values()):
        return ()
    orders = [
        (around, *((start + (step + 1) // 2 * (1 if step % 2 else -1)) % around for step in range(around)))
        for start in range(around // 2)
    ]
    return tuple(way for order in orders for way in (order, order[::-1])) * alike.pop()


def _pack(lanes: Lanes, bound: int, attempt: int, looks: Looks) -> tuple[Order, ...]:
    """Rings one after the other, each with its reverse, over the lanes that the ones before have left."""
    chance = np.random.default_rng(attempt)
    left = {source: dict(targets) for source, targets in lanes.items()}
    orders: list[Order] = []
    while len(orders) < bound:
        order = _rotate_and_extend(left, chance, looks)
        if order is None:
            break
        for way in (order, order[::-1]):
            edges = list(zip(way, (*way[1:], way[0]), strict=True))
            if len(orders) < bound and all(left[source].get(target, 0) for source, target in edges):
                orders.append(way)
                for source, target in edges:
                    left[source][target] -= 1
    return tuple(orders)


def _rotate_and_extend(left: Lanes, chance: np.random.Generator, looks: Looks) -> Order | None:
    """A ring by Posa's rotations (1976): go on to somebody new, or turn the end of the path round and try again."""
    ways = {rank: [target for target, count in targets.items() if count] for rank, targets in left.items()}
    into: dict[int, list[int]] = {rank: [] for rank in left}
    for rank, targets in ways.items():
        for target in targets:
            into[target].append(rank)
    new_ways = {rank: len(targets) for rank, targets in ways.items()}  # to those not in the path yet
    path, seen = [0], {0}
    for rank in into[0]:
        new_ways[rank] -= 1
    for _ in range(40 * len(left)):
        here = path[-1]
        if len(path) == len(left) and left[here].get(0, 0):
            return tuple(path)
        looks.left -= len(ways[here])
        fresh = [target for target in ways[here] if target not in seen]
        if fresh:
            # To one with few ways out: it is the hardest to reach later.
            fewest = min(new_ways[target] for target in fresh)
            fresh = [target for target in fresh if new_ways[target] == fewest]
            path.append(fresh[int(chance.integers(len(fresh)))])
            seen.add(path[-1])
            for rank in into[path[-1]]:
                new_ways[rank] -= 1
            continue
        # Turning needs the way back; cables go both ways, but a lane may be taken in one direction only.
        turns = [at for at in (path.index(target) for target in ways[here]) if at < len(path) - 2]
        looks.left -= (len(turns) + 1) * len(path)
        if looks.left <= 0:
            return None
        turned = [[*path[: at + 1], *reversed(path[at + 1 :])] for at in turns]
        turned = [new for new in turned if all(left[a].get(b, 0) for a, b in pairwise(new))]
        if not turned:
            return None
        path = turned[int(chance.integers(len(turned)))]
    return None


def _result(topology: Topology, orders: tuple[Order, ...], proved: bool, bound: int, cut: Order) -> Rings:
    inside = set(cut)
    crossing = sum(
        link.bytes_per_s
        for (source, target), link in topology.links.items()
        if isinstance(source, int) and isinstance(target, int) and source in inside and target not in inside
    )
    return Rings(orders=orders, proved=proved, bound=bound, cut=cut, cut_bytes_per_s=crossing)


def _smallest_cut(lanes: Lanes) -> tuple[int, Order]:
    """The part of the ranks that the fewest lanes leave; ties go to the smaller part, then the lower ranks."""
    ranks = sorted(lanes)
    if len(ranks) <= _MOST_RANKS_FOR_CUTS:
        parts = [tuple(rank for rank in ranks if number >> rank & 1) for number in range(1, (1 << len(ranks)) - 1)]
    else:  # single ranks only: still a bound, perhaps not the smallest
        parts = [(rank,) for rank in ranks]
    crossing = {
        part: sum(count for source in part for target, count in lanes[source].items() if target not in part)
        for part in parts
    }
    best = min(parts, key=lambda part: (crossing[part], len(part), part))
    return crossing[best], best


def _cycles(lanes: Lanes, tries: int) -> Iterator[Order | None]:
    """Every ring through all ranks, from rank 0, fattest links first; a last None when `tries` ran out."""
    order = [0]
    seen = {0}
    ahead_of = {one: sorted(ways, key=lambda rank: (-ways[rank], rank)) for one, ways in lanes.items()}
    stack = [iter(ahead_of[0])]
    while stack:
        following = next(stack[-1], None)
        if following is None:
            stack.pop()
            seen.discard(order.pop())
            continue
        tries -= 1
        if tries < 0:
            yield None
            return
        if following not in seen:
            order.append(following)
            seen.add(following)
            whole = len(order) == len(lanes)
            if whole and 0 in lanes[following]:
                yield tuple(order)
            stack.append(iter(() if whole else ahead_of[following]))


def _choose(lanes: Lanes, cycles: list[Order], wanted: int) -> tuple[tuple[Order, ...] | None, bool]:
    """`wanted` of the cycles (one may be taken more than once) within the lanes; else whether all was tried."""
    left = {(source, target): count for source, ahead in lanes.items() for target, count in ahead.items()}
    edges = [list(zip(cycle, (*cycle[1:], cycle[0]), strict=True)) for cycle in cycles]
    chosen: list[int] = []
    tries = _MOST_TRIES

    def search(first: int) -> bool:
        nonlocal tries
        if len(chosen) == wanted:
            return True
        for number in range(first, len(cycles)):
            tries -= 1
            if tries < 0:
                return False
            if all(left[edge] > 0 for edge in edges[number]):
                for edge in edges[number]:
                    left[edge] -= 1
                chosen.append(number)
                if search(number):
                    return True
                chosen.pop()
                for edge in edges[number]:
                    left[edge] += 1
        return False

    found = search(0)
    return (tuple(cycles[number] for number in chosen) if found else None), tries >= 0
