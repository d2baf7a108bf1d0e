"""A parameter server on `torch.distributed.rpc`, on one host or two: what ours is measured against.

    python benchmarks/baselines/rpc_server.py --learners 2 --seconds 5 --form tuned
    python benchmarks/baselines/rpc_server.py --part server --store FILE --device eth0    # and on the other host:
    python benchmarks/baselines/rpc_server.py --part learners --store FILE --device eth0

One process holds the weights, the others push a prepared gradient, get the new weights and copy them into their
parameters, as training needs. Three forms:

    plain   as PyTorch's tutorial "Implementing Batch RPC Processing Using Asynchronous Executions" has its parameter
            server: one call with the list of gradients, whose answer is the model after a step of its optimizer
    lists   one rpc_sync with the list of gradients, another for the list of weights, and nothing set. As in the
            tutorial, a reader may see weights of two versions.
    tuned   at its best on one host: one flat tensor; one call for both; the server adds into the memory the gradient
            came in, so what it returns is a consistent version that nobody writes to again, without a copy; and huge
            pages for the tensors that TensorPipe allocates at every call (7 a second without, 17 with, one run each).

TensorPipe itself picks shm + cma on one host. Between the hosts of a lab, which are one machine, `--transports uv
--channels basic` keeps it on the network. Nothing but the last line goes to standard output. Rendezvous is by file,
since TCPStore would listen everywhere.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import queue
import tempfile
import threading
import time
import warnings
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

RATE = 1e-3
WARM_UP_PUSHES = 10
PATIENCE_S = 90.0  # beyond the measured seconds; then everything is ended


Version = tuple[tuple[int, ...], "list[torch.Tensor]"]  # pushes of each learner, and the weights


class Report(NamedTuple):
    """What a learner says at the end; `error` is relative, and only the learner that pushed last has one."""

    pushes: int
    start_s: float
    end_s: float
    error: float | None


class Server:
    """The weights and how many gradients each learner has put into them; a call holds the lock while it adds."""

    def __init__(self, sizes: list[int], learners: int) -> None:
        import torch

        self.lock = threading.Lock()
        self.weights = [torch.zeros(size) for size in sizes]
        self.counts = [0] * learners

    def push(self, learner: int, gradients: list[torch.Tensor]) -> None:
        with self.lock:
            for weights, gradient in zip(self.weights, gradients, strict=True):
                weights.add_(gradient, alpha=-RATE)
            self.counts[learner] += 1

    def push_and_fetch(self, learner: int, gradient: torch.Tensor) -> Version:
        import torch

        with self.lock:
            self.weights = [torch.add(self.weights[0], gradient, alpha=-RATE, out=gradient)]
            self.counts[learner] += 1
            return self.read()

    def read(self) -> Version:
        return tuple(self.counts), self.weights


class TutorialServer(Server):
    """The tutorial's: a model and an optimizer. Its futures, for batches of learners, are not needed for one."""

    def __init__(self, sizes: list[int], learners: int) -> None:
        import torch

        super().__init__(sizes, learners)
        self.model = torch.nn.ParameterList([torch.nn.Parameter(weights) for weights in self.weights])
        self.weights = [parameter.data for parameter in self.model]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)

    def update_and_fetch(self, learner: int, gradients: list[torch.Tensor]) -> tuple[tuple[int, ...], torch.nn.Module]:
        with self.lock:
            for parameter, gradient in zip(self.model, gradients, strict=True):
                parameter.grad = gradient
            self.counts[learner] += 1
            self.optimizer.step()
            self.optimizer.zero_grad()
            return tuple(self.counts), self.model


SERVER: list[Server] = []  # an rpc call reaches a function by its name, so the server's process keeps its one here


def push(learner: int, gradients: list[torch.Tensor]) -> None:
    SERVER[0].push(learner, gradients)


def push_and_fetch(learner: int, gradient: torch.Tensor) -> Version:
    return SERVER[0].push_and_fetch(learner, gradient)


def read() -> Version:
    return SERVER[0].read()


def update_and_fetch(learner: int, gradients: list[torch.Tensor]) -> tuple[tuple[int, ...], torch.nn.Module]:
    server = SERVER[0]
    assert isinstance(server, TutorialServer)
    return server.update_and_fetch(learner, gradients)


def prepare(learner: int, sizes: list[int]) -> list[torch.Tensor]:
    """A learner's gradients: random, its own, and the same for whoever asks."""
    import torch

    chance = torch.Generator().manual_seed(learner)
    return [torch.randn(size, generator=chance) for size in sizes]


class Learner:
    """A gradient that is pushed, and parameters that the weights are copied into."""

    def __init__(self, learner: int, sizes: list[int], form: str) -> None:
        import torch

        self.learner, self.form = learner, form
        self.gradients = prepare(learner, sizes)
        self.parameters = [torch.zeros(size) for size in sizes]
        self.counts: tuple[int, ...] = ()

    def cycle(self) -> None:
        from torch.distributed import rpc

        if self.form == "plain":
            self.counts, model = rpc.rpc_sync("server", update_and_fetch, (self.learner, self.gradients))
            weights = [parameter.detach() for parameter in model]
        elif self.form == "lists":
            rpc.rpc_sync("server", push, (self.learner, self.gradients))
            self.counts, weights = rpc.rpc_sync("server", read)
        else:
            self.counts, weights = rpc.rpc_sync("server", push_and_fetch, (self.learner, self.gradients[0]))
        for parameter, new in zip(self.parameters, weights, strict=True):
            parameter.copy_(new)


def learn(number: int, options: argparse.Namespace, barrier: Barrier) -> Report:
    import torch
    from torch.distributed import rpc

    learner = Learner(number, options.sizes, options.form)
    for _ in range(WARM_UP_PUSHES):
        learner.cycle()
    barrier.wait(PATIENCE_S)
    pushes, start_s = 0, time.monotonic()
    while time.monotonic() - start_s < options.seconds:
        learner.cycle()
        pushes += 1
    end_s = time.monotonic()
    barrier.wait(PATIENCE_S)
    if learner.counts[number] != pushes + WARM_UP_PUSHES:
        raise AssertionError(
            f"learner {number} pushed {pushes + WARM_UP_PUSHES} times, the server saw {learner.counts}"
        )
    counts, last = rpc.rpc_sync("server", read)
    if learner.counts != counts:
        return Report(pushes, start_s, end_s, None)
    if not all(mine.equal(theirs) for mine, theirs in zip(learner.parameters, last, strict=True)):
        raise AssertionError("the weights that the last push brought back are not the server's")
    expected = [torch.zeros(size) for size in options.sizes]
    for other, count in enumerate(counts):
        for sum_, gradient in zip(expected, prepare(other, options.sizes), strict=True):
            sum_ -= gradient * (RATE * count)
    weights, right = torch.cat(learner.parameters), torch.cat(expected)
    return Report(pushes, start_s, end_s, float((weights - right).norm() / right.norm()))


def work(rank: int, options: argparse.Namespace, store: str, barrier: Barrier, reports: Queue[Report]) -> None:
    """One process: rank 0 is the server, which only answers; rank i + 1 is learner i."""
    warnings.simplefilter("ignore")  # init_rpc warns about its own use of an old call
    import torch
    from torch.distributed import rpc

    torch.set_num_threads(options.threads)
    if rank == 0:
        kind = TutorialServer if options.form == "plain" else Server
        SERVER.append(kind(options.sizes, options.learners))
    backend = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{store}",
        rpc_timeout=PATIENCE_S,
        _transports=options.transports and options.transports.split(","),
        _channels=options.channels and options.channels.split(","),
    )
    name = "server" if rank == 0 else f"learner{rank - 1}"
    world = options.learners + 1
    # torch gives init_rpc no types
    rpc.init_rpc(name, rank=rank, world_size=world, rpc_backend_options=backend)  # type: ignore[no-untyped-call]
    if rank > 0:
        reports.put(learn(rank - 1, options, barrier))
    rpc.shutdown()


def measure(options: argparse.Namespace) -> list[Report]:
    """Run all processes of this part; none is left when this returns or raises."""
    os.environ.update(TP_SOCKET_IFNAME=options.device, GLOO_SOCKET_IFNAME=options.device)
    if options.form == "tuned":
        os.environ["THP_MEM_ALLOC_ENABLE"] = "1"
    context = multiprocessing.get_context("spawn")
    barrier, reports = context.Barrier(options.learners), context.Queue()
    deadline_s = time.monotonic() + options.seconds + PATIENCE_S
    with tempfile.TemporaryDirectory() as folder:
        store = options.store or f"{folder}/store"
        ranks = {"all": range(options.learners + 1), "server": range(1), "learners": range(1, options.learners + 1)}
        expected = 0 if options.part == "server" else options.learners
        processes = [
            context.Process(target=work, args=(rank, options, store, barrier, reports), daemon=True)
            for rank in ranks[options.part]
        ]
        try:
            for process in processes:
                process.start()
            found: list[Report] = []
            while len(found) < expected:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"{expected - len(found)} learners have not ended in time")
                if any(process.exitcode for process in processes):
                    raise RuntimeError("a process failed; its error is above")
                try:
                    found.append(reports.get(timeout=0.2))
                except queue.Empty:
                    continue
            for process in processes:
                process.join(max(0.0, deadline_s - time.monotonic()))
            return found
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description="Pushes per second of a parameter server on torch.distributed.rpc.")
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--parameters", type=int, default=25_600_000)
    parser.add_argument("--form", choices=("plain", "lists", "tuned"), default="plain")
    parser.add_argument("--sizes", help="of the model's tensors, joined by commas (default: one of all parameters)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads per process")
    parser.add_argument("--part", choices=("all", "server", "learners"), default="all", help="what runs on this host")
    parser.add_argument("--store", help="the file by which two hosts find each other; it must not be there before")
    parser.add_argument("--device", default="lo", help="the network interface")
    parser.add_argument("--transports", help="of TensorPipe, joined by commas (default: it chooses)")
    parser.add_argument("--channels", help="of TensorPipe, joined by commas (default: it chooses)")
    options = parser.parse_args()
    if options.learners < 1 or options.parameters < 1 or options.threads < 1 or options.seconds <= 0:
        parser.error("every option must be more than 0")
    if (options.part == "all") != (options.store is None):
        parser.error("--store is for two hosts, and then both need it")
    sizes = [int(word) for word in options.sizes.split(",")] if options.sizes else [options.parameters]
    options.parameters = sum(sizes)
    options.sizes = sizes if options.form != "tuned" else [options.parameters]
    found = measure(options)
    if options.part == "server":
        return
    errors = [report.error for report in found if report.error is not None]
    if not errors or not max(errors) < 1e-3:
        raise AssertionError(f"the weights should be initial - rate * sum of gradients; relative errors: {errors}")
    import torch

    pushes = sum(report.pushes for report in found)
    seconds = max(report.end_s for report in found) - min(report.start_s for report in found)
    result = {
        "system": "rpc",
        "form": options.form,
        "learners": options.learners,
        "parameters": options.parameters,
        "tensors": len(options.sizes),
        "pushes": pushes,
        "seconds": round(seconds, 3),
        "per_s": round(pushes / seconds, 2),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
