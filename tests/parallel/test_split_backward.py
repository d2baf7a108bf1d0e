"""A backward pass in two halves gives the same gradients, and computes nothing twice."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from offbeat.parallel.split_backward import backward_inputs, backward_weights
from offbeat.train.models import Transformer


class Twice(nn.Module):
    """One layer that is used two times: its gradients cannot be parted."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = self.last(self.layer(torch.tanh(self.layer(given))))
        return found


class Blind(nn.Module):
    """What it makes does not depend on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 6))

    def forward(self, given: Tensor) -> Tensor:
        return self.weight * 2


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layers": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 6)), (5, 6)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3, bias=False)),
        (4, 2, 7, 7),
    ),
    "attention": (
        lambda: Transformer(7, context=6, width=8, heads=2, layers=2, tied=False, dropout=0.0).layers,
        (3, 6, 8),
    ),
    "normed weight": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), (5, 6)),
    "used twice": (Twice, (5, 6)),
    "blind": (Blind, (5, 6)),
}


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's own
    """Counts the matrix products and convolutions that are computed inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's own
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", MODELS)
def test_two_halves_give_the_gradients_of_one_backward_pass(name: str) -> None:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model = build().double()
    whole = copy.deepcopy(model)
    given = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    other = given.detach().clone().requires_grad_()
    made, wanted = model(given), whole(other)
    gradient = torch.randn_like(made)
    with Operations() as theirs:
        wanted.backward(gradient)
    with Operations() as ours:
        found, parts = backward_inputs(made, given, gradient)
        assert all(one.grad is None for one in model.parameters())
        backward_weights(parts)
    assert torch.equal(found, torch.zeros_like(given) if other.grad is None else other.grad)
    for one, expected in zip(model.parameters(), whole.parameters(), strict=True):
        assert one.grad is not None and expected.grad is not None
        assert torch.equal(one.grad, expected.grad)
    if name != "used twice":
        for product in ("aten.mm", "aten.bmm"):
            assert ours.counts[product] == theirs.counts[product]
        assert sum(ours.counts.values()) <= sum(theirs.counts.values()) + 2 * len(list(model.parameters()))


def test_gradients_of_weights_are_added_to_those_that_are_there() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    given = torch.randn(2, 3, requires_grad=True)
    for _ in range(2):
        _, parts = backward_inputs(model(given).sum(), given, None)
        backward_weights(parts)
    once = copy.deepcopy(model)
    once.zero_grad()
    once(given).sum().backward()
    for one, expected in zip(model.parameters(), once.parameters(), strict=True):
        assert one.grad is not None and expected.grad is not None
        assert torch.allclose(one.grad, 2 * expected.grad)
