"""All that a coordinator knows, as bytes and back: so that a successor need not go through the whole run.

Law: a machine that was restored from a snapshot answers every message as the one that it was taken of. The random
worlds hold the two beside each other.

The state is that of the machine's parts, by their own types; what a policy keeps is what it says itself (`snapshot`,
`extra_state`). One from outside that changes more than that cannot be restored (`unsaved_state`): its run keeps the
whole journal.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import msgspec

from offbeat.leases import LeaseBook
from offbeat.policies import Policy
from offbeat.server.coordinator.coordinator import Coordinator
from offbeat.server.coordinator.grants import PendingUpdate, Pin
from offbeat.server.coordinator.session import Gradient, LearnerSession, SessionName
from offbeat.server.wire import Push, ShardJob


class GroupState(msgspec.Struct, array_like=True):
    """A commit group. Updates are shared by all of them: here they are places in one list."""

    version: int
    buffer: int
    pins: dict[Pin, int]
    queue: list[int]
    number: int
    job: dict[int, ShardJob]
    sums: dict[int, tuple[float, ...]]
    clip: float | None


class MachineState(msgspec.Struct, kw_only=True):
    """See the module's text."""

    at_s: float
    sessions: list[LearnerSession]
    updates: list[PendingUpdate]
    groups: list[GroupState]
    free_slots: list[int]
    granted: int
    generations: dict[int, int]
    skew: dict[int, int]
    policy: dict[str, Any]
    wake: tuple[float | None, float, float | None]
    pauses: dict[str, Any]
    book: dict[str, Any] | None
    samples: dict[str, int]
    calls: tuple[int, dict[int, tuple[tuple[tuple[int, bytes], ...], str]]]
    gradients: dict[int, Gradient]
    unmeasured: list[tuple[Push, Gradient]]
    ticket: int
    table: str
    seeder: SessionName | None
    seeded: bool
    begun_s: float
    counts: dict[str, int]
    staleness: dict[int, int]
    delays: dict[int, int]
    finished: bool


_PLAIN = ("ticket", "table", "seeder", "seeded", "begun_s", "finished")
_PAUSES = (
    "due", "at_epoch_end", "number", "end_requested", "over", "epoch", "facts", "began_s", "paused_s",
)  # fmt: skip


def take(machine: Coordinator) -> MachineState:
    """The state as it is between two messages. It shares lists with the machine: encode it at once."""
    grants, pauses, wake, book = machine.grants, machine.pauses, machine.wake, machine.leases.book
    updates: dict[int, tuple[int, PendingUpdate]] = {}
    for group in grants.commit_groups:
        for update in group.queue:
            updates.setdefault(id(update), (len(updates), update))
    return MachineState(
        at_s=machine._at_s,
        sessions=list(machine.sessions.values()),
        updates=[update for _, update in updates.values()],
        groups=[
            GroupState(
                group.version,
                group.buffer,
                group.pins,
                [updates[id(update)][0] for update in group.queue],
                group.number,
                group.job,
                group.sums,
                group.clip,
            )
            for group in grants.commit_groups
        ],
        free_slots=grants.free_slots,
        granted=grants.granted,
        generations=grants.generations,
        skew=grants.skew,
        policy=machine.policy.snapshot(),
        wake=(wake.at_s, wake._set_s, wake._paused_s),
        pauses={
            **{name: getattr(pauses, name) for name in _PAUSES},
            "requesters": sorted(pauses.requesters),
            "lead": pauses.lead,
            "told": pauses._told,
            "times": pauses.times,
        },
        book=None if book is None else book.snapshot(),
        samples=machine.leases.samples,
        calls=(machine.calls.last, machine.calls._kept),
        gradients=machine.gradients,
        unmeasured=machine.unmeasured_pushes,
        counts=machine.counts,
        staleness=machine.staleness,
        delays=machine.delays,
        **{name: getattr(machine, name) for name in _PLAIN},
    )


def restore(machine: Coordinator, state: MachineState) -> None:
    """Make a fresh machine what it was when the state was taken."""
    grants, pauses, wake = machine.grants, machine.pauses, machine.wake
    machine._at_s = state.at_s
    machine.sessions = {session.learner: session for session in state.sessions}
    for group, kept in zip(grants.commit_groups, state.groups, strict=True):
        group.version, group.buffer, group.pins, group.number = kept.version, kept.buffer, kept.pins, kept.number
        group.queue = deque(state.updates[place] for place in kept.queue)
        group.job, group.sums, group.clip = kept.job, kept.sums, kept.clip
    grants.free_slots, grants.granted = state.free_slots, state.granted
    grants.generations, grants.skew = state.generations, Counter(state.skew)
    machine.policy.restore(state.policy)
    wake.at_s, wake._set_s, wake._paused_s = state.wake
    for name in _PAUSES:
        setattr(pauses, name, state.pauses[name])
    pauses.requesters = {(learner, incarnation) for learner, incarnation in state.pauses["requesters"]}
    lead, told = state.pauses["lead"], state.pauses["told"]
    pauses.lead = None if lead is None else (lead[0], lead[1])
    pauses._told = told[0], told[1]
    pauses.times = [(start, end) for start, end in state.pauses["times"]]
    if state.book is not None:
        machine.leases.book = LeaseBook(samples=state.book["samples"], again=machine.setting.again)
        machine.leases.book.restore(state.book)
    machine.leases.samples = Counter(state.samples)
    machine.calls.last, machine.calls._kept = state.calls
    machine.gradients, machine.unmeasured_pushes = state.gradients, state.unmeasured
    machine.counts, machine.staleness = Counter(state.counts), Counter(state.staleness)
    machine.delays = Counter(state.delays)
    for name in _PLAIN:
        setattr(machine, name, getattr(state, name))


_NOT_STATE = {
    "expect", "rate", "needs_drift", "start_by_s", "damping", "now_s", "learners", "held", "last_update", "open",
    "unsent", "started", "version", "wake_at_s", "last_ticket", "issued", "applied", "dropped", "cancelled", "lost",
}  # fmt: skip


def unsaved_state(policy: Policy, fresh: Policy) -> list[str]:
    """Attributes that have changed since the policy was made, and are not in its snapshot.

    A class with a `snapshot` of its own knows what it keeps.
    """
    if getattr(policy.snapshot, "__func__", None) is not Policy.snapshot:
        return []
    saved = {*_NOT_STATE, *policy.extra_state}
    before = vars(fresh)
    return [name for name, now in vars(policy).items() if name not in saved and not _same(now, before.get(name))]


def _same(now: object, before: object) -> bool:
    try:
        return type(now) is type(before) and (now is before or bool(now == before))
    except Exception:  # what somebody's class says to a comparison
        return False


def encode_state(state: MachineState) -> bytes:
    return msgspec.msgpack.encode(state)


def decode_state(data: bytes) -> MachineState:
    return msgspec.msgpack.decode(data, type=MachineState)
