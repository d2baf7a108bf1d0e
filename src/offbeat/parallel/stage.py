"""One stage of a pipeline: some pieces of a model, and what it holds of the microbatches that are under way.

Laws. Gradients add up in the order in which backward passes come. What a forward pass keeps is given back by the
backward pass, or by the second half of it. A stage knows its pieces and their places, not its neighbours, ranks or
messages. A piece does not write into its input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from offbeat.parallel.microbatches import drawn_by_place

LossSum = Callable[[Tensor, Tensor], Tensor]  # outputs and targets of a microbatch: the sum over what is learnt


class _Held(NamedTuple):
    """Of a microbatch, from its forward pass on."""

    given: Tensor
    made: Tensor
    gradient: Tensor | None = None  # of what was made; from the first half of a backward pass to the second


class Stage:
    """`places` are those of its pieces in the model."""

    def __init__(self, pieces: Sequence[nn.Module], places: Sequence[int], *, seed: int = 0) -> None:
        self.pieces = nn.ModuleList(pieces)
        self.places = tuple(places)
        self.seed = seed
        self.update = 0
        self.held: dict[int, _Held] = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [one for one in self.pieces.parameters() if one.requires_grad]

    def forward(self, microbatch: int, given: Tensor) -> Tensor:
        """What the next stage needs."""
        given = given.detach()
        if self.places[0] > 0:  # what the first one is given is data
            given.requires_grad_()
        value = given
        for place, piece in zip(self.places, self.pieces, strict=True):
            with drawn_by_place(self.seed, self.update, microbatch, place):
                value = piece(value)
        self.held[microbatch] = _Held(given, value)
        return value.detach()

    def forward_to_loss(self, microbatch: int, given: Tensor, targets: Tensor, loss: LossSum, share: float) -> Tensor:
        """The last stage: the loss of a microbatch, of which `share` counts."""
        self.forward(microbatch, given)
        held = self.held[microbatch]
        value = loss(held.made, targets) * share
        self.held[microbatch] = held._replace(made=value)
        return value.detach()

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """The gradients of its inputs, if they have any; those of its weights are added."""
        held = self.held.pop(microbatch)
        if held.made.requires_grad:
            torch.autograd.backward(held.made, gradient)
        return held.given.grad

    def backward_input(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Only the gradients of its inputs; the weights follow in `backward_weight`."""
        held = self.held[microbatch]
        known = torch.ones_like(held.made) if gradient is None else gradient
        self.held[microbatch] = held._replace(gradient=known)
        if not held.given.requires_grad:
            return None
        (found,) = torch.autograd.grad(held.made, [held.given], known, retain_graph=True)
        return found

    def backward_weight(self, microbatch: int) -> None:
        held = self.held.pop(microbatch)
        own = self.parameters if held.made.requires_grad else []
        if not own:
            return
        for one, found in zip(own, torch.autograd.grad(held.made, own, held.gradient, allow_unused=True), strict=True):
            if found is not None:
                one.grad = found if one.grad is None else one.grad + found
