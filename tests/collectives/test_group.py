"""The process group against plain sums and copies, on 2 to 5 ranks."""

from __future__ import annotations

import pytest

from collectives.nursery import Nursery
from offbeat.schedules import algorithms
from offbeat.strategy import AUTO

RANKS = (2, 3, 4)
# Each algorithm in its first form, on 3 ranks, with all dtypes; else with a few of them.
LINES = [
    (line, ranks, at > 0 or ranks != 3)
    for ranks in RANKS
    for row in algorithms().values()
    for at, line in enumerate(row.lines(ranks))
]


@pytest.mark.parametrize(("strategy", "ranks", "few"), [*LINES, (AUTO, 1, False), (AUTO, 5, False)])
def test_every_schedule_equals_the_plain_sum(nursery: Nursery, strategy: str, ranks: int, few: bool) -> None:
    checked = nursery.values("all_reduces", ranks=ranks, strategy=strategy, few=few)
    assert checked == [checked[0]] * ranks and checked[0] > (100 if few else 300)


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("auto", 4), ("ring", 3), ("halving-doubling", 4), ("tree", 4), ("all-to-all", 4)]
)
def test_bits_are_the_same_on_all_ranks_wherever_tensors_lie(nursery: Nursery, strategy: str, ranks: int) -> None:
    bits = nursery.values("rounded_sums", ranks=ranks, strategy=strategy)
    assert len({text for texts in bits for text in texts}) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_tensors_may_have_any_shape_and_stride(nursery: Nursery, ranks: int) -> None:
    nursery.values("shapes", ranks=ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("arena_bytes", [64 * 1024, 8 * 1024 * 1024])
def test_the_other_collectives_move_and_reduce_what_they_should(nursery: Nursery, ranks: int, arena_bytes: int) -> None:
    nursery.values("others", ranks=ranks, arena_bytes=arena_bytes)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_messages_find_their_receivers(nursery: Nursery, ranks: int) -> None:
    sources = nursery.values("messages", ranks=ranks)
    assert sources[0] == sorted([*range(1, ranks)] * 2)


def test_a_message_of_another_size_is_refused(nursery: Nursery) -> None:
    first, second = nursery.run("wrong_size_of_a_message", ranks=2)
    assert not first.error
    assert second.error == "PeerError: rank 0 sent 12 bytes, but rank 1 expects 16"


@pytest.mark.parametrize("ranks", [2, 4])
def test_several_groups_have_calls_in_flight_at_once(nursery: Nursery, ranks: int) -> None:
    nursery.values("groups", ranks=ranks)


def test_futures_are_given_the_result(nursery: Nursery) -> None:
    assert nursery.values("futures", ranks=2) == [3.0, 3.0]


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}])
def test_ddp_trains_as_one_process_would_with_its_buckets_moved(nursery: Nursery, options: dict[str, bool]) -> None:
    for value in nursery.values("ddp_in_place", ranks=2, options=options):
        assert value["moved"] >= 2


def test_only_what_nobody_else_can_see_is_moved(nursery: Nursery) -> None:
    assert nursery.values("not_moved", ranks=2) == [[True, False, False, False]] * 2


def test_buffers_that_are_gone_are_let_go_of(nursery: Nursery) -> None:
    for mapped in nursery.values("memory_returns", ranks=2, times=12):
        assert max(mapped) <= 2 + 2 * 2, mapped  # two arenas, and at most the last buffer and the one before, of both


def test_the_strategy_can_be_changed_in_code_and_says_why(nursery: Nursery) -> None:
    for said in nursery.values("changes_strategy", ranks=4, strategies=["ring", "torus:2x2", "auto"]):
        assert said[0] == "ring: chosen by the user"
        assert said[1] == "torus:2x2: chosen by the user"
        assert " for 4.004 kB: " in said[2] and "measured" in said[2]
