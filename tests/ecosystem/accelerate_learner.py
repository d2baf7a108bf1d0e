"""An ordinary Accelerate script but for three lines: each process is a learner of the line of `offbeat run`."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.datasets import digits
from offbeat.integrations.accelerate import prepare

CLIP = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()
    data = digits()
    training = TensorDataset(torch.from_numpy(data.images), torch.from_numpy(data.digits))
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    own = model
    plain = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.9)
    norms: list[float] = []
    plain.register_step_pre_hook(lambda *_: norms.append(norm_of(own)))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulate)
    learner = offbeat.join()
    model, optimizer, loader = prepare(learner, accelerator, model, plain, DataLoader(training, 32, shuffle=True))
    for _ in range(options.epochs):
        for images, labels in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(images), labels))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
    learner.finish()
    assert max(norms) < 1.01 * CLIP, "every step was clipped, the last of an epoch too"
    with torch.no_grad():
        right = own(torch.from_numpy(data.test_images)).argmax(1) == torch.from_numpy(data.test_digits)
    if learner.number == 0:
        total = sum(float(one.detach().double().sum()) for one in own.parameters())
        print(f"accuracy {100 * float(right.float().mean()):.2f} by {learner.strategy} weights {total!r}")


def norm_of(model: nn.Module) -> float:
    return float(torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None]).norm())


if __name__ == "__main__":
    main()
