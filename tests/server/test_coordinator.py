"""Exact answers for small conversations."""

from __future__ import annotations

from typing import Any

import pytest

from offbeat.server.coordinator.coordinator import MOST_NON_FINITE, Coordinator
from offbeat.server.coordinator.invariants import check
from offbeat.server.run_setting import RunSetting
from offbeat.server.wire import (
    INPUT,
    MOST_BYTES,
    Ask,
    Bye,
    CancelWord,
    Committed,
    Done,
    Fenced,
    FenceWord,
    Fetched,
    Finish,
    GiveBack,
    Go,
    Gone,
    Granted,
    Hello,
    Message,
    Push,
    Ready,
    Refused,
    Seeded,
    ShardJob,
    Silent,
    Stop,
    Tick,
    Want,
    Weights,
    Welcome,
    WireError,
    decode_input,
    decode_output,
    encode,
)

LR = ({"lr": 0.5},)


class Talk:
    """A coordinator, and a clock that ticks at each message; its laws are checked after each."""

    def __init__(self, line: str, learners: int = 2, shards: int = 1, **more: Any) -> None:
        self.coordinator = Coordinator(RunSetting(line=line, learners=learners, shards=shards, **more))
        self.at_s = 0.0
        for shard in range(shards):
            self.say(Ready(shard, 1))

    def say(self, message: INPUT) -> list[Message]:
        self.at_s += 1.0
        said = self.coordinator.handle(message, self.at_s)
        check(self.coordinator)
        return list(said)

    def done(self, number: int, *shards: int) -> list[Message]:
        return [one for shard in shards or (0,) for one in self.say(Done(shard, 1, number))]


def started(line: str, learners: int = 2, shards: int = 1, **more: Any) -> Talk:
    """All are there, as nonces 10, 11, ..., and have been told to compute minibatch 1 on version 0."""
    talk = Talk(line, learners, shards, **more)
    for learner in range(learners):
        talk.say(Hello(learner, 10 + learner, "t"))
    said = talk.say(Seeded(0, 1))
    assert said == [Go(learner, 1, 1, 0, learner, 1, ((0, 0),) * len(said[0].pieces)) for learner in range(learners)]  # type: ignore[attr-defined]  # they are Gos
    for learner in range(learners):
        assert talk.say(Fetched(learner, 1, 1)) == []
    return talk


def push(learner: int, seq: int, version: int, *leases: int, incarnation: int = 1, **more: Any) -> Push:
    return Push(learner, incarnation, seq, version, hyper=LR, leases=leases, **more)


def apply_job(
    number: int, version: int, source: int, target: int, *slots: int, shard: int = 0, scale: float = 1.0
) -> ShardJob:
    scales = (scale,) * len(slots)
    return ShardJob(shard, number, "apply", version, source, target, slots, scales, hyper=LR)


def test_the_first_of_all_gives_the_initial_weights_and_then_all_go() -> None:
    talk = Talk("async")
    assert talk.say(Hello(0, 10, "t")) == [Welcome(0, 10, 1)]
    assert talk.say(Hello(1, 11, "t")) == [Welcome(0, 10, 1, seed=True), Welcome(1, 11, 1)]
    assert talk.say(Hello(0, 10, "t")) == [Welcome(0, 10, 1, seed=True)]
    assert talk.say(Seeded(0, 1)) == [Go(0, 1, 1, 0, 0, 1, ((0, 0),)), Go(1, 1, 1, 0, 1, 1, ((0, 0),))]
    assert talk.say(Seeded(0, 1)) == [Go(0, 1, 1, 0, 0, 1, ((0, 0),))]


def test_a_seeder_that_may_still_write_is_not_replaced_before_it_is_heard_of() -> None:
    talk = Talk("async")
    talk.say(Hello(0, 10, "t"))
    talk.say(Hello(1, 11, "t"))
    assert talk.say(Silent(0, 1)) == [FenceWord(0, 1)]
    assert talk.say(Hello(0, 12, "t")) == [Welcome(0, 12, 2)]
    assert talk.say(Gone(0, 1)) == [Welcome(0, 12, 2, seed=True)]


def test_who_is_there_by_the_deadline_begins() -> None:
    talk = Talk("async", start_by_s=10.0)
    assert talk.say(Hello(1, 11, "t")) == [Welcome(1, 11, 1)]
    assert talk.say(Tick()) == []
    talk.at_s = 10.0
    assert talk.say(Tick()) == [Welcome(1, 11, 1, seed=True)]
    assert talk.say(Seeded(1, 1)) == [Go(1, 1, 1, 0, 0, 1, ((0, 0),))]


def test_async_applies_each_push_and_answers_when_it_is_done() -> None:
    talk = started("async")
    assert talk.say(push(1, 1, 0)) == [apply_job(1, 1, 0, 1, 1)]
    assert talk.say(push(0, 1, 0)) == []  # one update at a time
    assert talk.done(1) == [Committed(0, 1, 1), Go(1, 1, 2, 1, 1, 2, ((1, 1),)), apply_job(2, 2, 1, 0, 0)]
    assert talk.done(2) == [Committed(0, 2, 0), Go(0, 1, 2, 2, 0, 2, ((0, 2),))]
    assert talk.coordinator.staleness == {0: 1, 1: 1}


def test_an_update_is_there_when_all_shards_have_done_it() -> None:
    talk = started("async", shards=2)
    assert talk.say(push(0, 1, 0)) == [apply_job(1, 1, 0, 1, 0), apply_job(1, 1, 0, 1, 0, shard=1)]
    assert talk.done(1, 1, 1) == []
    assert talk.done(1, 0) == [Committed(0, 1, 1), Go(0, 1, 2, 1, 0, 2, ((1, 1),))]


def test_a_duplicate_push_is_counted_and_answered_as_before() -> None:
    talk = started("async")
    talk.say(push(0, 1, 0))
    assert talk.say(push(0, 1, 0)) == []
    (_, go) = talk.done(1)
    assert talk.say(push(0, 1, 0)) == [go]
    assert talk.coordinator.counts["duplicate"] == 2
    assert talk.coordinator.counts["received"] == 1


def test_k_sync_cancels_the_slow_one_and_drops_its_late_push() -> None:
    talk = started("k-sync:2", learners=3)
    assert talk.say(push(2, 1, 0)) == []
    assert talk.say(push(0, 1, 0)) == [CancelWord(1, 1, 1), apply_job(1, 1, 0, 1, 0, 2)]  # in the order of learners
    assert talk.done(1) == [
        Committed(0, 1, 1),
        Go(0, 1, 2, 1, 3, 2, ((1, 1),)),
        Go(1, 1, 2, 1, 1, 2, ((1, 1),), unused=1),  # the cancelled one keeps its slot
        Go(2, 1, 2, 1, 0, 2, ((1, 1),)),
    ]
    assert talk.say(push(1, 1, 0)) == []
    assert talk.coordinator.counts["dropped: late"] == 1
    assert talk.say(push(1, 2, 1)) == []  # held


def test_the_next_go_says_that_a_gradient_was_not_used() -> None:
    """So that its learner keeps what error feedback had sent with it."""
    talk = started("stale-drop:0")
    talk.say(push(0, 1, 0))
    talk.done(1)
    said = talk.say(push(1, 1, 0))  # computed on weights that are gone
    assert [(one.seq, one.unused) for one in said if isinstance(one, Go)] == [(2, 1)]
    assert talk.coordinator.counts["dropped"] == 1
    talk.say(push(1, 2, 1))
    said = talk.done(2)
    assert [(one.seq, one.unused) for one in said if isinstance(one, Go)] == [(3, 1)], "the second one was used"


def test_residuals_are_lost_with_the_process_of_a_learner_that_had_pushed_and_not_with_its_connection() -> None:
    talk = started("async:codec=int8", learners=3)
    talk.say(push(0, 1, 0))
    talk.done(1)
    talk.say(Gone(0, 1))
    talk.say(Gone(1, 1))  # it had sent nothing yet
    assert talk.coordinator.counts["residuals lost"] == 1
    talk.say(Hello(0, 20, "t", 1))  # the same process
    assert talk.coordinator.counts["residuals lost"] == 0
    plain = started("async:codec=int8:stochastic")
    plain.say(push(0, 1, 0))
    plain.done(1)
    plain.say(Gone(0, 1))
    assert plain.coordinator.counts["residuals lost"] == 0, "it has none"


def test_a_cancelled_learner_that_stops_gives_its_samples_back() -> None:
    talk = started("k-sync:1", again=True)
    for learner in (0, 1):
        lease = (learner, 0, learner, 1)
        assert talk.say(Want(learner, 1, 1, 0, 1, 2, True)) == [Granted(learner, 1, 1, "lease", lease)]
    assert talk.say(push(0, 1, 0, 0)) == [CancelWord(1, 1, 1), apply_job(1, 1, 0, 1, 0)]
    talk.done(1)
    assert talk.say(Stop(1, 1, 1, (1,))) == []
    assert talk.coordinator.leases.samples == {"applied": 1, "computed again: cancelled": 1}
    assert talk.say(Want(1, 1, 2, 0, 1, 2, True, 1)) == [Granted(1, 1, 2, "lease", (2, 0, 1, 1), 1)]


def test_a_learner_that_was_given_up_is_fenced_and_its_slot_is_kept_until_it_comes_again() -> None:
    talk = started("async")
    assert talk.say(Silent(0, 1)) == [FenceWord(0, 1)]
    assert talk.coordinator.grants.free_slots == []
    assert talk.say(push(0, 1, 0)) == [Fenced(0, 1)]
    assert talk.say(Hello(0, 10, "t")) == [Welcome(0, 10, 1), Fenced(0, 1)]
    assert talk.say(Hello(0, 20, "t", 1)) == [Welcome(0, 20, 2), Go(0, 2, 1, 0, 0, 1, ((0, 0),))]
    assert talk.say(Hello(0, 10, "t")) == [Welcome(0, 10, 1), Fenced(0, 1)]
    assert talk.coordinator.counts["fenced"] == 1


def test_slots_of_all_who_may_wake_are_kept_until_their_process_has_ended() -> None:
    talk = started("k-batch-async:3")
    assert talk.say(Hello(0, 20, "t")) == [FenceWord(0, 1), Welcome(0, 20, 2), Go(0, 2, 1, 0, 2, 1, ((0, 0),))]
    assert talk.say(Hello(0, 21, "t")) == [FenceWord(0, 2), Welcome(0, 21, 3), Go(0, 3, 1, 0, 3, 1, ((0, 0),))]
    assert talk.coordinator.grants.free_slots == []
    talk.say(Gone(0, 2))
    assert sorted(talk.coordinator.grants.free_slots) == [0, 2]


def test_a_server_that_comes_again_is_told_its_job_and_word_of_the_one_before_is_nothing() -> None:
    talk = started("async")
    (job,) = talk.say(push(0, 1, 0))
    assert talk.say(Tick()) == [job]
    assert talk.say(Ready(0, 2)) == [job]
    assert talk.say(Done(0, 1, 1)) == []
    assert talk.say(Done(0, 2, 1)) == [Committed(0, 1, 1), Go(0, 1, 2, 1, 0, 2, ((1, 1),))]
    assert talk.say(Ready(0, 1)) == []


def test_with_full_sync_nobody_waits_for_a_learner_without_samples() -> None:
    talk = started("full-sync")
    talk.say(Want(0, 1, 1, 0, 2, 3, True))
    talk.say(Want(1, 1, 1, 0, 2, 3, True))  # gets the last one
    talk.say(push(0, 1, 0, 0, samples=2))
    assert talk.say(Want(0, 1, 2, 0, 2, 3, True, 1)) == []  # waits
    scales = (2 / 1.5, 1 / 1.5)
    assert talk.say(push(1, 1, 0, 1)) == [ShardJob(0, 1, "apply", 1, 0, 1, (0, 1), scales, hyper=LR)]
    assert talk.done(1) == [
        Committed(0, 1, 1),
        Go(1, 1, 2, 1, 2, 2, ((1, 1),)),
        Granted(0, 1, 2, "ended", None, 1),
        Go(0, 1, 2, 1, 0, 2, ((1, 1),)),  # all begin the next epoch together
    ]
    assert talk.say(Want(1, 1, 2, 0, 2, 3, True, 1)) == [Granted(1, 1, 2, "ended", None, 1)]
    lease = (2, 1, 0, 2)
    assert talk.say(Want(0, 1, 3, 1, 2, 3, True, 1)) == [Granted(0, 1, 3, "lease", lease, 1)]


def test_samples_that_wait_for_an_update_at_an_epochs_end_are_held_and_then_accounted_for() -> None:
    talk = started("k-batch-async:3")
    for learner in (0, 1):
        talk.say(Want(learner, 1, 1, 0, 1, 2, True))
    for learner in (0, 1):
        talk.say(push(learner, 1, 0, learner))
        talk.say(Want(learner, 1, 2, 0, 1, 2, True, 1))
    book = talk.coordinator.leases.book
    assert book is not None and book.counts[0] == {"held": 2}
    talk.say(Bye(0, 1))
    talk.say(Bye(1, 1))
    talk.say(Finish())
    assert book.counts[0] == {"dropped: the run ended before its update was full": 2}


def test_a_want_that_has_overtaken_a_push_is_not_answered_before_it() -> None:
    talk = started("async")
    talk.say(Want(0, 1, 1, 0, 1, 2, True))
    assert talk.say(Want(0, 1, 2, 0, 1, 2, True, 1)) == []
    talk.say(push(0, 1, 0, 0))
    assert talk.say(Want(0, 1, 2, 0, 1, 2, True, 1)) == [Granted(0, 1, 2, "lease", (1, 0, 1, 1), 1)]
    assert talk.say(Want(0, 1, 1, 0, 1, 2, True)) == []  # an old one


def test_what_was_given_back_is_leased_to_another() -> None:
    talk = started("async")
    talk.say(Want(0, 1, 1, 0, 2, 2, True))
    assert talk.say(Want(1, 1, 1, 0, 1, 2, False)) == [Granted(1, 1, 1, "wait")]
    talk.say(GiveBack(0, 1, (0,)))
    assert talk.say(Want(1, 1, 2, 0, 1, 2, False)) == [Granted(1, 1, 2, "lease", (1, 0, 0, 1))]


def test_a_push_that_is_not_finite_is_dropped_and_its_learner_goes_on_until_there_were_too_many() -> None:
    talk = started("async")
    for seq in range(1, MOST_NON_FINITE):
        assert talk.say(push(0, seq, 0, finite=False)) == [Go(0, 1, seq + 1, 0, 0, seq + 1, ((0, 0),))]
    why = f"its last {MOST_NON_FINITE} gradients were not finite"
    assert talk.say(push(0, MOST_NON_FINITE, 0, finite=False)) == [Refused(0, 10, why), FenceWord(0, 1)]
    assert talk.coordinator.counts["dropped: not finite"] == MOST_NON_FINITE


def test_another_model_other_data_and_a_number_too_high_are_sent_away() -> None:
    talk = started("async")
    why = "its model or optimizer differs from that of the other learners"
    assert talk.say(Hello(1, 20, "u")) == [Refused(1, 20, why)]
    why = "the run has 2 learners, numbered from 0; got learner 2"
    assert talk.say(Hello(2, 20, "t")) == [Refused(2, 20, why)]
    talk.say(Want(0, 1, 1, 0, 1, 5, True))
    why = "its data set has 6 samples, but that of other learners has 5"
    assert talk.say(Want(1, 1, 1, 0, 1, 6, True)) == [Refused(1, 11, why), FenceWord(1, 1)]
    talk.say(Finish())
    assert talk.say(Hello(1, 21, "t")) == [Refused(1, 21, "the run has ended")]


def test_drift_is_measured_before_the_policy_hears_of_a_push() -> None:
    talk = started("async:rate=drift:1.0")
    assert talk.say(push(0, 1, 0)) == [ShardJob(0, 1, "drift", 1, 0, 0, reads=(0,))]
    assert talk.say(Done(0, 1, 1, (0.0, 4.0))) == [ShardJob(0, 2, "apply", 1, 0, 1, (0,), (0.25,), (0,), hyper=LR)]


def test_clipping_asks_for_the_norm_first() -> None:
    talk = started("async", clip_norm=1.0)
    assert [job.kind for job in talk.say(push(0, 1, 0)) if isinstance(job, ShardJob)] == ["norm"]
    (job,) = talk.say(Done(0, 1, 1, (9.0, 16.0)))
    assert isinstance(job, ShardJob) and job.kind == "apply" and job.clip == pytest.approx(0.2)


def test_downpour_fetches_beside_its_work_and_shards_commit_by_themselves() -> None:
    talk = started("downpour:push=1,fetch=1", shards=2)
    jobs = [apply_job(1, 1, 0, 1, 0), apply_job(1, 1, 0, 1, 0, shard=1)]
    assert talk.say(push(0, 1, 0)) == [Go(0, 1, 2, 0, 2, 1), *jobs]
    assert talk.say(Done(1, 1, 1)) == [Committed(1, 1, 1)]
    assert talk.say(Ask(1, 1, 1)) == [Weights(1, 1, 1, 1, 2, ((0, 0), (1, 1)))]
    assert talk.say(Ask(1, 1, 1)) == [Weights(1, 1, 1, 1, 2, ((0, 0), (1, 1)))]
    assert talk.say(Done(0, 1, 1)) == [Committed(0, 1, 1)]


def test_weights_that_are_sent_again_do_not_take_the_place_of_those_of_a_later_go() -> None:
    talk = started("downpour:push=1,fetch=1,rate=delay-compensated:0.5", learners=1)
    talk.say(Want(0, 1, 1, 0, 1, 1, True))
    talk.say(push(0, 1, 0, 0))
    old = Weights(0, 1, 1, 1, 2, ((0, 0),))
    assert talk.say(Ask(0, 1, 1)) == [old]
    assert talk.say(Want(0, 1, 2, 0, 1, 1, True, 1)) == []  # the epoch is over with the update
    assert talk.done(1)[-1] == Go(0, 1, 3, 1, 1, 3, ((1, 1),))
    assert talk.say(Ask(0, 1, 1)) == [old]
    assert [job.reads for job in talk.say(push(0, 3, 1)) if isinstance(job, ShardJob)] == [(1,)]


def test_a_journal_brings_a_coordinator_back() -> None:
    talk = started("k-sync:2", learners=3)
    history: list[INPUT] = [push(2, 1, 0), push(0, 1, 0), Done(0, 1, 1), Silent(1, 1)]
    for message in history:
        talk.say(message)
    again = started("k-sync:2", learners=3)
    for message in history:
        again.say(message)
    assert again.coordinator.shared_words() == talk.coordinator.shared_words()
    assert again.coordinator.shared_words() == [
        *(FenceWord(0, 0), FenceWord(1, 1), FenceWord(2, 0)),
        *(CancelWord(0, 1, 0), CancelWord(2, 1, 0)),
        Committed(0, 1, 1),
    ]
    assert again.say(push(0, 2, 1)) == talk.say(push(0, 2, 1))


def test_messages_are_read_as_they_were_written_and_others_are_refused() -> None:
    for inward in (Hello(0, 10, "t"), push(0, 1, 0, 3, loss=0.5), Want(0, 1, 1, 0, 1, 2, True), Tick(), Done(0, 1, 1)):
        assert decode_input(encode(inward)) == inward
    for outward in (Go(3, 1, 1, 0, 0, 1, ((0, 0),)), apply_job(1, 1, 0, 1, 0), FenceWord(1, 1), Committed(0, 1, 1)):
        assert decode_output(encode(outward)) == outward
    with pytest.raises(WireError, match="not a message of protocol"):
        decode_input(encode(FenceWord(1, 1)))
    with pytest.raises(WireError, match="exceeds the limit"):
        encode(Refused(0, 10, "x" * MOST_BYTES))
