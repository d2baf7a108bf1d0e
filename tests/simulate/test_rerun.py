"""What a log says of its machine: logs that were written by hand, and simulated runs, replayed from their own logs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from offbeat.errors import RequestError
from offbeat.predict.recorded_run import Computed, Recorded, filled, law_of, read_recorded, sends_of, starts_of
from offbeat.predict.timelines import Minibatch, ServedTimeline, Update
from offbeat.runs.log import RunLog, Span
from offbeat.simulate.cluster import Cluster, Wires
from offbeat.simulate.compute import Draws, Law, parse_law
from offbeat.simulate.cores import Cores
from offbeat.simulate.engine import Floats, Ints
from offbeat.simulate.sample_source import Epochs, Stream


def log_of(strategy: str, *lines: str, spans: tuple[Span, ...], learners: int = 2, **facts: Any) -> RunLog:
    """Of lines like 'pushed 0 t1 v0 @1.0: apply t1, send 0'."""
    decisions = []
    for line in lines:
        event, _, commands = line.partition(": ")
        decisions.append({"event": event, "commands": [word for word in commands.split(", ") if word], "why": []})
    run = {"strategy": strategy, "expect": learners, "simulated": False, **facts}
    return RunLog(run=run, spans=spans, decisions=tuple(decisions))


def computed(learner: int, start_s: float, end_s: float, version: int, *, cancelled: bool = False) -> Span:
    return Span(learner, "compute", start_s, end_s, version, cancelled)


ASYNC = log_of(
    "async",
    "joined 0 @10.0",
    "joined 1 @10.0: send 0, send 1",
    "pushed 0 t1 v0 @11.5: apply t1, send 0",
    "pushed 1 t2 v0 @12.25: apply t2, send 1",
    "left 1 @12.75",
    "pushed 0 t3 v1 @13.0: apply t3, send 0",
    "joined 1 @16.0: send 1",
    "pushed 1 t4 v3 @18.0: apply t4, send 1",
    spans=(
        computed(0, 10.25, 11.25, 0),
        computed(1, 10.5, 12.0, 0),
        Span(0, "wait", 11.25, 12.0, 1),
        computed(0, 12.0, 12.75, 1),
        Span(0, "wait", 12.75, 13.5, 3),
        Span(0, "evaluate", 13.5, 15.5, 3),
        Span(1, "wait", 15.5, 16.25, 3),
        computed(1, 16.25, 17.75, 3),
    ),
)


def test_an_asynchronous_log_tells_what_minibatches_and_ways_took() -> None:
    found = read_recorded(ASYNC)
    assert [one.seconds.tolist() for one in found.learners] == [[1.0, 0.75], [1.5, 1.5]]
    assert [one.back_s.tolist() for one in found.learners] == [[0.25, 0.5], [0.5, 0.25]]
    assert found.there_s == 0.25 and found.back_s == 0.375 and not found.reduces
    assert found.minibatches == 4 and found.cancelled == 0 and found.numbers == (0, 1)


def test_each_push_took_its_own_time_to_the_server() -> None:
    first, second = read_recorded(ASYNC).learners
    assert first.sends_s.tolist() == [0.25, 0.25] and second.sends_s.tolist() == [0.25, 0.25]
    decisions = [
        {**record, "event": record["event"].replace("@12.25", "@14.0").replace("@18.0", "@17.75")}
        for record in ASYNC.decisions
    ]
    later = read_recorded(replace(ASYNC, decisions=tuple(decisions)))
    assert [one.sends_s.tolist() for one in later.learners] == [[0.25, 0.25], [2.0, 0.0]]
    assert later.there_s == 0.625


def test_learners_keep_their_numbers_where_some_computed_nothing() -> None:
    log = log_of("async", "joined 3 @0.0: send 3", spans=(computed(3, 0.5, 1.0, 0), computed(1, 0.0, 2.0, 0)))
    found = read_recorded(log)
    assert found.numbers == (1, 3)
    assert [one.seconds.tolist() for one in found.learners] == [[2.0], [0.5]]


def test_a_word_that_came_when_samples_were_out_ends_when_its_learner_leaves() -> None:
    first, second = read_recorded(ASYNC).learners
    assert second.starts_s.tolist() == [0.5, 0.5, 0.25, 0.375]  # 12.25 to 12.75; the last led to nothing
    assert first.starts_s.tolist() == [0.25, 0.5, 0.375]  # what an evaluation lay in is taken as the mean


def test_evaluations_are_no_training_and_what_ends_of_epochs_take_is_the_rest() -> None:
    found = read_recorded(ASYNC)
    assert found.stretches == 2
    assert found.active_s == (13.0 - 10.375) + (18.0 - 16.25)
    begins_s = 2 * 0.375
    assert found.ends_s(6.0) == pytest.approx(6.0 - found.active_s - begins_s)
    assert found.ends_s(1.0) == 0.0


def test_who_comes_to_rest_does_not_count_as_waiting() -> None:
    shares = read_recorded(ASYNC)
    assert shares.wait_share == pytest.approx(0.75 / (0.75 + 4.75))
    assert shares.waste_share == 0.0


def test_sending_and_updating_count_as_waiting_for_a_server_as_in_older_logs_that_do_not_tell_them_apart() -> None:
    parts = (
        Span(0, "send", 11.25, 11.5, 1),
        Span(0, "apply", 11.5, 11.75, 1),
        Span(0, "wait", 11.75, 12.0, 1),
    )
    spans = (*ASYNC.spans[:2], *parts, *ASYNC.spans[3:])
    told, old = read_recorded(replace(ASYNC, spans=spans)), read_recorded(ASYNC)
    assert (told.wait_share, told.waste_share) == (old.wait_share, old.waste_share)


CUT = log_of(
    "k-sync:1",
    "joined 0 @0.0",
    "joined 1 @0.0: send 0, send 1",
    "pushed 0 t1 v0 @1.0: apply t1, cancel 1, send 0, send 1",
    "stopped 1 v0 @1.25",
    "pushed 1 t2 v1 @4.0: apply t2, cancel 0, send 0, send 1",
    "pushed 0 t3 v1 @4.25: drop t3",
    "pushed 1 t4 v2 @9.0: apply t4, send 0, send 1",
    spans=(
        computed(0, 0.0, 1.0, 0),
        computed(1, 0.0, 1.25, 0, cancelled=True),
        computed(1, 1.5, 4.0, 1),
        computed(0, 1.0, 4.25, 1),
        computed(0, 4.25, 9.25, 2, cancelled=True),
        computed(1, 4.0, 9.0, 2),
    ),
)


def test_a_cancelled_minibatch_is_known_to_have_been_cut_off() -> None:
    first, second = read_recorded(CUT).learners
    assert first.cancelled == (False, False, True) and second.cancelled == (True, False, False)
    assert sum(second.cancelled) / len(second.cancelled) == pytest.approx(1 / 3)
    assert second.back_s.tolist() == [0.0, 0.5, 0.0]  # from the word that came with the cancelling
    shares = read_recorded(CUT)
    assert shares.waste_share == pytest.approx(
        (1.25 + 5.0 + 3.25) / 18.0
    )  # both that were cancelled, and the one that was late


def test_what_was_cancelled_gets_one_of_its_learners_longer_times_the_same_every_time() -> None:
    recorded = read_recorded(CUT)
    seen = set()
    for seed in range(40):
        first, second = filled(recorded.learners, seed=seed)
        assert first.tolist() == [1.0, 3.25, 5.0]  # nothing longer was seen: itself
        assert second.tolist()[1:] == [2.5, 5.0] and second[0] in (2.5, 5.0)
        assert filled(recorded.learners, seed=seed)[1].tolist() == second.tolist()
        seen.add(float(second[0]))
    assert seen == {2.5, 5.0}


def test_the_longer_times_are_drawn_as_kaplan_and_meier_have_them() -> None:
    times = np.array([1.0, 2.0, 3.0, *[2.5] * 4000])
    one = Computed(times * 0, times, (False, False, False, *[True] * 4000), times * 0, times * 0)
    (row,) = filled([one], seed=0)
    assert set(row[3:].tolist()) == {3.0}
    early = np.array([1.0, 2.0, 4.0, *[0.5] * 4000])
    (row,) = filled([Computed(early * 0, early, one.cancelled, early * 0, early * 0)], seed=0)
    assert [round(float(np.mean(row[3:] == time)), 1) for time in (1.0, 2.0, 4.0)] == [0.3, 0.3, 0.3]


@pytest.mark.parametrize(
    ("cut_s", "chances"),
    [
        (3.0, {5.0: 1 / 4, 6.0: 3 / 4}),  # of the eight that finished four were longer
        (0.5, {1.0: 4 / 8, 5.0: 1 / 8, 6.0: 3 / 8}),
        (5.0, {6.0: 1.0}),
    ],
)
def test_a_time_that_is_drawn_is_longer_than_the_cut_and_as_likely_as_among_the_longer_ones(
    cut_s: float, chances: dict[float, float]
) -> None:
    times = np.array([1.0, 1.0, 1.0, 1.0, 5.0, 6.0, 6.0, 6.0, cut_s])
    one = Computed(times * 0, times, (False,) * 8 + (True,), times * 0, times * 0)
    rows = filled([one] * 2000, seed=0)
    assert all(row[:8].tolist() == times[:8].tolist() for row in rows)
    drawn = np.array([row[8] for row in rows])
    assert set(drawn.tolist()) == set(chances)  # what had passed by then is never drawn
    for time_s, chance in chances.items():
        assert float(np.mean(drawn == time_s)) == pytest.approx(chance, abs=0.05)


def test_what_was_cancelled_takes_longer_than_one_that_finished_after_as_long() -> None:
    times = np.array([2.0, 5.0, 2.0])
    for seed in range(20):
        (row,) = filled([Computed(times * 0, times, (False, False, True), times * 0, times * 0)], seed=seed)
        assert row.tolist() == [2.0, 5.0, 5.0]


def test_a_learner_that_never_finished_gets_the_times_of_all() -> None:
    never = Computed(np.zeros(1), np.array([0.5]), (True,), np.zeros(1), np.zeros(1))
    other = Computed(np.zeros(1), np.array([2.0]), (False,), np.zeros(1), np.zeros(1))
    assert filled([never, other], seed=0)[0].tolist() == [2.0]


RING = log_of(
    "ring",
    spans=(
        computed(0, 1.0, 2.0, 0),
        computed(1, 1.0, 3.0, 0),
        Span(0, "wait", 2.0, 3.25, 0),
        computed(0, 3.5, 4.0, 1),
        computed(1, 3.75, 4.5, 1),
        Span(0, "evaluate", 5.0, 7.0, 2),
        computed(0, 7.25, 8.0, 2),
        computed(1, 7.25, 9.25, 2),
    ),
)


def test_an_all_reduce_goes_from_who_is_last_to_the_next_beginning() -> None:
    found = read_recorded(RING)
    assert found.reduces and found.there_s == 0.0
    first, second = found.learners
    assert first.back_s.tolist() == [0.625, 0.5, 0.625] and second.back_s.tolist() == [0.625, 0.75, 0.625]
    assert found.active_s == (4.5 - 1.0) + (9.25 - 7.25)
    assert law_of(found, ways=True).at is not None
    ways = law_of(found, ways=True).at
    assert ways is not None and ways(np.array([[1]]), np.arange(3)).tolist() == [[2.625, 1.5, 2.625]]


def test_learners_that_never_wait_have_what_lies_between_minibatches_as_their_own() -> None:
    log = log_of(
        "downpour:push=1,fetch=1",
        "joined 0 @0.0: send 0",
        "pushed 0 t1 v0 @1.5: apply t1",
        "asked 0 @1.6: send 0",
        spans=(computed(0, 0.0, 1.0, 0), computed(0, 1.25, 2.0, 0)),
        learners=1,
    )
    (one,) = read_recorded(log).learners
    assert one.seconds.tolist() == [1.0, 1.0] and one.back_s.tolist() == [0.0, 0.0]


def test_minibatches_that_were_pushed_together_have_equal_parts_of_their_time() -> None:
    log = log_of(
        "local-sgd:3",
        "joined 0 @0.0: send 0",
        "pushed 0 t1 v0 n12 @4.0: apply t1, send 0",
        "pushed 0 t2 v1 n8 @6.5: apply t2, send 0",
        spans=(computed(0, 1.0, 4.0, 0), computed(0, 4.5, 6.5, 1)),
        learners=1,
    )
    log.decisions[1]["batch"] = [[0, 0, 4], [0, 4, 4], [0, 8, 4]]  # type: ignore[index]  # a dict, as it was made
    log.decisions[2]["batch"] = [[0, 12, 4], [0, 16, 4]]  # type: ignore[index]  # the same
    (one,) = read_recorded(log).learners
    assert one.seconds.tolist() == [1.0] * 5
    assert one.back_s.tolist() == [0.75] * 5  # pushed one by one each would have had a way: the mean of the two
    assert read_recorded(log).back_s == 0.75
    ways = law_of(read_recorded(log), ways=True).at
    assert ways is not None and ways(np.array([0]), np.arange(5)).tolist() == [1.75] * 5
    assert one.starts_s.tolist() == [1.0, 0.5, 0.75]  # the last led to nothing: the mean of the others
    assert not any(one.cancelled) and len(one.cancelled) == 5


def test_times_come_in_their_order_and_begin_again_and_copies_begin_elsewhere() -> None:
    rows = [np.array([1.0, 2.0, 3.0, 4.0, 5.0]), np.array([7.0, 8.0])]
    recorded = Recorded(
        learners=tuple(Computed(row * 0, row, (False,) * len(row), row / 10, row / 20) for row in rows),
        numbers=(0, 1), there_s=0.0, active_s=1.0, stretches=1, wait_share=0.0, waste_share=0.0, reduces=False,
    )  # fmt: skip
    at = law_of(recorded).at
    assert at is not None
    assert at(np.array([[0], [1]]), np.arange(6)).tolist() == [[1, 2, 3, 4, 5, 1], [7, 8, 7, 8, 7, 8]]
    assert at(np.array([[2], [3]]), np.arange(3)).tolist() == [[4, 5, 1], [8, 7, 8]]
    starts = starts_of(recorded).at
    assert starts is not None and starts(np.array([1]), np.arange(3)).tolist() == [0.7, 0.8, 0.7]
    sends = sends_of(recorded).at
    assert sends is not None and sends(np.array([1]), np.arange(3)).tolist() == [0.35, 0.4, 0.35]


def test_a_law_that_knows_each_minibatch_comes_before_chance_and_speeds_still_count() -> None:
    law = Law(
        text="mine",
        mean_s=1.0,
        sample=lambda chance: np.full_like(chance(0), 99.0),
        by_learner=lambda learners, chance: np.full_like(chance(0), 98.0),
        at=lambda learners, minibatches: (100.0 * learners + minibatches + 1.0).astype(np.float64),
    )
    draws = Draws(law, 2, 0, speeds=(1.0, 0.5))
    assert [draws.take(0) for _ in range(600)] == [number + 1.0 for number in range(600)]
    assert [draws.take(1) for _ in range(3)] == [202.0, 204.0, 206.0]
    assert Draws(law, 1, 0, ids=(5,)).take(0) == 501.0


def test_starts_and_sends_that_were_measured_are_not_asked_for_beside_what_they_are_made_of() -> None:
    law = parse_law("constant:1")
    for starts, sends in ((law, None), (None, law)):
        for wires, cores in ((Wires(size_bytes=1), None), (None, Cores(count=1, law=law))):
            with pytest.raises(RequestError, match="the measured times in starts and sends already include"):
                Cluster(learners=1, law=law, starts=starts, sends=sends, wires=wires, cores=cores)


def test_what_has_no_times_of_its_own_is_refused() -> None:
    with pytest.raises(RequestError, match=r"virtual time.*offbeat simulate"):
        read_recorded(log_of("async", spans=ASYNC.spans, simulated=True))
    with pytest.raises(RequestError, match="nothing to replay"):
        read_recorded(log_of("async", spans=(computed(0, 0.0, 1.0, 0, cancelled=True),)))
    with pytest.raises(RequestError, match=r"decision 1 of its log: .*'whatever'"):
        read_recorded(log_of("async", "whatever 3 @1", spans=ASYNC.spans))


# --- a run, replayed from its own log -------------------------------------------------------------------------------


def go(line: str, cluster: Cluster, *, ends: bool) -> tuple[list[Update], RunLog]:
    book = (Epochs if ends else Stream)(samples=101, sizes=(4,) * cluster.learners, epochs=3)
    decisions: list[dict[str, Any]] = []

    def write(record: dict[str, Any], work: Minibatch | None) -> None:
        decisions.append(record)

    timeline = ServedTimeline(line, cluster, book, keep_spans=10**9, write=write)
    updates = list(timeline.stream())
    run = {"strategy": line, "expect": cluster.learners, "simulated": False}
    return updates, RunLog(run=run, spans=timeline.result().spans, decisions=tuple(decisions))


def unequal_ways(learners: Ints, minibatches: Ints) -> Floats:
    """To the server, from learners of which each is on another host."""
    return 0.2 * learners + 0.01 * (minibatches % 7) + 0.001


UNEQUAL = Law(text="unequal", mean_s=0.4, sample=lambda chance: np.full_like(chance(0), 0.4), at=unequal_ways)


@pytest.mark.parametrize("sends", [None, UNEQUAL], ids=["near", "far"])
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(
    "line",
    ["full-sync", "k-sync:2", "k-batch-sync:3", "async", "k-async:2", "k-batch-async:3", "ssp:1", "stale-drop:3"],
)
def test_the_same_strategy_gives_the_same_run_again(line: str, ends: bool, sends: Law | None) -> None:
    machine = Cluster(
        learners=5, law=parse_law("exp:1"), speeds=(0.5,), starts=parse_law("exp:0.1"), sends=sends, seed=2
    )
    real, log = go(line, machine, ends=ends)
    recorded = read_recorded(log)
    assert (recorded.there_s < 1e-12) == (sends is None)
    own = Cluster(learners=5, law=law_of(recorded), starts=starts_of(recorded), sends=sends_of(recorded), seed=9)
    again, _ = go(line, own, ends=ends)
    compared = len(real) * 3 // 4  # what was under way at the end of a stream is not in its log
    times = [update.at_s for update in real[:compared]]
    # Who is cancelled at the end of an epoch while its gradient is on its way is not told apart in a log.
    rel = 0.06 if ends and sends is not None and line in ("k-sync:2", "k-batch-sync:3") else 1e-9
    assert [update.at_s for update in again[:compared]] == pytest.approx(times, rel=rel)
    if ends:
        assert again[-1].at_s == pytest.approx(real[-1].at_s, rel=rel)


def test_with_latency_the_way_there_is_told_from_the_way_back() -> None:
    machine = Cluster(
        learners=3, law=parse_law("exp:1"), starts=parse_law("constant:0.2"), wires=Wires(size_bytes=0, latency_s=0.05)
    )
    real, log = go("async", machine, ends=False)
    recorded = read_recorded(log)
    assert recorded.there_s == pytest.approx(0.05) and recorded.back_s == pytest.approx(0.25)
    own = Cluster(learners=3, law=law_of(recorded), starts=starts_of(recorded), sends=sends_of(recorded))
    again, _ = go("async", own, ends=False)
    assert again[-1].at_s == pytest.approx(real[-1].at_s, rel=1e-9)
