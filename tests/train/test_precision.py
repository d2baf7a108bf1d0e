"""What is computed in which precision, and the scaling of the loss, step by step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offbeat.errors import RequestError
from offbeat.train.precision import NAMES, Precision, Scaler

CPU = torch.device("cpu")
GPU = torch.device("cuda")  # no GPU is touched: flags are torch's, with or without one
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def flags() -> list[str]:
    places = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)  # type: ignore[attr-defined] # torch's stubs lack it
    return [place.fp32_precision for place in places]


@pytest.mark.parametrize("name", TYPES)
def test_products_are_in_the_precision_and_gradients_in_float32(name: str) -> None:
    precision = Precision(name, CPU)
    weights = torch.ones(2, 2, requires_grad=True)
    for _ in range(2):  # a context serves once; the precision always
        with precision.computing():
            made = torch.ones(2, 2) @ weights
        assert made.dtype == TYPES[name]
    with precision.differentiating():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        made.float().sum().backward()  # type: ignore[no-untyped-call] # torch's own
    assert weights.grad is not None and weights.grad.dtype == torch.float32
    assert (precision.scaler is not None) == (name == "fp16")


@pytest.mark.parametrize(("name", "word"), [("fp32", "ieee"), ("tf32", "tf32")])
def test_a_gpu_multiplies_as_the_precision_says_and_as_before_afterwards(name: str, word: str) -> None:
    before = flags()
    precision = Precision(name, GPU)
    with precision.computing():
        assert flags() == [word] * 3
    assert flags() == before
    with pytest.raises(KeyError), precision.differentiating():
        assert flags() == [word] * 3
        raise KeyError
    assert flags() == before


def test_half_precisions_and_a_cpu_leave_the_flags_alone() -> None:
    before = flags()
    with Precision("bf16", GPU).differentiating(), Precision("fp32", CPU).computing():
        assert flags() == before


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(RequestError, match="the device is cpu; use fp32 or bf16"):
        Precision("tf32", CPU)
    with pytest.raises(RequestError, match="did you mean 'fp16'"):
        Precision("float16", CPU)
    assert NAMES == ("fp32", "tf32", "bf16", "fp16")


def test_gradients_are_divided_in_place_by_what_the_loss_was_multiplied_by() -> None:
    scaler, weights = Scaler(), torch.tensor([3.0, 4.0], requires_grad=True)
    (weights.square().sum() * scaler.scale).backward()  # type: ignore[no-untyped-call] # torch's own
    assert weights.grad is not None
    kept = weights.grad
    assert kept.tolist() == [6.0 * 2**16, 8.0 * 2**16]
    assert scaler.unscale([kept]) is True
    assert kept.tolist() == [6.0, 8.0]
    assert scaler.unscale([]) is True


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(bad: float) -> None:
    for place in range(3):
        gradients = [torch.ones(2), torch.ones(3, 3), torch.ones(1)]
        gradients[place].view(-1)[-1] = bad
        assert Scaler().unscale(gradients) is False


def test_learners_decide_alike_as_the_infinity_of_one_is_in_the_mean_of_all() -> None:
    mine, yours = torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("inf")])

    def averaged() -> Tensor:  # what an all-reduce leaves on each of the two
        return (mine + yours) / 2

    scalers = Scaler(), Scaler()
    decisions = [scaler.unscale([averaged()]) for scaler in scalers]
    assert decisions == [False, False]
    for scaler, finite in zip(scalers, decisions, strict=True):
        scaler.update(finite)
    assert [scaler.scale for scaler in scalers] == [2.0**15] * 2


def test_the_scale_halves_at_once_and_doubles_after_two_thousand_good_updates_in_a_row() -> None:
    scaler = Scaler()
    for _ in range(1999):
        scaler.update(True)
    assert scaler.scale == 2**16
    scaler.update(False)
    assert scaler.scale == 2**15
    for _ in range(1999):
        scaler.update(True)
    assert scaler.scale == 2**15
    scaler.update(True)
    assert scaler.scale == 2**16
    for _ in range(1999):
        scaler.update(True)
    assert scaler.scale == 2**16


def test_the_scale_is_never_below_one_nor_beyond_float32() -> None:
    scaler = Scaler()
    for _ in range(40):
        scaler.update(False)
    assert scaler.scale == 1.0
    scaler.load({"scale": 2.0**127, "good": 1999})
    scaler.update(True)
    assert torch.isfinite(torch.tensor(1.0) * scaler.scale)


def test_a_scaler_goes_on_from_its_saved_state() -> None:
    one, other = Scaler(), Scaler()
    for finite in (False, True, True):
        one.update(finite)
    assert one.state() == {"scale": 2.0**15, "good": 2}
    other.load(one.state())
    for _ in range(1998):
        other.update(True)
    assert other.scale == 2.0**16
    for wrong in ({"scale": 4.0}, {"scale": 0.5, "good": 0}, {"scale": float("nan"), "good": 0}):
        with pytest.raises(RequestError, match="scale"):
            other.load(wrong)
    assert other.scale == 2.0**16
