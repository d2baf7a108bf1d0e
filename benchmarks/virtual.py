"""How fast training in virtual time is: against a plain loop, against itself one minibatch at a time, and at P = 1,000.

    make bench

digits-mlp in minibatches of 8, compute times gamma:1,0.25. First six policies x 5 seeds with 100 learners, each with
its looks at the test set. Then the time of a gradient, all in one process, alternately, the best of three: a plain SGD
loop (same model, data and number of gradients), virtual time with one minibatch after the other, and as it is by
default. Looks are left out there.
"""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Callable

import torch

from offbeat.predict.machines import Clock
from offbeat.predict.virtual import VirtualRun, train_virtually
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.compute import parse_law
from offbeat.train.config import Config
from offbeat.train.config_files import changed, read_recipe
from offbeat.train.learning_rate import optimizer_of
from offbeat.train.tasks import Task, task_of

POLICIES = ("full-sync", "k-sync:50", "k-batch-sync:50", "async", "k-async:10", "k-batch-async:10")
SEEDS, LEARNERS, EPOCHS, SIZE, RATE = 5, 100, 30, 8, 0.05
NEVER = 1e9  # epochs from look to look


def config_of(line: str, *, learners: int = LEARNERS, seed: int = 0, epochs: int = EPOCHS) -> Config:
    train = {"epochs": epochs, "lr": RATE, "batch_size": SIZE, "momentum": 0.0, "schedule": "constant"}
    return changed(read_recipe("digits-mlp"), {"sync": line, "learners": learners, "seed": seed, "train": train})


def virtual(config: Config, task: Task, *, width: int = 0, every: float = NEVER) -> VirtualRun:
    cluster = Cluster(learners=config.learners, law=parse_law("gamma:1,0.25"), seed=config.seed)
    return train_virtually(config, Clock(cluster=cluster), task=task, width=width, every=every)


def plain(config: Config, task: Task) -> None:
    """The same number of gradients, one after the other, each followed by a step."""
    torch.manual_seed(config.seed)
    model = task.build()
    optimizer = optimizer_of(model, config.train)
    samples, size = len(task.train), config.train.batch_size  # type: ignore[arg-type]  # it has a length
    for _ in range(config.train.epochs):
        order = torch.randperm(samples)
        for start in range(0, samples, size):
            inputs, targets = task.train.__getitems__(order[start : start + size])  # type: ignore[attr-defined]  # the digits have it
            optimizer.zero_grad(set_to_none=True)
            task.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]  # torch's own
            optimizer.step()


def seconds(do: Callable[[], object]) -> float:
    start = time.perf_counter()
    do()
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    print(f"virtual time: Python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores")
    task = task_of(config_of("async"))
    virtual(config_of("async", epochs=1), task)  # what is loaded and made on the first call
    start = time.perf_counter()
    minibatches = 0
    for line in POLICIES:
        ends = []
        for seed in range(SEEDS):
            outcome = virtual(config_of(line, seed=seed), task, every=0.25)
            ends.append(outcome.points[-1].accuracy or 0.0)
            minibatches += sum(outcome.staleness.values())
        print(f"  {line:<18} {100 * sum(ends) / SEEDS:5.1f} % right, staleness {outcome.staleness_mean:.2f}")
    took = time.perf_counter() - start
    print(f"six policies x {SEEDS} seeds, {LEARNERS} learners: {minibatches:,} minibatches in {took:.1f} s (below 300)")

    print(f"{'':18}{'plain SGD':>12}{'one by one':>12}{'together':>12}{'against plain':>16}{'one by one':>12}")
    for line in POLICIES:
        config = config_of(line)
        many = sum(virtual(config, task).staleness.values())
        ways: dict[str, Callable[[], object]] = {
            "plain": lambda config=config: plain(config, task),  # type: ignore[misc]  # mypy has no defaults of lambdas
            "alone": lambda config=config: virtual(config, task, width=1),  # type: ignore[misc]  # the same
            "together": lambda config=config: virtual(config, task),  # type: ignore[misc]  # the same
        }
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(3):
            for way, do in ways.items():
                best[way] = min(best[way], seconds(do))
        each = {way: 1e6 * took / many for way, took in best.items()}
        print(
            f"  {line:<16}{each['plain']:9.0f} us{each['alone']:9.0f} us{each['together']:9.0f} us"
            f"{100 * (each['together'] / each['plain'] - 1):+14.0f} %{each['alone'] / each['together']:11.1f}x"
        )

    config = config_of("async", learners=1000, epochs=100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    took = seconds(lambda: virtual(config, task))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        f"async, 1,000 learners: {100 * 1438 // SIZE:,} minibatches in {took:.1f} s, {grown:.0f} MiB more at the peak"
    )


if __name__ == "__main__":
    main()
