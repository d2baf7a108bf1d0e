"""Odd uses that were once a wrong result, a hang or a crash."""

from __future__ import annotations

import os
import signal

import pytest

from collectives.nursery import Nursery

LONG = pytest.mark.skipif(not os.environ.get("OFFBEAT_MATRIX"), reason="takes long: make test-matrix")


def test_a_storage_is_not_moved_while_a_call_on_it_is_under_way(nursery: Nursery) -> None:
    assert nursery.values("halves_in_backward", ranks=2) == [0, 0]


def test_a_second_call_in_flight_starts_from_what_the_first_gave(nursery: Nursery) -> None:
    assert nursery.values("twice_in_flight", ranks=2) == [[24.0, 24.0]] * 2


def test_a_call_that_was_broken_off_ends_the_group_on_all_ranks(nursery: Nursery) -> None:
    first, second = nursery.values("interrupted", ranks=2)
    assert first.startswith("this group failed before: a collective was aborted (KeyboardInterrupt in broadcast")
    # What rank 0 had published of that call was whole, or rank 1 is told; never the next call's values.
    assert second in ("got 100.0", "rank 0 was interrupted in a collective while rank 1 was waiting for it")


def test_a_callback_of_a_future_may_make_calls_and_wait_for_them(nursery: Nursery) -> None:
    assert nursery.values("waits_in_a_callback", ranks=2) == [4.0, 4.0]
    assert nursery.values("power_sgd_trains", ranks=2) == [True, True]


def test_a_moved_tensor_refuses_to_grow_where_torch_would_crash(nursery: Nursery) -> None:
    for said in nursery.values("resizes_a_moved_tensor", ranks=2):
        assert said == ["Trying to resize storage that is not resizable"] * 2


def test_a_forked_child_has_its_own_copy_of_a_moved_tensor(nursery: Nursery) -> None:
    assert nursery.values("forked_child_writes", ranks=2) == [[8.0, 8.0, 16.0]] * 2


def test_moved_tensors_take_one_descriptor_each_however_many_ranks(nursery: Nursery) -> None:
    for taken in nursery.values("descriptors_of_many_tensors", ranks=3):
        assert taken <= 60 + 2


def test_a_strategy_of_all_ranks_does_not_forbid_sub_groups(nursery: Nursery) -> None:
    assert nursery.values("sub_groups_of_a_torus", ranks=4) == [["torus:2x2", "auto", "torus:2x2"]] * 4


@pytest.mark.parametrize("items", [5, 40_000])
def test_inputs_and_outputs_may_share_memory(nursery: Nursery, items: int) -> None:
    nursery.values("aliases", ranks=3, items=items)


def test_a_factor_is_applied_by_reduce_too(nursery: Nursery) -> None:
    assert nursery.values("premultiplied", ranks=2) == [[6.0, 6.0], [6.0, 2.0]]


@pytest.mark.parametrize(("how", "most_s"), [("abort", 4.0), pytest.param("destroy", 7.0, marks=LONG)])
def test_whoever_waits_when_the_group_is_left_is_told(nursery: Nursery, how: str, most_s: float) -> None:
    value = nursery.values("leaves_with_a_call_pending", ranks=2, how=how)[0]
    assert "this group was destroyed" in value["said"]
    assert value["after_s"] < most_s


def test_one_store_serves_one_group_after_another(nursery: Nursery) -> None:
    assert nursery.values("one_store_twice", ranks=2) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("what", ["type", pytest.param("native", marks=LONG), "line"])
def test_what_is_wrong_on_one_rank_is_said_on_the_others_at_once(nursery: Nursery, what: str) -> None:
    outcomes = nursery.run("wrong_on_one_rank", ranks=3, what=what, within_s=30)
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error.startswith("PeerError: rank 1 cannot start: ")
        assert outcome.seconds < 7  # the time limit of the group is 8


def test_a_rank_that_dies_while_the_group_is_made_is_named_at_once(nursery: Nursery) -> None:
    outcomes = nursery.run("dies_at_the_door", ranks=3)
    assert outcomes[1].signal == signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.value is not None, outcome.trace
        assert outcome.value < 3


def test_the_time_of_a_receive_runs_from_when_it_is_waited_for(nursery: Nursery) -> None:
    assert nursery.values("receives_early", ranks=2) == [0.0, 3.0]


def test_what_cannot_be_done_is_refused_before_others_are_kept_waiting(nursery: Nursery) -> None:
    for said in nursery.values("refused", ranks=2):
        assert len(said) == 3
        assert said[0].startswith("cannot write to an expanded tensor")
        assert said[1].startswith("mean is not supported for torch.bool")


def test_calls_may_be_made_as_one(nursery: Nursery) -> None:
    assert nursery.values("coalesced", ranks=2) == [27.0, 27.0]


def test_threads_may_have_a_group_each(nursery: Nursery) -> None:
    assert nursery.values("threads_on_groups", ranks=2) == [0, 0]


def test_native_is_torchs_own_backend(nursery: Nursery) -> None:
    assert nursery.values("native_group", ranks=2) == [[6.0, 1.0]] * 2


def test_a_send_given_up_half_way_ends_the_group(nursery: Nursery) -> None:
    first, second = nursery.values("sends_that_time_out", ranks=2)
    assert "a message to rank 1 was sent incomplete" in first
    assert "rank 0" in second  # told, and given no mixture of two messages


def test_a_child_forked_after_the_group_was_left_has_its_own_copy_too(nursery: Nursery) -> None:
    assert nursery.values("forks_after_leaving", ranks=2) == [8.0, 8.0]


def test_inference_mode_is_no_obstacle(nursery: Nursery) -> None:
    values = nursery.values("in_inference_mode", ranks=2)
    assert [value[0] for value in values] == [1.0, 0.0]
    assert [value[1:] for value in values] == [[1.0, 1.0, 1.0, 1.0]] * 2


def test_hundreds_of_moved_tensors_may_be_freed_at_once(nursery: Nursery) -> None:
    assert nursery.values("many_moved_tensors_freed", ranks=2) == [2.0, 2.0]


def test_tensors_are_staged_before_descriptors_run_out(nursery: Nursery) -> None:
    for moved_few, note in nursery.values("few_descriptors", ranks=2):
        assert moved_few and note.endswith("the process has used half of its file descriptors")


def test_a_send_that_waits_behind_another_has_its_timeout(nursery: Nursery) -> None:
    assert nursery.values("a_send_behind_another", ranks=2)[0].startswith("rank 1 made no progress within")


def test_a_move_that_failed_is_not_tried_again(nursery: Nursery) -> None:
    assert nursery.values("a_move_that_fails", ranks=2) == [1, 1]
