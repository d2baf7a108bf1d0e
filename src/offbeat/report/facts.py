"""From what a run has left to what it was like: every number of a report, defined once.

Laws. Pure functions of a `RunRecord`. What cannot be known is None, never a guess. Updates, seconds and samples are of
one source: the last evaluation, or, where there is none, the log. Shares are of what a learner's spans account for,
evaluation left out. Where `offbeat.metrics` has a definition, its function is used; the others are in `DEFINITIONS`.

What it must not know: files, pages and words.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from offbeat import metrics
from offbeat.errors import RequestError
from offbeat.metrics import Definition
from offbeat.policies.events import Pushed
from offbeat.report import files
from offbeat.report.reading import Leg, RunRecord
from offbeat.simulate.recorded import product_limit
from offbeat.strategy import ALL_REDUCE, family_of
from offbeat.trace import Span

SLOW = 1.3  # times the others' typical minibatch, from which on a learner is called a straggler
QUARTERS = 4
_FEWEST = 2  # quarters that can be compared

DEFINITIONS: Mapping[str, Definition] = {
    "seconds": Definition("s", "training seconds at the last evaluation, evaluation left out; without one, from the "
                               "first to the last span of each stretch of the run, less the time of evaluations"),
    "seconds per update": Definition("s", "seconds / updates, over the whole run"),
    "error": Definition("", "1 - accuracy on the test set"),
    "computing": Definition("s", "seconds of minibatches that were finished and not dropped"),
    "thrown away": Definition("s", "seconds of minibatches that were cancelled, or whose gradient was dropped"),
    "accounted time": Definition("s", "computing + thrown away + sending + waiting + updating; evaluation left out"),
    "communication share": Definition("", "(sending + waiting + updating) / accounted time, of all learners together"),
    "typical minibatch": Definition("s", "median seconds; a cancelled minibatch counts as one that would have taken "
                                         "longer than it was let (Kaplan and Meier 1958)"),
    "straggler": Definition("", f"a learner whose typical minibatch takes over {SLOW} times the median of the others', "
                                "in the whole run and in each quarter of it (two at least) that can be compared"),
    "energy per sample": Definition("J", "joules / samples applied"),
    "devices": Definition("", "one for each learner"),
}  # fmt: skip


class Point(NamedTuple):
    """An evaluation that can be drawn."""

    seconds: float
    update: int | None
    accuracy: float | None
    loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerFacts:
    """Where one learner's time went, and how long its minibatches took."""

    learner: int
    compute_s: float = 0.0
    thrown_away_s: float = 0.0
    send_s: float = 0.0
    wait_s: float = 0.0
    apply_s: float = 0.0
    evaluate_s: float = 0.0
    minibatches: int = 0  # finished
    cancelled: int = 0
    compute_mean_s: float | None = None  # of a finished minibatch
    compute_median_s: float | None = None
    typical_s: float | None = None
    quarters: tuple[float | None, ...] = ()  # typical seconds in each quarter of the run

    @property
    def accounted_s(self) -> float:
        return self.compute_s + self.thrown_away_s + self.send_s + self.wait_s + self.apply_s

    def shares(self) -> tuple[float, float, float, float, float] | None:
        """Computing, thrown away, sending, waiting, updating: parts of the accounted time."""
        whole = self.accounted_s
        if not whole > 0:
            return None
        parts = (self.compute_s, self.thrown_away_s, self.send_s, self.wait_s, self.apply_s)
        return parts[0] / whole, parts[1] / whole, parts[2] / whole, parts[3] / whole, parts[4] / whole


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyFacts:
    """Joules are None where they were not measured, and `why_not` says why."""

    joules: float | None = None
    seconds: float | None = None
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a run."""

    name: str
    label: str
    strategy: str
    family: str  # all-reduce, parameter server, or nothing where the line is not known
    learners: int | None
    servers: int | None
    simulated: bool
    finished: bool
    updates: int | None
    seconds: float | None
    samples: int | None  # applied
    samples_dropped: int | None
    curve: tuple[Point, ...]
    staleness: tuple[tuple[int, int], ...]  # age and how many gradients were applied at it
    applied: int
    dropped: int
    cancelled: int
    unused: int  # gradients that were pushed, and neither applied nor dropped
    by_learner: tuple[LearnerFacts, ...]
    energy: EnergyFacts
    problems: tuple[str, ...] = ()

    @property
    def throughput(self) -> float | None:
        """Samples applied a second."""
        known = self.samples is not None and self.seconds is not None and self.seconds > 0
        return metrics.throughput(self.samples or 0, self.seconds or 0.0) if known else None

    @property
    def seconds_per_update(self) -> float | None:
        return self.seconds / self.updates if self.seconds is not None and self.updates else None

    @property
    def accuracy(self) -> float | None:
        """Of the last evaluation."""
        return self.curve[-1].accuracy if self.curve else None

    @property
    def loss(self) -> float | None:
        return self.curve[-1].loss if self.curve else None

    @property
    def best_accuracy(self) -> float | None:
        return max((point.accuracy for point in self.curve if point.accuracy is not None), default=None)

    @property
    def best_loss(self) -> float | None:
        return min((point.loss for point in self.curve if point.loss is not None), default=None)

    def seconds_to(self, target: float | None) -> float | None:
        """Training seconds until the accuracy first reaches the target."""
        if target is None:
            return None
        points = [(point.seconds, point.accuracy) for point in self.curve if point.accuracy is not None]
        return metrics.time_to_accuracy(points, target)

    def updates_to(self, target: float | None) -> int | None:
        if target is None:
            return None
        return next((p.update for p in self.curve if p.accuracy is not None and p.accuracy >= target), None)

    @property
    def staleness_mean(self) -> float | None:
        many = sum(times for _, times in self.staleness)
        return sum(age * times for age, times in self.staleness) / many if many else None

    @property
    def staleness_std(self) -> float | None:
        mean = self.staleness_mean
        if mean is None:
            return None
        many = sum(times for _, times in self.staleness)
        return math.sqrt(sum(times * (age - mean) ** 2 for age, times in self.staleness) / many)

    def share_of(self, *names: str) -> float | None:
        """Of all learners' accounted time, what went into these of `LearnerFacts`, like wait_s."""
        whole = sum(one.accounted_s for one in self.by_learner)
        return sum(getattr(one, name) for one in self.by_learner for name in names) / whole if whole > 0 else None

    @property
    def communication_share(self) -> float | None:
        return self.share_of("send_s", "wait_s", "apply_s")

    @property
    def thrown_away_share(self) -> float | None:
        return self.share_of("thrown_away_s")

    @property
    def joules_per_sample(self) -> float | None:
        joules = self.energy.joules
        return joules / self.samples if joules is not None and self.samples else None

    def cost(self, price: float | None) -> float | None:
        """Of all devices for the training seconds, at the price of a device hour."""
        if price is None or self.learners is None or self.seconds is None:
            return None
        return metrics.cost(self.learners, self.seconds, price)


class Straggler(NamedTuple):
    """A learner that is slow all the time; `factor` is against the median of the others."""

    learner: int
    factor: float
    typical_s: float
    others_s: float


def straggler(facts: Facts) -> Straggler | None:
    """The slowest learner, if it is a straggler as `DEFINITIONS` has it."""
    known = [one for one in facts.by_learner if one.typical_s is not None]
    if len(known) < 2:
        return None
    slow = max(known, key=lambda one: one.typical_s or 0.0)
    rest = [one for one in known if one is not slow]
    others = median(one.typical_s or 0.0 for one in rest)
    if not others > 0 or not (slow.typical_s or 0.0) > SLOW * others:
        return None
    compared = []
    for quarter, mine in enumerate(slow.quarters):
        theirs = [time for one in rest if (time := one.quarters[quarter]) is not None]
        if mine is not None and theirs:
            compared.append(mine > SLOW * median(theirs))
    if len(compared) < _FEWEST or not all(compared):
        return None
    return Straggler(slow.learner, (slow.typical_s or 0.0) / others, slow.typical_s or 0.0, others)


# --- from a record ------------------------------------------------------------------------------------------------


def facts_of(run: RunRecord) -> Facts:
    """All of it."""
    strategy = _strategy(run)
    family = _family(strategy)
    books = _Books(run.legs)
    last = run.metrics[-1] if run.metrics else None
    problems = list(books.problems)
    whole = [updates_of(leg, books.applies[at]) for at, leg in enumerate(run.legs)]
    if last is not None:
        updates, seconds, samples, dropped = last.update, last.seconds, last.samples, last.dropped
    else:
        spent = [found for leg in run.legs if (found := span_seconds(leg.spans)) is not None]
        seconds = sum(spent) if spent else None
        of_server = any(leg.decisions for leg in run.legs)
        updates = (sum(whole) if of_server else max(whole, default=0)) or None
        samples = books.samples_applied if of_server else None
        dropped = books.samples_dropped if of_server else None
    again = _made_again(run.legs, books.applies, last.update if last is not None else None)
    if again:
        words = f"{again:,} update{' was' if again == 1 else 's were'} made again after a resume"
        problems.append(f"{words}: gradients and learners' times are counted both times")
    staleness, applied = books.staleness, books.applied
    if family == ALL_REDUCE and not books.applied:
        applied = sum(1 for leg in run.legs for span in leg.spans if span.what == "compute" and not span.cancelled)
        staleness = Counter({0: applied}) if applied else Counter()
    by_learner = _by_learner(run.legs, books.dropped_spans)
    return Facts(
        name=run.name,
        label=run.label,
        strategy=strategy,
        family=family,
        learners=_learners(run, by_learner),
        servers=_said(run, "servers") if family != ALL_REDUCE else None,
        simulated=run.simulated,
        finished=run.finished,
        updates=updates,
        seconds=seconds,
        samples=samples,
        samples_dropped=dropped,
        curve=tuple(Point(one.seconds or 0.0, one.update, one.accuracy, one.loss) for one in run.metrics),
        staleness=tuple(sorted(staleness.items())),
        applied=applied,
        dropped=books.dropped,
        cancelled=sum(one.cancelled for one in by_learner),
        unused=books.unused,
        by_learner=by_learner,
        energy=_energy(run),
        problems=tuple(problems),
    )


def _strategy(run: RunRecord) -> str:
    heads = [files.text(leg.run.get("strategy")) for leg in run.legs]
    return files.text(run.config.get("sync")) or next(filter(None, heads), "")


def _family(strategy: str) -> str:
    try:
        return family_of(strategy)
    except RequestError:
        return ""


def _said(run: RunRecord, key: str) -> int | None:
    found = [files.count(leg.run.get(key)) for leg in run.legs] + [files.count(run.config.get(key))]
    return next((one for one in found if one), None)


def _learners(run: RunRecord, by_learner: Sequence[LearnerFacts]) -> int | None:
    return _said(run, "learners") or _said(run, "expect") or len(by_learner) or None


def updates_of(leg: Leg, applies: int) -> int:
    """Of a server the updates it made in this stretch; of an all-reduce the version it has come to."""
    if leg.decisions:
        return applies
    return 1 + max((span.version for span in leg.spans if span.what != "evaluate" and not span.cancelled), default=-1)


def _made_again(legs: Sequence[Leg], applies: Sequence[int], updates: int | None) -> int:
    """Updates that were lost with a leg that broke off, and made once more in the next."""
    if any(leg.decisions for leg in legs):
        known = len(legs) > 1 and updates is not None and legs[-1].finished
        return max(0, sum(applies) - (updates or 0)) if known else 0
    versions = [[span.version for span in leg.spans if span.what == "compute"] for leg in legs]
    return sum(max(0, max(before) + 1 - min(after)) for before, after in pairwise(filter(None, versions)))


def span_seconds(spans: Sequence[Span]) -> float | None:
    """From the first to the last span, less the time in which somebody evaluated."""
    work = [span for span in spans if span.what != "evaluate"]
    if not work:
        return None
    first, last = min(span.start_s for span in work), max(span.end_s for span in work)
    rested, at = 0.0, first
    for rest in sorted((span for span in spans if span.what == "evaluate"), key=lambda span: span.start_s):
        start, end = max(rest.start_s, at), min(rest.end_s, last)
        if start < end:
            rested += end - start
            at = end
    return last - first - rested


class _Books:
    """What the decisions of all legs say of gradients. In each leg of a server versions and tickets begin anew."""

    def __init__(self, legs: Sequence[Leg]) -> None:
        self.staleness: Counter[int] = Counter()
        self.applied = self.dropped = self.unused = 0
        self.samples_applied = self.samples_dropped = 0
        self.applies: list[int] = []  # of each leg
        self.dropped_spans: list[frozenset[int]] = []  # of each leg: which spans computed what was dropped
        self.problems: list[str] = []
        for leg in legs:
            self._read(leg)

    def _read(self, leg: Leg) -> None:
        held: dict[int, Pushed] = {}
        version = impossible = 0
        dropped: list[Pushed] = []
        for event, applies, drops in leg.decisions:
            if type(event) is Pushed:
                held[event.ticket] = event
            for tickets in applies:
                pushes = [held.pop(ticket) for ticket in tickets if ticket in held]
                for push in pushes:
                    if push.version > version:  # lines are missing: it cannot be lower than this
                        impossible += 1
                        version = push.version
                    self.staleness[metrics.staleness(version, push.version)] += 1
                    self.samples_applied += push.samples
                self.applied += len(pushes)
                impossible += len(tickets) - len(pushes)
                version += 1
            dropped += [held.pop(ticket) for ticket in drops if ticket in held]
        self.applies.append(sum(len(applies) for _, applies, _ in leg.decisions))
        self.dropped += len(dropped)
        self.samples_dropped += sum(push.samples for push in dropped)
        self.unused += len(held)
        self.dropped_spans.append(_matched(leg.spans, dropped))
        if leg.decisions and (leg.unread or impossible):
            self.problems.append("decisions are missing from the log: staleness and counts of gradients are not exact")


def _matched(spans: Sequence[Span], dropped: Sequence[Pushed]) -> frozenset[int]:
    """Which span computed each push: the last one of its learner and version that had ended when it arrived."""
    if not dropped:
        return frozenset()
    wanted = {(push.learner, push.version) for push in dropped}
    of: defaultdict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
    for at, span in enumerate(spans):
        if span.what == "compute" and not span.cancelled and (span.learner, span.version) in wanted:
            of[span.learner, span.version].append((span.end_s, at))
    for ends in of.values():
        ends.sort()
    found = set()
    for push in dropped:
        ends = of[push.learner, push.version]
        place = bisect_right(ends, (push.at_s, len(spans))) - 1
        while place >= 0 and ends[place][1] in found:
            place -= 1
        if place >= 0:
            found.add(ends[place][1])
    return frozenset(found)


_SECONDS = {"send": "send_s", "wait": "wait_s", "apply": "apply_s", "evaluate": "evaluate_s"}


def _by_learner(legs: Sequence[Leg], dropped: Sequence[frozenset[int]]) -> tuple[LearnerFacts, ...]:
    seconds: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    finished: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)  # when it ended, how long it took
    cancelled: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    begins = [min((span.start_s for span in leg.spans), default=0.0) for leg in legs]
    lengths = [
        max((span.end_s for span in leg.spans), default=0.0) - begin for leg, begin in zip(legs, begins, strict=True)
    ]
    before = 0.0
    for leg, void, begin, length in zip(legs, dropped, begins, lengths, strict=True):
        for at, (learner, what, start, end, _, stopped) in enumerate(leg.spans):
            if what != "compute":
                seconds[learner][_SECONDS[what]] += end - start
                continue
            seconds[learner]["thrown_away_s" if stopped or at in void else "compute_s"] += end - start
            (cancelled if stopped else finished)[learner].append((before + end - begin, end - start))
        before += length
    return tuple(
        _learner_facts(learner, seconds[learner], finished[learner], cancelled[learner], before)
        for learner in sorted(seconds)
    )


def _learner_facts(
    learner: int,
    seconds: Mapping[str, float],
    finished: Sequence[tuple[float, float]],
    cancelled: Sequence[tuple[float, float]],
    length: float,
) -> LearnerFacts:
    took = [time for _, time in finished]
    parts: list[tuple[list[float], list[float]]] = [([], []) for _ in range(QUARTERS)]
    for kind, times in enumerate((finished, cancelled)):
        for end, time in times:
            parts[_quarter(end, length)][kind].append(time)
    return LearnerFacts(
        learner=learner,
        minibatches=len(took),
        cancelled=len(cancelled),
        compute_mean_s=fmean(took) if took else None,
        compute_median_s=median(took) if took else None,
        typical_s=_typical(took, [time for _, time in cancelled]),
        quarters=tuple(_typical(whole, cut) for whole, cut in parts),
        **seconds,
    )


def _quarter(end_s: float, length_s: float) -> int:
    return min(QUARTERS - 1, int(QUARTERS * end_s / length_s)) if length_s > 0 else 0


def _typical(finished: Sequence[float], cancelled: Sequence[float]) -> float | None:
    """The median; with cancelled ones that of the product limit. None if none was let finish."""
    if not finished:
        return None
    if not cancelled:
        return median(finished)
    curve = product_limit(finished, cancelled)
    return next(
        (float(time) for time, reached in zip(curve.times_s, curve.reached, strict=True) if reached >= 0.5),
        float(curve.times_s[-1]),
    )


def _energy(run: RunRecord) -> EnergyFacts:
    if run.simulated:
        return EnergyFacts(why_not="the run was simulated")
    if not run.energy:
        return EnergyFacts(why_not="the run has no energy.json")
    reasons = list(dict.fromkeys(reason for one in run.energy for reason in one.reasons))
    missing = sum(one.joules is None for one in run.energy)
    stretches = max(len(run.legs), len(run.energy))
    known = [one.seconds for one in run.energy]
    seconds = sum(one for one in known if one is not None) if all(one is not None for one in known) else None
    if missing:
        return EnergyFacts(seconds=seconds, why_not="; ".join(reasons) or "energy.json does not say why")
    if len(run.energy) < stretches:
        return EnergyFacts(
            seconds=seconds, why_not=f"it was measured in {len(run.energy)} of the run's {stretches} stretches"
        )
    return EnergyFacts(joules=sum(one.joules or 0.0 for one in run.energy), seconds=seconds)
