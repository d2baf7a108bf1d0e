"""Folders as runs write them, and what is shown of them. Between two looks, where it would sleep, the run goes on."""

from __future__ import annotations

import io
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from offbeat.cli import main
from offbeat.commands import watch
from offbeat.commands.progress import Progress
from offbeat.commands.watch import Clock, Feed, find_run, read_state
from offbeat.errors import RequestError
from offbeat.runs.run_folder import FolderLock, RunDir
from offbeat.train.telemetry import Live

BEGIN: dict[str, Any] = {
    "kind": "begin",
    "name": "digits-cnn",
    "strategy": "k-async:2",
    "learners": 2,
    "servers": 1,
    "epochs": 4,
    "epoch": 0,
    "samples": 1000,
    "parameters": 12345,
    "device": "cpu",
    "precision": "fp32",
    "run_dir": "runs/digits",
    "notes": ["learning rate 0.05 x 2 = 0.1"],
    "resumed": None,
}
END: dict[str, Any] = {"kind": "end", "accuracy": 0.951, "loss": 0.07, "seconds": 9.8, "updates": 40, "stopped": False}
ENERGY = {"kind": "energy", "joules": 1234.0, "sources": [{"name": "package-0", "kind": "rapl", "joules": 1234.0}]}
ENERGY |= {"seconds": 11.0, "not_measured": []}
NOBODY = 2**22 + 1  # more than a kernel counts processes
Offbeat = Callable[..., tuple[int, str, str]]


def progress(learner: int, samples: int, epoch: int) -> dict[str, Any]:
    told = {"loss": 2.0 - samples / 4000, "compute_s": samples / 100, "wait_s": samples / 300, "version": 1}
    return {"kind": "progress", "learner": learner, "samples": samples, "epoch": epoch, **told}


def evaluated(epoch: int) -> dict[str, Any]:
    told = {"loss": 1 / epoch, "accuracy": 0.9 + epoch / 100, "seconds": 5.0 * epoch, "samples_per_s": 400.0}
    return {"kind": "evaluated", "epoch": epoch, "update": 10 * epoch, **told}


def story() -> Iterator[tuple[float, Mapping[str, Any]]]:
    """What a run of four epochs hears, a record each quarter of a second, and when."""
    yield 0.0, BEGIN
    for step in range(1, 81):
        epoch = (step - 1) // 20
        for learner in range(2):
            yield step / 4, progress(learner, 25 * step, epoch)
        if step % 20 == 0:
            yield step / 4 + 0.1, evaluated(epoch + 1)
            yield step / 4 + 0.1, {"kind": "saved", "update": 10 * (epoch + 1), "path": "run/checkpoints"}


class Run:
    """A run in a folder. It is this process, and time passes when it is told to."""

    def __init__(self, path: Path, *, began_s: float | None = None, held: bool = True) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.dir, self.live = RunDir(path), Live()
        self.dir.config.write_text("{}", encoding="utf-8")
        self.began_s = time.time() if began_s is None else began_s
        self.at_s = self.began_s
        self.hold = FolderLock(path, time.sleep) if held else None

    def hear(self, record: Mapping[str, Any], after_s: float = 0.0) -> None:
        self.at_s = self.began_s + after_s
        if record["kind"] == "evaluated":
            self.dir.add_metrics(record)
        self.live.hear(record, self.at_s)

    def write(self, **changes: Any) -> None:
        self.dir.write_live(json.dumps({**json.loads(self.live.as_json(self.at_s)), **changes}))

    def go_on(self, until_s: float) -> Run:
        for at_s, record in story():
            if at_s <= until_s:
                self.hear(record, at_s)
        self.write()
        return self

    def end(self, failed: str | None = None) -> Run:
        if failed is None:
            self.hear(END, 21.0)
        self.live.told |= {"failed": failed, "over": True}
        self.write()
        self.let_go()
        return self

    def let_go(self) -> None:
        if self.hold is not None:
            self.hold.release()


@pytest.fixture
def offbeat(capsys: pytest.CaptureFixture[str]) -> Offbeat:
    def run(*words: object) -> tuple[int, str, str]:
        code = main(["watch", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def on_sleep(monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object]) -> None:
    """The n-th time that a look is over, the n-th step is done."""
    left = list(steps)

    def sleep(seconds: float) -> None:
        left.pop(0)()

    monkeypatch.setattr(time, "sleep", sleep)


# --- how far a run is ---------------------------------------------------------------------------------------------


def seen_by(state: Progress) -> dict[str, Any]:
    names = ("epoch", "done", "done_of_epoch", "samples", "elapsed_s", "reached", "evaluations", "saved", "left_s")
    return {name: getattr(state, name) for name in names} | {"best": state.best, "wait_share": state.wait_share}


@pytest.mark.parametrize("joined_s", [0.0, 2.5, 5.0, 5.2, 12.3, 19.9, 20.2])
def test_who_comes_late_sees_what_the_run_itself_sees(joined_s: float, tmp_path: Path) -> None:
    now = time.time()
    run = Run(tmp_path / "run", began_s=now - joined_s).go_on(joined_s)
    own = Clock()
    shown = Progress(own)
    for at_s, record in story():
        if at_s <= joined_s:
            own.now_s = now - joined_s + at_s
            shown.hear(record)
    clock = Clock()
    watched = Progress(clock)
    feed = Feed(run.dir, clock, watched)
    for record in feed.records(read_state(run.dir)):
        watched.hear(record)
    own.now_s = clock.now_s = now
    for name, value in seen_by(shown).items():
        assert seen_by(watched)[name] == (pytest.approx(value) if isinstance(value, float) else value), name


def test_who_stays_sees_it_too_and_nothing_twice(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    clock, own = Clock(), Clock()
    watched, shown = Progress(clock), Progress(own)
    feed = Feed(run.dir, clock, watched)
    heard: list[Mapping[str, Any]] = []
    for at_s, record in story():
        run.hear(record, at_s)
        own.now_s = run.at_s
        shown.hear(record)
        if round(at_s * 4) % 2 == 0:  # each half second, as it is written
            run.write()
            for one in feed.records(read_state(run.dir)):
                heard.append(one)
                watched.hear(one)
            clock.now_s = own.now_s
            assert watched.done == pytest.approx(shown.done, abs=0.02)
    kinds = [one["kind"] for one in heard]
    assert (kinds.count("begin"), kinds.count("evaluated"), kinds.count("saved")) == (1, 4, 4)
    assert watched.evaluations == shown.evaluations and watched.samples == shown.samples
    assert watched.samples_per_s == pytest.approx(shown.samples_per_s, rel=0.1)
    assert list(feed.records(read_state(run.dir))) == []


def test_an_evaluation_is_shown_when_the_snapshot_has_it(tmp_path: Path) -> None:
    run = Run(tmp_path / "run").go_on(4.0)
    feed = Feed(run.dir, Clock(), Progress())
    list(feed.records(read_state(run.dir)))
    run.dir.add_metrics(evaluated(1))
    assert list(feed.records(read_state(run.dir))) == []
    run.live.hear(evaluated(1), run.at_s)
    run.write()
    assert [one["kind"] for one in feed.records(read_state(run.dir))] == ["evaluated"]


def test_notes_are_shown_once_however_many_there_were(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    feed = Feed(run.dir, Clock(), Progress())
    told = []
    for many in (3, 0, 30, 1):
        for _ in range(many):
            run.hear({"kind": "note", "text": f"note {run.live.told['noted']}"})
        run.write()
        told.append([one["text"] for one in feed.records(read_state(run.dir))])
    assert told[0] == ["note 0", "note 1", "note 2"] and told[1] == []
    assert told[2] == [f"note {number}" for number in range(13, 33)]  # the last twenty
    assert told[3] == ["note 33"]


def test_a_run_that_torchrun_starts_again_is_shown_from_its_new_beginning(tmp_path: Path) -> None:
    run = Run(tmp_path / "run").go_on(7.0)
    clock = Clock()
    watched = Progress(clock)
    feed = Feed(run.dir, clock, watched)
    for record in feed.records(read_state(run.dir)):
        watched.hear(record)
    run.live = Live()
    run.hear({**BEGIN, "epoch": 1, "resumed": "update-00000010"}, 8.0)
    run.write()
    for record in feed.records(read_state(run.dir)):
        watched.hear(record)
    assert (watched.begin["resumed"], watched.reached, watched.samples) == ("update-00000010", 1, 0)
    assert [one["epoch"] for one in watched.evaluations] == [1]


# --- whether it runs ----------------------------------------------------------------------------------------------


def test_a_run_is_running_while_its_folder_is_held_and_its_process_there(tmp_path: Path) -> None:
    run = Run(tmp_path / "run").go_on(3.0)
    old = run.at_s + 1000
    assert read_state(run.dir, old).state == "running"
    run.write(pid=NOBODY)
    assert read_state(run.dir, old).state == "killed"
    assert read_state(run.dir, run.at_s + 1).state == "running"  # it writes: its process is out of sight
    for wrong in (None, 0, -1, "x"):  # no numbers of processes
        run.write(pid=wrong)
        assert read_state(run.dir, old).state == "killed"
    run.write()
    run.let_go()
    assert read_state(run.dir, run.at_s + 1).state == "killed"  # the number may be another's by now
    run.hear(END)
    run.write()
    assert read_state(run.dir).state == "ended"


def test_a_run_out_of_sight_may_be_silent_for_three_times_what_it_says(tmp_path: Path) -> None:
    run = Run(tmp_path / "run").go_on(3.0)
    for next_s, silent_s in ((None, 10), (0.5, 10), (6.0, 18), (40.0, 120), ("x", 10)):
        run.write(pid=NOBODY, next_s=next_s)
        assert read_state(run.dir, run.at_s + silent_s - 1).state == "running"
        assert read_state(run.dir, run.at_s + silent_s + 1).state == "killed"


def ended_unsaid(path: Path) -> Run:
    """It came to its end, and its disk was full."""
    run = Run(path).go_on(21.0)
    run.dir.config.write_text('{"train": {"epochs": 4}}', encoding="utf-8")
    run.dir.summary.write_text("as it was\n", encoding="utf-8")
    run.dir.live.unlink()
    return run


def test_a_run_that_could_not_say_so_has_ended_if_its_result_is_there(tmp_path: Path) -> None:
    run = ended_unsaid(tmp_path / "run")
    assert read_state(run.dir).state == "starting"
    run.let_go()
    assert read_state(run.dir) == ("ended", {})
    assert find_run(tmp_path).path == run.dir.path
    os.utime(run.dir.config)  # it was resumed, and killed at once: that is the result of the stretch before
    os.utime(run.dir.summary, (1e9, 1e9))
    assert read_state(run.dir).state == "nothing"
    run.dir.weights.write_bytes(b"")
    assert read_state(run.dir).state == "nothing"  # the disk was full here, too
    run.dir.weights.write_bytes(b"weights")
    assert read_state(run.dir).state == "ended"
    run.dir.log(1).write_text('{"simulated": true}\n', encoding="utf-8")
    assert read_state(run.dir).state == "nothing"


def test_a_run_without_a_snapshot_is_starting_or_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    assert read_state(run.dir).state == "starting"
    run.dir.live.write_text('{"begin"', encoding="utf-8")
    assert read_state(run.dir).state == "starting"
    run.let_go()
    assert read_state(run.dir).state == "nothing"


def test_to_ask_does_not_keep_a_run_from_its_folder(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", held=False).go_on(1.0)
    assert read_state(run.dir).state == "killed"
    FolderLock(run.dir.path, time.sleep).release()


def test_of_a_folder_with_runs_the_newest_that_runs_is_taken_or_else_the_newest(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="and contains none"):
        find_run(tmp_path)
    runs = {name: Run(tmp_path / name).go_on(1.0) for name in "abcd"}
    for age, name in enumerate("bcad"):
        for path in (runs[name].dir.config, runs[name].dir.live):
            os.utime(path, (1e9 + age, 1e9 + age))
    runs["d"].let_go()
    assert find_run(tmp_path).path.name == "a"
    runs["a"].let_go()
    assert find_run(tmp_path).path.name == "c"
    runs["b"].let_go()
    runs["c"].let_go()
    assert find_run(tmp_path).path.name == "d"
    assert find_run(tmp_path / "b").path.name == "b"


# --- the command --------------------------------------------------------------------------------------------------


def test_once_is_a_still_picture(offbeat: Offbeat, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", began_s=time.time() - 7).go_on(7.0)
    run.hear({"kind": "note", "text": "learner 1 died (SIGKILL) and is restarted"}, 7.0)
    run.write()
    code, out, err = offbeat(run.dir.path, "--once")
    assert (code, err) == (0, "") and "\x1b" not in out
    assert out.startswith("digits-cnn  k-async:2  2 learners  1 server  cpu fp32")
    assert re.search(r"35 %  epoch 2/4  elapsed 0:07  left 0:1[23]", out), out
    assert re.search(r"^ +1 +10 +1\.0000 +91\.0 %", out, re.MULTILINE), out
    assert "note: learner 1 died (SIGKILL) and is restarted" in out


def test_json_is_one_object(offbeat: Offbeat, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", began_s=time.time() - 7).go_on(7.0)
    code, out, err = offbeat(run.dir.path, "--json")
    found = json.loads(out)
    assert (code, err, found["state"], found["epoch"], found["done"]) == (0, "", "running", 2, 0.35)
    assert found["samples_per_s"] == pytest.approx(200, rel=0.1) and found["end"] is None
    assert [one["epoch"] for one in found["evaluations"]] == [1]
    run.let_go()
    assert json.loads(offbeat(run.dir.path, "--json")[1])["state"] == "killed"
    run.end()
    found = json.loads(offbeat(run.dir.path, "--json")[1])
    assert (found["state"], found["end"]["accuracy"], found["left_s"]) == ("ended", 0.951, None)


def test_of_a_run_that_has_ended_the_summary_is_printed(offbeat: Offbeat, tmp_path: Path) -> None:
    run = Run(tmp_path / "run").go_on(21.0)
    run.hear(ENERGY)
    run.end()
    code, out, err = offbeat(run.dir.path)
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[1:7]] == ["note:", *["epoch"] * 4, "accuracy"]
    assert "accuracy  95.1 %" in out and "energy    1.2 kJ by package-0\n" in out and "saved     update 40" in out
    once = offbeat(run.dir.path, "--once")[1]
    assert "accuracy  95.1 %" in once and "update 40" in once


def test_without_joules_nothing_is_said_of_energy(offbeat: Offbeat, tmp_path: Path) -> None:
    run = Run(tmp_path / "run").go_on(21.0)
    run.hear({**ENERGY, "joules": None, "sources": [], "not_measured": ["RAPL"]})
    run.end()
    assert "energy" not in offbeat(run.dir.path)[1]


def test_a_run_is_followed_to_its_end(offbeat: Offbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run")

    def go_on(after_s: float, until_s: float) -> Callable[[], None]:
        def step() -> None:
            for at_s, record in story():
                if after_s < at_s <= until_s:
                    run.hear(record, at_s)
            run.write()

        return step

    on_sleep(monkeypatch, go_on(-1, 3), go_on(3, 6), lambda: None, go_on(6, 21), run.end)
    code, out, err = offbeat(tmp_path)
    assert (code, err) == (0, "")
    assert [line[:9] for line in out.splitlines()] == [
        *("digits-cn", "note: lea", "epoch 1/4", "epoch 2/4", "epoch 3/4", "epoch 4/4"),
        *("accuracy ", "loss     ", "time     ", "saved    ", "run      "),
    ]


def test_of_a_run_that_is_killed_it_is_said(offbeat: Offbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run", began_s=time.time() - 100).go_on(7.0)
    on_sleep(monkeypatch, lambda: None, run.let_go)
    code, out, err = offbeat(run.dir.path)
    assert code == 1 and "stopped  in epoch 2 of 4, after 7.0 s" in out  # when it was last heard of
    assert err == f"offbeat: {run.dir.path} was killed: its process {os.getpid()} is gone\n"
    (run.dir.checkpoints / "update-00000010").mkdir(parents=True)
    assert f"with: offbeat train --resume {run.dir.path}" in offbeat(run.dir.path)[2]
    code, out, err = offbeat(run.dir.path, "--once")
    assert code == 1 and "stopped  in epoch 2 of 4, after 7.0 s" in out and "was killed" in err
    code, out, err = offbeat(run.dir.path, "--json")
    assert (code, json.loads(out)["state"]) == (1, "killed") and "was killed" in err


def test_of_a_run_that_failed_it_is_said_why(offbeat: Offbeat, tmp_path: Path) -> None:
    run = Run(tmp_path / "run").go_on(3.0).end("learner 1: ValueError: too much")
    assert offbeat(run.dir.path)[::2] == (1, "offbeat: learner 1: ValueError: too much\n")
    code, out, err = offbeat(run.dir.path, "--once")
    assert (code, err) == (1, "offbeat: learner 1: ValueError: too much\n") and "stopped" in out
    code, out, err = offbeat(run.dir.path, "--json")
    assert (code, json.loads(out)["state"]) == (1, "failed") and err.count("\n") == 1


def test_of_a_run_that_could_not_say_that_it_ended_the_last_evaluation_is_shown(
    offbeat: Offbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ended_unsaid(tmp_path / "run")
    run.let_go()
    for words in ((), ("--once",)):
        code, out, err = offbeat(run.dir.path, *words)
        assert (code, err) == (0, "")
        assert re.fullmatch(r"epoch 4/4  update 40  loss 0.2500 .*\nthe run has ended .* see .*summary.txt\n", out), out
    found = json.loads(offbeat(run.dir.path, "--json")[1])
    assert found["state"] == "ended" and [one["epoch"] for one in found["evaluations"]] == [1, 2, 3, 4]
    run = Run(tmp_path / "other").go_on(3.0)
    run.dir.weights.write_bytes(b"weights")
    on_sleep(monkeypatch, run.dir.live.unlink, run.let_go)
    code, out, err = offbeat(run.dir.path)
    assert (code, err) == (0, "") and "stopped" not in out and "see " in out  # it was looked on to its end


def test_a_run_that_ends_before_it_began_is_no_riddle(
    offbeat: Offbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "run")
    assert offbeat(run.dir.path, "--once")[1].startswith("starting")
    on_sleep(monkeypatch, run.let_go)
    assert offbeat(run.dir.path)[::2] == (1, f"offbeat: {run.dir.path} ended before training started\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def interrupt() -> None:
    raise KeyboardInterrupt


def test_who_leaves_hears_nothing_of_an_end_and_has_the_terminal_as_it_was(
    offbeat: Offbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "run").go_on(3.0)
    on_sleep(monkeypatch, lambda: None, interrupt)
    code, out, err = offbeat(run.dir.path)
    assert (code, err) == (130, "") and "stopped" not in out and "digits-cnn" in out
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal()
    on_sleep(monkeypatch, lambda: None, interrupt)
    with pytest.raises(KeyboardInterrupt):
        watch.follow(run.dir, terminal)
    shown = terminal.getvalue()
    assert "epoch 1/4" in shown and "stopped" not in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1


def test_a_reader_that_has_gone_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    run = Run(tmp_path / "run").go_on(3.0)
    on_sleep(monkeypatch)
    with pytest.raises(BrokenPipeError):
        watch.follow(run.dir, Gone())


def test_nothing_is_written_into_the_folder(offbeat: Offbeat, tmp_path: Path) -> None:
    run = Run(tmp_path / "run").go_on(3.0)

    def files() -> dict[str, tuple[int, bytes]]:
        return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.dir.path.iterdir()}

    before = files()
    offbeat(run.dir.path, "--once")
    offbeat(run.dir.path, "--json")
    assert files() == before


def test_what_is_no_run_is_refused_in_one_line(offbeat: Offbeat, tmp_path: Path) -> None:
    old = Run(tmp_path / "old", held=False)
    virtual = Run(tmp_path / "virtual", held=False)
    virtual.dir.log(1).write_text('{"simulated": true}\n', encoding="utf-8")
    (tmp_path / "empty").mkdir()
    said = {
        "nowhere": "nowhere does not exist; expected the folder of a run",
        "empty": "empty is not the folder of a run and contains none",
        "old": "old has no live.json: the run has not started, or an older version of offbeat trained it",
        "virtual": "virtual was trained in virtual time and cannot be watched",
    }
    for name, text in said.items():
        code, out, err = offbeat(tmp_path / name)
        assert (code, out) == (2, "") and text in err and err.count("\n") == 1
    assert old.dir.path.exists()


@pytest.mark.parametrize("change", [{"progress": {"0": {}}}, {"notes": [1]}, {"begin": {"epochs": "many"}}])
def test_a_snapshot_that_no_run_writes_is_an_error_in_one_line(
    change: dict[str, Any], offbeat: Offbeat, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run").go_on(3.0)
    run.write(**change)
    code, _, err = offbeat(run.dir.path, "--once")
    assert code == 1 and "live.json is malformed" in err and err.count("\n") == 1


# --- what anybody may have written --------------------------------------------------------------------------------

PWN = "\x1b]0;pwn\x07 \x9b2J\u202e\ud800\n hi"


def spoilt(value: Any) -> Any:
    """All text in it, but what says which record it is."""
    if isinstance(value, dict):
        return {name: one if name == "kind" else spoilt(one) for name, one in value.items()}
    return [spoilt(one) for one in value] if isinstance(value, list) else PWN if isinstance(value, str) else value


def whole(run: Run, over: bool) -> dict[str, Any]:
    """A snapshot with everything in it."""
    for record in ({"kind": "note", "text": "so"}, {"kind": "died", "learner": 1, "text": "so"}, ENERGY, END):
        run.hear({**record, "why": "so", "not_measured": ["that"]}, 12.0)
    found: dict[str, Any] = json.loads(run.live.as_json(run.at_s))
    return {**found, "over": over}


@pytest.mark.parametrize("words", [["--once"], ["--json"], [], ["on a terminal"]])
@pytest.mark.parametrize("how", ["ended", "failed", "killed", "unsaid"])
def test_nothing_that_a_terminal_would_obey_comes_out_of_a_folder(
    how: str, words: list[str], offbeat: Offbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "a\x1b]0;b\x07").go_on(7.0)
    change = {"ended": {}, "failed": {"failed": PWN}, "killed": {"over": False, "end": None}, "unsaid": {}}[how]
    run.dir.write_live(json.dumps(spoilt(whole(run, over=True)) | change))
    run.dir.add_metrics({**evaluated(2), "update": PWN if how == "unsaid" else 20})
    if how == "unsaid":
        run.dir.live.unlink()
        run.dir.summary.write_text("as it was", encoding="utf-8")
    run.let_go()
    if words == ["on a terminal"]:
        monkeypatch.setenv("TERM", "xterm-256color")
        terminal = Terminal()
        watch.follow(run.dir, terminal)
        shown = re.sub(r"\x1b\[[?\d;]*[A-Za-z]|\r", "", terminal.getvalue())  # what is rich's own
    else:
        code, out, err = offbeat(run.dir.path, *words)
        assert code == err.count("\n") == (how in ("failed", "killed"))
        shown = out + err
    assert "pwn" in shown and all(line.isprintable() for line in shown.split("\n"))


def test_a_terminal_that_has_few_letters_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "run").go_on(7.0)
    run.write(notes=[{"text": "\x07 \u00e9"}])
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["watch", str(run.dir.path), "--once"]) == 0
    out.seek(0)
    assert "note: \\ufffd \\xe9" in out.read()


DEEP = "[" * 900 + "]" * 900
WRONG: tuple[Any, ...] = (True, 0, -1, 0.5, 1e308, 10**400, 2**62, "", "x", [], [1], [[]], {}, {"0": 1}, {"0": {}})


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Whatever is in it, as where it is and by what name."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield value, name
        yield from places(inner)


@pytest.mark.parametrize("over", [False, True])
def test_whatever_is_written_there_is_an_answer_or_one_line(
    over: bool, offbeat: Offbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: interrupt())
    run = Run(tmp_path / "run").go_on(12.0)
    live, chance, answers = whole(run, over), random.Random(7), set()
    for where, name in list(places(live)):
        right = where[name]
        for where[name] in chance.sample(WRONG, 5):
            run.dir.write_live(json.dumps(live))
            code, _, err = offbeat(tmp_path, *chance.choice([[], ["--once"], ["--json"]]))
            assert code in (0, 1, 130) and err.count("\n") == (code == 1), (name, where[name])
            answers.add(code)
        where[name] = right
    assert answers == {0, 1, 130}


@pytest.mark.parametrize("text", ["[" * 50_000, f'{{"end": {{"loss": {DEEP}}}}}', '{"begin": {"learners": 1e9}}'])
def test_a_file_that_is_too_much_is_borne(text: str, offbeat: Offbeat, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.dir.live.write_text(text, encoding="utf-8")
    run.dir.metrics.write_text(f"{'[' * 50_000}\n", encoding="utf-8")
    code, _, err = offbeat(run.dir.path, "--once")
    assert err.count("\n") == code <= 1
    run.dir.live.write_text('{"failed": "' + "x" * 100_000 + '", "over": true}', encoding="utf-8")
    assert len(offbeat(run.dir.path)[2]) < 5000
