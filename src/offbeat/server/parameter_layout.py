"""The flat vector: which parameter lies where, in which group, on which shard.

All that is trained lies one behind the other, group by group, in the order of the optimizer. Beside it lies what is
only handed to who joins: frozen parameters and floating-point buffers. Shards are cut at whole blocks, whose length
depends on the model alone, so that sums over blocks do not depend on the number of shards.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from offbeat.errors import RequestError

MOST_BLOCKS = 1024
MOST_TENSORS, MOST_GROUPS = 10_000, 400  # so that every message fits
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


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


@torch.no_grad()
def write_tensors(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    """The flat vector, into the tensors of a model."""
    for part, tensor in zip(views(vector, tensors), tensors, strict=True):
        tensor.copy_(part)


def model_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[ModelTensors, tuple[int, ...]]:
    """What is trained, group by group, and the group of each; then what is not."""
    trained: list[nn.Parameter] = []
    groups: list[int] = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad:
                trained.append(parameter)
                groups.append(number)
    if not trained:
        raise RequestError("the optimizer has no parameter that is trained")
    mine = {id(parameter) for parameter in model.parameters()}
    for parameter in trained:
        if id(parameter) not in mine:
            shape = "x".join(map(str, parameter.shape))
            raise RequestError(f"the optimizer has a parameter ({shape}) that is not one of the model's")
    seen = {id(parameter) for parameter in trained}
    forgotten = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in seen]
    if forgotten:
        raise RequestError(
            f"'{forgotten[0]}' is trained by no group of the optimizer: give it to one, or freeze it "
            "(requires_grad_(False))"
        )
    extra: list[Tensor] = [p for p in model.parameters() if id(p) not in seen]
    extra += list(model.buffers())
    wide = any(parameter.dtype == torch.float64 for parameter in trained)
    held = (torch.float32, torch.float16, torch.bfloat16, *((torch.float64,) if wide else ()))
    extra = [tensor for tensor in extra if tensor.dtype in held]  # others would be rounded: each learner keeps its own
    return ModelTensors(tuple(trained), tuple(extra)), tuple(groups)


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
) -> ParameterLayout:
    """The layout of a model; `gradients` is the type in which gradients travel (default: that of the weights)."""
    types = {parameter.dtype for parameter in parts.trained}
    odd = [str(one) for one in types if not one.is_floating_point]
    if odd:
        raise RequestError(f"parameters of type {', '.join(odd)} cannot be trained on a server")
    if torch.float64 in types and len(types) > 1:
        raise RequestError("the model mixes float64 with other types; a server keeps one: float32 or float64")
    dtype = "float64" if torch.float64 in types else "float32"
    travel = gradients or dtype
    if travel not in DTYPES:
        raise RequestError(f"gradients travel as {', '.join(DTYPES)}; got '{travel}'")
    if len(parts.trained) > MOST_TENSORS or len(set(groups)) > MOST_GROUPS:
        raise RequestError(
            f"a model has at most {MOST_TENSORS} parameters in {MOST_GROUPS} groups here; this one has "
            f"{len(parts.trained)} in {len(set(groups))}"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    if in_place and any(str(p.dtype) != f"torch.{dtype}" or p.device.type != "cpu" for p in parts.trained):
        raise RequestError(f"in_place is for parameters of one type, {dtype}, in the processor's memory")
    text = [f"{rule} {states} {dtype} {travel} {clip_norm} {in_place}"]
    text += [
        f"{names[id(p)]} {tuple(p.shape)} {p.dtype} {group}" for p, group in zip(parts.trained, groups, strict=True)
    ]
    text += [f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in parts.extra]
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
    )
