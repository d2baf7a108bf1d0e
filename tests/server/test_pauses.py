"""Pauses: exact answers for small conversations, what a learner hears, and real runs that pause and go on."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest

from collectives.nursery import Nursery
from offbeat.leases import Lease, LeaseBook
from offbeat.server.coordinator.coordinator import Coordinator
from offbeat.server.learner.connection import ConnectionState
from offbeat.server.run_setting import RunSetting
from offbeat.server.wire import (
    INPUT,
    Bye,
    Committed,
    Done,
    EndPause,
    EndRequest,
    EnterPause,
    Fenced,
    FenceWord,
    GiveBack,
    Go,
    Gone,
    Granted,
    Hello,
    Message,
    Paused,
    Ready,
    Refused,
    Seeded,
    Silent,
    Tick,
    Want,
    Welcome,
)
from server.programs import SAMPLES
from server.test_coordinator import Talk, apply_job, push


class Story(Talk):
    """A talk that remembers what was said to it, and what it said of pauses."""

    def __init__(self, line: str, learners: int = 2, shards: int = 1, **more: Any) -> None:
        self.journal: list[tuple[INPUT, float]] = []
        self.heard: list[Message] = []
        super().__init__(line, learners, shards, **more)
        for learner in range(learners):
            self.say(Hello(learner, 10 + learner, "t"))
        self.say(Seeded(0, 1))

    def say(self, message: INPUT) -> list[Message]:
        said = super().say(message)
        self.journal.append((message, self.at_s))
        self.heard += said
        return said

    def of_pauses(self, message: INPUT) -> list[Message]:
        """What is answered, without what an EnterPause tells to the one who leads."""
        kinds = EnterPause | EndPause
        return [_bare(one) for one in self.say(message) if isinstance(one, kinds)]

    def take(self, learner: int, number: int, epoch: int = 0, *, wait: bool = True, count: int = 2) -> list[Granted]:
        said = self.say(Want(learner, 1, number, epoch, count, 4, wait))
        return [one for one in said if isinstance(one, Granted)]

    def facts(self) -> dict[str, Any]:
        """What the last one who was to lead was told."""
        told = [one for one in self.heard if isinstance(one, EnterPause) and one.lead][-1]
        facts: dict[str, Any] = json.loads(told.facts)
        return facts


def _bare(message: Message) -> Message:
    return (
        EnterPause(message.learner, message.incarnation, message.number, message.lead)
        if isinstance(message, EnterPause)
        else message
    )


def update(story: Story, version: int, learners: int = 2) -> list[Message]:
    """All push a minibatch, and the update is done."""
    for learner in range(learners):
        story.say(push(learner, version, version - 1))
    return story.done(version)


def at_rest(**more: Any) -> Story:
    """Full-sync, in its first pause: both have paused, and learner 0 leads."""
    story = Story("full-sync", pause_every=1, **more)
    update(story, 1)
    assert story.of_pauses(Paused(1, 1, 1)) == []
    assert story.of_pauses(Paused(0, 1, 1)) == [EnterPause(0, 1, 1, lead=True)]
    return story


# --- when ------------------------------------------------------------------------------------------------------------


def test_a_pause_is_due_at_every_third_update_and_nobody_is_told_to_compute_before_it_ends() -> None:
    story = Story("full-sync", pause_every=3)
    assert [type(one) for one in update(story, 1)] == [Committed, Go, Go]
    assert [type(one) for one in update(story, 2)] == [Committed, Go, Go]
    assert update(story, 3) == [Committed(0, 3, 1), EnterPause(0, 1, 1), EnterPause(1, 1, 1)]
    assert story.say(Paused(0, 1, 1)) == []
    assert story.of_pauses(Paused(1, 1, 1)) == [EnterPause(0, 1, 1, lead=True)]
    assert story.facts()["version"] == 3
    said = story.say(Paused(0, 1, 1, led=True))
    assert said[:2] == [EndPause(0, 1, 1), EndPause(1, 1, 1)]
    assert [(one.learner, one.version) for one in said[2:] if isinstance(one, Go)] == [(0, 3), (1, 3)]
    for version in (4, 5):
        assert not any(isinstance(one, EnterPause) for one in update(story, version))
    assert update(story, 6)[1:] == [EnterPause(0, 1, 2), EnterPause(1, 1, 2)]


def test_a_pause_is_due_at_the_end_of_an_epoch_and_nobody_leaves_it_before() -> None:
    story = Story("async", pause_epochs=True)
    assert story.take(0, 1)[0].lease == (0, 0, 0, 2)
    assert story.take(1, 1)[0].lease == (1, 0, 2, 2)
    story.say(push(0, 1, 0, 0))
    story.say(push(1, 1, 0, 1))
    story.done(1)
    assert story.done(2)[-2:] == [EnterPause(0, 1, 1), EnterPause(1, 1, 1)]
    assert story.take(0, 2) == [], "neither that it has ended"
    assert story.take(1, 2, epoch=1) == [], "nor the next"
    assert story.take(1, 3, wait=False) == [Granted(1, 1, 3, "wait", void=2)]
    story.say(Paused(0, 1, 1))
    story.say(Paused(1, 1, 1))
    assert story.facts()["epoch_end"]
    assert story.facts()["book"]["epoch"] == 1
    said = story.say(Paused(0, 1, 1, led=True))
    assert [one.answer for one in said if isinstance(one, Granted)] == ["ended"]
    assert story.take(1, 4, epoch=1)[0].lease == (2, 1, 0, 2)


def test_a_halt_calls_all_to_a_last_pause() -> None:
    story = Story("async")
    assert story.of_pauses(EndRequest(1, 1)) == [EnterPause(0, 1, 1), EnterPause(1, 1, 1)]
    assert story.of_pauses(EndRequest(1, 1)) == []
    story.say(Paused(0, 1, 1))
    assert story.of_pauses(Paused(1, 1, 1)) == [EnterPause(0, 1, 1, lead=True)]
    assert story.facts()["halt"]
    assert story.say(Paused(0, 1, 1, led=True)) == [EndPause(0, 1, 1, over=True), EndPause(1, 1, 1, over=True)]


def test_who_leads_may_end_the_run() -> None:
    story = at_rest()
    assert story.say(Paused(0, 1, 1, led=True, stop=True)) == [
        EndPause(0, 1, 1, over=True),
        EndPause(1, 1, 1, over=True),
    ]


def test_one_who_only_pauses_does_not_end_anything() -> None:
    story = at_rest()
    assert story.say(Paused(1, 1, 1, led=True, stop=True)) == []


def test_a_halt_in_a_pause_is_for_another_since_who_leads_does_not_know_of_it() -> None:
    story = at_rest()
    assert story.say(EndRequest(1, 1)) == []
    assert story.of_pauses(Tick()) == [EnterPause(0, 1, 1, lead=True)]
    assert not story.facts()["halt"], "what it was told stays the same"
    assert story.say(Paused(0, 1, 1, led=True)) == [
        EndPause(0, 1, 1),
        EndPause(1, 1, 1),
        EnterPause(0, 1, 2),
        EnterPause(1, 1, 2),
    ]
    story.say(Paused(0, 1, 2))
    story.say(Paused(1, 1, 2))
    assert story.facts()["halt"]
    assert story.say(Paused(0, 1, 2, led=True)) == [EndPause(0, 1, 2, over=True), EndPause(1, 1, 2, over=True)]


def test_an_epoch_that_ends_while_somebody_leads_has_a_pause_of_its_own() -> None:
    story = Story("async", pause_every=1, pause_epochs=True)
    story.take(0, 1)
    story.take(1, 1)
    story.say(push(0, 1, 0, 0))
    assert story.done(1)[1:] == [EnterPause(0, 1, 1), EnterPause(1, 1, 1)]
    story.say(Paused(0, 1, 1))
    story.say(Paused(1, 1, 1))
    story.say(GiveBack(1, 1, (1,), unused=True))  # it was long on its way
    assert not story.facts()["epoch_end"]
    said = story.of_pauses(Paused(0, 1, 1, led=True))
    assert said == [EndPause(0, 1, 1), EndPause(1, 1, 1), EnterPause(0, 1, 2), EnterPause(1, 1, 2)]
    story.say(Paused(0, 1, 2))
    story.say(Paused(1, 1, 2))
    assert story.facts()["epoch_end"]


# --- who -------------------------------------------------------------------------------------------------------------


def test_nobody_is_interrupted_and_what_is_pushed_meanwhile_waits() -> None:
    story = Story("async", pause_every=1)
    story.say(push(0, 1, 0))
    assert story.done(1) == [Committed(0, 1, 1), EnterPause(0, 1, 1), EnterPause(1, 1, 1)]
    assert story.say(Paused(0, 1, 1)) == [], "learner 1 still computes"
    assert story.say(Tick()) == [EnterPause(1, 1, 1)]
    assert story.say(push(1, 1, 0)) == [], "no update is begun in a pause"
    assert story.of_pauses(Paused(1, 1, 1)) == [EnterPause(0, 1, 1, lead=True)]
    assert story.facts()["version"] == 1
    said = story.say(Paused(0, 1, 1, led=True))
    assert said == [EndPause(0, 1, 1), EndPause(1, 1, 1), Go(0, 1, 2, 1, 0, 2, ((1, 1),)), apply_job(2, 2, 1, 2, 1)]


def test_who_leads_is_told_when_the_update_under_way_is_done() -> None:
    story = Story("async")
    story.say(push(0, 1, 0))
    assert story.of_pauses(EndRequest(1, 1)) == [EnterPause(0, 1, 1), EnterPause(1, 1, 1)]
    assert story.say(Paused(0, 1, 1)) == []
    assert story.say(Paused(1, 1, 1)) == []
    assert [_bare(one) for one in story.done(1)] == [Committed(0, 1, 1), EnterPause(0, 1, 1, lead=True)]
    assert story.facts()["version"] == 1


def test_shards_that_commit_by_themselves_come_to_one_version_first() -> None:
    story = Story("downpour:push=1,fetch=1", shards=2, pause_every=1)
    story.say(push(0, 1, 0))
    story.say(push(1, 1, 0))
    assert not any(isinstance(one, EnterPause) for one in story.heard)
    first = story.say(Done(0, 1, 1))
    assert first == [Committed(0, 1, 1), EnterPause(0, 1, 1), EnterPause(1, 1, 1)], "the next is not begun"
    story.say(Paused(0, 1, 1))
    assert story.of_pauses(Paused(1, 1, 1)) == []
    assert story.of_pauses(Done(1, 1, 1)) == [EnterPause(0, 1, 1, lead=True)]
    assert {group.version for group in story.coordinator.grants.commit_groups} == {story.facts()["version"]} == {1}


def test_the_lowest_who_is_here_leads() -> None:
    story = Story("full-sync", learners=3, pause_every=1)
    update(story, 1, learners=3)
    story.say(Gone(0, 1))
    story.say(Paused(2, 1, 1))
    assert story.of_pauses(Paused(1, 1, 1)) == [EnterPause(1, 1, 1, lead=True)]


@pytest.mark.parametrize("how", [Gone(0, 1), Silent(0, 1), Bye(0, 1)], ids=["dies", "is silent", "leaves"])
def test_a_lead_that_is_gone_is_replaced_and_its_word_counts_no_more(how: INPUT) -> None:
    story = at_rest()
    assert story.of_pauses(how) == [EnterPause(1, 1, 1, lead=True)]
    assert story.of_pauses(Paused(0, 1, 1, led=True)) == []
    assert story.of_pauses(Paused(1, 1, 1, led=True)) == [EndPause(1, 1, 1)]


def test_who_leaves_in_a_pause_makes_no_update() -> None:
    story = Story("full-sync", learners=3)
    story.say(push(0, 1, 0))
    story.say(push(1, 1, 0))
    story.say(EndRequest(1, 1))
    story.say(Paused(0, 1, 1))
    story.say(Paused(2, 1, 1))  # it has not begun yet
    assert story.of_pauses(Paused(1, 1, 1)) == [EnterPause(0, 1, 1, lead=True)]
    assert story.say(Gone(2, 1)) == [FenceWord(2, 1)], "though all possible gradients have arrived"
    assert story.of_pauses(Tick()) == [EnterPause(0, 1, 1, lead=True)]
    assert story.facts()["version"] == 0


def test_a_learner_that_joins_in_a_pause_is_called_and_computes_after_it() -> None:
    story = Story("async", learners=3, pause_every=1)
    story.say(Gone(2, 1))
    story.say(push(0, 1, 0))
    story.done(1)
    story.say(Paused(0, 1, 1))
    story.say(Paused(1, 1, 1))
    assert story.say(Hello(2, 20, "t")) == [Welcome(2, 20, 2), EnterPause(2, 2, 1)]
    assert story.say(Paused(2, 2, 1)) == []
    said = story.say(Paused(0, 1, 1, led=True))
    assert said[:3] == [EndPause(0, 1, 1), EndPause(1, 1, 1), EndPause(2, 2, 1)]
    assert [one.learner for one in said[3:] if isinstance(one, Go)] == [0, 2]


def test_one_that_led_and_comes_again_pauses_before_it_leads() -> None:
    story = Story("full-sync", pause_every=1)
    update(story, 1)
    story.say(Paused(1, 1, 1))
    story.say(Paused(0, 1, 1))
    assert story.of_pauses(Hello(0, 20, "t", after=1)) == [EnterPause(0, 2, 1)]
    assert story.of_pauses(Tick()) == [EnterPause(0, 2, 1)]
    assert story.of_pauses(Paused(0, 2, 1)) == [EnterPause(0, 2, 1, lead=True)]


def test_a_pause_when_everybody_is_gone_is_over_and_the_run_goes_on_with_who_comes() -> None:
    story = at_rest()
    story.say(Gone(0, 1))
    story.say(Gone(1, 1))
    assert not story.coordinator.pauses.due
    assert [type(one) for one in story.say(Hello(1, 20, "t"))] == [Welcome, Go]


def test_a_halt_when_everybody_is_gone_ends_the_run() -> None:
    story = Story("async")
    story.say(EndRequest(0, 1))
    story.say(Gone(0, 1))
    story.say(Gone(1, 1))
    assert story.say(Hello(1, 20, "t")) == [Refused(1, 20, "the run has ended")]


# --- what is lost, or said twice --------------------------------------------------------------------------------------


def test_a_call_that_is_lost_is_said_again_to_those_who_have_not_come() -> None:
    story = Story("full-sync", pause_every=1)
    update(story, 1)
    assert story.say(Tick()) == [EnterPause(0, 1, 1), EnterPause(1, 1, 1)]
    story.say(Paused(0, 1, 1))
    assert story.say(Tick()) == [EnterPause(1, 1, 1)]
    story.say(Paused(1, 1, 1))
    assert story.of_pauses(Tick()) == [EnterPause(0, 1, 1, lead=True)]


def test_what_is_said_twice_changes_nothing() -> None:
    story = at_rest()
    assert story.say(Paused(1, 1, 1)) == []
    assert story.say(Paused(0, 1, 1)) == []
    story.say(Paused(0, 1, 1, led=True))
    assert story.say(Paused(0, 1, 1, led=True)) == [EndPause(0, 1, 1)]
    assert story.say(Paused(1, 1, 1)) == [EndPause(1, 1, 1)], "its EndPause was lost"
    assert len(story.coordinator.pauses.times) == 1


def test_one_that_is_still_in_the_pause_before_goes_on_from_it_first() -> None:
    story = at_rest()
    story.say(Paused(0, 1, 1, led=True))
    story.say(EndRequest(0, 1))
    assert story.of_pauses(Paused(1, 1, 1)) == [EndPause(1, 1, 1)]
    assert story.of_pauses(Paused(1, 1, 2)) == []


@pytest.mark.parametrize(
    "late",
    [Paused(1, 1, 1), EndRequest(1, 1), push(1, 2, 1), Want(1, 1, 1, 0, 2, 4, True), Seeded(1, 1), Hello(1, 11, "t")],
    ids=lambda message: type(message).__name__,
)
def test_that_the_run_is_over_is_answered_to_whoever_says_anything_late(late: INPUT) -> None:
    story = at_rest()
    story.say(Paused(0, 1, 1, led=True, stop=True))
    before = dict(story.coordinator.counts)
    assert EndPause(1, 1, 1, over=True) in story.say(late)
    assert not any(isinstance(one, Refused | Go | Granted) for one in story.say(late))
    assert story.coordinator.counts == before, "and nothing else comes of it"


def test_after_the_end_nobody_comes_and_those_who_leave_make_no_update() -> None:
    story = Story("full-sync")
    story.say(push(0, 1, 0))
    story.say(EndRequest(0, 1))
    story.say(Paused(0, 1, 1))
    story.say(Paused(1, 1, 1))
    story.say(Paused(0, 1, 1, led=True))
    assert story.say(Bye(1, 1)) == [FenceWord(1, 1)], "the gradient that was held is not applied"
    assert story.say(Hello(1, 20, "t")) == [Refused(1, 20, "the run has ended")]
    assert story.coordinator.counts["dropped: the run ended before its update was full"] == 1


# --- what is saved ----------------------------------------------------------------------------------------------------


def test_what_is_saved_has_everything_back_that_is_not_in_the_weights() -> None:
    story = Story("async", learners=3, pause_every=1)
    for learner in range(3):
        story.say(Want(learner, 1, 1, 0, 2, 8, True))
    story.say(push(1, 1, 0, 1))
    story.say(push(0, 1, 0, 0))
    story.done(1)  # the other update waits
    for learner in range(3):
        story.say(Paused(learner, 1, 1))
    facts = story.facts()
    book = LeaseBook(samples=8)
    book.restore(facts["book"])
    assert facts["version"] == 1
    assert facts["book"]["out"] == []
    assert book.counts[0] == {"applied": 2}
    taken = [book.take(0, 0, 2) for _ in range(3)]
    assert [lease[2:] for lease in taken if isinstance(lease, Lease)] == [(0, 2), (4, 2), (6, 2)], "in order"
    setting = RunSetting(line="async", learners=3, book=facts["book"], memory=facts["memory"])
    again = Coordinator(setting)
    beginning: list[INPUT] = [Ready(0, 1), *(Hello(learner, 10 + learner, "t") for learner in range(3)), Seeded(0, 1)]
    for message in beginning:
        again.handle(message, 0.0)
    (granted,) = [one for one in again.handle(Want(2, 1, 1, 0, 2, 8, True), 1.0) if isinstance(one, Granted)]
    assert granted.lease is not None and granted.lease[1:] == (0, 0, 2)


def test_a_policy_keeps_what_it_has_learned_and_not_who_waits() -> None:
    waits = Story("ssp:0")
    waits.say(push(0, 1, 0))
    waits.done(1)
    assert waits.coordinator.policy.waiting == [0]  # type: ignore[attr-defined]  # it is the policy of ssp
    assert waits.coordinator.resume_state()["memory"] == {}
    learns = Story("adaptive-k:1,window=1")
    for learner in (0, 1):
        learns.say(push(learner, 1, 0, loss=1.0))
        learns.done(1 + learner)
    memory = json.loads(json.dumps(learns.coordinator.resume_state()["memory"]))
    assert memory == {"k": 2, "losses": [], "before": 1.0}
    assert RunSetting(line="adaptive-k:1,window=1", learners=2, memory=memory).policy().k == 2  # type: ignore[attr-defined]  # see above


@pytest.mark.parametrize("upto", range(4))
def test_a_journal_brings_a_coordinator_back_in_the_middle_of_a_pause(upto: int) -> None:
    story = Story("full-sync", pause_every=1)
    update(story, 1)
    in_the_pause: tuple[INPUT, ...] = (Paused(1, 1, 1), Paused(0, 1, 1), EndRequest(1, 1))
    for said in in_the_pause[:upto]:
        story.say(said)
    again = Coordinator(story.coordinator.setting)
    for message, at_s in story.journal:
        again.handle(message, at_s)
    assert again.resume_state() == story.coordinator.resume_state()
    assert vars(again.pauses) == vars(story.coordinator.pauses)
    later: tuple[INPUT, ...] = (
        Tick(),
        Paused(0, 1, 1),
        Paused(1, 1, 1),
        Paused(0, 1, 1, led=True),
        Tick(),
        Paused(1, 1, 2),
    )
    for later_s, message in enumerate(later, start=100):
        assert again.handle(message, later_s) == story.coordinator.handle(message, later_s)


# --- the learner's end --------------------------------------------------------------------------------------------


def joined() -> ConnectionState:
    client = ConnectionState(0, "t", iter(count(10)))
    client.join()
    client.receive(Welcome(0, 10, 1))
    return client


def test_a_learner_takes_each_call_once_and_says_that_it_pauses_until_it_may_go_on() -> None:
    client = joined()
    for _ in range(2):
        client.receive(EnterPause(0, 1, 1))
    pause = client.take_pause()
    assert pause == EnterPause(0, 1, 1)
    assert not client.must_wait
    assert client.paused(pause) == [Paused(0, 1, 1)]
    client.receive(EnterPause(0, 1, 1))
    assert client.take_pause() is None
    assert client.must_wait and Paused(0, 1, 1) in client.retry()
    client.receive(EndPause(0, 1, 0))  # from a pause before
    assert client.must_wait
    client.receive(EndPause(0, 1, 1))
    assert not client.must_wait and Paused(0, 1, 1) not in client.retry()


def test_a_learner_leads_once() -> None:
    client = joined()
    client.receive(EnterPause(0, 1, 1))
    client.paused(client.take_pause() or EnterPause(0, 1, 0))
    client.receive(EnterPause(0, 1, 1, lead=True))
    lead = client.take_pause()
    assert lead is not None and lead.lead
    client.receive(EnterPause(0, 1, 1, lead=True))
    client.receive(EnterPause(0, 1, 1))
    assert client.take_pause() is None
    assert client.paused(lead, stop=True) == [Paused(0, 1, 1, led=True, stop=True)]
    assert Paused(0, 1, 1, led=True, stop=True) in client.retry()


def test_a_call_that_comes_after_its_pause_is_answered_and_nothing_else() -> None:
    client = joined()
    client.receive(EnterPause(0, 1, 1))
    client.receive(EndPause(0, 1, 1))
    assert client.take_pause() is None


def test_that_the_run_is_over_is_not_taken_back_by_a_word_from_before() -> None:
    client = joined()
    client.receive(EndPause(0, 1, 2, over=True))
    client.receive(EndPause(0, 1, 1))
    assert client.over


def test_one_that_was_given_up_in_a_pause_comes_again_and_knows_of_none() -> None:
    client = joined()
    client.receive(EnterPause(0, 1, 1))
    pause = client.take_pause()
    assert pause is not None
    client.paused(pause)
    assert [type(one) for one in client.receive(Fenced(0, 1))] == [Hello]
    assert not client.must_wait
    assert client.paused(pause) == [], "what it led as another is nobody's"
    client.receive(Welcome(0, 11, 2))
    client.receive(EnterPause(0, 2, 1))
    assert client.take_pause() == EnterPause(0, 2, 1)


def test_a_halt_is_said_until_the_run_is_over_also_as_another() -> None:
    client = ConnectionState(0, "t", iter(count(10)))
    client.join()
    assert client.request_end() == [], "it is nobody yet"
    client.receive(Welcome(0, 10, 1))
    assert EndRequest(0, 1) in client.retry()
    client.receive(Fenced(0, 1))
    client.receive(Welcome(0, 11, 2))
    assert EndRequest(0, 2) in client.retry()
    client.receive(EndPause(0, 2, 1, over=True))
    assert EndRequest(0, 2) not in client.retry()


# --- real runs ----------------------------------------------------------------------------------------------------


def run(nursery: Nursery, line: str, **given: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What both learners gave back, and the summary."""
    first, second, summary = nursery.values("serve_pausing", ranks=3, line=line, **given)
    return first, second, summary


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_run_that_goes_on_from_what_was_saved_has_the_bits_of_one_that_was_never_stopped(
    nursery: Nursery, optimizer: str, servers: int
) -> None:
    given: dict[str, Any] = {"optimizer": optimizer, "servers": servers, "pause_every": 3, "pause_epochs": True}
    whole, other, summary = run(nursery, "full-sync", **given)
    assert [(one["version"], one["epoch_end"]) for one in whole["led"]] == [
        (3, False),
        (6, True),
        (9, False),
        (12, True),
    ]
    assert all(one["still"] for one in whole["led"])
    assert (whole["pauses"], other["pauses"], other["led"]) == (4, 4, [])
    assert summary["updates"] == 12
    plain, _, _ = run(nursery, "full-sync", optimizer=optimizer, servers=servers)
    assert plain["weights"] == whole["weights"], "pauses change nothing"
    for stop_at in (3, 6):  # in the middle of an epoch, and at its end
        first, second, summary = run(nursery, "full-sync", **given, stop_at=stop_at)
        assert first["over"] and second["over"]
        assert summary["updates"] == first["saved"]["version"] == stop_at, "nothing is applied after it"
        saved = {name: first["saved"][name] for name in ("book", "memory")}
        goes_on, _, summary = run(nursery, "full-sync", **given, **saved, kept=first["saved"]["kept"])
        assert summary["updates"] == 12 - stop_at
        assert goes_on["weights"] == whole["weights"]


@pytest.mark.parametrize(
    "line", ["downpour:push=2,fetch=1", "local-sgd:2", "async", "k-batch-sync:3", "async:rate=drift:1.0"]
)
def test_every_kind_of_learner_pauses_and_goes_on(nursery: Nursery, line: str) -> None:
    first, second, summary = run(nursery, line, servers=2, pause_every=2, pause_epochs=True)
    led = first["led"] + second["led"]
    assert len(led) >= 3 and all(one["still"] for one in led)
    assert not first["over"] and first["weights"] == second["weights"]
    late = summary["samples"].get("dropped: the run ended before its update was full", 0)
    assert summary["samples"]["applied"] + late == 2 * SAMPLES


@pytest.mark.parametrize("line", ["downpour:push=2,fetch=1", "local-sgd:2", "async", "full-sync"])
def test_a_halt_ends_the_run_for_all_and_another_goes_on_from_it(nursery: Nursery, line: str) -> None:
    first, second, _ = run(nursery, line, halt_after=3)
    assert first["over"] and second["over"]
    assert [one["version"] for one in first["led"]] == [first["saved"]["version"]]
    assert first["saved"]["halt"]
    saved = {name: first["saved"][name] for name in ("book", "memory")}
    before = first["saved"]["samples"].get("applied", 0)
    _, _, summary = run(nursery, line, **saved, kept=first["saved"]["kept"])
    late = summary["samples"].get("dropped: the run ended before its update was full", 0)
    assert before + summary["samples"]["applied"] + late == 2 * SAMPLES


def test_weights_in_place_stand_still_too(nursery: Nursery) -> None:
    first, _, _ = run(nursery, "async", in_place=True, pause_every=2, pause_epochs=True)
    assert len(first["led"]) >= 3 and all(one["still"] for one in first["led"])
