"""A learner's script whose weights can be computed again from the log alone, and that injures itself where it is told.

The gradient of a sample is the sample: whole numbers, so every sum is exact. With a rate and a momentum that are powers
of two each step rounds once, wherever it is computed, and numpy gives the bits that the servers gave.

It is started with the path of a file that holds an `Order`, as JSON. It goes through epochs until all blows have fallen
and every learner has pushed since, whoever was killed or stopped among them; and then through `MORE`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from array import array
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import offbeat
from process import fault_points

SAMPLES, BATCH, MORE = 48, 4, 2
SIZES = (20, 24, 20)  # of parameters, each in a group of its own: an update is made in parts, on one server or on two
LR, MOMENTUM = (0.5**6, 0.5**8, 0.5**7), 0.5
LIMIT_S = 40.0  # in which all must have come
LATE = ("bye", "end", "hear-bye")  # points that are reached when all is done


def sample(number: int) -> list[float]:
    """Whole numbers, no two samples alike."""
    return [float((number * 7919 + place * 104729 + number * place * 31) % 2003 - 1001) for place in range(sum(SIZES))]


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor(sample(number), dtype=torch.float64)


class Model(nn.Module):
    """What it says of a batch has that batch's sum for its gradient."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(size, dtype=torch.float64)) for size in sizes])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (torch.cat(list(self.parts)) * batch.sum(0)).sum()


def momentum_of(sync: str) -> float:
    """None where learners make steps of their own: what those push would depend on their state."""
    return 0.0 if sync.startswith(("local-sgd", "downpour")) else MOMENTUM


def digest_of(weights: list[float]) -> str:
    return blake2b(array("d", weights).tobytes(), digest_size=8).hexdigest()


def spoil(model: Model) -> None:
    """One number of a gradient is not finite."""
    gradient = model.parts[1].grad
    assert gradient is not None
    gradient[3] = float("nan")


def await_file(path: Path) -> None:
    end = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path.name} did not come")
        time.sleep(0.002)


def main(order_path: Path) -> None:
    order: dict[str, Any] = json.loads(order_path.read_text(encoding="utf-8"))
    faulthandler.dump_traceback_later(order["limit_s"] * 0.9)  # whoever still waits then says for what
    folder, number = order_path.parent, int(os.environ["OFFBEAT_LEARNER"])
    (folder / "address").write_text(os.environ["OFFBEAT_ADDRESS"], encoding="utf-8")
    life = len(list(folder.glob(f"life-{number}-*")))
    (folder / f"life-{number}-{life}").touch()
    points = fault_points.learner(order, folder, number)
    points("start")
    learner: Any = offbeat.join()
    odd = order.get("odd") == number
    if odd:
        await_file(folder / "prepared")
    model = Model((*SIZES, 3) if odd else SIZES)
    groups = [{"params": [part], "lr": lr} for part, lr in zip(model.parts, (*LR, LR[0]), strict=False)]
    optimizer = torch.optim.SGD(groups, lr=LR[0], momentum=momentum_of(order["sync"]))
    loader = DataLoader(Samples(), batch_size=BATCH, num_workers=order.get("workers", 0))
    model, optimizer, batches = learner.prepare(model, optimizer, loader)
    reads = (folder / f"reads-{number}-{life}").open("w", encoding="utf-8", buffering=1)
    end, left = time.monotonic() + LIMIT_S, MORE
    blows = [folder / f"struck-{blow['name']}" for blow in order["blows"] if blow["at"] not in LATE]
    others = [folder / f"met-{one}" for one in range(learner.learners) if one not in order["absent"]]
    mine = folder / f"met-{number}"
    while left:
        left -= all(path.exists() for path in others)
        if time.monotonic() > end:
            raise TimeoutError("not all came")
        for batch in batches:
            fallen = all(path.exists() for path in blows)
            with learner.minibatch():
                read = digest_of(torch.cat([part.detach() for part in model.parts]).tolist())
                reads.write(f"{learner.version} {read}\n")
                points("compute")
                optimizer.zero_grad()
                loss = model(batch)
                loss.backward()
                points("computed", lambda: spoil(model))
                optimizer.step()
                if fallen:
                    mine.touch()
    points("end")
    learner.finish()
    weights = [part.tolist() for part in model.parts]
    (folder / f"weights-{number}").write_text(
        json.dumps({"version": learner.version, "weights": weights}), encoding="utf-8"
    )
    learner.close()
    reads.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
