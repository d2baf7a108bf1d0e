"""The coordinator: who is here, what each learner was told, and what the policy makes of what it answers.

A state machine without clock, socket or tensor: `handle(message, at_s)` takes what came and returns what is to be
said and to whom. The same messages give the same answers, so a journal of them is all that is needed to bring a killed
coordinator back. Learners and servers ask again when an answer does not come; a message that was seen before is
answered as before and changes nothing.

    learner    Hello ........ Push(1) ................. Push(2) ...
    coordinator     Welcome Go(1)      [Pushed -> Apply, Send]   Go(2)
    servers                            Job ..... Done

Laws: a push is taken once (by learner, incarnation and seq). What was acknowledged by a Go is in the books for good.
An incarnation that was given up is answered with `Fenced` and changes nothing. A slot is written by one learner at a
time; that of one who was given up but may wake is kept back until it is heard of, or dead.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from offbeat.errors import EventError
from offbeat.leases import LeaseBook
from offbeat.policies import Apply as ApplyCommand
from offbeat.policies import Asked, Command, Drop, Event, Joined, Left, Pushed, Resume, Send, Stopped, Wake
from offbeat.policies import Cancel as CancelCommand
from offbeat.policies import Woke as WokeEvent
from offbeat.policies.replay import decision
from offbeat.server.coordinator.grants import Grants
from offbeat.server.coordinator.group_calls import Calls
from offbeat.server.coordinator.guarded_policy import GuardedPolicy
from offbeat.server.coordinator.invariants import check
from offbeat.server.coordinator.pauses import Pauses
from offbeat.server.coordinator.resume_state import standing_of
from offbeat.server.coordinator.sample_leases import SampleLeases
from offbeat.server.coordinator.session import NONCES_KEPT, Gradient, LearnerSession, Setting
from offbeat.server.coordinator.update_queue import PendingUpdate
from offbeat.server.coordinator.wakes import PendingWake
from offbeat.server.wire import (
    FROM_STAY,
    INPUT,
    OUTPUT,
    Ask,
    Bye,
    Call,
    Cancel,
    Committed,
    Done,
    EndRequest,
    EnterPause,
    Fence,
    Fenced,
    Fetched,
    Finish,
    GiveBack,
    Gone,
    Hello,
    Paused,
    PauseRequest,
    Push,
    Ready,
    Refused,
    Seeded,
    Silent,
    Stop,
    Tick,
    Want,
    Welcome,
    Woke,
)

MOST_BAD = 20  # more than a loss scale may be halved; non-finite gradients in a row, after which a learner is sent away


class Coordinator(SampleLeases):
    """See the module's text. `write` is given every decision of the policy, as a record for the run log."""

    def __init__(self, setting: Setting, write: Callable[[dict[str, Any]], object] | None = None) -> None:
        self.setting = setting
        self.write = write
        self.rows = {learner: LearnerSession(learner) for learner in range(setting.learners)}
        self.desk = Grants(setting)
        self.guard = GuardedPolicy(setting, self.desk.slots)
        self.policy = self.guard.policy
        self.wake = PendingWake()
        self.rests = Pauses(setting)
        self.calls = Calls()
        self.gradients: dict[int, Gradient] = {}
        self.ticket = 0
        self.table = ""
        self.seeder: tuple[int, int] | None = None  # learner and incarnation that may write to buffer 0
        self.seeded = False
        self.begun_s = 0.0
        self.book: LeaseBook | None = None
        self.inbox: list[tuple[Push, Gradient]] = []  # pushes whose drift is not known yet
        self.counts: Counter[str] = Counter()  # pushes by fate
        self.samples: Counter[str] = Counter()  # samples by fate
        self.staleness: Counter[int] = Counter()
        self.finished = False
        self._out: list[OUTPUT] = []
        self._at_s = 0.0
        self._fetches: int | None = None  # the learner that is being answered, and goes on with its minibatch
        self._extra: dict[str, Any] = {}
        self._handlers: dict[type, Callable[[Any], None]] = {
            Hello: self._hello,
            Seeded: self._on_seeded,
            Push: self._push,
            Stop: self._stop,
            Ask: self._ask,
            Fetched: self._fetched,
            Want: self._want,
            GiveBack: self._give_back,
            Paused: self._rested,
            EndRequest: self._halt,
            PauseRequest: self._pause,
            Call: self._call,
            Bye: self._bye,
            Gone: self._gone,
            Silent: self._silent,
            Tick: self._tick,
            Woke: self._woke,
            Finish: self._finish,
            Ready: self._ready,
            Done: self._done,
        }

    def handle(self, message: INPUT, at_s: float) -> list[OUTPUT]:
        """What is to be said about a message, in order."""
        self._at_s = max(at_s, self._at_s)
        self._out = []
        self._handlers[type(message)](message)
        self._settle_down()
        self.wake.pause(self._at_s, paused=self.rests.holds_back)
        return self._out

    @property
    def next_wake_s(self) -> float | None:
        """When a `Woke` is due."""
        return None if self.finished else self.wake.due_s

    def _woke(self, message: Woke) -> None:
        if self.wake.take(self._at_s):
            self._tell(WokeEvent(self._at_s))

    # --- coming and going -------------------------------------------------------------------------------------------

    def _hello(self, message: Hello) -> None:
        row = self.rows.get(message.learner)
        why = None
        if row is None:
            why = f"there are {len(self.rows)} learners, numbered from 0; {message.learner} is none of them"
        elif self.table and message.table != self.table:
            why = "its model is not the same: parameters of other names, shapes or order, or another optimizer"
        elif self.finished and not (row.here and row.nonce == message.nonce):
            why = "the run is over"
        if row is None or why is not None:
            self._out.append(Refused(message.learner, message.nonce, why or ""))
            return
        if row.nonce == message.nonce:
            self._out.append(self._welcome(row))
            if row.here:
                self._again(row)
            else:
                self._out.append(Fenced(row.learner, row.incarnation))
            return
        before = row.nonces.get(message.nonce)
        if before is not None:  # an old Hello, or one whose place was taken by an old Hello: then it comes again
            self._out += [Welcome(row.learner, message.nonce, before), Fenced(row.learner, before)]
            return
        self._give_up(row, why="it came again", may_wake=message.after != row.incarnation)
        self._writes_no_more(row, range(message.after, message.after + 1))
        self.table = message.table
        fresh = LearnerSession(row.learner)
        fresh.nonce, fresh.incarnation, fresh.here = message.nonce, row.incarnation + 1, True
        fresh.limbo, fresh.hyper, fresh.nonces = row.limbo, row.hyper, row.nonces
        fresh.nonces[message.nonce] = fresh.incarnation
        if len(fresh.nonces) > NONCES_KEPT:
            del fresh.nonces[next(iter(fresh.nonces))]
        self.rows[row.learner] = fresh
        self.counts["joined"] += 1
        if self.seeded:
            self._out.append(self._welcome(fresh))
            self._seat(fresh)
        else:
            self._gather()
            self._out.append(self._welcome(fresh))

    def _welcome(self, row: LearnerSession) -> Welcome:
        seeds = self.seeder == (row.learner, row.incarnation) and row.here and not self.seeded
        return Welcome(row.learner, row.nonce, row.incarnation, seed=seeds)

    def _gather(self) -> None:
        """When all are there, or the time has come, the first of them gives the initial weights."""
        here = [row for row in self.rows.values() if row.here]
        due = self.setting.start_by_s is not None and self._at_s >= self.setting.start_by_s
        if self.seeded or self.seeder is not None or not here or (len(here) < len(self.rows) and not due):
            return
        self.seeder = here[0].learner, here[0].incarnation
        self._out.append(self._welcome(here[0]))

    def _on_seeded(self, message: Seeded) -> None:
        row = self._known(message)
        if row is None:
            return
        if self.seeded or self.seeder != (row.learner, row.incarnation):
            self._again(row)
            return
        self.seeded = True
        self.begun_s = self._at_s
        here = [one for one in self.rows.values() if one.here]
        for one in here:
            self._seat(one)
        if not self.policy.started:  # the deadline has passed, or some have gone again
            self._tell(WokeEvent(self._at_s))

    def _seat(self, row: LearnerSession) -> None:
        row.seated = True
        self._tell(Joined(row.learner, self._at_s))

    def _unseat(self, row: LearnerSession) -> None:
        """The policy is told that it is gone; what it was told before is void."""
        if row.seated:
            row.seated = False
            row.grant = row.ready = None
            row.answered = row.void = row.seq
            row.versions.clear()
            self.desk.unpin(row, "go", row.pin)
            self._tell(Left(row.learner, self._at_s))

    def _give_up(self, row: LearnerSession, *, why: str, may_wake: bool) -> None:
        """This incarnation is over. Its slot is free, unless it may still write there."""
        if not row.here:
            return
        row.here = False
        self.rests.askers.discard((row.learner, row.incarnation))
        self.counts[f"gone: {why}"] += 1
        self._out.append(Fence(row.learner, row.incarnation))
        self.desk.clear(row, may_wake=may_wake)
        row.go = row.want = row.weights = row.call = None
        if self.book is not None:
            for lease in self.book.lose(row.learner):
                self.samples["computed again: lost with its learner"] += lease.count
        self._unseat(row)
        if not may_wake:
            self._writes_no_more(row, range(row.incarnation + 1))

    def _writes_no_more(self, row: LearnerSession, incarnations: range) -> None:
        """Neither to a slot nor, as the seeder, to buffer 0: others may."""
        self.desk.clear_limbo(row, incarnations)
        if self.seeder is not None and self.seeder[0] == row.learner and self.seeder[1] in incarnations:
            self.seeder = None
            self._gather()

    def _bye(self, message: Bye) -> None:
        row = self._known(message)
        if row is not None:
            self._give_up(row, why="it left", may_wake=False)

    def _gone(self, message: Gone) -> None:
        row = self.rows.get(message.learner)
        if row is None:
            return
        if row.here and row.incarnation == message.incarnation:
            self._give_up(row, why="it died", may_wake=False)
        self._writes_no_more(row, range(message.incarnation + 1))

    def _silent(self, message: Silent) -> None:
        row = self.rows.get(message.learner)
        if row is not None and row.here and row.incarnation == message.incarnation:
            self._give_up(row, why="it gave no sign of life", may_wake=True)

    def _finish(self, message: Finish) -> None:
        """Gradients that still wait for others will wait for ever."""
        for row in self.rows.values():
            self._give_up(row, why="the run ended", may_wake=False)
        self._end()

    def _end(self) -> None:
        self.finished = True
        for ticket in sorted(self.gradients.keys() - self.in_updates()):
            self._release(ticket, "dropped: the run ended before its update was full")

    def _tick(self, message: Tick) -> None:
        self._gather()
        self._out += [*self.desk.repeat(), *self.rests.calls(self.rows.values(), again=True)]
        self._out += [self._lead(row) for row in self.rows.values() if self.rests.leads(row)]

    # --- what learners answer ---------------------------------------------------------------------------------------

    def _known(self, message: FROM_STAY) -> LearnerSession | None:
        """The session that a message belongs to; none, and an answer, if that is over."""
        row = self.rows.get(message.learner)
        if row is not None and row.here and row.incarnation == message.incarnation:
            if not self.rests.over or isinstance(message, Bye | Fetched):
                return row
            self._out.append(self.rests.rise(row))  # whatever it says: it has not heard that the run is over
            return None
        self._out.append(Fenced(message.learner, message.incarnation))
        if isinstance(message, Push):
            self.counts["fenced"] += 1
        return None

    def _again(self, row: LearnerSession) -> None:
        """It asks a second time: it has not heard the answer."""
        if self.rests.over:
            self._out.append(self.rests.rise(row))
        elif row.go is not None and row.go.seq > max(row.answered, row.cancelled):
            self._out.append(row.go)

    def _push(self, message: Push) -> None:
        row = self._known(message)
        if row is None:
            return
        if message.seq not in row.versions or message.seq <= row.answered or row.slot is None:
            self.counts["duplicate"] += 1
            self._again(row)
            return
        self._close(row, message.seq)
        row.hyper = message.hyper or row.hyper
        self.counts["received"] += 1
        if not message.finite:
            self._bad(row, message)
            return
        row.bad = 0
        slot = -1
        if message.seq > row.cancelled:  # a late one is dropped, and its slot is that of the next minibatch already
            slot, row.slot = row.slot, None
        gradient = Gradient(
            learner=row.learner,
            slot=slot,
            samples=message.samples,
            leases=self._hand_in(row, message.leases),
            absent=message.absent,
            hyper=row.hyper,
            pieces=row.pieces,
        )
        if self.book is not None:
            gradient.batch = [self.book.lease(number)[1:] for number in gradient.leases]
        if self.policy.needs_drift and slot >= 0:
            self.inbox.append((message, gradient))
            self.desk.keep_reads(("inbox", row.learner, message.seq), gradient.pieces)
        else:
            self._take(message, gradient, 0.0 if self.policy.needs_drift else None)

    def _close(self, row: LearnerSession, seq: int) -> None:
        """A minibatch was answered, and with it all before."""
        row.answered = seq
        row.versions = {one: version for one, version in row.versions.items() if one > seq}

    def _take(self, message: Push, gradient: Gradient, drift: float | None) -> None:
        """The policy hears of a push."""
        self.ticket += 1
        self.gradients[self.ticket] = gradient
        self.desk.keep_reads(("ticket", self.ticket, 0), gradient.pieces)
        row = self.rows[message.learner]
        if self.finished or not row.here or row.incarnation != message.incarnation or message.seq <= row.void:
            self._release(self.ticket, "dropped: its learner left before it was measured")
            return
        self._extra = {"seq": [message.incarnation, message.seq], "batch": gradient.batch}
        self._extra |= {"hyper": gradient.hyper} if gradient.hyper != row.logged else {}
        row.logged = gradient.hyper
        event = Pushed(message.learner, self.ticket, message.version, message.samples, drift, message.loss, self._at_s)
        try:
            self._tell(event)
        except EventError as error:  # the policy is as before; whoever says such things is sent away
            self._release(self.ticket, "dropped: impossible")
            self._out.append(Refused(row.learner, row.nonce, str(error)))
            self._give_up(row, why="it said what cannot be", may_wake=True)

    def _bad(self, row: LearnerSession, message: Push) -> None:
        """Not a number, or infinite: the whole push is dropped, and the learner tries another minibatch."""
        self.counts["dropped"] += 1
        self.counts["dropped: not finite"] += 1
        self.samples["dropped: not finite"] += message.samples
        for number in self._hand_in(row, message.leases):
            assert self.book is not None
            self.book.settle(number, "dropped: not finite")
        row.bad += 1
        if row.bad >= MOST_BAD:
            why = f"its last {MOST_BAD} gradients were not finite"
            self._out.append(Refused(row.learner, row.nonce, why))
            self._give_up(row, why="not finite", may_wake=True)
        elif message.seq <= row.cancelled:
            self._tell(Stopped(row.learner, message.version, self._at_s))
        else:
            self._tell(Asked(row.learner, self._at_s))

    def _stop(self, message: Stop) -> None:
        row = self._known(message)
        if row is None:
            return
        version = row.versions.get(message.seq)
        if message.seq <= row.cancelled:  # also where the answer to a newer one came first
            self._back(self._hand_in(row, message.leases), "cancelled")
        if version is None or message.seq <= row.answered or message.seq > row.cancelled:
            self._again(row)
            return
        self._close(row, message.seq)
        self.counts["stopped"] += 1
        self._tell(Stopped(row.learner, version, self._at_s))

    def _ask(self, message: Ask) -> None:
        row = self._known(message)
        if row is None or not self.seeded:
            return
        if message.number > row.asked:
            row.asked = message.number
            if self.policy.rule.fetch_every and row.seated:
                self._fetches = row.learner
                self._tell(Asked(row.learner, self._at_s))
                self._fetches = None
            else:  # between epochs, or only to look at: the policy need not know
                self._out.append(self.desk.send_weights(row, self.policy.version))
        elif message.number == row.asked and row.weights is not None:
            self._out.append(row.weights)

    def _fetched(self, message: Fetched) -> None:
        row = self._known(message)
        if row is not None:
            self.desk.fetched(row, message.pin)

    # --- the policy -------------------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        if self.finished:
            return
        extra, self._extra = self._extra, {}
        commands = self.guard.handle(event)
        if self.write is not None:
            self.write(decision(event, commands) | extra)
        for command in commands:
            self._obey(command)

    def _obey(self, command: Command) -> None:
        if isinstance(command, ApplyCommand):
            self._update(command)
        elif isinstance(command, Drop):
            self._release(command.ticket, f"dropped: {command.why.partition(':')[0]}")
        elif isinstance(command, CancelCommand):
            row = self.rows[command.learner]
            row.cancelled = row.seq
            self.counts["cancelled"] += 1
            self._out.append(Cancel(row.learner, row.incarnation, row.seq))
        elif isinstance(command, Send):
            row = self.rows[command.learner]
            if self._fetches == row.learner:
                self._out.append(self.desk.send_weights(row, self.policy.version))
            else:
                self.desk.grant(row, self.policy.version, weights=True)
        elif isinstance(command, Resume):
            row = self.rows[command.learner]
            self.desk.grant(row, self.policy.seats[command.learner].version, weights=False)
        elif isinstance(command, Wake):
            self.wake.set(command.at_s, self._at_s)

    def _update(self, command: ApplyCommand) -> None:
        gradients = [self.gradients[ticket] for ticket in command.tickets]
        for pushed in self.policy.last_update:
            self.staleness[self.policy.version - 1 - pushed.version] += 1
        hyper, scales = gradients[-1].hyper, command.scales  # of the last of them
        if self.policy.cancels and all(gradient.batch for gradient in gradients):
            # By samples, whoever computed them: then the same samples give the same bits.
            pairs = sorted(zip(gradients, scales, strict=True), key=lambda pair: pair[0].batch)
            gradients, scales = [gradient for gradient, _ in pairs], tuple(scale for _, scale in pairs)
        absent = set(gradients[0].absent).intersection(*(gradient.absent for gradient in gradients))
        work = PendingUpdate(
            tickets=command.tickets,
            slots=tuple(gradient.slot for gradient in gradients),
            scales=scales,
            reads=tuple(tuple(b for b, _ in g.pieces) for g in gradients) if self.desk.keeps_reads else (),
            compensation=self.policy.rate.compensation,
            damping=command.damping,
            hyper=hyper,
            skip=tuple(sorted(absent)),
        )
        self.desk.add(work)

    def _release(self, ticket: int, fate: str) -> None:
        """A gradient is applied or dropped: its slot is free, its samples are accounted for."""
        gradient = self.gradients.pop(ticket)
        self.desk.release(ticket, gradient.slot)
        self.counts["applied" if fate == "applied" else "dropped"] += 1
        if fate != "applied":
            self.counts[fate] += 1
        book = self.book
        if fate != "applied" and book is not None and self.setting.again and gradient.leases and not self.finished:
            self._back(gradient.leases, fate)
            return
        self.samples[fate] += gradient.samples
        if book is not None:
            for number in gradient.leases:
                book.settle(number, fate)
            for epoch, count in gradient.epochs:
                book.recount(epoch, count, "held", fate)

    # --- servers ----------------------------------------------------------------------------------------------------

    def _ready(self, message: Ready) -> None:
        self._out += self.desk.ready(message)

    def _done(self, message: Done) -> None:
        work, committed = self.desk.done(message)
        if committed is not None:
            self._out.append(committed)
            self.rests.reached(committed.version)
            if not self.rests.holds_back:
                self._out += self.desk.give_out(self.rows.values())  # before the next update can take its place
        if work is None or work.lanes_left:
            return
        if work.drift:
            push, gradient = self.inbox.pop(0)
            self.desk.forget(("inbox", push.learner, push.seq))
            drift = sum(work.sums)
            self._take(push, gradient, drift if drift >= 0 else math.inf)  # weights that are not numbers: far away
        for ticket in work.tickets:
            self._release(ticket, "applied")

    # --- what can go on now -----------------------------------------------------------------------------------------

    def _settle_down(self) -> None:
        """All that has become possible: grants, jobs, leases."""
        desk = self.desk
        while True:
            measured = {push.learner for push, _ in self.inbox}
            for row in self.rows.values():
                if (row.want is not None or row.call is not None) and row.learner not in measured:
                    self._unseat(row)  # the others need not wait for it; what it has pushed counts
            if not self.rests.holds_back:
                self._out += desk.give_out(self.rows.values())
            if self.inbox and desk.idle:
                # The drift of the oldest push that waits, while no update is under way that would change it.
                pieces = self.inbox[0][1].pieces
                desk.add(PendingUpdate(tickets=(), reads=(tuple(buffer for buffer, _ in pieces),), drift=True))
            self._out += desk.start(only_behind=self.rests.due)
            if not self._serve_waiting() and not self._answer_calls() and not self._hold_rest():
                return

    # --- calls of learners to each other ----------------------------------------------------------------------------

    def _call(self, message: Call) -> None:
        row = self._known(message)
        if row is None or (row.call is not None and message.number <= row.call.number and message.what):
            return  # it waits already, or this is an old one
        if not message.what:  # it waits no longer
            if row.call is not None and row.call.number == message.number:
                row.call = None
                if not row.seated:
                    self._seat(row)
            self._answer(self.calls.withdraw(row.learner, message.number, list(self.rows.values())))
            return
        answer = self.calls.again(row, message.number)
        if answer is not None:
            self._out.append(answer)
        elif message.seq not in row.versions:  # else what it said before has not come yet
            row.call = message

    def _answer_calls(self) -> bool:
        """The call that all have made. They go on together, with the same version."""
        served = self.calls.next([row for row in self.rows.values() if row.here]) if self.seeded else []
        self._answer(served)
        return bool(served)

    def _answer(self, served: list[LearnerSession]) -> None:
        for row in served:
            answer = self.calls.again(row, self.calls.last)
            assert answer is not None
            row.call = None
            self._out.append(answer)
        for row in served:
            if not row.seated:
                self._seat(row)

    # --- rests ------------------------------------------------------------------------------------------------------

    def _rested(self, message: Paused) -> None:
        row = self._known(message)
        if row is None:
            return
        rests = self.rests
        if not rests.due or message.number != rests.number:
            self._out.append(rests.rise(row))
            return
        row.rested = rests.number
        if message.led and rests.leads(row):
            rests.end(self._at_s, stop=message.stop)
            self._out += [rests.rise(one) for one in self.rows.values() if one.here]
            if rests.over:
                self._end()

    def _halt(self, message: EndRequest) -> None:
        if self._known(message) is not None:
            self.rests.halt()

    def _pause(self, message: PauseRequest) -> None:
        row = self._known(message)
        if row is not None:
            self.rests.want(row)

    def _hold_rest(self) -> bool:
        """Call all to rest, if one is due; and when they do, somebody to lead. Whether it has ended for want of any."""
        rows, rests = self.rows.values(), self.rests
        if self.book is not None:
            rests.look_at(self.book.epoch)
        if not rests.due:
            return False
        if not any(row.here for row in rows):
            rests.drop(self._at_s)
            if rests.over:
                self._end()
            return True
        self._out += rests.calls(rows, again=False)
        lead = rests.next_lead(rows, self._at_s) if self.desk.still else None
        if lead is not None:
            rests.facts = json.dumps(self.standing())
            self._out.append(self._lead(lead))
        return False

    def _lead(self, row: LearnerSession) -> EnterPause:
        return EnterPause(row.learner, row.incarnation, self.rests.number, True, self.rests.facts)

    def standing(self) -> dict[str, Any]:
        return standing_of(self)

    # --- books ------------------------------------------------------------------------------------------------------

    def words(self) -> list[Cancel | Fence | Committed]:
        """What stands in shared words: one that was brought back says it again, since its last words may be lost."""
        rows = self.rows.values()
        return [
            *(Fence(row.learner, row.incarnation - row.here) for row in rows),
            *(Cancel(row.learner, row.incarnation, row.cancelled) for row in rows if row.here),
            *(Committed(lane.index, lane.version, lane.buffer) for lane in self.desk.lanes),
        ]

    def in_updates(self) -> set[int]:
        return {ticket for lane in self.desk.lanes for work in lane.queue for ticket in work.tickets}

    def check(self) -> None:
        """AssertionError, naming the law, where the books do not add up. For tests, and at the end of a run."""
        check(self)
