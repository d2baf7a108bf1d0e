"""`offbeat bench accuracy`: how long each strategy takes to an accuracy, trained for real.

Every strategy is trained with every seed, in turn, through all its epochs: it is not stopped at the target, so that
where it ends is known too. The time to the target is that of the evaluation, at the end of an epoch, which has reached
it (`metrics.reached_at`). Ranked are those that got there with every seed, and who is within the spread of another is
not told from it.

What it must not know: how a training is run (it is given the function), and how a table is printed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.charts import Line, line_chart
from offbeat.errors import RequestError
from offbeat.measure.benchmark import (
    INTERVAL,
    BenchResult,
    Progress,
    check_least,
    json_rows,
    median_interval,
    median_known,
    relative_error,
)
from offbeat.measure.training_bench import (
    Predictor,
    Train,
    TrainingNumbers,
    check_trainings,
    compare_trainings,
    configured,
    definition,
    energy_and_cost,
    least_ratio,
    ranked_sentences,
    training_terms,
)
from offbeat.number_format import format_seconds, percent
from offbeat.report.benchmark_fields import ACCURACY, ACCURACY_MORE, FIELDS, STRATEGY, Row
from offbeat.runs import metrics
from offbeat.spec import count_of
from offbeat.train.config import Config


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
        check_trainings(self.config, self.lines, (self.learners,), self.price)
        if not 0 < self.target <= 1:
            raise RequestError(
                f"bench: --target: expected an accuracy above 0 and at most 1, like 0.97; got {self.target:g}"
            )
        check_least("--seeds", self.seeds)
        self.configs(self.seed)

    def configs(self, seed: int) -> list[Config]:
        """Of one seed."""
        return [configured(self.config, line=line, learners=self.learners, seed=seed) for line in self.lines]


# --- what was found --------------------------------------------------------------------------------------------------


def accuracy_row(
    *,
    line: str,
    learners: int,
    target: float,
    runs: Sequence[TrainingNumbers],  # a seed each
    predicted_s: float | None = None,
    price: float | None = None,
) -> Row:
    """One strategy, with all seeds; `runs` and the seconds in which each reached the target are not in the JSON."""
    reached = [metrics.reached_at([accuracy for _, _, accuracy in run.points], target) for run in runs]
    reached_s = [None if at is None else run.points[at][0] for run, at in zip(runs, reached, strict=True)]
    times_s = [seconds for seconds in reached_s if seconds is not None]
    found = median_interval(times_s) if times_s else None
    to_target = None if found is None else found.median
    ends = [run.accuracy for run in runs if run.accuracy is not None]
    return {
        "runs": tuple(runs),
        "reached_s": tuple(reached_s),
        "strategy": line,
        "learners": learners,
        "target": target,
        "seeds": len(runs),
        "reached": len(times_s),
        "seconds_to_target": to_target,
        "seconds_to_target_low": None if found is None else found.low,
        "seconds_to_target_high": None if found is None else found.high,
        "updates_to_target": median_known(
            None if at is None else run.points[at][1] for run, at in zip(runs, reached, strict=True)
        ),
        "accuracy_mean": statistics.fmean(ends),
        "test_samples": runs[0].test_samples,
        "accuracy_std": statistics.stdev(ends) if len(ends) > 1 else None,
        "seconds": statistics.median(run.seconds for run in runs),
        "joules_to_target": median_known(
            None if seconds is None or run.joules is None else run.joules * seconds / run.seconds
            for run, seconds in zip(runs, reached_s, strict=True)
        ),
        **energy_and_cost(runs, learners, price),
        "cost_to_target": None if price is None or found is None else metrics.cost(learners, found.median, price),
        "predicted_s": predicted_s,
        "error": relative_error(predicted_s, to_target),
    }


def are_alike(fast: Row, slow: Row) -> bool:
    """Whether these seeds cannot tell which of two that always got there is faster."""
    close = slow["seconds_to_target"] <= least_ratio(fast["seeds"]) * fast["seconds_to_target"]
    return bool(close or slow["seconds_to_target_low"] <= fast["seconds_to_target_high"])


def ranking(rows: Sequence[Row], target: float) -> list[str]:
    """Who is first at the target, who then, and who is not ranked: a sentence each."""
    order = sorted((row for row in rows if _always(row)), key=lambda row: float(row["seconds_to_target"]))
    lines = []
    if order:
        one = order[0]["seeds"] == 1
        why = (
            "one seed is not enough to rank them; use --seeds 3 or more"
            if one
            else "no clear difference with these seeds"
        )
        lines += ranked_sentences(order, are_alike, _time, f"first at {percent(target)}", why)
    elif not any(row["reached"] for row in rows):
        told = f"no strategy reached {percent(target)}"
        lines.append(f"{told}; try more --epochs, another --lr or a lower --target")
    else:
        lines.append(f"no strategy reached {percent(target)} with every seed, so none is ranked")
    for row in rows:
        if not _always(row):
            lines.append(
                f"{row['strategy']}: not ranked: {row['reached']} of {count_of(row['seeds'], 'seed')} reached "
                f"{percent(target)}; it ended at "
                f"{metrics.format_accuracy(row['accuracy_mean'], row['test_samples'])}"
            )
    return lines


def _always(row: Row) -> bool:
    return bool(row["reached"] == row["seeds"])


def _time(row: Row) -> str:
    low, high = (format_seconds(row[f"seconds_to_target_{end}"]) for end in ("low", "high"))
    between = "" if row["seeds"] == 1 else f", {low} to {high}"
    return f"{row['strategy']} ({format_seconds(row['seconds_to_target'])}{between})"


def accuracy_result(
    request: AccuracyRequest, machine: Mapping[str, Any], rows: Sequence[Row], notes: Sequence[str]
) -> BenchResult:
    defined = definitions(request)
    ranked = ranking(rows, request.target)
    config = request.config
    json = {
        "measured": "accuracy",
        "recipe": config.name,
        "target": request.target,
        "machine": dict(machine),
        "precision": config.train.precision,
        "epochs": config.train.epochs,
        "slow": list(config.slow),
        "rows": json_rows([field for field in FIELDS["accuracy"] if field.accepts != "computed"], rows),
        "ranking": ranked,
        "curves": [
            {
                "strategy": row["strategy"],
                "learners": row["learners"],
                "seed": request.seed + number,
                "points": [list(point) for point in run.points],
            }
            for row in rows
            for number, run in enumerate(row["runs"])
        ],
        "notes": list(notes),
        "definitions": defined,
    }
    tables = ((ACCURACY, rows), ((STRATEGY, *ACCURACY_MORE), rows))
    return BenchResult(
        json=json,
        heading=f"{config.name} to {percent(request.target)}: {count_of(request.learners, 'learner')}, "
        f"{count_of(request.seeds, 'seed')} from {request.seed}, {count_of(config.train.epochs, 'epoch')}, "
        f"{config.train.precision}",
        tables=tables,
        verdict=ranked[:1],
        details=ranked[1:],
        terms=training_terms(tables, defined, machine),
        chart=error_chart(request, rows),
    )


def error_chart(request: AccuracyRequest, rows: Sequence[Row]) -> str:
    """Test error against seconds of training, as an SVG: a curve for each seed, and the median."""
    lines = [
        Line(
            row["strategy"],
            tuple(tuple((seconds, 1 - accuracy) for seconds, _, accuracy in run.points) for run in row["runs"]),
            _mark(row),
        )
        for row in rows
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


def _mark(row: Row) -> tuple[float, float] | None:
    """Where the median run was when it reached the target."""
    times = sorted(math.inf if seconds is None else seconds for seconds in row["reached_s"])
    found = statistics.median_high(times)
    return None if found == math.inf else (found, 1 - row["target"])


def definitions(request: AccuracyRequest) -> dict[str, str]:
    return {
        "seconds_to_target": f"{definition('time to accuracy')}; evaluated at the end of each epoch; median over the "
        f"seeds that reached it, {INTERVAL}",
        "updates_to_target": "updates until the target was reached, median over the seeds that reached it",
        "reached": "number of seeds that reached the target; only strategies that reached it with every seed are "
        "ranked",
        "accuracy_mean": f"accuracy after {count_of(request.config.train.epochs, 'epoch')}, mean over seeds; "
        f"accuracy_std: their standard deviation (n - 1); {definition('accuracy')}",
        "seconds": "training seconds of a whole run, without evaluation; median over seeds",
        "joules": f"energy of a run, median over seeds; {definition('energy')}",
        "joules_to_target": "joules of the run * seconds to the target / seconds of the run, assuming constant power",
        "cost": f"cost of a run: {definition('cost')}; one device per learner, hours of training; cost to the "
        "target: hours until the target was reached",
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
    predictor: Predictor | None = None,
    machine: Mapping[str, Any] | None = None,
) -> BenchResult:
    """All strategies with all seeds. `train` and `machine` are the real ones if they are left out.

    The predictor gives the seconds to the target, or None where it is not reached.
    """
    slow = request.config.slow
    machine, trained, predicted, notes = compare_trainings(
        [request.configs(request.seed + number) for number in range(request.seeds)],
        progress,
        unit="seed",
        number="time",
        notes=[f"artificial delays: {', '.join(slow)}"] if slow else [],
        needs_accuracy=True,
        train=train,
        predictor=predictor,
        machine=machine,
    )
    for line, times in zip(request.lines, predicted, strict=True):
        if None in times:
            many = f"{times.count(None)} of {count_of(len(times), 'seed')}"
            notes.append(f"{line}: according to the prediction, {many} do not reach the target")
    rows = [
        accuracy_row(
            line=line,
            learners=request.learners,
            target=request.target,
            runs=runs,
            predicted_s=median_known(times),
            price=request.price,
        )
        for line, runs, times in zip(request.lines, trained, predicted, strict=True)
    ]
    return accuracy_result(request, machine, rows, notes)
