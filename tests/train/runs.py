"""Small trainings, in the process of the test: learners are forked from it, and torch is loaded already."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.errors import OffbeatError
from offbeat.runs.run_folder import RunDir
from offbeat.train import launch
from offbeat.train.checkpoint import newest
from offbeat.train.config import Config
from offbeat.train.config_files import changed
from offbeat.train.tasks import Task, Tensors

FEATURES, CLASSES = 12, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a run."""

    end: dict[str, Any]
    weights: dict[str, Tensor]
    metrics: list[dict[str, Any]]
    run: RunDir
    notes: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # other than records, that learners have printed

    def learners(self) -> list[dict[str, Tensor]]:
        """What each learner had for itself at the end: its buffers, its scaler, its clock."""
        last = newest(self.run.checkpoints, lambda line: None)
        assert last is not None
        names = sorted(name for name in last.files if name.startswith("learner-"))
        return [dict(last.files[name]) for name in names]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 10), nn.ReLU(), nn.Linear(10, CLASSES))


def points(samples: int, tests: int = 16) -> tuple[Tensors, Tensors]:
    """Points of classes that straight lines part."""
    chance = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples + tests, FEATURES, generator=chance)
    targets = (inputs @ torch.randn(FEATURES, CLASSES, generator=chance)).argmax(1)
    return Tensors(inputs[:samples], targets[:samples]), Tensors(inputs[samples:], targets[samples:])


def small_task(samples: int = 96, build: Any = mlp, loss: Any = functional.cross_entropy) -> Task:
    train, test = points(samples)
    return Task(train=train, test=test, build=build, loss=loss)


def config_of(**changes: Any) -> Config:
    """On the CPU, with two learners, saved once; `changes` as for `reading.changed`."""
    base = Config(name="small", device="cpu", learners=2, sync="ring", seed=3)
    base = changed(base, {"train": {"batch_size": 4, "lr_batch": 4, "epochs": 4}, "save": {"every_epochs": 0}})
    return changed(base, changes)


def trained(folder: Path, task: Task | None = None, **changes: Any) -> Outcome:
    """Train in a new folder inside of this one. `OffbeatError` if it does not come to its end."""
    config = config_of(**changes)
    name = f"run-{len(list(folder.iterdir())) + 1}"
    start = launch.prepare(config, run_dir=folder / name, task=small_task() if task is None else task)
    notes: list[str] = []
    lines: list[str] = []

    def hear(record: Any) -> None:
        if record["kind"] == "note":
            notes.append(record["text"])

    try:
        result = launch.launch(start, hear, lambda who, line: lines.append(f"{who}: {line}"))
    except OffbeatError:
        print(*lines[-60:], sep="\n")  # the traceback of a learner
        raise
    run = start.run
    weights = safetensors.torch.load_file(run.weights)
    return Outcome(end=result.end, weights=weights, metrics=run.read_metrics(), run=run, notes=notes, lines=lines)
