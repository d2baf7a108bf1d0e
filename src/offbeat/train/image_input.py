"""Images as bytes, made ready on the device: shifted and flipped at random while training, then normalised.

It is the first layer of a model for such images, without parameters: so images travel as bytes, a quarter of what
float32 takes, and whatever computes the model (a CUDA graph, compiled code, an evaluation) does this too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn

# Of ImageNet's pixels, as everybody takes them, for bytes.
MEAN = tuple(255 * share for share in (0.485, 0.456, 0.406))
SPREAD = tuple(255 * share for share in (0.229, 0.224, 0.225))


class ImageInput(nn.Module):
    """(N, C, H, W) bytes -> the same as floats, each channel less its mean in units of its spread.

    While training, and if `augment`: each image is moved by up to `shift` pixels (its edge repeated) and mirrored half
    of the time.
    """

    mean: Tensor
    spread: Tensor

    def __init__(self, channels: int, *, augment: bool, shift: int) -> None:
        super().__init__()
        self.augment, self.shift = augment, shift
        mean, spread = (MEAN, SPREAD) if channels == 3 else ((127.5,) * channels, (64.0,) * channels)
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("spread", torch.tensor(spread).view(1, -1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        if self.augment and self.training:
            images = self._augmented(images)
        return (images.float() - self.mean) / self.spread

    def _augmented(self, images: Tensor) -> Tensor:
        many, _, height, width = images.shape
        at = images.device
        move = torch.randint(-self.shift, self.shift + 1, (2, many, 1), device=at)
        rows = (torch.arange(height, device=at) + move[0]).clamp(0, height - 1)
        columns = (torch.arange(width, device=at) + move[1]).clamp(0, width - 1)
        mirrored = torch.rand(many, 1, device=at) < 0.5
        columns = torch.where(mirrored, width - 1 - columns, columns)
        each = torch.arange(many, device=at).view(-1, 1, 1)
        return images.permute(0, 2, 3, 1)[each, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)


def with_image_input(build: Callable[[], nn.Module], channels: int, *, augment: bool, shift: int) -> nn.Module:
    """What `build` gives, behind this layer."""
    return nn.Sequential(OrderedDict(input=ImageInput(channels, augment=augment, shift=shift), model=build()))
