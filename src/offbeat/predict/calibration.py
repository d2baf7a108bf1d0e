"""What was measured of a machine, and the machine that a simulation makes of it.

A calibration is a JSON file that `offbeat calibrate` writes. It has the compute times of a recipe's minibatches, the
time of each layer, what copying, reducing, pushing and fetching take over sizes, and probes: short trainings with 1, 2,
... learners, by an all-reduce (`ring`) and with a server (`async`, and `full-sync` with most learners).

The machine that is made of it has cores, which all that is computed shares. A learner's work, and the way of its
gradient to the server and back, are those of the probe with most learners of which each still had a core (`nearest`).
That way is work on the cores or waiting, and how much of it is work is what fits the probes with most learners of all
(`fit_server_work`). An all-reduce takes what the probe with as many learners took beside its computing, simulated.

What it must not know: torch, the clock, and how any of it was measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from offbeat.errors import RequestError
from offbeat.number_format import finite_or_none
from offbeat.policies import create, simplest
from offbeat.predict import network_calibration
from offbeat.predict.network_calibration import NetworkCalibration, number, placement_of, whole
from offbeat.runs.untrusted import read_bytes
from offbeat.schedules import build, price
from offbeat.simulate.cluster import Cluster, Wires
from offbeat.simulate.compute import Draws, Law
from offbeat.simulate.cores import Cores, shared_s
from offbeat.simulate.engine import COMPUTE, MEASURED, Floats
from offbeat.simulate.host_links import HostLinks
from offbeat.simulate.recorded import product_limit
from offbeat.strategy import ALL_REDUCE, SERVER, simulated_family_of
from offbeat.topology import Topology
from offbeat.topology import build as build_topology

if TYPE_CHECKING:
    from offbeat.predict.staged import StagedLearner

FORMAT = 1
DRAWN = 200  # iterations from which a mean is taken
# What is probed: an all-reduce, and with a server a policy for which nobody waits and one that waits for all.
PROBED, SERVED, TOGETHER = "ring", "async", "full-sync"


class Probe(NamedTuple):
    """A short training with so many learners and no delays.

    `there_s` and `back_s`: from a gradient to the new weights, beside computing. With a server, from the end of
    computing until the next minibatch, half and half; with an all-reduce, the reduction after the last learner has
    computed, and the update.
    """

    line: str
    learners: int
    update_s: float  # seconds an update
    compute_s: tuple[float, ...]  # of minibatches
    there_s: float
    back_s: float

    @property
    def family(self) -> str:
        return simulated_family_of(self.line)

    @property
    def together(self) -> bool:
        """Whether its server waits for all learners."""
        return self.family == SERVER and create(self.line, expect=self.learners).waits_for_all(self.learners)


class Layer(NamedTuple):
    name: str
    forward_s: float
    backward_s: float
    size_bytes: int


class Timed(NamedTuple):
    """What took how long with so many learners: a reduction, or a push and a fetch, of so many bytes."""

    learners: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """See the module's text."""

    recipe: str
    batch: int  # samples of a minibatch in the probes
    size_bytes: int  # of a gradient
    machine: Mapping[str, Any]
    probes: tuple[Probe, ...]
    layers: tuple[Layer, ...] = ()
    batches: tuple[tuple[int, float], ...] = ()  # samples of a minibatch, seconds of one learner alone
    reductions: tuple[Timed, ...] = ()
    pushes: tuple[Timed, ...] = ()
    copy_alone_bytes_per_s: float = math.inf
    copy_together_bytes_per_s: float = math.inf
    overlap_slowdown: float = 1.0
    # Work on the cores, as a part of a gradient's way to the server and back: for a gradient (above 1, behind it), and
    # for an update.
    server_work: float = 1.0
    update_work: float = 0.0
    settings: Mapping[str, Any] | None = None  # of the recipe, as measured
    self_check: tuple[Mapping[str, Any], ...] = ()
    network: NetworkCalibration | None = None  # between hosts

    def of(self, family: str) -> list[Probe]:
        probes = (probe for probe in self.probes if probe.family == family and not probe.together)
        found = sorted(probes, key=lambda probe: probe.learners)
        if not found:
            kind = "an all-reduce" if family == ALL_REDUCE else "a parameter server"
            raise RequestError(
                f"the calibration of '{self.recipe}' has no training run with {kind}; run offbeat calibrate again"
            )
        return found

    @property
    def cores(self) -> float:
        """That learners share: of a CPU, or GPUs."""
        found = self.machine.get("gpus") or self.machine.get("cores") or 1
        return float(found) if isinstance(found, int | float) and found >= 1 else 1.0

    def nearest(self, family: str, learners: int) -> Probe:
        """The probe with most learners of which each had a core of its own, up to so many; a server needs one too.

        As many slow each other down even so, by memory or by reducing beside; it is in the times of that probe.
        """
        probes = self.of(family)
        free = min(learners, self.cores - (family == SERVER))
        return max(
            (probe for probe in probes if probe.learners <= free), default=probes[0], key=lambda one: one.learners
        )

    def has(self, line: str, learners: int, plain: bool) -> bool:
        """Whether this very training was a probe; `plain`: without delays."""
        wanted = _called(line, learners), learners
        return plain and any((_called(probe.line, probe.learners), probe.learners) == wanted for probe in self.probes)

    def more_s(self, batch: int) -> float:
        """How much longer a minibatch of so many samples takes than one of the probes; below 0 for a smaller one.

        From computing alone: what a training does beside (loading, handing over) is the same for any size.
        """
        if batch == self.batch or len(self.batches) < 2:
            return 0.0
        return _line(self.batches, batch) - _line(self.batches, self.batch)

    def slower_by(self, microbatches: int) -> float:
        """How many times longer a minibatch takes in so many pieces, one learner alone."""
        if len(self.batches) < 2:
            return 1.0
        return microbatches * _line(self.batches, self.batch / microbatches) / _line(self.batches, self.batch)

    def port(self) -> tuple[float, float]:
        """Bytes a second and latency of one port of every rank, from the reductions: the line that fits them best.

        A ring over P ranks takes 2(P-1) latencies, and 2(P-1)/P of the bytes at the bandwidth. Fitted are relative
        differences, so that small sizes count as much as large ones.
        """
        if not self.reductions:
            raise RequestError(
                f"the calibration of '{self.recipe}' has no measured all-reduce; run offbeat calibrate "
                "again with 2 or more learners"
            )
        rows, ones = [], []
        for ranks, size, seconds in self.reductions:
            steps = 2 * (ranks - 1)
            rows.append([steps / seconds, steps / ranks * size / seconds])
            ones.append(1.0)
        latency_s, per_byte_s = _at_least_0(np.array(rows), np.array(ones))
        return 1 / max(per_byte_s, 1e-15), latency_s

    def between_hosts(self) -> NetworkCalibration:
        if self.network is None:
            raise RequestError(
                f"the calibration of '{self.recipe}' has no measured network; run offbeat calibrate again with --lab"
            )
        return self.network

    def topology(self, ranks: int, hosts: int = 1) -> Topology:
        """Of ranks on one host, or on several."""
        if hosts > 1:
            return self.between_hosts().topology(placement_of(ranks, hosts))
        rate, latency_s = self.port()
        return build_topology(f"uniform:bandwidth={rate:.15g}B/s,latency={latency_s:.15g}s", ranks=ranks)

    def reduction_factor(self, line: str, learners: int) -> float:
        """What an all-reduce takes as a part of the probed one, by the prices of both."""
        if learners == 1 or not self.reductions:
            return 1.0
        topology = self.topology(learners)
        ours, probed = (price(build(one, ranks=learners), topology, self.size_bytes).seconds for one in (line, PROBED))
        return ours / probed if probed else 1.0


def _called(line: str, learners: int) -> str:
    """One name for strategies that are the same with so many learners."""
    return line if simulated_family_of(line) == ALL_REDUCE else simplest(line, learners)


def _line(points: Sequence[tuple[int, float]], at: float) -> float:
    """Between the two points around it, or on by the nearest two; never below a tenth of the least."""
    known = sorted(points)
    if len(known) == 1:
        return known[0][1]
    upper = next((number for number, (x, _) in enumerate(known) if x >= at), len(known) - 1)
    (x0, y0), (x1, y1) = known[max(1, upper) - 1], known[max(1, upper)]
    return max(y0 + (y1 - y0) * (at - x0) / (x1 - x0), min(y for _, y in known) / 10)


def _at_least_0(rows: Floats, wanted: Floats) -> tuple[float, float]:
    """Least squares in two unknowns that are 0 or more."""
    found = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    if found.min() >= 0:
        return float(found[0]), float(found[1])
    alone = [max(0.0, float(column @ wanted) / max(float(column @ column), 1e-300)) for column in rows.T]
    choices = ((alone[0], 0.0), (0.0, alone[1]))
    return min(choices, key=lambda pair: float(np.square(rows @ np.array(pair) - wanted).sum()))


# --- the machine of a simulation ------------------------------------------------------------------------------------


class Delays(NamedTuple):
    """Slowness on purpose: a law of seconds added to each minibatch, and how many times slower each learner is."""

    law: Law | None = None
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a simulation needs."""

    cluster: Cluster
    reduce_s: float  # of an all-reduce: the reduction that computing does not hide, and the update


def machine_of(
    calibration: Calibration,
    line: str,
    learners: int,
    *,
    delays: Delays | None = None,
    batch: int = 0,
    seed: int = 0,
    staged: StagedLearner | None = None,
    hosts: int = 1,
    spread: bool = False,
) -> Machine:
    """The machine with so many learners under a strategy; `batch`: samples of a minibatch, if not the calibrated.

    Learners in stages share the cores that their stages leave each other. Learners on several hosts reduce over the
    measured network, or push and fetch over it: to a server on the first host, or, `spread`, to one on each. Each host
    has the cores of this one unless all of them share these, as in a lab.
    """
    share, stages, size_share = (
        (1.0, 1, 1.0) if staged is None else (staged.time_share, staged.layout.stages, staged.size_share)
    )
    family = simulated_family_of(line)
    probe = calibration.nearest(family, learners)
    delays = delays or Delays()
    more_s = calibration.more_s(batch or calibration.batch)
    reduces = family == ALL_REDUCE
    way_s = 0.0 if reduces else probe.there_s + probe.back_s
    work = calibration.server_work
    placed = placement_of(learners, hosts)
    return Machine(
        cluster=Cluster(
            learners=learners,
            law=delays.law or NOTHING,
            seed=seed,
            speeds=tuple(1 / one for one in delays.factors),
            wires=None if reduces else _wires(calibration, placed, max(0.0, 1 - work) * way_s / 2, spread=spread),
            cores=Cores(
                count=max(1.0, _cores(calibration, hosts) / stages),
                law=law_of([share * max(time + more_s, time / 10) for time in probe.compute_s]),
                push_s=min(1.0, work) * way_s / 2,
                fetch_s=min(1.0, work) * way_s / 2,
                behind_s=max(0.0, work - 1) * way_s,
                update_s=calibration.update_work * way_s,
            ),
        ),
        reduce_s=size_share * _reduce_s(calibration, line, learners, hosts) if reduces else 0.0,
    )


def _wires(calibration: Calibration, placed: Sequence[int], waits_s: float, *, spread: bool) -> Wires:
    """On one host what travels is work, and waiting for each other; between hosts it takes the measured links too."""
    hosts = len(set(placed))
    if hosts == 1:
        return Wires(size_bytes=0, latency_s=waits_s)
    network = calibration.between_hosts()
    servers = tuple(range(hosts)) if spread else (0,)
    links = HostLinks(learners=tuple(placed), servers=servers, topology=network.topology)
    return Wires(size_bytes=calibration.size_bytes, latency_s=waits_s + network.latency_s, hosts=links)


def _cores(calibration: Calibration, hosts: int) -> float:
    alone = hosts == 1 or calibration.between_hosts().shared
    return calibration.cores if alone else hosts * calibration.cores


def _reduce_s(calibration: Calibration, line: str, learners: int, hosts: int) -> float:
    """What an iteration takes beside its computing: so much that simulated probes take as long as they took.

    On several hosts: what it takes beside computing with one learner, which reduces nothing, and the reduction.
    """
    probes = calibration.of(ALL_REDUCE)
    rest = [(probe.learners, max(0.0, probe.update_s - _computing_s(calibration, probe.learners))) for probe in probes]
    if hosts > 1:
        placement = placement_of(learners, hosts)
        return _line(rest, 1) + calibration.between_hosts().run(line, placement, calibration.size_bytes).seconds
    there = [(probe.learners, probe.there_s) for probe in probes]
    other = calibration.reduction_factor(line, learners) - 1
    return max(0.0, _line(rest, learners) + _line(there, learners) * other)


def _computing_s(calibration: Calibration, learners: int) -> float:
    """From the first who begins to the last who ends, on average, if all begin together and share the cores."""
    law = law_of(calibration.nearest(ALL_REDUCE, learners).compute_s)
    works = Draws(law, learners, seed=0)
    ends = [shared_s([works.take(one) for one in range(learners)], calibration.cores) for _ in range(DRAWN)]
    return sum(max(some) for some in ends) / DRAWN


def law_of(times_s: Sequence[float]) -> Law:
    """Each of these times is as likely as any other."""
    curve = product_limit(times_s)
    return Law(text="computing", mean_s=curve.mean_s, sample=lambda chance: curve.at(chance(MEASURED)))


NOTHING = Law(text="as calibrated", mean_s=0.0, sample=lambda chance: np.zeros_like(chance(COMPUTE)))


def fit_server_work(calibration: Calibration, simulate: Callable[[Calibration, Probe], float]) -> Calibration:
    """Find how much of a gradient's way to the server and back is work on the cores, from the most crowded probes.

    `simulate` says how long an update takes there by a calibration. What is not work is waiting, which disturbs nobody;
    more work than the way is long goes on behind it, where only others feel it. Part of it is for each gradient and
    part for each update: `async` has as many of both, `full-sync` fewer updates.
    """
    most = max(probe.learners for probe in calibration.of(SERVER))
    crowded = [probe for probe in calibration.probes if probe.family == SERVER and probe.learners == most > 1]
    if not crowded:
        return calibration
    # With one kind of probe the two cannot be told apart: all of it is for gradients.
    for_updates = range(9) if any(probe.together for probe in crowded) else range(1)
    tried = [
        replace(calibration, server_work=gradient / 5, update_work=update / 4)
        for update in for_updates
        for gradient in range(16)
    ]

    def off(one: Calibration) -> float:
        return sum(math.log(simulate(one, probe) / probe.update_s) ** 2 for probe in crowded)

    return min(tried, key=off)


# --- the file -------------------------------------------------------------------------------------------------------


def as_json(calibration: Calibration) -> dict[str, Any]:
    one = calibration
    return {
        "calibration": FORMAT,
        "recipe": one.recipe,
        "batch": one.batch,
        "size_bytes": one.size_bytes,
        "machine": dict(one.machine),
        "settings": dict(one.settings or {}),
        "copy": {
            "alone_bytes_per_s": finite_or_none(one.copy_alone_bytes_per_s),
            "together_bytes_per_s": finite_or_none(one.copy_together_bytes_per_s),
        },
        "overlap_slowdown": one.overlap_slowdown,
        "server_work": one.server_work,
        "update_work": one.update_work,
        "batches": [{"batch": batch, "seconds": seconds} for batch, seconds in one.batches],
        "layers": [layer._asdict() for layer in one.layers],
        "reductions": [timed._asdict() for timed in one.reductions],
        "pushes": [timed._asdict() for timed in one.pushes],
        "probes": [probe._asdict() | {"compute_s": list(probe.compute_s)} for probe in one.probes],
        "self_check": [dict(row) for row in one.self_check],
        **({} if one.network is None else {"network": network_calibration.as_json(one.network)}),
    }


def read_calibration(path: Path) -> Calibration:
    """A `RequestError` names the file and what is wrong in it."""
    try:
        data = json.loads(read_bytes(path).decode("utf-8"))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise RequestError(f"cannot read the calibration {path}: {reason}; offbeat calibrate writes one") from None
    try:
        return from_json(data)
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from None


def from_json(data: Any) -> Calibration:
    if not isinstance(data, dict) or "calibration" not in data:
        raise RequestError("the file is not a calibration; offbeat calibrate writes one")
    if data["calibration"] != FORMAT:
        raise RequestError(
            f"the calibration has format {data['calibration']!r}, but this version reads format {FORMAT}; "
            "run offbeat calibrate again"
        )
    try:
        copy = data["copy"]
        found = Calibration(
            recipe=_text(data["recipe"]),
            batch=whole(data["batch"]),
            size_bytes=whole(data["size_bytes"]),
            machine=dict(data["machine"]),
            settings=dict(data["settings"]),
            copy_alone_bytes_per_s=_or_infinite(copy["alone_bytes_per_s"]),
            copy_together_bytes_per_s=_or_infinite(copy["together_bytes_per_s"]),
            overlap_slowdown=number(data["overlap_slowdown"]),
            server_work=number(data["server_work"]),
            update_work=number(data["update_work"]),
            batches=tuple((whole(one["batch"]), number(one["seconds"])) for one in data["batches"]),
            layers=tuple(
                Layer(
                    _text(one["name"]),
                    number(one["forward_s"]),
                    number(one["backward_s"]),
                    whole(one["size_bytes"], least=0),
                )
                for one in data["layers"]
            ),
            reductions=tuple(_timed(one) for one in data["reductions"]),
            pushes=tuple(_timed(one) for one in data["pushes"]),
            probes=tuple(_probe(one) for one in data["probes"]),
            self_check=tuple(dict(one) for one in data["self_check"]),
            network=network_calibration.from_json(data["network"]) if "network" in data else None,
        )
        _check_sound(found)
    except RequestError:
        raise
    except KeyError as error:
        raise RequestError(f"the calibration lacks {error}; run offbeat calibrate again") from None
    except (TypeError, ValueError, AttributeError, OverflowError):
        raise RequestError("the calibration has a value of the wrong type; run offbeat calibrate again") from None
    return found


def _check_sound(found: Calibration) -> None:
    if not found.probes:
        raise RequestError("the calibration has no training runs ('probes' is empty); run offbeat calibrate again")
    names = [(probe.line, probe.learners) for probe in found.probes]
    sizes = [batch for batch, _ in found.batches]
    if len(set(names)) < len(names) or len(set(sizes)) < len(sizes):
        raise RequestError(
            "the calibration has the same training run or minibatch size twice; run offbeat calibrate again"
        )
    if any(timed.learners < 2 for timed in found.reductions):
        raise RequestError("the calibration has an all-reduce with one learner; run offbeat calibrate again")
    for key in ("cores", "gpus"):
        if key in found.machine:
            whole(found.machine[key])


def _probe(one: Mapping[str, Any]) -> Probe:
    simulated_family_of(str(one["line"])[:200])
    times = tuple(number(time) for time in one["compute_s"])
    if not times or not sum(times) > 0:
        raise RequestError("a training run of the calibration has no compute times; run offbeat calibrate again")
    found = Probe(
        str(one["line"])[:200],
        whole(one["learners"]),
        _positive(one["update_s"]),
        times,
        number(one["there_s"]),
        number(one["back_s"]),
    )
    _ = found.together  # refuses what is no strategy, or none for so many learners
    return found


def _timed(one: Mapping[str, Any]) -> Timed:
    return Timed(whole(one["learners"]), whole(one["size_bytes"]), _positive(one["seconds"]))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _positive(value: Any) -> float:
    if not number(value) > 0:
        raise RequestError("expected a number above 0; got 0")
    return float(value)


def _or_infinite(value: Any) -> float:
    return math.inf if value is None else number(value)
