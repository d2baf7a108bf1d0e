"""Whether every way of computing a step is right: each rung of --compute against eager code, for two small models.

    python benchmarks/device_proofs.py              # on a GPU: all rungs; on a CPU: compile and eager
    python benchmarks/device_proofs.py --precision bf16 --rungs graph

For ResNet-8 with batch norm and a transformer of two layers with dropout, in each precision, without and with clipping:

    proof     the largest error of `prove`, in shares of what is allowed (at most 1), and which one it was
    bits      graph against eager over 20 updates under deterministic cuDNN: equal or not
    loss      after 50 updates with two passes each, a learning rate that falls, clipping, and one gradient that is not
              finite: how far from eager code's, beside the spread of eager code over five seeds (the standard
              deviation of its losses; at most three of them is right)
    lost      updates that were left out: one

Planted faults (a frozen learning rate, frozen decay, the same dropout in every replay, a stale minibatch) must each be
found. The exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.train.compute_ladder import EAGER, LADDER, Rung, prove, recover
from offbeat.train.device_step import DeviceStep, Loss, compiled_loss
from offbeat.train.models import build_model
from offbeat.train.precision import Precision

UPDATES, PASSES, BROKEN_AT, SEEDS, SPREADS = 50, 2, 25, 5, 3.0
SAMPLES = 32  # of a pass


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        inner = functional.relu(self.norms[0](self.first(images)))
        return functional.relu(self.norms[1](self.second(inner)) + self.short(images))


def resnet8() -> nn.Module:
    """ResNet-8 for small images: a stem, a block at each of three widths, a linear layer."""
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [Block(16, 16), Block(16, 32), Block(32, 64)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def transformer() -> nn.Module:
    options = {"width": 64, "heads": 4, "layers": 2, "dropout": 0.2}
    return build_model("transformer", (64,), 32, options)


class Case(NamedTuple):
    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    lr: float


def images(chance: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ten classes that differ in their mean, so that there is something to learn."""
    targets = torch.randint(10, (SAMPLES,), generator=chance)
    means = torch.randn(10, 3, 1, 1, generator=torch.Generator().manual_seed(7))
    return torch.randn(SAMPLES, 3, 32, 32, generator=chance) + means[targets], targets


def text(chance: torch.Generator) -> tuple[Tensor, Tensor]:
    """Each character follows from the one before it."""
    first = torch.randint(32, (SAMPLES, 1), generator=chance)
    characters = (first + 5 * torch.arange(65)) % 32
    return characters[:, :-1].contiguous(), characters[:, 1:].contiguous()


CASES = (Case("ResNet-8", resnet8, images, 0.1), Case("transformer", transformer, text, 0.05))


class Setting(NamedTuple):
    """One model in one precision on one device: what makes steps of it."""

    case: Case
    precision: str
    clip: float
    device: torch.device

    def batches(self, seed: int, many: int) -> list[tuple[Tensor, Tensor]]:
        chance = torch.Generator().manual_seed(seed)
        return [tuple(one.to(self.device) for one in self.case.batch(chance)) for _ in range(many)]  # type: ignore[misc] # of two

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self.case.build().to(self.device)

    def step(
        self,
        model: nn.Module,
        rung: Rung,
        *,
        forward: Loss | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        kind: type[DeviceStep] = DeviceStep,
        reduced: bool = False,
    ) -> DeviceStep:
        made = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
        precision = Precision(self.precision, self.device)
        forward = forward or (compiled_loss(model, functional.cross_entropy, precision) if rung.compiled else None)
        return kind(
            model,
            made,
            functional.cross_entropy,
            precision,
            clip_norm=self.clip,
            forward=forward,
            captured=rung.captured,
            reduced=reduced,
        )


def proved(setting: Setting, rung: Rung, kind: type[DeviceStep] = DeviceStep) -> list[Any]:
    model = setting.model(0)
    eager = setting.step(model, EAGER)
    step = setting.step(model, rung, optimizer=eager.optimizer, kind=kind)
    with step.kept():
        return prove(step, eager, setting.batches(1, 2))


def trained(
    setting: Setting, rung: Rung, seed: int, updates: int, *, broken_at: int = -1, reduced: bool = False
) -> tuple[DeviceStep, float]:
    """The step after so many updates, and its loss, the mean over the last ten."""
    step = setting.step(setting.model(seed), rung, reduced=reduced)
    losses = []
    batches = setting.batches(100 + seed, updates * PASSES)
    for number in range(updates):
        for at in range(PASSES):
            torch.manual_seed(1000 * seed + number * PASSES + at)
            loss = step.add(*batches[number * PASSES + at], weight=1 / PASSES, first=at == 0)
        losses.append(loss)
        if number == broken_at:
            broken = step.read_gradient()
            broken[5] = float("inf")
            step.write_gradient(broken)
        step.update(setting.case.lr * (1 - number / updates))
    return step, float(torch.stack(losses[-10:]).float().mean())


def weights(step: DeviceStep) -> Tensor:
    return torch.cat([one.detach().flatten() for one in step.tensors() if one.is_floating_point()])


def same_bits(setting: Setting, rung: Rung) -> bool:
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        kinds = ((rung, False), (rung, True), (EAGER, True))  # the gradient in pieces, and in one flat tensor
        ends = [weights(trained(setting, one, 0, 20, broken_at=7, reduced=reduced)[0]) for one, reduced in kinds]
    finally:
        torch.backends.cudnn.deterministic = before
        torch.use_deterministic_algorithms(False)
    return all(torch.equal(one, ends[-1]) for one in ends)


class FrozenRate(DeviceStep):
    def update(self, lr: float, *, samples: int = 1) -> None:
        self.first_lr = getattr(self, "first_lr", lr)
        super().update(self.first_lr, samples=samples)


class FrozenDecay(DeviceStep):
    def _constants(self) -> tuple[Any, ...]:
        return ()  # one capture for all of them

    def update(self, lr: float, *, samples: int = 1) -> None:
        if not self.captured:
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 1e-3
        super().update(lr, samples=samples)


class SameDropout(DeviceStep):
    def add(self, inputs: Any, targets: Any, *, weight: float = 1.0, first: bool = True) -> Tensor:
        torch.manual_seed(1)
        return super().add(inputs, targets, weight=weight, first=first)


class StaleInput(DeviceStep):
    def add(self, inputs: Any, targets: Any, *, weight: float = 1.0, first: bool = True) -> Tensor:
        self.first_batch = getattr(self, "first_batch", (inputs, targets))
        return super().add(*self.first_batch, weight=weight, first=first)


PLANTED = (
    (FrozenRate, "learning rate"),
    (FrozenDecay, "weight decay"),
    (SameDropout, "gradient with other random numbers"),
    (StaleInput, "gradient of another minibatch"),
)


def rows(settings: list[Setting], rungs: list[Rung]) -> Iterator[tuple[list[str], bool]]:
    """A line of the table, and whether it is right."""
    for setting in settings:
        ends = [trained(setting, EAGER, seed, UPDATES, broken_at=BROKEN_AT)[1] for seed in range(SEEDS)]
        spread = statistics.stdev(ends)
        for rung in rungs:
            torch._dynamo.reset()
            found = proved(setting, rung)
            worst = max(found, key=lambda one: one.error / one.most if one.most else (one.error > 0) * 1e9)
            share = worst.error / worst.most if worst.most else float(worst.error > 0)
            bits = "" if rung.compiled or rung is EAGER else "equal" if same_bits(setting, rung) else "DIFFER"
            step, loss = trained(setting, rung, 0, UPDATES, broken_at=BROKEN_AT)
            off = abs(loss - ends[0])
            right = all(one.holds for one in found) and bits != "DIFFER" and off <= SPREADS * spread and step.lost == 1
            line = [setting.case.name, setting.precision, f"{setting.clip:g}" if setting.clip else "no", rung.name]
            line += [f"{share:.2f} {worst.what}", f"{worst.error:.1e} of {worst.most:.1e}", bits]
            line += [f"{loss:.4f}", f"{off:.1e}", f"{spread:.1e}", str(step.lost), "" if right else "WRONG"]
            yield line, right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16", "fp16"])
    parser.add_argument("--rungs", nargs="+", help="default: all that this device has")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = given.rungs or [rung.name for rung in LADDER if device.type == "cuda" or not rung.captured]
    rungs = [rung for rung in LADDER if rung.name in names]
    precisions = [name for name in given.precision if name != "fp16" or device.type == "cuda"]
    settings = [Setting(case, name, clip, device) for case in CASES for name in precisions for clip in (0.0, 1.0)]
    wrong = 0
    head = ["model", "precision", "clip", "rung", "worst of the proof", "its error", "bits", "loss", "off", "spread"]
    form = "{:<12} {:<9} {:<4} {:<13} {:<42} {:<20} {:<6} {:<7} {:<8} {:<8} {:<5} {}"
    print(form.format(*head, "lost", ""))
    for line, right in rows(settings, rungs):
        print(form.format(*line), flush=True)
        wrong += not right
    for rung in rungs:
        if rung.compiled:
            continue
        for kind, what in PLANTED:
            setting = Setting(CASES[1], "fp32", 0.0, device)
            try:
                found = [one for one in proved(setting, rung, kind) if not one.holds]
            except Exception as error:  # a capture that refuses is a fault that is found
                recover(error)
                found = []
                print(f"planted {kind.__name__} ({rung.name}): {type(error).__name__}")
                continue
            caught = what in [one.what for one in found]
            wrong += not caught
            print(f"planted {kind.__name__} ({rung.name}): {'found: ' + str(found[0]) if caught else 'NOT FOUND'}")
    print("all is right" if not wrong else f"{wrong} are wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
