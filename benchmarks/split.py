"""Unequal machines: one of the learners is slowed 3 times, and the update is split between them equally, or by speed.

    python benchmarks/split.py

From the spans of each run: the time of an iteration (median, after the speeds were measured) beside the ideal for these
speeds, which is the samples of an update divided by the sum of all learners' samples a second.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.runs.log import read_log
from offbeat.train.config_files import override, read_recipe
from offbeat.train.launch import launch, prepare
from offbeat.train.sample_plan import cut

SETTLED = 2 / 5  # of the updates, which are left out: the split is being found


def measure(split: str, given: argparse.Namespace) -> tuple[float, float, list[float]]:
    """Seconds of an iteration, the ideal, and the shares at the end."""
    with tempfile.TemporaryDirectory() as folder:
        config = override(
            read_recipe(given.recipe),
            {
                "sync": given.sync,
                "learners": str(given.learners),
                "slow": [f"learner={given.learners - 1},factor={given.factor}"],
                "train.split": split,
                "train.epochs": "1",
                "train.batch_size": str(given.batch_size),
            },
        )
        shares: list[list[float]] = []

        def hear(record: Mapping[str, Any]) -> None:
            if record["kind"] == "note" and "% of an update" in record["text"]:
                shares.append([float(one) for one in record["text"].split()[2].split(":")])

        start = prepare(config, run_dir=Path(folder) / "run")
        launch(start, hear, lambda name, line: print(name, line))
        spans = read_log(start.run.log(1)).spans
    begins: dict[int, float] = {}
    took: dict[int, list[float]] = defaultdict(list)
    last = max(span.version for span in spans)
    for span in spans:
        if span.what == "compute" and SETTLED * last < span.version < last:
            took[span.learner].append(span.end_s - span.start_s)
            if span.learner == 0:
                begins[span.version] = span.start_s
    times = [begins[version + 1] - begins[version] for version in sorted(begins) if version + 1 in begins]
    batch = given.batch_size * given.learners
    final = shares[-1] if shares and split == "auto" else [1.0] * given.learners
    counts = cut(batch, final, least=1)
    speeds = [counts[learner] / statistics.median(took[learner]) for learner in range(given.learners)]
    return statistics.median(times), batch / sum(speeds), [count / batch for count in counts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="fashion-cnn")
    parser.add_argument("--sync", default="ring")
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--factor", type=float, default=3.0)
    parser.add_argument("--batch-size", type=int, default=128)
    given = parser.parse_args()
    print(f"{given.recipe}, {given.sync}, {given.learners} learners, the last one {given.factor:g} times as slow")
    for split in ("equal", "auto"):
        time_s, ideal_s, shares = measure(split, given)
        told = " : ".join(f"{100 * share:.0f} %" for share in shares)
        print(
            f"{split:5}  {1000 * time_s:6.1f} ms an iteration, ideal for these speeds {1000 * ideal_s:6.1f} ms "
            f"({100 * (time_s / ideal_s - 1):+.0f} %), split {told}"
        )


if __name__ == "__main__":
    main()
