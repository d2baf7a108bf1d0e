"""A server's work: one shard of the parameters, changed by one job at a time.

The memory outlives the process: a server that was killed in the middle of a job is replaced by another, which is told
the same job and does it again. That gives the same, since an update reads one buffer and writes another, and the number
of the last one that was finished stands in that memory. A job with a number that was finished is not done again: its
gradients may have gone since.
"""

from __future__ import annotations

from typing import Protocol

from offbeat.errors import EventError
from offbeat.server.wire import Done, Ready, ShardJob


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
        if job.number <= memory.finished:
            return Done(self.shard, self.generation, job.number)
        if job.version != memory.version + 1:
            raise EventError(f"shard {self.shard} is at version {memory.version}, and is told to make {job.version}")
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
