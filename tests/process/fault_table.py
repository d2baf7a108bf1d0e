"""Every fault that one host can suffer, injected again and again, and a table of what became of it.

    cd tests && OFFBEAT_REPEATS=20 python -m process.fault_table [--rows 1,5,7]

The rows are those of the table of faults in docs/server.md. Those with runs of `server_faults` are judged by its
checker, which reads their log and shares no code with the server: samples that are in no update are lost, those in
several doubled. The others are tests of their own, which are repeated until the row has as many. It ends with 1 where
one fault was not survived as promised.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
SERVER = "process/test_server_faults.py"
CHECKPOINT = "train/test_checkpoint_faults.py"
GROUP = "collectives/test_faults.py"


@dataclass
class Row:
    """A fault, what is promised, the tests that inject it, and what became of them."""

    number: int
    fault: str
    promise: str
    tests: tuple[str, ...]  # parts of names: file::test
    injected: int = 0
    survived: int = 0
    lost: int | None = None
    doubled: int | None = None
    back_s: list[float] = field(default_factory=list)

    def has(self, name: str) -> bool:
        return any(re.search(one, name) for one in self.tests)

    @property
    def whole(self) -> bool:
        return self.injected == self.survived > 0 and not self.lost and not self.doubled

    def __str__(self) -> str:
        back = f"{statistics.median(self.back_s):.2f} / {max(self.back_s):.2f} s" if self.back_s else "-"
        counts = ["-" if one is None else str(one) for one in (self.lost, self.doubled)]
        numbers = f"{self.injected:>9}{self.survived:>10}{counts[0]:>6}{counts[1]:>9}{back:>16}"
        return f"{self.number:>3}  {self.fault:58.58} {self.promise:6}{numbers}"


def rows() -> list[Row]:
    killed = r"a_learner_that_is_killed_comes_back.*\[(fill|push|pushed|reply|seed|bye)\]"
    return [
        Row(1, "SIGKILL learner: before, in and after its push", "L T C", (
            f"{SERVER}::test_{killed}", "killed_after_its_update", "all_learners_are_killed_at_once",
            "dies_with_the_coordinator")),
        Row(2, "SIGKILL learner while it computes or fetches", "C", (
            r"learner_that_is_killed_comes_back.*\[(compute|fetch|granted)\]", "programs_survive")),
        Row(3, "SIGSTOP learner, then SIGCONT", "C W T", ("learner_that_is_stopped_is_given_up",)),
        Row(4, "a learner 5x slower or more", "W", ("a_slow_learner_is_waited_for",)),
        Row(5, "SIGKILL server: idle, in an update, after it", "L T W", ("server_that_is_killed_is_back",)),
        Row(6, "SIGSTOP server", "W", ("server_that_is_stopped",)),
        Row(7, "SIGKILL or SIGSTOP coordinator", "C W", (
            "when_the_coordinator_is_killed", "coordinator_that_is_stopped", "coordinator_and_server_are_killed")),
        Row(8, "all killed at a point of the run, resumed", "B Z", ()),  # see `kill_everything`
        Row(9, "disk full or write error while saving", "C", (
            f"{CHECKPOINT}::test_an_error_at_any_step", f"{CHECKPOINT}::test_a_full_disk_is_named",
            "train/test_checkpoint.py::test_a_full_disk_is_told")),
        Row(10, "checkpoint truncated or a byte flipped", "F", (
            f"{CHECKPOINT}::test_a_flipped_bit", f"{CHECKPOINT}::test_a_file_cut_or_grown",
            f"{CHECKPOINT}::test_a_broken_one_is_named")),
        Row(12, "half-open and silent connections", "W", ("strangers_at_the_listener",)),
        Row(13, "packets twice, old, late or lost, said again", "T L", (r"packets_said.*\[(twice|old|late|lost)\]",)),
        Row(14, "bytes corrupted on the way", "T F", (r"packets_said.*\[torn\]",)),
        Row(15, "the wall clock jumps", "W", ("wall_clock_may_jump",)),
        Row(16, "gradients that are not finite", "C", (
            "not_finite_is_dropped_and_counted", "train/test_equal.py::test_a_loss_that_is_no_number_on_one_learner")),
        Row(17, "out of memory in a learner; in a server: row 5", "C L", ("learner_without_memory",)),
        Row(18, "a wrong request", "F", ("wrong_request_is_refused_before_anything_starts",)),
        Row(19, "another model on join", "F C", ("another_model_is_refused",)),
        Row(20, "another protocol, torch or checkpoint version", "F", (
            "another_version_is_refused", f"{CHECKPOINT}::test_another_format_ends")),
        Row(21, "no shared memory left; leftovers of a crash", "F Z", (
            f"{GROUP}::test_memory_that_is_not_to_be_had", f"{GROUP}::test_a_full_dev_shm",
            "train/test_checkpoint.py::test_leftovers_of_dead_processes")),
        Row(22, "hundreds of connections, garbage, oversize frames", "C", (
            "strangers_at_the_listener", "server/test_gate.py::test_a_hundred_silent_connections")),
        Row(23, "learners that come and go all the time", "C T", ("come_and_go_all_the_time",)),
        Row(24, "a loader process dies; a learner raises", "F C", ("whose_loader_dies", "whose_script_raises")),
        Row(25, "an all-reduce rank killed or stopped", "W", (
            f"{GROUP}::test_a_rank_killed_in", f"{GROUP}::test_a_rank_stopped_in")),
        Row(26, "SIGTERM, Ctrl-C", "Z", ("told_to_end_ends_and_leaves_nothing",)),
        Row(27, "supervisor killed", "Z", ("when_the_supervisor_is_killed", "loaders_go_too")),
        Row(28, "no progress: a hung learner, a stopped rank", "F", (
            "process/test_hangs.py::test_a_learner_of_k_async_whose_data_hangs",
            "process/test_hangs.py::test_a_rank_of_ring_that_hangs",
            "process/test_hangs.py::test_a_stopped_rank_of_ring")),
    ]  # fmt: skip


class Table:
    """A pytest plugin: repeats tests until a row has enough of them, and fills the table."""

    def __init__(self, table: Sequence[Row], repeats: int) -> None:
        self.table, self.repeats = table, repeats
        self._failed: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Tests of the server's runs repeat themselves; the others are repeated here."""
        chosen: list[pytest.Item] = []
        files = dict.fromkeys(item.nodeid.partition("::")[0] for item in items)
        for file in files:
            here = [item for item in items if item.nodeid.startswith(file)]
            if SERVER in file:
                chosen += [item for item in here if any(row.has(item.nodeid) for row in self.table)]
                continue
            turns = [
                [_again(item) for item in islice(cycle(mine), max(len(mine), self.repeats))]
                for row in self.table
                if (mine := [item for item in here if row.has(item.nodeid)])
            ]
            chosen += [item for turn in _interleaved(turns) for item in turn]
        items[:] = chosen

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        mine = [row for row in self.table if row.has(report.nodeid)]
        if report.when == "call" or (report.when == "setup" and report.failed):
            for row in mine if SERVER not in report.nodeid else ():
                row.injected += 1
                row.survived += report.passed
        elif report.when == "teardown":
            runs: list[dict[str, Any]] = dict(report.user_properties).get("runs", [])  # type: ignore[assignment] # ours
            failed = report.nodeid in self._failed
            for row in mine if SERVER in report.nodeid else ():
                row.injected += len(runs)
                row.survived += max(0, len(runs) - failed)
                for run in runs:
                    for name in ("lost", "doubled"):
                        if run[name] is not None:
                            setattr(row, name, (getattr(row, name) or 0) + run[name])
                    row.back_s += run["back_s"]
        if report.failed:
            self._failed.add(report.nodeid)


def _again(item: pytest.Item) -> pytest.Item:
    """The same test, to be run once more: pytest keeps what is set up by the object."""
    other: Any = copy.copy(item)
    other._initrequest()
    return other  # type: ignore[no-any-return] # as it was


def _interleaved(turns: list[list[Any]]) -> Iterator[list[Any]]:
    for number in range(max(map(len, turns), default=0)):
        yield [turn[number] for turn in turns if number < len(turn)]


def kill_everything(row: Row, repeats: int) -> None:
    """A training is killed at points over the whole of its run, and resumed to the same bits."""
    script = TESTS.parent / "benchmarks" / "last_second.py"
    words = [sys.executable, str(script), "--points", str(repeats), "--whole"]
    said = subprocess.run(words, capture_output=True, text=True, check=False)
    found = re.search(r"(\d+) of (\d+) killed .*; (\d+) came to the same bits", said.stdout)
    row.injected = repeats
    row.survived = int(found[3]) if found and said.returncode == 0 else 0
    if not row.whole:
        print(said.stdout, said.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", metavar="N,N,...")
    given = parser.parse_args()
    os.environ.setdefault("OFFBEAT_REPEATS", "20")
    repeats = int(os.environ["OFFBEAT_REPEATS"])
    asked = {int(number) for number in given.rows.split(",") if number}
    table = [row for row in rows() if not asked or row.number in asked]
    files = dict.fromkeys(one.partition("::")[0] for row in table for one in row.tests if "::" in one)
    named = [SERVER, *(file for file in files if file != SERVER)]
    plugin = Table(table, repeats)
    code = pytest.main(["-p", "no:cacheprovider", "-n", "0", *(str(TESTS / file) for file in named)], plugins=[plugin])
    for row in table:
        if row.number == 8:
            kill_everything(row, repeats)
    heads = f"{'injected':>9}{'survived':>10}{'lost':>6}{'doubled':>9}{'back after':>16}"
    print(f"\n{'#':>3}  {'fault':58} {'':6}{heads}")
    for row in table:
        print(row)
    wrong = [row.number for row in table if not row.whole]
    print(f"{len(table) - len(wrong)} of {len(table)} rows as promised" + (f"; not: {wrong}" if wrong else ""))
    return 1 if wrong or code not in (0, 5) else 0


if __name__ == "__main__":
    raise SystemExit(main())
