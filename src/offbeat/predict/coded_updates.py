"""The mean of all learners' gradients under a coded all-reduce, as DDP and a process group compute it.

DDP sends flat buckets: at first one with the parameters in their order; after the first update buckets in the order in
which gradients are ready, of 1 MiB and then of 25 MiB. What was not sent in the first update is dropped with its bucket
(`collectives.residuals`). The order decides which numbers share a block or a chunk, so it is the same here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import _DEFAULT_FIRST_BUCKET_BYTES, _compute_bucket_assignment_by_size

from offbeat.collectives.choice import Choice
from offbeat.collectives.lock_step import LockStep
from offbeat.collectives.residuals import Kept

_BUCKET_BYTES = 25 * 1024 * 1024  # DDP's default


class CodedUpdates:
    """Of a model with these parameters. `ready` is the order in which their gradients are there, `momentum` the
    optimizer's (`collectives.momentum`)."""

    def __init__(
        self, line: str, learners: int, parameters: Sequence[Tensor], ready: Sequence[int], momentum: float = 0.0
    ) -> None:
        self._learners, self._parameters, self._momentum = learners, parameters, momentum
        self._group = LockStep(Choice(line, learners), learners)
        self._offsets = [0]
        for one in parameters:
            self._offsets.append(self._offsets[-1] + one.numel())
        self._buckets = self._cut(range(len(parameters)), [sys.maxsize])
        self._ready = list(ready)
        self._updates = 0

    @property
    def sent_bytes(self) -> int:
        """By all learners, so far."""
        return self._group.sent_bytes

    def _cut(self, order: Sequence[int], limits: list[int]) -> list[_Bucket]:
        tensors = [self._parameters[index] for index in order]
        found, _ = _compute_bucket_assignment_by_size(tensors, limits, [False] * len(order), list(order))
        return [_Bucket(indices, self._parameters, self._learners, self._momentum) for indices in found]

    def mean(self, gradients: Sequence[Tensor]) -> Tensor:
        """Of the flat gradient of each learner, the parameters one behind the other."""
        if self._updates == 1:
            self._buckets = self._cut(self._ready, [_DEFAULT_FIRST_BUCKET_BYTES, _BUCKET_BYTES])
        self._updates += 1
        mean = torch.empty_like(gradients[0])
        for bucket in self._buckets:
            places = [slice(self._offsets[index], self._offsets[index + 1]) for index in bucket.indices]
            sums = [torch.cat([one[place] for place in places]).div_(self._learners) for one in gradients]
            self._group.sum(sums, bucket.kept)
            start = 0
            for place in places:
                size = place.stop - place.start
                mean[place] = sums[0][start : start + size]
                start += size
        return mean


class _Bucket:
    """Parameters that are sent together, and what each learner has not sent of them yet."""

    def __init__(self, indices: Sequence[int], parameters: Sequence[Tensor], learners: int, momentum: float) -> None:
        self.indices = list(indices)
        items = sum(parameters[index].numel() for index in indices)
        shapes = tuple(tuple(parameters[index].shape) for index in indices)
        self.kept = [Kept(items, shapes=shapes, momentum=momentum) for _ in range(learners)]


def order_of_gradients(trained: Sequence[nn.Parameter]) -> tuple[list[int], Callable[[], None]]:
    """A list that the next backward fills, and what ends that."""
    ready: list[int] = []
    places = {id(one): index for index, one in enumerate(trained)}

    def seen(parameter: Tensor) -> None:
        if places[id(parameter)] not in ready:
            ready.append(places[id(parameter)])

    handles = [
        one.register_post_accumulate_grad_hook(seen)  # type: ignore[no-untyped-call] # torch's own
        for one in trained
    ]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return ready, end
