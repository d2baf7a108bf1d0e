"""A policy as a run drives it: what it raises and what it holds is checked against what it says of itself.

A policy may come from outside this package. Whatever is wrong with it ends the run in one line (`PolicyError`):
starting the coordinator again would lead to the same place.
"""

from __future__ import annotations

from offbeat.errors import EventError, PolicyError, RequestError, Terminated
from offbeat.policies import Apply, Command, Drop, Event, Policy, Pushed, Wake
from offbeat.policies.events import COMMANDS, as_text
from offbeat.server.coordinator.session import Setting


class GuardedPolicy:
    """See the module's text. `slots`: places for gradients, of learners that compute and of those that wait."""

    def __init__(self, setting: Setting, slots: int) -> None:
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
