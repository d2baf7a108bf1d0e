"""An ordinary Hugging Face Trainer script but for one line: each process is a learner of the line of `offbeat run`."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from offbeat.datasets import digits
from offbeat.integrations.transformers import OffbeatCallback


class Images(Dataset[dict[str, Tensor]]):
    def __init__(self, images: Any, labels: Any) -> None:
        self.images, self.labels = torch.from_numpy(images), torch.from_numpy(labels)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixels": self.images[index], "labels": self.labels[index]}


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layers(pixels)
        found = {"logits": logits}
        return found if labels is None else {"loss": nn.functional.cross_entropy(logits, labels), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--saves", required=True)
    parser.add_argument("--resume", default=None)
    options = parser.parse_args()
    data = digits()
    model = Digits()
    arguments = TrainingArguments(
        options.saves,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=32,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        save_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        logging_steps=10_000,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Images(data.images, data.digits))
    trainer.add_callback(OffbeatCallback(trainer))  # the one line
    trainer.train(resume_from_checkpoint=options.resume)
    with torch.no_grad():
        right = model(torch.from_numpy(data.test_images))["logits"].argmax(1) == torch.from_numpy(data.test_digits)
    if trainer.is_world_process_zero():
        total = sum(float(one.detach().double().sum()) for one in model.parameters())
        print(f"accuracy {100 * float(right.float().mean()):.2f} weights {total!r}")


if __name__ == "__main__":
    main()
