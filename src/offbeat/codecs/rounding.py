"""bf16 and fp16: each number rounded to the nearest of 16 bits; and fp32, where nothing is rounded.

What was not sent is exact in fp32: the difference to the nearest number of fewer bits has fewer bits itself. A finite
number that would become Inf is sent as the largest finite one instead, and the rest stays in the residual: exactly, of
a number below 2^30.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.codecs.coder import PieceCoder, is_finite


class _Narrow(PieceCoder):
    dtype: torch.dtype

    def _round(self, values: Tensor, payload: Tensor, start: int, items: int, decoded: Tensor | None) -> bool:
        coded = payload.view(self.dtype)[start : start + len(values)]
        coded.copy_(values)
        wide = self._decoded[: len(values)] if decoded is None else decoded
        wide.copy_(coded)
        if is_finite(wide):
            return True
        largest = torch.finfo(self.dtype).max
        overflown = wide.isinf() & values.isfinite()
        wide[overflown] = values[overflown].clamp(-largest, largest)
        coded.copy_(wide)
        return False

    def _decode(self, payload: Tensor, start: int, items: int, into: Tensor) -> None:
        into.copy_(payload.view(self.dtype)[start : start + len(into)])


class Bf16(_Narrow):
    dtype = torch.bfloat16


class Fp16(_Narrow):
    dtype = torch.float16


class Fp32(_Narrow):
    dtype = torch.float32
