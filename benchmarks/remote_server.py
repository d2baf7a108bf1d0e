"""A learner on another host: how long a push and a fetch take, and how soon sending stops when it is cancelled.

    python benchmarks/remote_server.py                          # 102 MB at 1 Gbit/s, with and without TLS
    python benchmarks/remote_server.py --bandwidth 100Mbit/s --megabytes 10 --rounds 5
    python benchmarks/remote_server.py --place spread           # 4 hosts with a learner each: servers on one, or on all
    python benchmarks/remote_server.py --against rpc,rpc-tuned,ray-tuned --rounds 3 --seconds 5s

Two hosts of a lab: the servers are on host 0. A cycle of the learner on host 1 is one push and one fetch of all
parameters under `async`. The line is the time that the link needs for both at its rate (1,448 of the 1,514 bytes of a
packet are payload). For the cancel, a second learner beside the servers pushes while the first one is sending; the
policy `k-sync:1` then cancels the first. Counted is the time from that push until the interface of host 1 sends no data
any more (less than a twentieth of its rate; acknowledgements go on).

With `--place spread` each of 4 hosts has a learner, and all make the same number of cycles under `async`. The
parameters are in 4 shards: first all on host 0, then one on each host. Pushes per second are counted over all learners,
from the first cycle until the last learner is done. If all shards are on host 0, its link takes in 3 of 4 gradients and
sends 3 of 4 weights; if they are spread, each link takes in 3/4 of a gradient and 3/4 of the weights per cycle: half.

With `--against` the link is not shaped, two learners on host 1 push and fetch as in `offbeat bench server` (also with
`in_place=True`, which copies no weights into the parameters), and so do those of other systems, in turn. The hosts of a
lab are one machine: `rpc` is torch.distributed.rpc with what it chooses between them, `rpc-tuned` sends one flat tensor
over `uv` and `basic`, its transport and channel for one TCP connection. What the interface of host 1 sends per push is
told, since a channel could go past the network.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from offbeat.lab import Lab, Network
from offbeat.lab.control import HostProcess
from offbeat.measure.server_bench import sizes_of
from offbeat.network import keys
from offbeat.number_format import format_seconds
from offbeat.spec import parse_count, parse_rate, parse_seconds

PORT = 7000
PAYLOAD = 1448 / 1514
TENSORS = 161
SAMPLE_S = 0.001
DEADLINE_S = 300.0
HOST = "0" * 32
MOST_OF_LINE, STOPS_S = 1.113, 0.05  # promised: 1.90 s of 1.71, and 50 ms
HOSTS = 4  # with --place spread
SPREAD_GAIN = 1.6  # promised, of 2.0
LEARNERS = 2  # with --against
RIVALS = {  # program, words, how many times as many pushes are promised
    "rpc": ("rpc_server.py", ["--form", "plain"], 1.3),
    "rpc-tuned": ("rpc_server.py", ["--form", "tuned", "--transports", "uv", "--channels", "basic"], 1.3),
    "ray": ("ray_server.py", ["--form", "plain"], 2.0),
    "ray-tuned": ("ray_server.py", ["--form", "tuned"], 2.0),
}


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

    # --- against others ---------------------------------------------------------------------------------------------

    def others_rate(self, system: str) -> tuple[float, float]:
        """Pushes per second of another system, and bytes that host 1 has sent per push."""
        program, words, _ = RIVALS[system]
        file = str(Path(__file__).parent / "baselines" / program)
        words = [sys.executable, "-u", file, *words, "--learners", str(LEARNERS), "--seconds", str(self.given.seconds)]
        words += ["--sizes", ",".join(map(str, self.sizes))]
        folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # short, for Ray's sockets
        own, other = (self.lab.network.address(host) for host in (0, 1))
        if program.startswith("rpc"):
            at = ["--store", str(folder / "store"), "--device", "eth0"]
            ways = [[*at, "--part", "server"], [*at, "--part", "learners"]]
        else:
            at = ["--folder", str(folder)]
            ways = [[*at, "--own", own, "--other", other], [*at, "--own", other, "--join", own]]
        answers = 1 if program.startswith("rpc") else 0
        before = self.sent_bytes()
        started = [self.lab.start(host, [*words, *ways[host]], environment=dict(os.environ)) for host in (0, 1)]
        try:
            code = started[answers].wait(timeout_s=DEADLINE_S)
            sent = self.sent_bytes() - before
            output = started[answers].output
            if code:
                raise SystemExit(f"{system} failed: {output[-3000:]} {started[1 - answers].output[-1000:]}")
        finally:
            self.sweep()
            shutil.rmtree(folder, ignore_errors=True)
        found = json.loads(output.splitlines()[-1])
        return float(found["per_s"]), sent / found["pushes"]

    def our_rate(self, key: Path | None, *, in_place: bool = False) -> tuple[float, float]:
        """The same of offbeat: the program of `offbeat bench server`, whose weights are checked at the end."""
        setting = {"line": "async", "learners": LEARNERS, "shards": 1}
        _, environment, _ = self.serve(setting, 0, key=key)
        request = {"do": "push", "sizes": self.sizes, "seconds": self.given.seconds, "warm_up": 5, "in_place": in_place}
        found = {"OFFBEAT_ADDRESS": f"tcp://{self.address}", "OFFBEAT_TOKEN": HOST, "OFFBEAT_LEARNERS": str(LEARNERS)}
        words = [sys.executable, "-u", "-m", "offbeat.measure.bench_learner", json.dumps(request)]
        before, started = self.sent_bytes(), []
        for number in range(LEARNERS):
            own = {**environment, **found, "OFFBEAT_LEARNER": str(number)}
            started.append(self.lab.start(1, words, environment=own))
        try:
            if any(one.wait(timeout_s=DEADLINE_S) for one in started):
                raise SystemExit(f"offbeat failed: {' '.join(one.output[-1000:] for one in started)}")
        finally:
            sent = self.sent_bytes() - before
            self.sweep()
        answers = [json.loads(one.output.splitlines()[-1]) for one in started]
        seconds = max(one["end_s"] for one in answers) - min(one["start_s"] for one in answers)
        pushes = sum(one["cycles"] for one in answers)
        return pushes / seconds, sent / pushes

    @property
    def sizes(self) -> list[int]:
        return sizes_of(self.given.megabytes * 10**6 // 4)

    def sent_bytes(self) -> int:
        return int(self.lab.run(1, ["cat", "/sys/class/net/eth0/statistics/tx_bytes"]).stdout)

    def sweep(self) -> None:
        """Nothing of one system is left when the next one is measured."""
        for host in (0, 1):
            self.lab.kill(host)
            self.lab.restore(host)


def against(given: argparse.Namespace, folder: Path, key: Path, names: list[str]) -> int:
    """All systems in turn, and how many times as many pushes ours takes; whether that is as promised."""
    rates: dict[str, list[float]] = {}
    with Lab(Network.of(hosts=2)) as lab:
        bench = Bench(given, lab, folder)
        turns: dict[str, Callable[[], tuple[float, float]]] = {
            "offbeat": lambda: bench.our_rate(None),
            "offbeat in place": lambda: bench.our_rate(None, in_place=True),
            "offbeat with TLS": lambda: bench.our_rate(key),
            **{name: partial(bench.others_rate, name) for name in names},
        }
        for number in range(given.rounds):
            for name, turn in turns.items():
                per_s, sent = turn()
                rates.setdefault(name, []).append(per_s)
                passed = sent / (given.megabytes * 1e6)
                print(f"round {number}: {name:16} {per_s:6.2f}/s; host 1 sent {passed:.2f} of each push", flush=True)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    missed = 0
    for name, found in rates.items():
        ratio = "" if name == "offbeat" else f"; offbeat takes {medians['offbeat'] / medians[name]:.2f} times as many"
        told = f"{name:16} {medians[name]:6.2f} pushes/s ({min(found):.2f}-{max(found):.2f})"
        if name in RIVALS:
            ratio += f" (promised {RIVALS[name][2]:g})"
            missed += medians["offbeat"] < RIVALS[name][2] * medians[name]
        print(told + ratio)
    return missed


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
    words.add_argument("--against", help=f"of {', '.join(RIVALS)}, joined by commas: measured in turn with them")
    words.add_argument("--seconds", type=parse_seconds, default=5.0, help="of a round of one system")
    words.add_argument("--bring", help=argparse.SUPPRESS)
    given = words.parse_args()
    if given.bring:
        bring(given.bring, given.learn)
        return 0
    if given.learn:
        print(json.dumps(learn(json.loads(given.learn))), flush=True)
        return 0
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    rate = "the rate of a link that is not shaped" if given.against else given.bandwidth
    print(f"{given.megabytes} MB each way at {rate}; {cores} cores, load {load:.1f}", flush=True)
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        key = folder / "run.key"
        keys.write(key)
        if given.against:
            names = given.against.split(",")
            if unknown := [name for name in names if name not in RIVALS]:
                raise SystemExit(f"--against: expected some of {', '.join(RIVALS)}; got {', '.join(unknown)}")
            return min(1, against(given, folder, key, names))
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
