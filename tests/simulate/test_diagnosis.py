"""Three clusters, three pictures, and explanations that are right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from offbeat.cli import main
from offbeat.simulate import server
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.compute import SlowPeriods, parse_law
from offbeat.simulate.diagnosis import describe, describe_machines, what_if

HEAVY = Cluster(learners=8, law=parse_law("pareto:2,1"), seed=1)
STRAGGLER = Cluster(learners=8, law=parse_law("gamma:1,0.1"), seed=1, speeds=(1, 1, 1, 1 / 3))
EQUAL = Cluster(learners=8, law=parse_law("gamma:1,0.1"), seed=1)


def test_three_clusters_are_told_apart() -> None:
    assert describe(describe_machines(HEAVY)).startswith("no learner is persistently slow, but compute times vary")
    assert describe(describe_machines(STRAGGLER)).startswith("persistently slow: learner 3 (3.0x)")
    assert describe(describe_machines(EQUAL)).startswith(
        "the learners are equally fast (standard deviation 0.10x the mean)"
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_heavy_tail_is_not_taken_for_a_slow_learner(seed: int) -> None:
    for law in ("pareto:2,1", "lognormal:1,2", "exp:1"):
        assert describe_machines(Cluster(learners=20, law=parse_law(law), seed=seed)).slow == ()


@pytest.mark.parametrize("seed", range(4))
def test_a_period_that_passes_is_not_taken_for_a_slow_learner(seed: int) -> None:
    periods = SlowPeriods(factor=5, enter=0.002, leave=0.004)
    cluster = Cluster(learners=8, law=parse_law("gamma:1,0.1"), seed=seed, slow=periods)
    assert describe_machines(cluster).slow == ()


def test_what_the_straggler_costs_is_what_the_arithmetic_says() -> None:
    """With constant times: full-sync takes 3 s for 8 gradients; 7 learners take 1 s; a third of the work takes 1 s."""
    cluster = Cluster(learners=8, law=parse_law("constant:1"), speeds=(1, 1, 1, 1 / 3))
    found = what_if("full-sync", cluster, describe_machines(cluster), 300)
    assert found.slow == (3,) and found.slower == pytest.approx(3) and found.shares == (0.33,)
    assert found.as_it_is == pytest.approx(8 / 3, rel=0.01)
    assert found.as_fast == pytest.approx(8, rel=0.01)
    assert found.without == pytest.approx(7, rel=0.01)
    assert found.lighter == pytest.approx((7 + 0.33) / 1, rel=0.02)
    assert found.as_fast_ideal == pytest.approx(8, rel=0.01)
    assert found.share_of_loss == pytest.approx(1.0, abs=0.02)
    assert "causes 100 % of the lost throughput" in found.advice[0]


def test_with_chance_as_well_only_a_part_of_the_loss_is_the_stragglers() -> None:
    found = what_if("full-sync", STRAGGLER, describe_machines(STRAGGLER), 500)
    assert 0.7 < found.share_of_loss < 0.95
    assert found.without is not None and found.without > 2 * found.as_it_is
    assert found.lighter > found.without


def test_several_slow_learners_are_judged_together() -> None:
    """Half of eight are 4x slower: full-sync takes 4 s for 8; dropping them gives 4 a second, less work 4 + 4/4."""
    cluster = Cluster(learners=8, law=parse_law("constant:1"), speeds=(1, 1, 1, 1, 0.25, 0.25, 0.25, 0.25))
    machines = describe_machines(cluster)
    assert sorted(machines.slow) == [4, 5, 6, 7]
    found = what_if("full-sync", cluster, machines, 400)
    assert found.as_it_is == pytest.approx(2, rel=0.01)
    assert found.as_fast == pytest.approx(8, rel=0.01)
    assert found.without == pytest.approx(4, rel=0.01)
    assert found.lighter == pytest.approx(5, rel=0.01)
    assert (
        "So learners 4, 5, 6, 7 cause " in found.advice[0]
        and "minibatches of 0.25x the size for them" in found.advice[1]
    )


def test_with_two_learners_the_slower_one_is_the_slow_one() -> None:
    machines = describe_machines(Cluster(learners=2, law=parse_law("constant:1"), speeds=(0.2,)))
    assert machines.slow == (0,)
    assert describe(machines) == "persistently slow: learner 0 (5.0x); a barrier waits for it in every update"


def test_what_cannot_run_without_the_slow_ones_is_not_said() -> None:
    cluster = Cluster(learners=4, law=parse_law("constant:1"), speeds=(1, 1, 0.25, 0.25))
    found = what_if("k-sync:4", cluster, describe_machines(cluster), 100)
    assert found.without is None and found.advice[1].startswith("with minibatches of 0.25x the size")


def test_removing_a_learner_leaves_the_draws_of_the_others() -> None:
    rest = STRAGGLER.without(3)
    before, after = STRAGGLER.draws(), rest.draws()
    kept = [0, 1, 2, 4, 5, 6, 7]
    assert [after.take(i) for i in range(7)] == [before.take(learner) for learner in kept]
    assert rest.speeds == (1.0,) * 7


def compare(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, Any]:
    assert main(["compare", *line.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return {row["strategy"]: row for row in found["strategies"]} | {"": found}


def test_the_three_pictures_differ_as_they_should(capsys: pytest.CaptureFixture[str]) -> None:
    heavy = compare(capsys, "--learners 8 --compute pareto:2,1")
    straggler = compare(capsys, "--learners 8 --compute gamma:1,0.1 --speeds 1,1,1,0.3333")
    equal = compare(capsys, "--learners 8 --compute gamma:1,0.1")
    rate = "minibatches_per_s"
    # Heavy tail: cancelling the unlucky beats waiting for them. Equal: it throws half of the work away.
    assert heavy["k-sync:4"][rate] > 1.3 * heavy["full-sync"][rate]
    assert equal["k-sync:4"][rate] < 0.7 * equal["full-sync"][rate]
    # Straggler: a barrier waits for it always, bounded staleness is soon at its speed too, async goes round it.
    assert straggler["full-sync"]["wait_share"] > 0.5 and straggler["ssp:3"][rate] < 1.1 * straggler["full-sync"][rate]
    assert straggler["async"][rate] > 2.5 * straggler["full-sync"][rate]
    # Equal: nothing to gain by going without order.
    assert equal["async"][rate] < 1.2 * equal["full-sync"][rate]
    assert heavy[""]["slow_learners"] is None and equal[""]["slow_learners"] is None
    assert straggler[""]["slow_learners"]["learners"] == [3]


def test_every_strategy_has_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    server = "full-sync k-sync:2 k-batch-sync:2 async k-async:2 k-batch-async:2 softsync:2 ssp:1 stale-drop:1"
    others = "adaptive-k:1 downpour:push=2,fetch=2 local-sgd:4 ring torus:2x2"
    found = compare(capsys, f"{server} {others} --learners 4 --compute exp:1 --size 1MB --updates 100")
    assert len(found) == 15
    for name, row in found.items():
        if name:
            assert row["why"], name


def test_machines_that_are_unequal_without_a_few_slow_ones_are_not_called_equal() -> None:
    for speeds in ((3.0,), (1, 1, 1, 0.7, 0.5, 0.6, 0.8, 0.9)):
        cluster = Cluster(learners=8, law=parse_law("gamma:1,0.05"), speeds=speeds)
        assert not describe(describe_machines(cluster)).startswith("equal")


@pytest.mark.parametrize(
    "line",
    [
        "k-batch-async:10000 --learners 2 --minibatches 1",
        "k-sync:2 local-sgd:1000 --learners 2 --minibatches 1",
        "local-sgd:1000 --learners 4 --minibatches 1 --speeds 1,1,1,0.3",
        "k-sync:8 --learners 8 --compute gamma:1,0.1 --speeds 1,1,1,1,1,1,1,0.333",
        "softsync:2 --learners 2 --speeds 1,0.333",
        "ring --learners 4 --compute gamma:1,0.1 --speeds 0.333",
        "--learners 2 --compute gamma:1,10 --minibatches 20",
        "--learners 2 --compute pareto:0.1,1 --minibatches 5",
        "--learners 1",
    ],
)
def test_odd_comparisons_are_made_all_the_same(capsys: pytest.CaptureFixture[str], line: str) -> None:
    compare(capsys, line)
    assert main(["compare", *line.split()]) == 0


def test_compare_names_no_winner(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--learners", "4"]) == 0
    out = capsys.readouterr().out
    assert "Throughput alone does not decide" in out and "best strategy" not in out and "winner" not in out


NETWORK = "--learners 16 --compute gamma:1,0.1 --size 100MB --network 10Gbit/s"


def test_a_full_link_is_named_and_not_the_slowest_learner(capsys: pytest.CaptureFixture[str]) -> None:
    """16 learners x 100 MB at 1.25 GB/s: 1.28 s to the server and 1.28 s back, where computing takes 1.2 s."""
    found = compare(capsys, f"full-sync async {NETWORK}")
    row = found["full-sync"]
    assert row["limited_by"] == "the server's link" and 2 < row["gains_without"]["the server's link"] + 1 < 3
    assert found[""]["headline"].startswith("full-sync: limited by the server's link (full 75 %")
    assert row["full_share"] == pytest.approx(2 * 1.28 / row["seconds_per_update"], rel=0.05)
    assert row["fetch_share"] > 0.3 and row["wait_share"] - row["fetch_share"] < 0.1  # the link is waited for
    assert "receiving weights" in row["why"]


def test_two_links_of_one_rate_are_named_together(capsys: pytest.CaptureFixture[str]) -> None:
    """One learner: without its own link the server's is as slow, and the other way round."""
    found = compare(capsys, "async --learners 1 --compute constant:1 --size 1GB --network 1GB/s")
    assert found["async"]["limited_by"] == "the links of server and learners"
    assert found["async"]["gains_without"]["the links of server and learners"] == pytest.approx(2, rel=0.02)


def test_an_all_reduce_is_limited_by_its_own_network(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = "--learners 8 --compute constant:10ms --no-overlap"
    slow = compare(capsys, f"ring {cluster} --size 100MB --network 1GB/s,1us")["ring"]
    far = compare(capsys, f"ring {cluster} --size 1kB --network 1GB/s,1ms")["ring"]
    assert (slow["limited_by"], far["limited_by"]) == ("the network's bandwidth", "the network's latency")
    assert slow["gains_without"]["the network's bandwidth"] == pytest.approx(2 * 7 / 8 * 0.1 / 0.01, rel=0.01)
    assert far["gains_without"]["the network's latency"] == pytest.approx(14e-3 / 0.01, rel=0.01)


def test_computing_alone_is_blamed_where_nothing_else_is(capsys: pytest.CaptureFixture[str]) -> None:
    found = compare(capsys, "full-sync async --learners 4 --compute constant:1")
    assert found["full-sync"]["limited_by"] is None and found["full-sync"]["why"].startswith("limited by computing")
    assert found[""]["headline"] == "full-sync: limited by computing alone"


def test_a_strategy_without_an_update_is_told_as_such(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is up long enough for 15 minibatches in a row; the other strategy is compared all the same."""
    monkeypatch.setattr(server, "PATIENCE", 1_000)
    line = "local-sgd:15 async --learners 2 --compute constant:1 --failures 0.5,1 --minibatches 20"
    found = compare(capsys, line)
    assert found["local-sgd:15"]["updates"] == 0 and "the simulation makes no progress" in found["local-sgd:15"]["why"]
    assert found["async"]["updates"] > 0 and found[""]["headline"].startswith("async: ")
    assert main(["compare", *line.split()]) == 0
    assert "no update" in capsys.readouterr().out


def test_an_update_of_too_many_minibatches_is_refused_by_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("compare", "simulate"):
        assert main([command, "local-sgd:999999999"]) == 2
        assert "one update needs 7999999992 minibatches" in capsys.readouterr().err


def test_the_memory_of_a_server_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """full-sync on 16: 31 slots, 4 buffers and 2 of momentum; async holds one gradient beside those that are filled."""
    found = compare(capsys, f"full-sync async ring {NETWORK} --updates 20")
    vectors = {name: row["server_bytes"] and row["server_bytes"] / 1e8 for name, row in found.items() if name}
    assert vectors == {"full-sync": 16 + 15 + 4 + 2, "async": 16 + 4 + 2, "ring": None}
    assert main(["compare", "full-sync", *NETWORK.split(), "--updates", "20"]) == 0
    assert "3.7 GB" in capsys.readouterr().out


def test_compare_takes_as_many_updates_as_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    found = compare(capsys, "full-sync async --learners 4 --updates 30")
    assert [found[name]["updates"] for name in ("full-sync", "async")] == [30, 30]
    found = compare(capsys, "full-sync async --learners 4 --minibatches 30")
    assert [found[name]["updates"] for name in ("full-sync", "async")] == [30, 120]
