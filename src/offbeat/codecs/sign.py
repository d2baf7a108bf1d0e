"""1-bit: the sign of each number, and the mean size of each block of 32 (Seide 2014, Karimireddy 2019).

The mean size is the scale that makes the error smallest; it is sent as bf16. A payload is the scales, then the signs by
groups of 256: bit k of byte j of a group is the sign of the number k eighths of the group (rounded up) after the j-th;
set for a negative one. So an eighth of a whole group is a block, and its signs are the same bit of 32 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.codecs.coder import PIECE, PieceCoder
from offbeat.codecs.table import BLOCK, SIGN_BLOCK


class OneBit(PieceCoder):
    def __init__(self) -> None:
        super().__init__()
        self._padded = torch.empty(PIECE)
        self._means = torch.empty(PIECE // SIGN_BLOCK)
        self._tops = torch.empty(PIECE, dtype=torch.int32)
        self._signs, self._bits = torch.empty(PIECE, dtype=torch.uint8), torch.empty(PIECE // 8, dtype=torch.uint8)

    def _round(self, values: Tensor, payload: Tensor, start: int, items: int, decoded: Tensor | None) -> bool:
        scales, codes = _places(payload, start, len(values), items)
        whole = len(values) // SIGN_BLOCK * SIGN_BLOCK
        absolute, means = self._padded[: len(values)], self._means[: len(scales)]
        torch.abs(values, out=absolute)
        torch.mean(absolute[:whole].view(-1, SIGN_BLOCK), dim=1, out=means[: whole // SIGN_BLOCK])
        if whole < len(values):
            means[-1] = absolute[whole:].mean()
        scales.copy_(means)
        good = scales.isfinite()
        finite = bool(good.all())
        if not finite:
            scales.masked_fill_(~good, torch.nan)
        for first, end, width in _groups(len(values)):
            self._pack(values[first:end].view(-1, width), codes[first // 8 : -(-end // 8)])
        if decoded is not None:
            self._unpack(codes, scales, decoded)
        return finite

    def _pack(self, groups: Tensor, codes: Tensor) -> None:
        many, width = groups.shape
        each = -(-width // 8)
        padded = self._padded[: many * 8 * each].view(many, 8 * each)
        padded[:, width:] = 0.0
        padded[:, :width].copy_(groups)
        tops = self._tops[: padded.numel()].view(padded.shape)
        torch.bitwise_right_shift(padded.view(torch.int32), 31, out=tops)  # -1 for a negative number, else 0
        signs = self._signs[: padded.numel()].view(many, 8, each)
        signs.view(torch.int8).view(tops.shape).copy_(tops)
        out = codes.view(many, each)
        torch.bitwise_and(signs[:, 0], 1, out=out)
        for bit in range(1, 8):
            out.bitwise_or_(signs[:, bit].bitwise_and_(1 << bit))

    def _unpack(self, codes: Tensor, scales: Tensor, into: Tensor) -> None:
        for first, end, width in _groups(len(into)):
            self._unpack_signs(codes[first // 8 : -(-end // 8)], into[first:end].view(-1, width))
        means, whole = self._means[: len(scales)].copy_(scales), len(into) // SIGN_BLOCK * SIGN_BLOCK
        into[:whole].view(-1, SIGN_BLOCK).mul_(means[: whole // SIGN_BLOCK, None])
        if whole < len(into):
            into[whole:].mul_(means[-1])

    def _unpack_signs(self, codes: Tensor, into: Tensor) -> None:
        many, width = into.shape
        each = -(-width // 8)
        packed = codes.view(many, each)
        bits = self._bits[: codes.numel()].view(many, each)
        for bit in range(8):
            here = into[:, bit * each : (bit + 1) * each]
            if not here.shape[1]:
                break
            torch.bitwise_right_shift(packed, bit, out=bits)
            bits.bitwise_and_(1)
            here.copy_(bits[:, : here.shape[1]])
        into.mul_(-2.0).add_(1.0)

    def _decode(self, payload: Tensor, start: int, items: int, into: Tensor) -> None:
        scales, codes = _places(payload, start, len(into), items)
        self._unpack(codes, scales, into)


def _groups(items: int) -> list[tuple[int, int, int]]:
    """The whole groups and the last one: from, to, width."""
    whole = items // BLOCK * BLOCK
    both = ((0, whole, BLOCK), (whole, items, items - whole))
    return [part for part in both if part[1] > part[0]]


def _places(payload: Tensor, start: int, items: int, total: int) -> tuple[Tensor, Tensor]:
    """The scales and the signs of so many items from the start of a group on, in the payload of all."""
    blocks = -(-total // SIGN_BLOCK)
    scales = payload[: 2 * blocks].view(torch.bfloat16)
    codes = payload[2 * blocks :]
    last = -(-(start + items) // SIGN_BLOCK)
    return scales[start // SIGN_BLOCK : last], codes[start // 8 : start // 8 - (-items // 8)]
