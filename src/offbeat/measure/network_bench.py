"""`offbeat calibrate --lab`: the network between hosts measured; and `bench predictions --lab`: all-reduces predicted.

    round trips   from each host to each, one pair at a time, and over sizes: rates, burst, latency
    processor     small all-reduces between one rank of each host: how long each was on a core
    figures       what `auto` finds: streams, and how ranks of one host read from each other

No schedule is fitted. The probes are all-reduces of sizes that `bench predictions` does not ask for, and of them only
the processor's time is used, not how long they took.

A lab's ranks are each kept on one core, and so are the simulated ones. Ranks of real hosts put the questions to
themselves (`torchrun_hosts`).
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from offbeat import schedules
from offbeat.errors import RequestError
from offbeat.lab import Lab
from offbeat.machine import machine_facts
from offbeat.measure.benchmark import OURS, BenchResult, Progress, alternate, check_distinct
from offbeat.measure.harness import Harness
from offbeat.measure.predictions_bench import DEFINITIONS, ORDERED_RATIO, order_of
from offbeat.measure.rank_bench import LabRequest, RankRequest, size_label, start_on_hosts
from offbeat.measure.round_trips import with_warm_up
from offbeat.number_format import format_seconds
from offbeat.predict.network_calibration import (
    ITEM_BYTES,
    NetworkCalibration,
    ProcessorSample,
    RoundTrip,
    burst_of,
    placement_of,
    processor_costs,
    rates_of,
    sample_of,
)
from offbeat.processes.signals import terminable
from offbeat.report.benchmark_fields import NETWORK_PREDICTIONS, Row

PROBES = ("ring", "ring:parts=4", "double-tree")
PROBED_BYTES = (1024, 8 * 1024, 32 * 1024)  # which pass at once
SIZES_OF_TRIPS = (64, 16 * 1024, 128 * 1024, 256 * 1024, 512 * 1024)
TRIPS = 9  # of each size
RATE_BYTES = (2**20, 8 * 2**20)  # two sizes whose difference shows the rate of a link
LINES = ("ring", "direct", "halving-doubling", "tree", "central", "torus:2x2")
SIZES = (64 * 2**10, 4 * 2**20, 100_000_000)
_ROUNDS = 5
_ROUND_S = 0.3
_LONG_S = 0.5  # a call that takes longer is a round of its own
_MOST_CALLS = 12  # that are simulated: they settle after a few


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRequest:
    """A lab, and how long its ranks may take to answer."""

    lab: LabRequest
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if self.lab.network.hosts < 2:
            raise RequestError("--lab: the network between hosts needs 2 or more hosts, like 4x1,1Gbit/s")

    def ranks(self, stack: ExitStack) -> Harness:
        """The ranks of the lab, joined."""
        lab = self.lab
        hosts = stack.enter_context(Lab(lab.network))
        asked = RankRequest(ranks=lab.ranks, against=(), others=(), timeout_s=self.timeout_s, lab=lab, strategy="ring")
        leaders = [host * lab.ranks_each for host in range(lab.network.hosts)]
        join = {"do": "join allreduce", "leaders": leaders}
        return start_on_hosts(stack, asked, lab, hosts, join, [OURS])[0]


class Asked(Protocol):
    """Ranks that answer: the processes of a `Harness`, or those of torchrun."""

    def ask(self, questions: Mapping[str, Any] | Sequence[Mapping[str, Any]], doing: str) -> list[dict[str, Any]]:
        """The answers of all to one question, or to one each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredHosts:
    """Where the ranks are that are asked: as many on each host, one host's after the other's."""

    addresses: tuple[str, ...]  # of each host
    ranks_each: int
    cores: int  # of each host,
    shared: bool  # or of all together

    @property
    def count(self) -> int:
        return len(self.addresses)

    def leader(self, host: int) -> int:
        """The first rank of a host."""
        return host * self.ranks_each


def measure_network(request: NetworkRequest, progress: Progress) -> NetworkCalibration:
    lab = request.lab
    where = MeasuredHosts(
        addresses=tuple(lab.network.address(host) for host in range(lab.network.hosts)),
        ranks_each=lab.ranks_each,
        cores=len(os.sched_getaffinity(0)),
        shared=True,
    )
    with terminable(), ExitStack() as stack:
        progress("network: starting")
        return measure_hosts(request.ranks(stack), where, progress)


def measure_hosts(ranks: Asked, hosts: MeasuredHosts, progress: Progress) -> NetworkCalibration:
    """Each question waits for the answers of all."""
    trips, rates = _round_trips(ranks, hosts, progress)
    sends, receives = rates_of(rates, hosts.count)
    call_s, message_s, wake_s, byte_s = processor_costs(_processor(ranks, hosts, progress))
    progress("network: streams")
    figures = ranks.ask({"do": "figures"}, "measuring streams")[0]
    inside = hosts.ranks_each > 1
    return NetworkCalibration(
        sends=sends,
        receives=receives,
        latency_s=max(0.0, trips[0].seconds / 2 - wake_s),
        burst_bytes=burst_of(trips[:1] + trips[2:], max(sends)),
        streams=figures["streams"],
        cores=hosts.cores,
        shared=hosts.shared,
        call_s=call_s,
        message_s=message_s,
        wake_s=wake_s,
        s_per_byte=byte_s,
        mark_s=figures["inside_latency_s"] / 2 if inside else 0.0,
        read_s_per_byte=1 / figures["inside_bytes_per_s"] if inside else 0.0,
        window_bytes=figures["receive_buffer_bytes"] / 2,  # the other half is for what the kernel adds to it
        buffer_bytes=figures["send_buffer_bytes"],
        round_trips=tuple(trips),
    )


def _round_trips(
    ranks: Asked, hosts: MeasuredHosts, progress: Progress
) -> tuple[list[RoundTrip], dict[tuple[int, int], float]]:
    """Over sizes, from the fastest pair of hosts; and how fast each host sends to each, one pair at a time."""

    def seconds(source: int, target: int, sizes: list[int]) -> list[float]:
        progress(f"network: from host {source} to host {target}")
        address, many = hosts.addresses[target], hosts.count * hosts.ranks_each
        listening = {"do": "listen", "address": address}
        asked = [listening if rank == hosts.leader(target) else {"do": "nothing"} for rank in range(many)]
        port = next(one["port"] for one in ranks.ask(asked, "listening") if "port" in one)
        question = {"source": hosts.leader(source), "target": hosts.leader(target), "address": address}
        asked_all = {"do": "round trips", "port": port, "sizes": with_warm_up(sizes), **question}
        answers = ranks.ask(asked_all, "timing round trips")
        taken: list[float] = next(answer["seconds"] for answer in answers if "seconds" in answer)
        return taken[1:]

    rates: dict[tuple[int, int], float] = {}
    for source in range(hosts.count):
        for target in range(hosts.count):
            if source != target:
                small_s, large_s = seconds(source, target, [RATE_BYTES[0], RATE_BYTES[1]])
                rates[source, target] = (RATE_BYTES[1] - RATE_BYTES[0]) / (large_s - small_s)
    fastest = max(rates, key=lambda pair: rates[pair])
    every = seconds(*fastest, [size for size in SIZES_OF_TRIPS for _ in range(TRIPS)])
    found = [every[number * TRIPS : (number + 1) * TRIPS] for number in range(len(SIZES_OF_TRIPS))]
    trips = [RoundTrip(size, statistics.median(some)) for size, some in zip(SIZES_OF_TRIPS, found, strict=True)]
    return trips, rates


def _processor(ranks: Asked, hosts: MeasuredHosts, progress: Progress) -> list[ProcessorSample]:
    """Of each probe and rank the round in which the processor had least to do: others only add to it."""

    def turn(line: str, size_bytes: int, number: int, doing: str) -> list[float]:
        asked = {"do": "one a host", "strategy": line, "size_bytes": size_bytes, "untimed": 5, "iterations": 40}
        return [one["processor_s"] for one in ranks.ask(asked, doing) if "processor_s" in one]

    wanted = [(line, size) for line in PROBES for size in PROBED_BYTES]
    turns = {f"{line}, {size_label(size)}": partial(turn, line, size) for line, size in wanted}
    found = alternate(turns, _ROUNDS, progress, at="network: ")
    return [
        sample_of(line, hosts.count, rank, size, min(on_core_s[rank] for on_core_s in rounds))
        for (line, size), rounds in zip(wanted, found.values(), strict=True)
        for rank in range(hosts.count)
    ]


# --- all-reduces, predicted and measured ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReducePredictions:
    """What is asked for; wrong requests are refused at birth."""

    network: NetworkCalibration
    lab: LabRequest
    lines: tuple[str, ...] = LINES
    sizes: tuple[int, ...] = SIZES
    rounds: int = 3
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        check_distinct("--sync", self.lines, "strategy")
        check_distinct("--sizes", self.sizes, "size")
        if self.lab.network.hosts != self.network.hosts:
            raise RequestError(
                f"bench: the calibration has the network of {self.network.hosts} hosts, and --lab has "
                f"{self.lab.network.hosts}; run offbeat calibrate with this --lab"
            )
        for line in self.lines:
            schedules.build(line, ranks=self.lab.ranks)
        if any(size < ITEM_BYTES or size % ITEM_BYTES for size in self.sizes):
            raise RequestError(f"bench: --sizes: expected multiples of {ITEM_BYTES} bytes (float32)")


def predict_allreduces(request: AllReducePredictions, progress: Progress) -> BenchResult:
    """Predict all, then measure all, in turn."""
    lab, machine = request.lab, machine_facts()
    placement = placement_of(lab.ranks, lab.network.hosts)
    wanted = [(line, size) for size in request.sizes for line in request.lines]
    calls: dict[tuple[str, int], int] = {}
    predicted_s: dict[tuple[str, int], float] = {}
    for line, size in wanted:
        one_s = request.network.run(line, placement, size).seconds
        calls[line, size] = 1 if one_s > _LONG_S else max(5, math.ceil(_ROUND_S / one_s))
        predicted_s[line, size] = _steady_s(request.network, line, placement, size, calls[line, size])
    with terminable(), ExitStack() as stack:
        progress("starting")
        ranks = NetworkRequest(lab=lab, timeout_s=request.timeout_s).ranks(stack)
        rounds: dict[tuple[str, int], list[float]] = {}
        for size in request.sizes:
            warm = {"do": "warm", "system": OURS, "size_bytes": size, "iterations": 5 if size < SIZES[-1] else 0}
            ranks.ask(warm, f"warming up at {size_label(size)}")

            def turn(line: str, size: int, number: int, doing: str) -> float:
                ranks.ask({"do": "use", "strategy": line}, doing)
                many = calls[line, size]
                untimed = 2 if many > 1 else int(number == 0)  # memory that is new, and programs that are bound
                asked = {"do": "time", "system": OURS, "untimed": untimed, "iterations": many}
                return ranks.slowest_s(asked, doing)

            turns = {line: partial(turn, line, size) for line in request.lines}
            found = alternate(turns, request.rounds, progress, at=f"{size_label(size)}, ")
            rounds |= {(line, size): some for line, some in found.items()}
    rows = [
        {
            "strategy": line,
            "size_bytes": size,
            "measured_s": statistics.median(rounds[line, size]),
            "rounds_s": rounds[line, size],
            "predicted_s": predicted_s[line, size],
            "error": predicted_s[line, size] / statistics.median(rounds[line, size]) - 1,
        }
        for line, size in wanted
    ]
    return allreduces_result(request, machine, rows)


def _steady_s(network: NetworkCalibration, line: str, placement: Sequence[int], size: int, calls: int) -> float:
    """Seconds a call of so many in a row."""
    return network.run(line, placement, size, min(calls, _MOST_CALLS)).seconds


def allreduces_result(request: AllReducePredictions, machine: Mapping[str, Any], rows: Sequence[Row]) -> BenchResult:
    lab = request.lab
    worst_first = sorted(rows, key=lambda row: -abs(row["error"]))
    told, by_size, wrong = [], [], []
    for size in request.sizes:
        own = [row for row in rows if row["size_bytes"] == size]
        pairs, unordered = order_of(own)
        wrong += unordered
        mean = statistics.fmean(abs(row["error"]) for row in own)
        by_size.append(
            {"size_bytes": size, "mean_error": mean, "pairs": pairs, "pairs_in_order": pairs - len(unordered)}
        )
        told.append(
            f"{size_label(size)}: {len(own)} predictions, {100 * mean:.1f} % off on average; {pairs - len(unordered)} "
            f"of {pairs} pairs that differ by more than {100 * (ORDERED_RATIO - 1):.0f} % are in the right order"
        )
    where = f"{lab.network.hosts}x{lab.ranks_each} in a lab, {lab.links()}"
    return BenchResult(
        json={
            "measured": "allreduce predictions",
            "hosts": lab.network.hosts,
            "ranks": lab.ranks,
            "links": lab.links(),
            "machine": dict(machine),
            "rounds": request.rounds,
            "rows": list(worst_first),
            "sizes": by_size,
            "mean_error": statistics.fmean(abs(row["error"]) for row in rows),
            "summary": told,
            "definitions": {key: DEFINITIONS[key] for key in ("error", "order")},
        },
        heading=f"all-reduces on {where}: predicted and measured, largest error first",
        tables=((NETWORK_PREDICTIONS, worst_first),),
        verdict=told,
        details=[
            f"predicted in the wrong order: {fast['strategy']} ({format_seconds(fast['measured_s'])}) is really faster "
            f"than {slow['strategy']} ({format_seconds(slow['measured_s'])})"
            for fast, slow in wrong
        ],
        terms=(
            ("measured", "seconds of one all-reduce, many in a row, by the slowest rank; median over rounds"),
            ("predicted", "seconds of as many all-reduces, simulated from the calibration before they ran"),
            ("error", DEFINITIONS["error"]),
        ),
    )
