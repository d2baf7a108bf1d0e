"""Image files as samples: decoded, cut to one size, read by processes; and what is no image, named in one line."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

from offbeat.datasets.image_folder import LabelledFiles, PathList
from offbeat.errors import OffbeatError, RequestError
from offbeat.runs.run_folder import RunDir
from offbeat.train import device_input, launch
from offbeat.train.config import Config, DataConfig, ModelConfig
from offbeat.train.config_files import changed, read_config
from offbeat.train.device_input import LoaderInput, readers_of
from offbeat.train.image_files import BrokenImageError, ImageFiles, decode
from offbeat.train.image_input import ImageInput
from offbeat.train.precision import Precision
from offbeat.train.recipes import RECIPES
from offbeat.train.tasks import Task, check, collate_of, task_of
from offbeat.train.trainer import evaluate, mover
from train.runs import Outcome, trained

CPU = torch.device("cpu")
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small models lose much where other tests run beside them
    yield
    torch.set_num_threads(threads)


def image_of(*columns: tuple[int, int, int], height: int = 20, width: int = 10) -> Image.Image:
    """Columns of one colour each."""
    row = np.repeat(np.array(columns, dtype=np.uint8), width, axis=0)
    return Image.fromarray(np.repeat(row[None], height, axis=0))


def files(folder: Path, *images: Image.Image) -> LabelledFiles:
    for at, image in enumerate(images):
        image.save(folder / f"{at}.png")
    return LabelledFiles(PathList(f"{folder}/{at}.png" for at in range(len(images))), np.arange(len(images)))


def folder_of(place: Path, *, many: int = 12, side: int = 12) -> Path:
    """Two classes, of dark and of light images of several sizes, JPEG and PNG."""
    for name, level in (("dark", 40), ("light", 210)):
        (place / name).mkdir(parents=True)
        for at in range(many):
            pixels = np.random.default_rng(at).integers(
                level - 30, level + 30, (side + at, side + 2, 3), dtype=np.uint8
            )
            Image.fromarray(pixels).save(place / name / f"{at:03}.{'jpg' if at % 2 else 'png'}")
    return place


# --- decoding -----------------------------------------------------------------------------------------------------


def test_an_image_is_its_largest_square_in_the_middle_scaled_to_one_size(tmp_path: Path) -> None:
    image_of(RED, GREEN, GREEN, BLUE).save(tmp_path / "wide.png")
    image_of(RED, GREEN, height=80).transpose(Image.Transpose.ROTATE_90).save(tmp_path / "tall.png")
    for size in (5, 20, 40):
        wide = decode(str(tmp_path / "wide.png"), size)
        assert wide.shape == (size, size, 3)
        assert (wide[:, 1:-1] == GREEN).all(), "at its edges an image is blurred, as any that is scaled"
    assert decode(str(tmp_path / "tall.png"), 8).shape == (8, 8, 3)


def _with_alpha(colour: tuple[int, ...], mode: str) -> Image.Image:
    return Image.new(mode, (9, 7), colour)


def _palette(*, transparent: bool) -> Image.Image:
    image = Image.new("RGB", (9, 7), (10, 200, 30)).convert("P", palette=Image.Palette.ADAPTIVE)
    if transparent:
        image.info["transparency"] = image.getpixel((0, 0))
    return image


KINDS: dict[str, tuple[Image.Image, str, tuple[int, int, int]]] = {
    "grey": (Image.new("L", (9, 7), 100), "png", (100, 100, 100)),
    "grey JPEG": (Image.new("L", (9, 7), 100), "jpg", (100, 100, 100)),
    "black and white": (Image.new("1", (9, 7), 1), "png", WHITE),
    "16 bits": (Image.fromarray(np.full((7, 9), 100 * 256 + 7, dtype=np.uint16)), "png", (100, 100, 100)),
    "grey with alpha": (_with_alpha((100, 255), "LA"), "png", (100, 100, 100)),
    "opaque": (_with_alpha((10, 200, 30, 255), "RGBA"), "png", (10, 200, 30)),
    "transparent": (_with_alpha((10, 200, 30, 0), "RGBA"), "png", WHITE),
    "half transparent": (_with_alpha((0, 0, 0, 128), "RGBA"), "png", (127, 127, 127)),
    "palette": (_palette(transparent=False), "png", (10, 200, 30)),
    "palette with a transparent colour": (_palette(transparent=True), "png", WHITE),
    "CMYK": (Image.new("CMYK", (9, 7), (0, 255, 255, 0)), "jpg", RED),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_pixels_becomes_rgb(kind: str, tmp_path: Path) -> None:
    image, ending, colour = KINDS[kind]
    image.save(tmp_path / f"one.{ending}")
    pixels = decode(str(tmp_path / f"one.{ending}"), 6)
    assert pixels.dtype == np.uint8
    assert np.abs(pixels.astype(int) - colour).max() <= 3


def test_a_photograph_stands_as_its_camera_was_held(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by a quarter
    image_of(RED, BLUE, height=20).save(tmp_path / "turned.jpg", exif=exif, quality=95, subsampling=0)
    pixels = decode(str(tmp_path / "turned.jpg"), 20).astype(int)
    assert np.abs(pixels[:8] - RED).max() < 30, "what was on the left is above"
    assert np.abs(pixels[-8:] - BLUE).max() < 30


def test_a_broken_word_about_the_camera_does_not_lose_the_image(tmp_path: Path) -> None:
    image_of(GREEN).save(tmp_path / "odd.jpg", exif=b"Exif\0\0" + b"no words")
    assert np.abs(decode(str(tmp_path / "odd.jpg"), 4).astype(int) - GREEN).max() < 5


def test_a_large_jpeg_decoded_in_small_is_the_same_image(tmp_path: Path) -> None:
    slope = np.linspace(0, 255, 640).astype(np.uint8)
    Image.fromarray(np.stack([np.tile(slope, (640, 1))] * 3, -1)).save(tmp_path / "large.jpg", quality=95)
    pixels = decode(str(tmp_path / "large.jpg"), 32).astype(int)
    assert np.abs(pixels[:, :, 0] - np.linspace(4, 251, 32)).max() < 4


def test_a_jpeg_is_never_decoded_smaller_than_it_is_wanted(tmp_path: Path) -> None:
    image_of((0, 0, 0), WHITE, height=70, width=35).save(tmp_path / "edge.jpg", quality=95)
    pixels = decode(str(tmp_path / "edge.jpg"), 32).astype(int)
    assert pixels[:, :14].max() < 20, "the edge in the middle is sharp"
    assert pixels[:, 18:].min() > 235


def broken(place: Path) -> dict[str, Path]:
    good = place / "good.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(good)
    Image.open(good).save(place / "good.png")
    (place / "empty.jpg").write_bytes(b"")
    (place / "words.png").write_text("an error page\nwith two lines")
    (place / "cut.jpg").write_bytes(good.read_bytes()[:-800])
    (place / "cut.png").write_bytes((place / "good.png").read_bytes()[:-800])
    damaged = bytearray((place / "good.png").read_bytes())
    damaged[60:80] = bytes(20)
    (place / "damaged.png").write_bytes(damaged)
    (place / "folder.jpg").mkdir()
    Image.open(good).save(place / "other.png", format="BMP")
    names = ("empty.jpg", "words.png", "cut.jpg", "cut.png", "damaged.png", "folder.jpg", "other.png", "none.jpg")
    return {name: place / name for name in names}


def test_a_file_that_is_no_whole_image_is_named_in_one_line(tmp_path: Path) -> None:
    for path in broken(tmp_path).values():
        with pytest.raises(BrokenImageError) as caught:
            decode(str(path), 16)
        said = str(caught.value)
        assert said.startswith(f"cannot decode the image {path}: ")
        assert said.endswith("; repair or remove it")
        assert "\n" not in said
        assert len(said) > len(f"cannot decode the image {path}: ; repair or remove it") + 5, "and why"


def test_a_reader_process_says_of_a_broken_file_what_one_process_says(tmp_path: Path) -> None:
    path = broken(tmp_path)["cut.jpg"]
    data = ImageFiles(LabelledFiles(PathList([str(path)]), np.zeros(1, dtype=np.int64)), 8)
    said = set()
    for workers in (0, 1):
        with pytest.raises(BrokenImageError) as caught:
            next(iter(DataLoader(data, batch_size=1, num_workers=workers, collate_fn=collate_of(data))))
        said.add(str(caught.value))
        traceback.clear_frames(caught.tb)  # so that the reader process ends now, and not in another test
    assert len(said) == 1


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(RequestError, match=r"data images needs Pillow.*pip install 'offbeat\[images\]'"):
        ImageFiles(LabelledFiles(PathList([]), np.zeros(0, dtype=np.int64)), 8)


# --- as samples ---------------------------------------------------------------------------------------------------


def test_a_minibatch_is_that_of_single_samples_and_has_its_channels_last(tmp_path: Path) -> None:
    data = ImageFiles(files(tmp_path, image_of(RED), image_of(GREEN, BLUE), image_of(BLUE, width=31)), 8)
    images, targets = data.__getitems__([2, 0, 1, 2])
    assert images.shape == (4, 3, 8, 8)
    assert images.dtype == torch.uint8
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert targets.tolist() == [2, 0, 1, 2]
    assert torch.equal(images, torch.stack([data[at][0] for at in (2, 0, 1, 2)]))
    assert data[1][1] == 1


def test_reader_processes_give_the_same_samples_in_the_same_order(tmp_path: Path) -> None:
    images = [Image.new("RGB", (4 + at, 9), (at, 2 * at, 3 * at)) for at in range(9)]
    data = ImageFiles(files(tmp_path, *images), 5)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    wanted = list(order.split(2))  # type: ignore[no-untyped-call] # torch's own
    alone, read = (list(LoaderInput(data, CPU, mover(CPU), workers).batches(wanted)) for workers in (0, 2))
    for (inputs, targets), (same, those), indices in zip(alone, read, wanted, strict=True):
        assert torch.equal(inputs, same)
        assert torch.equal(targets, those)
        assert torch.equal(targets, indices)
        assert same.is_contiguous(memory_format=torch.channels_last)


class Readers(Dataset[Any]):
    """Samples that say which process has read them."""

    decoded_bytes = 8

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(2), os.getpid()


def test_an_evaluation_of_decoded_samples_is_read_by_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_input, "_cores", lambda: 3)
    seen: set[int] = set()

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.update(targets.tolist())
        return outputs.sum() * 0

    task = Task(train=Readers(), test=Readers(), build=lambda: nn.Linear(2, 1), loss=loss)
    evaluate(nn.Linear(2, 1), task, Precision("fp32", CPU), mover(CPU))
    assert os.getpid() not in seen
    assert len(seen) == 2, "a core is left for who evaluates"


def test_readers_are_as_many_as_cores_are_free_and_shared_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_input, "_cores", lambda: 16)
    monkeypatch.setattr(device_input, "_shared_bytes", lambda: 1 << 30)
    data = Readers()
    assert readers_of(data, 0, batch_size=4) == 15
    assert readers_of(data, 0, batch_size=4, learners=4) == 3
    assert readers_of(data, 0, batch_size=4, learners=16) == 0
    assert readers_of(data, 3, batch_size=4) == 3, "what is asked for"
    assert readers_of([], 0, batch_size=4) == 0  # type: ignore[arg-type] # samples of one's own, in memory or not
    monkeypatch.setattr(device_input, "_shared_bytes", lambda: 64 << 20)
    assert readers_of(data, 0, batch_size=1 << 19) == 4, "half of 64 MiB, for 2 x 4 MiB each"
    assert readers_of(data, 0, batch_size=1 << 30) == 0


def test_what_helps_against_waiting_fits_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_input, "_cores", lambda: 16)
    monkeypatch.setattr(device_input, "_shared_bytes", lambda: 1 << 30)

    def remedy(data: Any, workers: int) -> str:
        given = LoaderInput(data, CPU, mover(CPU), workers)
        given.batches([torch.arange(4)])
        return given.remedy

    assert remedy([0] * 4, 0) == "--workers 8"
    assert remedy([0] * 4, 12) == "--workers 16"
    assert remedy([0] * 4, 16) == ""
    assert remedy(Readers(), 2) == "--workers 4"
    assert "scale the image files down" in remedy(Readers(), 0)
    monkeypatch.setattr(device_input, "_shared_bytes", lambda: 1 << 8)
    assert "/dev/shm is too small" in remedy(Readers(), 0)


# --- as data ------------------------------------------------------------------------------------------------------


def config_of(folder: Path, **options: Any) -> Config:
    return Config(
        model=ModelConfig(name="cnn"),
        data=DataConfig(name="images", options={"folder": str(folder), "size": 16, **options}),
    )


def test_a_folder_of_images_is_a_task_for_a_built_in_model(tmp_path: Path) -> None:
    task = task_of(config_of(folder_of(tmp_path)))
    check(task)
    model = task.build()
    assert isinstance(model, nn.Sequential)
    assert isinstance(model.input, ImageInput)
    assert model.input.augment
    assert (len(task.train), len(task.test)) == (22, 2)  # type: ignore[arg-type] # map-style
    assert model(task.train.__getitems__([0, 21])[0]).shape == (2, 2)  # type: ignore[attr-defined] # they are ImageFiles
    plain = task_of(config_of(tmp_path, augment=False)).build()
    assert not plain.input.augment  # type: ignore[union-attr] # it is the layer


def test_a_broken_first_image_is_found_before_a_training(tmp_path: Path) -> None:
    folder_of(tmp_path)
    (tmp_path / "dark" / "000.png").write_bytes(b"")
    with pytest.raises(
        RequestError, match=r"^cannot decode the image .*dark/000.png: it is neither a JPEG nor a PNG file"
    ):
        check(task_of(config_of(tmp_path)))


def test_the_recipe_without_a_folder_says_how_to_name_one() -> None:
    with pytest.raises(RequestError, match=r"--set data\.options\.folder=FOLDER"):
        task_of(RECIPES["images-resnet50"].config)


def train_on(folder: Path, line: str, epochs: int) -> Outcome:
    """One learner and one process that reads."""
    task = task_of(config_of(folder))
    how = {"epochs": epochs, "batch_size": 6, "lr_batch": 6, "lr": 0.01}
    return trained(folder.parent, task, sync=line, learners=1, data={"workers": 1}, train=how)


@pytest.mark.parametrize("line", ["ring", "async"])
def test_a_training_learns_from_a_folder_with_a_reader_process(line: str, tmp_path: Path) -> None:
    outcome = train_on(folder_of(tmp_path / "images", many=20), line, 3)
    assert outcome.end["accuracy"] == 1.0
    assert outcome.end["epochs"] == 3


def test_an_epoch_is_not_lost_with_a_broken_image_of_the_test_set(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "images", many=40)  # of each class 4 are tested; the first two were looked at before
    bad = folder / "light" / "039.jpg"
    bad.write_bytes(b"")
    with pytest.raises(OffbeatError, match=r"039\.jpg: it is neither a JPEG.*; continue from .*--resume"):
        train_on(folder, "ring", 2)
    Image.new("RGB", (9, 9)).save(bad)
    config = config_of(folder)
    run = next(path for path in tmp_path.iterdir() if path != folder)
    how = changed(
        config,
        {
            "device": "cpu",
            "learners": 1,
            "seed": read_config(RunDir(run)).seed,
            "train": {"epochs": 2, "batch_size": 6},
        },
    )
    start = launch.prepare(how, resume=run, task=task_of(config))
    assert launch.launch(start, lambda record: None, lambda who, line: None).end["epochs"] == 2


def test_a_broken_image_in_the_middle_ends_a_training_with_one_line(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "images", many=20)
    bad = folder / "light" / "007.jpg"
    bad.write_bytes(bad.read_bytes()[:300])
    with pytest.raises(OffbeatError) as caught:
        train_on(folder, "ring", 1)
    assert f"cannot decode the image {bad}: " in str(caught.value)
    assert "\n" not in str(caught.value)
