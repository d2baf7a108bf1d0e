"""The numbers that offbeat reports, each defined once.

Scaling is weak (the batch of a learner stays the same) unless a name says strong. The base, what n = 1 is
(one device, or a node of several), is stated wherever these are printed. Formulas as text are in
`DEFINITIONS`, so that a table can show them beside its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from offbeat.errors import RequestError, unknown
from offbeat.number_format import format_size


class Definition(NamedTuple):
    """What a number means."""

    unit: str
    formula: str


SLOWER = 1.3  # times the others' time for a minibatch, from which on a learner is slow

DEFINITIONS: Mapping[str, Definition] = {
    "throughput": Definition(
        "samples/s", "samples whose gradients were applied / seconds (cancelled and dropped ones do not count)"
    ),
    "speedup": Definition("", "n * T(1) / T(n), T = seconds per iteration, same batch per learner"),
    "efficiency": Definition("", "speedup / n = T(1) / T(n)"),
    "overhead": Definition("s", "T(n) - T(1), same batch per learner"),
    "strong speedup": Definition("", "T(1) / T(n), same global batch"),
    "strong efficiency": Definition("", "strong speedup / n"),
    "staleness": Definition(
        "versions", "version before the update that applies the gradient - version with which it was computed"
    ),
    "bus bandwidth": Definition(
        "bytes/s", "size / seconds * factor of the collective (BUS_FACTORS); all-to-all: size of one rank's part"
    ),
    "time to accuracy": Definition(
        "s",
        "training seconds until the first evaluation that reaches the target, if the median of it and the next "
        "two evaluations also does; the time for evaluation is left out",
    ),
    "accuracy": Definition(
        "",
        "share of the test set that is classified correctly; in brackets the 95 % interval (Wilson) for the size of "
        "that set. Two accuracies differ significantly if the 95 % interval of their difference (Newcombe) excludes 0",
    ),
    "energy": Definition("J", "joules as measured by GPU counters or RAPL, or 'not measured'"),
    "cost": Definition("", "devices * hours * price of a device hour, as given by the user"),
    "base": Definition("", "what n = 1 means: one device or one node; runs with different bases are not ranked"),
    # of runs, in a report
    "seconds": Definition("s", "training seconds at the last evaluation, evaluation left out; if none is recorded, "
        "from the first to the last span of each part of a resumed run, less the "
        "evaluations. After a resume, work that was lost between a checkpoint and a kill is "
        "not counted"),
    "seconds per update": Definition("s", "seconds / updates, over the whole run"),
    "error": Definition("", "1 - accuracy on the test set"),
    "computing": Definition("s", "seconds of minibatches that were finished and not dropped"),
    "thrown away": Definition("s", "seconds of minibatches that were cancelled, or whose gradient was dropped"),
    "accounted time": Definition("s", "computing + thrown away + sending + waiting + updating; evaluation left out"),
    "not computing": Definition("", "(sending + waiting + updating) / accounted time, of all learners together; "
                                    "includes waiting for slower learners"),
    "minibatch": Definition("", "where a learner pushes after N minibatches and the log has one span for them, that "
                                "span counts as N minibatches of equal length"),
    "typical minibatch": Definition("s", "median seconds; a cancelled minibatch counts as one of unknown, longer "
                                         "duration (Kaplan and Meier 1958)"),
    "straggler": Definition("", f"a learner whose typical minibatch takes over {SLOWER} times the median of the "
                                "other learners, over the whole run and in every quarter of the run that can be "
                                "compared (at least two quarters). If the learner finished no minibatch, the median "
                                "time until its minibatches were cancelled is used as a lower bound"),
    "energy per sample": Definition("J", "joules / samples applied"),
    "energy to target": Definition("J", "joules * seconds to the target / seconds, assuming constant power"),
    "cost of a run": Definition("", "cost of the training time, or of the time to the target; work lost between a "
                                    "checkpoint and a kill is not counted"),
    "devices": Definition("", "one for each learner"),
}  # fmt: skip


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
    "gather": _SHARE,
    "scatter": _SHARE,
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


# --- a target, and when it is reached -------------------------------------------------------------------------------


def reached_at(values: Sequence[float], target: float) -> int | None:
    """Which evaluation reached the target: the first that is there with the median of it and the next two.

    A value that is there once, by chance, does not count. Two of three decide the median, so a curve that ends with
    two in a row has reached it; one whose last value alone is there has not. For a loss give -values and -target.
    """
    there = [value >= target for value in values]
    return next((at for at, one in enumerate(there) if one and any(there[at + 1 : at + 3])), None)


def highest_reached(values: Sequence[float]) -> float | None:
    """The highest target that these have reached, by `reached_at`; None: there are fewer than two."""
    return max((min(one, max(values[at + 1 : at + 3])) for at, one in enumerate(values[:-1])), default=None)


def time_to_accuracy(points: Iterable[tuple[float, float]], target: float) -> float | None:
    """From (training seconds, metric) in order of time: when the metric reached `target`, or None."""
    points = tuple(points)
    at = reached_at([metric for _, metric in points], target)
    return None if at is None else points[at][0]


# --- how sure an accuracy is ------------------------------------------------------------------------------------------

Z = 1.959964  # of a normal distribution, 95 % are within so many standard deviations


def interval(accuracy: float, samples: int) -> tuple[float, float]:
    """The 95 % interval of a share that was measured on so many samples (Wilson 1927): sound near 0 and 1 too."""
    spread = Z * Z / _positive("samples", samples)
    middle = (accuracy + spread / 2) / (1 + spread)
    half = Z * math.sqrt(accuracy * (1 - accuracy) / samples + spread / (4 * samples)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def known_interval(accuracy: float | None, samples: int | None) -> tuple[float, float] | tuple[None, None]:
    """The same where both are known."""
    return (None, None) if accuracy is None or not samples else interval(accuracy, samples)


def format_accuracy(accuracy: float, samples: int | None) -> str:
    """`98.1 % (96.1-99.1)`: with its interval, where the size of the test set is known."""
    text = f"{100 * accuracy:.1f} %"
    if not samples:
        return text
    low, high = interval(accuracy, samples)
    return f"{text} ({100 * low:.1f}-{100 * high:.1f})"


def format_traffic(sent_bytes: int, received_bytes: int, idle_share: float | None = None) -> str:
    """What learners have sent and received, and how much they computed beside what they did not."""
    text = f"sent {format_size(sent_bytes)} and received {format_size(received_bytes)} of gradients and weights"
    if not idle_share:
        return text
    return f"{text}; ratio of computing to communication and waiting: {(1 - idle_share) / idle_share:.2g}"


def told_consensus(consensus: Mapping[str, float]) -> str:
    """How far replicas were from their mean, in words: of the norm of the mean."""
    mean, most = consensus["mean"], consensus["most"]
    return f"{100 * mean:.2g} % of the weights' norm from their mean on average, {100 * most:.2g} % at most"


def mean_delay(delays: Mapping[str, int]) -> float | None:
    """Of learners that compute on: local minibatches from a push to taking the weights that answer it."""
    many = sum(delays.values())
    return sum(int(delay) * times for delay, times in delays.items()) / many if many else None


def told_delays(delays: Mapping[str, int]) -> str:
    """The same in words; nothing where no learner computed on."""
    mean = mean_delay(delays)
    if mean is None:
        return ""
    return f"new weights came {mean:.2f} local minibatches after a push on average, {max(map(int, delays))} at most"


class Score(NamedTuple):
    """What a ranking knows of a run."""

    accuracy: float
    samples: int | None  # of the test set; None: not known, and every difference counts
    seconds: float  # that decide between those whose accuracies are tied

    def is_above(self, other: Score, *, within: float = 0.0) -> bool:
        """Whether it is better by more than `within` and by more than chance gives.

        The latter: the 95 % interval of the difference of two shares (Newcombe 1998) does not reach 0. It takes the
        test sets for independent, and so is careful where they are the same.
        """
        more = self.accuracy - other.accuracy
        if more <= within + 1e-9:
            return False
        if not self.samples or not other.samples:
            return True
        below = self.accuracy - interval(self.accuracy, self.samples)[0]
        above = interval(other.accuracy, other.samples)[1] - other.accuracy
        return more > math.hypot(below, above)


def ranking(scores: Sequence[Score], *, within: float = 0.0) -> list[list[int]]:
    """Their places, the best accuracies first: groups of who is not below the best of the group, the fastest first."""
    left = sorted(range(len(scores)), key=lambda at: (-scores[at].accuracy, scores[at].seconds))
    groups = []
    while left:
        tied = [at for at in left if not scores[left[0]].is_above(scores[at], within=within)]
        groups.append(sorted(tied, key=lambda at: scores[at].seconds))
        left = [at for at in left if at not in tied]
    return groups


# --- stragglers -----------------------------------------------------------------------------------------------------

FEWEST_PARTS = 2  # that can be compared


def is_slow(own_s: float, others_s: float) -> bool:
    """From the typical seconds of a learner's minibatch, and of the others'."""
    return own_s > SLOWER * others_s > 0


def is_straggler(whole: tuple[float, float], parts: Sequence[tuple[float, float]]) -> bool:
    """From seconds as `is_slow` takes them, over the whole time and in each part of it in which both are known.

    A straggler is slow all the time, not by chance. One definition, for runs that were measured and for clusters to
    simulate.
    """
    return is_slow(*whole) and len(parts) >= FEWEST_PARTS and all(is_slow(*part) for part in parts)


def cost(devices: int, seconds: float, price_per_device_hour: float) -> float:
    return devices * seconds / 3600 * price_per_device_hour


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise RequestError(f"{name} must be more than 0; got {value}")
    return value
