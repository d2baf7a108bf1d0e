"""Training in virtual time: when everything happens is simulated, what is computed is real.

A *timeline* is a run of the simulator that says more: which samples each minibatch has, and, update by update, which
minibatches it applies and at which weights they were computed (`Update`). A `Learner` does the arithmetic. This file
knows neither tensors nor models; the torch side is in `arithmetic` and `virtual`.

    the policy's timing does not depend on values    the timeline is simulated ahead; minibatches whose weights exist
                                                     already are then computed together, up to `width` at a time, and
                                                     what will be cancelled or dropped is never computed
    it does (adaptive-k by the loss, drift)          lock step: when a gradient arrives the learner is asked; it may
                                                     compute others that are under way with it

Laws. The order of updates and what is in them do not depend on the width. A version is kept only as long as a minibatch
may still be computed on it. The same arguments give the same updates.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol

from offbeat.errors import LogError, ReplayError, RequestError
from offbeat.policies import Apply, Command, Drop, Left, Policy, Pushed, Stopped
from offbeat.policies.events import as_text
from offbeat.policies.replay import policy_of, replayed
from offbeat.runs.log import RunLog
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.collective import Rounds
from offbeat.simulate.engine import ASIDE, REJOIN
from offbeat.simulate.result import Result, Tally
from offbeat.simulate.sample_source import Batch, Epochs, count_samples
from offbeat.simulate.server import Simulation

KEEP_EVERY = 16  # updates from one look at which versions are needed to the next, at most


class Step(NamedTuple):
    """One minibatch: on the weights of the version that was fetched for it (-1: on those that the learner has).

    Without samples it is no minibatch: those weights came after the last one, just before it was pushed.
    """

    fetched: int
    batch: Batch


class Minibatch(NamedTuple):
    """What a push came from: one minibatch, or, where learners step by themselves, several."""

    number: int  # no other has it
    learner: int
    version: int  # of the oldest weights in it
    steps: tuple[Step, ...]

    @property
    def batch(self) -> Batch:
        return tuple(stretch for step in self.steps for stretch in step.batch)

    @property
    def computed(self) -> tuple[Step, ...]:
        """Those with samples."""
        return tuple(step for step in self.steps if step.batch)

    @property
    def samples(self) -> int:
        return sum(count_samples(step.batch) for step in self.steps)

    @property
    def latest(self) -> int:
        """The version of the newest weights in it: it can be computed when these exist."""
        return max(self.version, *(step.fetched for step in self.steps))


WriteDecision = Callable[[dict[str, Any], Minibatch | None], object]  # told every decision, and what a push came from


class TimeSpent(NamedTuple):
    """Seconds of all learners together, up to now, of what they have finished doing."""

    compute_s: float
    waste_s: float  # of compute
    send_s: float
    wait_s: float

    @property
    def whole_s(self) -> float:
        return self.compute_s + self.send_s + self.wait_s or 1.0

    @property
    def waste_share(self) -> float:
        return self.waste_s / self.whole_s

    @property
    def wait_share(self) -> float:
        """Not computing: sending and waiting."""
        return (self.wait_s + self.send_s) / self.whole_s


class Update(NamedTuple):
    """One change of the parameters: the optimizer fed with (1/n) * sum(scales[i] * gradient of works[i])."""

    version: int  # that it makes
    at_s: float
    works: tuple[Minibatch, ...]
    scales: tuple[float, ...]
    told: int  # the version whose learning rate is taken: that of who pushed last
    spent: TimeSpent
    dropped: Mapping[str, int] = {}  # samples by reason, up to now
    damping: float = 1.0  # of the step
    needed: frozenset[int] | None = None  # versions that works of later updates may be at; None: not looked at
    hyper: list[dict[str, float]] | None = None  # what the optimizer was told for it, where a log says that

    @property
    def samples(self) -> int:
        return sum(work.samples for work in self.works)

    @property
    def is_fresh(self) -> bool:
        """Whether all gradients are of the version before, and weigh as their samples do: that of one large batch."""
        per_sample = [scale / work.samples for scale, work in zip(self.scales, self.works, strict=True)]
        return (
            all(work.version == self.version - 1 and len(work.steps) == 1 for work in self.works)
            and max(per_sample) - min(per_sample) <= 1e-12 * max(per_sample)
        )  # fmt: skip


def in_order(
    policy: Policy, works: tuple[Minibatch, ...], scales: tuple[float, ...]
) -> tuple[tuple[Minibatch, ...], tuple[float, ...]]:
    """As the server adds them: where policies cancel, by their samples, so that the same set gives the same bits."""
    if not policy.cancels:
        return works, scales
    pairs = sorted(zip(works, scales, strict=True), key=lambda pair: pair[0].batch)
    return tuple(work for work, _ in pairs), tuple(scale for _, scale in pairs)


def needed_by(policy: Policy) -> set[int]:
    """The versions of what a policy holds, and of what its learners compute."""
    held = (gradient.version for gradient in policy.held.values())
    return {*held, *(seat.version for seat in policy.learners.values())}


def spent_of(tally: Tally) -> TimeSpent:
    seconds = tally.seconds
    return TimeSpent(seconds["compute"], tally.waste_s, seconds["send"], seconds["wait"])


class LossAndDrift(NamedTuple):
    """What a policy may ask about a gradient."""

    loss: float | None
    drift: float | None  # |w_now - w_read|^2


class Learner(Protocol):
    """Who does the arithmetic; all weights and gradients are its own."""

    def compute(self, works: Sequence[Minibatch]) -> None:
        """The gradients of these, whose versions exist; each is kept until it is applied."""

    def apply(self, update: Update) -> None:
        """Make the update. What was not computed before is computed now; if it `is_fresh`, as one batch if it can."""

    def answer(self, work: Minibatch) -> LossAndDrift:
        """About a gradient that was computed, at the current version."""

    def keep(self, versions: Collection[int]) -> None:
        """No other versions will be asked for; the current one stays in any case."""

    def forget(self, numbers: Collection[int]) -> None:
        """These works will not be applied."""


class Timeline(Protocol):
    """A run that is simulated as far as it is asked for."""

    lock_step: bool

    def stream(self) -> Iterator[Update]: ...
    def result(self) -> Result: ...


# --- the parameter server -------------------------------------------------------------------------------------------


class ServedTimeline(Simulation):
    """The server's simulation with samples. Without an end of its own: it ends when its source is over.

    Where learners push every H minibatches, they also push what they have where there are no more samples to take.
    """

    def __init__(
        self,
        strategy: str,
        cluster: Cluster,
        source: Epochs,
        *,
        keep_spans: int = 0,
        write: WriteDecision | None = None,
        corrects: bool = False,
        scaling: float = 1.0,
    ) -> None:
        wanted = None if write is None else partial(self._add_batch, write)
        super().__init__(strategy, cluster, 10**12, keep_spans, wanted, corrects=corrects, scaling=scaling)
        self.source = source
        self.lock_step = self.policy.needs_drift or self.policy.needs_loss
        # About a gradient that has arrived, in lock step.
        self.ask: Callable[[Minibatch], LossAndDrift] = lambda work: LossAndDrift(None, None)
        self._steps: list[list[Step]] = [[] for _ in range(cluster.learners)]  # of what is not pushed yet
        self._taken = [-1] * cluster.learners  # by who overlaps: weights that no step was made on yet
        self._numbers = [0] * cluster.learners
        self._works: dict[int, Minibatch] = {}  # on their way, by the number under which they were sent
        self._arrived: dict[int, Minibatch] = {}  # by ticket
        self._next = 0
        self._made: list[Update] = []
        self._decisions = 0
        self.logged: dict[int, tuple[int, int]] = {}  # by version: spans and decisions when the update was made
        self._keep_every = max(1, min(KEEP_EVERY, cluster.learners // 8))  # a look takes as long as there are learners
        self._away: list[int] = []  # learners without samples, in the order of stepping aside
        self.handlers[ASIDE] = self._aside

    @property
    def is_over(self) -> bool:
        return self.source.over

    def stream(self) -> Iterator[Update]:
        for _ in self.turns():
            if self._away:
                self._call_back()
            if self._made:
                self.logged.update((update.version, (len(self.spans), self._decisions)) for update in self._made)
                yield from self._made
                self._made.clear()

    def under_way(self) -> Iterator[Minibatch]:
        """What is being computed or on its way; nothing where learners step by themselves, for that has an order."""
        if self.free or self.overlaps or self.rule.push_every > 1:
            return
        for learner, steps in enumerate(self._steps):
            if steps:
                yield Minibatch(self._numbers[learner], learner, self.version[learner], (steps[0],))
        yield from self._works.values()

    def alive(self) -> set[int]:
        """The numbers of all works that may still be applied."""
        arrived = (work.number for work in self._arrived.values())
        return {*arrived, *(work.number for work in self.under_way())}

    # --- what the simulation does, with samples -----------------------------------------------------------------------

    def _compute(self, learner: int) -> None:
        batch = self.source.take(learner)
        if batch is None:
            self._without_samples(learner)
            return
        fetched = self.next_version[learner]
        super()._compute(learner)
        if not self._steps[learner]:
            self._next += 1
            self._numbers[learner] = self._next
        if self.overlaps:
            fetched, self._taken[learner] = self._taken[learner], -1
        self._steps[learner].append(Step(-1 if fetched is None else fetched, batch))

    def _take_weights(self, learner: int, least: int = 0) -> None:
        before = self.next_version[learner]
        super()._take_weights(learner, least)
        if before is not None and self.next_version[learner] is None:
            self._taken[learner] = before

    def _packed(self, learner: int, number: int) -> None:
        if self._taken[learner] >= 0:  # after the last of its steps
            self._steps[learner].append(Step(self._taken[learner], ()))
            self._taken[learner] = -1
        steps = tuple(self._steps[learner])
        self._steps[learner] = []
        self._works[number] = Minibatch(self._numbers[learner], learner, self.flying[number][1], steps)

    def _recalled(self, number: int) -> None:
        for step in self._works.pop(number).computed:
            self.source.give_back(step.batch, "cancelled")

    def _pushed(self, learner: int, number: int) -> Pushed:
        work = self._arrived[self.ticket] = self._works.pop(number)
        answer = self.ask(work)
        return Pushed(learner, self.ticket, work.version, work.samples, answer.drift, answer.loss, self.now)

    def _obey(self, command: Command) -> None:
        if isinstance(command, Apply):
            works = tuple(self._arrived.pop(ticket) for ticket in command.tickets)
            told = works[-1].latest
            works, scales = in_order(self.policy, works, command.scales)
            for work in works:
                for step in work.computed:
                    self.source.settle(step.batch)
            version = self.policy.version
            needed = self._needed() if version % self._keep_every == 0 else None
            spent, dropped = spent_of(self.tally), self.source.dropped
            self._made.append(Update(version, self.now, works, scales, told, spent, dropped, command.damping, needed))
        elif isinstance(command, Drop):
            for step in self._arrived.pop(command.ticket).computed:
                self.source.give_back(step.batch, command.why.split(":")[0])
        super()._obey(command)

    def _close(self, learner: int, *, cancelled: bool = False) -> None:
        if cancelled:
            for step in self._steps[learner]:
                self.source.give_back(step.batch, "cancelled")
            self._steps[learner] = []
        super()._close(learner, cancelled=cancelled)

    def _fail(self, learner: int, number: int) -> None:
        if number != self.life[learner]:
            return  # it has stepped aside since
        lost = [sent for sent, gradient in self.flying.items() if gradient[0] == learner]
        for step in [*self._steps[learner], *(step for sent in lost for step in self._works.pop(sent).computed)]:
            self.source.put_back(step.batch)
        self._steps[learner] = []
        super()._fail(learner, number)

    # --- the end of an epoch ------------------------------------------------------------------------------------------

    def _without_samples(self, learner: int) -> None:
        """As a real learner: it pushes what it has computed, and steps aside when that is answered."""
        if self.overlaps and not self._is_answered(learner):
            return
        steps = len(self._steps[learner])
        if steps and not self.free:
            self.done[learner] = 0
        if steps and not (self._push(learner, steps) and self.free):
            return  # and comes here again, with nothing, when it may go on
        if self.free and self.doing[learner] != "wait":
            self._close(learner)
            self.doing[learner] = "wait"
        # Not at once: the policy may be in the middle of its commands.
        self._plan(self.now, ASIDE, learner, self.turn[learner])

    def _is_answered(self, learner: int) -> bool:
        """Of one that overlaps: whether all that it has computed is pushed and answered; else it does so, or waits."""
        self._close(learner)
        self._take_weights(learner)
        steps = len(self._steps[learner])
        if self.ahead[learner] < 0 and steps:
            self.done[learner] = 0
            self._push(learner, steps)
            self._take_weights(learner)
        if self.ahead[learner] >= 0:
            self._stand(learner)
            return False
        self.doing[learner] = "wait"
        return True

    def _arrive(self, learner: int, number: int) -> int:
        arrived = super()._arrive(learner, number)
        if arrived and self.free and self.doing[learner] == "wait":
            self._plan(self.now, ASIDE, learner, self.turn[learner])
        return arrived

    def _aside(self, learner: int, number: int) -> None:
        """A learner without samples leaves until there are some, so that nobody waits for it."""
        if number != self.turn[learner] or self.doing[learner] != "wait" or self.pushing[learner] in self.flying:
            return
        if self.source.free:  # some have come back at this very moment
            self._begin(learner)
            return
        self._close(learner)
        self.doing[learner] = "away"
        self.next_version[learner] = None
        self.turn[learner] += 1
        self.life[learner] += 1
        self._away.append(learner)
        self._tell(Left(learner, self.now))

    def _call_back(self) -> None:
        """Those who have stepped aside, as soon as there are samples."""
        if (
            len(self._away) == self.cluster.learners
            and not self.flying
            and not self.source.free
            and not self.source.over
        ):
            self.source.settle_held()
        if self.source.free:
            for learner in self._away:
                self._plan(self.now, REJOIN, learner, self.done[learner])
            self._away.clear()

    # --- books --------------------------------------------------------------------------------------------------------

    def _needed(self) -> frozenset[int]:
        """The versions that what is not applied yet is or may be computed at."""
        policy = self.policy
        needed = needed_by(policy)
        if self.rule.fetch_every:  # what is pushed next may hold work at all versions since the oldest
            oldest = min([seat.floor for seat in policy.learners.values()], default=policy.version)
            needed.update(range(oldest, policy.version + 1))
        if self.lock_step:  # the policy asks about what comes late too, though it has cancelled it
            needed.update(self.version, self.oldest, (version for _, version, _, _ in self.flying.values()))
        return frozenset(needed)

    def _add_batch(self, write: WriteDecision, record: dict[str, Any]) -> None:
        """To what is logged of a push: its samples."""
        self._decisions += 1
        work = self._arrived[self.ticket] if record["event"].startswith("pushed") else None
        if work is not None:
            record["batch"] = [list(stretch) for stretch in work.batch]
        write(record, work)


def untrained(timeline: Timeline) -> Timeline:
    """The timeline as if neither losses nor weights changed, where its policy asks for them: nothing is trained."""
    if isinstance(timeline, ServedTimeline) and timeline.lock_step:
        timeline.ask = lambda work: LossAndDrift(1.0, 1.0)
    return timeline


# --- all-reduce -----------------------------------------------------------------------------------------------------


class ReducedTimeline:
    """An all-reduce with samples: everybody has a piece of every update. `pieces`: of each, update by update."""

    lock_step = False

    def __init__(self, rounds: Rounds, pieces: Iterable[Sequence[Batch]]) -> None:
        self.rounds, self.pieces = rounds, pieces

    def stream(self) -> Iterator[Update]:
        rounds, number = self.rounds, 0
        for pieces in self.pieces:
            version = rounds.version
            works = tuple(
                Minibatch(number + learner, learner, version, (Step(version, piece),))
                for learner, piece in enumerate(pieces)
            )
            number += len(pieces)
            rounds.go()
            mean = sum(work.samples for work in works) / len(works)
            scales = tuple(work.samples / mean for work in works)
            yield Update(version + 1, rounds.now, works, scales, version, spent_of(rounds.tally), needed=frozenset())

    def result(self) -> Result:
        return self.rounds.result()


# --- a log ----------------------------------------------------------------------------------------------------------


class LoggedTimeline:
    """The timeline of a real run, from its log: the same updates from the same minibatches, in the same order.

    The log of a run with a parameter server says of each push which samples it came from and at which version it was
    computed, and what the policy answered. The policy is asked again: if it says anything else, the log is not whole.
    `RequestError` where what happened between pushes is not in the log.
    """

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
            raise RequestError(f"'{line}': the log does not have the steps of learners between pushes")
        self.now = 0.0
        self._told: dict[int, Any] = {}  # what the optimizer was told with each gradient, by ticket
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
        hyper = [self._told.pop(ticket) for ticket in command.tickets][-1]
        taken, scales = in_order(policy, taken, command.scales)
        tally, before = self._tally, policy.version - 1
        tally.staleness.update([before - work.version for work in taken])
        tally.applied += len(taken)
        tally.samples += sum(work.samples for work in taken)
        needed = frozenset(needed_by(policy)) if policy.version % KEEP_EVERY == 0 else None
        spent, damping = spent_of(tally), command.damping
        return Update(policy.version, self.now, taken, scales, told, spent, damping=damping, needed=needed, hyper=hyper)

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


# --- carrying it out ------------------------------------------------------------------------------------------------


def train(timeline: Timeline, learner: Learner, *, width: int, after: Callable[[Update], bool]) -> None:
    """Make every update of the timeline, in order; `after` is called after each, and ends it by saying True."""
    if width < 1:
        raise RequestError(f"at least 1 minibatch must be computed at a time; got {width}")
    updates = _in_lock_step(timeline, learner, width) if timeline.lock_step else _ahead(timeline, learner, width)
    for update in updates:
        if after(update):
            return


def _ahead(timeline: Timeline, learner: Learner, width: int) -> Iterator[Update]:
    """Look ahead in the timeline, and compute what can be computed together."""
    source = timeline.stream()
    ahead: deque[Update] = deque()
    waiting: dict[
        int, Minibatch
    ] = {}  # what is not computed yet of what lies ahead, in the order in which it is needed
    ready = 0  # those of them whose weights exist
    later: Counter[int] = Counter()  # how many wait for each version that does not
    version = 0  # that the learner has made
    needed, looked_at = frozenset([0]), 0  # of the latest update that says, and which that was
    while True:
        while ready < width and len(waiting) < 4 * width and len(ahead) < 4 * width:
            update = next(source, None)
            if update is None:
                break
            ahead.append(update)
            if update.needed is not None:
                needed, looked_at = update.needed, update.version
            if update.is_fresh:  # it is computed when it is applied: there is no need to look further
                break
            for work in update.works:
                waiting[work.number] = work
                if work.latest <= version:
                    ready += 1
                else:
                    later[work.latest] += 1
        if not ahead:
            return
        update = ahead.popleft()
        if any(work.number in waiting for work in update.works):
            possible = (work for work in waiting.values() if work.latest <= version)
            chosen = list(islice(possible, max(width, len(update.works))))  # its own are the first
            learner.compute(chosen)
            for work in chosen:
                del waiting[work.number]
            ready -= len(chosen)
        learner.apply(update)
        version = update.version
        ready += later.pop(version, 0)
        if update.needed is not None:
            works = [work for one in ahead for work in one.works]
            read = {one for work in works for one in (work.version, *(step.fetched for step in work.steps))}
            learner.keep({*needed, *read, *range(looked_at, version + 1)})
        yield update


def _in_lock_step(timeline: Timeline, learner: Learner, width: int) -> Iterator[Update]:
    """The policy asks about every gradient when it arrives; others that are under way are computed with it."""
    assert isinstance(timeline, ServedTimeline)
    computed: set[int] = set()

    def ask(work: Minibatch) -> LossAndDrift:
        if work.number not in computed:
            others = (one for one in timeline.under_way() if one.number not in computed)
            chosen = [work, *islice(others, width - 1)]
            learner.compute(chosen)
            computed.update(one.number for one in chosen)
        return learner.answer(work)

    timeline.ask = ask
    for update in timeline.stream():
        learner.apply(update)
        computed.difference_update(work.number for work in update.works)
        if update.needed is not None:
            learner.keep(update.needed)
            lost = computed.difference(timeline.alive())  # with a learner that failed, or dropped
            learner.forget(lost)
            computed.difference_update(lost)
        yield update
