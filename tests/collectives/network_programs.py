"""Ranks of a group on several hosts of a lab: python network_programs.py PROGRAM RANK RANKS ADDRESS."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import offbeat
from offbeat.collectives import process_group
from offbeat.collectives.backend import group_of
from offbeat.collectives.process_group import OffbeatGroup
from offbeat.errors import OffbeatError
from offbeat.network.streams import HEADER_BYTES, pieces_of
from offbeat.network.tcp_info import read_counts
from offbeat.schedules import Schedule, build, price
from offbeat.schedules.algorithms import algorithms
from offbeat.schedules.ir import chunk_sizes
from offbeat.spec import parse
from offbeat.topology import Link, Topology, edge_name

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64,
)  # fmt: skip
SIZES = (0, 1, 3, 17, 257, 4096, 20_011)
LARGE_BYTES = 5_000_000
PACKET_BYTES = 66  # of Ethernet, IP and TCP with time stamps, in each packet
COUNTERS = Path("/sys/class/net/eth0/statistics")


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


def sent_by_price(schedule: Schedule, items: int) -> dict[tuple[int, int], int]:
    """What each rank sends to each, in bytes of float32, where every two are joined by a link of their own."""
    ranks = range(schedule.ranks)
    pairs = [(one, other) for one in ranks for other in ranks if one != other]
    mesh = Topology(name="mesh", ranks=schedule.ranks, links=dict.fromkeys(pairs, Link(0.0, 1e9)))
    cost = price(schedule, mesh, 4 * items, 4).bytes_per_link
    return {pair: cost.get(edge_name(pair), 0) for pair in pairs}


def frames(schedule: Schedule, items: int) -> dict[tuple[int, int], int]:
    """How many pieces, each with its header, go from rank to rank."""
    found: dict[tuple[int, int], int] = {}
    sizes = chunk_sizes(items, schedule.chunks)
    for step in schedule.steps:
        for t in step:
            found[t.source, t.target] = found.get((t.source, t.target), 0) + len(pieces_of(4 * sizes[t.chunk]))
    return found


def on_sockets(group: OffbeatGroup) -> dict[int, int]:
    """Bytes that the kernel has received from each rank on another host, on the connections of collectives."""
    remote = group._transport.remote
    assert remote is not None
    return {peer: sum(read_counts(one).received_bytes for one in remote.link(peer)._streams) for peer in remote.ranks}


def check_bytes(rank: int, ranks: int, items: int) -> None:
    """What goes over each socket is what the schedule costs, and a header for each piece."""
    group = group_of(None)
    still = timedelta(seconds=60)
    group.monitored_barrier(still)  # by messages, which have connections of their own
    sockets = on_sockets(group)
    group.monitored_barrier(still)
    before = group.stats()  # own sends, of messages too
    dist.all_reduce(torch.ones(items))
    after, now = group.stats(), on_sockets(group)
    group.monitored_barrier(still)
    row = algorithms().get(parse(after.strategy).name)  # `auto` is none
    gathers = row is not None and row.gathers
    schedule = build(after.strategy, ranks=ranks) if gathers else group._choice.of(4 * items).schedule
    cost, headers = sent_by_price(schedule, items), frames(schedule, items)
    for peer in sockets:
        told = after.strategy, items, peer
        assert after.sent[peer] - before.sent[peer] == cost[rank, peer], told
        right = cost[peer, rank] + HEADER_BYTES * headers.get((peer, rank), 0)
        assert now[peer] - sockets[peer] == right, (*told, now[peer] - sockets[peer], right)


def interface(rank: int, ranks: int) -> None:
    """From 4 MiB on the interface carries what the schedules cost: to 1 %, headers of packets aside.

    On a busy machine TCP sends some packets again now and then: the best of three attempts counts.
    """
    group = group_of(None)
    hosts = group.stats().hosts
    for line in ("ring", "direct", "hierarchical"):
        group.use(line)
        for items in (1 << 20, LARGE_BYTES):
            schedule = group._choice.of(4 * items).schedule
            cost, headers = sent_by_price(schedule, items), frames(schedule, items)
            across = [pair for pair in cost if hosts[pair[0]] != hosts[pair[1]]]
            whole = {pair: cost[pair] + HEADER_BYTES * headers.get(pair, 0) for pair in across}
            right = [sum(whole[pair] for pair in across if hosts[pair[end]] == hosts[rank]) for end in (0, 1)]
            for _ in range(3):
                off = max(abs(one / other - 1) for one, other in zip(carried_by_one(items), right, strict=True))
                worst = torch.tensor([off])
                dist.all_reduce(worst, op=dist.ReduceOp.MAX)
                if worst.item() < 0.01:
                    break
            if rank == 0:
                print(f"{line}, {4 * items} bytes: {100 * worst.item():.3f} % off the price at most, in and out")
            assert worst.item() < 0.01
    print("the interface is right")


def carried_by_one(items: int) -> list[int]:
    """Bytes out of this host's interface and into it during one all-reduce."""
    group, still = group_of(None), timedelta(seconds=60)
    group.monitored_barrier(still)
    before = [carried(way) for way in ("tx", "rx")]
    group.monitored_barrier(still)
    dist.all_reduce(torch.ones(items))
    group.monitored_barrier(still)
    found = [carried(way) - then for way, then in zip(("tx", "rx"), before, strict=True)]
    group.monitored_barrier(still)
    return found


def carried(way: str) -> int:
    size, packets = (int((COUNTERS / f"{way}_{what}").read_text(encoding="ascii")) for what in ("bytes", "packets"))
    return size - PACKET_BYTES * packets


def lines_for(ranks: int) -> list[str]:
    lines = [line for row in algorithms().values() for line in row.lines(ranks)]
    return [*lines, "ring:order=" + "-".join(map(str, reversed(range(ranks)))), "hierarchical", "hierarchical:leader"]


def sums(rank: int, ranks: int) -> None:
    """Every all-reduce line, in a short time."""
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
        check_bytes(rank, ranks, 1_250_000)
    print(f"all {len(lines_for(ranks))} lines are right")


def coded(rank: int, ranks: int) -> None:
    """Coded all-reduces: the same bits on all ranks, nothing lost, the bytes of the price."""
    from collectives.coded_programs import check_coded

    group = group_of(None)
    hosts = group.stats().hosts
    lines = ["ring", "ring:parts=3", "direct", "halving-doubling", "tree", "double-tree:4"]
    wanted = [
        f"{line}{',' if ':' in line else ':'}codec={codec}" for line in lines for codec in ("int8", "bf16@across")
    ]
    wanted += ["ring:codec=int4", "direct:codec=fp16@across", "ring:codec=1-bit", "direct:codec=top-k:0.01"]
    wanted += ["ring:codec=random-k:0.1", "ring:codec=power-sgd:2"]
    if ranks == 2 * hosts.count(0) and len(set(hosts)) == 2:
        wanted += [f"hierarchical:2x{hosts.count(0)}{form},codec=int8@across" for form in ("", ",leader", ",parts=4")]
    for line in wanted:
        found = check_coded(group, rank, ranks, line, 2, hosts)
        told = torch.tensor([int(digest[:12], 16) for digest in found])
        everybodys = [torch.empty_like(told) for _ in range(ranks)]
        dist.all_gather(everybodys, told)
        assert all(torch.equal(one, told) for one in everybodys), f"{line}: the bits differ between ranks"
    print(f"all {len(wanted)} coded lines are right")


@cache
def plain_sum(ranks: int, items: int, dtype: torch.dtype) -> torch.Tensor:
    total = sum((values(peer, items, dtype).double() for peer in range(ranks)), torch.zeros(items).double())
    return total.to(dtype)


@cache
def own_values(rank: int, items: int, dtype: torch.dtype) -> torch.Tensor:
    return values(rank, items, dtype)


def all_sums(rank: int, ranks: int) -> None:
    """Every all-reduce line with every type at every size, from 0 items to 5 MB. Minutes."""
    group, checked = group_of(None), 0
    for line in lines_for(ranks):
        group.use(line)
        digests = []
        for dtype in DTYPES:
            for items in (*SIZES, LARGE_BYTES // dtype.itemsize):
                mine = own_values(rank, items, dtype).clone()
                dist.all_reduce(mine)
                assert torch.equal(mine, plain_sum(ranks, items, dtype)), (line, items, dtype)
                checked += 1
            if dtype.is_floating_point:  # fractions, whose sum depends on the order in which they are added
                for items in (20_011, LARGE_BYTES // dtype.itemsize):
                    mine = own_values(rank, items, dtype).mul(1 / 3).add_(0.1 * rank)
                    dist.all_reduce(mine)
                    digests.append(hashlib.sha256(mine.view(torch.uint8).numpy().tobytes()).digest()[:7])
        told = torch.tensor([int.from_bytes(one, "little") for one in digests])
        everybodys = [torch.empty_like(told) for _ in range(ranks)]
        dist.all_gather(everybodys, told)
        assert all(torch.equal(one, told) for one in everybodys), f"{line}: the bits differ between ranks"
        check_bytes(rank, ranks, 20_011)
        check_bytes(rank, ranks, LARGE_BYTES // 4)
    print(f"all {len(lines_for(ranks))} lines are right: {checked} sums")


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
    print("all collectives are right")


def every_collective(rank: int, ranks: int) -> None:
    """Each collective with each root, in sizes from nothing to more than the shared memory holds, against what one
    process computes; what a rank gives stays as it was."""

    def given(who: int, items: int, dtype: torch.dtype) -> Tensor:
        chance = torch.Generator().manual_seed(1000 * items + who)
        return torch.randint(-50, 50, (items,), generator=chance).to(dtype)

    checked = 0
    for items, dtype in ((0, torch.float32), (1, torch.int64), (1_003, torch.float32), (700_001, torch.float64)):
        mine = given(rank, items, dtype)
        before = mine.clone()
        everybody = [given(who, items, dtype) for who in range(ranks)]
        total = torch.stack(everybody).sum(0)
        for root in range(ranks):
            got = mine.clone()
            dist.broadcast(got, root)
            assert torch.equal(got, everybody[root]), (rank, "broadcast", root, items)
            got = mine.clone()
            dist.reduce(got, root)
            assert torch.equal(got, total if rank == root else mine), (rank, "reduce", root, items)
            outputs = [torch.empty_like(mine) for _ in range(ranks)] if rank == root else None
            dist.gather(mine, outputs, dst=root)
            assert outputs is None or all(map(torch.equal, outputs, everybody)), (rank, "gather", root, items)
            got = torch.empty_like(mine)
            dist.scatter(got, [one + root for one in everybody] if rank == root else None, src=root)
            assert torch.equal(got, mine + root), (rank, "scatter", root, items)
            checked += 4
        gathered = torch.empty(ranks * items, dtype=dtype)
        dist.all_gather_into_tensor(gathered, mine)
        assert torch.equal(gathered, torch.cat(everybody)), (rank, "all_gather", items)
        apart = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(apart, mine)
        assert all(map(torch.equal, apart, everybody)), (rank, "all_gather of a list", items)
        whole = [given(100 + who, ranks * items, dtype) for who in range(ranks)]
        sent = whole[rank].clone()
        part = torch.empty_like(mine)
        for op, right in (
            (dist.ReduceOp.SUM, torch.stack(whole).sum(0)),
            (dist.ReduceOp.MAX, torch.stack(whole).amax(0)),
        ):
            dist.reduce_scatter_tensor(part, sent, op=op)
            assert torch.equal(part, right[rank * items : (rank + 1) * items]), (rank, "reduce_scatter", items)
        out = torch.empty_like(sent)
        dist.all_to_all_single(out, sent)
        parts = [one[rank * items : (rank + 1) * items] for one in whole]
        assert torch.equal(out, torch.cat(parts)), (rank, "all_to_all", items)
        assert torch.equal(mine, before) and torch.equal(sent, whole[rank]), (rank, "what was given has changed", items)
        checked += 5
    uneven = [torch.empty(3 * who + 1) for who in range(ranks)]
    dist.all_gather(uneven, torch.full((3 * rank + 1,), float(rank)))
    assert all(one.eq(who).all() for who, one in enumerate(uneven))
    print(f"{checked + 1} calls of every collective are right")


def messages(rank: int, ranks: int) -> None:
    """Every rank with every other, whichever road joins them."""
    others = [peer for peer in range(ranks) if peer != rank]
    for items in (0, 1, 20_011, 1_250_000):  # the last is more than the kernel holds
        received = {peer: torch.empty(items) for peer in others}
        work = [dist.irecv(received[peer], peer) for peer in others]
        work += [dist.isend(torch.arange(items) + 10.0 * rank + peer, peer) for peer in others]
        for one in work:
            assert one is not None
            one.wait()
        assert all(torch.equal(received[peer], torch.arange(items) + 10.0 * peer + rank) for peer in others)
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    for tag in (1, 2):
        dist.send(torch.full((3,), float(tag)), after, tag=tag)
    for tag in (2, 1):  # in another order than sent
        got = torch.empty(3)
        dist.recv(got, before, tag=tag)
        assert got.eq(tag).all()
    if rank == 0:
        assert sorted(dist.recv(torch.empty(2), tag=7) for _ in others) == others, "from any rank"
    else:
        dist.send(torch.ones(2), 0, tag=7)
    pairs = [
        dist.P2POp(dist.isend, torch.full((5,), float(rank)), after),
        dist.P2POp(dist.irecv, torch.empty(5), before),
    ]
    for one in dist.batch_isend_irecv(pairs):
        one.wait()
    assert pairs[1].tensor.eq(before).all()
    sent = offbeat.stats().sent
    assert all(sent[peer] >= 4 * (1 + 20_011 + 1_250_000) for peer in others), sent
    group_of(None).monitored_barrier(timedelta(seconds=20))
    print("all messages are right")


def broken_messages(rank: int, ranks: int) -> None:
    """The last rank does not come to a monitored barrier; then it sends to rank 0 and ends without a word."""
    if rank == ranks - 1:
        time.sleep(2)
        dist.send(torch.arange(100_000.0), 0, tag=1)
        os._exit(0)
    try:
        group_of(None).monitored_barrier(timedelta(seconds=1), wait_all_ranks=True)
    except OffbeatError as error:
        print(error)
    if rank == 0:
        time.sleep(2)
        got = torch.empty(100_000)
        dist.recv(got, ranks - 1, tag=1)
        assert torch.equal(got, torch.arange(100_000.0))
        print("it has arrived")
        try:
            dist.recv(got, ranks - 1, tag=1)
        except OffbeatError as error:
            print(error)


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


def slow_link(rank: int, ranks: int) -> None:
    """Reduces until every rank has measured its connections, and all know it."""
    tensor, end = torch.ones(2_000_000), time.monotonic() + 60
    named = torch.zeros(1)
    while not named.item() and time.monotonic() < end:
        dist.all_reduce(tensor.fill_(1.0))
        named.fill_(float(len(offbeat.stats().slow_links) == 2))
        dist.all_reduce(named, op=dist.ReduceOp.MIN)
    stats = offbeat.stats()
    print(f"late: {stats.late}; notes: {stats.notes}; rates: {stats.host_rates}")


def parts(rank: int, ranks: int) -> None:
    """The last rank says that it has a GPU (see `main`): all cut large sums alike, wherever their tensors are."""
    process_group.STAGED_BYTES = 4096
    calls = offbeat.stats().calls
    for items, cut_in in ((1, 1), (1024, 1), (1025, 2), (10_000, 10)):
        check_sum(rank, ranks, items, torch.float32)
        assert offbeat.stats().calls == calls + cut_in, (items, offbeat.stats().calls - calls)
        calls += cut_in
        mean = values(rank, items, torch.float32)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        assert torch.allclose(mean, plain_sum(ranks, items, torch.float32) / ranks) or items == 0
        same_bits(rank, ranks, items)
        calls = offbeat.stats().calls
    strided = torch.ones(5000, 2)[:, 0] * (rank + 1)
    dist.all_reduce(strided)
    assert torch.equal(strided, torch.full((5000,), ranks * (ranks + 1) / 2))
    print("sums in parts are right")


def other_call(rank: int, ranks: int) -> None:
    """Rank 0 reduces another size than the others."""
    try:
        dist.all_reduce(torch.ones(1000 if rank else 999))
    except OffbeatError as error:
        print(error)


def main() -> None:
    name, rank, ranks, address = sys.argv[1:]
    torch.set_num_threads(1)
    if name == "parts" and int(rank) == int(ranks) - 1:
        torch.cuda.device_count = lambda: 1
    try:
        dist.init_process_group(
            "offbeat", init_method=f"tcp://{address}:29500", rank=int(rank), world_size=int(ranks),
            timeout=timedelta(seconds=float(os.environ.get("TIMEOUT_S", "60"))),
        )  # fmt: skip
    except OffbeatError as error:
        print(error)
        return
    right = (parts, sums, all_sums, coded, interface, collectives, every_collective, messages, slow_link)
    whole = {one.__name__: one for one in right}
    broken = {one.__name__: one for one in (reduce_for_ever, other_call, broken_messages)}
    for each in name.split(","):
        (whole | broken)[each](int(rank), int(ranks))
    if not set(name.split(",")) & broken.keys():
        dist.barrier()  # the store is in rank 0
    dist.destroy_process_group()


main()
