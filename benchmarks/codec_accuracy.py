"""Accuracy with every codec: a recipe on 4 learners under ring, several seeds, and what is lost without error feedback.

    python benchmarks/codec_accuracy.py --out codecs.json                       # all rows, seeds 0 1 2
    python benchmarks/codec_accuracy.py --only 'int8|1-bit' --seeds 0 --jobs 2 --out codecs.json
    python benchmarks/codec_accuracy.py --table codecs.json                     # the table of what is there
    python benchmarks/codec_accuracy.py --table codecs.json --times 10Mbit/s 100Mbit/s 1Gbit/s --target 0.89

Each run is a process of its own, with one thread, that trains in virtual time: it computes what the learners of a real
run compute (`predict.coded_updates`), one after the other, so nothing depends on what else the machine does. `--equal`
shows that: it trains some rows of a small recipe both ways, and compares the weights. Every finished run is written to
the file at once; runs that are in the file are not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean
from typing import Any

LEARNERS = 4
NONE = "ring"
CODECS = ("bf16", "fp16", "int8", "int4", "1-bit", "top-k:0.01", "random-k:0.1", "random-k:0.01", "power-sgd:4")
WITHOUT_FEEDBACK = ("1-bit", "top-k:0.01")
WIDE = {"ring:codec=1-bit": 1.0, "ring:codec=top-k:0.01": 1.0}  # points below no codec that they may be; others 0.5
LINES = (
    NONE,
    *(f"ring:codec={codec}" for codec in CODECS),
    *(f"ring:codec={codec},feedback=off" for codec in WITHOUT_FEEDBACK),
)
EQUAL = ("digits-mlp", {"epochs": 2}, {"hidden": 1024})  # what is trained both ways
SAME_TO_ROUNDING = ("ring", "ring:codec=top-k:0.01", "ring:codec=random-k:0.1", "ring:codec=power-sgd:4")


def config_of(recipe: str, line: str, seed: int, settings: Iterable[str] = ()) -> Any:
    from offbeat.train.config_files import changed, override, read_recipe

    run = {"learners": LEARNERS, "sync": line, "seed": seed, "device": "cpu", "train": {"threads": 1}}
    return override(changed(read_recipe(recipe), run), dict(setting.split("=", 1) for setting in settings))


def train(config: Any) -> Any:
    """In virtual time, with the ends of epochs that a real run has; minibatches take any time."""
    from offbeat.predict.machines import Clock
    from offbeat.predict.virtual import train_virtually
    from offbeat.simulate.cluster import Cluster
    from offbeat.simulate.compute import parse_law

    cluster = Cluster(learners=config.learners, law=parse_law("constant:1"))
    return train_virtually(config, Clock(cluster=cluster, ends_of_epochs=True), every=1.0)


def one_run(recipe: str, line: str, seed: int, settings: Sequence[str]) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    began_s = time.monotonic()
    outcome = train(config_of(recipe, line, seed, settings))
    last = outcome.points[-1]
    return {
        "recipe": recipe,
        "settings": list(settings),
        "line": line,
        "seed": seed,
        "accuracy": last.accuracy,
        "loss": last.loss,
        "by_epoch": [point.accuracy for point in outcome.points[1:]],
        "updates": last.update,
        "wall_s": round(time.monotonic() - began_s, 1),
        "machine": f"{platform.processor() or platform.machine()}, python {platform.python_version()}, "
        f"torch {torch.__version__}",
    }


def in_a_process(recipe: str, line: str, seed: int, settings: Sequence[str]) -> dict[str, Any]:
    words = [sys.executable, __file__, "--one", line, "--seeds", str(seed), "--recipe", recipe]
    words += [word for setting in settings for word in ("--set", setting)]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **threads}, check=False)
    if done.returncode:
        raise SystemExit(f"{line}, seed {seed}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def add(file: Path, run: dict[str, Any]) -> None:
    with file.open("a") as out:
        out.write(json.dumps(run) + "\n")
        out.flush()
        os.fsync(out.fileno())


def key(run: dict[str, Any]) -> tuple[Any, ...]:
    return run["recipe"], tuple(run["settings"]), run["line"], run["seed"]


def table(runs: Sequence[dict[str, Any]]) -> str:
    """A row for each line: the accuracy of each seed, the mean, and how far it is from no codec."""
    rows = []
    for kind in dict.fromkeys((run["recipe"], tuple(run["settings"])) for run in runs):
        alike = [run for run in runs if (run["recipe"], tuple(run["settings"])) == kind]
        base = {run["seed"]: 100 * run["accuracy"] for run in alike if run["line"] == NONE}
        rows.append(f"{' '.join((kind[0], *kind[1]))}, {LEARNERS} learners, {alike[0]['machine']}")
        rows.append(f"{'strategy':<42}{'accuracy, by seed':<28}{'mean':>7}{'points':>9}{'s a run':>9}")
        for line in dict.fromkeys((*LINES, *(run["line"] for run in alike))):
            found = sorted((run["seed"], 100 * run["accuracy"], run["wall_s"]) for run in alike if run["line"] == line)
            if not found:
                continue
            shown = " ".join(f"{seed}: {accuracy:.2f}" for seed, accuracy, _ in found)
            away = [accuracy - base[seed] for seed, accuracy, _ in found if seed in base]
            points = f"{fmean(away):+9.2f}" if away else f"{'':9}"
            low = away and line != NONE and "feedback=off" not in line and fmean(away) < -WIDE.get(line, 0.5)
            mean, took_s = fmean(accuracy for _, accuracy, _ in found), fmean(one[2] for one in found)
            rows.append(f"{line:<42}{shown:<28}{mean:7.2f}{points}{took_s:9.0f}{'   LOW' if low else ''}")
    return "\n".join(rows)


def update_s(line: str, size_bytes: int, bandwidth: str, compute_s: float) -> float:
    """Of an update in virtual time: a minibatch, and then an all-reduce of one bucket. Coding takes no time there."""
    from offbeat import topology
    from offbeat.schedules import build, price

    machines = topology.build(f"uniform:bandwidth={bandwidth},latency=100us", ranks=LEARNERS)
    return compute_s + price(build(line, ranks=LEARNERS), machines, size_bytes).seconds


def times(runs: Sequence[dict[str, Any]], given: argparse.Namespace) -> str:
    """Seconds of an update, and seconds until the end of the first epoch that has the target: the median seed."""
    from offbeat.runs.metrics import reached_at

    rows = [f"seconds to {100 * given.target:g} %, a minibatch in {1e3 * given.compute_s:g} ms, "
            f"{4 * given.parameters / 1e3:.0f} kB of gradients (in brackets: ms of an update)"]  # fmt: skip
    rows.append(f"{'strategy':<42}{'epochs':>7}" + "".join(f"{bandwidth:>22}" for bandwidth in given.times))
    for line in dict.fromkeys((*LINES, *(run["line"] for run in runs))):
        alike = [run for run in runs if run["line"] == line]
        reached = sorted(
            math.inf if (at := reached_at(run["by_epoch"], given.target)) is None else at + 1 for run in alike
        )
        if not alike:
            continue
        epochs, updates = reached[len(reached) // 2], alike[0]["updates"] / len(alike[0]["by_epoch"])
        cells = []
        for bandwidth in given.times:
            each_s = update_s(line, 4 * given.parameters, bandwidth, given.compute_s)
            total = "-" if epochs == math.inf else f"{epochs * updates * each_s:.1f} s"
            cells.append(f"{total} ({1e3 * each_s:.1f})")
        rows.append(f"{line:<42}{'-' if epochs == math.inf else epochs:>7}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join(rows)


def show_equal() -> None:
    """Train both ways, and compare. Where a codec rounds, one number that differs in its last bit may be rounded to the
    other side, and then the difference is a rounding of the codec."""
    import safetensors.torch

    recipe, epochs, options = EQUAL
    settings = [f"train.epochs={epochs['epochs']}", f"model.options.hidden={options['hidden']}"]
    print(f"{recipe} with {' '.join(settings)}: weights of a real run and in virtual time")
    for line in LINES:
        virtual = train(config_of(recipe, line, 0, settings))
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, "-m", "offbeat", "train", recipe, "--sync", line, "--learners", str(LEARNERS)]
            words += ["--seed", "0", "--device", "cpu", "--run-dir", f"{folder}/run", "--quiet"]
            words += [word for setting in settings for word in ("--set", setting)]
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
            real = safetensors.torch.load_file(f"{folder}/run/weights.safetensors")
        worst = max(float((real[name] - one).abs().max()) for name, one in virtual.weights.items())
        moved = max(float(one.abs().max()) for one in real.values())
        print(f"  {line:<42} largest difference {worst:.1e}, largest weight {moved:.2f}", flush=True)
        if line in SAME_TO_ROUNDING and worst > 1e-6:
            raise SystemExit(f"{line}: the weights are not the same")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="fashion-cnn")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the recipe")
    parser.add_argument("--lines", nargs="*", default=LINES, help="strategies, where others are wanted")
    parser.add_argument("--only", default="", metavar="REGEX")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, of one thread each")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="a line of JSON for each run")
    parser.add_argument("--table", type=Path, metavar="FILE.json", help="only print the table of these runs")
    parser.add_argument(
        "--times", nargs="*", default=[], metavar="RATE", help="with --table: the time to --target, too"
    )
    parser.add_argument("--target", type=float, default=0.89)
    parser.add_argument("--compute-s", type=float, default=0.025, help="of a minibatch (default 0.025)")
    parser.add_argument("--parameters", type=int, default=105_866, help="of the model (default: fashion-cnn's)")
    parser.add_argument("--equal", action="store_true", help="compare with real runs")
    parser.add_argument("--one", metavar="LINE", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one_run(given.recipe, given.one, given.seeds[0], given.set)))
    elif given.table:
        print(table(read(given.table)))
        if given.times:
            print("\n" + times(read(given.table), given))
    elif given.equal:
        show_equal()
    else:
        runs = read(given.out) if given.out else []
        known = {key(run) for run in runs}
        wanted = [
            (given.recipe, line, seed, given.set)
            for seed in given.seeds
            for line in given.lines
            if re.search(given.only, line) and (given.recipe, tuple(given.set), line, seed) not in known
        ]
        with ThreadPoolExecutor(given.jobs) as pool:
            for number, done in enumerate(as_completed([pool.submit(in_a_process, *one) for one in wanted])):
                run = done.result()
                runs.append(run)
                if given.out:
                    add(given.out, run)
                print(f"{number + 1} of {len(wanted)}: {run['line']}, seed {run['seed']}: "
                      f"{100 * run['accuracy']:.2f} % in {run['wall_s']:.0f} s", flush=True)  # fmt: skip
        print(table(runs))


if __name__ == "__main__":
    main()
