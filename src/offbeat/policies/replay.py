"""Events and their commands in a run log, and the log replayed through the policy alone.

In a log (`trace`) one line holds an event and the commands that answered it, in their text form:

    {"kind": "decision", "event": "pushed 2 t7 v40 n1 @12.84", "commands": ["apply t7", "send 2"], "why": [...]}

The policy is rebuilt from what the run says of itself: `strategy`, `expect` and, where there was one, `start_by_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from offbeat.errors import EventError, LogError, ReplayError, RequestError
from offbeat.policies.base import Policy
from offbeat.policies.events import Command, Event, as_text, from_text
from offbeat.policies.table import create


def decision(event: Event, commands: Iterable[Command]) -> dict[str, Any]:
    """The record of one event, for a log."""
    said = tuple(commands)
    return {"event": as_text(event), "commands": [as_text(c) for c in said], "why": [c.why for c in said]}


def recorded(policy: Policy, write: Callable[[dict[str, Any]], object]) -> Callable[[Event], tuple[Command, ...]]:
    """`policy.handle` that also hands each decision to `write`."""

    def handle(event: Event) -> tuple[Command, ...]:
        commands = policy.handle(event)
        write(decision(event, commands))
        return commands

    return handle


def replay(run: Mapping[str, Any], decisions: Iterable[Mapping[str, Any]], *, check: bool = True) -> Policy:
    """Feed the events to a fresh policy and compare; returns the policy as it is at the end.

    `ReplayError` names the first event whose commands differ. With `check` the invariants are looked at after each.
    """
    try:
        policy = create(run["strategy"], expect=run["expect"], start_by_s=run.get("start_by_s"))
    except KeyError as error:
        raise LogError(f"the log's first line has no {error}: it is not the log of a policy") from None
    for number, record in enumerate(decisions, start=1):
        try:
            event = from_text(record["event"])
            commands = policy.handle(event)  # type: ignore[arg-type]  # a command here is refused like a wrong event
        except (RequestError, EventError, KeyError) as error:
            raise ReplayError(f"decision {number}: {error}") from None
        said = [as_text(command) for command in commands]
        if said != record["commands"]:
            raise ReplayError(
                f"decision {number}, '{record['event']}': the log has {record['commands']}, the policy says {said}"
            )
        if check:
            policy.check_invariants()
    return policy
