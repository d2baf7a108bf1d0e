"""Settings of all tests: random tests draw the same examples everywhere, so that a red run can be repeated.

What takes long and is looked at from another side too is left to `make test-matrix`.
"""

import os
from typing import Any

import pytest
from hypothesis import settings

from lab.fixture import start_lab as start_lab
from workers import WaitingAside

settings.register_profile("offbeat", derandomize=True, deadline=None, database=None)
settings.load_profile("offbeat")

# Parts of the names of tests.
LONG = (
    "test_torch_suite.py::test_a_test_that_the_ranks_skip",
    "test_torch_features.py::",
    "test_cli.py::test_the_examples_of_every_command_work[train]",
    "test_cli.py::test_the_examples_of_every_command_work[run]",
    "test_train.py::test_under_torchrun_it_trains_to_the_same_bits[full-sync]",
    "test_hooks.py::test_a_compiled_model_is_cancelled_at_its_start_and_at_each_parameter[torch.compile(model)-inductor]",
    "test_server_faults.py::test_the_command_itself_with_learners_that_are_programs",
    "test_server_faults.py::test_a_planted_bug_is_found",
    "test_fresh_process.py::test_every_example_runs[digits.py]",
    "test_fresh_process.py::test_every_example_runs[ddp.py]",
    "test_run.py::test_only_the_line_changes_for_an_all_reduce",
    "test_run.py::test_alone_a_script_is_one_learner",
    "test_learner.py::test_what_is_cancelled_between_backward_and_step_is_cancelled_too[False]",
    "test_autoload.py::test_a_broken_offbeat_does_not_break_import_torch[offbeat/collectives/backend.py]",
    "test_bench_training.py::test_a_benchmark_that_is_ended_leaves_nothing_behind",
    "test_server.py::test_seconds_per_update_with_a_heavy_tail[18",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("OFFBEAT_MATRIX") or os.environ.get("OFFBEAT_REPEATS"):
        return
    for item in items:
        if any(part in item.nodeid for part in LONG):
            item.add_marker(pytest.mark.skip(reason="takes long: make test-matrix"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> WaitingAside | None:
    return WaitingAside(config, log) if config.option.dist == "loadfile" else None
