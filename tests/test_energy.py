"""A folder that looks like the kernel's, a module that looks like NVIDIA's, and a clock that is turned by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from offbeat import energy
from offbeat.energy import NO_PACKAGE, NO_RAPL, ROOT_ONLY, Energy, Meter, Source
from offbeat.machine import machine_facts

JOULE = 1_000_000  # in the units of RAPL
TOP = 262_143_328_850  # as kernels have it


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Zone:
    """A counter in the folder."""

    def __init__(self, root: Path, place: str, name: str, joules: float = 1.0, top: int | None = TOP) -> None:
        self.folder = root / place
        self.folder.mkdir(parents=True)
        (self.folder / "name").write_text(f"{name}\n")
        if top is not None:
            (self.folder / "max_energy_range_uj").write_text(f"{top}\n")
        self.set(round(joules * JOULE))

    def set(self, units: int) -> None:
        (self.folder / "energy_uj").write_text(f"{units}\n")


class NvmlError(Exception):
    """As NVML has one."""


class Nvml:
    """GPUs with a counter in millijoules, or with power in milliwatts alone."""

    def __init__(self, *uuids: str, counts: bool = True) -> None:
        self.uuids, self.counts = uuids, counts
        self.energy = dict.fromkeys(uuids, 5_000)
        self.power = dict.fromkeys(uuids, 100_000)
        self.opened = 0
        self.asked: list[str] = []

    def nvmlInit(self) -> None:  # noqa: N802 - NVIDIA's name
        self.opened += 1

    def nvmlShutdown(self) -> None:  # noqa: N802 - NVIDIA's name
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - NVIDIA's name
        return len(self.uuids)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802 - NVIDIA's name
        if index >= len(self.uuids):
            raise NvmlError("Invalid Argument")
        return self.uuids[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802 - NVIDIA's name
        raise NvmlError(f"no {uuid}")

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:  # noqa: N802 - NVIDIA's name
        return handle.encode()  # as early versions gave it

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802 - NVIDIA's name
        return "Fake"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802 - NVIDIA's name
        assert self.opened == 1
        if not self.counts:
            raise NvmlError("Not Supported")
        return self.energy[handle]

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802 - NVIDIA's name
        assert self.opened == 1
        self.asked.append(handle)
        if handle not in self.power:
            raise NvmlError("Not Supported")
        return self.power[handle]


@pytest.fixture(autouse=True)
def all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


# --- RAPL ---------------------------------------------------------------------------------------------------------


def test_packages_and_their_memory_are_counted_and_nothing_twice(tmp_path: Path, clock: Clock) -> None:
    zones = [
        Zone(tmp_path, "intel-rapl:0", "package-0"),
        Zone(tmp_path, "intel-rapl:0:0", "core"),
        Zone(tmp_path, "intel-rapl:0:1", "dram"),
        Zone(tmp_path, "intel-rapl:1", "package-1"),
        Zone(tmp_path, "intel-rapl:1/intel-rapl:1:0", "dram"),  # listed inside of it alone
        Zone(tmp_path, "intel-rapl:2", "psys"),
        Zone(tmp_path, "intel-rapl-mmio:0", "package-0"),  # the first one, by another way
    ]
    meter = Meter(sys_root=tmp_path, clock=clock)
    meter.start()
    clock.now += 4
    for number, zone in enumerate(zones):
        zone.set(JOULE + JOULE * 10**number // 10)
    found = meter.stop()
    assert found == Energy(
        seconds=4.0,
        sources=(
            Source("package-0", "rapl", 0.1),
            Source("package-0 dram", "rapl", 10.0),
            Source("package-1", "rapl", 100.0),
            Source("package-1 dram", "rapl", 1000.0),
        ),
    )
    assert found.joules == pytest.approx(1110.1)


def test_the_platform_is_counted_where_no_package_is(tmp_path: Path) -> None:
    zone = Zone(tmp_path, "intel-rapl:0", "psys")
    meter = Meter(sys_root=tmp_path)
    meter.start()
    zone.set(3 * JOULE)
    assert meter.stop().sources == (Source("psys", "rapl", 2.0),)


def test_a_counter_that_goes_round_is_followed_as_often_as_it_does(tmp_path: Path, clock: Clock) -> None:
    zone = Zone(tmp_path, "intel-rapl:0", "package-0", joules=90, top=100 * JOULE)
    meter = Meter(sys_root=tmp_path, clock=clock)
    meter.start()
    for joules in (30, 80, 20, 5):  # 40, 50, 40 and 85 later
        zone.set(joules * JOULE)
        clock.now += energy.COUNTED_EVERY_S
        meter.tick()
    zone.set(15 * JOULE)
    assert meter.stop().joules == 40 + 50 + 40 + 85 + 10


@pytest.mark.parametrize(("before", "after"), [(5_000 * JOULE, 0), (5_000 * JOULE, 5_000 * JOULE - 4)])
def test_a_counter_that_is_set_back_has_not_gone_round(before: int, after: int, tmp_path: Path, clock: Clock) -> None:
    zones = [Zone(tmp_path, f"intel-rapl:{number}", f"package-{number}") for number in range(2)]
    zones[0].set(before)
    meter = Meter(sys_root=tmp_path, clock=clock)
    meter.start()
    zones[0].set(after)
    zones[1].set(3 * JOULE)
    clock.now += 5
    found = meter.stop()
    assert found.sources == (Source("package-1", "rapl", 2.0),)
    assert found.not_measured == ("package-0: its counter was reset",)


@pytest.mark.parametrize(("watts", "believed"), [(9_000, True), (11_000, False)])
def test_power_is_that_since_the_last_look_and_not_since_the_start(
    watts: int, believed: bool, tmp_path: Path, clock: Clock
) -> None:
    zone = Zone(tmp_path, "intel-rapl:0", "package-0", joules=0)
    meter = Meter(sys_root=tmp_path, clock=clock)
    meter.start()
    clock.now += 1000
    zone.set(TOP - JOULE)
    meter.tick()
    clock.now += energy.COUNTED_EVERY_S
    zone.set(round(watts * energy.COUNTED_EVERY_S * JOULE) - JOULE)
    found = meter.stop()
    assert bool(found.sources) is believed
    if believed:
        assert found.joules == pytest.approx(TOP / JOULE - 1 + watts * energy.COUNTED_EVERY_S)


def test_a_counter_may_go_round_between_two_looks_at_once(tmp_path: Path, clock: Clock) -> None:
    zone = Zone(tmp_path, "intel-rapl:0", "package-0", joules=TOP / JOULE - 0.5)
    meter = Meter(sys_root=tmp_path, clock=clock)
    meter.start()
    zone.set(JOULE // 2)
    assert meter.stop().joules == pytest.approx(1.0)


def test_a_tick_reads_a_counter_only_when_it_is_time(tmp_path: Path, clock: Clock) -> None:
    zone = Zone(tmp_path, "intel-rapl:0", "package-0")
    meter = Meter(sys_root=tmp_path, clock=clock)
    meter.start()
    (zone.folder / "energy_uj").unlink()  # who reads now, fails
    clock.now += energy.COUNTED_EVERY_S / 2
    meter.tick()
    zone.set(2 * JOULE)
    assert meter.stop().joules == 1.0


def test_a_counter_that_fails_on_the_way_is_taken_out_and_named(tmp_path: Path) -> None:
    zones = [Zone(tmp_path, f"intel-rapl:{number}", f"package-{number}", top=None) for number in range(3)]
    meter = Meter(sys_root=tmp_path)
    meter.start()
    zones[0].set(JOULE // 2)
    (zones[1].folder / "energy_uj").write_text("much\n")
    zones[2].set(3 * JOULE)
    found = meter.stop()
    assert found.sources == (Source("package-2", "rapl", 2.0),)
    assert found.not_measured[0] == "package-0: its counter was reset"
    assert found.not_measured[1].startswith("package-1: invalid literal")


def test_counters_of_root_alone_are_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        Zone(tmp_path, f"intel-rapl:{number}", f"package-{number}")
    read = Path.read_text

    def refuse(path: Path, *given: Any, **named: Any) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return read(path, *given, **named)

    monkeypatch.setattr(Path, "read_text", refuse)  # the test itself may be root's
    meter = Meter(sys_root=tmp_path)
    meter.start()
    found = meter.stop()
    assert (found.sources, found.joules, found.not_measured) == ((), None, (ROOT_ONLY,))


@pytest.mark.parametrize("there", [False, True])
def test_a_machine_without_counters_is_no_error(there: bool, tmp_path: Path) -> None:
    root = tmp_path / "powercap"
    if there:
        (root / "intel-rapl").mkdir(parents=True)  # the driver is there, and has found nothing
    meter = Meter(sys_root=root)
    meter.start()
    meter.tick()
    found = meter.stop()
    assert (found.joules, found.not_measured) == (None, (NO_RAPL,))


# --- NVML ---------------------------------------------------------------------------------------------------------


def measured(tmp_path: Path, nvml: Nvml, devices: tuple[int | str, ...]) -> Energy:
    """Each GPU burns a joule more than the one before; the first one burns one."""
    meter = Meter(devices, sys_root=tmp_path, nvml=nvml)
    meter.start()
    for number, uuid in enumerate(nvml.uuids):
        nvml.energy[uuid] += 1000 * (number + 1)
    found = meter.stop()
    assert nvml.opened == 0
    return found


@pytest.mark.parametrize(
    ("visible", "devices", "joules"),
    [
        (None, (0, 2), [1.0, 3.0]),
        ("2,0", (0,), [3.0]),
        ("2, GPU-bb", (0, 1), [3.0, 2.0]),  # cut short
        ("1", (0, "GPU-bbb"), [2.0]),  # the same one
        ("0", ("GPU-ccc",), [3.0]),
    ],
)
def test_only_the_gpus_in_use_are_counted(
    visible: str | None,
    devices: tuple[int | str, ...],
    joules: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = measured(tmp_path, Nvml("GPU-aaa", "GPU-bbb", "GPU-ccc"), devices)
    assert [source.joules for source in found.sources] == joules
    assert {source.kind for source in found.sources} == {"nvml"}
    assert found.sources[0].name == (f"cuda:{devices[0]} (Fake)" if devices[0] in (0, 2) else f"{devices[0]} (Fake)")
    assert found.not_measured == (NO_RAPL,)


def test_a_gpu_that_is_not_visible_is_named_and_the_others_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,MIG-x")
    found = measured(tmp_path, Nvml("GPU-aaa", "GPU-bbb"), (0, 1, 2))
    assert found.joules == 2.0
    assert found.not_measured[1:] == ("cuda:1: no MIG-x", "cuda:2: it is not among CUDA_VISIBLE_DEVICES=1,MIG-x")


def test_without_a_counter_power_is_summed_by_trapezoids(tmp_path: Path, clock: Clock) -> None:
    nvml = Nvml("GPU-aaa", counts=False)
    meter = Meter((0,), sys_root=tmp_path, nvml=nvml, clock=clock)
    meter.start()
    for seconds, watts in ((2.0, 300), (0.01, 900), (1.0, 100)):  # the second comes too soon to be asked
        clock.now += seconds
        nvml.power["GPU-aaa"] = watts * 1000
        meter.tick()
    clock.now += 3
    found = meter.stop()
    assert found.joules == pytest.approx(2.0 * (100 + 300) / 2 + 1.01 * (300 + 100) / 2 + 3 * 100)
    assert len(nvml.asked) == 4


def test_a_gpu_that_tells_nothing_is_named(tmp_path: Path) -> None:
    nvml = Nvml("GPU-aaa", counts=False)
    nvml.power.clear()
    found = measured(tmp_path, nvml, (0,))
    assert (found.joules, found.not_measured[1:]) == (None, ("cuda:0: Not Supported",))


def test_without_the_package_or_the_driver_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    meter = Meter((0,), sys_root=tmp_path)
    meter.start()
    assert meter.stop().not_measured == (NO_RAPL, NO_PACKAGE)
    assert "pip install 'offbeat[gpu]'" in NO_PACKAGE

    class NoDriver(Nvml):
        def nvmlInit(self) -> None:  # noqa: N802 - NVIDIA's name
            raise NvmlError("NVML Shared Library Not Found")

    meter = Meter((0,), sys_root=tmp_path, nvml=NoDriver("GPU-aaa"))
    meter.start()
    (_, said) = meter.stop().not_measured
    assert "Shared Library Not Found" in said and "pip install 'offbeat[gpu]'" in said


def test_without_gpus_in_use_nvml_is_not_touched(tmp_path: Path) -> None:
    class Untouched(Nvml):
        def nvmlInit(self) -> None:  # noqa: N802 - NVIDIA's name
            raise AssertionError

    meter = Meter(sys_root=tmp_path, nvml=Untouched("GPU-aaa"))
    meter.start()
    assert meter.stop().not_measured == (NO_RAPL,)


# --- what comes out -----------------------------------------------------------------------------------------------


def test_a_meter_that_was_not_started_measures_nothing_and_one_can_be_started_again(tmp_path: Path) -> None:
    zone = Zone(tmp_path, "intel-rapl:0", "package-0")
    meter = Meter(sys_root=tmp_path)
    meter.tick()
    assert meter.stop().joules is None
    for joules in (2, 5):
        meter.start()
        zone.set(joules * JOULE)
        assert meter.stop().joules == joules - (1 if joules == 2 else 2)
    assert meter.stop().sources == ()


def test_energy_as_json_has_the_promised_keys() -> None:
    found = Energy(seconds=2.0, sources=(Source("package-0", "rapl", 3.5),), not_measured=("GPUs",))
    assert json.loads(json.dumps(found.as_json())) == {
        "seconds": 2.0,
        "joules": 3.5,
        "sources": [{"name": "package-0", "kind": "rapl", "joules": 3.5}],
        "not_measured": ["GPUs"],
    }
    assert Energy(seconds=1.0).as_json()["joules"] is None


def test_facts_of_the_machine_have_what_the_caller_gives() -> None:
    plain = machine_facts()
    assert plain.keys() == {"cores", "load", "processor", "python"}
    told = machine_facts(torch="2.13", device="cpu", threads=2)
    assert (told["torch"], told["device"], told["threads"]) == ("2.13", "cpu", 2)
    assert json.loads(json.dumps(told)) == told and told["cores"] >= 1
