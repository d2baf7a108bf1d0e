"""The measured network between hosts: what is made of measurements, and what an all-reduce takes on it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offbeat.cli import main
from offbeat.errors import RequestError
from offbeat.predict.calibration import as_json, from_json, machine_of
from offbeat.predict.network_calibration import (
    NetworkCalibration,
    ProcessorSample,
    RoundTrip,
    burst_of,
    placement_of,
    processor_costs,
    rates_of,
    sample_of,
)
from offbeat.schedules import build, price
from predict.made_up import MADE_UP

NETWORK = NetworkCalibration(
    sends=(100e6,) * 4,
    receives=(100e6,) * 4,
    latency_s=20e-6,
    burst_bytes=0.0,
    streams=1,
    cores=2,
    shared=True,
    call_s=100e-6,
    message_s=20e-6,
    wake_s=20e-6,
    s_per_byte=0.5e-9,
    mark_s=5e-6,
    read_s_per_byte=0.2e-9,
    window_bytes=16e6,
    buffer_bytes=4e6,
    round_trips=(RoundTrip(64, 100e-6), RoundTrip(1_000_000, 10.1e-3)),
)
CALIBRATED = replace(MADE_UP, network=NETWORK)
FREE = replace(NETWORK, call_s=0.0, message_s=0.0, wake_s=0.0, s_per_byte=0.0)


def test_a_calibration_with_a_network_is_read_again_and_an_older_one_without() -> None:
    assert from_json(json.loads(json.dumps(as_json(CALIBRATED)))).network == NETWORK
    assert "network" not in as_json(MADE_UP)
    assert from_json(as_json(MADE_UP)).network is None


@pytest.mark.parametrize(
    "change", [{"sends": [1.0]}, {"sends": [0, 1]}, {"latency_s": -1}, {"cores": 0}, {"streams": "x"}]
)
def test_a_damaged_network_is_refused_in_one_line(change: dict[str, object]) -> None:
    data = json.loads(json.dumps(as_json(CALIBRATED)))
    data["network"] |= change
    with pytest.raises(RequestError):
        from_json(data)


def test_a_host_is_as_fast_as_its_fastest_pair_and_equal_hosts_are_equal() -> None:
    pairs = {
        (one, other): 10.0 if 2 in (one, other) else 100.0 + one
        for one in range(4)
        for other in range(4)
        if one != other
    }
    sends, receives = rates_of(pairs, 4)
    assert sends[2] == receives[2] == 10.0
    assert sends[0] == sends[1] == sends[3] == receives[0] == pytest.approx(101.0, rel=0.01)


def test_a_burst_is_what_did_not_take_its_time() -> None:
    trips = [RoundTrip(64, 1e-4), *(RoundTrip(size, 1e-4 + (size - 60_000) / 1e8) for size in (131_072, 262_144))]
    assert burst_of(trips, 1e8) == pytest.approx(60_000, rel=1e-3)
    assert burst_of([RoundTrip(64, 1e-4), RoundTrip(131_072, 2e-3)], 1e8) == 0.0


def test_costs_that_were_planted_are_found() -> None:
    samples = []
    for line in ("ring", "ring:parts=4", "double-tree"):
        for size in (1024, 8192, 32768):
            for rank in range(4):
                one = sample_of(line, 4, rank, size, 0.0)
                seconds = 1e-4 + 2e-5 * one.messages + 3e-5 * one.waits + 1e-9 * one.size_bytes
                samples.append(ProcessorSample(one.messages, one.size_bytes, one.waits, seconds))
    assert processor_costs(samples) == pytest.approx((1e-4, 2e-5, 3e-5, 1e-9))


def test_a_rank_of_a_ring_sends_and_receives_in_every_step() -> None:
    assert sample_of("ring", 4, 1, 4096, 1.0) == ProcessorSample(6.0, 6 * 1024.0, 6, 1.0)


def test_without_work_an_all_reduce_takes_the_price_of_its_links() -> None:
    placement = placement_of(4, 4)
    wanted_s = price(build("ring", ranks=4), FREE.topology(placement), 4_000_000).seconds
    assert FREE.run("ring", placement, 4_000_000).seconds == pytest.approx(wanted_s)
    assert NETWORK.run("ring", placement, 4_000_000).seconds > wanted_s


def test_a_slow_host_slows_down_a_ring_and_a_fold_less() -> None:
    slow = replace(FREE, sends=(100e6, 100e6, 10e6, 100e6), receives=(100e6, 100e6, 10e6, 100e6))
    placement = placement_of(4, 4)
    ring, fold = (slow.run(line, placement, 4_000_000).seconds for line in ("ring", "fold:2,parts=16"))
    assert ring > 8 * FREE.run("ring", placement, 4_000_000).seconds
    assert fold < 0.9 * ring


def test_ranks_of_one_host_use_its_port_together() -> None:
    two_each, alone = placement_of(4, 2), placement_of(4, 4)
    direct = [FREE.run("direct", placement, 4_000_000).seconds for placement in (two_each, alone)]
    assert direct[0] > 1.2 * direct[1]


def test_learners_on_several_hosts_reduce_over_the_network() -> None:
    one_host, four_hosts = (machine_of(CALIBRATED, "ring", 4, hosts=hosts) for hosts in (1, 4))
    wanted_s = NETWORK.run("ring", placement_of(4, 4), CALIBRATED.size_bytes).seconds
    assert four_hosts.reduce_s == pytest.approx(machine_of(CALIBRATED, "ring", 1).reduce_s + wanted_s, rel=0.05)
    assert four_hosts.cluster.cores is not None and one_host.cluster.cores is not None
    assert four_hosts.cluster.cores.count == one_host.cluster.cores.count  # a lab has no more of them
    apart = replace(CALIBRATED, network=replace(NETWORK, shared=False))
    own = machine_of(apart, "ring", 4, hosts=4).cluster.cores
    assert own is not None and own.count == 4 * one_host.cluster.cores.count


def test_simulate_compare_and_schedule_take_the_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def asked(*words: str) -> dict[str, Any]:
        assert main([*words, "--json"]) == 0
        told: dict[str, Any] = json.loads(capsys.readouterr().out)
        return told

    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(as_json(CALIBRATED)), encoding="utf-8")
    measured = ("--calibration", str(path))
    here, there = (asked("simulate", "ring", "--learners", "4", "--hosts", hosts, *measured) for hosts in ("1", "4"))
    assert there["seconds_per_update"] > here["seconds_per_update"]
    assert asked("compare", "ring", "tree", "--learners", "4", "--hosts", "4", *measured)
    priced = asked("schedule", "tree", "--ranks", "4", "--hosts", "4", *measured)
    assert priced["simulated_s"] > priced["seconds"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("simulate", "ring", "--hosts", "2"), "--hosts needs --calibration"),
        (("schedule", "ring", "--hosts", "2"), "--hosts needs --calibration"),
        (("simulate", "ring", "--learners", "3", "--hosts", "2", "--calibration", "FILE"), "do not fill 2 hosts"),
        (("simulate", "average-once", "--learners", "4", "--hosts", "2", "--calibration", "FILE"), "has no server"),
        (("simulate", "async", "--place", "spread", "--calibration", "FILE"), "give --hosts H too"),
        (("bench", "predictions", "--lab", "4x1"), "needs --calibration"),
        (("bench", "predictions", "--lab", "2x1", "--calibration", "FILE"), "the network of 4 hosts"),
        (("bench", "predictions", "--sizes", "4MiB", "--calibration", "FILE"), "needs --lab"),
        (("bench", "predictions", "--lab", "4x1", "--calibration", "FILE", "--out", "x.json"), "use --json"),
        (("calibrate", "--lab", "1x2"), "2 or more hosts"),
    ],
)
def test_requests_that_do_not_fit_are_refused_in_one_line(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(as_json(CALIBRATED)), encoding="utf-8")
    assert main([str(path) if word == "FILE" else word for word in words]) == 2
    told = capsys.readouterr().err.strip()
    assert said in told
    assert len(told.splitlines()) == 1


def test_a_parameter_server_on_hosts_takes_the_measured_links_and_a_slow_one_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """4 MB over 100 MB/s: 40 ms each way and learner; three learners share the link of the servers' host."""
    found = machine_of(replace(MADE_UP, network=FREE), "full-sync", 4, hosts=4).cluster
    assert found.wires is not None and found.wires.hosts is not None
    assert (found.wires.hosts.learners, found.wires.hosts.servers) == ((0, 1, 2, 3), (0,))
    slow = replace(FREE, sends=(100e6, 100e6, 100e6, 10e6), receives=(100e6, 100e6, 100e6, 10e6))
    times = {}
    for name, network in (("alike", FREE), ("slow", slow)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(as_json(replace(MADE_UP, network=network))))
        for place in ("first", "spread"):
            words = ["--calibration", str(path), "--learners", "4", "--hosts", "4", "--place", place, "--json"]
            assert main(["simulate", "full-sync", *words]) == 0
            times[name, place] = json.loads(capsys.readouterr().out)["seconds_per_update"]
    assert times["alike", "first"] == pytest.approx(0.24 + 0.02, abs=0.02)
    assert times["alike", "spread"] == pytest.approx(0.06 + 0.02, abs=0.02)
    assert times["slow", "first"] == pytest.approx(0.4 + 0.4 + 0.02, abs=0.05)
    assert times["slow", "spread"] == pytest.approx(0.3 + 0.3 + 0.02, abs=0.05)
    assert main(["compare", "full-sync", *words]) == 0
    assert "limited by the links between hosts" in capsys.readouterr().out
