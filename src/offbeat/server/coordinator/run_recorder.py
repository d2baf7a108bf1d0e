"""What a real run records: its log, line by line while it goes on, and its summary at the end."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from offbeat.runs.learning import sign_of, sign_of_losses, warning_of_losses
from offbeat.runs.log import LogWriter, Span
from offbeat.server.coordinator.coordinator import Coordinator
from offbeat.server.coordinator.session import SessionName
from offbeat.server.wire import INPUT, OUTPUT, Committed, Fetched, Go, Push, ShardJob, Stop

P = ParamSpec("P")


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
        self.stopped: list[tuple[int, float]] = []  # learner, and seconds that it had computed
        self.pauses: list[tuple[float, float]] = []
        self.push_bytes = self.fetch_bytes = 0  # of one
        self.fetches = 0
        self.losses = array("d")  # of pushes that say it, in the order of their arrival
        self.first_s: float | None = None
        self.last_s = 0.0

    def open(self, path: Path | None, run: Mapping[str, Any]) -> None:
        self._writer = None if path is None else LogWriter(path, run)

    def decision(self, record: Mapping[str, Any]) -> None:
        self._write(LogWriter.decision, record)

    def hear(self, message: INPUT, at_s: float) -> None:
        """A minibatch that was pushed or given up, with its times; it came at `at_s`."""
        if isinstance(message, Fetched):
            self.fetches += 1
        if not isinstance(message, Push | Stop):
            return
        learner, session = message.learner, (message.learner, message.incarnation)
        if self._seen.get(session) == message.seq or not 0 <= learner < len(self.compute_s):
            return
        self._seen[session] = message.seq
        began, ended = message.began_s, message.ended_s
        if not 0 <= began < ended:  # a minibatch that was cancelled before it began
            return
        if isinstance(message, Push) and message.loss is not None:
            self.losses.append(message.loss)
        stopped, version = isinstance(message, Stop), message.version
        self._between(session, began, version)
        self._write(LogWriter.span, Span(learner, "compute", began, ended, version, stopped))
        self._ended_s[session] = ended, ended if stopped else at_s
        if stopped:
            self.stopped.append((learner, ended - began))
        else:
            self.compute_s[learner] += ended - began
            self.minibatches[learner] += 1
        self.first_s = began if self.first_s is None else min(self.first_s, began)
        self.last_s = max(self.last_s, ended)

    def _between(self, session: SessionName, began_s: float, version: int) -> None:
        """What a learner did since its minibatch before."""
        ended_s, there_s = self._ended_s.get(session, (began_s, began_s))
        update = self._begins_after.pop(session, (0.0, 0.0))
        times = [ended_s, *(min(max(at_s, there_s), began_s) for at_s in (there_s, *update)), began_s]
        for what, (start_s, end_s) in zip(("send", "wait", "apply", "wait"), pairwise(times), strict=True):
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
            self._writer = None
            print(f"offbeat: cannot write the run log any further: {error.strerror}", file=sys.stderr, flush=True)

    def reclaimed_s(self) -> float:
        """What cancelled minibatches would still have taken, had each been as long as its learner's others."""
        mean_s = [one_s / max(1, many) for one_s, many in zip(self.compute_s, self.minibatches, strict=True)]
        return sum((max(0.0, mean_s[learner] - spent) for learner, spent in self.stopped), 0.0)

    def _warning(self, machine: Coordinator) -> str | None:
        """That the run has not learned, as far as its losses show."""
        if not machine.counts["received"]:
            return None
        dropped = {"not finite": machine.leases.samples["dropped: not finite"]}
        sign = sign_of([{"epoch": 1, "samples": machine.counts["applied"], "dropped": dropped}], ended=True)
        sign = sign or sign_of_losses(self.losses, machine.setting.learners)
        return None if sign is None else warning_of_losses(sign)

    def close(self, machine: Coordinator | None) -> str:
        """The end: the log gets its name, and the summary is one JSON object."""
        self._write(LogWriter.close)
        if machine is None:
            return json.dumps({"updates": 0})
        counts = machine.counts
        seconds = sum(end - start for start, end in self._awake(self.first_s or 0.0, self.last_s))
        summary = {
            "strategy": machine.setting.line,
            "learners": machine.setting.learners,
            "servers": machine.setting.shards,
            "updates": machine.policy.version,
            "seconds": seconds,
            "seconds_per_update": seconds / machine.policy.version if machine.policy.version else None,
            "staleness_mean": machine.mean_staleness,
            "staleness": {str(age): many for age, many in sorted(machine.staleness.items())},
            "skew": {str(many): times for many, times in sorted(machine.grants.skew.items())},
            "pushes": {name: counts[name] for name in ("received", "applied", "dropped", "duplicate", "fenced")},
            "dropped": {name[9:]: many for name, many in counts.items() if name.startswith("dropped: ")},
            "gone": {name[6:]: many for name, many in counts.items() if name.startswith("gone: ")},
            "cancelled": counts["cancelled"],
            "stopped": len(self.stopped),
            "reclaimed_s": self.reclaimed_s(),
            "samples": dict(machine.leases.samples),
            "compute_s": self.compute_s,
            "wait_s": self.wait_s,
            "wait_share": sum(self.wait_s) / max(sum(self.compute_s) + sum(self.wait_s), 1e-9),
            "minibatches": self.minibatches,
            "sent_bytes": counts["received"] * self.push_bytes,
            "received_bytes": self.fetches * self.fetch_bytes,
            "unfinished": len(machine.in_updates()),
            "warning": self._warning(machine),
        }  # fmt: skip
        return json.dumps(summary)
