"""The models that come with offbeat: a table of builders, for any shape of sample and number of classes.

Laws: what a model is called and what it can be told is in `MODELS` alone. A wrong name, option or shape of sample is
refused in one line before anything is built. Building takes torch's generator as it stands: who wants the same
weights twice seeds it. The large ones are written after torchvision's, and have as many parameters, under other names.

This file knows nothing of data, training or processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.errors import RequestError, nearest, unknown
from offbeat.train.fields import Scalar

Shape = tuple[int, ...]


class Builtin(NamedTuple):
    """A row of a table, of models or data sets; `options` are all there are, with their defaults.

    A model is built by `build(shape of a sample, classes, **options)`, a data set by `build(**options)`.
    """

    summary: str
    build: Callable[..., Any]
    options: Mapping[str, Scalar]


def builtin_of(kind: str, name: str, table: Mapping[str, Builtin]) -> Builtin:
    """The row of that name."""
    if name not in table:
        raise unknown(kind, name, table)
    return table[name]


def settle(owner: str, given: Mapping[str, Scalar], defaults: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The options of a model or data set: what was given over the defaults.

    An option has the type of its default; a whole number is at least 1, or at least 0 where the default is 0.
    RequestError for any other, in which `owner` says whose options they are.
    """
    for name, value in given.items():
        if name not in defaults:
            known = f"known: {', '.join(defaults)}" if defaults else "it has no options"
            raise RequestError(f"{owner} has no option '{name}'" + (nearest(name, defaults) or f"; {known}"))
        default = defaults[name]
        if type(value) is not type(default) and not (isinstance(default, float) and type(value) is int):
            raise RequestError(
                f"option {name} of {owner} is {value!r}; it must be of type {type(default).__name__}, like {default!r}"
            )
        least = 0 if default == 0 else 1
        if type(value) is int and type(default) is int and value < least:
            raise RequestError(f"option {name} of {owner} is {value}; it must be at least {least}")
    return {**defaults, **given}


def build_model(name: str, shape: Shape, classes: int, options: Mapping[str, Scalar] | None = None) -> nn.Module:
    """A built-in model, for samples of that shape; RequestError if its name, options or the shape are wrong."""
    row = builtin_of("model", name, MODELS)
    settled = settle(f"model {name}", options or {}, row.options)
    if classes < 1:
        raise RequestError(f"model {name} needs at least 1 class; got {classes}")
    model: nn.Module = row.build(shape, classes, **settled)
    return model


def _begun(model: nn.Sequential, mode: Literal["fan_in", "fan_out"]) -> nn.Sequential:
    """He et al. 2015, https://arxiv.org/abs/1502.01852: torch's own first weights are too small for ReLU in layers."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def _channels(name: str, shape: Shape, least: int) -> int:
    """How many an image has; RequestError where a sample is no image, or a side of it is too small to be pooled."""
    if len(shape) != 3:
        raise RequestError(
            f"model {name} needs images of shape channels x height x width; got samples of shape {shape}"
        )
    if min(shape[1:]) < least:
        raise RequestError(f"model {name} needs images of at least {least}x{least} pixels; got {shape[1]}x{shape[2]}")
    return shape[0]


# --- small ones ---------------------------------------------------------------------------------------------------


def _softmax(shape: Shape, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def _mlp(shape: Shape, classes: int, *, hidden: int, layers: int) -> nn.Module:
    parts: list[nn.Module] = [nn.Flatten()]
    inputs = math.prod(shape)
    for _ in range(layers):
        parts += [nn.Linear(inputs, hidden), nn.ReLU()]
        inputs = hidden
    return nn.Sequential(*parts, nn.Linear(inputs, classes))


def _convolutions(name: str, shape: Shape, classes: int, *, width: int, hidden: int, norm: bool) -> nn.Module:
    """Two 3x3 convolutions, each followed by pooling that halves the sides, then one hidden layer (0: none)."""
    inputs = _channels(name, shape, 4)
    parts: list[nn.Module] = []
    for outputs in (width, 2 * width):
        parts.append(nn.Conv2d(inputs, outputs, 3, padding=1, bias=not norm))
        parts += [nn.BatchNorm2d(outputs)] if norm else []
        parts += [nn.ReLU(), nn.MaxPool2d(2)]
        inputs = outputs
    features = inputs * (shape[1] // 4) * (shape[2] // 4)
    head: list[nn.Module] = [nn.Linear(features, hidden), nn.ReLU()] if hidden else []
    model = nn.Sequential(*parts, nn.Flatten(), *head, nn.Linear(hidden or features, classes))
    return _begun(model, mode="fan_in")


# --- those of the literature --------------------------------------------------------------------------------------


def _conv(inputs: int, outputs: int, side: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, side, stride, padding=side // 2, bias=False)


class _Block(nn.Module):
    """A branch beside a shortcut; the shortcut is the input itself where the two have the same shape.

    The norm that ends the branch is `last_norm`, so that a recipe can begin with blocks that change nothing (Goyal et
    al. 2017, https://arxiv.org/abs/1706.02677, section 5.1).
    """

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


def _resnet18(shape: Shape, classes: int, *, width: int) -> nn.Module:
    """The form for small images: a 3x3 stem that keeps their size, and no pooling before the blocks."""
    channels = _channels("resnet18", shape, 1)
    stem = nn.Sequential(_conv(channels, width, 3), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
    return _residual(stem, _plain, (2, 2, 2, 2), width, width, classes)


def _resnet50(shape: Shape, classes: int) -> nn.Module:
    """The form for ImageNet: a 7x7 stem and pooling make 224 pixels 56, then 3, 4, 6 and 3 bottlenecks."""
    channels = _channels("resnet50", shape, 32)
    stem = nn.Sequential(
        _conv(channels, 64, 7, 2), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)
    )
    return _residual(stem, _bottleneck, (3, 4, 6, 3), 64, 256, classes)


def _residual(
    stem: nn.Module,
    block: Callable[[int, int, int], _Block],
    depths: Sequence[int],
    width: int,
    outputs: int,
    classes: int,
) -> nn.Module:
    """Stages of as many blocks as `depths` says: each stage halves the sides and doubles `width` and `outputs`.

    He, Zhang, Ren, Sun 2015, https://arxiv.org/abs/1512.03385.
    """
    stages: list[nn.Module] = []
    inputs = width
    for stage, depth in enumerate(depths):
        for at in range(depth):
            stages.append(block(inputs, width << stage, 2 if stage and not at else 1))
            inputs = outputs << stage
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    return _begun(nn.Sequential(stem, nn.Sequential(*stages), head), mode="fan_out")


def _alexnet(shape: Shape, classes: int) -> nn.Module:
    """In one tower: Krizhevsky 2014, https://arxiv.org/abs/1404.5997."""
    relu = nn.ReLU(inplace=True)
    features = nn.Sequential(
        nn.Conv2d(_channels("alexnet", shape, 63), 64, 11, 4, padding=2), relu, nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2), relu, nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1), relu,
        nn.Conv2d(384, 256, 3, padding=1), relu,
        nn.Conv2d(256, 256, 3, padding=1), relu, nn.MaxPool2d(3, 2),
        nn.AdaptiveAvgPool2d(6), nn.Flatten(),
    )  # fmt: skip
    head = nn.Sequential(
        nn.Dropout(), nn.Linear(256 * 36, 4096), relu, nn.Dropout(), nn.Linear(4096, 4096), relu,
        nn.Linear(4096, classes),
    )  # fmt: skip
    return nn.Sequential(features, head)


def _vgg16(shape: Shape, classes: int) -> nn.Module:
    """Configuration D, without norms: Simonyan and Zisserman 2014, https://arxiv.org/abs/1409.1556."""
    relu = nn.ReLU(inplace=True)
    parts: list[nn.Module] = []
    inputs = _channels("vgg16", shape, 32)
    for outputs, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            parts += [nn.Conv2d(inputs, outputs, 3, padding=1), relu]
            inputs = outputs
        parts.append(nn.MaxPool2d(2))
    head = nn.Sequential(
        nn.Linear(512 * 49, 4096), relu, nn.Dropout(), nn.Linear(4096, 4096), relu, nn.Dropout(),
        nn.Linear(4096, classes),
    )  # fmt: skip
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(7), nn.Flatten(), head)
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0, 0.01)
            nn.init.zeros_(module.bias)
    return _begun(model, mode="fan_out")


# --- text ---------------------------------------------------------------------------------------------------------


class Bag(nn.Module):
    """(N, F) numbers of features in, scores of the classes out: the mean of the features' rows, then a linear layer.

    A feature that was never seen in training has a row of zeros, and no say.
    """

    def __init__(self, features: int, width: int, classes: int, *, sparse: bool) -> None:
        super().__init__()
        self.features = nn.EmbeddingBag(features, width, mode="mean", sparse=sparse)
        self.scores = nn.Linear(width, classes)
        nn.init.zeros_(self.features.weight)

    def forward(self, numbers: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.features(numbers))
        return scores


def _bag(shape: Shape, classes: int, *, features: int, width: int, sparse: bool) -> nn.Module:
    if len(shape) != 1:
        raise RequestError(f"model bag needs samples that are numbers of features; got samples of shape {shape}")
    return Bag(features, width, classes, sparse=sparse)


class _Decoder(nn.Module):
    """A layer of the transformer, norms first: each character sees itself and those before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.together = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, values: Tensor) -> Tensor:
        several, length, width = values.shape
        split = self.queries_keys_values(self.attention_norm(values))
        query, key, value = split.view(several, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self._drop(self.together(seen.transpose(1, 2).reshape(several, length, width)))
        return values + self._drop(self.feed_forward(values))

    def _drop(self, values: Tensor) -> Tensor:
        return functional.dropout(values, self.dropout, self.training) if self.dropout else values


class Transformer(nn.Module):
    """A decoder-only language model: (N, T) characters in, (N, V, T) scores of each next character out.

    T is at most `context`. Radford et al. 2019, its first weights included; dropout at the ends of both branches of a
    layer only. `tied`: the scores' weights are those of the characters.
    """

    def __init__(
        self, vocabulary: int, *, context: int, width: int, heads: int, layers: int, tied: bool, dropout: float
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.layers = nn.Sequential(*(_Decoder(width, heads, dropout) for _ in range(layers)))
        scores = nn.Linear(width, vocabulary, bias=False)
        if tied:
            scores.weight = self.characters.weight
        self.head = nn.Sequential(nn.LayerNorm(width), scores)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_a_branch = name.endswith(("together.weight", "feed_forward.3.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if ends_a_branch else 0.02)

    def forward(self, characters: Tensor) -> Tensor:
        places = torch.arange(characters.shape[1], device=characters.device)
        scores: Tensor = self.head(self.layers(self.characters(characters) + self.places(places)))
        return scores.transpose(1, 2)


def _transformer(
    shape: Shape,
    classes: int,
    *,
    context: int,
    width: int,
    heads: int,
    layers: int,
    vocabulary: int,
    tied: bool,
    dropout: float,
) -> nn.Module:
    if len(shape) != 1:
        raise RequestError(f"model transformer needs sequences of characters; got samples of shape {shape}")
    if context and context < shape[0]:
        raise RequestError(
            f"option context of model transformer is {context}, but a sample has {shape[0]} characters; "
            "remove it, or set the same context for the data"
        )
    if width % heads:
        raise RequestError(
            f"model transformer cannot split a width of {width} into {heads} heads; choose a divisor of the width"
        )
    if not 0 <= dropout < 1:
        raise RequestError(f"option dropout of model transformer is {dropout:g}; it must be from 0 to below 1")
    if vocabulary and vocabulary < classes:
        raise RequestError(
            f"option vocabulary of model transformer is {vocabulary}, but the data has {classes} characters"
        )
    return Transformer(
        vocabulary or classes,
        context=context or shape[0],
        width=width,
        heads=heads,
        layers=layers,
        tied=tied,
        dropout=dropout,
    )


MODELS: dict[str, Builtin] = {
    "softmax": Builtin("one linear layer: convex", _softmax, {}),
    "mlp": Builtin("fully connected layers", _mlp, {"hidden": 64, "layers": 1}),
    "cnn": Builtin(
        "two convolutions, for small images", partial(_convolutions, "cnn", norm=False), {"width": 16, "hidden": 0}
    ),
    "cnn-bn": Builtin(
        "two convolutions with batch norm",
        partial(_convolutions, "cnn-bn", norm=True),
        {"width": 16, "hidden": 0},
    ),
    "resnet18": Builtin("ResNet-18 for small images", _resnet18, {"width": 64}),
    "resnet50": Builtin("ResNet-50", _resnet50, {}),
    "alexnet": Builtin("AlexNet in one tower: little computation, many parameters", _alexnet, {}),
    "vgg16": Builtin("VGG-16: the most parameters", _vgg16, {}),
    "bag": Builtin(
        "an embedding of rare features and a linear layer; gradients of the embedding are sparse",
        _bag,
        {"features": 200_000, "width": 16, "sparse": True},
    ),
    "transformer": Builtin(
        "decoder-only transformer for text by characters (context and vocabulary 0: as in the data)",
        _transformer,
        {"context": 0, "width": 64, "heads": 4, "layers": 2, "vocabulary": 0, "tied": False, "dropout": 0.0},
    ),
}
