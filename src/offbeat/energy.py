"""Joules between a start and a stop, from the counters that the machine itself has.

    RAPL   /sys/class/powercap/intel-rapl:N (AMD's are there too): a processor package, and its memory where that has
           a counter of its own. It counts the whole package: what other programs burn meanwhile is in it.
    NVML   the GPUs in use, each as a whole, by the counter that NVIDIA's have since Volta; older ones say their power,
           which is summed over time by trapezoids

Laws. Nothing here raises: what cannot be measured is named, with the reason. Nothing is estimated: a source that fails
on the way is taken out, with all that it had counted. No joule is in two sources: `psys`, the whole platform, is read
only where no package is, and of a package's parts only `dram`, which stands beside it and not inside. Mains, fans and
disks are in none of them. It must not know torch or processes.
"""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

RAPL, NVML = "rapl", "nvml"
COUNTED_EVERY_S = 10.0  # the smallest counters of RAPL go round in two minutes at 500 W
POWER_EVERY_S = 0.1  # NVIDIA's sensors are not faster
MOST_W = 10_000.0  # of a package, far above any there is: more is no power but a counter that was set back
GRAIN_S = 0.01  # counters move in steps, and may make one just after the last look
VISIBLE = "CUDA_VISIBLE_DEVICES"
EXTRA = "pip install 'offbeat[gpu]'"

ROOT_ONLY = "RAPL counters can be read by root only"
NO_RAPL = "no RAPL counters: containers and virtual machines hide them, and some processors have none"
SET_BACK = "its counter was reset"
NO_PACKAGE = f"GPUs: the package nvidia-ml-py is missing: {EXTRA}"


class Source(NamedTuple):
    """What one counter has counted."""

    name: str
    kind: str
    joules: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """What was measured, and what was not."""

    seconds: float
    sources: tuple[Source, ...] = ()
    not_measured: tuple[str, ...] = ()

    @property
    def joules(self) -> float | None:
        """Of all sources; None where there is none."""
        return sum(source.joules for source in self.sources) if self.sources else None

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "joules": self.joules,
            "sources": [source._asdict() for source in self.sources],
            "not_measured": list(self.not_measured),
        }


class _Counter:
    """Grows with what is burnt, and begins again at `wraps_at`. That is believed only if it gives a likely power: after
    a sleep of the machine, or by a driver that is loaded anew, a counter begins again too."""

    kind = RAPL
    every_s = COUNTED_EVERY_S

    def __init__(self, name: str, read: Callable[[], int], per_joule: int, wraps_at: int | None, now: float) -> None:
        self.name, self._read, self._per_joule, self._wraps_at = name, read, per_joule, wraps_at
        self._last, self._last_s, self._counted = read(), now, 0

    def read(self, now: float) -> None:
        value = self._read()
        passed = value - self._last
        if passed < 0 and self._wraps_at is not None:
            passed += self._wraps_at
            if passed > MOST_W * (now - self._last_s + GRAIN_S) * self._per_joule:
                raise ValueError(SET_BACK)
        if passed < 0:
            raise ValueError(SET_BACK)
        self._last, self._last_s = value, now
        self._counted += passed

    @property
    def joules(self) -> float:
        return self._counted / self._per_joule


class _GpuCounter(_Counter):
    kind = NVML


class _Power:
    """Watts at some moments; between two of them it is their mean."""

    kind = NVML
    every_s = POWER_EVERY_S

    def __init__(self, name: str, read_mw: Callable[[], int], now: float) -> None:
        self.name, self._read_mw, self.joules = name, read_mw, 0.0
        self._last_s, self._last_w = now, read_mw() / 1000

    def read(self, now: float) -> None:
        watts = self._read_mw() / 1000
        self.joules += (now - self._last_s) * (watts + self._last_w) / 2
        self._last_s, self._last_w = now, watts


class Meter:
    """Measures from `start` to `stop`; `tick` is called now and then, at the least every half minute.

    `devices` are the GPUs in use: numbers as CUDA counts them, among those that CUDA_VISIBLE_DEVICES leaves, or UUIDs.
    Of a machine with GPUs of several kinds CUDA counts the fastest first and NVML does not: say
    CUDA_DEVICE_ORDER=PCI_BUS_ID there, or give UUIDs. `nvml` stands for the module `pynvml`.
    """

    def __init__(
        self,
        devices: Sequence[int | str] = (),
        *,
        sys_root: Path = Path("/sys/class/powercap"),
        nvml: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._devices, self._sys_root, self._nvml, self._clock = tuple(devices), sys_root, nvml, clock
        self._opened: Any = None  # NVML, from start to stop
        self._gauges: list[tuple[_Counter | _Power, float]] = []  # and when each is to be read next
        self._not_measured: list[str] = []
        self._began = clock()

    def start(self) -> None:
        self._close()
        self._gauges, self._not_measured = [], []
        try:
            self._find_packages()
        except PermissionError:
            self._not_measured.append(ROOT_ONLY)
        except Exception as error:  # whatever a system has there: it is no reason not to work
            self._not_measured.append(f"RAPL: {_told(error)}")
        if self._devices:
            self._find_gpus()
        self._began = self._clock()

    def tick(self) -> None:
        """Cheap: a counter is read only when it is time."""
        now = self._clock()
        if any(now >= due for _, due in self._gauges):
            self._read_due(now)

    def stop(self) -> Energy:
        """What was burnt since `start`. To stop once more gives nothing new: all sources are gone."""
        now = self._clock()
        self._read_due(now, all_of_them=True)
        self._close()
        sources = tuple(Source(gauge.name, gauge.kind, gauge.joules) for gauge, _ in self._gauges)
        self._gauges = []
        return Energy(seconds=now - self._began, sources=sources, not_measured=tuple(dict.fromkeys(self._not_measured)))

    def _read_due(self, now: float, *, all_of_them: bool = False) -> None:
        kept = []
        for gauge, due in self._gauges:
            if not all_of_them and now < due:
                kept.append((gauge, due))
                continue
            try:
                gauge.read(now)
                kept.append((gauge, now + gauge.every_s))
            except Exception as error:  # a driver may raise anything
                self._not_measured.append(f"{gauge.name}: {_told(error)}")
        self._gauges = kept

    def _add(self, gauge: _Counter | _Power) -> None:
        self._gauges.append((gauge, self._clock() + gauge.every_s))

    # --- RAPL -------------------------------------------------------------------------------------------------------

    def _find_packages(self) -> None:
        zones = _zones(self._sys_root)
        if not zones:
            self._not_measured.append(NO_RAPL)
        for name, folder in zones:
            try:
                self._add(_Counter(name, _reader(folder / "energy_uj"), 1_000_000, _range(folder), self._clock()))
            except PermissionError:
                self._not_measured.append(ROOT_ONLY)
            except (OSError, ValueError) as error:
                self._not_measured.append(f"{name}: {_told(error)}")

    # --- NVML -------------------------------------------------------------------------------------------------------

    def _find_gpus(self) -> None:
        try:
            nvml = importlib.import_module("pynvml") if self._nvml is None else self._nvml
        except ImportError:
            self._not_measured.append(NO_PACKAGE)
            return
        try:
            nvml.nvmlInit()
        except Exception as error:  # the driver's library is not there, or is another version's
            self._not_measured.append(
                f"GPUs: NVML does not work: {_told(error)}; it needs the NVIDIA driver and {EXTRA}"
            )
            return
        self._opened = nvml
        seen = set()
        for device in self._devices:
            name = f"cuda:{device}" if isinstance(device, int) else device
            try:
                handle = _handle(nvml, device)
                uuid = _text(nvml.nvmlDeviceGetUUID(handle))
                if uuid not in seen:
                    seen.add(uuid)
                    self._add(self._gauge(nvml, handle, f"{name} ({_text(nvml.nvmlDeviceGetName(handle))})"))
            except Exception as error:  # as above: it is told, and nothing is stopped
                self._not_measured.append(f"{name}: {_told(error)}")

    def _gauge(self, nvml: Any, handle: Any, name: str) -> _Counter | _Power:
        try:
            return _GpuCounter(
                name, lambda: int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)), 1000, None, self._clock()
            )
        except Exception:  # older than Volta, or a part of a GPU; if it has no sensor of power either, that is told
            return _Power(name, lambda: int(nvml.nvmlDeviceGetPowerUsage(handle)), self._clock())

    def _close(self) -> None:
        if self._opened is not None:
            try:
                self._opened.nvmlShutdown()
            except Exception as error:  # as above: it is told, and nothing is stopped
                self._not_measured.append(f"NVML cannot be shut down: {_told(error)}")
            self._opened = None


def _told(error: Exception) -> str:
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(said.split()) or type(error).__name__


def _text(said: Any) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else str(said)  # early versions gave bytes


def _zones(root: Path) -> list[tuple[str, Path]]:
    """What to read: packages, each with its memory; or the platform, where no package is."""
    tops = sorted(path for path in _listed(root) if re.fullmatch(r"intel-rapl:\d+", path.name))
    named = [((path / "name").read_text(encoding="utf-8").strip(), path) for path in tops]
    packages = [(name, path) for name, path in named if name != "psys"]
    zones = []
    for name, path in packages:
        zones.append((name, path))
        # The kernel lists parts beside the package, and inside of it; one list is enough.
        parts = {part.name: part for part in (*_listed(path), *_listed(root))}
        for part in sorted(part for word, part in parts.items() if re.fullmatch(rf"{path.name}:\d+", word)):
            if (part / "name").read_text(encoding="utf-8").strip() == "dram":
                zones.append((f"{name} dram", part))
    return zones or named


def _listed(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _reader(path: Path) -> Callable[[], int]:
    return lambda: int(path.read_text(encoding="ascii"))


def _range(zone: Path) -> int | None:
    try:
        return int((zone / "max_energy_range_uj").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _handle(nvml: Any, device: int | str) -> Any:
    """NVML's of a GPU. It knows nothing of CUDA_VISIBLE_DEVICES; UUIDs there may be cut short."""
    visible = os.environ.get(VISIBLE)
    if isinstance(device, int) and visible is not None:
        words = [word.strip() for word in visible.split(",")]
        if device >= len(words) or not words[device]:
            raise LookupError(f"it is not among {VISIBLE}={visible}")
        device = int(words[device]) if words[device].isdigit() else words[device]
    if isinstance(device, int):
        return nvml.nvmlDeviceGetHandleByIndex(device)
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        if _text(nvml.nvmlDeviceGetUUID(handle)).startswith(device):
            return handle
    return nvml.nvmlDeviceGetHandleByUUID(device)  # a part of a GPU; or nothing, and the driver says so
