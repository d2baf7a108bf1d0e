"""What a learner on another host may write, and which weights it is sent: exact answers to short conversations."""

from __future__ import annotations

from offbeat.server.arena import stamp
from offbeat.server.remote.frames import Header, Kind, Region
from offbeat.server.remote.road_state import ASK_BUFFER, GO_BUFFER, PinnedSend, RoadState, Target
from offbeat.server.wire import Bye, EndPause, EnterPause, Fenced, Go, Hello, Push, Seeded, Stop, Weights, Welcome

L, I = 3, 5  # noqa: E741 - learner and incarnation
PIECES = ((1, 40),)


def gradient(seq: int, incarnation: int = I) -> Header:
    return Header(Kind.WRITE, Region.GRADIENT, number=stamp(incarnation, seq), size=8)


def go(seq: int, slot: int = 2, pin: int = 1, incarnation: int = I, pieces: tuple[tuple[int, int], ...] = PIECES) -> Go:
    return Go(L, incarnation, seq, 40, slot, pin, pieces)


def joined() -> RoadState:
    state = RoadState()
    state.heard(Hello(L, 77, "digest"))
    assert state.told(Welcome(L, 77, I)) is None
    return state


def test_a_gradient_goes_into_the_slot_of_its_minibatch_and_no_other() -> None:
    state = joined()
    assert state.target(gradient(1)) is None  # nothing was granted yet
    state.told(go(1, slot=2))
    assert state.target(gradient(1)) == Target(Region.GRADIENT, 2)
    assert state.target(gradient(2)) is None
    assert state.target(gradient(1, incarnation=I - 1)) is None


def test_after_the_answer_nothing_is_written_any_more() -> None:
    for answer in (Push(L, I, 1, 40), Stop(L, I, 1)):
        state = joined()
        state.told(go(1))
        state.heard(answer)
        assert state.target(gradient(1)) is None


def test_an_old_answer_does_not_end_a_newer_minibatch() -> None:
    state = joined()
    state.told(go(1, slot=2))
    state.told(go(2, slot=2, pin=2))
    state.heard(Push(L, I, 1, 40))  # it crossed the cancel
    assert state.target(gradient(2)) == Target(Region.GRADIENT, 2)
    assert state.target(gradient(1)) is None


def test_who_was_given_up_leaves_or_joins_again_writes_no_more() -> None:
    for end in (Fenced(L, I), Bye(L, I), Hello(L, 78, "digest", I), Welcome(L, 78, I + 1)):
        state = joined()
        state.told(go(1))
        if isinstance(end, Bye | Hello):
            assert state.frees_slots(end)
            state.heard(end)
        else:
            state.told(end)
        assert state.target(gradient(1)) is None


def test_a_hello_that_is_said_again_changes_nothing() -> None:
    state = joined()
    state.told(go(1))
    again = Hello(L, 77, "digest")
    assert not state.frees_slots(again)
    state.heard(again)
    assert state.target(gradient(1)) == Target(Region.GRADIENT, 2)


def test_the_weights_of_a_pin_are_sent_once_and_the_rest_with_the_first() -> None:
    state = joined()
    assert state.told(go(1, pin=4)) == PinnedSend(4, PIECES, GO_BUFFER, stamp(I, 1), I, True)
    assert state.told(go(1, pin=4)) is None  # said again
    assert state.told(Weights(L, I, 1, 41, 5, PIECES)) == PinnedSend(5, PIECES, ASK_BUFFER, 0, I, False)
    assert state.told(go(1, pin=4)) is None
    assert state.told(go(2, pin=6, pieces=())) is None  # on the weights that it has
    assert state.told(go(3, pin=7)) == PinnedSend(7, PIECES, GO_BUFFER, stamp(I, 3), I, False)


def test_what_is_for_another_incarnation_passes_without_effect() -> None:
    state = joined()
    assert state.told(go(1, incarnation=I - 1)) is None
    assert state.target(gradient(1, incarnation=I - 1)) is None


def test_initial_weights_are_taken_only_from_who_is_asked_for_them() -> None:
    weights = Header(Kind.WRITE, Region.WEIGHTS, number=I, size=8)
    state = joined()
    assert state.target(weights) is None
    state.told(Welcome(L, 77, I, seed=True))
    assert state.target(weights) == Target(Region.WEIGHTS, 0)
    assert state.target(weights._replace(number=I - 1)) is None
    state.heard(Seeded(L, I))
    assert state.target(weights) is None


def test_it_is_known_to_which_pause_a_learner_was_called() -> None:
    state = joined()
    assert state.pause == 0
    for number in (4, 5, 4):
        state.told(EnterPause(L, I, number))
    assert state.pause == 5


def test_it_is_known_who_has_left_in_order() -> None:
    state = joined()
    state.told(EndPause(L, I, 1))
    assert not state.done
    state.told(EndPause(L, I, 2, over=True))
    assert state.done
    other = joined()
    other.heard(Bye(L, I))
    assert other.done
