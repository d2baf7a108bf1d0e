"""PyTorch's own `DistributedTest`, on the backend that `SUITE_BACKEND` names: offbeat, if nothing is said.

    cd tests; SUITE_BACKEND=offbeat python -m torch_suite.suite test_all_reduce_sum test_barrier
    cd tests; SUITE_BACKEND=offbeat python -m unittest torch_suite.suite.Suite.test_all_reduce_sum

How a test that upstream wrote for Gloo comes to run on another backend, its body unchanged:

- Its decorators (`BACKEND != "gloo"`, `backend_feature[...]`) are evaluated once, when the upstream module is imported.
  It is imported under the name gloo, so that a test is skipped here if and only if it is skipped there. Only then is
  the upstream module told the name of the backend under test, with which it opens the process groups.
- Where a body asks for the name gloo but means another thing, it is given that name: `MEANS_CPU`, `NAME_CHECKED`.
- All-to-all on the CPU is left to MPI by upstream; offbeat runs those tests too.
- That the profiler has an event `<backend>:all_reduce` is checked for an allowlist of backends, upstream's own. Others
  run the same operations under the profiler and have their results checked, but not the names of the events.

The ranks are forked, not spawned: to import torch anew in each rank of each test would take a tenfold of the time.
`SUITE_START=spawn` does it nevertheless, which also shows how an interpreter with the backend in it ends. With
`SUITE_HOSTS`, numbers of processes on the hosts of a lab, each rank is moved to the network of one of them.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
import unittest
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, TextIO
from unittest import mock

BACKEND = os.environ.get("SUITE_BACKEND", "offbeat")
START = os.environ.get("SUITE_START", "fork")
HOSTS = [int(number) for number in os.environ.get("SUITE_HOSTS", "").split()]
SECONDS_PER_TEST = int(os.environ.get("SUITE_SECONDS", "60"))

os.environ["BACKEND"] = "gloo"  # for the decorators
os.environ.setdefault("INIT_METHOD", "file://set-for-each-test")  # one test is skipped unless it begins like this
os.environ.setdefault("WORLD_SIZE", "3")  # what PyTorch's CI uses for Gloo where no GPU is
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # upstream skips all where there are GPUs, but fewer than ranks
os.environ["OMP_NUM_THREADS"] = "1"  # a process with a pool of threads must not be forked

# The environment comes before the imports: upstream reads it while it is imported.
import torch  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402
from torch.testing._internal import common_distributed  # noqa: E402
from torch.testing._internal.distributed import distributed_test as upstream  # noqa: E402

if BACKEND == "offbeat":
    import offbeat  # noqa: F401  registers the backend, should torch's entry point not have done so

os.environ["BACKEND"] = upstream.BACKEND = BACKEND
common_distributed.TIMEOUT_DEFAULT = SECONDS_PER_TEST
common_distributed.TIMEOUT_OVERRIDE.clear()

# `if BACKEND == "gloo"` in these bodies chooses between a model on the CPU and one on a GPU, and has no else.
MEANS_CPU = {
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_accumulate_gradients_no_sync_grad_is_view",
}
# `dist.monitored_barrier` compares the backend's name before it calls the method of the group, whatever the group can.
NAME_CHECKED = {
    "test_monitored_barrier_failure_order",
    "test_monitored_barrier_gloo",
    "test_monitored_barrier_gloo_subgroup",
    "test_monitored_barrier_wait_all_ranks",
}
LEFT_TO_MPI = "Only MPI supports"  # how the reason of the skip begins
PR_SET_PDEATHSIG = 1
CLONE_NEWNET = 0x40000000


def die_with_parent() -> None:
    """However the parent ends, this process does not outlive it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def move_to_host(rank: int, ranks: int) -> None:
    """From here on this process's network is that of its host; the ranks are there host by host."""
    if not HOSTS:
        return
    network = os.open(f"/proc/{HOSTS[rank * len(HOSTS) // ranks]}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(network, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(network)


class Suite(upstream.TestDistBackend, upstream.DistributedTest._DistTestBase):
    """All that upstream tests, as its own test_distributed_spawn.py puts it together."""

    def setUp(self) -> None:
        super().setUp()  # type: ignore[no-untyped-call]  # upstream has no types
        signal.signal(signal.SIGALRM, self._stuck)
        signal.alarm(SECONDS_PER_TEST + 20)  # upstream stops the ranks before: this is for the main process
        assert START != "fork" or threading.active_count() == 1, "a process with threads must not be forked"
        context: Any = torch.multiprocessing.get_context(START)
        self._start_processes(context.Process)

    def tearDown(self) -> None:
        signal.alarm(0)
        started = self.processes
        super().tearDown()  # type: ignore[no-untyped-call]  # upstream has no types
        for process in started:
            process.kill()
            process.join()

    def _stuck(self, signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the main process of {self.id()} did not return")

    @classmethod
    def _run(cls, *args: Any, **kwargs: Any) -> None:
        die_with_parent()
        move_to_host(args[0], int(os.environ["WORLD_SIZE"]))
        upstream.INIT_METHOD = os.environ["INIT_METHOD"]  # that of this test, for a forked rank too
        try:
            super()._run(*args, **kwargs)  # type: ignore[no-untyped-call]  # upstream has no types
        except Exception:  # before or after the body: what the body raises, upstream reports
            pipe = args[-1]
            if pipe.closed:
                raise
            pipe.send(traceback.format_exc())
            sys.exit(cls.TEST_ERROR_EXIT_CODE)

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        """The body, in a rank, with the process group open."""
        with ExitStack() as named_gloo:
            if test_name in MEANS_CPU:
                named_gloo.enter_context(mock.patch.object(upstream, "BACKEND", "gloo"))
            if test_name in NAME_CHECKED:
                named_gloo.enter_context(mock.patch.object(distributed_c10d, "get_backend", return_value="gloo"))
            super().run_test(test_name, parent_pipe)

    def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
        """Upstream looks at the exit code of rank 0 alone; a crash of another rank is none the better."""
        super()._check_return_codes(fn, elapsed_time)
        codes = [process.exitcode for process in self.processes]
        assert fn in self.skip_return_code_checks or not any(codes), f"the ranks ended with exit codes {codes}"


if BACKEND == "offbeat":
    for name in unittest.defaultTestLoader.getTestCaseNames(Suite):
        test = getattr(Suite, name)
        if getattr(test, "__unittest_skip_why__", "").startswith(LEFT_TO_MPI):
            test.__unittest_skip__ = False


class Recorder(unittest.TestResult):
    """Writes a line of JSON per test: its name, the outcome (ok, fail or skip), the reason and the seconds."""

    def __init__(self, lines: TextIO) -> None:
        super().__init__()
        self.lines = lines
        self.outcome = ("ok", "")
        self.began = 0.0

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802  the names are unittest's
        super().startTest(test)
        self.outcome = ("ok", "")
        self.began = time.monotonic()

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        super().addSkip(test, reason)
        self.outcome = ("skip", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        super().addFailure(test, err)
        self.outcome = ("fail", self.failures[-1][1])

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        super().addError(test, err)
        self.outcome = ("fail", self.errors[-1][1])

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().stopTest(test)
        outcome, reason = self.outcome
        seconds = round(time.monotonic() - self.began, 2)
        line = {"name": test.id().split(".")[-1], "outcome": outcome, "reason": reason, "seconds": seconds}
        print(json.dumps(line), file=self.lines, flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="torch_suite.suite", description="PyTorch's tests of torch.distributed")
    parser.add_argument("names", nargs="*", help="tests to run: all, if none is named")
    parser.add_argument("--only", metavar="PATTERN", default="", help="of these, those that match")
    parser.add_argument("--results", type=Path, help="file for a line of JSON per test: stdout, if not given")
    given = parser.parse_args(arguments)
    die_with_parent()
    names = given.names or unittest.defaultTestLoader.getTestCaseNames(Suite)
    with given.results.open("w", encoding="utf-8") if given.results else nullcontext(sys.stdout) as lines:
        result = Recorder(lines)
        unittest.TestSuite(Suite(name) for name in names if re.search(given.only, name)).run(result)
    return int(not result.wasSuccessful())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
