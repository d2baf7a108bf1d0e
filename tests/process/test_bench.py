"""The benchmarks: their numbers follow from their rounds, mistakes are named, and nothing is left behind.

How fast anything is, is not asserted here.
"""

from __future__ import annotations

import io
import json
import math
import os
import signal
import statistics
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lab.fixture import why_no_lab
from offbeat.cli import main
from offbeat.commands import base
from offbeat.commands import bench as command
from offbeat.errors import OffbeatError, RequestError
from offbeat.measure import network_bench, rank_bench
from offbeat.measure.benchmark import BenchResult
from offbeat.measure.harness import Harness
from offbeat.measure.mpi_rank import MpiRank
from offbeat.measure.rank_bench import allreduce_result, format_ratio, size_label
from offbeat.measure.torch_rank import AllReduceRank, Peers
from offbeat.report.benchmark_fields import format_ms


def run_json(line: str) -> dict[str, Any]:
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(line.split()) == 0
    found = json.loads(out.getvalue())
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def reduced() -> dict[str, Any]:
    """One small run, as on a machine without mpirun."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_bench, "why_no_mpi", lambda: "mpirun is not installed")
        return run_json("bench allreduce --ranks 2 --sizes 64KiB,100kB --rounds 1 --against gloo,mpi --json")


def test_bench_allreduce_measures_every_size_and_system(reduced: dict[str, Any]) -> None:
    assert (reduced["measured"], reduced["ranks"], reduced["rounds"], reduced["threads"]) == ("allreduce", 2, 1, 1)
    assert [size["size_bytes"] for size in reduced["sizes"]] == [65536, 100_000]
    for size in reduced["sizes"]:
        assert [row["system"] for row in size["systems"]] == ["offbeat", "gloo"]
        assert all(len(row["rounds_ms"]) == 1 and row["iterations"][0] >= 5 for row in size["systems"])
    assert {"cores", "load", "processor", "torch"} <= reduced["machine"].keys()
    assert reduced["machine"]["torch"] == torch.__version__
    assert reduced["not_measured"] == {"mpi": "mpirun is not installed"}


@pytest.mark.skipif(why_no_lab() is not None, reason=str(why_no_lab()))
def test_bench_allreduce_measures_on_the_hosts_of_a_lab() -> None:
    found = run_json(
        "bench allreduce --lab 2x1,400Mbit/s --sizes 64KiB --rounds 1 --against gloo,gloo:2,tls,mpi --json"
    )
    assert (found["ranks"], found["hosts"], found["links"]) == (2, 2, "400 Mbit/s each way")
    reason = rank_bench.why_no_mpi()
    systems = ["offbeat", "gloo", "gloo:2", "tls", *([] if reason else ["mpi"])]
    assert [row["system"] for row in found["sizes"][0]["systems"]] == systems
    assert found["not_measured"] == ({"mpi": reason} if reason else {})


def test_gloo_with_several_groups_is_for_all_reduces_only() -> None:
    with pytest.raises(RequestError, match="like gloo:4; got 'gloo:1'"):
        rank_bench.RankRequest(ranks=2, against=("gloo:1",), others=rank_bench.ALLREDUCE_OTHERS)
    with pytest.raises(RequestError, match="gloo:4"):
        rank_bench.RankRequest(ranks=2, against=("gloo:4",), others=rank_bench.DDP_OTHERS)
    rank_bench.RankRequest(ranks=2, against=("gloo", "gloo:4"), others=rank_bench.ALLREDUCE_OTHERS)


def test_what_a_key_costs_is_measured_between_hosts() -> None:
    with pytest.raises(RequestError, match="--against tls needs --lab"):
        rank_bench.RankRequest(ranks=2, against=("tls",), others=rank_bench.ALLREDUCE_OTHERS)


@pytest.mark.skipif(why_no_lab() is not None, reason=str(why_no_lab()))
def test_the_network_of_a_lab_is_measured_and_its_all_reduces_are_predicted() -> None:
    lab = rank_bench.LabRequest.parse("2x1,400Mbit/s")
    found = network_bench.measure_network(network_bench.NetworkRequest(lab=lab), lambda doing: None)
    assert found.hosts == 2
    assert min(found.sends) > 10e6  # of 50 MB/s, on whatever else runs here
    assert found.latency_s >= 0
    assert found.message_s > 0
    request = network_bench.AllReducePredictions(
        network=found, lab=lab, lines=("ring", "tree"), sizes=(65536,), rounds=1
    )
    result = network_bench.predict_allreduces(request, lambda doing: None)
    assert {row["strategy"] for row in result.rows} == {"ring", "tree"}
    assert all(row["predicted_s"] > 0 and row["measured_s"] > 0 for row in result.rows)
    assert abs(result.rows[0]["error"]) >= abs(result.rows[1]["error"])  # the worst first


def test_a_lab_of_a_benchmark_is_hosts_times_ranks_and_their_links() -> None:
    lab = rank_bench.LabRequest.parse("4x2,1Gbit/s,2=100Mbit/s")
    assert (lab.ranks, lab.network.hosts, [lab.host_of(rank) for rank in range(8)]) == (8, 4, [0, 0, 1, 1, 2, 2, 3, 3])
    assert lab.links() == "1 Gbit/s each way, host 2 100 Mbit/s each way"
    shaped = rank_bench.LabRequest.parse("2x4,1Gbit/s")
    ring, two_level = (shaped.price_ms(line, 100_000_000) for line in ("ring", "hierarchical:2x4,inner=direct"))
    assert ring is not None and two_level is not None and ring / two_level == pytest.approx(1.75)
    assert rank_bench.LabRequest.parse("2x4").price_ms("ring", 1000) is None
    for wrong in ("4", "4x2x2", "4x2,1Gbit/s,2Gbit/s", "4x2,7=1Gbit/s", "4x2,fast"):
        with pytest.raises(RequestError):
            rank_bench.LabRequest.parse(wrong)
    assert main(["bench", "allreduce", "--lab", "2x2", "--ranks", "3"]) == 2


def test_the_numbers_of_bench_allreduce_follow_from_its_rounds(reduced: dict[str, Any]) -> None:
    for size in reduced["sizes"]:
        ours_ms = size["systems"][0]["ms"]
        for row in size["systems"]:
            assert row["ms"] == pytest.approx(statistics.median(row["rounds_ms"]))
            assert row["bus_bytes_per_s"] == pytest.approx(2 * (2 - 1) / 2 * size["size_bytes"] / (row["ms"] / 1e3))
            assert row["ratio"] == pytest.approx(row["ms"] / ours_ms)
            share = row["bus_bytes_per_s"] * 2 / reduced["copy_together_bytes_per_s"]
            assert row["copy_share"] == pytest.approx(share)
        gloo = format_ratio(size["systems"][1]["ratio"])
        assert size["summary"].endswith(f": offbeat {format_ms(ours_ms)} ms, {gloo} gloo")
    assert reduced["copy_alone_bytes_per_s"] > 0
    each = [row["rounds_ms"] for size in reduced["sizes"] for row in size["systems"]]
    assert reduced["spread"] == pytest.approx(max(max(rounds) / min(rounds) for rounds in each))
    numbers = {
        "ms",
        "spread",
        "bus_bytes_per_s",
        "ratio",
        "copy_share",
        "copy_together_bytes_per_s",
        "copy_alone_bytes_per_s",
    }
    assert reduced["definitions"].keys() == numbers


@pytest.mark.skipif(rank_bench.why_no_mpi() is not None, reason=str(rank_bench.why_no_mpi()))
def test_bench_allreduce_measures_open_mpi_where_it_is_installed() -> None:
    before = set(Path("/dev/shm").glob("offbeat-bench-*"))
    found = run_json("bench allreduce --ranks 2 --sizes 4KiB --rounds 1 --against mpi --json")
    (size,) = found["sizes"]
    assert [row["system"] for row in size["systems"]] == ["offbeat", "mpi"]
    assert found["not_measured"] == {} and "Open MPI" in found["machine"]["mpi"]
    assert set(Path("/dev/shm").glob("offbeat-bench-*")) == before


@pytest.mark.skipif(not os.environ.get("OFFBEAT_MATRIX"), reason="takes long: make test-matrix")
def test_bench_ddp_compares_iterations_and_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_bench, "_DDP_ROUND_S", 0.1)
    found = run_json("bench ddp --ranks 2 --against gloo --batch 2 --rounds 1 --json")
    assert (found["measured"], found["ranks"], found["batch"]) == ("ddp", 2, 2)
    assert sum(found["bucket_bytes"]) == 4 * found["parameters"] > 4 * 10_000_000
    assert [row["system"] for row in found["systems"]] == ["offbeat", "gloo"]
    for row in found["systems"]:
        assert row["ms"] == pytest.approx(statistics.median(row["rounds_ms"]))
        assert row["added_ms"] == pytest.approx(row["ms"] - found["none"]["ms"])
        assert row["alone_ms"] == pytest.approx(statistics.median(row["alone_rounds_ms"]))
        assert row["hidden_share"] == pytest.approx(1 - row["added_ms"] / row["alone_ms"])
        beyond = 1 - (row["ms"] - found["empty"]["ms"]) / row["alone_ms"]
        assert row["hidden_beyond_ddp_share"] == pytest.approx(beyond)
    assert (found["same_parameters"], found["largest_difference"]) == (True, 0.0)


# --- what is printed, from rounds that are made up ----------------------------------------------------------------


def made_up(monkeypatch: pytest.MonkeyPatch) -> BenchResult:
    monkeypatch.setattr(rank_bench, "_COPY_BYTES", 1_000_000)
    machine = {"cores": 2, "load": 0.1, "processor": "AMD EPYC", "torch": "2.13.0+cpu", "python": "3.11.2"}
    rounds: dict[str, list[tuple[float, float]]] = {
        "copying": [(1e-4, 2e-4)],
        "offbeat": [(9, 0.00011), (9, 0.0001), (9, 0.00012)],
        "gloo": [(5, 0.00341), (5, 0.0035), (5, 0.0003)],
        "mpi": [(5, 0.000506), (5, 0.0005), (5, 0.0006)],
    }
    request = rank_bench.RankRequest(
        ranks=4, rounds=3, against=("gloo", "mpi"), others=rank_bench.ALLREDUCE_OTHERS, strategy="ring"
    )
    return allreduce_result(request, machine, {"x": "no x"}, {4 * 2**20: rounds})


def test_a_result_is_summed_up_in_one_sentence_a_size_and_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    command.print_result(Console(width=80, highlight=False, file=sys.stdout), made_up(monkeypatch))
    lines = capsys.readouterr().out.splitlines()
    assert "4 MiB: offbeat 0.11 ms, 31x gloo, 4.6x mpi" in lines
    assert "copy     20 GB/s by 4 ranks together, 10 GB/s by one alone" in lines
    assert "x: not measured: no x" in lines
    lines.remove("rounds of one system differ by up to 11.7x: the machine was busy; measure again on an idle machine")
    row = next(line for line in lines if " gloo " in line)
    assert row.split() == ["gloo", "3.41", "0.3-3.5", "1.845", "GB/s", "31x", "37", "%"]
    assert max(len(line) for line in lines) <= 80
    assert base.console().width == 200  # a pipe's


def test_sizes_read_as_they_are_written() -> None:
    assert [size_label(n) for n in (65536, 4 * 2**20, 100_000_000, 2**30, 12)] == [
        "64 KiB", "4 MiB", "100 MB", "1 GiB", "12 B",
    ]  # fmt: skip


def test_bench_codecs_prints_the_bandwidth_below_which_each_pays() -> None:
    found = run_json("bench codecs int8 top-k:0.01 --parameters 200k --ranks 3 --json")
    assert [row["codec"] for row in found["codecs"]] == ["int8", "top-k:0.01"]
    for row in found["codecs"]:
        c, ratio = row["coding_bytes_per_s"], row["ratio"]
        assert row["break_even_bytes_per_s"] == pytest.approx(c * (1 - 1 / ratio))
    assert found["codecs"][0]["ratio"] == pytest.approx(3.94, abs=0.01)
    assert found["codecs"][1]["ratio"] == pytest.approx(50 * 2 / 3, rel=0.01)  # gathered: (P-1) payloads


@pytest.mark.skipif(why_no_lab() is not None, reason=str(why_no_lab()))
def test_bench_codecs_compares_them_on_the_hosts_of_a_lab() -> None:
    words = "bench codecs bf16 power-sgd:2 auto:power-sgd:2 --lab 2x1,200Mbit/s --parameters 300k --rounds 1 --json"
    found = run_json(words)
    rows = {row["line"]: row for row in found["strategies"]}
    lines = ["bf16", "power-sgd:2", "auto", "auto:power-sgd:2"]
    assert list(rows) == ["ring", *(f"ring:codec={line}" for line in lines)]
    assert [row["codec"] for row in found["codecs"]] == ["bf16", "power-sgd:2"]
    assert rows["ring"]["sent_bytes"] == 1_200_000 and rows["ring:codec=bf16"]["sent_bytes"] == 600_000
    assert [one.partition(": ring with")[0] for one in found["why"]] == ["codec=auto", "codec=auto:power-sgd:2"]
    assert "Mbit/s" in found["links"]


# --- what is refused ----------------------------------------------------------------------------------------------

WRONG = {
    "bench": "the following arguments are required: allreduce|ddp",
    "bench alreduce": "did you mean 'allreduce'?",
    "bench codecs int9": "did you mean 'int8'?",
    "bench codecs auto:int8": "auto:int8 chooses by the links between hosts, so it needs --lab",
    "bench codecs --parameters 10": "--parameters: expected 20000 or more; got 10",
    "bench allreduce --ranks 1": "--ranks: expected a number from 2 to 64; got 1",
    "bench allreduce --ranks 65": "--ranks: expected a number from 2 to 64; got 65",
    "bench allreduce --ranks two": "--ranks: expected a whole number",
    "bench allreduce --sizes 64KB,x": "--sizes: a size is a number with a unit",
    "bench allreduce --sizes 64kib": "did you mean 'KiB'?",
    "bench allreduce --sizes 0": "expected multiples of 4 bytes (float32); got 0 bytes",
    "bench allreduce --sizes 10": "expected multiples of 4 bytes (float32); got 10 bytes",
    "bench allreduce --sizes 4KiB,4096": "--sizes names a size twice",
    "bench allreduce --sizes 100TB": "use smaller --sizes or fewer --ranks",
    "bench allreduce --against gluo": "unknown system 'gluo'; did you mean 'gloo'?",
    "bench allreduce --against gloo,": "expected names joined by commas",
    "bench allreduce --against gloo,gloo": "names a system twice",
    "bench allreduce --against offbeat": "leave offbeat out of --against: it is always measured",
    "bench allreduce --rounds 0": "--rounds: expected a whole number from 1",
    "bench allreduce --timeout 0": "--timeout: expected more than 0",
    "bench allreduce --strategy rign": "unknown strategy 'rign'; did you mean 'ring'?",
    "bench allreduce --strategy k-sync:2": "'k-sync:2' is a parameter-server strategy",
    "bench allreduce --strategy torus:3x3": "3x3 has 9 ranks, not 4",
    "bench allreduce --batch 2": "--batch is not an option of bench allreduce",
    "bench ddp --sizes 4KiB": "--sizes is not an option of bench ddp",
    "bench ddp --against mpi": "mpi can be measured only by bench allreduce",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_request_is_refused_in_one_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("offbeat: ") and err.count("\n") == 1 and WRONG[line] in err


def test_mpi_alone_is_refused_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert rank_bench.why_no_mpi() == "mpirun is not installed"
    request = rank_bench.RankRequest(ranks=2, against=("mpi",), others=rank_bench.ALLREDUCE_OTHERS)
    with pytest.raises(RequestError, match="mpi: cannot be measured: mpirun is not installed"):
        rank_bench.measure_allreduce(request, [4], print)


# --- wrong results are errors -------------------------------------------------------------------------------------


def test_a_wrong_sum_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, group: None)
    broken: Any = None
    ranks = AllReduceRank(Peers(rank=0, ranks=2, groups={"lazy": broken}))
    with pytest.raises(OffbeatError, match="lazy: wrong sum: element 1 is 1, expected 3"):
        ranks.warm({"system": "lazy", "size_bytes": 4096, "iterations": 5})
    world = SimpleNamespace(Get_rank=lambda: 1, Get_size=lambda: 2, Allreduce=lambda *words: None)
    rank = MpiRank(SimpleNamespace(IN_PLACE=None), world)
    rank.buffer = np.zeros(300, dtype=np.float32)
    with pytest.raises(OffbeatError, match="mpi: wrong sum: element 1 is 2, expected 3"):
        rank.check()


def test_parameters_that_differ_are_an_error_unless_only_the_order_of_adding_does() -> None:
    def answer(a: str, b: str, difference: float) -> dict[str, Any]:
        return {"digests": {"offbeat": a, "gloo": b}, "differences": {"offbeat": 0.0, "gloo": difference}}

    assert rank_bench._compared(2, [answer("x", "x", 0.0)] * 2) == (True, 0.0)
    assert rank_bench._compared(3, [answer("x", "y", 1e-6)] * 3) == (False, 1e-6)
    for ranks, answers in (
        (2, [answer("x", "y", 1e-6)] * 2),
        (3, [answer("x", "y", 0.1)] * 3),
        (3, [answer("x", "y", math.nan)] * 3),
        (2, [answer("x", "x", math.nan)] * 2),
        (2, [answer("x", "x", 0.0), answer("x", "z", 0.0)]),
    ):
        with pytest.raises(OffbeatError, match="wrong result"):
            rank_bench._compared(ranks, answers)


# --- the harness: stand-ins for ranks, without torch --------------------------------------------------------------

ECHO = "import sys\nfor line in sys.stdin: print('noise'); print(line, flush=True)"
DIES = "import os, signal, sys\nsys.stdin.readline()\nos.kill(os.getpid(), signal.SIGKILL)"
HANGS = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"
FAILS = "import sys\nsys.stdin.readline()\nsys.exit('no luck')"
SAYS = 'import sys\nsys.stdin.readline()\nprint(\'{"error": "peer gone"}\', flush=True)\nsys.stdin.readline()'


def harness_of(*programs: str, timeout_s: float = 30.0) -> Harness:
    harness = Harness(timeout_s)
    for number, program in enumerate(programs):
        harness.start(f"rank {number}", [sys.executable, "-c", program], os.environ)
    return harness


def test_all_children_answer_together_and_one_can_be_asked_alone() -> None:
    with harness_of(ECHO, ECHO) as harness:
        assert harness.ask({"a": 1}, "asking") == [{"a": 1}, {"a": 1}]
        assert harness.ask([{"a": 1}, {"a": 2}], "asking") == [{"a": 1}, {"a": 2}]
        assert harness.ask({"b": 1}, "asking", first=1) == [{"b": 1}]
    assert [child.process.returncode for child in harness.children] == [0, 0]


@pytest.mark.parametrize(
    ("programs", "message"),
    [
        ((ECHO, DIES), "bench: rank 1 was killed by SIGKILL (testing)"),
        ((SAYS, DIES), "bench: rank 1 was killed by SIGKILL (testing)"),  # the cause, not the complaint
        ((SAYS, ECHO), "bench: rank 0: peer gone (testing)"),
        ((ECHO, FAILS), "bench: rank 1 ended with exit code 1: no luck (testing)"),
    ],
)
def test_a_child_that_fails_ends_the_run_with_one_line_and_nothing_is_left(
    programs: tuple[str, ...], message: str
) -> None:
    with pytest.raises(OffbeatError) as caught, harness_of(*programs) as harness:
        harness.ask({"do": "it"}, "testing")
        harness.ask({"do": "it"}, "testing")  # a child may have gone after it answered
    assert str(caught.value) == message
    assert all(child.process.returncode is not None for child in harness.children)


def test_a_child_that_does_not_answer_is_named_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.measure.harness._GRACE_S", 0.2)
    with pytest.raises(OffbeatError) as caught, harness_of(ECHO, HANGS, timeout_s=1.0) as harness:
        harness.ask({"do": "it"}, "testing")
    assert str(caught.value) == "bench: no answer from rank 1 within 1 s (--timeout), testing"
    assert harness.children[1].process.returncode == -signal.SIGKILL


def test_ranks_end_when_their_parent_is_killed() -> None:
    """The parent stands in a process of its own, which is killed while its rank sleeps for ever."""
    rank = "from offbeat.measure.child_requests import die_with_parent; import time; die_with_parent(); time.sleep(600)"
    parent = (
        "import os, sys\nfrom offbeat.measure.harness import Harness\n"
        f"child = Harness(9).start('rank 0', [sys.executable, '-c', {rank!r}], os.environ)\n"
        "import json, time; time.sleep(1); print(json.dumps({'pid': child.process.pid}), flush=True); time.sleep(600)"
    )
    with harness_of(parent) as harness:
        (answer,) = harness.ask({}, "starting")
        harness.children[0].process.kill()
        deadline = time.monotonic() + 20
        while _is_alive(answer["pid"]) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _is_alive(answer["pid"])


def _is_alive(pid: int) -> bool:
    """A zombie that nobody has waited for is dead."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_the_parent_loads_no_torch() -> None:
    program = (
        "import sys\nsys.stdin.readline()\nimport offbeat.commands.bench, offbeat.measure.rank_bench, json\n"
        "print(json.dumps({'torch': 'torch' in sys.modules}), flush=True)\nsys.stdin.readline()"
    )
    with harness_of(program) as harness:
        assert harness.ask({}, "importing") == [{"torch": False}]
