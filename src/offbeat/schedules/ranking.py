"""Every all-reduce priced on one topology, fastest first.

A family (torus, hierarchical, ...) is tried in every shape that fits and is not a simpler family in other words. Of a
family that may have too many shapes, those with the fewest steps are tried.
"""

from __future__ import annotations

from dataclasses import dataclass

from offbeat import plugins
from offbeat import spec as grammar
from offbeat.schedules.algorithms import BASELINE, Algorithm, algorithms, build, format_orders
from offbeat.schedules.cost import Price, price
from offbeat.schedules.rings import find_rings
from offbeat.spec import count_of, format_seconds, format_size
from offbeat.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A line and its price; `tried` of the `shapes` of its family were priced to find it."""

    line: str
    price: Price
    tried: int
    shapes: int

    @property
    def label(self) -> str:
        """The line, short enough for a table: a list of ring orders is only counted."""
        spec = grammar.parse(self.line)
        if any(key == "order" for key, _ in spec.options):
            return f"{spec.name}:order=... ({count_of(self.line.count('+') + 1, 'ring')})"
        return self.line


def rank(topology: Topology, size_bytes: int, item_bytes: int = 1, *, every_shape: bool = False) -> list[Ranked]:
    """The best shape of each family, or every shape that was tried, fastest first.

    Of shapes within 1 % of each other the best is the one that the machine itself has, then the shorter line. On a mesh
    of direct links the rings found there are a family of their own, `ring:order=...`.
    """
    plugins.load_known()
    own_shape = grammar.parse(topology.name).args[:1]
    families = [_lines(row, topology.ranks) for row in algorithms().values()]
    families.append(_ordered_rings(topology))
    found: list[Ranked] = []
    for shapes, lines in families:
        priced = []
        for line in lines:
            cost = price(build(line, ranks=topology.ranks), topology, size_bytes, item_bytes)
            priced.append(Ranked(line=line, price=cost, tried=len(lines), shapes=shapes))
        if every_shape or not priced:
            found += priced
            continue
        close = 1.01 * min(ranked.price.seconds for ranked in priced)
        best = [ranked for ranked in priced if ranked.price.seconds <= close]
        found.append(min(best, key=lambda one: (grammar.parse(one.line).args[:1] != own_shape, len(one.line))))
    return sorted(found, key=lambda ranked: ranked.price.seconds)


def explain(better: Ranked, worse: Ranked) -> str:
    """By how much one is faster than the other, and why; or that it is not."""
    fast, slow = better.price, worse.price
    if slow.seconds <= 1.01 * fast.seconds:
        return f"{worse.label} is within 1 % of the fastest: use it"
    times = slow.seconds / fast.seconds
    reasons = []
    ours, theirs = (format_size(cost.bytes_per_link[cost.bottleneck]) for cost in (fast, slow))
    if fast.bottleneck == slow.bottleneck and ours != theirs:
        reasons.append(f"{fast.bottleneck} carries {ours} instead of {theirs}")
    elif ours != theirs or fast.bottleneck_link != slow.bottleneck_link:
        reasons.append(f"{fast.why()}, and not {slow.why()}")
    if fast.latency_s < 0.99 * slow.latency_s:
        reasons.append(
            f"latency is {format_seconds(fast.latency_s)} in {fast.steps} steps "
            f"instead of {format_seconds(slow.latency_s)} in {slow.steps}"
        )
    if not reasons:
        reasons.append("its steps keep more links busy at once")
    return f"{better.label} is {times:.2f}x as fast as {worse.label}: {'; '.join(reasons)}"


def _lines(row: Algorithm, ranks: int) -> tuple[int, list[str]]:
    """How many shapes of a family are worth trying, and those that are tried."""
    lines = [line for line in row.lines(ranks) if _worth_trying(row, _sides(line))]
    if row.most_shapes is not None and len(lines) > row.most_shapes:
        return len(lines), sorted(lines, key=lambda line: sum(_sides(line)))[: row.most_shapes]
    return len(lines), lines


def _ordered_rings(topology: Topology) -> tuple[int, list[str]]:
    orders = find_rings(topology).orders if topology.is_mesh() else ()
    return (1, [f"{BASELINE}:order={format_orders(orders)}"]) if orders else (0, [])


def _worth_trying(row: Algorithm, sides: tuple[int, ...]) -> bool:
    """Not a shape that is a simpler family in other words: a side of 1, or too few sides."""
    return 1 not in sides and len(sides) >= row.least_sides


def _sides(line: str) -> tuple[int, ...]:
    args = grammar.parse(line).args
    return grammar.parse_shape(args[0]) if args else ()
