"""When a learner is called a straggler: the one definition, for runs that were measured and for clusters to simulate.

A straggler is slow all the time, not by chance: over the whole, and in each part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SLOWER = 1.3  # times the others' time for a minibatch, from which on it is slow
FEWEST_PARTS = 2  # that can be compared


class Compared(NamedTuple):
    """The typical seconds of a learner's minibatch, and of the others'."""

    own_s: float
    others_s: float

    @property
    def is_slow(self) -> bool:
        return self.own_s > SLOWER * self.others_s > 0


def is_straggler(whole: Compared, parts: Sequence[Compared]) -> bool:
    """`parts` are of the same time as `whole`, those in which both are known."""
    return whole.is_slow and len(parts) >= FEWEST_PARTS and all(part.is_slow for part in parts)
