"""Twelve pipelines whose ranks are processes, ten on one host and two on hosts of a lab: as one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.fixture import StartLab

TESTS = Path(__file__).parents[1]
HERE = {
    2: ("gpipe/mlp", "1f1b/transformer", "interleaved-1f1b:2/cnn", "zb-v/transformer", "dualpipe-v/mlp"),
    3: ("1f1b/cnn", "zb-h1/transformer", "zb-v/mlp"),
    4: ("gpipe/cnn", "1f1b/transformer"),
}
ON_TWO_HOSTS = ("1f1b/transformer", "zb-v/cnn")  # on three ranks
WITHIN = {"float32": 1e-5, "float64": 1e-12}


def check(printed: str, names: tuple[str, ...]) -> None:
    lines = [line.split() for line in printed.splitlines() if line.count("/") == 1 and "float" in line]
    assert {(name, precision) for name, _, precision, _, _ in lines} == {
        (name, precision) for name in names for precision in WITHIN
    }
    for name, _, precision, gradients, weights in lines:
        assert max(float(gradients), float(weights)) <= WITHIN[precision], name


@pytest.mark.parametrize("ranks", HERE)
def test_ranks_that_are_processes_train_as_one_process(ranks: int, tmp_path: Path) -> None:
    words = [sys.executable, "-W", "ignore", "-m", "parallel.stage_ranks", ",".join(HERE[ranks]), str(ranks)]
    ended = subprocess.run(
        [*words, str(tmp_path / "store")], cwd=TESTS, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    check(ended.stdout, HERE[ranks])


def test_ranks_on_two_hosts_train_as_one_process(start_lab: StartLab) -> None:
    lab = start_lab(hosts=2)
    environment = {**os.environ, "OFFBEAT_NETWORK_TRUST": "open", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    words = [sys.executable, "-W", "ignore", "-m", "parallel.stage_ranks", ",".join(ON_TWO_HOSTS), "3", "{host0}"]
    ranks = [lab.start(host, [*words, str(rank)], environment=environment) for rank, host in enumerate((0, 0, 1))]
    for rank in ranks:
        assert rank.wait(timeout_s=120) == 0, rank.output
    check(ranks[0].output, ON_TWO_HOSTS)
    assert "3 ranks on 2 hosts talk over TCP" in ranks[0].output
