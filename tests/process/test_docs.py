"""What the docs show is what the program prints."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.fixture import why_no_lab
from offbeat.cli import main
from pages import DOCS, HERE, README, shown
from process.torch_nursery import TorchNursery, torch_nursery

# The log is history; the commands of the README and the tutorial run in order, in tests/test_readme.py.
IN_ORDER = ("README.md", "tutorial.md")
PAGES = [README, *(page for page in DOCS if page.name != "log.md")]


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in IN_ORDER], ids=lambda path: path.name)
def test_commands_in_the_docs_print_what_is_shown(
    page: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (command, lines) in enumerate(shown(page)):
        program, *words = shlex.split(command, comments=True)
        if words[0] == "keys":  # it writes a file
            monkeypatch.chdir(tmp_path)
        sweeps = re.search(r"--learners \d+ \d|\d\.\.\d", command)
        if ("--seeds" in words or sweeps) and not os.environ.get("OFFBEAT_MATRIX"):
            continue  # a race takes long, and a sweep some seconds: make test-matrix
        if words[0] == "lab" and why_no_lab():
            continue
        trains = "--recipe" in words or words[0] == "train"
        if program == "python" or words[0] == "run" or trains:  # in a process of its own
            if not os.environ.get("OFFBEAT_MATRIX"):
                continue  # these take long too
            start = [] if program == "python" else ["-m", "offbeat"]
            words += ["--run-dir", str(tmp_path / f"run-{number}")] if trains else []
            done = subprocess.run(
                [sys.executable, *start, *words], cwd=HERE, capture_output=True, text=True, timeout=300, check=True
            )
            out = done.stdout
        else:
            assert program == "offbeat"
            refused = bool(lines) and lines[0].startswith("offbeat: ")
            wrong = refused and "is not correct" in lines[0]  # a proof that failed, and not a wrong request
            assert main(words) == (1 if wrong else 2 if refused else 0), command
            told = capsys.readouterr()
            out = told.err if refused else told.out
        printed = [re.sub(r"\s+", " ", line.strip()) for line in out.splitlines()]
        for line in lines:
            assert line == "..." or re.sub(r"\s+", " ", line) in printed, f"{command}: {line}"


@pytest.fixture(scope="module")
def nursery() -> Iterator[TorchNursery]:
    with torch_nursery() as made:
        yield made


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_programs_in_the_docs_run(page: Path, tmp_path: Path, nursery: TorchNursery) -> None:
    for program in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        if "import" not in program:
            continue  # a piece to read
        if "offbeat.lab" in program and why_no_lab():
            continue
        script = tmp_path / "program.py"
        script.write_text(program, encoding="utf-8")
        done = nursery.run(script, tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), program


def test_the_docs_show_something() -> None:
    assert sum(len(lines) for page in PAGES for _, lines in shown(page)) > 10
