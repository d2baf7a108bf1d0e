"""Machines and routes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from offbeat.errors import RequestError
from offbeat.topology import TOPOLOGIES, Link, Topology, build, edge_name, ranks_of

EXAMPLES = {"cluster": "cluster:2x4", "torus": "torus:4x2"}


def latency_s(topology: Topology, source: int, target: int) -> float:
    """Of the whole route."""
    return sum(topology.links[edge].latency_s for edge in topology.route(source, target))


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
    assert latency_s(topology, 1, 3) == 6e-6
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
    assert (ethernet.links[0, "switch"].bytes_per_s, latency_s(ethernet, 0, 1)) == (1.25e9, 4e-6)


def test_a_cluster_route_crosses_the_core_only_between_nodes() -> None:
    topology = build("cluster:2x4", ranks=8)
    assert topology.route(4, 7) == ((4, "node 1"), ("node 1", 7))
    assert topology.route(3, 4) == ((3, "node 0"), ("node 0", "core"), ("core", "node 1"), ("node 1", 4))
    assert latency_s(topology, 3, 4) == pytest.approx(5e-6)


NESTED = [f"cluster:2x{EXAMPLES.get(name, name)}" for name in TOPOLOGIES]


@pytest.mark.parametrize("line", [*NESTED, "cluster:2xcluster:2xdgx1"])
def test_a_node_may_be_any_topology_and_keeps_its_own_routes(line: str) -> None:
    ranks = ranks_of(line)
    assert ranks is not None
    whole, half = build(line, ranks=ranks), build(line.partition("x")[2], ranks=ranks // 2)
    assert all(whole.links[target, source] == link for (source, target), link in whole.links.items())
    for source in range(ranks):
        for target in range(ranks):
            if source == target:
                continue
            route = [edge_name(edge) for edge in whole.route(source, target)]
            ports = sum(edge.endswith(" > core") for edge in route)
            if source // half.ranks == target // half.ranks:
                inside = half.route(source % half.ranks, target % half.ranks)
                assert len(route) == len(inside) and ports == 0
            else:
                assert ports == 1


def test_two_dgx1_are_joined_by_one_port_each() -> None:
    topology = build("cluster:2xdgx1:p100,across=100Gbit/s,across-latency=2us,nvlink=20GB/s", ranks=16)
    assert topology.route(8, 11) == ((8, 11),)
    assert topology.links[8, 9] == Link(1e-6, 20e9)
    assert [edge_name(edge) for edge in topology.route(7, 8)] == [
        "rank 7 > node 0 pcie 3",
        "node 0 pcie 3 > node 0 socket 1",
        "node 0 socket 1 > node 0 socket 0",
        "node 0 socket 0 > core",
        "core > node 1 socket 0",
        "node 1 socket 0 > node 1 pcie 0",
        "node 1 pcie 0 > rank 8",
    ]
    assert topology.links["node 0 socket 0", "core"] == Link(1e-6, 12.5e9)


def test_groups_are_the_ranks_of_a_node_or_of_a_side() -> None:
    lines = {"cluster:2x4": (4,), "torus:2x4": (2,), "cluster:2xdgx1": (8,), "cluster:2xcluster:4x8": (8, 32)}
    lines |= {"cluster:2xtorus:2x2x3": (2, 4, 12), "uniform": ()}
    for line, groups in lines.items():
        assert build(line, ranks=ranks_of(line) or 8).groups == groups


def test_a_line_says_how_many_ranks_it_has() -> None:
    lines = {"uniform": None, "dgx1": None, "cluster:4x8": 32, "torus:2x2x3": 12, "cluster:3xdgx1": 24}
    lines |= {"cluster:3xtorus:2x2": 12, "cluster:2xcluster:2x8": 32, "cluster:2xcluster:2xdgx1,p100": 32}
    assert {line: ranks_of(line) for line in lines} == lines


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
        ("uniform", 0, "expected 1 to 1,000,000 ranks; got 0"),
        ("cluster:999999999xdgx1", 7999999992, "got 7,999,999,992"),
        ("cluster:2xdgx2", 16, "did you mean 'dgx1'"),
        ("cluster:2xdgx1", 15, "15 ranks cannot be divided evenly among 2 nodes"),
        ("cluster:2xdgx1", 18, "dgx1 has 8 GPUs, too few for 9 ranks"),
        ("cluster:2xdgx1,inside=1GB/s", 16, "'dgx1:inside=1GB/s': unknown option 'inside'"),
        ("cluster:2xdgx1,across=1gb/s", 16, "did you mean 'GB/s' or 'Gb/s'"),
        ("cluster:2xtorus:2x2", 16, "4 ranks, not 8"),
        ("uniform:bandwidth=0GB/s", 4, "at least 1 byte per second"),
        ("uniform:latency=-1us", 4, "0 or more"),
    ],
)
def test_a_wrong_topology_is_named(text: str, ranks: int, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        build(text, ranks=ranks)


def test_a_topology_written_by_hand_is_checked() -> None:
    with pytest.raises(RequestError, match="no rank 7"):
        Topology(name="mine", ranks=2, links={(0, 7): Link(0, 1)})
    with pytest.raises(RequestError, match="no route from rank 1 to rank 0"):
        Topology(name="mine", ranks=2, links={(0, 1): Link(0, 1)}).route(1, 0)
    with pytest.raises(RequestError, match="1 or more"):
        Topology(name="mine", ranks=0, links={})
    with pytest.raises(RequestError, match="itself"):
        build("uniform", ranks=2).route(1, 1)
    with pytest.raises(RequestError, match="bandwidth > 0"):
        Link(0.0, 0.0)
