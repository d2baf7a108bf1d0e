"""Updates on their way through the shards: which job comes next, into which buffer, and who still reads which.

A commit group is a set of shards that commit together. Policies with a common version have one, with all shards: an
update is there on all or on none. Downpour has one for each shard, and nothing keeps them together.

The weights lie in several buffers. An update is computed out of place, from the current buffer into one that nobody
reads, and then that one is current. Whoever is to read pins first: a pinned buffer is never written. Without a free
buffer the next update waits for a reader to finish.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from offbeat.server.wire import Hyper, ShardJob

Pin = tuple[str, int, int]  # ("go" or "ask", learner, number), ("unmeasured", learner, seq) or ("ticket", ticket, 0)


@dataclass(slots=True, kw_only=True)
class PendingUpdate:
    """An update, or with `drift` the question how far the weights have moved since a gradient was computed."""

    tickets: tuple[int, ...]
    slots: tuple[int, ...] = ()
    scales: tuple[float, ...] = ()
    reads: tuple[tuple[int, ...], ...] = ()  # per gradient: the buffer of each commit group
    compensation: float = 0.0
    damping: float = 1.0
    hyper: tuple[Hyper, ...] = ()
    skip: tuple[int, ...] = ()
    drift: bool = False
    groups_left: int = 0
    sums: list[float] = field(default_factory=list)


def clip_of(sums: Iterable[float], most: float) -> float:
    """By what a gradient is to be multiplied so that its norm is at most this; as torch's clip_grad_norm_ does."""
    return min(1.0, most / (math.sqrt(math.fsum(sums)) + 1e-6))


class CommitGroup:
    """One set of shards and what it does now; see the module's text."""

    def __init__(self, index: int, shards: Iterable[int], *, buffers: int, clip_norm: float) -> None:
        self.index = index
        self.shards = tuple(shards)
        self.buffers = buffers
        self.clip_norm = clip_norm
        self.version = 0
        self.buffer = 0  # that holds it
        self.pins: dict[Pin, int] = {}
        self.queue: deque[PendingUpdate] = deque()
        self.number = 0  # of the latest job
        self.job: dict[int, ShardJob] = {}  # what each shard that has not answered yet is to do
        self.sums: dict[int, tuple[float, ...]] = {}  # what the others have answered
        self.clip: float | None = None  # of the update at the head of the queue, once it is known

    def pin(self, pin: Pin) -> tuple[int, int]:
        """Keep the current buffer from being written; its number and its version."""
        self.pins[pin] = self.buffer
        return self.buffer, self.version

    def start(self) -> list[ShardJob]:
        """The jobs of the update at the head of the queue, if none of it is under way and a buffer is free."""
        if self.job or not self.queue:
            return []
        update = self.queue[0]
        kind = "drift" if update.drift else "norm" if self.clip_norm and self.clip is None else "apply"
        target = self._free_buffer() if kind == "apply" else self.buffer
        if target is None:
            return []
        self.number += 1
        self.sums = {}
        self.job = {
            shard: ShardJob(
                shard=shard,
                number=self.number,
                kind=kind,
                version=self.version + 1,
                source=self.buffer,
                target=target,
                slots=update.slots,
                scales=update.scales,
                reads=tuple(buffers[self.index] for buffers in update.reads),
                compensation=update.compensation,
                clip=1.0 if self.clip is None else self.clip,
                damping=update.damping,
                hyper=update.hyper,
                skip=update.skip,
            )
            for shard in self.shards
        }
        return list(self.job.values())

    def done(self, shard: int, number: int, sums: tuple[float, ...]) -> PendingUpdate | None:
        """A shard has answered; the update, or question, if this was the last answer that it needed."""
        job = self.job.get(shard)
        if job is None or job.number != number:
            return None  # said before
        del self.job[shard]
        self.sums[shard] = sums
        if self.job:
            return None
        in_order = [one for shard in self.shards for one in self.sums[shard]]  # by shard, so by place in the vector
        if job.kind == "norm":
            self.clip = clip_of(in_order, self.clip_norm)
            return None
        update = self.queue.popleft()
        update.groups_left -= 1
        if job.kind == "drift":
            update.sums += in_order
        else:
            self.version += 1
            self.buffer = job.target
            self.clip = None
        return update

    def _free_buffer(self) -> int | None:
        taken = {self.buffer, *self.pins.values()}
        return next((buffer for buffer in range(self.buffers) if buffer not in taken), None)
