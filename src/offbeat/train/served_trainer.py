"""Learners of a parameter server: which minibatch counts, and when, is the policy's to say.

Samples are leased, a minibatch at a time. The servers hold weights and optimizer; what a learner has for itself are its
buffers, and under local-sgd and Downpour an optimizer of its own. In a pause every learner hands in that part, by way
of the run's folder, and the one who leads evaluates the servers' weights.
"""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from offbeat.policies import create
from offbeat.processes.watchdog import Phase
from offbeat.server.learner.connection import RunOverError
from offbeat.server.learner.join import join_run
from offbeat.server.learner.served_learner import ServedLearner
from offbeat.server.wire import EnterPause
from offbeat.spec import count_of
from offbeat.train.checkpoint import Checkpoint
from offbeat.train.config import Config
from offbeat.train.device_input import Gathered, channels_last, readers_of, resident_of
from offbeat.train.host_facts import served_facts
from offbeat.train.learner_snapshot import HostName, LearnerSnapshot, Traffic, load_optimizer, optimizer_tensors
from offbeat.train.learning_rate import correction_of, optimizer_of
from offbeat.train.tasks import collate_of
from offbeat.train.trainer import Trainer, TrainingState, piece_of, size_of


def setting_of(config: Config, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """What the services of a run must know beyond the line: when to pause, and where to go on."""
    kept = None if checkpoint is None else checkpoint.state["standing"]["server"]
    return {
        "again": config.cancelled == "again",
        **correction_of(config, config.learners),
        "pause_epochs": True,
        "pause_every": config.save.every_updates,
        "book": None if kept is None else kept["book"],
        "memory": None if kept is None else kept["memory"],
    }


def standing_of(before: TrainingState, base: int, facts: Mapping[str, Any]) -> TrainingState:
    """Where a run stands, by what its coordinator says; `before` and `base`: where it began, and at which update."""
    samples, dropped = facts["samples"], dict(before.dropped)
    for fate, many in samples.items():
        if fate != "applied" and not fate.startswith("computed again: "):
            name = fate.removeprefix("dropped: ")
            dropped[name] = dropped.get(name, 0) + many
    delays = Counter(before.delays)
    delays.update({str(delay): many for delay, many in facts["delays"]})
    old, gradients = before.staleness or 0.0, before.gradients + facts["gradients"]
    return TrainingState(
        epoch=facts["book"]["epoch"],
        update=base + facts["version"],
        seconds=before.seconds + facts["seconds"],
        applied=before.applied + samples.get("applied", 0),
        dropped=dropped,
        held=facts["held"],
        offset=sum(end - start for start, end in facts["book"]["settled"]),
        staleness=(old * before.gradients + facts["staleness"] * facts["gradients"]) / max(1, gradients),
        gradients=gradients,
        delays=dict(delays),
        epoch_end=facts["epoch_end"],
        halt=facts["halt"],
        server={"book": facts["book"], "memory": facts["memory"]},
    )


class ServedTrainer(Trainer):
    """See the module's text."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        config = self.config
        self._rule = create(config.sync, expect=self.learners).rule
        self._own_steps = self._rule.delta or self._rule.fetch_every > 0
        self._hosts: dict[int, HostName] = {}  # of learners, as they told last
        self._residuals_lost = 0  # of learners, as far as it was told
        self._base = self.at.update  # versions of the servers are counted from here
        self.at.drop_held("its update still waited for other gradients when the run was saved")
        if self.part is not None and self._own_steps and self.part.optimizer:
            load_optimizer(self.optimizer, self.part.optimizer)
        self._twins_optimizer: torch.optim.Optimizer | None = None
        self.learner: ServedLearner = join_run(
            config.sync,
            servers=config.servers,
            slow=config.slow,
            seed=config.seed,
            setting=setting_of(config, self.checkpoint),
        )

    def traffic(self) -> Traffic | None:
        return Traffic(self.learner.sent_bytes, self.learner.received_bytes)

    def ask_to_stop(self) -> None:
        super().ask_to_stop()
        self.learner.request_end_soon()  # also while it waits, where no minibatch begins

    def fit(self) -> None:
        config, learner = self.config, self.learner
        train = config.train
        learner.on_pause = self._on_pause
        learner.on_lease = self._on_lease
        loader: Any = self._loader()
        learner.server_state = None if self.checkpoint is None else self.checkpoint.files.get("server")
        self.set_rate(self._base)
        try:
            _, _, loader = learner.prepare(self.model, self.optimizer, loader, clip_norm=train.clip_norm or None)
            if self.checkpoint is not None and learner.version == 0:  # the run stands where it was saved
                self.load_own(self.checkpoint)  # again: joining has made all buffers those of the first
                self._load_residuals(self.checkpoint)
            if self.number == 0:
                self.notes += learner.notes
                self.tell_beginning()
            loader.epoch = self.at.epoch
            while loader.epoch < train.epochs:
                self.at.epoch = loader.epoch
                self.forget_losses()
                for batch in loader:
                    if self.stop_wanted:
                        learner.request_end()
                    self._minibatch(batch)
        except RunOverError:
            pass
        finally:
            learner.close()

    def _load_residuals(self, checkpoint: Checkpoint) -> None:
        """What this learner had not sent yet. Those of learners that are not in the run any more are lost."""
        if self.part is not None:
            self.learner.load_residuals(self.part.residuals)
        self.note_lost_residuals(checkpoint)

    def _loader(self) -> DataLoader[Any]:
        """Of samples that lie on the device, where they fit; else of readers, which read ahead of the leases."""
        config = self.config
        many = config.train.batch_size * config.train.accumulate
        resident = resident_of(self.task.train, self.device, place=config.data.place)
        samples = self.task.train if resident is None else Gathered(resident, self.samples)
        readers = readers_of(samples, config.data.workers, batch_size=many, learners=self.learners)
        return DataLoader(
            samples,
            batch_size=many,
            shuffle=True,
            num_workers=readers if resident is None else 0,
            collate_fn=collate_of(samples),
            pin_memory=self.device.type == "cuda" and resident is None,
            generator=torch.Generator().manual_seed(config.seed),
        )

    def _minibatch(self, batch: Any) -> None:
        learner, scaler = self.learner, self.precision.scaler
        paused_s, began_s = learner.paused_s, time.monotonic()
        many = size_of(batch)
        counted = False
        self.beat(Phase.WAITING)
        with learner.minibatch() as minibatch:
            self.beat(Phase.COMPUTING)
            epoch, place = learner.batch_position
            self.set_chance(epoch, place)
            total = torch.zeros((), device=self.device)
            passes = min(self.config.train.accumulate, many)
            for at in range(passes):
                start, end = many * at // passes, many * (at + 1) // passes
                inputs, targets = self.moved(piece_of(batch, start, end) if passes > 1 else batch)
                if self.device.type == "cuda":
                    inputs, targets = channels_last((inputs, targets))
                loss = self.loss_of(inputs, targets)
                self.backward(loss * ((end - start) / many) if passes > 1 else loss)
                total += loss.detach() * ((end - start) / many)
            if scaler is not None:
                gradients = (p.grad for p in self.model.parameters() if p.grad is not None)
                scaler.update(scaler.unscale(gradients))  # before the step, in which the run may be saved
            minibatch.loss = total
            minibatch.samples = many
            update = self._base + learner.version
            self.set_rate(update)
            self.count(total, many)  # before the step, in which an epoch may end
            counted = True
            self.beat(Phase.WAITING)
            self.optimizer.step()  # pushes, waits as the policy says, fetches
        self.optimizer.zero_grad(set_to_none=True)
        if minibatch.cancelled:
            if counted:
                self.forget(many)
            return
        ended_s = time.monotonic()
        pushed_s = learner.pushed_s if learner.pushed_s >= began_s else ended_s  # else it was a step of its own
        self.compute_s += pushed_s - began_s
        self.wait_s += max(0.0, ended_s - pushed_s - (learner.paused_s - paused_s))
        self.tell_progress(update, total)

    def _on_lease(self, *, waits: bool) -> None:
        """The loader waits for a lease, or has one and reads its samples."""
        self.beat(Phase.WAITING if waits else Phase.READING)

    # --- pauses -----------------------------------------------------------------------------------------------------

    def own_part(self) -> LearnerSnapshot:
        part = super().own_part()
        if self._own_steps:
            part.optimizer = optimizer_tensors(self.optimizer)
        part.residuals = self.learner.residuals()
        part.host = HostName(socket.gethostname(), self.learner.host_number)
        return part

    def network_facts(self, parts: Mapping[int, LearnerSnapshot]) -> dict[str, Any]:
        self._hosts |= {learner: part.host for learner, part in parts.items() if part.host.name}
        moved = {learner: part.traffic for learner, part in parts.items() if part.traffic is not None}
        return served_facts(self._hosts, moved, self.learner.server_hosts)

    def _on_pause(self, pause: EnterPause) -> bool:
        if not pause.lead:
            try:
                self.run.hand_in(pause.number, self.number, self.own_part().encode())
            except OSError as error:  # training goes on
                self.note(f"cannot write to {self.run.path}: {error.strerror}")
            return False
        facts = json.loads(pause.facts)
        if not facts["seeded"] or facts["book"] is None:  # nothing has happened yet
            return True
        return self.evaluate_and_save(self._standing(facts), self.run.handed_in(pause.number))

    def _standing(self, facts: dict[str, Any]) -> TrainingState:
        if facts["residuals_lost"] > self._residuals_lost:
            self._residuals_lost = facts["residuals_lost"]
            self.note(f"the residuals of {count_of(self._residuals_lost, 'learner')} that ended are lost")
        return standing_of(self.at, self._base, facts)

    def still_leads(self) -> bool:
        return not self.learner.is_given_up

    def load_weights(self, twin: nn.Module) -> None:
        if self._twins_optimizer is None:
            self._twins_optimizer = optimizer_of(twin, self.config.train)
        self.learner.load_current(twin, self._twins_optimizer)

    def optimizer_files(self) -> dict[str, dict[str, Tensor]]:
        return {"server": self.learner.snapshot()}
