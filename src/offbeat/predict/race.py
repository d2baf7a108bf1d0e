"""Strategies on a race to an accuracy: who is first, by how much, why, and what to do.

Time to the target is what it takes to get there in samples, divided by the samples applied a second: a strategy may be
faster and need more of them. Both are told. A target is reached when it is held (`metrics.reached_at`). A race is run
several times (seeds): its time is the median, and two whose times overlap are not told apart unless their medians are
far from each other; then the simpler one is advised, an all-reduce before everything else.

Where a learner is persistently slow, an all-reduce that gives it less to do, and everybody without it, are in the race
too. This file knows nothing of how the curves were computed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from offbeat.errors import RequestError
from offbeat.number_format import format_seconds, percent
from offbeat.policies import create
from offbeat.runs.metrics import Score, format_accuracy, ranking
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.setup import Network
from offbeat.spec import format_learners
from offbeat.strategy import ALL_REDUCE, family_of, line_up, paced_as, simulated_family_of

ALIKE = 1.05  # medians this close are not told apart
FAR = 1.15  # medians beyond this are, even if the times of some seeds overlap
PARTS = 40  # of the time, in a picture
SEEN = 3  # times the fastest one's time: what comes later is not in the picture, or the fast ones would not be
WIDE = 5  # times as many bytes as another strategy sends: then the axis of bytes is logarithmic
DRAWN = 6  # lines in the picture, at most: more cannot be told from each other


class Contender(NamedTuple):
    """A strategy in the race, and its machines."""

    strategy: str
    cluster: Cluster
    variant: str = ""  # "without learner 3", "split by speed"
    option: str = ""  # what to write for it beside --sync, like --train.split auto
    split: str = ""  # of an update's samples, where it is not the recipe's

    @property
    def label(self) -> str:
        return f"{self.strategy}, {self.variant}" if self.variant else self.strategy


def usual_strategies(cluster: Cluster) -> list[str]:
    """Some of each kind that can run on the cluster: an all-reduce bears no failures."""
    names = line_up("race", cluster.learners)
    return [name for name in names if cluster.failures is None or simulated_family_of(name) != ALL_REDUCE]


def variants(contenders: Sequence[Contender], slow: Sequence[int]) -> list[Contender]:
    """What could be done about learners that are always slow: give them less, or do without them."""
    if not slow or not contenders:
        return []
    cluster = contenders[0].cluster
    names = [one.strategy for one in contenders]
    reduces = next((name for name in names if simulated_family_of(name) == ALL_REDUCE), "ring")
    rest = cluster.without(*slow)
    without, option = f"without {format_learners(sorted(slow), most=4)}", f"remove it: --learners {rest.learners}"
    return [
        Contender(reduces, cluster, "split by speed", "--train.split auto", "auto"),
        *(Contender(name, rest, without, option) for name in dict.fromkeys([reduces, *names])),
    ]


def check_ports(network: Network, strategies: Sequence[str]) -> None:
    """`RequestError` where it is said how some of them communicate, and not how the others do."""
    families = {simulated_family_of(name) for name in strategies}
    if len(families) > 1 and network.topology != "uniform" and not network.has_ports:
        raise RequestError(
            "--topology applies to all-reduces only, and the servers have no network: give "
            "--learner-bandwidth, --server-bandwidth and --latency too, or one port for all with --network"
        )


class TrainingCurve(NamedTuple):
    """One run: accuracy against seconds, and what it took."""

    seed: int
    points: tuple[tuple[float, float], ...]  # (seconds, accuracy)
    reached_s: float | None
    reached_updates: int | None
    reached_samples: int | None
    accuracy: float | None  # at the end
    test_samples: int | None  # of which it is a share
    best: float | None  # the highest that was reached
    seconds: float
    updates: int
    samples: int
    staleness: float
    waste_share: float
    wait_share: float
    warning: str = ""  # that it does not learn
    sent_bytes: tuple[int, ...] = ()  # by learners and servers together, up to each of the points
    reached_bytes: int | None = None

    def against_bytes(self) -> TrainingCurve:
        """The same with megabytes sent in the place of seconds."""
        points = [(sent / 1e6, right) for sent, (_, right) in zip(self.sent_bytes, self.points, strict=True)]
        reached = None if self.reached_bytes is None else self.reached_bytes / 1e6
        return self._replace(points=tuple(points), reached_s=reached)


def checked(curve: TrainingCurve, name: str, target: float) -> TrainingCurve:
    """`RequestError` where there is nothing to race for."""
    if not curve.points:
        raise RequestError(f"{name} has a loss but no accuracy, so --target cannot be used")
    if curve.reached_s == 0:
        raise RequestError(f"--target {target:g}: an untrained model already reaches it")
    return curve


class RaceResult(NamedTuple):
    """A contender with a curve for each seed."""

    contender: Contender
    curves: tuple[TrainingCurve, ...]

    @property
    def strategy(self) -> str:
        return self.contender.strategy

    @property
    def variant(self) -> str:
        return self.contender.variant

    @property
    def label(self) -> str:
        return self.contender.label

    @property
    def times(self) -> tuple[float, ...]:
        """To the target, sorted; those that did not get there are infinite."""
        return tuple(sorted(math.inf if one.reached_s is None else one.reached_s for one in self.curves))

    @property
    def middle(self) -> TrainingCurve:
        """The run that has the median time; of two in the middle, the slower one."""
        order = sorted(self.curves, key=lambda one: (one.reached_s is None, one.reached_s or 0.0, one.seed))
        return order[len(order) // 2]

    @property
    def median_s(self) -> float:
        return math.inf if self.middle.reached_s is None else self.middle.reached_s

    @property
    def median_updates(self) -> int | None:
        """To the target; None: most did not get there."""
        updates = [one.reached_updates for one in self.curves if one.reached_updates is not None]
        return sorted(updates)[len(self.curves) // 2] if len(self.curves) // 2 < len(updates) else None

    @property
    def bytes_needed(self) -> int | None:
        """To the target, by learners and servers; None: it did not get there."""
        return self.middle.reached_bytes

    @property
    def samples_needed(self) -> float:
        return math.inf if self.middle.reached_samples is None else self.middle.reached_samples

    @property
    def samples_per_s(self) -> float:
        """Up to the target, in the run of the median time; to the end if it did not get there."""
        one = self.middle
        samples, seconds = one.reached_samples, one.reached_s
        if not samples or not seconds:
            samples, seconds = one.samples, one.seconds
        return samples / seconds if seconds else 0.0

    @property
    def accuracy(self) -> float:
        """At the end; the median."""
        return statistics.median(one.accuracy or 0.0 for one in self.curves)

    @property
    def test_samples(self) -> int | None:
        return self.curves[0].test_samples

    @property
    def accuracy_text(self) -> str:
        """The accuracy at the end, with its interval."""
        return format_accuracy(self.accuracy, self.test_samples)

    @property
    def staleness(self) -> float:
        return statistics.median(one.staleness for one in self.curves)

    @property
    def wait_share(self) -> float:
        return statistics.median(one.wait_share for one in self.curves)

    @property
    def waste_share(self) -> float:
        return statistics.median(one.waste_share for one in self.curves)

    def as_json(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy,
            "variant": self.variant,
            "seconds_to_target": None if self.median_s == math.inf else self.median_s,
            "bytes_to_target": self.bytes_needed,
            "samples_per_s": self.samples_per_s,
            "accuracy": self.accuracy,
            "test_samples": self.test_samples,
            "staleness_mean": self.staleness,
            "wait_share": self.wait_share,
            "waste_share": self.waste_share,
            "runs": [curve._asdict() for curve in self.curves],
        }


def run_race(
    contenders: Sequence[Contender], seeds: Sequence[int], train: Callable[[Contender, int, str], TrainingCurve]
) -> list[RaceResult]:
    """Train each with every seed. `train` is told which of how many it is."""
    return [
        RaceResult(one, tuple(train(one, seed, f"{at} of {len(contenders)}") for seed in seeds))
        for at, one in enumerate(contenders, start=1)
    ]


def ranked(results: Sequence[RaceResult]) -> list[RaceResult]:
    """The fastest first; those that did not get there by where they ended, as far as that can be told apart."""
    there = sorted((one for one in results if one.median_s < math.inf), key=lambda one: one.median_s)
    return [*there, *(one for tied in not_there(results) for one in tied)]


def by_bytes(order: Sequence[RaceResult]) -> list[RaceResult]:
    """For a picture: those that sent the fewest bytes to the target first; the others as they are."""
    return sorted(order, key=lambda one: math.inf if one.bytes_needed is None else one.bytes_needed)


def not_there(results: Sequence[RaceResult]) -> list[list[RaceResult]]:
    """Those that did not reach the target, the best accuracies at the end first: groups that are tied, by time."""
    rest = [one for one in results if one.median_s == math.inf]
    scores = [Score(one.accuracy, one.test_samples, statistics.median(c.seconds for c in one.curves)) for one in rest]
    return [[rest[at] for at in tied] for tied in ranking(scores)]


def advised(results: Sequence[RaceResult]) -> RaceResult | None:
    """Whom to take: the simplest of those that cannot be told from the fastest. None: nobody got there."""
    order = ranked(results)
    if order[0].median_s == math.inf:
        return None
    alike = [one for one in order if _are_alike(order[0], one)]
    return min(alike, key=lambda one: (_complexity(one), order.index(one)))


def _are_alike(fast: RaceResult, slow: RaceResult) -> bool:
    """Whether these seeds cannot tell which of the two is faster."""
    if slow.median_s == fast.median_s:
        return True
    ratio = (
        slow.median_s / fast.median_s if fast.median_s else math.inf
    )  # infinite where the slow one did not get there
    return ratio <= ALIKE or (ratio <= FAR and _overlap(fast, slow))


def _overlap(fast: RaceResult, slow: RaceResult) -> bool:
    """Whether some seeds say otherwise than the medians; one seed has no spread, and may."""
    return slow.times[0] <= fast.times[-1] or len(fast.times) == len(slow.times) == 1


def _complexity(result: RaceResult) -> int:
    """An all-reduce, a server that waits for all, or any other policy; each as it is, or on other machines."""
    kind = 0
    if family_of(result.strategy) != ALL_REDUCE:
        learners = result.contender.cluster.learners
        policy = create(paced_as(result.strategy), expect=learners)
        kind = 1 if policy.waits_for_all(learners) and not policy.rule.delta else 2
    return 2 * kind + bool(result.variant)


def _kind(result: RaceResult) -> str:
    """All-reduce, a server that keeps everybody in step, or one that takes old gradients."""
    if family_of(result.strategy) == ALL_REDUCE:
        return ALL_REDUCE
    return "stale" if result.staleness > 0.005 else "in step"


def explain_result(result: RaceResult) -> str:
    """How its time came about, in one line."""
    parts = [f"{result.samples_per_s:,.4g} samples/s"]
    if result.median_s < math.inf:
        parts.append(f"{result.samples_needed:,.0f} samples to the target")
    if result.staleness > 0.005:
        parts.append(f"gradients {result.staleness:.1f} versions old")
    if result.wait_share > 0.005:
        parts.append(f"{percent(result.wait_share, 0)} of the time waiting")
    if result.waste_share > 0.005:
        parts.append(f"{percent(result.waste_share, 0)} thrown away")
    if all(curve.warning for curve in result.curves):
        parts.append(result.curves[0].warning)
    return ", ".join(parts)


def advice(results: Sequence[RaceResult], target: float, machines: str) -> list[str]:
    """What to do, and why, in a few lines. `machines` says what the learners are like."""
    chosen = advised(results)
    order = ranked(results)
    if chosen is None:
        tied = not_there(results)[0]
        best = max(tied, key=lambda one: one.accuracy)
        others = [one.label for one in tied if one is not best]
        return [
            f"no strategy reached {percent(target)}; the best final accuracy is {best.accuracy_text}, with "
            f"{best.label}",
            *([f"the same within chance on {best.test_samples:,} test samples: {', '.join(others)}"] if others else []),
            "try more epochs (--epochs), another learning rate (--lr) or a lower --target",
        ]
    plain = family_of(chosen.strategy) == ALL_REDUCE and not chosen.variant
    line = f"use {'plain ' if plain else ''}{chosen.label}: {percent(target)} after "
    line += f"{format_seconds(chosen.median_s)}{_spread(chosen)} ({explain_result(chosen)})"
    lines, option = [line], chosen.contender.option
    if option:
        lines.append(f"use {option}" if option.startswith("--") else option)
    lines += [_against(chosen, other) for other in _worth_telling(chosen, order)]
    lines.append(f"the machines: {machines}")
    return lines


def _worth_telling(chosen: RaceResult, order: Sequence[RaceResult]) -> list[RaceResult]:
    """Whom to compare it with: the best of the others, the best of another kind, and an all-reduce as it is."""
    others = [one for one in order if one is not chosen]
    firsts = [
        others[:1],
        [one for one in others if _kind(one) != _kind(chosen)][:1],
        [one for one in others if _kind(one) == ALL_REDUCE and not one.variant][:1],
    ]
    told = [some[0] for some in firsts if some]
    return [one for at, one in enumerate(told) if not any(one is earlier for earlier in told[:at])]


def _spread(result: RaceResult) -> str:
    """From the fastest run to the slowest."""
    if len(result.times) == 1:
        return ""
    if result.times[-1] == math.inf:
        missing = sum(one == math.inf for one in result.times)
        return f", {missing} of {len(result.times)} seeds did not reach it"
    return f", seeds from {format_seconds(result.times[0])} to {format_seconds(result.times[-1])}"


def _against(one: RaceResult, other: RaceResult) -> str:
    """Why one is faster than another, or as fast and simpler."""
    if other.median_s == math.inf:
        return f"{other.label} did not reach the target: it ended at {other.accuracy_text}"
    time = format_seconds(other.median_s)
    if other.median_s < one.median_s:
        ratio = one.median_s / other.median_s
        return f"{other.label} was {ratio:.2f}x as fast ({time}), but {_doubt(other, one)}, so use the simpler one"
    ratio = other.median_s / one.median_s
    if ratio < 1.005:
        return f"{other.label} was as fast ({time})"
    more = one.samples_per_s / other.samples_per_s
    needs = one.samples_needed / other.samples_needed
    doubt = f"; {_doubt(one, other)}" if _are_alike(one, other) else ""
    return (
        f"{ratio:.2f}x as fast as {other.label} ({time}): "
        f"{more:.2f}x the samples per second, {needs:.2f}x the samples to reach the target{doubt}"
    )


def _doubt(fast: RaceResult, slow: RaceResult) -> str:
    """Why two are not told apart."""
    if len(fast.times) == 1:
        return "one seed is not enough to decide (use --seeds 3 or more)"
    return (
        "the difference is within the spread of the seeds"
        if _overlap(fast, slow)
        else "the difference is too small to decide"
    )


def worth_drawing(order: Sequence[RaceResult]) -> list[RaceResult]:
    """The first ones, as many as can be told from each other; the first plain all-reduce is among them."""
    plain = [one for one in order if _kind(one) == ALL_REDUCE and not one.variant][:1]
    if len(order) <= DRAWN or not plain or order.index(plain[0]) < DRAWN:
        return list(order[:DRAWN])
    return [*order[: DRAWN - 1], *plain]


def race_chart(order: Sequence[RaceResult], *, title: str, target: float, by_bytes: bool = False) -> str:
    """The picture of a race: error against time, or against what was sent."""
    seeds, shown = len(order[0].curves), worth_drawing(order)
    subtitle = f"{seeds} seeds thin, median bold, dots: target reached" if seeds > 1 else "dots: target reached"
    if len(shown) < len(order):
        subtitle = f"{len(shown)} of {len(order)}, {subtitle}"
    lines = [(one.label, one.curves) for one in shown]
    return chart_of(lines, title=title, target=target, subtitle=subtitle, by_bytes=by_bytes)


def chart_of(
    lines: Sequence[tuple[str, Sequence[TrainingCurve]]],
    *,
    title: str,
    target: float | None,
    subtitle: str = "",
    by_bytes: bool = False,
) -> str:
    """Error against simulated time, or what was sent, as an SVG. Where evaluations are close, points are means."""
    if by_bytes:
        lines = [(label, [curve.against_bytes() for curve in curves]) for label, curves in lines]
    notes = [subtitle] if subtitle else []
    marks = {label: _mark(curves, target) for label, curves in lines}
    reached = [mark[0] for mark in marks.values() if mark is not None]
    longest = max(curve.points[-1][0] for _, curves in lines for curve in curves if curve.points)
    ends = [curve.points[-1][0] for _, curves in lines for curve in curves if curve.points and curve.points[-1][0]]
    log_x = by_bytes and max(ends, default=0.0) > WIDE * min(ends, default=0.0)
    cuts = reached and len(lines) > 1 and not log_x
    x_max = min(longest, 1.3 * max(reached), SEEN * min(reached)) if cuts else longest
    if x_max < longest:
        first = "smallest" if by_bytes else "fastest"
        notes.append(f"cut at {SEEN}x the {first}" if x_max < max(reached) else "cut after the last dot")
    part = x_max / PARTS
    runs = {
        label: tuple(tuple((at, 1 - right) for at, right in curve.points) for curve in curves if curve.points)
        for label, curves in lines
    }
    if not log_x and any(sum(0 < at <= x_max for at, _ in run) > PARTS // 2 for some in runs.values() for run in some):
        runs = {label: tuple(_evened(run, part) for run in some) for label, some in runs.items()}
        notes.append(f"means of {part:.2g} {'MB' if by_bytes else 's'}")
    from offbeat.charts import Line, line_chart  # only who draws loads them

    return line_chart(
        [Line(label, runs[label], marks[label]) for label, _ in lines],
        title=title,
        subtitle="; ".join(notes),
        x_label="sent by learners and servers, MB" if by_bytes else "simulated time, seconds",
        y_label="test error",
        target=None if target is None else 1 - target,
        target_label="" if target is None else f"target: {percent(target)} right",
        x_max=None if log_x else x_max or None,
        log_x=log_x,
    )


def _mark(curves: Sequence[TrainingCurve], target: float | None) -> tuple[float, float] | None:
    """Where the median run was when it reached the target."""
    times = sorted(math.inf if curve.reached_s is None else curve.reached_s for curve in curves)
    middle = statistics.median_high(times)
    return None if target is None or middle == math.inf else (middle, 1 - target)


def _evened(run: Sequence[tuple[float, float]], part: float) -> tuple[tuple[float, float], ...]:
    """The mean of every part of the time in which there are points; the beginning stays."""
    parts: dict[int, list[float]] = {}
    for at, error in run:
        parts.setdefault(math.ceil(at / part), []).append(error)
    return tuple((max(0.0, (number - 0.5) * part), statistics.fmean(some)) for number, some in sorted(parts.items()))
