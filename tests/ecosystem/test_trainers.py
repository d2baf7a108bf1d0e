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
    assert applied == (None if line == "ring" else SAMPLES * EPOCHS), "every sample once an epoch"
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


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("line", ["full-sync", "k-async:2", "local-sgd:4", "ring"])
def test_accelerate_learns_clips_every_step_and_sees_every_sample_once(line: str, accumulate: int) -> None:
    need("accelerate")
    accuracy, _, applied = learn("accelerate", line, "--epochs", "6", "--accumulate", str(accumulate))
    assert applied == (None if line == "ring" else SAMPLES * 6)
    assert accuracy > 80.0


# --- what trainers do within an epoch, where learners of a parameter server are not in step ---------------------------


def run_odd(case: str, line: str = "async", script: str = "lightning_cases.py") -> tuple[int, str]:
    words = ["--learners", "2", "--sync", line, "--slow", "learner=1,factor=2"]
    command = [sys.executable, "-m", "offbeat", "run", *words, "--json", str(HERE / script), case, os.environ["TMPDIR"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("line", ["async", "ring"])
@pytest.mark.parametrize(
    "case", ["checkpoints-by-step", "limited", "logs-after-batches", "max-steps", "tested", "schedule-by-epoch"]
)
def test_lightning_goes_on_where_learners_are_not_in_step(case: str, line: str) -> None:
    need("lightning")
    code, out = run_odd(case, line)
    assert code == 0, out[-4000:]
    validated = re.findall(r"validated (\S+)", out)
    assert len(validated) == 2 and len(set(validated)) == 1, "the mean of both, on both"
    assert out.count("main process") == 1
    if case == "schedule-by-epoch":
        assert out.count("rate 0.0125") == 2
    if case == "checkpoints-by-step":
        assert list(Path(os.environ["TMPDIR"]).glob("*step=3.ckpt"))


def test_lightning_clips_what_was_accumulated_last() -> None:
    need("lightning")
    code, out = run_odd("clipped", "full-sync")
    assert code == 0, out[-4000:]
    norms = [float(one) for one in re.findall(r"norm (\S+)", out)]
    assert norms and max(norms) < 0.0101


@pytest.mark.parametrize(
    "case, told",
    [
        ("two-fits", "a run has only one trainer.fit"),
        ("validates-within-epochs", "val_check_interval is shorter than an epoch"),
    ],
)
def test_lightning_says_in_one_line_what_it_cannot(case: str, told: str) -> None:
    need("lightning")
    code, out = run_odd(case)
    assert code == 2 and told in out and "Traceback" not in out, out[-4000:]


@pytest.mark.parametrize("case", ["by-steps", "best", "max-steps", "clipped"])
def test_a_hugging_face_trainer_does_what_is_due_though_steps_leap(case: str, tmp_path: Path) -> None:
    need("transformers")
    code, out = run_odd(case, "full-sync" if case == "clipped" else "async", "transformers_cases.py")
    assert code == 0, out[-4000:]
    assert out.count("main process") == 1
    ended = re.findall(r"ended at (\d+), epoch (\S+), evaluated (\d+) times, last (\S+) best (\S+)", out)
    assert len(ended) == 2, out[-4000:]
    if case == "by-steps":  # 24 steps, something due every 5th and at the end
        assert [one[:3] for one in ended] == [("24", "2.0", "5")] * 2
        assert len(list(tmp_path.glob("checkpoint-*"))) == 5
    elif case == "best":
        assert ended[0][3:] == ended[1][3:], "both have the weights of the best checkpoint"
        assert float(ended[0][3]) == pytest.approx(float(ended[0][4]), rel=1e-4)
    elif case == "max-steps":
        assert [one[:2] for one in ended] == [("18", "1.5")] * 2
    else:
        norms = [float(one) for one in re.findall(r"norm (\S+)", out)]
        assert norms and max(norms) < 0.0101


def test_a_hugging_face_checkpoint_within_an_epoch_is_refused_in_one_line(tmp_path: Path) -> None:
    need("transformers")
    assert run_odd("by-steps", script="transformers_cases.py")[0] == 0
    code, out = run_odd("resumed", script="transformers_cases.py")
    assert code == 2 and re.search(r"in the middle of an epoch \(step \d+ of 12\)", out), out[-4000:]
    assert "Traceback" not in out
