"""Stale gradients and the learning rate, after Zhang, Gupta, Lian and Liu 2016: 30 learners, minibatches of 4.

    python benchmarks/stale_rates.py [--quick] [--processes N]

The recipe is really trained, on a simulated clock, with the rate of the synchronous run: alpha0, for updates of 30
gradients. With softsync:30 an update has one gradient, which is 29 versions old on average. Published, on CIFAR-10:
with alpha0 as it is that does not converge, and with alpha0 / staleness it reaches what the synchronous run reaches.
Beside it: do the two other rates of the literature help, at alpha0, and at a rate that stale gradients bear as they
are?

All runs of a table have the same epochs, rate and schedule, and momentum is 0. Where roughness is asked the rate stays
as it is, for one that fades makes every curve smooth. `--quick` takes the digits, which come with this package;
otherwise Fashion-MNIST. Same arguments, same numbers, however many processes. Four minutes on 16 cores; the quick one
takes less than one on two.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import torch

from offbeat.predict.machines import Clock
from offbeat.predict.virtual import reached_by, train_virtually
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.compute import parse_law
from offbeat.spec import count_of
from offbeat.train.config import Config
from offbeat.train.config_files import override, read_recipe

LEARNERS = 30
LAW = "gamma:1,0.25"
MINIBATCH = 4
LOOKS = 8  # at the test set, an epoch
NEAR = 1.0  # points of accuracy below which a difference does not count
FAR = 10.0  # points below the synchronous run that count as a failure
SMOOTHER = 0.9  # of another roughness: above it the difference does not count
SYNC, PLAIN, INVERSE = "full-sync", "softsync:30", "softsync:30,rate=inverse"
DRIFT, COMPENSATED = f"{PLAIN},rate=drift:", f"{PLAIN},rate=delay-compensated:"


class Setting(NamedTuple):
    """What is trained, and the numbers that are tuned for it."""

    recipe: str
    epochs: int
    rate: float  # alpha0: full-sync is good with it, and with twice as much
    gentle: float  # stale gradients learn with it as they are, but it is nearly too high for them
    target: float
    drifts: tuple[str, ...]
    compensations: tuple[str, ...]


FASHION = Setting("fashion-mlp", 5, 0.2, 0.02, 0.84, ("0.01", "0.03", "0.1"), ("0.04", "1", "10"))
DIGITS = Setting("digits-mlp", 8, 0.8, 0.05, 0.9, ("0.1",), ("1",))


class Table(NamedTuple):
    """Strategies that are compared."""

    title: str
    rate: float
    schedule: str
    lines: tuple[str, ...]


class Job(NamedTuple):
    """One run."""

    recipe: str
    epochs: int
    rate: float
    schedule: str
    line: str
    seed: int
    target: float


class Found(NamedTuple):
    """What came of a run."""

    accuracy: float  # at the end, in %
    staleness: float
    roughness: float  # mean change of the accuracy from look to look, in points, over the last half of the run
    reached_s: float | None


class Row(NamedTuple):
    """A strategy, over the seeds."""

    accuracy: float
    spread: float
    staleness: float
    roughness: float
    reached_s: tuple[float, ...]  # of the seeds that reached the target
    seeds: int

    @property
    def told(self) -> str:
        return f"{self.accuracy:.2f} +- {self.spread:.2f} %"


Rows = Mapping[str, Row]


def tables_of(setting: Setting) -> list[Table]:
    others = [DRIFT + c for c in setting.drifts] + [COMPENSATED + size for size in setting.compensations]
    softsync = [f"softsync:{n}{rate}" for n in (1, 15, 30) for rate in ("", ",rate=inverse")]
    return [
        Table("alpha0", setting.rate, "cosine", (SYNC, *softsync, *others)),
        Table("twice alpha0", 2 * setting.rate, "cosine", (SYNC, INVERSE)),
        Table("a gentle rate", setting.gentle, "constant", (PLAIN, INVERSE, *others)),
    ]


# --- runs ---------------------------------------------------------------------------------------------------------


def config_of(job: Job) -> Config:
    changes = {
        "sync": job.line,
        "learners": str(LEARNERS),
        "seed": str(job.seed),
        "device": "cpu",
        "train.epochs": str(job.epochs),
        "train.lr": str(job.rate),
        "train.batch_size": str(MINIBATCH),
        "train.schedule": job.schedule,
        "train.scaling": "none",
        "train.momentum": "0",
    }
    return override(read_recipe(job.recipe), changes)


def train(job: Job) -> Found:
    torch.set_num_threads(1)
    clock = Clock(cluster=Cluster(learners=LEARNERS, law=parse_law(LAW), seed=job.seed))
    outcome = train_virtually(config_of(job), clock, every=1 / LOOKS)
    curve = [100 * (point.accuracy or 0.0) for point in outcome.points]
    roughness = statistics.mean(abs(one - before) for before, one in pairwise(curve[len(curve) // 2 :]))
    reached = reached_by(outcome.points, job.target)
    return Found(curve[-1], outcome.staleness_mean, roughness, None if reached is None else reached.seconds)


def train_all(jobs: Sequence[Job], processes: int) -> dict[Job, Found]:
    ordered = sorted(jobs, key=lambda job: job.line == SYNC)  # the shortest last
    found: dict[Job, Found] = {}
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for job, one in zip(ordered, pool.map(train, ordered), strict=True):
            found[job] = one
            print(f"{len(found)} of {len(jobs)} runs", end="\r", file=sys.stderr, flush=True)
    return found


def row_of(found: Sequence[Found]) -> Row:
    return Row(
        accuracy=statistics.mean(one.accuracy for one in found),
        spread=statistics.stdev(one.accuracy for one in found) if len(found) > 1 else 0.0,
        staleness=statistics.mean(one.staleness for one in found),
        roughness=statistics.mean(one.roughness for one in found),
        reached_s=tuple(one.reached_s for one in found if one.reached_s is not None),
        seeds=len(found),
    )


# --- what is printed ----------------------------------------------------------------------------------------------


def show(table: Table, rows: Rows, target: float) -> None:
    print(f"\n{table.title}: rate {table.rate:g}, {table.schedule}")
    print(f"  {'':39}  accuracy in %    staleness  roughness  {target:.0%} after (simulated s)")
    for line, row in rows.items():
        reached = f"{statistics.mean(row.reached_s):6.0f}" if row.reached_s else "     -"
        if 0 < len(row.reached_s) < row.seeds:
            reached += f"  ({len(row.reached_s)} of {row.seeds} seeds)"
        accuracy = f"{row.accuracy:6.2f} +- {row.spread:5.2f}"
        print(f"  {line:39}  {accuracy}  {row.staleness:9.2f}  {row.roughness:9.2f}  {reached}")


def best(rows: Rows, start: str) -> tuple[str, Row]:
    """The most accurate of those whose line begins so."""
    return max(((line, row) for line, row in rows.items() if line.startswith(start)), key=lambda pair: pair[1].accuracy)


def tell(holds: bool, claim: str, numbers: str) -> None:
    print(f"{'holds' if holds else 'does not hold':13}  {claim}: {numbers}")


def judge(at_rate: Rows, at_twice: Rows, gentle: Rows) -> None:
    """A line for each claim. The constants of drift and compensation are the best of those tried, on the test set."""
    print()
    sync = at_rate[SYNC]
    for n in (15, 30):
        row = at_rate[f"softsync:{n}"]
        lost = row.accuracy < sync.accuracy - FAR
        tell(lost, f"alpha0 as it is fails at softsync:{n}", f"{row.told}, full-sync {sync.told}")
    for n in (1, 15, 30):
        tell_near(f"alpha0 / staleness reaches full-sync at softsync:{n}", at_rate[f"softsync:{n},rate=inverse"], sync)
    tell_near("the same at softsync:30 with twice alpha0", at_twice[INVERSE], at_twice[SYNC])
    line, row = best(at_rate, DRIFT)
    tell_near(f"drift reaches full-sync with alpha0 ({line})", row, sync)
    line, row = best(gentle, DRIFT)
    before = gentle[PLAIN]
    smoother = row.roughness < SMOOTHER * before.roughness
    tell(
        smoother,
        f"drift is smoother than the constant rate, where that learns ({line})",
        f"{row.roughness:.2f} points from look to look, constant {before.roughness:.2f}; "
        f"accuracy {row.told}, constant {before.told}",
    )
    line, row = best(at_rate, COMPENSATED)
    tell_near(f"delay compensation reaches full-sync with alpha0 ({line})", row, sync)
    line, row = best(gentle, COMPENSATED)
    gained = row.accuracy - before.accuracy
    helps = gained > max(NEAR, row.spread + before.spread)
    tell(
        helps,
        f"delay compensation helps where the constant rate learns ({line})",
        f"{row.told}, constant {before.told}",
    )


def tell_near(claim: str, row: Row, sync: Row) -> None:
    near = row.accuracy >= sync.accuracy - NEAR
    tell(near, f"{claim}, within {NEAR:g} point", f"{row.told}, full-sync {sync.told}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="digits instead of Fashion-MNIST")
    parser.add_argument(
        "--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: one for each core"
    )
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    setting = DIGITS if given.quick else FASHION
    tables = tables_of(setting)

    def jobs_of(table: Table, line: str) -> list[Job]:
        common = (setting.recipe, setting.epochs, table.rate, table.schedule, line)
        return [Job(*common, seed, setting.target) for seed in range(given.seeds)]

    found = train_all(
        [job for table in tables for line in table.lines for job in jobs_of(table, line)], given.processes
    )
    print(
        f"{setting.recipe}, {LEARNERS} learners ({LAW}), minibatches of {MINIBATCH}, "
        f"{count_of(setting.epochs, 'epoch')}, momentum 0, {count_of(given.seeds, 'seed')}"
    )
    rows = [{line: row_of([found[job] for job in jobs_of(table, line)]) for line in table.lines} for table in tables]
    for table, some in zip(tables, rows, strict=True):
        show(table, some, setting.target)
    judge(*rows)


if __name__ == "__main__":
    main()
