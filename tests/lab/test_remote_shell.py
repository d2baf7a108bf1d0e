"""A command on another host of a lab, as by ssh."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from pathlib import Path

from lab.fixture import StartLab, wait_for
from offbeat.lab.remote_shell_server import RemoteShell


def test_a_host_runs_commands_on_another_with_its_own_streams_and_gets_the_exit_code(
    start_lab: StartLab, tmp_path: Path
) -> None:
    lab = start_lab(hosts=2)
    with closing(RemoteShell(lab, tmp_path / "shell", os.environ)) as shell:
        done = lab.run(0, [*shell.agent.split(), "host1", "echo from $(hostname);", "exit 3"])
        assert (done.returncode, done.stdout) == (3, "from host1\n")
        by_address = lab.run(0, [*shell.agent.split(), "10.0.0.2", "kill -9 $$"])
        assert by_address.returncode == 137
        unknown = lab.run(0, [*shell.agent.split(), "host7", "true"])
        assert unknown.returncode == 255 and "no host 'host7' in this lab" in unknown.stdout


def test_a_command_whose_caller_is_killed_is_killed(start_lab: StartLab, tmp_path: Path) -> None:
    lab = start_lab(hosts=2)
    with closing(RemoteShell(lab, tmp_path / "shell", os.environ)) as shell:
        caller = lab.start(0, [*shell.agent.split(), "host1", "echo started; sleep 60"])
        wait_for(caller, "started")
        caller.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 20
        while "sleep" in lab.run(1, ["sh", "-c", "cat /proc/[0-9]*/comm"]).stdout.split():
            assert time.monotonic() < deadline
            time.sleep(0.05)
