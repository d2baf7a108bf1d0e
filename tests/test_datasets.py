"""The data sets as arrays: what is in them, and what is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from offbeat.datasets import fashion
from offbeat.datasets.fashion import Fashion, fashion_mnist
from offbeat.datasets.image_folder import LabelledFiles, PathList, image_folder
from offbeat.datasets.text import VOCABULARY, decode, encode, text
from offbeat.errors import RequestError

TRAIN, TRAIN_LABELS, TEST, TEST_LABELS = (
    "train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte",
)  # fmt: skip


def idx(*sizes: int, magic: int | None = None, fill: bytes = b"\x05") -> bytes:
    head = 0x800 + len(sizes) if magic is None else magic
    return b"".join(number.to_bytes(4, "big") for number in (head, *sizes)) + fill * int(np.prod(sizes))


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole set in small, three images to train on and two to test with, where OFFBEAT_DATA says."""
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    (folder / TRAIN).write_bytes(idx(3, 28, 28, fill=b"\xff"))
    (folder / TRAIN_LABELS).write_bytes(idx(3))
    (folder / f"{TEST}.gz").write_bytes(gzip.compress(idx(2, 28, 28, fill=b"\x00")))
    (folder / f"{TEST_LABELS}.gz").write_bytes(gzip.compress(idx(2)))
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path))
    return folder


def refused() -> str:
    with pytest.raises(RequestError) as caught:
        fashion_mnist()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- Fashion-MNIST ------------------------------------------------------------------------------------------------


def test_images_are_between_0_and_1_whether_packed_or_plain(small: Path) -> None:
    came = fashion_mnist()
    assert came.images.shape == (3, 1, 28, 28)
    assert came.test_images.shape == (2, 1, 28, 28)
    assert came.images.dtype == np.float32
    assert came.labels.dtype == np.int64
    assert came.images.min() == 1
    assert came.test_images.max() == 0
    assert came.labels.tolist() == [5, 5, 5]
    assert came.test_labels.tolist() == [5, 5]


def test_the_folder_of_torchvision_is_found_too(small: Path) -> None:
    (small.parent / "FashionMNIST").mkdir()
    small.rename(small.parent / "FashionMNIST" / "raw")
    assert len(fashion_mnist().images) == 3


def test_the_real_set_is_whole_where_it_is_installed() -> None:
    try:
        came: Fashion = fashion_mnist()
    except RequestError as error:
        pytest.skip(str(error))
    assert came.images.shape == (60_000, 1, 28, 28)
    assert np.bincount(came.labels).tolist() == [6_000] * 10
    assert np.bincount(came.test_labels).tolist() == [1_000] * 10
    assert (came.images.min(), came.images.max()) == (0, 1)


def test_what_is_not_installed_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fashion, "folders", lambda: (tmp_path,))
    said = refused()
    assert "apt install dataset-fashion-mnist" in said
    assert "OFFBEAT_DATA" in said
    assert str(tmp_path) in said


def test_the_users_own_folder_comes_before_debians(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_DATA", "mine")
    assert fashion.folders()[0] == Path("mine/fashion-mnist")
    monkeypatch.delenv("OFFBEAT_DATA")
    assert fashion.folders()[0] == Path("/usr/share/datasets/fashion-mnist")


BAD = [
    (TRAIN, b"", "header alone has 16"),
    (TRAIN, idx(3, 28, 28)[:-1], "declares 2352 numbers, but it has 2351"),
    (TRAIN, idx(3, 28, 28) + b"x", "declares 2352"),
    (TRAIN, idx(3, 28, 28, magic=0x801), "begins with 0x801, not 0x803"),
    (TRAIN, idx(3, 28, 27), "28x27 pixels"),
    (TRAIN, idx(0, 28, 28), "empty"),
    (TRAIN, idx(3, 28, 28)[:4] + b"\xff" * 12, "declares 79228162458924105385300197375 numbers"),
    (TRAIN_LABELS, idx(4), "4 labels for the 3 images of"),
    (TRAIN_LABELS, idx(3, fill=b"\x0a"), "a label 10"),
    (f"{TEST}.gz", gzip.compress(idx(2, 28, 28))[:-9], "cannot be read"),
    (f"{TEST}.gz", b"no gzip", "cannot be read"),
    (f"{TEST}.gz", gzip.compress(idx(2, 28, 28))[:10] + b"\xff" * 40, "invalid block type"),
]


@pytest.mark.parametrize(("name", "data", "why"), BAD, ids=[why for _, _, why in BAD])
def test_a_bad_file_is_named_and_why_it_is_bad(small: Path, name: str, data: bytes, why: str) -> None:
    (small / name).write_bytes(data)
    said = refused()
    assert str(small / name) in said
    assert why in said


def test_a_folder_in_which_a_file_is_missing_is_named(small: Path) -> None:
    (small / TRAIN_LABELS).unlink()
    assert f"{small} has no {TRAIN_LABELS}" in refused()


# --- text ---------------------------------------------------------------------------------------------------------


def test_text_comes_back_as_it_was_but_for_what_is_not_in_the_vocabulary() -> None:
    assert decode(encode(b"def f():\n    return 'x~'\n")) == "def f():\n    return 'x~'\n"
    assert decode(encode(b"a\tb\r\nc\x00\xff")) == "a b\nc??"
    assert len(VOCABULARY) == len(set(VOCABULARY)) == 96
    assert encode(VOCABULARY.encode()).tolist() == list(range(96))


def test_the_standard_library_is_there_by_default_and_always_the_same() -> None:
    came = text(most_bytes=300_000)
    assert len(came.train) + len(came.test) <= 300_000
    assert len(came.test) > 1_000
    assert "import" in decode(came.train)
    again = text(most_bytes=300_000)
    assert np.array_equal(came.train, again.train)
    assert np.array_equal(came.test, again.test)


def test_every_tenth_file_in_the_order_of_names_is_for_testing(tmp_path: Path) -> None:
    for at in reversed(range(21)):
        (tmp_path / f"{at:02}.txt").write_text(f"{at:02} ")
    (tmp_path / "no.py").write_text("not this one")
    came = text(str(tmp_path), "*.txt")
    assert decode(came.test) == "09 19 "
    assert decode(came.train).split() == [f"{at:02}" for at in range(21) if at not in (9, 19)]


def test_the_last_tenth_of_each_is_for_testing_where_there_are_few_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghij" * 2)
    (tmp_path / "b.txt").write_text("0123456789")
    came = text(str(tmp_path), "*.txt")
    assert decode(came.train) == "abcdefghijabcdefgh012345678"
    assert decode(came.test) == "ij9"


def test_reading_ends_where_there_are_enough_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 30)
    (tmp_path / "b.txt").write_text("b" * 30)
    came = text(str(tmp_path), "*.txt", most_bytes=40)
    assert decode(came.train) == "a" * 27 + "b" * 9
    assert decode(came.test) == "a" * 3 + "b"


@pytest.mark.parametrize(
    ("folder", "pattern", "most_bytes", "why"),
    [
        ("gone", "*.txt", 100, "is not a folder"),
        (".", "*.none", 100, r"no file in '\.' matches \*\.none"),
        (".", "", 100, "is not a file pattern"),
        (".", "/a*", 100, "is not a file pattern"),
        (".", "*.txt", 0, "most_bytes must be at least 1; got 0"),
        (".", "*.txt", 9, "too little text"),
    ],
)
def test_text_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, pattern: str, most_bytes: int, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a" * 30)
    with pytest.raises(RequestError, match=why) as caught:
        text(folder, pattern, most_bytes)
    assert "\n" not in str(caught.value)


# --- a folder of images -------------------------------------------------------------------------------------------


def fill(place: Path, *names: str) -> Path:
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(b"")  # no file is opened
    return place


def named(files: LabelledFiles, place: Path) -> list[tuple[str, int]]:
    return [(path.removeprefix(f"{place}/"), int(at)) for path, at in zip(files.paths, files.labels, strict=True)]


@pytest.mark.parametrize("tested", ["val", "test"])
def test_images_have_the_class_of_their_folder_by_its_place_among_the_sorted_names(tmp_path: Path, tested: str) -> None:
    fill(tmp_path, "train/b/2.JPEG", "train/b/1.png", "train/B/1.jpg", "train/a/deep/er/1.jpeg", f"{tested}/b/3.png")
    found = image_folder(str(tmp_path))
    assert found.classes == ("B", "a", "b")
    wanted = [("train/B/1.jpg", 0), ("train/a/deep/er/1.jpeg", 1), ("train/b/1.png", 2), ("train/b/2.JPEG", 2)]
    assert named(found.train, tmp_path) == wanted
    assert named(found.test, tmp_path) == [(f"{tested}/b/3.png", 2)]


def test_what_is_hidden_or_no_image_is_left_out(tmp_path: Path) -> None:
    fill(tmp_path, "a/1.png", "a/2.png", "a/.hidden.png", "a/.cache/3.png", "a/note.txt", ".git/x.png", "list.csv")
    found = image_folder(str(tmp_path))
    assert found.classes == ("a",)
    assert named(found.train, tmp_path) == [("a/1.png", 0)]
    assert named(found.test, tmp_path) == [("a/2.png", 0)]


def test_without_train_every_tenth_image_of_a_class_is_for_testing_and_of_few_the_last(tmp_path: Path) -> None:
    many = [f"many/{at:02}.png" for at in range(21)]
    fill(tmp_path, *many, "few/1.png", "few/2.png", "few/3.png", "one/1.png")
    found = image_folder(str(tmp_path))
    assert [path for path, _ in named(found.test, tmp_path)] == ["few/3.png", "many/09.png", "many/19.png"]
    assert len(found.train.paths) == 19 + 2 + 1
    assert set(found.train.paths).isdisjoint(found.test.paths)
    assert list(image_folder(str(tmp_path)).test.paths) == list(found.test.paths)


def test_val_is_tested_with_where_there_is_a_test_folder_too(tmp_path: Path) -> None:
    fill(tmp_path, "train/a/1.png", "val/a/2.png", "test/unlabelled.png")
    assert named(image_folder(str(tmp_path)).test, tmp_path) == [("val/a/2.png", 0)]


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ((), "has no folders; each class needs one"),
        (("1.png",), "has no folders; each class needs one"),
        (("a/1.png", "b/1.gif", "c/x.txt"), "/b has no files that end in .jpg, .jpeg or .png, and 1 more have none"),
        (("a/1.png", "b/1.png"), "has no test images"),
        (("train/a/1.png",), "has train/, but no test set: neither val/ nor test/"),
        (("train/a/1.png", "val/b/1.png"), "/val has a class 'b' that"),
        (("train/a/1.png", "val/1.png"), "/val has no folders"),
        (("train/1.png", "val/a/1.png"), "/train has no folders"),
    ],
)
def test_a_folder_without_classes_or_images_is_refused_in_one_line(
    tmp_path: Path, names: tuple[str, ...], why: str
) -> None:
    fill(tmp_path, *names)
    with pytest.raises(RequestError) as caught:
        image_folder(str(tmp_path))
    assert why in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_of_images_must_be_named_and_be_there(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"--set data\.options\.folder=FOLDER"):
        image_folder("")
    with pytest.raises(RequestError, match=r"no such folder: .*/none"):
        image_folder(str(tmp_path / "none"))


def test_paths_in_one_piece_are_those_that_were_given() -> None:
    paths = ["a/1.png", "", "ü/ß.png", "b\udcff.png"]
    kept = PathList(paths)
    assert list(kept) == paths
    assert (kept[-1], kept[1:3]) == (paths[-1], paths[1:3])
    with pytest.raises(IndexError):
        kept[4]
    assert list(PathList([])) == []
