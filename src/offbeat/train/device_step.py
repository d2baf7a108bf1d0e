"""One learner's step on its device: passes into a flat gradient, then an update that is decided on the device.

    pass      forward and backward of one minibatch; its gradient replaces the last one, or is added to it
    update    the norm, whether all is finite, the clip, the loss scale, the optimizer

Nothing in them waits for the device, so both can be captured in a CUDA graph and replayed. Between the two the gradient
may be reduced over several learners: then it lies in one flat tensor. The gradient of a learner alone stays where a
captured pass has computed it, which saves a copy.

Laws. A step that is replayed computes what it would have computed eagerly: what changes from step to step (learning
rate, loss scale, weight of the minibatch, samples, seed) is read from tensors that are filled before; a change of
anything else that was captured (weight decay, momentum) leads to a new capture. A minibatch of another shape is
computed eagerly. An update whose gradient is not finite changes nothing but the loss scale, and is counted.

This file knows nothing of learners, strategies or where samples come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.errors import RequestError
from offbeat.train.precision import Precision, Scaler

Loss = Callable[[Any, Any], Tensor]
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # these leave an update out on the device
WARM_UP = 3  # passes before a capture: libraries choose their algorithms and take their memory


class DeviceStep:
    """See the module's text.

    step.add(inputs, targets, weight=1.0, first=True)    -> the mean loss, a tensor of its own
    step.update(lr, samples=64)                          -> nothing is waited for
    step.lost                                            -> samples of updates that were left out; waits for the device

    forward     computes the mean loss of a minibatch, if not the model as it is: its compiled form
    captured    passes and updates are CUDA graphs
    other       computes the mean loss of minibatches of another shape than the first one, if not the model as it is
    reduced     the gradient is reduced between passes and updates: it lies in one flat tensor
    benchmark   cuDNN tries all algorithms for the first shape; for others, which come once an epoch, that takes longer
                than it saves
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        precision: Precision,
        *,
        clip_norm: float = 0.0,
        forward: Loss | None = None,
        captured: bool = False,
        other: Loss | None = None,
        reduced: bool = True,
        benchmark: bool = False,
    ) -> None:
        if type(optimizer) not in FUSED:
            raise RequestError(
                f"{type(optimizer).__name__} makes decisions on the host, so it cannot run in a device step"
            )
        self.model, self.optimizer, self.loss, self.precision = model, optimizer, loss, precision
        self.clip_norm, self.captured = clip_norm, captured
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        device = self.device = self.parameters[0].device
        self._flat: Tensor | None = None
        self._gradients: list[Tensor] = []  # of the parameters; empty until a captured pass has computed them
        if reduced or not captured:
            self._flat = self._new_flat()
            self._gradients = list(_views(self._flat, self.parameters))
        self.lr = torch.zeros((), device=device)
        self.scaler = precision.scaler
        self.scale = torch.tensor(1.0 if self.scaler is None else self.scaler.scale, device=device)
        self.good = torch.zeros((), device=device)  # updates in a row since the scale changed
        self._lost = torch.zeros((), device=device, dtype=torch.float64)
        self._samples = torch.ones((), device=device, dtype=torch.float64)  # of an update
        self._samples_are = 1
        self._weight = torch.ones((), device=device)
        self._weight_is = 1.0
        self._has_state = False
        self._found: Sequence[Tensor | None] = ()  # gradients of a pass that have no place yet
        self._passes: dict[tuple[Any, ...], _Captured] = {}
        self._updates: dict[tuple[Any, ...], torch.cuda.CUDAGraph] = {}
        self._shape: tuple[Any, ...] | None = None  # of the minibatches that are captured
        self._pool = torch.cuda.graph_pool_handle() if captured else None
        self._stream = torch.cuda.Stream(device) if captured else None  # type: ignore[no-untyped-call] # torch's own
        self._forward = forward or self._eager_loss
        self._other = other or self._eager_loss
        self._benchmark = benchmark
        self._adopt_state()
        self.bind()

    def _adopt_state(self) -> None:
        """What a checkpoint has brought lies where and as the parameters lie."""
        for parameter, state in self.optimizer.state.items():
            for name, one in state.items():
                if name == "step":
                    state[name] = torch.as_tensor(one, dtype=torch.float32).to(self.device)
                elif isinstance(one, Tensor) and one.stride() != parameter.stride():
                    state[name] = torch.empty_like(parameter).copy_(one)

    def bind(self) -> None:
        """The optimizer works on this step's gradient, with its learning rate and scale. Of several steps on the same
        parameters it is the one that was bound last."""
        if self._gradients:
            for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
                parameter.grad = gradient
        for group in self.optimizer.param_groups:
            group["lr"], group["fused"], group["foreach"] = self.lr, True, False
            if "capturable" in group:
                group["capturable"] = self.captured
        self.optimizer.grad_scale = self.scale  # type: ignore[attr-defined] # as torch's own scaler hands them over

    @property
    def gradient(self) -> Tensor:
        """Flat, to be reduced."""
        assert self._flat is not None, "a step that is not reduced keeps its gradient in pieces"
        return self._flat

    def read_gradient(self) -> Tensor:
        """A flat copy of the gradient, wherever it lies."""
        flat = self._new_flat()
        torch._foreach_copy_(list(_views(flat, self.parameters)), self._gradients)
        return flat

    def write_gradient(self, flat: Tensor) -> None:
        torch._foreach_copy_(self._gradients, list(_views(flat, self.parameters)))

    def _new_flat(self) -> Tensor:
        return torch.zeros(sum(p.numel() for p in self.parameters), device=self.device)

    @property
    def lost(self) -> int:
        return int(self._lost)

    # --- passes -----------------------------------------------------------------------------------------------------

    def add(self, inputs: Any, targets: Any, *, weight: float = 1.0, first: bool = True) -> Tensor:
        """Forward and backward: the gradient of `weight` times the mean loss is put in place of what was there, or, if
        it is not the `first`, added to it."""
        if weight != self._weight_is:
            self._weight.fill_(weight)
            self._weight_is = weight
        shape = shape_of((inputs, targets))
        self._shape = self._shape or shape
        if shape != self._shape:
            return self._pass(self._other, inputs, targets, first)
        if not self.captured:
            return self._first_shape(inputs, targets, first)
        key = (first, self.model.training)
        if key not in self._passes:
            self._passes[key] = self._capture_pass(inputs, targets, first)
        captured = self._passes[key]
        copy_into(captured.batch, (inputs, targets))
        captured.graph.replay()
        return captured.loss.clone()

    def _first_shape(self, inputs: Any, targets: Any, first: bool) -> Tensor:
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = self._benchmark
        try:
            return self._pass(self._forward, inputs, targets, first)
        finally:
            torch.backends.cudnn.benchmark = before

    def _eager_loss(self, inputs: Any, targets: Any) -> Tensor:
        return self.loss(self.model(inputs), targets)

    def _pass(self, forward: Loss, inputs: Any, targets: Any, first: bool) -> Tensor:
        with self.precision.computing():
            loss = forward(inputs, targets)
        with self.precision.differentiating():
            scaled = loss * (self._weight * self.scale)
            gradients = torch.autograd.grad(scaled, self.parameters, allow_unused=True)
        if self._gradients:
            self._put(gradients, first)
        else:
            self._found = gradients
        return loss.detach()

    def _put(self, gradients: Sequence[Tensor | None], first: bool) -> None:
        there = [(into, one) for into, one in zip(self._gradients, gradients, strict=True) if one is not None]
        if first and len(there) < len(gradients):
            torch._foreach_zero_(self._gradients)
        put = torch._foreach_copy_ if first else torch._foreach_add_
        put([into for into, _ in there], [one for _, one in there])

    def _capture_pass(self, inputs: Any, targets: Any, first: bool) -> _Captured:
        batch = clone_of((inputs, targets))
        with self.kept():
            self._on_stream(lambda: self._first_shape(batch[0], batch[1], first), WARM_UP)
        self._found = ()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            loss = self._first_shape(batch[0], batch[1], first)
            if self._found:
                others = [*self.parameters, *self.model.buffers(), *leaves_of(batch)]
                self._gradients = settled(self._found, self.parameters, others)
        self._found = ()
        self.bind()
        return _Captured(graph, batch, loss)

    def _on_stream(self, run: Callable[[], Any], times: int) -> None:
        """On the stream of captures, so that what libraries keep for a stream is there."""
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(times):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)

    # --- the update -------------------------------------------------------------------------------------------------

    def update(self, lr: float, *, samples: int = 1) -> None:
        """The optimizer's step with the gradient as it is, unless that is not finite: then its samples are lost."""
        if samples != self._samples_are:
            self._samples.fill_(samples)
            self._samples_are = samples
        if self.optimizer.param_groups[0]["lr"] is not self.lr:
            self.bind()
        self.lr.fill_(lr)
        if not self._gradients:  # an update before the first pass
            self._gradients = [torch.zeros_like(parameter) for parameter in self.parameters]
            self.bind()
        if not self._has_state:
            self._begin_state()
            self._has_state = True
        if not self.captured:
            self._update()
            return
        key = self._constants()
        if key not in self._updates:
            with self.kept():
                self._on_stream(self._update, 1)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                self._update()
            self._updates[key] = graph
        self._updates[key].replay()

    def _update(self) -> None:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(self._gradients)))
        bad = (~norm.isfinite()).float()
        if self.clip_norm:
            norm = norm / self.scale
            coefficient = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
            self.optimizer.grad_scale = self.scale / coefficient  # type: ignore[attr-defined] # see `bind`
        self.optimizer.found_inf = bad  # type: ignore[attr-defined] # see `bind`
        self.optimizer.step()
        self._lost += bad * self._samples
        if self.scaler is not None:
            self.good.add_(1).mul_(1 - bad)
            grown = self.good >= Scaler.GROWTH_STEPS
            factor = torch.where(bad > 0, 0.5, torch.where(grown, 2.0, 1.0))
            self.scale.mul_(factor).clamp_(Scaler.LOWEST, Scaler.HIGHEST)
            self.good.mul_(~grown)

    def _constants(self) -> tuple[Any, ...]:
        """What a captured update has of its own: a change means another capture."""
        groups = self.optimizer.param_groups
        return tuple((name, one) for group in groups for name, one in sorted(group.items()) if _is_constant(one))

    def _begin_state(self) -> None:
        """The optimizer's first step makes its state and is a step of another kind: as zeros it is there before."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
                if isinstance(self.optimizer, torch.optim.SGD):
                    names = ("momentum_buffer",) if group["momentum"] else ()
                elif "step" not in state:
                    state["step"] = torch.zeros((), device=self.device)
                for name in names:
                    if state.get(name) is None:
                        state[name] = torch.zeros_like(parameter)

    # --- state ------------------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[Tensor]:
        """All that a step changes."""
        self._begin_state()
        yield from self.parameters
        yield from self.model.buffers()
        for parameter in self.parameters:
            yield from (one for one in self.optimizer.state[parameter].values() if isinstance(one, Tensor))
        yield from self._gradients
        yield from (self.scale, self.good, self._lost, self.lr)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What is computed inside leaves no trace in weights, statistics, optimizer, scale or random numbers."""
        tensors = list(self.tensors())
        before = [one.detach().clone() for one in tensors]
        drawn = torch.get_rng_state()
        drawn_there = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        try:
            yield
        finally:
            with torch.no_grad():
                for one, was in zip(tensors, before, strict=True):
                    one.copy_(was)
            torch.set_rng_state(drawn)
            if drawn_there is not None:
                torch.cuda.set_rng_state(drawn_there, self.device)

    def load_scale(self, state: Mapping[str, float | int]) -> None:
        self.scale.fill_(float(state["scale"]))
        self.good.fill_(float(state["good"]))

    def scale_state(self) -> dict[str, float | int]:
        """Plain numbers, for a checkpoint; waits for the device."""
        return {} if self.scaler is None else {"scale": float(self.scale), "good": int(self.good)}


class _Captured:
    """A pass as a graph, with the batch that it reads and the loss that it writes."""

    def __init__(self, graph: torch.cuda.CUDAGraph, batch: tuple[Any, Any], loss: Tensor) -> None:
        self.graph, self.batch, self.loss = graph, batch, loss


def compiled_loss(model: nn.Module, loss: Loss, precision: Precision) -> Loss:
    """The mean loss of a minibatch, compiled; it draws the random numbers that eager code draws, so that both can be
    compared. Compiled when it is first called, in this precision."""
    # torch 2.11 takes what it compiled for bf16 from its cache when fp16 is asked for: the key lacks autocast's type.
    torch.compiler.config.cache_key_tag = f"offbeat-{precision.name}"

    def forward(inputs: Any, targets: Any) -> Tensor:
        return loss(model(inputs), targets)

    return torch.compile(forward, dynamic=False, options={"fallback_random": True, **_without_mixed_reductions()})


def _without_mixed_reductions() -> dict[str, Any]:
    """Backward of layer norms as two kernels: GPT-2's step is 1.7 % faster on an H200 than with the kernel that torch
    2.11 makes for both directions, whose partial sums a slow one adds up."""
    name = "triton.mix_order_reduction"
    return {name: False} if name in torch._inductor.config.get_config_copy() else {}


def settled(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    """Where each parameter's gradient is from now on: where it was computed, if it is laid out as the parameter is and
    shares its memory with no other gradient and none of `others`; else in a copy. The optimizer writes into it."""
    addresses = [None if one is None else one.untyped_storage().data_ptr() for one in gradients]
    shared = {address for address, many in Counter(addresses).items() if many > 1}
    shared |= {one.untyped_storage().data_ptr() for one in others}
    places = []
    for gradient, parameter, address in zip(gradients, parameters, addresses, strict=True):
        if gradient is None:
            places.append(torch.zeros_like(parameter))
        elif gradient.stride() == parameter.stride() and address not in shared:
            places.append(gradient)
        else:
            places.append(torch.empty_like(parameter).copy_(gradient))
    return places


def _views(flat: Tensor, parameters: list[Tensor]) -> Iterator[Tensor]:
    """Each parameter's place in a flat tensor, laid out as the parameter is."""
    start = 0
    for parameter in parameters:
        yield flat[start : start + parameter.numel()].as_strided(parameter.shape, parameter.stride(), start)
        start += parameter.numel()


def _is_constant(one: Any) -> bool:
    return isinstance(one, (bool, int, float, tuple))


def shape_of(batch: Any) -> tuple[Any, ...]:
    """Shapes, types and layouts of all tensors in a batch."""
    return tuple((tuple(one.shape), one.dtype, one.stride()) for one in leaves_of(batch))


def leaves_of(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for one in batch.values():
            yield from leaves_of(one)
    elif isinstance(batch, (list, tuple)):
        for one in batch:
            yield from leaves_of(one)


def clone_of(batch: Any) -> Any:
    """The same batch in memory of its own."""
    if isinstance(batch, Tensor):
        return batch.clone()
    if isinstance(batch, Mapping):
        return {name: clone_of(one) for name, one in batch.items()}
    if isinstance(batch, (list, tuple)):
        items = [clone_of(one) for one in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch


def repeated(batch: Any, samples: int) -> Any:
    """A batch of as many samples, made of those of this one; laid out as this one is."""
    if isinstance(batch, Tensor):
        chosen = batch[torch.arange(samples, device=batch.device) % len(batch)]
        last = batch.dim() == 4 and batch.is_contiguous(memory_format=torch.channels_last)
        return chosen.contiguous(memory_format=torch.channels_last) if last else chosen
    if isinstance(batch, Mapping):
        return {name: repeated(one, samples) for name, one in batch.items()}
    if isinstance(batch, (list, tuple)):
        items = [repeated(one, samples) for one in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch


def copy_into(batch: Any, source: Any) -> None:
    for one, new in zip(leaves_of(batch), leaves_of(source), strict=True):
        one.copy_(new, non_blocking=True)
