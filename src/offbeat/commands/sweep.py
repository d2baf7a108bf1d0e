"""Sweeps of simulate and compare: several numbers of learners, or a range in a strategy's line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from offbeat.commands import estimates
from offbeat.commands.base import Terminal, answer, busy, heading, option, refuse, say, table, write_file
from offbeat.commands.machine_options import machines_of
from offbeat.commands.virtual_training import refuse_without_recipe
from offbeat.errors import RequestError
from offbeat.number_format import format_change, format_seconds, percent
from offbeat.runs.metrics import DEFINITIONS
from offbeat.simulate.setup import Setup
from offbeat.simulate.sweep import Ratio, SweepPoint, measure, picture, ratios
from offbeat.spec import count_of, expand, parse_count
from offbeat.strategy import line_up
from offbeat.train.arguments import given as changes_of

_FILES = ("trace", "log", "curve", "show")  # what is written or shown of one simulation


SWEEP_OPTIONS = (
    option("--svg", read=Path, metavar="FILE", help="write a chart of a sweep"),
    option(
        "--epoch-samples", read=parse_count, metavar="N", help="samples per epoch; adds the time per epoch"
    ),
)  # fmt: skip


def lines_of(lines: Sequence[str]) -> list[str]:
    """With their ranges written out."""
    return [one for line in lines for one in expand(line)]


def default_lines(given: argparse.Namespace, learners: int) -> list[str]:
    """What is compared where no strategy is named; pipelines have no parameter server."""
    return ["ring"] if given.parallel is not None else line_up("compare", learners)


def is_sweep(given: argparse.Namespace, lines: Sequence[str]) -> bool:
    if len(given.learners.counts) > 1 or any(len(expand(line)) > 1 for line in lines):
        return True
    if given.svg is not None:
        raise RequestError("--svg needs a sweep: give several --learners, or a range like k-sync:1..8")
    return False


def check_recipe_options(given: argparse.Namespace) -> None:
    """What is for simulations alone is refused beside --recipe."""
    counts = given.learners.counts
    if len(counts) > 1:
        raise RequestError(f"--recipe takes one number of learners; got {', '.join(map(str, counts))}")
    refuse(given, ("parallel",), "does not apply with --recipe: training in virtual time has no stages")
    refuse(given, ("svg", "epoch_samples"), "does not apply with --recipe, which writes its own chart")
    refuse(given, ("updates", "minibatches"), "does not apply with --recipe; use --epochs")
    refuse(given, _FILES, "does not apply with --recipe: these files are in the output folder (--run-dir)")


def batch_of(given: argparse.Namespace) -> int:
    """Samples in a minibatch, where nothing is trained: 1 unless --batch-size says it."""
    words = changes_of(given).get("train.batch_size")
    try:
        return 1 if words is None else parse_count(str(words))
    except RequestError as error:
        raise RequestError(f"--batch-size: {error}") from None


def sweep(given: argparse.Namespace, lines: Sequence[str]) -> None:
    """Every line with every number of learners: a table, a picture if asked for, or one JSON object."""
    batch = batch_of(given)
    refuse_without_recipe(given, batch_size=True)
    why = "does not apply to a sweep; give one strategy and one number of learners"
    refuse(given, (*_FILES, "minibatches"), why)
    counts = given.learners.counts
    if not lines:  # those that are written the same whatever the number of learners
        tried = [default_lines(given, learners) for learners in counts]
        lines = [line for line in tried[0] if all(line in others for others in tried)]
    setups, left_out = _setups(given, lines)
    with busy("simulating"):
        points = [measure(line, setup, updates=given.updates, batch=batch) for line, setup in setups]
    compared = ratios(points) if len(counts) > 1 else []
    law = points[0].setup.cluster.law.text
    title = f"{' '.join(lines)}, {', '.join(map(str, counts))} learners, {law}, seed {given.seed}"
    if given.svg is not None:
        write_file(given.svg, picture(points, title=title))
    told = {
        "sweep": [point.as_json(given.epoch_samples) for point in points],
        "ratios": [asdict(one) for one in compared],
        "left_out": left_out,
    }
    answer(given, told, lambda out: _show(out, given, title, points, compared, left_out))


def _setups(given: argparse.Namespace, lines: Sequence[str]) -> tuple[list[tuple[str, Setup]], list[str]]:
    """All that is to be simulated, by the line that asked for it, and what cannot be with so few learners."""
    setups: list[tuple[str, Setup]] = []
    left_out: list[str] = []
    costs: list[estimates.Estimate] = []
    for line, learners in ((line, learners) for line in lines for learners in given.learners.counts):
        machines = machines_of(given, learners)
        for strategy in expand(line):
            try:
                costs.append(estimates.of_simulation(machines, strategy, given.updates, careful=True))
                # Before anything is built: all up to here.
                total = estimates.together(f"a sweep of '{strategy}' up to {count_of(learners, 'learner')}", costs)
                estimates.check(given, total)
                setup = machines.setup(strategy)
                setup.updates_for()
                setups.append((line, setup))
            except estimates.TooLargeError:
                raise
            except RequestError as error:
                if len(given.learners.counts) == 1:
                    raise
                left_out.append(f"with {count_of(learners, 'learner')}: {error}")
    if not setups:
        raise RequestError(left_out[0])
    return setups, left_out


def _show(
    out: Terminal,
    given: argparse.Namespace,
    title: str,
    points: list[SweepPoint],
    compared: list[Ratio],
    left_out: list[str],
) -> None:
    heading(out, title)
    columns = ["strategy", "P", "s/update", "theory", "T(P)", "speed-up", "efficiency", "overhead", "samples/s"]
    rows = [_cells(point, given.epoch_samples) for point in points]
    table(out, columns + (["epoch"] if given.epoch_samples else []), rows)
    if compared:
        say(out, f"time per update relative to {compared[0].other}", style="bold")
        table(
            out,
            ["strategy", "P", "ratio", "theory", "off", "P H_P"],
            [
                [
                    one.strategy,
                    str(one.learners),
                    f"{one.ratio:.4g}",
                    "-" if one.theory is None else f"{one.theory:.4g}",
                    "-" if one.theory is None else format_change(one.ratio / one.theory - 1),
                    "-" if one.p_h_p is None else f"{one.p_h_p:.4g}",
                ]
                for one in compared
            ],
        )
    say(out, *(f"skipped {line}" for line in left_out))
    network = "" if points[0].setup.cluster.wires is None else " (compute time only, without the network)"
    formulas = dict.fromkeys(point.theory.formula for point in points if point.theory is not None)
    if formulas:
        say(out, f"theory: {', '.join(formulas)}{network}; X: compute time, X_(K:P): K-th smallest of P", style="dim")
    say(
        out,
        f"T(1) = {format_seconds(points[0].alone_s)}: one learner alone, which sends nothing",
        "T(P): seconds in which the gradients of P minibatches are applied; for a synchronous strategy, "
        "the time of one iteration",
        *(f"{name} = {DEFINITIONS[name].formula}" for name in ("speedup", "efficiency", "overhead")),
        style="dim",
    )
    if given.svg is not None:
        say(out, f"wrote {given.svg}")


def _cells(point: SweepPoint, epoch_samples: int | None) -> list[str]:
    update_s, theory = point.result.seconds_per_update, "-"
    if point.theory is not None:
        theory = f"{format_seconds(point.theory.seconds)} ({format_change(update_s / point.theory.seconds - 1)})"
    cells = [
        point.strategy,
        str(point.learners),
        format_seconds(update_s),
        theory,
        format_seconds(point.iteration_s),
        f"{point.speedup:.3g}",
        percent(point.efficiency),
        format_seconds(point.overhead_s),
        f"{point.samples_per_s:.4g}",
    ]
    return cells + ([format_seconds(epoch_samples / point.samples_per_s)] if epoch_samples else [])
