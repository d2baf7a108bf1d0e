"""offbeat calibrate: measure this machine for a recipe, so that trainings on it can be predicted."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.commands.base import (
    Command,
    Terminal,
    answer,
    facts,
    heading,
    option,
    progress_line,
    say,
    table,
    write_file,
)
from offbeat.commands.network_options import NETWORK_OPTIONS, use_network
from offbeat.errors import RequestError
from offbeat.number_format import format_rate, format_seconds, format_size
from offbeat.processes.torchrun_rank import torchrun_rank
from offbeat.spec import count_of, parse_count
from offbeat.train.arguments import given as changes_of
from offbeat.train.config import Config, check_batch_given, check_whole
from offbeat.train.config_files import changed, override, read_recipe
from offbeat.train.recipes import DEFAULT

if TYPE_CHECKING:
    from offbeat.predict.calibration import Calibration, Timed
    from offbeat.predict.network_calibration import NetworkCalibration

_BUSY = 0.5  # load of each core, above which the machine was not quiet


def _run(given: argparse.Namespace) -> None:
    use_network(given)
    config, me = _config(given), torchrun_rank()
    if me is not None and given.lab is not None:
        raise RequestError("calibrate: --lab starts hosts by itself; under torchrun, remove --lab")
    if me is None:
        _check_out(given.out)
    from offbeat.measure.calibration_bench import CalibrationRequest, measure
    from offbeat.measure.network_bench import NetworkRequest
    from offbeat.measure.rank_bench import LabRequest
    from offbeat.predict.calibration import as_json

    request = CalibrationRequest(
        config=config,
        learners=tuple(given.learners),
        rounds=given.rounds,
        sizes=not given.quick,
        check=not given.quick,
        network=None if given.lab is None else NetworkRequest(lab=LabRequest.parse(given.lab)),
    )
    with redirect_stdout(sys.stderr), progress_line() as progress:  # what modules of one's own print when loaded
        if me is not None:
            from offbeat.measure.torchrun_hosts import leave_torchrun, measure_torchrun_hosts

            def check() -> None:  # by the rank that writes
                if me.rank == 0:
                    _check_out(given.out)

            tell = progress if me.rank == 0 else lambda doing: None
            request = replace(request, network=measure_torchrun_hosts(me, check, tell))
            if me.rank:
                return
            leave_torchrun()
        found = measure(request, progress)
    write_file(given.out, json.dumps(as_json(found), indent=1, allow_nan=False) + "\n")
    answer(given, as_json(found), lambda out: _show(out, found, given.out))


def _check_out(path: Path) -> None:
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise RequestError(f"calibrate: cannot write {path}: expected the name of a file in an existing folder")
    _try_to_write(path)


def _try_to_write(path: Path) -> None:
    """Before minutes of work."""
    beside = path.with_name(f".{path.name}.unfinished")
    try:
        beside.touch()
        beside.unlink()
    except OSError as error:
        raise RequestError(f"calibrate: cannot write {path}: {error.strerror}") from None


def _config(given: argparse.Namespace) -> Config:
    config = override(read_recipe(given.recipe or DEFAULT), changes_of(given))
    check_batch_given(config.train)
    check_whole(config)
    wanted = {"learners": 0, "sync": "ring", "slow": (), "servers": given.servers or config.servers}
    return changed(config, wanted | ({"device": given.device} if given.device else {}))


def _show(out: Terminal, found: Calibration, path: Path) -> None:
    machine = found.machine
    load = machine["load"] or 0.0
    heading(out, f"{found.recipe}: minibatch size {found.batch}, gradients of {format_size(found.size_bytes)}")
    rows = [
        (
            probe.line,
            str(probe.learners),
            format_seconds(statistics.fmean(probe.compute_s)),
            f"{statistics.pstdev(probe.compute_s) / statistics.fmean(probe.compute_s):.2f}",
            format_seconds(probe.there_s + probe.back_s),
            format_seconds(probe.update_s),
        )
        for probe in found.probes
    ]
    columns = ("training run", "learners", "computing", "deviation/mean", "communication", "per update")
    table(out, columns, rows)
    layers = [
        (layer.name, format_seconds(layer.forward_s), format_seconds(layer.backward_s), format_size(layer.size_bytes))
        for layer in found.layers
    ]
    table(out, ("layer", "forward", "backward", "size"), layers)
    sizes = _over_sizes("all-reduce", found.reductions) + _over_sizes("push and fetch", found.pushes)
    if sizes:
        table(out, ("operation", "learners", "size", "time"), sizes)
    if found.network is not None:
        _print_network(out, found.network)
    batches = ", ".join(f"{batch}: {format_seconds(seconds)}" for batch, seconds in found.batches)
    alone, together = (format_rate(rate) for rate in (found.copy_alone_bytes_per_s, found.copy_together_bytes_per_s))
    told = [
        ("batches", f"{batches} (one learner alone, forward and backward)"),
        ("copies", f"{alone} by one process alone, {together} by all processes at once"),
        ("overlap", f"computing takes {found.overlap_slowdown:.2f}x as long while gradients are being reduced"),
        (
            "server",
            f"share of a round trip to the server that occupies the learners' cores: {found.server_work:.1f} "
            f"for each gradient, {found.update_work:.2g} for each update",
        ),
        (
            "machine",
            f"{machine['cores']} cores, load average {load:.1f} before the measurement; {machine['processor']}",
        ),
    ]
    facts(out, told)
    if load > _BUSY * machine["cores"]:
        say(out, "The machine was busy before the measurement: other programs affect these numbers.")
    _print_check(out, found)
    say(out, f"\nwrote {path}; use it with --calibration {path} in simulate, compare, schedule, replay and bench")


def _print_network(out: Terminal, network: NetworkCalibration) -> None:
    rows = [
        (format_size(one.size_bytes), format_seconds(one.seconds), format_rate(one.size_bytes / one.seconds))
        for one in network.round_trips
    ]
    table(out, ("round trip between hosts", "time", "rate"), rows)
    rates = sorted({*network.sends, *network.receives})
    slowest, fastest = format_rate(rates[0]), format_rate(rates[-1])
    told = [
        (
            "network",
            f"{network.hosts} hosts, {fastest if slowest == fastest else f'{slowest} to {fastest}'} each way, "
            f"{format_size(network.burst_bytes)} at once after a pause, latency {format_seconds(network.latency_s)}; "
            f"{count_of(network.streams, 'stream')} to each rank",
        ),
        (
            "processor",
            f"{format_seconds(network.call_s)} for a call, {format_seconds(network.message_s)} for a message, "
            f"{format_seconds(1e6 * network.s_per_byte)} for a megabyte, {format_seconds(network.wake_s)} for a rank "
            f"that has waited; {count_of(network.cores, 'core')}"
            f"{', shared by all hosts' if network.shared else ' per host'}",
        ),
    ]
    facts(out, told)


def _over_sizes(what: str, timed: tuple[Timed, ...]) -> list[tuple[str, ...]]:
    return [(what, str(one.learners), format_size(one.size_bytes), format_seconds(one.seconds)) for one in timed]


def _print_check(out: Terminal, found: Calibration) -> None:
    if not found.self_check:
        say(out, "There was no self-check: it runs only with 2 or more learners and without --quick.")
        return
    from offbeat.measure.calibration_bench import mean_error

    out.print()
    rows = [
        (
            str(row["strategy"]),
            str(row["learners"]),
            format_seconds(row["measured_s"]),
            format_seconds(row["predicted_s"]),
            f"{100 * row['error']:+.1f} %",
        )
        for row in found.self_check
    ]
    table(out, ("self-check", "learners", "measured", "predicted", "error"), rows)
    error = f"{100 * mean_error(found.self_check):.1f} %"
    many = count_of(len(rows), "training run")
    say(
        out,
        f"self-check with {many} that the calibration does not use: predicted seconds per update {error} "
        "off on average",
    )


COMMAND = Command(
    summary="measure this machine for a recipe, for predictions with --calibration",
    about="""Measure this machine for a recipe: compute time by layer and by minibatch size; memory copies; all-reduces,
pushes and fetches of several sizes; and short training runs with several numbers of learners, with an all-reduce
and with a parameter server. The results are written to a JSON file, which simulate, compare, schedule, replay and bench
read with --calibration. A self-check at the end predicts some other training runs and measures them too. Calibration
takes one or two minutes. Run it on an idle machine: the results do not hold if other programs load the machine.
Under `torchrun --nnodes N -m offbeat calibrate ...` on several hosts, all of them first measure the network between
them; then the first host measures itself, and has the file (docs/several-hosts.md).""",
    examples=("calibrate digits-mlp --learners 1 2 --rounds 1 --quick -o calibration.json",),
    usage="%(prog)s [RECIPE] [--learners 1 2 4] [-o FILE] [options]",
    options=(
        option("recipe", nargs="?", metavar="RECIPE", help="built-in recipe or TOML file (default digits-cnn)"),
        option(
            "--learners",
            read=parse_count,
            nargs="+",
            default=[1, 2],
            metavar="P",
            help="numbers of learners in the short training runs (default 1 2)",
        ),
        option(
            "-o",
            "--out",
            read=Path,
            default=Path("calibration.json"),
            metavar="FILE",
            help="output file (default calibration.json)",
        ),
        option(
            "--rounds",
            read=parse_count,
            default=3,
            metavar="N",
            help="repetitions of each short training run (default 3)",
        ),
        option(
            "--servers",
            read=parse_count,
            metavar="S",
            help="number of parameter-server shards (default: from the recipe)",
        ),
        option("--device", metavar="NAME", help="device: auto (a GPU if available), cpu or cuda"),
        option(
            "--lab",
            metavar="HOSTSxRANKS,RATE",
            help="also measure the network between hosts, on the hosts of a lab (see offbeat lab): 4x1,1Gbit/s",
        ),
        option("--quick", action="store_true", help="skip the self-check, and all-reduces and pushes of several sizes"),
        *NETWORK_OPTIONS,
    ),
    sections=("model", "data", "train"),
    run=_run,
)
