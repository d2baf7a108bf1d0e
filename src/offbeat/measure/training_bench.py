"""What `bench scaling` and `bench accuracy` share: which trainings are compared, and what is kept and said of each.

Laws. Every configuration is made, and refused, before anything runs; within a comparison they differ in strategy,
learners and seed alone. Of a training its numbers are kept and its log is not, since many are run. What could not be
measured is not 0 but unknown, with the reason in words.

What it must not know: how a training is run, and how anything is printed. Torch is loaded only to ask for devices.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from offbeat import spec as grammar
from offbeat.errors import RequestError
from offbeat.machine import machine_facts
from offbeat.measure.bench_result import defined
from offbeat.measure.requests import check_distinct
from offbeat.measure.rounds import Progress, Turn, alternate, median_known
from offbeat.processes.signals import terminable
from offbeat.processes.slowness import parse as parse_slowness
from offbeat.report.benchmark_fields import Field, Row
from offbeat.runs import metrics
from offbeat.spec import count_of
from offbeat.strategy import SERVER, family_of
from offbeat.train.config import Config
from offbeat.train.config_files import changed
from offbeat.train.recipes import RECIPES

if TYPE_CHECKING:
    from offbeat.measure.trainings import Trained

ALIKE = 1.05  # medians this close are not told apart, whatever their rounds say
ENOUGH = 5  # rounds or seeds, from which on it is told apart what differs by more than that
CLEAR = 1.25  # and with fewer
NOT_PREDICTED = "not predicted: no --calibration (offbeat calibrate makes one)"


Train = Callable[[Config, Path], "Trained"]
Predictor = Callable[[Config], float | None]  # None: the target is not reached


# --- configurations --------------------------------------------------------------------------------------------------


def check_lines(lines: Sequence[str]) -> None:
    """Strategies that are known, and each once; whether they fit the learners is for `configured` to find."""
    for line in lines:
        if line in RECIPES:
            raise RequestError(f"bench: '{line}' is a recipe: write it before the options")
        try:
            family_of(line)
        except RequestError as error:
            raise RequestError(f"bench: --sync: {error}") from None
    if not lines:
        raise RequestError("bench: --sync names no strategy")
    check_distinct("--sync", [str(grammar.parse(line)) for line in lines], "strategy")


def check_price(price: float | None) -> None:
    if price is not None and not 0 <= price < math.inf:
        raise RequestError(f"bench: --price is of a device hour, 0 or more; got {price:g}")


def check_slow(rules: Sequence[str], learners: int) -> None:
    """Rules that say something, for the largest number of learners."""
    try:
        parse_slowness(rules, learners)
    except RequestError as error:
        raise RequestError(f"bench: --slow: {error}") from None


def configured(config: Config, *, line: str, learners: int, seed: int = 0, batch_size: int | None = None) -> Config:
    """The recipe with this strategy: all epochs, no checkpoint before the end, and slowness of those who are there."""
    train: dict[str, Any] = {"stop_at": 0.0, "batch_size": batch_size or config.train.batch_size}
    if learners == 1:
        train["split"] = "equal"  # shares are for several
    changes = {
        "sync": line,
        "learners": learners,
        "seed": seed,
        "slow": tuple(rule for rule in config.slow if _is_here(rule, learners)),
        "train": train,
        "save": {"every_epochs": 0, "every_updates": 0, "keep": 1, "tensorboard": False},
    }
    try:
        return changed(config, changes)
    except RequestError as error:
        raise RequestError(f"bench: {str(error).removeprefix('sync: ')}") from None


def _is_here(rule: str, learners: int) -> bool:
    """Whether a rule of slowness speaks of all learners, or of one that is there."""
    if not rule.startswith("learner="):
        return True
    return int(rule.removeprefix("learner=").partition(",")[0]) < learners


def minibatch(config: Config) -> int:
    """Samples in a minibatch of one learner."""
    return config.train.batch_size * config.train.accumulate


def trained_label(line: str, learners: int) -> str:
    return f"{line} with {count_of(learners, 'learner')}"


# --- what is kept of a training --------------------------------------------------------------------------------------


class TrainingNumbers(NamedTuple):
    """One training."""

    samples_per_s: float  # applied ones
    seconds: float  # of training
    accuracy: float | None  # at the end
    test_samples: int | None  # of which it is a share
    points: tuple[tuple[float, int, float], ...]  # (seconds, updates, accuracy) of each evaluation
    joules: float | None
    not_measured: tuple[str, ...]  # why energy, or a part of it, is not known


def numbers_of(run: Trained) -> TrainingNumbers:
    energy = run.energy or {}
    joules = energy.get("joules")
    reasons = tuple(map(str, energy.get("not_measured", ())))
    if joules is None and not reasons:
        reasons = ("the run left no energy.json",) if run.energy is None else ("no reason was given",)
    return TrainingNumbers(
        samples_per_s=run.samples_per_s,
        seconds=run.seconds,
        accuracy=run.accuracy,
        test_samples=next((one.get("test_samples") for one in reversed(run.metrics)), None),
        points=tuple(
            (float(one["seconds"]), int(one["update"]), float(one["accuracy"]))
            for one in run.metrics
            if one["accuracy"] is not None
        ),
        joules=None if joules is None else float(joules),
        not_measured=reasons,
    )


class Compared(NamedTuple):
    """What several configurations were found to do: for each, in their order."""

    machine: Mapping[str, Any]
    trained: list[list[TrainingNumbers]]
    predicted: list[list[float | None]]  # empty: not predicted
    notes: list[str]


def compare_trainings(
    plans: Sequence[Sequence[Config]],
    progress: Progress,
    *,
    unit: str,
    number: str,
    notes: Sequence[str] = (),
    needs_accuracy: bool = False,
    predict_plans: int | None = None,
    train: Train | None,
    predictor: Predictor | None,
    machine: Mapping[str, Any] | None,
) -> Compared:
    """Train every configuration of every plan, in turn, and predict those of the first `predict_plans`.

    A plan is a round or a seed (`unit`). `number` is what the sharing of cores spoils, in one word. `train` and
    `machine` are the real ones where they are None.
    """
    facts = machine_for(plans[0][0]) if machine is None else machine
    with terminable(), tempfile.TemporaryDirectory(prefix="offbeat-bench-") as folder:
        trained = _train_all(plans, progress, train, Path(folder) / "run", unit, needs_accuracy)
        told = [*shared_notes(plans[0], facts, [run for runs in trained for run in runs], number), *notes]
        # Last, since it computes here and may start threads: no fork after it.
        predicted = _predict_all(list(zip(*plans[:predict_plans], strict=True)), predictor, progress, told)
    return Compared(facts, trained, predicted, told)


def _train_all(
    plans: Sequence[Sequence[Config]],
    progress: Progress,
    train: Train | None,
    folder: Path,
    unit: str,
    needs_accuracy: bool,
) -> list[list[TrainingNumbers]]:
    if train is None:
        from offbeat.measure.trainings import train_once

        train = train_once

    def turn_of(place: int) -> Turn[TrainingNumbers]:
        def turn(number: int, doing: str) -> TrainingNumbers:
            config = plans[number][place]
            found = numbers_of(train(config, folder))
            if needs_accuracy and found.accuracy is None:
                raise RequestError(f"bench: the recipe '{config.name}' has no accuracy: there is none to reach")
            return found

        return turn

    turns = {trained_label(one.sync, one.learners): turn_of(place) for place, one in enumerate(plans[0])}
    return list(alternate(turns, len(plans), progress, unit=unit).values())


def _predict_all(
    configs: Sequence[Sequence[Config]], predictor: Predictor | None, progress: Progress, notes: list[str]
) -> list[list[float | None]]:
    """By strategy and seed. What cannot be predicted is empty, and noted."""
    if predictor is None:
        notes.append(NOT_PREDICTED)
        return [[] for _ in configs]
    found: list[list[float | None]] = []
    for seeds in configs:
        label = trained_label(seeds[0].sync, seeds[0].learners)
        progress(f"predicting {label}")
        try:
            found.append([predictor(config) for config in seeds])
        except RequestError as error:
            found.append([])
            notes.append(f"{label}: not predicted: {error}")
    return found


def energy_and_cost(runs: Sequence[TrainingNumbers], learners: int, price: float | None) -> dict[str, float | None]:
    """Of a whole run."""
    seconds = statistics.median(run.seconds for run in runs)
    return {
        "joules": median_known(run.joules for run in runs),
        "cost": None if price is None else metrics.cost(learners, seconds, price),
    }


# --- words -----------------------------------------------------------------------------------------------------------


def machine_for(config: Config) -> dict[str, Any]:
    """Facts that explain a number, before anything is started; a device that is not here is refused."""
    facts = machine_facts()
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # so that counting the GPUs does not spoil a fork
    import torch

    from offbeat.train.launch import check_device

    device = check_device(config.device)
    facts |= {"torch": torch.__version__, "device": device.type, "threads": config.train.threads}
    if device.type == "cuda":
        facts["gpus"] = torch.cuda.device_count()
    return facts


def shared_notes(
    configs: Sequence[Config], machine: Mapping[str, Any], trainings: Sequence[TrainingNumbers], number: str
) -> list[str]:
    """What a reader of the numbers must know: who shared cores, who else was at work, what is not known.

    `number` is what the sharing of cores spoils, in one word.
    """
    cores, load = machine["cores"], machine["load"]
    notes = []
    if load is not None and load > cores / 2:
        notes.append(
            f"the load was {load:.2f} before the start, more than half of {count_of(cores, 'core')}: "
            "others were at work, measure again when they are not"
        )
    notes += _sharing_notes(configs, machine, number)
    if configs[0].train.epochs == 1:
        notes.append("one epoch: the start of torch is in the times; 2 or more (--epochs 2) leave it out of the rates")
    reasons = list(dict.fromkeys(reason for one in trainings for reason in one.not_measured))
    if all(one.joules is None for one in trainings):
        notes.append(f"energy: not measured: {'; '.join(reasons)}")
    elif reasons:
        notes.append(f"energy: without a part that is not measured: {'; '.join(reasons)}")
    return notes


def _sharing_notes(configs: Sequence[Config], machine: Mapping[str, Any], number: str) -> list[str]:
    """Where there are more learners than something to run on."""
    notes = []
    cores, gpus = machine["cores"], machine.get("gpus")
    there = cores if gpus is None else gpus
    threads = configs[0].train.threads if gpus is None else 1
    many = sorted({config.learners for config in configs if config.learners * threads > there})
    if many:
        learners = " and ".join(map(str, many)) + (" learners" if many != [1] else " learner")
        each = "" if threads == 1 else f" of {threads} threads"
        what = count_of(there, "core" if gpus is None else "GPU")
        shared = "cores" if gpus is None else "GPUs"
        notes.append(f"{learners}{each} on {what}: {number} there measures the sharing of {shared}")
    served = [
        config
        for config in configs
        if family_of(config.sync) == SERVER and config.learners not in many and config.learners + config.servers > cores
    ]
    for config in served:
        notes.append(
            f"{trained_label(config.sync, config.learners)}: with its {count_of(config.servers, 'server')} "
            f"{config.learners + config.servers} processes share {count_of(cores, 'core')}"
        )
    return notes


def joined(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def definition(name: str) -> str:
    """As `offbeat.runs.metrics` has it."""
    return metrics.DEFINITIONS[name].formula


# --- ranking ---------------------------------------------------------------------------------------------------------


def least_ratio(rounds: int) -> float:
    """By how much two must differ to be told apart; one round tells nothing.

    With noise of 10 % two that are equal are in the same order in all of three rounds, and differ by over 5 %, one time
    in five; by over 25 % nearly never.
    """
    return math.inf if rounds == 1 else ALIKE if rounds >= ENOUGH else CLEAR


def ranked_sentences(
    order: Sequence[Row], alike: Callable[[Row, Row], bool], words: Callable[[Row], str], first: str, why: str
) -> list[str]:
    """Who comes first, and who then: a sentence for each group of those that are alike, with `why` they are."""
    left = list(order)
    lines: list[str] = []
    while left:
        group = [one for one in left if one is left[0] or alike(left[0], one)]
        left = [one for one in left if one not in group]
        line = f"{f'{first}:' if not lines else 'then'} {joined([words(one) for one in group])}"
        lines.append(f"{line}: {why}" if len(group) > 1 else line)
    return lines


def training_terms(
    tables: Sequence[tuple[Sequence[Field], Sequence[Row]]], definitions: Mapping[str, str], machine: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """What the columns mean, and what the learners ran with."""
    threads = count_of(machine["threads"], "thread")
    with_ = f"torch {machine['torch']} on {machine['device']} with {threads} a learner"
    return [*defined(tables, definitions).items(), ("with", with_)]
