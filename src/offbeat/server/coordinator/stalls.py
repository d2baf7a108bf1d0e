"""Whether a run can go on at all, as far as its coordinator knows.

Nothing can happen any more where nobody computes, no update or measurement is under way, no pause is due and no wake is
pending; only a learner that comes could change that, and whether one may is for whoever starts learners to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offbeat.server.coordinator.coordinator import Coordinator
    from offbeat.server.coordinator.session import LearnerSession

MOST_NAMED = 8  # learners in one line


def stall_of(coordinator: Coordinator) -> str | None:
    """One line that names the policy and what each learner waits for; None where something can still happen."""
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
        f"'{coordinator.setting.line}' stands still at update {coordinator.policy.version}: no learner computes, no "
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
