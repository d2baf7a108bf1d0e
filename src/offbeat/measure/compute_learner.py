"""A learner's program of `offbeat calibrate`: it computes minibatches of a recipe and copies memory, when asked.

It computes as a learner alone does, on the recipe's own data and device, and sends nothing anywhere.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from offbeat.measure.child_requests import Answer, Handlers, Request, serve
from offbeat.measure.layer_hooks import layer_hooks, layers_in
from offbeat.measure.torch_rank import mean_s
from offbeat.train.config import Config
from offbeat.train.config_files import from_json
from offbeat.train.device_clock import DeviceClock, Mark
from offbeat.train.precision import Precision
from offbeat.train.tasks import Task, collate_of, task_of
from offbeat.train.trainer import built_on, device_of, mover

WARM_UP = 2  # passes of which no time is kept
_COPY_BYTES = 64 * 2**20
_COPIES = 4


class ComputeLearner:
    """A model with its data, ready to compute."""

    def __init__(self, config: Config, learner: int = 0) -> None:
        torch.set_num_threads(config.train.threads)
        self.device = device_of(config.device, learner)
        self.task: Task = task_of(config)
        self.model = built_on(self.device, self.task, config)
        self.precision = Precision(config.train.precision, self.device)
        self._collate = collate_of(self.task.train)
        self._moved = mover(self.device)
        self._batches: dict[int, Any] = {}
        self._buffers: tuple[Tensor, Tensor] | None = None

    @property
    def size_bytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in self.model.parameters() if one.requires_grad)

    @property
    def samples(self) -> int:
        return len(self.task.train)  # type: ignore[arg-type]  # a map-style set has a length: the task was checked

    def batch(self, size: int) -> Any:
        if size not in self._batches:
            places = [place % self.samples for place in range(size)]
            loader: Any = DataLoader(self.task.train, batch_size=size, sampler=places, collate_fn=self._collate)
            self._batches[size] = self._moved(next(iter(loader)))
        return self._batches[size]

    def forward(self, size: int) -> Tensor:
        inputs, targets = self.batch(size)
        with self.precision.computing():
            return self.task.loss(self.model(inputs), targets)

    def backward(self, loss: Tensor) -> None:
        with self.precision.differentiating():
            loss.backward()  # type: ignore[no-untyped-call] # torch's own
        self.model.zero_grad(set_to_none=True)
        self.wait()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def times(self, size: int, seconds: float) -> list[float]:
        """Of minibatches of so many samples, one after the other, for so long."""
        for _ in range(3):
            self.backward(self.forward(size))
        found: list[float] = []
        end = time.perf_counter() + seconds
        while len(found) < 5 or (time.perf_counter() < end and len(found) < 2000):
            found.append(mean_s(1, lambda: self.backward(self.forward(size))))
        return found

    def copy_s(self) -> float:
        if self._buffers is None:
            items = _COPY_BYTES // 4
            self._buffers = torch.ones(items, device=self.device), torch.zeros(items, device=self.device)
        source, target = self._buffers

        def copy() -> None:
            target.copy_(source)
            self.wait()

        copy()
        return mean_s(_COPIES, copy)


def layers_of(learner: ComputeLearner, size: int, repeats: int = 12, most_s: float = math.inf) -> list[dict[str, Any]]:
    """Seconds forward and backward of each layer (`layer_hooks`), medians, in the order of forward.

    `most_s`: no more repeats after so long, but one.
    """
    model = learner.model
    layers = layers_in(model)
    clock = DeviceClock(learner.device)
    begun: dict[str, Mark] = {}  # in the order of forward
    ready: dict[str, Mark] = {}  # the last gradient of each, in their order

    def begin(name: str) -> None:
        if name not in begun:
            begun[name] = clock.mark()

    def end(name: str) -> None:
        ready.pop(name, None)
        ready[name] = clock.mark()

    forward: dict[str, list[float]] = {name: [] for name in layers}
    backward: dict[str, list[float]] = {name: [] for name in layers}
    until_s = time.monotonic() + most_s
    with layer_hooks(model, layers, begin, end):
        for number in range(repeats + WARM_UP):
            if number > WARM_UP and time.monotonic() > until_s:
                break
            begun.clear()
            ready.clear()
            loss = learner.forward(size)
            turned = clock.mark()
            learner.backward(loss)
            times_s = clock.seconds([*begun.values(), turned, *ready.values()])
            for name, (start_s, end_s) in zip(begun, pairwise(times_s), strict=False):
                forward[name].append(end_s - start_s)
            for name, (start_s, end_s) in zip(ready, pairwise(times_s[len(begun) :]), strict=True):
                backward[name].append(end_s - start_s)
    order = [*begun, *(name for name in layers if name not in begun)]
    return [
        {
            "name": name,
            "forward_s": statistics.median_high(forward[name][WARM_UP:] or [0.0]),
            "backward_s": statistics.median_high(backward[name][WARM_UP:] or [0.0]),
            "size_bytes": sum(one.numel() * one.element_size() for one in layers[name]),
        }
        for name in order
    ]


def begin(request: Request) -> tuple[Answer, Handlers]:
    learner = ComputeLearner(from_json(request["config"], "calibrate"), request["learner"])
    answer = {
        "size_bytes": learner.size_bytes,
        "samples": learner.samples,
        "torch": torch.__version__,
        "device": str(learner.device),
        "gpus": torch.cuda.device_count() if learner.device.type == "cuda" else 0,
    }
    return answer, {
        "times": lambda asked: {"times_s": learner.times(asked["batch"], asked["seconds"])},
        "layers": lambda asked: {"layers": layers_of(learner, asked["batch"])},
        "copy": lambda _: {"seconds": learner.copy_s(), "bytes": _COPY_BYTES},
    }


if __name__ == "__main__":
    sys.exit(serve(begin))
