"""1-bit: the sign of each number, and the mean size of each block of 64 (Seide 2014, Karimireddy 2019).

The mean size is the scale that makes the error smallest. A payload is the scales, then the signs: bit k of byte j of a
block is the sign of the number k eighths of the block (rounded up) after the j-th; set for a negative one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.codecs.coder import PIECE, PieceCoder
from offbeat.codecs.table import SIGN_BLOCK


class OneBit(PieceCoder):
    def __init__(self) -> None:
        super().__init__()
        self._padded = torch.empty(PIECE)
        self._tops = torch.empty(PIECE, dtype=torch.int32)
        self._signs, self._bits = torch.empty(PIECE, dtype=torch.uint8), torch.empty(PIECE // 8, dtype=torch.uint8)

    def _round(self, values: Tensor, payload: Tensor, start: int, items: int, decoded: Tensor | None) -> bool:
        finite = True
        for first, end, width in _parts(len(values)):
            scales, codes = _places(payload, start + first, end - first, items)
            blocks = values[first:end].view(-1, width)
            absolute = self._padded[: blocks.numel()].view(blocks.shape)
            torch.abs(blocks, out=absolute)
            torch.mean(absolute, dim=1, out=scales)
            good = scales.isfinite()
            if not good.all():
                scales.masked_fill_(~good, torch.nan)
                finite = False
            self._pack(blocks, codes)
            if decoded is not None:
                self._unpack(codes, scales, decoded[first:end].view(-1, width))
        return finite

    def _pack(self, blocks: Tensor, codes: Tensor) -> None:
        many, width = blocks.shape
        each = -(-width // 8)
        padded = self._padded[: many * 8 * each].view(many, 8 * each)
        padded[:, width:] = 0.0
        padded[:, :width].copy_(blocks)
        tops = self._tops[: padded.numel()].view(padded.shape)
        torch.bitwise_right_shift(padded.view(torch.int32), 31, out=tops)  # -1 for a negative number, else 0
        signs = self._signs[: padded.numel()].view(many, 8, each)
        signs.view(torch.int8).view(tops.shape).copy_(tops)
        out = codes.view(many, each)
        torch.bitwise_and(signs[:, 0], 1, out=out)
        for bit in range(1, 8):
            out.bitwise_or_(signs[:, bit].bitwise_and_(1 << bit))

    def _unpack(self, codes: Tensor, scales: Tensor, into: Tensor) -> None:
        many, width = into.shape
        each = -(-width // 8)
        packed = codes.view(many, each)
        bits = self._bits[: codes.numel()].view(many, each)
        wide = self._padded[: codes.numel()].view(many, each)
        for bit in range(8):
            here = into[:, bit * each : (bit + 1) * each]
            if not here.shape[1]:
                break
            torch.bitwise_right_shift(packed, bit, out=bits)
            bits.bitwise_and_(1)
            wide.copy_(bits)
            wide.mul_(-2.0).add_(1.0).mul_(scales[:, None])
            here.copy_(wide[:, : here.shape[1]])

    def _decode(self, payload: Tensor, start: int, items: int, into: Tensor) -> None:
        for first, end, width in _parts(len(into)):
            scales, codes = _places(payload, start + first, end - first, items)
            self._unpack(codes, scales, into[first:end].view(-1, width))


def _parts(items: int) -> list[tuple[int, int, int]]:
    """The whole blocks and the last one: from, to, width."""
    whole = items // SIGN_BLOCK * SIGN_BLOCK
    both = ((0, whole, SIGN_BLOCK), (whole, items, items - whole))
    return [part for part in both if part[1] > part[0]]


def _places(payload: Tensor, start: int, items: int, total: int) -> tuple[Tensor, Tensor]:
    blocks = -(-total // SIGN_BLOCK)
    scales = payload[: 4 * blocks].view(torch.float32)
    codes = payload[4 * blocks :]
    last = -(-(start + items) // SIGN_BLOCK)
    return scales[start // SIGN_BLOCK : last], codes[start // 8 : start // 8 - (-items // 8)]
