"""Lightning and accelerate train by offbeat, on two ranks, bit for bit what they train by gloo.

They are not among offbeat's dependencies and need a while, so these tests run only when they are asked for.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from process.test_ddp_script import Ended, bounded, torchrun

HERE = Path(__file__).parent
TIME_LIMIT_S = 120.0  # ends only what hangs

pytestmark = pytest.mark.skipif(
    os.environ.get("OFFBEAT_ECOSYSTEM") != "1",
    reason="only when asked for: make test-ecosystem, or OFFBEAT_ECOSYSTEM=1",
)


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install -c constraints.txt {package}")


def numbers(done: Ended, out: Path, backend: str) -> bytes:
    """The parameters, buffers and metrics that a job of two ranks has left."""
    assert done.code == 0, done.text
    assert f"trained on 2 ranks by {backend}" in done.text, done.text
    saved = np.load(out / "parameters.npy")
    assert np.isfinite(saved).all()
    return bytes(saved.tobytes())


def test_lightning_trains_the_same_bits_by_offbeat_as_by_gloo(tmp_path: Path) -> None:
    need("lightning")
    script = str(HERE / "lightning_script.py")
    trained = []
    for backend in ("gloo", "offbeat"):
        out = tmp_path / backend
        out.mkdir()
        words = [sys.executable, script, "--backend", backend, "--out", str(out)]
        trained.append(numbers(bounded(words, TIME_LIMIT_S), out, backend))
    assert trained[0] == trained[1]


def test_accelerate_trains_the_same_bits_by_offbeat_as_by_its_own_choice(tmp_path: Path) -> None:
    need("accelerate")
    trained = []
    for backend, words in (("gloo", ()), ("offbeat", ("--backend", "offbeat"))):
        out = tmp_path / backend
        out.mkdir()
        done = torchrun(2, HERE / "accelerate_script.py", "--out", str(out), *words, limit_s=TIME_LIMIT_S)
        trained.append(numbers(done, out, backend))
    assert trained[0] == trained[1]


def test_accelerate_still_refuses_a_backend_that_it_does_not_know(tmp_path: Path) -> None:
    """When this fails, accelerate has learnt it: the script's line, and what the docs say of it, can go."""
    need("accelerate")
    words = ("--backend", "offbeat", "--ask-accelerate", "--out", str(tmp_path))
    done = torchrun(2, HERE / "accelerate_script.py", *words, limit_s=TIME_LIMIT_S)
    assert done.code != 0
    assert "Your assigned backend offbeat is not available, please use gloo" in done.text, done.text
