"""Policies with a barrier: every gradient of an update was computed at the same version, staleness is 0.

Dutta, Joshi, Ghosh, Dube, Nagpurkar 2018, "Slow and stale gradients can win the race". Gradients are applied in the
order of learners, not of arrival, so that the same contributors give the same bits.

Two of them end by the clock: a quorum and a grace period, or a deadline for every version. Time is a number in the
event; the policy asks to be woken (`Wake`) and is told when that time has come (`Woke`).
"""

from __future__ import annotations

from typing import Any

from offbeat.number_format import format_seconds
from offbeat.policies import sentences
from offbeat.policies.base import HoldsK, Policy
from offbeat.policies.events import Command, Pushed
from offbeat.policies.staleness import FRESH, Staleness
from offbeat.policies.waiting import ComputeTimes, UpdateTime, of_barrier, of_flow


class Barrier(Policy):
    """Shared by the policies below: the update, and what it does to everybody."""

    sentence = staticmethod(sentences.partial_barrier)
    cancels = True

    def cut(self, why: str) -> tuple[Command, ...]:
        """Apply all that is held, cancel whoever still computes, send the new weights to all."""
        order = sorted(self.held, key=lambda ticket: self.held[ticket].learner)  # stable: arrival within a learner
        commands: list[Command] = [self.apply(tuple(order), why)]
        late = [learner for learner, seat in self.learners.items() if seat.computing]
        commands += [self.cancel(learner, "the update was made without it") for learner in late]
        commands += [self.send(learner, "new weights for all learners") for learner in self.learners]
        return tuple(commands)

    def expected_staleness(self, learners: int) -> Staleness:
        return FRESH

    def laws(self) -> dict[str, bool]:
        return {
            "every gradient that waits for the update was computed with the current version": all(
                h.version == self.version for h in self.held.values()
            )
        }


class KSync(Barrier):
    """Wait for the first K of P; with fewer than K left, for all that are left.

    With K None it is full-sync: wait for everybody who is there. A learner that has pushed, left and come back within
    one version counts once then, so that it cannot fill the update while another is slow.
    """

    extra_state: tuple[str, ...] = ("again",)

    def __init__(self, *, k: int | None, **common: Any) -> None:
        super().__init__(**common)
        self.k = k
        self.again: list[int] = []  # who came back within this version, and has a gradient in it

    def on_join(self, learner: int) -> tuple[Command, ...]:
        if self.k is None and any(held.learner == learner for held in self.held.values()):
            self.again.append(learner)
        return super().on_join(learner)

    def cut(self, why: str) -> tuple[Command, ...]:
        self.again = []
        return super().cut(why)

    def on_push(self, event: Pushed) -> tuple[Command, ...]:
        if event.learner in self.again:
            return (self.drop(event.ticket, "this learner already has a gradient in this update"), *self._if_due())
        return self._if_due()

    def on_leave(self, learner: int) -> tuple[Command, ...]:
        """Also when it was the last: at an epoch's end all may leave before the one update that is left is decided."""
        return self._if_due()

    def _if_due(self) -> tuple[Command, ...]:
        if self.held and self.open == 0:
            return self.cut(f"all {len(self.held)} possible gradients have arrived")
        if self.k is not None and len(self.held) >= self.k:
            return self.cut(f"the first {self.k} of {len(self.learners)} gradients have arrived")
        return ()

    def max_held(self, learners: int) -> int:
        return learners if self.k is None else self.k

    def gradients_per_update(self, learners: int) -> int:
        return learners if self.k is None else self.k

    def waits_for_all(self, learners: int) -> bool:
        return self.gradients_per_update(learners) >= learners

    def expected_update(self, learners: int, times: ComputeTimes) -> UpdateTime | None:
        alone = self.rule.push_every == 1
        return of_barrier(self.gradients_per_update(learners), learners, times) if alone else None

    def same_timing_as(self, learners: int) -> str | None:
        return "full-sync" if self.k == learners else None

    def explain(self, result: sentences.Outcome) -> str:
        return sentences.barrier(result) if self.k is None else super().explain(result)

    def laws(self) -> dict[str, bool]:
        return super().laws() | {"somebody is waited for": self.open > 0 or not (self.held and self.learners)}


class KBatchSync(HoldsK, Barrier):
    """Wait for the first K minibatches, from whomever; who is done before computes another at the same weights."""

    def on_push(self, event: Pushed) -> tuple[Command, ...]:
        if len(self.held) >= self.k:
            return self.cut(f"the first {self.k} gradients have arrived")
        return (
            self.resume(
                event.learner,
                f"{len(self.held)} of {self.k} gradients have arrived; compute another on the same weights",
            ),
        )

    def expected_update(self, learners: int, times: ComputeTimes) -> UpdateTime | None:
        return of_flow(self.k, learners, times) if times.is_memoryless else None

    def laws(self) -> dict[str, bool]:
        return super().laws() | {"nobody waits": not self.started or self.open == len(self.learners)}


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
        return (
            self.wake(
                self.until_s, f"{self.quorum} gradients have arrived; the others have {format_seconds(self.grace)} more"
            ),
        )

    def on_wake(self) -> tuple[Command, ...]:
        if self.until_s is None or self.now_s < self.until_s:
            return ()  # all came in time, and the update was made
        return self.cut(f"{len(self.held)} gradients arrived within the grace period of {format_seconds(self.grace)}")

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
        return sentences.partial_barrier(result, f"waits for {self.quorum} learners, then up to {grace} for the others")


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
            return self.cut(f"{len(self.held)} gradients arrived within {format_seconds(self.seconds)}")
        self.overdue = self.open > 0
        return ()

    def _if_due(self) -> tuple[Command, ...]:
        if self.overdue and self.held:
            return self.cut(f"the first gradient arrived after the deadline of {format_seconds(self.seconds)}")
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
        return sentences.partial_barrier(
            result, f"waits {format_seconds(self.seconds)}, or until the first gradient arrives"
        )
