"""What runs were like: where logs are odd, and what theory says. The plain numbers are in test_golden.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offbeat.policies.staleness import EXPONENTIAL
from offbeat.report.facts import Facts, facts_of, span_seconds, staleness_theory, straggler
from offbeat.report.summary import summary
from offbeat.runs.log import Span
from offbeat.runs.run_record import read_run
from offbeat.simulate import server as simulator
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.compute import parse_law
from report.handmade import any_run, config, decision, evaluation, span, write_run


def facts(folder: Path, **given: Any) -> Facts:
    return facts_of(read_run(any_run(folder, **given)))


def test_a_learners_shares_add_up_to_one(tmp_path: Path) -> None:
    for one in facts(tmp_path / "a").by_learner:
        assert sum(share or 0.0 for share in one.shares() or ()) == pytest.approx(1, abs=1e-12)


def test_a_missing_decision_makes_the_numbers_inexact_and_that_is_said(tmp_path: Path) -> None:
    folder = any_run(tmp_path / "a")
    lines = (folder / "log.jsonl").read_text().splitlines(keepends=True)
    (folder / "log.jsonl").write_text("".join([*lines[:2], "{\n", *lines[3:]]))
    found = facts_of(read_run(folder))
    assert found.problems == ("decisions are missing from the log, so staleness and gradient counts are not exact",)
    assert found.applied == 3 and all(age >= 0 for age, _ in found.staleness)


def test_an_update_of_gradients_that_never_came_is_inexact_too(tmp_path: Path) -> None:
    found = facts(tmp_path / "a", log=[decision("pushed 0 t1 v0 n8 @1.0", "apply t1 t9", "drop t7")])
    assert found.problems and (found.applied, found.dropped) == (1, 0)


def test_versions_and_tickets_of_a_server_begin_anew_after_a_resume(tmp_path: Path) -> None:
    folder = any_run(tmp_path / "a", metrics=[evaluation(8, 6.0, 0.5, samples=64)])
    before = facts_of(read_run(folder))
    (folder / "log.2.jsonl").write_bytes((folder / "log.jsonl").read_bytes())
    found = facts_of(read_run(folder))
    assert found.staleness == tuple((age, 2 * many) for age, many in before.staleness) and found.problems == ()
    assert (found.updates, found.seconds, found.applied) == (8, 6.0, 8)
    assert found.by_learner[0].compute_s == 2 * before.by_learner[0].compute_s
    (folder / "metrics.jsonl").unlink()
    found = facts_of(read_run(folder))
    assert (found.updates, found.seconds, found.samples) == (8, 6.0, 64)


def test_updates_that_a_resume_made_again_are_told(tmp_path: Path) -> None:
    """A server has made 4 updates in each segment and stands at 7; an all-reduce computes version 1 in both."""
    folder = any_run(tmp_path / "a", metrics=[evaluation(7, 6.0, 0.5, samples=56)])
    (folder / "log.2.jsonl").write_bytes((folder / "log.jsonl").read_bytes())
    said = (
        "the run was resumed and repeated 1 update; the counts of gradients and the times of the learners "
        "include both attempts"
    )
    assert (facts_of(read_run(folder)).notes, facts_of(read_run(folder)).problems) == ((said,), ())
    spans = [span(0, "compute", 0.0, 1.0, 0), span(0, "compute", 1.0, 2.0, 1)]
    folder = write_run(tmp_path / "b", config=config("ring", 1), log=spans)
    write_run(folder, log=spans[1:], segment=".2")
    assert (facts_of(read_run(folder)).notes, facts_of(read_run(folder)).problems) == ((said,), ())


def test_versions_of_an_all_reduce_go_on_after_a_resume(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", config=config("ring", 1), log=[span(0, "compute", 0.0, 1.0, 0)])
    write_run(folder, log=[span(0, "compute", 0.0, 2.0, 1)], segment=".2")
    found = facts_of(read_run(folder))
    assert (found.updates, found.seconds, found.samples, found.staleness) == (2, 3.0, None, ((0, 2),))


def test_a_dropped_push_throws_its_own_minibatch_away_and_no_other(tmp_path: Path) -> None:
    """Learner 0 computes twice at version 0 (1 s and 2 s); the second push is dropped, and so is one never computed."""
    log = [
        span(0, "compute", 0.0, 1.0, 0),
        decision("pushed 0 t1 v0 n8 @1.0", "apply t1"),
        span(0, "compute", 1.0, 3.0, 0),
        decision("pushed 0 t2 v0 n8 @3.0", "drop t2"),
        span(0, "compute", 3.0, 7.0, 0),
        decision("pushed 0 t3 v0 n8 @7.0", "apply t3"),
        decision("pushed 1 t4 v0 n8 @7.0", "drop t4"),
    ]
    found = facts(tmp_path / "a", log=log)
    assert (found.by_learner[0].compute_s, found.by_learner[0].thrown_away_s, found.dropped) == (5.0, 2.0, 2)


def test_two_dropped_pushes_of_one_version_throw_two_minibatches_away(tmp_path: Path) -> None:
    """Both arrive when both have ended."""
    log = [span(0, "compute", 0.0, 1.0, 0), span(0, "compute", 1.0, 3.0, 0)]
    log += [decision(f"pushed 0 t{at} v0 n8 @4.0", f"drop t{at}") for at in (1, 2)]
    assert facts(tmp_path / "a", log=log).by_learner[0].thrown_away_s == 3.0


def test_evaluation_is_no_training_time_wherever_it_lies() -> None:
    work = [Span(0, "compute", 1.0, 2.0, 0), Span(0, "compute", 8.0, 9.0, 1)]
    assert span_seconds(work) == 8.0
    rests = [Span(0, "evaluate", 3.0, 5.0, 1), Span(1, "evaluate", 4.0, 6.0, 1), Span(0, "evaluate", 8.5, 20.0, 2)]
    assert span_seconds([*work, *rests]) == 4.5
    assert span_seconds(rests) is None


def test_a_straggler_must_be_slow_all_the_time(tmp_path: Path) -> None:
    def run(slow: list[float], name: str) -> Facts:
        log = [span(0, "compute", 4.0 * at, 4.0 * at + 1, at) for at in range(4)]
        log += [span(1, "compute", 4.0 * at, 4.0 * at + 1, at) for at in range(4)]
        log += [span(2, "compute", 4.0 * at, 4.0 * at + time, at) for at, time in enumerate(slow)]
        return facts(tmp_path / name, log=log)

    slow = straggler(run([3.0, 3.0, 2.0, 4.0], "always"))
    assert slow is not None and (slow.learner, slow.factor, slow.others_s) == (2, 3.0, 1.0)
    assert straggler(run([3.0, 3.0, 1.0, 4.0], "not in the third quarter")) is None
    assert straggler(run([1.25, 1.25, 1.25, 1.25], "a little")) is None
    assert straggler(run([1.5, 1.5, 1.5, 1.5], "enough")) is not None
    assert straggler(run([], "one fewer")) is None


def test_a_learner_that_is_always_cancelled_is_not_taken_for_a_fast_one(tmp_path: Path) -> None:
    """Three of its four were cancelled after 2 s, and the one that was let finish took 5 s: typically that."""
    log = [span(0, "compute", 5.0 * at, 5.0 * at + 1, at) for at in range(4)]
    log += [span(1, "compute", 5.0 * at, 5.0 * at + 2, at, cancelled=True) for at in range(3)]
    log += [span(1, "compute", 15.0, 20.0, 3)]
    assert facts(tmp_path / "a", log=log).by_learner[1].typical_s == 5.0


def test_energy_counts_only_if_it_was_measured_all_the_time(tmp_path: Path) -> None:
    assert facts(tmp_path / "a").energy.why_not == "the run has no energy.json"
    no = {"seconds": 1.0, "joules": None, "not_measured": ["RAPL cannot be read"]}
    assert facts(tmp_path / "b", energy=no).energy.why_not == "RAPL cannot be read"
    folder = any_run(tmp_path / "c", energy={"seconds": 1.0, "joules": 5.0})
    assert facts_of(read_run(folder)).energy.joules == 5.0
    write_run(folder, log=[span(0, "compute", 0.0, 1.0)], segment=".2")
    found = facts_of(read_run(folder)).energy
    assert found.joules is None and found.why_not == "it was measured in 1 of the 2 parts of the run"
    write_run(folder, energy={"seconds": 1.0, "joules": 7.0}, segment=".2")
    assert facts_of(read_run(folder)).energy.joules == 12.0


def test_what_is_not_known_is_none(tmp_path: Path) -> None:
    found = facts_of(read_run(write_run(tmp_path / "a", config={"sync": 7, "learners": "two"})))
    assert (found.strategy, found.family, found.learners, found.updates, found.seconds) == ("", "", None, None, None)
    assert (found.throughput, found.staleness_mean, found.staleness_std, found.last.accuracy) == (None,) * 4
    assert (
        found.not_computing_share,
        found.cost(found.seconds, 1.0),
        found.joules_per_sample,
        found.seconds_to(0.5),
    ) == (None,) * 4
    assert replace(found, updates=0, seconds=0.0, samples=0).throughput is None


# --- how a run ended ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epoch", "stop_at", "ended"),
    [
        (100, 0.0, ""), (16, 0.0, "stopped after epoch 16 of 100"), (16, 0.5, ""),
        (16, 0.75, "stopped after epoch 16 of 100"), (100.002, 0.0, ""), (None, 0.0, ""),
    ],
)  # fmt: skip
def test_a_run_that_stopped_before_its_epochs_and_its_goal_is_stopped_early(
    tmp_path: Path, epoch: float | None, stop_at: float, ended: str
) -> None:
    told = config("async", 2, epochs=100, stop_at=stop_at)
    found = facts(tmp_path / "a", config=told, metrics=[evaluation(4, 3.0, 0.5, epoch=epoch)] * 2)
    assert (found.ended, found.finished) == (ended, not ended)


def test_a_run_is_unfinished_so_far_until_its_last_log_is_whole(tmp_path: Path) -> None:
    folder = any_run(tmp_path / "a")
    (folder / "log.jsonl").rename(folder / "log.jsonl.unfinished")
    assert facts_of(read_run(folder)).ended == "so far"
    write_run(folder, log=[span(0, "compute", 0.0, 1.0)], segment=".2")  # it was gone on with, to the end
    found = read_run(folder)
    assert found.finished and found.problems == () and facts_of(found).ended == ""


def test_samples_never_applied_are_not_guessed_from_a_log(tmp_path: Path) -> None:
    log = [span(0, "compute", 0.0, 1.0), decision("pushed 0 t1 v0 n8 @1.0", "drop t1")]
    cut = [*log, span(1, "compute", 0.0, 1.0, cancelled=True)]

    def never(name: str, log: list[dict[str, Any]], **more: Any) -> int | None:
        folder = write_run(tmp_path / name, config=config("async", 2) | more, head={"strategy": "async"}, log=log)
        return facts_of(read_run(folder)).samples_dropped

    assert never("again", log, cancelled="again") is None and never("drop", log, cancelled="drop") == 8
    assert never("cut", cut, cancelled="drop") is None  # of a cancelled one the log does not say how many
    kept = [span(0, "compute", 0.0, 1.0), decision("pushed 0 t1 v0 n8 @1.0", "apply t1")]
    assert never("none", kept, cancelled="again") == 0


def test_energy_of_stretches_with_different_sources_is_measured_in_part(tmp_path: Path) -> None:
    folder = any_run(tmp_path / "a", energy={"seconds": 1.0, "joules": 5.0, "sources": [{"name": "x"}]})
    write_run(folder, log=[], energy={"seconds": 1.0, "joules": 7.0, "sources": [{"name": "y"}, 3, {}]}, segment=".2")
    found = facts_of(read_run(folder)).energy
    assert (found.joules, found.sources) == (12.0, ("x", "y")) and "some parts" in found.why_not


# --- minibatches --------------------------------------------------------------------------------------------------


def pushed(learner: int, ticket: int, at_s: float, *stretches: int) -> dict[str, Any]:
    batch = {"batch": [[0, 0, many] for many in stretches]} if stretches else {}
    return decision(f"pushed {learner} t{ticket} v0 n8 @{at_s}") | batch


@pytest.mark.parametrize("line", ["local-sgd:4", "downpour:push=4,fetch=4"])
def test_a_span_of_several_minibatches_counts_as_so_many(tmp_path: Path, line: str) -> None:
    """A real log: one span a push. The last push of learner 0 holds one minibatch; that of learner 1 does not say."""
    log = [
        span(0, "compute", 0.0, 8.0), pushed(0, 1, 8.0, 8, 8, 8, 8),
        span(0, "compute", 8.0, 11.0), pushed(0, 2, 11.5, 8),
        span(1, "compute", 0.0, 4.0), pushed(1, 3, 4.0),
    ]  # fmt: skip
    first, second = facts(tmp_path / "a", strategy=line, log=log).by_learner
    assert (first.minibatches, first.compute_mean_s, first.compute_median_s) == (5, 2.2, 2.5)
    assert (second.minibatches, second.typical_s, second.compute_s) == (4, 1.0, 4.0)


@pytest.mark.parametrize("line", ["local-sgd:4", "downpour:push=4,fetch=4"])
def test_the_simulator_logs_each_minibatch_and_so_it_is_counted(tmp_path: Path, line: str) -> None:
    log = [span(0, "compute", float(at), at + 1.0) for at in range(6)]  # two more are not pushed yet
    (found,) = facts(tmp_path / "a", strategy=line, log=[*log, pushed(0, 1, 4.0, 8, 8, 8, 8)]).by_learner
    assert (found.minibatches, found.typical_s) == (6, 1.0)


def test_with_one_minibatch_a_push_a_batch_in_two_stretches_is_one(tmp_path: Path) -> None:
    log = [span(0, "compute", 0.0, 8.0), pushed(0, 1, 8.0, 4, 4)]
    (found,) = facts(tmp_path / "a", strategy="async", log=log).by_learner
    assert (found.minibatches, found.typical_s) == (1, 8.0)


def test_a_learner_that_never_finished_is_a_straggler_by_what_it_was_let(tmp_path: Path) -> None:
    """The others finish 12 minibatches while it is let compute: it takes 12 times as long, or more."""
    log = [span(learner, "compute", float(at), at + 1.0, at) for learner in (0, 1) for at in range(48)]
    log += [span(2, "compute", 12.0 * at, 12.0 * at + 12, at, cancelled=True) for at in range(4)]
    found = facts(tmp_path / "a", strategy="k-batch-sync:24", learners=3, log=log)
    assert straggler(found) == (2, 12.0, 12.0, 1.0, True)
    assert found.by_learner[2].typical_s is None and found.by_learner[0].at_least_s is None
    said = summary([read_run(tmp_path / "a")], [found], (), ())
    assert any("its minibatches take at least 12.0x as long as the others' (none was finished within 12 s" in one
               for one in said)  # fmt: skip
    short = [span(0, "compute", float(at), at + 1.0, at) for at in range(4)]
    short += [span(1, "compute", float(at), at + 1.0, at, cancelled=True) for at in range(4)]
    alike = facts(tmp_path / "b", log=short)
    assert straggler(alike) is None  # it was let no longer than the other takes: how slow it is cannot be known
    said = summary([read_run(tmp_path / "b")], [alike], (), ())
    assert "Learner 1 of async with 2 learners finished no minibatch: all 4 minibatches were cancelled." in said


# --- theory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "learners", "mean"),
    [
        ("async", 8, 7.0), ("k-async:1", 8, 7.0), ("k-batch-async:1", 8, 7.0), ("k-async:4", 8, 1.0),
        ("k-async:4,rate=inverse", 8, 1.0), ("k-batch-async:4", 8, 1.75), ("softsync:3", 8, 3.5),
        ("softsync:8", 8, 7.0),
        ("full-sync", 8, 0.0), ("k-sync:3", 8, 0.0), ("k-batch-sync:3", 8, 0.0), ("local-sgd:4", 8, 0.0),
        ("ring", 8, 0.0), ("torus:2x4", 8, 0.0), ("native", 8, 0.0), ("async", 1, 0.0),
        ("downpour", 8, None), ("ssp:2", 8, None), ("stale-drop:3", 8, None), ("adaptive-k:2", 8, None),
        ("k-async:9", 8, None), ("nonsense", 8, None), ("", 8, None), ("<b>:", 8, None), ("async", 0, None),
    ],
)  # fmt: skip
def test_the_mean_staleness_is_that_of_the_literature(line: str, learners: int, mean: float | None) -> None:
    theory = staleness_theory(line, learners)
    assert (None if theory is None else theory.mean) == mean


def test_the_law_of_async_adds_up_and_has_its_mean() -> None:
    theory = staleness_theory("async", 4)
    assert theory is not None and theory.given == EXPONENTIAL and theory.share(1) == 0.25 * 0.75
    shares = [theory.share(age) or 0.0 for age in range(400)]
    assert theory.share_from is not None
    assert sum(shares) == pytest.approx(1) and theory.share_from(2) == pytest.approx(1 - shares[0] - shares[1])
    assert sum(age * share for age, share in enumerate(shares)) == pytest.approx(theory.mean)
    sync = staleness_theory("ring", 4)
    assert (
        sync is not None
        and sync.share_from is not None
        and (sync.share(0), sync.share(1), sync.share_from(1)) == (1.0, 0.0, 0.0)
    )


@pytest.mark.parametrize("line", ["async", "k-async:2", "k-batch-async:3", "softsync:2"])
def test_the_simulator_agrees_with_the_theory(line: str) -> None:
    result = simulator.run(line, Cluster(learners=4, law=parse_law("exp:1"), seed=3), updates=20_000)
    theory = staleness_theory(line, 4)
    assert theory is not None and result.staleness_mean == pytest.approx(theory.mean, rel=0.02)


@pytest.mark.parametrize(
    ("line", "learners"), [("k-batch-async:2", 4), ("k-async:3", 8), ("async", 6), ("softsync:2", 9)]
)
def test_the_simulator_spreads_staleness_as_theory_says(line: str, learners: int) -> None:
    theory = staleness_theory(line, learners)
    assert theory is not None
    simulated = simulator.run(line, Cluster(learners=learners, law=parse_law("exp:1")), updates=30_000)
    many = sum(simulated.staleness.values())
    for age in range(5):
        assert simulated.staleness[age] / many == pytest.approx(theory.share(age), abs=0.01)
    assert sum(age * (theory.share(age) or 0.0) for age in range(2000)) == pytest.approx(theory.mean)
