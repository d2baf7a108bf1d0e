"""How far a training run is, by what its learners told: the state behind what `offbeat train` shows.

Records are plain mappings, told apart by `kind`: begin, progress, evaluated, saved, note, died, end, energy. Laws:
what a record leaves out, or gives as None, is not guessed; how much is done never falls; a learner that was started
again counts on from where it was. Nothing here draws, sleeps or knows a terminal; the clock is given.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Record = Mapping[str, Any]

WINDOW_S = 5.0  # rates and shares are those of the last seconds
HALF_LIFE_S = 0.5  # of the smoothed loss
TRAIL = 128  # most points of the loss that are kept; then every second one goes


class _Point(NamedTuple):
    at: float
    samples: int
    compute_s: float
    wait_s: float


def _smooth(old: float | None, new: float, passed_s: float) -> float:
    if old is None or not math.isfinite(old) or not math.isfinite(new):
        return new  # a NaN is shown at once and forgotten at once
    keep = math.pow(0.5, passed_s / HALF_LIFE_S)
    return keep * old + (1 - keep) * new


@dataclass(slots=True)
class LearnerProgress:
    """One learner, as far as it has told."""

    learner: int
    loss: float | None = None  # smoothed
    died: bool = False
    _before: int = 0  # samples of its earlier lives
    _points: deque[_Point] = field(default_factory=deque)

    @property
    def samples(self) -> int:
        return self._before + (self._points[-1].samples if self._points else 0)

    def hear(self, record: Record, now: float) -> None:
        last = self._points[-1] if self._points else None
        point = _Point(now, record["samples"], record.get("compute_s") or 0.0, record.get("wait_s") or 0.0)
        if last is not None and point.samples < last.samples:  # it was started again, and counts from nothing
            self._before += last.samples
            self._points.clear()
        if record.get("loss") is not None:
            self.loss = _smooth(self.loss, record["loss"], 0.0 if last is None else now - last.at)
        self._points.append(point)
        while len(self._points) > 2 and now - self._points[1].at >= WINDOW_S:
            self._points.popleft()
        self.died = False

    def samples_per_s(self, now: float) -> float | None:
        """Of the last seconds; 0 when nothing was heard in them."""
        if len(self._points) < 2:
            return None
        first, last = self._points[0], self._points[-1]
        if self.died or now - last.at > WINDOW_S:
            return 0.0
        return (last.samples - first.samples) / (last.at - first.at) if last.at > first.at else None

    def times(self) -> tuple[float, float]:
        """Seconds of computing and of waiting, of the last seconds where that can be said."""
        if not self._points:
            return 0.0, 0.0
        last = self._points[-1]
        first = self._points[0] if len(self._points) > 1 else _Point(0.0, 0, 0.0, 0.0)
        return last.compute_s - first.compute_s, last.wait_s - first.wait_s

    def wait_share(self) -> float | None:
        return _share(*self.times())


def _share(compute_s: float, wait_s: float) -> float | None:
    return wait_s / (compute_s + wait_s) if compute_s + wait_s > 0 else None


class Progress:
    """What the records said so far. It draws nothing; `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._start({}, clock())

    def _start(self, record: Record, now: float) -> None:
        self.begin: Record = record
        self.epochs: int = record.get("epochs") or 0
        self.epoch_samples: int = record.get("samples") or 0
        self.began = now
        self.names: list[str] = record.get("names") or []  # of processes, where a learner has several
        self.hosts: list[str] = record.get("hosts") or []  # of each learner, where there are several
        many = len(self.names) or record.get("learners") or 0
        self.rows = {learner: LearnerProgress(learner) for learner in range(many)}
        self.evaluations: list[Record] = []
        self.saved: Record | None = None
        self.end: Record | None = None
        self.energy: Record = {}
        self.trail: list[float] = []  # of the loss
        self._trail_every_s, self._trail_next = 0.5, now
        self.reached = self._first = record.get("epoch") or 0  # epochs that are over
        self._before = 0  # samples of all learners when that epoch began
        self._done = self.reached * self.epoch_samples
        self._moving: tuple[float, int] | None = None  # when the first progress was heard, and what was done then

    def hear(self, record: Record) -> None:
        """Unknown kinds are passed over: a newer learner may say more."""
        now = self.clock()
        match record["kind"]:
            case "begin":
                self._start(record, now)
            case "progress":
                self._hear_progress(record, now)
            case "evaluated":
                self.evaluations.append(record)
                self.hosts = record.get("learner_hosts") or self.hosts
                self._reach(record.get("epoch") or 0)
            case "saved":
                self.saved = record
            case "energy":
                self.energy = record
            case "died" if record.get("learner") is not None:
                self._row(record["learner"]).died = True
            case "end":
                self.end = record
                if not record.get("stopped"):
                    self._reach(self.epochs)

    def _row(self, learner: int) -> LearnerProgress:
        return self.rows.setdefault(learner, LearnerProgress(learner))

    def _hear_progress(self, record: Record, now: float) -> None:
        self._reach(record.get("epoch") or 0)
        self._row(record["learner"]).hear(record, now)
        # Samples that were dropped or computed again would count twice: an epoch's own bounds hold.
        within = min(max(self.samples - self._before, 0), self.epoch_samples)
        self._done = max(self._done, self.reached * self.epoch_samples + within)
        if self._moving is None:
            self._moving = (now, self._done)
        loss = self.loss
        if loss is not None and math.isfinite(loss) and now >= self._trail_next:
            self.trail.append(loss)
            if len(self.trail) >= TRAIL:
                self.trail = self.trail[::2]
                self._trail_every_s *= 2
            self._trail_next = now + self._trail_every_s

    def _reach(self, epoch: int) -> None:
        if epoch > self.reached:
            self.reached = epoch
            self._before = self.samples
            self._done = max(self._done, epoch * self.epoch_samples)

    @property
    def epoch(self) -> int:
        """The one under way, counted from 1."""
        return min(self.reached + 1, self.epochs)

    def name_of(self, learner: int) -> str:
        return self.names[learner] if learner < len(self.names) else str(learner)

    def host_of(self, learner: int) -> str:
        return self.hosts[learner] if learner < len(self.hosts) else ""

    def by_host(self, learner: int) -> tuple[int, int]:
        """A key that puts the learners of a host together."""
        host = self.host_of(learner)
        return (self.hosts.index(host) if host else 0, learner)

    @property
    def samples(self) -> int:
        """Of all learners, since they were started."""
        return sum(row.samples for row in self.rows.values())

    @property
    def done(self) -> float:
        """Between 0 and 1. It never falls."""
        whole = self.epochs * self.epoch_samples
        return min(self._done / whole, 1.0) if whole else 0.0

    @property
    def done_of_epoch(self) -> float:
        return min(max(self._done / self.epoch_samples - self.reached, 0.0), 1.0) if self.epoch_samples else 0.0

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.began

    @property
    def left_s(self) -> float | None:
        """At the pace since the first sample, evaluations included; None before anything can be said."""
        if self._moving is None:
            return None
        since, then = self._moving
        passed, made = self.clock() - since, self._done - then
        left = self.epochs * self.epoch_samples - self._done
        return left * passed / made if made > 0 and passed >= 1.0 else None

    @property
    def loss(self) -> float | None:
        known = [row.loss for row in self.rows.values() if row.loss is not None and not row.died]
        return sum(known) / len(known) if known else None

    @property
    def samples_per_s(self) -> float | None:
        now = self.clock()
        known = [rate for row in self.rows.values() if (rate := row.samples_per_s(now)) is not None]
        return sum(known) if known else None

    @property
    def wait_share(self) -> float | None:
        times = [row.times() for row in self.rows.values()]
        return _share(sum(compute for compute, _ in times), sum(wait for _, wait in times))

    @property
    def best(self) -> Record | None:
        """The evaluation with the highest accuracy, the first of equal ones."""
        known = [record for record in self.evaluations if record.get("accuracy") is not None]
        return max(known, key=lambda record: record["accuracy"]) if known else None

    def last(self, name: str) -> Any:
        return self.evaluations[-1].get(name) if self.evaluations else None
