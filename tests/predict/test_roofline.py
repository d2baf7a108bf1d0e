"""Seconds of operations on a device of round numbers, and the link at which communication hides."""

from __future__ import annotations

import math

import pytest

from offbeat.errors import RequestError
from offbeat.predict.roofline import (
    ARITHMETIC,
    BANDWIDTH,
    GPUS,
    KERNEL_S,
    Gpu,
    GradientReady,
    LayerTime,
    Operation,
    gpu_here,
    gpu_of,
    link_needed,
    modelled,
    operation_s,
    reduced_bytes,
)

ROUND = Gpu("round", 1e12, 0, 4e12, 4e12, 1e9, 1e9, "Round")


def test_an_operation_takes_as_long_as_the_slower_of_its_arithmetic_and_its_traffic() -> None:
    computes = Operation("a", False, 10**12, 8)
    moves = Operation("a", False, 8, 10**9)
    assert operation_s(computes, ROUND, "fp32") == pytest.approx(1 / ARITHMETIC["fp32"] + KERNEL_S)
    assert operation_s(computes, ROUND, "bf16") == pytest.approx(0.25 / ARITHMETIC["half"] + KERNEL_S)
    assert operation_s(moves, ROUND, "fp32") == pytest.approx(1 / BANDWIDTH + KERNEL_S)
    assert operation_s(moves._replace(kernels=3), ROUND, "fp32") == pytest.approx(1 / BANDWIDTH + 3 * KERNEL_S)


def test_layers_have_the_sum_of_their_operations_forward_and_backward_apart() -> None:
    one, two = Operation("a", False, 0, 0), Operation("a", True, 0, 0, 2)
    found = modelled([one, one, two, one._replace(layer="b")], ROUND, "fp32")
    assert found == {"a": LayerTime(2 * KERNEL_S, 2 * KERNEL_S), "b": LayerTime(KERNEL_S, 0.0)}


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("Tesla P100-SXM2-16GB", "p100"),
        ("Tesla K40m", "k40"),
        ("NVIDIA H100 PCIe", None),  # slower than the row
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_a_device_is_known_by_the_name_of_its_driver(driver: str, name: str | None) -> None:
    found = gpu_here(driver)
    assert (found.name if found else None) == name


def test_a_device_refuses_a_precision_that_it_does_not_have() -> None:
    with pytest.raises(RequestError, match="a v100 does not support bf16; it supports fp32, fp16"):
        gpu_of("v100").peak("bf16")
    with pytest.raises(RequestError, match="unknown device 'h300'"):
        gpu_of("h300")
    assert all(gpu.peak("fp32") > 0 for gpu in GPUS.values())


def test_a_ring_sends_twice_the_gradient_less_one_share() -> None:
    assert reduced_bytes(100, 2) == 100
    assert reduced_bytes(100, 4) == 150


def test_the_link_is_fast_enough_for_all_gradients_but_the_last_to_be_reduced_before_backward_ends() -> None:
    """After 1 s 100 bytes are there, after 2 s 300 more, after 4 s the last: 2 learners send what they have."""
    gradients = [GradientReady(1.0, 100), GradientReady(2.0, 300), GradientReady(4.0, 10_000)]
    assert link_needed(gradients, 4.0, 2) == max(400 / 3, 300 / 2)
    assert link_needed(gradients, 4.0, 4) == 1.5 * 150
    assert link_needed(gradients[:1], 1.0, 2) == 0.0


def test_at_the_link_that_is_needed_a_queue_of_gradients_ends_with_backward() -> None:
    """A dumb oracle: gradients sent one after the other."""
    gradients = [GradientReady(0.1 * at, size) for at, size in enumerate((70, 10, 900, 30, 500, 5), start=1)]
    speed = link_needed(gradients, 0.6, 8)

    def end_s(bytes_per_s: float) -> float:
        now_s = 0.0
        for one in gradients[:-1]:
            now_s = max(now_s, one.after_s) + reduced_bytes(one.size_bytes, 8) / bytes_per_s
        return now_s

    assert math.isclose(end_s(speed), 0.6)
    assert end_s(0.99 * speed) > 0.6
