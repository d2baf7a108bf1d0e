"""Updates that the ranks of a process group send to each other, as they come.

A message is a header (which update of its sender it is, the samples in it, the version vector that its gradient had
seen) and the update, coded or not. What a codec does not send stays here in a residual, and the sender takes over what
the others decode: so all replicas change by the same numbers. Each message is confirmed by its receiver.

Nothing here waits: `arrivals` gives what has come. A rank that is gone is a `PeerError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.codecs import NONE, Codec
from offbeat.codecs.feedback import Feedback

_UPDATE, _CONFIRM = 71, 72  # tags
_LINE = 8  # bytes to which the header is a multiple, so that numbers behind it are aligned


class Arrival(NamedTuple):
    """An update of another rank, which has been added to the replica."""

    source: int
    number: int
    samples: int
    seen: dict[int, int]


class PeerExchange:
    """Of this rank with all others of the default group; updates have so many fp32 `items`."""

    def __init__(self, items: int, codec: Codec | None = None, residual: Tensor | None = None) -> None:
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._coding = Feedback(codec or NONE, items, self._rank, self._ranks)
        self._coder = self._coding.codec.coder()  # that decodes
        self._header = _LINE * (2 + self._ranks)
        self._size = self._header + -(-self._coding.size_bytes // 4) * 4
        if residual is not None:
            self._coding.load({"residual": residual})
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        self._coming = {rank: torch.empty(self._size, dtype=torch.uint8) for rank in others}
        self._counts = {rank: torch.zeros(1, dtype=torch.int64) for rank in others}
        self._updates = {rank: self._receive(self._coming[rank], rank, _UPDATE) for rank in others}
        self._confirms = {rank: self._receive(self._counts[rank], rank, _CONFIRM) for rank in others}
        self._sending: list[tuple[Tensor, dist.Work]] = []  # a message stays as it is until it is sent
        self.sent_bytes = self.received_bytes = 0

    @property
    def residual(self) -> Tensor | None:
        """What was not sent yet."""
        return self._coding.residual

    def send(self, update: Tensor, samples: int, seen: dict[int, int]) -> None:
        """To all others; `update` becomes what they decode."""
        message = torch.empty(self._size, dtype=torch.uint8)
        self._coding.encode(update, self._payload(message))
        header = [self._coding.sent, samples, *(seen.get(rank, 0) for rank in range(self._ranks))]
        message[: self._header].view(torch.int64).copy_(torch.tensor(header))
        for rank in self._coming:
            self._post(message, rank, _UPDATE)

    def arrivals(self, into: Tensor) -> Iterator[Arrival]:
        """The updates that have come, each added to `into` and confirmed."""
        for rank in self._coming:
            while self._updates[rank].is_completed():
                self._updates[rank].wait()
                message = self._coming[rank]
                number, samples, *seen = message[: self._header].view(torch.int64).tolist()
                self._coder.seed(number * self._ranks + rank)
                self._coder.add(self._payload(message), into)
                self.received_bytes += self._size
                self._updates[rank] = self._receive(message, rank, _UPDATE)
                self._post(torch.tensor([number]), rank, _CONFIRM)
                yield Arrival(rank, number, samples, dict(enumerate(seen)))
        self._forget_sent()

    def confirmations(self) -> Iterator[tuple[int, int]]:
        """The ranks that have confirmed updates of this one, and how many."""
        for rank, count in self._counts.items():
            while self._confirms[rank].is_completed():
                self._confirms[rank].wait()
                number = int(count)
                self._confirms[rank] = self._receive(count, rank, _CONFIRM)
                yield rank, number

    def _payload(self, message: Tensor) -> Tensor:
        return message[self._header : self._header + self._coding.size_bytes]

    def _receive(self, into: Tensor, rank: int, tag: int) -> dist.Work:
        return _work(dist.irecv(into, rank, tag=tag))

    def _post(self, message: Tensor, rank: int, tag: int) -> None:
        self.sent_bytes += message.nbytes
        self._sending.append((message, _work(dist.isend(message, rank, tag=tag))))

    def _forget_sent(self) -> None:
        """What is under way is kept; the error of what failed is raised."""
        under_way = []
        for message, work in self._sending:
            if not work.is_completed():
                under_way.append((message, work))
            else:
                work.wait()
        self._sending = under_way


def _work(posted: dist.Work | None) -> dist.Work:
    assert posted is not None, "this rank is in the group"
    return posted
