"""What a run writes of itself: what it ran on, what it burnt, how far it is."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from offbeat.energy import Energy, Meter, Source
from offbeat.errors import OffbeatError
from offbeat.runs import run_folder
from offbeat.runs.run_folder import RunDir, is_locked
from offbeat.train import launch, telemetry
from offbeat.train.config_files import changed, read_config
from offbeat.train.telemetry import Telemetry
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
    """Telemetry in a folder, and what was handed on."""

    def __init__(self, path: Path, segment: int = 1) -> None:
        self.run, self.clock, self.worked, self.meter = RunDir(path), Clock(), Clock(), Counted()
        self.heard: list[Mapping[str, Any]] = []
        self.writer = Telemetry(
            config_of(), self.run, segment, self.heard.append, meter=self.meter, clock=self.clock, worked=self.worked
        )

    def hear(self, *records: Mapping[str, Any], after_s: float = 0.0) -> dict[str, Any]:
        """Each after some time; and what the file says then."""
        for record in records:
            self.clock.now += after_s
            self.writer.hear(record)
        return self.live()

    def live(self) -> dict[str, Any]:
        found = self.run.read_live()
        assert found is not None
        return found

    def notes(self) -> list[str]:
        return [record["text"] for record in self.heard if record["kind"] == "note"]


def test_a_snapshot_has_the_latest_of_what_was_heard(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    with kept.writer:
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
    with kept.writer:
        live = kept.hear(*({"kind": "note", "text": str(number)} for number in range(25)), after_s=1.0)
    assert [note["text"] for note in live["notes"]] == [str(number) for number in range(5, 25)]
    assert live["noted"] == 25


def test_it_is_written_at_most_twice_a_second(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    with kept.writer:
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
    with kept.writer:
        for _ in range(300):
            kept.hear({"kind": "turn"}, after_s=0.1)
    gaps = [after - before for before, after in pairwise(times[1:-1])]  # of the first nothing was known
    assert len(gaps) >= 2 and min(gaps) >= (0.005 / telemetry.MOST_SHARE if works else 0.02 / telemetry.MOST_WAIT)


def test_a_snapshot_says_when_the_next_is_due_and_that_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(tmp_path)
    write = RunDir.write_live
    told: list[tuple[float, float]] = []  # when it was there, and after how long another will be
    slow_s = iter([0.0, 0.02, 0.0, 0.5, 0.0, *[0.01] * 1000])

    def wait(run: RunDir, text: str) -> None:
        kept.clock.now += next(slow_s)
        write(run, text)
        told.append((kept.clock.now, json.loads(text)["next_s"]))

    monkeypatch.setattr(RunDir, "write_live", wait)
    with kept.writer:
        while len(told) < 12:
            kept.hear({"kind": "turn"}, after_s=0.1)
    assert {round(next_s, 3) for _, next_s in told} == {0.5, 0.02 / telemetry.MOST_WAIT, 100.0, 2.0}
    for (at_s, next_s), (later_s, _) in pairwise(told[:-1]):
        assert next_s <= later_s - at_s <= next_s + 0.1 + 0.5 + 1e-9


class Full:
    """A disk with room for so many snapshots; one more for each file that is removed, if that is enough."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, room: int, frees: bool) -> None:
        self.room, self.frees = room, frees
        self._write, self._unlink = Path.write_bytes, Path.unlink
        monkeypatch.setattr(Path, "write_bytes", lambda path, content: self.write(path, content))
        monkeypatch.setattr(Path, "unlink", lambda path, **named: self.unlink(path, **named))

    def write(self, path: Path, content: bytes) -> int:
        if path.name == ".live.json.unfinished":
            if not self.room:
                self._write(path, b"")
                raise OSError(errno.ENOSPC, "No space left on device")
            self.room -= 1
        return self._write(path, content)

    def unlink(self, path: Path, **named: Any) -> None:
        self.room += self.frees and path.name == "live.json"
        self._unlink(path, **named)


def files_in(path: Path) -> set[str]:
    return {one.name for one in path.iterdir() if "live" in one.name}


@pytest.mark.parametrize("frees", [True, False])
def test_on_a_full_disk_nothing_stays_that_says_that_a_run_goes_on(
    frees: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path)
    Full(monkeypatch, room=1, frees=frees)
    with kept.writer:
        kept.hear(BEGIN, progress(0, 10), after_s=1.0)
        assert files_in(tmp_path) == {"live.json"}  # and not what was begun
        kept.hear({"kind": "end", "accuracy": 0.5}, after_s=1.0)
    assert files_in(tmp_path) == ({"live.json"} if frees else set())
    if frees:
        assert (kept.live()["over"], kept.live()["end"]["accuracy"]) == (True, 0.5)
    assert kept.notes() == [f"cannot write {tmp_path / 'live.json'}: No space left on device"]


def test_on_a_full_disk_the_last_snapshot_of_a_run_without_an_end_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(tmp_path)
    Full(monkeypatch, room=2, frees=False)
    with pytest.raises(OffbeatError), kept.writer:
        kept.hear(BEGIN, progress(0, 10), after_s=1.0)
        raise OffbeatError("learner 1 died")
    assert (kept.live()["begin"], kept.live()["over"]) == (BEGIN, False)  # it is not taken for one that has ended
    assert files_in(tmp_path) == {"live.json"}


ANYTHING: tuple[str, ...] = (
    "[" * 50_000,
    "[" * 900 + "]" * 900,
    '{"a":' * 50_000,
    "9" * 5000,
    "NaN",
    '"x"',
    "\x00",
    "",
)


@pytest.mark.parametrize("text", ANYTHING, ids=lambda text: text[:5])
def test_a_file_that_is_no_snapshot_is_none(text: str, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.live.write_text(text, encoding="utf-8")
    assert run.read_live() is None
    run.live.unlink()
    os.mkfifo(run.live)  # who reads it would wait for ever
    assert run.read_live() is None
    run.metrics.write_text(f'{{"epoch": 1}}\n{text}\n{{"epoch": 2}}\n', encoding="utf-8")
    assert run.read_metrics() == [{"epoch": 1}, {"epoch": 2}]
    run.log(1).write_text(text, encoding="utf-8")
    assert not run.is_simulated()


def test_of_a_huge_file_no_more_is_read_than_a_run_could_have_written(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    told = '{"over": true}'
    run.live.write_text(told + " " * (run_folder.MOST_LIVE_BYTES - len(told)), encoding="utf-8")
    assert run.read_live() == {"over": True}
    with run.live.open("a", encoding="utf-8") as file:
        file.write(" ")
    assert run.read_live() is None


def test_a_field_of_a_wrong_type_is_left_out(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    with kept.writer:
        whole = kept.hear(BEGIN, progress(0, 10), after_s=1.0)
    wrong: list[Any] = [True, 1, -1, 0.5, 10**400, 1e300, "x", [1], {"a": 1}]
    fits: dict[str, list[Any]] = {name: [] for name in whole}
    for name in whole:
        for value in wrong:
            kept.run.write_live(json.dumps({**whole, name: value}))
            found = kept.live()
            assert {**whole, name: None} == {name: None, **found} | {name: None}
            fits[name] += [value] if name in found else []
    assert fits["pid"] == fits["noted"] == [1, -1] and fits["at_s"] == fits["next_s"] == [1, -1, 0.5]
    assert fits["begin"] == fits["progress"] == fits["end"] == [{"a": 1}]
    assert (fits["notes"], fits["failed"], fits["over"]) == ([[1]], ["x"], [True])


def test_a_folder_that_cannot_be_written_is_told_once_a_file_and_stops_nothing(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "gone")
    with kept.writer:
        for number in range(5):
            kept.clock.now += 1.0
            kept.writer.hear(progress(0, number))
    said = kept.notes()
    assert [text.partition(": ")[2] for text in said] == ["No such file or directory"] * 3
    assert [Path(text.split(":")[0]).name for text in said] == ["machine.json", "live.json", "energy.json"]
    assert len([record for record in kept.heard if record["kind"] == "progress"]) == 5


def test_how_a_run_failed_is_kept(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    with pytest.raises(OffbeatError), kept.writer:
        raise OffbeatError("learner 1 died")
    assert (kept.live()["failed"], kept.live()["over"], kept.live()["end"]) == ("learner 1 died", True, None)
    kept = Kept(tmp_path)
    with pytest.raises(KeyboardInterrupt), kept.writer:
        raise KeyboardInterrupt
    assert kept.live()["failed"] == "ended immediately"


def test_energy_is_measured_once_and_each_stretch_has_its_own_file(tmp_path: Path) -> None:
    for segment, name in ((1, "energy.json"), (2, "energy.2.json"), (3, "energy.3.json")):
        kept = Kept(tmp_path, segment)
        with kept.writer as writer:
            kept.hear({"kind": "note", "text": "nothing is measured before learners are forked"})
            writer.begin()
            kept.hear(*[{"kind": "turn"}] * segment)
            assert writer.measure() is writer.measure()
        assert kept.meter.stops == 1
        assert json.loads((tmp_path / name).read_text(encoding="utf-8"))["joules"] == segment


def test_a_run_and_its_resume_leave_their_telemetry(tmp_path: Path) -> None:
    first = trained(tmp_path, train={"epochs": 1})
    run = first.run
    machine = json.loads(run.machine.read_text(encoding="utf-8"))
    assert {"cores", "load", "processor", "python", "torch"} <= machine.keys()
    assert (machine["device"], machine["threads"]) == ("cpu", 1)
    live = run.read_live()
    assert live is not None and live["over"] and live["end"]["accuracy"] == first.end["accuracy"]
    energy = json.loads(run.energy(1).read_text(encoding="utf-8"))
    assert energy["joules"] == first.end["joules"] and energy["seconds"] > 0
    config = changed(read_config(run), {"train": {"epochs": 2}})
    with pytest.raises(OffbeatError, match="completed its 1 epochs"):
        launch.prepare(read_config(run), resume=run.path, task=small_task())
    assert run.live.exists()  # nothing was begun
    start = launch.prepare(config, resume=run.path, task=small_task())
    assert not run.live.exists() and is_locked(run.path)
    held = []
    launch.launch(start, lambda record: held.append(is_locked(run.path)), lambda who, line: None)
    assert all(held) and not is_locked(run.path)
    assert run.energy(2).exists() and not run.energy(3).exists()
    live = run.read_live()
    assert live is not None and live["begin"]["resumed"] and live["end"]["epochs"] == 2
