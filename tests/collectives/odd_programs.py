"""What ranks do in tests of odd uses: each was once a wrong result, a hang or a crash."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

import offbeat
import offbeat.errors
from collectives.programs import initialise, join
from offbeat.collectives.backend import group_of


def halves_in_backward(rank: int, ranks: int, store: str) -> int:
    """Two calls in flight on halves of one storage, inside backward: it must not be moved under the first."""
    join(rank, ranks, store)
    items, wrong = 400_000, 0
    buffer = torch.empty(2 * items)
    for _ in range(8):
        buffer.fill_(rank + 1)
        leaf = torch.ones(1, requires_grad=True)

        def hook(_: torch.Tensor) -> None:
            works = [dist.all_reduce(half, async_op=True) for half in (buffer[:items], buffer[items:])]
            for work in works:
                assert work is not None
                work.wait()

        leaf.register_hook(hook)  # type: ignore[no-untyped-call]
        leaf.sum().backward()  # type: ignore[no-untyped-call]
        wrong += int((buffer != ranks * (ranks + 1) / 2).any())
    return wrong


def twice_in_flight(rank: int, ranks: int, store: str) -> list[float]:
    """Two calls in flight on one tensor: the second starts from what the first gave, strided or not."""
    join(rank, ranks, store)
    found = []
    for tensor in (torch.full((300, 100), float(rank + 1)), torch.full((3, 4), float(rank + 1)).t()):
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(4)]
        for work in works:
            assert work is not None
            work.wait()
        assert (tensor == tensor.flatten()[0]).all()
        found.append(float(tensor.flatten()[0]))
    return found


def interrupted(rank: int, ranks: int, store: str) -> str:
    """Rank 0 is interrupted in a call and goes on with another: nobody may take the one for the other."""
    join(rank, ranks, store, timeout_s=10)
    tensor = torch.full((10,), 100.0 + rank)
    if rank == 0:
        signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with contextlib.suppress(KeyboardInterrupt):
            dist.broadcast(tensor, 0)
        try:
            dist.broadcast(torch.full((10,), 777.0), 0)
        except offbeat.errors.PeerError as error:
            return str(error)
    time.sleep(0.6)
    start = time.monotonic()
    try:
        dist.broadcast(tensor, 0)
    except offbeat.errors.PeerError as error:
        assert time.monotonic() - start < 1
        return str(error)
    return f"got {tensor[0].item()}"


def waits_in_a_callback(rank: int, ranks: int, store: str) -> float:
    join(rank, ranks, store)
    first, second = torch.ones(10), torch.ones(10)

    def again(_: Any) -> torch.Tensor:
        work = dist.all_reduce(second, async_op=True)
        assert work is not None
        work.get_future().wait()
        dist.all_reduce(second)
        return second

    work = dist.all_reduce(first, async_op=True)
    assert work is not None
    return float(work.get_future().then(again).wait()[0])


def power_sgd_trains(rank: int, ranks: int, store: str) -> bool:
    join(rank, ranks, store)
    torch.manual_seed(0)
    ddp = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    )
    state = power_sgd.PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, power_sgd.powerSGD_hook)
    for _ in range(5):
        ddp(torch.randn(4, 64)).square().mean().backward()
    return all(p.grad is not None and bool(p.grad.isfinite().all()) for p in ddp.parameters())


def resizes_a_moved_tensor(rank: int, ranks: int, store: str) -> list[str]:
    """torch would crash; a moved storage refuses."""
    join(rank, ranks, store)
    said = []
    for way in ("resize_", "out="):
        tensor = torch.ones(10_000)
        for _ in range(3):
            dist.all_reduce(tensor)
        assert tensor.untyped_storage().is_shared()
        try:
            tensor.resize_(20_000) if way == "resize_" else torch.add(torch.ones(20_000), 1, out=tensor)
            said.append("grew")
        except RuntimeError as error:
            said.append(str(error).splitlines()[0])
    return said


def forked_child_writes(rank: int, ranks: int, store: str) -> list[float]:
    """What a child writes to a moved tensor is not seen by its parent, and it sees what was there."""
    join(rank, ranks, store)
    tensor = torch.ones(10_000)
    for _ in range(3):
        dist.all_reduce(tensor)
    assert tensor.untyped_storage().is_shared()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        seen = tensor[0].item()
        tensor.fill_(-1)
        os.write(writer, str(seen).encode())
        dist.destroy_process_group()  # must not hang, nor leave the parent's group
        os._exit(0)
    os.waitpid(pid, 0)
    seen = float(os.read(reader, 100))
    mine = tensor[0].item()
    dist.all_reduce(tensor)
    return [seen, mine, tensor[0].item()]


def descriptors_of_many_tensors(rank: int, ranks: int, store: str) -> int:
    join(rank, ranks, store)
    tensors = [torch.ones(5_000) for _ in range(60)]
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count
    for _ in range(3):
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert all(tensor.untyped_storage().is_shared() for tensor in tensors)
    return len(os.listdir("/proc/self/fd")) - before  # noqa: PTH208


def sub_groups_of_a_torus(rank: int, ranks: int, store: str) -> list[str]:
    """A strategy that does not fit a sub-group becomes `auto` there; one that fits is inherited."""
    world = join(rank, ranks, store, "torus:2x2")
    pair = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], backend="offbeat", use_local_synchronization=True)
    everybody = dist.new_group(backend="offbeat")
    for group in (world, pair, everybody):
        dist.all_reduce(torch.ones(10), group=group)
    return [group_of(group).stats().strategy for group in (world, pair, everybody)]


def aliases(rank: int, ranks: int, store: str, items: int) -> None:
    """Outputs inside inputs, and the other way round."""
    join(rank, ranks, store, arena_bytes=64 * 1024)
    whole = torch.arange(ranks * items, dtype=torch.float32) + rank
    expected = (torch.arange(ranks * items) * ranks + sum(range(ranks))).float().view(ranks, items)[rank]
    for at in range(ranks):
        copy = whole.clone()
        output = copy[at * items : (at + 1) * items]
        dist.reduce_scatter_tensor(output, copy)
        assert torch.equal(output, expected), (rank, at)
        gathered = torch.full((ranks * items,), -1.0)
        part = gathered[at * items : (at + 1) * items]
        part.fill_(rank)
        dist.all_gather_into_tensor(gathered, part)
        assert torch.equal(gathered, torch.arange(ranks).repeat_interleave(items).float()), (rank, at)
    both = torch.arange(ranks).repeat_interleave(items) * 100 + rank
    dist.all_to_all_single(both, both)
    assert torch.equal(both, torch.arange(ranks).repeat_interleave(items) + 100 * rank)


def premultiplied(rank: int, ranks: int, store: str) -> list[float]:
    join(rank, ranks, store)
    op = dist._make_nccl_premul_sum(2.0)  # type: ignore[attr-defined] # torch's own, untyped
    found = []
    for call in (dist.all_reduce, lambda tensor, op: dist.reduce(tensor, 0, op=op)):
        tensor = torch.full((3,), float(rank + 1))
        call(tensor, op=op)  # type: ignore[no-untyped-call]
        found.append(tensor[0].item())
    return found


def leaves_with_a_call_pending(rank: int, ranks: int, store: str, how: str) -> dict[str, Any]:
    """Rank 0 leaves, or aborts, while a call of its waits for rank 1."""
    group = join(rank, ranks, store, timeout_s=60)
    dist.barrier()
    if rank == 1:
        time.sleep(7.5 if how == "destroy" else 1.5)
        return {}
    work = dist.all_reduce(torch.ones(10), async_op=True)
    assert work is not None
    start = time.monotonic()
    time.sleep(0.2)
    group.abort() if how == "abort" else dist.destroy_process_group()
    try:
        work.wait(timedelta(seconds=5))
    except RuntimeError as error:
        return {"said": str(error), "after_s": time.monotonic() - start}
    return {"said": "nothing"}


def one_store_twice(rank: int, ranks: int, store: str) -> list[float]:
    found = []
    shared = FileStore(store, ranks)
    for _ in range(2):
        dist.init_process_group("offbeat", store=shared, rank=rank, world_size=ranks, timeout=timedelta(seconds=10))
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        found.append(tensor[0].item())
        dist.destroy_process_group()
    return found


def wrong_on_one_rank(rank: int, ranks: int, store: str, what: str) -> None:
    options: Any = "direct"
    if rank == 1:
        options = {"type": 3, "native": offbeat.Options(strategy="native"), "line": "rign"}[what]
    initialise(rank, ranks, store, options, 8)


def dies_at_the_door(rank: int, ranks: int, store: str) -> float:
    """Rank 1 dies after its card is out, before it has met anybody."""
    from offbeat.collectives import rendezvous

    if rank == 1:
        rendezvous.Listener.meet = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign]  # a rank dies here
    start = time.monotonic()
    try:
        join(rank, ranks, store, timeout_s=20)
    except offbeat.errors.PeerError as error:
        assert error.ranks == (1,), error
    return time.monotonic() - start


def receives_early(rank: int, ranks: int, store: str) -> float:
    """A receive that was posted long before its message comes, and is only then waited for."""
    join(rank, ranks, store, timeout_s=1.0)
    tensor = torch.zeros(3)
    if rank == 0:
        time.sleep(1.6)
        dist.send(torch.ones(3), 1)
    else:
        work = dist.irecv(tensor, 0)
        assert work is not None
        time.sleep(1.5)
        work.wait()
    return tensor.sum().item()


def refused(rank: int, ranks: int, store: str) -> list[str]:
    join(rank, ranks, store)
    said = []
    for tensor, op in (
        (torch.ones(1).expand(5), dist.ReduceOp.SUM),
        (torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG),
        (torch.ones(3, dtype=torch.complex64), dist.ReduceOp.MAX),
    ):
        try:
            dist.all_reduce(tensor, op=op)
        except (RuntimeError, ValueError) as error:
            said.append(str(error).splitlines()[0])
    dist.barrier()  # the group lives on
    return said


def coalesced(rank: int, ranks: int, store: str) -> float:
    join(rank, ranks, store)
    parts = [torch.full((3,), float(rank + 1)) for _ in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:  # type: ignore[attr-defined]
        for part in parts:
            dist.all_reduce(part)
    manager.wait()
    return float(sum(part.sum() for part in parts))


def threads_on_groups(rank: int, ranks: int, store: str) -> int:
    """Several threads, a group each."""
    join(rank, ranks, store)
    groups = [dist.new_group(backend="offbeat") for _ in range(3)]
    wrong: list[int] = []

    def work(group: Any) -> None:
        for turn in range(60):
            tensor = torch.full((1000 + turn,), float(rank + 1))
            dist.all_reduce(tensor, group=group)
            if (tensor != ranks * (ranks + 1) / 2).any():
                wrong.append(turn)

    threads = [threading.Thread(target=work, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(wrong)


def native_group(rank: int, ranks: int, store: str) -> list[float]:
    """torch's own backend under our name: DDP trains, messages arrive."""
    initialise(rank, ranks, store, offbeat.Options(strategy="native"), 20)
    tensor = torch.full((3,), float(rank + 1))
    dist.all_reduce(tensor)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    ddp(torch.full((2, 4), float(rank))).sum().backward()
    grad = ddp.module.weight.grad
    assert grad is not None
    pair = dist.new_group([0, 1])
    dist.all_reduce(tensor, group=pair)
    dist.barrier()
    return [tensor[0].item(), float(grad[0, 0])]


def sends_that_time_out(rank: int, ranks: int, store: str) -> str:
    """A large send that nobody receives in time, and another one after it: never half of one and half of the other."""
    join(rank, ranks, store, timeout_s=1.0)
    items = 1_000_000
    try:
        if rank == 0:
            with contextlib.suppress(offbeat.errors.PeerError):
                dist.send(torch.full((items,), 1.0), 1)
            dist.send(torch.full((items,), 2.0), 1)
        else:
            time.sleep(2.0)
            tensor = torch.zeros(items)
            dist.recv(tensor, 0)
            return str([tensor.min().item(), tensor.max().item()])
    except offbeat.errors.PeerError as error:
        return str(error)
    return "sent"


def forks_after_leaving(rank: int, ranks: int, store: str) -> float:
    join(rank, ranks, store)
    tensor = torch.ones(10_000)
    for _ in range(3):
        dist.all_reduce(tensor)
    assert tensor.untyped_storage().is_shared()
    dist.destroy_process_group()
    pid = os.fork()
    if pid == 0:
        tensor.fill_(-1)
        os._exit(0)
    os.waitpid(pid, 0)
    return tensor[0].item()


def in_inference_mode(rank: int, ranks: int, store: str) -> list[float]:
    join(rank, ranks, store, timeout_s=5)
    with torch.inference_mode():
        got, sent = torch.zeros(4), torch.full((4,), float(rank))
        receiving = dist.irecv(got, 1 - rank)
        time.sleep(0.1)
        dist.send(sent, 1 - rank)
        assert receiving is not None
        receiving.wait()
        strided = torch.full((4, 4), float(rank)).t()
        parts = [torch.zeros(4), torch.zeros(4)]
        out = torch.zeros(2)
        works = [
            dist.broadcast(strided, 1, async_op=True),
            dist.all_gather(parts, sent, async_op=True),
            dist.reduce_scatter_tensor(out, sent, async_op=True),
            dist.all_reduce(sent, async_op=True),
        ]
        dist.broadcast(sent, 0)
        for work in works:
            assert work is not None
            work.wait()
    return [got[0].item(), strided[0, 0].item(), parts[1][0].item(), out[0].item(), sent[0].item()]


def many_moved_tensors_freed(rank: int, ranks: int, store: str) -> float:
    join(rank, ranks, store, timeout_s=8)
    tensors = [torch.ones(4096) for _ in range(600)]
    for _ in range(2):
        for tensor in tensors:
            dist.all_reduce(tensor)
    del tensors, tensor
    last = torch.ones(4096)
    for _ in range(140):
        last.fill_(1)
        dist.all_reduce(last)
    return last[0].item()


def few_descriptors(rank: int, ranks: int, store: str) -> list[Any]:
    """With a low limit on open files, tensors are staged before the last descriptor is gone."""
    group = join(rank, ranks, store, timeout_s=8)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    tensors = [torch.ones(4096) for _ in range(150)]
    for _ in range(3):
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert all((tensor == 8).all() for tensor in tensors)
    with Path("/proc/self/stat").open():  # there is one left for others
        return [group.stats().moved < 70, group.stats().notes[0]]


def a_send_behind_another(rank: int, ranks: int, store: str) -> str:
    """The timeout of a send that is waited for runs, though one before it is not."""
    join(rank, ranks, store, timeout_s=1.0)
    if rank == 1:
        time.sleep(2.5)
        return ""
    work = dist.isend(torch.ones(1_000_000), 1)
    try:
        dist.send(torch.ones(3), 1)
    except offbeat.errors.PeerError as error:
        return str(error)
    return f"sent {work}"


def a_move_that_fails(rank: int, ranks: int, store: str) -> int:
    """torch cannot move a storage (and leaves a file when it tries): it is tried once, then all are staged."""
    tried = 0

    def fail(_: Any) -> None:
        nonlocal tried
        tried += 1
        raise RuntimeError("no space left")

    torch.UntypedStorage._share_fd_cpu_ = fail  # type: ignore[method-assign]
    join(rank, ranks, store)
    for _ in range(2):
        tensor = torch.ones(10_000)
        for turn in range(1, 5):
            dist.all_reduce(tensor)
            assert (tensor == ranks**turn).all()
    return tried
