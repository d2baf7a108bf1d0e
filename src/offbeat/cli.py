"""The command `offbeat`: parse, call, print.

A person reads the terminal, nicely; `--json` prints one object on standard output and nothing else there.
Exit codes: 0 done, 1 failed, 2 the request was wrong. An error is one line that says what to do.

Rooms are imported by the command that needs them, so that every command starts quickly.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from offbeat import __version__
from offbeat import spec as grammar
from offbeat.errors import OffbeatError, RequestError, nearest, unknown
from offbeat.spec import count_of, format_rate, format_seconds, format_size, parse_count, parse_size

if TYPE_CHECKING:
    from rich.console import Console

    from offbeat.schedules import Price, Schedule
    from offbeat.schedules.ranking import Ranked
    from offbeat.topology import Topology

_CHUNK_STYLES = ("blue", "red", "cyan", "magenta", "yellow", "green", "bright_blue", "bright_red")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        _dispatch(words)
        sys.stdout.flush()  # here, where a reader that has gone is known, and not at exit
    except OffbeatError as error:
        print(f"offbeat: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader (`| head`) has gone; Python must not complain of it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    return 0


def _dispatch(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help", "help"):
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
    COMMANDS[name].run(_parse(name, COMMANDS[name], rest))


def _parse(name: str, command: Command, words: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog=f"offbeat {name}",
        description=command.about,
        epilog="examples:\n" + "\n".join(f"  offbeat {line}" for line in command.examples),
        formatter_class=_Help,
        allow_abbrev=False,
    )
    command.arguments(parser)
    known = [*parser._option_string_actions]
    given, left_over = parser.parse_known_args(words)
    if left_over:
        word = left_over[0].partition("=")[0]
        kind = "option" if word.startswith("-") else "argument"
        hint = nearest(word, known) if kind == "option" else ""
        raise RequestError(f"{name}: unknown {kind} '{word}'{hint or f'; see offbeat {name} --help'}")
    return given


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=min(110, shutil.get_terminal_size().columns))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{self.prog.removeprefix('offbeat ')}: {message.removeprefix('argument ')}")


def _reader(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """For argparse, which keeps the words of this exception only."""

    def checked(text: str) -> Any:
        try:
            return read(text)
        except RequestError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _overview() -> str:
    width = max(len(name) for name in COMMANDS) + 2
    lines = [
        "offbeat: distributed training for PyTorch in which how learners keep time with each other is one line.",
        "",
        "commands:",
        *(f"  {name.ljust(width)}{command.summary}" for name, command in COMMANDS.items()),
        "",
        "start here:",
        *(f"  offbeat {command.examples[0]}" for command in COMMANDS.values()),
        "",
        "offbeat COMMAND --help explains one. Most take --json. offbeat --version prints the version.",
    ]
    return "\n".join(lines)


def _console() -> Console:
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with 1; `main` knows what to do
            raise

    # Into a file or a pipe there is no width to keep to: lines stay whole.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 200
    return Plain(width=width, highlight=False)


def _busy(what: str) -> AbstractContextManager[object]:
    """A sign of life on a terminal while a long command works; nothing elsewhere."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(what)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


# --- offbeat schedule -----------------------------------------------------------------------------------------


def _schedule_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("algorithm", nargs="?", help="ring, torus:4x2, hierarchical:2x4, ...; left out: all are ranked")
    parser.add_argument(
        "--ranks", type=_reader(parse_count), metavar="P", help="how many (default: what a shape says, or 8)"
    )
    parser.add_argument("--size", type=_reader(parse_size), default=100_000_000, help="of the vector (default 100MB)")
    parser.add_argument(
        "--item-size",
        type=_reader(parse_count),
        metavar="BYTES",
        default=1,
        help="bytes that are not cut apart (default 1)",
    )
    parser.add_argument("--topology", default="uniform", help="see offbeat topology (default uniform)")
    parser.add_argument("--collective", default="all-reduce", help="all-reduce (default), all-gather, broadcast, ...")
    parser.add_argument("--root", type=int, metavar="RANK", default=0, help="of a broadcast or reduce (default 0)")
    parser.add_argument("--all", action="store_true", help="in the ranking, every shape and not only the best")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _schedule(given: argparse.Namespace) -> None:
    from offbeat import topology

    lines = [given.topology] if given.algorithm is None else [given.algorithm, given.topology]
    ranks = given.ranks or _ranks_of(lines) or 8
    if given.size % given.item_size:
        raise RequestError(
            f"schedule: --size {given.size} is not a whole number of items of {given.item_size} bytes (--item-size)"
        )
    machine = topology.build(given.topology, ranks=ranks)
    if given.algorithm is None:
        _rank_all(given, machine)
    else:
        _one_schedule(given, machine)


def _ranks_of(lines: Sequence[str]) -> int | None:
    """The ranks that a shape in one of the lines says, like torus:4x2 or cluster:4x8; dgx1 has 8."""
    for line in lines:
        spec = grammar.parse(line)
        if spec.args and re.fullmatch(r"\d+(x\d+)+", spec.args[0]):
            return math.prod(grammar.parse_shape(spec.args[0]))
    return None


def _one_schedule(given: argparse.Namespace, machine: Topology) -> None:
    from offbeat import schedules

    schedule = schedules.build(given.algorithm, ranks=machine.ranks, collective=given.collective, root=given.root)
    schedules.verify(schedule)
    cost = schedules.price(schedule, machine, given.size, given.item_size)
    bound_s = schedules.lower_bound_s(machine, given.size) if given.collective == "all-reduce" else None
    if given.svg is not None:
        _write(given.svg, schedules.svg(schedule))
    if given.json:
        _print_json(
            _price_json(schedule.name, schedule.ranks, cost)
            | {"collective": schedule.collective, "chunks": schedule.chunks, "lower_bound_s": bound_s}
            | {"size_bytes": given.size, "topology": machine.name}
        )
        return
    console = _console()
    size = format_size(given.size)
    _heading(
        console, f"{schedule.name} {schedule.collective}, {count_of(machine.ranks, 'rank')}, {size}, {machine.name}"
    )
    console.print(_coloured(schedules.grid(schedule)), soft_wrap=True)
    if cost.steps:
        console.print("+c2 <3 adds chunk 2 as it comes from rank 3, = overwrites", style="dim")
    console.print()
    for label, text in _facts(schedule, cost, given.size, bound_s):
        console.print(f"[bold]{label.ljust(11)}[/bold] ", end="")
        console.print(text, markup=False, soft_wrap=True)
    _print_rings(console, machine)
    if given.svg is not None:
        console.print(f"\ndrawn in {given.svg}", markup=False, soft_wrap=True)


def _facts(schedule: Schedule, cost: Price, size: int, bound_s: float | None) -> list[tuple[str, str]]:
    from offbeat.metrics import BUS_FACTORS, bus_bandwidth

    most = max(cost.bytes_per_rank)
    sent = f"{format_size(most)} by the busiest rank, {format_size(cost.bytes_total)} in all"
    took = f"{format_seconds(cost.seconds)}, {format_seconds(cost.latency_s)} of it latency"
    if bound_s:
        fewest = 2 * size * (schedule.ranks - 1) / schedule.ranks
        sent += f"; lower bound 2M(P-1)/P = {format_size(fewest)} a rank: {most / fewest:.2f}x"
        took += (
            f"; lower bound {format_seconds(bound_s)} (every link of every rank busy): {cost.seconds / bound_s:.2f}x"
        )
    facts = [
        ("proved", "every promise of the collective, by counting contributions"),
        ("steps", str(cost.steps)),
        ("sent", sent),
        ("time", took),
        ("bottleneck", cost.why()),
    ]
    if cost.seconds:
        bandwidth = bus_bandwidth(schedule.collective, schedule.ranks, size, cost.seconds)
        factor = BUS_FACTORS[schedule.collective].text
        facts.append(("bus", f"{format_rate(bandwidth)} = size / time * {factor}"))
    return facts


def _price_json(name: str, ranks: int, cost: Price) -> dict[str, Any]:
    return {
        "name": name,
        "ranks": ranks,
        "steps": cost.steps,
        "bytes_per_rank": list(cost.bytes_per_rank),
        "bytes_total": cost.bytes_total,
        "seconds": cost.seconds,
        "latency_s": cost.latency_s,
        "bottleneck": cost.bottleneck,
        "why": cost.why(),
    }


def _rank_all(given: argparse.Namespace, machine: Topology) -> None:
    from rich import box
    from rich.table import Table

    from offbeat.schedules.ranking import explain, rank

    if given.svg is not None or given.collective != "all-reduce" or given.root:
        raise RequestError("schedule: --svg, --collective and --root need an algorithm, like ring")
    with _busy(f"pricing every all-reduce on {count_of(machine.ranks, 'rank')}"):
        ranking = rank(machine, given.size, given.item_size, every_shape=given.all)
    if given.json:
        rows = [_price_json(ranked.line, machine.ranks, ranked.price) for ranked in ranking]
        _print_json({"topology": machine.name, "ranks": machine.ranks, "size_bytes": given.size, "ranking": rows})
        return
    console = _console()
    _heading(console, f"all-reduce of {format_size(given.size)} on {count_of(machine.ranks, 'rank')}, {machine.name}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("algorithm", "steps", "busiest rank sends", "time", "vs ring", "where the time goes"):
        table.add_column(column, justify="left" if column in ("algorithm", "where the time goes") else "right")
    flat = next(ranked for ranked in ranking if ranked.line == "ring")
    for ranked in ranking:
        cost = ranked.price
        table.add_row(
            _best_of(ranked, given.all),
            str(cost.steps),
            format_size(max(cost.bytes_per_rank)),
            format_seconds(cost.seconds),
            f"{flat.price.seconds / cost.seconds:.2f}x" if cost.seconds else "",
            cost.why(),
        )
    console.print(table)
    console.print(explain(ranking[0], flat), markup=False, soft_wrap=True)
    _print_rings(console, machine)


def _best_of(ranked: Ranked, every_shape: bool) -> str:
    """The label, and of how many shapes it was the best."""
    if every_shape or ranked.shapes == 1:
        return ranked.label
    tried = f"{ranked.tried} of {ranked.shapes}" if ranked.tried < ranked.shapes else str(ranked.shapes)
    return f"{ranked.label} (best of {tried})"


# --- offbeat topology ------------------------------------------------------------------------------------------


def _topology_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topology", nargs="?", help="dgx1, cluster:4x8,across=1GB/s, ...; left out: all are listed")
    parser.add_argument(
        "--ranks", type=_reader(parse_count), metavar="P", help="how many (default: what a shape says, or 8)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _topology(given: argparse.Namespace) -> None:
    from offbeat import topology

    if given.topology is None:
        _list_topologies(given)
        return
    machine = topology.build(given.topology, ranks=given.ranks or _ranks_of([given.topology]) or 8)
    if given.json:
        _print_json(_topology_json(machine))
        return
    console = _console()
    _heading(console, f"{machine.name}, {count_of(machine.ranks, 'rank')}")
    alike: dict[tuple[float, float, int], list[str]] = {}
    for edge, link in machine.links.items():
        alike.setdefault((link.bytes_per_s, link.latency_s, link.lanes), []).append(topology.edge_name(edge))
    for (rate, latency, lanes), names in sorted(alike.items(), reverse=True):
        shown = ", ".join(names[:4]) + (f", and {len(names) - 4} more" if len(names) > 4 else "")
        wires = f" ({lanes} lanes)" if lanes > 1 else ""
        console.print(f"{format_rate(rate)}{wires}, {format_seconds(latency)}: {shown}", markup=False, soft_wrap=True)
    _print_rings(console, machine)


def _list_topologies(given: argparse.Namespace) -> None:
    from offbeat.topology import TOPOLOGIES

    if given.json:
        _print_json({"topologies": [_row_json(row.name, row.summary, row.params) for row in TOPOLOGIES.values()]})
        return
    console = _console()
    for row in TOPOLOGIES.values():
        console.print(row.name, style="bold", end="")
        console.print(f": {row.summary}", markup=False, soft_wrap=True)
        _print_params(console, row.params)


def _topology_json(machine: Topology) -> dict[str, Any]:
    from offbeat.schedules.rings import find_rings
    from offbeat.topology import edge_name

    links = [
        {"link": edge_name(edge), "latency_s": one.latency_s, "bytes_per_s": one.bytes_per_s, "lanes": one.lanes}
        for edge, one in machine.links.items()
    ]
    found = None
    if machine.is_mesh():
        rings = find_rings(machine)
        found = {
            "orders": [list(order) for order in rings.orders],
            "proved": rings.proved,
            "cut_bound": rings.bound,
            "cut": list(rings.cut),
        }
    return {"topology": machine.name, "ranks": machine.ranks, "links": links, "rings": found}


def _print_rings(console: Console, machine: Topology) -> None:
    from offbeat.schedules.algorithms import format_orders
    from offbeat.schedules.rings import find_rings

    if not machine.is_mesh():
        return
    rings = find_rings(machine)
    part = ", ".join(map(str, rings.cut))
    rate = format_rate(rings.cut_bytes_per_s)
    bound = f"{count_of(rings.bound, 'lane')}, {rate} together, out of {{{part}}}"
    console.print()
    if not rings.orders:
        how = "no directed ring" if rings.proved else "no directed ring was found that"
        console.print(f"{how} over direct links visits all {machine.ranks} ranks; cut bound: {bound}", soft_wrap=True)
        return
    most = "" if rings.proved else "at least "
    console.print(
        f"{most}{count_of(len(rings.orders), 'edge-disjoint directed ring')}; cut bound: {bound}", soft_wrap=True
    )
    console.print(f"  ring:order={format_orders(rings.orders)}", markup=False, soft_wrap=True)


# --- offbeat strategies ------------------------------------------------------------------------------------------


def _strategies_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="one of them, with its options; left out: all, one line each")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _strategies(given: argparse.Namespace) -> None:
    from offbeat.strategy import strategies

    known = strategies()
    if given.name is not None and given.name not in known:
        raise unknown("strategy", given.name, known)
    chosen = known.values() if given.name is None else [known[given.name]]
    if given.json:
        rows = [_row_json(one.name, one.summary, one.params) | {"family": one.family} for one in chosen]
        _print_json({"strategies": rows})
        return
    console = _console()
    width = max(len(one.usage()) for one in chosen)
    for one in chosen:
        console.print(f"{one.usage().ljust(width)}  {one.summary}", markup=False, soft_wrap=True)
        if given.name is not None:
            _print_params(console, one.params)


# --- small things that several commands use ------------------------------------------------------------------------


def _row_json(name: str, summary: str, params: Sequence[grammar.Param]) -> dict[str, Any]:
    return {"name": name, "summary": summary, "options": {param.name: param.help for param in params}}


def _print_params(console: Console, params: Sequence[grammar.Param]) -> None:
    for param in params:
        label = param.name.upper() if param.positional else f"{param.name}="
        console.print(f"    {label.ljust(17)} {param.help}", style="dim", markup=False, soft_wrap=True)


def _heading(console: Console, text: str) -> None:
    console.print(text, style="bold", markup=False, soft_wrap=True)
    console.print()


def _coloured(grid: str) -> Any:
    from rich.text import Text

    text = Text(grid)
    for match in re.finditer(r"[+=]c(\d+)\S*", grid):
        text.stylize(_CHUNK_STYLES[int(match[1]) % len(_CHUNK_STYLES)], *match.span())
    return text


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One row of the table of commands."""

    summary: str
    about: str
    examples: tuple[str, ...]
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


COMMANDS: dict[str, Command] = {
    "schedule": Command(
        summary="prove, price and draw a collective, or rank all of them on a topology",
        about="Prove, price and draw a collective; without an algorithm, rank every all-reduce on the topology.",
        examples=(
            "schedule torus:4x2 --size 100MB --svg torus.svg",
            "schedule --topology cluster:4x8,inside=50GB/s,across=1GB/s --size 100MB",
            "schedule tree --collective broadcast --ranks 6 --root 2",
        ),
        arguments=_schedule_arguments,
        run=_schedule,
    ),
    "strategies": Command(
        summary="list every strategy, one line each, with its options",
        about="List every strategy a run can be given, with its options.",
        examples=("strategies",),
        arguments=_strategies_arguments,
        run=_strategies,
    ),
    "topology": Command(
        summary="list topologies, or show the links of one and the rings that fit it",
        about="List topologies; with one, show its links and the edge-disjoint rings over direct links.",
        examples=("topology dgx1", "topology dgx1 --ranks 5", "topology cluster:4x8,across=25Gbit/s"),
        arguments=_topology_arguments,
        run=_topology,
    ),
}
