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
    Tick,
)
from offbeat.policies.replay import recorded, replay
from offbeat.policies.table import POLICIES, create

__all__ = [
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
    "Send",
    "Stopped",
    "Tick",
    "create",
    "recorded",
    "replay",
]
