"""A learner that hangs, however its heart beats, is named with where it is; the others finish, or the run ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offbeat.processes import watchdog
from offbeat.train.reduced_trainer import ReducedTrainer
from offbeat.train.served_trainer import ServedTrainer
from offbeat.train.trainer import Trainer
from train.programs import Program, left_files, offbeat, resume_words, train_words

LEAST = ("--train.watchdog-s", "2")


def impatient() -> None:
    """A hang is found after the least time, however slow this machine is now."""
    watchdog.USUAL, watchdog.LONGEST = 2.0, 2.0


def hang_in_data(spins: bool) -> Callable[[], None]:
    """Learner 1 reads a sample that never comes."""

    def lay() -> None:
        impatient()
        from offbeat.train.tasks import Tensors

        read: Any = Tensors.__getitems__ if hasattr(Tensors, "__getitems__") else Tensors.__getitem__
        name = read.__name__
        left = [200]

        def stuck(self: Any, given: Any) -> Any:
            left[0] -= len(given) if isinstance(given, list) else 1
            if left[0] < 0 and "1" in (os.environ.get("RANK"), os.environ.get("OFFBEAT_LEARNER")):
                while spins:
                    pass
                threading.Event().wait()
            return read(self, given)

        setattr(Tensors, name, stuck)

    return lay


@pytest.mark.parametrize("spins", [False, True])
def test_a_learner_of_k_async_whose_data_hangs_is_given_up_and_the_others_finish(spins: bool, tmp_path: Path) -> None:
    words = [*train_words("k-async:1", 3), *LEAST, "--json"]
    ended = offbeat(tmp_path, *words, before=hang_in_data(spins))
    assert (ended.code, ended.left) == (1, []), ended.err
    assert ended.result["epochs"] == 2
    last = ended.err.splitlines()[-1]
    assert last.startswith("offbeat: learner 1: has read no minibatch for ")
    assert "test_hangs.py" in last or "threading.py" in last
    stacks = (tmp_path / "run" / "stacks.txt").read_text(encoding="utf-8")
    assert "in stuck" in stacks and "learner 0:" in stacks
    assert left_files(tmp_path) == ["stacks.txt"]


def hang_in_forward(kind: type[Trainer]) -> Callable[[], None]:
    def lay() -> None:
        impatient()
        original = kind.loss_of

        def stuck(self: Trainer, *given: Any) -> Any:
            if self.number == 1 and self.seen > 200:
                (self.run.path.parent / "stuck").touch()
                threading.Event().wait()
            return original(self, *given)

        kind.loss_of = stuck  # type: ignore[method-assign,assignment]  # in a fork of its own

    return lay


def test_a_rank_of_ring_that_hangs_ends_the_run_in_one_line(tmp_path: Path) -> None:
    ended = offbeat(tmp_path, *train_words("ring", 3), *LEAST, before=hang_in_forward(ReducedTrainer))
    assert (ended.code, ended.left) == (1, [])
    assert ended.err.count("\n") == 1
    assert ended.err.startswith("offbeat: learner 1: has computed no minibatch for ")
    assert ended.err.endswith("continue from the last checkpoint with: offbeat train --resume run\n")
    assert "in stuck" in (tmp_path / "run" / "stacks.txt").read_text(encoding="utf-8")
    assert offbeat(tmp_path, *resume_words()).code == 0


def test_a_stopped_rank_of_ring_ends_the_run_in_one_line(tmp_path: Path) -> None:
    def stop() -> None:
        impatient()
        original = ReducedTrainer._update

        def update(self: ReducedTrainer, *given: Any) -> None:
            if self.number == 1 and self.at.update == 4:
                os.kill(os.getpid(), signal.SIGSTOP)
            original(self, *given)

        ReducedTrainer._update = update  # type: ignore[method-assign,assignment]  # in a fork of its own

    ended = offbeat(tmp_path, *train_words("ring", 2), *LEAST, before=stop)
    assert (ended.code, ended.left) == (1, [])
    assert ended.err.startswith("offbeat: learner 1: has been stopped (SIGSTOP) for ")


def test_an_evaluation_that_hangs_ends_the_run_too(tmp_path: Path) -> None:
    def stick() -> None:
        def stuck(self: Trainer, *given: Any) -> Any:
            threading.Event().wait()

        Trainer._evaluate = stuck  # type: ignore[method-assign,assignment]  # in a fork of its own

    ended = offbeat(tmp_path, *train_words("ring", 2), "--train.watchdog-s", "0.6", before=stick)
    assert (ended.code, ended.left) == (1, [])
    assert "has made no progress in its evaluation or checkpoint" in ended.err


def test_a_slow_learner_is_not_given_up(tmp_path: Path) -> None:
    """Once 5 times, once 50 times its usual minibatch, with a least time below both."""

    def slow() -> None:
        original = ServedTrainer.loss_of
        made = [0]

        def late(self: ServedTrainer, *given: Any) -> Any:
            made[0] += 1
            if self.number == 1:
                time.sleep({4: 0.25, 6: 2.5}.get(made[0], 0.05))
            return original(self, *given)

        ServedTrainer.loss_of = late  # type: ignore[method-assign,assignment]  # in a fork of its own

    ended = offbeat(tmp_path, *train_words("full-sync", 2), "--train.watchdog-s", "0.5", before=slow)
    assert (ended.code, ended.err, ended.left) == (0, "", [])
    assert "given up" not in ended.out


@pytest.mark.parametrize("sync", ["ring", "k-async:1"])
def test_a_signal_ends_a_run_with_a_hung_learner_soon(sync: str, tmp_path: Path) -> None:
    """With a server the others save; ranks cannot without the one that hangs."""
    kind = ReducedTrainer if sync == "ring" else ServedTrainer
    program = Program(tmp_path, train_words(sync, 3, train__epochs=200), before=[hang_in_forward(kind)])
    end_s = time.monotonic() + 60
    while not (tmp_path / "stuck").exists() and time.monotonic() < end_s:
        time.sleep(0.01)
    os.kill(program.pid, signal.SIGTERM)
    began_s = time.monotonic()
    ended = program.wait()
    assert time.monotonic() - began_s < 20
    assert ended.left == []
    if sync == "ring":
        assert ended.code == 143 and "ended without saving" in ended.out
    else:
        assert ended.code in (1, 143) and "learner 1" in ended.err + ended.out
        assert any((tmp_path / "run" / "checkpoints").iterdir())
