"""Prices: closed forms on uniform links, exact bytes, shared links, and who is waited for."""

from __future__ import annotations

from dataclasses import replace
from math import log2

import pytest

from offbeat.errors import RequestError
from offbeat.schedules import Schedule, Transfer, algorithms, build, lower_bound_s, price
from offbeat.schedules.ranking import Ranked, advice, advised, explain, rank, recommended
from offbeat.topology import Edge, Link, Topology
from offbeat.topology import build as topology
from schedules.oracle import bytes_sent

A, B = 7e-6, 3e9  # latency and bandwidth
CLUSTER = "cluster:4x8,inside=50GB/s,across=1GB/s"


def uniform(ranks: int) -> Topology:
    return topology(f"uniform:latency={A},bandwidth={B}", ranks=ranks)


def seconds(line: str, ranks: int, size: int) -> float:
    return price(build(line, ranks=ranks), uniform(ranks), size).seconds


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 64])
def test_on_uniform_links_prices_equal_the_closed_forms(ranks: int) -> None:
    size = ranks * 64 * 1000
    fewest = 2 * size * (ranks - 1) / (ranks * B)
    assert seconds("central", ranks, size) == pytest.approx(2 * A + 2 * (ranks - 1) * size / B, rel=1e-9)
    assert seconds("direct", ranks, size) == pytest.approx(2 * A + fewest, rel=1e-9)
    assert seconds("ring", ranks, size) == pytest.approx(2 * (ranks - 1) * A + fewest, rel=1e-9)
    for line in (*algorithms()["torus"].lines(ranks), *algorithms()["multiring"].lines(ranks)):
        steps = len(build(line, ranks=ranks).steps)
        assert seconds(line, ranks, size) == pytest.approx(steps * A + fewest, rel=1e-9)
    if log2(ranks).is_integer():
        assert seconds("halving-doubling", ranks, size) == pytest.approx(2 * log2(ranks) * A + fewest, rel=1e-9)
        assert seconds("tree", ranks, size) == pytest.approx(2 * log2(ranks) * (A + size / B), rel=1e-9)


def test_the_torus_saves_latency_only() -> None:
    ranks, x, y, size = 32, 4, 8, 32_000
    saved = seconds("ring", ranks, size) - seconds("torus:4x8", ranks, size)
    assert saved == pytest.approx(2 * (ranks - x - y + 1) * A, rel=1e-9)


def test_baidu_one_reducer_and_ring() -> None:
    one_reducer = price(
        build("central", ranks=10), topology("uniform:bandwidth=1GB/s,latency=0", ranks=10), 1_200_000_000
    )
    assert one_reducer.seconds / 2 == pytest.approx(10.8, rel=1e-9)  # published: one way
    ring = price(build("ring", ranks=40), topology("uniform:bandwidth=6GB/s,latency=0", ranks=40), 1_200_000_000)
    assert ring.seconds == pytest.approx(0.39, rel=1e-9)  # published: about 400 ms


@pytest.mark.parametrize("size", [0, 1, 5, 999_983])
def test_bytes_are_exact_where_chunks_do_not_divide_the_size(size: int) -> None:
    for name in algorithms():
        for line in algorithms()[name].lines(6):
            schedule = build(line, ranks=6)
            cost = price(schedule, uniform(6), size)
            assert list(cost.bytes_per_rank) == bytes_sent(schedule, size), line
            assert cost.bytes_total == (5 * 6 * size if algorithms()[name].gathers else 2 * size * 5)
            sent_by_links = sum(count for link, count in cost.bytes_per_link.items() if link.endswith("> switch"))
            assert sent_by_links == cost.bytes_total


def test_items_are_not_cut_apart() -> None:
    cost = price(build("ring", ranks=3), uniform(3), 4 * 4, item_bytes=4)  # chunks of 1, 1 and 2 items
    assert all(count % 4 == 0 for count in cost.bytes_per_rank)
    assert cost.bytes_total == 2 * 16 * 2


def test_transfers_of_one_step_share_a_link_and_the_slowest_message_decides() -> None:
    # 0 and 1 both send over one thin wire to 2; 0 also sends to 1 over its own.
    links: dict[Edge, Link] = {
        (0, "hub"): Link(1.0, 10.0),
        (1, "hub"): Link(2.0, 10.0),
        ("hub", 2): Link(0.5, 5.0),
        (0, 1): Link(0.1, 1.0),
    }
    wires = Topology(name="wires", ranks=3, links=links)
    steps = [
        [Transfer(0, 2, 0, True), Transfer(1, 2, 0, True), Transfer(0, 1, 0, True)],
        [Transfer(0, 1, 0, False)],
    ]
    cost = price(Schedule("by-hand", "all-reduce", 3, 1, steps), wires, 10)
    thin = 20 / 5  # both messages on hub > 2
    assert cost.seconds == pytest.approx(max(2.0 + 0.5 + thin, 0.1 + 10) + (0.1 + 10))
    assert cost.bottleneck == "rank 0 > rank 1"
    assert cost.bytes_per_link == {"rank 0 > rank 1": 20, "rank 0 > hub": 10, "hub > rank 2": 20, "rank 1 > hub": 10}


def test_all_transfers_between_one_pair_in_a_step_are_one_message() -> None:
    steps = [[Transfer(0, 1, chunk, True) for chunk in range(4)]]
    cost = price(Schedule("one", "reduce", 2, 4, steps, root=1), uniform(2), 4000)
    assert cost.seconds == pytest.approx(A + 4000 / B)


def test_each_direction_of_a_cable_is_a_link_of_its_own() -> None:
    both = [[Transfer(0, 1, 0, True), Transfer(1, 0, 1, True)]]
    cost = price(Schedule("both", "reduce-scatter", 2, 2, both), uniform(2), 2000)
    assert cost.seconds == pytest.approx(A + 1000 / B)


def test_on_a_cluster_hierarchical_beats_the_flat_ring_and_it_is_said_why() -> None:
    machine = topology(CLUSTER, ranks=32)
    found = {ranked.line: ranked for ranked in rank(machine, 100_000_000, every_shape=True)}
    best, flat = found["hierarchical:4x8"], found["ring"]
    assert best.price.bytes_per_link["node 0 > core"] == 150_000_000
    assert flat.price.bytes_per_link["node 0 > core"] == 193_750_000
    assert flat.price.seconds / best.price.seconds > 1.2
    assert explain(best, flat) == (
        "hierarchical:4x8 is 1.26x as fast as ring: node 0 > core carries 150 MB instead of 193.8 MB; "
        "latency is 44 us in 20 steps instead of 310 us in 62"
    )


def test_on_equal_machines_with_a_large_size_the_answer_is_ring() -> None:
    machine = topology("uniform", ranks=16)
    ranking = rank(machine, 10**10)
    assert recommended(ranking).line == "ring"
    assert advice(ranking, machine) == ["use ring, within 0.0 % of direct, the fastest"]
    assert advice([recommended(ranking)], machine) == ["use ring, the fastest"]


def ranked(line: str, seconds: float, fits: int = 0) -> Ranked:
    cost = price(build("ring", ranks=2), uniform(2), 1000)
    return Ranked(line=line, price=replace(cost, seconds=seconds), tried=1, shapes=1, fits=fits)


def test_within_2_percent_of_the_fastest_a_shape_that_fits_is_advised() -> None:
    fastest, fitting = ranked("torus:128x2", 1.0), ranked("hierarchical:32x8", 1.0199, fits=1)
    assert advised([fastest, fitting, ranked("ring", 2.0, fits=2)]) is fitting
    assert advised([fastest, ranked("hierarchical:32x8", 1.021, fits=1)]) is fastest
    flatter = ranked("torus:8x32", 1.019, fits=1)
    assert advised([ranked("multiring:2x4x32", 1.0, fits=1), fitting, flatter]) is flatter
    assert advised([fitting, ranked("multiring:2x4x32", 1.0, fits=2)]).line == "multiring:2x4x32"


@pytest.mark.parametrize("across", ["10Gbit/s", "100Gbit/s", "50GB/s"])
@pytest.mark.parametrize("size", [100_000, 10_000_000])
def test_of_every_family_the_shape_that_fits_the_nodes_is_taken_where_it_is_close(across: str, size: int) -> None:
    machine = topology(f"cluster:6x4,across={across}", ranks=24)
    every = rank(machine, size, every_shape=True)
    fitting = {"torus:4x6", "hierarchical:6x4", "hierarchical:6x4,leader", "hierarchical:6x4,outer=halving-doubling"}
    fitting |= {"multiring:4x2x3", "multiring:4x3x2", "multiring:2x2x6", "multiring:2x2x2x3", "multiring:2x2x3x2"}
    assert {ranked.line for ranked in every if ranked.fits} == fitting
    for chosen in rank(machine, size):
        family = [one for one in every if one.line.partition(":")[0] == chosen.line.partition(":")[0]]
        close = 1.02 * min(one.price.seconds for one in family)
        assert chosen.fits or not any(one.fits and one.price.seconds <= close for one in family)


def test_the_advice_states_its_rule_where_it_is_not_the_fastest() -> None:
    machine = topology("cluster:6x4,across=2GB/s", ranks=24)
    ranking = rank(machine, 3_000_000)
    assert (ranking[0].line, advised(ranking).line) == ("multiring:4x2x3", "torus:4x6")
    assert advice(ranking, machine)[1].endswith(
        "faster; of shapes within 2 % of the fastest, one that fits this machine's groups of 4 ranks is preferred, "
        "then the one with fewer sides"
    )


def test_two_dgx1_are_priced_by_the_port_between_them() -> None:
    machine = topology("cluster:2xdgx1,across=1GB/s", ranks=16)
    cost = price(build("hierarchical:2x8", ranks=16), machine, 100_000_000)
    assert cost.bottleneck == "node 0 socket 0 > core"
    assert cost.bytes_per_link[cost.bottleneck] == 100_000_000
    assert cost.seconds > 0.1
    assert advised(rank(machine, 100_000_000)).fits == 1


def test_the_ranking_is_sorted_and_holds_each_family_once() -> None:
    ranking = rank(topology(CLUSTER, ranks=32), 1_000_000)
    times = [ranked.price.seconds for ranked in ranking]
    assert times == sorted(times)
    families = [ranked.line.split(":")[0] for ranked in ranking]
    assert sorted(families) == sorted(algorithms())


def test_on_the_cube_mesh_the_rings_that_were_found_use_all_nvlinks() -> None:
    ranking = rank(topology("dgx1", ranks=8), 100_000_000)
    assert ranking[0].label == "ring:order=... (6 rings)"
    bound = lower_bound_s(topology("dgx1:nvlink=23.95GB/s,pcie=1B/s", ranks=8), 100_000_000)
    assert ranking[0].price.seconds == pytest.approx(bound + 14e-6, rel=1e-3)


def test_no_all_reduce_is_faster_than_the_lower_bound() -> None:
    for name, ranks in (
        ("uniform", 6),
        ("dgx1", 8),
        ("box", 8),
        ("fully-connected", 5),
        ("torus:3x3", 9),
        (CLUSTER, 32),
    ):
        machine = topology(name, ranks=ranks)
        for ranked in rank(machine, 1_000_000, every_shape=True):
            assert ranked.price.seconds >= lower_bound_s(machine, 1_000_000), (name, ranked.line)


def test_the_ranking_tries_the_shape_of_the_machine_however_many_nodes_there_are() -> None:
    found = rank(topology("cluster:60x2,inside=50GB/s,across=1GB/s", ranks=120), 100_000_000)
    lines = [ranked.line for ranked in found]
    assert "hierarchical:60x2" in lines
    assert lines.index("hierarchical:60x2") < lines.index("ring")


def test_why_says_latency_where_latency_is_most_and_how_long_a_link_was_waited_for() -> None:
    assert price(build("ring", ranks=16), uniform(16), 16).why() == "latency: 210 us over 30 steps"
    mixed = price(build("tree", ranks=8), topology("dgx1", ranks=8), 1_000_000_000)
    assert mixed.why() == (
        "rank 0 > rank 1 carries 1 GB at 23.95 GB/s (as do 7 others): 41.75 ms; waiting for such links "
        "takes 167 ms in total"
    )


def test_sizes_that_cannot_be_counted_exactly_are_refused() -> None:
    with pytest.raises(RequestError, match="too large to be counted exactly"):
        price(build("ring", ranks=3), uniform(3), 2**53)


def test_one_rank_costs_nothing() -> None:
    cost = price(build("ring", ranks=1), topology("uniform", ranks=1), 1000)
    assert (cost.seconds, cost.steps, cost.bytes_per_rank, cost.bottleneck) == (0.0, 0, (0,), "none")


def test_wrong_sizes_and_rank_counts_are_refused() -> None:
    with pytest.raises(RequestError, match="has 4 ranks, topology 'uniform' has 5"):
        price(build("ring", ranks=4), topology("uniform", ranks=5), 100)
    with pytest.raises(RequestError, match="multiple"):
        price(build("ring", ranks=4), topology("uniform", ranks=4), 10, item_bytes=4)
    with pytest.raises(RequestError, match="0 or more"):
        price(build("ring", ranks=4), topology("uniform", ranks=4), -1)
