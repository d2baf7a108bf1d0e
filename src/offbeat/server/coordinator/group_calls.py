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
from offbeat.server.wire import MOST_BYTES, Called

KEPT_CALLS = 256
GAVE_UP = "gave up waiting"  # in the error of a call that is answered so
MOST_DATA_BYTES = MOST_BYTES // 2  # of all learners together


class Calls:
    """The answers so far, and what is answered next."""

    def __init__(self) -> None:
        self.last = 0  # that was answered
        self._kept: dict[int, tuple[tuple[tuple[int, bytes], ...], str]] = {}

    def again(self, row: LearnerSession, number: int) -> Called | None:
        """The answer of a call that is over."""
        if number > self.last:
            return None
        gone = (), f"call {number} is over, and of {self.last} only the last {KEPT_CALLS} are kept"
        data, error = self._kept.get(number, gone)
        return Called(row.learner, row.incarnation, number, data, error, row.answered)

    def withdraw(self, learner: int, number: int, here: Sequence[LearnerSession]) -> list[LearnerSession]:
        """A learner waits no longer for this call. Who is told at once: all others who have made it."""
        if number <= self.last:
            return []
        self._answer(number, (), f"learner {learner} {GAVE_UP} in call {number}, so that nobody has an answer to it")
        return [row for row in here if row.call is not None and row.call.number <= number]

    def _answer(self, number: int, data: tuple[tuple[int, bytes], ...], error: str) -> None:
        self.last = number
        self._kept[number] = data, error
        self._kept.pop(number - KEPT_CALLS, None)

    def next(self, here: Sequence[LearnerSession]) -> list[LearnerSession]:
        """Who is answered now: all who have made the call that is due, if everybody who is here has made one."""
        calls = [row.call for row in here if row.call is not None]
        if not calls or len(calls) < len(here):
            return []
        due = min(call.number for call in calls)
        members = {row.learner: row.call for row in here if row.call is not None and row.call.number == due}
        kinds = {learner: call.what for learner, call in members.items()}
        data = tuple((learner, members[learner].data) for learner in sorted(members))
        error = ""
        if len(set(kinds.values())) > 1:
            first, *others = sorted(kinds)
            other = next(learner for learner in others if kinds[learner] != kinds[first])
            error = (
                f"call {due} is {kinds[first]} on learner {first} and {kinds[other]} on learner {other}: all learners "
                "make the same calls in the same order"
            )
        elif sum(len(one) for _, one in data) > MOST_DATA_BYTES:
            error = f"call {due} carries more than the {MOST_DATA_BYTES} bytes that may travel"
        self._answer(due, () if error else data, error)
        return [row for row in here if row.call is not None and row.call.number == due]
