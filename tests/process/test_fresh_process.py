"""What only a new process can show: what is loaded, the wheel, the examples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from report.handmade import any_run

HERE = Path(__file__).parents[2]
TIME_LIMIT_S = 120


def run(*words: str, cwd: Path = HERE, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(
        words, cwd=cwd, env=clean | environment, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
    )


TORCH_FREE_COMMANDS = (
    ["schedule", "ring"],
    ["schedule", "--topology", "dgx1"],
    ["strategies"],
    ["examples"],
    ["simulate", "k-sync:4"],
    ["compare", "async", "ring", "--minibatches", "50"],
    ["topology"],
    ["--help"],
    ["--version"],
    *([name, "--help"] for name in ("compare", "lab", "replay", "report", "simulate", "schedule", "watch")),
)


def check_torch_free(*words: str) -> None:
    code = (
        "import atexit, sys; from offbeat.cli import main; "
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); sys.exit(main(sys.argv[1:]))"
    )
    done = run(sys.executable, "-c", code, *words)
    assert (done.returncode, done.stderr) == (0, "False\n")


@pytest.mark.parametrize("words", TORCH_FREE_COMMANDS, ids=" ".join)
def test_commands_that_need_no_torch_do_not_load_it(words: list[str]) -> None:
    check_torch_free(*words)


def test_a_run_is_reported_and_its_times_are_simulated_without_torch(tmp_path: Path) -> None:
    folder = any_run(tmp_path / "run")
    check_torch_free("report", str(folder), "--output", str(tmp_path / "page.html"))
    check_torch_free("simulate", "async", "--compute", f"trace:{folder}", "--updates", "20")
    check_torch_free("compare", "async", "k-async:2", "--compute", f"trace:{folder}", "--minibatches", "20")


def test_import_offbeat_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, offbeat; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    assert run(sys.executable, "-c", code).stdout == "[]\n"


def test_a_reader_that_leaves_early_is_not_an_error() -> None:
    done = run("bash", "-c", f"set -o pipefail; '{sys.executable}' -m offbeat schedule --topology dgx1 --all | head -1")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("example", sorted((HERE / "examples").glob("*.py")), ids=lambda path: path.name)
def test_every_example_runs(example: Path, tmp_path: Path) -> None:
    done = run(sys.executable, str(example), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_the_wheel_works_where_it_is_installed(tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq")
    built = run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(HERE))
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("offbeat-*.whl")
    elsewhere = tmp_path / "site"
    installed = run(*pip, "install", "--no-deps", "--target", str(elsewhere), str(wheel))
    assert installed.returncode == 0, installed.stderr
    assert (elsewhere / "offbeat" / "py.typed").exists()
    for example in (HERE / "examples").glob("*.py"):
        assert (elsewhere / "offbeat" / "examples" / example.name).read_bytes() == example.read_bytes()
    code = (
        "import offbeat, sys; from offbeat.cli import main; "
        "print(offbeat.__file__, file=sys.stderr); sys.exit(main(['schedule', 'ring', '--json']))"
    )
    done = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(elsewhere))
    assert done.returncode == 0, done.stderr
    assert Path(done.stderr.strip()).is_relative_to(elsewhere)
    assert json.loads(done.stdout)["steps"] == 14
    folder = tmp_path / "mine"
    folder.mkdir()
    copied = run(sys.executable, "-m", "offbeat", "examples", "digits", cwd=folder, PYTHONPATH=str(elsewhere))
    assert copied.returncode == 0, copied.stderr
    assert (folder / "digits.py").read_bytes() == (HERE / "examples" / "digits.py").read_bytes()
