"""A rank of `offbeat bench allreduce` and `offbeat bench ddp`: it joins its peers, and times work when asked.

There is one process group for each system, and several for one like gloo:4. The rendezvous is a TCPStore on a socket
that the parent bound to loopback (a plain TCPStore listens everywhere). The environment that the parent gives tells
Gloo to use loopback too. On the hosts of a lab the store is rank 0's own, at the address of its host.
"""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket, TCPStore
from torch.nn.parallel import DistributedDataParallel

from offbeat.collectives.backend import group_of, stats
from offbeat.errors import OffbeatError
from offbeat.measure.benchmark import OURS
from offbeat.measure.child_requests import CHECK_PERIOD, Answer, Handlers, Request, serve
from offbeat.measure.round_trips import Answering, time_round_trips
from offbeat.strategy import AUTO
from offbeat_autoload import register

LAYERS, WIDTH = 10, 1024  # 10.5 million parameters: 42 MB of gradient, in three of DDP's buckets
_MINIBATCHES = 4
_LR = 0.01
ONE_A_HOST = "one a host"  # a group of the first rank of each host


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """This rank among the others, and a process group for each system; of some all that they have."""

    rank: int
    ranks: int
    groups: Mapping[str, dist.ProcessGroup]
    several: Mapping[str, Sequence[dist.ProcessGroup]] = field(default_factory=dict)

    def time(self, request: Request, work: Callable[[], object], barrier: str | None = None) -> Answer:
        """Seconds of one `work()`: the mean of the iterations, begun together after some that are not timed.

        And how long this rank was on a core for it.
        """
        for _ in range(request["untimed"]):
            work()
        dist.barrier(group=self.groups[barrier or request["system"]])
        before_s = time.process_time()
        seconds = mean_s(request["iterations"], work)
        return {"seconds": seconds, "processor_s": (time.process_time() - before_s) / request["iterations"]}


def mean_s(iterations: int, work: Callable[[], object]) -> float:
    gc.disable()  # one full collection with torch loaded takes 80 ms: it would be chance whom it hits
    start = time.perf_counter()
    for _ in range(iterations):
        work()
    taken = time.perf_counter() - start
    gc.enable()
    return taken / iterations


class AllReduceRank:
    """The tensors of one rank of `bench allreduce`.

    Every system reduces a tensor of its own, the same tensor object in every iteration. It holds zeros while the clock
    runs, since a sum of sums would soon be infinite; that the sum is right is checked before, on the first reduction
    and again after the warm-up, when a buffer that comes back may be reduced in another way.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._tensors: dict[str, torch.Tensor] = {}
        self._copy: tuple[torch.Tensor, torch.Tensor] | None = None
        self._answering: Answering | None = None

    def warm(self, request: Request) -> Answer:
        """A new tensor for a system: checked, reduced a few times, checked again."""
        system = request["system"]
        self._tensors.pop(system, None)  # first, so that two sizes are never held at once
        tensor = self._tensors[system] = torch.zeros(request["size_bytes"] // 4)
        self._check(system)
        for _ in range(request["iterations"]):
            self._reduce(system)
        if request["iterations"]:
            self._check(system)
        tensor.zero_()
        return {"done": True}

    def time(self, request: Request) -> Answer:
        return self._peers.time(request, lambda: self._reduce(request["system"]))

    def copy(self, request: Request) -> Answer:
        """Seconds of one copy of a buffer; together with the others or, asked alone, without them."""
        if self._copy is None:
            source = torch.ones(request["size_bytes"] // 4)
            self._copy = source, torch.zeros_like(source)
        source, target = self._copy
        if request["together"]:
            return self._peers.time(request, lambda: target.copy_(source))
        target.copy_(source)
        return {"seconds": mean_s(request["iterations"], lambda: target.copy_(source))}

    def use(self, request: Request) -> Answer:
        """Another strategy of offbeat's from now on."""
        group_of(self._peers.groups[OURS]).use(request["strategy"])
        return {"done": True}

    # --- the network between hosts ------------------------------------------------------------------------------------

    def listen(self, request: Request) -> Answer:
        """For round trips to this rank."""
        self._answering = Answering(request["address"])
        return {"port": self._answering.port}

    def round_trips(self, request: Request) -> Answer:
        """From rank `source` to rank `target`, which listens; the others have nothing to do."""
        if self._peers.rank == request["target"] and self._answering is not None:
            self._answering.answer(request["sizes"])
        if self._peers.rank != request["source"]:
            return {"done": True}
        return {"seconds": time_round_trips(request["address"], request["port"], request["sizes"])}

    def one_a_host(self, request: Request) -> Answer:
        """All-reduces between the first ranks of the hosts, while the others sleep."""
        group = self._peers.groups.get(ONE_A_HOST)
        if group is None:
            return {"seconds": 0.0}
        group_of(group).use(request["strategy"])
        tensor = torch.zeros(request["size_bytes"] // 4)
        return self._peers.time(request, lambda: dist.all_reduce(tensor, group=group), ONE_A_HOST)

    def figures(self, request: Request) -> Answer:
        """What `auto` finds, and how much the kernel keeps of a stream at its two ends."""
        group = group_of(self._peers.groups[OURS])
        group.use(AUTO)
        found = group.figures()
        assert found is not None and found.network is not None
        kept = [int(Path(f"/proc/sys/net/ipv4/{name}").read_text().split()[2]) for name in ("tcp_rmem", "tcp_wmem")]
        return {
            "streams": found.network.streams,
            "inside_latency_s": found.latency_s,
            "inside_bytes_per_s": found.bytes_per_s,
            "receive_buffer_bytes": kept[0],
            "send_buffer_bytes": kept[1],
        }

    def links(self, request: Request) -> Answer:
        """What offbeat says of links between hosts."""
        return {"slow_links": [str(link) for link in stats(self._peers.groups[OURS]).slow_links]}

    def _reduce(self, system: str) -> None:
        several = self._peers.several.get(system)
        if several is None:
            dist.all_reduce(self._tensors[system], group=self._peers.groups[system])
            return
        parts = zip(self._tensors[system].tensor_split(len(several)), several, strict=True)
        for work in [dist.all_reduce(part, group=group, async_op=True) for part, group in parts]:
            assert work is not None
            work.wait()

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
            raise OffbeatError(f"{system}: wrong sum: element {place} is {found:g}, expected {expected:g}")


# --- training iterations under DDP -----------------------------------------------------------------------------------


def mlp() -> nn.Module:
    """The same weights on every rank and in every copy."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def _only_divide(ranks: int, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP does to a bucket before it is reduced, as a hook that does not reduce it."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer().div_(ranks))
    return done


class ModelCopy:
    """A model under DDP, its optimizer, and how many iterations it has seen."""

    def __init__(self, group: dist.ProcessGroup, *, synchronised: bool = True, empty: bool = False) -> None:
        self.model = DistributedDataParallel(mlp(), process_group=group)
        if empty:
            # DDP wants annotations to be types and not texts, as they are in this file: a lambda has none.
            self.model.register_comm_hook(group.size(), lambda ranks, bucket: _only_divide(ranks, bucket))
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=_LR)
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
            raise OffbeatError("DDP does not report the size of its buckets")
        return sizes

    def flat(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


class DdpRank:
    """The model copies of one rank of `bench ddp`.

    Every system trains its own copy of the model, from the same weights on the same minibatches, so that after equally
    many iterations the copies can be compared. The copy called `none` is never synchronised (`no_sync`): it only
    computes. The copy called `empty` does all that DDP does except to reduce: what it adds is not communication.
    """

    def __init__(self, peers: Peers, batch: int) -> None:
        self._peers = peers
        self._first = next(iter(peers.groups))
        first = peers.groups[self._first]
        self._copies = {system: ModelCopy(group) for system, group in peers.groups.items()}
        self._copies |= {"none": ModelCopy(first, synchronised=False), "empty": ModelCopy(first, empty=True)}
        draw = torch.Generator().manual_seed(peers.rank)
        self._minibatches = [
            (torch.randn(batch, WIDTH, generator=draw), torch.randint(WIDTH, (batch,), generator=draw))
            for _ in range(_MINIBATCHES)
        ]
        self._buckets: dict[str, list[torch.Tensor]] = {}
        self.parameters = self._copies[self._first].flat().numel()

    def bucket_bytes(self) -> list[int]:
        """Alike in all systems, or they would not do the same work."""
        each = {system: self._copies[system].bucket_bytes() for system in self._peers.groups}
        if len({tuple(sizes) for sizes in each.values()}) != 1:
            raise OffbeatError(f"DDP's buckets differ between systems: {each}")
        return each[self._first]

    def train(self, request: Request) -> Answer:
        system = request["system"]
        barrier = system if system in self._peers.groups else self._first
        return self._peers.time(request, lambda: self._copies[system].step(self._minibatches), barrier)

    def reduce(self, request: Request) -> Answer:
        """Seconds of all buckets' all-reduces, one after the other, with nothing beside them."""
        system = request["system"]
        if system not in self._buckets:
            self._buckets[system] = [torch.zeros(size // 4) for size in self.bucket_bytes()]

        def all_buckets() -> None:
            for bucket in self._buckets[system]:
                dist.all_reduce(bucket, group=self._peers.groups[system])

        return self._peers.time(request, all_buckets)

    def compare(self, request: Request) -> Answer:
        """A digest of each copy's parameters, and how far each is from the first one's."""
        flats = {system: self._copies[system].flat() for system in self._peers.groups}
        first = flats[self._first]
        scale = float(first.abs().max())
        return {
            "digests": {name: hashlib.sha256(flat.numpy().tobytes()).hexdigest() for name, flat in flats.items()},
            "differences": {name: float((flat - first).abs().max()) / scale for name, flat in flats.items()},
        }


# --- starting --------------------------------------------------------------------------------------------------------


def join(request: Request) -> tuple[Answer, Handlers]:
    """Meet the others as the parent's first request says; the first system's group is the default one."""
    register()  # where offbeat is on the path but not installed, `import torch` did not
    torch.set_num_threads(request["threads"])
    if (core := request.get("core")) is not None:
        os.sched_setaffinity(0, {core})
    rank, ranks, limit = request["rank"], request["ranks"], timedelta(seconds=request["timeout_s"])
    store = TCPStore(
        request["address"],
        request["port"],
        ranks,
        is_master=rank == 0,
        timeout=limit,
        master_listen_fd=request["listen_fd"] if rank == 0 else None,
    )
    groups: dict[str, dist.ProcessGroup] = {}
    several: dict[str, list[dist.ProcessGroup]] = {}
    for system, backend in request["backends"].items():
        if groups:
            with _environment(request["environments"].get(system, {})):
                many = [dist.new_group(backend=backend, timeout=limit) for _ in range(request["groups"][system])]
            group = many[0]
            if len(many) > 1:
                several[system] = many
        else:
            dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
            group = dist.group.WORLD
        assert isinstance(group, dist.ProcessGroup)
        groups[system] = group
    if leaders := request.get("leaders"):
        leading = dist.new_group(leaders, backend=OURS, timeout=limit)
        if rank in leaders:
            assert isinstance(leading, dist.ProcessGroup)
            groups[ONE_A_HOST] = leading
    peers = Peers(rank=rank, ranks=ranks, groups=groups, several=several)
    answer = {"torch": torch.__version__}
    if request["do"] == "join allreduce":
        reduced = AllReduceRank(peers)
        handlers = {"warm": reduced.warm, "time": reduced.time, "copy": reduced.copy, "links": reduced.links}
        network = {"listen": reduced.listen, "round trips": reduced.round_trips, "figures": reduced.figures}
        more = {"one a host": reduced.one_a_host, "use": reduced.use, "nothing": lambda _: {"done": True}}
        return answer, {**handlers, **network, **more}
    trained = DdpRank(peers, request["batch"])
    buckets = {"buckets": lambda _: {"bucket_bytes": trained.bucket_bytes()}, "compare": trained.compare}
    return answer | {"parameters": trained.parameters}, {"train": trained.train, "reduce": trained.reduce, **buckets}


@contextmanager
def _environment(own: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name, "") for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        os.environ.update(before)


if __name__ == "__main__":
    code = serve(join)
    if code == 0:
        dist.destroy_process_group()
    sys.exit(code)
