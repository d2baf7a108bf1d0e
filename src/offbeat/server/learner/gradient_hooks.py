"""The model's side of a learner: gradients leave layer by layer, and a minibatch can be cancelled in its midst.

Laws:
- Between `begin` and `finish`, `abandon` or `end` the hooks are armed; at any other time they do nothing, so that
  evaluation and backwards of the user's own are left alone.
- After `finish`, what was filled equals the gradients as they are now, whatever was done to them since backward.
- After `abandon`, parameters, gradients and buffers are as before `begin`. What a model keeps elsewhere (attributes
  that are no buffers, the state of random generators) is not put back.
- What torch.compile traces sees hooks that do nothing: they neither break its graph nor make it compile again.

This file knows nothing of servers, policies or memory: these are behind `GradientSink`. On a GPU that is called from
autograd's own thread for the device; autograd carries `Cancelled` from there to the caller of backward, as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from offbeat.errors import RequestError
from offbeat.server.sparse_rows import dense_of

COMPARED = 16  # elements of a gradient that are compared in `finish`
NAMED = 3  # names in a note, before "and 9 more"

COMPILED = "compiled"
SCRIPTED = "a ScriptModule"

# Modules that hold others and are never called themselves.
HOLDERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class Cancelled(BaseException):
    """Raised inside forward or backward of a minibatch that is not wanted any more.

    No `Exception`: code that forgives errors in a forward must not forgive this one.
    """


class GradientSink(Protocol):
    """Where gradients are copied to: a `PushMode`, or what a test puts in its place."""

    def fill(self, index: int, gradient: Tensor) -> None:
        """Copy a gradient to where it is pushed from; called again when the gradient has changed: the last call counts.

        It gets gradients as they are, on their device, sparse ones as dense ones but for those of `rows`.
        """

    def is_unchanged(self, index: int, gradient: Tensor) -> bool:
        """Whether a gradient that seems to be as it was filled is so."""
        return True

    def is_cancelled(self) -> bool:
        """Whether the minibatch is cancelled: asked before each forward and at each gradient, it must be cheap."""


class FilledGradient(NamedTuple):
    """A gradient as it was when it was filled. It is held, so that no other can come to lie at its address."""

    gradient: Tensor
    version: int
    address: int
    sample: Tensor

    def fits(self, gradient: Tensor) -> bool:
        return gradient is self.gradient and gradient._version == self.version and gradient.data_ptr() == self.address


class BufferSnapshot:
    """Buffers of a model as they are now: which ones each module has, and what is in them.

    Contents are copied whether torch counted a change or not: batch norm changes its statistics uncounted.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tables = [  # a module's own one, and a copy
            (module._buffers, dict(module._buffers))
            for module in model.modules()
            if not isinstance(module, torch.jit.ScriptModule)  # its tables are C++'s
        ]
        self._contents = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if _is_writable(buffer)]

    @torch.no_grad()
    def restore(self) -> None:
        for table, before in self._tables:
            table.clear()
            table.update(before)
        for buffer, content in self._contents:
            buffer.copy_(content)


class Hook:
    """What torch calls. A copy of it (with a model that is copied or saved) is a function that does nothing."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __call__(self, *given: object) -> None:
        if not torch.compiler.is_compiling():  # a constant to who traces: nothing below is seen
            self.call(*given)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return partial, (_do_nothing,)


class Hooks:
    """Hooks on the modules of `model` and on `parameters`, which stand in the order of the flat vector.

    Gradients go to the sink, and it says whether the minibatch at hand is cancelled; `interrupts` is whether that ends
    it (a user's block may be left before the step). With `keeps_buffers`, buffers are saved at `begin`, for `abandon`.
    The sink takes sparse gradients of the parameters in `rows` as they are.

    `notes` say, in words, how coarsely a cancel acts where it does not act at every layer.

        hooks.begin()
        try:
            loss_of(model(batch)).backward()
        except Cancelled:
            hooks.abandon()
        else:
            unused = hooks.finish()
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        sink: GradientSink,
        *,
        keeps_buffers: bool,
        rows: Collection[int] = (),
    ) -> None:
        modules = tuple(_visible_modules(model))
        _check(model, modules, parameters)
        self.notes = _notes(modules, parameters)
        self.interrupts = False
        self._model = model
        self._parameters = tuple(parameters)
        self._sink = sink
        self._rows = rows
        self._keeps_buffers = keeps_buffers
        self._armed = False
        self._filled: dict[int, FilledGradient] = {}
        self._buffers: BufferSnapshot | None = None
        self._places: dict[tuple[int, torch.device], Tensor] = {}
        for _, module, kind in modules:
            self._hook(module, kind)
        for index, parameter in enumerate(self._parameters):
            register: Callable[[Hook], object] = parameter.register_post_accumulate_grad_hook
            register(Hook(partial(self._accumulated, index)))

    def begin(self) -> None:
        """A minibatch begins. Once more before its end, it goes on: what was filled and saved stays."""
        self.interrupts = True
        if self._armed:
            return
        self._buffers = BufferSnapshot(self._model) if self._keeps_buffers else None
        self._armed = True

    def finish(self) -> tuple[int, ...]:
        """The step: what was filled is made equal to the gradients of now; which parameters have none.

        Seen are other tensors in `.grad`, every change that torch counts, and every rescaling, counted or not
        (GradScaler.unscale_ is not counted). A change of *some elements* by way of `.grad.data` or numpy leaves no
        trace: it is seen if the sink's `is_unchanged`, which is asked of all that seem to be as they were, sees it.
        What was changed so and changed back before the step may have been sent to another host in between.
        """
        unused: list[int] = []
        same: dict[int, FilledGradient] = {}
        for index, parameter in enumerate(self._parameters):
            gradient, filled = parameter.grad, self._filled.get(index)
            if gradient is None:
                unused.append(index)
            elif filled is None or not filled.fits(gradient):
                self._fill(index, gradient)
            else:
                same[index] = filled
        doubtful = set(self._doubtful(same))
        for index, filled in same.items():
            if index in doubtful or not self._sink.is_unchanged(index, filled.gradient):
                self._fill(index, filled.gradient)
        self.end()
        return tuple(unused)

    def abandon(self) -> None:
        """After a cancel: gradients are None, and buffers are as they were at `begin`."""
        for parameter in (*self._parameters, *self._model.parameters()):
            parameter.grad = None
        if self._buffers is not None:
            self._buffers.restore()
        self.end()

    def end(self) -> None:
        """The minibatch is over, in whatever way."""
        self._armed = False
        self._buffers = None
        self._filled.clear()

    # --- what the hooks do ----------------------------------------------------------------------------------------

    def _hook(self, module: nn.Module, kind: str | None) -> None:
        if kind == SCRIPTED:
            return
        inner, check = module._compiled_call_impl, Hook(self._check_cancelled)
        if inner is None:
            module.register_forward_pre_hook(check)
            return
        # `module.compile()` compiles the calling of hooks too, so that one which acts must stand outside of that.

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            check()
            return inner(*args, **kwargs)

        module._compiled_call_impl = wrapper

    def _check_cancelled(self, *_: object) -> None:
        if self._armed and self.interrupts and self._sink.is_cancelled():
            raise Cancelled

    def _accumulated(self, index: int, parameter: Tensor) -> None:
        if not self._armed:
            return
        self._check_cancelled()
        gradient = parameter.grad
        self._filled.pop(index, None)
        # A sparse gradient has no one address to compare: `finish` fills it.
        if gradient is not None and gradient.layout is torch.strided and gradient.numel():
            self._fill(index, gradient)
            sample = self._sample(gradient)
            self._filled[index] = FilledGradient(gradient, gradient._version, gradient.data_ptr(), sample)

    def _fill(self, index: int, gradient: Tensor) -> None:
        if gradient.requires_grad:  # backward(create_graph=True): the copy is no part of the graph
            gradient = gradient.detach()
        is_taken = gradient.layout is torch.strided or index in self._rows
        self._sink.fill(index, gradient if is_taken else dense_of(gradient))

    def _sample(self, gradient: Tensor) -> Tensor:
        key = gradient.numel(), gradient.device
        places = self._places.get(key)
        if places is None:
            spread = [place * gradient.numel() // COMPARED for place in range(COMPARED)]
            places = self._places[key] = torch.tensor(spread, device=gradient.device)
        return torch.take(gradient.detach(), places)

    def _doubtful(self, filled: Mapping[int, FilledGradient]) -> Iterator[int]:
        """Those whose gradient may have been multiplied by something without torch counting it.

        A finite element other than zero tells; where the sample has none, nothing is known. One answer is awaited for
        each device and type, not one for each gradient.
        """
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, one in filled.items():
            groups.setdefault((one.sample.device, one.sample.dtype), []).append(index)
        for group in groups.values():
            before = torch.stack([filled[index].sample for index in group])
            now = torch.stack([self._sample(filled[index].gradient) for index in group])
            telling = ((before != 0) & before.isfinite()).any(1)
            same = ((before == now).all(1) & telling).tolist()
            yield from (index for index, is_same in zip(group, same, strict=True) if not is_same)


def _do_nothing(*_: object) -> None:
    """Nothing. What a hook becomes in a copy of a model."""


# --- what a model is made of ------------------------------------------------------------------------------------------

VisibleModule = tuple[str, nn.Module, str | None]  # name, module, and why nothing inside of it is hooked


def _visible_modules(model: nn.Module) -> Iterator[VisibleModule]:
    """Every module outside of compiled and scripted ones, those themselves included."""
    seen: set[nn.Module] = set()

    def walk(name: str, module: nn.Module) -> Iterator[VisibleModule]:
        if module in seen:
            return
        seen.add(module)
        kind = _kind(module)
        yield name, module, kind
        if kind is None:
            for child, inner in module.named_children():
                yield from walk(f"{name}.{child}" if name else child, inner)

    return walk("", model)


def _kind(module: nn.Module) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        return SCRIPTED
    if module._compiled_call_impl is not None:  # module.compile()
        return COMPILED
    # torch.compile(module), or of its forward; torch.compiler.disable leaves the same mark, and one more.
    forward = module.forward
    compiled = hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")
    return COMPILED if compiled else None


def _check(model: nn.Module, modules: Sequence[VisibleModule], parameters: Sequence[nn.Parameter]) -> None:
    for name, module, _ in modules:
        if isinstance(module, DistributedDataParallel):
            raise RequestError(
                f"{_called(name)} is wrapped in DistributedDataParallel, which reduces gradients itself and would "
                "hang after a cancelled backward; pass the module inside it (`.module`)"
            )
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise RequestError(
                f"{_called(name)} is wrapped in DataParallel on {len(module.device_ids)} devices, whose threads cannot "
                "be cancelled; pass the module inside it (`.module`), and run one learner per device"
            )
    names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    first: dict[int, int] = {}
    for index, parameter in enumerate(parameters):
        name = names.get(id(parameter), "not of this model")
        if not parameter.requires_grad or not parameter.is_leaf:
            what = (
                "requires no gradient" if not parameter.requires_grad else "is computed from other tensors (not a leaf)"
            )
            raise RequestError(f"parameter {index} ({name}) {what}; pass only parameters that are trained")
        if first.setdefault(id(parameter), index) != index:
            raise RequestError(
                f"parameter {index} ({name}) is the same as parameter {first[id(parameter)]}; pass it only once"
            )


def _notes(modules: Sequence[VisibleModule], parameters: Sequence[nn.Parameter]) -> tuple[str, ...]:
    compiled = [_called(name) for name, _, kind in modules if kind == COMPILED]
    scripted = [_called(name) for name, _, kind in modules if kind == SCRIPTED]
    is_one = all(isinstance(module, HOLDERS) for name, module, _ in modules if name) and not (compiled or scripted)
    devices = sorted({parameter.device.type for parameter in parameters} - {"cpu"})
    notes = (
        (
            compiled,
            f"compiled: {_listed(compiled)}; a cancellation takes effect only before its forward, and in backward "
            "only when the gradients of the whole module are ready",
        ),
        (
            scripted,
            f"a ScriptModule: {_listed(scripted)}; its forward cannot be interrupted, so a cancellation takes "
            "effect in the modules around it and, in backward, at each parameter",
        ),
        (
            is_one,
            "the model calls no submodules, so a cancellation takes effect at the start of its forward and, in "
            "backward, at each parameter",
        ),
        (
            devices,
            f"parameters on {' and '.join(devices)}: the device still completes the work that was queued before a "
            "cancellation",
        ),
    )
    return tuple(note for holds, note in notes if holds)


def _called(name: str) -> str:
    return f"'{name}'" if name else "the model"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _is_writable(buffer: Tensor) -> bool:
    """Not so: expanded ones, whose elements share memory, and those made in inference mode. Neither can change."""
    repeats = any(stride == 0 and length > 1 for stride, length in zip(buffer.stride(), buffer.shape, strict=True))
    return not repeats and not buffer.is_inference()
