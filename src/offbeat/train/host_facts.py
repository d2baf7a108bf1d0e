"""What a run knows of its hosts: how their clocks differ, and how many bytes go over each link.

Clocks. Each host has its own monotonic clock, and spans are written by the first rank, on its clock. It asks the first
rank of every other host for the time, several times, and takes the answer that came soonest: the clock there is ahead
by `offset_s`, and that is wrong by at most `uncertainty_s`, half of what the answer took. Clocks drift, so this is done
again in every pause; between two measurements the offset is taken to change evenly.

Links. A link is a host's sending to another host. Bytes are those of collectives since this part of the run began.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from offbeat.collectives.counters import Stats

ROUNDS = 8  # questions to a host


class ClockOffset(NamedTuple):
    """At `at_s` of the first rank's clock, another host's clock was ahead by `offset_s`."""

    at_s: float
    offset_s: float
    uncertainty_s: float


HERE = ClockOffset(0.0, 0.0, 0.0)


def offset_at(there_s: float, old: ClockOffset, new: ClockOffset) -> float:
    """How far a host's clock was ahead when it showed `there_s`: between two measurements, part of the way."""
    passed_s = new.at_s - old.at_s
    part = min(1.0, max(0.0, (there_s - new.offset_s - old.at_s) / passed_s)) if passed_s > 0 else 1.0
    return old.offset_s + part * (new.offset_s - old.offset_s)


class HostClocks:
    """The clocks of the hosts of a run. `hosts` names that of each rank; without any there is one clock."""

    def __init__(self, hosts: Sequence[str], rank: int) -> None:
        self._hosts, self._rank = hosts, rank
        self._first = {host: hosts.index(host) for host in dict.fromkeys(hosts)}
        self._before: dict[str, ClockOffset] = {}
        self.latest: dict[str, ClockOffset] = {}  # known on the first rank only
        self.measure()

    def measure(self) -> None:
        """By all ranks together."""
        self._before = self.latest
        self.latest = {host: self._ask(other) if other else HERE for host, other in self._first.items()}
        self._before = self._before or self.latest

    def _ask(self, other: int) -> ClockOffset:
        answer, best = torch.zeros(1, dtype=torch.float64), HERE._replace(uncertainty_s=float("inf"))
        for _ in range(ROUNDS):
            if self._rank == 0:
                began_s = time.monotonic()
                dist.send(answer, other)
                dist.recv(answer, other)
                ended_s = time.monotonic()
                half_s = (ended_s - began_s) / 2
                found = ClockOffset(began_s + half_s, float(answer) - began_s - half_s, half_s)
                best = min(best, found, key=lambda one: one.uncertainty_s)
            elif self._rank == other:
                dist.recv(answer, 0)
                answer.fill_(time.monotonic())
                dist.send(answer, 0)
        return best

    def here(self, rank: int, at_s: float) -> float:
        """A moment on the clock of a rank's host, on the first rank's clock; asked on the first rank."""
        if not self._hosts:
            return at_s
        host = self._hosts[rank]
        return at_s - offset_at(at_s, self._before[host], self.latest[host])

    def as_json(self) -> dict[str, dict[str, float]]:
        """For the log: of every host but the first."""
        return {
            host: {"offset_s": one.offset_s, "uncertainty_s": one.uncertainty_s}
            for host, one in self.latest.items()
            if one is not HERE
        }


def network_facts(
    hosts: Sequence[str], sent_to: Mapping[int, Sequence[int]], counted: Stats | None, clocks: HostClocks
) -> dict[str, Any]:
    """For the metrics: `hosts` with their learners, bytes, rates and clocks, and `links` with their share of all bytes.

    `sent_to[r][p]` are the bytes that rank r has sent to rank p.
    """
    names = list(dict.fromkeys(hosts))
    links: dict[tuple[str, str], int] = defaultdict(int)
    for rank, row in sent_to.items():
        for peer, size_bytes in enumerate(row):
            if hosts[rank] != hosts[peer]:
                links[hosts[rank], hosts[peer]] += size_bytes
    whole = sum(links.values())
    rates = None if counted is None else counted.host_rates
    return {
        "hosts": [
            {
                "name": name,
                "learners": hosts.count(name),
                "sent_bytes": sum(many for (source, _), many in links.items() if source == name) if links else None,
                "received_bytes": sum(many for (_, target), many in links.items() if target == name) if links else None,
                "sends_per_s": None if rates is None else rates.sends[at] or None,
                "receives_per_s": None if rates is None else rates.receives[at] or None,
                "clock_offset_s": clocks.latest[name].offset_s,
                "clock_uncertainty_s": clocks.latest[name].uncertainty_s,
            }
            for at, name in enumerate(names)
        ],
        "links": [
            {"source": source, "target": target, "bytes": many, "share": many / whole if whole else 0.0}
            for (source, target), many in sorted(links.items())
        ],
    }
