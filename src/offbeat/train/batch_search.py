"""Which minibatch to take: the largest that fits is found, and of all that were tried the fastest is taken.

Of those nearly as fast as the fastest it is the smallest: more updates from the same samples, and memory to spare.

Law: nothing here measures anything. `fits(batch)` says how long a step takes, or None where it does not fit, and is
asked at most once for each size.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from offbeat.errors import RequestError

FIRST = 32  # samples: tried first
FINE = 8  # the largest is found to this part of itself
WITHIN = 0.02  # of the fastest: then the smallest

Fits = Callable[[int], float | None]


class Found(NamedTuple):
    """The batch to take, the largest that fits, and the seconds of a step of each that was tried and does."""

    batch: int
    largest: int
    seconds: Mapping[int, float]
    is_bounded: bool  # by memory: a larger one was tried

    def __str__(self) -> str:
        rates = [f"{size:,}: {size / took:,.0f}" for size, took in sorted(self.seconds.items()) if size != self.batch]
        beside = f" ({', '.join(rates)})" if rates else ""
        most = f"; at most about {self.largest:,} fit" if self.is_bounded else ""
        return f"batch size {self.batch:,}: {self.batch / self.seconds[self.batch]:,.0f} samples/s{beside}{most}"


def find_batch(fits: Fits, allowed: Sequence[int], *, first: int = FIRST) -> Found | None:
    """`allowed`: the sizes that may be taken, rising. None: not even the least of them fits."""
    seconds: dict[int, float] = {}
    too_large: list[int] = []

    def works(batch: int) -> bool:
        took = fits(batch)
        if took is None:
            too_large.append(batch)
            return False
        seconds[batch] = took
        return True

    def at_most(batch: int) -> int:
        return allowed[max(0, bisect_right(allowed, batch) - 1)]

    batch = at_most(first)
    while works(batch) and batch < allowed[-1]:
        batch = max(at_most(2 * batch), allowed[bisect_right(allowed, batch)])
    batch = at_most(first)
    while not seconds and batch > allowed[0]:
        batch = min(at_most(batch // 2), allowed[bisect_right(allowed, batch) - 2])
        works(batch)
    if not seconds:
        return None
    while too_large:
        low, high = max(seconds), min(too_large)
        middle = at_most((low + high) // 2)
        if high - low <= max(1, low // FINE) or middle <= low:
            break
        works(middle)
    return Found(fastest(seconds), max(seconds), seconds, bool(too_large))


def fastest(seconds: Mapping[int, float]) -> int:
    """The size with the most samples a second, or the least that is nearly as fast."""
    best = max(size / took for size, took in seconds.items())
    return min(size for size, took in seconds.items() if size / took >= best * (1 - WITHIN))


def sizes_for(samples: int, learners: int, accumulate: int) -> Sequence[int]:
    """Sizes that may be taken where the whole minibatch is of no matter: up to all the samples there are."""
    return range(1, max(1, samples // (learners * accumulate)) + 1)


def sizes_of_global(total: int, learners: int) -> Sequence[int]:
    """Sizes of which several make up each learner's part of `total` samples."""
    if total % learners:
        nearest = max(learners, total // learners * learners)
        raise RequestError(
            f"train.global_batch: {total} samples cannot be shared evenly by {learners} learners; use {nearest}"
        )
    part = total // learners
    small = [size for size in range(1, math.isqrt(part) + 1) if part % size == 0]
    return sorted({*small, *(part // size for size in small)})
