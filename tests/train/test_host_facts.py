"""Clocks of several hosts on one, and bytes by link; measured for real in test_several_hosts.py."""

from __future__ import annotations

import pytest

from offbeat.train.host_facts import HERE, ClockOffset, HostClocks, network_facts, offset_at


def test_between_two_measurements_the_offset_changes_evenly() -> None:
    old, new = ClockOffset(100.0, 5.0, 0.1), ClockOffset(200.0, 6.0, 0.1)
    assert [offset_at(at_s, old, new) for at_s in (105.0, 206.0)] == pytest.approx([5.0, 6.0], abs=0.011)
    assert offset_at(156.0, old, new) == pytest.approx(5.5)
    assert offset_at(1e6, old, new) == 6.0 and offset_at(0.0, old, new) == 5.0
    assert offset_at(150.0, new, new) == 6.0


def test_one_host_has_one_clock() -> None:
    clocks = HostClocks((), 3)
    assert clocks.here(3, 12.5) == 12.5 and clocks.as_json() == {}


def test_bytes_are_added_up_by_link_and_those_inside_a_host_are_not_counted() -> None:
    clocks = HostClocks((), 0)
    clocks.latest = {"a": HERE, "b": ClockOffset(1.0, -2.0, 0.001)}
    sent_to = {0: (0, 50, 10, 0), 1: (50, 0, 0, 20), 2: (5, 0, 0, 70), 3: (0, 5, 70, 0)}
    facts = network_facts(("a", "a", "b", "b"), sent_to, None, clocks)
    assert facts["links"] == [
        {"source": "a", "target": "b", "bytes": 30, "share": 0.75},
        {"source": "b", "target": "a", "bytes": 10, "share": 0.25},
    ]
    assert [
        (host["name"], host["learners"], host["sent_bytes"], host["received_bytes"]) for host in facts["hosts"]
    ] == [
        ("a", 2, 30, 10),
        ("b", 2, 10, 30),
    ]
    assert facts["hosts"][1]["clock_offset_s"] == -2.0 and facts["hosts"][1]["sends_per_s"] is None
