"""offbeat bench scaling, accuracy and predictions: their options, and how what they found is printed."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.commands.base import console, facts, heading, print_json, read_accuracy, reader, say, table
from offbeat.errors import OffbeatError, RequestError
from offbeat.number_format import format_seconds
from offbeat.runs.metrics import format_accuracy
from offbeat.spec import choice, count_of, parse_count
from offbeat.train.arguments import add_arguments as add_recipe_arguments
from offbeat.train.arguments import given as changes_of

if TYPE_CHECKING:
    from rich.console import Console

    from offbeat.measure.accuracy import AccuracyResult
    from offbeat.measure.predictions import PredictionRow, Predictions
    from offbeat.measure.scaling import ScalingResult
    from offbeat.predict.calibration import Calibration
    from offbeat.train.config import Config

SCALING, ACCURACY, PREDICTIONS = "scaling", "accuracy", "predictions"
_BOTH: dict[str, Any] = {
    "lines": (),
    "servers": None,  # None: as the recipe says
    "slow": (),
    "seed": None,
    "device": None,
    "calibration": None,
    "price": None,
    "out": None,
}
# What an option is when left out.
DEFAULTS: dict[str, dict[str, Any]] = {
    SCALING: {
        **_BOTH,
        "learners": [1, 2, 4],
        "sync": ("ring", "k-async:2"),
        "rounds": 5,
        "kind": "weak",
        "accuracy_within": 0.01,
    },
    ACCURACY: {**_BOTH, "learners": [2], "sync": ("ring", "async"), "target": None, "seeds": 3, "svg": None},
    PREDICTIONS: {
        **{name: value for name, value in _BOTH.items() if name != "price"},
        "learners": [2, 4],
        "sync": ("ring", "k-sync:2", "k-batch-async:2"),
        "slow": ("none", "exp:0.02", "learner=0,factor=2"),
        "rounds": 3,
    },
}
_SECTIONS = ("model", "data", "train")  # of a recipe: the rest of it is asked for otherwise
_BUSY = 2.0  # rounds that differ by more are worth a word
_WIDE = 100  # columns, from which on intervals are in the table

Progress = AbstractContextManager[Callable[[str], None]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("trainings: scaling, accuracy, predictions")
    add = group.add_argument
    add(
        "--sync",
        nargs="+",
        metavar="STRATEGY",
        help="that are compared (scaling: ring k-async:2; accuracy: ring async)",
    )
    add(
        "--kind",
        type=reader(choice("weak", "strong")),
        metavar="weak|strong",
        help="scaling: what stays the same, the minibatch of a learner (default) or that of all together",
    )
    add("--accuracy-within", type=reader(_share), metavar="X", help="scaling: of the best, to be ranked (default 0.01)")
    add("--target", type=reader(read_accuracy), metavar="X", help="accuracy: to reach, like 0.97")
    add("--seeds", type=reader(parse_count), metavar="N", help="accuracy: trainings of each strategy (default 3)")
    add("--device", metavar="NAME", help="auto (a GPU if there is one), cpu or cuda")
    add("--calibration", type=Path, metavar="FILE", help="predict as well, with what offbeat calibrate has measured")
    add("--price", type=reader(_price), metavar="X", help="of a device hour, for the cost")
    add("--out", type=Path, metavar="FILE", help="write the result as JSON, for offbeat report")
    add("--svg", type=Path, metavar="FILE", help="accuracy: draw error against time")
    add_recipe_arguments(parser, sections=_SECTIONS)


def _number(text: str, wanted: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise RequestError(f"expected {wanted}; got '{text[:40]}'")
    return number


def _share(text: str) -> float:
    wanted = "a share from 0 to 1, like 0.01"
    number = _number(text, wanted)
    if not 0 <= number <= 1:
        raise RequestError(f"expected {wanted}; got '{text[:40]}'")
    return number


def _price(text: str) -> float:
    wanted = "a price of a device hour, 0 or more"
    number = _number(text, wanted)
    if number < 0:
        raise RequestError(f"expected {wanted}; got '{text[:40]}'")
    return number


def refuse_changes(given: argparse.Namespace) -> None:
    """Fields of a recipe say nothing where none is trained."""
    from offbeat.train.config_files import flag

    for key in changes_of(given):
        raise RequestError(f"bench: {flag(key)} is not an option of bench {given.what}")


# --- running ---------------------------------------------------------------------------------------------------------


def run(given: argparse.Namespace, showing: Progress) -> None:
    """Either of them. What is wrong is told before anything runs."""
    config = _config(given)
    for path in (given.out, given.svg):
        _check_path(path)
    runs = {SCALING: _run_scaling, ACCURACY: _run_accuracy, PREDICTIONS: _run_predictions}
    runs[given.what](given, config, showing)


def _run_scaling(given: argparse.Namespace, config: Config, showing: Progress) -> None:
    from offbeat.measure import scaling

    request = scaling.ScalingRequest(
        config=config,
        lines=tuple(given.sync),
        learners=tuple(given.learners),
        kind=given.kind,
        rounds=given.rounds,
        seed=config.seed,
        accuracy_within=given.accuracy_within,
        price=given.price,
    )
    calibration = _calibration(given, request.configs(0)[0])
    predictor = None if calibration is None else _predictor(calibration, config)
    with redirect_stdout(sys.stderr), showing as progress:  # what modules of one's own print when they are loaded
        result = scaling.measure(request, progress, predictor=predictor)
    print_json(result.as_json()) if given.json else print_scaling(result)
    _write(given, result.as_json())


def _run_accuracy(given: argparse.Namespace, config: Config, showing: Progress) -> None:
    from offbeat.measure import accuracy

    if len(given.learners) > 1:
        raise RequestError("bench: --learners is one number for bench accuracy")
    if given.target is None:
        raise RequestError("bench: accuracy needs an end: say the accuracy to reach, like --target 0.97")
    request = accuracy.AccuracyRequest(
        config=config,
        target=given.target,
        lines=tuple(given.sync),
        learners=given.learners[0],
        seeds=given.seeds,
        seed=config.seed,
        price=given.price,
    )
    calibration = _calibration(given, request.configs(request.seed)[0])
    foresee = None if calibration is None else _foresight(calibration, request.target)
    with redirect_stdout(sys.stderr), showing as progress:  # what modules of one's own print when they are loaded
        result = accuracy.measure(request, progress, predictor=foresee)
    print_json(result.as_json()) if given.json else print_accuracy(result)
    _write(given, result.as_json())
    if given.svg is not None:
        _write_whole(given.svg, result.chart())
        if not given.json:
            print(f"error against time: {given.svg}")


def _run_predictions(given: argparse.Namespace, config: Config, showing: Progress) -> None:
    from offbeat.measure import predictions

    calibration = _calibration(given, config)
    if calibration is None:
        raise RequestError("bench: predictions are made from a calibration: --calibration FILE (offbeat calibrate)")
    request = predictions.PredictionsRequest(
        config=config,
        calibration=calibration,
        lines=tuple(given.sync),
        learners=tuple(given.learners),
        slow=tuple(given.slow),
        rounds=given.rounds,
    )
    with redirect_stdout(sys.stderr), showing as progress:  # what modules of one's own print when they are loaded
        result = predictions.measure(request, progress)
    print_json(result.as_json()) if given.json else print_predictions(result)
    _write(given, result.as_json())


def print_predictions(result: Predictions) -> None:
    from offbeat.measure.predictions import DEFINITIONS

    out = console()
    request = result.request
    heading(out, f"{request.config.name}: seconds an update, predicted and measured, the worst first")
    table(
        out,
        ("strategy", "learners", "delays", "measured", "of rounds", "predicted", "error"),
        [
            (
                row.config.sync,
                str(row.config.learners),
                " ".join(row.config.slow) or "none",
                format_seconds(row.measured_s),
                f"{format_seconds(min(row.rounds_s))} to {format_seconds(max(row.rounds_s))}",
                format_seconds(row.predicted_s),
                "a probe" if row.probe else _off(row.error),
            )
            for row in result.worst_first()
        ],
    )
    machine = result.machine
    facts(
        out,
        [
            ("in all", result.summary()),
            ("machine", f"{machine['cores']} cores, load {machine['load'] or 0.0:.1f} before; {machine['processor']}"),
            *((name, text) for name, text in DEFINITIONS.items()),
        ],
    )
    for fast, slow in result.order()[1]:
        say(out, f"predicted the wrong way round: {_named(fast)} is faster than {_named(slow)}")


def _named(row: PredictionRow) -> str:
    delays = f", {' '.join(row.config.slow)}" if row.config.slow else ""
    return f"{row.config.sync} with {count_of(row.config.learners, 'learner')}{delays}"


def _config(given: argparse.Namespace) -> Config:
    """The recipe with all that was changed, but for strategy and learners."""
    from offbeat.train.config_files import changed, flag, override, read_recipe
    from offbeat.train.fields import FieldError
    from offbeat.train.recipes import DEFAULT

    if len(given.lines) > 1:
        raise RequestError(
            f"bench: one recipe is measured, and '{given.lines[1]}' is a second; strategies are named by --sync"
        )
    changes = changes_of(given)
    for key in changes:
        if key.partition(".")[0] not in _SECTIONS:
            raise RequestError(f"bench: --set {key}: here only fields of {', '.join(_SECTIONS)} are set so")
        if key.replace("-", "_") == "train.stop_at":
            raise RequestError(f"bench: {flag(key)} is not for a benchmark: all go through all epochs")
    config = override(read_recipe(given.lines[0] if given.lines else DEFAULT), changes)
    try:
        return changed(
            config,
            {
                "sync": "ring",
                "learners": 0,
                "servers": given.servers or config.servers,
                "seed": config.seed if given.seed is None else given.seed,
                "slow": config.slow if given.what == PREDICTIONS else tuple(given.slow) or config.slow,
                "device": given.device or config.device,
            },
        )
    except FieldError as error:
        raise RequestError(f"bench: {flag(error.key)}: {error.why}") from None


def _calibration(given: argparse.Namespace, config: Config) -> Calibration | None:
    """The file that was named, if it is of this training."""
    if given.calibration is None:
        return None
    from offbeat.predict.calibration import read_calibration

    calibration = read_calibration(given.calibration)
    from offbeat.predict.calibration_match import check, of_another_machine

    check(calibration, config)
    elsewhere = of_another_machine(calibration)
    if elsewhere:
        print(f"offbeat: {elsewhere}", file=sys.stderr)
    return calibration


def _predictor(calibration: Calibration, config: Config) -> Callable[[Config], Any]:
    """Of so many samples as the recipe has, which are counted when the first prediction is asked for."""
    samples: list[int] = []

    def predictor(configured: Config) -> Any:
        from offbeat.predict.from_calibration import predict
        from offbeat.train.tasks import task_of

        if not samples:
            samples.append(len(task_of(config).train))  # type: ignore[arg-type] # a map-style set has a length
        return predict(calibration, configured, samples[0])

    return predictor


def _foresight(calibration: Calibration, target: float) -> Callable[[Config], float | None]:
    def foresee(config: Config) -> float | None:
        from offbeat.predict.from_calibration import foresee_accuracy

        return foresee_accuracy(calibration, config, target)

    return foresee


def _check_path(path: Path | None) -> None:
    if path is not None and not path.absolute().parent.is_dir():
        raise RequestError(f"bench: cannot write {path}: there is no folder {path.absolute().parent}")
    if path is not None and path.is_dir():
        raise RequestError(f"bench: cannot write {path}: it is a folder")


def _write(given: argparse.Namespace, result: Mapping[str, Any]) -> None:
    if given.out is not None:
        _write_whole(given.out, json.dumps(result, indent=1, allow_nan=False) + "\n")
        if not given.json:
            print(f"written to {given.out}; offbeat report shows it")


def _write_whole(path: Path, text: str) -> None:
    """All of it, or as it was before."""
    beside = path.with_name(f".{path.name}.unfinished")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise OffbeatError(f"cannot write {path}: {error.strerror}") from None


# --- printing --------------------------------------------------------------------------------------------------------


def _without(hidden: Sequence[int], words: Sequence[str]) -> list[str]:
    return [word for number, word in enumerate(words) if number not in hidden]


def _shown(value: float | None, form: Callable[[float], str]) -> str:
    return "-" if value is None else form(value)


def _joules(value: float) -> str:
    return f"{value:,.0f} J" if value >= 100 else f"{value:.3g} J"


def _money(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def _off(value: float) -> str:
    return f"{100 * value:+.1f} %"


def print_scaling(result: ScalingResult) -> None:
    from offbeat.measure.bench_results import format_ms
    from offbeat.measure.scaling import STRONG, definitions, ranking

    out = console()
    request = result.request
    strong = request.kind == STRONG
    batch = result.rows[0].batch
    total = f"minibatches of {batch}" + (" in all" if strong else " of each learner")
    rounds = f"median of {count_of(request.rounds, 'round')}"
    heading(out, f"{request.config.name}: {request.kind} scaling, {total}, {request.config.train.precision}, {rounds}")
    say(out, f"base: {result.base}")
    wide = out.width >= _WIDE
    columns = ["strategy", "learners" if wide else "n", "T(n) ms", "of rounds", "samples/s", "speed-up", "efficiency"]
    columns += ["overhead ms" if wide else "overhead", "accuracy"]
    rows = [
        [
            row.line if not row.is_base else "(alone)",
            str(row.learners),
            format_ms(1e3 * row.seconds.median),
            f"{format_ms(1e3 * row.seconds.low)}-{format_ms(1e3 * row.seconds.high)}",
            f"{row.throughput:,.0f}" if row.throughput >= 100 else f"{row.throughput:.3g}",
            f"{row.speedup.median:.2f}x",
            f"{100 * row.efficiency:.0f} %",
            _shown(row.overhead_s, lambda seconds: format_ms(1e3 * seconds)),
            "-" if row.accuracy is None else format_accuracy(row.accuracy, row.test_samples),
        ]
        for row in result.rows
    ]
    hidden = [*([7] if strong and wide else []), *([] if wide else [3, 4, 7])]
    table(out, _without(hidden, columns), [_without(hidden, row) for row in rows])
    more = {
        "predicted ms": [_shown(row.predicted_s, lambda seconds: format_ms(1e3 * seconds)) for row in result.rows],
        "off": [_shown(row.error, _off) for row in result.rows],
        "energy": [_shown(row.joules, _joules) for row in result.rows],
        "cost": [_shown(row.cost, _money) for row in result.rows],
    }
    _more(out, [[row.line if not row.is_base else "(alone)", str(row.learners)] for row in result.rows], more)
    for number, line in enumerate(ranking(result.rows)):
        say(out, line, style=None if number else "bold")
    out.print()
    names = {"T(n)": "seconds", "samples/s": "throughput", "speed-up": "speedup", "overhead": "overhead_s"}
    shown = ["T(n)", "samples/s", "speed-up", "efficiency", *([] if strong else ["overhead"]), "accuracy", "ranked"]
    defined = definitions(request)
    rows_of_facts = [(name, defined[names.get(name, name)].removeprefix(f"{name}: ")) for name in shown]
    _end(out, result.notes, rows_of_facts, result.machine)
    if result.spread > _BUSY:
        words = (
            f"rounds of one differ by up to {result.spread:.1f}x: the machine was busy; measure again when it is not"
        )
        say(out, words, style="yellow")


def print_accuracy(result: AccuracyResult) -> None:
    from offbeat.measure.accuracy import definitions, ranking
    from offbeat.number_format import percent

    out = console()
    request = result.request
    seeds = count_of(request.seeds, "seed")
    learners = count_of(request.learners, "learner")
    heading(
        out,
        f"{request.config.name} to {percent(request.target)}: {learners}, {seeds} from {request.seed}, "
        f"{count_of(request.config.train.epochs, 'epoch')}, {request.config.train.precision}",
    )
    rows = []
    for row in result.rows:
        found = row.seconds_to_target
        rows.append(
            [
                row.line,
                "-" if found is None else format_seconds(found.median),
                "-" if found is None else f"{format_seconds(found.low)} to {format_seconds(found.high)}",
                f"{row.reached} of {len(row.runs)}",
                _shown(row.updates_to_target, lambda updates: f"{updates:,.0f}"),
                format_accuracy(row.accuracy_mean, row.test_samples),
                _shown(row.accuracy_std, percent),
                format_seconds(row.seconds),
            ]
        )
    columns = ["strategy", "to target", "of seeds", "reached", "updates", "accuracy", "std", "whole run"]
    hidden = [] if out.width >= _WIDE else [2, 6, 7]
    table(out, _without(hidden, columns), [_without(hidden, row) for row in rows])
    more = {
        "predicted": [_shown(row.predicted_s, format_seconds) for row in result.rows],
        "off": [_shown(row.error, _off) for row in result.rows],
        "energy": [_shown(row.joules, _joules) for row in result.rows],
        "to target": [_shown(row.joules_to_target, _joules) for row in result.rows],
        "cost": [_shown(row.cost, _money) for row in result.rows],
        "cost to target": [_shown(row.cost_to_target, _money) for row in result.rows],
    }
    if set(more["energy"]) == {"-"}:
        del more["to target"]
    _more(out, [[row.line] for row in result.rows], more)
    for number, line in enumerate(ranking(result.rows, request.target)):
        say(out, line, style=None if number else "bold")
    out.print()
    names = {"to target": "seconds_to_target", "updates": "updates_to_target", "accuracy": "accuracy_mean"}
    defined = definitions(request)
    shown = ["to target", "updates", "accuracy", "joules_to_target"] if "to target" in more else [*names]
    rows_of_facts = [
        ("energy" if name == "joules_to_target" else name, defined[names.get(name, name)]) for name in shown
    ]
    _end(out, result.notes, rows_of_facts, result.machine)


def _more(out: Console, who: Sequence[Sequence[str]], columns: Mapping[str, Sequence[str]]) -> None:
    """What is known of predictions, energy and cost; nothing where nothing is."""
    known = {name: values for name, values in columns.items() if set(values) != {"-"}}
    if known:
        names = ["strategy", "learners"][: len(who[0])]
        rows = [[*one, *values] for one, values in zip(who, zip(*known.values(), strict=True), strict=True)]
        table(out, [*names, *known], rows)


def _end(
    out: Console, notes: Sequence[str], definitions: Sequence[tuple[str, str]], machine: Mapping[str, Any]
) -> None:
    for note in notes:
        say(out, f"note: {note}")
    out.print()
    load = "load not known" if machine["load"] is None else f"load {machine['load']:.2f} before"
    cores = f"{count_of(machine['cores'], 'core')} ({machine['processor']}), {load}"
    with_ = f"torch {machine['torch']} on {machine['device']} with {count_of(machine['threads'], 'thread')} a learner"
    facts(out, [*definitions, ("machine", cores), ("with", with_)])
