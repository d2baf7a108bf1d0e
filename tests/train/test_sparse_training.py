"""Training with an embedding of sparse gradients: resumed to the same bits, counted bytes, and the recipe."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from offbeat.errors import RequestError
from offbeat.predict.virtual import train_again
from offbeat.train import launch
from offbeat.train.config import Config, DataConfig, ModelConfig
from offbeat.train.config_files import changed, read_recipe
from offbeat.train.models import Bag
from offbeat.train.tasks import Task, Tensors, cross_entropy, task_of
from train.runs import config_of, trained

FEATURES, CLASSES = 2000, 4
SMALL = {"model": {"options": {"features": 4000}}, "data": {"options": {"features": 4000, "samples": 1280}}}


def bag_task(*, sparse: bool = True) -> Task:
    chance = torch.Generator().manual_seed(5)
    inputs = torch.randint(FEATURES, (112, 5), generator=chance)
    train, test = Tensors(inputs[:96], inputs[:96, 0] % CLASSES), Tensors(inputs[96:], inputs[96:, 0] % CLASSES)
    return Task(train=train, test=test, build=partial(Bag, FEATURES, 8, CLASSES, sparse=sparse), loss=cross_entropy)


def test_a_resumed_run_has_the_bits_of_one_that_was_not_ended_and_of_dense_gradients(tmp_path: Path) -> None:
    steady = {"schedule": "constant", "warmup_epochs": 0.0, "lr": 0.05, "optimizer": "adagrad"}
    changes: dict[str, Any] = {"learners": 2, "sync": "full-sync", "servers": 2, "train": steady}
    whole = trained(tmp_path, bag_task(), **changes)
    half = trained(tmp_path, bag_task(), **changes | {"train": steady | {"epochs": 2}})
    start = launch.prepare(config_of(**changes), resume=half.run.path, task=bag_task())
    launch.launch(start, lambda record: None, lambda who, line: None)
    resumed = safetensors.torch.load_file(start.run.weights)
    again = train_again(whole.run.path, task=bag_task())
    assert again.end["sent_bytes"] == whole.end["sent_bytes"]  # virtual time counts rows, too
    dense = trained(tmp_path, bag_task(sparse=False), **changes)
    assert all(torch.equal(whole.weights[name], one) for name, one in resumed.items())
    assert all((whole.weights[name] - one).abs().max() < 1e-6 for name, one in dense.weights.items())
    assert whole.end["sent_bytes"] < dense.end["sent_bytes"] / 20
    assert whole.end["received_bytes"] < dense.end["received_bytes"] / 4


def small_recipe(**changes: Any) -> Config:
    return changed(read_recipe("synthetic-rare"), {"device": "cpu", **SMALL, **changes})


def test_the_recipe_refuses_an_all_reduce_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="weight' is sparse"):
        launch.prepare(small_recipe(sync="ring", learners=2), run_dir=tmp_path / "run")


def test_bags_are_the_same_for_a_seed_and_most_of_their_features_are_rare() -> None:
    task, other = task_of(small_recipe()), task_of(small_recipe())
    assert isinstance(task.train, Tensors) and isinstance(other.train, Tensors)
    assert torch.equal(task.train.inputs, other.train.inputs)
    counts = task.train.inputs.flatten().bincount(minlength=4000)
    assert counts[0] > 100 * counts[1000:].float().mean() and int(counts.argmax()) == 0
    assert 0.4 < float(task.train.targets.float().mean()) < 0.6


def test_a_bag_needs_numbers_of_features() -> None:
    with pytest.raises(RequestError, match="model bag needs samples that are numbers of features"):
        task_of(Config(model=ModelConfig(name="bag"), data=DataConfig(name="digits")))
