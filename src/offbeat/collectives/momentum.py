"""Momentum before the codec: what is sent, and what is left of it, are velocities and not gradients.

An optimizer with momentum weighs a gradient by what it is when it comes. Of a codec that sends little of each gradient,
most comes late and all at once, and is then repeated by the momentum: steps become too long, and the residual large.
So each rank has a velocity of its own, u = m u + g, and sends that (momentum correction: Lin et al. 2018 for top-k;
Tang et al. 2021 for signs). Where a number was sent whole, its velocity begins anew (factor masking), or it would be
pushed again in a direction that is old.

The optimizer stays as it is: it is given x = s - m s', s being the sum of now and s' that of before. Its own velocity
v = m v + x is then s. So the law is: after every step the optimizer's velocity is the sum of what was sent (and what
weight decay adds to it). Where x is clipped that would not hold, so there gradients are sent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.collectives.residuals import Kept


def momentum_of(optimizer: torch.optim.Optimizer, *, clips: bool = False) -> float:
    """Of plain SGD with one momentum; 0 for all other optimizers, and with clipping: these are given gradients."""
    groups = optimizer.param_groups
    known = {(one.get("momentum"), one.get("dampening"), one.get("nesterov")) for one in groups}
    if clips or not isinstance(optimizer, torch.optim.SGD) or len(known) != 1:
        return 0.0
    momentum, dampening, nesterov = known.pop()
    return 0.0 if dampening or nesterov else float(momentum or 0.0)


class Velocity:
    """Of one call: the gradient becomes the rank's velocity, and the sum becomes what the optimizer is to take."""

    def __init__(self, kept: Kept, flat: Tensor) -> None:
        self._kept = kept
        if kept.velocity is None:
            kept.velocity = torch.zeros(kept.items)
        kept.velocity.mul_(kept.momentum).add_(flat)
        flat.copy_(kept.velocity)

    def end(self, flat: Tensor, *, whole: bool) -> None:
        """`flat` is the sum. `whole`: what is not left over was sent as it was."""
        kept = self._kept
        assert kept.velocity is not None
        if whole and kept.residual is not None:
            kept.velocity.masked_fill_(kept.residual[: kept.items] == 0, 0.0)
        if not bool(flat.isfinite().all()):  # no optimizer takes this step
            torch.nan_to_num_(kept.velocity, 0.0, 0.0, 0.0)
            return
        before, kept.sent = kept.sent, flat.clone()
        if before is not None:
            flat.sub_(before, alpha=kept.momentum)
