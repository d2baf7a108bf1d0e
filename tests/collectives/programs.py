"""What ranks do in tests: each function is run on every rank of a group, and returns what the test looks at."""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import random
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

import offbeat
import offbeat.errors
from offbeat.collectives.backend import group_of
from offbeat.collectives.counters import Late
from offbeat.collectives.process_group import OffbeatGroup

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FEW = (torch.float32, torch.bfloat16, torch.int64)
SIZES = (0, 1, 2, 3, 5, 16, 63, 1000, 20_011)


def join(
    rank: int,
    ranks: int,
    store: str,
    strategy: str = "auto",
    timeout_s: float = 20,
    **more: Any,
) -> OffbeatGroup:
    initialise(rank, ranks, store, offbeat.Options(strategy=strategy, **more), timeout_s)
    return group_of(None)


def initialise(rank: int, ranks: int, store: str, options: Any, timeout_s: float) -> None:
    dist.init_process_group(
        "offbeat",
        store=FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=timeout_s),
        pg_options=options,
    )


def inputs_of(ranks: int, items: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """The tensors of all ranks; whole numbers so small that no sum or product is rounded."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 3, (items,), generator=generator).to(dtype) for _ in range(ranks)]


ORACLES: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "sum": lambda parts: sum(parts[1:], parts[0]),
    "product": lambda parts: torch.stack(parts).prod(0).to(parts[0].dtype),
    "min": lambda parts: torch.stack(parts).amin(0),
    "max": lambda parts: torch.stack(parts).amax(0),
    "mean": lambda parts: (sum(parts[1:], parts[0]) / len(parts)).to(parts[0].dtype),
}
OPS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "mean": dist.ReduceOp.AVG,
}


@functools.cache
def sums_to_check(
    ranks: int, dtypes: Sequence[torch.dtype] = (*FLOATS, *INTS)
) -> list[tuple[dist.ReduceOp.RedOpType, list[Tensor], Tensor]]:
    """Every dtype, size and reduction: what each rank gives, and what comes of it."""
    made = []
    for dtype, items in itertools.product(dtypes, SIZES):
        for name, op in OPS.items():
            if name != "sum" and items not in (0, 5, 1000):
                continue
            if name == "mean" and not dtype.is_floating_point:
                continue
            parts = inputs_of(ranks, items, dtype, seed=items)
            made.append((op, parts, ORACLES[name](parts)))
    return made


def all_reduces(
    rank: int, ranks: int, store: str, strategy: str, arena_bytes: int = 64 * 1024, few: bool = False
) -> int:
    """All of them, or of a few dtypes, staged in rounds and moved in place, against the plain sum."""
    group = join(rank, ranks, store, strategy, arena_bytes=arena_bytes)
    checked = 0
    for op, parts, expected in sums_to_check(ranks, FEW if few else (*FLOATS, *INTS)):
        kept = parts[rank].clone()
        for _ in range(3):  # the third time it may have been moved
            kept.copy_(parts[rank])
            dist.all_reduce(kept, op=op)
            if not torch.equal(kept, expected):  # a mean may be rounded
                torch.testing.assert_close(kept, expected)
            checked += 1
    assert group.stats().moved > 0
    return checked


def rounded_sums(rank: int, ranks: int, store: str, strategy: str) -> list[str]:
    """Bits of sums that are rounded: staged in one round, in many, moved in place, with a shy rank."""
    bits = []
    for arena_bytes, move in ((1024 * 1024, False), (64 * 1024, False), (64 * 1024, True)):
        join(rank, ranks, f"{store}{arena_bytes}{move}", strategy, arena_bytes=arena_bytes, move=move)
        values = torch.randn(50_001, generator=torch.Generator().manual_seed(rank))
        kept = values.clone()
        for turn in range(4):
            time.sleep(0.001 * ((rank + turn) % ranks))  # who comes first changes
            kept.copy_(values)
            dist.all_reduce(kept)
        bits.append(kept.numpy().tobytes().hex()[:20000])
        dist.destroy_process_group()
    return bits


def shapes(rank: int, ranks: int, store: str) -> None:
    """Tensors of any shape and stride, leaves that need gradients, inference tensors, bool."""
    join(rank, ranks, store)
    total = ranks * (ranks + 1) / 2
    whole = torch.full((6, 8), float(rank + 1))
    dist.all_reduce(whole[1:5:2, ::2])
    assert (whole[1:5:2, ::2] == total).all() and (whole[0] == rank + 1).all() and (whole[1, 1::2] == rank + 1).all()
    turned = torch.full((3, 4), float(rank + 1)).t()
    dist.all_reduce(turned)
    assert (turned == total).all()
    images = torch.full((2, 3, 4, 5), float(rank + 1)).to(memory_format=torch.channels_last)
    dist.all_reduce(images)
    assert (images == total).all()
    scalar = torch.tensor(float(rank + 1))
    dist.all_reduce(scalar)
    assert scalar == total
    leaf = torch.full((5,), float(rank + 1), requires_grad=True)
    dist.all_reduce(leaf)
    assert (leaf == total).all() and leaf.is_leaf
    with torch.inference_mode():
        frozen = torch.full((5,), float(rank + 1))
    dist.all_reduce(frozen)
    assert (frozen == total).all()
    flags = torch.tensor([rank == 0, False, True])
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    assert flags.tolist() == [True, False, True]
    complex_ones = torch.full((4,), 1 + 2j)
    dist.all_reduce(complex_ones)
    assert (complex_ones == ranks * (1 + 2j)).all()
    broadcast = torch.full((4, 4), rank)[:, 1:3]
    dist.broadcast(broadcast, ranks - 1)
    assert (broadcast == ranks - 1).all()
    half = torch.full((3,), float(rank)).to(torch.float8_e4m3fn)
    dist.broadcast(half, 0)
    assert (half.float() == 0).all()


def others(rank: int, ranks: int, store: str, arena_bytes: int) -> None:
    """Everything but all-reduce, small and in rounds, for several types."""
    join(rank, ranks, store, arena_bytes=arena_bytes)
    for dtype, items in itertools.product((torch.float32, torch.bfloat16, torch.int64, torch.bool), (0, 1, 7, 30_001)):
        mine = (torch.arange(items) % 5 + rank).to(dtype)
        of = [(torch.arange(items) % 5 + each).to(dtype) for each in range(ranks)]
        for root in (0, ranks - 1):
            sent = mine.clone()
            dist.broadcast(sent, root)
            assert torch.equal(sent, of[root])
            gathered = [torch.empty_like(mine) for _ in range(ranks)] if rank == root else None
            dist.gather(mine, gathered, root)
            if gathered is not None:
                assert all(torch.equal(one, other) for one, other in zip(gathered, of, strict=True))
            scattered = torch.empty_like(mine)
            dist.scatter(scattered, of if rank == root else None, root)
            assert torch.equal(scattered, mine)
            if dtype != torch.bool:
                summed = mine.clone()
                dist.reduce(summed, root)
                assert torch.equal(summed, sum(of[1:], of[0]) if rank == root else mine)
        gathered = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(gathered, mine)
        assert all(torch.equal(one, other) for one, other in zip(gathered, of, strict=True))
        whole = torch.empty(ranks * items, dtype=dtype)
        dist.all_gather_into_tensor(whole, mine)
        assert torch.equal(whole, torch.cat(of))
        if dtype != torch.bool:
            part = torch.empty_like(mine)
            dist.reduce_scatter(part, [mine + each for each in range(ranks)])
            expected = sum(of[1:], of[0]) + ranks * rank
            assert torch.equal(part, expected.to(dtype))
            part.zero_()
            dist.reduce_scatter_tensor(part, torch.cat([mine + each for each in range(ranks)]))
            assert torch.equal(part, expected.to(dtype))
        out = torch.empty(ranks * items, dtype=dtype)
        dist.all_to_all_single(out, torch.cat([mine] * ranks))
        assert torch.equal(out, torch.cat(of))
    sizes = [rank + to for to in range(ranks)]
    out = torch.empty(sum(rank + source for source in range(ranks)), 2)
    dist.all_to_all_single(out, torch.full((sum(sizes), 2), float(rank)), sizes, sizes)
    assert out[:, 0].tolist() == [float(s) for s in range(ranks) for _ in range(rank + s)]
    outs = [torch.empty(rank + 1) for _ in range(ranks)]
    dist.all_to_all(outs, [torch.full((to + 1,), float(rank)) for to in range(ranks)])
    assert all((one == source).all() for source, one in enumerate(outs))
    uneven = [torch.empty(each + 1) for each in range(ranks)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    assert all((one == each).all() for each, one in enumerate(uneven))
    sparse = torch.sparse_coo_tensor(torch.tensor([[rank, 3]]), torch.tensor([1.0, 2.0]), (8,))
    dist.all_reduce(sparse)
    expected = torch.zeros(8)
    expected[3] += 2.0 * ranks
    expected[:ranks] += 1.0
    assert torch.equal(sparse.to_dense(), expected)
    dist.barrier()


def messages(rank: int, ranks: int, store: str) -> list[int]:
    """Tags in another order, both ways at once, larger than the mailbox, from anybody, empty."""
    join(rank, ranks, store)
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    big = 700_001  # float32: more than two mailboxes
    works = []
    inbox = [torch.empty(big), torch.empty(0), torch.empty(3)]
    for tag, tensor in reversed(list(enumerate(inbox))):
        works.append(dist.irecv(tensor, before, tag=tag))
    outbox = [torch.full((big,), float(rank)), torch.empty(0), torch.full((3,), 10.0 + rank)]
    for tag, tensor in enumerate(outbox):
        works.append(dist.isend(tensor, after, tag=tag))
    for work in works:
        assert work is not None
        work.wait()
    assert (inbox[0] == before).all() and (inbox[2] == 10 + before).all()
    strided = torch.zeros(4, 4)
    work = dist.irecv(strided[:, 1], before)
    dist.send(torch.full((4,), float(rank)), after)
    assert work is not None
    work.wait()
    assert (strided[:, 1] == before).all() and strided.sum() == 4 * before
    sources = []
    if rank == 0:
        for _ in range(2 * (ranks - 1)):
            tensor = torch.empty(5)
            source = dist.recv(tensor)
            assert (tensor == source).all()
            sources.append(source)
    else:
        for _ in range(2):
            dist.send(torch.full((5,), float(rank)), 0)
    dist.barrier()  # or the first receives from anybody could be given these
    ops = [
        dist.P2POp(dist.isend, torch.tensor([rank]), after),
        dist.P2POp(dist.irecv, got := torch.empty(1, dtype=torch.int64), before),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert got.item() == before
    return sorted(sources)


def wrong_size_of_a_message(rank: int, ranks: int, store: str) -> None:
    join(rank, ranks, store)
    if rank == 0:
        dist.send(torch.ones(3), 1)
    else:
        dist.recv(torch.ones(4), 0)


def groups(rank: int, ranks: int, store: str) -> None:
    """Sub-groups, several at once, with calls in flight on each."""
    join(rank, ranks, store)
    evens, odds = (dist.new_group(list(range(start, ranks, 2)), backend="offbeat") for start in (0, 1))
    everybody = dist.new_group(backend="offbeat")
    mine, members = (evens, range(0, ranks, 2)) if rank % 2 == 0 else (odds, range(1, ranks, 2))
    chance = random.Random(7)
    pending = []
    for _ in range(60):
        size = chance.choice([1, 100, 30_000])
        for group, who in ((None, range(ranks)), (mine, members), (everybody, range(ranks))):
            tensor = torch.full((size,), float(rank + 1))
            total = float(sum(each + 1 for each in who))
            pending.append((tensor, total, dist.all_reduce(tensor, group=group, async_op=chance.random() < 0.5)))
        if chance.random() < 0.2:
            for tensor, total, work in pending:
                if work is not None:
                    work.wait()
                assert (tensor == total).all()
            pending.clear()
    sent = torch.full((3,), float(rank))
    dist.broadcast(sent, src=members[-1], group=mine)
    assert (sent == members[-1]).all()
    dist.destroy_process_group(mine)
    dist.all_reduce(sent)


def futures(rank: int, ranks: int, store: str) -> float:
    join(rank, ranks, store)
    tensor = torch.full((1000,), float(rank + 1))
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert (doubled.wait() == ranks * (ranks + 1)).all()
    assert work.is_completed() and work.is_success()
    return float(tensor[0])


def counted(rank: int, ranks: int, store: str, strategy: str, items: int, times: int) -> dict[str, Any]:
    group = join(rank, ranks, store, strategy)
    tensor = torch.ones(items)
    for _ in range(times):
        dist.all_reduce(tensor)
    dist.barrier()  # the others have counted what they read
    stats = offbeat.stats(group)
    return {"received": stats.received, "sent": stats.sent, "calls": stats.calls, "moved": stats.moved}


def ddp_with_a_late_rank(rank: int, ranks: int, store: str, late: int, by_s: float, iterations: int) -> dict[str, Any]:
    join(rank, ranks, store)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)
    if rank == late:
        model[3].register_full_backward_hook(lambda *_: time.sleep(by_s))
    for _ in range(iterations):
        ddp(torch.randn(4, 64)).sum().backward()
    found = offbeat.stats().late
    assert isinstance(found, Late)
    return {"rank": found.rank, "share": found.share, "by_s": found.by_s, "words": str(found)}


def ddp_in_place(rank: int, ranks: int, store: str, options: dict[str, Any]) -> dict[str, Any]:
    """DDP on offbeat and on one process, with buckets that are moved."""
    join(rank, ranks, store)
    results = []
    for distributed in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(96, 96) for _ in range(6)])
        trained = (
            torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.1, **options) if distributed else model
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(1)
        for _ in range(6):
            inputs = torch.randn(ranks, 8, 96, generator=generator, dtype=torch.float32)
            optimizer.zero_grad()
            (trained(inputs[rank]) if distributed else trained(inputs.flatten(0, 1))).square().mean().backward()
            optimizer.step()
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
    return {"moved": offbeat.stats().moved}


def not_moved(rank: int, ranks: int, store: str) -> list[bool]:
    """Which storages end up in shared memory: one that is alone, and those that somebody else can see."""
    import numpy as np

    join(rank, ranks, store)
    array = np.full(10_000, 1.0, np.float32)
    alone, viewed, exported = torch.ones(10_000), torch.ones(10_000), torch.ones(10_000)
    view, numbers, foreign = viewed.view(100, 100), exported.numpy(), torch.from_numpy(array)
    for tensor in (alone, viewed, exported, foreign):
        for _ in range(4):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
            tensor.mul_(2)
    assert (view == 16).all() and (numbers == 16).all() and (array == 16).all() and (alone == 16).all()
    return [tensor.untyped_storage().is_shared() for tensor in (alone, viewed, exported, foreign)]


def memory_returns(rank: int, ranks: int, store: str, times: int) -> list[int]:
    """Buffers that come and go must not pile up: how many are mapped, here and of the peer, after each."""
    group = join(rank, ranks, store)
    mapped = []
    for _ in range(times):
        tensor = torch.ones(100_000)
        for _ in range(3):
            dist.all_reduce(tensor)
        del tensor
        mapped.append(sum(len(side.buffers) for side in group._transport.sides))
    return mapped


def different_calls(rank: int, ranks: int, store: str, case: str) -> None:
    group = join(rank, ranks, store)
    odd = rank == ranks - 1
    if case == "sizes":
        dist.all_reduce(torch.ones(4 if odd else 5))
    elif case == "types":
        dist.all_reduce(torch.ones(4, dtype=torch.float64 if odd else torch.float32))
    elif case == "kinds":
        dist.broadcast(torch.ones(4), 0) if odd else dist.all_reduce(torch.ones(4))
    elif case == "roots":
        dist.broadcast(torch.ones(4), 1 if odd else 0)
    elif case == "schedules":
        group.use("ring" if odd else "tree")
        dist.all_reduce(torch.ones(4))


def joins(rank: int, ranks: int, store: str, strategies: list[str], arenas: list[int] | None = None) -> None:
    more: dict[str, Any] = {"arena_bytes": arenas[rank]} if arenas else {}
    join(rank, ranks, store, strategies[rank], **more)


def changes_strategy(rank: int, ranks: int, store: str, strategies: list[str]) -> list[str]:
    group = join(rank, ranks, store)
    said = []
    for strategy in strategies:
        group.use(strategy)
        tensor = torch.full((1001,), float(rank + 1))
        dist.all_reduce(tensor)
        assert (tensor == ranks * (ranks + 1) / 2).all()
        said.append(group.why(4004))
    return said


def run_script(rank: int, ranks: int, store: str, script: str, words: list[str], port: int) -> None:
    """As a launcher would start it, with torch loaded already."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")
