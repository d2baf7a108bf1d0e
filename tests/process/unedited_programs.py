"""Programs as other people write them: each asks for `gloo` and checks what it got; none knows of offbeat.

Real ones (nanoGPT, timm, pytorch/examples) cannot be installed here, so these have their shape. Every program is a
function that trains for 20 updates as one of two ranks and returns what it trained. Started as a program, this file
imports torch once and forks the two ranks of each; what they return is in NAME/rank-N.npy of the folder it is given.
OFFBEAT_REPLACE decides from outside on which backend they run.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # as the first step of any torch optimizer does: once here, not once a rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_into
from torch.distributed.checkpoint.state_dict_saver import async_save as async_save_to
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

RANKS, UPDATES = 2, 20
LIMIT_S = 400.0  # of one program; it ends only what hangs
COMPILER = "inductor" if shutil.which("g++") else "aot_eager"  # inductor needs a C++ compiler

Trained = Iterable[Tensor]


# --- what the programs train ----------------------------------------------------------------------------------------


class Net(nn.Module):
    """Batch norm has buffers, which DDP broadcasts in each forward pass."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(6, 32)
        self.norm: nn.Module = nn.BatchNorm1d(32) if norm else nn.Identity()
        self.down = nn.Linear(32, 4)

    def forward(self, tensor: Tensor) -> Tensor:
        result: Tensor = self.down(torch.tanh(self.norm(self.up(tensor))))
        return result


def net(norm: bool = True) -> Net:
    torch.manual_seed(1)
    return Net(norm)


def data(examples: int = 160) -> Dataset[tuple[Tensor, ...]]:
    inputs = torch.randn(examples, 6, generator=torch.Generator().manual_seed(2))
    return TensorDataset(inputs, inputs[:, :4].sin())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, updates: int = UPDATES) -> None:
    for update in range(updates):
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * update + dist.get_rank()))
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(model(inputs), inputs[:, :4].sin()))
        optimizer.step()


def whole(tensors: Iterable[Tensor]) -> Trained:
    return [(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach() for tensor in tensors]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


# --- programs that hard-code their backend, or check its name -----------------------------------------------------


def hard_coded() -> Trained:
    """As in pytorch/examples: the backend is a word in the code, the data is split by a sampler."""
    dist.init_process_group(backend="gloo")
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    dataset = data()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
    total = torch.tensor([float(len(sampler))])
    dist.reduce(total, dst=0)
    return [*model.module.parameters()]


def checked_name() -> Trained:
    """As in timm: the backend goes through the arguments, and is looked at; metrics go through groups of its own."""
    asked = "cpu:gloo"
    assert dist.is_gloo_available() and dist.is_backend_available("gloo")
    dist.init_process_group(backend=asked, init_method="env://")
    assert dist.get_backend() == asked
    group = dist.new_group(backend="gloo")
    assert dist.get_backend(group) == dist.Backend.GLOO
    dist.monitored_barrier(group)
    model = DistributedDataParallel(net(), process_group=group)
    train(model, adam(model))
    metric = torch.ones(1) * dist.get_rank()
    dist.all_reduce(metric, group=group)
    return [*model.module.parameters(), metric / RANKS]


def no_backend() -> Trained:
    """torch chooses: Gloo, where there is no GPU."""
    dist.init_process_group()
    model = DistributedDataParallel(net())
    train(model, adam(model))
    return [*model.module.parameters()]


class Block(nn.Module):
    """One of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tensor: Tensor) -> Tensor:
        batch, length, width = tensor.shape
        parts = self.attention(self.first(tensor)).chunk(3, -1)
        query, key, value = (one.view(batch, length, 2, -1).transpose(1, 2) for one in parts)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        tensor = tensor + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = tensor + self.mlp(self.second(tensor))
        return result


def nano_gpt() -> Trained:
    """As nanoGPT: a hard-coded backend, DDP around a compiled model, gradients of some minibatches in one update."""
    backend, accumulated = "gloo", 4
    dist.init_process_group(backend=backend)
    rank = dist.get_rank()
    torch.manual_seed(1337)
    raw = nn.Sequential(nn.Embedding(32, 16), Block(16), nn.LayerNorm(16), nn.Linear(16, 32))
    model = DistributedDataParallel(torch.compile(raw, backend=COMPILER))
    optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-3, betas=(0.9, 0.95))
    letters = torch.randint(32, (4096,), generator=torch.Generator().manual_seed(3))
    source = torch.Generator().manual_seed(100 + rank)
    for _ in range(UPDATES):
        for minibatch in range(accumulated):
            model.require_backward_grad_sync = minibatch == accumulated - 1
            starts = torch.randint(4096 - 9, (4,), generator=source).tolist()
            inputs = torch.stack([letters[start : start + 8] for start in starts])
            targets = torch.stack([letters[start + 1 : start + 9] for start in starts])
            loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / accumulated
            torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return raw.parameters()


def compiled_ddp() -> Trained:
    """The other way round: compiled around DDP, so that DDP's broadcasts of buffers are called from compiled code."""
    dist.init_process_group("gloo")
    raw = net()
    model = torch.compile(DistributedDataParallel(raw), backend=COMPILER)
    train(model, adam(raw))  # type: ignore[arg-type] # a module too
    return [*raw.parameters(), *raw.buffers()]


def compiled_fsdp2() -> Trained:
    dist.init_process_group("gloo")
    model = net()
    fully_shard(model.up)
    fully_shard(model)
    train(torch.compile(model, backend=COMPILER), adam(model))  # type: ignore[arg-type] # a module too
    return whole(model.parameters())


# --- checkpoints ----------------------------------------------------------------------------------------------------


def sharded(norm: bool = False) -> tuple[Net, torch.optim.Optimizer]:
    """Made as FSDP2 makes it."""
    model = net(norm)
    fully_shard(model.up)
    fully_shard(model)
    return model, adam(model)


def async_save() -> Trained:
    """FSDP2 and DCP: half of the updates, a checkpoint in the background, the other half from it in a new model."""
    dist.init_process_group("gloo")
    model, optimizer = sharded()
    train(model, optimizer, UPDATES // 2)
    state: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    saved: Any = async_save_to(state, checkpoint_id="checkpoint")
    saved.result()
    again, its = sharded()
    state = {"model": get_model_state_dict(again), "optimizer": get_optimizer_state_dict(again, its)}
    load_into(state, checkpoint_id="checkpoint")
    set_model_state_dict(again, state["model"])
    set_optimizer_state_dict(again, its, state["optimizer"])
    train(again, its, UPDATES // 2)
    return whole(again.parameters())


FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
TO_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)


def model_from_rank_0() -> Trained:
    dist.init_process_group("gloo")
    model, optimizer = sharded()
    train(model, optimizer, UPDATES // 2)
    state = get_model_state_dict(model, options=TO_RANK_0)
    again, its = sharded()
    set_model_state_dict(again, state if dist.get_rank() == 0 else {}, options=FROM_RANK_0)
    train(again, its, UPDATES // 2)
    return whole(again.parameters())


def optimizer_from_rank_0() -> Trained:
    dist.init_process_group("gloo")
    model, optimizer = sharded()
    train(model, optimizer, UPDATES // 2)
    state = get_optimizer_state_dict(model, optimizer, options=TO_RANK_0)
    again, its = sharded()
    set_optimizer_state_dict(again, its, state if dist.get_rank() == 0 else {}, options=FROM_RANK_0)
    train(again, its, UPDATES // 2)
    return whole(again.parameters())


def fsdp1(kind: StateDictType) -> Trained:
    """The first FSDP, whose state dict has a kind."""
    dist.init_process_group("gloo")
    here = torch.device("cpu")
    model = FullyShardedDataParallel(net(norm=False), device_id=here)
    train(model, adam(model), UPDATES // 2)
    again = FullyShardedDataParallel(net(norm=False), device_id=here)
    with FullyShardedDataParallel.state_dict_type(model, kind):
        state = model.state_dict()
    with FullyShardedDataParallel.state_dict_type(again, kind):
        again.load_state_dict(state)
    train(again, adam(again), UPDATES // 2)
    with FullyShardedDataParallel.summon_full_params(again):
        return [tensor.detach().clone() for tensor in again.parameters()]


def fsdp1_full() -> Trained:
    return fsdp1(StateDictType.FULL_STATE_DICT)


def fsdp1_sharded() -> Trained:
    return fsdp1(StateDictType.SHARDED_STATE_DICT)


def fsdp1_local() -> Trained:
    return fsdp1(StateDictType.LOCAL_STATE_DICT)


# --- other ways to be parallel ----------------------------------------------------------------------------------------


def tensor_parallel() -> Trained:
    dist.init_process_group("gloo")
    model = net(norm=False)
    parallelize_module(model, init_device_mesh("cpu", (RANKS,)), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = adam(model)
    for update in range(UPDATES):
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(update))  # the same on all ranks
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(model(inputs), inputs[:, :4].sin()))
        optimizer.step()
    return whole(model.parameters())


def pipelining() -> Trained:
    """Two stages, which ask each other for the shapes of what they exchange. Each rank returns its own."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    part = [nn.Sequential(nn.Linear(6, 32), nn.Tanh()), nn.Sequential(nn.Linear(32, 4))][rank]
    stage = PipelineStage(part, rank, RANKS, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizer = adam(part)
    for update in range(UPDATES):
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(update))
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=inputs[:, :4].sin())
        optimizer.step()
    return part.parameters()


# --- frameworks: they make the group themselves, and check its name --------------------------------------------------


def accelerate() -> Trained:
    from accelerate import Accelerator  # type: ignore[import-not-found, import-untyped, unused-ignore]

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert dist.get_backend() == "gloo"
    torch.manual_seed(5)
    model = net()
    loader = DataLoader(data(640), batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, adam(model), loader)
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            outputs = model(inputs)
            accelerator.backward(nn.functional.mse_loss(outputs, targets))
            optimizer.step()
    seen = accelerator.gather_for_metrics(outputs.detach())
    raw = accelerator.unwrap_model(model)
    return [*raw.parameters(), *raw.buffers(), seen]


def hugging_face() -> Trained:
    """A tiny GPT-2 by the Trainer."""
    from transformers import (  # type: ignore[import-not-found, unused-ignore]
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    set_seed(1)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    model = GPT2LMHeadModel(config)
    letters = torch.randint(64, (320, 16), generator=torch.Generator().manual_seed(2))
    examples = [{"input_ids": line, "labels": line} for line in letters]
    options = TrainingArguments(
        output_dir="trainer", use_cpu=True, max_steps=UPDATES, per_device_train_batch_size=4, report_to=[],
        gradient_accumulation_steps=2, save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=1,
    )  # fmt: skip
    trainer = Trainer(model=model, args=options, train_dataset=examples, eval_dataset=examples[:16])
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    assert dist.get_backend() == "gloo"
    return [*model.parameters(), torch.tensor([loss])]


def lightning() -> Trained:
    """Here the backend is an option, and offbeat is taken by its name."""
    import lightning as framework  # type: ignore[import-not-found, unused-ignore]
    from lightning.pytorch.strategies import DDPStrategy  # type: ignore[import-not-found, unused-ignore]

    class Module(framework.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adam(self)

    backend = os.environ.get("BACKEND", "gloo")
    framework.seed_everything(5, verbose=False)
    module = Module()
    trainer = framework.Trainer(
        accelerator="cpu", devices=RANKS, strategy=DDPStrategy(process_group_backend=backend), max_steps=UPDATES,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data(640), batch_size=8, shuffle=True))
    return [*module.parameters(), *module.buffers()]


CHECKPOINTS = (async_save, model_from_rank_0, optimizer_from_rank_0, fsdp1_full, fsdp1_sharded, fsdp1_local)
QUICK = (hard_coded, checked_name, no_backend, *CHECKPOINTS, tensor_parallel, pipelining)
COMPILED = (nano_gpt, compiled_ddp, compiled_fsdp2)
FRAMEWORKS = (accelerate, hugging_face, lightning)
PROGRAMS: dict[str, Callable[[], Trained]] = {each.__name__: each for each in (*QUICK, *COMPILED, *FRAMEWORKS)}


# --- running them ---------------------------------------------------------------------------------------------------


def one_rank(name: str, rank: int, port: int, folder: Path) -> None:
    """In a forked process: be this rank, as if a launcher had started the program."""
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    trained = [tensor.detach().double().flatten().numpy() for tensor in PROGRAMS[name]()]
    print(f"made: {type(dist.group.WORLD).__name__}", flush=True)
    np.save(folder / f"rank-{rank}.npy", np.concatenate(trained))
    dist.barrier()
    dist.destroy_process_group()


def run(name: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    end = time.monotonic() + LIMIT_S
    ranks = [fork.Process(target=one_rank, args=(name, rank, port, folder)) for rank in range(RANKS)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(max(0.0, end - time.monotonic()))
    (folder / "codes").write_text(" ".join(str(one.exitcode) for one in ranks), encoding="utf-8")
    for one in ranks:
        one.kill()
        one.join()


if __name__ == "__main__":
    for word in sys.argv[2:]:
        run(word, Path(sys.argv[1]).absolute() / word)
