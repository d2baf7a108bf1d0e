"""Who makes progress: learners note what they do in memory that they share with their launcher, which looks at it.

    ProgressBoard   for each learner: what it does now, its minibatches, and a count that changes with every note
    Watchdog        says who has noted nothing for too long, measured by what it took before
    StackFiles      where learners write the stacks of their threads when they are asked to

Laws. A heartbeat is no progress: only a learner's own thread notes anything. A learner that waits for others is not to
blame, however long it takes. Time in which nobody looked (a stopped or suspended machine) does not count. A learner may
take 60 times its usual minibatch and 5 times its longest silence, and never less than `least_s`.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from offbeat.processes.signals import STACKS, write_stacks_on_signal


class Phase(IntEnum):
    """What a learner does."""

    STARTING = 0
    READING = 1  # its samples
    COMPUTING = 2  # a minibatch
    WAITING = 3  # for others
    LEADING = 4  # a pause: it evaluates, or saves
    ENDED = 5


USUAL, LONGEST = 60.0, 5.0  # so many times a usual minibatch, and the longest silence in the same phase
# Times the least, in phases of which there is no measure before they come.
_PATIENCE = {Phase.STARTING: 20.0, Phase.LEADING: 10.0, Phase.ENDED: 10.0}
_AT_ONCE_S = 1.0  # at most so much passes between two looks, whatever the clock says
_WORDS = 3
_WITHIN_S = 1.0  # for a learner to write its stacks
_WORK = (Phase.READING, Phase.COMPUTING)


class ProgressBoard:
    """Three words for each learner, in memory that forks share."""

    def __init__(self, learners: int) -> None:
        self._words = memoryview(mmap.mmap(-1, max(1, learners) * _WORDS * 8)).cast("Q")

    def note(self, learner: int, phase: Phase) -> None:
        """By the learner: from now on it does this. Each `COMPUTING` is a minibatch."""
        at = _WORDS * learner
        self._words[at + 1] = phase
        if phase is Phase.COMPUTING:
            self._words[at + 2] += 1
        self._words[at] += 1

    def clear(self, learner: int) -> None:
        """Another process takes its place."""
        at = _WORDS * learner
        self._words[at + 1] = Phase.STARTING
        self._words[at] += 1

    def read(self, learner: int) -> tuple[int, Phase, int]:
        """How often it has noted something, what it does, and its minibatches."""
        at = _WORDS * learner
        return self._words[at], Phase(self._words[at + 1]), self._words[at + 2]


class Silence(NamedTuple):
    """A learner has made no progress for too long."""

    learner: int
    phase: Phase
    seconds: float
    usual_s: float | None  # that a minibatch takes
    stopped: bool

    def __str__(self) -> str:
        if self.stopped:
            return f"has been stopped (SIGSTOP) for {self.seconds:.0f} s"
        usually = "" if self.usual_s is None else f" (usually one in {self.usual_s:.2g} s)"
        return {
            Phase.STARTING: f"did not start to train within {self.seconds:.0f} s",
            Phase.READING: f"has read no minibatch for {self.seconds:.0f} s{usually}",
            Phase.COMPUTING: f"has computed no minibatch for {self.seconds:.0f} s{usually}",
            Phase.WAITING: f"has waited for the other learners for {self.seconds:.0f} s",
            Phase.LEADING: f"has made no progress in its evaluation or checkpoint for {self.seconds:.0f} s",
            Phase.ENDED: f"has not ended for {self.seconds:.0f} s",
        }[self.phase]


@dataclass(slots=True)
class _Seen:
    """Of one learner."""

    notes: int = -1
    phase: Phase = Phase.STARTING
    minibatches: int = 0
    silent_s: float = 0.0
    worked_s: float = 0.0  # up to its last note, outside of pauses
    longest_s: float = 0.0  # that it worked without a note
    longest_lead_s: float = 0.0

    @property
    def usual_s(self) -> float | None:
        done = self.minibatches - (self.phase is Phase.COMPUTING)
        return self.worked_s / done if done > 0 else None

    def limit_s(self, least_s: float) -> float:
        if self.phase in _PATIENCE:
            return max(_PATIENCE[self.phase] * least_s, LONGEST * self.longest_lead_s)
        return max(least_s, USUAL * (self.usual_s or 0.0), LONGEST * self.longest_s)


class Watchdog:
    """Looks at a board. `together`: learners that all keep step, of which none waits while nobody works."""

    def __init__(self, board: ProgressBoard, learners: int, *, least_s: float, together: bool) -> None:
        self._board, self._least_s, self._together = board, least_s, together
        self._seen = {learner: _Seen() for learner in range(learners)}
        self._looked_s: float | None = None

    def check(self, running: Mapping[int, bool], now_s: float) -> list[Silence]:
        """Who of those that run (learner -> whether it is stopped) is silent for too long; several, if one of them
        cannot be told from those that wait for it."""
        passed_s = 0.0 if self._looked_s is None else min(max(0.0, now_s - self._looked_s), _AT_ONCE_S)
        self._looked_s = now_s
        for learner in running:
            self._update(learner, passed_s)
        if not self._least_s:
            return []
        late = [learner for learner, stopped in running.items() if self._is_late(learner, stopped=stopped)]
        if not late and self._together and self._all_wait(running):
            late = list(running)
        if self._together and late:  # those who began at the same time may be late a moment later
            late += [
                learner
                for learner in running
                if learner not in late
                and self._seen[learner].phase in _WORK
                and self._seen[learner].silent_s > 0.8 * self._seen[learner].limit_s(self._least_s)
            ]
        return [self._silence(learner, stopped=running[learner]) for learner in sorted(late)]

    def working(self, running: Mapping[int, bool], for_s: float) -> list[Silence]:
        """Who has worked on one minibatch for so long, or is stopped."""
        found = [
            learner
            for learner, stopped in running.items()
            if stopped or (self._seen[learner].phase in _WORK and self._seen[learner].silent_s >= for_s)
        ]
        return [self._silence(learner, stopped=running[learner]) for learner in found]

    def _update(self, learner: int, passed_s: float) -> None:
        seen = self._seen[learner]
        notes, phase, minibatches = self._board.read(learner)
        seen.silent_s += passed_s
        if notes == seen.notes:
            return
        if seen.phase not in (Phase.LEADING, Phase.STARTING):
            seen.worked_s += seen.silent_s
        if seen.phase in _WORK:
            seen.longest_s = max(seen.longest_s, seen.silent_s)
        elif seen.phase is Phase.LEADING:
            seen.longest_lead_s = max(seen.longest_lead_s, seen.silent_s)
        seen.notes, seen.phase, seen.minibatches, seen.silent_s = notes, phase, minibatches, 0.0

    def _is_late(self, learner: int, *, stopped: bool) -> bool:
        seen = self._seen[learner]
        limit_s = seen.limit_s(self._least_s)
        if stopped:  # of a server's learners, one may go on a minute later, and join again
            return seen.silent_s > limit_s * (1.0 if self._together else 4.0)
        return seen.phase is not Phase.WAITING and seen.silent_s > limit_s

    def _all_wait(self, running: Mapping[int, bool]) -> bool:
        seen = [self._seen[learner] for learner in running]
        longest_s = max((one.limit_s(self._least_s) for one in seen), default=0.0)
        return bool(seen) and all(one.phase is Phase.WAITING and one.silent_s > 4 * longest_s for one in seen)

    def _silence(self, learner: int, *, stopped: bool) -> Silence:
        seen = self._seen[learner]
        return Silence(learner, seen.phase, seen.silent_s, seen.usual_s, stopped)


class StackFiles:
    """Files in memory, one for each learner, into which it writes the stacks of its threads when it is asked to."""

    def __init__(self, learners: int) -> None:
        self._process = os.getpid()
        self._files = [os.memfd_create("offbeat-stacks") for _ in range(learners)]

    def serve(self, learner: int) -> None:
        """In the learner, whose descriptors are not those of the launcher any more."""
        with suppress(OSError):  # no /proc: there will be no stack
            path = f"/proc/{self._process}/fd/{self._files[learner]}"
            write_stacks_on_signal(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC))

    def ask(self, learner: int, pid: int) -> str:
        """The stacks of a learner now, the thread that runs first; empty if it does not write them."""
        file = self._files[learner]
        before = os.fstat(file).st_size
        with suppress(ProcessLookupError):
            os.kill(pid, STACKS)
        end, size = time.monotonic() + _WITHIN_S, before
        while time.monotonic() < end:
            time.sleep(0.02)
            now = os.fstat(file).st_size
            if now > before and now == size:
                break
            size = now
        return os.pread(file, 1 << 20, before).decode(errors="replace")

    def close(self) -> None:
        for file in self._files:
            os.close(file)


def innermost(stacks: str) -> str:
    """Where the thread is that was interrupted: `data.py, line 12, __getitem__`; empty if that is not known."""
    _, _, current = stacks.partition("Current thread")
    for line in (current or stacks).splitlines():
        name, quote, rest = line.strip().removeprefix('File "').partition('", line ')
        if quote:
            number, _, function = rest.partition(" in ")
            return f"{Path(name).name}, line {number}, {function}"
    return ""
