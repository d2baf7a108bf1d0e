"""Compute times of a run that really happened, as a law to draw from.

A recording is the folder of a run, the log of a run, or a file with a number of seconds a line. From a run each
learner has times of its own, so that one that was slow stays slow; numbers in a file are one pool for all.

A minibatch that was cancelled after 2 s says only that it would have taken longer than 2 s. To leave it out would make
the learners faster than they were, since k-sync keeps the fastest minibatches and cancels the rest; and so would
taking 2 s for the whole of it. The estimate of Kaplan and Meier 1958 ("Nonparametric Estimation from Incomplete
Observations", the product limit) uses it for what it says: after 2 s it was one of those that had not finished.
Where most of a learner's minibatches were cancelled its longest times rest on the few that were let run, so a recording
of a strategy that cancels nothing (async, full-sync, ring) tells more.

What it must not know: the clock, and how many learners a simulation has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offbeat.errors import LogError, RequestError
from offbeat.runs.log import Span, read_log
from offbeat.runs.run_folder import RunDir
from offbeat.simulate.engine import Floats, Ints
from offbeat.spec import parse_seconds


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """How likely a minibatch is to take at most so long: it reaches `reached[i]` at `times_s[i]`, both ascending."""

    times_s: Floats
    reached: Floats

    @property
    def mean_s(self) -> float:
        return float(self.times_s @ np.diff(self.reached, prepend=0.0))

    def at(self, chance: Floats) -> Floats:
        """For each number between 0 and 1 the least time at which the curve has reached it."""
        return self.times_s[np.searchsorted(self.reached, chance)]


def product_limit(finished: Sequence[float], cancelled: Sequence[float] = ()) -> Curve:
    """The estimate of Kaplan and Meier 1958 from times that are whole, and times that were cut off; one or more.

    The mass of a time that was cut off goes, in equal parts, to all longer ones (Efron 1967, "The Two Sample Problem
    with Censored Data", who shows that this is the same). What nothing longer is there to take goes to the longest time
    seen, even if that one was cut off: Efron's convention. It would have taken longer, so where the longest are cut off
    the mean comes out too small. Where nothing was cut off each time is as likely as any other.
    """
    times = np.array([*finished, *cancelled], np.float64)
    whole = np.arange(len(times)) < len(finished)
    order = np.lexsort((~whole, times))  # at the same time, what finished comes first: the other one takes longer
    times, whole = times[order], whole[order]
    whole[-1] = True  # Efron's convention
    left = np.arange(len(times))[::-1]  # how many come after it
    passed_on = np.where(whole, 1.0, (left + 1) / np.maximum(left, 1))  # by how much the masses after it grow
    beyond = left / len(times) * np.cumprod(passed_on)
    return Curve(times[whole], 1.0 - beyond[whole])


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """The curves of the learners that were recorded, in the order of their numbers, and that of all together."""

    curves: tuple[Curve, ...]
    pooled: Curve

    @property
    def mean_s(self) -> float:
        return float(np.mean([curve.mean_s for curve in self.curves]))

    def at(self, learners: Ints, chance: Floats) -> Floats:
        """A time for each number between 0 and 1; the rows are of these learners.

        If there are more learners than recorded ones, they take them in turn.
        """
        times = np.empty_like(chance)
        whose = learners % len(self.curves)
        for recorded in np.unique(whose).tolist():
            rows = whose == recorded
            times[rows] = self.curves[recorded].at(chance[rows])
        return times


def read_recording(path: Path) -> Recording:
    """Read a run's folder, a run's log or a file of numbers; a `RequestError` says what is wrong with it."""
    logs = [log.path for log in RunDir(path).logs() if log.finished]
    if path.is_dir() and not logs:
        raise RequestError(f"{path} holds no log.jsonl: expected the folder of a run that has ended, or a file")
    try:
        text = "" if logs else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise RequestError(f"cannot read the samples {path}: {reason}") from None
    if logs or text.startswith("{"):
        try:
            return _of_spans(path, [span for log in logs or [path] for span in read_log(log).spans])
        except LogError as error:
            raise RequestError(str(error)) from None
    times = [time for line in text.split() if (time := parse_seconds(line)) > 0]
    if not times:
        raise _nothing(path)
    pool = product_limit(times)
    return Recording((pool,), pool)


def _of_spans(path: Path, spans: Iterable[Span]) -> Recording:
    """One curve for each learner up to the last; one that never finished a minibatch gets that of all together.

    What it takes is not known, only that it is longer than what was seen of it: the pool is the best there is, and
    probably too fast. A span without length is left out: what was cancelled before it began says nothing.
    """
    finished: defaultdict[int, list[float]] = defaultdict(list)
    cancelled: defaultdict[int, list[float]] = defaultdict(list)
    for span in spans:
        if span.what == "compute" and span.end_s > span.start_s:
            (cancelled if span.cancelled else finished)[span.learner].append(span.end_s - span.start_s)
    if not finished:
        raise _nothing(path)
    pooled = product_limit(*([time for times in kind.values() for time in times] for kind in (finished, cancelled)))
    return Recording(
        tuple(
            product_limit(finished[learner], cancelled.get(learner, ())) if learner in finished else pooled
            for learner in range(max([*finished, *cancelled]) + 1)
        ),
        pooled,
    )


def _nothing(path: Path) -> RequestError:
    return RequestError(
        f"{path} holds no compute times; expected one number of seconds per line, or a run with finished compute spans"
    )
