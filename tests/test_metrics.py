"""The definitions, against published numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from offbeat import metrics
from offbeat.errors import RequestError


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


def test_time_to_accuracy_is_the_first_time_the_target_is_reached() -> None:
    points = [(1.0, 0.5), (2.0, 0.9), (3.0, 0.85), (4.0, 0.95)]
    assert metrics.time_to_accuracy(points, 0.9) == 2.0
    assert metrics.time_to_accuracy(points, 0.99) is None


def test_times_of_zero_are_refused() -> None:
    calls: list[Callable[[], float]] = [
        lambda: metrics.throughput(1, 0),
        lambda: metrics.efficiency(0, 1),
        lambda: metrics.speedup(2, 1, 0),
        lambda: metrics.bus_bandwidth("all-reduce", 0, 1, 1),
        lambda: metrics.bus_bandwidth("all-redcue", 2, 1, 1),
    ]
    for call in calls:
        with pytest.raises(RequestError):
            call()
