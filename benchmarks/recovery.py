"""How long a killed coordinator takes to be back, after few and after many pushes; with the run log, which is worst.

    python benchmarks/recovery.py --pushes 10,10000,300000

Two learners push a tiny gradient again and again. When so many updates were made the coordinator is killed; what counts
is the time until another one works in its place. It ends with 1 where one takes longer than a second, or where the
longest is more than twice the shortest and more than 50 ms longer: below that it is the scheduler that is measured.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offbeat.machine import machine_facts
from offbeat.server.learner.served_learner import ServedLearner
from offbeat.server.run_setting import RunSetting
from offbeat.server.supervisor import ServerPlan, Supervisor

LEARNERS = 2
MOST_S, MOST_RATIO, NOISE_S = 1.0, 2.0, 0.05
VERSION_WORD = 8  # of the arena: `Arena.committed`


def train(number: int, pushes: int) -> int:
    """Push until so many updates were made, and some more."""
    torch.set_num_threads(1)
    where: Any = {"listener": os.environ["OFFBEAT_ADDRESS"], "token": os.environ["OFFBEAT_TOKEN"]}
    learner = ServedLearner(line="async", number=number, learners=LEARNERS, **where)
    model = nn.Linear(4, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner.prepare(model, optimizer)
    ones = torch.ones_like(model.weight)
    while learner.version < pushes + 50:
        with learner.minibatch():
            model.weight.grad = ones
            optimizer.step()
    learner.finish()
    learner.close()
    return 0


def recovery_s(pushes: int, folder: Path) -> tuple[float, float, int]:
    """Seconds until it was back, of the whole run, and bytes of the journal when it was killed."""
    plan = ServerPlan(
        setting=RunSetting(line="async", learners=LEARNERS),
        body=lambda number: train(number, pushes),
        log=folder / f"log-{pushes}",
    )
    began_s = time.monotonic()
    journal = 0
    with Supervisor(plan, lambda name, line: None) as supervisor:
        supervisor.start()

        def strike() -> None:
            nonlocal journal
            words = None if supervisor._quiet is None else supervisor._quiet.words
            if journal == 0 and words is not None and words[VERSION_WORD] >= pushes:
                journal = sum(os.fstat(file).st_size for file in supervisor.journal)
                os.kill(supervisor.services["coordinator"].pid, signal.SIGKILL)

        supervisor.watch(strike)
        ended = supervisor.exits
    if any(ended.values()) or len(supervisor.recoveries) != 1:
        raise SystemExit(f"the run did not end well: {ended}, {supervisor.recoveries}")
    return supervisor.recoveries[0]["seconds"], time.monotonic() - began_s, journal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pushes", default="10,10000,300000", metavar="N,N,...")
    parser.add_argument("--times", type=int, default=3, help="of each; the median counts (1 from 100,000 pushes on)")
    given = parser.parse_args()
    print(", ".join(f"{name} {value}" for name, value in machine_facts().items() if isinstance(value, int | str)))
    print(f"{'pushes':>10} {'back after':>12} {'journal':>12} {'run':>8}")
    found = []
    with tempfile.TemporaryDirectory() as name:
        for pushes in map(int, given.pushes.split(",")):
            times = given.times if pushes < 100_000 else 1
            runs = [recovery_s(pushes, Path(name)) for _ in range(times)]
            back_s = statistics.median(back for back, _, _ in runs)
            found.append(back_s)
            journal, took_s = max(size for _, _, size in runs), runs[-1][1]
            print(f"{pushes:>10,} {back_s:>10.3f} s {journal / 1024:>8.0f} KiB {took_s:>6.0f} s", flush=True)
    even = max(found) <= max(MOST_RATIO * min(found), min(found) + NOISE_S)
    return 0 if max(found) < MOST_S and even else 1


if __name__ == "__main__":
    sys.exit(main())
