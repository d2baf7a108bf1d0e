"""`--batch-size auto`: the search with a made-up memory, and the whole of it on a CPU."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from offbeat.errors import RequestError
from offbeat.runs.run_folder import RunDir
from offbeat.train import batch_probe, launch, reduced_trainer
from offbeat.train.batch_probe import pass_sizes, settle_batch
from offbeat.train.batch_search import FINE, Found, fastest, find_batch, sizes_for, sizes_of_global
from offbeat.train.compute_ladder import EAGER
from offbeat.train.config import Config, TrainConfig, check_batch_given
from offbeat.train.config_files import as_json, as_toml, from_json, override, read_config, read_recipe
from offbeat.train.out_of_memory import is_out_of_memory, naming_memory, told_of_batch
from offbeat.train.precision import Precision
from offbeat.train.reduced_trainer import ReducedTrainer
from offbeat.train.trainer import evaluate
from train.runs import FEATURES, config_of, small_task, trained


class FakeDevice:
    """A step keeps `sample` units of memory for each sample beside `model`; its time has a fixed part."""

    def __init__(self, memory: int, *, model: int = 0, sample: int = 1, fixed_s: float = 0.01) -> None:
        self.memory, self.model, self.sample, self.fixed_s = memory, model, sample, fixed_s
        self.asked: list[int] = []

    def fits(self, batch: int) -> float | None:
        assert batch not in self.asked, "each size is tried once"
        self.asked.append(batch)
        if self.model + batch * self.sample > self.memory:
            return None
        return self.fixed_s + batch * 1e-4


# --- the search -------------------------------------------------------------------------------------------------------


@given(memory=st.integers(1, 100_000), most=st.integers(1, 200_000))
def test_the_largest_that_fits_is_found_to_an_eighth_and_never_exceeded(memory: int, most: int) -> None:
    device = FakeDevice(memory)
    found = find_batch(device.fits, range(1, most + 1))
    assert found is not None
    largest = min(memory, most)
    assert found.largest <= largest
    assert largest - found.largest <= max(1, found.largest // FINE)
    assert found.is_bounded == (any(size > memory for size in device.asked))
    assert len(device.asked) <= 2 * math.log2(most + 2) + 5


def test_a_step_with_a_fixed_cost_is_fastest_with_the_largest_batch() -> None:
    found = find_batch(FakeDevice(1000, fixed_s=1.0).fits, range(1, 10_000))
    assert found is not None
    assert found.batch == found.largest


def test_of_batches_nearly_as_fast_the_smallest_is_taken() -> None:
    assert fastest({32: 0.032, 64: 0.0635, 128: 0.127}) == 32
    assert fastest({32: 0.040, 64: 0.064, 128: 0.1275}) == 64
    assert fastest({32: 0.040, 64: 0.066, 128: 0.128}) == 128


def test_a_batch_that_is_slower_than_a_smaller_one_is_not_taken() -> None:
    seconds = {32: 0.5, 64: 0.6, 128: 2.0, 256: 5.0}
    found = find_batch(lambda batch: seconds.get(batch), range(1, 257))
    assert found is not None
    assert (found.batch, found.largest) == (64, 256)


def test_a_model_that_does_not_fit_with_one_sample_has_no_batch() -> None:
    device = FakeDevice(100, model=100)
    assert find_batch(device.fits, range(1, 1000)) is None
    assert device.asked == [32, 16, 8, 4, 2, 1]


def test_the_sizes_that_are_tried_double_and_then_close_in() -> None:
    device = FakeDevice(300)
    find_batch(device.fits, range(1, 100_000))
    assert device.asked == [32, 64, 128, 256, 512, 384, 320, 288]


def test_only_sizes_that_are_allowed_are_tried() -> None:
    device = FakeDevice(70)
    allowed = sizes_of_global(1200, learners=4)
    assert allowed == [1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 25, 30, 50, 60, 75, 100, 150, 300]
    found = find_batch(device.fits, allowed)
    assert found is not None
    assert set(device.asked) <= set(allowed)
    assert found.largest == 60


def test_a_global_batch_is_shared_evenly_or_refused() -> None:
    with pytest.raises(RequestError, match=r"65 samples cannot be shared evenly by 2 learners; use 64"):
        sizes_of_global(65, 2)
    assert list(sizes_for(100, learners=2, accumulate=5))[-1] == 10
    assert list(sizes_for(3, learners=4, accumulate=1)) == [1]


def test_what_was_found_is_told_in_one_line() -> None:
    found = Found(64, 192, {32: 0.004, 64: 0.0064, 192: 0.0192}, True)
    assert str(found) == "batch size 64: 10,000 samples/s (32: 8,000, 192: 10,000); at most about 192 fit"


# --- the sizes of an epoch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "learners", "train", "batch", "sizes"),
    [
        (96, 1, {}, 32, [32]),
        (100, 1, {}, 32, [32, 4]),
        (95, 2, {}, 16, [16, 15]),  # the last update is 16 and 15
        (65, 2, {}, 16, [16, 17]),  # what is left is too little for two: the last update is larger
        (96, 2, {"split": "3:1"}, 16, [24, 8]),
        (100, 1, {"global_batch": 64}, 32, [32, 18]),
    ],
)
def test_every_size_of_an_epoch_is_tried(
    samples: int, learners: int, train: dict[str, Any], batch: int, sizes: list[int]
) -> None:
    config = Config(learners=learners, train=TrainConfig(batch_size="auto", **train))  # type: ignore[arg-type] # as a file says it
    assert pass_sizes(config, samples, batch) == sizes


# --- the whole of it, on a CPU ----------------------------------------------------------------------------------------


def settled(tell: Callable[[str], None] = lambda line: None, **changes: Any) -> TrainConfig:
    return settle_batch(config_of(**changes), small_task(), tell).train


def test_auto_is_a_number_before_anything_else_sees_it(tmp_path: Path) -> None:
    outcome = trained(tmp_path, train={"batch_size": "auto", "epochs": 1})
    kept = read_config(outcome.run).train
    assert 1 <= kept.batch_size <= 48  # 96 samples, 2 learners
    assert outcome.end["samples_per_s"] > 0
    again = launch.prepare(
        config_of(train={"batch_size": "auto", "epochs": 2}), resume=outcome.run.path, task=small_task()
    )
    assert again.config.train.batch_size == kept.batch_size, "a resumed run keeps it"


def test_accumulate_keeps_the_global_batch_that_was_asked_for() -> None:
    told: list[str] = []
    train = settled(told.append, train={"batch_size": "auto", "global_batch": 48})
    assert train.batch_size * train.accumulate * 2 == 48
    assert train.global_batch == 0
    assert [line.split(":")[0] for line in told] == ["finding the batch size", f"batch size {train.batch_size}"]
    train = settled(train={"batch_size": 4, "global_batch": 48})
    assert (train.batch_size, train.accumulate) == (4, 6)
    with pytest.raises(RequestError, match="not a whole number of minibatches of 5; use --batch-size 4"):
        settled(train={"batch_size": 5, "global_batch": 48})


def large_for(samples: int) -> Callable[[], nn.Module]:
    """Fails as a device does, for more than so many samples at a time."""

    class Large(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            if len(inputs) > samples:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")
            return super().forward(inputs)

    return lambda: Large(FEATURES, 4)


def test_a_batch_that_runs_out_of_memory_does_not_fit() -> None:
    told: list[str] = []
    config = config_of(learners=1, train={"batch_size": "auto"})
    found = settle_batch(config, small_task(build=large_for(40)), told.append).train.batch_size
    assert found <= 40
    assert "at most about" in told[-1]


def test_a_model_too_large_for_the_device_is_one_line() -> None:
    config = config_of(learners=1, train={"batch_size": "auto"})
    with pytest.raises(RequestError) as error:
        settle_batch(config, small_task(build=large_for(0)), lambda line: None)
    assert str(error.value) == (
        "the model is too large for this machine: not even one sample fit; "
        "--train.recompute true keeps fewer activations"
    )


def test_a_try_that_is_killed_does_not_fit_and_one_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> float:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0.0

    config = config_of(learners=1, train={"batch_size": "auto"})
    monkeypatch.setattr(batch_probe, "_try", killed)
    with pytest.raises(RequestError, match="the model is too large for this machine"):
        settle_batch(config, small_task(), lambda line: None)

    def broken(*_: Any) -> float:
        raise TypeError("no such thing")

    monkeypatch.setattr(batch_probe, "_try", broken)
    with pytest.raises(RequestError, match="no size can be found: this machine: TypeError: no such thing"):
        settle_batch(config, small_task(), lambda line: None)


def test_a_batch_fits_if_it_fits_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = FakeDevice(40), FakeDevice(1000, fixed_s=1.0)

    def answers(batch: int) -> list[batch_probe._Answer]:
        return [batch_probe._Answer(device.fits(batch), "cuda:1: out of memory") for device in (large, small)]

    monkeypatch.setattr(batch_probe, "_start_all", lambda config, task, batch, folder: batch)
    monkeypatch.setattr(batch_probe, "_answers", answers)
    told: list[str] = []
    assert 32 <= settled(told.append, train={"batch_size": "auto"}).batch_size <= 40
    assert "32: 32 samples/s" in told[-1] or "(32: 32" in told[-1], "the slowest device decides how long a step takes"


def test_a_retry_of_the_allocator_counts_as_not_fitting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    retries = iter(range(10))
    monkeypatch.setattr(reduced_trainer, "_allocator_retries", lambda device: next(retries))
    trainer = ReducedTrainer(
        config_of(learners=1), small_task(), RunDir(tmp_path), number=0, learners=1, report=lambda record: None
    )
    with pytest.raises(torch.OutOfMemoryError):
        trainer.time_update([8], EAGER)


def test_a_step_on_a_cpu_may_take_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_probe, "STEP_S", 0.0)
    with pytest.raises(RequestError, match="a step takes more than 0 s"):
        settled(train={"batch_size": "auto"})


@pytest.mark.parametrize("compute", ["eager", "compile"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_an_update_that_is_timed_has_passes_of_all_sizes(tmp_path: Path, compute: str, accumulate: int) -> None:
    """`compile`: by a step that is decided on the device, as on a GPU; here it computes eagerly."""
    seen: list[int] = []

    class Counted(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            seen.append(len(inputs))
            return super().forward(inputs)

    config = config_of(learners=1, train={"compute": compute, "accumulate": accumulate})
    task = small_task(build=lambda: Counted(FEATURES, 4))
    trainer = ReducedTrainer(config, task, RunDir(tmp_path), number=0, learners=1, report=lambda record: None)
    assert 0 < trainer.time_update([80, 24], EAGER) < 60
    assert seen[: 2 * min(2, accumulate)] == [80] * min(2, accumulate) + [24] * min(2, accumulate)
    assert set(seen) == {80, 24}


# --- out of memory in a training --------------------------------------------------------------------------------------


def test_out_of_memory_in_training_names_both_remedies_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as error:
        trained(tmp_path, small_task(build=large_for(2)), learners=1)
    assert str(error.value) == (
        "learner 0: out of memory on this machine with minibatches of 4 samples: --batch-size auto finds what fits; "
        "--train.recompute true keeps fewer activations"
    )
    assert error.value.exit_code == 2


def test_a_model_too_large_to_begin_with_is_named_as_such(tmp_path: Path) -> None:
    class Huge(nn.Linear):
        def to(self, *given: Any, **named: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    told = "the model is too large for this machine: out of memory before the first minibatch"
    for batch, expected in ((4, f"learner 0: {told}"), ("auto", told)):
        with pytest.raises(RequestError) as error:
            trained(tmp_path, small_task(build=lambda: Huge(FEATURES, 4)), learners=1, train={"batch_size": batch})
        assert str(error.value) == expected


def test_an_evaluation_takes_fewer_samples_at_a_time_where_memory_is_short() -> None:
    model, task, here = large_for(5)(), small_task(), torch.device("cpu")
    few = evaluate(model, task, Precision("fp32", here), lambda batch: batch)
    many = evaluate(nn.Linear(FEATURES, 4), task, Precision("fp32", here), lambda batch: batch)
    assert few.samples == many.samples == 16
    with pytest.raises(torch.OutOfMemoryError):
        evaluate(large_for(0)(), task, Precision("fp32", here), lambda batch: batch)


def test_what_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 55)
    assert is_out_of_memory(error.value)
    assert is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    without_nvml = (
        'NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp"'
    )
    assert is_out_of_memory(RuntimeError(without_nvml))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    with pytest.raises(KeyError), naming_memory(lambda: "memory"):
        raise KeyError("something else")
    device = torch.device("cpu")
    assert told_of_batch(device, 1, recompute=True).endswith("with single samples: the model is too large for it")


# --- how it is said ---------------------------------------------------------------------------------------------------


def test_auto_can_be_said_wherever_a_config_is(tmp_path: Path) -> None:
    config = override(Config(), {"train.batch_size": "auto"})
    assert config.train.batch_size == 0
    assert 'batch_size = "auto"' in as_toml(config)
    (tmp_path / "whole.toml").write_text(as_toml(config), encoding="utf-8")
    assert read_recipe(str(tmp_path / "whole.toml")) == config == from_json(as_json(config), "here")
    with pytest.raises(RequestError, match="expected a whole number; got 'car'"):
        override(Config(), {"train.batch_size": "car"})
    with pytest.raises(RequestError, match=r"train\.batch_size: auto is for `offbeat train`"):
        check_batch_given(config.train)
    with pytest.raises(RequestError, match=r"train\.global_batch is for `offbeat train`"):
        check_batch_given(TrainConfig(global_batch=64))
