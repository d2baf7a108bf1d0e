"""offbeat bench scaling, accuracy and predictions: their options, requests and files."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.commands.base import read_accuracy, reader
from offbeat.errors import OffbeatError, RequestError
from offbeat.spec import choice, parse_count
from offbeat.train.arguments import add_arguments as add_recipe_arguments
from offbeat.train.arguments import given as changes_of

if TYPE_CHECKING:
    from offbeat.measure.bench_result import BenchResult
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

Progress = Callable[[str], None]


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


def _number(text: str, wanted: str, most: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= most:
        raise RequestError(f"expected {wanted}; got '{text[:40]}'")
    return number


def _share(text: str) -> float:
    return _number(text, "a share from 0 to 1, like 0.01", 1.0)


def _price(text: str) -> float:
    return _number(text, "a price of a device hour, 0 or more", sys.float_info.max)


def refuse_changes(given: argparse.Namespace) -> None:
    """Fields of a recipe say nothing where none is trained."""
    from offbeat.train.config_files import flag

    for key in changes_of(given):
        raise RequestError(f"bench: {flag(key)} is not an option of bench {given.what}")


# --- running ---------------------------------------------------------------------------------------------------------


def measurement(options: argparse.Namespace) -> Callable[[Progress], BenchResult]:
    """What is wrong with the request is told here, before anything runs."""
    config = _config(options)
    for path in (options.out, options.svg):
        _check_path(path)
    prepare = {SCALING: _prepare_scaling, ACCURACY: _prepare_accuracy, PREDICTIONS: _prepare_predictions}
    prepared = prepare[options.what](options, config)

    def measure(progress: Progress) -> BenchResult:
        with redirect_stdout(sys.stderr):  # what modules of one's own print when they are loaded
            return prepared(progress)

    return measure


def _prepare_scaling(options: argparse.Namespace, config: Config) -> Callable[[Progress], BenchResult]:
    from offbeat.measure import scaling_bench

    request = scaling_bench.ScalingRequest(
        config=config,
        lines=tuple(options.sync),
        learners=tuple(options.learners),
        kind=options.kind,
        rounds=options.rounds,
        seed=config.seed,
        accuracy_within=options.accuracy_within,
        price=options.price,
    )
    calibration = _calibration(options, request.configs(0)[0])
    predictor = None if calibration is None else _samples_per_s(calibration, config)
    return lambda progress: scaling_bench.measure(request, progress, predictor=predictor)


def _prepare_accuracy(options: argparse.Namespace, config: Config) -> Callable[[Progress], BenchResult]:
    from offbeat.measure import accuracy_bench

    if len(options.learners) > 1:
        raise RequestError("bench: --learners is one number for bench accuracy")
    if options.target is None:
        raise RequestError("bench: accuracy needs an end: say the accuracy to reach, like --target 0.97")
    request = accuracy_bench.AccuracyRequest(
        config=config,
        target=options.target,
        lines=tuple(options.sync),
        learners=options.learners[0],
        seeds=options.seeds,
        seed=config.seed,
        price=options.price,
    )
    calibration = _calibration(options, request.configs(request.seed)[0])
    predictor = None if calibration is None else _seconds_to_target(calibration, request.target)
    return lambda progress: accuracy_bench.measure(request, progress, predictor=predictor)


def _prepare_predictions(options: argparse.Namespace, config: Config) -> Callable[[Progress], BenchResult]:
    from offbeat.measure import predictions_bench

    calibration = _calibration(options, config)
    if calibration is None:
        raise RequestError("bench: predictions are made from a calibration: --calibration FILE (offbeat calibrate)")
    request = predictions_bench.PredictionsRequest(
        config=config,
        calibration=calibration,
        lines=tuple(options.sync),
        learners=tuple(options.learners),
        slow=tuple(options.slow),
        rounds=options.rounds,
    )
    return lambda progress: predictions_bench.measure(request, progress)


def _config(options: argparse.Namespace) -> Config:
    """The recipe with all that was changed, but for strategy and learners."""
    from offbeat.train.config_files import changed, flag, override, read_recipe
    from offbeat.train.fields import FieldError
    from offbeat.train.recipes import DEFAULT

    if len(options.lines) > 1:
        raise RequestError(
            f"bench: one recipe is measured, and '{options.lines[1]}' is a second; strategies are named by --sync"
        )
    changes = changes_of(options)
    for key in changes:
        if key.partition(".")[0] not in _SECTIONS:
            raise RequestError(f"bench: --set {key}: here only fields of {', '.join(_SECTIONS)} are set so")
        if key.replace("-", "_") == "train.stop_at":
            raise RequestError(f"bench: {flag(key)} is not for a benchmark: all go through all epochs")
    config = override(read_recipe(options.lines[0] if options.lines else DEFAULT), changes)
    try:
        return changed(
            config,
            {
                "sync": "ring",
                "learners": 0,
                "servers": options.servers or config.servers,
                "seed": config.seed if options.seed is None else options.seed,
                "slow": config.slow if options.what == PREDICTIONS else tuple(options.slow) or config.slow,
                "device": options.device or config.device,
            },
        )
    except FieldError as error:
        raise RequestError(f"bench: {flag(error.key)}: {error.why}") from None


def _calibration(options: argparse.Namespace, config: Config) -> Calibration | None:
    """The file that was named, if it is of this training."""
    if options.calibration is None:
        return None
    from offbeat.predict.calibration import read_calibration

    calibration = read_calibration(options.calibration)
    from offbeat.predict.calibration_match import check, of_another_machine

    check(calibration, config)
    elsewhere = of_another_machine(calibration)
    if elsewhere:
        print(f"offbeat: {elsewhere}", file=sys.stderr)
    return calibration


def _samples_per_s(calibration: Calibration, config: Config) -> Callable[[Config], float]:
    """Predict with so many samples as the recipe has, which are counted when the first prediction is asked for."""

    @cache
    def samples() -> int:
        from offbeat.train.tasks import task_of

        return len(task_of(config).train)  # type: ignore[arg-type] # a map-style set has a length

    def predictor(configured: Config) -> float:
        from offbeat.predict.from_calibration import predict

        return predict(calibration, configured, samples()).samples_per_s

    return predictor


def _seconds_to_target(calibration: Calibration, target: float) -> Callable[[Config], float | None]:
    def predictor(config: Config) -> float | None:
        from offbeat.predict.from_calibration import foresee_accuracy

        return foresee_accuracy(calibration, config, target)

    return predictor


# --- files -----------------------------------------------------------------------------------------------------------


def _check_path(path: Path | None) -> None:
    if path is not None and not path.absolute().parent.is_dir():
        raise RequestError(f"bench: cannot write {path}: there is no folder {path.absolute().parent}")
    if path is not None and path.is_dir():
        raise RequestError(f"bench: cannot write {path}: it is a folder")


def write_files(options: argparse.Namespace, result: BenchResult) -> None:
    """The result as JSON, and the chart, where they were asked for."""
    whole = json.dumps(result.json, indent=1, allow_nan=False) + "\n"
    _write(options, options.out, whole, f"written to {options.out}; offbeat report shows it")
    _write(options, options.svg, result.chart, f"error against time: {options.svg}")


def _write(options: argparse.Namespace, path: Path | None, text: str, told: str) -> None:
    if path is not None:
        _write_whole(path, text)
        if not options.json:
            print(told)


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
