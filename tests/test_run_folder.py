"""The folder of a run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from offbeat.errors import RequestError
from offbeat.runs.run_folder import FolderLock, RunDir, new_run_dir


def test_a_folder_is_one_runs_at_a_time(tmp_path: Path) -> None:
    hold = FolderLock(tmp_path, time.sleep)
    with pytest.raises(RequestError, match="is in use by another run"):
        FolderLock(tmp_path, time.sleep)
    hold.release()
    FolderLock(tmp_path, time.sleep).release()


def test_a_fork_does_not_let_go_of_what_has_another_number_there(tmp_path: Path) -> None:
    hold = FolderLock(tmp_path, time.sleep)
    child = os.fork()
    if child == 0:
        hold.release()
        os._exit(os.fstat(hold._descriptor).st_ino != tmp_path.stat().st_ino)
    assert os.waitpid(child, 0)[1] == 0
    hold.release()


def test_the_parts_of_a_rest_are_there_for_another_who_leads_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.hand_in(1, 0, b"old")
    run.hand_in(2, 0, b"a")
    run.hand_in(2, 1, b"b")
    assert run.handed_in(2) == run.handed_in(2) == {0: b"a", 1: b"b"}
    run.tidy()
    assert list(tmp_path.iterdir()) == []


def test_two_runs_of_one_second_have_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len({new_run_dir("same", None, "now") for _ in range(3)}) == 3
