"""Helpers: run lines through a policy, and a learner world that only does what can happen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import strategies as st

from offbeat.policies import (
    Apply,
    Asked,
    Cancel,
    Command,
    Drop,
    Event,
    Joined,
    Left,
    Policy,
    Pushed,
    Resume,
    Send,
    Stopped,
    Wake,
    Woke,
    create,
)
from offbeat.policies.events import as_text, from_text


def say(policy: Policy, line: str) -> list[str]:
    """The commands that answer an event, as lines."""
    event = from_text(line)
    assert not isinstance(event, Apply | Drop | Cancel | Send | Resume | Wake)
    commands = policy.handle(event)
    assert all(command.why for command in commands), "every command carries its reason"
    policy.check_invariants()
    return [as_text(command) for command in commands]


def started(strategy: str, learners: int) -> Policy:
    """A policy whose learners have all joined and compute at version 0."""
    policy = create(strategy, expect=learners)
    for learner in range(learners - 1):
        assert say(policy, f"joined {learner}") == []
    assert say(policy, f"joined {learners - 1}") == [f"send {learner}" for learner in range(learners)]
    return policy


class World:
    """Learners, messages on their way and the books of an outsider, for random runs.

    `choices` lists the events that can happen next; `happen` makes one of them happen and checks what the policy says
    against its own books: versions rise by one an update, each ticket is applied or dropped at most once, cancelled
    work is never applied, and a policy with a barrier never applies a gradient of another version. Time passes between
    any two events; a wake that was asked for may come late, but not before its time, and a later one replaces it.
    """

    def __init__(self, strategy: str, learners: int, policy: Policy | None = None) -> None:
        self.policy = policy or create(strategy, expect=learners)
        self.barrier = self.policy.cancels
        self.learners = learners
        self.present: set[int] = set()
        self.owed: dict[
            int, list[tuple[int, bool]]
        ] = {}  # per learner: open minibatches (version, cancelled), in order
        self.version = 0
        self.ticket = 0
        self.held: dict[int, int] = {}  # ticket -> version
        self.most_held = 0  # at once, what has just arrived included unless it was dropped at once
        self.now_s = 0.0
        self.wake_at_s: float | None = None
        self.log: list[tuple[Event, tuple[Command, ...]]] = []

    def choices(self) -> list[Event]:
        now = self.now_s
        found: list[Event] = [] if self.wake_at_s is None else [Woke(max(now, self.wake_at_s))]
        found += [] if self.policy.started else [Woke(now)]
        for learner in range(self.learners + 2):
            if learner not in self.present:
                found.append(Joined(learner, now))
                continue
            found.append(Left(learner, now))
            if self.owed[learner]:
                version, cancelled = self.owed[learner][0]
                found.append(Pushed(learner, self.ticket, version, 1 + learner % 3, 0.5 * learner, 1.0, now))
                if cancelled:
                    found.append(Stopped(learner, version, now))
                elif len(self.owed[learner]) == 1:
                    found.append(Asked(learner, now))
        return found

    def happen(self, event: Event) -> None:
        match event:
            case Joined():
                self.present.add(event.learner)
                self.owed[event.learner] = []
            case Left():
                self.present.discard(event.learner)
            case Pushed():
                self.ticket += 1
                self.held[event.ticket] = event.version
                cancelled = self.owed[event.learner].pop(0)[1]
            case Stopped():
                self.owed[event.learner].pop(0)
            case Asked() if self.policy.rule.fetch_every == 0:
                self.owed[event.learner].clear()
            case Woke() if self.policy.started:
                assert self.wake_at_s is not None and event.at_s >= self.wake_at_s
                self.wake_at_s = None
            case _:
                pass
        self.now_s = event.at_s + 0.125
        commands = self.policy.handle(event)
        self.policy.check_invariants()
        dropped = {command.ticket for command in commands if isinstance(command, Drop)}
        self.most_held = max(self.most_held, len(self.held.keys() - dropped))
        self.log.append((event, commands))
        for command in commands:
            self._obey(command)
        if isinstance(event, Pushed) and cancelled:
            assert commands == (Drop(event.ticket),), "cancelled work is dropped, and nothing else happens"
        assert self.policy.version == self.version
        assert self.policy.wake_at_s == self.wake_at_s, "the pending wake is the latest that was asked for"
        assert set(self.policy.held) == set(self.held), "what is neither applied nor dropped is held"
        working = {one for one in self.present if any(not cancelled for _, cancelled in self.owed[one])}
        assert {one for one, seat in self.policy.learners.items() if seat.computing} == working, (
            "who was told to work works"
        )

    def _obey(self, command: Command) -> None:
        match command:
            case Apply(tickets, scales, _):
                assert len(tickets) == len(scales) == len(set(tickets)) >= 1
                for ticket in tickets:
                    assert ticket in self.held, "a gradient is applied once, and only after it was pushed"
                    version = self.held.pop(ticket)
                    assert version == self.version or not self.barrier
                    assert version <= self.version
                self.version += 1
            case Drop(ticket, _):
                assert ticket in self.held, "only what is held can be dropped"
                del self.held[ticket]
            case Cancel(learner, _):
                assert self.owed[learner], "only work that is open can be cancelled"
                self.owed[learner] = [(version, True) for version, _ in self.owed[learner]]
            case Send(learner, _):
                assert learner in self.present
                if self.policy.rule.fetch_every and self.owed[learner]:
                    return  # the same stretch of work goes on
                assert all(cancelled for _, cancelled in self.owed[learner])
                self.owed[learner].append((self.version, False))
            case Resume(learner, _):
                assert learner in self.present
                last = self.log[-1][0]
                assert isinstance(last, Pushed) and last.learner == learner
                self.owed[learner].append((last.version, False))
            case Wake(at_s, _):
                assert at_s >= self.log[-1][0].at_s, "a wake is not in the past"
                self.wake_at_s = at_s

    def run(self, draw: Callable[..., Any], most: int) -> None:
        length = draw(st.integers(0, most))
        # Drawn at once: a draw of its own would take longer than the event.
        for byte in draw(st.binary(min_size=length, max_size=length)):
            options = self.choices()
            # Pushes are what makes things go on: half of the events.
            pushes: Iterable[Event] = [event for event in options if isinstance(event, Pushed)]
            pool = list(pushes) if pushes and byte % 2 else options
            self.happen(pool[byte // 2 % len(pool)])
