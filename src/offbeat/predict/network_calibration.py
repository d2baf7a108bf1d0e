"""What was measured of the network between hosts, and what an all-reduce takes on it by that.

`offbeat calibrate --lab` measures it and writes it into the calibration. The links are those of the hosts: what each
sends and receives in a second, the burst that a shaped link lets pass at once, and the latency. The rest is work on the
processor: for a call, for a message, for a byte, and for waking up. Nothing in it is of one schedule: a schedule is
simulated on it (`simulate.schedule_run`), with the links and the cores that its messages share.

What it must not know: torch, the clock, and how any of it was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from offbeat.errors import RequestError
from offbeat.schedules import build
from offbeat.schedules.ir import chunk_sizes
from offbeat.simulate.engine import Floats
from offbeat.topology import Edge, Link, Topology

if TYPE_CHECKING:
    from offbeat.simulate.schedule_run import ProcessorCosts, ScheduleRun

ITEM_BYTES = 4  # float32
_ALIKE = 0.1  # links that differ by less are alike: what is left is chance
_INSIDE = 1e15  # bytes a second between a rank and the port of its host, which takes no time of a link


class RoundTrip(NamedTuple):
    """One host has sent so many bytes to another one: seconds until it knew that they had come."""

    size_bytes: int
    seconds: float


class ProcessorSample(NamedTuple):
    """How long a rank was on a core for one call, in which it had so many messages and bytes to move.

    What it sends and what it receives are each counted as a half. It has waited in every step in which it receives.
    """

    messages: float
    size_bytes: float
    waits: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkCalibration:
    """See the module's text. `sends[h]` and `receives[h]`: bytes a second of host h."""

    sends: tuple[float, ...]
    receives: tuple[float, ...]
    latency_s: float
    burst_bytes: float
    streams: int  # to each rank on another host that are worth it
    cores: int
    shared: bool  # whether all hosts share these cores, as in a lab
    call_s: float
    message_s: float
    wake_s: float
    s_per_byte: float
    mark_s: float  # between ranks of a host
    read_s_per_byte: float
    window_bytes: float
    buffer_bytes: float
    round_trips: tuple[RoundTrip, ...] = ()

    def __post_init__(self) -> None:
        if len(self.sends) < 2 or len(self.sends) != len(self.receives):
            raise RequestError("a measured network has 2 or more hosts, each of which sends and receives")
        if not min(*self.sends, *self.receives) > 0 or self.cores < 1 or self.streams < 1:
            raise RequestError("the rates of a measured network must be above 0, with 1 or more cores and streams")

    @property
    def hosts(self) -> int:
        return len(self.sends)

    def costs(self) -> ProcessorCosts:
        from offbeat.simulate.schedule_run import ProcessorCosts  # only for who runs a schedule

        return ProcessorCosts(
            call_s=self.call_s,
            message_s=self.message_s,
            wake_s=self.wake_s,
            s_per_byte=self.s_per_byte,
            mark_s=self.mark_s,
            read_s_per_byte=self.read_s_per_byte,
            window_bytes=self.window_bytes,
            buffer_bytes=self.buffer_bytes,
            cores=self.cores,
            shared=self.shared,
        )

    def topology(self, placement: Sequence[int]) -> Topology:
        """Rank r is on host `placement[r]`; hosts beyond those that were measured are as most of them are.

        What the processors can carry is a link too: of all hosts together where they share the cores.
        """
        links: dict[Edge, Link] = {}
        for rank, host in enumerate(placement):
            links[rank, f"host {host}"] = links[f"host {host}", rank] = Link(0.0, _INSIDE)
        carried = min(_INSIDE, self.cores / self.s_per_byte if self.s_per_byte else math.inf)
        for host in sorted(set(placement)):
            port = f"host {host} port"
            for edge, rates in (((f"host {host}", port), self.sends), ((port, f"host {host}"), self.receives)):
                rate = rates[host] if host < self.hosts else median(rates)
                links[edge] = Link(self.latency_s / 2, rate, burst_bytes=self.burst_bytes)
            own = 1e15 if self.shared else 2 * carried
            links[port, "switch in"] = links["switch out", port] = Link(0.0, own)
        links["switch in", "switch out"] = Link(0.0, carried if self.shared else _INSIDE)
        name = f"{len(set(placement))} hosts, measured"
        return Topology(name=name, ranks=len(placement), links=links)

    def run(self, line: str, placement: Sequence[int], size_bytes: int, calls: int = 1) -> ScheduleRun:
        """So many all-reduces one after the other."""
        from offbeat.simulate.schedule_run import run_schedule

        schedule = build(line, ranks=len(placement))
        items = ITEM_BYTES if size_bytes % ITEM_BYTES == 0 else 1
        return run_schedule(
            schedule, self.topology(placement), size_bytes, items, hosts=placement, costs=self.costs(), calls=calls
        )


def placement_of(ranks: int, hosts: int) -> list[int]:
    """The host of each rank, where all hosts have as many, one host's after the other's."""
    if hosts < 1 or ranks % hosts:
        raise RequestError(f"--hosts {hosts}: {ranks} learners do not fill {hosts} hosts evenly")
    return [rank // (ranks // hosts) for rank in range(ranks)]


# --- from what was measured -------------------------------------------------------------------------------------------


def rates_of(pairs: Mapping[tuple[int, int], float], hosts: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What each host sends and receives, from how fast each sends to each, in bytes a second.

    A pair is as fast as the slower of its two links, so a host is as fast as its fastest pair. Of hosts that differ by
    chance only, all get the mean.
    """
    sends = [max(rate for (source, _), rate in pairs.items() if source == host) for host in range(hosts)]
    receives = [max(rate for (_, target), rate in pairs.items() if target == host) for host in range(hosts)]
    usual = median([*sends, *receives])
    alike = [rate for rate in pairs.values() if abs(rate / usual - 1) < _ALIKE]

    def without_chance(rate: float) -> float:
        return fmean(alike) if alike and abs(rate / usual - 1) < _ALIKE else rate

    return tuple(map(without_chance, sends)), tuple(map(without_chance, receives))


def burst_of(round_trips: Sequence[RoundTrip], bytes_per_s: float) -> float:
    """What passes at once after a pause: the bytes for which a message did not take its time."""
    first, *larger = sorted(round_trips)
    free = [one.size_bytes - (one.seconds - first.seconds) * bytes_per_s for one in larger]
    return max(0.0, median(free)) if free else 0.0


def sample_of(line: str, ranks: int, rank: int, size_bytes: int, seconds: float) -> ProcessorSample:
    """Of a rank of an all-reduce of so many bytes, with one rank on each host."""
    schedule = build(line, ranks=ranks)
    sizes = [ITEM_BYTES * items for items in chunk_sizes(size_bytes // ITEM_BYTES, schedule.chunks)]
    moved: list[int] = []
    waits = 0
    for step in range(len(schedule.steps)):
        rows = [
            (target, sizes[chunk])
            for source, target, chunk, _ in schedule.steps.rows(step).tolist()
            if rank in (source, target)
        ]
        moved += [size for _, size in rows if size]
        waits += any(target == rank and size for target, size in rows)
    return ProcessorSample(len(moved) / 2, sum(moved) / 2, waits, seconds)


def processor_costs(samples: Sequence[ProcessorSample]) -> tuple[float, float, float, float]:
    """Seconds for a call, a message, a wait and a byte that fit best, none of them below 0."""
    rows = np.array([[1.0, one.messages, one.waits, one.size_bytes] for one in samples])
    wanted = np.array([one.seconds for one in samples])
    call_s, message_s, wait_s, byte_s = _least_squares(rows / wanted[:, None], np.ones(len(wanted)))
    return float(call_s), float(message_s), float(wait_s), float(byte_s)


def _least_squares(rows: Floats, wanted: Floats) -> Floats:
    """In unknowns that are 0 or more: of all choices of those that are above 0, the one that fits best."""
    many = rows.shape[1]
    best, least = np.zeros(many), math.inf
    for choice in range(1, 2**many):
        used = [column for column in range(many) if choice >> column & 1]
        found = np.linalg.lstsq(rows[:, used], wanted, rcond=None)[0]
        off = float(np.square(rows[:, used] @ found - wanted).sum())
        if found.min() >= 0 and off < least:
            best, least = np.zeros(many), off
            best[used] = found
    return best


# --- the file (its numbers are read here for the whole calibration) -------------------------------------------------


def as_json(network: NetworkCalibration) -> dict[str, Any]:
    plain = {field.name: getattr(network, field.name) for field in fields(network)}
    return plain | {"round_trips": [one._asdict() for one in network.round_trips]}


def from_json(data: Any) -> NetworkCalibration:
    """`KeyError`, `TypeError` or `ValueError` where something is missing or wrong, as with the rest of the file."""
    numbers = {
        name: number(data[name])
        for name in (
            "latency_s", "burst_bytes", "call_s", "message_s", "wake_s", "s_per_byte", "mark_s", "read_s_per_byte",
            "window_bytes", "buffer_bytes",
        )
    }  # fmt: skip
    return NetworkCalibration(
        sends=tuple(number(rate) for rate in data["sends"]),
        receives=tuple(number(rate) for rate in data["receives"]),
        streams=whole(data["streams"]),
        cores=whole(data["cores"]),
        shared=bool(data["shared"]),
        round_trips=tuple(RoundTrip(whole(one["size_bytes"]), number(one["seconds"])) for one in data["round_trips"]),
        **numbers,
    )


def number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise RequestError(f"expected a number of 0 or more; got {str(value)[:40]}")
    return float(value)


def whole(value: Any, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise RequestError(f"expected a whole number of {least} or more; got {str(value)[:40]}")
    return value
