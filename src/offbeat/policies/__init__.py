"""Synchronisation policies as state machines: events in, commands out. Standard library only."""

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
from offbeat.policies.table import EXAMPLES_FOR, POLICIES, Row, create, line_up, simplest

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
    "Pushed",
    "Resume",
    "Row",
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
