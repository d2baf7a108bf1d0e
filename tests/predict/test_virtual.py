"""Training in virtual time: the same bits each time, the same times at any width, one process where it is synchronous,
and a real run's own weights where its log is the clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offbeat.errors import LogError, RequestError
from offbeat.policies.replay import replay
from offbeat.predict.machines import Clock
from offbeat.predict.timelines import Update
from offbeat.predict.virtual import VirtualRun, VirtualTrainer, reached_by, train_again, train_virtually
from offbeat.runs.log import read_log
from offbeat.runs.run_folder import RunDir, new_run_dir
from offbeat.simulate.cluster import Cluster, Wires
from offbeat.simulate.compute import parse_law
from offbeat.train.checkpoint import read_weights
from offbeat.train.config_files import read_config, write_config
from offbeat.train.tasks import Task
from train.oracle import distance
from train.runs import CLASSES, FEATURES, config_of, mlp, small_task, trained

CLOSE = 1e-6
PLAIN = {"scaling": "none", "lr": 0.1}
LEARNERS = 6
LINES = (
    "ring",
    "full-sync",
    "k-sync:3",
    "k-batch-sync:5",
    "async",
    "k-async:3",
    "k-batch-async:4",
    "softsync:2,rate=inverse",
    "ssp:1",
    "stale-drop:3",
    "adaptive-k:1,window=4",
    "async:rate=drift:0.001",
    "async:rate=delay-compensated:0.5",
    "downpour:push=4,fetch=2",
    "downpour:push=2,fetch=3",
    "local-sgd:3",
    "local-sgd:2,outer=nesterov",
)


def softmax() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES)


def clock_of(learners: int, law: str = "gamma:1,0.25", *, speeds: tuple[float, ...] = (), **options: Any) -> Clock:
    return Clock(cluster=Cluster(learners=learners, law=parse_law(law), speeds=speeds), **options)


def virtually(
    task: Task, clock: Clock, line: str, *, width: int = 0, every: float = 0.25, **changes: Any
) -> VirtualRun:
    config = config_of(sync=line, learners=clock.cluster.learners, **changes)
    return train_virtually(config, clock, task=task, width=width, every=every)


def far(outcome: VirtualRun, weights: Any) -> float:
    return distance(dict(outcome.weights), dict(weights))


# --- the same again, and at any width -----------------------------------------------------------------------------


@pytest.mark.parametrize("line", [*LINES[:2], *LINES[9:]])
def test_the_same_arguments_give_the_same_bits(line: str) -> None:
    task, clock = small_task(100), clock_of(LEARNERS)
    one, other = (virtually(task, clock, line, train={"epochs": 1}) for _ in range(2))
    assert one.points == other.points and len(one.points) > 2
    assert one.weights.keys() == other.weights.keys()
    assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
    assert one.spent == other.spent and one.staleness == other.staleness and one.dropped == other.dropped
    elsewhere = virtually(task, clock, line, seed=4, train={"epochs": 1})
    assert far(elsewhere, one.weights) > 1e-3


@pytest.mark.parametrize(
    ("line", "build", "most"),
    [*((line, softmax, 1e-5) for line in LINES), *((line, mlp, 1e-3) for line in ("ring", "k-batch-async:4"))],
)
def test_no_time_and_only_rounding_depends_on_the_width(line: str, build: Any, most: float) -> None:
    task, learners = small_task(128, build=build), 12  # enough of them to be computed together
    clock = clock_of(learners)
    alone, *others = (virtually(task, clock, line, width=width, train={"epochs": 1}) for width in (1, 2, 9, 128))
    for other in others:
        for point, same in zip(other.points, alone.points, strict=True):
            assert (point.seconds, point.update, point.samples) == (same.seconds, same.update, same.samples)
            assert point.loss == pytest.approx(same.loss, rel=10 * most)
            if same.train_loss is not None:  # before the first update
                assert point.train_loss == pytest.approx(same.train_loss, rel=10 * most)
        assert far(other, alone.weights) < most
        assert other.spent == alone.spent
        assert other.staleness == alone.staleness


def test_minibatches_are_really_computed_together() -> None:
    """Else the test above would say nothing."""
    task, clock = small_task(128, build=softmax), clock_of(12)
    alone, many = (virtually(task, clock, "k-batch-async:4", width=width) for width in (1, 128))
    assert far(many, alone.weights) > 0
    assert "up to 128 at a time" in many.how and "one by one" in alone.how


def test_time_is_that_of_the_clock_and_not_of_the_arithmetic() -> None:
    task = small_task(96)
    for law, each in (("constant:1", 1.0), ("constant:0.25", 0.25)):
        outcome = virtually(task, clock_of(4, law), "full-sync", train={"epochs": 2})
        assert outcome.end["updates"] == 12 and outcome.end["seconds"] == pytest.approx(12 * each)
    wires = Wires(size_bytes=1000, latency_s=0.5)
    clock = Clock(cluster=Cluster(learners=4, law=parse_law("constant:1"), wires=wires))
    outcome = virtually(task, clock, "full-sync", train={"epochs": 2})
    assert outcome.end["seconds"] == pytest.approx(12 * 2.0 - 0.5, abs=0.51)  # there and back, but for the last


def test_looks_are_as_often_as_asked_for_and_at_both_ends() -> None:
    outcome = virtually(small_task(96), clock_of(4), "async", every=0.5, train={"epochs": 3})
    assert [point.samples for point in outcome.points] == [0, 48, 96, 144, 192, 240, 288]
    assert outcome.points[0].seconds == 0 and outcome.points[0].train_loss is None
    best = reached_by(outcome.points, 0.0)
    assert best is outcome.points[0] and reached_by(outcome.points, 1.1) is None
    with pytest.raises(RequestError, match="above 0"):
        virtually(small_task(96), clock_of(4), "async", every=0.0)
    with pytest.raises(RequestError, match="at least 1 minibatch"):
        virtually(small_task(96), clock_of(4), "async", width=-1)


# --- synchronous training is that of one process ------------------------------------------------------------------


CASES: dict[str, dict[str, Any]] = {
    "momentum": {"schedule": "cosine"},
    "nesterov": {"nesterov": True, "weight_decay": 0.01},
    "adam": {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.01},
    "clipped": {"clip_norm": 0.2},
    "accumulated": {"accumulate": 2},
    "lars": {"optimizer": "lars", "weight_decay": 0.01},
    "lamb": {"optimizer": "lamb", "weight_decay": 0.01, "lr": 0.01},
}


@pytest.mark.parametrize("case", CASES)
def test_synchronous_learners_are_the_real_one_process_trainer(case: str, tmp_path: Path) -> None:
    """Four learners with 4 samples each, and at the end of an epoch 10 for all of them; alone, and as one."""
    task = small_task(90)
    changes = {**PLAIN, "epochs": 4, **CASES[case]}
    passes = changes.pop("accumulate", 1)
    real = trained(tmp_path, task, learners=1, train={**changes, "batch_size": 16})
    clock = clock_of(4, ends_of_epochs=True)
    changes |= {"batch_size": 4 // passes, "accumulate": passes}
    for line in ("ring", "full-sync") if "optimizer" not in changes or case == "adam" else ("ring",):
        for width in (0, 1):
            found = virtually(task, clock, line, width=width, every=1.0, train=changes)
            assert found.end["updates"] == real.end["updates"] == 24
            assert far(found, real.weights) < CLOSE
            losses = [point.loss for point in found.points[1:]]
            assert losses == pytest.approx([record["loss"] for record in real.metrics], rel=1e-5)


def test_who_waits_for_as_many_as_there_are_is_one_process_too(tmp_path: Path) -> None:
    task = small_task(96)
    changes = {**PLAIN, "epochs": 4}
    real = trained(tmp_path, task, learners=1, train={**changes, "batch_size": 16})
    found = virtually(task, clock_of(4), "k-sync:4", train=changes)
    assert found.end["updates"] == real.end["updates"] == 24
    assert far(found, real.weights) < CLOSE


@pytest.mark.parametrize("line", ["local-sgd:3", "downpour", "async", "ssp:2"])
def test_one_learner_that_is_alone_is_one_process_whatever_the_line(line: str, tmp_path: Path) -> None:
    task = small_task(96)
    changes = {**PLAIN, "epochs": 1, "weight_decay": 0.01}
    real = trained(tmp_path, task, learners=1, train=changes)
    found = virtually(task, clock_of(1), line, train=changes)
    assert found.points[-1].samples == 96 and real.end["updates"] == 24
    assert far(found, real.weights) < CLOSE


@pytest.mark.parametrize(("split", "seconds"), [("equal", 3.0), ("3:1", 1.5), ("auto", 1.5)])
def test_a_split_by_speed_is_faster_and_gives_the_gradient_of_the_union(
    split: str, seconds: float, tmp_path: Path
) -> None:
    """Of 8 samples the fast learner has 4 or 6; the other takes three times as long for each."""
    task = small_task(90)
    changes = {**PLAIN, "epochs": 2}
    real = trained(tmp_path, task, learners=1, train={**changes, "batch_size": 8})
    clock = clock_of(2, "constant:1", speeds=(1, 1 / 3), ends_of_epochs=True)
    found = virtually(task, clock, "ring", train={**changes, "split": split})
    assert found.end["updates"] == real.end["updates"] == 24
    assert far(found, real.weights) < CLOSE
    assert found.end["seconds"] == pytest.approx(24 * seconds)


# --- real runs, again ---------------------------------------------------------------------------------------------


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Dropout(0.2), nn.Linear(10, CLASSES)
    )


@pytest.mark.parametrize(
    ("line", "servers"),
    [
        ("async", 1),
        ("async", 2),
        ("k-async:2", 1),
        ("k-batch-async:2", 2),
        ("softsync:2,rate=inverse", 1),
        ("k-sync:2", 2),
    ],
)
def test_a_run_made_again_by_its_log_has_the_same_bits(line: str, servers: int, tmp_path: Path) -> None:
    task = small_task(100)
    real = trained(
        tmp_path, task, sync=line, learners=3, servers=servers, slow=("learner=1,factor=3",), train={"epochs": 2}
    )
    again = train_again(real.run.path, task=task)
    weights = read_weights(real.run.weights)
    assert weights.keys() == again.weights.keys()
    assert all(torch.equal(again.weights[name], weights[name]) for name in weights)
    assert again.end["updates"] == real.end["updates"] >= 18
    assert again.staleness_mean == pytest.approx(real.end["staleness_mean"])
    assert again.points[-1].loss == real.metrics[-1]["loss"]
    quick = train_again(real.run.path, task=task, width=128)
    assert far(quick, weights) < 1e-3


RICH = {"epochs": 2, "accumulate": 2, "schedule": "cosine", "weight_decay": 0.01, "clip_norm": 0.5}


@pytest.mark.parametrize(
    ("line", "optimizer"),
    [
        ("async:rate=drift:0.001", "sgd"),
        ("async:rate=delay-compensated:0.5", "adam"),
        ("adaptive-k:1,window=3", "adagrad"),
        ("stale-drop:1", "sgd"),
    ],
)
def test_a_rich_run_made_again_has_the_same_bits(line: str, optimizer: str, tmp_path: Path) -> None:
    """Dropout, accumulation, a schedule, decay, clipping; statistics too, where nothing was dropped."""
    task = small_task(100, build=normed)
    real = trained(tmp_path, task, sync=line, learners=3, servers=2, train={**RICH, "optimizer": optimizer})
    again = train_again(real.run.path, task=task)
    own = [name for name in real.weights if "running" in name or "tracked" in name]
    for name in real.weights:
        if line != "stale-drop:1" or name not in own:
            assert torch.equal(again.weights[name], real.weights[name]), name
    assert len(own) == 3 and again.end["updates"] == real.end["updates"]


def test_runs_that_their_logs_do_not_tell_are_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with pytest.raises(RequestError, match="not the folder of a run"):
        train_again(run.path)
    run.path.mkdir()
    for line, precision, words in (
        ("ring", "fp32", "'ring' is an all-reduce"),
        ("async", "fp16", "the loss scale of each learner"),
    ):
        write_config(run, config_of(sync=line, train={"precision": precision}))
        with pytest.raises(RequestError, match=words):
            train_again(run.path, task=small_task())
    write_config(run, config_of(sync="async"))
    with pytest.raises(LogError, match="cannot be read"):
        train_again(run.path, task=small_task())
    run.log(1).touch()
    run.log(2).touch()
    with pytest.raises(RequestError, match="was resumed; only runs without a resume"):
        train_again(run.path, task=small_task())


@pytest.mark.parametrize("line", ["downpour:push=2,fetch=2", "local-sgd:2"])
def test_what_learners_did_by_themselves_is_in_no_log(line: str, tmp_path: Path) -> None:
    run = RunDir(new_run_dir("small", tmp_path / "run", ""))
    config = config_of(sync=line, train={"epochs": 1})
    write_config(run, config)
    train_virtually(config, clock_of(2), task=small_task(), run=run)
    with pytest.raises(RequestError, match="the log does not have the steps of learners between pushes"):
        train_again(run.path, task=small_task())


def test_a_virtual_run_is_made_again_too(tmp_path: Path) -> None:
    run, task = RunDir(new_run_dir("small", tmp_path / "run", "")), small_task(100)
    config = config_of(sync="k-async:2", learners=4, train={"epochs": 2})
    write_config(run, config)
    one = train_virtually(config, clock_of(4), task=task, run=run, width=1)
    again = train_again(run.path, task=task)
    assert again.points == one.points
    assert far(again, one.weights) == 0


# --- the run's folder -----------------------------------------------------------------------------------------------


def in_folder(folder: Path, line: str, clock: Clock, *, width: int = 0, **train: Any) -> tuple[RunDir, VirtualRun]:
    config = config_of(sync=line, learners=clock.cluster.learners, train={"epochs": 2, **train})
    run = RunDir(new_run_dir(config.name, folder / f"run-{len(list(folder.iterdir()))}", ""))
    write_config(run, config)
    return run, train_virtually(config, clock, task=small_task(96, build=softmax), run=run, width=width)


@pytest.mark.parametrize("line", ["k-async:2", "k-sync:2", "adaptive-k:1,window=3", "ring", "downpour:push=2,fetch=2"])
def test_the_folder_is_that_of_a_real_run(line: str, tmp_path: Path) -> None:
    run, outcome = in_folder(tmp_path, line, clock_of(4))
    names = {"config.json", "metrics.jsonl", "log.jsonl", "trace.json", "weights.safetensors", "summary.txt"}
    assert {path.name for path in run.path.iterdir()} == names
    assert read_config(run) == outcome.config
    metrics = run.read_metrics()
    seconds = [record["seconds"] for record in metrics]
    assert seconds == sorted(set(seconds)) == [point.seconds for point in outcome.points[1:]]
    assert all(record["simulated"] is True for record in metrics)
    assert metrics[-1]["accuracy"] == outcome.end["accuracy"] == outcome.points[-1].accuracy
    weights = read_weights(run.weights)
    assert all(torch.equal(weights[name], outcome.weights[name]) for name in weights)
    assert f"4 learners under '{line}'" in run.summary.read_text()
    log = read_log(run.log(1))
    assert log.run["simulated"] is True and log.run["strategy"] == line
    assert {span.learner for span in log.spans} == {0, 1, 2, 3}
    assert max(span.end_s for span in log.spans) == pytest.approx(outcome.end["seconds"])
    trace = json.loads(run.trace.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in trace) == len(log.spans)
    if line != "ring":
        assert replay(log.run, log.decisions).version == outcome.end["updates"]


@pytest.mark.parametrize("law", ["gamma:1,0.25", "constant:1"])  # constant: much happens at the same moment
@pytest.mark.parametrize("line", ["async", "k-batch-async:3", "k-sync:2", "ring"])
def test_a_run_that_is_good_enough_ends_and_so_do_its_logs_at_any_width(line: str, law: str, tmp_path: Path) -> None:
    found = [in_folder(tmp_path, line, clock_of(9, law), width=width, epochs=8, stop_at=0.6) for width in (1, 128)]
    logs = []
    for run, outcome in found:
        end_s = outcome.points[-1].seconds
        assert outcome.end["stopped"] and outcome.end["why"] == "target accuracy reached"
        there = [(point.accuracy or 0.0) >= 0.6 for point in outcome.points]
        assert there[-1] and True in there[-3:-1], "two of three: it ends as soon as that is decided"
        assert not any(one and True in there[at + 1 : at + 3] for at, one in enumerate(there[:-3]))
        assert outcome.end["seconds"] == end_s and outcome.points[-1].samples < 8 * 96
        log = read_log(run.log(1))
        assert log.spans and all(span.end_s <= end_s for span in log.spans)
        if line != "ring":
            assert replay(log.run, log.decisions).version == outcome.end["updates"]
            assert "apply" in " ".join(log.decisions[-1]["commands"])
        logs.append(log)
    assert logs[0] == logs[1]


# --- many learners ----------------------------------------------------------------------------------------------------


class Watched(VirtualTrainer):
    """Knows how many versions of the weights there were at most."""

    most = 0

    def _after(self, update: Update) -> bool:
        self.most = max(self.most, len(self.arithmetic.replica.weights))
        return super()._after(update)


def test_a_thousand_learners_need_about_as_many_versions_of_the_weights(tmp_path: Path) -> None:
    task = small_task(4000, build=softmax)
    learners = 1000
    config = config_of(sync="async", learners=learners, train={**PLAIN, "lr": 0.001, "momentum": 0.0, "epochs": 5})
    trainer = Watched(config, task, clock_of(learners), run=None, report=lambda record: None, every=5)
    trainer.fit()
    outcome = trainer.outcome()
    assert outcome.end["updates"] == 5000
    assert outcome.staleness_mean == pytest.approx(learners * 0.9, rel=0.1)  # the first thousand are young
    assert 0.5 * learners < trainer.most < 1.5 * learners
    assert len(trainer.arithmetic.replica.slots) < 2 * 128
    first, last = outcome.points[0].loss, outcome.points[-1].loss
    assert first is not None and last is not None and last < first
