"""All-reduces of large fp32 tensors by a codec.

A per-transfer codec is in the plan, and the executor encodes and decodes. A per-tensor codec encodes here, and what it
made is gathered or added up by plain calls. Either way all ranks end with the same bits, and each keeps what it rounded
away for its next call with the same tensor (`residuals`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.codecs import PER_TRANSFER, Codec
from offbeat.codecs.coder import Coder
from offbeat.codecs.low_rank import Layers, PowerSgd, next_start, orthogonalise
from offbeat.collectives.calls import Call, Plan, Runner, check_reduction, cut, number_of
from offbeat.collectives.momentum import Velocity
from offbeat.collectives.residuals import Kept
from offbeat.collectives.sync import Patience

_SEEDS = 2**31 - 1


class CodedCalls:
    """Of one group. `rank` of so many `ranks`; `runner` runs plain and coded calls."""

    def __init__(self, rank: int, ranks: int, runner: Runner) -> None:
        self._rank, self._ranks, self._runner = rank, ranks, runner
        self._coders: dict[str, Coder] = {}
        self._payload = self._gathered = torch.empty(0, dtype=torch.uint8)

    def all_reduce(
        self,
        flat: Tensor,
        codec: Codec,
        way: Plan,
        kept: Kept,
        call: Call,
        patience: Patience,
        *,
        feedback: bool = True,
    ) -> None:
        """The sum of a flat tensor on the CPU, in its place; `call` is what it would be without a codec.

        `way` is the coded plan of a per-transfer codec, and otherwise how payloads are gathered, or added up. Without
        `feedback` what is not sent is lost.
        """
        call.plan, call.sizes, call.whole, call.place = way, cut(call.items, way.schedule.chunks), flat, None
        keeps = codec.biased and feedback
        velocity = Velocity(kept, flat) if codec.row.sends_velocity and feedback and kept.momentum else None
        gathers = way.schedule.collective == "all-gather"
        own_seed = (kept.calls * self._ranks + self._rank) % _SEEDS
        if codec.kind == PER_TRANSFER and not gathers:
            call.codec, call.seed = codec, own_seed
            call.residual = kept.values() if keeps else None
            self._runner.run(call, patience)
        else:
            coder = self._coder(codec)
            coder.seed(own_seed if codec.kind == PER_TRANSFER else kept.calls % _SEEDS)
            if gathers:
                self._gather(coder, codec, flat, way, kept, call, patience, keeps=keeps)
            elif isinstance(coder, PowerSgd) and kept.shapes:
                self._factors_of_layers(Layers(kept.shapes, coder.rank), flat, way, kept, call, patience)
            elif isinstance(coder, PowerSgd):
                self._factors(coder, flat, way, kept, call, patience)
            else:
                self._values(coder, codec, flat, way, kept, call, patience)
        if velocity is not None:
            velocity.end(flat, whole=codec.row.sends_numbers)
        if not feedback:
            kept.residual = None
        kept.calls += 1

    def _coder(self, codec: Codec) -> Coder:
        if codec.line not in self._coders:
            self._coders[codec.line] = codec.coder()
        return self._coders[codec.line]

    def _gather(
        self,
        coder: Coder,
        codec: Codec,
        flat: Tensor,
        way: Plan,
        kept: Kept,
        call: Call,
        patience: Patience,
        *,
        keeps: bool,
    ) -> None:
        """Everybody's payload to everybody, who add them up in the order of ranks."""
        coded = codec.size_bytes(len(flat))
        biases = kept.biases() if codec.row.spares_biases else []
        own = [flat[one].clone() for one in biases]
        behind = -(-coded // 4) * 4 if biases else coded  # where these are
        size = behind + sum(one.nbytes for one in own)
        each = -(-size // 64) * 64
        if len(self._gathered) < each * self._ranks:
            self._gathered = torch.empty(each * self._ranks, dtype=torch.uint8)
        parts = {rank: self._gathered[rank * each : rank * each + size] for rank in range(self._ranks)}
        coder.begin_from(len(flat), kept.start)
        residual = kept.values(coder.residual_items(len(flat))) if keeps else None
        coder.encode(flat, parts[self._rank][:coded], residual)
        kept.start = coder.start_of(len(flat))
        if biases:
            parts[self._rank][behind:].copy_(torch.cat(own).view(torch.uint8))
            if residual is not None:
                for one in biases:
                    residual[one] = 0.0
        self._runner.run(
            Call(
                plan=way, dtype=torch.uint8, what=number_of("all_gather", "", torch.uint8), items=size * self._ranks,
                sizes=(size,) * self._ranks, give={self._rank: parts[self._rank]}, take=dict(parts),
                since_ns=call.since_ns, iteration=call.iteration,
            ),
            patience,
        )  # fmt: skip
        flat.zero_()
        for part in parts.values():
            coder.add(part[:coded], flat)
        if biases:
            sums = torch.zeros((size - behind) // 4)
            for part in parts.values():
                sums.add_(part[behind:].view(torch.float32))
            for one, values in zip(biases, torch.split(sums, [one.stop - one.start for one in biases]), strict=True):
                flat[one] = values

    def _values(
        self, coder: Coder, codec: Codec, flat: Tensor, way: Plan, kept: Kept, call: Call, patience: Patience
    ) -> None:
        """Payloads that can be added up."""
        size = codec.size_bytes(len(flat))
        if len(self._payload) < size:
            self._payload = torch.empty(size, dtype=torch.uint8)
        payload = self._payload[:size]
        coder.encode(flat, payload, kept.values())
        self._add_up(payload.view(torch.float32), way, call, patience)
        coder.decode(payload, flat)

    def _factors(self, coder: PowerSgd, flat: Tensor, way: Plan, kept: Kept, call: Call, patience: Patience) -> None:
        items = len(flat)
        coder.begin_from(items, kept.start)
        start = coder.start_of(items)
        assert start is not None
        matrix = kept.values(coder.residual_items(items))
        matrix[:items].add_(flat)
        left = coder.left(matrix, start)
        self._add_up(left.view(-1), way, call, patience)
        orthogonalise(left)
        right = coder.right(matrix, left)
        coder.subtract(matrix, left, right, items)
        self._add_up(right.view(-1), way, call, patience)
        kept.start = next_start(right, start)
        coder.product(left, right, flat)

    def _factors_of_layers(
        self, layers: Layers, flat: Tensor, way: Plan, kept: Kept, call: Call, patience: Patience
    ) -> None:
        start = layers.start()
        if kept.start is not None and kept.start.shape == start.shape:  # not of a run with another rank
            start = kept.start
        values = kept.values()
        values.add_(flat)
        left = layers.left(values, start)
        self._add_up(left, way, call, patience)
        layers.orthogonalise(left)
        right = layers.right(values, left)
        self._add_up(right, way, call, patience)
        kept.start = layers.next_start(right, start)
        layers.product(left, right, flat)

    def _add_up(self, values: Tensor, way: Plan, call: Call, patience: Patience) -> None:
        self._runner.run(
            Call(
                plan=way, dtype=torch.float32, what=number_of("all_reduce", "sum", torch.float32), items=len(values),
                sizes=cut(len(values), way.schedule.chunks), reduction="sum",
                into=check_reduction("sum", torch.float32), whole=values, since_ns=call.since_ns,
                iteration=call.iteration,
            ),
            patience,
        )  # fmt: skip
