"""A run's arithmetic in one process: versions of the weights, gradients, and updates made by the servers' own code.

For whoever makes a run again (`replay`) or trains in virtual time. Law: the same gradients, in the same order, with the
same hyperparameters give the same weights as on the servers, bit for bit: it is the same code (`optimizers`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from msgspec import structs
from torch import Tensor, nn

from offbeat.server.coordinator.grants import clip_of
from offbeat.server.parameter_layout import (
    DTYPES,
    layout_of,
    model_tensors,
    read_tensors,
    row_parameters,
    views,
    write_tensors,
)
from offbeat.server.shard import optimizers
from offbeat.server.sparse_rows import count_rows, dense_of, saved_bytes
from offbeat.server.wire import Hyper, ShardJob


class InProcessServer:
    """Gradients lie under numbers that whoever computes them chooses; each is gone when it was applied."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float = 0.0,
        gradients: str | None = None,
        outer: Sequence[Hyper] | None = None,
    ) -> None:
        """The weights are the model's, the rule is the optimizer's; with `outer` it is SGD with these numbers."""
        self.parts, groups = model_tensors(model, optimizer)
        rule, hypers = optimizers.describe(optimizer) if outer is None else ("sgd", list(outer))
        states = optimizers.state_names(rule, hypers)
        self.table = layout_of(
            model,
            self.parts,
            groups,
            rule=rule,
            states=states,
            clip_norm=clip_norm,
            gradients=gradients,
            rows=row_parameters(model, self.parts),
        )
        dtype, items, self.device = DTYPES[self.table.dtype], self.table.items, self.parts.trained[0].device
        self.version = 0
        self.weights: dict[int, Tensor] = {0: torch.empty(items, dtype=dtype, device=self.device)}
        self.slots: dict[int, Tensor] = {}
        self.states = [{name: torch.zeros(items, dtype=dtype, device=self.device) for name in states} for _ in range(2)]
        self.offsets = self.table.offsets()
        self._absent: dict[int, frozenset[int]] = {}  # parameters without a gradient
        self.row_tables = self.table.row_tables()
        self.push_bytes: dict[int, int] = {}  # of gradients of which only rows are pushed, until somebody counts them
        steps = [torch.zeros(len(self.table.sizes), dtype=torch.int64) for _ in range(2)]
        self._updates = optimizers.Updates(
            self.table, self.weights, self.slots, self.states, steps, 0, items, self.device
        )
        self._travels = DTYPES[self.table.gradients]
        self.read_model(0)

    @property
    def current(self) -> Tensor:
        return self.weights[self.version]

    # --- the model ---------------------------------------------------------------------------------------------------

    def read_model(self, version: int) -> None:
        """The model's weights become those of a version."""
        read_tensors(self.weights[version], self.parts.trained)

    def write_model(self, vector: Tensor, trained: Sequence[Tensor] = ()) -> None:
        """Weights into the model, or into these tensors of another one like it."""
        write_tensors(vector, trained or self.parts.trained)

    # --- gradients ---------------------------------------------------------------------------------------------------

    def take_gradient(self, number: int) -> None:
        """What backward has left in the model."""
        slot = self.slots[number] = torch.empty(self.table.items, dtype=self._travels, device=self.device)
        gradients = [parameter.grad for parameter in self.parts.trained]
        for place, gradient in zip(views(slot, self.parts.trained), gradients, strict=True):
            if gradient is None:
                place.zero_()
            else:
                place.copy_(dense_of(gradient))
        if self.row_tables:
            found = [gradients[one.parameter] for one in self.row_tables]
            counts = [
                0 if one is None else count_rows(one, table) for one, table in zip(found, self.row_tables, strict=True)
            ]
            saved = (saved_bytes(one, count, slot.itemsize) for one, count in zip(self.row_tables, counts, strict=True))
            self.push_bytes[number] = slot.nbytes - sum(saved)
        self._absent[number] = frozenset(index for index, gradient in enumerate(gradients) if gradient is None)

    def put_gradient(self, number: int, gradient: Tensor, absent: frozenset[int] = frozenset()) -> None:
        """A flat one; it is not copied."""
        self.slots[number] = gradient
        self._absent[number] = absent

    def absent(self, number: int) -> frozenset[int]:
        """The parameters that have no part in this gradient."""
        return self._absent[number]

    def drop(self, numbers: Collection[int]) -> None:
        for number in numbers:
            self.slots.pop(number, None)
            self._absent.pop(number, None)

    # --- updates -----------------------------------------------------------------------------------------------------

    def apply(
        self,
        numbers: Sequence[int],
        scales: Sequence[float],
        hyper: Sequence[Hyper],
        *,
        damping: float = 1.0,
        compensation: float = 0.0,
        reads: Sequence[int] = (),
    ) -> None:
        """One update, as the coordinator orders it and a shard makes it. `reads`: the version of each gradient."""
        self.weights[self.version + 1] = torch.empty_like(self.current)
        job = ShardJob(
            shard=0,
            number=self.version + 1,
            kind="apply",
            version=self.version + 1,
            source=self.version,
            target=self.version + 1,
            slots=tuple(numbers),
            scales=tuple(scales),
            damping=damping,
            hyper=tuple(hyper),
            skip=tuple(sorted(frozenset.intersection(*(self._absent[number] for number in numbers)))),
            compensation=compensation,
            reads=tuple(reads),
        )
        if self.table.clip_norm:
            job = structs.replace(job, clip=clip_of(self._updates.norm(job), self.table.clip_norm))
        self._updates.apply(job)
        self.version += 1
        self.drop(numbers)

    def skip(self) -> None:
        """A version more with the same weights: there was nothing to apply."""
        self.weights[self.version + 1] = self.current.clone()
        old, new = self.version % 2, (self.version + 1) % 2
        for name, vector in self.states[old].items():
            self.states[new][name].copy_(vector)
        self._updates.steps[new].copy_(self._updates.steps[old])
        self.version += 1

    def drift(self, version: int) -> float:
        """|w_now - w_then|^2."""
        moved = (self.current - self.weights[version]).double()
        return float(torch.dot(moved, moved))

    def keep(self, versions: Collection[int]) -> None:
        """Only these may still be asked for, and the current one."""
        for version in [one for one in self.weights if one not in versions and one != self.version]:
            del self.weights[version]

    def forget(self, state: str) -> None:
        """Sets a vector of the optimizer's state back to what it is at first, where the optimizer has it."""
        for states in self.states:
            if state in states:
                states[state].zero_()

    def load(self, vector: Tensor) -> None:
        """Go on from these weights; the optimizer's state stays."""
        self.current.copy_(vector)
