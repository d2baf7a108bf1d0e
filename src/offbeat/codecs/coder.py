"""What every codec does with tensors: encode, decode, decode and add.

Laws. Tensors are flat, fp32, on the CPU and contiguous; a payload is uint8 of exactly `Codec.size_bytes(items)` bytes
and starts at a multiple of 4. `encode(values, payload, residual)` encodes values + residual and leaves in `residual`
what was not sent: decoded + new residual = values + old residual, bit for bit for bf16, fp16, top-k and random-k, and
within 2^-22 of the largest for the others. What is not finite never stays in a residual. Rounding codecs allocate
nothing per call: they work through scratch memory that fits the cache.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from offbeat.codecs.table import BLOCK

PIECE = 1024 * BLOCK  # items that are worked on while they are in the cache


class Coder(ABC):
    """Encodes and decodes. Keeps scratch memory: not for two threads at once.

    `seed` chooses the random numbers of the next `encode`, where there are any.
    """

    def seed(self, number: int) -> None:  # noqa: B027 - most codecs use no chance
        """Use the random numbers of this number: the same number, the same payload."""

    def residual_items(self, items: int) -> int:
        """How long the residual of so many items is best; the items alone are always enough."""
        return items

    def begin_from(self, items: int, start: Tensor | None) -> None:  # noqa: B027 - most codecs start anew each time
        """The next `encode` of so many items starts from what `start_of` gave after the last; None: from nothing."""

    def start_of(self, items: int) -> Tensor | None:
        """What the next `encode` of so many items of the same tensor starts from, if that is anything."""
        return None

    @abstractmethod
    def encode(self, values: Tensor, payload: Tensor, residual: Tensor | None = None, *, take: bool = False) -> None:
        """Into the payload. With `take`, `values` become what is decoded from it."""

    @abstractmethod
    def decode(self, payload: Tensor, into: Tensor) -> None:
        """Overwrite."""

    @abstractmethod
    def add(self, payload: Tensor, into: Tensor) -> None:
        """Decode and add."""


class PieceCoder(Coder):
    """A codec that rounds each number by itself or by blocks, so it goes through a tensor in pieces."""

    def __init__(self) -> None:
        self._decoded = torch.empty(PIECE)

    @abstractmethod
    def _round(self, values: Tensor, payload: Tensor, start: int, items: int, decoded: Tensor | None) -> bool:
        """Encode values[start:] of so many items as their part of the payload, and decode that part.

        False where something is not finite.
        """

    @abstractmethod
    def _decode(self, payload: Tensor, start: int, items: int, into: Tensor) -> None:
        """Decode the part of the payload that starts at this item."""

    def encode(self, values: Tensor, payload: Tensor, residual: Tensor | None = None, *, take: bool = False) -> None:
        items = len(values)
        for start, end in pieces(items):
            part = values[start:end]
            decoded = self._decoded[: end - start] if residual is not None else None
            if residual is None:
                self._round(part, payload, start, items, decoded)
            else:
                rest = residual[start:end]
                rest.add_(part)
                finite = self._round(rest, payload, start, items, decoded)
                assert decoded is not None
                rest.sub_(decoded)
                if not finite:
                    torch.nan_to_num_(rest, 0.0, 0.0, 0.0)
            if take:  # from the payload itself: zeros have a sign here, and none there
                self._decode(payload, start, items, part)

    def decode(self, payload: Tensor, into: Tensor) -> None:
        for start, end in pieces(len(into)):
            self._decode(payload, start, len(into), into[start:end])

    def add(self, payload: Tensor, into: Tensor) -> None:
        for start, end in pieces(len(into)):
            decoded = self._decoded[: end - start]
            self._decode(payload, start, len(into), decoded)
            into[start:end].add_(decoded)


def pieces(items: int) -> Iterator[tuple[int, int]]:
    """Where each piece starts and ends."""
    return ((start, min(items, start + PIECE)) for start in range(0, items, PIECE))


def is_finite(values: Tensor) -> bool:
    """Whether a sum of them is: if so, each of them is. (The other way round it may be wrong.)"""
    return math.isfinite(float(values.sum()))
