"""The timeline of a real run, from its log: the same updates from the same minibatches, in the same order.

The log of a run with a parameter server says of each push which samples it came from and at which version it was
computed, and what the policy answered. The policy is asked again: if it says anything else, the log is not whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from offbeat.errors import LogError, ReplayError, RequestError
from offbeat.policies import Apply, Pushed, Stopped
from offbeat.policies.events import as_text
from offbeat.policies.replay import policy_of, replayed
from offbeat.predict.timelines import KEEP_EVERY, Minibatch, Step, Update, in_order, needed_by, spent_of
from offbeat.runs.log import RunLog
from offbeat.simulate.result import Result, Tally


class LoggedTimeline:
    """See the module's text. `RequestError` where what happened between pushes is not in the log."""

    lock_step = False

    def __init__(self, log: RunLog) -> None:
        run = log.run
        if not log.decisions:
            raise LogError("the log is not that of a run with a parameter server: it has no decisions")
        start_by_s = 0.0 if run.get("simulated") is False else None
        self.policy = policy_of({**run, "start_by_s": start_by_s})
        line = run["strategy"]
        self.log, self.line, self.expect = log, line, run["expect"]
        if self.policy.rule.delta or self.policy.rule.fetch_every:
            raise RequestError(f"'{line}': what its learners did between pushes is not in the log")
        self.now = 0.0
        self.hypers: dict[int, Any] = {}  # by version: what the optimizer was told for the update, if the log has it
        self._told: dict[int, Any] = {}  # the same of each gradient, by ticket
        self._tally = Tally()

    def stream(self) -> Iterator[Update]:
        policy = self.policy
        works: dict[int, Minibatch] = {}  # by ticket
        said: dict[int, Any] = {}  # by learner, as it said last: the log has what has changed
        for number, decision in enumerate(replayed(policy, self.log.decisions), start=1):
            event = decision.event
            self._tally.dropped += len(decision.drops)
            self._tally.cancelled += isinstance(event, Stopped)
            if isinstance(event, Pushed):
                said[event.learner] = said.get(event.learner) if decision.hyper is None else decision.hyper
            if isinstance(event, Pushed) and event.ticket not in decision.drops:  # of a late one they may be gone
                self._told[event.ticket] = said[event.learner]
                if not decision.batch:
                    raise ReplayError(f"decision {number}, '{as_text(event)}': its samples are not in the log")
                works[event.ticket] = Minibatch(
                    event.ticket, event.learner, event.version, (Step(event.version, decision.batch),)
                )
            for command in decision.commands:
                if isinstance(command, Apply):
                    self.now = event.at_s
                    yield self._update(command, works)

    def _update(self, command: Apply, works: dict[int, Minibatch]) -> Update:
        policy = self.policy
        taken = tuple(works.pop(ticket) for ticket in command.tickets)
        told = taken[-1].version
        self.hypers[policy.version] = [self._told.pop(ticket) for ticket in command.tickets][-1]
        taken, scales = in_order(policy, taken, command.scales)
        tally, before = self._tally, policy.version - 1
        tally.staleness.update([before - work.version for work in taken])
        tally.applied += len(taken)
        tally.samples += sum(work.samples for work in taken)
        needed = frozenset(needed_by(policy)) if policy.version % KEEP_EVERY == 0 else None
        spent, damping = spent_of(tally), command.damping
        return Update(policy.version, self.now, taken, scales, told, spent, damping=damping, needed=needed)

    def result(self) -> Result:
        return Result.of(
            strategy=self.line,
            learners=self.expect,
            updates=self.policy.version,
            seconds=self.now,
            events=len(self.log.decisions),
            tally=self._tally,
            spans=self.log.spans,
        )
