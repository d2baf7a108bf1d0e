"""offbeat lab: a command on several hosts, which are namespaces of this machine."""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable
from typing import Any

from offbeat.commands.base import Command, line_printer, option, print_json
from offbeat.errors import OffbeatError, RequestError, Terminated
from offbeat.lab import Lab, Network
from offbeat.lab.control import HostProcess
from offbeat.lab.network import (
    CONGESTION_CONTROL,
    MTU,
    format_bandwidth,
    parse_host,
    queue_bytes,
)
from offbeat.number_format import format_size
from offbeat.processes.child import LineReader, describe_exit
from offbeat.spec import count_of, parse_count

_GRACE_S = 3.0  # for the command to end when it is asked to


def _run(given: argparse.Namespace) -> None:
    words = given.words[1:] if given.words[:1] == ["--"] else given.words
    if not words:
        raise RequestError("lab: a command is required: offbeat lab --hosts 2 -- hostname")
    network = Network.of(hosts=given.hosts, bandwidth=given.bandwidth, slow=given.slow)
    on = sorted(set(range(network.hosts) if given.on is None else given.on))
    if on[-1] >= network.hosts:
        raise RequestError(f"lab: --on {on[-1]}: there are {network.hosts} hosts, numbered from 0")
    for host in on:
        network.fill(words, host)  # a wrong placeholder is refused before anything is started
    say = line_printer(len(network.name(network.hosts - 1)), to_stderr=given.json)
    with Lab(network) as lab:
        for line in _facts(lab):
            say("lab", line)
        with contextlib.closing(_Relay(lab, say)) as relay:
            for host in on:
                relay.start(host, words)
            exits = relay.run()
    if given.json:
        print_json(_summary(lab, words, exits))
    failed = {host: code for host, code in exits.items() if code}
    if failed:
        told = ", ".join(f"{network.name(host)} ({describe_exit(code)})" for host, code in failed.items())
        error = OffbeatError(f"lab: the command failed on {told}")
        error.exit_code = max(code if code > 0 else 128 - code for code in failed.values())
        raise error


def _facts(lab: Lab) -> list[str]:
    network = lab.network
    how = "as root" if lab.user == "root" else "as an ordinary user, in a user namespace"
    lines = [
        f"{count_of(network.hosts, 'host')} on one switch, started {how}",
        f"MTU {MTU}, {CONGESTION_CONTROL}, segments of {format_size(network.segment_bytes)}, "
        f"bursts of {format_size(network.burst_bytes)}",
    ]
    for host, rate in enumerate(network.bandwidths):
        shaped = "bandwidth not limited"
        if rate is not None:
            shaped = f"{format_bandwidth(rate)} each way (tbf, queue {format_size(queue_bytes(rate))})"
        lines.append(f"{network.name(host)}  {network.address(host)}  {shaped}")
    if lab.measured is not None:
        rates = ", ".join(map(format_bandwidth, lab.measured))
        lines.append(f"measured while every host sends to the next one: {rates}")
    return lines


def _summary(lab: Lab, words: list[str], exits: dict[int, int]) -> dict[str, Any]:
    network = lab.network
    measured = lab.measured or [None] * network.hosts
    hosts = [
        {
            "name": network.name(host),
            "address": network.address(host),
            "bytes_per_s": rate,
            "queue_bytes": None if rate is None else queue_bytes(rate),
            "measured_bytes_per_s": measured[host],
            "exit_code": exits.get(host),
        }
        for host, rate in enumerate(network.bandwidths)
    ]
    return {
        "command": words, "user": lab.user, "mtu": MTU, "congestion_control": CONGESTION_CONTROL,
        "segment_bytes": network.segment_bytes, "burst_bytes": network.burst_bytes, "hosts": hosts,
    }  # fmt: skip


class _Relay:
    """The command on each host: every line that it prints is passed on, and its exit code kept."""

    def __init__(self, lab: Lab, say: Callable[[str, str], None]) -> None:
        self._lab, self._say = lab, say
        self._selector = selectors.DefaultSelector()
        self._processes: dict[int, HostProcess] = {}  # those that run
        self._pipes: dict[int, int] = {}
        self._readers: dict[int, LineReader] = {}
        self._exits: dict[int, int] = {}

    def start(self, host: int, words: list[str]) -> None:
        pipe, writer = os.pipe()
        self._pipes[host], self._readers[host] = pipe, LineReader(pipe)
        try:
            self._processes[host] = self._lab.start(host, words, output=writer)
        finally:
            os.close(writer)
        self._selector.register(pipe, selectors.EVENT_READ, (host, False))
        self._selector.register(self._processes[host], selectors.EVENT_READ, (host, True))

    def close(self) -> None:
        self._selector.close()
        for pipe in self._pipes.values():
            os.close(pipe)

    def run(self) -> dict[int, int]:
        """Until all have ended; host -> exit code. A signal is passed on, and they have a moment to end by it."""
        try:
            self._watch()
        except (KeyboardInterrupt, Terminated) as end:
            number = signal.SIGINT if isinstance(end, KeyboardInterrupt) else signal.SIGTERM
            for process in self._processes.values():
                process.send_signal(number)
            self._watch(time.monotonic() + _GRACE_S)
            raise
        return dict(sorted(self._exits.items()))

    def _watch(self, deadline: float | None = None) -> None:
        while self._processes:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            for key, _ in self._selector.select(left):
                host, ended = key.data
                if ended:
                    self._read(host, last=True)
                    self._selector.unregister(key.fileobj)
                    self._exits[host] = self._processes.pop(host).wait()
                elif host in self._processes:
                    self._read(host)

    def _read(self, host: int, *, last: bool = False) -> None:
        """Pass on the lines that are whole; with `last`, all that is there."""
        if host not in self._pipes:
            return
        lines, ended = self._readers[host].read_lines(last=last)
        for line in lines:
            self._say(self._lab.network.name(host), line)
        if ended:
            self._selector.unregister(self._pipes[host])
            os.close(self._pipes.pop(host))


COMMAND = Command(
    summary="run a command on several virtual hosts (Linux namespaces) of this machine",
    about="""Create a small virtual cluster on this machine, run a command on each of its hosts, and remove it again.

Each host is a set of Linux namespaces: it has its own network interface and address, hostname, processes and shared
memory; files are shared. A switch joins the hosts. --bandwidth limits each host's link, both ways; if this
machine cannot reach that bandwidth, the lab does not start. It works as root, and as an ordinary user if user
namespaces are allowed.

Each line that the command prints is shown with the host that printed it. The exit code is the highest one. Ctrl-C is
passed on to the command. However the lab ends, it leaves nothing behind.""",
    examples=(
        "lab --hosts 2 --bandwidth 100Mbit/s -- hostname",
        "lab --hosts 3 --bandwidth 200Mbit/s --slow host=2,bandwidth=10Mbit/s --on 0 -- echo {host1} {host2}",
    ),
    options=(
        option(
            "words",
            nargs=argparse.REMAINDER,
            metavar="-- COMMAND",
            help="command to run; {host0}, {host1} ... become addresses, {host} becomes the number of the host",
        ),
        option("--hosts", read=parse_count, default=2, metavar="N", help="number of hosts (default 2)"),
        option("--bandwidth", metavar="RATE", help="bandwidth of each host's link, like 1Gbit/s (default: unlimited)"),
        option(
            "--slow",
            action="append",
            default=[],
            metavar="HOW",
            help="a different bandwidth for one host's link: host=2,bandwidth=100Mbit/s; may be given several times",
        ),
        option(
            "--on",
            action="append",
            read=parse_host,
            metavar="HOST",
            help="run the command on this host only; may be given several times (default: on every host)",
        ),
    ),
    run=_run,
)
