"""offbeat bench: what really runs here, measured: beside other systems, and beside the simulator's predictions."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from offbeat.commands import bench_training
from offbeat.commands.base import (
    Command,
    console,
    facts,
    heading,
    json_argument,
    print_json,
    progress_line,
    reader,
    say,
)
from offbeat.errors import RequestError
from offbeat.report.benchmark_fields import Field, Row, printed
from offbeat.spec import choice, count_of, parse_count, parse_seconds, parse_size

if TYPE_CHECKING:
    from rich.console import Console

    from offbeat.measure.bench_result import BenchResult

_BUSY = 2.0  # rounds that differ by more are worth a warning
_WIDE = 100  # columns, from which on intervals are in the tables
ALLREDUCE, DDP, POLICIES, SERVER = "allreduce", "ddp", "policies", "server"
_TIMEOUT_S = 120.0
# What an option of a measurement is when left out; those that it does not have are refused.
_DEFAULTS: dict[str, dict[str, Any]] = {
    ALLREDUCE: {
        "ranks": 4,
        "rounds": 5,
        "against": ("gloo", "mpi"),
        "sizes": (64 * 2**10, 4 * 2**20, 100_000_000),
        "threads": 1,
        "strategy": None,
        "timeout": _TIMEOUT_S,
    },
    DDP: {
        "ranks": 2,
        "rounds": 10,
        "against": ("gloo",),
        "batch": 64,
        "threads": 1,
        "strategy": None,
        "timeout": _TIMEOUT_S,
    },
    POLICIES: {
        "lines": (),
        "learners": [4],
        "servers": 1,
        "slow": None,
        "updates": None,
        "seed": 0,
        "timeout": _TIMEOUT_S,
    },
    SERVER: {
        "learners": [1, 2],
        "servers": 2,
        "parameters": None,
        "tensors": 161,
        "against": None,
        "rounds": 3,
        "seconds": 3.0,
        "timeout": _TIMEOUT_S,
    },
    **bench_training.DEFAULTS,
}


def _arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    kinds = tuple(_DEFAULTS)
    parser.usage = f"%(prog)s {'|'.join(kinds)} [LINES ...] [options]"
    add("what", type=reader(choice(*kinds)), metavar="|".join(kinds), help="what is measured; see above")
    add(
        "lines",
        nargs="*",
        default=(),
        metavar="LINES",
        help="policies: strategies (default: six of them); of trainings: a recipe (default digits-cnn)",
    )
    add("--ranks", type=reader(parse_count), metavar="P", help="processes (default 4, of ddp 2)")
    add(
        "--learners",
        type=reader(parse_count),
        nargs="+",
        metavar="P",
        help="policies, accuracy: how many (default 4, 2); server, scaling: with how many, in turn (1 2; 1 2 4)",
    )
    add("--servers", type=reader(parse_count), metavar="S", help="shards (default 1, of server 2)")
    add(
        "--slow",
        nargs="+",
        action="extend",
        metavar="LAW",
        help="policies: slowness (default exp:0.1 shifted-exp:0.05,0.05); of trainings: also learner=1,factor=3",
    )
    add("--updates", type=reader(parse_count), metavar="N", help="policies: of each run (default: about 10 s of them)")
    add("--seed", type=int, metavar="N", help="policies: of --slow; scaling, accuracy: the first (default 0)")
    add("--parameters", type=reader(_number), metavar="N", help="server: of the model (default 25.6M)")
    add("--tensors", type=reader(parse_count), metavar="N", help="server: 161 as ResNet-50's (default), or 1")
    add("--seconds", type=reader(parse_seconds), metavar="TIME", help="server: of a round of one system (default 3s)")
    add(
        "--against",
        type=reader(_words),
        metavar="NAMES",
        help="gloo,mpi (ddp: gloo); server: rpc,rpc-tuned,ray,ray-tuned (default: all that are installed)",
    )
    add("--sizes", type=reader(_sizes), metavar="SIZES", help="of the tensor (default 64KiB,4MiB,100MB)")
    add("--batch", type=reader(parse_count), metavar="N", help="ddp: samples of a minibatch (default 64)")
    add(
        "--rounds",
        type=reader(parse_count),
        metavar="N",
        help="all take turns in each (default 5, ddp 10, server and predictions 3)",
    )
    add("--threads", type=reader(parse_count), metavar="N", help="torch's, of a rank (default 1)")
    add("--strategy", metavar="LINE", help="how offbeat reduces: ring, ... (default: its own choice)")
    add("--timeout", type=reader(parse_seconds), metavar="TIME", help="for an answer (default 120s)")
    json_argument(parser)
    bench_training.add_arguments(parser)


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise RequestError(f"expected names joined by commas, like gloo,mpi; got '{text}'")
    return words


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(parse_size(word) for word in text.split(","))


def _number(text: str) -> int:
    """`25.6M`, `100k`, `1000`."""
    factor = {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1:], 0)
    try:
        return round(float(text[:-1]) * factor) if factor else parse_count(text)
    except (ValueError, OverflowError):
        raise RequestError(f"expected a number like 25.6M, 100k or 5000; got '{text}'") from None


def _run(given: argparse.Namespace) -> None:
    options = _with_defaults(given)
    if given.what in bench_training.DEFAULTS:
        measured = bench_training.measurement(options)
    else:
        bench_training.refuse_changes(given)
        measure = {ALLREDUCE: _measure_ranks, DDP: _measure_ranks, POLICIES: _measure_policies, SERVER: _measure_server}
        measured = measure[given.what](options)
    with progress_line() as progress:
        result = measured(progress)
    print_json(result.json) if given.json else print_result(result)
    bench_training.write_files(options, result)


def _with_defaults(given: argparse.Namespace) -> argparse.Namespace:
    """What was given, and the defaults of this measurement; an option of another one is a mistake."""
    own = _DEFAULTS[given.what]
    for name in {name for options in _DEFAULTS.values() for name in options}:
        if name not in own and getattr(given, name) not in (None, ()):
            word = f"'{given.lines[0]}'" if name == "lines" else f"--{name.replace('_', '-')}"
            raise RequestError(f"bench: {word} is not an option of bench {given.what}")
    filled = {name: value for name, value in own.items() if getattr(given, name) is None}
    return argparse.Namespace(**(vars(given) | filled))


Measurement = Callable[[Callable[[str], None]], "BenchResult"]


def _measure_ranks(options: argparse.Namespace) -> Measurement:
    from offbeat.measure import rank_bench

    reduces = options.what == ALLREDUCE
    request = rank_bench.RankRequest(
        ranks=options.ranks,
        against=options.against,
        others=rank_bench.ALLREDUCE_OTHERS if reduces else rank_bench.DDP_OTHERS,
        rounds=options.rounds,
        threads=options.threads,
        strategy=options.strategy,
        timeout_s=options.timeout,
    )
    if reduces:
        return lambda progress: rank_bench.measure_allreduce(request, options.sizes, progress)
    return lambda progress: rank_bench.measure_ddp(request, options.batch, progress)


def _measure_policies(options: argparse.Namespace) -> Measurement:
    from offbeat.measure import policies_bench

    if len(options.learners) > 1:
        raise RequestError("bench: --learners is one number for bench policies")
    request = policies_bench.PoliciesRequest(
        lines=tuple(options.lines) or policies_bench.LINES,
        laws=tuple(options.slow or policies_bench.LAWS),
        learners=options.learners[0],
        servers=options.servers,
        updates=options.updates,
        seed=options.seed,
        timeout_s=options.timeout,
    )
    return lambda progress: policies_bench.measure(request, progress)


def _measure_server(options: argparse.Namespace) -> Measurement:
    from offbeat.measure import server_bench

    request = server_bench.ServerRequest(
        learners=tuple(options.learners),
        servers=options.servers,
        parameters=options.parameters or server_bench.PARAMETERS,
        tensors=options.tensors,
        against=options.against,
        rounds=options.rounds,
        seconds=options.seconds,
        timeout_s=options.timeout,
    )
    return lambda progress: server_bench.measure(request, progress)


# --- printing --------------------------------------------------------------------------------------------------------


def print_result(result: BenchResult) -> None:
    out = console()
    heading(out, result.heading)
    for fields, rows in result.tables:
        _print_table(out, fields, rows)
    for text in result.verdict:
        say(out, text, style="bold")
    for text in (*result.details, "", *(f"note: {note}" for note in result.json.get("notes", ()))):
        say(out, text)
    if result.json.get("notes"):
        out.print()
    machine = result.json["machine"]
    load = "load not known" if machine["load"] is None else f"load {machine['load']:.2f} before"
    cores = f"{count_of(machine['cores'], 'core')} ({machine['processor']}), {load}"
    facts(out, [*result.terms, ("machine", cores)])
    if result.spread > _BUSY:
        times = f"{result.spread:.1f}x"
        text = f"rounds of one system differ by up to {times}: the machine was busy; measure again when it is not"
        say(out, text, style="yellow")


def _print_table(out: Console, fields: Sequence[Field], rows: Sequence[Row]) -> None:
    """Nothing where no value is known."""
    from rich import box
    from rich.table import Table

    shown = printed(fields, rows, wide=out.width >= _WIDE)
    if all(field.key in ("strategy", "learners") for field in shown):
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for field in shown:
        table.add_column(field.title, justify="left" if field.form == "text" else "right", no_wrap=True)
    before: Row = {}
    for row in rows:
        table.add_row(
            *("" if field.once and row[field.key] == before.get(field.key) else field.written(row) for field in shown)
        )
        before = row
    out.print(table)


COMMAND = Command(
    summary="measure what really runs here: collectives, DDP, the parameter server, scaling and time to accuracy",
    about="""Measure on this machine. allreduce, ddp: all-reduces and training iterations, beside Gloo's and Open MPI's.
server: pushes and fetches a second of the parameter server, beside torch's rpc and Ray. In these all systems take turns
in one run. policies: learners that are slow on purpose, beside what the simulator predicts for the same slowness.
scaling: a recipe with several numbers of learners and strategies, beside one learner alone: speed-up, efficiency,
overhead, and whether they learn as well. accuracy: strategies trained for real until all epochs are through: seconds
and updates to an accuracy, with several seeds. predictions: strategies, numbers of learners and delays, each predicted
from a calibration (offbeat calibrate) and then run. These take turns too, and have every option of a recipe.""",
    examples=(
        "bench allreduce --ranks 4 --sizes 64KiB,4MiB --against gloo",
        "bench ddp --ranks 2 --against gloo --rounds 2",
        "bench policies k-sync:1 async --learners 2 --slow exp:0.02 --updates 20",
        "bench server --learners 1 --parameters 100k --seconds 100ms --rounds 1 --against rpc",
        "bench scaling digits-cnn --learners 1 2 --sync ring k-async:2 --epochs 3 --rounds 1",
        "bench accuracy digits-mlp --target 0.8 --learners 2 --sync ring async --seeds 1 --epochs 4",
    ),
    arguments=_arguments,
    run=_run,
)
