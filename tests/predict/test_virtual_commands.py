"""`offbeat simulate --recipe` and `offbeat compare --recipe`, as a user has them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offbeat.cli import main
from offbeat.policies import replay
from offbeat.runs.log import read_log
from offbeat.runs.run_folder import RunDir

Offbeat = Callable[[str], tuple[int, str, str]]
SHORT = "--recipe digits-softmax --learners 4 --epochs 1 --batch-size 64"
OWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def data():
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs[:, 0].gt(0).long()), TensorDataset(inputs, inputs[:, 0].gt(0).long())

def numbers():
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True)), TensorDataset(inputs, inputs.sum(1, keepdim=True))

class Loud(nn.Linear):
    def forward(self, inputs):
        print("hello")
        return super().forward(inputs)

class Late(nn.Linear):
    calls = 0
    def forward(self, inputs):
        Late.calls += self.training
        if Late.calls > 8:
            raise ValueError("too late")
        return super().forward(inputs)

def loud():
    return Loud(4, 2)

def late():
    return Late(4, 2)

def line():
    return nn.Linear(4, 1)
"""


@pytest.fixture
def offbeat(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Offbeat:
    monkeypatch.chdir(tmp_path)

    def call(line: str) -> tuple[int, str, str]:
        code = main(line.split())
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def seconds_each(out: str) -> float:
    found: dict[str, Any] = json.loads(out)
    return float(found["seconds"] / found["updates"])


def test_a_virtual_run_leaves_what_a_real_one_leaves(offbeat: Offbeat, tmp_path: Path) -> None:
    code, out, _ = offbeat(f"simulate k-async:2 {SHORT} --target 0.2 --run-dir run")
    assert code == 0
    assert re.search(r"target +20\.0 % after .+ s, \d+ updates and [\d,]+ samples; .+ had been sent", out)
    assert left(tmp_path / "run") == [
        "config.json", "error-by-bytes.svg", "error.svg", "log.jsonl", "machines.json", "metrics.jsonl", "summary.txt",
        "trace.json", "weights.safetensors",
    ]  # fmt: skip
    log = read_log(tmp_path / "run" / "log.jsonl")
    assert log.run["simulated"] is True and log.spans
    assert replay(log.run, log.decisions).version == RunDir(tmp_path / "run").read_metrics()[-1]["update"]
    assert offbeat("evaluate run")[0] == 0
    assert "virtual time and has no checkpoint" in offbeat("train --resume run")[2]


def test_the_json_has_the_curve_and_nothing_else_is_on_stdout(offbeat: Offbeat, tmp_path: Path) -> None:
    (tmp_path / "mine_loud.py").write_text(OWN, encoding="utf-8")
    words = "--learners 2 --epochs 1 --model.name mine_loud:loud --data.name mine_loud:data"
    code, out, err = offbeat(f"simulate async --recipe digits-softmax {words} --json --run-dir run")
    found = json.loads(out)
    assert code == 0 and "hello" in err
    assert found["points"][0]["update"] == 0 and found["points"][-1]["update"] == found["updates"]
    assert sum(found["staleness_histogram"].values()) == found["updates"]


@pytest.mark.parametrize("strategy", ["full-sync", "ring"])
def test_latency_adds_to_what_a_network_takes(offbeat: Offbeat, strategy: str) -> None:
    words = f"simulate {strategy} {SHORT} --compute constant:0.1 --json"
    alone = seconds_each(offbeat(f"{words} --run-dir a --network 1Mbit/s")[1])
    late = seconds_each(offbeat(f"{words} --run-dir b --network 1Mbit/s,1us")[1])
    free = seconds_each(offbeat(f"{words} --run-dir c")[1])
    sent = 2600 / 125_000  # the model's bytes over a port
    assert free == pytest.approx(0.1)
    assert alone == pytest.approx(0.1 + (8 * sent if strategy == "full-sync" else 1.5 * sent), rel=0.02)
    assert 0 < late - alone < 1e-4


def test_the_ports_of_servers_are_those_of_an_all_reduce(offbeat: Offbeat) -> None:
    words = f"simulate ring {SHORT} --compute constant:0.1 --json"
    network = offbeat(f"{words} --run-dir a --network 1Mbit/s,1ms")[1]
    ports = offbeat(f"{words} --run-dir b --learner-bandwidth 1Mbit/s --server-bandwidth 1Mbit/s --latency 1ms")[1]
    assert seconds_each(network) == seconds_each(ports)
    assert seconds_each(offbeat(f"{words} --run-dir c --size 1GB")[1]) == pytest.approx(0.1)


def test_the_schedule_of_a_stream_ends_with_it(offbeat: Offbeat, tmp_path: Path) -> None:
    words = (
        "--recipe digits-softmax --learners 30 --batch-size 32 --epochs 6 --lr 0.05 --train.schedule cosine "
        "--train.scaling none"
    )
    assert offbeat(f"simulate full-sync {words} --compute constant:1 --run-dir run")[0] == 0
    rates = [record["rate"] for record in RunDir(tmp_path / "run").read_metrics()]
    assert rates[0] == pytest.approx(0.05) and rates[-1] < 0.004


@pytest.mark.parametrize("line", ["local-sgd:60", "local-sgd:100000", "downpour:push=60,fetch=60"])
def test_a_run_has_exactly_the_samples_of_its_epochs_however_seldom_learners_push(offbeat: Offbeat, line: str) -> None:
    """As in a real run, what was computed is pushed at the end of an epoch: 23 minibatches of 64 or less, twice."""
    code, out, _ = offbeat(f"simulate {line} --recipe digits-softmax --learners 4 --epochs 2 --batch-size 64")
    assert code == 0
    pushes = 2 * 4 if "downpour" in line else 2
    assert re.search(rf"^ +[\d.]+ +{pushes} +2,876 ", out, re.MULTILINE), out
    assert "computed   46 minibatches, one by one" in out


def test_a_race_ranks_advises_and_draws(offbeat: Offbeat, tmp_path: Path) -> None:
    words = f"{SHORT} --compute exp:1 --target 0.2 --seeds 2 --run-dir race"
    code, out, _ = offbeat(f"compare ring k-async:2 {words} --speeds 0.2")
    assert code == 0
    assert out.splitlines()[2].startswith("use ")
    for label in (
        "ring",
        "k-async:2",
        "ring, split by speed",
        "ring, without learner 0",
        "k-async:2, without learner 0",
    ):
        assert re.search(rf"^ ?{re.escape(label)} +[\d.]+ m?s", out, re.MULTILINE), label
    found = json.loads((tmp_path / "race" / "race.json").read_text())
    assert found["machines"]["speeds"] == [0.2] and found["training"]["train"]["epochs"] == 1
    assert len(found["strategies"]) == 5 and all(len(one["runs"]) == 2 for one in found["strategies"])
    assert (tmp_path / "race" / "error.svg").read_text().startswith("<svg")
    assert "sent by learners and servers, MB" in (tmp_path / "race" / "error-by-bytes.svg").read_text()
    for one in (run for result in found["strategies"] for run in result["runs"]):
        assert one["sent_bytes"][0] == 0 and sorted(one["sent_bytes"]) == one["sent_bytes"]
        assert one["reached_bytes"] is None or one["reached_bytes"] in one["sent_bytes"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (f"compare ring async {SHORT}", "--target is required with --recipe"),
        (f"compare async ring {SHORT} --target 0.5 --failures 5,1", "cannot continue after a failure"),
        (f"compare ring async {SHORT} --target 0.5 --topology uniform:latency=1us", "the servers have no network"),
        (f"compare ring {SHORT} --target 0.5 --minibatches 5", "--minibatches does not apply with --recipe"),
        (f"simulate ring {SHORT} --failures 5,1", "cannot continue after a failure"),
        (f"simulate native {SHORT}", "resolved only in a running process group"),
        (f"simulate k-async:9 {SHORT}", "exceeds the 4 learners"),
        (f"simulate async {SHORT} --show 3", "--show does not apply with --recipe"),
        (f"simulate async {SHORT} --target 1.5", "at most 1"),
        (f"simulate async {SHORT} --set seed=3", "--set seed"),
        (f"simulate async {SHORT} --device cuda:77", "does not exist"),
        ("simulate async --recipe nope", "no such recipe"),
        *(
            (f"{line} --learners 999999999", "takes about 2 TB of memory (2 kB each), and")
            for line in (
                "simulate async",
                "simulate local-sgd:4 --recipe digits-mlp",
                "compare",
                "compare ring async",
                "compare ring async --recipe digits-mlp --target 0.9",
            )
        ),
        ("simulate async --look-every 3", "--recipe"),
        ("compare ring --seeds 5", "--recipe"),
        ("compare ring --epochs 5", "--recipe"),
    ],
)
def test_a_wrong_request_is_told_in_a_line_and_leaves_nothing(
    offbeat: Offbeat, tmp_path: Path, line: str, told: str
) -> None:
    code, out, err = offbeat(line)
    assert (code, out) == (2, "")
    assert told in err and err.count("\n") == 1
    assert left(tmp_path) == []


def test_a_target_that_needs_no_training_is_refused(offbeat: Offbeat) -> None:
    code, _, err = offbeat(f"compare ring async {SHORT} --target 0.01")
    assert code == 2 and "an untrained model already reaches it" in err


def test_a_folder_that_is_there_is_not_used(offbeat: Offbeat, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    code, _, err = offbeat(f"simulate async {SHORT} --run-dir full")
    assert code == 2 and "already exists" in err and "--resume" not in err


def test_what_has_no_accuracy_has_no_race(offbeat: Offbeat, tmp_path: Path) -> None:
    (tmp_path / "mine_numbers.py").write_text(OWN, encoding="utf-8")
    own = "--recipe digits-softmax --learners 2 --epochs 1 --model.name mine_numbers:line"
    own += " --data.name mine_numbers:numbers --train.loss torch.nn.functional:mse_loss --target 0.9"
    code, _, err = offbeat(f"compare ring async {own}")
    assert code == 2 and "a loss but no accuracy" in err
    code, out, _ = offbeat(f"simulate async {own} --run-dir run")
    assert code == 0 and "a loss but no accuracy" in out
    assert not (tmp_path / "run" / "error.svg").exists()


def test_an_error_in_a_model_of_ones_own_is_one_line(offbeat: Offbeat, tmp_path: Path) -> None:
    (tmp_path / "mine_late.py").write_text(OWN, encoding="utf-8")
    own = "--learners 2 --epochs 2 --model.name mine_late:late --data.name mine_late:data --batch-size 8"
    code, _, err = offbeat(f"simulate async --recipe digits-softmax {own} --run-dir run")
    assert code == 1 and err == "offbeat: digits-softmax: ValueError: too late\n"


def test_a_race_fits_a_narrow_terminal(offbeat: Offbeat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda *given: os.terminal_size((60, 20)))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    code, out, _ = offbeat(f"compare ring async {SHORT} --target 0.2")
    assert code == 0 and "fastest" not in out and "at the end" in out
