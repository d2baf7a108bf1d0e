"""A run made again from its log: the same gradients at the same versions, the same updates in the same order.

The log says which samples each push came from, at which version they were computed, what the policy made of it and what
the optimizer was told; the same code computes it again, so the weights at the end are those of the run, bit for bit, on
the same machine. What learners do by themselves in between (Downpour, local SGD) is not in the log, and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from offbeat.errors import LogError, ReplayError
from offbeat.predict.logged_timeline import LoggedTimeline
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
    replica = InProcessServer(
        model, optimizer, clip_norm=float(run.get("clip_norm", 0.0)), gradients=run.get("gradients")
    )
    orders = SampleOrder(int(run.get("seed", 0)), samples, shuffled=shuffled)
    compensation = timeline.policy.rate.compensation
    for update in timeline.stream():
        for work in update.works:
            replica.write_model(replica.weights[work.version])
            for parameter in replica.parts.trained:
                parameter.grad = None
            loss_of(model, orders.indices(work.batch)).backward()  # type: ignore[no-untyped-call]  # torch has no types
            replica.take_gradient(work.number)
        if timeline.hyper is None:
            raise ReplayError(f"update {update.version}: what the optimizer was told is not in the log")
        numbers, reads = [work.number for work in update.works], [work.version for work in update.works]
        replica.apply(
            numbers, update.scales, timeline.hyper, damping=update.damping, compensation=compensation, reads=reads
        )
        if update.needed is not None:
            replica.keep(update.needed)
    replica.write_model(replica.current)
    return replica.version
