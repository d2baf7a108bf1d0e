"""Synchronous training by all-reduce in simulated time, with and without overlap of backward and reduction.

A learner's minibatch is a forward pass and a backward pass over layers, from the last to the first. Layers are
gathered into buckets of at least so many bytes, as DDP does. A bucket can be reduced when every learner has its
gradient; buckets are reduced one after the other, each for what its schedule costs on the topology. Without overlap
there is one bucket, reduced when backward is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from offbeat.errors import RequestError
from offbeat.runs.log import Span
from offbeat.schedules import build, price
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.cores import shared_s
from offbeat.simulate.fair_network import Background
from offbeat.simulate.result import Result, Tally
from offbeat.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Layers in forward order, by the share of the backward time and the bytes of each; times are relative.

    `forward_share` is the part of a minibatch's compute time that is forward.
    """

    forward_share: float
    backward: tuple[float, ...]  # relative weights
    size_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.forward_share < 1:
            raise RequestError(f"the forward share must be from 0 to below 1; got {self.forward_share}")
        if not self.backward or len(self.backward) != len(self.size_bytes) or min(self.backward) < 0:
            raise RequestError("a model needs layers, each with a time of 0 or more and a size")
        if not sum(self.backward) > 0 or min(self.size_bytes) < 0:
            raise RequestError("the layers of a model must take some time, and their sizes must be 0 or more")

    @classmethod
    def even(cls, *, layers: int, size_bytes: int, forward_share: float) -> Model:
        """Layers that are all alike."""
        sizes = [(i + 1) * size_bytes // layers - i * size_bytes // layers for i in range(layers)]
        return cls(forward_share=forward_share, backward=(1.0,) * layers, size_bytes=tuple(sizes))

    def buckets(self, bucket_bytes: int | None) -> list[tuple[float, int]]:
        """In the order of backward: (share of backward that a bucket adds, its bytes). None: one bucket."""
        whole = sum(self.backward)
        found: list[tuple[float, int]] = []
        share, size = 0.0, 0
        for weight, layer_bytes in zip(reversed(self.backward), reversed(self.size_bytes), strict=True):
            share, size = share + weight / whole, size + layer_bytes
            if bucket_bytes is not None and size >= bucket_bytes:
                found.append((share, size))
                share, size = 0.0, 0
        if share or size:
            found.append((share, size))
        return found


def priced(strategy: str, topology: Topology) -> Callable[[int], float]:
    """What an all-reduce of so many bytes takes on a topology."""
    schedule = build(strategy, ranks=topology.ranks)
    return cache(lambda size_bytes: price(schedule, topology, size_bytes).seconds)


def contended(strategy: str, topology: Topology, background: Sequence[Background] = ()) -> Callable[[int], float]:
    """The same where its messages share the links with each other and with other traffic, rank by rank."""
    from offbeat.simulate.schedule_run import run_schedule  # with --contended only

    schedule = build(strategy, ranks=topology.ranks)
    return cache(lambda size_bytes: run_schedule(schedule, topology, size_bytes, background=background).seconds)


def iteration_s(
    compute_s: Sequence[float], model: Model, buckets: Sequence[tuple[float, int]], reduce_s: Callable[[int], float]
) -> float:
    """Seconds from the start of an iteration to the end of its last reduction."""
    slowest = max(compute_s)
    ready = slowest * model.forward_share
    backward_s = slowest * (1 - model.forward_share)
    free = 0.0
    for share, size in buckets:
        ready += backward_s * share
        free = max(ready, free) + reduce_s(size)
    return free


class Rounds:
    """A run of it, an iteration at a time. `bucket_bytes` None: no overlap, one bucket after backward.

    `reduce_s` says how long the reduction of so many bytes takes, where that was measured and is not to be priced.
    """

    def __init__(
        self,
        strategy: str,
        cluster: Cluster,
        topology: Topology,
        model: Model,
        *,
        bucket_bytes: int | None = None,
        keep_spans: int = 0,
        reduce_s: Callable[[int], float] | None = None,
    ) -> None:
        if cluster.failures is not None:
            raise RequestError(
                f"'{strategy}' is an all-reduce and cannot continue after a failure of a learner; use a "
                "parameter-server strategy"
            )
        self.strategy, self.cluster, self.keep_spans = strategy, cluster, keep_spans
        self.now = 0.0
        self.version = 0
        self._model, self._buckets = model, model.buckets(bucket_bytes)
        price_s = priced(strategy, topology)  # refuses a schedule that does not fit so many
        self._reduce_s = reduce_s or price_s
        self._draws, self._works = cluster.draws(), cluster.works()
        self.tally = Tally()
        self._spans: list[Span] = []

    def _compute_s(self) -> list[float]:
        cluster = self.cluster
        delays = [self._draws.take(learner) for learner in range(cluster.learners)]
        if self._works is None or cluster.cores is None:
            return delays
        works = [self._works.take(learner) for learner in range(cluster.learners)]
        ends = shared_s(works, cluster.cores.count)
        return [end + cluster.rest_s(learner, end) + delays[learner] for learner, end in enumerate(ends)]

    def go(self) -> None:
        """One iteration: `now` is its end, `version` one more."""
        cluster, tally, start = self.cluster, self.tally, self.now
        learners = range(cluster.learners)
        compute_s = self._compute_s()
        end = start + iteration_s(compute_s, self._model, self._buckets, self._reduce_s)
        last = start + max(compute_s)
        for learner in learners:
            done = start + compute_s[learner]
            tally.seconds["compute"] += compute_s[learner]
            tally.seconds["wait"] += last - done
            tally.seconds["send"] += end - last
            if self.version < self.keep_spans:
                for what, began, stop in (("compute", start, done), ("wait", done, last), ("send", last, end)):
                    if stop > began:
                        self._spans.append(Span(learner, what, began, stop, self.version))
        tally.staleness[0] += cluster.learners
        tally.applied += cluster.learners
        tally.samples += sum(cluster.all_samples)
        self.now = end
        self.version += 1

    def result(self) -> Result:
        return Result.of(
            strategy=self.strategy,
            learners=self.cluster.learners,
            updates=self.version,
            seconds=self.now,
            events=self.version * (self.cluster.learners + len(self._buckets)),
            tally=self.tally,
            spans=tuple(self._spans),
        )


def run(
    strategy: str,
    cluster: Cluster,
    topology: Topology,
    model: Model,
    *,
    updates: int,
    bucket_bytes: int | None = None,
    keep_spans: int = 0,
    reduce_s: Callable[[int], float] | None = None,
) -> Result:
    """Simulate so many iterations."""
    if updates < 1:
        raise RequestError(f"simulate at least 1 update; got {updates}")
    rounds = Rounds(
        strategy, cluster, topology, model, bucket_bytes=bucket_bytes, keep_spans=keep_spans, reduce_s=reduce_s
    )
    for _ in range(updates):
        rounds.go()
    return rounds.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One size of bucket: how many buckets, the iteration, and the least it could be with that first bucket."""

    buckets: int
    bucket_bytes: int  # of the largest
    iteration_s: float
    bound_s: float  # forward + the first bucket's backward + the reduction of everything at once


def bucket_curve(strategy: str, compute_s: float, model: Model, topology: Topology) -> list[CurvePoint]:
    """The time of an iteration on equal learners as buckets get smaller, from one for all to one a layer."""
    reduce_s = priced(strategy, topology)
    whole_s = reduce_s(sum(model.size_bytes))
    points: list[CurvePoint] = []
    count = 1
    while True:
        bucket_bytes = max(1, -(-sum(model.size_bytes) // count))
        buckets = model.buckets(bucket_bytes)
        if not points or len(buckets) > points[-1].buckets:
            first = compute_s * (model.forward_share + (1 - model.forward_share) * buckets[0][0])
            points.append(
                CurvePoint(
                    buckets=len(buckets),
                    bucket_bytes=max(size for _, size in buckets),
                    iteration_s=iteration_s([compute_s], model, buckets, reduce_s),
                    bound_s=first + whole_s,
                )
            )
        if count >= len(model.backward):
            return points
        count = min(2 * count, len(model.backward))
