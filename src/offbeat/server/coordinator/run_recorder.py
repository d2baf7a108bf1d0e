"""What a real run records: its log, line by line while it goes on, and its summary at the end."""

from __future__ import annotations

import contextlib
import json
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import msgspec

from offbeat.errors import RequestError
from offbeat.runs.learning import sign_of, sign_of_losses, warning_of_losses
from offbeat.runs.log import LogWriter, Span
from offbeat.server.coordinator.coordinator import RESIDUALS_LOST, Coordinator
from offbeat.server.coordinator.session import SessionName
from offbeat.server.wire import INPUT, OUTPUT, Committed, Fetched, Go, Push, ShardJob, Stop

P = ParamSpec("P")
MOST_KEPT = 4096  # of what would else grow with the run: losses, minibatches that were stopped
PAUSES_KEPT = 64
INCARNATIONS_KEPT = 4  # of each learner: older ones are not heard of again


class LossSeries:
    """Losses in the order of their arrival: the first ones as they are, and of the others means over equal stretches,
    which double when there are too many of them. So it is as long as one wants, and no longer.
    """

    def __init__(self, exact: int) -> None:
        self.exact = exact
        self.first = array("d")
        self.means = array("d")
        self.width = 1  # losses in a mean
        self.open: list[float] = []  # sum and number of the last stretch, if it is not full

    def append(self, loss: float) -> None:
        if len(self.first) < self.exact:
            self.first.append(loss)
            return
        total, many = self.open or (0.0, 0)
        self.open = [total + loss, many + 1]
        if self.open[1] == self.width:
            self.means.append(self.open[0] / self.width)
            self.open = []
            if len(self.means) == MOST_KEPT:
                self.means = array("d", [(a + b) / 2 for a, b in zip(self.means[::2], self.means[1::2], strict=True)])
                self.width *= 2

    def values(self) -> list[float]:
        return [*self.first, *self.means, *([self.open[0] / self.open[1]] if self.open else [])]


class RecorderState(msgspec.Struct, kw_only=True):
    """What a recorder has found so far, and how long its log is."""

    position: int  # of the log; 0: there is none
    plain: dict[str, Any]
    ended_s: dict[SessionName, tuple[float, float]]
    begins_after: dict[SessionName, tuple[float, float]]
    seen: dict[SessionName, int]
    update: tuple[float, float]
    stopped: list[tuple[int, float]]
    pauses: list[tuple[float, float]]
    losses: tuple[bytes, bytes, int, list[float]]


_PLAIN = (
    "compute_s", "wait_s", "minibatches", "pushed", "fetches", "refused", "first_s", "last_s", "stops",
    "reclaimed_before_s", "paused_before_s", "saved_bytes", "told_bytes", "_version", "_update_began_s",
)  # fmt: skip


class RunRecorder:
    """Decisions come from the coordinator, spans from what learners say of their minibatches, and when it came.

    Between two minibatches of a learner: its gradient travels (`send`), others are waited for (`wait`), the servers
    make the update whose weights it gets (`apply`), and the weights travel (`wait`).
    """

    def __init__(self, learners: int) -> None:
        self._writer: LogWriter | None = None
        # Of a learner and incarnation: when it was last done, and when its gradient was there.
        self._ended_s: dict[SessionName, tuple[float, float]] = {}
        self._begins_after: dict[SessionName, tuple[float, float]] = {}  # the update whose weights it was sent last
        self._update = (0.0, 0.0)  # the last that was committed since the last pause: from when to when it was made
        self._version, self._update_began_s = 0, 0.0  # of the one that is under way
        self._seen: dict[SessionName, int] = {}  # the minibatch that it told of last
        self.compute_s = [0.0] * learners
        self.wait_s = [0.0] * learners
        self.minibatches = [0] * learners
        self.pushed = [0] * learners  # also those whose times are not known
        self.stopped: list[tuple[int, float]] = []  # learner, and seconds that it had computed: the last ones
        self.stops = 0  # in all
        self.reclaimed_before_s = 0.0  # by those that are not in `stopped` any more
        self.pauses: list[tuple[float, float]] = []  # the last ones
        self.paused_before_s = 0.0  # in the others
        self.push_bytes = self.fetch_bytes = 0  # of one
        self.fetches = 0
        self.saved_bytes = 0  # by pushes of rows, against those of the whole vector
        self.told_bytes = 0  # of weights, by who fetches rows
        self.reads_unsaid = False  # a learner that pushes, or stops, has read the weights that it was sent
        self.refused = 0  # messages that could not be
        self.losses = LossSeries(learners)  # of pushes that say it
        self.first_s: float | None = None
        self.last_s = 0.0

    def open(self, path: Path | None, run: Mapping[str, Any], state: RecorderState | None = None) -> None:
        """Begin the log; or go on from what was found before, with the log as it was then."""
        after = 0 if state is None else state.position
        if state is not None:
            self._restore(state)
        if path is None or (state is not None and not after):
            return
        try:
            self._writer = LogWriter(path, run, after=after)
        except OSError as error:
            if not after:
                raise RequestError(f"cannot write the run log {path}: {error.strerror}") from None
            self._lose_log(error)

    def flush(self) -> None:
        """What was decided is in the log's file."""
        try:
            if self._writer is not None:
                self._writer.position()
        except OSError as error:
            self._lose_log(error)

    def state(self) -> RecorderState:
        """As it is now, for a successor."""
        position = 0
        try:
            position = 0 if self._writer is None else self._writer.position()
        except OSError as error:
            self._lose_log(error)
        losses = self.losses
        return RecorderState(
            position=position,
            plain={name: getattr(self, name) for name in _PLAIN},
            ended_s=self._ended_s,
            begins_after=self._begins_after,
            seen=self._seen,
            update=self._update,
            stopped=self.stopped,
            pauses=self.pauses,
            losses=(losses.first.tobytes(), losses.means.tobytes(), losses.width, losses.open),
        )

    def _restore(self, state: RecorderState) -> None:
        for name in _PLAIN:
            setattr(self, name, state.plain[name])
        self._ended_s, self._begins_after, self._seen = state.ended_s, state.begins_after, state.seen
        self._update, self.stopped, self.pauses = state.update, state.stopped, state.pauses
        first, means, width, rest = state.losses
        self.losses.first, self.losses.means = array("d", first), array("d", means)
        self.losses.width, self.losses.open = width, rest

    def leave(self) -> None:
        """Let go of the log as it is: another recorder goes on with it."""
        with contextlib.suppress(OSError):
            if self._writer is not None:
                self._writer.leave()

    def decision(self, record: Mapping[str, Any]) -> None:
        self._write(LogWriter.decision, record)

    def hear(self, message: INPUT, at_s: float) -> None:
        """A minibatch that was pushed or given up, with its times; it came at `at_s`."""
        if isinstance(message, Fetched):
            self.fetches += 1
        if not isinstance(message, Push | Stop):
            return
        learner, session = message.learner, (message.learner, message.incarnation)
        if self._seen.get(session, -1) >= message.seq or not 0 <= learner < len(self.compute_s):
            return
        if session not in self._seen:
            for kept in (self._seen, self._ended_s, self._begins_after):
                kept.pop((learner, message.incarnation - INCARNATIONS_KEPT), None)
        self._seen[session] = message.seq
        self.pushed[learner] += isinstance(message, Push)
        if isinstance(message, Push) and message.sent_bytes:
            self.saved_bytes += max(0, self.push_bytes - message.sent_bytes)
            self.told_bytes += message.received_bytes
        self.fetches += self.reads_unsaid and session in self._begins_after
        began, ended = message.began_s, message.ended_s
        if not 0 <= began < ended:  # a minibatch that was cancelled before it began
            return
        if isinstance(message, Push) and message.loss is not None:
            self.losses.append(message.loss)
        stopped, version = isinstance(message, Stop), message.version
        self._between(session, began, version)
        if self._writer is not None:
            self._write(LogWriter.span, Span(learner, "compute", began, ended, version, stopped))
        self._ended_s[session] = ended, ended if stopped else at_s
        if stopped:
            self.stops += 1
            self.stopped.append((learner, ended - began))
            if len(self.stopped) == MOST_KEPT:  # by now the means hardly change
                self.reclaimed_before_s, self.stopped = self.reclaimed_s(), []
        else:
            self.compute_s[learner] += ended - began
            self.minibatches[learner] += 1
        self.first_s = began if self.first_s is None else min(self.first_s, began)
        self.last_s = max(self.last_s, ended)

    def _between(self, session: SessionName, began_s: float, version: int) -> None:
        """What a learner did since its minibatch before."""
        ended_s, there_s = self._ended_s.get(session, (began_s, began_s))
        update = self._begins_after.pop(session, (0.0, 0.0))
        if self._writer is None:  # how long is enough
            for start, end in self._awake(ended_s, began_s):
                self.wait_s[session[0]] += end - start
            return
        times = [ended_s, *(min(max(at_s, there_s), began_s) for at_s in (there_s, *update)), began_s]
        for what, (start_s, end_s) in zip(("send", "wait", "apply", "wait"), pairwise(times), strict=True):
            if start_s < end_s:
                for start, end in self._awake(start_s, end_s):
                    self._write(LogWriter.span, Span(session[0], what, start, end, version))
                    self.wait_s[session[0]] += end - start

    def answered(self, answers: Iterable[OUTPUT], at_s: float) -> None:
        """What the coordinator said: which update is under way, and whose weights a learner is sent."""
        for answer in answers:
            if isinstance(answer, ShardJob) and answer.kind != "drift" and answer.version > self._version:
                self._version, self._update_began_s = answer.version, at_s
            elif isinstance(answer, Committed):
                self._update = self._update_began_s, at_s
            elif isinstance(answer, Go) and answer.pieces:
                self._begins_after[answer.learner, answer.incarnation] = self._update

    def pause(self, learner: int, start_s: float, end_s: float, version: int) -> None:
        """All paused, and this learner led: that is no training time."""
        if (start_s, end_s) not in self.pauses:
            self.pauses.append((start_s, end_s))
            if len(self.pauses) > PAUSES_KEPT:
                began_s, ended_s = self.pauses.pop(0)
                self.paused_before_s += max(0.0, ended_s - max(began_s, self.first_s or 0.0))
            self._update = (0.0, 0.0)
            self._write(LogWriter.span, Span(learner, "evaluate", start_s, end_s, version))

    def _awake(self, start_s: float, end_s: float) -> Iterator[tuple[float, float]]:
        """A stretch of time without the pauses in it."""
        for began_s, ended_s in self.pauses:
            if start_s < ended_s and began_s < end_s:
                if start_s < began_s:
                    yield start_s, began_s
                start_s = min(ended_s, end_s)
        if start_s < end_s:
            yield start_s, end_s

    def _write(self, write: Callable[Concatenate[LogWriter, P], object], *given: P.args, **named: P.kwargs) -> None:
        """As long as it can: a full disk ends the log, not the run."""
        try:
            if self._writer is not None:
                write(self._writer, *given, **named)
        except OSError as error:
            self._lose_log(error)

    def _lose_log(self, error: OSError) -> None:
        self._writer = None
        print(f"offbeat: cannot write the run log any further: {error.strerror}", file=sys.stderr, flush=True)

    def reclaimed_s(self) -> float:
        """What cancelled minibatches would still have taken, had each been as long as its learner's others."""
        mean_s = [one_s / max(1, many) for one_s, many in zip(self.compute_s, self.minibatches, strict=True)]
        return sum((max(0.0, mean_s[learner] - spent) for learner, spent in self.stopped), self.reclaimed_before_s)

    def _warning(self, machine: Coordinator) -> str | None:
        """That the run has not learned, as far as its losses show."""
        if not machine.counts["received"]:
            return None
        dropped = {"not finite": machine.leases.samples["dropped: not finite"]}
        sign = sign_of([{"epoch": 1, "samples": machine.counts["applied"], "dropped": dropped}], ended=True)
        sign = sign or sign_of_losses(self.losses.values(), machine.setting.learners)
        return None if sign is None else warning_of_losses(sign)

    def close(self, machine: Coordinator | None) -> str:
        """The end: the log gets its name, and the summary is one JSON object."""
        self._write(LogWriter.close)
        if machine is None:
            return json.dumps({"updates": 0})
        counts = machine.counts
        seconds = sum(end - start for start, end in self._awake(self.first_s or 0.0, self.last_s))
        seconds -= self.paused_before_s
        summary = {
            "strategy": machine.setting.line,
            "learners": machine.setting.learners,
            "servers": machine.setting.shards,
            "updates": machine.policy.version,
            "seconds": seconds,
            "seconds_per_update": seconds / machine.policy.version if machine.policy.version else None,
            "staleness_mean": machine.mean_staleness,
            "staleness": {str(age): many for age, many in sorted(machine.staleness.items())},
            "delays": {str(delay): many for delay, many in sorted(machine.delays.items())},
            "skew": {str(many): times for many, times in sorted(machine.grants.skew.items())},
            "pushes": {name: counts[name] for name in ("received", "applied", "dropped", "duplicate", "fenced")},
            "dropped": {name[9:]: many for name, many in counts.items() if name.startswith("dropped: ")},
            "gone": {name[6:]: many for name, many in counts.items() if name.startswith("gone: ")},
            "residuals_lost": counts[RESIDUALS_LOST],
            "refused": self.refused,
            "cancelled": counts["cancelled"],
            "stopped": self.stops,
            "reclaimed_s": self.reclaimed_s(),
            "samples": dict(machine.leases.samples),
            "compute_s": self.compute_s,
            "wait_s": self.wait_s,
            "wait_share": sum(self.wait_s) / max(sum(self.compute_s) + sum(self.wait_s), 1e-9),
            "minibatches": self.minibatches,
            "pushed": self.pushed,
            "push_bytes": self.push_bytes,
            "fetch_bytes": self.fetch_bytes,
            "sent_bytes": max(0, counts["received"] * self.push_bytes - self.saved_bytes),
            "received_bytes": self.told_bytes or self.fetches * self.fetch_bytes,
            "unfinished": len(machine.in_updates()),
            "warning": self._warning(machine),
        }  # fmt: skip
        return json.dumps(summary)
