"""A policy as a run drives it: what it raises and what it holds is checked against what it says of itself.

A policy may come from outside this package. Whatever is wrong with it ends the run in one line (`PolicyError`):
starting the coordinator again would lead to the same place.
"""

from __future__ import annotations

from offbeat.errors import EventError, PolicyError, RequestError
from offbeat.policies import Command, Event, Policy
from offbeat.server.session import Setting


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
        try:
            return self.policy.handle(event)
        except EventError:
            raise
        except Exception as error:  # in the policy's own code
            raise PolicyError(f"the policy '{self.line}' failed: {type(error).__name__}: {error}") from error

    def check_room(self) -> None:
        """After its commands were carried out."""
        held = len(self.policy.held)
        if held > self.max_held:
            raise PolicyError(
                f"the policy '{self.line}' holds {held} gradients, and says that with {self.learners} learners it "
                f"holds {self.max_held} at most (max_held)"
            )
