"""One real training, started from here, and what it left: the piece that all benchmarks of training are made of.

The times are those of the run itself: seconds of training, evaluation left out. The first stretch (up to the first
evaluation) has the start of the processes and of torch's caches in it, so rates are over what came after it; a run of
one epoch has nothing else.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.runs.log import RunLog, read_log
from offbeat.runs.run_folder import Evaluated, RunDir
from offbeat.runs.untrusted import UnusableFile, read_json
from offbeat.train.config import Config
from offbeat.train.config_files import changed
from offbeat.train.launch import launch, prepare


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained(Evaluated):
    """What one run left."""

    config: Config  # with everything filled in
    log: RunLog
    metrics: tuple[Mapping[str, Any], ...]  # an evaluation each
    energy: Mapping[str, Any] | None  # energy.json

    @property
    def _steady(self) -> tuple[float, int, int]:
        """Seconds, updates and samples after the first evaluation."""
        first, last = self.metrics[0], self.metrics[-1]
        if first is last:
            return self.seconds, self.updates, self.samples
        seconds, updates, samples = (last[name] - first[name] for name in ("seconds", "update", "samples"))
        return seconds, updates, samples

    @property
    def seconds_per_update(self) -> float:
        seconds, updates, _ = self._steady
        return seconds / max(1, updates)

    @property
    def samples_per_s(self) -> float:
        seconds, _, samples = self._steady
        return samples / seconds


def train_once(config: Config, folder: Path) -> Trained:
    """Train in a new folder, which is removed again; `OffbeatError` where the run failed or was ended by a signal."""
    said: list[str] = []
    start = prepare(config, run_dir=folder)
    try:
        result = launch(start, lambda record: None, lambda name, line: said.append(f"{name}: {line}"))
        if result.signal:
            raise SystemExit(128 + result.signal)
        run = RunDir(folder)
        metrics = tuple(run.read_metrics())
        if not metrics:
            last = f": {said[-1]}" if said else ""
            raise OffbeatError(f"bench: '{config.sync}' ended without an evaluation{last}")
        energy = None
        with suppress(UnusableFile):
            energy = read_json(run.energy(1))
        return Trained(config=start.config, log=read_log(run.log(1)), metrics=metrics, energy=energy)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def train_for(config: Config, samples: int, folder: Path, minibatches: int = 150) -> Trained:
    """So many epochs that each learner has computed enough minibatches of the set's samples, and at least three."""
    batch = config.train.batch_size * config.train.accumulate
    epochs = max(3, math.ceil(minibatches * batch * config.learners / samples) + 1)
    return train_once(
        changed(config, {"train": {"epochs": epochs, "stop_at": 0.0}, "save": {"every_epochs": 0}}), folder
    )
