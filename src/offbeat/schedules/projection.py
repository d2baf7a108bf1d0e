"""What one rank does of a schedule.

Inside a host the target of a transfer reads the source's memory:

    Wait(2, 3)             until rank 2 has come to mark 3 of this run
    Read(2, 5, True)       read chunk 5 of rank 2 and reduce it into my own
    Read(2, 5, False)      ... and overwrite my own with it
    Read(2, 5, True, 0)    read it into scratch 0: somebody still reads my own in this step
    Put(0, 5, True)        reduce scratch 0 into my chunk 5 (False: overwrite)
    Mark(3)                I have come to mark 3

Across hosts the source sends, and the target receives, in the same order:

    Send(2, 5)             my chunk 5, as it is now, goes to rank 2; its memory is read from now on
    Receive(2, 5, True)    the next chunk that rank 2 sent me, which is its chunk 5, reduced into my own (or False, or
                           into scratch, as with Read)
    Sent(2, 4)             until my first 4 chunks to rank 2 have left this memory

Where transfers are coded, payloads go in the place of chunks:

    Encode(5, False)       encode my chunk 5, and keep what is not sent (True: and take what others will decode)
    Read(2, 5, True, None, True)   decode rank 2's payload of chunk 5 and add it to mine; likewise Put, Send, Receive
    Read(2, 5, False, None, True)  take over rank 2's payload of chunk 5, and decode it

A chunk is encoded as soon as it has its last value before it is sent. The payload belongs to the chunk: who may read
it, and when it may be written, is the same for both. What others of this host read before anything was written here is
encoded before mark 0 (`Program.first`).

A rank tells the others how far it is by one number that only grows. Mark 0 of a run: my chunks may be read. Mark
2s+1: my reads of step s are done. Mark 2s+2: so are its writes. Nothing else is exchanged, so all that keeps
readers and writers apart is in the waits:

- before a chunk is read, its owner has made all writes of earlier steps to it;
- before a chunk is written, everybody who reads it in this step or an earlier one has read it. Where that is
  this step, the new value waits in scratch until mark 2s+1 of the readers. All marks 2s+1 depend on earlier
  steps only, so nobody waits in a circle;
- the last waits are for those who read from me: when they are over, my memory is mine again.

What is sent is a reader of my memory like any other. The sends of a step are its first instructions, and what it
receives into a chunk that is sent in this step waits in scratch, so here, too, nobody waits in a circle. Then each send
is moved forward, to where its chunk was last written: a chunk goes on as soon as it has come, while the others of its
step are still under way. The order of the sends stays.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
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
    coded: bool = False


class Put(NamedTuple):
    scratch: int
    chunk: int
    reduce: bool
    coded: bool = False


class Mark(NamedTuple):
    mark: int


class Send(NamedTuple):
    peer: int
    chunk: int
    coded: bool = False


class Receive(NamedTuple):
    """As `Read`, from another host."""

    peer: int
    chunk: int
    reduce: bool
    scratch: int | None = None
    coded: bool = False


class Encode(NamedTuple):
    chunk: int
    take: bool


class Sent(NamedTuple):
    peer: int
    sends: int


Instruction = Wait | Read | Put | Mark | Send | Receive | Sent | Encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One rank's part of a schedule.

    `exposed` are the chunks that others of its host read from this rank as they are, `written` those that it writes.
    `marks` is how far apart the marks of two runs are, the same on all ranks. `first` are the chunks that it encodes
    before anything else, and `coded` says whether it encodes or decodes anything.
    """

    rank: int
    instructions: tuple[Instruction, ...]
    exposed: tuple[int, ...]
    written: tuple[int, ...]
    marks: int
    first: tuple[Encode, ...] = ()
    coded: bool = False


def project(schedule: Schedule, rank: int, hosts: Sequence[int] | None = None) -> Program:
    """The part of one rank. `hosts[r]` is the host of rank r; without it all are on one."""
    on = hosts or [0] * schedule.ranks
    coding = bool(schedule.steps.codecs)
    steps = rows_of(schedule)
    readers: dict[int, list[tuple[int, int]]] = defaultdict(list)  # of my chunk: (step, who), on my host
    plain: set[int] = set()  # chunks of mine that are read as they are
    for step, rows in enumerate(steps):
        for source, target, chunk, _, codec in rows:
            if source == rank and on[target] == on[rank]:
                readers[chunk].append((step, target))
                if not codec:
                    plain.add(chunk)
    encodes = encodes_of(steps, rank) if coding else {}
    first = tuple(encode for (step, chunk), encode in encodes.items() if step < 0 and chunk in readers)
    written: dict[tuple[int, int], int] = {}  # (rank, chunk) -> the last step so far that wrote it
    seen: dict[int, int] = defaultdict(int)  # peer -> the mark that has been waited for
    sends: dict[int, int] = defaultdict(int)  # peer -> how many so far
    last_send: dict[int, dict[int, int]] = defaultdict(dict)  # of my chunk: peer -> which of the sends to it
    gone: dict[int, int] = defaultdict(int)  # peer -> the sends that have been waited for
    program: list[Instruction] = []

    def wait(peer: int, mark: int) -> None:
        if seen[peer] < mark:
            seen[peer] = mark
            program.append(Wait(peer, mark))

    def wait_for_readers(chunk: int, until: int) -> None:
        for step, reader in readers.get(chunk, ()):
            if step <= until:
                wait(reader, 2 * step + 1)
        for peer, number in last_send.get(chunk, {}).items():
            if gone[peer] < number:
                gone[peer] = number
                program.append(Sent(peer, number))

    for step, rows in enumerate(steps):
        mine = [
            (source, chunk, bool(reduce), bool(codec))
            for source, target, chunk, reduce, codec in rows
            if target == rank
        ]
        if hosts is not None:  # what is here is read before what must come is waited for
            coming = {chunk for source, chunk, *_ in mine if on[source] != on[rank]}
            mine.sort(key=lambda transfer: transfer[1] in coming)  # what is added to one chunk stays in order
        busy = {chunk for source, _, chunk, *_ in rows if source == rank}
        left = Counter(chunk for _, chunk, *_ in mine)  # writes to it that are still to come in this step
        held: list[Put] = []

        def encode(chunk: int, step: int = step, left: Counter[int] = left) -> None:
            left[chunk] -= 1
            if not left[chunk] and (step, chunk) in encodes:
                program.append(encodes[step, chunk])

        for source, target, chunk, _, codec in rows:
            if source == rank and on[target] != on[rank]:
                if (-1, chunk) in encodes and chunk not in readers and chunk not in last_send:
                    program.append(encodes[-1, chunk])
                sends[target] += 1
                last_send[chunk][target] = sends[target]
                program.append(Send(target, chunk, bool(codec)))
        for source, chunk, reduce, coded in mine:
            take = Read if on[source] == on[rank] else Receive
            if take is Read and (source, chunk) in written:
                wait(source, 2 * written[source, chunk] + 2)
            if chunk in busy:
                program.append(take(source, chunk, reduce, len(held), coded))
                held.append(Put(len(held), chunk, reduce, coded))
            else:
                wait_for_readers(chunk, step)
                program.append(take(source, chunk, reduce, None, coded))
                encode(chunk)
        if held:
            program.append(Mark(2 * step + 1))
            for put in held:
                wait_for_readers(put.chunk, step)
                program.append(put)
                encode(put.chunk)
        if mine:
            program.append(Mark(2 * step + 2))
        written.update({(target, chunk): step for _, target, chunk, *_ in rows})
    for chunk in sorted({*readers, *last_send}):
        wait_for_readers(chunk, len(steps))
    return Program(
        rank=rank,
        instructions=tuple(_with_early_sends(program)),
        exposed=tuple(sorted(plain)),
        written=tuple(sorted(chunk for target, chunk in written if target == rank)),
        marks=2 * len(steps) + 1,
        first=first,
        coded=coding,
    )


def rows_of(schedule: Schedule) -> list[list[tuple[int, ...]]]:
    """Of each step the transfers: source, target, chunk, whether it is reduced, and the number of its codec."""
    steps, coding = schedule.steps, bool(schedule.steps.codecs)
    return [
        [
            (*row, codec)
            for row, codec in zip(
                steps.rows(step).tolist(), steps.codec_rows(step).tolist() if coding else repeat(0), strict=coding
            )
        ]
        for step in range(len(steps))
    ]


def encodes_of(steps: Sequence[Sequence[tuple[int, ...]]], rank: int) -> dict[tuple[int, int], Encode]:
    """What a rank encodes: (the step whose writes come before it, -1 for none, and the chunk) -> how.

    A payload that was taken over, or that was made for a copy, is passed on as it is.
    """
    found: dict[tuple[int, int], Encode] = {}
    last: dict[int, int] = defaultdict(lambda: -1)  # of my chunk: the last step that wrote it
    ready: set[int] = set()  # chunks whose payload is what they hold
    for step, rows in enumerate(steps):
        for source, _, chunk, reduce, codec in rows:
            if source == rank and codec and chunk not in ready:
                found.setdefault((last[chunk], chunk), Encode(chunk, not reduce))
                if not reduce:
                    ready.add(chunk)
        for _, target, chunk, reduce, codec in rows:
            if target == rank:
                last[chunk] = step
                if codec and not reduce:
                    ready.add(chunk)
                else:
                    ready.discard(chunk)
    return found


def _with_early_sends(program: Sequence[Instruction]) -> Iterator[Instruction]:
    """The same program with each send as early as its chunk is what it sends, in the same order of sends."""
    sends: deque[tuple[Send, int]] = deque()  # and how often its chunk has been written before
    written: dict[int, int] = defaultdict(int)
    for now in program:
        if isinstance(now, Send):
            sends.append((now, written[now.chunk]))
        elif (chunk := _chunk_written(now)) is not None:
            written[chunk] += 1
    written.clear()

    def ready() -> Iterable[Send]:
        while sends and written[sends[0][0].chunk] == sends[0][1]:
            yield sends.popleft()[0]

    yield from ready()
    for now in program:
        if not isinstance(now, Send):
            yield now
            if (chunk := _chunk_written(now)) is not None:
                written[chunk] += 1
                yield from ready()


def _chunk_written(now: Instruction) -> int | None:
    """The chunk of mine that an instruction writes to."""
    if isinstance(now, Put | Encode):
        return now.chunk
    return now.chunk if isinstance(now, Read | Receive) and now.scratch is None else None
