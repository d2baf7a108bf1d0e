"""Training in virtual time: what is computed, when, at which weights, and how much of it is kept."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from offbeat.errors import RequestError
from offbeat.policies import POLICIES, Apply, Pushed
from offbeat.policies.events import from_text
from offbeat.predict.timelines import (
    KEEP_EVERY,
    Minibatch,
    ReducedTimeline,
    ServedTimeline,
    Step,
    Update,
    spent_of,
    train,
)
from offbeat.simulate import collective, server
from offbeat.simulate.cluster import Cluster, Wires
from offbeat.simulate.collective import Model, Rounds
from offbeat.simulate.compute import Failures, parse_law
from offbeat.simulate.result import Tally
from offbeat.simulate.sample_source import Stream, batches_of_updates
from offbeat.topology import build as topology
from predict.fakes import FakeLearner, Simulated, fake_for, one_by_one, stream_for, trained

WIDTHS = (1, 2, 7, 64, 1000)
AHEAD = (
    "full-sync", "k-sync:4", "k-batch-sync:5", "async", "k-async:3", "k-batch-async:4", "softsync:2,rate=inverse",
    "softsync:6,rate=inverse-mean", "ssp:2", "stale-drop:3", "downpour:push=2,fetch=3", "downpour:push=3,fetch=2",
    "downpour", "local-sgd:3", "local-sgd:1", "local-sgd:3,overlap", "local-sgd:1,overlap",
    "local-sgd:4,overlap,delay=2", "backup:2", "grace-sync:2,grace=0.3s", "deadline-sync:0.9s",
)  # fmt: skip
LOCK_STEP = (
    "adaptive-k:1,window=4,improvement=0.1", "async:rate=drift:0.5", "k-sync:2,rate=drift:0.5",
    "stale-drop:3,rate=drift:0.5", "downpour:push=2,fetch=3,rate=drift:0.5", "downpour:rate=drift:0.5",
    "local-sgd:3,rate=drift:0.5",
)  # fmt: skip
WIRES = Wires(size_bytes=10, learner_bytes_per_s=40.0, server_bytes_per_s=100.0, latency_s=0.3)
FAILURES = Failures(mean_up_s=12.0, mean_down_s=1.0)
PLAIN = Cluster(learners=6, law=parse_law("gamma:1,0.3"), seed=3)
CLUSTERS = {
    "gamma": PLAIN,
    "exp": replace(PLAIN, law=parse_law("exp:1")),
    "gamma and wires": replace(PLAIN, wires=WIRES),
    "pareto, wires": replace(PLAIN, law=parse_law("pareto:1.5,0.5"), wires=WIRES),
    "pareto, failures": replace(PLAIN, law=parse_law("pareto:1.5,0.5"), failures=FAILURES),
    "exp, wires, failures": replace(PLAIN, law=parse_law("exp:1"), wires=WIRES, failures=FAILURES),
}
FEWER = {name: one for name, one in CLUSTERS.items() if name not in ("exp", "gamma and wires")}
MINIBATCHES = 110


def all_in_one_go(strategy: str, cluster: Cluster, minibatches: int = MINIBATCHES) -> list[Update]:
    return list(ServedTimeline(strategy, cluster, stream_for(cluster, minibatches=minibatches)).stream())


def trained_by(learner: FakeLearner, timeline: ServedTimeline, *, width: int) -> list[Update]:
    made: list[Update] = []

    def after(update: Update) -> bool:
        made.append(update)
        return False

    train(timeline, learner, width=width, after=after)
    return made


def test_every_policy_is_tried_here() -> None:
    assert {line.split(":")[0] for line in (*AHEAD, *LOCK_STEP)} == POLICIES.keys()


# --- the order of updates and what is in them ----------------------------------------------------------------------


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("strategy", AHEAD)
def test_every_width_makes_the_updates_that_one_by_one_gives(strategy: str, cluster: Cluster) -> None:
    many = MINIBATCHES * (5 if strategy.startswith(("local-sgd:3", "local-sgd:4")) else 1)
    timeline = Simulated(ServedTimeline(strategy, cluster, stream_for(cluster, minibatches=many)))
    oracle = one_by_one(timeline, fake_for(strategy, cluster))
    assert len(oracle.made) > KEEP_EVERY and len(set(oracle.path)) == len(oracle.path)
    widest = max(len(works) for _, _, works, _, _ in oracle.made)
    for width in WIDTHS:
        learner = fake_for(strategy, cluster)
        train(timeline, learner, width=width, after=lambda update: False)
        assert learner.made == oracle.made and learner.path == oracle.path, width
        assert learner.computed == learner.applied, "what is cancelled, dropped or lost is never computed"
        assert learner.most_at_once <= max(width, widest)


@pytest.mark.parametrize("cluster", FEWER.values(), ids=FEWER)
@pytest.mark.parametrize("strategy", LOCK_STEP)
def test_every_width_makes_the_same_updates_in_lock_step(strategy: str, cluster: Cluster) -> None:
    runs = {
        width: trained(strategy, cluster, stream_for(cluster, minibatches=MINIBATCHES), width=width)
        for width in (1, 3, 64)
    }
    first, _ = runs[1]
    for width, (learner, timeline) in runs.items():
        assert timeline.lock_step
        assert learner.made == first.made and learner.path == first.path, width
        assert learner.most_at_once <= width
        assert learner.applied <= learner.computed
        assert not learner.applied & learner.forgotten
        # What is at hand is what arrived and waits, and one under way for each learner.
        assert learner.most_left <= 2 * cluster.learners


def test_the_loss_that_is_told_changes_what_happens() -> None:
    loud, timeline = trained(LOCK_STEP[0], PLAIN, stream_for(PLAIN, minibatches=300), width=7)
    silent, still = trained(LOCK_STEP[0], PLAIN, stream_for(PLAIN, minibatches=300), width=7, silent=True)
    assert timeline.policy.k > 1 and still.policy.k == 1  # type: ignore[attr-defined]  # AdaptiveK's
    assert loud.made != silent.made


def test_the_drift_that_is_told_changes_the_scales() -> None:
    learner, _ = trained("async:rate=drift:0.5", PLAIN, stream_for(PLAIN, minibatches=100), width=7)
    scales = [scale for _, _, _, (scale,), _ in learner.made]
    assert min(scales) < 0.9 and max(scales) == 1.0


@pytest.mark.parametrize("strategy", [LOCK_STEP[0], LOCK_STEP[1]])
def test_in_lock_step_no_more_is_computed_than_will_be_applied_and_is_under_way(strategy: str) -> None:
    for width in WIDTHS:
        learner, _ = trained(strategy, PLAIN, stream_for(PLAIN, minibatches=MINIBATCHES), width=width)
        assert len(learner.computed) - len(learner.applied) <= PLAIN.learners
        assert learner.calls <= len(learner.computed)


@pytest.mark.parametrize("strategy", [*AHEAD, *LOCK_STEP])
def test_the_same_arguments_give_the_same_updates_and_another_seed_others(strategy: str) -> None:
    cluster = CLUSTERS["exp, wires, failures"]
    one, other, different = (
        trained(strategy, each, stream_for(each, minibatches=60), width=7)[0]
        for each in (cluster, cluster, replace(cluster, seed=4))
    )
    assert one.made == other.made and one.path == other.path
    assert one.made != different.made


def test_the_rate_is_that_of_who_pushed_last() -> None:
    cluster = CLUSTERS["gamma and wires"]
    for strategy in ("async", "k-async:3", "k-batch-async:4", "k-sync:4", "k-batch-sync:5", "stale-drop:3"):
        decisions: list[dict[str, Any]] = []
        timeline = ServedTimeline(
            strategy,
            cluster,
            stream_for(cluster, minibatches=MINIBATCHES),
            write=lambda record, work, into=decisions: into.append(record),  # type: ignore[misc]  # mypy has no defaults of lambdas
        )
        told = [update.told for update in timeline.stream()]
        versions: dict[int, int] = {}
        expected = []
        for record in decisions:
            event = from_text(record["event"])
            if isinstance(event, Pushed):
                versions[event.ticket] = event.version
            for command in map(from_text, record["commands"]):
                if isinstance(command, Apply):
                    expected.append(versions[max(command.tickets)])
        assert told == expected


def test_a_learner_that_steps_by_itself_tells_the_version_that_it_had_when_it_pushed() -> None:
    """Not the one it has when its push arrives, nor that of the oldest weights in it."""
    cluster = CLUSTERS["gamma and wires"]
    seen = Counter[int]()
    has: dict[int, int] = {}
    for update in all_in_one_go("downpour:push=3,fetch=2", cluster, 400):
        (work,) = update.works
        for step in work.steps:
            has[work.learner] = step.fetched if step.fetched >= 0 else has[work.learner]
        assert update.told == has[work.learner]
        seen[update.told - work.version] += 1
    assert sum(many for ahead, many in seen.items() if ahead > 0) > 10


def test_a_work_can_be_computed_when_all_weights_in_it_exist() -> None:
    batch = ((0, 0, 4),)
    steps = (Step(-1, batch), Step(9, batch), Step(-1, ((0, 4, 3),)))
    work = Minibatch(1, 0, 3, steps)
    assert (work.latest, work.samples, work.batch) == (9, 11, (*batch, *batch, (0, 4, 3)))
    assert Minibatch(1, 0, 3, (Step(-1, batch),)).latest == 3


def test_an_update_is_fresh_when_it_is_the_gradient_of_one_large_batch() -> None:
    def update(*works: tuple[int, int, float], version: int = 6, steps: int = 1) -> bool:
        parts = tuple(
            Minibatch(at, at, read, (Step(read, ((0, 10 * at, samples),)),) * steps)
            for at, (read, samples, _) in enumerate(works)
        )
        spent = spent_of(Tally())
        return Update(version, 0.0, parts, tuple(scale for _, _, scale in works), 5, spent).is_fresh

    assert update((5, 4, 1.0), (5, 4, 1.0))
    assert update((5, 4, 1.6), (5, 1, 0.4)), "smaller ones weigh less"
    assert not update((5, 4, 1.0), (4, 4, 1.0)), "one is stale"
    assert not update((5, 4, 1.0), (5, 4, 0.5)), "one weighs less for its samples"
    assert not update((5, 4, 1.0), (5, 4, 1.0), steps=2), "learners have stepped by themselves"


# --- the clock -----------------------------------------------------------------------------------------------------


class InTheMiddle(ServedTimeline):
    """Ends where there are samples left, so that nobody has stepped aside."""

    @property
    def is_over(self) -> bool:
        return self.source.counts.get("applied", 0) >= 4 * MINIBATCHES


@pytest.mark.parametrize("cluster", FEWER.values(), ids=FEWER)
@pytest.mark.parametrize("strategy", [*AHEAD, LOCK_STEP[0]])
def test_samples_do_not_change_when_anything_happens(strategy: str, cluster: Cluster) -> None:
    """The plain simulator makes the same decisions at the same times, and counts the same."""
    cluster = replace(cluster, samples=(4,) * cluster.learners)
    decisions: list[dict[str, Any]] = []
    timeline = InTheMiddle(
        strategy,
        cluster,
        stream_for(cluster, minibatches=4 * MINIBATCHES),
        write=lambda record, work: decisions.append(record),
    )
    learner = fake_for(strategy, cluster, silent=True)
    updates = trained_by(learner, timeline, width=7)
    plain: list[dict[str, Any]] = []
    expected = server.run(strategy, cluster, updates=len(learner.made), write=plain.append)
    assert [(one["event"], one["commands"]) for one in decisions] == [(one["event"], one["commands"]) for one in plain]
    result = timeline.result()
    for name in ("strategy", "learners", "updates", "seconds", "applied", "samples", "cancelled", "dropped", "failed"):
        assert getattr(result, name) == getattr(expected, name), name
    for name in ("busy_share", "waste_share", "send_share", "wait_share"):
        assert getattr(result, name) == pytest.approx(getattr(expected, name)), name
    staleness = Counter(version - 1 - work.version for version, _, works, _, _ in learner.made for work in works)
    assert staleness == expected.staleness == result.staleness
    assert learner.made[-1][1] == expected.seconds
    times = [float(one["event"].split("@")[1]) for one in plain if any("apply" in said for said in one["commands"])]
    assert [at for _, at, _, _, _ in learner.made] == times
    spent = [update.spent for update in updates]
    for one, later in pairwise(spent):
        assert all(before <= after for before, after in zip(one, later, strict=True)), "what is spent only grows"
    assert spent[-1].compute_s > 0


def test_an_all_reduce_has_the_times_of_its_simulation() -> None:
    cluster = Cluster(learners=4, law=parse_law("exp:1"), seed=5, samples=(3,) * 4)
    machine = topology("uniform:bandwidth=100B/s,latency=10ms", ranks=4)
    model = Model.even(layers=3, size_bytes=60, forward_share=0.3)

    def timeline() -> ReducedTimeline:
        rounds = Rounds("ring", cluster, machine, model, bucket_bytes=20)
        return ReducedTimeline(rounds, batches_of_updates(Stream(samples=50, sizes=(3,) * 4, epochs=3)))

    runs = []
    for width in WIDTHS:
        learner, line = FakeLearner(), timeline()
        train(line, learner, width=width, after=lambda update: False)
        runs.append((learner.made, learner.path))
        assert line.result() == collective.run("ring", cluster, machine, model, updates=13, bucket_bytes=20)
        assert learner.most_kept <= 2 * KEEP_EVERY
    assert all(run == runs[0] for run in runs)
    made = runs[0][0]
    assert len(made) == 13  # 150 samples, 12 at a time
    for version, at, works, scales, told in made:
        expected = collective.run("ring", cluster, machine, model, updates=version, bucket_bytes=20)
        assert at == expected.seconds
        assert told == version - 1 and {work.version for work in works} == {told}
        assert [work.learner for work in works] == [0, 1, 2, 3][: len(works)]
        assert scales == (1.0,) * 4 if version < 13 else (1.0, 1.0)  # the last 6 samples are those of two learners


def test_an_all_reduce_weighs_by_samples_at_the_end_of_an_epoch() -> None:
    cluster = Cluster(learners=4, law=parse_law("constant:1"))
    rounds = Rounds(
        "ring", cluster, topology("uniform:latency=0s", ranks=4), Model.even(layers=1, size_bytes=0, forward_share=0.5)
    )
    pieces = [(((0, 0, 4),), ((0, 4, 4),), ((0, 8, 4),), ((0, 12, 4),)), (((0, 16, 4),), ((0, 20, 2),))]
    learner = one_by_one(ReducedTimeline(rounds, pieces), FakeLearner())
    assert [[work.samples for work in works] for _, _, works, _, _ in learner.made] == [[4] * 4, [4, 2]]
    assert learner.made[1][3] == (4 / 3, 2 / 3)


# --- looking ahead ---------------------------------------------------------------------------------------------------


def test_what_is_cancelled_or_dropped_is_there_but_is_never_computed() -> None:
    for strategy, cluster in (("k-sync:2", PLAIN), ("k-batch-sync:3", PLAIN), ("stale-drop:2", CLUSTERS["exp"])):
        learner, timeline = trained(strategy, cluster, stream_for(cluster, minibatches=MINIBATCHES), width=64)
        result = timeline.result()
        assert result.cancelled + result.dropped > 20
        assert len(learner.computed) == len(learner.applied) == result.applied


def test_minibatches_whose_weights_exist_are_computed_together() -> None:
    cluster = Cluster(learners=32, law=parse_law("gamma:1,0.2"), seed=1)
    learner, _ = trained("async", cluster, stream_for(cluster, minibatches=960), width=16)
    assert learner.most_at_once == 16
    assert learner.calls < 960 / 10
    assert trained("async", cluster, stream_for(cluster, minibatches=960), width=1)[0].calls == 960


def test_training_ends_when_it_is_told_to() -> None:
    for strategy in ("async", "adaptive-k:2"):
        learner = fake_for(strategy, PLAIN)
        timeline = ServedTimeline(strategy, PLAIN, stream_for(PLAIN, minibatches=MINIBATCHES))
        train(timeline, learner, width=7, after=lambda update: update.version == 20)
        assert learner.version == 20
        assert len(learner.computed) <= 20 * 6 + 7 + PLAIN.learners


@pytest.mark.parametrize("width", [0, -1])
def test_less_than_one_minibatch_at_a_time_is_refused(width: int) -> None:
    with pytest.raises(RequestError, match=f"at least 1 minibatch must be computed at a time; got {width}"):
        trained("async", PLAIN, stream_for(PLAIN, minibatches=9), width=width)


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["async", "k-batch-async:10", "async:rate=drift:0.5"])
def test_versions_that_nobody_works_on_are_not_kept(strategy: str) -> None:
    """Also not with a learner that is a thousand times slower, which needs one very old version."""
    cluster = Cluster(learners=200, law=parse_law("pareto:1.5,1"), seed=2, speeds=(0.001,))
    many = 1500 if strategy != "k-batch-async:10" else 5000
    for width in (1, 16):
        learner, timeline = trained(strategy, cluster, stream_for(cluster, minibatches=many), width=width)
        held = len(timeline.policy.held)
        most = cluster.learners + held + 2 * KEEP_EVERY + 4 * width
        assert learner.most_kept <= most < 400 < learner.version
        assert 0 in learner.weights, "the slow one has not pushed yet"


def test_a_late_gradient_that_is_asked_about_has_its_weights() -> None:
    """In lock step a policy asks about each that arrives, also about one that it has cancelled."""
    slow = replace(PLAIN, wires=Wires(size_bytes=0, latency_s=5.0))
    for strategy in ("k-sync:2,rate=drift:0.5", "k-batch-sync:3,rate=drift:0.5"):
        learner, timeline = trained(strategy, slow, stream_for(slow, minibatches=200), width=3)
        assert timeline.result().dropped > KEEP_EVERY
        assert learner.forgotten
        assert learner.most_kept <= 3 * slow.learners + KEEP_EVERY + 1


# --- staleness and the learning rate ---------------------------------------------------------------------------------


def peaks(strategy: str, law: str, learners: int, slope: float, updates: int) -> tuple[float, float, list[Update]]:
    """The largest weights, in the middle and at the end of training on the quadratic without noise."""
    cluster = Cluster(learners=learners, law=parse_law(law), seed=1)
    learner = FakeLearner(slope=slope, noise=0.0)
    timeline = ServedTimeline(strategy, cluster, Stream(samples=updates, sizes=(1,) * learners, epochs=1))
    made = trained_by(learner, timeline, width=16)
    size = [abs(weights) for weights in learner.path]
    window = 4 * learners + 4  # more than a half period of the slowest swing, which is 2 * staleness + 1 updates
    middle = updates // 2
    return max(size[middle - window : middle]), max(size[-window:]), made


@pytest.mark.parametrize("staleness", [0, 1, 3, 7, 15, 29])
def test_constant_staleness_is_stable_up_to_the_bound_of_the_quadratic(staleness: int) -> None:
    bound = 2 * math.sin(math.pi / (2 * (2 * staleness + 1)))
    updates = 120 * (staleness + 1)
    middle, end, made = peaks("async", "constant:1", staleness + 1, 0.97 * bound, updates)
    assert {update.version - 1 - work.version for update in made[staleness:] for work in update.works} == {staleness}
    assert end < 0.8 * middle < 1
    middle, end, _ = peaks("async", "constant:1", staleness + 1, 1.03 * bound, updates)
    assert end > 1.25 * middle


def test_dividing_by_staleness_keeps_30_softsync_stable_where_the_constant_rate_is_not() -> None:
    middle, end, _ = peaks("softsync:30", "gamma:1,0.2", 30, 0.3, 1200)
    assert end > 1000 * middle
    middle, end, _ = peaks("softsync:30,rate=inverse", "gamma:1,0.2", 30, 0.3, 1200)
    assert end < 0.1 * middle < 1


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_run_that_stands_still_says_so() -> None:
    """Nobody is ever up long enough for a minibatch of a second."""
    cluster = Cluster(learners=2, law=parse_law("constant:1"), failures=Failures(mean_up_s=0.01, mean_down_s=0.01))
    timeline = ServedTimeline("async", cluster, stream_for(cluster, minibatches=9))
    timeline.patience = 1000
    with pytest.raises(RequestError, match="the simulation makes no progress at update 0"):
        list(timeline.stream())
