"""How long a minibatch takes: laws, and what makes one learner slower than another.

A law turns uniform random numbers into seconds. Around it stand persistent speeds (a learner of speed 0.5 takes twice
as long), slow periods (a two-state Markov chain over minibatches), and failures (a learner leaves and comes back).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from offbeat import spec as grammar
from offbeat.errors import RequestError, unknown
from offbeat.simulate.engine import (
    COMPUTE,
    FAILURE,
    REPAIR,
    SLOW,
    Floats,
    Ints,
    Keys,
    from_keys,
    learner_keys,
    uniforms,
)
from offbeat.simulate.recorded import read_recording
from offbeat.spec import Param, parse_number, parse_seconds

# Gives the uniform numbers of a purpose, all in the same shape.
Chance = Callable[[int], Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """A law of compute times; `mean_s` may be infinite.

    `sample` is for learners that are all alike. Where each has times of its own there is `by_learner`, which is told
    whose each row is, and `sample` is of all of them together. Where nothing is left to chance there is `at`, which
    comes before both: the seconds of these learners' minibatches of these numbers; the two are broadcast together.
    """

    mean_s: float
    sample: Callable[[Chance], Floats]
    text: str = ""  # which `parse_law` knows
    by_learner: Callable[[Ints, Chance], Floats] | None = None
    at: Callable[[Ints, Ints], Floats] | None = None

    def scaled(self, factor: float) -> Law:
        """All times multiplied. What is known of the law by its text does not hold for it, so each learner has it for
        itself."""
        by_learner, sample, at = self.by_learner, self.sample, self.at
        return replace(
            self,
            mean_s=factor * self.mean_s,
            sample=lambda chance: factor * sample(chance),
            by_learner=lambda learners, u: factor * (sample(u) if by_learner is None else by_learner(learners, u)),
            at=None if at is None else lambda learners, minibatches: factor * at(learners, minibatches),
        )


def _constant(value: float) -> Law:
    return Law(mean_s=value, sample=lambda u: np.full_like(u(COMPUTE), value))


def _uniform(low: float, high: float) -> Law:
    if low > high:
        raise RequestError(f"LOW ({low}) exceeds HIGH ({high})")
    return Law(mean_s=(low + high) / 2, sample=lambda u: low + (high - low) * u(COMPUTE))


def _shifted(shift: float, mean: float) -> Law:
    return Law(mean_s=shift + mean, sample=lambda u: shift - mean * np.log(u(COMPUTE)))


def _pareto(shape: float, scale: float) -> Law:
    mean = shape * scale / (shape - 1) if shape > 1 else math.inf
    return Law(mean_s=mean, sample=lambda u: scale * u(COMPUTE) ** (-1 / shape))


def _lognormal(mean: float, cv: float) -> Law:
    sigma = math.sqrt(math.log1p(cv * cv))
    mu = math.log(mean) - sigma * sigma / 2
    return Law(mean_s=mean, sample=lambda u: np.exp(mu + sigma * _normal(u, COMPUTE)))


def _weibull(shape: float, scale: float) -> Law:
    return Law(mean_s=scale * math.gamma(1 + 1 / shape), sample=lambda u: scale * (-np.log(u(COMPUTE))) ** (1 / shape))


def _bimodal(fast: float, slow: float, share_slow: float) -> Law:
    return Law(mean_s=fast + (slow - fast) * share_slow, sample=lambda u: np.where(u(COMPUTE) < share_slow, slow, fast))


def _gamma(mean: float, cv: float) -> Law:
    shape = 1 / (cv * cv)
    return Law(mean_s=mean, sample=lambda u: mean / shape * _gamma_unit(shape, u))


def _normal(u: Chance, purpose: int) -> Floats:
    """Box and Muller 1958, from two uniforms."""
    radius: Floats = np.sqrt(-2 * np.log(u(purpose)))
    return radius * np.cos(2 * math.pi * u(purpose + 1))


def _gamma_unit(shape: float, u: Chance) -> Floats:
    """Gamma with scale 1, by Marsaglia and Tsang 2000: rejection, so each try has numbers of its own."""
    boost = u(COMPUTE + 3) ** (1 / shape) if shape < 1 else None
    d = (shape + 1 if shape < 1 else shape) - 1 / 3
    c = 1 / math.sqrt(9 * d)
    result = np.full_like(u(COMPUTE), d)  # what the (never seen) 48th rejection in a row would leave
    open_ = np.ones(result.shape, bool)
    for attempt in range(48):
        first = COMPUTE + 4 + 4 * attempt
        x = _normal(u, first)
        v = (1 + c * x) ** 3
        with np.errstate(invalid="ignore", divide="ignore"):
            accepted = (v > 0) & (np.log(u(first + 2)) < 0.5 * x * x + d - d * v + d * np.log(v))
        take = open_ & accepted
        result[take] = (d * v)[take]
        open_ &= ~accepted
        if not open_.any():
            break
    return result if boost is None else result * boost


def _trace(run: str) -> Law:
    recording = read_recording(Path(run))
    return Law(
        mean_s=recording.mean_s,
        sample=lambda u: recording.pooled.at(u(COMPUTE)),
        by_learner=lambda learners, u: recording.at(learners, u(COMPUTE)),
    )


def _time(name: str, help: str) -> Param:
    return Param(name=name, read=_positive_time, positional=True, required=True, help=help)


def _number(name: str, help: str, least: float, most: float) -> Param:
    """A number in bounds outside of which draws would be 0 or infinite."""

    def read(text: str) -> float:
        return parse_number(text, lambda x: least <= x <= most, f"expected a number from {least:g} to {most:g}")

    return Param(name=name, read=read, positional=True, required=True, help=help)


def _positive_time(text: str) -> float:
    value = parse_seconds(text)
    if not 1e-12 <= value <= 1e12:
        raise RequestError(f"a time must be above 0 and at most 1e12 s; got '{text}'")
    return value


_CV = _number("cv", "standard deviation / mean", 1e-3, 10)
_Build = Callable[..., Law]
LAWS: dict[str, tuple[str, tuple[Param, ...], _Build]] = {
    "constant": ("always the same", (_time("value", "seconds"),), _constant),
    "uniform": (
        "uniform between two times",
        (_time("low", "seconds"), _time("high", "seconds")),
        _uniform,
    ),
    "exp": ("memoryless", (_time("mean", "seconds"),), lambda mean: _shifted(0.0, mean)),
    "shifted-exp": (
        "a constant plus an exponential",
        (_time("shift", "seconds"), _time("mean", "mean of the exponential part")),
        _shifted,
    ),
    "pareto": (
        "heavy tail",
        (_number("shape", "above 1 for a finite mean", 0.1, 1e3), _time("scale", "smallest time")),
        _pareto,
    ),
    "gamma": ("gamma: skewed, with one peak", (_time("mean", "seconds"), _CV), _gamma),
    "lognormal": (
        "log-normal: skewed, with one peak",
        (_time("mean", "seconds"), _CV),
        _lognormal,
    ),
    "weibull": (
        "lighter or heavier tail than exp",
        (_number("shape", "1: the same as exp", 0.1, 1e3), _time("scale", "seconds")),
        _weibull,
    ),
    "bimodal": (
        "two speeds",
        (
            _time("fast", "seconds"),
            _time("slow", "seconds"),
            _number("share-slow", "probability of the slow time, from 0 to 1", 0, 1),
        ),
        _bimodal,
    ),
    "trace": (
        "recorded times: of a run (folder or log), per learner, or a file with one number of seconds per line",
        (Param(name="run", read=str, positional=True, required=True, help="a path"),),
        _trace,
    ),
}


def parse_law(text: str) -> Law:
    """`exp:1`, `gamma:20ms,0.25`, `trace:runs/digits`, ..."""
    spec = grammar.parse(text)
    if spec.name not in LAWS:
        raise unknown("law", spec.name, LAWS)
    _, params, create = LAWS[spec.name]
    options: dict[str, Any] = grammar.bind(spec, params)
    try:
        return replace(create(**options), text=str(spec))
    except RequestError as error:
        raise RequestError(f"'{spec}': {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowPeriods:
    """Before each minibatch a fast learner turns slow with probability `enter`, a slow one fast with `leave`."""

    factor: float
    enter: float
    leave: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """A learner fails after a memoryless time and comes back after another."""

    mean_up_s: float
    mean_down_s: float


class Draws:
    """The compute times of every learner, in the order of its minibatches.

    They are made a block at a time, since numpy is quick with many and slow with one. `take(learner)` gives the next;
    a hot loop may pop from `blocks[learner]` itself and call `refill` when it is empty.
    """

    def __init__(
        self,
        law: Law,
        learners: int,
        seed: int,
        *,
        speeds: Sequence[float] = (),
        slow: SlowPeriods | None = None,
        ids: Sequence[int] = (),
    ) -> None:
        self.law, self.seed, self.slow = law, seed, slow
        self.ids = np.array(ids) if ids else np.arange(learners)
        self.speeds = np.ones(learners)
        self.speeds[: len(speeds)] = speeds
        self.size = max(4, min(256, 4_000_000 // learners))
        self.keys: dict[int, Keys] = {}  # by purpose, of all learners
        self.drawn = [0] * learners  # minibatches whose times have been made
        self.is_slow = [False] * learners
        self.blocks: list[array[float]] = []
        together = max(1, 1_000_000 // self.size)
        for first in range(0, learners, together):
            some = np.arange(first, min(learners, first + together))
            self.blocks += self._make(some, 0)
        self.drawn = [self.size] * learners

    def take(self, learner: int) -> float:
        block = self.blocks[learner] or self.refill(learner)
        return block.pop()

    def refill(self, learner: int) -> array[float]:
        """The learner's next block, last minibatch first so that `pop` gives the next one."""
        (block,) = self._make(np.array([learner]), self.drawn[learner])
        self.blocks[learner] = block
        self.drawn[learner] += self.size
        return block

    def _make(self, learners: Ints, first: int) -> list[array[float]]:
        minibatches = np.arange(first, first + self.size)[None, :]

        def chance(purpose: int) -> Floats:
            if purpose not in self.keys:
                self.keys[purpose] = learner_keys(self.seed, self.ids, purpose)
            return from_keys(self.keys[purpose][learners, None], minibatches)

        if self.law.at is not None:
            drawn = self.law.at(self.ids[learners, None], minibatches)
        elif self.law.by_learner is not None:
            drawn = self.law.by_learner(self.ids[learners], chance)
        else:
            drawn = self.law.sample(chance)
        seconds = np.maximum(drawn, 1e-30) / self.speeds[learners, None]  # never nothing at all
        if self.slow is not None:
            chances = chance(SLOW)
            for row, learner in enumerate(learners.tolist()):
                seconds[row] *= self._slowness(self.slow, learner, chances[row])
        return [array("d", row.tobytes()) for row in np.ascontiguousarray(seconds[:, ::-1])]

    def _slowness(self, periods: SlowPeriods, learner: int, chances: Floats) -> list[float]:
        factors = []
        slow = self.is_slow[learner]
        for chance in chances.tolist():
            slow = chance >= periods.leave if slow else chance < periods.enter
            factors.append(periods.factor if slow else 1.0)
        self.is_slow[learner] = slow
        return factors


def failure_times(failures: Failures, seed: int, learner: int, number: int) -> tuple[float, float]:
    """How long the learner is up before its failure of this number, and down after it."""
    at = np.array([learner]), np.array([number])
    up, down = (float(uniforms(seed, *at, purpose)[0]) for purpose in (FAILURE, REPAIR))
    return -failures.mean_up_s * math.log(up), -failures.mean_down_s * math.log(down)
