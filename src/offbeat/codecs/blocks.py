"""int8 and int4 by blocks: whole numbers times a scale, which is the block's largest over 127 or 7 (QSGD and others).

A payload is the scales of all blocks, then the codes. A byte of int4 is low + 16 high + 8, of two numbers that are
half a block apart, so that arithmetic on floats packs and unpacks it. Blocks smaller than 2^-100 are sent as zeros, and
stay in the residual. Stochastic rounding adds a uniform number from 0 to 1 and rounds down.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from offbeat.codecs.coder import PIECE, PieceCoder
from offbeat.codecs.table import BLOCK

SMALLEST, LARGEST = 2.0**-100, 3e38


class _Blocks(PieceCoder):
    levels: int  # on each side of zero

    def __init__(self, rounding: str = "nearest") -> None:
        super().__init__()
        self._stochastic = rounding == "stochastic"
        self._chance = torch.Generator()
        self._noise = torch.empty(PIECE if self._stochastic else 0)
        self._scratch = torch.empty(PIECE)
        self._largest, self._inverse = torch.empty(PIECE // BLOCK), torch.empty(PIECE // BLOCK)

    def seed(self, number: int) -> None:
        self._chance.manual_seed(number)

    @abstractmethod
    def _code_bytes(self, items: int) -> int:
        """Of so many numbers, from the start of a block."""

    @abstractmethod
    def _pack(self, numbers: Tensor, codes: Tensor) -> None:
        """Whole numbers as floats, blocks x items, into codes. They may be overwritten."""

    @abstractmethod
    def _unpack(self, codes: Tensor, numbers: Tensor) -> None:
        """The other way."""

    def _round(self, values: Tensor, payload: Tensor, start: int, items: int, decoded: Tensor | None) -> bool:
        whole = len(values) // BLOCK * BLOCK
        finite = True
        for first, end, width in ((0, whole, BLOCK), (whole, len(values), len(values) - whole)):
            if end > first:
                scales, codes = self._places(payload, start + first, end - first, items)
                blocks = values[first:end].view(-1, width)
                out = None if decoded is None else decoded[first:end].view(-1, width)
                finite &= self._round_blocks(blocks, scales, codes, out)
        return finite

    def _round_blocks(self, blocks: Tensor, scales: Tensor, codes: Tensor, decoded: Tensor | None) -> bool:
        many, width = blocks.shape
        numbers = self._scratch[: blocks.numel()].view(many, width)
        largest, inverse = self._largest[:many], self._inverse[:many]
        torch.abs(blocks, out=numbers)
        torch.amax(numbers, dim=1, out=largest)
        torch.mul(largest, 1.0 / self.levels, out=scales)
        torch.reciprocal(largest, out=inverse)
        inverse.mul_(float(self.levels))
        ordinary = float(largest.min()) >= SMALLEST and float(largest.max()) <= LARGEST
        if not ordinary:  # NaN is neither
            small = largest < SMALLEST
            scales.masked_fill_(small, 0.0)
            inverse.masked_fill_(small, 0.0)
            scales.masked_fill_(~(largest <= LARGEST), torch.nan)
            inverse.masked_fill_(~(largest <= LARGEST), 0.0)
        torch.mul(blocks, inverse[:, None], out=numbers)
        if not ordinary:
            torch.nan_to_num_(numbers, 0.0)
        if self._stochastic:
            noise = self._noise[: blocks.numel()].view(many, width)
            noise.uniform_(generator=self._chance)
            numbers.add_(noise).floor_().clamp_(-self.levels, self.levels)
        else:
            numbers.round_()
        if decoded is not None:
            torch.mul(numbers, scales[:, None], out=decoded)
        self._pack(numbers, codes)
        return ordinary or bool((largest <= LARGEST).all())

    def _decode(self, payload: Tensor, start: int, items: int, into: Tensor) -> None:
        whole = len(into) // BLOCK * BLOCK
        for first, end, width in ((0, whole, BLOCK), (whole, len(into), len(into) - whole)):
            if end > first:
                scales, codes = self._places(payload, start + first, end - first, items)
                numbers = into[first:end].view(-1, width)
                self._unpack(codes, numbers)
                numbers.mul_(scales[:, None])

    def _places(self, payload: Tensor, start: int, items: int, total: int) -> tuple[Tensor, Tensor]:
        """The scales and the codes of some blocks in the payload of all."""
        blocks = -(-total // BLOCK)
        scales = payload[: 4 * blocks].view(torch.float32)
        codes = payload[4 * blocks :].view(torch.int8)
        at = self._code_bytes(start)
        return scales[start // BLOCK : -(-(start + items) // BLOCK)], codes[at : at + self._code_bytes(items)]


class Int8(_Blocks):
    levels = 127

    def _code_bytes(self, items: int) -> int:
        return items

    def _pack(self, numbers: Tensor, codes: Tensor) -> None:
        codes.view(numbers.shape).copy_(numbers)

    def _unpack(self, codes: Tensor, numbers: Tensor) -> None:
        numbers.copy_(codes.view(numbers.shape))


class Int4(_Blocks):
    levels = 7

    def __init__(self, rounding: str = "nearest") -> None:
        super().__init__(rounding)
        self._bytes, self._high = torch.empty(PIECE // 2), torch.empty(PIECE // 2)

    def _code_bytes(self, items: int) -> int:
        return -(-items // 2)

    def _pack(self, numbers: Tensor, codes: Tensor) -> None:
        half = -(-numbers.shape[1] // 2)
        low, high = numbers[:, :half], numbers[:, half:]
        low[:, : high.shape[1]].add_(high, alpha=16)
        codes.view(low.shape).copy_(low.add_(8))

    def _unpack(self, codes: Tensor, numbers: Tensor) -> None:
        half = -(-numbers.shape[1] // 2)
        shape = len(numbers), half
        packed, high = self._bytes[: codes.numel()].view(shape), self._high[: codes.numel()].view(shape)
        packed.copy_(codes.view(shape))
        packed.sub_(8)
        torch.mul(packed, 1 / 16, out=high)
        high.round_()
        torch.sub(packed, high, alpha=16, out=packed)
        numbers[:, :half].copy_(packed)
        numbers[:, half:].copy_(high[:, : numbers.shape[1] - half])
