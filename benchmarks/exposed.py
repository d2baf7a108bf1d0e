"""Exposed communication of DDP: what an iteration of a small GPT takes more because its gradients are reduced.

    python benchmarks/exposed.py                # 2 ranks on 2 cores, Gloo and offbeat alternately; some minutes

The model is nanoGPT's for characters (6 layers, 6 heads, 384 wide, 10.6 million parameters), one torch thread a rank.
Each rank holds one copy of it for each row of the table, and all copies take turns, a block of iterations each, in
another order every round:

    none      DDP without reduction (`no_sync`): computing alone
    copies    DDP does all but reduce: it copies gradients into its buckets and back
    meets     the same, and the ranks wait for each other at the end of each backward pass (an all-reduce of one number)
    gloo      reduced by Gloo
    offbeat   reduced by offbeat

A block's time is the slower rank's; differences are taken within a round, and the table has their medians over all
rounds. Exposed communication is a row minus `none`. It consists of DDP's copying (`copies` minus `none`), waiting for
the other rank (`meets` minus `copies`), and the rest: reducing, and what the reducing thread takes from backward.
Other programs' load makes these differences of times meaningless, as a negative one shows; the load is printed. The
second table has the same of processor time (all threads of a rank, mean of both), which bears load better. On two busy
cores it is what an iteration takes more, but for waiting.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import offbeat

VOCABULARY, WIDTH, HEADS, LAYERS = 65, 384, 6, 6
ROWS = ("none", "copies", "meets", "gloo", "offbeat")


# --- the model ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and around a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.attend = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self.widen = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        size, length, _ = x.shape
        heads = self.attend(self.norms[0](x)).view(size, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(size, length, WIDTH))
        added: Tensor = self.narrow(functional.gelu(self.widen(self.norms[1](x))))
        return x + added


class Gpt(nn.Module):
    """The same weights on every rank and in every copy."""

    def __init__(self, length: int) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(length, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        return functional.linear(self.norm(self.blocks(x)), self.tokens.weight)


# --- a rank ---------------------------------------------------------------------------------------------------------


def only_divide(ranks: int, bucket: Any) -> torch.futures.Future[Tensor]:
    """What DDP does to a bucket before it is reduced, as a hook that does not reduce it."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer().div_(ranks))
    return done


class Copy:
    """A model under DDP, and its optimizer."""

    def __init__(self, row: str, group: dist.ProcessGroup, given: argparse.Namespace) -> None:
        self.row, self.group = row, group
        self.model = DistributedDataParallel(Gpt(given.length), process_group=group)
        if row in ("copies", "meets"):
            self.model.register_comm_hook(group.size(), lambda ranks, bucket: only_divide(ranks, bucket))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        drawn = torch.Generator().manual_seed(group.rank())
        self.tokens = torch.randint(VOCABULARY, (given.batch, given.length + 1), generator=drawn)

    def step(self) -> None:
        self.optimizer.zero_grad()
        context: AbstractContextManager[object] = self.model.no_sync() if self.row == "none" else nullcontext()
        with context:
            scores = self.model(self.tokens[:, :-1])
            loss = functional.cross_entropy(scores.flatten(0, 1), self.tokens[:, 1:].flatten())
            torch.autograd.backward(loss)
        if self.row == "meets":
            dist.all_reduce(torch.zeros(1), group=self.group)
        self.optimizer.step()


def work(given: argparse.Namespace) -> None:
    """One rank: rank 0 prints the table."""
    rank, folder = given.rank, given.folder
    dist.init_process_group("gloo", store=FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    gloo, ours = dist.group.WORLD, dist.new_group(backend="offbeat")
    assert gloo is not None and isinstance(ours, dist.ProcessGroup)
    copies = {row: Copy(row, gloo if row == "gloo" else ours, given) for row in ROWS}
    for copy in copies.values():
        for _ in range(4):  # buckets are laid out anew after the first iteration, and moved after the second
            copy.step()
    times: dict[str, list[float]] = {row: [] for row in ROWS}
    processor: dict[str, list[float]] = {row: [] for row in ROWS}
    thread_s, waited_s, iterations = 0.0, 0.0, 0
    for round_ in range(given.rounds):
        for place in range(len(ROWS)):
            row = ROWS[(place + round_) % len(ROWS)]
            dist.barrier()
            before = offbeat.stats(ours)
            began_s = time.process_time()
            own_s = timed(copies[row].step, given.iterations)
            used = torch.tensor((time.process_time() - began_s) / given.iterations, dtype=torch.float64)
            after = offbeat.stats(ours)
            slower = torch.tensor(own_s, dtype=torch.float64)
            dist.all_reduce(slower, op=dist.ReduceOp.MAX)
            dist.all_reduce(used)
            times[row].append(slower.item())
            processor[row].append(used.item() / 2)
            if row == "offbeat":
                thread_s += after.background_s - before.background_s
                waited_s += after.waited_s - before.waited_s
                iterations += given.iterations
    alone = {row: alone_s(copies[row], given.rounds) for row in ("gloo", "offbeat")}
    if rank == 0:
        parameters = sum(parameter.numel() for parameter in copies["none"].model.parameters())
        print(f"{parameters / 1e6:.1f} million parameters, load before and after: {given.load} {load()}")
        show("iteration", times, alone)
        show("processor", processor, alone)
        each = 1000 / iterations
        told = f"{each * thread_s:.1f} ms, waiting for the other rank's bucket included; its calls came"
        print(f"offbeat's thread ran calls for {told} {each * waited_s:.1f} ms before the other rank's (rank 0, mean)")
    dist.destroy_process_group()


def timed(step: Callable[[], object], iterations: int) -> float:
    start = time.perf_counter()
    for _ in range(iterations):
        step()
    return (time.perf_counter() - start) / iterations


def alone_s(copy: Copy, rounds: int) -> float:
    """Seconds of all buckets' all-reduces, with nothing beside them."""
    described = copy.model._get_ddp_logging_data()  # type: ignore[no-untyped-call] # torch's, without types
    buckets = [torch.zeros(int(word) // 4) for word in str(described["rebuilt_bucket_sizes"]).split(",")]

    def reduce() -> None:
        for bucket in buckets:
            dist.all_reduce(bucket, group=copy.group)

    timed(reduce, 3)
    return statistics.median(timed(reduce, 1) for _ in range(max(5, rounds)))


def show(what: str, times: Mapping[str, list[float]], alone: Mapping[str, float]) -> None:
    def between(more: str, less: str) -> float:
        return 1000 * statistics.median(a - b for a, b in zip(times[more], times[less], strict=True))

    print(f"{'':8} {what:>10} {'exposed':>8} {'copying':>8} {'waiting':>8} {'rest':>6} {'all-reduces alone':>18}")
    print(f"{'none':8} {1000 * statistics.median(times['none']):7.1f} ms")
    for row in ("gloo", "offbeat"):
        parts = between(row, "none"), between("copies", "none"), between("meets", "copies"), between(row, "meets")
        cells = f"{parts[0]:8.1f} {parts[1]:8.1f} {parts[2]:8.1f} {parts[3]:6.1f} {1000 * alone[row]:18.1f}"
        print(f"{row:8} {1000 * statistics.median(times[row]):7.1f} ms {cells}")
    ratio = between("offbeat", "none") / between("gloo", "none")
    spread = [
        (a - n) / (g - n) for a, g, n in zip(times["offbeat"], times["gloo"], times["none"], strict=True) if g > n
    ]
    quarters = statistics.quantiles(spread, n=4) if len(spread) > 1 else [ratio] * 3
    print(
        f"exposed, by {what} time: offbeat has {ratio:.2f} of Gloo's"
        f" (by round: quartiles {quarters[0]:.2f} to {quarters[2]:.2f}, {len(times['none'])} rounds)"
    )


def load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256, help="characters of a sequence")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--iterations", type=int, default=3, help="iterations of a block")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--load", default=load(), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        work(given)
        return
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--folder", folder, "--load", given.load]
        ranks = [subprocess.Popen([*words, "--rank", str(rank)]) for rank in range(2)]
        try:
            codes = [one.wait(timeout=1800) for one in ranks]
        finally:
            for one in ranks:
                one.kill()
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
