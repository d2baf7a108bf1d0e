"""Ring orders over direct links."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from offbeat.errors import RequestError
from offbeat.schedules import Rings, build, find_rings, verify
from offbeat.schedules.algorithms import format_orders, parse_orders
from offbeat.topology import Topology
from offbeat.topology import build as topology


def check(machine: Topology, rings: Rings) -> None:
    """Each ring visits everybody once over direct links, and no lane is used twice."""
    used: Counter[tuple[int, int]] = Counter()
    for order in rings.orders:
        assert sorted(order) == list(range(machine.ranks))
        used.update(zip(order, (*order[1:], order[0]), strict=True))
    for (source, target), count in used.items():
        assert count <= machine.links[source, target].lanes


@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (3, 2), (4, 4), (5, 0), (6, 2), (7, 4), (8, 6)])
def test_the_cube_mesh_has_the_known_number_of_directed_rings(ranks: int, count: int) -> None:
    machine = topology("dgx1", ranks=ranks)
    rings = find_rings(machine)
    check(machine, rings)
    assert (len(rings.orders), rings.proved) == (count, True)


def test_where_there_is_no_ring_the_cut_bound_is_given() -> None:
    rings = find_rings(topology("dgx1", ranks=5))
    assert (rings.orders, rings.bound, rings.cut) == ((), 2, (4,))
    assert rings.cut_bytes_per_s == pytest.approx(47.9e9)


def test_the_rings_that_were_found_are_a_schedule() -> None:
    orders = find_rings(topology("dgx1", ranks=8)).orders
    assert parse_orders(format_orders(orders)) == orders
    verify(build(f"ring:order={format_orders(orders)}", ranks=8))


@pytest.mark.parametrize(
    ("name", "ranks", "count"),
    [
        ("ring", 12, 2),
        ("ring", 300, 2),
        ("fully-connected", 5, 4),
        ("fully-connected", 9, 8),
        ("torus:3x3", 9, 4),
        ("torus:4x8", 32, 4),
        ("torus:4x4x4", 64, 6),
    ],
)
def test_other_meshes(name: str, ranks: int, count: int) -> None:
    machine = topology(name, ranks=ranks)
    rings = find_rings(machine)
    check(machine, rings)
    assert len(rings.orders) == count == rings.bound


def test_a_star_of_forwarding_ranks_has_no_ring() -> None:
    rings = find_rings(topology("hub-spoke", ranks=5))
    assert (rings.orders, rings.bound) == ((), 1)


def test_a_complete_graph_of_four_or_six_lacks_one_ring() -> None:
    """Tillson 1980: all others decompose into P-1 directed rings."""
    for ranks in (4, 6):
        machine = topology("fully-connected", ranks=ranks)
        rings = find_rings(machine)
        check(machine, rings)
        assert (len(rings.orders), rings.bound) == (ranks - 2, ranks - 1)
    assert find_rings(topology("fully-connected", ranks=4)).proved


def test_a_search_that_is_cut_short_still_finds_most_rings_and_does_not_claim_a_proof() -> None:
    machine = topology("fully-connected", ranks=12)
    rings = find_rings(machine)
    check(machine, rings)
    assert 10 <= len(rings.orders) <= rings.bound == 11
    assert rings.proved == (len(rings.orders) == rings.bound)


@pytest.mark.parametrize("ranks", [8, 9, 33, 100, 301])
def test_a_complete_graph_has_rings_over_all_its_lanes_or_over_all_but_one_of_each_rank(ranks: int) -> None:
    machine = topology("fully-connected", ranks=ranks)
    rings = find_rings(machine)
    check(machine, rings)
    assert len(rings.orders) == (ranks - 1 if ranks % 2 else ranks - 2)


def test_the_search_for_rings_ends_where_there_are_hardly_any() -> None:
    """Two complete halves, joined by two cables: there are many lanes and hardly a ring. Given up, and said so."""
    machine = topology("fully-connected", ranks=200)
    apart = {
        (one, other): link
        for (one, other), link in machine.links.items()
        if (int(one) < 100) == (int(other) < 100) or {one, other} in ({0, 100}, {1, 101})
    }
    rings = find_rings(replace(machine, links=apart))
    check(machine, rings)
    assert not rings.proved


def test_without_direct_links_there_is_nothing_to_search() -> None:
    with pytest.raises(RequestError, match="no direct links"):
        find_rings(topology("uniform", ranks=4))
    with pytest.raises(RequestError, match="no direct links"):
        find_rings(topology("dgx1", ranks=1))
