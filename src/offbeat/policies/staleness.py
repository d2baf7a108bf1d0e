"""How old gradients are expected to be, as a value: the mean, its formula, and how it is spread where that is known.

The means below hold for any compute times. The spread depends on them; with exponential times each push is equally
likely to come from any learner that computes.

    async           P - 1        Pr(k or more) = (1 - 1/P)^k
    k-async:K       P/K - 1      Pr(k or more) = (1 - K/P)^k: an update takes any K of the P learners
    k-batch-async   (P-1)/K      Pr(k or more) = the mean over r = 0 ... K-1 of (1 - 1/P)^max(0, kK - r): a learner
                                 pushes again after a geometric number of pushes, of which r were in its last update

Zhang, Gupta, Lian, Liu 2016 (softsync); Dutta, Joshi, Ghosh, Dube, Nagpurkar 2018 (K-async).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

EXPONENTIAL = "if compute times were exponential"


class Staleness(NamedTuple):
    """Expected staleness of a policy. Without `exact` the mean is an estimate, good for choosing a learning rate."""

    mean: float
    formula: str
    share_from: Callable[[int], float] | None = None  # the share of gradients so many versions old, or older
    given: str = ""  # the assumption under which `share_from` holds
    exact: bool = True

    def share(self, age: int) -> float | None:
        """The share of gradients exactly so many versions old."""
        return None if self.share_from is None else self.share_from(age) - self.share_from(age + 1)


FRESH = Staleness(0.0, "0, since every gradient is of the current version", lambda age: float(age <= 0))


def of_each(learners: int) -> Staleness:
    """Every gradient is an update of its own."""
    return Staleness(float(learners - 1), "P - 1", _geometric(1 - 1 / learners), EXPONENTIAL)


def of_waiting(learners: int, k: int) -> Staleness:
    """Updates of K gradients, whose learners wait for each other."""
    if k == 1:
        return of_each(learners)
    return Staleness(learners / k - 1, "P/K - 1", _geometric(1 - k / learners), EXPONENTIAL)


def of_batches(learners: int, k: int) -> Staleness:
    """Updates of K gradients for which nobody waits."""
    if k == 1:
        return of_each(learners)
    again = 1 - 1 / learners
    spread = lambda age: sum(again ** max(0, age * k - there) for there in range(k)) / k  # noqa: E731 - as the others
    return Staleness((learners - 1) / k, "(P-1)/K", spread, EXPONENTIAL)


def estimated(mean: float, formula: str) -> Staleness:
    """No theory is known; about this."""
    return Staleness(mean, formula, exact=False)


def _geometric(ratio: float) -> Callable[[int], float]:
    return lambda age: ratio**age
