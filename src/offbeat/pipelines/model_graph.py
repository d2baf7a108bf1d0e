"""A model as a graph: operations with their times and bytes, and which needs which.

Laws. Nodes are in an order in which they can be computed: an edge goes from a lower to a higher number. A tensor that
several nodes need is one output, and crosses a cut once. All numbers are of one microbatch.
`ModelGraph.from_json(graph.to_json()) == graph`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from offbeat.errors import RequestError


class GraphNode(NamedTuple):
    """An operation: seconds of its passes, bytes of its parameters, of what it keeps for backward, of its output.

    `input_s` and `weight_s` are the halves of a backward pass that is computed in two, which takes longer than one; 0
    where that was not measured.
    """

    name: str
    forward_s: float
    backward_s: float
    parameter_bytes: int = 0
    kept_bytes: int = 0
    output_bytes: int = 0
    input_s: float = 0.0
    weight_s: float = 0.0

    @property
    def halves_s(self) -> tuple[float, float]:
        """Gradients of inputs, then those of weights: as measured, else half of a backward pass each."""
        return (self.input_s, self.weight_s) if self.input_s or self.weight_s else (self.backward_s / 2,) * 2

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGraph:
    """`edges`: (node, node that needs its output)."""

    name: str
    nodes: tuple[GraphNode, ...]
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.nodes:
            raise RequestError(f"the graph of '{self.name}' has no nodes")
        for source, target in self.edges:
            if not 0 <= source < target < len(self.nodes):
                raise RequestError(f"the graph of '{self.name}' has an invalid edge from node {source} to {target}")
        for node in self.nodes:
            if min(node[1:]) < 0:
                raise RequestError(f"node '{node.name}' of '{self.name}' has a time or size below 0")

    @property
    def compute_s(self) -> float:
        return sum(node.compute_s for node in self.nodes)

    @property
    def parameter_bytes(self) -> int:
        return sum(node.parameter_bytes for node in self.nodes)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "nodes": [node._asdict() for node in self.nodes],
            "edges": [list(e) for e in self.edges],
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> ModelGraph:
        try:
            nodes = tuple(
                GraphNode(
                    str(node["name"]),
                    float(node["forward_s"]),
                    float(node["backward_s"]),
                    *(int(node[key]) for key in ("parameter_bytes", "kept_bytes", "output_bytes")),
                    *(float(node.get(key, 0.0)) for key in ("input_s", "weight_s")),
                )
                for node in told["nodes"]
            )
            edges = tuple((int(source), int(target)) for source, target in told["edges"])
            name = str(told["name"])
        except KeyError as error:
            raise RequestError(f"this is not the graph of a model: {error} is missing") from None
        except (TypeError, ValueError, OverflowError):
            raise RequestError("this is not the graph of a model: a time, a size or an edge is not a number") from None
        return cls(name=name, nodes=nodes, edges=edges)


def merged(nodes: Iterable[GraphNode]) -> GraphNode:
    """Nodes of a chain as one: its output is that of the last."""
    some = tuple(nodes)
    return GraphNode(
        some[0].name,
        sum(node.forward_s for node in some),
        sum(node.backward_s for node in some),
        sum(node.parameter_bytes for node in some),
        sum(node.kept_bytes for node in some),
        some[-1].output_bytes,
        sum(node.input_s for node in some),
        sum(node.weight_s for node in some),
    )


def chain(name: str, nodes: Sequence[GraphNode]) -> ModelGraph:
    """Each node needs the one before it."""
    return ModelGraph(name=name, nodes=tuple(nodes), edges=tuple((at, at + 1) for at in range(len(nodes) - 1)))
