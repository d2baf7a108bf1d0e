"""Tensors on GPUs: NCCL, pinned shared memory or pinned staging.

On one host, NCCL where each rank has a GPU of its own. Ranks that share one (a set-up for tests) use the shared
memory: the arenas of all ranks are registered with CUDA, so that copies to and from them run at the speed of the bus.

Across hosts, what lies on a GPU is copied to pinned memory, sent as any other tensor, and copied back; of a large sum
some parts are copied while another is sent. NCCL is not taken there by itself: it knows no key. (`native` is NCCL.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from offbeat.collectives.overlap import Job
from offbeat.collectives.sync import Patience
from offbeat.collectives.transport import SharedMemory
from offbeat.errors import OffbeatError

_SEVERAL = (list, tuple)


def first_tensor(arguments: Any) -> Tensor | None:
    """The first tensor in lists of lists of them."""
    if not isinstance(arguments, _SEVERAL):
        return arguments if isinstance(arguments, Tensor) else None
    for one in arguments:
        if type(one) is Tensor:  # as most are: it is asked twice a call
            return one
        found = first_tensor(one)
        if found is not None:
            return found
    return None


def nccl_backend(store: Any, rank: int, ranks: int, timeout: timedelta) -> Any:
    """NCCL, as torch has it."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, ranks, options)


def parts_of(tensor: Tensor, items: int) -> tuple[Tensor, ...]:
    """A flat tensor in parts of so many items, the last with what is left."""
    return tensor.tensor_split(tuple(range(items, tensor.numel(), items)))


def staged_parts(tensor: Tensor, items: int) -> Iterator[Tensor]:
    """The parts of a GPU's flat tensor in pinned memory, in order; what is left in one goes back to the GPU.

    The parts behind it come, and those before it go back, while the caller is at one.
    """
    held = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
    parts = list(zip(parts_of(tensor, items), parts_of(held, items), strict=True))
    arrivals = []
    for there, here in parts:
        here.copy_(there, non_blocking=True)
        arrivals.append(torch.cuda.current_stream(tensor.device).record_event())
    returning = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call] # torch's
    for arrived, (there, here) in zip(arrivals, parts, strict=True):
        arrived.synchronize()
        yield here
        with torch.cuda.stream(returning):
            there.copy_(here, non_blocking=True)
    returning.synchronize()


class Gpus:
    """What the ranks of a group do with tensors that are on a GPU. Agreed on when the first one comes."""

    def __init__(self, store: Any, transport: SharedMemory) -> None:
        self._store = store
        self._transport = transport
        self._nccl: Any = None
        self._met = False
        self._pinned: list[int] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def nccl(self, device: torch.device) -> Any:
        """NCCL's backend, or None where ranks share a GPU or are on several hosts."""
        if self._transport.hosts is None and not self._met:
            self._meet(device)
            self._met = True
        return self._nccl

    def _meet(self, device: torch.device) -> None:
        transport = self._transport
        mine = str(torch.cuda.get_device_properties(device).uuid)
        self._store.set(f"gpu/{transport.rank}", mine)
        keys = [f"gpu/{rank}" for rank in range(transport.ranks)]
        try:
            self._store.wait(keys, timedelta(seconds=transport.timeout_s))
        except RuntimeError:
            raise OffbeatError("not all ranks of the group passed a tensor on a GPU") from None
        gpus = [bytes(self._store.get(key)) for key in keys]
        if len(set(gpus)) == len(gpus) and dist.is_nccl_available():
            timeout = timedelta(seconds=transport.timeout_s)
            self._nccl = nccl_backend(self._store, transport.rank, transport.ranks, timeout)
        else:
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch's
            for side in transport.sides:
                segment = side.segment
                if int(runtime.cudaHostRegister(segment.address, segment.size_bytes, 0)) == 0:
                    self._pinned.append(segment.address)

    def staged(self, job: Job, device: torch.device) -> Job:
        """A job that starts when the caller's kernels are done, and ends when its own copies are.

        It has a stream of its own: what the caller queues meanwhile, as the rest of backward, is not waited for.
        """
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch's
        ready.record(torch.cuda.current_stream(device))

        def run(patience: Patience) -> None:
            with torch.cuda.device(device):
                stream = self._streams.get(device)
                if stream is None:
                    stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's
                ready.synchronize()
                with torch.cuda.stream(stream):
                    job(patience)
                stream.synchronize()

        return run

    def close(self) -> None:
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call] # torch's
        self._pinned.clear()
        if self._nccl is not None:
            self._nccl.shutdown()
            self._nccl = None


def or_nccl(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A method of the group that NCCL does, under this name, where the tensors are on GPUs and it can."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any) -> Any:
            tensor = first_tensor(arguments)
            if tensor is not None and tensor.is_cuda:
                nccl = self._gpus.nccl(tensor.device)
                if nccl is not None:
                    if name.startswith("allreduce"):
                        self.check_plain()
                    return getattr(nccl, name)(*arguments)
            return method(self, *arguments)

        call.__name__, call.__doc__ = method.__name__, method.__doc__
        return call

    return decorate
