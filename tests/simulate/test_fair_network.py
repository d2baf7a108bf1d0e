"""Streams that share links: who gets how much, bursts, windows, traffic beside."""

import math

import pytest

from offbeat.simulate.fair_network import Background, FairNetwork
from offbeat.topology import Edge, Link, Topology, build

UNIFORM = build("uniform:bandwidth=100B/s,latency=1s", ranks=3)


def ends(network: FairNetwork) -> list[tuple[float, int, int]]:
    """When each message has passed, its source and its target."""
    found = []
    while (now := network.next_change_s()) < math.inf:
        found += [(now, one.source, one.target) for one in network.advance(now)]
    return found


def test_a_message_alone_has_the_whole_link_and_its_latency_comes_after() -> None:
    network = FairNetwork(UNIFORM)
    network.send(0.0, 0, 1, 200)
    now = network.next_change_s()
    (arrival,) = network.advance(now)
    assert (now, arrival.latency_s) == (2.0, 1.0)
    assert not network.is_shared


def test_two_messages_share_a_port_and_the_one_that_is_left_has_all_of_it() -> None:
    network = FairNetwork(UNIFORM)
    network.send(0.0, 0, 2, 100)
    network.send(0.0, 1, 2, 300)
    assert ends(network) == [(2.0, 0, 2), (4.0, 1, 2)]
    assert network.is_shared


def test_what_a_slow_stream_leaves_goes_to_the_others() -> None:
    links: dict[Edge, Link] = {
        (0, "port"): Link(0.0, 100.0),
        ("port", 2): Link(0.0, 20.0),
        (1, "port"): Link(0.0, 10.0),
    }
    network = FairNetwork(Topology(name="t", ranks=3, links={**links, ("port", 1): Link(0.0, 100.0)}))
    network.send(0.0, 0, 2, 40)
    network.send(0.0, 0, 1, 160)
    assert ends(network) == [(2.0, 0, 2), (2.0, 0, 1)]  # 20 through the slow link, and 80 are left


def test_the_slowest_link_of_a_route_decides() -> None:
    links: dict[Edge, Link] = {(0, "port"): Link(0.0, 100.0), ("port", 1): Link(0.0, 20.0)}
    network = FairNetwork(Topology(name="t", ranks=2, links=links))
    network.send(0.0, 0, 1, 40)
    assert ends(network) == [(2.0, 0, 1)]


def test_messages_of_one_stream_come_in_order_and_do_not_share() -> None:
    network = FairNetwork(UNIFORM)
    network.send(0.0, 0, 1, 100)
    network.send(0.0, 0, 1, 100)
    assert ends(network) == [(1.0, 0, 1), (2.0, 0, 1)]
    assert not network.is_shared


def test_traffic_beside_takes_its_share_but_no_more_than_it_wants() -> None:
    greedy = FairNetwork(UNIFORM, background=[Background(1, 2)])
    greedy.send(0.0, 0, 2, 100)
    assert ends(greedy) == [(2.0, 0, 2)]
    modest = FairNetwork(UNIFORM, background=[Background(1, 2, 20.0)])
    modest.send(0.0, 0, 2, 160)
    assert ends(modest) == [(2.0, 0, 2)]


def test_a_burst_passes_at_once_and_comes_back_after_a_pause() -> None:
    links: dict[Edge, Link] = {(0, 1): Link(0.0, 100.0, burst_bytes=50.0)}
    network = FairNetwork(Topology(name="bucket", ranks=2, links=links))
    network.send(0.0, 0, 1, 150)
    assert ends(network)[0][0] == pytest.approx(1.0)
    network.send(1.25, 0, 1, 25)  # a quarter of a second has filled half of the bucket
    assert ends(network)[0][0] == pytest.approx(1.25)
    network.send(1.25, 0, 1, 100)
    assert ends(network)[0][0] == pytest.approx(2.25)


def test_what_nobody_asks_for_stops_at_the_window() -> None:
    network = FairNetwork(UNIFORM, window_bytes=100)
    network.send(0.0, 0, 1, 300)
    network.advance(network.next_change_s())
    assert network.now_s == 1.0
    assert network.next_change_s() == math.inf
    assert network.unsent_bytes(0, 1, 1) == 200
    network.ask(5.0, 0, 1, 300)
    assert ends(network) == [(7.0, 0, 1)]
