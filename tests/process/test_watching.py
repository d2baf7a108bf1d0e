"""`offbeat watch` beside a training that runs: as users have it, in another process."""

from __future__ import annotations

import errno
import json
import os
import re
import select
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich import live

from offbeat.runs.run_folder import FolderLock, RunDir
from offbeat.train.telemetry import Live
from train.programs import Program, left_files, offbeat, train_words

LIMIT_S = 30.0  # ends only what hangs
LONG: dict[str, Any] = {"train__epochs": 100_000, "save__every_updates": 0, "save__every_epochs": 0}


def until(what: Callable[[], Any]) -> None:
    end = time.monotonic() + LIMIT_S
    while not what():
        if time.monotonic() > end:
            pytest.fail("it does not come")
        time.sleep(0.01)


class Beside:
    """A program in a folder of its own."""

    def __init__(
        self, folder: Path, *words: str, terminal: bool = False, before: Sequence[Callable[[], None]] = ()
    ) -> None:
        folder.mkdir()
        self.folder = folder
        self.program = Program(folder, words, terminal=terminal, before=before)

    def out(self) -> str:
        return (self.folder / "out").read_text(encoding="utf-8")

    def shown(self) -> str:
        """On its terminal, up to now."""
        program = self.program
        while select.select([program.terminal], [], [], 0)[0]:
            program.shown += os.read(program.terminal, 65536)
        return program.shown.decode()


def test_a_training_is_watched_to_its_end_and_does_not_notice(tmp_path: Path) -> None:
    training = Beside(tmp_path / "training", *train_words("k-async:2", 2, **LONG))
    run = tmp_path / "training" / "run"
    try:
        until((run / "config.json").exists)
        watcher = Beside(tmp_path / "watcher", "watch", str(run))  # it may come before the first learner does
        until(lambda: re.search(r"^epoch +2/100000  update", watcher.out(), re.MULTILINE))
        leaver = Beside(tmp_path / "leaver", "watch", str(run.parent))
        until(lambda: "epoch" in leaver.out())
        os.kill(leaver.program.pid, signal.SIGINT)
        left = leaver.program.wait(LIMIT_S)
        assert (left.code, left.err, left.left) == (130, "", []) and "stopped" not in left.out
        asked = Beside(tmp_path / "asked", "watch", str(run), "--json").program.wait(LIMIT_S)
        assert (asked.code, asked.result["state"], asked.result["pid"]) == (0, "running", training.program.pid)
        assert sorted(asked.result["progress"]) == ["0", "1"]
    finally:
        os.kill(training.program.pid, signal.SIGINT)
    ended, seen = training.program.wait(LIMIT_S), watcher.program.wait(LIMIT_S)
    assert (ended.code, ended.err, ended.left) == (130, "", [])
    assert (seen.code, seen.err, seen.left) == (0, "", [])
    tail = ended.out[ended.out.rindex("stopped ") :]
    assert seen.out.endswith(tail) and "asked to stop" in tail
    assert "note: asked to stop: writing a checkpoint" in seen.out
    evaluations = [line for line in ended.out.splitlines() if re.match(r"epoch +\d+/100000  update", line)]
    shown = [line for line in seen.out.splitlines() if re.match(r"epoch +\d+/100000  update", line)]
    assert shown == evaluations  # each once, and in their order
    assert left_files(tmp_path / "training") == []
    assert json.loads((run / "live.json").read_text(encoding="utf-8"))["over"]


def full() -> None:
    """The disk has room for the first snapshot and for no other."""
    write, left = RunDir.write_live, [None]

    def fail(run: RunDir, text: str) -> None:
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        left.pop()
        write(run, text)

    mock.patch.object(RunDir, "write_live", fail).start()  # to the end of this program


def test_a_training_whose_disk_was_full_is_not_taken_for_killed(tmp_path: Path) -> None:
    trained = offbeat(tmp_path, *train_words("ring", 2, train__epochs=1), before=full)
    assert trained.code == 0 and "live.json: No space left on device" in trained.out
    assert not list((tmp_path / "run").glob("*live*")) and left_files(tmp_path) == []
    seen = Beside(tmp_path / "watcher", "watch", str(tmp_path / "run")).program.wait(LIMIT_S)
    assert (seen.code, seen.err) == (0, "") and re.match(r"epoch 1/1  update \d+  loss", seen.out), seen.out


def struck(number: signal.Signals) -> Callable[[], None]:
    """The signal comes just when the cursor was hidden."""

    def lay() -> None:
        start = live.Live.start

        def hide(self: live.Live, refresh: bool = False) -> None:
            start(self, refresh)
            signal.raise_signal(number)

        mock.patch.object(live.Live, "start", hide).start()  # to the end of this program

    return lay


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_is_told_to_end_shows_the_cursor_again(number: signal.Signals, at_once: bool, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    hold = FolderLock(run.path, time.sleep)
    run.config.write_text("{}", encoding="utf-8")
    run.write_live(Live().as_json(time.time()))
    before = [struck(number)] if at_once else []
    watcher = Beside(tmp_path / "watcher", "watch", str(run.path), terminal=True, before=before)
    if not at_once:
        until(lambda: "starting" in watcher.shown())
        os.kill(watcher.program.pid, number)
    seen = watcher.program.wait(LIMIT_S)
    watcher.program.close()
    assert seen.code == 128 + number
    shown = watcher.program.shown.decode()
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1
    hold.release()


def test_a_training_that_is_killed_is_told_from_one_that_is_slow(tmp_path: Path) -> None:
    training = Beside(tmp_path / "training", *train_words("ring", 2, **LONG))
    run = tmp_path / "training" / "run"
    try:
        until((run / "live.json").exists)
        watcher = Beside(tmp_path / "watcher", "watch", str(run), terminal=True)
        until(lambda: (run / "metrics.jsonl").exists())
    finally:
        os.kill(training.program.pid, signal.SIGKILL)
    assert training.program.wait(LIMIT_S).code == -signal.SIGKILL
    seen = watcher.program.wait(LIMIT_S)
    shown = watcher.program.shown.decode()
    watcher.program.close()
    assert seen.code == 1
    assert f"was killed: its process {training.program.pid} is gone" in shown.replace("\r\n", "")
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") > 0
