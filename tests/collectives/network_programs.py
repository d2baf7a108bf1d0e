"""Ranks of a group on several hosts of a lab: python network_programs.py PROGRAM RANK RANKS ADDRESS."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import offbeat
from offbeat.collectives.backend import group_of
from offbeat.errors import OffbeatError
from offbeat.schedules.algorithms import algorithms
from offbeat.schedules.ir import chunk_sizes

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64,
)  # fmt: skip
SIZES = (0, 1, 3, 17, 257, 4096, 20_011)


def values(rank: int, items: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, whose sum every type holds exactly."""
    made = torch.Generator().manual_seed(rank + 1)
    return torch.randint(0, 4, (items,), generator=made).to(dtype)


def check_sum(rank: int, ranks: int, items: int, dtype: torch.dtype) -> None:
    mine = values(rank, items, dtype)
    dist.all_reduce(mine)
    expected = sum((values(peer, items, dtype).double() for peer in range(ranks)), torch.zeros(items).double())
    assert torch.equal(mine.double(), expected), (group_of(None).stats().strategy, items, dtype)


def same_bits(rank: int, ranks: int, items: int) -> None:
    """Sums of fractions are the same, bit for bit, on all ranks."""
    mine = torch.randn(items, generator=torch.Generator().manual_seed(rank))
    dist.all_reduce(mine)
    all_of_them = [torch.empty(items) for _ in range(ranks)]
    dist.all_gather(all_of_them, mine)
    assert all(torch.equal(one.view(torch.int32), mine.view(torch.int32)) for one in all_of_them)
    given = [torch.randn(items, generator=torch.Generator().manual_seed(peer)).double() for peer in range(ranks)]
    assert torch.allclose(mine.double(), torch.stack(given).sum(0), atol=1e-4)


def check_bytes(rank: int, ranks: int, items: int) -> None:
    """What goes over each connection is what the schedule costs, headers aside."""
    group = group_of(None)
    before = group.stats()
    dist.all_reduce(torch.ones(items))
    after = group.stats()
    schedule = group._choice.of(4 * items).schedule
    sizes = chunk_sizes(items, schedule.chunks)
    for peer in (one for one in range(ranks) if after.hosts[one] != after.hosts[rank]):
        cost = sum(4 * sizes[t.chunk] for step in schedule.steps for t in step if (t.source, t.target) == (rank, peer))
        assert after.sent[peer] - before.sent[peer] == cost, (after.strategy, peer)


def lines_for(ranks: int) -> list[str]:
    lines = [line for row in algorithms().values() for line in row.lines(ranks)]
    return [*lines, "ring:order=" + "-".join(map(str, reversed(range(ranks)))), "hierarchical", "hierarchical:leader"]


def sums(rank: int, ranks: int) -> None:
    """Every all-reduce line."""
    group = group_of(None)
    for line in lines_for(ranks):
        group.use(line)
        for dtype in DTYPES:
            check_sum(rank, ranks, 257, dtype)
        for items in SIZES:
            check_sum(rank, ranks, items, torch.float32)
        same_bits(rank, ranks, 20_011)
        check_bytes(rank, ranks, 20_011)
    for line in ("ring", "hierarchical", "direct"):
        group.use(line)
        same_bits(rank, ranks, 1_250_000)
    print(f"all {len(lines_for(ranks))} lines are right")


def collectives(rank: int, ranks: int) -> None:
    """The others: each with what it must give."""
    one = torch.full((1000,), float(rank))
    dist.broadcast(one, 1)
    assert one.eq(1).all()
    dist.barrier()
    total = torch.full((7,), float(rank + 1))
    dist.reduce(total, 0)
    assert rank != 0 or total.eq(ranks * (ranks + 1) / 2).all()
    everybody = torch.empty(ranks * 5)
    dist.all_gather_into_tensor(everybody, torch.full((5,), float(rank)))
    assert torch.equal(everybody, torch.arange(float(ranks)).repeat_interleave(5))
    part = torch.empty(5)
    dist.reduce_scatter_tensor(part, torch.arange(float(ranks)).repeat_interleave(5))
    assert part.eq(ranks * rank).all()
    out = torch.empty(ranks)
    dist.all_to_all_single(out, torch.arange(float(ranks)) + 10 * rank)
    assert torch.equal(out, 10 * torch.arange(float(ranks)) + rank)
    gathered = [torch.empty(3) for _ in range(ranks)] if rank == ranks - 1 else None
    dist.gather(torch.full((3,), float(rank)), gathered, dst=ranks - 1)
    assert gathered is None or all(one.eq(peer).all() for peer, one in enumerate(gathered))
    mine = torch.empty(2)
    dist.scatter(mine, [torch.full((2,), float(peer)) for peer in range(ranks)] if rank == 0 else None, src=0)
    assert mine.eq(rank).all()
    sub = dist.new_group(list(range(1, ranks)))
    if rank:
        few = torch.ones(10)
        dist.all_reduce(few, group=sub)
        assert few.eq(ranks - 1).all()
    stats = offbeat.stats()
    assert stats.network is not None and stats.network.interface == "eth0", stats
    try:
        dist.send(one, (rank + ranks // 2) % ranks)
    except OffbeatError as error:
        print(error)
    print("all collectives are right")


def reduce_for_ever(rank: int, ranks: int) -> None:
    """All-reduces until somebody fails; says who, and when."""
    tensor = torch.ones(250_000)
    dist.all_reduce(tensor)
    print("started", flush=True)
    since = time.monotonic()
    try:
        while time.monotonic() - since < 60:
            since = time.monotonic()
            dist.all_reduce(tensor.fill_(1.0))
    except OffbeatError as error:
        print(f"failed after {time.monotonic() - since:.2f} s at {time.time():.3f}: {error}", flush=True)
        return
    print("nobody failed")


def other_call(rank: int, ranks: int) -> None:
    """Rank 0 reduces another size than the others."""
    try:
        dist.all_reduce(torch.ones(1000 if rank else 999))
    except OffbeatError as error:
        print(error)


def main() -> None:
    name, rank, ranks, address = sys.argv[1:]
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "offbeat", init_method=f"tcp://{address}:29500", rank=int(rank), world_size=int(ranks),
            timeout=timedelta(seconds=float(os.environ.get("TIMEOUT_S", "60"))),
        )  # fmt: skip
    except OffbeatError as error:
        print(error)
        return
    programs = {one.__name__: one for one in (sums, collectives, reduce_for_ever, other_call)}
    for each in name.split(","):
        programs[each](int(rank), int(ranks))
    if "reduce_for_ever" not in name and "other_call" not in name:
        dist.barrier()  # the store is in rank 0
    dist.destroy_process_group()


main()
