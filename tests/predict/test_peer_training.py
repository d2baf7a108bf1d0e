"""Peers in virtual time: one learner is plain training, every update reaches every replica, runs are repeatable."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offbeat.errors import RequestError
from offbeat.predict.machines import Clock
from offbeat.predict.peer_training import PeerReplicas
from offbeat.predict.virtual import VirtualRun, VirtualTrainer, train_virtually
from offbeat.simulate.cluster import Cluster, Wires
from offbeat.simulate.compute import parse_law
from train.oracle import distance
from train.runs import config_of, small_task

ASYNC = "all-to-all:async"


def trained(sync: str, learners: int, *, ends: bool = False, wires: Wires | None = None, **changes: Any) -> VirtualRun:
    config = config_of(sync=sync, learners=learners, **changes)
    cluster = Cluster(learners=learners, law=parse_law("exp:1"), wires=wires)
    return train_virtually(config, Clock(cluster=cluster, ends_of_epochs=ends), task=small_task())


@pytest.mark.parametrize("sync", [ASYNC, "average-once"])
def test_one_learner_is_plain_training(sync: str) -> None:
    alone, plain = trained(sync, 1), trained("async", 1)
    assert distance(dict(alone.weights), dict(plain.weights)) < 1e-6
    assert alone.points[-1].update == plain.points[-1].update == 4 * 24


@pytest.mark.parametrize("more", ["", ",average=7", ",codec=int8", ",codec=power-sgd:2"])
def test_every_sample_is_applied_once_and_the_run_is_the_same_every_time(more: str) -> None:
    one, other = (trained(ASYNC + more, 3) for _ in range(2))
    last = one.points[-1]
    assert (last.update, last.samples) == (4 * 24, 4 * 96)
    assert distance(dict(one.weights), dict(other.weights)) == 0
    assert one.points[0].loss is not None and last.loss is not None and last.loss < one.points[0].loss
    assert 0 < one.staleness_mean < 2.5


def test_links_that_are_slow_change_what_is_learned() -> None:
    slow = trained(ASYNC, 3, wires=Wires(size_bytes=10**6, learner_bytes_per_s=1e6, latency_s=0.1))
    fast = trained(ASYNC, 3)
    assert slow.points[-1].seconds > fast.points[-1].seconds
    assert distance(dict(slow.weights), dict(fast.weights)) > 1e-3


def test_learners_that_start_from_their_own_weights_have_another_mean() -> None:
    still = {"epochs": 1, "lr": 1e-9, "warmup_epochs": 0.0}
    equal, own = (trained(f"average-once:start={start}", 3, train=still) for start in ("equal", "own"))
    task = small_task()
    firsts = []
    for seed in (3, 4, 5):
        torch.manual_seed(seed)
        firsts.append(dict(task.build().named_parameters()))
    for name, weights in own.weights.items():
        mean = torch.stack([first[name].detach() for first in firsts]).mean(0)
        assert float((weights - mean).abs().max()) < 1e-5
        assert float((equal.weights[name] - firsts[0][name].detach()).abs().max()) < 1e-5


def test_ends_of_epochs_are_refused() -> None:
    with pytest.raises(RequestError, match="without ends of epochs"):
        trained(ASYNC, 2, ends=True)


def test_every_update_reaches_every_replica() -> None:
    """Without a mean of the replicas: before the last one they are equal but for the order of additions."""
    config = config_of(sync=f"{ASYNC},average=1000000", learners=3)
    cluster = Cluster(learners=3, law=parse_law("exp:1"))
    trainer = VirtualTrainer(config, small_task(), Clock(cluster=cluster), run=None, report=lambda record: None)
    replicas = trainer.arithmetic
    assert isinstance(replicas, PeerReplicas)
    apart: list[float] = []

    def averaged() -> None:
        weights = torch.stack([own.current for own in replicas.owns])
        apart.append(float((weights - weights[0]).abs().max()))

    replicas.average = averaged  # type: ignore[method-assign] # looks at them instead
    trainer.fit()
    assert len(apart) == 1 and apart[0] < 1e-5
