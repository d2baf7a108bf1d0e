"""An optimizer's state, as torch keeps it for each parameter and as the servers keep it: vectors for all of them.

Law: what `to_vectors` makes of an optimizer's state, `from_vectors` makes into the same state again, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

State = dict[Tensor, Any]


def to_vectors(
    trained: Sequence[nn.Parameter],
    state: Mapping[Tensor, Mapping[str, Any]],
    names: Sequence[str],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Weights and state, as `Arena.current` gives them; `names` are the vectors of the rule."""
    items = sum(parameter.numel() for parameter in trained)
    keys = ("weights", *(f"state.{name}" for name in names))
    vectors = {key: torch.zeros(items, dtype=dtype) for key in keys}
    steps = torch.zeros(len(trained), dtype=torch.int64)
    start = 0
    with torch.no_grad():
        for index, parameter in enumerate(trained):
            end = start + parameter.numel()
            vectors["weights"][start:end] = parameter.detach().reshape(-1)
            mine = state.get(parameter, {})
            for name in names:
                if mine.get(name) is not None:
                    vectors[f"state.{name}"][start:end] = mine[name].reshape(-1)
                    steps[index] = 1  # SGD does not count; that its momentum has begun is all that matters
            if "step" in mine:
                steps[index] = int(mine["step"])
            start = end
    return {**vectors, "steps": steps}


def from_vectors(trained: Sequence[nn.Parameter], kept: Mapping[str, Tensor], *, counts: bool) -> State:
    """The state of each parameter that has made a step; `counts`: whether the optimizer keeps their number."""
    found: State = {}
    start = 0
    for parameter, steps in zip(trained, kept["steps"].tolist(), strict=True):
        end = start + parameter.numel()
        if steps:
            found[parameter] = {"step": torch.tensor(float(steps))} if counts else {}
            for name, vector in kept.items():
                if name.startswith("state."):
                    piece = vector[start:end].view(parameter.shape)
                    found[parameter][name[6:]] = piece.to(parameter.device, parameter.dtype, copy=True)
        start = end
    return found
