"""offbeat partition: where to cut a model into the stages of a pipeline."""

from __future__ import annotations

import argparse
import json
import math
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from offbeat import topology
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
from offbeat.errors import RequestError
from offbeat.number_format import format_seconds, format_size
from offbeat.pipelines.model_graph import ModelGraph
from offbeat.pipelines.partition import (
    Cut,
    CutProblem,
    StageDevice,
    best_partition,
    equal_layers,
    equal_parameters,
    lower_bound_s,
    minimum_cut,
)
from offbeat.pipelines.partition_svg import partition_svg
from offbeat.runs.untrusted import UnusableFile, read_json
from offbeat.spec import count_of, parse_count, parse_number, parse_size
from offbeat.topology import Link
from offbeat.train.arguments import given as changes_of
from offbeat.train.config import check_batch_given
from offbeat.train.config_files import changed, flag, override, read_recipe
from offbeat.train.layout import DEFAULT_SCHEDULE, Layout
from offbeat.train.recipes import DEFAULT

_SHOWN_EDGES = 12


def _read_device(text: str) -> StageDevice:
    """`1`, `0.5`, `2@16GB`: how fast it is, and its memory."""
    speed, at, memory = text.partition("@")
    return StageDevice(
        parse_number(speed, lambda x: 0 < x < math.inf, "the speed of a device must be a number above 0, like 0.5"),
        parse_size(memory) if at else math.inf,
    )


def _read_devices(text: str) -> tuple[StageDevice, ...]:
    return tuple(_read_device(word) for word in text.split(","))


def _run(given: argparse.Namespace) -> None:
    devices = given.devices or (StageDevice(),) * (given.parts or 2)
    if given.parts not in (None, len(devices)):
        raise RequestError(
            f"partition: --parts is {given.parts}, but --devices names {len(devices)}; give one device per part"
        )
    if given.memory is not None:
        devices = tuple(device._replace(memory_bytes=min(device.memory_bytes, given.memory)) for device in devices)
    graph, way, samples = _graph(given)
    if given.save_graph is not None:
        write_file(given.save_graph, json.dumps(graph.to_json(), indent=1) + "\n")
    problem = CutProblem(
        graph=graph,
        devices=devices,
        microbatches=given.microbatches,
        links=_links(given.topology, len(devices)),
        state=given.state,
    )
    best = best_partition(problem)
    others = [equal_layers(problem), equal_parameters(problem), minimum_cut(problem)]
    bound_s = lower_bound_s(problem)
    if given.svg is not None:
        write_file(given.svg, partition_svg(graph, best))

    def show(out: Terminal) -> None:
        measured = f", measured by {way} on microbatches of {samples}" if way else ""
        count = f"{len(graph.nodes)} nodes, {given.microbatches} microbatches{measured}"
        heading(out, f"{graph.name} in {count_of(len(devices), 'part')}: {count}")
        _print_parts(out, graph, problem, best)
        facts(out, _facts(graph, best, bound_s))
        out.print()
        _print_others(out, best, others)
        for path in filter(None, (given.svg, given.save_graph)):
            say(out, f"\nwrote {path}")

    told: dict[str, Any] = {
        "model": graph.name,
        "nodes": len(graph.nodes),
        "traced_by": way or None,
        "microbatch_samples": samples,
        "parts": len(devices),
        "microbatches": given.microbatches,
        "lower_bound_s": bound_s,
        "exact": best.exact,
        "downsets": best.downsets,
        "best": _json(graph, best),
        "others": [_json(graph, one) for one in others],
    }
    answer(given, told, show)


def _graph(given: argparse.Namespace) -> tuple[ModelGraph, str, int | None]:
    """From a file, or measured; and how, on how many samples."""
    name = given.recipe or DEFAULT
    if name.endswith(".json"):
        if changes := changes_of(given):
            raise RequestError(f"partition: {name} is measured already; remove {flag(next(iter(changes)))}")
        return _read_graph(Path(name)), "", None
    config = override(read_recipe(name), changes_of(given))
    check_batch_given(config.train)
    Layout(schedule=DEFAULT_SCHEDULE, microbatches=given.microbatches).check(batch_size=config.train.batch_size)
    config = changed(config, {"sync": "ring", "learners": 1, "slow": ()})
    samples = max(1, config.train.batch_size // given.microbatches)
    from offbeat.measure.graph_measure import measured_graph

    with redirect_stdout(sys.stderr), progress_line() as progress:
        progress(f"measuring {config.name}")
        graph, way = measured_graph(config, samples, given.repeats)
    return graph, way, samples


def _read_graph(path: Path) -> ModelGraph:
    try:
        return ModelGraph.from_json(read_json(path))
    except UnusableFile as error:
        raise RequestError(f"partition: cannot read {path}: {error.why}") from None
    except RequestError as error:
        raise RequestError(f"partition: {path}: {error}") from None


def _links(line: str, ranks: int) -> tuple[Link, ...]:
    """What joins each part to the next: the latency of the route, and its slowest link."""
    machine = topology.build(line, ranks=ranks)
    routes = [[machine.links[edge] for edge in machine.route(rank, rank + 1)] for rank in range(ranks - 1)]
    return tuple(
        Link(sum(link.latency_s for link in route), min(link.bytes_per_s for link in route)) for route in routes
    )


def _print_parts(out: Terminal, graph: ModelGraph, problem: CutProblem, best: Cut) -> None:
    price = best.price
    rows = []
    for part in range(problem.parts):
        own = [node for node, place in zip(graph.nodes, best.parts, strict=True) if place == part]
        rows.append(
            (
                str(part),
                f"{own[0].name} .. {own[-1].name}" if len(own) > 1 else own[0].name,
                str(len(own)),
                format_size(sum(node.parameter_bytes for node in own)),
                format_seconds(price.compute_s[part]),
                format_size(price.cut_bytes[part]) if part < problem.parts - 1 else "-",
                format_seconds(price.stage_s[part]),
                format_size(price.memory_bytes[part]),
            )
        )
    columns = ("part", "nodes", "", "parameters", "computes", "sends on", "with sends", "memory")
    table(out, columns, rows, text=(0, 1), wrapped=(1,))


def _facts(graph: ModelGraph, best: Cut, bound_s: float) -> list[tuple[str, str]]:
    price = best.price
    above = f"{price.seconds / bound_s:.3f}x the lower bound" if bound_s else "lower bound 0"
    exact = f"exact: every cut was considered ({best.downsets:,} downsets of the graph)" if best.exact else best.note
    edges = [
        f"{graph.nodes[source].name} > {graph.nodes[target].name} {format_size(graph.nodes[source].output_bytes)}"
        for source, target in best.cut_edges
    ]
    more = f" and {len(edges) - _SHOWN_EDGES} more" if len(edges) > _SHOWN_EDGES else ""
    return [
        (
            "update",
            f"{format_seconds(price.seconds)}, {above} of {format_seconds(bound_s)} (equal parts, no "
            "communication time)",
        ),
        ("search", exact),
        ("slowest", f"part {price.slowest}, {format_seconds(price.stage_s[price.slowest])} per microbatch"),
        ("cut edges", (", ".join(edges[:_SHOWN_EDGES]) + more) or "none"),
    ]


def _print_others(out: Terminal, best: Cut, others: list[Cut]) -> None:
    rows = [
        (
            one.name,
            format_seconds(one.price.seconds),
            f"{one.price.seconds / best.price.seconds:.2f}x" if best.price.seconds else "",
            format_seconds(max(one.price.stage_s)),
            format_size(sum(one.price.cut_bytes)),
            "yes" if one.price.fits else "no",
        )
        for one in (best, *others)
    ]
    table(out, ("cut", "update", "vs best", "slowest part", "bytes across", "fits"), rows)
    for one in others:
        if one.note:
            say(out, f"{one.name}: {one.note}", style="dim")


def _json(graph: ModelGraph, cut: Cut) -> dict[str, Any]:
    price = cut.price
    return {
        "name": cut.name,
        "seconds": price.seconds,
        "stage_s": list(price.stage_s),
        "compute_s": list(price.compute_s),
        "cut_bytes": list(price.cut_bytes),
        "memory_bytes": list(price.memory_bytes),
        "fits": price.fits,
        "part_of": {node.name: part for node, part in zip(graph.nodes, cut.parts, strict=True)},
        "cut_edges": [
            {
                "source": graph.nodes[source].name,
                "target": graph.nodes[target].name,
                "size_bytes": graph.nodes[source].output_bytes,
            }
            for source, target in cut.cut_edges
        ],
    }


COMMAND = Command(
    summary="where to cut a model into the stages of a pipeline",
    about="""Measure each operation of a recipe's model, and cut its graph into the stages of a pipeline so that an
update is fastest. The time of an update is the sum over the stages plus (microbatches - 1) times the slowest stage,
communication included. The search is exact if the graph has at most 100,000 downsets (sets of nodes that a cut can put
first). The result is compared with equal layers, equal parameters and the minimum cut. Part i runs on device i.""",
    examples=(
        "partition digits-cnn --parts 2 --repeats 1",
        "partition text-transformer --devices 1,1,0.5 --microbatches 16 --svg parts.svg --repeats 1",
    ),
    usage="%(prog)s [RECIPE] [--parts N] [--devices SPEED[@MEMORY],...] [options]",
    options=(
        option(
            "recipe",
            nargs="?",
            metavar="RECIPE",
            help="built-in recipe, TOML file, or graph file written by --save-graph (default digits-cnn)",
        ),
        option(
            "--parts",
            read=parse_count,
            metavar="N",
            help="number of stages of the pipeline (default 2, or one per device)",
        ),
        option(
            "--devices",
            read=_read_devices,
            metavar="SPEED[@MEMORY],...",
            help="device of each part: its speed relative to this machine's device, and its memory: 1,1,0.5@16GB",
        ),
        option("--memory", read=parse_size, metavar="SIZE", help="memory of every device (default: unlimited)"),
        option(
            "--microbatches", read=parse_count, default=8, metavar="M", help="microbatches per minibatch (default 8)"
        ),
        option(
            "--topology", default="uniform", help="network between the parts, see offbeat topology (default uniform)"
        ),
        option(
            "--state",
            read=lambda text: parse_number(text, lambda x: 1 <= x < 100, "expected a number from 1 to 100"),
            default=4.0,
            metavar="N",
            help="bytes of memory per byte of parameters: weights, gradients, optimizer state (default 4: Adam)",
        ),
        option(
            "--repeats", read=parse_count, default=5, metavar="N", help="repetitions of each measurement (default 5)"
        ),
        option("--save-graph", read=Path, metavar="FILE", help="write the measured graph as JSON"),
        option("--svg", read=Path, metavar="FILE", help="write a drawing of the graph and its parts"),
    ),
    sections=("model", "data", "train"),
    run=_run,
)
