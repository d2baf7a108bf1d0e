"""offbeat compare: strategies side by side on one cluster with the same draws."""

from __future__ import annotations

import argparse
import math
from typing import NamedTuple

from offbeat.commands.base import Command, busy, console, heading, json_argument, print_json, reader, say
from offbeat.commands.cluster import add_cluster_arguments, cluster_of, setup_of
from offbeat.commands.race import race
from offbeat.commands.sweep import add_sweep_arguments, batch_of, is_sweep, lines_of, one_count, sweep
from offbeat.commands.virtual import add_recipe_arguments, refuse_without_recipe
from offbeat.errors import RequestError
from offbeat.number_format import format_seconds, format_size
from offbeat.policies.memory import vectors_of
from offbeat.simulate.compare import MachineSummary, WhatIf, advise, describe, describe_machines, what_if, why
from offbeat.simulate.limits import Limit, limit_of
from offbeat.simulate.result import Result
from offbeat.simulate.server import StandsStillError
from offbeat.simulate.setup import Setup
from offbeat.spec import count_of, parse_count
from offbeat.strategy import line_up

_WIDE = 140


class _Row(NamedTuple):
    """What was found of one strategy."""

    setup: Setup
    result: Result | None  # none: no update would ever come, and `note` says why
    limit: Limit | None = None
    note: str = ""

    @property
    def strategy(self) -> str:
        return self.setup.strategy

    @property
    def why(self) -> str:
        if self.result is None or self.limit is None:
            return self.note
        return f"{self.limit.text(self.result.full_share)}; {why(self.result)}"

    def server_bytes(self, size_bytes: int) -> int | None:
        """Memory of all servers together, with SGD's momentum."""
        if self.setup.reduces or not size_bytes:
            return None
        return vectors_of(self.setup.policy(), self.setup.cluster.learners).size_bytes(size_bytes)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "%(prog)s [STRATEGY ...] [--learners P ...] [--compute LAW] [--recipe RECIPE --target X --seeds N] [options]"
    )
    parser.add_argument(
        "strategies", nargs="*", metavar="STRATEGY", help="left out: some of each kind; k-sync:1..8 is eight of them"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--updates", type=reader(parse_count), metavar="N", help="of each strategy, as in simulate")
    length.add_argument(
        "--minibatches",
        type=reader(parse_count),
        metavar="N",
        help="of each learner (default 500, within bounds that keep a simulation short)",
    )
    add_cluster_arguments(parser)
    add_sweep_arguments(parser)
    json_argument(parser)
    add_recipe_arguments(parser)
    parser.add_argument("--seeds", type=reader(parse_count), metavar="N", help="runs of each (default 1)")


def _run(given: argparse.Namespace) -> None:
    lines = [*given.strategies, *given.late_words]
    if given.recipe is not None:
        one_count(given, "--recipe")
        if given.updates is not None:
            raise RequestError("--updates is not for a recipe: it has --epochs")
        given.strategies = lines_of(lines)
        race(given)
        return
    if is_sweep(given, lines):
        sweep(given, lines)
        return
    epoch = None if given.epoch_samples is None else given.epoch_samples / batch_of(given)
    refuse_without_recipe(given)
    cluster = cluster_of(given)
    setups = [setup_of(given, name, cluster) for name in lines_of(lines) or line_up("compare", cluster.learners)]
    with busy("simulating"):
        machines = describe_machines(cluster)
        rows = []
        for setup in setups:
            updates = given.updates or setup.updates_for(given.minibatches)
            try:
                rows.append(_Row(setup, setup.run(updates), limit_of(setup, machines, updates)))
            except StandsStillError as error:
                rows.append(_Row(setup, None, note=str(error)))
        subject = _subject(rows)
        found = _advised(_subject([row for row in rows if not row.setup.reduces]), machines, given.minibatches)
    headline = "no strategy makes an update on this cluster"
    if subject is not None and subject.result is not None and subject.limit is not None:
        headline = f"{subject.strategy}: {subject.limit.text(subject.result.full_share)}"
    if given.json:
        print_json(_as_json(rows, headline, describe(machines), found, given.size, epoch))
        return
    out = console()
    heading(out, f"{count_of(cluster.learners, 'learner')}, {cluster.law.text}, seed {given.seed}")
    say(out, headline)
    say(out, describe(machines))
    if found is not None:
        for line in advise(found):
            say(out, line)
    out.print()
    wide = out.width >= _WIDE
    _table(rows, wide, given.size, epoch)
    if not wide:
        for row in rows:
            say(out, f"{row.strategy}: {row.why}")
        out.print()
    if given.size:
        say(out, _memory_words(given), style="dim")
        if given.network is None and len({row.setup.reduces for row in rows}) > 1:
            say(out, _network_words(given), style="dim")
    say(out, "Which is best needs accuracy: more gradients a second may be worth less each (--recipe).", style="dim")


def _subject(rows: list[_Row]) -> _Row | None:
    """The strategy of the headline: one that waits for all, or else the first."""
    made = [row for row in rows if row.result is not None]
    return next(iter([*(row for row in made if row.setup.waits_for_all), *made]), None)


def _advised(subject: _Row | None, machines: MachineSummary, minibatches: int | None) -> WhatIf | None:
    """What could be done about slow learners, where something can be gained by it."""
    if subject is None or not machines.slow:
        return None
    found = what_if(subject.strategy, subject.setup.cluster, machines, minibatches)
    return found if found.as_fast > 1.05 * found.as_it_is else None


def _network_words(given: argparse.Namespace) -> str:
    ends = [given.learner_bandwidth, given.server_bandwidth]
    links = "links that take no time" if all(map(math.isinf, ends)) else "the links of --learner-, --server-bandwidth"
    return (
        f"networks differ: servers have {links}, all-reduces the topology {given.topology}; "
        "--network RATE,LATENCY gives all the same"
    )


def _memory_words(given: argparse.Namespace) -> str:
    shards = f"; each of the {given.shards} servers has its part of it" if given.shards > 1 else ""
    return (
        f"memory: what the server keeps in vectors of {format_size(given.size)}: gradients, weights, and 2 of momentum "
        f"(SGD; Adam has 4){shards}"
    )


def _table(rows: list[_Row], wide: bool, size_bytes: int, epoch: float | None) -> None:
    """`epoch`: minibatches in one."""
    from rich import box
    from rich.table import Table

    out = console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    columns = ["gradients/s", "s/update", "staleness", "waiting", "wasted"]
    columns += (["epoch"] if epoch else []) + (["memory"] if size_bytes else [])
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    if wide:
        table.add_column("why")
    for row in rows:
        result = row.result
        cells = ["no update", "-", "-", "-", "-"]
        if result is not None:
            cells = [
                f"{result.minibatches_per_s:.4g}",
                format_seconds(result.seconds_per_update),
                f"{result.staleness_mean:.2f}",
                f"{100 * (result.wait_share + result.send_share):.0f} %",
                f"{100 * result.waste_share:.0f} %",
            ]
        if epoch:
            cells.append("-" if result is None else format_seconds(epoch / result.minibatches_per_s))
        memory = row.server_bytes(size_bytes)
        if size_bytes:
            cells.append("-" if memory is None else format_size(memory))
        table.add_row(row.strategy, *cells, *([row.why] if wide else []))
    out.print(table)


def _as_json(
    rows: list[_Row], headline: str, machines: str, found: WhatIf | None, size_bytes: int, epoch: float | None
) -> dict[str, object]:
    listed = [
        (
            row.result.as_json() | row.result.network_json()
            if row.result is not None
            else {"strategy": row.strategy, "updates": 0}
        )
        | {
            "limited_by": row.limit.reason if row.limit else None,
            "gains_without": dict(row.limit.gains) if row.limit else {},
            "epoch_s": None if epoch is None or row.result is None else epoch / row.result.minibatches_per_s,
            "server_bytes": row.server_bytes(size_bytes),
            "why": row.why,
        }
        for row in rows
    ]
    advice = None
    if found is not None:
        advice = {
            "strategy": found.strategy,
            "learners": list(found.slow),
            "times_slower": found.slower,
            "minibatches_per_s": found.as_it_is,
            "if_as_fast": found.as_fast,
            "if_dropped": found.without,
            "if_given_less": found.lighter,
            "shares_of_work": list(found.shares),
            "share_of_loss": found.share_of_loss,
            "text": advise(found),
        }
    return {"headline": headline, "machines": machines, "strategies": listed, "slow_learners": advice}


COMMAND = Command(
    summary="put strategies side by side on one simulated cluster, and say why they differ",
    about="""Put strategies side by side on the same simulated cluster with the same draws, and say what limits each:
what gains most throughput if it is taken away. With several --learners, or a range like k-sync:1..8, it is a sweep: a
table beside the theory, and a picture (--svg). With --recipe and --target they are really trained on that clock: which
is first at the accuracy, how sure that is, why, and what to use. The picture of error against time is in the folder
that it names.""",
    examples=(
        "compare --learners 8 --compute pareto:2,1",
        "compare --learners 8 --compute gamma:1,0.1 --speeds 1,1,1,0.3333",
        "compare full-sync async ring --learners 16 --size 100MB --network 10Gbit/s",
        "compare full-sync async --learners 2 4 8 16 --compute exp:1 --updates 5000 --svg ratio.svg",
        "compare ring k-sync:6 k-async:4 --recipe digits-mlp --learners 8 --epochs 5 --target 0.8 --seeds 3",
    ),
    arguments=_arguments,
    run=_run,
)
