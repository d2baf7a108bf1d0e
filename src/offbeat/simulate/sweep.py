"""A sweep: strategies at several numbers of learners, or at several values of K, beside the theory of waiting.

Scaling is weak, and the base is one learner alone, which sends nothing: T(1) is its mean compute time. T(P) is the
time in which P minibatches are applied, which under a barrier for all is one iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from offbeat import spec as grammar
from offbeat.errors import RequestError
from offbeat.policies.waiting import ComputeTimes, UpdateTime, of_barrier
from offbeat.runs import metrics
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.compute import LAWS, Law
from offbeat.simulate.engine import Floats
from offbeat.simulate.result import Result
from offbeat.simulate.setup import Setup

if TYPE_CHECKING:
    from offbeat.charts import Line, Run

_GRID = 2**18  # points at which a law without a closed form is summed
_UNITS = ((1.0, "seconds"), (1e-3, "milliseconds"), (1e-6, "microseconds"), (1e-9, "nanoseconds"))


# --- what is known without a simulation: the mean, and the mean of the K-th smallest of P compute times -------------


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


# --- points ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One strategy with one number of learners."""

    line: str  # as it was given, maybe with a range
    setup: Setup
    result: Result
    theory: UpdateTime | None  # of computing alone
    batch: int  # samples in a minibatch

    @property
    def strategy(self) -> str:
        return self.setup.strategy

    @property
    def learners(self) -> int:
        return self.setup.cluster.learners

    @property
    def alone_s(self) -> float:
        """T(1)."""
        return alone_s(self.setup.cluster)

    @property
    def iteration_s(self) -> float:
        """T(P)."""
        return self.learners / self.result.minibatches_per_s

    @property
    def samples_per_s(self) -> float:
        return self.result.minibatches_per_s * self.batch

    @property
    def speedup(self) -> float:
        return metrics.speedup(self.learners, self.alone_s, self.iteration_s)

    @property
    def efficiency(self) -> float:
        return metrics.efficiency(self.alone_s, self.iteration_s)

    @property
    def overhead_s(self) -> float:
        return metrics.overhead_s(self.alone_s, self.iteration_s)

    def as_json(self, epoch_samples: int | None) -> dict[str, object]:
        return {
            "strategy": self.strategy,
            "learners": self.learners,
            "updates": self.result.updates,
            "seconds_per_update": self.result.seconds_per_update,
            "theory_s": None if self.theory is None else self.theory.seconds,
            "formula": None if self.theory is None else self.theory.formula,
            "alone_s": self.alone_s,
            "iteration_s": self.iteration_s,
            "speedup": self.speedup,
            "efficiency": self.efficiency,
            "overhead_s": self.overhead_s,
            "samples_per_s": self.samples_per_s,
            "epoch_s": None if epoch_samples is None else epoch_samples / self.samples_per_s,
            "staleness_mean": self.result.staleness_mean,
        }


def measure(line: str, setup: Setup, *, updates: int | None, batch: int) -> SweepPoint:
    """Simulate one point; a `RequestError` where the mean compute time is infinite: nothing scales from that."""
    if alone_s(setup.cluster) == math.inf:
        raise RequestError(f"T(1) is the mean compute time, and that of '{setup.cluster.law.text}' is infinite")
    return point_of(line, setup, setup.run(updates or setup.updates_for(careful=True)), batch=batch)


def point_of(line: str, setup: Setup, result: Result, *, batch: int) -> SweepPoint:
    return SweepPoint(line=line, setup=setup, result=result, theory=expected_update(setup), batch=batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How many times as long an update of one strategy takes as one of another, with so many learners."""

    strategy: str
    other: str
    learners: int
    ratio: float
    theory: float | None
    p_h_p: float | None  # P H_P, about P log P: that of a barrier for all over updates of one gradient, if X is exp


def ratios(points: Sequence[SweepPoint]) -> list[Ratio]:
    """Of every strategy to the one that was named last, number of learners by number of learners."""
    last = {point.learners: point for point in points if point.strategy == points[-1].strategy}
    found = []
    for point in points:
        other = last.get(point.learners)
        if other is None or other.strategy == point.strategy:
            continue
        both = None if point.theory is None or other.theory is None else point.theory.seconds / other.theory.seconds
        waits = point.setup.waits_for_all and point.setup.minibatches_per_update() == point.learners
        single = other.setup.minibatches_per_update() == 1
        found.append(
            Ratio(
                strategy=point.strategy,
                other=other.strategy,
                learners=point.learners,
                ratio=point.result.seconds_per_update / other.result.seconds_per_update,
                theory=both,
                p_h_p=point.learners * harmonic(point.learners) if waits and single else None,
            )
        )
    return found


# --- the picture ------------------------------------------------------------------------------------------------------


def picture(points: Sequence[SweepPoint], *, title: str) -> str:
    """Seconds per update, beside theory, against the learners or the range; below it the ratio, where there is one."""
    by_learners = len({point.learners for point in points}) > 1
    placed = [(point.strategy if by_learners else point.line, _place(point, by_learners), point) for point in points]
    all_x = sorted({x for _, x, _ in placed if x is not None})
    if not all_x:
        raise RequestError("--svg needs several --learners, or one range like k-sync:1..8")
    from offbeat.charts import Line, line_chart  # only who draws loads them

    largest = max(point.result.seconds_per_update for point in points)
    scale, unit = next(((one, name) for one, name in _UNITS if largest > one), _UNITS[-1])

    def curve(name: str, seconds: Callable[[SweepPoint], float | None]) -> Run:
        """A line without a range is the same all along."""
        return tuple(
            (at, value / scale)
            for own, x, point in placed
            if own == name and (value := seconds(point)) is not None
            for at in (all_x if x is None else [x])
        )

    lines = []
    names = list(dict.fromkeys(name for name, _, _ in placed))
    for name in names:
        theory = curve(name, lambda point: None if point.theory is None else point.theory.seconds)
        simulated = curve(name, lambda point: point.result.seconds_per_update)
        lines.append(_simulated(name, simulated, beside_theory=bool(theory)))
        formula = next((point.theory.formula for own, _, point in placed if own == name and point.theory), "")
        lines += [Line(f"theory {formula}", (theory,))] if theory else []
    x_label = "learners" if by_learners else ", ".join(line for line in names if len(grammar.expand(line)) > 1)
    charts = [line_chart(lines, title=title, x_label=x_label, y_label=f"{unit} per update")]
    compared = ratios(points) if by_learners else []
    if compared:
        charts.append(_ratio_chart(compared))
    return stacked(charts)


def _simulated(label: str, points: Run, *, beside_theory: bool) -> Line:
    """Dots on the line of the theory, or a line of their own where there is none."""
    from offbeat.charts import Line

    return Line(label, tuple((point,) for point in points) if beside_theory else (points,))


def _place(point: SweepPoint, by_learners: bool) -> float | None:
    """Where a point is on the x axis: its learners, or the number of its line's range; None for no range."""
    if by_learners:
        return float(point.learners)
    numbers = grammar.range_of(point.line)
    return None if numbers is None else float(numbers[grammar.expand(point.line).index(point.strategy)])


def _ratio_chart(compared: Sequence[Ratio]) -> str:
    from offbeat.charts import Line, line_chart

    lines = []
    for name in dict.fromkeys(one.strategy for one in compared):
        own = [one for one in compared if one.strategy == name]
        theory = tuple((float(one.learners), one.theory) for one in own if one.theory is not None)
        p_h_p = tuple((float(one.learners), one.p_h_p) for one in own if one.p_h_p is not None)
        simulated = tuple((float(one.learners), one.ratio) for one in own)
        lines.append(_simulated(f"{name} / {own[0].other}", simulated, beside_theory=bool(theory)))
        same = len(theory) == len(p_h_p) and all(
            math.isclose(a, b) for (_, a), (_, b) in zip(theory, p_h_p, strict=True)
        )
        lines += [Line("theory", (theory,))] if theory and not same else []
        lines += [Line("P H_P", (p_h_p,))] if p_h_p else []
    return line_chart(
        lines, title=f"time per update relative to {compared[0].other}", x_label="learners", y_label="ratio"
    )


def stacked(charts: Sequence[str]) -> str:
    """Charts of one width, one below the other, as one SVG."""
    if len(charts) == 1:
        return charts[0]
    sizes = [
        [int(chart.split(f' {side}="', 1)[1].split('"', 1)[0]) for side in ("width", "height")] for chart in charts
    ]
    width, height = sizes[0][0], sum(size[1] for size in sizes)
    placed = [
        chart.replace("<svg ", f'<svg y="{sum(size[1] for size in sizes[:at])}" ', 1) for at, chart in enumerate(charts)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">\n'
        f"{''.join(placed)}</svg>\n"
    )
