"""Data that comes with the package: 1,797 handwritten digits, 8x8 pixels.

Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak 1998, UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49, licence CC BY 4.0 (creativecommons.org/licenses/by/4.0). It is the repository's
test set, unchanged but for the form: a byte for each pixel (0 to 16) and one for the digit.
"""

from __future__ import annotations

import gzip
from importlib import resources
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_PIXELS = 64
_SIXTEENTHS = 16.0


class Digits(NamedTuple):
    """Images as n x 1 x 8 x 8 numbers from 0 to 1, and the digits that they show. Every fifth is for testing."""

    images: NDArray[np.float32]
    digits: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_digits: NDArray[np.int64]


def digits() -> Digits:
    """The shipped digits: 1,438 to train on and 359 to test with."""
    data = gzip.decompress((resources.files(__name__) / "digits.gz").read_bytes())
    rows = np.frombuffer(data, dtype=np.uint8).reshape(-1, _PIXELS + 1)
    images = (rows[:, :_PIXELS].astype(np.float32) / np.float32(_SIXTEENTHS)).reshape(-1, 1, 8, 8)
    shown = rows[:, _PIXELS].astype(np.int64)
    tests = np.arange(len(rows)) % 5 == 4
    return Digits(images[~tests], shown[~tests], images[tests], shown[tests])
