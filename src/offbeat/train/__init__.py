"""Training by recipe: what `offbeat train` does, and what a program of one's own can do in a few lines.

    from offbeat.train import Config, Task, train

    result = train(Config(sync="k-async:2", learners=4), Task(train=..., test=..., build=..., loss=...))

Nothing is loaded before it is asked for: a configuration can be read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offbeat.train.config import Config, DataConfig, ModelConfig, SaveConfig, TrainConfig
    from offbeat.train.launch import train
    from offbeat.train.reading import override, read_recipe
    from offbeat.train.tasks import Task
    from offbeat.train.virtual import Clock, train_virtually

_HOMES = {
    "Config": "config",
    "ModelConfig": "config",
    "DataConfig": "config",
    "TrainConfig": "config",
    "SaveConfig": "config",
    "Task": "tasks",
    "read_recipe": "reading",
    "override": "reading",
    "train": "launch",
    "Clock": "virtual",
    "train_virtually": "virtual",
}
__all__ = [
    "Clock",
    "Config",
    "DataConfig",
    "ModelConfig",
    "SaveConfig",
    "Task",
    "TrainConfig",
    "override",
    "read_recipe",
    "train",
    "train_virtually",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'offbeat.train' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(f"offbeat.train.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    special = (name for name in globals() if name.startswith("__") and name.endswith("__"))
    return sorted({*__all__, *special})
