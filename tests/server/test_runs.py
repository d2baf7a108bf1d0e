"""Real runs, with real processes: what they compute is what one process computes, and what their logs say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from collectives.nursery import Nursery
from offbeat.policies import replay
from offbeat.predict.virtual import train_again
from offbeat.runs.log import read_log
from offbeat.train.tasks import Task
from server import programs

EVERY_POLICY = (
    "full-sync", "k-sync:2", "k-batch-sync:2", "async", "k-async:2", "k-batch-async:2", "softsync:1", "ssp:1",
    "stale-drop:1", "adaptive-k:1", "downpour:push=2,fetch=1", "local-sgd:2", "local-sgd:2,outer=nesterov",
    "async:rate=inverse", "k-async:2,rate=inverse-mean", "async:rate=drift:0.5", "async:rate=delay-compensated:0.1",
    "local-sgd:2,codec=int4,down=bf16", "local-sgd:2,overlap",
    "local-sgd:3,overlap,outer=nesterov,codec=int8,down=bf16",
    "downpour:push=2,fetch=1,codec=top-k:0.1,down=bf16",
)  # fmt: skip


def run(nursery: Nursery, learners: int, **given: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What each learner gave back, and the summary."""
    *learned, summary = nursery.values("serve_training", ranks=learners + 1, **given)
    return learned, summary


def alone(*, optimizer: str, batch: int, epochs: int = 2, halved: bool = False, clip: float = 0.0) -> list[float]:
    """The plain loop of one process."""
    torch.set_num_threads(1)
    model = programs.model_of(0)
    inner = programs.optimizer_of(optimizer, model)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=4, gamma=0.5)
    for _ in range(epochs):
        for x, y in DataLoader(programs.data(), batch_size=batch):
            inner.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]  # torch has no types for it
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            inner.step()
            if halved:
                scheduler.step()
    return programs.weights_of(model)


@pytest.mark.parametrize("line", ["full-sync", "k-sync:3"])
def test_all_in_step_is_one_process_on_all_their_samples(nursery: Nursery, line: str) -> None:
    found = [
        run(nursery, 3, line=line, servers=servers, optimizer="momentum")[0][0]["weights"] for servers in (1, 2, 3)
    ]
    assert found[0] == found[1] == found[2], "bit for bit, for any number of shards"
    expected = alone(optimizer="momentum", batch=24)
    assert max(abs(a - b) for a, b in zip(found[0], expected, strict=True)) < 1e-6


@pytest.mark.parametrize("name", programs.OPTIMIZERS)
def test_one_learner_has_the_bits_of_torch_optim_on_any_number_of_shards(nursery: Nursery, name: str) -> None:
    expected = alone(optimizer=name, batch=8, halved=True)
    for servers in (1, 3):
        learned, summary = run(nursery, 1, line="async", servers=servers, optimizer=name, halved=True)
        assert learned[0]["weights"] == expected
        assert summary["updates"] == 24


@pytest.mark.parametrize("line", EVERY_POLICY)
def test_the_log_of_a_run_replays_and_every_sample_counts_once(nursery: Nursery, tmp_path: Path, line: str) -> None:
    log = tmp_path / "run.jsonl"
    learned, summary = run(nursery, 3, line=line, servers=2, log=str(log), shuffle=True)
    read = read_log(log)
    policy = replay(read.run, read.decisions)
    assert policy.version == summary["updates"] > 0
    assert all(one["weights"] == learned[0]["weights"] for one in learned), "all end with the last weights"
    pushes = summary["pushes"]
    assert pushes["received"] == pushes["applied"] + pushes["dropped"]
    samples = {fate: many for fate, many in summary["samples"].items() if not fate.startswith("computed again")}
    late = samples.pop("dropped: the run ended before its update was full", 0)
    assert samples == {"applied": 2 * programs.SAMPLES - late}
    applied = [ticket for record in read.decisions for text in record["commands"] for ticket in _tickets(text)]
    assert len(applied) == len(set(applied)), "no ticket is applied or dropped twice"


def _tickets(text: str) -> list[str]:
    word, *rest = text.split()
    return [one for one in rest if one.startswith("t")] if word in ("apply", "drop") else []


@pytest.mark.parametrize(
    "line",
    [
        "async",
        "k-async:2",
        "full-sync",
        "k-sync:2",
        "k-batch-async:2",
        "async:rate=inverse",
        "ssp:1",
        "async:rate=drift:0.1",
        "async:rate=delay-compensated:0.1",
        "k-batch-async:2,codec=power-sgd:1,down=int8",
        "k-sync:2,codec=random-k:0.1",
    ],
)
def test_training_again_from_the_log_gives_the_same_bits(nursery: Nursery, tmp_path: Path, line: str) -> None:
    log = tmp_path / "run.jsonl"
    learned, summary = run(nursery, 3, line=line, servers=2, optimizer="adam", log=str(log), shuffle=True, halved=True)
    data = programs.data()
    task = Task(train=data, test=data, build=programs.model_of, loss=nn.functional.cross_entropy)
    again = train_again(log, task=task, optimizer=lambda model: programs.optimizer_of("adam", model))
    assert again.end["updates"] == summary["updates"]
    model = programs.model_of()
    model.load_state_dict(dict(again.weights))
    assert programs.weights_of(model) == learned[0]["weights"]


def test_gradients_are_clipped_by_the_norm_of_the_whole(nursery: Nursery) -> None:
    found = [
        run(nursery, 2, line="full-sync", servers=servers, clip_norm=0.1)[0][0]["weights"] for servers in (1, 2, 3)
    ]
    assert found[0] == found[1] == found[2]
    expected = alone(optimizer="sgd", batch=16, clip=0.1)
    assert max(abs(a - b) for a, b in zip(found[0], expected, strict=True)) < 1e-6


def test_gradients_may_travel_in_half_the_bytes(nursery: Nursery) -> None:
    expected = alone(optimizer="sgd", batch=16)
    (learned, *_), _ = run(nursery, 2, line="full-sync", gradients="bfloat16")
    off = max(abs(a - b) for a, b in zip(learned["weights"], expected, strict=True))
    assert 0 < off < 1e-2


def test_no_fetch_ever_mixes_two_versions(nursery: Nursery) -> None:
    """A hundred fetches of 1.6 MB each by four learners, under updates back to back: none is torn."""
    *learned, summary = nursery.values(
        "serve_hammer", ranks=5, line="async", servers=2, items=100_000, pushes=100, within_s=60
    )
    assert [one["torn"] for one in learned] == [0] * 4
    assert {one["last"] for one in learned} == {-400.0}, "and every push counts once"
    assert summary["updates"] == 400


def test_weights_in_place_do_not_change_under_a_minibatch(nursery: Nursery) -> None:
    *learned, summary = nursery.values("serve_in_place", ranks=4, line="async", servers=2, items=20_000, pushes=60)
    assert [one["changed"] for one in learned] == [0] * 3
    assert {one["last"] for one in learned} == {-180.0}
    assert summary["updates"] == 180


def test_training_in_place_gives_the_same_bits(nursery: Nursery) -> None:
    copied, placed = (
        run(nursery, 2, line="full-sync", servers=2, optimizer="adam", in_place=in_place)[0][0]["weights"]
        for in_place in (False, True)
    )
    assert copied == placed
