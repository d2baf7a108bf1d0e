"""The one-line grammar in which strategies, topologies and laws are written, and units.

    NAME[:ARG[,ARG...][,KEY=VALUE...]]        torus:4x8     hierarchical:4x8,leader,outer=ring

A range in place of a whole number, `k-sync:1..8`, stands for a line of each (`expand`).

Laws: `parse(str(spec)) == spec`. A table row declares its parameters once (`Param`); `bind` reads a
spec against them, so every wrong word is named in the same way everywhere.
Units: MB = 10^6 bytes, MiB = 2^20 bytes; Gbit/s and GB/s are different things and both are read.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.errors import RequestError, nearest, unknown

_NAME = re.compile(r"(?:[0-9]+-?[a-z]|[a-z])[a-z0-9-]*")  # 1f1b and 1-bit are names, 4x8 looks like one
_WORD = re.compile(r"[^\s,=]+")
_RANGE = re.compile(r"([0-9]{1,9})\.\.([0-9]{1,9})")
MOST_LINES = 1000  # that a line with ranges may stand for


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A parsed line: a name, its arguments in order, its options in order."""

    name: str
    args: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            plain = self.name.lower().replace("_", "-")
            small = plain if _NAME.fullmatch(plain) else "ring"
            raise RequestError(f"a name has lower-case letters, digits and '-', like '{small}'; got '{self.name}'")
        for word in [*self.args, *(part for option in self.options for part in option)]:
            if not _WORD.fullmatch(word):
                raise RequestError(f"'{self.name}': an empty or malformed word {word!r}; write NAME:ARG,KEY=VALUE")
        keys = [key for key, _ in self.options]
        for key in keys:
            if keys.count(key) > 1:
                raise RequestError(f"'{self.name}': '{key}' is given twice")

    def __str__(self) -> str:
        words = [*self.args, *(f"{key}={value}" for key, value in self.options)]
        return f"{self.name}:{','.join(words)}" if words else self.name


def parse(text: str) -> Spec:
    """Read one line of the grammar; a `RequestError` names what is wrong with it."""
    name, colon, rest = text.strip().partition(":")
    if not colon:
        return Spec(name=name)
    args: list[str] = []
    options: list[tuple[str, str]] = []
    for word in rest.split(","):
        key, equals, value = word.strip().partition("=")
        if equals:
            options.append((key, value))
        elif options:
            raise RequestError(f"'{text}': '{word}' must come before the KEY=VALUE options")
        else:
            args.append(word.strip())
    return Spec(name=name, args=tuple(args), options=tuple(options))


def expand(text: str) -> list[str]:
    """The lines that a line with ranges stands for: `k-sync:1..3` is k-sync:1, k-sync:2 and k-sync:3."""
    spec = parse(text)
    words = [*spec.args, *(value for _, value in spec.options)]
    numbers = [_numbers_of(word, text) for word in words]
    if math.prod(len(some) for some in numbers if some is not None) > MOST_LINES:
        raise RequestError(f"'{text}' is a range of more than {MOST_LINES} values; give a shorter range")
    choices = [[word] if some is None else map(str, some) for word, some in zip(words, numbers, strict=True)]
    args = len(spec.args)
    return [
        str(
            Spec(
                name=spec.name,
                args=chosen[:args],
                options=tuple((key, value) for (key, _), value in zip(spec.options, chosen[args:], strict=True)),
            )
        )
        for chosen in itertools.product(*choices)
    ]


def range_of(text: str) -> range | None:
    """The numbers of the only range in a line, in the order of `expand`; None where there is no range."""
    spec = parse(text)
    words = [*spec.args, *(value for _, value in spec.options)]
    found = [numbers for word in words if (numbers := _numbers_of(word, text)) is not None]
    if len(found) > 1:
        raise RequestError(f"'{text}' has several ranges, but only one is allowed here")
    return found[0] if found else None


def _numbers_of(word: str, text: str) -> range | None:
    match = _RANGE.fullmatch(word)
    if match is None:
        return None
    first, last = (int(number) for number in match.groups())
    if first > last:
        raise RequestError(f"'{text}': expected an increasing range, like {last}..{first}; got '{word}'")
    return range(first, last + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One parameter of a table row: how it is read, what it is when left out, what it means."""

    name: str
    read: Callable[[str], Any]
    help: str
    positional: bool = False
    required: bool = False
    default: Any = None


def bind(spec: Spec, params: Sequence[Param]) -> dict[str, Any]:
    """The values that `spec` gives to `params`, with keys as Python names (`-` becomes `_`)."""
    positional = [param for param in params if param.positional]
    keyed: Mapping[str, Param] = {param.name: param for param in params if not param.positional}
    if len(spec.args) > len(positional):
        extra = spec.args[len(positional)]
        takes = f"{len(positional)} argument(s)" if positional else "no arguments"
        raise RequestError(f"'{spec}': {spec.name} takes {takes}; got '{extra}' as well{nearest(extra, keyed)}")
    values = {param.name: param.default for param in params}
    given = list(zip(positional, spec.args, strict=False))
    for key, value in spec.options:
        if key not in keyed:
            if not keyed:
                raise RequestError(f"'{spec}': {spec.name} has no options; got '{key}={value}'")
            raise RequestError(f"'{spec}': {unknown('option', key, keyed)}")
        given.append((keyed[key], value))
    for param, text in given:
        try:
            values[param.name] = param.read(text)
        except RequestError as error:
            raise RequestError(f"'{spec}': {param.name}: {error}") from None
    missing = {param.name for param in params if param.required} - {param.name for param, _ in given}
    for param in params:
        if param.name in missing:
            wanted = param.name.upper() if param.positional else f"{param.name}="
            raise RequestError(f"'{spec}': {wanted} is missing ({param.help})")
    return {name.replace("-", "_"): value for name, value in values.items()}


def fill(lines: Sequence[str], learners: int) -> list[str]:
    """Lines of a table with numbers for so many learners: {half}, {quarter} and {most} (three quarters), 1 or more,
    and {some}, half but 2 or more. A line that needs 2 is left out for one learner.
    """
    numbers = {"half": learners // 2, "quarter": learners // 4, "most": learners * 3 // 4}
    values = {name: max(1, number) for name, number in numbers.items()} | {"some": max(2, learners // 2)}
    return [line.format(**values) for line in lines if learners > 1 or "{some}" not in line]


# --- what a word can mean ---------------------------------------------------------------------------

_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z/]*)\s*", re.ASCII)
_PREFIXES = {"": 1, "K": 10**3, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

MOST = 2.0**53  # above it whole numbers are no longer exact in floating point

SIZES: dict[str, float] = {"": 1.0, **{f"{p}B": float(n) for p, n in (_PREFIXES | _BINARY).items()}}
SECONDS: dict[str, float] = {
    "": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0,
}  # fmt: skip
RATES: dict[str, float] = {
    "": 1.0,
    **{f"{p}B/s": n for p, n in (_PREFIXES | _BINARY).items()},
    **{f"{p}{bit}": n / 8 for p, n in _PREFIXES.items() for bit in ("bit/s", "b/s", "bps")},
}


def _quantity(text: str, units: Mapping[str, float], what: str, example: str) -> float:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise RequestError(f"{what} is a number with a unit, like {example}; got '{text}'")
    number, unit = match.groups()
    if unit not in units:
        alike = [name for name in units if name.lower() == unit.lower()]  # 'gb/s' may be GB/s or Gb/s
        words = "' or '".join(alike)
        hint = f"; did you mean '{words}'?" if alike else f"; known: {', '.join(filter(None, units))}"
        raise RequestError(f"unknown unit '{unit}' of {what} in '{text}'{hint}")
    value = float(number) * units[unit]
    if abs(value) > MOST:
        raise RequestError(f"{what} of '{text}' is too large")
    return value


_PARAMETERS = {
    f"{p}{noun}": 4.0 * n for p, n in (_PREFIXES | {"B": 10**9}).items() for noun in ("params", "parameters")
}


def parse_size(text: str) -> int:
    """Bytes: `100MB`, `64MiB`, `4096`; or parameters of 4 bytes: `25.6Mparams`, `7B parameters`."""
    written = text.replace(" ", "")
    if written.endswith(tuple(filter(None, _PREFIXES))):
        raise RequestError(
            f"'{text}' is ambiguous, bytes or parameters: write {written}B, or {written}params (4 bytes each)"
        )
    if re.fullmatch(r"[0-9.]{1,3}B", text):
        raise RequestError(
            f"'{text}' is ambiguous, bytes or billions of parameters: write {written[:-1]}, or {written}params"
        )
    counts = written.endswith(("params", "parameters"))
    value = _quantity(written, _PARAMETERS if counts else SIZES, "a size", "100MB, 64MiB or 25.6Mparams")
    if value < 0 or abs(value - round(value)) > 1e-15 * value:  # 258.9GB is not exact in binary, and is meant to be
        raise RequestError(f"a size is a whole number of bytes, 0 or more; got '{text}'")
    return round(value)


def parse_seconds(text: str) -> float:
    """Seconds: `4us`, `1.5ms`, `2min`, `3` (seconds)."""
    value = _quantity(text, SECONDS, "a time", "4us or 1.5ms")
    if value < 0:
        raise RequestError(f"a time is 0 or more; got '{text}'")
    return value


def parse_rate(text: str) -> float:
    """Bytes per second: `10Gbit/s` is 1.25e9, `10GB/s` is 1e10."""
    value = _quantity(text, RATES, "a bandwidth", "10Gbit/s or 1.25GB/s")
    if value < 1:
        raise RequestError(f"a bandwidth must be at least 1 byte per second; got '{text}'")
    return value


def parse_count(text: str) -> int:
    """A whole number, 1 or more."""
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", text.strip()):
        raise RequestError(f"expected a whole number from 1 to 999999999; got '{_cut(text)}'")
    return int(text)


def parse_whole(text: str) -> int:
    """A whole number, 0 or more."""
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
        raise RequestError(f"expected a whole number, 0 or more; got '{_cut(text)}'")
    return int(text)


def parse_number(text: str, fits: Callable[[float], bool], expected: str) -> float:
    """A number that fits; `expected` says in words what does."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not fits(value):
        raise RequestError(f"{expected}; got '{_cut(text)}'")
    return value


def parse_shape(text: str) -> tuple[int, ...]:
    """`4x8` is (4, 8)."""
    if not re.fullmatch(r"[1-9][0-9]{0,8}(x[1-9][0-9]{0,8})*", text):
        raise RequestError(f"a shape is whole numbers joined by 'x', like 4x8; got '{_cut(text)}'")
    return tuple(int(side) for side in text.split("x"))


def _cut(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."


def choice(*words: str) -> Callable[[str], str]:
    """A reader that accepts these words only."""

    def read(text: str) -> str:
        if text not in words:
            raise unknown("choice", text, words)
        return text

    return read


# --- the other way ------------------------------------------------------------------------------------------


def format_learners(numbers: Sequence[int], most: int | None = None) -> str:
    """`learner 3`, `learners 2, 5`; of more than `most` the first ones."""
    shown = ", ".join([*map(str, numbers[:most]), *(["..."] if most is not None and len(numbers) > most else [])])
    return f"learner{'' if len(numbers) == 1 else 's'} {shown}"


def count_of(number: int, noun: str) -> str:
    """`1 rank`, `8 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_shape(shape: Sequence[int]) -> str:
    return "x".join(str(side) for side in shape)
