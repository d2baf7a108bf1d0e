"""offbeat recipes: the built-in recipes, and each as a file to start one's own from."""

from __future__ import annotations

import argparse

import msgspec

from offbeat.commands.base import Command, Terminal, answer, facts, option
from offbeat.errors import unknown
from offbeat.train.config_files import as_toml
from offbeat.train.recipes import RECIPES


def _run(given: argparse.Namespace) -> None:
    known = RECIPES
    if given.name is not None and given.name not in known:
        raise unknown("recipe", given.name, known)
    chosen = known if given.name is None else {given.name: known[given.name]}
    rows = [
        {"name": name, "summary": recipe.summary, "config": msgspec.to_builtins(recipe.config)}
        for name, recipe in chosen.items()
    ]

    def show(out: Terminal) -> None:
        if given.name is None:
            facts(out, [(name, recipe.summary) for name, recipe in known.items()])
        else:
            print(f"# {known[given.name].summary}\n{as_toml(known[given.name].config)}", end="")

    answer(given, {"recipes": rows}, show)


COMMAND = Command(
    summary="list the built-in recipes, or print one as a TOML file",
    about="List the built-in recipes of offbeat train, or print one as a TOML file: save, change and train with it.",
    examples=("recipes", "recipes digits-cnn"),
    options=(option("name", nargs="?", help="recipe to print as a TOML file (default: list all)"),),
    run=_run,
)
