"""Peers in simulated time: the staleness of theory, what a network and the window do, and the same run every time."""

from __future__ import annotations

import pytest

from offbeat.errors import RequestError
from offbeat.simulate.cluster import Cluster, Wires
from offbeat.simulate.compute import Failures, parse_law
from offbeat.simulate.peer_run import run
from offbeat.simulate.server import run as run_server

ASYNC = "all-to-all:async"


def cluster(learners: int, law: str = "exp:1", **more: object) -> Cluster:
    return Cluster(learners=learners, law=parse_law(law), **more)  # type: ignore[arg-type] # any of its fields


@pytest.mark.parametrize("learners", [2, 4, 8])
@pytest.mark.parametrize("law", ["exp:1", "gamma:1,0.25"])
def test_mean_staleness_is_that_of_async_where_links_take_no_time(learners: int, law: str) -> None:
    """P - 1, but for the first minibatches after a meeting, which are fresher: here there is one in 20,000 updates."""
    found = run(f"{ASYNC},average=1000000,window=1000", cluster(learners, law), updates=20_000)
    assert found.staleness_mean == pytest.approx(learners - 1, rel=0.01)
    assert found.wait_share == 0
    served = run_server("async", cluster(learners, law), updates=20_000)
    assert found.minibatches_per_s == pytest.approx(served.minibatches_per_s, rel=0.001)


def test_meetings_cost_the_time_of_the_slowest_and_make_gradients_fresher() -> None:
    often, seldom = (run(f"{ASYNC},average={every}", cluster(8), updates=8_000) for every in (16, 1_000))
    assert often.wait_share > 2 * seldom.wait_share
    assert often.staleness_mean < seldom.staleness_mean < 7


def test_links_that_are_slow_make_gradients_staler() -> None:
    free = run(f"{ASYNC},window=1000", cluster(4, "exp:1"), updates=2_000)
    slow = Wires(size_bytes=100_000_000, learner_bytes_per_s=1e9, latency_s=0.01)
    late = run(f"{ASYNC},window=1000", cluster(4, "exp:1", wires=slow), updates=2_000)
    coded = run(f"{ASYNC},window=1000,codec=int8", cluster(4, "exp:1", wires=slow), updates=2_000)
    assert free.staleness_mean < coded.staleness_mean <= late.staleness_mean
    assert coded.seconds <= late.seconds  # means of the weights are not coded


def test_the_window_makes_the_fast_wait_for_the_slow_and_bounds_staleness() -> None:
    speeds = (1.0, 1.0, 0.1)
    wide = run(f"{ASYNC},window=1000,average=100000", cluster(3, speeds=speeds), updates=3_000)
    narrow = run(f"{ASYNC},window=2,average=100000", cluster(3, speeds=speeds), updates=3_000)
    assert wide.wait_share == 0 < narrow.wait_share
    assert max(narrow.staleness) <= 3 * 2 * 2 < max(wide.staleness)


def test_learners_that_train_apart_never_wait_and_send_nothing() -> None:
    slow = Wires(size_bytes=10**9, learner_bytes_per_s=1e6)
    found = run("average-once", cluster(4, wires=slow), updates=1_000)
    assert (found.wait_share, found.send_share, found.staleness) == (0, 0, {})


def test_the_same_arguments_give_the_same_run() -> None:
    one, other = (run(ASYNC, cluster(5), updates=500, keep_spans=100) for _ in range(2))
    assert one == other and one.spans
    assert one.updates == 500


def test_what_is_not_simulated_is_refused() -> None:
    with pytest.raises(RequestError, match="failures are simulated with a parameter server only"):
        run(ASYNC, cluster(2, failures=Failures(mean_up_s=10.0, mean_down_s=1.0)), updates=10)
