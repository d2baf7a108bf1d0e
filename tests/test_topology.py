"""Machines and routes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from offbeat.errors import RequestError
from offbeat.topology import TOPOLOGIES, Link, Topology, build, edge_name

EXAMPLES = {"cluster": "cluster:2x4", "torus": "torus:4x2"}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_has_a_connected_route_between_all_pairs(name: str) -> None:
    topology = build(EXAMPLES.get(name, name), ranks=8)
    for source in range(8):
        for target in range(8):
            if source != target:
                route = topology.route(source, target)
                assert route[0][0] == source and route[-1][1] == target
                assert all(one[1] == other[0] for one, other in pairwise(route))
                assert all(edge in topology.links for edge in route)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_cable_is_full_duplex(name: str) -> None:
    topology = build(EXAMPLES.get(name, name), ranks=8)
    assert all(topology.links[target, source] == link for (source, target), link in topology.links.items())


def test_uniform_has_one_latency_a_route_and_one_port_a_rank() -> None:
    topology = build("uniform:bandwidth=2GB/s,latency=6us", ranks=5)
    assert topology.route(1, 3) == ((1, "switch"), ("switch", 3))
    assert topology.latency_s(1, 3) == 6e-6
    assert {link.bytes_per_s for link in topology.links.values()} == {2e9}


def test_the_cube_mesh_gives_each_gpu_six_nvlinks_and_sends_strangers_over_pcie() -> None:
    topology = build("dgx1", ranks=8)
    for rank in range(8):
        lanes = [link.lanes for (a, b), link in topology.links.items() if a == rank and isinstance(b, int)]
        assert sum(lanes) == 6
    assert topology.route(0, 3) == ((0, 3),)
    assert topology.links[0, 3].bytes_per_s == pytest.approx(47.9e9)
    assert [edge_name(edge) for edge in topology.route(0, 7)] == [
        "rank 0 > pcie 0",
        "pcie 0 > socket 0",
        "socket 0 > socket 1",
        "socket 1 > pcie 3",
        "pcie 3 > rank 7",
    ]


def test_the_p100_mesh_has_the_same_pairs_with_one_link_each() -> None:
    topology = build("dgx1:p100", ranks=8)
    for rank in range(8):
        out = [link for (a, b), link in topology.links.items() if a == rank and isinstance(b, int)]
        assert len(out) == 4 and sum(link.bytes_per_s for link in out) == pytest.approx(73e9)


def test_the_figures_of_the_machines_are_the_published_ones() -> None:
    box = build("box", ranks=8)
    assert box.links[0, "pcie 0"] == box.links["pcie 0", "socket 0"] == Link(1e-6, 12e9)
    assert box.links["socket 0", "socket 1"] == Link(1e-6, 19.2e9)
    assert box.route(0, 3) == ((0, "pcie 0"), ("pcie 0", 3))
    assert build("nvswitch", ranks=4).links[0, "switch"].bytes_per_s == 143.7e9
    dgx1 = build("dgx1", ranks=8)
    assert dgx1.links[0, "pcie 0"] == Link(1e-6, 12e9)
    assert dgx1.links["socket 0", "socket 1"].bytes_per_s == 19.2e9
    ethernet = build("uniform", ranks=2)
    assert (ethernet.links[0, "switch"].bytes_per_s, ethernet.latency_s(0, 1)) == (1.25e9, 4e-6)


def test_a_cluster_route_crosses_the_core_only_between_nodes() -> None:
    topology = build("cluster:2x4", ranks=8)
    assert topology.route(4, 7) == ((4, "node 1"), ("node 1", 7))
    assert topology.route(3, 4) == ((3, "node 0"), ("node 0", "core"), ("core", "node 1"), ("node 1", 4))
    assert topology.latency_s(3, 4) == pytest.approx(5e-6)


def test_ranks_forward_on_a_ring_by_the_shorter_way() -> None:
    topology = build("ring", ranks=6)
    assert topology.route(0, 2) == ((0, 1), (1, 2))
    assert topology.route(0, 5) == ((0, 5),)


def test_torus_neighbours_are_one_hop_apart() -> None:
    topology = build("torus:4x3", ranks=12)
    assert topology.route(0, 3) == ((0, 3),)  # around the first side
    assert topology.route(0, 8) == ((0, 8),)  # around the second
    assert len(topology.route(0, 6)) == 3


@pytest.mark.parametrize(
    ("text", "ranks", "says"),
    [
        ("unifrom", 4, "did you mean 'uniform'"),
        ("cluster:3x5", 16, "15 ranks, not 16"),
        ("cluster:2x2x2", 8, "NODESxPER_NODE"),
        ("torus:2x2", 5, "4 ranks, not 5"),
        ("cluster", 4, "SHAPE is missing"),
        ("dgx1", 9, "8 GPUs"),
        ("dgx1:a100", 8, "unknown choice"),
        ("uniform", 0, "1 or more"),
        ("uniform:bandwidth=0GB/s", 4, "at least 1 byte a second"),
        ("uniform:latency=-1us", 4, "0 or more"),
    ],
)
def test_a_wrong_topology_is_named(text: str, ranks: int, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        build(text, ranks=ranks)


def test_a_topology_written_by_hand_is_checked() -> None:
    with pytest.raises(RequestError, match="no rank 7"):
        Topology(name="mine", ranks=2, links={(0, 7): Link(0, 1)})
    with pytest.raises(RequestError, match="no way from rank 1 to rank 0"):
        Topology(name="mine", ranks=2, links={(0, 1): Link(0, 1)}).route(1, 0)
    with pytest.raises(RequestError, match="1 or more"):
        Topology(name="mine", ranks=0, links={})
    with pytest.raises(RequestError, match="itself"):
        build("uniform", ranks=2).route(1, 1)
    with pytest.raises(RequestError, match="bandwidth > 0"):
        Link(0.0, 0.0)
