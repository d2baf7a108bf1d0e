"""A whole model as stages: cut into copies, with weights that stages share, one norm for clipping, an optimizer each.

`StagedModel` keeps the stages of one process; it trains exactly as the whole model would on the same microbatches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.parallel.microbatches import bounds, split, total_of
from offbeat.parallel.pipeline_executor import run_in_process
from offbeat.parallel.stage import LossSum, Stage
from offbeat.pipelines.actions import PipelineSchedule
from offbeat.pipelines.pipeline_proof import prove


class StagedModel:
    """`pieces` are computed one after the other; each stage gets copies of some of them, in order.

    `weight_of(targets)` says how much a microbatch counts, by its tokens or samples; `loss(outputs, targets)` is the
    sum over them, so that the loss of a minibatch is the sum of all, divided by all that counts.
    """

    def __init__(
        self,
        pieces: Sequence[nn.Module],
        schedule: PipelineSchedule,
        *,
        loss: LossSum,
        weight_of: Callable[[Tensor], float] = len,
        seed: int = 0,
        buffers: int | None = None,
    ) -> None:
        self.schedule, self.loss, self.weight_of = schedule, loss, weight_of
        self.buffers = prove(schedule, buffers=buffers).buffers if buffers is None else buffers
        self.stages = [
            Stage([copy.deepcopy(pieces[place]) for place in places], places, seed=seed)
            for places in bounds(len(pieces), schedule.stages)
        ]
        self.peaks: tuple[int, ...] = ()  # microbatches that each rank held at most
        self._shared = self._find_shared(pieces)

    def _find_shared(self, pieces: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
        """The copies of each parameter that several pieces have. Inside a stage they become one again."""
        copies: dict[int, list[nn.Parameter]] = {}
        for stage in self.stages:
            own: dict[int, nn.Parameter] = {}
            for place, made in zip(stage.places, stage.pieces, strict=True):
                for (name, whole), (_, part) in zip(
                    pieces[place].named_parameters(), made.named_parameters(), strict=True
                ):
                    if id(whole) in own:
                        _set_parameter(made, name, own[id(whole)])
                    else:
                        own[id(whole)] = part
                        copies.setdefault(id(whole), []).append(part)
        return [same for same in copies.values() if len(same) > 1]

    def backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward of a minibatch; its loss. Gradients are added to those that are there."""
        microbatches = self.schedule.microbatches
        wanted = split(targets, microbatches)
        total = total_of([self.weight_of(some) for some in wanted])
        before = {id(one): one.grad for same in self._shared for one in same}
        for same in self._shared:
            for one in same:
                one.grad = None
        loss, self.peaks = run_in_process(
            self.schedule,
            self.stages,
            split(inputs, microbatches),
            wanted,
            1 / total,
            loss=self.loss,
            buffers=self.buffers,
        )
        for same in self._shared:
            found = [one.grad for one in same if one.grad is not None]
            for one in same:
                summed = torch.stack(found).sum(0) if found else None
                old = before[id(one)]
                one.grad = summed if old is None else old if summed is None else old + summed
        for stage in self.stages:
            stage.update += 1
        return loss

    def clip(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over all stages is at most that; the norm before."""
        seen: set[int] = {id(one) for same in self._shared for one in same[1:]}  # a shared weight counts once
        grads = [one.grad for one in self.parameters() if one.grad is not None and id(one) not in seen]
        norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for one in self.parameters():
            if one.grad is not None:
                one.grad.mul_(scale)
        return norm

    def parameters(self) -> Iterable[nn.Parameter]:
        for stage in self.stages:
            yield from stage.parameters

    def optimizers(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        """One for each stage that has something to learn."""
        return [make(stage.parameters) for stage in self.stages if stage.parameters]

    def zero_grad(self) -> None:
        for one in self.parameters():
            one.grad = None

    def state(self) -> list[dict[str, Any]]:
        """Of each piece of the whole model, its state, whatever the stages are."""
        return [dict(piece.state_dict()) for stage in self.stages for piece in stage.pieces]

    def gradients(self) -> list[dict[str, Tensor]]:
        """Of each piece of the whole model, by name."""
        return [
            {name: one.grad for name, one in piece.named_parameters() if one.grad is not None}
            for stage in self.stages
            for piece in stage.pieces
        ]


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, last = name.rpartition(".")
    setattr(module.get_submodule(owner), last, parameter)
