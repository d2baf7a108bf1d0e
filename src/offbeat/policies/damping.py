"""How far the step of an update is shortened because its gradients are stale. The one place that decides it.

A gradient that is t versions old acts on weights that t other steps have moved since. On a quadratic of curvature c
the step stays stable while lr c < 2 sin(pi / (2(2t+1))): 2, 1, .445, .209 for t = 0, 1, 3, 7, so about as 1 / (1 + t).
That is the damping of an update: the step, in the end, is to be 1 / (1 + mean staleness) of what it would be.

The mean is the one that the policy expects at the start, and more and more the one that is measured. What a rate rule
(`rate=inverse`) has taken off already counts: the two together come to 1 / (1 + mean). A push that adds up several
gradients (Downpour) makes a step as many times as long, and is divided by that as well.

How an optimizer makes its step shorter is its own (`server.optimizers.damped`): SGD lowers its momentum first, since
staleness acts like momentum (Mitliagkas, Zhang, Hadjis, Ré 2016).
"""

from __future__ import annotations

from collections.abc import Sequence

CORRECT, KEEP = "correct", "keep"  # what a run does about stale gradients, in its config and in its log
_WINDOW = 16  # gradients of each learner over which the measured staleness is averaged
_DIGITS = 6  # of a damping: it is in the log of every update


class Damping:
    """The damping of a run's updates, one after the other."""

    def __init__(self, *, expected: float, added_up: int, learners: int) -> None:
        self.mean = expected  # staleness
        self._added_up = added_up  # gradients in a push
        self._weight = 1 / (_WINDOW * learners)

    def of(self, ages: Sequence[int], scale: float) -> float:
        """Of an update with gradients of these ages, which a rule has scaled by `scale` on average."""
        for age in ages:
            self.mean += (age - self.mean) * self._weight
        return self.now(scale)

    def now(self, scale: float = 1.0) -> float:
        if self.mean == 0 and self._added_up == 1:
            return 1.0
        return min(1.0, round(1 / ((1 + self.mean) * self._added_up * scale), _DIGITS)) if scale > 0 else 1.0
