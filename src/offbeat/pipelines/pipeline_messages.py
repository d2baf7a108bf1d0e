"""What the stages of a pipeline send to each other, and where in the rows that stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from offbeat.pipelines.actions import (
    BACKWARD,
    FORWARD,
    INPUT,
    MESSAGES,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    WEIGHT,
    Action,
    PipelineSchedule,
)


class StageMessage(NamedTuple):
    """Activations on their way forward, or gradients on their way back, between neighbouring stages."""

    source: int  # stages
    target: int
    microbatch: int

    @property
    def send(self) -> Action:
        return Action(self.source, SEND_F if self.source < self.target else SEND_B, self.microbatch)

    @property
    def receive(self) -> Action:
        return Action(self.target, RECV_F if self.source < self.target else RECV_B, self.microbatch)


def message_of(action: Action) -> StageMessage:
    """The message that a SEND or RECV is about."""
    stage, kind, microbatch, _ = action
    forward = kind in (SEND_F, RECV_F)
    there = stage + (1 if forward == (kind in (SEND_F, SEND_B)) else -1)
    return (
        StageMessage(stage, there, microbatch) if kind in (SEND_F, SEND_B) else StageMessage(there, stage, microbatch)
    )


def needed_by(action: Action, stages: int) -> StageMessage | None:
    """What a computation needs from a neighbouring stage."""
    stage, kind, microbatch, _ = action
    if kind == FORWARD and stage > 0:
        return StageMessage(stage - 1, stage, microbatch)
    if kind in (BACKWARD, INPUT) and stage < stages - 1:
        return StageMessage(stage + 1, stage, microbatch)
    return None


def made_by(action: Action, stages: int) -> StageMessage | None:
    """What a computation has for a neighbouring stage."""
    stage, kind, microbatch, _ = action
    if kind == FORWARD and stage < stages - 1:
        return StageMessage(stage, stage + 1, microbatch)
    if kind in (BACKWARD, INPUT) and stage > 0:
        return StageMessage(stage, stage - 1, microbatch)
    return None


def has_messages(schedule: PipelineSchedule) -> bool:
    return any(action.kind in MESSAGES for _, _, action in schedule.places())


def crosses(message: StageMessage, placement: Mapping[int, int]) -> bool:
    """Whether it goes to another rank; between stages of one rank nothing is sent."""
    return placement.get(message.source) != placement.get(message.target)


def with_messages(schedule: PipelineSchedule) -> PipelineSchedule:
    """The same with every receive just before the action that needs it, every send just after the one that makes it,
    and the update of a stage after its last gradient. What has messages stays as it is.
    """
    if has_messages(schedule):
        return schedule
    placement, stages = schedule.placement, schedule.stages
    rows = []
    for row in schedule.rows:
        updates = any(action.kind == REDUCE_GRAD for action in row)
        gradients: Counter[int] = Counter()
        long: list[Action] = []
        for action in row:
            needs = [needed_by(single, stages) for single in action.singles]
            makes = [made_by(single, stages) for single in action.singles]
            long += [message.receive for message in needs if message is not None and crosses(message, placement)]
            long.append(action)
            long += [message.send for message in makes if message is not None and crosses(message, placement)]
            for single in action.singles:
                gradients[single.stage] += single.kind in (BACKWARD, WEIGHT)
                if single.kind in (BACKWARD, WEIGHT) and gradients[single.stage] == schedule.microbatches:
                    long += [] if updates else [Action(single.stage, REDUCE_GRAD)]
        rows.append(tuple(long))
    return PipelineSchedule(name=schedule.name, microbatches=schedule.microbatches, rows=tuple(rows))


def with_early_receives(schedule: PipelineSchedule) -> PipelineSchedule:
    """The same with messages, and every receive posted before the computation that comes before the one that needs it:
    then a message can arrive while its receiver computes."""
    rows = []
    for row in with_messages(schedule).rows:
        early: list[Action] = []
        last = 0  # the place of the latest computation
        for action in row:
            if action.kind in (RECV_F, RECV_B):
                early.insert(last, action)
                last += 1
                continue
            if action.computes:
                last = len(early)
            early.append(action)
        rows.append(tuple(early))
    return PipelineSchedule(name=schedule.name, microbatches=schedule.microbatches, rows=tuple(rows))


def without_messages(schedule: PipelineSchedule) -> PipelineSchedule:
    """What is computed, and nothing else."""
    rows = tuple(tuple(action for action in row if action.computes) for row in schedule.rows)
    return PipelineSchedule(name=schedule.name, microbatches=schedule.microbatches, rows=rows)
