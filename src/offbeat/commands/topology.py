"""offbeat topology: the machines one can name, and the links and rings of one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from offbeat.commands.base import (
    Command,
    console,
    heading,
    json_argument,
    print_json,
    print_params,
    ranks_of,
    reader,
    row_json,
    say,
)
from offbeat.number_format import format_rate, format_seconds
from offbeat.schedules.algorithms import format_orders
from offbeat.schedules.rings import Rings, find_rings
from offbeat.spec import count_of, parse_count
from offbeat.topology import TOPOLOGIES, Topology, build, edge_name

if TYPE_CHECKING:
    from rich.console import Console

_MOST_CHARACTERS = 400


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topology", nargs="?", help="dgx1, cluster:4x8,across=1GB/s, ...; left out: all are listed")
    ranks = "how many (default: what a shape says, or 8)"
    parser.add_argument("--ranks", type=reader(parse_count), metavar="P", help=ranks)
    json_argument(parser)


def _run(given: argparse.Namespace) -> None:
    if given.topology is None:
        _list(given)
        return
    machine = build(given.topology, ranks=given.ranks or ranks_of([given.topology]) or 8)
    rings = rings_of(machine)
    if given.json:
        links = [
            {"link": edge_name(edge), "latency_s": one.latency_s, "bytes_per_s": one.bytes_per_s, "lanes": one.lanes}
            for edge, one in machine.links.items()
        ]
        print_json({"topology": machine.name, "ranks": machine.ranks, "links": links, "rings": rings_json(rings)})
        return
    out = console()
    heading(out, f"{machine.name}, {count_of(machine.ranks, 'rank')}")
    for line in _links(machine):
        say(out, line)
    print_rings(out, machine, rings)


def _links(machine: Topology) -> list[str]:
    """Links that are alike share a line."""
    alike: dict[tuple[float, float, int], list[str]] = {}
    for edge, link in machine.links.items():
        alike.setdefault((link.bytes_per_s, link.latency_s, link.lanes), []).append(edge_name(edge))
    lines = []
    for (rate, latency, lanes), names in sorted(alike.items(), reverse=True):
        shown = ", ".join(names[:4]) + (f", and {len(names) - 4} more" if len(names) > 4 else "")
        wires = f" ({lanes} lanes)" if lanes > 1 else ""
        lines.append(f"{format_rate(rate)}{wires}, {format_seconds(latency)}: {shown}")
    return lines


def rings_of(machine: Topology) -> Rings | None:
    return find_rings(machine) if machine.is_mesh() else None


def print_rings(out: Console, machine: Topology, rings: Rings | None) -> None:
    if rings is None:
        return
    part = ", ".join(map(str, rings.cut))
    lanes = count_of(rings.bound, "lane")
    bound = f"cut bound: {lanes}, {format_rate(rings.cut_bytes_per_s)} together, out of {{{part}}}"
    out.print()
    if not rings.orders:
        how = "no directed ring" if rings.proved else "no directed ring was found that"
        say(out, f"{how} over direct links visits all {machine.ranks} ranks; {bound}")
        return
    most = "" if rings.proved else "at least "
    say(out, f"{most}{count_of(len(rings.orders), 'edge-disjoint directed ring')}; {bound}")
    line = f"  ring:order={format_orders(rings.orders)}"
    say(
        out,
        line if len(line) <= _MOST_CHARACTERS else "  (their orders are long: offbeat topology ... --json has them)",
    )


def rings_json(rings: Rings | None) -> dict[str, Any] | None:
    if rings is None:
        return None
    return {
        "orders": [list(order) for order in rings.orders],
        "proved": rings.proved,
        "cut_bound": rings.bound,
        "cut": list(rings.cut),
    }


def _list(given: argparse.Namespace) -> None:
    if given.json:
        print_json({"topologies": [row_json(row.name, row.summary, row.params) for row in TOPOLOGIES.values()]})
        return
    out = console()
    for row in TOPOLOGIES.values():
        say(out, row.name, style="bold", end="")
        say(out, f": {row.summary}")
        print_params(out, row.params)


COMMAND = Command(
    summary="list topologies, or show the links of one and the rings that fit it",
    about="List topologies; with one, show its links and the edge-disjoint rings over direct links.",
    examples=("topology dgx1", "topology dgx1 --ranks 5", "topology cluster:4x8,across=25Gbit/s"),
    arguments=_arguments,
    run=_run,
)
