"""What all benchmarks are made of: requests that are checked, turns in rounds, and what was found.

Laws. Systems alternate within every round, so that a machine that slows down slows all of them. What is reported is
the median over rounds, and it never comes without its interval or its spread. What could not be measured is unknown
(None), never 0. Every number is in a row, and every row is described by fields (`offbeat.report.benchmark_fields`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from offbeat.errors import RequestError, unknown
from offbeat.machine import available_bytes
from offbeat.number_format import format_size
from offbeat.report.benchmark_fields import Field, Row

T = TypeVar("T")

Progress = Callable[[str], None]
Turn = Callable[[int, str], T]  # the round, from 0, and what is being done, for an error
Tables = Sequence[tuple[Sequence[Field], Sequence[Row]]]

OURS = "offbeat"
MOST_PROCESSES = 64
ITEM_BYTES = 4  # float32
FEW = 6  # values from which on an interval of 95 % is narrower than all of them
CONFIDENCE = 0.95
INTERVAL = (
    f"low and high: the smallest and the largest value; with {FEW} or more values, the 95 % interval of the median"
)


# --- requests: numbers that are refused, in one line that says why ---------------------------------------------------


def check_processes(option: str, numbers: Iterable[int], least: int = 1) -> None:
    for number in numbers:
        if not least <= number <= MOST_PROCESSES:
            raise RequestError(f"bench: {option}: expected a number from {least} to {MOST_PROCESSES}; got {number}")


def check_least(option: str, number: int, least: int = 1) -> None:
    if number < least:
        raise RequestError(f"bench: {option}: expected {least} or more; got {number}")


def check_above_zero(option: str, *numbers: float) -> None:
    if min(numbers) <= 0:
        raise RequestError(f"bench: {option}: expected more than 0")


def check_distinct(option: str, values: Sequence[object], noun: str) -> None:
    if len(set(values)) < len(values):
        raise RequestError(f"bench: {option} names a {noun} twice: {', '.join(map(str, values))}")


def check_against(systems: Sequence[str], known: Iterable[str], ours: Sequence[str] = (OURS,)) -> None:
    """The systems that offbeat is compared with."""
    for name in systems:
        if name in ours:
            raise RequestError(f"bench: leave {OURS} out of --against: it is always measured")
        if name not in known:
            raise RequestError(f"bench: --against: {unknown('system', name, known)}")
    check_distinct("--against", systems, "system")


def check_memory(what: str, needed_bytes: int, remedy: str = "") -> None:
    available = available_bytes()
    if available is not None and needed_bytes > available:
        raise RequestError(
            f"bench: {what} need about {format_size(needed_bytes)} of memory, but only {format_size(available)} "
            f"is available{remedy}"
        )


# --- rounds ----------------------------------------------------------------------------------------------------------


def alternate(
    turns: Mapping[str, Turn[T]], rounds: int, progress: Progress, *, at: str = "", unit: str = "round"
) -> dict[str, list[T]]:
    """What each turn found in each round. All take one in every round; `at` says where in a longer measurement."""
    found: dict[str, list[T]] = {name: [] for name in turns}
    for number in range(rounds):
        for name, turn in turns.items():
            doing = f"{at}{unit} {number + 1} of {rounds}: {name}"
            progress(doing)
            found[name].append(turn(number, doing))
    return found


def spread(rounds: Sequence[float]) -> float:
    """The greatest / the least; far above 1 the machine was busy."""
    return max(rounds) / min(rounds)


class MedianInterval(NamedTuple):
    """A median, and between which values it is."""

    median: float
    low: float
    high: float


def median_interval(values: Sequence[float]) -> MedianInterval:
    """The median, with the least and the greatest of a few; of `FEW` or more, with an interval of 95 %.

    That interval is between two of the sorted values: the median of whatever they were drawn from is outside of it no
    more often than a fair coin falls so unevenly. Nothing is assumed of how they are distributed.
    """
    order, many, left_out = sorted(values), len(values), 0
    if many >= FEW:
        outside = 2 / 2**many  # the chance of being outside, with so many left out at each end
        while outside + 2 * math.comb(many, left_out + 1) / 2**many <= 1 - CONFIDENCE:
            left_out += 1
            outside += 2 * math.comb(many, left_out) / 2**many
    return MedianInterval(statistics.median(order), order[left_out], order[-1 - left_out])


def median_known(values: Iterable[float | None]) -> float | None:
    """The median of those that are known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def relative_error(predicted: float | None, measured: float | None) -> float | None:
    """predicted / measured - 1, where both are known."""
    return None if predicted is None or not measured else predicted / measured - 1


# --- what was found: the object that `--json` prints and `--out` writes, and the same for the terminal ---------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """`json` is recorded whole, with the request, the machine and all rounds."""

    json: Mapping[str, Any]
    heading: str
    tables: Tables
    verdict: Sequence[str]  # in bold
    details: Sequence[str] = ()
    terms: Sequence[tuple[str, str]] = ()  # words of the tables, and what they mean
    spread: float = 1.0  # the largest of one system's rounds
    chart: str = ""  # an SVG, where the benchmark draws one
    ended_by: BaseException | None = None  # an interruption after which what there was is kept: to be raised again

    @property
    def rows(self) -> Sequence[Row]:
        return self.tables[0][1]


def json_rows(fields: Sequence[Field], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Exactly the values that the fields describe."""
    return [{field.key: row[field.key] for field in fields if field.key in row} for row in rows]
