"""Whether groups across hosts keep their promises: one line for each check; the exit code is 1 if one fails. Minutes.

    python benchmarks/network_check.py                                     # all
    python benchmarks/network_check.py --shapes 2+1 4x2 --bytes --points 2 --faults kill-rank cut-out
    python benchmarks/network_check.py --shapes --bytes --key              # faults, with TLS

sums     On hosts x ranks of a lab: every line of all-reduce gives the plain sum of 9 types at each of 8 sizes (0 to
         20,011 items, 5 MB) and the same bits on all ranks; what goes over each socket is what the schedule costs and a
         header for each piece; the other collectives and messages are right. (tests/collectives/network_programs.py)
bytes    At 1 Gbit/s, 4 MiB and 20 MB: the kernel's counters of the interface, less 66 bytes a packet, are to 1 % what
         the schedule costs.
faults   4 ranks on 3 hosts reduce 1 MB again and again at 300 Mbit/s. At a random moment of each point a rank is
         killed, all of a host, a link is cut both ways or one way, or a rank is stopped. Every survivor must raise
         within the bound, name the rank (or one of its host), and end; on the hosts of the survivors no process and no
         shared memory is left.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from offbeat.lab import Lab, Network
from offbeat.lab.control import HostProcess

PROGRAMS = Path(__file__).parents[1] / "tests" / "collectives" / "network_programs.py"
SHAPES = ("2x1", "2x2", "2+1", "3x1", "3x2", "4x1", "4x2")
COUNTED = ("4x1", "2x2")
CUT_S = 10.0
GROUP_TIMEOUT_S = 8.0
OPEN, WITH_KEY = {"OFFBEAT_NETWORK_TRUST": "open"}, {"OFFBEAT_SECRET": "5e" * 32}  # of which a key is made
BOUNDS_S = {
    "kill-rank": 1.0, "kill-host": 1.0, "cut-both": CUT_S, "cut-out": CUT_S, "cut-in": CUT_S,
    "stop-rank": GROUP_TIMEOUT_S + 1,
}  # fmt: skip
FAULTY = 2  # the rank that a fault is for; it is alone on host 1
# Processes of a host but its first and those of this command itself, and files in shared memory.
LEFT = "for p in /proc/[0-9]*; do case ${p#/proc/} in 1|$$) ;; *) echo $p;; esac; done; ls -A /dev/shm"


def start(lab: Lab, ranks: Sequence[int], program: str, **own: str) -> list[HostProcess]:
    environment = {**os.environ, "OFFBEAT_STRATEGY": "ring", "OMP_NUM_THREADS": "1", **own}
    hosts = [host for host, count in enumerate(ranks) for _ in range(count)]
    words = [sys.executable, "-W", "ignore", str(PROGRAMS), program]
    return [
        lab.start(host, [*words, str(rank), str(len(hosts)), "{host0}"], environment=environment)
        for rank, host in enumerate(hosts)
    ]


def ranks_of(shape: str) -> list[int]:
    """Ranks on each host: `4x2`, or `2+1`."""
    hosts, _, each = shape.partition("x")
    return [int(each)] * int(hosts) if each else [int(word) for word in shape.split("+")]


def check_program(ranks: Sequence[int], programs: str, told: str, bandwidth: str | None = None) -> tuple[bool, str]:
    """Whether a program ends well on all ranks, and what it says there, or what is wrong."""
    with Lab(Network.of(hosts=len(ranks), bandwidth=bandwidth)) as lab:
        processes = start(lab, ranks, programs, TIMEOUT_S="200", **OPEN)
        for rank, process in enumerate(processes):
            if process.wait(timeout_s=1500) != 0 or told not in process.output:
                return False, f"rank {rank}: {process.output[-300:]}"
    return True, processes[0].output


def check_fault(fault: str, rng: random.Random, trust: Mapping[str, str]) -> tuple[float, str, str | None]:
    """The seconds until the last survivor had raised, whom it named, and what is wrong."""
    with Lab(Network.of(hosts=3, bandwidth="300Mbit/s")) as lab:
        processes = start(lab, [2, 1, 1], "reduce_for_ever", TIMEOUT_S=str(GROUP_TIMEOUT_S), **trust)
        deadline = time.monotonic() + 60
        while not all("started" in process.output for process in processes):
            if time.monotonic() > deadline:
                return 0.0, "", "the ranks did not start"
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
        last_s, named = 0.0, ""
        for rank in (0, 1, 3):
            try:
                processes[rank].wait(timeout_s=BOUNDS_S[fault] + 20)
            except TimeoutError:
                return 99.0, "", f"rank {rank} did not end"
            failed = re.search(r"at ([\d.]+): (.*)", processes[rank].output)
            if failed is None:
                return 99.0, "", f"rank {rank} did not raise: {processes[rank].output[-200:]}"
            last_s = max(last_s, float(failed[1]) - at)
            name = re.search(rf"rank {FAULTY} \([^)]*\)", failed[2])
            if name is None or name[0] != f"rank {FAULTY} (host1, 10.0.0.2)":
                return last_s, "", f"rank {rank} names another: {failed[2]}"
            named = name[0]
        for host in (0, 2):
            left = lab.run(host, ["sh", "-c", LEFT]).stdout.split()
            if left:
                return last_s, named, f"host {host} still has {' '.join(left)}"
        return last_s, named, None if last_s <= BOUNDS_S[fault] else f"it took {last_s:.2f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=SHAPES, help=f"of the sums (default {' '.join(SHAPES)})")
    parser.add_argument(
        "--bytes", nargs="*", default=COUNTED, help=f"shapes of the bytes (default {' '.join(COUNTED)})"
    )
    parser.add_argument("--faults", nargs="*", default=list(BOUNDS_S), choices=list(BOUNDS_S))
    parser.add_argument("--points", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--key", action="store_true", help="faults of a group with a key (the rest counts bytes)")
    given = parser.parse_args()
    wrong = 0
    for shape in given.shapes:
        since = time.monotonic()
        right, told = check_program(
            ranks_of(shape), "collectives,every_collective,messages,all_sums", "lines are right"
        )
        wrong += not right
        lines = re.search(r"(\d+) lines are right: (\d+) sums", told)
        found = f"{lines[1]} lines, {lines[2]} sums right, in {time.monotonic() - since:.0f} s" if lines else told
        print(f"sums   {shape}: {found}", flush=True)
    for shape in given.bytes:
        right, told = check_program(ranks_of(shape), "interface", "the interface is right", "1Gbit/s")
        wrong += not right
        most = max((abs(float(off)) for off in re.findall(r"([\d.]+) % off", told)), default=0.0)
        found = f"interface within {most:.2f} % of the price, in and out" if right else told
        print(f"bytes  {shape}: {found}", flush=True)
    rng = random.Random(given.seed)
    if given.faults:
        print(f"{'fault':<10} {'right':>8} {'bound':>7} {'slowest':>8}  named")
    for fault in given.faults:
        points = [check_fault(fault, rng, WITH_KEY if given.key else OPEN) for _ in range(given.points)]
        failures = [why for *_, why in points if why is not None]
        wrong += len(failures)
        most = max((seconds for seconds, *_ in points), default=0.0)
        names = ", ".join(sorted({name for _, name, _ in points if name}))
        share = f"{len(points) - len(failures)} of {len(points)}"
        print(
            f"{fault:<10} {share:>8} {BOUNDS_S[fault]:>5g} s {most:>6.2f} s  {names}", *failures, sep="; ", flush=True
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
