"""An ordinary Lightning script but for one argument: each process is a learner of whatever line `offbeat run` has."""

from __future__ import annotations

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from offbeat.datasets import digits
from offbeat.integrations.lightning import OffbeatStrategy


class Digits(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        right = (self.layers(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.15, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--saves", default=None)
    parser.add_argument("--resume", default=None)
    options = parser.parse_args()
    data = digits()
    training = TensorDataset(torch.from_numpy(data.images), torch.from_numpy(data.digits))
    test = TensorDataset(torch.from_numpy(data.test_images), torch.from_numpy(data.test_digits))
    saves = [ModelCheckpoint(options.saves, "{epoch}", save_top_k=-1)] if options.saves else []
    trainer = lightning.Trainer(
        strategy=OffbeatStrategy(),  # the one argument
        accelerator="cpu",
        devices=1,
        max_epochs=options.epochs,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=5.0,
        callbacks=saves,
        enable_checkpointing=bool(saves),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits()
    trainer.fit(model, DataLoader(training, 32, shuffle=True), DataLoader(test, 512), ckpt_path=options.resume)
    with torch.no_grad():
        right = (model.layers(test.tensors[0]).argmax(1) == test.tensors[1]).float().mean()
    if trainer.is_global_zero:
        validated = float(trainer.callback_metrics["accuracy"])
        total = sum(float(one.double().sum()) for one in model.parameters())
        print(f"accuracy {100 * float(right):.2f} validated {100 * validated:.2f} weights {total!r}")


if __name__ == "__main__":
    main()
