"""One slow learner: the same training under a ring and under k-sync, for real, side by side.

python slow_learner.py
python slow_learner.py --sync ring k-sync:3 async --factor 5
"""

import argparse
import subprocess
import sys
from pathlib import Path

from offbeat.train import override, read_recipe, train

LEARNERS = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sync", nargs="+", default=["ring", "k-sync:3"])
    parser.add_argument("--factor", type=float, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--page", type=Path, default=Path("runs/slow-learner.html"))
    given = parser.parse_args()

    # Each minibatch sleeps for 50 ms, as a larger model would compute; the last learner takes `factor` times as long.
    slow = ["constant:0.05", f"learner={LEARNERS - 1},factor={given.factor:g}"]
    fields: dict[str, str | list[str]] = {
        "learners": str(LEARNERS),
        "slow": slow,
        "train.epochs": str(given.epochs),
        "save.every_epochs": "0",
    }
    print(
        f"{LEARNERS} learners, learner {LEARNERS - 1} is {given.factor:g}x slower; {given.epochs} epochs of the digits"
    )
    print(f"{'strategy':<16}{'seconds':>9}{'samples/s':>11}{'waiting':>9}{'accuracy':>10}", flush=True)
    seconds, runs = {}, []
    for line in given.sync:
        config = override(read_recipe("digits-mlp"), {**fields, "sync": line})
        result = train(config, hear=lambda record: None)
        seconds[line] = result["seconds"]
        runs.append(result["run_dir"])
        waiting, accuracy = f"{result['wait_share']:.0%}", f"{result['accuracy']:.1%}"
        print(f"{line:<16}{seconds[line]:>9.1f}{result['samples_per_s']:>11,.0f}{waiting:>9}{accuracy:>10}", flush=True)
    first, last = min(seconds, key=lambda line: seconds[line]), max(seconds, key=lambda line: seconds[line])
    print(f"{first} is {seconds[last] / seconds[first]:.1f}x as fast as {last} for the same samples.")
    given.page.parent.mkdir(parents=True, exist_ok=True)
    words = ["report", *map(str, runs), "--output", str(given.page)]
    subprocess.run([sys.executable, "-m", "offbeat", *words], check=True, stdout=subprocess.DEVNULL)
    print(f"Open {given.page} in a browser to see what each learner did.")


if __name__ == "__main__":
    main()
