"""power-sgd: a tensor as a matrix, sent as two thin factors (Vogels, Karimireddy, Jaggi 2019).

    P = Q M^T, added up over all ranks and made orthogonal;  Q = P M, added up;  decoded: P^T Q

The factors are `rank` rows each: so a product with the matrix reads it once, in the order in which it lies. Q is kept
for the next time (the warm start), so that one step of the power iteration is enough. A flat tensor, as DDP's buckets
are, is seen as a matrix that is nearly square (`matrix_shape`), with zeros after its end: that mixes layers, so a rank
here approximates less well than one of each layer's own matrix.
"""

from __future__ import annotations

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
