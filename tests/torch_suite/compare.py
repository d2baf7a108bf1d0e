"""Compares the tests of PyTorch that are executed with Gloo with those that pass with offbeat, on the CPU.

    cd tests; python -m torch_suite.compare                          # both lists; some five minutes on two cores
    cd tests; python -m torch_suite.compare --only 'all_reduce|send'   # a part of them
    cd tests; python -m torch_suite.compare --backend offbeat          # offbeat alone
    cd tests; python -m torch_suite.compare --hosts 2                  # the ranks are on two hosts of a lab

Each test runs in the smallest world in which upstream does not skip it for the size: 3 ranks (as in PyTorch's CI for
Gloo), 4 (some want exactly 4) or 8 (those of sub-groups). It ends with 1 if a test that is executed with Gloo is not
executed and passed with offbeat and has no entry in EXCEPTIONS, or if an entry is needless.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from offbeat.lab import Lab, Network
from offbeat.lab.control import HostProcess

WORLDS = (3, 4, 8)
SECONDS_PER_TEST = 60  # what hangs is stopped after this; with Gloo no test takes 3 s
SECONDS_PER_WORLD = {"fork": 900, "spawn": 3600}
LEFT_TO_MPI = "Only MPI supports"
ERROR_LINE = re.compile(r"[A-Za-z_][\w.]*(Error|Exception)\b.*")

# name of a test that is executed with Gloo -> why it cannot pass with another backend
EXCEPTIONS: dict[str, str] = {}


@dataclass(frozen=True)
class Outcome:
    """How one test ended: `outcome` is ok, fail or skip."""

    name: str
    outcome: str
    reason: str
    seconds: float
    world: int

    @property
    def executed(self) -> bool:
        return self.outcome != "skip"

    @property
    def wants_other_world(self) -> bool:
        return not self.executed and "world size" in self.reason

    @property
    def last_line(self) -> str:
        """Of a failure what was raised, without what C++ adds; of all else the end of the reason."""
        lines = [line.strip() for line in self.reason.splitlines() if line.strip()]
        raised = [line for line in lines if ERROR_LINE.match(line)]
        return (raised or lines or [""])[-1]


Outcomes = Mapping[str, Outcome]


@dataclass(frozen=True)
class Verdict:
    """What the comparison found. It is good if nothing is wrong and no exception needless."""

    executed: tuple[str, ...]  # with gloo
    passed: tuple[str, ...]  # of these, with offbeat
    excepted: tuple[str, ...]
    wrong: tuple[str, ...]
    needless: tuple[str, ...]
    beyond: tuple[str, ...]  # executed with offbeat and not with gloo

    @property
    def good(self) -> bool:
        return not self.wrong and not self.needless


def judge(gloo: Outcomes, offbeat: Outcomes, exceptions: Iterable[str]) -> Verdict:
    executed = {name for name, ended in gloo.items() if ended.executed}
    beyond = {name for name, ended in offbeat.items() if ended.executed and name not in executed}
    passed = {name for name, ended in offbeat.items() if ended.outcome == "ok"}
    allowed = set(exceptions)
    return Verdict(
        executed=tuple(sorted(executed)),
        passed=tuple(sorted(executed & passed)),
        excepted=tuple(sorted(executed - passed & allowed)),
        wrong=tuple(sorted((executed | beyond) - passed - allowed)),
        needless=tuple(sorted(allowed & passed | allowed - executed - beyond)),
        beyond=tuple(sorted(beyond)),
    )


def run_world(backend: str, world: int, names: Collection[str], only: str, spawn: bool) -> dict[str, Outcome]:
    """One run of the suite, in a process and a folder for temporary files of its own. Nothing of it is left."""
    start = "spawn" if spawn else "fork"
    with tempfile.TemporaryDirectory() as folder:
        results, log = Path(folder, "results"), Path(folder, "log")
        results.touch()
        environment = os.environ | {
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "TMPDIR": folder,
            "WORLD_SIZE": str(world),
            "SUITE_BACKEND": backend,
            "SUITE_START": start,
            "SUITE_SECONDS": str(SECONDS_PER_TEST),
        }
        command = [sys.executable, "-m", "torch_suite.suite", f"--results={results}", f"--only={only}", *names]
        with log.open("w") as output:
            suite = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
            try:
                how = f"the suite ended with {suite.wait(SECONDS_PER_WORLD[start])}"
            except subprocess.TimeoutExpired:
                how = f"the suite was stopped after {SECONDS_PER_WORLD[start]} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(suite.pid, signal.SIGKILL)
                suite.wait()
        found = [Outcome(**json.loads(line), world=world) for line in results.read_text("utf-8").splitlines()]
        if not found or (not names and suite.returncode not in (0, 1)):
            raise RuntimeError(f"{how} after {len(found)} tests\n{log.read_text('utf-8')[-2000:]}")
    lost = set(names) - {outcome.name for outcome in found}
    found += [Outcome(name, "fail", f"not run: {how}", 0.0, world) for name in sorted(lost)]
    return {outcome.name: outcome for outcome in found}


def run_suite(
    backend: str, names: Collection[str] = (), only: str = "", spawn: bool = False, worlds: Collection[int] = WORLDS
) -> dict[str, Outcome]:
    """The tests of these names (all, if there are none) that match, each in the smallest world that executes it."""
    ended: dict[str, Outcome] = {}
    for world in worlds:
        ended |= run_world(backend, world, names, only, spawn)
        names = sorted(name for name, outcome in ended.items() if outcome.wants_other_world)
        if not names:
            break
    return ended


def one_list(backend: str, ended: Outcomes) -> list[str]:
    executed = [outcome for outcome in ended.values() if outcome.executed]
    failed = [outcome for outcome in executed if outcome.outcome == "fail"]
    passed = len(executed) - len(failed)
    seconds = sum(outcome.seconds for outcome in ended.values())
    return [
        f"executed with {backend}: {len(executed)} of {len(ended)}, passed: {passed} ({seconds:.0f} s)",
        *(f"  failed: {outcome.name} ({outcome.world} ranks): {outcome.last_line}" for outcome in failed),
    ]


def table(verdict: Verdict, gloo: Outcomes, offbeat: Outcomes) -> list[str]:
    passed_beyond = sum(offbeat[name].outcome == "ok" for name in verdict.beyond)
    return [
        *one_list("gloo", gloo),
        f"of these, executed and passed with offbeat: {len(verdict.passed)}",
        f"beyond these, executed with offbeat: {len(verdict.beyond)}, passed: {passed_beyond}",
        f"exceptions: {len(verdict.excepted)}",
        *(f"  {name}: {EXCEPTIONS[name]}" for name in verdict.excepted),
        f"wrong: {len(verdict.wrong)}",
        *(f"  {name} ({offbeat[name].world} ranks): {offbeat[name].last_line}" for name in verdict.wrong),
        *(f"needless exception: {name}" for name in verdict.needless),
    ]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="torch_suite.compare", description="PyTorch's tests: Gloo against offbeat")
    parser.add_argument("--only", metavar="PATTERN", default="", help="only tests whose name matches")
    parser.add_argument("--backend", choices=("gloo", "offbeat"), help="run this one alone, and compare nothing")
    parser.add_argument("--spawn", action="store_true", help="spawn the ranks, do not fork them: far slower")
    parser.add_argument("--hosts", type=int, default=1, help="hosts of a lab that the ranks are on")
    parser.add_argument("--json", action="store_true", help="print all outcomes as JSON")
    given = parser.parse_args(arguments)
    if given.hosts > 1:
        with Lab(Network.of(hosts=given.hosts)) as lab:
            os.environ["SUITE_HOSTS"] = " ".join(str(process_on(lab, host)) for host in range(given.hosts))
            os.environ |= {"OFFBEAT_NETWORK_TRUST": "open", "OFFBEAT_INTERFACE": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
            return compare(given)
    return compare(given)


def process_on(lab: Lab, host: int) -> int:
    """A process on a host of the lab, by the number that it has outside."""
    there = lab.start(host, ["sh", "-c", "readlink /proc/self/ns/net; exec sleep 7200"])
    network = _first_line(there)
    for one in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str((one / "ns" / "net").readlink()) == network:
                return int(one.name)
    raise RuntimeError(f"no process of host {host} is seen from outside")


def _first_line(process: HostProcess) -> str:
    end = time.monotonic() + 10
    while "]" not in process.output and time.monotonic() < end:
        time.sleep(0.05)
    return process.output.strip()


def compare(given: argparse.Namespace) -> int:
    exceptions = {name for name in EXCEPTIONS if re.search(given.only, name)}
    if given.backend:
        alone = run_suite(given.backend, only=given.only, spawn=given.spawn)
        good = not any(ended.outcome == "fail" and ended.name not in exceptions for ended in alone.values())
        report: dict[str, object] = {given.backend: [asdict(ended) for ended in alone.values()]}
        lines = one_list(given.backend, alone)
    else:
        gloo = run_suite("gloo", only=given.only, spawn=given.spawn)
        names = sorted(n for n, ended in gloo.items() if ended.executed or ended.reason.startswith(LEFT_TO_MPI))
        offbeat = run_suite("offbeat", names, spawn=given.spawn) if names else {}
        verdict = judge(gloo, offbeat, exceptions)
        good = verdict.good
        lists = {"gloo": gloo, "offbeat": offbeat}
        report = {name: [asdict(outcome) for outcome in ended.values()] for name, ended in lists.items()}
        report |= {"verdict": asdict(verdict), "exceptions": EXCEPTIONS}
        lines = table(verdict, gloo, offbeat)
    print(json.dumps(report, indent=1) if given.json else "\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except RuntimeError as error:  # no test ran, or not all did: there is nothing to compare
        print(error, file=sys.stderr)
        sys.exit(2)
