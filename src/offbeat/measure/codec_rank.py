"""A rank of `offbeat bench codecs`: it times codecs by themselves, and all-reduces under any line.

The mean of all ranks is taken, so that numbers stay as large as gradients are. Before a line is timed it is checked:
what all ranks got and what all of them kept is what all of them gave, and all have the same bits.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from offbeat import codecs
from offbeat.collectives.backend import group_of
from offbeat.errors import OffbeatError
from offbeat.measure.child_requests import Answer, Handlers, Request, serve
from offbeat_autoload import register

_CLOSE = 2e-4  # of the largest gradient: what rounding in another order may make


class CodecRank:
    """The gradient of one rank, and what is done with it."""

    def __init__(self, rank: int, ranks: int, items: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._gradient = torch.randn(items, generator=torch.Generator().manual_seed(rank)).mul_(1e-3)
        self._tensors: dict[str, Tensor] = {}

    def speed(self, request: Request) -> Answer:
        """Seconds to encode this gradient with its residual, and to decode it and add it; best of some times."""
        codec = codecs.parse(request["codec"])
        coder, items = codec.coder(), len(self._gradient)
        payload = torch.empty(codec.size_bytes(items), dtype=torch.uint8)
        residual, sums = torch.zeros(coder.residual_items(items)), torch.zeros(items)
        decode = coder.add if codec.row.vectors is None else coder.decode  # as an all-reduce does
        encode_s = _best_s(request["times"], lambda: coder.encode(self._gradient, payload, residual))
        return {"encode_s": encode_s, "decode_s": _best_s(request["times"], lambda: decode(payload, sums))}

    def warm(self, request: Request) -> Answer:
        line = request["line"]
        group = group_of(None)
        group.use(line)
        group.residuals.clear()
        tensor = self._tensors["now"] = self._gradient.clone()
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        kept = group.residuals.of(tensor).residual if group.codec_for(tensor.nbytes) else None
        whole = self._gradient - (0 if kept is None else kept[: len(tensor)])
        got = tensor.clone()
        group.use("ring")
        dist.all_reduce(whole, op=dist.ReduceOp.AVG)
        off = float((got - whole).abs().max()) / float(self._gradient.abs().max())
        if not off <= _CLOSE and not line.endswith("stochastic"):
            raise OffbeatError(f"{line}: wrong sum: what was sent and what was kept are off by {off:.2g}")
        group.use(line)
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        return {"digest": digest, "why": group.why(tensor.nbytes)}

    def time(self, request: Request) -> Answer:
        group_of(None).use(request["line"])
        tensor = self._tensors["now"]
        dist.barrier()
        sent = group_of(None).stats().sent_bytes
        start = time.perf_counter()
        for _ in range(request["iterations"]):
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        seconds = (time.perf_counter() - start) / request["iterations"]
        return {"seconds": seconds, "sent": (group_of(None).stats().sent_bytes - sent) / request["iterations"]}


def _best_s(times: int, work: Callable[[], object]) -> float:
    work()
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)


def join(request: Request) -> tuple[Answer, Handlers]:
    register()
    torch.set_num_threads(1)
    rank, ranks, limit = request["rank"], request["ranks"], timedelta(seconds=request["timeout_s"])
    if ranks > 1:
        store = TCPStore(request["address"], request["port"], ranks, is_master=rank == 0, timeout=limit)
        dist.init_process_group("offbeat", store=store, rank=rank, world_size=ranks, timeout=limit)
    made = CodecRank(rank, ranks, request["items"])
    return {"torch": torch.__version__}, {"speed": made.speed, "warm": made.warm, "time": made.time}


if __name__ == "__main__":
    code = serve(join)
    if code == 0 and dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)
