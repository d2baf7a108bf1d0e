"""What each learner hands to the one who leads, in a pause: its own buffers, its clock, its scaler, its own optimizer,
and what it has not sent yet where gradients are coded.

Law: decode(encode(part)) == part. It travels as a safetensors file, and is kept as such in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn


class Traffic(NamedTuple):
    """Bytes of gradients and weights that a learner has sent and received."""

    sent: int = 0
    received: int = 0

    def plus(self, other: Traffic | None) -> Traffic | None:
        return None if other is None else Traffic(self.sent + other.sent, self.received + other.received)


class HostName(NamedTuple):
    """A host as it calls itself, and what tells it from others of that name: nothing for the host of the run."""

    name: str = ""
    number: str = ""


@dataclass(slots=True, kw_only=True)
class LearnerSnapshot:
    """One learner's."""

    compute_s: float = 0.0
    wait_s: float = 0.0
    loss: float = 0.0  # mean over the samples since the last pause
    samples: int = 0  # how many these are
    traffic: Traffic | None = None  # None: not counted
    scaler: dict[str, float] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Tensor] = field(default_factory=dict)
    sent_to: tuple[int, ...] = ()  # bytes to each learner, in this part of the run
    host: HostName = field(default_factory=HostName)  # of a learner of a parameter server
    residuals: dict[str, Tensor] = field(default_factory=dict)  # of a codec's error feedback
    used_bytes: int = 0  # of memory, at most; 0: not asked for
    spans: Tensor = field(default_factory=lambda: torch.zeros(0, 4, dtype=torch.float64))  # what, start, end, version

    def encode(self) -> bytes:
        tensors = {
            "clock": torch.tensor([self.compute_s, self.wait_s, self.loss, self.samples], dtype=torch.float64),
            "spans": self.spans,
        }
        if self.traffic is not None:
            tensors["traffic"] = torch.tensor(self.traffic, dtype=torch.int64)
        if self.sent_to:
            tensors["sent_to"] = torch.tensor(self.sent_to, dtype=torch.int64)
        if self.host.name:
            tensors["host"] = torch.tensor(list("\n".join(self.host).encode()), dtype=torch.uint8)
        if self.used_bytes:
            tensors["memory"] = torch.tensor([self.used_bytes])
        for name, number in self.scaler.items():
            tensors[f"scaler.{name}"] = torch.tensor(float(number), dtype=torch.float64)
        for kind, group in (("buffer", self.buffers), ("optimizer", self.optimizer), ("residual", self.residuals)):
            for name, tensor in group.items():
                tensors[f"{kind}.{name}"] = tensor.detach().cpu().contiguous().clone()
        return bytes(safetensors.torch.save(tensors))


def decode(data: bytes) -> LearnerSnapshot:
    return snapshot_of(safetensors.torch.load(data))


def snapshot_of(tensors: Mapping[str, Tensor]) -> LearnerSnapshot:
    """From the tensors of its file."""
    compute_s, wait_s, loss, samples = tensors["clock"].tolist()

    def under(kind: str) -> dict[str, Tensor]:
        return {name.removeprefix(kind): tensor for name, tensor in tensors.items() if name.startswith(kind)}

    return LearnerSnapshot(
        compute_s=compute_s,
        wait_s=wait_s,
        loss=loss,
        samples=int(samples),
        traffic=Traffic(*tensors["traffic"].tolist()) if "traffic" in tensors else None,
        scaler={name: float(number) for name, number in under("scaler.").items()},
        buffers=under("buffer."),
        optimizer=under("optimizer."),
        sent_to=tuple(tensors["sent_to"].tolist()) if "sent_to" in tensors else (),
        host=_host_of(tensors["host"]) if "host" in tensors else HostName(),
        residuals=under("residual."),
        used_bytes=int(tensors["memory"]) if "memory" in tensors else 0,
        spans=tensors["spans"],
    )


def _host_of(tensor: Tensor) -> HostName:
    name, _, number = bytes(tensor.tolist()).decode(errors="replace").partition("\n")
    return HostName(name[:100], number[:100])


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of an optimizer as tensors with names: the parameter's number, and what it is."""
    tensors: dict[str, Tensor] = {}
    for number, state in type(optimizer).state_dict(optimizer)["state"].items():  # the learner's, not the servers'
        for name, value in state.items():
            if value is not None:
                tensors[f"{number}.{name}"] = torch.as_tensor(value)
    return tensors


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Puts back what `optimizer_tensors` gave."""
    state: dict[int, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = tensor.clone()
    kind = type(optimizer)
    kind.load_state_dict(optimizer, {"state": state, "param_groups": kind.state_dict(optimizer)["param_groups"]})


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Those that belong to the state of a model (batch norm's statistics)."""
    kept = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def load_buffers(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    mine = dict(model.named_buffers())
    with torch.no_grad():
        for name, buffer in buffers.items():
            if name in mine:
                mine[name].copy_(buffer)
