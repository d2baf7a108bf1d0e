"""`offbeat watch` beside a training that runs: as users have it, in another process."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from train.programs import Program, left_files, train_words

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

    def __init__(self, folder: Path, *words: str, terminal: bool = False) -> None:
        folder.mkdir()
        self.folder = folder
        self.program = Program(folder, words, terminal=terminal)

    def out(self) -> str:
        return (self.folder / "out").read_text(encoding="utf-8")


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
    assert "note: asked to stop: saving" in seen.out
    evaluations = [line for line in ended.out.splitlines() if re.match(r"epoch +\d+/100000  update", line)]
    shown = [line for line in seen.out.splitlines() if re.match(r"epoch +\d+/100000  update", line)]
    assert shown == evaluations  # each once, and in their order
    assert left_files(tmp_path / "training") == []
    assert json.loads((run / "live.json").read_text(encoding="utf-8"))["over"]


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
