"""Strategies of one's own, as somebody outside this package would write them; tests and docs load this file.

offbeat simulate pool:6 --learners 3 --plugin tests/plugins/own_strategies.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import offbeat
from offbeat.policies import Command, Policy, PolicyRow, Pushed, Staleness
from offbeat.policies.staleness import FRESH
from offbeat.schedules import Algorithm
from offbeat.schedules.phases import Chunks, Phase, Ranks, sends
from offbeat.spec import Param, parse_count, parse_seconds


class Pool(Policy):
    """K-batch-async under another name: nothing here is called k, and it may hold more gradients than learners."""

    waits = False

    def __init__(self, *, size: int, **common: Any) -> None:
        super().__init__(**common)
        self.size = size

    def on_push(self, event: Pushed) -> tuple[Command, ...]:
        full = len(self.held) == self.size
        update = (self.apply(tuple(self.held), f"{self.size} are in the pool"),) if full else ()
        return *update, self.send_again(event.learner, "nobody waits")

    def max_held(self, learners: int) -> int:
        return self.size

    def gradients_per_update(self, learners: int) -> int:
        return self.size


class Metronome(Policy):
    """An update at every beat of a clock, of whatever is in by then; who still computes is cancelled."""

    cancels = True

    def __init__(self, *, period: float, **common: Any) -> None:
        super().__init__(**common)
        self.period = period

    def on_push(self, event: Pushed) -> tuple[Command, ...]:
        if sum(held.learner == event.learner for held in self.held.values()) > 1:  # it left, and came back
            return (self.drop(event.ticket, "it has one in this beat"),)
        return () if self.wake_at_s is not None else (self.wake(self.now_s + self.period, "the next beat"),)

    def on_wake(self) -> tuple[Command, ...]:
        late = [learner for learner, seat in self.learners.items() if seat.computing]
        update = self.apply(tuple(self.held), f"{len(self.held)} are in at the beat")
        cancels = [self.cancel(learner, "late for the beat") for learner in late]
        return update, *cancels, *(self.send(learner, "a new beat") for learner in self.learners)

    def max_held(self, learners: int) -> int:
        return learners

    def gradients_per_update(self, learners: int) -> int:
        return 1

    def expected_staleness(self, learners: int) -> Staleness:
        return FRESH


class Hoard(Policy):
    """`rounds` minibatches of every learner at the same weights, then one update of all; who is done first waits.

    It holds rounds * P gradients: more than there are learners.
    """

    extra_state = ("done",)

    def __init__(self, *, rounds: int, **common: Any) -> None:
        super().__init__(**common)
        self.rounds = rounds
        self.done: dict[str, int] = {}  # minibatches of each learner in this version; JSON has no whole numbers as keys

    def on_push(self, event: Pushed) -> tuple[Command, ...]:
        name = str(event.learner)
        if self.done.get(name, 0) == self.rounds:  # it was done, left, and came back
            return self.drop(event.ticket, "it has done its rounds"), *self._if_due()
        self.done[name] = self.done.get(name, 0) + 1
        if self.done[name] < self.rounds:
            return (self.resume(event.learner, "another at the same weights"),)
        return self._if_due()

    def on_leave(self, learner: int) -> tuple[Command, ...]:
        return self._if_due()

    def _if_due(self) -> tuple[Command, ...]:
        if self.open or not self.held:
            return ()
        self.done = {}
        update = self.apply(tuple(self.held), "all rounds of all learners")
        return update, *(self.send(one, "a new version") for one in self.learners)

    def max_held(self, learners: int) -> int:
        return self.rounds * learners

    def gradients_per_update(self, learners: int) -> int:
        return self.rounds * learners

    def expected_staleness(self, learners: int) -> Staleness:
        return FRESH


def recursive_doubling(ranks: Ranks, chunks: Chunks) -> Phase:
    """Everybody exchanges the whole vector with a partner at distance 1, 2, 4, ...; extra ranks fold in and out."""
    at, core = np.asarray(ranks, np.int32), 1 << (len(ranks).bit_length() - 1)
    extra, fold = at[core:], at[: len(ranks) - core]
    partners = [at[np.arange(core) ^ (1 << bit)] for bit in range(core.bit_length() - 1)]
    moves = [(extra, fold, True), *((at[:core], partner, True) for partner in partners), (fold, extra, False)]
    return [sends(one, other, np.tile(chunks, (len(one), 1)), reduce=add) for one, other, add in moves if len(one)]


def all_bytes(ranks: int, size_bytes: int) -> int:
    core = 1 << (ranks.bit_length() - 1)
    return size_bytes * (core * (core.bit_length() - 1) + 2 * (ranks - core))


def _param(name: str, read: Any) -> tuple[Param, ...]:
    return (Param(name=name, read=read, positional=True, required=True, help=f"its {name}"),)


offbeat.register_policy(
    PolicyRow(name="pool", summary="a pool of gradients", create=Pool, params=_param("size", parse_count),
        examples=("pool:6", "pool:2"), lineups={"compare": ("pool:{half}",)})
)  # fmt: skip
offbeat.register_policy(
    PolicyRow(name="metronome", summary="an update at every beat", create=Metronome,
        params=_param("period", parse_seconds), examples=("metronome:20ms",))
)  # fmt: skip
offbeat.register_policy(
    PolicyRow(name="hoard", summary="several minibatches of every learner in an update", create=Hoard,
        params=_param("rounds", parse_count), examples=("hoard:3",))
)  # fmt: skip
offbeat.register_schedule(
    Algorithm(name="recursive-doubling", summary="exchange the whole vector, log2 P times", chunks=lambda ranks: 1,
              phase=recursive_doubling, total_bytes=all_bytes, auto=7, examples=("recursive-doubling",))
)  # fmt: skip
