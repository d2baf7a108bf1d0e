"""Rounds in which all that is compared takes its turn, and the numbers that follow from them.

Laws. Systems alternate within every round, so that a machine that slows down slows all of them. What is reported is
the median over rounds, and it never comes without its interval or its spread. What could not be measured is unknown
(None), never 0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")

Progress = Callable[[str], None]
Turn = Callable[[int, str], T]  # the round, from 0, and what is being done, for an error

FEW = 6  # values from which on an interval of 95 % is narrower than all of them
CONFIDENCE = 0.95
INTERVAL = f"low and high: the least and the greatest; of {FEW} or more, the 95 % interval of the median"


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
