"""`offbeat bench policies`: real learners made slow on purpose, beside the simulator's prediction for the same laws.

Every learner draws its slowness from the numbers that the simulator draws for it. Both runs are judged by one function
on their decisions: seconds between updates, and the staleness of what was applied, over the same updates. Left out are
the first updates (processes start one after the other) and all that came after the last one asked for.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from offbeat.errors import OffbeatError, RequestError
from offbeat.machine import machine_facts
from offbeat.measure.benchmark import BenchResult, Progress, check_distinct, check_least, check_processes
from offbeat.measure.harness import environment, program, supervise
from offbeat.measure.policies_lab import ITEM_BYTES, run_on_hosts, wires_of
from offbeat.measure.rank_bench import LabRequest
from offbeat.number_format import format_change, format_size
from offbeat.policies import Pushed, create
from offbeat.policies.replay import read_decision
from offbeat.processes.signals import terminable
from offbeat.report.benchmark_fields import Field, Row
from offbeat.runs.log import read_log
from offbeat.server.run_setting import RunSetting
from offbeat.server.supervisor import ServerPlan
from offbeat.simulate import server as simulator
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.compute import parse_law
from offbeat.spec import count_of
from offbeat.strategy import ALL_REDUCE, family_of

LINES = ("full-sync", "k-sync:2", "k-batch-sync:2", "async", "k-async:2", "k-batch-async:2")
LAWS = ("exp:0.1", "shifted-exp:0.05,0.05")
WITHIN = 0.1  # of the prediction
PARAMETERS, LAB_PARAMETERS = 9, 250_000  # of the model: on the hosts of a lab, messages take time
ROW_S = 10.0  # of a run, where the number of updates is not given
MANY = 20_000  # updates of the second opinion
_FEWEST = 20  # updates of a run
_LEFT_OUT = 0.05  # of the updates, at the start

DEFINITIONS: Mapping[str, str] = {
    "seconds_per_update": "time between the first and the last counted update, divided by the number of updates",
    "staleness_mean": "versions between the weights that a gradient was computed with and those that it was "
    "applied to; mean over all gradients applied in these updates",
    "measured": "real processes, including their own computation, messages and scheduling delays",
    "predicted": "simulated with the same random delays over the same updates; a minibatch takes only its delay, "
    "and messages take no time, or on the hosts of a lab what the bandwidths of their links allow",
    "long_run": f"simulated over {MANY} updates, so that chance matters less than in the other columns",
    "difference": "measured / predicted - 1",
}  # fmt: skip


def _ms(name: str) -> Callable[[Row], str]:
    return lambda row: f"{1e3 * row[name]['seconds_per_update']:.4g}"


def _staleness(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row[name]['staleness_mean']:.3f}"


def _off(key: str) -> Callable[[Row], str]:
    return lambda row: f"{format_change(row[key])}{' !' if abs(row[key]) > WITHIN else ''}"


FIELDS = (
    Field("law", title="slowness", once=True),
    Field("strategy", title="strategy"),
    Field("updates", form="number", title="updates"),
    Field("measured", form="number", title="ms", text=_ms("measured")),
    Field("predicted", form="number", title="predicted", text=_ms("predicted")),
    Field("seconds_difference", form="number", title="off", text=_off("seconds_difference")),
    Field("long_run", form="number", title="long run", text=_ms("long_run")),
    Field("measured", form="number", title="staleness", text=_staleness("measured")),
    Field("predicted", form="number", title="predicted", text=_staleness("predicted")),
    Field("staleness_difference", form="number", title="off", text=_off("staleness_difference")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoliciesRequest:
    """What is asked for; wrong requests are refused at birth."""

    lines: tuple[str, ...] = LINES
    laws: tuple[str, ...] = LAWS
    learners: int = 4
    servers: int = 1
    updates: int | None = None  # None: as many as take about ROW_S, by the prediction
    seed: int = 0
    timeout_s: float = 120.0  # of a run, beyond what is predicted
    lab: LabRequest | None = None
    parameters: int = PARAMETERS

    def __post_init__(self) -> None:
        if self.lab is not None and self.lab.network.hosts < 2:
            raise RequestError("bench policies --lab: needs 2 or more hosts, like 4x1,100Mbit/s")
        if self.lab is not None and self.lab.ranks != self.learners:
            raise RequestError(
                f"bench: --learners {self.learners} contradicts --lab, which has {self.lab.ranks}; remove one"
            )
        check_processes("--learners and --servers", (self.learners, self.servers))
        check_distinct("policies", self.lines, "strategy")
        check_distinct("--slow", self.laws, "law")
        for line in self.lines:
            if family_of(line) == ALL_REDUCE:
                raise RequestError(
                    f"bench: '{line}' is an all-reduce; bench policies needs parameter-server strategies"
                )
            if create(line, expect=self.learners).needs_drift:
                raise RequestError(f"bench: '{line}': rate=drift needs weights, which a simulation does not have")
        for law in self.laws:
            if not math.isfinite(parse_law(law).mean_s):
                raise RequestError(f"bench: '{law}' has no finite mean, so there is nothing to predict")
        if self.updates is not None:
            check_least("--updates", self.updates, _FEWEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """What a run was like between its start and its end."""

    updates: int
    seconds: float
    staleness_mean: float

    @property
    def seconds_per_update(self) -> float:
        return self.seconds / self.updates

    def as_json(self) -> dict[str, float]:
        return {"seconds_per_update": self.seconds_per_update, "staleness_mean": self.staleness_mean}


def difference(measured: float, predicted: float) -> float:
    """How far measured is from predicted, as a part of it; nothing against nothing is equal."""
    if predicted == 0:
        return 0.0 if measured == 0 else math.inf
    return measured / predicted - 1


def steady(decisions: Iterable[Mapping[str, Any]], updates: int) -> Steady:
    """Judge the updates up to the one of this number, by the decisions of a log."""
    pushed_on: dict[int, int] = {}  # ticket -> version
    times: list[float] = []
    ages: list[list[int]] = []
    for record in decisions:
        decision = read_decision(record)
        event = decision.event
        if isinstance(event, Pushed):
            pushed_on[event.ticket] = event.version
        for tickets in decision.applies:
            if len(times) < updates:
                ages.append([len(times) - pushed_on.pop(ticket) for ticket in tickets])
                times.append(event.at_s)
    if len(times) < updates:
        raise OffbeatError(f"bench: the run made {len(times)} updates instead of {updates}")
    first = max(1, round(_LEFT_OUT * updates))
    counted = [age for update in ages[first:] for age in update]
    return Steady(
        updates=updates - first,
        seconds=times[-1] - times[first - 1],
        staleness_mean=sum(counted) / len(counted),
    )


def measure(request: PoliciesRequest, progress: Progress) -> BenchResult:
    """All policies under all laws, one after the other."""
    machine = machine_facts()
    rows: list[Row] = []
    with terminable(), tempfile.TemporaryDirectory(prefix="offbeat-bench-") as folder:
        for law, line in product(request.laws, request.lines):
            progress(f"{line} with {law}")
            long_run = predict_long_run(request, law, line)
            updates = request.updates or max(_FEWEST, round(ROW_S / long_run.seconds_per_update))
            predicted = predict(request, law, line, updates)
            log = Path(folder) / f"{len(rows)}.jsonl"
            run(request, law, line, updates, log, request.timeout_s + 2 * predicted.seconds)
            measured = steady(read_log(log).decisions, updates)
            rows.append(policy_row(law, line, updates, measured, predicted, long_run))
    return policies_result(request, machine, rows)


def policy_row(law: str, line: str, updates: int, measured: Steady, predicted: Steady, long_run: Steady) -> Row:
    """One policy under one law."""
    seconds = difference(measured.seconds_per_update, predicted.seconds_per_update)
    staleness = difference(measured.staleness_mean, predicted.staleness_mean)
    return {
        "law": law,
        "strategy": line,
        "updates": updates,
        "measured": measured.as_json(),
        "predicted": predicted.as_json(),
        "long_run": long_run.as_json(),
        "seconds_difference": seconds,
        "staleness_difference": staleness if math.isfinite(staleness) else None,
        "off": max(abs(seconds), abs(staleness)) > WITHIN,
    }


def policies_result(request: PoliciesRequest, machine: Mapping[str, Any], rows: Sequence[Row]) -> BenchResult:
    off = [f"{row['strategy']} with {row['law']}" for row in rows if row["off"]]
    verdict = f"all {len(rows)} within {100 * WITHIN:.0f} % of the prediction"
    if off:
        verdict = f"{len(off)} of {len(rows)} off by more than {100 * WITHIN:.0f} %: {', '.join(off)}"
    terms = {"ms": "seconds_per_update", "staleness": "staleness_mean", "long run": "long_run"}
    return BenchResult(
        json={
            "measured": "policies",
            "learners": request.learners,
            "servers": request.servers,
            "seed": request.seed,
            "lab": None if request.lab is None else request.lab.links(),
            "parameters": request.parameters,
            "within": WITHIN,
            "machine": dict(machine),
            "rows": list(rows),
            "summary": verdict,
            "definitions": dict(DEFINITIONS),
        },
        heading=f"real runs compared with the simulator, {_described(request)}, "
        "the learners compute nothing and only wait for their delays",
        tables=((FIELDS, rows),),
        verdict=(verdict,),
        terms=[
            (label, DEFINITIONS[terms.get(label, label)])
            for label in ("ms", "staleness", "measured", "predicted", "long run")
        ],
    )


def _described(request: PoliciesRequest) -> str:
    learners = count_of(request.learners, "learner")
    if request.lab is None:
        return learners
    size = format_size(ITEM_BYTES * request.parameters)
    return f"{learners} on {request.lab.network.hosts} hosts of a lab ({request.lab.links()}), gradients of {size}"


def predict(request: PoliciesRequest, law: str, line: str, updates: int) -> Steady:
    """What the simulator says of so many updates with these draws."""
    decisions: list[dict[str, Any]] = []
    simulator.run(line, _cluster(request, law), updates=updates, write=decisions.append)
    return steady(decisions, updates)


def predict_long_run(request: PoliciesRequest, law: str, line: str) -> Steady:
    """What the simulator says of very many."""
    result = simulator.run(line, _cluster(request, law), updates=MANY)
    return Steady(updates=result.updates, seconds=result.seconds, staleness_mean=result.staleness_mean)


def _cluster(request: PoliciesRequest, law: str) -> Cluster:
    wires = None
    if request.lab is not None:
        wires = wires_of(request.lab, request.servers, request.parameters)
    return Cluster(learners=request.learners, law=parse_law(law), seed=request.seed, wires=wires)


def run(request: PoliciesRequest, law: str, line: str, updates: int, log: Path, timeout_s: float) -> None:
    """Real learners, until so many updates are made; the log is left."""
    if request.lab is not None:
        run_on_hosts(
            request.lab, line, law, servers=request.servers, seed=request.seed, parameters=request.parameters,
            updates=updates, log=log, timeout_s=timeout_s,
        )  # fmt: skip
        return
    plan = ServerPlan(
        setting=RunSetting(line=line, learners=request.learners, shards=request.servers),
        command=program(
            "bench_learner", json.dumps({"do": "train", "updates": updates, "parameters": request.parameters})
        ),
        environment=environment({"OFFBEAT_SYNC": line, "OFFBEAT_SEED": str(request.seed), "OFFBEAT_SLOW": law}),
        seed=request.seed,
        log=log,
        restarts=0,
    )
    supervise(plan, f"{line} with {law}", timeout_s)
