"""bench accuracy on made-up trainings: times to the target, who is ranked, what energy and money came to."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from offbeat.errors import RequestError
from offbeat.measure.accuracy_bench import AccuracyRequest, measure, ranking
from offbeat.measure.benchmark import BenchResult
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
CONFIG = changed(RECIPES["digits-softmax"].config, {"train": {"epochs": 3, "stop_at": 0.5}})
REQUEST = AccuracyRequest(config=CONFIG, target=0.9, lines=("ring", "async"), learners=2, seeds=3)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A training that was never run: an evaluation after every second, of 10 updates."""

    accuracies: tuple[float | None, ...]
    slow: float = 1.0
    energy: Mapping[str, Any] | None = field(default_factory=lambda: {"joules": 90.0, "not_measured": []})
    samples_per_s: float = 100.0

    @property
    def metrics(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(
            {"seconds": self.slow * number, "update": 10 * number, "accuracy": accuracy, "test_samples": 359}
            for number, accuracy in enumerate(self.accuracies, start=1)
        )

    @property
    def seconds(self) -> float:
        return self.slow * len(self.accuracies)

    @property
    def accuracy(self) -> float | None:
        return self.accuracies[-1]


def found(runs: Mapping[tuple[str, int], Trained], request: AccuracyRequest = REQUEST, **more: Any) -> BenchResult:
    """Measured, by strategy and seed."""

    def train(config: Config, folder: Path) -> Any:
        assert config.train.stop_at == 0 and config.learners == 2
        return runs[config.sync, config.seed]

    return measure(request, lambda text: None, train=train, machine=MACHINE, **more)


EARLY, LATE, NEVER = (0.7, 0.91, 0.94), (0.5, 0.8, 0.9, 0.9), (0.5, 0.95, 0.7)  # which touches it once
MIXED = {
    ("ring", 0): Trained(accuracies=EARLY),
    ("ring", 1): Trained(accuracies=LATE),
    ("ring", 2): Trained(accuracies=EARLY, slow=1.25),
    ("async", 0): Trained(accuracies=EARLY, slow=0.5),
    ("async", 1): Trained(accuracies=NEVER, slow=0.5),
    ("async", 2): Trained(accuracies=LATE, slow=0.5),
}


def test_every_strategy_takes_its_turn_with_every_seed() -> None:
    seen: list[tuple[int, str]] = []

    def train(config: Config, folder: Path) -> Any:
        seen.append((config.seed, config.sync))
        return Trained(accuracies=EARLY)

    measure(replace(REQUEST, seed=5, seeds=2), lambda text: None, train=train, machine=MACHINE)
    assert seen == [(5, "ring"), (5, "async"), (6, "ring"), (6, "async")]


def to_target(row: Row) -> tuple[Any, Any, Any]:
    return row["seconds_to_target"], row["seconds_to_target_low"], row["seconds_to_target_high"]


def test_the_time_to_the_target_is_the_median_over_the_seeds_that_reached_it() -> None:
    ring, asynchronous = found(MIXED).rows
    assert ring["reached_s"] == (2.0, 3.0, 2.5) and ring["reached"] == 3
    assert to_target(ring) == (2.5, 2.0, 3.0) and ring["updates_to_target"] == 20
    assert asynchronous["reached_s"] == (1.0, None, 1.5) and asynchronous["reached"] == 2
    assert to_target(asynchronous) == (1.25, 1.0, 1.5) and asynchronous["updates_to_target"] == 25
    ends = [0.94, 0.7, 0.9]
    assert asynchronous["accuracy_mean"] == pytest.approx(statistics.fmean(ends))
    assert asynchronous["accuracy_std"] == pytest.approx(statistics.stdev(ends))


def test_only_who_got_there_with_every_seed_is_ranked() -> None:
    assert ranking(found(MIXED).rows, 0.9) == [
        "first at 90.0 %: ring (2.5 s, 2 s to 3 s)",
        "async: not ranked: 2 of 3 seeds reached 90.0 %; it ended at 84.7 % (80.6-88.0)",
    ]


def test_who_is_within_the_spread_is_called_alike_and_who_is_not_comes_after() -> None:
    runs = MIXED | {("async", seed): Trained(accuracies=EARLY, slow=1.4) for seed in range(3)}
    lines = ranking(found(runs).rows, 0.9)
    assert lines == [
        "first at 90.0 %: ring (2.5 s, 2 s to 3 s) and async (2.8 s, 2.8 s to 2.8 s): no clear "
        "difference with these seeds"
    ]
    apart = MIXED | {("async", seed): Trained(accuracies=EARLY, slow=1.6) for seed in range(3)}
    assert ranking(found(apart).rows, 0.9)[1] == "then async (3.2 s, 3.2 s to 3.2 s)"
    one = ranking(found(apart, replace(REQUEST, seeds=1)).rows, 0.9)
    assert len(one) == 1 and one[0].endswith("one seed is not enough to rank them; use --seeds 3 or more")


def test_nobody_at_the_target_is_said_with_what_to_do() -> None:
    result = found(MIXED, replace(REQUEST, target=0.99))
    row = result.rows[0]
    assert (row["reached"], row["error"], row["updates_to_target"]) == (0, None, None)
    assert to_target(row) == (None, None, None)
    lines = ranking(result.rows, 0.99)
    assert lines[0] == "no strategy reached 99.0 %; try more --epochs, another --lr or a lower --target"
    some = {key: Trained(accuracies=NEVER if key[1] else EARLY) for key in MIXED}
    assert ranking(found(some).rows, 0.9)[0] == "no strategy reached 90.0 % with every seed, so none is ranked"


def test_energy_and_cost_are_of_the_run_and_of_its_part_until_the_target() -> None:
    ring, _ = found(MIXED, replace(REQUEST, price=3600.0)).rows
    assert ring["joules"] == 90 and ring["joules_to_target"] == pytest.approx(60)  # of 60, 67.5 and 60
    assert ring["cost"] == pytest.approx(2 * 3.75) and ring["cost_to_target"] == pytest.approx(2 * 2.5)
    dark = {key: replace(run, energy=None) for key, run in MIXED.items()}
    result = found(dark)
    assert all(result.rows[0][key] is None for key in ("joules", "joules_to_target", "cost", "cost_to_target"))
    assert "energy: not measured: the run left no energy.json" in result.json["notes"]


def test_the_prediction_stands_beside_it_as_the_median_over_the_seeds() -> None:
    result = found(MIXED, predictor=lambda config: None if config.sync == "async" else 2.0 + config.seed)
    ring, asynchronous = result.rows
    assert ring["predicted_s"] == 3.0 and ring["error"] == pytest.approx(0.2)
    assert asynchronous["predicted_s"] is None and asynchronous["error"] is None
    assert "async: according to the prediction, 3 of 3 seeds do not reach the target" in result.json["notes"]

    def refuses(config: Config) -> float | None:
        raise RequestError("no probe")

    assert "ring with 2 learners: not predicted: no probe" in found(MIXED, predictor=refuses).json["notes"]
    assert "not predicted: give --calibration (offbeat calibrate writes one)" in found(MIXED).json["notes"]


def test_the_object_is_the_contracts() -> None:
    told = found(MIXED).json
    assert (told["measured"], told["recipe"], told["target"]) == ("accuracy", "digits-softmax", 0.9)
    assert (told["machine"], told["precision"]) == (MACHINE, "fp32")
    names = "strategy learners seeds reached seconds_to_target seconds_to_target_low seconds_to_target_high "
    names += "updates_to_target accuracy_mean accuracy_std seconds joules joules_to_target cost cost_to_target "
    assert all(set(f"{names} predicted_s error".split()) <= row.keys() for row in told["rows"])
    assert len(told["curves"]) == 6
    assert told["curves"][5] == {
        "strategy": "async", "learners": 2, "seed": 2,
        "points": [[0.5, 10, 0.5], [1.0, 20, 0.8], [1.5, 30, 0.9], [2.0, 40, 0.9]],
    }  # fmt: skip
    assert "assuming constant power" in told["definitions"]["joules_to_target"]


def test_the_chart_has_a_line_for_each_strategy_and_the_target() -> None:
    chart = found(MIXED).chart
    assert chart.startswith("<svg") and all(word in chart for word in ("ring", "async", "target: 90.0 % right"))


def test_a_recipe_without_an_accuracy_has_none_to_reach() -> None:
    with pytest.raises(RequestError, match="has no accuracy"):
        found({key: Trained(accuracies=(None,)) for key in MIXED})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": 0.0}, "--target: expected an accuracy above 0 and at most 1"),
        ({"target": 1.01}, "--target: expected an accuracy above 0 and at most 1"),
        ({"lines": ("ring", "ring")}, "--sync names a strategy twice"),
        ({"lines": ("k-sync:3",)}, "'k-sync:3': K=3 exceeds the 2 learners"),
        ({"learners": 65}, "from 1 to 64; got 65"),
        ({"seeds": 0}, "--seeds: expected 1 or more"),
        ({"price": -0.1}, "--price: expected a price per device hour"),
        ({"config": changed(CONFIG, {"slow": ("learner=2,factor=2",)})}, "there are 2 learners, numbered from 0"),
    ],
)
def test_a_wrong_request_is_refused_at_birth(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        replace(REQUEST, **change)
    assert message in str(caught.value) and str(caught.value).startswith("bench: ")
