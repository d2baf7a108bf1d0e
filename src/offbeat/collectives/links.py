"""Which host has a slow link: from how fast each rank sends to each (`network.tcp_info`).

What goes from one host to another is as fast as the slower of two links, and several flows share a link. So the flows
that a schedule has in one step are added up for each host and direction. A slow flow is the fault of the host at which
most slow flows end; where two hosts are equal in that, the flow itself is named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import NamedTuple

from offbeat.collectives.calls import Plan
from offbeat.number_format import format_rate

_SLOW = 0.4  # of the fastest: a link below that is named. A busy machine made equal ones differ by up to 0.56

Flow = tuple[int, int]  # from a host to a host


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """A host that `sends` or `receives` slowly, bytes per second, and what is usual; `to` if to one host only."""

    host: int
    does: str
    bytes_per_s: float
    usual: float
    to: int | None = None

    def __str__(self) -> str:
        return self.told(())

    def told(self, names: Sequence[str]) -> str:
        """In words, with the names of the hosts, where they have names."""
        who, to = (None if one is None else names[one] if names else f"host {one}" for one in (self.host, self.to))
        where = "" if to is None else f" to {to}"
        rate, usual = format_rate(self.bytes_per_s), format_rate(self.usual)
        return f"{who} {self.does}{where} at {rate}, the others at {usual}"


class HostRates(NamedTuple):
    """Bytes per second of each host; 0 where nothing was measured."""

    sends: tuple[float, ...]
    receives: tuple[float, ...]


@cache
def rank_pairs(way: Plan, hosts: tuple[int, ...]) -> tuple[frozenset[tuple[int, int]], ...]:
    """Who sends to whom on another host in each step of a plan; steps that are alike once."""
    steps = way.schedule.steps
    pairs = [
        frozenset((one, other) for one, other, *_ in steps.rows(step).tolist() if hosts[one] != hosts[other])
        for step in range(len(steps))
    ]
    return tuple(dict.fromkeys(found for found in pairs if found))


def flows(
    steps: Sequence[frozenset[tuple[int, int]]], rates: Sequence[Sequence[float]], hosts: Sequence[int]
) -> list[dict[Flow, float]]:
    """What goes from host to host in each step, where rank r sends to rank p at rates[r][p]."""
    found = []
    for pairs in steps:
        step: dict[Flow, float] = defaultdict(float)
        for one, other in pairs:
            step[hosts[one], hosts[other]] += rates[one][other]
        found.append({flow: rate for flow, rate in step.items() if rate > 0})
    return found


def host_rates(steps: Sequence[Mapping[Flow, float]], hosts: int) -> HostRates:
    """What each host sends and receives in the step in which that is most."""
    sends, receives = [0.0] * hosts, [0.0] * hosts
    for step in steps:
        for host in range(hosts):
            sends[host] = max(sends[host], sum(rate for (one, _), rate in step.items() if one == host))
            receives[host] = max(receives[host], sum(rate for (_, other), rate in step.items() if other == host))
    return HostRates(tuple(sends), tuple(receives))


def slow_links(steps: Sequence[Mapping[Flow, float]], hosts: int) -> tuple[SlowLink, ...]:
    """Those that are much slower than the fastest."""
    rates = host_rates(steps, hosts)
    fastest = max((*rates.sends, *rates.receives), default=0.0)
    slow_out, slow_in = ({host for host, rate in enumerate(side) if 0 < rate < _SLOW * fastest} for side in rates)
    everything = {flow for step in steps for flow in step}
    left = {(one, other) for one, other in everything if one in slow_out or other in slow_in}
    if not left:
        return ()
    named: set[int] = set()
    single: list[Flow] = []
    while left:
        at = {host: frozenset(flow for flow in left if host in flow) for host in range(hosts)}
        fast = {host: sum(host in flow for flow in everything - left) for host in range(hosts)}
        worst = max(at, key=lambda host: (len(at[host]), -fast[host], -host))
        if any(at[host] == at[worst] and fast[host] == fast[worst] for host in at if host != worst):
            single += sorted(at[worst])
        else:
            named.add(worst)
        left -= at[worst]
    beside = host_rates([{f: rate for f, rate in step.items() if not named & set(f)} for step in steps], hosts)
    return (
        *_of_hosts(named & slow_out, "sends", rates.sends, beside.sends, fastest),
        *_of_hosts(named & slow_in, "receives", rates.receives, beside.receives, fastest),
        *(_of_flow(flow, max(step.get(flow, 0.0) for step in steps), fastest) for flow in single),
    )


def _of_flow(flow: Flow, rate: float, fastest: float) -> SlowLink:
    return SlowLink(host=flow[0], does="sends", bytes_per_s=rate, usual=fastest, to=flow[1])


def _of_hosts(
    slow: set[int], does: str, rates: Sequence[float], beside: Sequence[float], fastest: float
) -> Iterator[SlowLink]:
    """Beside them: hosts that do it with others, too, and so not at the pace of a slow one."""
    others = [rate for rate, with_others in zip(rates, beside, strict=True) if with_others > 0]
    for host in sorted(slow):
        yield SlowLink(host=host, does=does, bytes_per_s=rates[host], usual=median(others) if others else fastest)
