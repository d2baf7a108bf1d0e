"""LARS and LAMB beside their papers' formulas, written out in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from offbeat.errors import RequestError
from offbeat.train.lars import LAMB, LARS

Vector = np.ndarray[Any, np.dtype[np.float64]]
STEPS = 7
SHAPES = ((4, 3), (5,), (2, 3, 2))


def starts(seed: int = 0) -> list[Vector]:
    generator = np.random.default_rng(seed)
    return [generator.normal(size=shape) for shape in SHAPES]


def gradients(step: int) -> list[Vector]:
    return starts(100 + step)


def rate(step: int) -> float:
    return 0.5 / (1 + step)


class DumbLARS:
    """One tensor. The rate changes, and the velocity is that of steps already multiplied by it, corrected for that."""

    def __init__(self, weights: Vector, *, momentum: float, decay: float, coefficient: float, adapt: bool) -> None:
        self.weights, self.momentum, self.decay, self.coefficient = weights.copy(), momentum, decay, coefficient
        self.adapt, self.velocity, self.before = adapt, np.zeros_like(weights), 0.0

    def step(self, gradient: Vector, lr: float) -> None:
        ratio, w, g = 1.0, np.sqrt((self.weights**2).sum()), np.sqrt((gradient**2).sum())
        if self.adapt and w > 0 and g > 0:
            ratio = self.coefficient * w / (g + self.decay * w)
        carried = self.velocity * (lr / self.before if self.before else 1.0)
        self.velocity = self.momentum * carried + lr * ratio * (gradient + self.decay * self.weights)
        self.weights -= self.velocity
        self.before = lr


class DumbLAMB:
    """One tensor."""

    def __init__(self, weights: Vector, *, decay: float, adapt: bool) -> None:
        self.weights, self.decay, self.adapt = weights.copy(), decay, adapt
        self.mean, self.square, self.steps = np.zeros_like(weights), np.zeros_like(weights), 0

    def step(self, gradient: Vector, lr: float) -> None:
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        mean, square = self.mean / (1 - 0.9**self.steps), self.square / (1 - 0.999**self.steps)
        change = mean / (np.sqrt(square) + 1e-6) + self.decay * self.weights
        w, r = np.sqrt((self.weights**2).sum()), np.sqrt((change**2).sum())
        self.weights -= lr * (w / r if self.adapt and w > 0 and r > 0 else 1.0) * change


def parameters(seed: int = 0) -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor(start)) for start in starts(seed)]


def run(optimizer: torch.optim.Optimizer, trained: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        for parameter, gradient in zip(trained, gradients(step), strict=True):
            parameter.grad = torch.tensor(gradient)
        optimizer.step()


def groups(trained: list[nn.Parameter], decay: float) -> list[dict[str, Any]]:
    """The 1-D one is neither decayed nor adapted."""
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0, "adapt": False},
    ]


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_lars_is_the_papers_with_the_momentum_corrected(momentum: float, decay: float) -> None:
    trained = parameters()
    run(LARS(groups(trained, decay), 1.0, momentum=momentum, coefficient=0.02), trained, range(STEPS))
    for index, (parameter, start) in enumerate(zip(trained, starts(), strict=True)):
        adapt = start.ndim > 1
        dumb = DumbLARS(start, momentum=momentum, decay=decay if adapt else 0.0, coefficient=0.02, adapt=adapt)
        for step in range(STEPS):
            dumb.step(gradients(step)[index], rate(step))
        np.testing.assert_allclose(parameter.detach().numpy(), dumb.weights, rtol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_is_the_papers(decay: float) -> None:
    trained = parameters()
    run(LAMB(groups(trained, decay), 1.0), trained, range(STEPS))
    for index, (parameter, start) in enumerate(zip(trained, starts(), strict=True)):
        adapt = start.ndim > 1
        dumb = DumbLAMB(start, decay=decay if adapt else 0.0, adapt=adapt)
        for step in range(STEPS):
            dumb.step(gradients(step)[index], rate(step))
        np.testing.assert_allclose(parameter.detach().numpy(), dumb.weights, rtol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_that_does_not_adapt_is_torchs_sgd(nesterov: bool) -> None:
    mine, theirs = parameters(), parameters()
    run(LARS(mine, 1.0, weight_decay=0.1, nesterov=nesterov, adapt=False), mine, range(STEPS))
    run(torch.optim.SGD(theirs, 1.0, 0.9, weight_decay=0.1, nesterov=nesterov), theirs, range(STEPS))
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def test_lamb_that_does_not_adapt_or_decay_is_torchs_adam() -> None:
    mine, theirs = parameters(), parameters()
    run(LAMB(mine, 1.0, adapt=False), mine, range(STEPS))
    run(torch.optim.Adam(theirs, 1.0, eps=1e-6), theirs, range(STEPS))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_a_norm_of_zero_gives_a_ratio_of_one(kind: Callable[..., torch.optim.Optimizer]) -> None:
    zeros, still = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))
    zeros.grad, still.grad = torch.ones(2, 2), torch.zeros(2, 2)
    kind([zeros, still], 0.5).step()
    torch.testing.assert_close(zeros.detach(), torch.full((2, 2), -0.5))
    assert torch.equal(still.detach(), torch.ones(2, 2))


def test_lars_decays_by_its_plain_share_where_the_gradient_is_zero() -> None:
    weights = nn.Parameter(torch.full((2, 2), 2.0))
    weights.grad = torch.zeros(2, 2)
    LARS([weights], 0.5, weight_decay=0.25).step()
    assert torch.equal(weights.detach(), torch.full((2, 2), 1.75))


def test_norms_of_half_precision_do_not_overflow() -> None:
    weights = nn.Parameter(torch.full((100,), 30000.0, dtype=torch.float16))
    weights.grad = torch.full((100,), 30000.0, dtype=torch.float16)  # a norm of 300000 is beyond float16
    LARS([weights], 1.0, momentum=0.0, coefficient=0.5).step()
    assert weights.tolist() == [15000.0] * 100


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_a_state_that_was_saved_goes_on_as_if_nothing_had_been(kind: Callable[..., torch.optim.Optimizer]) -> None:
    whole = parameters()
    run(kind(whole, 1.0, weight_decay=0.1), whole, range(STEPS))
    first = parameters()
    before = kind(first, 1.0, weight_decay=0.1)
    run(before, first, range(3))
    second = [nn.Parameter(parameter.detach().clone()) for parameter in first]
    after = kind(second, 9.0)
    after.load_state_dict(before.state_dict())
    run(after, second, range(3, STEPS))
    assert all(torch.equal(one, other) for one, other in zip(whole, second, strict=True))
    assert all(isinstance(value, torch.Tensor) for state in after.state.values() for value in state.values())


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_a_parameter_without_gradient_stays_and_the_closure_is_called(
    kind: Callable[..., torch.optim.Optimizer],
) -> None:
    moved, still = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = kind([moved, still], 0.5)

    def closure() -> float:
        loss = moved.square().sum()
        loss.backward()  # type: ignore[no-untyped-call] # torch's own
        return loss.item()

    assert optimizer.step(closure) == 4.0
    assert not torch.equal(moved.detach(), torch.ones(2, 2)) and torch.equal(still.detach(), torch.ones(2, 2))


def test_numbers_that_cannot_be_are_refused() -> None:
    weights = [nn.Parameter(torch.ones(2))]
    for make, words in (
        (lambda: LARS(weights, -1.0), "lr is 0 or more; got -1"),
        (lambda: LARS(weights, 1.0, momentum=1.0), "momentum is from 0 to below 1"),
        (lambda: LARS(weights, 1.0, momentum=0.0, nesterov=True), "nesterov needs a momentum"),
        (lambda: LAMB(weights, 1.0, betas=(0.9, 1.5)), "a beta is from 0 to below 1"),
        (lambda: LAMB(weights, 1.0, weight_decay=float("nan")), "weight_decay is 0 or more"),
    ):
        with pytest.raises(RequestError, match=words):
            make()
    weights[0].grad = torch.ones(2).to_sparse()
    with pytest.raises(RequestError, match="LARS needs dense gradients"):
        LARS(weights, 1.0).step()
