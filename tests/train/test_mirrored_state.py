"""What was mirrored becomes a checkpoint that a run goes on from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from offbeat.network.connections import Place
from offbeat.runs.run_folder import RunDir
from offbeat.server.remote.mirror import Mirror, MirroredState
from offbeat.train.checkpoint import newest
from offbeat.train.config import Config
from offbeat.train.config_files import changed, read_config, read_recipe
from offbeat.train.launch import prepare
from offbeat.train.mirrored_state import StateKeeper
from offbeat.train.recipes import DEFAULT
from offbeat.train.tasks import task_of
from offbeat.train.trainer import built_on

CPU = torch.device("cpu")


class Kept(Mirror):
    """A mirror that has this state."""

    def __init__(self, state: MirroredState | None, heard_s: float) -> None:
        self.state, self.heard_s = state, heard_s

    def newest(self) -> MirroredState | None:
        return self.state


def facts(version: int, offset: int, epoch: int = 0) -> str:
    book = {"epoch": epoch, "samples": 1438, "settled": [[0, offset]]}
    told = {
        "version": version,
        "seconds": 2.0,
        "epoch_end": False,
        "halt": False,
        "held": 0,
        "memory": {},
        "delays": [],
    }
    return json.dumps(told | {"book": book, "samples": {"applied": offset}, "gradients": version, "staleness": 1.0})


def keeper(folder: Path, config: Config, state: MirroredState | None, heard_s: float = 100.0) -> StateKeeper:
    made = StateKeeper(
        place=Place("127.0.0.1", 1),
        number=0,
        run=b"r" * 16,
        config=config,
        task=task_of(config),
        begun=None,
        folder=folder,
    )
    made._mirror = Kept(state, heard_s)
    return made


def a_config() -> Config:
    return changed(read_recipe(DEFAULT), {"sync": "async", "learners": 2, "device": "cpu"})


def mirrored(config: Config, version: int, offset: int, fill: float) -> MirroredState:
    items = sum(parameter.numel() for parameter in built_on(CPU, task_of(config), config).parameters())
    many = len(list(built_on(CPU, task_of(config), config).parameters()))
    tensors = {
        "weights": torch.full((items,), fill),
        "state.momentum_buffer": torch.full((items,), 2 * fill),
        "steps": torch.full((many,), version),
    }
    return MirroredState(version=version, facts=facts(version, offset), tensors=tensors)


def test_a_run_goes_on_from_what_was_mirrored_without_any_checkpoint(tmp_path: Path) -> None:
    config = a_config()
    assert keeper(tmp_path / "copy", config, mirrored(config, 7, 224, 0.5)).save(heard_s=101.0)
    start = prepare(read_config(RunDir(tmp_path / "copy")), resume=tmp_path / "copy")
    assert start.hold is not None and start.checkpoint is not None
    start.hold.release()
    saved = start.checkpoint
    assert saved.update == 7 and saved.state["standing"]["applied"] == saved.state["standing"]["offset"] == 224
    assert all(bool((vector == 0.5).all()) for vector in saved.files["weights"].values())
    assert bool((saved.files["server"]["state.momentum_buffer"] == 1.0).all())


def test_the_newer_of_mirror_and_checkpoint_counts(tmp_path: Path) -> None:
    config, folder = a_config(), tmp_path / "copy"
    keeper(folder, config, mirrored(config, 7, 224, 0.5)).save(heard_s=101.0)
    keeper(folder, config, mirrored(config, 6, 192, 0.25)).save(heard_s=101.0)
    found = newest(RunDir(folder).checkpoints, print)
    assert found is not None and found.update == 7
    keeper(folder, config, mirrored(config, 9, 288, 0.75)).save(heard_s=101.0)
    found = newest(RunDir(folder).checkpoints, print)
    assert found is not None and found.update == 9 and float(found.files["server"]["weights"][0]) == 0.75


def test_a_mirror_that_was_lost_long_before_the_run_promises_nothing(tmp_path: Path) -> None:
    config = a_config()
    state = mirrored(config, 7, 224, 0.5)
    assert keeper(tmp_path / "a", config, state, heard_s=100.0).save(heard_s=104.0)
    assert not keeper(tmp_path / "b", config, state, heard_s=100.0).save(heard_s=106.0)
    assert not keeper(tmp_path / "c", config, None).save(heard_s=100.0)
    empty = replace(state, facts=json.dumps(json.loads(state.facts) | {"book": None}))
    keeper(tmp_path / "d", config, empty).save(heard_s=100.0)
    assert not (tmp_path / "d").exists()  # nothing had happened yet
