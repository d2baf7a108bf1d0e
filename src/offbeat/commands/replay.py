"""offbeat replay: what other strategies would have given on the machine of a run, by its own times."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from sys import stderr
from typing import TYPE_CHECKING, Any

from offbeat.commands.base import Command, console, heading, json_argument, print_json, read_accuracy, reader, say
from offbeat.commands.virtual import Live, task_for
from offbeat.errors import OffbeatError, RequestError
from offbeat.machine import available_bytes
from offbeat.number_format import format_seconds, percent
from offbeat.predict.calibration import Calibration, read_calibration
from offbeat.simulate.cluster import check_memory
from offbeat.spec import count_of, parse_count
from offbeat.strategy import line_up

if TYPE_CHECKING:
    from offbeat.predict.replay import Played, RealRun, Replay
    from offbeat.train.tasks import Task

SURE = 0.05  # a gain is told of if it is larger than this, and than what the run's own replay is off by
TRUSTED = 0.10  # an error of the run's own replay beyond which the others are not to be believed
ABOUT, _POINTS = 0.005, "half a point"  # of an accuracy: what another seed may well give, on a small test set


def _arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="the folder of a real run that has ended")
    add(
        "--sync",
        nargs="+",
        action="extend",
        default=[],
        metavar="LINE",
        help="strategies to replay it under, like k-sync:3 (default: some of each kind)",
    )
    add("--learners", type=reader(parse_count), metavar="P", help="as if there had been so many (default: the run's)")
    add(
        "--target",
        type=reader(read_accuracy),
        metavar="X",
        help="the accuracy to reach (default: the highest that the run reached and held)",
    )
    add("--no-accuracy", action="store_true", help="only the times: nothing is trained")
    add(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="of offbeat calibrate: what communication takes under the family that the run was not of",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the times of minibatches that were cancelled (default 0)")
    json_argument(parser)


def _run(given: argparse.Namespace) -> None:
    from offbeat.predict.replay import Replay, notes_of, read_run
    from offbeat.train.config_files import changed

    if given.seed < 0:
        raise RequestError(f"--seed is 0 or more; got {given.seed}")
    if given.no_accuracy and given.target is not None:
        raise RequestError("--target is an accuracy, and --no-accuracy asks for none: leave one of them out")
    check_memory(given.learners or 0, available_bytes())
    calibration = None if given.calibration is None else read_calibration(given.calibration)
    run = read_run(given.run)
    notes = [] if calibration is None else _calibrated(calibration, run)
    run = replace(run, config=changed(run.config, {"device": "auto"}))  # the run's own may be another machine's
    task = task_for(run.config)
    replay = Replay(
        run=run,
        samples=len(task.train),  # type: ignore[arg-type]  # a map-style set has a length: the task was checked
        learners=given.learners or 0,
        seed=given.seed,
        calibration=calibration,
    )
    learners = given.learners or run.config.learners
    own_line = run.config.sync
    lines = given.sync or others_for(own_line, learners)
    measured = learners == run.config.learners  # else its own strategy was never run so
    own, why_not = _own(replay, own_line, needed=measured or not any(line != own_line for line in lines))
    others = sorted((replay(line) for line in dict.fromkeys(lines) if line != own_line), key=lambda one: one.seconds)
    target = None if given.no_accuracy else given.target or run.highest_reached
    if target is not None:
        with Live(f"training {run.config.name} in virtual time") as live:
            own = own and _trained(replay, own, task, target, live)
            others = [_trained(replay, one, task, target, live) for one in others]
    played = [*([] if own is None else [own]), *others]
    doubts = doubts_on(run, own, target) if own is not None and measured else []
    notes = [*doubts, *why_not, *notes_of(run, learners), *notes]
    notes += dict.fromkeys(note for one in played for note in one.notes)
    if target is not None:
        tests = len(task.test)  # type: ignore[arg-type]  # as above
        notes.append(
            f"each accuracy is of one training, with one seed, on {count_of(tests, 'test sample')}: another seed may "
            f"well differ by {_POINTS}"
        )
    if target is None and not given.no_accuracy:
        why = "has no accuracy, only a loss" if run.accuracy is None else "has one evaluation, too few for an accuracy"
        notes.append(f"{run.config.name} {why}: there are only times for as many samples")
    if others:
        notes.append(
            "another strategy loads the machine otherwise, which a replay does not know: it is less sure of others"
        )
    error = own.seconds / run.seconds - 1 if measured and own is not None else None
    advice = advice_on(run, own, others, error, target)
    if given.json:
        trusted = is_trusted(run, own, error, target)
        print_json(_as_json(given, run, played, error, trusted, target, advice, notes))
        return
    out = console()
    heading(out, f"{given.run}: {run.config.name}, {own_line}, {count_of(run.config.learners, 'learner')}, "
                 f"{run.samples:,} samples applied"
                 + ("" if measured else f"; replayed with {count_of(learners, 'learner')}"))  # fmt: skip
    _table(run, own, played, target)
    for line in advice:
        say(out, line)
    for note in notes:
        say(out, f"note: {note}", style="dim")


def others_for(own: str, learners: int) -> list[str]:
    """Some of each kind, and none that is another by another name."""
    return [line for line in line_up("replay", learners) if line != own]


def _calibrated(calibration: Calibration, run: RealRun) -> list[str]:
    """What is to be said of it. `RequestError` where it is not of what the run trained, on such a device."""
    from offbeat.predict.calibration_match import check, of_another_machine

    check(calibration, run.config)
    told = of_another_machine(calibration)
    return [told] if told else []


def _own(replay: Replay, line: str, *, needed: bool) -> tuple[Played | None, list[str]]:
    """The run's own strategy, and why it is not there: it may not fit another number of learners."""
    try:
        return replay(line), []
    except RequestError as error:
        if needed:
            raise
        return None, [f"{line}, as it was, is not replayed: {error}"]


def _trained(replay: Replay, played: Played, task: Task, target: float, live: Live) -> Played:
    live.begin(played.strategy)
    try:
        with redirect_stdout(stderr):  # what a model or data set of one's own prints
            return replay.train(played, task, target, live.hear)
    except (OffbeatError, OSError, MemoryError):
        raise
    except Exception as error:  # of the user's own code
        raise OffbeatError(
            f"{played.strategy}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error


# --- words ----------------------------------------------------------------------------------------------------------


def _table(run: RealRun, own: Played | None, played: Sequence[Played], target: float | None) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy", overflow="fold")
    columns = [f"{run.samples:,} samples", "against the run", "updates", "staleness", "waiting", "thrown away"]
    if target is not None:
        columns.insert(2, f"to {percent(target)}")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    shares = run.recorded.shares
    rest = (f"{run.updates:,}", f"{run.staleness:.2f}", f"{100 * shares.wait:.0f} %", f"{100 * shares.waste:.0f} %")
    reached = [] if target is None else [_seconds(run.reached_s(target))]
    table.add_row(f"{run.config.sync}, as it was", format_seconds(run.seconds), "measured", *reached, *rest)
    for one in played:
        reached = [] if one.reached is None else [_seconds(one.reached.seconds, one.reached.best)]
        table.add_row(
            f"{one.strategy}, replayed" if one is own else one.strategy,
            format_seconds(one.seconds),
            _difference(one.seconds / run.seconds - 1),
            *reached,
            f"{one.updates:,}",
            f"{one.staleness:.2f}",
            f"{100 * one.wait_share:.0f} %",
            f"{100 * one.waste_share:.0f} %",
        )
    console().print(table)


def _seconds(value: float | None, best: float | None = None) -> str:
    if value is not None:
        return format_seconds(value)
    return "not reached" if best is None else f"not (best {percent(best)})"


def _difference(share: float) -> str:
    return f"{'−' if share < 0 else '+'}{abs(100 * share):.1f} %"


def doubts_on(run: RealRun, own: Played, target: float | None) -> list[str]:
    """Why accuracies of replays say little here: the run's own replay has another than the run, or other staleness."""
    from offbeat.predict.replay import is_as_stale

    lines = []
    if not is_as_stale(run, own):
        so = "staleness of the others is as unsure" if target is None else "no advice is given by accuracies"
        lines.append(f"the replay of what really ran has gradients {own.staleness:.1f} versions old, and they were "
                     f"{run.staleness:.1f}: {so}")  # fmt: skip
    if target is not None and own.reached is not None:
        was, best = _best(run), own.reached.best
        if (was >= target and _misses(best, target)) or (best >= target and _misses(was, target)):
            lines.append(f"the replay of what really ran got to {percent(best)}, and the run to {percent(was)}, where "
                         f"{percent(target)} is asked for: no advice is given by accuracies")  # fmt: skip
    return lines


def is_trusted(run: RealRun, own: Played | None, error: float | None, target: float | None) -> bool:
    """Whether the replay of what really ran is near enough to it, in time, staleness and accuracy."""
    return own is not None and error is not None and abs(error) <= TRUSTED and not doubts_on(run, own, target)


def advice_on(
    run: RealRun, own: Played | None, others: Sequence[Played], error: float | None, target: float | None
) -> list[str]:
    """What would have been best, and how sure that is: by the accuracy, where that was asked for and is to be believed.

    `error` is that of the run's own replay; None, and maybe no such replay, where nothing like it was measured.
    """
    measured = own is not None and error is not None
    if own is not None and error is not None:
        lines = [f"replayed {format_seconds(own.seconds)} against {format_seconds(run.seconds)} measured: "
                 f"{_difference(error)}"]  # fmt: skip
        target = None if doubts_on(run, own, target) else target
        real_s = run.seconds if target is None else run.reached_s(target)
    else:
        many = count_of((own or others[0]).learners, "learner")
        lines = [f"with {many} nothing was measured: how far the replay is off is not known"]
        real_s = None if own is None else _time(own, target)
    off = _off_by(run, own, error, target)
    what = f"for {run.samples:,} samples" if target is None else f"to {percent(target)}"
    timed = [(seconds, one) for one in others if (seconds := _time(one, target)) is not None]
    if timed:
        seconds, best = min(timed, key=lambda pair: pair[0])
        needed = f"{best.strategy} would have needed {format_seconds(seconds)} {what}"
        if own is None:
            lines.append(needed + (", the least of these" if len(others) > 1 else ""))
        elif real_s is None:
            got = _best(run) if measured else own.reached.best if own.reached else 0.0
            lines.append(f"{needed}, where {own.strategy} got to {percent(got)}")
        elif seconds < real_s * (1 - max(off, SURE)):
            sure = f"; the replay of what really ran is {100 * off:.1f} % off" if measured else ""
            sure += ", but had other communication" if best.foreign and measured else ""
            lines.append(f"{needed} instead of {format_seconds(real_s)}{sure}")
        else:
            lines.append(
                f"none of the others would have been clearly faster than {own.strategy} {what}: by "
                f"{100 * max(off, SURE):.0f} % or more"
            )
    elif others:
        lines.append(f"none of the others would have got {what} in as many epochs, with this one seed")
    if target is not None and (near := [told for one in (own, *others) if (told := _about_there(one, target))]):
        lines.append(f"about there, within {_POINTS} of {percent(target)} with one seed: {', '.join(near)}")
    if error is not None and abs(error) > TRUSTED:
        lines.append(
            f"the run's own replay is {100 * abs(error):.0f} % off: do not trust the other numbers further than that"
        )
    return lines


def _off_by(run: RealRun, own: Played | None, error: float | None, target: float | None) -> float:
    """What the run's own replay is off by, in the time for as many samples and, if that is asked for, to the target."""
    if own is None or error is None:
        return 0.0
    was_s, replayed_s = (None, None) if target is None else (run.reached_s(target), _time(own, target))
    return abs(error) if not was_s or replayed_s is None else max(abs(error), abs(replayed_s / was_s - 1))


def _best(run: RealRun) -> float:
    return run.highest_reached or 0.0


def _misses(accuracy: float, target: float) -> bool:
    """By more than chance; the rest is for rounding."""
    return target - accuracy > ABOUT + 1e-9


def _about_there(one: Played | None, target: float) -> str:
    """Its name and accuracy, where that is not the target but as near as another seed may come; else nothing."""
    reached = None if one is None else one.reached
    if one is None or reached is None or reached.seconds is not None or _misses(reached.best, target):
        return ""
    return f"{one.strategy} ({percent(reached.best)})"


def _time(one: Played, target: float | None) -> float | None:
    return one.seconds if target is None else None if one.reached is None else one.reached.seconds


def _as_json(
    given: argparse.Namespace,
    run: RealRun,
    played: Sequence[Played],
    error: float | None,
    trusted: bool,
    target: float | None,
    advice: Sequence[str],
    notes: Sequence[str],
) -> dict[str, Any]:
    recorded = run.recorded
    return {
        "run_dir": str(given.run),
        "name": run.config.name,
        "seed": given.seed,
        "samples": run.samples,
        "target": target,
        "run": {
            "strategy": run.config.sync,
            "learners": run.config.learners,
            "seconds": run.seconds,
            "target_seconds": None if target is None else run.reached_s(target),
            "accuracy": run.accuracy,
            "updates": run.updates,
            "staleness_mean": run.staleness,
            "wait_share": recorded.shares.wait,
            "waste_share": recorded.shares.waste,
            "minibatches": recorded.minibatches,
            "cancelled": recorded.cancelled,
            "there_s": recorded.there_s,
            "back_s": recorded.back_s,
            "epoch_ends_s": run.ends_s * run.samples,
        },
        "error": error,
        "trusted": trusted,
        "replayed": [_played_json(one, run) for one in played],
        "advice": list(advice),
        "notes": list(notes),
    }


def _played_json(one: Played, run: RealRun) -> dict[str, Any]:
    return {
        "strategy": one.strategy,
        "learners": one.learners,
        "seconds": one.seconds,
        "against_run": one.seconds / run.seconds - 1,
        "target_seconds": None if one.reached is None else one.reached.seconds,
        "best_accuracy": None if one.reached is None else one.reached.best,
        "updates": one.updates,
        "samples": one.samples,
        "staleness_mean": one.staleness,
        "wait_share": one.wait_share,
        "waste_share": one.waste_share,
    }


COMMAND = Command(
    summary="what other strategies would have given, by a run's own times",
    about="""Take the compute times of a real run, in the order in which they were, and what lay between minibatches,
and replay it in virtual time: under its own strategy, which says how far the replay is off, and under others. Told are
the times for as many applied samples and, trained in virtual time, to the same accuracy, without evaluations.""",
    examples=(
        "replay runs/digits --no-accuracy",
        "replay runs/digits --sync async full-sync",
    ),
    arguments=_arguments,
    run=_run,
)
