"""Every fault between hosts, injected again and again, and a table of what became of it.

    cd tests && OFFBEAT_REPEATS=20 python -m process.remote_fault_table [--rows 11,29] [--long]
    cd tests && OFFBEAT_REPEATS=20 python -m process.remote_fault_table --out faults.jsonl     # again: goes on there
    cd tests && python -m process.remote_fault_table --table faults.jsonl

Each run is a training on four hosts of a lab, with a learner on each; the strategy, the moment and the host that is
struck change with the seed. `remote_runs` judges it by its log. `back after` is the time from the end of the fault
until the host that was struck pushes again, `no update for` the longest time without an update: median and longest. It
ends with 1 where one fault was not survived as promised. `--long` adds cuts of 60 s, 3 times each. With `--out` every
run is a line of that file as soon as it is over, and is not made again; several commands may share the file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from offbeat.lab import Lab, Network
from offbeat.lab.network import Direction
from offbeat.policies import Apply, Pushed
from offbeat.policies.events import from_text
from offbeat.runs.log import RunLog, read_lines, read_log
from offbeat.runs.run_folder import RunDir
from offbeat.runs.untrusted import JsonLines
from process import faulty_wire, role_pids
from process.remote_runs import (
    LIMIT_S,
    PORT,
    Findings,
    LogTail,
    RemoteRun,
    RunFailedError,
    judged_logs,
    wait_until,
)

HOSTS, BANDWIDTH = 4, "200Mbit/s"
# No policy of which a learner takes steps of its own: those are in no log, from which the weights are computed.
LINES = ("async", "k-async:2", "k-sync:3", "full-sync", "ssp:2", "k-batch-async:2", "softsync:2", "k-batch-sync:3")
WIRE_PORT = 7001
LATER_S = 0.7  # the moment is within so long after all have pushed
CALM_S = 0.5  # that a run goes on after all are back
STOPPED_S = 6.0
HEARTBEAT_S = 3.0  # a learner that is silent for so long may be given up
STRANGERS = 1000
COMINGS = 8
UNWRITTEN = 16  # updates: the buffer of a log holds some lines
MOST_GROWN_MIB = 64  # of the gateway, for strangers


class Struck(NamedTuple):
    """When a fault began and ended, by the clock of the log, and which hosts have to be back: each, or one of them.

    `anew`: as an incarnation that had not pushed by the end of the fault. Without it any push will do: they were waited
    for, or are back already.
    """

    start_s: float
    end_s: float
    hosts: Sequence[int]
    anew: bool = True
    each: bool = True


Inject = Callable[[RemoteRun, random.Random], Struck]


class Outcome(NamedTuple):
    """What became of one fault."""

    found: Findings
    back_s: float = 0.0
    stall_s: float = 0.0


# --- faults -----------------------------------------------------------------------------------------------------------


def cut_link(seconds: float, direction: Direction) -> Inject:
    def inject(run: RemoteRun, rng: random.Random) -> Struck:
        host, start_s = rng.choice(run.others), run.tail.now_s()
        run.lab.cut(host, direction)
        time.sleep(seconds)
        run.lab.restore(host)
        return Struck(start_s, run.tail.now_s(), [host], anew=seconds > HEARTBEAT_S)

    return inject


def kill_host(run: RemoteRun, rng: random.Random, *, silently: bool = False) -> Struck:
    """It comes back when the run has noticed."""
    host, start_s, told = rng.choice(run.others), run.tail.now_s(), run.process.output.count("on another host left")
    if silently:
        run.lab.cut(host)
    run.lab.kill(host)
    run.wait_for(lambda: run.process.output.count("on another host left") > told, "the loss of a host is noticed")
    run.lab.restore(host)
    end_s = run.tail.now_s()
    run.join(host)
    run.wait_for(lambda: run.joined(host), f"host {host} joins again")
    return Struck(start_s, end_s, [host])


def strike_role(role: str, signal: int = 9) -> Inject:
    """A process of the run's own host; of another one, if it is a learner."""

    def inject(run: RemoteRun, rng: random.Random) -> Struck:
        host = rng.choice(run.others) if role == "learner" else 0
        start_s = run.tail.now_s()
        if run.lab.run(host, [sys.executable, role_pids.__file__, role, str(signal)]).returncode:
            raise RunFailedError(f"no process is the {role} on host {host}")
        end_s, anew = run.tail.now_s(), role in ("learner", "gateway", "road")
        return Struck(start_s, end_s, [host] if host else list(run.others), anew=anew, each=role != "road")

    return inject


def stop_learner(run: RemoteRun, rng: random.Random) -> Struck:
    """It is given up or waited for: the limit is ten times the longest pause between its heartbeats."""
    host, start_s = rng.choice(run.others), run.tail.now_s()
    found = run.lab.run(host, [sys.executable, role_pids.__file__, "learner", "19"])
    time.sleep(STOPPED_S)
    run.lab.run(host, ["kill", "-CONT", found.stdout.strip()])
    return Struck(start_s, run.tail.now_s(), [host], anew=False)


def kill_host_program(run: RemoteRun, rng: random.Random) -> Struck:
    """`offbeat work` itself; its learners end with it, and it is started again."""
    host, start_s = rng.choice(run.others), run.tail.now_s()
    run.lab.run(host, ["kill", "-KILL", str(run.hosts[host].pid)])
    run.hosts[host].wait(LIMIT_S)
    end_s = run.tail.now_s()
    run.join(host)
    run.wait_for(lambda: run.joined(host), f"host {host} joins again")
    return Struck(start_s, end_s, [host])


def damage(what: str) -> Inject:
    """To what host 1 sends or is sent: it has joined through a wire on the run's host."""

    def inject(run: RemoteRun, rng: random.Random) -> Struck:
        start_s, folder = run.tail.now_s(), run.folder.parent
        (folder / "new").write_text(f"{what} {rng.choice(('up', 'down'))}")
        (folder / "new").rename(folder / "do")
        run.wait_for((folder / "done").exists, "a piece is damaged")
        end_s = run.tail.now_s()
        if what == "delay":
            time.sleep(faulty_wire.DELAY_S)
        return Struck(start_s, max(end_s, run.tail.now_s()), [1], anew=what != "delay")

    return inject


def strangers(run: RemoteRun, rng: random.Random) -> Struck:
    """From another host, while the run goes on; some of them have the key, and send garbage."""
    start_s, before = run.tail.now_s(), gateway_mib(run)
    words = [sys.executable, "-m", "process.port_strangers", run.address, str(run.key), str(STRANGERS)]
    tests = str(Path(__file__).parents[1])
    one = run.lab.start(1, [*words, str(rng.random())], environment={**os.environ, "PYTHONPATH": tests})
    if one.wait(LIMIT_S) or "got in: 0" not in one.output:
        raise RunFailedError(f"strangers: {one.output[-500:]}")
    if (grown := gateway_mib(run) - before) > MOST_GROWN_MIB:
        raise RunFailedError(f"the gateway's memory has grown by {grown:.0f} MiB")
    return Struck(start_s, run.tail.now_s(), list(run.others), anew=False)


def gateway_mib(run: RemoteRun) -> float:
    pid = run.lab.run(0, [sys.executable, role_pids.__file__, "gateway", "0"]).stdout.strip()
    said = re.search(r"VmRSS:\s+(\d+)", run.lab.run(0, ["cat", f"/proc/{pid}/status"]).stdout)
    return int(said[1]) / 1024 if said else 0.0


def come_and_go(run: RemoteRun, rng: random.Random) -> Struck:
    """Every second a host leaves, or is killed, and comes back at once."""
    start_s = run.tail.now_s()
    for number in range(COMINGS):
        host = run.others[number % len(run.others)]
        run.wait_for(lambda host=host: run.joined(host), f"host {host} joins again")  # type: ignore[misc]  # bound now
        if rng.random() < 0.5:
            run.lab.kill(host)
            run.lab.restore(host)
        else:
            run.hosts[host].send_signal(2)
            run.hosts[host].wait(LIMIT_S)
        run.join(host)
        time.sleep(1.0)
    end_s = run.tail.now_s()
    for host in run.others:
        run.wait_for(lambda host=host: run.joined(host), f"host {host} joins again")  # type: ignore[misc]  # bound now
    return Struck(start_s, end_s, list(run.others), anew=False)


# --- a run ------------------------------------------------------------------------------------------------------------


def injured(inject: Inject, lab: Lab, folder: Path, seed: int, *, wired: bool = False) -> Outcome:
    """One training with one fault."""
    rng = random.Random(seed)
    line, delay = LINES[seed % len(LINES)], ["--slow", "exp:0.03"]
    run = RemoteRun(lab, folder, line, seed=seed, words=[*delay, "--servers", str(1 + seed % 2)])
    wire = f"{lab.network.address(0)}:{WIRE_PORT}" if wired else ""
    if wired:
        words = [sys.executable, faulty_wire.__file__, str(WIRE_PORT), run.address, str(folder)]
        lab.start(0, words)
    run.join_all(lambda host: wire if host == 1 else "")
    time.sleep(rng.uniform(0, LATER_S))
    struck = inject(run, rng)
    groups = [[host] for host in struck.hosts] if struck.each else [struck.hosts]
    back_s = max(run.back_s(group, struck.end_s, anew=struck.anew) for group in groups)
    time.sleep(CALM_S)
    stall_s = run.tail.stall_s(struck.start_s, back_s)
    return Outcome(run.finish(), back_s - struck.end_s, stall_s)


def injured_server(inject: Inject, lab: Lab, folder: Path, seed: int) -> Outcome:
    """As `injured`, with processes of their own for the servers."""
    return injured(inject, lab, folder, 2 * seed + 1)


def run_host_killed(lab: Lab, folder: Path, seed: int, *, mirrored: bool = False) -> Outcome:
    """Its successor continues it. What counts is the lost log up to the checkpoint, and the successor's from there.

    With a mirror no update may be lost of which a learner was told: with which it has computed, by the log.
    """
    rng = random.Random(seed)
    at = [f"{lab.network.address(host)}:{PORT}" for host in range(HOSTS)]
    words = ["--slow", "exp:0.03", "--save.every-updates", "20", "--successors", ",".join(at[1:3])]
    words += ["--mirror", "--servers", str(1 + seed % 2)] if mirrored else []
    line = ("async", "k-async:2", "ssp:2", "k-batch-async:2")[seed % 4]
    run = RemoteRun(lab, folder, line, seed=seed, words=words)
    wait_until((run.folder / "config.json").exists, "the run's folder")
    copies = {host: ["--run-dir", str(folder / f"copy{host}")] for host in run.others}
    for host in run.others:
        run.join(host, words=copies[host])
    for host in run.others:
        run.wait_for(lambda host=host: run.joined(host, words=copies[host]), f"host {host} joins")  # type: ignore[misc]  # bound now
    copied = RunDir(folder / "copy1").checkpoints
    run.wait_for(lambda: copied.is_dir() and any(copied.iterdir()), "a checkpoint is copied")
    time.sleep(rng.uniform(0, 2 * LATER_S))
    killed_s = time.monotonic()
    lab.kill(0)
    tail = LogTail(RunDir(folder / "copy1").log(1))
    successor = run.hosts[1]
    wait_until(lambda: tail.now_s() > 0 and bool(tail.updates), "the successor makes an update")
    back_s = time.monotonic() - killed_s
    _wait_until_all_push(run, tail)
    time.sleep(CALM_S)
    successor.send_signal(2)
    wrong = [
        f"host {host} ended with {code}"
        for host in run.others
        if (code := run.hosts[host].wait(LIMIT_S)) not in (0, 130)
    ]
    told = "none" if mirrored else r"at least \d+"
    said = re.search(rf"continues the run from update (\d+) .*; updates lost: {told}", successor.output)
    if said is None:
        raise RunFailedError(f"no successor: {successor.output[-1000:]}")
    last, update = RunDir(folder / "copy1").read_metrics()[-1], int(said[1])
    lost, left = read_cut_log(run.folder), read_log(RunDir(folder / "copy1").log(1))
    found = judged_logs([(lost, update), (left, last["update"] - update)], last)
    events = [from_text(record["event"]) for record in lost.decisions]
    newest = max((event.version for event in events if isinstance(event, Pushed)), default=0)
    if mirrored and newest > update:
        wrong.append(f"a learner had computed with update {newest}, and the run goes on from {update}")
    return Outcome(found._replace(wrong=(*wrong, *found.wrong)), back_s, back_s)


def _wait_until_all_push(run: RemoteRun, tail: LogTail) -> None:
    """All that are left of the hosts."""

    def all_push() -> bool:
        tail.poll()
        return len({learner for _, learner, _ in tail.pushes[-50:]}) == HOSTS - 1

    try:
        wait_until(all_push, "all that are left push")
    except RunFailedError as error:
        outputs = {host: process.output[-1500:] for host, process in {**run.hosts, 0: run.process}.items()}
        raise RunFailedError(f"{error}; last pushes {tail.pushes[-5:]}; {outputs}") from None


def server_host_killed(lab: Lab, folder: Path, seed: int) -> Outcome:
    """A server on each of three hosts. The run begins anew on those that are left, and what counts is the log of before
    up to the checkpoint, and the one from there.
    """
    rng = random.Random(seed)
    words = ["--slow", "exp:0.03", "--save.every-updates", "20", "--place", "spread", "--servers", "3"]
    line = ("async", "k-async:2", "full-sync", "k-sync:2")[seed % 4]
    run = RemoteRun(lab, folder, line, seed=seed, words=words)
    run.join_all()
    saved = RunDir(run.folder).checkpoints
    run.wait_for(lambda: saved.is_dir() and any(saved.iterdir()), "a checkpoint")
    time.sleep(rng.uniform(0, 2 * LATER_S))
    at = {lab.network.address(host): host for host in run.others}
    places = re.findall(r"server \d+ is on (\S+)", run.process.output)
    struck, killed_s = at[rng.choice(places)], time.monotonic()
    lab.kill(struck)
    del run.hosts[struck]
    tail = run.tail = LogTail(RunDir(run.folder).log(2))
    run.wait_for(lambda: tail.now_s() > 0 and bool(tail.updates), "the run goes on")
    back_s = time.monotonic() - killed_s
    _wait_until_all_push(run, tail)
    time.sleep(CALM_S)
    found = run.finish(judge=judged_continued)
    return Outcome(found, back_s, back_s)


def judged_continued(run: RemoteRun) -> Findings:
    """A run that went on from a checkpoint in its own folder."""
    said = re.search(r"goes on from update (\d+) with \d+ servers?; updates lost: (\d+)", run.process.output)
    if said is None:
        return Findings(0, 0, (f"it does not say what is lost: {run.process.output[-1000:]}",))
    folder, update = RunDir(run.folder), int(said[1])
    last, before = folder.read_metrics()[-1], read_cut_log(run.folder)
    made = sum(isinstance(from_text(one), Apply) for record in before.decisions for one in record["commands"])
    found = judged_logs([(before, update), (read_log(folder.log(2)), last["update"] - update)], last)
    # What was decided last may not have been made, and of what was made the last lines may not be in the log: a
    # coordinator that is killed has not written its buffer.
    near = -HOSTS <= int(said[2]) - (made - update) <= UNWRITTEN
    wrong = () if near else (f"updates lost: {said[2]} by its own words, {made - update} by the log",)
    return found._replace(wrong=(*wrong, *found.wrong))


def read_cut_log(folder: Path) -> RunLog:
    """The whole lines of a log whose writer was killed."""
    run, spans, decisions = read_lines(JsonLines(RunDir(folder).logs()[0].path), lambda record: record)
    return RunLog(run=run, spans=tuple(spans), decisions=tuple(decisions))


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """A fault, what is promised, and what became of it."""

    number: int
    fault: str
    promise: str
    play: Callable[[Lab, Path, int], Outcome]
    most: int | None = None  # times
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def failed(self) -> list[Outcome]:
        return [one for one in self.outcomes if one.found.lost or one.found.doubled or one.found.wrong]

    def __str__(self) -> str:
        runs = self.outcomes
        lost, doubled = (sum(getattr(one.found, name) for one in runs) for name in ("lost", "doubled"))
        numbers = f"{len(runs):>6}{len(runs) - len(self.failed):>10}{lost:>6}{doubled:>9}"
        well = [one for one in runs if one not in self.failed]
        times = "".join(f"{_told([getattr(one, name) for one in well]):>18}" for name in ("stall_s", "back_s"))
        return f"{self.number:>3}  {self.fault:52.52} {self.promise:6}{numbers}{times}"


def _told(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.1f} / {max(seconds):.1f} s" if seconds else "-"


def rows(*, long: bool = False) -> list[Row]:
    ways: tuple[tuple[Direction, str], ...] = (("both", "both ways"), ("in", "to it"), ("out", "from it"))
    lengths: list[tuple[float, int | None]] = [(1.0, None), (10.0, None), *([(60.0, 3)] if long else [])]
    cuts = [
        Row(
            11,
            f"a host's link is cut for {seconds:g} s, {told}",
            "C W L",
            partial(injured, cut_link(seconds, way)),
            most,
        )
        for seconds, most in lengths
        for way, told in ways
    ]
    damages = [
        Row(13 + (what == "flip"), f"on the way to or from a learner: {what}", "T F" if what == "flip" else "T L",
            partial(injured, damage(what), wired=True))
        for what in (*faulty_wire.DAMAGES, "delay")
    ]  # fmt: skip
    return [
        Row(1, "SIGKILL learner on another host", "L T C", partial(injured, strike_role("learner"))),
        Row(3, f"SIGSTOP learner on another host for {STOPPED_S:g} s", "C W T", partial(injured, stop_learner)),
        Row(5, "SIGKILL server", "L T W", partial(injured_server, strike_role("server"))),
        Row(7, "SIGKILL coordinator", "C W", partial(injured, strike_role("coordinator"))),
        Row(7, "SIGKILL gateway", "C W", partial(injured, strike_role("gateway"))),
        Row(7, "SIGKILL road process", "C W", partial(injured, strike_role("road"))),
        *cuts,
        Row(
            12,
            "a host falls silent, and its connections stay",
            "W",
            partial(injured, partial(kill_host, silently=True)),
        ),
        *damages,
        Row(22, f"{STRANGERS:,} connections: silent, slow, garbage", "C", partial(injured, strangers)),
        Row(23, "every second a host leaves or is killed", "C T", partial(injured, come_and_go)),
        Row(29, "a learner's host is killed", "C", partial(injured, kill_host)),
        Row(29, "the run's host is killed; it has successors", "C", run_host_killed),
        Row(29, "the run's host is killed; it has a mirror", "C L", partial(run_host_killed, mirrored=True)),
        Row(29, "a server's host is killed, under --place spread", "C", server_host_killed),
        Row(30, "SIGKILL `offbeat work` on another host", "C Z", partial(injured, kill_host_program)),
    ]


def known(file: Path | None) -> dict[tuple[str, int], Outcome]:
    """The runs that were made before, by fault and seed."""
    if file is None or not file.is_file():
        return {}
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {
        (one["fault"], one["seed"]): Outcome(
            Findings(**one["found"] | {"wrong": tuple(one["found"]["wrong"])}), one["back_s"], one["stall_s"]
        )
        for one in lines
    }


def keep(file: Path, fault: str, seed: int, outcome: Outcome) -> None:
    own = {"fault": fault, "seed": seed, **outcome._asdict(), "found": outcome.found._asdict()}
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(own) + "\n")


def played(row: Row, seed: int) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="offbeat-remote-faults-") as name:
        try:
            with Lab(Network.of(hosts=HOSTS, bandwidth=BANDWIDTH)) as lab:
                return row.play(lab, Path(name), seed)
        except Exception as error:  # whatever it is, it counts against the row, and the others go on
            told = str(error) if isinstance(error, RunFailedError) else traceback.format_exc()
            return Outcome(Findings(0, 0, (told,)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", metavar="N,N,...", help="numbers of faults")
    parser.add_argument("--only", default="", metavar="REGEX", help="words of faults")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep every run there, and make only those that lack")
    parser.add_argument("--table", type=Path, metavar="FILE", help="make none: the table of those that are there")
    given = parser.parse_args()
    repeats, file = int(os.environ.get("OFFBEAT_REPEATS", "3")), given.table or given.out
    asked = {int(number) for number in given.rows.split(",") if number}
    table = [row for row in rows(long=given.long) if not asked or row.number in asked]
    table = [row for row in table if re.search(given.only, row.fault)]
    heads = f"{'runs':>6}{'survived':>10}{'lost':>6}{'doubled':>9}{'no update for':>18}{'back after':>18}"
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'#':>3}  {'fault':52} {'':6}{heads}", flush=True)
    for row in table:
        before = known(file)
        seeds: Sequence[int] = range(given.seed, given.seed + min(repeats, row.most or repeats))
        if given.table:
            seeds = sorted(seed for fault, seed in before if fault == row.fault)
        for seed in seeds:
            outcome = before.get((row.fault, seed)) or played(row, seed)
            row.outcomes.append(outcome)
            if given.out and (row.fault, seed) not in before:
                keep(given.out, row.fault, seed, outcome)
            if outcome in row.failed:
                print(f"     seed {seed}: {outcome.found}", file=sys.stderr, flush=True)
        print(row, flush=True)
    wrong = [row.fault for row in table if row.failed]
    print(f"{len(table) - len(wrong)} of {len(table)} rows as promised" + (f"; not: {wrong}" if wrong else ""))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
