"""Shards spread over hosts: which host has which, and who may write to a slot."""

from __future__ import annotations

import threading

import pytest

from offbeat.errors import RequestError
from offbeat.server.coordinator.coordinator import Coordinator
from offbeat.server.remote.server_places import FIRST_HOST, LOST_S, ServerPlace, ServerPlaces
from offbeat.server.remote.shard_data import SlotGuard
from offbeat.server.run_setting import RunSetting
from offbeat.server.wire import Go, Hello, Seeded


def place(name: bytes) -> ServerPlace:
    return ServerPlace(name, "10.0.0.9", 1)


def test_a_host_keeps_its_shard_and_one_too_many_has_none() -> None:
    places = ServerPlaces(3, place(FIRST_HOST), {})
    assert (places.offer(place(b"a")), places.missing) == (1, 1)
    assert (places.offer(place(b"b")), places.missing) == (2, 0)
    assert places.offer(place(b"a")) == 1
    assert places.offer(place(b"c")) is None


def test_a_shard_whose_host_stays_away_is_lost_and_one_that_comes_back_is_not() -> None:
    places = ServerPlaces(3, place(FIRST_HOST), {1: place(b"a"), 2: place(b"b")})
    places.left(1, 0.0)
    places.left(2, 1.0)
    assert places.lost(LOST_S) is None
    assert places.offer(place(b"a")) == 1
    assert places.lost(LOST_S + 0.5) is None
    assert places.lost(LOST_S + 1.5) == 2
    assert places.told(2) == "server 2 on 10.0.0.9 is lost" and places.hosts() == {b"a"}


def test_a_shard_that_nobody_comes_for_is_lost_where_the_run_does_not_wait_for_all() -> None:
    places = ServerPlaces(3, place(FIRST_HOST), {1: place(b"a")})
    assert places.lost(1e9) is None
    assert places.lost(5.0, come_by_s=5.0) is None
    assert places.lost(5.1, come_by_s=5.0) == 2
    assert places.told(2) == "no host has come for server 2" and places.hosts() == {b"a"}


def test_the_later_grant_stops_the_earlier_one_and_then_has_the_slot_alone() -> None:
    guard, stopped, log = SlotGuard(), threading.Event(), []

    def old() -> None:
        with guard.writing(4, 1, stopped.set) as may:
            log.append(("old", may))
            begun.set()
            stopped.wait(10)
        log.append(("old ended", True))

    begun = threading.Event()
    thread = threading.Thread(target=old)
    thread.start()
    begun.wait(10)
    with guard.writing(4, 2, lambda: None) as may:
        log.append(("new", may))
    thread.join()
    with guard.writing(4, 1, lambda: None) as may:
        log.append(("late", may))
    assert sorted(log[:3]) == [("new", True), ("old", True), ("old ended", True)] and log[3] == ("late", False)


def test_grants_rise_over_all_learners_only_where_shards_are_spread() -> None:
    for spread in (True, False):
        machine = Coordinator(RunSetting(line="async", learners=2, shards=2, spread=spread))
        for learner in range(2):
            machine.handle(Hello(learner, learner + 1, "model"), 0.0)
        gos = [one for one in machine.handle(Seeded(0, 1), 0.0) if isinstance(one, Go)]
        assert [go.grant for go in gos] == ([1, 2] if spread else [0, 0])


@pytest.mark.parametrize("line", ["async:codec=int8", "async:down=bf16"])
def test_codecs_are_refused(line: str) -> None:
    RunSetting(line=line, learners=2)
    with pytest.raises(RequestError, match="remove codec= and down=, or --place spread"):
        RunSetting(line=line, learners=2, shards=2, spread=True)
