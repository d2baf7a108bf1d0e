"""The numbers that offbeat reports, each defined once.

Scaling is weak (the batch of a learner stays the same) unless a name says strong. The base, what n = 1 is
(one device, or a node of several), is stated wherever these are printed. Formulas as text are in
`DEFINITIONS`, so that a table can show them beside its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from offbeat.errors import RequestError, unknown


class Definition(NamedTuple):
    """What a number means."""

    unit: str
    formula: str


DEFINITIONS: Mapping[str, Definition] = {
    "throughput": Definition("samples/s", "samples applied / seconds (cancelled and dropped ones do not count)"),
    "speedup": Definition("", "n * T(1) / T(n), T = seconds an iteration, same batch per learner"),
    "efficiency": Definition("", "speedup / n = T(1) / T(n)"),
    "overhead": Definition("s", "T(n) - T(1), same batch per learner"),
    "strong speedup": Definition("", "T(1) / T(n), same total batch"),
    "strong efficiency": Definition("", "strong speedup / n"),
    "staleness": Definition(
        "versions", "version before the update that applies the gradient - version it was computed at"
    ),
    "bus bandwidth": Definition(
        "bytes/s", "size / seconds * factor of the collective (BUS_FACTORS); of all-to-all, the size of one rank's part"
    ),
    "time to accuracy": Definition(
        "s", "training seconds until the test metric first reaches the target, evaluation left out"
    ),
    "energy": Definition("J", "joules as measured by GPU counters or RAPL, or 'not measured'"),
    "cost": Definition("", "devices * hours * price of a device hour, as given by the user"),
    "base": Definition("", "what n = 1 is: one device, or a node of several; runs with different bases are not ranked"),
}


def throughput(samples_applied: int, seconds: float) -> float:
    return samples_applied / _positive("seconds", seconds)


def speedup(learners: int, one_s: float, many_s: float) -> float:
    """Weak scaling, from the seconds of an iteration on one learner and on `learners`."""
    return learners * _positive("T(1)", one_s) / _positive("T(n)", many_s)


def efficiency(one_s: float, many_s: float) -> float:
    """Weak scaling."""
    return _positive("T(1)", one_s) / _positive("T(n)", many_s)


def overhead_s(one_s: float, many_s: float) -> float:
    """Seconds an iteration that one learner does not need."""
    return _positive("T(n)", many_s) - _positive("T(1)", one_s)


def strong_speedup(one_s: float, many_s: float) -> float:
    return _positive("T(1)", one_s) / _positive("T(n)", many_s)


def strong_efficiency(learners: int, one_s: float, many_s: float) -> float:
    return strong_speedup(one_s, many_s) / _positive("learners", learners)


def staleness(version_before_update: int, version_computed_at: int) -> int:
    if version_computed_at > version_before_update:
        raise RequestError(
            f"a gradient of version {version_computed_at} cannot be applied at version {version_before_update}"
        )
    return version_before_update - version_computed_at


class BusFactor(NamedTuple):
    """What a collective's size / seconds is multiplied by, in words and as a function of the ranks."""

    text: str
    of: Callable[[float], float]


_SHARE = BusFactor("(P-1)/P", lambda ranks: (ranks - 1) / ranks)
_WHOLE = BusFactor("1", lambda ranks: 1.0)
BUS_FACTORS: Mapping[str, BusFactor] = {
    "all-reduce": BusFactor("2(P-1)/P", lambda ranks: 2 * (ranks - 1) / ranks),
    "reduce-scatter": _SHARE,
    "all-gather": _SHARE,
    "all-to-all": _SHARE,
    "broadcast": _WHOLE,
    "reduce": _WHOLE,
}


def bus_bandwidth(collective: str, ranks: int, size_bytes: float, seconds: float) -> float:
    """Bytes per second on the wire of each rank, comparable between rank counts.

    The size is that of the whole vector; for all-to-all, of what one rank holds.
    """
    if collective not in BUS_FACTORS:
        raise unknown("collective", collective, BUS_FACTORS)
    return size_bytes / _positive("seconds", seconds) * BUS_FACTORS[collective].of(_positive("ranks", ranks))


def time_to_accuracy(points: Iterable[tuple[float, float]], target: float) -> float | None:
    """From (training seconds, metric) in order of time: when the metric first reaches `target`, or None."""
    return next((seconds for seconds, metric in points if metric >= target), None)


def cost(devices: int, seconds: float, price_per_device_hour: float) -> float:
    return devices * seconds / 3600 * price_per_device_hour


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise RequestError(f"{name} must be more than 0; got {value}")
    return value
