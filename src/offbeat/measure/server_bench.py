"""`offbeat bench server`: pushes and fetches a second of our parameter server, beside those of programs on others.

Every learner pushes a gradient as large as the model and fetches the new weights into its parameters, as fast as it
can. The systems take turns within every round. The others are programs under `benchmarks/baselines/` of the repository,
which print one line of JSON; an installed package has none of them.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import offbeat
from offbeat.errors import OffbeatError, RequestError
from offbeat.machine import machine_facts
from offbeat.measure.benchmark import (
    ITEM_BYTES,
    OURS,
    BenchResult,
    Progress,
    alternate,
    check_above_zero,
    check_against,
    check_distinct,
    check_least,
    check_memory,
    check_processes,
    spread,
)
from offbeat.measure.harness import Harness, environment, program, supervise
from offbeat.measure.rank_bench import format_ratio, times_faster
from offbeat.number_format import format_rate, format_size
from offbeat.processes.signals import terminable
from offbeat.report.benchmark_fields import Field, Row
from offbeat.server.run_setting import RunSetting
from offbeat.server.supervisor import ServerPlan
from offbeat.spec import count_of

PARAMETERS = 25_600_000
LINE = "async"
FEWEST = 10_000  # parameters
TENSORS = 161
IN_PLACE = "in-place"  # ours too: the parameters are the servers' memory, and a fetch copies nothing
# The others: program, form and the package that it needs.
BASELINES: Mapping[str, tuple[str, str, str]] = {
    "rpc": ("rpc_server.py", "plain", "torch"),
    "rpc-tuned": ("rpc_server.py", "tuned", "torch"),
    "ray": ("ray_server.py", "plain", "ray"),
    "ray-tuned": ("ray_server.py", "tuned", "ray"),
}
WARM_UP = 5  # cycles of ours; the programs have their own

DEFINITIONS: Mapping[str, str] = {
    "per_s": "pushes per second (each with a fetch of the new weights into the parameters) of all learners together, "
    "from the first learner's start to the last one's end; median over rounds",
    "ratio": f"per_s of {OURS} / per_s",
    "copy_share": "per_s * bytes of gradient and weights, each counted once, / copy_bytes_per_s",
    "copy_bytes_per_s": "copy bandwidth: after the last push of a round, all learners at once copy a private buffer "
    "as large as the model with tensor.copy_; bytes counted once; median over rounds",
    "spread": "fastest round / slowest round",
    IN_PLACE: "offbeat with prepare(..., in_place=True): the model's parameters are the servers' memory",
    "rpc": "torch.distributed.rpc as in PyTorch's tutorial: a call sends the list of gradients and returns the model",
    "rpc-tuned": "one flat tensor, one call for push and fetch, huge pages, the reply in the gradient's memory",
    "ray": "Ray actors as in Ray's tutorial: gradients as a list of arrays, then a call for the weights as tensors",
    "ray-tuned": "one flat array, one call for push and fetch, and a small object store",
}

FIELDS = (
    Field("learners", form="number", title="learners", once=True),
    Field("system", title="system"),
    Field("per_s", form="number", title="a second", text=lambda row: f"{row['per_s']:.3g}"),
    Field(
        "rounds_per_s", form="number", title="of rounds",
        text=lambda row: f"{min(row['rounds_per_s']):.3g}-{max(row['rounds_per_s']):.3g}",
    ),
    Field(
        "ratio", form="number", title=f"{OURS} is",
        text=lambda row: "" if row["system"] == OURS else format_ratio(row["ratio"]),
    ),
    Field("copy_share", form="number", title="of copy", text=lambda row: f"{100 * row['copy_share']:.0f} %"),
)  # fmt: skip


def sizes_of(parameters: int) -> list[int]:
    """So many parameters in 161 tensors, in the proportions of ResNet-50's (He et al. 2015)."""
    shape = [64 * 3 * 49, 64, 64]
    inner = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            shape += [inner * width, width, width, 9 * width * width, width, width, 4 * width * width]
            shape += [4 * width, 4 * width]
            if block == 0:
                shape += [inner * 4 * width, 4 * width, 4 * width]
            inner = 4 * width
    shape += [1000 * inner, 1000]
    whole = sum(shape)
    found = [max(1, size * parameters // whole) for size in shape]
    found[-2] += parameters - sum(found)  # the last layer's, which is large
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRequest:
    """What is asked for; wrong requests are refused at birth."""

    learners: tuple[int, ...] = (1, 2)
    servers: int = 2
    parameters: int = PARAMETERS
    against: tuple[str, ...] | None = None  # None: all that can be measured here
    tensors: int = TENSORS  # or 1
    rounds: int = 3
    seconds: float = 3.0  # of a round of one system
    timeout_s: float = 120.0  # beyond these

    def __post_init__(self) -> None:
        check_processes("--learners and --servers", (*self.learners, self.servers))
        check_distinct("--learners", self.learners, "number")
        check_least("--parameters", self.parameters, FEWEST)
        if self.tensors not in (1, TENSORS):
            raise RequestError(f"bench: --tensors is 1 or {TENSORS}; got {self.tensors}")
        check_above_zero("--seconds and --timeout", self.seconds, self.timeout_s)
        check_against(self.against or (), BASELINES, (OURS, IN_PLACE))
        if self.against is not None and folder() is None:
            raise RequestError(
                "bench: --against needs the source repository: the programs of other systems are not installed"
            )
        # Weights in a few buffers, a slot for each learner, its parameters, gradients and what it copies.
        needed = self.size_bytes * (8 + 7 * max(self.learners))
        check_memory(f"{self.parameters} parameters and {count_of(max(self.learners), 'learner')}", needed)

    @property
    def size_bytes(self) -> int:
        return ITEM_BYTES * self.parameters


def folder() -> Path | None:
    """Where the other systems' programs are, if this package lies in its repository."""
    found = Path(offbeat.__file__).resolve().parents[2] / "benchmarks" / "baselines"
    return found if found.is_dir() else None


def missing(against: Sequence[str]) -> dict[str, str]:
    """What of these cannot be measured here, and why."""
    if folder() is None:
        return dict.fromkeys(against, "its program is in the source repository, which is not installed")
    needs = {name: BASELINES[name][2] for name in against}
    return {
        name: f"{package} is not installed"
        for name, package in needs.items()
        if importlib.util.find_spec(package) is None
    }


def measure(request: ServerRequest, progress: Progress) -> BenchResult:
    """All systems, alternately, for every number of learners."""
    wanted = tuple(BASELINES) if request.against is None else request.against
    not_measured = missing(wanted)
    if request.against and len(not_measured) == len(wanted):
        name = wanted[0]
        raise RequestError(f"bench: {name}: cannot be measured: {not_measured[name]}")
    systems = [OURS, IN_PLACE, *(name for name in wanted if name not in not_measured)]
    machine = machine_facts()
    with terminable():
        rounds = {
            learners: alternate(
                {system: partial(_turn, request, learners, system) for system in systems},
                request.rounds,
                progress,
                at=f"{count_of(learners, 'learner')}, ",
            )
            for learners in request.learners
        }
    return server_result(request, machine, not_measured, rounds)


def _turn(request: ServerRequest, learners: int, system: str, number: int, doing: str) -> tuple[float, float | None]:
    if system in (OURS, IN_PLACE):
        return _ours(request, learners, doing, in_place=system == IN_PLACE)
    return _theirs(request, learners, system, doing), None


def server_result(
    request: ServerRequest,
    machine: Mapping[str, Any],
    not_measured: Mapping[str, str],
    rounds: Mapping[int, Mapping[str, Sequence[tuple[float, float | None]]]],
) -> BenchResult:
    """From pushes a second, and bytes a second of plain copies, of each round: by learners and systems, ours first."""
    copy_bytes_per_s = {
        learners: statistics.median(copied for turns in turns_of.values() for _, copied in turns if copied is not None)
        for learners, turns_of in rounds.items()
    }

    def row(learners: int, system: str) -> Row:
        per_s, ours_per_s = (statistics.median(rate for rate, _ in rounds[learners][name]) for name in (system, OURS))
        return {
            "learners": learners,
            "system": system,
            "per_s": per_s,
            "ratio": ours_per_s / per_s,
            "copy_share": per_s * 2 * request.size_bytes / copy_bytes_per_s[learners],
            "rounds_per_s": [rate for rate, _ in rounds[learners][system]],
        }

    rows = [row(learners, system) for learners, systems in rounds.items() for system in systems]
    cases = {learners: [row for row in rows if row["learners"] == learners] for learners in rounds}
    verdict = {
        learners: f"{count_of(learners, 'learner')}: " + times_faster(f"{own[0]['per_s']:.3g}/s", own)
        for learners, own in cases.items()
    }
    most = max(spread(row["rounds_per_s"]) for row in rows)
    found = {
        "measured": "server",
        "strategy": LINE,
        "servers": request.servers,
        "parameters": request.parameters,
        "tensors": request.tensors,
        "size_bytes": request.size_bytes,
        "rounds": request.rounds,
        "seconds": request.seconds,
        "machine": dict(machine),
        "not_measured": dict(not_measured),
        "spread": most,
        "cases": [
            {
                "learners": learners,
                "summary": verdict[learners],
                "copy_bytes_per_s": copy_bytes_per_s[learners],
                "systems": [{key: value for key, value in row.items() if key != "learners"} for row in own],
            }
            for learners, own in cases.items()
        ],
        "definitions": dict(DEFINITIONS),
    }
    measured = {row["system"] for row in rows}
    copies = [f"{format_rate(rate)} by {count_of(learners, 'learner')}" for learners, rate in copy_bytes_per_s.items()]
    return BenchResult(
        json=found,
        heading=f"push and fetch of {format_size(request.size_bytes)} in {request.tensors} tensors, async and SGD, "
        f"ours on {count_of(request.servers, 'server')}, median of {count_of(request.rounds, 'round')}",
        tables=((FIELDS, rows),),
        verdict=tuple(verdict.values()),
        details=[f"{system}: not measured: {reason}" for system, reason in not_measured.items()],
        terms=(
            ("a second", DEFINITIONS["per_s"]),
            ("of copy", DEFINITIONS["copy_share"]),
            ("copy", ", ".join(copies)),
            *((name, text) for name, text in DEFINITIONS.items() if name in measured),
        ),
        spread=most,
    )


def measure_ours(request: ServerRequest, progress: Progress) -> Iterator[tuple[int, float]]:
    """Ours alone, a round for every number of learners: how long one of them takes to push and to fetch."""
    with terminable():
        for learners in request.learners:
            doing = count_of(learners, "learner")
            progress(doing)
            per_s, _ = _ours(request, learners, doing, in_place=False)
            yield learners, learners / per_s


def _sizes(request: ServerRequest) -> list[int]:
    return [request.parameters] if request.tensors == 1 else sizes_of(request.parameters)


def _ours(request: ServerRequest, learners: int, doing: str, *, in_place: bool) -> tuple[float, float]:
    """Pushes a second, and bytes a second of plain copies, both of all learners."""
    asked = {"do": "push", "sizes": _sizes(request), "seconds": request.seconds, "warm_up": WARM_UP}
    plan = ServerPlan(
        setting=RunSetting(line=LINE, learners=learners, shards=request.servers),
        command=program("bench_learner", json.dumps(asked | {"in_place": in_place})),
        environment=environment({"OFFBEAT_SYNC": LINE}),
        restarts=0,
    )
    last_lines = supervise(plan, doing, request.timeout_s + request.seconds)
    found = [_read(last_lines.get(learner, ""), doing) for learner in range(learners)]
    seconds = max(one["end_s"] for one in found) - min(one["start_s"] for one in found)
    return sum(one["cycles"] for one in found) / seconds, sum(one["copy_bytes_per_s"] for one in found)


def _theirs(request: ServerRequest, learners: int, system: str, doing: str) -> float:
    where = folder()
    assert where is not None
    name, form, _ = BASELINES[system]
    words = [sys.executable, str(where / name), "--form", form, "--learners", str(learners)]
    words += ["--seconds", str(request.seconds), "--sizes", ",".join(map(str, _sizes(request)))]
    with Harness(request.timeout_s + request.seconds) as harness:
        harness.start(system, words, environment({}))
        (answer,) = harness.ask({}, doing)
    return float(answer["per_s"])


def _read(line: str, doing: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise OffbeatError(f"bench: expected a line of JSON; got '{line[:80]}' ({doing})")
    return found
