"""Learners and servers on several hosts: what travels between them shares the links of the hosts.

A learner's push goes to every server, an equal part to each, and is there when all parts are; weights come back the
same way. Each host sends and receives over its own link, whatever it carries: with a server on every host, a host's
link has the pushes of its own learners and the weights that its server gives to the others. What stays within a host
takes no link.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offbeat.simulate.fair_network import FairNetwork
from offbeat.topology import Topology

PUSHES, FETCHES = 0, 1  # the two directions
_Part = tuple[int, int, int]  # source, target and number of a message


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLinks:
    """On which host each learner and each server is, and the network of so placed ranks."""

    learners: tuple[int, ...]
    servers: tuple[int, ...]
    topology: Callable[[Sequence[int]], Topology]

    def without(self, kept: Sequence[int]) -> HostLinks:
        """With these learners only."""
        placed = tuple(self.learners[learner] for learner in kept)
        return HostLinks(learners=placed, servers=self.servers, topology=self.topology)


class HostTransfers:
    """What is on its way; see the module's text. A transfer has a number of its own in its direction."""

    def __init__(self, links: HostLinks) -> None:
        self._learners = len(links.learners)
        self._servers = range(self._learners, self._learners + len(links.servers))
        self._host = (*links.learners, *links.servers)  # of each rank
        self._network = FairNetwork(links.topology((*links.learners, *links.servers)))
        self._whose: dict[_Part, tuple[int, int]] = {}  # direction and number of the transfer of a part
        self._parts: dict[tuple[int, int], set[_Part]] = {}  # that have not come yet
        self._come: tuple[list[int], list[int]] = ([], [])  # and were not asked for yet
        self._now_s = 0.0
        self.is_full = False

    def start(self, now_s: float, which: int, number: int, learner: int, size_bytes: float) -> None:
        self._now_s = now_s
        parts = set()
        for server in self._servers:
            if self._host[server] == self._host[learner]:
                continue
            source, target = (learner, server) if which == PUSHES else (server, learner)
            part = source, target, self._network.send(now_s, source, target, size_bytes / len(self._servers))
            self._whose[part] = which, number
            parts.add(part)
        if parts:
            self._parts[which, number] = parts
        else:
            self._come[which].append(number)
        self.is_full = bool(self._parts)

    def remove(self, now_s: float, which: int, number: int) -> bool:
        """Send no more of a transfer; whether some of it had not come yet."""
        self._now_s = now_s
        parts = self._parts.pop((which, number), None)
        for source, target, one in parts or ():
            del self._whose[source, target, one]
            self._network.drop(now_s, source, target, one)
        return parts is not None

    def next_end_s(self, which: int) -> float:
        now_s = self._now_s
        # What is left may take less than the clock can show: it must move on all the same.
        return now_s if self._come[which] else max(self._network.next_change_s(), math.nextafter(now_s, math.inf))

    def finish(self, now_s: float, which: int) -> list[int]:
        """The transfers of this direction that are there."""
        self._now_s = now_s
        for arrival in self._network.advance(now_s):
            part = arrival.source, arrival.target, arrival.number
            whose = self._whose.pop(part, None)
            if whose is None:
                continue
            self._parts[whose].discard(part)
            if not self._parts[whose]:
                del self._parts[whose]
                self._come[whose[0]].append(whose[1])
        self.is_full = bool(self._parts)
        found = self._come[which][:]
        self._come[which].clear()
        return found
