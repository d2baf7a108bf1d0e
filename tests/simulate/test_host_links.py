"""Parameter servers whose learners are on other hosts, simulated: closed forms by the links of the hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from offbeat.simulate import server
from offbeat.simulate.cluster import Cluster, Wires
from offbeat.simulate.compute import parse_law
from offbeat.simulate.host_links import FETCHES, PUSHES, HostLinks, HostTransfers
from offbeat.topology import Edge, Link, Topology

SIZE = 100  # bytes of the model


def network_of(rates: Sequence[float]) -> Callable[[Sequence[int]], Topology]:
    """Hosts with these links, alike both ways, at a switch that hinders nobody."""

    def topology(placement: Sequence[int]) -> Topology:
        links: dict[Edge, Link] = {}
        for rank, host in enumerate(placement):
            links[rank, f"host {host}"] = links[f"host {host}", rank] = Link(0.0, 1e15)
        for host in set(placement):
            links[f"host {host}", "switch"] = links["switch", f"host {host}"] = Link(0.0, rates[host])
        return Topology(name="hosts", ranks=len(placement), links=links)

    return topology


def seconds(line: str, *, rates: Sequence[float], learners: Sequence[int], servers: Sequence[int] = (0,)) -> float:
    """Of an update, with minibatches of 1 s."""
    links = HostLinks(learners=tuple(learners), servers=tuple(servers), topology=network_of(rates))
    cluster = Cluster(learners=len(learners), law=parse_law("constant:1"), wires=Wires(size_bytes=SIZE, hosts=links))
    return server.run(line, cluster, updates=200).seconds_per_update


def test_a_learner_beside_the_server_takes_no_link_and_another_takes_its_own() -> None:
    assert seconds("async", rates=(50, 50), learners=(0,)) == pytest.approx(1, rel=0.01)
    assert seconds("async", rates=(50, 50), learners=(1,)) == pytest.approx(1 + 2 + 2, rel=0.01)
    assert seconds("async", rates=(50, 20), learners=(1,)) == pytest.approx(1 + 5 + 5, rel=0.01)


def test_all_pushes_share_the_link_of_the_servers_host_and_a_server_on_each_spreads_them() -> None:
    rates, learners = (50,) * 4, (0, 1, 2, 3)
    first = seconds("full-sync", rates=rates, learners=learners)
    assert first == pytest.approx(1 + 2 * 3 * SIZE / 50, rel=0.01)
    spread = seconds("full-sync", rates=rates, learners=learners, servers=range(4))
    assert spread == pytest.approx(1 + 2 * 0.75 * SIZE / 50, rel=0.01)


def test_learners_of_one_host_share_its_link() -> None:
    together = seconds("full-sync", rates=(1e9, 50), learners=(1, 1, 1))
    assert together == pytest.approx(1 + 2 * 3 * SIZE / 50, rel=0.01)
    apart = seconds("full-sync", rates=(1e9, 50, 50, 50), learners=(1, 2, 3))
    assert apart == pytest.approx(1 + 2 * SIZE / 50, rel=0.01)


def test_a_cancelled_learner_sends_no_more_and_does_not_take_the_link_from_others() -> None:
    """A push of host 2 would take 100 s: under k-sync:2 it is stopped at every update, and the others are as alone."""
    line, rates = "k-sync:2", (1e9, 50, 1)
    assert seconds(line, rates=rates, learners=(1, 1, 2)) == pytest.approx(1 + 4 + 4, rel=0.01)


def test_a_transfer_that_is_called_back_frees_the_link_and_never_ends() -> None:
    links = HostLinks(learners=(1, 1), servers=(0,), topology=network_of((50, 50)))
    transfers = HostTransfers(links)
    transfers.start(0.0, PUSHES, 1, 0, SIZE)
    transfers.start(0.0, PUSHES, 2, 1, SIZE)
    assert transfers.next_end_s(PUSHES) == pytest.approx(4.0)
    assert transfers.remove(2.0, PUSHES, 1) and not transfers.remove(2.0, PUSHES, 1)
    assert transfers.next_end_s(PUSHES) == pytest.approx(3.0)
    assert transfers.finish(3.0, FETCHES) == [] and transfers.finish(3.0, PUSHES) == [2]
    assert transfers.next_end_s(PUSHES) == float("inf") and not transfers.is_full
