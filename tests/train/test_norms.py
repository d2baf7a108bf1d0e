"""Synchronised batch norm in real processes beside torch's own in one, on all their samples together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat.errors import RequestError
from offbeat.train.norms import SynchronisedBatchNorm, average_buffers, synchronise
from train.norm_ranks import CHANNELS, batches_of, net, prepare, slopes_of, told, trained

TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
DDP_COUNTS = [3, 1, 0]
# Each case: the samples of every rank, round by round, and the options of the layer.
CASES: dict[str, tuple[list[list[int]], dict[str, Any]]] = {
    "equal": ([[4, 4]], {}),
    "uneven": ([[5, 2], [1, 6]], {}),
    "three ranks, one empty": ([[3, 0, 4], [0, 0, 2]], {}),
    "one sample each": ([[1, 1, 1]], {}),
    "cumulative": ([[3, 1], [2, 2], [1, 4]], {"momentum": None}),
    "without scale and shift": ([[3, 2]], {"affine": False}),
    "untracked": ([[3, 2]], {"track_running_stats": False}),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[Any]]:
    """What every rank returned, by case: all programs in one group of 2 ranks and one of 3."""
    asked: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {2: {}, 3: {}}
    for name, (rounds, options) in CASES.items():
        for dtype in TOLERANCE:
            given = {"dtype": dtype, "rounds": rounds, **options}
            asked[len(rounds[0])][f"{name} {dtype}"] = ("norms", given)
    asked[2]["half"] = ("norms", {"dtype": "bfloat16", "rounds": [[3, 2]], "affine": False})
    asked[3]["one in all"] = ("too_few", {"counts": [0, 1, 0]})
    asked[2]["none in all"] = ("too_few", {"counts": [0, 0]})
    asked[2]["eval"] = ("evaluated", {})
    asked[3]["ddp"] = ("through_ddp", {"counts": DDP_COUNTS})
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    ended = subprocess.run(
        [sys.executable, "-m", "train.norm_ranks"],
        input=json.dumps(asked),
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    found = {}
    for ranks in json.loads(ended.stdout).values():
        for rank, outcome in enumerate(ranks):
            assert "value" in outcome, f"rank {rank}: {outcome}"
        for name in ranks[0]["value"]:
            found[name] = [outcome["value"][name] for outcome in ranks]
    return found


def close(made: Any, expected: Any, tolerance: float) -> None:
    one, other = (torch.tensor(given, dtype=torch.float64) for given in (made, expected))
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_ranks_get_what_one_process_gets_on_all_samples(outcomes: dict[str, list[Any]], case: str, dtype: str) -> None:
    rounds, options = CASES[case]
    ranks = outcomes[f"{case} {dtype}"]
    kind, tolerance = getattr(torch, dtype), TOLERANCE[dtype]
    # The oracle is in double precision, on the samples as they were rounded: float32 is then held to its own rounding.
    norm = nn.BatchNorm2d(CHANNELS, dtype=torch.float64, **options)
    prepare(norm)

    def union(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts).double()

    pairs = [(union(batches_of(n, kind, seed)), union(slopes_of(n, kind, seed))) for seed, n in enumerate(rounds)]
    expected = told(norm, pairs)
    for key in ("outputs", "slopes"):
        for index in range(len(rounds)):
            made = [row for rank in ranks for row in rank[key][index]]
            close(made, expected[key][index], tolerance)
    for index, gradient in enumerate(expected["gradients"]):
        shares = torch.tensor([rank["gradients"][index] for rank in ranks], dtype=torch.float64)
        close(shares.sum(0).tolist(), gradient, tolerance)
    for rank in ranks:
        assert rank["buffers"] == ranks[0]["buffers"]  # the same bits everywhere
        assert rank["buffers"].keys() == expected["buffers"].keys()
        for name, buffer in expected["buffers"].items():
            close(rank["buffers"][name], buffer, tolerance)


def test_half_precision_is_normalised_in_single_precision(outcomes: dict[str, list[Any]]) -> None:
    ranks = outcomes["half"]
    union = torch.cat(batches_of([3, 2], torch.bfloat16, 0)).double()
    expected = nn.functional.batch_norm(union, None, None, training=True)
    made = [row for rank in ranks for row in rank["outputs"][0]]
    close(made, expected.tolist(), 2**-8)  # one rounding of the result: 8 bits


def test_too_few_values_in_all_are_refused_on_every_rank(outcomes: dict[str, list[Any]]) -> None:
    for words, count in ((outcomes["one in all"], 1), (outcomes["none in all"], 0)):
        assert all(f"all ranks together have {count}" in one for one in words), words


def test_in_eval_mode_no_rank_waits_for_another(outcomes: dict[str, list[Any]]) -> None:
    expected = nn.BatchNorm1d(CHANNELS).eval()(torch.full((2, CHANNELS), 5.0))
    assert outcomes["eval"][0] == expected.tolist()


def test_ddp_gives_the_gradient_of_the_mean_over_all_samples(outcomes: dict[str, list[Any]]) -> None:
    model = net(0)
    inputs = torch.cat(batches_of(DDP_COUNTS, torch.float64, 7, places=3))
    targets = torch.cat([torch.arange(count) % 2 for count in DDP_COUNTS])
    trained(model, inputs, targets, 1 / sum(DDP_COUNTS))
    for gradients in outcomes["ddp"]:
        for made, parameter in zip(gradients, model.parameters(), strict=True):
            assert parameter.grad is not None
            close(made, parameter.grad.tolist(), 1e-11)


def test_without_a_process_group_it_is_plain_batch_norm() -> None:
    plain, made = nn.BatchNorm2d(CHANNELS), SynchronisedBatchNorm(CHANNELS)
    inputs = torch.randn(4, CHANNELS, 2, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(plain(inputs), made(inputs))
    assert torch.equal(plain.state_dict()["running_var"], made.state_dict()["running_var"])
    with pytest.raises(ValueError, match="got 1 dimensions"):
        made(torch.ones(3))


class Block(nn.Module):
    """A norm under two names, as a residual block may have it, and one that is no batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(2, eps=1e-3, momentum=None)
        self.bn2 = nn.BatchNorm2d(2, affine=False)
        self.last_norm = self.bn2
        self.other = nn.GroupNorm(1, 2)
        self.empty = None
        self.inside = nn.Sequential(nn.BatchNorm1d(5), nn.BatchNorm3d(4, track_running_stats=False))


def test_every_batch_norm_is_replaced_and_keeps_what_it_had() -> None:
    block = Block()
    block.bn1.eval()
    before = dict(block.bn1.named_parameters()) | dict(block.bn1.named_buffers())
    names = list(block.state_dict())
    model, count = synchronise(block)
    assert (model, count) == (block, 4)
    assert not any(isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) for module in model.modules())
    assert block.bn2 is block.last_norm and isinstance(block.bn2, SynchronisedBatchNorm)
    after = dict(block.bn1.named_parameters()) | dict(block.bn1.named_buffers())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    assert (block.bn1.eps, block.bn1.momentum, block.bn1.training, block.bn2.training) == (1e-3, None, False, True)
    assert list(block.state_dict()) == names
    assert isinstance(block.other, nn.GroupNorm)
    assert synchronise(block) == (block, 0)


def test_a_model_that_is_itself_a_norm_is_replaced_and_a_lazy_one_refused() -> None:
    model, count = synchronise(nn.BatchNorm1d(3))
    assert isinstance(model, SynchronisedBatchNorm) and count == 1
    with pytest.raises(RequestError, match="run the model once"):
        synchronise(nn.Sequential(nn.LazyBatchNorm1d()))


def test_buffers_are_averaged_and_counts_are_the_largest() -> None:
    states = [
        {"mean": torch.tensor([1.0, 2.0]), "seen": torch.tensor(3), "half": torch.tensor(1.0, dtype=torch.float16)},
        {"mean": torch.tensor([3.0, 8.0]), "seen": torch.tensor(7), "half": torch.tensor(2.0, dtype=torch.float16)},
    ]
    merged = average_buffers(states)
    assert merged["mean"].tolist() == [2.0, 5.0] and merged["mean"].dtype == torch.float32
    assert merged["seen"].item() == 7 and merged["seen"].dtype == torch.int64
    assert merged["half"].item() == 1.5 and merged["half"].dtype == torch.float16


def test_the_mean_of_equal_buffers_is_bit_for_bit_what_they_are() -> None:
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(average_buffers([{"x": values}] * 7)["x"], values)


def test_buffers_of_unlike_models_are_not_averaged() -> None:
    with pytest.raises(RequestError, match=r"learners 0 and 1 .*\(b\)"):
        average_buffers([{"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)}])
    with pytest.raises(RequestError, match="got none"):
        average_buffers([])
