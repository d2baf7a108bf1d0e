"""A pipeline schedule carried out on tensors: each rank follows its row, messages go by a road.

A rank is a generator: it yields where it has to wait, for a message or for a free buffer. Who drives it decides how
that waiting is done: `run_in_process` drives all ranks in turn, in one process over an in-memory road; a rank that is a
process waits for the road (process_road.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from offbeat.errors import ScheduleError
from offbeat.parallel.stage import LossSum, Stage
from offbeat.pipelines.actions import (
    BACKWARD,
    FORWARD,
    INPUT,
    MESSAGES,
    SEND_B,
    SEND_F,
    WEIGHT,
    Action,
    PipelineSchedule,
)
from offbeat.pipelines.pipeline_messages import StageMessage, made_by, message_of, needed_by, with_messages


class Road(Protocol):
    """Carries messages between stages. Nothing here waits."""

    def try_send(self, message: StageMessage, value: Tensor) -> bool:
        """False where no buffer is free: then it is tried again."""

    def ask(self, message: StageMessage) -> None:
        """It is received from now on."""

    def try_receive(self, message: StageMessage) -> Tensor | None:
        """None where it has not come yet."""


class InMemoryRoad:
    """Messages between ranks of one process, with so many buffers for each stage and direction."""

    def __init__(self, buffers: int) -> None:
        self.buffers = buffers
        self._arrived: dict[StageMessage, Tensor] = {}
        self._asked: set[StageMessage] = set()
        self._waiting: Counter[tuple[int, int]] = Counter()

    def try_send(self, message: StageMessage, value: Tensor) -> bool:
        """False where no buffer is free, and nobody asks for this message."""
        way = (message.source, message.target)
        if message not in self._asked:
            if self._waiting[way] >= self.buffers:
                return False
            self._waiting[way] += 1
        self._arrived[message] = value
        return True

    def ask(self, message: StageMessage) -> None:
        self._asked.add(message)
        if message in self._arrived:
            self._waiting[message.source, message.target] -= 1

    def try_receive(self, message: StageMessage) -> Tensor | None:
        return self._arrived.pop(message, None)


class RankExecutor:
    """What one rank does of a schedule, on its stages."""

    def __init__(
        self,
        schedule: PipelineSchedule,
        rank: int,
        stages: Mapping[int, Stage],
        road: Road,
        *,
        loss: LossSum,
        on_computed: Callable[[Action], None] = lambda action: None,
    ) -> None:
        self.on_computed = on_computed  # called after each action that computes
        self.schedule = with_messages(schedule)
        self.rank, self.stages, self.road, self.loss = rank, stages, road, loss
        self.count = schedule.stages
        self.losses: dict[int, Tensor] = {}
        self.peak = 0  # microbatches that its stages held at most

    def run(self, inputs: Sequence[Tensor], targets: Sequence[Tensor], shares: Sequence[float]) -> Iterator[Action]:
        """Yields the action that it waits at, again and again until it can go on.

        The loss of each microbatch is multiplied by its share. Ranks without the first stage need no inputs, those
        without the last one no targets.
        """
        made: dict[StageMessage, Tensor] = {}
        for action in self.schedule.rows[self.rank]:
            if action.kind in MESSAGES:
                message = message_of(action)
                if action.kind in (SEND_F, SEND_B):
                    while not self.road.try_send(message, made[message]):
                        yield action
                    del made[message]
                else:
                    self.road.ask(message)
            elif action.computes:
                given: dict[Action, Tensor | None] = {}
                for single in action.singles:
                    needed = needed_by(single, self.count)
                    given[single] = None
                    if needed is not None:
                        value = made.pop(needed, None)
                        while value is None and (value := self.road.try_receive(needed)) is None:
                            yield action
                        given[single] = value
                for single in action.singles:
                    result = self._compute(single, given[single], inputs, targets, shares)
                    message_made = made_by(single, self.count)
                    if message_made is not None and result is not None:
                        made[message_made] = result
                self.on_computed(action)

    def _compute(
        self,
        action: Action,
        given: Tensor | None,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        shares: Sequence[float],
    ) -> Tensor | None:
        stage, microbatch = self.stages[action.stage], action.microbatch
        if action.kind == FORWARD:
            value = inputs[microbatch] if given is None else given
            made = None
            if action.stage < self.count - 1:
                made = stage.forward(microbatch, value)
            else:
                target, share = targets[microbatch], shares[microbatch]
                self.losses[microbatch] = stage.forward_to_loss(microbatch, value, target, self.loss, share)
            self.peak = max(self.peak, sum(len(one.held) for one in self.stages.values()))
            return made
        if action.kind == BACKWARD:
            return stage.backward(microbatch, given)
        if action.kind == INPUT:
            return stage.backward_input(microbatch, given)
        assert action.kind == WEIGHT
        stage.backward_weight(microbatch)
        return None


def run_in_process(
    schedule: PipelineSchedule,
    stages: Sequence[Stage],
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    share: float,
    *,
    loss: LossSum,
    buffers: int,
) -> tuple[Tensor, tuple[int, ...]]:
    """One minibatch, forward and backward, all ranks in turn. Gradients are in the stages' parameters.

    The loss, and how many microbatches the stages of each rank held at most.

    A `ScheduleError` where all ranks wait.
    """
    road = InMemoryRoad(buffers)
    own: list[dict[int, Stage]] = [{} for _ in schedule.rows]
    for stage, rank in schedule.placement.items():
        own[rank][stage] = stages[stage]
    ranks = [RankExecutor(schedule, rank, mine, road, loss=loss) for rank, mine in enumerate(own)]
    running: dict[int, Iterator[Action]] = {
        number: rank.run(inputs, targets, [share] * schedule.microbatches) for number, rank in enumerate(ranks)
    }
    waits: dict[int, Action] = {}
    while running:
        before = len(running), dict(waits)
        for number in list(running):
            waits[number] = next(running[number], _END)
            if waits[number] is _END:
                del running[number], waits[number]
        if (len(running), waits) == before:
            where = ", ".join(f"rank {number} at '{action}'" for number, action in waits.items())
            raise ScheduleError(f"pipeline '{schedule.name}' is stuck: {where}", step=0, rank=min(waits), grid="")
    losses = ranks[schedule.placement[schedule.stages - 1]].losses
    total = losses[0]
    for microbatch in range(1, schedule.microbatches):
        total = total + losses[microbatch]
    return total, tuple(rank.peak for rank in ranks)


_END = Action(-1, "END")
