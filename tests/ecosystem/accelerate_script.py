"""An ordinary Hugging Face accelerate script, but for one line.

On CPUs accelerate takes no backend but gloo and MPI: InitProcessGroupKwargs(backend="offbeat") is refused ("not
available, please use gloo"). It does use a process group that is already there, so the script makes it first.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator  # type: ignore[import-not-found, import-untyped, unused-ignore]
from accelerate.utils import InitProcessGroupKwargs  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def make_loader(examples: int) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(examples, 12, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), batch_size=8, shuffle=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="", help="nothing: what accelerate chooses itself")
    parser.add_argument("--ask-accelerate", action="store_true", help="let accelerate make the process group")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    handlers = []
    if options.ask_accelerate:
        handlers.append(InitProcessGroupKwargs(backend=options.backend))
    elif options.backend:
        dist.init_process_group(options.backend)  # the one line
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=handlers)

    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(100))
    seen = []
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                outputs = model(inputs)
                accelerator.backward(nn.functional.mse_loss(outputs, targets))
                optimizer.step()
            seen.append(accelerator.gather_for_metrics(outputs.detach()))
    mean = accelerator.reduce(outputs.detach().mean(), reduction="mean")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        whole = accelerator.unwrap_model(model)
        tensors = [*whole.parameters(), *whole.buffers(), *seen, mean]
        numbers = [tensor.detach().double().numpy().ravel() for tensor in tensors]
        np.save(options.out / "parameters.npy", np.concatenate(numbers))
        print(f"trained on {accelerator.num_processes} ranks by {dist.get_backend()}")
    accelerator.wait_for_everyone()
    del model, optimizer  # the model's reducer holds the group: see ddp_script.py
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main()
