"""A training on hosts of a lab: started, followed by its log while it is injured, ended, and judged by that log.

    with Lab(...) as lab:
        run = RemoteRun(lab, folder, "k-async:2", seed=3)   # on host 0, with a learner; places for one on each other
        run.join_all()
        ...                                                 # lab.cut(2), lab.kill(1), run.join(1) ...
        found = run.finish()                                # Ctrl-C to the run; `Findings`

The judge reads what the run has left, its log first, and shares no code with the server: it uses the log's reader, the
text form of events and `train_again`, which trains from the log in one process.

lost       samples of an epoch that has ended which are in no update and in no gradient that waits for one
doubled    samples in two updates; pushes that were taken twice
wrong      whatever else is not as it must be: weights that are not those of the log, books, exit codes, leavings
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from offbeat.lab import Lab
from offbeat.lab.control import HostProcess
from offbeat.network import keys
from offbeat.policies import Apply, Pushed, create, replay
from offbeat.policies.events import EVENTS, from_text
from offbeat.predict.virtual import train_again
from offbeat.runs.log import RunLog, read_log
from offbeat.runs.run_folder import RunDir
from train.matrix import audited

OFFBEAT = [sys.executable, "-m", "offbeat"]
PORT = 7000
SAMPLES = 1438  # of the digits
ENDLESS = 100_000  # epochs: these runs are interrupted
INTERRUPTED = 130
LIMIT_S = 120.0
_POLL_S = 0.02


class RunFailedError(AssertionError):
    """What was waited for did not come."""


def wait_until(is_so: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    end_s = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > end_s:
            raise RunFailedError(f"not in {limit_s:g} s: {what}")
        time.sleep(_POLL_S)


class LogTail:
    """What a log says while it is being written. Its times are seconds since the start of the run; `now_s` is such a
    time, since whoever writes the log does so at once, if not after each line.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._position = path.with_name(path.name + ".unfinished"), 0
        self._start_s = math.inf  # of the run, on our clock
        self.pushes: list[tuple[float, int, int]] = []  # when, and of which learner and incarnation
        self.updates: list[float] = []

    def poll(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in whole.splitlines():
            record = json.loads(line)
            if record["kind"] == "decision":
                event = from_text(record["event"])
                assert isinstance(event, EVENTS)
                self._start_s = min(self._start_s, time.monotonic() - event.at_s)
                if isinstance(event, Pushed):
                    self.pushes.append((event.at_s, event.learner, record["seq"][0]))
                made = [one for one in map(from_text, record["commands"]) if isinstance(one, Apply)]
                self.updates += [event.at_s] * len(made)

    def now_s(self) -> float:
        self.poll()
        return time.monotonic() - self._start_s

    def pushed_after(self, learners: Sequence[int], after_s: float, *, anew: bool = False) -> float | None:
        """When one of these first pushed after that; `anew`: as an incarnation that had not pushed before."""
        self.poll()
        known = {(learner, own) for at_s, learner, own in self.pushes if anew and at_s <= after_s}
        for at_s, learner, incarnation in self.pushes:
            if at_s > after_s and learner in learners and (learner, incarnation) not in known:
                return at_s
        return None

    def stall_s(self, start_s: float, end_s: float) -> float:
        """The longest time without an update that began or ended between these."""
        times = [0.0, *self.updates]
        gaps = pairwise(times)
        return max((after - before for before, after in gaps if after > start_s and before < end_s), default=0.0)


class RemoteRun:
    """See the module's text. `words` are further options of `offbeat train`."""

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        line: str,
        *,
        seed: int = 0,
        learners_each: int = 1,
        others: Sequence[int] = (),
        words: Sequence[str] = (),
    ) -> None:
        self.lab, self.folder, self.line = lab, folder / "run", line
        self.key = folder / "key"
        if not self.key.exists():
            keys.write(self.key)
        self.address = f"{lab.network.address(0)}:{PORT}"
        self.others = others or range(1, lab.network.hosts)
        self.learners_each = learners_each
        remote = learners_each * len(self.others)
        own = ["train", "--sync", line, "--learners", str(remote + 1), "--remote", str(remote), "--seed", str(seed)]
        own += ["--train.epochs", str(ENDLESS), "--save.every-epochs", "0", "--join-within", "60s"]
        where = ["--listen", self.address, "--key", str(self.key), "--run-dir", str(self.folder)]
        self.process = lab.start(0, [*OFFBEAT, *own, *where, *words])
        self.hosts: dict[int, HostProcess] = {}
        self.tail = LogTail(RunDir(self.folder).log(1))

    def host_of(self, program: int) -> int:
        """The host of the lab on which one of `others` is: it is its number, where there is one on each."""
        return program

    def join(self, host: int, address: str = "", words: Sequence[str] = ()) -> None:
        """Start a host's learners; `joined` says when they are there."""
        own = ["work", "--join", address or self.address, "--key", str(self.key)]
        self.hosts[host] = self.lab.start(
            self.host_of(host), [*OFFBEAT, *own, "--learners", str(self.learners_each), *words]
        )

    def joined(self, host: int, address: str = "", words: Sequence[str] = ()) -> bool:
        """Whether it has; one that came too early, or found its place still taken, is started again."""
        process = self.hosts[host]
        if "joined " in process.output:
            return True
        if process.has_ended:
            if not re.search("nobody listens|are taken", process.output):
                raise RunFailedError(f"host {host} did not join: {process.output[-500:]}")
            time.sleep(0.1)
            self.join(host, address, words)
        return False

    def join_all(self, address: Callable[[int], str] = lambda host: "") -> None:
        """All other hosts; until each has pushed."""
        wait_until(lambda: (self.folder / "config.json").exists() or self.process.has_ended, "the run's folder")
        for host in self.others:
            self.join(host, address(host))
        for host in self.others:
            self.wait_for(lambda host=host: self.joined(host, address(host)), f"host {host} joins")  # type: ignore[misc]  # bound now
        for host in self.others:
            self.back_s([host], 0.0)

    def wait_for(self, is_so: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
        """As `wait_until`, while the run goes on."""
        wait_until(lambda: is_so() or self.process.has_ended, what, limit_s)
        if self.process.has_ended:
            raise RunFailedError(f"the run ended with {self.process.wait(0)}: {self.process.output[-1500:]}")

    def places(self, host: int) -> list[int]:
        """The learners that are or were a host's, by what it has printed."""
        found = re.findall(r"as learner ([\d, ]+)", self.hosts[host].output)
        return [int(number) for text in found for number in text.replace(",", " ").split()]

    def back_s(self, hosts: Sequence[int], after_s: float, *, anew: bool = False) -> float:
        """When a learner of one of these hosts first pushed after that; see `LogTail.pushed_after`."""
        found: float | None = None

        def is_back() -> bool:
            nonlocal found
            places = [place for host in hosts for place in self.places(host)]
            found = self.tail.pushed_after(places, after_s, anew=anew)
            return found is not None

        try:
            self.wait_for(is_back, f"a learner of hosts {list(hosts)} pushes again")
        except RunFailedError as error:
            outputs = {host: self.hosts[host].output[-1500:] for host in hosts if host in self.hosts}
            raise RunFailedError(f"{error}; {outputs}; {self.process.output[-500:]}") from None
        assert found is not None
        return found

    def finish(self, *, bits: bool = True, judge: Callable[[RemoteRun], Findings] | None = None) -> Findings:
        """Interrupt the run, wait for everybody, and judge."""
        self.process.send_signal(2)
        wrong = []
        code = self.process.wait(LIMIT_S)
        if code != INTERRUPTED:
            wrong.append(f"the run ended with {code}: {self.process.output[-1500:]}")
        for host, process in self.hosts.items():
            if (code := process.wait(LIMIT_S)) != 0:
                wrong.append(f"host {host} ended with {code}: {process.output[-800:]}")
        used = sorted({0, *map(self.host_of, self.hosts)})
        wrong += [f"{left} processes left on host {host}" for host in used if (left := left_on(self.lab, host))]
        found = judged(self.folder, bits=bits) if judge is None else judge(self)
        return found._replace(wrong=(*wrong, *found.wrong))


def left_on(lab: Lab, host: int) -> int:
    """Processes of ours on a host; some have a moment to end."""
    left = 0
    for _ in range(100):
        said = lab.run(host, ["sh", "-c", "cat /proc/[0-9]*/cmdline 2>/dev/null"]).stdout
        left = said.count("-m\0offbeat\0")
        if not left:
            break
        time.sleep(0.05)
    return left


# --- the judge --------------------------------------------------------------------------------------------------------


class Findings(NamedTuple):
    """See the module's text."""

    lost: int
    doubled: int
    wrong: tuple[str, ...] = ()
    updates: int = 0
    samples: int = 0
    accuracy: float = 0.0


def judged(folder: Path, *, bits: bool = True) -> Findings:
    """An interrupted run, by its folder."""
    run = RunDir(folder)
    metrics = run.read_metrics()
    if not metrics or not run.log(1).exists():
        return Findings(0, 0, ("it left no metrics or no log",))
    last, log = metrics[-1], read_log(run.log(1))
    replay(log.run, log.decisions)
    found = judged_logs([(log, last["update"])], last)
    wrong = list(found.wrong)
    if bits and not same_bits(run, log, last["update"]):
        wrong.append("the weights are not those of the log")
    return found._replace(wrong=tuple(wrong))


def judged_logs(parts: Sequence[tuple[RunLog, int]], last: Mapping[str, Any]) -> Findings:
    """The samples and the pushes of a run, of which the last evaluation says how far it came. A run that another host
    has continued has several logs, each with as many updates as count; what one held at its end was computed again.
    """
    batches = [one for log, _ in parts for record in log.decisions for one in record.get("batch", ())]
    epochs = 1 + max((epoch for epoch, _, _ in batches), default=0)
    audits = [audited(log, epochs=epochs, samples=SAMPLES, updates=updates) for log, updates in parts]
    applied = sum(audit.applied for audit in audits[1:]) + audits[0].applied
    total = applied + audits[-1].held
    twice = [name for log, _ in parts for name, many in names_of(log).items() if many > 1]
    wrong = [f"push {name} was taken twice" for name in twice[:3]]
    if int(applied.sum()) != last["samples"]:
        wrong.append(f"{last['samples']} samples applied by the metrics, {int(applied.sum())} by the log")
    return Findings(
        lost=int((total[: last["epoch"]] == 0).sum()),
        doubled=int((total > 1).sum()) + len(twice),
        wrong=tuple(wrong),
        updates=last["update"],
        samples=last["samples"],
        accuracy=last["accuracy"],
    )


def names_of(log: RunLog) -> Counter[tuple[int, int, int]]:
    """How often each push was taken: learner, incarnation, sequence number."""
    found: Counter[tuple[int, int, int]] = Counter()
    for record in log.decisions:
        event = from_text(record["event"])
        if isinstance(event, Pushed):
            found[event.learner, record["seq"][0], record["seq"][1]] += 1
    return found


def same_bits(run: RunDir, log: RunLog, updates: int) -> bool:
    """Whether the log up to this update, trained again in one process, gives the weights that the run has left.

    Where learners take steps of their own, which are in no log, this is not known: True.
    """
    rule = create(log.run["strategy"], expect=log.run["expect"]).rule
    if rule.delta or rule.fetch_every:
        return True
    part = run.path.with_name(run.path.name + "-again")
    part.mkdir()
    shutil.copy(run.config, part)
    made = 0
    with run.log(1).open("rb") as source, RunDir(part).log(1).open("wb") as target:
        for line in source:
            record = json.loads(line)
            if record["kind"] == "decision":
                made += sum(isinstance(from_text(one), Apply) for one in record["commands"])
                if made > updates:
                    break
            target.write(line)
    again, left = dict(train_again(part).weights), load_file(run.weights)
    return all(torch.equal(left[name], again[name]) for name in left)
