"""The definitions, against published numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import RequestError
from offbeat.runs import metrics


def test_goyal_et_al_on_256_gpus_is_ninety_percent_efficient() -> None:
    assert metrics.efficiency(0.230, 0.257) == pytest.approx(0.895, abs=5e-4)
    assert metrics.speedup(32, 0.230, 0.257) == pytest.approx(32 * 0.895, rel=1e-3)
    assert metrics.overhead_s(0.230, 0.257) == pytest.approx(0.027)


def test_efficiency_is_speedup_over_learners() -> None:
    assert metrics.speedup(8, 1.0, 1.25) / 8 == metrics.efficiency(1.0, 1.25) == 0.8
    assert metrics.strong_efficiency(8, 1.0, 0.2) == metrics.strong_speedup(1.0, 0.2) / 8 == 0.625


def test_throughput_and_cost() -> None:
    assert metrics.throughput(1000, 4.0) == 250
    assert metrics.cost(devices=8, seconds=1800, price_per_device_hour=2.5) == 10


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("all-reduce", 1.75),
        ("reduce-scatter", 0.875),
        ("all-gather", 0.875),
        ("all-to-all", 0.875),
        ("broadcast", 1),
        ("reduce", 1),
    ],
)
def test_bus_bandwidth(collective: str, factor: float) -> None:
    assert metrics.bus_bandwidth(collective, 8, 1e9, 0.5) == 2e9 * factor


def test_staleness_counts_versions_since_the_gradient_was_computed() -> None:
    assert metrics.staleness(43, 40) == 3
    with pytest.raises(RequestError, match="version 5 cannot be applied at version 4"):
        metrics.staleness(4, 5)


# --- reached means held -----------------------------------------------------------------------------------------------


def by_the_median(values: list[float], target: float) -> int | None:
    """The definition as it is written: three in a row, whatever comes after the end."""
    for at, value in enumerate(values):
        three = values[at : at + 3]
        worst = sorted([*three, *[-math.inf] * (3 - len(three))])
        if value >= target and worst[1] >= target:
            return at
    return None


@pytest.mark.parametrize(
    ("values", "at"),
    [
        ([], None),
        ([0.95], None),  # one evaluation holds nothing
        ([0.1, 0.95, 0.95, 0.95], 1),
        ([0.1, 0.9, 0.9], 1),  # two of three decide: the run may end here
        ([0.1, 0.2, 0.95], None),  # touched by the last one
        ([0.95, 0.1, 0.95], 0),
        ([0.95, 0.1, 0.1, 0.95], None),  # touched twice, too far apart
        ([0.1, 0.95, 0.1, 0.1, 0.92, 0.85, 0.93, 0.8], 4),  # the first touch does not count
        ([0.9, 0.9], 0),  # at the target is there
        ([0.1, math.nan, 0.95, math.nan, 0.96], 2),
        ([0.8999] * 9, None),
    ],
)
def test_a_target_is_reached_where_the_median_of_three_evaluations_is(values: list[float], at: int | None) -> None:
    assert metrics.reached_at(values, 0.9) == at


def test_a_loss_is_reached_from_above() -> None:
    losses = [2.3, 0.4, 0.9, 0.6, 0.45, 0.48]
    assert metrics.reached_at([-loss for loss in losses], -0.5) == 4, "0.4 was touched once"


@given(st.lists(st.sampled_from([0.1, 0.5, 0.9]), max_size=9), st.sampled_from([0.1, 0.5, 0.9]))
def test_reached_is_what_the_definition_says_and_more_evaluations_never_take_it_back(
    values: list[float], target: float
) -> None:
    at = metrics.reached_at(values, target)
    assert at == by_the_median(values, target)
    assert at is None or metrics.reached_at([*values, 0.0, 0.0], target) == at
    highest = metrics.highest_reached(values)
    assert (at is not None) == (highest is not None and highest >= target)


def test_the_policy_that_touched_85_and_ended_at_82_did_not_reach_85() -> None:
    points = [(1.0, 0.80), (2.0, 0.853), (3.0, 0.81), (4.0, 0.83), (5.0, 0.82)]
    assert metrics.time_to_accuracy(points, 0.85) is None
    assert metrics.time_to_accuracy(points, 0.82) == 2.0  # 85.3, 81, 83
    assert metrics.highest_reached([accuracy for _, accuracy in points]) == 0.83


# --- intervals and rankings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "samples", "low", "high"),
    [  # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 1 - 0.1170, 1.0),
    ],
)
def test_the_interval_is_that_of_wilson(right: int, samples: int, low: float, high: float) -> None:
    assert metrics.interval(right / samples, samples) == pytest.approx((low, high), abs=5e-5)


def test_an_accuracy_is_told_with_its_interval() -> None:
    assert metrics.format_accuracy(0.981, 359) == "98.1 % (96.1-99.1)"
    assert metrics.format_accuracy(0.981, 10_000) == "98.1 % (97.8-98.3)"
    assert metrics.format_accuracy(0.981, None) == "98.1 %"
    assert metrics.format_accuracy(1.0, 359) == "100.0 % (98.9-100.0)"


def score(accuracy: float, samples: int | None = 359, seconds: float = 1.0) -> metrics.Score:
    return metrics.Score(accuracy, samples, seconds)


def test_the_difference_of_two_accuracies_is_that_of_newcombe() -> None:
    """Newcombe 1998, "Interval estimation for the difference", example a: 56/70 and 48/80, from 0.0524 to 0.3339."""
    assert score(56 / 70, 70).is_above(score(48 / 80, 80))
    more = 56 / 70 - 48 / 80
    low = more - math.hypot(56 / 70 - metrics.interval(56 / 70, 70)[0], metrics.interval(48 / 80, 80)[1] - 48 / 80)
    assert low == pytest.approx(0.0524, abs=5e-5)
    assert not score(9 / 10, 10).is_above(score(3 / 10, 10), within=0.7)
    assert not score(9 / 10, 10).is_above(score(6 / 10, 10))


def test_half_a_point_on_359_images_is_a_tie_and_the_fastest_is_first() -> None:
    scores = [score(0.975, seconds=9.0), score(0.970, seconds=3.0), score(0.90, seconds=1.0), score(0.89, seconds=0.5)]
    assert metrics.ranking(scores) == [[1, 0], [3, 2]]
    many = [one._replace(samples=60_000) for one in scores]
    assert metrics.ranking(many) == [[0], [1], [2], [3]], "on 60,000 it is none"
    assert metrics.ranking(many, within=0.01) == [[1, 0], [3, 2]]
    assert metrics.ranking([one._replace(samples=None) for one in scores]) == [[0], [1], [2], [3]]
    assert metrics.ranking([]) == []


def test_a_tie_is_with_the_best_and_not_with_whoever_is_tied_with_it() -> None:
    """94 is within chance of 97, and 91 of 94; 91 is below 97."""
    assert metrics.ranking([score(0.91), score(0.94, seconds=2.0), score(0.97)]) == [[2, 1], [0]]


def test_times_of_zero_are_refused() -> None:
    calls: list[Callable[[], float]] = [
        lambda: metrics.throughput(1, 0),
        lambda: metrics.efficiency(0, 1),
        lambda: metrics.interval(0.5, 0)[0],
        lambda: metrics.speedup(2, 1, 0),
        lambda: metrics.bus_bandwidth("all-reduce", 0, 1, 1),
        lambda: metrics.bus_bandwidth("all-redcue", 2, 1, 1),
    ]
    for call in calls:
        with pytest.raises(RequestError):
            call()


def test_traffic_is_told_with_what_was_computed_beside_it() -> None:
    assert metrics.format_traffic(21_450_000, 1000) == "sent 21.45 MB and received 1 kB of gradients and weights"
    told = "sent 1 kB and received 2 kB of gradients and weights; ratio of computing to communication and waiting: 3"
    assert metrics.format_traffic(1000, 2000, 0.25) == told
