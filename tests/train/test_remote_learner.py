"""A joining host: what a learner does when its place was taken, and what a run tells and is told."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.network.connections import Place
from offbeat.network.port import listen
from offbeat.server.handshake import PlaceTakenError, versions
from offbeat.server.remote.frames import PROTOCOL
from offbeat.server.remote.gateway import Entered, NoPlaceError
from offbeat.train import launch, remote_learner
from offbeat.train.config_files import changed, from_json
from offbeat.train.recipes import RECIPES
from offbeat.train.remote_learner import JoinedRun, check_places, describe, open_places


def joined(places: tuple[int, ...] = (1, 2)) -> JoinedRun:
    config = changed(RECIPES["digits-mlp"].config, {"sync": "async", "learners": 4})
    entered = Entered(protocol=PROTOCOL, version=versions(), places=places, learners=4, line="async")
    return JoinedRun(
        place=Place("127.0.0.1", 1),
        host=b"h" * 16,
        entered=entered,
        config=config,
        task=SimpleNamespace(),  # type: ignore[arg-type]  # nobody trains it
        checkpoint=None,
        segment=1,
    )


def test_a_learner_whose_place_was_taken_asks_until_it_has_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[int] = []
    asked: list[int] = []

    class FakeTrainer:
        def __init__(self, *_: object, number: int, **__: object) -> None:
            self.number, self.seen = number, 32

        def fit(self) -> None:
            trained.append(self.number)
            if len(trained) == 1:
                raise PlaceTakenError("the place of learner 1 was given to another host")

    def enter(place: Place, key: object, host: bytes, learners: int, timeout_s: float) -> tuple[Any, Any]:
        asked.append(learners)
        if len(asked) < 3:
            raise NoPlaceError("all 2 places are taken")
        return SimpleNamespace(places=(2,), run=joined().entered.run), SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(remote_learner, "RemoteTrainer", FakeTrainer)
    monkeypatch.setattr(remote_learner, "enter", enter)
    monkeypatch.setattr(remote_learner, "AGAIN_S", 0.0)
    for name in ("OFFBEAT_TOKEN", "OFFBEAT_LEARNER"):
        monkeypatch.setenv(name, "before")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        assert remote_learner._learn(joined(), 1, tmp_path, lambda update: None) == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert trained == [1, 2] and asked == [1, 1, 1]
    assert os.environ["OFFBEAT_LEARNER"] == "2" and len(bytes.fromhex(os.environ["OFFBEAT_TOKEN"])) == 16
    assert capsys.readouterr().out.splitlines() == [
        "its place was taken meanwhile; waits for another one",
        "joins again as learner 2",
        "the run has ended; computed 64 samples",
    ]


def test_a_host_is_told_the_whole_configuration(tmp_path: Path) -> None:
    config = changed(RECIPES["digits-mlp"].config, {"sync": "async", "learners": 3, "device": "cpu"})
    start = launch.prepare(config, run_dir=tmp_path / "run")
    with listen(Place("127.0.0.1", 0), "a test") as listener:
        opened = open_places(start, listener, 2, 30.0)
        assert opened.remote is not None
        told = json.loads(opened.remote.told)
        assert from_json(json.dumps(told["config"]), "what it says") == start.config
        assert (opened.remote.first, opened.join_s, told["checkpoint"]) == (1, 30.0, None)
    assert start.hold is not None
    start.hold.release()


def test_what_was_joined_is_said_in_one_line() -> None:
    assert describe(joined()) == "joined digits-mlp (async) as learner 1, 2 of 4"
    assert check_places(joined(), 3) == "the run had 2 free places instead of 3"
    assert check_places(joined(), 2) == check_places(joined(), None) == ""
