"""Files that may be anything, and text that may be anything, made safe to work with.

Laws. Nothing here raises for what a file holds: a file that cannot be used is a `Broken` with one sentence. No file is
read that is not a plain one (a pipe would never end), and of none more than a bound. Text comes out without control
characters, halves of letters and marks that turn the direction of reading; numbers come out finite.

What it must not know: what a run is.
"""

from __future__ import annotations

import json
import math
import stat
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LONGEST_LINE = 8 << 20  # bytes; a longer line is not one of ours
LARGEST_LOG = 4 << 30
LARGEST_JSON = 64 << 20
WHOLE, LABEL = 500, 60  # letters of a name that are kept, and of one that a chart shows
_DEEPEST, _MOST_ITEMS = 12, 2_000
_LARGEST = 2**53
_TURNS = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufeff")


class Broken(Exception):  # noqa: N818 - it is a state of a file; no user ever meets it as an error
    """A file cannot be used; the words say why."""


def open_lines(path: Path) -> Iterator[bytes | None]:
    """The lines of a file, None for one that is too long. `Broken` before the first if it cannot be read at all."""
    try:
        _check_plain(path)
        file = path.open("rb")
    except OSError as error:
        raise Broken(f"{path.name}: cannot be read: {_reason(error)}") from None
    return _lines(file)


def _lines(file: Any) -> Iterator[bytes | None]:
    seen = 0
    with file:
        while seen < LARGEST_LOG:
            try:
                line = file.readline(LONGEST_LINE)
                seen += len(line)
                if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                    while line and not line.endswith(b"\n") and seen < LARGEST_LOG:
                        line = file.readline(LONGEST_LINE)
                        seen += len(line)
                    yield None
                    continue
            except OSError:  # the disk has failed in the middle: what was read counts
                yield None
                return
            if not line:
                return
            yield line
        yield None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, its text and numbers made safe; `Broken` if there is none."""
    try:
        _check_plain(path)
        with path.open("rb") as file:
            data = file.read(LARGEST_JSON + 1)
    except OSError as error:
        raise Broken(f"{path.name}: cannot be read: {_reason(error)}") from None
    if len(data) > LARGEST_JSON:
        raise Broken(f"{path.name}: is larger than {LARGEST_JSON >> 20} MiB, and was not read")
    value = parse(data)
    if value is None:
        raise Broken(f"{path.name}: is not JSON, or was cut off")
    if not isinstance(value, dict):
        raise Broken(f"{path.name}: expected a JSON object; got {_kind(value)}")
    safe = plain(value)
    assert isinstance(safe, dict)
    return safe


def parse(data: bytes) -> Any:
    """The JSON value in some bytes, or None if there is none (`null` is none, too)."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None


def _check_plain(path: Path) -> None:
    if not stat.S_ISREG(path.stat().st_mode):
        raise Broken(f"{path.name}: is not a plain file")


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__


def _kind(value: object) -> str:
    names = {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "something else")


# --- text ---------------------------------------------------------------------------------------------------------


def clean(text: object, most: int = WHOLE) -> str:
    """Text as one line of visible letters, at most so many; what is cut is cut in the middle."""
    return shorten("".join(_shown(letter) for letter in str(text)[: 4 * most]), most)


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


def plain(value: Any, depth: int = 0) -> Any:
    """A JSON value with clean text, finite numbers (None for others), and no more depth or length than is of use."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, int):
        return value if abs(value) < 2**63 else None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth >= _DEEPEST:
        return None
    if isinstance(value, list):
        return [plain(one, depth + 1) for one in value[:_MOST_ITEMS]]
    return {clean(key): plain(one, depth + 1) for key, one in list(value.items())[:_MOST_ITEMS]}


def number(value: Any) -> float | None:
    """A finite number of a size that arithmetic survives, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < 1e30 and math.isfinite(value) else None  # an int stays one: it is written as one


def from_zero(value: Any) -> float | None:
    found = number(value)
    return found if found is not None and found >= 0 else None


def count(value: Any) -> int | None:
    """A whole number, 0 or more."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST else None


def share(value: Any) -> float | None:
    found = number(value)
    return found if found is not None and 0 <= found <= 1 else None


def text(value: Any) -> str:
    """Clean text; nothing for what is no text."""
    return clean(value) if isinstance(value, str) else ""
