"""offbeat compare: strategies side by side on one cluster with the same draws."""

from __future__ import annotations

import argparse

from offbeat.commands.base import Command, busy, console, heading, json_argument, print_json, reader, say
from offbeat.commands.cluster import add_cluster_arguments, cluster_of, simulate
from offbeat.commands.race import race
from offbeat.commands.virtual import add_recipe_arguments, refuse_without_recipe
from offbeat.policies import create
from offbeat.simulate.compare import WhatIf, advise, describe, horizon_s, look_at, what_if, why
from offbeat.simulate.result import Result
from offbeat.spec import count_of, parse_count
from offbeat.strategy import ALL_REDUCE, line_up, simulated_family_of

_WIDE = 100


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "%(prog)s [STRATEGY ...] [--learners P] [--compute LAW] [--recipe RECIPE --target X --seeds N] [options]"
    )
    parser.add_argument("strategies", nargs="*", metavar="STRATEGY", help="left out: some of each kind")
    parser.add_argument(
        "--minibatches", type=reader(parse_count), metavar="N", help="of a typical learner (default 500)"
    )
    add_cluster_arguments(parser)
    json_argument(parser)
    add_recipe_arguments(parser)
    parser.add_argument("--seeds", type=reader(parse_count), metavar="N", help="runs of each (default 1)")


def _run(given: argparse.Namespace) -> None:
    if given.recipe is not None:
        race(given)
        return
    refuse_without_recipe(given)
    given.minibatches = given.minibatches or 500
    cluster = cluster_of(given)
    names = given.strategies or line_up("compare", cluster.learners)
    families = [simulated_family_of(name) for name in names]
    with busy("simulating"):
        machines = look_at(cluster)
        seconds = horizon_s(machines, given.minibatches)
        results = [
            simulate(given, name, cluster, updates=given.minibatches, until_s=seconds)
            if family == ALL_REDUCE
            else simulate(given, name, cluster, updates=10**9, until_s=seconds)
            for name, family in zip(names, families, strict=True)
        ]
        found = None
        subject = _subject(names, families, cluster.learners)
        if machines.slow and subject is not None:
            found = what_if(subject, cluster, machines, seconds)
            found = found if found.as_it_is else None  # nothing was applied: nothing to compare with
    if given.json:
        print_json(_as_json(results, describe(machines), found))
        return
    out = console()
    heading(out, f"{count_of(cluster.learners, 'learner')}, {cluster.law.text}, seed {given.seed}")
    say(out, describe(machines))
    if found is not None:
        for line in advise(found):
            say(out, line)
    out.print()
    wide = out.width >= _WIDE
    _table(results, wide)
    if not wide:
        for result in results:
            say(out, f"{result.strategy}: {why(result)}")
        out.print()
    say(out, "Which is best needs accuracy: more gradients a second may be worth less each (--recipe).", style="dim")


def _subject(names: list[str], families: list[str], learners: int) -> str | None:
    """The policy whose loss to slow learners is looked at: one that waits for all, or else the first.

    An all-reduce waits like full-sync. A policy that needs weights cannot be simulated.
    """
    policies = [name for name, family in zip(names, families, strict=True) if family != ALL_REDUCE]
    waits = [name for name in policies if create(name, expect=learners).waits_for_all(learners)]
    return next(iter([*waits, *(["full-sync"] if ALL_REDUCE in families else []), *policies]), None)


def _table(results: list[Result], wide: bool) -> None:
    from rich import box
    from rich.table import Table

    out = console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    for column in ("gradients/s", "updates/s", "staleness", "waiting", "wasted"):
        table.add_column(column, justify="right", no_wrap=True)
    if wide:
        table.add_column("why")
    for result in results:
        table.add_row(
            result.strategy,
            f"{result.minibatches_per_s:.2f}",
            f"{1 / result.seconds_per_update:.2f}" if result.updates else "0",
            f"{result.staleness_mean:.2f}",
            f"{100 * (result.wait_share + result.send_share):.0f} %",
            f"{100 * result.waste_share:.0f} %",
            *([why(result)] if wide else []),
        )
    out.print(table)


def _as_json(results: list[Result], machines: str, found: WhatIf | None) -> dict[str, object]:
    rows = [result.as_json() | {"why": why(result)} for result in results]
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
    return {"machines": machines, "strategies": rows, "slow_learners": advice}


COMMAND = Command(
    summary="put strategies side by side on one simulated cluster, and say why they differ",
    about="""Put strategies side by side on the same simulated cluster with the same draws, and say why they differ.
With --recipe and --target they are really trained on that clock: which is first at the accuracy, how sure that is, why,
and what to use. The picture of error against time is in the folder that it names.""",
    examples=(
        "compare --learners 8 --compute pareto:2,1",
        "compare --learners 8 --compute gamma:1,0.1 --speeds 1,1,1,0.3333",
        "compare full-sync k-async:2 async --learners 4 --compute constant:1",
        "compare ring k-sync:6 k-async:4 --recipe digits-mlp --learners 8 --epochs 5 --target 0.8 --seeds 3",
    ),
    arguments=_arguments,
    run=_run,
)
