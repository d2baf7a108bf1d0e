"""The arithmetic of virtual training: which quicker ways are right for a model, what is left out, what rates do."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.predict.arithmetic import Arithmetic
from offbeat.predict.machines import Clock
from offbeat.predict.timelines import Minibatch, Step, TimeSpent, Update
from offbeat.predict.virtual import VirtualRun, VirtualTrainer, train_virtually
from offbeat.runs.run_folder import RunDir
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.compute import parse_law
from offbeat.train.tasks import Task, Tensors
from offbeat.train.trainer import Trainer
from train.oracle import distance
from train.runs import CLASSES, FEATURES, config_of, mlp, points, small_task, trained

Build = Callable[[], nn.Module]
CLOSE = 1e-6
PLAIN = {"scaling": "none", "lr": 0.1}


def arithmetic_of(task: Task, *, alone: bool = False, **changes: Any) -> Arithmetic:
    config = config_of(**{"train": PLAIN, **changes})
    trainer = Trainer(config, task, RunDir(Path()), number=0, learners=config.learners, report=lambda record: None)
    return Arithmetic(trainer, alone=alone)


def clock_of(learners: int, law: str = "gamma:1,0.25", **options: Any) -> Clock:
    return Clock(cluster=Cluster(learners=learners, law=parse_law(law)), **options)


def virtually(task: Task, *, width: int = 0, hear: Any = None, ends: bool = False, **changes: Any) -> VirtualRun:
    config = config_of(**changes)
    clock = clock_of(config.learners, ends_of_epochs=ends)
    return train_virtually(config, clock, task=task, width=width, hear=hear or (lambda record: None))


def state(outcome: Any) -> dict[str, Tensor]:
    return dict(outcome.weights)


def work(number: int, version: int, start: int, count: int = 4, learner: int = 0) -> Minibatch:
    return Minibatch(number, learner, version, (Step(version, ((0, start, count),)),))


def update_of(version: int, *works: Minibatch) -> Update:
    return Update(version, 0.0, works, (1.0,) * len(works), version - 1, TimeSpent(0, 0, 0, 0))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


# --- which ways are right -----------------------------------------------------------------------------------------


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 10), nn.ReLU(), nn.Dropout(0.4), nn.Linear(10, CLASSES))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, CLASSES))


class OfUnused(nn.Module):
    """A parameter that has no part in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.unused = nn.Parameter(torch.ones(3, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.inner(inputs)
        return result


def of_frozen() -> nn.Module:
    model = mlp()
    next(model.parameters()).requires_grad_(False)
    return model


class Replaced(nn.Module):
    """Its statistic is a new tensor after each minibatch, not the old one changed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("count", torch.zeros(()))
        self.count: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.count = self.count + 1
        result: Tensor = self.inner(inputs)
        return result


class Remembered(nn.Module):
    """Keeps the weights that it last trained with: the first time, what the buffer has already."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("seen", flat(self.inner))
        self.seen: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen.copy_(flat(self.inner))
        result: Tensor = self.inner(inputs)
        return result


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="sum")


@pytest.mark.parametrize(
    ("build", "together", "as_one", "why"),
    [
        (mlp, True, True, ""),
        (of_frozen, True, True, ""),
        (OfUnused, False, True, "gives other results than one by one"),
        (with_dropout, False, False, "random"),
        (with_batch_norm, False, False, "buffers"),
        (Replaced, False, False, "buffers"),
        (Remembered, False, False, "buffers"),
    ],
)
def test_quicker_ways_are_taken_where_they_are_right(build: Build, together: bool, as_one: bool, why: str) -> None:
    found = arithmetic_of(small_task(64, build=build))
    assert (found.together, found.as_one) == (together, as_one)
    assert (why in found.why_alone) if why else not found.why_alone


def test_a_loss_that_is_a_sum_is_computed_as_one_too_since_each_minibatch_has_its_own() -> None:
    found = arithmetic_of(small_task(64, loss=summed))
    assert (found.together, found.as_one, found.why_alone) == (True, True, "")


def leaves_some_out(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean over some of the samples, which are none of the first eight: minibatches do not weigh alike."""
    return functional.cross_entropy(outputs, targets, ignore_index=3)


@pytest.mark.parametrize("sync", ["full-sync", "k-batch-async:6", "ring"])
def test_a_loss_over_some_of_the_samples_is_the_same_in_all_ways(sync: str) -> None:
    task = small_task(96, loss=leaves_some_out)
    alone, quick = (virtually(task, sync=sync, learners=8, width=width) for width in (1, 0))
    assert "one by one" in alone.how and "at a time" in quick.how
    assert distance(state(quick), state(alone)) < 1e-5


def test_what_is_asked_to_be_alone_is() -> None:
    found = arithmetic_of(small_task(64), alone=True)
    assert (found.together, found.as_one, found.why_alone) == (False, False, "asked for")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"train": {**PLAIN, "precision": "bf16"}}, "bf16"),
        ({"train": {**PLAIN, "precision": "fp16"}}, "fp16"),
        ({"sync": "local-sgd:2"}, "local steps"),
        ({"sync": "downpour:push=2,fetch=2"}, "local steps"),
    ],
)
def test_what_is_alone_for_another_reason_says_so(changes: Any, why: str) -> None:
    found = arithmetic_of(small_task(64), **changes)
    assert (found.together, found.as_one) == (False, False)
    assert why in found.why_alone


def test_trying_changes_nothing() -> None:
    """Neither weights nor buffers, nor the scale of the loss, though the first minibatches overflow."""
    train, test = points(64)
    task = Task(train=Tensors(train.inputs * 400, train.targets), test=test, build=with_batch_norm, loss=summed)
    found = arithmetic_of(task, train={**PLAIN, "precision": "fp16"})
    torch.manual_seed(3)
    fresh = with_batch_norm()
    assert all(torch.equal(a, b) for a, b in zip(found.trainer.model.buffers(), fresh.buffers(), strict=True))
    assert torch.equal(flat(found.trainer.model), flat(fresh))
    scaler = found.trainer.precision.scaler
    assert scaler is not None and scaler.state() == {"scale": scaler.START, "good": 0}


def test_all_ways_give_the_same_gradients() -> None:
    task = small_task(80)
    quick, slow = arithmetic_of(task, learners=10), arithmetic_of(task, learners=10, alone=True)
    works = [work(number, 0, 4 * number) for number in range(10)]
    quick.compute(works)
    slow.compute(works)
    for one in works:
        torch.testing.assert_close(quick.replica.slots[one.number], slow.replica.slots[one.number])
    assert any(not torch.equal(quick.replica.slots[n], slow.replica.slots[n]) for n in range(10))  # really another way
    as_one = arithmetic_of(task, learners=10)
    for learner in (quick, slow, as_one):
        learner.apply(update_of(1, *works))
    torch.testing.assert_close(quick.replica.current, slow.replica.current)
    torch.testing.assert_close(as_one.replica.current, slow.replica.current)
    assert not as_one.replica.slots and as_one.loss_of == 40
    assert as_one.loss_sum == pytest.approx(slow.loss_sum, rel=1e-5)


# --- models that need care ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["k-async:3", "full-sync", "ring"])
@pytest.mark.parametrize("build", [with_dropout, with_batch_norm])
def test_what_is_alone_in_any_case_has_the_same_bits_at_any_width(build: Build, line: str) -> None:
    task = small_task(96, build=build)
    found = [virtually(task, sync=line, learners=4, width=width, train={"epochs": 1}) for width in (1, 128)]
    assert distance(state(found[0]), state(found[1])) == 0
    assert found[0].points == found[1].points


@pytest.mark.parametrize("line", ["full-sync", "k-batch-async:3"])
def test_a_loss_that_is_a_sum_comes_to_the_same_at_any_width(line: str) -> None:
    task = small_task(96, build=lambda: nn.Linear(FEATURES, CLASSES), loss=summed)
    changes = {**PLAIN, "lr": 0.01, "epochs": 2}
    one, many = (virtually(task, sync=line, learners=6, width=width, train=changes) for width in (1, 128))
    assert distance(state(one), state(many)) < 1e-5


@pytest.mark.parametrize("line", ["ring", "async", "full-sync"])
def test_a_parameter_that_is_not_used_stays_in_spite_of_decay(line: str) -> None:
    task = small_task(96, build=OfUnused)
    outcome = virtually(task, sync=line, train={"epochs": 1, "weight_decay": 0.1})
    assert torch.equal(outcome.weights["unused"], torch.ones(3, 2))
    assert outcome.points[-1].loss is not None and outcome.points[0].loss is not None
    assert outcome.points[-1].loss < outcome.points[0].loss


def test_a_parameter_that_is_not_used_stays_under_lars_too() -> None:
    outcome = virtually(small_task(96, build=OfUnused), train={"epochs": 1, "weight_decay": 0.1, "optimizer": "lars"})
    assert torch.equal(outcome.weights["unused"], torch.ones(3, 2))


@pytest.mark.parametrize("line", ["ring", "k-batch-async:9"])
def test_a_frozen_parameter_stays_and_the_others_are_trained(line: str) -> None:
    outcome = virtually(small_task(96, build=of_frozen), sync=line, learners=9, train={"epochs": 2})
    torch.manual_seed(3)
    fresh = of_frozen().state_dict()
    assert torch.equal(outcome.weights["0.weight"], fresh["0.weight"])
    assert not torch.equal(outcome.weights["0.bias"], fresh["0.bias"])


def test_bf16_trains_one_by_one() -> None:
    outcome = virtually(small_task(96), sync="full-sync", train={"epochs": 2, "precision": "bf16"})
    wide = virtually(small_task(96), sync="full-sync", train={"epochs": 2})
    assert "bf16" in outcome.how
    assert 0 < distance(state(outcome), state(wide)) < 0.1


@pytest.mark.parametrize("build", [with_batch_norm, Replaced, Remembered])
def test_buffers_are_each_learners_own_and_averaged_to_be_evaluated(build: Build) -> None:
    task = small_task(96, build=build)
    config = config_of(sync="async", learners=3, train={**PLAIN, "epochs": 2})
    trainer = VirtualTrainer(config, task, clock_of(3), run=None, report=lambda record: None)
    trainer.fit()
    weights, own = trainer.outcome().weights, trainer.arithmetic.buffers
    assert own is not None and sorted(own) == [0, 1, 2]
    count = {"with_batch_norm": "1.num_batches_tracked", "Replaced": "count"}.get(build.__name__)
    if count is not None:  # each minibatch is counted, by whoever computed it
        assert sum(int(one[count]) for one in own.values()) == trainer.at.update == 48
        assert all(int(one[count]) > 1 for one in own.values())
    for name, first in own[0].items():
        if first.is_floating_point():
            mean = torch.stack([one[name] for one in own.values()]).double().mean(0).float()
            assert torch.equal(weights[name], mean)
    if build is not Replaced:
        assert len({float(one[name].sum()) for one in own.values()}) == 3


@pytest.mark.parametrize("width", [1, 0])
def test_synchronised_batch_norm_is_plain_batch_norm_of_the_union(width: int, tmp_path: Path) -> None:
    task = small_task(90, build=with_batch_norm)
    changes = {**PLAIN, "epochs": 2}
    real = trained(tmp_path, task, learners=1, train={**changes, "batch_size": 8})
    found = virtually(task, width=width, ends=True, train={**changes, "batch_norm": "synchronised"})
    assert found.end["updates"] == real.end["updates"] == 24
    assert distance(state(found), real.weights) < CLOSE
    apart = virtually(task, width=width, ends=True, train=changes)
    assert float((state(apart)["0.weight"] - real.weights["0.weight"]).abs().max()) > 1e-3


# --- what is not finite -----------------------------------------------------------------------------------------------


def with_odd_sample(position: int | None = None) -> tuple[Task, int]:
    """One sample gives no number; and where it lies in the first epoch's order."""
    train, test = points(80)
    order = arithmetic_of(small_task(80)).orders.indices([(0, 0, 80)])
    at = 17 if position is None else order[position]
    train.inputs[at] = math.inf
    task = Task(train=Tensors(train.inputs, train.targets), test=test, build=mlp, loss=functional.cross_entropy)
    return task, order.index(at)


@pytest.mark.parametrize(
    ("line", "each"), [("async", 4), ("k-batch-async:9", 4), ("full-sync", 4), ("k-sync:2", 4), ("ring", 36)]
)
@pytest.mark.parametrize("width", [1, 0])
def test_a_gradient_that_is_not_finite_is_left_out_and_training_goes_on(line: str, each: int, width: int) -> None:
    """A server drops the push; in an all-reduce it is in everybody's sum."""
    heard: list[Any] = []
    task, _ = with_odd_sample()
    changes = {**PLAIN, "epochs": 3}
    outcome = virtually(task, sync=line, learners=9, width=width, hear=heard.append, train=changes)
    last = [record for record in heard if record["kind"] == "evaluated"][-1]
    dropped = last["dropped"]["not finite"]
    assert dropped == 3 * each
    assert last["samples"] + sum(outcome.dropped.values()) == 240
    per_update = {"async": 4, "k-sync:2": 8}.get(line, 36)
    full = math.floor if line == "k-batch-async:9" else math.ceil  # it waits for 9; others take what is left
    assert outcome.end["updates"] == full(240 / per_update)
    assert all(one.isfinite().all() for one in outcome.weights.values())
    assert outcome.points[-1].loss is not None and outcome.points[0].loss is not None
    assert outcome.points[-1].loss < outcome.points[0].loss


@pytest.mark.parametrize("line", ["full-sync", "ring", "k-batch-async:9"])
def test_what_is_left_out_does_not_depend_on_the_width(line: str) -> None:
    task, _ = with_odd_sample()
    one, many = (virtually(task, sync=line, learners=9, width=width, train={"epochs": 2}) for width in (1, 128))
    assert distance(state(one), state(many)) < 1e-4


@pytest.mark.parametrize("alone", [True, False])
def test_an_update_without_a_good_gradient_is_a_version_with_the_same_weights(alone: bool) -> None:
    task, _ = with_odd_sample(position=5)
    found = arithmetic_of(task, sync="k-batch-async:1", alone=alone)
    found.apply(update_of(1, work(1, 0, 0)))
    before = found.replica.current.clone()
    found.apply(update_of(2, work(2, 1, 4)))
    assert found.replica.version == 2 and found.not_finite == 4
    assert torch.equal(found.replica.current, before)
    found.apply(update_of(3, work(3, 2, 8)))
    plain = arithmetic_of(task, sync="k-batch-async:1", alone=alone)
    plain.apply(update_of(1, work(1, 0, 0)))
    plain.apply(update_of(2, work(3, 1, 8)))
    assert torch.equal(found.replica.current, plain.replica.current)  # momentum is what it was


def test_of_two_gradients_the_good_one_counts_whole() -> None:
    task, _ = with_odd_sample(position=5)
    both, one = (arithmetic_of(task, sync="k-batch-async:2") for _ in range(2))
    both.apply(update_of(1, work(1, 0, 0), work(2, 0, 4)))
    one.apply(update_of(1, work(1, 0, 0)))
    assert both.not_finite == 4 and one.not_finite == 0
    assert torch.equal(both.replica.current, one.replica.current)


# --- learners that step by themselves ---------------------------------------------------------------------------------


class ByHand:
    """Two learners with an optimizer each, in plain torch; positions are of the first epoch."""

    def __init__(self, found: Arithmetic, momentum: float) -> None:
        self.data, self.orders = found.dataset, found.orders
        torch.manual_seed(3)
        self.models = [mlp() for _ in range(2)]
        self.models[1].load_state_dict(self.models[0].state_dict())
        self.optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=momentum) for one in self.models]

    def step(self, learner: int, start: int) -> Tensor:
        """Its gradient; it has moved by it."""
        model, optimizer = self.models[learner], self.optimizers[learner]
        inputs, targets = self.data.__getitems__(self.orders.indices([(0, start, 4)]))
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]  # torch's own
        gradient = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
        optimizer.step()
        return gradient

    def load(self, learner: int, weights: Tensor) -> None:
        nn.utils.vector_to_parameters(weights.clone(), self.models[learner].parameters())


def of_steps(number: int, learner: int, version: int, *steps: tuple[int, int]) -> Minibatch:
    """Each step: the version that was fetched for it or -1, and where its samples begin."""
    return Minibatch(number, learner, version, tuple(Step(fetched, ((0, start, 4),)) for fetched, start in steps))


def test_local_sgd_is_the_mean_of_where_learners_went_with_their_own_momentum() -> None:
    found = arithmetic_of(small_task(96), sync="local-sgd:2", train={**PLAIN, "stale_momentum": "kept"})
    hand = ByHand(found, momentum=0.9)
    for round_ in range(3):
        at = 16 * round_
        works = (
            of_steps(2 * round_ + 1, 0, round_, (round_, at), (-1, at + 4)),
            of_steps(2 * round_ + 2, 1, round_, (round_, at + 8), (-1, at + 12)),
        )
        found.compute(works)
        found.apply(update_of(round_ + 1, *works))
        for learner in (0, 1):
            hand.step(learner, at + 8 * learner)
            hand.step(learner, at + 8 * learner + 4)
        mean = (flat(hand.models[0]) + flat(hand.models[1])) / 2
        torch.testing.assert_close(found.replica.current, mean, rtol=1e-5, atol=1e-6)
        hand.load(0, mean)
        hand.load(1, mean)


def test_overlapped_local_sgd_adds_its_change_since_the_push_to_the_new_weights() -> None:
    found = arithmetic_of(small_task(96), sync="local-sgd:2,overlap", train={**PLAIN, "stale_momentum": "kept"})
    hand = ByHand(found, momentum=0.9)
    first = [of_steps(1 + one, one, 0, (0, 8 * one), (-1, 8 * one + 4)) for one in (0, 1)]
    second = [  # the first takes version 1 after one step, the second after two, just before its push
        of_steps(3, 0, 1, (-1, 16), (1, 20)),
        Minibatch(4, 1, 1, (*of_steps(4, 1, 1, (-1, 24), (-1, 28)).steps, Step(1, ()))),
    ]
    found.compute(first)
    found.apply(update_of(1, *first))
    for learner in (0, 1):
        hand.step(learner, 8 * learner)
        hand.step(learner, 8 * learner + 4)
    pushed = [flat(model).clone() for model in hand.models]
    mean = sum(pushed) / 2
    hand.step(0, 16)
    hand.load(0, mean + flat(hand.models[0]) - pushed[0])
    hand.step(0, 20)
    hand.step(1, 24)
    hand.step(1, 28)
    hand.load(1, mean + flat(hand.models[1]) - pushed[1])
    found.compute(second)
    found.apply(update_of(2, *second))
    wanted = (flat(hand.models[0]) + flat(hand.models[1])) / 2
    torch.testing.assert_close(found.replica.current, wanted, rtol=1e-5, atol=1e-6)


def test_overlapped_local_sgd_without_anything_to_wait_for_has_the_bits_of_the_plain_form() -> None:
    task, changes = small_task(96), {**PLAIN, "epochs": 2, "momentum": 0.9}
    plain, overlapped, late = (
        state(virtually(task, sync=line, learners=1, train=changes))
        for line in (f"local-sgd:3{more},outer=nesterov" for more in ("", ",overlap", ",overlap,delay=2"))
    )  # under outer=average one learner alone is where it is, however late it hears of it
    assert all(torch.equal(plain[name], overlapped[name]) for name in plain)
    assert distance(plain, late) > 1e-4


def test_downpour_pushes_the_sum_of_its_gradients_and_fetches_in_between() -> None:
    found = arithmetic_of(small_task(96), sync="downpour:push=2,fetch=3", train={**PLAIN, "momentum": 0.0})
    hand = ByHand(found, momentum=0.0)
    weights = flat(hand.models[0])
    first, other, second = (
        of_steps(1, 0, 0, (0, 0), (-1, 4)),
        of_steps(2, 1, 0, (0, 8), (-1, 12)),
        of_steps(3, 0, 0, (-1, 16), (2, 20)),  # it has gone on by itself, and then fetched version 2
    )
    weights = weights - 0.1 * (hand.step(0, 0) + hand.step(0, 4))
    found.compute([first, other])
    found.apply(update_of(1, first))
    torch.testing.assert_close(found.replica.current, weights)
    weights = weights - 0.1 * (hand.step(1, 8) + hand.step(1, 12))
    found.apply(update_of(2, other))
    torch.testing.assert_close(found.replica.current, weights)
    accrued = hand.step(0, 16)
    hand.load(0, weights)
    weights = weights - 0.1 * (accrued + hand.step(0, 20))
    found.apply(update_of(3, second))
    torch.testing.assert_close(found.replica.current, weights)


# --- rates ------------------------------------------------------------------------------------------------------------


def test_every_rate_changes_the_weights() -> None:
    task = small_task(96)
    lines = ["async", "async:rate=inverse", "async:rate=drift:0.001", "async:rate=delay-compensated:2"]
    changes = {**PLAIN, "epochs": 2, "momentum": 0.0}
    found = [virtually(task, sync=line, learners=5, staleness="keep", train=changes) for line in lines]
    assert {one.points[-1].seconds for one in found} == {found[0].points[-1].seconds}  # the same gradients, in order
    for at, one in enumerate(found):
        assert all(distance(state(one), state(other)) > 1e-4 for other in found[:at])


def test_a_stale_gradient_is_compensated_as_the_formula_says() -> None:
    """g + L g g (w_now - w_read), with g of the weights that were read."""
    task, strength = small_task(96), 30.0
    found = arithmetic_of(
        task, sync=f"async:rate=delay-compensated:{strength}", learners=2, train={**PLAIN, "momentum": 0.0}
    )
    found.apply(update_of(1, work(1, 0, 0)))
    found.apply(update_of(2, work(2, 0, 4)))
    torch.manual_seed(3)
    model = mlp()
    read = flat(model)
    inputs, targets = task.train.__getitems__(found.orders.indices([(0, 0, 8)]))  # type: ignore[attr-defined]  # Tensors has it
    gradients = []
    for start in (0, 4):
        model.zero_grad()
        functional.cross_entropy(model(inputs[start : start + 4]), targets[start : start + 4]).backward()  # type: ignore[no-untyped-call]  # torch's own
        gradients.append(torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None]))
    now = read - 0.1 * gradients[0]
    expected = now - 0.1 * (gradients[1] + strength * gradients[1] ** 2 * (now - read))
    torch.testing.assert_close(found.replica.current, expected)
    assert (expected - (now - 0.1 * gradients[1])).abs().max() > 1e-3


def test_the_drift_that_a_policy_asks_for_is_that_of_the_weights() -> None:
    found = arithmetic_of(small_task(96), sync="async:rate=drift:0.5", learners=2)
    stale = work(2, 0, 4)
    found.compute([stale])
    found.apply(update_of(1, work(1, 0, 0)))
    moved = (found.replica.current - found.replica.weights[0]).double()
    answer = found.answer(stale)
    assert answer.drift == pytest.approx(float(moved @ moved)) and float(moved @ moved) > 0
    assert answer.loss is not None and answer.loss > 0
    found.forget([2])
    assert not found.replica.slots
