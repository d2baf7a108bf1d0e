"""offbeat bench: real all-reduces and DDP iterations, measured beside those of Gloo and Open MPI."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from offbeat.commands.base import Command, console, facts, heading, json_argument, print_json, reader, say
from offbeat.errors import RequestError
from offbeat.spec import choice, count_of, format_rate, format_size, parse_count, parse_seconds, parse_size

if TYPE_CHECKING:
    from rich.console import Console

    from offbeat.measure.results import AllReduceResult, DdpResult, Setting, Times

_BUSY = 2.0  # rounds that differ by more are worth a word
ALLREDUCE, DDP = "allreduce", "ddp"
# What an option is when left out; those of the other measurement are refused.
_DEFAULTS = {
    ALLREDUCE: {"ranks": 4, "rounds": 5, "against": ("gloo", "mpi"), "sizes": (64 * 2**10, 4 * 2**20, 100_000_000)},
    DDP: {"ranks": 2, "rounds": 10, "against": ("gloo",), "batch": 64},
}


def _arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("what", type=reader(choice(ALLREDUCE, DDP)), metavar="allreduce|ddp", help="one collective, or a training step")
    add("--ranks", type=reader(parse_count), metavar="P", help="processes (default 4, of ddp 2)")
    add("--against", type=reader(_words), metavar="NAMES", help="gloo,mpi (default both where installed; ddp: gloo)")
    add("--sizes", type=reader(_sizes), metavar="SIZES", help="of the tensor (default 64KiB,4MiB,100MB)")
    add("--batch", type=reader(parse_count), metavar="N", help="ddp: samples of a minibatch (default 64)")
    add("--rounds", type=reader(parse_count), metavar="N", help="in each all take turns (default 5, of ddp 10)")
    add("--threads", type=reader(parse_count), default=1, metavar="N", help="torch's, of a rank (default 1)")
    add("--strategy", metavar="LINE", help="how offbeat reduces: ring, ... (default: its own choice)")
    add("--timeout", type=reader(parse_seconds), default=120.0, metavar="TIME", help="for an answer (default 120s)")
    json_argument(parser)


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise RequestError(f"expected names joined by commas, like gloo,mpi; got '{text}'")
    return words


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(parse_size(word) for word in text.split(","))


def _run(given: argparse.Namespace) -> None:
    from offbeat.measure import bench

    _fill(given)
    request = bench.Request(
        ranks=given.ranks,
        against=given.against,
        others=bench.ALLREDUCE_OTHERS if given.what == ALLREDUCE else bench.DDP_OTHERS,
        rounds=given.rounds,
        threads=given.threads,
        strategy=given.strategy,
        timeout_s=given.timeout,
    )
    if given.what == ALLREDUCE:
        with _progress() as progress:
            reduced = bench.measure_allreduce(request, given.sizes, progress)
        print_json(reduced.as_json()) if given.json else print_allreduce(reduced)
    else:
        with _progress() as progress:
            trained = bench.measure_ddp(request, given.batch, progress)
        print_json(trained.as_json()) if given.json else print_ddp(trained)


def _fill(given: argparse.Namespace) -> None:
    """Defaults of this measurement; an option of the other one is a mistake."""
    own = _DEFAULTS[given.what]
    for name in ("sizes", "batch"):
        if name not in own and getattr(given, name) is not None:
            raise RequestError(f"bench: --{name} is not an option of bench {given.what}")
    for name, value in own.items():
        if getattr(given, name) is None:
            setattr(given, name, value)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
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


def print_allreduce(result: AllReduceResult) -> None:
    from rich import box
    from rich.table import Table

    from offbeat.measure.results import DEFINITIONS, OURS, format_ms, format_ratio, size_label

    out = console()
    ranks = result.setting.ranks
    heading(
        out, f"all-reduce of float32, {count_of(ranks, 'rank')}, median of {count_of(result.setting.rounds, 'round')}"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("size", no_wrap=True)
    table.add_column("system", no_wrap=True)
    for column in ("ms", "of rounds", "bus", f"vs {OURS}", "of copy"):
        table.add_column(column, justify="right", no_wrap=True)
    for size in result.sizes:
        for times in size.systems:
            ours = times is size.systems[0]
            table.add_row(
                size_label(size.size_bytes) if ours else "",
                times.system,
                format_ms(times.ms),
                _spread(times),
                format_rate(size.bus_bytes_per_s(times, ranks)),
                "" if ours else format_ratio(size.ratio(times)),
                f"{100 * result.copy_share(size, times):.0f} %",
            )
    out.print(table)
    for size in result.sizes:
        say(out, size.summary(), style="bold")
    out.print()
    rows = [
        ("bus", DEFINITIONS["bus_bytes_per_s"]),
        ("of copy", DEFINITIONS["copy_share"]),
        (
            "copy",
            f"{format_rate(result.copy_together_bytes_per_s)} by {count_of(ranks, 'rank')} together, "
            f"{format_rate(result.copy_alone_bytes_per_s)} by one alone",
        ),
    ]
    facts(out, [*rows, *_setting(result.setting)])
    _warn(out, result.spread)
    for system, reason in result.setting.not_measured.items():
        say(out, f"{system}: not measured: {reason}")


def print_ddp(result: DdpResult) -> None:
    from rich import box
    from rich.table import Table

    from offbeat.measure.results import DEFINITIONS, format_ms

    out = console()
    setting = result.setting
    heading(out, f"DDP iteration, {count_of(setting.ranks, 'rank')}, {result.parameters / 1e6:.1f} million parameters")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("system", no_wrap=True)
    for column in ("ms", "of rounds", "added ms", "alone ms", "hidden", "beyond DDP"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_row("(none)", format_ms(result.none.ms), _spread(result.none))
    table.add_row(
        "(empty)", format_ms(result.empty.ms), _spread(result.empty), format_ms(result.added_ms(result.empty))
    )
    for system in result.systems:
        table.add_row(
            system.training.system,
            format_ms(system.training.ms),
            _spread(system.training),
            format_ms(result.added_ms(system.training)),
            format_ms(system.alone.ms),
            f"{100 * result.hidden_share(system):.0f} %",
            f"{100 * result.hidden_beyond_ddp_share(system):.0f} %",
        )
    out.print(table)
    say(out, result.summary(), style="bold")
    same = "yes, bit for bit" if result.same_parameters else f"to {result.largest_difference:.1g} of the largest"
    say(out, f"same parameters: {same}")
    out.print()
    buckets = ", ".join(format_size(size) for size in result.bucket_bytes)
    rows = [
        ("empty", DEFINITIONS["empty"]),
        ("alone", DEFINITIONS["alone_ms"]),
        ("hidden", f"{DEFINITIONS['hidden_share']}; without a spare core there is nowhere to hide"),
        ("beyond", DEFINITIONS["hidden_beyond_ddp_share"]),
        ("model", f"minibatches of {result.batch}, buckets of {buckets}"),
    ]
    facts(out, [*rows, *_setting(setting)])
    _warn(out, result.spread)


def _warn(out: Console, spread: float) -> None:
    if spread > _BUSY:
        text = f"rounds of one system differ by up to {spread:.1f}x: the machine was busy; measure again when it is not"
        say(out, text, style="yellow")


def _spread(times: Times) -> str:
    from offbeat.measure.results import format_ms

    return f"{format_ms(min(times.rounds_ms))}-{format_ms(max(times.rounds_ms))}"


def _setting(setting: Setting) -> list[tuple[str, str]]:
    machine = setting.machine
    versions = [
        f"torch {machine['torch']} with {count_of(setting.threads, 'thread')} a rank",
        *([machine["mpi"]] if "mpi" in machine else []),
        *([f"strategy {setting.strategy}"] if setting.strategy else []),
    ]
    return [
        (
            "machine",
            f"{count_of(machine['cores'], 'core')} ({machine['processor']}), load {machine['load']:.2f} before",
        ),
        ("with", ", ".join(versions)),
    ]


COMMAND = Command(
    summary="measure real all-reduces and DDP iterations beside Gloo's and Open MPI's",
    about="Measure on this machine, all systems alternately in one run: an all-reduce, or a training iteration of DDP.",
    examples=(
        "bench allreduce --ranks 4 --sizes 64KiB,4MiB --against gloo",
        "bench ddp --ranks 2 --against gloo --rounds 2",
    ),
    arguments=_arguments,
    run=_run,
)
