"""What a run knows of its hosts: how their clocks differ, and how many bytes go over each link.

Clocks. Each host has its own monotonic clock, and spans are written by the first rank, on its clock. It asks the first
rank of every other host for the time, several times, and takes the answer that came soonest: the clock there is ahead
by `offset_s`, and that is wrong by at most `uncertainty_s`, half of what the answer took. Clocks drift, so this is done
again in every pause; between two measurements the offset is taken to change evenly.

Links. A link is a host's sending to another host. Bytes are those of collectives since this part of the run began, or,
with a parameter server, those of gradients and weights since the run began.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from offbeat.collectives.counters import Stats
from offbeat.train.learner_snapshot import HostName, Traffic

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
    links: dict[tuple[str, str], int] = defaultdict(int)
    for rank, row in sent_to.items():
        for peer, size_bytes in enumerate(row):
            if hosts[rank] != hosts[peer]:
                links[hosts[rank], hosts[peer]] += size_bytes
    return _facts(list(dict.fromkeys(hosts)), hosts, links, counted, clocks)


def served_facts(
    learners: Mapping[int, HostName], moved: Mapping[int, Traffic], servers: Sequence[str]
) -> dict[str, Any]:
    """The same where learners push to servers and fetch from them: equal parts to each of the hosts with these numbers
    (see `HostName`). Nothing where all is on one host. `learner_hosts` names the host of each learner.
    """
    if not {*servers, *(one.number for one in learners.values())} - {""}:
        return {}
    names = _names_of(learners.values(), servers)
    links: dict[tuple[str, str], int] = defaultdict(int)
    for learner, traffic in moved.items():
        for server in servers:
            if learner in learners and learners[learner].number != server:
                mine, there = names[learners[learner].number], names[server]
                links[mine, there] += traffic.sent // len(servers)
                links[there, mine] += traffic.received // len(servers)
    hosts = [names[learners[one].number] if one in learners else "" for one in range(max(learners, default=-1) + 1)]
    return _facts(list(names.values()), hosts, links, None, None) | {"learner_hosts": hosts}


def _names_of(learners: Collection[HostName], servers: Sequence[str]) -> dict[str, str]:
    """Each number's host, those with servers first: its name, and where several share it, which of them it is."""
    told = {one.number: one.name for one in learners}
    known = {number: told.get(number, "servers") for number in dict.fromkeys([*servers, *told])}
    numbers: dict[str, list[str]] = defaultdict(list)
    for number, name in known.items():
        numbers[name].append(number)
    return {
        number: name if len(numbers[name]) == 1 else f"{name}-{numbers[name].index(number)}"
        for number, name in known.items()
    }


def _facts(
    names: Sequence[str],
    hosts: Sequence[str],
    links: Mapping[tuple[str, str], int],
    counted: Stats | None,
    clocks: HostClocks | None,
) -> dict[str, Any]:
    whole = sum(links.values())
    rates = None if counted is None else counted.host_rates
    return {
        "hosts": [
            {
                "name": name,
                "learners": sum(host == name for host in hosts),
                "sent_bytes": sum(many for (source, _), many in links.items() if source == name) if links else None,
                "received_bytes": sum(many for (_, target), many in links.items() if target == name) if links else None,
                "sends_per_s": None if rates is None else rates.sends[at] or None,
                "receives_per_s": None if rates is None else rates.receives[at] or None,
                "clock_offset_s": None if clocks is None else clocks.latest[name].offset_s,
                "clock_uncertainty_s": None if clocks is None else clocks.latest[name].uncertainty_s,
            }
            for at, name in enumerate(names)
        ],
        "links": [
            {"source": source, "target": target, "bytes": many, "share": many / whole if whole else 0.0}
            for (source, target), many in sorted(links.items())
        ],
    }
