"""Recipes: trainings that are known to go well, each a config with a name. `offbeat train` begins from one.

The rates are for one learner's minibatch (`lr_batch`); with more learners they are scaled and warmed up to, as the
config says. They are long enough for strategies with stale gradients, whose steps are shorter (`policies.damping`), to
come near full-sync (`benchmarks/learning.py`). Nothing here loads torch, so that listing them costs nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from offbeat.train.config import Config, DataConfig, ModelConfig, TrainConfig


class Recipe(NamedTuple):
    """A config, and what to expect of it, in one line."""

    name: str
    summary: str
    config: Config


DEFAULT = "digits-cnn"

_DIGITS = DataConfig(name="digits")
_FASHION = DataConfig(name="fashion-mnist")
_IMAGES = DataConfig(name="synthetic-images")


def _recipe(
    name: str, summary: str, model: ModelConfig, data: DataConfig, train: TrainConfig, sync: str = "ring"
) -> Recipe:
    return Recipe(name, summary, Config(name=name, model=model, data=data, train=train, sync=sync))


_ALL = (
    _recipe(
        "digits-cnn",
        "handwritten digits, a small convolutional network: 98 % in seconds",
        ModelConfig(name="cnn"),
        _DIGITS,
        TrainConfig(epochs=32, lr=0.03, schedule="cosine"),
    ),
    _recipe(
        "digits-mlp",
        "handwritten digits, one hidden layer: 97 %",
        ModelConfig(name="mlp"),
        _DIGITS,
        TrainConfig(epochs=30, lr=0.1, schedule="cosine"),
    ),
    _recipe(
        "digits-softmax",
        "handwritten digits, one linear layer (a convex problem): 95 %",
        ModelConfig(name="softmax"),
        _DIGITS,
        TrainConfig(epochs=20, lr=0.2),
    ),
    _recipe(
        "fashion-cnn",
        "Fashion-MNIST, a small convolutional network: 91 % in 5 epochs",
        ModelConfig(name="cnn", options={"hidden": 64}),
        _FASHION,
        TrainConfig(epochs=5, batch_size=64, lr_batch=64, lr=0.03, schedule="cosine", warmup_epochs=2.0),
    ),
    _recipe(
        "fashion-mlp",
        "Fashion-MNIST, one hidden layer: 88 % in 18 epochs, the fastest",
        ModelConfig(name="mlp"),
        _FASHION,
        TrainConfig(epochs=18, batch_size=64, lr_batch=64, lr=0.04, schedule="cosine", warmup_epochs=1.0),
    ),
    _recipe(
        "fashion-resnet18",
        "Fashion-MNIST, ResNet-18: for a GPU; with --set model.options.width=16 for a CPU",
        ModelConfig(name="resnet18", options={"width": 64}),
        _FASHION,
        TrainConfig(
            epochs=15,
            batch_size=128,
            lr_batch=128,
            lr=0.1,
            nesterov=True,
            weight_decay=5e-4,
            schedule="cosine",
            warmup_epochs=2.0,
        ),
    ),
    _recipe(
        "text-transformer",
        "Python's source code, a small transformer: 60 % of the next characters in 5 epochs",
        ModelConfig(name="transformer", options={"width": 64, "heads": 4, "layers": 2}),
        DataConfig(name="text", options={"context": 64}),
        TrainConfig(
            epochs=5,
            batch_size=32,
            lr_batch=32,
            optimizer="adamw",
            lr=0.003,
            weight_decay=0.01,
            scaling="sqrt",
            schedule="cosine",
            warmup_epochs=0.5,
            clip_norm=1.0,
        ),
    ),
    _recipe(
        "gpt2-small",
        "Python's own sources, GPT-2 small (124 million parameters): for a GPU",
        ModelConfig(
            name="transformer", options={"width": 768, "heads": 12, "layers": 12, "vocabulary": 50304, "tied": True}
        ),
        DataConfig(name="text", options={"context": 1024, "most_bytes": 20_000_000}),
        TrainConfig(
            epochs=1,
            batch_size=8,
            lr_batch=8,
            optimizer="adamw",
            lr=3e-4,
            weight_decay=0.1,
            precision="bf16",
            schedule="cosine",
            warmup_epochs=0.1,
            clip_norm=1.0,
        ),
    ),
    _recipe(
        "images-resnet50",
        "JPEG and PNG files, ResNet-50: for a GPU; --set data.options.folder=FOLDER, with a folder for each class",
        ModelConfig(name="resnet50"),
        DataConfig(name="images", options={"folder": "", "size": 224, "augment": True}),
        TrainConfig(
            epochs=90,
            batch_size=256,
            lr_batch=256,
            lr=0.1,
            weight_decay=1e-4,
            precision="bf16",
            schedule="cosine",
        ),
    ),
    _recipe(
        "synthetic-rare",
        "bags of rare features, an embedding of 200,000 rows with sparse gradients: 80 % in seconds",
        ModelConfig(name="bag"),
        DataConfig(name="synthetic-rare"),
        TrainConfig(epochs=1, batch_size=64, lr_batch=64, optimizer="adagrad", lr=0.3, scaling="none"),
        sync="full-sync",
    ),
    _recipe(
        "synthetic-resnet50",
        "random images in the shape of ImageNet, ResNet-50: for measuring speed",
        ModelConfig(name="resnet50"),
        _IMAGES,
        TrainConfig(epochs=1, batch_size=32, lr_batch=256, lr=0.1, weight_decay=1e-4),
    ),
    _recipe(
        "synthetic-alexnet",
        "random images in the shape of ImageNet, AlexNet: much communication, little computation",
        ModelConfig(name="alexnet"),
        _IMAGES,
        TrainConfig(epochs=1, batch_size=128, lr_batch=128, lr=0.01, weight_decay=5e-4),
    ),
    _recipe(
        "synthetic-vgg16",
        "random images in the shape of ImageNet, VGG-16: the most communication and computation",
        ModelConfig(name="vgg16"),
        _IMAGES,
        TrainConfig(epochs=1, batch_size=32, lr_batch=256, lr=0.01, weight_decay=5e-4),
    ),
)

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}
