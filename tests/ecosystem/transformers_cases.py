"""What Hugging Face's Trainer does every few steps, and at the end: `transformers_cases.py CASE FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from offbeat.integrations.transformers import OffbeatCallback

SAMPLES, CLIP = 96, 0.01


class Sums(Dataset[dict[str, Tensor]]):
    def __init__(self) -> None:
        self.inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.inputs[index].sum(0, keepdim=True)}


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.layers(inputs)
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


def main(case: str, folder: str) -> None:
    by_steps: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "steps", "eval_steps": 5}
    best = {"save_strategy": "epoch", "load_best_model_at_end": True, "greater_is_better": True}  # so it is the worst
    cases: dict[str, dict[str, Any]] = {
        "by-steps": by_steps,
        "resumed": by_steps,
        "best": best | {"metric_for_best_model": "eval_loss"},
        "max-steps": {"max_steps": 18},
        "clipped": {"gradient_accumulation_steps": 5, "max_grad_norm": CLIP},
    }
    settings: dict[str, Any] = {"num_train_epochs": 2, "save_strategy": "no", "eval_strategy": "epoch"} | cases[case]
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=8,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **settings,
    )
    model = Sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if case == "clipped":
        optimizer.register_step_pre_hook(lambda *_: tell_norm(model))
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Sums(), eval_dataset=Sums(), optimizers=(optimizer, None)
    )
    trainer.add_callback(OffbeatCallback(trainer))
    if trainer.is_world_process_zero():
        print("main process")
    within = sorted(Path(folder).glob("checkpoint-[5-9]"))
    trainer.train(resume_from_checkpoint=str(within[0]) if case == "resumed" else None)
    state = trainer.state
    evaluated = len([one for one in state.log_history if "eval_loss" in one])
    last, best_metric = trainer.evaluate()["eval_loss"], state.best_metric or 0.0
    print(
        f"ended at {state.global_step}, epoch {state.epoch}, evaluated {evaluated} times, last {last:.7f} "
        f"best {best_metric:.7f}"
    )


def tell_norm(model: nn.Module) -> None:
    found = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
    print(f"norm {float(found.norm())}")


if __name__ == "__main__":
    main(*sys.argv[1:])
