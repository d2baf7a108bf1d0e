"""`offbeat work`: hosts of a lab join a training, are killed, cut off and sent away, and every sample counts once."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.fixture import StartLab, wait_for
from offbeat.cli import main
from offbeat.commands.network_options import check_mirror
from offbeat.commands.work import COMMAND
from offbeat.errors import RequestError
from offbeat.lab import Lab
from offbeat.lab.control import HostProcess
from offbeat.network import keys
from offbeat.policies import Pushed, replay
from offbeat.policies.events import from_text
from offbeat.runs.log import read_log
from offbeat.runs.run_folder import RunDir
from process.test_ddp_script import free_port
from server import programs
from train.matrix import audited
from train.programs import offbeat as forked

OFFBEAT = [sys.executable, "-m", "offbeat"]
PORT = 7000
SAMPLES = 1438  # of the digits
LIMIT_S = 120.0
MIRROR = "train --listen 127.0.0.1:7000 --learners 2 --remote 1 --mirror --sync {}"


def train(lab: Lab, folder: Path, line: str, *words: str, remote: int) -> HostProcess:
    """The run, on host 0."""
    own = ["train", "--sync", line, "--learners", str(remote + 1), "--remote", str(remote), *words]
    where = [
        "--listen",
        f"{lab.network.address(0)}:{PORT}",
        "--key",
        str(folder / "key"),
        "--run-dir",
        str(folder / "r"),
    ]
    return lab.start(0, [*OFFBEAT, *own, *where])


def work(lab: Lab, folder: Path, host: int, learners: int) -> HostProcess:
    """A host that joins, as soon as the run listens and has places."""
    where = ["--join", f"{lab.network.address(0)}:{PORT}", "--key", str(folder / "key")]
    words = [*OFFBEAT, "work", *where, "--learners", str(learners)]
    again = 'n=0; until "$@"; do code=$?; n=$((n+1)); [ $n -lt 100 ] || exit $code; sleep 0.3; done'
    return lab.start(host, ["sh", "-c", again, "sh", *words])


def finish(*processes: HostProcess) -> None:
    for process in processes:
        assert process.wait(LIMIT_S) == 0, process.output


def check_books(folder: Path, epochs: int) -> None:
    """Every sample of every epoch is in one update, by the log; and the policy says again what the log has."""
    log = read_log(RunDir(folder / "r").log(1))
    audit = audited(log, epochs=epochs, samples=SAMPLES)
    assert audit.complaints() == []
    replay(log.run, log.decisions)
    events = [from_text(record["event"]) for record in log.decisions]
    assert {event.learner for event in events if isinstance(event, Pushed)} == set(range(log.run["learners"]))


def check_bits_of_one_host(folder: Path, learners: int, words: Sequence[str]) -> None:
    """The same training on one host has the same weights."""
    own = ["--sync", "full-sync", "--learners", str(learners), *words, "--run-dir", str(folder / "one")]
    ended = forked(folder, "train", *own)
    assert ended.code == 0, ended.err
    assert (folder / "r/weights.safetensors").read_bytes() == (folder / "one/weights.safetensors").read_bytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keys.write(tmp_path / "key")
    return tmp_path


def test_three_hosts_train_to_the_bits_of_one(start_lab: StartLab, folder: Path) -> None:
    lab = start_lab(hosts=3, bandwidth="300Mbit/s")
    words = ("--train.epochs", "2", "--seed", "3")
    run = train(lab, folder, "full-sync", *words, remote=3)
    hosts = [work(lab, folder, 1, 2), work(lab, folder, 2, 1)]
    finish(run, *hosts)
    assert "as learner" in hosts[0].output and "left the run in order" in hosts[0].output
    check_books(folder, 2)
    check_bits_of_one_host(folder, 4, words)


def test_two_hosts_with_a_shard_each_train_to_the_bits_of_one(start_lab: StartLab, folder: Path) -> None:
    lab = start_lab(hosts=2, bandwidth="300Mbit/s")
    words = ("--train.epochs", "2", "--seed", "3")
    run = train(lab, folder, "full-sync", *words, "--place", "spread", "--servers", "2", remote=1)
    finish(run, work(lab, folder, 1, 1))
    check_books(folder, 2)
    check_bits_of_one_host(folder, 2, words)


def test_hosts_that_are_killed_cut_off_and_sent_away_cost_no_sample(start_lab: StartLab, folder: Path) -> None:
    lab = start_lab(hosts=4, bandwidth="200Mbit/s")
    words = ("--train.epochs", "8", "--slow", "exp:0.15", "--join-within", "60s")
    run = train(lab, folder, "async", *words, remote=3)
    killed, cut, interrupted = (work(lab, folder, host, 1) for host in (1, 2, 3))
    wait_for(run, "epoch 1/8", 60)
    lab.kill(1)
    lab.cut(2)
    interrupted.send_signal(signal.SIGINT)
    wait_for(run, "on another host left", 30)
    lab.restore(1)
    back = work(lab, folder, 1, 1)
    end_s = time.monotonic() + 30
    while run.output.count("on another host left") < 2:  # the one that is cut off, too; who leaves in order is not told
        assert time.monotonic() < end_s, run.output
        time.sleep(0.05)
    lab.restore(2)
    finish(run, cut, back)
    check_books(folder, 8)
    assert killed.output.count("joined") == 1 and back.output.count("joined") == 1
    assert "computed" in cut.output  # it came back by itself, and heard the end of the run
    assert json.loads((folder / "r/metrics.jsonl").read_text().splitlines()[-1])["epoch"] == 8


def test_torchrun_starts_the_learners_of_a_script_on_two_hosts(start_lab: StartLab, folder: Path) -> None:
    lab = start_lab(hosts=2, bandwidth="300Mbit/s")
    own = {keys.KEY: str(folder / "key"), "OFFBEAT_SYNC": "full-sync", "OFFBEAT_LOG": str(folder / "log.jsonl")}
    environment = {**os.environ, **own, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--node-rank"]
    where = ["--master-addr", "{host0}", "--master-port", "29500", "-m", "server.remote_program", "2"]
    hosts = [lab.start(host, [*words, str(host), *where], environment=environment) for host in range(2)]
    finish(*hosts)
    found = [json.loads(next(line for line in one.output.splitlines() if line.startswith("{"))) for one in hosts]
    assert found[0]["weights"] == found[1]["weights"] and found[0]["learner"] != found[1]["learner"]
    log = read_log(folder / "log.jsonl")
    assert audited(log, epochs=2, samples=programs.SAMPLES).complaints() == []


# --- without a lab ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("work --join 192.0.2.1:7000", "is not loopback, and there is no key"),
        ("work --join 127.0.0.1:1", "nobody listens on 127.0.0.1:1"),
        ("work --join 7000", "expected ADDRESS:PORT"),
        ("train --sync async --listen 192.0.2.1:7000 --learners 3 --remote 2", "is not loopback, and there is no key"),
        (
            "train --sync async --listen 127.0.0.1:7000 --learners 2 --remote 2",
            "at least one of the 2 learners must be on this host",
        ),
        ("train --listen 127.0.0.1:7000", "--listen and --remote belong together"),
        ("train --sync ring --listen 127.0.0.1:7000 --remote 1", "learners cannot join 'ring'"),
        (MIRROR.format("async"), "--mirror needs --successors"),
        (MIRROR.format("async --successors 127.0.0.1:7001 --place spread --servers 2"), "remove --place spread"),
        (MIRROR.format("downpour --successors 127.0.0.1:7001"), "under 'downpour' learners keep state"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(capfd: pytest.CaptureFixture[str], words: str, told: str) -> None:
    code = main(words.split())
    (line,) = capfd.readouterr().err.splitlines()
    assert code in (1, 2) and told in line


def test_a_mirror_takes_every_strategy_without_state_of_learners() -> None:
    words = argparse.Namespace(successors="127.0.0.1:7001", place="first")
    for line in ("k-async:2", "full-sync", "ssp:1", "async:down=bf16"):
        check_mirror(words, line, 2)
    with pytest.raises(RequestError, match="learners keep state"):
        check_mirror(words, "local-sgd:4", 2)


@contextmanager
def listening(folder: Path, place: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A run on this host that waits for one more learner."""
    own = ["train", "--sync", "async", "--learners", "2", "--remote", "1", "--listen", place, *words]
    run = subprocess.Popen(
        [*OFFBEAT, *own, "--run-dir", str(folder / "r")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield run
    finally:
        run.kill()
        run.communicate()


def until_it_listens(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    end_s = time.monotonic() + 60
    while True:
        done = subprocess.run([*OFFBEAT, *words], capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if "nobody listens" not in done.stderr or time.monotonic() > end_s:
            return done
        time.sleep(0.2)


def test_an_attached_host_takes_the_key_from_its_input_and_leaves_when_that_is_closed(folder: Path) -> None:
    place = f"127.0.0.1:{free_port()}"
    words = [*OFFBEAT, "work", "--join", place, "--learners", "1", "--attached", "--key", "-"]
    slowly = ("--slow", "constant:0.02", "--train.epochs", "2000", "--join-within", "1s")
    with listening(folder, place, *slowly, "--key", str(folder / "key")) as run:
        assert run.stdout is not None
        while "learners" not in (line := run.stdout.readline()):  # it listens, and has begun to print
            assert line, "it has ended"
        pipe = subprocess.PIPE
        with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT) as host:
            assert host.stdin is not None and host.stdout is not None
            host.stdin.write((folder / "key").read_bytes())
            host.stdin.flush()
            assert b"joined" in host.stdout.readline()
            host.stdin.close()
            left = host.stdout.read().decode()
            assert host.wait(LIMIT_S) == 0 and "1 learner of this host left the run in order" in left
            assert "the run has ended" not in left  # it left before that
        assert run.poll() is None  # which goes on
        run.send_signal(signal.SIGINT)
        run.stdout.read()
        assert run.wait(LIMIT_S) == 130


def test_the_example_of_the_command_works_and_another_key_is_refused(folder: Path) -> None:
    (example,) = COMMAND.examples
    place = f"127.0.0.1:{free_port()}"
    example = example.replace("127.0.0.1:7000", place)
    assert place in example
    with listening(folder, place, "--train.epochs", "1", "--key", str(folder / "key")) as run:
        keys.write(folder / "other")
        wrong = until_it_listens([*example.split(), "--key", str(folder / "other")])
        assert wrong.returncode == 1 and "key" in wrong.stderr and len(wrong.stderr.splitlines()) == 1
        right = until_it_listens([*example.split(), "--key", str(folder / "key")])
        assert right.returncode == 0 and "left the run in order" in right.stdout, right.stderr
        assert run.wait(LIMIT_S) == 0
    check_books(folder, 1)
