"""Out of memory: how torch says it, and the one line that a user gets instead.

This file knows nothing of trainers or processes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from offbeat.errors import RequestError

# In what CUDA, cuBLAS, cuDNN and torch's allocator of a CPU say. The last: torch asks NVML how much memory others have
# when it runs out of it, and fails in that where a container has no NVML.
_MARKS = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory", "DriverAPI::get()->nvml")


def is_out_of_memory(error: BaseException | str | None) -> bool:
    """Also where that led to another error: a capture that runs out of memory ends as one that was invalidated."""
    if error is None:
        return False
    kinds = (torch.OutOfMemoryError, MemoryError)
    if isinstance(error, kinds) or any(mark in str(error) for mark in _MARKS):
        return True
    return isinstance(error, BaseException) and is_out_of_memory(error.__context__)


def release() -> None:
    """What is held by nobody any more, graphs included, can be used for something else."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def naming_memory(told: Callable[[], str]) -> Iterator[None]:
    """Running out of memory inside is a `RequestError` with this text."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RequestError) or not is_out_of_memory(error):
            raise
        raise RequestError(told()) from None


def told_of_batch(device: torch.device, batch: int, *, recompute: bool) -> str:
    """A minibatch does not fit."""
    ways = ["--batch-size auto finds what fits"] if batch > 1 else []
    ways += [] if recompute else ["--train.recompute true keeps fewer activations"]
    samples = f"minibatches of {batch:,} samples" if batch > 1 else "single samples"
    advice = "; ".join(ways) or "the model is too large for it"
    return f"out of memory on {_named(device)} with {samples}: {advice}"


def told_of_model(device: torch.device) -> str:
    """Weights, gradients and the optimizer's state alone do not fit."""
    return f"the model is too large for {_named(device)}: out of memory before the first minibatch"


def _named(device: torch.device) -> str:
    if device.type != "cuda":
        return "this machine"
    total = torch.cuda.get_device_properties(device).total_memory
    return f"{device} ({total / 2**30:.0f} GiB)"
