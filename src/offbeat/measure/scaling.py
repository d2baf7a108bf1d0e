"""`offbeat bench scaling`: how much faster so many learners are than one, measured beside what they learn.

T(n) is the seconds in which n learners' minibatches are applied: of a synchronous strategy, one iteration. T(1) is one
learner alone, without communication. In every round the base and each configuration take turns, so that a machine that
slows down slows all of them, and each is compared with the base of its own round.

Fast and wrong is not fast: who learns worse than the best, or computed otherwise than the base, is not ranked.

What it must not know: how a training is run (it is given the function), and how the result is printed.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

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
    minibatch,
    relative,
    shared_notes,
)
from offbeat.measure.rank_bench import Progress
from offbeat.number_format import percent
from offbeat.processes.signals import terminable
from offbeat.runs import metrics
from offbeat.spec import count_of
from offbeat.train.config import Config

WEAK, STRONG = "weak", "strong"
ALONE = "ring"  # with one learner it sends nothing
NOT_PREDICTED = "not predicted: no --calibration (offbeat calibrate makes one)"


class Predicted(Protocol):
    """What a prediction tells; `offbeat.predict.from_calibration.Predicted` does."""

    @property
    def samples_per_s(self) -> float: ...


Predictor = Callable[[Config], Predicted]


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
        check_lines(self.lines)
        check_processes(self.learners, self.config.servers)
        if len(set(self.learners)) < len(self.learners):
            raise RequestError(f"bench: --learners names a number twice: {' '.join(map(str, self.learners))}")
        if max(self.learners) == 1:
            raise RequestError("bench: --learners: 1 is the base; name a larger number too, like 1 2")
        if self.kind not in (WEAK, STRONG):
            raise RequestError(f"bench: --kind is {WEAK} or {STRONG}; got '{self.kind}'")
        if self.rounds < 1:
            raise RequestError(f"bench: --rounds is 1 or more; got {self.rounds}")
        if not 0 <= self.accuracy_within <= 1:
            raise RequestError(f"bench: --accuracy-within is a share from 0 to 1; got {self.accuracy_within:g}")
        check_price(self.price)
        check_slow(self.config.slow, max(self.learners))
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
                f"bench: strong scaling parts the minibatch of {size} between learners, and {size} is no multiple of "
                f"{learners}: choose another --batch-size"
            )
        return size // learners


# --- what was found --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRow:
    """One configuration, in all rounds."""

    line: str
    learners: int
    batch: int  # samples in a minibatch of one learner
    kind: str
    precision: str
    device: str
    runs: tuple[Kept, ...]  # a round each
    alone_s: tuple[float, ...]  # T(1) of the same rounds
    predicted_s: float | None = None
    price: float | None = None
    why_not: str = ""  # it is not ranked

    @property
    def is_base(self) -> bool:
        return self.learners == 1

    @property
    def label(self) -> str:
        return "one learner alone" if self.is_base else label(self.line, self.learners)

    @property
    def times_s(self) -> tuple[float, ...]:
        """T(n), of each round."""
        return tuple(iteration_s(self.learners, self.batch, run.samples_per_s) for run in self.runs)

    @property
    def seconds(self) -> Middle:
        return middle(self.times_s)

    @property
    def throughputs(self) -> tuple[float, ...]:
        return tuple(run.samples_per_s for run in self.runs)

    @property
    def throughput(self) -> float:
        return statistics.median(self.throughputs)

    @property
    def speedup(self) -> Middle:
        """The median of the rounds' own, each against its own T(1)."""
        pairs = zip(self.alone_s, self.times_s, strict=True)
        if self.kind == STRONG:
            return middle([metrics.strong_speedup(one, many) for one, many in pairs])
        return middle([metrics.speedup(self.learners, one, many) for one, many in pairs])

    @property
    def efficiency(self) -> float:
        pairs = zip(self.alone_s, self.times_s, strict=True)
        if self.kind == STRONG:
            return statistics.median(metrics.strong_efficiency(self.learners, one, many) for one, many in pairs)
        return statistics.median(metrics.efficiency(one, many) for one, many in pairs)

    @property
    def overhead_s(self) -> float | None:
        """None in strong scaling, where learners of n and of 1 do not compute the same."""
        if self.kind == STRONG:
            return None
        return statistics.median(map(metrics.overhead_s, self.alone_s, self.times_s))

    @property
    def accuracy(self) -> float | None:
        """The mean over the rounds."""
        found = [run.accuracy for run in self.runs if run.accuracy is not None]
        return statistics.fmean(found) if len(found) == len(self.runs) else None

    @property
    def test_samples(self) -> int | None:
        return self.runs[0].test_samples

    @property
    def error(self) -> float | None:
        return relative(self.predicted_s, self.seconds.median)

    @property
    def joules(self) -> float | None:
        return median_of(run.joules for run in self.runs)

    @property
    def cost(self) -> float | None:
        if self.price is None:
            return None
        return metrics.cost(self.learners, statistics.median(run.seconds for run in self.runs), self.price)

    def as_json(self) -> dict[str, Any]:
        return {
            "strategy": self.line,
            "learners": self.learners,
            "batch": self.batch,
            "seconds": self.seconds.median,
            "seconds_low": self.seconds.low,
            "seconds_high": self.seconds.high,
            "seconds_of_rounds": list(self.times_s),
            "throughput": self.throughput,
            "speedup": self.speedup.median,
            "speedup_low": self.speedup.low,
            "speedup_high": self.speedup.high,
            "efficiency": self.efficiency,
            "overhead_s": self.overhead_s,
            "accuracy": self.accuracy,
            "test_samples": self.test_samples,
            "predicted_s": self.predicted_s,
            "error": self.error,
            "joules": self.joules,
            "cost": self.cost,
            "ranked": not self.why_not,
            "why_not": self.why_not,
        }


def iteration_s(learners: int, batch: int, samples_per_s: float) -> float:
    """T(n): the seconds in which n minibatches are applied."""
    return learners * batch / samples_per_s


def judged(rows: Sequence[ScalingRow], within: float) -> tuple[ScalingRow, ...]:
    """The rows, each with the reason why it is not ranked, if there is one. The first is the base."""
    base = rows[0]
    known = [row for row in rows if row.accuracy is not None and _differs(row, base) == ""]
    best = max(known, key=lambda row: row.accuracy or 0.0, default=None)
    return tuple(replace(row, why_not=_differs(row, base) or _worse(row, best, within)) for row in rows)


def _differs(row: ScalingRow, base: ScalingRow) -> str:
    if row.precision != base.precision:
        return f"it was computed in {row.precision}, and the base in {base.precision}"
    if row.device != base.device:
        return f"it was computed on {row.device}, and the base on {base.device}"
    return ""


def _worse(row: ScalingRow, best: ScalingRow | None, within: float) -> str:
    if row.accuracy is None or best is None or best.accuracy is None:
        return "its accuracy is not known"
    score, highest = (metrics.Score(one.accuracy or 0.0, one.test_samples, 0.0) for one in (row, best))
    if not highest.is_above(score, within=within):
        return ""
    points = f"{100 * (best.accuracy - row.accuracy):.1f}".removesuffix(".0")
    told = metrics.format_accuracy(row.accuracy, row.test_samples)
    return f"its accuracy {told} is {points} points below the {percent(best.accuracy)} of {best.label}"


def are_alike(one: ScalingRow, other: ScalingRow) -> bool:
    """Whether these rounds cannot tell which of the two applies more samples a second."""
    ratios = middle([a / b for a, b in zip(one.throughputs, other.throughputs, strict=True)])
    least = apart(len(one.runs))
    return 1 / least <= ratios.median <= least or ratios.low <= 1 <= ratios.high


def ranking(rows: Sequence[ScalingRow]) -> list[str]:
    """Who is fastest of those that learn as well, and who is not ranked and why: a sentence each."""
    order = sorted((row for row in rows if not row.why_not), key=lambda row: -row.throughput)
    if not order:
        return ["nothing can be ranked", *_not_ranked(rows)]
    one = len(order[0].runs) == 1
    why = "one round cannot tell them apart (--rounds 5)" if one else "alike in these rounds"
    return [*ladder(order, are_alike, _speed, "fastest of those that learn as well", why), *_not_ranked(rows)]


def _speed(row: ScalingRow) -> str:
    speed = f"{row.throughput:,.0f} samples/s" if row.throughput >= 100 else f"{row.throughput:.3g} samples/s"
    return f"{row.label} ({speed})" if row.is_base else f"{row.label} ({speed}, {row.speedup.median:.2f}x)"


def _not_ranked(rows: Sequence[ScalingRow]) -> list[str]:
    return [f"{row.label}: not ranked: {row.why_not}" for row in rows if row.why_not]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingResult:
    """What `offbeat bench scaling` found; the first row is the base."""

    request: ScalingRequest
    machine: Mapping[str, Any]
    rows: tuple[ScalingRow, ...]
    notes: tuple[str, ...]

    @property
    def base(self) -> str:
        return f"one learner alone on {self.machine['device']}, {count_of(self.machine['threads'], 'thread')}"

    @property
    def spread(self) -> float:
        """Slowest round / fastest round, the largest of all rows."""
        return max(max(row.times_s) / min(row.times_s) for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        request = self.request
        return {
            "measured": "scaling",
            "kind": request.kind,
            "recipe": request.config.name,
            "base": self.base,
            "precision": request.config.train.precision,
            "rounds": request.rounds,
            "epochs": request.config.train.epochs,
            "slow": list(request.config.slow),
            "seed": request.seed,
            "machine": dict(self.machine),
            "rows": [row.as_json() for row in self.rows],
            "ranking": ranking(self.rows),
            "notes": list(self.notes),
            "definitions": definitions(request),
        }


def definitions(request: ScalingRequest) -> dict[str, str]:
    strong = "strong " if request.kind == STRONG else ""
    within = percent(request.accuracy_within)
    ranked = f"same precision and device as the base, accuracy at most {within}, or what may be chance, below"
    return {
        "seconds": "T(n): seconds in which n minibatches are applied, n * batch / throughput; of a synchronous "
        f"strategy one iteration; median over rounds, {INTERVAL}",
        "batch": "samples in a minibatch of one learner"
        + (f", {request.config.train.batch_size} / n: the total is the same" if strong else ""),
        "throughput": f"{definition('throughput')}, after the first epoch where there are several; evaluation left out",
        "speedup": f"{definition(f'{strong}speedup')}; of each round against its own T(1), then the median",
        "efficiency": definition(f"{strong}efficiency"),
        "overhead_s": "not defined where the batch per learner differs" if strong else definition("overhead"),
        "accuracy": f"at the end of {count_of(request.config.train.epochs, 'epoch')}, mean over rounds; "
        f"{definition('accuracy')}",
        "base": definition("base"),
        "ranked": f"{ranked} the best one's; others are shown only",
        "predicted_s": "T(n) simulated on the calibrated machine; error = predicted / measured - 1",
        "joules": f"of a run, median; {definition('energy')}",
        "cost": f"of a run: {definition('cost')}; devices are learners, hours those of training",
    }


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(
    request: ScalingRequest,
    progress: Progress,
    *,
    train: Train | None = None,
    predictor: Predictor | None = None,
    machine: Mapping[str, Any] | None = None,
) -> ScalingResult:
    """All rounds. `train` and `machine` are the real ones if they are left out."""
    facts = machine_for(request.config) if machine is None else machine
    if train is None:
        from offbeat.measure.trainings import train_once

        train = train_once
    plans = [request.configs(number) for number in range(request.rounds)]
    runs: list[list[Kept]] = [[] for _ in plans[0]]
    with terminable(), tempfile.TemporaryDirectory(prefix="offbeat-bench-") as folder:
        for number, configs in enumerate(plans, start=1):
            for at, config in enumerate(configs):
                progress(f"round {number} of {request.rounds}: {label(config.sync, config.learners)}")
                runs[at].append(keep(train(config, Path(folder) / "run")))
        notes: list[str] = []
        predicted = _foreseen(
            plans[0], predictor, progress, notes
        )  # last, since it may start threads: no fork after it
    base, *_ = plans[0]
    alone_s = tuple(iteration_s(1, minibatch(base), run.samples_per_s) for run in runs[0])
    rows = tuple(
        ScalingRow(
            line=config.sync,
            learners=config.learners,
            batch=minibatch(config),
            kind=request.kind,
            precision=config.train.precision,
            device=facts["device"],
            runs=tuple(kept),
            alone_s=alone_s,
            predicted_s=seconds,
            price=request.price,
        )
        for config, kept, seconds in zip(plans[0], runs, predicted, strict=True)
    )
    kept = [run for some in runs for run in some]
    return ScalingResult(
        request=request,
        machine=facts,
        rows=judged(rows, request.accuracy_within),
        notes=(*shared_notes(plans[0], facts, kept, "efficiency"), *_slow_notes(request), *notes),
    )


def _foreseen(
    configs: Sequence[Config], predictor: Predictor | None, progress: Progress, notes: list[str]
) -> list[float | None]:
    """T(n) of each as predicted; what cannot be is noted."""
    if predictor is None:
        notes.append(NOT_PREDICTED)
        return [None] * len(configs)
    found: list[float | None] = []
    for config in configs:
        progress(f"predicting {label(config.sync, config.learners)}")
        try:
            found.append(iteration_s(config.learners, minibatch(config), predictor(config).samples_per_s))
        except RequestError as error:
            found.append(None)
            notes.append(f"{label(config.sync, config.learners)}: not predicted: {error}")
    return found


def _slow_notes(request: ScalingRequest) -> list[str]:
    """Whose slowness is in T(1), and whose is not."""
    slow = request.config.slow
    if not slow:
        return []
    base = request.configs(0)[0].slow
    inside = f"{', '.join(base)} is in T(1) too" if base else "none of it is in T(1)"
    return [f"slowness on purpose: {', '.join(slow)}; {inside}"]
