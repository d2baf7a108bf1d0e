"""Which schedule an all-reduce takes: the one that was named, or, with `auto`, the cheapest for its size.

`auto` prices every all-reduce on this host as it was measured when the first call came: what it takes until all ranks
have seen that all are there, and how fast each reads from another while all do. Across hosts the network was measured,
too: what an exchange takes, and how fast each host sends and receives. All ranks agree on the figures, so that all
choose alike.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

from offbeat import spec as grammar
from offbeat import topology
from offbeat.codecs import NONE, PER_TENSOR, Codec, CodecOption, coding_s, read_option
from offbeat.codecs.table import ACROSS
from offbeat.collectives.calls import Plan, plan
from offbeat.collectives.links import SlowLink
from offbeat.errors import RequestError
from offbeat.number_format import format_rate, format_seconds, format_size
from offbeat.schedules import Price, algorithms, auto_lines, price
from offbeat.schedules.algorithms import gather_line, keeps_residuals, split_codec
from offbeat.schedules.coding import LEAST_BYTES
from offbeat.spec import count_of
from offbeat.strategy import ALL_REDUCE, AUTO, NATIVE, family_of, with_shape

HIERARCHICAL = "hierarchical"
_MEETING = 0.06  # for each further host: direct on 4 hosts took 12 % longer than ring, which sends as much
_SLOW = 0.6  # of what is usual: a link below that is named, and may own nothing
_PARTS = 4  # of the pieces of a ring across hosts,
_CODED_PARTS = 8  # and of one that is coded,
_LEAST_PART_BYTES = 64 * 1024  # of at least this: smaller ones cost more than they hide
_MOST_PRICED = 64  # ranks; more would take seconds, and one host has fewer


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFigures:
    """The network between hosts: `sends[h]` and `receives[h]` are what host h does, in bytes per second.

    `streams` is how many connections between two ranks were found to be worth it.
    """

    latency_s: float
    sends: tuple[float, ...]
    receives: tuple[float, ...]
    streams: int = 1

    def __str__(self) -> str:
        rates = (*self.sends, *self.receives)
        return (
            f"{format_seconds(self.latency_s)} and {format_rate(min(rates))} to {format_rate(max(rates))} across hosts,"
            f" {count_of(self.streams, 'stream')} to each rank"
        )

    def slow_links(self) -> tuple[SlowLink, ...]:
        """Links that are much slower than those of most hosts."""
        return tuple(self._slow())

    def slow_hosts(self) -> set[int]:
        return {slow.host for slow in self._slow()}

    def _slow(self) -> Iterator[SlowLink]:
        for does, rates in (("sends", self.sends), ("receives", self.receives)):
            usual = median(rates) if len(rates) > 2 else max(rates)
            for host, rate in enumerate(rates):
                if rate < _SLOW * usual:
                    yield SlowLink(host=host, does=does, bytes_per_s=rate, usual=usual)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One host, as measured by its ranks; and the network, where there are several."""

    latency_s: float
    bytes_per_s: float
    network: NetworkFigures | None = None

    def __str__(self) -> str:
        if self.network is not None and not self.latency_s:  # one rank on each host
            return str(self.network)
        inside = (
            f"{format_seconds(self.latency_s)} per step, {format_rate(self.bytes_per_s)} per rank while all ranks read"
        )
        return inside if self.network is None else f"{inside} inside a host, {self.network}"

    def topology(self, hosts: Sequence[int]) -> topology.Topology:
        """The machines as links: all ranks alike on one host, and one port for each of several."""
        if self.network is None:
            line = f"uniform:bandwidth={self.bytes_per_s:.0f}B/s,latency={self.latency_s * 1e9:.0f}ns"
            return topology.build(line, ranks=len(hosts))
        inside = topology.Link(self.latency_s / 2, self.bytes_per_s)
        links: dict[topology.Edge, topology.Link] = {}
        for rank, host in enumerate(hosts):
            links[rank, f"host {host}"] = links[f"host {host}", rank] = inside
        for host in set(hosts):
            half_s = self.network.latency_s / 2
            links[f"host {host}", "network"] = topology.Link(half_s, self.network.sends[host])
            links["network", f"host {host}"] = topology.Link(half_s, self.network.receives[host])
        return topology.Topology(name="measured", ranks=len(hosts), links=links)


def check(line: str, ranks: int, hosts: tuple[int, ...] | None = None) -> str:
    """A strategy that a process group can run, as it is written; `RequestError` otherwise, in one line."""
    family = family_of(line)
    if family != ALL_REDUCE and line not in (AUTO, NATIVE):
        raise RequestError(f"'{line}' is a {family} strategy; a process group needs an all-reduce strategy like ring")
    if line not in (AUTO, NATIVE):
        for one in _lines_of(grammar.parse(line)):
            plan(one, "all-reduce", ranks, hosts=hosts or (0,) * ranks)
    return str(grammar.parse(line))


def _lines_of(spec: grammar.Spec) -> list[str]:
    """The lines that `codec=auto` can become; otherwise the line itself."""
    bare, coded = split_codec(spec)
    option = read_option(coded) if coded else None
    if option is None or not option.auto:
        return [str(spec)]
    return [str(bare), *(_with_codec(bare, codec.line) for codec in option.codecs if _can_take(bare, codec))]


def _with_codec(bare: grammar.Spec, codec: str) -> str:
    return str(grammar.Spec(name=bare.name, args=bare.args, options=(*bare.options, ("codec", codec))))


def _can_take(bare: grammar.Spec, codec: Codec) -> bool:
    """Whether a line has a schedule for this codec; `auto` leaves out those for which it has none."""
    if codec.kind != PER_TENSOR or codec.vectors(1) is not None:
        return True
    try:
        gather_line(bare, codec)
    except RequestError:
        return False
    return True


def hosts_in_order(hosts: Sequence[int]) -> tuple[int, ...] | None:
    """The ranks host by host; None where they are already."""
    order = tuple(sorted(range(len(hosts)), key=lambda rank: hosts[rank]))
    return None if order == tuple(range(len(hosts))) else order


@cache
def _meeting(way: Plan, hosts: tuple[int, ...]) -> int:
    """From how many other hosts one host receives in one step, at most; 1 inside one host."""
    most = 1
    steps = way.schedule.steps
    for step in range(len(steps)):
        pairs = {(hosts[source], hosts[target]) for source, target, *_ in steps.rows(step).tolist()}
        across = Counter(target for source, target in pairs if source != target)
        most = max(most, *across.values()) if across else most
    return most


@cache
def _in_a_row(way: Plan) -> int:
    """How many chunks one rank sends to another in one step, at least."""
    steps = way.schedule.steps
    rows = [Counter((source, target) for source, target, *_ in steps.rows(step).tolist()) for step in range(len(steps))]
    return min((min(row.values()) for row in rows if row), default=1)


def line_of(collective: str, hosts: Sequence[int] | None) -> tuple[str, tuple[int, ...] | None]:
    """The line of a collective that is no all-reduce, and the order of its ranks.

    Inside a host all read each other's memory, and 1 step is the fastest. Across hosts what all of a host need, or have
    added up, crosses once; what each needs for itself goes straight there.
    """
    plain = "central" if collective in ("broadcast", "reduce") else "direct"
    if hosts is None or collective in ("gather", "scatter", "all-to-all", "barrier"):
        return plain, None
    each = math.gcd(*(hosts.count(host) for host in set(hosts)))
    return f"{HIERARCHICAL}:{len(hosts) // each}x{each}", hosts_in_order(hosts)


class Choice:
    """The way of each all-reduce of a group. Across hosts, schedules go through the ranks host by host."""

    def __init__(
        self, line: str, ranks: int, figures: Figures | None = None, hosts: Sequence[int] | None = None
    ) -> None:
        self._hosts = tuple(hosts or (0,) * ranks)
        self._order = hosts_in_order(self._hosts) if "order" not in dict(grammar.parse(line).options) else None
        self.line = check(with_shape(line, Counter(self._hosts).values()), ranks, self._hosts)
        self._bare, coded = split_codec(grammar.parse(self.line))
        self._option: CodecOption | None = read_option(coded) if coded else None
        self.keeps_residuals = keeps_residuals(grammar.parse(self.line))
        row = algorithms().get(self._bare.name)
        self._gathers = row is not None and row.gathers
        self.speeds: dict[str, tuple[float, float]] = {}  # by codec: seconds to encode and to decode an item, here
        self._by_codec: dict[int, list[tuple[float, str]]] = {}
        self.figures = figures
        self._ranks = ranks
        self._by_size: dict[int, list[tuple[float, str]]] = {}
        self._plans: dict[int, Plan] = {}
        self._auto = str(self._bare) == AUTO
        self.candidates = self._find_candidates()
        self._priced = (self.line == AUTO or self.candidates != ()) and 1 < ranks <= _MOST_PRICED
        self.measures = self._priced or self.candidates != ()  # before its first call, and after `use`
        self.codes = self._gathers or self._option is not None  # whether `coded` ever finds something

    def needs_figures(self) -> bool:
        return self._priced and self.figures is None

    @property
    def is_coded(self) -> bool:
        return self._option is not None

    def needs_speeds(self) -> bool:
        return self.candidates != () and not self.speeds

    def _find_candidates(self) -> tuple[Codec, ...]:
        """The codecs among which `codec=auto` chooses; none where nothing is chosen, or all ranks share memory."""
        if self._option is None or not self._option.auto or len(set(self._hosts)) == 1:
            return ()
        return tuple(codec for codec in self._option.codecs if _can_take(self._bare, codec))

    def of(self, size_bytes: int) -> Plan:
        """The plan for a vector of so many bytes that is sent as it is."""
        size = size_bytes.bit_length() if self._auto else 0
        known = self._plans.get(size)
        if known is None:
            known = plan(self._line_for(size_bytes), "all-reduce", self._ranks, order=self._order)
            if not self.needs_figures():
                self._plans[size] = known
        return known

    def _line_for(self, size_bytes: int) -> str:
        if not self._auto:
            return "direct" if self._gathers else str(self._bare)
        ranked = self._ranked(size_bytes)
        return ranked[0][1] if ranked else "direct"

    def coded(self, size_bytes: int) -> tuple[Codec, Plan] | None:
        """The codec for a vector of fp32, and how what it makes goes; nothing where it is sent as it is.

        Of a codec per transfer it is the coded plan; otherwise the plan by which payloads are gathered, or added up.
        Where ranks send whole vectors to each other, these are gathered without a codec, too.
        """
        if self._option is None or size_bytes <= LEAST_BYTES:
            return self._coded_by(NONE, size_bytes, across=False) if self._gathers else None
        if not self._option.auto:
            return self._coded_by(self._option.only(), size_bytes, across=self._option.across)
        ranked = self._ranked_codecs(size_bytes)
        chosen = ranked[0][1] if ranked else ""
        found = [codec for codec in self.candidates if codec.line == chosen]
        if not found and not self._gathers:
            return None
        return self._coded_by(found[0] if found else NONE, size_bytes, across=True)

    def _coded_by(self, codec: Codec, size_bytes: int, *, across: bool) -> tuple[Codec, Plan] | None:
        if self._gathers or codec.kind == PER_TENSOR:
            if codec.vectors(1) is not None and not self._gathers:
                return codec, self.of(0)
            return codec, plan(gather_line(self._bare, codec), "all-gather", self._ranks, order=self._order)
        bare = self._in_parts(size_bytes)
        line = _with_codec(bare, f"{codec.line}@{ACROSS}" if across else codec.line)
        way = plan(line, "all-reduce", self._ranks, order=self._order, hosts=self._hosts)
        return (codec, way) if way.schedule.steps.codecs else None  # all ranks may be on one host

    def _in_parts(self, size_bytes: int) -> grammar.Spec:
        """Across hosts a chunk is coded while another is on its way: unless the line says so, a large one has parts."""
        bare, row = self._bare, algorithms()[self._bare.name]
        given = "parts" in dict(bare.options) or not any(param.name == "parts" for param in row.params)
        if given or len(set(self._hosts)) == 1 or size_bytes < _CODED_PARTS * self._ranks * _LEAST_PART_BYTES:
            return bare
        return grammar.Spec(name=bare.name, args=bare.args, options=(*bare.options, ("parts", str(_CODED_PARTS))))

    def _ranked_codecs(self, size_bytes: int) -> list[tuple[float, str]]:
        """Seconds of a vector by each codec, "" for none, the fastest first; nothing without measurements."""
        if self.figures is None or not self.candidates or not self.speeds:
            return []
        size = size_bytes.bit_length()
        if size not in self._by_codec:
            machines, typical = self.figures.topology(self._hosts), max(4, (3 << size >> 2) // 4 * 4)
            plain = plan(str(self._bare), "all-reduce", self._ranks, order=self._order)
            found = [(price(plain.schedule, machines, typical).seconds, "")]
            for codec in self.candidates:
                encode_s, decode_s = (typical / 4 * each for each in self.speeds[codec.line])
                coding = coding_s(codec, self._ranks, encode_s, decode_s, gathers=self._gathers)
                line = _with_codec(self._bare, codec.line)
                way = plan(line, "all-reduce", self._ranks, order=self._order, hosts=self._hosts)
                found.append((price(way.schedule, machines, typical).seconds + coding, codec.line))  # they take turns
            self._by_codec[size] = sorted(found)
        return self._by_codec[size]

    def why(self, size_bytes: int) -> str:
        """In words: what was chosen for this size, and what the others would have cost."""
        if self._option is not None and self._option.auto:
            return self._why_codec(size_bytes)
        if self.line != AUTO:
            return f"{self.line}: chosen by the user"
        ranked = self._ranked(size_bytes)
        if not ranked or self.figures is None:
            return "direct: the default without measurements"
        costs = ", ".join(f"{line} {format_seconds(seconds)}" for seconds, line in ranked[:4])
        return f"{ranked[0][1]} for {format_size(size_bytes)}: {costs}; measured {self.figures}"

    def _why_codec(self, size_bytes: int) -> str:
        if not self.candidates:
            return f"{self._bare} without a codec: all ranks share memory, where a codec only costs time"
        if size_bytes <= LEAST_BYTES:
            return f"{self._bare} without a codec: a tensor of up to {format_size(LEAST_BYTES)} is sent as it is"
        ranked = self._ranked_codecs(size_bytes)
        if not ranked:
            return f"{self._bare} without a codec: nothing was measured yet"
        costs = ", ".join(f"{line or 'none'} {format_seconds(seconds)}" for seconds, line in ranked)
        chosen = f"with codec {ranked[0][1]}" if ranked[0][1] else "without a codec"
        return f"{self._bare} {chosen} for {format_size(size_bytes)}: {costs}; measured {self.figures}"

    def _lines(self, size_bytes: int) -> list[str]:
        """What is considered: across hosts also the two-level ones, and rings whose pieces have parts."""
        lines = list(auto_lines())
        if len(set(self._hosts)) > 1 and size_bytes >= _PARTS * self._ranks * _LEAST_PART_BYTES:
            lines.append(f"ring:parts={_PARTS}")
        each = math.gcd(*(self._hosts.count(host) for host in set(self._hosts)))
        if len(set(self._hosts)) > 1 and each > 1:
            shape = f"{HIERARCHICAL}:{self._ranks // each}x{each},inner=direct"
            lines += [f"{shape}{how}" for how in ("", ",parts=4", ",outer=direct", ",outer=halving-doubling")]
        network = None if self.figures is None else self.figures.network
        slow = set() if network is None else network.slow_hosts()
        if slow and len(slow) < len(set(self._hosts)):
            places = self._order or range(self._ranks)  # the schedule's rank r is rank places[r]
            ranks = "-".join(str(place) for place, rank in enumerate(places) if self._hosts[rank] in slow)
            lines += [f"fold:{ranks},parts={parts}" for parts in (1, 16, 64)]
        return lines

    def _seconds(self, way: Plan, found: Price) -> float:
        """A price, and what it leaves out.

        Flows from several hosts that meet at one port hold each other up. Of several chunks that go the same way in a
        step, the first goes on while the others come: that hides latency, but for what one chunk takes of a step.
        """
        carrying_s = found.seconds - found.latency_s
        meeting_s = _MEETING * (_meeting(way, self._hosts) - 1) * carrying_s
        hidden_s = 0.0
        if len(set(self._hosts)) > 1 and found.steps:
            hidden_s = min(found.latency_s * (1 - 1 / found.steps), carrying_s * (1 - 1 / _in_a_row(way)))
        return found.seconds + meeting_s - hidden_s

    def _ranked(self, size_bytes: int) -> list[tuple[float, str]]:
        if self.figures is None or self._ranks == 1:
            return []
        size = size_bytes.bit_length()
        if size not in self._by_size:
            machines = self.figures.topology(self._hosts)
            typical = max(1, 3 << size >> 2)  # the middle between two powers of two, so that all of them choose alike
            plans = [(plan(line, "all-reduce", self._ranks, order=self._order), line) for line in self._lines(typical)]
            prices = [(self._seconds(way, price(way.schedule, machines, typical)), line) for way, line in plans]
            self._by_size[size] = sorted(prices, key=lambda priced: priced[0])  # of equal ones the first
        return self._by_size[size]
