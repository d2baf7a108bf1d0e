"""Whether a pipeline trains a model: proved by its table alone, whatever the actions and messages take.

What is proved:
- every stage is on one rank, and computes the forward pass of every microbatch once, then its backward pass once: as
  one action, or the gradients of its inputs and later those of its weights;
- every message between ranks is sent once, after it was made, and received once, before it is needed;
- with so many buffers a stage and direction, all ranks come to the end: no deadlock;
- one version of the weights: a stage is updated once, after its last gradient, and computes nothing after that;
- what is gathered for FSDP is there when it is used.

Why the order in time does not matter: every rank carries out its row in order and waits only for a message or for a
free buffer. What it waits for cannot be taken away by others, so if one order of events comes to the end, all do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from offbeat.errors import ScheduleError
from offbeat.pipelines.actions import (
    BACKWARD,
    COMPUTES,
    FORWARD,
    INPUT,
    MESSAGES,
    REDUCE_GRAD,
    RESHARD,
    UNSHARD,
    WEIGHT,
    Action,
    PipelineSchedule,
)
from offbeat.pipelines.pipeline_diagram import table_text
from offbeat.pipelines.pipeline_messages import StageMessage, crosses, made_by, message_of, needed_by, with_messages

_SENDS = tuple(kind for kind in MESSAGES if kind.startswith("SEND"))
# Of which no other may have come before for the same microbatch.
_EXCLUDES = {
    FORWARD: (FORWARD,),
    BACKWARD: (BACKWARD, INPUT, WEIGHT),
    INPUT: (BACKWARD, INPUT, WEIGHT),
    WEIGHT: (BACKWARD, WEIGHT),
}
Place = tuple[int, int]  # rank, step


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineProof:
    """What `prove` has found beside that the schedule is right.

    `buffers`: the fewest for each stage and direction with which it does not deadlock. 0: a sender may wait until its
    receiver asks. `peak_activations`: the most microbatches whose activations a rank holds, in stages of that rank.
    """

    buffers: int
    peak_activations: tuple[int, ...]


def prove(schedule: PipelineSchedule, *, buffers: int | None = None) -> PipelineProof:
    """Raise a `ScheduleError` that shows the wrong place, or return what follows from the table.

    `buffers`: with how many it must come to the end; None: with as many as it needs.
    """
    whole = with_messages(schedule)
    _check_placement(whole)
    for rank in range(whole.ranks):
        _Rank(whole, rank).check()
    _check_complete(whole)
    _check_messages(whole)
    needed = 0
    while (stuck := _run(whole, needed)) is not None and needed < whole.microbatches:
        needed += 1
    if stuck is not None or (buffers is not None and buffers < needed):
        raise _deadlock(whole, buffers if stuck is None else None, stuck or _run(whole, buffers or 0) or {})
    return PipelineProof(buffers=needed, peak_activations=peak_activations(whole))


def peak_activations(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Of each rank: activations are held from a forward pass until the gradients of the weights are there."""
    peaks = []
    for row in schedule.rows:
        held = most = 0
        for action in row:
            kinds = [single.kind for single in action.singles]
            held += kinds.count(FORWARD)
            most = max(most, held)
            held -= kinds.count(BACKWARD) + kinds.count(WEIGHT)
        peaks.append(most)
    return tuple(peaks)


# --- each rank by itself --------------------------------------------------------------------------------------------


def _check_placement(schedule: PipelineSchedule) -> None:
    placement = schedule.placement
    for rank, step, action in schedule.places():
        for single in action.singles:
            if single.stage not in placement:
                raise _wrong(schedule, rank, step, f"stage {single.stage} computes nothing")
            if placement[single.stage] != rank:
                raise _wrong(schedule, rank, step, f"stage {single.stage} is on rank {placement[single.stage]} already")
    for stage in range(schedule.stages):
        if stage not in placement:
            raise _wrong(schedule, 0, 0, f"stage {stage} is on no rank")


class _Rank:
    """What has happened on one rank so far, action by action."""

    def __init__(self, schedule: PipelineSchedule, rank: int) -> None:
        self.schedule, self.rank = schedule, rank
        self.stages, self.placement = schedule.stages, schedule.placement
        self.done: set[tuple[int, str, int]] = set()
        self.here: set[StageMessage] = set()  # made or received on this rank
        self.received: set[StageMessage] = set()
        self.gradients: Counter[int] = Counter()
        self.updated: set[int] = set()
        self.sharded = {action.stage for action in schedule.rows[rank] if action.kind == UNSHARD}
        self.gathered: set[int] = set()

    def check(self) -> None:
        for step, action in enumerate(self.schedule.rows[self.rank]):
            for wrong in self._handle(action):
                raise _wrong(self.schedule, self.rank, step, wrong)

    def _handle(self, action: Action) -> Iterator[str]:
        if action.computes:
            for single in action.singles:
                yield from self._needs(single)
            for single in action.singles:
                yield from self._compute(single)
        elif action.kind in MESSAGES:
            yield from self._message(action)
        elif action.kind == REDUCE_GRAD:
            yield from self._update(action.stage)
        elif (action.kind == UNSHARD) == (action.stage in self.gathered):
            yield f"the weights of stage {action.stage} are {'' if action.kind == UNSHARD else 'not '}gathered already"
        elif action.kind == UNSHARD:
            self.gathered.add(action.stage)
        elif action.kind == RESHARD:
            self.gathered.remove(action.stage)

    def _needs(self, action: Action) -> Iterator[str]:
        stage, kind, microbatch, _ = action
        if stage in self.updated:
            yield (
                f"'{action}' uses the weights of stage {stage} after their update, but other microbatches "
                "used them before it"
            )
        if stage in self.sharded and stage not in self.gathered:
            yield f"'{action}' uses weights that are not gathered"
        message = needed_by(action, self.stages)
        if message is not None and message not in self.here:
            missing = (
                f"but comes before '{message.receive}'"
                if crosses(message, self.placement)
                else "which is computed later"
            )
            yield f"'{action}' needs the result of stage {message.source}, {missing}"
        before = {BACKWARD: FORWARD, INPUT: FORWARD, WEIGHT: INPUT}.get(kind)
        if before is not None and (stage, before, microbatch) not in self.done:
            yield f"'{action}' comes before {Action(stage, before, microbatch)}"

    def _compute(self, action: Action) -> Iterator[str]:
        stage, kind, microbatch, _ = action
        for other in _EXCLUDES[kind]:
            if (stage, other, microbatch) in self.done:
                yield f"'{action}' repeats work that '{Action(stage, other, microbatch)}' has already done"
        self.done.add((stage, kind, microbatch))
        self.gradients[stage] += kind in (BACKWARD, WEIGHT)
        made = made_by(action, self.stages)
        if made is not None:
            self.here.add(made)

    def _message(self, action: Action) -> Iterator[str]:
        message = message_of(action)
        if not (0 <= message.source < self.stages and 0 <= message.target < self.stages):
            yield f"'{action}': there is no stage {message.source if action.kind not in _SENDS else message.target}"
        elif not crosses(message, self.placement):
            yield f"'{action}': both stages are on this rank"
        elif action.kind in _SENDS and message not in self.here:
            yield f"'{action}' comes before the result that it sends is computed"
        elif action.kind not in _SENDS:
            if message in self.received:
                yield f"'{action}' comes twice"
            self.received.add(message)
            self.here.add(message)

    def _update(self, stage: int) -> Iterator[str]:
        if stage in self.updated:
            yield f"stage {stage} is updated twice"
        if self.gradients[stage] < self.schedule.microbatches:
            yield (
                f"stage {stage} is updated after {self.gradients[stage]} of {self.schedule.microbatches} microbatches: "
                "the others would use another version of the weights"
            )
        self.updated.add(stage)


# --- all of them together -------------------------------------------------------------------------------------------


def _check_complete(schedule: PipelineSchedule) -> None:
    singles = {single for _, _, action in schedule.places() for single in action.singles}
    for stage, rank in schedule.placement.items():
        end = len(schedule.rows[rank])
        for microbatch in range(schedule.microbatches):
            if Action(stage, FORWARD, microbatch) not in singles:
                raise _wrong(schedule, rank, end, f"'{Action(stage, FORWARD, microbatch)}' is missing")
            if Action(stage, BACKWARD, microbatch) not in singles:
                for kind in (INPUT, WEIGHT):
                    if Action(stage, kind, microbatch) not in singles:
                        one = f"'{Action(stage, BACKWARD, microbatch)}' or '{Action(stage, kind, microbatch)}'"
                        raise _wrong(schedule, rank, end, f"{one} is missing")
        if Action(stage, REDUCE_GRAD) not in singles and any(single.kind == REDUCE_GRAD for single in singles):
            raise _wrong(schedule, rank, end, f"stage {stage} is never updated, but other stages are")


def _check_messages(schedule: PipelineSchedule) -> None:
    sent: dict[StageMessage, Place] = {}
    received: dict[StageMessage, Place] = {}
    for rank, step, action in schedule.places():
        if action.kind in MESSAGES:
            message, known = message_of(action), sent if action.kind in _SENDS else received
            if message in known:
                raise _wrong(schedule, rank, step, f"'{action}' comes twice")
            known[message] = rank, step
    for message, place in sent.items():
        if message not in received:
            raise _wrong(schedule, *place, f"'{message.send}' is never received")
    for message, place in received.items():
        if message not in sent:
            raise _wrong(schedule, *place, f"'{message.receive}' waits for a message that is never sent")


def _run(schedule: PipelineSchedule, buffers: int) -> dict[int, int] | None:
    """None if all ranks come to the end; else at which step each of the others waits."""
    at = [0] * schedule.ranks
    stages = schedule.stages
    asked: set[StageMessage] = set()
    sent: set[StageMessage] = set()
    waiting: Counter[tuple[int, int]] = Counter()  # messages in the buffers of a stage that were not asked for yet

    def can(action: Action) -> bool:
        if action.kind in MESSAGES:
            message = message_of(action)
            way = (message.source, message.target)
            if action.kind in _SENDS:
                if message not in asked and waiting[way] >= buffers:
                    return False
                sent.add(message)
                waiting[way] += message not in asked
            else:
                asked.add(message)
                waiting[way] -= message in sent
            return True
        needs = (needed_by(single, stages) for single in action.singles if single.kind in COMPUTES)
        return all(message in sent or message not in asked for message in needs if message is not None)

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while at[rank] < len(row) and can(row[at[rank]]):
                at[rank] += 1
                moved = True
    stuck = {rank: step for rank, step in enumerate(at) if step < len(schedule.rows[rank])}
    return stuck or None


# --- errors ---------------------------------------------------------------------------------------------------------


def _deadlock(schedule: PipelineSchedule, buffers: int | None, stuck: dict[int, int]) -> ScheduleError:
    waits = ", ".join(f"rank {one} at '{schedule.rows[one][step]}'" for one, step in stuck.items())
    room = "however many buffers it has" if buffers is None else f"with {buffers} buffer{'' if buffers == 1 else 's'}"
    return _error(schedule, stuck, f"deadlock {room}: {waits} wait for each other")


def _wrong(schedule: PipelineSchedule, rank: int, step: int, what: str) -> ScheduleError:
    return _error(schedule, {rank: step}, f"rank {rank}, action {step + 1}: {what}")


def _error(schedule: PipelineSchedule, marks: dict[int, int], what: str) -> ScheduleError:
    rank = min(marks)
    return ScheduleError(
        f"pipeline '{schedule.name}' is not correct: {what}",
        step=marks[rank],
        rank=rank,
        grid=table_text(schedule, marks=marks),
    )
