"""Cores that are shared in turns: by hand, and in simulated runs."""

from __future__ import annotations

import math

import pytest

from offbeat.errors import RequestError
from offbeat.simulate import collective, server
from offbeat.simulate.cluster import Cluster, Wires
from offbeat.simulate.collective import Model
from offbeat.simulate.compute import Failures, parse_law
from offbeat.simulate.cores import SLICE_S, Cores, CoreScheduler, Job, shared_s
from offbeat.topology import build as topology

NOTHING = Model.even(layers=1, size_bytes=0, forward_share=1 / 3)


def ends(scheduler: CoreScheduler) -> list[tuple[float, int]]:
    found = []
    while (now := scheduler.next_end_s()) < math.inf:
        found += [(round(now, 9), job.learner) for job in scheduler.finish(now)]
    return found


def test_with_a_core_for_each_nobody_waits() -> None:
    assert shared_s([0.5, 0.2, 0.3], 3) == [0.5, 0.2, 0.3]


def test_work_shorter_than_a_slice_is_done_first_come_first_served() -> None:
    assert shared_s([0.002] * 4, 2) == [0.002, 0.002, 0.004, 0.004]


def test_long_work_takes_turns_and_ends_nearly_together() -> None:
    done = shared_s([1.0] * 4, 2)
    assert max(done) == pytest.approx(2.0)
    assert min(done) > 2.0 - 3 * SLICE_S


def test_a_short_job_overtakes_longer_ones_when_turns_are_taken() -> None:
    assert shared_s([1.0, 0.004], 1) == pytest.approx([1.004, 0.010])  # turns of 3, 3, 3, 1 ms and then the rest


def test_urgent_work_takes_the_core_of_who_has_had_it_longest() -> None:
    scheduler = CoreScheduler(2)
    scheduler.start(0.0, 0.010, Job(None, 0, 0))
    scheduler.start(0.001, 0.010, Job(None, 1, 0))
    scheduler.start(0.002, 0.001, Job(None, 2, 0, urgent=True))
    assert ends(scheduler) == [(0.003, 2), (0.011, 1), (0.011, 0)]


def test_urgent_work_waits_behind_other_urgent_work_only() -> None:
    scheduler = CoreScheduler(1)
    scheduler.start(0.0, 0.001, Job(None, 9, 0))
    for who in range(5):
        scheduler.start(0.0, 0.001, Job(None, who, 0, urgent=True))
    assert [who for _, who in ends(scheduler)] == [0, 1, 2, 3, 4, 9]


@pytest.mark.parametrize("line", ["async", "k-sync:2", "k-batch-sync:4"])
def test_who_fails_or_is_cancelled_leaves_its_core(line: str) -> None:
    cluster = Cluster(
        learners=4,
        law=parse_law("constant:1e-9"),
        failures=Failures(mean_up_s=0.05, mean_down_s=0.05),
        cores=Cores(count=2, law=parse_law("constant:0.01"), push_s=0.001, fetch_s=0.001),
        seed=3,
    )
    simulation = server.Simulation(line, cluster, 200, 0, None)
    simulation.go()
    assert simulation.tally.failed > 50 and simulation.works is not None
    assert len(simulation.scheduler) <= 2 * cluster.learners  # a minibatch, or what is sent to each


def test_work_that_is_given_up_leaves_its_core_to_another() -> None:
    scheduler = CoreScheduler(1)
    first = scheduler.start(0.0, 1.0, Job(None, 0, 0))
    scheduler.start(0.0, 0.002, Job(None, 1, 0))
    assert scheduler.give_up(0.001, first) == Job(None, 0, 0)
    assert scheduler.give_up(0.001, first) is None
    assert ends(scheduler) == [(0.003, 1)]


def machine(learners: int, cores: float, *, delay: str = "constant:1e-9", speeds: tuple[float, ...] = ()) -> Cluster:
    return Cluster(
        learners=learners,
        law=parse_law(delay),
        speeds=speeds,
        cores=Cores(count=cores, law=parse_law("constant:0.002"), push_s=0.0, fetch_s=0.0),
    )


def test_an_all_reduce_on_half_as_many_cores_takes_twice_as_long() -> None:
    uniform = topology("uniform", ranks=4)
    whole = collective.run("ring", machine(4, 4), uniform, NOTHING, updates=10, reduce_s=lambda size: 0.001)
    half = collective.run("ring", machine(4, 2), uniform, NOTHING, updates=10, reduce_s=lambda size: 0.001)
    assert whole.seconds_per_update == pytest.approx(0.003)
    assert half.seconds_per_update == pytest.approx(0.005)


def test_learners_that_sleep_leave_their_cores_to_others() -> None:
    sleepy = collective.run(
        "ring", machine(4, 2, delay="constant:0.1"), topology("uniform", ranks=4), NOTHING, updates=5
    )
    assert sleepy.seconds_per_update == pytest.approx(0.104, rel=1e-2)  # the last two begin 2 ms late


def test_a_slow_learner_sleeps_by_the_time_that_it_computed() -> None:
    slow = collective.run(
        "ring",
        machine(2, 2, speeds=(0.25, 1.0)),
        topology("uniform", ranks=2),
        NOTHING,
        updates=5,
        reduce_s=lambda size: 0.0,
    )
    assert slow.seconds_per_update == pytest.approx(0.008, rel=1e-3)


@pytest.mark.parametrize("line", ["async", "k-async:2", "k-batch-async:2", "full-sync"])
def test_a_server_applies_as_much_as_the_cores_can_compute(line: str) -> None:
    result = server.run(line, machine(4, 2), updates=400)
    assert result.minibatches_per_s == pytest.approx(2 / 0.002, rel=0.02)


def test_k_sync_cancels_those_that_have_not_had_a_core() -> None:
    result = server.run("k-sync:2", machine(4, 2), updates=50)
    assert result.seconds_per_update == pytest.approx(0.002, rel=0.05)
    assert result.cancelled >= 98


def test_a_gradient_costs_its_way_and_the_work_behind_it() -> None:
    alone = Cluster(
        learners=1,
        law=parse_law("constant:1e-9"),
        wires=Wires(size_bytes=0, latency_s=0.0005),
        cores=Cores(count=2, law=parse_law("constant:0.002"), push_s=0.0005, fetch_s=0.0005, behind_s=0.004),
    )
    # 2 ms of computing, 2 ms of way; what goes on behind has the other core
    assert server.run("async", alone, updates=100).seconds_per_update == pytest.approx(0.004, rel=0.03)
    many = Cluster(learners=8, law=alone.law, wires=alone.wires, cores=alone.cores)
    # with all cores busy an update takes its work: 2 + 1 + 4 ms, on two cores
    assert server.run("async", many, updates=400).seconds_per_update == pytest.approx(0.0035, rel=0.05)


def test_downpour_pushes_beside_computing_on_the_same_cores() -> None:
    result = server.run("downpour", machine(4, 2), updates=200)
    assert result.minibatches_per_s == pytest.approx(1000, rel=0.05)


@pytest.mark.parametrize("wrong", [{"count": 0.0}, {"push_s": -1.0}, {"behind_s": math.inf}])
def test_cores_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(RequestError, match="cores must be above 0"):
        Cores(**({"count": 2.0, "law": parse_law("exp:1")} | wrong))  # type: ignore[arg-type] # wrong on purpose
