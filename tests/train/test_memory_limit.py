"""What learners need of memory: predicted, refused with what would fit, checked while they train."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offbeat.errors import OffbeatError, RequestError
from offbeat.machine import forked_bytes
from offbeat.parallel.process_road import Boundary
from offbeat.pipelines.model_graph import GraphNode
from offbeat.train.config import Config
from offbeat.train.config_files import changed
from offbeat.train.memory_limit import SPARE, check_need, check_use, used_bytes
from offbeat.train.stage_plan import MeasuredPieces, plan_stages, rank_need
from train.runs import trained

MB = 1_000_000


def eight_pieces(*, weights: int, kept: int, output: int, samples: int = 32) -> MeasuredPieces:
    node = GraphNode("piece", 1.0, 2.0, weights, kept, output)
    return MeasuredPieces(
        (node,) * 8, (Boundary((1,), torch.float32),) * 7, samples, 0.0, forked_bytes() or 0, blocks=4
    )


def config_of(**changes: object) -> Config:
    base = {"name": "needs", "device": "cpu", "learners": 1, "train": {"batch_size": 32, "momentum": 0.9}}
    return changed(Config(), {**base, **changes})


def limit_above_this_process(megabytes: int) -> str:
    """Of which so much may be used, however large this process is."""
    return str(int(((forked_bytes() or 0) + megabytes * MB) / (1 - SPARE)))


def test_a_learner_needs_its_state_and_the_activations_that_it_holds() -> None:
    measured = eight_pieces(weights=10 * MB, kept=100 * MB, output=5 * MB)
    second = [range(4, 8)]
    need = rank_need(measured, second, held=3, state=3, recompute=False, leads=False, data_bytes=0)
    assert need == (3 * 40 + 3 * (5 + 400) + 2 * 5) * MB  # the last: gradients at the end of the stage
    assert (
        rank_need(measured, second, held=3, state=3, recompute=False, leads=True, data_bytes=7)
        == need + 3 * 80 * MB + 7
    )
    assert (
        rank_need(measured, second, held=3, state=3, recompute=True, leads=False, data_bytes=0)
        == (120 + 3 * 5 + 400 + 10) * MB
    )


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    """800 MB of activations: two stages hold two microbatches of an eighth, of half of the model."""
    measured = eight_pieces(weights=MB, kept=100 * MB, output=MB)
    limit = limit_above_this_process(500)
    train = {"batch_size": 32, "memory": limit}
    with pytest.raises(RequestError) as refused:
        check_need(config_of(train=train), measured, None)
    told = str(refused.value)
    assert told.startswith("train.memory: a learner needs about ")
    assert "--parallel stages=2,microbatches=8 needs " in told and "--train.recompute true needs " in told
    config = config_of(train=train, parallel="stages=2,microbatches=8")
    plan = plan_stages(config, measured.scaled(4))
    first, second = check_need(config, measured.scaled(4), plan)
    assert second < first < int(limit)


def test_auto_takes_the_fastest_schedule_that_fits() -> None:
    measured = eight_pieces(weights=MB, kept=10 * MB, output=MB, samples=4)
    config = config_of(parallel="stages=2,schedule=auto,microbatches=8")
    roomy, narrow = plan_stages(config, measured), plan_stages(config, measured, 160 * MB)
    assert roomy.seconds <= narrow.seconds
    assert (
        max(narrow.need_bytes)
        <= 160 * MB
        < max(plan_stages(changed(config, {"parallel": "stages=2,schedule=gpipe,microbatches=8"}), measured).need_bytes)
    )


def test_learners_say_what_they_used_and_end_where_that_is_too_much(tmp_path: Path) -> None:
    ended = trained(tmp_path, learners=1, parallel="stages=2,microbatches=4", train={"memory": "64GB", "epochs": 1})
    told = next(note for note in ended.notes if note.startswith("memory that learners used at most: "))
    assert told.count("MB") + told.count("GB") == 2
    with pytest.raises(OffbeatError, match=r"of memory, more than --memory 1 MB"):
        check_use(MB)
    check_use(2 * used_bytes())
    with pytest.raises(RequestError, match=r"train\.memory: a learner needs about .*, more than 95 % of 1MB"):
        trained(tmp_path, learners=1, train={"memory": "1MB"})


def test_a_limit_is_a_size() -> None:
    with pytest.raises(RequestError, match=r"train\.memory: "):
        config_of(train={"memory": "much"})
