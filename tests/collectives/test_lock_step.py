"""Coded all-reduces of all ranks in one process: the bits of a running group."""

from __future__ import annotations

import pytest
import torch

from collectives.coded_programs import ITEMS, bits, gradient
from collectives.nursery import Nursery
from offbeat.collectives.choice import Choice
from offbeat.collectives.lock_step import LockStep
from offbeat.collectives.momentum import momentum_of
from offbeat.collectives.residuals import Kept
from offbeat.errors import RequestError

CODECS = ("bf16", "fp16", "int8", "int4", "1-bit", "top-k:0.01", "random-k:0.01", "power-sgd:4")


def lock_step(line: str, ranks: int, steps: int, *, alike: bool = False) -> list[str]:
    """The bits of so many sums, the same on all ranks; `alike`: of the same gradients each time."""
    group, kept, found = LockStep(Choice(line, ranks), ranks), [Kept(ITEMS) for _ in range(ranks)], []
    for step in range(steps):
        tensors = [gradient(rank, 0 if alike else step) for rank in range(ranks)]
        group.sum(tensors, kept)
        assert len({bits(one) for one in tensors}) == 1
        found.append(bits(tensors[0]))
    return found


def test_sums_have_the_bits_of_a_running_group(nursery: Nursery) -> None:
    ranks = 3
    lines = [f"{name}:codec={codec}" for name in ("ring", "all-to-all") for codec in CODECS]
    lines += ["tree:codec=int8", "direct:codec=top-k:0.05"]
    found = nursery.values("coded_sums", ranks=ranks, lines=lines, steps=3, arena_bytes=2**23)
    for line in lines:
        assert lock_step(line, ranks, 3) == found[0][line], line


@pytest.mark.parametrize("codec", CODECS)
def test_without_feedback_nothing_is_carried_to_the_next_sum(codec: str) -> None:
    line = f"ring:codec={codec}"
    if codec not in ("random-k:0.01", "power-sgd:4"):  # the places, and the start, differ from call to call
        assert len(set(lock_step(f"{line},feedback=off", 2, 3, alike=True))) == 1
    assert len(set(lock_step(line, 2, 3, alike=True))) == 3
    assert lock_step(f"{line},feedback=off", 2, 2)[1] != lock_step(line, 2, 2)[1]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("ring:codec=int8:stochastic,feedback=off", "int8:stochastic has no error feedback"),
        ("ring:feedback=off", "feedback=off needs a codec"),
        ("ring:codec=int8,feedback=no", "feedback"),
    ],
)
def test_feedback_is_refused_where_it_means_nothing(line: str, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        Choice(line, 2)


def test_an_error_of_one_rank_ends_the_sum_for_all() -> None:
    group, kept = LockStep(Choice("ring:codec=top-k:0.1", 2), 2), [Kept(ITEMS), Kept(ITEMS)]
    kept[1].residual = torch.zeros(ITEMS, dtype=torch.int64)
    with pytest.raises(RuntimeError):
        group.sum([gradient(0, 0), gradient(1, 0)], kept)
    kept[1].residual = None
    group.sum([gradient(0, 0), gradient(1, 0)], kept)


# --- momentum before the codec ----------------------------------------------------------------------------------------


def stepped(line: str, momentum: float, steps: int, ranks: int = 3) -> tuple[torch.Tensor, list[Kept], torch.Tensor]:
    """The weights of SGD with momentum after so many sums, what ranks keep, and its velocity."""
    group = LockStep(Choice(line, ranks), ranks)
    kept = [Kept(ITEMS, momentum=momentum) for _ in range(ranks)]
    weights = torch.nn.Parameter(torch.zeros(ITEMS))
    optimizer = torch.optim.SGD([weights], lr=1.0, momentum=0.9)
    for step in range(steps):
        tensors = [gradient(rank, step) for rank in range(ranks)]
        group.sum(tensors, kept)
        assert len({bits(one) for one in tensors}) == 1
        weights.grad = tensors[0].clone()
        optimizer.step()
    return weights.detach(), kept, optimizer.state[weights]["momentum_buffer"]


@pytest.mark.parametrize("codec", ["1-bit", "top-k:0.05", "random-k:0.1"])
def test_the_optimizers_velocity_is_the_sum_of_what_was_sent(codec: str) -> None:
    _, kept, velocity = stepped(f"ring:codec={codec}", 0.9, 20)
    assert kept[0].sent is not None
    assert float((velocity - kept[0].sent).abs().max()) < 1e-4


def test_what_was_sent_and_what_is_left_are_all_velocities() -> None:
    """Without masking, which 1-bit does not need: the steps made and the residuals are the steps of plain SGD."""
    coded, kept, _ = stepped("ring:codec=1-bit", 0.9, 20)
    plain, _, _ = stepped("ring", 0.0, 20)
    left = torch.stack([one.values() for one in kept]).sum(0)
    assert float((coded - left - plain).abs().max()) < 1e-2
    assert float((coded - plain).abs().max()) > 1


@pytest.mark.parametrize("codec", ["top-k:0.05", "random-k:0.05"])
def test_a_number_that_was_sent_whole_begins_a_new_velocity(codec: str) -> None:
    _, kept, _ = stepped(f"ring:codec={codec}", 0.9, 3)
    for one in kept:
        assert one.velocity is not None
        sent = one.values() == 0
        assert int(sent.sum()) >= 0.05 * ITEMS and not one.velocity[sent].any()
        assert one.velocity[~sent].all()


def test_other_codecs_and_optimizers_are_given_gradients() -> None:
    _, kept, _ = stepped("ring:codec=int8", 0.9, 2)
    assert all(one.velocity is None and one.sent is None for one in kept)
    weights = [torch.nn.Parameter(torch.zeros(3))]
    assert momentum_of(torch.optim.SGD(weights, lr=1.0, momentum=0.9)) == 0.9
    assert momentum_of(torch.optim.SGD(weights, lr=1.0, momentum=0.9, nesterov=True)) == 0.0
    assert momentum_of(torch.optim.AdamW(weights)) == 0.0
    assert momentum_of(torch.optim.SGD(weights, lr=1.0, momentum=0.9), clips=True) == 0.0


@pytest.mark.parametrize("codec", ["1-bit", "top-k:0.05"])
def test_a_nan_does_not_stay_in_velocities(codec: str) -> None:
    group, kept = LockStep(Choice(f"ring:codec={codec}", 2), 2), [Kept(ITEMS, momentum=0.9) for _ in range(2)]
    for step in range(3):
        tensors = [gradient(rank, step) for rank in range(2)]
        if step == 1:
            tensors[1][777] = torch.nan
        group.sum(tensors, kept)
        assert bool(tensors[0].isfinite().all()) == (step != 1)


def test_of_random_k_a_nan_whose_place_is_not_drawn_stays_nowhere() -> None:
    group, kept = LockStep(Choice("ring:codec=random-k:0.05", 2), 2), [Kept(ITEMS, momentum=0.9) for _ in range(2)]
    tensors = [gradient(rank, 0) for rank in range(2)]
    group.sum(tensors, kept)
    drawn = tensors[0].nonzero().ravel().tolist()
    assert 0 < len(drawn) < ITEMS
    for place in range(777, 787):
        tensors = [gradient(rank, 1) for rank in range(2)]
        tensors[1][place] = torch.nan
        group.sum(tensors, kept)
        for one in kept:
            assert one.velocity is not None
            assert bool(one.velocity.isfinite().all()) and bool(one.values().isfinite().all())
