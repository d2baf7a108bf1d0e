"""A rank that dies is named by all others within a second, one that stops at the timeout; nothing is left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from collectives.nursery import Nursery

TIMEOUT_S = 1.5
# The n-th mark: 1 the start of the first call; later ones in its steps, between calls, in calls that are in place.
POINTS = [("ring", 1), ("ring", 2), ("ring", 4), ("ring", 8), ("direct", 9), ("tree", 6)]
ELSEWHERE = ["before a message", "in a message", "in backward", "between calls"]


def left_behind() -> set[str]:
    return {str(path) for folder in ("/dev/shm", "/tmp") for path in Path(folder).glob("*") if _ours(path)}


def _ours(path: Path) -> bool:
    return path.name.startswith(("torch_", "offbeat", "memfd"))


@pytest.fixture(autouse=True)
def _nothing_stays_behind() -> object:
    before = left_behind()
    yield
    assert left_behind() <= before


@pytest.mark.parametrize(("strategy", "point"), POINTS)
def test_a_rank_killed_in_a_collective_is_named_within_a_second(nursery: Nursery, strategy: str, point: int) -> None:
    outcomes = nursery.run(
        "fault_in_a_collective", ranks=3, victim=1, point=point, how=signal.SIGKILL, strategy=strategy, timeout_s=20
    )
    assert outcomes[1].signal == signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.value is not None, outcome.trace
        assert outcome.value["ranks"] == [1]
        assert "rank 1 died" in outcome.value["said"]
        assert outcome.value["after_s"] < 1
        assert "this group failed before: rank 1 died" in outcome.value["again"]


@pytest.mark.parametrize(("strategy", "point"), POINTS)
def test_a_rank_stopped_in_a_collective_is_named_at_the_timeout(nursery: Nursery, strategy: str, point: int) -> None:
    outcomes = nursery.run(
        "fault_in_a_collective", ranks=3, victim=1, point=point, how=signal.SIGSTOP, strategy=strategy,
        timeout_s=TIMEOUT_S,
    )  # fmt: skip
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.value is not None, outcome.trace
        assert outcome.value["ranks"] == [1], outcome.value
        assert "rank 1 made no progress" in outcome.value["said"]
        assert "is stopped" in outcome.value["said"]
        assert TIMEOUT_S - 0.3 <= outcome.value["after_s"] < TIMEOUT_S + 1


@pytest.mark.parametrize("case", ELSEWHERE)
def test_a_rank_killed_elsewhere_is_named_within_a_second(nursery: Nursery, case: str) -> None:
    outcomes = nursery.run("fault_elsewhere", ranks=3, victim=1, case=case, how=signal.SIGKILL, timeout_s=20)
    assert outcomes[1].signal == signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.value is not None, outcome.trace
        assert "rank 1 " in outcome.value["said"]
        assert outcome.value["after_s"] < 1.5  # a test's own sleep included


@pytest.mark.parametrize("case", ELSEWHERE)
def test_a_rank_stopped_elsewhere_is_named_at_the_timeout(nursery: Nursery, case: str) -> None:
    outcomes = nursery.run("fault_elsewhere", ranks=3, victim=1, case=case, how=signal.SIGSTOP, timeout_s=TIMEOUT_S)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.value is not None, outcome.trace
        assert "rank 1 " in outcome.value["said"]
        assert outcome.value["after_s"] < 2 * TIMEOUT_S + 1


def test_groups_made_and_destroyed_leave_nothing_in_a_living_process(nursery: Nursery) -> None:
    cycles = int(os.environ.get("OFFBEAT_CYCLES", "30"))  # 500 were run, see docs/log.md
    for found in nursery.values("init_and_destroy", ranks=2, cycles=cycles, within_s=60 + cycles / 2):
        print(found)
        for what, slack in (("descriptors", 0), ("threads", 0), ("maps", 4)):  # the allocator's own maps come and go
            assert found[what][-1] <= found[what][2] + slack, found
        assert found["resident_kb"][-1] < found["resident_kb"][2] + 8_000, found


def test_a_forked_child_does_not_pass_for_its_parent(nursery: Nursery) -> None:
    first, second = nursery.run("forks_a_child", ranks=2)
    assert second.signal == signal.SIGKILL
    assert "cannot be used in a forked child" in first.value, first.trace


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("sizes", "all_reduce(sum) of 4 float32"),
        ("types", "all_reduce(sum) of 4 float64"),
        ("kinds", "broadcast of 4 float32"),
        ("roots", "with a different root"),
        ("schedules", "with a different schedule"),
    ],
)
def test_ranks_that_call_different_things_are_told_on_all_ranks(nursery: Nursery, case: str, words: str) -> None:
    outcomes = nursery.run("different_calls", ranks=3, case=case)
    for outcome in outcomes:
        assert outcome.error.startswith("PeerError: rank ") and "\n" not in outcome.error
        assert words in outcome.error


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("rign", "unknown strategy 'rign'; did you mean 'ring'?"),
        ("torus:3x5", "a shape of 3x5 has 15 ranks, not 2"),
        ("k-async:4", "'k-async:4' is a parameter server strategy"),
    ],
)
def test_a_wrong_strategy_fails_on_all_ranks_with_one_line(nursery: Nursery, strategy: str, words: str) -> None:
    for outcome in nursery.run("joins", ranks=2, strategies=[strategy] * 2):
        assert outcome.error.startswith("RequestError: ") and "\n" not in outcome.error
        assert words in outcome.error


def test_ranks_that_want_different_strategies_are_told_on_all_ranks(nursery: Nursery) -> None:
    for outcome in nursery.run("joins", ranks=3, strategies=["ring", "ring", "tree"]):
        assert outcome.error.startswith("PeerError: all ranks must use the same strategy: rank ")
    wrong = nursery.run("joins", ranks=3, strategies=["ring", "ring", "torus:9x9"])
    assert wrong[2].error.startswith("RequestError: 'torus:9x9'")
    for outcome in wrong[:2]:
        assert outcome.error.startswith("PeerError: rank 2 cannot start: 'torus:9x9'")


def test_memory_that_is_not_to_be_had_is_an_error_at_the_start(nursery: Nursery) -> None:
    huge = 2**50
    outcomes = nursery.run("joins", ranks=2, strategies=["auto"] * 2, arenas=[huge, huge])
    for outcome in outcomes:
        assert "of shared memory, but" in outcome.error and "\n" not in outcome.error


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_full_dev_shm_means_staging_not_failing(nursery: Nursery) -> None:
    for value in nursery.values("in_a_small_dev_shm", ranks=2, size="64k"):
        assert value["moved"] == 0 and value["left"] == []
        assert value["notes"][0].startswith("tensors of 800 kB are copied through a staging buffer: /dev/shm has only ")


def test_waiting_for_a_late_rank_costs_next_to_nothing(nursery: Nursery) -> None:
    for used_s in nursery.values("waits_long", ranks=4, seconds=2.0):
        assert used_s < 0.3
