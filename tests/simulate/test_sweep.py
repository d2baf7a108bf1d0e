"""Sweeps over learners and over K, and the theory they are set beside."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from offbeat.cli import main
from offbeat.policies import create
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.compute import SlowPeriods, parse_law
from offbeat.simulate.setup import Setup
from offbeat.simulate.sweep import alone_s, expected_update, harmonic, times_of


def sweep(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, Any]:
    assert main([*line.split(), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# --- theory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("law", "k", "p", "seconds"),
    [
        ("exp:1", 1, 8, 0.125), ("exp:1", 4, 8, 0.6345), ("exp:1", 8, 8, 2.7179), ("exp:2", 10, 20, 2 * 0.6688),
        ("shifted-exp:1,1", 8, 8, 3.7179), ("pareto:2,1", 10, 20, 1.4054), ("pareto:2,1", 18, 20, 2.9911),
        ("constant:3", 2, 5, 3.0), ("uniform:1,2", 3, 5, 1.5),
    ],
)  # fmt: skip
def test_the_mean_of_the_kth_of_p_is_the_published_one(law: str, k: int, p: int, seconds: float) -> None:
    assert times_of(parse_law(law)).kth_s(k, p) == pytest.approx(seconds, abs=6e-5)


@pytest.mark.parametrize(("law", "same"), [("weibull:1,1", "exp:1"), ("gamma:1,1", "exp:1"), ("lognormal:2,0.001", "")])
def test_a_law_without_a_closed_form_is_summed_over_its_quantiles(law: str, same: str) -> None:
    for k, p in ((1, 8), (5, 8), (8, 8), (64, 64)):
        known = times_of(parse_law(same)).kth_s(k, p) if same else 2.0
        assert times_of(parse_law(law)).kth_s(k, p) == pytest.approx(known, rel=0.005)


def test_an_infinite_mean_of_the_slowest_is_said_to_be_infinite() -> None:
    assert times_of(parse_law("pareto:1,1")).kth_s(4, 4) == math.inf
    assert times_of(parse_law("pareto:1,1")).kth_s(3, 4) == pytest.approx(4)


def of(strategy: str, law: str, learners: int = 8, **machines: Any) -> float | None:
    cluster = Cluster(learners=learners, law=parse_law(law), **machines)
    found = expected_update(Setup(strategy=strategy, cluster=cluster))
    return None if found is None else found.seconds


def test_every_policy_says_its_own_theory_and_no_more_than_is_known() -> None:
    assert of("full-sync", "exp:1") == of("k-async:8", "exp:1") == pytest.approx(harmonic(8))
    assert (
        of("k-async:4", "exp:1")
        == of("k-sync:4", "exp:1")
        == of("backup:4", "exp:1")
        == pytest.approx(0.6345, abs=1e-4)
    )
    assert of("k-batch-sync:4", "exp:1") == of("k-batch-async:4", "pareto:2,0.5") == pytest.approx(0.5)
    assert of("async", "gamma:1,0.3") == of("k-async:1", "gamma:1,0.3") == of("softsync:8", "gamma:1,0.3") == 0.125
    assert of("downpour:push=2,fetch=1", "constant:1") == 0.25 and of("local-sgd:1", "exp:1") == of(
        "full-sync", "exp:1"
    )
    unknown = ("k-async:4", "k-batch-sync:4", "local-sgd:2", "ssp:1", "grace-sync:4,grace=1s", "deadline-sync:1s")
    assert [of(line, "shifted-exp:1,1") for line in unknown] == [None] * len(unknown)
    assert of("async", "exp:1", speeds=(0.5,)) is None  # learners that are not alike
    assert of("full-sync", "pareto:1,1") is None  # infinite
    assert create("full-sync", expect=4).expected_update(4, times_of(parse_law("exp:1"))) is not None


def test_t1_is_the_mean_with_what_slow_periods_add() -> None:
    periods = SlowPeriods(factor=5, enter=0.1, leave=0.3)
    assert alone_s(Cluster(learners=2, law=parse_law("exp:2"), slow=periods)) == pytest.approx(2 * (1 + 4 * 0.25))


# --- sweeps -----------------------------------------------------------------------------------------------------------


def test_the_ratio_of_full_sync_to_async_is_p_times_the_harmonic_number(capsys: pytest.CaptureFixture[str]) -> None:
    found = sweep(capsys, "compare full-sync async --learners 2 4 --compute exp:1 --updates 15000")
    assert [one["learners"] for one in found["ratios"]] == [2, 4]
    for one in found["ratios"]:
        p = one["learners"]
        assert one["p_h_p"] == one["theory"] == pytest.approx(p * harmonic(p))
        assert one["ratio"] == pytest.approx(one["p_h_p"], rel=0.02)


def test_a_range_of_k_is_a_sweep_that_meets_the_theory(capsys: pytest.CaptureFixture[str]) -> None:
    found = sweep(capsys, "simulate k-sync:7..8 --learners 8 --compute exp:1")["sweep"]
    assert [point["strategy"] for point in found] == ["k-sync:7", "k-sync:8"]
    for point in found:
        assert point["seconds_per_update"] == pytest.approx(point["theory_s"], rel=0.01)


def test_scaling_is_by_its_definitions(capsys: pytest.CaptureFixture[str]) -> None:
    """2 learners of 1 s, 8 samples each; a gradient of 1 GB takes 1 s each way, twice that where two share the link."""
    line = "compare full-sync --learners 1 2 --compute constant:1 --size 1GB --network 1GB/s"
    one, two = sweep(capsys, f"{line} --batch-size 8 --epoch-samples 80 --updates 50")["sweep"]
    assert (one["alone_s"], one["theory_s"]) == (1.0, 1.0)
    assert one["iteration_s"] == pytest.approx(3, rel=0.01) and two["iteration_s"] == pytest.approx(5, rel=0.01)
    assert two["speedup"] == pytest.approx(2 / 5, rel=0.01) and two["efficiency"] == pytest.approx(1 / 5, rel=0.01)
    assert two["overhead_s"] == pytest.approx(4, rel=0.01)
    assert two["samples_per_s"] == pytest.approx(16 / 5, rel=0.01) and two["epoch_s"] == pytest.approx(25, rel=0.01)


def test_what_cannot_run_with_so_few_is_left_out_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    found = sweep(capsys, "compare k-sync:1..4 --learners 2 4 --updates 20")
    assert [(one["strategy"], one["learners"]) for one in found["sweep"]] == [
        ("k-sync:1", 2), ("k-sync:2", 2), ("k-sync:1", 4), ("k-sync:2", 4), ("k-sync:3", 4), ("k-sync:4", 4),
    ]  # fmt: skip
    assert found["left_out"][0] == "with 2 learners: 'k-sync:3': K=3 exceeds the 2 learners"


def test_strategies_may_stand_after_the_learners(capsys: pytest.CaptureFixture[str]) -> None:
    found = sweep(capsys, "compare --learners 2 4 full-sync async --updates 20")
    assert {one["strategy"] for one in found["sweep"]} == {"full-sync", "async"}
    assert sweep(capsys, "simulate --learners 2 async --updates 20")["learners"] == 2


def test_a_sweep_without_strategies_takes_those_that_any_number_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = sweep(capsys, "compare --learners 2 8 --updates 20")["sweep"]
    assert {one["strategy"] for one in found if one["learners"] == 2} == {
        one["strategy"] for one in found if one["learners"] == 8
    }


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("compare full-sync async --learners 2 4 8 --updates 200", {"full-sync", "async", "P H_P", "theory E[X] / P"}),
        ("simulate k-sync:1..4 --learners 4 --updates 200", {"k-sync:1..4", "theory E[X_(K:P)]"}),
        ("compare k-sync:1..4 async --learners 4 --updates 200 --compute gamma:1ms,0.1", {"k-sync:1..4", "async"}),
    ],
)
def test_the_picture_has_a_curve_for_each_and_the_theory(tmp_path: Path, line: str, words: set[str]) -> None:
    assert main([*line.split(), "--svg", str(tmp_path / "sweep.svg")]) == 0
    drawn = ElementTree.parse(tmp_path / "sweep.svg")
    texts = {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert words <= texts and ("milliseconds per update" if "1ms" in line else "seconds per update") in texts


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("simulate async --svg x.svg", "--svg needs a sweep: give several --learners, or a range like k-sync:1..8"),
        ("simulate k-sync:8..1", "'k-sync:8..1': expected an increasing range, like 1..8; got '8..1'"),
        ("simulate k-sync:1..999999", "is a range of more than 1000 values"),
        ("simulate k-sync:1..9 --learners 8", "'k-sync:9': K=9 exceeds the 8 learners"),
        ("simulate async --learners 2 4 --trace t.json", "--trace does not apply to a sweep"),
        ("simulate async ring", "simulate: got a second strategy, 'ring'; use compare for several"),
        ("simulate async --learners x", "--learners: expected a whole number from 1 to 999999999; got 'x'"),
        ("simulate async --learners 2 4x", "--learners: expected a whole number from 1 to 999999999; got '4x'"),
        ("compare async --learners 2 4 --compute pareto:1,1", "that of 'pareto:1,1' is infinite"),
        ("simulate async --learners 2 4 --recipe digits-softmax", "--recipe takes one number of learners"),
        ("simulate async --learners 2 4 --batch-size x", "--batch-size: expected a whole number"),
        ("compare downpour:push=1..2,fetch=1..2 --updates 9 --svg x.svg", "has several ranges"),
    ],
)
def test_a_wrong_sweep_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], line: str, said: str) -> None:
    assert main(line.split()) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
