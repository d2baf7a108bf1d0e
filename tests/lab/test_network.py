"""The network of a lab as a value, and its commands as text."""

from __future__ import annotations

import pytest

from offbeat.errors import RequestError
from offbeat.lab.network import (
    Network,
    address_script,
    format_bandwidth,
    payload_rate,
    plug_script,
    queue_bytes,
    shape,
)
from offbeat.spec import parse_rate

RATES = ["64kbit/s", "10Mbit/s", "100Mbit/s", "1Gbit/s", "2Gbit/s", "100Gbit/s"]


def test_each_host_has_a_name_an_address_and_a_bandwidth() -> None:
    network = Network.of(hosts=3, bandwidth="1Gbit/s", slow=["host=2,bandwidth=100Mbit/s"])
    assert network.bandwidths == (125e6, 125e6, 12.5e6)
    assert [network.name(host) for host in range(3)] == ["host0", "host1", "host2"]
    assert len({network.address(host) for host in range(3)}) == 3
    assert Network.of(hosts=2).bandwidths == (None, None)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"hosts": 65}, "a lab has 1 to 64 hosts; got 65"),
        ({"hosts": 0}, "a lab has 1 to 64 hosts; got 0"),
        ({"hosts": 2, "bandwidth": "fast"}, "a bandwidth is a number with a unit"),
        ({"hosts": 2, "slow": ["host=2,bandwidth=1Mbit/s"]}, "there are 2 hosts, numbered from 0"),
        ({"hosts": 2, "slow": ["host=1"]}, "expected a link like host=2,bandwidth=100Mbit/s"),
        ({"hosts": 2, "slow": ["host=-1,bandwidth=1Mbit/s"]}, "expected a whole number"),
        ({"hosts": 2, "slow": ["host=1,bandwidth=1"]}, "must be at least 64 kbit/s"),
    ],
)
def test_a_network_that_cannot_be_is_refused(words: dict[str, object], expected: str) -> None:
    with pytest.raises(RequestError, match=expected):
        Network.of(**words)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("rate", RATES)
def test_a_burst_has_room_for_two_segments_and_is_at_most_128_kib(rate: str) -> None:
    network = Network.of(hosts=2, bandwidth=rate)
    assert 16384 <= 2 * network.segment_bytes <= network.burst_bytes <= 128 * 1024
    assert queue_bytes(parse_rate(rate)) >= network.burst_bytes


def test_the_fastest_link_decides_the_burst() -> None:
    mixed = Network.of(hosts=2, bandwidth="1Gbit/s", slow=["host=1,bandwidth=10Mbit/s"])
    assert mixed.burst_bytes == Network.of(hosts=2, bandwidth="1Gbit/s").burst_bytes == 62500
    assert Network.of(hosts=2, slow=["host=1,bandwidth=10Mbit/s"]).burst_bytes == 128 * 1024


@pytest.mark.parametrize("rate", RATES)
def test_a_bandwidth_is_printed_as_it_is_read(rate: str) -> None:
    assert parse_rate(format_bandwidth(parse_rate(rate)).replace(" ", "")) == parse_rate(rate)


def test_tcp_carries_119_5_megabytes_of_1_gbit_per_second() -> None:
    assert payload_rate(parse_rate("1Gbit/s")) == pytest.approx(119.5e6, rel=1e-3)


def test_a_link_is_shaped_cut_or_left_alone_by_one_command() -> None:
    assert shape("eth0", 125e6, 62500) == (
        "tc qdisc replace dev eth0 root tbf rate 1000000000bit burst 62500 limit 6250000\n"
    )
    assert shape("port1", 0.0, 62500) == "tc qdisc replace dev port1 root blackhole\n"
    assert shape("eth0", None, 62500) == "tc qdisc replace dev eth0 root noqueue\n"


def test_links_have_an_mtu_of_1500_and_cubic_routes() -> None:
    assert plug_script(Network.of(hosts=2), 0, 77).count("mtu 1500") == 2
    assert "congctl cubic" in address_script(Network.of(hosts=2), 1)


def test_placeholders_become_addresses_and_other_braces_stay() -> None:
    network = Network.of(hosts=2)
    words = ["{host0}:{host1}", "--rank={host}", "{x}", "{}", "{hosts}", "{'host0': 1}"]
    filled = [f"{network.address(0)}:{network.address(1)}", "--rank=1", "{x}", "{}", "{hosts}", "{'host0': 1}"]
    assert network.fill(words, 1) == filled
    with pytest.raises(RequestError, match=r"'\{host2\}': there are 2 hosts, numbered from 0"):
        network.fill(["{host2}"], 0)
