"""Proves a schedule by running it on multisets of contributions instead of numbers.

At the start every place (rank, chunk) holds one contribution: that of its own rank. An addition adds the
sender's multiset, an overwrite replaces by it. At the end the places that the collective names must hold
exactly what it promises. Counts, not sets: a contribution that is added twice is a wrong sum, and is refused at
once, wherever it is: no collective needs one, not even in a place that does not count at the end.

Chunks never meet each other, so each is proved by itself, and there are two ways. Where no value of a chunk is added
twice, every sum is a tree and its leaves are all different: their number is enough to know that all ranks are in it.
That takes a few integers a transfer (`_in_trees`). Where transfers are coded, it is also proved that all ranks end with
the same bits (`_check_bits`). The chunks that are left, because a value is legally used again or
because something is wrong, are counted out rank by rank, in blocks, so that memory stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from offbeat import codecs
from offbeat.codecs import PER_TRANSFER
from offbeat.errors import RequestError, ScheduleError, unknown
from offbeat.schedules.grid import Highlight, grid
from offbeat.schedules.ir import Schedule, Table, Transfer

Counts = npt.NDArray[np.uint32]  # rank x chunk x contributor; no step has enough transfers to wrap around
_BLOCK_BYTES = 64 * 2**20

# For chunks `c` of a schedule: who must hold them at the end (rank x chunk), and what (chunk x contributor).
Promise = tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]


def _ranks(schedule: Schedule, chunks: npt.NDArray[np.int64], who: str) -> npt.NDArray[np.bool_]:
    """Chunk x rank: all ranks, or the one that is meant of each chunk."""
    if who == "all":
        return np.ones((len(chunks), schedule.ranks), bool)
    one: dict[str, npt.NDArray[np.int64]] = {
        "owner": chunks * schedule.ranks // schedule.chunks,  # items are dealt in equal runs, as chunks are cut
        "root": np.full(len(chunks), schedule.root),
        "sender": chunks // schedule.ranks,
        "receiver": chunks % schedule.ranks,
    }
    return np.equal(one[who][:, None], np.arange(schedule.ranks))


# Of each collective: who must hold a chunk at the end, and whose contributions.
PROMISES = {
    "all-reduce": ("all", "all"),
    "reduce-scatter": ("owner", "all"),
    "all-gather": ("all", "owner"),
    "broadcast": ("all", "root"),
    "reduce": ("root", "all"),
    "gather": ("root", "owner"),
    "scatter": ("owner", "root"),
    "all-to-all": ("receiver", "sender"),
}
ROOTED = tuple(name for name, who in PROMISES.items() if "root" in who)


def _promise(schedule: Schedule, chunks: npt.NDArray[np.int64]) -> Promise:
    holders, contributors = PROMISES[schedule.collective]
    return _ranks(schedule, chunks, holders).T, _ranks(schedule, chunks, contributors)


def verify(schedule: Schedule) -> None:
    """Return if the schedule keeps its collective's promise; raise `ScheduleError` with the place if not."""
    if schedule.collective not in PROMISES:
        raise unknown("collective", schedule.collective, PROMISES)
    _check_chunks(schedule)
    _check_senders(schedule)
    left = np.flatnonzero(~_in_trees(schedule))
    _check_collisions(schedule, left)
    block = max(1, _BLOCK_BYTES // (4 * schedule.ranks**2))
    for first in range(0, len(left), block):
        chunks = left[first : first + block]
        counts = _start(schedule, len(chunks))
        for step, rows in _rows_by_step(schedule, chunks):
            _apply(schedule, step, rows, np.searchsorted(chunks, rows[:, 2]), counts)
        _check_promise(schedule, chunks, counts)
    if any(codecs.parse(line).kind == PER_TRANSFER for line in schedule.steps.codecs):
        _check_bits(schedule, left)


def progress(schedule: Schedule) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]]:
    """For drawing: at the start and after every step, what each place (rank x chunk) holds.

    First how many contributions, then what share of what the collective wants in that chunk; a place
    with anything in it that does not belong there has a share of 0.
    """
    _, due = _promise(schedule, np.arange(schedule.chunks))
    counts = _start(schedule, schedule.chunks)
    for step in range(-1, len(schedule.steps)):
        if step >= 0:
            rows = schedule.steps.rows(step)
            _apply(schedule, step, rows, rows[:, 2].astype(np.int64), counts)
        belongs = (counts <= due[None]).all(axis=2)
        held = counts.sum(axis=2, dtype=np.int64)
        yield held, np.where(belongs, held / due.sum(axis=1), 0.0)


def _check_chunks(schedule: Schedule) -> None:
    ranks, chunks = schedule.ranks, schedule.chunks
    wrong = ""
    if "owner" in PROMISES[schedule.collective] and chunks % ranks:
        wrong = f"a multiple of {ranks}"
    if schedule.collective == "all-to-all" and chunks != ranks * ranks:
        wrong = f"{ranks * ranks}"
    if wrong:
        raise RequestError(
            f"schedule '{schedule.name}': {schedule.collective} on {ranks} ranks needs {wrong} chunks; it has {chunks}"
        )


def _check_senders(schedule: Schedule) -> None:
    table = schedule.steps.table
    itself = np.flatnonzero(table[:, 0] == table[:, 1])
    if itself.size:
        row = table[itself[0]]
        raise _wrong(schedule, int(_steps_of(schedule, itself[:1])[0]), row, f"rank {row[0]} sends to itself")


# --- by trees ------------------------------------------------------------------------------------------------------


def _in_trees(schedule: Schedule) -> npt.NDArray[np.bool_]:
    """Of each chunk: whether it keeps its promise and every sum in it is a tree.

    Values are numbered: first each place's own, then the sums in the order in which they are made. While no value is
    added twice, each is a part of one sum at most. Then no sum has a contribution twice, and a sum with as many leaves
    as there are ranks has all of them.
    """
    ranks, chunks, steps = schedule.ranks, schedule.chunks, schedule.steps
    places = ranks * chunks
    held = np.arange(places, dtype=np.int32)  # the value in each place
    leaves = np.ones(places + np.count_nonzero(steps.table[:, 3]), np.int32)  # of each value
    uses = np.zeros(len(leaves), np.int32)
    writer = np.empty(places, np.int32)  # the last row of a step that writes this place
    shown = np.ones(chunks, bool)
    values = places
    once = np.int32(1)  # of the type of `uses`: numpy adds it 20 times as fast
    for step in range(len(steps)):
        source, target, chunk, reduce = steps.rows(step).T.astype(np.int64)
        into, read = target * chunks + chunk, held[source * chunks + chunk]  # all reads come before the writes
        row = np.arange(len(into), dtype=np.int32)
        writer[into] = row
        several = into[writer[into] != row]  # places that are written more than once
        adds = reduce != 0
        if not adds.all():
            over = into[~adds]
            held[over] = read[~adds]
            if several.size:
                shown[chunk[~adds][np.isin(over, several)]] = False
            into, read, chunk = into[adds], read[adds], chunk[adds]
        if not into.size:
            continue
        grown, first = leaves[read], np.arange(len(into))
        if several.size:
            order = np.argsort(into, kind="stable")
            into, read, chunk = into[order], read[order], chunk[order]
            first = np.flatnonzero(np.diff(into, prepend=-1))
            grown = np.add.reduceat(leaves[read], first)
        into = into[first]
        before = held[into]
        new = slice(values, values + len(into))
        leaves[new] = leaves[before] + grown
        held[into] = np.arange(new.start, new.stop, dtype=np.int32)
        values = new.stop
        np.add.at(uses, before, once)
        np.add.at(uses, read, once)
        shown[chunk[first][uses[before] > 1]] = False
        shown[chunk[uses[read] > 1]] = False
    return shown & _kept(schedule, held.reshape(ranks, chunks), leaves)


def _kept(schedule: Schedule, held: npt.NDArray[np.int32], leaves: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Of each chunk: whether its holders end with the sum of all ranks, or with the value of the one rank promised."""
    kept = np.empty(schedule.chunks, bool)
    block = max(1, _BLOCK_BYTES // (16 * schedule.ranks))
    for first in range(0, schedule.chunks, block):
        chunks = np.arange(first, min(schedule.chunks, first + block))
        holders, promised = _promise(schedule, chunks)
        due = promised.sum(axis=1)
        own = promised.argmax(axis=1) * schedule.chunks + chunks
        ends = held[:, chunks]
        right = np.where(due == schedule.ranks, leaves[ends] == schedule.ranks, (due == 1) & (ends == own))
        kept[chunks] = (right | ~holders).all(axis=0)
    return kept


# --- bits ----------------------------------------------------------------------------------------------------------


def _check_bits(schedule: Schedule, reused: npt.NDArray[np.int64]) -> None:
    """All ranks end with the same bits: of each chunk they hold one and the same decoded payload, or one sum.

    Values are numbered as by `_in_trees`. A coded copy of a value makes a new one, unless the value is a payload that
    was decoded from this codec: then the payload is passed on. Its sender takes the new value too, before anybody
    reads it in that step. A value that is added twice (a chunk in `reused`) would be rounded differently each time.
    """
    if schedule.collective not in ("all-reduce", "all-gather"):
        raise RequestError(f"schedule '{schedule.name}': only an all-reduce or an all-gather can be coded per transfer")
    steps, chunks = schedule.steps, schedule.chunks
    places = schedule.ranks * chunks
    held, payload = np.arange(places), np.zeros(places, np.int8)  # the value, and the codec that it was decoded from
    values = places
    for step in range(len(steps)):
        source, target, chunk, reduce = steps.rows(step).T.astype(np.int64)
        codec = steps.codec_rows(step)
        origin, into, copies = source * chunks + chunk, target * chunks + chunk, reduce == 0
        fresh = copies & (codec > 0) & (payload[origin] != codec)
        encoded, first = np.unique(origin[fresh], return_index=True)
        held[encoded] = values + np.arange(len(encoded))
        payload[encoded] = codec[fresh][first]
        values += len(encoded)
        read = held[origin]
        held[into[copies]], payload[into[copies]] = read[copies], codec[copies]
        sums = np.unique(into[~copies])
        held[sums] = values + np.arange(len(sums))
        payload[sums] = 0
        values += len(sums)
    ends = held.reshape(schedule.ranks, chunks)
    wrong = ends != ends[0]
    wrong[0, reused] = True
    if wrong.any():
        chunk_at, rank = (int(i) for i in np.argwhere(wrong.T)[0])
        what = (
            "is added twice" if chunk_at in reused else "is encoded more than once, or passed on before it is encoded"
        )
        raise _error(
            schedule,
            Highlight(len(steps), rank, f"c{chunk_at}: other bits"),
            f"chunk {chunk_at} {what}, so ranks would end with different bits",
        )


# --- by counting ---------------------------------------------------------------------------------------------------


def _rows_of(schedule: Schedule, chunks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The numbers of the rows of the table that move one of these chunks."""
    ours = np.zeros(schedule.chunks, bool)
    ours[chunks] = True
    return np.flatnonzero(ours[schedule.steps.table[:, 2]])


def _steps_of(schedule: Schedule, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.searchsorted(schedule.steps.bounds, rows, side="right") - 1


def _check_collisions(schedule: Schedule, chunks: npt.NDArray[np.int64]) -> None:
    """No overwrite of a place that the same step writes too."""
    rows = _rows_of(schedule, chunks)
    table, step = schedule.steps.table[rows], _steps_of(schedule, rows)
    place = (step * schedule.ranks + table[:, 1]) * schedule.chunks + table[:, 2]
    order = np.argsort(place, kind="stable")
    same = place[order][1:] == place[order][:-1]
    overwrites = table[order, 3] == 0
    collides = np.flatnonzero(same & (overwrites[1:] | overwrites[:-1]))
    if collides.size:
        first, *_ = pair = sorted(order[collides[0] : collides[0] + 2].tolist())
        what = " and ".join(f"'{Transfer(*table[one].tolist())}'" for one in pair)
        raise _wrong(
            schedule, int(step[first]), table[first], f"{what} write the same chunk of the same rank in one step"
        )


def _start(schedule: Schedule, chunks: int) -> Counts:
    ranks = schedule.ranks
    counts: Counts = np.zeros((ranks, chunks, ranks), np.uint32)
    everyone = np.arange(ranks)
    counts[everyone, :, everyone] = 1
    return counts


def _rows_by_step(schedule: Schedule, chunks: npt.NDArray[np.int64]) -> Iterator[tuple[int, Table]]:
    """The transfers of these chunks, a step at a time; steps without any are left out."""
    rows = _rows_of(schedule, chunks)
    step_of = _steps_of(schedule, rows)
    starts = np.flatnonzero(np.diff(step_of, prepend=-1))
    for start, stop in pairwise([*starts, len(rows)]):
        yield int(step_of[start]), schedule.steps.table[rows[start:stop]]


def _apply(schedule: Schedule, step: int, rows: Table, at: npt.NDArray[np.int64], counts: Counts) -> None:
    """One step; `at` says where in `counts` the chunk of each row is."""
    source, target, _, reduce = rows.T
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
        what = f"'{Transfer(*wrong.tolist())}' counts rank {contributor}'s contribution twice"
        raise _wrong(schedule, step, wrong, what)


def _check_promise(schedule: Schedule, chunks: npt.NDArray[np.int64], counts: Counts) -> None:
    holders, promised = _promise(schedule, chunks)
    wrong = (counts != promised[None]).any(axis=2) & holders
    if not wrong.any():
        return
    rank, at = (int(i) for i in np.argwhere(wrong)[0])
    held, due = set(np.flatnonzero(counts[rank, at]).tolist()), set(np.flatnonzero(promised[at]).tolist())
    parts = []
    if due - held:
        parts.append(f"without the data of rank{_some(due - held)}")
    if held - due:
        parts.append(f"with data of rank{_some(held - due)} that does not belong there")
    chunk = int(chunks[at])
    raise _error(
        schedule,
        Highlight(len(schedule.steps), rank, f"c{chunk}: rank{_some(held)}"),
        f"rank {rank} ends with chunk {chunk} {' and '.join(parts)}",
    )


def _some(ranks: set[int]) -> str:
    shown = sorted(ranks)[:6]
    more = f" and {len(ranks) - len(shown)} more" if len(ranks) > len(shown) else ""
    return f"{'s' if len(ranks) > 1 else ''} {', '.join(map(str, shown))}{more}"


def _wrong(schedule: Schedule, step: int, row: Table, what: str) -> ScheduleError:
    return _error(schedule, Highlight(step, int(row[1])), f"step {step + 1}: {what}")


def _error(schedule: Schedule, mark: Highlight, what: str) -> ScheduleError:
    return ScheduleError(
        f"schedule '{schedule.name}' is not a correct {schedule.collective}: {what}",
        step=mark.step,
        rank=mark.rank,
        grid=grid(schedule, mark=mark),
    )
