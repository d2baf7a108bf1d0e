"""FSDP2 on two hosts of a lab: what crosses the network in an update, by Gloo and by offbeat.

    python benchmarks/fsdp_bytes.py [--ranks 2] [--width 1024] [--layers 6] [--updates 20]

The same program runs with both backends. Bytes are those that the interface of host 0 has sent, less what it had sent
before the first counted update; the parameters after the last update are compared. Ranks do not end an update at the
same moment, so of a few updates some of the bytes are counted with the update before or after. Needs a machine with
network namespaces (see `offbeat lab`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from offbeat.lab import Lab, Network

SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="on each host")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--updates", type=int, default=20, help="that are counted")
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # of a rank: BACKEND,RANK,ADDRESS
    given = parser.parse_args()
    if given.rank is not None:
        backend, rank, address = given.rank.split(",")
        train(backend, int(rank), address, given)
        return
    found = {}
    for backend in ("gloo", "offbeat"):
        with Lab(Network.of(hosts=2)) as lab:
            own = {**os.environ, "OFFBEAT_NETWORK_TRUST": "open", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
            words = [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--rank"]
            ranks = [
                lab.start(rank // given.ranks, [*words, f"{backend},{rank},{{host0}}"], environment=own)
                for rank in range(2 * given.ranks)
            ]
            for process in ranks:
                if process.wait(timeout_s=300) != 0:
                    sys.exit(process.output)
            found[backend] = json.loads(ranks[0].output.strip().splitlines()[-1])
    parameters = found["gloo"]["parameters"]
    apart = max(abs(one - other) for one, other in zip(found["gloo"]["sums"], found["offbeat"]["sums"], strict=True))
    print(f"FSDP2 on 2 x {given.ranks} ranks, {parameters:,} parameters ({4 * parameters / 1e6:.1f} MB)")
    for backend, told in found.items():
        print(f"  {backend:<8} {told['bytes'] / 1e6:8.1f} MB an update sent by host 0   loss {told['loss']:.6f}")
    share = found["offbeat"]["bytes"] / found["gloo"]["bytes"]
    print(f"  offbeat / gloo {share:.4f}; sums of parameters within {apart:.1e}")


def train(backend: str, rank: int, address: str, given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    ranks = 2 * given.ranks
    dist.init_process_group(backend, init_method=f"tcp://{address}:29500", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(given.width, given.width), nn.GELU()) for _ in range(given.layers)]
    model = nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = 0
    for number in range(given.updates + 1):
        if number == 1:  # the first connects and arranges
            dist.barrier()
            before = int(SENT.read_text())
        inputs = torch.randn(4, given.width, generator=torch.Generator().manual_seed(100 * number + rank))
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    sent = (int(SENT.read_text()) - before) / given.updates
    sums = [float(one.full_tensor().double().sum()) for one in model.parameters()]  # type: ignore[attr-defined] # DTensor
    many = sum(parameter.numel() for parameter in model.parameters())
    told = {"bytes": sent, "loss": float(loss.detach()), "sums": sums, "parameters": many}
    print(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
