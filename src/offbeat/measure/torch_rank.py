"""What every rank under torch does alike: join its peers, one process group a system, and time a piece of work.

The rendezvous is a TCPStore on a socket that the parent bound to loopback (a plain TCPStore listens everywhere). The
environment that the parent gives tells Gloo to use loopback too.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from offbeat.measure.rank_messages import require
from offbeat_autoload import register


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """This rank among the others, and a process group for each system."""

    rank: int
    ranks: int
    groups: Mapping[str, dist.ProcessGroup]

    def time(self, system: str, iterations: int, work: Callable[[], object]) -> float:
        """Seconds of one `work()`, the mean of so many in a row, begun together."""
        dist.barrier(group=self.groups[system])
        return mean_s(iterations, work)


def mean_s(iterations: int, work: Callable[[], object]) -> float:
    gc.disable()  # one full collection with torch loaded takes 80 ms: it would be chance whom it hits
    start = time.perf_counter()
    for _ in range(iterations):
        work()
    taken = time.perf_counter() - start
    gc.enable()
    return taken / iterations


def join(question: Mapping[str, Any]) -> Peers:
    """Meet the others as the parent's first question says; the first system's group is the default one."""
    require(question, "join")
    register()  # where offbeat is on the path but not installed, `import torch` did not
    torch.set_num_threads(question["threads"])
    rank, ranks, limit = question["rank"], question["ranks"], timedelta(seconds=question["timeout_s"])
    store = TCPStore(
        "127.0.0.1",
        question["port"],
        ranks,
        is_master=rank == 0,
        timeout=limit,
        master_listen_fd=question["listen_fd"] if rank == 0 else None,
    )
    groups: dict[str, dist.ProcessGroup] = {}
    for system, backend in question["backends"].items():
        if groups:
            group = dist.new_group(backend=backend, timeout=limit)
        else:
            dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
            group = dist.group.WORLD
        assert isinstance(group, dist.ProcessGroup)
        groups[system] = group
    return Peers(rank=rank, ranks=ranks, groups=groups)


def part() -> None:
    """Leave in good order."""
    dist.destroy_process_group()
