"""A learner on another host: how long a push and a fetch take, and how soon sending stops when it is cancelled.

    python benchmarks/remote_server.py                          # 102 MB at 1 Gbit/s, with and without TLS
    python benchmarks/remote_server.py --bandwidth 100Mbit/s --megabytes 10 --rounds 5
    python benchmarks/remote_server.py --place spread           # 4 hosts with a learner each: servers on one, or on all

Two hosts of a lab: the servers are on host 0. A cycle of the learner on host 1 is one push and one fetch of all
parameters under `async`. The line is the time that the link needs for both at its rate (1,448 of the 1,514 bytes of a
packet are payload). For the cancel, a second learner beside the servers pushes while the first one is sending; the
policy `k-sync:1` then cancels the first. Counted is the time from that push until the interface of host 1 sends no data
any more (less than a twentieth of its rate; acknowledgements go on).

With `--place spread` each of 4 hosts has a learner, and all make the same number of cycles under `async`. The
parameters are in 4 shards: first all on host 0, then one on each host. Pushes per second are counted over all learners,
from the first cycle until the last learner is done. If all shards are on host 0, its link takes in 3 of 4 gradients and
sends 3 of 4 weights; if they are spread, each link takes in 3/4 of a gradient and 3/4 of the weights per cycle: half.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.lab import Lab, Network
from offbeat.lab.control import HostProcess
from offbeat.network import keys
from offbeat.number_format import format_seconds
from offbeat.spec import parse_count, parse_rate

PORT = 7000
PAYLOAD = 1448 / 1514
TENSORS = 161
SAMPLE_S = 0.001
DEADLINE_S = 300.0
HOST = "0" * 32
MOST_OF_LINE, STOPS_S = 1.113, 0.05  # promised: 1.90 s of 1.71, and 50 ms
HOSTS = 4  # with --place spread
SPREAD_GAIN = 1.6  # promised, of 2.0


def learn(request: Mapping[str, Any]) -> dict[str, Any]:
    """The program of a learner."""
    import torch

    from offbeat.measure.bench_learner import LR, Model
    from offbeat.server.learner.join import join
    from offbeat.server.learner.served_learner import ServedLearner

    learner = join()
    assert isinstance(learner, ServedLearner)
    items = request["bytes"] // 4
    model = Model([items // TENSORS] * (TENSORS - 1) + [items - (TENSORS - 1) * (items // TENSORS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    learner.prepare(model, optimizer)
    for parameter in model.all:
        parameter.grad = torch.randn_like(parameter)
    if request["do"] == "cycles":
        return {"cycles_s": [_cycle(learner, optimizer) for _ in range(request["rounds"] + 2)][2:]}
    if request["do"] == "together":
        _cycle(learner, optimizer)
        learner.barrier()
        start_s = time.monotonic()
        for _ in range(request["rounds"]):
            _cycle(learner, optimizer)
        end_s = time.monotonic()
        learner.finish()
        return {"start_s": start_s, "end_s": end_s}
    found: list[Any] = []
    folder = Path(request["folder"])
    for number in range(request["rounds"]):
        if learner.number == 0:  # beside the servers: pushes when the other one is in the middle of sending
            while not (folder / f"sending-{number}").exists():
                time.sleep(0.001)
            time.sleep(request["after_s"])
            _cycle(learner, optimizer)
            found.append(learner.pushed_s)
            while not (folder / f"stopped-{number}").exists():
                time.sleep(0.001)
        else:
            found.append(_cancelled_cycle(learner, optimizer, folder, number))
    return {"found": found}


def _cycle(learner: Any, optimizer: Any) -> float:
    start_s = time.monotonic()
    with learner.minibatch():
        optimizer.step()
    return time.monotonic() - start_s


def _cancelled_cycle(learner: Any, optimizer: Any, folder: Path, number: int) -> list[tuple[float, int]]:
    """Bytes that the interface has sent, over time, in a cycle that is cancelled."""
    counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
    seen: list[tuple[float, int]] = []
    done = threading.Event()

    def sample() -> None:
        while not done.is_set():
            seen.append((time.monotonic(), int(counter.read_text())))
            time.sleep(SAMPLE_S)

    thread = threading.Thread(target=sample)
    thread.start()
    (folder / f"sending-{number}").touch()
    _cycle(learner, optimizer)  # ends with the weights of the update that cancelled it
    done.set()
    thread.join()
    (folder / f"stopped-{number}").touch()
    return seen


def stopped_after_s(pushed_s: float, seen: list[tuple[float, int]], bytes_per_s: float) -> float:
    """From the push that cancels until nothing but acknowledgements is sent, in windows of some milliseconds."""
    last_s = pushed_s
    for (start_s, before), (end_s, after) in zip(seen[:-5], seen[5:], strict=True):
        if (after - before) / (end_s - start_s) > bytes_per_s / 20:
            last_s = max(last_s, start_s)
    return last_s - pushed_s


def bring(address: str, request: str) -> None:
    """The program of a host that joins with one learner, and with a server where they are spread."""
    from offbeat.network.port import parse_place, raw_of
    from offbeat.processes.launcher import LaunchPlan
    from offbeat.server.remote.gateway import enter
    from offbeat.server.remote.joining_host import JoinedHost, run_learners

    place, host = parse_place(address, "--bring"), os.urandom(16)
    entered, one = enter(place, keys.key_of(), host, 1, DEADLINE_S)
    raw_of(one).close()
    plan = LaunchPlan(command=[sys.executable, "-u", __file__, "--learn", request], environment=dict(os.environ))
    joined = JoinedHost(place=place, host=host, entered=entered)
    run_learners(joined, plan, lambda _, line: print(line, flush=True))


class Bench:
    """One lab, and the runs in it."""

    def __init__(self, given: argparse.Namespace, lab: Lab, folder: Path) -> None:
        self.given, self.lab, self.folder = given, lab, folder
        self.address = f"{lab.network.address(0)}:{PORT}"

    def serve(
        self, setting: Mapping[str, Any], first: int, *, key: Path | None
    ) -> tuple[HostProcess, dict[str, str], dict[str, str]]:
        """The servers on host 0; the environment of all learners, and how one beside them finds them."""
        trust = {keys.TRUST: keys.OPEN} if key is None else {keys.KEY: str(key)}
        environment = {**os.environ, **trust, "OMP_NUM_THREADS": "1", "OFFBEAT_SYNC": setting["line"]}
        plan = {"setting": setting, "seed": 0, "log": None, "listen": self.address, "first": first}
        # Its standard input is a pipe that we keep: the servers end with it.
        words = [sys.executable, "-u", "-m", "offbeat.server.supervisor", json.dumps(plan)]
        servers = self.lab.start(0, ["sh", "-c", 'sleep 600 | "$@"', "sh", *words], environment=environment)
        end_s = time.monotonic() + 60
        while '"listens"' not in servers.output:
            if time.monotonic() > end_s:
                raise SystemExit(f"the servers did not start: {servers.output}")
            time.sleep(0.02)
        told = json.loads(next(one for one in servers.output.splitlines() if '"listens"' in one))
        found = {"OFFBEAT_ADDRESS": told["address"], "OFFBEAT_TOKEN": told["token"], "OFFBEAT_GATEWAY": self.address}
        return servers, environment, found

    def run(self, line: str, learners: int, request: Mapping[str, Any], *, key: Path | None) -> list[dict[str, Any]]:
        """The answers of learners 0 ...; the last one is on host 1, the others beside the servers."""
        setting = {"line": line, "learners": learners, "shards": 1}
        servers, environment, beside = self.serve(setting, 0, key=key)
        started = []
        for number in range(learners):
            is_remote = number == learners - 1
            found = beside
            if is_remote:
                found = {"OFFBEAT_ADDRESS": f"tcp://{self.address}", "OFFBEAT_TOKEN": HOST}
            own = {**environment, **found, "OFFBEAT_LEARNER": str(number), "OFFBEAT_LEARNERS": str(learners)}
            words = [sys.executable, "-u", __file__, "--learn", json.dumps(request)]
            started.append(self.lab.start(int(is_remote), words, environment=own))
        answers = []
        for one in started:
            if one.wait(timeout_s=DEADLINE_S):
                raise SystemExit(f"a learner failed: {one.output[-2000:]}")
            answers.append(json.loads(one.output.splitlines()[-1]))
        servers.send_signal(9)
        self.lab.kill(0)
        self.lab.restore(0)
        return answers

    def pushes_per_s(self, key: Path | None, *, spread: bool) -> float:
        """Of one learner on each host, with all shards on host 0, or one on each."""
        request = {"do": "together", "bytes": self.given.megabytes * 10**6, "rounds": self.given.rounds}
        setting = {"line": "async", "learners": HOSTS, "shards": HOSTS, "spread": spread}
        _, environment, beside = self.serve(setting, 1, key=key)
        own = {**environment, **beside, "OFFBEAT_LEARNER": "0", "OFFBEAT_LEARNERS": str(HOSTS)}
        program, asked = [sys.executable, "-u", __file__], json.dumps(request)
        started = [self.lab.start(0, [*program, "--learn", asked], environment=own)]
        for host in range(1, HOSTS):
            words = [*program, "--bring", self.address, "--learn", asked]
            started.append(self.lab.start(host, words, environment=environment))
        end_s = time.monotonic() + DEADLINE_S
        while not all('"end_s"' in one.output for one in started):
            if time.monotonic() > end_s:
                told = "\n".join(one.output[-1000:] for one in started)
                raise SystemExit(f"the learners did not end within {DEADLINE_S:g} s: {told}")
            time.sleep(0.1)
        lines = [line for one in started for line in one.output.splitlines() if '"end_s"' in line]
        answers = [json.loads(line) for line in lines]
        for host in range(HOSTS):
            self.lab.kill(host)
            self.lab.restore(host)
        spent_s: float = max(one["end_s"] for one in answers) - min(one["start_s"] for one in answers)
        return HOSTS * int(self.given.rounds) / spent_s

    def cycles(self, key: Path | None) -> float:
        given = self.given
        request = {"do": "cycles", "bytes": given.megabytes * 10**6, "rounds": given.rounds}
        found: list[float] = self.run("async", 1, request, key=key)[0]["cycles_s"]
        return statistics.median(found)

    def cancel(self, key: Path | None) -> list[float]:
        given, folder = self.given, Path(tempfile.mkdtemp(dir=self.folder))
        line_s = given.megabytes * 1e6 / self.bytes_per_s
        request = {"do": "cancel", "bytes": given.megabytes * 10**6, "rounds": given.cancels, "folder": str(folder)}
        pushed, seen = self.run("k-sync:1", 2, {**request, "after_s": line_s / 3}, key=key)
        pairs = zip(pushed["found"], seen["found"], strict=True)
        return [stopped_after_s(at_s, [(s, n) for s, n in one], self.bytes_per_s) for at_s, one in pairs]

    @property
    def bytes_per_s(self) -> float:
        return parse_rate(self.given.bandwidth) * PAYLOAD


def _compare(bench: Bench, how: str, key: Path | None) -> float:
    """How many times as many pushes spread servers take."""
    size_bytes = bench.given.megabytes * 1e6
    first, spread = (bench.pushes_per_s(key, spread=is_spread) for is_spread in (False, True))
    lines = [HOSTS * bench.bytes_per_s / (share * size_bytes) for share in (HOSTS - 1, 2 * (HOSTS - 1) / HOSTS)]
    print(f"{how:5} servers on one host: {first:.2f} pushes/s (line {lines[0]:.2f})")
    print(f"{how:5} servers on {HOSTS} hosts: {spread:.2f} pushes/s (line {lines[1]:.2f}): {spread / first:.2f} times")
    return spread / first


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--learn", help=argparse.SUPPRESS)
    words.add_argument("--bandwidth", default="1Gbit/s")
    words.add_argument("--megabytes", type=parse_count, default=102)
    words.add_argument("--rounds", type=parse_count, default=10)
    words.add_argument("--cancels", type=parse_count, default=5)
    words.add_argument("--only", choices=("open", "key"))
    words.add_argument("--place", choices=("first", "spread"), default="first", help="spread: compare both on 4 hosts")
    words.add_argument("--bring", help=argparse.SUPPRESS)
    given = words.parse_args()
    if given.bring:
        bring(given.bring, given.learn)
        return 0
    if given.learn:
        print(json.dumps(learn(json.loads(given.learn))), flush=True)
        return 0
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"{given.megabytes} MB each way at {given.bandwidth}; {cores} cores, load {load:.1f}")
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        key = folder / "run.key"
        keys.write(key)
        for how, file in (("open", None), ("key", key)):
            if given.only not in (None, how):
                continue
            hosts = HOSTS if given.place == "spread" else 2
            with Lab(Network.of(hosts=hosts, bandwidth=given.bandwidth)) as lab:
                bench = Bench(given, lab, folder)
                if given.place == "spread":
                    missed += _compare(bench, how, file) < SPREAD_GAIN
                    continue
                line_s = 2 * given.megabytes * 1e6 / bench.bytes_per_s
                cycle_s = bench.cycles(file)
                print(f"{how:5} push and fetch: {cycle_s:.3f} s (median of {given.rounds}; line {line_s:.3f} s)")
                stops = bench.cancel(file)
                told = ", ".join(format_seconds(one) for one in stops)
                print(f"{how:5} cancelled while sending: stops after {told}", flush=True)
                missed += cycle_s > MOST_OF_LINE * line_s or max(stops) > STOPS_S
    if missed and given.place == "spread":
        print(f"missed: {SPREAD_GAIN:g} times the pushes of one server host")
    elif missed:
        print(f"missed: a cycle in {MOST_OF_LINE:g} times the line, and a stop in {format_seconds(STOPS_S)}")
    return min(1, missed)


if __name__ == "__main__":
    raise SystemExit(main())
