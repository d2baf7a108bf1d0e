"""A group of ranks: joined, asked about, measured, left; and how a call becomes work.

torch's collectives are in `process_group`, on top of this.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.collectives import memory, rendezvous
from offbeat.collectives.calls import (
    Call,
    Flat,
    MessagePort,
    Runner,
    check_reduction,
    copy,
    cut,
    mean_of,
    number_of,
    plan,
)
from offbeat.collectives.choice import Choice, Figures
from offbeat.collectives.counters import Arrivals, Stats
from offbeat.collectives.cuda import Gpus, first_tensor
from offbeat.collectives.executor import Executor
from offbeat.collectives.messages import Messages
from offbeat.collectives.options import Options
from offbeat.collectives.overlap import Job, PendingCall, Progress, at_exit
from offbeat.collectives.placement import Placements
from offbeat.collectives.sync import Patience
from offbeat.collectives.transport import SharedMemory, control_bytes
from offbeat.errors import OffbeatError, PeerError, RequestError
from offbeat.number_format import format_size
from offbeat.strategy import NATIVE

_ProcessGroup: Any = dist.ProcessGroup
_MEASURED_BYTES = 1024 * 1024
_LEAVE_S = 5.0  # what a call under way is given when its group is destroyed


class Group(_ProcessGroup):  # type: ignore[misc] # torch types it by overloads of which we need one
    """The ranks of one group on one host, through shared memory.

    Calls of one group are run in the order in which they are made, which must be the same on all ranks.
    """

    def __init__(
        self, store: Any, rank: int, ranks: int, timeout_s: float, options: Options, names: Sequence[int]
    ) -> None:
        super().__init__(rank, ranks)
        self.options = options
        self._rank, self._ranks = rank, ranks
        self._name = ""
        self._transport, self._choice = _join(store, rank, ranks, timeout_s, options, names)
        # Nothing below refers back to the group: its memory goes when it goes, and not when Python looks for circles.
        arrivals = self._arrivals = Arrivals(rank, self._transport.names)
        self._executor: Runner = Executor(self._transport, lambda call, stamps: arrivals.came(call.iteration, stamps))
        self._placements = Placements(self._transport, move=options.move)
        self._progress = Progress(f"offbeat rank {rank}", self._transport.patience)
        self._messages: MessagePort = Messages(self._transport)
        self._gpus = Gpus(store, self._transport)
        self._together: list[PendingCall] | None = None
        self._owner = os.getpid()
        at_exit(self._transport.close)  # what is under way then ends at its next step

    # --- what torch asks about a group -----------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "offbeat"

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        self._name = name

    @property
    def _device_types(self) -> list[torch.device]:
        """Where a tensor may lie, for checkpoints and FSDP. A new list each time, since Dynamo pops from it."""
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: torch.device) -> Group:
        return self

    supports_coalescing = False
    supports_splitting = False

    def _get_sequence_number_for_group(self) -> int:
        return self._executor.calls

    def _set_sequence_number_for_group(self) -> None:
        """The calls are counted from the start anyway."""

    def set_timeout(self, timeout: Any) -> None:
        self._transport.timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """Leave the group: what runs is finished, then everything is let go of."""
        if os.getpid() == self._owner:
            self._progress.stop(_LEAVE_S)
            self.abort()
            self._placements.close()

    def abort(self) -> None:
        """Leave at once: whoever waits here, or for this rank, is told."""
        if os.getpid() != self._owner:  # a forked child: the threads, and what they hold, stayed with the parent
            return
        self._messages.close()
        self._gpus.close()
        self._transport.close()  # a call that is still waited for fails now, and all behind it
        self._progress.stop(1.0)
        self._executor.forget()

    # --- what a user of this backend can ask and say ------------------------------------------------------------

    def stats(self) -> Stats:
        """What this rank did so far."""
        notes = []
        if self._placements.refused_bytes:
            free = format_size(memory.free_in_dev_shm())
            wanted = format_size(self._placements.refused_bytes)
            why = "half of the files a process may open are open" if memory.descriptors_are_scarce() else ""
            notes.append(f"tensors of {wanted} are staged: {why or f'/dev/shm has only {free} free'}")
        received, sent = self._transport.counted()
        return Stats(
            rank=self._rank,
            ranks=self._ranks,
            strategy=self._choice.line,
            calls=self._executor.calls,
            received=received,
            sent=sent,
            moved=self._placements.moved,
            background_s=self._progress.background_s,
            waited_s=self._arrivals.waited_s,
            late=self._arrivals.late(),
            notes=tuple(notes),
        )

    def use(self, strategy: str) -> None:
        """From the next all-reduce on, on all ranks alike."""
        if strategy == NATIVE:
            raise RequestError(f"'{NATIVE}' is another kind of group: choose it when the group is made")
        self._choice = Choice(strategy, self._ranks, self._choice.figures)

    def why(self, size_bytes: int) -> str:
        """Why an all-reduce of this size goes the way it goes. With `auto`, all ranks must ask."""
        if self._choice.needs_figures():
            self._progress.submit(self._measure, PendingCall(None), background=False).wait()
        return self._choice.why(size_bytes)

    # --- several calls as one ----------------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._together = []

    def _end_coalescing(self, device: torch.device) -> PendingCall:
        works, self._together = self._together or [], None
        return _All(works)

    def _keep(self, work: PendingCall) -> PendingCall:
        if self._together is not None:
            self._together.append(work)
        return work

    # --- from a call to its work ------------------------------------------------------------------------------------

    def _call(self, kind: str, tensor: Tensor, sizes: tuple[int, ...], *, reduction: str = "", root: int = 0) -> Call:
        line = "central" if kind in ("broadcast", "reduce") else "direct"
        detail = root
        if len(set(sizes)) > 1:
            detail = detail << 32 | zlib.crc32(repr(sizes).encode())
        return Call(
            plan=plan(line, kind.replace("_", "-"), self._ranks, root),
            dtype=tensor.dtype if reduction else torch.uint8,
            what=number_of(kind, reduction, tensor.dtype),
            items=sum(sizes) // (1 if reduction else tensor.itemsize),  # what is only moved is cut by bytes
            sizes=sizes,
            reduction=reduction,
            into=check_reduction(reduction, tensor.dtype) if reduction else copy,
            detail=detail,
            since_ns=now()[0],
        )

    def _job(self, call: Call, loads: Sequence[Flat], backs: Sequence[Flat], factor: float | None = None) -> Job:
        return partial(self._run, call, loads, backs, factor)

    def _run(
        self, call: Call, loads: Sequence[Flat], backs: Sequence[Flat], factor: float | None, patience: Patience
    ) -> None:
        """A call with its copies before and after. A chunk that this rank gives to itself is copied first, too."""
        for flat in loads:
            flat.load()
        if factor is not None:
            for tensor in call.give.values() if call.whole is None else [call.whole]:
                tensor.mul_(factor)
        for chunk in call.give.keys() & call.take.keys():
            if call.take[chunk].data_ptr() != call.give[chunk].data_ptr():
                call.take[chunk].copy_(call.give[chunk])
        self._executor.run(call, patience)
        for flat in backs:
            if call.reduction == "mean":
                mean_of(flat.tensor, self._ranks)
            flat.back()

    def _barrier_job(self) -> Job:
        return self._job(self._call("barrier", torch.empty(0), (0,)), [], [])

    def _submit(self, jobs: Sequence[Job], result: Any, opts: Any) -> PendingCall:
        """The jobs, one after the other, as one work."""

        def run(patience: Patience) -> None:
            for job in jobs:
                job(patience)

        background = opts is None or opts.asyncOp
        tensor = first_tensor(result)
        job = run if tensor is None or not tensor.is_cuda else self._gpus.staged(run, tensor.device)
        return self._keep(self._progress.submit(job, PendingCall(result), background=background))

    def _measure(self, patience: Patience) -> None:
        """Agree on what this host is like: the slowest rank's figures."""
        transport, executor = self._transport, self._executor
        barrier = self._barrier_job()
        barrier(patience)
        start = time.perf_counter()
        for _ in range(10):
            barrier(patience)
        latency_s = (time.perf_counter() - start) / 10
        size = min(_MEASURED_BYTES, transport.arena_bytes) // 4
        source = transport.sides[(self._rank + 1) % self._ranks].segment.tensor(torch.float32, size, transport.arena_at)
        target = torch.zeros(size)
        barrier(patience)
        start = time.perf_counter()
        for _ in range(3):
            target.add_(source)
        taken = torch.tensor([latency_s, (time.perf_counter() - start) / 3], dtype=torch.float64)
        executor.run(
            Call(
                plan=plan("direct", "all-reduce", self._ranks), dtype=torch.float64, items=2,
                what=number_of("all_reduce", "max", torch.float64), sizes=cut(2, self._ranks), reduction="max",
                into=check_reduction("max", torch.float64), whole=taken, since_ns=now()[0],
            ),
            patience,
        )  # fmt: skip
        self._choice.figures = Figures(latency_s=float(taken[0]), bytes_per_s=4 * size / float(taken[1]))


class _All(PendingCall):
    """Several works as one."""

    def __init__(self, works: Sequence[PendingCall]) -> None:
        super().__init__(None)
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        return all(work.wait(timeout) for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        return torch.futures.collect_all([work.get_future() for work in self._works])

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next((work.exception() for work in self._works if work.exception() is not None), None)


def _join(
    store: Any, rank: int, ranks: int, timeout_s: float, options: Options, names: Sequence[int]
) -> tuple[SharedMemory, Choice]:
    """Meet the other ranks. What is wrong with one of them is said on all."""
    size_bytes = control_bytes(ranks) + options.arena_bytes
    listener = rendezvous.Listener(ranks)
    card = {"strategy": options.strategy, "arena": options.arena_bytes, "listener": listener.name}
    descriptor = -1
    try:
        try:
            choice = Choice(options.strategy, ranks)
            own, descriptor = memory.create(size_bytes, f"rank {names[rank]}")
        except OffbeatError as error:
            card["error"] = str(error).splitlines()[0]
            with contextlib.suppress(PeerError):  # the others may have ended by the same mistake
                rendezvous.hand_out_card(store, rank, names, card, timeout_s)
            raise
        cards = rendezvous.hand_out_card(store, rank, names, card, timeout_s)
        rendezvous.check_cards(cards, rank, names)
        token = bytes.fromhex(cards[0]["token"])
        peers = listener.meet(rank, names, cards, token, descriptor, size_bytes, timeout_s)
    finally:
        listener.close()
        if descriptor >= 0:
            os.close(descriptor)
    return SharedMemory(rank, names, own, peers, timeout_s, options.arena_bytes), choice


def now() -> tuple[int, int]:
    """The clock that all processes of a host share, and which backward pass this is in (-1: none)."""
    return time.monotonic_ns(), torch._C._current_graph_task_id()
