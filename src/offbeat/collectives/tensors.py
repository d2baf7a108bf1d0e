"""The caller's tensors as flat ones, whatever their shape, strides or device."""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.errors import RequestError


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
    """Flat, of the same type. `on_cpu` makes a copy of a GPU's tensor, `apart` of any.

    A tensor that is to be `written` must have a place for each of its items.
    """
    tensor = tensor.detach()
    if written and any(step == 0 and side > 1 for step, side in zip(tensor.stride(), tensor.shape, strict=True)):
        raise RequestError("a tensor whose items share their memory (an expanded one) cannot be written to")
    here = not apart and (not on_cpu or tensor.device.type == "cpu")
    if here and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        # An alias past autograd: the caller may reduce a leaf, or an inference tensor, in place.
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return Flat(alias.set_(tensor.untyped_storage(), tensor.storage_offset(), (tensor.numel(),), (1,)))
    return Flat(torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu" if on_cpu else tensor.device), tensor)


def bytes_of(tensor: Tensor, *, apart: bool = False, written: bool = False) -> Flat:
    """As bytes, for what is only moved: any type of item will do."""
    flat = flat_of(tensor, apart=apart, written=written)
    flat.tensor = flat.tensor.view(torch.uint8)
    return flat
