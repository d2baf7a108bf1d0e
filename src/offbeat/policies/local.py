"""Policies in which learners go on by themselves for a while: Downpour, local SGD and DiLoCo.

The rule a learner follows (`rule`) is data: whoever runs learners, real or simulated, reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offbeat.errors import RequestError
from offbeat.policies import sentences
from offbeat.policies.barrier import KSync
from offbeat.policies.base import EachGradient, LearnerRule, Policy
from offbeat.policies.events import Command, Pushed
from offbeat.policies.staleness import Staleness, estimated
from offbeat.policies.waiting import ComputeTimes, UpdateTime, of_flow

# What the server does with the mean of what learners have moved: the options of SGD.
OUTER: dict[str, Mapping[str, float]] = {
    "average": Policy.outer_optimizer,
    "nesterov": {"lr": 0.7, "momentum": 0.9, "nesterov": 1.0},
}


class Downpour(EachGradient):
    """Dean et al. 2012: push what was accrued every `push` minibatches, fetch weights every `fetch`, and never wait.

    A learner steps its own copy in between. A push may hold work from before its last fetch; its version is that of
    the oldest. Shards update independently: the version here is that of one shard.
    """

    sentence = staticmethod(sentences.nobody_waits)

    def __init__(self, *, push: int, fetch: int, **common: Any) -> None:
        super().__init__(**common)
        self.rule = LearnerRule(push_every=push, fetch_every=fetch)

    def on_push(self, event: Pushed) -> tuple[Command, ...]:
        self.learners[event.learner].floor = event.version  # weights may be on their way: the next push may be as old
        return self.apply((event.ticket,), "asynchronous"), self.resume(event.learner, "it continues without waiting")

    def on_ask(self, learner: int) -> tuple[Command, ...]:
        self.issued -= 1  # the same stretch of work goes on, on newer weights
        return (self.send(learner, "it fetches"),)

    def expected_staleness(self, learners: int) -> Staleness:
        """A learner computes on while its weights are under way, and a push is as old as the oldest in it.

        Its own pushes since count too: the weights that come are without those on their way.
        """
        push, fetch = self.rule.push_every, self.rule.fetch_every
        own = 1 + (fetch - 1) / 2 if learners > 1 else 0.0  # one that is alone has made all steps itself
        others = (learners - 1) * (own + push - 1 / 2)
        formula = "about ((P-1) (3/2 + (FETCH-1)/2 + PUSH-1) + 1 + (FETCH-1)/2) / PUSH"
        return estimated((others + own) / push, formula)

    def expected_update(self, learners: int, times: ComputeTimes) -> UpdateTime | None:
        return of_flow(self.rule.push_every, learners, times)

    def laws(self) -> dict[str, bool]:
        return {"nobody waits": not self.started or self.open == len(self.learners)}


class LocalSGD(KSync):
    """H minibatches on each learner, then the mean of all (McMahan et al. 2017, Stich 2019).

    What is pushed is by how much the learner's own optimizer moved the weights. With `outer` "average" the server steps
    by the mean of these; with "nesterov" it feeds them to Nesterov momentum, which is DiLoCo (Douillard et al. 2023).

    With `overlap` a learner that has pushed computes on from its own weights, and takes the new ones d minibatches
    later, as soon as they are there (or with `delay` exactly so many later): w' plus its own change since the push
    (as in Streaming DiLoCo, Douillard et al. 2025, with all of the model as one fragment, and nothing mixed). The next
    push has what it has changed since, these d minibatches included: each minibatch is pushed once, every H of them.
    """

    def __init__(
        self, *, h: int, outer: str, overlap: str | None = None, delay: int | None = None, **common: Any
    ) -> None:
        super().__init__(k=None, **common)
        self.rule = LearnerRule(push_every=h, delta=True, delays=_delays(h, delay, overlaps=overlap is not None))
        self.outer_optimizer = OUTER[outer]

    def expected_update(self, learners: int, times: ComputeTimes) -> UpdateTime | None:
        return None if self.rule.overlaps else super().expected_update(learners, times)  # a learner may be ahead


def _delays(h: int, delay: int | None, *, overlaps: bool) -> tuple[int, int]:
    if delay is None:
        return (0, h) if overlaps else (0, 0)
    if not overlaps:
        raise RequestError(f"delay={delay} is for learners that compute on: write local-sgd:{h},overlap,delay={delay}")
    if delay > h:
        raise RequestError(f"delay={delay} exceeds H={h}, after which the next push needs the new weights")
    return delay, delay
