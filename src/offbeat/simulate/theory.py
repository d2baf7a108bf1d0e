"""What is known of compute times without a simulation: the mean, and the mean of the K-th smallest of P."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from offbeat import spec as grammar
from offbeat.policies.waiting import ComputeTimes, UpdateTime, of_barrier
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.compute import LAWS, Law
from offbeat.simulate.engine import Floats
from offbeat.simulate.setup import Setup

_GRID = 2**18  # points at which a law without a closed form is summed


def harmonic(n: int) -> float:
    """H_n = 1 + 1/2 + ... + 1/n."""
    return sum(1 / i for i in range(1, n + 1))


def _exponential(mean: float, k: int, p: int) -> float:
    return mean * (harmonic(p) - harmonic(p - k))


def _pareto(shape: float, scale: float, k: int, p: int) -> float:
    rest = p - k + 1 - 1 / shape
    if rest <= 0:
        return math.inf
    log = math.lgamma
    return scale * math.exp(log(p + 1) + log(rest) - log(p - k + 1) - log(p + 1 - 1 / shape))


_CLOSED: dict[str, Callable[..., float]] = {
    "constant": lambda k, p, value: value,
    "uniform": lambda k, p, low, high: low + (high - low) * k / (p + 1),
    "exp": lambda k, p, mean: _exponential(mean, k, p),
    "shifted-exp": lambda k, p, shift, mean: shift + _exponential(mean, k, p),
    "pareto": lambda k, p, shape, scale: _pareto(shape, scale, k, p),
}


@dataclass(frozen=True, kw_only=True)
class Times(ComputeTimes):
    """A law as the theory of waiting asks for it."""

    law: Law

    def kth_s(self, k: int, learners: int) -> float:
        """By the closed form; else from the law's quantiles, to about a third of a percent."""
        spec = grammar.parse(self.law.text)
        closed = _CLOSED.get(spec.name)
        if closed is not None:
            return float(closed(k, learners, **grammar.bind(spec, LAWS[spec.name][1])))
        at = (np.arange(_GRID) + 0.5) / _GRID
        log = math.lgamma
        scale = log(learners + 1) - log(k) - log(learners - k + 1)
        density = np.exp(scale + (k - 1) * np.log(at) + (learners - k) * np.log1p(-at))  # of the K-th of P uniforms
        return float(np.mean(_quantiles(self.law) * density))


def times_of(law: Law) -> Times:
    return Times(law=law, mean_s=law.mean_s, is_memoryless=grammar.parse(law.text).name == "exp")


@cache
def _quantiles(law: Law) -> Floats:
    """The law at evenly spaced chances, sorted. What a law takes from more than one chance is drawn, from one seed."""
    chance = np.random.default_rng(0)
    given = {0: (np.arange(_GRID) + 0.5) / _GRID}

    def of(purpose: int) -> Floats:
        if purpose not in given:
            given[purpose] = chance.permutation(given[0])
        return given[purpose]

    found: Floats = np.sort(law.sample(of))
    return found


def alone_s(cluster: Cluster) -> float:
    """T(1): the mean compute time of one learner of speed 1 that is never down and sends nothing."""
    slow = cluster.slow
    share = 0.0 if slow is None or not slow.enter else slow.enter / (slow.enter + slow.leave)
    factor = 1.0 if slow is None else 1 + (slow.factor - 1) * share
    return cluster.law.mean_s * factor + (0.0 if cluster.cores is None else cluster.cores.law.mean_s)


def expected_update(setup: Setup) -> UpdateTime | None:
    """Seconds per update by computing alone; None where learners are not alike, or no theory is known."""
    cluster = setup.cluster
    alike = (
        not any(speed != 1 for speed in cluster.speeds) and cluster.law.by_learner is None and cluster.law.at is None
    )
    if not alike or cluster.slow is not None or cluster.failures is not None or cluster.cores is not None:
        return None
    times = times_of(cluster.law)
    if setup.reduces:
        found: UpdateTime | None = of_barrier(cluster.learners, cluster.learners, times)
    else:
        found = setup.policy().expected_update(cluster.learners, times)
    return found if found is not None and math.isfinite(found.seconds) else None
