"""top-k and random-k: a few numbers as they are, and zeros elsewhere; all that is not sent stays in the residual.

top-k takes its threshold from a sample of the numbers, so it needs no sort of all of them: those above it are a few
more than k, and the largest k of these are sent. A payload is k places (int32), then k values.

random-k cuts the tensor into k runs and takes one place of each by chance. The places follow from the seed, which all
ranks share, so a payload is k values, and payloads can be added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.codecs.coder import Coder, is_finite
from offbeat.codecs.table import kept

_SAMPLE = 32 * 1024  # items that a threshold is estimated from
_MORE = 1.25  # times k are to be above it
_LOWER = 0.7  # what a threshold is lowered by where fewer are
_TRIES = 8


class _Sparse(Coder):
    def __init__(self, share: float) -> None:
        self.share = share
        self._added = torch.empty(0)

    def _sum(self, values: Tensor, residual: Tensor | None) -> Tensor:
        """What is to be sent, in the residual's memory if there is one."""
        if residual is not None:
            return residual.add_(values)
        if len(self._added) < len(values):
            self._added = torch.empty(len(values))
        return self._added[: len(values)].copy_(values)

    def decode(self, payload: Tensor, into: Tensor) -> None:
        into.zero_()
        self.add(payload, into)

    def encode(self, values: Tensor, payload: Tensor, residual: Tensor | None = None, *, take: bool = False) -> None:
        if not len(values):
            return
        left = self._sum(values, residual)
        self._send(left, payload)
        if take:
            self.decode(payload, values)

    def _send(self, left: Tensor, payload: Tensor) -> None:
        """Into the payload; what is sent, or is not finite, becomes 0 in `left`."""
        raise NotImplementedError


class TopK(_Sparse):
    def __init__(self, share: float) -> None:
        super().__init__(share)
        self._sizes = torch.empty(0)
        self._chance = torch.Generator()

    def _send(self, left: Tensor, payload: Tensor) -> None:
        count = kept(len(left), self.share)
        finite = is_finite(left) or bool(left.isfinite().all())
        if not finite:
            torch.nan_to_num_(left, 0.0, 0.0, 0.0)
        places = self._largest(left, count)
        values = payload[4 * count :].view(torch.float32)
        torch.index_select(left, 0, places, out=values)
        if not finite:
            values.fill_(torch.nan)
        else:
            left.index_fill_(0, places, 0.0)
        payload[: 4 * count].view(torch.int32).copy_(places)

    def _largest(self, left: Tensor, count: int) -> Tensor:
        if len(self._sizes) < len(left):
            self._sizes = torch.empty(len(left))
        sizes = self._sizes[: len(left)]
        torch.abs(left, out=sizes)
        threshold = self._threshold(sizes, count)
        for _ in range(_TRIES):
            found = torch.nonzero(sizes >= threshold).view(-1)
            if len(found) >= count or not threshold:
                break
            threshold *= _LOWER
        else:
            found = torch.arange(len(sizes))
        if len(found) > count:
            best = torch.topk(sizes[found], count, sorted=False).indices
            found = found[best.sort().values]
        return found

    def _threshold(self, sizes: Tensor, count: int) -> float:
        """Above which a little more than `count` of them are, by a sample that is the same every time."""
        self._chance.manual_seed(len(sizes))
        many = min(_SAMPLE, len(sizes))
        sample = sizes
        if many < len(sizes):
            sample = sizes[torch.randint(len(sizes), (many,), generator=self._chance)]
        rank = min(many, int(_MORE * count * many / len(sizes)) + 2)
        return float(torch.kthvalue(sample, many - rank + 1).values)

    def add(self, payload: Tensor, into: Tensor) -> None:
        count = kept(len(into), self.share)
        into.index_add_(0, payload[: 4 * count].view(torch.int32), payload[4 * count :].view(torch.float32))


class RandomK(_Sparse):
    def __init__(self, share: float) -> None:
        super().__init__(share)
        self._chance = torch.Generator()
        self._seed = 0

    def seed(self, number: int) -> None:
        self._seed = number

    def places(self, items: int) -> Tensor:
        """One of each run of items; every item is as likely as the others of its run."""
        count = kept(items, self.share)
        self._chance.manual_seed(self._seed)
        starts = torch.arange(count + 1, dtype=torch.int64).mul_(items).div_(max(1, count), rounding_mode="floor")
        lengths = starts[1:] - starts[:-1]
        drawn = torch.rand(count, generator=self._chance, dtype=torch.float64)
        return starts[:-1] + torch.minimum((drawn * lengths).long(), lengths - 1)

    def _send(self, left: Tensor, payload: Tensor) -> None:
        places = self.places(len(left))
        torch.index_select(left, 0, places, out=payload.view(torch.float32))
        left.index_fill_(0, places, 0.0)
        if not is_finite(left):
            torch.nan_to_num_(left, 0.0, 0.0, 0.0)

    def add(self, payload: Tensor, into: Tensor) -> None:
        if len(into):
            into.index_add_(0, self.places(len(into)), payload.view(torch.float32))
