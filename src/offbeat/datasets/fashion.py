"""Fashion-MNIST, where it is installed: 70,000 grey images of clothes, 28x28 pixels, of ten kinds.

H. Xiao, K. Rasul, R. Vollgraf 2017, https://arxiv.org/abs/1708.07747, licence MIT. It does not come with the package,
and nothing is fetched: it is found on the disk, or refused with the command that installs it. `folders` lists where
it is looked for; the first folder that holds any of the four files is the one.

Law: a file is read whole or not at all. One that is cut, of another kind or of another size is named.
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import RequestError

KINDS = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
SIDE = 28

_IMAGES_MAGIC = 0x803  # bytes, in three dimensions
_LABELS_MAGIC = 0x801  # bytes, in one dimension
_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_INSTALL = "apt install dataset-fashion-mnist"


class Fashion(NamedTuple):
    """Images as n x 1 x 28 x 28 numbers from 0 to 1, and their labels: places in `KINDS`."""

    images: NDArray[np.float32]
    labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]


def folders() -> tuple[Path, ...]:
    """Where the files may be, the best first: $OFFBEAT_DATA, Debian's package, torchvision's folder."""
    own = os.environ.get("OFFBEAT_DATA", "")
    mine = (Path(own) / "fashion-mnist", Path(own) / "FashionMNIST" / "raw") if own else ()
    return (*mine, Path("/usr/share/datasets/fashion-mnist"), Path("data/FashionMNIST/raw"))


def fashion_mnist() -> Fashion:
    """All of it: 60,000 images to train on and 10,000 to test with. RequestError if it is not here, or not whole."""
    tried = folders()
    for folder in tried:
        if any(_find(folder, name) for name in _FILES):
            return _read_all(folder)
    raise RequestError(
        f"Fashion-MNIST is not installed; install it ({_INSTALL}), or set OFFBEAT_DATA to the folder that holds "
        f"fashion-mnist/ or FashionMNIST/raw/; looked in: {', '.join(map(str, tried))}"
    )


def _find(folder: Path, name: str) -> Path | None:
    """The file, plain or packed."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _read_all(folder: Path) -> Fashion:
    paths = []
    for name in _FILES:
        path = _find(folder, name)
        if path is None:
            raise RequestError(f"{folder} has no {name}, plain or .gz; it must hold all four files ({_INSTALL})")
        paths.append(path)
    train, shown, test, test_shown = paths
    return Fashion(*_pairs(train, shown), *_pairs(test, test_shown))


def _pairs(images_path: Path, labels_path: Path) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    pixels = _read(images_path, _IMAGES_MAGIC)
    labels = _read(labels_path, _LABELS_MAGIC)
    if pixels.shape[1:] != (SIDE, SIDE):
        sizes = "x".join(map(str, pixels.shape[1:]))
        raise _bad(images_path, f"its images have {sizes} pixels, not {SIDE}x{SIDE}")
    if len(labels) != len(pixels):
        raise _bad(labels_path, f"it has {len(labels)} labels for the {len(pixels)} images of {images_path.name}")
    if labels.max() >= len(KINDS):
        raise _bad(labels_path, f"it has a label {labels.max()}; expected 0 to {len(KINDS) - 1}")
    return pixels[:, None].astype(np.float32) / np.float32(255), labels.astype(np.int64)


def _read(path: Path, magic: int) -> NDArray[np.uint8]:
    """An idx file: magic (its last byte counts the dimensions), the dimensions, then a byte for each number."""
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise _bad(path, f"it cannot be read ({error})") from error
    head = 4 * (1 + (magic & 0xFF))
    if len(data) < head:
        raise _bad(path, f"it has {len(data)} bytes, but its header alone has {head}")
    came, *sizes = (int.from_bytes(data[at : at + 4], "big") for at in range(0, head, 4))
    if came != magic:
        raise _bad(path, f"it begins with {came:#x}, not {magic:#x}")
    count = math.prod(sizes)
    if count == 0:
        raise _bad(path, "it is empty")
    if len(data) - head != count:
        raise _bad(path, f"its header declares {count} numbers, but it has {len(data) - head}")
    return np.frombuffer(data, dtype=np.uint8, offset=head).reshape(sizes)


def _bad(path: Path, why: str) -> RequestError:
    return RequestError(f"{path} is not a valid Fashion-MNIST file: {why}; reinstall it ({_INSTALL})")
