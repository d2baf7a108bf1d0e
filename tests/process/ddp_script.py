"""An ordinary DDP training script, as one would write it for any backend: nothing in it knows of offbeat.

Started by torchrun, or with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 6 * 6, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def make_data(examples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(examples, 1, 12, 12, generator=generator)
    teacher = torch.randn(12 * 12, 10, generator=generator)
    return TensorDataset(images, (images.flatten(1) @ teacher).argmax(1))


def train(epochs: int) -> tuple[DistributedDataParallel, float]:
    """The trained model and the last loss of this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1 + rank)  # DDP gives everybody the parameters of rank 0
    model = DistributedDataParallel(make_model(), bucket_cap_mb=0.004)  # four buckets
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()

    data = make_data(examples=5 * 8 * world)  # five minibatches of 8 a rank
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_of(model(images), labels)
            loss.backward()
            optimizer.step()
    return model, loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    dist.init_process_group(options.backend)
    model, loss = train(options.epochs)
    if dist.get_rank() == 0:
        parameters = np.concatenate([tensor.detach().numpy().ravel() for tensor in model.parameters()])
        np.save(options.out / "parameters.npy", parameters)
        (options.out / "sha256").write_text(hashlib.sha256(parameters.tobytes()).hexdigest(), encoding="utf-8")
        print(f"loss {loss:.4f} on {dist.get_world_size()} ranks by {dist.get_backend()}")
    dist.barrier()
    del model  # its reducer holds the group; gloo deadlocks now and then where that is the last to let go of it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
