"""`offbeat bench allreduce` and `offbeat bench ddp`: ours and other systems, alternately in one run.

Laws: no torch is loaded here. Systems take turns within every round; who is not asked sleeps. Ours and Gloo are two
groups of the same processes; Open MPI is a program of its own. A round is the slowest rank's mean over the round's
iterations. Nothing listens beyond loopback except what mpirun opens for itself, and no file or process is left behind.
"""

from __future__ import annotations

import importlib.util
import math
import os
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from offbeat import schedules
from offbeat import spec as grammar
from offbeat.errors import OffbeatError, RequestError
from offbeat.lab import Lab, Network
from offbeat.lab.network import INTERFACE, format_bandwidth, payload_rate
from offbeat.lab.remote_shell_server import RemoteShell
from offbeat.machine import machine_facts
from offbeat.measure.benchmark import (
    ITEM_BYTES,
    OURS,
    BenchResult,
    Progress,
    Turn,
    alternate,
    check_above_zero,
    check_against,
    check_distinct,
    check_memory,
    check_processes,
    spread,
)
from offbeat.measure.harness import Harness, program
from offbeat.network.keys import KEY, OPEN, SECRET, TRUST
from offbeat.number_format import format_rate, format_size
from offbeat.processes.launcher import thread_environment
from offbeat.processes.signals import terminable
from offbeat.report.benchmark_fields import Field, Row, format_ms
from offbeat.runs.metrics import BUS_FACTORS, bus_bandwidth
from offbeat.simulate.schedule_run import core_of
from offbeat.spec import count_of
from offbeat.strategy import ALL_REDUCE, family_of
from offbeat.topology import Edge, Link, Topology

GLOO, MPI, TLS = "gloo", "mpi", "tls"  # the last is offbeat with a key, between the hosts of a lab
ALLREDUCE_OTHERS = (GLOO, MPI, TLS)
DDP_OTHERS = (GLOO,)
_MOST_GROUPS = 16
# What a training iteration is compared with, and how each is called in a sentence.
BASELINES: Mapping[str, str] = {"none": "no communication", "empty": "DDP with an empty all-reduce"}
STRATEGY_VARIABLE = "OFFBEAT_STRATEGY"

_COPY_BYTES = 128 * 2**20  # well beyond the caches
_COPIES = 3
_WARM_UP = 5  # iterations: a buffer is moved to shared memory only when it has come back a few times
_FEWEST, _MOST = 5, 100_000  # iterations of a round
_LONG_S = 2.0  # an iteration that takes longer is a round of its own, and is warmed up by being checked
_ROUND_S = 0.2
_DDP_ROUND_S = 0.3
_LAB_PORT = 29500  # of the store, on the first host of a lab
_FREE = 1e15  # bytes a second where no time is taken
_CLOSE = 1e-3  # of parameters that were summed in another order

DEFINITIONS: Mapping[str, str] = {
    "ms": "median over rounds; a round is the slowest rank's mean over its iterations, after a barrier",
    "bus_bytes_per_s": f"size / seconds * {BUS_FACTORS['all-reduce'].text}, as in NCCL's tests",
    "spread": "slowest round / fastest round, the largest ratio of all systems; far above 1: the machine was busy",
    "ratio": f"ms / ms of {OURS}",
    "copy_share": "bus bandwidth * P / copy bandwidth of all ranks together",
    "copy_together_bytes_per_s": (
        "bytes per second (each byte counted once) that all ranks copy at once, each a large private buffer "
        "with tensor.copy_; P * buffer / seconds of the slowest rank; median over all rounds"
    ),
    "copy_alone_bytes_per_s": "the same, by rank 0 while the other ranks sleep",
    "added_ms": "ms - ms without communication (no_sync)",
    "alone_ms": "all-reduces of the same buckets one after the other, with no computation",
    "hidden_share": "1 - added / alone",
    "empty": "DDP copies to and from its buckets and divides, but reduces nothing",
    "hidden_beyond_ddp_share": "1 - (ms - ms of empty) / alone, without the overhead of DDP itself",
}
_REDUCED = ("ms", "spread", "bus_bytes_per_s", "ratio", "copy_share")
_COPIED = ("copy_together_bytes_per_s", "copy_alone_bytes_per_s")
_TRAINED = ("ms", "spread", "added_ms", "alone_ms", "hidden_share", "ratio", "empty", "hidden_beyond_ddp_share")


def size_label(size_bytes: int) -> str:
    """`4 MiB` for what is a whole number of those, `100 MB` otherwise."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes % factor == 0 and size_bytes:
            return f"{size_bytes // factor} {unit}"
    return format_size(size_bytes)


def format_ratio(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 9.95 else f"{ratio:.1f}x"


def times_faster(ours: str, rows: Sequence[Row]) -> str:
    """`offbeat 0.11 ms, 31x gloo, 4.6x mpi`: how many times as fast as each of the others. The first row is ours."""
    return ", ".join([f"{OURS} {ours}", *(f"{format_ratio(row['ratio'])} {row['system']}" for row in rows[1:])])


_ROUNDS_MS = Field(
    "rounds_ms", "computed", "number", title="of rounds",
    text=lambda row: f"{format_ms(min(row['rounds_ms']))}-{format_ms(max(row['rounds_ms']))}",
)  # fmt: skip
_MS = Field("ms", "computed", "number", title="ms", text=lambda row: format_ms(row["ms"]))
ALLREDUCE_FIELDS = (
    Field("size_bytes", title="size", text=lambda row: size_label(row["size_bytes"]), once=True),
    Field("system", title="system"),
    _MS,
    _ROUNDS_MS,
    Field("bus_bytes_per_s", form="number", title="bus", text=lambda row: format_rate(row["bus_bytes_per_s"])),
    Field(
        "ratio", form="number", title=f"vs {OURS}",
        text=lambda row: "" if row["system"] == OURS else format_ratio(row["ratio"]),
    ),
    Field("copy_share", form="number", title="of copy", text=lambda row: f"{100 * row['copy_share']:.0f} %"),
)  # fmt: skip
DDP_FIELDS = (
    Field("system", title="system"),
    _MS,
    _ROUNDS_MS,
    Field("added_ms", form="number", title="added ms", text=lambda row: format_ms(row["added_ms"])),
    Field("alone_ms", form="number", title="alone ms", text=lambda row: format_ms(row["alone_ms"])),
    Field("hidden_share", form="number", title="hidden", text=lambda row: f"{100 * row['hidden_share']:.0f} %"),
    Field(
        "hidden_beyond_ddp_share", form="number", title="beyond DDP",
        text=lambda row: f"{100 * row['hidden_beyond_ddp_share']:.0f} %",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LabRequest:
    """`--lab 4x2,1Gbit/s,2=100Mbit/s`: hosts x ranks, the bandwidth of their links, and of some that differ."""

    network: Network
    ranks_each: int

    @classmethod
    def parse(cls, text: str) -> LabRequest:
        shape, *links = text.split(",")
        sides = grammar.parse_shape(shape)
        if len(sides) != 2:
            raise RequestError(f"--lab: expected HOSTSxRANKS, like 4x2 or 4x2,1Gbit/s; got '{text}'")
        common = [link for link in links if "=" not in link]
        if len(common) > 1:
            raise RequestError(f"--lab: expected one bandwidth, and exceptions like 2=100Mbit/s; got '{text}'")
        slow = [f"host={host},bandwidth={rate}" for host, _, rate in (w.partition("=") for w in links if "=" in w)]
        network = Network.of(hosts=sides[0], bandwidth=common[0] if common else None, slow=slow)
        return cls(network=network, ranks_each=sides[1])

    @property
    def ranks(self) -> int:
        return self.network.hosts * self.ranks_each

    def host_of(self, rank: int) -> int:
        return rank // self.ranks_each

    def core_of(self, rank: int, cores: int) -> int:
        """On which of so many cores a rank runs. Left to itself, Linux puts ranks that wake each other on one core."""
        return core_of(self.host_of(rank), rank % self.ranks_each, cores)

    def links(self) -> str:
        """In words: `1 Gbit/s each way, host 2 100 Mbit/s`."""
        rates = self.network.bandwidths
        common = max(set(rates), key=rates.count)

        def told(rate: float | None) -> str:
            return "bandwidth not limited" if rate is None else f"{format_bandwidth(rate)} each way"

        others = [f"host {host} {told(rate)}" for host, rate in enumerate(rates) if rate != common]
        return ", ".join([told(common), *others])

    def price_ms(self, line: str, size_bytes: int) -> float | None:
        """What a schedule costs where only the links between hosts take time; None where they are not shaped."""
        if None in self.network.bandwidths:
            return None
        machines = self.topology([self.host_of(rank) for rank in range(self.ranks)])
        return 1e3 * schedules.price(schedules.build(line, ranks=self.ranks), machines, size_bytes).seconds

    def topology(self, placement: Sequence[int]) -> Topology:
        """Rank r is on host `placement[r]`. Only links with a bandwidth take time."""
        links: dict[Edge, Link] = {}
        for rank, number in enumerate(placement):
            links[rank, f"host {number}"] = links[f"host {number}", rank] = Link(0.0, _FREE)
        for number, rate in enumerate(self.network.bandwidths):
            port = Link(0.0, _FREE if rate is None else payload_rate(rate))
            links[f"host {number}", "network"] = links["network", f"host {number}"] = port
        return Topology(name="lab", ranks=len(placement), links=links)


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
    lab: LabRequest | None = None

    def __post_init__(self) -> None:
        check_processes("--ranks", [self.ranks], 2)
        if MPI in self.against and MPI not in self.others:
            raise RequestError(
                f"bench: mpi can be measured only by bench allreduce; here use --against {self.others[0]}"
            )
        several = [name for name in self.against if groups_of(name) > 1] if MPI in self.others else []
        check_against(self.against, (*self.others, *several))
        if TLS in self.against and self.lab is None:
            raise RequestError(f"bench: --against {TLS} needs --lab: ranks of one host share memory")
        check_above_zero("--timeout", self.timeout_s)
        if self.strategy is not None:
            if family_of(self.strategy) != ALL_REDUCE:
                raise RequestError(
                    f"bench: --strategy: expected an all-reduce like ring; '{self.strategy}' is a parameter-server "
                    "strategy"
                )
            spec = grammar.parse(self.strategy)
            row = schedules.algorithms().get(spec.name)  # `auto` is none
            if row is not None and not (self.lab and row.by_host and not spec.args):  # whose shape is the lab's
                schedules.build(self.strategy, ranks=self.ranks)  # refuses a shape of other ranks

    def as_json(self, machine: Mapping[str, Any], not_measured: Mapping[str, str]) -> dict[str, Any]:
        return {
            "ranks": self.ranks,
            "rounds": self.rounds,
            "threads": self.threads,
            "strategy": self.strategy or os.environ.get(STRATEGY_VARIABLE),
            "machine": dict(machine),
            "not_measured": dict(not_measured),
            **({} if self.lab is None else {"hosts": self.lab.network.hosts, "links": self.lab.links()}),
        }


def groups_of(system: str) -> int:
    """4 for `gloo:4`: that many process groups reduce a part of the tensor each, at the same time; 1 otherwise."""
    name, _, many = system.partition(":")
    if name != GLOO or not many:
        return 1
    if not many.isdecimal() or not 2 <= int(many) <= _MOST_GROUPS:
        raise RequestError(
            f"bench: --against: gloo:N takes 2 to {_MOST_GROUPS} process groups, like gloo:4; got '{system}'"
        )
    return int(many)


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
    return None if "Open MPI" in said or "OpenRTE" in said else "mpirun does not belong to Open MPI"


def _with(about: Mapping[str, Any]) -> tuple[str, str]:
    """What the ranks ran with."""
    machine, strategy = about["machine"], about["strategy"]
    words = [f"torch {machine['torch']} with {count_of(about['threads'], 'thread')} a rank"]
    words += [machine["mpi"]] if "mpi" in machine else []
    return "with", ", ".join([*words, *([f"strategy {strategy}"] if strategy else [])])


# --- all-reduces -----------------------------------------------------------------------------------------------------


def measure_allreduce(request: RankRequest, sizes: Sequence[int], progress: Progress) -> BenchResult:
    """All systems at all sizes."""
    _check_sizes(request, sizes)
    reason = None
    if MPI in request.against:
        reason = why_no_mpi()
    if reason is not None and request.against == (MPI,):
        raise RequestError(f"bench: mpi: cannot be measured: {reason}")
    systems = [OURS, *(name for name in request.against if name != MPI or reason is None)]
    machine = machine_facts()
    with terminable(), ExitStack() as stack:
        progress("starting")
        hosts = None if request.lab is None else stack.enter_context(Lab(request.lab.network))
        ranks, facts = _start_torch(stack, request, hosts, {"do": "join allreduce"}, systems)
        asked = dict.fromkeys(systems, ranks)
        if MPI in systems:
            asked[MPI], mpi_facts = _start_mpi(stack, request, hosts)
            facts |= mpi_facts
        rounds = {size: _measure_size(request, asked, size, progress) for size in sizes}
        slow = [] if hosts is None else ranks.ask({"do": "links"}, "reading the rates of links")[0]["slow_links"]
    return allreduce_result(request, machine | facts, {} if reason is None else {MPI: reason}, rounds, slow)


def _measure_size(
    request: RankRequest, asked: Mapping[str, Harness], size_bytes: int, progress: Progress
) -> dict[str, list[tuple[float, float]]]:
    """Iterations and seconds of each system in each round; under "copying", seconds of a copy alone and together."""
    label = size_label(size_bytes)
    fastest_s: dict[str, float] = {}

    def time(system: str, iterations: int, doing: str) -> float:
        untimed = 2 if iterations > 1 else 0
        question = {"do": "time", "system": system, "untimed": untimed, "iterations": iterations}
        return asked[system].slowest_s(question, doing)

    def copy(number: int, doing: str) -> tuple[float, float]:
        question = {"do": "copy", "system": OURS, "size_bytes": _COPY_BYTES, "untimed": 1, "iterations": _COPIES}
        alone_s = asked[OURS].slowest_s(question | {"together": False}, doing, first=1)
        return alone_s, asked[OURS].slowest_s(question | {"together": True}, doing)

    def turn(system: str, number: int, doing: str) -> tuple[float, float]:
        # By the fastest so far: a disturbed one would make the round too short.
        fewest = 1 if fastest_s[system] > _LONG_S else _FEWEST
        iterations = min(_MOST, max(fewest, math.ceil(_ROUND_S / fastest_s[system])))
        seconds = time(system, iterations, doing)
        fastest_s[system] = min(fastest_s[system], seconds)
        return iterations, seconds

    for system, harness in asked.items():
        doing = f"warming up {system} at {label}"
        progress(doing)
        warm = {"do": "warm", "system": system, "size_bytes": size_bytes, "iterations": 0}
        harness.ask(warm, doing)
        fastest_s[system] = time(system, 1, doing)
        if fastest_s[system] <= _LONG_S:
            harness.ask(warm | {"iterations": _WARM_UP}, doing)
            fastest_s[system] = time(system, _FEWEST, doing)
    turns: dict[str, Turn[tuple[float, float]]] = {system: partial(turn, system) for system in asked}
    return alternate({"copying": copy, **turns}, request.rounds, progress, at=f"{label}, ")


def allreduce_result(
    request: RankRequest,
    machine: Mapping[str, Any],
    not_measured: Mapping[str, str],
    rounds: Mapping[int, Mapping[str, Sequence[tuple[float, float]]]],
    slow_links: Sequence[str] = (),
) -> BenchResult:
    """From the rounds of each size, as `_measure_size` returns them; and links that offbeat found to be slow."""
    about, ranks = request.as_json(machine, not_measured), request.ranks
    copies = [pair for found in rounds.values() for pair in found["copying"]]
    alone = _COPY_BYTES / statistics.median(alone_s for alone_s, _ in copies)
    together = ranks * _COPY_BYTES / statistics.median(together_s for _, together_s in copies)

    def row(size_bytes: int, system: str) -> Row:
        iterations, seconds = zip(*rounds[size_bytes][system], strict=True)
        ours_s = statistics.median(seconds for _, seconds in rounds[size_bytes][OURS])
        bus = bus_bandwidth("all-reduce", ranks, size_bytes, statistics.median(seconds))
        return {
            "size_bytes": size_bytes,
            "system": system,
            "ms": 1e3 * statistics.median(seconds),
            "bus_bytes_per_s": bus,
            "ratio": statistics.median(seconds) / ours_s,
            "copy_share": bus * ranks / together,
            "iterations": list(iterations),
            "rounds_ms": [1e3 * one for one in seconds],
        }

    rows = [row(size, system) for size, found in rounds.items() for system in found if system != "copying"]
    by_size = {size: [row for row in rows if row["size_bytes"] == size] for size in rounds}
    verdict = {
        size: f"{size_label(size)}: " + times_faster(f"{format_ms(own[0]['ms'])} ms", own)
        for size, own in by_size.items()
    }
    most = max(spread(row["rounds_ms"]) for row in rows)
    who = count_of(ranks, "rank") + ("" if request.lab is None else f" on {request.lab.network.hosts} hosts")
    json = {
        "measured": "allreduce",
        **about,
        "copy_buffer_bytes": _COPY_BYTES,
        "copy_alone_bytes_per_s": alone,
        "copy_together_bytes_per_s": together,
        "spread": most,
        "sizes": [
            {
                "size_bytes": size,
                "summary": verdict[size],
                "systems": [{key: value for key, value in row.items() if key != "size_bytes"} for row in own],
            }
            for size, own in by_size.items()
        ],
        "definitions": {name: DEFINITIONS[name] for name in (*_REDUCED, *_COPIED)},
        **({"slow_links": list(slow_links)} if slow_links else {}),
    }
    return BenchResult(
        json=json,
        heading=f"all-reduce of float32, {who}, median of {count_of(request.rounds, 'round')}",
        tables=((ALLREDUCE_FIELDS, rows),),
        verdict=tuple(verdict.values()),
        details=[
            *(f"{system}: not measured: {reason}" for system, reason in not_measured.items()),
            *(f"{size_label(size)}: {told}" for size in rounds if (told := _price(request, size))),
            *slow_links,
        ],
        terms=(
            ("bus", DEFINITIONS["bus_bytes_per_s"]),
            ("of copy", DEFINITIONS["copy_share"]),
            (
                "copy",
                f"{format_rate(together)} by {count_of(ranks, 'rank')} together, {format_rate(alone)} by one alone",
            ),
            *([] if request.lab is None else [("lab", f"{about['hosts']} hosts, links: {about['links']}")]),
            _with(about),
        ),
        spread=most,
    )


def _price(request: RankRequest, size_bytes: int) -> str:
    """What the links of a lab allow, for the lines that have a price there."""
    if request.lab is None:
        return ""
    shape = f"{request.lab.network.hosts}x{request.lab.ranks_each}"
    lines = dict.fromkeys(["ring", f"hierarchical:{shape},inner=direct" if request.lab.ranks_each > 1 else "ring"])
    priced = {line: request.lab.price_ms(line, size_bytes) for line in lines}
    told = [f"{line} {format_ms(ms)} ms" for line, ms in priced.items() if ms is not None]
    return f"lower bound by the links: {', '.join(told)}" if told else ""


def _check_sizes(request: RankRequest, sizes: Sequence[int]) -> None:
    for size in sizes:
        if size < ITEM_BYTES or size % ITEM_BYTES:
            raise RequestError(f"bench: --sizes: expected multiples of 4 bytes (float32); got {size} bytes")
    check_distinct("--sizes", sizes, "size")
    # A tensor for each system, as much again for what the system keeps, and the values of the check.
    needed = request.ranks * (max(sizes) * (2 * (1 + len(request.against)) + 2) + 2 * _COPY_BYTES)
    what = f"{size_label(max(sizes))} on {count_of(request.ranks, 'rank')}"
    check_memory(what, needed, "; use smaller --sizes or fewer --ranks")


# --- training iterations under DDP -----------------------------------------------------------------------------------


def measure_ddp(request: RankRequest, batch: int, progress: Progress) -> BenchResult:
    """A training iteration without communication and with each system, alternately."""
    machine = machine_facts()
    systems = [OURS, *request.against]
    with terminable(), ExitStack() as stack:
        progress("starting")
        ranks, facts = _start_torch(stack, request, None, {"do": "join ddp", "batch": batch}, systems)

        def seconds(do: str, system: str, untimed: int, iterations: int, number: int, doing: str) -> float:
            question = {"do": do, "system": system, "untimed": untimed, "iterations": iterations}
            return ranks.slowest_s(question, doing)

        def warm(do: str, system: str, untimed: int, label: str) -> float:
            progress(f"warming up {label}")
            return seconds(do, system, untimed, 3, 0, f"warming up {label}")

        trained = {**BASELINES, **{system: system for system in systems}}
        warm_s = {system: warm("train", system, 3, label) for system, label in trained.items()}
        iterations = max(3, math.ceil(_DDP_ROUND_S / warm_s["none"]))  # alike for all, as their parameters are compared
        buckets = ranks.ask({"do": "buckets"}, "reading DDP's buckets")[0]["bucket_bytes"]
        turns = {label: partial(seconds, "train", system, 1, iterations) for system, label in trained.items()}
        for system in systems:
            alone_s = warm("reduce", system, _WARM_UP, f"{system} alone")
            many = max(3, math.ceil(_ROUND_S / alone_s))
            turns[f"{system} alone"] = partial(seconds, "reduce", system, 1, many)
        rounds = alternate(turns, request.rounds, progress)
        same, difference = _compared(request.ranks, ranks.ask({"do": "compare"}, "comparing parameters"))
    about = {
        "batch": batch,
        "parameters": facts.pop("parameters"),
        "bucket_bytes": buckets,
        "iterations": [iterations] * request.rounds,
        "same_parameters": same,
        "largest_difference": difference,
    }
    return ddp_result({**request.as_json(machine | facts, {}), **about}, systems, rounds)


def ddp_result(about: Mapping[str, Any], systems: Sequence[str], rounds: Mapping[str, Sequence[float]]) -> BenchResult:
    """From the seconds of each round: of "gloo", "gloo alone", and of the baselines by their labels."""
    ms = {name: 1e3 * statistics.median(found) for name, found in rounds.items()}
    rounds_ms = {name: [1e3 * one for one in found] for name, found in rounds.items()}
    none, empty = BASELINES.values()

    def row(system: str) -> dict[str, Any]:
        alone = f"{system} alone"
        return {
            "system": system,
            "ms": ms[system],
            "ratio": ms[system] / ms[OURS],
            "added_ms": ms[system] - ms[none],
            "alone_ms": ms[alone],
            "hidden_share": 1 - (ms[system] - ms[none]) / ms[alone],
            "hidden_beyond_ddp_share": 1 - (ms[system] - ms[empty]) / ms[alone],
            "rounds_ms": rounds_ms[system],
            "alone_rounds_ms": rounds_ms[alone],
        }

    rows = [row(system) for system in systems]
    without = {"ms": ms[none], "rounds_ms": rounds_ms[none]}
    reducing_nothing = {"ms": ms[empty], "added_ms": ms[empty] - ms[none], "rounds_ms": rounds_ms[empty]}
    added = [f"{row['system']} adds {format_ms(row['added_ms'])} ms" for row in rows]
    verdict = f"{format_ms(ms[none])} ms of compute: {', '.join(added)}"
    most = max(spread(found) for found in rounds.values())
    same = (
        "yes, bit for bit"
        if about["same_parameters"]
        else f"up to a difference of {about['largest_difference']:.1g} of the largest parameter"
    )
    buckets = ", ".join(format_size(size) for size in about["bucket_bytes"])
    json = {
        "measured": "ddp",
        **about,
        "none": without,
        "empty": reducing_nothing,
        "systems": rows,
        "spread": most,
        "summary": verdict,
        "definitions": {name: DEFINITIONS[name] for name in _TRAINED},
    }
    millions = f"{about['parameters'] / 1e6:.1f} million parameters"
    return BenchResult(
        json=json,
        heading=f"DDP iteration, {count_of(about['ranks'], 'rank')}, {millions}",
        tables=((DDP_FIELDS, [{"system": "(none)", **without}, {"system": "(empty)", **reducing_nothing}, *rows]),),
        verdict=(verdict,),
        details=(f"same parameters: {same}",),
        terms=(
            ("empty", DEFINITIONS["empty"]),
            ("alone", DEFINITIONS["alone_ms"]),
            ("hidden", f"{DEFINITIONS['hidden_share']}; without a free core, communication cannot overlap computation"),
            ("beyond", DEFINITIONS["hidden_beyond_ddp_share"]),
            ("model", f"minibatch size {about['batch']}, buckets of {buckets}"),
            _with(about),
        ),
        spread=most,
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
            f"bench: wrong result: parameters differ between systems, by {difference:.3g} of the largest parameter"
        )
    return same, difference


# --- starting ------------------------------------------------------------------------------------------------------


def _start_torch(
    stack: ExitStack, request: RankRequest, hosts: Lab | None, join: Mapping[str, object], systems: Sequence[str]
) -> tuple[Harness, dict[str, Any]]:
    """The ranks, on the hosts of a lab if there are any, joined in one group a system; what rank 0 says of itself."""
    environment = _environment(request)
    if hosts is not None and request.lab is not None:
        return start_on_hosts(stack, request, request.lab, hosts, join, systems)
    ranks = stack.enter_context(Harness(request.timeout_s))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for rank in range(request.ranks):
            inherited = (listener.fileno(),) if rank == 0 else ()
            ranks.start(f"rank {rank}", program("torch_rank"), environment, inherited)
        port, own = listener.getsockname()[1], listener.fileno()
        asked = _joining(request, join, systems) | {"address": "127.0.0.1", "port": port, "listen_fd": own}
        answers = ranks.ask([asked | {"rank": rank} for rank in range(request.ranks)], "starting the ranks")
    return ranks, answers[0]


def start_on_hosts(
    stack: ExitStack,
    request: RankRequest,
    lab: LabRequest,
    hosts: Lab,
    join: Mapping[str, object],
    systems: Sequence[str],
) -> tuple[Harness, dict[str, Any]]:
    """The ranks on the hosts of a lab, each on a core of its own as far as there are so many."""
    ranks = stack.enter_context(Harness(request.timeout_s))
    environment = _environment(request) | {"GLOO_SOCKET_IFNAME": INTERFACE, TRUST: OPEN, KEY: ""}
    for rank in range(request.ranks):
        ranks.add(f"rank {rank}", hosts.start_piped(lab.host_of(rank), program("torch_rank"), environment))
    at = {"address": lab.network.address(0), "port": _LAB_PORT, "listen_fd": None}
    asked = _joining(request, join, systems) | at
    cores = sorted(os.sched_getaffinity(0))
    each = [asked | {"rank": rank, "core": cores[lab.core_of(rank, len(cores))]} for rank in range(request.ranks)]
    return ranks, ranks.ask(each, "starting the ranks")[0]


def _joining(request: RankRequest, join: Mapping[str, object], systems: Sequence[str]) -> dict[str, object]:
    return {
        **join,
        "ranks": request.ranks,
        "threads": request.threads,
        "timeout_s": 2 * request.timeout_s,  # whose own deadline is first is asked who is late
        "backends": {
            system: OURS if system == TLS else system.partition(":")[0] for system in systems if system != MPI
        },  # torch's names
        "environments": {TLS: {TRUST: "", SECRET: secrets.token_hex(32)}},  # in which their groups are made
        "groups": {system: groups_of(system) for system in systems},
    }


def _start_mpi(stack: ExitStack, request: RankRequest, hosts: Lab | None) -> tuple[Harness, dict[str, Any]]:
    # Its files and its shared memory, which it leaves when it is killed, go to a folder that is removed after it.
    place = "/dev/shm" if hosts is None and os.access("/dev/shm", os.W_OK) else None
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="offbeat-bench-", dir=place))
    ranks = stack.enter_context(Harness(request.timeout_s))
    environment = _environment(request) | {"TMPDIR": folder}
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(request.ranks)]
    if hosts is None or request.lab is None:
        flags = {"btl": "^tcp", "oob_tcp_if_include": _loopback(), "btl_vader_backing_directory": folder}
        ranks.start("mpi", [*words, *_mca(flags), *program("mpi_rank")], environment)
    else:  # a host's /dev/shm is its own, and goes with it
        shell = stack.enter_context(closing(RemoteShell(hosts, Path(folder) / "shell", environment)))
        flags = {"btl": "self,vader,tcp", "btl_tcp_if_include": INTERFACE, "oob_tcp_if_include": INTERFACE}
        flags |= {"plm_rsh_agent": shell.agent, "plm_rsh_no_tree_spawn": "1"}
        each = request.lab.ranks_each
        words += ["--host", ",".join(f"{hosts.network.address(host)}:{each}" for host in range(hosts.network.hosts))]
        ranks.add("mpi", hosts.start_piped(0, [*words, *_mca(flags), *program("mpi_rank")], environment))
    (answer,) = ranks.ask({"do": "join"}, "starting mpi")
    if answer.pop("ranks") != request.ranks:
        raise OffbeatError("bench: mpi4py was built for another MPI than this mpirun, so every rank runs alone")
    return ranks, answer


def _mca(flags: Mapping[str, str]) -> list[str]:
    return [word for name, value in flags.items() for word in ("--mca", name, value)]


def _environment(request: RankRequest) -> dict[str, str]:
    chosen = {} if request.strategy is None else {STRATEGY_VARIABLE: request.strategy}
    return {**os.environ, **thread_environment(request.threads), **chosen, "GLOO_SOCKET_IFNAME": _loopback()}


def _loopback() -> str:
    return "lo0" if sys.platform == "darwin" else "lo"
