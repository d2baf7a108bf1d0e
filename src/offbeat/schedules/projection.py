"""What one rank does of a schedule, when the target of a transfer reads the source's memory.

    Wait(2, 3)             until rank 2 has come to mark 3 of this run
    Read(2, 5, True)       read chunk 5 of rank 2 and reduce it into my own
    Read(2, 5, False)      ... and overwrite my own with it
    Read(2, 5, True, 0)    read it into scratch 0: somebody still reads my own in this step
    Put(0, 5, True)        reduce scratch 0 into my chunk 5 (False: overwrite)
    Mark(3)                I have come to mark 3

A rank tells the others how far it is by one number that only grows. Mark 0 of a run: my chunks may be read. Mark
2s+1: my reads of step s are done. Mark 2s+2: so are its writes. Nothing else is exchanged, so all that keeps
readers and writers apart is in the waits:

- before a chunk is read, its owner has made all writes of earlier steps to it;
- before a chunk is written, everybody who reads it in this step or an earlier one has read it. Where that is
  this step, the new value waits in scratch until mark 2s+1 of the readers. All marks 2s+1 depend on earlier
  steps only, so nobody waits in a circle;
- the last waits are for those who read from me: when they are over, my memory is mine again.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.schedules.ir import Schedule


class Wait(NamedTuple):
    peer: int
    mark: int


class Read(NamedTuple):
    """Read the peer's chunk into my own, or into scratch, where `scratch` says which."""

    peer: int
    chunk: int
    reduce: bool
    scratch: int | None = None


class Put(NamedTuple):
    scratch: int
    chunk: int
    reduce: bool


class Mark(NamedTuple):
    mark: int


Instruction = Wait | Read | Put | Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One rank's part of a schedule.

    `exposed` are the chunks that others read from this rank, `written` those that it writes. `marks` is how far
    apart the marks of two runs are, the same on all ranks.
    """

    rank: int
    instructions: tuple[Instruction, ...]
    exposed: tuple[int, ...]
    written: tuple[int, ...]
    marks: int


def project(schedule: Schedule, rank: int) -> Program:
    """The part of one rank."""
    steps = [schedule.steps.rows(step).tolist() for step in range(len(schedule.steps))]
    readers: dict[int, list[tuple[int, int]]] = defaultdict(list)  # of my chunk: (step, who)
    for step, rows in enumerate(steps):
        for source, target, chunk, _ in rows:
            if source == rank:
                readers[chunk].append((step, target))
    written: dict[tuple[int, int], int] = {}  # (rank, chunk) -> the last step so far that wrote it
    seen: dict[int, int] = defaultdict(int)  # peer -> the mark that has been waited for
    program: list[Instruction] = []

    def wait(peer: int, mark: int) -> None:
        if seen[peer] < mark:
            seen[peer] = mark
            program.append(Wait(peer, mark))

    def wait_for_readers(chunk: int, until: int) -> None:
        for step, reader in readers.get(chunk, ()):
            if step <= until:
                wait(reader, 2 * step + 1)

    for step, rows in enumerate(steps):
        mine = [(source, chunk, bool(reduce)) for source, target, chunk, reduce in rows if target == rank]
        busy = {chunk for source, _, chunk, _ in rows if source == rank}
        held: list[Put] = []
        for source, chunk, reduce in mine:
            if (source, chunk) in written:
                wait(source, 2 * written[source, chunk] + 2)
            if chunk in busy:
                program.append(Read(source, chunk, reduce, len(held)))
                held.append(Put(len(held), chunk, reduce))
            else:
                wait_for_readers(chunk, step)
                program.append(Read(source, chunk, reduce))
        if held:
            program.append(Mark(2 * step + 1))
            for put in held:
                wait_for_readers(put.chunk, step)
                program.append(put)
        if mine:
            program.append(Mark(2 * step + 2))
        written.update({(target, chunk): step for _, target, chunk, _ in rows})
    for chunk in sorted(readers):
        wait_for_readers(chunk, len(steps))
    return Program(
        rank=rank,
        instructions=tuple(program),
        exposed=tuple(sorted(readers)),
        written=tuple(sorted(chunk for target, chunk in written if target == rank)),
        marks=2 * len(steps) + 1,
    )
