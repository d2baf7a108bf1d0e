"""What Lightning does within epochs and after the training: `lightning_cases.py CASE FOLDER`, under `offbeat run`."""

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from offbeat.integrations.lightning import OffbeatStrategy

CLIP = 0.01


class Sum(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
    def __init__(self, case: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case = case
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.case == "logs-after-batches":
            self.log("after", 1.0, sync_dist=True)

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        self.log("validated", self.loss(batch), sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        self.log("tested", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        if self.case == "clipped":
            optimizer.register_step_pre_hook(lambda *_: self.tell_norm())
        if self.case == "schedule-by-epoch":
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
        return optimizer

    def tell_norm(self) -> None:
        found = torch.cat([one.grad.flatten() for one in self.parameters() if one.grad is not None])
        print(f"norm {float(found.norm())}")


@rank_zero_only  # type: ignore[untyped-decorator, unused-ignore]
def tell() -> None:
    print("main process")


def main(case: str, folder: str) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(96, 4, generator=generator)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    cases: dict[str, dict[str, Any]] = {
        "checkpoints-by-step": {"callbacks": [ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1)]},
        "limited": {"limit_train_batches": 3},
        "max-steps": {"max_steps": 4},
        "clipped": {"gradient_clip_val": CLIP, "accumulate_grad_batches": 5},
        "validates-within-epochs": {"val_check_interval": 2},
    }
    more = cases.get(case, {})
    trainer = lightning.Trainer(
        strategy=OffbeatStrategy(),
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        logger=False,
        enable_checkpointing="callbacks" in more,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )
    tell()
    model = Sum(case)
    trainer.fit(model, DataLoader(data, 8, shuffle=True), DataLoader(data, 32))
    found = trainer.callback_metrics.get("validated", torch.zeros(()))
    print(f"validated {float(found):.7f} rate {trainer.optimizers[0].param_groups[0]['lr']:g}")
    if case == "tested":
        trainer.test(model, DataLoader(data, 32), verbose=False)
    if case == "two-fits":
        trainer.fit_loop.max_epochs = 4
        trainer.fit(model, DataLoader(data, 8, shuffle=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
