"""Strategies side by side on one cluster with the same draws, and what lies behind the differences.

It does not name a winner: which is best needs accuracy, and accuracy needs training.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from offbeat import spec as grammar
from offbeat.simulate import server
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.result import Result

_SAMPLES = 400  # draws of each learner that are looked at
_SLOWER = 1.3  # than the median, in the mean, to be called persistently slow


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """What the draws say of the learners: their mean compute times, the slow ones, the spread of the rest."""

    mean_s: tuple[float, ...]  # of each learner
    slow: tuple[int, ...]  # persistently slow, slowest first
    spread: float  # standard deviation / mean of one learner's times, the median over learners
    slowest_of_all: float  # mean of the slowest of all learners' draws / mean draw, persistent slowness taken out

    @property
    def ideal_per_s(self) -> float:
        """Minibatches a second if everybody always computed."""
        return sum(1 / mean for mean in self.mean_s)


def look_at(cluster: Cluster) -> Machines:
    """Draw from every learner, and tell persistent slowness from chance."""
    draws = cluster.draws()
    drawn = [[draws.take(learner) for _ in range(_SAMPLES)] for learner in range(cluster.learners)]
    means = [statistics.fmean(times) for times in drawn]
    middle = statistics.median(statistics.median(times) for times in drawn)
    typical = statistics.median(means)
    slow = [
        learner
        for learner in range(cluster.learners)
        # In the mean and in the median: a heavy tail moves the mean of a learner that is not slow.
        if means[learner] > _SLOWER * typical and statistics.median(drawn[learner]) > _SLOWER * middle
    ]
    evened = [[time / mean for time in times] for times, mean in zip(drawn, means, strict=True)]
    return Machines(
        mean_s=tuple(means),
        slow=tuple(sorted(slow, key=lambda learner: -means[learner])),
        spread=statistics.median(statistics.pstdev(times) for times in evened),
        slowest_of_all=statistics.fmean(max(column) for column in zip(*evened, strict=True)),
    )


def describe(machines: Machines) -> str:
    """The cluster in a sentence."""
    typical = statistics.median(machines.mean_s)
    if machines.slow:
        names = ", ".join(f"learner {one} ({machines.mean_s[one] / typical:.1f}x)" for one in machines.slow[:4])
        more = f" and {len(machines.slow) - 4} more" if len(machines.slow) > 4 else ""
        return f"persistently slow: {names}{more}; a barrier waits for them every time"
    if machines.spread > 0.5:
        return (
            f"no learner is persistently slow, but times scatter (standard deviation {machines.spread:.1f}x the mean): "
            f"the slowest of all takes {machines.slowest_of_all:.1f}x the mean, another one each time"
        )
    return (
        f"equal learners (standard deviation {machines.spread:.2f}x the mean): the slowest of all takes "
        f"{machines.slowest_of_all:.2f}x the mean, so a barrier costs little"
    )


def why(result: Result) -> str:
    """One line on where a strategy's time went and what its gradients were worth."""
    name = grammar.parse(result.strategy).name
    return _WHY.get(name, _all_reduce)(result)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _all_reduce(result: Result) -> str:
    sent = f", {_percent(result.send_share)} in reductions not hidden" if result.send_share else ""
    return f"everybody waits for the slowest: {_percent(result.wait_share)} of the time{sent}; staleness 0"


def _barrier(result: Result) -> str:
    return f"everybody waits for the slowest: {_percent(result.wait_share)} of the time; no work is lost, staleness 0"


def _k_barrier(result: Result) -> str:
    per_update = (result.cancelled + result.dropped) / result.updates
    return (
        f"does not wait for the slowest; {per_update:.1f} minibatches an update are cancelled, "
        f"{_percent(result.waste_share)} of the time thrown away, {_percent(result.wait_share)} waiting; staleness 0"
    )


def _nobody_waits(result: Result) -> str:
    waits = f"{_percent(result.wait_share)} waiting for weights" if result.wait_share > 0.005 else "nobody waits"
    return f"{waits}; the price is gradients {result.staleness_mean:.2f} versions old on average"


def _some_wait(result: Result) -> str:
    return (
        f"those who have pushed wait for the others of their update: {_percent(result.wait_share)} of the time; "
        f"gradients {result.staleness_mean:.2f} versions old on average"
    )


def _leash(result: Result) -> str:
    return (
        f"those too far ahead wait for the slowest: {_percent(result.wait_share)} of the time; "
        f"gradients {result.staleness_mean:.2f} versions old on average"
    )


def _drops(result: Result) -> str:
    share = result.dropped / max(1, result.dropped + result.applied)
    age = f"{result.staleness_mean:.2f} versions old"
    return f"nobody waits, but {_percent(share)} of the gradients are too old and dropped; the rest {age} on average"


_WHY: dict[str, Callable[[Result], str]] = {
    "full-sync": _barrier,
    "local-sgd": _barrier,
    "k-sync": _k_barrier,
    "k-batch-sync": _k_barrier,
    "async": _nobody_waits,
    "k-batch-async": _nobody_waits,
    "softsync": _nobody_waits,
    "downpour": _nobody_waits,
    "k-async": _some_wait,
    "adaptive-k": _some_wait,
    "ssp": _leash,
    "stale-drop": _drops,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A strategy on the cluster as it is, and on three others; samples a second (the work of a full minibatch is 1)."""

    strategy: str
    learner: int
    slower: float  # than the median
    as_it_is: float
    ideal: float  # everybody always computing
    as_fast: float  # if that learner were as fast as the median
    without: float  # if it were dropped
    lighter: float  # if it got work in proportion to its speed
    share: float  # of a full minibatch, that is

    @property
    def share_of_loss(self) -> float:
        """The part of what the strategy loses that this learner causes."""
        return (self.as_fast - self.as_it_is) / (self.as_fast_ideal - self.as_it_is)

    @property
    def as_fast_ideal(self) -> float:
        """What the learners could do if that one were as fast as the median."""
        return self.ideal + (self.slower - 1) / self.slower * self.typical_per_s

    typical_per_s: float  # minibatches a second of the median learner


def what_if(strategy: str, cluster: Cluster, machines: Machines, seconds: float) -> WhatIf:
    """Run the strategy without the slowest learner, with it as fast as the median, and with less work for it."""
    learner = machines.slow[0]
    typical = statistics.median(machines.mean_s)
    slower = machines.mean_s[learner] / typical
    speeds = [*cluster.speeds, *[1.0] * (cluster.learners - len(cluster.speeds))]
    faster = [speed * slower if one == learner else speed for one, speed in enumerate(speeds)]
    # Work in proportion to speed: shares in hundredths of a minibatch, time in proportion to them.
    whole = 100
    part = max(1, round(whole / slower))
    samples = [part if one == learner else whole for one in range(cluster.learners)]
    lighter = [speed * whole / part if one == learner else speed for one, speed in enumerate(speeds)]

    def rate(machine: Cluster) -> float:
        return server.run(strategy, machine, updates=10**9, until_s=seconds).samples_per_s

    return WhatIf(
        strategy=strategy,
        learner=learner,
        slower=slower,
        as_it_is=rate(cluster),
        ideal=machines.ideal_per_s,
        as_fast=rate(replace(cluster, speeds=tuple(faster))),
        without=rate(cluster.without(learner)),
        lighter=rate(replace(cluster, speeds=tuple(lighter), samples=tuple(samples))) / whole,
        share=part / whole,
        typical_per_s=1 / typical,
    )


def advise(found: WhatIf) -> list[str]:
    """What the slow learner costs, and what could be done, in words."""

    def gain(rate: float) -> str:
        return f"{rate:.2f} minibatches/s ({rate / found.as_it_is - 1:+.0%})"

    return [
        f"{found.strategy} applies {found.as_it_is:.2f} minibatches/s; with learner {found.learner} (now "
        f"{found.slower:.1f}x slower) like the others it would apply {found.as_fast:.2f}, "
        f"and {found.as_fast_ideal:.2f} "
        f"if nobody ever waited: {_percent(found.share_of_loss)} of the loss is that learner's",
        f"without it: {gain(found.without)}; with {found.share:.2f} of the work for it: {gain(found.lighter)}",
    ]


def horizon_s(machines: Machines, minibatches: int) -> float:
    """So long that a typical learner computes so many minibatches."""
    return statistics.median(machines.mean_s) * minibatches


def run_all(strategies: Sequence[str], cluster: Cluster, seconds: float) -> list[Result]:
    """Each server policy on the same machines for the same time."""
    return [server.run(strategy, cluster, updates=10**9, until_s=seconds) for strategy in strategies]
