"""The machines of a simulation: learners, how long they compute, how they are connected, how they fail."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from offbeat.errors import RequestError
from offbeat.number_format import format_size
from offbeat.simulate.compute import Draws, Failures, Law, SlowPeriods
from offbeat.simulate.cores import Cores
from offbeat.simulate.host_links import HostLinks

LEARNER_BYTES = 2_000  # that simulating one learner takes: its state, events and next draws (0.7 to 1.5 kB measured)


def check_memory(learners: int, available_bytes: int | None) -> None:
    """`RequestError` where simulating so many takes more memory than there is; None: the system does not tell."""
    needed_bytes = learners * LEARNER_BYTES
    if available_bytes is not None and needed_bytes > available_bytes:
        raise RequestError(
            f"--learners {learners}: simulating them takes about {format_size(needed_bytes)} of memory "
            f"({format_size(LEARNER_BYTES)} each), and {format_size(available_bytes)} are available here; "
            f"simulate at most {available_bytes // LEARNER_BYTES:,}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """How gradients and weights travel: the same number of bytes each way, unless more is said.

    With several shards each has a link of its own and an equal part of every transfer, which is as if one link had the
    bandwidth of all of them.
    """

    size_bytes: int
    learner_bytes_per_s: tuple[float, ...] | float = math.inf
    server_bytes_per_s: float = math.inf
    shards: int = 1
    latency_s: float = 0.0
    push_bytes: int = 0  # where only rows of some parameters are pushed, and
    fetch_bytes: int = 0  # fetched; 0: all of them
    hosts: HostLinks | None = None  # that learners and servers are on; then these links count, and no bandwidth above

    def cap(self, learner: int) -> float:
        caps = self.learner_bytes_per_s
        return caps if isinstance(caps, float | int) else caps[learner]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines: how many learners, how long they compute, how they are connected, how they fail."""

    learners: int
    law: Law
    seed: int = 0
    speeds: tuple[float, ...] = ()
    slow: SlowPeriods | None = None
    failures: Failures | None = None
    wires: Wires | None = None
    cores: Cores | None = None  # that all share: the law is then of delays beside the computing
    starts: Law | None = None  # from when a server's word is there until the minibatch begins, each its own
    sends: Law | None = None  # from when a gradient is computed until the server knows of it, each its own
    samples: tuple[int, ...] = ()  # of each learner's minibatch, where they are not all 1
    ids: tuple[int, ...] = ()  # whose draws each learner takes, where it is not its own number

    def __post_init__(self) -> None:
        if self.learners < 1:
            raise RequestError(f"a cluster needs at least 1 learner; got {self.learners}")
        measured = self.starts is not None or self.sends is not None
        if measured and (self.cores is not None or (self.wires is not None and self.wires.size_bytes)):
            raise RequestError(
                "the measured times in starts and sends already include sending and shared cores; leave out wires and "
                "cores"
            )
        for name, values in (("speeds", self.speeds), ("samples", self.samples)):
            if len(values) > self.learners:
                raise RequestError(f"{len(values)} {name} for {self.learners} learners")
            if any(not 0 < value < math.inf for value in values):
                raise RequestError(f"{name} must be above 0; got {', '.join(map(str, values))}")

    @property
    def all_speeds(self) -> tuple[float, ...]:
        """Of every learner."""
        return (*self.speeds, *[1.0] * (self.learners - len(self.speeds)))

    @property
    def all_samples(self) -> tuple[int, ...]:
        """In a minibatch of every learner."""
        return (*self.samples, *[1] * (self.learners - len(self.samples)))

    def without(self, *learners: int) -> Cluster:
        """The same machines without these; the others draw what they drew."""
        kept = [other for other in range(self.learners) if other not in learners]
        ids = self.ids or range(self.learners)
        wires = self.wires
        if wires is not None and isinstance(wires.learner_bytes_per_s, tuple):
            wires = replace(wires, learner_bytes_per_s=tuple(wires.learner_bytes_per_s[other] for other in kept))
        if wires is not None and wires.hosts is not None:
            wires = replace(wires, hosts=wires.hosts.without(kept))
        return replace(
            self,
            learners=len(kept),
            wires=wires,
            ids=tuple(ids[other] for other in kept),
            speeds=tuple(self.all_speeds[other] for other in kept),
            samples=tuple(self.all_samples[other] for other in kept),
        )

    def draws(self) -> Draws:
        return Draws(self.law, self.learners, self.seed, speeds=self.speeds, slow=self.slow, ids=self.ids)

    def begins(self) -> Draws | None:
        """What starting takes, where that was measured; a slow learner starts no slower."""
        return None if self.starts is None else Draws(self.starts, self.learners, self.seed, ids=self.ids)

    def arrives(self) -> Draws | None:
        """What sending takes, where that was measured."""
        return None if self.sends is None else Draws(self.sends, self.learners, self.seed, ids=self.ids)

    def works(self) -> Draws | None:
        """What is to be computed, where learners share cores; a slow learner has no more of it, and sleeps instead."""
        return None if self.cores is None else Draws(self.cores.law, self.learners, self.seed, ids=self.ids)

    def rest_s(self, learner: int, computed_s: float) -> float:
        """How long a slow learner sleeps after it has computed for so long, beside its delays."""
        speed = self.speeds[learner] if learner < len(self.speeds) else 1.0
        return max(0.0, computed_s * (1 / speed - 1))
