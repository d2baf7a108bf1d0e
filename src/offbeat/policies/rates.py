"""Rates: how much each gradient counts, by how stale it is or how far the weights have moved since.

A rate gives `Apply` its scales; the learning rate itself is the pushing learner's. Minibatches of unequal size
are weighted by their samples, so that with equal rates the update is the mean over all samples.

    constant              1
    inverse               1 / max(1, staleness), each gradient its own        (Zhang et al. 2016)
    inverse-mean          1 / max(1, mean staleness of this update), for all
    drift:C               min(1, C / |w_now - w_read|^2): C is that of min(C / |..|^2, rate), over the learning rate
    delay-compensated:L   1; the shard adds L * g * g * (w_now - w_read), element by element (Zheng et al. 2017)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offbeat import spec as grammar
from offbeat.errors import unknown
from offbeat.policies.events import Pushed


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A rate as the user wrote it; `compensation` is what the shard has to do, 0 for nothing."""

    text: str
    factor: Callable[[Sequence[Pushed], int], Sequence[float]] | None
    compensation: float = 0.0
    needs_drift: bool = False

    def scales(self, gradients: Sequence[Pushed], version: int) -> tuple[float, ...]:
        """One number for each gradient that an update of `version` applies."""
        factors = (1.0,) * len(gradients) if self.factor is None else self.factor(gradients, version)
        samples = [gradient.samples for gradient in gradients]
        if samples.count(samples[0]) == len(samples):  # the usual case, and exactly the factors then
            return tuple(factors)
        mean = sum(samples) / len(samples)
        return tuple(factor * count / mean for factor, count in zip(factors, samples, strict=True))


def _inverse(gradients: Sequence[Pushed], version: int) -> list[float]:
    return [1.0 / max(1, version - gradient.version) for gradient in gradients]


def _inverse_mean(gradients: Sequence[Pushed], version: int) -> list[float]:
    mean = sum(version - gradient.version for gradient in gradients) / len(gradients)
    return [1.0 / max(1.0, mean)] * len(gradients)


def _drift(limit: float) -> Callable[[Sequence[Pushed], int], list[float]]:
    def factors(gradients: Sequence[Pushed], version: int) -> list[float]:
        return [min(1.0, limit / gradient.drift) if gradient.drift else 1.0 for gradient in gradients]

    return factors


def _positive(text: str) -> float:
    return grammar.parse_number(text, lambda x: 0 < x < math.inf, "expected a number above 0")


_NUMBER = (grammar.Param(name="number", read=_positive, positional=True, required=True, help="above 0"),)
RATES: dict[str, tuple[str, tuple[grammar.Param, ...], Callable[..., Rate]]] = {
    "constant": ("every gradient counts 1", (), lambda text: Rate(text=text, factor=None)),
    "inverse": ("1 / max(1, staleness), per gradient", (), lambda text: Rate(text=text, factor=_inverse)),
    "inverse-mean": ("1 / max(1, mean staleness)", (), lambda text: Rate(text=text, factor=_inverse_mean)),
    "drift": (
        "min(1, C / |w_now - w_read|^2)",
        _NUMBER,
        lambda text, number: Rate(text=text, factor=_drift(number), needs_drift=True),
    ),
    "delay-compensated": (
        "g + L g g (w_now - w_read), computed by the shard",
        _NUMBER,
        lambda text, number: Rate(text=text, factor=None, compensation=number),
    ),
}


def parse_rate_rule(text: str) -> Rate:
    """`inverse`, `drift:0.1`, ..."""
    spec = grammar.parse(text)
    if spec.name not in RATES:
        raise unknown("rate", spec.name, RATES)
    _, params, create = RATES[spec.name]
    return create(str(spec), **grammar.bind(spec, params))


CONSTANT = parse_rate_rule("constant")
