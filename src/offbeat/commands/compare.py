"""offbeat compare: strategies side by side on one cluster with the same draws."""

from __future__ import annotations

import argparse
import math

from offbeat.commands import estimates
from offbeat.commands.base import Command, Terminal, answer, busy, heading, option, say, table
from offbeat.commands.machine_options import MACHINE_OPTIONS, machines_of
from offbeat.commands.sweep import (
    SWEEP_OPTIONS,
    batch_of,
    check_recipe_options,
    default_lines,
    is_sweep,
    lines_of,
    sweep,
)
from offbeat.commands.virtual_training import FIELDS, RECIPE_OPTIONS, SECTIONS, race_recipe, refuse_without_recipe
from offbeat.errors import RequestError
from offbeat.number_format import format_seconds, format_size, percent
from offbeat.simulate.diagnosis import Diagnosis, describe, describe_machines, diagnose, typical_of, what_helps
from offbeat.simulate.setup import Network
from offbeat.spec import count_of, parse_count

_WIDE = 140


def _run(given: argparse.Namespace) -> None:
    lines = [*given.strategies, *given.learners.late_words]
    if given.updates is not None and given.minibatches is not None:
        raise RequestError("compare: --minibatches and --updates cannot be used together")
    if given.recipe is not None:
        check_recipe_options(given)
        race_recipe(given, lines_of(lines))
        return
    if is_sweep(given, lines):
        sweep(given, lines)
        return
    epoch = None if given.epoch_samples is None else given.epoch_samples / batch_of(given)
    refuse_without_recipe(given, batch_size=epoch is not None)
    machines = machines_of(given)
    cluster, size_bytes = machines.cluster, machines.network.size_bytes
    names = lines_of(lines) or default_lines(given, cluster.learners)
    estimates.check(given, estimates.of_comparison(machines, names, given.updates, given.minibatches))
    setups = [machines.setup(name) for name in names]
    with busy("simulating"):
        learners = describe_machines(cluster)
        found = [diagnose(one, learners, given.updates or one.updates_for(given.minibatches)) for one in setups]
        helps = what_helps(found, learners, given.minibatches)
    subject = typical_of(found)
    nothing = "no strategy completes an update on this cluster"
    headline = nothing if subject is None else f"{subject.strategy}: {subject.limited}"

    def show(out: Terminal) -> None:
        heading(out, f"{count_of(cluster.learners, 'learner')}, {cluster.law.text}, seed {given.seed}")
        say(out, headline, describe(learners), *([] if helps is None else helps.advice), "")
        if machines.staged is not None:
            say(out, f"each learner in stages: {machines.staged.text}", "")
        wide = out.width >= _WIDE
        columns = ["strategy", "gradients/s", "s/update", "staleness", "waiting", "wasted"]
        columns += (["epoch"] if epoch else []) + (["memory"] if size_bytes else []) + (["why"] if wide else [])
        rows = [[*_cells(one, size_bytes, epoch), *([one.why] if wide else [])] for one in found]
        why = {len(columns) - 1} if wide else set()
        table(out, columns, rows, text={0, *why}, wrapped=why)
        if not wide:
            say(out, *(f"{one.strategy}: {one.why}" for one in found), "")
        if size_bytes:
            say(out, _memory_words(machines.network), style="dim")
            if given.network is None and len({one.setup.reduces for one in found}) > 1:
                say(out, _network_words(machines.network), style="dim")
        best = "Throughput alone does not decide. Add --recipe and --target to compare the time to an accuracy."
        say(out, best, style="dim")

    told = {
        "headline": headline,
        "machines": describe(learners),
        "strategies": [one.as_json(size_bytes, _epoch_s(one, epoch)) for one in found],
        "slow_learners": None if helps is None else helps.as_json(),
        **({} if machines.staged is None else {"parallel": machines.staged.as_json()}),
    }
    answer(given, told, show)


def _network_words(network: Network) -> str:
    free = network.port_bytes_per_s == math.inf
    links = "free communication" if free else "the links of --learner-bandwidth and --server-bandwidth"
    return (
        f"the networks differ: servers use {links}, all-reduces use the topology {network.topology}; "
        "--network RATE,LATENCY sets the same network for both"
    )


def _memory_words(network: Network) -> str:
    shards = f"; each of the {network.shards} servers holds a part of each vector" if network.shards > 1 else ""
    return (
        f"memory: number of vectors of {format_size(network.size_bytes)} that the server holds: gradients, "
        f"weights, and 2 for SGD with momentum (4 for Adam){shards}"
    )


def _epoch_s(one: Diagnosis, epoch: float | None) -> float | None:
    """`epoch`: minibatches in one."""
    return None if epoch is None or one.result is None else epoch / one.result.minibatches_per_s


def _cells(one: Diagnosis, size_bytes: int, epoch: float | None) -> list[str]:
    result = one.result
    cells = [one.strategy, "no update", "-", "-", "-", "-"]
    if result is not None:
        cells = [
            one.strategy,
            f"{result.minibatches_per_s:.4g}",
            format_seconds(result.seconds_per_update),
            f"{result.staleness_mean:.2f}",
            percent(result.wait_share + result.send_share, 0),
            percent(result.waste_share, 0),
        ]
    if epoch:
        epoch_s = _epoch_s(one, epoch)
        cells.append("-" if epoch_s is None else format_seconds(epoch_s))
    if size_bytes:
        memory = one.server_bytes(size_bytes)
        cells.append("-" if memory is None else format_size(memory))
    return cells


COMMAND = Command(
    summary="compare strategies on one simulated cluster, and explain what limits each",
    about="""Compare strategies on the same simulated cluster, with the same random numbers, and show what limits each:
the cause whose removal would gain the most throughput. Several --learners, or a range like k-sync:1..8, make a sweep: a
table with the theoretical values, and a chart (--svg). With --recipe and --target, each strategy trains the model in
virtual time; the result says which one reaches the target first, how certain that is, why, and what to use. A chart of
error against time is written to the output folder.""",
    examples=(
        "compare --learners 8 --compute pareto:2,1",
        "compare --learners 8 --compute gamma:1,0.1 --speeds 1,1,1,0.3333",
        "compare full-sync async ring --learners 16 --size 100MB --network 10Gbit/s",
        "compare full-sync async --learners 2 4 8 16 --compute exp:1 --updates 5000 --svg ratio.svg",
        "compare ring k-sync:6 k-async:4 --recipe digits-mlp --learners 8 --epochs 5 --target 0.8 --seeds 3",
    ),
    usage="%(prog)s [STRATEGY ...] [--learners P ...] [--compute LAW] [--recipe RECIPE --target X --seeds N] [options]",
    options=(
        option(
            "strategies",
            nargs="*",
            metavar="STRATEGY",
            help="strategies (default: some of each kind); k-sync:1..8 stands for eight strategies",
        ),
        option("--updates", read=parse_count, metavar="N", help="updates per strategy, as in simulate"),
        option(
            "--minibatches",
            read=parse_count,
            metavar="N",
            help="minibatches per learner (default 500, fewer for large simulations)",
        ),
        *MACHINE_OPTIONS,
        estimates.CONFIRM,
        *SWEEP_OPTIONS,
        *RECIPE_OPTIONS,
        option(
            "--seeds",
            read=parse_count,
            metavar="N",
            help="training runs per strategy, each with another seed (default 1)",
        ),
    ),
    sections=SECTIONS,
    fields=FIELDS,
    run=_run,
)
