"""Injured runs of the parameter server, and what must be true of each of them, told from its log, weights and leavings.

applied      every sample of every epoch in exactly one update; every push in at most one, under one name
weights      of every learner at the end, and of every minibatch at its start: those that numpy computes from the log
books        the log replays through the policy; received = applied + dropped
nothing left no process, no file, no name of a socket
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offbeat.policies import Apply, Drop, Pushed, replay
from offbeat.policies.events import from_text
from offbeat.runs.log import RunLog, read_log
from process import fault_script

TESTS = Path(__file__).resolve().parents[1]
Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Blow:
    """See `fault_points`."""

    who: str
    at: str
    call: int = 1
    what: str = "kill"
    number: int = 0
    all: bool = False
    name: str = "it"


@dataclass(frozen=True)
class Order:
    """A run, and what happens to it."""

    sync: str = "async"
    learners: int = 2
    servers: int = 1
    blows: tuple[Blow, ...] = ()
    stop_s: float = 5.0
    silence_s: float = 3.0
    stopped_s: float = 2.0
    limit_s: float = 60.0
    absent: tuple[int, ...] = ()  # learners that nobody waits for
    odd: int | None = None  # a learner with another model
    workers: int = 0
    inside: bool = False  # the coordinator makes the updates itself, as with any model of this size; else a server does
    planted: str = ""  # a bug of `fault_points.PLANTED`, to see it found
    program: bool = False
    words: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        words = f"--learners {self.learners} --servers {self.servers} --sync {self.sync}".split()
        object.__setattr__(self, "words", tuple(words))


@dataclass(frozen=True)
class Ended:
    """A run that is over."""

    order: Order
    folder: Path
    result: Mapping[str, Any]

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(encoding="utf-8") if path.exists() else ""

    @property
    def code(self) -> int:
        code: int = self.result["code"]
        return code

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads(self.text("out"))
        return summary

    def __str__(self) -> str:
        return f"{self.order}\n{dict(self.result)}\n{self.text('err')[-3000:]}\n{self.text('out')[-200:]}"


class Nursery:
    """The program that forks runs; see `fault_nursery`. `over` are those that have ended."""

    def __init__(self) -> None:
        self.over: list[Ended] = []
        self._places: list[tempfile.TemporaryDirectory[str]] = []  # for temporary files of the runs
        environment = {key: value for key, value in os.environ.items() if not key.startswith("OFFBEAT_")}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
        self.program = subprocess.Popen(
            [sys.executable, "-m", "process.fault_nursery"],
            env=environment,
            cwd=TESTS,
            stdin=subprocess.PIPE,
            text=True,
        )

    def start(self, order: Order, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Short: readers of a DataLoader make sockets there, whose names have at most 107 characters.
        self._places.append(tempfile.TemporaryDirectory(prefix="ob"))
        (folder / "tmp").symlink_to(self._places[-1].name)
        (folder / "order").write_text(json.dumps(asdict(order)), encoding="utf-8")
        assert self.program.stdin is not None
        self.program.stdin.write(f"{folder}\n")
        self.program.stdin.flush()

    def ended(self, order: Order, folder: Path) -> Ended:
        """Wait until a run is over; its warden sees to it that it is, at some time."""
        end = time.monotonic() + order.limit_s + 60
        while not (folder / "result").exists():
            assert time.monotonic() < end and self.program.poll() is None, (
                f"the nursery is gone, or its warden: {order}"
            )
            time.sleep(0.01)
        found = Ended(order, folder, json.loads((folder / "result").read_text(encoding="utf-8")))
        self.over.append(found)
        return found

    def run(self, folder: Path, *orders: Order, at_once: int = 1) -> list[Ended]:
        """All of these, so many at a time."""
        folders = [folder / str(number) for number in range(len(orders))]
        found: list[Ended] = []
        for number, (order, place) in enumerate(zip(orders, folders, strict=True)):
            if number >= at_once:
                found.append(self.ended(orders[number - at_once], folders[number - at_once]))
            self.start(order, place)
        for number in range(len(found), len(orders)):
            found.append(self.ended(orders[number], folders[number]))
        return found

    def close(self) -> None:
        assert self.program.stdin is not None
        self.program.stdin.close()
        try:
            self.program.wait(10)
        except subprocess.TimeoutExpired:
            self.program.send_signal(signal.SIGKILL)
            self.program.wait()
        for place in self._places:
            place.cleanup()


@contextmanager
def nursery() -> Iterator[Nursery]:
    one = Nursery()
    try:
        yield one
    finally:
        one.close()


# --- what must be true ----------------------------------------------------------------------------------------------


def check(ended: Ended, *, code: int = 0) -> RunLog:
    """All of it, of a run that came to its end; its log."""
    assert not ended.result["timed_out"], str(ended)
    assert ended.code == code, str(ended)
    for blow in ended.order.blows:
        assert (ended.folder / f"struck-{blow.name}").exists(), f"it was never struck: {ended}"
    check_nothing_left(ended)
    log = read_log(ended.folder / "log")
    replay(log.run, log.decisions)
    try:
        applied, held = check_pushes(log, ended.summary)
        check_samples(log, applied, held, ended.summary)
        check_weights(ended, log)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{ended}") from None
    return log


def check_nothing_left(ended: Ended, within_s: float = 2.0) -> None:
    assert ended.result["left"] == [], str(ended)
    assert ended.result["gone_s"] < within_s, str(ended)
    # Python makes a pymp-* folder in each process that loads data, and leaves it behind when that is killed; seldom
    # also an empty file, if that process is killed just then.
    killed = any(blow.what == "loaders" for blow in ended.order.blows)
    left = [
        path.name
        for path in (ended.folder / "tmp").iterdir()
        if not (path.name.startswith("pymp-") or (killed and path.is_file() and path.stat().st_size == 0))
    ]
    assert left == [], f"{left}: {ended}"
    name = ended.text("address")
    assert name.startswith("offbeat-") and name not in Path("/proc/net/unix").read_text(encoding="utf-8"), str(ended)


def pushes_of(log: RunLog) -> dict[int, Mapping[str, Any]]:
    """The decisions about pushes, by ticket."""
    found: dict[int, Mapping[str, Any]] = {}
    for decision in log.decisions:
        event = from_text(decision["event"])
        if isinstance(event, Pushed):
            assert event.ticket not in found, f"ticket {event.ticket} was given twice"
            found[event.ticket] = decision
    return found


def check_pushes(log: RunLog, summary: Mapping[str, Any]) -> tuple[set[int], set[int]]:
    """Nothing is taken, applied or dropped twice, and the books balance; the tickets applied, and those still held."""
    names: Counter[tuple[int, int, int]] = Counter()
    pushes = pushes_of(log)
    for decision in pushes.values():
        event = from_text(decision["event"])
        assert isinstance(event, Pushed)
        names[event.learner, decision["seq"][0], decision["seq"][1]] += 1
    assert all(many == 1 for many in names.values()), f"pushes that were taken twice: {names.most_common(3)}"
    applied: Counter[int] = Counter()
    dropped: Counter[int] = Counter()
    for decision in log.decisions:
        for command in map(from_text, decision["commands"]):
            if isinstance(command, Apply):
                applied.update(command.tickets)
            elif isinstance(command, Drop):
                dropped[command.ticket] += 1
    fates = applied + dropped
    assert all(many == 1 for many in fates.values()), f"gradients with two fates: {fates.most_common(3)}"
    assert fates.keys() <= pushes.keys()
    books, held = summary["pushes"], pushes.keys() - fates.keys()
    spoilt = summary["dropped"].get("not finite", 0)  # no policy is asked about these
    assert books["applied"] == len(applied), books
    assert books["dropped"] == len(dropped) + len(held) + spoilt, books
    assert books["received"] == books["applied"] + books["dropped"] == len(pushes) + spoilt, books
    return set(applied), set(held)


def check_samples(log: RunLog, applied: set[int], held: set[int], summary: Mapping[str, Any]) -> None:
    """Every sample of every epoch is in one update, or in a gradient that waited for others when the run ended.

    Those of gradients that were not finite are in none, and are counted.
    """
    seen = samples_of(log, applied | held)
    lost, unknown, doubled = fates_of_samples(seen)
    assert 1 + max(epoch for epoch, _ in seen) >= fault_script.MORE
    assert not unknown, f"unknown: {unknown[:5]}"
    assert len(lost) == summary["samples"].get("dropped: not finite", 0), f"never applied: {lost[:5]}"
    assert not doubled, f"applied more than once: {doubled[:5]}"


def samples_of(log: RunLog, tickets: set[int]) -> Counter[tuple[int, int]]:
    """Epoch and place of every sample in these pushes."""
    seen: Counter[tuple[int, int]] = Counter()
    for ticket, decision in pushes_of(log).items():
        if ticket in tickets:
            seen.update(positions(decision))
    return seen


def fates_of_samples(seen: Counter[tuple[int, int]]) -> tuple[list[Any], list[Any], list[Any]]:
    """Samples that are in no update, that are none of the data's, and that are in several."""
    epochs = 1 + max((epoch for epoch, _ in seen), default=-1)
    due = {(epoch, place) for epoch in range(epochs) for place in range(fault_script.SAMPLES)}
    return sorted(due - seen.keys()), sorted(seen.keys() - due), sorted(one for one, many in seen.items() if many > 1)


def tally(ended: Ended) -> dict[str, Any]:
    """For the table of faults: samples lost and doubled, as the log has it, and the seconds to come back.

    Of a run that was ended on purpose the last epochs are not whole: there None is lost.
    """
    found: dict[str, Any] = {"lost": None, "doubled": None, "back_s": []}
    if ended.code in (0, 1, 2) and (ended.folder / "log").exists() and ended.text("out"):
        log, summary = read_log(ended.folder / "log"), ended.summary
        gone = {ticket for one in log.decisions for ticket in _dropped(one)}
        lost, _, doubled = fates_of_samples(samples_of(log, pushes_of(log).keys() - gone))
        spoilt = summary.get("samples", {}).get("dropped: not finite", 0)
        found |= {"lost": abs(len(lost) - spoilt), "doubled": len(doubled)}
        found["back_s"] = [one["seconds"] for one in summary.get("restarts", ())]
    elif ended.code not in (0, 1, 2):  # by a signal
        found["back_s"] = [ended.result["gone_s"]]
    return found


def _dropped(decision: Mapping[str, Any]) -> Iterator[int]:
    for command in map(from_text, decision["commands"]):
        if isinstance(command, Drop):
            yield command.ticket


def positions(decision: Mapping[str, Any]) -> list[tuple[int, int]]:
    return [(epoch, start + one) for epoch, start, count in decision["batch"] for one in range(count)]


def history(log: RunLog, sync: str) -> list[Vector]:
    """The weights of every version, computed from the log alone."""
    samples = np.array([fault_script.sample(number) for number in range(fault_script.SAMPLES)])
    rate = np.repeat(np.array(fault_script.LR), fault_script.SIZES)
    momentum = fault_script.momentum_of(sync)
    own_steps = sync.startswith("local-sgd")
    pushes = pushes_of(log)
    found = [np.zeros(sum(fault_script.SIZES))]
    state = np.zeros_like(found[0])
    for decision in log.decisions:
        for command in map(from_text, decision["commands"]):
            if isinstance(command, Apply):
                total = np.zeros_like(state)
                for ticket, scale in zip(command.tickets, command.scales, strict=True):
                    total += scale * samples[[place for _, place in positions(pushes[ticket])]].sum(0)
                mean = total / len(command.tickets)
                state = momentum * state + mean
                found.append(found[-1] - rate * state)
    assert own_steps or momentum or sync == "downpour"
    return found


def check_weights(ended: Ended, log: RunLog) -> None:
    """Bit for bit: what learners had in the end, and what each minibatch began with, was never torn or too old."""
    versions = history(log, ended.order.sync)
    # Where a learner adds its own change to new weights, that rounds, and the log does not have it.
    rounding = 1e-9 if "overlap" in ended.order.sync else 0.0
    last = 0
    for learner in range(ended.order.learners):
        found = ended.text(f"weights-{learner}")
        if ended.summary["exits"][str(learner)] == 0:
            said = json.loads(found)
            flat = np.concatenate([np.array(part) for part in said["weights"]])
            assert said["version"] == len(versions) - 1, f"learner {learner} ended at {said['version']}"
            off = np.abs(flat - versions[-1]).max()
            assert off <= rounding, f"learner {learner}: {flat[:4]} is {off} from {versions[-1][:4]}"
            last += 1
    assert last, "no learner came to the end"
    if fault_script.momentum_of(ended.order.sync):
        known = {fault_script.digest_of(vector.tolist()): version for version, vector in enumerate(versions)}
        for path in ended.folder.glob("reads-*"):
            for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
                version, read = line.split()
                assert read in known, f"{path.name}: weights that never were, at version {version}"
                assert known[read] >= int(version), f"{path.name}: weights {known[read]} given out as {version}"
