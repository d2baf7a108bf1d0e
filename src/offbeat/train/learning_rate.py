"""The rate of every update, and what it acts on: linear scaling, warm-up, schedules, parameter groups, optimizers.

After Goyal et al. 2017, "Accurate, large minibatch SGD": the rate grows with the samples that are averaged in an
update, and is reached by a gradual warm-up; norm scales and shifts are not decayed; residual blocks begin as the
identity. Their correction of the momentum for a changing rate is not needed: torch's SGD keeps the rate outside of the
velocity, which is the corrected form.

Laws: a rate is a pure function of the number of the update (its version), so that a run which goes on from a checkpoint
needs no other state. How many gradients are in an update is asked of the policy, never read out of the line's text.

This file knows nothing of processes, messages or data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offbeat import policies
from offbeat.errors import RequestError, unknown
from offbeat.policies.damping import CORRECT
from offbeat.server.shard import optimizers
from offbeat.strategy import SERVER, family_of, paced_as
from offbeat.train.config import Config, TrainConfig
from offbeat.train.lars import LAMB, LARS

WHOLE = ("lars", "lamb")  # optimizers that need whole tensors
# The last norm of torchvision's residual blocks, by the name of the class.
_LAST_NORMS = {"BasicBlock": "bn2", "Bottleneck": "bn3"}


def gradients_per_update(line: str, learners: int) -> int:
    """Minibatches whose gradients are averaged in one update of a strategy.

    All-reduce: all learners. A policy says it itself: all of full-sync, K of the K policies (softsync:N floor(P/N),
    adaptive-k what it starts with), 1 of async. Where learners push by how much they moved (local SGD) each steps by
    itself, with the rate of one minibatch: 1. What a Downpour push has accrued is added up, not averaged: 1.
    """
    if learners < 1:
        raise RequestError(f"a run has 1 learner or more; got {learners}")
    line = paced_as(line)
    if family_of(line) != SERVER:
        return learners
    policy = policies.create(line, expect=learners)
    return 1 if policy.rule.delta else policy.gradients_per_update(learners)


def minibatches_per_version(line: str, learners: int) -> int:
    """Minibatches that are gone through while the version rises by one.

    Those averaged in an update; but a push of Downpour has `push` of them, and a round of local SGD has H of every
    learner. Work that is cancelled or dropped (k-sync, stale-drop) is not counted, so if it is not done again the
    versions of an epoch are fewer than this says.
    """
    line = paced_as(line)
    if family_of(line) != SERVER:
        return gradients_per_update(line, learners)
    policy = policies.create(line, expect=learners)
    return policy.rule.push_every * policy.gradients_per_update(learners)


def correction_of(config: Config, learners: int) -> dict[str, Any]:
    """What is done about stale gradients, as `policies.create` takes it."""
    return {
        "corrects": config.staleness == CORRECT,
        "scaling": factor_of(config.train, line=config.sync, learners=learners),
    }


def factor_of(train: TrainConfig, *, line: str, learners: int, most: float = math.inf) -> float:
    """By how much the rate is multiplied: the samples averaged in an update, at most `most`, to `lr_batch`."""
    share = min(gradients_per_update(line, learners) * train.batch_size * train.accumulate, most) / train.lr_batch
    return {"linear": share, "sqrt": math.sqrt(share), "none": 1.0}[train.scaling]


def staleness_note(config: Config, learners: int, optimizer: torch.optim.Optimizer) -> str:
    """What the servers will do about stale gradients, in one line; nothing where they do nothing."""
    if family_of(config.sync) != SERVER:
        return ""
    policy = policies.create(config.sync, expect=learners, **correction_of(config, learners))
    if policy.damping is None or policy.rule.delta:
        return ""
    rule, (hyper, *_) = optimizers.describe(optimizer)
    damped = optimizers.damped(rule, hyper, policy.damping.now())
    shown = [(name, f"{hyper[name]:.3g}", f"{damped[name]:.3g}") for name in hyper]
    changed = [f"{name} {before} -> {after}" for name, before, after in shown if before != after]
    if not changed:
        return ""
    shorter = [f"steps are multiplied by {policy.damping.now():.3g}"] if rule == "sgd" else []
    return policy.staleness_note(", ".join([*shorter, *changed]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The learning rate, update by update: a warm-up from `base` to `base * factor`, then the schedule.

    A step of the schedule that falls into the warm-up counts from its end on.
    """

    base: float
    factor: float
    warmup_updates: int
    per_epoch: float  # updates in an epoch; not whole where updates do not mind its end
    epochs: int
    schedule: str
    steps: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise RequestError(f"the factor of the learning rate must be above 0; got {self.factor:g}")
        if self.warmup_updates < 0 or self.per_epoch <= 0 or self.epochs < 0:
            raise RequestError(
                f"expected 0 or more updates of warm-up, more than 0 updates in an epoch, 0 or more epochs; "
                f"got {self.warmup_updates}, {self.per_epoch} and {self.epochs}"
            )
        if self.schedule not in _SCHEDULES:
            raise unknown("schedule", self.schedule, _SCHEDULES)

    def rate(self, update: float) -> float:
        """Of the update-th update, from 0."""
        if update < self.warmup_updates and self.factor > 1:
            return self.base * (1 + (self.factor - 1) * update / self.warmup_updates)
        top = self.base * self.factor
        if self.schedule == "steps":
            return float(top / 10 ** sum(update >= step * self.per_epoch for step in self.steps))
        if self.schedule == "cosine":
            start = self.warmup_updates if self.factor > 1 else 0
            done = (update - start) / max(1, self.epochs * self.per_epoch - start)
            return top * (1 + math.cos(math.pi * min(done, 1.0))) / 2
        return top

    def words(self, train: TrainConfig, *, line: str, learners: int) -> str:
        """What was done to the rate, in one line; nothing if it was left alone."""
        if self.factor == 1:
            return ""
        gradients, samples = gradients_per_update(line, learners), train.batch_size * train.accumulate
        text = f"learning rate {self.base:g} x {self.factor:.4g} = {self.base * self.factor:.4g} "
        text += f"for updates of {gradients} x {samples} samples"
        if self.warmup_updates and self.factor > 1:
            epochs = self.warmup_updates / self.per_epoch
            text += f", warm-up over {epochs:.3g} epoch{'' if epochs == 1 else 's'}"
        rule = "linear" if train.scaling == "linear" else "square-root"
        return f"{text} ({rule} scaling; --train.scaling none turns it off)"


_SCHEDULES = ("constant", "steps", "cosine")


def pace_of(train: TrainConfig, *, line: str, learners: int, samples: int, ends: bool = True, parts: int = 1) -> Pace:
    """The pace of a training on so many samples an epoch.

    The factor is that of the samples averaged in an update, at most all there are, to `lr_batch`, or its square root.
    Updates are counted in versions (see `minibatches_per_version`). The last of an epoch may be a smaller one; with an
    all-reduce it is part of the one before if not everybody has a sample in it (see `plan`). The warm-up takes half of
    the epochs at most. Without `ends` of epochs an update may have samples of two, and none is smaller. `parts`:
    microbatches that a minibatch is split into.
    """
    minibatch = train.batch_size * train.accumulate
    if samples < 1:
        raise RequestError(f"expected 1 or more samples to train on; got {samples}")
    factor = factor_of(train, line=line, learners=learners, most=samples)
    whole, rest = divmod(samples, minibatches_per_version(line, learners) * minibatch)
    least = 1 if family_of(paced_as(line)) == SERVER else learners * train.accumulate * parts
    per_epoch: float = max(1, whole + (rest >= least))
    if not ends:
        per_epoch = samples / (minibatches_per_version(line, learners) * minibatch)
    warmup = min(train.warmup_epochs, train.epochs / 2) * per_epoch if factor > 1 else 0.0
    return Pace(
        base=train.lr,
        factor=factor,
        warmup_updates=round(warmup),
        per_epoch=per_epoch,
        epochs=train.epochs,
        schedule=train.schedule,
        steps=train.steps,
    )


def groups_of(model: nn.Module, train: TrainConfig) -> list[dict[str, Any]]:
    """Parameter groups: every trained parameter once, weights apart from norm scales, shifts and biases.

    The second kind is all with one dimension or none. It is not decayed, unless `decay_all`, and not adapted by LARS
    and LAMB. One group where there is nothing to tell apart; an empty one is left out.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    whole, decay = train.optimizer in WHOLE, train.weight_decay
    if not whole and (decay == 0 or train.decay_all):
        return [{"params": trained, "weight_decay": decay}] if trained else []
    weights = [parameter for parameter in trained if parameter.ndim > 1]
    others = [parameter for parameter in trained if parameter.ndim <= 1]
    rows: list[tuple[list[nn.Parameter], float, bool]] = [
        (weights, decay, True),
        (others, decay if train.decay_all else 0.0, False),
    ]
    return [
        {"params": parameters, "weight_decay": own} | ({"adapt": adapt} if whole else {})
        for parameters, own, adapt in rows
        if parameters
    ]


def zero_last_norms(model: nn.Module) -> None:
    """Sets the scale of the last norm of every residual block to zero, so that it begins as the identity.

    A block says which norm it is by its attribute `last_norm`; torchvision's blocks are known by name. A norm without a
    scale is left alone. For new models: it undoes what a trained one has learned.
    """
    for module in model.modules():
        norm = getattr(module, "last_norm", None) or getattr(module, _LAST_NORMS.get(type(module).__name__, ""), None)
        scale = getattr(norm, "weight", None)
        if isinstance(norm, nn.Module) and isinstance(scale, nn.Parameter) and scale.ndim == 1:
            nn.init.zeros_(scale)


def optimizer_of(model: nn.Module, train: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer, at `train.lr`: whoever trains sets each update's rate before it. Momentum: SGD and LARS."""
    groups = groups_of(model, train)
    if not groups:
        raise RequestError("no parameter of the model requires a gradient, so there is nothing to train")
    kind, has_momentum = _OPTIMIZERS[train.optimizer]
    more = {"momentum": train.momentum, "nesterov": train.nesterov} if has_momentum else {}
    return kind(groups, lr=train.lr, **more)


def step_of(optimizer: torch.optim.Optimizer, device: torch.device) -> Callable[[], object]:
    """What makes an update. For SGD on a CPU it is the arithmetic of torch's own step, without what surrounds it there:
    the same bits (torch's fused kernel has others), in less than half of the time for a small model."""
    if device.type != "cpu" or type(optimizer) is not torch.optim.SGD:
        return optimizer.step
    return _SgdStep(optimizer)


class _SgdStep:
    """See `step_of`. Which parameters have a momentum is looked up once: that takes as long as moving them."""

    def __init__(self, optimizer: torch.optim.SGD) -> None:
        self._optimizer = optimizer
        self._found: list[tuple[dict[str, Any], list[Tensor], list[Tensor]]] = []  # group, parameters, their momentum
        self._found_in: object = None  # the state of the optimizer in which they were found

    def __call__(self) -> None:
        optimizer = self._optimizer
        if self._found_in is not optimizer.state or len(self._found) != len(optimizer.param_groups):
            self._find()
        moved = [[one.grad for one in parameters] for _, parameters, _ in self._found]
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        if hooks or not self._found or any(one is None for gradients in moved for one in gradients):
            optimizer.step()  # the first step is another one, too
            return
        with torch.no_grad():
            for (group, parameters, buffers), gradients in zip(self._found, moved, strict=True):
                _move(group, parameters, buffers, gradients)  # type: ignore[arg-type] # none is None

    def _find(self) -> None:
        """Nothing, where a parameter has no momentum yet."""
        optimizer, self._found = self._optimizer, []
        for group in optimizer.param_groups:
            known = group["params"] if group["momentum"] else []
            buffers = [optimizer.state.get(one, {}).get("momentum_buffer") for one in known]
            if any(one is None for one in buffers):
                self._found = []
                return
            self._found.append((group, group["params"], buffers))
        self._found_in = optimizer.state


def _move(group: dict[str, Any], parameters: list[Tensor], buffers: list[Tensor], gradients: list[Tensor]) -> None:
    moves: list[Tensor] | tuple[Tensor, ...] = gradients
    if group["maximize"]:
        moves = torch._foreach_neg(moves)
    if group["weight_decay"]:
        moves = torch._foreach_add(moves, parameters, alpha=group["weight_decay"])
    if group["momentum"]:
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, moves, alpha=1 - group["dampening"])
        moves = torch._foreach_add(moves, buffers, alpha=group["momentum"]) if group["nesterov"] else buffers
    torch._foreach_add_(parameters, moves, alpha=-group["lr"])


STATES = {"adagrad": 1, "adam": 2, "adamw": 2, "lamb": 2}  # vectors as large as the weights; others: their momentum

# The rules of an update, and whether each has a momentum.
_OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], bool]] = {
    "sgd": (torch.optim.SGD, True),
    "adagrad": (torch.optim.Adagrad, False),
    "adam": (torch.optim.Adam, False),
    "adamw": (torch.optim.AdamW, False),
    "lars": (LARS, True),
    "lamb": (LAMB, False),
}
