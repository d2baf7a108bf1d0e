"""Which layer is being computed: hooks on a model, for whoever times or counts.

A layer is a module with parameters of its own. Forward, it begins when it is called and goes on until the next one is:
what has no parameters (an activation) counts to the layer before it. Backward is seen from the last to the first: a
layer goes on from the moment at which the gradients of the one behind it are there to the one at which its own are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

Parameters = list[nn.Parameter]


def layers_in(model: nn.Module) -> dict[str, Parameters]:
    """The parameters that are trained, by layer; those of the model itself stand under its class.

    Weights that two layers share are the first one's: the second is no layer then.
    """
    found: dict[str, Parameters] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = [one for one in module.parameters(recurse=False) if one.requires_grad and id(one) not in seen]
        if own:
            found[name or type(model).__name__] = own
            seen.update(map(id, own))
    return found


@contextmanager
def layer_hooks(
    model: nn.Module,
    layers: Mapping[str, Parameters],
    begun: Callable[[str], None],
    ready: Callable[[str], None],
) -> Iterator[None]:
    """`begun(layer)` when its forward begins, `ready(layer)` when one of its gradients is there."""

    def calling(tell: Callable[[str], None], name: str) -> Callable[..., None]:
        return lambda *_: tell(name)

    hooks: list[Any] = []
    modules = {name or type(model).__name__: module for name, module in model.named_modules()}
    try:
        for name, own in layers.items():
            hooks.append(modules[name].register_forward_pre_hook(calling(begun, name)))
            for one in own:
                hooks.append(one.register_post_accumulate_grad_hook(calling(ready, name)))  # type: ignore[no-untyped-call] # torch's own
        yield
    finally:
        for hook in hooks:
            hook.remove()
