"""Batch norm over the minibatches of all ranks, on any device and process group; and the mean of learners' statistics.

Laws: ranks with unequal minibatches, even empty ones, get what one process would on all their samples together, up to
rounding: each rank counts by its samples. All ranks merge the same numbers in the same order, so their running
statistics are the same bits. Every rank must call forward and backward equally often, with the samples it has.

Gradients: `backward` is linear in what comes from above, and sums over ranks. So if each rank's loss is scaled such
that the mean over ranks of their gradients (what DDP makes) is the gradient of the mean loss over all samples, then so
it is with these layers inside.

This file knows nothing of trainers or strategies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from offbeat.errors import RequestError

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_LAZY = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)


class SynchronisedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm of the union of all ranks' minibatches: (samples, channels, ...).

    In eval mode, with one rank, or before a process group exists it is plain batch norm.
    A union of fewer than two values in a channel is refused on every rank, as torch refuses it.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"batch norm needs an input of shape (samples, channels, ...); got {input.dim()} dimensions"
            )

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        if input.shape[1] != self.num_features:
            raise ValueError(f"expected {self.num_features} channels; got {input.shape[1]}")
        outputs, mean, variance, count = _Synchronised.apply(input, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call] # torch's own
        if self.running_mean is not None and self.running_var is not None:
            # As torch does: the unbiased variance, and a momentum of None is the mean over all minibatches.
            share = 0.0 if self.momentum is None else self.momentum
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
                if self.momentum is None:
                    share = 1.0 / float(self.num_batches_tracked)
            unbiased = variance * (count / (count - 1))
            self.running_mean.mul_(1 - share).add_(mean.to(self.running_mean.dtype), alpha=share)
            self.running_var.mul_(1 - share).add_(unbiased.to(self.running_var.dtype), alpha=share)
        normalised: Tensor = outputs
        return normalised


class _Synchronised(torch.autograd.Function):
    """One all-gather forward (means, centred squares, counts) and one all-reduce backward."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        channels, here = inputs.shape[1], inputs.numel() // inputs.shape[1]
        wide = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        means, squares, counts = _gather(wide, channels, here)
        count = counts.sum()
        # One with two values or more knows that there are enough; the others ask, and then all of them raise.
        if here < 2 and float(count) < 2:
            raise ValueError(
                f"batch norm needs at least 2 values per channel in training; all ranks together have {count:g}"
            )
        mean = (means * (counts / count)).sum(0)
        # Chan, Golub, LeVeque 1983: centred squares of parts are merged, which loses nothing to a large mean.
        variance = (squares.sum(0) + (counts * (means - mean).square()).sum(0)) / count
        inverse = (variance + eps).rsqrt()
        outputs = (wide - _across(mean, inputs)) * _across(inverse, inputs)
        if weight is not None:
            outputs = outputs * _across(weight, inputs)
        if bias is not None:
            outputs = outputs + _across(bias, inputs)
        ctx.save_for_backward(inputs, weight, mean, inverse, count)
        ctx.mark_non_differentiable(mean, variance, count)
        return outputs.to(inputs.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor, *_: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        inputs, weight, mean, inverse, count = ctx.saved_tensors
        wide = above.to(mean.dtype)
        centred = (inputs.to(mean.dtype) - _across(mean, inputs)) * _across(inverse, inputs)
        over = [axis for axis in range(inputs.dim()) if axis != 1]
        sums = torch.stack((wide.sum(over), (wide * centred).sum(over)))
        # What the scale and the shift get is this rank's share: whoever averages gradients adds the shares up.
        to_shift = sums[0].clone() if ctx.needs_input_grad[2] else None
        to_scale = sums[1].clone() if ctx.needs_input_grad[1] else None
        to_inputs = None
        if ctx.needs_input_grad[0]:
            dist.all_reduce(sums)
            sums /= count
            to_inputs = wide - _across(sums[0], inputs) - centred * _across(sums[1], inputs)
            factor = inverse if weight is None else inverse * weight
            to_inputs = (to_inputs * _across(factor, inputs)).to(inputs.dtype)
        return to_inputs, to_scale, to_shift, None


def _gather(wide: Tensor, channels: int, here: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of every rank, in their order: the means (ranks, channels), the centred squares, and the count (ranks, 1)."""
    over = [axis for axis in range(wide.dim()) if axis != 1]
    mean = wide.sum(over) / max(here, 1)
    square = (wide - _across(mean, wide)).square().sum(over)
    mine = torch.cat((mean, square, mean.new_full((1,), here)))
    table = mine.new_empty(dist.get_world_size(), mine.numel())
    dist.all_gather(list(table), mine)  # not into one tensor: torch gives that another name in 2.13
    return table[:, :channels], table[:, channels:-1], table[:, -1:]


def _across(vector: Tensor, like: Tensor) -> Tensor:
    """A number for each channel, to be broadcast over samples and places."""
    return vector.view(1, -1, *(1 for _ in range(like.dim() - 2)))


def synchronise(model: nn.Module) -> tuple[nn.Module, int]:
    """The model with every BatchNorm1d, 2d and 3d synchronised, and how many there were.

    Parameters and buffers are the same tensors, so an optimizer made before stays right. A norm that is reached under
    several names is replaced under all of them and counted once. The model itself is changed, unless it is a norm.
    """
    made: dict[int, SynchronisedBatchNorm] = {}

    def replaced(module: nn.Module) -> nn.Module:
        if isinstance(module, _LAZY):
            raise RequestError("a lazy batch norm has no parameters yet; run the model once before synchronising it")
        if not isinstance(module, _PLAIN):
            return module
        if id(module) not in made:
            made[id(module)] = _twin(module)
        return made[id(module)]

    for parent in list(model.modules()):
        for name, child in parent._modules.items():  # not named_children: it leaves second names of a child out
            if child is not None:
                parent._modules[name] = replaced(child)
    return replaced(model), len(made)


def _twin(norm: nn.modules.batchnorm._BatchNorm) -> SynchronisedBatchNorm:
    made = SynchronisedBatchNorm(
        norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, device=torch.device("meta")
    )
    made._parameters.update(norm._parameters)
    made._buffers.update(norm._buffers)
    made.train(norm.training)
    return made


def average_buffers(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """One set of buffers for all learners: the mean of what is floating, the largest of counts.

    The mean of running variances is that within learners: how far their means are apart is not in it, which is what
    per-learner statistics leave out too.
    """
    if not states:
        raise RequestError("expected the buffers of at least 1 learner; got none")
    names = list(states[0])
    for learner, state in enumerate(states):
        if set(state) != set(names):
            odd = ", ".join(sorted(set(state) ^ set(names)))
            raise RequestError(
                f"learners 0 and {learner} have different buffers ({odd}); they must train the same model"
            )
    return {name: _merge(torch.stack([state[name].detach() for state in states])) for name in names}


def _merge(stacked: Tensor) -> Tensor:
    if stacked.is_floating_point():  # in float64, so that the mean of equal float32 is that number
        return stacked.to(torch.float64).mean(0).to(stacked.dtype)
    return stacked.amax(0)
