"""Coded all-reduces of all ranks in one process, in memory: what a running group would compute, without one.

Every rank has a thread with the calls that it makes in a group (`CodedCalls`). All of them meet at each call, which is
then carried out on all tensors at once, step by step as its schedule says: reads before writes. So no arithmetic of
codecs is written twice, and sums have the same bits as in a group, where no codec rounds by chance.

    group = LockStep(Choice("ring:codec=int8", 4), 4)
    group.sum(tensors, kept)        # of each rank a tensor, in its place, and what it has not sent of it yet
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from offbeat.codecs.coder import Coder
from offbeat.collectives.calls import Call, Plan, check_reduction, cut, number_of
from offbeat.collectives.choice import Choice
from offbeat.collectives.coded_calls import CodedCalls
from offbeat.collectives.residuals import Kept
from offbeat.collectives.sync import BACKGROUND, Patience
from offbeat.schedules.projection import Encode, encodes_of, rows_of

_LIMIT_S = 600.0  # for the slowest of the threads


@dataclass(slots=True)
class _Rank:
    """The seat of one rank at the calls; `calls` and `run` are those of a runner."""

    number: int
    together: LockStep
    calls: int = 0

    def run(self, call: Call, patience: Patience) -> None:
        self.calls += 1
        self.together.meet(self.number, call)

    def forget(self) -> None:
        """It has no memory."""


class LockStep:
    """Of so many ranks that share one line; see the module's text."""

    def __init__(self, choice: Choice, ranks: int) -> None:
        self._choice, self._ranks = choice, ranks
        self._calls: list[Call | None] = [None] * ranks
        self._met = threading.Barrier(ranks, self._carry_out, timeout=_LIMIT_S)
        self._coded = [CodedCalls(rank, ranks, _Rank(rank, self)) for rank in range(ranks)]
        self._coders: list[dict[str, Coder]] = [{} for _ in range(ranks)]
        self.sent_bytes = 0  # by all ranks
        self._threads = ThreadPoolExecutor(ranks, "rank") if ranks > 1 else None

    def sum(self, tensors: Sequence[Tensor], kept: Sequence[Kept]) -> None:
        """In the place of all: flat fp32 tensors, and what each rank has not sent of its own yet."""
        size, items = tensors[0].nbytes, len(tensors[0])
        if self._threads is None:
            return
        coded = self._choice.coded(size)
        call_of = [_call(items, self._choice.of(size) if coded is None else coded[1]) for _ in tensors]
        if coded is None:
            for call, tensor in zip(call_of, tensors, strict=True):
                call.whole, call.sizes = tensor, cut(items, call.plan.schedule.chunks)
            self._carry_out_all(call_of)
            return
        (codec, way), feedback = coded, self._choice.keeps_residuals

        def reduce(rank: int) -> None:
            try:
                self._coded[rank].all_reduce(
                    tensors[rank], codec, way, kept[rank], call_of[rank], BACKGROUND, feedback=feedback
                )
            except BaseException:
                self._met.abort()  # nobody waits for this rank
                raise

        done = [self._threads.submit(reduce, rank) for rank in range(self._ranks)]
        broken = [one.exception() for one in done]
        self._met.reset()
        for error in sorted(
            (one for one in broken if one), key=lambda one: isinstance(one, threading.BrokenBarrierError)
        ):
            raise error

    def meet(self, rank: int, call: Call) -> None:
        self._calls[rank] = call
        self._met.wait()

    def _carry_out(self) -> None:
        self._carry_out_all([call for call in self._calls if call is not None])

    def _carry_out_all(self, calls: Sequence[Call]) -> None:
        schedule = calls[0].plan.schedule
        if schedule.collective == "all-gather":
            self.sent_bytes += len(schedule.steps.table) * calls[0].sizes[0]
            for call in calls:
                for rank, given in enumerate(calls):
                    if given is not call:
                        call.take[rank].copy_(given.give[rank])
            return
        self.sent_bytes += _Sum(calls, self._coders).run()


def _call(items: int, way: Plan) -> Call:
    return Call(
        plan=way, dtype=torch.float32, what=number_of("all_reduce", "sum", torch.float32), items=items, sizes=(),
        reduction="sum", into=check_reduction("sum", torch.float32),
    )  # fmt: skip


@cache
def _steps_of(way: Plan) -> tuple[list[list[tuple[int, ...]]], list[dict[tuple[int, int], Encode]]]:
    """The transfers of each step, and what each rank encodes after which step."""
    rows = rows_of(way.schedule)
    coded = bool(way.schedule.steps.codecs)
    return rows, [encodes_of(rows, rank) if coded else {} for rank in range(way.schedule.ranks)]


class _Sum:
    """One all-reduce of whole tensors by a schedule."""

    def __init__(self, calls: Sequence[Call], coders: Sequence[dict[str, Coder]]) -> None:
        self._calls, self._coders = calls, coders
        self._rows, self._encodes = _steps_of(calls[0].plan)
        starts = [0]
        for size in calls[0].sizes:
            starts.append(starts[-1] + size)
        self._bounds = list(pairwise(starts))
        self._payloads: dict[tuple[int, int], Tensor] = {}

    def run(self) -> int:
        """The bytes that all ranks send."""
        sent = 0
        for rank, call in enumerate(self._calls):
            if call.codec is not None:
                self._coder(rank).seed(call.seed)
                for (step, chunk), encode in self._encodes[rank].items():
                    if step < 0:
                        self._encode(rank, chunk, encode)
        for step, rows in enumerate(self._rows):
            written = {(target, chunk) for _, target, chunk, *_ in rows}
            read = [
                self._payloads[source, chunk] if codec else self._read(source, chunk, (source, chunk) in written)
                for source, _, chunk, _, codec in rows
            ]
            sent += sum(one.nbytes for one in read)
            for (_, target, chunk, reduce, codec), given in zip(rows, read, strict=True):
                mine = self._chunk(target, chunk)
                if not len(mine):
                    continue
                if not codec:
                    (mine.add_ if reduce else mine.copy_)(given)
                elif reduce:
                    self._coder(target).add(given, mine)
                else:
                    self._payloads[target, chunk] = given
                    self._coder(target).decode(given, mine)
            for target, chunk in sorted(written):
                if (step, chunk) in self._encodes[target]:
                    self._encode(target, chunk, self._encodes[target][step, chunk])
        return sent

    def _chunk(self, rank: int, chunk: int) -> Tensor:
        whole = self._calls[rank].whole
        assert whole is not None
        start, end = self._bounds[chunk]
        return whole[start:end]

    def _read(self, rank: int, chunk: int, is_written: bool) -> Tensor:
        values = self._chunk(rank, chunk)
        return values.clone() if is_written else values

    def _coder(self, rank: int) -> Coder:
        codec = self._calls[rank].codec
        assert codec is not None
        if codec.line not in self._coders[rank]:
            self._coders[rank][codec.line] = codec.coder()
        return self._coders[rank][codec.line]

    def _encode(self, rank: int, chunk: int, encode: Encode) -> None:
        call, (start, end) = self._calls[rank], self._bounds[chunk]
        assert call.codec is not None
        payload = self._payloads[rank, chunk] = torch.empty(call.codec.size_bytes(end - start), dtype=torch.uint8)
        if end > start:
            residual = None if call.residual is None else call.residual[start:end]
            self._coder(rank).encode(self._chunk(rank, chunk), payload, residual, take=encode.take)
