"""One process that trains on whole updates: what many learners must come to, written down without any of their code.

    an epoch      the permutation of its seed, cut into updates one behind the other
    an update     one forward and backward of all its samples, plain batch norm, one step of torch's optimizer

From offbeat it takes the seed of an epoch, and LARS and LAMB, which are tested against torch elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offbeat.server.learner.leased_loader import seed_of
from offbeat.train.lars import LAMB, LARS
from offbeat.train.tasks import Task

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """As simple as it can be said."""

    batch: int  # samples of an update, over all learners
    epochs: int
    seed: int
    least: int  # an end with fewer samples is joined to the update before; 1: it never is
    rate: Callable[[int], float]  # of an update
    optimizer: MakeOptimizer
    clip: float = math.inf


def sgd(*, momentum: float = 0.9, decay: float = 0.0, nesterov: bool = False) -> MakeOptimizer:
    """Matrices are decayed, vectors are not."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(_groups(model, decay), lr=1.0, momentum=momentum, nesterov=nesterov)

    return make


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1.0)


def lars(*, momentum: float, decay: float) -> MakeOptimizer:
    return lambda model: LARS(_adapted(model, decay), 1.0, momentum=momentum)


def lamb(*, decay: float) -> MakeOptimizer:
    return lambda model: LAMB(_adapted(model, decay), 1.0)


def _groups(model: nn.Module, decay: float) -> list[dict[str, object]]:
    matrices = [one for one in model.parameters() if one.ndim > 1]
    vectors = [one for one in model.parameters() if one.ndim <= 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]


def _adapted(model: nn.Module, decay: float) -> list[dict[str, object]]:
    matrices, vectors = _groups(model, decay)
    return [{**matrices, "adapt": True}, {**vectors, "adapt": False}]


def warmed_up(base: float, factor: float, warmup: int, total: int, *, cosine: bool = False) -> Callable[[int], float]:
    """In `warmup` equal steps from `base` to `base * factor`, then there, or down to 0 at `total` as half a cosine."""

    def rate(update: int) -> float:
        if update < warmup:
            return base + (base * factor - base) * update / warmup
        if not cosine:
            return base * factor
        return base * factor * 0.5 * (1 + math.cos(math.pi * (update - warmup) / (total - warmup)))

    return rate


def ends_of(samples: int, batch: int, least: int) -> Iterator[int]:
    """Where the updates of an epoch end."""
    ends = [*range(batch, samples, batch), samples]
    if len(ends) > 1 and samples - ends[-2] < least:
        del ends[-2]
    return iter(ends)


def expected(task: Task, recipe: Recipe) -> tuple[dict[str, Tensor], int]:
    """The state of the model at the end, and the number of updates."""
    torch.manual_seed(recipe.seed)
    model = task.build().train()
    optimizer = recipe.optimizer(model)
    samples, update = len(task.train), 0  # type: ignore[arg-type]  # a map-style set has a length
    for epoch in range(recipe.epochs):
        chance = torch.Generator().manual_seed(seed_of(recipe.seed, epoch))
        order = torch.randperm(samples, generator=chance).tolist()
        start = 0
        for end in ends_of(samples, recipe.batch, recipe.least):
            chosen = [task.train[at] for at in order[start:end]]
            inputs, targets = (torch.stack(column) for column in zip(*chosen, strict=True))
            optimizer.zero_grad()
            task.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]  # torch has no types for it
            if any(not one.grad.isfinite().all() for one in model.parameters() if one.grad is not None):
                start, update = end, update + 1  # left out
                continue
            if recipe.clip < math.inf:
                nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate(update)
            optimizer.step()
            start, update = end, update + 1
    return model.state_dict(), update


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest weight. Names and whole numbers must be the same."""
    assert one.keys() == other.keys()
    floats = [name for name, tensor in other.items() if tensor.is_floating_point()]
    assert all(torch.equal(one[name], other[name]) for name in other.keys() - set(floats))
    largest = max(float(tensor.abs().max()) for name, tensor in other.items() if name in floats)
    return max(float((one[name] - other[name]).abs().max()) for name in floats) / largest
