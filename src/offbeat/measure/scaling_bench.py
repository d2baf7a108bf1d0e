"""`offbeat bench scaling`: how much faster so many learners are than one, measured beside what they learn.

T(n) is the seconds in which n learners' minibatches are applied: of a synchronous strategy, one iteration. T(1) is one
learner alone, without communication. In every round the base and each configuration take turns, so that a machine that
slows down slows all of them, and each is compared with the base of its own round.

Fast and wrong is not fast: who learns worse than the best, or computed otherwise than the base, is not ranked.

What it must not know: how a training is run (it is given the function), and how a table is printed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.errors import RequestError
from offbeat.measure.benchmark import (
    INTERVAL,
    BenchResult,
    Progress,
    check_distinct,
    check_least,
    json_rows,
    median_interval,
    relative_error,
    spread,
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
    minibatch,
    ranked_sentences,
    trained_label,
    training_terms,
)
from offbeat.number_format import percent
from offbeat.report.benchmark_fields import FIELDS, SCALING, SCALING_MORE, SCALING_NAMES, Row, format_samples_per_s
from offbeat.runs import metrics
from offbeat.spec import count_of
from offbeat.train.config import Config

WEAK, STRONG = "weak", "strong"
ALONE = "ring"  # with one learner it sends nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRequest:
    """What is asked for; wrong requests are refused at birth."""

    config: Config  # the recipe; strategy, learners and seed come from below
    lines: tuple[str, ...] = ("ring", "k-async:2")
    learners: tuple[int, ...] = (1, 2, 4)  # 1 stands for the base, which is always measured
    kind: str = WEAK
    rounds: int = 3
    seed: int = 0
    accuracy_within: float = 0.01
    price: float | None = None  # of a device hour

    def __post_init__(self) -> None:
        check_trainings(self.config, self.lines, self.learners, self.price)
        check_distinct("--learners", self.learners, "number")
        if max(self.learners) == 1:
            raise RequestError("bench: --learners: expected 1, the baseline, and a larger number, like 1 2")
        if self.kind not in (WEAK, STRONG):
            raise RequestError(f"bench: --kind is {WEAK} or {STRONG}; got '{self.kind}'")
        check_least("--rounds", self.rounds)
        if not 0 <= self.accuracy_within <= 1:
            raise RequestError(f"bench: --accuracy-within: expected a number from 0 to 1; got {self.accuracy_within:g}")
        self.configs(0)

    def configs(self, number: int) -> list[Config]:
        """Of one round: the base first, then by learners and strategies. A round has a seed of its own."""
        found = [configured(self.config, line=ALONE, learners=1, seed=self.seed + number)]
        for learners in self.learners:
            size = self._batch_size(learners)
            found += [
                configured(self.config, line=line, learners=learners, seed=self.seed + number, batch_size=size)
                for line in self.lines
                if learners > 1
            ]
        return found

    def _batch_size(self, learners: int) -> int:
        """Of one learner."""
        size = self.config.train.batch_size
        if self.kind == WEAK:
            return size
        if size % learners:
            raise RequestError(
                f"bench: strong scaling divides the global batch of {size} samples between the learners, "
                f"but {size} is not a multiple of {learners}; choose another --batch-size"
            )
        return size // learners


# --- what was found --------------------------------------------------------------------------------------------------


def scaling_row(
    *,
    line: str,
    learners: int,
    batch: int,  # samples in a minibatch of one learner
    kind: str,
    precision: str,
    device: str,
    runs: Sequence[TrainingNumbers],  # a round each
    alone_s: Sequence[float],  # T(1) of the same rounds
    predicted_s: float | None = None,
    price: float | None = None,
) -> Row:
    """One configuration, in all rounds; precision and device are not in the JSON. `judged` tells whether it is ranked.

    Speed-up, efficiency and overhead are medians over the rounds, each against its own T(1). There is no overhead in
    strong scaling, where learners of n and of 1 do not compute the same.
    """
    times_s = [iteration_s(learners, batch, run.samples_per_s) for run in runs]
    pairs = list(zip(alone_s, times_s, strict=True))
    strong = kind == STRONG
    speedups = [
        metrics.strong_speedup(one, many) if strong else metrics.speedup(learners, one, many) for one, many in pairs
    ]
    efficiencies = [
        metrics.strong_efficiency(learners, one, many) if strong else metrics.efficiency(one, many)
        for one, many in pairs
    ]
    seconds, speedup = median_interval(times_s), median_interval(speedups)
    accuracies = [run.accuracy for run in runs if run.accuracy is not None]
    return {
        "precision": precision,
        "device": device,
        "strategy": line,
        "learners": learners,
        "batch": batch,
        "seconds": seconds.median,
        "seconds_low": seconds.low,
        "seconds_high": seconds.high,
        "seconds_of_rounds": times_s,
        "throughput": statistics.median(run.samples_per_s for run in runs),
        "speedup": speedup.median,
        "speedup_low": speedup.low,
        "speedup_high": speedup.high,
        "efficiency": statistics.median(efficiencies),
        "overhead_s": None if strong else statistics.median(metrics.overhead_s(*pair) for pair in pairs),
        "accuracy": statistics.fmean(accuracies) if len(accuracies) == len(runs) else None,
        "test_samples": runs[0].test_samples,
        "predicted_s": predicted_s,
        "error": relative_error(predicted_s, seconds.median),
        **energy_and_cost(runs, learners, price),
    }


def row_label(row: Row) -> str:
    return "one learner alone" if row["learners"] == 1 else trained_label(row["strategy"], row["learners"])


def iteration_s(learners: int, batch: int, samples_per_s: float) -> float:
    """T(n): the seconds in which n minibatches are applied."""
    return learners * batch / samples_per_s


def judged(rows: Sequence[Row], within: float) -> list[Row]:
    """The rows, each with the reason why it is not ranked, if there is one. The first is the base."""
    base = rows[0]
    known = [row for row in rows if row["accuracy"] is not None and _differs(row, base) == ""]
    best = max(known, key=lambda row: float(row["accuracy"]), default=None)
    reasons = [_differs(row, base) or _worse(row, best, within) for row in rows]
    return [{**row, "ranked": not why, "why_not": why} for row, why in zip(rows, reasons, strict=True)]


def _differs(row: Row, base: Row) -> str:
    if row["precision"] != base["precision"]:
        return f"it was computed in {row['precision']}, but the base in {base['precision']}"
    if row["device"] != base["device"]:
        return f"it was computed on {row['device']}, but the base on {base['device']}"
    return ""


def _worse(row: Row, best: Row | None, within: float) -> str:
    if row["accuracy"] is None or best is None:
        return "its accuracy is unknown"
    score, highest = (metrics.Score(one["accuracy"], one["test_samples"], 0.0) for one in (row, best))
    if not highest.is_above(score, within=within):
        return ""
    points = f"{100 * (best['accuracy'] - row['accuracy']):.1f}".removesuffix(".0")
    told = metrics.format_accuracy(row["accuracy"], row["test_samples"])
    return f"its accuracy {told} is {points} points below the {percent(best['accuracy'])} of {row_label(best)}"


def are_alike(one: Row, other: Row) -> bool:
    """Whether these rounds cannot tell which of the two applies more samples a second."""
    work, other_work = (row["learners"] * row["batch"] for row in (one, other))
    pairs = zip(one["seconds_of_rounds"], other["seconds_of_rounds"], strict=True)
    ratios = median_interval([work / a / (other_work / b) for a, b in pairs])
    least = least_ratio(len(one["seconds_of_rounds"]))
    return 1 / least <= ratios.median <= least or ratios.low <= 1 <= ratios.high


def ranking(rows: Sequence[Row]) -> list[str]:
    """Who is fastest of those that learn as well, and who is not ranked and why: a sentence each."""
    order = sorted((row for row in rows if not row.get("why_not")), key=lambda row: -row["throughput"])
    not_ranked = [f"{row_label(row)}: not ranked: {row['why_not']}" for row in rows if row.get("why_not")]
    if not order:
        return ["nothing can be ranked", *not_ranked]
    one = len(order[0]["seconds_of_rounds"]) == 1
    why = (
        "one round is not enough to rank them; use --rounds 5 or more" if one else "no clear difference in these rounds"
    )
    first = "fastest with comparable accuracy"
    return [*ranked_sentences(order, are_alike, _speed, first, why), *not_ranked]


def _speed(row: Row) -> str:
    speedup = "" if row["learners"] == 1 else f", {row['speedup']:.2f}x"
    return f"{row_label(row)} ({format_samples_per_s(row['throughput'])} samples/s{speedup})"


def scaling_result(
    request: ScalingRequest, machine: Mapping[str, Any], rows: Sequence[Row], notes: Sequence[str]
) -> BenchResult:
    """The first row is the base."""
    config, train = request.config, request.config.train
    base = f"one learner alone on {machine['device']}, {count_of(machine['threads'], 'thread')}"
    defined = definitions(request)
    ranked = ranking(rows)
    total = f"{'global batch' if request.kind == STRONG else 'minibatch per learner'} of {rows[0]['batch']}"
    rounds = f"median of {count_of(request.rounds, 'round')}"
    tables = ((SCALING, rows), ((*SCALING_NAMES, *SCALING_MORE), rows))
    return BenchResult(
        json={
            "measured": "scaling",
            "kind": request.kind,
            "recipe": config.name,
            "base": base,
            "precision": train.precision,
            "rounds": request.rounds,
            "epochs": train.epochs,
            "slow": list(config.slow),
            "seed": request.seed,
            "machine": dict(machine),
            "rows": json_rows(FIELDS["scaling"], rows),
            "ranking": ranked,
            "notes": list(notes),
            "definitions": defined,
        },
        heading=f"{config.name}: {request.kind} scaling, {total}, {train.precision}, {rounds}",
        tables=tables,
        verdict=ranked[:1],
        details=[*ranked[1:], f"base: {base}"],
        terms=[*training_terms(tables, defined, machine), ("ranked", defined["ranked"])],
        spread=max(spread(row["seconds_of_rounds"]) for row in rows),
    )


def definitions(request: ScalingRequest) -> dict[str, str]:
    strong = "strong " if request.kind == STRONG else ""
    within = percent(request.accuracy_within)
    ranked = (
        f"ranked: the precision and device of the base, and an accuracy that is less than {within}, or not "
        "significantly, below"
    )
    return {
        "seconds": "T(n): seconds in which the gradients of n minibatches are applied, n * batch / throughput; for "
        f"a synchronous strategy, the time of one iteration; median over rounds, {INTERVAL}",
        "batch": "samples in a minibatch of one learner"
        + (f", {request.config.train.batch_size} / n: the global batch size stays the same" if strong else ""),
        "throughput": f"{definition('throughput')}, measured after the first epoch if there are several; without "
        "evaluation",
        "speedup": f"{definition(f'{strong}speedup')}; for each round with its own T(1), then the median",
        "efficiency": definition(f"{strong}efficiency"),
        "overhead_s": "not defined, because the batch size per learner changes with n"
        if strong
        else definition("overhead"),
        "accuracy": f"accuracy after {count_of(request.config.train.epochs, 'epoch')}, mean over rounds; "
        f"{definition('accuracy')}",
        "base": definition("base"),
        "ranked": f"{ranked} the best accuracy; other results are shown without a rank",
        "predicted_s": "T(n) simulated on the calibrated machine; error = predicted / measured - 1",
        "joules": f"energy of a run, median over rounds; {definition('energy')}",
        "cost": f"cost of a run: {definition('cost')}; one device per learner, hours of training",
    }


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(
    request: ScalingRequest,
    progress: Progress,
    *,
    train: Train | None = None,
    predictor: Predictor | None = None,
    machine: Mapping[str, Any] | None = None,
) -> BenchResult:
    """All rounds. `train` and `machine` are the real ones if they are left out. `predictor` gives samples/s."""
    plans = [request.configs(number) for number in range(request.rounds)]
    machine, trained, predicted, notes = compare_trainings(
        plans,
        progress,
        unit="round",
        number="efficiency",
        notes=_slow_notes(request),
        predict_plans=1,
        train=train,
        predictor=predictor,
        machine=machine,
    )
    alone_s = [iteration_s(1, minibatch(plans[0][0]), run.samples_per_s) for run in trained[0]]
    rows = [
        scaling_row(
            line=config.sync,
            learners=config.learners,
            batch=minibatch(config),
            kind=request.kind,
            precision=config.train.precision,
            device=machine["device"],
            runs=runs,
            alone_s=alone_s,
            predicted_s=next((iteration_s(config.learners, minibatch(config), rate) for rate in rates if rate), None),
            price=request.price,
        )
        for config, runs, rates in zip(plans[0], trained, predicted, strict=True)
    ]
    return scaling_result(request, machine, judged(rows, request.accuracy_within), notes)


def _slow_notes(request: ScalingRequest) -> list[str]:
    """Whose slowness is in T(1), and whose is not."""
    slow = request.config.slow
    if not slow:
        return []
    base = request.configs(0)[0].slow
    inside = f"T(1) includes {', '.join(base)}" if base else "T(1) includes none of them"
    return [f"artificial delays: {', '.join(slow)}; {inside}"]
