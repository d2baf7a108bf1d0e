"""How a learner computes its steps: in a CUDA graph or not, compiled or not. Tried, proved, measured, chosen.

    graph+compile    compiled by torch and captured in a CUDA graph
    graph            captured as it is
    compile          compiled, launched kernel by kernel
    eager            as torch does by itself

Each rung runs a few steps that leave no trace (`DeviceStep.kept`). One that cannot be compiled or captured, or whose
steps are not right (`prove`), is left out with the reason. Of the others the fastest is taken; of those within 3 % of
it, the first in this order.

When is a rung right? Narrow numbers and other kernels give other last digits, so the measure is a wider precision: the
rung's gradient may be twice as far from it as the eager one is. What a graph or a compiler could have frozen (learning
rate, decay, loss scale, minibatch, random numbers) is changed between two steps, and both must follow.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from offbeat.train.device_step import DeviceStep
from offbeat.train.out_of_memory import is_out_of_memory, release
from offbeat.train.precision import Precision
from offbeat.train.trainer import piece_of, size_of

WITHIN = 0.03  # of the fastest: then the first in order
LONGER = 2.0  # how much further from the wider precision than eager code
ROUNDING = 1e-5  # of a norm: what is left where both should be equal
JUMPS, MOVED = 12, 2.0**-20  # how often, and by how much of each, weights are moved to see whether a gradient jumps
MEASURED = 10  # steps that are timed
WORTH_COMPILING_S = 10.0  # of training without it; a shorter run ends before compiling has paid

Batch = tuple[Any, Any]


class Rung(NamedTuple):
    name: str
    compiled: bool
    captured: bool


LADDER = (
    Rung("graph+compile", True, True),
    Rung("graph", False, True),
    Rung("compile", True, False),
    Rung("eager", False, False),
)
NAMES = ("auto", *(rung.name for rung in LADDER))
EAGER = LADDER[-1]


def rungs_of(asked: str, *, device: str) -> tuple[Rung, ...]:
    """Those that are tried: eager alone where nothing else is to be gained. Compiled ones are last of all that `auto`
    tries, since the others say whether these are worth their time (`worth_compiling`)."""
    if asked != "auto":
        return (*(rung for rung in LADDER[:-1] if rung.name == asked), EAGER)
    if device != "cuda":
        return (EAGER,)
    return tuple(sorted(LADDER, key=lambda rung: rung.compiled))


def worth_compiling(updates: float, seconds: Mapping[str, float]) -> bool:
    """Whether so many updates take long by the fastest rung so far. Where none fits, a compiled one may."""
    return updates * min(seconds.values()) >= WORTH_COMPILING_S


def choose(seconds: Mapping[str, float]) -> str:
    """The fastest rung, or the first that is nearly as fast; what failed has taken for ever."""
    best = min(seconds.values())
    return next(rung.name for rung in LADDER if seconds.get(rung.name, math.inf) <= best * (1 + WITHIN))


def told(chosen: str, seconds: Mapping[str, float], failed: Mapping[str, str]) -> str:
    """The choice and its reason, in one line."""
    took = {rung.name: seconds[rung.name] for rung in LADDER if seconds.get(rung.name, math.inf) < math.inf}
    others = [f"{name} {1e3 * each_s:.3g}" for name, each_s in took.items() if name != chosen]
    beside = f" ({', '.join(others)})" if others else ""
    text = f"compute mode {chosen}: {1e3 * seconds[chosen]:.3g} ms per step{beside}"
    return "; ".join([text, *(f"{name} was skipped: {why}" for name, why in failed.items())])


def price_of(deterministic_s: float, free_s: float) -> str:
    """What the same bits in every run cost, in one line."""
    more = deterministic_s / free_s - 1
    price = f"{100 * more:.0f} % slower" if more >= 0.005 else "not slower"
    return f"--deterministic: {1e3 * deterministic_s:.3g} ms per step, {1e3 * free_s:.3g} without it: {price}"


class Trial(NamedTuple):
    """A rung that was tried: seconds of a step, or why it cannot be used."""

    seconds: float
    why: str = ""


def try_rung(make: Callable[[Rung], DeviceStep], rung: Rung, batches: Sequence[Batch], *, proved: bool) -> Trial:
    """Prove it and time it; whatever goes wrong is a reason, and no error."""
    release()
    try:
        step = None
        if proved and rung is not EAGER:
            step, wrong = _proved(make, rung, batches)
            if wrong:
                return Trial(math.inf, "; ".join(map(str, wrong[:2])))
        step = step or make(rung)
        with step.kept():
            return Trial(_time(step, batches))
    except Exception as error:  # of the compiler, of a capture, of a model that reads its tensors on the host
        recover(error)
        return Trial(math.inf, _first_line(error))


def _proved(
    make: Callable[[Rung], DeviceStep], rung: Rung, batches: Sequence[Batch]
) -> tuple[DeviceStep | None, list[Finding]]:
    """The step and what of it is wrong. A proof needs the memory of several steps: where that is not there, it is of
    fewer samples, and then there is no step for all of them yet."""
    samples = whole = size_of(batches[0][1])
    while True:
        step = None
        try:
            step = make(rung)
            with step.kept():
                wrong = [one for one in prove(step, make(EAGER), batches) if not one.holds]
            return (step if samples == whole else None), wrong
        except Exception as error:
            if samples < 2 or not is_out_of_memory(error):
                raise
            recover(error)
        step = None
        samples //= 4 if samples >= 8 else 2
        batches = [(piece_of(inputs, 0, samples), piece_of(targets, 0, samples)) for inputs, targets in batches]
        release()


def recover(error: Exception) -> None:
    """A capture that fails leaves torch's generator as if it were captured still: it gets a new state."""
    if not torch.cuda.is_available():
        return
    for index, generator in enumerate(torch.cuda.default_generators):
        fresh = torch.Generator(device=torch.device("cuda", index))
        fresh.manual_seed(generator.initial_seed())
        generator.graphsafe_set_state(fresh.graphsafe_get_state())


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__


def _time(step: DeviceStep, batches: Sequence[Batch]) -> float:
    for batch in batches:
        step.add(*batch)
        step.update(0.0)
    _wait(step.device)
    began_s = time.perf_counter()
    for number in range(MEASURED):
        step.add(*batches[number % len(batches)])
        step.update(0.0)
    _wait(step.device)
    return (time.perf_counter() - began_s) / MEASURED


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- the proof ------------------------------------------------------------------------------------------------------


class Finding(NamedTuple):
    """One thing that must hold: an error and the most that it may be."""

    what: str
    error: float
    most: float

    @property
    def holds(self) -> bool:
        return self.error <= self.most

    def __str__(self) -> str:
        return f"{self.what}: off by {self.error:.2g}, more than the limit of {self.most:.2g}"


def prove(step: DeviceStep, eager: DeviceStep, batches: Sequence[Batch]) -> list[Finding]:
    """Whether `step` computes what `eager` does, both on the same parameters. `batches`: two, of one shape.

    Leaves the model as it was. Errors are norms of differences in shares of the norm that is right.
    """
    wide = _Wide(eager)
    first, second = batches[:2]
    found = []
    scale = float(eager.scale)  # in half precision small gradients are right only if the loss is scaled
    cases = [
        ("gradient", first, 1, scale, 1.0),
        ("gradient of another minibatch", second, 1, scale, 1.0),
        ("gradient with other random numbers", first, 2, scale, 1.0),
        ("gradient with another loss scale", second, 1, scale / 2 if scale > 1 else 64.0, 1.0),
        ("gradient with another weight", first, 1, scale, 0.5),
    ]
    draws = _apart(wide.gradient(first, 1), wide.gradient(first, 2)) > ROUNDING
    for what, batch, seed, scale, weight in cases:
        mine, plain = (_gradient(one, batch, seed, scale, weight) for one in (step, eager))
        if draws:  # a wider precision draws other numbers: then the two are compared, as far apart as both may be
            with _without_chance(eager.model, wide.model):
                yardstick = _apart(_gradient(eager, batch, seed, scale, weight), wide.gradient(batch, seed))
            found.append(Finding(what, _apart(mine, plain), (LONGER + 1) * yardstick + ROUNDING))
        else:
            right = wide.gradient(batch, seed)
            one = Finding(what, _apart(mine, right), LONGER * _apart(plain, right) + ROUNDING)
            found.append(one if one.holds else Finding(what, one.error, one.most + LONGER * wide.jump(batch, seed)))
    gradient = _gradient(eager, first, 1, scale, 1.0)
    for what, lr, decay in (("update", 0.01, 0.0), ("learning rate", 0.05, 0.0), ("weight decay", 0.05, 0.1)):
        mine, plain = (_change(one, gradient, lr, decay) for one in (step, eager))
        found.append(Finding(what, _apart(mine, plain), ROUNDING))
    found.append(Finding("update that is not finite", _not_finite(step, gradient), 0.0))
    return found


@contextmanager
def _without_chance(*models: nn.Module) -> Iterator[None]:
    """Dropout is off; batch norm still takes its statistics from the minibatch."""
    quiet = {one for model in models for one in model.modules() if one.training and not isinstance(one, _BatchNorm)}
    for one in quiet:
        one.training = False
    try:
        yield
    finally:
        for one in quiet:
            one.training = True


class _Wide:
    """The same model in a wider precision, eagerly: float32 for the halves and tf32, float64 for float32."""

    def __init__(self, step: DeviceStep) -> None:
        self.step = step
        self.halves = step.precision.name != "fp32"
        self.model = step.model if self.halves else copy.deepcopy(step.model).double()

    def gradient(self, batch: Batch, seed: int) -> Tensor:
        step = self.step
        names = {id(parameter): name for name, parameter in step.model.named_parameters()}
        theirs = dict(self.model.named_parameters())
        parameters = [theirs[names[id(one)]] for one in step.parameters]
        inputs, targets = batch if self.halves else (_double(batch[0]), _double(batch[1]))
        precision = Precision("fp32", step.device)
        with step.kept(), precision.computing():
            torch.manual_seed(seed)
            loss = step.loss(self.model(inputs), targets)
            with precision.differentiating():
                parts = torch.autograd.grad(loss, parameters, allow_unused=True)
        dtype = parts[0].dtype if parts[0] is not None else torch.float64
        flat = torch.zeros(sum(one.numel() for one in parameters), dtype=dtype, device=step.device)
        start = 0
        for parameter, part in zip(parameters, parts, strict=True):
            if part is not None:
                view = flat[start : start + part.numel()].as_strided(part.shape, parameter.stride(), start)
                view.copy_(part)
            start += parameter.numel()
        return flat

    def jump(self, batch: Batch, seed: int) -> float:
        """How far the gradient moves if the weights do by a few roundings of float32; 0 where more is rounded anyway.

        A unit at the very edge of its ReLU passes a gradient on or not, as the last digit has it. In a small model
        there are one or two of them, and eager code may have been on the right side of all.
        """
        if self.halves:
            return 0.0
        right, draws, farthest = self.gradient(batch, seed), torch.Generator().manual_seed(seed), 0.0
        weights = list(self.model.parameters())
        before = [one.detach().clone() for one in weights]
        with torch.no_grad():
            for _ in range(JUMPS):
                for one, was in zip(weights, before, strict=True):
                    moved = 1 + MOVED * torch.randn(was.shape, generator=draws, dtype=was.dtype)
                    one.copy_(was * moved.to(was.device))
                with torch.enable_grad():
                    farthest = max(farthest, _apart(self.gradient(batch, seed), right))
            for one, was in zip(weights, before, strict=True):
                one.copy_(was)
        return farthest


def _double(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.double() if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {name: _double(one) for name, one in batch.items()}
    return type(batch)(map(_double, batch)) if isinstance(batch, (list, tuple)) else batch


def _gradient(step: DeviceStep, batch: Batch, seed: int, scale: float, weight: float) -> Tensor:
    """Of the mean loss: what was scaled and weighted is scaled back."""
    with step.kept():
        step.scale.fill_(scale)
        torch.manual_seed(seed)
        step.add(*batch, weight=weight)
        return step.read_gradient() / (scale * weight)


def _change(step: DeviceStep, gradient: Tensor, lr: float, decay: float) -> Tensor:
    """What an update with this gradient does to the parameters."""
    groups = step.optimizer.param_groups
    decays = [group["weight_decay"] for group in groups]
    with step.kept():
        before = torch.cat([one.detach().flatten().clone() for one in step.parameters])
        step.write_gradient(gradient)
        step.scale.fill_(1.0)
        try:
            for group in groups:
                group["weight_decay"] += decay
            step.update(lr)
        finally:
            for group, was in zip(groups, decays, strict=True):
                group["weight_decay"] = was
        return torch.cat([one.detach().flatten() for one in step.parameters]) - before


def _not_finite(step: DeviceStep, gradient: Tensor) -> float:
    """How far an update whose gradient has an infinity moves the parameters; it must not, and must be counted."""
    before = step.lost
    broken = gradient.clone()
    broken[len(broken) // 2] = math.inf
    moved = _change(step, broken, 0.1, 0.0)
    with step.kept():
        step.write_gradient(broken)
        step.update(0.1)
        counted = step.lost == before + 1
    return float(moved.abs().max()) if counted else math.inf


def _apart(mine: Tensor, right: Tensor) -> float:
    norm = float(torch.linalg.vector_norm(right.double()))
    return float(torch.linalg.vector_norm(mine.double() - right.double())) / max(norm, 1e-30)
