"""An epoch's last gradients where all pause between epochs: who holds them, and who is waited for."""

from __future__ import annotations

from offbeat.server.wire import EnterPause, Granted, Paused, ShardJob, Want
from server.test_coordinator import push
from server.test_pauses import Story


def _want(learner: int, number: int = 1) -> Want:
    return Want(learner, 1, number, 0, 2, 4, True)


def _first_has_all(line: str, *, pause_epochs: bool) -> Story:
    """Learner 0 has pushed all samples of the epoch in one gradient, and learner 1 asks for more."""
    story = Story(line, learners=3, pause_epochs=pause_epochs)
    assert story.take(0, 1, count=4)[0].lease == (0, 0, 0, 4)
    story.say(push(0, 1, 0, 0, samples=4))
    return story


def test_the_last_update_is_made_before_the_pause_though_one_has_yet_to_ask() -> None:
    story = _first_has_all("k-async:2", pause_epochs=True)
    assert story.take(1, 1) == []
    assert not story.coordinator.pauses.due, "learner 2 may still ask: then the policy knows that nobody comes"
    said = story.say(_want(2))
    assert [one.kind for one in said if isinstance(one, ShardJob)] == ["apply"]
    assert story.done(1)[-3:] == [EnterPause(0, 1, 1), EnterPause(1, 1, 1), EnterPause(2, 1, 1)]
    for learner in (2, 1, 0):
        story.say(Paused(learner, 1, 1))
    assert (story.facts()["samples"], story.facts()["held"]) == ({"applied": 4}, 0)


def test_what_no_update_takes_is_told_as_held() -> None:
    story = _first_has_all("k-batch-async:2", pause_epochs=True)
    assert story.take(1, 1) == []
    assert story.say(_want(2)) == []
    said = story.say(_want(0, number=2))
    assert [one for one in said if isinstance(one, EnterPause)] == [
        EnterPause(0, 1, 1),
        EnterPause(1, 1, 1),
        EnterPause(2, 1, 1),
    ]
    for learner in (2, 1, 0):
        story.say(Paused(learner, 1, 1))
    assert (story.facts()["samples"], story.facts()["held"]) == ({}, 4)


def test_nobody_is_waited_for_where_learners_do_as_they_like_between_epochs() -> None:
    story = _first_has_all("k-async:2", pause_epochs=False)
    said = story.say(_want(1))
    assert [one.answer for one in said if isinstance(one, Granted)] == ["ended"]
