"""The linear scaling rule on Fashion-MNIST: the same accuracy with 1, 2, 4 and 8 learners, and without the rule not.

    python benchmarks/scaling_rule.py

Each learner keeps its minibatch, so an update has P times the samples and there are P times fewer of them. With the
rule the rate is P times as high, after a warm-up; without, it stays and there is no warm-up. All else is the recipe's.

Seeds run at the same time, as far as there are cores for all their learners: this changes how long it takes, and
nothing else. Six minutes on 16 cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from offbeat.spec import count_of
from offbeat.train.config import Config
from offbeat.train.config_files import override, read_recipe
from offbeat.train.launch import launch, prepare


def config_of(given: argparse.Namespace, learners: int, seed: int, *, rule: bool) -> Config:
    changes = {"sync": given.sync, "learners": str(learners), "seed": str(seed), "save.every_epochs": "0"}
    if not rule:
        changes["train.scaling"] = "none"
    if given.epochs:
        changes["train.epochs"] = str(given.epochs)
    return override(read_recipe(given.recipe), changes)


def accuracy(config: Config) -> float:
    """On the test set, at the end, in %."""
    with tempfile.TemporaryDirectory() as folder:
        start = prepare(config, run_dir=Path(folder) / "run")
        end = launch(start, lambda record: None, lambda name, line: print(name, line)).end
        return 100 * float(end["accuracy"])


def measure(given: argparse.Namespace, learners: int, *, rule: bool) -> float:
    """The mean over the seeds; prints a row."""
    began_s = time.monotonic()
    at_once = max(1, min(given.seeds, len(os.sched_getaffinity(0)) // learners))
    # A spawned process has no threads of ours yet, so it may fork its learners.
    with ProcessPoolExecutor(at_once, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(accuracy, [config_of(given, learners, seed, rule=rule) for seed in range(given.seeds)]))
    mean, spread = statistics.mean(found), statistics.stdev(found) if len(found) > 1 else 0.0
    who = f"{count_of(learners, 'learner')}, {'with the rule' if rule else 'without'}"
    each = "  ".join(f"{one:.2f}" for one in found)
    print(f"{who:26}  {mean:.2f} +- {spread:.2f}   ({each})   {time.monotonic() - began_s:.0f} s", flush=True)
    return mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="fashion-cnn")
    parser.add_argument("--sync", default="ring")
    parser.add_argument("--epochs", type=int, default=0, help="0: as many as the recipe says")
    parser.add_argument("--learners", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    most = max(given.learners)
    train = config_of(given, most, 0, rule=True).train
    print(
        f"{given.recipe}, {given.sync}, {count_of(train.epochs, 'epoch')}, rate {train.lr:g} for {train.lr_batch} "
        f"samples, warm-up {train.warmup_epochs:g}: accuracy on the test set in %, {count_of(given.seeds, 'seed')}",
        flush=True,
    )
    means = [measure(given, learners, rule=True) for learners in given.learners]
    without = measure(given, most, rule=False)
    lost = means[given.learners.index(most)] - without
    print(f"with the rule the means lie within {max(means) - min(means):.2f} points; without it {lost:.2f} are lost")


if __name__ == "__main__":
    main()
