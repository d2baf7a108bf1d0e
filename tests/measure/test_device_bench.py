"""bench device on processes that were never started: which points are measured, what fails, what fits; and for real."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from offbeat.cli import main
from offbeat.errors import OffbeatError, RequestError
from offbeat.measure.benchmark import BenchResult
from offbeat.measure.device_bench import FILLED, DeviceRequest, largest_batch, measure
from offbeat.measure.device_learner import DeviceLearner, rung_here
from offbeat.report.build import build
from offbeat.report.inputs import read_result
from offbeat.train.config import Config
from offbeat.train.config_files import changed
from offbeat.train.out_of_memory import is_out_of_memory
from offbeat.train.recipes import RECIPES

MACHINE = {"cores": 4, "load": 0.1, "processor": "AMD", "torch": "2.13", "device": "cuda", "threads": 1}
H200 = {**MACHINE, "gpu": "NVIDIA H200"}
CNN = RECIPES["digits-cnn"].config
MLP = RECIPES["digits-mlp"].config
FREE = 10_000_000

Answer = Callable[[Config, int], Mapping[str, Any]]


def fine(config: Config, batch: int) -> Mapping[str, Any]:
    """1 ms and 0.1 ms a sample; 1 MB and 10 kB a sample."""
    seconds = 1e-3 + 1e-4 * batch
    return {
        "times_s": [seconds, 0.9 * seconds, 1.2 * seconds, seconds, seconds],
        "joules_per_sample": 0.5,
        "not_measured": [],
        "peak_bytes": 1_000_000 + 10_000 * batch,
        "retries": 0,
    }


NO_MEMORY = {"failed": "OutOfMemoryError: CUDA out of memory", "out_of_memory": True}


class Processes:
    """In the place of real ones: what was asked of each, in its order."""

    def __init__(self, answer: Answer = fine) -> None:
        self.answer = answer
        self.asked: list[tuple[str, list[int]]] = []
        self.open = 0

    def start(self, config: Config, timeout_s: float, doing: str) -> Any:
        asked: list[int] = []
        self.asked.append((f"{config.name} {config.train.precision}", asked))
        self.open += 1
        outer = self

        class Process:
            told: ClassVar = {"samples": 1000, "flops_per_sample": 67e9, "compute": "graph", "free_bytes": FREE}

            def ask(self, batch: int, seconds: float) -> Mapping[str, Any]:
                asked.append(batch)
                return outer.answer(config, batch)

            def close(self) -> None:
                outer.open -= 1

        return Process()


def request(*sizes: int | str, configs: tuple[Config, ...] = (CNN,), precisions: tuple[str, ...] = ()) -> DeviceRequest:
    return DeviceRequest(configs=configs, precisions=precisions, sizes=sizes)


def found(asked: DeviceRequest, processes: Processes, machine: Mapping[str, Any] = H200, **more: Any) -> BenchResult:
    result = measure(asked, lambda text: None, start=processes.start, machine=machine, **more)
    assert processes.open == 0
    return result


def test_each_model_and_precision_is_a_process_of_its_own() -> None:
    processes = Processes()
    result = found(request(64, 32, configs=(CNN, MLP), precisions=("fp32", "bf16")), processes)
    assert processes.asked == [
        ("digits-cnn fp32", [32, 64]),
        ("digits-cnn bf16", [32, 64]),
        ("digits-mlp fp32", [32, 64]),
        ("digits-mlp bf16", [32, 64]),
    ]
    assert [(row["recipe"], row["precision"], row["batch"]) for row in result.rows[:2]] == [
        ("digits-cnn", "fp32", 32),
        ("digits-cnn", "fp32", 64),
    ]


def test_a_row_has_the_rate_the_memory_the_energy_and_the_share_of_the_peak() -> None:
    row = found(request(90), Processes()).rows[0]
    assert row["seconds"] == pytest.approx(0.01)
    assert (row["seconds_low"], row["seconds_high"]) == (pytest.approx(0.009), pytest.approx(0.012))
    assert row["throughput"] == pytest.approx(9000)
    assert row["memory_gb"] == pytest.approx(0.0019)
    assert row["joules_per_sample"] == 0.5
    assert row["peak_share"] == pytest.approx(9000 * 67e9 / 67e12)
    assert row["epoch_s"] == pytest.approx(1000 / 9000)
    assert row["why_not"] is None


def test_the_share_of_an_unknown_peak_is_not_told() -> None:
    result = found(request(32), Processes(), {**MACHINE, "gpu": "NVIDIA GeForce RTX 4090"})
    assert result.rows[0]["peak_share"] is None
    assert "the share of peak is unknown: NVIDIA GeForce RTX 4090" in result.json["notes"][-1]


def test_out_of_memory_is_one_point_and_larger_ones_are_not_tried() -> None:
    processes = Processes(lambda config, batch: NO_MEMORY if batch > 64 else fine(config, batch))
    result = found(request(32, 128, 64, 256), processes)
    assert processes.asked == [("digits-cnn fp32", [32, 64, 128])]
    assert [row["why_not"] for row in result.rows] == [None, None, "out of memory", "out of memory with 128"]
    assert result.rows[2]["throughput"] is None


def test_what_fails_is_one_point_and_the_next_one_gets_a_new_process() -> None:
    broken = {"failed": "RuntimeError: no kernel", "out_of_memory": False}
    processes = Processes(lambda config, batch: broken if batch == 64 else fine(config, batch))
    result = found(request(32, 64, 128), processes)
    assert [numbers for _, numbers in processes.asked] == [[32, 64], [128]]
    assert [row["why_not"] for row in result.rows] == [None, "RuntimeError: no kernel", None]


def test_a_process_that_cannot_begin_fails_its_points_only() -> None:
    processes = Processes()

    def start(config: Config, timeout_s: float, doing: str) -> Any:
        if config.name == "digits-cnn":
            raise OffbeatError("bench: digits-cnn ended with exit code 1: no driver")
        return processes.start(config, timeout_s, doing)

    result = measure(request(32, configs=(CNN, MLP)), lambda text: None, start=start, machine=H200)
    assert [row["why_not"] for row in result.rows] == ["digits-cnn ended with exit code 1: no driver", None]
    assert result.json["ranking"][0] == "digits-cnn: nothing could be measured"


# --- the largest minibatch -------------------------------------------------------------------------------------------


def test_the_largest_minibatch_fills_the_memory_that_two_others_tell() -> None:
    assert largest_batch({32: 1_320_000, 64: 1_640_000}, FREE) == int((FILLED * FREE - 1e6) / 1e4) // 8 * 8
    assert largest_batch({32: 1_320_000}, FREE) == 0
    assert largest_batch({32: 5, 64: 5}, FREE) == 0


def test_max_is_measured_after_the_sizes_that_tell_its_memory() -> None:
    processes = Processes()
    result = found(request("max", 32, 64), processes)
    assert processes.asked == [("digits-cnn fp32", [32, 64, 816])]
    assert (result.rows[-1]["batch"], result.rows[-1]["largest"]) == (816, True)


def test_max_alone_probes_two_small_minibatches() -> None:
    processes = Processes()
    result = found(request("max"), processes)
    assert processes.asked == [("digits-cnn fp32", [16, 32, 816])]
    assert [row["batch"] for row in result.rows] == [816]


def test_a_largest_minibatch_that_does_not_fit_or_needs_a_retry_is_made_smaller() -> None:
    def answer(config: Config, batch: int) -> Mapping[str, Any]:
        if batch > 800:
            return NO_MEMORY
        return {**fine(config, batch), "retries": int(batch > 700)}

    processes = Processes(answer)
    result = found(request("max", 32, 64), processes)
    assert [numbers for _, numbers in processes.asked] == [[32, 64, 816], [728, 648]]
    assert result.rows[-1]["batch"] == 648


def test_a_cpu_has_no_largest_minibatch() -> None:
    processes = Processes(lambda config, batch: {**fine(config, batch), "peak_bytes": None})
    result = found(request("max", 32), processes, {**MACHINE, "device": "cpu"})
    assert result.rows[-1]["why_not"] == "--batch-sizes max needs a GPU; give the sizes as numbers"


# --- interruption, files, pages --------------------------------------------------------------------------------------


def test_an_interruption_keeps_the_points_that_were_measured() -> None:
    kept: list[BenchResult] = []

    def answer(config: Config, batch: int) -> Mapping[str, Any]:
        if batch == 128:
            raise KeyboardInterrupt
        return fine(config, batch)

    result = found(request(32, 64, 128), Processes(answer), keep=kept.append)
    assert [len(one.rows) for one in kept] == [1, 2]
    assert [len(one.json["rows"]) for one in kept] == [1, 2]
    assert result.json["interrupted"] and len(result.rows) == 2
    assert result.json["notes"] == ["interrupted after 2 measurements"]
    assert isinstance(result.ended_by, KeyboardInterrupt)


def test_an_interruption_before_the_first_point_is_raised() -> None:
    def answer(config: Config, batch: int) -> Mapping[str, Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        found(request(32), Processes(answer))


def test_a_page_has_a_chart_for_each_recipe_and_all_rows_in_a_table(tmp_path: Path) -> None:
    processes = Processes(lambda config, batch: NO_MEMORY if batch > 64 else fine(config, batch))
    result = found(request(32, 64, 128, configs=(CNN, MLP), precisions=("fp32", "bf16")), processes)
    path = tmp_path / "device.json"
    path.write_text(json.dumps(result.json), encoding="utf-8")
    read = read_result(path)
    assert not read.problems and read.kind == "device"
    section = next(one for one in build([], [read]).sections if one.key == "device")
    charts: list[Any] = list(section.items[:-1])
    assert [chart.title for chart in charts] == [
        "Throughput: digits-cnn, NVIDIA H200",
        "Throughput: digits-mlp, NVIDIA H200",
    ]
    assert [(one.name, [x for x, _ in one.points]) for one in charts[0].series] == [
        ("fp32", [32, 64]),
        ("bf16", [32, 64]),
    ]
    table: Any = section.items[-1]
    assert len(table.rows) == 12
    assert table.rows[2][-1] == "out of memory"
    assert any("in the benchmark of one device" in line.lower() for line in build([], [read]).summary)


def test_the_picture_has_a_line_for_each_recipe_and_precision() -> None:
    chart = found(request(32, 64, precisions=("fp32", "bf16")), Processes()).chart
    assert "digits-cnn fp32" in chart and "digits-cnn bf16" in chart and "NVIDIA H200" in chart


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (lambda: request(32, 32), "--batch-sizes names a size twice"),
        (lambda: request(32, precisions=("bf16", "bf16")), "--precision names a precision twice"),
        (lambda: request(32, configs=(CNN, CNN)), "names a recipe twice"),
        (lambda: request(32, precisions=("fp8",)), "train.precision"),
    ],
)
def test_wrong_requests_are_refused_in_one_line(asked: Callable[[], DeviceRequest], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        asked()


def test_tf32_is_refused_where_there_is_no_gpu() -> None:
    with pytest.raises(RequestError, match="tf32 needs a GPU"):
        found(request(32, precisions=("tf32",)), Processes(), {**MACHINE, "device": "cpu"})


# --- for real, on this CPU -------------------------------------------------------------------------------------------


def test_a_learner_measures_steps_that_leave_the_weights_as_they_were() -> None:
    learner = DeviceLearner(changed(MLP, {"learners": 1, "device": "cpu"}))
    before = [one.detach().clone() for one in learner.model.parameters()]
    answer = learner.measure(8, 0.01)
    assert all(torch.equal(one, was) for one, was in zip(learner.model.parameters(), before, strict=True))
    assert all(seconds > 0 for seconds in answer["times_s"])
    assert answer["peak_bytes"] is None and answer["retries"] == 0
    flops = learner.flops_per_sample()
    assert flops is not None and flops > 2 * 2 * 64 * 64


def test_a_minibatch_that_fails_is_an_answer() -> None:
    learner = DeviceLearner(changed(MLP, {"learners": 1, "device": "cpu"}))
    answer = learner.answer({"batch": -1, "seconds": 0.01})
    assert "failed" in answer and answer["out_of_memory"] is False


def test_memory_errors_are_known_by_type_and_by_words() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 1 byte"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_steps_are_computed_in_a_graph_on_a_gpu_and_as_asked_elsewhere() -> None:
    assert rung_here("auto", torch.device("cuda")) == "graph"
    assert rung_here("auto", torch.device("cpu")) == "eager"
    assert rung_here("graph+compile", torch.device("cuda")) == "graph+compile"


def test_one_command_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, svg = tmp_path / "device.json", tmp_path / "device.svg"
    words = "bench device digits-softmax --precision fp32 --batch-sizes 16 32 --seconds 20ms --device cpu"
    assert main([*words.split(), "--out", str(out), "--svg", str(svg)]) == 0
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [(row["batch"], row["throughput"] > 0, row["why_not"]) for row in rows] == [
        (16, True, None),
        (32, True, None),
    ]
    assert svg.read_text(encoding="utf-8").startswith("<svg")
    printed = capsys.readouterr().out
    assert "samples/s" in printed and "of peak" not in printed and "memory GB" not in printed


def test_several_precisions_are_for_one_device_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scaling", "digits-mlp", "--precision", "fp32", "bf16"]) == 2
    assert "--precision takes only one value with bench scaling; got fp32 bf16" in capsys.readouterr().err
