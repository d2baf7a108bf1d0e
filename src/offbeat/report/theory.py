"""What the literature says of staleness, for the strategies of which it says something.

    k-batch-async:K, softsync:N (K = floor(P/N))    (P-1)/K      Zhang, Gupta, Lian, Liu 2016
    k-async:K                                       P/K - 1      Dutta, Joshi, Ghosh, Dube, Nagpurkar 2018
    async                                           P - 1        the same with K = 1
    full-sync, k-sync, k-batch-sync, all-reduce     0            every gradient is of the current version

These means hold whatever the compute times are. How staleness is spread depends on them. With exponential ones each
push is as likely to be anybody's who computes:

    async           Pr(k or more) = (1 - 1/P)^k
    k-async         Pr(k or more) = (1 - K/P)^k: an update takes any K of the P
    k-batch-async   Pr(k or more) = the mean over r = 0 ... K-1 of (1 - 1/P)^max(0, kK - r): a learner pushes again
                    after a geometric number of pushes, and r of an update's K were there when it pushed before

K comes from the policy itself, never from the text of the line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from offbeat.errors import RequestError
from offbeat.policies import create
from offbeat.policies.barrier import KBatchSync, KSync
from offbeat.policies.local import LocalSGD
from offbeat.policies.stale import KAsync, KBatchAsync
from offbeat.strategy import ALL_REDUCE, family_of

EXPONENTIAL = "if compute times were exponential"


class Theory(NamedTuple):
    """The mean staleness and its formula, and how it is spread."""

    mean: float
    formula: str
    share_from: Callable[[int], float]  # of gradients that are so many versions old, or older
    given: str = ""  # under which assumption it is spread so

    def share(self, age: int) -> float:
        """Of gradients that are so many versions old."""
        return self.share_from(age) - self.share_from(age + 1)


def _geometric(ratio: float) -> Callable[[int], float]:
    return lambda age: ratio**age


def _batches(learners: int, k: int) -> Callable[[int], float]:
    again = 1 - 1 / learners
    return lambda age: sum(again ** max(0, age * k - there) for there in range(k)) / k


_NONE_OLD = Theory(0.0, "0: every gradient is of the current version", _geometric(0.0))


def staleness_theory(line: str, learners: int) -> Theory | None:
    """For a strategy with so many learners; None where nothing is known, or the line is none."""
    try:
        if learners < 1:
            return None
        if family_of(line) == ALL_REDUCE:
            return _NONE_OLD
        policy = create(line, expect=learners)
    except RequestError:
        return None
    if type(policy) in (KSync, KBatchSync, LocalSGD):
        return _NONE_OLD
    each = Theory(float(learners - 1), "P - 1", _geometric(1 - 1 / learners), EXPONENTIAL)  # K = 1: `async`
    if type(policy) is KAsync:
        kept = Theory(learners / policy.k - 1, "P/K - 1", _geometric(1 - policy.k / learners), EXPONENTIAL)
        return each if policy.k == 1 else kept
    if type(policy) is KBatchAsync:
        mixed = Theory((learners - 1) / policy.k, "(P-1)/K", _batches(learners, policy.k), EXPONENTIAL)
        return each if policy.k == 1 else mixed
    return None
