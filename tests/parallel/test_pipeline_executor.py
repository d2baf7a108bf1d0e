"""A pipeline on tensors equals one process that runs the same microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from offbeat.errors import RequestError, ScheduleError
from offbeat.parallel.stage_model import StagedModel
from offbeat.pipelines import build, prove
from parallel.cases import CASES, MICROBATCHES, Case, case_of, whole_backward

WITHIN = ((torch.float32, 1e-5), (torch.float64, 1e-12))
LINES = ("gpipe", "1f1b", "interleaved-1f1b:2", "zb-h1", "zb-v", "dualpipe-v")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Operations are tiny: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def staged(case: Case, line: str, stages: int) -> StagedModel:
    schedule = build(line, stages=stages, microbatches=MICROBATCHES)
    return StagedModel(case.pieces, schedule, loss=case.loss, weight_of=case.weight_of)


def check_equal(found: Sequence[dict[str, Tensor]], whole: Sequence[nn.Module], within: float) -> None:
    wanted = [{name: one.grad for name, one in piece.named_parameters()} for piece in whole]
    largest = max(float(grad.abs().max()) for piece in wanted for grad in piece.values() if grad is not None)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.keys() == {name for name, grad in theirs.items() if grad is not None}
        for name, grad in ours.items():
            other = theirs[name]
            assert other is not None
            assert float((grad - other).abs().max()) <= within * largest


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)


@cache  # each oracle is computed once, for all schedules
def one_process(name: str, dtype: torch.dtype) -> tuple[float, nn.ModuleList]:
    """The loss of one minibatch, and the model with its gradients."""
    case = case_of(name, dtype)
    return float(whole_backward(case, case.pieces)), nn.ModuleList(case.pieces)


@cache
def one_process_trained(name: str, dtype: torch.dtype) -> tuple[list[float], nn.ModuleList]:
    """The norms of the gradients of 20 updates, and the model after them."""
    case = case_of(name, dtype)
    whole, norms = nn.ModuleList(case.pieces), []
    optimizer = sgd(list(whole.parameters()))
    rate = halving(optimizer)
    for update in range(20):
        whole.zero_grad()
        whole_backward(case, list(whole), update)
        norms.append(float(torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.05)))
        optimizer.step()
        rate.step()
    return norms, whole


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process(name: str, line: str, stages: int) -> None:
    for dtype, within in WITHIN:
        case = case_of(name, dtype)
        model = staged(case, line, stages)
        loss = model.backward(case.inputs, case.targets)
        wanted, whole = one_process(name, dtype)
        assert float(loss) == pytest.approx(wanted, rel=1e-5)
        check_equal(model.gradients(), list(whole), within)
        for ours, theirs in zip(model.state(), whole, strict=True):  # batch norm's statistics
            for key, value in theirs.state_dict().items():
                assert torch.allclose(ours[key].double(), value.double(), rtol=1e-6)
        assert model.peaks == prove(model.schedule).peak_activations


@pytest.mark.parametrize(("dtype", "within"), WITHIN)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("name", CASES)
def test_twenty_updates_with_clipping_momentum_and_a_schedule_are_the_same(
    name: str, line: str, dtype: torch.dtype, within: float
) -> None:
    case = case_of(name, dtype)
    model = staged(case, line, 3)
    optimizers = model.optimizers(sgd)
    rates = [halving(one) for one in optimizers]
    norms, whole = one_process_trained(name, dtype)
    for norm in norms:
        model.zero_grad()
        model.backward(case.inputs, case.targets)
        assert float(model.clip(0.05)) == pytest.approx(norm, rel=max(within, 1e-9))
        assert norm > 0.05
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.step()
            rate.step()
    for ours, theirs in zip(model.state(), whole, strict=True):
        for key, value in theirs.state_dict().items():
            assert float((ours[key] - value).abs().max()) <= within * max(1.0, float(value.abs().max()))


def test_a_microbatch_draws_the_same_numbers_for_any_number_of_stages() -> None:
    case = case_of("mlp", torch.float64)
    torch.manual_seed(1)
    losses = {float(staged(case, "1f1b", stages).backward(case.inputs, case.targets)) for stages in (1, 2, 4)}
    torch.manual_seed(2)  # what was drawn elsewhere does not matter
    assert float(staged(case, "gpipe", 3).backward(case.inputs, case.targets)) in losses
    assert max(losses) - min(losses) < 1e-15


def test_too_few_buffers_end_in_a_line_that_names_where_ranks_wait() -> None:
    case = case_of("mlp", torch.float32)
    schedule = build("1f1b", stages=3, microbatches=MICROBATCHES)
    model = StagedModel(case.pieces, schedule, loss=case.loss, buffers=0)
    with pytest.raises(ScheduleError, match="is stuck: rank 0 at '0SEND_F2'"):
        model.backward(case.inputs, case.targets)


def test_what_cannot_be_cut_is_refused() -> None:
    case = case_of("mlp", torch.float32)
    with pytest.raises(RequestError, match="a model of 9 pieces cannot be cut into 10 stages"):
        staged(case, "1f1b", 10)
    with pytest.raises(RequestError, match="a minibatch of 3 samples cannot be split into 8 microbatches"):
        staged(case, "1f1b", 2).backward(case.inputs[:3], case.targets[:3])
