"""Tensors on a GPU between hosts: every collective against plain sums, and what staging through pinned memory costs.

    python benchmarks/gpu_across_hosts.py [--ranks 2] [--rounds 5]

Every rank is a process that takes itself for a host of its own, on loopback, so that one machine with one GPU is
enough: what it sends goes over TCP, as between machines. A rank without a GPU is tried beside one with it. The exit
code is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offbeat.collectives import rendezvous
from offbeat.network.addresses import Address

SIZES = (1, 1000, 20_011, 12_000_000)  # items; the last is sent in three parts
TIMED_ITEMS = 25_600_000


def own(rank: int, items: int) -> Tensor:
    """Small whole numbers, whose sums are exact."""
    return torch.randint(0, 4, (items,), generator=torch.Generator().manual_seed(rank + 1)).float()


def check(name: str, got: Tensor, expected: Tensor) -> None:
    assert torch.equal(got.cpu(), expected), name


def collectives(rank: int, ranks: int, device: torch.device) -> None:
    for items in SIZES:
        everybodys = [own(peer, items) for peer in range(ranks)]
        total = torch.stack(everybodys).sum(0)
        mine = everybodys[rank].to(device)
        dist.all_reduce(summed := mine.clone())
        check("all_reduce", summed, total)
        work = dist.all_reduce(late := mine.clone(), op=dist.ReduceOp.MAX, async_op=True)
        work.wait()
        check("async all_reduce", late, torch.stack(everybodys).amax(0))
        strided = torch.zeros(items, 2, device=device)[:, 0].copy_(mine)
        dist.all_reduce(strided)
        check("all_reduce of a strided tensor", strided, total)
        dist.broadcast(told := mine.clone(), src=ranks - 1)
        check("broadcast", told, everybodys[-1])
        dist.reduce(reduced := mine.clone(), dst=0)
        check("reduce", reduced, total if rank == 0 else everybodys[rank])
        dist.all_gather_into_tensor(gathered := torch.empty(ranks * items, device=device), mine)
        check("all_gather_into_tensor", gathered, torch.cat(everybodys))
        scattered = torch.empty(items, device=device)
        dist.reduce_scatter_tensor(scattered, mine.repeat(ranks))
        check("reduce_scatter_tensor", scattered, total)
        dist.all_to_all_single(swapped := torch.empty(ranks * items, device=device), mine.repeat(ranks))
        check("all_to_all_single", swapped, torch.cat(everybodys))
        outputs = [torch.empty(items, device=device) for _ in range(ranks)]
        dist.gather(mine, outputs if rank == 0 else None, dst=0)
        if rank == 0:
            check("gather", torch.cat(outputs), torch.cat(everybodys))
        given = [(mine + peer).contiguous() for peer in range(ranks)] if rank == 0 else None
        dist.scatter(part := torch.empty(items, device=device), given, src=0)
        check("scatter", part, everybodys[0] + rank)
        after, before = (rank + 1) % ranks, (rank - 1) % ranks
        sending = dist.isend(mine, after)
        dist.recv(received := torch.empty(items, device=device), before)
        assert sending is not None
        sending.wait()
        check("send and recv", received, everybodys[before])


def data_parallel(rank: int, ranks: int, device: torch.device) -> None:
    """DDP on the GPU, three updates, beside one process with everybody's samples."""

    def train(model: nn.Module, inputs: Tensor) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).double().to(device)

    inputs = torch.randn(ranks * 16, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(device)
    alone, together = build(), build()
    train(alone, inputs)
    train(nn.parallel.DistributedDataParallel(together), inputs[rank * 16 : rank * 16 + 16])
    for one, other in zip(alone.parameters(), together.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-10, rtol=0), "DDP"


def timed(device: torch.device, rounds: int) -> float:
    """Seconds of an all-reduce of 102 MB."""
    values, seconds = torch.ones(TIMED_ITEMS, device=device), []
    for _ in range(rounds + 2):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        dist.all_reduce(values)
        seconds.append(time.perf_counter() - start)
        values.fill_(1)
    return statistics.median(seconds[2:])


def rank_of(rank: int, ranks: int, rounds: int) -> None:
    rendezvous.this_host = lambda: f"host {rank}"
    rendezvous._own_address = lambda *_: Address(address="127.0.0.1")  # which real hosts may not give to each other
    dist.init_process_group("offbeat", init_method="env://", rank=rank, world_size=ranks)
    device = torch.device("cuda")
    collectives(rank, ranks, device)
    data_parallel(rank, ranks, device)
    collectives(rank, ranks, torch.device("cuda" if rank == 0 else "cpu"))
    on_gpu, on_cpu = timed(device, rounds), timed(torch.device("cpu"), rounds)
    if rank == 0:
        print("every collective and DDP on the GPU, and with one rank on the CPU: right")
        print(f"all-reduce of 102 MB: {1e3 * on_gpu:.1f} ms from the GPU, {1e3 * on_cpu:.1f} ms from host memory")
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        rank_of(given.rank, given.ranks, given.rounds)
        return 0
    own = {"OFFBEAT_NETWORK_TRUST": "open", "MASTER_ADDR": "127.0.0.1"}
    environment = {"OFFBEAT_STRATEGY": "ring", "MASTER_PORT": "29581", **os.environ, **own}
    words = [sys.executable, str(Path(__file__).resolve()), "--ranks", str(given.ranks), "--rounds", str(given.rounds)]
    processes = [subprocess.Popen([*words, "--rank", str(rank)], env=environment) for rank in range(given.ranks)]
    return max(abs(process.wait()) for process in processes) and 1


if __name__ == "__main__":
    sys.exit(main())
