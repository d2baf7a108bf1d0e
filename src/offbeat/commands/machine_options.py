"""The options that describe simulated machines, shared by the commands that simulate."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from offbeat.commands.base import option
from offbeat.errors import RequestError
from offbeat.machine import available_bytes
from offbeat.policies.table import parse_share
from offbeat.predict.machines import Machines
from offbeat.simulate.cluster import Cluster, check_memory
from offbeat.simulate.compute import LAWS, Failures, SlowPeriods, parse_law
from offbeat.simulate.fair_network import Background
from offbeat.simulate.setup import Network
from offbeat.spec import choice, parse_count, parse_rate, parse_seconds, parse_size
from offbeat.train.layout import layout_of

if TYPE_CHECKING:
    from offbeat.predict.calibration import Calibration

_MOST_CONTENDED = 128  # learners: a ring of them takes some seconds


def _calibration(text: str) -> Calibration:
    from offbeat.predict.calibration import read_calibration  # only for who has one

    return read_calibration(Path(text))


class Learners(NamedTuple):
    """The numbers of learners, and the strategies that were written after them.

    `--learners 2 4 full-sync` is read as it is meant: argparse itself would take the name for a number.
    """

    counts: tuple[int, ...]
    late_words: Sequence[str] = ()


class _LearnersAction(argparse.Action):
    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option_string: str | None = None
    ) -> None:
        words = [str(word) for word in values] if isinstance(values, list) else []
        numbers = len(words)
        while numbers > 1 and words[numbers - 1][0].isalpha():
            numbers -= 1
        try:
            counts = tuple(dict.fromkeys(parse_count(word) for word in words[:numbers]))
        except RequestError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        namespace.learners = Learners(counts, words[numbers:])


def machines_of(given: argparse.Namespace, learners: int | None = None) -> Machines:
    """The machines that were described. `learners`: another number of them than the first that was given."""
    machines = _described(given, learners)
    if given.parallel is None:
        if given.activation:
            raise RequestError("--activation needs --parallel, like --parallel stages=4")
        return machines
    return machines.in_stages(given.parallel, given.activation)


def _described(given: argparse.Namespace, learners: int | None) -> Machines:
    learners = learners or given.learners.counts[0]
    check_memory(learners, available_bytes())
    if given.calibration is not None:
        return _calibrated(given, learners)
    if given.hosts > 1:
        raise RequestError("--hosts needs --calibration FILE, written by offbeat calibrate --lab; or use --topology")
    network = Network(
        size_bytes=given.size,
        push_bytes=given.push_size,
        fetch_bytes=given.fetch_size,
        latency_s=given.latency,
        learner_bytes_per_s=given.learner_bandwidth,
        server_bytes_per_s=given.server_bandwidth,
        shards=given.shards,
        topology=given.topology,
        layers=given.layers,
        forward_share=given.forward_share,
        bucket_bytes=None if given.no_overlap else given.bucket,
        contended=given.contended or bool(given.background),
        background=tuple(given.background),
    )
    if network.contended and learners > _MOST_CONTENDED:
        raise RequestError(f"--contended simulates at most {_MOST_CONTENDED} learners; got {learners}")
    if any(max(one.source, one.target) >= learners for one in given.background):
        raise RequestError(f"--background: the {learners} learners are numbered from 0")
    if given.network is not None:  # one port for every machine
        rate, latency = given.network
        uniform = f"uniform:bandwidth={rate:.15g}B/s,latency={latency:.15g}s"
        network = replace(
            network, learner_bytes_per_s=rate, server_bytes_per_s=rate, latency_s=latency, topology=uniform
        )
    cluster = Cluster(
        learners=learners,
        law=given.compute or parse_law("exp:1"),
        seed=given.seed,
        speeds=given.speeds,
        slow=given.slow,
        failures=given.failures,
        wires=network.wires(),
    )
    return Machines(cluster=cluster, network=network)


def _calibrated(given: argparse.Namespace, learners: int) -> Machines:
    """By the calibration; what it has measured cannot be given beside it."""
    for (name,), keywords, _ in MACHINE_OPTIONS:
        value = getattr(given, name.removeprefix("--").replace("-", "_"))
        if name not in _BESIDE_CALIBRATION and value != keywords.get("default"):
            raise RequestError(f"{name} and --calibration cannot be used together")
    speeds = [*given.speeds, *[1.0] * (learners - len(given.speeds))]
    if len(speeds) > learners or any(not 0 < speed <= 1 for speed in speeds):
        raise RequestError(
            "--speeds: with --calibration, give at most one speed per learner, each above 0 and at most 1 "
            "(0.5: half as fast)"
        )
    from offbeat.predict.calibration import Delays, machine_of

    delays = Delays(given.compute, tuple(1 / speed for speed in speeds))
    spread = given.place == "spread"
    if spread and given.hosts == 1:
        raise RequestError("--place spread puts a server on each of several hosts: give --hosts H too")
    hosts, calibration = given.hosts, given.calibration
    machine = machine_of(
        calibration, "async", learners, delays=delays, seed=given.seed, hosts=hosts, spread=spread
    )  # it refuses what does not fit
    return Machines(
        cluster=machine.cluster, network=Network(), calibration=calibration, delays=delays, hosts=hosts, spread=spread
    )


def _network(text: str) -> tuple[float, float]:
    rate, comma, latency = text.partition(",")
    return parse_rate(rate), parse_seconds(latency) if comma else 0.0


def _background(text: str) -> Background:
    way, comma, rate = text.partition(",")
    ends = way.split(">")
    if len(ends) != 2 or not all(end.isdecimal() for end in ends) or ends[0] == ends[1]:
        raise RequestError(f"expected traffic from one learner to another, like 0>2 or 0>2,100Mbit/s; got '{text}'")
    return Background(int(ends[0]), int(ends[1]), parse_rate(rate) if comma else math.inf)


def _layers(text: str) -> int:
    layers = parse_count(text)
    if layers > 100_000:
        raise RequestError(f"--layers must be at most 100000; got {layers}")
    return layers


def _seed(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise RequestError(f"a seed is a whole number; got '{text}'") from None


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise RequestError(f"expected numbers joined by commas, like 1,1,0.5; got '{text}'") from None


def _slow(text: str) -> SlowPeriods:
    values = _numbers(text)
    if len(values) != 3 or not (0 < values[0] < math.inf and all(0 <= chance <= 1 for chance in values[1:])):
        raise RequestError(
            f"expected FACTOR,ENTER,LEAVE, like 5,0.01,0.1 (two probabilities from 0 to 1); got '{text}'"
        )
    return SlowPeriods(factor=values[0], enter=values[1], leave=values[2])


def _failures(text: str) -> Failures:
    words = text.split(",")
    if len(words) != 2:
        raise RequestError(f"expected UP,DOWN, like 1h,5min; got '{text}'")
    up, down = (parse_seconds(word) for word in words)
    if not up or not down:
        raise RequestError(f"both times must be above 0; got '{text}'")
    return Failures(mean_up_s=up, mean_down_s=down)


MACHINE_OPTIONS = (
    option(
        "--learners", action=_LearnersAction, nargs="+", default=Learners((8,)), metavar="P",
        help="number of learners (default 8); several, like 2 4 8 16, make a sweep",
    ),
    option(
        "--compute", read=parse_law, metavar="LAW",
        help=f"compute time of a minibatch: {', '.join(LAWS)} (default exp:1)",
    ),
    option(
        "--calibration", read=_calibration, metavar="FILE",
        help="use a machine measured by offbeat calibrate; --compute and --speeds then add delays to it",
    ),
    option(
        "--hosts", read=parse_count, default=1, metavar="H",
        help="spread the learners evenly over H hosts of the network measured by offbeat calibrate --lab (default 1)",
    ),
    option(
        "--place", read=choice("first", "spread"), default="first",
        help="with --hosts: servers on the first host, or one on each (default first)",
    ),
    option("--seed", read=_seed, default=0, metavar="S", help="random seed (default 0)"),
    option(
        "--speeds", read=_numbers, default=(), metavar="1,0.5,...",
        help="relative speeds of the first learners (others: 1)",
    ),
    option(
        "--slow", read=_slow, metavar="F,ENTER,LEAVE",
        help="slow periods: factor, and the probabilities per minibatch to enter and to leave one",
    ),
    option(
        "--failures", read=_failures, metavar="UP,DOWN",
        help="mean time to failure and mean time to recovery of a learner",
    ),
    option(
        "--size", read=parse_size, default=0,
        help="size of the model, like 100MB or 25.6Mparams (default 0: communication is free)",
    ),
    option(
        "--push-size", read=parse_size, default=0,
        help="parameter server: size of a push where embeddings push only rows (default: that of the model)",
    ),
    option(
        "--fetch-size", read=parse_size, default=0,
        help="parameter server: the same for the weights that a learner is sent",
    ),
    option("--latency", read=parse_seconds, default=0.0, help="latency of a message to or from a server (default 0)"),
    option(
        "--learner-bandwidth", read=parse_rate, default=math.inf, metavar="RATE",
        help="bandwidth of a learner's link",
    ),
    option(
        "--server-bandwidth", read=parse_rate, default=math.inf, metavar="RATE",
        help="bandwidth of a server's link",
    ),
    option(
        "--shards", read=parse_count, default=1, metavar="S",
        help="number of servers; each holds a part of the weights",
    ),
    option(
        "--network", read=_network, metavar="RATE[,LATENCY]",
        help="bandwidth and latency of each machine's one network port, like 10Gbit/s,4us; replaces the other options "
        "for bandwidth, latency and topology",
    ),
    option("--topology", default="uniform", help="topology for an all-reduce (default uniform)"),
    option("--layers", read=_layers, default=50, metavar="N", help="layers of the model, for overlap (default 50)"),
    option(
        "--forward-share", read=parse_share, default=1 / 3, metavar="X",
        help="forward pass's share of the compute time (default 1/3)",
    ),
    option(
        "--bucket", read=parse_size, default=25_000_000,
        help="bucket size of an overlapped all-reduce (default 25MB)",
    ),
    option(
        "--no-overlap", action="store_true", default=False,
        help="start the all-reduce only after the backward pass",
    ),
    option(
        "--contended", action="store_true", default=False,
        help="run each all-reduce rank by rank on links that its messages share, instead of pricing it step by step",
    ),
    option(
        "--background", read=_background, nargs="+", default=(), metavar="0>2[,RATE]",
        help="endless traffic beside an all-reduce, from one learner's machine to another's; implies --contended",
    ),
    option(
        "--parallel", read=layout_of, metavar="stages=N[,...]",
        help="each learner is a pipeline: stages=4[,schedule=1f1b|auto|...][,microbatches=16], as for offbeat train",
    ),
    option(
        "--activation", read=parse_size, default=0,
        help="size of the activations that a stage sends to the next one per microbatch (default 0)",
    ),
)  # fmt: skip
# The rest it has measured.
_BESIDE_CALIBRATION = (
    "--learners",
    "--compute",
    "--calibration",
    "--hosts",
    "--place",
    "--seed",
    "--speeds",
    "--parallel",
)
