"""bench scaling on made-up trainings: who runs when, what follows from the rounds, and who is not ranked."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from offbeat.errors import RequestError
from offbeat.measure.benchmark import BenchResult, median_interval
from offbeat.measure.scaling_bench import ScalingRequest, are_alike, judged, measure, ranking, scaling_row
from offbeat.measure.training_bench import TrainingNumbers, numbers_of, ranked_sentences
from offbeat.report.benchmark_fields import Row
from offbeat.train.config import Config
from offbeat.train.config_files import changed
from offbeat.train.recipes import RECIPES

MACHINE = {
    "cores": 4,
    "load": 0.1,
    "processor": "AMD",
    "python": "3.11",
    "torch": "2.13",
    "device": "cpu",
    "threads": 1,
}
CONFIG = changed(RECIPES["digits-softmax"].config, {"train": {"epochs": 3}})


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A training that was never run."""

    samples_per_s: float
    accuracy: float | None = 0.95
    seconds: float = 10.0
    energy: Mapping[str, Any] | None = field(default_factory=lambda: {"joules": 50.0, "not_measured": []})
    metrics: tuple[Mapping[str, Any], ...] = ()


def found(request: ScalingRequest, rates: Mapping[tuple[str, int], Sequence[float]], **more: Any) -> BenchResult:
    """Measured, with so many samples a second of a strategy and learners in each round."""
    begun: dict[tuple[str, int], int] = {}

    def train(config: Config, folder: Path) -> Any:
        key = (config.sync, config.learners)
        begun[key] = begun.get(key, -1) + 1
        return Trained(samples_per_s=rates[key][begun[key]])

    return measure(request, lambda text: None, train=train, machine=MACHINE, **more)


RATES = {("ring", 1): (1000.0, 500.0, 800.0), ("ring", 2): (1500.0, 900.0, 1000.0), ("k-async:2", 2): (1600, 400, 1200)}
REQUEST = ScalingRequest(config=CONFIG, lines=("ring", "k-async:2"), learners=(1, 2))


def test_in_every_round_the_base_and_every_configuration_take_turns_with_a_seed_of_the_round() -> None:
    seen: list[tuple[int, str, int]] = []

    def train(config: Config, folder: Path) -> Any:
        seen.append((config.seed, config.sync, config.learners))
        assert not folder.exists() and folder.parent.is_dir()
        assert config.save.every_epochs == 0 and config.train.epochs == 3
        return Trained(samples_per_s=100.0)

    request = ScalingRequest(config=CONFIG, lines=("ring", "async"), learners=(1, 2, 4), rounds=2, seed=7)
    result = measure(request, lambda text: None, train=train, machine=MACHINE)
    once = [("ring", 1), ("ring", 2), ("async", 2), ("ring", 4), ("async", 4)]
    assert seen == [(7, *one) for one in once] + [(8, *one) for one in once]
    assert [(row["strategy"], row["learners"]) for row in result.rows] == once


def test_speed_up_efficiency_and_overhead_are_medians_of_paired_rounds() -> None:
    result = found(REQUEST, RATES)
    base, ring, _ = result.rows
    assert base["seconds_of_rounds"] == pytest.approx([0.032, 0.064, 0.040])
    assert ring["seconds_of_rounds"] == pytest.approx([64 / 1500, 64 / 900, 64 / 1000])
    speedup = ring["speedup"], ring["speedup_low"], ring["speedup_high"]
    assert speedup == pytest.approx((1.5, 1.25, 1.8))  # of 1.5, 1.8, 1.25; not 1000 / 800 of the medians
    assert ring["efficiency"] == pytest.approx(0.75)
    assert ring["overhead_s"] == pytest.approx(statistics.median([64 / 1500 - 0.032, 64 / 900 - 0.064, 0.064 - 0.040]))
    assert ring["throughput"] == 1000
    assert (base["speedup"], base["efficiency"], base["overhead_s"]) == (1, 1, 0)
    assert result.spread == pytest.approx(4.0)


def test_strong_scaling_parts_the_minibatch_and_has_definitions_of_its_own() -> None:
    request = replace(REQUEST, kind="strong")
    assert [config.train.batch_size for config in request.configs(0)] == [32, 16, 16]
    result = found(request, RATES)
    ring = result.rows[1]
    assert ring["batch"] == 16 and ring["seconds_of_rounds"] == pytest.approx([32 / 1500, 32 / 900, 32 / 1000])
    assert ring["speedup"] == pytest.approx(1.5) and ring["efficiency"] == pytest.approx(0.75)
    assert ring["overhead_s"] is None and "not defined" in result.json["definitions"]["overhead_s"]
    with pytest.raises(RequestError, match="32 is not a multiple of 3; choose another --batch-size"):
        replace(REQUEST, kind="strong", lines=("ring",), learners=(3,))


def test_a_minibatch_of_several_passes_counts_all_of_them() -> None:
    config = changed(CONFIG, {"train": {"accumulate": 2}})
    base, *_ = found(replace(REQUEST, config=config), RATES).rows
    assert base["batch"] == 64 and base["seconds_of_rounds"][0] == pytest.approx(0.064)


def test_the_object_is_the_contracts() -> None:
    result = found(REQUEST, RATES, predictor=lambda config: 1250.0 * config.learners).json
    assert (result["measured"], result["kind"], result["recipe"]) == ("scaling", "weak", "digits-softmax")
    assert (result["base"], result["precision"]) == ("one learner alone on cpu, 1 thread", "fp32")
    assert (result["rounds"], result["machine"]) == (3, MACHINE)
    names = (
        "strategy learners batch seconds seconds_low seconds_high throughput speedup efficiency overhead_s accuracy "
    )
    names += "predicted_s error joules cost ranked why_not"
    assert all(set(names.split()) <= row.keys() for row in result["rows"])
    ring = result["rows"][1]
    assert (ring["seconds_low"], ring["seconds"], ring["seconds_high"]) == pytest.approx((64 / 1500, 0.064, 64 / 900))
    assert ring["predicted_s"] == pytest.approx(64 / 2500) and ring["error"] == pytest.approx(0.0256 / 0.064 - 1)
    assert ring["joules"] == 50 and ring["cost"] is None and ring["ranked"] is True and ring["why_not"] == ""
    assert {"seconds", "speedup", "efficiency", "overhead_s", "joules", "cost", "base"} <= result["definitions"].keys()


def test_without_a_calibration_nothing_is_predicted_and_it_is_said() -> None:
    result = found(REQUEST, RATES)
    assert all(row["predicted_s"] is None and row["error"] is None for row in result.rows)
    assert "not predicted: give --calibration (offbeat calibrate writes one)" in result.json["notes"]


def test_what_cannot_be_predicted_is_named_and_the_others_are() -> None:
    def predictor(config: Config) -> float:
        if config.sync == "k-async:2":
            raise RequestError("no probe of servers")
        return 1000.0

    result = found(REQUEST, RATES, predictor=predictor)
    assert [row["predicted_s"] is None for row in result.rows] == [False, False, True]
    assert "k-async:2 with 2 learners: not predicted: no probe of servers" in result.json["notes"]


def test_the_cost_is_devices_times_hours_times_price() -> None:
    result = found(replace(REQUEST, price=3.6), RATES)
    assert [row["cost"] for row in result.rows] == pytest.approx([0.01, 0.02, 0.02])  # 10 s each


# --- who is ranked ------------------------------------------------------------------------------------------------


def row(
    line: str, learners: int, rates: Sequence[float], accuracy: float | None = 0.97, *, tests: int = 359, **more: Any
) -> Row:
    runs = tuple(TrainingNumbers(rate, 1.0, accuracy, tests, (), None, ("no counters",)) for rate in rates)
    fields: dict[str, Any] = {"precision": "fp32", "device": "cpu"} | more
    return scaling_row(
        line=line, learners=learners, batch=32, kind="weak", runs=runs, alone_s=(0.032,) * len(runs), **fields
    )


BASE = row("ring", 1, (1000, 1010, 990))


def test_who_learns_worse_is_not_ranked_however_fast() -> None:
    rows = judged([BASE, row("ring", 2, (1800, 1810, 1790)), row("async", 2, (2000, 2010, 1990), 0.91)], 0.01)
    assert [one["why_not"] == "" for one in rows] == [True, True, False]
    assert rows[2]["why_not"] == "its accuracy 91.0 % (87.6-93.5) is 6 points below the 97.0 % of one learner alone"
    assert rows[2]["ranked"] is False
    assert ranking(rows) == [
        "fastest with comparable accuracy: ring with 2 learners (1,800 samples/s, 1.80x)",
        "then one learner alone (1,000 samples/s)",
        f"async with 2 learners: not ranked: {rows[2]['why_not']}",
    ]


def test_one_point_below_is_ranked_and_a_bit_more_is_not() -> None:
    base = row("ring", 1, (1, 1, 1), tests=60_000)
    assert judged([base, row("ring", 2, (1, 1, 1), 0.96, tests=60_000)], 0.01)[1]["why_not"] == ""
    assert judged([base, row("ring", 2, (1, 1, 1), 0.9599, tests=60_000)], 0.01)[1]["why_not"] != ""
    assert judged([base, row("ring", 2, (1, 1, 1), 0.9599, tests=60_000)], 0.02)[1]["why_not"] == ""


def test_what_may_be_chance_on_a_small_test_set_is_ranked() -> None:
    assert judged([BASE, row("ring", 2, (1, 1, 1), 0.95)], 0.01)[1]["why_not"] == ""
    assert judged([BASE, row("ring", 2, (1, 1, 1), 0.93)], 0.01)[1]["why_not"] != ""


def test_another_precision_or_device_than_the_bases_is_not_ranked_and_sets_no_mark() -> None:
    other = row("ring", 2, (1, 1, 1), 0.999, precision="bf16")
    rows = judged([BASE, other, row("ring", 4, (1, 1, 1), device="cuda")], 0.01)
    assert rows[1]["why_not"] == "it was computed in bf16, but the base in fp32"
    assert rows[2]["why_not"] == "it was computed on cuda, but the base on cpu"
    assert rows[0]["why_not"] == ""  # 2.9 points below one that does not count


def test_without_an_accuracy_nothing_is_ranked() -> None:
    rows = judged([row("ring", 1, (9,), None)], 0.01)
    assert ranking(rows) == ["nothing can be ranked", "one learner alone: not ranked: its accuracy is unknown"]


def test_who_is_faster_in_some_rounds_only_is_alike() -> None:
    ring, mixed = row("ring", 2, (1000, 1000, 1000)), row("async", 2, (1500, 900, 1600))
    assert are_alike(ring, mixed) and are_alike(mixed, ring)
    assert are_alike(ring, row("async", 2, (1100, 1200, 1300)))  # three rounds of equals are in order one time in four
    assert not are_alike(ring, row("async", 2, (1250, 1300, 1400)))
    five = row("ring", 2, (1000,) * 5), row("async", 2, (1100, 1200, 1300, 1100, 1200))
    assert not are_alike(*five)
    assert are_alike(ring, row("async", 2, (1010, 1020, 1030)))  # always, and by next to nothing
    assert "async with 2 learners (1,500 samples/s, 1.50x) and ring with 2 learners" in ranking([ring, mixed])[0]
    assert ranking([ring, mixed])[0].endswith(": no clear difference in these rounds")


def test_one_round_tells_nobody_apart() -> None:
    lines = ranking([row("ring", 2, (1000,)), row("async", 2, (3000,))])
    assert len(lines) == 1 and lines[0].endswith("one round is not enough to rank them; use --rounds 5 or more")


def test_a_ranking_has_a_sentence_for_each_group() -> None:
    rows = [{"number": number} for number in (1, 2, 10, 11, 30)]
    lines = ranked_sentences(
        rows, lambda a, b: b["number"] - a["number"] < 5, lambda row: str(row["number"]), "first", "alike"
    )
    assert lines == ["first: 1 and 2: alike", "then 10 and 11: alike", "then 30"]


# --- notes --------------------------------------------------------------------------------------------------------


def notes_of(request: ScalingRequest, machine: Mapping[str, Any], **trained: Any) -> list[str]:
    def train(config: Config, folder: Path) -> Any:
        return Trained(samples_per_s=1.0, **trained)

    return list(measure(request, lambda text: None, train=train, machine=machine).json["notes"])


def test_more_learners_than_cores_are_said_plainly() -> None:
    request = ScalingRequest(config=CONFIG, lines=("ring", "k-async:2"), learners=(1, 2, 4, 8))
    notes = notes_of(request, {**MACHINE, "cores": 2})
    assert "4 and 8 learners on 2 cores: learners share cores, which affects efficiency" in notes
    assert "k-async:2 with 2 learners: with its 1 server 3 processes share 2 cores" in notes
    assert sum("processes share" in note for note in notes) == 1  # 4 and 8 have been told of
    assert not any("share" in note or "sharing" in note for note in notes_of(request, {**MACHINE, "cores": 9}))
    gpus = {**MACHINE, "cores": 64, "device": "cuda", "gpus": 4}
    assert "8 learners on 4 GPUs: learners share GPUs, which affects efficiency" in notes_of(request, gpus)


def test_a_load_above_half_the_cores_is_noted() -> None:
    busy = [
        note for load in (2.0, 2.1, None) for note in notes_of(REQUEST, {**MACHINE, "load": load}) if "load" in note
    ]
    assert len(busy) == 1 and busy[0].startswith("the load was 2.10 before the start, more than half of 4 cores")


def test_energy_that_is_not_measured_says_why() -> None:
    reasons = {"joules": None, "not_measured": ["no RAPL counters here"]}
    assert "energy: not measured: no RAPL counters here" in notes_of(REQUEST, MACHINE, energy=reasons)
    assert "energy: not measured: the run left no energy.json" in notes_of(REQUEST, MACHINE, energy=None)
    part = {"joules": 3.0, "not_measured": ["no GPU counters"]}
    assert "energy is incomplete, not measured: no GPU counters" in notes_of(REQUEST, MACHINE, energy=part)
    assert not any("energy" in note for note in notes_of(REQUEST, MACHINE))


def test_slowness_of_a_learner_that_is_not_there_is_left_out_and_said() -> None:
    slow = changed(CONFIG, {"slow": ("exp:0.01", "learner=1,factor=3")})
    request = replace(REQUEST, config=slow)
    base, two, _ = request.configs(0)
    assert base.slow == ("exp:0.01",) and two.slow == slow.slow
    assert "artificial delays: exp:0.01, learner=1,factor=3; T(1) includes exp:0.01" in notes_of(request, MACHINE)


def test_one_epoch_has_the_start_in_it_and_that_is_said() -> None:
    one = replace(REQUEST, config=changed(CONFIG, {"train": {"epochs": 1}}))
    assert any(note.startswith("with one epoch, ") for note in notes_of(one, MACHINE))
    assert not any(note.startswith("with one epoch, ") for note in notes_of(REQUEST, MACHINE))


# --- intervals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("many", range(1, 40))
def test_the_interval_of_many_holds_the_median_in_95_of_100_cases_and_no_narrower_one_does(many: int) -> None:
    found = median_interval(range(many))
    assert found.median == (many - 1) / 2 and found.low == many - 1 - found.high

    def inside(low: int) -> float:  # by counting heads: the chance that the true median is between the two
        return 1 - 2 * sum(math.comb(many, heads) for heads in range(low + 1)) / float(2**many)

    low = int(found.low)
    if many < 6:
        assert low == 0
    else:
        assert inside(low) >= 0.95 > inside(low + 1)


def test_a_kept_training_has_its_evaluations_and_no_log() -> None:
    evaluated: list[Mapping[str, Any]] = [
        {"seconds": 1.0, "update": 5, "accuracy": 0.5},
        {"seconds": 2.0, "update": 9, "accuracy": None},
        {"seconds": 3.0, "update": 12, "accuracy": 0.7},
    ]
    made_up: Any = Trained(samples_per_s=9.0, metrics=tuple(evaluated))
    kept = numbers_of(made_up)
    assert kept.points == ((1.0, 5, 0.5), (3.0, 12, 0.7)) and kept.joules == 50


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lines": ("rign",)}, "unknown strategy 'rign'; did you mean 'ring'?"),
        ({"lines": ()}, "--sync needs at least one strategy"),
        ({"lines": ("k-async:2", "k-async: 2")}, "--sync names a strategy twice"),
        ({"lines": ("digits-mlp",)}, "'digits-mlp' is a recipe; put it before the options"),
        ({"lines": ("k-async:3",)}, "'k-async:3': K=3 exceeds the 2 learners"),
        ({"lines": ("torus:2x2",)}, "'torus:2x2': a shape of 2x2 has 4 ranks, not 2"),
        ({"learners": (1,)}, "expected 1, the baseline, and a larger number"),
        ({"learners": (2, 65)}, "from 1 to 64; got 65"),
        ({"learners": (2, 2)}, "--learners names a number twice"),
        ({"kind": "storng"}, "--kind is weak or strong"),
        ({"rounds": 0}, "--rounds: expected 1 or more"),
        ({"price": -1.0}, "--price: expected a price per device hour of 0 or more"),
        ({"price": math.nan}, "--price: expected a price per device hour of 0 or more"),
        ({"accuracy_within": 1.1}, "--accuracy-within: expected a number"),
        ({"config": changed(CONFIG, {"slow": ("learner=2,factor=2",)})}, "there are 2 learners, numbered from 0"),
    ],
)
def test_a_wrong_request_is_refused_at_birth(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        replace(REQUEST, **change)
    assert message in str(caught.value) and str(caught.value).startswith("bench: ")
