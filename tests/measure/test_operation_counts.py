"""What is counted of a step beside torch's own counter and beside models small enough to count by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from offbeat.measure.operation_counts import counted
from offbeat.predict.roofline import GPUS, modelled, update_s
from offbeat.train.config import Config
from offbeat.train.config_files import changed
from offbeat.train.recipes import RECIPES
from offbeat.train.tasks import Task, Tensors, cross_entropy, task_of

RESNET50 = task_of(RECIPES["synthetic-resnet50"].config)


def recipe(name: str, **changes: Any) -> Config:
    return changed(RECIPES[name].config, changes)


@pytest.mark.parametrize(
    "config",
    [
        recipe("digits-mlp"),
        recipe("digits-cnn"),
        recipe("synthetic-alexnet", data={"options": {"size": 64}}),
        recipe("digits-cnn", model={"name": "resnet18", "options": {"width": 8}}),
    ],
    ids=lambda config: config.name,
)
def test_flops_are_those_of_torchs_counter_on_real_tensors(config: Config) -> None:
    task = task_of(config)
    pairs = [task.train[at] for at in range(3)]
    inputs, targets = (torch.stack([torch.as_tensor(pair[at]) for pair in pairs]) for at in (0, 1))
    model = task.build()
    with FlopCounterMode(display=False) as forward:
        loss = task.loss(model(inputs), targets)
    with FlopCounterMode(display=False) as backward:
        loss.backward()  # type: ignore[no-untyped-call] # torch's own
    found = counted(task, 3)
    assert found.forward_flops == forward.get_total_flops() > 0
    assert found.flops == forward.get_total_flops() + backward.get_total_flops()


def test_attention_counts_although_torchs_counter_leaves_out_that_of_a_cpu() -> None:
    """Two products of 64 x 64 x width each, 2 FLOPs a product, in 2 layers; backward five such, as torch counts."""
    with_attention = counted(task_of(recipe("text-transformer")), 1)
    width, layers, length, vocabulary = 64, 2, 64, with_attention.layers[0].parameters // 64
    dense = 2 * length * (layers * 12 * width**2 + width * vocabulary)
    assert with_attention.forward_flops == dense + layers * 2 * (2 * length * length * width)


def test_resnet50_has_the_published_multiply_adds_and_parameters() -> None:
    found = counted(RESNET50, 2)
    assert found.forward_flops / 2 / 2 == pytest.approx(4.1e9, rel=0.02)
    assert found.parameters == 25_557_032
    assert sum(layer.forward_flops + layer.backward_flops for layer in found.layers) == found.flops
    assert sum(one.flops for one in found.operations) == found.flops


@pytest.mark.parametrize(("batch", "measured_s"), [(32, 0.0093), (256, 0.054)])
def test_the_modelled_step_of_resnet50_is_near_the_one_that_was_measured_on_an_h200(
    batch: int, measured_s: float
) -> None:
    """bf16; 32 in a CUDA graph, 256 eager, where the host is not late."""
    found = counted(RESNET50, batch, torch.bfloat16)
    layers = modelled(found.operations, GPUS["h200"], "bf16")
    step_s = sum(one.forward_s + one.backward_s for one in layers.values())
    step_s += update_s(found.parameters, 1, GPUS["h200"])
    assert step_s == pytest.approx(measured_s, rel=0.3)


def by_hand(build: Any, features: int = 6) -> Task:
    data = Tensors(torch.zeros(8, features), torch.zeros(8, dtype=torch.int64))
    return Task(train=data, test=data, build=build, loss=cross_entropy)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def test_layers_are_counted_by_hand() -> None:
    first, last = counted(by_hand(two_layers), 4).layers
    assert (first.name, first.parameters, last.name, last.parameters) == ("0", 35, "2", 18)
    assert (first.forward_flops, last.forward_flops) == (2 * 4 * 6 * 5, 2 * 4 * 5 * 3)
    assert first.backward_flops == 2 * 4 * 6 * 5  # the inputs get no gradient
    assert last.backward_flops == 2 * (2 * 4 * 5 * 3)
    assert first.kept_bytes == 4 * (4 * 6 + 4 * 5)  # the inputs, and what the ReLU gave


def test_traffic_is_what_operations_read_and_write() -> None:
    found = counted(by_hand(partial(nn.Linear, 6, 3, bias=False)), 4)
    product = next(one for one in found.operations if one.flops and not one.is_backward)
    assert product.traffic_bytes == 4 * (4 * 6 + 6 * 3 + 4 * 3)
    assert product.kernels == 1


def test_a_narrower_precision_moves_less_and_computes_the_same() -> None:
    task = task_of(recipe("digits-cnn", model={"name": "resnet18", "options": {"width": 8}}))
    wide, narrow = counted(task, 64), counted(task, 64, torch.bfloat16)
    assert wide.flops == narrow.flops
    traffic = [sum(one.traffic_bytes for one in found.operations) for found in (wide, narrow)]
    assert 0.5 * traffic[0] < traffic[1] < 0.7 * traffic[0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.back.weight = self.there.weight

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.back(self.there(values))
        return found


def test_weights_that_two_layers_share_are_counted_once_and_their_flops_twice() -> None:
    found = counted(by_hand(Tied), 4)
    assert [(layer.name, layer.parameters, layer.forward_flops) for layer in found.layers] == [
        ("there", 36, 2 * 2 * 4 * 36)
    ]
