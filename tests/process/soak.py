"""A training on hosts of a lab in which every three seconds a learner is killed, cut off or stopped.

    cd tests && python -m process.soak [--minutes 20] [--seed 0] [--sync async]

Six learners on three hosts, each a program of its own (`offbeat work`). The servers are on a fourth, with the learner
that every run has on its own host to evaluate; that one is left alone. A learner that is killed is started again by its
program, three times in ten minutes; then the program ends, and is started again here. A cut is one of the whole host.

At the end `remote_runs` judges the run by its log: 0 lost, 0 doubled, the weights those of the log. The accuracy is
within a point of that of a run without faults and with as many epochs (medians of the last evaluations). And nothing
grows: memory and descriptors of coordinator, servers, gateway and road processes are sampled, and compared between the
first and the last quarter of what follows the first two minutes.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from offbeat.lab import Lab, Network
from offbeat.lab.control import HostProcess
from offbeat.runs.run_folder import RunDir
from process import role_pids
from process.remote_runs import LIMIT_S, RemoteRun, RunFailedError

HOSTS, LEARNERS, BANDWIDTH = 3, 6, "200Mbit/s"
EVERY_S, SAMPLE_S = 3.0, 5.0
CUT_S, STOP_S = (0.5, 2.5), (0.5, 8.0)  # how long
SETTLED_S = 120.0  # after which nothing grows
MOST_MIB, MOST_DESCRIPTORS = 8.0, 4  # by which a quarter may be above another
POINT = 0.01
EVALUATIONS = 5  # whose median is the accuracy
FAULTS = ("kill", "cut", "stop")


class Sample(NamedTuple):
    """Of one role at a time: how many processes have it, and what each of them holds on average."""

    at_s: float
    role: str
    processes: int
    mib: float
    descriptors: float


class Growth(NamedTuple):
    """Of one role: medians of the first and the last quarter, and a straight line through all."""

    role: str
    processes: tuple[float, float]
    mib: tuple[float, float]
    descriptors: tuple[float, float]
    kib_per_minute: float

    @property
    def is_well(self) -> bool:
        grown = self.processes[1] > self.processes[0] and self.processes[1] > LEARNERS
        return (
            not grown
            and self.mib[1] - self.mib[0] <= MOST_MIB
            and self.descriptors[1] - self.descriptors[0] <= MOST_DESCRIPTORS
        )

    def __str__(self) -> str:
        before, after = (
            f"{count:g} of {mib:.1f} MiB and {descriptors:g} descriptors"
            for count, mib, descriptors in zip(self.processes, self.mib, self.descriptors, strict=True)
        )
        return f"{self.role:12} {before} -> {after}; {self.kib_per_minute:+.1f} KiB a minute"


def growth(role: str, samples: Sequence[Sample]) -> Growth:
    """Of a role's samples in order, at least four."""
    quarter = len(samples) // 4
    parts = samples[:quarter], samples[-quarter:]
    processes, mib, descriptors = (
        tuple(statistics.median(getattr(one, name) for one in part) for part in parts)
        for name in ("processes", "mib", "descriptors")
    )
    line = statistics.linear_regression([one.at_s for one in samples], [one.mib for one in samples])
    return Growth(
        role, (processes[0], processes[1]), (mib[0], mib[1]), (descriptors[0], descriptors[1]), 60 * 1024 * line.slope
    )


class SoakRun(RemoteRun):
    """Each place is a program; those of a host are `HOSTS` apart."""

    def __init__(self, lab: Lab, folder: Path, line: str, seed: int) -> None:
        self.places_of_learners = range(LEARNERS)
        super().__init__(
            lab, folder, line, seed=seed, others=self.places_of_learners,
            words=["--slow", "exp:0.03", "--servers", "2"],
        )  # fmt: skip
        self.reasons: Counter[str] = Counter()

    def host_of(self, place: int) -> int:
        return 1 + place % HOSTS

    def join_again(self) -> None:
        """Whoever has left."""
        for place, process in tuple(self.hosts.items()):
            if process.has_ended:
                lines = process.output.strip().splitlines()
                self.reasons[f"{process.wait(0)}: {lines[-1] if lines else ''}"] += 1
                self.join(place)


class Nemesis:
    """What happens to the learners, and when it is over."""

    def __init__(self, run: SoakRun, seed: int) -> None:
        self.run, self._rng = run, random.Random(seed)
        self.struck: Counter[str] = Counter()
        self._ends: list[tuple[float, Callable[[], object]]] = []
        self._cut: set[int] = set()

    def strike(self) -> None:
        place, fault = self._rng.choice(self.run.places_of_learners), self._rng.choice(FAULTS)
        host, now_s = self.run.host_of(place), time.monotonic()
        if fault == "cut":
            length_s = self._rng.uniform(*CUT_S)
            if host not in self._cut:
                self._cut.add(host)
                self.run.lab.cut(host, self._rng.choice(("both", "in", "out")))
                self._ends.append((now_s + length_s, lambda: self._restore(host)))
        else:
            length_s = self._rng.uniform(*STOP_S)
            learner = self._signal(host, place // HOSTS, 9 if fault == "kill" else 19)
            if not learner:
                self.struck["nobody there"] += 1
                return
            if fault == "stop":
                self._ends.append((now_s + length_s, lambda: self.run.lab.run(host, ["kill", "-CONT", learner])))
        self.struck[fault] += 1

    def _signal(self, host: int, which: int, number: int) -> str:
        words = [sys.executable, role_pids.__file__, "learner", str(number), str(which)]
        return self.run.lab.run(host, words).stdout.strip()

    def _restore(self, host: int) -> None:
        self._cut.discard(host)
        self.run.lab.restore(host)

    def end_those_due(self, now_s: float) -> None:
        due = [end for at_s, end in self._ends if at_s <= now_s]
        self._ends = [one for one in self._ends if one[0] > now_s]
        for end in due:
            end()


def sampled(run: SoakRun, at_s: float) -> list[Sample]:
    """What the kernel says of the processes of the run's host."""
    said = run.lab.run(0, [sys.executable, role_pids.__file__, "all", "0"]).stdout
    found = []
    for line in said.splitlines():
        role, processes, kib, descriptors = line.split()
        found.append(
            Sample(at_s, role, int(processes), int(kib) / 1024 / int(processes), int(descriptors) / int(processes))
        )
    return found


def soaked(run: SoakRun, minutes: float, seed: int) -> list[Sample]:
    """Until the time is over, all learners push again."""
    nemesis, samples = Nemesis(run, seed), list[Sample]()
    begin_s = time.monotonic()
    strike_s = sample_s = begin_s
    while (now_s := time.monotonic()) < begin_s + 60 * minutes:
        if run.process.has_ended:
            raise RunFailedError(f"the run ended with {run.process.wait(0)}: {run.process.output[-1500:]}")
        nemesis.end_those_due(now_s)
        if now_s >= strike_s:
            strike_s += EVERY_S
            nemesis.strike()
        if now_s >= sample_s:
            sample_s += SAMPLE_S
            samples += sampled(run, now_s - begin_s)
        run.join_again()
        time.sleep(0.05)
    nemesis.end_those_due(float("inf"))
    after_s = run.tail.now_s()
    print(f"struck: {dict(nemesis.struck)}", flush=True)

    def are_back() -> bool:
        run.join_again()
        return all(run.tail.pushed_after([learner], after_s) is not None for learner in range(1 + LEARNERS))

    run.wait_for(are_back, "all learners push again")
    updates = len(run.tail.updates)
    longest_s = run.tail.stall_s(0.0, after_s)
    print(f"{updates} updates in {after_s:.0f} s, the longest time without one {longest_s:.1f} s")
    for reason, times in run.reasons.most_common():
        print(f"{times} times a program ended and was started again: {reason[:160]}")
    return samples


def accuracy_of(folder: Path, epochs: int) -> float:
    metrics = [one for one in RunDir(folder).read_metrics() if "accuracy" in one and one["epoch"] <= epochs]
    return float(statistics.median(one["accuracy"] for one in metrics[-EVALUATIONS:]))


def undisturbed(lab: Lab, folder: Path, line: str, seed: int, epochs: int) -> float:
    """The accuracy of a run without faults, after as many epochs; on one host, with nobody slow."""
    words = [
        sys.executable,
        "-m",
        "offbeat",
        "train",
        "--sync",
        line,
        "--learners",
        str(1 + LEARNERS),
        "--seed",
        str(seed),
    ]
    words += ["--train.epochs", str(epochs), "--save.every-epochs", "0", "--run-dir", str(folder), "--servers", "2"]
    process: HostProcess = lab.start(0, words)
    if code := process.wait(30 * LIMIT_S):
        raise RunFailedError(f"the run without faults ended with {code}: {process.output[-1500:]}")
    return accuracy_of(folder, epochs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sync", default="async")
    given = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="offbeat-soak-") as name,
        Lab(Network.of(hosts=1 + HOSTS, bandwidth=BANDWIDTH)) as lab,
    ):
        folder = Path(name)
        run = SoakRun(lab, folder, given.sync, given.seed)
        run.join_all()
        samples = soaked(run, given.minutes, given.seed)
        found = run.finish()
        print(f"lost {found.lost}, doubled {found.doubled}, wrong {list(found.wrong)}; {found.samples} samples applied")
        settled = [one for one in samples if one.at_s >= min(SETTLED_S, 30 * given.minutes)]
        grown = [growth(role, [one for one in settled if one.role == role]) for role in {one.role for one in settled}]
        for one in sorted(grown):
            print(one, flush=True)
        metrics = RunDir(run.folder).read_metrics()
        epochs = metrics[-1]["epoch"]
        with_faults = accuracy_of(run.folder, epochs)
        without = undisturbed(lab, folder / "undisturbed", given.sync, given.seed, epochs)
        print(f"accuracy after {epochs} epochs {100 * with_faults:.1f} %, without faults {100 * without:.1f} %")
    is_well = not (found.lost or found.doubled or found.wrong) and all(one.is_well for one in grown)
    is_well = is_well and with_faults >= without - POINT
    print("well" if is_well else "NOT WELL")
    return 0 if is_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
