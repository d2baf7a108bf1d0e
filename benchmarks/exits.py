"""Programs that end while callbacks of futures are under way: how many are reported as failed.

    python benchmarks/exits.py                  # 300 runs of two ranks, then each forced case 20 times (some minutes)
    python benchmarks/exits.py --plain          # every rank is an interpreter of its own; several times as long

A run is a DDP script of two ranks with a communication hook, whose last all-reduces have callbacks that still run when
the script ends, for 1 to 200 ms; every second run destroys its group first. The forced cases are single processes whose
callback is in the middle of something when the main thread returns: it `computes` for a second, `sleeps` for a second
in short naps, `calls` further collectives for a second, is `endless`, or is `blocked` for good. The last two are broken
off after 2 s, and not after 30 as usual.

Without `--plain` the ranks are forked from one process that has imported torch and done nothing with it. Each child
then leaves by `SystemExit` through the bottom of the main script, so that it runs the exit handlers and ends its
interpreter as any program does. The differences to a fresh interpreter: its parent did the imports, and the garbage
collector leaves alone what the parent made (`gc.freeze`), so that an exit takes 0.3 s of processor time and not 1.1 s.

Of each kind are printed: runs, processes that ended by a signal, with another exit code than 0, or not at all.
"""

from __future__ import annotations

import argparse
import collections
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch._dynamo  # DDP imports it, which takes seconds: once here, and not in every child
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

from offbeat.collectives import overlap, process_group  # noqa: F401 - the backend, for the same reason

LIMIT_S = 60.0  # after which a process that has not ended is killed
FORCED = ("computes", "sleeps", "calls", "endless", "blocked")


# --- the programs ---------------------------------------------------------------------------------------------------


def join(backend: str, store: str, rank: int, ranks: int) -> None:
    dist.init_process_group(backend, store=FileStore(store, ranks), rank=rank, world_size=ranks)


def ddp(backend: str, store: str, rank: int, operations: int, destroy: bool) -> None:
    """A DDP script: a hook with a callback for each bucket, and two all-reduces under way at its end."""
    join(backend, store, rank, 2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    trained = DistributedDataParallel(model, bucket_cap_mb=0.02)
    trained.register_comm_hook(None, lambda _, bucket: hook(bucket))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(trained(torch.randn(16, 64)).square().mean())
        optimizer.step()
    for size in (1000, 300_000):
        work = dist.all_reduce(torch.ones(size), async_op=True)
        work.get_future().then(lambda done: mean_of(done.value()[0], operations))
    if destroy:
        dist.destroy_process_group()


def hook(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0].div_(2))
    return averaged


def mean_of(tensor: torch.Tensor, operations: int) -> float:
    """Each operation lets go of Python's lock and takes it again."""
    for _ in range(operations):
        tensor = tensor * 1.01
    return float(tensor.mean())


def forced(case: str, backend: str, store: str) -> None:
    """A callback that is in the middle of something when the program ends."""
    join(backend, store, 0, 1)
    if case in ("endless", "blocked"):
        overlap._CALLBACKS_S = 2.0
    began = threading.Event()

    def callback(done: torch.futures.Future[Any]) -> None:
        began.set()
        end_s = time.monotonic() + 1.0
        matrix = torch.ones(64, 64)
        while case == "endless" or time.monotonic() < end_s:
            if case == "sleeps":
                time.sleep(0.001)
            elif case == "calls":
                dist.all_reduce(matrix, async_op=True).wait()
            elif case == "blocked":
                threading.Event().wait()
            else:
                torch.mm(matrix, matrix)
        print("done", flush=True)

    dist.all_reduce(torch.ones(10), async_op=True).get_future().then(callback)
    began.wait()


# --- running them ---------------------------------------------------------------------------------------------------


def start(words: list[str], output: Path, plain: bool) -> int:
    """A child that runs one program and writes to a file. Without `plain` it is forked: this returns 0 in the child."""
    if plain:
        with output.open("wb") as file:
            return subprocess.Popen([sys.executable, __file__, "--program", *words], stdout=file, stderr=file).pid
    pid = os.fork()
    if pid == 0:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    return pid


def play(words: list[str]) -> None:
    program, backend, *rest = words
    if program == "ddp":
        ddp(backend, rest[0], int(rest[1]), int(rest[2]), destroy=rest[3] == "destroy")
    else:
        forced(program, backend, rest[0])


class Left(Exception):  # noqa: N818 - not an error
    """Raised in a forked child: it is not the one that starts others, and goes on to run its own program."""


def run_all(jobs: Iterator[list[list[str]]], at_once: int, plain: bool, folder: Path) -> collections.Counter[str]:
    """Run jobs, some at a time; a job's processes start together. How they ended is counted."""
    ends: collections.Counter[str] = collections.Counter()
    alive: dict[int, tuple[float, Path]] = {}
    shown = 0
    number = 0
    waiting = True
    while waiting or alive:
        job = next(jobs, None) if waiting and len(alive) < at_once else None
        waiting = waiting and (job is not None or len(alive) >= at_once)
        for words in job or ():
            number += 1
            output = folder / f"output{number}"
            pid = start(words, output, plain)
            if pid == 0:
                raise Left(words)
            alive[pid] = time.monotonic(), output
        for pid, (since, output) in list(alive.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            late = time.monotonic() - since > LIMIT_S
            if not ended and not late:
                continue
            if not ended:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(status) if ended else 0
            how = "stuck" if not ended else "signal" if code < 0 else "code" if code else "clean"
            ends[how] += 1
            if how != "clean" and shown < 3:
                shown += 1
                said = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
                print(f"  {how} {code}: {' / '.join(said)}", flush=True)
            output.unlink(missing_ok=True)
            del alive[pid]
        time.sleep(0.005)
    return ends


def report(name: str, runs: int, began_s: float, ends: collections.Counter[str]) -> bool:
    bad = ", ".join(f"{ends[how]} {told}" for how, told in TOLD.items())
    print(f"{name:10} {runs:4} runs in {time.monotonic() - began_s:4.0f} s: {bad}", flush=True)
    return not any(ends[how] for how in TOLD)


TOLD = {"signal": "aborted", "code": "failed", "stuck": "did not end"}


def measure(given: argparse.Namespace, folder: Path) -> bool:
    def two_ranks() -> Iterator[list[list[str]]]:
        for run in range(given.runs):
            how = str(8 * 2 ** (run // 2 % 8)), "destroy" if run % 2 else "stay"
            yield [["ddp", given.backend, str(folder / f"store{run}"), str(rank), *how] for rank in range(2)]

    def one(case: str) -> Iterator[list[list[str]]]:
        for run in range(given.forced):
            yield [[case, given.backend, str(folder / f"{case}{run}")]]

    kinds = [("ddp", given.runs, two_ranks())] + [(case, given.forced, one(case)) for case in given.cases]
    good = True
    for name, runs, jobs in kinds:
        began_s = time.monotonic()
        good &= report(name, runs, began_s, run_all(jobs, given.at_once, given.plain, folder))
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="offbeat")
    parser.add_argument("--runs", type=int, default=300, help="runs of the DDP script")
    parser.add_argument("--forced", type=int, default=20, help="runs of each forced case")
    parser.add_argument("--cases", nargs="*", choices=FORCED, default=FORCED)
    parser.add_argument("--at-once", type=int, default=4, help="processes that run at once")
    parser.add_argument("--plain", action="store_true", help="start an interpreter for each rank")
    parser.add_argument("--program", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.program:
        play(given.program)
        return
    own = os.getpid()
    gc.collect()
    gc.freeze()
    folder = tempfile.mkdtemp()
    try:
        good = measure(given, Path(folder))
    except Left as left:
        words = left.args[0]
        del left
        play(words)
        sys.exit(0)
    finally:
        if os.getpid() == own:
            shutil.rmtree(folder)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
