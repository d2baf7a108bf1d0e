"""A model in stages, each a process: the same training as one learner on the same microbatches."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.errors import OffbeatError, RequestError
from offbeat.pipelines import build
from offbeat.predict.recorded_run import read_recorded
from offbeat.report.facts import facts_of
from offbeat.report.inputs import read_inputs
from offbeat.report.page_model import TimelineChart
from offbeat.report.run_sections import timelines
from offbeat.runs.log import read_log
from offbeat.train import launch
from offbeat.train.checkpoint import newest, save
from offbeat.train.config import Config
from offbeat.train.config_files import changed, read_config
from offbeat.train.layout import layout_of, process_names
from offbeat.train.models import Transformer
from offbeat.train.stage_plan import MeasuredPieces, measure_pieces, plan_stages
from offbeat.train.tasks import Task, Tensors, cross_entropy
from train.runs import CLASSES, FEATURES, Outcome, small_task, trained

HARD = {"clip_norm": 0.5, "schedule": "cosine", "weight_decay": 0.01, "lr": 0.1, "warmup_epochs": 1.0}


def layers() -> nn.Module:
    widths = [FEATURES, 10, 9, 8, CLASSES]
    linear = [nn.Linear(one, other) for one, other in pairwise(widths)]
    return nn.Sequential(*(part for one in linear[:-1] for part in (one, nn.ReLU(inplace=True))), linear[-1])


def with_norms() -> nn.Module:
    parts: list[nn.Module] = [nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES))


class Turned(nn.Module):
    """What was the first dimension becomes the second."""

    def forward(self, value: Tensor) -> Tensor:
        return value.transpose(0, 1)


class Scaled(nn.Module):
    """Something to learn on values of which the second dimension is the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor([[1.0], [2.0]]))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.by


def turning() -> nn.Module:
    """Two features, as many as a microbatch has samples: behind the first layer they stand where samples stood."""
    return nn.Sequential(
        nn.Linear(FEATURES, 2), Turned(), Scaled(), Turned(), nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, CLASSES)
    )


def with_one_norm() -> nn.Module:
    """Batch norm whose statistics two layers share, and change in turns."""
    norm = nn.BatchNorm1d(8)
    parts: list[nn.Module] = [nn.Linear(FEATURES, 8), norm, nn.ReLU(), nn.Linear(8, 8), norm, nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def dropping() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.Dropout(0.5), nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, CLASSES)
    )


def tied() -> nn.Module:
    return Transformer(7, context=6, width=8, heads=2, layers=2, tied=True, dropout=0.0)


def text_task() -> Task:
    chance = torch.Generator().manual_seed(1)
    characters = torch.randint(0, 7, (60, 7), generator=chance)
    data = Tensors(characters[:, :-1].contiguous(), characters[:, 1:].contiguous())
    return Task(train=data, test=data, build=tied, loss=cross_entropy)


def pipelined(folder: Path, task: Task, parallel: str, *, learners: int = 1, **more: Any) -> Outcome:
    train = {"batch_size": 8, "epochs": 2, **HARD, **more}
    return trained(folder, task, learners=learners, parallel=parallel, train=train)


def alone(folder: Path, task: Task, *, learners: int = 1, microbatches: int = 4, **more: Any) -> Outcome:
    """The same microbatches, one after the other."""
    train = {"batch_size": 8 // microbatches, "accumulate": microbatches, "epochs": 2, **HARD, **more}
    return trained(folder, task, learners=learners, train=train)


def difference(one: Outcome, other: Outcome) -> float:
    assert one.weights.keys() == other.weights.keys()
    return max(float((tensor - other.weights[name]).abs().max()) for name, tensor in one.weights.items())


@pytest.mark.parametrize(
    ("build", "parallel", "within"),
    [
        (layers, "stages=2,microbatches=4", 0.0),
        (layers, "stages=2,schedule=zb-v,microbatches=4", 1e-6),  # four stages, two of them on the same rank
        (with_norms, "stages=3,schedule=gpipe,microbatches=4", 0.0),
        (turning, "stages=3,microbatches=4", 0.0),
        (with_one_norm, "stages=3,microbatches=4", 0.0),
    ],
)
def test_stages_train_like_one_learner_on_the_same_microbatches(
    build: Callable[[], nn.Module], parallel: str, within: float, tmp_path: Path
) -> None:
    """24 updates, with clipping, momentum, warm-up and a cosine schedule; the last update of an epoch is smaller."""
    task = small_task(94, build)
    ours, theirs = pipelined(tmp_path, task, parallel), alone(tmp_path, task)
    assert ours.end["updates"] == theirs.end["updates"] == 24
    assert difference(ours, theirs) <= within
    for one, other in zip(ours.metrics, theirs.metrics, strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-5)
        assert one["samples"] == other["samples"]


def test_a_weight_that_two_stages_share_stays_one(tmp_path: Path) -> None:
    ours = pipelined(tmp_path, text_task(), "stages=2,microbatches=4")
    theirs = alone(tmp_path, text_task())
    assert torch.equal(ours.weights["characters.weight"], ours.weights["head.1.weight"])
    assert difference(ours, theirs) < 1e-6


def test_replicas_of_stages_train_like_two_learners(tmp_path: Path) -> None:
    task = small_task(96, layers)
    ours = pipelined(tmp_path, task, "stages=2,microbatches=4", learners=2)
    theirs = alone(tmp_path, task, learners=2)
    assert ours.end["updates"] == theirs.end["updates"] == 12
    assert difference(ours, theirs) < 1e-6


def test_messages_go_through_gloo_too(tmp_path: Path) -> None:
    task = small_task(48, layers)
    train = {"batch_size": 8, "epochs": 2, **HARD}
    parallel = "stages=2,schedule=gpipe,microbatches=4"
    ours = trained(tmp_path, task, learners=1, parallel=parallel, sync="native", train=train)
    assert difference(ours, alone(tmp_path, task)) == 0.0


def test_dropout_is_the_same_for_any_number_of_stages_and_with_recompute(tmp_path: Path) -> None:
    task = small_task(48, dropping)
    one = pipelined(tmp_path, task, "stages=1,microbatches=4")
    assert difference(one, pipelined(tmp_path, task, "stages=3,microbatches=4", recompute=True)) == 0.0


def test_half_precision_with_a_loss_scale_is_that_of_one_learner(tmp_path: Path) -> None:
    task = small_task(48, layers)
    ours = pipelined(tmp_path, task, "stages=2,microbatches=4", precision="fp16")
    assert difference(ours, alone(tmp_path, task, precision="fp16")) < 1e-6


def test_a_run_goes_on_with_any_number_of_stages(tmp_path: Path) -> None:
    """One epoch with two stages, one with three, one on a learner that accumulates: as three with two stages."""
    task = small_task(96, layers)
    plain: dict[str, Any] = {"schedule": "constant", "scaling": "none"}
    whole = pipelined(tmp_path, task, "stages=2,microbatches=4", epochs=3, **plain)
    first = pipelined(tmp_path, task, "stages=2,microbatches=4", epochs=1, **plain)
    notes: list[str] = []
    for changes in (
        {"parallel": "stages=3,microbatches=4", "train": {"epochs": 2}},
        {"parallel": "", "learners": 1, "train": {"epochs": 3, "batch_size": 2, "accumulate": 4}},
    ):
        config = changed(read_config(first.run), changes)
        start = launch.prepare(config, resume=first.run.path, task=task, tell=notes.append)
        assert start.checkpoint is not None
        result = launch.launch(start, lambda record: None, lambda who, line: notes.append(line))
    assert result.end["updates"] == whole.end["updates"] == 36
    ended = safetensors.torch.load_file(first.run.weights)
    assert all(torch.equal(tensor, ended[name]) for name, tensor in whole.weights.items())


HERE = os.getpid()


def dying() -> Callable[[Tensor, Tensor], Tensor]:
    """Only the last stage computes a loss; the process of the test computes some too, to measure."""
    calls = [0]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        calls[0] += os.getpid() != HERE
        if calls[0] > 60:
            os.kill(os.getpid(), signal.SIGKILL)
        return functional.cross_entropy(outputs, targets)

    return loss


def test_a_killed_stage_ends_the_run_in_a_line_that_names_it(tmp_path: Path) -> None:
    task = small_task(96, layers, dying())
    with pytest.raises(OffbeatError, match=r"^stage 1 died \(SIGKILL\); continue from .* --resume"):
        train = {"batch_size": 8, "epochs": 3}
        trained(tmp_path, task, learners=1, parallel="stages=2,microbatches=4", train=train, save={"every_epochs": 1})


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"parallel": "stages=two"}, "stages: expected a whole number from 1 to 1024; got 'two'"),
        ({"parallel": "schedule=1f1b"}, "the number of stages is missing"),
        ({"parallel": "stage=2"}, "got 'stage=2'; did you mean 'stages'?"),
        ({"parallel": "stages=2,schedule=2f2b"}, "2f2b"),
        ({"parallel": "stages=2", "learners": 2, "sync": "hierarchical:2x1"}, "sync: 'hierarchical:2x1'"),
        ({"parallel": "stages=2,microbatches=64", "learners": 2}, "cannot be split into 64 microbatches"),
        ({"parallel": "stages=2", "sync": "async", "learners": 2}, "sync: a pipeline needs an all-reduce"),
        ({"parallel": "stages=2", "train": {"split": "3:1"}, "learners": 2}, "train.split: "),
        ({"parallel": "stages=2", "slow": ("exp:0.05",), "learners": 2}, "slow: a pipeline has no"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused_in_one_line(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError) as refused:
        changed(Config(), changes)
    assert told in str(refused.value)


def test_a_model_with_too_few_layers_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="has 3 stages, but this model can be cut into 2 at most"):
        trained(tmp_path, parallel="stages=3,microbatches=4")
    with pytest.raises(RequestError, match="into 3 at most: what crosses a cut is one tensor"):
        pipelined(tmp_path, small_task(48, turning), "stages=4,microbatches=4")
    with pytest.raises(RequestError, match="into 4 at most"):  # it has six layers
        pipelined(tmp_path, small_task(48, with_one_norm), "stages=5,microbatches=4")


def test_a_prediction_has_the_halves_the_update_and_what_is_computed_again() -> None:
    task = small_task(96, layers)

    def measured(parallel: str) -> tuple[Config, MeasuredPieces]:
        config = changed(Config(), {"learners": 1, "parallel": parallel, "train": {"batch_size": 32}})
        return config, measure_pieces(config, task, task.build)

    _, whole = measured("stages=2,microbatches=4")
    assert all(not node.input_s and not node.weight_s for node in whole.nodes)
    config, split = measured("stages=2,microbatches=4,schedule=zb-h1")
    first, *others = split.nodes
    assert not first.input_s and all(node.input_s and node.weight_s for node in others)
    assert len(split.update_s) == len(split.nodes) and all(split.update_s)
    # Measured times of pieces this small are mostly noise: what is compared is computed from given ones.
    given = [node._replace(forward_s=1.0, backward_s=2.0, input_s=1.0, weight_s=1.0) for node in others]
    split = split._replace(nodes=(first._replace(forward_s=1.0, backward_s=1.0), *given))
    seconds = plan_stages(config, split).seconds
    assert plan_stages(config, split._replace(update_s=())).seconds < seconds
    assert seconds < plan_stages(changed(config, {"train": {"recompute": True}}), split).seconds


def test_microbatches_are_four_for_each_stage_by_default() -> None:
    assert layout_of("stages=3").microbatches == 12


def test_learners_are_replicas_each_of_a_process_for_every_stage() -> None:
    assert changed(Config(), {"learners": 4}).processes == 4
    config = changed(Config(), {"learners": 2, "parallel": "stages=2,schedule=zb-v"})
    assert config.processes == 4
    assert launch.learners_here(changed(Config(), {"parallel": "stages=3"})) == 1
    placement = {0: 0, 1: 1, 2: 1, 3: 0}
    assert process_names(1, placement) == ("stages 0, 3", "stages 1, 2")
    assert process_names(2, {0: 0, 1: 1})[2:] == ("replica 1 stage 0", "replica 1 stage 1")


def test_a_run_saved_when_learners_were_processes_goes_on_with_as_many_replicas(tmp_path: Path) -> None:
    task = small_task(48, layers)
    first = pipelined(tmp_path, task, "stages=2,microbatches=4", epochs=1)
    found = newest(first.run.checkpoints, lambda line: None)
    assert found is not None and found.state["learners"] == 1 and found.state.pop("processes") == 2
    save(first.run.checkpoints, found.update, found.state | {"learners": 2}, found.files, keep=1)
    config = changed(read_config(first.run), {"learners": 2, "train": {"epochs": 2}})
    notes: list[str] = []
    start = launch.prepare(config, resume=first.run.path, task=task, tell=notes.append)
    assert start.hold is not None
    start.hold.release()
    assert (start.config.learners, notes) == (1, [])


def test_the_log_has_every_action_of_a_pipeline_under_the_names_of_its_stages(tmp_path: Path) -> None:
    ended = pipelined(tmp_path, small_task(48, layers), "stages=2,microbatches=4", learners=2, epochs=1)
    names = ["replica 0 stage 0", "replica 0 stage 1", "replica 1 stage 0", "replica 1 stage 1"]
    log = read_log(ended.run.log(1))
    assert log.run["names"] == names
    row = build("1f1b", stages=2, microbatches=4).rows[1]
    ours = [span.label for span in log.spans if (span.learner, span.version, span.what) == (3, 0, "compute")]
    assert ours == [str(action) for action in row]
    assert json.loads(ended.run.trace.read_text())["traceEvents"][1]["args"]["name"] == names[0]
    (run,) = read_inputs([ended.run.path]).runs
    facts = facts_of(run)
    assert [facts.name_of(one.learner) for one in facts.by_learner] == names
    assert {one.minibatches for one in facts.by_learner} == {3} == {ended.end["updates"]}
    (chart,) = timelines([run], [facts], 10_000).items
    assert isinstance(chart, TimelineChart)
    assert chart.learners == tuple(names) and "compute 1B3" in chart.whats
    with pytest.raises(RequestError, match="in stages"):
        read_recorded(log)
