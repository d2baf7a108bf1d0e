"""`offbeat bench server`: pushes and fetches a second of our parameter server, beside those of programs on others.

Every learner pushes a gradient as large as the model and fetches the new weights into its parameters, as fast as it
can. The systems take turns within every round. The others are programs under `benchmarks/baselines/` of the repository,
which print one line of JSON; an installed package has none of them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import offbeat
from offbeat.errors import OffbeatError, RequestError, unknown
from offbeat.machine import available_bytes, machine_facts
from offbeat.measure.bench_results import OURS, format_ratio
from offbeat.measure.rank_bench import MOST_RANKS, Progress
from offbeat.measure.served import environment, program, supervise
from offbeat.number_format import format_seconds, format_size
from offbeat.processes.signals import terminable
from offbeat.server.coordinator.session import Setting
from offbeat.server.supervisor import Plan
from offbeat.spec import count_of

PARAMETERS = 25_600_000
LINE = "async"
ITEM_BYTES = 4  # float32
FEWEST = 10_000  # parameters
TENSORS = 161
IN_PLACE = "in-place"  # ours too: the parameters are the servers' memory, and a fetch copies nothing
# The others: program, form and the package that it needs.
BASELINES: Mapping[str, tuple[str, str, str]] = {
    "rpc": ("rpc_server.py", "plain", "torch"),
    "rpc-tuned": ("rpc_server.py", "tuned", "torch"),
    "ray": ("ray_server.py", "plain", "ray"),
    "ray-tuned": ("ray_server.py", "tuned", "ray"),
}
WARM_UP = 5  # cycles of ours; the programs have their own

DEFINITIONS: Mapping[str, str] = {
    "per_s": "pushes (each with a fetch of the new weights into the parameters) a second of all learners together, "
    "from the first learner's start to the last one's end; median over rounds",
    "ratio": f"per_s of {OURS} / per_s",
    "copy_share": "per_s * bytes of gradient and weights, each counted once, / copy_bytes_per_s",
    "copy_bytes_per_s": "of all learners at once after the last push of a round, each copying a private buffer as "
    "large as the model with tensor.copy_; bytes counted once; median over rounds",
    "spread": "fastest round / slowest round",
    IN_PLACE: "offbeat with prepare(..., in_place=True): the model's parameters are the servers' memory",
    "rpc": "torch.distributed.rpc as in PyTorch's tutorial: a call with the list of gradients, answered by the model",
    "rpc-tuned": "one flat tensor, one call for both, huge pages, the reply made in the memory the gradient came in",
    "ray": "Ray actors as in Ray's tutorial: gradients as a list of arrays, then a call for the weights as tensors",
    "ray-tuned": "one flat array, one call for both, and an object store that is kept small",
}


def sizes_of(parameters: int) -> list[int]:
    """So many parameters in 161 tensors, in the proportions of ResNet-50's (He et al. 2015)."""
    shape = [64 * 3 * 49, 64, 64]
    inner = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            shape += [inner * width, width, width, 9 * width * width, width, width, 4 * width * width]
            shape += [4 * width, 4 * width]
            if block == 0:
                shape += [inner * 4 * width, 4 * width, 4 * width]
            inner = 4 * width
    shape += [1000 * inner, 1000]
    whole = sum(shape)
    found = [max(1, size * parameters // whole) for size in shape]
    found[-2] += parameters - sum(found)  # the last layer's, which is large
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRequest:
    """What is asked for; wrong requests are refused at birth."""

    learners: tuple[int, ...] = (1, 2)
    servers: int = 2
    parameters: int = PARAMETERS
    against: tuple[str, ...] | None = None  # None: all that can be measured here
    tensors: int = TENSORS  # or 1
    rounds: int = 3
    seconds: float = 3.0  # of a round of one system
    timeout_s: float = 120.0  # beyond these

    def __post_init__(self) -> None:
        if not all(1 <= number <= MOST_RANKS for number in (*self.learners, self.servers)):
            raise RequestError(f"bench: --learners and --servers are from 1 to {MOST_RANKS}")
        if len(set(self.learners)) < len(self.learners):
            raise RequestError("bench: --learners names a number twice")
        if self.parameters < FEWEST:
            raise RequestError(f"bench: --parameters is {FEWEST} or more; got {self.parameters}")
        if self.tensors not in (1, TENSORS):
            raise RequestError(f"bench: --tensors is 1 or {TENSORS}; got {self.tensors}")
        if self.seconds <= 0 or self.timeout_s <= 0:
            raise RequestError("bench: --seconds and --timeout are more than 0")
        for name in self.against or ():
            if name in (OURS, IN_PLACE):
                raise RequestError(f"bench: {OURS} is always measured; --against names the others")
            if name not in BASELINES:
                raise RequestError(f"bench: --against: {unknown('system', name, BASELINES)}")
        if self.against is not None:
            if len(set(self.against)) < len(self.against):
                raise RequestError(f"bench: --against names a system twice: {','.join(self.against)}")
            if folder() is None:
                raise RequestError("bench: --against: the other systems' programs are in the repository, not installed")
        self._check_memory()

    def _check_memory(self) -> None:
        """Weights in a few buffers, a slot for each learner, its parameters, gradients and what it copies."""
        needed = ITEM_BYTES * self.parameters * (8 + 7 * max(self.learners))
        available = available_bytes()
        if available is not None and needed > available:
            raise RequestError(
                f"bench: {self.parameters} parameters and {count_of(max(self.learners), 'learner')} need about "
                f"{format_size(needed)} of memory, and {format_size(available)} is available"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """One system's rounds with so many learners."""

    system: str
    rounds_per_s: tuple[float, ...]

    @property
    def per_s(self) -> float:
        return statistics.median(self.rounds_per_s)

    @property
    def spread(self) -> float:
        return max(self.rounds_per_s) / min(self.rounds_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All systems with so many learners; ours is the first."""

    learners: int
    size_bytes: int
    systems: tuple[Rates, ...]
    copy_rounds_bytes_per_s: tuple[float, ...]

    @property
    def copy_bytes_per_s(self) -> float:
        return statistics.median(self.copy_rounds_bytes_per_s)

    def ratio(self, rates: Rates) -> float:
        return self.systems[0].per_s / rates.per_s

    def copy_share(self, rates: Rates) -> float:
        return rates.per_s * 2 * self.size_bytes / self.copy_bytes_per_s

    def summary(self) -> str:
        """`2 learners: offbeat 41.2/s, 6.1x rpc, 20x ray`."""
        ours, *others = self.systems
        words = [f"{ours.system} {ours.per_s:.3g}/s"]
        words += [f"{format_ratio(self.ratio(rates))} {rates.system}" for rates in others]
        return f"{count_of(self.learners, 'learner')}: {', '.join(words)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerResult:
    """What `offbeat bench server` found."""

    request: ServerRequest
    machine: Mapping[str, Any]
    not_measured: Mapping[str, str]
    cases: tuple[Case, ...]

    @property
    def tensors(self) -> int:
        return self.request.tensors

    @property
    def spread(self) -> float:
        return max(rates.spread for case in self.cases for rates in case.systems)

    def as_json(self) -> dict[str, Any]:
        request = self.request
        return {
            "measured": "server",
            "strategy": LINE,
            "servers": request.servers,
            "parameters": request.parameters,
            "tensors": self.tensors,
            "size_bytes": ITEM_BYTES * request.parameters,
            "rounds": request.rounds,
            "seconds": request.seconds,
            "machine": dict(self.machine),
            "not_measured": dict(self.not_measured),
            "spread": self.spread,
            "cases": [
                {
                    "learners": case.learners,
                    "summary": case.summary(),
                    "copy_bytes_per_s": case.copy_bytes_per_s,
                    "systems": [
                        {
                            "system": rates.system,
                            "per_s": rates.per_s,
                            "ratio": case.ratio(rates),
                            "copy_share": case.copy_share(rates),
                            "rounds_per_s": list(rates.rounds_per_s),
                        }
                        for rates in case.systems
                    ],
                }
                for case in self.cases
            ],
            "definitions": dict(DEFINITIONS),
        }


def folder() -> Path | None:
    """Where the other systems' programs are, if this package lies in its repository."""
    found = Path(offbeat.__file__).resolve().parents[2] / "benchmarks" / "baselines"
    return found if found.is_dir() else None


def missing(against: Sequence[str]) -> dict[str, str]:
    """What of these cannot be measured here, and why."""
    if folder() is None:
        return dict.fromkeys(against, "its program is in the repository, which is not here")
    needs = {name: BASELINES[name][2] for name in against}
    return {
        name: f"{package} is not installed"
        for name, package in needs.items()
        if importlib.util.find_spec(package) is None
    }


def measure(request: ServerRequest, progress: Progress) -> ServerResult:
    """All systems, alternately, for every number of learners."""
    wanted = tuple(BASELINES) if request.against is None else request.against
    not_measured = missing(wanted)
    if request.against and len(not_measured) == len(wanted):
        name = wanted[0]
        raise RequestError(f"bench: {name}: cannot be measured: {not_measured[name]}")
    systems = [OURS, IN_PLACE, *(name for name in wanted if name not in not_measured)]
    machine = machine_facts()
    with terminable():
        cases = tuple(_case(request, learners, systems, progress) for learners in request.learners)
    return ServerResult(request=request, machine=machine, not_measured=not_measured, cases=cases)


def measure_ours(request: ServerRequest, progress: Progress) -> Iterator[tuple[int, float]]:
    """Ours alone, a round for every number of learners: how long one of them takes to push and to fetch."""
    with terminable():
        for learners in request.learners:
            doing = count_of(learners, "learner")
            progress(doing)
            per_s, _ = _ours(request, learners, doing, in_place=False)
            yield learners, learners / per_s


def _case(request: ServerRequest, learners: int, systems: Sequence[str], progress: Progress) -> Case:
    rounds: dict[str, list[float]] = {system: [] for system in systems}
    copies: list[float] = []
    for number in range(request.rounds):
        for system in systems:
            doing = f"{count_of(learners, 'learner')}, round {number + 1} of {request.rounds}: {system}"
            progress(doing)
            if system in (OURS, IN_PLACE):
                per_s, copied = _ours(request, learners, doing, in_place=system == IN_PLACE)
                copies.append(copied)
            else:
                per_s = _theirs(request, learners, system, doing)
            rounds[system].append(per_s)
    return Case(
        learners=learners,
        size_bytes=ITEM_BYTES * request.parameters,
        systems=tuple(Rates(system=system, rounds_per_s=tuple(found)) for system, found in rounds.items()),
        copy_rounds_bytes_per_s=tuple(copies),
    )


def _sizes(request: ServerRequest) -> list[int]:
    return [request.parameters] if request.tensors == 1 else sizes_of(request.parameters)


def _ours(request: ServerRequest, learners: int, doing: str, *, in_place: bool) -> tuple[float, float]:
    """Pushes a second, and bytes a second of plain copies, both of all learners."""
    asked = {"sizes": _sizes(request), "seconds": request.seconds, "warm_up": WARM_UP, "in_place": in_place}
    plan = Plan(
        setting=Setting(line=LINE, learners=learners, shards=request.servers),
        learner=program("server_learner", json.dumps(asked)),
        environment=environment({"OFFBEAT_SYNC": LINE}),
        restarts=0,
    )
    ended = supervise(plan, doing, request.timeout_s + request.seconds)
    found = [_read(ended.last_lines.get(learner, ""), doing) for learner in range(learners)]
    seconds = max(one["end_s"] for one in found) - min(one["start_s"] for one in found)
    return sum(one["cycles"] for one in found) / seconds, sum(one["copy_bytes_per_s"] for one in found)


def _theirs(request: ServerRequest, learners: int, system: str, doing: str) -> float:
    where = folder()
    assert where is not None
    name, form, _ = BASELINES[system]
    words = [sys.executable, str(where / name), "--form", form, "--learners", str(learners)]
    words += ["--seconds", str(request.seconds), "--sizes", ",".join(map(str, _sizes(request)))]
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment({}),
        start_new_session=True,
    )
    limit_s = request.timeout_s + request.seconds
    try:
        out, complaints = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise OffbeatError(f"bench: not done within {format_seconds(limit_s)} ({doing})") from None
    finally:
        if process.returncode is None:
            _end(process)
    if process.returncode:
        said = [line for line in complaints.splitlines() if line.strip()]
        raise OffbeatError(f"bench: {said[-1] if said else f'exit code {process.returncode}'} ({doing})")
    return float(_read(out.strip().rpartition("\n")[2], doing)["per_s"])


def _end(process: subprocess.Popen[str]) -> None:
    """Ask it first: it has children, which it ends itself."""
    process.terminate()
    try:
        process.communicate(timeout=10.0)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _read(line: str, doing: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise OffbeatError(f"bench: expected a line of JSON; got '{line[:80]}' ({doing})")
    return found
