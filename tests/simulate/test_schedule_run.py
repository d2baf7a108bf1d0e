"""A schedule on contended links: the price where nothing contends; stragglers, traffic beside, processors."""

import json

import pytest

from offbeat.cli import main
from offbeat.errors import RequestError
from offbeat.schedules import build, price
from offbeat.simulate.collective import contended, priced
from offbeat.simulate.fair_network import Background
from offbeat.simulate.schedule_run import ProcessorCosts, run_schedule
from offbeat.topology import build as build_topology

SHAPES = {4: ("torus:2x2", "hierarchical:2x2"), 8: ("torus:4x2", "hierarchical:2x4"), 12: ("torus:4x3",)}
LINES = ("ring", "direct", "halving-doubling", "tree", "central", "double-tree", "ring:parts=4")


EVERY = [(line, ranks) for ranks in (2, 3, 4, 5, 8, 12) for line in (*LINES, *SHAPES.get(ranks, ()))]
NETWORKS = ("uniform:bandwidth=1GB/s,latency=10us", "torus:{ranks},bandwidth=1GB/s,latency=10us")


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("ranks", [3, 4, 5, 8, 12])
def test_a_ring_takes_exactly_its_price(ranks: int, network: str) -> None:
    topology, schedule = build_topology(network.format(ranks=ranks), ranks=ranks), build("ring", ranks=ranks)
    run = run_schedule(schedule, topology, 1000 * ranks)
    assert not run.is_shared
    assert run.seconds == pytest.approx(price(schedule, topology, 1000 * ranks).seconds, rel=1e-9)


def test_where_no_link_is_shared_nothing_takes_longer_than_its_price() -> None:
    """It is shorter where a chunk goes on before the others of its step have come."""
    alone = 0
    for line, ranks in EVERY:
        topology, schedule = build_topology(NETWORKS[0], ranks=ranks), build(line, ranks=ranks)
        for size in (1000 * schedule.chunks, 1001):
            run = run_schedule(schedule, topology, size)
            if not run.is_shared:
                alone += 1
                assert run.seconds <= price(schedule, topology, size).seconds * (1 + 1e-9), (line, ranks)
    assert alone > len(EVERY) / 3


def test_the_bytes_of_all_links_are_the_least_that_it_takes() -> None:
    for line, ranks in EVERY:
        topology, schedule = build_topology("uniform:bandwidth=1GB/s", ranks=ranks), build(line, ranks=ranks)
        cost = price(schedule, topology, 4000)
        assert run_schedule(schedule, topology, 4000).seconds >= max(cost.bytes_per_link.values()) / 1e9 * (1 - 1e-9)


def test_flows_that_share_a_port_for_a_whole_step_take_the_price_too() -> None:
    topology = build_topology("uniform:bandwidth=1GB/s,latency=10us", ranks=4)
    for line in ("direct", "central"):
        schedule = build(line, ranks=4)
        run = run_schedule(schedule, topology, 4_000_000)
        assert run.is_shared
        assert run.seconds == pytest.approx(price(schedule, topology, 4_000_000).seconds, rel=1e-9)


def test_a_tree_that_sends_a_chunk_on_at_once_to_two_ranks_takes_longer_than_its_price() -> None:
    """Rank 0 sends to 2 and to 1 at the same time, so 2 has it late, and passes it on late: 5 times instead of 4."""
    topology = build_topology("uniform:bandwidth=1GB/s,latency=0s", ranks=4)
    assert run_schedule(build("tree", ranks=4), topology, 1_000_000).seconds == pytest.approx(5e-3)
    assert price(build("tree", ranks=4), topology, 1_000_000).seconds == pytest.approx(4e-3)


def test_what_is_encoded_is_sent_in_as_many_bytes_as_it_is_priced() -> None:
    topology = build_topology("uniform:bandwidth=1GB/s,latency=10us", ranks=4)
    plain, coded = (build(line, ranks=4) for line in ("ring", "ring:codec=bf16"))
    run = run_schedule(coded, topology, 4_000_000, 4)
    assert run.seconds == pytest.approx(price(coded, topology, 4_000_000, 4).seconds, rel=1e-9)
    assert run.seconds < 0.6 * run_schedule(plain, topology, 4_000_000, 4).seconds


def test_a_straggler_holds_up_everybody_by_what_it_is_late() -> None:
    topology, schedule = build_topology("uniform:bandwidth=1GB/s,latency=0s", ranks=4), build("ring", ranks=4)
    late = run_schedule(schedule, topology, 4_000_000, starts_s=(0.0, 0.0, 0.5, 0.0))
    assert max(late.ends_s[0]) == pytest.approx(0.5 + price(schedule, topology, 4_000_000).seconds)


def test_traffic_beside_slows_down_what_shares_its_port() -> None:
    topology, schedule = build_topology("uniform:bandwidth=1GB/s,latency=0s", ranks=4), build("ring", ranks=4)
    alone = run_schedule(schedule, topology, 4_000_000).seconds
    beside = run_schedule(schedule, topology, 4_000_000, background=[Background(0, 2)]).seconds
    assert 1.4 * alone < beside <= 2.0001 * alone


def test_calls_in_a_row_take_as_long_as_one_where_nothing_overlaps() -> None:
    topology, schedule = build_topology("uniform:bandwidth=1GB/s,latency=10us", ranks=4), build("ring", ranks=4)
    one, many = (run_schedule(schedule, topology, 4_000_000, calls=calls).seconds for calls in (1, 5))
    assert many == pytest.approx(one)


def test_the_work_of_a_message_is_done_on_cores_that_ranks_share() -> None:
    """Two ranks, two messages each: 4 halves of 2 ms a rank, one after the other on one core, or beside on two."""
    topology, schedule = build_topology("uniform:bandwidth=1TB/s,latency=0s", ranks=2), build("ring", ranks=2)
    on_two, on_one = (
        run_schedule(schedule, topology, 8, costs=ProcessorCosts(message_s=4e-3, cores=cores, shared=True)).seconds
        for cores in (2, 1)
    )
    assert on_two == pytest.approx(8e-3, rel=1e-6)
    assert on_one == pytest.approx(16e-3, rel=1e-6)


def test_ranks_of_one_host_read_memory_and_send_nothing() -> None:
    topology, schedule = build_topology("uniform:bandwidth=1B/s", ranks=4), build("direct", ranks=4)
    run = run_schedule(
        schedule, topology, 4000, hosts=[0, 0, 0, 0], costs=ProcessorCosts(read_s_per_byte=1e-6, mark_s=1e-3)
    )
    assert 6e-3 <= run.seconds < 0.1


def test_training_by_all_reduce_takes_its_schedule_on_contended_links() -> None:
    topology = build_topology("uniform:bandwidth=1GB/s,latency=0s", ranks=4)
    assert contended("ring", topology)(4_000_000) == pytest.approx(priced("ring", topology)(4_000_000))
    assert contended("tree", topology)(1_000_000) == pytest.approx(5e-3)
    assert contended("tree", topology, [Background(0, 2)])(1_000_000) > 6e-3


@pytest.mark.parametrize(("option", "update_s"), [([], 0.5), (["--contended"], 0.6), (["--background", "0>2"], 0.8)])
def test_simulate_takes_contended_links(option: list[str], update_s: float, capsys: pytest.CaptureFixture[str]) -> None:
    machines = "--learners 4 --compute constant:100ms --size 100MB --no-overlap --topology"
    words = [*machines.split(), "uniform:bandwidth=1GB/s,latency=0s", *option, "--json"]
    assert main(["simulate", "tree", *words]) == 0
    assert json.loads(capsys.readouterr().out)["seconds_per_update"] == pytest.approx(update_s)


@pytest.mark.parametrize("way", ["0-2", "0>0", "0>9", "a>b"])
def test_background_traffic_that_goes_nowhere_is_refused(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "ring", "--learners", "4", "--background", way]) == 2
    assert "--background" in capsys.readouterr().err


def test_more_ranks_than_can_be_simulated_on_contended_links_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "ring", "--learners", "200", "--contended"]) == 2
    assert "at most 128 learners" in capsys.readouterr().err


def test_a_topology_of_other_ranks_is_refused() -> None:
    with pytest.raises(RequestError, match="has 4 ranks"):
        run_schedule(build("ring", ranks=4), build_topology("uniform", ranks=3), 100)
