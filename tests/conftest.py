"""Settings of all tests: random tests draw the same examples everywhere, so that a red run can be repeated.

What takes long and is looked at from another side too is left to `make test-matrix`.
"""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from lab.fixture import start_lab as start_lab
from workers import WaitingAside

# What is imported for all tests stays to the end. Python's collector would go through it again and again: while modules
# are loaded, and whenever a test makes many objects (a syntax tree, a log), which then takes five times as long.
gc.disable()
COLLECT_AFTER = (50_000, 20, 50)
# The same for programs that tests start: see there.
STARTUP = Path(__file__).with_name("startup")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(STARTUP), os.environ.get("PYTHONPATH"))))

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
    "test_several_hosts.py::test_a_killed_host_ends_the_run_and_resumed_it_comes_to_the_same_bits",
    "test_remote_runs.py::test_strangers_on_the_port_change_nothing",
    "test_remote_runs.py::test_a_learner_that_is_killed_comes_back_and_every_sample_counts_once",
    "test_work.py::test_torchrun_starts_the_learners_of_a_script_on_two_hosts",
    "test_across_hosts.py::test_sharded_tensor_parallel_and_pipelined_programs_train_as_with_gloo",
    "test_across_hosts.py::test_coded_all_reduces_end_with_the_same_bits_across_hosts[ranks0]",
    "test_across_hosts.py::test_coded_all_reduces_end_with_the_same_bits_across_hosts[ranks2]",
    "test_across_hosts.py::test_survivors_name_the_rank_that_is_gone[kill]",
    "test_keys_across_hosts.py::test_strangers_at_the_meetings_of_a_training_do_not_get_in_and_change_no_bit",
    "test_across_hosts.py::test_every_line_gives_the_plain_sum_and_the_same_bits_on_all_ranks",
    "test_across_hosts.py::test_survivors_name_the_rank_that_is_gone[cut]",
    "test_across_hosts.py::test_a_slow_link_is_named_as_a_link",
    "test_keys_across_hosts.py::test_with_a_key_every_collective_and_message_is_right",
    "test_remote_runs.py::test_the_gateway_and_the_coordinator_are_killed_and_the_learners_join_again",
    "test_work.py::test_three_hosts_train_to_the_bits_of_one",
    "test_several_hosts.py::test_a_host_without_the_data_is_named_by_all",
    "test_succession.py::test_the_run_goes_on_when_its_host_is_killed",
    "test_hosts_over_ssh.py::test_a_host_with_another_script_or_none_is_refused",
    "test_hosts_over_ssh.py::test_a_script_runs_on_another_host_too",
    "test_hosts_over_ssh.py::test_a_host_that_is_lost_does_not_end_the_run",
    "test_hosts_over_ssh.py::test_a_host_that_cannot_start_its_learners_ends_the_run_in_one_line",
    "test_hosts_over_ssh.py::test_a_run_that_is_killed_leaves_nothing_on_the_other_hosts[",
    "test_bench.py::test_the_network_of_a_lab_is_measured_and_its_all_reduces_are_predicted",
    "test_hosts_over_ssh.py::test_another_command_takes_the_place_of_ssh",
    "test_stage_ranks.py::test_ranks_that_are_processes_train_as_one_process[3]",
    "test_stage_ranks.py::test_ranks_that_are_processes_train_as_one_process[4]",
    "test_stage_ranks.py::test_ranks_on_two_hosts_train_as_one_process",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("OFFBEAT_MATRIX") or os.environ.get("OFFBEAT_REPEATS"):
        return
    for item in items:
        if any(part in item.nodeid for part in LONG):
            item.add_marker(pytest.mark.skip(reason="takes long: make test-matrix"))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    gc.enable()
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # other tests have the other core; and threads do not survive the forks of tests


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> WaitingAside | None:
    return WaitingAside(config, log) if config.option.dist == "loadfile" else None


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Commands that are called here, and not in a process of their own, say by the environment who may connect."""
    before = {name: value for name, value in os.environ.items() if name.startswith("OFFBEAT_")}
    yield
    for name in [name for name in os.environ if name.startswith("OFFBEAT_")]:
        if name not in before:
            del os.environ[name]
    os.environ.update(before)
