"""An update made without torch's own step has its bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat.train.learning_rate import step_of


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9, "weight_decay": 1e-3},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
        {"momentum": 0.9, "dampening": 0.1, "maximize": True},
        {},
    ],
    ids=str,
)
def test_a_direct_update_has_the_bits_of_the_optimizer_s_own(options: dict[str, Any]) -> None:
    def trained(*, directly: bool) -> list[Tensor]:
        torch.manual_seed(0)
        shapes = ((7, 5), (7, 5), (32, 3))
        first, second, third = (nn.Parameter(torch.randn(shape)) for shape in shapes)
        groups = [{"params": [first, third], "lr": 0.3}, {"params": [second], "weight_decay": 0.01}]
        optimizer = torch.optim.SGD(groups, lr=0.1, **options)
        update = step_of(optimizer, torch.device("cpu")) if directly else optimizer.step
        for number in range(6):
            optimizer.param_groups[0]["lr"] = 0.3 / (1 + number)
            first.grad, third.grad = torch.randn(7, 5), torch.randn(32, 3)
            second.grad = torch.randn(7, 5) if number > 2 else None  # its momentum begins later
            update()
        found = [state.get("momentum_buffer") for state in optimizer.state.values()]
        buffers = [one for one in found if one is not None]
        return [first.detach(), second.detach(), third.detach(), *buffers]

    mine, own = trained(directly=True), trained(directly=False)
    assert len(mine) == len(own)
    assert all(map(torch.equal, mine, own))


def test_hooks_of_an_optimizer_are_called() -> None:
    parameter = nn.Parameter(torch.ones(2))
    calls: list[str] = []
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    update = step_of(optimizer, torch.device("cpu"))
    parameter.grad = torch.ones(2)
    update()
    assert calls == ["before", "after"]
