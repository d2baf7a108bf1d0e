"""Models as pieces, each with a minibatch and its loss; and one process that computes their microbatches in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.parallel.microbatches import split
from offbeat.parallel.stage import LossSum, Stage
from offbeat.train.models import Transformer

MICROBATCHES, SAMPLES = 8, 15  # the last microbatch has a sample less


class Case(NamedTuple):
    """A model as pieces, a minibatch, and its loss."""

    pieces: list[nn.Module]
    inputs: Tensor
    targets: Tensor
    loss: LossSum
    weight_of: Callable[[Tensor], float]


def labels_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="sum")


def mlp() -> Case:
    pieces: list[nn.Module] = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2)) for _ in range(9)]
    return Case(pieces, torch.randn(SAMPLES, 6), torch.randint(0, 6, (SAMPLES,)), labels_loss, len)


def cnn() -> Case:
    block = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(7)]
    pieces: list[nn.Module] = [*block, nn.Sequential(nn.Flatten(), nn.Linear(48, 5))]
    return Case(pieces, torch.randn(SAMPLES, 3, 4, 4), torch.randint(0, 5, (SAMPLES,)), labels_loss, len)


class _Embed(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.characters, self.places = model.characters, model.places

    def forward(self, characters: Tensor) -> Tensor:
        found: Tensor = self.characters(characters) + self.places(torch.arange(characters.shape[1]))
        return found


IGNORED = -100


def tokens_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.transpose(1, 2), targets, reduction="sum", ignore_index=IGNORED)


def transformer() -> Case:
    """Tied weights: those of the first piece and of the last. Samples have unequal numbers of tokens that count."""
    model = Transformer(11, context=5, width=8, heads=2, layers=6, tied=True, dropout=0.1)
    pieces = [_Embed(model), *model.layers, model.head]
    inputs = torch.randint(0, 11, (SAMPLES, 5))
    targets = torch.randint(0, 11, (SAMPLES, 5))
    targets[torch.rand(SAMPLES, 5) < 0.4] = IGNORED
    targets[:, 0] = 3
    return Case(pieces, inputs, targets, tokens_loss, lambda some: float((some != IGNORED).sum()))


CASES = {"mlp": mlp, "cnn": cnn, "transformer": transformer}


def case_of(name: str, dtype: torch.dtype) -> Case:
    torch.manual_seed(3)
    made = CASES[name]()
    whole = nn.ModuleList(made.pieces).to(dtype)
    inputs = made.inputs.to(dtype) if made.inputs.is_floating_point() else made.inputs
    return made._replace(pieces=list(whole), inputs=inputs)


def whole_backward(case: Case, pieces: Sequence[nn.Module], update: int = 0) -> Tensor:
    """One process, one microbatch after the other."""
    stage = Stage(pieces, range(len(pieces)))
    stage.update = update
    total = case.weight_of(case.targets)
    found = torch.zeros(())
    microbatches = zip(split(case.inputs, MICROBATCHES), split(case.targets, MICROBATCHES), strict=True)
    for number, (inputs, targets) in enumerate(microbatches):
        found = found + stage.forward_to_loss(number, inputs, targets, case.loss, 1 / total)
        stage.backward(number, None)
    return found
