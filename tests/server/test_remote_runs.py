"""Learners that come over TCP to a real run: the bits are those of one host, and no fault loses or doubles anything.

All processes are on loopback; `tests/process/test_work.py` has hosts of a lab.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offbeat.network import keys
from offbeat.network.connections import Place
from offbeat.network.port import dial, parse_place, raw_of, send_all
from offbeat.policies import replay
from offbeat.predict.virtual import train_again
from offbeat.runs.log import read_log
from offbeat.server import handshake
from offbeat.server.parameter_layout import layout_of, model_tensors
from offbeat.server.remote.frames import LEARNER_CHANNELS, Channel, Greeting, Header, Kind, Region
from offbeat.server.shard import optimizers
from offbeat.server.wire import PROTOCOL
from offbeat.train.tasks import Task
from process.forked_scripts import as_program, end
from server import programs, remote_program
from train.matrix import audited

LIMIT_S = 90.0
HOST = "ab" * 16


class ForkedProgram:
    """A learner's program in a fork of the test's process, which has torch loaded; used as a `subprocess.Popen`."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], output: int) -> None:
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        as_program(output, output)
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(1)
        sys.argv = ["remote_program", *words]
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115 - as long as it lives
        end(remote_program.main)

    def wait(self, limit_s: float = LIMIT_S) -> int:
        end_s = time.monotonic() + limit_s
        while self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end_s:
                raise TimeoutError(f"learner still running after {limit_s:g} s")
            else:
                time.sleep(0.005)
        return self._code

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)


class RemoteRun:
    """The servers of a run, and learners that are started one by one: beside them, or over TCP."""

    def __init__(self, folder: Path, line: str, learners: int, *, key: bool, servers: int = 1) -> None:
        self.folder, self.learners = folder, learners
        self.log = folder / "log.jsonl"
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "OFFBEAT_SYNC": line}
        if key:
            keys.write(folder / "key")
            self.environment[keys.KEY] = str(folder / "key")
        plan = {"setting": {"line": line, "learners": learners, "shards": servers}, "seed": 0, "log": str(self.log)}
        words = [sys.executable, "-m", "offbeat.server.supervisor", json.dumps({**plan, "listen": "127.0.0.1:0"})]
        self.errors = (folder / "errors").open("w+")
        self.servers = subprocess.Popen(
            words, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors
        )
        assert self.servers.stdout is not None
        self.told = json.loads(self.servers.stdout.readline())
        self.started: list[ForkedProgram] = []

    @property
    def place(self) -> Place:
        return parse_place(self.told["listens"], "a test")

    def start(self, number: int, epochs: int, *words: str, remote: bool) -> ForkedProgram:
        found = {"OFFBEAT_ADDRESS": self.told["address"], "OFFBEAT_TOKEN": self.told["token"]}
        if remote:
            found = {"OFFBEAT_ADDRESS": f"tcp://{self.told['listens']}", "OFFBEAT_TOKEN": HOST}
        own = {"OFFBEAT_LEARNER": str(number), "OFFBEAT_LEARNERS": str(self.learners)}
        with (self.folder / f"out-{number}").open("a") as out:
            process = ForkedProgram([str(epochs), *words], {**self.environment, **found, **own}, out.fileno())
        self.started.append(process)
        return process

    def output(self, number: int) -> str:
        return (self.folder / f"out-{number}").read_text()

    def said(self) -> str:
        return (self.folder / "errors").read_text()

    def results(self, processes: Sequence[ForkedProgram], numbers: Sequence[int]) -> list[dict[str, Any]]:
        for process, number in zip(processes, numbers, strict=True):
            assert process.wait(LIMIT_S) == 0, self.output(number) + self.said()
        return [json.loads(self.output(number).splitlines()[-1]) for number in numbers]

    def children(self, name: str) -> list[int]:
        """Processes of the servers, by what they hold: the gateway listens, the coordinator has the Unix listener."""
        port = self.place.port
        found = []
        for task in Path(f"/proc/{self.servers.pid}/task").iterdir():
            found += [int(word) for word in (task / "children").read_text().split()]
        listening = [pid for pid in found if _listens(pid, port)]
        coordinator, *servers = [pid for pid in found if pid not in listening]
        return {"gateway": listening, "coordinator": [coordinator], "server": servers}[name]

    def pushes(self) -> int:
        with suppress(OSError, json.JSONDecodeError):
            texts = list(self.folder.glob("log.jsonl*"))
            return sum(one.read_text().count('"push') for one in texts)
        return 0

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()
        assert self.servers.stdin is not None and self.servers.stdout is not None
        self.servers.stdin.close()
        try:
            self.servers.wait(20)
        except subprocess.TimeoutExpired:
            self.servers.kill()
            self.servers.wait()
        self.servers.stdout.close()
        self.errors.close()

    def finish(self) -> int:
        """The servers end by themselves when all have left."""
        assert self.servers.stdin is not None
        self.servers.stdin.close()
        return self.servers.wait(30)


def _listens(pid: int, port: int) -> bool:
    inodes = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(str(entry.readlink()))
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if int(words[1].split(":")[1], 16) == port and words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
            return True
    return False


StartRun = Callable[..., RemoteRun]


LONG = pytest.mark.skipif(not os.environ.get("OFFBEAT_MATRIX"), reason="takes long: make test-matrix")


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[StartRun]:
    with ExitStack() as ends:

        def start(line: str, learners: int, *, key: bool = False, servers: int = 1) -> RemoteRun:
            folder = tmp_path / str(time.monotonic_ns())
            folder.mkdir()
            run = RemoteRun(folder, line, learners, key=key, servers=servers)
            ends.callback(run.close)
            return run

        yield start


def check_books(run: RemoteRun, epochs: int) -> None:
    """Every sample of every epoch once, by the log; and the log is what the policy says again."""
    log = read_log(run.log)
    assert audited(log, epochs=epochs, samples=programs.SAMPLES).complaints() == []
    replay(log.run, log.decisions)


def wait_until(is_so: Callable[[], bool], run: RemoteRun) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end_s, run.said()
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("line", "servers", "words"), [("full-sync", 1, []), pytest.param("k-async:2", 2, ["--in-place"], marks=LONG)]
)
def test_learners_over_tcp_compute_what_learners_beside_the_servers_do(
    start_run: StartRun, line: str, servers: int, words: list[str]
) -> None:
    """By their log, bit for bit; and under full-sync the bits are those of a run on one host."""
    run = start_run(line, 3, key=True, servers=servers)
    started = [run.start(number, 2, *words, remote=number > 0) for number in range(3)]
    results = run.results(started, range(3))
    assert run.finish() == 0, run.said()
    check_books(run, 2)
    assert results[0]["weights"] == results[1]["weights"] == results[2]["weights"]
    task = Task(train=programs.data(), test=programs.data(), build=programs.model_of, loss=nn.CrossEntropyLoss())
    again = train_again(run.log, task=task, optimizer=lambda model: programs.optimizer_of("momentum", model))
    assert torch.cat([one.flatten() for one in again.weights.values()]).tolist() == results[0]["weights"]
    if line == "full-sync":
        beside = start_run(line, 3)
        started = [beside.start(number, 2, remote=False) for number in range(3)]
        assert beside.results(started, range(3))[0]["weights"] == results[0]["weights"]


@LONG
def test_a_run_without_learners_beside_the_servers_begins_and_its_state_can_be_asked_for(start_run: StartRun) -> None:
    """Initial weights go up, weights and optimizer state come down."""
    run = start_run("full-sync", 2, key=True, servers=2)
    words = ["--optimizer", "adam", "--state"]
    results = run.results([run.start(number, 2, *words, remote=True) for number in range(2)], range(2))
    assert run.finish() == 0, run.said()
    check_books(run, 2)
    assert results[0]["weights"] == results[1]["weights"]
    assert results[1]["state"] == pytest.approx(results[0]["sum"], rel=1e-5)


def test_a_learner_that_is_killed_comes_back_and_every_sample_counts_once(start_run: StartRun) -> None:
    run = start_run("k-async:2", 3)
    started = [run.start(number, 4, "--pace", "0.02", remote=number > 0) for number in range(3)]
    wait_until(lambda: run.pushes() > 6, run)
    started[2].kill()
    assert started[2].wait() == -signal.SIGKILL
    started[2] = run.start(2, 4, "--pace", "0.02", remote=True)
    run.results(started, range(3))
    assert run.finish() == 0, run.said()
    check_books(run, 4)
    assert "learner 2 on another host left: the connection is gone" in run.said()


def test_the_gateway_and_the_coordinator_are_killed_and_the_learners_join_again(start_run: StartRun) -> None:
    run = start_run("async", 2, key=True, servers=2)
    started = [run.start(number, 8, "--pace", "0.03", remote=number > 0) for number in range(2)]
    wait_until(lambda: run.pushes() > 6, run)
    for name in ("gateway", "coordinator"):
        (pid,) = run.children(name)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda name=name: f"{name} died (SIGKILL) and was replaced" in run.said(), run)  # type: ignore[misc]
        time.sleep(0.5)  # so that both are felt: what happens meanwhile is any order of reconnecting and pushing
    run.results(started, range(2))
    assert run.finish() == 0, run.said()
    check_books(run, 8)


@LONG
def test_a_learner_that_stands_still_is_given_up_and_joins_again_when_it_goes_on(start_run: StartRun) -> None:
    run = start_run("async", 2)
    started = [run.start(number, 8, "--pace", "0.05", remote=number > 0) for number in range(2)]
    wait_until(lambda: run.pushes() > 6, run)
    os.kill(started[1].pid, signal.SIGSTOP)
    wait_until(lambda: "it sent no heartbeat for" in run.said(), run)
    os.kill(started[1].pid, signal.SIGCONT)
    run.results(started, range(2))
    assert run.finish() == 0, run.said()
    check_books(run, 8)


def strangers(place: Place, chance: random.Random) -> None:
    """Garbage at every depth: at the port, after a greeting, after a handshake."""
    for size in (0, 1, 48, 5000):
        with suppress(OSError), socket.create_connection(place, 5) as plain:
            plain.sendall(chance.randbytes(size))
    host = bytes.fromhex(HOST)  # as somebody who has got the key of this host
    for _ in range(6):
        session = chance.randbytes(16)
        opened = [dial(place, None, Greeting(channel, 2, host, session).pack(), 5.0) for channel in LEARNER_CHANNELS]
        with suppress(OSError):
            send_all(opened[0], [chance.randbytes(2000)])
        for one in opened:
            raw_of(one).close()
    # One that greets and is a learner, and then sends what it likes.
    model = programs.model_of()
    optimizer = programs.optimizer_of("momentum", model)
    tensors, groups = model_tensors(model, optimizer)
    rule, hypers = optimizers.describe(optimizer)
    layout = layout_of(model, tensors, groups, rule=rule, states=optimizers.state_names(rule, hypers))
    own = handshake.encode_handshake(handshake.Handshake(PROTOCOL, "", "learner", 2, handshake.versions(), layout))
    for wrong in (
        Header(Kind.WRITE, Region.GRADIENT, 0, 64, 1, 2**50),
        Header(Kind.WRITE, Region.WEIGHTS, 0, 64, 1, 0),
        Header(Kind.PART, which=0, size=64, number=1, offset=7),
    ):
        session = chance.randbytes(16)
        opened = [dial(place, None, Greeting(channel, 2, host, session).pack(), 5.0) for channel in LEARNER_CHANNELS]
        with suppress(OSError):
            send_all(opened[0], [Header(Kind.MESSAGE, size=len(own)).pack(), own])
            send_all(opened[list(LEARNER_CHANNELS).index(Channel.UP_DATA)], [wrong.pack(), bytes(64)])
            opened[2].recv(200)  # its handshake was answered
        for one in opened:
            raw_of(one).close()


def test_strangers_on_the_port_change_nothing(start_run: StartRun) -> None:
    """The network is trusted here, so that they come as far as they can; place 2 is free for them."""
    run = start_run("full-sync", 3)
    started = [run.start(number, 2, "--pace", "0.01", remote=number > 0) for number in range(2)]
    wait_until(lambda: all("Traceback" not in run.output(number) for number in range(2)), run)
    time.sleep(0.5)
    strangers(run.place, random.Random(3))
    started.append(run.start(2, 2, "--pace", "0.01", remote=True))
    results = run.results(started, range(3))
    assert run.finish() == 0, run.said()
    check_books(run, 2)
    quiet = start_run("full-sync", 3)
    expected = quiet.results([quiet.start(number, 2, remote=False) for number in range(3)], range(3))
    assert results[0]["weights"] == expected[0]["weights"]


CODED = [
    pytest.param("k-sync:2,codec=top-k:0.1", 1, marks=LONG),
    ("full-sync:codec=int8:stochastic,down=bf16", 2),
    pytest.param("k-batch-async:2,codec=random-k:0.2,down=int8", 1, marks=LONG),
    pytest.param("k-batch-sync:2,codec=1-bit", 1, marks=LONG),
    pytest.param("async:codec=power-sgd:2", 1, marks=LONG),
    pytest.param("stale-drop:1,codec=int4", 1, marks=LONG),
]


@pytest.mark.parametrize(("line", "servers"), CODED)
def test_coded_pushes_give_the_same_bits_from_another_host_and_in_a_replay(
    start_run: StartRun, line: str, servers: int
) -> None:
    """By the log: one process codes the gradients of every learner again, and ends with the weights of the run."""
    run = start_run(line, 3, key=True, servers=servers)
    pace = ["--pace", "0.01"]  # so that some are cancelled, or late
    started = [run.start(number, 3, *pace, remote=number > 0) for number in range(3)]
    results = run.results(started, range(3))
    assert run.finish() == 0, run.said()
    check_books(run, 3)
    assert results[0]["weights"] == results[1]["weights"] == results[2]["weights"]
    task = Task(train=programs.data(), test=programs.data(), build=programs.model_of, loss=nn.CrossEntropyLoss())
    again = train_again(run.log, task=task, optimizer=lambda model: programs.optimizer_of("momentum", model))
    assert torch.cat([one.flatten() for one in again.weights.values()]).tolist() == results[0]["weights"]
