"""`offbeat bench predictions`: strategies, numbers of learners and delays, each predicted from a calibration and run.

The prediction of a configuration is made before its runs, with delays that are not theirs. All configurations take
turns in every round, each round with its own seed, and the median over rounds counts. A configuration that is a probe
of the calibration is shown, and does not count: it was not predicted but measured.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

from offbeat.errors import RequestError
from offbeat.machine import machine_facts
from offbeat.measure.calibrate import train_for
from offbeat.measure.rank_bench import Progress
from offbeat.predict.calibration import Calibration
from offbeat.predict.from_calibration import predict
from offbeat.processes.signals import terminable
from offbeat.train.config import Config
from offbeat.train.config_files import changed
from offbeat.train.launch import MOST_LEARNERS
from offbeat.train.tasks import task_of

LINES = ("ring", "k-sync:2", "k-batch-async:2")
LEARNERS = (2, 4)
SLOW = ("none", "exp:0.02", "learner=0,factor=2")
DRAWN = 5  # predictions, each with delays drawn anew, of which the mean is taken
APART = 1.15  # two whose times differ by more have an order

DEFINITIONS: Mapping[str, str] = {
    "measured_s": "seconds an update of a real training after its first epoch, evaluation left out; median over rounds",
    "predicted_s": "seconds an update, simulated from the calibration before the run",
    "error": "predicted / measured - 1",
    "mean_error": "mean of the errors without their signs; probes of the calibration do not count",
    "order": f"pairs whose measured times differ by more than {100 * (APART - 1):.0f} %, and how many are predicted in "
    "that order",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionsRequest:
    """What is asked for; wrong requests are refused at birth."""

    config: Config
    calibration: Calibration
    lines: tuple[str, ...] = LINES
    learners: tuple[int, ...] = LEARNERS
    slow: tuple[str, ...] = SLOW
    rounds: int = 3

    def __post_init__(self) -> None:
        for name, values in (("--sync", self.lines), ("--learners", self.learners), ("--slow", self.slow)):
            if len(set(values)) < len(values):
                raise RequestError(f"bench: {name} names something twice: {', '.join(map(str, values))}")
        if max(self.learners) > MOST_LEARNERS:
            raise RequestError(f"bench: --learners are at most {MOST_LEARNERS} here; got {max(self.learners)}")
        list(self.configurations())
        if all(self.calibration.has(one.sync, one.learners, not one.slow) for one in self.configurations()):
            raise RequestError("bench: all of these are probes of the calibration: there is nothing to predict")

    def configurations(self) -> Iterator[Config]:
        for slow, learners, line in product(self.slow, self.learners, self.lines):
            rules = () if slow == "none" else (slow,)
            yield changed(self.config, {"sync": line, "learners": learners, "slow": rules})


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionRow:
    """One configuration."""

    config: Config
    rounds_s: tuple[float, ...]
    predicted_s: float
    probe: bool = False  # the calibration has it

    @property
    def measured_s(self) -> float:
        return statistics.median(self.rounds_s)

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    def as_json(self) -> dict[str, Any]:
        return {
            "strategy": self.config.sync,
            "learners": self.config.learners,
            "slow": " ".join(self.config.slow) or "none",
            "measured_s": self.measured_s,
            "rounds_s": list(self.rounds_s),
            "predicted_s": self.predicted_s,
            "error": self.error,
            "probe": self.probe,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """What `offbeat bench predictions` found."""

    request: PredictionsRequest
    machine: Mapping[str, Any]
    rows: tuple[PredictionRow, ...]

    @property
    def counted(self) -> list[PredictionRow]:
        return [row for row in self.rows if not row.probe]

    @property
    def mean_error(self) -> float:
        return statistics.fmean(abs(row.error) for row in self.counted)

    @property
    def worst_error(self) -> float:
        return max((row.error for row in self.counted), key=abs)

    def worst_first(self) -> list[PredictionRow]:
        return sorted(self.rows, key=lambda row: -abs(row.error))

    def order(self) -> tuple[int, list[tuple[PredictionRow, PredictionRow]]]:
        """How many pairs have an order, and which are predicted in the wrong one."""
        return order_of(self.counted)

    def summary(self) -> str:
        pairs, wrong = self.order()
        text = f"{len(self.counted)} predictions, {100 * self.mean_error:.1f} % off on average"
        text += f", {100 * self.worst_error:+.1f} % at worst"
        return f"{text}; {pairs - len(wrong)} of {pairs} pairs that differ by more than 15 % are in the right order"

    def as_json(self) -> dict[str, Any]:
        pairs, wrong = self.order()
        return {
            "measured": "predictions",
            "recipe": self.request.config.name,
            "machine": dict(self.machine),
            "rounds": self.request.rounds,
            "rows": [row.as_json() for row in self.worst_first()],
            "mean_error": self.mean_error,
            "worst_error": self.worst_error,
            "pairs": pairs,
            "pairs_in_order": pairs - len(wrong),
            "summary": self.summary(),
            "definitions": dict(DEFINITIONS),
        }


def order_of(
    rows: Sequence[PredictionRow],
) -> tuple[int, list[tuple[PredictionRow, PredictionRow]]]:
    pairs, wrong = 0, []
    for one, other in combinations(rows, 2):
        fast, slow = sorted((one, other), key=lambda row: row.measured_s)
        if slow.measured_s > APART * fast.measured_s:
            pairs += 1
            if not slow.predicted_s > fast.predicted_s:
                wrong.append((fast, slow))
    return pairs, wrong


def measure(request: PredictionsRequest, progress: Progress) -> Predictions:
    """Predict all, then run all, in turn."""
    machine = machine_facts()
    samples = len(task_of(request.config).train)  # type: ignore[arg-type] # a map-style set has a length
    configs = list(request.configurations())
    predicted = [_predicted_s(request.calibration, config, samples) for config in configs]
    rounds: list[list[float]] = [[] for _ in configs]
    with terminable(), tempfile.TemporaryDirectory(prefix="offbeat-bench-") as folder:
        for number in range(request.rounds):
            for place, config in enumerate(configs):
                slow = " ".join(config.slow) or "no delays"
                progress(f"{config.sync}, {config.learners} learners, {slow}, round {number + 1} of {request.rounds}")
                own = changed(config, {"seed": config.seed + number})
                trained = train_for(own, samples, Path(folder) / "run", _updates(predicted[place]))
                rounds[place].append(trained.seconds_per_update)
    rows = tuple(
        PredictionRow(
            config=config,
            rounds_s=tuple(some),
            predicted_s=seconds,
            probe=request.calibration.has(config.sync, config.learners, not config.slow),
        )
        for config, some, seconds in zip(configs, rounds, predicted, strict=True)
    )
    return Predictions(request=request, machine=machine, rows=rows)


def _predicted_s(calibration: Calibration, config: Config, samples: int) -> float:
    """Seconds an update, the mean over several draws of the delays."""
    each = [changed(config, {"seed": config.seed + number}) for number in range(DRAWN if config.slow else 1)]
    return statistics.fmean(predict(calibration, one, samples).seconds_per_update for one in each)


def _updates(seconds: float) -> int:
    """So many that a run takes some seconds: delays need many to be told from chance."""
    return min(400, max(100, math.ceil(2.0 / seconds)))
