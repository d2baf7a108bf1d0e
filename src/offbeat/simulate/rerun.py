"""What a real run's log says of its machine: what each minibatch took, in their order, and what lay between them.

    computed    learner i's n-th minibatch took so long; `law` gives the same again, in the same order
    way         from a gradient that is computed to the next minibatch: to the server and back, or a reduction and the
                update
    ends        what the ends of epochs take beside it: all come to rest, and begin again

A minibatch that was cancelled after c seconds would have taken longer. It is given a time that is drawn from the times
of its learner that are longer than c (Kaplan and Meier 1958, see `recorded`), always the same for a seed; where nothing
longer was seen, c itself.

Laws. Evaluations are no part of a training's time, and what straddles one is left out. Who waits for others (at a
barrier) is not on a way: a way begins when the policy or the last learner lets go. The same log gives the same numbers.

What it must not know: torch, configurations, and which strategies a replay asks for.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from offbeat.errors import RequestError
from offbeat.policies import Drop, Pushed, Resume, Send, create
from offbeat.policies.events import EVENTS, from_text
from offbeat.simulate.compute import Law
from offbeat.simulate.engine import COMPUTE, MEASURED, Floats, Ints, uniforms
from offbeat.simulate.recorded import Curve, product_limit
from offbeat.trace import WHAT, RunLog, Span

MOSTLY = 0.5  # of a learner's minibatches: where more were cancelled, its times are uncertain
_GOLDEN = (math.sqrt(5) - 1) / 2  # copies of a learner begin at places that are spread over its minibatches
Stretch = tuple[float, float]


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """The minibatches of one learner, in their order: seconds, and which were cancelled after so long."""

    seconds: Floats
    cancelled: tuple[bool, ...]

    @property
    def share_cancelled(self) -> float:
        return sum(self.cancelled) / len(self.cancelled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Seconds, on average: `there_s` from a gradient to where it counts, `back_s` from there to the next minibatch."""

    there_s: float
    back_s: float

    @property
    def whole_s(self) -> float:
        return self.there_s + self.back_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Of the learners' time: waiting, and computing what was cancelled or dropped."""

    wait: float
    waste: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """A run's log, read. `learners` has one entry for each that computed anything, in the order of their numbers."""

    learners: tuple[Computed, ...]
    way: Way
    active_s: float  # in which gradients were computed, from the first minibatch of an epoch to its last gradient
    stretches: int  # of it, between rests
    shares: Shares
    reduces: bool  # by an all-reduce

    @property
    def minibatches(self) -> int:
        return sum(len(one.seconds) for one in self.learners)

    @property
    def cancelled(self) -> int:
        return sum(sum(one.cancelled) for one in self.learners)

    def ends_s(self, seconds: float) -> float:
        """What ends of epochs took of a training of so many seconds; a simulation has their ways, and nothing else."""
        begins_s = self.way.whole_s * (1.0 if self.reduces else 0.5)
        return max(0.0, seconds - self.active_s - self.stretches * begins_s)


def read_recorded(log: RunLog) -> Recorded:
    """`RequestError` where the log is not one of a real run that has computed something."""
    if log.run.get("simulated") is not False:
        raise RequestError(
            "it was trained in virtual time, and has no compute times of its own: offbeat simulate gives it exactly"
        )
    spans = sorted(log.spans, key=lambda span: (span.start_s, span.learner))
    computed = [span for span in spans if span.what == "compute" and span.end_s > span.start_s]
    if all(span.cancelled for span in computed):
        raise RequestError("its log has no minibatch that was computed to the end: there is nothing to replay")
    rests = [(span.start_s, span.end_s) for span in spans if span.what == "evaluate"]
    own: defaultdict[int, list[Span]] = defaultdict(list)
    for span in computed:
        own[span.learner].append(span)
    reduces = not log.decisions
    said = _decisions(log)
    gaps: dict[int, list[float]] = {}
    if reduces:
        way = _reduced_way(own, rests)
        counts = sorted(span.end_s for span in computed)
    else:
        way, gaps = _served_way(own, said, rests)
        counts = sorted(event.at_s for event in said.pushes)
    active = _active(computed, counts, rests)
    return Recorded(
        learners=tuple(_computed(some, gaps.get(learner)) for learner, some in sorted(own.items())),
        way=way,
        active_s=sum(end - start for start, end in active),
        stretches=len(active),
        shares=_shares(spans, own, [event for event in said.pushes if event.ticket in said.dropped], rests),
        reduces=reduces,
    )


def _computed(spans: Sequence[Span], gaps: Sequence[float] | None) -> Computed:
    before = gaps or [0.0] * len(spans)
    seconds = [gap + span.end_s - span.start_s for gap, span in zip(before, spans, strict=True)]
    return Computed(np.array(seconds, np.float64), tuple(span.cancelled for span in spans))


# --- communication --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Said:
    """What the log's decisions say."""

    pushes: list[Pushed]
    words: dict[int, list[float]]  # when each learner was told to begin, ascending
    dropped: set[int]  # tickets


def _decisions(log: RunLog) -> _Said:
    said = _Said([], defaultdict(list), set())
    for number, record in enumerate(log.decisions, start=1):
        try:
            event = from_text(str(record.get("event")))
            commands = [from_text(str(one)) for one in record.get("commands", ())]
        except RequestError as error:
            raise RequestError(f"decision {number} of its log: {error}") from None
        if isinstance(event, Pushed):
            said.pushes.append(event)
        for command in commands:
            if isinstance(command, Drop):
                said.dropped.add(command.ticket)
            elif isinstance(command, Send | Resume) and isinstance(event, EVENTS):
                said.words[command.learner].append(event.at_s)
    if _never_waits(log):
        said.words.clear()  # they go on without one
    return said


def _never_waits(log: RunLog) -> bool:
    """Whether learners push and fetch beside computing."""
    line, expect = log.run.get("strategy"), log.run.get("expect")
    if not isinstance(line, str) or not isinstance(expect, int) or not log.decisions:
        return False
    return create(line, expect=expect).rule.fetch_every > 0


def _served_way(
    own: Mapping[int, list[Span]], said: _Said, rests: Sequence[Stretch]
) -> tuple[Way, dict[int, list[float]]]:
    """There: from the end of a minibatch until its push is known. Back: from the word to begin until a minibatch does.

    Whoever is cancelled is told so with the word to begin anew, so that what stopping takes is in the way back. A
    minibatch that is begun without a word (learners may take steps of their own) is on no way: what lies between it and
    the one before is its own. These gaps are given too, for each minibatch.
    """
    there = [event.at_s - span.end_s for event in said.pushes if (span := _pushed_span(own, event)) is not None]
    back: list[float] = []
    gaps: dict[int, list[float]] = {}
    for learner, some in own.items():
        words = said.words.get(learner, [])
        gaps[learner] = []
        used_s, ended_s = -math.inf, math.inf  # the latest word that was followed, and the end of the minibatch before
        for span in some:
            place = bisect.bisect_right(words, span.start_s) - 1
            word_s = words[place] if place >= 0 else -math.inf
            new = word_s > used_s
            since_s = word_s if new else ended_s
            between_s = 0.0 if _straddles(since_s, span.start_s, rests) else max(0.0, span.start_s - since_s)
            if new and between_s:
                back.append(between_s)
            gaps[learner].append(0.0 if new else between_s)
            used_s, ended_s = word_s, span.end_s
    there_s = _mean(there)
    return Way(there_s=there_s, back_s=_mean(back) if back else there_s), gaps


def _pushed_span(own: Mapping[int, list[Span]], event: Pushed) -> Span | None:
    """The minibatch that a push is of, the last one of several."""
    some = own.get(event.learner, [])
    place = bisect.bisect_right(some, event.at_s, key=lambda span: span.end_s) - 1
    return some[place] if place >= 0 and not some[place].cancelled else None


def _reduced_way(own: Mapping[int, list[Span]], rests: Sequence[Stretch]) -> Way:
    """From when the last learner of an update has computed until learners begin the next minibatch, on average."""
    updates: defaultdict[int, list[Span]] = defaultdict(list)
    for some in own.values():
        for span in some:
            updates[span.version].append(span)
    ways = []
    for version, some in sorted(updates.items()):
        last_s = max(span.end_s for span in some)
        starts = [span.start_s for span in updates.get(version + 1, ())]
        if starts and not _straddles(last_s, max(starts), rests):
            ways.append(statistics.fmean(starts) - last_s)
    return Way(there_s=max(0.0, _mean(ways)), back_s=0.0)


def _straddles(start_s: float, end_s: float, rests: Sequence[Stretch]) -> bool:
    """Whether a rest (they are in order) lies between, or partly."""
    place = bisect.bisect_right(rests, start_s, key=lambda rest: rest[1])
    return place < len(rests) and rests[place][0] < end_s


def _mean(values: Sequence[float]) -> float:
    """Of all of them: what took long once is a part of the run, as it is of its compute times."""
    return statistics.fmean(values) if values else 0.0


# --- training time --------------------------------------------------------------------------------------------------


def _active(computed: Sequence[Span], counts: Sequence[float], rests: Sequence[Stretch]) -> list[Stretch]:
    """Between rests: from when learners begin, on average, until the last gradient counts. All are in order."""
    bounds = [-math.inf, *(end_s for _, end_s in rests), math.inf]
    found = []
    for start_s, end_s in pairwise(bounds):
        first: dict[int, float] = {}
        place, stop = (bisect.bisect_left(computed, at_s, key=lambda span: span.start_s) for at_s in (start_s, end_s))
        for span in computed[place:stop]:
            first.setdefault(span.learner, span.start_s)
        last = bisect.bisect_left(counts, end_s) - 1
        if first and last >= 0 and counts[last] >= start_s:
            found.append((min(statistics.fmean(first.values()), counts[last]), counts[last]))
    return found


def _shares(
    spans: Sequence[Span], own: Mapping[int, list[Span]], dropped: Sequence[Pushed], rests: Sequence[Stretch]
) -> Shares:
    """Who is done with an epoch and comes to rest waits for nobody, as in a simulation."""
    edges = {at_s for rest in rests for at_s in rest}
    seconds = dict.fromkeys(WHAT, 0.0)
    for span in spans:
        if span.what != "wait" or (span.start_s not in edges and span.end_s not in edges):
            seconds[span.what] += span.end_s - span.start_s
    lost = [span for some in own.values() for span in some if span.cancelled]
    lost += [late for event in dropped if (late := _pushed_span(own, event)) is not None]
    whole = seconds["compute"] + seconds["wait"] + seconds["apply"] or 1.0
    return Shares(wait=seconds["wait"] / whole, waste=sum(span.end_s - span.start_s for span in lost) / whole)


# --- the law --------------------------------------------------------------------------------------------------------


def law_of(recorded: Recorded, *, seed: int = 0) -> Law:
    """Each learner's minibatches as they were, in their order; after the last comes the first again.

    Learners beyond those that were recorded take them in turn, and each copy begins somewhere else.
    """
    rows = filled(recorded.learners, seed)
    pool = np.concatenate(rows)

    def at(learners: Ints, minibatches: Ints) -> Floats:
        whose, numbers = np.broadcast_arrays(learners, minibatches)
        found = np.empty(whose.shape)
        for one in np.unique(whose).tolist():
            row = rows[one % len(rows)]
            begin = int(one // len(rows) * _GOLDEN % 1.0 * len(row))
            found[whose == one] = row[(numbers[whose == one] + begin) % len(row)]
        return found

    curve = product_limit(pool.tolist())
    return Law(
        text="as recorded",
        mean_s=float(np.mean([row.mean() for row in rows])),
        sample=lambda chance: curve.at(chance(COMPUTE)),
        at=at,
    )


def filled(learners: Sequence[Computed], seed: int) -> list[Floats]:
    """The seconds of each learner, with whole times for those that were cancelled."""
    pooled = _curve([time for one in learners for time in zip(one.seconds.tolist(), one.cancelled, strict=True)])
    rows = []
    for number, one in enumerate(learners):
        times = list(zip(one.seconds.tolist(), one.cancelled, strict=True))
        curve = pooled if all(one.cancelled) else _curve(times)
        chance = uniforms(seed, np.array([number]), np.arange(len(times)), MEASURED)
        rows.append(
            np.array(
                [_longer(curve, time, float(u)) if cut else time for (time, cut), u in zip(times, chance, strict=True)]
            )
        )
    return rows


def _curve(times: Sequence[tuple[float, bool]]) -> Curve:
    return product_limit([time for time, cut in times if not cut], [time for time, cut in times if cut])


def _longer(curve: Curve, time_s: float, chance: float) -> float:
    """A time drawn from those of the curve that are longer; the time itself where there is none."""
    place = int(np.searchsorted(curve.times_s, time_s, side="right"))
    if place == len(curve.times_s):
        return time_s
    passed = float(curve.reached[place - 1]) if place else 0.0
    wanted = passed + chance * (1.0 - passed)
    found = min(max(int(np.searchsorted(curve.reached, wanted)), place), len(curve.times_s) - 1)
    return float(curve.times_s[found])
