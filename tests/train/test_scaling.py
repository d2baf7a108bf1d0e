"""The rate against Goyal et al.'s numbers, updates counted by hand, and who is decayed."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from offbeat.errors import RequestError
from offbeat.server.shard.optimizers import RULES, describe
from offbeat.strategy import SERVER, strategies
from offbeat.train.config import Config, TrainConfig
from offbeat.train.lars import LAMB, LARS
from offbeat.train.learning_rate import (
    Pace,
    gradients_per_update,
    groups_of,
    minibatches_per_version,
    optimizer_of,
    pace_of,
    staleness_note,
    zero_last_norms,
)

IMAGENET = 1_281_167
GOYAL = TrainConfig(
    epochs=90, batch_size=32, lr=0.1, lr_batch=256, warmup_epochs=5.0, schedule="steps", steps=(30.0, 60.0, 80.0)
)

# On 8 learners: a line, the minibatches averaged in an update, and those gone through in a version.
LINES = (
    ("ring", 8, 8),
    ("torus:4x2", 8, 8),
    ("auto", 8, 8),
    ("native", 8, 8),
    ("full-sync", 8, 8),
    ("full-sync:rate=inverse", 8, 8),
    ("k-sync:6", 6, 6),
    ("backup:2", 6, 6),
    ("grace-sync:5,grace=50ms", 5, 5),
    ("deadline-sync:50ms", 8, 8),  # if all are in time
    ("k-batch-sync:12", 12, 12),
    ("async", 1, 1),
    ("k-async:4", 4, 4),
    ("k-batch-async:11", 11, 11),
    ("softsync:1", 8, 8),
    ("softsync:3", 2, 2),
    ("ssp:2", 1, 1),
    ("stale-drop:5", 1, 1),
    ("adaptive-k:2,window=7", 2, 2),
    ("downpour:push=4,fetch=2", 1, 4),
    ("local-sgd:5", 1, 40),
    ("local-sgd:5,outer=nesterov", 1, 40),
)


def changed(train: TrainConfig, **fields: Any) -> TrainConfig:
    return msgspec.structs.replace(train, **fields)


@pytest.mark.parametrize(("line", "averaged", "gone"), LINES)
def test_minibatches_in_an_update_and_in_a_version(line: str, averaged: int, gone: int) -> None:
    assert gradients_per_update(line, 8) == averaged
    assert minibatches_per_version(line, 8) == gone


def test_every_policy_has_its_row_above() -> None:
    policies = {name for name, strategy in strategies().items() if strategy.family == SERVER}
    assert policies == {line.partition(":")[0] for line, _, _ in LINES} & policies


def test_a_line_that_cannot_be_is_refused() -> None:
    for line, learners, words in (
        ("k-sync:9", 8, "K=9 exceeds the 8 learners"),
        ("rong", 8, "unknown strategy"),
        ("ring", 0, "1 learner or more; got 0"),
        ("async", 0, "1 learner or more; got 0"),
    ):
        with pytest.raises(RequestError, match=words):
            gradients_per_update(line, learners)


@pytest.mark.parametrize("learners", [8, 16, 32, 64, 128, 256])
def test_goyals_rate_is_a_tenth_for_every_256_samples(learners: int) -> None:
    pace = pace_of(GOYAL, line="ring", learners=learners, samples=IMAGENET)
    top = 0.1 * (32 * learners) / 256
    assert pace.per_epoch == math.ceil(IMAGENET / (32 * learners))
    assert pace.warmup_updates == (5 * pace.per_epoch if learners > 8 else 0)
    assert pace.rate(0) == 0.1
    for epoch, expected in ((5, top), (29, top), (30, top / 10), (59, top / 10), (60, top / 100), (80, top / 1000)):
        assert pace.rate(epoch * pace.per_epoch) == pytest.approx(expected, rel=1e-15)
    for step, before, after in ((30, top, top / 10), (60, top / 10, top / 100), (80, top / 100, top / 1000)):
        assert pace.rate(step * pace.per_epoch - 1) == pytest.approx(before, rel=1e-15)
        assert pace.rate(step * pace.per_epoch) == pytest.approx(after, rel=1e-15)


def test_goyals_largest_run_in_numbers() -> None:
    """256 learners of 32: a rate of 3.2, 157 updates an epoch, 785 of warm-up."""
    pace = pace_of(GOYAL, line="hierarchical:32x8", learners=256, samples=IMAGENET)
    assert (pace.factor, pace.per_epoch, pace.warmup_updates) == (32.0, 157, 785)
    assert pace.rate(785) == 3.2
    # The same amount is added at every update.
    added = [pace.rate(update + 1) - pace.rate(update) for update in range(785)]
    assert added == pytest.approx([3.1 / 785] * 785, rel=1e-9)


def test_accumulated_passes_count_as_samples() -> None:
    once = pace_of(changed(GOYAL, batch_size=64), line="ring", learners=16, samples=IMAGENET)
    twice = pace_of(changed(GOYAL, accumulate=2), line="ring", learners=16, samples=IMAGENET)
    assert once == twice and once.factor == 4.0


def test_the_root_and_no_scaling() -> None:
    root = pace_of(changed(GOYAL, scaling="sqrt"), line="ring", learners=128, samples=IMAGENET)
    assert (root.factor, root.rate(root.warmup_updates)) == (4.0, 0.4)
    none = pace_of(changed(GOYAL, scaling="none"), line="ring", learners=128, samples=IMAGENET)
    assert (none.factor, none.warmup_updates, none.rate(0)) == (1.0, 0, 0.1)


def test_fewer_samples_than_the_rate_is_for_lower_it_without_warm_up() -> None:
    pace = pace_of(changed(GOYAL, batch_size=128), line="async", learners=4, samples=IMAGENET)
    assert (pace.factor, pace.warmup_updates, pace.rate(0), pace.rate(7)) == (0.5, 0, 0.05, 0.05)


def test_a_warm_up_takes_half_of_the_epochs_at_most() -> None:
    pace = pace_of(changed(GOYAL, epochs=3, steps=(1.0,)), line="ring", learners=16, samples=5120)
    assert (pace.per_epoch, pace.warmup_updates) == (10, 15)
    assert pace.rate(14) == pytest.approx(0.1 * (1 + 14 / 15))
    assert pace.rate(15) == 0.2 / 10  # the step that fell into the warm-up counts from its end on


@pytest.mark.parametrize(
    ("line", "versions"),
    [("ring", 25), ("k-sync:2", 50), ("async", 100), ("downpour:push=4", 25), ("local-sgd:5", 5), ("local-sgd:7", 4)],
)
def test_updates_of_an_epoch_are_counted_in_versions(line: str, versions: int) -> None:
    train = TrainConfig(batch_size=10)
    assert pace_of(train, line=line, learners=4, samples=1000).per_epoch == versions
    assert pace_of(train, line=line, learners=4, samples=1).per_epoch == 1


def test_a_cosine_ends_at_zero_and_begins_after_the_warm_up() -> None:
    pace = Pace(base=0.1, factor=4.0, warmup_updates=20, per_epoch=10, epochs=10, schedule="cosine")
    assert [pace.rate(update) for update in (0, 20, 100, 500)] == [0.1, 0.4, 0.0, 0.0]
    assert pace.rate(60) == pytest.approx(0.2) and pace.rate(40) == pytest.approx(0.2 + 0.2 * math.sqrt(0.5))
    cold = Pace(base=0.1, factor=0.5, warmup_updates=20, per_epoch=10, epochs=10, schedule="cosine")
    assert cold.rate(0) == 0.05 and cold.rate(50) == pytest.approx(0.025)


def test_a_constant_rate_stays() -> None:
    pace = Pace(base=0.1, factor=4.0, warmup_updates=2, per_epoch=10, epochs=10, schedule="constant")
    assert [pace.rate(update) for update in (0, 1, 2, 1000)] == [0.1, 0.25, 0.4, 0.4]


def test_the_line_that_is_told() -> None:
    train = TrainConfig(epochs=12)
    for line, learners, words in (
        (
            "ring",
            4,
            "learning rate 0.05 x 4 = 0.2 for updates of 4 x 32 samples, warm-up over 5 epochs "
            "(linear scaling; --train.scaling none turns it off)",
        ),
        ("async", 4, ""),
    ):
        pace = pace_of(train, line=line, learners=learners, samples=1437)
        assert pace.words(train, line=line, learners=learners) == words
    low = TrainConfig(batch_size=4, accumulate=2, scaling="sqrt")
    assert pace_of(low, line="async", learners=4, samples=100).words(low, line="async", learners=4) == (
        "learning rate 0.05 x 0.5 = 0.025 for updates of 1 x 8 samples "
        "(square-root scaling; --train.scaling none turns it off)"
    )


def test_a_pace_is_checked_at_birth() -> None:
    good: dict[str, Any] = {"base": 0.1, "factor": 1.0, "warmup_updates": 0, "per_epoch": 1, "epochs": 1}
    good["schedule"] = "constant"
    Pace(**good)
    for wrong in ({"factor": 0.0}, {"per_epoch": 0}, {"warmup_updates": -1}, {"schedule": "stairs"}):
        with pytest.raises(RequestError):
            Pace(**(good | wrong))
    with pytest.raises(RequestError, match="1 or more samples to train on; got 0"):
        pace_of(GOYAL, line="ring", learners=2, samples=0)


def test_torchs_momentum_is_already_corrected_for_a_changing_rate() -> None:
    """Goyal et al., remark 2: v = m v (rate_t / rate_before) + rate_t g, w -= v; without the ratio it is another."""
    rates, momentum = [0.1, 0.15, 0.2, 0.4, 0.04, 0.004], 0.9
    generator = torch.Generator().manual_seed(0)
    slopes = [torch.randn(5, generator=generator, dtype=torch.float64) for _ in rates]
    weights = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    optimizer = torch.optim.SGD([weights], lr=1.0, momentum=momentum)

    def by_velocity(corrected: bool) -> torch.Tensor:
        place, velocity, before = torch.zeros(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64), rates[0]
        for rate, slope in zip(rates, slopes, strict=True):
            velocity = momentum * velocity * (rate / before if corrected else 1.0) + rate * slope
            place, before = place - velocity, rate
        return place

    for rate, slope in zip(rates, slopes, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        weights.grad = slope.clone()
        optimizer.step()
    torch.testing.assert_close(weights.detach(), by_velocity(corrected=True), rtol=1e-12, atol=0)
    assert (weights.detach() - by_velocity(corrected=False)).abs().min() > 1e-3


class Net(nn.Module):
    """Weights, a bias, a norm, a shared weight, a scalar, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.last = nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def named(model: nn.Module, groups: list[dict[str, Any]]) -> list[tuple[set[str], float, Any]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in groups:
        assert len({id(parameter) for parameter in group["params"]}) == len(group["params"])
    return [
        ({names[id(parameter)] for parameter in group["params"]}, group["weight_decay"], group.get("adapt"))
        for group in groups
    ]


WEIGHTS, OTHERS = {"first.weight"}, {"first.bias", "norm.weight", "norm.bias", "temperature"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [(WEIGHTS | OTHERS, 0.0, None)]),
        ({"weight_decay": 0.1}, [(WEIGHTS, 0.1, None), (OTHERS, 0.0, None)]),
        ({"weight_decay": 0.1, "decay_all": True}, [(WEIGHTS | OTHERS, 0.1, None)]),
        ({"optimizer": "lars"}, [(WEIGHTS, 0.0, True), (OTHERS, 0.0, False)]),
        ({"optimizer": "lamb", "weight_decay": 0.1}, [(WEIGHTS, 0.1, True), (OTHERS, 0.0, False)]),
        (
            {"optimizer": "lars", "weight_decay": 0.1, "decay_all": True},
            [(WEIGHTS, 0.1, True), (OTHERS, 0.1, False)],
        ),
    ],
)
def test_scales_shifts_and_biases_are_not_decayed(fields: dict[str, Any], expected: list[Any]) -> None:
    model = Net()
    assert named(model, groups_of(model, TrainConfig(**fields))) == expected


def test_a_group_that_would_be_empty_is_left_out() -> None:
    decayed = TrainConfig(weight_decay=0.1)
    assert len(groups_of(nn.Linear(2, 2, bias=False), decayed)) == 1
    assert [group["weight_decay"] for group in groups_of(nn.LayerNorm(2), decayed)] == [0.0]
    assert groups_of(nn.ReLU(), decayed) == groups_of(nn.ReLU(), TrainConfig()) == []
    with pytest.raises(RequestError, match="nothing to train"):
        optimizer_of(nn.ReLU(), decayed)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_servers_take_torchs_optimizers_as_they_are_made_here(name: Any, decay: float) -> None:
    train = TrainConfig(optimizer=name, lr=0.25, weight_decay=decay, momentum=0.8, nesterov=True)
    optimizer = optimizer_of(Net(), train)
    rule, hypers = describe(optimizer)
    assert rule == name and type(optimizer) is RULES[name].optimizer
    assert [hyper["lr"] for hyper in hypers] == [0.25] * len(hypers)
    assert [hyper["weight_decay"] for hyper in hypers] == ([decay, 0.0] if decay else [0.0])
    if name == "sgd":
        assert all((hyper["momentum"], hyper["nesterov"]) == (0.8, 1.0) for hyper in hypers)


def test_lars_and_lamb_are_made_of_their_groups() -> None:
    lars = optimizer_of(Net(), TrainConfig(optimizer="lars", lr=2.0, momentum=0.8, nesterov=True, weight_decay=0.1))
    assert isinstance(lars, LARS)
    assert [(g["adapt"], g["weight_decay"]) for g in lars.param_groups] == [(True, 0.1), (False, 0.0)]
    assert all((g["lr"], g["momentum"], g["nesterov"]) == (2.0, 0.8, True) for g in lars.param_groups)
    lamb = optimizer_of(Net(), TrainConfig(optimizer="lamb", lr=0.5))
    assert isinstance(lamb, LAMB) and [g["adapt"] for g in lamb.param_groups] == [True, False]


class Block(nn.Module):
    """As the built-in residual networks have them; the norm may have any name."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.bn1, self.last_norm = nn.BatchNorm2d(2), norm


class BasicBlock(nn.Module):
    """As torchvision's."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(2), nn.BatchNorm2d(2)


class Bottleneck(BasicBlock):
    """As torchvision's."""

    def __init__(self) -> None:
        super().__init__()
        self.bn3 = nn.BatchNorm2d(2)


def test_the_last_norm_of_every_residual_block_starts_at_zero_and_no_other() -> None:
    bare = nn.BatchNorm2d(2, affine=False)
    blocks = [Block(nn.BatchNorm2d(2)), Block(nn.GroupNorm(1, 2)), BasicBlock(), Bottleneck(), Block(bare)]
    model = nn.Sequential(nn.BatchNorm2d(2), *blocks, Block(nn.Identity()))
    zero_last_norms(model)
    zeroed = {name for name, parameter in model.named_parameters() if not parameter.any() and name.endswith("weight")}
    assert zeroed == {"1.last_norm.weight", "2.last_norm.weight", "3.bn2.weight", "4.bn3.weight"}
    without = nn.Linear(2, 2)
    zero_last_norms(without)
    assert without.weight.all()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("ring", ""),
        ("full-sync", ""),
        ("k-sync:2", ""),
        ("local-sgd:4", ""),
        ("k-async:2", "staleness 1 (P/K - 1): steps are multiplied by 0.333, momentum 0.9 -> 0.7 "),
        ("async", "staleness 3 (P - 1): steps are multiplied by 0.25, momentum 0.9 -> 0.6 "),
        (
            "k-batch-async:4",
            "staleness 0.75 ((P-1)/K): steps are multiplied by 0.25, momentum 0.9 -> 0.6 ",
        ),
        (
            "downpour:push=2,fetch=2",
            "PUSH): steps are multiplied by 0.087, lr 0.1 -> 0.087, momentum 0.9 -> 0 ",
        ),
    ],
)
def test_what_staleness_does_to_the_step_is_told_in_one_line(line: str, says: str) -> None:
    config = Config(sync=line, learners=4, train=TrainConfig(lr=0.1, momentum=0.9))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    note = staleness_note(config, 4, optimizer)
    assert says in note if says else note == ""
    assert staleness_note(msgspec.structs.replace(config, staleness="keep"), 4, optimizer) == ""


def test_the_line_says_what_is_done_to_this_optimizer() -> None:
    config, weights = Config(sync="async", learners=2), [nn.Parameter(torch.zeros(1))]
    assert staleness_note(config, 2, torch.optim.Adagrad(weights)) == ""  # nothing
    note = staleness_note(config, 2, torch.optim.AdamW(weights))
    assert "(P - 1): beta1 0.9 -> 0.8 (" in note and "shortened" not in note
