"""A collective as data: `Transfer`, `Schedule`, and their text form.

    0>1 c3 +        rank 0 sends its chunk 3 to rank 1, who adds it to its own
    0>1 c3 =        ... who overwrites its own with it
    0>1 c3 + int8   ... it is sent by the codec int8: encoded by rank 0, decoded by rank 1 and added

Laws. All reads of a step happen before its writes. Several additions to one place in one step are
allowed and are made in the order in which they are listed. Chunk c of L items is items
[c*L//C, (c+1)*L//C). All transfers of one step between one pair of ranks are one message. A chunk that overwrites
is encoded once: its owner takes the decoded value too, and whoever passes it on passes on the same payload.
`Schedule.parse(schedule.text()) == schedule`.

A schedule on 1,024 ranks has two million transfers, so they are kept as one table of integers, a row a
transfer; `steps` shows them as tuples of `Transfer`, made when looked at. Whoever computes over all of
them (`verify`, `cost`) reads the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import index
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from offbeat import codecs
from offbeat.errors import RequestError

Table = npt.NDArray[np.int32]  # one row a transfer: source, target, chunk, reduce


_MOST = 2**31 - 1


def chunk_sizes(items: int, chunks: int) -> tuple[int, ...]:
    """How many items each chunk of a vector has; they differ by one at most."""
    return tuple((c + 1) * items // chunks - c * items // chunks for c in range(chunks))


class Transfer(NamedTuple):
    """One chunk on its way from one rank to another."""

    source: int
    target: int
    chunk: int
    reduce: bool
    codec: str = ""  # the line of a codec; none for numbers as they are

    def __str__(self) -> str:
        coded = f" {self.codec}" if self.codec else ""
        return f"{self.source}>{self.target} c{self.chunk} {'+' if self.reduce else '='}{coded}"

    @classmethod
    def parse(cls, text: str) -> Transfer:
        match = re.fullmatch(r"\s*(\d+)>(\d+)\s+c(\d+)\s+([+=])(?:\s+(\S+))?\s*", text, re.ASCII)
        if match is None:
            raise RequestError(
                "expected a transfer like '0>1 c3 +' (rank 0 sends chunk 3 to rank 1, which adds it to "
                f"its own) or '0>1 c3 =' (which overwrites its own); got '{text.strip()}'"
            )
        source, target, chunk, sign, codec = match.groups()
        return cls(int(source), int(target), int(chunk), sign == "+", str(codecs.parse(codec)) if codec else "")


class Steps(Sequence[tuple[Transfer, ...]]):
    """The steps of a schedule, over a table of transfers; step i is rows bounds[i] to bounds[i+1].

    `codec[row]` is 0 for a transfer of numbers as they are, and else a number of `codecs`, counted from 1.
    """

    __slots__ = ("bounds", "codec", "codecs", "table")

    def __init__(
        self, tables: Iterable[Table], codec: npt.NDArray[np.int8] | None = None, codecs: Sequence[str] = ()
    ) -> None:
        parts = list(tables)
        self.table: Table = np.concatenate([np.empty((0, 4), np.int32), *parts])
        self.bounds = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
        self.table.flags.writeable = False
        self.bounds.flags.writeable = False
        self.codecs = tuple(codecs)
        self.codec = np.zeros(len(self.table) if codecs else 0, np.int8) if codec is None else codec
        self.codec.flags.writeable = False

    @classmethod
    def of(cls, steps: Iterable[Iterable[Transfer]]) -> Steps:
        """From transfers written out one by one."""
        tables, used, codec = [], dict[str, int](), list[int]()
        for step in steps:
            transfers = [Transfer(*transfer) for transfer in step]
            rows = [transfer[:4] for transfer in transfers]
            if any(abs(number) > _MOST for row in rows for number in row):
                raise RequestError(f"ranks and chunks are numbers up to {_MOST}")
            tables.append(np.array(rows, np.int32).reshape(-1, 4))
            codec += [used.setdefault(one.codec, len(used) + 1) if one.codec else 0 for one in transfers]
        return cls(tables, np.array(codec, np.int8) if used else None, tuple(used))

    def with_codec(self, codec: npt.NDArray[np.int8], codecs: Sequence[str]) -> Steps:
        """The same transfers, coded so."""
        return Steps((self.rows(step) for step in range(len(self))), codec, codecs)

    def codec_rows(self, step: int) -> npt.NDArray[np.int8]:
        """The numbers of the codecs of one step; none where nothing is coded."""
        return self.codec[self.bounds[step] : self.bounds[step + 1]]

    def rows(self, step: int) -> Table:
        """The table of one step."""
        return self.table[self.bounds[step] : self.bounds[step + 1]]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @overload
    def __getitem__(self, which: int) -> tuple[Transfer, ...]: ...
    @overload
    def __getitem__(self, which: slice) -> Sequence[tuple[Transfer, ...]]: ...
    def __getitem__(self, which: int | slice) -> tuple[Transfer, ...] | Sequence[tuple[Transfer, ...]]:
        if isinstance(which, slice):
            return [self[i] for i in range(*which.indices(len(self)))]
        if not -len(self) <= which < len(self):
            raise IndexError(f"step {which} of {len(self)}")
        step = which % len(self)
        rows = self.rows(step).tolist()
        coded = self.codec_rows(step).tolist() or [0] * len(rows)
        lines = ("", *self.codecs)
        return tuple(
            Transfer(source, target, chunk, bool(reduce), lines[codec])
            for (source, target, chunk, reduce), codec in zip(rows, coded, strict=True)
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Steps):
            return NotImplemented
        same = np.array_equal(self.bounds, other.bounds) and np.array_equal(self.table, other.table)
        return same and self.codecs == other.codecs and np.array_equal(self.codec, other.codec)

    def __hash__(self) -> int:
        return hash((self.bounds.tobytes(), self.table.tobytes(), self.codecs, self.codec.tobytes()))


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Schedule:
    """A collective on `ranks` ranks over a vector cut into `chunks` chunks.

    `root` is the rank that a broadcast starts from or a reduce ends at; elsewhere it is 0 and unused.
    Ranks and chunks that do not exist are refused at birth; whether the schedule does what its
    collective promises is `verify`'s to say.
    """

    name: str
    collective: str
    ranks: int
    chunks: int
    steps: Steps
    root: int

    def __init__(
        self,
        name: str,
        collective: str,
        ranks: int,
        chunks: int,
        steps: Steps | Iterable[Iterable[Transfer]],
        root: int = 0,
    ) -> None:
        ranks, chunks, root = (index(number) for number in (ranks, chunks, root))  # 3.0 is not a number of ranks
        if not re.fullmatch(r"\S+", name) or not re.fullmatch(r"\S+", collective):
            raise RequestError(f"a schedule's name and collective are one word each; got '{name}' and '{collective}'")
        if ranks < 1 or chunks < 1:
            raise RequestError(f"schedule '{name}' needs at least 1 rank and 1 chunk; got {ranks} and {chunks}")
        if not 0 <= root < ranks:
            raise RequestError(f"schedule '{name}': root {root} is not one of the ranks 0..{ranks - 1}")
        held = steps if isinstance(steps, Steps) else Steps.of(steps)
        for column, limit, what in ((0, ranks, "rank"), (1, ranks, "rank"), (2, chunks, "chunk")):
            values = held.table[:, column]
            if len(values) and not 0 <= values.min() <= values.max() < limit:
                wrong = np.flatnonzero((values < 0) | (values >= limit))
                step = int(np.searchsorted(held.bounds, wrong[0], side="right"))
                transfer = Transfer(*held.table[wrong[0]].tolist())
                raise RequestError(f"schedule '{name}': step {step} has '{transfer}', but {what}s are 0..{limit - 1}")
        fields = {"name": name, "collective": collective, "ranks": ranks, "chunks": chunks, "steps": held, "root": root}
        for field, value in fields.items():
            object.__setattr__(self, field, value)

    def __repr__(self) -> str:
        return (
            f"<Schedule {self.name} {self.collective}: {self.ranks} ranks, {self.chunks} chunks, "
            f"{len(self.steps)} steps, {len(self.steps.table)} transfers>"
        )

    def text(self) -> str:
        """A header and one line a step."""
        root = f" root={self.root}" if self.root else ""
        lines = [f"schedule {self.name} {self.collective} ranks={self.ranks} chunks={self.chunks}{root}"]
        lines += [" | ".join(map(str, step)) or "-" for step in self.steps]
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Schedule:
        header, *lines = text.strip().splitlines() or [""]
        match = re.fullmatch(r"schedule (\S+) (\S+) ranks=(\d+) chunks=(\d+)(?: root=(\d+))?\s*", header, re.ASCII)
        if match is None:
            raise RequestError(
                f"a schedule starts with a line like 'schedule ring all-reduce ranks=4 chunks=4'; got '{header}'"
            )
        name, collective, ranks, chunks, root = match.groups()
        steps = [[] if line.strip() == "-" else [Transfer.parse(t) for t in line.split("|")] for line in lines]
        return cls(name, collective, int(ranks), int(chunks), steps, int(root or 0))


_OWNED = ("reduce-scatter", "all-gather", "gather", "scatter")  # each chunk is one rank's


def _renumbered_chunks(schedule: Schedule, order: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The new number of each chunk."""
    chunks = np.arange(schedule.chunks, dtype=np.int32)
    if schedule.collective == "all-to-all":
        return order[chunks // schedule.ranks] * schedule.ranks + order[chunks % schedule.ranks]
    if schedule.collective in _OWNED:
        each = schedule.chunks // schedule.ranks
        return order[chunks // each] * each + chunks % each
    return chunks


def renumbered(schedule: Schedule, order: Sequence[int]) -> Schedule:
    """The same schedule, with rank order[r] in the place of rank r; a chunk that is a rank's own is its successor's."""
    if sorted(order) != list(range(schedule.ranks)):
        raise RequestError(f"an order names each of the ranks 0..{schedule.ranks - 1} once")
    table = schedule.steps.table.copy()
    new = np.asarray(order, np.int32)
    table[:, :2] = new[table[:, :2]]
    table[:, 2] = _renumbered_chunks(schedule, new)[table[:, 2]]
    old = schedule.steps
    steps = Steps((table[start:end] for start, end in pairwise(old.bounds.tolist())), old.codec, old.codecs)
    return Schedule(
        schedule.name, schedule.collective, schedule.ranks, schedule.chunks, steps, int(order[schedule.root])
    )
