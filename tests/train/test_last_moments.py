"""Whatever the last moments of a run are, its results are those of its last checkpoint; nothing is said too soon."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.runs.disk import cut_to_lines
from offbeat.runs.run_folder import RunDir
from offbeat.train import checkpoint, results
from offbeat.train.checkpoint import Saver, newest, update_of_weights, write_weights
from train.programs import Blow, Ended, left_files, offbeat, resume_words, train_words, weights
from train.runs import small_task, trained

COMPLETED = "offbeat: run has completed its 2 epochs; ask for more with --train.epochs\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The weights of runs that nobody has disturbed."""
    found = {}
    for sync in ("ring", "full-sync"):
        folder = tmp_path_factory.mktemp(sync)
        assert offbeat(folder, *train_words(sync, 2)).code == 0
        found[sync] = weights(folder)
    return found


# --- killed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sync", "point"),
    [("ring", "end"), ("full-sync", "weights"), ("ring", "conclude"), ("ring", "summary")],
)
def test_killed_after_its_last_checkpoint_a_run_is_finished_to_the_same_bits(
    sync: str, point: str, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    ended = offbeat(tmp_path, *train_words(sync, 2), blow=Blow(point=point))
    assert (ended.code, ended.left) == (-signal.SIGKILL, [])
    run = RunDir(tmp_path / "run")
    assert not run.summary.exists()
    ended = offbeat(tmp_path, *resume_words("run", "--json"))
    assert ended.code == 0, ended.err
    check_results(tmp_path, whole[sync])
    assert (ended.result["epochs"], ended.result["stopped"]) == (2, False)
    epochs = [json.loads(line)["epoch"] for line in run.metrics.read_text(encoding="utf-8").splitlines()]
    assert epochs == [1, 2]
    again = offbeat(tmp_path, *resume_words())
    assert (again.code, again.err) == (2, COMPLETED)
    check_results(tmp_path, whole[sync])


def check_results(folder: Path, expected: bytes) -> None:
    run = RunDir(folder / "run")
    last = newest(run.checkpoints, lambda line: None)
    assert last is not None and update_of_weights(run.weights) == last.update
    assert weights(folder) == expected
    assert f"{last.update} updates" in run.summary.read_text(encoding="utf-8")
    assert left_files(folder) == []


def test_a_run_that_goes_on_has_no_results_of_an_earlier_end(tmp_path: Path) -> None:
    """Stopped, resumed, killed: `evaluate` does not take the weights of the stop."""
    stop = Blow(point="reduced", count=4, learner=0, what=signal.SIGTERM, whom="supervisor")
    assert offbeat(tmp_path, *train_words("ring", 2), blow=stop).code == 143
    run = RunDir(tmp_path / "run")
    assert run.summary.exists() and run.weights.exists()
    assert offbeat(tmp_path, *resume_words(), blow=Blow(point="evaluate")).code == -signal.SIGKILL
    assert not run.summary.exists() and not run.weights.exists()
    ended = offbeat(tmp_path, "evaluate", "run")
    assert ended.code == 2 and "the run has not ended; finish it with offbeat train --resume run" in ended.err


def test_a_run_that_has_reached_its_accuracy_is_not_trained_further_by_a_resume(tmp_path: Path) -> None:
    words = train_words("ring", 1, train__epochs=5, train__stop_at=0.001)
    assert offbeat(tmp_path, *words, blow=Blow(point="weights")).code == -signal.SIGKILL
    ended = offbeat(tmp_path, *resume_words("run", "--json"))
    assert (ended.code, ended.result["epochs"], ended.result["stopped"]) == (0, 2, True)
    assert "--resume run --train.stop-at 0\n" in (tmp_path / "run" / "summary.txt").read_text(encoding="utf-8")
    ended = offbeat(tmp_path, *resume_words())
    assert (ended.code, ended.err.count("\n")) == (2, 1) and "continue with --train.stop-at 0" in ended.err
    ended = offbeat(tmp_path, *resume_words("run", "--train.stop-at", "0", "--train.epochs", "3", "--json"))
    assert (ended.code, ended.result["epochs"]) == (0, 3)


def test_evaluate_says_when_there_are_later_checkpoints_than_the_weights(tmp_path: Path) -> None:
    assert offbeat(tmp_path, *train_words("ring", 1)).code == 0
    run = RunDir(tmp_path / "run")
    last = newest(run.checkpoints, lambda line: None)
    assert last is not None
    assert offbeat(tmp_path, "evaluate", "run").err == ""
    write_weights(run.weights, last.files["weights"], update=1)
    ended = offbeat(tmp_path, "evaluate", "run")
    assert ended.code == 0
    assert f"the weights are of update 1, but the newest checkpoint is of update {last.update}" in ended.err


# --- saved, or not ------------------------------------------------------------------------------------------------


def full_disk(owner: Any, name: str, after: int = 0) -> Callable[[], None]:
    """From the so-many-th call on, what is written there finds no room."""

    def lay() -> None:
        original, left = getattr(owner, name), [after]

        def write(*given: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*given, **named)

        setattr(owner, name, write)

    return lay


@pytest.mark.parametrize("sync", ["ring", "full-sync"])
def test_a_run_whose_last_checkpoint_finds_no_room_says_so_and_fails(sync: str, tmp_path: Path) -> None:
    ended = offbeat(tmp_path, *train_words(sync, 2), before=full_disk(checkpoint, "write_file"))
    assert (ended.code, ended.left) == (1, [])
    assert ended.err.count("\n") == 1 and "the last one, was not saved" in ended.err
    assert "No space left on device" in ended.err
    assert "saved  " not in ended.out and "Traceback" not in ended.out
    assert "saving update 3 failed; training continues" in ended.out


def test_asked_to_stop_on_a_full_disk_a_run_does_not_end_as_if_it_had_saved(tmp_path: Path) -> None:
    blow = Blow(point="reduced", count=4, learner=0, what=signal.SIGTERM, whom="supervisor")
    ended = offbeat(tmp_path, *train_words("ring", 2), blow=blow, before=full_disk(checkpoint, "write_file"))
    assert (ended.code, ended.left) == (1, [])
    assert ended.err.count("\n") == 1 and "was not saved" in ended.err


def test_a_summary_that_finds_no_room_is_told_and_a_resume_writes_it(tmp_path: Path, whole: dict[str, bytes]) -> None:
    ended = offbeat(tmp_path, *train_words("ring", 2), before=full_disk(results, "replace_file"))
    assert (ended.code, ended.err) == (1, "offbeat: cannot write run/summary.txt: No space left on device\n")
    assert offbeat(tmp_path, *resume_words()).code == 0
    check_results(tmp_path, whole["ring"])


def test_saved_is_said_when_it_is_on_disk(tmp_path: Path) -> None:
    told: list[str] = []

    def on_saved(update: int) -> None:
        there = newest(tmp_path, lambda line: None)
        told.append(f"{update} {there is not None and there.update == update}")

    saver = Saver(tmp_path, keep=2, tell=told.append, on_saved=on_saved)
    saver.save(7, {}, {"weights": {"a": torch.ones(3)}})
    saver.wait()
    assert (told, saver.failure) == (["7 True"], "")


# --- resumed as another run ---------------------------------------------------------------------------------------


def stopped(folder: Path) -> None:
    stop = Blow(point="reduced", count=4, learner=0, what=signal.SIGTERM, whom="supervisor")
    assert offbeat(folder, *train_words("ring", 2), blow=stop).code == 143


def test_another_seed_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path)
    before = weights(tmp_path)
    ended = offbeat(tmp_path, *resume_words("run", "--seed", "7"))
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert "the run has seed 0" in ended.err
    assert weights(tmp_path) == before
    assert offbeat(tmp_path, *resume_words("run", "--seed", "0")).code == 0


def test_weights_without_a_checkpoint_are_not_overwritten(tmp_path: Path) -> None:
    stopped(tmp_path)
    before = weights(tmp_path)
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        (path / "manifest.json").unlink()
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    ended = offbeat(tmp_path, *resume_words())
    assert (ended.code, ended.err.count("\n")) == (2, 1) and "has weights but no checkpoint" in ended.err
    assert weights(tmp_path) == before


# --- failures -----------------------------------------------------------------------------------------------------


def raise_on_1() -> None:
    from offbeat.train.served_trainer import ServedTrainer

    original = ServedTrainer._minibatch

    def minibatch(self: ServedTrainer, batch: Any) -> None:
        if self.number == 1 and self.seen > 200:
            raise ValueError("learner 1 has had enough")
        original(self, batch)

    ServedTrainer._minibatch = minibatch  # type: ignore[method-assign]  # in a fork of its own


def test_a_run_in_which_a_learner_failed_does_not_exit_with_0(tmp_path: Path) -> None:
    ended = offbeat(tmp_path, *train_words("k-async:1", 3), "--json", before=raise_on_1)
    assert (ended.code, ended.left) == (1, [])
    assert ended.result["epochs"] == 2
    last = ended.err.splitlines()[-1]
    assert last.startswith("offbeat: learner 1: ValueError: learner 1 has had enough")
    assert last.endswith("the other learners finished the run")
    assert (tmp_path / "run" / "summary.txt").exists()


def exit_on_1() -> None:
    from offbeat.train.reduced_trainer import ReducedTrainer

    original = ReducedTrainer._update

    def update(self: ReducedTrainer, *given: Any) -> None:
        if self.number == 1 and self.at.update == 4:
            os._exit(7)
        original(self, *given)

    ReducedTrainer._update = update  # type: ignore[method-assign,assignment]  # in a fork of its own


def test_a_learner_of_ring_that_exits_by_itself_is_the_one_that_is_named(tmp_path: Path) -> None:
    ended: Ended = offbeat(tmp_path, *train_words("ring", 3), before=exit_on_1)
    assert ended.code == 1
    assert ended.err.startswith("offbeat: learner 1 ended (exit code 7); continue from the last checkpoint with: ")


def test_a_ring_with_a_learner_whose_loss_is_never_finite_ends_after_an_epoch_and_names_it(tmp_path: Path) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        bad = os.environ.get("RANK") == "1" and torch.is_grad_enabled()
        found = torch.nn.functional.cross_entropy(outputs, targets)
        return found * float("nan") if bad else found

    from offbeat.train import launch
    from train.runs import config_of

    start = launch.prepare(config_of(), run_dir=tmp_path / "run", task=small_task(loss=loss))
    result = launch.launch(start, lambda record: None, lambda who, line: None)
    assert result.end["epochs"] == 1
    assert (
        "no update of epoch 1 was applied, since the loss of learner 1 is not finite; try --train.lr" in result.failed
    )


def test_a_training_that_drops_some_updates_goes_on(tmp_path: Path) -> None:
    outcome = trained(tmp_path, train={"epochs": 1})
    assert outcome.end["failed"] == ""


# --- files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [(b"", b""), (b"ab", b""), (b"ab\n", b"ab\n"), (b"ab\ncd", b"ab\n"), (b"\n\nx", b"\n\n")],
)
def test_a_file_is_cut_behind_its_last_whole_line(before: bytes, after: bytes, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(before)
    assert cut_to_lines(path) == len(after)
    assert path.read_bytes() == after


def test_a_wish_to_stop_needs_no_room_and_the_first_one_counts(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.stops_after() is None
    run.ask_to_stop(12)
    run.ask_to_stop(15)
    assert run.stops_after() == 12
    run.tidy()
    assert run.stops_after() is None and list(tmp_path.iterdir()) == []
