"""A policy as a run drives it: what it raises and what it holds is checked against what it says of itself.

A policy may come from outside this package. Whatever is wrong with it ends the run in one line (`PolicyError`):
starting the coordinator again would lead to the same place.
"""

from __future__ import annotations

import json
from typing import Any

from offbeat.errors import EventError, PolicyError, RequestError, Terminated
from offbeat.policies import Apply, Command, Drop, Event, Policy, Pushed, Wake
from offbeat.policies.events import COMMANDS, as_text
from offbeat.server.run_setting import RunSetting


class GuardedPolicy:
    """See the module's text. `slots`: places for gradients, of learners that compute and of those that wait."""

    def __init__(self, setting: RunSetting, slots: int) -> None:
        self.line, self.learners = setting.line, setting.learners
        self.policy: Policy = setting.policy()
        self.max_held = self.policy.max_held(setting.learners)
        if slots < setting.learners + self.max_held - 1:
            raise RequestError(
                f"'{self.line}' holds up to {self.max_held} gradients; with {self.learners} learners that needs "
                f"{self.learners + self.max_held - 1} slots, and there are {slots}"
            )

    def handle(self, event: Event) -> tuple[Command, ...]:
        """What the policy says, if it can be carried out."""
        tickets = set(self.policy.held)
        if isinstance(event, Pushed):
            tickets.add(event.ticket)
        try:
            commands = tuple(self.policy.handle(event))
        except (EventError, Terminated):
            raise
        except (Exception, SystemExit) as error:  # in the policy's own code
            said = " ".join(str(error).split())
            raise PolicyError(f"the policy '{self.line}' failed: {type(error).__name__}: {said}") from error
        dropped = {command.ticket for command in commands if isinstance(command, Drop)}
        held = len(tickets - dropped)
        if held > self.max_held:
            raise PolicyError(
                f"the policy '{self.line}' holds {held} gradients, and says that with {self.learners} learners "
                f"it holds {self.max_held} at most (max_held)"
            )
        if self.policy.unsent:
            who = min(self.policy.unsent)
            raise PolicyError(f"the policy '{self.line}' cancels learner {who} and sends it no weights")
        for command in commands:
            wrong = self._wrong(command, tickets)
            if wrong:
                raise PolicyError(f"the policy '{self.line}' answers '{as_text(event)}' with {wrong}")
        return commands

    def _wrong(self, command: object, tickets: set[int]) -> str:
        """What is wrong with a command, in words; `tickets` are those that nothing was said of yet."""
        if not isinstance(command, COMMANDS):
            return f"{command!r}, which is no command"
        if isinstance(command, Apply | Drop):
            named = command.tickets if isinstance(command, Apply) else (command.ticket,)
            if not named or len(set(named)) < len(named) or not tickets.issuperset(named):
                return f"'{as_text(command)}', but it holds {sorted(tickets)}"
            if isinstance(command, Apply) and not 0 < command.damping <= 1:
                return f"'{as_text(command)}', but a damping is above 0 and at most 1"
            tickets.difference_update(named)
        elif not isinstance(command, Wake) and command.learner not in self.policy.learners:
            return f"'{as_text(command)}', but that learner is not here"
        return ""

    def kept(self) -> dict[str, Any]:
        """What the policy keeps over a restart, as it will come back."""
        try:
            kept: dict[str, Any] = json.loads(json.dumps(self.policy.kept(), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise PolicyError(f"the policy '{self.line}' keeps what is no plain data: {error}") from None
        return kept


class PendingWake:
    """When the policy is to be woken.

    One wake is pending at most; a later one replaces it. In a pause (evaluation, checkpoint) nobody is told to compute,
    so that time is not the policy's: a wake does not come in a pause, and is put off by as long as the pause held
    learners back. The times are those of messages, so that a journal gives the same wakes again.
    """

    def __init__(self) -> None:
        self.at_s: float | None = None
        self._set_s = 0.0
        self._paused_s: float | None = None  # since when a pause holds everybody back

    def set(self, at_s: float, now_s: float) -> None:
        self.at_s, self._set_s = at_s, now_s

    @property
    def due_s(self) -> float | None:
        return None if self._paused_s is not None else self.at_s

    def take(self, now_s: float) -> bool:
        """Whether it is due; then it is pending no longer."""
        if self.due_s is None or now_s < self.due_s:
            return False
        self.at_s = None
        return True

    def pause(self, now_s: float, *, paused: bool) -> None:
        """After every message: whether a pause holds everybody back now."""
        if paused:
            self._paused_s = now_s if self._paused_s is None else self._paused_s
        elif self._paused_s is not None:
            if self.at_s is not None:
                self.at_s += now_s - max(self._paused_s, self._set_s)
            self._paused_s = None
