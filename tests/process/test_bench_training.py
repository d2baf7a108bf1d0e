"""offbeat bench scaling and bench accuracy: what they say, what they refuse, and that nothing is left behind.

The commands run in processes of their own, since they fork. How fast anything is, is not asserted here.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from offbeat.cli import load, main
from offbeat.commands import bench
from offbeat.measure import accuracy_bench, scaling_bench
from offbeat.measure.benchmark import BenchResult
from offbeat.measure.training_bench import TrainingNumbers
from offbeat.predict.calibration import Calibration, Probe, as_json
from offbeat.train.config_files import changed
from offbeat.train.recipes import RECIPES


def started(folder: Path, *lines: str) -> subprocess.Popen[str]:
    """The commands, one after the other in one process; their temporary files are in the folder `tmp`."""
    (folder / "tmp").mkdir()
    program = "import sys; from offbeat.cli import main; sys.exit(any(main(line.split()) for line in sys.argv[1:]))"
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), "MARK": folder.name}
    return subprocess.Popen(
        [sys.executable, "-c", program, *lines],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment,
    )


def family(mark: str) -> list[str]:
    """Processes that were started with this in their environment, as command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"MARK={mark}\0".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def left(folder: Path) -> list[str]:
    """Processes and files of a command that has ended; torch makes a folder for its compiler, and keeps it."""
    files = [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith("torchinductor")]
    return [*files, *family(folder.name)]


def calibration(**more: Any) -> str:
    probes = tuple(
        Probe(line, learners, 0.0025 * learners, (0.001, 0.002), 0.0005, 0.0005)
        for line in ("ring", "async")
        for learners in (1, 2)
    )
    made = Calibration(recipe="digits-softmax", batch=32, size_bytes=2600, machine={}, probes=probes, **more)
    return json.dumps(as_json(made))


Both = tuple[Path, dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """The folder, and what bench accuracy and bench scaling have printed."""
    folder = tmp_path_factory.mktemp("bench-training")
    (folder / "calibration.json").write_text(calibration(), encoding="utf-8")
    reaches = "bench accuracy digits-softmax --target 0.6 --sync ring async --learners 2 --seeds 1 --epochs 2 --seed 3"
    scales = "bench scaling digits-softmax --learners 1 2 --sync ring k-async:2 --rounds 2 --epochs 2 --price 1"
    process = started(
        folder,
        f"{reaches} --svg error.svg --json",
        f"{scales} --calibration calibration.json --out scaling.json --json",
    )
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    first, end = json.JSONDecoder().raw_decode(out)
    second = json.loads(out[end:])
    assert left(folder) == []
    assert sorted(path.name for path in folder.iterdir()) == ["calibration.json", "error.svg", "scaling.json", "tmp"]
    return folder, first, second


def test_bench_scaling_sets_learners_beside_one_alone_and_writes_what_it_prints(both: Both) -> None:
    folder, _, found = both
    assert (found["measured"], found["kind"], found["recipe"]) == ("scaling", "weak", "digits-softmax")
    assert found["base"] == "one learner alone on cpu, 1 thread" and (found["precision"], found["rounds"]) == (
        "fp32",
        2,
    )
    assert {"cores", "load", "processor", "python", "torch", "device", "threads"} <= found["machine"].keys()
    rows = found["rows"]
    assert [(row["strategy"], row["learners"]) for row in rows] == [("ring", 1), ("ring", 2), ("k-async:2", 2)]
    base = rows[0]["seconds_of_rounds"]
    for row in rows:
        times, many = row["seconds_of_rounds"], row["learners"]
        assert row["seconds"] == pytest.approx(statistics.median(times))
        assert (row["seconds_low"], row["seconds_high"]) == pytest.approx((min(times), max(times)))
        pairs = [many * one / both for one, both in zip(base, times, strict=True)]
        assert row["speedup"] == pytest.approx(statistics.median(pairs))
        assert row["efficiency"] == pytest.approx(row["speedup"] / many)
        assert row["throughput"] == pytest.approx(statistics.median(many * 32 / seconds for seconds in times))
        assert row["accuracy"] > 0.5 and row["cost"] > 0
        assert row["predicted_s"] > 0 and row["error"] == pytest.approx(row["predicted_s"] / row["seconds"] - 1)
        assert row["ranked"] == (row["why_not"] == "")
    assert found["ranking"] and "not predicted" not in " ".join(found["notes"])
    assert json.loads((folder / "scaling.json").read_text(encoding="utf-8")) == found


def test_bench_accuracy_trains_every_strategy_to_its_end(both: Both) -> None:
    folder, found, _ = both
    assert (found["measured"], found["target"], found["precision"]) == ("accuracy", 0.6, "fp32")
    assert [(row["strategy"], row["learners"], row["seeds"]) for row in found["rows"]] == [
        ("ring", 2, 1),
        ("async", 2, 1),
    ]
    for row, curve in zip(found["rows"], found["curves"], strict=True):
        assert (curve["strategy"], curve["learners"], curve["seed"]) == (row["strategy"], 2, 3)
        assert len(curve["points"]) == 2  # it was not stopped at the target
        there = [point for point in curve["points"] if point[2] >= 0.6]
        assert row["reached"] == 1 and there
        assert (row["seconds_to_target"], row["updates_to_target"]) == (there[0][0], there[0][1])
        assert (row["seconds"], row["accuracy_mean"]) == (curve["points"][-1][0], curve["points"][-1][2])
    assert "not predicted: give --calibration (offbeat calibrate writes one)" in found["notes"]
    assert (folder / "error.svg").read_text(encoding="utf-8").startswith("<svg")


def test_a_benchmark_that_is_ended_leaves_nothing_behind(tmp_path: Path) -> None:
    process = started(tmp_path, "bench scaling digits-softmax --learners 2 --sync async --epochs 500 --out never.json")
    try:
        deadline = time.monotonic() + 60
        while not list((tmp_path / "tmp").glob("offbeat-bench-*/run/metrics.jsonl")):  # it trains
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM and out == ""
    assert left(tmp_path) == []
    assert not (tmp_path / "never.json").exists()


# --- what is refused ----------------------------------------------------------------------------------------------

WRONG = {
    "bench scaling nope": "no such recipe or file: 'nope'",
    "bench scaling digits-mlp ring": "got 'ring' as well; name strategies with --sync",
    "bench scaling --sync rign": "unknown strategy 'rign'; did you mean 'ring'?",
    "bench scaling --sync digits-mlp": "'digits-mlp' is a recipe; put it before the options",
    "bench scaling --learners 2 --sync k-async:3": "'k-async:3': K=3 exceeds the 2 learners",
    "bench scaling --sync ring ring": "--sync names a strategy twice",
    "bench scaling --learners 1": "expected 1, the baseline, and a larger number",
    "bench scaling --learners 65": "from 1 to 64; got 65",
    "bench scaling --kind storng": "did you mean 'strong'?",
    "bench scaling --kind strong --learners 3 --sync ring": "32 is not a multiple of 3",
    "bench scaling --price -1": "--price: expected a price of a device hour, 0 or more; got '-1'",
    "bench scaling --accuracy-within 2": "--accuracy-within: expected a share from 0 to 1",
    "bench scaling --out nowhere/x.json": "cannot write nowhere/x.json: there is no folder",
    "bench scaling --out .": "cannot write .: it is a folder",
    "bench scaling --slow foo": "--slow: unknown law 'foo'",
    "bench scaling --slow learner=4,factor=2": "there are 4 learners, numbered from 0",
    "bench scaling --set sync=ring": "--set sync: only fields of model, data, train can be set here",
    "bench scaling --train.stop-at 0.9": "a benchmark always runs all epochs",
    "bench scaling --train.epochs 0": "--train.epochs: expected 1 or more; got 0",
    "bench scaling --device tpu": "--device: expected auto, cpu, cuda or cuda:1; got 'tpu'",
    "bench scaling --seed -1": "--seed: expected 0 or more; got -1",
    "bench scaling --calibration nowhere.json": "cannot read the calibration nowhere.json",
    "bench scaling --target 0.9": "--target is not an option of bench scaling",
    "bench scaling --ranks 2": "--ranks is not an option of bench scaling",
    "bench scaling --timeout 3": "--timeout is not an option of bench scaling",
    "bench accuracy": "bench accuracy needs --target, for example --target 0.97",
    "bench accuracy --target 1.5": "--target: expected an accuracy above 0 and at most 1, like 0.95; got '1.5'",
    "bench accuracy --target x": "--target: expected an accuracy above 0 and at most 1, like 0.95; got 'x'",
    "bench accuracy --target 0.9 --sync k-sync:3": "'k-sync:3': K=3 exceeds the 2 learners",
    "bench accuracy --target 0.9 --learners 2 3": "--learners takes only one number with bench accuracy",
    "bench accuracy --target 0.9 --kind weak": "--kind is not an option of bench accuracy",
    "bench accuracy --target 0.9 --svg nowhere/x.svg": "cannot write nowhere/x.svg: there is no folder",
    "bench allreduce --train.epochs 3": "--train.epochs is not an option of bench allreduce",
    "bench ddp --accuracy-within 0.1": "--accuracy-within is not an option of bench ddp",
    "bench policies --sync ring": "--sync is not an option of bench policies",
    "bench server --set model.options.hidden=3": "--model.options.hidden is not an option of bench server",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_request_is_refused_in_one_line_before_anything_runs(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (scaling_bench, accuracy_bench):
        monkeypatch.setattr(module, "measure", lambda *words, **more: pytest.fail("it runs"))
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("offbeat: ") and err.count("\n") == 1 and WRONG[line] in err


def test_a_calibration_of_another_recipe_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling_bench, "measure", lambda *words, **more: pytest.fail("it runs"))
    (tmp_path / "cnn.json").write_text(calibration(settings={"model": "cnn"}), encoding="utf-8")
    assert main(["bench", "scaling", "digits-mlp", "--calibration", str(tmp_path / "cnn.json")]) == 2
    assert "the calibration was measured with model 'cnn', but this training run has 'mlp'" in capsys.readouterr().err


def test_the_help_lists_all_kinds() -> None:
    about = load("bench").about
    assert all(f"\n{kind} " in about for kind in ("allreduce", "server", "scaling", "accuracy"))


# --- what is printed, from trainings that are made up ---------------------------------------------------------------

MACHINE = {"cores": 2, "load": 0.1, "processor": "AMD EPYC", "torch": "2.13.0", "device": "cpu", "threads": 1}
CONFIG = changed(RECIPES["digits-softmax"].config, {"train": {"epochs": 3}})


def kept(rate: float, right: float, joules: float | None) -> TrainingNumbers:
    return TrainingNumbers(rate, 3.0, right, 359, ((1.0, 10, 0.5), (2.0, 20, right), (3.0, 30, right)), joules, ())


def print_narrow(result: BenchResult) -> None:
    bench.print_result(Console(width=80, highlight=False, file=sys.stdout), result)


def made_up_scaling(kind: str) -> BenchResult:
    request = scaling_bench.ScalingRequest(
        config=CONFIG, lines=("k-batch-async:2",), learners=(1, 2), kind=kind, rounds=2
    )
    rows = [
        scaling_bench.scaling_row(
            line=line,
            learners=learners,
            batch=32 // learners if kind == "strong" else 32,
            kind=kind,
            precision="fp32",
            device="cpu",
            runs=(kept(rate, right, 120.0), kept(rate, right, 130.0)),
            alone_s=(0.032, 0.032),
            predicted_s=0.04,
            price=1.0,
        )
        for line, learners, rate, right in (("ring", 1, 1000, 0.97), ("k-batch-async:2", 2, 1500, 0.91))
    ]
    notes = ["energy: not measured: no counters"]
    return scaling_bench.scaling_result(request, MACHINE, scaling_bench.judged(rows, 0.01), notes)


def test_scaling_is_printed_with_its_base_its_ranking_and_its_notes(capsys: pytest.CaptureFixture[str]) -> None:
    print_narrow(made_up_scaling("weak"))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "base: one learner alone on cpu, 1 thread" in lines
    first, second = (line.split() for line in lines if line.startswith(" k-batch-async:2 "))
    assert first == ["k-batch-async:2", "2", "42.7", "1.50x", "75", "%", "91.0", "%", "(87.6-93.5)"]
    assert second == ["k-batch-async:2", "2", "40", "-6.2", "%", "125", "J", "0.00167"]
    assert "fastest with comparable accuracy: one learner alone (1,000 samples/s)" in lines
    assert any(
        "not ranked: its accuracy 91.0 % (87.6-93.5) is 6 points below the 97.0 % of one learner" in line
        for line in lines
    )
    assert "note: energy: not measured: no counters" in lines
    table = lines[: lines.index("fastest with comparable accuracy: one learner alone (1,000 samples/s)")]
    assert max(len(line) for line in table[2:]) <= 80


def test_strong_scaling_is_printed_without_an_overhead(capsys: pytest.CaptureFixture[str]) -> None:
    print_narrow(made_up_scaling("strong"))
    out = capsys.readouterr().out
    assert "global batch of 32" in out and "overhead" not in out and "1.50x" in out


def test_accuracy_is_printed_with_who_reached_it(capsys: pytest.CaptureFixture[str]) -> None:
    request = accuracy_bench.AccuracyRequest(config=CONFIG, target=0.95, lines=("ring", "async"), seeds=2, price=1.0)
    rows = [
        accuracy_bench.accuracy_row(
            line=line, learners=2, target=0.95, runs=(kept(9, 0.96, 90.0), kept(9, right, 90.0)), price=1.0
        )
        for line, right in (("ring", 0.98), ("async", 0.94))
    ]
    print_narrow(accuracy_bench.accuracy_result(request, MACHINE, rows, ["a note"]))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    first, second = (line.split() for line in lines if line.startswith(" ring "))
    assert first == ["ring", "2", "of", "2", "2", "s", "20", "97.0", "%", "(94.7-98.3)"]
    assert second == ["ring", "90", "J", "60", "J", "0.00167", "0.00111"]
    assert "first at 95.0 %: ring (2 s, 2 s to 2 s)" in lines and "note: a note" in lines
    assert "async: not ranked: 1 of 2 seeds reached 95.0 %; it ended at 95.0 % (92.2-96.8)" in lines


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path) -> None:
    from offbeat.errors import OffbeatError

    (tmp_path / ".x.json.unfinished").mkdir()
    (tmp_path / "x.json").write_text("before", encoding="utf-8")
    with pytest.raises(OffbeatError, match="cannot write"):
        bench._write(Namespace(json=False), tmp_path / "x.json", "after", "")
    assert (tmp_path / "x.json").read_text(encoding="utf-8") == "before"
