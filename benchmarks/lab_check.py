"""Whether `offbeat lab` keeps its promises: one line for each check; the exit code is 1 if one fails. Some minutes.

    python benchmarks/lab_check.py              # all; as root, also as user 65534
    python benchmarks/lab_check.py --rates 10Mbit/s 1Gbit/s --kills 5

shaping     Two hosts. A program of this file sends by one plain TCP connection and the receiver counts bytes by its own
            clock: nothing of the lab's own measurement is used. Each rate is measured with both links shaped, with the
            receiver's link only (what comes in), and with the sender's only (what goes out). Headers are added to the
            payload: 1,514 bytes of a frame carry 1,448. The median of five must be within 3 %.
SIGKILL     Only the process of the command itself is killed, every second time at a random moment of its start. Then no
            process of the lab runs, no other network namespace is in use than before, and no mount or link is left.
user        The same as an ordinary user, by `setpriv --reuid 65534`.
refused     A rate that this machine does not carry.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import offbeat
from offbeat.errors import LabUnavailableError, RequestError
from offbeat.lab import Lab, Network
from offbeat.lab.network import format_bandwidth
from offbeat.spec import parse_count, parse_rate

RATES = ("10Mbit/s", "100Mbit/s", "500Mbit/s", "1Gbit/s", "2Gbit/s")
TOLERANCE = 0.03
SWITCH = "offbeat.lab.init_process"  # in the command line of the switch and of the first process of each host
SETTLE_S = 5.0  # for the kernel to end what is left
FRAME, PAYLOAD = 1514, 1448

RECEIVE = """
import socket, sys, time
server = socket.create_server(("0.0.0.0", 6000)); server.settimeout(20)
print("listening", flush=True)
peer, _ = server.accept(); peer.settimeout(20)
buffer = bytearray(1 << 18)
warm, seconds, rates = float(sys.argv[1]), float(sys.argv[2]), []
end = time.perf_counter() + warm
while time.perf_counter() < end: peer.recv_into(buffer)
for _ in range(5):
    start, total = time.perf_counter(), 0
    while (now := time.perf_counter()) < start + seconds: total += peer.recv_into(buffer)
    rates.append(total / (now - start))
print(*rates, flush=True)
"""
SEND = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 6000), timeout=20)
data, end = bytes(1 << 18), time.monotonic() + 60
try:
    while time.monotonic() < end: peer.sendall(data)
except OSError: pass
"""


def report(good: bool, text: str) -> bool:
    print(f"{'ok    ' if good else 'FAILED'}  {text}", flush=True)
    return good


# --- shaping --------------------------------------------------------------------------------------------------------


def measured(network: Network, seconds: float) -> float:
    """Bytes per second on the link while host 0 sends to host 1."""
    program = [sys.executable, "-I", "-S", "-c"]
    with Lab(network) as lab:
        receiver = lab.start(1, [*program, RECEIVE, "0.5", str(seconds)])
        deadline = time.monotonic() + 20
        while "listening" not in receiver.output and time.monotonic() < deadline:
            time.sleep(0.01)
        lab.start(0, [*program, SEND, "{host1}"])
        done = receiver.result(60)
    rates = [float(word) for word in done.stdout.split()[1:]]
    return statistics.median(rates) * FRAME / PAYLOAD


def check_shaping(text: str, seconds: float) -> bool:
    rate = parse_rate(text)
    networks = {
        "both": Network(bandwidths=(rate, rate)),
        "in": Network(bandwidths=(None, rate)),
        "out": Network(bandwidths=(rate, None)),
    }
    try:
        shares = {name: measured(network, seconds) / rate for name, network in networks.items()}
    except RequestError as error:
        return report(False, f"shaping {text}: {error}")
    told = ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares.items())
    return report(all(abs(share - 1) <= TOLERANCE for share in shares.values()), f"shaping {text}: {told} of the rate")


# --- nothing is left ------------------------------------------------------------------------------------------------


def commands() -> str:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_text(errors="replace"))
    return "\n".join(found)


def namespaces() -> set[str]:
    """Network namespaces in which a process is."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(path))  # noqa: PTH115 - not a file
    return found


def machine() -> tuple[str, list[str]]:
    """Mounts and links of this machine."""
    return Path("/proc/self/mounts").read_text(), sorted(os.listdir("/sys/class/net"))  # noqa: PTH208 - names


def check_kills(times: int, program: Sequence[str], who: str, environment: dict[str, str]) -> bool:
    """SIGKILL at random moments, from the first start of the program to the middle of its work."""
    chance, before = random.Random(1), (machine(), namespaces())
    left, begun = 0, 0
    for number in range(times):
        token = f"300.{os.getpid()}{number}"
        script = f"trap '' TERM INT HUP; setsid sleep {token} & echo begun; exec sleep {token}"
        words = [*program, "-m", "offbeat", "lab", "--hosts", "3", "--bandwidth", "100Mbit/s", "--", "sh", "-c", script]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as lab:
            assert lab.stdout is not None
            if number % 2:  # in the middle of its start
                time.sleep(chance.uniform(0.0, 1.0))
            else:
                while line := lab.stdout.readline():
                    if b"begun" in line:
                        begun += 1
                        break
            lab.kill()
        deadline = time.monotonic() + SETTLE_S
        while (token in commands() or SWITCH in commands()) and time.monotonic() < deadline:
            time.sleep(0.01)
        left += token in commands() or SWITCH in commands() or not namespaces() <= before[1]
    same = machine() == before[0]
    text = f"SIGKILL of the lab {times} times as {who}, {begun} of them while programs ran: {left} left something"
    good = not left and same and begun == (times + 1) // 2
    return report(good, text + ("" if same else "; mounts or links of this machine have changed"))


# --- as an ordinary user --------------------------------------------------------------------------------------------


def ordinary_user() -> list[str] | None:
    """The words that start Python as user 65534, or None where no interpreter can be read by it."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return None
    drop = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    for python in (sys.executable, "/usr/bin/python3"):
        done = subprocess.run([*drop, "sh", "-c", f"exec {python} -c pass"], capture_output=True, check=False)
        if done.returncode == 0:
            return [*drop, python]
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Whether offbeat lab keeps its promises.")
    parser.add_argument("--rates", nargs="*", default=RATES, metavar="RATE")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each of the five measurements of a rate")
    parser.add_argument("--kills", type=parse_count, default=20, metavar="N")
    given = parser.parse_args()
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, Linux {os.uname().release}")
    source = Path(offbeat.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{source}:{sysconfig.get_path('purelib')}"}
    own = "root" if os.geteuid() == 0 else "an ordinary user"
    try:
        Lab(Network.of(hosts=1)).__enter__().close()
    except LabUnavailableError as why:
        return int(not report(False, str(why)))
    good = [check_shaping(rate, given.seconds) for rate in given.rates]
    good.append(check_kills(given.kills, [sys.executable], own, environment))
    user = ordinary_user()
    if user is not None:
        words = [*user, "-m", "offbeat", "lab", "--hosts", "2", "--bandwidth", "100Mbit/s", "--", "hostname"]
        done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=60, check=False)
        fine = done.returncode == 0 and "in a user namespace" in done.stdout and "host1 | host1" in done.stdout
        good.append(report(fine, f"user 65534: {(done.stderr or done.stdout).splitlines()[0]}"))
        good.append(check_kills(given.kills, user, "user 65534", environment))
    try:
        with Lab(Network.of(hosts=2, bandwidth="1000Gbit/s")) as lab:
            good.append(report(False, f"refused: 1000 Gbit/s was taken: {lab.measured}"))
    except RequestError as error:
        good.append(report(True, f"refused: {error}"))
    reached = ", ".join(map(format_bandwidth, _unshaped()))
    good.append(report(True, f"not shaped: two hosts that send at once receive {reached}"))
    return int(not all(good))


def _unshaped() -> tuple[float, ...]:
    with Lab(Network.of(hosts=2)) as lab:
        return lab.measure(1.0)


if __name__ == "__main__":
    sys.exit(main())
