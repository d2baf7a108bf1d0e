"""`offbeat bench device`: what one device does alone, by model, precision and minibatch.

Each model in each precision is a process of its own, so that what fails, or runs out of memory, is one point. Points
that were measured are kept whatever comes after them, also when the benchmark is interrupted.

`max` is the largest minibatch that fits: memory grows by the same for every sample, so two points tell how much, and
the minibatch that fills the device, less a margin, is then tried. What needs memory given back first does not fit.

What it must not know: how a step is computed (it is given the function), and how a table is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.charts.labelled_lines import Line, line_chart
from offbeat.errors import OffbeatError, RequestError, Terminated
from offbeat.measure.benchmark import (
    INTERVAL,
    BenchResult,
    Progress,
    check_above_zero,
    check_distinct,
    json_rows,
    median_interval,
    spread,
)
from offbeat.measure.harness import Harness, environment, program
from offbeat.measure.training_bench import machine_for
from offbeat.number_format import percent
from offbeat.predict.roofline import Gpu, gpu_here
from offbeat.report.benchmark_fields import DEVICE, FIELDS, Row, format_samples_per_s
from offbeat.spec import count_of
from offbeat.train.config import Config
from offbeat.train.config_files import as_json, changed

MAX = "max"
FILLED = 0.92  # of the memory, by the largest minibatch
TRIES, SMALLER = 3, 0.9  # where it does not fit after all
PROBES = (16, 32)  # minibatches that tell the memory of a sample, where no others do
STEP = 8  # the largest minibatch is a multiple of this
NO_MEMORY = "out of memory"

Size = int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRequest:
    """What is asked for; wrong requests are refused at birth."""

    configs: tuple[Config, ...]
    precisions: tuple[str, ...]  # none: each recipe's own
    sizes: tuple[Size, ...]
    seconds: float = 1.0
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        check_distinct("the command line", [config.name for config in self.configs], "recipe")
        check_distinct("--precision", self.precisions, "precision")
        check_distinct("--batch-sizes", self.sizes, "size")
        check_above_zero("--seconds", self.seconds)
        self.plans()

    def plans(self) -> list[Config]:
        """A process each."""
        return [
            changed(config, {"sync": "ring", "learners": 1, "slow": (), "train": {"precision": precision}})
            for config in self.configs
            for precision in self.precisions or (config.train.precision,)
        ]


class DeviceProcess:
    """A model in a precision, in a process of its own; what it says of itself is in `told`."""

    def __init__(self, harness: Harness, config: Config, doing: str) -> None:
        self._doing, self._harness = doing, harness
        try:
            self.told = self._harness.ask({"config": as_json(config)}, doing)[0]
        except BaseException:
            self._harness.close(at_once=True)
            raise

    def ask(self, batch: int, seconds: float) -> Mapping[str, Any]:
        """A process that dies has failed too."""
        try:
            return self._harness.ask({"do": "measure", "batch": batch, "seconds": seconds}, self._doing)[0]
        except OffbeatError as error:
            return {"failed": str(error).removeprefix("bench: "), "out_of_memory": False}

    def close(self) -> None:
        self._harness.close(at_once=True)


class DevicePrograms:
    """Starts them, and always one more: it loads torch, which takes seconds, while the one before it is measured."""

    def __init__(self) -> None:
        self._ahead: Harness | None = None

    def __call__(self, config: Config, timeout_s: float, doing: str) -> DeviceProcess:
        harness, self._ahead = self._ahead or _loading(timeout_s), None
        self._ahead = _loading(timeout_s)
        harness.children[0].name = config.name
        return DeviceProcess(harness, config, doing)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close(at_once=True)


def _loading(timeout_s: float) -> Harness:
    harness = Harness(timeout_s)
    harness.start("device_learner", program("device_learner"), environment({}))
    return harness


Start = Callable[[Config, float, str], Any]  # gives what `DeviceProcess` is


# --- points --------------------------------------------------------------------------------------------------------


def largest_batch(points: Mapping[int, int], memory_bytes: float) -> int:
    """The minibatch that fills so much memory, by the memory that two smaller ones took; 0 where none can be told."""
    (few, low), (many, high) = sorted(points.items())[:1] + sorted(points.items())[-1:]
    if many == few or high <= low:
        return 0
    per_sample = (high - low) / (many - few)
    return int((FILLED * memory_bytes - (low - few * per_sample)) / per_sample) // STEP * STEP


class _Points:
    """The points of one model in one precision, in as many processes as fail."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self._start = start
        self._process: Any = None
        self.told: Mapping[str, Any] = {}
        self.memory: dict[int, int] = {}  # peak bytes, by minibatch

    def ask(self, batch: int, seconds: float) -> Mapping[str, Any]:
        if self._process is None:
            self._process = self._start()
            self.told = self._process.told
        found: Mapping[str, Any] = self._process.ask(batch, seconds)
        if "failed" in found:
            self.close()
        elif found["peak_bytes"] is not None:
            self.memory[batch] = found["peak_bytes"]
        return found

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def largest(self, seconds: float, tell: Progress) -> tuple[int | None, Mapping[str, Any]]:
        """The largest minibatch that fits, and what was measured of it."""
        for batch in PROBES:
            if len(self.memory) < 2 and batch not in self.memory:
                found = self.ask(batch, 0.0)
                if "failed" in found:
                    return None, found
        if len(self.memory) < 2:
            return None, {"failed": "--batch-sizes max needs a GPU; give the sizes as numbers"}
        batch = largest_batch(self.memory, self.told["free_bytes"])
        for _ in range(TRIES):
            if batch <= max(self.memory):
                return None, {"failed": f"a minibatch of {max(self.memory)} samples nearly fills the device's memory"}
            tell(str(batch))
            found = self.ask(batch, seconds)
            if "failed" not in found and not found["retries"]:
                return batch, found
            self.memory.pop(batch, None)
            batch = int(SMALLER * batch) // STEP * STEP
        return None, found


def _points_of(
    config: Config, request: DeviceRequest, start: Start, progress: Progress, at: str, gpu: Gpu | None
) -> Iterator[tuple[Row, Mapping[str, Any]]]:
    """The rows of a model in a precision, smallest minibatch first, each with what its process said."""
    what = f"{at}{config.name}, {config.train.precision}"
    points = _Points(lambda: start(config, request.timeout_s, what))
    too_many = ""
    sizes = sorted(size for size in request.sizes if isinstance(size, int))
    try:
        for batch in sizes:
            progress(f"{what}, batch {batch}")
            found = {"failed": too_many} if too_many else _asked(points, batch, request.seconds)
            if found.get("out_of_memory"):
                too_many = f"{NO_MEMORY} with {batch}"
                found = {**found, "failed": NO_MEMORY}
            yield device_row(config, batch, found, points.told, gpu), {**points.told, **found}
        if MAX in request.sizes:
            progress(f"{what}, batch max")
            size, found = points.largest(request.seconds, lambda size: progress(f"{what}, batch max: {size}"))
            yield device_row(config, size, found, points.told, gpu, largest=True), {**points.told, **found}
    finally:
        points.close()


def _asked(points: _Points, batch: int, seconds: float) -> Mapping[str, Any]:
    """A process that cannot even begin has failed too; what is wrong with the request is not a point."""
    try:
        return points.ask(batch, seconds)
    except RequestError:
        raise
    except OffbeatError as error:
        return {"failed": str(error).removeprefix("bench: ")}


def device_row(
    config: Config,
    batch: int | None,
    found: Mapping[str, Any],
    told: Mapping[str, Any],
    gpu: Gpu | None,
    *,
    largest: bool = False,
) -> Row:
    """One point: what was measured, or why it was not."""
    row: dict[str, Any] = {field.key: None for field in DEVICE if field.accepts != "computed"}
    row |= {"recipe": config.name, "precision": config.train.precision, "batch": batch, "largest": largest}
    if "failed" in found:
        return {**row, "why_not": found["failed"]}
    assert batch is not None
    seconds = median_interval(found["times_s"])
    rate = batch / seconds.median
    flops, peak_bytes = told["flops_per_sample"], found["peak_bytes"]
    return row | {
        "throughput": rate,
        "seconds": seconds.median,
        "seconds_low": seconds.low,
        "seconds_high": seconds.high,
        "memory_gb": None if peak_bytes is None else peak_bytes / 1e9,
        "joules_per_sample": found["joules_per_sample"],
        "peak_share": None if gpu is None or not flops else flops * rate / gpu.peak(config.train.precision),
        "epoch_s": told["samples"] / rate,
    }


# --- what was found --------------------------------------------------------------------------------------------------


def ranking(rows: Sequence[Row]) -> list[str]:
    """The fastest point of each recipe: a sentence each."""
    told = []
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        known = [row for row in rows if row["recipe"] == recipe and row["throughput"] is not None]
        if not known:
            told.append(f"{recipe}: nothing could be measured")
            continue
        best = max(known, key=lambda row: float(row["throughput"]))
        share = "" if best["peak_share"] is None else f", {percent(best['peak_share'])} of the device's peak"
        told.append(
            f"{recipe}: {format_samples_per_s(best['throughput'])} samples/s at most, in {best['precision']} "
            f"with a minibatch size of {best['batch']}{share}"
        )
    return told


def drawn(rows: Sequence[Row], device: str) -> str:
    """Samples a second against the minibatch, a line for each recipe and precision; nothing where there is none."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["throughput"] is not None:
            points.setdefault(f"{row['recipe']} {row['precision']}", []).append((row["batch"], row["throughput"]))
    if not points:
        return ""
    lines = [Line(name.removeprefix("synthetic-"), (tuple(sorted(line)),)) for name, line in points.items()]
    x_label, y_label = "samples in a minibatch", "samples/s"
    return line_chart(lines, title=f"Throughput of one device: {device}", x_label=x_label, y_label=y_label)


DEFINITIONS = {
    "throughput": "samples / s of whole steps: forward, backward, gradient clipping and optimizer; the samples are "
    "already on the device; on a GPU, cuDNN chooses among 4 algorithms for each convolution (among 10 in "
    "offbeat train)",
    "seconds": f"seconds of a step; median over rounds, {INTERVAL}",
    "memory_gb": "peak memory of tensors, including weights and optimizer state",
    "joules_per_sample": "energy from the counters of the device and, if they can be read, of the CPU",
    "peak_share": "FLOPs of forward and backward (torch's counter) per second / dense peak of the data sheet",
    "epoch_s": "samples of the recipe / throughput",
}


def device_result(
    request: DeviceRequest,
    machine: Mapping[str, Any],
    rows: Sequence[Row],
    notes: Sequence[str],
    compute: str,
    *,
    ended_by: BaseException | None = None,
) -> BenchResult:
    device = machine.get("gpu") or f"{machine['device']}, {count_of(machine['threads'], 'thread')}"
    known = [row for row in rows if row["throughput"] is not None]
    ranked = ranking(rows)
    return BenchResult(
        json={
            "measured": "device",
            "device": device,
            "compute": compute,
            "seconds": request.seconds,
            "machine": dict(machine),
            "rows": json_rows(FIELDS["device"], rows),
            "ranking": ranked,
            "notes": list(notes),
            "definitions": DEFINITIONS,
            "interrupted": ended_by is not None,
        },
        heading=f"one device, {device}: steps computed by {compute}",
        tables=((DEVICE, rows),),
        verdict=ranked,
        terms=[
            (field.title, DEFINITIONS[field.key])
            for field in DEVICE
            if field.key in DEFINITIONS and any(row[field.key] is not None for row in rows)
        ],
        spread=max((spread((row["seconds_low"], row["seconds_high"])) for row in known), default=1.0),
        chart=drawn(rows, device),
        ended_by=ended_by,
    )


# --- measuring -------------------------------------------------------------------------------------------------------


def machine_here(config: Config) -> dict[str, Any]:
    """Facts that explain a number, with the GPU's name; a device that is not here is refused."""
    facts = machine_for(config)
    if facts["device"] == "cuda":
        import torch

        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def measure(
    request: DeviceRequest,
    progress: Progress,
    *,
    keep: Callable[[BenchResult], None] = lambda result: None,
    start: Start | None = None,
    machine: Mapping[str, Any] | None = None,
) -> BenchResult:
    """All points; `keep` is given what there is after each. An interruption leaves those that were measured, if any.

    `machine` is the real one if it is left out.
    """
    facts = machine_here(request.configs[0]) if machine is None else machine
    plans = request.plans()
    for config in plans:
        if facts["device"] != "cuda" and config.train.precision == "tf32":
            raise RequestError("bench: --precision: tf32 needs a GPU, and this machine has none")
    gpu = gpu_here(str(facts.get("gpu", "")))
    rows: list[Row] = []
    notes: list[str] = []
    compute = request.configs[0].train.compute
    ended_by = None
    programs = DevicePrograms()
    try:
        for number, config in enumerate(plans, start=1):
            at = f"{number} of {len(plans)}: "
            for row, found in _points_of(config, request, start or programs, progress, at, gpu):
                rows.append(row)
                compute = found.get("compute", compute)
                for reason in found.get("not_measured", ()):
                    if (note := f"energy: not included: {reason}") not in notes:
                        notes.append(note)
                keep(device_result(request, facts, list(rows), notes, compute))
    except (KeyboardInterrupt, Terminated) as signal:
        if not rows:
            raise
        ended_by = signal
        notes.append(f"interrupted after {count_of(len(rows), 'measurement')}")
    finally:
        programs.close()
    if facts["device"] == "cuda" and gpu is None:
        notes.append(f"the share of peak is unknown: {facts['gpu']} is not in the device table of offbeat profile")
    return device_result(request, facts, rows, notes, compute, ended_by=ended_by)
