"""`offbeat calibrate`: the machine measured for a recipe, so that trainings on it can be predicted.

    layers, batches, copies    one learner alone, and all at once: processes that compute and send nothing
    reductions, pushes         the benchmarks of the all-reduce and of the server, over sizes
    network                    between hosts, of a lab or of torchrun's: its links, and its work on the cores
    probes                     short real trainings with 1, 2, ... learners, in turn, several rounds of them
    self-check                 trainings that were not probes, predicted and then measured

Of a probe's rounds the one with the middle time of an update counts. The machine should be quiet: what runs beside is
measured too, and is then predicted for a machine on which it runs beside again.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from offbeat.errors import OffbeatError, RequestError
from offbeat.machine import machine_facts
from offbeat.measure import rank_bench, server_bench
from offbeat.measure.benchmark import MOST_PROCESSES, Progress, alternate
from offbeat.measure.harness import Harness, environment, program
from offbeat.measure.network_bench import NetworkRequest, measure_network
from offbeat.measure.training_bench import Trained, train_for
from offbeat.predict.calibration import PROBED, SERVED, TOGETHER, Calibration, Layer, Probe, Timed, fit_server_work
from offbeat.predict.calibration_match import settings_of
from offbeat.predict.from_calibration import predict
from offbeat.predict.network_calibration import NetworkCalibration
from offbeat.processes.launcher import thread_environment
from offbeat.processes.signals import terminable
from offbeat.runs.log import Span
from offbeat.spec import count_of
from offbeat.strategy import ALL_REDUCE, family_of, line_up
from offbeat.train.config import Config
from offbeat.train.config_files import as_json, changed

REDUCED_BYTES = (4096, 262_144, 16 * 2**20)
PUSHED_ITEMS = (10_000, 4_000_000)
TIMES_S = 0.4  # of minibatches of one size
MOST_CHECKED = 3  # strategies in the self-check
PUSH_S = 0.7  # of pushes of one size
MOST_TIMES = 400  # compute times of a probe that are written down
_OUTLIERS = 0.02  # of the waits, the longest: something else ran


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRequest:
    """What is asked for; wrong requests are refused at birth."""

    config: Config
    learners: tuple[int, ...] = (1, 2)
    rounds: int = 3
    sizes: bool = True  # reductions and pushes over sizes too
    check: bool = True
    network: NetworkRequest | NetworkCalibration | None = None  # between hosts: measured too, or before
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if 1 not in self.learners or len(set(self.learners)) < len(self.learners):
            raise RequestError("calibrate: --learners: expected different numbers that include 1, like 1 2 4")
        if max(self.learners) > MOST_PROCESSES:
            raise RequestError(f"calibrate: --learners: expected at most {MOST_PROCESSES}; got {max(self.learners)}")
        for line in (PROBED, SERVED):  # both families must be able to train it
            try:
                changed(self.config, {"sync": line, "learners": max(self.learners)})
            except RequestError as error:
                raise RequestError(
                    f"calibrate: the short training run with '{line}' is not possible: {error}"
                ) from None


def measure(request: CalibrationRequest, progress: Progress) -> Calibration:
    """All of it, one after the other."""
    with terminable(), tempfile.TemporaryDirectory(prefix="offbeat-calibrate-") as folder:
        found, samples = _alone(request, machine_facts(), progress)
        if request.sizes:
            found = _over_sizes(request, found, progress)
        if request.network is not None:
            network = request.network
            measured = measure_network(network, progress) if isinstance(network, NetworkRequest) else network
            found = replace(found, network=measured)
        found = replace(found, probes=_probes(request, samples, Path(folder), progress))
        found = fit_server_work(found, lambda tried, crowded: _predicted_s(request, tried, crowded, samples))
        found = replace(found, overlap_slowdown=_overlap(found))
        if request.check:
            found = replace(found, self_check=tuple(check(request, found, samples, Path(folder), progress)))
    return found


# --- one learner, and all at once, without communication -------------------------------------------------------------


def _alone(request: CalibrationRequest, machine: Mapping[str, Any], progress: Progress) -> tuple[Calibration, int]:
    config = request.config
    batch = config.train.batch_size * config.train.accumulate
    words = program("compute_learner")
    own = environment(thread_environment(config.train.threads))
    with Harness(request.timeout_s) as learners:
        progress("starting")
        many = max(request.learners)
        for learner in range(many):
            learners.start(f"learner {learner}", words, own)
        begin = {"do": "begin", "config": as_json(config)}
        facts = learners.ask([begin | {"learner": learner} for learner in range(many)], "starting the learners")[0]
        progress("layers")
        layers = learners.ask({"do": "layers", "batch": batch}, "timing the layers", first=1)[0]["layers"]
        batches = []
        for size in sorted({max(1, batch // 4), max(1, batch // 2), batch, 2 * batch}):
            progress(f"minibatches of {count_of(size, 'sample')}")
            question = {"do": "times", "batch": size, "seconds": TIMES_S}
            (answer,) = learners.ask(question, f"computing minibatches of {size}", first=1)
            batches.append((size, statistics.median(answer["times_s"])))
        progress("copies")
        copies = [learners.ask({"do": "copy"}, "copying", first=1)[0] for _ in range(3)]
        together = [learners.ask({"do": "copy"}, "copying together") for _ in range(3)]
    alone_s = statistics.median(one["seconds"] for one in copies)
    together_s = statistics.median(max(one["seconds"] for one in answers) for answers in together)
    size_bytes = copies[0]["bytes"]
    gpus = {"gpus": facts["gpus"]} if facts["gpus"] else {}
    calibration = Calibration(
        recipe=config.name,
        batch=batch,
        size_bytes=facts["size_bytes"],
        machine={
            **machine,
            "torch": facts["torch"],
            "device": facts["device"],
            "threads": config.train.threads,
            **gpus,
        },
        settings=settings_of(config),
        probes=(),
        layers=tuple(Layer(**one) for one in layers),
        batches=tuple(batches),
        copy_alone_bytes_per_s=size_bytes / alone_s,
        copy_together_bytes_per_s=many * size_bytes / together_s,
    )
    return calibration, facts["samples"]


def _over_sizes(request: CalibrationRequest, found: Calibration, progress: Progress) -> Calibration:
    """What is sent, over sizes and numbers of learners."""
    reductions: list[Timed] = []
    pushed: list[Timed] = []
    several = [many for many in request.learners if many > 1]
    for many in several:
        asked = rank_bench.RankRequest(ranks=many, rounds=2, against=(), others=(), timeout_s=request.timeout_s)
        result = rank_bench.measure_allreduce(asked, REDUCED_BYTES, lambda doing: progress(f"all-reduce: {doing}"))
        reductions += [Timed(many, row["size_bytes"], row["ms"] / 1e3) for row in result.rows]
    for items in PUSHED_ITEMS:
        wanted = server_bench.ServerRequest(
            learners=tuple(sorted({1, max(request.learners)})),
            servers=request.config.servers,
            parameters=items,
            against=None,
            tensors=1,
            rounds=1,
            seconds=PUSH_S,
            timeout_s=request.timeout_s,
        )
        for many, seconds in server_bench.measure_ours(wanted, lambda doing: progress(f"push and fetch: {doing}")):
            pushed.append(Timed(many, 4 * items, seconds))
    return replace(found, reductions=tuple(reductions), pushes=tuple(pushed))


# --- probes ----------------------------------------------------------------------------------------------------------


def _probes(request: CalibrationRequest, samples: int, folder: Path, progress: Progress) -> tuple[Probe, ...]:
    """Of each probe the round with the middle time of an update."""

    def turn(line: str, many: int, number: int, doing: str) -> Probe:
        config = changed(request.config, {"sync": line, "learners": many, "slow": ()})
        return probe_of(train_for(config, samples, folder / "probe"), line, many)

    wanted = [(line, many) for many in sorted(request.learners) for line in (PROBED, SERVED)]
    wanted += [(TOGETHER, max(request.learners))] if max(request.learners) > 1 else []
    turns = {f"{line} with {count_of(many, 'learner')}": partial(turn, line, many) for line, many in wanted}
    found = alternate(turns, request.rounds, progress)
    return tuple(sorted(probes, key=lambda one: one.update_s)[len(probes) // 2] for probes in found.values())


def probe_of(trained: Trained, line: str, learners: int) -> Probe:
    """What a run's log says, less its first stretch, in which all is slower."""
    spans = _settled(trained.log.spans)
    computed = [span for span in spans if span.what == "compute" and not span.cancelled]
    if not computed:
        raise OffbeatError("calibrate: a short training run finished no minibatch")
    there_s, back_s = (_reduced if family_of(line) == ALL_REDUCE else _served)(spans, trained.seconds_per_update)
    return Probe(
        line=line,
        learners=learners,
        update_s=trained.seconds_per_update,
        compute_s=_thinned([span.end_s - span.start_s for span in computed]),
        there_s=there_s,
        back_s=back_s,
    )


def _settled(spans: Iterable[Span]) -> list[Span]:
    """What came after the first evaluation."""
    ordered = sorted(spans, key=lambda span: span.start_s)
    first = next((span.end_s for span in ordered if span.what == "evaluate"), 0.0)
    after = [span for span in ordered if span.start_s >= first]
    return after if any(span.what == "compute" for span in after) else ordered


def _served(spans: Sequence[Span], update_s: float) -> tuple[float, float]:
    """From the end of computing to the next minibatch, half and half; a pause between them, which leaves a hole between
    the spans or an evaluation in it, is another thing."""
    waits: list[float] = []
    since_s: float | None = None  # the end of the last minibatch, if no pause came after it
    own = sorted(spans, key=lambda span: span.learner)  # one learner's after the other's
    for before, span in zip((None, *own), own, strict=False):
        follows = before is not None and (before.learner, before.end_s) == (span.learner, span.start_s)
        since_s = since_s if follows and span.what != "evaluate" else None
        if span.what == "compute":
            waits += [] if since_s is None else [span.start_s - since_s]
            since_s = span.end_s
    if not waits:
        raise OffbeatError("calibrate: a short training run with a parameter server recorded no waiting time")
    whole = _mean(waits)
    return whole / 2, whole / 2


def _reduced(spans: Sequence[Span], update_s: float) -> tuple[float, float]:
    """What the last learner to finish waits for is the reduction; the update is what an iteration takes beside that and
    the computing, from the first who begins to the last who ends."""
    waits: defaultdict[int, list[float]] = defaultdict(list)
    computed: defaultdict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.what == "wait":
            waits[span.version].append(span.end_s - span.start_s)
        elif span.what == "compute":
            computed[span.version].append(span)
    there_s = _mean([min(some) for some in waits.values()]) if waits else 0.0
    computing_s = statistics.fmean(
        max(span.end_s for span in some) - min(span.start_s for span in some) for some in computed.values()
    )
    return there_s, max(0.0, update_s - computing_s - there_s)


def _mean(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return statistics.fmean(ordered[: max(1, math.ceil(len(ordered) * (1 - _OUTLIERS)))])


def _thinned(values: Sequence[float]) -> tuple[float, ...]:
    """At most so many, evenly taken from the sorted ones: the same law."""
    ordered = sorted(values)
    if len(ordered) <= MOST_TIMES:
        return tuple(ordered)
    cuts = [number * len(ordered) // MOST_TIMES for number in range(MOST_TIMES + 1)]
    return tuple(statistics.fmean(ordered[start:end]) for start, end in pairwise(cuts))


def _predicted_s(request: CalibrationRequest, tried: Calibration, crowded: Probe, samples: int) -> float:
    config = changed(request.config, {"sync": crowded.line, "learners": crowded.learners, "slow": ()})
    return predict(tried, changed(config, {"train": {"epochs": 3}}), samples).seconds_per_update


def _overlap(found: Calibration) -> float:
    """How much slower a learner computes while its gradients are reduced beside: the ring's probe against one alone."""
    probes = {one.learners: statistics.fmean(one.compute_s) for one in found.probes if one.family == ALL_REDUCE}
    within = [many for many in probes if 1 < many <= found.cores]
    return probes[max(within)] / probes[1] if within else 1.0


# --- the check -------------------------------------------------------------------------------------------------------


def check(
    request: CalibrationRequest, calibration: Calibration, samples: int, folder: Path, progress: Progress
) -> list[dict[str, Any]]:
    """Trainings that were not probed, with the most learners: measured, and predicted from the calibration alone."""
    many = max(request.learners)
    if many == 1:
        return []

    def turn(config: Config, number: int, doing: str) -> Trained:
        return train_for(config, samples, folder / "check")

    rows = []
    for line in checked(calibration, many):
        config = changed(request.config, {"sync": line, "learners": many})
        (trained,) = alternate({line: partial(turn, config)}, request.rounds, progress, at="self-check, ").values()
        trained.sort(key=lambda one: one.seconds_per_update)
        rows.append(compared(calibration, trained[len(trained) // 2], samples))
    return rows


def checked(calibration: Calibration, learners: int) -> tuple[str, ...]:
    """Strategies that are no probes, nor the same as one by another name."""
    lines = line_up("check", learners)
    return tuple(line for line in lines if not calibration.has(line, learners, plain=True))[:MOST_CHECKED]


def compared(calibration: Calibration, trained: Trained, samples: int) -> dict[str, Any]:
    """A training beside its prediction: seconds an update."""
    predicted = predict(calibration, trained.config, samples)
    measured_s = trained.seconds_per_update
    return {
        "strategy": trained.config.sync,
        "learners": trained.config.learners,
        "slow": " ".join(trained.config.slow) or "none",
        "updates": trained.updates,
        "measured_s": measured_s,
        "predicted_s": predicted.seconds_per_update,
        "error": predicted.seconds_per_update / measured_s - 1,
    }


def mean_error(rows: Sequence[Mapping[str, Any]]) -> float:
    return statistics.fmean(abs(row["error"]) for row in rows)
