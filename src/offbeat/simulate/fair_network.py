"""Streams between ranks that share the links of a topology fairly.

From each rank to each other there is one stream of bytes, in order. At every moment all streams that have something to
send go at the rates of max-min fairness: the stream with the least share of its busiest link first, and what it leaves
goes to the others. A stream stops where the receiver has not asked for more than `window_bytes` ago: what was not
asked for waits in the receiver's buffers.

A link with `burst_bytes` is a token bucket, as `tc tbf` makes one: after a pause so many bytes pass it unhindered.

What it must not know: schedules, and what the bytes are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from offbeat.topology import Edge, Topology

_UNHINDERED = 1e15  # bytes a second of a link that has tokens
_CLOSE = 1e-9  # relative: two numbers of bytes that differ by less are the same


class Background(NamedTuple):
    """Traffic beside: from one rank to another without end, as fast as it can or at most at a rate."""

    source: int
    target: int
    bytes_per_s: float = math.inf


class Arrival(NamedTuple):
    """A message of a stream has left the last link at this time; its latency comes on top."""

    source: int
    target: int
    number: int  # of this stream's messages, from 0
    latency_s: float


@dataclass(slots=True)
class _Stream:
    source: int
    target: int
    links: tuple[int, ...]
    latency_s: float
    cap: float = math.inf
    sent: float = 0.0  # bytes that have passed
    queued: float = 0.0  # bytes up to the end of the last message
    asked: float = math.inf  # bytes that may pass
    rate: float = 0.0
    ends: deque[tuple[int, float]] = field(default_factory=deque)  # of the messages under way: number, bytes
    messages: int = 0

    def goal(self) -> float:
        """Up to where it goes before something changes."""
        return min(self.ends[0][1] if self.ends else self.queued, self.asked)

    def has_arrived(self) -> bool:
        """Whether the next message has passed."""
        return bool(self.ends) and self.ends[0][1] - self.sent <= _CLOSE * max(1.0, self.sent)

    def is_active(self) -> bool:
        return self.goal() - self.sent > _CLOSE * max(1.0, self.sent)


class FairNetwork:
    """See the module's text. `send`, `ask` and `advance` move its time on, and never back."""

    def __init__(
        self, topology: Topology, *, window_bytes: float = math.inf, background: Sequence[Background] = ()
    ) -> None:
        self.now_s = 0.0
        self.is_shared = False  # whether two streams have ever had something to send on one link at the same time
        self._topology, self._window = topology, window_bytes
        self._numbers: dict[Edge, int] = {}
        self._rates: list[float] = []
        self._bursts: list[float] = []
        self._tokens: list[float] = []
        self._load: list[float] = []
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._beside: list[_Stream] = []
        self._changed = True
        for one in background:
            stream = self._new(one.source, one.target)
            stream.queued, stream.cap = math.inf, one.bytes_per_s
            self._beside.append(stream)

    def send(self, now_s: float, source: int, target: int, size_bytes: float) -> int:
        """Put a message at the end of a stream: its number."""
        self._move(now_s)
        stream = self._stream(source, target)
        stream.queued += size_bytes
        stream.ends.append((stream.messages, stream.queued))
        stream.messages += 1
        self._changed = True
        return stream.messages - 1

    def drop(self, now_s: float, source: int, target: int, number: int) -> None:
        """Send no more of a message, if some of it is left and nothing was put behind it."""
        self._move(now_s)
        stream = self._stream(source, target)
        if not stream.ends or stream.ends[-1][0] != number or stream.has_arrived():
            return
        stream.ends.pop()
        before = stream.ends[-1][1] if stream.ends else stream.sent
        stream.queued = max(stream.sent, before)
        self._changed = True

    def ask(self, now_s: float, source: int, target: int, size_bytes: float) -> None:
        """The receiver is ready for so many more bytes."""
        stream = self._stream(source, target)
        if self._window < math.inf:
            self._move(now_s)
            stream.asked += size_bytes
            self._changed = True

    def unsent_bytes(self, source: int, target: int, messages: int) -> float:
        """What has not passed of the first so many messages of a stream."""
        stream = self._stream(source, target)
        ends = [end for number, end in stream.ends if number < messages]
        return ends[-1] - stream.sent if ends else 0.0

    def next_change_s(self) -> float:
        """When `advance` has something to do, if nobody sends or asks before; infinity when nothing moves."""
        self._share()
        soon = math.inf
        for stream in self._streams.values():
            if stream.has_arrived():
                return self.now_s
            if stream.rate > 0:
                soon = min(soon, (stream.goal() - stream.sent) / stream.rate)
        for link, burst in enumerate(self._bursts):
            excess = self._load[link] - self._rates[link]
            if burst and excess > 0 and self._tokens[link] > 0:
                soon = min(soon, self._tokens[link] / excess)
        return self.now_s + max(0.0, soon)

    def advance(self, now_s: float) -> list[Arrival]:
        """The messages that have arrived by now."""
        self._move(now_s)
        found = []
        for stream in self._streams.values():
            while stream.has_arrived():
                number, end = stream.ends.popleft()
                stream.sent = max(stream.sent, end)
                found.append(Arrival(stream.source, stream.target, number, stream.latency_s))
        self._changed = True
        return found

    def _stream(self, source: int, target: int) -> _Stream:
        if (source, target) not in self._streams:
            self._streams[source, target] = self._new(source, target)
            self._streams[source, target].asked = self._window
        return self._streams[source, target]

    def _new(self, source: int, target: int) -> _Stream:
        route = self._topology.route(source, target)
        for edge in route:
            if edge not in self._numbers:
                link = self._topology.links[edge]
                self._numbers[edge] = len(self._numbers)
                self._rates.append(link.bytes_per_s)
                self._bursts.append(link.burst_bytes)
                self._tokens.append(link.burst_bytes)
                self._load.append(0.0)
        latency_s = sum(self._topology.links[edge].latency_s for edge in route)
        return _Stream(source, target, tuple(self._numbers[edge] for edge in route), latency_s)

    def _move(self, now_s: float) -> None:
        if now_s <= self.now_s:
            return
        self._share()
        past_s = now_s - self.now_s
        self.now_s = now_s
        for stream in self._streams.values():
            if stream.rate > 0:
                goal, sent = stream.goal(), stream.sent + stream.rate * past_s
                # What is left may be too little for the clock to show.
                stream.sent = goal if goal - sent <= 4e-16 * now_s * stream.rate else sent
        for link, burst in enumerate(self._bursts):
            if burst:
                tokens = self._tokens[link] + (self._rates[link] - self._load[link]) * past_s
                left = 0.0 if tokens < 1.0 else min(burst, tokens)
                if (left == 0.0) != (self._tokens[link] == 0.0):
                    self._changed = True
                self._tokens[link] = left

    def _share(self) -> None:
        """Max-min fairness by progressive filling: the link with the least for each of its streams settles them."""
        if not self._changed:
            return
        self._changed = False
        left = [_UNHINDERED if self._tokens[link] > 0 else rate for link, rate in enumerate(self._rates)]
        self._load = [0.0] * len(left)
        counts = [0] * len(left)
        open_ones = [stream for stream in self._streams.values() if stream.is_active()]
        for stream in self._streams.values():
            stream.rate = 0.0
        open_ones += self._beside
        for stream in open_ones:
            for link in stream.links:
                counts[link] += 1
        self.is_shared = self.is_shared or max(counts, default=0) > 1
        settled: set[int] = set()
        while len(settled) < len(open_ones):
            shares = [left[link] / count if count else math.inf for link, count in enumerate(counts)]
            least = min(shares)
            now = [one for one in open_ones if id(one) not in settled and one.cap <= least]
            if not now:  # the links with the least settle all of theirs
                full = {link for link, share in enumerate(shares) if share <= least * (1 + 1e-12)}
                now = [one for one in open_ones if id(one) not in settled and not full.isdisjoint(one.links)]
            for stream in now:
                settled.add(id(stream))
                stream.rate = min(stream.cap, least)
                for link in stream.links:
                    left[link] = max(0.0, left[link] - stream.rate)
                    counts[link] -= 1
                    self._load[link] += stream.rate
