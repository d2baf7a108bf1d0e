"""What holds of a coordinator between any two messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.server.coordinator.coordinator import Coordinator


def check(coordinator: Coordinator) -> None:
    """AssertionError, naming the law, where one is broken."""
    coordinator.policy.check_invariants()
    counts, policy, grants = coordinator.counts, coordinator.policy, coordinator.grants
    sessions, commit_groups, in_updates = coordinator.sessions.values(), grants.commit_groups, coordinator.in_updates()
    waiting = [*coordinator.gradients.values(), *(gradient for _, gradient in coordinator.unmeasured_pushes)]
    in_use = [session.slot for session in sessions if session.slot is not None]
    in_use += [slot for session in sessions for _, slot in session.kept_slots]
    in_use += [gradient.slot for gradient in waiting if gradient.slot >= 0]
    decided = {group.version + sum(not update.drift for update in group.queue) for group in commit_groups}
    reasons = sum(count for fate, count in counts.items() if fate.startswith("dropped: "))
    laws = {
        "every slot is free or has one owner": sorted(in_use + grants.free_slots) == list(range(grants.slots)),
        "received = waiting + applied + dropped": counts["received"]
        == len(waiting) + counts["applied"] + counts["dropped"],
        "every drop has a reason": counts["dropped"] == reasons,
        "what waits is held by the policy, or on its way through the shards": set(coordinator.gradients)
        == set(policy.held) | in_updates
        or coordinator.finished,
        "the version decided is that of the shards, and what is on its way": decided == {policy.version},
        "staleness counts what was decided": sum(coordinator.staleness.values()) == policy.applied,
        "nothing that can be read is being written": all(
            job.target != group.buffer and job.target not in group.pins.values()
            for group in commit_groups
            for job in group.job.values()
            if job.kind == "apply"
        ),
    }
    for law, holds in laws.items():
        # Not `assert`: the laws hold under `python -O` too.
        if not holds:
            raise AssertionError(law)
    if coordinator.leases.book is not None:
        coordinator.leases.book.check()
