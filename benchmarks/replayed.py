"""Real runs, each replayed under its own strategy: how far is the replay off?

    python benchmarks/replayed.py

Every run has four learners, one of them twice as slow, and delays on purpose. As `offbeat replay` does, this takes a
run's compute times, in their order, and what lay between minibatches, and simulates the same strategy again. Asked for
are its seconds of training within 5 %, and within 10 % where minibatches were cancelled, since what these would have
taken is not known; and gradients about as old as they were, as `offbeat replay` asks before it advises by accuracies.
It ends with code 1 where one is missed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from offbeat.predict.replay import FinishedRun, Replay, ReplayedStrategy, read_run
from offbeat.predict.replay_advice import is_as_stale
from offbeat.train.tasks import task_of

STRATEGIES = {  # and the epochs that take some seconds
    "ring": 9,
    "full-sync": 9,
    "async": 20,
    "k-async:2": 20,
    "k-batch-async:2": 20,
    "k-sync:2": 16,
    "k-batch-sync:2": 16,
}
LEARNERS = 4
WHOLE, CUT = 0.05, 0.10  # the errors that are allowed: with all minibatches whole, with some cancelled


def real(line: str, folder: Path, given: argparse.Namespace) -> FinishedRun:
    words = ["digits-mlp", "--sync", line, "--learners", str(LEARNERS), "--run-dir", str(folder), "--quiet"]
    words += ["--slow", given.slow, "--slow", "learner=0,factor=2", "--save.every-epochs", "0"]
    words += ["--epochs", str(max(1, round(STRATEGIES[line] * given.length)))]
    subprocess.run([sys.executable, "-m", "offbeat", "train", *words], check=True, stdout=subprocess.DEVNULL)
    return read_run(folder)


def told(line: str, run: FinishedRun, own: ReplayedStrategy, error: float, allowed: float) -> str:
    recorded = run.recorded
    shares = f"{100 * recorded.wait_share:6.0f} %{100 * own.wait_share:5.0f} %"
    return (
        f"{line:<18}{run.seconds:8.2f} s{own.seconds:8.2f} s{100 * error:+8.1f} %{100 * allowed:7.0f} %"
        f"{run.updates:8}{own.updates:6}{run.staleness:8.2f}{own.staleness:6.2f}{shares}"
        f"{1e3 * (recorded.there_s + recorded.back_s):8.1f} ms{100 * recorded.cancelled / recorded.minibatches:8.0f} %"
    )


def across(runs: dict[str, FinishedRun], samples: int) -> None:
    """Seconds a sample of each run, by the recordings of all; what else the machine did is in these errors."""
    print(f"{'error, from the run':<20}" + "".join(f"{line:>17}" for line in runs))
    for line, run in runs.items():
        replay = Replay(run=run, samples=samples)
        errors = [replay(other).seconds / run.samples * of.samples / of.seconds - 1 for other, of in runs.items()]
        print(f"{line:<20}" + "".join(f"{100 * error:+15.1f} %" for error in errors), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategies", nargs="*", default=list(STRATEGIES), help="some of them (default: all)")
    parser.add_argument("--slow", default="exp:0.02", help="the injected delay of a minibatch (default exp:0.02)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs there")
    parser.add_argument("--across", action="store_true", help="replay each under all the others too, against these")
    parser.add_argument("--length", type=float, default=1.0, help="times the usual epochs (default 1)")
    given = parser.parse_args()
    if unknown := [line for line in given.strategies if line not in STRATEGIES]:
        parser.error(f"'{unknown[0]}' is not one of {', '.join(STRATEGIES)}")
    torch.set_num_threads(1)
    print(f"digits-mlp, {LEARNERS} learners, delays {given.slow}, learner 0 twice as slow; "
          f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")  # fmt: skip
    print(f"{'strategy':<18}{'real':>10}{'replay':>10}{'error':>10}{'allowed':>9}"
          f"{'updates':>14}{'staleness':>14}{'waiting':>15}{'way':>11}{'cancelled':>10}")  # fmt: skip
    missed, task, runs = [], None, {}
    with tempfile.TemporaryDirectory() as folder:
        for line in given.strategies:
            run = real(line, (given.keep or Path(folder)) / line.replace(":", "-"), given)
            runs[line] = run
            task = task or task_of(run.config)
            samples = len(task.train)  # type: ignore[arg-type]  # a map-style set has a length
            own = Replay(run=run, samples=samples)(line)
            error = own.seconds / run.seconds - 1
            allowed = CUT if run.recorded.cancelled else WHOLE
            missed += [line] if abs(error) > allowed else []
            missed += [] if is_as_stale(run, own) else [f"{line} (staleness)"]
            print(told(line, run, own, error, allowed), flush=True)
    if given.across:
        across(runs, samples)
    print(f"missed: {', '.join(missed)}" if missed else f"all {len(given.strategies)} within what is allowed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
