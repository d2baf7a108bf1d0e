"""Row-sparse gradients: which rows of an embedding are pushed, in a slot and as they travel.

A slot has each row at its place in the flat vector, and beside it a list: how many rows there are, then their numbers.
What is at other places of that parameter counts as zero, whatever is there. A payload, as it is sent to another host,
is the same without the gaps:

    8 bytes: how many rows n     4 bytes for each number, filled up to 8     the values of the n rows

Laws. Nothing in a list or a payload sizes more than the parameter has, or points outside of it: `read` and `decode`
take a list only if it is strictly increasing and within the parameter, from a copy that its writer cannot change.
Else they raise `RowsError`. decode(encode(rows)) == rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.errors import OffbeatError
from offbeat.server.parameter_layout import RowTable

_COUNT_BYTES = 8
_NUMBER_BYTES = 4


class RowsError(OffbeatError):
    """A list of rows that is none of this parameter."""


class Rows(NamedTuple):
    """Some rows of a parameter."""

    table: RowTable
    numbers: Tensor  # int64, strictly increasing
    values: Tensor  # one row for each


def list_bytes(table: RowTable) -> int:
    """Of the list beside a slot."""
    return _NUMBER_BYTES * (1 + table.rows)


def payload_bytes(table: RowTable, count: int, item_bytes: int) -> int:
    """Of so many rows as they travel."""
    return _COUNT_BYTES + _numbers_bytes(count) + count * table.width * item_bytes


def saved_bytes(table: RowTable, count: int, item_bytes: int) -> int:
    """By pushing so many rows instead of all of the parameter; below 0 for nearly all."""
    return table.rows * table.width * item_bytes - payload_bytes(table, count, item_bytes)


def _numbers_bytes(count: int) -> int:
    return -(-count * _NUMBER_BYTES // 8) * 8


def none_of(table: RowTable, dtype: torch.dtype) -> Rows:
    """No rows."""
    return Rows(table, torch.empty(0, dtype=torch.int64), torch.empty(0, table.width, dtype=dtype))


def dense_of(gradient: Tensor) -> Tensor:
    """With the values that `rows_of` has: rows that are named several times are added up in the same order."""
    if gradient.layout is torch.strided:
        return gradient
    return (gradient.coalesce() if gradient.layout is torch.sparse_coo else gradient).to_dense()


@torch.no_grad()
def rows_of(gradient: Tensor, table: RowTable) -> Rows:
    """The rows that a gradient has: of a sparse one those named in it, each once; else those that are not zero."""
    if gradient.layout is torch.sparse_coo and gradient.sparse_dim() == 1:
        gradient = gradient.detach().coalesce()  # sorts, and adds up rows that are named several times
        return Rows(table, gradient.indices()[0].cpu(), gradient.values().reshape(-1, table.width).cpu())
    dense = dense_of(gradient.detach()).reshape(table.rows, table.width)
    numbers = (dense != 0).any(1).nonzero()[:, 0]
    return Rows(table, numbers.cpu(), dense[numbers].cpu())


def count_rows(gradient: Tensor, table: RowTable) -> int:
    """How many rows a gradient has."""
    return len(rows_of(gradient, table).numbers)


def matrix(vector: Tensor, table: RowTable) -> Tensor:
    """The parameter in a flat vector, as rows."""
    return vector[table.start : table.end].view(table.rows, table.width)


def union(lists: Sequence[Tensor]) -> Tensor:
    """The rows that any of these lists has."""
    if len(lists) == 1:
        return lists[0]
    found: Tensor = torch.cat([torch.empty(0, dtype=torch.int64), *lists]).unique()  # type: ignore[no-untyped-call] # torch's own
    return found


def places_of(numbers: Tensor, table: RowTable, start: int, end: int) -> Tensor:
    """Where the items of these rows are in the flat vector, as far as they are from `start` to `end`."""
    first, last = (start - table.start) // table.width, -(-(end - table.start) // table.width)
    within = numbers[(numbers >= first) & (numbers < last)]
    places = (within * table.width + table.start)[:, None] + torch.arange(table.width)
    flat = places.view(-1)
    whole = start <= table.start + first * table.width and table.start + last * table.width <= end
    return flat if whole else flat[(flat >= start) & (flat < end)]


def write(pushed: Rows, vector: Tensor, listed: Tensor) -> Tensor:
    """Into a slot and its list; the values as they are there."""
    count = len(pushed.numbers)
    values = pushed.values.to(vector.dtype)
    matrix(vector, pushed.table).index_copy_(0, pushed.numbers, values)
    listed[1 : 1 + count] = pushed.numbers
    listed[0] = count
    return values


def read(listed: Tensor, table: RowTable) -> Tensor:
    """The numbers of a slot's list, checked."""
    return _checked(int(listed[0]), listed[1:], table)


def _checked(count: int, numbers: Tensor, table: RowTable) -> Tensor:
    if not 0 <= count <= table.rows:
        raise RowsError(f"parameter {table.parameter} has {table.rows} rows; a push names {count}")
    own = numbers[:count].to(torch.int64, copy=True)
    if count and (int(own[0]) < 0 or int(own[-1]) >= table.rows or not bool((own[1:] > own[:-1]).all())):
        raise RowsError(
            f"the rows that a push names of parameter {table.parameter} are not increasing from 0 to {table.rows - 1}"
        )
    return own


def room(table: RowTable, item_bytes: int) -> Tensor:
    """Memory for any payload of this parameter. What is not used of it takes no room."""
    return torch.zeros(payload_bytes(table, table.rows, item_bytes), dtype=torch.uint8)


def encode(pushed: Rows, payload: Tensor, dtype: torch.dtype) -> int:
    """As it travels, with values of this type; how many bytes that are."""
    count, start = len(pushed.numbers), _COUNT_BYTES
    payload[:start].view(torch.int64)[0] = count
    payload[start : start + count * _NUMBER_BYTES].view(torch.int32).copy_(pushed.numbers)
    start += _numbers_bytes(count)
    end = start + count * pushed.table.width * dtype.itemsize
    payload[start:end].view(dtype).copy_(pushed.values.reshape(-1))
    return end


def decode(payload: Tensor, table: RowTable, dtype: torch.dtype) -> Rows:
    """What `encode` made, checked."""
    count, start = int(payload[:_COUNT_BYTES].view(torch.int64)), _COUNT_BYTES
    if not 0 <= count <= table.rows:
        raise RowsError(f"parameter {table.parameter} has {table.rows} rows; a push names {count}")
    own = _checked(count, payload[start : start + count * _NUMBER_BYTES].view(torch.int32), table)
    start += _numbers_bytes(count)
    end = start + count * table.width * dtype.itemsize
    return Rows(table, own, payload[start:end].view(dtype).view(count, table.width))
