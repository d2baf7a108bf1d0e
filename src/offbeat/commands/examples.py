"""offbeat examples: complete programs that come with the package, and each as a file to start from.

They are the files of the repository's folder examples/. In a wheel they are in the package (pyproject.toml puts them
there); where the package is used from the repository, that folder itself is read.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

from offbeat.commands.base import Command, answer, facts, option, say
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


def _run(given: argparse.Namespace) -> None:
    known = examples()
    if given.name is None:
        rows = [(name, summary_of(path)) for name, path in known.items()]
        told = {"examples": [{"name": name, "summary": summary} for name, summary in rows]}
        answer(given, told, lambda out: facts(out, rows))
        return
    name = given.name.removesuffix(".py")
    if name not in known:
        raise unknown("example", name, known)
    target, summary = Path(f"{name}.py"), summary_of(known[name])
    _copy(known[name], target)
    answer(
        given,
        {"examples": [{"name": name, "summary": summary}], "written": str(target)},
        lambda out: say(out, f"wrote {target}: {summary}", "The first lines of the file say how to run it."),
    )


def _copy(source: Path, target: Path) -> None:
    text = source.read_text(encoding="utf-8")
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RequestError(
            f"{target} already exists in this folder; rename or remove it, or change to another folder"
        ) from None
    except OSError as error:
        raise RequestError(f"cannot write {target}: {error.strerror}") from None


COMMAND = Command(
    summary="list the example programs, or copy one into the current folder",
    about="List the example programs that come with offbeat, or copy one into the current folder to start from.",
    examples=("examples digits", "examples"),
    options=(option("name", nargs="?", help="example to copy into the current folder (default: list all)"),),
    run=_run,
)
