"""The learner of an all-reduce in a group of one, and schedulers that count versions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, ExponentialLR, LRScheduler, SequentialLR, StepLR

from offbeat.errors import RequestError
from offbeat.server.learner.reduced_learner import ReducedLearner
from offbeat.server.learner.served_learner import follow


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReducedLearner]:
    for name in ("MASTER_ADDR", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OFFBEAT_STRATEGY", "native")
    alone = ReducedLearner("native")
    yield alone
    alone.close()


def steep(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = 100 * model(torch.ones(1, 2)).sum()
    loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
    return loss


def moved(parameters: list[Tensor], before: list[Tensor]) -> float:
    return float(torch.cat([(one - old).flatten() for one, old in zip(parameters, before, strict=True)]).norm())


def test_a_step_with_a_closure_is_clipped_and_checked_as_one_without(learner: ReducedLearner) -> None:
    model = nn.Linear(2, 1)
    wrapped, optimizer = learner.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), clip_norm=0.01)
    for _ in range(2):
        before = [one.detach().clone() for one in model.parameters()]
        loss = optimizer.step(lambda: steep(wrapped, optimizer))
        assert loss is not None and moved([one.detach() for one in model.parameters()], before) < 0.011
    with pytest.raises(RequestError, match=r"the model that learner.prepare returned was not used in this step"):
        optimizer.step(lambda: steep(model, optimizer))


def chained(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return ChainedScheduler([ConstantLR(optimizer, total_iters=3), ExponentialLR(optimizer, 0.9)])


def sequential(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [ConstantLR(optimizer, total_iters=2), ExponentialLR(optimizer, 0.9)], [2])


def plain(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return StepLR(optimizer, 2, gamma=0.5)


@pytest.mark.parametrize("make", [chained, sequential, plain])
def test_a_scheduler_that_follows_stands_where_as_many_steps_would_have_brought_it(make: object) -> None:
    assert callable(make)
    rates = []
    for follows in (False, True):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        scheduler = make(optimizer)
        optimizer.step()
        version = [0]
        if follows:
            follow(scheduler, partial(max, version))
        for version[0] in (1, 1, 4, 4):
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1]
