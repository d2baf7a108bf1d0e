"""A minibatch in pieces, and the random numbers of each piece.

A microbatch draws by its place: the numbers of a layer depend on the seed, the update, the microbatch and the place of
the layer in the model, and not on how many stages there are or in which order they compute.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from offbeat.errors import RequestError


def split(batch: Tensor, microbatches: int) -> tuple[Tensor, ...]:
    """Pieces of equal size; the last ones may have a sample less."""
    if len(batch) < microbatches:
        raise RequestError(f"a minibatch of {len(batch)} samples cannot be split into {microbatches} microbatches")
    return torch.tensor_split(batch, microbatches)


@contextmanager
def drawn_by_place(*place: int) -> Iterator[None]:
    """Random numbers inside are those of this place; outside they go on as if nothing was drawn."""
    digest = hashlib.blake2b(repr(place).encode(), digest_size=8).digest()
    generator = torch.default_generator  # torch.manual_seed would seed every device that may ever be used, each time
    before = generator.get_state()
    generator.manual_seed(int.from_bytes(digest, "big") >> 1)
    try:
        yield
    finally:
        generator.set_state(before)


def bounds(pieces: int, stages: int) -> list[range]:
    """As many pieces in each stage, in order; they differ by one at most."""
    if stages > pieces:
        raise RequestError(f"a model of {pieces} pieces cannot be cut into {stages} stages")
    return [range(stage * pieces // stages, (stage + 1) * pieces // stages) for stage in range(stages)]


def total_of(weights: Sequence[float]) -> float:
    total = sum(weights)
    if total <= 0:
        raise RequestError("the loss weights of a minibatch add up to 0, so there is nothing to learn from it")
    return total
