"""What benchmarks of training share: one real training, and how several are compared, kept and spoken of.

Laws. Every configuration is made, and refused, before anything runs; within a comparison they differ in strategy,
learners and seed alone. Of a training its numbers are kept and its log is not, since many are run. What could not be
measured is not 0 but unknown, with the reason in words. The times are those of the run itself: seconds of training,
evaluation left out. The first stretch (up to the first evaluation) has the start of the processes and of torch's caches
in it, so rates are over what came after it; a run of one epoch has nothing else.

What it must not know: how anything is printed. Torch is loaded only to ask for devices, and to train.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from offbeat import spec as grammar
from offbeat.errors import OffbeatError, RequestError
from offbeat.machine import machine_facts
from offbeat.measure.benchmark import Progress, Tables, alternate, check_distinct, check_processes, median_known
from offbeat.processes.signals import terminable
from offbeat.processes.slowness import parse as parse_slowness
from offbeat.report.benchmark_fields import Row, printed
from offbeat.runs import metrics
from offbeat.runs.log import RunLog, read_log
from offbeat.runs.run_folder import Evaluated, RunDir
from offbeat.runs.untrusted import UnusableFile, read_json
from offbeat.spec import count_of
from offbeat.strategy import SERVER, family_of
from offbeat.train.config import Config
from offbeat.train.config_files import changed
from offbeat.train.recipes import RECIPES

ALIKE = 1.05  # medians this close are not told apart, whatever their rounds say
ENOUGH = 5  # rounds or seeds, from which on it is told apart what differs by more than that
CLEAR = 1.25  # and with fewer
NOT_PREDICTED = "not predicted: give --calibration (offbeat calibrate writes one)"


Train = Callable[[Config, Path], "Trained"]
Predictor = Callable[[Config], float | None]  # None: the target is not reached


# --- configurations --------------------------------------------------------------------------------------------------


def check_trainings(config: Config, lines: Sequence[str], learners: Sequence[int], price: float | None) -> None:
    """Strategies that are known, and each once; whether they fit the learners is for `configured` to find.

    Rules of slowness must say something for the largest number of learners.
    """
    for line in lines:
        if line in RECIPES:
            raise RequestError(f"bench: '{line}' is a recipe; put it before the options")
        try:
            family_of(line)
        except RequestError as error:
            raise RequestError(f"bench: --sync: {error}") from None
    if not lines:
        raise RequestError("bench: --sync needs at least one strategy")
    check_distinct("--sync", [str(grammar.parse(line)) for line in lines], "strategy")
    check_processes("--learners and --servers", (*learners, config.servers))
    if price is not None and not 0 <= price < math.inf:
        raise RequestError(f"bench: --price: expected a price per device hour of 0 or more; got {price:g}")
    try:
        parse_slowness(config.slow, max(learners))
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


# --- one training ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained(Evaluated):
    """What one run left."""

    config: Config  # with everything filled in
    log: RunLog
    metrics: tuple[Mapping[str, Any], ...]  # an evaluation each
    energy: Mapping[str, Any] | None  # energy.json

    @property
    def _steady(self) -> tuple[float, int, int]:
        """Seconds, updates and samples after the first evaluation."""
        first, last = self.metrics[0], self.metrics[-1]
        if first is last:
            return self.seconds, self.updates, self.samples
        seconds, updates, samples = (last[name] - first[name] for name in ("seconds", "update", "samples"))
        return seconds, updates, samples

    @property
    def seconds_per_update(self) -> float:
        seconds, updates, _ = self._steady
        return seconds / max(1, updates)

    @property
    def samples_per_s(self) -> float:
        seconds, _, samples = self._steady
        return samples / seconds


def train_once(config: Config, folder: Path) -> Trained:
    """Train in a new folder, which is removed again; `OffbeatError` where the run failed or was ended by a signal."""
    from offbeat.train.launch import launch, prepare

    said: list[str] = []
    start = prepare(config, run_dir=folder)
    try:
        result = launch(start, lambda record: None, lambda name, line: said.append(f"{name}: {line}"))
        if result.signal:
            raise SystemExit(128 + result.signal)
        run = RunDir(folder)
        evaluations = tuple(run.read_metrics())
        if not evaluations:
            last = f": {said[-1]}" if said else ""
            raise OffbeatError(f"bench: '{config.sync}' ended without an evaluation{last}")
        energy = None
        with suppress(UnusableFile):
            energy = read_json(run.energy(1))
        return Trained(config=start.config, log=read_log(run.log(1)), metrics=evaluations, energy=energy)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def train_for(config: Config, samples: int, folder: Path, minibatches: int = 150) -> Trained:
    """So many epochs that each learner has computed enough minibatches of the set's samples, and at least three."""
    epochs = max(3, math.ceil(minibatches * minibatch(config) * config.learners / samples) + 1)
    return train_once(
        changed(config, {"train": {"epochs": epochs, "stop_at": 0.0}, "save": {"every_epochs": 0}}), folder
    )


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
) -> tuple[Mapping[str, Any], list[list[TrainingNumbers]], list[list[float | None]], list[str]]:
    """Train every configuration of every plan, in turn, and predict those of the first `predict_plans`.

    A plan is a round or a seed (`unit`). `number` is what the sharing of cores spoils, in one word. `train` and
    `machine` are the real ones where they are None. Returned are the facts of the machine; for each configuration its
    trainings, and what was predicted of it (nothing, where it could not be); and notes.
    """
    facts = machine_for(plans[0][0]) if machine is None else machine

    def turn(place: int, number: int, doing: str) -> TrainingNumbers:
        config = plans[number][place]
        found = numbers_of((train or train_once)(config, Path(folder) / "run"))
        if needs_accuracy and found.accuracy is None:
            raise RequestError(f"bench: the recipe '{config.name}' has no accuracy, so --target cannot be used")
        return found

    with terminable(), tempfile.TemporaryDirectory(prefix="offbeat-bench-") as folder:
        turns = {trained_label(one.sync, one.learners): partial(turn, place) for place, one in enumerate(plans[0])}
        trained = list(alternate(turns, len(plans), progress, unit=unit).values())
        told = [*shared_notes(plans[0], facts, [run for runs in trained for run in runs], number), *notes]
        # Last, since it computes here and may start threads: no fork after it.
        predicted = _predict_all(list(zip(*plans[:predict_plans], strict=True)), predictor, progress, told)
    return facts, trained, predicted, told


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
            "other programs were running; measure again on an idle machine"
        )
    notes += _sharing_notes(configs, machine, number)
    if configs[0].train.epochs == 1:
        notes.append("with one epoch, times include the start of torch; use 2 or more epochs (--epochs 2)")
    reasons = list(dict.fromkeys(reason for one in trainings for reason in one.not_measured))
    if all(one.joules is None for one in trainings):
        notes.append(f"energy: not measured: {'; '.join(reasons)}")
    elif reasons:
        notes.append(f"energy is incomplete, not measured: {'; '.join(reasons)}")
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
        notes.append(f"{learners}{each} on {what}: learners share {shared}, which affects {number}")
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


def training_terms(tables: Tables, definitions: Mapping[str, str], machine: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the columns mean that have a definition, and what the learners ran with."""
    threads = count_of(machine["threads"], "thread")
    defined = {
        field.title: definitions[field.key].removeprefix(f"{field.title.partition(' ')[0]}: ")
        for fields, rows in tables
        for field in printed(fields, rows)
        if field.key in definitions
    }
    return [
        *defined.items(),
        ("with", f"torch {machine['torch']} on {machine['device']} with {threads} a learner"),
    ]
