"""What the links of a run's hosts carried: the busiest of them, and what it would be with the servers elsewhere.

A learner that is on another host than a shard sends that shard's part of each gradient over both hosts' links, and is
sent its part of the weights. With a model of M bytes and n hosts with a learner each, one server host takes in
(n - 1) M per round; with a shard on each, every link takes in 2 (n - 1) M / n. No clock, no socket: counts are given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HERE = ""  # the name of the run's host


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLoad:
    """One direction of one host's link."""

    host: str
    takes_in: bool
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTraffic:
    """Minibatches of each host, the bytes of a push and of a fetch, and what the run's host sent to a mirror."""

    minibatches: Mapping[str, int]
    push_bytes: int
    fetch_bytes: int
    mirror_bytes: int = 0

    def busiest(self, servers: Sequence[str]) -> LinkLoad | None:
        """With a shard on each of these hosts, or all on one; None where nothing leaves a host."""
        loads: Counter[tuple[str, bool]] = Counter({(HERE, False): self.mirror_bytes})
        for host, many in self.minibatches.items():
            for server in servers:
                if server == host:
                    continue
                pushed, fetched = (many * size / len(servers) for size in (self.push_bytes, self.fetch_bytes))
                for where, takes_in, size in (
                    (host, False, pushed),
                    (server, True, pushed),
                    (server, False, fetched),
                    (host, True, fetched),
                ):
                    loads[where, takes_in] += round(size)
        (host, takes_in), most = max(loads.items(), key=lambda one: one[1])
        return LinkLoad(host=host, takes_in=takes_in, size_bytes=most) if most else None


def told_of(traffic: RunTraffic, spread_on: Sequence[str]) -> dict[str, object] | None:
    """For a summary. `spread_on`: the other hosts that hold a shard; none: all are on the run's host."""
    now = traffic.busiest([HERE, *spread_on])
    hosts = sorted({HERE, *traffic.minibatches})
    other = traffic.busiest([HERE] if spread_on else hosts)
    if now is None:
        return None
    return {
        "host": now.host,
        "takes_in": now.takes_in,
        "bytes": now.size_bytes,
        "other": "first" if spread_on else "spread",
        "other_bytes": 0 if other is None else other.size_bytes,
    }
