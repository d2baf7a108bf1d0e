"""`offbeat bench accuracy`: how long each strategy takes to an accuracy, trained for real.

Every strategy is trained with every seed, in turn, through all its epochs: it is not stopped at the target, so that
where it ends is known too. The time to the target is that of the evaluation, at the end of an epoch, which has reached
it (`metrics.reached_at`). Ranked are those that got there with every seed, and who is within the spread of another is
not told from it.

What it must not know: how a training is run (it is given the function), and how the result is printed.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.charts import Line, line_chart
from offbeat.errors import RequestError
from offbeat.measure.comparisons import (
    INTERVAL,
    Kept,
    Middle,
    Train,
    apart,
    check_lines,
    check_price,
    check_processes,
    check_slow,
    configured,
    definition,
    keep,
    label,
    ladder,
    machine_for,
    median_of,
    middle,
    relative,
    shared_notes,
)
from offbeat.measure.rank_bench import Progress
from offbeat.measure.scaling import NOT_PREDICTED
from offbeat.number_format import format_seconds, percent
from offbeat.processes.signals import terminable
from offbeat.runs import metrics
from offbeat.spec import count_of
from offbeat.train.config import Config

Foresee = Callable[[Config], float | None]  # seconds to the target; None: it is not reached


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyRequest:
    """What is asked for; wrong requests are refused at birth."""

    config: Config  # the recipe; strategy, learners and seed come from below
    target: float
    lines: tuple[str, ...] = ("ring", "async")
    learners: int = 2
    seeds: int = 3
    seed: int = 0  # the first
    price: float | None = None  # of a device hour

    def __post_init__(self) -> None:
        check_lines(self.lines)
        check_processes([self.learners], self.config.servers)
        if not 0 < self.target <= 1:
            raise RequestError(f"bench: --target is an accuracy above 0 and up to 1, like 0.97; got {self.target:g}")
        if self.seeds < 1:
            raise RequestError(f"bench: --seeds is 1 or more; got {self.seeds}")
        check_price(self.price)
        check_slow(self.config.slow, self.learners)
        self.configs(self.seed)

    def configs(self, seed: int) -> list[Config]:
        """Of one seed."""
        return [configured(self.config, line=line, learners=self.learners, seed=seed) for line in self.lines]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyRow:
    """One strategy, with all seeds."""

    line: str
    learners: int
    target: float
    runs: tuple[Kept, ...]  # a seed each
    predicted_s: float | None = None
    price: float | None = None

    @property
    def label(self) -> str:
        return label(self.line, self.learners)

    @property
    def reached_s(self) -> tuple[float | None, ...]:
        """Of each seed."""
        return tuple(
            metrics.time_to_accuracy(((seconds, accuracy) for seconds, _, accuracy in run.points), self.target)
            for run in self.runs
        )

    @property
    def times_s(self) -> tuple[float, ...]:
        """Of the seeds that got there."""
        return tuple(seconds for seconds in self.reached_s if seconds is not None)

    @property
    def reached(self) -> int:
        return len(self.times_s)

    @property
    def always(self) -> bool:
        return self.reached == len(self.runs)

    @property
    def seconds_to_target(self) -> Middle | None:
        return middle(self.times_s) if self.times_s else None

    @property
    def updates_to_target(self) -> float | None:
        return median_of(
            None if at is None else run.points[at][1]
            for run in self.runs
            for at in [metrics.reached_at([accuracy for _, _, accuracy in run.points], self.target)]
        )

    @property
    def accuracies(self) -> tuple[float, ...]:
        return tuple(run.accuracy for run in self.runs if run.accuracy is not None)

    @property
    def accuracy_mean(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def test_samples(self) -> int | None:
        return self.runs[0].test_samples

    @property
    def accuracy_std(self) -> float | None:
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None

    @property
    def seconds(self) -> float:
        return statistics.median(run.seconds for run in self.runs)

    @property
    def joules(self) -> float | None:
        return median_of(run.joules for run in self.runs)

    @property
    def joules_to_target(self) -> float | None:
        return median_of(
            None if seconds is None or run.joules is None else run.joules * seconds / run.seconds
            for run, seconds in zip(self.runs, self.reached_s, strict=True)
        )

    @property
    def cost(self) -> float | None:
        return None if self.price is None else metrics.cost(self.learners, self.seconds, self.price)

    @property
    def cost_to_target(self) -> float | None:
        found = self.seconds_to_target
        return None if self.price is None or found is None else metrics.cost(self.learners, found.median, self.price)

    @property
    def error(self) -> float | None:
        found = self.seconds_to_target
        return relative(self.predicted_s, None if found is None else found.median)

    def as_json(self) -> dict[str, Any]:
        found = self.seconds_to_target
        return {
            "strategy": self.line,
            "learners": self.learners,
            "seeds": len(self.runs),
            "reached": self.reached,
            "seconds_to_target": None if found is None else found.median,
            "seconds_to_target_low": None if found is None else found.low,
            "seconds_to_target_high": None if found is None else found.high,
            "updates_to_target": self.updates_to_target,
            "accuracy_mean": self.accuracy_mean,
            "test_samples": self.test_samples,
            "accuracy_std": self.accuracy_std,
            "seconds": self.seconds,
            "joules": self.joules,
            "joules_to_target": self.joules_to_target,
            "cost": self.cost,
            "cost_to_target": self.cost_to_target,
            "predicted_s": self.predicted_s,
            "error": self.error,
        }


def are_alike(fast: AccuracyRow, slow: AccuracyRow) -> bool:
    """Whether these seeds cannot tell which of two that always got there is faster."""
    one, other = middle(fast.times_s), middle(slow.times_s)
    return other.median <= apart(len(fast.runs)) * one.median or other.low <= one.high


def ranking(rows: Sequence[AccuracyRow], target: float) -> list[str]:
    """Who is first at the target, who then, and who is not ranked: a sentence each."""
    order = sorted((row for row in rows if row.always), key=lambda row: middle(row.times_s).median)
    lines = []
    if order:
        one = len(order[0].runs) == 1
        why = "one seed cannot tell them apart (--seeds 3)" if one else "alike within the spread"
        lines += ladder(order, are_alike, _time, f"first at {percent(target)}", why)
    elif not any(row.reached for row in rows):
        lines.append(f"nobody reached {percent(target)}: more --epochs, another --rate or a lower --target may tell")
    else:
        lines.append(f"nobody reached {percent(target)} with every seed: none is ranked")
    for row in rows:
        if not row.always:
            lines.append(
                f"{row.line}: not ranked: {row.reached} of {count_of(len(row.runs), 'seed')} reached "
                f"{percent(target)}; it ended at {metrics.format_accuracy(row.accuracy_mean, row.test_samples)}"
            )
    return lines


def _time(row: AccuracyRow) -> str:
    found = middle(row.times_s)
    between = "" if len(row.runs) == 1 else f", {format_seconds(found.low)} to {format_seconds(found.high)}"
    return f"{row.line} ({format_seconds(found.median)}{between})"


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyResult:
    """What `offbeat bench accuracy` found."""

    request: AccuracyRequest
    machine: Mapping[str, Any]
    rows: tuple[AccuracyRow, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        request = self.request
        return {
            "measured": "accuracy",
            "recipe": request.config.name,
            "target": request.target,
            "machine": dict(self.machine),
            "precision": request.config.train.precision,
            "epochs": request.config.train.epochs,
            "slow": list(request.config.slow),
            "rows": [row.as_json() for row in self.rows],
            "ranking": ranking(self.rows, request.target),
            "curves": [
                {
                    "strategy": row.line,
                    "learners": row.learners,
                    "seed": request.seed + number,
                    "points": [list(point) for point in run.points],
                }
                for row in self.rows
                for number, run in enumerate(row.runs)
            ],
            "notes": list(self.notes),
            "definitions": definitions(request),
        }

    def chart(self) -> str:
        """Test error against seconds of training, as an SVG: a curve for each seed, and the median."""
        request = self.request
        lines = [
            Line(
                row.line,
                tuple(tuple((seconds, 1 - accuracy) for seconds, _, accuracy in run.points) for run in row.runs),
                _mark(row),
            )
            for row in self.rows
        ]
        seeds = count_of(request.seeds, "seed")
        return line_chart(
            lines,
            title=f"{request.config.name}, {count_of(request.learners, 'learner')}",
            subtitle=f"{seeds}, measured; dots: target reached" + (", median bold" if request.seeds > 1 else ""),
            x_label="seconds of training",
            y_label="test error",
            target=1 - request.target,
            target_label=f"target: {percent(request.target)} right",
        )


def _mark(row: AccuracyRow) -> tuple[float, float] | None:
    """Where the median run was when it reached the target."""
    times = sorted(math.inf if seconds is None else seconds for seconds in row.reached_s)
    found = statistics.median_high(times)
    return None if found == math.inf else (found, 1 - row.target)


def definitions(request: AccuracyRequest) -> dict[str, str]:
    return {
        "seconds_to_target": f"{definition('time to accuracy')}; looked at the end of each epoch; median over the "
        f"seeds that reached it, {INTERVAL}",
        "updates_to_target": "updates made until then, median over the seeds that reached it",
        "reached": "seeds with which the target was reached; ranked are those with all of them",
        "accuracy_mean": f"at the end of {count_of(request.config.train.epochs, 'epoch')}, mean over seeds; "
        f"accuracy_std: their standard deviation (n - 1); {definition('accuracy')}",
        "seconds": "of training of a whole run, evaluation left out; median over seeds",
        "joules": f"of a run, median; {definition('energy')}",
        "joules_to_target": "joules of the run * seconds to the target / seconds of the run: power is taken as even",
        "cost": f"of a run: {definition('cost')}; devices are learners, hours those of training; to the target: of the "
        "seconds to it",
        "predicted_s": "seconds to the target, trained in virtual time on the calibrated machine, median over the "
        "seeds that reach it; error = predicted / measured - 1",
        "curves": "points [seconds, updates, accuracy] of every evaluation; the error is 1 - accuracy",
    }


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(
    request: AccuracyRequest,
    progress: Progress,
    *,
    train: Train | None = None,
    predictor: Foresee | None = None,
    machine: Mapping[str, Any] | None = None,
) -> AccuracyResult:
    """All strategies with all seeds. `train` and `machine` are the real ones if they are left out."""
    facts = machine_for(request.config) if machine is None else machine
    if train is None:
        from offbeat.measure.trainings import train_once

        train = train_once
    plans = [request.configs(request.seed + number) for number in range(request.seeds)]
    runs: list[list[Kept]] = [[] for _ in request.lines]
    with terminable(), tempfile.TemporaryDirectory(prefix="offbeat-bench-") as folder:
        for number, configs in enumerate(plans, start=1):
            for at, config in enumerate(configs):
                progress(f"seed {number} of {request.seeds}: {label(config.sync, config.learners)}")
                run = keep(train(config, Path(folder) / "run"))
                if run.accuracy is None:
                    raise RequestError(f"bench: the recipe '{config.name}' has no accuracy: there is none to reach")
                runs[at].append(run)
        notes: list[str] = []
        predicted = _foreseen(plans, predictor, progress, notes)  # last, since it computes here: no fork after it
    rows = tuple(
        AccuracyRow(
            line=line,
            learners=request.learners,
            target=request.target,
            runs=tuple(kept),
            predicted_s=seconds,
            price=request.price,
        )
        for line, kept, seconds in zip(request.lines, runs, predicted, strict=True)
    )
    kept = [run for some in runs for run in some]
    if request.config.slow:
        notes.insert(0, f"slowness on purpose: {', '.join(request.config.slow)}")
    return AccuracyResult(
        request=request, machine=facts, rows=rows, notes=(*shared_notes(plans[0], facts, kept, "time"), *notes)
    )


def _foreseen(
    plans: Sequence[Sequence[Config]], predictor: Foresee | None, progress: Progress, notes: list[str]
) -> list[float | None]:
    """Seconds to the target of each strategy as predicted: the median over the seeds. What cannot be is noted."""
    if predictor is None:
        notes.append(NOT_PREDICTED)
        return [None for _ in plans[0]]
    found: list[float | None] = []
    for configs in zip(*plans, strict=True):
        line = configs[0].sync
        times: list[float | None] = []
        try:
            for number, config in enumerate(configs, start=1):
                progress(f"predicting {line}, seed {number} of {len(configs)}")
                times.append(predictor(config))
        except RequestError as error:
            notes.append(f"{line}: not predicted: {error}")
            times = []
        missed = times.count(None)
        if missed:
            notes.append(
                f"{line}: by the prediction {missed} of {count_of(len(times), 'seed')} do not reach the target"
            )
        found.append(median_of(times))
    return found
