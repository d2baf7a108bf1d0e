"""Every field of a config as an option of the command line.

`--train.batch-size 64`, `--sync ring`, `--set model.options.hidden=128`; the usual ones have a short form, `--epochs`.
The names, the choices and the help are the fields' own. Nothing is converted or checked here:
`config_files.override` does that, so that a wrong word is refused with one text wherever it was written. Nothing here
loads torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any, get_origin

from offbeat.errors import RequestError
from offbeat.runs.run_folder import RENAMED
from offbeat.train.config import all_fields
from offbeat.train.config_files import flag

SHORT = {
    "train.epochs": "--epochs",
    "train.batch_size": "--batch-size",
    "train.lr": "--lr",
    "train.split": "--split",
    "train.precision": "--precision",
    "train.compute": "--compute",
    "train.optimizer": "--optimizer",
    "train.memory": "--memory",
    "data.workers": "--workers",
}
_TITLES = {"": "the run", "model": "the model", "data": "the data", "train": "the training", "save": "what is saved"}
SECTIONS = tuple(_TITLES)
_METAVARS = {int: "N", float: "X", bool: "true|false", "sync": "STRATEGY", "slow": "HOW", "train.steps": "X,X"}
_DEST = "config:"  # before the names in the namespace, so that a command's own never meet them


def add_arguments(
    parser: argparse.ArgumentParser,
    *,
    sections: Collection[str] = SECTIONS,
    also: Collection[str] = (),
    several: Collection[str] = (),
) -> None:
    """Add them all, or those of some sections, in groups; those that are not given leave no trace.

    `also`: fields of the run itself, where the section of the run is left out. `several`: fields that take several
    values, each of which is tried; then what was given is a list.
    """
    groups = {section: parser.add_argument_group(_TITLES[section]) for section in sections}
    for field in all_fields():
        section = field.key.rpartition(".")[0]
        if get_origin(field.kind) is dict or field.key == "plugins":
            continue  # a dict: by --set; plugins: every command has --plugin
        if section not in groups and field.key not in also:
            continue
        group = groups.get(section, next(reversed(groups.values())))
        short = SHORT.get(field.key)
        names = [short] if short and short not in parser._option_string_actions else []  # a command's own is its own
        repeated = field.key == "slow"
        more: dict[str, Any] = {"nargs": "+"} if field.key in several else {}
        group.add_argument(
            *names,
            flag(field.key),
            dest=_DEST + field.key,
            action="append" if repeated else "store",
            default=argparse.SUPPRESS,
            metavar="NAME" if field.choices else _METAVARS.get(field.key) or _METAVARS.get(field.kind, "TEXT"),
            help=field.description.replace("%", "%%") + ("; repeat the option for several" if repeated else ""),
            **more,
        )
    if "train" in groups:
        for old, new in {**{flag(old): flag(new) for old, new in RENAMED.items()}, "--rate": "--lr"}.items():
            parser.add_argument(old, action=_Renamed, const=new, help=argparse.SUPPRESS)
    groups[next(iter(sections))].add_argument(
        "--set",
        dest=f"{_DEST}set",
        action="append",
        default=argparse.SUPPRESS,
        metavar="KEY=VALUE",
        help="set an option of the model or the data, like model.options.hidden=128; repeatable",
    )


class _Renamed(argparse.Action):
    """An option of version 0.1, which is refused with the name that it has now."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        raise RequestError(f"{self.option_strings[0]} is now called {self.const}")


def given(namespace: argparse.Namespace) -> dict[str, str | list[str]]:
    """What was given, by the fields' full names: what `config_files.override` takes."""
    found: dict[str, str | list[str]] = {}
    for name, value in vars(namespace).items():
        if name.startswith(_DEST) and name != f"{_DEST}set":
            found[name.removeprefix(_DEST)] = value
    for word in getattr(namespace, f"{_DEST}set", []):
        key, equals, value = word.partition("=")
        if not equals or not key.strip():
            raise RequestError(f"--set: expected KEY=VALUE, like model.options.hidden=128; got {word!r}")
        found[key.strip()] = value.strip()
    return found
