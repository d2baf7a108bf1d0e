"""Training with coded gradients: it learns, it tells what is not coded, and a resumed run has the same bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from offbeat.errors import OffbeatError
from offbeat.train import launch
from offbeat.train.config_files import changed, read_recipe
from train.runs import CLASSES, FEATURES, Outcome, config_of, small_task, trained


def wide() -> nn.Module:
    """82 kB of parameters, in one bucket: enough to be coded."""
    return nn.Sequential(nn.Linear(FEATURES, 1200), nn.ReLU(), nn.Linear(1200, CLASSES))


def same(one: Outcome, other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.weights.items())


CODED = [("ring:codec=int8", 2), ("ring:codec=int8:stochastic", 3), ("ring:codec=top-k:0.05", 2)]
CODED += [("all-to-all:codec=power-sgd:2", 3), ("ring:codec=power-sgd:2", 3), ("ring:codec=1-bit", 2)]


# With several learners, who computes which samples is chance, and so is what each has not sent yet.
SERVED = [("full-sync:codec=top-k:0.05", 1), ("async:codec=power-sgd:2,down=bf16", 1), ("local-sgd:2,codec=int4", 1)]


STEADY = {"schedule": "constant", "warmup_epochs": 0.0, "lr": 0.01}  # whatever the number of epochs


@pytest.fixture(scope="module")
def uncoded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, torch.Tensor]]:
    """The weights of a run without a codec, by the number of its learners."""

    @functools.cache
    def weights(learners: int) -> dict[str, torch.Tensor]:
        folder = tmp_path_factory.mktemp("uncoded")
        return trained(folder, small_task(build=wide), learners=learners, train=STEADY).weights

    return weights


@pytest.mark.parametrize(("sync", "learners"), [*CODED, *SERVED])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_ended(
    sync: str, learners: int, tmp_path: Path, uncoded: Callable[[int], dict[str, torch.Tensor]]
) -> None:
    changes: dict[str, Any] = {"learners": learners, "sync": sync, "train": STEADY}
    whole = trained(tmp_path, small_task(build=wide), **changes)
    half = trained(tmp_path, small_task(build=wide), **changes | {"train": STEADY | {"epochs": 2}})
    own = half.learners()[-1]
    assert any(name.startswith("residual.") for name in own)
    start = launch.prepare(config_of(**changes), resume=half.run.path, task=small_task(build=wide))
    launch.launch(start, lambda record: None, lambda who, line: None)
    resumed = safetensors.torch.load_file(start.run.weights)
    assert same(whole, resumed)
    assert not same(whole, uncoded(learners))  # it is coded at all


@pytest.mark.parametrize("codec", ["power-sgd:4", "1-bit"])
def test_with_momentum_strong_codecs_train_nearly_as_well_as_none(codec: str, tmp_path: Path) -> None:
    """They reached 60 to 70 %: one matrix for all layers, and blocks of 2,048 signs with one size."""
    config = changed(
        read_recipe("digits-mlp"),
        {"learners": 2, "sync": f"ring:codec={codec}", "device": "cpu", "train": {"epochs": 6}}
        | {"model": {"options": {"hidden": 1024}}},
    )
    start = launch.prepare(config, run_dir=tmp_path / "run")
    result = launch.launch(start, lambda record: None, lambda who, line: None)
    assert result.end["accuracy"] > 0.91


def test_a_model_that_is_too_small_to_be_coded_is_told(tmp_path: Path) -> None:
    coded, plain = trained(tmp_path, sync="ring:codec=int8"), trained(tmp_path)
    assert any("sent without a codec" in note for note in coded.notes)
    assert same(plain, coded.weights)


def test_a_loss_scale_that_changes_and_a_codec_that_keeps_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(OffbeatError, match=r"train\.precision: fp16 does not work with 'ring:codec=int8'.*use bf16"):
        trained(tmp_path, sync="ring:codec=int8", train={"precision": "fp16"})


@pytest.mark.parametrize(
    ("before", "after"),
    [("k-async:2,codec=power-sgd:2", "k-async:2,codec=int8"), ("ring:codec=int8", "ring:codec=power-sgd:2")],
)
def test_a_run_goes_on_with_another_codec(before: str, after: str, tmp_path: Path) -> None:
    half = trained(tmp_path, small_task(build=wide), sync=before, train=STEADY | {"epochs": 1})
    start = launch.prepare(config_of(sync=after, train=STEADY), resume=half.run.path, task=small_task(build=wide))
    launch.launch(start, lambda record: None, lambda who, line: None)
    assert start.run.read_metrics()[-1]["epoch"] == start.config.train.epochs > 1


@pytest.mark.parametrize("is_coded", [True, False])
def test_residuals_of_learners_that_are_gone_are_told_where_there_were_some(is_coded: bool, tmp_path: Path) -> None:
    before = "ring:codec=top-k:0.05" if is_coded else "ring"
    half = trained(tmp_path, small_task(build=wide), learners=3, sync=before, train=STEADY | {"epochs": 2})
    config = config_of(learners=2, sync="ring:codec=top-k:0.05", train=STEADY)
    start = launch.prepare(config, resume=half.run.path, task=small_task(build=wide))
    notes: list[str] = []
    launch.launch(start, lambda record: notes.append(str(record.get("text", ""))), lambda who, line: None)
    assert sum("residuals of 1 learner that are gone are lost" in note for note in notes) == is_coded


def test_stages_and_codecs_are_not_trained_together(tmp_path: Path) -> None:
    with pytest.raises(OffbeatError, match="--parallel does not work with a codec"):
        trained(tmp_path, sync="ring:codec=int8", parallel="stages=2,microbatches=2")
