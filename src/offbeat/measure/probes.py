"""Short real trainings, and what their logs say of the machine: the probes of a calibration.

A ring, and an asynchronous one with a server (`async`: all learners compute all the time), each with 1, 2, ...
learners; and `full-sync` with most of them, which has fewer updates.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from offbeat.errors import OffbeatError
from offbeat.measure.trainings import Trained, train_for
from offbeat.predict.calibration import Probe
from offbeat.runs.log import Span
from offbeat.strategy import ALL_REDUCE, family_of
from offbeat.train.config import Config
from offbeat.train.config_files import changed

MOST_TIMES = 400  # compute times of a probe that are written down
_OUTLIERS = 0.02  # of the waits, the longest: something else ran


def probe(config: Config, line: str, learners: int, samples: int, folder: Path) -> Probe:
    """Train so long that each learner has computed enough."""
    asked = changed(config, {"sync": line, "learners": learners, "slow": ()})
    return probe_of(train_for(asked, samples, folder), line, learners)


def probe_of(trained: Trained, line: str, learners: int) -> Probe:
    """What a run's log says, less its first stretch, in which all is slower."""
    spans = _settled(trained.log.spans)
    computed = [span for span in spans if span.what == "compute" and not span.cancelled]
    if not computed:
        raise OffbeatError("bench: a probe has computed nothing")
    there_s, back_s = (_reduced if family_of(line) == ALL_REDUCE else _served)(spans, trained.seconds_per_update)
    return Probe(
        line=line,
        learners=learners,
        update_s=trained.seconds_per_update,
        compute_s=_thinned([span.end_s - span.start_s for span in computed]),
        there_s=there_s,
        back_s=back_s,
    )


def _settled(spans: Iterable[Span]) -> list[Span]:
    """What came after the first evaluation."""
    ordered = sorted(spans, key=lambda span: span.start_s)
    first = next((span.end_s for span in ordered if span.what == "evaluate"), 0.0)
    after = [span for span in ordered if span.start_s >= first]
    return after if any(span.what == "compute" for span in after) else ordered


def _served(spans: Sequence[Span], update_s: float) -> tuple[float, float]:
    """From the end of computing to the next minibatch, half and half; waits at a rest are another thing.

    A rest leaves a hole between the spans, or an evaluation in it.
    """
    waits: list[float] = []
    for own in _by_learner(spans).values():
        ended_s: float | None = None  # of the span before
        since_s: float | None = None  # the end of the last minibatch, if no rest came after it
        for span in own:
            since_s = None if span.what == "evaluate" or span.start_s != ended_s else since_s
            ended_s = span.end_s
            if span.what == "compute":
                waits += [] if since_s is None else [span.start_s - since_s]
                since_s = span.end_s
    if not waits:
        raise OffbeatError("bench: a probe with a server has waited for nothing")
    whole = _mean(waits)
    return whole / 2, whole / 2


def _reduced(spans: Sequence[Span], update_s: float) -> tuple[float, float]:
    """What the last learner to finish waits for is the reduction; the update is what an iteration takes beside that and
    the computing, from the first who begins to the last who ends."""
    waits: defaultdict[int, list[float]] = defaultdict(list)
    computed: defaultdict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.what == "wait":
            waits[span.version].append(span.end_s - span.start_s)
        elif span.what == "compute":
            computed[span.version].append(span)
    there_s = _mean([min(some) for some in waits.values()]) if waits else 0.0
    computing_s = statistics.fmean(
        max(span.end_s for span in some) - min(span.start_s for span in some) for some in computed.values()
    )
    return there_s, max(0.0, update_s - computing_s - there_s)


def _by_learner(spans: Sequence[Span]) -> dict[int, list[Span]]:
    found: defaultdict[int, list[Span]] = defaultdict(list)
    for span in spans:
        found[span.learner].append(span)
    return found


def _mean(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return statistics.fmean(ordered[: max(1, math.ceil(len(ordered) * (1 - _OUTLIERS)))])


def _thinned(values: Sequence[float]) -> tuple[float, ...]:
    """At most so many, evenly taken from the sorted ones: the same law."""
    ordered = sorted(values)
    if len(ordered) <= MOST_TIMES:
        return tuple(ordered)
    cuts = [number * len(ordered) // MOST_TIMES for number in range(MOST_TIMES + 1)]
    return tuple(statistics.fmean(ordered[start:end]) for start, end in pairwise(cuts))
