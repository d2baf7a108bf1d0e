"""`--batch-size auto`: minibatches are tried in processes of their own, on every device that learners will use.

A size fits where a whole update does: weights, gradients, optimizer state, every size of minibatch that an epoch has,
those read ahead, an evaluation; with some memory to spare, and without a retry of the allocator. On a CPU there is no
such edge: there a step may take a second, and all learners together may take most of the memory that is free.

Each try is a fork, which ends with it: what a failed one leaves behind, on the device or in torch, is gone, and this
process can still fork learners.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import select
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offbeat.errors import OffbeatError, RequestError
from offbeat.processes.child import die_with_parent
from offbeat.processes.signals import ignore_interrupts
from offbeat.runs.run_folder import RunDir
from offbeat.strategy import ALL_REDUCE, family_of
from offbeat.train.batch_search import find_batch, sizes_for, sizes_of_global
from offbeat.train.compute_ladder import EAGER, LADDER, recover
from offbeat.train.config import Config, shares_of
from offbeat.train.config_files import changed
from offbeat.train.out_of_memory import is_out_of_memory, told_of_model
from offbeat.train.reduced_trainer import ReducedTrainer
from offbeat.train.sample_plan import updates
from offbeat.train.tasks import Task
from offbeat.train.trainer import device_of

SPARE = 0.07  # of a device's free memory, left alone
CONTEXT_BYTES = 600 * 2**20  # that each further process on a GPU takes before it holds anything
STEP_S = 1.0  # that a step on a CPU may take
SPARE_HOST = 0.2  # of the memory that is free, left alone on a CPU
LONGEST_S = 300.0  # for one try
_GRAPH = next(rung for rung in LADDER if rung.captured and not rung.compiled)

Tell = Callable[[str], None]


def settle_batch(config: Config, task: Task, tell: Tell) -> Config:
    """The config with numbers for batch_size and accumulate; global_batch is 0 then, since these two have it."""
    train, learners = config.train, config.learners
    samples = len(task.train)  # type: ignore[arg-type] # a map-style set has a length
    wanted = train.global_batch
    if train.batch_size and not wanted:
        return config
    allowed = sizes_of_global(wanted, learners) if wanted else sizes_for(samples, learners, train.accumulate)
    batch = train.batch_size
    if not batch:
        tell("finding the batch size: trying steps of several sizes")
        batch = _search(config, task, allowed, tell)
    elif batch not in allowed:
        fits = max((size for size in allowed if size < batch), default=allowed[0])
        raise RequestError(
            f"train.global_batch: {wanted} samples of {learners} learners are not a whole number of minibatches of "
            f"{batch}; use --batch-size {fits}"
        )
    accumulate = wanted // (learners * batch) if wanted else train.accumulate
    return changed(config, {"train": {"batch_size": batch, "accumulate": accumulate, "global_batch": 0}})


def _search(config: Config, task: Task, allowed: Sequence[int], tell: Tell) -> int:
    whys: dict[int, str] = {}
    importlib.import_module("torch._dynamo")  # once, and not in each fork: an optimizer's first step loads it
    with tempfile.TemporaryDirectory(prefix="offbeat-batch-") as folder:

        def fits(batch: int) -> float | None:
            found = _answers(_start_all(config, task, batch, Path(folder)))
            bad = next((one for one in found if one.seconds is None), None)
            if bad is not None and bad.is_final:
                raise RequestError(bad.why)
            if bad is not None:
                whys[batch] = bad.why
                return None
            return max(one.seconds or 0.0 for one in found)

        found = find_batch(fits, allowed)
    if found is None:
        least, why = allowed[0], whys[allowed[0]]
        if is_out_of_memory(why):
            ways = "" if config.train.recompute else "; --train.recompute true keeps fewer activations"
            samples = "one sample" if least == 1 else f"{least} samples"
            raise RequestError(f"the model is too large for {why.partition(': ')[0]}: not even {samples} fit{ways}")
        raise RequestError(f"train.batch_size: no size can be found: {why}")
    tell(str(found))
    return found.batch


# --- one try ---------------------------------------------------------------------------------------------------------


class _Answer(NamedTuple):
    """Seconds of a step, or why there are none."""

    seconds: float | None
    why: str = ""
    is_final: bool = False  # no other size can fit


class _ModelTooLargeError(RequestError):
    """It does not fit, whatever the minibatch."""


class _Child(NamedTuple):
    process: int
    reader: int
    device: torch.device


def _start_all(config: Config, task: Task, batch: int, folder: Path) -> list[_Child]:
    """A process on each device: `sharing` learners will be on it, the first of them is tried."""
    numbers: dict[torch.device, int] = {}
    sharing: Counter[torch.device] = Counter()
    for number in range(config.learners):
        device = device_of(config.device, number)
        numbers.setdefault(device, number)
        sharing[device] += 1
    return [_start(config, task, batch, device, sharing[device], folder) for device in numbers]


def _start(config: Config, task: Task, batch: int, device: torch.device, sharing: int, folder: Path) -> _Child:
    reader, writer = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    process = os.fork()
    if process:
        os.close(writer)
        return _Child(process, reader, device)
    told: dict[str, Any] = {"why": "the process was ended"}
    try:
        die_with_parent()
        ignore_interrupts()
        os.close(reader)
        told = {"seconds": _try(config, task, batch, device, sharing, folder)}
    except BaseException as error:
        line = next((line for line in str(error).splitlines() if line.strip()), "")
        what = "out of memory" if is_out_of_memory(error) else f"{type(error).__name__}: {line}"
        told = {"why": str(error) if isinstance(error, OffbeatError) else what}
        told["final"] = isinstance(error, _ModelTooLargeError)
    finally:
        os.write(writer, json.dumps(told).encode()[:60_000])
        os._exit(0)


def _answers(children: Sequence[_Child]) -> list[_Answer]:
    """Of all of them; none is left behind."""
    try:
        return [_answer(child) for child in children]
    finally:
        for child in children:
            os.close(child.reader)
            os.kill(child.process, signal.SIGKILL)  # it has answered, or it hangs
            os.waitpid(child.process, 0)


def _answer(child: _Child) -> _Answer:
    name = "this machine" if child.device.type == "cpu" else str(child.device)
    if not select.select([child.reader], [], [], LONGEST_S)[0]:
        return _Answer(None, f"{name}: a try took more than {LONGEST_S:.0f} s")
    said = os.read(child.reader, 1 << 16)
    if not said:
        return _Answer(None, f"{name}: out of memory (the process that tried it was killed)")
    told = json.loads(said)
    if told.get("final"):
        return _Answer(None, told["why"], is_final=True)
    return _Answer(told.get("seconds"), f"{name}: {told.get('why', '')}")


def _try(config: Config, task: Task, batch: int, device: torch.device, sharing: int, folder: Path) -> float:
    """Seconds of a step; an error says why there are none."""
    warnings.filterwarnings("ignore", "Can't initialize NVML")  # as in learners, which are forked too
    free_bytes = _free_on_host()
    if device.type == "cuda":
        _leave_some(device, sharing)
    reduces = family_of(config.sync) == ALL_REDUCE
    sizes = pass_sizes(config, len(task.train), batch)  # type: ignore[arg-type] # a map-style set has a length
    own = {"sync": "ring", "learners": 1, "servers": 1, "slow": (), "device": str(device)}
    train = {"batch_size": batch, "global_batch": 0, "split": "equal", "batch_norm": "per-learner"}
    wants_graph = device.type == "cuda" and reduces and config.train.compute not in ("eager", "compile")
    train["compute"] = "auto" if wants_graph else "eager"
    alone = changed(config, {**own, "train": train, "save": {"tensorboard": False}})

    def trainer() -> ReducedTrainer:
        try:
            return ReducedTrainer(alone, task, RunDir(folder), number=0, learners=1, report=lambda record: None)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise _ModelTooLargeError(told_of_model(device)) from None

    # What several learners hold of the gradient beside it: buckets, or what is sent.
    whole = sum(one.numel() for one in task.build().parameters()) if config.learners > 1 else 0
    beside = torch.empty(whole, device=device)
    most_s = STEP_S if device.type == "cpu" else math.inf
    try:
        seconds = trainer().time_update(sizes, _GRAPH if wants_graph else EAGER, most_s=most_s)
    except Exception as error:
        if is_out_of_memory(error) or not wants_graph:
            raise
        recover(error)  # it cannot be captured: then the run computes eagerly
        seconds = trainer().time_update(sizes, EAGER, most_s=most_s)
    del beside
    if seconds > most_s:
        raise RequestError(f"a step takes more than {most_s:g} s")
    used_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 * sharing
    if device.type == "cpu" and used_bytes > (1 - SPARE_HOST) * free_bytes:
        raise RequestError("out of memory")
    return seconds


def pass_sizes(config: Config, samples: int, batch: int) -> list[int]:
    """Of the passes of an epoch, for any learner: the usual size first. The last ones of an epoch differ."""
    train, learners = config.train, config.learners
    accumulate = train.global_batch // (learners * batch) if train.global_batch else train.accumulate
    if family_of(config.sync) != ALL_REDUCE:
        left = samples % (batch * accumulate)
        return list(dict.fromkeys([min(batch, samples), *([min(batch, left)] if left else [])]))
    shares = tuple(map(float, shares_of(train.split))) or (1.0,) * learners
    total = batch * accumulate * learners
    last = max(0, samples // total - 2) * total
    found = [
        one.end - one.start
        for number in range(learners)
        for update in updates(samples, total, number, shares, accumulate, begin=last)
        for one in update.passes
    ]
    usual = found[0] if len(set(shares)) == 1 else max(found)
    return [usual, *sorted(set(found) - {usual})]


def _leave_some(device: torch.device, sharing: int) -> None:
    """This process gets its share of the device's memory, less what is to be spared."""
    torch.cuda.set_device(device)
    free, total = torch.cuda.mem_get_info(device)
    mine = (free - (sharing - 1) * CONTEXT_BYTES) / sharing
    torch.cuda.set_per_process_memory_fraction(max(0.0, min(1.0, mine * (1 - SPARE) / total)), device)


def _free_on_host() -> int:
    """Bytes, as the kernel counts what is available."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
