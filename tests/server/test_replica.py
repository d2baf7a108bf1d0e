"""A replica of the servers in one process: torch.optim's bits, and a book of versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat.server.shard import optimizers
from offbeat.server.shard.in_process import InProcessServer

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Gradient = list[Any]  # a tensor, or None, for each parameter


def groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [one for one in model.parameters() if one.ndim > 1]
    return [
        {"params": matrices, "weight_decay": 0.03},
        {"params": [one for one in model.parameters() if one.ndim <= 1], "weight_decay": 0.0},
    ]


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": lambda model: torch.optim.SGD(groups(model), lr=0.1, momentum=0.9),
    "nesterov": lambda model: torch.optim.SGD(groups(model), lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda model: torch.optim.Adagrad(groups(model), lr=0.1, initial_accumulator_value=0.3),
    "adam": lambda model: torch.optim.Adam(groups(model), lr=0.02),
    "adamw": lambda model: torch.optim.AdamW(groups(model), lr=0.02),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def model_of() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


class Pair:
    """A replica, and a model like it that torch's own optimizer steps."""

    def __init__(self, name: str = "momentum", **options: Any) -> None:
        make = OPTIMIZERS[name]
        self.model, self.plain = model_of(), model_of()
        self.optimizer, self.torchs = make(self.model), make(self.plain)
        self.replica = InProcessServer(self.model, self.optimizer, **options)
        self.chance = torch.Generator().manual_seed(3)

    def draw(self, but: int = -1) -> Gradient:
        """A gradient, of all parameters but one."""
        drawn = [torch.randn(one.shape, generator=self.chance) for one in self.model.parameters()]
        return [None if at == but else one for at, one in enumerate(drawn)]

    def take(self, number: int, gradient: Gradient) -> None:
        for parameter, one in zip(self.model.parameters(), gradient, strict=True):
            parameter.grad = None if one is None else one.clone()
        self.replica.take_gradient(number)

    def step(self, gradient: Gradient, rate: float = 0.1) -> None:
        """By torch."""
        for parameter, one in zip(self.plain.parameters(), gradient, strict=True):
            parameter.grad = None if one is None else one.clone()
        for group in self.torchs.param_groups:
            group["lr"] = rate
        self.torchs.step()

    def apply(self, numbers: list[int], scales: list[float], rate: float = 0.1, **options: Any) -> None:
        hyper = [one | {"lr": rate} for one in optimizers.describe(self.optimizer)[1]]
        self.replica.apply(numbers, scales, hyper, **options)

    def weights(self) -> list[Tensor]:
        self.replica.write_model(self.replica.current)
        return [one.detach().clone() for one in self.model.parameters()]

    def is_torchs(self) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.weights(), self.plain.parameters(), strict=True))


@every_optimizer
def test_updates_have_the_bits_of_torch_optim(name: str) -> None:
    pair = Pair(name)
    for update in range(6):
        gradient, rate = pair.draw(), 0.1 / (update + 1)
        pair.take(update, gradient)
        pair.apply([update], [1.0], rate)
        pair.step(gradient, rate)
        assert pair.is_torchs()
    assert pair.replica.version == 6
    assert not pair.replica.slots  # each is gone when it was applied


@every_optimizer
def test_a_parameter_without_a_gradient_stays_and_takes_no_step(name: str) -> None:
    pair = Pair(name)
    for update, but in enumerate((1, -1, 2, 2, -1)):
        gradient = pair.draw(but)
        pair.take(update, gradient)
        pair.apply([update], [1.0])
        pair.step(gradient)
    assert pair.is_torchs()


@every_optimizer
def test_a_skipped_version_keeps_weights_and_state(name: str) -> None:
    pair = Pair(name)
    for update in range(4):
        gradient = pair.draw()
        pair.take(update, gradient)
        pair.apply([update], [1.0])
        pair.step(gradient)
        before = pair.weights()
        for _ in range(update):  # odd and even: the state has two copies
            pair.replica.skip()
        assert all(torch.equal(a, b) for a, b in zip(pair.weights(), before, strict=True))
    assert pair.replica.version == 4 + 0 + 1 + 2 + 3
    assert pair.is_torchs()


def test_several_gradients_are_their_mean_each_with_its_scale() -> None:
    pair = Pair("sgd")
    drawn = [pair.draw() for _ in range(3)]
    for number, gradient in enumerate(drawn):
        pair.take(number, gradient)
    scales = [0.5, 1.0, 2.0]
    pair.apply([0, 1, 2], scales)
    expected = [
        one.detach() - 0.1 * sum(scale * part for scale, part in zip(scales, parts, strict=True)) / 3
        for one, parts in zip(pair.plain.parameters(), zip(*drawn, strict=True), strict=True)
    ]
    torch.testing.assert_close(pair.weights(), expected, rtol=1e-6, atol=1e-7)


def test_what_is_absent_in_one_gradient_of_two_counts_as_zero() -> None:
    pair = Pair("sgd")
    one, other = pair.draw(but=0), pair.draw()
    pair.take(1, one)
    pair.take(2, other)
    assert pair.replica.absent(1) == {0} and pair.replica.absent(2) == frozenset()
    pair.apply([1, 2], [1.0, 1.0])
    first = next(iter(pair.plain.parameters())).detach()
    torch.testing.assert_close(pair.weights()[0], first - 0.1 * other[0] / 2)


def test_the_mean_gradient_is_clipped_by_the_norm_of_the_whole() -> None:
    pair = Pair("sgd", clip_norm=0.5)
    gradient = pair.draw()
    pair.take(0, gradient)
    pair.apply([0], [1.0])
    for parameter, one in zip(pair.plain.parameters(), gradient, strict=True):
        parameter.grad = one
    assert float(nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.5)) > 1
    pair.torchs.step()
    torch.testing.assert_close(pair.weights(), [one.detach() for one in pair.plain.parameters()])


def test_a_stale_gradient_is_compensated_by_how_far_the_weights_have_moved() -> None:
    pair = Pair("sgd")
    fresh, stale = pair.draw(), pair.draw()
    pair.take(0, fresh)
    pair.take(1, stale)
    read = pair.weights()
    pair.apply([0], [1.0])
    now = pair.weights()
    pair.apply([1], [1.0], compensation=0.7, reads=[0])
    expected = [w - 0.1 * (g + 0.7 * g * g * (w - r)) for w, r, g in zip(now, read, stale, strict=True)]
    torch.testing.assert_close(pair.weights(), expected)
    plain = [w - 0.1 * g for w, g in zip(now, stale, strict=True)]
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(pair.weights(), plain, strict=True))


def test_drift_is_the_square_of_how_far_the_weights_have_moved() -> None:
    pair = Pair()
    read = pair.weights()
    for update in range(2):
        pair.take(update, pair.draw())
        pair.apply([update], [1.0])
    moved = sum(float(((a - b) ** 2).sum()) for a, b in zip(pair.weights(), read, strict=True))
    assert pair.replica.drift(0) == pytest.approx(moved, rel=1e-5)
    assert pair.replica.drift(2) == 0


def test_only_versions_that_are_kept_and_the_current_one_stay() -> None:
    pair = Pair()
    for update in range(5):
        pair.take(update, pair.draw())
        pair.apply([update], [1.0])
    second = pair.replica.weights[2].clone()
    pair.replica.keep({2, 4, 17})
    assert sorted(pair.replica.weights) == [2, 4, 5]
    assert torch.equal(pair.replica.weights[2], second)
    pair.replica.keep(())
    assert sorted(pair.replica.weights) == [5]


def test_what_is_dropped_is_gone_and_others_stay() -> None:
    pair = Pair("sgd")
    for number in (1, 2):
        pair.take(number, pair.draw())
    pair.replica.drop([1, 99])
    assert list(pair.replica.slots) == [2]
    before = pair.replica.current.clone()
    pair.replica.load(before + 1)
    assert torch.equal(pair.replica.current, before + 1) and pair.replica.version == 0


def test_weights_go_into_another_model_too() -> None:
    pair = Pair("momentum")
    gradient = pair.draw()
    pair.take(0, gradient)
    pair.apply([0], [1.0])
    ordered = [one for group in pair.torchs.param_groups for one in group["params"]]  # as they lie: group by group
    pair.replica.write_model(pair.replica.current, ordered)
    assert pair.is_torchs()
    assert not torch.equal(pair.replica.weights[0], pair.replica.current)
