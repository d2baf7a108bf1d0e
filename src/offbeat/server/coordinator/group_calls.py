"""What learners say to each other beside their gradients: the n-th call of each is one call of all.

    each makes its n-th call, with a few bytes -> all that are here have made it -> each is told what all have given

Members are the learners that are here when it is answered. Who leaves is not waited for, and what it gave is left out.
One that was killed begins anew, with its first call: answers of calls that are over are kept for it, the last ones.
Who waits no longer ends the call for all: the others are told so, and the next call is again one of all.

This file knows nothing of what the bytes mean; the coordinator carries them.
"""

from __future__ import annotations

from collections.abc import Sequence

from offbeat.server.coordinator.session import LearnerSession
from offbeat.server.wire import MOST_DATA_BYTES, GroupCall, GroupCallAnswer

KEPT_CALLS = 256
GAVE_UP = "gave up waiting"  # in the error of a call that is answered so


class GroupCalls:
    """The answers so far, and what is answered next."""

    def __init__(self) -> None:
        self.last = 0  # that was answered
        self._kept: dict[int, tuple[tuple[tuple[int, bytes], ...], str]] = {}

    def receive(self, session: LearnerSession, call: GroupCall) -> GroupCallAnswer | None:
        """A learner calls, or without `what` waits no longer. The answer, if that call is over; else it waits."""
        waits = session.call
        if not call.what:
            if waits is not None and waits.number == call.number:
                session.call = None
            return None
        if waits is not None and call.number <= waits.number:
            return None  # it waits already, or this is an old one
        if call.number <= self.last:
            return self.answer(session, call.number)
        if call.seq not in session.versions:  # else what it said before has not come yet
            session.call = call
        return None

    def answer(self, session: LearnerSession, number: int) -> GroupCallAnswer:
        """The answer of a call that is over."""
        gone = (), f"call {number} has ended, and only the last {KEPT_CALLS} of {self.last} are kept"
        data, error = self._kept.get(number, gone)
        return GroupCallAnswer(session.learner, session.incarnation, number, data, error, session.answered)

    def withdraw(self, learner: int, number: int, here: Sequence[LearnerSession]) -> list[LearnerSession]:
        """A learner waits no longer for this call. Who is told at once: all others who have made it."""
        if number <= self.last:
            return []
        error = f"learner {learner} {GAVE_UP} in call {number}, so no learner gets the result of this call"
        return self._answer(here, number, (), error)

    def _answer(
        self, here: Sequence[LearnerSession], number: int, data: tuple[tuple[int, bytes], ...], error: str
    ) -> list[LearnerSession]:
        """The call is over. Those who wait for it, or for one before: they wait no longer."""
        self.last = number
        self._kept[number] = data, error
        self._kept.pop(number - KEPT_CALLS, None)
        served = [session for session in here if session.call is not None and session.call.number <= number]
        for session in served:
            session.call = None
        return served

    def next(self, here: Sequence[LearnerSession]) -> list[LearnerSession]:
        """Who is answered now: all who have made the call that is due, if everybody who is here has made one."""
        calls = [session.call for session in here if session.call is not None]
        if not calls or len(calls) < len(here):
            return []
        due = min(call.number for call in calls)
        members = {call.learner: call for call in calls if call.number == due}
        data = tuple((learner, members[learner].data) for learner in sorted(members))
        error = ""
        first, *others = sorted(members)
        other = next((one for one in others if members[one].what != members[first].what), None)
        if other is not None:
            error = (
                f"call {due} is {members[first].what} on learner {first} and {members[other].what} on learner {other}: "
                "all learners must make the same calls in the same order"
            )
        elif sum(len(one) for _, one in data) > MOST_DATA_BYTES:
            error = f"call {due} exceeds the limit of {MOST_DATA_BYTES} bytes for all learners together"
        return self._answer(here, due, () if error else data, error)
