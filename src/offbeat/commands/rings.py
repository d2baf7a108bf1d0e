"""How the rings of a mesh are shown, by the commands that show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbeat.commands.base import say
from offbeat.number_format import format_rate
from offbeat.schedules.algorithms import format_orders
from offbeat.schedules.rings import Rings, find_rings
from offbeat.spec import count_of
from offbeat.topology import Topology

if TYPE_CHECKING:
    from rich.console import Console

_MOST_CHARACTERS = 400


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
