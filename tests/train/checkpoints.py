"""What the tests of checkpoints share."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

from offbeat.train.checkpoint import Checkpoint, save


def silence(line: str) -> None:
    raise AssertionError(f"nothing was to be told, but: {line}")


def put(folder: Path, update: int, value: float | None = None, keep: int = 10) -> Path:
    files = {"weights": {"w": torch.full((3,), float(update if value is None else value))}, "more": {}}
    return save(folder, update, {"epoch": update}, files, keep=keep)


def value_of(found: Checkpoint | None) -> float:
    assert found is not None
    return float(found.files["weights"]["w"][0])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def dead_process() -> int:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid
