"""offbeat strategies: every one line that a run can be given."""

from __future__ import annotations

import argparse

from offbeat import plugins
from offbeat.commands.base import Command, console, json_argument, print_json, print_params, row_json, say
from offbeat.strategy import strategies
from offbeat.synonyms import unknown_strategy


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="one of them, with its options; left out: all, one line each")
    json_argument(parser)


def _run(given: argparse.Namespace) -> None:
    plugins.load_known()
    known = strategies()
    if given.name is not None and given.name not in known:
        raise unknown_strategy("strategy", given.name, known)
    chosen = list(known.values()) if given.name is None else [known[given.name]]
    if given.json:
        rows = [row_json(one.name, one.summary, one.params) | {"family": one.family, "examples": list(one.examples)}
                for one in chosen]  # fmt: skip
        print_json({"strategies": rows})
        return
    out = console()
    family = ""
    width = max(len(one.usage()) for one in chosen)
    for one in chosen:
        if given.name is None and one.family != family:
            family = one.family
            say(out, f"{family}:", style="bold")
        say(out, f"  {one.usage().ljust(width)}  {one.summary}")
        if given.name is not None:
            print_params(out, one.params)
            if one.examples:
                say(out, f"  for example: {', '.join(one.examples)}")


COMMAND = Command(
    summary="list every strategy, one line each, with its options",
    about="List every strategy a run can be given, with its options.",
    examples=("strategies", "strategies hierarchical", "strategies k-async"),
    arguments=_arguments,
    run=_run,
)
