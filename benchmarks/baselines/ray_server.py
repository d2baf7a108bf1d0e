"""A parameter server on Ray, on one host: what ours is measured against.

    python benchmarks/baselines/ray_server.py --learners 2 --seconds 5 --form tuned

The server and the learners are actors. A learner pushes a prepared gradient, gets the new weights and copies them into
its parameters, as training needs. Two forms:

    plain   as Ray's own tutorial has it: a call with the gradients as a list of arrays, another for the weights as a
            list of tensors, and nothing set.
    tuned   at its best on one host: one call for both, which travel through the object store as one flat float32
            array that the receiver maps without a copy. The store is kept small, which was faster (probably fewer
            pages touched for the first time; not profiled).

Nothing but the last line goes to standard output. Exit code 3: Ray is not installed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from typing import Any, NamedTuple

import numpy as np
import torch

RATE = 1e-3
WARM_UP_PUSHES = {"plain": 5, "tuned": 20}
PATIENCE_S = 90.0  # beyond the measured seconds; then everything is ended
STORE_ARRAYS = 8  # room in the object store: arrays per learner, and as many again


Array = np.ndarray[Any, np.dtype[np.float32]]


class Report(NamedTuple):
    """What a learner says at the end; `error` is relative, and only the learner that pushed last has one."""

    pushes: int
    start_s: float
    end_s: float
    error: float | None


class Server:
    """The weights and how many gradients each learner has put into them; Ray runs one call at a time."""

    def __init__(self, sizes: list[int], learners: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self.weights = [torch.zeros(size) for size in sizes]
        self.counts = [0] * learners

    def push(self, learner: int, gradients: list[Array]) -> None:
        for weights, gradient in zip(self.weights, gradients, strict=True):
            weights.add_(_as_tensor(gradient), alpha=-RATE)
        self.counts[learner] += 1

    def fetch(self) -> tuple[tuple[int, ...], list[torch.Tensor]]:
        return tuple(self.counts), self.weights

    def push_and_fetch(self, learner: int, gradient: Array) -> tuple[tuple[int, ...], Array]:
        """Ray copies the array into the object store before the next call starts, so a reader has one version."""
        self.push(learner, [gradient])
        return tuple(self.counts), self.weights[0].numpy()


def _as_tensor(array: Array) -> torch.Tensor:
    """Of an array that is only to be read: `torch.from_numpy` would warn."""
    return torch.frombuffer(array, dtype=torch.float32)


def prepare(learner: int, sizes: list[int]) -> list[Array]:
    """A learner's gradients: random, its own, and the same for whoever asks."""
    chance = np.random.default_rng(learner)
    return [chance.standard_normal(size, dtype=np.float32) for size in sizes]


class Learner:
    """Pushes and fetches: `warm` before the measured seconds, `measure` during, `check` when all have ended."""

    def __init__(self, server: Any, learner: int, sizes: list[int], form: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.ray = importlib.import_module("ray")
        self.server, self.learner, self.sizes, self.form = server, learner, sizes, form
        self.gradients = prepare(learner, sizes)
        self.parameters = [torch.zeros(size) for size in sizes]
        self.counts: tuple[int, ...] = ()

    def push(self) -> None:
        if self.form == "plain":
            self.ray.get(self.server.push.remote(self.learner, self.gradients))
            self.counts, weights = self.ray.get(self.server.fetch.remote())
        else:
            self.counts, flat = self.ray.get(self.server.push_and_fetch.remote(self.learner, self.gradients[0]))
            weights = [_as_tensor(flat)]
        for parameter, new in zip(self.parameters, weights, strict=True):
            parameter.copy_(new)

    def warm(self) -> None:
        for _ in range(WARM_UP_PUSHES[self.form]):
            self.push()

    def measure(self, seconds: float) -> tuple[int, float, float]:
        pushes, start_s = 0, time.monotonic()
        while time.monotonic() - start_s < seconds:
            self.push()
            pushes += 1
        end_s = time.monotonic()
        sent = pushes + WARM_UP_PUSHES[self.form]
        if self.counts[self.learner] != sent:
            raise AssertionError(f"learner {self.learner}: {sent} pushes, server saw {self.counts}")
        return pushes, start_s, end_s

    def check(self) -> float | None:
        counts, last = self.ray.get(self.server.fetch.remote())
        if self.counts != counts:
            return None
        if not all(mine.equal(theirs) for mine, theirs in zip(self.parameters, last, strict=True)):
            raise AssertionError("the weights that the last push brought back are not the server's")
        expected = [torch.zeros(size) for size in self.sizes]
        for other, count in enumerate(counts):
            for sum_, gradient in zip(expected, prepare(other, self.sizes), strict=True):
                sum_ -= torch.from_numpy(gradient) * (RATE * count)
        weights, right = torch.cat(self.parameters), torch.cat(expected)
        return float((weights - right).norm() / right.norm())


def measure(options: argparse.Namespace, ray: Any) -> list[Report]:
    """Run the actors; neither they nor Ray's folder are left when this returns or raises."""
    deadline_s = time.monotonic() + options.seconds + PATIENCE_S
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: Ray's socket names must fit into 107 bytes

    def wait(calls: list[Any]) -> list[Any]:
        found: list[Any] = ray.get(calls, timeout=max(0.1, deadline_s - time.monotonic()))
        return found

    settings = {}
    if options.form == "tuned":
        settings["object_store_memory"] = max(2**27, STORE_ARRAYS * (options.learners + 1) * 4 * options.parameters)
    try:
        ray.init(
            num_cpus=os.cpu_count(),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
            **settings,
        )
        actor = ray.remote(num_cpus=0)
        server = actor(Server).remote(options.sizes, options.learners, options.threads)
        learners = [
            actor(Learner).remote(server, learner, options.sizes, options.form, options.threads)
            for learner in range(options.learners)
        ]
        wait([learner.warm.remote() for learner in learners])
        times = wait([learner.measure.remote(options.seconds) for learner in learners])
        errors = wait([learner.check.remote() for learner in learners])
        return [
            Report(pushes, start_s, end_s, error) for (pushes, start_s, end_s), error in zip(times, errors, strict=True)
        ]
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Pushes per second of a parameter server on Ray.")
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--parameters", type=int, default=25_600_000)
    parser.add_argument("--form", choices=("plain", "tuned"), default="plain")
    parser.add_argument("--sizes", help="of the model's tensors, joined by commas (default: one of all parameters)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads per process")
    options = parser.parse_args()
    if options.learners < 1 or options.parameters < 1 or options.threads < 1 or options.seconds <= 0:
        parser.error("every option must be more than 0")
    sizes = [int(word) for word in options.sizes.split(",")] if options.sizes else [options.parameters]
    options.parameters = sum(sizes)
    options.sizes = sizes if options.form == "plain" else [options.parameters]
    if importlib.util.find_spec("ray") is None:
        print("ray is not installed: pip install -c constraints.txt ray", file=sys.stderr)
        return 3
    # By the second, Ray takes 127.0.0.1 for this node; without it, it replaces that address by an outer one.
    os.environ.update(
        RAY_USAGE_STATS_ENABLED="0",
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        OMP_NUM_THREADS=str(options.threads),
    )
    ray = importlib.import_module("ray")
    found = measure(options, ray)
    errors = [report.error for report in found if report.error is not None]
    if not errors or not max(errors) < 1e-3:
        raise AssertionError(f"the weights should be initial - rate * sum of gradients; relative errors: {errors}")
    pushes = sum(report.pushes for report in found)
    seconds = max(report.end_s for report in found) - min(report.start_s for report in found)
    result = {
        "system": "ray",
        "form": options.form,
        "learners": options.learners,
        "parameters": options.parameters,
        "tensors": len(options.sizes),
        "pushes": pushes,
        "seconds": round(seconds, 3),
        "per_s": round(pushes / seconds, 2),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "ray": ray.__version__},
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
