"""What a pipeline costs: seconds, bubbles, activations.

The model. A rank carries out its row in order, one action at a time; it waits for what an action needs. A whole
backward pass takes the time of its two halves, unless it was measured by itself; an overlapped pair takes the time of
both of its passes. Messages travel
beside computing: one goes off when it is made and every link of its route is free, and takes the latency of the route
plus its bytes at the slowest link. A link carries one message at a time in each direction; there are always buffers.
Gradients of inputs are as large as those inputs. What it leaves out: the update, and the time to start an action.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.errors import RequestError
from offbeat.pipelines.actions import BACKWARD, FORWARD, INPUT, WEIGHT, Action, PipelineSchedule
from offbeat.pipelines.model_graph import GraphNode
from offbeat.pipelines.pipeline_messages import StageMessage, made_by, needed_by, without_messages
from offbeat.pipelines.pipeline_proof import peak_activations
from offbeat.topology import Edge, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Seconds of one microbatch in each stage, and the bytes that go from each stage to the next.

    `backward_s`: of a backward pass in one action; none: that of its halves.
    """

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    activation_bytes: tuple[int, ...] = ()
    backward_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        stages = len(self.forward_s)
        if not stages or len(self.input_s) != stages or len(self.weight_s) != stages:
            raise RequestError("forward, input and weight times are given for the same stages")
        if len(self.backward_s) not in (0, stages):
            raise RequestError(f"{stages} stages need {stages} times of a backward pass, or none")
        times = (*self.forward_s, *self.input_s, *self.weight_s, *self.backward_s)
        if not all(math.isfinite(time) and time >= 0 for time in times):
            raise RequestError("the times of a stage are 0 or more")
        if len(self.activation_bytes) not in (0, stages - 1) or any(size < 0 for size in self.activation_bytes):
            raise RequestError(f"{stages} stages need {stages - 1} activation sizes of 0 or more")

    @classmethod
    def of(cls, nodes: Sequence[GraphNode], parts: Sequence[int], *, sends: bool = False) -> StageCosts:
        """Of a chain of which node n is in stage `parts[n]`. The inputs of the first stage are data and have no
        gradients: there the second half is the whole backward pass."""
        own = [[node for node, part in zip(nodes, parts, strict=True) if part == at] for at in range(max(parts) + 1)]
        backward = tuple(math.fsum(node.backward_s for node in some) for some in own)
        input_s, weight_s = zip(
            *((math.fsum(half) for half in zip(*(node.halves_s for node in some), strict=True)) for some in own),
            strict=True,
        )
        return cls(
            forward_s=tuple(math.fsum(node.forward_s for node in some) for some in own),
            input_s=(0.0, *input_s[1:]),
            weight_s=(backward[0], *weight_s[1:]),
            backward_s=backward,
            activation_bytes=tuple(some[-1].output_bytes for some in own[:-1]) if sends else (),
        )

    @property
    def stages(self) -> int:
        return len(self.forward_s)

    def seconds(self, action: Action) -> float:
        times: dict[str, tuple[tuple[float, ...], ...]] = {
            FORWARD: (self.forward_s,),
            BACKWARD: (self.backward_s,) if self.backward_s else (self.input_s, self.weight_s),
            INPUT: (self.input_s,),
            WEIGHT: (self.weight_s,),
        }
        return sum(some[single.stage] for single in action.singles for some in times[single.kind])

    def size_of(self, message: StageMessage) -> int:
        return self.activation_bytes[min(message.source, message.target)] if self.activation_bytes else 0

    def cut(self, chunks: int) -> StageCosts:
        """The same model with each stage cut into so many equal ones; inside a stage as much is sent as after it."""

        def each(times: Sequence[float]) -> tuple[float, ...]:
            return tuple(time / chunks for time in times for _ in range(chunks))

        last = self.activation_bytes[-1:]
        sizes = tuple(size for size in (*self.activation_bytes, *last) for _ in range(chunks))
        return StageCosts(
            forward_s=each(self.forward_s),
            input_s=each(self.input_s),
            weight_s=each(self.weight_s),
            backward_s=each(self.backward_s),
            activation_bytes=sizes[: self.stages * chunks - 1],
        )


def equal_costs(
    stages: int, *, forward_s: float = 1.0, input_s: float = 1.0, weight_s: float = 1.0, activation_bytes: int = 0
) -> StageCosts:
    return StageCosts(
        forward_s=(forward_s,) * stages,
        input_s=(input_s,) * stages,
        weight_s=(weight_s,) * stages,
        activation_bytes=(activation_bytes,) * (stages - 1),
    )


class ActionSpan(NamedTuple):
    """When a rank carried out an action."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePrice:
    """What `price_pipeline` found.

    `bubble_share`: of the time of all ranks, the part in which they compute nothing. `steps`: as many as the longest
    chain of actions has, if each takes one. `peak_activations` of each rank are in units of its whole part of the
    model: a rank with 2 stages that holds 3 of them has 1.5. `inside_idle_s`: what each rank waits between its first
    and last action. `sent_bytes` are those of each rank.
    """

    seconds: float
    steps: int
    bubble_share: float
    peak_activations: tuple[float, ...]
    busy_s: tuple[float, ...]
    inside_idle_s: tuple[float, ...]
    sent_bytes: tuple[int, ...]
    spans: tuple[ActionSpan, ...]


def price_pipeline(schedule: PipelineSchedule, costs: StageCosts, topology: Topology | None = None) -> PipelinePrice:
    """The cost of a proved `schedule`. Without a topology messages take no time."""
    stages = schedule.stages
    if costs.stages != stages:
        raise RequestError(f"pipeline '{schedule.name}' has {stages} stages, but times are given for {costs.stages}")
    if topology is not None and topology.ranks != schedule.ranks:
        raise RequestError(
            f"pipeline '{schedule.name}' has {schedule.ranks} ranks, topology '{topology.name}' has {topology.ranks}"
        )
    plain = without_messages(schedule)
    spans, sent = _play(plain, costs, topology)
    unit, _ = _play(plain, None, None)
    seconds = max((span.end_s for span in spans), default=0.0)
    busy = [0.0] * schedule.ranks
    first, last = [math.inf] * schedule.ranks, [0.0] * schedule.ranks
    for rank, action, start_s, end_s in spans:
        busy[rank] += costs.seconds(action)
        first[rank], last[rank] = min(first[rank], start_s), max(last[rank], end_s)
    of_rank: dict[int, int] = defaultdict(int)
    for rank in schedule.placement.values():
        of_rank[rank] += 1
    return PipelinePrice(
        seconds=seconds,
        steps=round(max((span.end_s for span in unit), default=0.0)),
        bubble_share=1 - sum(busy) / (schedule.ranks * seconds) if seconds else 0.0,
        peak_activations=tuple(peak / max(1, of_rank[rank]) for rank, peak in enumerate(peak_activations(schedule))),
        busy_s=tuple(busy),
        inside_idle_s=tuple(max(0.0, end - begin - work) for begin, end, work in zip(first, last, busy, strict=True)),
        sent_bytes=tuple(sent),
        spans=tuple(spans),
    )


def _play(
    schedule: PipelineSchedule, costs: StageCosts | None, topology: Topology | None
) -> tuple[list[ActionSpan], list[int]]:
    """When everything happens; without costs every action takes 1 and messages nothing."""
    stages, placement = schedule.stages, schedule.placement
    arrived: dict[StageMessage, float] = {}
    free_at: dict[Edge, float] = defaultdict(float)
    clock, at, sent = [0.0] * schedule.ranks, [0] * schedule.ranks, [0] * schedule.ranks
    running: list[tuple[float, int]] = []  # when the action of a rank ends
    spans: list[ActionSpan] = []
    busy = [False] * schedule.ranks

    def start(rank: int) -> None:
        if busy[rank] or at[rank] == len(schedule.rows[rank]):
            return
        action = schedule.rows[rank][at[rank]]
        needs = [message for single in action.singles if (message := needed_by(single, stages)) is not None]
        if any(message not in arrived for message in needs):
            return
        start_s = max([clock[rank], *(arrived[message] for message in needs)])
        clock[rank] = start_s + (1.0 if costs is None else costs.seconds(action))
        busy[rank] = True
        spans.append(ActionSpan(rank, action, start_s, clock[rank]))
        heapq.heappush(running, (clock[rank], rank))

    def send(message: StageMessage, now_s: float) -> None:
        source, target = placement[message.source], placement[message.target]
        arrived[message] = now_s
        if source != target and costs is not None:
            size = costs.size_of(message)
            sent[source] += size
            if topology is not None:
                route = topology.route(source, target)
                links = [topology.links[edge] for edge in route]
                start_s = max([now_s, *(free_at[edge] for edge in route)])
                for edge, link in zip(route, links, strict=True):
                    free_at[edge] = start_s + size / link.bytes_per_s
                slowest = min(link.bytes_per_s for link in links)
                arrived[message] = start_s + sum(link.latency_s for link in links) + size / slowest
        start(target)

    for rank in range(schedule.ranks):
        start(rank)
    while running:  # in the order in which actions end, so that messages take links in the order in which they are made
        now_s, rank = heapq.heappop(running)
        busy[rank] = False
        action = schedule.rows[rank][at[rank]]
        at[rank] += 1
        for single in action.singles:
            message = made_by(single, stages)
            if message is not None:
                send(message, now_s)
        start(rank)
    if any(step < len(row) for step, row in zip(at, schedule.rows, strict=True)):
        raise RequestError(f"pipeline '{schedule.name}' cannot be completed: verify it first")
    return spans, sent
