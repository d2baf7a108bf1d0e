"""offbeat strategies: every one line that a run can be given."""

from __future__ import annotations

import argparse
from itertools import groupby

from offbeat import plugins
from offbeat.commands.base import Command, Terminal, answer, option, print_params, row_json, say
from offbeat.strategy import strategies
from offbeat.synonyms import unknown_strategy


def _run(given: argparse.Namespace) -> None:
    plugins.load_known()
    known = strategies()
    if given.name is not None and given.name not in known:
        raise unknown_strategy("strategy", given.name, known)
    chosen = list(known.values()) if given.name is None else [known[given.name]]
    rows = [
        row_json(one.name, one.summary, one.params) | {"family": one.family, "examples": list(one.examples)}
        for one in chosen
    ]
    width = max(len(one.usage()) for one in chosen)

    def show(out: Terminal) -> None:
        for family, several in groupby(chosen, key=lambda one: one.family):
            if given.name is None:
                say(out, f"{family}:", style="bold")
            say(out, *(f"  {one.usage().ljust(width)}  {one.summary}" for one in several))
        if given.name is not None:
            print_params(out, chosen[0].params)
            if chosen[0].examples:
                say(out, f"  for example: {', '.join(chosen[0].examples)}")

    answer(given, {"strategies": rows}, show)


COMMAND = Command(
    summary="list every strategy, or explain one and its options",
    about="List every strategy that --sync accepts, or explain one and its options.",
    examples=("strategies", "strategies hierarchical", "strategies k-async"),
    options=(option("name", nargs="?", help="strategy to explain (default: list all)"),),
    run=_run,
)
