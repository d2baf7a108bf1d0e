"""PyTorch's own tests of torch.distributed, on the offbeat backend: a fast part of them, one or more of each kind.

The whole list, and its comparison with Gloo's, is `python -m torch_suite.compare`. That the harness itself works can
be seen without offbeat: `SUITE_BACKEND=gloo pytest tests/process/test_torch_suite.py` (all-to-all is then left out).
"""

from __future__ import annotations

import os

import pytest

from torch_suite.compare import LEFT_TO_MPI, Outcome, judge, run_suite

BACKEND = os.environ.get("SUITE_BACKEND", "offbeat")
# No test of reduce_scatter is among them: upstream has none for the CPU.
PART = (
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync_allreduce_hook",
    "test_all_gather",
    "test_all_gather_coalesced_with_empty",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_group_sum",  # of a group within 8 ranks; all others have 3
    "test_all_reduce_max",
    "test_all_reduce_min",
    "test_all_reduce_product",
    "test_all_reduce_sum",
    "test_all_reduce_sum_async",
    "test_all_to_all",
    "test_all_to_all_single_unequal_split",
    "test_barrier",
    "test_barrier_timeout_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast",
    "test_gather",
    "test_get_rank_size_group",
    "test_reduce_sum",
    "test_scatter",
    "test_send_recv",
    "test_send_recv_any_source",
)
NEEDS_GPU = "test_barrier_cuda"


@pytest.fixture(scope="module")
def ended() -> dict[str, Outcome]:
    return run_suite(BACKEND, (*PART, NEEDS_GPU), worlds=(3, 8))


@pytest.mark.parametrize("name", PART)
@pytest.mark.skipif(not os.environ.get("OFFBEAT_MATRIX"), reason="takes long: make test-matrix")
def test_a_test_of_pytorch_is_executed_and_passes(name: str, ended: dict[str, Outcome]) -> None:
    outcome = ended[name]
    if BACKEND == "gloo" and outcome.reason.startswith(LEFT_TO_MPI):
        pytest.skip(outcome.reason)
    assert outcome.outcome == "ok", outcome.reason


def test_a_test_that_the_ranks_skip_is_not_taken_for_executed(ended: dict[str, Outcome]) -> None:
    outcome = ended[NEEDS_GPU]
    assert (outcome.outcome, outcome.executed) == ("skip", False)
    assert "CUDA" in outcome.reason


def outcomes(**named: str) -> dict[str, Outcome]:
    return {name: Outcome(name, outcome, "", 0.0, 3) for name, outcome in named.items()}


GLOO = outcomes(a="ok", b="ok", gpu="skip", mpi="skip")


def test_the_lists_agree_if_all_that_gloo_executes_passes() -> None:
    verdict = judge(GLOO, outcomes(a="ok", b="ok", mpi="ok"), ())
    assert verdict.good
    assert (verdict.executed, verdict.passed, verdict.beyond) == (("a", "b"), ("a", "b"), ("mpi",))


@pytest.mark.parametrize(
    "offbeat",
    [outcomes(a="ok", b="fail"), outcomes(a="ok", b="skip"), outcomes(a="ok")],
    ids=["failed", "skipped", "not run"],
)
def test_a_test_that_gloo_executes_and_offbeat_does_not_pass_is_wrong(offbeat: dict[str, Outcome]) -> None:
    assert judge(GLOO, offbeat, ()).wrong == ("b",)
    excepted = judge(GLOO, offbeat, ("b",))
    assert excepted.good
    assert excepted.excepted == ("b",)


def test_a_failure_beyond_what_gloo_executes_is_wrong_too() -> None:
    assert judge(GLOO, outcomes(a="ok", b="ok", mpi="fail"), ()).wrong == ("mpi",)


def test_an_exception_for_what_passes_or_does_not_exist_is_needless() -> None:
    verdict = judge(GLOO, outcomes(a="ok", b="ok"), ("b", "gpu", "unknown"))
    assert not verdict.good
    assert verdict.needless == ("b", "gpu", "unknown")
