"""Minibatches as a device gets them, and images that are made ready there."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from offbeat.errors import RequestError
from offbeat.train import served_trainer
from offbeat.train.config import Config, DataConfig, ModelConfig
from offbeat.train.device_input import AHEAD, READER, Gathered, LoaderInput, ResidentInput, input_of, tensors_of
from offbeat.train.image_input import MEAN, ImageInput
from offbeat.train.tasks import Repeated, Tensors, collate_of, cross_entropy, task_of
from train.runs import trained

CPU = torch.device("cpu")


def images(many: int = 10) -> Tensors:
    torch.manual_seed(0)
    return Tensors(torch.randint(256, (many, 3, 6, 6), dtype=torch.uint8), torch.arange(many))


@pytest.mark.parametrize("repeated", [False, True])
def test_a_resident_set_gives_what_a_loader_gives(repeated: bool) -> None:
    data = Repeated(images(), 37) if repeated else images()
    wanted = [torch.tensor([3, 1, 9]), torch.tensor([0]), torch.tensor([9, 9])]
    held = tensors_of(data)
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


def test_on_a_cpu_samples_that_lie_in_memory_are_gathered_as_they_lie() -> None:
    wanted = [torch.tensor([3, 1, 9])]
    ours, loader = (input_of(images(), CPU, lambda batch: batch, workers=many) for many in (0, 1))
    assert isinstance(ours, ResidentInput)
    assert isinstance(loader, LoaderInput)  # reader processes were asked for
    for one, same in zip(next(ours.batches(wanted)), next(loader.batches(wanted)), strict=True):
        assert torch.equal(one, same)
        assert one.is_contiguous()


def test_torchs_own_tensors_can_be_resident_and_other_sets_cannot() -> None:
    assert tensors_of(TensorDataset(torch.zeros(3, 2), torch.zeros(3))) is not None
    assert tensors_of(TensorDataset(torch.zeros(3, 2))) is None


def test_a_resident_set_is_a_data_set_for_a_loader_that_somebody_else_goes_through() -> None:
    data = Repeated(images(), 37)
    held = tensors_of(data)
    assert held is not None
    gathered = Gathered(ResidentInput(held, CPU), len(data))
    assert len(gathered) == 37
    order = [[36, 3], [12], [0, 9, 30]]
    loaders = (DataLoader(one, batch_sampler=order, collate_fn=collate_of(one)) for one in (gathered, data))
    for (inputs, targets), (same, those) in zip(*loaders, strict=True):
        assert torch.equal(inputs, same)
        assert torch.equal(targets, those)
        assert inputs.is_contiguous(memory_format=torch.channels_last)


# --- read ahead, on a GPU that is not there ------------------------------------------------------------------------


class FakeStream:
    """A stream that does all at once, and remembers what waited for what."""

    def __init__(self, *_: Any) -> None:
        self.recorded = 0
        self.waited_for: list[tuple[FakeStream, int]] = []

    def record_event(self) -> tuple[FakeStream, int]:
        self.recorded += 1
        return self, self.recorded

    def wait_event(self, event: tuple[FakeStream, int]) -> None:
        self.waited_for.append(event)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    """The stream on which is computed."""
    stream = FakeStream()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr("offbeat.train.device_input.DataLoader", unpinned)
    return stream


def unpinned(*given: Any, pin_memory: bool, **named: Any) -> DataLoader[Any]:
    assert pin_memory
    return DataLoader(*given, **named)


class Numbers(Dataset[Any]):
    """Images of one number each, which are not in memory; one of them may be broken."""

    def __init__(self, many: int, broken: int = -1) -> None:
        self.many, self.broken, self.read = many, broken, 0

    def __len__(self) -> int:
        return self.many

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.broken:
            raise OSError(f"sample {index} is gone")
        self.read += 1
        return torch.full((3, 4, 4), float(index)), index


def given_by(data: Dataset[Any], wanted: list[Tensor], workers: int = 0) -> Iterator[Any]:
    return LoaderInput(data, torch.device("cuda"), lambda batch: batch, workers).batches(wanted)


def readers() -> list[Any]:
    """Threads and processes that read ahead."""
    gc.collect()
    threads = [thread for thread in threading.enumerate() if thread.name == READER]
    return [*threads, *multiprocessing.active_children()]


def pieces(many: int, size: int = 2) -> list[Tensor]:
    return list(torch.arange(many).flip(0).split(size))  # type: ignore[no-untyped-call] # torch's own


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_read_ahead_comes_in_order_and_each_copy_is_waited_for_on_the_device(
    here: FakeStream, workers: int
) -> None:
    wanted = pieces(15)
    for at, (inputs, targets) in enumerate(given_by(Numbers(15), wanted, workers)):
        assert torch.equal(targets, wanted[at])
        assert torch.equal(inputs[:, 0, 0, 0], wanted[at].float())
        assert inputs.is_contiguous(memory_format=torch.channels_last)
        assert [number for _, number in here.waited_for] == list(range(1, at + 2)), "its own copy, and none later"
    assert len(here.waited_for) == len(wanted)
    assert not readers()


def test_a_few_minibatches_are_read_ahead_and_no_more(here: FakeStream) -> None:
    data = Numbers(40)
    batches = given_by(data, pieces(40, 1))
    next(batches)
    for _ in range(200):
        if data.read >= 1 + AHEAD + 1:  # one taken, those that wait, and one in hand
            break
        threading.Event().wait(0.01)
    assert data.read == 1 + AHEAD + 1
    batches.close()  # type: ignore[attr-defined] # it is a generator


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_reader_raises_is_raised_to_who_takes_minibatches_after_those_before_it(
    here: FakeStream, workers: int
) -> None:
    batches = given_by(Numbers(9, broken=4), pieces(9), workers)
    assert [next(batches)[1].tolist() for _ in range(2)] == [[8, 7], [6, 5]]
    with pytest.raises(OSError, match="sample 4 is gone"):
        next(batches)
    assert not readers()
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("how", ["closed", "dropped", "failed"])
def test_no_reader_is_left_when_whoever_takes_minibatches_stops_early(here: FakeStream, how: str, workers: int) -> None:
    batches = given_by(Numbers(99), pieces(99), workers)
    next(batches)
    assert len(readers()) == 1 + workers
    if how == "closed":
        batches.close()  # type: ignore[attr-defined] # it is a generator
    elif how == "failed":
        with pytest.raises(ZeroDivisionError):
            batches.throw(ZeroDivisionError())  # type: ignore[attr-defined] # a generator
    else:
        del batches
    assert not readers()


def test_samples_are_the_same_wherever_the_data_lies(here: FakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    data, wanted = images(12), pieces(12, 5)
    empty, moved = torch.empty, Tensor.to

    def plain_empty(*given: Any, pin_memory: bool = False, **named: Any) -> Tensor:
        return empty(*given, **named)

    def not_moved(tensor: Tensor, *given: Any, **named: Any) -> Tensor:
        return tensor if given else moved(tensor, **named)

    monkeypatch.setattr(torch, "empty", plain_empty)
    monkeypatch.setattr(Tensor, "to", not_moved)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 20))
    cuda, kinds, found = torch.device("cuda"), [], []
    for place in ("auto", "device", "host"):
        one = input_of(data, cuda, lambda batch: batch, place=place)
        kinds.append(type(one))
        found.append(list(one.batches(wanted)))
    assert kinds == [ResidentInput, ResidentInput, LoaderInput]
    for parts in zip(*found, strict=True):
        for inputs, targets in parts:
            assert torch.equal(inputs, parts[0][0])
            assert torch.equal(targets, parts[0][1])
            assert inputs.is_contiguous(memory_format=torch.channels_last)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 10, 1 << 20))
    assert isinstance(input_of(data, cuda, lambda batch: batch), LoaderInput), "it does not fit"


def test_a_served_learner_computes_the_same_where_its_data_lies_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = trained(tmp_path, sync="async", learners=1)
    asked = tmp_path / "asked"

    def resident(data: Dataset[Any], device: torch.device, *, place: str) -> ResidentInput:
        asked.write_text(place)  # by the learner, which is another process
        held = tensors_of(data)
        assert held is not None
        return ResidentInput(held, device)

    monkeypatch.setattr(served_trainer, "resident_of", resident)
    there = trained(tmp_path, sync="async", learners=1, data={"place": "device"})
    assert asked.read_text() == "device"
    assert plain.weights.keys() == there.weights.keys()
    for name, weight in plain.weights.items():
        assert torch.equal(weight, there.weights[name])


# --- images -------------------------------------------------------------------------------------------------------


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
