"""offbeat examples: complete programs that come with the package, and each as a file to start from.

They are the files of the repository's folder examples/. In a wheel they are in the package (pyproject.toml puts them
there); where the package is used from the repository, that folder itself is read.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

from offbeat.commands.base import Command, console, json_argument, print_json, say
from offbeat.errors import OffbeatError, RequestError, unknown

PACKAGE = Path(__file__).parents[1]
FOLDERS = (PACKAGE / "examples", PACKAGE.parents[1] / "examples")  # in a wheel; in the repository


def examples() -> dict[str, Path]:
    """The programs by name."""
    for folder in FOLDERS:
        if found := sorted(folder.glob("*.py")):
            return {path.stem: path for path in found}
    raise OffbeatError(f"this installation has no examples; they were expected in {FOLDERS[0]}")


def summary_of(path: Path) -> str:
    """The first line of a program's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="one of them, copied into the current folder; left out: list all")
    json_argument(parser)


def _run(given: argparse.Namespace) -> None:
    known = examples()
    if given.name is None:
        _list(known, given.json)
        return
    name = given.name.removesuffix(".py")
    if name not in known:
        raise unknown("example", name, known)
    source = known[name]
    target = Path(source.name)
    _copy(source, target)
    if given.json:
        print_json({"examples": [_row(source)], "written": str(target)})
        return
    out = console()
    say(out, f"wrote {target}: {summary_of(source)}")
    say(out, "The first lines of the file say how to run it.")


def _copy(source: Path, target: Path) -> None:
    text = source.read_text(encoding="utf-8")
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RequestError(f"{target} exists here: rename or remove it, or work in another folder") from None
    except OSError as error:
        raise RequestError(f"cannot write {target}: {error.strerror}") from None


def _list(known: dict[str, Path], as_json: bool) -> None:
    if as_json:
        print_json({"examples": [_row(path) for path in known.values()]})
        return
    out = console()
    width = max(len(name) for name in known)
    for name, path in known.items():
        say(out, name.ljust(width), style="bold", end="  ")
        say(out, summary_of(path))


def _row(path: Path) -> dict[str, str]:
    return {"name": path.stem, "summary": summary_of(path)}


COMMAND = Command(
    summary="list the example programs, or copy one into the current folder",
    about="List the example programs that come with offbeat, or copy one into the current folder to start from.",
    examples=("examples digits", "examples"),
    arguments=_arguments,
    run=_run,
)
