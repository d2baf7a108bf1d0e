"""An ordinary DDP script on the backend "offbeat", which names the slow rank.

    python ddp.py                              # starts two ranks of itself
    OFFBEAT_STRATEGY=ring torchrun --nproc-per-node 4 ddp.py

One of the ranks is slow. DDP alone hides which: all of them seem to wait. The backend names it.
"""

from __future__ import annotations

import os
import socket
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import offbeat


def train() -> None:
    dist.init_process_group("offbeat")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if rank == ranks - 1:
        model[2].register_full_backward_hook(lambda *_: time.sleep(0.02))  # a machine that is slower than the others
    generator = torch.Generator().manual_seed(rank)
    for _ in range(20):
        inputs = torch.randn(32, 64, generator=generator)
        targets = inputs[:, :10].argmax(1)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(ddp(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call] # torch's
        optimizer.step()
    stats = offbeat.stats()
    if rank == 0:
        print(f"{stats.strategy}: {stats.calls} calls, {stats.received_bytes} bytes read from the others")
        print(stats.late)
    dist.destroy_process_group()


def start_ranks(ranks: int) -> None:
    """What `torchrun --nproc-per-node 2` does, with a rendezvous on loopback."""
    from torch.distributed.run import main

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    main(["--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1", "--master-port", str(port), __file__])


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        start_ranks(2)
        sys.exit(0)
