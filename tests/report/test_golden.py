"""Runs small enough to be computed on paper: every number of every table, and every fact, is asserted exactly.

All times are multiples of 1/4 s, so that sums are exact; a quotient of exact numbers is the nearest float to the true
one, which `of` gives. A table or a column that is on the page and not here makes a test fail.

k-sync:2 with 3 learners (run `late`); x is cancelled, d is dropped, e is evaluation, w waiting, a updating, s sending:

    time      0   1   1.5 2.5 3   3.25  4   5   6   6.25 7
    learner 0 |---|w--|---|w--|e--------|---|w--|a--|
    learner 1 |-------|-------|         |xxxxxxx|--------|    the last one is pushed when the run ends: left over
    learner 2 |xxxxxxx|ddddddd|s--|     |-------|
    updates           1       2                 3
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest

from offbeat.charts import BarChart, LineChart, ShareChart
from offbeat.report.build import build
from offbeat.report.facts import EnergyFacts, Facts, Straggler, facts_of, straggler
from offbeat.report.inputs import Inputs, read_inputs
from offbeat.report.learners import LearnerFacts
from offbeat.report.page_model import Page, Table, TimelineChart
from offbeat.report.tables import tables_of
from offbeat.runs.metrics import DEFINITIONS, interval
from offbeat.runs.run_record import EvaluationRecord
from report.handmade import config, decision, evaluation, span, write_result, write_run

PRICE = 3600.0  # a device second costs 1
EVEN = 0.7578125  # 97/128: less than a point above 0.75, so that all are ranked


def of(top: int, bottom: int) -> float:
    return float(Fraction(top, bottom))


LATE = [
    span(0, "compute", 0.0, 1.0, 0),
    decision("pushed 0 t1 v0 n8 @1.0"),
    span(1, "compute", 0.0, 1.5, 0),
    decision("pushed 1 t2 v0 n8 @1.5", "apply t1 t2", "cancel 2", "send 0", "send 1", "send 2"),
    span(2, "compute", 0.0, 1.5, 0, cancelled=True),
    decision("stopped 2 v0 @1.5"),
    span(0, "wait", 1.0, 1.5, 1),
    span(0, "compute", 1.5, 2.5, 1),
    decision("pushed 0 t3 v1 n8 @2.5"),
    span(1, "compute", 1.5, 3.0, 1),
    decision("pushed 1 t4 v1 n8 @3.0", "apply t3 t4", "cancel 2", "send 0", "send 1", "send 2"),
    span(2, "compute", 1.5, 3.0, 1),
    span(0, "wait", 2.5, 3.0, 2),
    span(2, "send", 3.0, 3.25, 1),
    decision("pushed 2 t5 v1 n8 @3.25", "drop t5"),
    span(0, "evaluate", 3.0, 4.0, 2),
    span(0, "compute", 4.0, 5.0, 2),
    decision("pushed 0 t6 v2 n8 @5.0"),
    span(2, "compute", 4.0, 6.0, 2),
    decision("pushed 2 t7 v2 n8 @6.0", "apply t6 t7", "cancel 1", "send 0", "send 1", "send 2"),
    span(1, "compute", 4.0, 6.0, 2, cancelled=True),
    decision("stopped 1 v2 @6.0"),
    span(0, "wait", 5.0, 6.0, 3),
    span(0, "apply", 6.0, 6.25, 3),
    span(1, "compute", 6.0, 7.0, 3),
    decision("pushed 1 t8 v3 n4 @7.0"),
]

# An all-reduce of 2 learners, each update 2.5 s; learner 1 computes 2 s where learner 0 computes 1 s and waits 1 s.
RING = [
    one
    for update, start in enumerate((0.0, 2.5, 6.0, 8.5))
    for one in (
        span(0, "compute", start, start + 1, update),
        span(0, "wait", start + 1, start + 2, update),
        span(0, "apply", start + 2, start + 2.5, update),
        span(1, "compute", start, start + 2, update),
        span(1, "apply", start + 2, start + 2.5, update),
    )
] + [span(0, "evaluate", 5.0, 6.0, 2)]

# async, simulated, no metrics: staleness 0, 0, 2, 1.
STALE = [
    decision("pushed 0 t1 v0 n8 @1.0", "apply t1", "send 0"),
    decision("pushed 0 t2 v1 n8 @2.0", "apply t2", "send 0"),
    decision("pushed 1 t3 v0 n8 @2.5", "apply t3", "send 1"),
    decision("pushed 0 t4 v2 n8 @3.0", "apply t4", "send 0"),
    span(0, "compute", 0.0, 1.0, 0),
    span(0, "compute", 1.0, 2.0, 1),
    span(1, "compute", 0.0, 2.5, 0),
    span(0, "compute", 2.0, 3.0, 2),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("golden")
    paths = [
        write_run(
            folder / "late",
            config=config("k-sync:2", 3),
            head={"strategy": "k-sync:2", "learners": 3, "expect": 3, "servers": 1},
            log=LATE,
            metrics=[
                evaluation(2, 3.0, 0.5, loss=1.0, samples=32, dropped={}),
                *[evaluation(3, 6.0, 0.75, loss=0.5, samples=48, dropped={"late": 8, "left over": 4})] * 2,
            ],
            energy={
                "seconds": 8.0,
                "joules": 96.0,
                "sources": [{"name": "package-1", "joules": 32.0}, {"name": "package-0", "joules": 64.0}],
                "not_measured": ["no counter of the GPU"],
            },
        ),
        write_run(
            folder / "even",
            config=config("ring", 2),
            head={"strategy": "ring", "learners": 2, "expect": 2},
            log=RING,
            metrics=[
                evaluation(2, 5.0, 0.25, loss=2.0, samples=32, dropped={}),
                *[evaluation(4, 10.0, EVEN, loss=0.25, samples=64, dropped={})] * 2,
            ],
            machine={"cores": 2},
        ),
        write_run(
            folder / "stale",
            config=config("async", 2),
            head={"strategy": "async", "learners": 2, "expect": 2, "simulated": True},
            log=STALE,
        ),
        write_run(
            folder / "four",
            config=config("ring", 4),
            metrics=[
                evaluation(2, 5.0, 0.75, loss=0.5, samples=64, dropped={}),
                evaluation(3, 7.5, 0.75, test_samples=64, loss=0.375, samples=96, dropped={}),
            ],
        ),
        write_result(
            folder / "scale.json",
            "scaling",
            [
                {"strategy": "ring", "learners": 1, "batch": 8, "seconds": 1.0, "seconds_low": 0.75,
                 "seconds_high": 1.25, "throughput": 8.0, "speedup": 1.0, "efficiency": 1.0, "overhead_s": 0.0,
                 "accuracy": 0.5, "predicted_s": None, "error": None, "joules": 10.0, "cost": 0.25, "ranked": True},
                {"strategy": "ring", "learners": 2, "batch": 8, "seconds": 1.25, "seconds_low": 1.0,
                 "seconds_high": 1.5, "throughput": 12.8, "speedup": 1.6, "speedup_low": 1.5, "speedup_high": 1.75,
                 "efficiency": 0.8, "overhead_s": 0.25,
                 "accuracy": 0.5, "predicted_s": 1.0, "error": -0.2, "joules": None, "cost": 0.5, "ranked": True},
                {"strategy": "async", "learners": 2, "batch": 4, "seconds": 2.0, "speedup": 1.0, "efficiency": 0.5,
                 "overhead_s": 1.0, "ranked": False, "why_not": "another batch"},
            ],
            kind="weak", recipe="tiny", base="one core", precision="fp32", notes=["All in one run."],
            machine={"cores": 2}, definitions={"T": "seconds"},
            ranking=["fastest with comparable accuracy: ring x 2 (13 samples/s, 1.60x)", "async x 2: not ranked: x"],
        ),
        write_result(
            folder / "race.json",
            "accuracy",
            [
                {"strategy": "ring", "learners": 2, "seeds": 2, "reached": 2, "seconds_to_target": 4.0,
                 "seconds_to_target_low": 3.0, "seconds_to_target_high": 5.0, "updates_to_target": 8,
                 "accuracy_mean": 0.875, "test_samples": 64, "accuracy_std": 0.125, "seconds": 6.0, "joules": 20.0,
                 "joules_to_target": 15.0, "cost": 2.0, "cost_to_target": 1.0, "predicted_s": 5.0},
                {"strategy": "async", "learners": 4, "seeds": 2, "reached": 0, "accuracy_mean": 0.5,
                 "accuracy_std": 0.0, "seconds": 6.0},
                {"strategy": "ring", "learners": 4, "seeds": 2, "reached": 1, "seconds_to_target": 2.0},
            ],
            recipe="tiny", target=0.75,
            curves=[{"strategy": "ring", "learners": 2, "seed": 7, "points": [[2.0, 4, 0.5], [4.0, 8, 0.875]]}],
        ),
        write_result(
            folder / "foresight.json",
            "predictions",
            [
                {"strategy": "ring", "learners": 2, "slow": "", "measured_s": 2.0, "predicted_s": 2.5, "error": 0.25},
                {"strategy": "k-sync:2", "learners": 3, "slow": "learner=2,factor=2", "measured_s": 2.0,
                 "predicted_s": 1.0, "error": -0.5},
            ],
        ),
    ]  # fmt: skip
    return read_inputs(paths)


@pytest.fixture(scope="module")
def page(inputs: Inputs) -> Page:
    return build(inputs.runs, inputs.results, problems=inputs.problems, price=PRICE)


def test_every_fact_of_a_server_run_is_the_one_computed_on_paper(inputs: Inputs) -> None:
    found = facts_of(inputs.runs[0])
    assert found == Facts(
        name="late",
        label="late",
        strategy="k-sync:2",
        family="parameter server",
        learners=3,
        servers=1,
        simulated=False,
        finished=True,
        ended="",
        updates=3,
        seconds=6.0,
        samples=48,
        samples_dropped=12,
        curve=(
            EvaluationRecord(3.0, 2, 0.5, 1.0, samples=32, dropped=0),
            *[EvaluationRecord(6.0, 3, 0.75, 0.5, samples=48, dropped=12)] * 2,
        ),
        staleness=((0, 6),),
        applied=6,
        dropped=1,
        cancelled=2,
        unused=1,
        by_learner=(
            # ends at 1, 2.5, 5 of 7 s: one in each of the first three quarters
            LearnerFacts(learner=0, compute_s=3.0, wait_s=2.0, apply_s=0.25, evaluate_s=1.0, minibatches=3,
                         compute_mean_s=1.0, compute_median_s=1.0, typical_s=1.0, quarters=(1.0, 1.0, 1.0, None)),
            # 1, 1.5, 1.5 finished and 2 cancelled: half of the four are done at 1.5; in the last quarter 1 and 2x
            LearnerFacts(learner=1, compute_s=4.0, thrown_away_s=2.0, minibatches=3, cancelled=1,
                         compute_mean_s=of(4, 3), compute_median_s=1.5, typical_s=1.5, quarters=(1.5, 1.5, None, 1.0)),
            # 1.5 and 2 finished, 1.5 cancelled: a third at 1.5, and the cancelled one goes to 2
            LearnerFacts(learner=2, compute_s=2.0, thrown_away_s=3.0, send_s=0.25, minibatches=2, cancelled=1,
                         compute_mean_s=1.75, compute_median_s=1.75, typical_s=2.0, quarters=(None, 1.5, None, 2.0)),
        ),
        energy=EnergyFacts(joules=96.0, seconds=8.0, sources=("package-0", "package-1"),
                           why_not="no counter of the GPU"),
    )  # fmt: skip
    assert straggler(found) is None  # 1.6 times the others, but in the second quarter only 1.5 against 1.25
    assert (found.throughput, found.seconds_per_update) == (8.0, 2.0)
    assert (found.last.accuracy, found.best_accuracy, found.last.loss) == (0.75, 0.75, 0.5)
    assert (found.staleness_mean, found.staleness_std) == (0.0, 0.0)
    assert (found.not_computing_share, found.thrown_away_share) == (of(5, 33), of(10, 33))
    assert (found.seconds_to(0.75), found.updates_to(0.75), found.seconds_to(0.8), found.updates_to(0.8)) == (
        6.0, 3, None, None,
    )  # fmt: skip
    assert found.joules_per_sample == 2.0
    assert (found.cost(found.seconds, PRICE), found.cost(found.seconds, None)) == (18.0, None)
    assert (found.joules_to(0.5), found.cost(found.seconds_to(0.5), PRICE)) == (48.0, 9.0)  # after 3 of 6 s
    assert (found.joules_to(0.8), found.cost(found.seconds_to(0.8), PRICE), found.joules_to(None)) == (None,) * 3
    assert [[one and one.seconds for one in found.reached(target)] for target in (0.5, 0.75, 0.8)] == [
        [0.0, 3.0], [3.0, 6.0], [0.0, None],
    ]  # fmt: skip


def test_every_fact_of_an_all_reduce_is_the_one_computed_on_paper(inputs: Inputs) -> None:
    found = facts_of(inputs.runs[1])
    assert found == Facts(
        name="even",
        label="even",
        strategy="ring",
        family="all-reduce",
        learners=2,
        servers=None,
        simulated=False,
        finished=True,
        ended="",
        updates=4,
        seconds=10.0,
        samples=64,
        samples_dropped=0,
        curve=(
            EvaluationRecord(5.0, 2, 0.25, 2.0, samples=32, dropped=0),
            *[EvaluationRecord(10.0, 4, EVEN, 0.25, samples=64, dropped=0)] * 2,
        ),
        staleness=((0, 8),),
        applied=8,
        dropped=0,
        cancelled=0,
        unused=0,
        by_learner=(
            LearnerFacts(learner=0, compute_s=4.0, send_s=None, wait_s=4.0, apply_s=2.0, evaluate_s=1.0, minibatches=4,
                         compute_mean_s=1.0, compute_median_s=1.0, typical_s=1.0, quarters=(1.0, 1.0, 1.0, 1.0)),
            LearnerFacts(learner=1, compute_s=8.0, send_s=None, apply_s=2.0, minibatches=4,
                         compute_mean_s=2.0, compute_median_s=2.0, typical_s=2.0, quarters=(2.0, 2.0, 2.0, 2.0)),
        ),
        energy=EnergyFacts(why_not="the run has no energy.json"),
    )  # fmt: skip
    assert straggler(found) == Straggler(learner=1, factor=2.0, typical_s=2.0, others_s=1.0)


def test_without_metrics_the_log_says_updates_seconds_and_samples(inputs: Inputs) -> None:
    found = facts_of(inputs.runs[2])
    assert (found.updates, found.seconds, found.samples, found.samples_dropped) == (4, 3.0, 32, 0)
    assert found.staleness == ((0, 2), (1, 1), (2, 1)) and found.simulated and found.curve == ()


COST_4 = 30.0  # 4 devices, 7.5 s

ROWS: dict[str, tuple[tuple[str, ...], list[tuple[Any, ...]]]] = {
    "accuracy": (
        ("run", "accuracy at the end", "at least", "at most", "best accuracy", "loss at the end", "lowest loss",
         "target", "time to target (s)", "updates to target", "sent to target (MB)"),
        [
            ("late", 0.75, None, None, 0.75, 0.5, 0.5, 0.75, 6.0, 3, None),
            ("even", EVEN, None, None, EVEN, 0.25, 0.25, 0.75, 10.0, 4, None),
            ("stale", None, None, None, None, None, None, None, None, None, None),
            ("four", 0.75, *interval(0.75, 64), 0.75, 0.375, 0.375, 0.75, 5.0, 2, None),
        ],
    ),
    "evaluations": (
        ("run", "training time (s)", "updates", "sent (MB)", "accuracy", "test error", "test loss"),
        [
            ("late", 3.0, 2, None, 0.5, 0.5, 1.0),
            *[("late", 6.0, 3, None, 0.75, 0.25, 0.5)] * 2,
            ("even", 5.0, 2, None, 0.25, 0.75, 2.0),
            *[("even", 10.0, 4, None, EVEN, 1 - EVEN, 0.25)] * 2,
            ("four", 5.0, 2, None, 0.75, 0.25, 0.5),
            ("four", 7.5, 3, None, 0.75, 0.25, 0.375),
        ],
    ),
    "races": (
        ("benchmark", "strategy", "learners", "target", "seeds", "reached it", "time to target (s)",
         "time to target: low (s)", "time to target: high (s)", "updates to target", "mean accuracy",
         "at least", "at most", "its standard deviation", "training time (s)"),
        [
            ("race", "ring", 2, 0.75, 2, 2, 4.0, 3.0, 5.0, 8, 0.875, *interval(0.875, 64), 0.125, 6.0),
            ("race", "async", 4, 0.75, 2, 0, None, None, None, None, 0.5, None, None, 0.0, 6.0),
            ("race", "ring", 4, 0.75, 2, 1, 2.0, None, None, None, None, None, None, None, None),
        ],
    ),
    "race-curves": (
        ("benchmark", "strategy", "learners", "seed", "training time (s)", "updates", "accuracy", "test error"),
        [("race", "ring", 2, 7, 2.0, 4, 0.5, 0.5), ("race", "ring", 2, 7, 4.0, 8, 0.875, 0.125)],
    ),
    "staleness": (
        ("run", "gradients applied", "mean (versions)", "standard deviation (versions)", "largest (versions)",
         "theory: mean (versions)", "mean less theory (versions)", "formula"),
        [
            ("late", 6, 0.0, 0.0, 0, 0.0, 0.0, "0, since every gradient is of the current version"),
            ("even", 8, 0.0, 0.0, 0, 0.0, 0.0, "0, since every gradient is of the current version"),
            # mean 3/4; deviations -3/4, -3/4, 5/4, 1/4: their squares are 44/16, a fourth of that is 11/16
            ("stale", 4, 0.75, math.sqrt(0.6875), 2, 1.0, -0.25, "P - 1"),
        ],
    ),
    "staleness-shares": (
        ("run", "staleness (versions)", "gradients", "share", "theory: share"),
        [
            ("late", "0", 6, 1.0, 1.0),
            ("even", "0", 8, 1.0, 1.0),
            ("stale", "0", 2, 0.5, 0.5),
            ("stale", "1", 1, 0.25, 0.25),
            ("stale", "2", 1, 0.25, 0.125),
        ],
    ),
    "learners": (
        ("run", "learner", "computing (s)", "thrown away (s)", "sending (s)", "waiting (s)", "updating (s)",
         "evaluating (s)", "computing: share", "thrown away: share", "sending: share", "waiting: share",
         "updating: share", "minibatches finished", "minibatches cancelled", "mean minibatch (s)",
         "median minibatch (s)", "typical minibatch (s)", "straggler"),
        [
            # of 5.25 s
            ("late", 0, 3.0, 0.0, 0.0, 2.0, 0.25, 1.0, of(4, 7), 0.0, 0.0, of(8, 21), of(1, 21), 3, 0, 1.0, 1.0, 1.0,
             None),
            # of 6 s
            ("late", 1, 4.0, 2.0, 0.0, 0.0, 0.0, 0.0, of(2, 3), of(1, 3), 0.0, 0.0, 0.0, 3, 1, of(4, 3), 1.5, 1.5,
             None),
            # of 5.25 s
            ("late", 2, 2.0, 3.0, 0.25, 0.0, 0.0, 0.0, of(8, 21), of(4, 7), of(1, 21), 0.0, 0.0, 2, 1, 1.75, 1.75, 2.0,
             None),
            ("even", 0, 4.0, 0.0, None, 4.0, 2.0, 1.0, 0.4, 0.0, None, 0.4, 0.2, 4, 0, 1.0, 1.0, 1.0, None),
            ("even", 1, 8.0, 0.0, None, 0.0, 2.0, 0.0, 0.8, 0.0, None, 0.0, 0.2, 4, 0, 2.0, 2.0, 2.0, 2.0),
            ("stale", 0, 3.0, 0.0, None, 0.0, None, 0.0, 1.0, 0.0, None, 0.0, None, 3, 0, 1.0, 1.0, 1.0, None),
            # 2.5 times as slow, but once only: that is no straggler
            ("stale", 1, 2.5, 0.0, None, 0.0, None, 0.0, 1.0, 0.0, None, 0.0, None, 1, 0, 2.5, 2.5, 2.5, None),
        ],
    ),
    "scaling": (
        ("benchmark", "scaling", "strategy", "learners", "batch of a learner", "T(n) (s)", "T(n) low (s)",
         "T(n) high (s)", "throughput (samples/s)", "speed-up", "speed-up low", "speed-up high",
         "efficiency", "overhead (s)", "accuracy",
         "not ranked because"),
        [
            ("scale", "weak", "ring", 1, 8, 1.0, 0.75, 1.25, 8.0, 1.0, None, None, 1.0, 0.0, 0.5, ""),
            ("scale", "weak", "ring", 2, 8, 1.25, 1.0, 1.5, 12.8, 1.6, 1.5, 1.75, 0.8, 0.25, 0.5, ""),
            ("scale", "weak", "async", 2, 4, 2.0, None, None, None, 1.0, None, None, 0.5, 1.0, None, "another batch"),
        ],
    ),
    "communication": (
        ("run", "sending", "waiting", "updating", "not computing"),
        [
            ("late", of(1, 66), of(4, 33), of(1, 66), of(5, 33)),  # of 16.5 s
            ("even", None, 0.2, 0.2, 0.4),  # of 20 s
            ("stale", None, 0.0, None, 0.0),
        ],
    ),
    "machines": (
        ("run or benchmark", "strategy", "learners", "what", "time (s)"),
        [
            ("late", "k-sync:2", 3, "time to 75.0 %", 6.0),
            ("even", "ring", 2, "time to 75.0 %", 10.0),
            ("four", "ring", 4, "time to 75.0 %", 5.0),
            ("scale", "ring", 1, "T(n)", 1.0),
            ("scale", "ring", 2, "T(n)", 1.25),
            ("race", "ring", 2, "time to target", 4.0),
            ("race", "ring", 4, "time to target", 2.0),
        ],
    ),
    "energy": (
        ("run", "energy (J)", "measured by", "not measured", "energy measured over (s)", "energy per sample (J)",
         "energy to target (J)", "devices", "training time (s)", "cost", "cost to target"),
        [
            ("late", 96.0, "package-0, package-1", "in part, without: no counter of the GPU", 8.0, 2.0, 96.0, 3, 6.0,
             18.0, 18.0),
            ("even", None, "", "not measured: the run has no energy.json", None, None, None, 2, 10.0, 20.0, 20.0),
            ("stale", None, "", "not measured: the run was simulated", None, None, None, 2, 3.0, 6.0, None),
            ("four", None, "", "not measured: the run has no energy.json", None, None, None, 4, 7.5, COST_4, 20.0),
        ],
    ),
    "energy-benchmarks": (
        ("benchmark", "strategy", "learners", "energy (J)", "energy to target (J)", "cost", "cost to target"),
        [
            ("scale", "ring", 1, 10.0, None, 0.25, None),
            ("scale", "ring", 2, None, None, 0.5, None),
            ("race", "ring", 2, 20.0, 15.0, 2.0, 1.0),
        ],
    ),
    "predictions": (
        ("benchmark", "strategy", "learners", "slowed", "what", "measured (s)", "predicted (s)", "error"),
        [
            ("foresight", "k-sync:2", 3, "learner=2,factor=2", "time per update", 2.0, 1.0, -0.5),
            ("race", "ring", 2, "", "time to target", 4.0, 5.0, 0.25),
            ("foresight", "ring", 2, "", "time per update", 2.0, 2.5, 0.25),
            ("scale", "ring", 2, "", "T(n)", 1.25, 1.0, -0.2),
        ],
    ),
    "runs": (
        ("run", "strategy", "learners", "servers", "kind", "updates", "training time (s)", "time per update (s)",
         "samples applied", "samples never applied", "throughput (samples/s)", "accuracy at the end", "best accuracy",
         "loss at the end", "time to target (s)", "mean staleness (versions)", "gradients applied",
         "gradients dropped", "minibatches cancelled", "gradients left over", "thrown away", "not computing",
         "energy (J)", "cost"),
        [
            ("late", "k-sync:2", 3, 1, "real", 3, 6.0, 2.0, 48, 12, 8.0, 0.75, 0.75, 0.5, 6.0, 0.0, 6, 1, 2, 1,
             of(10, 33), of(5, 33), 96.0, 18.0),
            ("even", "ring", 2, None, "real", 4, 10.0, 2.5, 64, 0, 6.4, EVEN, EVEN, 0.25, 10.0, 0.0, 8, 0, 0, 0,
             0.0, 0.4, None, 20.0),
            ("stale", "async", 2, None, "simulated", 4, 3.0, 0.75, 32, 0, of(32, 3), None, None, None, None, 0.75, 4,
             0, 0, 0, 0.0, 0.0, None, 6.0),
            ("four", "ring", 4, None, "real", 3, 7.5, 2.5, 96, 0, 12.8, 0.75, 0.75, 0.375, 5.0, None, 0, 0, 0, 0,
             None, None, None, COST_4),
        ],
    ),
    "configuration": (
        ("field", "differs", "late", "even", "stale", "four"),
        [
            ("run", "", "late", "even", "stale", "four"),
            ("sync", "yes", "k-sync:2", "ring", "async", "ring"),
            ("learners", "yes", 3, 2, 2, 4),
            ("machine.cores", "yes", None, 2, None, None),
            ("name", "", *["tiny"] * 4),
            ("model.name", "", *["mlp"] * 4),
            ("model.options", "", *["none"] * 4),
            ("data.name", "", *["digits"] * 4),
            ("data.options", "", *["none"] * 4),
            ("train.precision", "", *["fp32"] * 4),
            ("train.batch_size", "", *[8] * 4),
        ],
    ),
    "definitions": (
        ("name", "unit", "definition"),
        [*((name, one.unit, one.formula) for name, one in sorted(DEFINITIONS.items())),
         ("scale: T", "", "seconds")],
    ),
}  # fmt: skip


def test_every_table_and_column_of_the_page_has_its_golden_numbers(page: Page) -> None:
    tables = {table.key: tuple(column.name for column in table.columns) for table in tables_of(page)}
    assert tables == {key: columns for key, (columns, _) in ROWS.items()}
    assert len(tables) == len(tables_of(page))


@pytest.mark.parametrize("key", ROWS)
def test_every_number_of_a_table_is_the_one_computed_on_paper(page: Page, key: str) -> None:
    table = next(table for table in tables_of(page) if table.key == key)
    assert list(table.rows) == ROWS[key][1]
    kinds = [[type(cell) for cell in row] for row in table.rows]
    assert kinds == [[type(cell) for cell in row] for row in ROWS[key][1]]  # 1 == 1.0 == True, and is shown otherwise


def test_the_sections_come_in_their_order(page: Page) -> None:
    assert [section.key for section in page.sections] == [
        "timeline", "error", "staleness", "time", "scaling", "communication", "machines", "energy", "predictions",
        "runs", "configuration", "definitions",
    ]  # fmt: skip


def test_every_number_of_a_chart_is_in_a_table(page: Page) -> None:
    known = {cell for table in tables_of(page) for row in table.rows for cell in row}
    charts = 0
    for section in page.sections:
        for item in section.items:
            if isinstance(item, LineChart):
                drawn = [number for series in item.series for point in series.points for number in point]
            elif isinstance(item, BarChart):
                drawn = [value for bars in item.series for value in bars.values if value is not None]
            elif isinstance(item, ShareChart):
                drawn = [value for row in item.values for value in row]
            else:
                assert isinstance(item, Table | TimelineChart)
                continue
            charts += 1
            assert drawn and set(drawn) <= known, item.key
    assert charts == 15


def test_charts_hold_the_numbers_on_paper(page: Page) -> None:
    items = {item.key: item for section in page.sections for item in section.items if not isinstance(item, Table)}
    error = items["error-seconds"]
    assert isinstance(error, LineChart) and error.levels == ((0.25, "target 75.0 %"),)
    assert [(one.name, one.points) for one in error.series] == [
        ("late", ((3.0, 0.5), (6.0, 0.25), (6.0, 0.25))),
        ("even", ((5.0, 0.75), (10.0, 1 - EVEN), (10.0, 1 - EVEN))),
        ("four", ((5.0, 0.25), (7.5, 0.25))),
    ]
    updates = items["error-updates"]
    assert isinstance(updates, LineChart) and updates.series[0].points == ((2.0, 0.5), (3.0, 0.25), (3.0, 0.25))
    stale = items["staleness-3"]
    assert isinstance(stale, BarChart) and stale.categories == ("0", "1", "2")
    assert [(bars.values, bars.style) for bars in stale.series] == [
        ((0.5, 0.25, 0.25), "columns"), ((0.5, 0.25, 0.125), "dots"),
    ]  # fmt: skip
    shares = items["shares-2"]
    assert isinstance(shares, ShareChart) and shares.values == ((0.4, 0.0, 0.4, 0.2), (0.8, 0.0, 0.0, 0.2))
    assert shares.parts == ("computing", "thrown away", "waiting", "updating")  # its log has no sending at all
    speed = items["speedup-1"]
    assert isinstance(speed, LineChart)
    assert [(one.name, one.points, one.style) for one in speed.series] == [
        ("ring", ((1.0, 1.0), (2.0, 1.6)), "line"), ("ideal", ((1.0, 1.0), (2.0, 2.0)), "dashed"),
    ]  # fmt: skip
    predicted = items["predicted"]
    assert isinstance(predicted, LineChart)
    assert predicted.series[-1] == ("as predicted", ((1.0, 1.0), (5.0, 5.0)), "dashed", "")
    line = items["timeline-1"]
    assert isinstance(line, TimelineChart) and line.learners == ("learner 0", "learner 1", "learner 2")
    assert len(line.bars) == 16 and sum(bar[5] for bar in line.bars) == 2 and max(bar[3] for bar in line.bars) == 7.0


def test_the_summary_says_who_was_first_who_is_slow_and_what_was_lost(page: Page) -> None:
    assert page.summary == (
        "ring with 4 learners and k-sync:2 with 3 learners were first to reach 75.0 %, after 5 s and 6 s, within one "
        "evaluation of each other; ring with 2 learners took 10 s, 2.00x as long.",
        "They also differ in learners (3, 2, 4), machine.cores (unknown, 2), which explains part of the difference.",
        "There is one run of each, so a difference may be chance.",
        "Not ranked against each other: k-sync:2 with 3 learners and async with 2 simulated learners differ in "
        "simulated (no, yes).",
        "Learner 1 is a straggler in 1 of 4 runs: its minibatches take 2.0x as long as the others' (typically 2 s "
        "against 1 s). The other waited 40 % of its time under ring with 2 learners.",
        "k-sync:2 with 3 learners threw away 30.3 % of the learners' time: 2 minibatches were cancelled and "
        "1 gradient was dropped.",
        "Under k-sync:2 with 3 learners, 12 samples were computed but never applied.",
        "Gradients of async with 2 simulated learners were 0.75 versions old on average when they were applied; "
        "theory says 1 = P - 1.",
        "In the weak scaling benchmark of tiny: fastest with comparable accuracy: ring x 2 (13 samples/s, 1.60x); "
        "async x 2: not ranked: x.",
        "In the accuracy benchmark of tiny, ring with 2 learners was the first to reach 75.0 %, after 4 s.",
        "2 predictions were off by 37.5 % on average, 50.0 % at worst.",
        "k-sync:2 with 3 learners ended at 75.0 % after 6 s (3 updates), 8 samples applied per second; it used 96 J "
        "or more (not measured: no counter of the GPU); it cost 18.",
        "ring with 2 learners ended at 75.8 % after 10 s (4 updates), 6 samples applied per second; it cost 20.",
        "async with 2 simulated learners ran for 3 s (4 updates), 11 samples applied per second; it would cost 6.",
        "ring with 4 learners ended at 75.0 % (63.2-84.0) after 7.5 s (3 updates), 13 samples applied per second; it "
        "cost 30.",
    )
    assert page.problems == (
        "stale: metrics.jsonl: is missing, so accuracy and time to target are unknown",
        "four: log.jsonl: is missing, so there is no timeline",
    )
