"""Proves a schedule by running it on multisets of contributions instead of numbers.

At the start every place (rank, chunk) holds one contribution: that of its own rank. An addition adds the
sender's multiset, an overwrite replaces by it. At the end the places that the collective names must hold
exactly what it promises. Counts, not sets: a contribution that is added twice is a wrong sum, and is refused at
once, wherever it is: no collective needs one, not even in a place that does not count at the end.

Chunks never meet each other, so they are proved in blocks and memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from offbeat.errors import RequestError, ScheduleError, unknown
from offbeat.schedules.grid import Mark, grid
from offbeat.schedules.ir import Schedule, Table, Transfer

Counts = npt.NDArray[np.uint32]  # rank x chunk x contributor; no step has enough transfers to wrap around
_BLOCK_BYTES = 64 * 2**20

# For chunks `c` of a schedule: who must hold them at the end (rank x chunk), and what (chunk x contributor).
Promise = tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]


def _everybody(s: Schedule, c: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    return np.ones((len(c), s.ranks), bool)


def _only(s: Schedule, ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    return np.equal(ranks[:, None], np.arange(s.ranks))


def _owner(s: Schedule, c: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Items are dealt to ranks in equal runs, as chunks are cut from items."""
    return c * s.ranks // s.chunks


def _root(s: Schedule, c: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.full(len(c), s.root)


PROMISES: dict[str, Callable[[Schedule, npt.NDArray[np.int64]], Promise]] = {
    "all-reduce": lambda s, c: (_everybody(s, c).T, _everybody(s, c)),
    "reduce-scatter": lambda s, c: (_only(s, _owner(s, c)).T, _everybody(s, c)),
    "all-gather": lambda s, c: (_everybody(s, c).T, _only(s, _owner(s, c))),
    "broadcast": lambda s, c: (_everybody(s, c).T, _only(s, _root(s, c))),
    "reduce": lambda s, c: (_only(s, _root(s, c)).T, _everybody(s, c)),
    "all-to-all": lambda s, c: (_only(s, c % s.ranks).T, _only(s, c // s.ranks)),
}


def verify(schedule: Schedule) -> None:
    """Return if the schedule keeps its collective's promise; raise `ScheduleError` with the place if not."""
    if schedule.collective not in PROMISES:
        raise unknown("collective", schedule.collective, PROMISES)
    _check_chunks(schedule)
    _check_transfers(schedule)
    block = max(1, _BLOCK_BYTES // (4 * schedule.ranks**2))
    for first in range(0, schedule.chunks, block):
        chunks = range(first, min(schedule.chunks, first + block))
        counts = _start(schedule, chunks)
        for step, rows in _rows_by_step(schedule, chunks):
            _apply(schedule, step, rows, counts, chunks.start)
        _check_promise(schedule, chunks, counts)


def progress(schedule: Schedule) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]:
    """For drawing: at the start and after every step, what each place (rank x chunk) holds.

    First how many contributions, then what share of what the collective wants in that chunk; a place
    with anything in it that does not belong there has a share of 0.
    """
    _, due = PROMISES[schedule.collective](schedule, np.arange(schedule.chunks))
    counts = _start(schedule, range(schedule.chunks))
    for step in range(-1, len(schedule.steps)):
        if step >= 0:
            _apply(schedule, step, schedule.steps.rows(step), counts, 0)
        belongs = (counts <= due[None]).all(axis=2)
        held = counts.sum(axis=2, dtype=np.int64)
        yield held, np.where(belongs, held / due.sum(axis=1), 0.0)


def _check_chunks(schedule: Schedule) -> None:
    ranks, chunks = schedule.ranks, schedule.chunks
    wrong = ""
    if schedule.collective in ("reduce-scatter", "all-gather") and chunks % ranks:
        wrong = f"a multiple of {ranks}"
    if schedule.collective == "all-to-all" and chunks != ranks * ranks:
        wrong = f"{ranks * ranks}"
    if wrong:
        raise RequestError(
            f"schedule '{schedule.name}': {schedule.collective} on {ranks} ranks needs {wrong} chunks; it has {chunks}"
        )


def _check_transfers(schedule: Schedule) -> None:
    """What needs no run: nothing to itself, and no overwrite of a place that the same step writes too."""
    steps = schedule.steps
    table = steps.table
    number = np.repeat(np.arange(len(steps), dtype=np.int64), np.diff(steps.bounds))
    itself = np.flatnonzero(table[:, 0] == table[:, 1])
    if itself.size:
        row = int(itself[0])
        raise _wrong(schedule, int(number[row]), table[row], f"rank {table[row, 0]} sends to itself")
    place = (number * schedule.ranks + table[:, 1]) * schedule.chunks + table[:, 2]
    order = np.argsort(place, kind="stable")
    same = place[order][1:] == place[order][:-1]
    overwrites = table[order, 3] == 0
    collides = np.flatnonzero(same & (overwrites[1:] | overwrites[:-1]))
    if collides.size:
        one, other = sorted(order[collides[0] : collides[0] + 2].tolist())
        raise _wrong(
            schedule,
            int(number[one]),
            table[one],
            f"'{_transfer(table[one])}' and '{_transfer(table[other])}' write the same place in one step",
        )


def _start(schedule: Schedule, chunks: range) -> Counts:
    ranks = schedule.ranks
    counts: Counts = np.zeros((ranks, len(chunks), ranks), np.uint32)
    everyone = np.arange(ranks)
    counts[everyone, :, everyone] = 1
    return counts


def _rows_by_step(schedule: Schedule, chunks: range) -> Iterator[tuple[int, Table]]:
    """The transfers of these chunks, a step at a time; steps without any are left out."""
    steps = schedule.steps
    if len(chunks) == schedule.chunks:
        yield from ((step, steps.rows(step)) for step in range(len(steps)) if len(steps.rows(step)))
        return
    ours = np.flatnonzero((steps.table[:, 2] >= chunks.start) & (steps.table[:, 2] < chunks.stop))
    step_of = np.searchsorted(steps.bounds, ours, side="right") - 1
    starts = np.flatnonzero(np.diff(step_of, prepend=-1))
    for start, stop in zip(starts, [*starts[1:], len(ours)], strict=True):
        yield int(step_of[start]), steps.table[ours[start:stop]]


def _apply(schedule: Schedule, step: int, rows: Table, counts: Counts, first: int) -> None:
    source, target, chunk, reduce = rows.T
    at = chunk - first
    read = counts[source, at]  # a copy: all reads of a step come before its writes
    adds = reduce != 0
    counts[target[~adds], at[~adds]] = read[~adds]
    if not adds.any():
        return
    into, chunk_at = target[adds].astype(np.int64), at[adds]
    place = into * counts.shape[1] + chunk_at
    if len(np.unique(place)) == len(place):
        held = counts[into, chunk_at] + read[adds]
        counts[into, chunk_at] = held
    else:  # several additions to one place
        np.add.at(counts, (into, chunk_at), read[adds])
        held = counts[into, chunk_at]
    if held.max() > 1:
        row, contributor = np.argwhere(held > 1)[0]
        wrong = rows[adds][row]
        raise _wrong(schedule, step, wrong, f"'{_transfer(wrong)}' counts rank {contributor}'s contribution twice")


def _check_promise(schedule: Schedule, chunks: range, counts: Counts) -> None:
    holders, promised = PROMISES[schedule.collective](schedule, np.arange(chunks.start, chunks.stop))
    wrong = (counts != promised[None]).any(axis=2) & holders
    if not wrong.any():
        return
    rank, at = (int(i) for i in np.argwhere(wrong)[0])
    held, due = set(np.flatnonzero(counts[rank, at]).tolist()), set(np.flatnonzero(promised[at]).tolist())
    parts = []
    if due - held:
        parts.append(f"without rank{_some(due - held)}")
    if held - due:
        parts.append(f"with rank{_some(held - due)} that does not belong there")
    chunk = chunks.start + at
    raise _error(
        schedule,
        Mark(len(schedule.steps), rank, f"c{chunk}: rank{_some(held)}"),
        f"rank {rank} ends with chunk {chunk} {' and '.join(parts)}",
    )


def _some(ranks: set[int]) -> str:
    shown = sorted(ranks)[:6]
    more = f" and {len(ranks) - len(shown)} more" if len(ranks) > len(shown) else ""
    return f"{'s' if len(ranks) > 1 else ''} {', '.join(map(str, shown))}{more}"


def _transfer(row: Table) -> Transfer:
    source, target, chunk, reduce = row.tolist()
    return Transfer(source, target, chunk, bool(reduce))


def _wrong(schedule: Schedule, step: int, row: Table, what: str) -> ScheduleError:
    return _error(schedule, Mark(step, int(row[1])), f"step {step + 1}: {what}")


def _error(schedule: Schedule, mark: Mark, what: str) -> ScheduleError:
    return ScheduleError(
        f"schedule '{schedule.name}' is not a correct {schedule.collective}: {what}",
        step=mark.step,
        rank=mark.rank,
        grid=grid(schedule, mark=mark),
    )
