"""Every all-reduce priced on one topology, fastest first.

A family (torus, hierarchical, ...) is tried in every shape that fits and differs from a simpler family,
and in at most `MOST_SHAPES` of them: those with the shortest sides, which have the fewest steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from offbeat import spec as grammar
from offbeat.schedules.algorithms import algorithms, build, format_orders
from offbeat.schedules.cost import Price, price
from offbeat.schedules.rings import find_rings
from offbeat.spec import count_of, format_seconds, format_size
from offbeat.topology import Topology

MOST_SHAPES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A line and its price; `tried` of the `shapes` of its family that fit were priced to find it."""

    line: str
    price: Price
    tried: int
    shapes: int

    @property
    def label(self) -> str:
        """The line, short enough for a table: a list of ring orders is only counted."""
        if self.line.startswith("ring:order="):
            return f"ring:order=... ({count_of(self.line.count('+') + 1, 'ring')})"
        return self.line


def rank(topology: Topology, size_bytes: int, item_bytes: int = 1, *, every_shape: bool = False) -> list[Ranked]:
    """The best shape of each family, or every shape that was tried, fastest first.

    On a mesh of direct links the rings found there are a family of their own, `ring:order=...`.
    """
    families = [[line for line in row.lines(topology.ranks) if _worth_trying(line)] for row in algorithms().values()]
    families.append(_ordered_rings(topology))
    found: list[Ranked] = []
    for lines in families:
        lines.sort(key=lambda line: sum(_sides(line)))
        tried = lines[:MOST_SHAPES]
        priced = []
        for line in tried:
            cost = price(build(line, ranks=topology.ranks), topology, size_bytes, item_bytes)
            priced.append(Ranked(line=line, price=cost, tried=len(tried), shapes=len(lines)))
        found += priced if every_shape else sorted(priced, key=_seconds)[:1]
    return sorted(found, key=_seconds)


def explain(better: Ranked, worse: Ranked) -> str:
    """By how much one is faster than the other, and why; or that it is not."""
    fast, slow = better.price, worse.price
    if slow.seconds <= 1.01 * fast.seconds:
        return f"{worse.label} is within 1 % of the fastest: use it"
    times = slow.seconds / fast.seconds
    reasons = []
    shared = slow.bottleneck
    ours, theirs = (cost.bytes_per_link.get(shared, 0) for cost in (fast, slow))
    if ours < 0.99 * theirs:
        reasons.append(f"{shared} carries {format_size(ours)} instead of {format_size(theirs)}")
    if fast.latency_s < 0.99 * slow.latency_s:
        reasons.append(
            f"latency is {format_seconds(fast.latency_s)} in {fast.steps} steps "
            f"instead of {format_seconds(slow.latency_s)} in {slow.steps}"
        )
    if not reasons:
        reasons.append(f"{slow.why()}, in fewer steps that are full")
    return f"{better.label} is {times:.2f}x as fast as {worse.label}: {'; '.join(reasons)}"


def _seconds(ranked: Ranked) -> float:
    return ranked.price.seconds


def _ordered_rings(topology: Topology) -> list[str]:
    if not topology.is_mesh():
        return []
    orders = find_rings(topology).orders
    return [f"ring:order={format_orders(orders)}"] if orders else []


def _worth_trying(line: str) -> bool:
    """Not a shape that is a simpler family in other words: a side of 1, or a multiring of two sides."""
    sides = _sides(line)
    return 1 not in sides and not (line.startswith("multiring") and len(sides) < 3)


def _sides(line: str) -> tuple[int, ...]:
    args = grammar.parse(line).args
    return grammar.parse_shape(args[0]) if args else ()
