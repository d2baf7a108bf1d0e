"""Order and chance in a simulation.

Order: one heap of (time, kind, learner, sequence). At one time kinds go in the order below, then learners, so the
same run always takes the same course.

Chance: a random number is a function of (seed, learner, minibatch, purpose) and of nothing else. A ninth learner or
another policy does not change what the first eight draw; strategies can be compared on the same draws.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

# Kinds of entries on the heap, in the order in which they are taken at one time. A learner that fails does so before
# its work counts, and one that is cancelled stops before new weights come.
FAIL: Final = 0
STOPPED: Final = 1
CANCEL: Final = 2
ARRIVE: Final = 3
FINISH: Final = 4
WEIGHTS: Final = 5
ASK: Final = 6
REJOIN: Final = 7
LINK: Final = 8
END: Final = 9
RESUME: Final = 10
CORES: Final = 11  # work on shared cores has ended
WAKE: Final = 13  # the policy is woken: what comes at the same moment has come in time
ASIDE: Final = 12  # a learner without samples leaves, if nothing else at this time has brought it some

# Purposes of random numbers.
COMPUTE: Final = 0  # and up to COMPUTE + 199 for laws that need more than one number
SLOW: Final = 200
FAILURE: Final = 201
REPAIR: Final = 202
MEASURED: Final = 203  # compute times of a calibration, beside delays that are drawn for COMPUTE

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ONE, _TWO = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]


def uniforms(seed: int, learners: Ints, minibatches: Ints, purpose: int) -> Floats:
    """Numbers strictly between 0 and 1, one for each (learner, minibatch); the two are broadcast together."""
    return from_keys(learner_keys(seed, learners, purpose), minibatches)


def learner_keys(seed: int, learners: Ints, purpose: int) -> Keys:
    """The first half of `uniforms`, which does not change from minibatch to minibatch."""
    start = (seed + (purpose + 1) * int(_GOLDEN)) % 2**64  # in Python: numpy warns of scalars that wrap around
    key = _mix(np.full(1, start, np.uint64))
    return _mix(key + (learners.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def from_keys(keys: Keys, minibatches: Ints) -> Floats:
    """The second half."""
    numbers = _mix(keys + (minibatches + 1).astype(np.uint64) * _GOLDEN) >> np.uint64(11)
    return (numbers.astype(np.float64) + 0.5) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _ONE
    x = (x ^ (x >> np.uint64(27))) * _TWO
    return x ^ (x >> np.uint64(31))
