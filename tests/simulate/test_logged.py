"""A run's log gives its updates back, and a log that was changed is found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offbeat.errors import LogError, ReplayError, RequestError
from offbeat.predict.timelines import KEEP_EVERY, LoggedTimeline, Minibatch, ServedTimeline, Update, train
from offbeat.runs.log import RunLog, read_log, write_log
from offbeat.simulate.cluster import Cluster, Wires
from offbeat.simulate.compute import Failures, parse_law
from offbeat.simulate.result import Result
from offbeat.simulate.sample_source import Epochs
from predict.fakes import FakeLearner, fake_for, stream_for

LINES = (
    "full-sync", "k-sync:4", "k-batch-sync:5", "async", "k-async:3", "k-batch-async:4", "softsync:2,rate=inverse",
    "ssp:2", "stale-drop:3", "adaptive-k:1,window=4,improvement=0.1", "async:rate=drift:0.5",
    "grace-sync:2,grace=0.3s", "deadline-sync:0.9s",
)  # fmt: skip
WIRED = Cluster(
    learners=6,
    law=parse_law("exp:1"),
    seed=3,
    wires=Wires(size_bytes=10, learner_bytes_per_s=40.0, server_bytes_per_s=100.0, latency_s=0.3),
)
FAILING = replace(WIRED, failures=Failures(mean_up_s=12.0, mean_down_s=1.0))


def logged(strategy: str, cluster: Cluster, book: Epochs) -> tuple[RunLog, FakeLearner, Result]:
    """A run in virtual time, its log, and what came of it."""
    decisions: list[dict[str, Any]] = []

    def write(record: dict[str, Any], work: Minibatch | None) -> None:
        assert (work is not None) == record["event"].startswith("pushed") == ("batch" in record)
        decisions.append(record)

    timeline = ServedTimeline(strategy, cluster, book, write=write)
    learner = fake_for(strategy, cluster)
    train(timeline, learner, width=7, after=lambda update: False)
    run = {"strategy": strategy, "expect": cluster.learners, "simulated": True}
    return RunLog(run=run, decisions=tuple(decisions)), learner, timeline.result()


def replayed(log: RunLog, *, width: int = 7) -> tuple[FakeLearner, LoggedTimeline]:
    learner, timeline = FakeLearner(), LoggedTimeline(log)
    train(timeline, learner, width=width, after=lambda update: False)
    return learner, timeline


def without_steps(learner: FakeLearner) -> list[Any]:
    """Of each update what a log can tell; a work's number is its own affair."""
    return [
        (version, at, [(work.learner, work.version, work.batch) for work in works], scales, told)
        for version, at, works, scales, told in learner.made
    ]


@pytest.mark.parametrize("strategy", LINES)
def test_a_log_gives_the_updates_of_its_run_back(strategy: str) -> None:
    for cluster in (WIRED, FAILING):  # 180 minibatches: no K of these lines leaves a rest that is never applied
        log, learner, result = logged(strategy, cluster, stream_for(cluster, minibatches=180))
        for width in (1, 64):
            again, timeline = replayed(log, width=width)
            assert without_steps(again) == without_steps(learner)
            assert again.path == learner.path
            assert again.computed == again.applied
            assert again.most_kept < 6 + 7 + 2 * KEEP_EVERY + 4 * width
        told = timeline.result()
        for name in ("strategy", "learners", "updates", "seconds", "applied", "samples", "dropped", "staleness"):
            assert getattr(told, name) == getattr(result, name), name


def test_a_log_counts_what_was_cancelled_and_stopped() -> None:
    log, _, result = logged("k-sync:2", replace(WIRED, wires=None), stream_for(WIRED, minibatches=140))
    _, timeline = replayed(log)
    assert abs(timeline.result().cancelled - result.cancelled) <= 4  # the last update's may not have been told
    assert timeline.result().cancelled > 20


@pytest.mark.parametrize("strategy", ["full-sync", "k-sync:4", "k-batch-sync:5", "async", "k-async:3", "ssp:0"])
def test_a_log_gives_epochs_back(strategy: str) -> None:
    log, learner, _ = logged(strategy, WIRED, Epochs(samples=103, sizes=(4,) * 6, epochs=3))
    assert any(record["event"].startswith("left") for record in log.decisions)
    again, _ = replayed(log)
    assert without_steps(again) == without_steps(learner) and again.path == learner.path


def test_a_log_that_was_on_disk_gives_the_same(tmp_path: Path) -> None:
    log, learner, _ = logged("softsync:2,rate=inverse", WIRED, stream_for(WIRED, minibatches=60))
    write_log(tmp_path / "log.jsonl", log)
    again, _ = replayed(read_log(tmp_path / "log.jsonl"))
    assert without_steps(again) == without_steps(learner) and again.path == learner.path


def test_a_log_of_a_real_run_begins_when_the_coordinator_says_so() -> None:
    """There the deadline is the coordinator's, who writes a tick when it begins with those who are there."""
    decisions = (
        {"event": "joined 0 @0.1", "commands": []},
        {"event": "tick @0.2", "commands": ["send 0"]},
        {"event": "pushed 0 t1 v0 n4 @1.0", "commands": ["apply t1", "send 0"], "batch": [[0, 0, 4]]},
    )
    run = {"strategy": "async", "expect": 2}
    (update,) = LoggedTimeline(RunLog(run=run | {"simulated": False}, decisions=decisions)).stream()
    assert (update.version, update.at_s, update.told, update.works[0].batch) == (1, 1.0, 0, ((0, 0, 4),))
    with pytest.raises(ReplayError, match=r"decision 2, 'tick @0\.2': the log has \['send 0'\], the policy says \[\]"):
        list(LoggedTimeline(RunLog(run=run | {"simulated": True}, decisions=decisions)).stream())


# --- a log that is not whole -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole() -> RunLog:
    return logged("k-async:3", WIRED, stream_for(WIRED, minibatches=40))[0]


def changed(log: RunLog, number: int, **fields: Any) -> RunLog:
    """One decision with other fields; a field that is None is left out."""
    record = {name: one for name, one in (dict(log.decisions[number]) | fields).items() if one is not None}
    return replace(log, decisions=(*log.decisions[:number], record, *log.decisions[number + 1 :]))


def first(log: RunLog, what: str, *, saying: str = "") -> int:
    return next(
        number
        for number, record in enumerate(log.decisions)
        if record["event"].startswith(what) and (not saying or any(saying in one for one in record["commands"]))
    )


def refused(log: RunLog) -> str:
    with pytest.raises(ReplayError) as caught:
        list(LoggedTimeline(log).stream())
    return str(caught.value)


def test_the_whole_log_is_taken(whole: RunLog) -> None:
    assert len(list(LoggedTimeline(whole).stream())) > 10


def test_a_command_that_was_changed_is_found(whole: RunLog) -> None:
    at = first(whole, "pushed", saying="apply")
    record: Mapping[str, Any] = whole.decisions[at]
    commands = [record["commands"][0] + " *0.5 *1.0 *1.0", *record["commands"][1:]]
    for logged in (commands, []):
        said = f"the log has {logged}, the policy says {record['commands']}"
        assert refused(changed(whole, at, commands=logged)) == f"decision {at + 1}, '{record['event']}': {said}"
    said = f"expected an 'event' and its 'commands'; got '{record['event']}' and None"
    assert refused(changed(whole, at, commands=None)) == f"decision {at + 1}: {said}"


def test_samples_that_are_missing_are_found(whole: RunLog) -> None:
    at = first(whole, "pushed")
    text = f"decision {at + 1}, '{whole.decisions[at]['event']}': its samples are not in the log"
    assert refused(changed(whole, at, batch=None)) == text
    assert refused(changed(whole, at, batch=[])) == text


def test_samples_of_what_was_dropped_may_be_missing() -> None:
    """A learner that was cancelled has lost its lease when its gradient comes late."""
    log, _, _ = logged("k-sync:2", WIRED, stream_for(WIRED, minibatches=60))
    updates: list[Update] = list(LoggedTimeline(log).stream())
    late = changed(log, first(log, "pushed", saying="drop"), batch=[])
    assert list(LoggedTimeline(late).stream()) == updates


def test_an_event_that_cannot_have_been_or_is_none_is_found(whole: RunLog) -> None:
    at = first(whole, "pushed")
    without = replace(whole, decisions=(*whole.decisions[:3], *whole.decisions[4:]))
    assert "the policy says []" in refused(without) or "is impossible" in refused(without)
    assert "is impossible" in refused(changed(whole, at, event="pushed 0 t1 v77 n4 @1.0"))
    assert "'apply t1' is not an event" in refused(changed(whole, at, event="apply t1"))
    assert "unknown event" in refused(changed(whole, at, event="pulled 1"))
    assert f"decision {at + 1}: " in refused(changed(whole, at, event=None))


# --- what no log can tell --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["local-sgd:3", "downpour", "downpour:push=2,fetch=3"])
def test_learners_that_step_by_themselves_are_refused(strategy: str, whole: RunLog) -> None:
    log = replace(whole, run={**whole.run, "strategy": strategy})
    with pytest.raises(RequestError, match=f"'{strategy}': the log does not have the steps of learners between pushes"):
        LoggedTimeline(log)


def test_a_log_without_decisions_is_refused(whole: RunLog) -> None:
    for run, decisions in (
        (whole.run, ()),
        ({"strategy": "async"}, whole.decisions),
        ({"expect": 6}, whole.decisions),
    ):
        with pytest.raises(LogError, match=r"it has no decisions|not the log of a policy"):
            LoggedTimeline(RunLog(run=run, decisions=decisions))
