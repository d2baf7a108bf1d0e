"""Programs around `offbeat.join()` as people write them, right and wrong: `joined_programs.py CASE [FOLDER]`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import offbeat

SAMPLES, BATCH = 96, 8


class Batches:
    """A batch sampler of one's own, in an order of its own."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES).tolist()
        return iter([order[start : start + BATCH] for start in range(0, SAMPLES, BATCH)])

    def __len__(self) -> int:
        return SAMPLES // BATCH


def main(case: str, folder: str = "") -> None:
    learner = offbeat.join()
    torch.manual_seed(learner.number if case == "batches" else 0)
    numbers = torch.arange(SAMPLES, dtype=torch.float32)
    data = TensorDataset(torch.stack([numbers / SAMPLES, torch.ones(SAMPLES)], 1), numbers)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=case == "fused")
    if case == "weighted":
        weights = [1.0] * (SAMPLES // 2) + [0.0] * (SAMPLES // 2)
        loader = DataLoader(data, BATCH, sampler=WeightedRandomSampler(weights, SAMPLES))
    elif case == "batches":
        loader = DataLoader(data, batch_sampler=Batches())
    else:
        loader = DataLoader(data, BATCH, shuffle=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
    epochs, saved = 4, Path(folder) / "saved.pt"
    if case in ("resumed", "resumed-plain"):
        state = torch.load(saved, weights_only=True)
        scheduler.load_state_dict(state["scheduler"])
        if case == "resumed":
            learner.load_state_dict(state["learner"])
        else:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        epochs = 2
    trained: Any = model
    if case == "ignored":
        learner.prepare(model, optimizer, loader)
    else:
        trained, optimizer, loader, scheduler = learner.prepare(model, optimizer, loader, scheduler)
    if case == "resumed-plain":
        loader.epoch = 2
    if case == "late":
        optimizer.load_state_dict(optimizer.state_dict())
    for epoch in range(epochs):
        seen: list[int] = []
        for inputs, which in loader:
            with learner.minibatch():
                optimizer.zero_grad()
                loss: Any = nn.functional.mse_loss(trained(inputs)[:, 0], which / SAMPLES)
                loss.backward()
                optimizer.step()
            scheduler.step()
            seen += which.int().tolist()
        if epoch == 0:
            every = [number for one in learner.gather(seen) for number in one]
            share = learner.all_reduce(len(seen), "sum")
            if learner.number == 0:
                print(f"{case}: {share} seen, {len(set(every))} different, largest {max(every)}")
        if case == "saved" and epoch == 1:
            learner.barrier()
            if learner.number == 0:
                own = optimizer.state_dict()
                weights_now = learner.state_dict()
                found = {"learner": weights_now, "scheduler": scheduler.state_dict()}
                torch.save(found | {"model": weights_now["model"], "optimizer": own}, saved)
            learner.barrier()
        if case == "inside" and epoch == 0:
            with learner.minibatch():
                learner.barrier()
    learner.finish()
    if learner.number == 0:
        total = [one.detach().double() for one in model.parameters()]
        print(f"{case}: {sum(float(one.sum()) for one in total)!r} after {scheduler.last_epoch}")


if __name__ == "__main__":
    main(*sys.argv[1:])
