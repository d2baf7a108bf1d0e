"""`offbeat compare` on random clusters with networks, beside `offbeat simulate`: the same seconds, the right reason.

The what-if here is the user's own: one option of the cluster is changed, and `simulate` is asked again.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from offbeat.cli import main
from offbeat.simulate.diagnosis import LATENCY, LEARNER_LINKS, LINKS, SCATTER, SERVER_LINK

MATRIX = bool(os.environ.get("OFFBEAT_MATRIX"))
CLUSTERS = range(40) if MATRIX else (1, 14)  # these two are small
AGREE = 0.03  # seconds per update of the two commands, where one of them goes on for twice as long
NEAR = 0.97  # of the best what-if: two causes that gain as much are told apart by chance
ENDLESS = "1e15B/s"

Json = Callable[..., dict[str, Any]]
Options = dict[str, str]


@pytest.fixture
def offbeat(capsys: pytest.CaptureFixture[str]) -> Json:
    def run(command: str, *words: str, **options: str) -> dict[str, Any]:
        given = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
        assert main([command, *words, "--json", *given]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run


def random_cluster(seed: int) -> tuple[Options, float]:
    """Its options, and the mean compute time."""
    chance = random.Random(seed)
    learners = chance.choice([2, 3, 4, 6, 8, 12, 16])
    mean = chance.choice([0.05, 0.2, 1.0])
    law = chance.choice(
        [f"exp:{mean}", f"gamma:{mean},0.1", f"gamma:{mean},0.5", f"lognormal:{mean},0.5", f"constant:{mean}"]
    )
    network = {
        "size": f"{chance.choice([1, 10, 100])}MB",
        "server_bandwidth": chance.choice(["1Gbit/s", "10Gbit/s", "100Gbit/s"]),
        "learner_bandwidth": chance.choice(["1Gbit/s", "10Gbit/s", "25Gbit/s"]),
        "latency": chance.choice(["50us", "1ms", "20ms"]),
        "shards": chance.choice(["1", "1", "4"]),
    }
    slow = {} if chance.random() < 0.6 else {"speeds": f"{chance.choice([0.2, 0.5])}"}
    return {"learners": str(learners), "compute": law, "seed": str(seed)} | network | slow, mean


def line_pool(learners: int) -> list[str]:
    half = learners // 2
    some = [f"k-sync:{half}", f"k-batch-sync:{half}", f"k-async:{half}", f"k-batch-async:{half}", f"backup:{half}"]
    return [*some, "async", "softsync:2", "ssp:2", "stale-drop:4", "downpour:push=2,fetch=2", "local-sgd:4", "ring"]


def what_ifs(cluster: Options, mean: float) -> dict[str, Options]:
    """The cluster without one cause, by the name that `compare` gives it; a slow learner is learner 0 here."""
    found = {
        SERVER_LINK: cluster | {"server_bandwidth": ENDLESS},
        LEARNER_LINKS: cluster | {"learner_bandwidth": ENDLESS},
        LINKS: cluster | {"server_bandwidth": ENDLESS, "learner_bandwidth": ENDLESS},
        LATENCY: cluster | {"latency": "0"},
        SCATTER: cluster | {"compute": f"constant:{mean}"},
    }
    return found | ({"the slow learner 0": cluster | {"speeds": "1"}} if "speeds" in cluster else {})


@pytest.mark.parametrize("seed", CLUSTERS)
def test_compare_and_simulate_agree_and_the_headline_names_what_gains_most(offbeat: Json, seed: int) -> None:
    cluster, mean = random_cluster(seed)
    strategies = ["full-sync", *random.Random(seed).sample(line_pool(int(cluster["learners"])), 3 if MATRIX else 1)]
    compared = offbeat("compare", *strategies, **cluster)
    rows = {row["strategy"]: row for row in compared["strategies"]}
    for strategy in strategies:
        compared_s, longer = rows[strategy]["seconds_per_update"], str(2 * rows[strategy]["updates"])
        assert offbeat("simulate", strategy, **cluster)["seconds_per_update"] == compared_s
        simulated = offbeat("simulate", strategy, **cluster, updates=longer)["seconds_per_update"]
        assert compared_s == pytest.approx(simulated, rel=AGREE), (strategy, cluster)

    reason = rows["full-sync"]["limited_by"]
    assert reason in compared["headline"] and compared["headline"].startswith("full-sync: ")
    without = {
        name: offbeat("simulate", "full-sync", **options)["minibatches_per_s"]
        for name, options in what_ifs(cluster, mean).items()
        if name != LINKS or reason == LINKS
    }
    assert without[reason] >= NEAR * max(without.values()), (reason, without, cluster)


def test_networks_are_said_to_differ_only_where_they_do(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "full-sync", "ring", "--learners", "2", "--updates", "20", "--size", "1MB"]
    assert main([*words, "--server-bandwidth", "1GB/s"]) == 0
    assert "networks differ" in capsys.readouterr().out
    assert main([*words, "--network", "1GB/s"]) == 0
    assert "networks differ" not in capsys.readouterr().out
