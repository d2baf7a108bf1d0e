"""Random machines, links, failures and strategies: whatever happens, the laws hold."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import RequestError
from offbeat.policies import replay
from offbeat.simulate import server
from offbeat.simulate.cluster import Cluster, Wires
from offbeat.simulate.compute import Failures, SlowPeriods, parse_law

laws = st.sampled_from(["constant:1", "exp:1", "bimodal:1,10,0.2", "pareto:1.5,0.5", "uniform:0.5,1.5", "gamma:1,0.3"])
lines = st.sampled_from(
    [
        "full-sync", "k-sync:1", "k-sync:2", "k-batch-sync:1", "k-batch-sync:7", "async", "k-async:1", "k-async:2",
        "k-batch-async:4", "softsync:1", "ssp:0", "ssp:2", "stale-drop:0", "stale-drop:3", "adaptive-k:1",
        "downpour:push=1,fetch=1", "downpour:push=3,fetch=2", "local-sgd:1", "local-sgd:3",
    ]
)  # fmt: skip
wires = st.none() | st.builds(
    lambda size, learner, server, shards, latency: Wires(
        size_bytes=size, learner_bytes_per_s=learner, server_bytes_per_s=server, shards=shards, latency_s=latency
    ),
    st.sampled_from([0, 1, 10**8]),
    st.sampled_from([1e7, 1e9, float("inf")]),
    st.sampled_from([1e8, 1e9]),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.001, 0.5, 1.0]),
)
clusters = st.builds(
    lambda learners, law, seed, speed, slow, failures, wires: Cluster(
        learners=learners,
        law=parse_law(law),
        seed=seed,
        speeds=(speed,),
        slow=SlowPeriods(factor=6, enter=0.1, leave=0.3) if slow else None,
        failures=failures,
        wires=wires,
    ),
    st.integers(2, 6),
    laws,
    st.integers(0, 10**6),
    st.sampled_from([1.0, 0.2, 5.0]),
    st.booleans(),
    st.none() | st.builds(Failures, mean_up_s=st.sampled_from([2.0, 20.0]), mean_down_s=st.sampled_from([0.1, 5.0])),
    wires,
)


@given(lines, clusters)
@settings(max_examples=150)
def test_whatever_happens_the_laws_hold(strategy: str, cluster: Cluster) -> None:
    decisions: list[dict[str, object]] = []
    try:
        # Some never get far: three minibatches in a row between failures every two seconds, say. Hence the seconds.
        result = server.run(strategy, cluster, updates=60, until_s=400.0, keep_spans=10**9, write=decisions.append)
    except RequestError as error:
        pytest.fail(f"{strategy}: {error}")
    # Replaying checks every invariant of the policy after every event, and that times do not run backwards.
    policy = replay({"strategy": strategy, "expect": cluster.learners}, decisions)
    assert policy.version == result.updates
    times = [float(str(decision["event"]).split("@")[1]) for decision in decisions]
    assert times == sorted(times)
    # Books: shares add up, everything is counted once, and a learner does one thing at a time.
    shares = (result.busy_share, result.waste_share, result.send_share, result.wait_share)
    assert sum(shares) == pytest.approx(1) and min(shares) > -1e-9
    assert (
        sum(result.staleness.values()) * policy.rule.push_every
        == result.applied
        == policy.applied * policy.rule.push_every
    )
    for learner in range(cluster.learners):
        mine = sorted(
            (span for span in result.spans if span.learner == learner), key=lambda span: (span.start_s, span.end_s)
        )
        assert all(one.end_s <= other.start_s + 1e-9 for one, other in pairwise(mine))
        assert all(one.version <= other.version for one, other in pairwise(s for s in mine if s.what == "compute"))


@given(lines, clusters)
@settings(max_examples=60)
def test_the_same_cluster_gives_the_same_decisions(strategy: str, cluster: Cluster) -> None:
    logs: list[list[dict[str, object]]] = [[], []]
    for log in logs:
        server.run(strategy, cluster, updates=20, until_s=100.0, write=log.append)
    assert logs[0] == logs[1]
