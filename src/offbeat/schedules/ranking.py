"""Every algorithm of a collective priced on one topology, fastest first.

A family (torus, hierarchical, ...) is tried in every shape that has so many ranks and is not a simpler family in other
words. Of a family that may have too many shapes, those that fit the machine and have the fewest steps are tried.

The rule among nearly equal ones: of shapes whose time is within 2 % of the fastest, the best is the one that fits the
machine. A shape fits a group of consecutive ranks, such as the ranks of a node, when it has a side, or several sides
together, that are exactly this group: torus:8x32, hierarchical:32x8 and multiring:2x4x32 fit nodes of 8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from offbeat import plugins
from offbeat import spec as grammar
from offbeat.number_format import format_seconds, format_size
from offbeat.schedules.algorithms import BASELINE, Algorithm, algorithms, build, format_orders
from offbeat.schedules.cost import Price, price
from offbeat.schedules.rings import find_rings
from offbeat.spec import count_of
from offbeat.topology import Topology

CLOSE = 1.02  # times that differ by less are not told apart: the model leaves more out than that


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A line and its price; `tried` of the `shapes` of its family were priced to find it.

    `fits` is how many of the machine's groups of ranks are sides of its shape.
    """

    line: str
    price: Price
    tried: int
    shapes: int
    fits: int = 0

    @property
    def label(self) -> str:
        """The line, short enough for a table: a list of ring orders is only counted."""
        spec = grammar.parse(self.line)
        if any(key == "order" for key, _ in spec.options):
            return f"{spec.name}:order=... ({count_of(self.line.count('+') + 1, 'ring')})"
        return self.line


def rank(
    topology: Topology,
    size_bytes: int,
    item_bytes: int = 1,
    *,
    collective: str = "all-reduce",
    every_shape: bool = False,
    tell: Callable[[str], object] = lambda line: None,
) -> list[Ranked]:
    """The best shape of each family, or every shape that was tried, fastest first.

    On a mesh of direct links the rings found there are a family of all-reduces of their own, `ring:order=...`. `tell`
    is given each line before it is priced.
    """
    plugins.load_known()
    families = [_lines(row, topology) for row in algorithms(collective).values()]
    if collective == "all-reduce":
        families.append(_ordered_rings(topology))
    found: list[Ranked] = []
    for shapes, lines in families:
        priced = []
        for line, fits in lines.items():
            tell(line)
            schedule = build(line, ranks=topology.ranks, collective=collective)
            cost = price(schedule, topology, size_bytes, item_bytes)
            priced.append(Ranked(line=line, price=cost, tried=len(lines), shapes=shapes, fits=fits))
        found += priced if every_shape or not priced else [advised(priced)]
    return sorted(found, key=lambda ranked: ranked.price.seconds)


def advised(ranking: Sequence[Ranked]) -> Ranked:
    """Of those within 2 % of the fastest, what fits the machine best; then fewer sides, then the shorter line."""
    close = CLOSE * min(ranked.price.seconds for ranked in ranking)
    best = [ranked for ranked in ranking if ranked.price.seconds <= close]
    return min(best, key=lambda ranked: (-ranked.fits, len(_sides(ranked.line)), len(ranked.line)))


def recommended(ranking: Sequence[Ranked]) -> Ranked:
    """The baseline where it is within 2 % of the best, since it is the simplest; else the best."""
    flat, best = baseline(ranking), advised(ranking)
    return flat if flat.price.seconds <= CLOSE * best.price.seconds else best


def advice(ranking: Sequence[Ranked], topology: Topology) -> list[str]:
    """What to use and why; a second sentence where another is faster by so little that it does not count."""
    best, fastest = recommended(ranking), ranking[0]
    slower = best.price.seconds / fastest.price.seconds - 1 if fastest.price.seconds else 0.0
    if best.line == baseline(ranking).line:
        near = f"within {100 * slower:.1f} % of {fastest.label}, the fastest" if slower else "the fastest"
        return [f"use {best.label}, {near}"]
    reasons = [explain(best, baseline(ranking))]
    if slower >= 0.0005:
        groups = " and ".join(str(group) for group in topology.groups)
        fitting = f"one that fits this machine's groups of {groups} ranks is preferred, then " if groups else ""
        reasons.append(
            f"{fastest.label} is {100 * slower:.1f} % faster; "
            f"of shapes within 2 % of the fastest, {fitting}the one with fewer sides"
        )
    return reasons


def explain(better: Ranked, worse: Ranked) -> str:
    """By how much one is faster than the other, and why."""
    fast, slow = better.price, worse.price
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


def baseline(ranking: Sequence[Ranked]) -> Ranked:
    """With what the others are compared: the ring, or for a collective that has none the plainest."""
    by_line = {ranked.line: ranked for ranked in ranking}
    return next(by_line[line] for line in (BASELINE, "central", "direct") if line in by_line)


def _lines(row: Algorithm, topology: Topology) -> tuple[int, dict[str, int]]:
    """How many shapes of a family are worth trying; those that are tried, and how many groups of ranks each fits."""
    lines = {line: _sides(line) for line in row.lines(topology.ranks)}
    # Not a shape that is a simpler family in other words: a side of 1, or too few sides.
    lines = {line: sides for line, sides in lines.items() if 1 not in sides and len(sides) >= row.least_sides}
    # A group of consecutive ranks fits where it is a side, or some sides together, that begins with the first.
    together = {line: accumulate(row.consecutive_first(topology.ranks, sides), mul) for line, sides in lines.items()}
    fits = {line: len(set(ranks) & set(topology.groups)) for line, ranks in together.items()}
    tried = sorted(lines, key=lambda line: (-fits[line], sum(lines[line]))) if row.most_shapes else list(lines)
    return len(lines), {line: fits[line] for line in tried[: row.most_shapes]}


def _ordered_rings(topology: Topology) -> tuple[int, dict[str, int]]:
    orders = find_rings(topology).orders if topology.is_mesh() else ()
    return (1, {f"{BASELINE}:order={format_orders(orders)}": 0}) if orders else (0, {})


def _sides(line: str) -> tuple[int, ...]:
    args = grammar.parse(line).args
    return grammar.parse_shape(args[0]) if args else ()
