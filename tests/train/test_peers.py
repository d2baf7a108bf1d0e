"""Learners without a server: what they train, what they report, and what happens when one of them is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from offbeat.errors import OffbeatError
from offbeat.train import launch
from train.oracle import distance
from train.runs import Outcome, config_of, small_task, trained

ASYNC = "all-to-all:async"
STEADY = {"schedule": "constant", "warmup_epochs": 0.0, "scaling": "none"}


def samples_of(outcome: Outcome) -> int:
    last = outcome.metrics[-1]
    dropped: dict[str, int] = last["dropped"]
    return int(last["samples"]) + sum(dropped.values())


def replicas(outcome: Outcome) -> list[Tensor]:
    return [part["residual.replica"] for part in outcome.learners()]


def vector(weights: dict[str, Tensor], like: Any) -> Tensor:
    return torch.cat([weights[name].reshape(-1) for name, _ in like.named_parameters()])


@pytest.mark.parametrize("sync", [ASYNC, "average-once"])
def test_one_learner_alone_is_plain_training(sync: str, tmp_path: Path) -> None:
    alone = trained(tmp_path, learners=1, sync=sync)
    plain = trained(tmp_path, learners=1, sync="ring")
    assert distance(alone.weights, plain.weights) < 1e-6
    assert alone.end["updates"] == plain.end["updates"]


@pytest.mark.parametrize("more", ["", ",average=5", ",window=1", ",codec=int8", ",codec=power-sgd:2"])
def test_every_sample_is_applied_once_and_replicas_become_one(more: str, tmp_path: Path) -> None:
    outcome = trained(tmp_path, learners=3, sync=ASYNC + more, train={"epochs": 4, "lr": 0.02})
    last = outcome.metrics[-1]
    assert last["samples"] == 4 * 96 and not last["dropped"]
    assert last["update"] == outcome.end["updates"] == 4 * -(-96 // 4)
    assert last["staleness"] is not None and 0 <= last["consensus"]["mean"] <= last["consensus"]["most"]
    assert last["sent_bytes"] and last["train_loss"] < outcome.metrics[0]["train_loss"]


def test_with_a_window_of_one_staleness_is_bounded(tmp_path: Path) -> None:
    """Each other learner can have made two updates since: one that was under way, and one more."""
    outcome = trained(tmp_path, learners=2, sync=f"{ASYNC},window=1", train={"epochs": 4})
    assert outcome.end["staleness_mean"] <= 2


def test_average_once_is_the_mean_of_replicas_that_never_met(tmp_path: Path) -> None:
    task = small_task()
    outcome = trained(tmp_path, task, learners=3, sync="average-once", train={"epochs": 3})
    apart = torch.stack(replicas(outcome))
    assert float((apart[0] - apart[1]).abs().max()) > 1e-3
    mean = vector(outcome.weights, task.build())
    assert float((apart.mean(0) - mean).abs().max()) < 1e-6


def test_learners_can_start_from_weights_of_their_own(tmp_path: Path) -> None:
    task = small_task()
    still = {"epochs": 1, "lr": 1e-9, "warmup_epochs": 0.0, "momentum": 0.0, "weight_decay": 0.0}
    equal = replicas(trained(tmp_path, task, learners=2, sync="average-once", train=still))
    own = replicas(trained(tmp_path, task, learners=2, sync="average-once:start=own", train=still))
    assert float((equal[0] - equal[1]).abs().max()) < 1e-5
    assert float((own[0] - own[1]).abs().max()) > 0.1
    assert float((own[0] - equal[0]).abs().max()) < 1e-5


@pytest.mark.parametrize("sync", [f"{ASYNC},average=7", f"{ASYNC},codec=int8", "average-once"])
@pytest.mark.parametrize("lost", [0, 1])
def test_the_others_go_on_when_a_learner_is_killed(sync: str, lost: int, tmp_path: Path) -> None:
    calls = 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += outputs.requires_grad  # not in an evaluation
        if os.environ.get("RANK") == str(lost) and calls == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return functional.cross_entropy(outputs, targets)

    outcome = trained(tmp_path, small_task(loss=loss), learners=3, sync=sync, train={"epochs": 6})
    last = outcome.metrics[-1]
    assert last["epoch"] == 6
    assert any(f"learner {lost} is gone; 2 learners go on" in note for note in outcome.notes)
    assert samples_of(outcome) == 6 * 96
    assert 1 <= last["dropped"]["lost with its learner"] <= 5 * 4


def test_all_learners_but_one_may_be_lost(tmp_path: Path) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.requires_grad and os.environ.get("RANK") != "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return functional.cross_entropy(outputs, targets)

    outcome = trained(tmp_path, small_task(loss=loss), learners=3, sync=ASYNC, train={"epochs": 2})
    assert outcome.metrics[-1]["epoch"] == 2 and samples_of(outcome) == 2 * 96


@pytest.mark.parametrize("sync", [f"{ASYNC},codec=top-k:0.1", "average-once"])
def test_a_run_is_resumed_from_what_each_learner_had(sync: str, tmp_path: Path) -> None:
    half = trained(tmp_path, learners=2, sync=sync, train=STEADY | {"epochs": 2})
    before = half.learners()
    assert any(name.startswith("optimizer.") for name in before[1])
    config = config_of(learners=2, sync=sync, train=STEADY | {"epochs": 3})
    start = launch.prepare(config, resume=half.run.path, task=small_task())
    result = launch.launch(start, lambda record: None, lambda who, line: None)
    assert result.end["epochs"] == 3 and result.end["updates"] == 3 * 24
    with pytest.raises(OffbeatError, match="cannot be resumed under 'ring'"):
        launch.prepare(config_of(learners=2, train={"epochs": 4}), resume=half.run.path, task=small_task())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train": {"split": "3:1"}}, "train.split"),
        ({"train": {"batch_norm": "synchronised"}}, "train.batch_norm"),
        ({"parallel": "stages=2,microbatches=2"}, "parallel"),
        ({"sync": "all-to-all:async,window=0"}, "window"),
        ({"sync": "all-to-all:asink"}, "all-to-all"),
    ],
)
def test_what_peers_cannot_do_is_refused_in_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(OffbeatError) as error:
        config_of(**{"learners": 2, "sync": ASYNC} | changes)
    assert said in str(error.value) and "\n" not in str(error.value)
