"""Where a training's model is cut into stages: its pieces are measured on one microbatch, and the fastest cut is taken.

measured = measure_pieces(config, task, model)      once, before the learners are started
plan = plan_stages(config, measured, room_bytes)    all of them follow it
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from offbeat.errors import RequestError
from offbeat.machine import forked_bytes
from offbeat.number_format import format_seconds, percent
from offbeat.parallel.model_pieces import check_pieces, pieces_of, writes_into_input
from offbeat.parallel.process_road import Boundary
from offbeat.parallel.split_backward import backward_inputs, backward_weights
from offbeat.pipelines.actions import INPUT, PipelineSchedule
from offbeat.pipelines.model_graph import GraphNode, chain, merged
from offbeat.pipelines.partition import CutProblem, StageDevice, best_partition
from offbeat.pipelines.pipeline_cost import StageCosts, price_pipeline
from offbeat.pipelines.pipeline_proof import prove
from offbeat.pipelines.pipeline_table import PIPELINES, build_pipeline
from offbeat.spec import count_of
from offbeat.train.config import Config, TrainConfig
from offbeat.train.device_step import leaves_of
from offbeat.train.layout import AUTO, process_names
from offbeat.train.learning_rate import STATES, optimizer_of, step_of
from offbeat.train.precision import Precision
from offbeat.train.recompute import recompute_blocks
from offbeat.train.tasks import Task, collate_of

REPEATS, MOST_S = 3, 3.0  # of the measurement: passes over the model, and when no further one is begun
MOST_MEASURED = 64  # samples


class MeasuredPieces(NamedTuple):
    """The pieces of a model, measured on so many samples, and what lies behind each: None where it cannot be sent."""

    nodes: tuple[GraphNode, ...]
    boundaries: tuple[Boundary | None, ...]
    samples: int
    sample_bytes: float = 0.0  # of a sample as it is read
    base_bytes: int = 0  # that a fork of the process has, before it was measured
    update_s: tuple[float, ...] = ()  # of each piece: its part of a step of the optimizer
    blocks: int = 0  # that `train.recompute` computes again one by one, without a pipeline; 0: it cannot

    def scaled(self, samples: float) -> MeasuredPieces:
        """As if measured on so many: seconds and activations grow with them, weights do not."""
        factor = samples / self.samples
        nodes = (
            GraphNode(
                one.name,
                one.forward_s * factor,
                one.backward_s * factor,
                one.parameter_bytes,
                int(one.kept_bytes * factor),
                int(one.output_bytes * factor),
                one.input_s * factor,
                one.weight_s * factor,
            )
            for one in self.nodes
        )
        return self._replace(nodes=tuple(nodes), samples=max(1, round(samples)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """`starts[stage]` is the first piece of a stage; `boundaries[stage]` is what it hands on.

    `seconds` of an update, and `need_bytes` of each rank beside what a process has before it trains, are predicted.
    """

    schedule: PipelineSchedule
    buffers: int
    starts: tuple[int, ...]
    boundaries: tuple[Boundary, ...]
    seconds: float
    need_bytes: tuple[int, ...]
    words: str = ""

    def names(self, learners: int) -> tuple[str, ...]:
        """What the processes of so many replicas are called."""
        return process_names(learners, self.schedule.placement)

    def places(self, pieces: int) -> list[range]:
        """The pieces of each stage."""
        return _ranges(self.starts, pieces)


def measure_pieces(config: Config, task: Task, build: Callable[[], nn.Module]) -> MeasuredPieces:
    """On samples of one microbatch."""
    base = forked_bytes() or 0
    model = build()
    try:
        parts: list[nn.Module] = list(pieces_of(model))
    except RequestError:
        if config.parallel:
            raise
        parts = [model]  # it is not to be cut, only its memory is asked for
    wanted = math.ceil(config.train.batch_size / config.layout.microbatches)
    most = len(task.train)  # type: ignore[arg-type] # a map-style set has a length
    samples = min(most, MOST_MEASURED, max(2, wanted))
    inputs, targets = _batch(task, samples)
    read = sum(_bytes(one) for one in leaves_of((inputs, targets)))
    precision = Precision(config.train.precision, torch.device("cpu"))
    with precision.computing():
        boundaries = _boundaries(
            model, parts, inputs, _batch(task, samples + 1 if samples < most else max(1, samples - 1))[0]
        )
    nodes = _measured(parts, inputs, targets, task, precision, apart=_splits_backward(config))
    update_s = tuple(_update_s(part, config.train) for part in parts) if config.parallel else ()
    try:
        blocks = recompute_blocks(model)
    except RequestError:
        blocks = 0
    return MeasuredPieces(tuple(nodes), tuple(boundaries), samples, read / samples, base, update_s, blocks).scaled(
        wanted
    )


def plan_stages(config: Config, measured: MeasuredPieces, room_bytes: float = math.inf) -> StagePlan:
    """Where to cut. With schedule=auto the fastest schedule that leaves each learner in `room_bytes`, else the one that
    needs the least; a `RequestError` where the model has too few pieces.
    """
    layout = config.layout
    lines = [layout.schedule] if layout.schedule != AUTO else [line for row in PIPELINES.values() for line in row.lines]
    plans, refused = [], None
    for line in lines:
        try:
            schedule = build_pipeline(line, stages=layout.stages, microbatches=layout.microbatches)
            plans.append(_plan(config, schedule, measured, room_bytes))
        except RequestError as error:
            refused = refused or error
    if not plans:
        raise refused or RequestError("parallel: there is no schedule")
    fits = [plan for plan in plans if max(plan.need_bytes) <= room_bytes]
    if fits:
        return min(fits, key=lambda plan: plan.seconds)
    return min(plans, key=lambda plan: max(plan.need_bytes))


def _plan(config: Config, schedule: PipelineSchedule, measured: MeasuredPieces, room_bytes: float) -> StagePlan:
    layout, nodes = config.layout, measured.nodes
    most = len(_blocks(measured))
    if schedule.stages > most:
        why = (
            ""
            if most == len(nodes)
            else ": what crosses a cut is one tensor of floats whose first dimension is the samples"
        )
        raise RequestError(
            f"parallel: '{schedule.name}' on {count_of(layout.stages, 'rank')} has {schedule.stages} stages, but this "
            f"model can be cut into {most} at most{why}"
        )
    state = state_vectors(config.train)
    parts = _cut(config, schedule, measured, room_bytes, state)
    starts = tuple(parts.index(stage) for stage in range(schedule.stages))
    boundaries = [measured.boundaries[start - 1] for start in starts[1:]]
    own = _ranges(starts, len(nodes))
    computed = [_recomputed(node) for node in nodes] if config.train.recompute else nodes
    price, proof = price_pipeline(schedule, StageCosts.of(computed, parts)), prove(schedule)
    updates = [0.0] * schedule.ranks
    for part, update_s in zip(parts, measured.update_s, strict=False):
        updates[schedule.placement[part]] += update_s
    seconds = price.seconds + max(updates)
    ends = (schedule.placement[0], schedule.placement[schedule.stages - 1])  # who reads samples
    held = ", ".join(str(peak) for peak in proof.peak_activations)
    words = (
        f"pipeline {schedule.name}: {count_of(schedule.stages, 'stage')} on {count_of(layout.stages, 'rank')}, "
        f"{layout.microbatches} microbatches of about {count_of(measured.samples, 'sample')}; predicted: "
        f"{format_seconds(seconds)} per update, {percent(price.bubble_share)} bubbles, activations of at most "
        f"{held} microbatches by rank"
    )
    return StagePlan(
        schedule=schedule,
        buffers=proof.buffers,
        starts=starts,
        boundaries=tuple(one for one in boundaries if one is not None),
        seconds=seconds,
        need_bytes=tuple(
            rank_need(
                measured,
                [own[stage] for stage, place in schedule.placement.items() if place == rank],
                held=proof.peak_activations[rank],
                state=state,
                recompute=config.train.recompute,
                leads=rank == 0,
                data_bytes=data_bytes(config, measured) if rank in ends else 0,
            )
            for rank in range(schedule.ranks)
        ),
        words=words,
    )


def _cut(
    config: Config, schedule: PipelineSchedule, measured: MeasuredPieces, room_bytes: float, state: int
) -> tuple[int, ...]:
    """The stage of each piece: the fastest cut inside the memory, or, where none is, the fastest."""

    blocks = _blocks(measured)

    def best(memory_bytes: float) -> tuple[int, ...]:
        problem = CutProblem(
            graph=chain(config.name, [merged(measured.nodes[at] for at in block) for block in blocks]),
            devices=(StageDevice(memory_bytes=memory_bytes),) * schedule.stages,
            microbatches=schedule.microbatches,
            state=state,
        )
        parts = best_partition(problem).parts
        return tuple(part for part, block in zip(parts, blocks, strict=True) for _ in block)

    try:
        return best(max(1.0, room_bytes))
    except RequestError:
        return best(math.inf)


def rank_need(
    measured: MeasuredPieces,
    stages: Sequence[Sequence[int]],
    *,
    held: int,
    state: int,
    recompute: bool,
    leads: bool,
    data_bytes: int,
) -> int:
    """Bytes that a rank with these stages (numbers of pieces) needs: weights, gradients and optimizer, activations of
    `held` microbatches in one of its stages, and gradients of the activations at hand. The learner that leads has the
    model that is evaluated too, and a checkpoint while that is written.
    """
    nodes = measured.nodes
    weights = sum(nodes[at].parameter_bytes for pieces in stages for at in pieces)
    kept = sum(nodes[at].kept_bytes for pieces in stages for at in pieces)
    given = sum(nodes[pieces[0] - 1].output_bytes for pieces in stages if pieces[0])
    each = held / len(stages)
    before = (each - 1) * (given + (0 if recompute else kept))  # of the microbatches that wait for backward
    now, peak = given, 0
    for pieces in stages:
        for at in pieces:
            now += nodes[at].kept_bytes
            peak = max(peak, now + 2 * nodes[at].output_bytes)  # backward has come to here: later ones are free again
    whole = sum(node.parameter_bytes for node in nodes)
    return int(state * weights + before + peak + (state * whole if leads else 0)) + data_bytes


def data_bytes(config: Config, measured: MeasuredPieces) -> int:
    """Samples of an update, and of the one before, which are given back when these have been read."""
    train = config.train
    return int(2 * measured.sample_bytes * train.batch_size * train.accumulate)


def state_vectors(train: TrainConfig) -> int:
    """Bytes that a learner holds for a byte of weights: themselves, their gradients, the optimizer's state."""
    return 2 + STATES.get(train.optimizer, 1 if train.momentum else 0)


def _blocks(measured: MeasuredPieces) -> list[range]:
    """The pieces between two places at which the model can be cut."""
    ends = [at + 1 for at, boundary in enumerate(measured.boundaries) if boundary is not None]
    return _ranges((0, *ends), len(measured.nodes))


def _batch(task: Task, samples: int) -> Any:
    loader: DataLoader[Any] = DataLoader(task.train, batch_size=samples, collate_fn=collate_of(task.train))
    return next(iter(loader))


def _boundaries(model: nn.Module, pieces: Sequence[nn.Module], inputs: Any, others: Any) -> list[Boundary | None]:
    """What lies behind each piece; of `others` there are more samples, or fewer. None also between pieces that change
    the same buffer, such as statistics of a batch norm: stages would each have their own.
    """
    users: dict[int, list[int]] = {}
    for at, piece in enumerate(pieces):
        for one in piece.buffers():
            users.setdefault(id(one), []).append(at)
    shared = {id(one): one for piece in pieces for one in piece.buffers() if len(users[id(one)]) > 1}
    before = {key: one.clone() for key, one in shared.items()}
    passed = check_pieces(model, pieces, inputs)
    found = [_boundary(*pair) for pair in zip(passed, check_pieces(model, pieces, others), strict=True)]
    for key, one in shared.items():
        if not torch.equal(one, before[key]):
            for at in range(users[key][0], users[key][-1]):
                found[at] = None
    return found


def _boundary(value: object, other: object) -> Boundary | None:
    """Of what a piece has made of two numbers of samples."""
    if not isinstance(value, Tensor) or not isinstance(other, Tensor) or not value.is_floating_point():
        return None
    if not value.dim() or len(value) == len(other) or value.shape[1:] != other.shape[1:]:
        return None
    return Boundary(tuple(value.shape[1:]), value.dtype)


def _ranges(starts: Sequence[int], pieces: int) -> list[range]:
    return [range(start, end) for start, end in pairwise((*starts, pieces))]


def _splits_backward(config: Config) -> bool:
    """Whether some backward passes are computed in two halves."""
    layout = config.layout
    if not config.parallel or layout.schedule == AUTO:
        return bool(config.parallel)
    schedule = build_pipeline(layout.schedule, stages=layout.stages, microbatches=layout.microbatches)
    return any(single.kind == INPUT for _, _, action in schedule.places() for single in action.singles)


def _recomputed(node: GraphNode) -> GraphNode:
    """With `train.recompute`: the forward pass is computed again, and both halves of a backward pass in the first."""
    both_s = node.forward_s + node.backward_s
    return node._replace(backward_s=both_s, input_s=both_s, weight_s=0.0)


def _update_s(piece: nn.Module, train: TrainConfig) -> float:
    """Of a piece of which the weights may be changed: the norm of its gradients, and the second step."""
    own = [one for one in piece.parameters() if one.requires_grad]
    if not own:
        return 0.0
    for one in own:
        one.grad = torch.zeros_like(one)
    step = step_of(optimizer_of(piece, train), torch.device("cpu"))
    step()
    began_s = _clock()
    torch._foreach_norm([one.grad for one in own if one.grad is not None])
    step()
    ended_s = _clock()
    piece.zero_grad(set_to_none=True)
    return ended_s - began_s


def _clock() -> float:
    """With one thread its own time is taken: what else the machine does is left out."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def _measured(
    pieces: Sequence[nn.Module], inputs: Any, targets: Any, task: Task, precision: Precision, *, apart: bool
) -> list[GraphNode]:
    """Of each piece the seconds forward and backward, the fastest of a few, and its bytes. `apart`: the two halves of a
    backward pass too."""
    began_s = time.monotonic()
    found: list[GraphNode] = []
    for repeat in range(REPEATS):
        if repeat and time.monotonic() - began_s > MOST_S:
            break
        now = _measured_once(pieces, inputs, targets, task, precision, apart=apart)
        found = [
            one._replace(
                forward_s=min(one.forward_s, other.forward_s),
                backward_s=min(one.backward_s, other.backward_s),
                input_s=min(one.input_s, other.input_s),
                weight_s=min(one.weight_s, other.weight_s),
            )
            for one, other in zip(found or now, now, strict=True)
        ]
    return found


def _measured_once(
    pieces: Sequence[nn.Module], inputs: Any, targets: Any, task: Task, precision: Precision, *, apart: bool
) -> list[GraphNode]:
    for one in {id(one): one for piece in pieces for one in piece.parameters() if one.requires_grad}.values():
        one.grad = torch.zeros_like(one)  # microbatches add to what is there
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
        began_s = _clock()
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one)
        with precision.computing(), hooks:
            value = piece(given.clone() if writes_into_input(piece) else given)
            end = value if at < len(pieces) - 1 else task.loss(value, targets)
        turned_s = _clock()
        if isinstance(end, Tensor) and end.requires_grad:
            with precision.differentiating():
                torch.autograd.backward(end, torch.ones_like(end))
        ended_s = _clock()
        halves = (0.0, 0.0)
        if apart and at and isinstance(end, Tensor) and end.requires_grad:
            with precision.computing():
                again = piece(given.clone() if writes_into_input(piece) else given)
                again = again if at < len(pieces) - 1 else task.loss(again, targets)
            halves = _halves_s(again, given, precision)
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
                *halves,
            )
        )
    for piece in pieces:
        piece.zero_grad(set_to_none=True)
    return nodes


def _halves_s(made: Tensor, given: Tensor, precision: Precision) -> tuple[float, float]:
    began_s = _clock()
    with precision.differentiating():
        _, parts = backward_inputs(made, given, None)
        turned_s = _clock()
        backward_weights(parts)
    return turned_s - began_s, _clock() - turned_s


def _keep(found: dict[int, Tensor], one: Tensor) -> Tensor:
    found[one.untyped_storage()._cdata] = one
    return one


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
