"""Barriers that end by the clock: a quorum and a grace period, or a deadline for every version.

Time is a number in the event; the policy asks to be woken (`Wake`) and is told when that time has come (`Woke`).
"""

from __future__ import annotations

from typing import Any

from offbeat.number_format import format_seconds
from offbeat.policies import sentences
from offbeat.policies.barrier import KSync
from offbeat.policies.events import Command
from offbeat.policies.waiting import ComputeTimes, UpdateTime


class GraceSync(KSync):
    """Wait for K learners, then up to `grace` seconds for the others; who is late then is cancelled as in k-sync."""

    extra_state = ("again", "until_s")

    def __init__(self, *, k: int, grace: float, **common: Any) -> None:
        super().__init__(k=None, **common)
        self.quorum, self.grace = k, grace
        self.until_s: float | None = None  # the end of the grace period, once the quorum is in

    def _if_due(self) -> tuple[Command, ...]:
        if self.open == 0 or len(self.held) < self.quorum or self.until_s is not None:
            return super()._if_due()
        self.until_s = self.now_s + self.grace
        return (self.wake(self.until_s, f"{self.quorum} are in; the others have {format_seconds(self.grace)} more"),)

    def on_wake(self) -> tuple[Command, ...]:
        if self.until_s is None or self.now_s < self.until_s:
            return ()  # all came in time, and the update was made
        return self.cut(f"{len(self.held)} are in after {format_seconds(self.grace)} of grace")

    def cut(self, why: str) -> tuple[Command, ...]:
        self.until_s = None
        return super().cut(why)

    def gradients_per_update(self, learners: int) -> int:
        return self.quorum

    def waits_for_all(self, learners: int) -> bool:
        return self.quorum >= learners

    def same_timing_as(self, learners: int) -> str | None:
        return "full-sync" if self.quorum == learners else None

    def expected_update(self, learners: int, times: ComputeTimes) -> UpdateTime | None:
        return None  # it depends on the clock

    def explain(self, result: sentences.Outcome) -> str:
        grace = format_seconds(self.grace)
        return sentences.partial_barrier(result, f"waits for {self.quorum} learners, and {grace} for the others")


class DeadlineSync(KSync):
    """Every version has `seconds` from when it was sent. Then what is in is applied, and who is late is cancelled.

    If nobody is in by then, the first to come makes the update. If everybody is in before, nobody waits for the clock.
    """

    extra_state = ("again", "overdue")
    shortens_small_updates = True

    def __init__(self, *, seconds: float, **common: Any) -> None:
        super().__init__(k=None, **common)
        self.seconds = seconds
        self.overdue = False  # the deadline has passed, and nobody was in

    def _start(self, why: str) -> tuple[Command, ...]:
        return (*super()._start(why), self._begin())

    def _begin(self) -> Command:
        self.overdue = False
        return self.wake(self.now_s + self.seconds, f"this version has {format_seconds(self.seconds)}")

    def on_join(self, learner: int) -> tuple[Command, ...]:
        alone = self.open == 0 and not self.held  # nobody works on this version: its time begins anew
        return (*super().on_join(learner), *((self._begin(),) if alone else ()))

    def on_wake(self) -> tuple[Command, ...]:
        if self.held:
            return self.cut(f"{len(self.held)} are in after {format_seconds(self.seconds)}")
        self.overdue = self.open > 0
        return ()

    def _if_due(self) -> tuple[Command, ...]:
        if self.overdue and self.held:
            return self.cut(f"the first after {format_seconds(self.seconds)}")
        return super()._if_due()

    def cut(self, why: str) -> tuple[Command, ...]:
        self.overdue = False
        commands = super().cut(why)
        return (*commands, self._begin()) if self.learners else commands

    def gradients_per_update(self, learners: int) -> int:
        return learners  # if the deadline is long enough; an update of fewer is a shorter step

    def waits_for_all(self, learners: int) -> bool:
        return False

    def expected_update(self, learners: int, times: ComputeTimes) -> UpdateTime | None:
        return None  # it depends on the clock

    def explain(self, result: sentences.Outcome) -> str:
        return sentences.partial_barrier(result, f"waits {format_seconds(self.seconds)}, or for the first")
