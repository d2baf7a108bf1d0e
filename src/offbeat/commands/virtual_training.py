"""simulate --recipe and compare --recipe: a recipe trained in virtual time under one strategy, or a race of several."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.commands.base import (
    Terminal,
    answer,
    facts,
    heading,
    option,
    read_accuracy,
    refuse,
    say,
    stages,
    table,
    write_file,
)
from offbeat.commands.machine_options import machines_of
from offbeat.errors import RequestError
from offbeat.number_format import format_seconds, format_size, percent
from offbeat.policies.damping import CORRECT
from offbeat.predict import race
from offbeat.predict.race import Contender, RaceResult, TrainingCurve
from offbeat.runs.metrics import format_accuracy, format_traffic
from offbeat.runs.run_folder import TIME_STAMP, RunDir, check_free, new_run_dir
from offbeat.spec import count_of, parse_count, parse_number
from offbeat.train.arguments import given as changes_of
from offbeat.train.config import Config, check_batch_given, check_whole
from offbeat.train.config_files import as_json, changed, flag, override, read_recipe, write_config

if TYPE_CHECKING:
    from offbeat.predict.virtual import RecipeTraining, VirtualRun

ROWS = 12  # of the table of a run
WIDE = 100  # columns, from which on the whole table of a race is shown
SECTIONS = ("model", "data", "train")  # of a recipe: the rest of it is about real machines
FIELDS = ("staleness",)  # but for this
ERROR_BY_BYTES = "error-by-bytes.svg"  # beside error.svg, which is by time
QUIET_S = 10.0  # before the first plain line, and between two


def _epochs(text: str) -> float:
    return parse_number(text, lambda x: 0 < x < math.inf, "expected a number of epochs above 0, like 0.25")


_GROUP = "training in virtual time"
RECIPE_OPTIONS = (
    option(
        "--recipe", group=_GROUP, metavar="RECIPE",
        help="recipe to train in virtual time: built-in or TOML file",
    ),
    option("--target", group=_GROUP, read=read_accuracy, metavar="X", help="target accuracy, like 0.95"),
    option("--look-every", group=_GROUP, read=_epochs, metavar="X", help="epochs between evaluations (default 0.25)"),
    option(
        "--epoch-ends", group=_GROUP, action="store_true",
        help="learners wait for each other at the end of an epoch, as in a real run",
    ),
    option(
        "--width", group=_GROUP, read=parse_count, metavar="N",
        help="minibatches computed together (default: chosen automatically; 1: one by one)",
    ),
    option("--device", group=_GROUP, help="device that computes: cpu (default), cuda or cuda:1"),
    option("--run-dir", group=_GROUP, read=Path, metavar="FOLDER", help="output folder (default runs/NAME-TIME)"),
)  # fmt: skip


def refuse_without_recipe(given: argparse.Namespace, *, batch_size: bool = False) -> None:
    """Options of a training say nothing where none is; `batch_size`: but for --batch-size."""
    why = "needs --recipe, like --recipe digits-mlp"
    for key in changes_of(given):
        if not (batch_size and key == "train.batch_size"):
            raise RequestError(f"{flag(key)} {why}")
    refuse(given, ("target", "run_dir", "width", "look_every", "device", "epoch_ends", "seeds"), why)


def _training(given: argparse.Namespace) -> RecipeTraining:
    """The recipe with its overrides, on the machines that were described."""
    from offbeat.predict.virtual import EVALUATE_EVERY, RecipeTraining

    machines = machines_of(given)
    changes = changes_of(given)
    for key in changes:
        if key.partition(".")[0] not in (*SECTIONS, *FIELDS):
            raise RequestError(
                f"--set {key}: only fields of {', '.join(SECTIONS)} can be set here, like train.epochs=5"
            )
    recipe = changed(override(read_recipe(given.recipe), changes), {"device": given.device or "cpu"})
    check_batch_given(recipe.train)
    check_whole(recipe)
    if given.run_dir is not None:
        check_free(given.run_dir, resumes=False)
    return RecipeTraining(
        recipe=recipe,
        machines=machines,
        ends_of_epochs=given.epoch_ends,
        width=given.width or 0,
        every=given.look_every or EVALUATE_EVERY,
    )


def evaluations(tell: Callable[[str], None], what: str) -> Callable[[Mapping[str, Any]], None]:
    """Tells of the evaluations of a training."""
    tell(what)

    def hear(record: Mapping[str, Any]) -> None:
        if record["kind"] == "evaluated":
            accuracy = "" if record["accuracy"] is None else f", accuracy {percent(record['accuracy'])}"
            at = f"{format_seconds(record['seconds'])} simulated, epoch {record['epoch']:.2f}"
            tell(f"{what}: {at}{accuracy}")

    return hear


def _machines_json(training: RecipeTraining) -> dict[str, Any]:
    return training.machines.as_json() | {"epoch_ends": training.ends_of_epochs, "look_every": training.every}


# --- one strategy -------------------------------------------------------------------------------------------------


def simulate_recipe(given: argparse.Namespace, strategy: str) -> None:
    """`offbeat simulate STRATEGY --recipe ...`."""
    from offbeat.predict.virtual import prepare_task

    training = _training(given)
    only = Contender(strategy, training.machines.cluster)
    config = training.config(only, given.seed)
    task = prepare_task(config)
    training = training.for_task(task)
    training.check(only, given.seed, task)
    run = RunDir(new_run_dir(config.name, given.run_dir, time.strftime(TIME_STAMP)))
    write_config(run, config)
    started, what = time.perf_counter(), f"training {config.name} in virtual time"
    with stages(what, QUIET_S) as tell:
        outcome = training.train(only, given.seed, evaluations(tell, what), task=task, run=run)
    took = time.perf_counter() - started
    curve = outcome.curve(given.target)
    machines = _machines_json(training)
    write_file(run.path / "machines.json", json.dumps(machines, indent=1))
    if curve.points:
        title = f"{strategy}: {training.machines.title(config.name)}"
        write_file(run.path / "error.svg", race.chart_of([(strategy, [curve])], title=title, target=given.target))
        if curve.sent_bytes[-1]:
            by_bytes = race.chart_of([(strategy, [curve])], title=title, target=given.target, by_bytes=True)
            write_file(run.path / ERROR_BY_BYTES, by_bytes)
    cluster = training.machines.cluster

    def show(out: Terminal) -> None:
        heading(out, f"{strategy}, {count_of(cluster.learners, 'learner')}, {cluster.law.text}, seed {given.seed}: "
                     f"{config.name} in virtual time")  # fmt: skip
        table(out, ("seconds", "updates", "samples", "sent", "test loss", "right"), _rows(outcome), text=())
        out.print()
        facts(out, _facts(given.target, outcome, curve, took, run.path))

    answer(given, _as_json(given.target, outcome, curve, machines, str(run.path)), show)


def _rows(outcome: VirtualRun) -> list[tuple[str, ...]]:
    points = outcome.points
    step = max(1, -(-(len(points) - 1) // (ROWS - 1)))
    chosen = {*points[::step], points[-1], max(points, key=lambda point: point.accuracy or 0.0)}
    return [
        (
            f"{point.seconds:,.4g}",
            f"{point.update:,}",
            f"{point.samples:,}",
            format_size(point.sent_bytes),
            "not finite" if point.loss is None else f"{point.loss:.4f}",
            "" if point.accuracy is None else percent(point.accuracy),
        )
        for point in sorted(chosen, key=lambda point: point.update)
    ]


def _facts(
    target: float | None, outcome: VirtualRun, curve: TrainingCurve, took: float, folder: Path
) -> list[tuple[str, str]]:
    each = curve.seconds / curve.updates if curve.updates else 0.0
    moved = (outcome.end["sent_bytes"] or 0, outcome.end["received_bytes"] or 0)
    right = None if curve.accuracy is None else format_accuracy(curve.accuracy, curve.test_samples)
    dropped = ", ".join(f"{many:,} ({why})" for why, many in outcome.dropped.items())
    found = [
        *([] if target is None else _target_facts(target, curve)),
        ("accuracy", "" if right is None else f"{right} at the end, on {curve.test_samples:,} test samples"),
        ("updates", f"{curve.updates:,} in {format_seconds(curve.seconds)}: {format_seconds(each)} each"),
        ("staleness", f"{curve.staleness:.2f} on average"),
        ("traffic", f"learners {format_traffic(*moved, curve.wait_share)}"),
        (
            "learners",
            f"{percent(1 - curve.wait_share - curve.waste_share)} computing gradients that were applied, "
            f"{percent(curve.waste_share)} computing gradients that were discarded, {percent(curve.wait_share)} "
            "waiting or sending",
        ),
        ("not applied", f"samples: {dropped}" if dropped else ""),
        *(("note", note) for note in outcome.notes),
        ("warning", curve.warning),
        ("computed", f"{outcome.how} in {format_seconds(took)}"),
        ("run", f"{folder}{os.sep}"),
    ]
    return [(label, text) for label, text in found if text]


def _target_facts(target: float, curve: TrainingCurve) -> list[tuple[str, str]]:
    if curve.reached_s is not None:
        at = f"{format_seconds(curve.reached_s)}, {curve.reached_updates:,} updates"
        sent = f"; {format_size(curve.reached_bytes)} had been sent" if curve.reached_bytes else ""
        return [("target", f"{percent(target)} after {at} and {curve.reached_samples:,} samples{sent}")]
    if curve.accuracy is None:
        return [("target", f"{percent(target)} was not reached: this recipe has a loss but no accuracy")]
    return [
        ("target", f"{percent(target)} was not reached; the best was {percent(curve.best or 0.0)}"),
        ("", "try another learning rate (--lr), more epochs (--epochs) or smaller minibatches (--batch-size)"),
    ]


def _as_json(
    target: float | None, outcome: VirtualRun, curve: TrainingCurve, machines: Mapping[str, Any], folder: str
) -> dict[str, Any]:
    return {
        "name": outcome.config.name,
        "strategy": outcome.config.sync,
        "machines": machines,
        "learners": outcome.config.learners,
        "seed": curve.seed,
        "target": target,
        "target_seconds": curve.reached_s,
        "target_updates": curve.reached_updates,
        "target_samples": curve.reached_samples,
        "target_bytes": curve.reached_bytes,
        "accuracy": curve.accuracy,
        "test_samples": curve.test_samples,
        "warning": curve.warning or None,
        "sent_bytes": outcome.end["sent_bytes"],
        "received_bytes": outcome.end["received_bytes"],
        "seconds": curve.seconds,
        "updates": curve.updates,
        "samples": curve.samples,
        "staleness_mean": curve.staleness,
        "waste_share": curve.waste_share,
        "wait_share": curve.wait_share,
        "staleness_histogram": {str(age): many for age, many in outcome.staleness.items()},
        "dropped": dict(outcome.dropped),
        "notes": list(outcome.notes),
        "points": [point._asdict() for point in outcome.points],
        "run_dir": folder,
    }


# --- a race -------------------------------------------------------------------------------------------------------


def race_recipe(given: argparse.Namespace, strategies: Sequence[str]) -> None:
    """`offbeat compare STRATEGY ... --recipe ... --target ...`: every strategy with every seed, on the same draws."""
    if given.target is None:
        raise RequestError("--target is required with --recipe, like --target 0.95")
    from offbeat.predict.virtual import prepare_task
    from offbeat.simulate.diagnosis import describe, describe_machines

    training, seeds = _training(given), given.seeds or 1
    cluster = training.machines.cluster
    machines = describe_machines(cluster)
    contenders = [Contender(name, cluster) for name in dict.fromkeys(strategies or race.usual_strategies(cluster))]
    race.check_ports(training.machines.network, [one.strategy for one in contenders])
    config = training.config(contenders[0], given.seed)
    task = prepare_task(config)
    training = training.for_task(task)
    for one in contenders:  # what is wrong is told before anything is trained
        training.check(one, given.seed, task)
    variants = race.variants(contenders, machines.slow)
    contenders += [one for one in variants if training.fits(one, given.seed, task)]
    folder = new_run_dir(f"compare-{config.name}", given.run_dir, time.strftime(TIME_STAMP))
    started = time.perf_counter()
    with stages("training in virtual time", QUIET_S) as tell:

        def train(one: Contender, seed: int, which: str) -> TrainingCurve:
            outcome = training.train(one, seed, evaluations(tell, f"{which}: {one.label}, seed {seed}"))
            return race.checked(outcome.curve(given.target), config.name, given.target)

        results = race.run_race(contenders, range(given.seed, given.seed + seeds), train)
    took = time.perf_counter() - started
    order, chosen = race.ranked(results), race.advised(results)
    lines = race.advice(results, given.target, describe(machines))
    title = training.machines.title(config.name)
    write_file(folder / "error.svg", race.race_chart(order, title=title, target=given.target))
    sends = any(curve.sent_bytes[-1] for result in results for curve in result.curves)
    if sends:
        by_bytes = race.race_chart(race.by_bytes(order), title=title, target=given.target, by_bytes=True)
        write_file(folder / ERROR_BY_BYTES, by_bytes)
    told = {
        "recipe": given.recipe,
        "training": json.loads(as_json(config)),
        "machines": _machines_json(training),
        "first_seed": given.seed,
        "target": given.target,
        "seeds": seeds,
        "advice": lines,
        "advised": None if chosen is None else {"strategy": chosen.strategy, "variant": chosen.variant},
        "strategies": [result.as_json() for result in order],
        "run_dir": str(folder),
    }
    write_file(folder / "race.json", json.dumps(told, indent=1, allow_nan=False))

    def show(out: Terminal) -> None:
        heading(out, f"{title}, to {percent(given.target)}, {count_of(seeds, 'seed')} from {given.seed}")
        rate = f"learning rate: {_rate_of(config)}; the ranking may depend on it, so try half and twice as much"
        say(out, *lines, rate, "")
        columns = ("to target", "fastest", "slowest", "updates", "sent", "at the end", "staleness")
        shown = range(len(columns)) if out.width >= WIDE else (0, 4, 5)
        rows = [(result.label, *(_cells(result)[at] for at in shown)) for result in order]
        table(out, ("strategy", *(columns[at] for at in shown)), rows, wrapped=(0,))
        say(out, *(f"{result.label}: {race.explain_result(result)}" for result in order), "")
        say(out, f"error against time: {folder / 'error.svg'}; every point: {folder / 'race.json'}")
        if sends:
            say(out, f"error against bytes sent: {folder / ERROR_BY_BYTES}")
        say(out, f"computed in {format_seconds(took)}", style="dim")

    answer(given, told, show)


def _rate_of(config: Config) -> str:
    """The same for all of them: what they have been raced at."""
    train = config.train
    scaled = "for every update" if train.scaling == "none" else f"for {count_of(train.lr_batch, 'sample')}"
    how = "" if train.scaling == "none" else f", {train.scaling} scaling"
    momentum = f", momentum {train.momentum:g}" if train.optimizer in ("sgd", "lars") else ""
    stale = ", shorter steps for stale gradients" if config.staleness == CORRECT else ""
    return f"{train.lr:g} {scaled}{how}{momentum}{stale}"


def _cells(result: RaceResult) -> tuple[str, ...]:
    times = (result.median_s, result.times[0], result.times[-1])
    reached = ("not reached" if seconds == math.inf else format_seconds(seconds) for seconds in times)
    updates = "-" if result.median_updates is None else f"{result.median_updates:,}"
    sent = "-" if result.bytes_needed is None else format_size(result.bytes_needed)
    return *reached, updates, sent, result.accuracy_text, f"{result.staleness:.1f}"
