"""What `simulate` and `compare` share where a recipe is trained in virtual time: options, clocks, runs, words."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from offbeat import topology
from offbeat.commands.base import busy, console, facts, heading, print_json, read_accuracy, reader, write_file
from offbeat.commands.cluster import cluster_of, model_of
from offbeat.errors import OffbeatError, RequestError
from offbeat.number_format import format_rate, format_seconds, percent
from offbeat.predict.calibration import machine_of
from offbeat.predict.race import Curve, chart_of
from offbeat.runs.metrics import format_accuracy, format_traffic, highest_reached
from offbeat.simulate.cluster import Cluster
from offbeat.spec import count_of, parse_count
from offbeat.strategy import ALL_REDUCE, simulated_family_of

if TYPE_CHECKING:
    from offbeat.predict.virtual import Clock, Outcome
    from offbeat.train.config import Config
    from offbeat.train.rundir import RunDir
    from offbeat.train.tasks import Task

ROWS = 12  # of the table of a run
SECTIONS = ("model", "data", "train")  # of a recipe: the rest of it is about real machines
_ALSO = ("staleness",)  # but for this
LOOK_EVERY = 0.25  # epochs
PLAIN_EVERY_S = 10.0  # between two plain lines


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    from offbeat.train.arguments import add_arguments

    group = parser.add_argument_group("training in virtual time")
    add = group.add_argument
    add(
        "--recipe", metavar="RECIPE", help="train it for real, on the simulated clock (offbeat recipes, or a TOML file)"
    )
    add("--target", type=reader(read_accuracy), metavar="X", help="the accuracy to reach, like 0.95")
    add("--look-every", type=reader(_epochs), metavar="X", help="epochs from look to look (default 0.25)")
    add(
        "--epoch-ends",
        action="store_true",
        help="learners wait for each other at the end of an epoch, as in a real run",
    )
    add(
        "--width",
        type=reader(parse_count),
        metavar="N",
        help="minibatches computed at a time (default: as fits); 1: alone",
    )
    add("--device", help="that computes: cpu (default), cuda or cuda:1")
    add("--run-dir", type=Path, metavar="FOLDER", help="of what is written (default runs/NAME-TIME)")
    add_arguments(parser, sections=SECTIONS, also=_ALSO)


def refuse_without_recipe(given: argparse.Namespace) -> None:
    """Options of a training say nothing where none is."""
    from offbeat.train.arguments import given as changes_of
    from offbeat.train.config_files import flag

    own = ("target", "run_dir", "width", "look_every", "device", "epoch_ends", "seeds")
    words = [flag(key) for key in changes_of(given)]
    words += [f"--{name.replace('_', '-')}" for name in own if getattr(given, name, None)]
    if words:
        raise RequestError(f"{words[0]} is for training in virtual time: name a recipe with --recipe, like digits-mlp")


def config_of(given: argparse.Namespace, strategy: str, *, seed: int, learners: int) -> Config:
    from offbeat.train.arguments import given as changes_of
    from offbeat.train.config_files import changed, override, read_recipe

    simulated_family_of(strategy)  # refuses what cannot be simulated, by its name
    changes = changes_of(given)
    for key in changes:
        if key.partition(".")[0] not in (*SECTIONS, *_ALSO):
            raise RequestError(
                f"--set {key}: here only fields of {', '.join(SECTIONS)} are set so, like train.epochs=5"
            )
    config = override(read_recipe(given.recipe), changes)
    try:
        return changed(
            config, {"sync": strategy, "learners": learners, "seed": seed, "slow": (), "device": given.device or "cpu"}
        )
    except RequestError as error:
        raise RequestError(str(error).removeprefix("sync: ")) from None


def task_for(config: Config) -> Task:
    """Data and model, tried once: what is wrong with them is told before anything runs."""
    import torch

    from offbeat.train.launch import check_device
    from offbeat.train.tasks import check, task_of

    check_device(config.device)
    torch.set_num_threads(config.train.threads)
    with redirect_stdout(sys.stderr):  # what modules of one's own print when they are loaded
        task = task_of(config)
        check(task)
    return task


def clock_of(given: argparse.Namespace, cluster: Cluster, task: Task, config: Config) -> Clock:
    """The size of what is sent is the model's own, where there is a network and no other size was given."""
    from offbeat.predict.virtual import Clock

    if given.calibration is not None:
        return _calibrated(given, cluster, config)
    port = min(given.learner_bandwidth, given.server_bandwidth)
    if given.topology == "uniform" and port == math.inf and not given.latency:
        return Clock(cluster=replace(cluster, wires=None), ends_of_epochs=given.epoch_ends)  # nothing takes time
    if not given.size:
        import torch

        with torch.random.fork_rng(devices=[]), redirect_stdout(sys.stderr):
            trained = [one for one in task.build().parameters() if one.requires_grad]
        given.size = sum(one.numel() * one.element_size() for one in trained)
    line = given.topology
    if line == "uniform":  # an all-reduce goes over the same ports as what is sent to the servers
        fast = 1e15 if port == math.inf else port
        line = f"uniform:bandwidth={fast:.15g}B/s,latency={given.latency:.15g}s"
    return Clock(
        cluster=replace(cluster, wires=cluster_of(given).wires),
        topology=topology.build(line, ranks=cluster.learners),
        layers=model_of(given),
        bucket_bytes=None if given.no_overlap else given.bucket,
        ends_of_epochs=given.epoch_ends,
    )


def _calibrated(given: argparse.Namespace, cluster: Cluster, config: Config) -> Clock:
    """The machine as it was measured, if that was with this model."""
    from offbeat.predict.calibration_match import check
    from offbeat.predict.virtual import Clock

    check(given.calibration, config)
    batch = config.train.batch_size * config.train.accumulate
    own = machine_of(given.calibration, config.sync, cluster.learners, batch=batch)
    reduces = simulated_family_of(config.sync) == ALL_REDUCE
    return Clock(
        cluster=replace(own.cluster, seed=cluster.seed, speeds=cluster.speeds, law=cluster.law, ids=cluster.ids),
        bucket_bytes=None,
        reduce_s=(lambda size: own.reduce_s) if reduces else None,
        ends_of_epochs=given.epoch_ends,
    )


class Live:
    """Signs of life while it works: a line that changes on a terminal, and one now and then elsewhere."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._status: Any = None
        self._told_s = time.monotonic()
        self._accuracy = ""

    def __enter__(self) -> Self:
        self._status = busy(self._what)
        self._status.__enter__()
        return self

    def __exit__(self, *given: object) -> None:
        self._status.__exit__(*given)

    def begin(self, what: str) -> None:
        self._what, self._accuracy = what, ""
        self._show(what)

    def hear(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "evaluated":
            if record["accuracy"] is not None:
                self._accuracy = f", {percent(record['accuracy'])} right"
            at = f"{format_seconds(record['seconds'])} simulated, epoch {record['epoch']:.2f}"
            self._show(f"{self._what}: {at}{self._accuracy}")

    def _show(self, text: str) -> None:
        update = getattr(self._status, "update", None)
        if update is not None:
            update(text)
        elif time.monotonic() - self._told_s > PLAIN_EVERY_S:
            self._told_s = time.monotonic()
            print(text, file=sys.stderr, flush=True)


def _epochs(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise RequestError(f"expected a number of epochs above 0, like 0.25; got '{text}'")
    return value


# --- one strategy -------------------------------------------------------------------------------------------------


def simulate_recipe(given: argparse.Namespace) -> None:
    """`offbeat simulate STRATEGY --recipe ...`."""
    from offbeat.predict.virtual import check_clock
    from offbeat.train.rundir import RunDir, check_free, new_run_dir

    cluster = cluster_of(given)
    config = config_of(given, given.strategy, seed=given.seed, learners=cluster.learners)
    if given.run_dir is not None:
        check_free(given.run_dir, resumes=False)
    task = task_for(config)
    clock = clock_of(given, cluster, task, config)
    check_clock(config, clock, task)
    run = RunDir(new_run_dir(config.name, given.run_dir))
    run.write_config(config)
    started = time.perf_counter()
    with Live(f"training {config.name} in virtual time") as live:
        outcome = trained(given, config, clock, task, live, run=run)
    took = time.perf_counter() - started
    curve = curve_of(outcome, given.seed, given.target)
    target = given.target
    machines = machines_of(given, cluster)
    write_file(run.path / "machines.json", json.dumps(machines, indent=1))
    title = f"{given.strategy}: {title_of(given, config.name, cluster)}"
    if any(point.accuracy is not None for point in outcome.points):
        write_file(run.path / "error.svg", chart_of([(given.strategy, [curve])], title=title, target=target))
    if given.json:
        print_json(_as_json(given, outcome, curve, machines, str(run.path)))
        return
    out = console()
    heading(out, f"{given.strategy}, {count_of(cluster.learners, 'learner')}, {cluster.law.text}, seed {given.seed}: "
                 f"{config.name} in virtual time")  # fmt: skip
    _table(outcome, config)
    out.print()
    facts(out, _facts(given, outcome, curve, took, run.path))


def trained(
    given: argparse.Namespace, config: Config, clock: Clock, task: Task, live: Live, *, run: RunDir | None = None
) -> Outcome:
    """Train it. What a model or data set of one's own prints goes elsewhere; what it raises is told in a line."""
    from offbeat.predict.virtual import train_virtually

    try:
        with redirect_stdout(sys.stderr):
            return train_virtually(
                config,
                clock,
                task=task,
                run=run,
                hear=live.hear,
                width=given.width or 0,
                every=given.look_every or LOOK_EVERY,
            )
    except (OffbeatError, OSError, MemoryError):
        raise
    except Exception as error:  # of the user's own code
        raise OffbeatError(f"{config.name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error


def title_of(given: argparse.Namespace, name: str, cluster: Cluster) -> str:
    """What is trained, and on which machines."""
    words = [name, count_of(cluster.learners, "learner"), cluster.law.text]
    if cluster.speeds:
        words.append(f"speeds {','.join(f'{speed:g}' for speed in cluster.speeds[:8])}")
    if cluster.slow is not None:
        words.append("slow periods")
    if cluster.failures is not None:
        words.append("failures")
    port = min(given.learner_bandwidth, given.server_bandwidth)
    ports = [format_rate(port)] if port < math.inf else []
    ports += [format_seconds(given.latency)] if given.latency else []
    if ports:
        words.append(f"network {' and '.join(ports)}")
    return ", ".join(words)


def machines_of(given: argparse.Namespace, cluster: Cluster) -> dict[str, Any]:
    """The same, whole, for what is written."""
    slow, failures = cluster.slow, cluster.failures
    return {
        "learners": cluster.learners,
        "compute": cluster.law.text,
        "speeds": list(cluster.speeds),
        "slow": None if slow is None else [slow.factor, slow.enter, slow.leave],
        "failures": None if failures is None else [failures.mean_up_s, failures.mean_down_s],
        "size_bytes": given.size,
        "latency_s": given.latency,
        "learner_bytes_per_s": _told(given.learner_bandwidth),
        "server_bytes_per_s": _told(given.server_bandwidth),
        "shards": given.shards,
        "topology": given.topology,
        "epoch_ends": given.epoch_ends,
        "look_every": given.look_every or LOOK_EVERY,
    }


def _told(rate: float) -> float | None:
    return None if rate == math.inf else rate


def curve_of(outcome: Outcome, seed: int, target: float | None) -> Curve:
    """What a race is told of a run."""
    reached = None if target is None else outcome.reached(target)
    spent, last = outcome.spent, outcome.points[-1]
    whole = spent.compute_s + spent.send_s + spent.wait_s or 1.0
    return Curve(
        seed=seed,
        points=tuple((one.seconds, one.accuracy) for one in outcome.points if one.accuracy is not None),
        reached_s=None if reached is None else reached.seconds,
        reached_updates=None if reached is None else reached.update,
        reached_samples=None if reached is None else reached.samples,
        accuracy=last.accuracy,
        test_samples=last.test_samples,
        best=highest_reached([one.accuracy for one in outcome.points if one.accuracy is not None]),
        seconds=last.seconds,
        updates=last.update,
        samples=last.samples,
        staleness=outcome.staleness_mean,
        waste_share=spent.waste_s / whole,
        wait_share=(spent.wait_s + spent.send_s) / whole,
        warning=outcome.end.get("warning") or "",
    )


def _table(outcome: Outcome, config: Config) -> None:
    from rich import box
    from rich.table import Table

    points = outcome.points
    step = max(1, -(-(len(points) - 1) // (ROWS - 1)))
    chosen = {*points[::step], points[-1], max(points, key=lambda point: point.accuracy or 0.0)}
    shown = sorted(chosen, key=lambda point: point.update)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("seconds", "updates", "samples", "test loss", "right"):
        table.add_column(column, justify="right", no_wrap=True)
    for point in shown:
        table.add_row(
            f"{point.seconds:,.4g}",
            f"{point.update:,}",
            f"{point.samples:,}",
            "not finite" if point.loss is None else f"{point.loss:.4f}",
            "" if point.accuracy is None else percent(point.accuracy),
        )
    console().print(table)


def _facts(
    given: argparse.Namespace, outcome: Outcome, curve: Curve, took: float, folder: Path
) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    if given.target is not None:
        if curve.reached_s is None:
            best = f"the highest that was is {percent(curve.best or 0.0)}"
            best = "there is no accuracy, only a loss" if curve.accuracy is None else best
            rows.append(("target", f"{percent(given.target)} was not reached: {best}"))
            if curve.accuracy is not None:
                rows.append(
                    ("", "try another rate (--rate), more epochs (--epochs) or smaller minibatches (--batch-size)")
                )
        else:
            at = f"{format_seconds(curve.reached_s)}, {curve.reached_updates:,} updates"
            rows.append(("target", f"{percent(given.target)} after {at} and {curve.reached_samples:,} samples"))
    if curve.accuracy is not None:
        right = format_accuracy(curve.accuracy, curve.test_samples)
        rows.append(("accuracy", f"{right} at the end, on {curve.test_samples:,} test samples"))
    each = curve.seconds / curve.updates if curve.updates else 0.0
    rows.append(("updates", f"{curve.updates:,} in {format_seconds(curve.seconds)}: {format_seconds(each)} each"))
    rows.append(("staleness", f"{curve.staleness:.2f} on average"))
    moved = (outcome.end["sent_bytes"] or 0, outcome.end["received_bytes"] or 0)
    rows.append(("traffic", f"learners {format_traffic(*moved, curve.wait_share)}"))
    busy_share = 1 - curve.wait_share - curve.waste_share
    rows.append(
        (
            "learners",
            f"{percent(busy_share)} computing what counts, {percent(curve.waste_share)} for nothing, "
            f"{percent(curve.wait_share)} waiting or sending",
        )
    )
    if outcome.dropped:
        told = ", ".join(f"{many:,} ({why})" for why, many in outcome.dropped.items())
        rows.append(("not applied", f"samples: {told}"))
    rows += [("note", note) for note in outcome.notes]
    rows += [("warning", curve.warning)] if curve.warning else []
    rows.append(("computed", f"{outcome.how} in {format_seconds(took)}"))
    rows.append(("run", f"{folder}{os.sep}"))
    return rows


def _as_json(
    given: argparse.Namespace, outcome: Outcome, curve: Curve, machines: Mapping[str, Any], folder: str
) -> dict[str, Any]:
    return {
        "name": outcome.config.name,
        "strategy": given.strategy,
        "machines": machines,
        "learners": outcome.config.learners,
        "seed": given.seed,
        "target": given.target,
        "target_seconds": curve.reached_s,
        "target_updates": curve.reached_updates,
        "target_samples": curve.reached_samples,
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
