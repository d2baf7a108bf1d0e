"""Where to cut a model: its graph divided into the stages of a pipeline.

The price of a cut, for m microbatches: the sum over the stages plus (m - 1) times the slowest stage. The time of a
stage is that of its operations on its device, plus that of its sends: activations to the next stage, gradients of the
same size to the one before. A tensor that is needed further on is passed on through every stage between. A stage holds
its parameters `state` times (weights, gradients, optimizer), and activations of as many microbatches as 1F1B keeps.

`best_partition` is exact over all downsets of the graph, up to 100,000 of them; past that it cuts the order of the
nodes only, and says so. Stages stay in the order of the devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from offbeat.errors import RequestError
from offbeat.number_format import format_size
from offbeat.pipelines.downsets import MOST_DOWNSETS, Downsets, Limit, Pace, cheapest_chain
from offbeat.pipelines.model_graph import ModelGraph
from offbeat.topology import Link

_CLOSE = 1e-12  # of costs that are told apart
_NO_SEND = Link(0.0, math.inf)


class StageDevice(NamedTuple):
    """What a stage runs on: `speed` is relative to the device on which the graph was measured."""

    speed: float = 1.0
    memory_bytes: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class CutProblem:
    """A graph, the devices of its stages in order, the links from each to the next, microbatches of a minibatch."""

    graph: ModelGraph
    devices: tuple[StageDevice, ...]
    microbatches: int
    links: tuple[Link, ...] = ()  # empty: sends take no time
    state: float = 4.0  # bytes held for a byte of parameters: weights, gradients, two moments

    def __post_init__(self) -> None:
        if not 1 <= self.parts <= len(self.graph.nodes):
            raise RequestError(f"'{self.graph.name}' has {len(self.graph.nodes)} nodes: too few for {self.parts} parts")
        if self.microbatches < 1 or (self.links and len(self.links) != self.parts - 1):
            raise RequestError("a cut needs 1 or more microbatches, and a link between each two stages")
        if any(device.speed <= 0 or device.memory_bytes <= 0 for device in self.devices):
            raise RequestError("the speed and memory of a device are above 0")

    @property
    def parts(self) -> int:
        return len(self.devices)

    def send_s(self, stage: int, size_bytes: float) -> float:
        """From a stage to the next one, or back."""
        link = self.links[stage] if self.links else _NO_SEND
        return link.latency_s + size_bytes / link.bytes_per_s if size_bytes else 0.0

    def held(self, stage: int) -> int:
        """Microbatches whose activations a stage holds at most, in 1F1B."""
        return min(self.microbatches, self.parts - stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPrice:
    """What one way to cut costs. `cut_bytes[k]` go from stage k to the next for each microbatch, and as many back."""

    seconds: float
    stage_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    cut_bytes: tuple[int, ...]
    memory_bytes: tuple[float, ...]
    fits: bool

    @property
    def slowest(self) -> int:
        return max(range(len(self.stage_s)), key=lambda stage: self.stage_s[stage])


Parts = tuple[int, ...]  # of each node, the stage that it is in


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A graph that is cut. `exact`: no other way is faster."""

    name: str
    parts: Parts
    price: CutPrice
    exact: bool = False
    downsets: int = 0
    note: str = ""
    cut_edges: tuple[tuple[int, int], ...] = field(default=())


def price_cut(problem: CutProblem, parts: Parts) -> CutPrice:
    """By the definition, from the nodes and edges."""
    graph, count = problem.graph, problem.parts
    if any(parts[source] > parts[target] for source, target in graph.edges) or set(parts) != set(range(count)):
        raise RequestError("every part has a node, and no node needs one of a later part")
    last_use = list(parts)
    for source, target in graph.edges:
        last_use[source] = max(last_use[source], parts[target])
    crossing = [0] * (count - 1)
    for node, first, last in zip(graph.nodes, parts, last_use, strict=True):
        for stage in range(first, last):
            crossing[stage] += node.output_bytes
    sends = [problem.send_s(stage, size) for stage, size in enumerate(crossing)]
    compute, memory = [], []
    for stage, device in enumerate(problem.devices):
        own = [node for node, part in zip(graph.nodes, parts, strict=True) if part == stage]
        compute.append(math.fsum(node.compute_s for node in own) / device.speed)
        memory.append(
            problem.state * sum(node.parameter_bytes for node in own)
            + problem.held(stage) * sum(node.kept_bytes for node in own)
        )
    there, back = [*sends, 0.0], [0.0, *sends]
    stage_s = tuple(sum(times) for times in zip(compute, there, back, strict=True))
    return CutPrice(
        seconds=math.fsum(stage_s) + (problem.microbatches - 1) * max(stage_s),
        stage_s=stage_s,
        compute_s=tuple(compute),
        cut_bytes=tuple(crossing),
        memory_bytes=tuple(memory),
        fits=all(size <= device.memory_bytes for size, device in zip(memory, problem.devices, strict=True)),
    )


def lower_bound_s(problem: CutProblem) -> float:
    """No cut is faster: all work is done on the fastest device once, and is shared out evenly after that."""
    fastest = max(device.speed for device in problem.devices)
    return problem.graph.compute_s / fastest + (problem.microbatches - 1) * _slowest_bound_s(problem)


def _slowest_bound_s(problem: CutProblem) -> float:
    """The slowest stage of no cut is faster: an even share, or the longest node on the fastest device."""
    speeds = [device.speed for device in problem.devices]
    longest = max(node.compute_s for node in problem.graph.nodes) / max(speeds)
    return max(problem.graph.compute_s / sum(speeds), longest) * (1 - _CLOSE)


# --- the fastest ----------------------------------------------------------------------------------------------------


class _Search:
    """The cheapest chain of downsets whose slowest stage takes at most a given time."""

    def __init__(self, problem: CutProblem, most: int) -> None:
        self.problem = problem
        graph, parts = problem.graph, problem.parts
        self.downsets = Downsets(len(graph.nodes), graph.edges, most)
        self.compute = self.downsets.sums([node.compute_s for node in graph.nodes])
        self.crossing = self.downsets.crossing([node.output_bytes for node in graph.nodes])
        speeds = [device.speed for device in problem.devices]
        sends = [[problem.send_s(stage, size) for size in self.crossing] for stage in range(parts - 1)]
        none = [0.0] * len(self.compute)
        there, back = [*sends, none], [none, *sends]
        self.over = [
            [work / speed + send for work, send in zip(self.compute, there[stage], strict=True)]
            for stage, speed in enumerate(speeds)
        ]
        self.under = [
            [work / speed - send for work, send in zip(self.compute, back[stage], strict=True)]
            for stage, speed in enumerate(speeds)
        ]
        gains = [1 / one - 1 / other for one, other in pairwise([*speeds, math.inf])]
        self.costs = [
            [gain * work + 2 * send for work, send in zip(self.compute, there[stage], strict=True)]
            for stage, gain in enumerate(gains)
        ]
        # An even share of what is left is the least that the slowest of the stages that are left takes.
        left = [self.compute[-1] - work for work in self.compute]
        self.after = [[(1 - _CLOSE) * work / sum(speeds[stage:]) for work in left] for stage in range(parts)]
        self.memory = self._memory()

    def _memory(self) -> list[Limit]:
        problem, nodes = self.problem, self.problem.graph.nodes
        if all(math.isinf(device.memory_bytes) for device in problem.devices):
            return []
        parameters = self.downsets.sums([problem.state * node.parameter_bytes for node in nodes])
        kept = self.downsets.sums([node.kept_bytes for node in nodes])
        held = [
            [one + problem.held(stage) * other for one, other in zip(parameters, kept, strict=True)]
            for stage in range(problem.parts)
        ]
        return [Limit(held, held, [device.memory_bytes + 1e-6 for device in problem.devices])]

    def parts_of(self, chain: Sequence[int]) -> Parts:
        parts = [0] * len(self.problem.graph.nodes)
        for node in range(len(parts)):
            parts[node] = next(stage for stage, at in enumerate(chain) if self.downsets.masks[at] >> node & 1)
        return tuple(parts)

    def fastest(self, least_s: float, below_s: float) -> Parts | None:
        """None where no cut takes less than `below_s`."""
        pace = Pace(self.over, self.under, self.problem.microbatches - 1, least_s, self.after)
        chain = cheapest_chain(self.downsets, self.problem.parts, self.costs, self.memory, pace, below_s)
        return None if chain is None else self.parts_of(chain)


def best_partition(problem: CutProblem, *, most_downsets: int = MOST_DOWNSETS) -> Cut:
    """The fastest cut; a `RequestError` where no cut fits the memory.

    A cut of the order of the nodes is found first: what cannot be faster need not be looked at.
    """
    lowest = lower_bound_s(problem)
    least_s = _slowest_bound_s(problem)
    simple = _Search(problem, 0)
    parts = simple.fastest(least_s, math.inf)
    search = _Search(problem, most_downsets)
    exact = search.downsets.exact
    if exact:
        below_s = math.inf if parts is None else price_cut(problem, parts).seconds * (1 - _CLOSE)
        parts = search.fastest(least_s, below_s) or parts
    if parts is None:
        raise RequestError(_too_large(problem))
    price = price_cut(problem, parts)
    note = (
        ""
        if exact
        else f"the graph has more than {most_downsets:,} downsets, too many to consider every cut: only cuts along "
        f"the order of its nodes were tried; this one is at most {100 * (price.seconds / lowest - 1):.1f} % "
        "above the lower bound"
    )
    return _cut("best", problem, parts, price, exact=exact, downsets=len(search.downsets.masks), note=note)


def _too_large(problem: CutProblem) -> str:
    need = problem.state * problem.graph.parameter_bytes
    have = sum(device.memory_bytes for device in problem.devices)
    return (
        f"no cut of '{problem.graph.name}' into {problem.parts} parts fits the memory: weights, gradients and "
        f"optimizer take {format_size(need)}, the devices have {format_size(have)}; use more parts or smaller "
        "microbatches"
    )


def _cut(name: str, problem: CutProblem, parts: Parts, price: CutPrice | None = None, **fields: object) -> Cut:
    edges = tuple(edge for edge in problem.graph.edges if parts[edge[0]] != parts[edge[1]])
    return Cut(name=name, parts=parts, price=price or price_cut(problem, parts), cut_edges=edges, **fields)  # type: ignore[arg-type]


# --- with what it is compared ---------------------------------------------------------------------------------------


def _in_order(problem: CutProblem, weights: Sequence[float]) -> Parts:
    """The order of the nodes cut so that each part has about the same weight, and none is empty."""
    total, count, nodes = sum(weights), problem.parts, len(weights)
    parts, seen, part = [], 0.0, 0
    for node, weight in enumerate(weights):
        middle = seen + weight / 2
        wanted = min(count - 1, int(count * middle / total)) if total else node * count // nodes
        part = max(part, min(part + 1, wanted)) if node else 0
        part = max(part, count - (nodes - node))  # enough nodes are left for the other parts
        parts.append(part)
        seen += weight
    return tuple(parts)


def equal_layers(problem: CutProblem) -> Cut:
    """As many layers with parameters in each part, in order."""
    counts = [float(node.parameter_bytes > 0) for node in problem.graph.nodes]
    return _cut("equal layers", problem, _in_order(problem, counts if any(counts) else [1.0] * len(counts)))


def equal_parameters(problem: CutProblem) -> Cut:
    return _cut("equal parameters", problem, _in_order(problem, [n.parameter_bytes for n in problem.graph.nodes]))


def minimum_cut(problem: CutProblem, balance: float = 1.1, *, most_downsets: int = MOST_DOWNSETS) -> Cut:
    """The fewest bytes across, where no part computes longer than `balance` times an even share; if no cut is so even,
    the share is raised until there is one."""
    search = _Search(problem, most_downsets)
    speeds = [device.speed for device in problem.devices]
    plain = [[work / speed for work in search.compute] for speed in speeds]
    even = problem.graph.compute_s / sum(speeds)
    costs = [[float(size) for size in search.crossing]] * problem.parts  # of the last part nothing crosses
    while True:
        limit = Limit(plain, plain, [balance * even * (1 + _CLOSE)] * problem.parts)
        chain = cheapest_chain(search.downsets, problem.parts, costs, [limit])
        if chain is not None:
            note = f"no part computes longer than {balance:.3g} times an even share"
            return _cut("minimum cut", problem, search.parts_of(chain), note=note)
        balance *= 1.1
