"""A learner's program of `offbeat calibrate`: it computes minibatches of a recipe and copies memory, when asked.

It computes as a learner alone does, on the recipe's own data and device, and sends nothing anywhere.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from offbeat.measure.rank_messages import Wire, require, serve
from offbeat.measure.torch_rank import mean_s
from offbeat.train.config_files import from_json
from offbeat.train.precision import Precision
from offbeat.train.tasks import Task, collate_of, task_of
from offbeat.train.trainer import device_of, mover

_COPY_BYTES = 64 * 2**20
_COPIES = 4


class Bench:
    """A model with its data, ready to compute."""

    def __init__(self, question: Mapping[str, Any]) -> None:
        config = from_json(question["config"], "calibrate")
        torch.set_num_threads(config.train.threads)
        torch.manual_seed(config.seed)
        self.device = device_of(config.device, question["learner"])
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

    def minibatch(self, size: int) -> None:
        inputs, targets = self.batch(size)
        with self.precision.computing():
            loss = self.task.loss(self.model(inputs), targets)
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
            self.minibatch(size)
        found: list[float] = []
        end = time.perf_counter() + seconds
        while len(found) < 5 or (time.perf_counter() < end and len(found) < 2000):
            found.append(mean_s(1, lambda: self.minibatch(size)))
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


def layers_of(bench: Bench, size: int, repeats: int = 12) -> list[dict[str, Any]]:
    """Seconds forward and backward of each module with parameters of its own, medians, in the order of forward.

    Backward is seen from the last to the first: a layer takes from the moment at which the gradients of the one behind
    it are there to the one at which its own are. What has no parameters (an activation) counts to the layer before it.
    """
    model = bench.model
    owners = {
        name: [one for one in module.parameters(recurse=False) if one.requires_grad]
        for name, module in model.named_modules()
    }
    owners = {name: own for name, own in owners.items() if own}
    entered: list[str] = []  # in the order of forward
    begun: dict[str, float] = {}
    ready: dict[str, float] = {}
    hooks: list[Any] = []
    modules = dict(model.named_modules())

    def entering(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            bench.wait()
            if name not in begun:
                entered.append(name)
                begun[name] = time.perf_counter()

        return hook

    def done(name: str) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            bench.wait()
            ready[name] = time.perf_counter()

        return hook

    for name, own in owners.items():
        hooks.append(modules[name].register_forward_pre_hook(entering(name)))
        hooks += [one.register_post_accumulate_grad_hook(done(name)) for one in own]
    forward: dict[str, list[float]] = {name: [] for name in owners}
    backward: dict[str, list[float]] = {name: [] for name in owners}
    try:
        for _ in range(repeats + 2):
            entered.clear()
            begun.clear()
            ready.clear()
            inputs, targets = bench.batch(size)
            with bench.precision.computing():
                loss = bench.task.loss(bench.model(inputs), targets)
            bench.wait()
            turned = time.perf_counter()
            with bench.precision.differentiating():
                loss.backward()  # type: ignore[no-untyped-call] # torch's own
            bench.model.zero_grad(set_to_none=True)
            edges = [*(begun[name] for name in entered), turned]
            for number, name in enumerate(entered):
                forward[name].append(edges[number + 1] - edges[number])
            at = turned
            for name in sorted(ready, key=ready.__getitem__):
                backward[name].append(ready[name] - at)
                at = ready[name]
    finally:
        for hook in hooks:
            hook.remove()
    order = [*entered, *(name for name in owners if name not in entered)]
    return [
        {
            "name": name or type(model).__name__,
            "forward_s": _middle(forward[name][2:]),
            "backward_s": _middle(backward[name][2:]),
            "size_bytes": sum(one.numel() * one.element_size() for one in owners[name]),
        }
        for name in order
    ]


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def _work(wire: Wire) -> None:
    bench: Bench | None = None
    for question in wire.questions():
        if bench is None:
            require(question, "begin")
            bench = Bench(question)
            wire.answer(
                size_bytes=bench.size_bytes,
                samples=bench.samples,
                torch=torch.__version__,
                device=str(bench.device),
                gpus=torch.cuda.device_count() if bench.device.type == "cuda" else 0,
            )
        elif question["do"] == "times":
            wire.answer(times_s=bench.times(question["batch"], question["seconds"]))
        elif question["do"] == "layers":
            wire.answer(layers=layers_of(bench, question["batch"]))
        elif question["do"] == "copy":
            wire.answer(seconds=bench.copy_s(), bytes=_COPY_BYTES)


if __name__ == "__main__":
    sys.exit(serve(_work))
