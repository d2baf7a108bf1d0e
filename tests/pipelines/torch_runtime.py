"""Our tables in torch's pipeline runtime: each rank is a forked process; gradients are compared with the whole model's.

    python torch_runtime.py FOLDER ...

FOLDER is named like the number of ranks, and has a CSV file for each schedule. Prints a line for each: the ranks, its
name, and by how much gradients differ at most.
"""

from __future__ import annotations

import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from offbeat.pipelines import PipelineSchedule

WIDTH, SAMPLES = 6, 2


def pieces(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(count)]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def compare(path: Path, rank: int) -> float:
    schedule = PipelineSchedule.from_csv(path.stem, path.read_text(encoding="utf-8"))
    torch.manual_seed(1)
    inputs, targets = torch.randn(2, SAMPLES * schedule.microbatches, WIDTH, dtype=torch.float64)
    whole = nn.Sequential(*pieces(schedule.stages))
    loss_of(whole(inputs), targets).backward()  # type: ignore[no-untyped-call] # torch's own
    cut = pieces(schedule.stages)
    own = [stage for stage, place in schedule.placement.items() if place == rank]
    stages = [PipelineStage(cut[stage], stage, schedule.stages, torch.device("cpu")) for stage in own]
    runtime: Any = _PipelineScheduleRuntime(stages, schedule.microbatches, loss_fn=loss_of)  # type: ignore[no-untyped-call]
    runtime._load_csv(str(path))
    first, last = 0 in own, schedule.stages - 1 in own
    runtime.step(*((inputs,) if first else ()), **({"target": targets} if last else {}))
    worst = 0.0
    for stage in own:
        for one, other in zip(cut[stage].parameters(), whole[stage].parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            worst = max(worst, float((one.grad - other.grad).abs().max() / other.grad.abs().max()))
    return worst


def run(folder: Path, rank: int, ranks: int) -> None:
    store = FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    for path in sorted(folder.glob("*.csv")):
        worst = torch.tensor(compare(path, rank))
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        if rank == 0:
            print(ranks, path.stem, float(worst), flush=True)
    dist.destroy_process_group()


def main(*folders: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for folder in map(Path, folders):
        children = []
        for rank in range(int(folder.name)):
            child = os.fork()
            if child == 0:
                run(folder, rank, int(folder.name))
                sys.stdout.flush()
                os._exit(0)
            children.append(child)
        ended = [os.waitpid(child, 0)[1] for child in children]
        if any(ended):
            sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
