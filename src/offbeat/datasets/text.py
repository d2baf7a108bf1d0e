"""Text as numbers, one for each character: by default the sources of Python's own standard library.

Every machine that runs this has them, so a language model can be trained with nothing downloaded; which Python it is
decides the text. Text of one's own comes from a folder.

Laws: the same files give the same numbers. Files are read in the order of their names, until `most_bytes` are read.
Every tenth file is for testing; where there are fewer than ten, the last tenth of each.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import RequestError

VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))  # a character's number is its place
MOST_BYTES = 2_000_000

_OTHER = VOCABULARY.index("?")
_SAME = {code: place for place, code in enumerate(VOCABULARY.encode())}
_TABLE = bytes(_SAME.get(code, _OTHER) for code in range(256))
_NINTH = 9  # of each ten files, counted from 0, this one is for testing


class Text(NamedTuple):
    """Characters as places in `VOCABULARY`, to train on and to test with."""

    train: NDArray[np.int64]
    test: NDArray[np.int64]


def text(folder: str = "", pattern: str = "*.py", most_bytes: int = MOST_BYTES) -> Text:
    """The files of `folder` (none: of the standard library) that `pattern` matches; `**/*.txt` looks deeper.

    RequestError if there is no such folder, no such file, one that cannot be read, or too little in them.
    """
    if most_bytes < 1:
        raise RequestError(f"most_bytes must be at least 1; got {most_bytes}")
    place = Path(folder or sysconfig.get_path("stdlib"))
    if not place.is_dir():
        raise RequestError(f"no text: '{place}' is not a folder; expected a folder with files like {pattern}")
    files = _read(place, pattern, most_bytes)
    if len(files) > _NINTH:
        train = [data for at, data in enumerate(files) if at % 10 != _NINTH]
        test = [data for at, data in enumerate(files) if at % 10 == _NINTH]
    else:
        cuts = [len(data) - len(data) // 10 for data in files]
        train = [data[:cut] for data, cut in zip(files, cuts, strict=True)]
        test = [data[cut:] for data, cut in zip(files, cuts, strict=True)]
    if not any(train) or not any(test):
        raise RequestError(
            f"too little text: the files like {pattern} in '{place}' are too short for a training and a test set"
        )
    return Text(encode(b"".join(train)), encode(b"".join(test)))


def encode(data: bytes) -> NDArray[np.int64]:
    """The numbers of a text: a tab is a space, what ends a line on Windows is as elsewhere, other bytes are '?'."""
    plain = data.replace(b"\r\n", b"\n").replace(b"\t", b" ")
    return np.frombuffer(plain.translate(_TABLE), dtype=np.uint8).astype(np.int64)


def decode(numbers: NDArray[np.int64]) -> str:
    """The text of such numbers."""
    return "".join(VOCABULARY[number] for number in numbers.tolist())


def _read(place: Path, pattern: str, most_bytes: int) -> list[bytes]:
    """The files in the order of their names, the last one cut where there are enough bytes."""
    try:
        paths = sorted(path for path in place.glob(pattern) if path.is_file())
    except (ValueError, NotImplementedError) as error:
        raise RequestError(f"'{pattern}' is not a file pattern ({error}); use one like *.txt or **/*.txt") from None
    if not paths:
        raise RequestError(f"no text: no file in '{place}' matches {pattern}; give another folder or pattern")
    files: list[bytes] = []
    left = most_bytes
    for path in paths:
        try:
            with path.open("rb") as file:
                files.append(file.read(left))
        except OSError as error:
            raise RequestError(f"no text: '{path}' cannot be read ({error.strerror})") from error
        left -= len(files[-1])
        if not left:
            break
    return files
