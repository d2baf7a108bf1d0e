"""Ranks for tests: a process that has torch loaded and forks, so that a group of ranks costs milliseconds.

`Nursery.run("program", ranks=4, ...)` runs `program(rank, ranks, store, ...)` on every rank and gives back
what each returned or raised, or how it ended. Every run is bounded in time, and whatever is left of it is killed.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one rank."""

    value: Any = None
    error: str = ""  # the class and the words of what it raised
    trace: str = ""
    signal: int = 0  # that ended it
    seconds: float = 0.0


class Nursery:
    """The tests' side."""

    def __init__(self) -> None:
        paths = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        environment.pop("OFFBEAT_STRATEGY", None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "collectives.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, program: str, *, ranks: int, within_s: float = 30, **given: Any) -> list[Outcome]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([program, ranks, within_s, given]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the nursery has died"
        return [Outcome(**outcome) for outcome in json.loads(line)]

    def values(self, program: str, *, ranks: int, **given: Any) -> list[Any]:
        """What every rank returned; a rank that failed fails the test."""
        outcomes = self.run(program, ranks=ranks, **given)
        for rank, outcome in enumerate(outcomes):
            assert not outcome.error and not outcome.signal, f"rank {rank}: {outcome.signal or ''} {outcome.trace}"
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def _serve() -> None:
    gc.disable()
    from collectives import coded_programs, fault_programs, gpu_programs, odd_programs, programs
    from server import hostile_learners, odd_learners
    from server import programs as learners

    learners.warm_up()
    gc.freeze()  # a fork's collections, the one at its end too, pass over all that is loaded here
    gc.enable()
    modules = (
        programs, coded_programs, fault_programs, odd_programs, gpu_programs, learners, odd_learners, hostile_learners,
    )  # fmt: skip

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ranks print goes to the errors
    for line in sys.stdin:
        program, ranks, within_s, given = json.loads(line)
        if program == "all_reduces":
            programs.sums_to_check(ranks)  # once, for all ranks of all strategies
        with tempfile.TemporaryDirectory() as folder:
            found = next(vars(module)[program] for module in modules if program in vars(module))
            outcomes = _run(found, ranks, f"{folder}/store", within_s, given)
        answers.write(json.dumps(outcomes) + "\n")
        answers.flush()


def _run(program: Any, ranks: int, store: str, within_s: float, given: dict[str, Any]) -> list[dict[str, Any]]:
    start, children = time.monotonic(), {}
    for rank in range(ranks):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _child(program, rank, ranks, store, given, writer)
        os.close(writer)
        children[rank] = (pid, reader)
    said: dict[int, bytes] = dict.fromkeys(children, b"")
    ended: dict[int, float] = {}
    while len(ended) < ranks and time.monotonic() - start < within_s:
        open_ones = {reader: rank for rank, (_, reader) in children.items() if rank not in ended}
        for reader in select.select(list(open_ones), [], [], 0.05)[0]:
            data = os.read(reader, 65536)
            said[open_ones[reader]] += data
            if not data:
                ended[open_ones[reader]] = time.monotonic() - start
        if ended and all(_is_stopped(pid) for rank, (pid, _) in children.items() if rank not in ended):
            break
    outcomes = []
    for rank, (pid, reader) in children.items():
        if rank not in ended:
            os.kill(pid, signal.SIGKILL)  # stopped, or stuck: it has had its time
        _, status = os.waitpid(pid, 0)
        os.close(reader)
        outcome = json.loads(said[rank]) if said[rank] else {}
        if rank not in ended:
            outcome = {"error": "stuck", "trace": f"still running after {within_s:g} s"}
        elif os.WIFSIGNALED(status):
            outcome["signal"] = os.WTERMSIG(status)
        outcomes.append(outcome | {"seconds": ended.get(rank, within_s)})
    return outcomes


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "T"


def _child(program: Any, rank: int, ranks: int, store: str, given: dict[str, Any], writer: int) -> None:
    code = 0
    try:
        outcome: dict[str, Any] = {"value": program(rank, ranks, store, **given)}
    except BaseException as error:
        outcome = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        code = 1
    try:
        os.write(writer, json.dumps(outcome).encode())
        import torch.distributed as dist

        if dist.is_initialized() and not code:
            dist.destroy_process_group()
    finally:
        os._exit(code)


if __name__ == "__main__":
    _serve()
