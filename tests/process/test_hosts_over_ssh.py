"""`offbeat train --hosts` starts learners on other hosts over ssh, and leaves nothing there, however it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from lab.fixture import StartLab, wait_for
from offbeat.cli import main
from offbeat.lab import Lab
from offbeat.lab.control import HostProcess
from offbeat.lab.remote_shell_server import RemoteShell
from offbeat.network import keys
from offbeat.policies import Pushed
from offbeat.policies.events import from_text
from offbeat.runs.log import read_log
from process.ssh_lab import WHY_NOT, start_sshd
from process.test_work import LIMIT_S, OFFBEAT, SAMPLES, check_books, finish
from train.matrix import audited

SCRIPT = Path(__file__).parents[2] / "examples" / "digits.py"
needs_sshd = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def train(lab: Lab, folder: Path, ssh: str, hosts: str, *words: str, line: str = "async") -> HostProcess:
    own = ["train", "--sync", line, "--hosts", hosts, "--ssh", ssh, "--run-dir", str(folder / "r")]
    return lab.start(0, [*OFFBEAT, *own, *words])


def programs(lab: Lab, host: int) -> list[str]:
    """The command lines of what runs on a host that belongs to offbeat."""
    listed = lab.run(host, ["sh", "-c", "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '; true"]).stdout
    return re.findall(r"-m offbeat (\w+)", listed)


def wait_until_free(lab: Lab, hosts: Sequence[int]) -> None:
    end_s = time.monotonic() + 30
    while left := [(host, found) for host in hosts if (found := programs(lab, host))]:
        assert time.monotonic() < end_s, left
        time.sleep(0.1)


@needs_sshd
def test_three_hosts_with_sshd_train_every_sample_and_their_output_is_shown(
    start_lab: StartLab, tmp_path: Path
) -> None:
    lab = start_lab(hosts=3, bandwidth="300Mbit/s")
    ssh = start_sshd(lab, tmp_path / "ssh", (1, 2))
    run = train(lab, tmp_path, ssh, "localhost:1,host1:2,host2:1", "--train.epochs", "2", line="full-sync")
    finish(run)
    check_books(tmp_path, 2)
    assert "4 learners" in run.output
    assert re.search(r"host1 +\| learner \d +\| the run has ended; computed \d+ samples", run.output), run.output
    assert re.search(r"host2 +\| 1 learner of this host left the run in order", run.output), run.output
    wait_until_free(lab, (0, 1, 2))
    assert not (tmp_path / "key").exists()  # it was made for this run, and was in no file


@needs_sshd
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_killed_leaves_nothing_on_the_other_hosts(
    start_lab: StartLab, tmp_path: Path, number: signal.Signals
) -> None:
    lab = start_lab(hosts=3, bandwidth="300Mbit/s")
    ssh = start_sshd(lab, tmp_path / "ssh", (1, 2))
    words = ("--slow", "constant:0.05", "--train.epochs", "100")
    run = train(lab, tmp_path, ssh, "localhost:1,host1:1,host2:1", *words)
    wait_for(run, "epoch   1/100", LIMIT_S)
    assert "work" in programs(lab, 1) and "work" in programs(lab, 2)
    run.send_signal(number)
    assert run.wait(LIMIT_S) != 0
    wait_until_free(lab, (0, 1, 2))


@needs_sshd
def test_a_host_that_is_lost_does_not_end_the_run(start_lab: StartLab, tmp_path: Path) -> None:
    lab = start_lab(hosts=3, bandwidth="300Mbit/s")
    ssh = start_sshd(lab, tmp_path / "ssh", (1, 2))
    words = ("--slow", "constant:0.05", "--train.epochs", "4")
    run = train(lab, tmp_path, ssh, "localhost:1,host1:1,host2:1", *words)
    wait_for(run, "epoch 1/4", LIMIT_S)
    lab.kill(2)
    finish(run)
    assert "host2 ended (exit code 255); the run goes on without its learners" in run.output, run.output
    check_books(tmp_path, 4)


def test_another_command_takes_the_place_of_ssh(start_lab: StartLab, tmp_path: Path) -> None:
    lab = start_lab(hosts=2)
    with closing(RemoteShell(lab, tmp_path / "shell", os.environ)) as shell:
        run = train(lab, tmp_path, shell.agent, "localhost:1,host1:1", "--train.epochs", "1")
        finish(run)
        wait_until_free(lab, (0, 1))
    check_books(tmp_path, 1)


def test_a_script_runs_on_another_host_too(start_lab: StartLab, tmp_path: Path) -> None:
    lab = start_lab(hosts=2)
    own = ["run", "--sync", "k-async:2", "--hosts", "host1:2", "--log", str(tmp_path / "log.jsonl"), "--ssh"]
    with closing(RemoteShell(lab, tmp_path / "shell", os.environ)) as shell:
        run = lab.start(0, [*OFFBEAT, *own, shell.agent, str(SCRIPT), "--epochs", "2"])
        finish(run)
        wait_until_free(lab, (0, 1))
    assert "host1     | offbeat   | joined digits.py (k-async:2) as learner 1, 2 of 3" in run.output, run.output
    assert "k-async:2, 3 learners, 1 server" in run.output
    log = read_log(tmp_path / "log.jsonl")
    assert audited(log, epochs=2, samples=SAMPLES).complaints() == []
    events = [from_text(record["event"]) for record in log.decisions]
    assert {event.learner for event in events if isinstance(event, Pushed)} == {0, 1, 2}


def test_a_host_with_another_script_or_none_is_refused(start_lab: StartLab, tmp_path: Path) -> None:
    lab = start_lab(hosts=2)
    keys.write(tmp_path / "key")
    own = ["run", "--listen", "{host0}:7000", "--remote", "1", "--key", str(tmp_path / "key")]
    run = lab.start(0, [*OFFBEAT, *own, str(SCRIPT), "--epochs", "1"])
    other = tmp_path / "other.py"
    other.write_text("")
    join = [*OFFBEAT, "work", "--join", "{host0}:7000", "--key", str(tmp_path / "key")]
    end_s = time.monotonic() + LIMIT_S
    while "nobody listens" in (refused := lab.run(1, [*join, str(other)])).stdout:
        assert time.monotonic() < end_s
    assert refused.returncode == 2 and "runs digits.py; this host was given other.py" in refused.stdout
    without = once_free(lab, join)
    assert without.returncode == 1 and "to join `offbeat run`, name its script too" in without.stdout
    right = once_free(lab, [*join, str(SCRIPT)])
    assert right.returncode == 0, right.stdout
    finish(run)


def once_free(lab: Lab, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Who was refused keeps its place for some seconds."""
    end_s = time.monotonic() + LIMIT_S
    while "places for learners on other hosts are taken" in (done := lab.run(1, words)).stdout:
        assert time.monotonic() < end_s
    return done


def test_a_host_that_cannot_start_its_learners_ends_the_run_in_one_line(start_lab: StartLab, tmp_path: Path) -> None:
    lab = start_lab(hosts=2)
    with closing(RemoteShell(lab, tmp_path / "shell", os.environ)) as shell:
        nowhere = train(lab, tmp_path / "a", shell.agent, "host1:1", "--remote-python", "/nowhere/python")
        assert nowhere.wait(LIMIT_S) == 1
    told = "offbeat: host1 did not start its learners (exit code 127): sh: 1: exec: /nowhere/python: not found"
    assert told in nowhere.output.splitlines()
    wait_until_free(lab, (0, 1))


# --- without a lab ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--hosts alice", "expected HOST:LEARNERS"),
        ("--hosts alice:0", "expected a whole number from 1"),
        ("--hosts -oProxyCommand=x:1", "expected one argument"),
        ("--hosts=-oProxyCommand=x:1", "expected HOST:LEARNERS"),
        ("--hosts alice:1,alice:2", "'alice' is named twice"),
        ("--hosts localhost:2", "names this host only"),
        ("--hosts localhost:1,alice:1 --learners 3", "--hosts has 2 learners, but --learners is 3"),
        ("--hosts alice:2 --learners 2", "at least one of the 2 learners must be on this host"),
        ("--hosts alice:2 --remote 2", "remove --remote"),
        ("--hosts alice:2 --sync ring", "learners cannot join 'ring'"),
        ("--ssh rsh", "--ssh needs --hosts"),
        ("--hosts alice:2 --ssh ''", "expected a command"),
        ("--hosts no.such.host.invalid:2", "give --listen ADDRESS:PORT"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(words: str, told: str, capfd: pytest.CaptureFixture[str]) -> None:
    code = main(["train", "--sync", "async", *(word.strip("'") for word in words.split(" "))])
    (line,) = capfd.readouterr().err.splitlines()
    assert code == 2 and told in line
