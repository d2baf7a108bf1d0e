"""Which schedule an all-reduce takes: the one that was named, or, with `auto`, the cheapest for its size.

`auto` prices every all-reduce on this host as it was measured when the first call came: what it takes until all ranks
have seen that all are there, and how fast each reads from another while all do. All ranks agree on the figures, so that
all choose alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from offbeat import spec as grammar
from offbeat import topology
from offbeat.collectives.calls import Plan, plan
from offbeat.errors import RequestError
from offbeat.number_format import format_rate, format_seconds, format_size
from offbeat.schedules import auto_lines, build, price
from offbeat.strategy import ALL_REDUCE, AUTO, NATIVE, family_of

HIERARCHICAL = "hierarchical"
_MOST_PRICED = 64  # ranks; more would take seconds, and one host has fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One host, as measured by its ranks."""

    latency_s: float
    bytes_per_s: float

    def __str__(self) -> str:
        return f"{format_seconds(self.latency_s)} a step, {format_rate(self.bytes_per_s)} a rank while all read"


def check(line: str, ranks: int) -> str:
    """A strategy that a process group can run, as it is written; `RequestError` otherwise, in one line."""
    family = family_of(line)
    if family != ALL_REDUCE and line not in (AUTO, NATIVE):
        raise RequestError(f"'{line}' is a strategy of the {family}; a process group takes all-reduce strategies")
    if line not in (AUTO, NATIVE):
        plan(line, "all-reduce", ranks)
    return str(grammar.parse(line))


def hosts_in_order(hosts: Sequence[int]) -> tuple[int, ...] | None:
    """The ranks host by host; None where they are already."""
    order = tuple(sorted(range(len(hosts)), key=lambda rank: hosts[rank]))
    return None if order == tuple(range(len(hosts))) else order


def with_shape(line: str, hosts: Sequence[int]) -> str:
    """`hierarchical` without a shape, as hosts x ranks: of hosts with unequal numbers, the greatest common divisor.

    Inside a host everybody reads everybody's memory, so that is one step, and the network does not wait for it.
    """
    spec = grammar.parse(line)
    if spec.name != HIERARCHICAL or any(word[:1].isdigit() for word in spec.args):
        return line
    each = math.gcd(*(hosts.count(host) for host in set(hosts)))
    given = dict(spec.options)
    if not spec.args and each > 1:
        given = {"inner": "direct", "parts": "4", **given}
    options = [*spec.args, *(f"{name}={value}" for name, value in given.items())]
    return f"{HIERARCHICAL}:{','.join([f'{len(hosts) // each}x{each}', *options])}"


class Choice:
    """The way of each all-reduce of a group. Across hosts, schedules go through the ranks host by host."""

    def __init__(
        self, line: str, ranks: int, figures: Figures | None = None, hosts: Sequence[int] | None = None
    ) -> None:
        self._hosts = tuple(hosts or (0,) * ranks)
        self._order = hosts_in_order(self._hosts) if "order" not in dict(grammar.parse(line).options) else None
        self.line = check(with_shape(line, self._hosts), ranks)
        self.figures = figures
        self._ranks = ranks
        self._by_size: dict[int, list[tuple[float, str]]] = {}

    def needs_figures(self) -> bool:
        return self.line == AUTO and self.figures is None and 1 < self._ranks <= _MOST_PRICED

    def of(self, size_bytes: int) -> Plan:
        """The plan for a vector of so many bytes."""
        line = self.line
        if line == AUTO:
            ranked = self._ranked(size_bytes)
            line = ranked[0][1] if ranked else "direct"
        return plan(line, "all-reduce", self._ranks, order=self._order)

    def why(self, size_bytes: int) -> str:
        """In words: what was chosen for this size, and what the others would have cost."""
        if self.line != AUTO:
            return f"{self.line}: named by the user"
        ranked = self._ranked(size_bytes)
        if not ranked or self.figures is None:
            return "direct: nothing was measured"
        costs = ", ".join(f"{line} {format_seconds(seconds)}" for seconds, line in ranked[:4])
        return f"{ranked[0][1]} for {format_size(size_bytes)}: {costs}; measured {self.figures}"

    def _ranked(self, size_bytes: int) -> list[tuple[float, str]]:
        if self.figures is None or self._ranks == 1:
            return []
        size = size_bytes.bit_length()
        if size not in self._by_size:
            host = topology.build(
                f"uniform:bandwidth={self.figures.bytes_per_s:.0f}B/s,latency={self.figures.latency_s * 1e9:.0f}ns",
                ranks=self._ranks,
            )
            typical = max(1, 3 << size >> 2)  # the middle between two powers of two, so that all of them choose alike
            prices = [(price(build(line, ranks=self._ranks), host, typical).seconds, line) for line in auto_lines()]
            self._by_size[size] = sorted(prices, key=lambda priced: priced[0])  # of equal ones the first
        return self._by_size[size]
