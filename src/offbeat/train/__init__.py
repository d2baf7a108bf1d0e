"""Training from Python without a loop of your own: what `offbeat train` does. One field chooses the strategy.

    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from offbeat.train import Config, Task, TrainConfig, train

    inputs = torch.rand(2400, 4)
    targets = (inputs.sum(1) > 2).long()
    task = Task(
        train=TensorDataset(inputs[:2000], targets[:2000]),
        test=TensorDataset(inputs[2000:], targets[2000:]),
        build=lambda: nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2)),
        loss=nn.CrossEntropyLoss(),
    )
    result = train(Config(name="sums", sync="k-sync:2", learners=3, train=TrainConfig(epochs=5, lr=0.1)), task)
    print(result["accuracy"], result["run_dir"])

    train               train, and return what came of it; `help(offbeat.train.train)` has the arguments
    Config              the whole configuration: name, sync, learners, servers, seed, device, model, data, train, save
    TrainConfig, ...    its sections: TrainConfig (epochs, batch_size, lr, ...), ModelConfig, DataConfig, SaveConfig
    Task                data, model and loss that your program has made
    read_recipe         a built-in recipe ("digits-cnn"), a TOML file or a run's config.json, as a Config
    override            a Config with fields changed: override(config, {"train.epochs": "5"})
    train_virtually     the same training in simulated time, on a Clock: machines that you describe

`offbeat recipes digits-cnn` prints every field with a line on each. Nothing is loaded before it is asked for: a
configuration can be read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offbeat.train.config import Config, DataConfig, ModelConfig, SaveConfig, TrainConfig
    from offbeat.train.config_files import override, read_recipe
    from offbeat.train.from_python import train
    from offbeat.train.tasks import Task

_HOMES = {
    "Config": "offbeat.train.config",
    "ModelConfig": "offbeat.train.config",
    "DataConfig": "offbeat.train.config",
    "TrainConfig": "offbeat.train.config",
    "SaveConfig": "offbeat.train.config",
    "Task": "offbeat.train.tasks",
    "read_recipe": "offbeat.train.config_files",
    "override": "offbeat.train.config_files",
    "train": "offbeat.train.from_python",
    "Clock": "offbeat.predict.machines",
    "train_virtually": "offbeat.predict.virtual",
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

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    special = (name for name, value in globals().items() if name.startswith("__") and not callable(value))
    return sorted({*__all__, *special})
