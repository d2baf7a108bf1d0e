"""Strategies side by side on one cluster with the same draws, and what lies behind the differences.

It does not name a winner: which is best needs accuracy, and accuracy needs training.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from offbeat.errors import RequestError
from offbeat.number_format import whole_percent as percent
from offbeat.policies import create
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.result import Result
from offbeat.simulate.setup import Setup
from offbeat.strategy import ALL_REDUCE, simulated_family_of

_MOST_SAMPLES, _ALL_SAMPLES = 2000, 400_000  # draws of each learner that are looked at, and of all together
_WINDOWS = 8  # in each of which a persistently slow learner is slow
SLOWER = 1.3  # than the median, in the mean, to be called persistently slow


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSummary:
    """What the draws say of the learners: their mean compute times, the slow ones, the spread of the rest."""

    mean_s: tuple[float, ...]  # of each learner
    slow: tuple[int, ...]  # persistently slow, slowest first
    spread: float  # standard deviation / mean of one learner's times, the median over learners
    slowest_of_all: float  # mean of the slowest of all learners' draws / mean of all draws


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
    typical = typical_s(means)
    part = samples // _WINDOWS

    def always_slow(times: list[float]) -> bool:
        """By medians, since a heavy tail moves a mean, and in every part of the time, since periods pass."""
        parts = (times[first : first + part] for first in range(0, part * _WINDOWS, part))
        return all(statistics.median(some) > SLOWER * middle for some in parts)

    slow = [one for one, times in enumerate(drawn) if means[one] > SLOWER * typical and always_slow(times)]
    evened = [[time / mean for time in times] for times, mean in zip(drawn, means, strict=True)]
    return MachineSummary(
        mean_s=tuple(means),
        slow=tuple(sorted(slow, key=lambda learner: -means[learner])),
        spread=statistics.median(statistics.pstdev(times) for times in evened),
        slowest_of_all=statistics.fmean(max(column) for column in zip(*drawn, strict=True)) / statistics.fmean(means),
    )


def typical_s(means: Sequence[float]) -> float:
    """The mean time that a learner has if it is not slow: of two equal halves, that of the faster one."""
    return statistics.median_low(means)


def describe(machines: MachineSummary) -> str:
    """The cluster in a sentence."""
    typical = typical_s(machines.mean_s)
    if len(machines.mean_s) == 1:
        return "one learner: nobody to wait for"
    if machines.slow:
        names = ", ".join(f"learner {one} ({machines.mean_s[one] / typical:.1f}x)" for one in machines.slow[:4])
        more = f" and {len(machines.slow) - 4} more" if len(machines.slow) > 4 else ""
        whom = "it" if len(machines.slow) == 1 else "them"
        return f"persistently slow: {names}{more}; a barrier waits for {whom} every time"
    ratio = max(machines.mean_s) / min(machines.mean_s)
    if ratio > SLOWER and machines.spread <= 0.5:
        return (
            f"unequal learners (the slowest takes {ratio:.1f}x the time of the fastest): the slowest of all takes "
            f"{machines.slowest_of_all:.2f}x the mean, and a barrier makes everybody wait for it"
        )
    if machines.spread > 0.5:
        return (
            f"no learner is persistently slow, but times scatter (standard deviation {machines.spread:.1f}x the mean): "
            f"the slowest of all takes {machines.slowest_of_all:.1f}x the mean, another one each time"
        )
    return (
        f"equal learners (standard deviation {machines.spread:.2f}x the mean): the slowest of all takes "
        f"{machines.slowest_of_all:.2f}x the mean, so a barrier adds little to computing"
    )


def why(result: Result) -> str:
    """One line on where a strategy's time went and what its gradients were worth."""
    if simulated_family_of(result.strategy) == ALL_REDUCE:
        return _all_reduce(result)
    return create(result.strategy, expect=result.learners).explain(result)


def _all_reduce(result: Result) -> str:
    sent = f", {percent(result.send_share)} in reductions not hidden" if result.send_share > 0.005 else ""
    return f"everybody waits for the slowest: {percent(result.wait_share)} of the time{sent}; staleness 0"


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


def what_if(strategy: str, cluster: Cluster, machines: MachineSummary, minibatches: int | None = None) -> WhatIf:
    """Run the strategy with the slow learners as fast as the others, without them, and with less work for them."""
    typical = typical_s(machines.mean_s)
    slower = {learner: machines.mean_s[learner] / typical for learner in machines.slow}
    speeds = [*cluster.speeds, *[1.0] * (cluster.learners - len(cluster.speeds))]
    faster = [speed * slower.get(learner, 1.0) for learner, speed in enumerate(speeds)]
    # Work in proportion to speed: samples in hundredths of a minibatch, and the time in proportion to them.
    samples = [max(1, round(100 / slower.get(learner, 1.0))) for learner in range(cluster.learners)]
    lighter = [speed * 100 / part for speed, part in zip(speeds, samples, strict=True)]
    rest = cluster
    for learner in sorted(slower, reverse=True):
        rest = rest.without(learner) if rest.learners > 1 else rest

    def rate(machine: Cluster) -> float:
        setup = Setup(strategy=strategy, cluster=machine)
        return setup.run(setup.updates_for(minibatches)).samples_per_s

    others = cluster.learners - len(slower)
    return WhatIf(
        strategy=strategy,
        slow=machines.slow,
        slower=max(slower.values()),
        as_it_is=rate(cluster),
        as_fast=rate(replace(cluster, speeds=tuple(faster))),
        as_fast_ideal=min(
            sum(slower.get(learner, 1.0) / mean for learner, mean in enumerate(machines.mean_s)),
            math.inf if cluster.cores is None else cluster.cores.count / cluster.cores.law.mean_s,
        ),
        without=rate(rest) if others and _fits(strategy, others) else None,
        lighter=rate(replace(cluster, speeds=tuple(lighter), samples=tuple(samples))) / 100,
        shares=tuple(samples[learner] / 100 for learner in machines.slow),
    )


def _fits(strategy: str, learners: int) -> bool:
    """Whether a strategy can run on so few: k-sync:4 cannot on 3."""
    try:
        create(strategy, expect=learners)
    except RequestError:
        return False
    return True


def advise(found: WhatIf) -> list[str]:
    """What the slow learners cost, and what could be done, in words."""

    def gain(rate: float) -> str:
        return f"{rate:.2f} minibatches/s ({rate / found.as_it_is - 1:+.0%})"

    one = len(found.slow) == 1
    shown = ", ".join(map(str, found.slow[:4])) + (", ..." if len(found.slow) > 4 else "")
    who = f"learner {shown}" if one else f"learners {shown}"
    slower = f"now {found.slower:.1f}x slower" if one else f"now up to {found.slower:.1f}x slower"
    least, most = min(found.shares), max(found.shares)
    work = f"{least:.2f}" if least == most else f"{least:.2f} to {most:.2f}"
    without = f"without {'it' if one else 'them'}: {gain(found.without)}; " if found.without is not None else ""
    whose = "that learner's" if one else "those learners'"
    return [
        f"{found.strategy} applies {found.as_it_is:.2f} minibatches/s; with {who} ({slower}) like the others it would "
        f"apply {found.as_fast:.2f}, and {found.as_fast_ideal:.2f} if nobody ever waited: "
        f"{percent(found.share_of_loss)} of the loss is {whose}",
        f"{without}with {work} of the work for {'it' if one else 'each'}: {gain(found.lighter)}",
    ]
