"""What a run writes of itself: what it ran on, what it burnt, how far it is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from offbeat.energy import Energy, Meter, Source
from offbeat.errors import OffbeatError
from offbeat.train import accounts, launch
from offbeat.train.accounts import Accounts
from offbeat.train.reading import changed
from offbeat.train.rundir import RunDir, is_held
from train.runs import config_of, small_task, trained

BEGIN = {"kind": "begin", "name": "small", "learners": 2, "epochs": 3, "epoch": 0, "samples": 100}


def progress(learner: int, samples: int, epoch: int = 0) -> dict[str, Any]:
    return {"kind": "progress", "learner": learner, "samples": samples, "epoch": epoch, "loss": 0.5}


class Counted(Meter):
    """Burns a joule with every tick."""

    def __init__(self) -> None:
        super().__init__()
        self.ticks, self.stops = 0, 0

    def start(self) -> None:
        self.ticks = 0

    def tick(self) -> None:
        self.ticks += 1

    def stop(self) -> Energy:
        self.stops += 1
        return Energy(seconds=1.0, sources=(Source("package-0", "rapl", float(self.ticks)),))


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


class Kept:
    """Accounts in a folder, and what was handed on."""

    def __init__(self, path: Path, leg: int = 1) -> None:
        self.run, self.clock, self.worked, self.meter = RunDir(path), Clock(), Clock(), Counted()
        self.heard: list[Mapping[str, Any]] = []
        self.accounts = Accounts(
            config_of(), self.run, leg, self.heard.append, meter=self.meter, clock=self.clock, worked=self.worked
        )

    def hear(self, *records: Mapping[str, Any], after_s: float = 0.0) -> dict[str, Any]:
        """Each after some time; and what the file says then."""
        for record in records:
            self.clock.now += after_s
            self.accounts.hear(record)
        return self.live()

    def live(self) -> dict[str, Any]:
        found = self.run.read_live()
        assert found is not None
        return found

    def notes(self) -> list[str]:
        return [record["text"] for record in self.heard if record["kind"] == "note"]


def test_a_snapshot_has_the_latest_of_what_was_heard(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    with kept.accounts:
        assert (kept.live()["begin"], kept.live()["pid"], kept.live()["over"]) == (None, os.getpid(), False)
        live = kept.hear(BEGIN, progress(0, 10), progress(1, 12), progress(0, 20), after_s=1.0)
        assert live["begin"] == BEGIN
        assert {learner: one["samples"] for learner, one in live["progress"].items()} == {"0": 20, "1": 12}
        assert {learner: one["samples"] for learner, one in live["first"].items()} == {"0": 10, "1": 12}
        assert (live["before"], live["update"]) == ({}, None)
        evaluated = {"kind": "evaluated", "epoch": 1, "update": 7}
        live = kept.hear(progress(0, 60), evaluated, progress(0, 70, epoch=1), after_s=1.0)
        assert {learner: one["samples"] for learner, one in live["before"].items()} == {"0": 60, "1": 12}
        assert (live["progress"]["0"]["samples"], live["update"]) == (70, 7)
        live = kept.hear({"kind": "saved", "update": 7}, {"kind": "end", "accuracy": 0.5}, after_s=1.0)
        assert (live["saved"]["update"], live["end"]["accuracy"], live["over"]) == (7, 0.5, False)
    live = kept.live()
    assert (live["over"], live["failed"], live["energy"]["joules"]) == (True, None, kept.meter.ticks - 1)
    assert kept.heard[0] == BEGIN and kept.heard[-1]["kind"] == "energy"


def test_the_last_notes_are_kept_and_all_are_counted(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    with kept.accounts:
        live = kept.hear(*({"kind": "note", "text": str(number)} for number in range(25)), after_s=1.0)
    assert [note["text"] for note in live["notes"]] == [str(number) for number in range(5, 25)]
    assert live["noted"] == 25


def test_it_is_written_at_most_twice_a_second(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    with kept.accounts:
        kept.hear(BEGIN, after_s=1.0)
        assert kept.hear(progress(0, 10), after_s=0.4)["progress"] == {}
        assert kept.hear({"kind": "turn"}, after_s=0.2)["progress"] != {}  # time goes on, and that is enough
        kept.hear(progress(0, 20))
        assert kept.live()["progress"]["0"]["samples"] == 10
    assert kept.live()["progress"]["0"]["samples"] == 20  # the last words are always written


@pytest.mark.parametrize("works", [True, False])
def test_what_took_long_is_written_less_often(works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(tmp_path)
    write = RunDir.write_live
    times = []

    def slow(run: RunDir, text: str) -> None:
        times.append(kept.clock.now)
        kept.clock.now += 0.02
        kept.worked.now += 0.005 if works else 0.0
        write(run, text)

    monkeypatch.setattr(RunDir, "write_live", slow)
    with kept.accounts:
        for _ in range(300):
            kept.hear({"kind": "turn"}, after_s=0.1)
    gaps = [after - before for before, after in pairwise(times[:-1])]
    assert len(gaps) >= 2 and min(gaps) >= (0.005 / accounts.MOST_SHARE if works else 0.02 / accounts.MOST_WAIT)


def test_a_folder_that_cannot_be_written_is_told_once_a_file_and_stops_nothing(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "gone")
    with kept.accounts:
        for number in range(5):
            kept.clock.now += 1.0
            kept.accounts.hear(progress(0, number))
    said = kept.notes()
    assert [text.partition(": ")[2] for text in said] == ["No such file or directory"] * 3
    assert [Path(text.split(":")[0]).name for text in said] == ["machine.json", "live.json", "energy.json"]
    assert len([record for record in kept.heard if record["kind"] == "progress"]) == 5


def test_how_a_run_failed_is_kept(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    with pytest.raises(OffbeatError), kept.accounts:
        raise OffbeatError("learner 1 died")
    assert (kept.live()["failed"], kept.live()["over"], kept.live()["end"]) == ("learner 1 died", True, None)
    kept = Kept(tmp_path)
    with pytest.raises(KeyboardInterrupt), kept.accounts:
        raise KeyboardInterrupt
    assert kept.live()["failed"] == "it was ended at once"


def test_energy_is_measured_once_and_each_stretch_has_its_own_file(tmp_path: Path) -> None:
    for leg, name in ((1, "energy.json"), (2, "energy.2.json"), (3, "energy.3.json")):
        kept = Kept(tmp_path, leg)
        with kept.accounts as book:
            kept.hear({"kind": "note", "text": "nothing is measured before learners are forked"})
            book.begin()
            kept.hear(*[{"kind": "turn"}] * leg)
            assert book.measure() is book.measure()
        assert kept.meter.stops == 1
        assert json.loads((tmp_path / name).read_text(encoding="utf-8"))["joules"] == leg


def test_a_run_and_its_resume_leave_their_accounts(tmp_path: Path) -> None:
    first = trained(tmp_path, train={"epochs": 1})
    run = first.run
    machine = json.loads(run.machine.read_text(encoding="utf-8"))
    assert {"cores", "load", "processor", "python", "torch"} <= machine.keys()
    assert (machine["device"], machine["threads"]) == ("cpu", 1)
    live = run.read_live()
    assert live is not None and live["over"] and live["end"]["accuracy"] == first.end["accuracy"]
    energy = json.loads(run.energy(1).read_text(encoding="utf-8"))
    assert energy["joules"] == first.end["joules"] and energy["seconds"] > 0
    config = changed(run.read_config(), {"train": {"epochs": 2}})
    with pytest.raises(OffbeatError, match="gone through its 1 epochs"):
        launch.prepare(run.read_config(), resume=run.path, task=small_task())
    assert run.live.exists()  # nothing was begun
    start = launch.prepare(config, resume=run.path, task=small_task())
    assert not run.live.exists() and is_held(run.path)
    held = []
    launch.launch(start, lambda record: held.append(is_held(run.path)), lambda who, line: None)
    assert all(held) and not is_held(run.path)
    assert run.energy(2).exists() and not run.energy(3).exists()
    live = run.read_live()
    assert live is not None and live["begin"]["resumed"] and live["end"]["epochs"] == 2
