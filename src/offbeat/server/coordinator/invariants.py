"""What holds of a coordinator between any two messages, and whether its run can go on at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.server.coordinator.coordinator import Coordinator
    from offbeat.server.coordinator.session import LearnerSession

MOST_NAMED = 8  # learners in one line


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
        "each waiting gradient is held by the policy or in an update under way": set(coordinator.gradients)
        == set(policy.held) | in_updates
        or coordinator.finished,
        "the policy's version is that of the shards plus the updates under way": decided == {policy.version},
        "staleness is counted for each applied gradient": sum(coordinator.staleness.values()) == policy.applied,
        "no buffer that can be read is being written": all(
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


def stall_of(coordinator: Coordinator) -> str | None:
    """One line that names the policy and what each learner waits for; None where something can still happen.

    Nothing can happen any more where nobody computes, no update or measurement is under way, no pause is due and no
    wake is pending; only a learner that comes could change that, and whether one may is for whoever starts learners.
    """
    here = [session for session in coordinator.sessions.values() if session.here]
    if not coordinator.seeded or coordinator.finished or not here:
        return None
    if coordinator.pauses.holds_back or coordinator.wake.at_s is not None:
        return None
    if not coordinator.grants.idle or coordinator.unmeasured_pushes or any(_computes(session) for session in here):
        return None
    waits = [f"learner {session.learner} waits for {_waits_for(coordinator, session)}" for session in here]
    more = f", and {len(waits) - MOST_NAMED} more learners wait" if len(waits) > MOST_NAMED else ""
    return (
        f"'{coordinator.setting.line}' is stuck at update {coordinator.policy.version}: no learner computes, no "
        f"update is under way and no wake is pending; {', '.join(waits[:MOST_NAMED])}{more}"
    )


def _computes(session: LearnerSession) -> bool:
    """It was told to, and has not answered: it computes, or has yet to say that it was cancelled."""
    return session.go is not None and session.go.seq > session.answered


def _waits_for(coordinator: Coordinator, session: LearnerSession) -> str:
    held = coordinator.gradients.values()
    if session.grant is not None:
        return f"room for its gradient ({len(held)} are held in {coordinator.grants.slots} slots)"
    if session.call is not None:
        return f"the others at its call {session.call.number} ({session.call.what})"
    if session.want is not None:
        return "samples"
    if any(gradient.learner == session.learner for gradient in held):
        return "the policy to apply its gradient"
    return "the policy to send it weights"
