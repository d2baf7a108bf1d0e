"""A rank of `offbeat bench allreduce`: started by the parent, P of them, with all systems under torch in each.

Every system reduces a tensor of its own, the same tensor object in every iteration. It holds zeros while the clock
runs, since a sum of sums would soon be infinite; that the sum is right is checked before, on the first reduction and
again after the warm-up, when a buffer that comes back may be reduced in another way.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from offbeat.errors import OffbeatError
from offbeat.measure.rank_messages import CHECK_PERIOD, Wire, serve
from offbeat.measure.torch_rank import Peers, join, mean_s, part


class Bench:
    """The tensors of one rank, and what it can be asked."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._tensors: dict[str, torch.Tensor] = {}
        self._copy: tuple[torch.Tensor, torch.Tensor] | None = None

    def warm(self, question: Mapping[str, Any]) -> None:
        """A new tensor for a system: checked, reduced a few times, checked again."""
        system, iterations = question["system"], question["iterations"]
        self._tensors.pop(system, None)  # first, so that two sizes are never held at once
        tensor = self._tensors[system] = torch.zeros(question["size_bytes"] // 4)
        self._check(system)
        for _ in range(iterations):
            self._reduce(system)
        self._check(system)
        tensor.zero_()

    def time(self, question: Mapping[str, Any]) -> float:
        system = question["system"]
        for _ in range(question["untimed"]):
            self._reduce(system)
        return self._peers.time(system, question["iterations"], lambda: self._reduce(system))

    def copy(self, question: Mapping[str, Any]) -> float:
        """Seconds of one copy of a buffer; together with the others or, asked alone, without them."""
        if self._copy is None:
            source = torch.ones(question["size_bytes"] // 4)
            self._copy = source, torch.zeros_like(source)
        source, target = self._copy
        target.copy_(source)
        if question["together"]:
            return self._peers.time(question["system"], question["iterations"], lambda: target.copy_(source))
        return mean_s(question["iterations"], lambda: target.copy_(source))

    def _reduce(self, system: str) -> None:
        dist.all_reduce(self._tensors[system], group=self._peers.groups[system])

    def _check(self, system: str) -> None:
        """Rank r brings (r + 1) * k % CHECK_PERIOD in element k; the right sum is known exactly."""
        tensor, ranks = self._tensors[system], self._peers.ranks
        values = torch.arange(float(CHECK_PERIOD)).repeat(-(-tensor.numel() // CHECK_PERIOD))[: tensor.numel()]
        torch.mul(values, self._peers.rank + 1, out=tensor)
        self._reduce(system)
        right = values.mul_(ranks * (ranks + 1) // 2)
        if not torch.equal(tensor, right):
            place = int(torch.nonzero(tensor != right)[0])
            found, expected = float(tensor[place]), float(right[place])
            raise OffbeatError(f"{system}: wrong sum: element {place} is {found:g}, and {expected:g} is right")


def _work(wire: Wire) -> None:
    questions = wire.questions()
    peers = join(next(questions))
    wire.answer(torch=torch.__version__)
    bench = Bench(peers)
    for question in questions:
        match question["do"]:
            case "warm":
                bench.warm(question)
                wire.answer(done=True)
            case "time":
                wire.answer(seconds=bench.time(question))
            case "copy":
                wire.answer(seconds=bench.copy(question))
            case other:
                raise OffbeatError(f"unknown question '{other}'")
    part()


if __name__ == "__main__":
    sys.exit(serve(_work))
