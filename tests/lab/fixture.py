"""The fixture `start_lab`: several hosts for a test.

    def test_a_peer_that_is_killed_is_named(start_lab: StartLab) -> None:
        lab = start_lab(hosts=3, bandwidth="100Mbit/s")
        process = lab.start(0, [sys.executable, "rank.py", "{host1}"])      # output is kept, {host1} is an address
        lab.slow(1, "10Mbit/s", "in")       # "in": what comes to host 1; "out": what it sends; "both" (default)
        lab.cut(2, "out")                   # packets vanish; nobody is told
        lab.kill(1)                         # every process of host 1, by SIGKILL
        lab.restore(1)                      # started again, its link as it was at first
        assert process.wait(timeout_s=30) == 1 and "host 1" in process.output

Labs end with the test. Where the machine does not allow namespaces, the test is skipped with the reason. Up to 1 Gbit/s
of all links together no rate is measured at the start, and none refused: keep to that where other tests run beside.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import pytest

from offbeat.errors import LabUnavailableError
from offbeat.lab import Lab, Network
from offbeat.lab.control import HostProcess


class StartLab(Protocol):
    def __call__(self, *, hosts: int = 2, bandwidth: str | None = None, slow: Sequence[str] = ()) -> Lab: ...


@functools.cache
def why_no_lab() -> str | None:
    """The reason for which this machine has no labs; None where it has."""
    try:
        Lab(Network.of(hosts=1)).__enter__().close()
    except LabUnavailableError as why:
        return str(why)
    return None


@pytest.fixture
def start_lab() -> Iterator[StartLab]:
    """Starts a lab, which ends with the test."""
    with contextlib.ExitStack() as labs:

        def start(*, hosts: int = 2, bandwidth: str | None = None, slow: Sequence[str] = ()) -> Lab:
            if reason := why_no_lab():
                pytest.skip(reason)
            return labs.enter_context(Lab(Network.of(hosts=hosts, bandwidth=bandwidth, slow=slow)))

        yield start


def wait_for(process: HostProcess, text: str, timeout_s: float = 30.0) -> None:
    """Until the program has printed this."""
    deadline = time.monotonic() + timeout_s
    while text not in process.output:
        assert time.monotonic() < deadline, f"no {text!r} in {process.output!r}"
        time.sleep(0.01)
