"""Where each learner's time went, and how long its minibatches took: from the spans of a log.

Laws. Pure functions of what was read. What cannot be known is None, never a guess. What is defined in words is in
`metrics.DEFINITIONS`.

What it must not know: files, pages, words, and what a policy decided.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from statistics import median
from typing import Any, NamedTuple

from offbeat.errors import RequestError
from offbeat.policies import Pushed, create
from offbeat.runs.log import minibatches_by_span
from offbeat.runs.run_record import RunSegment
from offbeat.simulate.recorded import product_limit

QUARTERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerFacts:
    """Where one learner's time went, and how long its minibatches took. A part that the log never has is None."""

    learner: int
    compute_s: float = 0.0
    thrown_away_s: float = 0.0
    send_s: float | None = 0.0
    wait_s: float = 0.0
    apply_s: float | None = 0.0
    evaluate_s: float = 0.0
    minibatches: int = 0  # finished
    cancelled: int = 0
    compute_mean_s: float | None = None  # of a finished minibatch
    compute_median_s: float | None = None
    typical_s: float | None = None
    at_least_s: float | None = None  # where none was finished: the median of what they were let
    quarters: tuple[float | None, ...] = ()  # typical seconds, or those at least, in each quarter of the run

    @property
    def accounted_s(self) -> float:
        return self.compute_s + self.thrown_away_s + (self.send_s or 0.0) + self.wait_s + (self.apply_s or 0.0)

    def shares(self) -> tuple[float | None, ...] | None:
        """Computing, thrown away, sending, waiting, updating: parts of the accounted time."""
        whole = self.accounted_s
        if not whole > 0:
            return None
        parts = (self.compute_s, self.thrown_away_s, self.send_s, self.wait_s, self.apply_s)
        return tuple(None if part is None else part / whole for part in parts)


class _Took(NamedTuple):
    """A span of computing: when it ended, how long it took, and how many minibatches it holds."""

    end_s: float
    seconds: float
    minibatches: int

    @property
    def each_s(self) -> float:
        return self.seconds / self.minibatches


_SECONDS = {"send": "send_s", "wait": "wait_s", "apply": "apply_s", "evaluate": "evaluate_s"}


def minibatches_of(segments: Sequence[RunSegment], strategy: str, expect: int) -> list[Mapping[int, int]]:
    """Of each segment, how many minibatches a span of computing holds, by its place; one where it is not in here.

    Real learners that push after N minibatches (local-sgd:N, downpour:push=N) log one span for them; the simulator logs
    each. The pushes tell which it is: there are as many as spans, or N times fewer.
    """
    try:
        every = create(strategy, expect=expect).rule.push_every
    except RequestError:  # an all-reduce, or nothing that is known
        every = 1
    return [_minibatches(segment, every) if every > 1 else {} for segment in segments]


def _minibatches(segment: RunSegment, every: int) -> Mapping[int, int]:
    computed = [at for at, span in enumerate(segment.spans) if span.what == "compute"]
    pushes = sum(isinstance(one.event, Pushed) for one in segment.decisions)
    if 2 * len(computed) > (1 + every) * pushes:
        return {}
    return {**dict.fromkeys(computed, every), **minibatches_by_span(segment.spans, segment.decisions, every)}


def by_learner(
    segments: Sequence[RunSegment],
    dropped: Sequence[frozenset[int]],
    minibatches: Sequence[Mapping[int, int]],
    *,
    in_pieces: bool = False,
) -> tuple[LearnerFacts, ...]:
    """`dropped` are the places of spans whose gradient was dropped, of each segment. `in_pieces`: a minibatch has
    several spans, all of its version."""
    there = {span.what for segment in segments for span in segment.spans}
    never = dict.fromkeys((_SECONDS[what] for what in ("send", "apply") if what not in there), None)
    seconds: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    finished: defaultdict[int, list[_Took]] = defaultdict(list)
    cancelled: defaultdict[int, list[_Took]] = defaultdict(list)
    before = 0.0
    for segment, void, held in zip(segments, dropped, minibatches, strict=True):
        begin = min((span.start_s for span in segment.spans), default=0.0)
        pieces: dict[tuple[int, int], _Took] = {}  # of minibatches that are computed in pieces
        for at, (learner, what, start, end, version, stopped, _) in enumerate(segment.spans):
            if what != "compute":
                seconds[learner][_SECONDS[what]] += end - start
                continue
            if in_pieces:
                seconds[learner]["compute_s"] += end - start
                spent = pieces[learner, version].seconds if (learner, version) in pieces else 0.0
                pieces[learner, version] = _Took(before + end - begin, spent + end - start, 1)
                continue
            seconds[learner]["thrown_away_s" if stopped or at in void else "compute_s"] += end - start
            took = _Took(before + end - begin, end - start, held.get(at, 1))
            (cancelled if stopped else finished)[learner].append(took)
        for (learner, _), took in pieces.items():
            finished[learner].append(took)
        before += max((span.end_s for span in segment.spans), default=0.0) - begin
    return tuple(
        _learner_facts(learner, {**never, **seconds[learner]}, finished[learner], cancelled[learner], before)
        for learner in sorted(seconds)
    )


def _learner_facts(
    learner: int,
    seconds: Mapping[str, Any],
    finished: Sequence[_Took],
    cancelled: Sequence[_Took],
    length: float,
) -> LearnerFacts:
    took, cut = [one.each_s for one in finished], [one.each_s for one in cancelled]
    many = sum(one.minibatches for one in finished)
    parts: list[tuple[list[float], list[float]]] = [([], []) for _ in range(QUARTERS)]
    for kind, times in enumerate((finished, cancelled)):
        for one in times:
            quarter = min(QUARTERS - 1, int(QUARTERS * one.end_s / length)) if length > 0 else 0
            parts[quarter][kind].append(one.each_s)
    none_finished = not took and bool(cut)
    return LearnerFacts(
        learner=learner,
        minibatches=many,
        cancelled=len(cancelled),
        compute_mean_s=fsum(one.seconds for one in finished) / many if many else None,
        compute_median_s=median(took) if took else None,
        typical_s=_typical(took, cut),
        at_least_s=median(cut) if none_finished else None,
        quarters=tuple((median(let) if let else None) if none_finished else _typical(whole, let)
                       for whole, let in parts),
        **seconds,
    )  # fmt: skip


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
