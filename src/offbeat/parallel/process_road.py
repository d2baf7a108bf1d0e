"""Messages between stages that are processes: send and receive of a process group, tagged by stage and microbatch.

A send is handed over and goes on beside computing, as does a receive that was asked for; sends to the same rank are
moved together. So many sends for each stage and direction may be under way: with as many as the schedule's proof asks
for no rank waits for ever, since a receive is always posted by who waits for it.

A message is waited for once. Gloo never says of one that it is over, and would wait for ever the second time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.pipelines.pipeline_messages import StageMessage


class Boundary(NamedTuple):
    """What crosses from a stage to the next, and as a gradient back: the shape of a sample of it, and its type."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class ProcessRoad:
    """`ranks[stage]` is the rank of the process group that has a stage; `boundaries[stage]` lies behind it."""

    def __init__(self, ranks: Mapping[int, int], boundaries: Sequence[Boundary], *, buffers: int) -> None:
        self.ranks, self.boundaries, self.buffers = ranks, boundaries, max(1, buffers)
        self.samples: Sequence[int] = ()  # of each microbatch
        self._sending: dict[tuple[int, int], deque[tuple[Any, Tensor]]] = defaultdict(deque)
        self._coming: dict[StageMessage, tuple[Any, Tensor]] = {}
        self._awaited: Any = None
        self._waited: Any = None  # what was waited for last

    def try_send(self, message: StageMessage, value: Tensor) -> bool:
        sending = self._sending[message.source, message.target]
        while sending and self._is_over(sending[0][0]):
            sending.popleft()
        if len(sending) >= self.buffers:
            self._awaited = sending[0][0]
            return False
        whole = value.contiguous()
        sending.append((dist.isend(whole, self.ranks[message.target], tag=self._tag(message)), whole))
        return True

    def ask(self, message: StageMessage) -> None:
        boundary = self.boundaries[min(message.source, message.target)]
        value = torch.empty((self.samples[message.microbatch], *boundary.shape), dtype=boundary.dtype)
        self._coming[message] = dist.irecv(value, self.ranks[message.source], tag=self._tag(message)), value

    def try_receive(self, message: StageMessage) -> Tensor | None:
        if message not in self._coming:
            return None
        work, value = self._coming[message]
        if not self._is_over(work):
            self._awaited = work
            return None
        del self._coming[message]
        return value

    def wait(self) -> None:
        """Until what was refused last may be done."""
        self._awaited.wait()
        self._waited = self._awaited

    def _is_over(self, work: Any) -> bool:
        if work is self._waited:
            return True
        if not work.is_completed():
            return False
        work.wait()  # raises what went wrong
        return True

    def finish(self) -> Iterator[None]:
        """Yields while a send is under way; then the minibatch is over."""
        for sending in self._sending.values():
            while sending:
                self._awaited, _ = sending[0]
                if not self._is_over(self._awaited):
                    yield
                sending.popleft()

    def _tag(self, message: StageMessage) -> int:
        """Two stages may be neighbours in both directions on the same two ranks."""
        source, target, microbatch = message
        return 2 * (microbatch * len(self.ranks) + source) + (target > source)
