"""The learner's side of the conversation: exact answers for small ones. Random worlds drive it in `test_world`."""

from __future__ import annotations

from itertools import count

from offbeat.server.learner.connection import ConnectionState
from offbeat.server.wire import RUN_ENDED, Fenced, Go, Granted, Hello, Push, Refused, Stop, Want, Weights, Welcome


def joined() -> ConnectionState:
    state = ConnectionState(0, "t", iter(count(10)))
    assert state.join() == [Hello(0, 10, "t", 0)]
    state.receive(Welcome(0, 10, 1))
    return state


def test_a_push_answers_the_go_and_is_said_again_until_the_next_one_begins() -> None:
    state = joined()
    state.receive(Go(0, 1, 1, 5, 2))
    assert state.begun_or_seed() == Go(0, 1, 1, 5, 2) and state.slot == 2
    push = Push(0, 1, 1, 5, 8, leases=(3, 4))
    assert state.push(samples=8, leases=(3, 4)) == [push]
    assert push in state.retry()
    state.receive(Go(0, 1, 2, 6, 2))
    state.begin()
    assert push not in state.retry()


def test_a_newer_go_cancels_the_minibatch_that_is_open() -> None:
    state = joined()
    state.receive(Go(0, 1, 1, 5, 2))
    state.begin()
    state.receive(Go(0, 1, 2, 6, 2))
    assert state.cancelled
    assert state.stop((3,)) == [Stop(0, 1, 1, (3,), version=5)], "nothing of it was computed: it has no times"
    assert state.begin().seq == 2 and not state.cancelled


def test_one_that_is_fenced_while_it_works_joins_again_when_it_has_stopped() -> None:
    state = joined()
    state.receive(Go(0, 1, 1, 5, 2))
    state.begin()
    assert state.receive(Fenced(0, 1)) == [] and state.fenced and state.cancelled
    assert state.stop() == [Hello(0, 11, "t", 1)]
    assert state.incarnation == 0 and not state.fenced


def test_one_that_comes_after_the_end_is_over_and_not_refused() -> None:
    state = ConnectionState(0, "t", iter(count(10)))
    state.join()
    state.receive(Refused(0, 10, RUN_ENDED))
    assert state.over and state.refused is None
    other = ConnectionState(0, "t", iter(count(10)))
    other.join()
    other.receive(Refused(0, 10, "its model differs"))
    assert other.refused == "its model differs" and not other.over


def test_without_an_incarnation_nothing_is_requested() -> None:
    state = ConnectionState(0, "t", iter(count(10)))
    state.join()
    assert state.request_weights() == [] and state.answer_or_again(Weights) == "again"
    assert state.request_samples(epoch=0, count=4, of=8, wait=True) == [] and state.answer_or_again(Granted) == "again"


def test_an_answer_to_an_older_request_is_not_taken() -> None:
    state = joined()
    state.request_samples(epoch=0, count=4, of=8, wait=False)
    assert state.request_samples(epoch=0, count=4, of=8, wait=True) == [Want(0, 1, 2, 0, 4, 8, True, 0)]
    state.receive(Granted(0, 1, 1, "wait"))
    assert state.answer_or_again(Granted) is None
    state.receive(Granted(0, 1, 2, "ended"))
    assert state.answer_or_again(Granted) == Granted(0, 1, 2, "ended")
