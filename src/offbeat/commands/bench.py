"""offbeat bench: what really runs here, measured: beside other systems, and beside the simulator's predictions."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.commands.base import (
    Command,
    Terminal,
    answer,
    facts,
    heading,
    option,
    progress_line,
    read_accuracy,
    say,
    table,
)
from offbeat.errors import OffbeatError, RequestError
from offbeat.report.benchmark_fields import Field, Row, printed
from offbeat.runs.disk import replace_file
from offbeat.spec import choice, count_of, parse_count, parse_number, parse_seconds, parse_size
from offbeat.train.arguments import given as changes_of
from offbeat.train.config import Config, check_batch_given, check_whole
from offbeat.train.config_files import changed, flag, override, read_recipe
from offbeat.train.fields import FieldError
from offbeat.train.recipes import DEFAULT

if TYPE_CHECKING:
    from offbeat.measure.benchmark import BenchResult
    from offbeat.predict.calibration import Calibration

_BUSY = 2.0  # rounds that differ by more are worth a warning
_WIDE = 100  # columns, from which on intervals are in the tables
_SECTIONS = ("model", "data", "train")  # of a recipe: the rest of it is asked for otherwise
_TIMEOUT_S = 120.0
_RANKS: dict[str, Any] = {"threads": 1, "strategy": None, "timeout": _TIMEOUT_S}
_TRAININGS: dict[str, Any] = {
    "lines": (),
    "servers": None,  # None: as the recipe says
    "slow": (),
    "seed": None,
    "device": None,
    "calibration": None,
    "out": None,
}
# What an option of a measurement is when left out; those that it does not have are refused.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "allreduce": {
        **_RANKS,
        "ranks": 4,
        "rounds": 5,
        "against": ("gloo", "mpi"),
        "sizes": (64 * 2**10, 4 * 2**20, 100_000_000),
        "lab": None,
    },
    "ddp": {**_RANKS, "ranks": 2, "rounds": 10, "against": ("gloo",), "batch": 64},
    "codecs": {
        "lines": (),
        "ranks": 4,
        "parameters": None,
        "rounds": 3,
        "lab": None,
        "timeout": _TIMEOUT_S,
        "out": None,
    },
    "policies": {
        "lines": (),
        "learners": [4],
        "servers": 1,
        "slow": None,
        "updates": None,
        "seed": 0,
        "parameters": None,
        "lab": None,
        "timeout": _TIMEOUT_S,
    },
    "server": {
        "learners": [1, 2],
        "servers": 2,
        "parameters": None,
        "tensors": 161,
        "against": None,
        "rounds": 3,
        "seconds": 3.0,
        "timeout": _TIMEOUT_S,
    },
    "scaling": {
        **_TRAININGS,
        "learners": [1, 2, 4],
        "sync": ("ring", "k-async:2"),
        "rounds": 5,
        "kind": "weak",
        "accuracy_within": 0.01,
        "price": None,
    },
    "accuracy": {
        **_TRAININGS,
        "learners": [2],
        "sync": ("ring", "async"),
        "target": None,
        "seeds": 3,
        "svg": None,
        "price": None,
    },
    "predictions": {
        **_TRAININGS,
        "learners": [2, 4],
        "sync": ("ring", "k-sync:2", "k-batch-async:2"),
        "slow": ("none", "exp:0.02", "learner=0,factor=2"),
        "rounds": 3,
        "lab": None,
        "sizes": None,
        "timeout": _TIMEOUT_S,
    },
    "device": {
        "lines": (),
        "batch_sizes": None,  # None: as the device allows
        "seconds": 1.0,
        "device": None,
        "seed": None,
        "timeout": 600.0,
        "out": None,
        "svg": None,
    },
}

Measurement = Callable[[Callable[[str], None]], "BenchResult"]


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


def _batch_size(text: str) -> int | str:
    return text if text == "max" else parse_count(text)


def _share(text: str) -> float:
    return parse_number(text, lambda x: 0 <= x <= 1, "expected a share from 0 to 1, like 0.01")


def _price(text: str) -> float:
    return parse_number(text, lambda x: 0 <= x <= sys.float_info.max, "expected a price of a device hour, 0 or more")


def _run(given: argparse.Namespace) -> None:
    options = _with_defaults(given)
    measure = _MEASURE[given.what](options)
    with progress_line() as progress, redirect_stdout(sys.stderr):  # what modules of one's own print when loaded
        result = measure(progress)
    answer(given, result.json, lambda out: print_result(out, result))
    whole = json.dumps(result.json, indent=1, allow_nan=False) + "\n"
    _write(options, options.out, whole, f"wrote {options.out}; show it with: offbeat report {options.out}")
    _write(options, options.svg, result.chart, f"chart: {options.svg}")
    if result.ended_by is not None:
        raise result.ended_by


def _with_defaults(given: argparse.Namespace) -> argparse.Namespace:
    """What was given, and the defaults of this measurement; an option of another one is a mistake."""
    own = _DEFAULTS[given.what]
    others = {name for options in _DEFAULTS.values() for name in options} - own.keys()
    wrong = [f"--{name.replace('_', '-')}" for name in others - {"lines"} if getattr(given, name) is not None]
    if "lines" in others and given.lines:
        wrong.append(f"'{given.lines[0]}'")
    if "device" in others:  # fields of a recipe say nothing where none is trained
        wrong += [flag(key) for key in changes_of(given)]
    if wrong:
        raise RequestError(f"bench: {wrong[0]} is not an option of bench {given.what}")
    filled = {name: value for name, value in own.items() if getattr(given, name) is None}
    return argparse.Namespace(**(vars(given) | filled))


def _write(options: argparse.Namespace, path: Path | None, text: str, told: str) -> None:
    """All of it, or as it was before."""
    if path is None:
        return
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise OffbeatError(f"cannot write {path}: {error.strerror}") from None
    if not options.json:
        print(told)


# --- what is asked for -----------------------------------------------------------------------------------------------
# What is wrong with a request is told here, before anything runs.


def _measure_ranks(options: argparse.Namespace) -> Measurement:
    from offbeat.measure import rank_bench

    reduces = options.what == "allreduce"
    lab = None if not reduces or options.lab is None else rank_bench.LabRequest.parse(options.lab)
    if lab is not None and options.ranks not in (lab.ranks, _DEFAULTS["allreduce"]["ranks"]):
        raise RequestError(
            f"bench: --ranks {options.ranks} contradicts --lab {options.lab}, which has {lab.ranks} "
            "ranks; remove one of the two options"
        )
    request = rank_bench.RankRequest(
        ranks=options.ranks if lab is None else lab.ranks,
        lab=lab,
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


def _measure_codecs(options: argparse.Namespace) -> Measurement:
    from offbeat.measure import codec_bench, rank_bench

    lab = None if options.lab is None else rank_bench.LabRequest.parse(options.lab)
    request = codec_bench.CodecsRequest(
        lines=tuple(options.lines) or codec_bench.LINES,
        ranks=options.ranks if lab is None else lab.ranks,
        parameters=options.parameters or codec_bench.PARAMETERS,
        rounds=options.rounds,
        timeout_s=options.timeout,
        lab=lab,
    )
    return lambda progress: codec_bench.measure(request, progress)


def _one_number_of_learners(options: argparse.Namespace) -> int:
    if len(options.learners) > 1:
        raise RequestError(f"bench: --learners takes only one number with bench {options.what}")
    learners: int = options.learners[0]
    return learners


def _measure_policies(options: argparse.Namespace) -> Measurement:
    from offbeat.measure import policies_bench, rank_bench

    lab = None if options.lab is None else rank_bench.LabRequest.parse(options.lab)
    usual_learners = _DEFAULTS["policies"]["learners"]
    usual = policies_bench.PARAMETERS if lab is None else policies_bench.LAB_PARAMETERS
    request = policies_bench.PoliciesRequest(
        lines=tuple(options.lines) or policies_bench.LINES,
        laws=tuple(options.slow or policies_bench.LAWS),
        learners=lab.ranks
        if lab is not None and options.learners == usual_learners
        else _one_number_of_learners(options),
        servers=options.servers,
        updates=options.updates,
        seed=options.seed,
        timeout_s=options.timeout,
        lab=lab,
        parameters=options.parameters or usual,
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


def _measure_scaling(options: argparse.Namespace) -> Measurement:
    from offbeat.measure import scaling_bench

    config = _config(options)
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
    if calibration is None:
        return lambda progress: scaling_bench.measure(request, progress)
    from offbeat.predict.from_calibration import predict
    from offbeat.train.tasks import task_of

    @cache  # the samples of the recipe are counted when the first prediction is asked for
    def samples() -> int:
        return len(task_of(config).train)  # type: ignore[arg-type] # a map-style set has a length

    def samples_per_s(one: Config) -> float:
        return predict(calibration, one, samples()).samples_per_s

    return lambda progress: scaling_bench.measure(request, progress, predictor=samples_per_s)


def _measure_accuracy(options: argparse.Namespace) -> Measurement:
    from offbeat.measure import accuracy_bench

    config, learners = _config(options), _one_number_of_learners(options)
    if options.target is None:
        raise RequestError("bench accuracy needs --target, for example --target 0.97")
    request = accuracy_bench.AccuracyRequest(
        config=config,
        target=options.target,
        lines=tuple(options.sync),
        learners=learners,
        seeds=options.seeds,
        seed=config.seed,
        price=options.price,
    )
    calibration = _calibration(options, request.configs(request.seed)[0])
    if calibration is None:
        return lambda progress: accuracy_bench.measure(request, progress)
    from offbeat.predict.from_calibration import foresee_accuracy

    def seconds_to_target(one: Config) -> float | None:
        return foresee_accuracy(calibration, one, request.target)

    return lambda progress: accuracy_bench.measure(request, progress, predictor=seconds_to_target)


def _measure_allreduce_predictions(options: argparse.Namespace) -> Measurement:
    from offbeat.measure import network_bench
    from offbeat.measure.rank_bench import LabRequest
    from offbeat.predict.calibration import read_calibration

    if options.calibration is None:
        raise RequestError("bench: predictions needs --calibration FILE; offbeat calibrate --lab writes one")
    if options.out is not None:
        raise RequestError("bench: --out is for offbeat report, which shows no all-reduces; use --json > FILE")
    chosen = tuple(options.sync)
    request = network_bench.AllReducePredictions(
        network=read_calibration(options.calibration).between_hosts(),
        lab=LabRequest.parse(options.lab),
        lines=network_bench.LINES if chosen == _DEFAULTS["predictions"]["sync"] else chosen,
        sizes=options.sizes or network_bench.SIZES,
        rounds=options.rounds,
        timeout_s=options.timeout,
    )
    return lambda progress: network_bench.predict_allreduces(request, progress)


def _measure_predictions(options: argparse.Namespace) -> Measurement:
    from offbeat.measure import predictions_bench

    if options.lab is not None:
        return _measure_allreduce_predictions(options)
    if options.sizes is not None:
        raise RequestError("bench: --sizes with bench predictions needs --lab, like --lab 4x1,1Gbit/s")
    config = _config(options)
    calibration = _calibration(options, config)
    if calibration is None:
        raise RequestError("bench: predictions needs --calibration FILE; offbeat calibrate writes one")
    request = predictions_bench.PredictionsRequest(
        config=config,
        calibration=calibration,
        lines=tuple(options.sync),
        learners=tuple(options.learners),
        slow=tuple(options.slow),
        rounds=options.rounds,
    )
    return lambda progress: predictions_bench.measure(request, progress)


def _measure_device(options: argparse.Namespace) -> Measurement:
    from offbeat.measure import device_bench
    from offbeat.train.launch import check_device

    precisions = changes_of(options).get("train.precision", [])
    configs = tuple(_config(options, recipe) for recipe in options.lines or (DEFAULT,))
    has_gpu = check_device(configs[0].device).type == "cuda"
    request = device_bench.DeviceRequest(
        configs=configs,
        precisions=tuple(precisions) if isinstance(precisions, list) else (precisions,),
        sizes=tuple(options.batch_sizes or ((32, 128, 512, device_bench.MAX) if has_gpu else (32, 128))),
        seconds=options.seconds,
        timeout_s=options.timeout,
    )

    def keep(result: BenchResult) -> None:
        """Whatever comes after a point, it is in the file."""
        if options.out is not None:
            replace_file(options.out, (json.dumps(result.json, indent=1, allow_nan=False) + "\n").encode())

    return lambda progress: device_bench.measure(request, progress, keep=keep)


def _changes(options: argparse.Namespace) -> dict[str, str | list[str]]:
    """What was changed of a recipe. A precision is one, but where several are compared."""
    changes = changes_of(options)
    precisions = changes.get("train.precision")
    if isinstance(precisions, list):
        if options.what == "device":
            del changes["train.precision"]
        elif len(precisions) > 1:
            raise RequestError(
                f"bench: --precision takes only one value with bench {options.what}; got {' '.join(precisions)}"
            )
        else:
            changes["train.precision"] = precisions[0]
    return changes


def _config(options: argparse.Namespace, recipe: str = "") -> Config:
    """The recipe with all that was changed, but for strategy and learners."""
    for path in (options.out, options.svg):
        if path is not None and not path.absolute().parent.is_dir():
            raise RequestError(f"bench: cannot write {path}: there is no folder {path.absolute().parent}")
        if path is not None and path.is_dir():
            raise RequestError(f"bench: cannot write {path}: it is a folder")
    if len(options.lines) > 1 and not recipe:
        raise RequestError(f"bench: expected one recipe, got '{options.lines[1]}' as well; name strategies with --sync")
    changes = _changes(options)
    for key in changes:
        if key.partition(".")[0] not in _SECTIONS:
            raise RequestError(f"bench: --set {key}: only fields of {', '.join(_SECTIONS)} can be set here")
        if key.replace("-", "_") == "train.stop_at":
            raise RequestError(f"bench: {flag(key)} does not apply: a benchmark always runs all epochs")
    config = override(read_recipe(recipe or (options.lines[0] if options.lines else DEFAULT)), changes)
    check_batch_given(config.train)
    check_whole(config)
    try:
        return changed(
            config,
            {
                "sync": "ring",
                "learners": 0,
                "servers": options.servers or config.servers,
                "seed": config.seed if options.seed is None else options.seed,
                "slow": config.slow if options.what == "predictions" else tuple(options.slow or ()) or config.slow,
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
    from offbeat.predict.calibration_match import check, of_another_machine

    calibration = read_calibration(options.calibration)
    check(calibration, config)
    elsewhere = of_another_machine(calibration)
    if elsewhere:
        print(f"offbeat: {elsewhere}", file=sys.stderr)
    return calibration


# --- printing --------------------------------------------------------------------------------------------------------


def print_result(out: Terminal, result: BenchResult) -> None:
    heading(out, result.heading)
    for fields, rows in result.tables:
        _print_table(out, fields, rows)
    say(out, *result.verdict, style="bold")
    notes = [f"note: {note}" for note in result.json.get("notes", ())]
    say(out, *result.details, "", *notes, *([""] if notes else []))
    machine = result.json["machine"]
    load = "load unknown" if machine["load"] is None else f"load {machine['load']:.2f} before"
    cores = f"{count_of(machine['cores'], 'core')} ({machine['processor']}), {load}"
    facts(out, [*result.terms, ("machine", cores)])
    if result.spread > _BUSY:
        times = f"{result.spread:.1f}x"
        text = f"rounds of one system differ by up to {times}: the machine was busy; measure again on an idle machine"
        say(out, text, style="yellow")


def _print_table(out: Terminal, fields: Sequence[Field], rows: Sequence[Row]) -> None:
    """Nothing where no value is known."""
    shown = printed(fields, rows, wide=out.width >= _WIDE)
    if all(field.key in ("strategy", "learners") for field in shown):
        return
    cells = [
        ["" if field.once and row[field.key] == before.get(field.key) else field.written(row) for field in shown]
        for before, row in pairwise([{}, *rows])
    ]
    words = [number for number, field in enumerate(shown) if field.form == "text"]
    table(out, [field.title for field in shown], cells, text=words)


_MEASURE: dict[str, Callable[[argparse.Namespace], Measurement]] = {
    "allreduce": _measure_ranks,
    "ddp": _measure_ranks,
    "codecs": _measure_codecs,
    "policies": _measure_policies,
    "server": _measure_server,
    "scaling": _measure_scaling,
    "accuracy": _measure_accuracy,
    "predictions": _measure_predictions,
    "device": _measure_device,
}
_GROUP = "training runs: scaling, accuracy, predictions, device"
_OPTIONS = (
    option("what", read=choice(*_DEFAULTS), metavar="|".join(_DEFAULTS), help="what to measure; see above"),
    option(
        "lines", nargs="*", default=(), metavar="LINES",
        help="policies: strategies (default: six); codecs: codecs (default: all); device: recipes; "
        "training runs: one recipe (default digits-cnn)",
    ),
    option("--ranks", read=parse_count, metavar="P", help="number of processes (default 4; ddp: 2)"),
    option(
        "--learners", read=parse_count, nargs="+", metavar="P",
        help="number of learners (default: policies 4, accuracy 2); server, scaling, predictions: several numbers",
    ),
    option("--servers", read=parse_count, metavar="S", help="number of parameter-server shards (default 1; server: 2)"),
    option(
        "--slow", nargs="+", action="extend", metavar="LAW",
        help="policies: delay laws (default exp:0.1 shifted-exp:0.05,0.05); training runs: also "
        "learner=1,factor=3; repeatable",
    ),
    option(
        "--updates", read=parse_count, metavar="N",
        help="policies: updates per run (default: about 10 s of updates)",
    ),
    option("--seed", type=int, metavar="N", help="seed; with several training runs, that of the first one (default 0)"),
    option(
        "--parameters", read=_number, metavar="N",
        help="server, codecs: parameters of the model (default 25.6M); policies: default 9, with --lab 250k",
    ),
    option(
        "--tensors", read=parse_count, metavar="N",
        help="server: tensors of the model, 161 as in ResNet-50 (default) or 1",
    ),
    option(
        "--seconds", read=parse_seconds, metavar="TIME",
        help="duration of one round of one system (server, default 3s) or of one measurement (device, default 1s)",
    ),
    option(
        "--batch-sizes", read=_batch_size, nargs="+", metavar="N|max",
        help="device: samples per minibatch; max: as many as fit (default 32 128 512 max, on a CPU 32 128)",
    ),
    option(
        "--against", read=_words, metavar="NAMES",
        help="systems to compare with: gloo,gloo:4 (4 process groups at once),mpi,tls (offbeat with a key, needs "
        "--lab) (ddp: gloo); server: rpc,rpc-tuned,ray,ray-tuned (default: all installed)",
    ),
    option("--sizes", read=_sizes, metavar="SIZES", help="tensor sizes of all-reduces (default 64KiB,4MiB,100MB)"),
    option(
        "--lab", metavar="HOSTSxRANKS,RATE",
        help="allreduce, codecs, policies: run on 4 hosts of 2 ranks on this machine (see offbeat lab): 4x2,1Gbit/s; "
        "predictions: predict and measure all-reduces there instead of training runs",
    ),
    option("--batch", read=parse_count, metavar="N", help="ddp: samples per minibatch (default 64)"),
    option(
        "--rounds", read=parse_count, metavar="N",
        help="rounds; each system is measured once per round (default 5; ddp: 10; server, codecs, predictions: 3)",
    ),
    option("--threads", read=parse_count, metavar="N", help="torch threads per rank (default 1)"),
    option("--strategy", metavar="LINE", help="all-reduce algorithm that offbeat uses, like ring (default: auto)"),
    option(
        "--timeout", read=parse_seconds, metavar="TIME",
        help="longest wait for an answer from a process (default 120s)",
    ),
    option(
        "--sync", group=_GROUP, nargs="+", metavar="STRATEGY",
        help="strategies to compare (default: scaling ring k-async:2; accuracy ring async)",
    ),
    option(
        "--kind", group=_GROUP, read=choice("weak", "strong"), metavar="weak|strong",
        help="scaling: weak keeps the minibatch size per learner constant (default), strong the global batch size",
    ),
    option(
        "--accuracy-within", group=_GROUP, read=_share, metavar="X",
        help="scaling: rank only results whose accuracy is within X of the best (default 0.01)",
    ),
    option("--target", group=_GROUP, read=read_accuracy, metavar="X", help="accuracy: target accuracy, like 0.97"),
    option(
        "--seeds", group=_GROUP, read=parse_count, metavar="N", help="accuracy: training runs per strategy (default 3)"
    ),
    option("--device", group=_GROUP, metavar="NAME", help="device: auto (a GPU if available), cpu or cuda"),
    option(
        "--calibration", group=_GROUP, read=Path, metavar="FILE",
        help="also predict the results, from this file written by offbeat calibrate",
    ),
    option("--price", group=_GROUP, read=_price, metavar="X", help="price of one device hour; adds the cost"),
    option(
        "--out", group=_GROUP, read=Path, metavar="FILE",
        help="write the result to this JSON file, for offbeat report",
    ),
    option("--svg", group=_GROUP, read=Path, metavar="FILE", help="accuracy, device: write the chart to this file"),
)  # fmt: skip
COMMAND = Command(
    summary="measure one device, collectives, DDP, the parameter server, scaling and time to accuracy on this machine",
    about="""Run one benchmark on this machine. Use an idle machine: other load changes the results.
allreduce    all-reduce of tensors, compared with Gloo and Open MPI
ddp          training iterations of DistributedDataParallel, compared with Gloo
codecs       speed of each codec, and the bandwidth up to which it pays; with --lab, all-reduces with each
server       pushes and fetches per second of the parameter server, compared with torch's rpc and Ray
policies     real runs with artificial delays, compared with the simulator's prediction
scaling      a recipe with several numbers of learners: speed-up, efficiency, overhead and accuracy
accuracy     time and updates to a target accuracy, for several strategies and seeds
predictions  training runs, or all-reduces between hosts (--lab), predicted from a calibration, then measured
device       recipes on one device, by precision and minibatch size: samples/s, memory, energy, share of the peak
The systems or strategies that are compared take turns within one run. scaling, accuracy, predictions and device also
take every option of a recipe.""",
    examples=(
        "bench allreduce --ranks 4 --sizes 64KiB,4MiB --against gloo",
        "bench codecs int8 bf16 --parameters 1M",
        "bench ddp --ranks 2 --against gloo --rounds 2",
        "bench policies k-sync:1 async --learners 2 --slow exp:0.02 --updates 20",
        "bench server --learners 1 --parameters 100k --seconds 100ms --rounds 1 --against rpc",
        "bench scaling digits-cnn --learners 1 2 --sync ring k-async:2 --epochs 3 --rounds 1",
        "bench accuracy digits-mlp --target 0.8 --learners 2 --sync ring async --seeds 1 --epochs 4",
        "bench device digits-mlp --precision fp32 bf16 --batch-sizes 32 128 --seconds 100ms",
    ),
    usage=f"%(prog)s {'|'.join(_DEFAULTS)} [LINES ...] [options]",
    options=_OPTIONS,
    sections=_SECTIONS,
    several=("train.precision",),
    run=_run,
)
