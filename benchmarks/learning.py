"""Does every strategy learn? Accuracy of each line with a loop of one's own and with recipes, beside full-sync's.

    python benchmarks/learning.py --run                               # examples/digits.py, 2 and 4 learners
    python benchmarks/learning.py --train digits-softmax digits-mlp   # recipes, 4 learners
    python benchmarks/learning.py --run --only 'downpour|async'
    python benchmarks/learning.py --run --jobs 4                      # so many runs at a time: for 16 cores

It exits with 1 if a line is below its bar: 95 % with examples/digits.py; 2 points below full-sync with a recipe (3 for
Downpour, DiLoCo and delay compensation).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from offbeat.strategy import strategies

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "digits.py"
LEAST = 95.0
BASE = "full-sync"
WIDE = ("downpour", "nesterov", "delay-compensated")  # three points


def lines(learners: int) -> list[str]:
    """A line of every strategy, and every rate rule."""
    half = learners // 2
    grids = [f"{name}:2x{half}" for name in ("torus", "multiring", "hierarchical")]
    found = [
        BASE, "central", "direct", "ring", "halving-doubling", "tree", "double-tree", *grids, "auto", "native",
        f"k-sync:{half}", "backup:1", f"grace-sync:{half},grace=20ms", "deadline-sync:0.2s", f"k-batch-sync:{learners}",
        f"k-async:{half}", f"k-batch-async:{learners}", "async", "softsync:2", "ssp:1", "stale-drop:4",
        f"adaptive-k:{half}", "downpour", "downpour:push=2,fetch=2", "local-sgd:4", "local-sgd:4,outer=nesterov",
        "async:rate=inverse", "async:rate=inverse-mean", "async:rate=drift:0.1", "async:rate=delay-compensated:0.04",
        "softsync:2,rate=inverse",
    ]  # fmt: skip
    left_out = set(strategies()) - {line.partition(":")[0] for line in found}
    assert not left_out, f"no line of {', '.join(sorted(left_out))}"
    return found


def offbeat(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "offbeat", *words], capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        raise SystemExit(f"offbeat {' '.join(words)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def with_a_loop(line: str, learners: int, seed: int) -> float:
    said = offbeat("run", "--learners", str(learners), "--sync", line, str(EXAMPLE), "--seed", str(seed))
    found = re.search(r"accuracy ([\d.]+) %", said)
    if found is None:
        raise SystemExit(f"no accuracy in what {EXAMPLE.name} printed under {line}:\n{said}")
    return float(found[1])


def with_a_recipe(recipe: str, *more: str) -> Callable[[str, int, int], float]:
    def train(line: str, learners: int, seed: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            words = ("--sync", line, "--learners", str(learners), "--seed", str(seed), "--run-dir", f"{folder}/run")
            said = offbeat("train", recipe, *words, "--json", "--quiet", *more)
        return 100 * float(json.loads(said)["accuracy"])

    return train


def table(
    title: str,
    learn: Callable[[str, int, int], float],
    learners: int,
    given: argparse.Namespace,
    bar: float | None = None,
) -> Iterator[str]:
    """Prints a row for each line; gives those that are below the bar."""
    print(f"\n{title}, {learners} learners, seeds {' '.join(map(str, given.seeds))}")
    tried = [line for line in lines(learners) if re.search(given.only, line) or (line == BASE and bar is None)]
    with ThreadPoolExecutor(given.jobs) as pool:
        runs = {line: [pool.submit(learn, line, learners, seed) for seed in given.seeds] for line in tried}
        for line in tried:
            found = [run.result() for run in runs[line]]
            mean = sum(found) / len(found)
            if line == tried[0]:
                base = mean
            least = bar if bar is not None else base - (3 if any(word in line for word in WIDE) else 2)
            low = min(found) < least if bar is not None else mean < least
            shown = " ".join(f"{one:5.1f}" for one in found)
            print(f"  {line:<36} {shown}{'   LOW' if low else ''}", flush=True)
            if low:
                yield f"{title}, {learners}: {line}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--train", nargs="*", default=[], metavar="RECIPE")
    parser.add_argument("--learners", nargs="*", type=int, default=[])
    parser.add_argument("--only", default="", metavar="REGEX")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("more", nargs="*", help="options for offbeat train, after --")
    given = parser.parse_args()
    low: list[str] = []
    for learners in (given.learners or [2, 4]) if given.run else []:
        low += table("examples/digits.py", with_a_loop, learners, given, LEAST)
    for recipe in given.train:
        for learners in given.learners or [4]:
            low += table(recipe, with_a_recipe(recipe, *given.more), learners, given)
    print("\nbelow the bar: " + ("; ".join(low) if low else "none"))
    raise SystemExit(bool(low))


if __name__ == "__main__":
    main()
