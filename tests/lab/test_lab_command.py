"""`offbeat lab`: what it prints, its exit code, and that nothing is left of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lab.fixture import why_no_lab
from lab.test_hosts import commands_of_this_machine
from offbeat.cli import main

LAB = [sys.executable, "-m", "offbeat", "lab", "--hosts", "2"]


pytestmark = pytest.mark.skipif(why_no_lab() is not None, reason=f"{why_no_lab()}")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str], str]:
    code = main(["lab", *words])
    told = capsys.readouterr()
    return code, told.out.splitlines(), told.err


def test_lines_are_shown_with_their_host_below_the_facts_of_the_lab(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ("--hosts", "3", "--bandwidth", "100Mbit/s", "--slow", "host=2,bandwidth=10Mbit/s")
    code, lines, err = run(capsys, *slow, "--", "sh", "-c", "echo {host} {host1}; printf end")
    assert (code, err) == (0, "")
    told = [line.removeprefix("lab   | ") for line in lines if line.startswith("lab   | ")]
    assert told[0].startswith("3 hosts on one switch, started as ")
    assert told[1:] == [
        "MTU 1500, cubic, segments of 8.192 kB, bursts of 16.38 kB",
        "host0  10.0.0.1  100 Mbit/s each way (tbf, queue 625 kB)",
        "host1  10.0.0.2  100 Mbit/s each way (tbf, queue 625 kB)",
        "host2  10.0.0.3  10 Mbit/s each way (tbf, queue 131.1 kB)",
    ]
    printed = sorted(line for line in lines if not line.startswith("lab"))
    assert printed == [f"host{host} | {text}" for host in range(3) for text in (f"{host} 10.0.0.2", "end")]


def test_the_exit_code_is_the_worst_and_failures_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "--hosts", "3", "--", "sh", "-c", "exit $((2 * {host}))")
    assert (code, err) == (4, "offbeat: lab: the command failed on host1 (exit code 2), host2 (exit code 4)\n")
    code, _, err = run(capsys, "--hosts", "2", "--on", "1", "--", "sh", "-c", "kill -9 $$")
    assert (code, err) == (137, "offbeat: lab: the command failed on host1 (SIGKILL)\n")


def test_a_command_can_run_on_some_hosts_only(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = run(capsys, "--hosts", "3", "--on", "0", "--on", "2", "hostname")
    assert code == 0 and sorted(lines)[:2] == ["host0 | host0", "host2 | host2"]
    assert not any(line.startswith("host1") for line in lines)


def test_words_after_two_dashes_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = run(capsys, "--hosts", "1", "--", "echo", "--size", "-3", "--json", "--", "-x")
    assert code == 0 and lines[-1] == "host0 | --size -3 --json -- -x"


def test_json_is_one_object_and_lines_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, err = run(capsys, "--hosts", "2", "--bandwidth", "1Mbit/s", "--on", "1", "--json", "--", "hostname")
    found = json.loads("\n".join(lines))
    assert code == 0 and "host1 | host1\n" in err
    assert (found["mtu"], found["congestion_control"], found["command"]) == (1500, "cubic", ["hostname"])
    assert [host["exit_code"] for host in found["hosts"]] == [None, 0]
    assert found["hosts"][0]["bytes_per_s"] == 125_000 and found["burst_bytes"] == 16384


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--hosts 2", "lab: a command is required"),
        ("--hosts 2 --on 2 -- true", "lab: --on 2: there are 2 hosts, numbered from 0"),
        ("--hosts 2 -- echo {host2}", "'{host2}': there are 2 hosts, numbered from 0"),
        ("--hosts 2 --slow host=0 -- true", "expected a link like host=2,bandwidth=100Mbit/s; got 'host=0'"),
    ],
)
def test_a_wrong_request_is_one_line(capsys: pytest.CaptureFixture[str], words: str, expected: str) -> None:
    code, lines, err = run(capsys, *words.split())
    assert (code, lines) == (2, []) and err.startswith(f"offbeat: {expected}") and err.count("\n") == 1


def test_a_command_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "--hosts", "1", "--", "no-such-program")
    assert (code, err) == (1, "offbeat: host0: no-such-program: No such file or directory\n")


# --- ends -----------------------------------------------------------------------------------------------------------


@contextmanager
def running(script: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own, when its script has begun on both hosts, and a word in what it runs."""
    token = f"300.{os.getpid()}{time.monotonic_ns()}"
    words = [*LAB, "--", "sh", "-c", script.replace("TOKEN", token)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            begun = 0
            while begun < 2:
                line = process.stdout.readline()
                assert line, "the lab has ended"
                begun += "begun" in line
            assert token in commands_of_this_machine()
            yield process, token
        finally:
            process.kill()
            process.wait()


def gone(token: str) -> bool:
    """Within some seconds no process has the word in its command line."""
    deadline = time.monotonic() + 10
    while token in commands_of_this_machine():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_sigkill_of_the_lab_leaves_nothing() -> None:
    with running("trap '' TERM INT HUP; setsid sleep TOKEN & echo begun; sleep TOKEN") as (process, token):
        process.kill()
        process.wait()
        assert gone(token)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_passed_on_to_the_command(number: int, code: int) -> None:
    name = signal.Signals(number).name.removeprefix("SIG")
    script = f"trap 'echo caught; exit 0' {name}; echo begun; sleep TOKEN & wait; wait"
    with running(script) as (process, token):
        process.send_signal(number)
        out, _ = process.communicate(timeout=30)
        assert process.returncode == code
        assert out.count("caught") == 2
        assert gone(token)


def test_a_command_that_ignores_ctrl_c_is_ended_after_the_grace_time() -> None:
    with running("trap '' TERM INT; echo begun; sleep TOKEN; sleep TOKEN") as (process, token):
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert process.returncode == 130
        assert gone(token)


def test_it_runs_in_a_user_namespace_without_the_rights_of_root() -> None:
    without = ["setpriv", "--bounding-set", "-sys_admin,-net_admin"] if os.geteuid() == 0 else []
    if without and shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    words = [*LAB, "--bandwidth", "10Mbit/s", "--", "hostname"]
    done = subprocess.run([*without, *words], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode and "does not allow the namespaces" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "2 hosts on one switch, started as an ordinary user, in a user namespace" in done.stdout
        and "host1 | host1" in done.stdout
    )


def test_where_namespaces_are_not_allowed_the_reason_is_one_line() -> None:
    """The limit is that of a new user namespace: the machine's own stays."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    shell = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"'
    nested = ["unshare", "--user", "--map-root-user", "sh", "-c", shell, "sh", *LAB, "--", "hostname"]
    done = subprocess.run(nested, capture_output=True, text=True, timeout=60, check=False)
    if "unshare failed" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "offbeat: lab: this machine does not allow the namespaces of a lab: switch: the limit of namespaces is reached "
        "(/proc/sys/user/)\n"
    )
