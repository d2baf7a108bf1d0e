"""A training loop without offbeat: what one device gives to somebody who writes the loop by hand.

    python benchmarks/plain_loop.py --model resnet50 --batch 256             # eager
    python benchmarks/plain_loop.py --model resnet50 --batch 256 --graph     # compiled, the whole step in a CUDA graph

Both use channels_last, cudnn.benchmark, a fused optimizer and autocast, and keep their input on the device; neither
reads samples, counts, clips, checks for infinities or saves. The first 50 updates are not counted. Printed is one line
of JSON. It is what `offbeat train` is measured against, on a GPU; on a CPU the loop is eager.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from offbeat.train.models import build_model

WARMUP = 50
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def model_of(name: str) -> tuple[nn.Module, Callable[[int], tuple[Tensor, Tensor]]]:
    """A model, and what gives it a minibatch."""
    if name == "gpt2-small":
        options = {"width": 768, "heads": 12, "layers": 12, "vocabulary": 50_304, "tied": True}
        model = build_model("transformer", (1024,), 256, options)
        return model, lambda many: (torch.randint(256, (many, 1024)), torch.randint(256, (many, 1024)))
    size = 8 if name == "cnn" else 28 if name == "fashion-cnn" else 224
    channels, classes = (1, 10) if size < 224 else (3, 1000)
    options = {"hidden": 64} if name == "fashion-cnn" else {}
    model = build_model(name.removeprefix("fashion-"), (channels, size, size), classes, options)
    return model, lambda many: (torch.randn(many, channels, size, size), torch.randint(classes, (many,)))


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.dim() == 3:  # scores of characters
        return functional.cross_entropy(outputs.transpose(1, 2).reshape(-1, outputs.shape[1]), targets.reshape(-1))
    return functional.cross_entropy(outputs, targets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", help="resnet50, alexnet, vgg16, cnn, fashion-cnn, gpt2-small")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--precision", default="bf16", choices=["fp32", "tf32", *HALVES])
    parser.add_argument("--updates", type=int, default=300, help="that are counted")
    parser.add_argument("--graph", action="store_true", help="compiled, and captured in a CUDA graph")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    device = torch.device(given.device)
    torch.manual_seed(0)
    if device.type == "cpu":
        torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = given.precision == "tf32"
    model, batch_of = model_of(given.model)
    inputs, targets = (one.to(device) for one in batch_of(given.batch))
    model = model.to(device)
    if inputs.dim() == 4 and device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch's stubs lack it
        inputs = inputs.to(memory_format=torch.channels_last)
    if given.model == "gpt2-small":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), lr=3e-4, fused=True, capturable=given.graph
        )
    else:
        lr = torch.tensor(0.01, device=device) if given.graph else 0.01
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4, fused=True)
    compiled = torch.compile(model) if given.graph else model
    scaler = torch.amp.GradScaler(device.type, enabled=given.precision == "fp16" and not given.graph)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=HALVES.get(given.precision), enabled=given.precision in HALVES):
            loss = loss_of(compiled(inputs), targets)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call] # torch's own
        scaler.step(optimizer)
        scaler.update()

    run = captured(step) if given.graph else step
    for _ in range(WARMUP):
        run()
    wait(device)
    began = time.perf_counter()
    for _ in range(given.updates):
        run()
    wait(device)
    took = time.perf_counter() - began
    told = {"model": given.model, "batch": given.batch, "precision": given.precision, "graph": given.graph}
    print(json.dumps(told | {"samples_per_s": round(given.batch * given.updates / took, 1)}))


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as one CUDA graph; it runs a few times before, so that everything has its memory."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch's own
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(5):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
