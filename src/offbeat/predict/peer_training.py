"""Peers in virtual time: when updates are made and arrive is simulated, and every learner has a replica that is real.

The simulation says in which order a replica gets its own updates and those of others; the arithmetic follows it, one
minibatch after the other. Epochs have no ends here: learners meet every `average` updates, and at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from offbeat.codecs.feedback import Feedback
from offbeat.policies.peers import rule_of
from offbeat.predict.arithmetic import Arithmetic
from offbeat.predict.timelines import Minibatch, Step, Update, spent_of
from offbeat.server.shard import optimizers
from offbeat.server.shard.in_process import InProcessServer
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.peer_run import PeerSimulation
from offbeat.simulate.sample_source import Batch, Stream, count_samples
from offbeat.train.config_files import changed
from offbeat.train.trainer import built_on

_SLOT = -1


class PeerReplicas(Arithmetic):
    """The weights of every learner. `replica.current` is their mean, after `show_mean`."""

    def __init__(self, trainer: Any, *, alone: bool = True, gradients: str | None = None) -> None:
        super().__init__(trainer, alone=True, gradients=gradients)
        self.why_alone = "each learner has its own weights"
        self.peers = rule_of(trainer.config.sync)
        clip = trainer.config.train.clip_norm
        learners = range(trainer.learners)
        self.owns = [InProcessServer(trainer.model, trainer.optimizer, clip_norm=clip) for _ in learners]
        for learner in learners if self.peers.start == "own" else ():
            config = changed(trainer.config, {"seed": trainer.config.seed + learner})
            trained = [one for one in built_on(trainer.device, trainer.task, config).parameters() if one.requires_grad]
            self.owns[learner].load(torch.cat([one.detach().reshape(-1) for one in trained]))
        codec, items = self.peers.codec, self.replica.table.items
        self._coding = [Feedback(codec, items, learner, len(self.owns)) for learner in learners] if codec else []
        self._updates: dict[tuple[int, int], tuple[Tensor, int]] = {}  # and how many replicas are without it

    def begin(self, learner: int, batch: Batch) -> None:
        """The gradient of a minibatch on the replica as it is."""
        own = self.owns[learner]
        own.write_model(own.current)
        with self._buffers_of(learner):
            loss = self._backward(batch)
        own.take_gradient(_SLOT)
        self.loss_sum += float(loss) * count_samples(batch)
        self.loss_of += count_samples(batch)

    def make(self, learner: int, number: int, version: int) -> None:
        """An update of that gradient, which the others will get."""
        own, before = self.owns[learner], self.owns[learner].current.clone()
        self.trainer.set_rate(version)
        own.apply([_SLOT], [1.0], optimizers.describe(self.trainer.optimizer)[1])
        own.keep(())
        if not self.peers.sends:
            return
        update = own.current - before
        if self._coding:
            coding = self._coding[learner]
            coding.encode(update, torch.empty(coding.size_bytes, dtype=torch.uint8))
            own.load(before.add_(update))
        if len(self.owns) > 1:
            self._updates[learner, number] = update, len(self.owns) - 1

    def receive(self, learner: int, source: int, number: int) -> None:
        update, left = self._updates.pop((source, number))
        if left > 1:
            self._updates[source, number] = update, left - 1
        self.owns[learner].current.add_(update)

    def mean(self) -> Tensor:
        return torch.stack([own.current for own in self.owns]).mean(0)

    def average(self) -> None:
        mean = self.mean()
        for own in self.owns:
            own.load(mean)

    def show_mean(self) -> None:
        """For an evaluation."""
        self.replica.load(self.mean())


class PeerTimeline(PeerSimulation):
    """The simulation with samples; `replicas` follows it, if there are any."""

    lock_step = True

    def __init__(self, strategy: str, cluster: Cluster, source: Stream, *, keep_spans: int = 0) -> None:
        super().__init__(strategy, cluster, 10**12, keep_spans)
        self.source = source
        self.replicas: PeerReplicas | None = None
        self._batches: list[Batch | None] = [None] * cluster.learners
        self._made: list[Update] = []

    def begun(self, learner: int) -> bool:
        batch = self._batches[learner] = self.source.take(learner)
        if batch is not None and self.replicas is not None:
            self.replicas.begin(learner, batch)
        return batch is not None

    def updated(self, learner: int, number: int, age: int) -> None:
        batch = self._batches[learner]
        assert batch is not None
        self.source.settle(batch)
        if self.replicas is not None:
            self.replicas.make(learner, number, self.made - 1)
        version = self.made - 1 - (age if self.rule.sends else 0)
        work = Minibatch(self.made, learner, version, (Step(-1, batch),))
        self._made.append(Update(self.made, self.now, (work,), (1.0,), version, spent_of(self.tally)))

    def received(self, learner: int, source: int, number: int) -> None:
        if self.replicas is not None:
            self.replicas.receive(learner, source, number)

    def averaged(self) -> None:
        if self.replicas is not None:
            self.replicas.average()

    def stream(self) -> Iterator[Update]:
        for _ in self.turns():
            if not self.source.over:  # after the last update all arrive everywhere, and the last mean is taken
                yield from self._made
                self._made.clear()
        yield from self._made
