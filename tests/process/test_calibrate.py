"""offbeat calibrate, and predictions from what it wrote: small, and nothing is asserted of how good they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.cli import main
from offbeat.predict.calibration import read_calibration

MLP = ["digits-mlp", "--device", "cpu"]


def offbeat(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offbeat", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.skipif(not os.environ.get("OFFBEAT_MATRIX"), reason="takes long: make test-matrix")
def test_a_machine_is_measured_and_trainings_are_predicted(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    done = offbeat("calibrate", *MLP, "--learners", "1", "2", "--rounds", "1", "--quick", "-o", str(path))
    assert done.returncode == 0, done.stderr
    assert f"wrote {path}" in done.stdout and "There was no self-check" in done.stdout
    found = read_calibration(path)
    assert sorted((probe.line, probe.learners) for probe in found.probes) == [
        ("async", 1), ("async", 2), ("full-sync", 2), ("ring", 1), ("ring", 2),
    ]  # fmt: skip
    assert [layer.size_bytes for layer in found.layers] == [4 * 65 * 64, 4 * 65 * 10]
    assert [batch for batch, _ in found.batches] == [8, 16, 32, 64]
    assert found.size_bytes == 4 * (65 * 64 + 65 * 10)

    words = [*MLP, "--calibration", str(path), "--sync", "async", "--learners", "2", "--slow", "none", "--rounds", "1"]
    done = offbeat("bench", "predictions", *words, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["measured"] == "predictions" and result["pairs"] == 0
    (row,) = result["rows"]
    assert row["error"] == row["predicted_s"] / row["measured_s"] - 1
    assert row["measured_s"] > 0 and row["predicted_s"] > 0

    simulated = offbeat("simulate", "k-async:2", "--learners", "4", "--calibration", str(path), "--json")
    assert json.loads(simulated.stdout)["seconds_per_update"] > 0


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("calibrate digits-mlp --learners 2", "numbers that include 1"),
        ("calibrate digits-mlp --learners 1 1", "different numbers"),
        ("calibrate digits-mlp --learners 1 100", "at most 64"),
        ("calibrate digits-mlp -o .", "expected the name of a file"),
        ("calibrate nothing-like-it", "nothing-like-it"),
        ("bench predictions", "--calibration FILE"),
        ("bench predictions --price 3", "--price is not an option of bench predictions"),
        ("simulate ring --calibration nowhere.json", "offbeat calibrate writes one"),
        ("schedule ring --calibration nowhere.json", "offbeat calibrate writes one"),
    ],
)
def test_wrong_requests_are_refused_before_anything_runs(
    line: str, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    said = capsys.readouterr()
    assert reason in said.err and not said.out and not any(tmp_path.iterdir())
