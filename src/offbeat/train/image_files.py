"""Image files as samples: each is decoded when it is asked for, and cut to a square of one size, in bytes.

An image becomes its largest square in the middle, scaled to `size` pixels, in RGB: grey ones get three equal channels,
what is transparent is white, 16 bits a channel are cut to 8, and a photograph stands as its camera was held.

Pillow is loaded when such a data set is made, not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from offbeat.datasets.image_folder import LabelledFiles
from offbeat.errors import RequestError

_ORIENTATION = 0x0112  # EXIF: how the camera was held
# What undoes it: the names of Pillow's `Transpose`.
_TURNS = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
    8: "ROTATE_90",
}  # fmt: skip


class BrokenImageError(RequestError):
    """A file that is no whole image, in one line.

    torch's loader raises what a reader process has raised anew, with that traceback before it: its last line is this.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text.rstrip().rpartition("\n")[2].removeprefix(f"{__name__}.{type(self).__name__}: "))


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """(3 x size x size bytes, class) of each file; a minibatch is laid out with its channels last, as it is decoded."""

    whole_batches = True

    def __init__(self, files: LabelledFiles, size: int) -> None:
        pillow().preinit()  # here, and not in every reader process
        self.files, self.size = files, size
        self.targets = torch.from_numpy(files.labels)
        self.decoded_bytes = 3 * size * size  # that a sample takes; it says that reading is work, for processes

    def __len__(self) -> int:
        return len(self.files.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        images, targets = self.__getitems__([index])
        return images[0], int(targets[0])

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        pixels = np.empty((len(indices), self.size, self.size, 3), dtype=np.uint8)
        for at, index in enumerate(indices):
            pixels[at] = decode(self.files.paths[index], self.size)
        return torch.from_numpy(pixels).permute(0, 3, 1, 2), self.targets[torch.as_tensor(indices)]


def pillow() -> Any:
    """Pillow's module of images; RequestError if it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise RequestError(
            f"data images needs Pillow, which cannot be loaded ({error}); "
            "install it with: pip install 'offbeat[images]'"
        ) from None
    return Image


def decode(path: str, size: int) -> NDArray[np.uint8]:
    """The pixels of a file, size x size x 3; BrokenImageError, which names it, where there are none."""
    pil = pillow()
    try:
        with pil.open(path, formats=("JPEG", "PNG")) as image:
            image.draft("RGB", (size, size))  # a JPEG far larger is decoded at a half, quarter or eighth of its size
            turn = _TURNS.get(_orientation(image), "")
            width, height = image.size
            side = min(width, height)
            left, top = (width - side) / 2, (height - side) / 2
            square = _in_rgb(image).resize((size, size), pil.Resampling.BILINEAR, (left, top, left + side, top + side))
        return np.asarray(square.transpose(pil.Transpose[turn]) if turn else square)
    except pil.UnidentifiedImageError:
        why = "it is neither a JPEG nor a PNG file"
    except Exception as error:  # Pillow raises whatever its decoders meet in a broken file
        why = " ".join(str(getattr(error, "strerror", None) or error or type(error).__name__).split())
    raise BrokenImageError(f"cannot decode the image {path}: {why}; repair or remove it")


def _orientation(image: Any) -> int:
    if "exif" not in image.info:
        return 1
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # what is said about the image is broken, and the image is not
        return 1


def _in_rgb(image: Any) -> Any:
    if image.mode.startswith("I"):  # 16 bits, in a type that may be wider
        return pillow().fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        seen = image.convert("RGBA")
        return pillow().alpha_composite(pillow().new("RGBA", seen.size, "white"), seen).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
