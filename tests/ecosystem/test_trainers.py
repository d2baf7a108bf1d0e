"""Trainers of other people as learners: every sample once, as accurate as `offbeat train`, resumed to the bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from ecosystem.test_ecosystem import need

HERE = Path(__file__).parent
LIMIT_S = 300.0
LINES = ["full-sync", "k-async:2", "k-sync:2", "local-sgd:4", "ring"]
SAMPLES, EPOCHS = 1438, 30

pytestmark = pytest.mark.skipif(
    os.environ.get("OFFBEAT_ECOSYSTEM") != "1",
    reason="only when asked for: make test-ecosystem, or OFFBEAT_ECOSYSTEM=1",
)


def learn(framework: str, line: str, *words: str) -> tuple[float, str, int | None]:
    """Accuracy, the sum of the weights, and how many samples the ledger says were applied."""
    script = str(HERE / f"{framework}_learner.py")
    command = [sys.executable, "-m", "offbeat", "run", "--learners", "3", "--sync", line, "--json", script, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.search(r"accuracy ([\d.]+) .*weights (\S+)", done.stderr)
    assert found is not None, done.stderr[-4000:]
    samples = json.loads(done.stdout).get("samples")
    return float(found[1]), found[2], None if samples is None else int(samples["applied"])


@cache
def trained(line: str) -> float:
    command = [
        sys.executable,
        "-m",
        "offbeat",
        "train",
        "digits-mlp",
        "--sync",
        line,
        "--learners",
        "3",
        "--json",
        "--quiet",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=True, cwd=os.environ["TMPDIR"]
    )
    return 100 * float(json.loads(done.stdout)["accuracy"])


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and checkpoints are left in a folder of the test's."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_a_trainer_is_as_accurate_as_ours_and_sees_every_sample_once(framework: str, line: str, tmp_path: Path) -> None:
    need(framework)
    accuracy, _, applied = learn(framework, line, "--saves", str(tmp_path / "saves"))
    print(f"{framework}, {line}: {accuracy:.1f} %, ours {trained(line):.1f} %, samples applied {applied}")
    assert applied in (None, SAMPLES * EPOCHS), "every sample once an epoch"
    assert accuracy >= trained(line) - 1.0


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
@pytest.mark.parametrize("line", ["full-sync", "k-async:2", "local-sgd:4"])
def test_accumulated_gradients_lose_no_sample(framework: str, line: str, tmp_path: Path) -> None:
    need(framework)
    words = ("--accumulate", "2", "--epochs", "3", "--saves", str(tmp_path / "saves"))
    assert learn(framework, line, *words)[2] == SAMPLES * 3


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_a_run_that_was_resumed_ends_with_the_same_bits(framework: str, tmp_path: Path) -> None:
    need(framework)
    first, second = tmp_path / "first", tmp_path / "second"
    whole = learn(framework, "full-sync", "--epochs", "4", "--saves", str(first))
    saved = first / ("epoch=1.ckpt" if framework == "lightning" else f"checkpoint-{2 * 45}")
    resumed = learn(framework, "full-sync", "--epochs", "4", "--saves", str(second), "--resume", str(saved))
    assert resumed[1] == whole[1]
    assert resumed[2] == SAMPLES * 2, "only what was left"
