"""The busiest link of a run, by the closed form and by hand."""

from __future__ import annotations

import pytest

from offbeat.server.remote.link_traffic import HERE, LinkLoad, RunTraffic, told_of

M, ROUNDS = 1200, 10


@pytest.mark.parametrize("hosts", [2, 3, 4, 6])
def test_a_learner_on_each_host_loads_the_links_as_the_closed_form_says(hosts: int) -> None:
    names = [HERE, *(f"10.0.0.{number}" for number in range(1, hosts))]
    traffic = RunTraffic(minibatches=dict.fromkeys(names, ROUNDS), push_bytes=M, fetch_bytes=M)
    first, spread = traffic.busiest([HERE]), traffic.busiest(names)
    assert first is not None and spread is not None
    assert first.size_bytes == ROUNDS * (hosts - 1) * M and first.host == HERE
    assert spread.size_bytes == ROUNDS * 2 * (hosts - 1) * M // hosts


def test_a_host_with_most_learners_may_have_the_busiest_link() -> None:
    traffic = RunTraffic(minibatches={HERE: 5, "a": 100, "b": 1}, push_bytes=10, fetch_bytes=30)
    assert traffic.busiest([HERE]) == LinkLoad(host=HERE, takes_in=False, size_bytes=101 * 30)
    assert traffic.busiest([HERE, "a", "b"]) == LinkLoad(host="a", takes_in=True, size_bytes=2000 + 20 + 0 * 30 + 0)
    assert told_of(traffic, ["a", "b"]) == {
        "host": "a",
        "takes_in": True,
        "bytes": 2020,
        "other": "first",
        "other_bytes": 3030,
    }


def test_a_mirror_counts_and_a_run_on_one_host_has_no_link() -> None:
    assert told_of(RunTraffic(minibatches={HERE: 9}, push_bytes=1, fetch_bytes=1), []) is None
    found = RunTraffic(minibatches={HERE: 9}, push_bytes=1, fetch_bytes=1, mirror_bytes=7).busiest([HERE])
    assert found == LinkLoad(host=HERE, takes_in=False, size_bytes=7)
