"""The caller's tensors as flat ones, whatever their shape, strides or device."""

from __future__ import annotations

from collections.abc import Sequence

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
    tensor = _plain(tensor)
    if written and any(step == 0 and side > 1 for step, side in zip(tensor.stride(), tensor.shape, strict=True)):
        raise RequestError("a tensor whose items share their memory (an expanded one) cannot be written to")
    here = not apart and (not on_cpu or tensor.device.type == "cpu")
    if here and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        # An alias past autograd: the caller may reduce a leaf, or an inference tensor, in place.
        return Flat(_alias(tensor, (tensor.numel(),), (1,)))
    device = "cpu" if on_cpu else tensor.device
    with torch.inference_mode(False):
        return Flat(torch.empty(tensor.numel(), dtype=tensor.dtype, device=device), tensor)


def _plain(tensor: Tensor) -> Tensor:
    """Without autograd; an inference tensor as an ordinary one, since another thread may have to write to it."""
    return _alias(tensor, tensor.shape, tensor.stride()) if tensor.is_inference() else tensor.detach()


def _alias(tensor: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tuple(shape), tuple(stride))


def bytes_of(tensor: Tensor, *, apart: bool = False, written: bool = False) -> Flat:
    """As bytes, for what is only moved: any type of item will do."""
    flat = flat_of(tensor, apart=apart, written=written)
    with torch.inference_mode(False):
        flat.tensor = flat.tensor.view(torch.uint8)
    return flat
