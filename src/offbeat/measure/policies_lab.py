"""The learners of `offbeat bench policies --lab` on the hosts of a lab, and their links as the simulator has them.

Servers are on host 0, which has as many learners as the others. These join as on real hosts, by `offbeat work`, one
host after the other, so that learner h is on host h where each has one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from offbeat.errors import OffbeatError
from offbeat.lab import Lab
from offbeat.lab.control import HostProcess
from offbeat.measure import bench_learner
from offbeat.measure.harness import environment
from offbeat.measure.rank_bench import LabRequest
from offbeat.network.keys import OPEN, TRUST
from offbeat.simulate.cluster import Wires
from offbeat.simulate.host_links import HostLinks

ITEM_BYTES = 4  # float32
_PORT = 7000
_JOIN_S = 60.0
_LOOK_S = 0.05


def wires_of(lab: LabRequest, servers: int, parameters: int) -> Wires:
    """Gradients and weights of so many parameters, on links of which only the bandwidth takes time."""
    placed = tuple(lab.host_of(learner) for learner in range(lab.ranks))
    hosts = HostLinks(learners=placed, servers=(0,) * servers, topology=lab.topology)
    return Wires(size_bytes=ITEM_BYTES * parameters, hosts=hosts)


def run_on_hosts(
    lab: LabRequest, line: str, law: str, *, servers: int, seed: int, parameters: int, updates: int, log: Path,
    timeout_s: float,
) -> None:  # fmt: skip
    """Real learners on the hosts of a fresh lab, until so many updates are made; the log is left."""
    asked = json.dumps({"do": "train", "updates": updates, "parameters": parameters})
    script = [bench_learner.__file__, asked]
    offbeat = [sys.executable, "-m", "offbeat"]
    own = environment({TRUST: OPEN})
    end_s = time.monotonic() + timeout_s
    with ExitStack() as stack:
        hosts = stack.enter_context(Lab(lab.network))
        address = f"{lab.network.address(0)}:{_PORT}"
        run = [*offbeat, "run", "--sync", line, "--learners", str(lab.ranks), "--servers", str(servers)]
        run += ["--slow", law, "--seed", str(seed), "--log", str(log)]
        run += ["--listen", address, "--remote", str(lab.ranks - lab.ranks_each)]
        started = [hosts.start(0, [*run, *script], environment=own)]
        for host in range(1, lab.network.hosts):
            join = [*offbeat, "work", "--join", address, "--learners", str(lab.ranks_each), *script]
            started.append(_join(partial(hosts.start, host, join, environment=own), host, started[0]))
        for host, process in enumerate(started):
            try:
                code = process.wait(timeout_s=max(1.0, end_s - time.monotonic()))
            except TimeoutError:
                raise OffbeatError(f"bench: {line} with {law} did not end within {timeout_s:.0f} s") from None
            if code:
                raise OffbeatError(f"bench: host {host} ended with exit code {code}: {_last_line(process.output)}")


def _join(start: Callable[[], HostProcess], host: int, run: HostProcess) -> HostProcess:
    """Started again where it was too early, until its learners are in the run."""
    end_s = time.monotonic() + _JOIN_S
    process = start()
    while "joined" not in process.output:
        if run.has_ended:
            raise OffbeatError(f"bench: the run ended before host {host} joined: {_last_line(run.output)}")
        if time.monotonic() > end_s:
            raise OffbeatError(f"bench: host {host} did not join: {_last_line(process.output)}")
        if process.has_ended and "joined" not in process.output:
            process = start()
        time.sleep(_LOOK_S)
    return process


def _last_line(text: str) -> str:
    said: Sequence[str] = [line.strip() for line in text.splitlines() if line.strip()]
    return said[-1] if said else "it said nothing"
