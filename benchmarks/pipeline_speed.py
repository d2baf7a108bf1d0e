"""Two stages on two cores beside one process: the same model, the same microbatches, in turns.

    python benchmarks/pipeline_speed.py

Eight equal layers, 8 microbatches: with 1F1B on two ranks a ninth of the time is bubbles, so at most 1.78 times the
samples per second of one process with one thread. Beside it one process with two threads and two DDP replicas. Run it
on an idle machine with two cores or more; about 2 minutes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from offbeat.train.config import Config
from offbeat.train.config_files import changed
from offbeat.train.launch import launch, prepare

WAYS = {
    "one process, 1 thread": {"learners": 1, "train": {"batch_size": 64, "accumulate": 8}},
    "2 stages, 1f1b": {"learners": 1, "parallel": "stages=2,microbatches=8"},
    "one process, 2 threads": {"learners": 1, "train": {"threads": 2}},
    "2 DDP replicas": {"learners": 2, "train": {"batch_size": 64, "accumulate": 4}},
}


def config_of(given: argparse.Namespace, way: dict[str, object]) -> Config:
    base = {
        "name": "equal-layers",
        "device": "cpu",
        "model": {"name": "mlp", "options": {"hidden": given.width, "layers": 7}},
        "data": {
            "name": "synthetic",
            "options": {"samples": 512 * given.updates, "features": given.width, "classes": given.width},
        },
        "train": {"epochs": 1, "batch_size": 512, "lr": 0.01, "lr_batch": 512},
        "save": {"every_epochs": 0},
    }
    return changed(changed(Config(), base), way)


def samples_per_s(config: Config) -> tuple[float, float]:
    """And the share of the learners' time in waiting."""
    with tempfile.TemporaryDirectory() as folder:
        start = prepare(config, run_dir=Path(folder) / "run")
        end = launch(start, lambda record: None, lambda who, line: print(f"{who} | {line}")).end
    return float(end["samples_per_s"]), float(end["wait_share"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--width", type=int, default=1024)
    given = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for _ in range(given.rounds):
        for name, way in WAYS.items():
            found[name].append(samples_per_s(config_of(given, way)))
    alone = statistics.median(speed for speed, _ in found["one process, 1 thread"])
    for name, rounds in found.items():
        speed, waiting = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{name:24} {speed:8.0f} samples/s  {speed / alone:5.2f}x  waiting {100 * waiting:4.1f} %", flush=True)


if __name__ == "__main__":
    main()
