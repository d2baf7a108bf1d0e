"""Bugs, each planted into a machine: the outsider must find every one of them, by a law that it breaks."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from offbeat.leases import Answer, Lease
from offbeat.policies import Cancel, Command, Wake, Woke
from offbeat.server.coordinator.coordinator import Coordinator
from offbeat.server.coordinator.grants import CommitGroup, Grants, PendingUpdate
from offbeat.server.coordinator.pauses import Pauses
from offbeat.server.coordinator.sample_leases import SampleLeases
from offbeat.server.coordinator.session import Gradient, LearnerSession
from offbeat.server.learner.connection import ConnectionState
from offbeat.server.shard.server_process import Shard
from offbeat.server.wire import (
    Ask,
    Done,
    EndPause,
    EnterPause,
    Fenced,
    GiveBack,
    Go,
    Granted,
    Hello,
    Message,
    Paused,
    Push,
    ShardJob,
    Silent,
    Tick,
    WakeDue,
    Want,
    Welcome,
)
from server.world import Kit


class NoDuplicateCheck(Coordinator):
    """A push that was taken may be taken again."""

    def _close(self, session: LearnerSession, seq: int) -> None:
        pass


class AppliesCancelled(Coordinator):
    """A late push is taken for one at the current version."""

    def _push(self, session: LearnerSession, message: Push) -> None:
        session.cancelled = 0
        super()._push(session, message)

    def _take(self, message: Push, gradient: Gradient, drift: float | None) -> None:
        seat = self.policy.learners.get(message.learner)
        if seat is not None and self.policy.cancels:
            message = structs.replace(message, version=seat.version)
        super()._take(message, gradient, drift)


class FreesSilentSlots(Coordinator):
    """One who gives no sign of life will not write any more."""

    def _silent(self, message: Silent) -> None:
        session = self.sessions[message.learner]
        super()._silent(message)
        self.grants.free_kept_slots(session, range(message.incarnation + 1))


class CountsDroppedAsApplied(SampleLeases):
    """What comes back is settled."""

    def give_back(self, leases: Any, fate: str) -> None:
        for number in leases:
            assert self.book is not None
            self.book.settle(number, "applied")


class KeepsNoFence(Coordinator):
    """Messages of one who was given up are those of the one who came after."""

    def _session_of(self, message: Any) -> LearnerSession | None:
        session = self.sessions.get(message.learner)
        return session if session is not None and session.here else super()._session_of(message)


class ForgetsCancels(Coordinator):
    """A cancel changes nothing."""

    def _carry_out(self, command: Command, fetches: int | None) -> None:
        if not isinstance(command, Cancel):
            super()._carry_out(command, fetches)


class ServesOldWants(SampleLeases):
    """A Want that was long on its way is a new one."""

    def want(self, session: LearnerSession, want: Want) -> Granted | None:
        if session.want is None:
            session.wanted = 0
        return super().want(session, want)


class AnswersAnew(Coordinator):
    """Who asks for weights again, since no answer has come yet, is given others: the first may be written meanwhile."""

    def _ask(self, session: LearnerSession, message: Ask) -> None:
        if message.number == session.asked:
            session.asked -= 1
        super()._ask(session, message)


class WantsWithoutAnswers(SampleLeases):
    """Whether what was said before a Want has come, is not looked at."""

    def want(self, session: LearnerSession, want: Want) -> Granted | None:
        return super().want(session, structs.replace(want, seq=0))


class LosesWordOfLeases(SampleLeases):
    """That leases were given back is not heard, and a Want that waits does not say it."""

    def not_computed(self, session: LearnerSession, message: GiveBack) -> None:
        pass

    def want(self, session: LearnerSession, want: Want) -> Granted | None:
        if self.book is None:
            return super().want(session, want)
        in_hand, self.book.in_hand = self.book.in_hand, lambda learner: ()  # type: ignore[method-assign]  # planted
        answer = super().want(session, want)
        self.book.in_hand = in_hand  # type: ignore[method-assign]  # planted
        return answer


class SeedsTwice(Coordinator):
    """A seeder that gives no sign of life is replaced, though it may wake and write."""

    def _silent(self, message: Silent) -> None:
        super()._silent(message)
        if self.seeder == (message.learner, message.incarnation):
            self.seeder = None
            self._gather()


class TakesOldHellos(Coordinator):
    """A Hello that was long on its way is a newcomer."""

    def _hello(self, message: Hello) -> None:
        self.sessions[message.learner].nonces.clear()
        super()._hello(message)


class KeepsPinsInPauses(Coordinator):
    """One that has no samples keeps the weights that it was given pinned."""

    def _leave_policy(self, session: LearnerSession) -> None:
        pins = [dict(group.pins) for group in self.grants.commit_groups] if session.here else []
        super()._leave_policy(session)
        for group, before in zip(self.grants.commit_groups, pins, strict=False):
            group.pins |= before


class FencesTheUnknown(Coordinator):
    """One that was given up before it heard of its incarnation is only told that it is this no longer."""

    def _hello(self, message: Hello) -> None:
        super()._hello(message)
        if isinstance(self._out[-1], Fenced):
            del self._out[-2]


def with_part(name: str, kind: type) -> type[Coordinator]:
    """A coordinator with another kind of one of its parts."""

    class WithPart(Coordinator):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            getattr(self, name).__class__ = kind

    return WithPart


def with_commit_groups(kind: type[CommitGroup]) -> type[Coordinator]:
    class WithCommitGroups(Coordinator):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            for group in self.grants.commit_groups:
                group.__class__ = kind

    return WithCommitGroups


class AcknowledgesEarly(Grants):
    """A Go is said before the update that it tells of."""

    def _pin(self, session: LearnerSession) -> bool:
        if session.grant is not None and session.ready is None:
            session.ready = self._pieces(session, "go") if session.grant[1] else ()
        return super()._pin(session)


class UnpinsAtGo(Grants):
    """Nothing is pinned while it is read."""

    def _go(self, session: LearnerSession) -> Go | None:
        go = super()._go(session)
        if go is not None:
            self.unpin(session, "go", session.pin)
        return go


class KeepsNoReads(Grants):
    """What a gradient was computed on is not kept for the rate that needs it."""

    def keep_reads(self, pin: Any, pieces: tuple[tuple[int, int], ...]) -> None:
        pass


class FreesSlotsEarly(Grants):
    """A gradient's slot is free before the update is done."""

    def add(self, update: PendingUpdate) -> None:
        super().add(update)
        self.free_slots += update.job.slots


class LosesKeptSlots(Grants):
    """Of two slots that are kept back only one is remembered."""

    def clear(self, session: LearnerSession, *, may_wake: bool) -> None:
        super().clear(session, may_wake=may_wake)
        del session.kept_slots[:-1]


class CommitsEarly(CommitGroup):
    """An update is there when the first shard has done it."""

    def done(self, shard: int, number: int, sums: tuple[float, ...]) -> PendingUpdate | None:
        if shard in self.job and self.job[shard].number == number and self.job[shard].kind == "apply":
            self.sums = dict.fromkeys(self.shards, ())
            self.job = {shard: self.job[shard]}
        return super().done(shard, number, sums)


class WritesWhatIsRead(CommitGroup):
    """Any buffer but the current one is free."""

    def _free_buffer(self) -> int | None:
        return (self.buffer + 1) % self.buffers


class DoesAgain(Shard):
    """A job that was finished is done again."""

    def handle(self, job: ShardJob) -> Done:
        if job.kind != "apply" or job.number > self.memory.finished:
            return super().handle(job)
        self.memory.apply(job)
        return Done(self.shard, self.generation, job.number)


class FinishesFirst(Shard):
    """An update is called finished before it is written."""

    def handle(self, job: ShardJob) -> Done:
        if job.kind == "apply" and job.number > self.memory.finished:
            self.memory.finish(job.number, job.version)
            self.memory.apply(job)
            return Done(self.shard, self.generation, job.number)
        return super().handle(job)


class SeedsAgain(ConnectionState):
    """A Welcome that was long on its way makes it write the initial weights again."""

    def _welcome(self, message: Welcome) -> None:
        super()._welcome(message)
        if message.seed and message.incarnation == self.incarnation and not self.working:
            self.must_seed = True


class PushesOnce(ConnectionState):
    """A push that is lost is not said again."""

    def retry(self) -> list[Message]:
        return [one for one in super().retry() if not isinstance(one, Push)]


class RejoinsWhileItWrites(ConnectionState):
    """It comes again before it has stopped."""

    def receive(self, message: Any) -> list[Message]:
        working, self.working = self.working, False
        said = super().receive(message)
        self.working = working and bool(self.incarnation)
        return said


# --- pauses ---------------------------------------------------------------------------------------------------------


class LeadsWhileUpdatesRun(Grants):
    """Who leads is told before the last update is done."""

    @property
    def still(self) -> bool:
        return True


class UpdatesInPauses(Grants):
    """An update that is decided in a pause, since somebody has gone, is begun."""

    def start(self, *, only_behind: bool) -> list[ShardJob]:
        return super().start(only_behind=False)


class LeadsAtOnce(Pauses):
    """The first who pauses leads, whatever the others do."""

    def next_lead(self, sessions: Any, at_s: float) -> LearnerSession | None:
        return super().next_lead([session for session in sessions if session.pause_entered == self.number], at_s)


class CallsOnce(Pauses):
    """A call to pause that is lost is not said again."""

    def enter_messages(self, sessions: Any, *, again: bool) -> list[EnterPause]:
        return super().enter_messages(sessions, again=False)


class EndsUntold(Pauses):
    """What comes while somebody leads is what it has been told."""

    def next_lead(self, sessions: Any, at_s: float) -> LearnerSession | None:
        lead = super().next_lead(sessions, at_s)
        self._told = (True, True)
        return lead


class LosesItsLead(Pauses):
    """A lead that dies is not replaced."""

    def next_lead(self, sessions: Any, at_s: float) -> LearnerSession | None:
        return None if self.lead is not None else super().next_lead(sessions, at_s)


class LeadsUnderAnotherName(Coordinator):
    """One that led, died and has come again is told to go on."""

    def _tick(self, message: Tick) -> None:
        super()._tick(message)
        lead = None if self.pauses.lead is None else self.sessions[self.pauses.lead[0]]
        if lead is not None and lead.here:
            self._out.append(self.pauses.lead_message(lead))


class EndsEpochsInPauses(SampleLeases):
    """That an epoch has ended is told in the pause at its end."""

    def _find(self, learner: int, want: Want) -> Lease | Answer:
        assert self.book is not None
        return self.book.take(learner, want.epoch, want.count)


class SavesWhatIsOut(Coordinator):
    """What is out when the run is saved stays out."""

    def resume_state(self) -> dict[str, Any]:
        return super().resume_state() | {"book": None if self.leases.book is None else self.leases.book.snapshot()}


class EndsPausesOnce(Coordinator):
    """Who says late that it pauses is not answered."""

    def _paused(self, session: LearnerSession, message: Paused) -> None:
        if self.pauses.due or self.pauses.over:
            super()._paused(session, message)


class SaysOnceThatItIsOver(Coordinator):
    """That the run is over is said once."""

    def _session_of(self, message: Any) -> LearnerSession | None:
        before = len(self._out)
        session = super()._session_of(message)
        self._out[before:] = [one for one in self._out[before:] if not isinstance(one, EndPause)]
        return session

    def _repeat_answer(self, session: LearnerSession) -> None:
        if not self.pauses.over:
            super()._repeat_answer(session)


class GoesInPauses(Coordinator):
    """Who comes in a pause is told to compute."""

    def _hello(self, message: Hello) -> None:
        super()._hello(message)
        self._out += self.grants.give_out([self.sessions[message.learner]])


class PausesAtWork(ConnectionState):
    """It says that it pauses when it is called, and computes on."""

    def receive(self, message: Any) -> list[Message]:
        said = super().receive(message)
        if self.pause is not None and not self.pause.lead and self.working:
            said += [Paused(self.learner, self.incarnation, self.pause.number)]
        return said


class PausesOnce(ConnectionState):
    """That it pauses is said once."""

    def retry(self) -> list[Message]:
        return [one for one in super().retry() if not isinstance(one, Paused)]


class LeadsTwice(ConnectionState):
    """A call to lead that comes again is another one."""

    def receive(self, message: Any) -> list[Message]:
        if isinstance(message, EnterPause) and message.lead and message.incarnation == self.incarnation:
            self._entered = (0, False)
        return super().receive(message)


class ForgetsWakes(Coordinator):
    """A coordinator that was brought back has no wake pending."""

    def shared_words(self) -> Any:
        self.wake.at_s = None
        return super().shared_words()


class WakesTwice(Coordinator):
    """A wake that has come stays pending, and comes again."""

    def _wake_due(self, message: WakeDue) -> None:
        due_s = self.next_wake_s
        super()._wake_due(message)
        if due_s is not None and self.wake.at_s is None and self._at_s >= due_s:
            self.policy.wake_at_s = due_s
            self._tell_policy(Woke(self._at_s))


class WakesEarly(Coordinator):
    """A wake comes with the next tick."""

    def _tick(self, message: Tick) -> None:
        super()._tick(message)
        if self.next_wake_s is not None and self._at_s < self.next_wake_s:
            self.wake.at_s = self.policy.wake_at_s = self._at_s
            self._wake_due(WakeDue())


class KeepsTheFirstWake(Coordinator):
    """A later wake does not replace the pending one."""

    def _carry_out(self, command: Command, fetches: int | None) -> None:
        before = self.wake.at_s
        super()._carry_out(command, fetches)
        if isinstance(command, Wake) and before is not None and before < command.at_s:
            self.wake.at_s = self.policy.wake_at_s = before


KITS: dict[str, Kit] = {
    "no duplicate check": Kit(coordinator=NoDuplicateCheck),
    "acknowledged before it is applied": Kit(coordinator=with_part("grants", AcknowledgesEarly)),
    "a cancelled gradient is applied": Kit(coordinator=AppliesCancelled),
    "the slot of a silent learner is freed": Kit(coordinator=FreesSilentSlots),
    "slots are freed before the update": Kit(coordinator=with_part("grants", FreesSlotsEarly)),
    "a kept slot is forgotten": Kit(coordinator=with_part("grants", LosesKeptSlots)),
    "nothing is pinned": Kit(coordinator=with_part("grants", UnpinsAtGo)),
    "reads are not kept": Kit(coordinator=with_part("grants", KeepsNoReads)),
    "what is read is written": Kit(coordinator=with_commit_groups(WritesWhatIsRead)),
    "committed with the first shard": Kit(coordinator=with_commit_groups(CommitsEarly)),
    "a finished job is done again": Kit(shard=DoesAgain),
    "finished before it is written": Kit(shard=FinishesFirst),
    "the fence is not looked at": Kit(looks_at_fence=False),
    "the journal misses the last message": Kit(journal_lag=1),
    "what comes back is settled": Kit(coordinator=with_part("leases", CountsDroppedAsApplied)),
    "nobody is fenced": Kit(coordinator=KeepsNoFence),
    "cancels are forgotten": Kit(coordinator=ForgetsCancels),
    "an old Want is served": Kit(coordinator=with_part("leases", ServesOldWants)),
    "an Ask is answered anew": Kit(coordinator=AnswersAnew),
    "a Want overtakes a push": Kit(coordinator=with_part("leases", WantsWithoutAnswers)),
    "a lost give-back": Kit(coordinator=with_part("leases", LosesWordOfLeases)),
    "two seeders": Kit(coordinator=SeedsTwice),
    "an old Hello is a newcomer": Kit(coordinator=TakesOldHellos),
    "pins of one that pauses are kept": Kit(coordinator=KeepsPinsInPauses),
    "fenced under a name that it never heard": Kit(coordinator=FencesTheUnknown),
    "seeded again": Kit(client=SeedsAgain),
    "a push is said once": Kit(client=PushesOnce),
    "it comes again while it writes": Kit(client=RejoinsWhileItWrites),
    "who leads is told while updates run": Kit(coordinator=with_part("grants", LeadsWhileUpdatesRun)),
    "an update begins in a pause": Kit(coordinator=with_part("grants", UpdatesInPauses)),
    "the first who pauses leads": Kit(coordinator=with_part("pauses", LeadsAtOnce)),
    "a call to pause is said once": Kit(coordinator=with_part("pauses", CallsOnce)),
    "one that comes again leads on": Kit(coordinator=LeadsUnderAnotherName),
    "a request to end in a pause ends it untold": Kit(coordinator=with_part("pauses", EndsUntold)),
    "a lead that dies is not replaced": Kit(coordinator=with_part("pauses", LosesItsLead)),
    "an epoch is ended in its pause": Kit(coordinator=with_part("leases", EndsEpochsInPauses)),
    "what is out is saved as out": Kit(coordinator=SavesWhatIsOut),
    "the end of a pause is said once": Kit(coordinator=EndsPausesOnce),
    "the end is said once": Kit(coordinator=SaysOnceThatItIsOver),
    "who comes in a pause computes": Kit(coordinator=GoesInPauses),
    "it pauses while it computes": Kit(client=PausesAtWork),
    "that it pauses is said once": Kit(client=PausesOnce),
    "it leads twice": Kit(client=LeadsTwice),
    "a wake is lost at a restart": Kit(coordinator=ForgetsWakes),
    "a wake comes twice": Kit(coordinator=WakesTwice),
    "a wake comes early": Kit(coordinator=WakesEarly),
    "a wake is not replaced": Kit(coordinator=KeepsTheFirstWake),
    "wakes are not journalled": Kit(journals_wakes=False),
}

# Where it was seen first, for those that are rare.
FOUND_AT = {
    "nothing is pinned": 8,
    "what is read is written": 8,
    "the fence is not looked at": 44,
    "the journal misses the last message": 7,
    "cancels are forgotten": 3,
    "an Ask is answered anew": 28,
    "a lost give-back": 1,
    "two seeders": 280,
    "a push is said once": 6,
    "who leads is told while updates run": 14,
    "a call to pause is said once": 4,
    "an epoch is ended in its pause": 2,
    "what is out is saved as out": 4,
    "the slot of a silent learner is freed": 50,
    "a kept slot is forgotten": 51,
    "reads are not kept": 25,
    "nobody is fenced": 18,
    "an old Hello is a newcomer": 101,
    "pins of one that pauses are kept": 11,
    "fenced under a name that it never heard": 153,
    "seeded again": 135,
    "it comes again while it writes": 26,
    "an update begins in a pause": 17,
    "the first who pauses leads": 17,
    "one that comes again leads on": 1398,
    "a request to end in a pause ends it untold": 302,
    "a lead that dies is not replaced": 137,
    "the end of a pause is said once": 626,
    "the end is said once": 144,
    "who comes in a pause computes": 204,
    "it pauses while it computes": 41,
    "that it pauses is said once": 52,
    "a wake is lost at a restart": 154,
    "a wake is not replaced": 29,
    "wakes are not journalled": 65,
}
