"""The README and the tutorial do what they say: their commands run as written, in order, in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pages import DOCS, HERE, README, shown

TUTORIAL = HERE / "docs" / "tutorial.md"
TABLE_ROW = re.compile(r"^\| (?!feature)([^|]+?) \|(.+)\|$", re.MULTILINE)


def without_numbers(line: str) -> str:
    """A line as it is printed on every machine: each number and its sign as #, blanks as one."""
    return re.sub(r"\s+", " ", re.sub(r"[+\u2212-]?\d[\d.,]*", "#", line)).strip()


def run_in_order(page: Path, folder: Path) -> dict[str, str]:
    """Run every command of a page in one folder, and check what it prints; what each printed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    printed = {}
    for command, lines in shown(page):
        done = subprocess.run(
            command,
            shell=True,
            cwd=folder,
            env={**os.environ, "PATH": path, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        found = {without_numbers(line) for line in done.stdout.splitlines()}
        missing = [line for line in lines if line != "..." and without_numbers(line) not in found]
        assert missing == [], f"{command} printed\n{done.stdout}"
        printed[command] = done.stdout
    return printed


def verdicts(page: Path, heading: str) -> dict[str, list[str]]:
    """The rows of a comparison table: the feature, and yes, part or no of each system."""
    text = page.read_text(encoding="utf-8").split(heading)[1]
    rows = {match[1]: re.findall(r"\b(yes|part|no)\b", match[2]) for match in TABLE_ROW.finditer(text)}
    return {feature: cells for feature, cells in rows.items() if len(cells) == 9}


def test_the_commands_of_the_readme_run_in_order_as_written(tmp_path: Path) -> None:
    printed = run_in_order(README, tmp_path)
    assert [command.split()[1] for command in printed] == ["train", "report", "replay", "examples"]
    rows = re.findall(r"^ *(ring, the run|k-sync:3) +([\d.]+) s", printed[list(printed)[2]], re.MULTILINE)
    measured, predicted = (float(seconds) for _, seconds in rows)
    assert predicted < measured  # the learner that everybody waited for is three times slower


@pytest.mark.skipif(not os.environ.get("OFFBEAT_MATRIX"), reason="minutes: make test-matrix")
def test_the_commands_of_the_tutorial_run_in_order_as_written(tmp_path: Path) -> None:
    run_in_order(TUTORIAL, tmp_path)


def test_the_readme_fits_on_a_screen_and_a_bit() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 160


def test_the_readme_and_the_comparison_page_say_the_same_of_every_system() -> None:
    short = verdicts(README, "## Compared with other systems")
    assert len(short) == 11
    assert short == verdicts(HERE / "docs" / "comparison.md", "# How offbeat compares")


def test_every_cell_of_the_comparison_has_a_source_with_its_year() -> None:
    text = (HERE / "docs" / "comparison.md").read_text(encoding="utf-8")
    sources = dict(re.findall(r"^\[\^(\w+)\]: (.+)$", text, re.MULTILINE))
    cited = re.findall(r"\b(?:yes|part|no) \[\^(\w+)\]", text)
    assert len(cited) == 11 * 9
    assert set(cited) == set(sources)
    assert all(re.match(r"[\w ]+, 20\d\d\. ", source) for source in sources.values())
    assert all("](" in source for source in sources.values())


@pytest.mark.parametrize("page", [README, *DOCS, *HERE.glob("[CS]*.md")], ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_of_the_docs_is_in_the_index_and_in_the_site() -> None:
    site, index = ((HERE / name).read_text(encoding="utf-8") for name in ("mkdocs.yml", "docs/index.md"))
    for page in DOCS:
        assert f": {page.name}\n" in site
        assert page.name == "index.md" or f"]({page.name})" in index
