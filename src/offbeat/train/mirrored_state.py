"""What is mirrored to a successor (`server.remote.mirror`): a checkpoint, when the run's host is lost.

Weights, the optimizer's state, the ledger of samples and what the policy keeps are those of the last update that was
mirrored. What learners have for themselves (buffers such as batch norm's statistics) is that of the newest checkpoint
that was copied. Gradients that waited for an update to be full are not in it: their samples are computed again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from offbeat.network import keys
from offbeat.network.connections import Place
from offbeat.runs.run_folder import RunDir
from offbeat.server.parameter_layout import model_tensors, write_tensors
from offbeat.server.remote.mirror import WAIT_S, Mirror, MirroredState
from offbeat.train.checkpoint import Checkpoint, newest, save
from offbeat.train.config import Config
from offbeat.train.config_files import as_json
from offbeat.train.learning_rate import STATES, optimizer_of, pace_of
from offbeat.train.served_trainer import standing_of
from offbeat.train.tasks import Task
from offbeat.train.trainer import TrainingState, built_on

_SPARE_BYTES = 1 << 20


@dataclass(slots=True, kw_only=True)
class StateKeeper:
    """Of one successor. `begun`: the checkpoint that the run had begun from."""

    place: Place
    number: int
    run: bytes
    config: Config
    task: Task
    begun: Checkpoint | None
    folder: Path
    _mirror: Mirror | None = field(default=None, init=False)

    def start(self) -> None:
        """In the process that keeps it."""
        items = sum(
            parameter.numel() for parameter in built_on(torch.device("cpu"), self.task, self.config).parameters()
        )
        most = 8 * items * (2 + STATES.get(self.config.train.optimizer, 1)) + _SPARE_BYTES
        self._mirror = Mirror(self.place, keys.key_of(), self.number, self.run, most)
        self._mirror.start()

    def save(self, heard_s: float) -> bool:
        """See `succession.Keeper`. The run goes on without a mirror after `WAIT_S`, if it lives so long."""
        assert self._mirror is not None
        state = self._mirror.newest()
        if state is None:
            return False
        self._save(state)
        return heard_s < self._mirror.heard_s + WAIT_S / 2

    def _save(self, mirrored: MirroredState) -> None:
        run, facts = RunDir(self.folder), json.loads(mirrored.facts)
        base = 0 if self.begun is None else self.begun.update
        update = base + mirrored.version
        copied = newest(run.checkpoints, lambda line: None)
        if (copied is not None and copied.update >= update) or facts["book"] is None:
            return
        before = TrainingState() if self.begun is None else TrainingState(**self.begun.state["standing"])
        config, samples = self.config, len(self.task.train)  # type: ignore[arg-type] # a map-style set has a length
        state: dict[str, Any] = {"learners": config.learners, "stages": 1, "processes": config.learners, "last": {}}
        if copied is None:
            pace = pace_of(config.train, line=config.sync, learners=config.learners, samples=samples, parts=1)
            state |= {"sync": config.sync, "optimizer": config.train.optimizer, "samples": samples}
            state["pace"] = {"per_epoch": pace.per_epoch, "shift": 0}
        else:
            state = dict(copied.state)
        model = built_on(torch.device("cpu"), self.task, config)
        if copied is not None:
            model.load_state_dict(copied.files["weights"])
        parts, _ = model_tensors(model, optimizer_of(model, config.train))
        write_tensors(mirrored.tensors["weights"], parts.trained)
        files = {} if copied is None else {name: dict(kept) for name, kept in copied.files.items()}
        files |= {"weights": dict(model.state_dict()), "server": dict(mirrored.tensors)}
        state["standing"] = asdict(standing_of(before, base, facts))
        if not run.config.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            run.write_config(as_json(config))
        save(run.checkpoints, update, state, files, keep=1)
