"""Tensors on GPUs. With one GPU: several ranks that share it, and NCCL with one rank."""

from __future__ import annotations

import pytest

from collectives.nursery import Nursery


@pytest.fixture
def gpu(nursery: Nursery) -> Nursery:
    if nursery.values("gpus", ranks=1) == [0]:
        pytest.skip("no GPU here")
    return nursery


@pytest.mark.parametrize("arena_bytes", [64 * 1024, 8 * 1024 * 1024])
def test_ranks_that_share_a_gpu_go_through_pinned_shared_memory(gpu: Nursery, arena_bytes: int) -> None:
    for value in gpu.values("on_one_gpu", ranks=2, arena_bytes=arena_bytes, within_s=120):
        assert not value["nccl"]
        assert value["pinned"] == 2
        print(f"arena {arena_bytes}: all-reduce of 100 MB on a shared GPU {value['ms']:.1f} ms")


def test_ddp_trains_on_a_shared_gpu(gpu: Nursery) -> None:
    assert gpu.values("ddp_on_a_gpu", ranks=2, within_s=120) == [{"nccl": False}] * 2


def test_a_gpu_for_each_rank_is_nccls(gpu: Nursery) -> None:
    assert gpu.values("ddp_on_a_gpu", ranks=1, within_s=120) == [{"nccl": True}]
