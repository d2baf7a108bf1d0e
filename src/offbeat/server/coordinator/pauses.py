"""Rests: all learners stand still for a while, so that one of them can look at the weights, save them, or end the run.

    due -> every learner that waits for anything is told to rest, and says when it does
        -> all have said so, and no update is under way: the lowest of them leads
        -> it has looked or saved: all rise, or the run is over

Nobody is interrupted: whoever computes goes on, pushes, and rests where it would wait for weights. But from the moment
that a rest is due nobody is told to compute, and no update is begun, whoever comes or goes. So in a rest the weights
stand still; gradients that were pushed wait, and so do updates that were decided.

This file knows nothing of what is done in a rest. It keeps the books of who rests; the coordinator carries the words.
"""

from __future__ import annotations

from collections.abc import Iterable

from offbeat.server.coordinator.session import LearnerSession, Setting
from offbeat.server.wire import EndPause, EnterPause

Stay = tuple[int, int]  # a learner and its incarnation


class Pauses:
    """See the module's text."""

    def __init__(self, setting: Setting) -> None:
        self.every = setting.rest_every
        self.at_epochs = setting.rest_epochs
        self.due = False
        self.at_epoch_end = False  # this one is due since an epoch has ended
        self.number = 0  # of the rest that is due, or was last
        self.halting = False  # somebody wants the run to end
        self.askers: set[Stay] = set()  # learners that want to lead a rest
        self.over = False
        self.epoch = 0  # the latest that was seen
        self.lead: Stay | None = None
        self.facts = ""  # that it was told
        self._told = (False, False)  # whether it knows that an epoch has ended, and that somebody wants the run to end
        self.began_s = 0.0
        self.times: list[tuple[float, float]] = []  # from when to when everybody stood still

    @property
    def holds_back(self) -> bool:
        """Whether nobody is to be told to compute."""
        return self.due or self.over

    def begin(self) -> None:
        """A rest is due."""
        if not self.due and not self.over:
            self.due = True
            self.number += 1

    def halt(self) -> None:
        """The run is to end, after a rest."""
        self.halting = True
        self.begin()

    def want(self, row: LearnerSession) -> None:
        """A learner wants a rest that it leads."""
        self.askers.add((row.learner, row.incarnation))
        self.begin()

    def look_at(self, epoch: int) -> None:
        """The epoch that runs now: at the end of one a rest may be due."""
        if epoch != self.epoch:
            self.epoch = epoch
            if self.at_epochs and not self.over:
                self.begin()
                self.at_epoch_end = True

    def reached(self, version: int) -> None:
        """There is a new version."""
        if self.every and version % self.every == 0:
            self.begin()

    def calls(self, rows: Iterable[LearnerSession], *, again: bool) -> list[EnterPause]:
        """To those that do not know yet that a rest is due; `again` to all that have not said that they rest."""
        if not self.due:
            return []
        late = [row for row in rows if row.here and row.rested != self.number and (again or row.called != self.number)]
        for row in late:
            row.called = self.number
        return [EnterPause(row.learner, row.incarnation, self.number) for row in late]

    def next_lead(self, rows: Iterable[LearnerSession], at_s: float) -> LearnerSession | None:
        """Who is to lead, if all rest and nobody leads yet."""
        here = [row for row in rows if row.here]
        if not self.due or not here or any(row.rested != self.number for row in here):
            return None
        if self.lead is not None and any((row.learner, row.incarnation) == self.lead for row in here):
            return None
        self.began_s = at_s if self.lead is None else self.began_s  # one that led and died: it goes on
        lead = next((row for row in here if (row.learner, row.incarnation) in self.askers), here[0])
        self.lead = lead.learner, lead.incarnation
        self._told = self.at_epoch_end, self.halting
        return lead

    def leads(self, row: LearnerSession) -> bool:
        return row.here and self.lead == (row.learner, row.incarnation)

    def end(self, at_s: float, *, stop: bool) -> None:
        """The leader is through. What it could not know of, since it came later, is for another rest."""
        if self.lead is not None:
            self.askers.discard(self.lead)
        knew_of_end, knew_of_halt = self._told
        missed_end = self.at_epoch_end and not knew_of_end
        self._close(at_s)
        self.over = stop or (self.halting and knew_of_halt)
        if not self.over and (missed_end or self.halting or self.askers):
            self.begin()
            self.at_epoch_end = missed_end

    def drop(self, at_s: float) -> None:
        """Nobody is left to rest."""
        self.askers.clear()
        self._close(at_s)
        self.over = self.halting

    def _close(self, at_s: float) -> None:
        if self.lead is not None:
            self.times.append((self.began_s, at_s))
        self.due = self.at_epoch_end = False
        self.lead = None

    def rise(self, row: LearnerSession) -> EndPause:
        return EndPause(row.learner, row.incarnation, self.number - self.due, self.over)
