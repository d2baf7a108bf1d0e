"""What ranks do in tests of faults: one ends or stops at a scripted point, the others tell what they saw."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import offbeat
import offbeat.errors
from collectives.programs import join
from offbeat.collectives.process_group import OffbeatGroup


def _at_point(group: OffbeatGroup, point: int, how: int) -> None:
    """End or stop this process when it has told the others of its progress so many times."""
    told, mark = 0, group._transport.mark

    def tell(value: int) -> None:
        nonlocal told
        told += 1
        if told == point:
            os.kill(os.getpid(), how)
        mark(value)

    group._transport.mark = tell  # type: ignore[method-assign]


def fault_in_a_collective(
    rank: int, ranks: int, store: str, victim: int, point: int, how: int, strategy: str, timeout_s: float
) -> dict[str, Any]:
    """The victim ends or stops at its n-th mark; the others tell what they were told, and when."""
    group = join(rank, ranks, store, strategy, timeout_s)
    if rank == victim:
        _at_point(group, point, how)
    tensor = torch.ones(50_000)
    start = time.monotonic()
    try:
        for _ in range(100):
            start = time.monotonic()
            dist.all_reduce(tensor)
    except offbeat.errors.PeerError as error:
        first = time.monotonic() - start
        again = ""
        try:
            dist.barrier()
        except offbeat.errors.PeerError as error_again:
            again = str(error_again)
        return {"said": str(error), "ranks": error.ranks, "after_s": first, "again": again}
    raise AssertionError("nothing happened")


def fault_elsewhere(
    rank: int, ranks: int, store: str, victim: int, case: str, how: int, timeout_s: float
) -> dict[str, Any]:
    """The victim ends or stops before a message, in the middle of one, inside backward, between calls."""
    group = join(rank, ranks, store, timeout_s=timeout_s)
    dist.barrier()
    peer = (victim + 1) % ranks
    start = time.monotonic()
    try:
        if case == "before a message":
            if rank == victim:
                os.kill(os.getpid(), how)
            dist.recv(torch.ones(3), victim) if rank == peer else dist.barrier()
        elif case == "in a message":
            if rank == victim:
                work = dist.isend(torch.ones(3_000_000), peer)
                os.kill(os.getpid(), how)
                assert work is not None
            if rank == peer:
                time.sleep(0.2)
                dist.recv(torch.ones(3_000_000), victim)
            dist.barrier()
        elif case == "in backward":
            model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
            ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)
            if rank == victim:
                model[1].register_full_backward_hook(lambda *_: os.kill(os.getpid(), how))
            start = time.monotonic()
            ddp(torch.randn(4, 64)).sum().backward()
        elif case == "between calls":
            if rank == victim:
                os.kill(os.getpid(), how)
            dist.all_reduce(torch.ones(10), async_op=True).wait()
    except RuntimeError as error:
        assert group._transport.broken is not None or case.endswith("message")
        return {"said": str(error), "after_s": time.monotonic() - start}
    raise AssertionError("nothing happened")


def init_and_destroy(rank: int, ranks: int, store: str, cycles: int) -> dict[str, list[int]]:
    """Groups made, used and destroyed in one process: what is open, mapped and resident on the way."""
    found: dict[str, list[int]] = {"descriptors": [], "maps": [], "threads": [], "resident_kb": []}
    for cycle in range(cycles):
        join(rank, ranks, f"{store}{cycle}", arena_bytes=1024 * 1024)
        tensor = torch.ones(20_000)
        for _ in range(3):
            dist.all_reduce(tensor)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        if rank == 0:
            dist.send(tensor, 1)
        elif rank == 1:
            dist.recv(tensor, 0)
        dist.barrier()
        dist.destroy_process_group()
        del work, tensor
        if cycle % max(1, cycles // 10) == 0 or cycle == cycles - 1:
            gc.collect()
            found["descriptors"].append(len(os.listdir("/proc/self/fd")))  # noqa: PTH208 - no Path for each
            found["maps"].append(Path("/proc/self/maps").read_text().count("\n"))
            found["threads"].append(threading.active_count())
            status = Path("/proc/self/status").read_text()
            found["resident_kb"].append(int(status.split("VmRSS:")[1].split()[0]))
    return found


def forks_a_child(rank: int, ranks: int, store: str) -> str:
    """A forked child (a DataLoader's worker) is not this rank: it cannot use the group, and does not keep it alive."""
    group = join(rank, ranks, store)
    dist.all_reduce(torch.ones(1))
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except BaseException as error:
            os.write(writer, str(error).encode())
        if rank == 1:
            time.sleep(5)
        os._exit(0)
    said = os.read(reader, 1000).decode()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # its child lives on, and must not pass for it
    try:
        dist.all_reduce(torch.ones(1))
    except offbeat.errors.PeerError as error:
        assert error.ranks == (1,)
    else:
        raise AssertionError("the child passed for its parent")
    assert group._transport.broken is not None
    return said


def in_a_small_dev_shm(rank: int, ranks: int, store: str, size: str) -> dict[str, Any]:
    """With /dev/shm (nearly) full, tensors that come back are staged for ever; nothing is left in it."""
    root = Path("/dev/shm")
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(0x20000) == 0  # mounts of its own
    assert libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None) == 0  # private, all of them
    assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={size}".encode()) == 0
    group = join(rank, ranks, store)
    tensor = torch.full((200_000,), float(rank + 1))
    for _ in range(5):
        tensor.fill_(rank + 1)
        dist.all_reduce(tensor)
        assert (tensor == ranks * (ranks + 1) / 2).all()
    stats = group.stats()
    return {"moved": stats.moved, "notes": stats.notes, "left": [path.name for path in root.iterdir()]}


def waits_long(rank: int, ranks: int, store: str, seconds: float) -> float:
    """Processor seconds that a rank uses while it waits so long for the last one."""
    join(rank, ranks, store)
    dist.barrier()
    before = time.process_time()
    if rank == ranks - 1:
        time.sleep(seconds)
    dist.all_reduce(torch.ones(1000))
    return time.process_time() - before
