"""Minibatches as a device gets them, and images that are made ready there."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from offbeat.errors import RequestError
from offbeat.train.config import Config, DataConfig, ModelConfig
from offbeat.train.device_input import LoaderInput, ResidentInput, _tensors_of, input_of
from offbeat.train.image_input import MEAN, ImageInput
from offbeat.train.tasks import Repeated, Tensors, cross_entropy, task_of

CPU = torch.device("cpu")


def images(many: int = 10) -> Tensors:
    torch.manual_seed(0)
    return Tensors(torch.randint(256, (many, 3, 6, 6), dtype=torch.uint8), torch.arange(many))


@pytest.mark.parametrize("repeated", [False, True])
def test_a_resident_set_gives_what_a_loader_gives(repeated: bool) -> None:
    data = Repeated(images(), 37) if repeated else images()
    wanted = [torch.tensor([3, 1, 9]), torch.tensor([0]), torch.tensor([9, 9])]
    held = _tensors_of(data)
    assert held is not None
    pairs = zip(
        ResidentInput(held, CPU).batches(wanted),
        LoaderInput(data, CPU, lambda batch: batch, 0).batches(wanted),
        strict=True,
    )
    for (inputs, targets), (same, those) in pairs:
        assert torch.equal(inputs, same)
        assert torch.equal(targets, those)
        assert inputs.is_contiguous(memory_format=torch.channels_last)


def test_on_a_cpu_samples_come_from_a_loader() -> None:
    assert isinstance(input_of(images(), CPU, lambda batch: batch), LoaderInput)


def test_torchs_own_tensors_can_be_resident_and_other_sets_cannot() -> None:
    assert _tensors_of(TensorDataset(torch.zeros(3, 2), torch.zeros(3))) is not None
    assert _tensors_of(TensorDataset(torch.zeros(3, 2))) is None


def test_bytes_are_normalised_and_in_evaluation_nothing_is_drawn() -> None:
    layer = ImageInput(3, augment=True, shift=2).eval()
    flat = torch.tensor(MEAN).round().to(torch.uint8).view(1, 3, 1, 1).expand(2, 3, 6, 6)
    state = torch.get_rng_state()
    assert layer(flat).abs().max() < 0.02
    assert torch.equal(torch.get_rng_state(), state)


def test_augmented_images_are_shifted_and_mirrored_copies_by_the_seed() -> None:
    layer = ImageInput(1, augment=True, shift=1)
    plain = ImageInput(1, augment=False, shift=1)
    image = torch.arange(36, dtype=torch.uint8).view(1, 1, 6, 6)
    possible = set()
    for dy in (-1, 0, 1):
        for dx in (-1, 0, 1):
            rows, columns = (torch.arange(6) + dy).clamp(0, 5), (torch.arange(6) + dx).clamp(0, 5)
            moved = plain(image)[:, :, rows][:, :, :, columns]
            possible |= {tuple(moved.flatten().tolist()), tuple(moved.flip(3).flatten().tolist())}
    seen = set()
    for seed in range(60):
        torch.manual_seed(seed)
        made = tuple(layer(image).flatten().tolist())
        torch.manual_seed(seed)
        assert made == tuple(layer(image).flatten().tolist())
        seen.add(made)
    assert seen <= possible
    assert len(seen) > 10


def test_synthetic_images_as_bytes_have_the_layer_in_front_of_the_model() -> None:
    options: dict[str, bool | int | float | str] = {
        "samples": 8,
        "size": 32,
        "classes": 10,
        "pixels": "bytes",
        "augment": True,
    }
    config = Config(
        model=ModelConfig(name="resnet18", options={"width": 4}),
        data=DataConfig(name="synthetic-images", options=options),
    )
    task = task_of(config)
    model = task.build()
    assert isinstance(model, nn.Sequential)
    assert isinstance(model.input, ImageInput)
    assert task.train[0][0].dtype == torch.uint8
    assert model(task.train[0][0].unsqueeze(0).expand(2, -1, -1, -1)).shape == (2, 10)
    with pytest.raises(RequestError, match="pixels"):
        task_of(Config(data=DataConfig(name="synthetic-images", options={"pixels": "words"})))


def test_the_loss_of_characters_is_torchs_mean_over_them() -> None:
    torch.manual_seed(0)
    scores, targets = torch.randn(3, 7, 5), torch.randint(7, (3, 5))
    torch.testing.assert_close(cross_entropy(scores, targets), nn.functional.cross_entropy(scores, targets))
