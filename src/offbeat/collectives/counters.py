"""What a group did: bytes from whom and to whom, and who was late.

Bytes are counted where they are read. When ranks come to a call is known on all of them (one clock on one host, stamped
when the call is made, not when it is run), so the late one can be named, which a synchronous run otherwise hides: all
ranks seem to wait for communication. A backward pass is one iteration, however many buckets it has: its stamp is that
of the bucket that kept the others longest. Calls outside of backward are only looked at where there were no iterations.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from offbeat.collectives.links import HostRates, SlowLink
from offbeat.network.addresses import Address
from offbeat.number_format import format_seconds

_KEPT = 10_000  # iterations that are remembered
_TIE_NS = 50_000  # ranks that come within this of each other come together


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """The rank that came last most often: in which share of the iterations, and by how much (median, seconds)."""

    rank: int
    share: float
    by_s: float
    iterations: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank} was last in {100 * self.share:.0f} % of {self.iterations} iterations,"
            f" by {format_seconds(self.by_s)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The counters of one rank of one group. `received[p]` and `sent[p]` are bytes from and to rank p of the group.

    `late` is a slow link, if there is one, and otherwise the rank that came last most often. `hosts[p]` is the host of
    rank p; `network` the address and interface through which others are reached; `host_rates` how fast each host sends
    and receives while it does.
    """

    rank: int
    ranks: int
    strategy: str
    calls: int
    received: tuple[int, ...]
    sent: tuple[int, ...]
    moved: int
    background_s: float
    waited_s: float
    late: Late | SlowLink | None
    notes: tuple[str, ...] = ()
    hosts: tuple[int, ...] = ()
    network: Address | None = None
    host_rates: HostRates | None = None
    slow_links: tuple[SlowLink, ...] = ()

    @property
    def received_bytes(self) -> int:
        return sum(self.received)

    @property
    def sent_bytes(self) -> int:
        return sum(self.sent)


class Arrivals:
    """Who came when."""

    def __init__(self, names: tuple[int, ...]) -> None:
        self.waited_s = 0.0
        self._names = names
        self._inside: deque[tuple[int, int]] = deque(maxlen=_KEPT)  # (who was last, by how many ns)
        self._outside: deque[tuple[int, int]] = deque(maxlen=_KEPT)
        self._iteration = -1

    def came(self, iteration: int, stamps: list[int]) -> None:
        """Stamps in order of `names`, this rank's first; `iteration` is -1 outside of backward."""
        ordered = sorted(stamps)
        last = ordered[-1]
        who = stamps.index(last)
        by = last - ordered[-2] if len(ordered) > 1 else 0
        self.waited_s += (last - stamps[0]) / 1e9
        if iteration < 0:
            self._outside.append((who, by))
        elif iteration != self._iteration:
            self._iteration = iteration
            self._inside.append((who, by))
        elif by > self._inside[-1][1]:
            self._inside[-1] = who, by

    def late(self) -> Late | None:
        """None where nobody can be named: no iterations, or everybody came together."""
        rows = self._inside or self._outside
        apart = [(who, by) for who, by in rows if by > _TIE_NS]
        if not apart:
            return None
        times = {who: sum(one == who for one, _ in apart) for who in {who for who, _ in apart}}
        worst = max(sorted(times), key=lambda who: times[who])
        return Late(
            rank=self._names[worst],
            share=times[worst] / len(rows),
            by_s=median(by for who, by in apart if who == worst) / 1e9,
            iterations=len(rows),
        )
