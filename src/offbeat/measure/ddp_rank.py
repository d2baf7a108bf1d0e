"""A rank of `offbeat bench ddp`: a training iteration without communication and with each system, alternately.

Every system trains its own copy of the model, from the same weights on the same minibatches, so that after equally many
iterations the copies can be compared. The copy called `none` is never synchronised (`no_sync`): it only computes. The
copy called `empty` does all that DDP does except to reduce: what it adds is not communication.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from offbeat.errors import OffbeatError
from offbeat.measure.rank_messages import Wire, serve
from offbeat.measure.torch_rank import Peers, join, part

LAYERS, WIDTH = 10, 1024  # 10.5 million parameters: 42 MB of gradient, in three of DDP's buckets
_MINIBATCHES = 4
_RATE = 0.01


def mlp() -> nn.Module:
    """The same weights on every rank and in every copy."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def _only_divide(ranks: int, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP does to a bucket before it is reduced, as a hook that does not reduce it."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer().div_(ranks))
    return done


class Copy:
    """A model under DDP, its optimizer, and how many iterations it has seen."""

    def __init__(self, group: dist.ProcessGroup, *, synchronised: bool = True, empty: bool = False) -> None:
        self.model = DistributedDataParallel(mlp(), process_group=group)
        if empty:
            # DDP wants annotations to be types and not texts, as they are in this file: a lambda has none.
            self.model.register_comm_hook(group.size(), lambda ranks, bucket: _only_divide(ranks, bucket))
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=_RATE)
        self._synchronised = synchronised
        self._seen = 0

    def step(self, minibatches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        inputs, labels = minibatches[self._seen % len(minibatches)]
        self._seen += 1
        self._optimizer.zero_grad()
        context: AbstractContextManager[object] = nullcontext() if self._synchronised else self.model.no_sync()
        with context:
            loss = nn.functional.cross_entropy(self.model(inputs), labels)
            torch.autograd.backward(loss)
        self._optimizer.step()

    def bucket_bytes(self) -> list[int]:
        """As DDP laid them out after it saw the order of the gradients, in the order in which they are reduced."""
        described = self.model._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # torch's, without types
        said = described.get("rebuilt_bucket_sizes", "")
        sizes = [int(word) for word in str(said).split(",") if word.strip()]
        if not sizes:
            raise OffbeatError("DDP does not say how large its buckets are")
        return sizes

    def flat(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


class Bench:
    """The copies of one rank, and what it can be asked."""

    def __init__(self, peers: Peers, batch: int) -> None:
        self._peers = peers
        self._first = next(iter(peers.groups))
        first = peers.groups[self._first]
        self._copies = {system: Copy(group) for system, group in peers.groups.items()}
        self._copies |= {"none": Copy(first, synchronised=False), "empty": Copy(first, empty=True)}
        draw = torch.Generator().manual_seed(peers.rank)
        self._minibatches = [
            (torch.randn(batch, WIDTH, generator=draw), torch.randint(WIDTH, (batch,), generator=draw))
            for _ in range(_MINIBATCHES)
        ]
        self._buckets: dict[str, list[torch.Tensor]] = {}

    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._copies[self._first].model.parameters())

    def bucket_bytes(self) -> list[int]:
        """Alike in all systems, or they would not do the same work."""
        each = {system: self._copies[system].bucket_bytes() for system in self._peers.groups}
        if len({tuple(sizes) for sizes in each.values()}) != 1:
            raise OffbeatError(f"DDP's buckets differ between systems: {each}")
        return each[self._first]

    def train(self, question: Mapping[str, Any]) -> float:
        system = question["system"]
        copy, barrier = self._copies[system], system if system in self._peers.groups else self._first
        for _ in range(question["untimed"]):
            copy.step(self._minibatches)
        return self._peers.time(barrier, question["iterations"], lambda: copy.step(self._minibatches))

    def reduce(self, question: Mapping[str, Any]) -> float:
        """Seconds of all buckets' all-reduces, one after the other, with nothing beside them."""
        system = question["system"]
        if system not in self._buckets:
            self._buckets[system] = [torch.zeros(size // 4) for size in self.bucket_bytes()]

        def all_buckets() -> None:
            for bucket in self._buckets[system]:
                dist.all_reduce(bucket, group=self._peers.groups[system])

        for _ in range(question["untimed"]):
            all_buckets()
        return self._peers.time(system, question["iterations"], all_buckets)

    def compare(self) -> dict[str, object]:
        """A digest of each copy's parameters, and how far each is from the first one's."""
        flats = {system: self._copies[system].flat() for system in self._peers.groups}
        first = flats[self._first]
        scale = float(first.abs().max())
        return {
            "digests": {name: hashlib.sha256(flat.numpy().tobytes()).hexdigest() for name, flat in flats.items()},
            "differences": {name: float((flat - first).abs().max()) / scale for name, flat in flats.items()},
        }


def _work(wire: Wire) -> None:
    questions = wire.questions()
    asked = next(questions)
    bench = Bench(join(asked), asked["batch"])
    wire.answer(torch=torch.__version__, parameters=bench.parameters())
    for question in questions:
        match question["do"]:
            case "train":
                wire.answer(seconds=bench.train(question))
            case "reduce":
                wire.answer(seconds=bench.reduce(question))
            case "buckets":
                wire.answer(bucket_bytes=bench.bucket_bytes())
            case "compare":
                wire.answer(**bench.compare())
            case other:
                raise OffbeatError(f"unknown question '{other}'")
    part()


if __name__ == "__main__":
    sys.exit(serve(_work))
