"""All-reduce training in simulated time, and the overlap of backward and reduction."""

from __future__ import annotations

import pytest

from offbeat.errors import RequestError
from offbeat.schedules import build, price
from offbeat.simulate import collective, server
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.collective import Model, bucket_curve, iteration_s
from offbeat.simulate.compute import Failures, parse_law
from offbeat.topology import build as topology

FORWARD, BACKWARD, SIZE = 0.125, 0.245, 1_200_000_000
MODEL = Model.even(layers=64, size_bytes=SIZE, forward_share=FORWARD / (FORWARD + BACKWARD))
BAIDU = Cluster(learners=40, law=parse_law("constant:370ms"))


def test_without_overlap_times_add_up_to_770_ms() -> None:
    machine = topology("uniform:bandwidth=5.85GB/s,latency=0", ranks=40)
    assert price(build("ring", ranks=40), machine, SIZE).seconds == pytest.approx(0.4)
    result = collective.run("ring", BAIDU, machine, MODEL, updates=3)
    assert result.seconds_per_update == pytest.approx(0.770)
    assert (result.wait_share, result.staleness_mean, result.applied) == (0, 0, 120)


def test_smaller_buckets_hide_more_until_latency_dominates() -> None:
    machine = topology("uniform:bandwidth=5.85GB/s,latency=20us", ranks=40)
    points = bucket_curve("ring", FORWARD + BACKWARD, MODEL, machine)
    assert [point.buckets for point in points] == [1, 2, 4, 8, 16, 32, 64]
    times = [point.iteration_s for point in points]
    best = times.index(min(times))
    assert 0 < best < len(times) - 1
    assert times[: best + 1] == sorted(times[: best + 1], reverse=True)
    assert times[best:] == sorted(times[best:])
    for point in points:
        first = BACKWARD / point.buckets
        assert point.bound_s == pytest.approx(FORWARD + first + 0.4, abs=2e-3)
        assert point.iteration_s >= point.bound_s - 1e-12


def test_without_latency_every_smaller_bucket_is_faster() -> None:
    machine = topology("uniform:bandwidth=5.85GB/s,latency=0", ranks=40)
    times = [point.iteration_s for point in bucket_curve("ring", FORWARD + BACKWARD, MODEL, machine)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(FORWARD + BACKWARD / 64 + 0.4)


def test_a_reduction_shorter_than_backward_is_hidden_but_for_its_last_bucket() -> None:
    fast = iteration_s(
        [1.0], Model.even(layers=10, size_bytes=100, forward_share=0.0), [(0.1, 10)] * 10, lambda size: 0.01
    )
    assert fast == pytest.approx(1.0 + 0.01)


def test_buckets_are_filled_from_the_last_layer() -> None:
    model = Model(forward_share=0.5, backward=(1.0, 2.0, 1.0), size_bytes=(50, 10, 20))
    assert model.buckets(None) == [(1.0, 80)]
    assert model.buckets(25) == [(0.75, 30), (0.25, 50)]
    assert model.buckets(1) == [(0.25, 20), (0.5, 10), (0.25, 50)]


def test_everybody_waits_for_the_slowest_as_under_full_sync() -> None:
    cluster = Cluster(learners=8, law=parse_law("exp:1"), seed=3)
    machine = topology("uniform", ranks=8)
    nothing = Model.even(layers=1, size_bytes=0, forward_share=0.3)
    free = topology("uniform:latency=0", ranks=8)
    reduced = collective.run("ring", cluster, free, nothing, updates=300)
    served = server.run("full-sync", cluster, updates=300)
    assert reduced.seconds == pytest.approx(served.seconds)
    assert reduced.wait_share == pytest.approx(served.wait_share)
    assert collective.run("ring", cluster, machine, nothing, updates=300).seconds > reduced.seconds


def test_spans_show_computing_waiting_and_sending() -> None:
    cluster = Cluster(learners=3, law=parse_law("exp:1"), seed=3)
    result = collective.run("ring", cluster, topology("uniform", ranks=3), MODEL, updates=5, keep_spans=2)
    assert {span.what for span in result.spans} == {"compute", "wait", "send"}
    assert {span.version for span in result.spans} == {0, 1}


def test_what_an_all_reduce_cannot_do_is_refused() -> None:
    failing = Cluster(learners=4, law=parse_law("exp:1"), failures=Failures(mean_up_s=1, mean_down_s=1))
    with pytest.raises(RequestError, match="cannot continue after a failure of a learner"):
        collective.run("ring", failing, topology("uniform", ranks=4), MODEL, updates=1)
    for wrong in (
        {"forward_share": 1.0, "backward": (1.0,), "size_bytes": (1,)},
        {"forward_share": 0.5, "backward": (), "size_bytes": ()},
        {"forward_share": 0.5, "backward": (1.0,), "size_bytes": (1, 2)},
        {"forward_share": 0.5, "backward": (0.0,), "size_bytes": (1,)},
    ):
        with pytest.raises(RequestError):
            Model(**wrong)  # type: ignore[arg-type]  # on purpose
