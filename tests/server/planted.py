"""Bugs, each planted into a machine: the outsider must find every one of them, by a law that it breaks."""

from __future__ import annotations

from typing import Any

from offbeat.leases import Answer, Lease
from offbeat.policies import Cancel as CancelCommand
from offbeat.policies import Command, Wake
from offbeat.policies import Woke as WokeEvent
from offbeat.server.coordinator.coordinator import Coordinator
from offbeat.server.coordinator.grants import Grants
from offbeat.server.coordinator.pauses import Pauses
from offbeat.server.coordinator.session import Gradient, LearnerSession
from offbeat.server.coordinator.update_queue import CommitGroup, PendingUpdate
from offbeat.server.learner.connection import ConnectionState
from offbeat.server.shard.shard import Shard
from offbeat.server.wire import (
    Ask,
    Done,
    EndPause,
    EnterPause,
    Fenced,
    GiveBack,
    Go,
    Hello,
    Job,
    Message,
    Paused,
    Push,
    Silent,
    Tick,
    Want,
    Welcome,
    Woke,
)
from server.world import Kit


class NoDuplicateCheck(Coordinator):
    """A push that was taken may be taken again."""

    def _close(self, row: LearnerSession, seq: int) -> None:
        pass


class AppliesCancelled(Coordinator):
    """A late push is taken for one at the current version."""

    def _push(self, message: Push) -> None:
        self.rows[message.learner].cancelled = 0
        super()._push(message)

    def _take(self, message: Push, gradient: Gradient, drift: float | None) -> None:
        seat = self.policy.seats.get(message.learner)
        if seat is not None and self.policy.cancels:
            changes: dict[str, Any] = {"version": seat.version}
            message = Push(**{name: getattr(message, name) for name in message.__struct_fields__} | changes)
        super()._take(message, gradient, drift)


class FreesSilentSlots(Coordinator):
    """One who gives no sign of life will not write any more."""

    def _silent(self, message: Silent) -> None:
        row = self.rows[message.learner]
        super()._silent(message)
        self.desk.clear_limbo(row, range(message.incarnation + 1))


class CountsDroppedAsApplied(Coordinator):
    """What comes back is settled."""

    def _back(self, leases: Any, fate: str) -> None:
        for number in leases:
            assert self.book is not None
            self.book.settle(number, "applied")


class KeepsNoFence(Coordinator):
    """Messages of one who was given up are those of the one who came after."""

    def _known(self, message: Any) -> LearnerSession | None:
        row = self.rows.get(message.learner)
        return row if row is not None and row.here else super()._known(message)


class ForgetsCancels(Coordinator):
    """A cancel changes nothing."""

    def _obey(self, command: Command) -> None:
        if not isinstance(command, CancelCommand):
            super()._obey(command)


class ServesOldWants(Coordinator):
    """A Want that was long on its way is a new one."""

    def _want(self, message: Want) -> None:
        row = self.rows[message.learner]
        if row.want is None:
            row.wanted = 0
        super()._want(message)


class AnswersAnew(Coordinator):
    """Who asks for weights again, since no answer has come yet, is given others: the first may be written meanwhile."""

    def _ask(self, message: Ask) -> None:
        row = self.rows[message.learner]
        if message.number == row.asked:
            row.asked -= 1
        super()._ask(message)


class WantsWithoutAnswers(Coordinator):
    """Whether what was said before a Want has come, is not looked at."""

    def _want(self, message: Want) -> None:
        fields = {name: getattr(message, name) for name in message.__struct_fields__}
        super()._want(Want(**fields | {"seq": 0}))


class LosesWordOfLeases(Coordinator):
    """That leases were given back is not heard, and a Want that waits does not say it."""

    def _give_back(self, message: GiveBack) -> None:
        pass

    def _want(self, message: Want) -> None:
        if self.book is not None:
            in_hand, self.book.in_hand = self.book.in_hand, lambda learner: ()  # type: ignore[method-assign]  # planted
            super()._want(message)
            self.book.in_hand = in_hand  # type: ignore[method-assign]  # planted
        else:
            super()._want(message)


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
        self.rows[message.learner].nonces.clear()
        super()._hello(message)


class KeepsPinsAtRest(Coordinator):
    """One that has no samples keeps the weights that it was given pinned."""

    def _unseat(self, row: LearnerSession) -> None:
        pins = [dict(lane.pins) for lane in self.desk.lanes] if row.here else []
        super()._unseat(row)
        for lane, before in zip(self.desk.lanes, pins, strict=False):
            lane.pins |= before


class FencesTheUnknown(Coordinator):
    """One that was given up before it heard of its incarnation is only told that it is this no longer."""

    def _hello(self, message: Hello) -> None:
        super()._hello(message)
        if isinstance(self._out[-1], Fenced):
            del self._out[-2]


def with_desk(kind: type[Grants]) -> type[Coordinator]:
    class WithDesk(Coordinator):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.desk.__class__ = kind

    return WithDesk


def with_lane(kind: type[CommitGroup]) -> type[Coordinator]:
    class WithLane(Coordinator):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            for lane in self.desk.lanes:
                lane.__class__ = kind

    return WithLane


class AcknowledgesEarly(Grants):
    """A Go is said before the update that it tells of."""

    def _pin(self, row: LearnerSession) -> bool:
        if row.grant is not None and row.ready is None:
            row.ready = self._pieces(row, "go") if row.grant[1] else ()
        return super()._pin(row)


class UnpinsAtGo(Grants):
    """Nothing is pinned while it is read."""

    def _go(self, row: LearnerSession) -> Go | None:
        go = super()._go(row)
        if go is not None:
            self.unpin(row, "go", row.pin)
        return go


class KeepsNoReads(Grants):
    """What a gradient was computed on is not kept for the rate that needs it."""

    def keep_reads(self, pin: Any, pieces: tuple[tuple[int, int], ...]) -> None:
        pass


class FreesSlotsEarly(Grants):
    """A gradient's slot is free before the update is done."""

    def add(self, work: PendingUpdate) -> None:
        super().add(work)
        self.free_slots += work.slots


class LosesLimbo(Grants):
    """Of two slots that are kept back only one is remembered."""

    def clear(self, row: LearnerSession, *, may_wake: bool) -> None:
        super().clear(row, may_wake=may_wake)
        del row.limbo[:-1]


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

    def handle(self, job: Job) -> Done:
        if job.kind != "apply" or job.number > self.memory.finished:
            return super().handle(job)
        self.memory.apply(job)
        return Done(self.shard, self.generation, job.number)


class FinishesFirst(Shard):
    """An update is called finished before it is written."""

    def handle(self, job: Job) -> Done:
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


# --- rests ----------------------------------------------------------------------------------------------------------


def with_rests(kind: type[Pauses]) -> type[Coordinator]:
    class WithRests(Coordinator):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.rests.__class__ = kind

    return WithRests


class LeadsWhileUpdatesRun(Grants):
    """Who leads is told before the last update is done."""

    @property
    def still(self) -> bool:
        return True


class UpdatesInRests(Grants):
    """An update that is decided in a rest, since somebody has gone, is begun."""

    def start(self, *, only_behind: bool) -> list[Job]:
        return super().start(only_behind=False)


class LeadsAtOnce(Pauses):
    """The first who rests leads, whatever the others do."""

    def next_lead(self, rows: Any, at_s: float) -> LearnerSession | None:
        return super().next_lead([row for row in rows if row.rested == self.number], at_s)


class CallsOnce(Pauses):
    """A call to rest that is lost is not said again."""

    def calls(self, rows: Any, *, again: bool) -> list[EnterPause]:
        return super().calls(rows, again=False)


class EndsUntold(Pauses):
    """What comes while somebody leads is what it has been told."""

    def next_lead(self, rows: Any, at_s: float) -> LearnerSession | None:
        lead = super().next_lead(rows, at_s)
        self._told = (True, True)
        return lead


class LosesItsLead(Pauses):
    """A lead that dies is not replaced."""

    def next_lead(self, rows: Any, at_s: float) -> LearnerSession | None:
        return None if self.lead is not None else super().next_lead(rows, at_s)


class LeadsUnderAnotherName(Coordinator):
    """One that led, died and has come again is told to go on."""

    def _tick(self, message: Tick) -> None:
        super()._tick(message)
        lead = None if self.rests.lead is None else self.rows[self.rests.lead[0]]
        if lead is not None and lead.here:
            self._out.append(self._lead(lead))


class EndsEpochsInRests(Coordinator):
    """That an epoch has ended is told in the rest at its end."""

    def _find(self, learner: int, want: Want) -> Lease | Answer:
        assert self.book is not None
        return self.book.take(learner, want.epoch, want.count)


class SavesWhatIsOut(Coordinator):
    """What is out when the run is saved stays out."""

    def standing(self) -> dict[str, Any]:
        return super().standing() | {"book": None if self.book is None else self.book.snapshot()}


class RisesOnce(Coordinator):
    """Who says late that it rests is not answered."""

    def _rested(self, message: Paused) -> None:
        if self.rests.due or self.rests.over:
            super()._rested(message)


class SaysOnceThatItIsOver(Coordinator):
    """That the run is over is said once."""

    def _known(self, message: Any) -> LearnerSession | None:
        before = len(self._out)
        row = super()._known(message)
        self._out[before:] = [one for one in self._out[before:] if not isinstance(one, EndPause)]
        return row

    def _again(self, row: LearnerSession) -> None:
        if not self.rests.over:
            super()._again(row)


class GoesInRests(Coordinator):
    """Who comes in a rest is told to compute."""

    def _hello(self, message: Hello) -> None:
        super()._hello(message)
        self._out += self.desk.give_out([self.rows[message.learner]])


class RestsAtWork(ConnectionState):
    """It says that it rests when it is called, and computes on."""

    def receive(self, message: Any) -> list[Message]:
        said = super().receive(message)
        if self.pause is not None and not self.pause.lead and self.working:
            said += [Paused(self.learner, self.incarnation, self.pause.number)]
        return said


class RestsOnce(ConnectionState):
    """That it rests is said once."""

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

    def words(self) -> Any:
        self.wake.at_s = None
        return super().words()


class WakesTwice(Coordinator):
    """A wake that has come stays pending, and comes again."""

    def _woke(self, message: Woke) -> None:
        due_s = self.next_wake_s
        super()._woke(message)
        if due_s is not None and self.wake.at_s is None and self._at_s >= due_s:
            self.policy.wake_at_s = due_s
            self._tell(WokeEvent(self._at_s))


class WakesEarly(Coordinator):
    """A wake comes with the next tick."""

    def _tick(self, message: Tick) -> None:
        super()._tick(message)
        if self.next_wake_s is not None and self._at_s < self.next_wake_s:
            self.wake.at_s = self.policy.wake_at_s = self._at_s
            self._woke(Woke())


class KeepsTheFirstWake(Coordinator):
    """A later wake does not replace the pending one."""

    def _obey(self, command: Command) -> None:
        before = self.wake.at_s
        super()._obey(command)
        if isinstance(command, Wake) and before is not None and before < command.at_s:
            self.wake.at_s = self.policy.wake_at_s = before


KITS: dict[str, Kit] = {
    "no duplicate check": Kit(coordinator=NoDuplicateCheck),
    "acknowledged before it is applied": Kit(coordinator=with_desk(AcknowledgesEarly)),
    "a cancelled gradient is applied": Kit(coordinator=AppliesCancelled),
    "the slot of a silent learner is freed": Kit(coordinator=FreesSilentSlots),
    "slots are freed before the update": Kit(coordinator=with_desk(FreesSlotsEarly)),
    "a kept slot is forgotten": Kit(coordinator=with_desk(LosesLimbo)),
    "nothing is pinned": Kit(coordinator=with_desk(UnpinsAtGo)),
    "reads are not kept": Kit(coordinator=with_desk(KeepsNoReads)),
    "what is read is written": Kit(coordinator=with_lane(WritesWhatIsRead)),
    "committed with the first shard": Kit(coordinator=with_lane(CommitsEarly)),
    "a finished job is done again": Kit(shard=DoesAgain),
    "finished before it is written": Kit(shard=FinishesFirst),
    "the fence is not looked at": Kit(looks_at_fence=False),
    "the journal misses the last message": Kit(journal_lag=1),
    "what comes back is settled": Kit(coordinator=CountsDroppedAsApplied),
    "nobody is fenced": Kit(coordinator=KeepsNoFence),
    "cancels are forgotten": Kit(coordinator=ForgetsCancels),
    "an old Want is served": Kit(coordinator=ServesOldWants),
    "an Ask is answered anew": Kit(coordinator=AnswersAnew),
    "a Want overtakes a push": Kit(coordinator=WantsWithoutAnswers),
    "a lost give-back": Kit(coordinator=LosesWordOfLeases),
    "two seeders": Kit(coordinator=SeedsTwice),
    "an old Hello is a newcomer": Kit(coordinator=TakesOldHellos),
    "pins of one that rests are kept": Kit(coordinator=KeepsPinsAtRest),
    "fenced under a name that it never heard": Kit(coordinator=FencesTheUnknown),
    "seeded again": Kit(client=SeedsAgain),
    "a push is said once": Kit(client=PushesOnce),
    "it comes again while it writes": Kit(client=RejoinsWhileItWrites),
    "who leads is told while updates run": Kit(coordinator=with_desk(LeadsWhileUpdatesRun)),
    "an update begins in a rest": Kit(coordinator=with_desk(UpdatesInRests)),
    "the first who rests leads": Kit(coordinator=with_rests(LeadsAtOnce)),
    "a call to rest is said once": Kit(coordinator=with_rests(CallsOnce)),
    "one that comes again leads on": Kit(coordinator=LeadsUnderAnotherName),
    "a halt in a rest ends it untold": Kit(coordinator=with_rests(EndsUntold)),
    "a lead that dies is not replaced": Kit(coordinator=with_rests(LosesItsLead)),
    "an epoch is ended in its rest": Kit(coordinator=EndsEpochsInRests),
    "what is out is saved as out": Kit(coordinator=SavesWhatIsOut),
    "a Rise is said once": Kit(coordinator=RisesOnce),
    "the end is said once": Kit(coordinator=SaysOnceThatItIsOver),
    "who comes in a rest computes": Kit(coordinator=GoesInRests),
    "it rests while it computes": Kit(client=RestsAtWork),
    "that it rests is said once": Kit(client=RestsOnce),
    "it leads twice": Kit(client=LeadsTwice),
    "a wake is lost at a restart": Kit(coordinator=ForgetsWakes),
    "a wake comes twice": Kit(coordinator=WakesTwice),
    "a wake comes early": Kit(coordinator=WakesEarly),
    "a wake is not replaced": Kit(coordinator=KeepsTheFirstWake),
    "wakes are not journalled": Kit(journals_wakes=False),
}

# Where it was seen first, for those that are rare.
FOUND_AT = {
    "the slot of a silent learner is freed": 50,
    "a kept slot is forgotten": 51,
    "reads are not kept": 25,
    "nobody is fenced": 18,
    "an old Hello is a newcomer": 101,
    "pins of one that rests are kept": 132,
    "fenced under a name that it never heard": 153,
    "seeded again": 135,
    "it comes again while it writes": 26,
    "an update begins in a rest": 17,
    "the first who rests leads": 17,
    "one that comes again leads on": 1398,
    "a halt in a rest ends it untold": 132,
    "a lead that dies is not replaced": 137,
    "a Rise is said once": 240,
    "the end is said once": 144,
    "who comes in a rest computes": 263,
    "it rests while it computes": 41,
    "that it rests is said once": 17,
    "a wake is lost at a restart": 154,
    "a wake is not replaced": 27,
    "wakes are not journalled": 65,
}
