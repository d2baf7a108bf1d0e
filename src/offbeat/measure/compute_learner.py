"""A learner's program of `offbeat calibrate`: it computes minibatches of a recipe and copies memory, when asked.

It computes as a learner alone does, on the recipe's own data and device, and sends nothing anywhere.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from offbeat.measure.child_requests import Answer, Handlers, Request, serve
from offbeat.measure.torch_rank import mean_s
from offbeat.train.config_files import from_json
from offbeat.train.precision import Precision
from offbeat.train.tasks import Task, collate_of, task_of
from offbeat.train.trainer import device_of, mover

_COPY_BYTES = 64 * 2**20
_COPIES = 4


class ComputeLearner:
    """A model with its data, ready to compute."""

    def __init__(self, request: Request) -> None:
        config = from_json(request["config"], "calibrate")
        torch.set_num_threads(config.train.threads)
        torch.manual_seed(config.seed)
        self.device = device_of(config.device, request["learner"])
        self.task: Task = task_of(config)
        self.model = self.task.build().to(self.device)
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


def layers_of(learner: ComputeLearner, size: int, repeats: int = 12) -> list[dict[str, Any]]:
    """Seconds forward and backward of each module with parameters of its own, medians, in the order of forward.

    Backward is seen from the last to the first: a layer takes from the moment at which the gradients of the one behind
    it are there to the one at which its own are. What has no parameters (an activation) counts to the layer before it.
    """
    model = learner.model
    owners = {
        name: own
        for name, module in model.named_modules()
        if (own := [one for one in module.parameters(recurse=False) if one.requires_grad])
    }
    begun: dict[str, float] = {}  # in the order of forward
    ready: dict[str, float] = {}  # the last gradient of each

    def note(name: str, times: dict[str, float], keep_first: bool) -> Callable[..., None]:
        def hook(*_: object) -> None:
            learner.wait()
            if not (keep_first and name in times):
                times[name] = time.perf_counter()

        return hook

    hooks: list[Any] = []
    for name, own in owners.items():
        hooks.append(model.get_submodule(name).register_forward_pre_hook(note(name, begun, keep_first=True)))
        hooks += [one.register_post_accumulate_grad_hook(note(name, ready, keep_first=False)) for one in own]
    forward: dict[str, list[float]] = {name: [] for name in owners}
    backward: dict[str, list[float]] = {name: [] for name in owners}
    try:
        for _ in range(repeats + 2):
            begun.clear()
            ready.clear()
            loss = learner.forward(size)
            learner.wait()
            turned = time.perf_counter()
            learner.backward(loss)
            for name, (start, end) in zip(begun, pairwise([*begun.values(), turned]), strict=True):
                forward[name].append(end - start)
            for (_, before), (name, end) in pairwise([("", turned), *sorted(ready.items(), key=lambda one: one[1])]):
                backward[name].append(end - before)
    finally:
        for hook in hooks:
            hook.remove()
    order = [*begun, *(name for name in owners if name not in begun)]
    return [
        {
            "name": name or type(model).__name__,
            "forward_s": statistics.median_high(forward[name][2:] or [0.0]),
            "backward_s": statistics.median_high(backward[name][2:] or [0.0]),
            "size_bytes": sum(one.numel() * one.element_size() for one in owners[name]),
        }
        for name in order
    ]


def begin(request: Request) -> tuple[Answer, Handlers]:
    learner = ComputeLearner(request)
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
