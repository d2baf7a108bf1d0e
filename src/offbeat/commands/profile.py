"""offbeat profile: show what each layer of a recipe costs, and the bandwidth that several learners need."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from offbeat.commands import estimates
from offbeat.commands.base import Command, Terminal, answer, facts, heading, option, progress_line, say, table
from offbeat.number_format import format_change, format_rate, format_seconds, format_size, percent
from offbeat.predict.roofline import GPUS
from offbeat.report.benchmark_fields import format_ms
from offbeat.spec import count_of, parse_count, parse_rate, parse_seconds
from offbeat.train.arguments import given as changes_of
from offbeat.train.config import check_batch_given
from offbeat.train.config_files import changed, override, read_recipe
from offbeat.train.recipes import DEFAULT

if TYPE_CHECKING:
    from offbeat.measure.layer_profile import Profile

_MODEL = "modelled, not measured"


def _run(given: argparse.Namespace) -> None:
    config = override(read_recipe(given.recipe or DEFAULT), changes_of(given))
    check_batch_given(config.train)
    gpu = GPUS.get(given.device or "")
    device = config.device if gpu is not None or not given.device else given.device
    config = changed(config, {"sync": "ring", "learners": 1, "slow": (), "device": device})
    from offbeat.measure.layer_profile import ProfileRequest, as_json, profile

    request = ProfileRequest(
        config=config,
        gpu=gpu,
        learners=tuple(given.learners),
        link_bytes_per_s=given.link,
        seconds=given.seconds,
        large=given.yes_large,
    )
    with redirect_stdout(sys.stderr), progress_line() as progress:  # what modules of one's own print when loaded
        found = profile(request, progress)
    told = as_json(found, request)
    answer(given, told, lambda out: _show(out, found, told, given.layers))


def _show(out: Terminal, found: Profile, told: Mapping[str, Any], most: int) -> None:
    counts = found.counts
    where = found.model.gpu.name if found.asked and found.model else found.measured.device if found.measured else ""
    kind = f" ({_MODEL})" if found.asked else ""
    heading(out, f"{told['recipe']}: minibatch size {told['batch']}, {told['precision']}, on {where}{kind}")
    _print_layers(out, told["layers"], most, modelled=found.asked)
    rows = [
        ("parameters", f"{counts.parameters:,}; their gradients take {format_size(found.gradient_bytes)}"),
        (
            "FLOPs",
            f"{_flops(told['multiply_adds_per_sample'])} multiply-adds per sample forward; "
            f"{_flops(counts.flops)} FLOPs per step, forward and backward",
        ),
        ("activations", f"{format_size(told['kept_bytes'])} kept from forward to backward"),
    ]
    if found.measured is not None:
        rows.append(("step", _measured(found)))
    if found.model is not None:
        rows.append((f"on {found.model.gpu.name}", _modelled(found)))
    rows.append(("error", _error(found)))
    facts(out, rows)
    out.print()
    links = [
        (
            str(link["learners"]),
            format_size(link["sent_bytes"]),
            format_seconds(link["communication_s"]),
            f"{link['ratio']:.3g} : 1",
            _link(link["link_needed_bytes_per_s"]),
        )
        for link in told["links"]
    ]
    at = _link(told["link_bytes_per_s"])
    columns = ("learners", "each sends", f"at {at}", "compute : communication", "link to hide it")
    table(out, columns, links)
    say(
        out,
        "each sends: bytes per learner in a ring all-reduce, 2 (P - 1) / P times the size of the gradients.",
        "link to hide it: bandwidth at which only the reduction of the last gradient ends after the backward pass, if",
        "latency is 0.",
    )


def _print_layers(out: Terminal, layers: Sequence[Mapping[str, Any]], most: int, *, modelled: bool) -> None:
    """The layers that take longest, in the order of forward, and the others in one row."""
    keys = ("modelled_forward_s", "modelled_backward_s") if modelled else ("forward_s", "backward_s")
    total_s = sum(layer[key] or 0.0 for layer in layers for key in keys) or 1.0

    def taken(layer: Mapping[str, Any]) -> float:
        return float(sum(layer[key] or 0.0 for key in keys))

    longest = sorted(range(len(layers)), key=lambda at: -taken(layers[at]))[:most]
    rows = [layers[at] for at in sorted(longest)]
    rest = [layers[at] for at in range(len(layers)) if at not in longest]
    if rest:
        names = ("parameters", "forward_flops", "backward_flops", "kept_bytes", *keys)
        sums: dict[str, Any] = {name: sum(layer[name] or 0 for layer in rest) for name in names}
        rows.append({"name": f"({count_of(len(rest), 'other layer')})", **sums})
    cells = [
        (
            row["name"],
            f"{row['parameters']:,}",
            _flops(row["forward_flops"] + row["backward_flops"]),
            format_size(row["kept_bytes"]),
            *("-" if row[key] is None else format_ms(1e3 * row[key]) for key in keys),
            percent(taken(row) / total_s),
        )
        for row in rows
    ]
    table(out, ("layer", "parameters", "FLOPs", "kept", "forward ms", "backward ms", "of time"), cells)


def _measured(found: Profile) -> str:
    measured = found.measured
    assert measured is not None
    rate = found.counts.samples / measured.step_s
    layers_s = sum(one.forward_s + one.backward_s for one in measured.layers.values())
    text = f"{format_seconds(measured.step_s)} on {measured.device}, {measured.compute}: {rate:,.0f} samples/s"
    if measured.compute != "eager":
        text += f"; the layer times above are from an eager step of {format_seconds(layers_s)}"
    return text


def _modelled(found: Profile) -> str:
    model = found.model
    assert model is not None
    peak = model.gpu.peak(found.config.train.precision)
    share = found.counts.flops / model.step_s / peak
    return (
        f"{format_seconds(model.step_s)} by a roofline model ({_MODEL}): "
        f"{found.counts.samples / model.step_s:,.0f} samples/s, {percent(share)} of its peak"
    )


def _error(found: Profile) -> str:
    if found.error is not None:
        return f"the model is {format_change(found.error)} off on this machine's {found.error_on}"
    return f"unknown, because this machine's device is not one of {', '.join(GPUS)}"


def _flops(number: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def _link(bytes_per_s: float) -> str:
    """As links are sold, in bits."""
    return format_rate(8 * bytes_per_s).replace("B/s", "bit/s")


COMMAND = Command(
    summary="show what each layer of a recipe costs, and the bandwidth that several learners need",
    about=f"""Count the parameters, FLOPs and activations of each layer of a recipe, and measure its time on this
machine. The second table has the ratio of compute time to communication time, and the bandwidth at which P learners can
overlap the reduction of gradients with the backward pass. With --device {"|".join(GPUS)} the
times are not measured, but estimated from the data sheet of that device. If this machine has one of these devices, the
error of the estimate is printed too. FLOPs are counted by torch's own counter.""",
    examples=(
        "profile digits-cnn --seconds 100ms",
        "profile synthetic-alexnet --precision bf16 --batch-size 256 --device a100 --learners 8 64",
    ),
    usage="%(prog)s [RECIPE] [--device NAME] [--learners P ...] [--link RATE] [options]",
    options=(
        option(
            "recipe", nargs="?", metavar="RECIPE", help="built-in recipe or TOML file (default digits-cnn)"
        ),
        option(
            "--device", metavar="NAME",
            help=f"auto (a GPU if available), cpu or cuda: measured; {', '.join(GPUS)}: modelled",
        ),
        option(
            "--learners", read=parse_count, nargs="+", default=[2, 4, 8, 16], metavar="P",
            help="numbers of learners (default 2 4 8 16)",
        ),
        option(
            "--link", read=parse_rate, default=12.5e9, metavar="RATE",
            help="bandwidth of each learner's link, for the ratio (default 100Gbit/s)",
        ),
        option(
            "--seconds", read=parse_seconds, default=1.0, metavar="TIME",
            help="duration of the measurement (default 1s)",
        ),
        option(
            "--layers", read=parse_count, default=20, metavar="N",
            help="number of layers to show, slowest first (default 20)",
        ),
        estimates.CONFIRM,
    ),
    sections=("model", "data", "train"),
    run=_run,
)  # fmt: skip
