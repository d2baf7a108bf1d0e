"""Schedules whose transfers carry a codec, and what a coded chunk weighs.

A *per-transfer* codec is put on the transfers of any all-reduce. With `@across` it is put on those between groups of
ranks, and on those that bring a payload to where it crosses: a sum is encoded once, and everybody decodes the same.

A *per-tensor* codec has a schedule of its own. Either it is an all-gather in which chunk r is the payload of rank r (so
is every codec where ranks send whole vectors to each other). Or
the payload is one or more vectors that can be added up: then it is their all-reduces, one after the other, each on
chunks of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from offbeat import codecs
from offbeat.codecs import PER_TENSOR, Codec
from offbeat.codecs.table import ITEM_BYTES
from offbeat.schedules.ir import Schedule, Steps, chunk_sizes

LEAST_BYTES = 64 * 1024  # a vector that is not larger is sent as it is: latency decides there


def is_coded(schedule: Schedule, size_bytes: int) -> bool:
    """Whether a vector of so many bytes is coded on a schedule."""
    return bool(schedule.steps.codecs) and size_bytes > LEAST_BYTES


def with_codec(schedule: Schedule, name: str, codec: Codec, groups: Sequence[int] | None = None) -> Schedule:
    """The same schedule with a codec on every transfer, or for ranks of different groups."""
    steps = schedule.steps
    coded = np.ones(len(steps.table), np.int8)
    if groups is not None:
        coded = _across(schedule, np.asarray(groups)).astype(np.int8)
    lines = (str(codec),) if coded.any() else ()
    return Schedule(
        name, schedule.collective, schedule.ranks, schedule.chunks,
        steps.with_codec(coded, lines) if lines else steps, schedule.root,
    )  # fmt: skip


def _across(schedule: Schedule, groups: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Of each transfer: whether it crosses groups, or brings or leaves behind a value that is coded later.

    From the last step to the first: `carried` are the places whose value somebody passes on as a payload later.
    """
    steps, chunks = schedule.steps, schedule.chunks
    coded = np.zeros(len(steps.table), bool)
    carried = np.zeros(schedule.ranks * chunks, bool)
    for step in reversed(range(len(steps))):
        source, target, chunk, reduce = steps.rows(step).T.astype(np.int64)
        origin, into, copies = source * chunks + chunk, target * chunks + chunk, reduce == 0
        here = (groups[source] != groups[target]) | (copies & (carried[origin] | carried[into]))
        coded[steps.bounds[step] : steps.bounds[step + 1]] = here
        carried[into] = False
        carried[origin[here & copies]] = True
    return coded


def one_after_the_other(schedule: Schedule, times: int) -> Schedule:
    """The same all-reduce several times, on chunks of its own each time."""
    tables = []
    for number in range(times):
        for step in range(len(schedule.steps)):
            table = schedule.steps.rows(step).copy()
            table[:, 2] += number * schedule.chunks
            tables.append(table)
    return Schedule(schedule.name, schedule.collective, schedule.ranks, times * schedule.chunks, Steps(tables))


def coded_bytes(schedule: Schedule, number: int, items: int) -> npt.NDArray[np.int64]:
    """The size of each chunk as codec `number` (from 1) of a schedule sends it; the vector has so many items."""
    codec = codecs.parse(schedule.steps.codecs[number - 1])
    return _coded_bytes(codec, schedule.collective, schedule.chunks, items)


@cache
def _coded_bytes(codec: Codec, collective: str, chunks: int, items: int) -> npt.NDArray[np.int64]:
    if collective == "all-gather":
        return np.full(chunks, codec.size_bytes(items), np.int64)
    if codec.kind != PER_TENSOR:
        sizes = chunk_sizes(items, chunks)
        of_size = {size: codec.size_bytes(size) for size in set(sizes)}
        return np.array([of_size[size] for size in sizes], np.int64)
    vectors = codec.vectors(items)
    assert vectors is not None, "what cannot be added up is gathered"
    each = chunks // len(vectors)
    return ITEM_BYTES * np.array([size for length in vectors for size in chunk_sizes(length, each)], np.int64)


def carried_bytes(schedule: Schedule, size_bytes: int, item_bytes: int) -> list[npt.NDArray[np.int64]]:
    """Of each way to send a chunk, as they are first and then by each codec: the bytes of each chunk."""
    if not is_coded(schedule, size_bytes):
        per_tensor = schedule.steps.codecs and codecs.parse(schedule.steps.codecs[0]).kind == PER_TENSOR
        if per_tensor or (schedule.collective == "all-gather" and schedule.steps.codecs):
            return _uncoded_tensor(schedule, size_bytes)
        plain = np.array(chunk_sizes(size_bytes // item_bytes, schedule.chunks), np.int64) * item_bytes
        return [plain] * (1 + len(schedule.steps.codecs))
    items = -(-size_bytes // ITEM_BYTES)
    plain = np.array(chunk_sizes(items, schedule.chunks), np.int64) * ITEM_BYTES
    return [plain, *(coded_bytes(schedule, 1 + at, items) for at in range(len(schedule.steps.codecs)))]


def _uncoded_tensor(schedule: Schedule, size_bytes: int) -> list[npt.NDArray[np.int64]]:
    """A small tensor on the schedule of a per-tensor codec: gathered whole, or reduced in the first round alone."""
    codec = codecs.parse(schedule.steps.codecs[0])
    vectors = codec.vectors(1)
    lengths = np.full(schedule.chunks, size_bytes, np.int64)
    if vectors is not None and schedule.collective != "all-gather":
        first = schedule.chunks // len(vectors)
        lengths = np.array([*chunk_sizes(size_bytes, first), *[0] * (schedule.chunks - first)], np.int64)
    return [lengths, lengths]


def vector_bounds(codec: Codec, items: int) -> tuple[int, ...]:
    """Where each vector of a payload that can be added up ends, in numbers."""
    return tuple(accumulate(codec.vectors(items) or ()))
