"""The machines of a prediction, as a user describes them: what the simulator and a virtual training get of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offbeat.predict.machines import Machines
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.compute import parse_law
from offbeat.simulate.setup import Network
from predict.made_up import MADE_UP

CLUSTER = Cluster(learners=4, law=parse_law("constant:1"))
PORTS = Network(learner_bytes_per_s=1e6, server_bytes_per_s=2e6, latency_s=0.001)


def machines(network: Network) -> Machines:
    return Machines(cluster=CLUSTER, network=network)


def test_the_size_that_is_sent_is_the_models_own_unless_another_was_given() -> None:
    assert machines(PORTS).for_model(lambda: 5_000).network.size_bytes == 5_000
    given = machines(replace(PORTS, size_bytes=7_000))
    assert given.for_model(lambda: 5_000) is given


def test_without_a_network_nobody_asks_for_the_size() -> None:
    free = machines(Network(size_bytes=0))
    assert free.for_model(lambda: pytest.fail("it is not needed")) is free
    clock = free.clock("ring", CLUSTER, batch=32, ends_of_epochs=False)
    assert clock.topology is None and clock.cluster.wires is None


def test_an_all_reduce_in_a_training_goes_over_the_ports_of_the_servers() -> None:
    clock = machines(replace(PORTS, size_bytes=1_000)).clock("ring", CLUSTER, batch=32, ends_of_epochs=True)
    assert clock.topology is not None and clock.ends_of_epochs
    links = {(link.bytes_per_s, link.latency_s) for link in clock.topology.links.values()}
    assert links == {(1e6, 0.0005)}  # a route is two of them
    assert clock.cluster.wires is not None and clock.cluster.wires.size_bytes == 1_000


def test_a_calibrated_all_reduce_takes_what_was_measured() -> None:
    calibrated = Machines(cluster=CLUSTER, network=Network(), calibration=MADE_UP)
    setup, clock = calibrated.setup("ring"), calibrated.clock("ring", CLUSTER, batch=0, ends_of_epochs=False)
    assert setup.reduce_s is not None and clock.reduce_s is not None
    assert setup.reduce_s(1) == setup.reduce_s(10**9) == clock.reduce_s(1) > 0
    assert calibrated.setup("async").reduce_s is None
    assert calibrated.clock("async", CLUSTER, batch=0, ends_of_epochs=False).reduce_s is None
