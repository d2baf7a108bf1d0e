"""Activation checkpointing by block: activations inside a block are computed again in backward, not kept.

Chen et al. 2016, https://arxiv.org/abs/1604.06174. The blocks are those that a model repeats (ResNet's blocks, a
transformer's layers): the children of the nn.Sequential or nn.ModuleList that divides it into the most parts, and all
other modules of their class. A plain nn.Sequential of layers is cut into about as many pieces as each of them has
layers.

Laws: names of parameters and buffers stay. The second computing draws the same random numbers (dropout) and leaves the
running statistics of norms alone. This file knows nothing of trainers or devices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offbeat.errors import RequestError
from offbeat.train.tasks import Task


def recomputing(task: Task) -> Task:
    """The same task, whose models keep only what enters their blocks."""
    return replace(task, build=partial(_build, task.build))


def _build(build: Any) -> nn.Module:
    model: nn.Module = build()
    recompute_blocks(model)
    return model


def recompute_blocks(model: nn.Module) -> int:
    """From now on the model's blocks are computed again in backward; how many there are. RequestError: it has none."""
    found = max(_containers(model), key=_parts, default=None)
    if found is None or _parts(found) < 1:
        raise RequestError(
            "train.recompute: the model has no nn.Sequential or nn.ModuleList of several blocks to compute again"
        )
    counts = {child: _layers(child) for child in found.children()}
    composed = [child for child, layers in counts.items() if layers > 1]
    if 2 * len(composed) > sum(layers > 0 for layers in counts.values()):
        kind = Counter(map(type, composed)).most_common(1)[0][0]
        blocks = list(_outermost(model, kind))
        recomputed = _as_block(kind)
        for block in blocks:
            block.__class__ = recomputed
        return len(blocks)
    if not isinstance(found, nn.Sequential):
        raise RequestError("train.recompute: the model's nn.ModuleList holds single layers: there is nothing to gain")
    found.__class__ = _as_pieces(type(found))
    return len(_pieces(found))


def _containers(model: nn.Module) -> Iterator[nn.Module]:
    return (one for one in model.modules() if isinstance(one, (nn.Sequential, nn.ModuleList)))


def _layers(module: nn.Module) -> int:
    """Modules with parameters of their own."""
    return sum(any(True for _ in one.parameters(recurse=False)) for one in module.modules())


def _parts(container: nn.Module) -> int:
    """Layers beside those of the largest child: few where one child holds nearly all."""
    counts = [_layers(child) for child in container.children()]
    return sum(counts) - max(counts, default=0)


def _outermost(module: nn.Module, kind: type[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        if type(child) is kind:
            yield child
        else:
            yield from _outermost(child, kind)


# --- computing twice ------------------------------------------------------------------------------------------------


def _as_block(kind: type[nn.Module]) -> type[nn.Module]:
    """The same class, whose forward keeps nothing but what it is called with."""

    def forward(self: nn.Module, *given: Any, **named: Any) -> Any:
        return twice(partial(kind.forward, self), (self,), *given, **named)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _as_pieces(kind: type[nn.Sequential]) -> type[nn.Sequential]:
    """The same class, whose forward keeps only what enters each of its pieces."""

    def forward(self: nn.Sequential, value: Any) -> Any:
        for piece in _pieces(self):
            value = twice(partial(_run, piece), piece, value)
        return value

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _pieces(layers: nn.Sequential) -> list[list[nn.Module]]:
    """The children in as many runs as the root of how many have parameters. Each run but the first begins with one of
    these: a layer without may change its input in place, which is what is kept."""
    children = list(layers)
    starts = [at for at, child in enumerate(children) if _layers(child)]
    many = min(len(starts), max(2, math.isqrt(len(starts))))
    cuts = [0, *(starts[len(starts) * at // many] for at in range(1, many)), len(children)]
    return [children[start:end] for start, end in pairwise(cuts)]


def _run(layers: Sequence[nn.Module], value: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value


def twice(forward: Any, modules: Iterable[nn.Module], *given: Any, **named: Any) -> Any:
    """Computes now, and again in backward instead of keeping activations."""
    if torch.compiler.is_compiling():  # the compiler knows which of a graph's effects to leave out
        return checkpoint(forward, *given, use_reentrant=False, **named)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _statistics_kept(modules)

    return checkpoint(forward, *given, use_reentrant=False, context_fn=contexts, **named)


@contextmanager
def _statistics_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Norms count the batch in copies of their running statistics, which are thrown away."""
    norms = [
        norm
        for module in modules
        for norm in module.modules()
        if isinstance(norm, nn.modules.batchnorm._NormBase) and norm.training
    ]
    before = [dict(norm._buffers) for norm in norms]
    for norm in norms:
        norm._buffers |= {name: one.clone() for name, one in norm._buffers.items() if one is not None}
    try:
        yield
    finally:
        for norm, buffers in zip(norms, before, strict=True):
            norm._buffers |= buffers
