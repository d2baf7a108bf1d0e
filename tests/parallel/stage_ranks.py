"""Ranks of pipelines as processes, on one host or several, each compared with one process that has the whole model.

    python -m parallel.stage_ranks NAMES RANKS FILE              all ranks, forked from here
    python -m parallel.stage_ranks NAMES RANKS ADDRESS RANK      one of them; the first is on the host of this address

NAMES are combinations like zb-v/transformer, with commas between them. Prints a line for each and precision: by how
much gradients differ after one minibatch, relative to the largest, and weights after 20 updates with clipping,
momentum and a learning-rate schedule.
"""

from __future__ import annotations

import copy
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore

import offbeat
from offbeat.parallel.microbatches import bounds, split
from offbeat.parallel.pipeline_executor import RankExecutor
from offbeat.parallel.process_road import Boundary, ProcessRoad
from offbeat.parallel.stage import Stage
from offbeat.pipelines import build, prove
from offbeat.pipelines.pipeline_messages import with_early_receives
from parallel.cases import MICROBATCHES, Case, case_of, whole_backward

UPDATES = 20
PRECISIONS = (torch.float32, torch.float64)
CLIPPED = 0.05


class StageRank:
    """The stages of one rank."""

    def __init__(self, case: Case, line: str, rank: int, ranks: int) -> None:
        schedule = build(line, stages=ranks, microbatches=MICROBATCHES)
        parts = bounds(len(case.pieces), schedule.stages)
        self.pieces = copy.deepcopy(nn.ModuleList(case.pieces))  # of these, some are this rank's
        self.places = [at for stage, places in enumerate(parts) if schedule.placement[stage] == rank for at in places]
        self.stages = {
            stage: Stage([self.pieces[at] for at in parts[stage]], parts[stage])
            for stage, owner in schedule.placement.items()
            if owner == rank
        }
        self.case, self.rank = case, rank
        self.inputs, self.targets = split(case.inputs, MICROBATCHES), split(case.targets, MICROBATCHES)
        passed = boundaries_of(case)
        between = [passed[places[0] - 1] for places in parts[1:]]
        proof = prove(schedule)
        self.proven_peak = proof.peak_activations[rank]
        self.road = ProcessRoad(schedule.placement, between, buffers=proof.buffers)
        self.road.samples = [len(some) for some in self.inputs]
        early = with_early_receives(schedule)
        self.executor = RankExecutor(early, rank, self.stages, self.road, loss=case.loss)
        owners: dict[int, set[int]] = {}
        for stage, places in enumerate(parts):
            for at in places:
                for one in self.pieces[at].parameters():
                    owners.setdefault(id(one), set()).add(schedule.placement[stage])
        everything = list(self.pieces.parameters())
        self.shared = [one for one in everything if len(owners[id(one)]) > 1]
        self.own = [one for one in everything if rank in owners[id(one)]]
        self.counted = [one for one in self.own if min(owners[id(one)]) == rank]  # in the norm

    def backward(self, update: int) -> None:
        for stage in self.stages.values():
            stage.update = update
        shares = [1 / self.case.weight_of(self.case.targets)] * MICROBATCHES
        for _ in self.executor.run(self.inputs, self.targets, shares):
            self.road.wait()
        for _ in self.road.finish():
            self.road.wait()
        for one in self.shared:
            one.grad = torch.zeros_like(one) if one.grad is None else one.grad
            dist.all_reduce(one.grad)

    def clip(self) -> None:
        squares = torch.stack([one.grad.square().sum() for one in self.counted if one.grad is not None]).sum()
        dist.all_reduce(squares)
        scale = torch.clamp(CLIPPED / (squares.sqrt() + 1e-6), max=1.0)
        for one in self.own:
            if one.grad is not None:
                one.grad.mul_(scale)


def boundaries_of(case: Case) -> list[Boundary]:
    value, found = case.inputs[:2], []
    for piece in copy.deepcopy(case.pieces):
        value = piece(value)
        found.append(Boundary(tuple(value.shape[1:]), value.dtype))
    return found


def difference(
    places: list[int], pieces: nn.ModuleList, take: Callable[[nn.Module], list[Tensor]], whole: list[list[Tensor]]
) -> float:
    """Of what is taken from the pieces at these places; relative to the largest of the whole model."""
    largest = max(float(one.abs().max()) for some in whole for one in some)
    pairs = [pair for at in places for pair in zip(take(pieces[at]), whole[at], strict=True)]
    return max(float((one - other).abs().max()) for one, other in pairs) / largest


def optimizer_of(parameters: list[nn.Parameter]) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.StepLR]:
    made = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
    return made, torch.optim.lr_scheduler.StepLR(made, step_size=5, gamma=0.5)


@cache
def train_whole(name: str, dtype: torch.dtype) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """In one process: of each piece the gradients of the first minibatch, and the state at the end."""
    case = case_of(name, dtype)
    whole = nn.ModuleList(case.pieces)
    optimizer, rate = optimizer_of(list(whole.parameters()))
    gradients: list[list[Tensor]] = []
    for update in range(UPDATES):
        optimizer.zero_grad()
        whole_backward(case, list(whole), update)
        gradients = gradients or [gradients_of(piece) for piece in whole]
        nn.utils.clip_grad_norm_(whole.parameters(), CLIPPED)
        optimizer.step()
        rate.step()
    return gradients, [state_of(piece) for piece in whole]


def gradients_of(piece: nn.Module) -> list[Tensor]:
    found = [one.grad for one in piece.parameters()]
    return [one.clone() for one in found if one is not None]


def state_of(piece: nn.Module) -> list[Tensor]:
    return [one for one in piece.state_dict().values() if one.is_floating_point()]


def compare(line: str, name: str, rank: int, ranks: int, dtype: torch.dtype) -> tuple[float, float]:
    """Of gradients and of weights, the worst of all ranks."""
    mine = StageRank(case_of(name, dtype), line, rank, ranks)
    gradients, states = train_whole(name, dtype)
    optimizer, rate = optimizer_of(mine.own)
    differs = 0.0
    for update in range(UPDATES):
        mine.pieces.zero_grad()
        mine.backward(update)
        if not update:
            differs = difference(mine.places, mine.pieces, gradients_of, gradients)
        mine.clip()
        optimizer.step()
        rate.step()
    assert mine.executor.peak == mine.proven_peak
    worst = torch.tensor([differs, difference(mine.places, mine.pieces, state_of, states)], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst[0]), float(worst[1])


def compare_all(names: str, rank: int, ranks: int) -> None:
    for each in names.split(","):
        line, _, name = each.partition("/")
        for dtype in PRECISIONS:
            gradients, weights = compare(line, name, rank, ranks, dtype)
            if rank == 0:
                print(each, ranks, str(dtype).partition(".")[2], gradients, weights, flush=True)


def join(names: str, ranks: int, address: str, rank: int) -> None:
    torch.set_num_threads(1)
    at = {"store": FileStore(address, ranks)} if "/" in address else {"init_method": f"tcp://{address}:29500"}
    dist.init_process_group(
        "offbeat",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
        pg_options=offbeat.Options(strategy="ring"),
        **at,
    )
    compare_all(names, rank, ranks)
    dist.barrier()  # the store is in rank 0
    dist.destroy_process_group()


def main(names: str, ranks: str, address: str, rank: str = "") -> None:
    if rank:
        join(names, int(ranks), address, int(rank))
        return
    torch.set_num_threads(1)
    for each in names.split(","):
        for dtype in PRECISIONS:
            train_whole(each.partition("/")[2], dtype)  # once, for all ranks
    children = []
    for rank_here in range(int(ranks)):
        child = os.fork()
        if child == 0:
            try:
                join(names, int(ranks), address, rank_here)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        children.append(child)
    ended = [os.waitpid(child, 0)[1] for child in children]
    if any(ended):
        sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
