"""Why a strategy is slow on a cluster, and what would help.

`describe_machines` says what the learners are like. `diagnose` simulates a strategy and finds what limits it. A cause
is something that a cluster could be without (a slow learner, scatter of compute times, a full link). Each cause is
taken away, and the simulation is run again; what gains most throughput is the limit. Shares of time cannot tell that:
learners that wait for each other may all be waiting for the link of the server. `what_if` says what could be done about
slow learners.

Nothing here names a winner: that needs accuracy, and accuracy needs training.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from offbeat.errors import RequestError
from offbeat.number_format import percent
from offbeat.policies import create
from offbeat.policies.memory import vectors_of
from offbeat.runs.metrics import SLOWER, is_straggler
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.compute import Law
from offbeat.simulate.engine import Floats, Ints
from offbeat.simulate.result import Result
from offbeat.simulate.server import StandsStillError
from offbeat.simulate.setup import Setup
from offbeat.spec import format_learners
from offbeat.strategy import ALL_REDUCE, PEERS, paced_as, simulated_family_of

_MOST_SAMPLES, _ALL_SAMPLES = 2000, 400_000  # draws of each learner, and of all together
_WINDOWS = 8  # in each of which a persistently slow learner is slow
SCATTER = "the scatter of compute times"
SERVER_LINK, LEARNER_LINKS, LINKS = "the server's link", "the learners' links", "the links of server and learners"
HOST_LINKS = "the links between hosts"
LATENCY, BANDWIDTH, REDUCTION = "the network's latency", "the network's bandwidth", "the reduction"
_WHAT_IF = 1 / 8  # of the updates of a whole simulation
_ROUNDS, _MINIBATCHES = 10, 1_000  # at least: of each learner, and of all
_LITTLE, _MUCH = 0.05, 0.25  # gains
_WORTH_TELLING = 1.05  # times the throughput, for advice about slow learners


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSummary:
    """What the draws say of the learners: their mean compute times, the slow ones, the spread of the rest."""

    mean_s: tuple[float, ...]  # of each learner
    slow: tuple[int, ...]  # persistently slow, slowest first
    spread: float  # standard deviation / mean of one learner's times, the median over learners
    slowest_of_all: float  # mean of the slowest of all learners' draws / mean of all draws

    @property
    def typical_s(self) -> float:
        """The mean time of a learner that is not slow: of two equal halves, that of the faster one."""
        return statistics.median_low(self.mean_s)

    def as_fast(self, cluster: Cluster, learners: Sequence[int]) -> Cluster:
        """The cluster with these learners as fast as the typical one."""
        speeds = list(cluster.all_speeds)
        for learner in learners:
            speeds[learner] *= self.mean_s[learner] / self.typical_s
        return replace(cluster, speeds=tuple(speeds))


def describe_machines(cluster: Cluster) -> MachineSummary:
    """Draw from every learner, and tell persistent slowness from chance."""
    draws = cluster.draws()
    samples = max(200, min(_MOST_SAMPLES, _ALL_SAMPLES // cluster.learners))
    works = cluster.works()

    def time_of(learner: int) -> float:
        """Of a minibatch; where learners share cores, with a core of its own."""
        if works is None:
            return draws.take(learner)
        computed = works.take(learner)
        return computed + cluster.rest_s(learner, computed) + draws.take(learner)

    drawn = [[time_of(learner) for _ in range(samples)] for learner in range(cluster.learners)]
    means = [statistics.fmean(times) for times in drawn]
    middle = statistics.median_low(statistics.median(times) for times in drawn)
    typical = statistics.median_low(means)
    part = samples // _WINDOWS

    def is_slow(learner: int) -> bool:
        """Parts by medians, since a heavy tail moves a mean."""
        windows = (drawn[learner][first : first + part] for first in range(0, part * _WINDOWS, part))
        parts = [(statistics.median(some), middle) for some in windows]
        return is_straggler((means[learner], typical), parts)

    slow = [learner for learner in range(cluster.learners) if is_slow(learner)]
    evened = [[time / mean for time in times] for times, mean in zip(drawn, means, strict=True)]
    return MachineSummary(
        mean_s=tuple(means),
        slow=tuple(sorted(slow, key=lambda learner: -means[learner])),
        spread=statistics.median(statistics.pstdev(times) for times in evened),
        slowest_of_all=statistics.fmean(max(column) for column in zip(*drawn, strict=True)) / statistics.fmean(means),
    )


def describe(machines: MachineSummary) -> str:
    """The cluster in a sentence."""
    if len(machines.mean_s) == 1:
        return "one learner, which waits for nobody"
    if machines.slow:
        slower = {one: machines.mean_s[one] / machines.typical_s for one in machines.slow[:4]}
        names = ", ".join(f"learner {one} ({times:.1f}x)" for one, times in slower.items())
        more = f" and {len(machines.slow) - 4} more" if len(machines.slow) > 4 else ""
        whom = "it" if len(machines.slow) == 1 else "them"
        return f"persistently slow: {names}{more}; a barrier waits for {whom} in every update"
    ratio = max(machines.mean_s) / min(machines.mean_s)
    if ratio > SLOWER and machines.spread <= 0.5:
        return (
            f"the learners have unequal speeds (the slowest takes {ratio:.1f}x as long as the fastest): the "
            f"last of them takes {machines.slowest_of_all:.2f}x the mean time, and a barrier makes all learners "
            "wait for it"
        )
    if machines.spread > 0.5:
        return (
            "no learner is persistently slow, but compute times vary (standard deviation "
            f"{machines.spread:.1f}x the mean): the last learner takes {machines.slowest_of_all:.1f}x the mean "
            "time, and it is a different one in each update"
        )
    return (
        f"the learners are equally fast (standard deviation {machines.spread:.2f}x the mean): the last of them "
        f"takes {machines.slowest_of_all:.2f}x the mean time, so a barrier costs little"
    )


# --- what limits a strategy -------------------------------------------------------------------------------------------


def why(result: Result) -> str:
    """One line on where a strategy's time went and what its gradients were worth."""
    family = simulated_family_of(result.strategy)
    if family == PEERS and not result.staleness:
        return "learners train apart: they send nothing, and their weights are averaged at the end only"
    if family == PEERS:
        waited = f"{percent(result.wait_share, 0)} of the time"
        return f"learners wait for means and windows {waited}; updates are {result.staleness_mean:.2f} versions old"
    if family != ALL_REDUCE:
        return create(result.strategy, expect=result.learners).explain(result)
    sent = f", {percent(result.send_share, 0)} in exposed all-reduces" if result.send_share > 0.005 else ""
    return f"all learners wait for the slowest: {percent(result.wait_share, 0)} of the time{sent}; staleness 0"


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
        full = self.reason == SERVER_LINK and full_share
        used = f" (full {percent(full_share, 0)} of the time)" if full else ""
        if self.gain < _LITTLE:
            lost = "less than 1 %" if self.gain < 0.01 else percent(self.gain, 0)
            return f"limited by computing; the next largest loss, {lost}, is {self.reason}{used}"
        gone = f"{1 + self.gain:.3g}x the throughput without it"
        if self.gain < _MUCH:
            return f"the largest loss besides computing is {self.reason}{used}: {gone}"
        return f"limited by {self.reason}{used}: {gone}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One strategy on its machines: what the simulation gave, and what limits it."""

    setup: Setup
    result: Result | None = None  # None: no update would ever come, and `note` says why
    limit: Limit | None = None
    note: str = ""

    @property
    def strategy(self) -> str:
        return self.setup.strategy

    @property
    def limited(self) -> str:
        """By what, in words."""
        if self.result is None or self.limit is None:
            return self.note
        return self.limit.text(self.result.full_share)

    @property
    def why(self) -> str:
        return self.note if self.result is None else f"{self.limited}; {why(self.result)}"

    def server_bytes(self, size_bytes: int) -> int | None:
        """Memory of all servers together, with SGD's momentum."""
        if self.setup.reduces or not size_bytes:
            return None
        return vectors_of(self.setup.policy(), self.setup.cluster.learners).size_bytes(size_bytes)

    def as_json(self, size_bytes: int, epoch_s: float | None) -> dict[str, Any]:
        result, limit = self.result, self.limit
        told = {"strategy": self.strategy, "updates": 0} if result is None else result.as_json() | result.network_json()
        return told | {
            "limited_by": limit.reason if limit else None,
            "gains_without": dict(limit.gains) if limit else {},
            "epoch_s": epoch_s,
            "server_bytes": self.server_bytes(size_bytes),
            "why": self.why,
        }


def diagnose(setup: Setup, machines: MachineSummary, updates: int) -> Diagnosis:
    try:
        return Diagnosis(setup=setup, result=setup.run(updates), limit=limit_of(setup, machines, updates))
    except StandsStillError as error:
        return Diagnosis(setup=setup, note=str(error))


def typical_of(found: Sequence[Diagnosis]) -> Diagnosis | None:
    """Which one to explain first: a strategy that waits for all, or else the first that makes updates."""
    made = [one for one in found if one.result is not None]
    return next(iter([*(one for one in made if one.setup.waits_for_all), *made]), None)


def limit_of(setup: Setup, machines: MachineSummary, updates: int) -> Limit:
    """Take the causes away one at a time, for a part of the updates of the whole simulation."""
    least = math.ceil(max(_ROUNDS * setup.cluster.learners, _MINIBATCHES) / setup.begun_per_update())
    some = min(updates, max(math.ceil(updates * _WHAT_IF), least))

    def rate(one: Setup) -> float:
        return one.run(some).samples_per_s

    causes = causes_of(setup, machines)
    now = rate(setup) if causes else 1.0
    gains: dict[str, float] = {}
    for name, without in causes.items():
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


def causes_of(setup: Setup, machines: MachineSummary) -> dict[str, Setup]:
    """What could be taken away, whether that gains anything or not, and the setup without it."""
    found = {name: replace(setup, cluster=cluster) for name, cluster in _of_computing(setup.cluster, machines).items()}
    return found | (_of_reductions(setup) if setup.reduces else _of_links(setup))


def _of_computing(cluster: Cluster, machines: MachineSummary) -> dict[str, Cluster]:
    found: dict[str, Cluster] = {}
    if machines.slow:
        found[f"the slow {format_learners(machines.slow, most=4)}"] = machines.as_fast(cluster, machines.slow)
    elif max(machines.mean_s) > SLOWER * min(machines.mean_s):
        slower = [one for one, mean in enumerate(machines.mean_s) if mean > machines.typical_s]
        found["unequal speeds of the learners"] = machines.as_fast(cluster, slower)
    if machines.spread > 0.005:
        cores = cluster.cores and replace(cluster.cores, law=_always([cluster.cores.law.mean_s]))
        found[SCATTER] = replace(cluster, law=_even(cluster), cores=cores)
    if cluster.slow is not None:
        found["slow periods"] = replace(cluster, slow=None)
    if cluster.failures is not None:
        found["failures"] = replace(cluster, failures=None)
    if cluster.cores is not None and cluster.cores.count < cluster.learners:
        found["sharing the cores"] = replace(cluster, cores=replace(cluster.cores, count=float(cluster.learners)))
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


def _of_links(setup: Setup) -> dict[str, Setup]:
    cluster, wires = setup.cluster, setup.cluster.wires
    if wires is None:
        return {}
    free: dict[str, dict[str, float | None]] = {}
    if wires.hosts is not None:  # the bandwidths beside count for nothing then
        free[HOST_LINKS] = {"size_bytes": 0, "hosts": None}
    at_server = bool(wires.size_bytes) and wires.server_bytes_per_s < math.inf
    at_learners = bool(wires.size_bytes) and min(map(wires.cap, range(cluster.learners))) < math.inf
    if at_server:
        free[SERVER_LINK] = {"server_bytes_per_s": math.inf}
    if at_learners:
        free[LEARNER_LINKS] = {"learner_bytes_per_s": math.inf}
    if at_server and at_learners:
        free[LINKS] = free[SERVER_LINK] | free[LEARNER_LINKS]
    if wires.latency_s:
        free[LATENCY] = {"latency_s": 0.0}
    return {
        name: replace(setup, cluster=replace(cluster, wires=replace(wires, **changes)))  # type: ignore[arg-type]  # as declared
        for name, changes in free.items()
    }


def _of_reductions(setup: Setup) -> dict[str, Setup]:
    """Latency is what a reduction of nothing takes; the rest is bandwidth."""
    reduction_s = setup.reduction_s()
    latency_s = reduction_s(0)
    if setup.reduce_s is not None:
        return {REDUCTION: replace(setup, reduce_s=lambda size: 0.0)} if latency_s else {}
    assert setup.model is not None
    found = {}
    if latency_s:
        found[LATENCY] = replace(setup, reduce_s=lambda size: reduction_s(size) - latency_s)
    if sum(setup.model.size_bytes):
        found[BANDWIDTH] = replace(setup, reduce_s=lambda size: latency_s)
    return found


# --- what could be done about slow learners -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A strategy on the cluster as it is, and on others in which its slow learners are different.

    All in minibatches a second; a part of a minibatch counts as that part.
    """

    strategy: str
    slow: tuple[int, ...]
    slower: float  # the slowest of them, than the typical learner
    as_it_is: float
    as_fast: float  # if they were as fast as the typical learner
    as_fast_ideal: float  # and nobody ever waited
    without: float | None  # if they were dropped; None if nobody else is there
    lighter: float  # if each got work in proportion to its speed
    shares: tuple[float, ...]  # of a full minibatch, that is

    @property
    def share_of_loss(self) -> float:
        """The part of what the strategy loses that the slow learners cause."""
        return (self.as_fast - self.as_it_is) / (self.as_fast_ideal - self.as_it_is)

    @property
    def advice(self) -> list[str]:
        """What the slow learners cost, and what could be done, in words."""

        def gain(rate: float) -> str:
            return f"{rate:.2f} minibatches/s ({rate / self.as_it_is - 1:+.0%})"

        one = len(self.slow) == 1
        slower = f"now {self.slower:.1f}x slower" if one else f"now up to {self.slower:.1f}x slower"
        least, most = min(self.shares), max(self.shares)
        work = f"{least:.2f}" if least == most else f"{least:.2f} to {most:.2f}"
        without = f"without {'it' if one else 'them'}: {gain(self.without)}; " if self.without is not None else ""
        names, causes = format_learners(self.slow, most=4), "causes" if one else "cause"
        return [
            f"{self.strategy} applies the gradients of {self.as_it_is:.2f} minibatches/s. If {names} ({slower}) "
            f"were as fast as the others, it would be {self.as_fast:.2f} minibatches/s; if in addition no "
            f"learner ever waited, {self.as_fast_ideal:.2f}. So {names} {causes} "
            f"{percent(self.share_of_loss, 0)} of the lost throughput",
            f"{without}with minibatches of {work}x the size for {'it' if one else 'them'}: {gain(self.lighter)}",
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy,
            "learners": list(self.slow),
            "times_slower": self.slower,
            "minibatches_per_s": self.as_it_is,
            "if_as_fast": self.as_fast,
            "if_dropped": self.without,
            "if_given_less": self.lighter,
            "shares_of_work": list(self.shares),
            "share_of_loss": self.share_of_loss,
            "text": self.advice,
        }


def what_if(strategy: str, cluster: Cluster, machines: MachineSummary, minibatches: int | None = None) -> WhatIf:
    """Run the strategy with the slow learners as fast as the others, without them, and with less work for them."""
    slower = {learner: machines.mean_s[learner] / machines.typical_s for learner in machines.slow}
    # Work in proportion to speed: samples in hundredths of a minibatch, and the time in proportion to them.
    samples = [max(1, round(100 / slower.get(learner, 1.0))) for learner in range(cluster.learners)]
    lighter = [speed * 100 / part for speed, part in zip(cluster.all_speeds, samples, strict=True)]
    rest = cluster.without(*slower)

    def rate(machine: Cluster) -> float:
        setup = Setup(strategy=strategy, cluster=machine)
        return setup.run(setup.updates_for(minibatches)).samples_per_s

    return WhatIf(
        strategy=strategy,
        slow=machines.slow,
        slower=max(slower.values()),
        as_it_is=rate(cluster),
        as_fast=rate(machines.as_fast(cluster, machines.slow)),
        as_fast_ideal=min(
            sum(slower.get(learner, 1.0) / mean for learner, mean in enumerate(machines.mean_s)),
            math.inf if cluster.cores is None else cluster.cores.count / cluster.cores.law.mean_s,
        ),
        without=rate(rest) if _fits(strategy, rest.learners) else None,
        lighter=rate(replace(cluster, speeds=tuple(lighter), samples=tuple(samples))) / 100,
        shares=tuple(samples[learner] / 100 for learner in machines.slow),
    )


def what_helps(found: Sequence[Diagnosis], machines: MachineSummary, minibatches: int | None) -> WhatIf | None:
    """What could be done about slow learners under a server, where something can be gained by it."""
    subject = typical_of([one for one in found if not one.setup.reduces])
    if subject is None or not machines.slow:
        return None
    gains = what_if(subject.strategy, subject.setup.cluster, machines, minibatches)
    return gains if gains.as_fast > _WORTH_TELLING * gains.as_it_is else None


def _fits(strategy: str, learners: int) -> bool:
    """Whether a strategy can run on so few: k-sync:4 cannot on 3."""
    try:
        create(paced_as(strategy), expect=learners)
    except RequestError:
        return False
    return True
