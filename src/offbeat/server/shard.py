"""A server's work: one shard of the parameters, changed by one job at a time.

The memory outlives the process: a server that was killed in the middle of a job is replaced by another, which is told
the same job and does it again. That gives the same, since an update reads one buffer and writes another, and the number
of the last one that was finished stands in that memory. A job with a number that was finished is not done again: its
gradients may have gone since.
"""

from __future__ import annotations

from typing import Protocol

from offbeat.errors import EventError
from offbeat.server.wire import Done, Job, Ready


class Memory(Protocol):
    """What a shard works on. `finished` and `version` outlive the process; an update sets them last."""

    @property
    def finished(self) -> int: ...
    @property
    def version(self) -> int: ...
    def apply(self, job: Job) -> None:
        """Compute the update into the target buffer; changes nothing that is current."""
        ...

    def finish(self, number: int, version: int) -> None:
        """The update is whole: from now on it is never done again."""
        ...

    def norm(self, job: Job) -> tuple[float, ...]: ...
    def drift(self, job: Job) -> tuple[float, ...]: ...


class Shard:
    """See the module's text."""

    def __init__(self, shard: int, generation: int, memory: Memory) -> None:
        self.shard = shard
        self.generation = generation
        self.memory = memory

    def ready(self) -> Ready:
        return Ready(self.shard, self.generation)

    def handle(self, job: Job) -> Done:
        """Do a job, unless it was done; what it found."""
        memory = self.memory
        if job.number <= memory.finished:
            return Done(self.shard, self.generation, job.number)
        if job.version != memory.version + 1:
            raise EventError(f"shard {self.shard} is at version {memory.version}, and is told to make {job.version}")
        if job.kind == "norm":
            return Done(self.shard, self.generation, job.number, memory.norm(job))
        if job.kind == "drift":
            return Done(self.shard, self.generation, job.number, memory.drift(job))
        memory.apply(job)
        memory.finish(job.number, job.version)
        return Done(self.shard, self.generation, job.number)
