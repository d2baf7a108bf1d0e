"""What ranks do in tests with tensors on GPUs."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
import torch.distributed as dist

from collectives.programs import OPS, ORACLES, inputs_of, join


def gpus(rank: int, ranks: int, store: str) -> int:
    return torch.cuda.device_count()


def on_one_gpu(rank: int, ranks: int, store: str, arena_bytes: int) -> dict[str, Any]:
    """Several ranks with tensors on the same GPU: everything through pinned shared memory."""
    group = join(rank, ranks, store, arena_bytes=arena_bytes)
    device = torch.device("cuda", 0)
    for dtype, items in itertools.product((torch.float32, torch.bfloat16, torch.int64), (0, 1, 1000, 300_001)):
        parts = inputs_of(ranks, items, dtype, seed=items)
        for name in ("sum", "max", "mean"):
            if name == "mean" and not dtype.is_floating_point:
                continue
            tensor = parts[rank].to(device)
            work = dist.all_reduce(tensor, op=OPS[name], async_op=items % 2 == 1)
            if work is not None:
                work.wait()
            torch.testing.assert_close(tensor.cpu(), ORACLES[name](parts))
        sent = parts[rank].to(device)
        dist.broadcast(sent, 1)
        assert torch.equal(sent.cpu(), parts[1])
        whole = torch.empty(ranks * items, dtype=dtype, device=device)
        dist.all_gather_into_tensor(whole, parts[rank].to(device))
        assert torch.equal(whole.cpu(), torch.cat(parts))
        part = torch.empty(items, dtype=dtype, device=device)
        dist.reduce_scatter_tensor(part, torch.cat([parts[rank]] * ranks).to(device))
        torch.testing.assert_close(part.cpu(), ORACLES["sum"](parts))
        dist.all_to_all_single(whole, torch.cat([parts[rank]] * ranks).to(device))
        assert torch.equal(whole.cpu(), torch.cat(parts))
        root = parts[rank].to(device)
        dist.reduce(root, 0)
        torch.testing.assert_close(root.cpu(), ORACLES["sum"](parts) if rank == 0 else parts[rank])
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    got = torch.empty(400_000, device=device)
    receiving = dist.irecv(got, before)
    dist.send(torch.full((400_000,), float(rank), device=device), after)
    assert receiving is not None
    receiving.wait()
    assert (got == before).all()
    size = 25_000_000
    big = torch.ones(size, device=device)
    times = []
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(big)
        times.append(time.perf_counter() - start)
    return {"nccl": group._gpus._nccl is not None, "pinned": len(group._gpus._pinned), "ms": 1000 * min(times)}


def ddp_on_a_gpu(rank: int, ranks: int, store: str) -> dict[str, Any]:
    """DDP with tensors on a GPU, against one process."""
    group = join(rank, ranks, store)
    device, results = torch.device("cuda", 0), []
    for distributed in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(6)]).to(device)
        trained = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.3) if distributed else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        generator = torch.Generator().manual_seed(1)
        for _ in range(6):
            inputs = torch.randn(ranks, 8, 256, generator=generator).to(device)
            optimizer.zero_grad()
            (trained(inputs[rank]) if distributed else trained(inputs.flatten(0, 1))).square().mean().backward()
            optimizer.step()
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
    return {"nccl": group._gpus._nccl is not None}
