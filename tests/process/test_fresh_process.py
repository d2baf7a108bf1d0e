"""What only a new process can show: what is loaded, the wheel, the examples."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from report.handmade import any_run

HERE = Path(__file__).parents[2]
TIME_LIMIT_S = 120


def run(*words: str, cwd: Path = HERE, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(
        words, cwd=cwd, env=clean | environment, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
    )


class Example(NamedTuple):
    """How an example ended, and the folder in which it ran."""

    done: subprocess.CompletedProcess[str]
    folder: Path


TORCH_FREE_COMMANDS = (
    ["schedule", "ring"],
    ["schedule", "--topology", "dgx1"],
    ["pipeline"],
    ["pipeline", "1f1b", "--json"],
    ["strategies"],
    ["examples"],
    ["simulate", "k-sync:4"],
    ["compare", "async", "ring", "--minibatches", "50"],
    ["topology"],
    ["--help"],
    ["--version"],
    *([name, "--help"] for name in ("compare", "lab", "replay", "report", "simulate", "schedule", "watch")),
)


def check_torch_free(*words: str, code: int = 0, told: str = "") -> None:
    program = (
        "import atexit, sys; from offbeat.cli import main; "
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); sys.exit(main(sys.argv[1:]))"
    )
    done = run(sys.executable, "-c", program, *words)
    assert (done.returncode, done.stderr) == (code, f"{told}False\n")


@pytest.mark.parametrize("words", TORCH_FREE_COMMANDS, ids=" ".join)
def test_commands_that_need_no_torch_do_not_load_it(words: list[str]) -> None:
    check_torch_free(*words)


def test_a_run_is_reported_and_its_times_are_simulated_without_torch(tmp_path: Path) -> None:
    folder = any_run(tmp_path / "run")
    check_torch_free("report", str(folder), "--output", str(tmp_path / "page.html"))
    check_torch_free("simulate", "async", "--compute", f"trace:{folder}", "--updates", "20")
    check_torch_free("compare", "async", "k-async:2", "--compute", f"trace:{folder}", "--minibatches", "20")


def test_a_host_that_finds_no_run_says_so_without_torch() -> None:
    check_torch_free("work", "--join", "127.0.0.1:1", code=1, told="offbeat: nobody listens on 127.0.0.1:1\n")


def test_import_offbeat_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, offbeat; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    assert run(sys.executable, "-c", code).stdout == "[]\n"


def test_a_reader_that_leaves_early_is_not_an_error() -> None:
    done = run("bash", "-c", f"set -o pipefail; '{sys.executable}' -m offbeat schedule --topology dgx1 --all | head -1")
    assert (done.returncode, done.stderr) == (0, "")


SLOW_LEARNER = HERE / "examples" / "slow_learner.py"
EXAMPLES: dict[Path, list[str]] = {example: [] for example in sorted((HERE / "examples").glob("*.py"))}
EXAMPLES[SLOW_LEARNER] = ["--epochs", "2"]


@pytest.fixture(scope="module")
def run_example(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Example]:
    """Runs an example in a folder of its own, and only once."""

    @functools.cache
    def run_once(example: Path) -> Example:
        folder = tmp_path_factory.mktemp(example.stem)
        return Example(run(sys.executable, str(example), *EXAMPLES[example], cwd=folder), folder)

    return run_once


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_example_runs(example: Path, run_example: Callable[[Path], Example]) -> None:
    done, _ = run_example(example)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_the_demo_names_the_strategy_that_is_faster_and_the_page(run_example: Callable[[Path], Example]) -> None:
    done, folder = run_example(SLOW_LEARNER)
    title, *rows, ratio, page = done.stdout.splitlines()
    assert title.startswith("4 learners, learner 3 is 3x slower")
    assert [row.split()[0] for row in rows] == ["strategy", "ring", "k-sync:3"]
    assert re.fullmatch(r"k-sync:3 is \d+\.\dx as fast as ring for the same samples\.", ratio)
    assert page == "Open runs/slow-learner.html in a browser to see what each learner did."
    assert "k-sync:3" in (folder / "runs" / "slow-learner.html").read_text(encoding="utf-8")


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
