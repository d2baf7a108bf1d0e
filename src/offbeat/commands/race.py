"""offbeat compare --recipe: strategies on a race to an accuracy, in virtual time.

Each strategy is trained once for every seed, on the same draws of compute times. Where a learner is persistently slow,
an all-reduce that gives it less to do, and everybody without it, are in the race too.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from offbeat.commands.base import console, heading, print_json, say, write_file
from offbeat.commands.cluster import cluster_of
from offbeat.commands.virtual import Live, clock_of, config_of, curve_of, machines_of, task_for, title_of, trained
from offbeat.errors import RequestError
from offbeat.number_format import format_seconds, percent
from offbeat.policies.damping import CORRECT
from offbeat.predict.race import Curve, Racer, advice, advised, chart_of, ranked, words_of, worth_drawing
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.compare import describe, describe_machines
from offbeat.spec import count_of
from offbeat.strategy import ALL_REDUCE, line_up, simulated_family_of

if TYPE_CHECKING:
    from offbeat.train.config import Config
    from offbeat.train.tasks import Task


WIDE = 100  # columns, from which on the whole table is shown


class Entry(NamedTuple):
    """A strategy that runs, and on which machines."""

    strategy: str
    cluster: Cluster
    variant: str = ""
    option: str = ""
    changes: tuple[tuple[str, Any], ...] = ()  # of the training


def race(given: argparse.Namespace) -> None:
    """`offbeat compare ... --recipe ... --target ...`."""
    if given.target is None:
        raise RequestError("a race needs an end: say the accuracy to reach, like --target 0.95")
    from offbeat.train.config_files import as_json
    from offbeat.train.rundir import check_free, new_run_dir

    if given.minibatches is not None:
        raise RequestError("--minibatches is not for a recipe: it has --epochs")
    given.seeds = given.seeds or 1
    if given.run_dir is not None:
        check_free(given.run_dir, resumes=False)
    cluster = cluster_of(given)
    names = given.strategies or line_up("race", cluster.learners)
    if not given.strategies and cluster.failures is not None:
        names = [name for name in names if simulated_family_of(name) != ALL_REDUCE]  # they bear none
    machines = describe_machines(cluster)
    entries = [Entry(name, cluster) for name in dict.fromkeys(names)]
    _check_ports(given, names)
    config = config_of(given, names[0], seed=given.seed, learners=cluster.learners)
    task = task_for(config)
    for entry in entries:  # what is wrong is told before anything is trained
        _check(given, entry, task)
    entries += [entry for entry in _variants(entries, machines.slow) if _fits(given, entry, task)]
    folder = new_run_dir(f"compare-{config.name}", given.run_dir)
    started = time.perf_counter()
    with Live("training in virtual time") as live:
        racers = [_run(given, entry, live, f"{at} of {len(entries)}") for at, entry in enumerate(entries, start=1)]
    took = time.perf_counter() - started
    order = ranked(racers)
    lines = advice(racers, given.target, describe(machines))
    title = title_of(given, config.name, cluster)
    subtitle = "dots: target reached"
    if given.seeds > 1:
        subtitle = f"{given.seeds} seeds thin, median bold, {subtitle}"
    shown = worth_drawing(order)
    if len(shown) < len(order):
        subtitle = f"{len(shown)} of {len(order)}, {subtitle}"
    drawn = [(racer.label, list(racer.curves)) for racer in shown]
    write_file(folder / "error.svg", chart_of(drawn, title=title, target=given.target, subtitle=subtitle))
    told = _as_json(given, cluster, json.loads(as_json(config)), order, lines, advised(racers), folder)
    write_file(folder / "race.json", json.dumps(told, indent=1, allow_nan=False))
    if given.json:
        print_json(told)
        return
    out = console()
    heading(out, f"{title}, to {percent(given.target)}, {count_of(given.seeds, 'seed')} from {given.seed}")
    for line in lines:
        say(out, line)
    say(out, f"the rate: {_rate_of(config)}; who is first may depend on it: try half and twice")
    out.print()
    _table(order)
    for racer in order:
        say(out, f"{racer.label}: {words_of(racer)}")
    out.print()
    say(out, f"error against time: {folder / 'error.svg'}; every point: {folder / 'race.json'}")
    say(out, f"computed in {format_seconds(took)}", style="dim")


def _rate_of(config: Config) -> str:
    """The same for all of them: what they have been raced at."""
    train = config.train
    scaled = "for all updates" if train.scaling == "none" else f"for {count_of(train.rate_batch, 'sample')}"
    how = "" if train.scaling == "none" else f", {train.scaling} scaling"
    momentum = f", momentum {train.momentum:g}" if train.optimizer in ("sgd", "lars") else ""
    stale = ", shorter steps for stale gradients" if config.staleness == CORRECT else ""
    return f"{train.rate:g} {scaled}{how}{momentum}{stale}"


def _variants(entries: Sequence[Entry], slow: Sequence[int]) -> list[Entry]:
    """What could be done about learners that are always slow: give them less, or do without them."""
    if not slow or not entries:
        return []
    cluster = entries[0].cluster
    names = [entry.strategy for entry in entries]
    reduces = next((name for name in names if simulated_family_of(name) == ALL_REDUCE), "ring")
    less = Entry(reduces, cluster, "split by speed", "--train.split auto", (("split", "auto"),))
    rest = cluster
    for learner in sorted(slow, reverse=True):
        rest = rest.without(learner) if rest.learners > 1 else rest
    if rest.learners == cluster.learners or rest.learners < 1:
        return [less]
    shown = ", ".join(map(str, sorted(slow)[:4])) + (", ..." if len(slow) > 4 else "")
    who = f"without learner{'' if len(slow) == 1 else 's'} {shown}"
    others = dict.fromkeys([reduces, *names])
    return [less, *(Entry(name, rest, who, f"leave it out: --learners {rest.learners}") for name in others)]


def _check_ports(given: argparse.Namespace, names: Sequence[str]) -> None:
    """`RequestError` where it is said how some of them communicate, and not how the others do."""
    families = {simulated_family_of(name) for name in names}
    ports = min(given.learner_bandwidth, given.server_bandwidth) < math.inf or given.latency > 0
    if len(families) > 1 and given.topology != "uniform" and not ports:
        raise RequestError(
            "--topology says how an all-reduce communicates, and nothing says it for servers: give "
            "--learner-bandwidth, --server-bandwidth and --latency too, or one port for all with --network"
        )


def _check(given: argparse.Namespace, entry: Entry, task: Task) -> None:
    from offbeat.predict.virtual import check_clock

    config = _config(given, entry, given.seed)
    check_clock(config, clock_of(given, entry.cluster, task, config), task)


def _fits(given: argparse.Namespace, entry: Entry, task: Task) -> bool:
    """Whether it can run, on so few learners or with work for some of them."""
    try:
        _check(given, entry, task)
    except RequestError:
        return False
    return True


def _config(given: argparse.Namespace, entry: Entry, seed: int) -> Config:
    from offbeat.train.config_files import changed

    config = config_of(given, entry.strategy, seed=seed, learners=entry.cluster.learners)
    return changed(config, {"train": dict(entry.changes)}) if entry.changes else config


def _run(given: argparse.Namespace, entry: Entry, live: Live, which: str) -> Racer:
    """The strategy with every seed."""
    curves: list[Curve] = []
    for seed in range(given.seed, given.seed + given.seeds):
        cluster = replace(entry.cluster, seed=seed)
        config = _config(given, entry, seed)
        task = task_for(config)
        label = f"{entry.strategy}, {entry.variant}" if entry.variant else entry.strategy
        live.begin(f"{which}: {label}, seed {seed}")
        outcome = trained(given, config, clock_of(given, cluster, task, config), task, live)
        curves.append(curve_of(outcome, seed, given.target))
        if not curves[-1].points:
            raise RequestError(f"{config.name} has no accuracy, only a loss: there is no target to race to")
        if curves[-1].reached_s == 0:
            raise RequestError(f"--target {given.target:g}: a model that has learned nothing is there already")
    return Racer(entry.strategy, tuple(curves), entry.cluster.learners, entry.variant, entry.option)


def _table(order: Sequence[Racer]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy", overflow="fold")
    wide = console().width >= WIDE
    columns = ["to target", "fastest", "slowest", "updates", "at the end", "staleness"]
    for column in columns if wide else [columns[0], *columns[4:]]:
        table.add_column(column, justify="right", no_wrap=True)
    for racer in order:
        times = racer.times
        updates = sorted(math.inf if one.reached_updates is None else one.reached_updates for one in racer.curves)
        middle = updates[len(updates) // 2]
        table.add_row(
            racer.label,
            _seconds(racer.median_s),
            *([_seconds(times[0]), _seconds(times[-1])] if wide else []),
            *(["-" if middle == math.inf else f"{middle:,.0f}"] if wide else []),
            racer.right,
            f"{racer.staleness:.1f}",
        )
    console().print(table)


def _seconds(value: float) -> str:
    return "not reached" if value == math.inf else format_seconds(value)


def _as_json(
    given: argparse.Namespace,
    cluster: Cluster,
    training: dict[str, Any],
    order: Sequence[Racer],
    lines: list[str],
    chosen: Racer | None,
    folder: Path,
) -> dict[str, Any]:
    return {
        "recipe": given.recipe,
        "training": training,
        "machines": machines_of(given, cluster),
        "first_seed": given.seed,
        "target": given.target,
        "seeds": given.seeds,
        "advice": lines,
        "advised": None if chosen is None else {"strategy": chosen.strategy, "variant": chosen.variant},
        "strategies": [
            {
                "strategy": racer.strategy,
                "variant": racer.variant,
                "seconds_to_target": None if racer.median_s == math.inf else racer.median_s,
                "samples_per_s": racer.samples_per_s,
                "accuracy": racer.accuracy,
                "test_samples": racer.test_samples,
                "staleness_mean": racer.staleness,
                "wait_share": racer.wait_share,
                "waste_share": racer.waste_share,
                "runs": [curve._asdict() for curve in racer.curves],
            }
            for racer in order
        ],
        "run_dir": str(folder),
    }
