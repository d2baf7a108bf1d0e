"""A run made again from its log: the same gradients at the same versions, the same updates in the same order.

The log says which samples each push came from, at which version they were computed, what the policy made of it and what
the optimizer was told; the same code computes it again, so the weights at the end are those of the run, bit for bit, on
the same machine. What learners do by themselves in between (Downpour, local SGD) is not in the log, and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from offbeat.errors import LogError, ReplayError, RequestError
from offbeat.policies import Apply, Drop, Pushed
from offbeat.policies.events import EVENTS, as_text, from_text
from offbeat.server.data import Orders
from offbeat.server.replica import Replica
from offbeat.server.session import Setting
from offbeat.server.wire import Hyper
from offbeat.trace import RunLog

Batch = list[tuple[int, int, int]]  # (epoch, start, count) of each lease
LossOf = Callable[[nn.Module, Sequence[int]], Tensor]


def retrain(
    log: RunLog, model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: LossOf, *, samples: int, shuffled: bool
) -> int:
    """Train the model, which has the initial weights, as the log says; it ends with the run's. Gives the version.

    `loss_of(model, indices)` is the loss on these samples of the data set, which has `samples`; `shuffled` says whether
    the run's loader shuffled. `ReplayError` where the policy does not say what the log has.
    """
    run = log.run
    line, expect = run.get("strategy"), run.get("expect")
    if not isinstance(line, str) or not isinstance(expect, int) or run.get("simulated") is not False:
        raise LogError("the log is not that of a real run with a parameter server")
    setting = Setting(line=line, learners=expect, clip_norm=float(run.get("clip_norm", 0.0)))
    policy = setting.policy()
    if policy.rule.delta or policy.rule.fetch_every or setting.keeps_reads:
        raise RequestError(f"'{line}': what its learners did between pushes is not in the log")
    again = _Retraining(model, optimizer, setting, run.get("gradients"))
    orders = Orders(int(run.get("seed", 0)), samples, shuffled=shuffled)
    for number, record in enumerate(log.decisions, start=1):
        event = from_text(str(record["event"]))
        if not isinstance(event, EVENTS):
            raise ReplayError(f"decision {number}: '{record['event']}' is not an event")
        commands = policy.handle(event)
        if [as_text(command) for command in commands] != record["commands"]:
            raise ReplayError(f"decision {number}, '{record['event']}': the policy does not say what the log has")
        dropped = {command.ticket for command in commands if isinstance(command, Drop)}
        if isinstance(event, Pushed) and "hyper" in record:
            again.hypers[event.learner] = tuple(record["hyper"])
        if isinstance(event, Pushed) and event.ticket not in dropped:
            batch = [(epoch, start, count) for epoch, start, count in record.get("batch", ())]
            again.compute(event, batch, lambda batch=batch: loss_of(model, orders.indices(batch)))  # type: ignore[misc]  # mypy has no defaults of lambdas
        for command in commands:
            if isinstance(command, Apply):
                again.apply(command, by_samples=policy.cancels)
        again.keep({seat.version for seat in policy.seats.values()})
    return again.finish()


class _Retraining:
    """A replica, and what the log has told of pushes."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting, gradients: str | None
    ) -> None:
        self.replica = Replica(model, optimizer, clip_norm=setting.clip_norm, gradients=gradients)
        self.batches: dict[int, Batch] = {}  # by ticket
        self.hypers: dict[int, tuple[Hyper, ...]] = {}  # by learner: as it said last
        self.pushers: dict[int, int] = {}

    def compute(self, event: Pushed, batch: Batch, loss: Callable[[], Tensor]) -> None:
        """The gradient of a push, at its version."""
        replica = self.replica
        if event.version not in replica.weights:
            raise ReplayError(f"'{as_text(event)}': version {event.version} is not there any more")
        replica.write_model(replica.weights[event.version])
        for parameter in replica.parts.trained:
            parameter.grad = None
        loss().backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        replica.take_gradient(event.ticket)
        self.batches[event.ticket], self.pushers[event.ticket] = batch, event.learner

    def apply(self, command: Apply, *, by_samples: bool) -> None:
        """An update, as the coordinator orders it."""
        tickets, scales = list(command.tickets), list(command.scales)
        hyper = self.hypers[self.pushers[tickets[-1]]]
        if by_samples and all(self.batches[ticket] for ticket in tickets):
            pairs = sorted(zip(tickets, scales, strict=True), key=lambda pair: self.batches[pair[0]])
            tickets, scales = [ticket for ticket, _ in pairs], [scale for _, scale in pairs]
        self.replica.apply(tickets, scales, hyper)

    def keep(self, versions: set[int]) -> None:
        """Only these may still be asked for, and the current one."""
        self.replica.keep(versions)

    def finish(self) -> int:
        self.replica.write_model(self.replica.current)
        return self.replica.version
