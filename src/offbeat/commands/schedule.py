"""offbeat schedule: a collective proved, priced and drawn, or all of them ranked."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat import schedules, topology
from offbeat import spec as grammar
from offbeat.commands import estimates
from offbeat.commands.base import (
    Command,
    Terminal,
    answer,
    facts,
    heading,
    option,
    ranks_of,
    say,
    stages,
    table,
    write_file,
)
from offbeat.commands.topology import print_rings, rings_of
from offbeat.errors import RequestError
from offbeat.number_format import format_rate, format_seconds, format_size
from offbeat.runs.metrics import BUS_FACTORS, bus_bandwidth
from offbeat.schedules import Price, Schedule
from offbeat.schedules.ranking import Ranked, advice, baseline, rank, recommended
from offbeat.spec import count_of, parse_count, parse_size
from offbeat.topology import Topology

if TYPE_CHECKING:
    from rich.text import Text

    from offbeat.predict.network_calibration import NetworkCalibration

_CHUNK_STYLES = ("blue", "red", "cyan", "magenta", "yellow", "green", "bright_blue", "bright_red")
_WIDE = 120


def _run(given: argparse.Namespace) -> None:
    ranks = given.ranks
    if ranks is None:
        ranks = ranks_of([given.topology] if given.algorithm is None else [given.algorithm, given.topology]) or 8
    if given.size % given.item_size:
        raise RequestError(
            f"schedule: --size {given.size} is not a whole number of items of {given.item_size} bytes (--item-size)"
        )
    if ranks > topology.MOST_RANKS:
        raise RequestError(f"schedule: expected at most {topology.MOST_RANKS:,} ranks; got {ranks:,}")
    _weigh(given, ranks)
    if given.hosts > 1 and given.calibration is None:
        raise RequestError("schedule: --hosts needs --calibration FILE, written by offbeat calibrate --lab")
    network = None
    if given.calibration is None:
        machine = topology.build(given.topology, ranks=ranks)
    elif given.topology != "uniform":
        raise RequestError("schedule: --topology and --calibration cannot be used together")
    else:
        from offbeat.predict.calibration import read_calibration

        calibration = read_calibration(given.calibration)
        machine = calibration.topology(ranks, given.hosts)
        network = calibration.network if given.hosts > 1 and given.collective == "all-reduce" else None
    if given.algorithm is None:
        _rank_all(given, machine)
    else:
        _one(given, machine, network)


def _weigh(given: argparse.Namespace, ranks: int) -> None:
    schedule = (
        estimates.of_ranking(ranks)
        if given.algorithm is None
        else estimates.of_schedule(given.algorithm, ranks, given.collective)
    )
    parts = [schedule, *([estimates.of_topology(given.topology, ranks)] if given.calibration is None else [])]
    largest = max(parts, key=lambda one: one.memory_bytes)
    total = estimates.Estimate(largest.what, sum(one.seconds for one in parts), sum(one.memory_bytes for one in parts))
    estimates.check(given, total)


def _one(given: argparse.Namespace, machine: Topology, network: NetworkCalibration | None) -> None:
    with stages(f"building the schedule of {given.algorithm} for {count_of(machine.ranks, 'rank')}") as tell:
        schedule = schedules.build(given.algorithm, ranks=machine.ranks, collective=given.collective, root=given.root)
        tell(f"verifying {len(schedule.steps.table):,} transfers")
        schedules.verify(schedule)
        tell(f"pricing {len(schedule.steps.table):,} transfers on {machine.name}")
        cost = schedules.price(schedule, machine, given.size, given.item_size)
        rings = rings_of(machine) if grammar.parse(schedule.name).name == schedules.BASELINE else None
        simulated_s = None if network is None else _simulated_s(given, machine.ranks, network)
    plain = given.collective == "all-reduce" and not schedule.steps.codecs  # the bound is of fp32 numbers
    bound_s = schedules.lower_bound_s(machine, given.size) if plain else None
    if given.svg is not None:
        write_file(given.svg, schedules.svg(schedule))

    def show(out: Terminal) -> None:
        ranks, size = count_of(machine.ranks, "rank"), format_size(given.size)
        heading(out, f"{schedule.name} {schedule.collective}, {ranks}, {size}, {machine.name}")
        out.print(_coloured(schedules.grid(schedule, max_ranks=max(2, min(8, out.width // 10)))), soft_wrap=True)
        if cost.steps:
            say(out, "+c2 <3: add chunk 2 received from rank 3; =c2 <3: overwrite it", style="dim")
        out.print()
        facts(out, _facts(schedule, cost, given.size, bound_s, simulated_s))
        print_rings(out, machine, rings)
        if given.svg is not None:
            say(out, f"\nwrote {given.svg}")

    told = (
        _price_json(schedule.name, schedule.ranks, cost)
        | {"collective": schedule.collective, "chunks": schedule.chunks, "lower_bound_s": bound_s}
        | {"size_bytes": given.size, "item_bytes": given.item_size, "topology": machine.name}
        | ({} if simulated_s is None else {"simulated_s": simulated_s})
    )
    answer(given, told, show)


def _simulated_s(given: argparse.Namespace, ranks: int, network: NetworkCalibration) -> float:
    from offbeat.predict.network_calibration import placement_of

    return network.run(given.algorithm, placement_of(ranks, given.hosts), given.size).seconds


def _facts(
    schedule: Schedule, cost: Price, size: int, bound_s: float | None, simulated_s: float | None
) -> list[tuple[str, str]]:
    most = max(cost.bytes_per_rank)
    sent = f"{format_size(most)} by the busiest rank, {format_size(cost.bytes_total)} in total"
    took = f"{format_seconds(cost.seconds)}, {format_seconds(cost.latency_s)} of it latency"
    if bound_s:
        fewest = 2 * size * (schedule.ranks - 1) / schedule.ranks
        sent += f"; lower bound 2M(P-1)/P = {format_size(fewest)} per rank: {most / fewest:.2f}x"
        took += (
            f"; lower bound {format_seconds(bound_s)} (every link of every rank busy): {cost.seconds / bound_s:.2f}x"
        )
    coded = schedule.steps.codecs
    found = [
        ("proved", f"every rank ends with the right data (contributions counted){', the same bits' if coded else ''}"),
        ("steps", str(cost.steps)),
        ("sent", sent),
        ("time", took),
        *(
            []
            if simulated_s is None
            else [("simulated", f"{format_seconds(simulated_s)}, with shared links and the work of the processors")]
        ),
        ("bottleneck", cost.why()),
    ]
    if coded:
        found.append(("codec", f"{', '.join(coded)}; the time to encode and decode is not included"))
    elif cost.seconds:
        # The chunks of an all-to-all are those of all ranks, so a rank's part is a P-th of them.
        part, text = (size / schedule.ranks, "size / P") if schedule.collective == "all-to-all" else (size, "size")
        bandwidth = bus_bandwidth(schedule.collective, schedule.ranks, part, cost.seconds)
        found.append(("bus", f"{format_rate(bandwidth)} = {text} / time * {BUS_FACTORS[schedule.collective].text}"))
    return found


def _price_json(name: str, ranks: int, cost: Price) -> dict[str, Any]:
    return {
        "name": name,
        "ranks": ranks,
        "steps": cost.steps,
        "bytes_per_rank": list(cost.bytes_per_rank),
        "bytes_total": cost.bytes_total,
        "seconds": cost.seconds,
        "latency_s": cost.latency_s,
        "bottleneck": cost.bottleneck,
        "why": cost.why(),
    }


def _rank_all(given: argparse.Namespace, machine: Topology) -> None:
    if given.svg is not None or given.root:
        raise RequestError("schedule: --svg and --root need an algorithm, like ring")
    with stages(f"pricing every {given.collective} on {count_of(machine.ranks, 'rank')}") as tell:
        ranking = rank(
            machine,
            given.size,
            given.item_size,
            collective=given.collective,
            every_shape=given.all,
            tell=lambda line: tell(f"pricing {line}"),
        )
        rings = rings_of(machine) if given.collective == "all-reduce" else None
    flat = baseline(ranking)
    columns = ("algorithm", "steps", "busiest rank sends", "time", f"vs {flat.line}", "where the time goes")
    rows = [
        (
            _best_of(ranked, given.all),
            str(ranked.price.steps),
            format_size(max(ranked.price.bytes_per_rank)),
            format_seconds(ranked.price.seconds),
            f"{flat.price.seconds / ranked.price.seconds:.2f}x" if ranked.price.seconds else "",
            ranked.price.why(),
        )
        for ranked in ranking
    ]

    def show(out: Terminal) -> None:
        heading(
            out, f"{given.collective} of {format_size(given.size)} on {count_of(machine.ranks, 'rank')}, {machine.name}"
        )
        shown = range(len(columns)) if out.width >= _WIDE else (0, 1, 3, 4)
        cells = [[row[at] for at in shown] for row in rows]
        table(out, [columns[at] for at in shown], cells, text=(0, 5), wrapped=(5,))
        say(out, *advice(ranking, machine))
        print_rings(out, machine, rings)

    told = {
        "topology": machine.name,
        "collective": given.collective,
        "ranks": machine.ranks,
        "size_bytes": given.size,
        "advised": recommended(ranking).line,
        "ranking": [_price_json(ranked.line, machine.ranks, ranked.price) for ranked in ranking],
    }
    answer(given, told, show)


def _best_of(ranked: Ranked, every_shape: bool) -> str:
    """The label, and of how many shapes it was the best."""
    if every_shape or ranked.shapes == 1:
        return ranked.label
    tried = f"{ranked.tried} of {ranked.shapes}" if ranked.tried < ranked.shapes else str(ranked.shapes)
    return f"{ranked.label} (best of {tried})"


def _coloured(grid: str) -> Text:
    from rich.text import Text

    text = Text(grid)
    for match in re.finditer(r"[+=]c(\d+)\S*", grid):
        text.stylize(_CHUNK_STYLES[int(match[1]) % len(_CHUNK_STYLES)], *match.span())
    return text


COMMAND = Command(
    summary="verify, price and draw a collective, or rank its algorithms on a topology",
    about="Verify, price and draw a collective. Without an algorithm, rank all algorithms of the collective.",
    examples=(
        "schedule torus:4x2 --size 100MB --svg torus.svg",
        "schedule --topology cluster:4x8,inside=50GB/s,across=1GB/s --size 100MB",
        "schedule tree --collective broadcast --ranks 6 --root 2",
        "schedule --collective all-gather --topology cluster:2x4,inside=50GB/s,across=1GB/s",
    ),
    options=(
        option("algorithm", nargs="?", help="ring, torus:4x2, hierarchical:2x4, ... (default: rank all)"),
        option("--ranks", read=parse_count, metavar="P", help="number of ranks (default: from the shape, else 8)"),
        option(
            "--size",
            read=parse_size,
            default=100_000_000,
            help="size of the vector: 100MB (default), or parameters of 4 bytes like 25.6Mparams",
        ),
        option(
            "--item-size",
            read=parse_count,
            default=1,
            metavar="BYTES",
            help="bytes per item; chunks hold whole items (default 1)",
        ),
        option("--topology", default="uniform", help="network topology, see offbeat topology (default uniform)"),
        option(
            "--calibration",
            read=Path,
            metavar="FILE",
            help="use the links measured by offbeat calibrate",
        ),
        option(
            "--hosts",
            read=parse_count,
            default=1,
            metavar="H",
            help="spread the ranks evenly over H hosts of the network measured by offbeat calibrate --lab (default 1)",
        ),
        option(
            "--collective",
            default="all-reduce",
            help=f"collective: {', '.join(schedules.COLLECTIVES)} (default all-reduce)",
        ),
        option(
            "--root",
            type=int,
            default=0,
            metavar="RANK",
            help="root of a broadcast, reduce, gather or scatter (default 0)",
        ),
        option("--all", action="store_true", help="rank every shape, not only the best of each algorithm"),
        option("--svg", read=Path, metavar="FILE", help="write a drawing of the schedule"),
        estimates.CONFIRM,
    ),
    run=_run,
)
