"""What a training step computes, counted without computing it: FLOPs, memory traffic and what is kept, by layer.

    counted(task, samples, dtype)  -> StepCounts

The step runs on tensors that have shapes and no memory (torch's fake tensors), so that any model and minibatch can be
counted on any machine. FLOPs are those of `torch.utils.flop_counter`: an addition and a multiplication are two; only
matrix products, convolutions and attention count. Traffic is every operation's inputs and outputs, once each; kernels
that are known to read their input again count it again. What is computed under autocast is counted so, casts included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader
from torch.utils.flop_counter import flop_registry

from offbeat.measure.layer_hooks import layer_hooks, layers_in
from offbeat.predict.roofline import Operation
from offbeat.train.tasks import Task, collate_of

_ATEN = torch.ops.aten
_FLASH = "_scaled_dot_product_flash_attention"
# The attention of a CPU, which torch's counter leaves out, counts as that of a GPU.
_FLOPS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    getattr(_ATEN, f"{_FLASH}_for_cpu"): flop_registry[getattr(_ATEN, _FLASH)],
    getattr(_ATEN, f"{_FLASH}_for_cpu_backward"): flop_registry[getattr(_ATEN, f"{_FLASH}_backward")],
}
# How often the inputs are read, where it is not once, and the kernels that it takes.
_READS = {
    "native_batch_norm": (2.0, 2),  # for the statistics, and to normalise
    "_native_batch_norm_legit": (2.0, 2),
    "native_batch_norm_backward": (2.0, 2),
    "convolution_backward": (1.5, 2),  # the gradients of weights and of inputs, each from the output's
}
_FREE = ("empty", "new_empty", "_unsafe_view", "detach", "alias", "lift_fresh", "_local_scalar_dense")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCounts:
    """One layer, of a whole minibatch."""

    name: str
    parameters: int
    forward_flops: int
    backward_flops: int
    kept_bytes: int  # of activations, from forward to backward


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Forward and backward of a minibatch."""

    samples: int
    layers: tuple[LayerCounts, ...]  # in the order of forward
    operations: tuple[Operation, ...]

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def forward_flops(self) -> int:
        return sum(layer.forward_flops for layer in self.layers)

    @property
    def flops(self) -> int:
        return self.forward_flops + sum(layer.backward_flops for layer in self.layers)


def counted(task: Task, samples: int, dtype: torch.dtype = torch.float32) -> StepCounts:
    """Of a minibatch of so many samples. A `dtype` that is not float32 is computed by autocast."""
    loader: Any = DataLoader(task.train, batch_size=1, sampler=[0], collate_fn=collate_of(task.train))
    one = next(iter(loader))  # its shapes are those of all
    with FakeTensorMode():
        inputs, targets = tree_map(lambda part: _many(part, samples) if isinstance(part, Tensor) else part, one)
        model = task.build()
        counter = _Counter(model)
        autocast = torch.autocast("cpu", dtype=dtype) if dtype != torch.float32 else nullcontext()
        with layer_hooks(model, counter.layers, counter.begun, counter.ready), counter:
            with torch.autograd.graph.saved_tensors_hooks(counter.keep, lambda part: part), autocast:
                loss = task.loss(model(inputs), targets)
            counter.turn()
            loss.backward()  # type: ignore[no-untyped-call] # torch's own
        counter.end()
    return counter.result(samples)


def _many(part: Tensor, samples: int) -> Tensor:
    return torch.empty((samples, *part.shape[1:]), dtype=part.dtype)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's own
    """Sees every operation that torch carries out, and knows the layer by its hooks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's own
        self.layers = layers_in(model)
        self._layer = next(iter(self.layers))  # forward: the one that has begun last; backward: the one that was ready
        self._order: list[str] = []
        self._is_backward = False
        self._since: list[Operation] = []  # backward: until it is known whose they are
        self._operations: list[Operation] = []
        self._kept: dict[str, int] = dict.fromkeys(self.layers, 0)
        self._stored: dict[int, Any] = {
            one.untyped_storage()._cdata: one for one in (*model.parameters(), *model.buffers())
        }

    # --- where it is ------------------------------------------------------------------------------------------------

    def begun(self, layer: str) -> None:
        self._layer = layer
        if layer not in self._order:
            self._order.append(layer)

    def turn(self) -> None:
        self._is_backward = True

    def ready(self, layer: str) -> None:
        self._layer = layer
        self._operations += [one._replace(layer=layer) for one in self._since]
        self._since = []

    def end(self) -> None:
        """What comes after the last gradient (of the inputs, of shared weights) is that layer's too."""
        self.ready(self._layer)

    # --- what is done -----------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        name = func._schema.name.rpartition("::")[2]
        if not func.is_view and name not in _FREE and next(_tensors(found), None) is not None:
            self._count(func, name, args, kwargs, found)
        return found

    def _count(self, func: Any, name: str, args: Any, kwargs: Any, found: Any) -> None:
        formula = _FLOPS.get(func._overloadpacket)
        reads, kernels = _READS.get(name, (1.0, 1))
        traffic = reads * _bytes((args, kwargs)) + _bytes(found)
        flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=found))
        operation = Operation(self._layer, self._is_backward, flops, int(traffic), kernels)
        (self._since if self._is_backward else self._operations).append(operation)

    def keep(self, tensor: Tensor) -> Tensor:
        """A tensor that backward will need; memory that two of them share counts once."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._stored:
            self._stored[storage._cdata] = tensor
            self._kept[self._layer] += storage.nbytes()
        return tensor

    def result(self, samples: int) -> StepCounts:
        sums = {name: [0, 0] for name in self.layers}
        for one in self._operations:
            sums[one.layer][one.is_backward] += one.flops
        order = [*self._order, *(name for name in self.layers if name not in self._order)]
        return StepCounts(
            samples=samples,
            layers=tuple(
                LayerCounts(
                    name=name,
                    parameters=sum(one.numel() for one in self.layers[name]),
                    forward_flops=sums[name][0],
                    backward_flops=sums[name][1],
                    kept_bytes=self._kept[name],
                )
                for name in order
            ),
            operations=tuple(self._operations),
        )


def _bytes(values: Any) -> int:
    return sum(one.numel() * one.element_size() for one in _tensors(values))


def _tensors(values: Any) -> Iterator[Tensor]:
    yield from (one for one in tree_leaves(values) if isinstance(one, Tensor))
