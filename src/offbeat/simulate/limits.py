"""What limits a strategy on its machines: each cause is taken away, and the simulation is run again.

A cause is something that a cluster could be without: a slow learner, scatter of compute times, a link that is full.
Whatever gains most throughput when it is gone is what limits the strategy. Shares of time cannot tell that: learners
that wait for each other may all be waiting for the link of the server.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from offbeat.errors import RequestError
from offbeat.runs.stragglers import SLOWER
from offbeat.simulate.cluster import Cluster, Wires
from offbeat.simulate.compare import MachineSummary, describe_machines, typical_s
from offbeat.simulate.compute import Law
from offbeat.simulate.engine import Floats, Ints
from offbeat.simulate.setup import Setup

SCATTER = "the scatter of compute times"
SERVER_LINK, LEARNER_LINKS, LINKS = "the server's link", "the learners' links", "the links of server and learners"
LATENCY, BANDWIDTH, REDUCTION = "the network's latency", "the network's bandwidth", "the reduction"
_WHAT_IF = 1 / 8  # of the updates of a whole simulation
_ROUNDS, _MINIBATCHES = 10, 1_000  # at least: of each learner, and of all
_LITTLE, _MUCH = 0.05, 0.25  # gains


class Cause(NamedTuple):
    """Something that costs time, and the machines without it."""

    name: str
    without: Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The gains in throughput (samples applied a second) if one cause at a time were gone, the largest first."""

    gains: Mapping[str, float]

    @property
    def reason(self) -> str | None:
        """What gains most; None where nothing gains."""
        name, gain = next(iter(self.gains.items()), (None, 0.0))
        return name if gain > 0 else None

    @property
    def gain(self) -> float:
        return max(0.0, next(iter(self.gains.values()), 0.0))

    def text(self, full_share: float = 0.0) -> str:
        """In words; `full_share`: of the time in which the server's link is full."""
        if self.reason is None:
            return "limited by computing alone"
        used = f" (full {100 * full_share:.0f} % of the time)" if self.reason == SERVER_LINK and full_share else ""
        if self.gain < _LITTLE:
            return f"limited by computing; most beside it, {_share(self.gain)}, is lost to {self.reason}{used}"
        gone = f"{1 + self.gain:.3g}x the throughput without it"
        if self.gain < _MUCH:
            return f"most beside computing is lost to {self.reason}{used}: {gone}"
        return f"limited by {self.reason}{used}: {gone}"


def _share(gain: float) -> str:
    return "less than 1 %" if gain < 0.01 else f"{100 * gain:.0f} %"


def limit_of(setup: Setup, machines: MachineSummary, updates: int) -> Limit:
    """Take the causes away one at a time, for a part of the updates of the whole simulation."""
    least = math.ceil(max(_ROUNDS * setup.cluster.learners, _MINIBATCHES) / setup.begun_per_update())
    some = min(updates, max(math.ceil(updates * _WHAT_IF), least))

    def rate(one: Setup) -> float:
        return one.run(some).samples_per_s

    causes = causes_of(setup, machines)
    now = rate(setup) if causes else 1.0
    gains: dict[str, float] = {}
    for name, without in causes:
        try:
            gains[name] = rate(without) / now - 1
        except RequestError:  # without it there is no update at all: it is no cause
            continue
    # Links of one rate in a row: without one the other is as slow. Where neither alone makes half of the way that both
    # make together (in factors of the rate), they are named together.
    alone = max(gains.get(SERVER_LINK, 0.0), gains.get(LEARNER_LINKS, 0.0))
    if LINKS in gains and 2 * math.log1p(alone) >= math.log1p(gains[LINKS]):
        del gains[LINKS]
    return Limit(gains=dict(sorted(gains.items(), key=lambda item: -item[1])))


def causes_of(setup: Setup, machines: MachineSummary) -> list[Cause]:
    """What could be taken away, whether that gains anything or not."""
    cluster = setup.cluster
    found = [Cause(name, replace(setup, cluster=without)) for name, without in _of_computing(cluster, machines)]
    if setup.reduces:
        return found + _of_reductions(setup)
    return found + [
        Cause(name, replace(setup, cluster=replace(cluster, wires=wires))) for name, wires in _of_links(cluster)
    ]


def _of_computing(cluster: Cluster, machines: MachineSummary) -> list[tuple[str, Cluster]]:
    found: list[tuple[str, Cluster]] = []
    typical = typical_s(machines.mean_s)
    slow = machines.slow or tuple(one for one, mean in enumerate(machines.mean_s) if mean > typical)
    if machines.slow or max(machines.mean_s) > SLOWER * min(machines.mean_s):
        speeds = [*cluster.speeds, *[1.0] * (cluster.learners - len(cluster.speeds))]
        for learner in slow:
            speeds[learner] *= machines.mean_s[learner] / typical
        name = "unequal speeds of the learners"
        if machines.slow:
            shown = ", ".join(map(str, slow[:4])) + (", ..." if len(slow) > 4 else "")
            name = f"the slow learner {shown}" if len(slow) == 1 else f"the slow learners {shown}"
        found.append((name, replace(cluster, speeds=tuple(speeds))))
    if machines.spread > 0.005:
        even = replace(cluster, law=_even(cluster))
        if cluster.cores is not None:
            even = replace(even, cores=replace(cluster.cores, law=_always([cluster.cores.law.mean_s])))
        found.append((SCATTER, even))
    if cluster.slow is not None:
        found.append(("slow periods", replace(cluster, slow=None)))
    if cluster.failures is not None:
        found.append(("failures", replace(cluster, failures=None)))
    if cluster.cores is not None and cluster.cores.count < cluster.learners:
        cores = replace(cluster.cores, count=float(cluster.learners))
        found.append(("sharing the cores", replace(cluster, cores=cores)))
    return found


def _even(cluster: Cluster) -> Law:
    """The cluster's law with each learner's own mean every time."""
    law = cluster.law
    if law.by_learner is None and law.at is None and law.mean_s < math.inf:
        return _always([law.mean_s])
    means = describe_machines(replace(cluster, speeds=(), slow=None, cores=None, ids=())).mean_s
    return _always(means if not cluster.ids else [statistics.fmean(means)])


def _always(mean_s: list[float] | tuple[float, ...]) -> Law:
    """Each learner's number of seconds, or one for all."""
    means = np.array(mean_s)

    def at(learners: Ints, minibatches: Ints) -> Floats:
        each = means[learners] if len(means) > 1 else np.full(learners.shape, means[0])
        return np.broadcast_to(each, np.broadcast_shapes(learners.shape, minibatches.shape))

    return Law(text="even", mean_s=statistics.fmean(mean_s), sample=_none, at=at)


def _none(chance: Callable[[int], Floats]) -> Floats:
    raise AssertionError("a law with `at` takes nothing from chance")


def _of_links(cluster: Cluster) -> list[tuple[str, Wires | None]]:
    wires = cluster.wires
    if wires is None:
        return []
    found: list[tuple[str, Wires | None]] = []
    caps = [wires.cap(learner) for learner in range(cluster.learners)]
    at_server, at_learners = wires.server_bytes_per_s < math.inf, min(caps) < math.inf
    if wires.size_bytes and at_server:
        found.append((SERVER_LINK, replace(wires, server_bytes_per_s=math.inf)))
    if wires.size_bytes and at_learners:
        found.append((LEARNER_LINKS, replace(wires, learner_bytes_per_s=math.inf)))
    if wires.size_bytes and at_server and at_learners:
        found.append((LINKS, replace(wires, server_bytes_per_s=math.inf, learner_bytes_per_s=math.inf)))
    if wires.latency_s:
        found.append((LATENCY, replace(wires, latency_s=0.0)))
    return found


def _of_reductions(setup: Setup) -> list[Cause]:
    """Latency is what a reduction of nothing takes; the rest is bandwidth."""
    reduction_s = setup.reduction_s()
    latency_s = reduction_s(0)
    if setup.reduce_s is not None:
        return [Cause(REDUCTION, replace(setup, reduce_s=lambda size: 0.0))] if latency_s else []
    assert setup.model is not None
    found = []
    if latency_s:
        found.append(Cause(LATENCY, replace(setup, reduce_s=lambda size: reduction_s(size) - latency_s)))
    if sum(setup.model.size_bytes):
        found.append(Cause(BANDWIDTH, replace(setup, reduce_s=lambda size: latency_s)))
    return found
