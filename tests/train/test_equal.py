"""P learners are one learner on the union of their minibatches: every synchronous strategy, to 1e-6 of the largest
weight after 20 updates and more, in float32. The one learner is in oracle.py, and shares no code with them.

OFFBEAT_MATRIX=1 adds the strategies that only differ in the order of additions.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from offbeat.policies import Apply, Joined, Left, Pushed, create
from offbeat.strategy import ALL_REDUCE, strategies
from offbeat.train.tasks import Task, Tensors
from train.oracle import MakeOptimizer, Recipe, adam, distance, expected, lamb, lars, sgd, warmed_up
from train.runs import CLASSES, FEATURES, Outcome, mlp, points, small_task, trained

CLOSE = 1e-6
SEED = 3
LINES = {  # one of each all-reduce strategy, for 4 learners; True: in every run of the tests
    "central": ("central", False),
    "direct": ("direct", False),
    "ring": ("ring", True),
    "halving-doubling": ("halving-doubling", True),
    "tree": ("tree", False),
    "double-tree": ("double-tree", True),
    "torus": ("torus:2x2", False),
    "multiring": ("multiring:2x2", False),
    "hierarchical": ("hierarchical:2x2", True),
    "fold": ("fold:3", False),
    "all-to-all": ("all-to-all", True),
    "auto": ("auto", True),
    "native": ("native", True),
}
SYNCHRONOUS = ("full-sync", "k-sync:4")
RICH = {"momentum": 0.9, "weight_decay": 0.01, "schedule": "cosine", "warmup_epochs": 1.0, "lr": 0.02}
PLAIN = {"scaling": "none", "lr": 0.1}
MATRIX = bool(os.environ.get("OFFBEAT_MATRIX"))


def rich(learners: int, samples: int, *, epochs: int, least: int) -> Recipe:
    """What RICH says, for minibatches of 4."""
    batch = 4 * learners
    each = -(-samples // batch) if samples % batch >= least else samples // batch
    rate = warmed_up(0.02, learners, each, epochs * each, cosine=True)
    return Recipe(
        batch=batch, epochs=epochs, seed=SEED, least=least, rate=rate, optimizer=sgd(momentum=0.9, decay=0.01)
    )


def plain(batch: int, *, epochs: int, least: int, optimizer: MakeOptimizer | None = None, **more: Any) -> Recipe:
    """What PLAIN says."""
    made = optimizer or sgd()
    return Recipe(batch=batch, epochs=epochs, seed=SEED, least=least, rate=lambda update: 0.1, optimizer=made, **more)


def assert_equal(outcome: Outcome, task: Task, recipe: Recipe) -> None:
    weights, updates = expected(task, recipe)
    assert outcome.end["updates"] == updates >= 20
    assert outcome.lines == []  # nobody has warned of anything
    apart = distance(outcome.weights, weights)
    assert apart < CLOSE, f"{apart:.2e} of the largest weight"
    samples = len(task.train)  # type: ignore[arg-type]  # a map-style set has a length
    dropped = sum(outcome.metrics[-1]["dropped"].values())
    assert outcome.metrics[-1]["samples"] + dropped == samples * recipe.epochs


# --- every strategy ---------------------------------------------------------------------------------------------------


def test_every_all_reduce_strategy_is_compared() -> None:
    assert set(LINES) == {name for name, row in strategies().items() if row.family == ALL_REDUCE}


@pytest.mark.parametrize("line", [*(line for line, always in LINES.values() if always or MATRIX), *SYNCHRONOUS])
def test_four_learners_are_one_with_momentum_decay_schedule_and_warm_up(line: str, tmp_path: Path) -> None:
    task = small_task(samples=100)  # the last update of an epoch has one sample for each learner
    outcome = trained(tmp_path, task, sync=line, learners=4, train={**RICH, "epochs": 3})
    assert_equal(outcome, task, rich(4, 100, epochs=3, least=4 if line not in SYNCHRONOUS else 1))


# --- uneven ends, accumulation, splits --------------------------------------------------------------------------------


def test_an_end_in_which_somebody_would_have_nothing_is_in_the_update_before(tmp_path: Path) -> None:
    task = small_task(samples=67)
    outcome = trained(tmp_path, task, learners=4, train={**RICH, "epochs": 5})
    assert outcome.end["updates"] == 20
    assert_equal(outcome, task, rich(4, 67, epochs=5, least=4))


def test_an_end_that_is_less_than_one_minibatch_is_an_update_of_servers(tmp_path: Path) -> None:
    task = small_task(samples=66)
    outcome = trained(tmp_path, task, learners=4, sync="full-sync", servers=2, train={**RICH, "epochs": 4})
    assert outcome.end["updates"] == 20
    assert_equal(outcome, task, rich(4, 66, epochs=4, least=1))


def test_minibatches_of_unequal_size_count_by_their_samples_on_servers(tmp_path: Path) -> None:
    task = small_task(samples=55)  # the last update has minibatches of 4 and of 3
    outcome = trained(tmp_path, task, sync="full-sync", train={**PLAIN, "epochs": 3})
    assert_equal(outcome, task, plain(8, epochs=3, least=1))


@pytest.mark.parametrize("line", ["full-sync", "k-sync:2"])
def test_what_is_held_is_applied_when_the_last_leaves(line: str) -> None:
    """At an epoch's end all learners leave the policy, since there are no samples: in whatever order they ask."""
    policy = create(line, expect=2)
    for event in (Joined(0), Joined(1), Pushed(0, 1, 0), Left(0)):
        assert not any(isinstance(command, Apply) for command in policy.handle(event))
    assert policy.handle(Left(1)) == (Apply((1,), (1.0,)),)


class Tables(Dataset[Any]):
    """Samples whose input is a table of tensors."""

    def __init__(self, of: Tensors) -> None:
        self.of = of

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.of[index]
        return {"left": inputs[:5], "right": inputs[5:]}, target


class OfTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, table: dict[str, Tensor]) -> Tensor:
        result: Tensor = self.inner(torch.cat([table["left"], table["right"]], 1))
        return result


def test_a_minibatch_of_tables_counts_by_its_samples(tmp_path: Path) -> None:
    train, test = points(53)  # the last update has minibatches of 8 and of 5, in passes of 4, of 2 and of 3
    task = Task(train=Tables(train), test=Tables(test), build=OfTables, loss=functional.cross_entropy)
    changes = {**PLAIN, "epochs": 5, "accumulate": 2}
    served = trained(tmp_path, task, sync="full-sync", train=changes)
    assert served.metrics[-1]["samples"] == 5 * 53
    same = Task(train=train, test=test, build=mlp, loss=functional.cross_entropy)
    weights, updates = expected(same, plain(16, epochs=5, least=1))
    assert served.end["updates"] == updates == 20
    assert distance(served.weights, {f"inner.{name}": tensor for name, tensor in weights.items()}) < CLOSE


@pytest.mark.parametrize(("line", "least"), [("ring", 6), ("full-sync", 1)])
def test_gradients_that_are_accumulated_are_those_of_the_whole(line: str, least: int, tmp_path: Path) -> None:
    task = small_task(samples=100)
    changes = {**PLAIN, "accumulate": 3, "epochs": 5}
    outcome = trained(tmp_path, task, sync=line, train=changes)
    assert_equal(outcome, task, plain(24, epochs=5, least=least))


def test_one_learner_that_accumulates_has_the_curve_of_many(tmp_path: Path) -> None:
    task = small_task(samples=100)  # on servers one learner computes the last four of an epoch
    one = trained(tmp_path, task, learners=1, train={**RICH, "epochs": 4, "accumulate": 4})
    for line in ("ring", "full-sync"):
        many = trained(tmp_path, task, sync=line, learners=4, train={**RICH, "epochs": 4})
        assert distance(many.weights, one.weights) < CLOSE
        for name in ("update", "train_loss", "loss", "accuracy", "rate", "samples"):
            curves = [[metrics[name] for metrics in outcome.metrics] for outcome in (many, one)]
            assert curves[0] == pytest.approx(curves[1], rel=1e-6), name


@pytest.mark.parametrize("split", ["3:1", "1:1:5"])
def test_any_split_gives_the_mean_over_the_samples(split: str, tmp_path: Path) -> None:
    learners = len(split.split(":"))
    task = small_task(samples=87)
    outcome = trained(tmp_path, task, learners=learners, train={**PLAIN, "epochs": 3, "split": split})
    assert_equal(outcome, task, plain(4 * learners, epochs=3, least=learners))


def test_a_split_that_changes_in_the_middle_of_an_epoch_gives_the_mean_over_the_samples(tmp_path: Path) -> None:
    task = small_task(samples=90)
    changes = {**PLAIN, "epochs": 3, "split": "auto"}
    outcome = trained(tmp_path, task, slow=("learner=1,factor=9",), train=changes)
    assert any(note.startswith("samples of an update are now split ") for note in outcome.notes)
    assert_equal(outcome, task, plain(8, epochs=3, least=2))


# --- optimizers, clipping ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("lars", lars(momentum=0.9, decay=0.01)), ("lamb", lamb(decay=0.01))],
    ids=["lars", "lamb"],
)
def test_optimizers_of_whole_tensors_are_those_of_one_process(
    name: str, optimizer: MakeOptimizer, tmp_path: Path
) -> None:
    task = small_task(samples=90)
    changes = {**PLAIN, "epochs": 2, "optimizer": name, "weight_decay": 0.01}
    outcome = trained(tmp_path, task, train=changes)
    assert_equal(outcome, task, plain(8, epochs=2, least=2, optimizer=optimizer))


def test_adam_on_servers_is_that_of_one_process(tmp_path: Path) -> None:
    task = small_task(samples=90)
    outcome = trained(tmp_path, task, sync="full-sync", train={**PLAIN, "epochs": 2, "optimizer": "adam"})
    assert_equal(outcome, task, plain(8, epochs=2, least=1, optimizer=adam))


@pytest.mark.parametrize("line", ["ring", "full-sync"])
def test_the_mean_gradient_is_clipped_not_that_of_a_learner(line: str, tmp_path: Path) -> None:
    task = small_task(samples=90)
    outcome = trained(tmp_path, task, sync=line, train={**PLAIN, "epochs": 2, "clip_norm": 0.2})
    assert_equal(outcome, task, plain(8, epochs=2, least=1, clip=0.2))
    free, _ = expected(task, plain(8, epochs=2, least=1))
    assert distance(outcome.weights, free) > 1e-2


# --- batch norm -------------------------------------------------------------------------------------------------------


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, CLASSES))


@pytest.mark.parametrize(("learners", "split"), [(2, "3:1"), (3, "equal")])
def test_synchronised_batch_norm_is_plain_batch_norm_of_the_union(learners: int, split: str, tmp_path: Path) -> None:
    task = small_task(samples=88, build=normed)
    changes = {**PLAIN, "epochs": 3, "batch_norm": "synchronised", "split": split}
    outcome = trained(tmp_path, task, learners=learners, train=changes)
    assert "1.running_var" in outcome.weights
    assert_equal(outcome, task, plain(4 * learners, epochs=3, least=learners))


# --- what is not finite -----------------------------------------------------------------------------------------------


class Watched(nn.Module):
    """Keeps in a buffer the weights that it last trained with: buffers of every learner are in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("seen", torch.cat([one.detach().flatten() for one in self.inner.parameters()]))
        self.seen: Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen.copy_(torch.cat([one.detach().flatten() for one in self.inner.parameters()]))
        result: Tensor = self.inner(inputs)
        return result


def with_odd_sample(number: float, samples: int = 80) -> Task:
    """One sample is of another size."""
    train, test = points(samples)
    train.inputs[17] *= number
    return Task(train=Tensors(train.inputs, train.targets), test=test, build=Watched, loss=functional.cross_entropy)


def seen_of(outcome: Outcome) -> list[Tensor]:
    return [part["buffer.seen"] for part in outcome.learners()]


def test_a_loss_that_is_no_number_on_one_learner_makes_all_leave_the_update_out(tmp_path: Path) -> None:
    task = with_odd_sample(float("inf"))
    outcome = trained(tmp_path, task, train={**PLAIN, "epochs": 3})
    assert outcome.metrics[-1]["dropped"] == {"not finite": 3 * 8}
    one, other = seen_of(outcome)
    assert torch.equal(one, other)
    outcome.weights.pop("seen")
    weights, updates = expected(task, plain(8, epochs=3, least=2))
    weights.pop("seen")
    assert outcome.end["updates"] == updates == 30
    assert distance(outcome.weights, weights) < CLOSE


def test_an_overflow_of_half_precision_on_one_learner_makes_all_leave_the_update_out(tmp_path: Path) -> None:
    outcome = trained(tmp_path, with_odd_sample(400.0), train={**PLAIN, "epochs": 3, "precision": "fp16"})
    dropped = outcome.metrics[-1]["dropped"]["not finite"]
    assert 0 < dropped <= 3 * 8 and dropped % 8 == 0
    assert outcome.metrics[-1]["samples"] == 240 - dropped
    one, other = outcome.learners()
    assert torch.equal(one["buffer.seen"], other["buffer.seen"]) and one["buffer.seen"].isfinite().all()
    assert float(one["scaler.scale"]) == float(other["scaler.scale"]) == 2.0 ** (16 - dropped // 8)


@pytest.mark.parametrize(("precision", "number"), [("fp32", float("inf")), ("fp16", 400.0)])
def test_servers_drop_a_push_that_is_not_finite_and_go_on(precision: str, number: float, tmp_path: Path) -> None:
    task = with_odd_sample(number)
    outcome = trained(tmp_path, task, sync="full-sync", train={**PLAIN, "epochs": 3, "precision": precision})
    dropped = outcome.metrics[-1]["dropped"]["not finite"]
    # Each learner has a scale of its own: how many overflow until it is low enough depends on who computes what.
    assert dropped == 3 * 4 if precision == "fp32" else 0 < dropped < 60 and dropped % 4 == 0
    assert outcome.metrics[-1]["samples"] == 240 - dropped
    assert all(tensor.isfinite().all() for tensor in outcome.weights.values())


# --- chance -----------------------------------------------------------------------------------------------------------


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 10), nn.ReLU(), nn.Dropout(0.4), nn.Linear(10, CLASSES))


def test_dropout_belongs_to_the_samples_whoever_computes_them(tmp_path: Path) -> None:
    task = small_task(samples=88, build=with_dropout)
    changes = {**PLAIN, "epochs": 2}
    ring, again = (trained(tmp_path, task, train=changes) for _ in range(2))
    served, served_again = (trained(tmp_path, task, sync="full-sync", train=changes) for _ in range(2))
    alone = trained(tmp_path, task, learners=1, train={**changes, "accumulate": 2})
    assert ring.end["updates"] == 22
    assert distance(ring.weights, again.weights) == 0
    assert distance(served.weights, served_again.weights) == 0
    assert distance(ring.weights, alone.weights) < CLOSE
    assert distance(ring.weights, served.weights) < CLOSE
    chance, _ = expected(task, plain(8, epochs=2, least=2))  # the same, but for what was drawn
    assert distance(ring.weights, chance) > 1e-2
