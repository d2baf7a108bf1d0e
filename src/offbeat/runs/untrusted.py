"""Files and text that may hold anything, made safe to work with.

Laws. Nothing here raises for what a file holds: a file that cannot be used is an `UnusableFile` with one sentence. No
file is read that is not a plain one (a pipe would never end), and of none more than a bound. Text comes out without
control characters, halves of letters and marks that turn the direction of reading; numbers come out finite.

What it must not know: what a run is.
"""

from __future__ import annotations

import errno
import json
import math
import stat
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from offbeat.errors import LogError

LONGEST_LINE = 8 << 20  # bytes; a longer line is not one of ours
LARGEST_LOG = 4 << 30
LARGEST_JSON = 64 << 20
WHOLE, LABEL = 500, 60  # letters of a name that are kept, and of one that a chart shows
GIVE_UP = 1_000  # lines at the start of a file, none of which could be read: it is something else
_DEEPEST, _MOST_ITEMS = 12, 2_000
_TURNS = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")


class UnusableFile(Exception):  # noqa: N818 - it is a state of a file; no user ever meets it as an error
    """A file cannot be used; `why` says it without the file's name."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path.name}: {why}")
        self.why = why


class JsonLines:
    """The objects in a file of JSON lines. A line that holds none is skipped, as is one that the reader finds wrong.

    `strict`: nothing is skipped, and the first such line is a `LogError`.
    """

    def __init__(self, path: Path, *, strict: bool = False) -> None:
        self.path, self.strict = path, strict
        self.number = 0  # of the line that was read last
        self.skipped = self._first = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """`UnusableFile` before the first line if the file cannot be read at all."""
        with _open(self.path) as file:
            for line in _lines(file):
                self.number += 1
                record = None if line is None else parse(line)
                if isinstance(record, dict):
                    yield record
                elif line is None or line.strip() or self.strict:
                    self.skip("not JSON, or too long" if record is None else f"expected an object; got {_kind(record)}")

    def skip(self, why: str) -> None:
        """The line that was read last holds nothing of use."""
        if self.strict:
            raise LogError(f"{self.path}, line {self.number}: {why}")
        self.skipped += 1
        self._first = self._first or self.number
        if self.skipped == self.number == GIVE_UP:
            raise UnusableFile(self.path, f"none of its first {GIVE_UP:,} lines could be read")

    @property
    def problem(self) -> str:
        """What was skipped, in a sentence; empty if nothing was."""
        if not self.skipped:
            return ""
        of = f"{self.skipped:,} of {self.number:,} line{'' if self.number == 1 else 's'}"
        return f"{self.path.name}: {of} could not be read; first: line {self._first:,}"


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """The lines of a file, None for one that is too long."""
    seen, too_long = 0, False
    try:
        while seen < LARGEST_LOG and (line := file.readline(LONGEST_LINE)):
            seen += len(line)
            if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                too_long = True  # and goes on
            else:
                yield None if too_long else line
                too_long = False
    except OSError:  # the disk has failed in the middle: what was read counts
        too_long = True
    if too_long or seen >= LARGEST_LOG:
        yield None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, its text and numbers made safe; `UnusableFile` if there is none."""
    with _open(path) as file:
        try:
            data = file.read(LARGEST_JSON + 1)
        except OSError as error:
            raise _unreadable(path, error) from None
    if len(data) > LARGEST_JSON:
        raise UnusableFile(path, f"is larger than {LARGEST_JSON >> 20} MiB and was not read")
    value = parse(data)
    if value is None:
        raise UnusableFile(path, "is not JSON, or was cut off")
    if not isinstance(value, dict):
        raise UnusableFile(path, f"expected a JSON object; got {_kind(value)}")
    return dict(plain(value))


def read_bytes(path: Path, most_bytes: int = LARGEST_JSON) -> bytes:
    """A plain file that is no larger than this; the system's `OSError` for any other."""
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if found.st_size > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MiB", str(path))
    with path.open("rb") as file:  # /proc has files that say 0
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MiB", str(path))
    return data


def parse(data: bytes) -> Any:
    """The JSON value in some bytes, or None if there is none (`null` is none, too)."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None


def _open(path: Path) -> BinaryIO:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnusableFile(path, "is not a regular file")
        return path.open("rb")
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> UnusableFile:
    return UnusableFile(path, f"cannot be read: {error.strerror or type(error).__name__}")


def _kind(value: object) -> str:
    names = {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "something else")


# --- text ---------------------------------------------------------------------------------------------------------


def clean(text: object, most: int = WHOLE) -> str:
    """Text as one line of visible letters, at most so many; what is cut is cut in the middle."""
    whole = str(text)
    if len(whole) <= most and whole.isascii() and whole.isprintable():
        return whole
    return shorten("".join(_shown(letter) for letter in whole[: 4 * most]), most)


def _shown(letter: str) -> str:
    if letter in "\t\n\r\x0b\x0c\u2028\u2029":
        return " "
    return "\ufffd" if letter in _TURNS or unicodedata.category(letter) in ("Cc", "Cs", "Cn") else letter


def shorten(text: str, most: int = LABEL) -> str:
    if len(text) <= most:
        return text
    head = most // 2
    return f"{text[:head]}…{text[len(text) - (most - head - 1) :]}"


# --- values -------------------------------------------------------------------------------------------------------


def plain(value: Any, depth: int = _DEEPEST, *, letters: int = WHOLE, items: int = _MOST_ITEMS) -> Any:
    """A JSON value with clean text, numbers of `number`, and no more depth or length than is of use."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return clean(value, letters)
    if isinstance(value, int | float):
        return number(value)
    if depth <= 0:
        return None
    if isinstance(value, list):
        return [plain(one, depth - 1, letters=letters, items=items) for one in value[:items]]
    pairs = list(value.items())[:items]
    return {clean(key, letters): plain(one, depth - 1, letters=letters, items=items) for key, one in pairs}


def number(value: Any, least: float = -math.inf, most: float = math.inf) -> float | None:
    """A finite number of a size that arithmetic survives, within these bounds; or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < 1e30 and least <= value <= most else None  # an int stays one: it is written as one


def from_zero(value: Any) -> float | None:
    return number(value, 0)


def count(value: Any) -> int | None:
    """A whole number, 0 or more."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None


def share(value: Any) -> float | None:
    return number(value, 0, 1)


def items(value: Any) -> list[Any]:
    """Those of a list; none for what is no list."""
    return value if isinstance(value, list) else []


def text(value: Any) -> str:
    """Clean text; nothing for what is no text."""
    return clean(value) if isinstance(value, str) else ""
