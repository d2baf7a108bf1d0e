"""The flat vector: which parameter lies where, in which group, on which shard.

All that is trained lies one behind the other, group by group, in the order of the optimizer. Beside it lies what is
only handed to who joins: frozen parameters and floating-point buffers. Shards are cut at whole blocks, whose length
depends on the model alone, so that sums over blocks do not depend on the number of shards.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from offbeat.errors import RequestError

MOST_BLOCKS = 1024
MOST_TENSORS, MOST_GROUPS = 10_000, 400  # so that every message fits
MOST_ROWS = 2**31 - 1  # of an embedding: their numbers are int32
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


class RowTable(NamedTuple):
    """A parameter of which only rows are pushed: an embedding with sparse gradients."""

    parameter: int  # its number
    start: int  # in the flat vector
    rows: int
    width: int  # items in a row

    @property
    def end(self) -> int:
        return self.start + self.rows * self.width


class ParameterLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What lies in the flat vector. `digest` names it: two learners with the same digest have the same model."""

    sizes: tuple[int, ...]  # of each trained parameter, in items
    groups: tuple[int, ...]  # of each
    extra: int  # items that are not trained
    dtype: str  # of the weights
    gradients: str  # of what is pushed
    rule: str
    states: tuple[str, ...]
    clip_norm: float  # of the mean gradient of an update; 0: it is not clipped
    in_place: bool  # learners have the weights where the servers have them
    digest: str
    widths: tuple[int, ...] = ()  # of each: items in a row, where only rows are pushed; 0: all of it. None: all whole

    @property
    def items(self) -> int:
        return sum(self.sizes)

    @property
    def block(self) -> int:
        """Items in a block: a power of two, at least 16, so that there are at most `MOST_BLOCKS`."""
        return max(16, 1 << max(0, -(-self.items // MOST_BLOCKS) - 1).bit_length())

    def shard(self, shard: int, shards: int) -> tuple[int, int]:
        """Where a shard begins and ends."""
        blocks = -(-self.items // self.block)
        first, last = shard * blocks // shards, (shard + 1) * blocks // shards
        return min(first * self.block, self.items), min(last * self.block, self.items)

    def offsets(self) -> list[int]:
        """Where each parameter begins."""
        return [0, *accumulate(self.sizes)][:-1]

    def row_tables(self) -> tuple[RowTable, ...]:
        """The parameters of which only rows are pushed, in the order of the vector."""
        return tuple(
            RowTable(index, offset, size // width, width)
            for index, (offset, size, width) in enumerate(zip(self.offsets(), self.sizes, self.widths, strict=False))
            if width
        )

    def _row_sizes(self) -> Iterable[tuple[int, int]]:
        return zip(self.widths, self.sizes, strict=False)

    def check(self) -> None:
        """`RequestError` where a layout, from whomever, is none."""
        sound = (
            len(self.sizes) == len(self.groups) > 0
            and min(self.sizes) >= 0
            and 0 < self.items < 2**40
            and 0 <= self.extra < 2**40
            and list(self.groups) == sorted(self.groups)
            and self.dtype in ("float32", "float64")
            and self.gradients in DTYPES
            and 0 <= self.clip_norm < math.inf
            and len(self.widths) in (0, len(self.sizes))
            and all(width >= 0 and (not width or (size and size % width == 0)) for width, size in self._row_sizes())
            and all(one.rows <= MOST_ROWS for one in self.row_tables())
        )
        if not sound:
            raise RequestError("not the layout of a model: sizes, groups and types do not fit together")


class ModelTensors(NamedTuple):
    """The tensors of a model as they lie in the vector."""

    trained: tuple[nn.Parameter, ...]
    extra: tuple[Tensor, ...]


def views(vector: Tensor, tensors: Iterable[Tensor]) -> list[Tensor]:
    """The parts of a flat vector that these tensors lie in, one behind the other, in their shapes."""
    found, start = [], 0
    for tensor in tensors:
        found.append(vector[start : start + tensor.numel()].view(tensor.shape))
        start += tensor.numel()
    return found


@torch.no_grad()
def read_tensors(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    """The tensors of a model, into the flat vector."""
    for part, tensor in zip(views(vector, tensors), tensors, strict=True):
        part.copy_(tensor)


def write_tensors(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    """The flat vector, into the tensors of a model."""
    copy_tensors(views(vector, tensors), tensors)


@torch.no_grad()
def copy_tensors(sources: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Each into its own; by one call for all, since for small ones the calls are what takes the time."""
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    if tensors:
        torch._foreach_copy_(tuple(tensors), tuple(sources), non_blocking=bool(devices))
    for device in devices:  # the sources are read by then, and may change
        torch.cuda.current_stream(device).synchronize()


def _refuse(*faults: tuple[object, str]) -> None:
    """`RequestError` with the words of the first fault that there is."""
    found = [words for there, words in faults if there]
    if found:
        raise RequestError(found[0])


def model_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[ModelTensors, tuple[int, ...]]:
    """What is trained, group by group, and the group of each; then what is not."""
    numbered: list[tuple[nn.Parameter, int]] = [
        (parameter, number)
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if parameter.requires_grad
    ]
    trained = tuple(parameter for parameter, _ in numbered)
    mine, seen = {id(parameter) for parameter in model.parameters()}, {id(parameter) for parameter in trained}
    foreign = ["x".join(map(str, parameter.shape)) for parameter in trained if id(parameter) not in mine]
    forgotten = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in seen]
    _refuse(
        (not trained, "the optimizer has no parameter that requires a gradient"),
        (foreign, f"the optimizer has a parameter ({''.join(foreign[:1])}) that is not one of the model's"),
        (
            forgotten,
            f"'{''.join(forgotten[:1])}' is in no group of the optimizer; add it to one, or freeze it with "
            "requires_grad_(False)",
        ),
    )
    rest = [*(p for p in model.parameters() if id(p) not in seen), *model.buffers()]
    wide = any(parameter.dtype == torch.float64 for parameter in trained)
    held = (torch.float32, torch.float16, torch.bfloat16, *((torch.float64,) if wide else ()))
    extra = tuple(tensor for tensor in rest if tensor.dtype in held)  # others would be rounded: each keeps its own
    return ModelTensors(trained, extra), tuple(number for _, number in numbered)


def row_parameters(model: nn.Module, parts: ModelTensors) -> frozenset[int]:
    """The parameters of which only rows are pushed: those of embeddings with sparse gradients."""
    sparse = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    return frozenset(
        index for index, one in enumerate(parts.trained) if id(one) in sparse and one.dim() == 2 and one.numel()
    )


def layout_of(
    model: nn.Module,
    parts: ModelTensors,
    groups: tuple[int, ...],
    *,
    rule: str,
    states: tuple[str, ...],
    gradients: str | None = None,
    clip_norm: float = 0.0,
    in_place: bool = False,
    rows: frozenset[int] = frozenset(),
) -> ParameterLayout:
    """The layout of a model; `gradients` is the type in which gradients travel (default: that of the weights), `rows`
    the parameters of which only rows are pushed."""
    types = {parameter.dtype for parameter in parts.trained}
    odd = [str(one) for one in types if not one.is_floating_point]
    dtype = "float64" if torch.float64 in types else "float32"
    travel = gradients or dtype
    too_many = len(parts.trained) > MOST_TENSORS or len(set(groups)) > MOST_GROUPS
    elsewhere = any(str(p.dtype) != f"torch.{dtype}" or p.device.type != "cpu" for p in parts.trained)
    _refuse(
        (odd, f"parameters of type {', '.join(odd)} cannot be trained on a server"),
        (
            torch.float64 in types and len(types) > 1,
            "the model mixes float64 with other types; a server needs all float32 or all float64",
        ),
        (travel not in DTYPES, f"gradients can be sent as {', '.join(DTYPES)}; got '{travel}'"),
        (
            too_many,
            f"a model has at most {MOST_TENSORS} parameters in {MOST_GROUPS} groups here; this one has "
            f"{len(parts.trained)} in {len(set(groups))}",
        ),
        (
            in_place and elsewhere,
            f"in_place needs parameters of one type, {dtype}, in CPU memory",
        ),
    )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    text = [f"{rule} {states} {dtype} {travel} {clip_norm} {in_place}"]
    text += [
        f"{names[id(p)]} {tuple(p.shape)} {p.dtype} {group}" for p, group in zip(parts.trained, groups, strict=True)
    ]
    text += [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in parts.extra]
    widths = tuple(p.shape[1] if at in rows else 0 for at, p in enumerate(parts.trained)) if rows else ()
    text += [f"rows {widths}"] if rows else []
    return ParameterLayout(
        sizes=tuple(p.numel() for p in parts.trained),
        groups=groups,
        extra=sum(tensor.numel() for tensor in parts.extra),
        dtype=dtype,
        gradients=travel,
        rule=rule,
        states=states,
        clip_norm=clip_norm,
        in_place=in_place,
        digest=hashlib.sha256("\n".join(text).encode()).hexdigest()[:32],
        widths=widths,
    )


# --- an optimizer's state, as torch keeps it for each parameter and as the servers do: vectors for all of them -------
# Law: what `state_to_vectors` makes of a state, `state_from_vectors` makes into the same state again, bit for bit.


@torch.no_grad()
def state_to_vectors(
    trained: Sequence[nn.Parameter],
    state: Mapping[Tensor, Mapping[str, Any]],
    names: Sequence[str],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Weights and state, as `Arena.current` gives them; `names` are the vectors of the rule."""
    items = sum(parameter.numel() for parameter in trained)
    vectors = {key: torch.zeros(items, dtype=dtype) for key in ("weights", *(f"state.{name}" for name in names))}
    read_tensors(vectors["weights"], trained)
    parts = {name: views(vectors[f"state.{name}"], trained) for name in names}
    steps = torch.zeros(len(trained), dtype=torch.int64)
    for index, parameter in enumerate(trained):
        mine = state.get(parameter, {})
        for name in names:
            if mine.get(name) is not None:
                parts[name][index].copy_(mine[name])
                steps[index] = 1  # SGD does not count; that its momentum has begun is all that matters
        if "step" in mine:
            steps[index] = int(mine["step"])
    return {**vectors, "steps": steps}


def state_from_vectors(
    trained: Sequence[nn.Parameter], kept: Mapping[str, Tensor], *, counts: bool
) -> dict[Tensor, dict[str, Tensor]]:
    """The state of each parameter that has made a step; `counts`: whether the optimizer keeps their number."""
    found: dict[Tensor, dict[str, Tensor]] = {}
    parts = {name[6:]: views(vector, trained) for name, vector in kept.items() if name.startswith("state.")}
    for index, (parameter, steps) in enumerate(zip(trained, kept["steps"].tolist(), strict=True)):
        if steps:
            found[parameter] = {"step": torch.tensor(float(steps))} if counts else {}
            for name, pieces in parts.items():
                found[parameter][name] = pieces[index].to(parameter.device, parameter.dtype, copy=True)
    return found
