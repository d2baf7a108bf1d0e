"""offbeat recipes: the built-in recipes, and each as a file to start one's own from."""

from __future__ import annotations

import argparse

import msgspec

from offbeat.commands.base import Command, console, json_argument, print_json, say
from offbeat.errors import unknown
from offbeat.train.config_files import as_toml
from offbeat.train.recipes import RECIPES


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="one of them, printed as a TOML file; left out: all, one line each")
    json_argument(parser)


def _run(given: argparse.Namespace) -> None:
    known = RECIPES
    if given.name is not None and given.name not in known:
        raise unknown("recipe", given.name, known)
    chosen = list(known) if given.name is None else [given.name]
    if given.json:
        rows = [
            {"name": name, "summary": known[name].summary, "config": msgspec.to_builtins(known[name].config)}
            for name in chosen
        ]
        print_json({"recipes": rows})
        return
    if given.name is not None:
        print(f"# {known[given.name].summary}")
        print(as_toml(known[given.name].config), end="")
        return
    out = console()
    width = max(len(name) for name in chosen)
    for name in chosen:
        say(out, name.ljust(width), style="bold", end="  ")
        say(out, known[name].summary)


COMMAND = Command(
    summary="list the built-in recipes, or print one as a file to start from",
    about="List the built-in recipes of offbeat train, or print one as a TOML file: save it, change it, train it.",
    examples=("recipes", "recipes digits-cnn"),
    arguments=_arguments,
    run=_run,
)
