"""Two stages on two cores beside one process: the same model, the same microbatches, in turns.

    python benchmarks/pipeline_speed.py

Eight equal layers, 8 microbatches: with 1F1B on two ranks a ninth of the time is bubbles, so at most 1.78 times the
samples per second of one process with one thread. Beside it ZB-H1, one process with two threads and two DDP replicas.
For stages, the time of an update that was predicted before the run stands beside the measured one. Of the rounds, each
way is shown with the one in which other programs used the least of the machine, and how many cores they used. Run it on
an idle machine with two cores or more; about 2 minutes.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from offbeat.runs.log import read_log
from offbeat.train.config import Config
from offbeat.train.config_files import changed
from offbeat.train.launch import launch, prepare

WAYS = {
    "one process, 1 thread": {"learners": 1, "train": {"batch_size": 64, "accumulate": 8}},
    "2 stages, 1f1b": {"learners": 1, "parallel": "stages=2,microbatches=8"},
    "2 stages, zb-h1": {"learners": 1, "parallel": "stages=2,microbatches=8,schedule=zb-h1"},
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


class Measured(NamedTuple):
    """A run: samples per second, the share of the learners' time in waiting, seconds of an update (the median, and the
    fastest, which other programs have disturbed least), and as predicted."""

    samples_per_s: float
    wait_share: float
    update_s: float
    fastest_s: float
    predicted_s: float
    others: float  # cores that other programs have used


def used_by_all_s() -> float:
    """Processor time of all programs since the machine was started."""
    user, nice, system, _, _, *more = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
    return (user + nice + system + sum(more)) / os.sysconf("SC_CLK_TCK")


def used_by_us_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(config: Config) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        start = prepare(config, run_dir=Path(folder) / "run")
        began_s, others_s = time.monotonic(), used_by_all_s() - used_by_us_s()
        end = launch(start, lambda record: None, lambda who, line: print(f"{who} | {line}")).end
        others = (used_by_all_s() - used_by_us_s() - others_s) / (time.monotonic() - began_s)
        ends = [span.end_s for span in read_log(start.run.log(1)).spans if (span.learner, span.what) == (0, "apply")]
    took = [end - begin for begin, end in pairwise(ends)]
    predicted_s = math.nan if start.plan is None else start.plan.seconds
    return Measured(end["samples_per_s"], end["wait_share"], statistics.median(took), min(took), predicted_s, others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--width", type=int, default=1024)
    given = parser.parse_args()
    found: dict[str, list[Measured]] = {name: [] for name in WAYS}
    for _ in range(given.rounds):
        for name, way in WAYS.items():
            found[name].append(measure(config_of(given, way)))
    calmest = {name: min(rounds, key=lambda one: one.others) for name, rounds in found.items()}
    alone = calmest["one process, 1 thread"].samples_per_s
    for name, (speed, waiting, took_s, fastest_s, predicted_s, others) in calmest.items():
        line = f"{name:24} {speed:8.0f} samples/s  {speed / alone:5.2f}x  waiting {100 * waiting:4.1f} %"
        line += f"  others {max(0.0, others):4.2f} cores"
        line += f"  update {1e3 * took_s:6.1f} ms, fastest {1e3 * fastest_s:6.1f}"
        if not math.isnan(predicted_s):
            off, at_best = (100 * (predicted_s / one_s - 1) for one_s in (took_s, fastest_s))
            line += f", predicted {1e3 * predicted_s:6.1f} ms ({off:+.0f} %; of the fastest {at_best:+.0f} %)"
        print(line, flush=True)


if __name__ == "__main__":
    main()
