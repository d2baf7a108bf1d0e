"""What torch builds on a process group gives by offbeat, on two ranks, bit for bit what it gives by gloo.

Two additions in either order are the same, so with two ranks there is no tolerance. The ranks are started once; each
feature of `features_rank.py` is compared there with a single process and here between the backends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("features_rank.py")
RANKS = (0, 1)
TIME_LIMIT_S = 150.0  # ends only what hangs; the limit of one collective is in the script
FEATURES = (
    "device_mesh", "functional_collectives", "compiled_collectives", "dtensor", "tensor_parallel", "fully_sharded",
    "pipeline", "ddp_plain", "ddp_static_graph", "ddp_unused_parameters", "ddp_bucket_views", "ddp_half_precision_hook",
    "ddp_buffers",
)  # fmt: skip

Results = Mapping[int, Mapping[str, Mapping[str, Mapping[str, Any]]]]  # rank -> backend -> feature -> what came of it


def run_ranks(folder: Path, *backends: str) -> list[int]:
    """Run both ranks to their end, or kill them; returns their exit codes."""
    foreign = ("OFFBEAT_", "TORCHELASTIC_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    with (folder / "output").open("w", encoding="utf-8") as output:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(rank), str(folder), *backends],
                env=environment | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for rank in RANKS
        ]
        deadline = time.monotonic() + TIME_LIMIT_S
        try:
            while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    return [rank.returncode for rank in ranks]


@dataclass(frozen=True)
class Run:
    codes: list[int]
    output: str
    results: Results


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("features")
    codes = run_ranks(folder, "gloo", "offbeat")
    output = (folder / "output").read_text(encoding="utf-8")
    files = {rank: folder / f"rank-{rank}.json" for rank in RANKS}
    assert all(file.exists() for file in files.values()), output
    return Run(codes, output, {rank: json.loads(file.read_text(encoding="utf-8")) for rank, file in files.items()})


def outcomes(results: Results, backend: str, feature: str) -> list[Any]:
    """The values of a feature on each rank; fails with the traceback of every rank where it did not work."""
    found = [
        results[rank].get(backend, {}).get(feature, {"error": "it was not reached, or did not end"}) for rank in RANKS
    ]
    errors = [f"by {backend} on rank {rank}: {one['error']}" for rank, one in enumerate(found) if one["error"]]
    assert not errors, "\n".join(errors)
    return [one["values"] for one in found]


@pytest.mark.parametrize("feature", FEATURES)
def test_by_offbeat_a_feature_of_torch_gives_what_it_gives_by_gloo(feature: str, run: Run) -> None:
    by_gloo = outcomes(run.results, "gloo", feature)
    assert all(by_gloo), "it returned nothing to compare"
    assert outcomes(run.results, "offbeat", feature) == by_gloo


def test_every_feature_of_the_rank_script_is_looked_at(run: Run) -> None:
    assert set(run.results[0]["gloo"]) == set(FEATURES)


def test_the_ranks_come_to_their_end(run: Run) -> None:
    assert run.codes == [0, 0], run.output
