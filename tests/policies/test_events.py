"""Events and commands as values and as lines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import RequestError
from offbeat.policies import Apply, Asked, Cancel, Drop, Joined, Left, Pushed, Resume, Send, Stopped, Wake, Woke
from offbeat.policies.events import Command, Event, as_text, from_text

whole = st.integers(0, 10**9)
number = st.floats(0, 1e9)
maybe = st.none() | number
gradients = st.lists(st.tuples(whole, number), min_size=1, max_size=5)
things = st.one_of(
    st.builds(Joined, whole, number),
    st.builds(Left, whole, number),
    st.builds(Pushed, whole, whole, whole, whole, maybe, maybe, number),
    st.builds(Stopped, whole, whole, number),
    st.builds(Asked, whole, number),
    st.builds(Woke, number),
    st.builds(Wake, number),
    st.builds(lambda some: Apply(tuple(t for t, _ in some), tuple(s for _, s in some)), gradients),
    st.builds(Drop, whole),
    st.builds(Cancel, whole),
    st.builds(Send, whole),
    st.builds(Resume, whole),
)


@given(things)
def test_what_is_written_is_read_back(thing: Event | Command) -> None:
    assert from_text(as_text(thing)) == thing


def test_lines_read_as_they_are_meant() -> None:
    assert as_text(Pushed(2, 7, 40, 32, loss=0.5, at_s=12.84)) == "pushed 2 t7 v40 n32 loss=0.5 @12.84"
    assert from_text("pushed 2 t7 v40") == Pushed(2, 7, 40)
    assert from_text("woke @3") == Woke(3.0)
    assert from_text("tick @3") == Woke(3.0)  # as version 0.1 wrote it
    assert from_text("wake @3.5") == Wake(3.5)
    assert as_text(Apply((7, 9), (1.0, 1.0))) == "apply t7 t9"
    assert as_text(Apply((7, 9), (1.0, 0.5))) == "apply t7 t9 *1.0 *0.5"


NOT_LINES = [
    "",
    "pusht 2",
    "pushed",
    "pushed 2 v3 t4",
    "pushed x",
    "apply t1 *1 *2",
    "send",
    "send -1",
    "send 1 2",
    "tick 3",
]


@pytest.mark.parametrize("text", NOT_LINES)
def test_other_lines_are_refused(text: str) -> None:
    with pytest.raises(RequestError):
        from_text(text)


def test_equality_ignores_the_reason_and_keeps_kinds_apart() -> None:
    assert Send(1, "because") == Send(1, "for another reason") and hash(Send(1, "a")) == hash(Send(1, "b"))
    assert Apply((1,), (1.0,), "x") == Apply((1,), (1.0,)) != Apply((1,), (0.5,))
    kinds: list[object] = [Send(1), Resume(1), Cancel(1), Drop(1), Joined(1), Left(1), Asked(1), (1, "")]
    assert all((one == other) == (one is other) for one in kinds for other in kinds)
    assert len({Send(1, "a"), Send(1, "b"), Resume(1)}) == 2
