"""Programs that hard-code or check their backend train on offbeat, by OFFBEAT_REPLACE, what they train on Gloo.

After 20 updates on two ranks the parameters are the same bits, where Gloo repeats its own; else they are close. What
needs more than torch, or a compiler, runs only when it is asked for: make test-ecosystem.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from offbeat.collectives.backend import made, replaced
from offbeat.errors import RequestError
from offbeat_autoload import REPLACING
from process.test_ddp_script import bounded, clean_environment, kill_group

SCRIPT = Path(__file__).with_name("unedited_programs.py")
WHOLE = os.environ.get("OFFBEAT_ECOSYSTEM") == "1"
LIMIT_S = 900.0 if WHOLE else 240.0  # ends only what hangs; the limit of one program is in the script
CLOSE = 1e-6
QUICK = (
    "hard_coded", "checked_name", "no_backend", "async_save", "model_from_rank_0", "optimizer_from_rank_0",
    "fsdp1_full", "fsdp1_sharded", "fsdp1_local", "tensor_parallel", "pipelining",
)  # fmt: skip
COMPILED = ("nano_gpt", "compiled_ddp", "compiled_fsdp2")
FRAMEWORKS = {"accelerate": "accelerate", "hugging_face": "transformers", "lightning": "lightning"}  # program: package
REFERENCE, AGAIN, OFFBEAT = "gloo", "gloo again", "offbeat"
ENVIRONMENTS: Mapping[str, dict[str, str]] = {
    REFERENCE: {},
    AGAIN: {},
    OFFBEAT: {"OFFBEAT_REPLACE": "gloo", "BACKEND": "offbeat"},  # Lightning's is an option: it is told the name
}


def programs() -> list[str]:
    if not WHOLE:
        return list(QUICK)
    there = [name for name, package in FRAMEWORKS.items() if importlib.util.find_spec(package) is not None]
    return [*QUICK, *COMPILED, *there]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """All programs, once by each backend, and by Gloo once more where there is time; those run side by side."""
    root = tmp_path_factory.mktemp("programs")
    common = clean_environment() | {"TORCHINDUCTOR_CACHE_DIR": str(root / "inductor"), "HF_HUB_OFFLINE": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(root / run), *programs()],
            env=common | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        for run, environment in ENVIRONMENTS.items()
        if WHOLE or run != AGAIN
    ]
    try:
        for one in running:
            one.wait(LIMIT_S)
        yield root
    finally:
        for one in running:
            kill_group(one.pid)
            one.wait()


def trained(folder: Path, run: str, name: str) -> list[np.ndarray]:
    """What each rank of a program returned; fails with what the ranks wrote where one did not come to its end."""
    here = folder / run / name
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(here.glob("*.log")))
    assert (here / "codes").exists(), f"{name} by {run} was not run"
    assert (here / "codes").read_text(encoding="utf-8") == "0 0", f"{name} by {run}:\n{text}"
    assert ("made: OffbeatGroup" in text) == (run == OFFBEAT), text
    return [np.load(here / f"rank-{rank}.npy") for rank in range(2)]


@pytest.mark.parametrize("name", [*QUICK, *COMPILED, *FRAMEWORKS])
def test_a_program_that_was_not_edited_trains_on_offbeat_what_it_trains_on_gloo(name: str, folder: Path) -> None:
    if name not in programs():
        pytest.skip("only when asked for, with its packages: make test-ecosystem, or OFFBEAT_ECOSYSTEM=1")
    by_gloo, by_offbeat = (trained(folder, run, name) for run in (REFERENCE, OFFBEAT))
    repeats = not WHOLE or all(map(np.array_equal, by_gloo, trained(folder, AGAIN, name)))
    difference = max(float(np.abs(one - other).max()) for one, other in zip(by_gloo, by_offbeat, strict=True))
    print(f"\n{name}: Gloo repeats its bits: {'yes' if repeats else 'no'}; largest difference {difference:g}")
    assert all(one.size > 100 and np.isfinite(one).all() for one in by_gloo)
    assert difference <= (0.0 if repeats else CLOSE)


def test_rank_0_says_once_that_the_backend_was_replaced(folder: Path) -> None:
    line = "offbeat: OFFBEAT_REPLACE=gloo: offbeat replaces process groups of 'gloo' (auto)\n"
    logs = [(folder / OFFBEAT / "checked_name" / f"rank-{rank}.log").read_text(encoding="utf-8") for rank in range(2)]
    assert [log.count(line) for log in logs] == [1, 0]
    assert "offbeat" not in (folder / REFERENCE / "checked_name" / "rank-0.log").read_text(encoding="utf-8")


ALONE = "store=dist.HashStore(), rank=0, world_size=1"


def test_an_unknown_name_is_said_when_a_group_is_made_and_not_before() -> None:
    code = f"import torch.distributed as dist; print('alive'); dist.init_process_group('gloo', {ALONE})"
    done = bounded([sys.executable, "-c", code], LIMIT_S, OFFBEAT_REPLACE="gloo,mpi")
    assert done.code == 1
    assert "alive" in done.text
    assert "OFFBEAT_REPLACE: expected gloo, nccl or gloo,nccl; got 'mpi'" in done.text


def test_offbeat_itself_gets_the_gloo_that_it_asks_for() -> None:
    code = (
        "import os, torch.distributed as dist\n"
        "from offbeat.server.learner.reduced_learner import ReducedLearner\n"
        "def kind():\n"
        "    print(type(dist.group.WORLD).__name__); dist.destroy_process_group()\n"
        f"dist.init_process_group('gloo', {ALONE}); kind()\n"
        "learner = ReducedLearner('native'); kind()\n"
        "os.environ['OFFBEAT_STRATEGY'] = 'native'\n"
        f"dist.init_process_group('gloo', {ALONE}); kind()\n"
        "import sys; sys.stdout.flush(); os._exit(0)"  # the learner would close its group
    )
    done = bounded([sys.executable, "-c", code], LIMIT_S, OFFBEAT_REPLACE="gloo")
    assert done.code == 0, done.text
    kinds = [line for line in done.text.splitlines() if "Group" in line]
    assert kinds == ["OffbeatGroup", "ProcessGroup", "ProcessGroup"], done.text


def test_a_group_is_replaced_whole_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = {"cpu": "gloo", "cuda": "nccl"}
    for line in ("gloo", "nccl", " NCCL, gloo"):
        monkeypatch.setenv("OFFBEAT_REPLACE", line)
        assert made(mixed) == dict.fromkeys(mixed, REPLACING)
    monkeypatch.setenv("OFFBEAT_REPLACE", "nccl")
    for untouched in ({"cpu": "gloo", "cuda": "gloo"}, {"cpu": "offbeat"}, {"xpu": "xccl"}):
        assert made(untouched) == untouched
    with pytest.raises(RequestError, match=r"OFFBEAT_REPLACE=nccl: 'cuda:nccl,xpu:xccl' also names 'xccl'"):
        made({"cuda": "nccl", "xpu": "xccl"})
    with pytest.raises(RequestError, match="did you mean 'gloo'"):
        replaced("glo")
