"""What ranks do in tests of coded all-reduces; each function is run on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from collectives.programs import join
from offbeat import codecs
from offbeat.collectives.peer_exchange import PeerExchange
from offbeat.collectives.process_group import OffbeatGroup
from offbeat.schedules import build, price
from offbeat.topology import Link, Topology, edge_name

ITEMS = 40_011  # more than 64 KiB, and no multiple of anything


def gradient(rank: int, step: int, items: int = ITEMS) -> Tensor:
    chance = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(items, generator=chance)


def bits(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def check_coded(group: OffbeatGroup, rank: int, ranks: int, line: str, steps: int, hosts: Sequence[int]) -> list[str]:
    """So many all-reduces of one tensor: the bits of each; what all got and what all kept is what all gave."""
    group.use(line)
    codec = codecs.split_place(line.partition("codec=")[2])[0]
    mine, given, got = torch.empty(ITEMS), torch.zeros(ITEMS).double(), torch.zeros(ITEMS).double()
    found = []
    for step in range(steps):
        mine.copy_(gradient(rank, step))
        before = group.stats()
        dist.all_reduce(mine)
        after = group.stats()
        check_bytes(line, before, after, ranks, hosts)
        found.append(bits(mine))
        got += mine.double()
        for peer in range(ranks):
            given += gradient(peer, step).double()
    kept = group.residuals.of(mine).residual
    residual = torch.zeros(ITEMS).double() if kept is None else kept[:ITEMS].double()
    group.use("direct")
    dist.all_reduce(residual)
    if codec.biased:
        off = float((got + residual - given).abs().max())
        assert off < 2e-5 * ranks * steps, (line, off)
    else:
        assert float((got - given).abs().mean()) < 0.3 * ranks * steps, line
    return found


def check_bytes(line: str, before: Any, after: Any, ranks: int, hosts: Sequence[int]) -> None:
    """What a rank read from and sent to each other is what the schedule costs."""
    pairs = [(one, other) for one in range(ranks) for other in range(ranks) if one != other]
    mesh = Topology(name="mesh", ranks=ranks, links=dict.fromkeys(pairs, Link(0.0, 1e9)))
    cost = price(build(line, ranks=ranks, hosts=hosts), mesh, 4 * ITEMS).bytes_per_link
    for peer in range(ranks):
        if peer != after.rank:
            got = after.received[peer] - before.received[peer]
            assert got == cost.get(edge_name((peer, after.rank)), 0), (line, peer, got)


def coded_sums(
    rank: int, ranks: int, store: str, lines: list[str], steps: int, arena_bytes: int
) -> dict[str, list[str]]:
    group = join(rank, ranks, store, "direct", arena_bytes=arena_bytes)
    return {line: check_coded(group, rank, ranks, line, steps, [0] * ranks) for line in lines}


def uncoded_calls(rank: int, ranks: int, store: str) -> None:
    """Small tensors, whole numbers, other reductions and other types go as they are."""
    group = join(rank, ranks, store, "ring:codec=int4")
    third = torch.full((100,), 1 / 3)
    dist.all_reduce(third)
    assert torch.equal(third, torch.full((100,), 1 / 3) * ranks) or ranks > 2
    whole = torch.arange(50_000)
    dist.all_reduce(whole)
    assert torch.equal(whole, ranks * torch.arange(50_000))
    largest = torch.randn(50_000, generator=torch.Generator().manual_seed(rank))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    every = [torch.randn(50_000, generator=torch.Generator().manual_seed(peer)) for peer in range(ranks)]
    assert torch.equal(largest, torch.stack(every).amax(0))
    double = torch.full((50_000,), 1 / 3, dtype=torch.float64)
    dist.all_reduce(double)
    assert torch.allclose(double, torch.full((50_000,), ranks / 3, dtype=torch.float64), rtol=1e-15)
    assert not group.residuals.state()
    mean = torch.full((50_000,), float(rank))
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert abs(float(mean[7]) - (ranks - 1) / 2) < 0.3 and group.residuals.state()


def coded_ddp(rank: int, ranks: int, store: str, line: str) -> tuple[str, float, float]:
    """DDP on a small regression: the weights after 100 steps, the first loss and the last."""
    join(rank, ranks, store, line)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 64)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    chance = torch.Generator().manual_seed(5)
    inputs, wanted = torch.randn(64, 32, generator=chance), torch.randn(64, 64, generator=chance)
    inputs, wanted = inputs[rank::ranks], wanted[rank::ranks]
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = (model(inputs) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return bits(torch.cat([p.detach().flatten() for p in model.parameters()])), losses[0], losses[-1]


def residuals_go_on(rank: int, ranks: int, store: str, line: str) -> list[str]:
    """Six steps in one go, and three and three with what was kept carried over by hand."""
    found = []
    for cut in (6, 3):
        group = join(rank, ranks, f"{store}{cut}", line)
        mine, steps = torch.empty(ITEMS), []
        for step in range(6):
            if step == cut:
                state = {name: one.clone() for name, one in group.residuals.state().items()}
                group.residuals.clear()
                mine = torch.empty(ITEMS)
                group.residuals.load(state)
            mine.copy_(gradient(rank, step))
            dist.all_reduce(mine)
            steps.append(bits(mine))
        found.append("".join(steps))
        dist.destroy_process_group()
    return found


def a_newcomer_steps_alike(rank: int, ranks: int, store: str, line: str) -> list[str]:
    """Three steps, then the last rank has what all have alike and nothing of its own; the bits of three more."""
    group = join(rank, ranks, store, line)
    mine, found = torch.empty(ITEMS), []
    for step in range(6):
        if step == 3:
            state = {name: one.clone() for name, one in group.residuals.state().items()}
            mine = torch.empty(ITEMS)
            group.residuals.load(state, own=rank < ranks - 1)
        group.residuals.of(mine).momentum = 0.9
        mine.copy_(gradient(rank, step))
        dist.all_reduce(mine)
        if step >= 3:
            found.append(bits(mine))
    return found


def residuals_are_forgotten(rank: int, ranks: int, store: str) -> tuple[int, int]:
    """How many residuals are kept after ten tensors that did not come back, and how many were lost."""
    group = join(rank, ranks, store, "ring:codec=int8")
    for step in range(10):
        dist.all_reduce(gradient(rank, step))
    names = [name for name in group.residuals.state() if name.endswith("residual")]
    return len(names), group.residuals.lost


def not_finite_sums(rank: int, ranks: int, store: str, line: str) -> list[bool]:
    """Whether each of three sums is finite; in the second, rank 1 has a NaN."""
    join(rank, ranks, store, line)
    mine, found = torch.empty(ITEMS), []
    for step in range(3):
        mine.copy_(gradient(rank, step))
        if step == 1 and rank == 1:
            mine[777] = torch.nan
        dist.all_reduce(mine)
        found.append(bool(mine.isfinite().all()))
    return found


def peer_updates(rank: int, ranks: int, store: str, codec: str, steps: int) -> tuple[float, float, list[int]]:
    """Updates to all others, each at its own pace: how far the replica is from rank 0's, and, with all residuals, from
    what was given; and what others have confirmed."""
    join(rank, ranks, store, "direct")
    exchange = PeerExchange(ITEMS, codecs.parse(codec) if codec else None)
    replica, came, confirmed = torch.zeros(ITEMS), [0] * ranks, [0] * ranks
    for step in range(steps):
        update = gradient(rank, step)
        exchange.send(update, samples=step + 1, seen={rank: step})
        replica += update
        came = _take(exchange, replica, came, confirmed)
    while sum(came) < steps * (ranks - 1) or sum(confirmed) < steps * (ranks - 1):
        came = _take(exchange, replica, came, confirmed)
    first, given = replica.clone(), torch.zeros(ITEMS).double()
    dist.broadcast(first, 0)
    residual = torch.zeros(ITEMS).double() if exchange.residual is None else exchange.residual[:ITEMS].double()
    dist.all_reduce(residual)
    for peer in range(ranks):
        for step in range(steps):
            given += gradient(peer, step).double()
    off = float((replica.double() + residual - given).abs().max())
    return float((replica - first).abs().max()), off, confirmed


def _take(exchange: PeerExchange, replica: Tensor, came: list[int], confirmed: list[int]) -> list[int]:
    found = list(came)
    for arrival in exchange.arrivals(replica):
        found[arrival.source] += 1
        assert arrival.number == arrival.samples == found[arrival.source]  # in order, each once
        assert arrival.seen[arrival.source] == arrival.number - 1
    for other, count in exchange.confirmations():
        confirmed[other] = count
    return found
