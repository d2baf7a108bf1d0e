"""Policies that are woken by a clock, for real and simulated with the same draws; one of 4 learners is 6 times slower.

    python benchmarks/timers.py

For every policy: seconds per update, and by the log of the real run how long the updates that a wake made have waited,
counted from when the policy asked for the wake. It ends with 1 where a policy is more than 10 % off its simulation, or
a wake came before its time.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.machine import machine_facts
from offbeat.measure import policies_bench
from offbeat.policies import Wake, Woke, create
from offbeat.policies.events import EVENTS, from_text
from offbeat.runs.log import read_log
from offbeat.simulate import server
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.compute import parse_law

LEARNERS, SLOW, FACTOR = 4, 3, 6.0
LAW = "shifted-exp:0.03,0.02"
LINES = ("grace-sync:3,grace=50ms", "grace-sync:2,grace=20ms", "deadline-sync:100ms", "backup:1", "full-sync")
SECONDS = 10.0  # of each real run, about


class Waits(NamedTuple):
    """What a log says of wakes: how long after they were asked for they came, and how long that should have been."""

    updates: int
    woken: int  # updates that a wake made
    asked_s: tuple[float, ...]
    took_s: tuple[float, ...]


def waits_of(decisions: Iterable[Mapping[str, Any]]) -> Waits:
    updates = woken = 0
    asked: list[float] = []
    took: list[float] = []
    pending: tuple[float, float] | None = None  # when it was asked for, and for when
    for record in decisions:
        event = from_text(record["event"])
        assert isinstance(event, EVENTS)
        makes = sum(text.startswith("apply ") for text in record["commands"])
        updates += makes
        if isinstance(event, Woke) and pending is not None:
            if makes:
                woken += makes
                asked.append(pending[1] - pending[0])
                took.append(event.at_s - pending[0])
            pending = None
        for text in record["commands"]:
            command = from_text(text)
            if isinstance(command, Wake):
                pending = event.at_s, command.at_s
    return Waits(updates, woken, tuple(asked), tuple(took))


def main() -> int:
    speeds = [1.0 / (FACTOR if learner == SLOW else 1.0) for learner in range(LEARNERS)]
    cluster = Cluster(learners=LEARNERS, law=parse_law(LAW), speeds=tuple(speeds))
    law = f"{LAW} learner={SLOW},factor={FACTOR:g}"
    facts = machine_facts()
    print(f"{LEARNERS} learners, {law}; {facts['cores']} cores, load {facts['load']}\n")
    print(f"{'policy':<26}{'updates':>8}{'real':>12}{'simulated':>12}{'off':>8}  made by a wake, and their waits")
    failed = False
    for line in LINES:
        create(line, expect=LEARNERS)
        updates = round(SECONDS / server.run(line, cluster, updates=2000).seconds_per_update)
        decisions: list[dict[str, Any]] = []
        server.run(line, cluster, updates=updates, write=decisions.append)
        simulated = policies_bench.steady(decisions, updates)
        with tempfile.TemporaryDirectory(prefix="offbeat-bench-") as folder:
            log = Path(folder) / "run.jsonl"
            request = policies_bench.PoliciesRequest(lines=(line,), learners=LEARNERS, updates=updates)
            policies_bench.run(request, law, line, updates, log, 60.0)
            real_decisions = read_log(log).decisions
        real = policies_bench.steady(real_decisions, updates)
        off = real.seconds_per_update / simulated.seconds_per_update - 1
        waits = waits_of(real_decisions)
        told = ""
        if waits.woken:
            early = sum(took < asked for asked, took in zip(waits.asked_s, waits.took_s, strict=True))
            middle, most = statistics.median(waits.took_s), max(waits.took_s)
            told = f"{waits.woken} of {waits.updates}: {1000 * min(waits.took_s):.1f} to {1000 * most:.1f} ms, "
            told += f"median {1000 * middle:.1f}; {early} early"
            failed |= early > 0
        failed |= abs(off) > policies_bench.WITHIN
        seconds = f"{1000 * real.seconds_per_update:>9.1f} ms{1000 * simulated.seconds_per_update:>9.1f} ms"
        print(f"{line:<26}{updates:>8}{seconds}{100 * off:>+7.1f}%  {told}", flush=True)
    print("\nall within 10 %, and no wake before its time" if not failed else "\nnot as promised")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
