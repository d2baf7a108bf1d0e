"""Where a training's model is cut into stages: its pieces are measured on one microbatch, and the fastest cut is taken.

`plan_stages` is called once, before the learners are started; all of them follow its plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from offbeat.errors import RequestError
from offbeat.number_format import format_seconds, percent
from offbeat.parallel.model_pieces import check_pieces, pieces_of, writes_into_input
from offbeat.parallel.process_road import Boundary
from offbeat.pipelines.actions import PipelineSchedule
from offbeat.pipelines.model_graph import GraphNode, chain
from offbeat.pipelines.partition import CutProblem, StageDevice, best_partition
from offbeat.pipelines.pipeline_cost import StageCosts, price_pipeline
from offbeat.pipelines.pipeline_proof import prove
from offbeat.pipelines.pipeline_table import build_pipeline
from offbeat.spec import count_of
from offbeat.train.config import Config
from offbeat.train.layout import Layout
from offbeat.train.precision import Precision
from offbeat.train.tasks import Task, collate_of

REPEATS, MOST_S = 3, 3.0  # of the measurement: passes over the model, and when no further one is begun


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """`starts[stage]` is the first piece of a stage; `boundaries[stage]` is what it hands on."""

    schedule: PipelineSchedule
    buffers: int
    starts: tuple[int, ...]
    boundaries: tuple[Boundary, ...]
    words: str = ""

    def places(self, pieces: int) -> list[range]:
        """The pieces of each stage."""
        return _ranges(self.starts, pieces)


def schedule_of(layout: Layout) -> PipelineSchedule:
    return build_pipeline(layout.schedule, stages=layout.stages, microbatches=layout.microbatches)


def plan_stages(config: Config, task: Task, model: nn.Module) -> StagePlan:
    """Cut this model, which is measured here and not to be used afterwards."""
    layout = config.layout
    schedule = schedule_of(layout)
    pieces = pieces_of(model)
    if schedule.stages > len(pieces):
        raise RequestError(
            f"parallel: '{schedule.name}' on {count_of(layout.stages, 'rank')} has {schedule.stages} stages, but this "
            f"model can be cut into {len(pieces)} at most"
        )
    samples = min(len(task.train), max(2, math.ceil(config.train.batch_size / layout.microbatches)))  # type: ignore[arg-type] # map-style
    loader: DataLoader[Any] = DataLoader(task.train, batch_size=samples, collate_fn=collate_of(task.train))
    inputs, targets = next(iter(loader))
    precision = Precision(config.train.precision, torch.device("cpu"))
    with precision.computing():
        passed = check_pieces(model, pieces, inputs)
    nodes = _measured(pieces, inputs, targets, task, precision)
    problem = CutProblem(
        graph=chain(config.name, nodes), devices=(StageDevice(),) * schedule.stages, microbatches=layout.microbatches
    )
    parts = best_partition(problem).parts
    starts = tuple(parts.index(stage) for stage in range(schedule.stages))
    boundaries = tuple(_boundary(passed[start - 1], samples) for start in starts[1:])
    proof = prove(schedule)
    costs = StageCosts(
        forward_s=tuple(math.fsum(nodes[at].forward_s for at in own) for own in _ranges(starts, len(nodes))),
        input_s=tuple(math.fsum(nodes[at].backward_s / 2 for at in own) for own in _ranges(starts, len(nodes))),
        weight_s=tuple(math.fsum(nodes[at].backward_s / 2 for at in own) for own in _ranges(starts, len(nodes))),
    )
    price = price_pipeline(schedule, costs)
    held = ", ".join(str(peak) for peak in proof.peak_activations)
    ranks = count_of(layout.stages, "learner")
    words = (
        f"pipeline {schedule.name}: {count_of(schedule.stages, 'stage')} on {ranks}, "
        f"microbatches: {layout.microbatches} of about {count_of(samples, 'sample')}; predicted: "
        f"{format_seconds(price.seconds)} an update, {percent(price.bubble_share)} bubbles, activations of at most "
        f"{held} microbatches, by rank"
    )
    return StagePlan(schedule=schedule, buffers=proof.buffers, starts=starts, boundaries=boundaries, words=words)


def _ranges(starts: Sequence[int], pieces: int) -> list[range]:
    return [range(start, end) for start, end in pairwise((*starts, pieces))]


def _measured(
    pieces: Sequence[nn.Module], inputs: Any, targets: Any, task: Task, precision: Precision
) -> list[GraphNode]:
    """Of each piece the seconds forward and backward, the fastest of a few, and its bytes."""
    began_s = time.monotonic()
    found: list[GraphNode] = []
    for repeat in range(REPEATS):
        if repeat and time.monotonic() - began_s > MOST_S:
            break
        now = _measured_once(pieces, inputs, targets, task, precision)
        found = [
            one._replace(
                forward_s=min(one.forward_s, other.forward_s), backward_s=min(one.backward_s, other.backward_s)
            )
            for one, other in zip(found or now, now, strict=True)
        ]
    return found


def _measured_once(
    pieces: Sequence[nn.Module], inputs: Any, targets: Any, task: Task, precision: Precision
) -> list[GraphNode]:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    weights = {one.untyped_storage()._cdata for piece in pieces for one in piece.parameters()}
    kept: dict[int, Tensor] = {}  # storages that some piece keeps for backward
    learnt: set[int] = set()
    nodes, value = [], inputs
    for at, piece in enumerate(pieces):
        own: dict[int, Tensor] = {}
        keep = partial(_keep, own)
        given = value.detach() if isinstance(value, Tensor) else value
        if at and isinstance(given, Tensor):
            given.requires_grad_()
        began_s = clock()
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one)
        with precision.computing(), hooks:
            value = piece(given.clone() if writes_into_input(piece) else given)
            end = value if at < len(pieces) - 1 else task.loss(value, targets)
        turned_s = clock()
        if isinstance(end, Tensor) and end.requires_grad:
            with precision.differentiating():
                torch.autograd.backward(end, torch.ones_like(end))
        ended_s = clock()
        own = {place: one for place, one in own.items() if place not in weights and place not in kept}
        kept |= own
        new = [one for one in piece.parameters() if one.requires_grad and id(one) not in learnt]
        learnt.update(map(id, new))
        nodes.append(
            GraphNode(
                f"piece {at}",
                turned_s - began_s,
                ended_s - turned_s,
                sum(_bytes(one) for one in new),
                sum(one.untyped_storage().nbytes() for one in own.values()),
                _bytes(value) if isinstance(value, Tensor) else 0,
            )
        )
    for piece in pieces:
        piece.zero_grad(set_to_none=True)
    return nodes


def _keep(found: dict[int, Tensor], one: Tensor) -> Tensor:
    found[one.untyped_storage()._cdata] = one
    return one


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _boundary(value: object, samples: int) -> Boundary:
    if not isinstance(value, Tensor) or not value.is_floating_point() or len(value) != samples:
        raise RequestError(
            "parallel: between two stages of this model there is no tensor of floating-point numbers whose first "
            "dimension is the samples"
        )
    return Boundary(tuple(value.shape[1:]), value.dtype)
