"""Learners that send their updates to each other, in simulated time: the real `Peer` objects on simulated links.

A learner computes, applies the updates that have come meanwhile and its own, sends that to every other, and goes on, if
its window allows. Each learner has one port: what it sends leaves one message after the other, and what comes to it
arrives one after the other. Confirmations take the latency alone. Every `average` updates all learners meet: they wait
until nothing is under way, and for an all-reduce of the weights by the fewest bytes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import count

from offbeat.errors import RequestError
from offbeat.policies.base import coded_bytes
from offbeat.policies.peers import Peer, rule_of
from offbeat.runs.log import Span
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.result import Result, Tally

_FINISH, _ARRIVE, _CONFIRM, _MET = range(4)
Seen = dict[int, int]


def run(strategy: str, cluster: Cluster, *, updates: int, keep_spans: int = 0) -> Result:
    """Simulate until so many updates were made, by all learners together."""
    if updates < 1:
        raise RequestError(f"simulate at least 1 update; got {updates}")
    simulation = PeerSimulation(strategy, cluster, updates, keep_spans)
    for _ in simulation.turns():
        pass
    return simulation.result()


class PeerSimulation:
    """One run. `begun`, `updated`, `received` and `averaged` are for who trains in it, and do nothing here."""

    def __init__(self, strategy: str, cluster: Cluster, updates: int, keep_spans: int) -> None:
        if cluster.failures is not None or cluster.cores is not None:
            what = "failures" if cluster.failures is not None else "shared cores"
            raise RequestError(f"'{strategy}': {what} are simulated with a parameter server only")
        learners = range(cluster.learners)
        self.strategy, self.cluster, self.updates, self.keep_spans = strategy, cluster, updates, keep_spans
        self.rule = rule_of(strategy)
        self.peers = [Peer(one, learners, window=self.rule.window) for one in learners]
        self.draws, self.samples = cluster.draws(), cluster.all_samples
        self.now, self.made, self.events = 0.0, 0, 0
        self.heap: list[tuple[float, int, int, int, int]] = []
        self.order = count()  # of events at one moment: as they were planned
        self.messages: dict[int, tuple[int, Seen]] = {}  # under way, by the order of their event
        self.inbox: list[deque[tuple[int, int, Seen]]] = [deque() for _ in learners]
        self.seen: list[Seen | None] = [None] * cluster.learners  # of the minibatch that is computed
        self.since = [0.0] * cluster.learners
        self.out_free, self.in_free = [0.0] * cluster.learners, [0.0] * cluster.learners
        self.meets_at = self.rule.average
        self.meeting: set[int] = set()  # who waits for the others, and then for the mean
        self.averages = False  # the mean is being taken
        self.without_samples: set[int] = set()
        self.tally = Tally()
        self.spans: list[Span] = []

    def begun(self, learner: int) -> bool:
        """Whether there are samples for another minibatch."""
        return True

    def updated(self, learner: int, number: int, age: int) -> None:
        """An update of a learner was made, and applied to its replica."""

    def received(self, learner: int, source: int, number: int) -> None:
        """An update of another was applied to a replica."""

    def averaged(self) -> None:
        """The mean of all replicas was taken."""

    def turns(self) -> Iterator[None]:
        """Event by event."""
        for learner in range(self.cluster.learners):
            self._begin(learner)
        while self.made < self.updates and self.heap:
            yield
            self.now, order, kind, one, other = heapq.heappop(self.heap)
            self.events += 1
            if kind == _FINISH:
                self._finish(one)
            elif kind == _ARRIVE:
                number, seen = self.messages.pop(order)
                self.inbox[other].append((one, number, seen))
                if self.seen[other] is None:
                    self._go_on(other)
            elif kind == _CONFIRM:
                self.peers[other].confirm(one, max(self.peers[other].confirmed[one], self.messages.pop(order)[0]))
                if self.seen[other] is None:
                    self._go_on(other)
            else:
                self.averaged()
                self.meeting.clear()
                self.averages = False
                self.meets_at = self.peers[0].version + self.rule.average
                for learner in set(range(self.cluster.learners)) - self.without_samples:
                    self._begin(learner)
                if self.without_samples and len(self.without_samples) < self.cluster.learners:
                    for learner in sorted(self.without_samples):
                        self._go_on(learner)

    def _plan(self, at_s: float, kind: int, one: int, other: int, message: tuple[int, Seen] | None = None) -> None:
        order = next(self.order)
        if message is not None:
            self.messages[order] = message
        heapq.heappush(self.heap, (at_s, order, kind, one, other))

    def _begin(self, learner: int) -> None:
        self._close(learner, "wait")
        if not self.begun(learner):
            self.without_samples.add(learner)
            return
        self.seen[learner] = dict(self.peers[learner].applied)
        self._plan(self.now + self.draws.take(learner), _FINISH, learner, learner)

    def _finish(self, learner: int) -> None:
        self._close(learner, "compute")
        seen = self.seen[learner]
        assert seen is not None
        self.seen[learner] = None
        self._apply(learner)
        peer = self.peers[learner]
        age = peer.make(seen)
        self.made += 1
        self.tally.applied += 1
        self.tally.samples += self.samples[learner]
        self.updated(learner, peer.applied[learner], age)
        if self.rule.sends:
            self.tally.staleness[age] += 1
            for other in peer.confirmed:
                self._send(learner, other, peer.applied[learner], seen)
        else:
            for other in peer.confirmed:
                peer.confirm(other, peer.applied[learner])
        self._go_on(learner)

    def _apply(self, learner: int) -> None:
        latency_s = 0.0 if self.cluster.wires is None else self.cluster.wires.latency_s
        while self.inbox[learner]:
            source, number, seen = self.inbox[learner].popleft()
            self.tally.staleness[self.peers[learner].receive(source, number, seen)] += 1
            self.received(learner, source, number)
            self._plan(self.now + latency_s, _CONFIRM, learner, source, (number, {}))

    def _go_on(self, learner: int) -> None:
        """A learner that computes nothing: apply what has come, then begin, wait, or meet."""
        self._apply(learner)
        peer = self.peers[learner]
        if learner in self.without_samples and not self.rule.sends:
            return
        if self.rule.sends and (peer.version >= self.meets_at or learner in self.without_samples):
            self.meeting.add(learner)
            made = {one: self.peers[one].applied[one] for one in peer.applied}
            everybody = len(self.meeting) == len(self.peers) and not self.averages
            if everybody and all(one.has_all(made) for one in self.peers):
                self.averages = True
                self._plan(self.now + self._mean_s(), _MET, 0, 0)
        elif peer.may_begin and learner not in self.meeting:
            self._begin(learner)
            if learner in self.without_samples:
                self._go_on(learner)

    def _send(self, source: int, target: int, number: int, seen: Seen) -> None:
        wires = self.cluster.wires
        if wires is None:
            self._plan(self.now, _ARRIVE, source, target, (number, seen))
            return
        start_s = max(self.now, self.out_free[source], self.in_free[target])
        end_s = start_s + self._bytes() / min(wires.cap(source), wires.cap(target))
        self.out_free[source] = self.in_free[target] = end_s
        self._plan(end_s + wires.latency_s, _ARRIVE, source, target, (number, seen))

    def _bytes(self) -> int:
        assert self.cluster.wires is not None
        return coded_bytes(self.rule.codec, self.cluster.wires.size_bytes)

    def _mean_s(self) -> float:
        wires, learners = self.cluster.wires, self.cluster.learners
        if wires is None or learners == 1:
            return 0.0
        slowest = min(wires.cap(learner) for learner in range(learners))
        return 2 * (learners - 1) * (wires.size_bytes / learners / slowest + wires.latency_s)

    def _close(self, learner: int, what: str) -> None:
        """End what the learner was doing, and count the time."""
        took = self.now - self.since[learner]
        self.tally.seconds[what] += took
        if took > 0 and self.made < self.keep_spans:
            self.spans.append(Span(learner, what, self.since[learner], self.now, self.peers[learner].version))
        self.since[learner] = self.now

    def result(self) -> Result:
        for learner, seen in enumerate(self.seen):
            self._close(learner, "wait" if seen is None else "compute")
        return Result.of(
            strategy=self.strategy,
            learners=self.cluster.learners,
            updates=self.made,
            seconds=self.now,
            events=self.events,
            tally=self.tally,
            spans=tuple(self.spans),
        )
