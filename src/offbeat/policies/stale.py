"""Policies without a barrier: a gradient may be older than the weights it is applied to.

`async` is K = 1 of both K-async and K-batch-async. Mean staleness, whatever the compute times: P/K - 1 (K-async),
(P-1)/K (K-batch-async and softsync, Zhang, Gupta, Lian, Liu 2016).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from offbeat.policies import sentences
from offbeat.policies.base import EachGradient, HoldsK
from offbeat.policies.events import Command, Pushed
from offbeat.policies.staleness import Staleness, estimated, of_batches, of_waiting
from offbeat.policies.waiting import ComputeTimes, UpdateTime, of_barrier, of_flow


class KAsync(HoldsK):
    """Hold until K are in; those K learners wait and get the new weights, the others compute on."""

    sentence = staticmethod(sentences.some_wait)

    def on_push(self, event: Pushed) -> tuple[Command, ...]:
        return self._if_due()

    def on_leave(self, learner: int) -> tuple[Command, ...]:
        return self._if_due() if self.learners else ()

    def _if_due(self) -> tuple[Command, ...]:
        if not self.held or (len(self.held) < self.k and self.open > 0):
            return ()
        waiting = [held.learner for held in self.held.values()]
        why = (
            f"{len(waiting)} are in"
            if len(waiting) >= self.k
            else f"all {len(waiting)} possible gradients have arrived"
        )
        commands: list[Command] = [self.apply(tuple(self.held), why)]
        for learner in waiting:  # but not to one that has left, nor to one that left and came back
            if learner in self.learners and not self.learners[learner].computing:
                commands.append(self.send(learner, "its gradient was applied"))
        return tuple(commands)

    def expected_staleness(self, learners: int) -> Staleness:
        return of_waiting(learners, self.k)

    def expected_update(self, learners: int, times: ComputeTimes) -> UpdateTime | None:
        if self.k == 1:
            return of_flow(1, learners, times)
        return of_barrier(self.k, learners, times) if times.is_memoryless or self.k >= learners else None

    def waits_for_all(self, learners: int) -> bool:
        return self.k >= learners

    def same_timing_as(self, learners: int) -> str | None:
        return "async" if self.k == 1 else "full-sync" if self.k == learners else None

    def laws(self) -> dict[str, bool]:
        return {
            "somebody is waited for": self.open > 0 or not self.held or not self.learners,
        }


class KBatchAsync(HoldsK):
    """Hold; the K-th gradient makes the update; whoever pushed gets the current weights at once. Nobody waits."""

    sentence = staticmethod(sentences.nobody_waits)
    waits = False

    def on_push(self, event: Pushed) -> tuple[Command, ...]:
        if len(self.held) < self.k:
            return (self.send_again(event.learner, "it has pushed; no learner waits"),)
        update = self.apply(tuple(self.held), f"{self.k} are in")
        return update, self.send_again(event.learner, "it has pushed; no learner waits")

    def expected_staleness(self, learners: int) -> Staleness:
        return of_batches(learners, self.k)

    def expected_update(self, learners: int, times: ComputeTimes) -> UpdateTime | None:
        return of_flow(self.k, learners, times)

    def same_timing_as(self, learners: int) -> str | None:
        return "async" if self.k == 1 else None


class StaleDrop(EachGradient):
    """async, but a gradient that is more than `limit` versions old is dropped."""

    sentence = staticmethod(sentences.drops)
    waits = False

    def __init__(self, *, limit: int, **common: Any) -> None:
        super().__init__(**common)
        self.limit = limit

    def on_push(self, event: Pushed) -> tuple[Command, ...]:
        age = self.version - event.version
        if age > self.limit:
            fate: Command = self.drop(event.ticket, f"too old: {age} versions, more than {self.limit}")
        else:
            fate = self.apply((event.ticket,), f"{age} versions old")
        return fate, self.send_again(event.learner, "it has pushed")

    def expected_staleness(self, learners: int) -> Staleness:
        return estimated(float(min(learners - 1, self.limit)), "at most the limit; about P - 1 if that is lower")


class Clocks:
    """A number for each learner, and which is the lowest, without looking at all of them."""

    def __init__(self, pairs: Iterable[Sequence[int]] = (), slowest: int = 0) -> None:
        self.of = {pair[0]: pair[1] for pair in pairs}
        self.at = Counter(self.of.values())  # how many learners are at a clock
        self.slowest = slowest  # stays where it was when nobody is left

    def set(self, learner: int, clock: int | None) -> None:
        """Move a learner's clock, or take it away."""
        before = self.of.pop(learner, None)
        if before is not None:
            self.at[before] -= 1
        if clock is not None:
            self.of[learner] = clock
            self.at[clock] += 1
        while self.of and not self.at[self.slowest]:
            del self.at[self.slowest]
            self.slowest += 1


class StaleSync(EachGradient):
    """Stale synchronous parallel (Ho et al. 2013): async, but nobody gets over `slack` pushes ahead of the slowest.

    A learner's clock is its own number of pushes; one who joins starts at the clock of the slowest.
    """

    sentence = staticmethod(sentences.leash)
    extra_state = ("waiting",)

    def __init__(self, *, slack: int, **common: Any) -> None:
        super().__init__(**common)
        self.slack = slack
        self.clocks = Clocks()
        self.waiting: list[int] = []  # in order of arrival

    def on_start(self, learner: int, why: str) -> tuple[Command, ...]:
        self.clocks.set(learner, self.clocks.slowest)
        return super().on_start(learner, why)

    def on_join(self, learner: int) -> tuple[Command, ...]:
        self.clocks.set(learner, self.clocks.slowest)
        return super().on_join(learner)

    def on_leave(self, learner: int) -> tuple[Command, ...]:
        self.clocks.set(learner, None)
        self.waiting = [other for other in self.waiting if other != learner]
        return self._release()

    def on_push(self, event: Pushed) -> tuple[Command, ...]:
        self.clocks.set(event.learner, self.clocks.of[event.learner] + 1)
        self.waiting.append(event.learner)
        return self.apply((event.ticket,), "asynchronous"), *self._release()

    def _release(self) -> tuple[Command, ...]:
        free = [one for one in self.waiting if self.clocks.of[one] - self.clocks.slowest <= self.slack]
        if free:
            self.waiting = [one for one in self.waiting if one not in free]
        return tuple(self.send(one, f"at most {self.slack} pushes ahead of the slowest") for one in free)

    def snapshot(self) -> dict[str, Any]:
        clocks = [list(pair) for pair in self.clocks.of.items()]
        return super().snapshot() | {"clocks": clocks, "slowest": self.clocks.slowest}

    def restore(self, state: dict[str, Any]) -> None:
        clocks = Clocks(state.get("clocks", ()), state.get("slowest", 0))
        super().restore(state)
        self.clocks = clocks

    def laws(self) -> dict[str, bool]:
        of, slowest = self.clocks.of, self.clocks.slowest
        return {
            "everybody has a clock": not self.started or set(of) == set(self.learners),
            "the slowest is known": not of or slowest == min(of.values()),
            "no learner is more than slack + 1 ahead": max(of.values(), default=slowest) - slowest <= self.slack + 1,
            "only those ahead wait": all(of[one] - slowest > self.slack for one in self.waiting),
        }


class AdaptiveK(KAsync):
    """K-async that starts with a small K, for speed, and doubles it when the loss flattens, for accuracy.

    After AdaSync (Dutta et al. 2021). The loss of an update is the mean over its gradients. When the mean loss of a
    window of updates is not below that of the window before by the given share, K doubles, up to all learners.
    """

    needs_loss = True
    extra_state = ("k", "losses", "before", "update_loss")
    kept_over_restart = ("k", "losses", "before")

    def __init__(self, *, k: int, window: int, improvement: float, **common: Any) -> None:
        super().__init__(k=k, **common)
        self.window = window
        self.improvement = improvement
        self.losses: list[float] = []  # of the updates of this window
        self.before: float | None = None  # mean of the window before
        self.update_loss: list[float] = []  # of the gradients of the update to come

    def on_push(self, event: Pushed) -> tuple[Command, ...]:
        if event.loss is not None and math.isfinite(event.loss):
            self.update_loss.append(event.loss)
        return super().on_push(event)

    def _if_due(self) -> tuple[Command, ...]:
        commands = super()._if_due()
        if commands and self.update_loss:
            self.losses.append(sum(self.update_loss) / len(self.update_loss))
            self.update_loss = []
            if len(self.losses) == self.window:
                self._end_window()
        return commands

    def _end_window(self) -> None:
        mean = sum(self.losses) / len(self.losses)
        if self.before is not None and mean > self.before - self.improvement * abs(self.before):
            self.k = min(2 * self.k, max(self.k, len(self.learners)))
        self.before, self.losses = mean, []

    def recall(self, kept: Mapping[str, Any]) -> None:
        super().recall(kept)
        self.k = min(self.k, self.expect)  # the run may go on with fewer learners

    def max_held(self, learners: int) -> int:
        return max(self.k, learners)

    def expected_staleness(self, learners: int) -> Staleness:
        return estimated(learners / self.k - 1, "P/K - 1 at first, less as K grows")

    def same_timing_as(self, learners: int) -> str | None:
        return None

    def explain(self, result: sentences.Outcome) -> str:
        return f"{super().explain(result)}; a simulation has no loss, so K stays at its initial value"
