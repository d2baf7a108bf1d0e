"""The precision that a learner computes in, and the scaling of the loss that half precision needs.

Laws: weights, gradients and optimizer state stay float32, whatever the precision; only what is computed between them
is narrower. What is switched on inside a `with` is as it was after it. On a GPU fp32 means fp32: torch by itself lets
convolutions use tf32, which would make two precisions out of one word.

This file knows nothing of models, learners or strategies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from offbeat.errors import RequestError, unknown

NAMES = ("fp32", "tf32", "bf16", "fp16")
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FLAGS = {"fp32": "ieee", "tf32": "tf32"}  # torch's words for how a GPU multiplies float32


class Precision:
    """fp32, tf32, bf16 or fp16 on a device.

        with precision.computing():
            loss = loss_of(model(inputs), targets)
        with precision.differentiating():
            loss.backward()

    With fp16 there is a `scaler`: the loss is multiplied before the backward pass, and the gradients unscaled after it.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        if name not in NAMES:
            raise unknown("precision", name, NAMES)
        if name == "tf32" and device.type != "cuda":
            raise RequestError(f"tf32 needs a GPU, but the device is {device.type}; use fp32 or bf16")
        self.name = name
        self.device = device
        self.scaler = Scaler() if name == "fp16" else None

    def computing(self) -> AbstractContextManager[object]:
        """Around the forward pass and the loss: autocast for the halves, the GPU's way of multiplying for the others.

        Each call gives a new one.
        """
        if self.name in _HALVES:
            return torch.autocast(self.device.type, dtype=_HALVES[self.name])
        return self.differentiating()

    def differentiating(self) -> AbstractContextManager[object]:
        """Around the backward pass: never autocast (it follows the types of the forward pass), but the GPU's way."""
        if self.name in _FLAGS and self.device.type == "cuda":
            return _multiplying(_FLAGS[self.name])
        return nullcontext()


@contextmanager
def _multiplying(how: str) -> Iterator[None]:
    """How GPUs multiply float32 in matrix products, convolutions and recurrent layers; put back at the end."""
    convolutions, recurrent = torch.backends.cudnn.conv, torch.backends.cudnn.rnn  # type: ignore[attr-defined] # torch's stubs lack it
    places: tuple[Any, ...] = (torch.backends.cuda.matmul, convolutions, recurrent)
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = how
        yield
    finally:
        for place, word in zip(places, before, strict=True):
            place.fp32_precision = word


class Scaler:
    """Dynamic loss scaling (Micikevicius et al. 2018): small gradients would be zero in half precision.

    The loss is multiplied by `scale`, the gradients are divided by it. Where one is not finite the update is left out
    and the scale halved; after `GROWTH_STEPS` good ones in a row it doubles.

    Learners of an all-reduce unscale what was summed over all of them. An infinity of one learner is in everybody's
    sum, so all decide alike without a word, as long as they started alike: save `state()` and load it everywhere.
    """

    START = 2.0**16
    LOWEST = 1.0
    HIGHEST = 2.0**127  # the last power of two in float32
    GROWTH_STEPS = 2000

    def __init__(self) -> None:
        self.scale = self.START
        self.good = 0  # updates in a row since the scale changed

    def unscale(self, gradients: Iterable[Tensor]) -> bool:
        """Divides in place; whether all of them are finite, at the cost of one wait for the device at most."""
        finite: Tensor | None = None
        for gradient in gradients:
            every = gradient.div_(self.scale).isfinite().all()
            finite = every if finite is None else finite & every.to(finite.device)
        return finite is None or bool(finite)

    def update(self, finite: bool) -> None:
        """After each update, done or left out."""
        if not finite:
            self.scale, self.good = max(self.scale / 2, self.LOWEST), 0
            return
        self.good += 1
        if self.good >= self.GROWTH_STEPS:
            self.scale, self.good = min(self.scale * 2, self.HIGHEST), 0

    def state(self) -> dict[str, float | int]:
        """Plain numbers, for a checkpoint."""
        return {"scale": self.scale, "good": self.good}

    def load(self, state: Mapping[str, float | int]) -> None:
        """What `state` gave; RequestError, and nothing changed, if it is something else."""
        if set(state) != {"scale", "good"}:
            raise RequestError(
                f"the loss scaler's state must have 'scale' and 'good'; got {', '.join(state) or 'nothing'}"
            )
        scale, good = float(state["scale"]), int(state["good"])
        if not self.LOWEST <= scale <= self.HIGHEST or good < 0:
            raise RequestError(f"a loss scale is {self.LOWEST:g} or more, after 0 good updates or more; got {state}")
        self.scale, self.good = scale, good
