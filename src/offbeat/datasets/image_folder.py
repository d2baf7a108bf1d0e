"""A folder of images with a folder for each class: which files there are, and of which class each is.

    FOLDER/train/CLASS/...  and FOLDER/val/CLASS/... or FOLDER/test/CLASS/...   to train on and to test with
    FOLDER/CLASS/...        every tenth file of a class is for testing; of fewer than ten, the last

Laws: a class is called as its folder, and its number is its place among the sorted names. The files of a class are
those that end in .jpg, .jpeg or .png, also in folders further inside, in the order of their paths. What is hidden
(.name) is left out. No file is opened here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import RequestError

ENDINGS = (".jpg", ".jpeg", ".png")
TESTED = ("val", "test")  # which folder is tested with, beside train/

_FILES = "files that end in .jpg, .jpeg or .png"


class PathList(Sequence[str]):
    """Many paths in one piece of memory: processes that read a list would each get a copy of it, page by page."""

    def __init__(self, paths: Iterable[str]) -> None:
        encoded = [os.fsencode(path) for path in paths]
        self._text = b"".join(encoded)
        self._ends = np.cumsum([0, *map(len, encoded)])

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, at: int) -> str: ...

    @overload
    def __getitem__(self, at: slice) -> list[str]: ...

    def __getitem__(self, at: int | slice) -> str | list[str]:
        if isinstance(at, slice):
            return [self[one] for one in range(len(self))[at]]
        at = range(len(self))[at]
        return os.fsdecode(self._text[self._ends[at] : self._ends[at + 1]])


class LabelledFiles(NamedTuple):
    """Files, and the class of each."""

    paths: PathList
    labels: NDArray[np.int64]


class ImageFolder(NamedTuple):
    """What is in such a folder."""

    classes: tuple[str, ...]
    train: LabelledFiles
    test: LabelledFiles


def image_folder(folder: str) -> ImageFolder:
    """What is in `folder`; RequestError if that is no folder, has no class, or one without images, or none to test."""
    if not folder:
        raise RequestError("data images needs the folder with the images: --set data.options.folder=FOLDER")
    place = Path(folder)
    if not place.is_dir():
        raise RequestError(f"data images: no such folder: {place}")
    if not (place / "train").is_dir():
        found = _classes_in(place)
        split = {name: _split(files) for name, files in found.items()}
        return _labelled(place, {name: one[0] for name, one in split.items()}, {n: one[1] for n, one in split.items()})
    tested = next((place / name for name in TESTED if (place / name).is_dir()), None)
    if tested is None:
        raise RequestError(f"data images: {place} has train/, but no test set: neither {TESTED[0]}/ nor {TESTED[1]}/")
    train, test = _classes_in(place / "train"), _classes_in(tested)
    if strange := sorted(test.keys() - train.keys()):
        raise RequestError(f"data images: {tested} has a class '{strange[0]}' that {place / 'train'} does not have")
    return _labelled(place, train, test)


def _labelled(place: Path, train: dict[str, list[str]], test: dict[str, list[str]]) -> ImageFolder:
    classes = sorted(train)
    if not any(test.values()):
        raise RequestError(f"data images: {place} has no test images ({_FILES})")
    number = {name: at for at, name in enumerate(classes)}
    halves = []
    for half in (train, test):
        paths = PathList(path for name in sorted(half) for path in half[name])
        labels = np.repeat([number[name] for name in sorted(half)], [len(half[name]) for name in sorted(half)])
        halves.append(LabelledFiles(paths, labels.astype(np.int64)))
    return ImageFolder(tuple(classes), *halves)


def _split(files: list[str]) -> tuple[list[str], list[str]]:
    """To train on and to test with: see the module's text. One alone is to train on."""
    tested = range(9, len(files), 10) if len(files) >= 10 else range(max(1, len(files) - 1), len(files))
    return [path for at, path in enumerate(files) if at not in tested], [files[at] for at in tested]


def _classes_in(place: Path) -> dict[str, list[str]]:
    """The files of each class, which has some."""
    try:
        with os.scandir(place) as entries:
            names = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
        classes = {name: _files_in(place / name) for name in names}
    except OSError as error:
        raise RequestError(f"data images: {error.filename} cannot be read ({error.strerror})") from error
    if not classes:
        raise RequestError(f"data images: {place} has no folders; each class needs one, with {_FILES}")
    if empty := sorted(name for name, files in classes.items() if not files):
        more = f", and {len(empty) - 1} more have none" if len(empty) > 1 else ""
        raise RequestError(f"data images: {place / empty[0]} has no {_FILES}{more}; add some or remove the folder")
    return classes


def _files_in(folder: Path) -> list[str]:
    found: list[str] = []
    for place, inside, names in os.walk(folder, onerror=_refuse):
        inside[:] = [name for name in inside if not name.startswith(".")]
        found += [f"{place}/{name}" for name in names if name.lower().endswith(ENDINGS) and not name.startswith(".")]
    return sorted(found)


def _refuse(error: OSError) -> None:
    raise error
