"""A run made again from its log: the same gradients at the same versions, the same updates in the same order.

The log says which samples each push came from, at which version they were computed, what the policy made of it and what
the optimizer was told; the same code computes it again, so the weights at the end are those of the run, bit for bit, on
the same machine. What learners do by themselves in between (Downpour, local SGD) is not in the log, and refused.
The loop is that of virtual training (`timelines.train`), on the timeline of the log.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from offbeat.errors import LogError, ReplayError
from offbeat.predict.logged_timeline import LoggedTimeline
from offbeat.predict.timelines import LossAndDrift, Minibatch, Update, train
from offbeat.runs.log import RunLog
from offbeat.server.learner.leased_loader import SampleOrder
from offbeat.server.shard.in_process import InProcessServer

LossOf = Callable[[nn.Module, Sequence[int]], Tensor]


def retrain(
    log: RunLog, model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: LossOf, *, samples: int, shuffled: bool
) -> int:
    """Train the model, which has the initial weights, as the log says; it ends with the run's. Gives the version.

    `loss_of(model, indices)` is the loss on these samples of the data set, which has `samples`; `shuffled` says whether
    the run's loader shuffled. `ReplayError` where the policy does not say what the log has.
    """
    run = log.run
    if run.get("simulated") is not False:
        raise LogError("the log is not that of a real run with a parameter server")
    timeline = LoggedTimeline(log)
    server = InProcessServer(
        model, optimizer, clip_norm=float(run.get("clip_norm", 0.0)), gradients=run.get("gradients")
    )
    orders = SampleOrder(int(run.get("seed", 0)), samples, shuffled=shuffled)
    learner = _LoggedLearner(timeline, server, lambda work: loss_of(model, orders.indices(work.batch)))
    train(timeline, learner, width=1, after=lambda update: False)
    server.write_model(server.current)
    return server.version


class _LoggedLearner:
    """Computes one minibatch after the other, and tells the optimizer what it was told in the run."""

    def __init__(
        self, timeline: LoggedTimeline, server: InProcessServer, loss_of: Callable[[Minibatch], Tensor]
    ) -> None:
        self._timeline, self._server, self._loss_of = timeline, server, loss_of
        self._computed: set[int] = set()

    def compute(self, works: Sequence[Minibatch]) -> None:
        for work in works:
            self._server.write_model(self._server.weights[work.version])
            for parameter in self._server.parts.trained:
                parameter.grad = None
            self._loss_of(work).backward()  # type: ignore[no-untyped-call]  # torch has no types
            self._server.take_gradient(work.number)
            self._computed.add(work.number)

    def apply(self, update: Update) -> None:
        self.compute([work for work in update.works if work.number not in self._computed])
        hyper = self._timeline.hypers.pop(update.version)
        if hyper is None:
            raise ReplayError(f"update {update.version}: what the optimizer was told is not in the log")
        numbers, reads = [work.number for work in update.works], [work.version for work in update.works]
        compensation = self._timeline.policy.rate.compensation
        self._server.apply(
            numbers, update.scales, hyper, damping=update.damping, compensation=compensation, reads=reads
        )
        self._computed.difference_update(numbers)

    def answer(self, work: Minibatch) -> LossAndDrift:
        raise ReplayError("a log has the answers: nobody asks")

    def keep(self, versions: Collection[int]) -> None:
        self._server.keep(versions)

    def forget(self, numbers: Collection[int]) -> None:
        self._server.drop(numbers)
