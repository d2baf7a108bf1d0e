"""offbeat simulate: one strategy in simulated time."""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import asdict
from pathlib import Path

from offbeat import plugins
from offbeat.commands import estimates
from offbeat.commands.base import Command, Terminal, answer, busy, facts, heading, option, say
from offbeat.commands.machine_options import MACHINE_OPTIONS, machines_of
from offbeat.commands.sweep import SWEEP_OPTIONS, batch_of, check_recipe_options, is_sweep, sweep
from offbeat.commands.virtual_training import FIELDS, RECIPE_OPTIONS, SECTIONS, refuse_without_recipe, simulate_recipe
from offbeat.errors import RequestError
from offbeat.number_format import format_seconds, format_size, percent
from offbeat.runs.log import RunLog, text_rows, write_chrome_trace, write_log
from offbeat.simulate.collective import bucket_curve
from offbeat.simulate.result import Result
from offbeat.simulate.setup import Network, Setup
from offbeat.simulate.sweep import SweepPoint, alone_s, point_of
from offbeat.spec import count_of, expand, parse_count, parse_whole

_VERSION_STYLES = ("blue", "green", "magenta", "cyan", "yellow", "red")


def _run(given: argparse.Namespace) -> None:
    lines = [*given.strategy, *given.learners.late_words]
    if given.model_parallel:
        if lines:
            raise RequestError("simulate: --model-parallel takes no strategy")
        from offbeat.commands.model_parallel_curves import show_model_parallel

        show_model_parallel(given)
        return
    if not lines:
        raise RequestError("simulate: the following arguments are required: strategy")
    if len(lines) > 1:
        raise RequestError(f"simulate: got a second strategy, '{lines[1]}'; use compare for several")
    strategy, *more = expand(lines[0])
    if given.recipe is not None:
        check_recipe_options(given)
        if more:
            raise RequestError(f"--recipe takes one strategy, but '{lines[0]}' stands for several; use compare")
        simulate_recipe(given, strategy)
        return
    if is_sweep(given, lines):
        sweep(given, lines)
        return
    batch = batch_of(given)
    refuse_without_recipe(given, batch_size=True)
    machines = machines_of(given)
    logged, spans = given.log is not None, given.trace is not None or (given.show or 0) > 1000
    estimates.check(given, estimates.of_simulation(machines, strategy, given.updates, logged=logged, spans=spans))
    setup = machines.setup(strategy)
    updates = given.updates or setup.updates_for()
    if given.curve:
        if given.calibration is not None:
            raise RequestError(
                "--curve and --calibration cannot be used together; describe the layers and the topology instead"
            )
        if not setup.reduces:
            raise RequestError(f"--curve needs an all-reduce like ring; '{strategy}' is a parameter-server strategy")
        _curve(given, setup, machines.network)
        return
    show = 3 if given.show is None else given.show
    wants_all = given.trace is not None or given.log is not None
    decisions: list[dict[str, object]] | None = [] if given.log is not None and not setup.reduces else None
    keep = updates if wants_all else 0 if given.json else show
    start = time.perf_counter()
    with busy(f"simulating {strategy}"):
        write = None if decisions is None else decisions.append
        result = setup.run(updates, keep_spans=keep, write=write)
    took = time.perf_counter() - start
    _write_files(given, result, decisions)
    cluster = setup.cluster
    point = point_of(strategy, setup, result, batch=batch) if alone_s(cluster) < math.inf else None
    scaling = {} if point is None else point.as_json(given.epoch_samples)
    told = result.as_json() | result.network_json() | scaling | {"events_per_s": result.events / took}
    staged = machines.staged
    told |= {} if staged is None else {"parallel": staged.as_json()}

    def show_result(out: Terminal) -> None:
        heading(out, f"{strategy}, {count_of(cluster.learners, 'learner')}, {cluster.law.text}, seed {given.seed}")
        _timeline(out, result, show)
        more = [] if point is None else _scaling(point, given.epoch_samples)
        facts(out, ([] if staged is None else [("stages", staged.text)]) + _facts(result, took) + more)

    answer(given, told, show_result)


def _write_files(given: argparse.Namespace, result: Result, decisions: list[dict[str, object]] | None) -> None:
    for path in (given.trace, given.log):
        if path is not None and path.is_dir():
            raise RequestError(f"cannot write {path}: it is a folder")
    try:
        if given.trace is not None:
            write_chrome_trace(given.trace, result.spans, name=f"offbeat simulate {result.strategy}")
        if given.log is not None:
            run = {"strategy": result.strategy, "expect": result.learners, "seed": given.seed, "simulated": True}
            run |= plugins.facts()
            write_log(given.log, RunLog(run=run, spans=result.spans, decisions=tuple(decisions or ())))
    except OSError as error:
        name = str(error.filename).removesuffix(".unfinished")
        raise RequestError(f"cannot write {name}: {error.strerror}") from None


def _facts(result: Result, took: float) -> list[tuple[str, str]]:
    ages = ", ".join(f"{age}: {count}" for age, count in list(result.staleness.items())[:12])
    more = f", ... up to {max(result.staleness)}" if len(result.staleness) > 12 else ""
    shares = (
        ("computing gradients that were applied", result.busy_share),
        ("computing gradients that were discarded", result.waste_share),
        ("sending", result.send_share),
        ("waiting", result.wait_share),
    )
    from offbeat.simulate.diagnosis import why  # not for a sweep

    each = format_seconds(result.seconds_per_update)
    found = [
        ("updates", f"{result.updates} in {format_seconds(result.seconds)}: {each} each"),
        ("throughput", f"gradients of {result.minibatches_per_s:.4g} minibatches applied per second"),
        ("staleness", f"{result.staleness_mean:.3f} on average, standard deviation {result.staleness_std:.3f}"),
        ("", f"gradients by staleness: {ages}{more}"),
        ("learners", ", ".join(f"{percent(share)} {name}" for name, share in shares if share > 0)),
        ("lost", f"{result.cancelled} minibatches cancelled, {result.dropped} dropped, {result.failed} failures"),
        ("why", why(result)),
        ("simulated", f"{result.events} events in {format_seconds(took)}, {result.events / took:,.0f} a second"),
    ]  # fmt: skip
    return [row for row in found if row[0] != "lost" or result.cancelled or result.dropped or result.failed]


def _scaling(point: SweepPoint, epoch_samples: int | None) -> list[tuple[str, str]]:
    """Beside one learner alone."""
    found = (
        f"T(1) {format_seconds(point.alone_s)}, T({point.learners}) {format_seconds(point.iteration_s)}: "
        f"speed-up {point.speedup:.3g}, efficiency {percent(point.efficiency)}, "
        f"overhead {format_seconds(point.overhead_s)} (weak scaling; the baseline is one learner alone)"
    )
    epoch = [] if epoch_samples is None else [("epoch", format_seconds(epoch_samples / point.samples_per_s))]
    return [("scaling", found), *epoch]


def _timeline(out: Terminal, result: Result, updates: int) -> None:
    """The first updates, a row a learner: colour by version, cancelled work shaded."""
    from rich.text import Text

    spans = [span for span in result.spans if span.version < updates]
    if not spans or updates < 1:
        return
    end = max(span.end_s for span in spans)
    shown = text_rows(spans, width=max(20, min(100, out.width - 16)), end_s=end)
    for learner, pieces in list(shown.items())[:16]:
        row = Text(f"learner {learner}".ljust(12) + "|")
        for piece in pieces:
            style = _VERSION_STYLES[piece.version % len(_VERSION_STYLES)] if piece.version >= 0 else "dim"
            row.append(piece.text, style=style)
        out.print(row, soft_wrap=True)
    if len(shown) > 16:
        say(out, f"({len(shown) - 16} more learners)", style="dim")
    legend = "digit: version; ░ cancelled or lost, · waiting, ─ sending, blank: later version or not in the run"
    say(out, f"0 to {format_seconds(end)}; {legend}", style="dim")
    out.print()


def _curve(given: argparse.Namespace, setup: Setup, network: Network) -> None:
    assert setup.topology is not None
    strategy, learners, law = setup.strategy, setup.cluster.learners, setup.cluster.law
    if law.mean_s == math.inf:
        raise RequestError(f"--curve needs a finite mean compute time; that of '{law.text}' is infinite")
    points = bucket_curve(strategy, law.mean_s, network.model(), setup.topology)
    size = f"{format_size(network.size_bytes)} in {network.layers} layers"
    most = max(p.iteration_s for p in points)

    def show(out: Terminal) -> None:
        heading(out, f"{strategy}, {count_of(learners, 'learner')}, {size}")
        say(out, f"{'buckets':>8}{'each':>12}{'iteration':>12}{'at least':>12}", style="bold")
        say(
            out,
            *(
                f"{p.buckets:>8}{format_size(p.bucket_bytes):>12}{format_seconds(p.iteration_s):>12}"
                f"{format_seconds(p.bound_s):>12}  {'█' * round(40 * p.iteration_s / most)}"
                for p in points
            ),
            "at least: forward pass + backward pass of the first bucket + one reduction of everything; one bucket: "
            "no overlap",
        )

    told = {"strategy": strategy, "learners": learners, "curve": [asdict(point) for point in points]}
    answer(given, told, show)


COMMAND = Command(
    summary="simulate one strategy, with the same policies and schedules as in real runs",
    about="""Simulate one strategy. The policies and schedules are the same objects that real runs use. With --recipe
the model is trained in virtual time: the gradients are real, the clock is simulated. The result has loss and accuracy
against simulated seconds, and the time to --target. The output folder holds the same files as that of a real run.""",
    examples=(
        "simulate k-sync:4 --learners 8 --compute shifted-exp:1,1",
        "simulate softsync:2,rate=inverse --learners 30 --compute gamma:1,0.25 --updates 5000",
        "simulate k-sync:1..8 --learners 8 --compute exp:1 --updates 2000",
        "simulate async --size 100MB --learner-bandwidth 1GB/s --server-bandwidth 1GB/s --speeds 1,1,0.3",
        "simulate ring --learners 40 --compute constant:370ms --forward-share 0.338 --size 1.2GB "
        "--topology uniform:bandwidth=5.85GB/s,latency=20us --curve",
        "simulate k-async:4 --recipe digits-mlp --learners 30 --compute gamma:1,0.25 --batch-size 8 --target 0.9 "
        "--run-dir runs/k-async-4",
    ),
    usage="%(prog)s STRATEGY [--learners P ...] [--compute LAW] [--recipe RECIPE --target X] [options]",
    options=(
        option(
            "strategy",
            nargs="*",
            metavar="STRATEGY",
            help="k-async:4, ring, ... (offbeat strategies lists all); k-sync:1..8 makes a sweep",
        ),
        option(
            "--updates",
            read=parse_count,
            metavar="N",
            help="number of updates (default: about 500 minibatches per learner); with --recipe, use --epochs",
        ),
        *MACHINE_OPTIONS,
        option("--show", read=parse_whole, metavar="N", help="updates to show in the timeline (default 3)"),
        option("--trace", read=Path, metavar="FILE", help="write a trace for Perfetto or chrome://tracing"),
        option(
            "--log",
            read=Path,
            metavar="FILE",
            help="write the run log: every decision of the policy and every span",
        ),
        option(
            "--curve",
            action="store_true",
            help="all-reduce only: show how the iteration time depends on the bucket size",
        ),
        option(
            "--model-parallel",
            action="store_true",
            help="instead of a strategy: simulate one model split over 1 to 128 machines, and compare with "
            "DistBelief's published speed-ups",
        ),
        estimates.CONFIRM,
        *SWEEP_OPTIONS,
        *RECIPE_OPTIONS,
    ),
    sections=SECTIONS,
    fields=FIELDS,
    run=_run,
)
