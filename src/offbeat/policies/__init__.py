"""Synchronisation policies as state machines: events in, commands out. Standard library only.

    policy = policies.create("k-async:2,rate=inverse", expect=3)
    for learner in range(3):
        print(policy.handle(policies.Joined(learner)))  # Send: the learner gets the weights, and computes
    print(policy.handle(policies.Pushed(learner=1, ticket=7, version=0)))

`POLICIES` is the table of those one can name (`offbeat strategies`). For one of your own, subclass `Policy` and
register a `PolicyRow` with `offbeat.register_policy`. The parameter server and the simulator drive these very objects.
"""

from offbeat.policies.base import LearnerRule, Policy
from offbeat.policies.events import (
    Apply,
    Asked,
    Cancel,
    Command,
    Drop,
    Event,
    Joined,
    Left,
    Pushed,
    Resume,
    Send,
    Stopped,
    Wake,
    Woke,
)
from offbeat.policies.replay import recorded, replay
from offbeat.policies.staleness import Staleness
from offbeat.policies.table import EXAMPLES_FOR, POLICIES, PolicyRow, create, line_up, simplest

__all__ = [
    "EXAMPLES_FOR",
    "POLICIES",
    "Apply",
    "Asked",
    "Cancel",
    "Command",
    "Drop",
    "Event",
    "Joined",
    "LearnerRule",
    "Left",
    "Policy",
    "PolicyRow",
    "Pushed",
    "Resume",
    "Send",
    "Staleness",
    "Stopped",
    "Wake",
    "Woke",
    "create",
    "line_up",
    "recorded",
    "replay",
    "simplest",
]
