"""Real against virtual: the six policies on four learners with injected delays, and the same runs in virtual time.

    python benchmarks/real_virtual.py

Each real run (`offbeat train`) is recorded; its own compute times, by learner, are then the clock of a virtual run
(`trace:RUN`) of the same configuration. Compared is the time to the target: the first end of an epoch at which the
accuracy is there. A virtual run draws its compute times anew, so it is made with five seeds, and the median is taken.
Pushing, updating and fetching take no time in the virtual run: what they take in the real one is part of the error.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from offbeat.predict.machines import Clock
from offbeat.predict.virtual import train_virtually
from offbeat.runs.metrics import reached_at
from offbeat.runs.run_folder import RunDir
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.compute import parse_law
from offbeat.train.config_files import read_config

POLICIES = ("full-sync", "k-sync:2", "k-batch-sync:2", "async", "k-async:2", "k-batch-async:2")
LEARNERS, SEEDS = 4, 5


def real(line: str, folder: Path, given: argparse.Namespace) -> RunDir:
    words = [
        "digits-softmax",
        "--sync",
        line,
        "--learners",
        str(LEARNERS),
        "--slow",
        given.slow,
        "--run-dir",
        str(folder),
    ]
    words += ["--epochs", str(given.epochs), "--lr", str(given.lr), "--save.every-epochs", "0", "--quiet"]
    subprocess.run([sys.executable, "-m", "offbeat", "train", *words], check=True, stdout=subprocess.DEVNULL)
    return RunDir(folder)


def first(times: list[tuple[float, float]], target: float) -> tuple[float, int]:
    """Seconds and the number of the epoch at whose end the accuracy had reached the target."""
    at = reached_at([right for _, right in times], target)
    return (float("nan"), 0) if at is None else (times[at][0], at + 1)


def virtual(run: RunDir, seed: int) -> list[tuple[float, float]]:
    cluster = Cluster(learners=LEARNERS, law=parse_law(f"trace:{run.path}"), seed=seed)
    outcome = train_virtually(read_config(run), Clock(cluster=cluster, ends_of_epochs=True), every=1.0)
    return [(point.seconds, point.accuracy or 0.0) for point in outcome.points[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", default="exp:0.06", help="the injected delay of a minibatch (default exp:0.06)")
    parser.add_argument("--target", type=float, default=0.9)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.007)
    given = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    print(f"digits-softmax, {LEARNERS} learners, delays {given.slow}, to {100 * given.target:.0f} %; "
          f"{os.cpu_count()} cores, load {load:.1f}, torch {torch.__version__}")  # fmt: skip
    print(f"{'policy':<18}{'real':>10}{'epoch':>7}{'virtual':>10}{'epoch':>7}{'from':>9}{'to':>8}{'error':>9}")
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for line in POLICIES:
            run = real(line, Path(folder) / line.replace(":", "-"), given)
            measured = [(record["seconds"], record["accuracy"]) for record in run.read_metrics()]
            at, epoch = first(measured, given.target)
            found = sorted(first(virtual(run, seed), given.target) for seed in range(SEEDS))
            middle, middle_epoch = found[len(found) // 2]
            error = middle / at - 1
            worst = max(worst, abs(error))
            print(
                f"{line:<18}{at:8.2f} s{epoch:7}{middle:8.2f} s{middle_epoch:7}"
                f"{found[0][0]:7.2f} s{found[-1][0]:6.2f} s{100 * error:+8.1f} %",
                flush=True,
            )
    print(f"the largest error is {100 * worst:.1f} %, of {len(POLICIES)} policies")


if __name__ == "__main__":
    main()
