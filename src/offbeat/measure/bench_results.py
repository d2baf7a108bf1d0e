"""What a benchmark found: rounds as they were measured, and every reported number computed from them here.

A round is the slowest rank's mean over the round's iterations; what is reported is the median over rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.number_format import format_size
from offbeat.runs.metrics import BUS_FACTORS, bus_bandwidth

OURS = "offbeat"
# What a training iteration is compared with, and how each is called in a sentence.
BASELINES: Mapping[str, str] = {"none": "no communication", "empty": "DDP with an empty all-reduce"}

DEFINITIONS: Mapping[str, str] = {
    "ms": "median over rounds; a round is the slowest rank's mean over its iterations, after a barrier",
    "bus_bytes_per_s": f"size / seconds * {BUS_FACTORS['all-reduce'].text}, as in NCCL's tests",
    "spread": "slowest round / fastest round, the largest of all systems; far above 1 the machine was busy",
    "ratio": f"ms / ms of {OURS}",
    "copy_share": "bus bandwidth * P / copy bandwidth together",
    "copy_together_bytes_per_s": (
        "bytes copied (each counted once) a second by all ranks at once, each copying a large private buffer "
        "with tensor.copy_; P * buffer / seconds of the slowest rank; median over all rounds"
    ),
    "copy_alone_bytes_per_s": "the same by rank 0 while the other ranks sleep",
    "added_ms": "ms - ms without communication (no_sync)",
    "alone_ms": "all-reduces of the same buckets one after the other, nothing beside them",
    "hidden_share": "1 - added / alone",
    "empty": "DDP fills its buckets, divides and empties them, and reduces nothing",
    "hidden_beyond_ddp_share": "1 - (ms - ms of empty) / alone: without what DDP itself adds",
}


def size_label(size_bytes: int) -> str:
    """`4 MiB` for what is a whole number of those, `100 MB` otherwise."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size_bytes % factor == 0 and size_bytes:
            return f"{size_bytes // factor} {unit}"
    return format_size(size_bytes)


def format_ms(ms: float) -> str:
    return f"{ms:.0f}" if abs(ms) >= 99.95 else f"{ms:.3g}"


def format_ratio(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 9.95 else f"{ratio:.1f}x"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What was asked for, and where it was run; recorded whole in every result."""

    ranks: int
    rounds: int
    threads: int
    strategy: str | None
    machine: Mapping[str, Any]
    not_measured: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        return {
            "ranks": self.ranks,
            "rounds": self.rounds,
            "threads": self.threads,
            "strategy": self.strategy,
            "machine": dict(self.machine),
            "not_measured": dict(self.not_measured),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """One system's rounds of one piece of work."""

    system: str
    iterations: tuple[int, ...]  # of each round
    rounds_s: tuple[float, ...]

    @property
    def ms(self) -> float:
        return 1e3 * statistics.median(self.rounds_s)

    @property
    def rounds_ms(self) -> list[float]:
        return [1e3 * seconds for seconds in self.rounds_s]

    @property
    def spread(self) -> float:
        return max(self.rounds_s) / min(self.rounds_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeResult:
    """All systems at one size; ours is the first."""

    size_bytes: int
    systems: tuple[Times, ...]

    def ratio(self, times: Times) -> float:
        return times.ms / self.systems[0].ms

    def bus_bytes_per_s(self, times: Times, ranks: int) -> float:
        return bus_bandwidth("all-reduce", ranks, self.size_bytes, times.ms / 1e3)

    def summary(self) -> str:
        """`4 MiB: offbeat 0.11 ms, 31x gloo, 4.6x mpi`: how many times as fast as each."""
        ours, *others = self.systems
        words = [f"{ours.system} {format_ms(ours.ms)} ms"]
        words += [f"{format_ratio(self.ratio(times))} {times.system}" for times in others]
        return f"{size_label(self.size_bytes)}: {', '.join(words)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceResult:
    """What `offbeat bench allreduce` found."""

    setting: Setting
    copy_buffer_bytes: int
    copy_alone_s: tuple[float, ...]
    copy_together_s: tuple[float, ...]
    sizes: tuple[SizeResult, ...]

    @property
    def copy_alone_bytes_per_s(self) -> float:
        return self.copy_buffer_bytes / statistics.median(self.copy_alone_s)

    @property
    def copy_together_bytes_per_s(self) -> float:
        return self.setting.ranks * self.copy_buffer_bytes / statistics.median(self.copy_together_s)

    @property
    def spread(self) -> float:
        return max(times.spread for size in self.sizes for times in size.systems)

    def copy_share(self, size: SizeResult, times: Times) -> float:
        ranks = self.setting.ranks
        return size.bus_bytes_per_s(times, ranks) * ranks / self.copy_together_bytes_per_s

    def as_json(self) -> dict[str, Any]:
        return {"measured": "allreduce", **self.setting.as_json()} | {
            "copy_buffer_bytes": self.copy_buffer_bytes,
            "copy_alone_bytes_per_s": self.copy_alone_bytes_per_s,
            "copy_together_bytes_per_s": self.copy_together_bytes_per_s,
            "spread": self.spread,
            "sizes": [
                {
                    "size_bytes": size.size_bytes,
                    "summary": size.summary(),
                    "systems": [
                        {
                            "system": times.system,
                            "ms": times.ms,
                            "bus_bytes_per_s": size.bus_bytes_per_s(times, self.setting.ranks),
                            "ratio": size.ratio(times),
                            "copy_share": self.copy_share(size, times),
                            "iterations": list(times.iterations),
                            "rounds_ms": times.rounds_ms,
                        }
                        for times in size.systems
                    ],
                }
                for size in self.sizes
            ],
            "definitions": _definitions("ms", "spread", "bus_bytes_per_s", "ratio", "copy_share")
            | _definitions("copy_together_bytes_per_s", "copy_alone_bytes_per_s"),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpSystem:
    """One system's training iterations, and its all-reduces of the same buckets alone."""

    training: Times
    alone: Times


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpResult:
    """What `offbeat bench ddp` found."""

    setting: Setting
    batch: int
    parameters: int
    bucket_bytes: tuple[int, ...]
    none: Times  # no_sync
    empty: Times  # DDP's own work, with nothing reduced
    systems: tuple[DdpSystem, ...]
    same_parameters: bool
    largest_difference: float  # of a parameter between systems, as a part of the largest parameter

    @property
    def spread(self) -> float:
        both = [times for system in self.systems for times in (system.training, system.alone)]
        return max(times.spread for times in (self.none, self.empty, *both))

    def added_ms(self, training: Times) -> float:
        return training.ms - self.none.ms

    def hidden_share(self, system: DdpSystem) -> float:
        return 1 - self.added_ms(system.training) / system.alone.ms

    def hidden_beyond_ddp_share(self, system: DdpSystem) -> float:
        return 1 - (system.training.ms - self.empty.ms) / system.alone.ms

    def ratio(self, system: DdpSystem) -> float:
        return system.training.ms / self.systems[0].training.ms

    def summary(self) -> str:
        ours, *others = (
            f"{system.training.system} adds {format_ms(self.added_ms(system.training))} ms" for system in self.systems
        )
        return f"{format_ms(self.none.ms)} ms of compute: {', '.join([ours, *others])}"

    def as_json(self) -> dict[str, Any]:
        return {"measured": "ddp", **self.setting.as_json()} | {
            "batch": self.batch,
            "parameters": self.parameters,
            "bucket_bytes": list(self.bucket_bytes),
            "iterations": list(self.none.iterations),
            "none": {"ms": self.none.ms, "rounds_ms": self.none.rounds_ms},
            "empty": {"ms": self.empty.ms, "added_ms": self.added_ms(self.empty), "rounds_ms": self.empty.rounds_ms},
            "systems": [
                {
                    "system": system.training.system,
                    "ms": system.training.ms,
                    "ratio": self.ratio(system),
                    "added_ms": self.added_ms(system.training),
                    "alone_ms": system.alone.ms,
                    "hidden_share": self.hidden_share(system),
                    "hidden_beyond_ddp_share": self.hidden_beyond_ddp_share(system),
                    "rounds_ms": system.training.rounds_ms,
                    "alone_rounds_ms": system.alone.rounds_ms,
                }
                for system in self.systems
            ],
            "spread": self.spread,
            "summary": self.summary(),
            "same_parameters": self.same_parameters,
            "largest_difference": self.largest_difference,
            "definitions": _definitions("ms", "spread", "added_ms", "alone_ms", "hidden_share", "ratio")
            | _definitions("empty", "hidden_beyond_ddp_share"),
        }


def _definitions(*names: str) -> dict[str, str]:
    return {name: DEFINITIONS[name] for name in names}
