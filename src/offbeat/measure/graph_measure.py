"""The graph of a recipe's model, with measured times and bytes of every operation of one microbatch.

    measured_graph(config, samples)  -> ModelGraph, and how the graph was found

The graph is that of torch.fx (a node is a module of torch.nn or a function), where fx cannot trace the model that of
torch.export (a node is an operation), and else the modules of an nn.Sequential in order. Each node is computed by
itself, on the values it gets in the model: forward, then the gradients of its inputs and parameters. What has no tensor
as its result, such as a shape, is no node. The loss is the last node.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from offbeat.errors import RequestError
from offbeat.measure.child_requests import error_text
from offbeat.measure.compute_learner import ComputeLearner
from offbeat.parallel.model_pieces import by_sequence
from offbeat.pipelines.model_graph import GraphNode, ModelGraph
from offbeat.train.config import Config

WARM_UP = 1


def _by_export(model: nn.Module, inputs: Any) -> fx.GraphModule:
    exported: fx.GraphModule = torch.export.export(model, (inputs,)).module()
    return exported


WAYS: dict[str, Callable[[nn.Module, Any], fx.GraphModule]] = {
    "torch.fx": lambda model, inputs: fx.symbolic_trace(model),
    "torch.export": _by_export,
    "modules in order": lambda model, inputs: fx.GraphModule(model, by_sequence(model)),
}


def traced(model: nn.Module, inputs: Any) -> tuple[fx.GraphModule, str]:
    """The model as a graph, and by which way; a `RequestError` where there is none."""
    failed = []
    for way, trace in WAYS.items():
        try:
            return trace(model, inputs), way
        except Exception as error:  # whatever the model does that cannot be traced
            failed.append(f"{way}: {error_text(error)[:120]}")
    raise RequestError(f"the model cannot be traced as a graph ({'; '.join(failed)})")


def measured_graph(config: Config, samples: int, repeats: int = 5) -> tuple[ModelGraph, str]:
    """Of microbatches of so many samples."""
    learner = ComputeLearner(config)
    inputs, targets = learner.batch(samples)
    module, way = traced(learner.model, inputs)
    meter = _Meter(module, learner, repeats)
    with torch.no_grad():
        output = meter.run(inputs)
    last = meter.node_of[meter.result] if meter.result is not None else None
    meter.measure("loss", lambda given: learner.task.loss(given, targets), (output,), {}, [last], [])
    return meter.model_graph(config.name), way


class _Meter(fx.Interpreter):
    """Computes a graph node by node, and keeps what each took."""

    def __init__(self, module: fx.GraphModule, learner: ComputeLearner, repeats: int) -> None:
        super().__init__(module)
        self.learner, self.repeats = learner, repeats
        # With one thread on a CPU its own time is taken: what else the machine does is left out.
        alone = learner.device.type == "cpu" and torch.get_num_threads() == 1
        self.clock: Callable[[], float] = time.process_time if alone else time.perf_counter
        self.nodes: list[GraphNode] = []
        self.edges: list[tuple[int, int]] = []
        self.node_of: dict[fx.Node, int | None] = {}
        self.learnt: set[int] = set()  # nodes whose output has a gradient
        self.kept: set[int] = set()  # nodes whose output is kept for backward
        self.counted: set[int] = set()  # parameters that some node has already
        self.result: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.op == "output":
            found = [node for node in n.all_input_nodes if self.node_of.get(node) is not None]
            self.result = found[-1] if found else None
            return super().run_node(n)
        if n.op in ("placeholder", "get_attr"):
            self.node_of[n] = None
            return super().run_node(n)
        value = super().run_node(n)
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
            self.node_of[n] = None  # a shape, a number
            return value
        if n.op == "call_module":
            target = self.fetch_attr(str(n.target))
            parameters = list(target.parameters())
        else:
            target = n.target if n.op == "call_function" else _method(str(n.target))
            attributes = [self.fetch_attr(str(one.target)) for one in n.all_input_nodes if one.op == "get_attr"]
            parameters = [one for one in attributes if isinstance(one, nn.Parameter)]
        sources = [self.node_of.get(one) for one in n.all_input_nodes]
        name = f"{n.target} {type(target).__name__}" if n.op == "call_module" else n.name
        self.node_of[n] = self.measure(name, target, args, kwargs, sources, parameters)
        return value

    def measure(
        self,
        name: str,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        sources: list[int | None],
        parameters: list[nn.Parameter],
    ) -> int:
        """Add a node, and edges from its sources."""
        number = len(self.nodes)
        known = sorted({source for source in sources if source is not None})
        trained = [one for one in parameters if one.requires_grad]
        learns = any(source in self.learnt for source in known)
        times = [self._pass(function, args, kwargs, trained, learns) for _ in range(WARM_UP + self.repeats)][WARM_UP:]
        output, saved, takes_input = times[-1][2:]
        own = sum(_bytes(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        new = [one for one in trained if id(one) not in self.counted]
        times_before = sum(node.name == name or node.name.startswith(f"{name} #") for node in self.nodes)
        self.counted.update(map(id, new))
        if takes_input:
            self.kept.update(known)
        if learns or trained:
            self.learnt.add(number)
        self.nodes.append(
            GraphNode(
                f"{name} #{times_before + 1}" if times_before else name,
                statistics.median(one[0] for one in times),
                statistics.median(one[1] for one in times),
                sum(_bytes(one) for one in new),
                saved,
                own,
            )
        )
        self.edges += [(source, number) for source in known]
        return number

    def _pass(
        self, function: Callable[..., Any], args: Any, kwargs: Any, parameters: list[nn.Parameter], learns: bool
    ) -> tuple[float, float, Any, int, bool]:
        """Seconds forward and backward, the output, bytes kept beside inputs, and whether inputs are kept."""
        leaves: list[Tensor] = []
        storages: set[int] = set()

        def fresh(value: Any) -> Any:
            """A copy that has a gradient if the model's has one: a node may write into it."""
            if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
                return value
            copy = value.detach().clone()
            if learns and copy.is_floating_point():
                leaf = copy.requires_grad_()
                leaves.append(leaf)
                copy = leaf.clone()
            storages.add(copy.untyped_storage()._cdata)
            return copy

        held: dict[int, int] = {}
        own = {one.untyped_storage()._cdata for one in parameters}

        def keep(value: Tensor) -> Tensor:
            held[value.untyped_storage()._cdata] = value.untyped_storage().nbytes()
            return value

        with torch.enable_grad():
            args, kwargs = tree_map(fresh, args), tree_map(fresh, kwargs)
            self.learner.wait()
            start = self.clock()
            hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value)
            with self.learner.precision.computing(), hooks:
                output = function(*args, **kwargs)
            self.learner.wait()
            turned = self.clock()
            ends = [one for one in tree_leaves(output) if isinstance(one, Tensor) and one.requires_grad]
            if ends:
                ones = [torch.ones_like(one) for one in ends]
                turned_again = self.clock()
                torch.autograd.grad(ends, [*leaves, *parameters], ones, allow_unused=True)
                self.learner.wait()
                backward_s = self.clock() - turned_again
            else:
                backward_s = 0.0
        saved = sum(size for place, size in held.items() if place not in own and place not in storages)
        return turned - start, backward_s, output, saved, any(place in storages for place in held)

    def model_graph(self, name: str) -> ModelGraph:
        """An output that others keep is kept once, by the node that made it."""
        nodes = (
            node._replace(kept_bytes=node.kept_bytes + node.output_bytes) if at in self.kept else node
            for at, node in enumerate(self.nodes)
        )
        return ModelGraph(name=name, nodes=tuple(nodes), edges=tuple(self.edges))


def _method(name: str) -> Callable[..., Any]:
    return lambda value, *args, **kwargs: getattr(value, name)(*args, **kwargs)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
