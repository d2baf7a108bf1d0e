"""Unmodified programs under torchrun on two hosts of a lab, 2 ranks on each: the same parameters as with Gloo?

    python benchmarks/programs_on_hosts.py [--programs ddp fsdp2 tensor-parallel pipelining lightning]

Each program asks for the backend "gloo" and trains 20 updates. It runs twice: with Gloo, and with OFFBEAT_REPLACE=gloo
and a key, which puts offbeat in the place of Gloo. Prints a table; the exit code is 1 if parameters differ by more
than 1e-6. The Lightning program needs `pip install lightning` and is left out without it. Needs a machine with network
namespaces (see `offbeat lab`).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

UPDATES, INPUTS, WIDTH = 20, 12, 64
HOSTS, RANKS_EACH = 2, 2
CLOSE = 1e-6
LIMIT_S = 240.0  # ends only what hangs
GLOO = "ProcessGroup"  # the kind of torch's own process groups


# --- the programs -----------------------------------------------------------------------------------------------------


def layers() -> list[nn.Module]:
    torch.manual_seed(1)
    sizes = [INPUTS, WIDTH, WIDTH, WIDTH, 4]
    return [nn.Sequential(nn.Linear(one, other), nn.Tanh()) for one, other in pairwise(sizes)]


def batch(update: int, rank: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(8, INPUTS, generator=torch.Generator().manual_seed(100 * update + rank))
    return inputs, inputs[:, :4].sin()


def train(model: nn.Module, rank: int) -> Iterable[Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for update in range(UPDATES):
        inputs, targets = batch(update, rank)
        optimizer.zero_grad()
        torch.autograd.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
    return model.parameters()


def ddp() -> Iterable[Tensor]:
    """Small buckets, so that there are several."""
    return train(DistributedDataParallel(nn.Sequential(*layers()), bucket_cap_mb=0.01), dist.get_rank())


def fsdp2() -> Iterable[Tensor]:
    """Sharded over the ranks of a host, and replicated over the hosts: a mesh of two dimensions."""
    parts = layers()
    mesh = init_device_mesh("cpu", (HOSTS, RANKS_EACH), mesh_dim_names=("replicate", "shard"))
    for part in parts:
        fully_shard(part, mesh=mesh)
    model = nn.Sequential(*parts)
    fully_shard(model, mesh=mesh)
    return train(model, dist.get_rank())


def tensor_parallel() -> Iterable[Tensor]:
    """Every layer over all ranks; all have the same minibatch."""
    model = nn.Sequential(*layers())
    plan: dict[str, ParallelStyle] = {
        f"{at}.0": RowwiseParallel() if at % 2 else ColwiseParallel() for at in range(len(model))
    }
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    return train(model, 0)


def pipelining() -> Iterable[Tensor]:
    """A stage on each rank. All parameters, which only their stage trains, are gathered at the end."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = layers()[rank]
    schedule = Schedule1F1B(PipelineStage(part, rank, ranks, torch.device("cpu")), 4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.Adam(part.parameters(), lr=0.01)
    for update in range(UPDATES):
        inputs, targets = batch(update, 0)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        elif rank == ranks - 1:
            schedule.step(target=targets)
        else:
            schedule.step()
        optimizer.step()
    trained = layers()
    for stage, one in enumerate(trained):
        source = part if stage == rank else one
        for parameter in source.parameters():
            dist.broadcast(parameter.data, stage)
        trained[stage] = source
    return [parameter for one in trained for parameter in one.parameters()]


def lightning() -> Iterable[Tensor]:
    """Lightning makes the process group itself."""
    import lightning as pl  # type: ignore[import-not-found, unused-ignore]
    from lightning.pytorch.strategies import DDPStrategy  # type: ignore[import-not-found, unused-ignore]

    class Regression(pl.LightningModule):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*layers())

        def training_step(self, given: tuple[Tensor, Tensor], number: int) -> Tensor:
            return nn.functional.mse_loss(self.net(given[0]), given[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    inputs = torch.randn(8 * HOSTS * RANKS_EACH * UPDATES // 2, INPUTS, generator=torch.Generator().manual_seed(2))
    model = Regression()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS_EACH,
        num_nodes=HOSTS,
        strategy=DDPStrategy(process_group_backend=os.environ.get("BACKEND", "gloo")),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(inputs, inputs[:, :4].sin()), batch_size=8))
    return [*model.parameters()]


PROGRAMS: dict[str, Callable[[], Iterable[Tensor]]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "tensor-parallel": tensor_parallel,
    "pipelining": pipelining,
    "lightning": lightning,
}


def be_rank(names: list[str], out: Path) -> None:
    """One program after the other, in one process group; rank 0 writes what each has trained."""
    torch.set_num_threads(1)
    if names != ["lightning"]:
        dist.init_process_group("gloo")
    for name in names:
        whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in PROGRAMS[name]()]
        if dist.get_rank() == 0:
            np.save(out / f"{name}.npy", np.concatenate([one.detach().numpy().ravel() for one in whole]))
            print(f"{name} on {dist.get_world_size()} ranks by {type(dist.group.WORLD).__name__}", flush=True)
    dist.barrier()
    if type(dist.group.WORLD).__name__ == GLOO:
        sys.stdout.flush()
        os._exit(0)  # with several groups, Gloo now and then aborts in the end of its threads
    dist.destroy_process_group()


# --- on the hosts of a lab --------------------------------------------------------------------------------------------


def run(names: list[str], out: Path, own: dict[str, str], kind: str) -> None:
    """Under torchrun, on both hosts, with a process group of this kind."""
    from offbeat.lab import Lab, Network

    out.mkdir(exist_ok=True)
    launch = [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nnodes", str(HOSTS), "--nproc-per-node",
        str(RANKS_EACH), "--node-rank", "{host}", "--master-addr", "{host0}", "--master-port", "29400", __file__,
        "--rank", str(out), "--programs", *names,
    ]  # fmt: skip
    with Lab(Network.of(hosts=HOSTS)) as lab:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", **own}
        processes = [lab.start(host, launch, environment=environment) for host in range(HOSTS)]
        for process in processes:
            if process.wait(timeout_s=LIMIT_S) != 0:
                sys.exit(process.output)
        for name in names:
            if f"{name} on {HOSTS * RANKS_EACH} ranks by {kind}" not in processes[0].output:
                sys.exit(f"{name} did not train by {kind}:\n{processes[0].output}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        be_rank(given.programs, given.rank)
        return
    from offbeat.network.keys import write

    names = [name for name in given.programs if name != "lightning" or importlib.util.find_spec("lightning")]
    apart: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder, "run.key")
        write(key)
        ours = {"OFFBEAT_REPLACE": "gloo", "OFFBEAT_KEY": str(key)}
        jobs = [[name for name in names if name != "lightning"], [name for name in names if name == "lightning"]]
        for job in filter(None, jobs):
            # Lightning checks the name of the backend itself, so it is asked for offbeat by name.
            named = {"OFFBEAT_KEY": str(key), "BACKEND": "offbeat"} if job == ["lightning"] else ours
            run(job, Path(folder, "gloo"), {}, GLOO)
            run(job, Path(folder, "offbeat"), named, "OffbeatGroup")
            for name in job:
                gloo, offbeat = (np.load(Path(folder, backend, f"{name}.npy")) for backend in ("gloo", "offbeat"))
                apart[name] = float(np.abs(gloo - offbeat).max())
    print(f"{UPDATES} updates on {HOSTS} hosts x {RANKS_EACH} ranks under torchrun, with a key")
    print(f"{'program':<18}{'largest difference of a parameter from Gloo':>44}")
    for name, difference in apart.items():
        print(f"{name:<18}{difference:>44.1e}")
    for name in given.programs:
        if name not in apart:
            print(f"{name:<18}{'not installed':>44}")
    sys.exit(any(difference > CLOSE for difference in apart.values()))


if __name__ == "__main__":
    main()
