"""What ranks do in the tests of synchronised batch norm, and the process that forks them.

The module is run with JSON on its input: for each number of ranks a dict of name -> [program, arguments]. It prints
what became of every rank; the value of one that did well is a dict of name -> what the program returned.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

import torch
from torch import Tensor, nn

from collectives.nursery import _run
from collectives.programs import join
from offbeat.train.norms import SynchronisedBatchNorm, synchronise

CHANNELS = 3


def batches_of(counts: list[int], dtype: torch.dtype, seed: int, places: int = 2) -> list[Tensor]:
    """Each rank's images, far from zero and each rank's elsewhere: where a careless variance loses its digits."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(n, CHANNELS, places, places, generator=generator, dtype=torch.float64) for n in counts]
    return [(one * (rank + 1) + 30 * (rank + 1)).to(dtype) for rank, one in enumerate(made)]


def slopes_of(counts: list[int], dtype: torch.dtype, seed: int) -> list[Tensor]:
    """What comes from above in the backward pass."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return [torch.randn(n, CHANNELS, 2, 2, generator=generator, dtype=torch.float64).to(dtype) for n in counts]


def prepare(norm: nn.modules.batchnorm._BatchNorm) -> None:
    if norm.affine:
        with torch.no_grad():
            norm.weight.copy_(torch.tensor([0.5, 2.0, -1.0]))
            norm.bias.copy_(torch.tensor([1.0, 0.0, -3.0]))


def told(norm: nn.modules.batchnorm._BatchNorm, passes: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Forward and backward, one pass after the other: all that comes out."""
    outputs, slopes = [], []
    for given, above in passes:
        inputs = given.clone().requires_grad_()
        made = norm(inputs)
        made.backward(above)
        assert inputs.grad is not None and made.dtype == given.dtype
        outputs.append(made.tolist())
        slopes.append(inputs.grad.tolist())
    return {
        "outputs": outputs,
        "slopes": slopes,
        "gradients": [p.grad.tolist() for p in norm.parameters() if p.grad is not None],
        "buffers": {name: buffer.tolist() for name, buffer in norm.named_buffers()},
    }


def norms(rank: int, dtype: str, rounds: list[list[int]], **options: Any) -> dict[str, Any]:
    """Rounds of forward and backward with so many samples on each rank."""
    kind = getattr(torch, dtype)
    norm = SynchronisedBatchNorm(CHANNELS, dtype=kind, **options)
    prepare(norm)
    pairs = [
        (batches_of(counts, kind, seed)[rank], slopes_of(counts, kind, seed)[rank])
        for seed, counts in enumerate(rounds)
    ]
    return told(norm, pairs)


def too_few(rank: int, counts: list[int]) -> str:
    """The words of the refusal; then a collective, to show that nobody was left behind in one."""
    words = ""
    try:
        SynchronisedBatchNorm(CHANNELS)(torch.ones(counts[rank], CHANNELS))
    except ValueError as error:
        words = str(error)
    torch.distributed.barrier()
    return words


def evaluated(rank: int) -> list[Any]:
    """In eval mode a rank may be alone in calling it."""
    norm = SynchronisedBatchNorm(CHANNELS).eval()
    values: list[Any] = norm(torch.full((2, CHANNELS), 5.0)).tolist() if rank == 0 else []
    return values


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(CHANNELS, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 2)
    ).double()


def trained(model: nn.Module, inputs: Tensor, targets: Tensor, scale: float) -> None:
    """One backward pass of `scale` times the sum of the losses; an empty batch has a loss of 0 and goes through too."""
    losses = nn.functional.cross_entropy(model(inputs), targets, reduction="sum")
    (losses * scale).backward()  # type: ignore[no-untyped-call] # torch's own


def through_ddp(rank: int, counts: list[int]) -> list[Any]:
    """A model with two norms under DDP, the loss scaled so that the mean over ranks is that over all samples."""
    model, replaced = synchronise(net(0))
    assert replaced == 2
    parallel = nn.parallel.DistributedDataParallel(model)
    inputs = batches_of(counts, torch.float64, 7, places=3)[rank]
    targets = torch.arange(counts[rank]) % 2
    trained(parallel, inputs, targets, len(counts) / sum(counts))
    return [p.grad.tolist() for p in model.parameters() if p.grad is not None]


def several(rank: int, ranks: int, store: str, asked: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Programs one after the other, in one group."""
    join(rank, ranks, store)
    return {name: globals()[program](rank, **given) for name, (program, given) in asked.items()}


def main() -> None:
    import torch._dynamo  # noqa: F401 - DDP loads it: once here, not once a rank

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ranks print goes to the errors
    outcomes = {}
    for ranks, asked in json.load(sys.stdin).items():
        with tempfile.TemporaryDirectory() as folder:
            outcomes[ranks] = _run(several, int(ranks), f"{folder}/store", 60, {"asked": asked})
    answers.write(json.dumps(outcomes))
    answers.flush()


if __name__ == "__main__":
    main()
