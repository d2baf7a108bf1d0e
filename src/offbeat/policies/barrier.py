"""Policies with a barrier: every gradient of an update was computed at the same version, staleness is 0.

Dutta, Joshi, Ghosh, Dube, Nagpurkar 2018, "Slow and stale gradients can win the race". Gradients are applied in the
order of learners, not of arrival, so that the same contributors give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offbeat.policies.base import Policy
from offbeat.policies.events import Command, Pushed


class Barrier(Policy):
    """Shared by the policies below: the update, and what it does to everybody."""

    cancels = True

    def cut(self, why: str) -> list[Command]:
        """Apply all that is held, cancel whoever still computes, send the new weights to all."""
        order = sorted(self.held, key=lambda ticket: self.held[ticket].learner)  # stable: arrival within a learner
        commands: list[Command] = [self.apply(tuple(order), why)]
        late = [learner for learner, seat in self.seats.items() if seat.computing]
        commands += [self.cancel(learner, "the update went without it") for learner in late]
        commands += [self.send(learner, "a new version for all") for learner in self.seats]
        return commands

    def laws(self) -> dict[str, bool]:
        return {
            "all held gradients are of the current version": all(h.version == self.version for h in self.held.values())
        }


class KSync(Barrier):
    """Wait for the first K of P; with fewer than K left, for all that are left."""

    def __init__(self, *, k: int | None, **common: Any) -> None:
        super().__init__(**common)
        self.k = k  # None: everybody

    def on_push(self, event: Pushed) -> Sequence[Command]:
        return self._if_due()

    def on_leave(self, learner: int) -> Sequence[Command]:
        return self._if_due() if self.seats else []

    def _if_due(self) -> Sequence[Command]:
        if self.held and self.open == 0:
            return self.cut(f"all {len(self.held)} that can come are in")
        if self.k is not None and len(self.held) >= self.k:
            return self.cut(f"the first {self.k} of {len(self.seats)} are in")
        return []

    def laws(self) -> dict[str, bool]:
        waits = self.k is None or len(self.held) < self.k
        moves = self.open > 0 or not self.held or not self.seats
        return super().laws() | {"fewer than K wait": waits, "somebody is waited for": moves}


class KBatchSync(Barrier):
    """Wait for the first K minibatches, from whomever; who is done before computes another at the same weights."""

    def __init__(self, *, k: int, **common: Any) -> None:
        super().__init__(**common)
        self.k = k

    def on_push(self, event: Pushed) -> Sequence[Command]:
        if len(self.held) >= self.k:
            return self.cut(f"the first {self.k} minibatches are in")
        return [self.resume(event.learner, f"{len(self.held)} of {self.k} are in; another at the same weights")]

    def most_held(self) -> int:
        return self.k - 1

    def laws(self) -> dict[str, bool]:
        return super().laws() | {"nobody waits": not self.started or self.open == len(self.seats)}
