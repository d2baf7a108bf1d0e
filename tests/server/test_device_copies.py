"""Gradients of a GPU: copied beside backward, sent when they are there, and looked at on the GPU."""

from __future__ import annotations

import json

import pytest
import torch

from offbeat.measure.harness import environment, program, supervise
from offbeat.server.arena import stamp
from offbeat.server.device_copies import are_finite
from offbeat.server.parameter_layout import ParameterLayout
from offbeat.server.remote.frames import Header
from offbeat.server.remote.remote_arena import RemoteArena
from offbeat.server.run_setting import RunSetting
from offbeat.server.supervisor import ServerPlan

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SIDE = 512


def test_a_gradient_is_finite_if_its_squared_norm_is_in_the_type_that_travels() -> None:
    good, large = torch.full((100_000,), 300.0), torch.full((3,), 1e30)
    assert are_finite([], torch.float32) and are_finite([good, good], torch.float32)
    assert are_finite([good.half()], torch.float16)  # whose norm is not
    assert not are_finite([good, torch.tensor([1.0, float("nan")])], torch.float32)
    assert not are_finite([torch.tensor([float("-inf")]), good], torch.float32)
    assert not are_finite([large], torch.float32) and are_finite([large.double()], torch.float64)
    assert not are_finite([torch.full((3,), 1e5)], torch.float16)


class Sent:
    """An uplink that keeps copies of what is sent, as it is at that time."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int, bytes]] = []  # minibatch, offset, bytes

    def write(self, header: Header, data: memoryview) -> None:
        self.found.append((header.number, header.offset, bytes(data)))

    def read(self, number: int, reading: int) -> None:
        raise AssertionError


def arena_of(gradients: str = "float32") -> RemoteArena:
    table = ParameterLayout(
        sizes=(SIDE * SIDE, 2 * 3 * 4 * 5), groups=(0, 0), extra=0, dtype="float32", gradients=gradients, rule="sgd",
        states=(), clip_norm=0.0, in_place=False, digest="x",
    )  # fmt: skip
    return RemoteArena(table, RunSetting(line="async", learners=1), 0)


@needs_gpu
@pytest.mark.parametrize("pinned", [True, False])
def test_what_is_copied_is_what_the_kernels_before_it_made_and_it_is_sent_when_it_is_there(pinned: bool) -> None:
    arena, uplink = arena_of(), Sent()
    if pinned:
        arena.pin()
    arena.connected(uplink)
    arena.minibatch_begun(stamp(1, 5), 0)
    side = torch.randn(SIDE, SIDE, device="cuda")
    gradient = torch.eye(SIDE, device="cuda")
    for _ in range(50):  # still being computed when the copy begins
        gradient = torch.tanh(gradient @ side)
    assert arena.fill(0, 0, gradient, stays=True) is None
    layers = torch.arange(120.0, device="cuda").view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    arena.fill(0, 1, layers)
    gradient.mul_(2.0)  # as another backward would; it is filled again, and the last copy counts
    arena.fill(0, 0, gradient, stays=True)
    arena.filled()
    expected = torch.cat([gradient.cpu().view(-1), torch.arange(120.0)])
    assert torch.equal(arena.slots[0], expected)
    assert [(number, offset) for number, offset, _ in uplink.found] == [(stamp(1, 5), at) for at in (0, 4 * SIDE**2, 0)]
    assert uplink.found[-1][2] == expected[: SIDE * SIDE].numpy().tobytes()


@needs_gpu
def test_gradients_of_another_type_come_as_they_travel() -> None:
    arena = arena_of("bfloat16")
    arena.connected(Sent())
    gradient = torch.randn(SIDE * SIDE, device="cuda")
    arena.fill(0, 0, gradient)
    arena.filled()
    assert torch.equal(arena.slots[0][: SIDE * SIDE], gradient.bfloat16().cpu())


@needs_gpu
def test_a_copy_that_fails_to_be_sent_is_told_where_it_is_waited_for() -> None:
    class Broken(Sent):
        def write(self, header: Header, data: memoryview) -> None:
            raise OSError("gone")

    arena = arena_of()
    arena.connected(Broken())
    arena.fill(0, 0, torch.ones(SIDE * SIDE, device="cuda"))
    with pytest.raises(OSError, match="gone"):
        arena.filled()
    arena.filled()  # once


@needs_gpu
@pytest.mark.parametrize("line", ["async", "k-async:2"])
def test_learners_on_a_gpu_push_and_fetch_what_those_on_a_cpu_do(line: str) -> None:
    asked = {"do": "push", "sizes": [1000, 24, 100_000, 1], "seconds": 1.0, "warm_up": 2, "in_place": False}
    plan = ServerPlan(
        setting=RunSetting(line=line, learners=2, shards=2),
        command=program("bench_learner", json.dumps({**asked, "device": "cuda"})),
        environment=environment({"OFFBEAT_SYNC": line}),
        restarts=0,
    )
    for answer in supervise(plan, "pushes from a GPU", 120.0).values():  # each has checked its weights
        assert json.loads(answer)["cycles"] > 3
