"""What holds of a coordinator between any two messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.server.coordinator.coordinator import Coordinator


def check(coordinator: Coordinator) -> None:
    """AssertionError, naming the law, where the books do not add up."""
    coordinator.policy.check_invariants()
    counts, policy, desk = coordinator.counts, coordinator.policy, coordinator.desk
    rows, lanes, in_updates = coordinator.rows.values(), desk.lanes, coordinator.in_updates()
    waiting = [*coordinator.gradients.values(), *(gradient for _, gradient in coordinator.inbox)]
    in_use = [row.slot for row in rows if row.slot is not None]
    in_use += [slot for row in rows for _, slot in row.limbo]
    in_use += [gradient.slot for gradient in waiting if gradient.slot >= 0]
    decided = {lane.version + sum(not work.drift for work in lane.queue) for lane in lanes}
    reasons = sum(count for fate, count in counts.items() if fate.startswith("dropped: "))
    laws = {
        "every slot is free or has one owner": sorted(in_use + desk.free_slots) == list(range(desk.slots)),
        "received = waiting + applied + dropped": counts["received"]
        == len(waiting) + counts["applied"] + counts["dropped"],
        "every drop has a reason": counts["dropped"] == reasons,
        "what waits is held by the policy, or on its way through the shards": set(coordinator.gradients)
        == set(policy.held) | in_updates
        or coordinator.finished,
        "the version decided is that of the shards, and what is on its way": decided == {policy.version},
        "staleness counts what was decided": sum(coordinator.staleness.values()) == policy.applied,
        "nothing that can be read is being written": all(
            job.target != lane.buffer and job.target not in lane.pins.values()
            for lane in lanes
            for job in lane.job.values()
            if job.kind == "apply"
        ),
    }
    for law, holds in laws.items():
        # Not `assert`: the laws hold under `python -O` too.
        if not holds:
            raise AssertionError(law)
    if coordinator.book is not None:
        coordinator.book.check()
