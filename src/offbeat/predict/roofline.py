"""How long a training step takes on a device that one may not have: a roofline over its operations.

    modelled(operations, device, precision)     -> seconds forward and backward of each layer
    link_needed(gradients, backward_s, P)       -> the link speed at which reducing hides behind backward

An operation takes as long as its arithmetic at a share of the device's peak, or as its memory traffic at a share of the
bandwidth, whichever is longer (Williams, Waterman and Patterson 2009), and a little for being started. Operations are
not fused: the model is of a step as torch computes it by itself, in a CUDA graph, where the host is never late.

It must not know torch, models or clocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from offbeat.errors import RequestError, unknown

# What kernels reach of a device's data sheet. Fitted once to ResNet-50 on an H200; docs/device.md has the errors.
ARITHMETIC = {"fp32": 0.7, "tf32": 0.45, "half": 0.5}
BANDWIDTH = 0.65
KERNEL_S = 4e-6  # from the end of one kernel to the work of the next
GRADIENT_BYTES = 4  # of a parameter: gradients are reduced in float32


class Gpu(NamedTuple):
    """A row of the table: what the data sheet of a device says (dense, without sparsity). 0: it does not have it."""

    name: str
    fp32: float  # multiplications and additions a second
    tf32: float
    fp16: float
    bf16: float
    bytes_per_s: float
    memory_bytes: float
    mark: str  # in the name that the driver gives
    other: tuple[str, ...] = ()  # in the names of slower cards of the same family

    def peak(self, precision: str) -> float:
        """FLOP/s; RequestError where the device cannot compute so."""
        found: float = getattr(self, precision)
        if not found:
            have = ", ".join(one for one in ("fp32", "tf32", "fp16", "bf16") if getattr(self, one))
            raise RequestError(f"a {self.name} does not support {precision}; it supports {have}")
        return found


_T, _G = 1e12, 1e9
GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("k40", 4.3 * _T, 0, 0, 0, 288 * _G, 12 * _G, "K40"),
        Gpu("p100", 10.6 * _T, 0, 21.2 * _T, 0, 732 * _G, 16 * _G, "P100", ("PCI",)),
        Gpu("v100", 15.7 * _T, 0, 125 * _T, 0, 900 * _G, 32 * _G, "V100", ("PCI",)),
        Gpu("a100", 19.5 * _T, 156 * _T, 312 * _T, 312 * _T, 2039 * _G, 80 * _G, "A100", ("40GB",)),
        Gpu("h100", 67 * _T, 494.5 * _T, 989 * _T, 989 * _T, 3350 * _G, 80 * _G, "H100", ("PCI", "NVL")),
        Gpu("h200", 67 * _T, 494.5 * _T, 989 * _T, 989 * _T, 4800 * _G, 141 * _G, "H200", ("NVL",)),
    )
}


def gpu_of(name: str) -> Gpu:
    """The row of that name."""
    if name not in GPUS:
        raise unknown("device", name, GPUS)
    return GPUS[name]


def gpu_here(driver_name: str) -> Gpu | None:
    """The row of a device by what its driver calls it, like NVIDIA H200; None where the table has none."""
    return next(
        (gpu for gpu in GPUS.values() if gpu.mark in driver_name and not any(one in driver_name for one in gpu.other)),
        None,
    )


class Operation(NamedTuple):
    """One operation of a step: the layer it belongs to, what it computes, what it reads and writes."""

    layer: str
    is_backward: bool
    flops: int
    traffic_bytes: int
    kernels: int = 1


class LayerTime(NamedTuple):
    forward_s: float
    backward_s: float


def operation_s(operation: Operation, gpu: Gpu, precision: str) -> float:
    reached = ARITHMETIC.get(precision, ARITHMETIC["half"])
    computing_s = operation.flops / (gpu.peak(precision) * reached)
    moving_s = operation.traffic_bytes / (gpu.bytes_per_s * BANDWIDTH)
    return operation.kernels * KERNEL_S + max(computing_s, moving_s)


def modelled(operations: Iterable[Operation], gpu: Gpu, precision: str) -> dict[str, LayerTime]:
    """Seconds of each layer, in the order in which they come."""
    found: dict[str, LayerTime] = {}
    for one in operations:
        before = found.get(one.layer, LayerTime(0.0, 0.0))
        seconds = operation_s(one, gpu, precision)
        found[one.layer] = before._replace(
            **({"backward_s": before.backward_s + seconds} if one.is_backward else
               {"forward_s": before.forward_s + seconds})
        )  # fmt: skip
    return found


def update_s(parameters: int, tensors_of_state: int, gpu: Gpu) -> float:
    """Seconds of a fused update in float32: weights and state are read and written, gradients are copied into one
    vector, looked over for infinities, and read."""
    traffic = 4 * parameters * (2 * (1 + tensors_of_state) + 4)
    return 3 * KERNEL_S + traffic / (gpu.bytes_per_s * BANDWIDTH)


# --- computing and communicating ----------------------------------------------------------------------------------


class GradientReady(NamedTuple):
    """A layer's gradient: seconds since backward began at which it is there, and its bytes."""

    after_s: float
    size_bytes: int


def reduced_bytes(size_bytes: float, learners: int) -> float:
    """What each of so many learners sends, and receives, to all-reduce so much: 2 (P - 1) / P of it."""
    return 2 * (learners - 1) / learners * size_bytes


def link_needed(gradients: Sequence[GradientReady], backward_s: float, learners: int) -> float:
    """Bytes a second, each way, at which every gradient but the last one is reduced before backward ends.

    Gradients leave one after the other, each as soon as it is there. The one that is there last cannot hide: nothing is
    computed after it.
    """
    order = sorted(gradients)[:-1]
    left = sum(one.size_bytes for one in order)
    needed = 0.0
    for one in order:
        time_s = backward_s - one.after_s
        if time_s > 0:
            needed = max(needed, reduced_bytes(left, learners) / time_s)
        left -= one.size_bytes
    return needed
