"""From what a run has left to what it was like: every number of a report, defined once.

Laws. Pure functions of a `RunRecord`. What cannot be known is None, never a guess. Updates, seconds and samples are of
one source: the last evaluation, or, where there is none, the log. Shares are of what a learner's spans account for,
evaluation left out. What each number means is in `metrics.DEFINITIONS`.

What it must not know: files, pages and words.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from offbeat.errors import RequestError
from offbeat.policies import Pushed, Staleness, create
from offbeat.policies.staleness import FRESH
from offbeat.report.learners import LearnerFacts, by_learner, minibatches_of
from offbeat.runs import metrics, untrusted
from offbeat.runs.log import Span, pushed_spans
from offbeat.runs.run_record import EvaluationRecord, RunRecord, RunSegment
from offbeat.strategy import ALL_REDUCE, SERVER, family_of, paced_as


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyFacts:
    """Joules are None where they were not measured. `why_not` says why, or what of the machine is not in them."""

    joules: float | None = None
    seconds: float | None = None
    sources: tuple[str, ...] = ()  # the counters, in order of their names
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
    ended: str  # how, where it is not finished: so far, or stopped after epoch 16 of 100
    updates: int | None
    seconds: float | None
    samples: int | None  # applied
    samples_dropped: int | None
    curve: tuple[EvaluationRecord, ...]
    staleness: tuple[tuple[int, int], ...]  # age and how many gradients were applied at it
    applied: int
    dropped: int
    cancelled: int
    unused: int  # gradients that were pushed, and neither applied nor dropped
    by_learner: tuple[LearnerFacts, ...]
    energy: EnergyFacts
    sent_bytes: int | None = None  # by all learners
    wait_share: float | None = None  # of the learners' time, as the run itself has counted it
    received_bytes: int | None = None
    names: tuple[str, ...] = ()  # of processes, where a learner has one for each stage of a pipeline
    hosts: tuple[str, ...] = ()  # of each learner, where there are several
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what to keep in mind; nothing is wrong with the files

    def name_of(self, learner: int) -> str:
        """Of a row of the log."""
        name = self.names[learner] if learner < len(self.names) else f"learner {learner}"
        return f"{host}: {name}" if (host := self.host_of(learner)) else name

    def host_of(self, learner: int) -> str:
        return self.hosts[learner] if learner < len(self.hosts) else ""

    def by_host(self, learner: int) -> tuple[int, int]:
        """A key that puts the learners of a host together."""
        host = self.host_of(learner)
        return (self.hosts.index(host) if host else 0, learner)

    @property
    def throughput(self) -> float | None:
        """Samples applied a second."""
        return metrics.throughput(self.samples, self.seconds) if self.samples is not None and self.seconds else None

    @property
    def seconds_per_update(self) -> float | None:
        return self.seconds / self.updates if self.seconds is not None and self.updates else None

    @property
    def last(self) -> EvaluationRecord:
        """The last evaluation; of a run without one nothing is known."""
        return self.curve[-1] if self.curve else EvaluationRecord(0.0)

    @property
    def best_accuracy(self) -> float | None:
        return max((point.accuracy for point in self.curve if point.accuracy is not None), default=None)

    @property
    def highest_reached(self) -> float | None:
        """The highest target that it would have reached."""
        return metrics.highest_reached(self._accuracies)

    @property
    def score(self) -> metrics.Score | None:
        """For a ranking by the accuracy at the end."""
        accuracy, samples = self.last.accuracy, self.last.test_samples
        return None if accuracy is None else metrics.Score(accuracy, samples, self.seconds or 0.0)

    @property
    def right(self) -> str | None:
        """The accuracy at the end, with its interval."""
        return None if self.score is None else metrics.format_accuracy(self.score.accuracy, self.score.samples)

    def seconds_to(self, target: float | None) -> float | None:
        """Training seconds until the accuracy has reached the target."""
        _, there = self.reached(target)
        return None if there is None else there.seconds

    def updates_to(self, target: float | None) -> int | None:
        _, there = self.reached(target)
        return None if there is None else there.update

    def sent_to(self, target: float | None) -> int | None:
        """Bytes that had been sent when the accuracy had reached the target."""
        _, there = self.reached(target)
        return None if there is None else self.sent_by(there)

    def sent_by(self, point: EvaluationRecord) -> int | None:
        """Bytes that learners had sent up to an evaluation, and servers to them."""
        from_servers = (point.received_bytes or 0) if self.family == SERVER else 0
        return None if point.sent_bytes is None else point.sent_bytes + from_servers

    def reached(self, target: float | None) -> tuple[EvaluationRecord, EvaluationRecord | None]:
        """The evaluation that reached the target, after the one before it: 0 seconds where it was the first."""
        known = [EvaluationRecord(0.0), *(point for point in self.curve if point.accuracy is not None)]
        at = None if target is None else metrics.reached_at(self._accuracies, target)
        return (known[0], None) if at is None else (known[at], known[at + 1])

    @property
    def _accuracies(self) -> list[float]:
        return [point.accuracy for point in self.curve if point.accuracy is not None]

    @property
    def staleness_mean(self) -> float | None:
        return sum(age * times for age, times in self.staleness) / self.applied if self.applied else None

    @property
    def staleness_std(self) -> float | None:
        mean = self.staleness_mean
        if mean is None:
            return None
        return math.sqrt(sum(times * (age - mean) ** 2 for age, times in self.staleness) / self.applied)

    def share_of(self, *names: str) -> float | None:
        """Of all learners' accounted time, the part of these of `LearnerFacts`, like wait_s; None: not in the log."""
        whole = sum(one.accounted_s for one in self.by_learner)
        parts = [part for one in self.by_learner for name in names if (part := getattr(one, name)) is not None]
        return sum(parts) / whole if whole > 0 and parts else None

    @property
    def inside_waiting(self) -> bool:
        """Whether pushing and updating are in the learners' waiting: a real server's log has them nowhere else."""
        apart = any(one.send_s is not None or one.apply_s is not None for one in self.by_learner)
        return self.family == SERVER and not self.simulated and bool(self.by_learner) and not apart

    @property
    def not_computing_share(self) -> float | None:
        """Waiting for others is in it: it is not what communication alone takes."""
        return self.share_of("send_s", "wait_s", "apply_s")

    @property
    def thrown_away_share(self) -> float | None:
        return self.share_of("thrown_away_s")

    @property
    def joules_per_sample(self) -> float | None:
        joules = self.energy.joules
        return joules / self.samples if joules is not None and self.samples else None

    def joules_to(self, target: float | None) -> float | None:
        """As much of the energy as of the training time."""
        joules, reached = self.energy.joules, self.seconds_to(target)
        return joules * reached / self.seconds if joules is not None and reached is not None and self.seconds else None

    def cost(self, seconds: float | None, price: float | None) -> float | None:
        """Of all devices for so many training seconds, at the price of a device hour."""
        if price is None or self.learners is None or seconds is None:
            return None
        return metrics.cost(self.learners, seconds, price)


class Straggler(NamedTuple):
    """A learner that is slow all the time; `factor` is against the median of the others."""

    learner: int
    factor: float
    typical_s: float
    others_s: float
    at_least: bool = False  # none of its minibatches was finished: they take so long or longer


def straggler(facts: Facts) -> Straggler | None:
    """The slowest learner, if it is a straggler as `metrics.DEFINITIONS` has it. Stages have different work."""
    if facts.names:
        return None
    known = [one for one in facts.by_learner if one.typical_s is not None or one.at_least_s is not None]
    if not known:
        return None
    slow = max(known, key=lambda one: one.typical_s or one.at_least_s or 0.0)
    mine_s = slow.typical_s or slow.at_least_s or 0.0
    rest = [one for one in known if one is not slow and one.typical_s is not None]  # a bound is nothing to compare with
    others_s = median(one.typical_s or 0.0 for one in rest) if rest else 0.0
    theirs = [
        [time for time in times if time is not None] for times in zip(*(one.quarters for one in rest), strict=True)
    ]
    quarters = [
        (mine, median(some)) for mine, some in zip(slow.quarters, theirs, strict=False) if mine is not None and some
    ]
    if not metrics.is_straggler((mine_s, others_s), quarters):
        return None
    return Straggler(slow.learner, mine_s / others_s, mine_s, others_s, slow.typical_s is None)


def staleness_theory(line: str, learners: int) -> Staleness | None:
    """What the literature says of a strategy with so many learners, asked of the policy itself.

    None where only an estimate is known, or the line is no strategy here.
    """
    try:
        if learners < 1:
            return None
        if family_of(line) == ALL_REDUCE:
            return FRESH
        expected = create(paced_as(line), expect=learners).expected_staleness(learners)
    except RequestError:
        return None
    return expected if expected.exact else None


# --- from a record ------------------------------------------------------------------------------------------------


def facts_of(run: RunRecord) -> Facts:
    """All of it."""
    strategy = _strategy(run)
    family = _family(strategy)
    gradients = _Gradients(run.segments)
    last = run.metrics[-1] if run.metrics else None
    notes = []
    whole = [updates_of(segment, gradients.applies[at]) for at, segment in enumerate(run.segments)]
    if last is not None:
        updates, samples, dropped = last.update, last.samples, last.dropped
        seconds: float | None = last.seconds
    else:
        spent = [found for segment in run.segments if (found := span_seconds(segment.spans)) is not None]
        seconds = sum(spent) if spent else None
        of_server = any(segment.decisions for segment in run.segments)
        updates = (sum(whole) if of_server else max(whole, default=0)) or None
        samples = gradients.samples_applied if of_server else None
        dropped = _never_applied(run, gradients) if of_server else None
    if last is not None and last.warning:
        notes.append(last.warning)
    notes += last.slow_links if last is not None else ()
    again = _made_again(run.segments, gradients.applies, last.update if last is not None else None)
    if again:
        notes.append(
            f"the run was resumed and repeated {again:,} update{'' if again == 1 else 's'}; the counts of "
            "gradients and the times of the learners include both attempts"
        )
    staleness, applied = gradients.staleness, gradients.applied
    names, hosts = names_of_last(run, "names"), names_of_last(run, "hosts")
    hosts = hosts or (() if last is None else last.learner_hosts)
    if family == ALL_REDUCE and not gradients.applied:
        done = [span for segment in run.segments for span in segment.spans if span.what == "compute"]
        applied = sum(not span.cancelled for span in done)
        if names:
            applied = len({(span.learner, span.version) for span in done})
        staleness = Counter({0: applied}) if applied else Counter()
    expect = _said(run, "expect") or _said(run, "learners") or 1
    held = minibatches_of(run.segments, strategy, expect)
    learners = by_learner(run.segments, gradients.dropped_spans, held, in_pieces=bool(names))
    ended = _ended(run)
    return Facts(
        name=run.name,
        label=run.label,
        strategy=strategy,
        family=family,
        learners=_said(run, "learners") or _said(run, "expect") or len(learners) or None,
        servers=_said(run, "servers") if family != ALL_REDUCE else None,
        simulated=run.simulated,
        finished=not ended,
        ended=ended,
        updates=updates,
        seconds=seconds,
        samples=samples,
        samples_dropped=dropped,
        curve=run.metrics,
        staleness=tuple(sorted(staleness.items())),
        applied=applied,
        dropped=gradients.dropped,
        cancelled=sum(one.cancelled for one in learners),
        unused=gradients.unused,
        by_learner=learners,
        energy=_energy(run),
        sent_bytes=None if last is None else last.sent_bytes,
        received_bytes=None if last is None else last.received_bytes,
        wait_share=None if last is None else last.wait_share,
        names=names,
        hosts=hosts,
        problems=tuple(gradients.problems),
        notes=tuple(notes),
    )


def _ended(run: RunRecord) -> str:
    """How a run ended that has not done what its configuration says; nothing for one that has, or may have."""
    if not run.finished:
        return "so far"
    train = run.config.get("train")
    told = train if isinstance(train, Mapping) else {}
    epochs, wanted = untrusted.count(told.get("epochs")), untrusted.share(told.get("stop_at"))
    epoch = run.metrics[-1].epoch if run.metrics else None
    if not epochs or epoch is None or epoch > epochs - 0.5:  # a simulated stream of samples has no exact end
        return ""
    known = [one.accuracy for one in run.metrics if one.accuracy is not None]
    if wanted and metrics.reached_at(known, wanted) is not None:
        return ""
    return f"stopped after epoch {epoch:g} of {epochs}"


def _never_applied(run: RunRecord, gradients: _Gradients) -> int | None:
    """From the log alone: it does not say which samples were computed once more, nor those of a cancelled minibatch."""
    cancelled = any(span.cancelled for segment in run.segments for span in segment.spans)
    if not cancelled and not gradients.dropped:
        return 0
    return None if cancelled or run.config.get("cancelled") == "again" else gradients.samples_dropped


def _strategy(run: RunRecord) -> str:
    heads = [untrusted.text(segment.run.get("strategy")) for segment in run.segments]
    return untrusted.text(run.config.get("sync")) or next(filter(None, heads), "")


def _family(strategy: str) -> str:
    try:
        return family_of(strategy)
    except RequestError:
        return ""


def _said(run: RunRecord, key: str) -> int | None:
    found = [untrusted.count(segment.run.get(key)) for segment in run.segments] + [untrusted.count(run.config.get(key))]
    return next((one for one in found if one), None)


def names_of_last(run: RunRecord, key: str) -> tuple[str, ...]:
    """Of processes (`names`), or of the host of each (`hosts`), as the last part of the run has them."""
    told = run.segments[-1].run.get(key) if run.segments else None
    return tuple(untrusted.text(one) for one in told) if isinstance(told, list) else ()


def updates_of(segment: RunSegment, applies: int) -> int:
    """Of a server the updates it made in this stretch; of an all-reduce the version it has come to."""
    if segment.decisions:
        return applies
    return 1 + max(
        (span.version for span in segment.spans if span.what != "evaluate" and not span.cancelled), default=-1
    )


def _made_again(segments: Sequence[RunSegment], applies: Sequence[int], updates: int | None) -> int:
    """Updates that were lost with a segment that broke off, and made once more in the next."""
    if any(segment.decisions for segment in segments):
        known = len(segments) > 1 and updates is not None and segments[-1].finished
        return max(0, sum(applies) - (updates or 0)) if known else 0
    versions = [[span.version for span in segment.spans if span.what == "compute"] for segment in segments]
    return sum(max(0, max(before) + 1 - min(after)) for before, after in pairwise(filter(None, versions)))


def span_seconds(spans: Sequence[Span]) -> float | None:
    """From the first to the last span, less the time in which somebody evaluated."""
    work = [span for span in spans if span.what != "evaluate"]
    if not work:
        return None
    first, last = min(span.start_s for span in work), max(span.end_s for span in work)
    rested, at = 0.0, first
    for rest in sorted((span for span in spans if span.what == "evaluate"), key=lambda span: span.start_s):
        end = min(rest.end_s, last)
        rested += max(0.0, end - max(rest.start_s, at))
        at = max(at, end)
    return last - first - rested


class _Gradients:
    """What the decisions of all segments say of gradients. In each, a server's versions and tickets begin anew."""

    def __init__(self, segments: Sequence[RunSegment]) -> None:
        self.staleness: Counter[int] = Counter()
        self.applied = self.dropped = self.unused = 0
        self.samples_applied = self.samples_dropped = 0
        self.applies: list[int] = []  # of each segment
        self.dropped_spans: list[frozenset[int]] = []  # of each segment: which spans computed what was dropped
        self.problems: list[str] = []
        for segment in segments:
            self._read(segment)

    def _read(self, segment: RunSegment) -> None:
        held: dict[int, Pushed] = {}
        version = impossible = 0
        dropped: list[Pushed] = []
        for decision in segment.decisions:
            if isinstance(decision.event, Pushed):
                held[decision.event.ticket] = decision.event
            for tickets in decision.applies:
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
            dropped += [held.pop(ticket) for ticket in decision.drops if ticket in held]
        self.applies.append(sum(len(one.applies) for one in segment.decisions))
        self.dropped += len(dropped)
        self.samples_dropped += sum(push.samples for push in dropped)
        self.unused += len(held)
        self.dropped_spans.append(frozenset(pushed_spans(segment.spans, dropped).values()))
        if segment.decisions and (segment.unread or impossible):
            self.problems.append("decisions are missing from the log, so staleness and gradient counts are not exact")


def _energy(run: RunRecord) -> EnergyFacts:
    if run.simulated:
        return EnergyFacts(why_not="the run was simulated")
    if not run.energy:
        return EnergyFacts(why_not="the run has no energy.json")
    reasons = list(dict.fromkeys(reason for one in run.energy for reason in one.reasons))
    stretches = max(len(run.segments), len(run.energy))
    timed = all(one.seconds is not None for one in run.energy)
    seconds = sum(one.seconds or 0.0 for one in run.energy) if timed else None
    if any(one.joules is None for one in run.energy):
        return EnergyFacts(seconds=seconds, why_not="; ".join(reasons) or "energy.json does not say why")
    if len(run.energy) < stretches:
        few = f"it was measured in {len(run.energy)} of the {stretches} parts of the run"
        return EnergyFacts(seconds=seconds, why_not="; ".join([few, *reasons]))
    if len({frozenset(one.sources) for one in run.energy}) > 1:
        reasons.append("some sources in some parts of the run")
    return EnergyFacts(
        joules=sum(one.joules or 0.0 for one in run.energy),
        seconds=seconds,
        sources=tuple(sorted({source for one in run.energy for source in one.sources})),
        why_not="; ".join(reasons),
    )
