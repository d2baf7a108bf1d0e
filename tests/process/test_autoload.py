"""`import torch` makes the backend known, and nothing of ours can break it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2]
KNOWN = "import torch.distributed as dist; print('offbeat' in dist.Backend.backend_list)"


def python(code: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"PYTHONPATH": str(path)} if path else {})}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_import_torch_alone_makes_the_backend_known() -> None:
    done = python(f"import torch, sys; print('offbeat.collectives' in sys.modules); {KNOWN}")
    assert (done.stdout.split(), done.stderr) == (["False", "True"], "")


def test_import_offbeat_loads_no_torch_but_registers_where_it_is_loaded() -> None:
    done = python("import offbeat, sys; print('torch' in sys.modules, 'numpy' in sys.modules)")
    assert (done.stdout.split(), done.stderr) == (["False", "False"], "")
    code = f"import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'; import torch, offbeat; {KNOWN}"
    assert python(code).stdout.split() == ["True"]


@pytest.mark.parametrize(
    "broken",
    {
        "the package": ("offbeat/__init__.py", "raise RuntimeError('broken')"),
        "its backend": ("offbeat/collectives/backend.py", "this is no Python"),
    }.values(),
    ids=lambda pair: pair[0],
)
def test_a_broken_offbeat_does_not_break_import_torch(tmp_path: Path, broken: tuple[str, str]) -> None:
    shutil.copytree(HERE / "src", tmp_path / "src")
    (tmp_path / "src" / broken[0]).write_text(broken[1], encoding="utf-8")
    done = python("import torch; print(torch.ones(2).sum().item())", tmp_path / "src")
    assert (done.stdout.strip(), done.stderr) == ("2.0", "")
    one = "store=dist.HashStore(), rank=0, world_size=1"
    used = python(
        f"import torch, torch.distributed as dist; dist.init_process_group('offbeat', {one})", tmp_path / "src"
    )
    assert used.returncode == 1 and ("broken" in used.stderr or "SyntaxError" in used.stderr)


def test_whatever_registering_raises_stays_inside() -> None:
    code = (
        "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n"
        "import torch.distributed as dist, offbeat_autoload\n"
        "def fail(*_, **__): raise RuntimeError('no')\n"
        "dist.Backend.register_backend = fail\n"
        "offbeat_autoload.register(); print('alive')"
    )
    assert python(code).stdout.strip() == "alive"
