"""Residual networks: He, Zhang, Ren, Sun 2015, https://arxiv.org/abs/1512.03385.

Laws: every residual block calls the norm that ends its branch `last_norm`, so that a recipe can begin with blocks
that change nothing (Goyal et al. 2017, https://arxiv.org/abs/1706.02677, section 5.1). The names of the modules are
not torchvision's; the numbers of parameters are.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


def _conv(inputs: int, outputs: int, side: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, side, stride, padding=side // 2, bias=False)


class _Block(nn.Module):
    """A branch beside a shortcut; the shortcut is the input itself where the two have the same shape."""

    def __init__(self, branch: nn.Sequential, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = branch
        self.last_norm = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        )

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.last_norm(self.branch(images)) + self.shortcut(images))


def _plain(inputs: int, width: int, stride: int) -> _Block:
    """The block of ResNet-18: two 3x3 convolutions."""
    branch = nn.Sequential(
        _conv(inputs, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU(inplace=True), _conv(width, width, 3)
    )
    return _Block(branch, inputs, width, stride)


def _bottleneck(inputs: int, width: int, stride: int) -> _Block:
    """The block of ResNet-50: 1x1, 3x3 (which strides, as torchvision's does), and 1x1 to four times the width."""
    branch = nn.Sequential(
        _conv(inputs, width, 1), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
        _conv(width, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
        _conv(width, 4 * width, 1),
    )  # fmt: skip
    return _Block(branch, inputs, 4 * width, stride)


def resnet18(channels: int, classes: int, width: int) -> nn.Sequential:
    """The form for small images: a 3x3 stem that keeps their size, and no pooling before the blocks."""
    stages: list[nn.Module] = []
    inputs = width
    for stage in range(4):
        for block in range(2):
            outputs = width << stage
            stages.append(_plain(inputs, outputs, 2 if stage and not block else 1))
            inputs = outputs
    stem = nn.Sequential(_conv(channels, width, 3), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
    return _assemble(stem, stages, inputs, classes)


def resnet50(channels: int, classes: int) -> nn.Sequential:
    """The form for ImageNet: a 7x7 stem and pooling make 224 pixels 56, then 3, 4, 6 and 3 bottlenecks."""
    stages: list[nn.Module] = []
    inputs = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            width = 64 << stage
            stages.append(_bottleneck(inputs, width, 2 if stage and not block else 1))
            inputs = 4 * width
    stem = nn.Sequential(
        _conv(channels, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)
    )
    return _assemble(stem, stages, inputs, classes)


def _assemble(stem: nn.Module, stages: list[nn.Module], features: int, classes: int) -> nn.Sequential:
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, classes))
    model = nn.Sequential(stem, nn.Sequential(*stages), head)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model
