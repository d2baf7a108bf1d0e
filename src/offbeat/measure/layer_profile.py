"""`offbeat profile`: what each layer of a model costs, and what several learners would need to hide the communication.

Parameters, FLOPs and activations are counted (`operation_counts`), times are measured on the device that is here, or
modelled (`predict.roofline`) for one that is not. A model comes with its error on the device that is here, where the
table has that; what was not measured is never told as if it was.

Layers are timed in eager steps, one kernel after the other. A step as `offbeat train` takes it may be faster (on a GPU
it is in a graph): what follows for communication is computed with the times of layers in proportion to that step.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offbeat.errors import RequestError
from offbeat.machine import available_bytes
from offbeat.measure.benchmark import Progress, relative_error
from offbeat.measure.child_requests import error_text
from offbeat.measure.compute_learner import ComputeLearner, layers_of
from offbeat.measure.device_learner import DeviceLearner
from offbeat.measure.operation_counts import StepCounts, counted
from offbeat.number_format import format_size
from offbeat.predict.roofline import (
    GRADIENT_BYTES,
    Gpu,
    GradientReady,
    LayerTime,
    gpu_here,
    link_needed,
    modelled,
    reduced_bytes,
    update_s,
)
from offbeat.train.compute_ladder import EAGER, recover
from offbeat.train.config import Config
from offbeat.train.config_files import changed
from offbeat.train.launch import check_device
from offbeat.train.out_of_memory import is_out_of_memory
from offbeat.train.tasks import task_of

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_STATE = {"adam": 2, "adamw": 2, "lamb": 2}  # vectors of an optimizer's state, where they are not one


MOST_KEPT_BYTES = 4_000_000_000  # of a step of which nobody has said that it is meant to be large


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """`gpu`: a device of the table, in the place of the one that is here."""

    config: Config
    gpu: Gpu | None = None
    learners: tuple[int, ...] = (2, 4, 8, 16)
    link_bytes_per_s: float = 12.5e9
    seconds: float = 1.0
    large: bool = False  # a step may keep more than `MOST_KEPT_BYTES` on this machine


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledStep:
    """A step on a device of the table."""

    gpu: Gpu
    layers: Mapping[str, LayerTime]
    update_s: float

    @property
    def compute_s(self) -> float:
        """Forward and backward."""
        return sum(one.forward_s + one.backward_s for one in self.layers.values())

    @property
    def step_s(self) -> float:
        return self.compute_s + self.update_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """A step on the device that is here."""

    device: str
    compute: str  # how `step_s` was computed: a rung of the ladder
    layers: Mapping[str, LayerTime]  # eager
    step_s: float  # with the optimizer's part


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What was found. One of `measured` and `model` is there, or both."""

    config: Config
    counts: StepCounts
    measured: MeasuredStep | None
    model: ModelledStep | None  # of the device that was asked for, or of the one that is here
    error: float | None  # modelled / measured - 1 of a step, on the device that is here
    error_on: str  # that device; empty where the table has none
    asked: bool  # whether the device was asked for: then times are modelled

    @property
    def times(self) -> Mapping[str, LayerTime]:
        """Of layers, as they follow from the step: of a step in a graph they are shorter than eager ones."""
        if self.asked or self.measured is None:
            assert self.model is not None
            return self.model.layers
        layers, eager_s = self.measured.layers, _sum(self.measured.layers)
        part = min(1.0, self.measured.step_s / eager_s)
        return {name: LayerTime(part * one.forward_s, part * one.backward_s) for name, one in layers.items()}

    @property
    def step_s(self) -> float:
        if self.asked or self.measured is None:
            assert self.model is not None
            return self.model.step_s
        return self.measured.step_s

    @property
    def gradient_bytes(self) -> int:
        return GRADIENT_BYTES * self.counts.parameters

    def links(self, learners: Sequence[int], link_bytes_per_s: float) -> list[dict[str, float]]:
        """For so many learners: what each sends, how long that takes, and the link at which it hides."""
        times = self.times
        compute_s = _sum(times)
        ready, after_s = [], 0.0
        for layer in reversed(self.counts.layers):
            after_s += times[layer.name].backward_s if layer.name in times else 0.0
            ready.append(GradientReady(after_s, GRADIENT_BYTES * layer.parameters))
        found = []
        for many in learners:
            sent = reduced_bytes(self.gradient_bytes, many)
            found.append(
                {
                    "learners": many,
                    "sent_bytes": sent,
                    "communication_s": sent / link_bytes_per_s,
                    "ratio": compute_s / (sent / link_bytes_per_s),
                    "link_needed_bytes_per_s": link_needed(ready, after_s, many),
                }
            )
        return found


def _sum(layers: Mapping[str, LayerTime]) -> float:
    return sum(one.forward_s + one.backward_s for one in layers.values())


def profile(request: ProfileRequest, progress: Progress = lambda text: None) -> Profile:
    """Count, measure, model."""
    config = request.config
    train, batch = config.train, config.train.batch_size
    device = check_device(config.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    here = gpu_here(name) if device.type == "cuda" else None
    gpu = request.gpu or here
    if gpu is not None:
        gpu.peak(train.precision)  # refuses what it cannot compute
    progress("counting")
    task = task_of(config)
    try:
        counts = counted(task, batch, _DTYPES.get(train.precision, torch.float32))
    except Exception as error:  # a model that looks at values: there are none
        raise RequestError(
            f"profile: the operations of the model cannot be counted without running it: {error_text(error)}"
        ) from error
    measured = None
    if request.gpu is None or here is not None:
        progress(f"measuring on {name}")
        if device.type == "cpu":
            _check_activations(batch, sum(layer.kept_bytes for layer in counts.layers), large=request.large)
        measured = _measured(config, name, request.seconds)
    state = _STATE.get(train.optimizer, 1)

    def model_of(one: Gpu) -> ModelledStep:
        layers = modelled(counts.operations, one, train.precision)
        return ModelledStep(gpu=one, layers=layers, update_s=update_s(counts.parameters, state, one))

    off = None
    if here is not None and measured is not None:
        off = relative_error(model_of(here).step_s, measured.step_s)
    return Profile(
        config=config,
        counts=counts,
        measured=measured,
        model=None if gpu is None else model_of(gpu),
        error=off,
        error_on="" if here is None else here.name,
        asked=request.gpu is not None,
    )


def _check_activations(batch: int, kept_bytes: int, *, large: bool) -> None:
    """Before they are made: a step keeps them, and works on others beside them."""
    if kept_bytes > MOST_KEPT_BYTES and not large:
        raise RequestError(
            f"profile: minibatches of {batch} samples keep {format_size(kept_bytes)} of activations; choose a smaller "
            "--batch-size, or confirm it with --yes-large"
        )
    here = available_bytes()
    if here is not None and 2 * kept_bytes > here:
        raise RequestError(
            f"profile: minibatches of {batch} samples keep {format_size(kept_bytes)} of activations, but only "
            f"{format_size(here)} are free; choose a smaller --batch-size, or estimate the times with another "
            "--device (see --help)"
        )


def _measured(config: Config, name: str, seconds: float) -> MeasuredStep:
    """RequestError where it runs out of memory."""
    try:
        return _timed(config, name, seconds)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        batch = config.train.batch_size
        raise RequestError(
            f"profile: out of memory on {name} with a minibatch size of {batch}; use a smaller --batch-size"
        ) from None


def _timed(config: Config, name: str, seconds: float) -> MeasuredStep:
    batch = config.train.batch_size
    eager = ComputeLearner(config)
    layers = {
        one["name"]: LayerTime(one["forward_s"], one["backward_s"]) for one in layers_of(eager, batch, most_s=seconds)
    }
    del eager
    learner = DeviceLearner(config)
    try:
        times_s = learner.measure(batch, seconds)["times_s"]
    except Exception as error:
        if is_out_of_memory(error) or config.train.compute != "auto" or learner.rung is EAGER:
            raise
        recover(error)  # it cannot be captured: then training computes eagerly too
        learner = DeviceLearner(changed(config, {"train": {"compute": EAGER.name}}))
        times_s = learner.measure(batch, seconds)["times_s"]
    return MeasuredStep(device=name, compute=learner.rung.name, layers=layers, step_s=statistics.median(times_s))


def as_json(found: Profile, request: ProfileRequest) -> dict[str, Any]:
    counts, measured, model = found.counts, found.measured, found.model
    return {
        "recipe": found.config.name,
        "batch": counts.samples,
        "precision": found.config.train.precision,
        "parameters": counts.parameters,
        "gradient_bytes": found.gradient_bytes,
        "forward_flops": counts.forward_flops,
        "flops": counts.flops,
        "multiply_adds_per_sample": counts.forward_flops / 2 / counts.samples,
        "kept_bytes": sum(layer.kept_bytes for layer in counts.layers),
        "layers": [_layer_json(found, number) for number in range(len(counts.layers))],
        "measured": None if measured is None else {
            "device": measured.device, "compute": measured.compute, "step_s": measured.step_s,
            "eager_layers_s": _sum(measured.layers),
        },
        "modelled": None if model is None else {
            "device": model.gpu.name, "step_s": model.step_s, "compute_s": model.compute_s, "update_s": model.update_s,
        },
        "model_error": found.error,
        "model_error_on": found.error_on or None,
        "link_bytes_per_s": request.link_bytes_per_s,
        "links": found.links(request.learners, request.link_bytes_per_s),
    }  # fmt: skip


def _layer_json(found: Profile, number: int) -> dict[str, Any]:
    layer = found.counts.layers[number]
    measured = None if found.measured is None else found.measured.layers.get(layer.name)
    model = None if found.model is None else found.model.layers.get(layer.name)
    return {
        "name": layer.name,
        "parameters": layer.parameters,
        "forward_flops": layer.forward_flops,
        "backward_flops": layer.backward_flops,
        "kept_bytes": layer.kept_bytes,
        "forward_s": None if measured is None else measured.forward_s,
        "backward_s": None if measured is None else measured.backward_s,
        "modelled_forward_s": None if model is None else model.forward_s,
        "modelled_backward_s": None if model is None else model.backward_s,
    }
