"""Small edges of `offbeat train` and `offbeat run`: a closed terminal, folders, models that cannot be trained."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from offbeat import cli
from offbeat.errors import RequestError
from offbeat.processes import signals
from offbeat.runs.run_folder import new_run_dir
from offbeat.train import launch
from offbeat.train.tasks import Task, Tensors
from train.programs import Blow, offbeat, resume_words, train_words
from train.runs import config_of, small_task


def test_a_closed_terminal_saves_and_ends(tmp_path: Path) -> None:
    blow = Blow(point="reduced", count=5, learner=1, what=signal.SIGHUP, whom="supervisor")
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    try:
        ended = offbeat(tmp_path, *train_words("ring", 2), blow=blow)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (ended.code, ended.left) == (129, [])
    assert "note: asked to stop" in ended.out
    assert (tmp_path / "run" / "summary.txt").exists()
    assert offbeat(tmp_path, *resume_words()).code == 0


def test_under_nohup_a_closed_terminal_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.terminable(noted=1) as handler:
            os.kill(os.getpid(), signal.SIGHUP)
            assert handler.received == [] and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_is_shown_on_a_terminal_that_is_gone_does_not_end_a_training() -> None:
    def gone(record: object) -> None:
        raise OSError(5, "Input/output error")

    def full(record: object) -> None:
        raise OSError(28, "No space left on device")

    launch._outlives_terminal(gone)({})
    with pytest.raises(OSError, match="No space"):
        launch._outlives_terminal(full)({})


def test_the_folder_of_a_run_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (new_run_dir("digits", None, "now"), new_run_dir("digits", tmp_path / "a" / "b", "now")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_log_that_cannot_be_written_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('started')", encoding="utf-8")
    for log in ("/proc/log.jsonl", str(tmp_path), str(tmp_path / "nowhere" / "log.jsonl")):
        assert cli.main(["run", "--log", log, str(script)]) == 2
        told = capsys.readouterr()
        assert (told.out, told.err.count("\n")) == ("", 1) and told.err.startswith(f"offbeat: cannot write {log}: ")


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 4)

    def forward(self, numbers: Tensor) -> Tensor:
        found: Tensor = self.out(self.words(numbers).mean(1))
        return found


def words_task() -> Task:
    numbers, targets = torch.arange(96).reshape(32, 3) % 20, torch.arange(32) % 4
    return Task(
        train=Tensors(numbers, targets),
        test=Tensors(numbers, targets),
        build=Words,
        loss=nn.functional.cross_entropy,
    )


def test_sparse_gradients_under_an_all_reduce_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as told:
        launch.prepare(config_of(), run_dir=tmp_path / "run", task=words_task())
    assert str(told.value).startswith("the gradient of 'words.weight' is sparse") and "\n" not in str(told.value)
    assert not (tmp_path / "run").exists()


def test_and_lazy_modules_under_any_strategy(tmp_path: Path) -> None:
    task = small_task(build=lambda: nn.Sequential(nn.LazyLinear(10), nn.ReLU(), nn.LazyLinear(4)))
    for sync in ("ring", "async"):
        with pytest.raises(RequestError, match=r"parameter '0\.weight' of the model has no shape before its first"):
            launch.prepare(config_of(sync=sync), run_dir=tmp_path / "run", task=task)
