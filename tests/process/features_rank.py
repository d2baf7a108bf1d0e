"""One rank of two that goes through what torch builds on a process group, once by each backend.

Every feature first asserts, here, that its result is that of a single process; what it returns is then compared between
backends by `test_torch_features.py`. Each has a process group of its own, so that one that fails does not disturb the
next. What has ended is in `rank-N.json` at any time: {backend: {feature: {"error": ..., "values": ...}}}.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

WORLD = 2
TIMEOUT = datetime.timedelta(seconds=30)  # of one collective
STEPS = 3

Values = dict[str, Tensor]


def seeded(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mesh_of_two() -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD,))


# --- meshes and functional collectives ----------------------------------------------------------------------------


def device_mesh() -> Values:
    """Meshes of one and two dimensions, their groups, and a collective in each."""
    rank, backend = dist.get_rank(), dist.get_backend()
    line = mesh_of_two()
    assert line.get_group().size() == WORLD
    assert line.get_local_rank() == rank
    grid = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("replicate", "shard"))
    alone, together = grid["replicate"].get_group(), grid["shard"].get_group()
    assert (alone.size(), together.size()) == (1, WORLD)
    assert dist.get_backend(alone) == dist.get_backend(together) == backend
    columns = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard"))
    values = {}
    for name, group in (("alone", alone), ("together", together), ("column", columns.get_group("replicate"))):
        tensor = torch.arange(5.0) + rank
        dist.all_reduce(tensor, group=group)
        assert_close(tensor, torch.arange(5.0) + rank if name == "alone" else 2 * torch.arange(5.0) + 1)
        values[name] = tensor
    return values


def functional(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Every functional collective once; each result is computed with, so that nobody forgets to wait."""
    group = dist.group.WORLD
    assert group is not None
    reduced = funcol.all_reduce(tensor, "sum", group) * 2
    most = funcol.all_reduce(tensor, "max", group) + 0
    gathered = funcol.all_gather_tensor(tensor, 0, group) + 1
    scattered = funcol.reduce_scatter_tensor(tensor, "sum", 0, group) - 1
    exchanged = funcol.all_to_all_single(tensor, None, None, group) * 3
    return reduced, most, gathered, scattered, exchanged


def check_functional(results: tuple[Tensor, ...]) -> Values:
    rank = dist.get_rank()
    ours, theirs = (seeded(4, 3, seed=number) for number in range(WORLD))
    mine = slice(2 * rank, 2 * rank + 2)
    expected = (
        2 * (ours + theirs),
        torch.maximum(ours, theirs),
        torch.cat((ours, theirs)) + 1,
        (ours + theirs)[mine] - 1,
        3 * torch.cat((ours[mine], theirs[mine])),
    )
    for result, wanted in zip(results, expected, strict=True):
        assert_close(result, wanted)
    names = ("all_reduce", "all_reduce_max", "all_gather_tensor", "reduce_scatter_tensor", "all_to_all_single")
    return dict(zip(names, results, strict=True))


def functional_collectives() -> Values:
    """Functional collectives, called directly."""
    return check_functional(functional(seeded(4, 3, seed=dist.get_rank())))


def compiled_collectives() -> Values:
    """The same in one compiled graph, and uneven splits in another."""
    results = torch.compile(functional, backend="aot_eager", fullgraph=True)(seeded(4, 3, seed=dist.get_rank()))
    rank = dist.get_rank()

    def uneven(tensor: Tensor) -> Tensor:
        group = dist.group.WORLD
        assert group is not None
        sends, receives = ([1, 3], [1, 2]) if rank == 0 else ([2, 1], [3, 1])
        return funcol.all_to_all_single(tensor, receives, sends, group) + 1

    start = [torch.arange(4.0), 10 + torch.arange(3.0)]
    result = torch.compile(uneven, backend="aot_eager", fullgraph=True)(start[rank])
    assert_close(result, torch.tensor([1.0, 11.0, 12.0] if rank == 0 else [2.0, 3.0, 4.0, 13.0]))
    return check_functional(results) | {"uneven": result}


# --- DTensor and what is made of it -------------------------------------------------------------------------------


def whole_of(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def dtensor() -> Values:
    """Sharded and replicated tensors, also of uneven shards, carried from each placement to each other one."""
    mesh, rank = mesh_of_two(), dist.get_rank()
    whole = seeded(5, 4, seed=11)
    values: Values = {}
    for source in (Shard(0), Shard(1), Replicate()):
        tensor = distribute_tensor(whole if rank == 0 else torch.zeros_like(whole), mesh, [source])  # rank 0 gives it
        for target in (Shard(0), Shard(1), Replicate()):
            moved = tensor.redistribute(mesh, [target])
            assert_close(moved.full_tensor(), whole)
            values[f"{source} {target}"] = moved.to_local()
    partial = DTensor.from_local(whole * (rank + 1), mesh, [Partial()])
    for target in (Replicate(), Shard(0)):
        summed = partial.redistribute(mesh, [target])
        assert_close(summed.full_tensor(), 3 * whole)
        values[f"partial {target}"] = summed.to_local()
    left = distribute_tensor(seeded(6, 4, seed=12), mesh, [Shard(0)])
    right = distribute_tensor(seeded(4, 6, seed=13), mesh, [Shard(1)])
    product = whole_of(left @ right)
    assert_close(product, seeded(6, 4, seed=12) @ seeded(4, 6, seed=13))
    return values | {"product": product}


class Block(nn.Module):
    """Two layers that tensor parallelism splits by columns and by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16)
        self.down = nn.Linear(16, 6)

    def forward(self, tensor: Tensor) -> Tensor:
        lower: Tensor = self.down(torch.relu(self.up(tensor)))
        return lower


def tensor_parallel() -> Values:
    """A block whose first layer is split by columns and whose second is split by rows, through some steps of SGD."""
    torch.manual_seed(21)
    plain, split = Block(), Block()
    split.load_state_dict(plain.state_dict())
    parallelize_module(split, mesh_of_two(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    batch = seeded(8, 6, seed=22)
    values: Values = {}
    for model in (plain, split):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            optimizer.zero_grad()
            output = model(batch)
            output.square().mean().backward()
            optimizer.step()
        if model is split:
            values["output"] = output.detach()
    for (name, tensor), wanted in zip(split.named_parameters(), plain.parameters(), strict=True):
        values[name] = whole_of(tensor)
        assert_close(values[name], wanted.detach())
    return values


def fully_sharded() -> Values:
    """FSDP2: each block and the root are sharded; every rank has its own half of the batch."""
    torch.manual_seed(31)
    plain = nn.Sequential(Block(), Block(), nn.Linear(6, 3))
    sharded = nn.Sequential(Block(), Block(), nn.Linear(6, 3))
    sharded.load_state_dict(plain.state_dict())
    mesh = mesh_of_two()
    for block in (sharded[0], sharded[1]):
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    train_both(plain, sharded)
    values = {name: whole_of(tensor) for name, tensor in sharded.named_parameters()}
    for name, wanted in plain.named_parameters():
        assert_close(values[name], wanted.detach())
    assert any(isinstance(tensor, DTensor) for tensor in sharded.parameters())
    return values


def pipeline() -> Values:
    """Two stages, four microbatches, 1F1B: activations go up, gradients come down."""
    rank, microbatches = dist.get_rank(), 4
    torch.manual_seed(41)
    stages = [nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 3)]
    batch, target = seeded(8, 6, seed=42), seeded(8, 3, seed=43)
    # All shapes are told, so that the stages need not ask each other.
    size = 8 // microbatches
    middle = torch.zeros(size, 8, requires_grad=True)
    first_in, last_out = torch.zeros(size, 6), torch.zeros(size, 3, requires_grad=True)
    stage = PipelineStage(
        stages[rank],
        rank,
        WORLD,
        torch.device("cpu"),
        input_args=(first_in, middle)[rank],
        output_args=(middle, last_out)[rank],
        input_grads=((None,), middle)[rank],
        output_grads=(middle, (None,))[rank],
    )
    schedule = Schedule1F1B(stage, microbatches, loss_fn=nn.functional.mse_loss)
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(batch)
        values = {}
    else:
        values = {"output": schedule.step(target=target, losses=losses).detach(), "losses": torch.stack(losses)}
    gradients = {name: tensor.grad for name, tensor in stages[rank].named_parameters() if tensor.grad is not None}
    assert gradients
    values |= gradients

    torch.manual_seed(41)
    plain = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 3))
    torch.autograd.backward(nn.functional.mse_loss(plain(batch), target))
    for name, tensor in plain[rank].named_parameters():
        assert_close(gradients[name], tensor.grad)
    return values


# --- DDP ----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers in several buckets; one of them may be left out of a step, and one is used twice."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 32)
        self.norm = nn.BatchNorm1d(32) if norm else nn.Identity()
        self.second = nn.Linear(32, 32)
        self.optional = nn.Linear(32, 32)
        self.last = nn.Linear(32, 3)

    def forward(self, tensor: Tensor, skip: bool = False) -> Tensor:
        tensor = torch.tanh(self.norm(self.first(tensor)))
        tensor = torch.tanh(self.second(torch.tanh(self.second(tensor))))
        if not skip:
            tensor = torch.tanh(self.optional(tensor))
        result: Tensor = self.last(tensor)
        return result


def train_both(plain: nn.Module, spread: nn.Module, skipping: bool = False) -> None:
    """SGD in the plain model on every rank's batch, and in the spread one on this rank's."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, spread)]

    def loss(model: nn.Module, step: int, rank: int) -> Tensor:
        seed = 50 + WORLD * step + rank
        words = {"skip": (step + rank) % WORLD == 0} if skipping else {}
        return nn.functional.mse_loss(model(seeded(4, 6, seed=seed), **words), seeded(4, 3, seed=-seed))

    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.autograd.backward(torch.stack([loss(plain, step, rank) for rank in range(WORLD)]).mean())
        torch.autograd.backward(loss(spread, step, dist.get_rank()))
        for optimizer in optimizers:
            optimizer.step()


def trained_by_ddp(hook: bool = False, skipping: bool = False, **options: Any) -> Values:
    """The parameters after some steps of DDP, close to those of one process with the batches of all."""
    torch.manual_seed(71)
    plain = Net()
    torch.manual_seed(71 + dist.get_rank())  # rank 0's parameters count
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.003, **options)
    if hook:
        model.register_comm_hook(None, fp16_compress_hook)
    train_both(plain, model, skipping)
    values = {name: tensor.detach() for name, tensor in model.module.named_parameters()}
    relative, absolute = (1e-2, 1e-3) if hook else (1e-4, 1e-5)
    for name, wanted in plain.named_parameters():
        assert_close(values[name], wanted.detach(), rtol=relative, atol=absolute)
    return values


def ddp_plain() -> Values:
    """DDP as it comes."""
    return trained_by_ddp()


def ddp_static_graph() -> Values:
    """DDP that is told the graph never changes."""
    return trained_by_ddp(static_graph=True)


def ddp_unused_parameters() -> Values:
    """A layer that in each step only one of the ranks uses."""
    return trained_by_ddp(find_unused_parameters=True, skipping=True)


def ddp_bucket_views() -> Values:
    """Gradients that are views of the buckets."""
    return trained_by_ddp(gradient_as_bucket_view=True)


def ddp_half_precision_hook() -> Values:
    """Gradients that travel as float16, by a hook that chains onto the future of an all-reduce."""
    return trained_by_ddp(hook=True)


def ddp_buffers() -> Values:
    """Batch norm: rank 0's running statistics, floats and a counter, are given to all before each forward pass."""
    torch.manual_seed(81 + dist.get_rank())
    model = DistributedDataParallel(Net(norm=True), bucket_cap_mb=0.003)
    for step in range(STEPS):
        model(seeded(8, 6, seed=90 + 10 * step + dist.get_rank())).square().mean().backward()
    with torch.no_grad():
        model(seeded(8, 6, seed=99))  # the same on both ranks, after the last broadcast
    values = {name: tensor.detach().clone() for name, tensor in model.module.named_buffers()}
    assert values["norm.num_batches_tracked"].item() == STEPS + 1
    for tensor in values.values():
        other = tensor.clone()
        dist.broadcast(other, src=0)
        assert_close(tensor, other, rtol=0, atol=0)
    return values


FEATURES: tuple[Callable[[], Values], ...] = (
    device_mesh, functional_collectives, compiled_collectives, dtensor, tensor_parallel, fully_sharded, pipeline,
    ddp_plain, ddp_static_graph, ddp_unused_parameters, ddp_bucket_views, ddp_half_precision_hook, ddp_buffers,
)  # fmt: skip


def attempt(feature: Callable[[], Values], backend: str, store: Store, rank: int) -> dict[str, Any]:
    """Its values, or how it failed, with a process group made for it."""
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=WORLD, timeout=TIMEOUT)
        try:
            values = feature()
            return {"error": "", "values": {name: tensor.tolist() for name, tensor in values.items()}}
        finally:
            torch._dynamo.reset()
            gc.collect()  # nothing but torch itself must hold the group when it goes
            dist.destroy_process_group()
    except Exception:
        return {"error": traceback.format_exc(), "values": {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rank", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("backends", nargs="+")
    options = parser.parse_args()
    store = FileStore(str(options.folder / "store"), WORLD)
    results: dict[str, dict[str, Any]] = {}
    for backend in options.backends:
        results[backend] = {}
        for feature in FEATURES:
            own = PrefixStore(f"{backend}/{feature.__name__}", store)
            results[backend][feature.__name__] = attempt(feature, backend, own, options.rank)
            written = options.folder / f"rank-{options.rank}.tmp"
            written.write_text(json.dumps(results), encoding="utf-8")
            written.rename(options.folder / f"rank-{options.rank}.json")


if __name__ == "__main__":
    main()
