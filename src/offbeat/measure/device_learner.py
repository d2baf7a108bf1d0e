"""The learner's program of `offbeat bench device`: one model in one precision, which takes steps when asked.

Steps are those of `offbeat train` on one device: forward, backward, clip and optimizer (`train.device_step`), on two
minibatches that lie on the device already. What runs out of memory, or fails otherwise, is an answer and no error; the
parent then starts another process, since a device may be left in any state.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

import torch
import torch._dynamo  # the first optimizer loads it anyway: here, while the parent measures something else

from offbeat.energy import Meter
from offbeat.measure.child_requests import Answer, Handlers, Request, error_text, serve
from offbeat.measure.operation_counts import counted
from offbeat.train.compute_ladder import LADDER
from offbeat.train.config import Config
from offbeat.train.config_files import from_json
from offbeat.train.device_input import input_of
from offbeat.train.device_step import DeviceStep, Loss, compiled_loss
from offbeat.train.learning_rate import optimizer_of
from offbeat.train.out_of_memory import is_out_of_memory
from offbeat.train.precision import Precision
from offbeat.train.tasks import task_of
from offbeat.train.trainer import built_on, device_of, mover, settle_cudnn

ROUNDS = 5  # of steps that are timed: the parent takes the median; one, where a step takes as long as all may
WARM_UP = 2  # steps before them, the first captures
MOST_STEPS = 2000  # of a round
ALGORITHMS = 4  # cuDNN tries for a convolution; 10 in training, which takes a minute for a large model in fp32


class DeviceLearner:
    """A model on its device."""

    def __init__(self, config: Config) -> None:
        torch.set_num_threads(config.train.threads)
        self.config = config
        self.device = device_of(config.device, 0)
        self.has_gpu = self.device.type == "cuda"
        if self.has_gpu:
            torch.cuda.set_device(self.device)
            settle_cudnn(deterministic=config.deterministic)
            torch.backends.cudnn.benchmark_limit = ALGORITHMS
        self.rung = next(rung for rung in LADDER if rung.name == rung_here(config.train.compute, self.device))
        self.task = task_of(config)
        self.model = built_on(self.device, self.task, config).train()
        self.optimizer = optimizer_of(self.model, config.train)
        self.precision = Precision(config.train.precision, self.device)
        self._input = input_of(self.task.train, self.device, mover(self.device))
        self._compiled: Loss | None = None

    @property
    def samples(self) -> int:
        return len(self.task.train)  # type: ignore[arg-type]  # a map-style set has a length: the task was checked

    def flops_per_sample(self) -> float | None:
        """Forward and backward; None where the model cannot be counted."""
        try:
            return counted(self.task, 2).flops / 2
        except Exception:  # a model that looks at values: there are none
            return None

    def step(self) -> DeviceStep:
        if self.rung.compiled and self._compiled is None:
            self._compiled = compiled_loss(self.model, self.task.loss, self.precision)
        return DeviceStep(
            self.model,
            self.optimizer,
            self.task.loss,
            self.precision,
            clip_norm=self.config.train.clip_norm,
            forward=self._compiled,
            captured=self.rung.captured,
            reduced=False,
            benchmark=not self.config.deterministic,
        )

    def wait(self) -> None:
        if self.has_gpu:
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Give back what the last minibatches took, and count memory anew."""
        for parameter in self.model.parameters():
            parameter.grad = None
        gc.collect()
        if self.has_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def measure(self, batch: int, seconds: float) -> dict[str, Any]:
        """Steps of so many samples, for about so long."""
        self.release()
        retries = self._retries()
        wanted = [torch.arange(start, start + batch) % self.samples for start in (0, batch)]
        batches = list(self._input.batches(wanted))
        step = self.step()

        def run(steps: int) -> float:
            began_s = time.perf_counter()
            for number in range(steps):
                step.add(*batches[number % 2])
                step.update(0.0, samples=batch)
            self.wait()
            return (time.perf_counter() - began_s) / steps

        run(WARM_UP)
        once_s = run(1)
        rounds = ROUNDS if once_s < seconds else 1
        steps = max(1, min(MOST_STEPS, round(seconds / ROUNDS / once_s)))
        meter = Meter([self.device.index or 0] if self.has_gpu else [])
        meter.start()
        times_s = [run(steps) for _ in range(rounds)]
        energy = meter.stop()
        return {
            "times_s": times_s,
            "joules_per_sample": None if energy.joules is None else energy.joules / (rounds * steps * batch),
            "not_measured": list(energy.not_measured),
            "peak_bytes": torch.cuda.max_memory_allocated(self.device) if self.has_gpu else None,
            "retries": self._retries() - retries,
        }

    def _retries(self) -> int:
        """How often memory had to be given back to the device before some could be had."""
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0)) if self.has_gpu else 0

    def answer(self, request: Request) -> Answer:
        try:
            return self.measure(request["batch"], request["seconds"])
        except Exception as error:  # one point is lost, and told
            return {"failed": error_text(error), "out_of_memory": is_out_of_memory(error)}


def rung_here(asked: str, device: torch.device) -> str:
    """How steps are computed: as asked; of itself in a graph on a GPU, since compiling takes a minute a point."""
    if asked != "auto":
        return asked
    return "graph" if device.type == "cuda" else "eager"


def begin(request: Request) -> tuple[Answer, Handlers]:
    learner = DeviceLearner(from_json(request["config"], "bench"))
    answer = {
        "samples": learner.samples,
        "flops_per_sample": learner.flops_per_sample(),
        "compute": learner.rung.name,
        "free_bytes": _free(learner) if learner.has_gpu else None,
    }
    return answer, {"measure": learner.answer}


def _free(learner: DeviceLearner) -> int:
    """What this process can have in all: what is free, and what it has."""
    return int(torch.cuda.mem_get_info(learner.device)[0] + torch.cuda.memory_reserved(learner.device))


if __name__ == "__main__":
    sys.exit(serve(begin))
