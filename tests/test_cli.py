"""The command line, as a user meets it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.fixture import why_no_lab
from offbeat import __version__
from offbeat.cli import COMMANDS, START, load, main
from offbeat.codecs import CODECS
from offbeat.commands import base
from offbeat.policies import replay
from offbeat.runs.log import read_log
from offbeat.schedules import algorithms
from offbeat.strategy import strategies

HERE = Path(__file__).parents[1]
Offbeat = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def offbeat(capsys: pytest.CaptureFixture[str]) -> Offbeat:
    """Runs one line and returns the exit code, standard output and standard error."""

    def run(line: str) -> tuple[int, str, str]:
        code = main(line.split())
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_help_names_every_command_and_version_is_printed(offbeat: Offbeat) -> None:
    code, out, _ = offbeat("--help")
    assert code == 0 and all(f"\n  {name}" in out for name in COMMANDS)
    assert offbeat("")[1] == out
    assert all(line in load(line.split()[0]).examples for line, _ in START)  # which are tried below
    assert offbeat("--version") == (0, f"offbeat {__version__}\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_of_every_command_work(
    offbeat: Offbeat, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command == "run":  # forks from a process of its own, and its script is an example
        monkeypatch.chdir(tmp_path)
        assert offbeat("examples digits")[0] == 0
        for line in load(command).examples:
            words = [sys.executable, "-m", "offbeat", *line.split()]
            assert subprocess.run(words, cwd=tmp_path, capture_output=True, check=True, timeout=90).stdout
        return
    needs_a_run = ("evaluate", "watch", "replay", "report")
    if command == "train" or command in needs_a_run:  # the same; the ones need what the other leaves
        after = [line for name in needs_a_run for line in load(name).examples]
        for line in [*load("train").examples, *after] if command == "train" else []:
            words = [sys.executable, "-m", "offbeat", *line.split()]
            assert subprocess.run(words, cwd=tmp_path, capture_output=True, check=True, timeout=90).stdout
        return
    if command == "lab" and (reason := why_no_lab()):
        pytest.skip(reason)
    monkeypatch.chdir(tmp_path)
    for line in load(command).examples:
        if command in ("bench", "calibrate", "work"):
            continue  # tests/process has all of them, smaller
        code, out, err = offbeat(line)
        assert code == 0 and out and not err, line


def test_schedule_prints_grid_steps_bytes_time_and_bottleneck(offbeat: Offbeat) -> None:
    code, out, _ = offbeat("schedule ring --ranks 8 --size 100MB --topology uniform:bandwidth=1GB/s,latency=10us")
    assert code == 0
    assert "+c6 <7" in out
    assert "steps       14\n" in out
    assert "175 MB by the busiest rank, 1.4 GB in total; lower bound 2M(P-1)/P = 175 MB per rank: 1.00x" in out
    assert "175.1 ms, 140 us of it latency; lower bound 175 ms" in out
    assert "rank 0 > switch carries 175 MB at 1 GB/s (as do 15 others)" in out


def test_schedule_json_is_one_object_with_the_promised_keys(offbeat: Offbeat) -> None:
    code, out, err = offbeat("schedule torus:4x2 --size 1000 --json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert {"name", "ranks", "steps", "bytes_per_rank", "bytes_total", "seconds", "bottleneck"} <= found.keys()
    assert (found["name"], found["ranks"], found["steps"]) == ("torus:4x2", 8, 8)
    assert found["bytes_total"] == sum(found["bytes_per_rank"]) == 2 * 1000 * 7


def test_without_an_algorithm_all_are_ranked(offbeat: Offbeat) -> None:
    line = "schedule --size 100MB --topology cluster:4x8,inside=50GB/s,across=1GB/s"
    ranking = json.loads(offbeat(f"{line} --json")[1])["ranking"]
    assert [row["seconds"] for row in ranking] == sorted(row["seconds"] for row in ranking)
    assert {row["name"].split(":")[0] for row in ranking} == set(algorithms())
    out = offbeat(line)[1]
    row = next(line for line in out.splitlines() if line.strip().startswith("hierarchical:"))
    assert "1.26x" in row and "node 0 > core carries 150 MB at 1 GB/s" in row
    assert "is 1.26x as fast as ring: node 0 > core carries 150 MB instead of 193.8 MB" in out


def test_dgx1_says_how_many_rings_there_are_or_gives_the_cut_bound(offbeat: Offbeat) -> None:
    for command in ("topology dgx1", "schedule ring --topology dgx1"):
        out = offbeat(command)[1]
        assert (
            "6 edge-disjoint directed rings; cut bound: ranks {"
        ) in out and "} have 6 lanes to the other ranks" in out
    assert (
        "no directed ring over direct links visits all 5 ranks; "
        "cut bound: ranks {4} have 2 lanes to the other ranks, 47.9 GB/s in total"
        in offbeat("topology dgx1 --ranks 5")[1]
    )
    assert json.loads(offbeat("topology dgx1 --ranks 6 --json")[1])["rings"]["orders"] == [
        [0, 3, 2, 1, 5, 4],
        [0, 4, 5, 1, 2, 3],
    ]


def test_strategies_lists_each_in_one_line_and_one_with_its_options(offbeat: Offbeat) -> None:
    lines = offbeat("strategies")[1].splitlines()
    assert len([line for line in lines if line.startswith("  ")]) == len(strategies()) + len(CODECS)
    assert "outer=" in offbeat("strategies hierarchical")[1]
    assert len(json.loads(offbeat("strategies --json")[1])["strategies"]) == len(strategies())


def test_examples_are_listed_with_a_line_each_and_one_is_copied(
    offbeat: Offbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    there = {path.stem: path.read_text(encoding="utf-8") for path in (HERE / "examples").glob("*.py")}
    rows = json.loads(offbeat("examples --json")[1])["examples"]
    assert [row["name"] for row in rows] == sorted(there) and all(row["summary"].endswith(".") for row in rows)
    assert [line.split()[0] for line in offbeat("examples")[1].splitlines()] == sorted(there)
    code, out, _ = offbeat("examples digits")
    assert code == 0 and out.startswith("wrote digits.py: ")
    assert (tmp_path / "digits.py").read_text(encoding="utf-8") == there["digits"]
    assert json.loads(offbeat("examples train.py --json")[1])["written"] == "train.py"


def test_an_example_never_overwrites_a_file(offbeat: Offbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits.py").write_text("mine")
    assert offbeat("examples digits") == (
        2, "", "offbeat: digits.py already exists in this folder; rename or remove it, or change to another folder\n"
    )  # fmt: skip
    assert (tmp_path / "digits.py").read_text() == "mine"


def test_a_picture_is_written_where_asked(offbeat: Offbeat, tmp_path: Path) -> None:
    path = tmp_path / "new" / "ring.svg"
    assert offbeat(f"schedule ring --ranks 4 --svg {path}")[0] == 0
    assert path.read_text().startswith("<svg")


def test_long_work_says_what_it_does_on_stderr_and_short_work_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with base.stages("building"):
        pass
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(base, "_LONG_S", 0.0)
    spoken = threading.Event()
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with base.stages("building") as tell:
        while not stream.getvalue():
            spoken.wait(0.001)
        tell("proving")
    assert stream.getvalue() == "offbeat: building ...\noffbeat: proving ...\n"


def test_a_nested_topology_is_shown_ranked_and_simulated(offbeat: Offbeat) -> None:
    assert "1.25 GB/s, 2 us: node 0 socket 0 > core" in offbeat("topology cluster:2xdgx1")[1]
    found = json.loads(offbeat("schedule --topology cluster:2xdgx1 --size 1MB --json")[1])
    assert (found["ranks"], found["advised"]) == (16, "halving-doubling")
    code, out, _ = offbeat("simulate hierarchical:2x8 --learners 16 --topology cluster:2xdgx1 --size 100MB --updates 5")
    assert code == 0 and "hierarchical:2x8" in out


SIMULATED_KEYS = {
    "strategy", "learners", "updates", "seconds_per_update", "minibatches_per_s", "staleness_mean", "staleness_std",
    "staleness_histogram", "cancelled", "dropped", "busy_share", "waste_share", "wait_share", "events", "events_per_s",
}  # fmt: skip


def test_simulate_json_has_the_promised_keys(offbeat: Offbeat) -> None:
    for strategy in ("k-sync:4", "ring"):
        code, out, err = offbeat(f"simulate {strategy} --updates 50 --json")
        found = json.loads(out)
        assert (code, err) == (0, "") and found.keys() >= SIMULATED_KEYS
        assert (found["strategy"], found["learners"], found["updates"]) == (strategy, 8, 50)


def test_simulate_draws_the_first_updates(offbeat: Offbeat) -> None:
    out = offbeat("simulate k-sync:4 --compute shifted-exp:1,1 --seed 0")[1]
    rows = [line for line in out.splitlines() if line.startswith("learner ")]
    assert len(rows) == 8 and sum("░" in row for row in rows) >= 4 and all("|0" in row for row in rows)


def test_simulate_writes_a_trace_and_a_log_that_replays(offbeat: Offbeat, tmp_path: Path) -> None:
    trace, log = tmp_path / "t.json", tmp_path / "run.jsonl"
    assert offbeat(f"simulate k-async:3 --updates 40 --trace {trace} --log {log} --failures 20,5")[0] == 0
    bars = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {bar["cat"] for bar in bars} == {"compute", "wait"}
    written = read_log(log)
    assert replay(written.run, written.decisions).version == 40


def test_the_same_seed_gives_the_same_log_byte_for_byte(offbeat: Offbeat, tmp_path: Path) -> None:
    for name in ("a", "b"):
        offbeat(f"simulate softsync:2 --updates 60 --compute gamma:1,0.5 --seed 7 --log {tmp_path / name}")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_curve_of_buckets_is_printed(offbeat: Offbeat) -> None:
    line = (
        "simulate ring --learners 40 --compute constant:370ms --forward-share 0.337838 --size 1.2GB --layers 64 "
        "--topology uniform:bandwidth=5.85GB/s,latency=20us --curve"
    )
    out = offbeat(line)[1]
    assert "771.6 ms" in out.splitlines()[3] and len(out.splitlines()) == 11
    assert json.loads(offbeat(f"{line} --json")[1])["curve"][0]["buckets"] == 1


WRONG = {
    "schedule ring --ranks 0": "--ranks: expected a whole number from 1 to 999999999; got '0'",
    "schedule ring --ranks -4": "got '-4'",
    "schedule ring --ranks many": "got 'many'",
    "schedule torus:3x5 --ranks 16": "3x5 has 15 ranks, not 16; fitting: 2x8, 4x4, 8x2",
    "schedule ring --size -3": "--size: a size is a whole number of bytes, 0 or more; got '-3'",
    "schedule ring --size 3XB": "unknown unit 'XB'",
    "schedule ring --size -3MB": "0 or more; got '-3MB'",
    "schedule ring --size 100gb": "did you mean 'GB'?",
    "schedule ring --size 25.6M": "'25.6M' is ambiguous, bytes or parameters: write 25.6MB, or 25.6Mparams",
    "schedule ring --size 3Xparams": "unknown unit 'Xparams'",
    "schedule DDP": "like 'ddp'; got 'DDP'",
    "simulate Parameter_Server": "like 'parameter-server'; got",
    "schedule ddp": "unknown all-reduce algorithm 'ddp' (PyTorch's",
    "simulate horovod": "in every iteration); write ring",
    "compare ring fedavg": "local-sgd:H); write local-sgd:8",
    "strategies gossip": "not implemented; the nearest is local-sgd:8 or ring",
    "train digits-mlp --sync ps": "--sync: unknown strategy 'ps' (a parameter server",
    "run --sync hogwild examples/digits.py": "not implemented; the nearest is async",
    "bench policies easgd": "not implemented; the nearest is local-sgd:8",
    "bench allreduce --strategy ddp": "); write ring or native",
    "bench accuracy --target 0.9 --sync diloco": "bench: --sync: unknown strategy 'diloco'",
    "bench scaling --sync zero": "holds the whole model); not implemented",
    "schedule ring --size 1e19": "too large",
    "schedule ring --size 9007199254740992": "too large",
    "schedule ring --topology uniform:bandwidth=1gb/s": "did you mean 'GB/s' or 'Gb/s'?",
    "schedule ring --topology uniform:bandwidth=1e-305": "at least 1 byte per second",
    "schedule ring --ranks 100000": "'ring' on 100000 ranks takes about",
    f"schedule double-tree:{'9' * 5000}": "per-tree: expected a whole number",
    f"schedule torus:{'9' * 5000}x2": "a shape is whole numbers joined by 'x'",
    f"schedule ring:order={'9' * 5000}": "written like 0-3-2-1",
    "schedule Ring": "like 'ring'; got 'Ring'",
    "schedule torus:04x2": "'torus:04x2': a shape is",
    "schedule torus:4x2 --topology cluster:4x8": "'torus:4x2' has 8 ranks but 'cluster:4x8' has 32 ranks",
    "schedule ring --size 10 --item-size 4": "not a whole number of items of 4 bytes",
    "schedule ring --topology moon": "unknown topology 'moon'; known: uniform, cluster",
    "schedule ring --topology cluster:2x2 --ranks 5": "4 ranks, not 5",
    "schedule rign": "unknown all-reduce algorithm 'rign'; did you mean 'ring'?",
    "schedule k-sync:4": "unknown all-reduce algorithm 'k-sync'",
    "schedule ring --rank 8": "unknown option '--rank'; did you mean '--ranks'?",
    "schedule ring extra": "unknown argument 'extra'",
    "schedule ring --collective gather": "unknown gather algorithm 'ring'; known: direct, hierarchical",
    "schedule ring --collective gahter": "unknown collective 'gahter'; did you mean 'gather'?",
    "schedule ring --root 1": "all-reduce has no root",
    "schedule tree --collective broadcast --root 9": "one of the ranks 0..7",
    "schedule --svg x.svg": "need an algorithm",
    "schedule ring --ranks 64 --svg x.svg": "too large to draw",
    "schedule ring --svg /proc/none/x.svg": "cannot write /proc/none/x.svg",
    "schedule ring --svg": "--svg: expected one argument",
    "simulate k-sync:9 --learners 8": "'k-sync:9': K=9 exceeds the 8 learners",
    "simulate k-sync:0": "'k-sync:0': k: expected a whole number from 1",
    "simulate k-sink:2": "unknown strategy 'k-sink'; did you mean 'k-sync'?",
    "simulate": "the following arguments are required: strategy",
    "simulate async --compute exp:-1": "--compute: 'exp:-1': mean: a time is 0 or more; got '-1'",
    "simulate async --compute expo:1": "unknown law 'expo'; did you mean 'exp'?",
    "simulate async --compute trace:nowhere.txt": "cannot read the samples nowhere.txt: No such file",
    "simulate async --latency -1ms": "--latency: a time is 0 or more; got '-1ms'",
    "simulate async --updates 0": "--updates: expected a whole number from 1",
    "simulate async --speeds 1,x": "--speeds: expected numbers joined by commas",
    "simulate async --speeds 1,0 --learners 2": "speeds must be above 0",
    "simulate async --speeds 1,1,1 --learners 2": "3 speeds for 2 learners",
    "simulate async --slow 5": "--slow: expected FACTOR,ENTER,LEAVE",
    "simulate async --failures 5": "--failures: expected UP,DOWN",
    "simulate async --seed x": "--seed: a seed is a whole number; got 'x'",
    "simulate async:rate=drift:1": "needs weights, which a simulation does not have",
    "simulate ring --compute pareto:1,1 --curve": "is infinite",
    "simulate ring --layers 999999999": "--layers must be at most 100000",
    "simulate async --show -3": "--show: expected a whole number",
    "simulate async --log /": "cannot write /: it is a folder",
    "simulate async --curve": "--curve needs an all-reduce like ring",
    "simulate ring --failures 5,5": "cannot continue after a failure of a learner",
    "simulate torus:3x3 --learners 8": "3x3 has 9 ranks, not 8",
    "simulate async --trace /proc/none/t.json": "cannot write /proc/none/t.json",
    "simulate async --log /proc/none/log": "cannot write /proc/none/log",
    "compare full-sync asink": "unknown strategy 'asink'; did you mean 'async'?",
    "compare --learner 8": "unknown option '--learner'; did you mean '--learners'?",
    "schedul ring": "unknown command 'schedul'; did you mean 'schedule'?",
    "--verison": "unknown option '--verison'; did you mean '--version'?",
    "examples digist": "unknown example 'digist'; did you mean 'digits'?",
    "strategies rnig": "unknown strategy 'rnig'; did you mean 'ring'?",
    "topology dgx1 --ranks 9": "dgx1 has 8 GPUs",
}


@pytest.mark.parametrize("line", WRONG)
def test_bad_input_gives_exit_code_2_and_one_clear_line(offbeat: Offbeat, line: str) -> None:
    code, out, err = offbeat(line)
    assert (code, out) == (2, "")
    assert err.startswith("offbeat: ") and err.count("\n") == 1 and WRONG[line] in err
