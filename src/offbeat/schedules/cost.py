"""What a schedule costs on a topology.

The model. A step begins when the one before it has ended everywhere. The transfers of one step between
one pair of ranks are one message; it takes the latency of its route, plus the time in which the busiest
link of that route carries all that the step puts on it. A step takes as long as its slowest message.
Links are shared within a step, and each direction of a cable is a link of its own. An empty message costs its latency.
A coded transfer carries the bytes of its payload; the time to encode and decode is not in a price.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offbeat.errors import RequestError
from offbeat.number_format import format_rate, format_seconds, format_size
from offbeat.schedules.coding import carried_bytes
from offbeat.schedules.ir import Schedule
from offbeat.spec import MOST
from offbeat.topology import Link, Topology, edge_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What `price` found. Bytes are exact; `bottleneck` is the link that was waited for longest."""

    seconds: float
    steps: int
    bytes_per_rank: tuple[int, ...]  # sent by each rank
    bytes_per_link: Mapping[str, int]
    latency_s: float  # the part of `seconds` that does not depend on the size
    bottleneck: str
    bottleneck_link: Link | None
    bottleneck_s: float  # how long it, or one as busy, was waited for
    equally_busy: int  # how many other links are busy as long, to a part in a thousand

    @property
    def bytes_total(self) -> int:
        return sum(self.bytes_per_rank)

    def why(self) -> str:
        """In words, where the time goes."""
        if self.bottleneck_link is None:
            return "nothing is sent"
        if self.latency_s > self.seconds / 2:
            return f"latency: {format_seconds(self.latency_s)} over {self.steps} steps"
        carried = format_size(self.bytes_per_link[self.bottleneck])
        rate = format_rate(self.bottleneck_link.bytes_per_s)
        more = self.equally_busy
        others = f" (as {'does 1 other' if more == 1 else f'do {more} others'})" if more else ""
        text = f"{self.bottleneck} carries {carried} at {rate}{others}"
        own_s = self.bytes_per_link[self.bottleneck] / self.bottleneck_link.bytes_per_s
        if own_s < 0.6 * self.seconds:  # it is not one link that is full all the time
            waits = f"waiting for such links takes {format_seconds(self.bottleneck_s)} in total"
            text += f": {format_seconds(own_s)}; {waits}"
        return text


def price(schedule: Schedule, topology: Topology, size_bytes: int, item_bytes: int = 1) -> Price:
    """The cost of `schedule` on `topology` for a vector of `size_bytes` in items of `item_bytes` (coded ones: of 4)."""
    if schedule.ranks != topology.ranks:
        raise RequestError(
            f"'{schedule.name}' has {schedule.ranks} ranks, topology '{topology.name}' has {topology.ranks}"
        )
    if size_bytes < 0 or item_bytes < 1 or size_bytes % item_bytes:
        raise RequestError(
            f"a size must be 0 or more and a multiple of the item size, {item_bytes} bytes; got {size_bytes}"
        )
    if size_bytes * schedule.ranks > MOST:
        raise RequestError(f"a size of {size_bytes} bytes on {schedule.ranks} ranks is too large to be counted exactly")
    lengths = np.stack(carried_bytes(schedule, size_bytes, item_bytes))
    by_step = list(_pairs_by_step(schedule))
    pairs = np.unique(
        np.concatenate(
            [np.empty(0, np.int64), *(np.unique(pair) for pair in {id(pair): pair for pair in by_step}.values())]
        )
    )
    ways = _Ways(topology, pairs // schedule.ranks, pairs % schedule.ranks)
    load = np.zeros(len(ways.names))
    waited = np.zeros(len(ways.names))
    sent = np.zeros(len(pairs))
    seconds = latency = 0.0
    for step, pair in enumerate(by_step):
        if not len(pair):
            continue
        if step == 0 or pair is not by_step[step - 1]:
            which = np.searchsorted(pairs, pair)
            present = np.bincount(which, minlength=len(pairs)) > 0
        codec = schedule.steps.codec_rows(step) if schedule.steps.codecs else 0
        carried = lengths[codec, schedule.steps.rows(step)[:, 2]]
        messages = np.bincount(which, weights=carried, minlength=len(pairs))  # exact: whole numbers below 2**53
        on_link = np.bincount(ways.link, weights=messages[ways.pair], minlength=len(ways.names))
        busy = on_link / ways.bytes_per_s
        slowest = np.maximum.reduceat(busy[ways.link], ways.first)
        took = np.where(present, ways.latency_s + slowest, -1.0)
        last = int(took.argmax())
        route = ways.link[ways.first[last] : ways.first[last] + ways.links[last]]
        waited[route[busy[route].argmax()]] += took[last]
        load += on_link
        sent += messages
        seconds += float(took[last])
        latency += float(ways.latency_s[last])
    worst = int(waited.argmax()) if len(waited) else -1
    busiest = load / ways.bytes_per_s
    alike = np.isclose(busiest, busiest[worst], rtol=1e-3) if worst >= 0 else np.zeros(0, bool)
    return Price(
        seconds=seconds,
        steps=len(schedule.steps),
        bytes_per_rank=tuple(int(n) for n in np.bincount(pairs // schedule.ranks, sent, schedule.ranks)),
        bytes_per_link={name: int(n) for name, n in zip(ways.names, load, strict=True)},
        latency_s=latency,
        bottleneck=ways.names[worst] if worst >= 0 else "none",
        bottleneck_link=ways.figures[worst] if worst >= 0 else None,
        bottleneck_s=float(waited[alike].sum()),
        equally_busy=max(0, int(alike.sum()) - 1),
    )


def _pairs_by_step(schedule: Schedule) -> Iterator[npt.NDArray[np.int64]]:
    """Of the rows of each step, source * ranks + target; while they do not change, as in a ring, the same array."""
    before = np.empty(0, np.int64)
    for step in range(len(schedule.steps)):
        rows = schedule.steps.rows(step)
        pair = rows[:, 0].astype(np.int64) * schedule.ranks + rows[:, 1]
        if not np.array_equal(pair, before):
            before = pair
        yield before


def lower_bound_s(topology: Topology, size_bytes: int) -> float:
    """No all-reduce is faster: 2M(P-1) bytes must be sent in all, by all ranks' links together."""
    if topology.ranks == 1:
        return 0.0
    egress = sum(link.bytes_per_s for (source, _), link in topology.links.items() if isinstance(source, int))
    return 2 * size_bytes * (topology.ranks - 1) / egress if egress else math.inf


class _Ways:
    """The routes of the pairs that talk, as arrays: entry e says that `pair[e]` uses `link[e]`."""

    def __init__(self, topology: Topology, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        numbers: dict[tuple[int | str, int | str], int] = {}
        link: list[int] = []
        lengths: list[int] = []
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            route = topology.route(source, target)
            lengths.append(len(route))
            link.extend([numbers.setdefault(edge, len(numbers)) for edge in route])
        self.link = np.array(link, np.int64)
        self.links = np.array(lengths, np.int64)
        self.first = np.cumsum(self.links) - self.links
        self.pair = np.repeat(np.arange(len(lengths)), self.links)
        self.names = [edge_name(edge) for edge in numbers]
        self.figures = [topology.links[edge] for edge in numbers]
        self.bytes_per_s = np.array([figure.bytes_per_s for figure in self.figures])
        latency = np.array([figure.latency_s for figure in self.figures])
        self.latency_s = (
            np.bincount(self.pair, weights=latency[self.link], minlength=len(lengths)) if lengths else latency
        )
