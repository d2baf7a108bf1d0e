"""The linear scaling rule on Fashion-MNIST: the same accuracy with 1, 2, 4 and 8 learners, and without the rule not.

    python benchmarks/scaling_rule.py

Each learner keeps its minibatch, so an update has P times the samples and there are P times fewer of them. With the
rule the rate is P times as high, after a warm-up; without, it stays. Minutes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from offbeat.train.launch import launch, prepare
from offbeat.train.reading import override, read_recipe


def accuracy(given: argparse.Namespace, learners: int, seed: int, *, rule: bool) -> float:
    """On the test set, at the end."""
    with tempfile.TemporaryDirectory() as folder:
        config = override(
            read_recipe(given.recipe),
            {
                "sync": given.sync,
                "learners": str(learners),
                "seed": str(seed),
                "train.epochs": str(given.epochs),
                "train.scaling": "linear" if rule else "none",
                "save.every_epochs": "0",
            },
        )
        start = prepare(config, run_dir=Path(folder) / "run")
        end = launch(start, lambda record: None, lambda name, line: print(name, line)).end
        return 100 * float(end["accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="fashion-cnn")
    parser.add_argument("--sync", default="ring")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--learners", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    print(
        f"{given.recipe}, {given.sync}, {given.epochs} epochs, accuracy on the test set in %, seeds 0 to {given.seeds - 1}"
    )
    rows = [(learners, True) for learners in given.learners] + [(given.learners[-1], False)]
    for learners, rule in rows:
        began_s = time.monotonic()
        found = [accuracy(given, learners, seed, rule=rule) for seed in range(given.seeds)]
        each = "  ".join(f"{one:.2f}" for one in found)
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        print(
            f"{learners} learner{'s'[: learners > 1]:1}, {'with the rule' if rule else 'rate as it is':13}  "
            f"{statistics.mean(found):.2f} +- {spread:.2f}   ({each})   {time.monotonic() - began_s:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
