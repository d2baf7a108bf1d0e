"""The coordinator: who is here, what each learner was told, and what the policy makes of what it answers.

A state machine without clock, socket or tensor: `handle(message, at_s)` takes what came and returns what is to be
said and to whom. The same messages give the same answers, so a journal of them is all that is needed to bring a killed
coordinator back. Learners and servers ask again when an answer does not come; a message that was seen before is
answered as before and changes nothing.

Before a message is handled its sender's session must allow it (`fault_of`): no minibatch that was never handed out, no
pin that was never given, no hyperparameter that the optimizer cannot take. The gate only looks; a message that is old,
or was said before, passes.

    learner    Hello ........ Push(1) ................. Push(2) ...
    coordinator     Welcome Go(1)      [Pushed -> Apply, Send]   Go(2)
    servers                            ShardJob .. Done

Laws: a push is taken once (by learner, incarnation and seq). What was acknowledged by a Go is never lost. An
incarnation that was given up is answered with `Fenced` and changes nothing. A slot is written by one learner at a time;
that of one who was given up but may wake is kept back until it is heard of, or dead.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from msgspec import structs

from offbeat.errors import EventError, PolicyError, RequestError, Terminated
from offbeat.policies import (
    Apply,
    Asked,
    Cancel,
    Command,
    Drop,
    Event,
    Joined,
    Left,
    Policy,
    Pushed,
    Resume,
    Stopped,
    Wake,
    Woke,
)
from offbeat.policies.events import COMMANDS, as_text
from offbeat.policies.replay import decision
from offbeat.server.coordinator.grants import ANY_JOB, Grants, PendingUpdate
from offbeat.server.coordinator.group_calls import GroupCalls
from offbeat.server.coordinator.pauses import Pauses, PendingWake
from offbeat.server.coordinator.sample_leases import SampleLeases
from offbeat.server.coordinator.session import NONCES_KEPT, Gradient, LearnerSession, Sender, SessionName
from offbeat.server.parameter_layout import ParameterLayout
from offbeat.server.run_setting import RunSetting
from offbeat.server.shard.optimizers import hyper_fault
from offbeat.server.wire import (
    INPUT,
    MOST_INCARNATIONS,
    OUTPUT,
    RUN_ENDED,
    Ask,
    Bye,
    CancelWord,
    Committed,
    Done,
    EndRequest,
    Fenced,
    FenceWord,
    Fetched,
    Finish,
    FromSession,
    GiveBack,
    Gone,
    GroupCall,
    Hello,
    Paused,
    PauseRequest,
    Push,
    Ready,
    Refused,
    Seeded,
    SentAway,
    Silent,
    Stop,
    Tick,
    WakeDue,
    Want,
    Welcome,
)

NOTHING: Mapping[str, Any] = MappingProxyType({})
CLOCK_S = 1.0  # by which a learner's clock may be ahead: on one host there is just one
RESIDUALS_LOST = "residuals lost"  # with learners that died: what error feedback had kept back
MOST_NON_FINITE = 20  # in a row, more than a loss scale may be halved; then a learner is sent away


class GuardedPolicy:
    """A policy as a run drives it: what it raises and what it holds is checked against what it says of itself.

    A policy may come from outside this package. Whatever is wrong with it ends the run in one line (`PolicyError`):
    starting the coordinator again would lead to the same place. `slots`: places for gradients, of learners that
    compute and of those that wait.
    """

    def __init__(self, setting: RunSetting, slots: int) -> None:
        self.line, self.learners = setting.line, setting.learners
        self.policy: Policy = setting.policy()
        self.max_held = self.policy.max_held(setting.learners)
        if slots < setting.learners + self.max_held - 1:
            raise RequestError(
                f"'{self.line}' holds up to {self.max_held} gradients; with {self.learners} learners that needs "
                f"{self.learners + self.max_held - 1} slots, but there are {slots}"
            )

    def handle(self, event: Event) -> tuple[Command, ...]:
        """What the policy says, if it can be carried out."""
        tickets = set(self.policy.held)
        if isinstance(event, Pushed):
            tickets.add(event.ticket)
        try:
            commands = tuple(self.policy.handle(event))
        except (EventError, Terminated):
            raise
        except (Exception, SystemExit) as error:  # in the policy's own code
            said = " ".join(str(error).split())
            raise PolicyError(f"the policy '{self.line}' failed: {type(error).__name__}: {said}") from error
        held = len(tickets)
        if held > self.max_held:
            held -= len(tickets & {command.ticket for command in commands if isinstance(command, Drop)})
        if held > self.max_held:
            raise PolicyError(
                f"the policy '{self.line}' holds {held} gradients, but its max_held for {self.learners} learners is "
                f"{self.max_held}"
            )
        if self.policy.unsent:
            who = min(self.policy.unsent)
            raise PolicyError(f"the policy '{self.line}' cancels learner {who} and sends it no weights")
        for command in commands:
            wrong = self._wrong(command, tickets)
            if wrong:
                raise PolicyError(f"the policy '{self.line}' answers '{as_text(event)}' with {wrong}")
        return commands

    def _wrong(self, command: object, tickets: set[int]) -> str:
        """What is wrong with a command, in words; `tickets` are those that nothing was said of yet."""
        if not isinstance(command, COMMANDS):
            return f"{command!r}, which is not a command"
        if isinstance(command, Apply | Drop):
            named = command.tickets if isinstance(command, Apply) else (command.ticket,)
            if not named or len(set(named)) < len(named) or not tickets.issuperset(named):
                return f"'{as_text(command)}', but it holds {sorted(tickets)}"
            if isinstance(command, Apply) and not 0 < command.damping <= 1:
                return f"'{as_text(command)}', but a damping must be above 0 and at most 1"
            tickets.difference_update(named)
        elif not isinstance(command, Wake) and command.learner not in self.policy.learners:
            return f"'{as_text(command)}', but that learner is not in the run"
        return ""

    def kept(self) -> dict[str, Any]:
        """What the policy keeps over a restart, as it will come back."""
        try:
            kept: dict[str, Any] = json.loads(json.dumps(self.policy.kept(), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise PolicyError(f"the policy '{self.line}' keeps state that is not plain data: {error}") from None
        return kept


class Coordinator:
    """See the module's text. `write` is given every decision of the policy, as a record for the run log."""

    def __init__(self, setting: RunSetting, write: Callable[[dict[str, Any]], object] | None = None) -> None:
        self.setting = setting
        self.write = write
        self.sessions = {learner: LearnerSession(learner) for learner in range(setting.learners)}
        self.grants = Grants(setting)
        self.guard = GuardedPolicy(setting, self.grants.slots)
        self.policy = self.guard.policy
        self.wake = PendingWake()
        self.pauses = Pauses(setting)
        self.leases = SampleLeases(setting, self.pauses)
        self.calls = GroupCalls()
        self.gradients: dict[int, Gradient] = {}
        self.ticket = 0
        self.table = ""
        self.seeder: SessionName | None = None  # that may write to buffer 0
        self.seeded = False
        self.begun_s = 0.0
        self.unmeasured_pushes: list[tuple[Push, Gradient]] = []  # their drift is not known yet
        self.counts: Counter[str] = Counter()  # pushes by fate
        self.staleness: Counter[int] = Counter()
        self.delays: Counter[int] = Counter()  # minibatches from a push to taking what answered it, where they overlap
        self.finished = False
        self._out: list[OUTPUT] = []
        self._at_s = 0.0
        self._handlers: dict[type, Callable[[Any], None]] = {
            Hello: self._hello,
            Gone: self._gone,
            Silent: self._silent,
            SentAway: self._sent_away,
            Tick: self._tick,
            WakeDue: self._wake_due,
            Finish: self._finish,
            Ready: lambda message: self._out.extend(self.grants.ready(message)),
            Done: self._done,
        }
        self._session_handlers: dict[type, Callable[[LearnerSession, Any], None]] = {
            Seeded: self._on_seeded,
            Push: self._push,
            Stop: self._stop,
            Ask: self._ask,
            Fetched: lambda session, message: self.grants.fetched(session, message.pin),
            Want: self._want,
            GiveBack: lambda session, message: self.leases.not_computed(session, message),
            GroupCall: self._group_call,
            Paused: self._paused,
            EndRequest: lambda session, message: self.pauses.request_end(),
            PauseRequest: lambda session, message: self.pauses.request(session),
            Bye: lambda session, message: self._give_up(session, why="it left", may_wake=False),
        }

    # --- the gate: a message that does not fit is refused, and changes nothing --------------------------------------

    def fault_of(self, message: INPUT, sender: Sender, at_s: float, table: ParameterLayout | None = None) -> str:
        """Why a message is refused, in words; nothing if it is not."""
        if isinstance(message, Hello | FromSession):
            if sender.role != "learner" or message.learner != sender.number:
                return f"{sender.role} {sender.number} sent a message in the name of learner {message.learner}"
            if isinstance(message, Hello):
                return self._hello_fault(message, sender, table)
            session = self.sessions.get(message.learner)
            if session is None or not 1 <= message.incarnation <= session.incarnation:  # 0: one that has yet to join
                return f"its message is from incarnation {message.incarnation} of the learner, which does not exist"
            if not session.here or message.incarnation < session.incarnation:
                return ""  # it is told that it is given up
            return self._session_fault(message, session, at_s, table)
        if isinstance(message, Ready | Done):
            return self._server_fault(message, sender, table)
        return f"a {sender.role} must not send the message {type(message).__name__}"

    def _hello_fault(self, message: Hello, sender: Sender, table: ParameterLayout | None) -> str:
        session = self.sessions.get(message.learner)
        if session is None or message.nonce in session.nonces:
            return ""  # it is refused by the machine, or answered as before
        if table is not None and message.table != table.digest:
            return "the digest in its message does not match the model that it has sent"
        if session.incarnation + 1 >= MOST_INCARNATIONS:
            return f"it has already joined {session.incarnation} times"
        if message.after > session.incarnation:
            return f"it claims to have been incarnation {message.after}, but the last one was {session.incarnation}"
        if sender.incarnation and message.after != sender.incarnation:
            # Else the slot of each session would be kept back for one that may still write there.
            return f"it joins again as the successor of incarnation {message.after}, but it was {sender.incarnation}"
        return ""

    def _session_fault(
        self, message: FromSession, session: LearnerSession, at_s: float, table: ParameterLayout | None
    ) -> str:
        last = 0 if session.go is None else session.go.seq
        if isinstance(message, Push | Stop | Want | GroupCall) and message.seq > last:
            return f"its message is about minibatch {message.seq}, but the last one it was told to compute is {last}"
        if isinstance(message, Push | Stop):
            if not message.began_s <= message.ended_s <= at_s + CLOCK_S:
                return (
                    f"its minibatch cannot have run from {message.began_s:g} to {message.ended_s:g} s: the time "
                    f"is now {at_s:g} s"
                )
            if message.version > self.policy.version:
                return f"it computed with version {message.version}, but the newest one is {self.policy.version}"
            told = session.versions.get(message.seq, message.version)
            if message.version != told and isinstance(message, Push) and not self.policy.rule.fetch_every:
                return (
                    f"it computed minibatch {message.seq} with version {message.version}, but was told to use "
                    f"version {told}"
                )
            return self._push_fault(message, session, table) if isinstance(message, Push) else ""
        if isinstance(message, Fetched) and message.pin > session.pin:
            return f"it has read the weights with pin {message.pin}, but the last pin is {session.pin}"
        if isinstance(message, Want) and message.count > message.of:
            return f"it asks for {message.count} samples of a data set of {message.of}"
        if isinstance(message, Ask) and not self.seeded:
            return "it asks for weights before any exist"
        if isinstance(message, GroupCall) and message.number > self.calls.last + 1:
            return f"it makes call {message.number}, but the last one was {self.calls.last}"
        return ""

    def _push_fault(self, message: Push, session: LearnerSession, table: ParameterLayout | None) -> str:
        if table is None:
            return ""
        if message.delay is not None and message.delay > self.policy.rule.delays[1]:
            return (
                f"it took weights {message.delay} minibatches after its push, but under '{self.setting.line}' that is "
                f"at most {self.policy.rule.delays[1]}"
            )
        if message.absent and max(message.absent) >= len(table.sizes):
            return (
                f"it reports no gradient for parameter {max(message.absent)}, but the model has only "
                f"{len(table.sizes)} parameters"
            )
        if not message.hyper and not session.hyper:
            return "it has never sent its hyperparameters"
        if message.hyper and message.hyper != session.hyper:
            return hyper_fault(table, message.hyper)
        return ""

    def _server_fault(self, message: Ready | Done, sender: Sender, table: ParameterLayout | None) -> str:
        if sender.role != "server" or message.shard != sender.number or message.shard >= self.setting.shards:
            return f"{sender.role} {sender.number} sent a message in the name of server {message.shard}"
        if message.generation != sender.generation:
            return f"it claims to be generation {message.generation}, but is {sender.generation}"
        if isinstance(message, Ready) or table is None:
            return ""
        job = next((job for job in self.grants.repeat() if job.shard == message.shard), None)
        if job is None or job.number != message.number:
            return ""  # said before
        start, end = table.shard(message.shard, self.setting.shards)
        sums = 0 if job.kind == "apply" else -(-(end - start) // table.block)
        if len(message.sums) not in (0, sums):  # none: its predecessor has done it, and died
            return f"it answers with {len(message.sums)} sums, but its shard has {sums} blocks"
        return ""

    # --- what passes it ---------------------------------------------------------------------------------------------

    def handle(self, message: INPUT, at_s: float) -> list[OUTPUT]:
        """What is to be said about a message, in order."""
        self._at_s = max(at_s, self._at_s)
        self._out = []
        if isinstance(message, FromSession):
            session = self._session_of(message)
            if session is not None:
                self._session_handlers[type(message)](session, message)
        else:
            self._handlers[type(message)](message)
        self._advance()
        self.wake.pause(self._at_s, paused=self.pauses.holds_back)
        return self._out

    def _session_of(self, message: FromSession) -> LearnerSession | None:
        """The session that a message belongs to; none, and an answer, if that is over."""
        session = self.sessions.get(message.learner)
        if session is not None and session.here and session.incarnation == message.incarnation:
            if not self.pauses.over or isinstance(message, Bye | Fetched):
                return session
            self._out.append(self.pauses.end_message(session))  # it has not heard that the run is over
            return None
        self._out.append(Fenced(message.learner, message.incarnation))
        if isinstance(message, Push):
            self.counts["fenced"] += 1
        return None

    def _repeat_answer(self, session: LearnerSession) -> None:
        """It asks a second time: it has not heard the answer."""
        if self.pauses.over:
            self._out.append(self.pauses.end_message(session))
        elif session.go is not None and session.go.seq > max(session.answered, session.cancelled):
            self._out.append(session.go)

    # --- coming and going -------------------------------------------------------------------------------------------

    def _hello(self, message: Hello) -> None:
        session = self.sessions.get(message.learner)
        why = ""
        if session is None:
            why = f"the run has {len(self.sessions)} learners, numbered from 0; got learner {message.learner}"
        elif self.table and message.table != self.table:
            why = "its model or optimizer differs from that of the other learners"
        elif self.finished and not (session.here and session.nonce == message.nonce):
            why = RUN_ENDED
        if session is None or why:
            self._out.append(Refused(message.learner, message.nonce, why))
            return
        if session.nonce == message.nonce:
            self._out.append(self._welcome(session))
            if session.here:
                self._repeat_answer(session)
            else:
                self._out.append(Fenced(session.learner, session.incarnation))
            return
        before = session.nonces.get(message.nonce)
        if before is not None:  # an old Hello, or one whose place was taken by an old Hello: then it comes again
            self._out += [Welcome(session.learner, message.nonce, before), Fenced(session.learner, before)]
            return
        if session.residual_lost and message.after == session.incarnation:  # only its connection was lost
            self.counts[RESIDUALS_LOST] -= 1
        self._give_up(session, why="it came again", may_wake=message.after != session.incarnation)
        self._writes_no_more(session, range(message.after, message.after + 1))
        self.table = message.table
        fresh = LearnerSession(session.learner)
        fresh.nonce, fresh.incarnation, fresh.here = message.nonce, session.incarnation + 1, True
        fresh.kept_slots, fresh.hyper, fresh.nonces = session.kept_slots, session.hyper, session.nonces
        fresh.nonces[message.nonce] = fresh.incarnation
        if len(fresh.nonces) > NONCES_KEPT:
            del fresh.nonces[next(iter(fresh.nonces))]
        self.sessions[session.learner] = fresh
        self.counts["joined"] += 1
        self._gather()
        self._out.append(self._welcome(fresh))
        self._rejoin_policy(fresh)

    def _welcome(self, session: LearnerSession) -> Welcome:
        seeds = self.seeder == session.name and session.here and not self.seeded
        return Welcome(session.learner, session.nonce, session.incarnation, seed=seeds)

    def _gather(self) -> None:
        """When all are there, or the time has come, the first of them gives the initial weights."""
        here = self._here()
        due = self.setting.start_by_s is not None and self._at_s >= self.setting.start_by_s
        able = self.pauses.able_to_lead(here)
        if self.seeded or self.seeder is not None or not able or (len(here) < len(self.sessions) and not due):
            return
        self.seeder = able[0].name
        self._out.append(self._welcome(able[0]))

    def _here(self) -> list[LearnerSession]:
        return [session for session in self.sessions.values() if session.here]

    def _on_seeded(self, session: LearnerSession, message: Seeded) -> None:
        if self.seeded or self.seeder != session.name:
            self._repeat_answer(session)
            return
        self.seeded = True
        self.begun_s = self._at_s
        for one in self._here():
            self._join_policy(one)
        if not self.policy.started:  # the deadline has passed, or some have gone again
            self._tell_policy(Woke(self._at_s))

    def _join_policy(self, session: LearnerSession) -> None:
        session.in_policy = True
        self._tell_policy(Joined(session.learner, self._at_s))

    def _rejoin_policy(self, session: LearnerSession) -> None:
        """If the learner waits for nothing else any more."""
        if self.seeded and not session.in_policy and session.want is None and session.call is None:
            self._join_policy(session)

    def _leave_policy(self, session: LearnerSession) -> None:
        """The policy is told that it is gone; what it was told before is void."""
        if session.in_policy:
            session.in_policy = False
            session.grant = session.ready = None
            session.answered = session.void = session.seq
            session.versions.clear()
            self.grants.unpin(session, "go", session.pin)
            self._tell_policy(Left(session.learner, self._at_s))

    def _give_up(self, session: LearnerSession, *, why: str, may_wake: bool) -> None:
        """This incarnation is over. Its slot is free, unless it may still write there."""
        if not session.here:
            return
        session.here = False
        self.pauses.requesters.discard(session.name)
        self.counts[f"gone: {why}"] += 1
        self._out.append(FenceWord(session.learner, session.incarnation))
        self.grants.clear(session, may_wake=may_wake)
        session.go = session.want = session.weights = session.call = None
        self.leases.lose(session.learner)
        self._leave_policy(session)
        if not may_wake:
            self._writes_no_more(session, range(session.incarnation + 1))

    def _send_away(self, session: LearnerSession, told: str, *, why: str) -> None:
        self._out.append(Refused(session.learner, session.nonce, told))
        self._give_up(session, why=why, may_wake=True)

    def _writes_no_more(self, session: LearnerSession, incarnations: range) -> None:
        """Neither to a slot nor, as the seeder, to buffer 0: others may."""
        self.grants.free_kept_slots(session, incarnations)
        if self.seeder is not None and self.seeder[0] == session.learner and self.seeder[1] in incarnations:
            self.seeder = None
            self._gather()

    def _gone(self, message: Gone) -> None:
        session = self.sessions.get(message.learner)
        if session is not None:
            if session.incarnation == message.incarnation:
                codec = self.policy.rule.codec
                session.residual_lost |= session.here and session.answered > 0 and codec is not None and codec.biased
                self.counts[RESIDUALS_LOST] += session.here and session.residual_lost
                self._give_up(session, why="it died", may_wake=False)
            self._writes_no_more(session, range(message.incarnation + 1))

    def _silent(self, message: Silent) -> None:
        session = self.sessions.get(message.learner)
        if session is not None and session.incarnation == message.incarnation:
            self._give_up(session, why="it sent no heartbeat", may_wake=True)

    def _sent_away(self, message: SentAway) -> None:
        session = self.sessions.get(message.learner)
        if session is not None and session.incarnation == message.incarnation and session.here:
            self._send_away(session, message.why, why="it said what cannot be")

    def _finish(self, message: Finish) -> None:
        """Gradients that still wait for others will wait for ever."""
        for session in self.sessions.values():
            self._give_up(session, why="the run ended", may_wake=False)
        self._end()

    def _end(self) -> None:
        self.finished = True
        for ticket in sorted(self.gradients.keys() - self.in_updates()):
            self._release(ticket, "dropped: the run ended before its update was full")

    def _tick(self, message: Tick) -> None:
        self._gather()
        self._out += [*self.grants.repeat(), *self.pauses.enter_messages(self.sessions.values(), again=True)]
        self._out += [self.pauses.lead_message(one) for one in self.sessions.values() if self.pauses.leads(one)]

    # --- pushes -----------------------------------------------------------------------------------------------------

    def _push(self, session: LearnerSession, message: Push) -> None:
        if message.seq not in session.versions or message.seq <= session.answered or session.slot is None:
            self.counts["duplicate"] += 1
            self._repeat_answer(session)
            return
        version = session.versions[message.seq]
        self._close(session, message.seq)
        session.hyper = message.hyper or session.hyper
        self.counts["received"] += 1
        if message.delay is not None:
            self.delays[message.delay] += 1
        gradient = Gradient(
            learner=session.learner,
            slot=-1,
            samples=message.samples,
            leases=self.leases.hand_in(session, message.leases),
            absent=message.absent,
            hyper=session.hyper,
            pieces=session.pieces,
        )
        if not message.finite:
            self._drop_non_finite(session, message.seq, version, gradient)
            return
        session.non_finite = 0
        if message.seq > session.cancelled:  # a late one is dropped, and its slot is that of the next minibatch already
            gradient.slot, session.slot = session.slot, None
        if self.leases.book is not None:
            gradient.batch = [self.leases.book.lease(number)[1:] for number in gradient.leases]
        if self.policy.needs_drift and gradient.slot >= 0:
            self.unmeasured_pushes.append((message, gradient))
            self.grants.keep_reads(("unmeasured", session.learner, message.seq), gradient.pieces)
        else:
            self._take(message, gradient, 0.0 if self.policy.needs_drift else None)

    def _close(self, session: LearnerSession, seq: int) -> None:
        """A minibatch was answered, and with it all before."""
        session.answered = seq
        session.versions = {one: version for one, version in session.versions.items() if one > seq}

    def _take(self, message: Push, gradient: Gradient, drift: float | None) -> None:
        """The policy hears of a push."""
        self.ticket += 1
        self.gradients[self.ticket] = gradient
        self.grants.keep_reads(("ticket", self.ticket, 0), gradient.pieces)
        session = self.sessions[message.learner]
        here = session.here and session.incarnation == message.incarnation and message.seq > session.void
        if self.finished or not here:
            self._release(self.ticket, "dropped: its learner left before it was measured")
            return
        record = NOTHING
        if self.write is not None:
            record = {"seq": [message.incarnation, message.seq], "batch": gradient.batch}
            record |= {"hyper": gradient.hyper} if gradient.hyper != session.logged else {}
            record |= {} if message.delay is None else {"delay": message.delay}
        session.logged = gradient.hyper
        event = Pushed(message.learner, self.ticket, message.version, message.samples, drift, message.loss, self._at_s)
        try:
            self._tell_policy(event, record)
        except EventError as error:  # the policy is as before; whoever says such things is sent away
            self._release(self.ticket, "dropped: impossible")
            self._send_away(session, str(error), why="it sent an impossible message")

    def _drop_non_finite(self, session: LearnerSession, seq: int, version: int, gradient: Gradient) -> None:
        """Not a number, or infinite: the whole push is dropped, and the learner tries another minibatch."""
        self._count_fate("dropped: not finite")
        self.leases.settle(gradient, "dropped: not finite")
        session.non_finite += 1
        if session.non_finite >= MOST_NON_FINITE:
            told = f"its last {MOST_NON_FINITE} gradients were not finite"
            self._send_away(session, told, why="not finite")
        elif seq <= session.cancelled:
            self._tell_policy(Stopped(session.learner, version, self._at_s))
        else:
            self._tell_policy(Asked(session.learner, self._at_s))

    def _stop(self, session: LearnerSession, message: Stop) -> None:
        version = session.versions.get(message.seq)
        if message.seq <= session.cancelled:  # also where the answer to a newer one came first
            self.leases.give_back(self.leases.hand_in(session, message.leases), "cancelled")
        if version is None or message.seq <= session.answered or message.seq > session.cancelled:
            self._repeat_answer(session)
            return
        self._close(session, message.seq)
        self._tell_policy(Stopped(session.learner, version, self._at_s))

    # --- the policy -------------------------------------------------------------------------------------------------

    def _tell_policy(self, event: Event, record: Mapping[str, Any] = NOTHING, *, fetches: int | None = None) -> None:
        """Carry out what it answers. `fetches`: a learner that goes on with its minibatch, and only wants weights."""
        if self.finished:
            return
        commands = self.guard.handle(event)
        if self.write is not None:
            self.write(decision(event, commands) | dict(record))
        for command in commands:
            self._carry_out(command, fetches)

    def _carry_out(self, command: Command, fetches: int | None) -> None:
        if isinstance(command, Apply):
            self._update(command)
        elif isinstance(command, Drop):
            if command.ticket == self.ticket:
                session = self.sessions[self.gradients[command.ticket].learner]
                session.unused = session.answered
            self._release(command.ticket, f"dropped: {command.why.partition(':')[0]}")
        elif isinstance(command, Wake):
            self.wake.set(command.at_s, self._at_s)
        else:
            session = self.sessions[command.learner]
            if isinstance(command, Cancel):
                session.cancelled = session.seq
                if session.go is not None and session.go.seq > session.answered:
                    session.unused = session.go.seq
                self.counts["cancelled"] += 1
                self._out.append(CancelWord(session.learner, session.incarnation, session.seq))
            elif isinstance(command, Resume):
                self.grants.grant(session, self.policy.learners[command.learner].version, weights=False)
            elif fetches == command.learner:
                self._out.append(self.grants.send_weights(session, self.policy.version))
            else:
                self.grants.grant(session, self.policy.version, weights=True)

    def _update(self, command: Apply) -> None:
        gradients = [self.gradients[ticket] for ticket in command.tickets]
        for pushed in self.policy.last_update:
            self.staleness[self.policy.version - 1 - pushed.version] += 1
        hyper, scales = gradients[-1].hyper, command.scales  # of the last of them
        if self.policy.cancels and all(gradient.batch for gradient in gradients):
            # By samples, whoever computed them: then the same samples give the same bits.
            pairs = sorted(zip(gradients, scales, strict=True), key=lambda pair: pair[0].batch)
            gradients, scales = [gradient for gradient, _ in pairs], tuple(scale for _, scale in pairs)
        absent = gradients[0].absent
        if absent:
            absent = tuple(sorted(set(absent).intersection(*(gradient.absent for gradient in gradients))))
        self.grants.add(
            PendingUpdate(
                tickets=command.tickets,
                job=structs.replace(
                    ANY_JOB,
                    slots=tuple([gradient.slot for gradient in gradients]),
                    scales=scales,
                    compensation=self.policy.rate.compensation,
                    damping=command.damping,
                    hyper=hyper,
                    skip=absent,
                ),
                reads=tuple(tuple(b for b, _ in g.pieces) for g in gradients) if self.grants.keeps_reads else (),
            )
        )

    # --- servers ----------------------------------------------------------------------------------------------------

    def _done(self, message: Done) -> None:
        update, committed = self.grants.done(message)
        if committed is not None:
            self._out.append(committed)
            self.pauses.note_version(committed.version)
            if not self.pauses.holds_back:
                self._out += self.grants.give_out(self.sessions.values())  # before the next update can take its place
        if update is None or update.groups_left:
            return
        if update.drift:
            push, gradient = self.unmeasured_pushes.pop(0)
            self.grants.forget(("unmeasured", push.learner, push.seq))
            drift = sum(update.sums)
            self._take(push, gradient, drift if drift >= 0 else math.inf)  # weights that are not numbers: far away
        for ticket in update.tickets:
            self._release(ticket, "applied")

    def _release(self, ticket: int, fate: str) -> None:
        """A gradient is applied or dropped: its slot is free, its samples are accounted for."""
        gradient = self.gradients.pop(ticket)
        self.grants.release(ticket, gradient.slot)
        self._count_fate(fate)
        if fate != "applied" and self.setting.again and gradient.leases and not self.finished:
            self.leases.give_back(gradient.leases, fate)
        else:
            self.leases.settle(gradient, fate)

    def _count_fate(self, fate: str) -> None:
        self.counts[fate] += 1
        if fate != "applied":
            self.counts["dropped"] += 1

    # --- what can go on now -----------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """All that has become possible: grants, jobs, leases, calls, pauses."""
        grants, sessions = self.grants, self.sessions.values()
        while True:
            asking = [session for session in sessions if session.want is not None or session.call is not None]
            measured = {push.learner for push, _ in self.unmeasured_pushes} if asking else ()
            for session in asking:
                if session.learner not in measured:
                    self._leave_policy(session)  # the others need not wait for it; what it has pushed counts
            if not self.pauses.holds_back:
                self._out += grants.give_out(sessions)
            if self.unmeasured_pushes and grants.idle:
                # The drift of the oldest push that waits, while no update is under way that would change it.
                pieces = self.unmeasured_pushes[0][1].pieces
                grants.add(PendingUpdate(tickets=(), reads=(tuple(buffer for buffer, _ in pieces),), drift=True))
            self._out += grants.start(only_behind=self.pauses.due)
            answered = bool(asking) and (self._answer_wants() or self._answer_calls())
            if not answered and not self._advance_pause():
                return

    # --- weights and samples ----------------------------------------------------------------------------------------

    def _ask(self, session: LearnerSession, message: Ask) -> None:
        if not self.seeded:
            return
        if message.number > session.asked:
            session.asked = message.number
            if self.policy.rule.fetch_every and session.in_policy and self.policy.started:
                self._tell_policy(Asked(session.learner, self._at_s), fetches=session.learner)
            else:  # between epochs, or only to look at: the policy need not know
                self._out.append(self.grants.send_weights(session, self.policy.version))
        elif message.number == session.asked and session.weights is not None:
            self._out.append(session.weights)

    def _want(self, session: LearnerSession, message: Want) -> None:
        try:
            answer = self.leases.want(session, message)
        except RequestError as error:
            self._send_away(session, str(error), why="other data")
            return
        if answer is not None:
            self._out.append(answer)
            self._rejoin_policy(session)

    def _answer_wants(self) -> bool:
        """Whoever waits for samples, if there are some now, or the epoch has ended."""
        waiting = [session for session in self.sessions.values() if session.want is not None]
        if not waiting or self.finished:
            return False
        answers = [answer for session in waiting if (answer := self.leases.answer(session)) is not None]
        if not answers and self._only_held_are_left():
            # Gradients that wait for more to come are applied with those of the next epoch.
            self.leases.end_epoch(self.gradients.values())
            answers = [answer for session in waiting if (answer := self.leases.answer(session)) is not None]
        self._out += answers
        for answer in answers:  # together: at an epoch's end all go on with the same version
            self._rejoin_policy(self.sessions[answer.learner])
        return bool(answers)

    def _only_held_are_left(self) -> bool:
        """Whether nothing of the epoch is free, computed, measured or applied: no learner can do anything for its end.

        Where all pause between epochs, one that may compute and has yet to ask for samples is waited for: by that the
        policy hears that no more is coming, and may make an update of what it holds. It is not waited for where
        learners do as they like between epochs: who knows when it asks.
        """
        if self.pauses.due or self.unmeasured_pushes or not self.grants.idle:
            return False
        if self.leases.in_hand(self.sessions.values()):
            return False
        computing = [learner for learner, seat in self.policy.learners.items() if seat.computing]
        return not (self.pauses.at_epochs and any(self.sessions[learner].want is None for learner in computing))

    # --- calls of learners to each other ----------------------------------------------------------------------------

    def _group_call(self, session: LearnerSession, message: GroupCall) -> None:
        answer = self.calls.receive(session, message)
        if not message.what:  # it waits no longer
            self._answer_call(self.calls.withdraw(session.learner, message.number, self._here()))
        if answer is not None:
            self._out.append(answer)
        self._rejoin_policy(session)

    def _answer_calls(self) -> bool:
        """The call that all have made. They go on together, with the same version."""
        served = self.calls.next(self._here()) if self.seeded else []
        self._answer_call(served)
        return bool(served)

    def _answer_call(self, served: list[LearnerSession]) -> None:
        self._out += [self.calls.answer(session, self.calls.last) for session in served]
        for session in served:
            self._rejoin_policy(session)

    # --- pauses -----------------------------------------------------------------------------------------------------

    def _paused(self, session: LearnerSession, message: Paused) -> None:
        pauses = self.pauses
        if not pauses.due or message.number != pauses.number:
            self._out.append(pauses.end_message(session))
            return
        session.pause_entered = pauses.number
        if message.led and pauses.leads(session):
            pauses.end(self._at_s, stop=message.stop)
            self._out += [pauses.end_message(one) for one in self._here()]
            if pauses.over:
                self._end()

    def _advance_pause(self) -> bool:
        """Tell all to pause, if one is due; and when they have, one of them to lead. Whether nobody is left for it."""
        pauses = self.pauses
        if self.leases.book is not None:
            pauses.note_epoch(self.leases.book.epoch)
        if not pauses.due:
            return False
        here = self._here()
        if not here:
            pauses.abandon(self._at_s)
            if pauses.over:
                self._end()
            return True
        self._out += pauses.enter_messages(here, again=False)
        lead = pauses.next_lead(here, self._at_s) if self.grants.still else None
        if lead is not None:
            pauses.facts = json.dumps(self.resume_state())
            self._out.append(pauses.lead_message(lead))
        return False

    def resume_state(self) -> dict[str, Any]:
        """Where the run stands, for the learner that saves it. What is not in the weights yet is not computed yet."""
        pauses, book = self.pauses, self.leases.book
        return {
            "version": min(group.version for group in self.grants.commit_groups),
            "seeded": self.seeded,
            "epoch_end": pauses.at_epoch_end,
            "halt": pauses.end_requested,
            "book": None if book is None else book.snapshot(all_back=True),
            "memory": self.guard.kept(),
            "gradients": sum(self.staleness.values()),
            "staleness": self.mean_staleness,
            "delays": [[delay, many] for delay, many in sorted(self.delays.items())],
            "samples": dict(self.leases.samples),
            "held": sum(count for gradient in self.gradients.values() for _, count in gradient.epochs),
            "seconds": pauses.began_s - self.begun_s - pauses.paused_s,
            "residuals_lost": self.counts[RESIDUALS_LOST],
        }

    @property
    def mean_staleness(self) -> float:
        applied = sum(self.staleness.values())
        return sum(age * many for age, many in self.staleness.items()) / applied if applied else 0.0

    # --- wakes ------------------------------------------------------------------------------------------------------

    @property
    def next_wake_s(self) -> float | None:
        """When a `WakeDue` is due."""
        return None if self.finished else self.wake.due_s

    def _wake_due(self, message: WakeDue) -> None:
        if self.wake.take(self._at_s):
            self._tell_policy(Woke(self._at_s))

    # --- what is known ----------------------------------------------------------------------------------------------

    def shared_words(self) -> list[CancelWord | FenceWord | Committed]:
        """What shared memory must say: one that was brought back says it again, since its last messages may be lost."""
        sessions = self.sessions.values()
        return [
            *(FenceWord(one.learner, one.incarnation - one.here) for one in sessions),
            *(CancelWord(one.learner, one.incarnation, one.cancelled) for one in sessions if one.here),
            *(Committed(group.index, group.version, group.buffer) for group in self.grants.commit_groups),
        ]

    def in_updates(self) -> set[int]:
        """Tickets that are on their way through the shards."""
        return {ticket for group in self.grants.commit_groups for update in group.queue for ticket in update.tickets}
