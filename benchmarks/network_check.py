"""Whether groups across hosts keep their promises: one line for each check; the exit code is 1 if one fails. Minutes.

    python benchmarks/network_check.py                                     # all
    python benchmarks/network_check.py --shapes 2+1 4x2 --points 2 --faults kill-rank cut-out

sums     On hosts x ranks of a lab: every line of all-reduce gives the plain sum (9 types, 0 to 20,011 items, 5 MB) and
         the same bits on all ranks, what goes over each connection is what the schedule costs, and the other
         collectives are right. (tests/collectives/network_programs.py)
faults   4 ranks on 3 hosts reduce 1 MB again and again at 500 Mbit/s. At a random moment of each point a rank is
         killed, all of a host, a link is cut both ways or one way, or a rank is stopped. Every survivor must raise
         within the bound, name the rank (or one of its host), and end; no process is left in the lab.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from offbeat.lab import Lab, Network
from offbeat.lab.control import HostProcess

PROGRAMS = Path(__file__).parents[1] / "tests" / "collectives" / "network_programs.py"
SHAPES = ("2x1", "2x2", "2+1", "3x1", "3x2", "4x1", "4x2")
CUT_S = 10.0
GROUP_TIMEOUT_S = 8.0
BOUNDS_S = {
    "kill-rank": 1.0, "kill-host": 1.0, "cut-both": CUT_S, "cut-out": CUT_S, "cut-in": CUT_S,
    "stop-rank": GROUP_TIMEOUT_S + 1,
}  # fmt: skip
FAULTY = 2  # the rank that a fault is for; it is alone on host 1


def start(lab: Lab, ranks: Sequence[int], program: str, **own: str) -> list[HostProcess]:
    environment = {**os.environ, "OFFBEAT_NETWORK": "open", "OFFBEAT_STRATEGY": "ring", "OMP_NUM_THREADS": "1", **own}
    hosts = [host for host, count in enumerate(ranks) for _ in range(count)]
    words = [sys.executable, "-W", "ignore", str(PROGRAMS), program]
    return [
        lab.start(host, [*words, str(rank), str(len(hosts)), "{host0}"], environment=environment)
        for rank, host in enumerate(hosts)
    ]


def check_sums(shape: str) -> str | None:
    """None, or what is wrong."""
    hosts, _, each = shape.partition("x")
    ranks = [int(each)] * int(hosts) if each else [int(word) for word in shape.split("+")]
    with Lab(Network.of(hosts=len(ranks))) as lab:
        processes = start(lab, ranks, "collectives,sums", TIMEOUT_S="200")
        for rank, process in enumerate(processes):
            if process.wait(timeout_s=400) != 0 or "lines are right" not in process.output:
                return f"rank {rank}: {process.output[-300:]}"
    return None


def check_fault(fault: str, rng: random.Random) -> tuple[float, str | None]:
    """The seconds until the last survivor had raised, and what is wrong."""
    with Lab(Network.of(hosts=3, bandwidth="500Mbit/s")) as lab:
        processes = start(lab, [2, 1, 1], "reduce_for_ever", TIMEOUT_S=str(GROUP_TIMEOUT_S))
        deadline = time.monotonic() + 60
        while not all("started" in process.output for process in processes):
            if time.monotonic() > deadline:
                return 0.0, "the ranks did not start"
            time.sleep(0.02)
        time.sleep(rng.uniform(0.0, 0.5))
        at = time.time()
        if fault == "kill-rank":
            processes[FAULTY].send_signal(signal.SIGKILL)
        elif fault == "kill-host":
            lab.kill(1)
        elif fault == "stop-rank":
            processes[FAULTY].send_signal(signal.SIGSTOP)
        else:
            lab.cut(1, {"cut-both": "both", "cut-out": "out", "cut-in": "in"}[fault])  # type: ignore[arg-type] # of its three words
        last_s = 0.0
        for rank in (0, 1, 3):
            try:
                processes[rank].wait(timeout_s=BOUNDS_S[fault] + 20)
            except TimeoutError:
                return 99.0, f"rank {rank} did not end"
            failed = re.search(r"at ([\d.]+): (.*)", processes[rank].output)
            if failed is None:
                return 99.0, f"rank {rank} did not raise: {processes[rank].output[-200:]}"
            last_s = max(last_s, float(failed[1]) - at)
            if f"rank {FAULTY} (host1, 10.0.0.2)" not in failed[2]:
                return last_s, f"rank {rank} names another: {failed[2]}"
        return last_s, None if last_s <= BOUNDS_S[fault] else f"it took {last_s:.2f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=SHAPES)
    parser.add_argument("--faults", nargs="*", default=list(BOUNDS_S))
    parser.add_argument("--points", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    wrong = 0
    for shape in given.shapes:
        since = time.monotonic()
        why = check_sums(shape)
        wrong += why is not None
        print(f"sums {shape}: {why or f'right, in {time.monotonic() - since:.0f} s'}", flush=True)
    rng = random.Random(given.seed)
    for fault in given.faults:
        found = [check_fault(fault, rng) for _ in range(given.points)]
        failures = [why for _, why in found if why is not None]
        wrong += len(failures)
        most = max(seconds for seconds, _ in found)
        told = (
            f"{len(found) - len(failures)} of {len(found)} named within {BOUNDS_S[fault]:g} s, the slowest {most:.2f} s"
        )
        print("; ".join([f"{fault}: {told}", *failures]), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
