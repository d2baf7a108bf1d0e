"""A model as pieces: where it can be cut, and that the pieces are the model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from offbeat.errors import RequestError
from offbeat.parallel.model_pieces import check_pieces, joined, pieces_of
from offbeat.train.models import build_model


def names_of(pieces: list[torch.fx.GraphModule]) -> list[set[str]]:
    return [{name for name, _ in piece.named_parameters(remove_duplicate=False)} for piece in pieces]


@pytest.mark.parametrize(
    ("name", "shape", "options", "count"),
    [
        ("mlp", (8,), {"layers": 3}, 4),
        ("cnn-bn", (1, 8, 8), {}, 5),  # each convolution apart from its norm
        ("resnet18", (3, 8, 8), {"width": 4}, 11),  # stem and its norm, eight blocks, the last layer
        ("alexnet", (3, 63, 63), {}, 8),
    ],
)
def test_pieces_compute_what_the_model_computes(
    name: str, shape: tuple[int, ...], options: dict[str, int], count: int
) -> None:
    torch.manual_seed(0)
    model = build_model(name, shape, 4, options)
    pieces = pieces_of(model)
    assert len(pieces) == count
    assert set.union(*names_of(pieces)) == {key for key, _ in model.named_parameters()}
    assert sum(map(len, names_of(pieces))) == len(list(model.parameters()))
    passed = check_pieces(model, pieces, torch.randn(2, *shape))
    assert all(len(value) == 2 for value in passed)


def test_a_transformer_is_cut_between_its_layers_and_its_tied_weight_is_in_two_pieces() -> None:
    model = build_model("transformer", (6,), 11, {"layers": 3, "width": 8, "heads": 2, "tied": True, "dropout": 0.1})
    pieces = pieces_of(model)
    assert "characters.weight" in names_of(pieces)[0] and "head.1.weight" in names_of(pieces)[-1]
    passed = check_pieces(model, pieces, torch.randint(0, 11, (2, 6)))
    assert len(pieces) >= 5 and {tuple(value.shape) for value in passed} == {(2, 6, 8)}
    first, last = joined(model, pieces[:1]), joined(model, pieces[-1:])
    assert next(first.parameters()) is model.get_parameter("characters.weight")
    assert set(last.state_dict()) <= set(model.state_dict())


class Wavering(nn.Module):
    """Decides anew each time, which a trace cannot know."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.calls = 0

    def forward(self, given: Tensor) -> Tensor:
        self.calls += 1
        value: Tensor = self.other(self.one(given))
        return value * self.calls


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = self.layer(given)
        return found if float(found.sum()) > 0 else -found


def test_a_model_that_its_trace_does_not_equal_is_refused() -> None:
    model = Wavering()
    with pytest.raises(RequestError, match="compute another result"):
        check_pieces(model, pieces_of(model), torch.randn(2, 3))


def test_what_cannot_be_traced_is_cut_between_the_modules_of_a_sequence() -> None:
    model = nn.Sequential(Branching(), nn.ReLU(), Branching())
    assert len(pieces_of(model)) == 2
    with pytest.raises(RequestError, match="fx cannot trace it"):
        pieces_of(Branching())
