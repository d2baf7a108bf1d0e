"""Hosts of a lab: what each has of its own, and what can be done to them and to their links."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path

import pytest

from lab.fixture import StartLab, wait_for, why_no_lab
from offbeat.errors import LabError, LabUnavailableError, RequestError
from offbeat.lab import Lab, Network, hosts
from offbeat.lab.control import HostProcess

PYTHON = [sys.executable, "-I", "-S", "-c"]
REASONS = (
    "needs Linux", "is missing", "cannot start", "limit of namespaces", "not permitted", "denied", "not supported",
    "Unknown device type", "kind is unknown", "Invalid argument",
)  # fmt: skip
NAMESPACES = ("net", "uts", "mnt", "pid", "ipc")

LISTEN = """
import socket
port = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
port.bind(('0.0.0.0', 7000))
print('listening', flush=True)
while True:
    print('got', port.recv(100).decode(), flush=True)
"""
SEND = """
import socket, sys
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(sys.argv[2].encode(), (sys.argv[1], 7000))
"""
HOLD = """
import socket, sys
server = socket.create_server(('0.0.0.0', 7000))
print('listening', flush=True)
peer, _ = server.accept()
print('connected', peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).strip(b'\\0').decode(), flush=True)
try:
    data = peer.recv(1)
except ConnectionError:
    data = b''
print('closed' if not data else 'data', flush=True)
"""
CONNECT = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 7000), timeout=20)
segment = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
name = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).strip(b'\\0').decode()
print('connected', name, segment, flush=True)
time.sleep(60)
"""


def listeners(lab: Lab) -> list[HostProcess]:
    started = [lab.start(host, [*PYTHON, LISTEN]) for host in range(lab.network.hosts)]
    for process in started:
        wait_for(process, "listening")
    return started


def send(lab: Lab, source: int, target: int, text: str) -> None:
    done = lab.run(source, [*PYTHON, SEND, lab.network.address(target), text])
    assert done.returncode == 0, done.stdout


def test_tests_are_skipped_for_a_known_reason_only() -> None:
    """A mistake in the lab must not look like a machine that does not allow it."""
    reason = why_no_lab()
    assert reason is None or any(known in reason for known in REASONS), reason


# --- what a host is -------------------------------------------------------------------------------------------------


def test_each_host_has_namespaces_hostname_address_processes_and_shared_memory_of_its_own(start_lab: StartLab) -> None:
    lab = start_lab(hosts=2, bandwidth="100Mbit/s")
    links = [{name: os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}]  # noqa: PTH115 - not a file
    for host in range(2):
        done = lab.run(host, ["sh", "-c", "for x in net uts mnt pid ipc; do readlink /proc/self/ns/$x; done"])
        links.append(dict(zip(NAMESPACES, done.stdout.split(), strict=True)))
        assert lab.run(host, ["hostname"]).stdout == f"host{host}\n"
        assert lab.run(host, [*PYTHON, "import socket; print(socket.gethostbyname(socket.gethostname()))"]).stdout == (
            f"{lab.network.address(host)}\n"
        )
        assert lab.run(host, ["sh", "-c", "cat /proc/1/comm; ls /sys/class/net"]).stdout.split()[1:] == ["eth0", "lo"]
        assert lab.run(host, ["sh", "-c", "touch /dev/shm/mine; ls /dev/shm"]).stdout == "mine\n"
    assert all(len({of[name] for of in links}) == 3 for name in NAMESPACES)
    assert not Path("/dev/shm/mine").exists()


def test_what_a_program_printed_and_how_it_ended_is_known_also_after_the_lab(start_lab: StartLab) -> None:
    lab = start_lab(hosts=1)
    failed = lab.run(0, ["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (failed.returncode, failed.stdout) == (3, "out\nerr\n")
    process = lab.start(0, ["sleep", "60"])
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM
    process.send_signal(signal.SIGTERM)  # it has ended: nothing happens
    running = lab.start(0, ["sh", "-c", "echo started; sleep 60"])
    wait_for(running, "started")
    with pytest.raises(TimeoutError, match=r"host0: 'sh -c .*' has been running for more than 0.01 s"):
        running.wait(0.01)
    lab.close()
    assert (running.wait(0), running.output) == (-signal.SIGKILL, "started\n")


def test_of_a_program_that_was_run_to_its_end_no_descriptor_is_left(start_lab: StartLab) -> None:
    lab = start_lab(hosts=1)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        lab.run(0, ["true"])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_program_is_waited_for_by_a_descriptor_above_1023(start_lab: StartLab) -> None:
    lab = start_lab(hosts=1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limits[1]), limits[1]))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert lab.run(0, ["echo", "here"]).stdout == "here\n"
    finally:
        for one in taken:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_program_gets_its_environment_directory_and_arguments(start_lab: StartLab, tmp_path: Path) -> None:
    lab = start_lab(hosts=2)
    words = ["sh", "-c", 'echo "$WORD" "$0"; pwd', "{host}-{host0}"]
    process = lab.start(1, words, environment={**os.environ, "WORD": "hello"}, directory=tmp_path)
    assert process.result().stdout.split() == ["hello", f"1-{lab.network.address(0)}", str(tmp_path)]


def test_what_cannot_be_started_is_one_line(start_lab: StartLab) -> None:
    lab = start_lab(hosts=1)
    with pytest.raises(LabError, match=r"^host0: no-such-program: No such file or directory$"):
        lab.start(0, ["no-such-program"])
    with pytest.raises(LabError, match=r"^host0: this command cannot be sent: Message too long$"):
        lab.start(0, ["echo", "x" * 10**6])
    for call in (lambda: lab.start(1, ["hostname"]), lambda: lab.restore(1), lambda: lab.cut(-1)):
        with pytest.raises(RequestError, match=r"hosts are numbered from 0 to 0; got -?1"):
            call()
    assert lab.run(0, ["hostname"]).stdout == "host0\n"


def test_processes_that_lost_their_parent_are_collected(start_lab: StartLab) -> None:
    lab = start_lab(hosts=1)
    lab.run(0, ["sh", "-c", "(sleep 0.01; echo late > /dev/shm/late) & (exit 0) & exit 0"])
    wait = "while ! test -e /dev/shm/late; do sleep 0.01; done; sleep 0.05"
    done = lab.run(0, ["sh", "-c", f"{wait}; grep -l '^State:.*zombie' /proc/[0-9]*/status"])
    assert done.stdout == ""


# --- links ----------------------------------------------------------------------------------------------------------


def test_connections_use_cubic_at_both_ends_and_packets_of_1500_bytes(start_lab: StartLab) -> None:
    lab = start_lab(hosts=2)
    server = lab.start(0, [*PYTHON, HOLD])
    wait_for(server, "listening")
    client = lab.start(1, [*PYTHON, CONNECT, "{host0}"])
    wait_for(client, "connected cubic 1448")
    wait_for(server, "connected cubic")


def test_a_link_is_cut_one_way_or_both_and_restored(start_lab: StartLab) -> None:
    lab = start_lab(hosts=2, bandwidth="100Mbit/s")
    zero, one = listeners(lab)

    def exchange(word: str) -> tuple[bool, bool]:
        """Whether a datagram to host 1 and one from it arrive; packets of one link stay in order."""
        send(lab, 0, 1, f"{word}-there")
        send(lab, 1, 0, f"{word}-back")
        lab.restore(1)
        send(lab, 0, 1, f"{word}-end")
        send(lab, 1, 0, f"{word}-end")
        wait_for(zero, f"{word}-end")
        wait_for(one, f"{word}-end")
        return f"{word}-there" in one.output, f"{word}-back" in zero.output

    assert exchange("whole") == (True, True)
    lab.cut(1, "in")
    assert exchange("in") == (False, True)
    lab.cut(1, "out")
    assert exchange("out") == (True, False)
    lab.cut(1)
    assert exchange("both") == (False, False)
    assert exchange("restored") == (True, True)


def test_a_link_is_slowed_while_a_connection_is_open(start_lab: StartLab) -> None:
    lab = start_lab(hosts=2, bandwidth="400Mbit/s")
    server = lab.start(0, [*PYTHON, HOLD])
    wait_for(server, "listening")
    client = lab.start(1, [*PYTHON, CONNECT, "{host0}"])
    wait_for(client, "connected")
    lab.slow(1, "8Mbit/s", "in")
    assert lab.measure(0.2)[1] < 1.5e6
    lab.slow(1, "400Mbit/s", "in")
    lab.slow(1, "8Mbit/s", "out")
    assert lab.measure(0.2)[0] < 1.5e6
    lab.restore(1)
    assert min(lab.measure(0.2)) > 2e6
    client.send_signal(signal.SIGKILL)
    wait_for(server, "closed")


# --- hosts that are killed ------------------------------------------------------------------------------------------


def test_a_host_is_killed_with_all_its_processes_and_started_again(start_lab: StartLab) -> None:
    lab = start_lab(hosts=3)
    server = lab.start(0, [*PYTHON, HOLD])
    wait_for(server, "listening")
    client = lab.start(1, [*PYTHON, CONNECT, "{host0}"])
    token = f"60.{os.getpid()}1"
    lab.run(1, ["sh", "-c", f"setsid sleep {token} >/dev/null 2>&1 &"])
    wait_for(server, "connected")
    assert token in commands_of_this_machine()
    lab.kill(1)
    assert client.wait(0) == -signal.SIGKILL
    assert token not in commands_of_this_machine()
    wait_for(server, "closed")
    with pytest.raises(LabError, match="host1: it is gone"):
        lab.run(1, ["hostname"])
    assert lab.run(2, ["hostname"]).stdout == "host2\n"
    lab.restore(1)
    listening = listeners(lab)
    send(lab, 1, 2, "again-there")
    send(lab, 2, 1, "again-back")
    wait_for(listening[2], "again-there")
    wait_for(listening[1], "again-back")


def commands_of_this_machine() -> str:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_text(errors="replace").replace("\0", " "))
        except OSError:  # it has ended meanwhile
            continue
    return "\n".join(found)


def test_a_switch_that_is_killed_takes_the_hosts_with_it(start_lab: StartLab) -> None:
    lab = start_lab(hosts=2)
    process = lab.start(1, ["sleep", f"60.{os.getpid()}2"])
    assert lab._program is not None
    lab._program.kill()
    assert process.wait(30) == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while f"60.{os.getpid()}2" in commands_of_this_machine():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_a_rate_that_the_machine_does_not_carry_is_refused(start_lab: StartLab) -> None:
    with pytest.raises(RequestError, match=r"cannot carry 2000 Gbit/s to host\d: .*bit/s were measured while 2 "):
        start_lab(hosts=2, bandwidth="2000Gbit/s")


def test_a_missing_program_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hosts, "_PATH", str(tmp_path))
    lab = Lab(Network.of(hosts=1))
    with pytest.raises(LabUnavailableError, match="the program 'ip' is missing: apt-get install iproute2"), lab:
        pass
