"""Transfers and schedules as values."""

from __future__ import annotations

from copy import copy, deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import RequestError
from offbeat.schedules import Schedule, Transfer, build

lines = st.sampled_from(("", "bf16", "int8:stochastic"))
transfers = st.builds(Transfer, st.integers(0, 4), st.integers(0, 4), st.integers(0, 6), st.booleans(), lines)


def test_a_transfer_reads_as_a_line() -> None:
    assert str(Transfer(0, 1, 3, True)) == "0>1 c3 +"
    assert str(Transfer(0, 1, 3, False)) == "0>1 c3 ="


@given(transfers)
def test_a_transfer_is_parsed_back(transfer: Transfer) -> None:
    assert Transfer.parse(str(transfer)) == transfer


@given(st.lists(st.lists(transfers, max_size=5), max_size=5), st.integers(0, 4))
def test_a_schedule_is_parsed_back(steps: list[list[Transfer]], root: int) -> None:
    schedule = Schedule("any:1,k=v", "broadcast", 5, 7, steps, root)
    assert Schedule.parse(schedule.text()) == schedule
    assert [list(step) for step in schedule.steps] == steps


def test_steps_are_a_sequence_of_tuples_of_transfers() -> None:
    steps = build("ring", ranks=3).steps
    assert len(steps) == 4
    assert steps[0] == (Transfer(0, 1, 2, True), Transfer(1, 2, 0, True), Transfer(2, 0, 1, True))
    assert steps[-1] == steps[3] and list(steps[1:3]) == [steps[1], steps[2]]
    assert type(steps[0][0].reduce) is bool
    with pytest.raises(IndexError):
        steps[4]


def test_schedules_are_equal_by_value_and_cannot_be_changed() -> None:
    one, same, other = build("ring", ranks=4), build("ring", ranks=4), build("ring", ranks=5)
    assert one == same and hash(one) == hash(same) and one != other
    with pytest.raises(AttributeError, match="cannot assign to field 'ranks'"):
        one.ranks = 3  # type: ignore[misc]  # on purpose
    with pytest.raises(ValueError, match="read-only"):
        one.steps.table[0, 0] = 1


@pytest.mark.parametrize(
    ("transfer", "says"),
    [
        (Transfer(3, 0, 0, True), "step 2 has '3>0 c0 +', but ranks are 0..2"),
        (Transfer(0, -1, 0, True), "ranks are 0..2"),
        (Transfer(0, 1, 2, True), "chunks are 0..1"),
    ],
)
def test_ranks_and_chunks_that_do_not_exist_are_refused_at_birth(transfer: Transfer, says: str) -> None:
    with pytest.raises(RequestError, match=says.replace("+", r"\+")):
        Schedule("x", "all-reduce", 3, 2, [[Transfer(0, 1, 0, True)], [transfer]])


def test_a_schedule_can_be_copied() -> None:
    schedule = build("ring", ranks=3)
    assert copy(schedule) == deepcopy(schedule) == schedule


def test_names_are_one_word_and_numbers_are_whole() -> None:
    for name, collective in (("by hand", "reduce"), ("", "reduce"), ("x", "all reduce")):
        with pytest.raises(RequestError, match="one word each"):
            Schedule(name, collective, 2, 1, [])
    with pytest.raises(TypeError):
        Schedule("x", "reduce", 2.0, 1, [])  # type: ignore[arg-type]  # on purpose
    with pytest.raises(RequestError, match="numbers up to"):
        Schedule.parse("schedule x reduce ranks=2 chunks=1\n99999999999>1 c0 +")


@pytest.mark.parametrize("text", ["", "ring", "schedule a b ranks=x chunks=1", "schedule a b ranks=2 chunks=1\n0>1"])
def test_a_broken_text_is_refused(text: str) -> None:
    with pytest.raises(RequestError):
        Schedule.parse(text)
