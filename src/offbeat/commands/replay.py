"""offbeat replay: what other strategies would have given on the machine of a run, by its own times."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.commands.base import Command, Terminal, answer, heading, option, read_accuracy, say, stages, table
from offbeat.commands.virtual_training import QUIET_S, evaluations
from offbeat.errors import RequestError
from offbeat.machine import available_bytes
from offbeat.number_format import format_seconds, percent
from offbeat.predict.calibration import read_calibration
from offbeat.predict.replay_advice import format_difference
from offbeat.simulate.cluster import check_memory
from offbeat.spec import count_of, parse_count

if TYPE_CHECKING:
    from offbeat.predict.replay import ReplayReport


def _run(given: argparse.Namespace) -> None:
    from offbeat.predict.replay import read_run, replay_run

    if given.seed < 0:
        raise RequestError(f"--seed is 0 or more; got {given.seed}")
    if given.no_accuracy and given.target is not None:
        raise RequestError("--target and --no-accuracy cannot be used together")
    check_memory(given.learners or 0, available_bytes())
    calibration = None if given.calibration is None else read_calibration(given.calibration)
    run = read_run(given.run)
    with stages(f"replaying {run.config.name}", QUIET_S) as tell:
        report = replay_run(
            run,
            given.sync,
            learners=given.learners or 0,
            seed=given.seed,
            calibration=calibration,
            target=given.target,
            accuracy=not given.no_accuracy,
            tell=lambda strategy: evaluations(tell, strategy),
        )
    told = {"run_dir": str(given.run), "name": run.config.name, "seed": given.seed} | report.as_json()
    answer(given, told, lambda out: _show(out, given.run, report))


def _show(out: Terminal, folder: Path, report: ReplayReport) -> None:
    run, target = report.run, report.target
    heading(out, f"{folder}: {run.config.name}, {run.config.sync}, {count_of(run.config.learners, 'learner')}, "
                 f"{run.samples:,} samples applied"
                 + ("" if report.measured else f"; replayed with {count_of(report.learners, 'learner')}"))  # fmt: skip
    columns = ["strategy", f"{run.samples:,} samples", "change"]
    columns += [] if target is None else [f"to {percent(target)}"]
    reached = [] if target is None else [_seconds(run.reached_s(target))]
    common = _common_cells(run.updates, run.staleness, run.recorded.wait_share, run.recorded.waste_share)
    rows = [[f"{run.config.sync}, the run", format_seconds(run.seconds), "measured", *reached, *common]]
    for one in report.replayed:
        name = f"{one.strategy}, replayed" if one is report.own else one.strategy
        against = format_difference(one.seconds / run.seconds - 1)
        reached = [] if one.reached is None else [_seconds(one.reached.seconds, one.reached.best)]
        common = _common_cells(one.updates, one.staleness, one.wait_share, one.waste_share)
        rows.append([name, format_seconds(one.seconds), against, *reached, *common])
    table(out, [*columns, "updates", "staleness", "waiting", "thrown away"], rows, wrapped=(0,))
    say(out, *report.advice)
    say(out, *(f"note: {note}" for note in report.notes), style="dim")


def _common_cells(updates: int, staleness: float, wait: float, waste: float) -> list[str]:
    return [f"{updates:,}", f"{staleness:.2f}", percent(wait, 0), percent(waste, 0)]


def _seconds(value: float | None, best: float | None = None) -> str:
    if value is not None:
        return format_seconds(value)
    return "not reached" if best is None else f"not reached (best {percent(best)})"


COMMAND = Command(
    summary="estimate how other strategies would have performed, from the compute times of a run",
    about="""Replay a finished run in virtual time, with its recorded compute times: under its own strategy, which shows
the error of the replay, and under others. The table gives the time for the same number of samples. Unless
--no-accuracy is given, each strategy also trains in virtual time, and the table gives the time to the same accuracy.
The time for evaluation is left out.""",
    examples=(
        "replay runs/digits --no-accuracy",
        "replay runs/digits --sync async full-sync",
    ),
    options=(
        option("run", read=Path, metavar="RUN", help="directory of a finished run"),
        option(
            "--sync",
            nargs="+",
            action="extend",
            default=[],
            metavar="LINE",
            help="strategies to replay, like k-sync:3 (default: some of each kind)",
        ),
        option("--learners", read=parse_count, metavar="P", help="number of learners (default: as in the run)"),
        option(
            "--target",
            read=read_accuracy,
            metavar="X",
            help="target accuracy (default: the highest that the run reached and kept)",
        ),
        option("--no-accuracy", action="store_true", help="estimate times only; train nothing"),
        option(
            "--calibration",
            read=Path,
            metavar="FILE",
            help="file written by offbeat calibrate, for communication costs that the run did not measure",
        ),
        option(
            "--seed",
            type=int,
            default=0,
            metavar="N",
            help="seed for the times of cancelled minibatches (default 0)",
        ),
    ),
    run=_run,
)
