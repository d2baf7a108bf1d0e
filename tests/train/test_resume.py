"""A run that was killed, stopped or broken off goes on from its checkpoint, to the same bits where that is promised."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from train.programs import Blow, Ended, left_files, offbeat, resume_words, train_words, weights

MATRIX = bool(os.environ.get("OFFBEAT_MATRIX"))
SAME = ("ring", "full-sync")  # the same bits are promised
LEARNERS = 3
UPDATES = 16  # in all
SURE = 14  # minibatches that each learner has; one more in an epoch is for who is first


def minibatches(sync: str) -> str:
    return "reduced" if sync == "ring" else "served"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The weights of runs that nobody has disturbed."""
    found = {}
    for sync in SAME:
        folder = tmp_path_factory.mktemp(sync)
        ended = offbeat(folder, *train_words(sync, LEARNERS))
        assert (ended.code, ended.err, ended.left) == (0, "", [])
        assert left_files(folder) == []
        found[sync] = weights(folder)
    return found


def random_blows(seed: int) -> Iterator[Blow]:
    """Points where everybody is killed: in a minibatch of somebody, in an evaluation, while a checkpoint is saved."""
    chance = random.Random(seed)
    while True:
        kind = chance.choice(("minibatch", "minibatch", "minibatch", "evaluate", "write", "place", "build"))
        if kind == "minibatch":
            yield Blow(point=kind, count=chance.randint(1, SURE), learner=chance.randrange(LEARNERS))
        else:
            yield Blow(point=kind, count={"write": chance.randint(1, 30), "place": chance.randint(1, 5)}.get(kind, 1))


def blows_of(sync: str, many: int) -> list[Blow]:
    found: list[Blow] = []
    blows = random_blows(SAME.index(sync))
    while len(found) < many:
        blow = next(blows)
        point = minibatches(sync) if blow.point == "minibatch" else blow.point
        found.append(replace(blow, point=point))
    return found


@pytest.mark.parametrize("sync", SAME)
def test_killed_again_and_again_it_still_comes_to_the_same_bits(
    sync: str, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    words = train_words(sync, LEARNERS)
    points = minibatches(sync)
    blows = [
        Blow(point=points, count=6, learner=1),
        Blow(point="write", count=4),  # in the middle of the next checkpoint
        Blow(point=points, count=7, learner=2),
    ]
    for blow in blows:
        ended = offbeat(tmp_path, *words, blow=blow)
        assert (ended.code, ended.left) == (-signal.SIGKILL, [])
        words = resume_words()
    ended = offbeat(tmp_path, *words)
    assert (ended.code, ended.err) == (0, "")
    assert "resumed from update-" in ended.out
    assert weights(tmp_path) == whole[sync]
    assert left_files(tmp_path) == []


@pytest.mark.skipif(not MATRIX, reason="takes a minute: make test-matrix")
@pytest.mark.parametrize("at", range(10))
@pytest.mark.parametrize("sync", SAME)
def test_killed_at_any_point_it_comes_to_the_same_bits(
    sync: str, at: int, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    ended = offbeat(tmp_path, *train_words(sync, LEARNERS), blow=blows_of(sync, 10)[at])
    assert (ended.code, ended.left) == (-signal.SIGKILL, [])
    ended = offbeat(tmp_path, *resume_words())
    assert ended.code == 0, ended.err
    assert weights(tmp_path) == whole[sync]
    assert left_files(tmp_path) == []
    epochs = [json.loads(line)["epoch"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert epochs == [1, 2]


# --- signals ------------------------------------------------------------------------------------------------------


STOPS = {
    "in an epoch": Blow(point="minibatch", count=5, learner=1, what=signal.SIGTERM, whom="supervisor"),
    "at the start": Blow(point="born", learner=1, what=signal.SIGINT, whom="group", late_s=0.5),
    "in a model's making": Blow(point="build", learner=2, what=signal.SIGTERM, whom="supervisor"),
    "in an evaluation": Blow(point="evaluate", what=signal.SIGINT, whom="group"),
    "in a save": Blow(point="write", what=signal.SIGTERM, whom="supervisor"),
}


@pytest.mark.parametrize("sync", SAME)
@pytest.mark.parametrize("when", STOPS if MATRIX else ["in an epoch", "at the start"])
def test_asked_to_stop_it_saves_and_goes_on_to_the_same_bits(
    sync: str, when: str, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    blow = at_minibatches(STOPS[when], sync)
    ended = offbeat(tmp_path, *train_words(sync, LEARNERS), "--json", blow=blow)
    check_stopped(ended, tmp_path, blow.what)
    ended = offbeat(tmp_path, *resume_words())
    assert (ended.code, ended.err) == (0, "")
    assert weights(tmp_path) == whole[sync]
    assert left_files(tmp_path) == []


def at_minibatches(blow: Blow, sync: str) -> Blow:
    point = minibatches(sync) if blow.point == "minibatch" else blow.point
    return replace(blow, point=point)


def check_stopped(ended: Ended, folder: Path, what: int) -> None:
    """It has saved, told so, and nothing is left of it."""
    assert (ended.code, ended.left) == (128 + what, []), ended.err
    assert ended.result["stopped"] is True and ended.result["updates"] < UPDATES
    assert "note: asked to stop" in ended.err and "Traceback" not in ended.err
    saved = f"update-{ended.result['updates']:08d}"
    assert saved in [path.name for path in (folder / "run" / "checkpoints").iterdir()]
    assert "Continue with: offbeat train --resume" in (folder / "run" / "summary.txt").read_text()
    assert left_files(folder) == []


@pytest.mark.parametrize(
    "sync", ["k-async:2", "downpour", "local-sgd:2", "local-sgd:2,overlap"] if MATRIX else ["local-sgd:2,overlap"]
)
def test_strategies_that_promise_no_bits_stop_and_go_on_too(sync: str, tmp_path: Path) -> None:
    words = [*train_words(sync, LEARNERS, train__epochs=4), "--train.batch-size", "16", "--json"]
    blow = Blow(point="served", count=20, learner=1, what=signal.SIGTERM, whom="supervisor")
    ended = offbeat(tmp_path, *words, blow=blow)
    assert (ended.code, ended.left) == (143, []), ended.err
    before = ended.result
    assert before["stopped"] is True
    ended = offbeat(tmp_path, *resume_words(), "--json")
    assert ended.code == 0, ended.err
    assert ended.result["updates"] > before["updates"] and ended.result["epochs"] == 4
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["samples"] + sum(last["dropped"].values()) == 4 * 1438


@pytest.mark.parametrize("sync", SAME if MATRIX else ["ring"])
def test_a_second_ctrl_c_ends_it_at_once(sync: str, tmp_path: Path) -> None:
    blow = Blow(point="evaluate", what=signal.SIGINT, whom="group twice")
    ended = offbeat(tmp_path, *train_words(sync, LEARNERS), blow=blow)
    assert (ended.code, ended.left) == (130, [])
    assert "Traceback" not in ended.err + ended.out
    assert not (tmp_path / "run" / "weights.safetensors").exists()
    assert left_files(tmp_path) == []


# --- what there is to go on from ----------------------------------------------------------------------------------


def stopped_run(folder: Path, sync: str = "ring", learners: int = LEARNERS) -> None:
    """Checkpoints of updates 6 and 8, or thereabouts."""
    words = train_words(sync, learners)
    blow = Blow(point=minibatches(sync), count=10, learner=0, what=signal.SIGTERM, whom="supervisor")
    assert offbeat(folder, *words, blow=blow).code == 143


def test_a_broken_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, whole: dict[str, bytes]) -> None:
    stopped_run(tmp_path)
    older, newest = sorted((tmp_path / "run" / "checkpoints").iterdir())
    flip(newest / "optimizer.safetensors")
    ended = offbeat(tmp_path, *resume_words())
    assert ended.code == 0
    assert ended.err.count("\n") == 1 and f"{newest.name}/optimizer.safetensors" in ended.err
    assert f"resumed from {older.name}" in ended.out
    assert weights(tmp_path) == whole["ring"]


def test_where_all_checkpoints_are_broken_each_is_named_and_nothing_is_overwritten(tmp_path: Path) -> None:
    stopped_run(tmp_path)
    before = weights(tmp_path)
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        flip(path / "weights.safetensors")
    ended = offbeat(tmp_path, *resume_words())
    assert ended.code == 2
    *broken, last = ended.err.splitlines()
    assert len(broken) == 2 and all("skipped a corrupt checkpoint" in line for line in broken)
    assert "all checkpoints of run are corrupt" in last
    assert weights(tmp_path) == before


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("sync", "other"), [("ring", "full-sync"), ("full-sync", "ring")] if MATRIX else [("ring", "async")]
)
def test_a_run_ends_once_and_more_epochs_have_to_be_asked_for(sync: str, other: str, tmp_path: Path) -> None:
    assert offbeat(tmp_path, *train_words(sync, 2)).code == 0
    before = weights(tmp_path)
    ended = offbeat(tmp_path, *resume_words())
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "offbeat: run has completed its 2 epochs; ask for more with --train.epochs\n"
    ended = offbeat(tmp_path, *resume_words("run", "--train.epochs", "3", "--sync", other))
    assert ended.code == 2 and ended.err.count("\n") == 1
    assert f"cannot be resumed under '{other}'" in ended.err
    assert weights(tmp_path) == before
    ended = offbeat(tmp_path, *resume_words("run", "--train.epochs", "3", "--json"))
    assert ended.code == 0
    assert (ended.result["epochs"], ended.result["stopped"]) == (3, False)
    assert weights(tmp_path) != before


def test_more_learners_go_on_with_the_mean_of_the_buffers_and_it_is_told(tmp_path: Path) -> None:
    assert offbeat(tmp_path, *train_words("ring", 2), "--train.schedule", "cosine", "--save.keep", "9").code == 0
    ended = offbeat(
        tmp_path, *resume_words("run", "--train.epochs", "4", "--learners", "3", "--json"), before=tell_buffers
    )
    assert ended.code == 0
    assert "continues with 3 learners instead of 2, so the result is not bit-identical" in ended.err
    kept = safetensors.torch.load_file(tmp_path / "run" / "checkpoints" / "update-00000024" / "weights.safetensors")
    began = {at: safetensors.torch.load_file(tmp_path / f"began-{at}") for at in range(3)}
    assert torch.equal(began[2]["2.running_mean"], kept["2.running_mean"])
    assert not torch.equal(began[0]["2.running_mean"], began[1]["2.running_mean"])
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in metrics] == [1, 2, 3, 4]
    rates = [record["rate"] for record in metrics]
    assert rates[2] > 0.1 and rates[3] < rates[2]  # 8 updates an epoch now, of 12: the rate follows the epochs
    assert metrics[-1]["loss"] < metrics[1]["loss"]


def tell_buffers() -> None:
    """Lays aside what each learner begins with."""
    from offbeat.train.reduced_trainer import ReducedTrainer

    fit, folder = ReducedTrainer.fit, Path.cwd()

    def told(self: ReducedTrainer) -> None:
        safetensors.torch.save_file(dict(self.model.state_dict()), folder / f"began-{self.number}")
        fit(self)

    ReducedTrainer.fit = told  # type: ignore[method-assign]  # in a fork of its own
