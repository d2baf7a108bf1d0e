"""How fast schedules are built, proved and priced, and how fast commands start.

    make bench

Every line is measured in a process of its own, so that its peak memory is its own; of commands the best
of five is shown, since the machine may be busy.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time

import numpy as np

LINES = {256: ("ring", "torus:16x16", "halving-doubling"), 1024: ("ring", "torus:32x32", "halving-doubling")}
COMMANDS = (
    "--version",
    "strategies",
    "topology",
    "schedule ring",
    "schedule --topology dgx1",
    "simulate k-sync:4",
    "compare",
)

MEASURE = """
import json, resource, sys, time
from offbeat import schedules, topology
line, ranks, work = sys.argv[1], int(sys.argv[2]), sys.argv[3]
start = time.perf_counter()
schedule = schedules.build(line, ranks=ranks)
built = time.perf_counter()
if work == "prove":
    schedules.verify(schedule)
else:
    schedules.price(schedule, topology.build("uniform", ranks=ranks), 100_000_000)
done = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([built - start, done - built, peak]))
"""


def measure(line: str, ranks: int, work: str) -> tuple[float, float, float]:
    words = [sys.executable, "-c", MEASURE, line, str(ranks), work]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    build_s, work_s, peak_bytes = json.loads(done.stdout)
    return build_s, work_s, peak_bytes


def main() -> None:
    load = os.getloadavg()[0]
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {os.cpu_count()} cores, load {load:.1f}\n")
    print(f"{'schedule':<34}{'build':>9}{'work':>16}{'peak memory':>14}")
    for ranks, work in ((256, "prove"), (1024, "price")):
        total = most = 0.0
        for line in LINES[ranks]:
            build_s, work_s, peak = measure(line, ranks, work)
            total, most = total + build_s + work_s, max(most, peak)
            label = f"{line} on {ranks} ranks"
            print(f"{label:<34}{build_s:>7.2f} s{work:>8}{work_s:>6.2f} s{peak / 1e6:>11.0f} MB")
        print(f"{'in all':<34}{total:>23.2f} s{most / 1e6:>13.0f} MB\n")
    print(f"{'command':<36}{'start to end':>12}")
    for command in COMMANDS:
        best = min(start_to_end_s(command) for _ in range(5))
        print(f"{'offbeat ' + command:<36}{best:>10.2f} s")


def start_to_end_s(command: str) -> float:
    """With its output captured: without pipes, waiting with a timeout would round up to steps of 50 ms."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "offbeat", *command.split()], capture_output=True, check=True, timeout=60)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
