"""An ordinary PyTorch Lightning script: the backend is one word of the strategy. Lightning starts the other rank."""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning  # type: ignore[import-not-found, unused-ignore]
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Batch = tuple[Tensor, Tensor]


class Regression(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 1))
        self.used = ""

    def loss(self, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def training_step(self, batch: Batch, number: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, number: int) -> None:
        self.log("validation", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def on_train_end(self) -> None:
        self.used = dist.get_backend()


def make_loader(examples: int, seed: int, shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(examples, 12, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), batch_size=8, shuffle=shuffle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    lightning.seed_everything(5, verbose=False)
    model = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=options.backend, bucket_cap_mb=0.001),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, make_loader(80, seed=1, shuffle=True), make_loader(32, seed=2))
    if trainer.is_global_zero:
        tensors = [*model.parameters(), *model.buffers()]
        numbers = [tensor.detach().double().numpy().ravel() for tensor in tensors]
        metrics = [trainer.callback_metrics[name].reshape(1).double().numpy() for name in ("loss", "validation")]
        np.save(options.out / "parameters.npy", np.concatenate([*numbers, *metrics]))
        print(f"trained on {trainer.world_size} ranks by {model.used}")


if __name__ == "__main__":
    main()
