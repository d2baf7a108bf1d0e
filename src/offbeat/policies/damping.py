"""How far the step of an update is shortened because its gradients are stale. The one place that decides it.

A gradient that is t versions old acts on weights that t other steps have moved since. On a quadratic of curvature c
the step stays stable while lr c < 2 sin(pi / (2(2t+1))): 2, 1, .445, .209 for t = 0, 1, 3, 7, so about as 1 / (1 + t).
Momentum does not change that: what counts is lr / (1 - momentum), how far a gradient moves the weights in the end. But
without staleness momentum bears steps many times as long, which is why a rate that is good for fresh gradients says
little about stale ones, and least of all one that was multiplied by the number of gradients in an update.

So the staleness is counted in steps of one minibatch. Where a step is f times as long as that of one minibatch, since
the linear scaling rule multiplied the rate or since a push adds up several gradients (Downpour), t updates are t f
such steps, and the damping is

    1 / (1 + t f)

With t = 0 nothing is shortened, and the linear scaling rule holds. With large t a step is 1 / t of one minibatch's,
however many gradients are in it: the rule of softsync (Zhang, Gupta, Lian, Liu 2016).

The mean of t is the one that the policy expects at the start, and more and more the one that is measured. An update
whose gradients are older than that counts with their own age: on a busy machine a learner is held up for a while, and
what it then pushes is the step that makes a loss jump. What a rate
rule (`rate=inverse`) has taken off already counts: the two together come to the above.

How an optimizer makes its step shorter is its own (`server.optimizers.damped`): SGD lowers its momentum first, since
staleness acts like momentum (Mitliagkas, Zhang, Hadjis, Ré 2016).
"""

from __future__ import annotations

from collections.abc import Sequence

CORRECT, KEEP = "correct", "keep"  # what a run does about stale gradients, in its config and in its log
_WINDOW = 16  # gradients of each learner over which the measured staleness is averaged
_DIGITS = 6  # of a damping: it is in the log of every update


class Damping:
    """The damping of a run's updates, one after the other.

    `scaling`: by how much the learning rate was multiplied; `added_up`: gradients in a push.
    """

    def __init__(self, *, expected: float, scaling: float, added_up: int, learners: int) -> None:
        self.mean = expected  # staleness
        self._scaled = scaling > 1
        self._length = scaling * added_up  # of a step, in steps of one minibatch
        self._weight = 1 / (_WINDOW * learners)

    def of(self, ages: Sequence[int], scale: float, share: float = 1.0) -> float:
        """Of an update with gradients of these ages, which a rule has scaled by `scale` on average.

        `share`: of the gradients that the rate was multiplied for. With fewer the linear scaling rule has a lower rate.
        """
        for age in ages:
            self.mean += (age - self.mean) * self._weight
        return self._at(max(self.mean, sum(ages) / len(ages)), scale, share if self._scaled else 1.0)

    def now(self) -> float:
        return self._at(self.mean, 1.0, 1.0)

    def _at(self, staleness: float, scale: float, share: float) -> float:
        length = self._length * share
        return min(1.0, round(share / ((1 + staleness * length) * scale), _DIGITS)) if scale > 0 else 1.0
