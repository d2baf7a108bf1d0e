"""offbeat bench: what really runs here, measured: beside other systems, and beside the simulator's predictions."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
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
from offbeat.number_format import format_rate, format_size
from offbeat.spec import choice, count_of, parse_count, parse_seconds, parse_size

if TYPE_CHECKING:
    from rich.console import Console

    from offbeat.measure.bench_results import AllReduceResult, DdpResult, Setting, Times
    from offbeat.measure.policies import PoliciesResult
    from offbeat.measure.server_bench import ServerResult

_BUSY = 2.0  # rounds that differ by more are worth a word
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
    _fill(given)
    if given.what in bench_training.DEFAULTS:
        bench_training.run(given, progress_line())
        return
    bench_training.refuse_changes(given)
    {ALLREDUCE: _run_ranks, DDP: _run_ranks, POLICIES: _run_policies, SERVER: _run_server}[given.what](given)


def _run_ranks(given: argparse.Namespace) -> None:
    from offbeat.measure import rank_bench

    request = rank_bench.RankRequest(
        ranks=given.ranks,
        against=given.against,
        others=rank_bench.ALLREDUCE_OTHERS if given.what == ALLREDUCE else rank_bench.DDP_OTHERS,
        rounds=given.rounds,
        threads=given.threads,
        strategy=given.strategy,
        timeout_s=given.timeout,
    )
    if given.what == ALLREDUCE:
        with progress_line() as progress:
            reduced = rank_bench.measure_allreduce(request, given.sizes, progress)
        print_json(reduced.as_json()) if given.json else print_allreduce(reduced)
    else:
        with progress_line() as progress:
            trained = rank_bench.measure_ddp(request, given.batch, progress)
        print_json(trained.as_json()) if given.json else print_ddp(trained)


def _run_policies(given: argparse.Namespace) -> None:
    from offbeat.measure import policies

    if len(given.learners) > 1:
        raise RequestError("bench: --learners is one number for bench policies")
    request = policies.PoliciesRequest(
        lines=tuple(given.lines) or policies.LINES,
        laws=tuple(given.slow or policies.LAWS),
        learners=given.learners[0],
        servers=given.servers,
        updates=given.updates,
        seed=given.seed,
        timeout_s=given.timeout,
    )
    with progress_line() as progress:
        result = policies.measure(request, progress)
    print_json(result.as_json()) if given.json else print_policies(result)


def _run_server(given: argparse.Namespace) -> None:
    from offbeat.measure import server_bench

    request = server_bench.ServerRequest(
        learners=tuple(given.learners),
        servers=given.servers,
        parameters=given.parameters or server_bench.PARAMETERS,
        tensors=given.tensors,
        against=given.against,
        rounds=given.rounds,
        seconds=given.seconds,
        timeout_s=given.timeout,
    )
    with progress_line() as progress:
        result = server_bench.measure(request, progress)
    print_json(result.as_json()) if given.json else print_server(result)


def _fill(given: argparse.Namespace) -> None:
    """Defaults of this measurement; an option of another one is a mistake."""
    own = _DEFAULTS[given.what]
    for name in {name for options in _DEFAULTS.values() for name in options}:
        if name not in own and getattr(given, name) not in (None, ()):
            word = f"'{given.lines[0]}'" if name == "lines" else f"--{name.replace('_', '-')}"
            raise RequestError(f"bench: {word} is not an option of bench {given.what}")
    for name, value in own.items():
        if getattr(given, name) is None:
            setattr(given, name, value)


def print_allreduce(result: AllReduceResult) -> None:
    from rich import box
    from rich.table import Table

    from offbeat.measure.bench_results import DEFINITIONS, OURS, format_ms, format_ratio, size_label

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

    from offbeat.measure.bench_results import DEFINITIONS, format_ms

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


def print_policies(result: PoliciesResult) -> None:
    from rich import box
    from rich.table import Table

    from offbeat.measure.policies import DEFINITIONS, WITHIN

    out = console()
    request = result.request
    heading(
        out, f"real runs beside the simulator, {count_of(request.learners, 'learner')}, slowness is all they compute"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("slowness", "strategy"):
        table.add_column(column, no_wrap=True)
    for column in ("updates", "ms", "predicted", "off", "long run", "staleness", "predicted", "off"):
        table.add_column(column, justify="right", no_wrap=True)
    before = ""
    for row in result.rows:
        table.add_row(
            row.law if row.law != before else "",
            row.line,
            str(row.updates),
            *(f"{1e3 * found.seconds_per_update:.4g}" for found in (row.measured, row.predicted)),
            _off(row.seconds_difference, WITHIN),
            f"{1e3 * row.long_run.seconds_per_update:.4g}",
            *(f"{found.staleness_mean:.3f}" for found in (row.measured, row.predicted)),
            _off(row.staleness_difference, WITHIN),
        )
        before = row.law
    out.print(table)
    say(out, result.summary(), style="bold")
    out.print()
    names = {"ms": "seconds_per_update", "staleness": "staleness_mean", "long run": "long_run"}
    rows = [(label, DEFINITIONS[names.get(label, label)]) for label in ("ms", "staleness", "measured", "predicted")]
    facts(out, [*rows, ("long run", DEFINITIONS["long_run"]), _machine(result.machine)])


def _off(difference: float, within: float) -> str:
    return f"{100 * difference:+.1f} %{' !' if abs(difference) > within else ''}"


def print_server(result: ServerResult) -> None:
    from rich import box
    from rich.table import Table

    from offbeat.measure.bench_results import OURS, format_ratio
    from offbeat.measure.server_bench import DEFINITIONS, ITEM_BYTES

    out = console()
    request = result.request
    size = format_size(ITEM_BYTES * request.parameters)
    heading(
        out,
        f"push and fetch of {size} in {result.tensors} tensors, async and SGD, ours on "
        f"{count_of(request.servers, 'server')}, median of {count_of(request.rounds, 'round')}",
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("learners", justify="right", no_wrap=True)
    table.add_column("system", no_wrap=True)
    for column in ("a second", "of rounds", f"{OURS} is", "of copy"):
        table.add_column(column, justify="right", no_wrap=True)
    for case in result.cases:
        for rates in case.systems:
            ours = rates is case.systems[0]
            table.add_row(
                str(case.learners) if ours else "",
                rates.system,
                f"{rates.per_s:.3g}",
                f"{min(rates.rounds_per_s):.3g}-{max(rates.rounds_per_s):.3g}",
                "" if ours else format_ratio(case.ratio(rates)),
                f"{100 * case.copy_share(rates):.0f} %",
            )
    out.print(table)
    for case in result.cases:
        say(out, case.summary(), style="bold")
    out.print()
    measured = {rates.system for case in result.cases for rates in case.systems}
    rows = [
        ("a second", DEFINITIONS["per_s"]),
        ("of copy", DEFINITIONS["copy_share"]),
        (
            "copy",
            ", ".join(
                f"{format_rate(case.copy_bytes_per_s)} by {count_of(case.learners, 'learner')}" for case in result.cases
            ),
        ),
        *((name, DEFINITIONS[name]) for name in DEFINITIONS if name in measured),
    ]
    facts(out, [*rows, _machine(result.machine)])
    _warn(out, result.spread)
    for system, reason in result.not_measured.items():
        say(out, f"{system}: not measured: {reason}")


def _warn(out: Console, spread: float) -> None:
    if spread > _BUSY:
        text = f"rounds of one system differ by up to {spread:.1f}x: the machine was busy; measure again when it is not"
        say(out, text, style="yellow")


def _spread(times: Times) -> str:
    from offbeat.measure.bench_results import format_ms

    return f"{format_ms(min(times.rounds_ms))}-{format_ms(max(times.rounds_ms))}"


def _setting(setting: Setting) -> list[tuple[str, str]]:
    machine = setting.machine
    versions = [
        f"torch {machine['torch']} with {count_of(setting.threads, 'thread')} a rank",
        *([machine["mpi"]] if "mpi" in machine else []),
        *([f"strategy {setting.strategy}"] if setting.strategy else []),
    ]
    return [_machine(machine), ("with", ", ".join(versions))]


def _machine(machine: Mapping[str, Any]) -> tuple[str, str]:
    load = "load not known" if machine["load"] is None else f"load {machine['load']:.2f} before"
    return "machine", f"{count_of(machine['cores'], 'core')} ({machine['processor']}), {load}"


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
