"""Activations that are computed again: the same gradients, statistics and random numbers, from fewer tensors."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from offbeat.errors import RequestError
from offbeat.train.compute_ladder import prove
from offbeat.train.config import TrainConfig
from offbeat.train.device_step import DeviceStep
from offbeat.train.models import build_model
from offbeat.train.precision import Precision
from offbeat.train.recompute import recompute_blocks
from train.runs import FEATURES, small_task, trained

CLASSES = 7
MODELS: dict[str, tuple[tuple[int, ...], dict[str, Any], int]] = {
    "resnet18": ((3, 8, 8), {"width": 4}, 8),
    "resnet50": ((3, 32, 32), {}, 16),
    "transformer": ((6,), {"width": 16, "dropout": 0.3, "layers": 2}, 2),
    "alexnet": ((3, 64, 64), {}, 2),
    "vgg16": ((3, 32, 32), {}, 3),
    "cnn-bn": ((1, 8, 8), {}, 2),
    "mlp": ((5,), {"layers": 3}, 2),
}


def batch_of(name: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(1)
    if name == "transformer":
        pair = torch.randint(CLASSES, (2, 3, *shape), generator=chance)
        return pair[0], pair[1]
    return torch.randn(3, *shape, generator=chance), torch.randint(CLASSES, (3,), generator=chance)


def gradient(model: nn.Module, batch: tuple[Tensor, Tensor], forward: Callable[..., Any] | None = None) -> Tensor:
    torch.manual_seed(7)
    loss = functional.cross_entropy((forward or model)(batch[0]), batch[1])
    return torch.cat([one.flatten() for one in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("resnet50", "alexnet", "vgg16")])
def test_gradients_statistics_and_dropout_are_to_the_bit_those_of_a_model_that_keeps_all(name: str) -> None:
    shape, options, blocks = MODELS[name]
    torch.manual_seed(0)
    plain = build_model(name, shape, CLASSES, options)
    again = copy.deepcopy(plain)
    assert recompute_blocks(again) == blocks
    assert list(again.state_dict()) == list(plain.state_dict())
    twin = copy.deepcopy(again)
    batch = batch_of(name, shape)
    for _ in range(2):
        wanted = gradient(plain, batch)
        assert torch.equal(gradient(again, batch), wanted)
        assert torch.equal(gradient(twin, batch), wanted), "a copy computes with its own weights"
        for mine, theirs in zip(again.buffers(), plain.buffers(), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", MODELS)
def test_the_blocks_of_a_model_are_found(name: str) -> None:
    shape, options, blocks = MODELS[name]
    with torch.device("meta"):
        assert recompute_blocks(build_model(name, shape, CLASSES, options)) == blocks


def test_fewer_bytes_are_kept_for_backward() -> None:
    shape, options, _ = MODELS["resnet18"]
    plain = build_model("resnet18", shape, CLASSES, options)
    again = copy.deepcopy(plain)
    recompute_blocks(again)
    kept = []
    for model in (plain, again):
        sizes: dict[int, int] = {}
        names = {one.data_ptr() for one in (*model.parameters(), *model.buffers())}

        def note(tensor: Tensor, sizes: dict[int, int] = sizes, names: set[int] = names) -> Tensor:
            if tensor.data_ptr() not in names:
                sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor):
            model(torch.randn(8, *shape))
        kept.append(sum(sizes.values()))
    assert kept[1] < kept[0] / 2


def test_blocks_in_several_lists_are_all_found() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, values: Tensor, *, scale: float = 1.0) -> Tensor:
            changed: Tensor = self.second(self.first(values).relu())
            return values + changed * scale

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleList(Layer() for _ in range(3))
            self.decoder = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, values: Tensor) -> Tensor:
            for layer in (*self.encoder, *self.decoder):
                values = layer(values, scale=0.5)
            return values

    plain = Two()
    again = copy.deepcopy(plain)
    assert recompute_blocks(again) == 5
    batch = torch.randn(3, 4), torch.randint(4, (3,))
    assert torch.equal(gradient(again, batch), gradient(plain, batch))


def test_a_model_without_blocks_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no nn.Sequential or nn.ModuleList of several blocks"):
        trained(tmp_path, small_task(build=lambda: nn.Linear(FEATURES, 4)), train={"recompute": True})
    with pytest.raises(RequestError, match="holds single layers"):
        recompute_blocks(nn.ModuleList(nn.Linear(2, 2) for _ in range(3)))
    with pytest.raises(RequestError, match="synchronised batch norm"):
        TrainConfig(recompute=True, batch_norm="synchronised")


@pytest.mark.parametrize("sync", ["ring", "k-async:1"])
def test_a_training_that_recomputes_gives_the_same_weights(tmp_path: Path, sync: str) -> None:
    changes: dict[str, Any] = {"sync": sync, "learners": 2 if sync == "ring" else 1}
    plain = trained(tmp_path, **changes, train={"epochs": 1})
    again = trained(tmp_path, **changes, train={"epochs": 1, "recompute": True})
    assert all(torch.equal(plain.weights[name], again.weights[name]) for name in plain.weights)


def test_a_step_that_recomputes_is_proved_right_norms_and_dropout_included() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 16), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(16, 4))
    recompute_blocks(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step, eager = (
        DeviceStep(model, optimizer, functional.cross_entropy, Precision("fp32", torch.device("cpu"))) for _ in range(2)
    )
    batches = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(2)]
    assert [str(one) for one in prove(step, eager, batches) if not one.holds] == []


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
def test_compiled_code_recomputes_too() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    again = copy.deepcopy(plain)
    recompute_blocks(again)
    batch = torch.randn(6, 4), torch.randint(4, (6,))
    wanted = gradient(plain, batch)
    compiled = torch.compile(again, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(gradient(again, batch, compiled), wanted)
    for mine, theirs in zip(again.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)
