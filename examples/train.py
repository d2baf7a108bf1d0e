"""A model, data and loss of your own, trained with any strategy by offbeat.train.train().

python train.py --sync k-async:2 --learners 3
torchrun --nproc-per-node 3 train.py --sync ring
"""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

from offbeat.train import Config, Task, TrainConfig, train


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sync", default="k-async:2")
    parser.add_argument("--learners", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=5)
    given = parser.parse_args()

    chance = torch.Generator().manual_seed(0)
    points = torch.rand(2400, 2, generator=chance) * 2 - 1
    inside = (points.square().sum(1) < 0.6).long()  # is a point in a circle?
    task = Task(
        train=TensorDataset(points[:2000], inside[:2000]),
        test=TensorDataset(points[2000:], inside[2000:]),
        build=lambda: nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)),
        loss=nn.CrossEntropyLoss(),
    )
    how = TrainConfig(epochs=given.epochs, batch_size=16, lr=0.05, lr_batch=16)
    result = train(Config(name="circle", sync=given.sync, learners=given.learners, train=how), task)
    if result:
        print(f"{result['strategy']}: {100 * result['accuracy']:.1f} % right, {result['samples_per_s']:,.0f} samples/s")


if __name__ == "__main__":
    main()
