"""The caller's tensors as flat ones, whatever their shape, strides or device."""

from __future__ import annotations

import torch
from torch import Tensor


class Flat:
    """A flat tensor that is the caller's memory, or, where that is not in one piece, a copy of it.

    `back()` brings a copy's values to the caller's tensor.
    """

    __slots__ = ("_target", "tensor")

    def __init__(self, tensor: Tensor, target: Tensor | None) -> None:
        self.tensor = tensor
        self._target = target

    def back(self) -> None:
        if self._target is not None:
            source = self.tensor if self.tensor.dtype == self._target.dtype else self.tensor.view(self._target.dtype)
            self._target.copy_(source.view(self._target.shape))


def flat_of(tensor: Tensor, *, on_cpu: bool = False, fill: bool = True) -> Flat:
    """Flat, of the same type. A copy has the tensor's values if `fill`; `on_cpu` makes one of a GPU's tensor."""
    tensor = tensor.detach()
    here = not on_cpu or tensor.device.type == "cpu"
    if here and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        # An alias past autograd: the caller may reduce a leaf, or an inference tensor, in place.
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return Flat(alias.set_(tensor.untyped_storage(), tensor.storage_offset(), (tensor.numel(),), (1,)), None)
    copy = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu" if on_cpu else tensor.device)
    if fill:
        copy.view(tensor.shape).copy_(tensor)
    return Flat(copy, tensor)


def bytes_of(tensor: Tensor, *, fill: bool = True) -> Flat:
    """As bytes, for what is only moved: any type of item will do."""
    flat = flat_of(tensor, fill=fill)
    flat.tensor = flat.tensor.view(torch.uint8)
    return flat
