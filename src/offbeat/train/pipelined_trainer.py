"""Learners in stages of a pipeline: each process has a part of the model, and replicas of a stage share its gradients.

    process      0        1        2        3         --parallel stages=2 --learners 2
    replica      0        0        1        1
    rank         0        1        0        1         of the pipeline

The passes of an update (`sample_plan`) are the microbatches: one learner that accumulates as many computes the same.
Activations and gradients of activations go from rank to rank inside a replica; gradients of weights are summed over
the replicas of a rank, and over the ranks that have the same weight (a transformer's characters, where they are tied).

Laws. Every process builds the whole model once, so that first weights are those of any other layout, and keeps its own
stages. Checkpoints are of the whole model: a run goes on with any number of stages. One norm over all stages is
clipped, from the norms of single parameters as one learner would have them; an update that is not finite is left out by
all. What a microbatch draws at random depends on its place in the epoch and on the piece of the model, not on stages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

from offbeat.collectives.options import Options
from offbeat.parallel.model_pieces import joined, pieces_of
from offbeat.parallel.pipeline_executor import RankExecutor
from offbeat.parallel.process_road import ProcessRoad
from offbeat.parallel.stage import Stage
from offbeat.pipelines.actions import Action
from offbeat.pipelines.pipeline_messages import with_early_receives
from offbeat.processes.watchdog import Phase
from offbeat.train.learner_snapshot import load_optimizer, optimizer_tensors
from offbeat.train.learning_rate import groups_of
from offbeat.train.recompute import twice
from offbeat.train.reduced_trainer import ReducedTrainer
from offbeat.train.sample_plan import Pass, Update
from offbeat.train.stage_plan import StagePlan
from offbeat.train.trainer import size_of

_COMPUTE, _WAIT, _APPLY = 0.0, 1.0, 2.0  # kinds of spans
_ACTION = 16  # from here on: an action of the schedule
SHOWN = 20  # updates of each epoch of which every action is in the log; of the others, what lies between two waits


class PipelinedTrainer(ReducedTrainer):
    """See the module's text."""

    def __init__(self, *given: Any, plan: StagePlan, **named: Any) -> None:
        self.plan = plan
        self._counted = 0
        super().__init__(*given, **named)
        self.names = plan.names(self.learners)
        schedule, first = plan.schedule, self.replica * self.layout.stages
        places = {stage: first + rank for stage, rank in schedule.placement.items()}
        self._first, self._last = 0 in self._stages, schedule.stages - 1 in self._stages
        self._reads = self._first or self._last
        self._road = ProcessRoad(places, plan.boundaries, buffers=plan.buffers)
        early = with_early_receives(schedule)
        self._executor = RankExecutor(
            early, self.rank, self._stages, self._road, loss=self.task.loss, on_computed=self._note_action
        )
        self._actions = sorted({action for _, _, action in schedule.places() if action.computes}, key=str)
        self._kinds = {action: float(_ACTION + place) for place, action in enumerate(self._actions)}
        self._mark_s = 0.0  # up to here all spans of this update are noted
        self._shown, self._epoch = 0, -1  # updates of this epoch whose actions are still to be noted
        self._pipeline, self._replicas_group, self._sharing = self._groups()
        self._loss = 0.0  # of the update, as its last stage found it
        self._model_parts: list[dict[str, Tensor]] = []
        if self.number == 0:
            self.notes.append(plan.words)

    # --- the model ----------------------------------------------------------------------------------------------------

    def build_trained(self) -> nn.Module:
        whole = self._build()
        self._counted = sum(parameter.numel() for parameter in whole.parameters())
        trained = [one for group in groups_of(whole, self.config.train) for one in group["params"]]
        self._number = {id(one): number for number, one in enumerate(trained)}  # of a parameter in a checkpoint
        in_order = [one for one in whole.parameters() if one.requires_grad]
        self._place = {id(one): place for place, one in enumerate(in_order)}  # in which its norm is added
        pieces = pieces_of(whole)
        placement = self.plan.schedule.placement
        places = self.plan.places(len(pieces))
        recompute = twice if self.config.train.recompute else None
        self._stages = {
            stage: Stage(
                [pieces[at] for at in places[stage]],
                places[stage],
                seed=self.config.seed,
                around=self._around,
                recompute=recompute,
            )
            for stage, rank in placement.items()
            if rank == self.rank
        }
        having: dict[int, set[int]] = {}
        for stage, rank in placement.items():
            for at in places[stage]:
                for one in pieces[at].parameters():
                    having.setdefault(id(one), set()).add(rank)
        self._owners = {key: tuple(sorted(ranks)) for key, ranks in having.items()}
        kept = joined(whole, [pieces[at] for stage in self._stages for at in places[stage]])
        kept.train()
        return kept

    def load_trained(self, weights: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict({name: weights[name] for name in self.model.state_dict()})

    def count_parameters(self) -> int:
        return self._counted

    @contextmanager
    def _around(self, given: Tensor) -> Iterator[None]:
        """Each computation of a stage, in the precision of the run; see `loss_of` for minibatches of one sample."""
        alone = self._norms if size_of(given) == 1 else ()
        for norm in alone:
            norm.eval()
        try:
            with self.precision.computing():
                yield
        finally:
            for norm in alone:
                norm.train()

    def _groups(self) -> tuple[Any, Any, list[tuple[Any, list[nn.Parameter]]]]:
        """The ranks of this replica, the replicas of this rank, and with whom weights are shared. All learners make all
        groups, in the same order."""
        stages, replicas = self.layout.stages, self.learners
        options = replace(Options.of_environment(), strategy=self.config.sync)
        mine: dict[str, Any] = {}

        def made(name: str, ranks: list[int]) -> None:
            if len(ranks) > 1:
                group = dist.new_group(ranks, pg_options=options)
                if self.number in ranks:
                    mine[name] = group

        for replica in range(replicas):
            made("pipeline", [replica * stages + rank for rank in range(stages)])
        for rank in range(stages):
            made("replicas", [replica * stages + rank for replica in range(replicas)])
        shared = sorted({ranks for ranks in self._owners.values() if len(ranks) > 1})
        for owners in shared:
            for replica in range(replicas):
                made(f"sharing {owners}", [replica * stages + rank for rank in owners])
        sharing = []
        for owners in shared:
            if self.rank in owners:
                parameters = [one for one in self._in_order() if self._owners[id(one)] == owners]
                sharing.append((mine[f"sharing {owners}"], parameters))
        return mine.get("pipeline"), mine.get("replicas"), sharing

    def _in_order(self) -> list[nn.Parameter]:
        """This learner's parameters, in the order of the whole model's."""
        own = {id(one): one for one in self.model.parameters() if one.requires_grad}
        return sorted(own.values(), key=lambda one: self._number[id(one)])

    # --- an update ----------------------------------------------------------------------------------------------------

    def _update(self, update: Update, batches: list[tuple[Pass, Any]]) -> None:
        began_s = self._mark_s = self._update_s
        version = float(self.at.update)
        if self._epoch != self.at.epoch:
            self._epoch, self._shown = self.at.epoch, SHOWN
        many = self.layout.microbatches
        total, mine, waited_s = 0.0, 0, 0.0
        self.beat(Phase.COMPUTING)
        for start in range(0, len(batches), many):
            for _ in self._minibatch(update, batches[start : start + many]):
                wait_s = time.monotonic()
                self.beat(Phase.WAITING)
                self._road.wait()
                self.beat(Phase.COMPUTING)
                now_s = time.monotonic()
                self._spans += [(_COMPUTE, self._mark_s, wait_s, version)] if self._shown <= 0 else []
                self._spans.append((_WAIT, wait_s, now_s, version))
                self._mark_s, waited_s = now_s, waited_s + now_s - wait_s
            total += sum(map(float, self._executor.losses.values()))
            mine += sum(one.end - one.start for one, _ in batches[start : start + many])
        if self._first:
            self._computed += [one for one, _ in batches]
        computed_s = time.monotonic()
        self.beat(Phase.WAITING)
        self._sum_gradients()
        scale = 1.0 if self.precision.scaler is None else self.precision.scaler.scale
        self._loss = total / scale * update.samples / (self.learners * mine)
        reduced_s = time.monotonic()
        finite = self._step(update)
        ended_s = time.monotonic()
        self.compute_s += computed_s - began_s - waited_s + ended_s - reduced_s
        self.wait_s += waited_s + reduced_s - computed_s
        self._measured.append((computed_s - began_s, mine))
        self._spans += [
            *([(_COMPUTE, self._mark_s, computed_s, version)] if self._shown <= 0 else []),
            (_WAIT, computed_s, reduced_s, version),
            (_APPLY, reduced_s, ended_s, version),
        ]
        self._shown -= 1
        mean = torch.tensor(self._loss)
        self.count(mean, mine)
        if not self._last:
            self.seen -= mine  # samples are told by the last stage
        if finite:
            self.at.applied += update.samples
        else:
            self.at.dropped["not finite"] = self.at.dropped.get("not finite", 0) + update.samples
        self.tell_progress(self.at.update, mean)

    def _note_action(self, action: Action) -> None:
        if self._shown > 0:
            now_s = time.monotonic()
            self._spans.append((self._kinds[action], self._mark_s, now_s, float(self.at.update)))
            self._mark_s = now_s

    def kind_of(self, kind: int) -> tuple[str, str]:
        return super().kind_of(kind) if kind < _ACTION else ("compute", str(self._actions[kind - _ACTION]))

    def _minibatch(self, update: Update, batches: Sequence[tuple[Pass, Any]]) -> Iterator[object]:
        """Forward and backward of all its microbatches; yields where this rank has to wait."""
        scale = 1.0 if self.precision.scaler is None else self.precision.scaler.scale
        sizes = [one.end - one.start for one, _ in batches]
        shares = [size * self.learners / update.samples * scale for size in sizes]
        self._road.samples = sizes
        self._executor.losses.clear()
        for stage in self._stages.values():
            stage.update, stage.numbers = self.at.epoch, [one.start for one, _ in batches]
        inputs = [batch[0] for _, batch in batches] if self._first else []
        targets = [batch[1] for _, batch in batches] if self._last else []
        yield from self._executor.run(inputs, targets, shares)
        yield from self._road.finish()

    def _sum_gradients(self) -> None:
        """Over ranks that share a weight, then over replicas."""
        for group, parameters in self._sharing:
            self._reduce(group, parameters, 1)
        if self._replicas_group is not None:
            self._reduce(self._replicas_group, self._in_order(), self.learners)

    def _reduce(self, group: Any, parameters: Sequence[nn.Parameter], share: int) -> None:
        """One all-reduce of all of them; the sum is divided by `share`."""
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
        flat = torch.cat([one.flatten() for one in gradients])
        flat = flat.div_(share) if share > 1 else flat
        dist.all_reduce(flat, group=group)
        for one, part in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):  # type: ignore[no-untyped-call] # torch's own
            one.grad = part.view_as(one)

    def agree(self, finite: bool) -> bool:
        if self._pipeline is None:
            return finite
        found = torch.tensor([float(not finite)])
        dist.all_reduce(found, group=self._pipeline)
        return not float(found)

    def norm_of(self, gradients: list[Tensor]) -> Tensor:
        """From the norms of all parameters, each told by the first rank that has it, and zeros of the others; all learn
        the loss of the last stage too."""
        norms = torch.zeros(len(self._place) + 1, dtype=self._trained[0].dtype)
        trained = [one for one in self._trained if one.grad is not None]
        for one, norm in zip(trained, torch._foreach_norm(gradients) if gradients else [], strict=True):
            if self._owners[id(one)][0] == self.rank:
                norms[self._place[id(one)]] = norm
        norms[-1] = self._loss if self._last else 0.0
        if self._pipeline is not None:
            dist.all_reduce(norms, group=self._pipeline)
        self._loss = float(norms[-1])
        whole: Tensor = torch.linalg.vector_norm(norms[:-1])
        return whole

    # --- pauses -------------------------------------------------------------------------------------------------------

    def gather_model(self) -> None:
        """The first learner gets what the other ranks of its replica have."""
        if self.replica:
            return
        tensors = {f"weight {name}": tensor for name, tensor in self.model.state_dict().items()}
        own = optimizer_tensors(self.optimizer)
        tensors |= {f"state {name}": tensor for name, tensor in self._renumbered(own, whole=True).items()}
        if self.number:
            data = safetensors.torch.save({name: one.detach().contiguous().clone() for name, one in tensors.items()})
            _send(data, 0)
            return
        self._model_parts = [tensors]
        for rank in range(1, self.layout.stages):
            self._model_parts.append(safetensors.torch.load(_receive(rank)))

    def _renumbered(self, state: Mapping[str, Tensor], *, whole: bool) -> dict[str, Tensor]:
        """The state of an optimizer, with a parameter's number in the whole model instead of its number here, or the
        other way."""
        here = [one for group in self.optimizer.param_groups for one in group["params"]]
        names = {number: self._number[id(one)] for number, one in enumerate(here)}
        names = names if whole else {there: number for number, there in names.items()}
        found = {}
        for key, tensor in state.items():
            number, _, name = key.partition(".")
            if int(number) in names:
                found[f"{names[int(number)]}.{name}"] = tensor
        return found

    def load_optimizer(self, state: Mapping[str, Tensor]) -> None:
        load_optimizer(self.optimizer, self._renumbered(state, whole=False))

    def load_weights(self, twin: nn.Module) -> None:
        before = {} if self.checkpoint is None else self.checkpoint.files["weights"]  # of what no stage computes
        twin.load_state_dict({**before, **self._gathered("weight ")}, strict=False)

    def optimizer_files(self) -> dict[str, dict[str, Tensor]]:
        state = self._gathered("state ")
        self._model_parts = []  # all was read
        return {"optimizer": state}

    def _gathered(self, kind: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(kind): tensor
            for part in self._model_parts
            for name, tensor in part.items()
            if name.startswith(kind)
        }


def _send(data: bytes, to: int) -> None:
    dist.send(torch.tensor([len(data)]), to)
    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), to)


def _receive(source: int) -> bytes:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source)
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(data, source)
    return data.numpy().tobytes()
