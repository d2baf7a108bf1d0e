"""offbeat bench policies and bench server: what they say, what they refuse, and that nothing is left behind.

The commands run in processes of their own, since they fork.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.fixture import why_no_lab
from offbeat.cli import main
from offbeat.commands import base
from offbeat.commands import bench as command
from offbeat.errors import OffbeatError, RequestError
from offbeat.lab.network import payload_rate
from offbeat.measure import policies_bench, server_bench
from offbeat.measure.benchmark import BenchResult
from offbeat.measure.harness import program, supervise
from offbeat.measure.policies_bench import Steady, policies_result, policy_row, steady
from offbeat.measure.rank_bench import LabRequest
from offbeat.measure.server_bench import server_result
from offbeat.server.run_setting import RunSetting
from offbeat.server.supervisor import ServerPlan


def run_json(line: str) -> dict[str, Any]:
    words = [sys.executable, "-m", "offbeat", *line.split()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def children() -> set[str]:
    """Of this process."""
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def family(mark: str) -> list[str]:
    """Processes that were started with this in their environment, as command lines."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes() and folder.name != str(os.getpid()):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


@pytest.mark.skipif(not os.environ.get("OFFBEAT_MATRIX"), reason="takes long: make test-matrix")
def test_bench_policies_sets_real_runs_beside_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARK", "bench-policies-test")
    found = run_json("bench policies k-sync:1 async --learners 2 --slow exp:0.02 --updates 20 --seed 3 --json")
    assert (found["measured"], found["learners"], found["servers"], found["seed"]) == ("policies", 2, 1, 3)
    assert [(row["law"], row["strategy"], row["updates"]) for row in found["rows"]] == [
        ("exp:0.02", "k-sync:1", 20),
        ("exp:0.02", "async", 20),
    ]
    for row in found["rows"]:
        both = [row[name]["seconds_per_update"] for name in ("measured", "predicted")]
        assert row["seconds_difference"] == pytest.approx(both[0] / both[1] - 1)
        assert both[0] > 0.5 * both[1]  # the slowness was acted out
    waits, goes_on = found["rows"]
    assert waits["measured"]["staleness_mean"] == waits["predicted"]["staleness_mean"] == 0
    assert goes_on["measured"]["staleness_mean"] > 0.5
    assert {"measured", "predicted", "long_run", "difference"} <= found["definitions"].keys()
    assert family("MARK=bench-policies-test") == []


@pytest.mark.skipif(not os.environ.get("OFFBEAT_MATRIX"), reason="takes long: make test-matrix")
def test_bench_server_counts_pushes_of_all_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARK", "bench-server-test")
    line = "bench server --parameters 20k --learners 2 --rounds 1 --seconds 100ms --against rpc --json"
    found = run_json(line)
    assert (found["measured"], found["parameters"], found["tensors"]) == ("server", 20_000, 161)
    assert (found["size_bytes"], found["servers"], found["rounds"]) == (80_000, 2, 1)
    assert [case["learners"] for case in found["cases"]] == [2]
    for case in found["cases"]:
        assert [row["system"] for row in case["systems"]] == ["offbeat", "in-place", "rpc"]
        for row in case["systems"]:
            assert row["per_s"] == statistics.median(row["rounds_per_s"]) > 0
            assert row["ratio"] == pytest.approx(case["systems"][0]["per_s"] / row["per_s"])
            assert row["copy_share"] == pytest.approx(row["per_s"] * 2 * 80_000 / case["copy_bytes_per_s"])
    assert family("MARK=bench-server-test") == []


# --- judging a run -------------------------------------------------------------------------------------------------


def decisions(*updates: tuple[float, int]) -> list[dict[str, Any]]:
    """Updates of one gradient each: when, and at which version it was computed."""
    return [
        {"event": f"pushed 0 t{ticket} v{version} n1 @{at_s}", "commands": [f"apply t{ticket}", "send 0"]}
        for ticket, (at_s, version) in enumerate(updates, start=1)
    ]


def test_a_run_is_judged_between_its_start_and_its_last_update() -> None:
    log = decisions((5.0, 0), (6.0, 0), (8.0, 1), (11.0, 2), (99.0, 0))
    assert steady(log, 4) == Steady(updates=3, seconds=6.0, staleness_mean=1.0)
    with pytest.raises(OffbeatError, match="made 5 updates instead of 6"):
        steady(log, 6)


def test_the_prediction_is_that_of_the_closed_form() -> None:
    request = policies_bench.PoliciesRequest(laws=("exp:0.1",), learners=4)
    for line, seconds, staleness in (("full-sync", 0.1 * 25 / 12, 0.0), ("async", 0.025, 3.0)):
        for found in (
            policies_bench.predict(request, "exp:0.1", line, 2000),
            policies_bench.predict_long_run(request, "exp:0.1", line),
        ):
            assert found.seconds_per_update == pytest.approx(seconds, rel=0.05)
            assert found.staleness_mean == pytest.approx(staleness, rel=0.05)


def test_on_the_hosts_of_a_lab_the_prediction_has_their_links() -> None:
    lab = LabRequest.parse("2x1,100Mbit/s")
    request = policies_bench.PoliciesRequest(
        lines=("full-sync",), laws=("constant:0.1",), learners=2, lab=lab, parameters=250_000
    )
    found = policies_bench.predict(request, "constant:0.1", "full-sync", 50)
    way_s = 1e6 / payload_rate(100e6 / 8)
    assert found.seconds_per_update == pytest.approx(0.1 + 2 * way_s, rel=0.01)
    free = replace(request, lab=LabRequest.parse("2x1"))
    assert policies_bench.predict(free, "constant:0.1", "full-sync", 50).seconds_per_update == pytest.approx(0.1)


@pytest.mark.parametrize(("shape", "why"), [("1x2,1Gbit/s", "2 or more hosts"), ("2x2,1Gbit/s", "has 4; remove one")])
def test_a_lab_needs_hosts_and_all_learners_on_them(shape: str, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        policies_bench.PoliciesRequest(learners=2, lab=LabRequest.parse(shape))


@pytest.mark.skipif(not os.environ.get("OFFBEAT_MATRIX"), reason="takes long: make test-matrix")
def test_bench_policies_runs_on_the_hosts_of_a_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := why_no_lab():
        pytest.skip(reason)
    monkeypatch.setenv("MARK", "bench-policies-lab-test")
    line = "bench policies async --lab 2x1,200Mbit/s --slow constant:0.05 --updates 30 --parameters 100k --json"
    found = run_json(line)
    (row,) = found["rows"]
    assert (found["learners"], found["parameters"], found["lab"]) == (2, 100_000, "200 Mbit/s each way")
    both = [row[name]["seconds_per_update"] for name in ("measured", "predicted")]
    assert 0.025 < both[1] < 0.05 and both[0] > 0.8 * both[1]
    assert family("MARK=bench-policies-lab-test") == []


def test_nothing_against_nothing_is_equal_and_something_is_not() -> None:
    assert policies_bench.difference(0.0, 0.0) == 0.0
    assert policies_bench.difference(0.1, 0.0) == float("inf")
    assert policies_bench.difference(1.1, 1.0) == pytest.approx(0.1)


def made_up_policies() -> BenchResult:
    right = Steady(updates=10, seconds=1.0, staleness_mean=0.0)
    rows = [
        policy_row("exp:0.1", line, 11, measured, right, right)
        for line, measured in (
            ("full-sync", Steady(updates=10, seconds=1.09, staleness_mean=0.0)),
            ("k-sync:2", Steady(updates=10, seconds=1.11, staleness_mean=0.0)),
            ("async", Steady(updates=10, seconds=1.0, staleness_mean=0.5)),
        )
    ]
    machine = {"cores": 2, "load": 0.1, "processor": "AMD EPYC", "python": "3.11.2"}
    return policies_result(policies_bench.PoliciesRequest(), machine, rows)


def test_what_is_off_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    command.print_result(base.console(), made_up_policies())
    lines = capsys.readouterr().out.splitlines()
    assert "2 of 3 off by more than 10 %: k-sync:2 with exp:0.1, async with exp:0.1" in lines
    row = next(line for line in lines if " k-sync:2 " in line and "+" in line)
    assert row.split() == ["k-sync:2", "11", "111", "100", "+11.0", "%", "!", "100", "0.000", "0.000", "+0.0", "%"]
    assert [row["off"] for row in made_up_policies().json["rows"]] == [False, True, True]
    assert json.dumps(made_up_policies().json, allow_nan=False)


def test_a_server_result_is_summed_up_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    rounds: dict[str, list[tuple[float, float | None]]] = {
        "offbeat": [(40.0, 2e10), (42.0, 2e10), (10.0, 2e10)],
        "rpc": [(8.0, None), (7.0, None), (9.0, None)],
    }
    machine = {"cores": 2, "load": 0.1, "processor": "AMD EPYC", "python": "3.11.2"}
    request = server_bench.ServerRequest(learners=(2,))
    result = server_result(request, machine, {"ray": "no ray"}, {2: rounds})
    command.print_result(base.console(), result)
    lines = capsys.readouterr().out.splitlines()
    assert "2 learners: offbeat 40/s, 5.0x rpc" in lines and "ray: not measured: no ray" in lines
    row = next(line for line in lines if " rpc " in line and "%" in line)
    assert row.split() == ["rpc", "8", "7-9", "5.0x", "8", "%"]
    assert any("the machine was busy" in line for line in lines)


def test_the_model_has_the_tensors_of_resnet_50() -> None:
    sizes = server_bench.sizes_of(25_557_032)
    assert (len(sizes), sum(sizes), max(sizes)) == (161, 25_557_032, 9 * 512 * 512)
    for parameters in (server_bench.FEWEST, 25_600_000):
        sizes = server_bench.sizes_of(parameters)
        assert (len(sizes), sum(sizes)) == (161, parameters) and min(sizes) >= 1


# --- what goes wrong -----------------------------------------------------------------------------------------------

WRONG = {
    "bench policies ring": "'ring' is an all-reduce",
    "bench policies k-sink:2": "did you mean 'k-sync'?",
    "bench policies async:rate=drift:0.1": "rate=drift needs weights",
    "bench policies async async": "policies names a strategy twice",
    "bench policies --slow exp:0.1 exp:0.1": "--slow names a law twice",
    "bench policies --slow expo:0.1": "unknown law 'expo'",
    "bench policies --slow pareto:1,1": "'pareto:1,1' has no finite mean",
    "bench policies --updates 5": "--updates: expected 20 or more; got 5",
    "bench policies --learners 1 2": "--learners takes only one number with bench policies",
    "bench policies --learners 65": "from 1 to 64",
    "bench policies --ranks 2": "--ranks is not an option of bench policies",
    "bench server async": "'async' is not an option of bench server",
    "bench server --updates 5": "--updates is not an option of bench server",
    "bench server --learners 0": "--learners: expected a whole number",
    "bench server --learners 2 2": "--learners names a number twice",
    "bench server --parameters 25X": "expected a number like 25.6M, 100k or 5000; got '25X'",
    "bench server --parameters 10": "--parameters: expected 10000 or more; got 10",
    "bench server --parameters 900G": "of memory, but only",
    "bench server --against rcp": "unknown system 'rcp'; did you mean 'rpc'?",
    "bench server --against rpc,rpc": "names a system twice",
    "bench server --against offbeat": "leave offbeat out of --against: it is always measured",
    "bench server --seconds 0s": "--seconds and --timeout: expected more than 0",
    "bench allreduce --learners 2": "--learners is not an option of bench allreduce",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_request_is_refused_in_one_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("offbeat: ") and err.count("\n") == 1 and WRONG[line] in err


def test_without_the_repository_there_is_nothing_to_measure_against(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_bench, "folder", lambda: None)
    with pytest.raises(RequestError, match="--against needs the source repository"):
        server_bench.ServerRequest(against=("rpc",))
    assert server_bench.ServerRequest().against is None
    assert server_bench.missing(["rpc"]) == {"rpc": "its program is in the source repository, which is not installed"}


def test_a_learner_that_fails_is_named_and_nothing_is_left() -> None:
    before = children()
    setting = RunSetting(line="async", learners=2)
    plan = ServerPlan(setting=setting, command=program("bench_learner", "many"), restarts=0)
    with pytest.raises(OffbeatError, match=r"bench: learner \d: json.decoder.JSONDecodeError: .* \(testing\)"):
        supervise(plan, "testing", 60.0)
    assert children() == before


def test_a_run_that_takes_too_long_is_ended() -> None:
    before = children()
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    late = ServerPlan(setting=RunSetting(line="async", learners=1), command=sleeps, restarts=0)
    with pytest.raises(OffbeatError, match=r"bench: not finished within 500 ms \(testing\)"):
        supervise(late, "testing", 0.5)
    assert children() == before
