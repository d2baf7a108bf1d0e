"""Policies that do not keep what they say, or say nothing at all: a run must end, in one line."""

from __future__ import annotations

from typing import Any

import offbeat
from offbeat.policies import Command, Policy, PolicyRow, Pushed
from offbeat.policies.base import EachGradient


class Mute(EachGradient):
    """Never answers a push."""

    def max_held(self, learners: int) -> int:
        return 100 * learners

    def on_push(self, event: Pushed) -> tuple[Command, ...]:
        return ()


class Unsent(EachGradient):
    """Never sends weights to anybody."""

    def on_push(self, event: Pushed) -> tuple[Command, ...]:
        return ()

    def on_start(self, learner: int, why: str) -> tuple[Command, ...]:
        return ()


class Liar(Policy):
    """Holds six, and says that it holds three."""

    waits = False

    def on_push(self, event: Pushed) -> tuple[Command, ...]:
        update = (self.apply(tuple(self.held), "six"),) if len(self.held) == 6 else ()
        return *update, self.send_again(event.learner, "go on")

    def max_held(self, learners: int) -> int:
        return 3

    def gradients_per_update(self, learners: int) -> int:
        return 6


class Crash(EachGradient):
    """Raises at its fifth push."""

    def on_push(self, event: Pushed) -> tuple[Command, ...]:
        if event.ticket == 5:
            raise KeyError("no such thing")
        return self.apply((event.ticket,), "asynchronous"), self.send(event.learner, "go on")


class Sleeper(EachGradient):
    """Nothing happens for five seconds after the first push, but a wake is pending: that is no stall."""

    def on_push(self, event: Pushed) -> tuple[Command, ...]:
        if self.version == 0 and len(self.held) == len(self.learners):
            return (self.wake(self.now_s + 5.0, "sleep"),)
        return () if self.version == 0 else (self.apply((event.ticket,), "awake"), self.send(event.learner, "go on"))

    def on_wake(self) -> tuple[Command, ...]:
        return self.apply(tuple(self.held), "awake"), *(self.send(one, "go on") for one in self.learners)

    def max_held(self, learners: int) -> int:
        return learners


class Crowds(EachGradient):
    """Sends weights to everybody, also to those that compute."""

    def on_push(self, event: Pushed) -> tuple[Command, ...]:
        return self.apply((event.ticket,), "one"), *(self.send(one, "for all") for one in self.learners)


class Abandons(EachGradient):
    """Cancels and sends nothing."""

    cancels = True

    def on_push(self, event: Pushed) -> tuple[Command, ...]:
        update = self.apply((event.ticket,), "one")
        late = [one for one, seat in self.learners.items() if seat.computing and seat.version < self.version]
        return update, *(self.cancel(one, "late") for one in late), self.send(event.learner, "go on")


class Hasty(EachGradient):
    """Cancels work on the current weights."""

    cancels = True

    def on_push(self, event: Pushed) -> tuple[Command, ...]:
        late = [one for one, seat in self.learners.items() if seat.computing]
        return tuple(self.cancel(one, "no reason") for one in late)


class Babbles(EachGradient):
    """Answers with something that is no command."""

    def on_push(self, event: Pushed) -> tuple[Command, ...]:
        return self.apply((event.ticket,), "one"), self.send(event.learner, "go on"), "hello"  # type: ignore[return-value]  # the point


class Wasteful(EachGradient):
    """Drops everything."""

    def on_push(self, event: Pushed) -> tuple[Command, ...]:
        return self.drop(event.ticket, "no"), self.send(event.learner, "go on")


def _row(name: str, create: Any) -> PolicyRow:
    return PolicyRow(name=name, summary=f"broken: {create.__doc__}", create=create, examples=(name,))


for made in (Mute, Unsent, Liar, Crash, Sleeper, Crowds, Abandons, Hasty, Babbles, Wasteful):
    offbeat.register_policy(_row(made.__name__.lower(), made))
