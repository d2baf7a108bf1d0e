"""Which link is slow, from how fast each rank sends to each."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from offbeat.collectives.calls import plan
from offbeat.collectives.links import HostRates, flows, host_rates, rank_pairs, slow_links

LINE = 118e6


def shared(line: str, hosts: tuple[int, ...], out: dict[int, float], into: dict[int, float]) -> list[list[float]]:
    """What each rank would measure where links are shared fairly: the fullest link gives its flows equal parts, and
    what they leave of other links is for the other flows.
    """
    ranks = len(hosts)
    rates = [[0.0] * ranks for _ in range(ranks)]
    for pairs in rank_pairs(plan(line, "all-reduce", ranks), hosts):
        room = {("out", host): out.get(host, LINE) for host in hosts} | {
            ("in", host): into.get(host, LINE) for host in hosts
        }
        left = {(one, other): (("out", hosts[one]), ("in", hosts[other])) for one, other in pairs}
        while left:
            many = Counter(link for links in left.values() for link in links)
            fullest = min(many, key=lambda link: room[link] / many[link])
            rate = room[fullest] / many[fullest]
            for (one, other), links in [item for item in left.items() if fullest in item[1]]:
                rates[one][other] = max(rates[one][other], rate)
                for link in links:
                    room[link] -= rate
                del left[one, other]
    return rates


def named(line: str, hosts: tuple[int, ...], out: dict[int, float], into: dict[int, float]) -> list[str]:
    steps = flows(rank_pairs(plan(line, "all-reduce", len(hosts)), hosts), shared(line, hosts, out, into), hosts)
    return [str(link) for link in slow_links(steps, len(set(hosts)))]


ONE_RANK = ("ring", "direct", "halving-doubling", "torus:2x2", "fold:2")
SHAPES = [
    *((line, (0, 1, 2, 3)) for line in ONE_RANK),
    ("ring", (0, 1, 2)),
    ("direct", (0, 1, 2)),
    ("ring", (0, 0, 1, 1, 2, 2)),
    ("hierarchical:3x2", (0, 0, 1, 1, 2, 2)),
    ("hierarchical:4x2,inner=direct,parts=4", (0, 0, 1, 1, 2, 2, 3, 3)),
]


@pytest.mark.parametrize(("line", "hosts"), SHAPES)
def test_a_host_with_a_slow_link_is_named_and_those_that_wait_for_it_are_not(line: str, hosts: tuple[int, ...]) -> None:
    told = named(line, hosts, {2: 12e6}, {2: 12e6})
    assert [text.partition(" at ")[0] for text in told] == ["host 2 sends", "host 2 receives"]
    assert all(text.startswith(f"host 2 {does} at 12 MB/s, the others at 1") for text, does in
               zip(told, ("sends", "receives"), strict=True))  # fmt: skip


@pytest.mark.parametrize(("line", "hosts"), SHAPES)
def test_equal_links_are_not_named_however_flows_share_them(line: str, hosts: tuple[int, ...]) -> None:
    assert named(line, hosts, {}, {}) == []


def test_a_link_that_is_slow_one_way_is_named_for_that_way() -> None:
    assert named("direct", (0, 1, 2, 3), {}, {1: 20e6}) == ["host 1 receives at 20 MB/s, the others at 118 MB/s"]
    assert named("direct", (0, 1, 2, 3), {3: 20e6}, {}) == ["host 3 sends at 20 MB/s, the others at 118 MB/s"]


def test_where_either_end_may_be_the_cause_the_pair_is_named() -> None:
    assert named("ring", (0, 1, 2, 3), {}, {2: 12e6}) == ["host 1 sends to host 2 at 12 MB/s, the others at 118 MB/s"]
    assert named("ring", (0, 1), {1: 12e6}, {}) == ["host 1 sends to host 0 at 12 MB/s, the others at 118 MB/s"]


def test_two_slow_hosts_are_both_named() -> None:
    told = named("direct", (0, 1, 2, 3, 4), {1: 12e6, 3: 30e6}, {1: 12e6, 3: 30e6})
    assert sorted(text[:6] for text in told) == ["host 1", "host 1", "host 3", "host 3"]


def test_what_was_not_measured_is_not_called_slow() -> None:
    hosts = (0, 1, 2)
    pairs = rank_pairs(plan("direct", "all-reduce", 3), hosts)
    rates = [[0.0] * 3 for _ in range(3)]
    assert slow_links(flows(pairs, rates, hosts), 3) == ()
    rates[0][1] = LINE
    steps = flows(pairs, rates, hosts)
    assert slow_links(steps, 3) == ()
    assert host_rates(steps, 3) == HostRates((LINE, 0.0, 0.0), (0.0, LINE, 0.0))


def test_flows_in_one_step_are_added_and_those_in_different_steps_are_not() -> None:
    hosts = (0, 1, 2, 3)
    for line in ("ring", "direct", "halving-doubling"):
        rates = host_rates(flows(rank_pairs(plan(line, "all-reduce", 4), hosts), shared(line, hosts, {}, {}), hosts), 4)
        assert all(abs(rate - LINE) < 1 for rate in itertools.chain(*rates))
