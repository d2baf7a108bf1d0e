"""Pauses: all learners pause while one of them evaluates the weights, saves them, or ends the run.

    due -> every learner that waits for anything is told to pause, and says when it has
        -> all have said so, and no update is under way: the lowest of them leads
        -> it has evaluated or saved: all go on, or the run is over

Nobody is interrupted: whoever computes goes on, pushes, and pauses where it would wait for weights. But from the moment
that a pause is due nobody is told to compute, and no update is begun, whoever comes or goes. So in a pause the weights
do not change; gradients that were pushed wait, and so do updates that were decided.

A wake of the policy does not come in a pause (`PendingWake`).

This file knows nothing of what is done in a pause. It knows who has paused; the coordinator carries the messages.
"""

from __future__ import annotations

from collections.abc import Iterable

from offbeat.server.coordinator.session import LearnerSession, SessionName
from offbeat.server.run_setting import RunSetting
from offbeat.server.wire import EndPause, EnterPause

TIMES_KEPT = 16


class Pauses:
    """See the module's text."""

    def __init__(self, setting: RunSetting) -> None:
        self.every = setting.pause_every
        self.at_epochs = setting.pause_epochs
        self.leaders = setting.leaders or setting.learners
        self.due = False
        self.at_epoch_end = False  # this one is due since an epoch has ended
        self.number = 0  # of the pause that is due, or was last
        self.end_requested = False  # somebody wants the run to end
        self.requesters: set[SessionName] = set()  # learners that want to lead a pause
        self.over = False
        self.epoch = 0  # the latest that was seen
        self.lead: SessionName | None = None
        self.facts = ""  # that it was told
        self._told = (False, False)  # whether it knows that an epoch has ended, and that somebody wants the run to end
        self.began_s = 0.0
        self.times: list[tuple[float, float]] = []  # from when to when everybody paused: the last ones
        self.paused_s = 0.0  # in all

    @property
    def holds_back(self) -> bool:
        """Whether nobody is to be told to compute."""
        return self.due or self.over

    def begin(self) -> None:
        """A pause is due."""
        if not self.due and not self.over:
            self.due = True
            self.number += 1

    def request_end(self) -> None:
        """The run is to end, after a pause."""
        self.end_requested = True
        self.begin()

    def request(self, session: LearnerSession) -> None:
        """A learner wants a pause that it leads."""
        self.requesters.add(session.name)
        self.begin()

    def note_epoch(self, epoch: int) -> None:
        """The epoch that runs now: at the end of one a pause may be due."""
        if epoch != self.epoch:
            self.epoch = epoch
            if self.at_epochs and not self.over:
                self.begin()
                self.at_epoch_end = True

    def note_version(self, version: int) -> None:
        """There is a new version."""
        if self.every and version % self.every == 0:
            self.begin()

    def enter_messages(self, sessions: Iterable[LearnerSession], *, again: bool) -> list[EnterPause]:
        """To those that do not know yet that a pause is due; `again` to all that have not said that they pause."""
        if not self.due:
            return []
        late = [session for session in sessions if session.here and session.pause_entered != self.number]
        late = [session for session in late if again or session.pause_announced != self.number]
        for session in late:
            session.pause_announced = self.number
        return [EnterPause(session.learner, session.incarnation, self.number) for session in late]

    def next_lead(self, sessions: Iterable[LearnerSession], at_s: float) -> LearnerSession | None:
        """Who is to lead, if all have paused and nobody leads yet."""
        here = [session for session in sessions if session.here]
        if not self.due or not here or any(session.pause_entered != self.number for session in here):
            return None
        if any(self.leads(session) for session in here):
            return None
        able = self.able_to_lead(here)
        lead = next((session for session in here if session.name in self.requesters), able[0] if able else None)
        if lead is None:  # one that can is waited for
            return None
        self.began_s = at_s if self.lead is None else self.began_s  # one that led and died: it goes on
        self.lead = lead.name
        self._told = self.at_epoch_end, self.end_requested
        return lead

    def able_to_lead(self, sessions: Iterable[LearnerSession]) -> list[LearnerSession]:
        """Those that have what it takes: the run's folder, and the state that a run goes on from."""
        return [session for session in sessions if session.learner < self.leaders]

    def leads(self, session: LearnerSession) -> bool:
        return session.here and self.lead == session.name

    def lead_message(self, session: LearnerSession) -> EnterPause:
        return EnterPause(session.learner, session.incarnation, self.number, True, self.facts)

    def end(self, at_s: float, *, stop: bool) -> None:
        """The leader is through. What it could not know of, since it came later, is for another pause."""
        if self.lead is not None:
            self.requesters.discard(self.lead)
        knew_of_epoch, knew_of_end = self._told
        missed_epoch = self.at_epoch_end and not knew_of_epoch
        self._close(at_s)
        self.over = stop or (self.end_requested and knew_of_end)
        if not self.over and (missed_epoch or self.end_requested or self.requesters):
            self.begin()
            self.at_epoch_end = missed_epoch

    def abandon(self, at_s: float) -> None:
        """Nobody is left to pause."""
        self.requesters.clear()
        self._close(at_s)
        self.over = self.end_requested

    def _close(self, at_s: float) -> None:
        if self.lead is not None:
            self.times = [*self.times[1 - TIMES_KEPT :], (self.began_s, at_s)]
            self.paused_s += at_s - self.began_s
        self.due = self.at_epoch_end = False
        self.lead = None

    def end_message(self, session: LearnerSession) -> EndPause:
        return EndPause(session.learner, session.incarnation, self.number - self.due, self.over)


class PendingWake:
    """When the policy is to be woken.

    One wake is pending at most; a later one replaces it. In a pause (evaluation, checkpoint) nobody is told to compute,
    so that time is not the policy's: a wake does not come in a pause, and is put off by as long as the pause held
    learners back. The times are those of messages, so that a journal gives the same wakes again.
    """

    def __init__(self) -> None:
        self.at_s: float | None = None
        self._set_s = 0.0
        self._paused_s: float | None = None  # since when a pause holds everybody back

    def set(self, at_s: float, now_s: float) -> None:
        self.at_s, self._set_s = at_s, now_s

    @property
    def due_s(self) -> float | None:
        return None if self._paused_s is not None else self.at_s

    def take(self, now_s: float) -> bool:
        """Whether it is due; then it is pending no longer."""
        if self.due_s is None or now_s < self.due_s:
            return False
        self.at_s = None
        return True

    def pause(self, now_s: float, *, paused: bool) -> None:
        """After every message: whether a pause holds everybody back now."""
        if paused:
            self._paused_s = now_s if self._paused_s is None else self._paused_s
        elif self._paused_s is not None:
            if self.at_s is not None:
                self.at_s += now_s - max(self._paused_s, self._set_s)
            self._paused_s = None
