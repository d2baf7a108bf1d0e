"""What a request will cost, before it is begun: seconds and memory, as far as its numbers say.

A request above `MOST_S` or `MOST_BYTES` is refused in one line that has the estimate, unless it was confirmed
(`--yes-large`); one that this machine's memory cannot hold is refused in any case. The rates were measured on one idle
core of the kind that ran the tests; they are meant to be right within a factor of 3, and more on a busy machine.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from offbeat import spec as grammar
from offbeat import topology
from offbeat.commands.base import option
from offbeat.errors import RequestError
from offbeat.machine import available_bytes
from offbeat.number_format import format_seconds, format_size
from offbeat.schedules.algorithms import algorithms, chunks_of, sends_to_all
from offbeat.spec import count_of

if TYPE_CHECKING:
    from offbeat.predict.machines import Machines

MOST_S = 20.0
MOST_BYTES = 800_000_000  # beside what every command takes
CONFIRM = option(
    "--yes-large", action="store_true", help="begin although the estimated time or memory of the request is large"
)

_LINK_S, _LINK_BYTES = 3e-6, 400
_RING_LINK_S = 5e-6  # of a link over which rings are looked for
_PLACE_S, _PLACE_BYTES = 0.4e-6, 100  # of a chunk at a rank: built, proved, priced
_ROUTE_S, _ROUTE_BYTES = 6e-6, 150  # of two ranks between which something is sent
_RANK_BYTES = 2_000
_MINIBATCH_S, _SENT_S, _LOGGED_S = 8e-6, 40e-6, 50e-6  # free; over a network, or with failures; every decision kept
_SPAN_BYTES = 700
_ROUND_S = 0.6e-6  # of one rank in an iteration of an all-reduce
_LINES = 15  # that a ranking prices


class TooLargeError(RequestError):
    """A request is larger than it may be, or than it may be without a word."""


class Estimate(NamedTuple):
    """Of a piece of work: `what` names it, with its numbers."""

    what: str
    seconds: float = 0.0
    memory_bytes: float = 0.0

    def __str__(self) -> str:
        parts = [format_seconds(self.seconds)] if self.seconds >= 1 else []
        parts += [f"{format_size(self.memory_bytes)} of memory"] if self.memory_bytes >= 1e6 else []
        return f"{self.what} takes about {' and '.join(parts) or 'no time'}"


def check(given: argparse.Namespace, estimate: Estimate) -> None:
    """`TooLargeError` for what is too large, or large and not confirmed."""
    here = available_bytes()
    if here is not None and estimate.memory_bytes > here:
        raise TooLargeError(f"{estimate}, but only {format_size(here)} are free; make the request smaller")
    if not given.yes_large and (estimate.seconds > MOST_S or estimate.memory_bytes > MOST_BYTES):
        raise TooLargeError(f"{estimate}; make the request smaller, or confirm it with --yes-large")


def together(what: str, parts: Iterable[Estimate]) -> Estimate:
    """Of several, one after the other."""
    found = list(parts)
    return Estimate(what, sum(one.seconds for one in found), max((one.memory_bytes for one in found), default=0.0))


# --- networks and schedules -----------------------------------------------------------------------------------------


def of_topology(line: str, ranks: int, *, rings: bool = False) -> Estimate:
    """Built; with `rings` those over its direct links are looked for, too."""
    links = topology.count_links(line, ranks)
    what = f"'{line}' with {count_of(ranks, 'rank')}, {links:,} links,"
    each_s = _LINK_S + (_RING_LINK_S if rings and topology.has_direct_links(line) else 0.0)
    return Estimate(what, links * each_s, links * _LINK_BYTES + ranks * 200.0)


def of_schedule(line: str, ranks: int, collective: str = "all-reduce") -> Estimate:
    """Built, proved and priced on a topology that is there."""
    places = float(ranks) * chunks_of(line, ranks=ranks, collective=collective)
    routes = float(ranks) * (ranks if sends_to_all(line, collective) else 2 + math.log2(ranks))
    what = f"'{line}' on {count_of(ranks, 'rank')}"
    memory = places * _PLACE_BYTES + routes * _ROUTE_BYTES + ranks * float(_RANK_BYTES)
    return Estimate(what, places * _PLACE_S + routes * _ROUTE_S, memory)


def of_ranking(ranks: int) -> Estimate:
    """Every all-reduce."""
    ring, direct = of_schedule("ring", ranks), of_schedule("direct", ranks)
    what = f"ranking every all-reduce on {count_of(ranks, 'rank')}"
    return Estimate(what, _LINES * ring.seconds + direct.seconds, max(ring.memory_bytes, direct.memory_bytes))


# --- simulations ----------------------------------------------------------------------------------------------------


def of_simulation(
    machines: Machines, strategy: str, updates: int | None = None, *, minibatches: int | None = None,
    careful: bool = False, logged: bool = False, spans: bool = False,
) -> Estimate:  # fmt: skip
    """One strategy; before anything of it is built."""
    from offbeat.simulate.cluster import LEARNER_BYTES  # not for who draws a topology
    from offbeat.simulate.setup import Setup

    cluster, network = machines.cluster, machines.network
    setup, learners = Setup(strategy=strategy, cluster=cluster), cluster.learners
    what = f"simulating '{strategy}' with {count_of(learners, 'learner')}"
    memory = float(learners * LEARNER_BYTES)
    parts = []
    if setup.reduces and machines.calibration is None:
        parts = [of_topology(network.topology, learners)]
        if strategy in algorithms() or grammar.parse(strategy).name in algorithms():
            parts.append(of_schedule(strategy, learners))
        found = together(what, parts)
        memory += sum(one.memory_bytes for one in parts)
        if found.seconds > MOST_S or memory > MOST_BYTES:
            return Estimate(what, found.seconds, memory)
    many = updates or setup.updates_for(minibatches, careful=careful)
    begun = float(many) * setup.begun_per_update()
    what = f"{what}, {count_of(many, 'update')}, {begun:,.0f} minibatches,"
    slow = cluster.wires is not None or cluster.failures is not None
    each_s = _ROUND_S if setup.reduces else _LOGGED_S if logged else _SENT_S if slow else _MINIBATCH_S
    memory += begun * _SPAN_BYTES if logged or spans else 0.0
    return Estimate(what, begun * each_s + sum(one.seconds for one in parts), memory)


def of_comparison(
    machines: Machines, strategies: Sequence[str], updates: int | None, minibatches: int | None
) -> Estimate:
    """What `compare` does with each: simulate it. Again without each cause that slows it: these are short."""
    found = [of_simulation(machines, one, updates, minibatches=minibatches) for one in strategies]
    what = f"comparing {', '.join(strategies[:3])}{', ...' if len(strategies) > 3 else ''}"
    return together(f"{what} with {count_of(machines.cluster.learners, 'learner')}", found)
