"""A backward pass in two halves: the gradients of the inputs now, those of the weights later, nothing computed twice.

    found, parts = backward_inputs(made, given, gradient)
    backward_weights(parts)

Autograd's graph branches at operations with weights: one way leads on to the input, the other only to parameters. The
first half goes the ways to the input and keeps, at each branch, the gradient that arrives there. The second half goes
from each branch to its parameters.

    loss - linear - relu - linear - given          first half: along this line
              |               |
            weights         weights                second half: from the line down
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class WeightPart(NamedTuple):
    """An operation whose weights wait for their gradients, and the gradients of what it made, where there are any."""

    edges: tuple[GradientEdge, ...]
    gradients: tuple[Tensor, ...]
    weights: tuple[Tensor, ...] = ()  # none: all that can be reached


def backward_inputs(made: Tensor, given: Tensor, gradient: Tensor | None) -> tuple[Tensor, list[WeightPart]]:
    """The gradient of `given`, a leaf, and what is left to do.

    A parameter that two operations use, one after the other, cannot be told apart: then the second half is the whole
    backward pass, as if there had been no first.
    """
    start = torch.ones_like(made) if gradient is None else gradient
    root = made.grad_fn
    assert root is not None
    weights = _branches(root, get_gradient_edge(given).node)
    everything = [one for some in weights.values() for one in some]
    if len({id(one) for one in everything}) < len(everything):
        (found,) = torch.autograd.grad(made, [given], start, retain_graph=True, allow_unused=True)
        whole = WeightPart((get_gradient_edge(made),), (start,), tuple({id(one): one for one in everything}.values()))
        return torch.zeros_like(given) if found is None else found, [whole]
    arrived: dict[Node, tuple[Tensor | None, ...]] = {}
    hooks = [node.register_prehook(_keep(arrived, node)) for node in weights]
    try:
        (found,) = torch.autograd.grad(made, [given], start, retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    if root in weights and root not in arrived:  # no way leads to the input
        arrived[root] = (start,)
    parts = []
    for node, gradients in arrived.items():
        known = {at: one for at, one in enumerate(gradients) if one is not None}
        edges = tuple(GradientEdge(node, at) for at in known)
        parts.append(WeightPart(edges, tuple(known.values()), tuple(weights[node])))
    return torch.zeros_like(given) if found is None else found, parts


def backward_weights(parts: Sequence[WeightPart]) -> None:
    """Adds the gradients of the weights to those that are there."""
    for edges, gradients, weights in parts:
        torch.autograd.backward(edges, gradients, inputs=weights or None)


def _keep(arrived: dict[Node, tuple[Tensor | None, ...]], node: Node) -> Callable[[Any], None]:
    def keep(gradients: tuple[Tensor | None, ...]) -> None:
        arrived[node] = gradients

    return keep


def _branches(root: Node, end: Node) -> dict[Node, list[Tensor]]:
    """The nodes at which a way to the end and a way to nothing but parameters part, each with these parameters."""
    order, next_ones = _in_order(root)
    leads = {end}
    for node in order:  # what comes after a node stands before it here
        if any(one in leads for one in next_ones[node]):
            leads.add(node)
    found: dict[Node, list[Tensor]] = {}
    for node in reversed(order):
        aside = [one for one in next_ones[node] if one not in leads]
        if node in leads and aside:
            found[node] = _leaves(aside, next_ones)
    return found if root in leads else {root: _leaves([root], next_ones)}


def _in_order(root: Node) -> tuple[list[Node], dict[Node, list[Node]]]:
    """All nodes, each behind those that it leads to, and what it leads to."""
    next_ones: dict[Node, list[Node]] = {}
    order: list[Node] = []
    stack = [(root, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append(node)
        elif node not in next_ones:
            next_ones[node] = [one for one, _ in node.next_functions if one is not None]
            stack.append((node, True))
            stack += [(one, False) for one in next_ones[node]]
    return order, next_ones


def _leaves(nodes: Sequence[Node], next_ones: dict[Node, list[Node]]) -> list[Tensor]:
    """The parameters that can be reached from these."""
    found, seen, stack = [], set(nodes), list(nodes)
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)  # of a leaf
        if isinstance(variable, Tensor):
            found.append(variable)
        new = [one for one in next_ones[node] if one not in seen]
        seen.update(new)
        stack += new
    return found
