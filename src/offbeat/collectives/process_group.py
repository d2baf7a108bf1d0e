"""The torch.distributed backend `offbeat`: a group of ranks, and torch's calls turned into calls of its executor.

torch calls the methods below from Python and, for DDP and functional collectives, from C++. No backend of torch stands
behind them: what is not here fails loudly instead of silently doing something else. torch 2.13 renamed some of
them (`all_gather_single` was `_allgather_base`); both names are kept.
"""

from __future__ import annotations

import math
import os
import sys
import time
import zlib
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from types import FrameType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.codecs import NONE, Codec
from offbeat.collectives import memory
from offbeat.collectives.binding import Place
from offbeat.collectives.calls import (
    Call,
    Flat,
    MessagePort,
    Plan,
    Runner,
    bytes_of,
    check_reduction,
    copy,
    cut,
    flat_of,
    mean_of,
    number_of,
    plan,
    program_of,
    shifted,
)
from offbeat.collectives.choice import Choice, Figures, NetworkFigures, line_of
from offbeat.collectives.coded_calls import CodedCalls
from offbeat.collectives.counters import Arrivals, Stats
from offbeat.collectives.cuda import Gpus, first_tensor, or_nccl, parts_of, staged_parts
from offbeat.collectives.executor import Executor
from offbeat.collectives.links import HostRates, SlowLink, flows, host_rates, rank_pairs, slow_links
from offbeat.collectives.messages import Messages
from offbeat.collectives.options import Options
from offbeat.collectives.overlap import CoalescedCalls, Job, PendingCall, Progress, at_exit
from offbeat.collectives.placement import Placements
from offbeat.collectives.residuals import Kept, Residuals
from offbeat.collectives.sync import Patience
from offbeat.collectives.transport import SharedMemory
from offbeat.errors import PeerError, RequestError
from offbeat.network.streams import streams_worth_it
from offbeat.number_format import format_size
from offbeat.strategy import NATIVE

_ProcessGroup: Any = dist.ProcessGroup
_MEASURED_BYTES = 1024 * 1024
_SENT_BYTES = (128 * 1024, 2 * 1024 * 1024)  # between hosts, one size after the other,
_SENT_TIMES = 3  # the fastest of so many,
_MEASURED_S = 1.0  # if the larger does not take longer than this,
_MOST_SHIFTS = 3  # to so many other hosts
_STREAMED_BYTES = (2 * 1024 * 1024, 16 * 1024 * 1024)  # to find how many streams are worth it: about
_STREAMED_S = 0.03  # of sending
_CODED_ITEMS = 4 * 1024 * 1024  # that a codec is timed with
STAGED_BYTES = 16 * 1024 * 1024  # of a sum across hosts: one part is sent while others are copied from and to a GPU
_LEAVE_S = 5.0  # what a call under way is given when its group is destroyed
_RED: Any = dist.ReduceOp.RedOpType
_NAMES = {
    _RED.SUM: "sum", _RED.AVG: "mean", _RED.PRODUCT: "product", _RED.MIN: "min", _RED.MAX: "max",
    _RED.BAND: "and", _RED.BOR: "or", _RED.BXOR: "xor", _RED.PREMUL_SUM: "sum",
}  # fmt: skip
_BARRIER_TAG = -(2**40)  # no user's


class OffbeatGroup(_ProcessGroup):  # type: ignore[misc] # torch types it by overloads of which we need one
    """The ranks of one group: through shared memory on one host, over TCP across hosts.

    Calls of one group are run in the order in which they are made, which must be the same on all ranks.
    """

    def __init__(self, store: Any, transport: SharedMemory, choice: Choice, options: Options) -> None:
        super().__init__(transport.rank, transport.ranks)
        self.options = options
        self._rank, self._ranks = transport.rank, transport.ranks
        self._name = ""
        self._transport, self._choice = transport, choice
        self._choices: dict[str, Choice] = {}  # those that were used before
        # Nothing below refers back to the group: its memory goes when it goes, and not when Python looks for circles.
        here = (transport.rank, *transport.near)  # hosts have clocks of their own
        self._arrivals = Arrivals(tuple(transport.names[one] for one in here))
        self._executor: Runner = Executor(transport, self._arrivals.came)
        self._placements = Placements(transport, move=options.move and bool(transport.near or not transport.others))
        self._progress = Progress(f"offbeat rank {transport.rank}", transport.patience)
        self._messages: MessagePort = Messages(transport)
        self.residuals = Residuals()
        self._coded = CodedCalls(self._rank, self._ranks, self._executor)
        self._gpus = Gpus(store, transport)
        self._across = transport.hosts is not None
        self._in_parts = transport.remote is not None and transport.remote.gpus  # large sums; on all ranks alike
        self._together: list[PendingCall] | None = None
        self._large: Plan | None = None  # of the last call across hosts that was large
        self._owner = os.getpid()
        at_exit(transport.close)  # what is under way then ends at its next step

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

    def _get_backend(self, device: torch.device) -> OffbeatGroup:
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
            why = "the process has used half of its file descriptors" if memory.descriptors_are_scarce() else ""
            notes.append(
                f"tensors of {wanted} are copied through a staging buffer: {why or f'/dev/shm has only {free} free'}"
            )
        remote = self._transport.remote
        rates, slow = self._links()
        notes += [str(link) for link in slow]
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
            late=min(slow, key=lambda link: link.bytes_per_s) if slow else self._arrivals.late(),
            notes=tuple(notes),
            hosts=self._transport.hosts or (0,) * self._ranks,
            network=None if remote is None else remote.here,
            host_rates=rates,
            slow_links=slow,
        )

    def _links(self) -> tuple[HostRates | None, tuple[SlowLink, ...]]:
        """How fast each host sends and receives, and which links are slow.

        As the ranks measured it in their calls, or else as `auto` measured it before the first.
        """
        hosts, figures = self._transport.hosts, self._choice.figures
        if hosts is not None and self._large is not None:
            steps = flows(rank_pairs(self._large, hosts), self._transport.send_rates(), hosts)
            if any(steps):
                many = len(set(hosts))
                return host_rates(steps, many), slow_links(steps, many)
        network = None if figures is None else figures.network
        return (None, ()) if network is None else (HostRates(network.sends, network.receives), network.slow_links())

    def use(self, strategy: str) -> None:
        """From the next all-reduce on, on all ranks alike."""
        if strategy == NATIVE:
            raise RequestError(f"'{NATIVE}' cannot be chosen later: pass it when the group is created")
        known = self._choices.get(strategy)
        self._choice = known or Choice(strategy, self._ranks, self._choice.figures, self._transport.hosts)
        self._choices[strategy] = self._choice  # with what was measured for it

    def check_plain(self) -> None:
        """`RequestError` where a codec was asked for: NCCL sends what lies on GPUs as it is."""
        if self._choice.is_coded:
            raise RequestError(
                f"'{self._choice.line}': NCCL reduces tensors on GPUs and has no codecs; leave out codec="
            )

    def codec_for(self, size_bytes: int) -> str:
        """The codec of an all-reduce of so many bytes of fp32; nothing where they are sent as they are."""
        coded = self._choice.coded(size_bytes)
        return "" if coded is None or coded[0] is NONE else coded[0].line

    def why(self, size_bytes: int) -> str:
        """Why an all-reduce of this size goes the way it goes. With `auto`, all ranks must ask."""
        if self._choice.needs_figures() or self._choice.needs_speeds():
            self._progress.submit(self._measure_once, PendingCall(None), background=False).wait()
        return self._choice.why(size_bytes)

    def figures(self) -> Figures | None:
        """What `auto` has measured of the host and of the network; with `auto`, all ranks must ask."""
        self.why(_MEASURED_BYTES)
        return self._choice.figures

    # --- several calls as one ----------------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._together = []

    def _end_coalescing(self, device: torch.device) -> PendingCall:
        works, self._together = self._together or [], None
        return CoalescedCalls(works)

    def _keep(self, work: PendingCall) -> PendingCall:
        if self._together is not None:
            self._together.append(work)
        return work

    # --- from a call to its work ------------------------------------------------------------------------------------

    def _call(self, kind: str, tensor: Tensor, sizes: tuple[int, ...], *, reduction: str = "", root: int = 0) -> Call:
        collective = kind.replace("_", "-")
        line, order = line_of(collective, self._transport.hosts)
        detail = root
        if len(set(sizes)) > 1:
            detail = detail << 32 | zlib.crc32(repr(sizes).encode())
        return Call(
            plan=plan(line, collective, self._ranks, root, order),
            dtype=tensor.dtype if reduction else torch.uint8,
            what=number_of(kind, reduction, tensor.dtype),
            items=sum(sizes) // (1 if reduction else tensor.itemsize),  # what is only moved is cut by bytes
            sizes=sizes,
            reduction=reduction,
            into=check_reduction(reduction, tensor.dtype) if reduction else copy,
            detail=detail,
            since_ns=now()[0],
        )

    def _written(self, call: Call) -> tuple[int, ...]:
        """The chunks that this rank writes: its own, and those that it passes on."""
        return program_of(call.plan, self._rank, self._transport.hosts).written

    def _bytes(self, tensor: Tensor, *, apart: bool = False, written: bool = False) -> Flat:
        """As bytes, where the transport can reach them."""
        return bytes_of(tensor, on_cpu=self._across, apart=apart, written=written)

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
        if call.whole is None and call.place is None:
            for chunk in self._written(call):
                if chunk not in call.take:
                    call.take[chunk] = torch.empty(call.sizes[chunk], dtype=call.dtype)
        for chunk in call.give.keys() & call.take.keys() if call.give else ():
            if call.take[chunk].data_ptr() != call.give[chunk].data_ptr():
                call.take[chunk].copy_(call.give[chunk])
        self._executor.run(call, patience)
        if self._transport.hosts is not None and call.items * call.dtype.itemsize >= _MEASURED_BYTES:
            self._large = call.plan
        for flat in backs:
            if call.reduction == "mean":
                mean_of(flat.tensor, self._ranks)
            flat.back()

    def _barrier_job(self) -> Job:
        if self._transport.remote is None:
            return self._job(self._call("barrier", torch.empty(0), (0,)), [], [])
        # Ranks on other hosts see no marks: each sends one byte to each.
        call = self._call("all_gather", torch.empty(0, dtype=torch.uint8), (1,) * self._ranks)
        call.what, call.items = number_of("barrier", "", torch.float32), 0
        call.give = {self._rank: torch.zeros(1, dtype=torch.uint8)}
        call.take = {rank: torch.zeros(1, dtype=torch.uint8) for rank in range(self._ranks)}
        return self._job(call, [], [])

    def _submit(self, jobs: Sequence[Job], result: Any, opts: Any) -> PendingCall:
        """The jobs, one after the other, as one work."""

        def run(patience: Patience) -> None:
            for job in jobs:
                job(patience)

        background = opts is None or opts.asyncOp
        tensor = first_tensor(result)
        job = jobs[0] if len(jobs) == 1 else run
        if tensor is not None and tensor.is_cuda:
            job = self._gpus.staged(job, tensor.device)
        return self._keep(self._progress.submit(job, PendingCall(result), background=background))

    def _measure(self, patience: Patience) -> None:
        """Agree on what this host is like, and the network where there are several: the slowest rank's figures."""
        transport, barrier = self._transport, self._job(self._call("barrier", torch.empty(0), (0,)), [], [])
        barrier(patience)
        start = time.perf_counter()
        for _ in range(10):
            barrier(patience)
        latency_s = (time.perf_counter() - start) / 10 if transport.near else 0.0
        size = min(_MEASURED_BYTES, transport.arena_bytes) // 4
        beside = next((peer for peer in transport.near if peer > self._rank), (transport.near or (self._rank,))[0])
        source = transport.sides[beside].segment.tensor(torch.float32, size, transport.arena_at)
        target = torch.zeros(size)
        barrier(patience)
        start = time.perf_counter()
        for _ in range(3):
            target.add_(source)
        add_s = (time.perf_counter() - start) / 3 if transport.near else 1e-9  # nobody reads from anybody
        taken = torch.tensor([latency_s, add_s], dtype=torch.float64)
        self._agree(taken, patience)
        network = None if transport.hosts is None else self._measure_network(transport.hosts, patience)
        self._choice.figures = Figures(
            latency_s=float(taken[0]), bytes_per_s=4 * size / float(taken[1]), network=network
        )

    def _measure_once(self, patience: Patience) -> None:
        """What the choice of this group needs and does not have yet."""
        if self._choice.needs_figures():
            self._measure(patience)
        if self._choice.needs_speeds():
            self._measure_codecs(patience)

    def _measure_codecs(self, patience: Patience) -> None:
        """How fast each codec is that `codec=auto` may take, while all ranks code: they may share cores."""
        candidates = self._choice.candidates
        values = torch.randn(_CODED_ITEMS, generator=torch.Generator().manual_seed(0))
        taken = torch.empty(2 * len(candidates), dtype=torch.float64)
        for number, codec in enumerate(candidates):
            coder, payload = codec.coder(), torch.empty(codec.size_bytes(len(values)), dtype=torch.uint8)
            residual, total = torch.zeros(coder.residual_items(len(values))), torch.zeros_like(values)
            coder.encode(values, payload, residual)
            self._barrier_job()(patience)
            start = time.perf_counter()
            coder.encode(values, payload, residual)
            middle = time.perf_counter()
            (coder.add if codec.row.vectors is None else coder.decode)(payload, total)
            taken[2 * number : 2 * number + 2] = torch.tensor([middle - start, time.perf_counter() - middle])
        self._agree(taken, patience)
        each = (taken / len(values)).tolist()
        self._choice.speeds = {codec.line: (each[2 * at], each[2 * at + 1]) for at, codec in enumerate(candidates)}

    def _agree(self, values: Tensor, patience: Patience) -> None:
        """The largest of each, on all ranks."""
        self._reduce_values(values, "max", plan("direct", "all-reduce", self._ranks), patience)

    def _reduce_values(self, values: Tensor, reduction: str, way: Plan, patience: Patience) -> None:
        """Inside a job: an all-reduce of a flat tensor."""
        self._executor.run(
            Call(
                plan=way, dtype=values.dtype, items=len(values), what=number_of("all_reduce", reduction, values.dtype),
                sizes=cut(len(values), way.schedule.chunks), reduction=reduction,
                into=check_reduction(reduction, values.dtype), whole=values, since_ns=now()[0],
            ),
            patience,
        )  # fmt: skip

    def _measure_network(self, hosts: tuple[int, ...], patience: Patience) -> NetworkFigures:
        """One rank of each host sends to one of the next host, all at once; then to one of the host after that.

        Pieces of 128 KiB first. Larger ones follow only where these took so short that it will not take long.
        """
        barrier, many = self._barrier_job(), len(set(hosts))
        taken_s = []
        for _ in range(8):
            start = time.perf_counter()
            barrier(patience)
            taken_s.append(time.perf_counter() - start)
        latency_s = min(taken_s)  # a busy machine only adds to it
        rates = torch.zeros(many * many + 1, dtype=torch.float64)
        rates[-1] = latency_s
        leaders = tuple(hosts.index(host) for host in range(many))
        fastest_s: dict[tuple[int, int], float] = {}
        for size_bytes in _SENT_BYTES:
            for shift in (*range(1, min(many - 1, _MOST_SHIFTS) + 1),) * _SENT_TIMES:
                barrier(patience)
                seconds = self._time_shift(leaders, shift, size_bytes, patience)
                if seconds is not None:
                    source = (leaders.index(self._rank) - shift) % many
                    at = source * many + leaders.index(self._rank)
                    fastest_s[size_bytes, at] = min(seconds, fastest_s.get((size_bytes, at), math.inf))
                    rates[at] = size_bytes / fastest_s[size_bytes, at]  # the larger: buffers carry a part of small ones
            measured = rates[:-1][rates[:-1] > 0]
            slowest = torch.tensor([-float(measured.min()) if len(measured) else -math.inf], dtype=torch.float64)
            self._agree(slowest, patience)
            if _SENT_BYTES[-1] / -float(slowest[0]) > _MEASURED_S:
                break
        self._agree(rates, patience)
        table = rates[:-1].reshape(many, many)
        return NetworkFigures(
            latency_s=float(rates[-1]),
            sends=tuple(_usual_rate(row) for row in table),
            receives=tuple(_usual_rate(column) for column in table.T),
            streams=self._measure_streams(float(-slowest[0]), patience),
        )

    def _measure_streams(self, bytes_per_s: float, patience: Patience) -> int:
        """How many streams to each rank on another host are worth it in an all-reduce; no more are kept.

        All ranks agree on each time, so that all decide alike.
        """
        remote, barrier = self._transport.remote, self._barrier_job()
        assert remote is not None
        values = torch.zeros(int(min(_STREAMED_BYTES[1], max(_STREAMED_BYTES[0], bytes_per_s * _STREAMED_S))) // 4)
        way = Choice("ring:parts=4", self._ranks, hosts=self._transport.hosts).of(values.nbytes)
        tried: set[int] = set()

        def time_s(streams: int) -> float:
            remote.use_streams(streams)
            for _ in range(1 if streams in tried else 2):  # the first time, TCP still finds out how fast it can send
                barrier(patience)
                start = time.perf_counter()
                self._reduce_values(values, "sum", way, patience)
            taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            tried.add(streams)
            self._agree(taken, patience)
            return float(taken[0])

        quick = 8 * values.nbytes / bytes_per_s < _MEASURED_S
        streams = streams_worth_it(remote.streams, _MEASURED_S, time_s) if quick and remote.streams > 1 else 1
        remote.use_streams(streams)
        barrier(patience)  # nobody looks at what somebody closes
        remote.keep_streams(streams)
        return streams

    def _time_shift(self, leaders: tuple[int, ...], shift: int, size_bytes: int, patience: Patience) -> float | None:
        """Each leader sends so many bytes to the one `shift` hosts on: how long it took to come; None for others."""
        many = len(leaders)
        call = self._call("all_gather", torch.empty(0, dtype=torch.uint8), (size_bytes,) * many)
        call.plan, call.detail = shifted(leaders, shift, self._ranks), shift
        if self._rank not in leaders:
            self._executor.run(call, patience)
            return None
        own, source = leaders.index(self._rank), (leaders.index(self._rank) - shift) % many
        call.give = {own: torch.zeros(size_bytes, dtype=torch.uint8)}
        call.take = {source: torch.zeros(size_bytes, dtype=torch.uint8)}
        start = time.perf_counter()
        self._executor.run(call, patience)
        return self._transport.received_s[leaders[source]] - start

    # --- collectives -----------------------------------------------------------------------------------------------

    @or_nccl("allreduce")
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> PendingCall:
        since, iteration = now()
        bucket = iteration >= 0 and _called_by_the_reducer()
        if tensors[0].is_sparse:
            return self._submit([lambda patience: self._sparse(tensors, opts, patience)], tensors, opts)
        reduction, factor = _reduction(opts)
        jobs = [self._all_reduce(tensor, reduction, factor, since, iteration, bucket) for tensor in tensors]
        return self._submit(jobs, tensors, opts)

    allreduce_coalesced = or_nccl("allreduce_coalesced")(allreduce)

    def _all_reduce(
        self, tensor: Tensor, reduction: str, factor: float | None, since: int, iteration: int, bucket: bool
    ) -> Job:
        into = check_reduction(reduction, tensor.dtype)
        items = tensor.numel()
        what = number_of("all_reduce", reduction, tensor.dtype)
        in_one_piece = tensor.is_contiguous()
        in_place = in_one_piece and factor is None and tensor.device.type == "cpu"
        may_code = (
            tensor.dtype == torch.float32 and reduction in ("sum", "mean") and factor is None
            and self._ranks > 1
        )  # fmt: skip
        if not in_one_piece:
            flat_of(tensor, written=True)  # refused now, not when others wait for it

        def run(patience: Patience) -> None:
            choice = self._choice
            if choice.measures:
                self._measure_once(patience)
            if choice.codes and may_code and (coded := choice.coded(tensor.nbytes)) is not None:
                self._coded_all_reduce(tensor, reduction, coded, since, iteration, patience)
                return
            if self._in_parts and (tensor.is_cuda or tensor.nbytes > STAGED_BYTES):
                flat, most = flat_of(tensor), STAGED_BYTES // tensor.itemsize
                flat.load()
                for part in staged_parts(flat.tensor, most) if tensor.is_cuda else parts_of(flat.tensor, most):
                    reduce([Flat(part)], None, part.numel(), patience)
                flat.back()
            else:
                place = self._placements.place(tensor, bucket=bucket) if in_place else None
                reduce([] if place and reduction != "mean" else [flat_of(tensor)], place, items, patience)

        def reduce(flats: list[Flat], place: Place | None, items: int, patience: Patience) -> None:
            way = self._choice.of(items * tensor.itemsize)
            call = Call(
                plan=way, dtype=tensor.dtype, what=what, items=items, reduction=reduction,
                sizes=cut(items, way.schedule.chunks), into=into, place=place, since_ns=since, iteration=iteration,
                whole=None if place else flats[0].tensor,
            )  # fmt: skip
            self._run(call, flats, flats, factor, patience)

        return run

    def _coded_all_reduce(
        self, tensor: Tensor, reduction: str, coded: tuple[Codec, Plan], since: int, iteration: int, patience: Patience
    ) -> None:
        flat = flat_of(tensor, on_cpu=True)
        flat.load()
        call = Call(
            plan=coded[1], dtype=tensor.dtype, what=number_of("all_reduce", reduction, tensor.dtype),
            items=tensor.numel(), sizes=(), reduction=reduction, into=check_reduction(reduction, tensor.dtype),
            since_ns=since, iteration=iteration,
        )  # fmt: skip
        kept = Kept(tensor.numel()) if coded[0] is NONE else self.residuals.of(tensor)
        self._coded.all_reduce(flat.tensor, *coded, kept, call, patience, feedback=self._choice.keeps_residuals)
        if self._transport.hosts is not None:
            self._large = coded[1]
        if reduction == "mean":
            mean_of(flat.tensor, self._ranks)
        flat.back()

    def _sparse(self, tensors: list[Tensor], opts: Any, patience: Patience) -> None:
        """Indices and values of all ranks, put together; equal indices are added."""
        if _reduction(opts) != ("sum", None):
            raise RequestError("sparse tensors can only be summed")
        for tensor in tensors:
            mine = tensor.coalesce()
            counts = self._all_gathered(torch.tensor([mine._nnz()]), [1] * self._ranks, patience)
            sizes = [int(count) for count in counts]
            indices = self._all_gathered(mine.indices().flatten(), [n * mine.sparse_dim() for n in sizes], patience)
            per_value = math.prod(mine.values().shape[1:])
            values = self._all_gathered(mine.values().flatten(), [n * per_value for n in sizes], patience)
            shape = (-1, *mine.values().shape[1:])
            total = torch.sparse_coo_tensor(
                torch.cat([one.reshape(mine.sparse_dim(), -1) for one in indices], 1),
                torch.cat([one.reshape(shape) for one in values if one.numel() or len(sizes) == 1] or [mine.values()]),
                mine.shape,
            ).coalesce()
            tensor.copy_(total)

    def _all_gathered(self, mine: Tensor, sizes: Sequence[int], patience: Patience) -> list[Tensor]:
        """Inside a job: everybody's flat tensor of so many items each."""
        parts = [torch.empty(size, dtype=mine.dtype) for size in sizes]
        self._gather_job("all_gather", mine.contiguous(), parts)(patience)
        return parts

    @or_nccl("broadcast")
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> PendingCall:
        root = 0 if opts is None else opts.rootRank
        written = self._rank != root
        jobs = []
        for tensor in tensors:
            flat = self._bytes(tensor, written=written)
            call = self._call("broadcast", tensor, (flat.tensor.numel(),), root=root)
            call.whole = flat.tensor
            jobs.append(self._job(call, [flat], [flat] if written else []))
        return self._submit(jobs, tensors, opts)

    @or_nccl("reduce")
    def reduce(self, tensors: list[Tensor], opts: Any) -> PendingCall:
        root, (reduction, factor) = opts.rootRank, _reduction(opts)
        written = self._rank == root
        jobs = []
        for tensor in tensors:
            call = self._call("reduce", tensor, (tensor.numel(),), reduction=reduction, root=root)
            apart = factor is not None or (not written and bool(self._written(call)))  # a sum that is passed on
            flat = flat_of(tensor, on_cpu=True, apart=apart, written=written)
            call.whole = flat.tensor
            jobs.append(self._job(call, [flat], [flat] if written else [], factor))
        return self._submit(jobs, tensors, opts)

    @or_nccl("allgather")
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> PendingCall:
        jobs = [self._gather_job("all_gather", one, many) for one, many in zip(inputs, outputs, strict=True)]
        return self._submit(jobs, outputs, opts)

    @or_nccl("_allgather_base")
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> PendingCall:
        return self._submit([self._all_gather_single(output, input)], [output], opts)

    def _all_gather_single(self, output: Tensor, input: Tensor) -> Job:
        _check_split(output, input, self._ranks, "all_gather_into_tensor")
        whole = flat_of(output, on_cpu=self._across, written=True)
        return self._gather_job("all_gather", input, whole.tensor.tensor_split(self._ranks), whole=whole)

    @or_nccl("allgather_into_tensor_coalesced")
    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> PendingCall:
        jobs = [self._all_gather_single(one, other) for one, other in zip(outputs, inputs, strict=True)]
        return self._submit(jobs, outputs, opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> PendingCall:
        """`outputs[rank][i]` is input i of that rank."""
        outputs_of = zip(*outputs, strict=True)
        jobs = [self._gather_job("all_gather", one, many) for one, many in zip(inputs, outputs_of, strict=True)]
        return self._submit(jobs, outputs, opts)

    @or_nccl("gather")
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> PendingCall:
        to = outputs[0] if self._rank == opts.rootRank else [inputs[0]] * self._ranks
        return self._submit([self._gather_job("gather", inputs[0], to, opts.rootRank)], outputs, opts)

    def _gather_job(
        self, kind: str, input: Tensor, outputs: Sequence[Tensor], root: int | None = None, whole: Flat | None = None
    ) -> Job:
        """All-gather, or gather to a root; `outputs` have the sizes of all ranks, and may be parts of a whole."""
        if len(outputs) != self._ranks:
            raise RequestError(f"{kind} needs {self._ranks} outputs, one for each rank; got {len(outputs)}")
        if outputs[self._rank].numel() != input.numel():
            got, own = input.numel(), outputs[self._rank].numel()
            raise RequestError(f"{kind}: the input has {got} items, but the output of rank {self._rank} has {own}")
        if any(output.dtype != input.dtype for output in outputs):
            raise RequestError(f"{kind}: the outputs must be {input.dtype} as the input is")
        receives = root is None or root == self._rank
        mine = self._bytes(input, apart=receives and _in_the_way([input], outputs, outputs[self._rank], input))
        parts = [self._bytes(output, written=True) for output in outputs] if receives else []
        call = self._call(kind, input, tuple(one.numel() * one.itemsize for one in outputs), root=root or 0)
        call.give = {self._rank: mine.tensor}
        call.take = {rank: part.tensor for rank, part in enumerate(parts)}
        return self._job(call, [mine], parts if whole is None else [*parts, whole])

    @or_nccl("scatter")
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> PendingCall:
        root, output = opts.rootRank, outputs[0]
        sends = self._rank == root
        if sends and (len(inputs[0]) != self._ranks or any(one.numel() != output.numel() for one in inputs[0])):
            raise RequestError(f"scatter needs {self._ranks} inputs of {output.numel()} items at its root")
        mine = self._bytes(output, written=True)
        apart = sends and _in_the_way(inputs[0], [output], inputs[0][root], output)
        given = [self._bytes(one, apart=apart) for one in inputs[0]] if sends else []
        call = self._call("scatter", output, (mine.tensor.numel(),) * self._ranks, root=root)
        call.give = {rank: one.tensor for rank, one in enumerate(given)}
        call.take = {self._rank: mine.tensor}
        return self._submit([self._job(call, given, [mine])], outputs, opts)

    @or_nccl("reduce_scatter")
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> PendingCall:
        jobs = [self._reduce_scatter(one, many, opts) for one, many in zip(outputs, inputs, strict=True)]
        return self._submit(jobs, outputs, opts)

    @or_nccl("_reduce_scatter_base")
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> PendingCall:
        return self._submit([self._reduce_scatter_single(output, input, opts)], [output], opts)

    @or_nccl("reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> PendingCall:
        jobs = [self._reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return self._submit(jobs, outputs, opts)

    def _reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Job:
        _check_split(input, output, self._ranks, "reduce_scatter_tensor")
        whole = flat_of(input, on_cpu=self._across)
        return self._reduce_scatter(output, whole.tensor.tensor_split(self._ranks), opts, [whole])

    def _reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], opts: Any, wholes: Sequence[Flat] = ()) -> Job:
        """`wholes` are what the inputs are parts of."""
        reduction, factor = _reduction(opts)
        if len(inputs) != self._ranks or inputs[self._rank].numel() != output.numel():
            raise RequestError(
                f"reduce_scatter needs {self._ranks} inputs, one per rank; the one for this rank needs "
                f"{output.numel()} items"
            )
        if any(one.dtype != output.dtype for one in inputs):
            raise RequestError(f"reduce_scatter: the inputs must be {output.dtype} as the output is")
        apart = factor is not None or _in_the_way(inputs, [output], inputs[self._rank], output)
        given = [flat_of(one, on_cpu=True, apart=apart) for one in inputs]
        mine = flat_of(output, on_cpu=True, written=True)
        call = self._call("reduce_scatter", output, tuple(one.numel() for one in inputs), reduction=reduction)
        call.give = {rank: one.tensor for rank, one in enumerate(given)}
        call.take = {self._rank: mine.tensor}
        return self._job(call, [*wholes, *given], [mine], factor)

    @or_nccl("alltoall")
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> PendingCall:
        to = [self._bytes(one, written=True) for one in outputs]
        given = [self._bytes(one, apart=any(_shared(one, output) for output in outputs)) for one in inputs]
        parts = [one.tensor for one in to], [one.tensor for one in given]
        return self._submit([self._all_to_all(outputs[0], *parts, given, to)], outputs, opts)

    @or_nccl("alltoall_base")
    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> PendingCall:
        to, mine = self._bytes(output, written=True), self._bytes(input, apart=_shared(input, output))
        parts = [self._rows(tensor, given, flat) for tensor, given, flat in (
            (output, output_sizes, to.tensor), (input, input_sizes, mine.tensor),
        )]  # fmt: skip
        return self._submit([self._all_to_all(output, parts[0], parts[1], [mine], [to])], [output], opts)

    def _rows(self, tensor: Tensor, sizes: Sequence[int], flat: Tensor) -> list[Tensor]:
        """A flat tensor of bytes cut by numbers of rows, or evenly."""
        rows = tensor.shape[0] if tensor.dim() else 1
        if not sizes and rows % self._ranks:
            raise RequestError(f"all_to_all: {rows} rows cannot be split evenly among {self._ranks} ranks")
        each = list(sizes) or [rows // self._ranks] * self._ranks
        if len(each) != self._ranks or sum(each) != rows:
            raise RequestError(f"all_to_all: the sizes {each} do not make up {rows} rows for {self._ranks} ranks")
        row = flat.numel() // rows if rows else 0
        ends = list(accumulate((size * row for size in each), initial=0))
        return [flat[start:end] for start, end in pairwise(ends)]

    def _all_to_all(
        self, like: Tensor, outputs: list[Tensor], inputs: list[Tensor], loads: list[Flat], backs: list[Flat]
    ) -> Job:
        if len(outputs) != self._ranks or len(inputs) != self._ranks:
            raise RequestError(f"all_to_all needs {self._ranks} outputs and {self._ranks} inputs, one per rank")
        if outputs[self._rank].numel() != inputs[self._rank].numel():
            raise RequestError("all_to_all: this rank's input and output for itself have different sizes")
        ranks = self._ranks
        sent = torch.tensor([one.numel() for one in inputs])

        def run(patience: Patience) -> None:
            table = [part.tolist() for part in self._all_gathered(sent, [ranks] * ranks, patience)]  # [from][to]
            for source in range(ranks):
                if table[source][self._rank] != outputs[source].numel():
                    self._transport.fail(
                        f"{self._transport.name(source)} sends {table[source][self._rank]} bytes to"
                        f" {self._transport.name(self._rank)}; that rank expects {outputs[source].numel()}",
                        ranks=(source,),
                    )
            call = self._call("all_to_all", like, tuple(size for row in table for size in row))
            call.give = {self._rank * ranks + to: part for to, part in enumerate(inputs)}
            call.take = {source * ranks + self._rank: part for source, part in enumerate(outputs)}
            self._job(call, loads, backs)(patience)

        return run

    def barrier(self, opts: Any = None) -> PendingCall:
        return self._submit([self._barrier_job()], [], opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """A barrier that says who did not come: rank 0 waits for the others, who wait for its answer.

        `PeerError` on rank 0 names the first rank that did not come, or all of them; the others are told too.
        `dist.monitored_barrier` refuses every backend but Gloo by name, so this is called on the group itself. The
        words of the errors are those that torch's users know.
        """
        transport, messages = self._transport, self._messages
        transport.check()
        seconds = transport.timeout_s if timeout is None else timeout.total_seconds()
        end = time.monotonic() + seconds
        if self._rank != 0:
            messages.send(torch.ones(1, dtype=torch.uint8), 0, _BARRIER_TAG)
            answer = torch.zeros(1, dtype=torch.uint8)
            try:
                messages.receive(Flat(answer), 0, _BARRIER_TAG, seconds).wait()
            except PeerError:
                answer.zero_()
            if not answer.item():
                raise PeerError(
                    f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for"
                    " send/recv from rank 0. Please check rank 0 logs for faulty rank."
                )
            return
        if seconds <= 0:
            raise PeerError("Rank 0 timed out in monitoredBarrier after 0 ms.")
        missing = []
        for peer in transport.others:
            try:
                there = Flat(torch.zeros(1, dtype=torch.uint8))
                messages.receive(there, peer, _BARRIER_TAG, max(0.0, end - time.monotonic())).wait()
            except PeerError:
                missing.append(peer)
                if not wait_all_ranks:
                    break
        for peer in transport.others:
            if peer not in missing:
                messages.send(torch.tensor([not missing], dtype=torch.uint8), peer, _BARRIER_TAG)
        if missing:
            names = ", ".join(str(peer) for peer in missing)
            plural = "s" if wait_all_ranks else ""
            raise PeerError(
                f"Rank{plural} {names} failed to pass monitoredBarrier in {1000 * seconds:.0f} ms",
                ranks=tuple(transport.names[peer] for peer in missing),
            )

    # Names of torch before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # --- messages --------------------------------------------------------------------------------------------------

    @or_nccl("send")
    def send(self, tensors: list[Tensor], to: int, tag: int) -> PendingCall:
        flat = self._bytes(tensors[0])
        flat.load()
        return self._keep(self._messages.send(flat.tensor, to, tag))

    @or_nccl("recv")
    def recv(self, tensors: list[Tensor], source: int, tag: int) -> PendingCall:
        return self._keep(self._messages.receive(self._bytes(tensors[0], written=True), source, tag))

    @or_nccl("recv_anysource")
    def recv_anysource(self, tensors: list[Tensor], tag: int) -> PendingCall:
        return self._keep(self._messages.receive(self._bytes(tensors[0], written=True), None, tag))


def _keep_dynamo_out(*classes: type) -> None:
    """Have `torch.compile` run the methods of these classes, and all that they call, as they are.

    Where compiled code calls into C++ and that calls a group, as DDP does, Dynamo would compile the method. This is
    what `torch.compiler.disable` amounts to, told to the frame evaluator itself: the decorator would import all of
    Dynamo, which takes longer than importing torch, in programs that compile nothing.
    """
    evaluator: Any = torch._C._dynamo.eval_frame
    if not hasattr(evaluator, "set_code_exec_strategy"):  # not public: without it, such a compilation fails
        return
    skip = evaluator._FrameExecStrategy(evaluator._FrameAction.SKIP, evaluator._FrameAction.SKIP)
    for each in classes:
        for member in vars(each).values():
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, FunctionType):
                evaluator.set_code_exec_strategy(function.__code__, skip)


_keep_dynamo_out(OffbeatGroup, PendingCall, *PendingCall.__subclasses__())


def now() -> tuple[int, int]:
    """The clock that all processes of a host share, and which backward pass this is in (-1: none)."""
    return time.monotonic_ns(), torch._C._current_graph_task_id()


def _reduction(opts: Any) -> tuple[str, float | None]:
    """The reduction, and what each rank's values are multiplied by first."""
    if opts is None:
        return "sum", None
    kind = opts.reduceOp.op
    name = _NAMES.get(kind)
    if name is None:
        raise RequestError(f"the reduction {kind} is not supported")
    return name, float(opts.reduceOp.__getstate__()[1]) if kind == _RED.PREMUL_SUM else None


def _called_by_the_reducer() -> bool:
    """Whether DDP's reducer calls a collective, from C++ in the midst of a backward pass.

    No Python code is then between this package and whoever started the backward pass; in autograd's threads there is
    none at all. References to the tensor do not tell: torch holds a varying number of its own.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("offbeat."):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


def _usual_rate(rates: Tensor) -> float:
    """Of one host with each of the others: one slow partner, or one late start, must not decide."""
    measured = sorted(rate for rate in rates.tolist() if rate > 0)
    return float(measured[len(measured) // 2])


def _shared(one: Tensor, other: Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _in_the_way(inputs: Sequence[Tensor], outputs: Sequence[Tensor], slot: Tensor, own: Tensor) -> bool:
    """Whether what is written may be read afterwards: tensors share memory, but for this rank's own slot."""
    if slot.data_ptr() == own.data_ptr():
        return False
    return any(_shared(one, other) for one in inputs for other in outputs)


def _check_split(whole: Tensor, part: Tensor, ranks: int, what: str) -> None:
    if whole.numel() != part.numel() * ranks:
        raise RequestError(f"{what}: {whole.numel()} items are not {ranks} times {part.numel()}")
    if whole.dtype != part.dtype:
        raise RequestError(f"{what}: {whole.dtype} and {part.dtype} are not the same")
