"""Time to an accuracy with codecs on the hosts of a lab, predicted and then measured.

    python benchmarks/codec_times.py                       # three strategies, each with its bandwidth
    python benchmarks/codec_times.py --cases ring:codec=int8@4x1,10Mbit/s --target 0.89

For each lab `offbeat calibrate --lab` measures computing and the network, and `offbeat simulate --calibration` predicts
the time per update. A training in virtual time says after how many epochs the target is reached (`codec_accuracy.py`).
Then `offbeat train` does it under torchrun on the hosts of the lab. It ends with 1 if a time per update was predicted
more than 15 % off. The hosts of a lab share this machine's cores: run it on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from codec_accuracy import config_of, train
from trainings_on_hosts import measure, offbeat, predict, seconds_per_update

from offbeat.lab import Lab
from offbeat.measure.rank_bench import LabRequest
from offbeat.runs.metrics import reached_at, time_to_accuracy

CASES = (
    "ring@4x1,100Mbit/s",
    "ring:codec=int8@4x1,10Mbit/s",
    "ring:codec=top-k:0.01@4x1,10Mbit/s",
)
MOST_ERROR = 0.15


def calibrated(lab: str, recipe: str, folder: Path) -> Path:
    file = folder / f"{lab.replace('/', '_')}.json"
    if not file.exists():
        offbeat("calibrate", recipe, "--quick", "--rounds", "1", "--lab", lab, "-o", str(file))
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="STRATEGY@HOSTSxRANKS,RATE")
    parser.add_argument("--recipe", default="fashion-cnn")
    parser.add_argument("--target", type=float, default=0.89)
    given = parser.parse_args()
    worst = 0.0
    print(
        f"{given.recipe} to {100 * given.target:g} %, load {os.getloadavg()[0]:.1f}; ms of an update, s to the target"
    )
    print(f"{'strategy':<28}{'lab':<16}{'predicted':>11}{'measured':>11}{'error':>8}{'predicted':>12}{'measured':>11}"
          f"{'last accuracy':>16}", flush=True)  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, case in enumerate(given.cases):
            line, _, lab = case.rpartition("@")
            asked = LabRequest.parse(lab)
            update_s = predict(line, asked.ranks, asked.network.hosts, calibrated(lab, given.recipe, folder))
            virtual = train(config_of(given.recipe, line, 0)).points
            at = reached_at([point.accuracy for point in virtual], given.target)
            with Lab(asked.network) as hosts:
                rows = measure(hosts, (given.recipe,), line, asked.ranks_each, folder / f"run-{number}")
            real_s = seconds_per_update(rows)
            reached_s = time_to_accuracy([(row["seconds"], row["accuracy"]) for row in rows], given.target)
            error = update_s / real_s - 1
            worst = max(worst, abs(error))
            predicted = "-" if at is None else f"{virtual[at].update * update_s:.1f}"
            print(f"{line:<28}{lab:<16}{1e3 * update_s:>11.1f}{1e3 * real_s:>11.1f}{100 * error:>+7.1f}%{predicted:>12}"
                  f"{'-' if reached_s is None else f'{reached_s:.1f}':>11}"
                  f"{100 * virtual[-1].accuracy:>9.2f}{100 * rows[-1]['accuracy']:>7.2f}", flush=True)  # fmt: skip
    sys.exit(worst > MOST_ERROR)


if __name__ == "__main__":
    main()
