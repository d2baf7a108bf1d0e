"""What can be called: kinds of collectives, reductions, and one call with its tensors."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from offbeat.codecs import Codec
from offbeat.collectives.sync import Patience
from offbeat.errors import RequestError
from offbeat.schedules import Schedule, Transfer, build, verify
from offbeat.schedules.ir import chunk_sizes, renumbered
from offbeat.schedules.projection import Program, project

Into = Callable[[Tensor, Tensor], object]  # (mine, theirs): theirs goes into mine

KINDS = (
    "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "barrier",
)  # fmt: skip
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
_DTYPE_NUMBER = {dtype: number for number, dtype in enumerate(DTYPES)}


copy: Into = Tensor.copy_


def _minimum(mine: Tensor, theirs: Tensor) -> None:
    torch.minimum(mine, theirs, out=mine)


def _maximum(mine: Tensor, theirs: Tensor) -> None:
    torch.maximum(mine, theirs, out=mine)


REDUCTIONS: dict[str, Into] = {
    "sum": Tensor.add_,
    "mean": Tensor.add_,  # and a division at the end
    "product": Tensor.mul_,
    "min": _minimum,
    "max": _maximum,
    "and": Tensor.bitwise_and_,
    "or": Tensor.bitwise_or_,
    "xor": Tensor.bitwise_xor_,
}
_REDUCTION_NUMBER = {name: number for number, name in enumerate(("", *REDUCTIONS))}


@cache
def check_reduction(name: str, dtype: torch.dtype) -> Into:
    """The operation, shown to work on items of this type before anybody is kept waiting for it."""
    if dtype not in _DTYPE_NUMBER:
        raise RequestError(f"tensors of {dtype} cannot be reduced")
    try:
        one = torch.ones(1, dtype=dtype)
        REDUCTIONS[name](one, torch.ones(1, dtype=dtype))
        if name == "mean":
            mean_of(one, 1)
    except (RuntimeError, NotImplementedError) as error:
        raise RequestError(f"{name} is not supported for {dtype}: {str(error).splitlines()[0]}") from None
    return REDUCTIONS[name]


def mean_of(total: Tensor, ranks: int) -> None:
    """What is left of a mean when the sum is there."""
    whole_numbers = not (total.is_floating_point() or total.is_complex())
    total.div_(ranks, rounding_mode="trunc" if whole_numbers else None)


@dataclass(slots=True, kw_only=True)
class Call:
    """One call of a collective on one rank.

    Chunk c has `sizes[c]` items (bytes, where they are only moved). What this rank starts with in chunk c is
    `give[c]`, what it ends with goes to `take[c]`, which a reduction starts from; both flat. `take` also has the chunks
    that this rank only passes on. Where one flat tensor is both, cut as the schedule cuts, it is `whole`, and `place`
    says where it is in shared memory (buffer, bytes), if so. Where the plan is coded, `codec` is what it is coded with,
    `residual` what was not sent before, of the size of `whole`, and `seed` chooses random numbers.
    """

    plan: Plan
    dtype: torch.dtype
    what: int
    items: int
    sizes: tuple[int, ...]
    reduction: str = ""
    into: Into = copy
    detail: int = 0
    whole: Tensor | None = None
    place: tuple[int, int] | None = None
    give: Mapping[int, Tensor] = field(default_factory=dict)
    take: dict[int, Tensor] = field(default_factory=dict)
    since_ns: int = 0
    iteration: int = -1
    codec: Codec | None = None
    residual: Tensor | None = None
    seed: int = 0

    def __str__(self) -> str:
        return describe(self.what, self.items)


@cache
def number_of(kind: str, reduction: str, dtype: torch.dtype) -> int:
    """Kind, reduction and type in one number, for notes."""
    if dtype not in _DTYPE_NUMBER:
        raise RequestError(f"tensors of {dtype} cannot be sent")
    return KINDS.index(kind) << 16 | _REDUCTION_NUMBER[reduction] << 8 | _DTYPE_NUMBER[dtype]


def describe(what: int, items: int) -> str:
    """The number in words: `all_reduce(sum) of 12 float32`."""
    try:
        kind, reduction, dtype = KINDS[what >> 16], ("", *REDUCTIONS)[what >> 8 & 255], DTYPES[what & 255]
    except IndexError:
        return "an unknown call"
    if kind == "barrier":
        return "barrier"
    return f"{kind}{f'({reduction})' if reduction else ''} of {items} {str(dtype).removeprefix('torch.')}"


class Plan:
    """A schedule that was proved. Plans are compared by identity."""

    def __init__(self, schedule: Schedule, order: Sequence[int] | None = None) -> None:
        self.schedule = schedule
        name = f"{schedule.name} {schedule.collective} {schedule.ranks} {schedule.root} {order or ''}"
        self.way = zlib.crc32(name.encode())  # two ranks that go different ways notice


@cache
def program_of(way: Plan, rank: int, hosts: tuple[int, ...] | None = None) -> Program:
    """What a rank does of a plan."""
    return project(way.schedule, rank, hosts)


@cache
def exposed_by(way: Plan, rank: int, hosts: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The chunks that others of its host read from a rank, as they are."""
    return _read_from(way, rank, hosts, coded=False)


@cache
def payloads_read_from(way: Plan, rank: int, hosts: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The chunks of which others of its host read the payload from a rank."""
    return _read_from(way, rank, hosts, coded=True) if way.schedule.steps.codecs else ()


def _read_from(way: Plan, rank: int, hosts: tuple[int, ...] | None, *, coded: bool) -> tuple[int, ...]:
    steps = way.schedule.steps
    rows = steps.table[(steps.codec > 0) == coded] if steps.codecs else steps.table
    rows = rows[rows[:, 0] == rank]
    if hosts is not None:
        rows = rows[[hosts[target] == hosts[rank] for target in rows[:, 1].tolist()]]
    return tuple(sorted(set(rows[:, 2].tolist())))


@cache
def plan(
    line: str,
    collective: str,
    ranks: int,
    root: int = 0,
    order: tuple[int, ...] | None = None,
    hosts: tuple[int, ...] | None = None,
) -> Plan:
    """The plan of a line. Where an `order` is given, rank order[r] does what the schedule has rank r do.

    `hosts[r]` is the host of rank r, for codecs that are used between hosts only.
    """
    if collective == "barrier":
        return Plan(Schedule("direct", "barrier", ranks, 1, []))
    place = root if order is None else order.index(root)
    on = None if hosts is None else [hosts[rank] for rank in order or range(ranks)]
    schedule = build(line, ranks=ranks, collective=collective, root=place, hosts=on)
    if order is not None:
        schedule = renumbered(schedule, order)
    verify(schedule)
    return Plan(schedule, order)


@cache
def shifted(leaders: tuple[int, ...], shift: int, ranks: int) -> Plan:
    """One rank of each host sends its chunk to that of the host `shift` further on: for measuring."""
    to = leaders[shift:] + leaders[:shift]
    steps = [[Transfer(one, other, chunk, False) for chunk, (one, other) in enumerate(zip(leaders, to, strict=True))]]
    return Plan(Schedule(f"shift-{shift}", "shift", ranks, len(leaders), steps))


cut = lru_cache(1024)(chunk_sizes)  # as every schedule cuts a vector


# --- the caller's tensors as flat ones, whatever their shape, strides or device ---------------------------------------


class Flat:
    """A flat tensor that is the caller's memory, or, where that is not in one piece, a copy of it.

    `load()` brings the caller's values into a copy, `back()` a copy's values to the caller. Both are for when the call
    is run, not for when it is made: a call before it may still change the tensor.
    """

    __slots__ = ("_target", "tensor")

    def __init__(self, tensor: Tensor, target: Tensor | None = None) -> None:
        self.tensor = tensor
        self._target = target

    def load(self) -> None:
        if self._target is not None:
            self._shaped(self._target).copy_(self._target)

    def back(self) -> None:
        if self._target is not None:
            self._target.copy_(self._shaped(self._target))

    def _shaped(self, like: Tensor) -> Tensor:
        typed = self.tensor if self.tensor.dtype == like.dtype else self.tensor.view(like.dtype)
        return typed.view(like.shape)


def flat_of(tensor: Tensor, *, on_cpu: bool = False, apart: bool = False, written: bool = False) -> Flat:
    """Flat, of the same type. `on_cpu` makes a copy of a GPU's tensor, in pinned memory, `apart` of any.

    A tensor that is to be `written` must have a place for each of its items.
    """
    tensor = _plain(tensor)
    if written and any(step == 0 and side > 1 for step, side in zip(tensor.stride(), tensor.shape, strict=True)):
        raise RequestError("cannot write to an expanded tensor, whose items share memory; use .contiguous()")
    here = not apart and (not on_cpu or tensor.device.type == "cpu")
    if here and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        # An alias past autograd: the caller may reduce a leaf, or an inference tensor, in place.
        return Flat(_alias(tensor, (tensor.numel(),), (1,)))
    device, pinned = "cpu" if on_cpu else tensor.device, on_cpu and tensor.is_cuda
    with torch.inference_mode(False):
        return Flat(torch.empty(tensor.numel(), dtype=tensor.dtype, device=device, pin_memory=pinned), tensor)


def _plain(tensor: Tensor) -> Tensor:
    """Without autograd; an inference tensor as an ordinary one, since another thread may have to write to it."""
    return _alias(tensor, tensor.shape, tensor.stride()) if tensor.is_inference() else tensor.detach()


def _alias(tensor: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tuple(shape), tuple(stride))


def bytes_of(tensor: Tensor, *, on_cpu: bool = False, apart: bool = False, written: bool = False) -> Flat:
    """As bytes, for what is only moved: any type of item will do."""
    flat = flat_of(tensor, on_cpu=on_cpu, apart=apart, written=written)
    with torch.inference_mode(False):
        flat.tensor = flat.tensor.view(torch.uint8)
    return flat


# --- the seam ---------------------------------------------------------------------------------------------------------


class Runner(Protocol):
    """The seam for collectives: whoever can run a call, over whatever transport. On one host it is the executor."""

    calls: int  # begun so far

    def run(self, call: Call, patience: Patience) -> None:
        """The whole of one call, in the order of calls; `PeerError` if a rank fails it."""

    def forget(self) -> None:
        """Let go of memory."""


class MessagePort(Protocol):
    """The seam for messages."""

    def send(self, payload: Tensor, to: int, tag: int) -> Any: ...
    def receive(self, flat: Flat, source: int | None, tag: int, timeout_s: float | None = None) -> Any: ...
    def close(self) -> None: ...
