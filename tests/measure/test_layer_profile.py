"""Profiles on this CPU, and of devices that are not here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from msgspec import structs

from offbeat.cli import main
from offbeat.errors import RequestError
from offbeat.measure import layer_profile
from offbeat.measure.compute_learner import ComputeLearner, layers_of
from offbeat.measure.device_learner import DeviceLearner
from offbeat.measure.layer_profile import MeasuredStep, ModelledStep, Profile, ProfileRequest
from offbeat.measure.operation_counts import LayerCounts, StepCounts
from offbeat.predict.roofline import GPUS, LayerTime
from offbeat.train.compute_ladder import LADDER
from offbeat.train.config import Config
from offbeat.train.config_files import changed
from offbeat.train.recipes import RECIPES

CNN = changed(RECIPES["digits-cnn"].config, {"learners": 1, "device": "cpu"})


def told(capsys: pytest.CaptureFixture[str], words: str) -> Mapping[str, Any]:
    assert main(["profile", *words.split(), "--json"]) == 0
    found: Mapping[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_cpu_is_measured_and_the_error_of_the_model_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "digits-cnn --device cpu --seconds 10ms --learners 2 4 --link 8Gbit/s")
    assert found["measured"]["device"] == "cpu" and found["measured"]["compute"] == "eager"
    assert found["modelled"] is None and found["model_error"] is None
    assert [layer["name"] for layer in found["layers"]] == ["0", "3", "7"]
    assert all(layer["forward_s"] > 0 and layer["backward_s"] > 0 for layer in found["layers"])
    assert found["parameters"] == sum(layer["parameters"] for layer in found["layers"]) == 6090
    assert [link["sent_bytes"] for link in found["links"]] == [4 * 6090, 1.5 * 4 * 6090]
    assert [link["communication_s"] for link in found["links"]] == pytest.approx([4 * 6.09e-6, 1.5 * 4 * 6.09e-6])
    assert found["links"][0]["link_needed_bytes_per_s"] > 0


def test_a_device_that_is_not_here_is_modelled_and_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "digits-cnn --device a100 --precision bf16 --batch-size 512")
    assert found["measured"] is None and found["layers"][0]["forward_s"] is None
    assert found["modelled"]["device"] == "a100" and found["modelled"]["step_s"] > found["modelled"]["update_s"] > 0
    assert found["layers"][0]["modelled_backward_s"] > 0
    assert found["model_error"] is None and found["model_error_on"] is None


def test_newer_devices_are_modelled_to_be_faster(capsys: pytest.CaptureFixture[str]) -> None:
    words = "synthetic-alexnet --set data.options.size=64 --batch-size 256"
    times = [told(capsys, f"{words} --device {name}")["modelled"]["step_s"] for name in GPUS]
    assert times == sorted(times, reverse=True) and times[0] > 5 * times[-1]


def test_a_model_says_that_it_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "digits-mlp", "--device", "h100", "--layers", "1"]) == 0
    printed = capsys.readouterr().out
    assert "on h100 (modelled, not measured)" in printed
    assert "(1 other layer)" in printed
    assert "unknown, because this machine's device is not one of k40, p100" in printed
    assert "compute : communication" in printed


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("digits-mlp --device v100 --precision bf16", "a v100 does not support bf16; it supports fp32, fp16"),
        ("digits-mlp --device h300", "h300"),
        ("digits-mlp --link fast", "bandwidth"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_line(
    words: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *words.split()]) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1


def test_a_step_that_cannot_be_captured_is_measured_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Learner(DeviceLearner):
        def __init__(self, config: Config) -> None:
            super().__init__(config)
            if config.train.compute == "auto":
                self.rung = next(rung for rung in LADDER if rung.name == "graph")

        def measure(self, batch: int, seconds: float) -> dict[str, Any]:
            asked.append(self.rung.name)
            if self.rung.captured:
                raise RuntimeError("operation not permitted when stream is capturing")
            return {"times_s": [2.0]}

    monkeypatch.setattr(layer_profile, "DeviceLearner", Learner)
    found = layer_profile.profile(ProfileRequest(config=CNN, seconds=0.01)).measured
    assert asked == ["graph", "eager"]
    assert found is not None and (found.compute, found.step_s) == ("eager", 2.0)


def test_out_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(layer_profile, "ComputeLearner", fails)
    with pytest.raises(
        RequestError, match="out of memory on cpu with a minibatch size of 32; use a smaller --batch-size"
    ):
        layer_profile.profile(ProfileRequest(config=CNN))


def test_a_step_that_keeps_gigabytes_is_to_be_confirmed_and_one_that_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer_profile, "available_bytes", lambda: 8_000_000_000)

    def asked(batch: int, *, large: bool) -> ProfileRequest:
        config = RECIPES["digits-mlp"].config
        train = structs.replace(config.train, batch_size=batch)
        return ProfileRequest(config=structs.replace(config, learners=1, device="cpu", train=train), large=large)

    with pytest.raises(RequestError, match=r"keep 5.6 GB of activations; .* or confirm it with --yes-large"):
        layer_profile.profile(asked(9_999_999, large=False))
    with pytest.raises(RequestError, match=r"keep 560 GB of activations, but only .* are free; choose a smaller"):
        layer_profile.profile(asked(999_999_999, large=True))


# --- what follows from times -----------------------------------------------------------------------------------------


def made_up(*, asked: bool) -> Profile:
    """Two layers, 1 s forward and 3 s backward in all of an eager step; a step in a graph takes half of that."""
    first = LayerCounts(name="a", parameters=10, forward_flops=1, backward_flops=2, kept_bytes=8)
    last = LayerCounts(name="b", parameters=100, forward_flops=1, backward_flops=2, kept_bytes=8)
    eager = {"a": LayerTime(0.5, 2.0), "b": LayerTime(0.5, 1.0)}
    model = {"a": LayerTime(1.0, 1.0), "b": LayerTime(1.0, 4.0)}
    return Profile(
        config=CNN,
        counts=StepCounts(samples=4, layers=(first, last), operations=()),
        measured=MeasuredStep(device="NVIDIA H200", compute="graph", layers=eager, step_s=2.0),
        model=ModelledStep(gpu=GPUS["h200"], layers=model, update_s=0.5),
        error=None,
        error_on="",
        asked=asked,
    )


def test_communication_is_compared_with_the_step_that_trains_and_not_with_an_eager_one() -> None:
    """b's gradient of 400 bytes is there after 0.5 s; a's backward hides it in 1 s."""
    (link,) = made_up(asked=False).links([2], 100.0)
    assert link["communication_s"] == 4.4 and link["ratio"] == pytest.approx(2.0 / 4.4)
    assert link["link_needed_bytes_per_s"] == pytest.approx(400 / 1.0)


def test_a_device_that_was_asked_for_answers_with_the_times_of_the_model() -> None:
    (link,) = made_up(asked=True).links([2], 100.0)
    assert link["ratio"] == pytest.approx(7.0 / 4.4)
    assert link["link_needed_bytes_per_s"] == pytest.approx(400 / 1.0)
    assert made_up(asked=True).step_s == 7.5


def test_layers_are_timed_in_the_order_of_forward_and_no_more_often_than_the_time_allows() -> None:
    learner = ComputeLearner(CNN)
    calls = []
    learner.model.register_forward_hook(lambda *_: calls.append(1))
    found = layers_of(learner, 8, repeats=50, most_s=0.0)
    assert [layer["name"] for layer in found] == ["0", "3", "7"]
    assert [layer["size_bytes"] for layer in found] == [4 * 160, 4 * 4640, 4 * 1290]
    assert all(layer["forward_s"] > 0 and layer["backward_s"] > 0 for layer in found)
    assert len(calls) == 3  # two to warm up, and one
