"""The command `offbeat`: find the command, read its words, run it, turn errors into one line.

A person reads the terminal, nicely; `--json` prints one object on standard output and nothing else there.
Exit codes: 0 done, 1 failed, 2 the request was wrong.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from offbeat import __version__, plugins
from offbeat.commands.base import Command, option, terminal_columns
from offbeat.errors import OffbeatError, RequestError, nearest, unknown
from offbeat.processes.signals import terminable

GROUPS = {
    "train": ("train", "run"),
    "look at runs": ("watch", "report", "evaluate"),
    "predict": ("replay", "compare", "simulate"),
    "measure": ("bench", "profile", "partition", "calibrate", "lab"),
    "several hosts": ("keys", "work"),
    "reference": ("recipes", "strategies", "examples", "schedule", "pipeline", "topology"),
}
COMMANDS = tuple(name for names in GROUPS.values() for name in names)
# What to type first, in this order, in an empty folder; each is an example of its command, and tested as such.
START = (
    ("train --run-dir runs/digits", "train a small network on digits, with several learners"),
    ("report runs/digits", "write report.html: what each learner did, and when"),
    ("replay runs/digits --no-accuracy", "estimate the same run under other strategies"),
    ("compare --learners 8 --compute pareto:2,1", "simulate a cluster with stragglers"),
    ("examples digits", "copy an example script with its own training loop"),
    ("run --learners 2 --sync k-async:2 digits.py", "run it with a parameter server"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with terminable():
            _dispatch(words)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a reader that has gone is known, and not at exit
        if argv is None:
            gc.freeze()  # the process ends: to look for garbage among all modules would take longer than many commands
    except OffbeatError as error:
        return _fail(str(error), error.exit_code)
    except BrokenPipeError:  # the reader (`| head`) has gone; Python must not complain of it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except MemoryError:
        return _fail("out of memory; try fewer ranks or learners", 1)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in its buffer cannot be written
        return _fail(f"cannot write the output: {error.strerror}", 1)
    except KeyboardInterrupt:
        return 130
    return 0


def _fail(message: str, code: int) -> int:
    print(f"offbeat: {message}", file=sys.stderr)
    return code


def _dispatch(words: list[str]) -> None:
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return
    name, *rest = words
    if name == "--version":
        print(f"offbeat {__version__}")
        return
    if name not in COMMANDS:
        if name.startswith("-"):
            raise unknown("option", name, ["--help", "--version"])
        raise RequestError(f"{unknown('command', name, COMMANDS)} (offbeat --help lists them)")
    command = load(name)
    command.run(_parse(name, command, rest))


def load(name: str) -> Command:
    """The command of this name, from its file."""
    command = importlib.import_module(f"offbeat.commands.{name}").COMMAND
    assert isinstance(command, Command)
    return command


def _parse(name: str, command: Command, words: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog=f"offbeat {name}",
        usage=command.usage,
        description=command.about,
        epilog="examples:\n" + "\n".join(f"  offbeat {line}" for line in command.examples),
        formatter_class=partial(
            argparse.RawDescriptionHelpFormatter,
            max_help_position=26,
            width=min(110, terminal_columns()),
        ),
        allow_abbrev=False,
    )
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for names, keywords, group in (*command.options, *_COMMON):
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        groups[group].add_argument(*names, **keywords)
    if command.sections:
        from offbeat.train.arguments import add_arguments

        add_arguments(parser, sections=command.sections, also=command.fields, several=command.several)
    given, left_over = parser.parse_known_args(_join_negative(words))
    if left_over:
        word = left_over[0].partition("=")[0]
        kind = "option" if word.startswith("-") else "argument"
        hint = nearest(word, parser._option_string_actions) if kind == "option" else ""
        if kind == "argument" and "--slow" in words:
            hint = "; repeat the option for several delays: --slow A --slow B"
        if ".options." in word:  # of a model or a data set: their names are not known here
            hint = f"; write --set {word.removeprefix('--')}=VALUE"
        raise RequestError(f"{name}: unknown {kind} '{word}'{hint or f'; see offbeat {name} --help'}")
    return given


def _join_negative(words: list[str]) -> list[str]:
    """`--size -3MB` as `--size=-3MB`, so that it is read as a (wrong) value and not as an option."""
    joined: list[str] = []
    for place, word in enumerate(words):
        if word == "--":  # what follows is another program's
            return [*joined, *words[place:]]
        if re.match(r"-\.?\d", word) and joined and joined[-1].startswith("--") and "=" not in joined[-1]:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


class _Plugin(argparse.Action):
    """Loaded as soon as it is read, so that options which name a strategy know it."""

    def __call__(self, parser: object, namespace: object, values: object, option_string: str | None = None) -> None:
        plugins.add(str(values))


_COMMON = (
    option("--json", action="store_true", help="print one JSON object"),
    option(
        "--plugin", action=_Plugin, metavar="FILE_OR_MODULE",
        help="load your own strategies from a file or module; repeatable",
    ),
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{self.prog.removeprefix('offbeat ')}: {message.removeprefix('argument ')}")


def _overview() -> str:
    width = max(len(name) for name in COMMANDS) + 2
    lines = ["offbeat: distributed training for PyTorch; choose the synchronisation strategy with one flag, --sync."]
    for title, names in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name.ljust(width)}{load(name).summary}" for name in names)]
    width = max(len(line) for line, _ in START) + 2
    lines += ["", "start here:", *(f"  offbeat {line.ljust(width)}{why}" for line, why in START)]
    lines += [
        "",
        "offbeat COMMAND --help explains a command. Every command takes --json.",
    ]
    return "\n".join(lines)
