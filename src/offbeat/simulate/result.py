"""What a simulated run has shown."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from offbeat.policies.sentences import Outcome
from offbeat.runs.log import Span


@dataclass(slots=True)
class Tally:
    """Counts while a simulation runs; seconds are of all learners together."""

    seconds: dict[str, float] = field(default_factory=lambda: {"compute": 0.0, "send": 0.0, "wait": 0.0})
    waste_s: float = 0.0  # of compute: cancelled, dropped or lost
    fetch_s: float = 0.0  # of wait: the answer was on its way
    full_s: float = 0.0  # the server's link was full, of the run's seconds
    staleness: Counter[int] = field(default_factory=Counter)
    applied: int = 0  # minibatches
    samples: int = 0  # of these
    cancelled: int = 0
    dropped: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Outcome):
    """Shares are of the learners' time: busy + waste + send + wait = 1.

    busy: computing what was or may still be applied. waste: computing what was cancelled, dropped or lost.
    send: sending a gradient. wait: from then to the next minibatch; `fetch_share` of it the weights were on their way,
    and the rest was waiting for others. Staleness is over the gradients applied.
    """

    strategy: str
    learners: int
    seconds: float
    events: int
    samples: int  # of the minibatches applied
    busy_share: float
    full_share: float  # of the seconds: the server's link was full, in at least one direction
    spans: tuple[Span, ...]

    @classmethod
    def of(
        cls,
        *,
        strategy: str,
        learners: int,
        updates: int,
        seconds: float,
        events: int,
        tally: Tally,
        spans: tuple[Span, ...],
    ) -> Result:
        compute, send, wait = (tally.seconds[what] for what in ("compute", "send", "wait"))
        whole = compute + send + wait or 1.0
        return cls(
            strategy=strategy,
            learners=learners,
            updates=updates,
            seconds=seconds,
            events=events,
            applied=tally.applied,
            samples=tally.samples,
            cancelled=tally.cancelled,
            dropped=tally.dropped,
            failed=tally.failed,
            staleness=dict(sorted(tally.staleness.items())),
            busy_share=(compute - tally.waste_s) / whole,
            waste_share=tally.waste_s / whole,
            send_share=send / whole,
            wait_share=wait / whole,
            fetch_share=tally.fetch_s / whole,
            full_share=tally.full_s / seconds if seconds else 0.0,
            spans=spans,
        )

    @property
    def seconds_per_update(self) -> float:
        """Not a number where there was no update."""
        return self.seconds / self.updates if self.updates else math.nan

    @property
    def minibatches_per_s(self) -> float:
        """Applied ones."""
        return self.applied / self.seconds if self.seconds else math.inf

    @property
    def samples_per_s(self) -> float:
        """Applied ones; a minibatch has 1 unless the cluster says otherwise."""
        return self.samples / self.seconds if self.seconds else math.inf

    @property
    def staleness_std(self) -> float:
        count = sum(self.staleness.values())
        mean = self.staleness_mean
        return (
            math.sqrt(sum((age - mean) ** 2 * many for age, many in self.staleness.items()) / count) if count else 0.0
        )

    def network_json(self) -> dict[str, float]:
        """Beside `as_json`, whose digests of version 0.1 the tests hold."""
        return {"fetch_share": self.fetch_share, "full_share": self.full_share}

    def as_json(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy,
            "learners": self.learners,
            "updates": self.updates,
            "seconds": self.seconds,
            "seconds_per_update": self.seconds_per_update if self.updates else None,
            "minibatches_per_s": self.minibatches_per_s,
            "staleness_mean": self.staleness_mean,
            "staleness_std": self.staleness_std,
            "staleness_histogram": {str(age): count for age, count in self.staleness.items()},
            "cancelled": self.cancelled,
            "dropped": self.dropped,
            "failed": self.failed,
            "busy_share": self.busy_share,
            "waste_share": self.waste_share,
            "send_share": self.send_share,
            "wait_share": self.wait_share,
            "events": self.events,
        }
