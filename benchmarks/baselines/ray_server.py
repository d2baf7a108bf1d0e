"""A parameter server on Ray, at its best on one host: what ours is measured against.

    python benchmarks/baselines/ray_server.py --learners 2 --seconds 5

The server and the learners are actors. A learner pushes a prepared gradient and gets the new weights back in one call;
both travel through the object store as one flat float32 array, which the receiver maps without a copy. The store is
kept small, which was faster (probably fewer pages touched for the first time; not profiled). Nothing but the last
line goes to standard output. Exit code 3: Ray is not installed.
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
WARM_UP_PUSHES = 20
PATIENCE_S = 90.0  # beyond the measured seconds; then everything is ended
STORE_ARRAYS = 8  # room in the object store: arrays per learner, and as many again


class Report(NamedTuple):
    """What a learner says at the end; `error` is relative, and only the learner that pushed last has one."""

    pushes: int
    start_s: float
    end_s: float
    error: float | None


class Server:
    """The weights and how many gradients each learner has put into them; Ray runs one call at a time."""

    def __init__(self, parameters: int, learners: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self.weights = torch.zeros(parameters)
        self.counts = [0] * learners

    def push(self, learner: int, gradient: np.ndarray[Any, np.dtype[np.float32]]) -> tuple[tuple[int, ...], Any]:
        self.weights.add_(torch.frombuffer(gradient, dtype=torch.float32), alpha=-RATE)
        self.counts[learner] += 1
        return self.read()

    def read(self) -> tuple[tuple[int, ...], Any]:
        """Ray copies the array into the object store before the next call starts, so a reader has one version."""
        return tuple(self.counts), self.weights.numpy()


def prepare(learner: int, parameters: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A learner's gradient: random, its own, and the same for whoever asks."""
    return np.random.default_rng(learner).standard_normal(parameters, dtype=np.float32)


class Learner:
    """Pushes and fetches: `warm` before the measured seconds, `measure` during, `check` when all have ended."""

    def __init__(self, server: Any, learner: int, parameters: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self.ray = importlib.import_module("ray")
        self.server, self.learner = server, learner
        self.gradient = prepare(learner, parameters)
        self.counts: tuple[int, ...] = ()
        self.weights: Any = None

    def push(self) -> None:
        self.counts, self.weights = self.ray.get(self.server.push.remote(self.learner, self.gradient))

    def warm(self) -> None:
        for _ in range(WARM_UP_PUSHES):
            self.push()

    def measure(self, seconds: float) -> tuple[int, float, float]:
        pushes, start_s = 0, time.monotonic()
        while time.monotonic() - start_s < seconds:
            self.push()
            pushes += 1
        end_s = time.monotonic()
        if self.counts[self.learner] != pushes + WARM_UP_PUSHES:
            raise AssertionError(f"learner {self.learner}: {pushes + WARM_UP_PUSHES} pushes, server saw {self.counts}")
        return pushes, start_s, end_s

    def check(self) -> float | None:
        last_counts, last_weights = self.ray.get(self.server.read.remote())
        if self.counts != last_counts:
            return None
        if not np.array_equal(self.weights, last_weights):
            raise AssertionError("the weights that the last push brought back are not the server's")
        expected = np.zeros_like(self.gradient)
        for other, count in enumerate(self.counts):
            expected -= prepare(other, expected.size) * np.float32(RATE * count)
        return float(np.linalg.norm(self.weights - expected) / np.linalg.norm(expected))


def measure(options: argparse.Namespace, ray: Any) -> list[Report]:
    """Run the actors; neither they nor Ray's folder are left when this returns or raises."""
    deadline_s = time.monotonic() + options.seconds + PATIENCE_S
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: Ray's socket names must fit into 107 bytes

    def wait(calls: list[Any]) -> list[Any]:
        found: list[Any] = ray.get(calls, timeout=max(0.1, deadline_s - time.monotonic()))
        return found

    try:
        ray.init(
            num_cpus=os.cpu_count(),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=max(2**27, STORE_ARRAYS * (options.learners + 1) * 4 * options.parameters),
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        actor = ray.remote(num_cpus=0)
        server = actor(Server).remote(options.parameters, options.learners, options.threads)
        learners = [
            actor(Learner).remote(server, learner, options.parameters, options.threads)
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
    parser.add_argument("--threads", type=int, default=1, help="torch threads per process")
    options = parser.parse_args()
    if options.learners < 1 or options.parameters < 1 or options.threads < 1 or options.seconds <= 0:
        parser.error("every option must be more than 0")
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
        "learners": options.learners,
        "parameters": options.parameters,
        "pushes": pushes,
        "seconds": round(seconds, 3),
        "per_s": round(pushes / seconds, 2),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "ray": ray.__version__},
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
