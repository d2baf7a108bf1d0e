"""What a real run records: its log, line by line while it goes on, and its summary at the end."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from offbeat.runs.learning import sign_of, sign_of_losses, warning_of_losses
from offbeat.runs.log import LogWriter, Span
from offbeat.server.coordinator.coordinator import Coordinator
from offbeat.server.wire import INPUT, Fetched, Push, Stop


class Ledger:
    """Decisions come from the coordinator, spans from what learners say of their minibatches."""

    def __init__(self, learners: int) -> None:
        self._writer: LogWriter | None = None
        self._ended_s: dict[tuple[int, int], float] = {}  # when a learner (and incarnation) was last done
        self._seen: set[tuple[int, int, int]] = set()
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
        self._write(lambda writer: writer.decision(record))

    def hear(self, message: INPUT) -> None:
        """A minibatch that was pushed or given up, with its times."""
        if isinstance(message, Fetched):
            self.fetches += 1
        if not isinstance(message, Push | Stop):
            return
        learner, name = message.learner, (message.learner, message.incarnation, message.seq)
        if name in self._seen or not 0 <= learner < len(self.compute_s):
            return
        self._seen = {one for one in self._seen if one[:2] != name[:2]} | {name}
        began, ended = message.began_s, message.ended_s
        if not 0 <= began < ended:  # a minibatch that was cancelled before it began
            return
        if isinstance(message, Push) and message.loss is not None:
            self.losses.append(message.loss)
        stopped = isinstance(message, Stop)
        version = message.version
        before = self._ended_s.get(name[:2])
        if before is not None and before < began:
            for start, end in self._awake(before, began):
                self._span(Span(learner, "wait", start, end, version))
                self.wait_s[learner] += end - start
        self._span(Span(learner, "compute", began, ended, version, stopped))
        self._ended_s[name[:2]] = ended
        if stopped:
            self.stopped.append((learner, ended - began))
        else:
            self.compute_s[learner] += ended - began
            self.minibatches[learner] += 1
        self.first_s = began if self.first_s is None else min(self.first_s, began)
        self.last_s = max(self.last_s, ended)

    def pause(self, learner: int, start_s: float, end_s: float, version: int) -> None:
        """All paused, and this learner led: that is no training time."""
        if (start_s, end_s) not in self.pauses:
            self.pauses.append((start_s, end_s))
            self._span(Span(learner, "evaluate", start_s, end_s, version))

    def _awake(self, start_s: float, end_s: float) -> Iterator[tuple[float, float]]:
        """A stretch of time without the pauses in it."""
        for began_s, ended_s in self.pauses:
            if start_s < ended_s and began_s < end_s:
                if start_s < began_s:
                    yield start_s, began_s
                start_s = min(ended_s, end_s)
        if start_s < end_s:
            yield start_s, end_s

    def _span(self, span: Span) -> None:
        self._write(lambda writer: writer.span(span))

    def _write(self, write: Callable[[LogWriter], object]) -> None:
        """As long as it can: a full disk ends the log, not the run."""
        try:
            if self._writer is not None:
                write(self._writer)
        except OSError as error:
            self._writer = None
            print(f"offbeat: the run log ends here: {error.strerror}", file=sys.stderr, flush=True)

    def reclaimed_s(self) -> float:
        """What cancelled minibatches would still have taken, had each been as long as its learner's others."""
        total = 0.0
        for learner, spent in self.stopped:
            if self.minibatches[learner]:
                total += max(0.0, self.compute_s[learner] / self.minibatches[learner] - spent)
        return total

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
