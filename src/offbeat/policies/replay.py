"""Events and their commands in a run log, and the log replayed through the policy alone.

In a log (`trace`) one line holds an event and the commands that answered it, in their text form:

    {"kind": "decision", "event": "pushed 2 t7 v40 n1 @12.84", "commands": ["apply t7", "send 2"], "why": [...]}

The policy is rebuilt from what the run says of itself: `strategy`, `expect` and, where there was one, `start_by_s`;
`staleness` says whether the steps of stale updates were shortened.
A strategy of a plugin is found only where the plugin is; the log names it, and it is not loaded from there: a log is
data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from offbeat import plugins
from offbeat.errors import EventError, LogError, ReplayError, RequestError
from offbeat.policies.base import Policy
from offbeat.policies.damping import CORRECT
from offbeat.policies.events import EVENTS, Command, Event, as_text, from_text
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


def policy_of(run: Mapping[str, Any]) -> Policy:
    """A fresh policy as a log's first line describes it."""
    line, expect, start_by_s = run.get("strategy"), run.get("expect"), run.get("start_by_s")
    if not isinstance(line, str) or not isinstance(expect, int):
        raise LogError("the log's first line does not say 'strategy' and 'expect': it is not the log of a policy")
    try:
        corrects, scaling = run.get("staleness") == CORRECT, run.get("scaling", 1.0)
        if not isinstance(scaling, int | float) or not 0 < scaling < math.inf:
            raise LogError(f"the log's first line says 'scaling' {scaling!r}: expected a number above 0")
        return create(line, expect=expect, start_by_s=start_by_s, corrects=corrects, scaling=scaling)
    except RequestError as error:
        raise RequestError(f"{error}{missing_plugins(run)}") from None


def missing_plugins(run: Mapping[str, Any]) -> str:
    """What to say where a strategy is unknown and the run was made with plugins that are not here."""
    used = run.get("plugins")
    missing = [str(name) for name in used if name not in plugins.named()] if isinstance(used, list) else []
    return f"; the run was made with --plugin {' --plugin '.join(missing)}" if missing else ""


def replay(run: Mapping[str, Any], decisions: Iterable[Mapping[str, Any]], *, check: bool = True) -> Policy:
    """Feed the events to a fresh policy and compare; returns the policy as it is at the end.

    `ReplayError` names the first event whose commands differ. With `check` the invariants are looked at after each.
    """
    policy = policy_of(run)
    for number, record in enumerate(decisions, start=1):
        event, logged = record.get("event"), record.get("commands")
        if not isinstance(event, str) or not isinstance(logged, list):
            raise ReplayError(f"decision {number}: expected an 'event' and its 'commands'; got {dict(record)}")
        try:
            told = from_text(event)
            if not isinstance(told, EVENTS):
                raise RequestError(f"'{event}' is not an event")
            said = [as_text(command) for command in policy.handle(told)]
        except (RequestError, EventError) as error:
            raise ReplayError(f"decision {number}: {error}") from None
        if said != logged:
            raise ReplayError(f"decision {number}, '{event}': the log has {logged}, the policy says {said}")
        if check:
            policy.check_invariants()
    return policy
