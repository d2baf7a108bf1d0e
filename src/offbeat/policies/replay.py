"""Events and their commands in a run log, and the log replayed through the policy alone.

In a log (`runs.log`) one line holds an event and the commands that answered it, in their text form:

    {"kind": "decision", "event": "pushed 2 t7 v40 n1 @12.84", "commands": ["apply t7", "send 2"], "why": [...]}

The policy is rebuilt from what the run says of itself: `strategy`, `expect` and, where there was one, `start_by_s`;
`staleness` says whether the steps of stale updates were shortened.
A strategy of a plugin is found only where the plugin is; the log names it, and it is not loaded from there: a log is
data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from offbeat import plugins
from offbeat.errors import EventError, LogError, ReplayError, RequestError
from offbeat.policies.base import Policy
from offbeat.policies.damping import CORRECT
from offbeat.policies.events import EVENTS, Apply, Command, Drop, Event, as_text, from_text
from offbeat.policies.table import create

LATEST_S = 1e12  # no run lasts longer
_LONGEST_EVENT = 500  # letters


class Decision(NamedTuple):
    """An event, the commands that answered it, and what a log may say of a push beside."""

    event: Event
    commands: tuple[Command, ...]
    batch: tuple[tuple[int, int, int], ...] = ()  # stretches of samples: epoch, start, count
    hyper: Any = None  # what its optimizer was told, where that has changed

    @property
    def applies(self) -> list[tuple[int, ...]]:
        """The tickets of each update."""
        return [command.tickets for command in self.commands if isinstance(command, Apply)]

    @property
    def drops(self) -> list[int]:
        """The tickets of gradients that are not applied."""
        return [command.ticket for command in self.commands if isinstance(command, Drop)]


def read_decision(record: Mapping[str, Any]) -> Decision:
    """The decision that a record of a log says; a `RequestError` if it says none."""
    line, commands, batch = record.get("event"), record.get("commands"), record.get("batch") or ()
    if not isinstance(line, str) or not isinstance(commands, list) or not all(isinstance(one, str) for one in commands):
        raise RequestError(f"expected an 'event' and its 'commands'; got {line!r} and {commands!r}")
    if len(line) > _LONGEST_EVENT:
        raise RequestError(f"an event of {len(line)} characters is too long")
    event, answers = from_text(line), [from_text(one) for one in commands]
    if not isinstance(event, EVENTS) or not 0 <= event.at_s < LATEST_S:
        raise RequestError(f"'{line}' is not an event")
    told = tuple(one for one in answers if not isinstance(one, EVENTS))
    if len(told) < len(answers):
        raise RequestError(f"'{line}' has an event among its commands")
    try:
        return Decision(event, told, tuple((epoch, start, count) for epoch, start, count in batch), record.get("hyper"))
    except (TypeError, ValueError):
        raise RequestError(f"'{line}' has the samples {batch!r}; expected [[epoch, start, count], ...]") from None


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
        raise LogError("the log's first line has no 'strategy' and 'expect', so it is not the log of a policy")
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


def replayed(policy: Policy, records: Iterable[Mapping[str, Any]]) -> Iterator[Decision]:
    """Each decision of a log, after the policy was fed its event and has answered the same.

    `ReplayError` names the first one that cannot be, or whose commands differ.
    """
    for number, record in enumerate(records, start=1):
        try:
            logged = read_decision(record)
            commands = tuple(policy.handle(logged.event))
        except (RequestError, EventError) as error:
            raise ReplayError(f"decision {number}: {error}") from None
        if commands != logged.commands:
            said = [as_text(command) for command in commands]
            raise ReplayError(
                f"decision {number}, '{record['event']}': the log has {record['commands']}, the policy says {said}"
            )
        yield logged


def replay(run: Mapping[str, Any], decisions: Iterable[Mapping[str, Any]], *, check: bool = True) -> Policy:
    """Feed the events to a fresh policy and compare; returns the policy as it is at the end.

    `ReplayError` names the first event whose commands differ. With `check`, invariants are checked after each.
    """
    policy = policy_of(run)
    for _ in replayed(policy, decisions):
        if check:
            policy.check_invariants()
    return policy
