"""Slowness on purpose, for experiments: the laws of the simulator, seeded, acted out by real learners.

exp:0.05                 every minibatch takes so much longer, drawn anew (any law of `offbeat simulate --compute`)
learner=2,factor=3       learner 2 is 3 times as slow: its computing and what is drawn for it
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from offbeat.errors import RequestError
from offbeat.simulate.compute import Draws, Law, parse_law

_SLOWER = re.compile(r"learner=([0-9]{1,9}),factor=([0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?)")
_GLANCE_S = 0.02  # between two looks at whether the rest is still wanted


class Slowness:
    """What makes one learner slow."""

    def __init__(self, rules: Sequence[str], *, learner: int, learners: int, seed: int) -> None:
        law, factors = parse(rules, learners)
        self.factor = factors.get(learner, 1.0)
        speeds = [1.0 / factors.get(one, 1.0) for one in range(learners)]
        self._draws = None if law is None else Draws(law, learners, seed, speeds=speeds)
        self._learner = learner

    def act(self, computed_s: float, unwanted: Callable[[], bool], nap: Callable[[float], None] = time.sleep) -> bool:
        """Take the time that is due after so many seconds of computing; False if it was given up on the way.

        `nap(seconds)` sleeps for at most so long, and ends early when it is time to look again.
        """
        rest = computed_s * (self.factor - 1.0)
        if self._draws is not None:
            rest += self._draws.take(self._learner)
        end = time.perf_counter() + rest
        while (left := end - time.perf_counter()) > 0:
            if unwanted():
                return False
            nap(min(left, _GLANCE_S))
        return True


def parse(rules: Sequence[str], learners: int) -> tuple[Law | None, dict[int, float]]:
    """The law that is drawn from, if any, and who is slower by which factor."""
    law: Law | None = None
    factors: dict[int, float] = {}
    for rule in rules:
        if not rule.startswith("learner="):
            if law is not None:
                raise RequestError(f"got two delay laws, '{law.text}' and '{rule}'; give one")
            law = parse_law(rule)
            continue
        match = _SLOWER.fullmatch(rule)
        if match is None or not 1 <= float(match[2]) < 1e6:
            raise RequestError(
                f"expected a law like exp:0.05, or learner=2,factor=3 with a factor of 1 or more; got '{rule}'"
            )
        learner = int(match[1])
        if learner >= learners:
            raise RequestError(f"'{rule}': there are {learners} learners, numbered from 0")
        factors[learner] = float(match[2])
    return law, factors
