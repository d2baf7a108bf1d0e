"""A model as pieces that are computed one after the other, each with one tensor in and one out.

torch.fx traces the model; it is cut where a single value is needed further on, just before an operation with weights.
Every piece has something to learn, so that every stage of a pipeline has. Where fx cannot trace the model, only its
nn.Sequential containers are looked into.

Laws. Pieces have the modules of the model itself, under the model's names: nothing is copied. Computed one after the
other they draw the same random numbers as the model and give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from offbeat.errors import RequestError


class _Sequentials(fx.Tracer):
    """Looks into nn.Sequential only."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not isinstance(m, nn.Sequential)


def by_sequence(model: nn.Module) -> fx.Graph:
    """The modules of nn.Sequential containers, in order."""
    return _Sequentials().trace(model)


def pieces_of(model: nn.Module) -> list[fx.GraphModule]:
    """As many as there can be; a `RequestError` where the model cannot be traced or takes several inputs."""
    graph = _traced(model)
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr")]
    inputs = [node for node in graph.nodes if node.op == "placeholder" and node.users]
    if len(inputs) != 1:
        raise RequestError(f"a pipeline needs a model with one input; this one has {len(inputs)}")
    made = []
    start, given = 0, inputs[0]
    ends: list[tuple[int, fx.Node | None]] = [*_cuts(model, nodes, inputs[0]), (len(nodes), None)]
    for end, passed in ends:
        made.append(_piece(model, nodes[start:end], given, passed))
        if passed is not None:
            start, given = end, passed
    return made


def joined(model: nn.Module, pieces: Iterable[fx.GraphModule]) -> fx.GraphModule:
    """A module with what these pieces have, under the names of the whole model. It is not to be called."""
    graph = fx.Graph()
    for piece in pieces:
        for node in piece.graph.nodes:
            if node.op in ("call_module", "get_attr"):
                graph.get_attr(str(node.target))
    graph.output(None)
    return fx.GraphModule(model, graph)


def _traced(model: nn.Module) -> fx.Graph:
    failed = ""
    ways: tuple[Callable[[nn.Module], fx.Graph], ...] = (fx.Tracer().trace, by_sequence)
    for trace in ways:
        try:
            return trace(model)
        except Exception as error:  # whatever the model does that cannot be traced
            failed = failed or " ".join(str(error).split())[:120]
    raise RequestError(f"the model cannot be cut into stages, since torch.fx cannot trace it: {failed}")


def _cuts(model: nn.Module, nodes: Sequence[fx.Node], given: fx.Node) -> list[tuple[int, fx.Node]]:
    """Before which nodes the model can be cut, each with the one value that is needed from there on."""
    at = {node: number for number, node in enumerate(nodes)}
    ends = {node: max((at[user] for user in node.users if user in at), default=-1) for node in nodes}
    first = max(at[user] for user in given.users)
    learns = [_learns(model, node) for node in nodes]
    last = max((number for number, one in enumerate(learns) if one), default=0)
    live: set[fx.Node] = set()
    cuts: list[tuple[int, fx.Node]] = []
    has_weights, candidate = False, None
    for number, node in enumerate(nodes[: last + 1]):
        live = {one for one in live if ends[one] >= number}
        if has_weights and number > first and len(live) == 1:
            candidate = (number, next(iter(live)))
        if learns[number] and candidate is not None:
            cuts.append(candidate)
            has_weights, candidate = False, None
        has_weights = has_weights or learns[number]
        live.add(node)
    return cuts


def _learns(model: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return any(one.requires_grad for one in model.get_submodule(str(node.target)).parameters())
    attributes = [_attribute(model, str(one.target)) for one in node.all_input_nodes if one.op == "get_attr"]
    return any(isinstance(one, nn.Parameter) and one.requires_grad for one in attributes)


def _attribute(model: nn.Module, name: str) -> Any:
    owner, _, last = name.rpartition(".")
    return getattr(model.get_submodule(owner), last)


def _piece(model: nn.Module, nodes: Sequence[fx.Node], given: fx.Node, passed: fx.Node | None) -> fx.GraphModule:
    graph = fx.Graph()
    known = {given: graph.placeholder("given")}

    def found(node: fx.Node) -> fx.Node:
        if node not in known and node.op == "get_attr":
            known[node] = graph.get_attr(str(node.target))
        return known[node]

    for node in nodes:
        known[node] = graph.node_copy(node, found)
    if passed is not None:
        graph.output(known[passed])
    return fx.GraphModule(model, graph)


def writes_into_input(piece: nn.Module) -> bool:
    """Whether it may: then it is given a copy."""
    if any(getattr(one, "inplace", False) for one in piece.modules()):
        return True
    nodes = piece.graph.nodes if isinstance(piece, fx.GraphModule) else ()
    return any(
        node.kwargs.get("inplace") or (node.op == "call_method" and str(node.target).endswith("_")) for node in nodes
    )


def check_pieces(model: nn.Module, pieces: Sequence[nn.Module], inputs: Any) -> list[Tensor]:
    """What each piece but the last hands on; a `RequestError` if the pieces do not compute what the model does.

    A traced model has lost what its Python code decides anew each time.
    """
    state = torch.default_generator.get_state()
    passed: list[Tensor] = []
    with torch.no_grad():
        wanted = model(inputs)
        torch.default_generator.set_state(state)
        value = inputs
        for piece in pieces:
            value = piece(value.clone() if isinstance(value, Tensor) and writes_into_input(piece) else value)
            passed.append(value)
    if isinstance(wanted, Tensor) and not torch.equal(torch.nan_to_num(wanted), torch.nan_to_num(value)):
        raise RequestError(
            "the model cannot be cut into stages: its pieces, traced by torch.fx, compute another result"
        )
    return passed[:-1]
