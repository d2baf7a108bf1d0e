"""Trainings on the hosts of a lab, predicted from a calibration and then measured; the worst prediction first.

    python benchmarks/trainings_on_hosts.py                                  # both labs, four all-reduces each
    python benchmarks/trainings_on_hosts.py --labs 4x1,1Gbit/s --sync ring tree

For each lab, `offbeat calibrate --lab` measures computing and the network, `offbeat simulate --calibration --hosts`
predicts the time per update, and `offbeat train` under torchrun measures it. It ends with 1 if the mean error is above
10 %, or if two trainings whose times differ by more than 15 % were predicted in the wrong order. The hosts of a lab
share this machine's cores: run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.lab import Lab
from offbeat.measure.rank_bench import LabRequest
from offbeat.network.keys import TRUST

RECIPE = ("digits-mlp", "--set", "model.options.hidden=8192")  # 606,218 parameters: computing and sending take as long
LABS = ("4x1,1Gbit/s", "2x2,1Gbit/s")
LINES = ("ring", "halving-doubling", "direct", "tree")
EPOCHS = 8
LIMIT_S = 900.0
MOST_ERROR, DIFFERENT = 0.10, 0.15


class Training(NamedTuple):
    lab: str
    line: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def offbeat(*words: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "offbeat", *words], check=True, capture_output=True, text=True, timeout=600
    ).stdout


def predict(line: str, ranks: int, hosts: int, calibration: Path) -> float:
    words = ("--learners", str(ranks), "--hosts", str(hosts), "--calibration", str(calibration), "--json")
    found: dict[str, Any] = json.loads(offbeat("simulate", line, *words))
    return float(found["seconds_per_update"])


def measure(lab: Lab, recipe: Sequence[str], line: str, ranks_each: int, run: Path) -> list[dict[str, Any]]:
    """The rows of metrics of a training on all hosts of a lab: one after each epoch."""
    hosts = lab.network.hosts
    launch = [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nnodes", str(hosts), "--nproc-per-node",
        str(ranks_each), "--node-rank", "{host}", "--master-addr", "{host0}", "--master-port", "29400", "-m", "offbeat",
        "train", *recipe, "--sync", line, "--run-dir", str(run), "--quiet",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", TRUST: "open"}
    processes = [lab.start(host, launch, environment=environment) for host in range(hosts)]
    for process in processes:
        if process.wait(timeout_s=LIMIT_S) != 0:
            sys.exit(process.output)
    return [json.loads(row) for row in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def seconds_per_update(rows: Sequence[dict[str, Any]]) -> float:
    """Evaluations left out. The first epoch warms up: connections, buckets, the choice of streams."""
    first, last = rows[0], rows[-1]
    return (float(last["seconds"]) - float(first["seconds"])) / (int(last["update"]) - int(first["update"]))


def trainings(name: str, lines: list[str], folder: Path) -> list[Training]:
    asked = LabRequest.parse(name)
    calibration = folder / f"{name.partition(',')[0]}.json"
    offbeat("calibrate", *RECIPE, "--quick", "--rounds", "1", "--lab", name, "-o", str(calibration))
    found = []
    with Lab(asked.network) as lab:
        for line in lines:
            predicted_s = predict(line, asked.ranks, asked.network.hosts, calibration)
            run = folder / f"{name.partition(',')[0]}-{line}"
            rows = measure(lab, (*RECIPE, "--epochs", str(EPOCHS)), line, asked.ranks_each, run)
            found.append(Training(name, line, predicted_s, seconds_per_update(rows)))
    return found


def wrong_orders(found: list[Training]) -> list[str]:
    pairs = [(one, other) for one, other in combinations(found, 2) if one.lab == other.lab]
    return [
        f"{one.line} and {other.line} on {one.lab}"
        for one, other in pairs
        if max(one.measured_s, other.measured_s) > (1 + DIFFERENT) * min(one.measured_s, other.measured_s)
        and (one.measured_s < other.measured_s) != (one.predicted_s < other.predicted_s)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labs", nargs="+", default=LABS, metavar="HOSTSxRANKS,RATE")
    parser.add_argument("--sync", nargs="+", default=LINES, metavar="STRATEGY")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = [one for name in given.labs for one in trainings(name, list(given.sync), Path(folder))]
    print(f"time per update of {' '.join(RECIPE)}, load {os.getloadavg()[0]:.1f}")
    print(f"{'lab':<16}{'strategy':<20}{'predicted':>12}{'measured':>12}{'error':>9}")
    for one in sorted(found, key=lambda one: -abs(one.error)):
        times = f"{1e3 * one.predicted_s:>9.2f} ms{1e3 * one.measured_s:>9.2f} ms"
        print(f"{one.lab:<16}{one.line:<20}{times}{100 * one.error:>+8.1f} %")
    mean = statistics.mean(abs(one.error) for one in found)
    wrong = wrong_orders(found)
    print(f"mean error {100 * mean:.1f} %; wrong order: {', '.join(wrong) or 'none'}")
    sys.exit(mean > MOST_ERROR or bool(wrong))


if __name__ == "__main__":
    main()
