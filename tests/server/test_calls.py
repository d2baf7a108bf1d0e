"""Calls of learners to each other: who is answered, with what, and when somebody leaves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from offbeat.errors import RequestError
from offbeat.server.coordinator.group_calls import KEPT_CALLS, GroupCalls
from offbeat.server.coordinator.session import LearnerSession
from offbeat.server.learner.interface import decode, encode
from offbeat.server.learner.served_learner import ServedLearner
from offbeat.server.wire import Bye, EndPause, EnterPause, Go, GroupCall, GroupCallAnswer, Paused, PauseRequest
from server.test_coordinator import started


def session(learner: int, number: int | None, what: str = "gather", data: bytes = b"") -> LearnerSession:
    found = LearnerSession(learner)
    found.here, found.incarnation = True, 1
    found.call = None if number is None else GroupCall(learner, 1, number, what, data or bytes([learner]))
    return found


def test_a_call_is_answered_when_all_who_are_here_have_made_it() -> None:
    calls = GroupCalls()
    assert calls.next([]) == [] and calls.next([session(0, 1), session(1, None)]) == []
    both = [session(0, 1), session(1, 1)]
    assert calls.next(both) == both
    answer = calls.answer(both[1], 1)
    assert answer.data == ((0, b"\0"), (1, b"\1")) and not answer.error


def test_one_that_is_behind_is_answered_first() -> None:
    calls = GroupCalls()
    ahead, behind = session(0, 2), session(1, 1)
    assert calls.next([ahead, behind]) == [behind]
    assert calls.answer(behind, 1) == GroupCallAnswer(1, 1, 1, ((1, b"\1"),))
    assert calls.last == 1, "the second is not over"


def test_one_that_begins_anew_is_told_what_was_answered() -> None:
    calls = GroupCalls()
    for number in range(1, KEPT_CALLS + 3):
        calls.next([session(0, number, data=str(number).encode())])
    again = session(1, None)
    answer = calls.answer(again, 7)
    assert answer.data == ((0, b"7"),)
    forgotten = calls.answer(again, 2)
    assert "only the last 256 of 258 are kept" in forgotten.error


def test_different_calls_are_an_error_on_all() -> None:
    calls = GroupCalls()
    sessions = [session(0, 1, "gather"), session(1, 1, "barrier")]
    assert calls.next(sessions) == sessions
    answers = [calls.answer(one, 1) for one in sessions]
    assert all(one.error.startswith("call 1 is gather on learner 0 and barrier") for one in answers)


def test_a_call_that_somebody_gave_up_is_an_error_on_the_others_and_the_next_one_is_of_all() -> None:
    calls = GroupCalls()
    late, waits = session(0, None), session(1, 1)
    assert calls.withdraw(0, 1, [late, waits]) == [waits]
    answer = calls.answer(waits, 1)
    assert answer.data == () and answer.error.startswith("learner 0 gave up waiting in call 1")
    assert calls.withdraw(1, 1, [late, waits]) == [], "it is over"
    both = [session(0, 2), session(1, 2)]
    assert calls.next(both) == both
    second = calls.answer(both[0], 2)
    assert len(second.data) == 2 and not second.error


def test_too_many_bytes_together_are_refused() -> None:
    calls = GroupCalls()
    sessions = [session(learner, 1, data=bytes(40_000)) for learner in range(2)]
    calls.next(sessions)
    answer = calls.answer(sessions[0], 1)
    assert "exceeds the limit of 65536 bytes" in answer.error and answer.data == ()


# --- in a run ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", ["full-sync", "k-sync:2", "async", "k-batch-async:3", "downpour"])
def test_who_waits_in_a_call_is_not_waited_for_and_goes_on_after_it(line: str) -> None:
    run = started(line, 3)
    assert [run.say(GroupCall(learner, 1, 1, "barrier")) for learner in (0, 1)] == [[], []]
    assert not run.coordinator.policy.learners.keys() & {0, 1}
    said = run.say(GroupCall(2, 1, 1, "barrier"))
    assert {one.learner for one in said if isinstance(one, GroupCallAnswer)} == {0, 1, 2}
    assert {one.learner for one in said if isinstance(one, Go)} == {0, 1, 2}, "all are told to go on"
    assert set(run.coordinator.policy.learners) == {0, 1, 2}
    repeated = run.say(GroupCall(2, 1, 1, "barrier"))
    assert [one for one in repeated if isinstance(one, GroupCallAnswer)] == [one for one in said if one in repeated], (
        "said again"
    )


def test_who_leaves_is_dropped_from_a_call() -> None:
    run = started("full-sync", 3)
    run.say(GroupCall(0, 1, 1, "gather", b"a"))
    run.say(GroupCall(1, 1, 1, "gather", b"b"))
    run.say(Bye(1, 1))
    said = run.say(Bye(2, 1))
    assert [one.data for one in said if isinstance(one, GroupCallAnswer)] == [((0, b"a"),)]


def test_who_gives_up_waiting_is_told_to_compute() -> None:
    run = started("full-sync", 2)
    run.say(GroupCall(0, 1, 1, "gather"))
    said = run.say(GroupCall(0, 1, 1, ""))
    assert [one.learner for one in said if isinstance(one, Go)] == [0]
    told = run.say(GroupCall(1, 1, 1, "gather"))
    assert [one.error for one in told if isinstance(one, GroupCallAnswer)] == [
        "learner 0 gave up waiting in call 1, so no learner gets the result of this call"
    ]
    assert run.say(GroupCall(0, 1, 2, "gather", b"a")) == []
    said = run.say(GroupCall(1, 1, 2, "gather", b"b"))
    assert [one.data for one in said if isinstance(one, GroupCallAnswer)] == [((0, b"a"), (1, b"b"))] * 2, (
        "the next is of both"
    )


def test_a_pause_is_led_by_who_asks_for_it_and_only_once() -> None:
    run = started("async", 3)
    called = run.say(PauseRequest(2, 1))
    assert {one.learner for one in called if isinstance(one, EnterPause) and not one.lead} == {0, 1, 2}
    said = [message for learner in range(3) for message in run.say(Paused(learner, 1, 1))]
    assert [one.learner for one in said if isinstance(one, EnterPause) and one.lead] == [2]
    ended = run.say(Paused(2, 1, 1, led=True))
    assert {one.learner for one in ended if isinstance(one, EndPause)} == {0, 1, 2}
    assert not run.coordinator.pauses.due


def test_a_pause_whose_asker_is_gone_ends() -> None:
    run = started("async", 2)
    run.say(PauseRequest(1, 1))
    run.say(Bye(1, 1))
    said = run.say(Paused(0, 1, 1))
    assert [one.lead for one in said if isinstance(one, EnterPause)] == [True]
    assert [type(one) for one in run.say(Paused(0, 1, 1, led=True)) if isinstance(one, EndPause)] == [EndPause]
    assert not run.coordinator.pauses.due


# --- values -----------------------------------------------------------------------------------------------------------


class Alone(ServedLearner):
    """Three learners of which the others give what was written down."""

    def __init__(self, *others: object) -> None:
        self._number, self.others = 1, others

    def _exchange(self, what: str, data: bytes, timeout_s: float) -> dict[int, bytes]:
        return {0: encode(self.others[0]), 1: data, 2: encode(self.others[1])}


def test_reductions() -> None:
    assert Alone(1, 6).all_reduce(2) == 3.0 and Alone(1, 6).all_reduce(2, "sum") == 9
    assert Alone(1.5, 6).all_reduce(2.0, "min") == 1.5 and Alone(1, 6).all_reduce(2, "max") == 6
    given = torch.tensor([1.0, 5.0])
    assert Alone(given + 2, given * 0).all_reduce(given, "sum").tolist() == [4.0, 12.0]
    assert Alone(given + 3, given * 0).all_reduce(given, "max").tolist() == [4.0, 8.0]
    for op in ("mean", "sum", "min", "max"):
        assert math.isnan(Alone(1.0, math.nan).all_reduce(2.0, op)) and math.isnan(Alone(math.nan, 1).all_reduce(2, op))
    assert Alone(1.5, 6).all_reduce(np.float64(2), "sum") == 9.5
    assert Alone(1, 6).all_reduce(np.int32(2), "max") == 6  # type: ignore[type-var]
    assert Alone(1, 6).all_reduce(np.float32(7), "max") == 7.0  # type: ignore[type-var]
    with pytest.raises(RequestError, match="unknown reduction 'men'; did you mean 'mean'"):
        Alone(1, 2).all_reduce(3, "men")
    with pytest.raises(RequestError, match="takes a number or a tensor; got str"):
        Alone(1, 2).all_reduce("3")  # type: ignore[type-var]


def test_gather_and_broadcast() -> None:
    assert Alone({"a": [1]}, None).gather("b") == [{"a": [1]}, "b", None]
    assert Alone("x", "y").broadcast("mine", source=2) == "y"
    with pytest.raises(RequestError, match="learner 5 is not in the run"):
        Alone("x", "y").broadcast("mine", source=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_tensors_travel_as_they_are(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    given = (torch.rand(shape) * 5).to(dtype)
    found = decode(encode(given))
    assert found.dtype == dtype and torch.equal(found, given)


def test_what_is_neither_plain_nor_a_tensor_is_refused() -> None:
    with pytest.raises(RequestError, match="learners can exchange only plain values and tensors"):
        encode(object())
