"""One stage of a pipeline: some pieces of a model, and what it holds of the microbatches that are under way.

Laws. Gradients add up in the order in which backward passes come. What a forward pass keeps is given back by the
backward pass, or by the second half of it. A stage knows its pieces and their places, not its neighbours, ranks or
messages. A piece that writes into its input is given a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from offbeat.parallel.microbatches import drawn_by_place
from offbeat.parallel.model_pieces import writes_into_input
from offbeat.parallel.split_backward import WeightPart, backward_inputs, backward_weights

LossSum = Callable[[Tensor, Tensor], Tensor]  # outputs and targets of a microbatch: the sum over what is learnt
Around = Callable[[Tensor], AbstractContextManager[object]]  # what a microbatch is computed in: its precision
Recompute = Callable[[Callable[[Tensor], Tensor], Iterable[nn.Module], Tensor], Tensor]


class _Held(NamedTuple):
    """Of a microbatch, from its forward pass on."""

    given: Tensor
    made: Tensor
    parts: Sequence[WeightPart] = ()  # of the second half of a backward pass, after the first


class Stage:
    """`places` are those of its pieces in the model. `recompute(forward, modules, value)` computes forward and keeps no
    activations: backward computes them again."""

    def __init__(
        self,
        pieces: Sequence[nn.Module],
        places: Sequence[int],
        *,
        seed: int = 0,
        around: Around = lambda given: nullcontext(),
        recompute: Recompute | None = None,
    ) -> None:
        self.pieces = nn.ModuleList(pieces)
        self.places = tuple(places)
        self.seed, self.around, self.recompute = seed, around, recompute
        self.update = 0
        self.numbers: Sequence[int] = ()  # by which microbatches draw, instead of by their places in the minibatch
        self.held: dict[int, _Held] = {}
        self._writes = writes_into_input(self.pieces[0])

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [one for one in self.pieces.parameters() if one.requires_grad]

    def forward(self, microbatch: int, given: Tensor) -> Tensor:
        """What the next stage needs."""
        given = given.detach()
        if self.places[0] > 0:  # what the first one is given is data
            given.requires_grad_()
        number = self.numbers[microbatch] if self.numbers else microbatch
        update = self.update

        def compute(value: Tensor) -> Tensor:
            value = value.clone() if self._writes else value
            for place, piece in zip(self.places, self.pieces, strict=True):
                with drawn_by_place(self.seed, update, number, place):
                    value = piece(value)
            return value

        with self.around(given):
            value = compute(given) if self.recompute is None else self.recompute(compute, self.pieces, given)
        self.held[microbatch] = _Held(given, value)
        return value.detach() if isinstance(value, Tensor) else value

    def forward_to_loss(self, microbatch: int, given: Tensor, targets: Tensor, loss: LossSum, share: float) -> Tensor:
        """The last stage: the loss of a microbatch, of which `share` counts."""
        self.forward(microbatch, given)
        held = self.held[microbatch]
        with self.around(given):
            value = loss(held.made, targets) * share
        self.held[microbatch] = held._replace(made=value)
        return value.detach()

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """The gradients of its inputs, if they have any; those of its weights are added."""
        held = self.held.pop(microbatch)
        if held.made.requires_grad:
            torch.autograd.backward(held.made, gradient)
        found = held.given.grad
        return torch.zeros_like(held.given) if found is None and held.given.requires_grad else found

    def backward_input(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Only the gradients of its inputs; the weights follow in `backward_weight`."""
        held = self.held[microbatch]
        if not held.given.requires_grad:  # data: all is left for the second half
            known = torch.ones_like(held.made) if gradient is None else gradient
            parts = [WeightPart((get_gradient_edge(held.made),), (known,))]
            self.held[microbatch] = held._replace(parts=parts if held.made.requires_grad else ())
            return None
        if self.recompute is not None:  # each half would compute the activations again: both are done here
            found = self.backward(microbatch, gradient)
            self.held[microbatch] = _Held(held.given, held.given)
            return found
        found, parts = backward_inputs(held.made, held.given, gradient)
        self.held[microbatch] = held._replace(parts=parts)
        return found

    def backward_weight(self, microbatch: int) -> None:
        backward_weights(self.held.pop(microbatch).parts)
