"""offbeat topology: the machines one can name, and the links and rings of one."""

from __future__ import annotations

import argparse
from typing import Any

from offbeat.commands import estimates
from offbeat.commands.base import Command, Terminal, answer, heading, option, print_params, ranks_of, row_json, say
from offbeat.number_format import format_rate, format_seconds
from offbeat.schedules.algorithms import format_orders
from offbeat.schedules.rings import Rings, find_rings
from offbeat.spec import count_of, parse_count
from offbeat.topology import TOPOLOGIES, Topology, build, edge_name

_MOST_CHARACTERS = 400


def _run(given: argparse.Namespace) -> None:
    if given.topology is None:
        rows = [row_json(row.name, row.summary, row.params) for row in TOPOLOGIES.values()]
        answer(given, {"topologies": rows}, _show_all)
        return
    ranks = given.ranks or ranks_of([given.topology]) or 8
    estimates.check(given, estimates.of_topology(given.topology, ranks, rings=True))
    machine = build(given.topology, ranks=ranks)
    rings = rings_of(machine)
    links = [
        {"link": edge_name(edge), "latency_s": one.latency_s, "bytes_per_s": one.bytes_per_s, "lanes": one.lanes}
        for edge, one in machine.links.items()
    ]

    def show(out: Terminal) -> None:
        heading(out, f"{machine.name}, {count_of(machine.ranks, 'rank')}")
        say(out, *_links(machine))
        print_rings(out, machine, rings)

    told: dict[str, Any] = {"topology": machine.name, "ranks": machine.ranks, "links": links, "rings": None}
    if rings is not None:
        orders = [list(order) for order in rings.orders]
        told["rings"] = {"orders": orders, "proved": rings.proved, "cut_bound": rings.bound, "cut": list(rings.cut)}
    answer(given, told, show)


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


def print_rings(out: Terminal, machine: Topology, rings: Rings | None) -> None:
    if rings is None:
        return
    part = ", ".join(map(str, rings.cut))
    lanes = count_of(rings.bound, "lane")
    bound = (
        f"cut bound: ranks {{{part}}} have {lanes} to the other ranks, {format_rate(rings.cut_bytes_per_s)} in total"
    )
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
        line if len(line) <= _MOST_CHARACTERS else "  (too long to print; see offbeat topology ... --json)",
    )


def _show_all(out: Terminal) -> None:
    for row in TOPOLOGIES.values():
        say(out, row.name, style="bold", end="")
        say(out, f": {row.summary}")
        print_params(out, row.params)


COMMAND = Command(
    summary="list network topologies, or show the links and rings of one",
    about="List the network topologies, or show the links of one and its edge-disjoint rings over direct links.",
    examples=("topology dgx1", "topology dgx1 --ranks 5", "topology cluster:4x8,across=25Gbit/s"),
    options=(
        option("topology", nargs="?", help="dgx1, cluster:4x8,across=1GB/s, ... (default: list all)"),
        option("--ranks", read=parse_count, metavar="P", help="number of ranks (default: from the shape, else 8)"),
        estimates.CONFIRM,
    ),
    run=_run,
)
