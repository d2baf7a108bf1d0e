"""What a real run's log says of its machine: what each minibatch took, in their order, and what lay between them.

    computed    learner i's n-th minibatch took so long; `law_of` gives the same again, in the same order
    back        what came before it: from the word of the policy to begin (or, in an all-reduce, from when the last
                learner had computed) until it began. Each has its own: who begins first takes the samples first
    there       from a gradient that is computed until the server knows of it. Each has its own, since learners may be
                on different hosts
    ends        what the ends of epochs take beside it: all come to rest, and begin again

Where learners push after several minibatches the log has one time for all of them, and each is given an equal part.
There was one way for all of them too: had they been pushed one by one each would have had one, and each is given the
mean of its learner's.

A minibatch that was cancelled after c seconds would have taken longer. It is given a time that is drawn from the times
of its learner that are longer than c (Kaplan and Meier 1958, see `recorded`), always the same for a seed; where nothing
longer was seen, c itself.

Laws. Evaluations are no part of a training's time, and what straddles one is left out. Who waits for others (at a
barrier) is not on a way: the way back begins when the policy, or the last learner, lets go. The same log gives the same
numbers.

A gradient whose sending was cancelled says nothing of how long that would have taken.

What it must not know: torch, configurations, and which strategies a replay asks for.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from offbeat.errors import RequestError
from offbeat.policies import LearnerRule, Left, Pushed, Resume, Send, create
from offbeat.policies.replay import Decision, read_decision
from offbeat.runs.log import WHAT, RunLog, Span, minibatches_by_span, pushed_spans
from offbeat.simulate.compute import Law
from offbeat.simulate.engine import COMPUTE, MEASURED, Floats, Ints, uniforms
from offbeat.simulate.recorded import Curve, product_limit

MOSTLY = 0.5  # of a learner's minibatches: where more were cancelled, its times are uncertain
_GOLDEN = (math.sqrt(5) - 1) / 2  # copies of a learner begin at places that are spread over its minibatches
Stretch = tuple[float, float]


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """The minibatches of one learner, in their order: what came before, its seconds, and whether it was cancelled."""

    back_s: Floats
    seconds: Floats
    cancelled: tuple[bool, ...]
    starts_s: Floats  # what followed each word to begin: more than minibatches, where a word came when samples were out
    sends_s: Floats  # what each of its pushes took until the server knew of it; none where none was known of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """A run's log, read. `learners` has one entry for each that computed anything, in the order of their numbers."""

    learners: tuple[Computed, ...]
    numbers: tuple[int, ...]  # of these learners
    there_s: float  # of all pushes, on average; 0 of an all-reduce: all of its way is a way back
    active_s: float  # in which gradients were computed, from the first minibatch of an epoch to its last gradient
    stretches: int  # of it, between rests
    wait_share: float  # of the learners' time: waiting
    waste_share: float  # and computing what was cancelled or dropped
    reduces: bool  # by an all-reduce

    @property
    def minibatches(self) -> int:
        return sum(len(one.seconds) for one in self.learners)

    @property
    def cancelled(self) -> int:
        return sum(sum(one.cancelled) for one in self.learners)

    @property
    def back_s(self) -> float:
        """Of a minibatch that is pushed by itself, on average."""
        return sum(float(one.back_s.sum()) for one in self.learners) / self.minibatches

    def ends_s(self, seconds: float) -> float:
        """What ends of epochs took of a training of so many seconds; a simulation has the ways back, and no more."""
        return max(0.0, seconds - self.active_s - self.stretches * self.back_s)


def read_recorded(log: RunLog) -> Recorded:
    """`RequestError` where the log is not one of a real run that has computed something."""
    if log.run.get("simulated") is not False:
        raise RequestError("it was trained in virtual time and has no measured compute times; use offbeat simulate")
    if log.run.get("names"):
        raise RequestError("its learners are in stages (--parallel), which cannot be replayed; use offbeat simulate")
    spans = sorted(log.spans, key=lambda span: (span.start_s, span.learner))
    computed = [span for span in spans if span.what == "compute" and span.end_s > span.start_s]
    if all(span.cancelled for span in computed):
        raise RequestError("its log has no finished minibatch, so there is nothing to replay")
    rests = [(span.start_s, span.end_s) for span in spans if span.what == "evaluate"]
    own: defaultdict[int, list[Span]] = defaultdict(list)
    for span in computed:
        own[span.learner].append(span)
    reduces = not log.decisions
    said = _decisions(log)
    pushed = pushed_spans(computed, said.pushes)
    sends: defaultdict[int, list[float]] = defaultdict(list)
    if reduces:
        before = _before_reduced(own, rests)
        counts = sorted(span.end_s for span in computed)
    else:
        for push in said.pushes:
            if push.ticket in pushed:
                sends[push.learner].append(push.at_s - computed[pushed[push.ticket]].end_s)
        before = _before_served(own, said, rests)
        counts = sorted(push.at_s for push in said.pushes)
    there_s = _mean([one for some in sends.values() for one in some])
    typical_s = _mean([one.back_s for some in before.values() for one in some if one.back_s is not None])
    starts = {} if reduces else _starts(own, said, rests, typical_s)
    every = _rule(log).push_every if said.pushes else 1
    held = {} if every == 1 else minibatches_by_span(computed, said.decisions, every)
    parts = {computed[place]: many for place, many in held.items()}
    lost = [span for span in computed if span.cancelled]
    lost += [computed[pushed[ticket]] for ticket in said.dropped if ticket in pushed]
    active = _active(computed, counts, rests)
    wait_s, whole_s = _waited(spans, rests, reduces=reduces)
    return Recorded(
        learners=tuple(
            _computed(
                zip(own[learner], before[learner], strict=True),
                parts,
                starts.get(learner),
                typical_s,
                sends.get(learner, ()),
            )
            for learner in sorted(own)
        ),
        numbers=tuple(sorted(own)),
        there_s=there_s,
        active_s=sum(end - start for start, end in active),
        stretches=len(active),
        wait_share=wait_s / whole_s,
        waste_share=sum(span.end_s - span.start_s for span in lost) / whole_s,
        reduces=reduces,
    )


class _Gap(NamedTuple):
    """What came before a minibatch: a way back (None: an evaluation lay in it), and what is its own."""

    back_s: float | None
    gap_s: float = 0.0


def _computed(
    spans: Iterable[tuple[Span, _Gap]],
    parts: Mapping[Span, int],
    starts: Sequence[float] | None,
    typical_s: float,
    sends: Sequence[float],
) -> Computed:
    back: list[float] = []
    seconds: list[float] = []
    cancelled: list[bool] = []
    for span, before in spans:
        many = parts.get(span, 1)
        back.append(typical_s if before.back_s is None else before.back_s)
        seconds += [(before.gap_s + span.end_s - span.start_s) / many] * many
        cancelled += [span.cancelled] * many
    # One way for several minibatches says nothing of which of them it was: each has the mean.
    back_s = np.array(back if len(back) == len(seconds) else [_mean(back)] * len(seconds), np.float64)
    starts_s = np.array(starts, np.float64) if starts else back_s
    return Computed(
        back_s, np.array(seconds, np.float64), tuple(cancelled), starts_s, np.maximum(np.array(sends, np.float64), 0.0)
    )


# --- communication --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LogDecisions:
    """What the log's decisions say."""

    decisions: list[Decision]
    pushes: list[Pushed]
    words: dict[int, list[float]]  # when each learner was told to begin, ascending
    leaves: dict[int, list[float]]  # when each said that it has no samples, or left otherwise
    dropped: list[int]  # tickets


def _decisions(log: RunLog) -> _LogDecisions:
    said = _LogDecisions([], [], defaultdict(list), defaultdict(list), [])
    for number, record in enumerate(log.decisions, start=1):
        try:
            decision = read_decision(record)
        except RequestError as error:
            raise RequestError(f"decision {number} of its log: {error}") from None
        event = decision.event
        said.decisions.append(decision)
        said.dropped.extend(decision.drops)
        if isinstance(event, Pushed):
            said.pushes.append(event)
        elif isinstance(event, Left):
            said.leaves[event.learner].append(event.at_s)
        for command in decision.commands:
            if isinstance(command, Send | Resume):
                said.words[command.learner].append(event.at_s)
    if said.pushes and _rule(log).fetch_every > 0:
        said.words.clear()  # they push and fetch beside computing, and go on without one
    return said


def _rule(log: RunLog) -> LearnerRule:
    line, expect = log.run.get("strategy"), log.run.get("expect")
    if not isinstance(line, str) or not isinstance(expect, int):
        raise RequestError("its log does not name the strategy and the number of learners")
    return create(line, expect=expect).rule


def _before_served(
    own: Mapping[int, list[Span]], said: _LogDecisions, rests: Sequence[Stretch]
) -> dict[int, list[_Gap]]:
    """From the word to begin until a minibatch does.

    Whoever is cancelled is told so with the word to begin anew, so that what stopping takes is in the way back. A
    minibatch that is begun without a word (learners may take steps of their own) has no way: what lies between it and
    the one before is its own.
    """
    found: dict[int, list[_Gap]] = {}
    for learner, some in own.items():
        words = said.words.get(learner, [])
        found[learner] = []
        used_s, ended_s = -math.inf, math.inf  # the latest word that was followed, and the end of the minibatch before
        for span in some:
            place = bisect.bisect_right(words, span.start_s) - 1
            word_s = words[place] if place >= 0 else -math.inf
            new = word_s > used_s
            since_s = word_s if new else ended_s
            lies_between = _straddles(since_s, span.start_s, rests)
            if new:
                found[learner].append(_Gap(None if lies_between else span.start_s - since_s))
            else:
                found[learner].append(_Gap(0.0, 0.0 if lies_between else max(0.0, span.start_s - since_s)))
            used_s, ended_s = word_s, span.end_s
    return found


def _starts(
    own: Mapping[int, list[Span]], said: _LogDecisions, rests: Sequence[Stretch], typical_s: float
) -> dict[int, list[float]]:
    """Of each word to begin, what it took until a minibatch began, or until its learner found that there is none to do.

    Where an evaluation lay between it is not known; where another word came first, it would have taken so long or more.
    """
    found: dict[int, list[float]] = {}
    for learner, some in own.items():
        words, leaves = said.words.get(learner, []), said.leaves.get(learner, [])
        begins = [span.start_s for span in some]
        found[learner] = []
        for word_s, next_s in pairwise([*words, math.inf]):
            begun = bisect.bisect_left(begins, word_s)
            left = bisect.bisect_right(leaves, word_s)  # who has just left may be called back at the same moment
            end_s = min([*begins[begun : begun + 1], *leaves[left : left + 1]], default=math.inf)
            if end_s <= next_s and not _straddles(word_s, end_s, rests) and end_s < math.inf:
                found[learner].append(end_s - word_s)
            elif next_s < math.inf and not _straddles(word_s, next_s, rests):
                found[learner].append(max(typical_s, next_s - word_s))
            else:
                found[learner].append(typical_s)
    return found


def _before_reduced(own: Mapping[int, list[Span]], rests: Sequence[Stretch]) -> dict[int, list[_Gap]]:
    """From when the last learner of the update before had computed: the reduction, the update, and the start."""
    last_s: dict[int, float] = {}  # by version
    for some in own.values():
        for span in some:
            last_s[span.version] = max(last_s.get(span.version, 0.0), span.end_s)

    def gap(span: Span) -> _Gap:
        since_s = last_s.get(span.version - 1)
        if since_s is None or _straddles(since_s, span.start_s, rests):
            return _Gap(None)
        return _Gap(max(0.0, span.start_s - since_s))

    return {learner: [gap(span) for span in some] for learner, some in own.items()}


def _straddles(start_s: float, end_s: float, rests: Sequence[Stretch]) -> bool:
    """Whether a rest (they are in order) lies between, or partly."""
    place = bisect.bisect_right(rests, start_s, key=lambda rest: rest[1])
    return place < len(rests) and rests[place][0] < end_s


def _mean(values: Sequence[float]) -> float:
    """Of all of them: what took long once is a part of the run, as it is of its compute times."""
    return statistics.fmean(values) if values else 0.0


# --- training time --------------------------------------------------------------------------------------------------


def _active(computed: Sequence[Span], counts: Sequence[float], rests: Sequence[Stretch]) -> list[Stretch]:
    """Between rests: from when half of the learners have begun until the last gradient counts. All are in order."""
    bounds = [-math.inf, *(end_s for _, end_s in rests), math.inf]
    found = []
    for start_s, end_s in pairwise(bounds):
        first: dict[int, float] = {}
        place, stop = (bisect.bisect_left(computed, at_s, key=lambda span: span.start_s) for at_s in (start_s, end_s))
        for span in computed[place:stop]:
            first.setdefault(span.learner, span.start_s)
        last = bisect.bisect_left(counts, end_s) - 1
        if first and last >= 0 and counts[last] >= start_s:
            found.append((min(statistics.median(first.values()), counts[last]), counts[last]))
    return found


def _waited(spans: Sequence[Span], rests: Sequence[Stretch], *, reduces: bool) -> tuple[float, float]:
    """Seconds of waiting, and of all. Who is done with an epoch and pauses waits for nobody, as in a simulation.

    A server is waited for from the end of computing on: `send` and `apply` are waiting, and older logs call them so.
    """
    edges = {at_s for rest in rests for at_s in rest}
    seconds = dict.fromkeys(WHAT, 0.0)
    for span in spans:
        if span.what != "wait" or (span.start_s not in edges and span.end_s not in edges):
            seconds[span.what] += span.end_s - span.start_s
    served = 0.0 if reduces else seconds["send"] + seconds["apply"]
    return seconds["wait"] + served, sum(seconds[what] for what in ("compute", "send", "wait", "apply")) or 1.0


# --- the law --------------------------------------------------------------------------------------------------------


def law_of(recorded: Recorded, *, seed: int = 0, ways: bool = False) -> Law:
    """Each learner's minibatches as they were, in their order; with `ways`, each with its way back.

    After the last comes the first again. Fewer learners than were recorded are the first of them. Those beyond take
    them in turn, and each copy begins somewhere else.
    """
    rows = filled(recorded.learners, seed=seed)
    return _in_order([row + one.back_s for row, one in zip(rows, recorded.learners, strict=True)] if ways else rows)


def starts_of(recorded: Recorded) -> Law:
    """What came between a word to begin and the beginning, word by word."""
    return _in_order([one.starts_s for one in recorded.learners])


def sends_of(recorded: Recorded) -> Law:
    """What came between the end of a gradient's computing and the server's knowing of it, push by push."""
    return _in_order([one.sends_s if len(one.sends_s) else np.array([recorded.there_s]) for one in recorded.learners])


def _in_order(rows: Sequence[Floats]) -> Law:
    def at(learners: Ints, minibatches: Ints) -> Floats:
        whose, numbers = np.broadcast_arrays(learners, minibatches)
        found = np.empty(whose.shape)
        for one in np.unique(whose).tolist():
            row, its = rows[one % len(rows)], whose == one
            begin = int(one // len(rows) * _GOLDEN % 1.0 * len(row))
            found[its] = row[(numbers[its] + begin) % len(row)]
        return found

    pool = product_limit(np.concatenate(rows).tolist())
    return Law(
        text="as recorded",
        mean_s=float(np.mean([row.mean() for row in rows])),
        sample=lambda chance: pool.at(chance(COMPUTE)),
        at=at,
    )


def filled(learners: Sequence[Computed], *, seed: int) -> list[Floats]:
    """The seconds of each learner, with whole times for those that were cancelled."""
    pooled = _curve(learners)
    rows = []
    for number, one in enumerate(learners):
        curve = pooled if all(one.cancelled) else _curve([one])
        row = one.seconds.copy()
        for place in np.flatnonzero(one.cancelled).tolist():
            chance = float(uniforms(seed, np.array([number]), np.array([place]), MEASURED)[0])
            row[place] = _longer(curve, float(row[place]), chance)
        rows.append(row)
    return rows


def _curve(learners: Sequence[Computed]) -> Curve:
    finished, cut = (
        np.concatenate([one.seconds[np.array(one.cancelled) == which] for one in learners]).tolist()
        for which in (False, True)
    )
    return product_limit(finished, cut)


def _longer(curve: Curve, time_s: float, chance: float) -> float:
    """A time drawn from those of the curve that are longer; the time itself where there is none."""
    place = int(np.searchsorted(curve.times_s, time_s, side="right"))
    if place == len(curve.times_s):
        return time_s
    passed = float(curve.reached[place - 1]) if place else 0.0
    wanted = passed + chance * (1.0 - passed)
    found = min(max(int(np.searchsorted(curve.reached, wanted)), place), len(curve.times_s) - 1)
    return float(curve.times_s[found])
