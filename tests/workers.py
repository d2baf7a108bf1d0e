"""Which worker of pytest-xdist runs which file: two compute, and a third runs what mostly waits.

A file of tests that start processes and then wait, for a time limit, a killed peer or a browser, leaves its core idle.
With three workers (`make test`) the third has these files first, so that most of the time there are not more than two
that compute; they still have the cores to themselves whenever it waits. Without a third all files are the two's.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]  # it has no types
from xdist.workermanage import WorkerController  # type: ignore[import-untyped]  # nor here

# The longest first. Of each, on two cores: seconds, and of these how many a core computes.
WAITING = (
    "tests/process/test_work.py",  # 100
    "tests/server/test_remote_runs.py",  # 75
    "tests/train/test_several_hosts.py",  # 70
    "tests/process/test_server_faults.py",  # 66
    "tests/process/test_endings.py",  # 60: 23
    "tests/collectives/test_across_hosts.py",  # 60
    "tests/process/test_hangs.py",  # 40
    "tests/collectives/test_faults.py",  # 37: 14
    "tests/report/test_browser.py",  # 35: 16
    "tests/report/test_real_runs.py",  # 26: 10
    "tests/test_readme.py",  # 25
    "tests/collectives/test_keys_across_hosts.py",  # 21
    "tests/collectives/test_odd_uses.py",  # 18
    "tests/process/test_hosts_over_ssh.py",  # 20
    "tests/process/test_exits.py",  # 16
    "tests/process/test_watching.py",  # 8
    "tests/lab/test_hosts.py",  # 7
    "tests/lab/test_lab_command.py",  # 6
)


# Files of the other two that take longest: begun first, so that none of them is left alone at the end.
LONG = (
    "tests/train/test_codecs.py",
    "tests/collectives/test_group.py",
    "tests/parallel/test_pipeline_executor.py",
    "tests/process/test_bench.py",
    "tests/process/test_ddp_script.py",
    "tests/process/test_fresh_process.py",
    "tests/process/test_docs.py",
    "tests/train/test_pipelined.py",
    "tests/train/test_matrix.py",
    "tests/train/test_compute_ladder.py",
    "tests/train/test_resume.py",
    "tests/train/test_batch_search.py",
    "tests/parallel/test_stage_ranks.py",
)

THIRD = "gw2"


class WaitingAside(LoadFileScheduling):  # type: ignore[misc]  # nor has its base
    """Gives out whole files, as `--dist loadfile` does."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        waiting = [file for file in WAITING if file in self.workqueue]
        long = [file for file in LONG if file in self.workqueue]
        others = iter([*long, *(file for file in self.workqueue if file not in waiting)])
        if node.gateway.id != THIRD:
            self.workqueue.move_to_end(next(others, None) or waiting[-1], last=False)
        else:
            self.workqueue.move_to_end(waiting[0] if waiting else next(others), last=False)
        super()._assign_work_unit(node)
