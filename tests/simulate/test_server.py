"""The simulated server against closed forms: waiting, staleness, identities, determinism.

References: Dutta et al. 2018 for the waiting times, Zhang et al. 2016 for the staleness of softsync. Seeds are fixed;
tolerances are those of the definitions: 1 %, and 3 % for the Pareto law.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from offbeat.errors import RequestError
from offbeat.policies import replay
from offbeat.runs.log import RunLog, read_log, write_log
from offbeat.simulate import server
from offbeat.simulate.cluster import Cluster, Wires
from offbeat.simulate.compute import Failures, SlowPeriods, parse_law
from offbeat.simulate.result import Result

LONG = pytest.mark.skipif(not os.environ.get("OFFBEAT_MATRIX"), reason="takes long: make test-matrix")


@cache
def run(strategy: str, learners: int, law: str, updates: int, seed: int = 1) -> Result:
    return server.run(strategy, Cluster(learners=learners, law=parse_law(law), seed=seed), updates=updates)


def harmonic(n: int) -> float:
    return float(sum(Fraction(1, i) for i in range(1, n + 1)))


def pareto_order(k: int, p: int, shape: float = 2.0) -> float:
    """Mean of the k-th smallest of p Pareto times of scale 1."""
    g = math.lgamma
    return math.exp(g(p + 1) + g(p - k + 1 - 1 / shape) - g(p - k + 1) - g(p + 1 - 1 / shape))


def test_deltas_that_travel_beside_computing_take_no_time_of_their_own() -> None:
    """H minibatches of 1 s, and 4 s for a delta and the weights: max(H, 4) each where all overlaps, H - d + 4 at a
    delay of d, H + 4 in the plain form."""
    wires = Wires(size_bytes=10, learner_bytes_per_s=5.0, server_bytes_per_s=1e9)
    cluster = Cluster(learners=3, law=parse_law("constant:1"), wires=wires)
    for h, line, seconds in (
        (6, "", 10.0), (6, ",overlap", 6.0), (6, ",overlap,delay=5", 6.0), (6, ",overlap,delay=1", 9.0),
        (2, ",overlap", 4.0),
    ):  # fmt: skip
        found = server.run(f"local-sgd:{h}{line}", cluster, updates=400)
        assert found.seconds_per_update == pytest.approx(seconds, rel=0.01), line


# --- waiting --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", range(1, 9))
def test_k_sync_waits_for_the_k_th_of_p(k: int) -> None:
    expected = harmonic(8) - harmonic(8 - k)
    assert run(f"k-sync:{k}", 8, "exp:1", 20_000 if k < 5 else 12_000).seconds_per_update == pytest.approx(
        expected, rel=0.01
    )


EXP, SHIFTED = "exp:1", "shifted-exp:1,1"


@pytest.mark.parametrize(
    ("law", "learners", "k", "policy", "seconds"),
    [
        (EXP, 8, 4, "k-sync", 0.6345), (EXP, 8, 4, "k-batch-sync", 0.5), (EXP, 8, 4, "k-async", 0.6345),
        (EXP, 8, 4, "k-batch-async", 0.5),
        (EXP, 20, 10, "k-sync", 0.6688), (EXP, 20, 10, "k-batch-sync", 0.5), (EXP, 20, 10, "k-async", 0.6688),
        (EXP, 20, 10, "k-batch-async", 0.5),
        (SHIFTED, 8, 4, "k-sync", 1.6345), (SHIFTED, 8, 4, "k-batch-sync", 1.634), (SHIFTED, 8, 4, "k-async", 1.238),
        (SHIFTED, 8, 4, "k-batch-async", 1.0),
        (SHIFTED, 8, 8, "k-sync", 3.7179), (SHIFTED, 8, 8, "k-batch-sync", 2.67), (SHIFTED, 8, 8, "k-async", 3.718),
        (SHIFTED, 8, 8, "k-batch-async", 2.0),
        (SHIFTED, 20, 10, "k-sync", 1.6688), (SHIFTED, 20, 10, "k-batch-sync", 1.669),
        (SHIFTED, 20, 10, "k-async", 1.292), (SHIFTED, 20, 10, "k-batch-async", 1.0),
    ],
)  # fmt: skip
def test_seconds_per_update(law: str, learners: int, k: int, policy: str, seconds: float) -> None:
    updates = 12_000 if learners == 8 else 6_000
    assert run(f"{policy}:{k}", learners, law, updates).seconds_per_update == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(
    ("k", "policy", "seconds"),
    [
        pytest.param(10, "k-sync", 1.4054, marks=LONG),
        pytest.param(10, "k-batch-sync", 1.405, marks=LONG),
        pytest.param(10, "k-async", 1.28, marks=LONG),
        pytest.param(10, "k-batch-async", 1.0, marks=LONG),
        pytest.param(18, "k-sync", 2.9911, marks=LONG),
        pytest.param(18, "k-async", 3.53, marks=LONG),
        (18, "k-batch-async", 1.8),
    ],
)
def test_seconds_per_update_with_a_heavy_tail(k: int, policy: str, seconds: float) -> None:
    """K-async is slower than K-sync at K = 18: nobody cancels those who are stuck."""
    if policy == "k-sync":
        assert pareto_order(k, 20) == pytest.approx(seconds, rel=1e-4)
    assert run(f"{policy}:{k}", 20, "pareto:2,1", 100_000).seconds_per_update == pytest.approx(seconds, rel=0.03)


@pytest.mark.parametrize(
    ("law", "ratio", "within"),
    [(EXP, 71.955, 0.01), (SHIFTED, 45.977, 0.01), pytest.param("pareto:2,1", 79.763, 0.03, marks=LONG)],
)
def test_full_sync_over_async_on_twenty_learners(law: str, ratio: float, within: float) -> None:
    full = run("full-sync", 20, law, 100_000 if "pareto" in law else 15_000).seconds_per_update
    free = run("async", 20, law, 120_000).seconds_per_update
    assert full / free == pytest.approx(ratio, rel=within)


# --- staleness ------------------------------------------------------------------------------------------------

LAWS = (EXP, SHIFTED, "gamma:1,0.25", "uniform:0.5,1.5", "pareto:3,1", "constant:1")


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("learners", "k"), [(8, 1), (8, 3), (30, 10)])
def test_mean_staleness_whatever_the_law(law: str, learners: int, k: int) -> None:
    updates = 20_000 // k
    batch = run(f"k-batch-async:{k}", learners, law, updates)
    assert batch.staleness_mean == pytest.approx((learners - 1) / k, rel=0.01)
    waits = run(f"k-async:{k}", learners, law, updates)
    assert waits.staleness_mean == pytest.approx(learners / k - 1, rel=0.01)


def test_policies_with_a_barrier_have_no_staleness() -> None:
    for strategy in ("full-sync", "k-sync:4", "k-batch-sync:4", "local-sgd:3"):
        assert set(run(strategy, 8, EXP, 500).staleness) == {0}


def test_async_with_exponential_times_has_the_geometric_law() -> None:
    result = run("async", 8, EXP, 100_000)
    count = sum(result.staleness.values())
    for age in range(12):
        assert result.staleness[age] / count == pytest.approx((1 / 8) * (7 / 8) ** age, abs=0.003)


@pytest.mark.parametrize(("cv", "shares"), [(0.20, (0.100, 0.833, 0.067)), (0.25, (0.120, 0.794, 0.086))])
def test_one_softsync_on_thirty_learners_is_mostly_one_version_old(cv: float, shares: tuple[float, ...]) -> None:
    result = run("softsync:1", 30, f"gamma:1,{cv}", 4_000)
    count = sum(result.staleness.values())
    for age, share in enumerate(shares):
        assert result.staleness[age] / count == pytest.approx(share, abs=0.02)


def test_thirty_learners_without_any_order() -> None:
    result = run("async", 30, "gamma:1,0.2", 40_000)
    assert result.staleness_mean == pytest.approx(29, rel=0.01)
    assert result.staleness_std == pytest.approx(6.2, rel=0.03)
    n = 6  # softsync:n, staleness beyond 2n is rare
    soft = run(f"softsync:{n}", 30, "gamma:1,0.25", 10_000)
    beyond = sum(count for age, count in soft.staleness.items() if age > 2 * n)
    assert beyond / sum(soft.staleness.values()) < 1e-3


@pytest.mark.parametrize(("delay", "limit"), [(0, 2.0), (1, 1.0), (3, 0.445), (7, 0.209), (15, 0.1013), (29, 0.0532)])
def test_a_quadratic_with_constant_staleness_is_stable_below_the_known_rate_only(delay: int, limit: float) -> None:
    """w <- w - a c w_(t - delay) is stable iff a c < 2 sin(pi / (2(2 delay + 1))): why dividing by staleness works."""
    exact = 2 * math.sin(math.pi / (2 * (2 * delay + 1)))
    assert exact == pytest.approx(limit, abs=6e-4)

    def far_away(rate: float) -> float:
        history = [1.0] * (delay + 1)
        for _ in range(400 * (delay + 1)):
            history.append(history[-1] - rate * history[-1 - delay])
        return max(map(abs, history[-2 * (delay + 1) :]))

    assert far_away(0.97 * exact) < 1e-2
    assert far_away(1.03 * exact) > 1e2


# --- identities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("full-sync", "k-sync:8"),
        ("async", "k-async:1"),
        ("async", "k-batch-async:1"),
        ("softsync:3", "k-batch-async:2"),
    ],
)
def test_policies_that_are_the_same_decide_the_same_in_a_whole_run(one: str, other: str) -> None:
    logs: list[list[dict[str, object]]] = [[], []]
    for log, strategy in zip(logs, (one, other), strict=True):
        cluster = Cluster(learners=8, law=parse_law("gamma:1,0.5"), seed=9)
        server.run(strategy, cluster, updates=300, write=log.append)
    assert [(d["event"], d["commands"]) for d in logs[0]] == [(d["event"], d["commands"]) for d in logs[1]]


def test_k_async_of_all_takes_the_time_of_full_sync() -> None:
    assert run("k-async:8", 8, EXP, 3_000).seconds == run("full-sync", 8, EXP, 3_000).seconds


# --- determinism, logs, fast and usual way --------------------------------------------------------------------

STRATEGIES = (
    "full-sync", "k-sync:3", "k-batch-sync:5", "async", "k-async:3", "k-batch-async:5", "softsync:2", "ssp:1",
    "stale-drop:2", "adaptive-k:2", "downpour:push=2,fetch=3", "local-sgd:3",
)  # fmt: skip
FAULTY = Cluster(
    learners=6,
    law=parse_law("lognormal:1,0.7"),
    seed=4,
    speeds=(1.0, 0.4),
    slow=SlowPeriods(factor=4, enter=0.05, leave=0.3),
    failures=Failures(mean_up_s=30, mean_down_s=4),
    wires=Wires(size_bytes=10**8, learner_bytes_per_s=1e9, server_bytes_per_s=2e9, shards=2, latency_s=0.01),
)
FREE = Cluster(learners=6, law=FAULTY.law, seed=4, speeds=FAULTY.speeds, failures=FAULTY.failures)


@pytest.mark.parametrize("cluster", [FAULTY, FREE], ids=["faulty", "free"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_log_replays_to_the_same_commands_and_a_seed_gives_the_same_bytes(
    strategy: str, cluster: Cluster, tmp_path: Path
) -> None:
    """Also that all invariants hold after every event, with failures, slow periods and shared links."""
    paths = []
    for name in ("one", "two"):
        decisions: list[dict[str, object]] = []
        result = server.run(strategy, cluster, updates=120, keep_spans=120, write=decisions.append)
        log = RunLog(run={"strategy": strategy, "expect": 6}, spans=result.spans, decisions=tuple(decisions))
        write_log(tmp_path / name, log)
        paths.append(tmp_path / name)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    log = read_log(paths[0])
    assert replay(log.run, log.decisions).version >= 120


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_quick_loop_does_what_the_usual_way_does(strategy: str) -> None:
    """Keeping spans takes the usual way."""
    cluster = replace(FREE, failures=None)
    logs: list[list[dict[str, object]]] = [[], []]
    results = [
        server.run(strategy, cluster, updates=200, keep_spans=keep, write=log.append)
        for keep, log in zip((0, 200), logs, strict=True)
    ]
    assert logs[0] == logs[1]
    quick, usual = (result.as_json() for result in results)
    for key, value in quick.items():
        close = value if isinstance(value, str | dict) else pytest.approx(value, rel=1e-9, abs=1e-9)
        assert usual[key] == close, key


@pytest.mark.parametrize(
    "law", ["constant:1", "bimodal:0.001,100,0.6", "gamma:1,10", "pareto:0.2,1", "uniform:1,1.001"]
)
def test_the_calendar_of_the_quick_loop_keeps_the_order_of_the_heap(law: str) -> None:
    """Ties, long days, empty days, entries that end today."""
    cluster = Cluster(learners=9, law=parse_law(law), seed=3)
    for strategy in ("k-batch-async:4", "k-sync:5", "stale-drop:3"):
        logs: list[list[dict[str, object]]] = [[], []]
        for keep, log in zip((0, 1), logs, strict=True):
            server.run(strategy, cluster, updates=1000, keep_spans=keep, write=log.append)
        assert logs[0] == logs[1]


def test_a_ninth_learner_does_not_change_when_the_first_eight_finish() -> None:
    spans = []
    for learners in (8, 9):
        cluster = Cluster(learners=learners, law=parse_law("gamma:1,0.5"), seed=2)
        result = server.run("async", cluster, updates=20 * learners, keep_spans=20 * learners)
        spans.append([(s.learner, s.start_s, s.end_s) for s in result.spans if s.learner < 8 and s.end_s < 15])
    assert sorted(spans[0]) == sorted(spans[1]) != []


# --- books ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shares_add_up_and_spans_do_not_overlap(strategy: str) -> None:
    result = server.run(strategy, FAULTY, updates=150, keep_spans=10**9)
    assert result.busy_share + result.waste_share + result.send_share + result.wait_share == pytest.approx(1)
    assert min(result.busy_share, result.waste_share, result.send_share, result.wait_share) >= 0
    for learner in range(6):
        mine = sorted((s for s in result.spans if s.learner == learner), key=lambda s: s.start_s)
        assert all(one.end_s <= other.start_s + 1e-9 for one, other in pairwise(mine))
    total = sum(s.end_s - s.start_s for s in result.spans)
    computing = sum(s.end_s - s.start_s for s in result.spans if s.what == "compute")
    assert computing / total == pytest.approx(result.busy_share + result.waste_share, abs=0.02)  # some are open


def test_cancelled_work_is_shaded_and_counted() -> None:
    result = server.run("k-sync:4", Cluster(learners=8, law=parse_law(EXP), seed=1), updates=500, keep_spans=500)
    assert result.cancelled == 500 * 4 == sum(span.cancelled for span in result.spans)
    assert result.waste_share == pytest.approx(0.5, abs=0.03)
    assert (result.applied, result.samples, result.dropped) == (2000, 2000, 0)


def test_communication_takes_the_time_of_the_shared_link() -> None:
    """Two learners push 1 GB over a server's 1 GB/s at once: 2 s, and as long for the weights."""
    wires = Wires(size_bytes=10**9, learner_bytes_per_s=1e9, server_bytes_per_s=1e9)
    cluster = Cluster(learners=2, law=parse_law("constant:1"), wires=wires)
    assert server.run("full-sync", cluster, updates=1).seconds == pytest.approx(2 + 1 + 2)
    assert server.run("full-sync", cluster, updates=11).seconds_per_update == pytest.approx((11 * 5) / 11)
    two = Cluster(
        learners=2, law=parse_law("constant:1"), wires=Wires(size_bytes=10**9, server_bytes_per_s=1e9, shards=2)
    )
    assert server.run("full-sync", two, updates=1).seconds == pytest.approx(1 + 1 + 1)
    slow = Wires(size_bytes=0, latency_s=0.25)
    lagging = Cluster(learners=2, law=parse_law("constant:1"), wires=slow)
    assert server.run("full-sync", lagging, updates=4).seconds == pytest.approx(4 * (0.25 + 1 + 0.25))


def test_coded_pushes_and_weights_take_the_time_of_their_bytes() -> None:
    """As above, with 1 GB: bf16 sends half of it, top-k of 1 % sends a fiftieth."""
    wires = Wires(size_bytes=10**9, learner_bytes_per_s=1e9, server_bytes_per_s=1e9)
    cluster = Cluster(learners=2, law=parse_law("constant:1"), wires=wires)
    for line, push, fetch in (("bf16,down=bf16", 0.5, 0.5), ("bf16", 0.5, 1), ("top-k:0.01", 0.02, 1)):
        seconds = server.run(f"full-sync:codec={line}", cluster, updates=1).seconds
        assert seconds == pytest.approx(2 * push + 1 + 2 * fetch), line


def test_where_rows_are_pushed_and_fetched_only_their_bytes_are_sent() -> None:
    """One learner: 1 s of computing, 2 s for a push and 3 s for a fetch; or 10 s for each of both, whole."""
    wires = Wires(size_bytes=1000, push_bytes=200, fetch_bytes=300, learner_bytes_per_s=100.0)
    cluster = Cluster(learners=1, law=parse_law("constant:1"), wires=wires)
    ends = [server.run("full-sync", cluster, updates=updates).seconds for updates in (2, 3)]
    assert ends[1] - ends[0] == pytest.approx(1 + 2 + 3)
    whole = replace(cluster, wires=replace(wires, push_bytes=0, fetch_bytes=0))
    ends = [server.run("full-sync", whole, updates=updates).seconds for updates in (2, 3)]
    assert ends[1] - ends[0] == pytest.approx(1 + 10 + 10)


def test_latency_comes_on_top_of_the_link_and_resuming_takes_it_too() -> None:
    wires = Wires(size_bytes=10**9, learner_bytes_per_s=1e9, latency_s=0.5)
    cluster = Cluster(learners=1, law=parse_law("constant:1"), wires=wires)
    assert server.run("async", cluster, updates=4).seconds == pytest.approx(4 * (1 + 0.5 + 1 + 1 + 0.5))
    lagging = Cluster(learners=1, law=parse_law("constant:1"), wires=Wires(size_bytes=0, latency_s=1.0))
    assert server.run("k-batch-sync:2", lagging, updates=5).seconds_per_update == pytest.approx(6.0)


def test_endless_bandwidth_takes_no_time() -> None:
    wires = Wires(size_bytes=10**9, latency_s=0.25)
    cluster = Cluster(learners=2, law=parse_law("constant:1"), wires=wires)
    assert server.run("full-sync", cluster, updates=4).seconds == pytest.approx(4 * 1.5)


def test_a_learners_link_carries_one_push_and_one_fetch_at_a_time() -> None:
    """10 MB over 1 MB/s: however fast it computes, a push every 10 s."""
    wires = Wires(size_bytes=10**7, learner_bytes_per_s=1e6)
    cluster = Cluster(learners=1, law=parse_law("constant:1"), wires=wires)
    assert server.run("downpour", cluster, updates=20).seconds_per_update == pytest.approx(10, rel=0.06)
    shared = Wires(size_bytes=10**7, server_bytes_per_s=1e6)
    busy = server.run("downpour", replace(cluster, learners=4, wires=shared), updates=20)
    assert busy.seconds == pytest.approx(40 + 20 * 10, rel=0.02)  # first weights for four, then twenty pushes


def test_a_cancel_voids_weights_that_are_still_on_their_way() -> None:
    """Learner 3's weights take 5 s, updates come every second: it never gets to work, least of all on void weights."""
    caps = (1e9, 1e9, 1e9, 0.2e6)
    wires = Wires(size_bytes=10**6, learner_bytes_per_s=caps)
    cluster = Cluster(learners=4, law=parse_law("constant:1"), wires=wires)
    result = server.run("k-sync:3", cluster, updates=50, keep_spans=50)
    assert result.seconds_per_update == pytest.approx(1.002, rel=0.01)
    assert [span for span in result.spans if span.learner == 3 and span.what == "compute"] == []


def test_a_run_that_cannot_go_on_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PATIENCE", 1000)
    cluster = Cluster(learners=8, law=parse_law("constant:1"), failures=Failures(mean_up_s=0.01, mean_down_s=1))
    with pytest.raises(RequestError, match="makes no progress at update 0"):
        server.run("full-sync", cluster, updates=10)


def test_work_lost_on_the_way_is_wasted_and_dropped_minibatches_are_counted() -> None:
    wires = Wires(size_bytes=10**9, learner_bytes_per_s=1e9)
    failing = Cluster(
        learners=2, law=parse_law("constant:1"), seed=1, wires=wires, failures=Failures(mean_up_s=6, mean_down_s=1)
    )
    result = server.run("async", failing, updates=200, keep_spans=10**9)
    applied = result.applied * 1.0
    computed = sum(span.end_s - span.start_s for span in result.spans if span.what == "compute")
    assert result.failed > 20 and result.waste_share > 0
    wasted = computed * result.waste_share / (result.busy_share + result.waste_share)
    assert computed - applied == pytest.approx(wasted, abs=2.1)
    local = Cluster(learners=3, law=parse_law("exp:1"), seed=1, failures=Failures(mean_up_s=8, mean_down_s=0.1))
    assert server.run("local-sgd:3", local, updates=60).dropped % 3 == 0


def test_a_rate_by_drift_cannot_be_simulated() -> None:
    with pytest.raises(RequestError, match="which a simulation does not have"):
        server.run("async:rate=drift:1", Cluster(learners=1, law=parse_law(EXP)), updates=1)


def test_with_latency_a_push_may_be_faster_than_the_word_that_cancels_it() -> None:
    wires = Wires(size_bytes=0, latency_s=0.2)
    cluster = Cluster(learners=4, law=parse_law("uniform:0.5,2"), seed=3, wires=wires)
    result = server.run("k-sync:2", cluster, updates=300)
    assert result.dropped > 0 and result.cancelled > 0


def test_failures_do_not_stop_a_server() -> None:
    cluster = Cluster(learners=8, law=parse_law(EXP), seed=5, failures=Failures(mean_up_s=20, mean_down_s=5))
    for strategy in STRATEGIES:
        result = server.run(strategy, cluster, updates=400)
        assert result.failed > 0 and result.updates >= 400


def test_it_ends_after_the_seconds_given() -> None:
    result = server.run("async", Cluster(learners=4, law=parse_law(EXP), seed=1), updates=10**9, until_s=50.0)
    assert result.seconds == pytest.approx(50, abs=1e-9)
    assert result.updates == pytest.approx(200, rel=0.3)


def test_impossible_clusters_are_refused() -> None:
    law = parse_law(EXP)
    for learners, speeds, says in (
        (0, (), "at least 1 learner"),
        (1, (1.0, 1.0), "2 speeds for 1"),
        (2, (0.0,), "above 0"),
    ):
        with pytest.raises(RequestError, match=says):
            Cluster(learners=learners, law=law, speeds=speeds)
    with pytest.raises(RequestError, match="at least 1 update"):
        server.run("async", Cluster(learners=1, law=law), updates=0)
    with pytest.raises(RequestError, match="K=9"):
        server.run("k-sync:9", Cluster(learners=8, law=law), updates=1)
