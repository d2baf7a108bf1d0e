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
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

from offbeat.errors import RequestError
from offbeat.machine import machine_facts
from offbeat.measure.benchmark import BenchResult, Progress, alternate, check_distinct
from offbeat.measure.training_bench import train_for
from offbeat.predict.calibration import Calibration
from offbeat.predict.from_calibration import predict
from offbeat.processes.launcher import MOST_PROCESSES
from offbeat.processes.signals import terminable
from offbeat.report.benchmark_fields import PREDICTIONS, Row
from offbeat.spec import count_of
from offbeat.train.config import Config
from offbeat.train.config_files import changed
from offbeat.train.tasks import task_of

LINES = ("ring", "k-sync:2", "k-batch-async:2")
LEARNERS = (2, 4)
SLOW = ("none", "exp:0.02", "learner=0,factor=2")
DRAWN = 5  # predictions, each with delays drawn anew, of which the mean is taken
ORDERED_RATIO = 1.15  # two whose times differ by more have an order

DEFINITIONS: Mapping[str, str] = {
    "measured_s": "seconds per update of a real training run after its first epoch, without evaluation; median over "
    "rounds",
    "predicted_s": "seconds per update, simulated from the calibration before the run",
    "error": "predicted / measured - 1",
    "mean_error": "mean absolute error, without the training runs that the calibration was made from",
    "order": f"pairs whose measured times differ by more than {100 * (ORDERED_RATIO - 1):.0f} %, and how many are "
    "predicted in that order",
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
        check_distinct("--sync", self.lines, "strategy")
        check_distinct("--learners", self.learners, "number")
        check_distinct("--slow", self.slow, "rule")
        if max(self.learners) > MOST_PROCESSES:
            raise RequestError(f"bench: --learners: expected at most {MOST_PROCESSES}; got {max(self.learners)}")
        list(self.configurations())
        if all(self.calibration.has(one.sync, one.learners, not one.slow) for one in self.configurations()):
            raise RequestError(
                "bench: the calibration was made from all of these training runs, so there is nothing to "
                "predict; choose another --sync or --learners"
            )

    def configurations(self) -> Iterator[Config]:
        for slow, learners, line in product(self.slow, self.learners, self.lines):
            rules = () if slow == "none" else (slow,)
            yield changed(self.config, {"sync": line, "learners": learners, "slow": rules})


def prediction_row(config: Config, rounds_s: Sequence[float], predicted_s: float, *, probe: bool = False) -> Row:
    """One configuration; `probe`: the calibration has it."""
    measured_s = statistics.median(rounds_s)
    return {
        "strategy": config.sync,
        "learners": config.learners,
        "slow": " ".join(config.slow) or "none",
        "measured_s": measured_s,
        "rounds_s": list(rounds_s),
        "predicted_s": predicted_s,
        "error": predicted_s / measured_s - 1,
        "probe": probe,
    }


def order_of(rows: Sequence[Row]) -> tuple[int, list[tuple[Row, Row]]]:
    """How many pairs have an order, and which are predicted in the wrong one."""
    pairs, wrong = 0, []
    for one, other in combinations(rows, 2):
        fast, slow = sorted((one, other), key=lambda row: float(row["measured_s"]))
        if slow["measured_s"] > ORDERED_RATIO * fast["measured_s"]:
            pairs += 1
            if not slow["predicted_s"] > fast["predicted_s"]:
                wrong.append((fast, slow))
    return pairs, wrong


def predictions_result(recipe: str, machine: Mapping[str, Any], rounds: int, rows: Sequence[Row]) -> BenchResult:
    counted = [row for row in rows if not row["probe"]]
    pairs, wrong = order_of(counted)
    mean_error = statistics.fmean(abs(row["error"]) for row in counted)
    worst_error = max((row["error"] for row in counted), key=abs)
    worst_first = sorted(rows, key=lambda row: -abs(row["error"]))
    verdict = (
        f"{len(counted)} predictions, {100 * mean_error:.1f} % off on average, {100 * worst_error:+.1f} % at worst; "
        f"{pairs - len(wrong)} of {pairs} pairs that differ by more than 15 % are predicted in the right order"
    )
    return BenchResult(
        json={
            "measured": "predictions",
            "recipe": recipe,
            "machine": dict(machine),
            "rounds": rounds,
            "rows": worst_first,
            "mean_error": mean_error,
            "worst_error": worst_error,
            "pairs": pairs,
            "pairs_in_order": pairs - len(wrong),
            "summary": verdict,
            "definitions": dict(DEFINITIONS),
        },
        heading=f"{recipe}: seconds per update, predicted and measured, largest error first",
        tables=((PREDICTIONS, worst_first),),
        verdict=(verdict,),
        details=[
            f"predicted in the wrong order: {_label(fast)} is really faster than {_label(slow)}" for fast, slow in wrong
        ],
        terms=tuple(DEFINITIONS.items()),
    )


def _label(row: Row) -> str:
    delays = "" if row["slow"] == "none" else f", {row['slow']}"
    return f"{row['strategy']} with {count_of(row['learners'], 'learner')}{delays}"


def measure(request: PredictionsRequest, progress: Progress) -> BenchResult:
    """Predict all, then run all, in turn."""
    machine = machine_facts()
    samples = len(task_of(request.config).train)  # type: ignore[arg-type] # a map-style set has a length
    configs = list(request.configurations())
    predicted = [_predicted_s(request.calibration, config, samples) for config in configs]
    with terminable(), tempfile.TemporaryDirectory(prefix="offbeat-bench-") as folder:

        def turn(config: Config, predicted_s: float, number: int, doing: str) -> float:
            own = changed(config, {"seed": config.seed + number})
            return train_for(own, samples, Path(folder) / "run", _updates(predicted_s)).seconds_per_update

        turns = {
            f"{config.sync}, {config.learners} learners, {' '.join(config.slow) or 'no delays'}": partial(
                turn, config, one_s
            )
            for config, one_s in zip(configs, predicted, strict=True)
        }
        rounds = alternate(turns, request.rounds, progress)
    has = request.calibration.has
    rows = [
        prediction_row(config, found, seconds, probe=has(config.sync, config.learners, not config.slow))
        for config, found, seconds in zip(configs, rounds.values(), predicted, strict=True)
    ]
    return predictions_result(request.config.name, machine, request.rounds, rows)


def _predicted_s(calibration: Calibration, config: Config, samples: int) -> float:
    """Seconds an update, the mean over several draws of the delays."""
    each = [changed(config, {"seed": config.seed + number}) for number in range(DRAWN if config.slow else 1)]
    return statistics.fmean(predict(calibration, one, samples).seconds_per_update for one in each)


def _updates(seconds: float) -> int:
    """So many that a run takes some seconds: delays need many to be told from chance."""
    return min(400, max(100, math.ceil(2.0 / seconds)))
