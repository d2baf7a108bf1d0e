"""What this rank has not sent yet of each tensor that it reduces again and again (error feedback).

A tensor is known by its memory: the buckets of DDP stay where they are, or are moved with their storage. What is kept
for a tensor that is gone is forgotten, and counted. The order in which tensors were first seen is the same on all ranks
and in a run that goes on, so a checkpoint has them by that order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from offbeat.errors import RequestError

_ALIKE = ("start", "sent")  # that all ranks have the same of
_ALSO = (*_ALIKE, "velocity")  # beside the residual, in a checkpoint


@dataclass(slots=True)
class Kept:
    """Of one tensor: what was not sent, how many calls it was in, and what a low-rank codec starts from."""

    items: int
    calls: int = 0
    residual: Tensor | None = None
    start: Tensor | None = None
    shapes: tuple[tuple[int, ...], ...] = ()  # of the tensors that it is made of, where they are known
    momentum: float = 0.0  # of the optimizer, where codecs are to send velocities; see `momentum`
    velocity: Tensor | None = None
    sent: Tensor | None = None  # the sum of the last call

    def biases(self) -> list[slice]:
        """Where the tensors of one dimension or none are."""
        found, start = [], 0
        for shape in self.shapes:
            if len(shape) < 2:
                found.append(slice(start, start + math.prod(shape)))
            start += math.prod(shape)
        return found

    def values(self, items: int | None = None) -> Tensor:
        """The residual, which begins with zeros; of so many items, where a codec needs more than the tensor has."""
        wanted = self.items if items is None else items
        if self.residual is None or len(self.residual) < wanted:
            before, self.residual = self.residual, torch.zeros(wanted)
            if before is not None:  # by another codec
                self.residual[: self.items] = before[: self.items]
        return self.residual[:wanted]


class Residuals:
    """By tensor; see the module's text."""

    def __init__(self) -> None:
        self.lost = 0  # tensors that were gone with something that was not sent
        self._kept: dict[tuple[int, int, int], tuple[StorageWeakRef, Kept]] = {}
        self._given: list[Kept] = []  # from a checkpoint, for the tensors to come

    def of(self, tensor: Tensor) -> Kept:
        """What is kept for a tensor."""
        storage = tensor.untyped_storage()
        key = storage._cdata, int(tensor.storage_offset()), tensor.numel()
        known = self._kept.get(key)
        if known is None or known[0].expired():  # type: ignore[no-untyped-call] # torch's
            self._sweep()
            known = StorageWeakRef(storage), self._next(tensor.numel())  # type: ignore[no-untyped-call] # torch's
            self._kept[key] = known
        return known[1]

    def _next(self, items: int) -> Kept:
        if not self._given:
            return Kept(items)
        kept = self._given.pop(0)
        if kept.items != items:
            raise RequestError(
                f"the checkpoint has a residual of {kept.items} items where this run reduces a tensor of {items}; "
                "resume with the same model and the same torch"
            )
        return kept

    def _sweep(self) -> None:
        for key in [key for key, (weak, _) in self._kept.items() if weak.expired()]:  # type: ignore[no-untyped-call] # torch's
            _, gone = self._kept.pop(key)
            self.lost += gone.residual is not None

    def clear(self) -> None:
        """Forget everything: what follows is the first call of each tensor."""
        self._kept.clear()
        self._given.clear()

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint: by the order in which tensors were first seen."""
        found: dict[str, Tensor] = {}
        alive = [kept for weak, kept in self._kept.values() if not weak.expired()]  # type: ignore[no-untyped-call] # torch's
        for number, kept in enumerate(alive):
            found[f"{number}.calls"] = torch.tensor([kept.items, kept.calls])
            if kept.residual is not None:
                found[f"{number}.residual"] = kept.residual
            for name in _ALSO:
                tensor = getattr(kept, name)
                if tensor is not None:
                    found[f"{number}.{name}"] = tensor
        return found

    def load(self, state: Mapping[str, Tensor], *, own: bool = True) -> None:
        """From a checkpoint, for the tensors to come. What is not this rank's `own` is of another rank, and of it only
        what all ranks have alike is taken: by it they choose places and steps, and have to choose alike.
        """
        self.clear()
        number = 0
        while f"{number}.calls" in state:
            items, calls = (int(count) for count in state[f"{number}.calls"])
            kept = Kept(items, calls)
            for name in ("residual", *_ALSO) if own else _ALIKE:
                if f"{number}.{name}" in state:
                    setattr(kept, name, state[f"{number}.{name}"].clone())
            self._given.append(kept)
            number += 1
