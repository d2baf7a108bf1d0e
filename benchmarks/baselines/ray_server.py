"""A parameter server on Ray, on one host or two: what ours is measured against.

    python benchmarks/baselines/ray_server.py --learners 2 --seconds 5 --form tuned
    python benchmarks/baselines/ray_server.py --own 10.0.0.1 --other 10.0.0.2 --folder /tmp/r   # the server's host
    python benchmarks/baselines/ray_server.py --own 10.0.0.2 --join 10.0.0.1 --folder /tmp/r    # the learners'

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
import contextlib
import importlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

import numpy as np
import torch

RATE = 1e-3
WARM_UP_PUSHES = {"plain": 5, "tuned": 20}
PATIENCE_S = 90.0  # beyond the measured seconds; then everything is ended
PORT = 6379  # of the cluster, on the server's host
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


def store_bytes(options: argparse.Namespace) -> int:
    return int(max(2**27, STORE_ARRAYS * (options.learners + 1) * 4 * options.parameters))


def node(address: str) -> str:
    """The resource that each node of a cluster has by itself."""
    return f"node:{address}"


def start_node(options: argparse.Namespace, words: list[str]) -> subprocess.Popen[bytes]:
    """Ray's processes on this host; they end with the one that is returned."""
    own = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={options.own}", "--block"]
    own += ["--disable-usage-stats", f"--num-cpus={os.cpu_count()}"]
    own += [f"--object-store-memory={store_bytes(options)}"] if options.form == "tuned" else []
    own += ["--include-dashboard=false", f"--temp-dir={options.folder}"] if "--head" in words else []
    return subprocess.Popen([*own, *words], stdout=subprocess.DEVNULL, start_new_session=True)


def join_cluster(options: argparse.Namespace, ray: Any, deadline_s: float) -> None:
    """As the driver, when both nodes are there."""
    while True:
        try:
            with socket.create_connection((options.own, PORT), timeout=1):
                break
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)
    ray.init(address=f"{options.own}:{PORT}", _node_ip_address=options.own, log_to_driver=False, logging_level="error")
    while node(options.other) not in ray.cluster_resources():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{options.other} did not join; nodes: {ray.nodes()}")
        time.sleep(0.1)


def end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def measure(options: argparse.Namespace, ray: Any) -> list[Report]:
    """Run the actors; neither they nor Ray's folder are left when this returns or raises."""
    deadline_s = time.monotonic() + options.seconds + PATIENCE_S
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: Ray's socket names must fit into 107 bytes

    def wait(calls: list[Any]) -> list[Any]:
        found: list[Any] = ray.get(calls, timeout=max(0.1, deadline_s - time.monotonic()))
        return found

    head: subprocess.Popen[bytes] | None = None
    try:
        if options.other:
            head = start_node(options, ["--head", f"--port={PORT}"])
            join_cluster(options, ray, deadline_s)
        else:
            ray.init(
                num_cpus=os.cpu_count(),
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
                _node_ip_address="127.0.0.1",
                _temp_dir=folder,
                **({"object_store_memory": store_bytes(options)} if options.form == "tuned" else {}),
            )
        actor = ray.remote(num_cpus=0)
        place = {node(options.other): 0.001} if options.other else None
        server = (
            actor(Server)
            .options(resources=place and {node(options.own): 0.001})
            .remote(options.sizes, options.learners, options.threads)
        )
        learners = [
            actor(Learner)
            .options(resources=place)
            .remote(server, learner, options.sizes, options.form, options.threads)
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
        if head is not None:
            end(head)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Pushes per second of a parameter server on Ray.")
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--parameters", type=int, default=25_600_000)
    parser.add_argument("--form", choices=("plain", "tuned"), default="plain")
    parser.add_argument("--sizes", help="of the model's tensors, joined by commas (default: one of all parameters)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads per process")
    parser.add_argument("--own", help="two hosts: the address of this one")
    parser.add_argument("--other", help="two hosts: where the learners are")
    parser.add_argument(
        "--join", help="two hosts: where the server is; this host only runs learners, until it is killed"
    )
    parser.add_argument("--folder", help="two hosts: of Ray's own files; its name must be short")
    options = parser.parse_args()
    if options.learners < 1 or options.parameters < 1 or options.threads < 1 or options.seconds <= 0:
        parser.error("every option must be more than 0")
    sizes = [int(word) for word in options.sizes.split(",")] if options.sizes else [options.parameters]
    options.parameters = sum(sizes)
    options.sizes = sizes if options.form == "plain" else [options.parameters]
    if importlib.util.find_spec("ray") is None:
        print("ray is not installed: pip install -c constraints.txt ray", file=sys.stderr)
        return 3
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS=str(options.threads))
    if not options.own:  # with this, Ray takes 127.0.0.1 for this node; else it replaces that address by an outer one
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if options.join:
        return start_node(options, [f"--address={options.join}:{PORT}"]).wait()
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
