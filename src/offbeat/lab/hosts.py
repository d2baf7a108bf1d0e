"""The hosts of a lab, started, joined by their network, changed while they run, and ended.

Laws: when the process that made a lab ends, however it ends, nothing of the lab is left. (The thread that made it must
live as long as the lab.) A change of a link is in force when the call returns. After `kill` no process of the host
runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from offbeat.errors import LabError, LabUnavailableError, RequestError
from offbeat.lab import network as commands
from offbeat.lab.control import HostProcess, InitProcess, PipedProcess
from offbeat.lab.network import Direction, Network, format_bandwidth, parse_bandwidth, payload_rate
from offbeat.spec import count_of

_HERE = Path(__file__).parent
_SWITCH = """
import sys
sys.path.insert(0, sys.argv[1])
from offbeat.lab.init_process import main
main(int(sys.argv[2]))
"""
_PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "mount": "mount"}  # and Debian's name of their package
_SETUP_S = 30.0
_GRANTED = 1.25e8  # bytes per second of all hosts together (1 Gbit/s) that are not measured: every machine carries that
_MEASURE_S, _WARM_UP_S = 0.3, 0.1
_ENOUGH, _ATTEMPTS = 0.9, 3  # of the rate that was asked for
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Lab:
    """See the module's text. `with Lab(network) as lab` starts the hosts and ends them."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.user = ""  # "root", or "user" where it runs in a user namespace
        self.measured: tuple[float, ...] | None = None  # bytes per second to each host while all sent at once
        self._hosts: dict[int, InitProcess] = {}
        self._processes: list[HostProcess] = []
        self._program: subprocess.Popen[bytes] | None = None
        self._switch: InitProcess

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- start and end ----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if sys.platform != "linux":
            raise LabUnavailableError(f"lab: needs Linux namespaces; this is {sys.platform}")
        for program, package in _PROGRAMS.items():
            if shutil.which(program, path=_PATH) is None:
                raise LabUnavailableError(f"lab: the program '{program}' is missing: apt-get install {package}")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._program = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _SWITCH, str(_HERE.parents[1]), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise LabUnavailableError(f"lab: cannot start {sys.executable}: {error.strerror}") from None
        self._switch = InitProcess("switch", ours)
        try:
            self.user = self._switch.receive()
            self._run_script(self._switch, commands.switch_script())
            for host in range(self.network.hosts):
                self._boot(host)
        except LabError as error:
            raise LabUnavailableError(f"lab: this machine does not allow the namespaces of a lab: {error}") from None
        for host in range(self.network.hosts):
            self.restore(host)
        self._check_rates()

    def _boot(self, host: int) -> None:
        """A host, and its link to the switch, which is not shaped yet."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._hosts[host] = init = InitProcess(self.network.name(host), ours)
            pid = self._switch.ask({"boot": self.network.name(host)}, [theirs.fileno()])
        self._run_script(init, commands.mount_script(self.network))
        self._run_script(self._switch, commands.plug_script(self.network, host, pid))
        self._run_script(init, commands.address_script(self.network, host))

    def close(self) -> None:
        for init in self._hosts.values():
            init.shut()
        for init in self._hosts.values():
            init.close()
        self._hosts.clear()
        for process in self._processes:
            process.close()
        if self._program is not None:
            self._switch.close()
            try:
                self._program.wait(_SETUP_S)
            except subprocess.TimeoutExpired:
                self._program.kill()
                self._program.wait()
            self._program = None

    def _run_script(self, init: InitProcess, script: str) -> None:
        """By `sh`, up to the first command that fails."""
        shell = _start(init, ["sh", "-ec", script], environment={"PATH": _PATH}, directory="/")
        with contextlib.closing(shell):
            done = shell.result(_SETUP_S)
        if done.returncode:
            raise LabError(f"{init.name}: {done.stdout.strip() or f'sh ended with {done.returncode}'}")

    # --- programs ---------------------------------------------------------------------------------------------------

    def start(
        self,
        host: int,
        words: Sequence[str],
        *,
        output: int | None = None,
        environment: Mapping[str, str] | None = None,
        directory: str | Path | None = None,
    ) -> HostProcess:
        """Start a program on a host. What it prints is kept in `output` of the result, or goes to a descriptor.

        Environment and working directory are those of this process unless they are given. `{host0}` in a word becomes
        the address of host 0, and `{host}` the number of this host.
        """
        process = _start(
            self._init(host),
            self.network.fill(words, host),
            output=output,
            environment=os.environ if environment is None else environment,
            directory=str(Path.cwd() if directory is None else directory),
        )
        self._processes.append(process)
        return process

    def start_with(
        self, host: int, words: Sequence[str], streams: Sequence[int], environment: Mapping[str, str]
    ) -> HostProcess:
        """Start a program on a host with these three descriptors as its standard streams."""
        init = self._init(host)
        pid, ended = init.start(
            words,
            input=streams[0],
            output=streams[1],
            errors=streams[2],
            environment=environment,
            directory=str(Path.cwd()),
        )
        return HostProcess(init, words, pid=pid, ended=ended, output=-1)

    def start_piped(self, host: int, words: Sequence[str], environment: Mapping[str, str]) -> PipedProcess:
        """Start a program on a host, with pipes to its standard input, output and error."""
        return PipedProcess(self._init(host), self.network.fill(words, host), environment)

    def run(self, host: int, words: Sequence[str], *, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a program on a host until it ends; `stdout` is all that it printed. Nothing of it is kept."""
        process = self.start(host, words)
        result = process.result(timeout_s)
        process.close()
        self._processes.remove(process)
        return result

    def _init(self, host: int) -> InitProcess:
        self._check(host)
        if host not in self._hosts:
            raise LabError(f"{self.network.name(host)}: it is gone")
        return self._hosts[host]

    def _check(self, host: int) -> None:
        if not 0 <= host < self.network.hosts:
            raise RequestError(f"hosts are numbered from 0 to {self.network.hosts - 1}; got {host}")

    # --- faults -----------------------------------------------------------------------------------------------------

    def slow(self, host: int, bandwidth: str, direction: Direction = "both") -> None:
        """Change the bandwidth of a host's link; connections stay."""
        self._shape(host, parse_bandwidth(bandwidth), direction)

    def cut(self, host: int, direction: Direction = "both") -> None:
        """What the host sends (`out`), what is sent to it (`in`), or both vanishes from now on. Nobody is told."""
        self._shape(host, 0.0, direction)

    def kill(self, host: int) -> None:
        """Every process of the host is killed. Its connections are closed by the kernel; cut its link first for a host
        that falls silent.
        """
        self._init(host).close()
        del self._hosts[host]
        self._run_script(self._switch, commands.unplug_script(host))

    def restore(self, host: int) -> None:
        """The link as it was at first, both ways. A host that was killed is started again, with no programs on it."""
        self._check(host)
        if host not in self._hosts:
            self._boot(host)
        self._shape(host, self.network.bandwidths[host], "both")

    def _shape(self, host: int, bytes_per_s: float | None, direction: Direction) -> None:
        init, burst = self._init(host), self.network.burst_bytes
        if direction in ("out", "both"):
            self._run_script(init, commands.shape("eth0", bytes_per_s, burst))
        if direction in ("in", "both"):
            self._run_script(self._switch, commands.shape(commands.port(host), bytes_per_s, burst))

    # --- what the machine can carry ---------------------------------------------------------------------------------

    def _check_rates(self) -> None:
        """Refuse rates that are not reached when every host sends to the next one at the same time.

        A busy machine may miss a rate once: the best of some attempts counts.
        """
        rates = self.network.bandwidths
        if self.network.hosts < 2 or sum(rate for rate in rates if rate is not None) <= _GRANTED:
            return
        pairs = [(rates[host - 1], rates[host]) for host in range(self.network.hosts)]
        expected = [min((rate for rate in pair if rate is not None), default=0.0) for pair in pairs]
        best = [0.0] * self.network.hosts
        for _ in range(_ATTEMPTS):
            best = [max(pair) for pair in zip(best, self.measure(_MEASURE_S), strict=True)]
            missed = [host for host, rate in enumerate(expected) if best[host] < _ENOUGH * rate]
            if not missed:
                break
        self.measured = tuple(best)
        if missed:
            host = min(missed, key=lambda host: best[host] / expected[host])
            raise RequestError(
                f"this machine cannot carry {format_bandwidth(expected[host])} to {self.network.name(host)}: "
                f"{format_bandwidth(best[host])} were measured while {count_of(self.network.hosts, 'host')} sent at "
                "once; ask for less bandwidth or fewer hosts, or wait until the machine is less busy"
            )

    def measure(self, seconds: float) -> tuple[float, ...]:
        """What each host receives, headers included, in bytes per second, while every host sends to the next one."""
        hosts = range(self.network.hosts)
        started = [
            self.start(
                host,
                [sys.executable, "-I", "-S", str(_HERE / "traffic.py"), self.network.address(host),
                 self.network.address((host + 1) % len(hosts)), str(_WARM_UP_S), str(seconds)],
            )
            for host in hosts
        ]  # fmt: skip
        results = [process.result(seconds + _SETUP_S) for process in started]
        for host, done in zip(hosts, results, strict=True):
            if done.returncode:
                raise LabError(f"{self.network.name(host)}: its traffic cannot be measured: {done.stdout.strip()}")
        return tuple(float(json.loads(done.stdout)) / payload_rate(1.0) for done in results)


def _start(
    init: InitProcess,
    words: Sequence[str],
    *,
    output: int | None = None,
    environment: Mapping[str, str],
    directory: str,
) -> HostProcess:
    kept = os.memfd_create("lab-output") if output is None else -1
    try:
        pid, ended = init.start(
            words, output=kept if output is None else output, environment=environment, directory=directory
        )
    except BaseException:
        if kept >= 0:
            os.close(kept)
        raise
    return HostProcess(init, words, pid=pid, ended=ended, output=kept)
