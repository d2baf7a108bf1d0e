"""power-sgd: a tensor as a matrix, sent as two thin factors (Vogels, Karimireddy, Jaggi 2019).

    P = M Q, added up over all ranks and made orthogonal;  Q = M^T P, added up;  decoded: P Q^T

Q is kept for the next time (the warm start), so that one step of the power iteration is enough. A flat tensor, as
DDP's buckets are, is seen as a matrix that is nearly square (`matrix_shape`), with zeros after its end: that mixes
layers, so a rank here approximates less well than one of each layer's own matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.codecs.coder import Coder, is_finite
from offbeat.codecs.table import factor_items, matrix_shape

_START = 7  # the seed of the first Q, on all ranks alike


class PowerSgd(Coder):
    """Alone it encodes for itself; `left`, `right` and `product` are the steps between which ranks add up."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._matrix = torch.empty(0)
        self._warm: dict[int, Tensor] = {}  # by items: Q of the last time

    def encode(self, values: Tensor, payload: Tensor, residual: Tensor | None = None, *, take: bool = False) -> None:
        items = len(values)
        if not items:
            return
        matrix = self.matrix(values, residual)
        rows, columns = matrix_shape(items)
        first, _ = factor_items(items, self.rank)
        both = payload.view(torch.float32)
        left, right = both[:first].view(rows, -1), both[first:].view(columns, -1)
        torch.mm(matrix, self.warm(items), out=left)
        orthogonalise(left)
        torch.mm(matrix.t(), left, out=right)
        self.keep(items, right)
        if residual is not None:
            self.subtract(left, right, residual)
        if take:
            self.decode(payload, values)

    def decode(self, payload: Tensor, into: Tensor) -> None:
        into.zero_()
        self.add(payload, into)

    def add(self, payload: Tensor, into: Tensor) -> None:
        items = len(into)
        if items:
            first, _ = factor_items(items, self.rank)
            rows, columns = matrix_shape(items)
            both = payload.view(torch.float32)
            into.add_(self.product(both[:first].view(rows, -1), both[first:].view(columns, -1), items))

    # --- the steps ----------------------------------------------------------------------------------------------------

    def matrix(self, values: Tensor, residual: Tensor | None) -> Tensor:
        """values + residual as a matrix with zeros at its end; the sum is also left in the residual."""
        rows, columns = matrix_shape(len(values))
        if self._matrix.numel() < rows * columns:
            self._matrix = torch.empty(rows * columns)
        flat = self._matrix[: rows * columns]
        flat[len(values) :] = 0.0
        inside = flat[: len(values)]
        if residual is None:
            inside.copy_(values)
        else:
            torch.add(values, residual, out=residual)
            inside.copy_(residual)
        return flat.view(rows, columns)

    def warm(self, items: int) -> Tensor:
        """Q of the last time; the first time the same random one on all ranks."""
        if items not in self._warm:
            _, columns = matrix_shape(items)
            width = factor_items(items, self.rank)[1] // columns
            start = torch.randn(columns, width, generator=torch.Generator().manual_seed(_START))
            self._warm[items] = orthogonalise(start)
        return self._warm[items]

    def keep(self, items: int, right: Tensor) -> None:
        """For the next time; not what is not finite, or nearly nothing."""
        if is_finite(right) and float(right.abs().max()) > 0:
            self._warm[items] = right.clone()

    def product(self, left: Tensor, right: Tensor, items: int) -> Tensor:
        """P Q^T as a flat tensor, in scratch memory."""
        rows, columns = len(left), len(right)
        if self._matrix.numel() < rows * columns:
            self._matrix = torch.empty(rows * columns)
        flat = self._matrix[: rows * columns]
        torch.mm(left, right.t(), out=flat.view(rows, columns))
        return flat[:items]

    def subtract(self, left: Tensor, right: Tensor, residual: Tensor) -> None:
        residual.sub_(self.product(left, right, len(residual)))
        if not is_finite(residual):
            torch.nan_to_num_(residual, 0.0, 0.0, 0.0)


def orthogonalise(columns: Tensor) -> Tensor:
    """In place, column by column (Gram-Schmidt, twice for accuracy); a column of zeros stays one."""
    scale = columns.abs().max()
    if scale > 0 and scale.isfinite():
        columns.div_(scale)
    for at in range(columns.shape[1]):
        column = columns[:, at]
        before = columns[:, :at]
        size = column.norm()
        for _ in range(2):
            if at:
                column.sub_(before @ (before.t() @ column))
        norm = column.norm()
        if norm > 1e-6 * size:  # else it was in the span of those before it: rounding noise is not a direction
            column.div_(norm)
        elif not norm.isnan():
            column.zero_()
    return columns
