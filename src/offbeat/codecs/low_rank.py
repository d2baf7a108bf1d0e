"""power-sgd: a tensor as a matrix, sent as two thin factors (Vogels, Karimireddy, Jaggi 2019).

    P = Q M^T, added up over all ranks and made orthogonal;  Q = P M, added up;  decoded: P^T Q

The factors are `rank` rows each: so a product with the matrix reads it once, in the order in which it lies. Q is kept
for the next time (the warm start), so that one step of the power iteration is enough. A flat tensor, as DDP's buckets
are, is seen as a matrix that is nearly square (`matrix_shape`), with zeros after its end. That mixes layers, and little
of a gradient is in its few directions. Where the shapes of the layers are known (`Layers`), each has a matrix of its
own, and what is no matrix, or would not be smaller, is sent as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.codecs.coder import Coder, is_finite
from offbeat.codecs.table import factor_items, matrix_shape

_START = 7  # the seed of the first Q, on all ranks alike


class PowerSgd(Coder):
    """Alone it encodes for itself; `left`, `right`, `subtract` and `product` are the steps in which ranks add up."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._matrix = torch.empty(0)
        self._start: dict[int, Tensor] = {}  # by items: Q of the last time

    def residual_items(self, items: int) -> int:
        return padded_items(items)

    def begin_from(self, items: int, start: Tensor | None) -> None:
        first = self.start(items)
        self._start[items] = start if start is not None and start.shape == first.shape else first

    def start_of(self, items: int) -> Tensor | None:
        return self._start.get(items)

    def encode(self, values: Tensor, payload: Tensor, residual: Tensor | None = None, *, take: bool = False) -> None:
        items = len(values)
        if not items:
            return
        if residual is not None and len(residual) == self.residual_items(items):  # it is the matrix itself
            padded = residual
            padded[:items].add_(values)
        else:
            padded = self._scratch(items)
            padded[:items].copy_(values)
            padded[items:] = 0.0
            if residual is not None:
                padded[:items].add_(residual[:items])
        first, second = self._factors(payload, items)
        first.copy_(orthogonalise(self.left(padded, self._start.get(items, self.start(items)))))
        second.copy_(self.right(padded, first))
        self._start[items] = next_start(second, self._start.get(items, self.start(items)))
        if residual is not None:
            self.subtract(padded, first, second, items)
            if residual is not padded:
                residual[:items].copy_(padded[:items])
        if take:
            self.decode(payload, values)

    def decode(self, payload: Tensor, into: Tensor) -> None:
        if len(into):
            self.product(*self._factors(payload, len(into)), into)

    def add(self, payload: Tensor, into: Tensor) -> None:
        made = self._scratch(len(into))[: len(into)]
        self.decode(payload, made)
        into.add_(made)

    def _factors(self, payload: Tensor, items: int) -> tuple[Tensor, Tensor]:
        rows, columns = matrix_shape(items)
        first, _ = factor_items(items, self.rank)
        both = payload.view(torch.float32)
        return both[:first].view(-1, rows), both[first:].view(-1, columns)

    def _scratch(self, items: int) -> Tensor:
        if len(self._matrix) < padded_items(items):
            self._matrix = torch.empty(padded_items(items))
        return self._matrix[: padded_items(items)]

    # --- the steps ----------------------------------------------------------------------------------------------------

    def start(self, items: int) -> Tensor:
        """The first Q: random, and the same on all ranks."""
        _, columns = matrix_shape(items)
        width = factor_items(items, self.rank)[1] // columns
        return orthogonalise(torch.randn(width, columns, generator=torch.Generator().manual_seed(_START)))

    def left(self, padded: Tensor, start: Tensor) -> Tensor:
        """Q M^T; `padded` is the matrix, as a flat tensor."""
        return torch.mm(start, padded.view(-1, start.shape[1]).t())

    def right(self, padded: Tensor, left: Tensor) -> Tensor:
        """P M."""
        return torch.mm(left, padded.view(left.shape[1], -1))

    def subtract(self, padded: Tensor, left: Tensor, right: Tensor, items: int) -> None:
        """What is left of the matrix after its own factors; what is not finite does not stay."""
        padded.view(left.shape[1], -1).addmm_(left.t(), right, alpha=-1)
        padded[items:] = 0.0
        if not is_finite(padded):
            torch.nan_to_num_(padded, 0.0, 0.0, 0.0)

    def product(self, left: Tensor, right: Tensor, into: Tensor) -> None:
        """P^T Q, as a flat tensor without the zeros at the end."""
        columns = right.shape[1]
        whole = len(into) // columns
        torch.mm(left[:, :whole].t(), right, out=into[: whole * columns].view(whole, columns))
        if len(into) > whole * columns:
            into[whole * columns :] = (left[:, whole] @ right)[: len(into) - whole * columns]


class Layer(NamedTuple):
    """A matrix of a flat tensor."""

    start: int
    rows: int
    columns: int
    width: int  # of its factors

    @property
    def end(self) -> int:
        return self.start + self.rows * self.columns

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.end].view(self.rows, self.columns)


class Layers:
    """A flat tensor as the matrices of layers, and the rest, which is sent as it is.

    The steps are those of `PowerSgd`, on all matrices. `left` and `right` are one vector each, for all ranks to add up.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], rank: int) -> None:
        self.layers: list[Layer] = []
        self.uncoded: list[slice] = []
        start = 0
        for shape in shapes:
            items = math.prod(shape)
            rows = shape[0] if shape else 1
            columns = items // rows if rows else 0
            width = min(rank, rows, columns)
            if len(shape) > 1 and width * (rows + columns) < items:
                self.layers.append(Layer(start, rows, columns, width))
            elif items:
                self.uncoded.append(slice(start, start + items))
            start += items
        self.items = start

    def start(self) -> Tensor:
        """The first Q of each: random, and the same on all ranks."""
        chance = torch.Generator().manual_seed(_START)
        firsts = [orthogonalise(torch.randn(one.width, one.columns, generator=chance)) for one in self.layers]
        return torch.cat([torch.empty(0), *(first.view(-1) for first in firsts)])

    def left(self, values: Tensor, start: Tensor) -> Tensor:
        """Q M^T of each layer, and the rest."""
        starts = self._split(start, columns=True)
        lefts = [torch.mm(first, one.of(values).t()).view(-1) for one, first in zip(self.layers, starts, strict=True)]
        return torch.cat([torch.empty(0), *lefts, *(values[part] for part in self.uncoded)])

    def orthogonalise(self, left: Tensor) -> None:
        for one in self._split(left, columns=False):
            orthogonalise(one)

    def right(self, values: Tensor, left: Tensor) -> Tensor:
        """P M of each layer; what is left of `values` after that and the rest stays in there."""
        rights = []
        for one, factor in zip(self.layers, self._split(left, columns=False), strict=True):
            matrix = one.of(values)
            rights.append(torch.mm(factor, matrix))
            matrix.addmm_(factor.t(), rights[-1], alpha=-1)
        for part in self.uncoded:
            values[part] = 0.0
        if not is_finite(values):
            torch.nan_to_num_(values, 0.0, 0.0, 0.0)
        return torch.cat([torch.empty(0), *(right.view(-1) for right in rights)])

    def product(self, left: Tensor, right: Tensor, into: Tensor) -> None:
        """P^T Q of each layer, and the rest."""
        pairs = zip(self._split(left, columns=False), self._split(right, columns=True), strict=True)
        for one, (factor, other) in zip(self.layers, pairs, strict=True):
            torch.mm(factor.t(), other, out=one.of(into))
        at = sum(one.width * one.rows for one in self.layers)
        for part in self.uncoded:
            into[part] = left[at : at + part.stop - part.start]
            at += part.stop - part.start

    def next_start(self, right: Tensor, before: Tensor) -> Tensor:
        pairs = zip(self._split(right, columns=True), self._split(before, columns=True), strict=True)
        return torch.cat([torch.empty(0), *(next_start(one, old).reshape(-1) for one, old in pairs)])

    def _split(self, vector: Tensor, *, columns: bool) -> list[Tensor]:
        """The factors of each layer in a vector of them: of as many columns as the layer has columns, or rows."""
        found, at = [], 0
        for one in self.layers:
            side = one.columns if columns else one.rows
            found.append(vector[at : at + one.width * side].view(one.width, side))
            at += one.width * side
        return found


def padded_items(items: int) -> int:
    """How many items the matrix of so many has."""
    rows, columns = matrix_shape(items)
    return rows * columns


def next_start(right: Tensor, before: Tensor) -> Tensor:
    """What the next time starts from: directions without a size; not what is not finite, or nothing at all."""
    size = right.abs().max()
    return right / size if bool(size.isfinite()) and float(size) > 0 else before


def orthogonalise(rows: Tensor) -> Tensor:
    """In place, row by row (Gram-Schmidt, twice for accuracy); a row of zeros stays one."""
    scale = rows.abs().max()
    if scale > 0 and scale.isfinite():
        rows.div_(scale)
    for at in range(len(rows)):
        row, before = rows[at], rows[:at]
        size = row.norm()
        for _ in range(2):
            if at:
                row.sub_(before.t() @ (before @ row))
        norm = row.norm()
        if norm > 1e-6 * size:  # else it was in the span of those before it: rounding noise is not a direction
            row.div_(norm)
        elif not norm.isnan():
            row.zero_()
    return rows
