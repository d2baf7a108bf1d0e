"""Clocks of several hosts on one, and bytes by link; measured for real in test_several_hosts.py."""

from __future__ import annotations

import pytest

from offbeat.train.host_facts import HERE, ClockOffset, HostClocks, network_facts, offset_at, served_facts
from offbeat.train.learner_snapshot import HostName, Traffic


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


def test_learners_of_a_parameter_server_are_grouped_by_host_with_the_bytes_of_each_link() -> None:
    learners = {0: HostName("alice"), 1: HostName("bob", "7f"), 2: HostName("bob", "7f"), 3: HostName("bob", "a1")}
    moved = {learner: Traffic(60 + learner, 40) for learner in learners}
    found = served_facts(learners, moved, [""])
    assert found["learner_hosts"] == ["alice", "bob-0", "bob-0", "bob-1"], "hosts of one name are told apart"
    links = {(link["source"], link["target"]): link["bytes"] for link in found["links"]}
    assert links == {
        ("bob-0", "alice"): 61 + 62,
        ("alice", "bob-0"): 80,
        ("bob-1", "alice"): 63,
        ("alice", "bob-1"): 40,
    }
    assert sum(link["share"] for link in found["links"]) == pytest.approx(1)
    assert [(host["name"], host["learners"], host["sent_bytes"]) for host in found["hosts"]] == [
        ("alice", 1, 120),
        ("bob-0", 2, 123),
        ("bob-1", 1, 63),
    ]
    assert served_facts({0: HostName("alice"), 1: HostName("alice")}, moved, [""]) == {}, "one host has no links"


def test_with_a_server_on_each_host_a_learner_sends_a_part_to_each_of_the_others() -> None:
    learners = {0: HostName("alice"), 1: HostName("bob", "7f")}
    found = served_facts(learners, {0: Traffic(100, 50), 1: Traffic(100, 50)}, ["", "7f", "c3"])
    links = {(link["source"], link["target"]): link["bytes"] for link in found["links"]}
    assert links["alice", "bob"] == 33 + 16 and links["bob", "alice"] == 33 + 16
    assert links["alice", "servers"] == 33 and links["servers", "bob"] == 16
