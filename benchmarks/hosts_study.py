"""Unequal hosts: an all-reduce beside parameter servers, predicted from a calibration and then measured.

    python benchmarks/hosts_study.py --out study --quick            # one seed, a tenth of the images
    python benchmarks/hosts_study.py --out study --limit 280s       # runs until the limit; again: goes on where it was
    python benchmarks/hosts_study.py --out study --table            # only what was measured so far
    python benchmarks/hosts_study.py --out study --table --svg study.svg

A lab of 4 hosts, each with one learner: links of 100 Mbit/s, but 10 Mbit/s for host 3, and the learner of host 2 takes
3 times as long for each minibatch. fashion-cnn trains until an epoch ends with the accuracy reached. Servers are on
host 0. For each strategy: seconds per update and seconds to the accuracy, predicted (`offbeat calibrate --lab`, virtual
time) and measured. Every result is a line of results.jsonl in --out as soon as it is there, and is not made again.

A model is evaluated at the end of each epoch. Where the accuracy is reached close to one, chance decides between two
ends of epochs, so the time to the accuracy is where the straight line between two evaluations reaches it; the time
until an epoch ends with it is told, too.

It ends with 1 if all was measured and a time per update is off by more than 15 %, a mean time to the accuracy by more
than 25 %, or strategies are in another order than was predicted. The hosts share this machine's cores: run it idle.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np

from offbeat.charts.labelled_lines import Line, line_chart
from offbeat.datasets.fashion import folders
from offbeat.lab import Lab
from offbeat.lab.control import HostProcess
from offbeat.measure.network_bench import NetworkRequest, measure_network
from offbeat.measure.rank_bench import LabRequest
from offbeat.network.keys import TRUST
from offbeat.predict.calibration import as_json, read_calibration
from offbeat.predict.from_calibration import foresee_evaluations, predict
from offbeat.runs.metrics import reached_at
from offbeat.spec import parse_seconds
from offbeat.strategy import ALL_REDUCE, family_of
from offbeat.train.config import Config
from offbeat.train.config_files import changed, read_recipe

RECIPE = "fashion-cnn"
LAB = "4x1,100Mbit/s,3=10Mbit/s"
SLOW = ("learner=2,factor=3",)
LINES = ("ring", "k-sync:2", "k-batch-async:4", "local-sgd:8")
SEEDS = (0, 1, 2)
KINDS = ("predicted", "measured")
FULL, QUICK = (60_000, 10_000), (6_000, 2_000)  # images to train on and to test with
TARGET, QUICK_TARGET = 0.85, 0.80
CHANCE = 0.1  # of 10 classes: where all begin
EPOCHS = 40  # at most
PORT = 7000
UPDATE_ERROR, ACCURACY_ERROR, DIFFERENT = 0.15, 0.25, 0.15
LIMIT_S = 3600.0  # of one training
_FILES = (("train-images-idx3-ubyte", 0), ("train-labels-idx1-ubyte", 0), ("t10k-images-idx3-ubyte", 1),
          ("t10k-labels-idx1-ubyte", 1))  # fmt: skip


class Result(NamedTuple):
    """Of one training, `kind` "predicted" or "measured"."""

    line: str
    seed: int
    kind: str
    update_s: float
    points: Sequence[Sequence[float]]  # seconds and accuracy of each evaluation

    def epoch_s(self, target: float) -> float | None:
        """When the first epoch ended that had the accuracy; None: it did not get there."""
        at = reached_at([accuracy for _, accuracy in self.points], target)
        return None if at is None else self.points[at][0]

    def target_s(self, target: float) -> float | None:
        """When the straight line between two evaluations reaches it."""
        at = reached_at([accuracy for _, accuracy in self.points], target)
        if at is None:
            return None
        (before_s, before), (after_s, after) = self.points[at - 1] if at else (0.0, CHANCE), self.points[at]
        return before_s + (after_s - before_s) * max(0.0, target - before) / (after - before)


class Study(NamedTuple):
    out: Path
    lines: tuple[str, ...]
    seeds: tuple[int, ...]
    images: tuple[int, int]
    target: float

    @property
    def results(self) -> Path:
        return self.out / "results.jsonl"

    @property
    def calibration(self) -> Path:
        return self.out / "calibration.json"

    @property
    def data(self) -> Path:
        return self.out / f"data-{self.images[0]}"

    def known(self) -> list[Result]:
        if not self.results.is_file():
            return []
        rows = [json.loads(row) for row in self.results.read_text(encoding="utf-8").splitlines()]
        mine = [row["result"] for row in rows if (row["images"], row["target"]) == self.label()]
        # Results of an earlier form of this study are taken, too, if they have all that is needed.
        whole = [result for result in mine if result.get("points")]
        return [Result(**{name: result[name] for name in Result._fields}) for result in whole]

    def label(self) -> tuple[int, float]:
        return self.images[0], self.target

    def add(self, result: Result) -> None:
        facts = {"images": self.images[0], "target": self.target, "load": os.getloadavg()[0]}
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"result": result._asdict(), **facts}) + "\n")

    def config(self, line: str, seed: int) -> Config:
        wanted = {"sync": line, "learners": 4, "seed": seed, "slow": list(SLOW)}
        train = {"epochs": EPOCHS, "stop_at": self.target}
        return changed(read_recipe(RECIPE), {**wanted, "train": train, "save": {"every_epochs": 0}})


def write_images(data: Path, images: tuple[int, int]) -> None:
    """The first images of each file: the classes are mixed in all of them."""
    folder = data / "fashion-mnist"
    folder.mkdir(parents=True, exist_ok=True)
    source = next(path for path in folders() if path.is_dir())
    for name, which in _FILES:
        packed = source / f"{name}.gz"
        whole = gzip.decompress(packed.read_bytes()) if packed.is_file() else (source / name).read_bytes()
        head = 4 * (1 + whole[3])
        sizes = [int.from_bytes(whole[at : at + 4], "big") for at in range(4, head, 4)]
        kept = min(images[which], sizes[0])
        body = np.frombuffer(whole, np.uint8, offset=head).reshape(sizes)[:kept].tobytes()
        (folder / name).write_bytes(whole[:4] + kept.to_bytes(4, "big") + whole[8:head] + body)


def calibrate(study: Study, end_s: float) -> bool:
    """One host, with few images, as a minibatch of many takes no longer; then the network. Whether both are there."""
    one_host = study.out / "one-host.json"
    if not one_host.is_file():
        few = study.out / "data-few"
        write_images(few, QUICK)
        words = ("calibrate", RECIPE, "--learners", "1", "2", "--quick", "--rounds", "1", "-o", str(one_host))
        environment = {**os.environ, "OFFBEAT_DATA": str(few)}
        subprocess.run([sys.executable, "-m", "offbeat", *words], check=True, timeout=900, env=environment)
    if not study.calibration.is_file() and time.monotonic() < end_s:
        network = measure_network(NetworkRequest(lab=LabRequest.parse(LAB)), lambda doing: None)
        whole = as_json(replace(read_calibration(one_host), network=network))
        study.calibration.write_text(json.dumps(whole), encoding="utf-8")
    return study.calibration.is_file()


def foresee(study: Study, line: str, seed: int) -> Result:
    config, calibration = study.config(line, seed), read_calibration(study.calibration)
    predicted = predict(calibration, changed(config, {"train": {"epochs": 4}}), study.images[0], hosts=4)
    points = [(one.seconds, one.accuracy or 0.0) for one in foresee_evaluations(calibration, config, hosts=4)]
    return Result(line, seed, "predicted", predicted.seconds_per_update, points)


def train(study: Study, line: str, seed: int) -> Result:
    """A training on the hosts of a fresh lab."""
    run = study.out / f"{line}-{seed}-{study.images[0]}-{time.time_ns()}"
    own = [
        RECIPE, "--sync", line, "--seed", str(seed), "--train.epochs", str(EPOCHS), "--train.stop-at",
        str(study.target), "--slow", *SLOW, "--save.every-epochs", "0", "--run-dir", str(run), "--quiet",
    ]  # fmt: skip
    offbeat = [sys.executable, "-W", "ignore", "-m", "offbeat"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", TRUST: "open", "OFFBEAT_DATA": str(study.data)}
    with Lab(LabRequest.parse(LAB).network) as lab:
        hosts, address = lab.network.hosts, f"{lab.network.address(0)}:{PORT}"
        if family_of(line) == ALL_REDUCE:
            launch = [
                sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nnodes", str(hosts),
                "--nproc-per-node", "1", "--node-rank", "{host}", "--master-addr", "{host0}", "--master-port", "29400",
                "-m", "offbeat", "train", *own,
            ]  # fmt: skip
            processes = [lab.start(host, launch, environment=environment) for host in range(hosts)]
        else:
            first = [*offbeat, "train", *own, "--learners", str(hosts), "--listen", address, "--remote", str(hosts - 1)]
            processes = [lab.start(0, first, environment=environment)]
            for host in range(1, hosts):  # one after the other, so that learner h is on host h
                processes.append(_join(lab, host, [*offbeat, "work", "--join", address], environment))
        for process in processes:
            if process.wait(timeout_s=LIMIT_S) != 0:
                sys.exit(f"{line}: {process.output[-2000:]}")
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last, first_row = rows[-1], rows[0]
    since = first_row if len(rows) > 1 else {"seconds": 0.0, "update": 0}  # the first epoch warms up
    update_s = (last["seconds"] - since["seconds"]) / (last["update"] - since["update"])
    points = [(float(row["seconds"]), float(row["accuracy"])) for row in rows]
    return Result(line, seed, "measured", update_s, points)


def _join(lab: Lab, host: int, words: Sequence[str], environment: dict[str, str]) -> HostProcess:
    again = 'n=0; until "$@"; do n=$((n+1)); [ $n -lt 100 ] || exit 1; sleep 0.2; done'
    process = lab.start(host, ["sh", "-c", again, "sh", *words, "--learners", "1"], environment=environment)
    end_s = time.monotonic() + 60
    while "joined" not in process.output:
        if time.monotonic() > end_s:
            sys.exit(f"host {host} did not join: {process.output[-2000:]}")
        time.sleep(0.05)
    return process


# --- the table --------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A strategy, over the seeds that were predicted and measured: means."""

    line: str
    seeds: int
    update_s: tuple[float, float]  # predicted, measured
    target_s: tuple[float, float] | None
    epoch_s: tuple[float, float] | None


def rows_of(study: Study) -> list[Row]:
    known = study.known()
    rows = []
    for line in study.lines:
        pairs = [
            (one, other)
            for one in known
            for other in known
            if (one.line, one.kind, other.line, other.kind, one.seed)
            == (line, "predicted", line, "measured", other.seed)
        ]
        if pairs:
            updates = means([(p.update_s, m.update_s) for p, m in pairs])
            assert updates is not None
            targets, epochs = (
                means([(find(p, study.target), find(m, study.target)) for p, m in pairs])
                for find in (Result.target_s, Result.epoch_s)
            )
            rows.append(Row(line, len(pairs), updates, targets, epochs))
    return rows


def means(pairs: Sequence[tuple[float | None, float | None]]) -> tuple[float, float] | None:
    """Of the first and of the second ones; None, where one did not get there."""
    whole = [(one, other) for one, other in pairs if one is not None and other is not None]
    if len(whole) < len(pairs):
        return None
    return statistics.fmean(one for one, _ in whole), statistics.fmean(other for _, other in whole)


def error_of(pair: tuple[float, float]) -> float:
    return pair[0] / pair[1] - 1


def wrong_orders(pairs: Iterable[tuple[str, tuple[float, float]]]) -> list[str]:
    return [
        f"{one} and {other}"
        for (one, (p1, m1)), (other, (p2, m2)) in combinations(list(pairs), 2)
        if max(m1, m2) > (1 + DIFFERENT) * min(m1, m2) and (m1 < m2) != (p1 < p2)
    ]


def tell(study: Study) -> bool:
    """Print what is known; whether all of it is within the limits."""
    rows = rows_of(study)
    print(f"{RECIPE}, {study.images[0]:,} images, {LAB}, {SLOW[0]}; accuracy {100 * study.target:g} %")
    heads = ("s/update", "s to accuracy", "s to the end of the epoch")
    print("| strategy | seeds |" + "".join(f" {head} predicted | measured | error |" for head in heads))
    print("|---|---|" + "---|---|---|" * len(heads))
    for row in rows:
        cells = [
            "- | - | -"
            if pair is None
            else f"{pair[0]:.{digits}f} | {pair[1]:.{digits}f} | {100 * error_of(pair):+.1f} %"
            for pair, digits in ((row.update_s, 4), (row.target_s, 1), (row.epoch_s, 1))
        ]
        print(f"| `{row.line}` | {row.seeds} | {' | '.join(cells)} |")
    reached = [(row.line, row.target_s) for row in rows if row.target_s is not None]
    wrong = wrong_orders((row.line, row.update_s) for row in rows) + wrong_orders(reached)
    print(f"wrong order: {', '.join(wrong) or 'none'}")
    times = {line: measured_s for line, (_, measured_s) in reached}
    if "ring" in times and len(times) > 1:
        best = min(times, key=lambda line: times[line])
        print(f"{best} reaches {100 * study.target:g} % {times['ring'] / times[best]:.1f}x as fast as ring")
    updates = all(abs(error_of(row.update_s)) <= UPDATE_ERROR for row in rows)
    accuracies = all(abs(error_of(pair)) <= ACCURACY_ERROR for _, pair in reached)
    return updates and accuracies and not wrong and len(reached) == len(rows)


def draw(study: Study) -> str:
    """Error against time as it was measured: medians over the seeds, epoch by epoch, as far as all trained."""
    found = []
    for line in study.lines:
        runs = [one.points for one in study.known() if (one.line, one.kind) == (line, "measured")]
        epochs = zip(*runs, strict=False)
        curve = [tuple(map(statistics.median, zip(*points, strict=True))) for points in epochs]
        if curve:
            found.append(Line(line, (tuple((at_s, 1 - accuracy) for at_s, accuracy in curve),)))
    return line_chart(
        found,
        title=f"{RECIPE} on 4 unequal hosts: test error against time, measured",
        subtitle="100 Mbit/s, one host with 10 Mbit/s, one learner 3 times as slow; medians of 3 seeds, by epoch",
        x_label="seconds of training",
        y_label="test error",
        target=1 - study.target,
        target_label=f"target: {100 * study.target:.0f} % right",
        log_x=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the study, which goes on there"
    )
    parser.add_argument("--quick", action="store_true", help="one seed, fewer images and a lower accuracy")
    parser.add_argument("--sync", nargs="+", default=LINES, metavar="STRATEGY")
    parser.add_argument("--seeds", nargs="+", type=int, default=None)
    parser.add_argument("--limit", type=parse_seconds, default=float("inf"), help="begin no training after so long")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="only predict, or only measure")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw what was measured")
    given = parser.parse_args()
    study = Study(
        given.out.absolute(),
        tuple(given.sync),
        tuple(given.seeds or (SEEDS[:1] if given.quick else SEEDS)),
        QUICK if given.quick else FULL,
        QUICK_TARGET if given.quick else TARGET,
    )
    end_s = time.monotonic() + given.limit
    study.out.mkdir(parents=True, exist_ok=True)
    left: list[tuple[str, int, str]] = []
    if not given.table:
        write_images(study.data, study.images)
        os.environ["OFFBEAT_DATA"] = str(study.data)
        kinds = tuple(given.kinds)
        if "predicted" in kinds and not calibrate(study, end_s):
            sys.exit("the network is not measured yet; run it again to go on")
        done = {(one.line, one.seed, one.kind) for one in study.known()}
        wanted = [(line, seed, kind) for seed in study.seeds for line in study.lines for kind in kinds]
        left = [one for one in wanted if one not in done]
        while left and time.monotonic() < end_s:
            line, seed, kind = left.pop(0)
            result = (foresee if kind == "predicted" else train)(study, line, seed)
            study.add(result)
            print(result, flush=True)
    good = tell(study)
    if given.svg:
        given.svg.write_text(draw(study), encoding="utf-8")
    if left:
        print(
            f"{len(left)} of {len(study.seeds) * len(study.lines) * len(given.kinds)} are left; run it again to go on"
        )
    sys.exit(bool(left) or not good)


if __name__ == "__main__":
    main()
