"""Cores that learners and servers of one machine share, in turns.

With four learners on two cores two compute, and the others wait for a core; with long work they take turns. Work is
given in seconds of one core. Delays are no work: who sleeps takes nobody's core.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.errors import RequestError
from offbeat.simulate.compute import Law

SLICE_S = 0.003  # for which Linux lets a process compute while others wait, about
_LEAST_S = 1e-12  # what is less than this is nothing: times are sums of floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """What a machine has, and what is to be done on it; the cluster's own law is then of delays beside it."""

    count: float
    law: Law  # of a minibatch, seconds of one core
    push_s: float = 0.0  # from a learner's gradient to the policy
    fetch_s: float = 0.0  # from the policy's answer to weights at a learner
    behind_s: float = 0.0  # for each gradient, while nobody waits for it
    update_s: float = 0.0  # for each update, the same

    def __post_init__(self) -> None:
        works = (self.push_s, self.fetch_s, self.behind_s, self.update_s)
        if not 0 < self.count < math.inf or not all(0 <= work < math.inf for work in works):
            raise RequestError(f"cores must be above 0, and work must be 0 or more; got {self.count} and {works}")


class Job(NamedTuple):
    """What comes when the work is done: an entry of the heap, less its time; nothing where the kind is None.

    Short work that somebody wakes up for, a message, does not wait behind minibatches (`urgent`).
    """

    kind: int | None
    learner: int
    number: int
    urgent: bool = False


@dataclass(slots=True)
class _Task:
    job: Job
    left_s: float
    since_s: float = 0.0  # it has a core


class CoreScheduler:
    """Jobs under way on the cores, in turns of `SLICE_S`, as an operating system shares them out.

    Work that is shorter than a slice is done in one piece, first come, first served; longer work goes on in turns,
    which with many turns is an equal share for all.
    """

    def __init__(self, count: float) -> None:
        self._count = max(1, int(count))
        self._running: dict[int, _Task] = {}
        self._waiting: dict[int, _Task] = {}  # in the order in which they get a core
        self._started = 0

    def __len__(self) -> int:
        """Jobs under way."""
        return len(self._running) + len(self._waiting)

    def start(self, now_s: float, work_s: float, job: Job) -> int:
        """The number under which it can be given up."""
        self._started += 1
        task = _Task(job, work_s)
        if job.urgent:
            self._queue(self._started, task)
            lazy = [one for one, other in self._running.items() if not other.job.urgent]
            if len(self._running) >= self._count and lazy:
                self._take_back(now_s, min(lazy, key=lambda one: self._running[one].since_s), first=True)
        else:
            self._waiting[self._started] = task
        self._hand_out(now_s)
        return self._started

    def give_up(self, now_s: float, number: int) -> Job | None:
        """What was under way, if it was."""
        task = self._running.pop(number, None) or self._waiting.pop(number, None)
        self._hand_out(now_s)
        return None if task is None else task.job

    def finish(self, now_s: float) -> list[Job]:
        """What is done by now; others take their turns."""
        done = []
        for number, task in list(self._running.items()):
            if task.since_s + task.left_s <= now_s + _LEAST_S:
                done.append(task.job)
                del self._running[number]
        if self._waiting:
            for number, task in list(self._running.items()):
                if now_s - task.since_s >= SLICE_S - _LEAST_S:
                    self._take_back(now_s, number, first=False)
        self._hand_out(now_s)
        return done

    def next_end_s(self) -> float:
        """When something is done, or it is another one's turn; infinity when there is nothing to do."""
        slice_s = SLICE_S if self._waiting else math.inf
        return min((task.since_s + min(task.left_s, slice_s) for task in self._running.values()), default=math.inf)

    def _take_back(self, now_s: float, number: int, *, first: bool) -> None:
        task = self._running.pop(number)
        task.left_s = max(0.0, task.left_s - (now_s - task.since_s))
        if first or task.job.urgent:
            self._queue(number, task)
        else:
            self._waiting[number] = task

    def _queue(self, number: int, task: _Task) -> None:
        """Behind what is urgent, and before the rest."""
        urgent = {one: other for one, other in self._waiting.items() if other.job.urgent}
        rest = {one: other for one, other in self._waiting.items() if not other.job.urgent}
        self._waiting = {**urgent, number: task, **rest}

    def _hand_out(self, now_s: float) -> None:
        while self._waiting and len(self._running) < self._count:
            number = next(iter(self._waiting))
            task = self._waiting.pop(number)
            task.since_s = now_s
            self._running[number] = task


def shared_s(works_s: Sequence[float], count: float) -> list[float]:
    """When each ends, if all begin together."""
    scheduler = CoreScheduler(count)
    for number, work_s in enumerate(works_s):
        scheduler.start(0.0, work_s, Job(None, number, 0))
    ends = [0.0] * len(works_s)
    while (now := scheduler.next_end_s()) < math.inf:
        for job in scheduler.finish(now):
            ends[job.learner] = now
    return ends
