"""A schedule in simulated time: every rank runs its program (`schedules.projection`) on links that all share.

This is what the executor does. A rank sends a chunk as soon as it has it, receives in the order of its program, and
waits for nobody else: the steps of a schedule are not barriers. Where all chunks and ranks are alike and no link is
shared, it takes exactly what `schedules.price` says.

Beside the links, a message costs time of a processor (`ProcessorCosts`), whose cores all ranks on it share. The ranks
of a host, where `hosts` says which they are, read each other's memory: that is work too, and no traffic.

What it must not know: the clock, torch, and where its figures come from.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from offbeat.errors import RequestError
from offbeat.schedules.coding import carried_bytes
from offbeat.schedules.ir import Schedule
from offbeat.schedules.projection import Mark, Receive, Send, Sent, Wait, project
from offbeat.simulate.fair_network import Background, FairNetwork
from offbeat.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorCosts:
    """What the processor does for an all-reduce, in seconds of one core.

    `wake_s` is for a message that its receiver has waited for. A message is cut into pieces of `piece_bytes`; the work
    for all pieces but the last one goes on while they come.
    """

    call_s: float = 0.0  # for each call of a rank
    message_s: float = 0.0  # for each message, half of it where it is sent and half where it is received
    wake_s: float = 0.0
    s_per_byte: float = 0.0  # that is sent and received, in the same halves
    read_s_per_byte: float = 0.0  # of the memory of another rank of the host
    mark_s: float = 0.0  # for a rank of the same host to be seen
    piece_bytes: int = 512 * 1024
    buffer_bytes: float = math.inf  # that the kernel takes of a stream before it is sent
    window_bytes: float = math.inf  # and keeps of it before it is received
    cores: float = math.inf
    shared: bool = False  # all hosts share the cores, and each rank is on one of them, as in a lab


FREE = ProcessorCosts()


def core_of(host: int, number: int, cores: int) -> int:
    """On which of the cores that all hosts share a rank runs: the how-manieth of its host, from 0."""
    return (host + number) % cores


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRun:
    """When each rank has ended each call, and whether two messages ever shared a link."""

    ends_s: tuple[tuple[float, ...], ...]  # call by call, rank by rank
    is_shared: bool

    @property
    def seconds(self) -> float:
        """Of a call: the mean of the slowest rank, if all began at 0."""
        return max(self.ends_s[-1]) / len(self.ends_s)


def run_schedule(
    schedule: Schedule,
    topology: Topology,
    size_bytes: int,
    item_bytes: int = 1,
    *,
    hosts: Sequence[int] | None = None,
    costs: ProcessorCosts = FREE,
    starts_s: Sequence[float] = (),
    background: Sequence[Background] = (),
    calls: int = 1,
) -> ScheduleRun:
    """So many calls, one after the other, of a vector of `size_bytes`; rank r begins at `starts_s[r]`."""
    if schedule.ranks != topology.ranks or len(starts_s) not in (0, schedule.ranks):
        raise RequestError(
            f"'{schedule.name}' has {schedule.ranks} ranks, topology '{topology.name}' has {topology.ranks}"
        )
    sizes = [bytes_each.tolist() for bytes_each in carried_bytes(schedule, size_bytes, item_bytes)]
    network = FairNetwork(topology, window_bytes=costs.window_bytes, background=background)
    run = _Run(schedule, network, sizes, hosts or range(schedule.ranks), costs, calls)
    return run.run(starts_s or [0.0] * schedule.ranks)


class _Processor:
    """Cores that ranks share: whoever has one keeps it until it waits for something; then the next one has it."""

    def __init__(self, cores: float) -> None:
        self._free = cores
        self._on: set[int] = set()
        self._queue: deque[tuple[int, float]] = deque()  # ranks without a core, and what they have to do

    def take(self, rank: int, work_s: float) -> bool:
        """Whether the work begins now; if not, somebody's `leave` says when."""
        if rank not in self._on:
            if self._free < 1:
                self._queue.append((rank, work_s))
                return False
            self._free -= 1
            self._on.add(rank)
        return True

    def leave(self, rank: int) -> tuple[int, float] | None:
        """It waits, or has ended: who has the core next, and with what work."""
        if rank not in self._on:
            return None
        self._on.remove(rank)
        if not self._queue:
            self._free += 1
            return None
        after = self._queue.popleft()
        self._on.add(after[0])
        return after


class _Run:
    def __init__(
        self,
        schedule: Schedule,
        network: FairNetwork,
        sizes: Sequence[Sequence[int]],
        hosts: Sequence[int],
        costs: ProcessorCosts,
        calls: int,
    ) -> None:
        # Of each chunk: bytes as it is, and, where the schedule has a codec, encoded.
        self.sizes, self.hosts, self.costs, self.calls = sizes, hosts, costs, calls
        self.network = network
        self.now = 0.0
        self.due: list[tuple[float, int, int, int]] = []  # when, order, rank, and from whom a message has come, or -1
        self.order = 0
        ranks = range(schedule.ranks)
        self.programs = [project(schedule, rank, hosts) for rank in ranks]
        self.near = [[one for one in ranks if one != rank and hosts[one] == hosts[rank]] for rank in ranks]
        places = list(hosts)
        if costs.shared and costs.cores < math.inf:
            local = [list(hosts[:rank]).count(host) for rank, host in enumerate(hosts)]
            places = [core_of(host, number, int(costs.cores)) for host, number in zip(hosts, local, strict=True)]
        processors = {place: _Processor(1 if costs.shared else costs.cores) for place in places}
        self.processors = [processors[place] for place in places]  # of each rank
        self.come: dict[tuple[int, int], int] = defaultdict(int)  # messages from one rank to another
        self.marks = [-1] * schedule.ranks
        self.ends_s: list[list[float]] = [[] for _ in ranks]
        self.tasks = [self._calls(rank) for rank in ranks]
        self.until: dict[int, Callable[[], bool]] = {}  # what a rank waits for

    def run(self, starts_s: Sequence[float]) -> ScheduleRun:
        for rank, start_s in enumerate(starts_s):
            self._at(start_s, rank)
        while True:
            change = self.network.next_change_s()
            now = min(self.due[0][0] if self.due else math.inf, change)
            if now == math.inf:
                break
            self.now = max(self.now, now)
            if change <= self.now:
                for arrival in self.network.advance(self.now):
                    self._at(self.now + arrival.latency_s, arrival.target, arrival.source)
                    self._check_waiting(arrival.source)  # it may have waited for that memory
            while self.due and self.due[0][0] <= self.now:
                _, _, rank, source = heapq.heappop(self.due)
                if source < 0:
                    self._resume(rank)
                else:
                    self.come[source, rank] += 1
                    self._check_waiting(rank)
        assert not self.until, f"ranks {sorted(self.until)} wait for ever"
        return ScheduleRun(ends_s=tuple(zip(*self.ends_s, strict=True)), is_shared=self.network.is_shared)

    def _at(self, when_s: float, rank: int, source: int = -1) -> None:
        self.order += 1
        heapq.heappush(self.due, (when_s, self.order, rank, source))

    def _check_waiting(self, rank: int) -> None:
        """Whether what a rank waits for has come."""
        if rank in self.until and self.until[rank]():
            del self.until[rank]
            self._resume(rank)

    def _resume(self, rank: int) -> None:
        """A rank goes on until it has to work or to wait."""
        for need in self.tasks[rank]:
            if isinstance(need, float):
                if need:
                    if self.processors[rank].take(rank, need):
                        self._at(self.now + need, rank)
                    return
            elif not need():
                self.until[rank] = need
                break
        if (after := self.processors[rank].leave(rank)) is not None:
            self._at(self.now + after[1], after[0])

    # --- what a rank does ---------------------------------------------------------------------------------------------

    def _calls(self, rank: int) -> Iterator[float | Callable[[], bool]]:
        """Yields seconds of work, and what to wait for."""
        program, near, costs = self.programs[rank], self.near[rank], self.costs
        sends: dict[int, int] = defaultdict(int)
        received: dict[int, int] = defaultdict(int)
        for call in range(self.calls):
            base = call * (program.marks + 1)
            before = dict(sends)
            yield costs.call_s
            yield from self._mark(rank, base)
            for peer in near:
                yield from self._wait(peer, base)
            skipped: dict[int, list[bool]] = defaultdict(list)
            asked = 0
            for at, now in enumerate(program.instructions):
                if isinstance(now, Receive) and at >= asked:  # receives in a row are taken in turns
                    row = list(takewhile(lambda one: isinstance(one, Receive), program.instructions[at:]))
                    asked = at + len(row)
                    for coming in row:
                        assert isinstance(coming, Receive)
                        self.network.ask(self.now, coming.peer, rank, self.sizes[coming.coded][coming.chunk])
                if isinstance(now, Send):
                    skipped[now.peer].append(not self.sizes[now.coded][now.chunk])
                    if self.sizes[now.coded][now.chunk]:
                        yield self._half(self.sizes[now.coded][now.chunk])
                        self.network.send(self.now, rank, now.peer, self.sizes[now.coded][now.chunk])
                        sends[now.peer] += 1
                elif isinstance(now, Receive):
                    if self.sizes[now.coded][now.chunk]:
                        received[now.peer] += 1
                        yield from self._receive(rank, now, received[now.peer])
                elif isinstance(now, Sent):
                    number = before.get(now.peer, 0) + now.sends - sum(skipped[now.peer][: now.sends])
                    yield partial(self._has_left, rank, now.peer, number)
                elif isinstance(now, Wait):
                    yield from self._wait(now.peer, base + now.mark)
                elif isinstance(now, Mark):
                    yield from self._mark(rank, base + now.mark)
                else:  # a Read, a Put of what was read, or an Encode
                    yield costs.read_s_per_byte * self.sizes[0][now.chunk]
            self.ends_s[rank].append(self.now)

    def _receive(self, rank: int, now: Receive, number: int) -> Iterator[float | Callable[[], bool]]:
        waits = self.come[now.peer, rank] < number
        yield lambda: self.come[now.peer, rank] >= number
        yield self._half(self.sizes[now.coded][now.chunk]) + (self.costs.wake_s if waits else 0.0)

    def _half(self, size_bytes: int) -> float:
        """The work of one side for a message, as far as it does not go on beside its sending."""
        piece = min(size_bytes, (size_bytes - 1) % self.costs.piece_bytes + 1)
        return (self.costs.message_s + self.costs.s_per_byte * piece) / 2

    def _has_left(self, rank: int, peer: int, number: int) -> bool:
        return self.network.unsent_bytes(rank, peer, number) <= self.costs.buffer_bytes

    def _wait(self, peer: int, mark: int) -> Iterator[float | Callable[[], bool]]:
        if self.marks[peer] < mark:
            yield lambda: self.marks[peer] >= mark
            yield self.costs.mark_s

    def _mark(self, rank: int, mark: int) -> Iterator[float]:
        self.marks[rank] = mark
        for peer in self.near[rank]:
            self._check_waiting(peer)
        yield 0.0
