"""A run made again from its log: the same gradients at the same versions, the same updates in the same order.

The log says which samples each push came from, at which version they were computed, what the policy made of it and what
the optimizer was told; the same code computes it again, so the weights at the end are those of the run, bit for bit, on
the same machine. What learners do by themselves in between (Downpour, local SGD) is not in the log, and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from msgspec import structs
from torch import Tensor, nn

from offbeat.collectives import memory
from offbeat.errors import LogError, ReplayError, RequestError
from offbeat.policies import Apply, Drop, Pushed
from offbeat.policies.events import EVENTS, as_text, from_text
from offbeat.server import optimizers
from offbeat.server.arena import Arena, Layout, ShardMemory
from offbeat.server.data import seed_of
from offbeat.server.lanes import clip_of
from offbeat.server.session import Setting
from offbeat.server.table import Parts, parts_of, table_of
from offbeat.server.wire import Hyper, Job
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
    orders = _Orders(int(run.get("seed", 0)), samples, shuffled)
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


class _Orders:
    """Which samples the positions of an epoch are."""

    def __init__(self, seed: int, samples: int, shuffled: bool) -> None:
        self.seed, self.samples, self.shuffled = seed, samples, shuffled
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def indices(self, batch: Batch) -> list[int]:
        found: list[int] = []
        for epoch, start, count in batch:
            if not self.shuffled:
                found += range(start, start + count)
                continue
            if epoch != self._epoch:
                chance = torch.Generator(device="cpu").manual_seed(seed_of(self.seed, epoch))
                self._epoch, self._order = epoch, torch.randperm(self.samples, generator=chance, device="cpu")
            found += self._order[start : start + count].tolist()
        return found


class _Retraining:
    """One shard in memory of its own, and the versions that gradients may still be asked at."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting, gradients: str | None
    ) -> None:
        self.parts: Parts
        self.parts, groups = parts_of(model, optimizer)
        rule, hypers = optimizers.describe(optimizer)
        table = table_of(
            model,
            self.parts,
            groups,
            rule=rule,
            states=optimizers.state_names(rule, hypers),
            clip_norm=setting.clip_norm,
            gradients=gradients,
        )
        segment, descriptor = memory.create(Layout(table, setting).size_bytes, "the replay")
        memory.close(descriptor)
        self.arena = Arena(segment, table, setting)
        self.shard = ShardMemory(self.arena, 0)
        self.arena.seed(self.parts)
        self.version = self.buffer = self.number = 0
        self.versions: dict[int, Tensor] = {0: self.arena.weights[0].clone()}
        self.free = list(range(setting.slots))
        self.slots: dict[int, int] = {}  # by ticket
        self.batches: dict[int, Batch] = {}
        self.absent: dict[int, set[int]] = {}
        self.hypers: dict[int, tuple[Hyper, ...]] = {}  # by learner: as it said last
        self.pushers: dict[int, int] = {}
        self.model = model

    def compute(self, event: Pushed, batch: Batch, loss: Callable[[], Tensor]) -> None:
        """The gradient of a push, at its version."""
        if event.version not in self.versions:
            raise ReplayError(f"'{as_text(event)}': version {event.version} is not there any more")
        self.arena._walk(self.versions[event.version], self.parts.trained, into_vector=False)
        for parameter in self.parts.trained:
            parameter.grad = None
        loss().backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        slot = self.free.pop(0)
        absent = {index for index, one in enumerate(self.parts.trained) if one.grad is None}
        for index, parameter in enumerate(self.parts.trained):
            if parameter.grad is not None:
                self.arena.fill(slot, index, parameter.grad)
        self.arena.clear(slot, absent)
        self.slots[event.ticket], self.batches[event.ticket] = slot, batch
        self.absent[event.ticket], self.pushers[event.ticket] = absent, event.learner

    def apply(self, command: Apply, *, by_samples: bool) -> None:
        """An update, as the coordinator orders it."""
        tickets, scales = list(command.tickets), list(command.scales)
        hyper = self.hypers[self.pushers[tickets[-1]]]
        if by_samples and all(self.batches[ticket] for ticket in tickets):
            pairs = sorted(zip(tickets, scales, strict=True), key=lambda pair: self.batches[pair[0]])
            tickets, scales = [ticket for ticket, _ in pairs], [scale for _, scale in pairs]
        self.number += 1
        job = Job(
            shard=0,
            number=self.number,
            kind="apply",
            version=self.version + 1,
            source=self.buffer,
            target=1 - self.buffer,
            slots=tuple(self.slots[ticket] for ticket in tickets),
            scales=tuple(scales),
            hyper=hyper,
            skip=tuple(sorted(set.intersection(*(self.absent[ticket] for ticket in tickets)))),
        )
        if self.arena.table.clip_norm:
            job = structs.replace(job, clip=clip_of(self.shard.norm(job), self.arena.table.clip_norm))
        self.shard.apply(job)
        self.version += 1
        self.buffer = job.target
        self.versions[self.version] = self.arena.weights[self.buffer].clone()
        for ticket in tickets:
            self.free.append(self.slots.pop(ticket))

    def keep(self, versions: set[int]) -> None:
        """Only these may still be asked for, and the current one."""
        oldest = min(versions, default=self.version)
        self.versions = {version: one for version, one in self.versions.items() if version >= oldest}

    def finish(self) -> int:
        self.arena._walk(self.arena.weights[self.buffer], self.parts.trained, into_vector=False)
        return self.version
