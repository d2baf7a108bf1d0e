"""Which schedule an all-reduce across hosts takes."""

from __future__ import annotations

import pytest

from offbeat.collectives.choice import Choice, Figures, NetworkFigures, hosts_in_order
from offbeat.errors import RequestError
from offbeat.schedules import verify
from offbeat.strategy import with_shape

MB = 1_000_000
EQUAL = NetworkFigures(latency_s=2e-4, sends=(118e6,) * 4, receives=(118e6,) * 4)
ONE_SLOW = NetworkFigures(latency_s=2e-4, sends=(118e6, 118e6, 12e6, 118e6), receives=(118e6, 118e6, 12e6, 118e6))


def figures(network: NetworkFigures) -> Figures:
    return Figures(latency_s=2e-5, bytes_per_s=5e9, network=network)


def crossings(choice: Choice, hosts: tuple[int, ...], size_bytes: int = 100 * MB) -> list[int]:
    """How many connections leave each host, over all steps."""
    pairs = {(t.source, t.target) for step in choice.of(size_bytes).schedule.steps for t in step}
    return [sum(hosts[a] == host != hosts[b] for a, b in pairs) for host in sorted(set(hosts))]


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0, 2, 2)])
def test_a_ring_leaves_and_enters_each_host_once(hosts: tuple[int, ...]) -> None:
    choice = Choice("ring", len(hosts), hosts=hosts)
    assert crossings(choice, hosts) == [1] * len(set(hosts))
    verify(choice.of(MB).schedule)


def test_an_order_of_the_user_is_kept() -> None:
    assert crossings(Choice("ring:order=0-2-1-3", 4, hosts=(0, 0, 1, 1)), (0, 0, 1, 1)) == [2, 2]


def test_hierarchical_without_a_shape_is_hosts_times_ranks() -> None:
    assert with_shape("hierarchical", (3, 3)) == "hierarchical:2x3,inner=direct,parts=4"
    assert with_shape("hierarchical:leader", (2, 2)) == "hierarchical:2x2,leader"
    assert with_shape("hierarchical", (4, 2)) == "hierarchical:3x2,inner=direct,parts=4"
    assert with_shape("hierarchical", (2, 1)) == "hierarchical:3x1"
    assert with_shape("hierarchical:4x1", (2, 2)) == "hierarchical:4x1"
    with pytest.raises(RequestError, match="has 6 ranks, not 4"):
        Choice("hierarchical:2x3", 4, hosts=(0, 0, 1, 1))


def test_a_codec_of_whole_tensors_takes_the_shape_of_the_hosts_and_nothing_else() -> None:
    hosts = (0, 0, 1, 1)
    assert with_shape("hierarchical:codec=top-k:0.01", (2, 2)) == "hierarchical:2x2,codec=top-k:0.01"
    coded = Choice("hierarchical:codec=top-k:0.01", 4, hosts=hosts).coded(100 * MB)
    assert coded is not None and coded[1].schedule.collective == "all-gather"
    between = Choice("hierarchical:codec=bf16@across", 4, hosts=hosts).coded(100 * MB)
    assert between is not None and set(between[1].schedule.steps.codec.tolist()) == {0, 1}


def test_a_ring_across_hosts_is_coded_in_parts_where_it_is_large() -> None:
    choice = Choice("ring:codec=int8", 4, hosts=(0, 1, 2, 3))
    large, small = choice.coded(100 * MB), choice.coded(MB // 5)
    assert large is not None and large[1].schedule.chunks == 32
    assert small is not None and small[1].schedule.chunks == 4
    assert choice.coded(64 * 1024) is None
    assert choice.of(100 * MB).schedule.steps.codecs == ()


def test_between_hosts_only_is_nothing_on_one_host() -> None:
    assert Choice("ring:codec=int8@across", 4).coded(100 * MB) is None
    assert Choice("ring:codec=int8", 4).coded(100 * MB) is not None


FAST = {"bf16": (1e-9, 1e-9), "int8": (2e-9, 1e-9), "top-k:0.01": (4e-9, 0.1e-9), "power-sgd:4": (4e-9, 1e-9)}


def test_auto_takes_a_codec_where_it_gains_and_says_why() -> None:
    slow = NetworkFigures(latency_s=2e-4, sends=(12e6,) * 4, receives=(12e6,) * 4)
    fast = NetworkFigures(latency_s=2e-5, sends=(12e9,) * 4, receives=(12e9,) * 4)
    found = {}
    for name, network in (("slow", slow), ("fast", fast)):
        choice = Choice("ring:codec=auto", 4, figures(network), (0, 1, 2, 3))
        assert choice.needs_speeds() and choice.coded(100 * MB) is None
        choice.speeds = FAST
        coded = choice.coded(100 * MB)
        found[name] = "" if coded is None else coded[0].line
        assert "none" in choice.why(100 * MB) and "measured" in choice.why(100 * MB)
    assert found == {"slow": "int8", "fast": ""}
    more = Choice("ring:codec=auto:int8+top-k:0.01+power-sgd:4", 4, figures(slow), (0, 1, 2, 3))
    more.speeds = FAST
    coded = more.coded(100 * MB)
    assert coded is not None and coded[0].line == "power-sgd:4"


def test_auto_takes_no_codec_where_all_ranks_share_memory() -> None:
    choice = Choice("ring:codec=auto", 4)
    assert not choice.needs_figures() and choice.coded(100 * MB) is None
    assert "share memory" in choice.why(100 * MB)


def test_ranks_are_taken_host_by_host() -> None:
    assert hosts_in_order((0, 0, 1, 1)) is None
    assert hosts_in_order((0, 1, 0, 1)) == (0, 2, 1, 3)


def test_auto_goes_by_two_levels_where_hosts_have_several_ranks() -> None:
    hosts = (0, 0, 0, 0, 1, 1, 1, 1)
    network = NetworkFigures(latency_s=2e-4, sends=(118e6,) * 2, receives=(118e6,) * 2)
    choice = Choice("auto", 8, figures(network), hosts)
    assert "hierarchical:2x4" in choice.of(100 * MB).schedule.name
    assert "118 MB/s across hosts" in choice.why(100 * MB)


def test_auto_prefers_the_ring_to_flows_that_meet_where_both_send_as_much() -> None:
    choice = Choice("auto", 4, figures(EQUAL), (0, 1, 2, 3))
    assert choice.of(100 * MB).schedule.name == choice.of(4 * MB).schedule.name == "ring:parts=4"
    assert choice.of(1000).schedule.name == "direct"


def test_parts_that_would_be_small_are_not_considered() -> None:
    choice = Choice("auto", 4, figures(EQUAL), (0, 1, 2, 3))
    assert "parts" not in choice.why(500_000)
    assert "parts" not in Choice("auto", 4, Figures(latency_s=2e-5, bytes_per_s=5e9)).why(100 * MB)


def test_why_says_how_many_streams_were_found_to_be_worth_it() -> None:
    network = NetworkFigures(latency_s=2e-4, sends=(1e9,) * 2, receives=(1e9,) * 2, streams=2)
    assert "1 GB/s across hosts, 2 streams to each rank" in Choice("auto", 2, figures(network), (0, 1)).why(MB)


def test_a_slow_host_is_named_and_owns_nothing() -> None:
    assert [str(link) for link in ONE_SLOW.slow_links()] == [
        "host 2 sends at 12 MB/s, the others at 118 MB/s",
        "host 2 receives at 12 MB/s, the others at 118 MB/s",
    ]
    assert EQUAL.slow_links() == ()
    for hosts, folded in (((0, 1, 2, 3), 2), ((0, 2, 1, 3), 1)):
        schedule = Choice("auto", 4, figures(ONE_SLOW), hosts).of(100 * MB).schedule
        assert schedule.name.startswith("fold:2,")
        sent = sum(t.source == folded for step in schedule.steps for t in step)
        assert sent == schedule.chunks, "each chunk once, and none twice"
