"""Folders of runs and files of benchmarks, written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offbeat.runs.log import Span

Line = Mapping[str, Any]


def span(
    learner: int, what: str, start_s: float, end_s: float, version: int = 0, *, cancelled: bool = False
) -> dict[str, Any]:
    return {"kind": "span", **Span(learner, what, start_s, end_s, version, cancelled)._asdict()}


def decision(event: str, *commands: str) -> dict[str, Any]:
    return {"kind": "decision", "event": event, "commands": list(commands), "why": [""] * len(commands)}


def evaluation(update: int, seconds: float, accuracy: float | None, **more: Any) -> dict[str, Any]:
    return {"kind": "evaluated", "update": update, "seconds": seconds, "accuracy": accuracy, **more}


def config(sync: str, learners: int, **train: Any) -> dict[str, Any]:
    return {
        "name": "tiny",
        "sync": sync,
        "learners": learners,
        "model": {"name": "mlp", "options": {}},
        "data": {"name": "digits", "options": {}},
        "train": {"precision": "fp32", "batch_size": 8, **train},
    }


def write_lines(path: Path, lines: Sequence[Line]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def write_run(
    folder: Path,
    *,
    config: Any = None,
    head: Mapping[str, Any] | None = None,
    log: Sequence[Line] | None = None,
    metrics: Sequence[Line] | None = None,
    machine: Any = None,
    energy: Any = None,
    segment: str = "",
) -> Path:
    """A folder with what is given; `segment` is ".2" for what came after a resume."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if log is not None:
        first = {"kind": "run", "format": 1, "simulated": False, **(head or {})}
        write_lines(folder / f"log{segment}.jsonl", [first, *log])
    if metrics is not None:
        write_lines(folder / "metrics.jsonl", metrics)
    if machine is not None:
        (folder / "machine.json").write_text(json.dumps(machine), encoding="utf-8")
    if energy is not None:
        (folder / f"energy{segment}.json").write_text(json.dumps(energy), encoding="utf-8")
    return folder


def write_result(path: Path, measured: str, rows: Sequence[Line], **more: Any) -> Path:
    path.write_text(json.dumps({"measured": measured, "rows": list(rows), **more}), encoding="utf-8")
    return path


# --- a small run, for tests that need any -------------------------------------------------------------------------


def any_run(folder: Path, *, strategy: str = "async", learners: int = 2, accuracy: float = 0.5, **more: Any) -> Path:
    """Two learners that push twice each, and two evaluations at the end."""
    log = [
        span(0, "compute", 0.0, 1.0, 0),
        decision("pushed 0 t1 v0 n8 @1.0", "apply t1", "send 0"),
        span(1, "compute", 0.0, 1.5, 0),
        decision("pushed 1 t2 v0 n8 @1.5", "apply t2", "send 1"),
        span(0, "compute", 1.0, 2.0, 1),
        decision("pushed 0 t3 v1 n8 @2.0", "apply t3", "send 0"),
        span(1, "wait", 1.5, 2.0, 2),
        span(1, "compute", 2.0, 3.0, 2),
        decision("pushed 1 t4 v2 n8 @3.0", "apply t4", "send 1"),
    ]
    given: dict[str, Any] = {
        "config": config(strategy, learners),
        "head": {"strategy": strategy, "learners": learners, "expect": learners},
        "log": log,
        "metrics": [evaluation(4, 3.0, accuracy, loss=1.0, samples=32, dropped={})] * 2,  # so that it is held
    }
    return write_run(folder, **(given | more))
