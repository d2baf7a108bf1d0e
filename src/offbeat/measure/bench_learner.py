"""The learner's program of `offbeat bench server` and `offbeat bench policies`.

    python -m offbeat.measure.bench_learner '{"do": "push", "sizes": [1000, 24], "seconds": 3, "warm_up": 5}'
    python -m offbeat.measure.bench_learner '{"do": "train", "updates": 100, "parameters": 9}'

The last line on standard output is what it found, as JSON.
"""

from __future__ import annotations

import time

import torch
from torch import nn

from offbeat.errors import OffbeatError
from offbeat.measure.child_requests import Answer, Request, answer_once
from offbeat.server.learner.join import join
from offbeat.server.learner.served_learner import ServedLearner

LR = 1e-3
_COPY_S = 0.3


class Model(nn.Module):
    """Parameters of these sizes, and nothing to call."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])


def push(request: Request) -> Answer:
    """Push a prepared gradient and fetch the weights, over and over.

    Nothing is computed, and everything else is as in training: gradients lie in `.grad`, `optimizer.step()` copies them
    to where the servers read, waits, and copies the new weights into the parameters. All learners push the same
    gradient, so that the weights at the end are known.
    """
    learner = join()
    assert isinstance(learner, ServedLearner)
    device = request.get("device", "cpu")
    model = Model(request["sizes"]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    learner.prepare(model, optimizer, in_place=request["in_place"])
    chance = torch.Generator().manual_seed(0)
    for parameter in model.all:
        parameter.grad = torch.randn(parameter.shape, generator=chance).to(device)

    def cycle() -> None:
        with learner.minibatch():
            optimizer.step()

    for _ in range(request["warm_up"]):
        cycle()
    cycles, start_s = 0, time.monotonic()
    while time.monotonic() - start_s < request["seconds"]:
        cycle()
        cycles += 1
    end_s = time.monotonic()
    learner.finish()
    _check(model, learner.version)
    return {"cycles": cycles, "start_s": start_s, "end_s": end_s, "copy_bytes_per_s": _copy(sum(request["sizes"]))}


def _check(model: Model, updates: int) -> None:
    """Every learner pushed the same, so that only the number of updates counts."""
    wrong = expected = 0.0
    for parameter in model.all:
        assert parameter.grad is not None
        right = parameter.grad * (-LR * updates)
        wrong += float((parameter.detach() - right).square().sum())
        expected += float(right.square().sum())
    if not wrong <= 1e-6 * expected:
        raise OffbeatError(f"wrong weights after {updates} updates: off by {(wrong / expected) ** 0.5:.2g}")


def _copy(items: int) -> float:
    """Bytes a second that a plain copy of as much memory moves here, each counted once."""
    source, target = torch.ones(items), torch.zeros(items)
    copies, start_s = 0, time.monotonic()
    while time.monotonic() - start_s < _COPY_S:
        target.copy_(source)
        copies += 1
    return 4 * items * copies / (time.monotonic() - start_s)


def train(request: Request) -> Answer:
    """A model so light that the slowness on purpose is all its time, until its weights have the version asked for."""
    learner = join()
    model = Model([request["parameters"]])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    learner.prepare(model, optimizer)
    while learner.version < request["updates"]:
        with learner.minibatch():
            optimizer.zero_grad()
            model.all[0].sum().backward()
            optimizer.step()
    return {"version": learner.version}


if __name__ == "__main__":
    answer_once(lambda request: {"push": push, "train": train}[request["do"]](request))
