"""`offbeat run` and `offbeat.join()`: the same script under any strategy, under torchrun, and alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offbeat import cli
from process.forked_scripts import fork_scripts
from process.test_ddp_script import bounded, torchrun
from train.programs import offbeat

HERE = Path(__file__).parents[2]
SCRIPT = HERE / "examples" / "digits.py"
LIMIT_S = 90.0


def offbeat_run(folder: Path, *words: str) -> tuple[int, str, str]:
    """Learners are forked; `tests/process/test_server_faults.py` has some that are programs, as users have them."""
    done = offbeat(folder, "run", *words, str(SCRIPT), "--epochs", "1", before=fork_scripts)
    return done.code, done.out, done.err


def test_learners_print_with_their_number_and_the_end_is_clear(tmp_path: Path) -> None:
    code, out, err = offbeat_run(tmp_path, "--learners", "2", "--servers", "2", "--sync", "k-async:2")
    assert (code, err) == (0, "")
    first, _, *rest = out.splitlines()
    assert re.fullmatch(r"learner 0 \| accuracy \d+\.\d % after 2\d updates", first)
    assert rest[0] == "k-async:2, 2 learners, 2 servers"
    assert "pushes     45 received, 45 applied" in rest


def test_only_the_line_changes_for_an_all_reduce(tmp_path: Path) -> None:
    code, out, err = offbeat_run(tmp_path, "--learners", "2", "--sync", "ring", "--json")
    assert code == 0
    said = json.loads(out)
    assert said.pop("sent_bytes") == said.pop("received_bytes") > 0 and 0 <= said.pop("wait_share") <= 1
    assert said.pop("seconds") == pytest.approx(23 * said.pop("seconds_per_update"))
    assert said == {
        "strategy": "ring", "learners": 2, "updates": 23, "warning": None, "exits": {"0": 0, "1": 0}, "restarts": [],
    }  # fmt: skip
    assert re.search(r"learner 0 \| accuracy \d+\.\d % after 23 updates", err)


@pytest.mark.skipif(not os.environ.get("OFFBEAT_MATRIX"), reason="takes long: make test-matrix")
def test_under_torchrun_the_servers_start_beside_the_first_rank() -> None:
    ended = torchrun(2, SCRIPT, "--epochs", "1", OFFBEAT_SYNC="softsync:2")
    assert ended.code == 0
    assert re.search(r"accuracy \d+\.\d % after 45 updates", ended.text)


def test_alone_a_script_is_one_learner() -> None:
    ended = bounded([sys.executable, str(SCRIPT), "--epochs", "1"], LIMIT_S)
    assert ended.code == 0
    assert re.fullmatch(r"accuracy \d+\.\d % after 45 updates\n", ended.text)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("line", ["k-sync:1", "downpour", "ring"])
def test_models_may_be_on_a_gpu(line: str) -> None:
    servers = [] if line == "ring" else ["--servers", "2"]
    words = ["run", "--learners", "2", *servers, "--sync", line, str(SCRIPT), "--epochs", "4", "--lr", "0.02"]
    ended = bounded([sys.executable, "-m", "offbeat", *words, "--device", "cuda"], LIMIT_S)
    assert ended.code == 0, ended.text
    found = re.search(r"accuracy (\d+\.\d) %", ended.text)
    assert found is not None and (float(found[1]) > 80 or line == "downpour")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py"], "no such script: nowhere.py"),
        (["--sync", "k-sync:3", str(SCRIPT)], "K=3 exceeds the 2 learners"),
        (["--sync", "k-snyc:3", str(SCRIPT)], "did you mean 'k-sync'?"),
        (["--slow", "expo:1", str(SCRIPT)], "did you mean 'exp'?"),
        (["--slow", "learner=2,factor=3", str(SCRIPT)], "there are 2 learners, numbered from 0"),
        (["--learners", "0", str(SCRIPT)], "--learners"),
        (["--log", "nowhere/run.jsonl", str(SCRIPT)], "cannot write nowhere/run.jsonl"),
        ([], "script"),
    ],
)
def test_a_wrong_request_is_one_line_and_starts_nothing(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delattr(os, "fork")
    monkeypatch.delattr(subprocess, "Popen")
    assert cli.main(["run", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1
