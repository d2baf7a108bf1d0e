"""The parent of a benchmark: it starts the ranks, asks each system in turn, and collects the rounds.

Laws: no torch is loaded here. Systems take turns within every round, so that a machine that slows down slows all of
them; who is not asked sleeps. Ours and Gloo are two groups of the same processes; Open MPI is a program of its own.
Nothing listens beyond loopback except what mpirun opens for itself, and no file or process is left behind.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from offbeat import schedules
from offbeat import spec as grammar
from offbeat.errors import OffbeatError, RequestError, unknown
from offbeat.machine import available_bytes, machine_facts
from offbeat.measure.bench_results import (
    BASELINES,
    OURS,
    AllReduceResult,
    DdpResult,
    DdpSystem,
    Setting,
    SizeResult,
    Times,
    size_label,
)
from offbeat.measure.harness import Harness
from offbeat.number_format import format_size
from offbeat.processes.signals import terminable
from offbeat.spec import count_of
from offbeat.strategy import ALL_REDUCE, family_of

GLOO, MPI = "gloo", "mpi"
ALLREDUCE_OTHERS = (GLOO, MPI)
DDP_OTHERS = (GLOO,)
STRATEGY_VARIABLE = "OFFBEAT_STRATEGY"
ITEM_BYTES = 4  # float32
MOST_RANKS = 64

_COPY_BYTES = 128 * 2**20  # well beyond the caches
_COPIES = 3
_WARM_UP = 5  # iterations: a buffer is moved to shared memory only when it has come back a few times
_FEWEST, _MOST = 5, 100_000  # iterations of a round
_ROUND_S = 0.2
_DDP_ROUND_S = 0.3
_CLOSE = 1e-3  # of parameters that were summed in another order

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest:
    """What both benchmarks are asked for; wrong ones are refused at birth."""

    ranks: int
    against: tuple[str, ...]
    others: tuple[str, ...]  # that this benchmark knows
    rounds: int = 5
    threads: int = 1
    strategy: str | None = None
    timeout_s: float = 120.0
    ours_backend: str = OURS  # as torch.distributed knows it

    def __post_init__(self) -> None:
        if not 2 <= self.ranks <= MOST_RANKS:
            raise RequestError(f"bench: --ranks is from 2 to {MOST_RANKS}; got {self.ranks}")
        for name in self.against:
            if name == OURS:
                raise RequestError(f"bench: {OURS} is always measured; --against names the others")
            if name == MPI and MPI not in self.others:
                raise RequestError(f"bench: mpi is measured by bench allreduce only; --against here: {self.others[0]}")
            if name not in self.others:
                raise RequestError(f"bench: --against: {unknown('system', name, self.others)}")
        if len(set(self.against)) < len(self.against):
            raise RequestError(f"bench: --against names a system twice: {','.join(self.against)}")
        if self.timeout_s <= 0:
            raise RequestError("bench: --timeout is more than 0")
        if self.strategy is not None:
            if family_of(self.strategy) != ALL_REDUCE:
                raise RequestError(
                    f"bench: --strategy is an all-reduce like ring; '{self.strategy}' is a server policy"
                )
            if grammar.parse(self.strategy).name in schedules.algorithms():  # and not `auto`
                schedules.build(self.strategy, ranks=self.ranks)  # refuses a shape of other ranks

    def backends(self, systems: Sequence[str]) -> dict[str, str]:
        """The systems that are process groups, ours first, and torch's names of them."""
        return {OURS: self.ours_backend} | {name: name for name in systems if name not in (OURS, MPI)}


def why_no_mpi() -> str | None:
    """What is missing for mpi; or None."""
    if shutil.which("mpirun") is None:
        return "mpirun is not installed"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    try:
        said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "mpirun --version fails"
    return None if "Open MPI" in said or "OpenRTE" in said else "mpirun is not Open MPI's"


def measure_allreduce(request: RankRequest, sizes: Sequence[int], progress: Progress) -> AllReduceResult:
    """All systems at all sizes."""
    _check_sizes(request, sizes)
    reason = why_no_mpi() if MPI in request.against else None
    if reason is not None and request.against == (MPI,):
        raise RequestError(f"bench: mpi: cannot be measured: {reason}")
    systems = [OURS, *(name for name in request.against if name != MPI or reason is None)]
    machine = machine_facts()
    with terminable(), ExitStack() as stack:
        progress("starting")
        ranks, facts = _start_torch(stack, request, "allreduce_rank", systems, {})
        crews = dict.fromkeys(systems, ranks)
        if MPI in systems:
            crews[MPI], mpi_facts = _start_mpi(stack, request)
            facts |= mpi_facts
        run = _AllReduceRun(request, crews, ranks, progress)
        results = tuple(run.size(size) for size in sizes)
    return AllReduceResult(
        setting=_setting(request, machine | facts, {} if reason is None else {MPI: reason}),
        copy_buffer_bytes=_COPY_BYTES,
        copy_alone_s=tuple(run.copy_alone_s),
        copy_together_s=tuple(run.copy_together_s),
        sizes=results,
    )


class _AllReduceRun:
    """Rounds of all-reduces, and of plain copies among them."""

    def __init__(self, request: RankRequest, crews: Mapping[str, Harness], ranks: Harness, progress: Progress) -> None:
        self._request = request
        self._crews = crews
        self._ranks = ranks
        self._progress = progress
        self.copy_alone_s: list[float] = []
        self.copy_together_s: list[float] = []

    def size(self, size_bytes: int) -> SizeResult:
        label = size_label(size_bytes)
        fastest_s: dict[str, float] = {}
        for system, crew in self._crews.items():
            doing = f"warming up {system} at {label}"
            self._progress(doing)
            question = {"system": system, "size_bytes": size_bytes}
            crew.ask(question | {"do": "warm", "iterations": _WARM_UP}, doing)
            fastest_s[system] = self._time(system, _FEWEST, doing)
        rounds: dict[str, list[float]] = {system: [] for system in self._crews}
        iterations: dict[str, list[int]] = {system: [] for system in self._crews}
        for number in range(self._request.rounds):
            at = f"{label}, round {number + 1} of {self._request.rounds}"
            self._copy(at)
            for system in self._crews:
                doing = f"{at}: {system}"
                self._progress(doing)
                # By the fastest so far: a disturbed one would make the round too short.
                count = min(_MOST, max(_FEWEST, math.ceil(_ROUND_S / fastest_s[system])))
                seconds = self._time(system, count, doing)
                fastest_s[system] = min(fastest_s[system], seconds)
                iterations[system].append(count)
                rounds[system].append(seconds)
        return SizeResult(
            size_bytes=size_bytes,
            systems=tuple(
                Times(system=system, iterations=tuple(iterations[system]), rounds_s=tuple(rounds[system]))
                for system in self._crews
            ),
        )

    def _time(self, system: str, iterations: int, doing: str) -> float:
        question = {"do": "time", "system": system, "untimed": 2, "iterations": iterations}
        return _slowest(self._crews[system].ask(question, doing))

    def _copy(self, at: str) -> None:
        doing = f"{at}: copying"
        self._progress(doing)
        question = {"do": "copy", "system": OURS, "size_bytes": _COPY_BYTES, "iterations": _COPIES}
        self.copy_alone_s.append(_slowest(self._ranks.ask(question | {"together": False}, doing, first=1)))
        self.copy_together_s.append(_slowest(self._ranks.ask(question | {"together": True}, doing)))


def measure_ddp(request: RankRequest, batch: int, progress: Progress) -> DdpResult:
    """A training iteration without communication and with each system, alternately."""
    machine = machine_facts()
    systems = [OURS, *request.against]
    with terminable(), ExitStack() as stack:
        progress("starting")
        crew, facts = _start_torch(stack, request, "ddp_rank", systems, {"batch": batch})
        parameters = facts.pop("parameters")

        def seconds(do: str, system: str, untimed: int, iterations: int, doing: str) -> float:
            progress(doing)
            question = {"do": do, "system": system, "untimed": untimed, "iterations": iterations}
            return _slowest(crew.ask(question, doing))

        trained = [*BASELINES, *systems]
        warm_s = {name: seconds("train", name, 3, 3, f"warming up {BASELINES.get(name, name)}") for name in trained}
        iterations = max(3, math.ceil(_DDP_ROUND_S / warm_s["none"]))  # alike for all, as their parameters are compared
        buckets = crew.ask({"do": "buckets"}, "reading DDP's buckets")[0]["bucket_bytes"]
        reductions = {
            name: max(3, math.ceil(_ROUND_S / seconds("reduce", name, _WARM_UP, 3, f"warming up {name} alone")))
            for name in systems
        }
        training: dict[str, list[float]] = {name: [] for name in trained}
        alone: dict[str, list[float]] = {name: [] for name in systems}
        for number in range(request.rounds):
            at = f"round {number + 1} of {request.rounds}"
            for name in trained:
                training[name].append(seconds("train", name, 1, iterations, f"{at}: {BASELINES.get(name, name)}"))
            for name in systems:
                alone[name].append(seconds("reduce", name, 1, reductions[name], f"{at}: {name} alone"))
        same, difference = _compared(request.ranks, crew.ask({"do": "compare"}, "comparing parameters"))

    def times(name: str) -> Times:
        return Times(system=name, iterations=(iterations,) * request.rounds, rounds_s=tuple(training[name]))

    return DdpResult(
        setting=_setting(request, machine | facts, {}),
        batch=batch,
        parameters=parameters,
        bucket_bytes=tuple(buckets),
        none=times("none"),
        empty=times("empty"),
        systems=tuple(
            DdpSystem(
                training=times(name),
                alone=Times(system=name, iterations=(reductions[name],) * request.rounds, rounds_s=tuple(alone[name])),
            )
            for name in systems
        ),
        same_parameters=same,
        largest_difference=difference,
    )


def _compared(ranks: int, answers: Sequence[Mapping[str, Any]]) -> tuple[bool, float]:
    """Whether all ranks and systems have the same parameters bit for bit, and else how far apart systems are."""
    for system in answers[0]["digests"]:
        if len({answer["digests"][system] for answer in answers}) > 1:
            raise OffbeatError(f"bench: wrong result: with {system} the ranks have different parameters")
    same = len(set(answers[0]["digests"].values())) == 1
    difference = max(answers[0]["differences"].values(), key=lambda number: (math.isnan(number), number))
    if not difference <= _CLOSE or (ranks == 2 and not same):
        # Two numbers have one sum in either order; more ranks may add in another order, and round differently.
        raise OffbeatError(
            f"bench: wrong result: parameters differ between systems, by {difference:.3g} of the largest"
        )
    return same, difference


# --- starting ------------------------------------------------------------------------------------------------------


def _start_torch(
    stack: ExitStack, request: RankRequest, module: str, systems: Sequence[str], more: Mapping[str, object]
) -> tuple[Harness, dict[str, Any]]:
    """The ranks, joined in one group a system; and what rank 0 says of itself."""
    environment = _environment(request)
    crew = stack.enter_context(Harness(request.timeout_s))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for rank in range(request.ranks):
            inherited = (listener.fileno(),) if rank == 0 else ()
            crew.start(f"rank {rank}", _program(module), environment, inherited)
        join = {
            "do": "join",
            "ranks": request.ranks,
            "threads": request.threads,
            "timeout_s": 2 * request.timeout_s,  # whose own deadline is first is asked who is late
            "port": listener.getsockname()[1],
            "listen_fd": listener.fileno(),
            "backends": request.backends(systems),
            **more,
        }
        answers = crew.ask([join | {"rank": rank} for rank in range(request.ranks)], "starting the ranks")
    return crew, answers[0]


def _start_mpi(stack: ExitStack, request: RankRequest) -> tuple[Harness, dict[str, Any]]:
    # Its files and its shared memory, which it leaves when it is killed, go to a folder that is removed after it.
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="offbeat-bench-", dir=place))
    crew = stack.enter_context(Harness(request.timeout_s))
    flags = {"btl": "^tcp", "oob_tcp_if_include": _loopback(), "btl_vader_backing_directory": folder}
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    words += [word for name, value in flags.items() for word in ("--mca", name, value)]
    words += ["-np", str(request.ranks), *_program("mpi_rank")]
    crew.start("mpi", words, _environment(request) | {"TMPDIR": folder})
    (answer,) = crew.ask({"do": "join"}, "starting mpi")
    if answer.pop("ranks") != request.ranks:
        raise OffbeatError("bench: mpi4py does not belong to this mpirun: every rank is alone")
    return crew, answer


def _program(module: str) -> list[str]:
    return [sys.executable, "-P", "-m", f"offbeat.measure.{module}"]


def _environment(request: RankRequest) -> dict[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(request.threads))
    chosen = {} if request.strategy is None else {STRATEGY_VARIABLE: request.strategy}
    return {**os.environ, **threads, **chosen, "GLOO_SOCKET_IFNAME": _loopback()}


def _loopback() -> str:
    return "lo0" if sys.platform == "darwin" else "lo"


# --- the machine ----------------------------------------------------------------------------------------------------


def _slowest(answers: Sequence[Mapping[str, Any]]) -> float:
    return max(float(answer["seconds"]) for answer in answers)


def _setting(request: RankRequest, machine: Mapping[str, Any], not_measured: Mapping[str, str]) -> Setting:
    return Setting(
        ranks=request.ranks,
        rounds=request.rounds,
        threads=request.threads,
        strategy=request.strategy or os.environ.get(STRATEGY_VARIABLE),
        machine=machine,
        not_measured=not_measured,
    )


def _check_sizes(request: RankRequest, sizes: Sequence[int]) -> None:
    for size in sizes:
        if size < ITEM_BYTES or size % ITEM_BYTES:
            raise RequestError(f"bench: --sizes are whole numbers of float32, 4 bytes each; got {size} bytes")
    if len(set(sizes)) < len(sizes):
        raise RequestError("bench: --sizes names a size twice")
    # A tensor for each system, as much again for what the system keeps, and the values of the check.
    needed = request.ranks * (max(sizes) * (2 * (1 + len(request.against)) + 2) + 2 * _COPY_BYTES)
    available = available_bytes()
    if available is not None and needed > available:
        raise RequestError(
            f"bench: {size_label(max(sizes))} on {count_of(request.ranks, 'rank')} needs about {format_size(needed)} "
            f"of memory, and {format_size(available)} is available: ask for smaller --sizes or fewer --ranks"
        )
