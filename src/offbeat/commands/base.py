"""What commands share: how one is described, how it reads its words, how it prints."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO, TypeAlias

from offbeat import spec as grammar
from offbeat.errors import RequestError

if TYPE_CHECKING:
    from rich.console import Console

Terminal: TypeAlias = "Console"  # rich's, which is loaded only when something is printed
_LONG_S = 2.0  # what takes longer says what it does


class Option(NamedTuple):
    """An option or argument of a command: what argparse's `add_argument` is given, and the title it stands under."""

    names: tuple[str, ...]
    keywords: Mapping[str, Any]
    group: str


def option(*names: str, read: Callable[[str], Any] = str, group: str = "", **keywords: Any) -> Option:
    """`read` makes the value of a word, and refuses a wrong one with a `RequestError`."""
    return Option(names, keywords if read is str else {**keywords, "type": reader(read)}, group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One row of the table of commands. All take --json and --plugin as well."""

    summary: str
    about: str
    examples: tuple[str, ...]
    options: Sequence[Option] = ()
    sections: Collection[str] = ()  # of a recipe, whose fields are options too
    fields: Collection[str] = ()  # and single fields of it
    several: Collection[str] = ()  # of these fields, those that may be given several values
    usage: str | None = None
    run: Callable[[argparse.Namespace], None]


def reader(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """For argparse, which keeps the words of this exception only."""

    def checked(text: str) -> Any:
        try:
            return read(text)
        except RequestError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def refuse(given: argparse.Namespace, names: Collection[str], why: str) -> None:
    """Options that say nothing beside the others, where they were given."""
    for name in names:
        if getattr(given, name, None):
            raise RequestError(f"--{name.replace('_', '-')} {why}")


def read_accuracy(text: str) -> float:
    return grammar.parse_number(text, lambda x: 0 < x <= 1, "expected an accuracy above 0 and at most 1, like 0.95")


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


def answer(given: argparse.Namespace, told: Any, show: Callable[[Terminal], None]) -> None:
    """Print what was found: as one JSON object where --json asks for it, and else as `show` does."""
    if given.json:
        print_json(told)
    else:
        show(console())


def terminal_columns() -> int:
    """As shutil.get_terminal_size tells it, which would load every format of archives."""
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told) > 0:
        return int(told)
    try:
        return os.get_terminal_size(sys.__stdout__.fileno()).columns or 80 if sys.__stdout__ else 80
    except (OSError, ValueError):
        return 80


def console() -> Terminal:
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with 1; `main` knows what to do
            raise

    # Into a file or a pipe there is no width to keep to: lines stay whole.
    width = terminal_columns() if sys.stdout.isatty() else 200
    return Plain(width=width, highlight=False, emoji=False)


def busy(what: str) -> AbstractContextManager[object]:
    """A sign of life on a terminal while a long command works; nothing elsewhere."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(what)


@contextmanager
def stages(first: str, quiet_s: float = _LONG_S) -> Iterator[Callable[[str], None]]:
    """What is being worked on, told by stages: a moving line on a terminal; elsewhere plain lines, if it takes long."""
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(first) as status:
            yield lambda text: status.update(text)
        return
    current, spoke_at = first, math.inf

    def speak() -> None:
        nonlocal spoke_at
        spoke_at = time.monotonic()
        print(f"offbeat: {current} ...", file=sys.stderr, flush=True)

    def tell(text: str) -> None:
        nonlocal current
        current = text
        if time.monotonic() - spoke_at > 5 * _LONG_S:
            speak()

    timer = threading.Timer(quiet_s, speak)
    timer.daemon = True
    timer.start()
    try:
        yield tell
    finally:
        timer.cancel()
        timer.join()


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """One line on a terminal that says what is measured. Nothing moves by itself: a spinner would take from a core."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return

    def show(text: str) -> None:
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()

    try:
        yield show
    finally:
        show("")


def print_line(out: TextIO, line: str) -> None:
    """A line that cannot be encoded is escaped."""
    encoding = getattr(out, "encoding", None) or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding), file=out, flush=True)


def line_printer(width: int, *, to_stderr: bool) -> Callable[[str, str], None]:
    """Prints what several programs print, each line with the name of the one that printed it."""
    out = sys.stderr if to_stderr else sys.stdout
    return lambda name, line: print_line(out, f"{name.ljust(width)} | {line}")


def say(out: Terminal, *lines: str, **style: Any) -> None:
    """Lines as they are: no markup in them, and not broken."""
    for line in lines:
        out.print(line, markup=False, soft_wrap=True, **style)


def heading(out: Terminal, text: str) -> None:
    say(out, text, style="bold")
    out.print()


def table(
    out: Terminal,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    text: Collection[int] = (0,),
    wrapped: Collection[int] = (),
) -> None:
    """Columns of numbers are aligned right. `text`: which columns are not; `wrapped`: which may take several lines."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        justify: Literal["left", "right"] = "left" if number in text else "right"
        made.add_column(column, justify=justify, no_wrap=number not in wrapped, overflow="fold")
    for row in rows:
        made.add_row(*row)
    out.print(made)


def facts(out: Terminal, rows: Sequence[tuple[str, str]]) -> None:
    """Labels and what they stand for."""
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        say(out, label.ljust(width), style="bold", end="  ")
        say(out, text)


def row_json(name: str, summary: str, params: Sequence[grammar.Param]) -> dict[str, Any]:
    return {"name": name, "summary": summary, "options": {param.name: param.help for param in params}}


def print_params(out: Terminal, params: Sequence[grammar.Param]) -> None:
    for param in params:
        label = param.name.upper() if param.positional else f"{param.name}="
        say(out, f"    {label.ljust(17)} {param.help}", style="dim")


def check_writable(path: Path) -> None:
    """`RequestError` if a file of this name cannot be written, before the work that it is to hold."""
    import tempfile  # takes as long to load as the rest of this file

    if path.is_dir() or not path.parent.is_dir():
        raise RequestError(f"cannot write {path}: it is a folder, or its folder does not exist")
    try:
        with tempfile.TemporaryFile(dir=path.parent):  # beside it: the file itself is replaced when all is there
            pass
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}") from None


def write_file(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}") from None


def ranks_of(lines: Sequence[str]) -> int | None:
    """How many ranks the lines themselves speak of: by a shape (torus:4x2) or an order (ring:order=0-2-1).

    Two that disagree are refused, since no number of ranks would do.
    """
    from offbeat import topology
    from offbeat.schedules.algorithms import algorithms, parse_orders

    shaped = {row.name for row in algorithms().values() if any(param.name == "shape" for param in row.params)}
    said: dict[str, int] = {}
    for line in lines:
        spec = grammar.parse(line)
        order = dict(spec.options).get("order")
        try:
            if spec.name in shaped and spec.args:
                said[line] = math.prod(grammar.parse_shape(spec.args[0]))
            elif order is not None:
                said[line] = len(parse_orders(order)[0])
            elif (count := topology.ranks_of(line)) is not None:
                said[line] = count
        except RequestError as error:
            raise RequestError(f"'{spec}': {error}") from None
    if len(set(said.values())) > 1:
        raise RequestError(" but ".join(f"'{line}' has {count} ranks" for line, count in said.items()))
    return next(iter(said.values()), None)
