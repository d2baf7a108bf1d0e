"""Bytes as the formula says, and the late rank by name."""

from __future__ import annotations

import pytest

from collectives.nursery import Nursery
from offbeat.collectives.counters import Arrivals


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", ["ring", "direct", "torus:2x{half}", "halving-doubling"])
@pytest.mark.parametrize("items", [1000, 300_000])
def test_bytes_are_twice_the_vector_but_for_one_share(nursery: Nursery, strategy: str, ranks: int, items: int) -> None:
    line = strategy.format(half=ranks // 2)
    values = nursery.values("counted", ranks=ranks, strategy=line, items=items, times=5)
    each = 5 * 2 * 4 * items * (ranks - 1) // ranks
    for rank, value in enumerate(values):
        assert sum(value["received"]) == sum(value["sent"]) == each
        assert value["received"][rank] == value["sent"][rank] == 0
        for peer, other in enumerate(values):
            assert value["sent"][peer] == other["received"][rank]
        assert value["moved"] == (items >= 4096)


def test_a_rank_late_in_backward_is_named(nursery: Nursery) -> None:
    for value in nursery.values("ddp_with_a_late_rank", ranks=3, late=1, by_s=0.2, iterations=10):
        assert value["rank"] == 1
        assert value["share"] >= 0.9
        assert 0.15 < value["by_s"] < 0.4
        assert value["words"].startswith("rank 1 was last in ")


def test_an_iteration_is_one_backward_and_its_worst_bucket() -> None:
    arrivals = Arrivals((4, 7))
    arrivals.came(-1, [0, 500_000_000])  # outside of backward: not an iteration, once there are some
    for iteration in range(4):
        arrivals.came(iteration, [0, 100_000_000])
        arrivals.came(iteration, [0, 300_000_000])
        arrivals.came(iteration, [0, 200_000_000])
    arrivals.came(4, [1_000_000, 0])
    late = arrivals.late()
    assert late is not None
    assert (late.rank, late.share, late.by_s, late.iterations) == (7, 0.8, 0.3, 5)
    assert str(late) == "rank 7 was last in 80 % of 5 iterations, by 300 ms"


def test_ranks_that_come_together_are_not_named() -> None:
    arrivals = Arrivals((0, 1))
    arrivals.came(-1, [1000, 2000])
    assert arrivals.late() is None
