"""A server: one shard of the parameters, changed by one job at a time; the state machine, and its process.

The memory outlives the process: a server that was killed in the middle of a job is replaced by another, which is told
the same job and does it again. That gives the same, since an update reads one buffer and writes another, and the number
of the last one that was finished stands in that memory. A job with a number that was finished is not done again: its
gradients may have gone since.
"""

from __future__ import annotations

import socket
import sys
from typing import Protocol

import torch

from offbeat.errors import EventError, PeerError
from offbeat.server import handshake
from offbeat.server.arena import Arena
from offbeat.server.shard.optimizers import Updates
from offbeat.server.sparse_rows import RowsError
from offbeat.server.wire import MOST_BYTES, PROTOCOL, Done, Ready, ShardJob, decode_output, encode

_AGAIN_S = 600.0  # for a coordinator that goes through its journal
_NOBODY_S = 1.0  # where nobody listens


class Memory(Protocol):
    """What a shard works on. `finished` and `version` outlive the process; an update sets them last."""

    @property
    def finished(self) -> int: ...
    @property
    def version(self) -> int: ...
    def apply(self, job: ShardJob) -> None:
        """Compute the update into the target buffer; changes nothing that is current."""
        ...

    def finish(self, number: int, version: int) -> None:
        """The update is whole: from now on it is never done again."""
        ...

    def norm(self, job: ShardJob) -> tuple[float, ...]: ...
    def drift(self, job: ShardJob) -> tuple[float, ...]: ...


class Shard:
    """See the module's text."""

    def __init__(self, shard: int, generation: int, memory: Memory) -> None:
        self.shard = shard
        self.generation = generation
        self.memory = memory
        self._last: Done | None = None  # what was answered last: the coordinator asks again when it takes long

    def ready(self) -> Ready:
        return Ready(self.shard, self.generation)

    def handle(self, job: ShardJob) -> Done:
        """Do a job, unless it was done; what it found."""
        memory = self.memory
        if self._last is not None and job.number == self._last.number:
            return self._last
        if job.number <= max(memory.finished, 0 if self._last is None else self._last.number):  # said before, and late
            return Done(self.shard, self.generation, job.number)
        if job.version != memory.version + 1:
            raise EventError(f"shard {self.shard} is at version {memory.version}, but was asked to make {job.version}")
        sums: tuple[float, ...] = ()
        if job.kind == "norm":
            sums = memory.norm(job)
        elif job.kind == "drift":
            sums = memory.drift(job)
        else:
            memory.apply(job)
            memory.finish(job.number, job.version)
        self._last = Done(self.shard, self.generation, job.number, sums)
        return self._last


class ShardMemory(Updates):
    """One shard of an arena, as a `Shard` works on it."""

    def __init__(self, arena: Arena, shard: int) -> None:
        start, end = arena.table.shard(shard, arena.setting.shards)
        super().__init__(
            arena.table, arena.weights, arena.slots, arena.states, arena.steps[shard], start, end, rows=arena.rows
        )
        self.shard = shard
        self._changed = arena.changed[shard]
        self._word = arena.shard_words[shard]

    @property
    def finished(self) -> int:
        return self._word.get() >> 32

    @property
    def version(self) -> int:
        return self._word.get() & 0xFFFFFFFF

    def refuse(self, error: RowsError) -> None:
        """Training goes on without them."""
        print(f"offbeat: the rows of a gradient were left out: {error}", file=sys.stderr, flush=True)

    def finish(self, number: int, version: int) -> None:
        for parameter, changed in self._changed.items():
            changed.write(version, self.changed_by(parameter, version))
        self._word.write(number << 32 | version)


def serve(name: str, token: str, shard: int, generation: int) -> None:
    """Until the coordinator is gone for good."""
    torch.set_num_threads(1)
    own = handshake.Handshake(PROTOCOL, token, "server", shard, handshake.versions(), generation=generation)
    machine: Shard | None = None
    while True:
        connection, arena = _connect(name, own)
        if machine is None:
            machine = Shard(shard, generation, ShardMemory(arena, shard))
        try:
            connection.send(encode(machine.ready()))
            while data := connection.recv(MOST_BYTES):
                job = decode_output(data)
                if not isinstance(job, ShardJob):
                    raise EventError(f"a server received an unexpected message: {job}")
                connection.send(encode(machine.handle(job)))
        except OSError:
            pass
        connection.close()


def _connect(name: str, own: handshake.Handshake) -> tuple[socket.socket, Arena]:
    """To the coordinator, or to one that takes its place."""
    try:
        connection, _, arena = handshake.keep_connecting(
            handshake.LocalRoad(name), own, most_s=_AGAIN_S, gone_s=_NOBODY_S
        )
    except PeerError:
        raise SystemExit(0) from None  # there is nobody any more
    return connection, arena
