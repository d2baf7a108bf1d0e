"""A program that ends while callbacks of futures are under way ends with its own exit code, and not by an abort."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "exits.py"


def test_programs_whose_callbacks_still_run_at_exit_end_cleanly() -> None:
    words = [sys.executable, str(BENCHMARK), "--runs", "1", "--forced", "1", "--at-once", "5"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) == 6
    assert all(line.endswith("0 aborted, 0 failed, 0 did not end") for line in lines)
