"""LARS and LAMB: optimizers for large minibatches, with a rate of its own for every tensor.

Laws: a tensor's step is scaled by the ratio of the weights' norm to that of what they would move by, so that no layer
moves by more than its share. Where either norm is zero the ratio is 1. A group with `adapt=False` (norm scales and
biases belong there) steps as SGD with momentum, or Adam, would. The norms stay on the device: no step waits for it.

State is kept as torch keeps it, in `state[parameter]`, so `state_dict` and `load_state_dict` carry all of it. Both
need whole tensors and so cannot run on servers, which hold pieces. This file knows nothing of rates over time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from offbeat.errors import RequestError

Closure = Callable[[], float]


class _LayerWise(Optimizer):
    """Steps by what `change_of` gives, times the rate, in every parameter that has a gradient."""

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override] # torch has two overloads
        """One update of every parameter that has a gradient; gives what the closure gave."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise RequestError(f"{type(self).__name__} needs dense gradients but got a sparse one; use sgd")
                parameter.add_(self.change_of(group, parameter, parameter.grad), alpha=-group["lr"])
        return loss

    def change_of(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Tensor:
        raise NotImplementedError


class LARS(_LayerWise):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017).

    ratio = coefficient * |w| / (|g| + decay * |w|);  v = momentum * v + ratio * (g + decay * w);  w -= rate * v.
    The rate stands outside of the velocity, as in torch's SGD, so that a rate which changes needs no correction of the
    momentum. With Nesterov the step is ratio * (g + decay * w) + momentum * v.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        coefficient: float = 0.001,
        adapt: bool = True,
    ) -> None:
        _check_numbers(lr=lr, weight_decay=weight_decay, coefficient=coefficient)
        _check_share("momentum", momentum)
        if nesterov and not momentum:
            raise RequestError("nesterov needs a momentum above 0; got 0")
        numbers = {"momentum": momentum, "weight_decay": weight_decay, "coefficient": coefficient}
        super().__init__(params, {"lr": lr, **numbers, "nesterov": nesterov, "adapt": adapt})

    def change_of(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Tensor:
        decay, momentum = group["weight_decay"], group["momentum"]
        change = gradient.add(parameter, alpha=decay) if decay else gradient.clone()
        if group["adapt"]:
            weights, slope = _norm(parameter), _norm(gradient)
            ratio = group["coefficient"] * weights / (slope + decay * weights)
            change.mul_(_where_both(weights, slope, ratio).to(change.dtype))
        if not momentum:
            return change
        state = self.state[parameter]
        if "momentum_buffer" in state:
            velocity: Tensor = state["momentum_buffer"].mul_(momentum).add_(change)
        else:
            velocity = state["momentum_buffer"] = change.clone()
        return change.add_(velocity, alpha=momentum) if group["nesterov"] else velocity


class LAMB(_LayerWise):
    """Layer-wise adaptive moments (You et al. 2020, "Large batch optimization for deep learning", algorithm 2).

    r = mean / (sqrt(square) + eps) + decay * w, of moments whose bias is corrected;  w -= rate * (|w| / |r|) * r.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adapt: bool = True,
    ) -> None:
        _check_numbers(lr=lr, eps=eps, weight_decay=weight_decay)
        for beta in betas:
            _check_share("a beta", beta)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt})

    def change_of(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)  # on CPU, as torch's: reading it waits for none
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step, (beta1, beta2) = state["step"].item(), group["betas"]
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        divisor = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        change: Tensor = (mean / (1 - beta1**step)).div_(divisor)
        if group["weight_decay"]:
            change.add_(parameter, alpha=group["weight_decay"])
        if group["adapt"]:
            weights, length = _norm(parameter), _norm(change)
            change.mul_(_where_both(weights, length, weights / length).to(change.dtype))
        return change


def _norm(tensor: Tensor) -> Tensor:
    """The Euclidean norm, where it lies; in float32 at least, as the square of a half-precision number may overflow."""
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return norm


def _where_both(one: Tensor, other: Tensor, ratio: Tensor) -> Tensor:
    """The ratio if both norms are above zero, else 1."""
    return torch.where((one > 0) & (other > 0), ratio, torch.ones_like(ratio))


def _check_numbers(**numbers: float) -> None:
    for name, number in numbers.items():
        if not number >= 0:
            raise RequestError(f"{name} is 0 or more; got {number:g}")


def _check_share(name: str, number: float) -> None:
    if not 0 <= number < 1:
        raise RequestError(f"{name} is from 0 to below 1; got {number:g}")
