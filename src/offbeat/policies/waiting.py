"""How long an update takes when the network takes no time and learners are all alike: the theory of waiting.

X is the compute time of a minibatch, drawn anew for each; X_(K:P) is the K-th smallest of P of them.

    full-sync, k-sync    E[X_(K:P)]      the K-th of P
    k-batch-async        K E[X] / P      for every law: each learner brings 1 / E[X] a second
    k-batch-sync         K E[X] / P      for exponential times only, as those who were cancelled lose nothing
    k-async              E[X_(K:P)]      the same; for other laws at most that, if a minibatch under way is soon done

Dutta, Joshi, Ghosh, Dube, Nagpurkar 2018, "Slow and stale gradients can win the race".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class ComputeTimes:
    """A law of compute times, as far as the theory asks; by default all take the mean."""

    mean_s: float = 1.0
    is_memoryless: bool = True

    def kth_s(self, k: int, learners: int) -> float:
        """E[X_(K:P)]."""
        return self.mean_s


class UpdateTime(NamedTuple):
    """Expected seconds per update, and the formula."""

    seconds: float
    formula: str


def of_barrier(k: int, learners: int, times: ComputeTimes) -> UpdateTime:
    """The first K of P learners that begin together."""
    return UpdateTime(times.kth_s(k, learners), "E[X_(K:P)]" if k < learners else "E[X_(P:P)]")


def of_flow(minibatches: int, learners: int, times: ComputeTimes) -> UpdateTime:
    """So many minibatches from learners that never wait."""
    return UpdateTime(minibatches * times.mean_s / learners, "K E[X] / P" if minibatches > 1 else "E[X] / P")
