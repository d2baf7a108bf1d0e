"""`offbeat report`, as a user meets it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.cli import main
from offbeat.report import build as build_module
from offbeat.report import facts as facts_module
from offbeat.runs.run_record import RunRecord
from report.handmade import any_run, write_result

Offbeat = Callable[..., tuple[int, str, str]]


@pytest.fixture
def offbeat(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Offbeat:
    """Runs one command in an empty folder; exit code, standard output and standard error."""
    pytest.importorskip("offbeat.report.page")
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[int, str, str]:
        code = main(["report", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_page_is_written_and_what_matters_is_printed(offbeat: Offbeat, tmp_path: Path) -> None:
    code, out, err = offbeat(any_run(tmp_path / "a"), any_run(tmp_path / "b", strategy="ring", accuracy=0.505))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert (code, err) == (0, "") and page.lstrip().lower().startswith("<!doctype html")
    assert "offbeat report: 2 runs with 2 learners each\n" in out
    assert "were first to reach 50.0 %" in out and "page  report.html (" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "report.html"]


def test_problems_are_printed_and_on_the_page(offbeat: Offbeat, tmp_path: Path) -> None:
    run = any_run(tmp_path / "a")
    (run / "metrics.jsonl").write_text("{\n")
    code, out, _ = offbeat(run, "-o", "new/page.html")
    assert code == 0 and "a: metrics.jsonl: 1 of 1 line could not be read; first: line 1" in out
    assert "1 of 1 line could not be read" in (tmp_path / "new" / "page.html").read_text(encoding="utf-8")


def test_a_run_and_a_benchmark_go_on_one_page(offbeat: Offbeat, tmp_path: Path) -> None:
    result = write_result(tmp_path / "s.json", "scaling", [{"strategy": "ring", "learners": 2, "speedup": 1.5}])
    assert "1 run and 1 benchmark" in offbeat(any_run(tmp_path / "a"), result)[1]


def test_tables_and_a_trace_are_written_where_asked(offbeat: Offbeat, tmp_path: Path) -> None:
    runs = [any_run(tmp_path / "a"), any_run(tmp_path / "b")]
    code, out, _ = offbeat(*runs, "--csv", "tables", "--perfetto", "trace.json", "--price", "2")
    assert code == 0 and "tables  tables (" in out and (tmp_path / "tables" / "runs.csv").exists()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "a", 1: "b"} and sum(event["ph"] == "X" for event in events) == 10


def test_json_is_one_object_with_the_facts_of_all_runs(offbeat: Offbeat, tmp_path: Path) -> None:
    code, out, err = offbeat(any_run(tmp_path / "a"), "--json", "--target", "0.5", "--price", "3600")
    found = json.loads(out)
    assert (code, err) == (0, "") and found["page"] == "report.html" and found["size_bytes"] > 0
    run = found["runs"][0]
    assert (run["strategy"], run["seconds_to_target"], run["cost"], run["throughput"]) == ("async", 3.0, 6.0, 32 / 3)
    assert run["by_learner"][1]["wait_s"] == 0.5 and run["curve"][0]["accuracy"] == 0.5
    assert found["summary"] and found["problems"] == [] and found["results"] == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "no such file or directory: nowhere"),
        ([], "required"),
        (["a", "--target", "95"], "expected an accuracy above 0 and at most 1"),
        (["a", "--target", "nan"], "expected an accuracy above 0 and at most 1"),
        (["a", "--price", "-1"], "a price is a number of 0 or more"),
        (["a", "--price", "inf"], "a price is a number of 0 or more"),
        (["a", "-o", "."], "it is a folder"),
        (["a", "-o", "a/config.json/x.html"], "cannot write"),
        (["a", "--csv", "a/config.json"], "cannot write"),
        (["empty"], "nothing could be read: empty: config.json: is missing"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_code_2(
    offbeat: Offbeat, tmp_path: Path, words: list[str], says: str
) -> None:
    any_run(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    code, out, err = offbeat(*words)
    assert (code, out) == (2, "") and says in err and err.count("\n") == 1


@pytest.mark.parametrize("option", ["-o", "--perfetto"])
@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("pipe", "it is not a regular file"),
        ("link-to-pipe", "it is not a regular file"),
        ("stdout", "it is not a regular file"),
        ("a/config.json", "it is in the folder of a run"),
        ("a/log.2.jsonl", "it is in the folder of a run"),
        ("link-to-metrics", "it is in the folder of a run"),
        ("link-to-run/metrics.jsonl", "it is in the folder of a run"),
        ("s.json", "it is one of the input files"),
        ("hard.json", "it is one of the input files"),
        ("loop", "it is a broken symbolic link"),
    ],
)
def test_what_is_not_ours_to_replace_is_refused_in_one_line(
    offbeat: Offbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, place: str, says: str
) -> None:
    """All of it lies in the test's own folder: if this breaks, who tests as root must not lose /dev/null."""
    run = any_run(tmp_path / "a")
    (tmp_path / "stdout").write_text("what was printed before")  # as `offbeat report a -o /dev/stdout > stdout`
    real = os.fstat
    monkeypatch.setattr(os, "fstat", lambda number: (tmp_path / "stdout").stat() if number == 1 else real(number))
    (tmp_path / "link-to-pipe").symlink_to("pipe")
    result = write_result(tmp_path / "s.json", "scaling", [{"strategy": "ring", "learners": 2, "speedup": 1.5}])
    os.mkfifo(tmp_path / "pipe")
    os.link(result, tmp_path / "hard.json")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "link-to-metrics").symlink_to(run / "metrics.jsonl")
    (tmp_path / "link-to-run").symlink_to(run)
    before = {path: path.read_bytes() for path in [*run.iterdir(), result]}
    code, out, err = offbeat("a", "s.json", option, place)
    assert (code, out) == (2, "") and f"cannot write {place}: {says}" in err and err.count("\n") == 1
    assert {path: path.read_bytes() for path in [*run.iterdir(), result]} == before
    assert not (tmp_path / "report.html").exists()  # nothing is written before all of it is known to be sound


def test_the_page_of_a_run_may_lie_in_its_folder_and_a_link_is_followed(offbeat: Offbeat, tmp_path: Path) -> None:
    any_run(tmp_path / "a")
    (tmp_path / "pages").mkdir()
    (tmp_path / "link.html").symlink_to(tmp_path / "pages" / "new.html")
    for _ in range(2):
        assert offbeat("a", "-o", "a/report.html")[0] == offbeat("a", "-o", "link.html")[0] == 0
    assert (tmp_path / "link.html").is_symlink() and not (tmp_path / "pages" / "new.html").is_symlink()
    assert (tmp_path / "pages" / "new.html").read_text() == (tmp_path / "a" / "report.html").read_text()
    assert [path.name for path in (tmp_path / "pages").iterdir()] == ["new.html"]
    code, _, err = offbeat("a", "-o", "x", "--perfetto", "x")
    assert code == 2 and "choose two files" in err


def test_the_facts_of_a_run_are_computed_once(
    offbeat: Offbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    real = facts_module.facts_of

    def counted(run: RunRecord) -> facts_module.Facts:
        asked.append(run.label)
        return real(run)

    monkeypatch.setattr(facts_module, "facts_of", counted)
    monkeypatch.setattr(build_module, "facts_of", counted)
    assert offbeat(any_run(tmp_path / "a"), any_run(tmp_path / "b"), "--json")[0] == 0 and asked == ["a", "b"]


def test_a_page_that_cannot_be_written_leaves_the_old_one_and_nothing_else(
    offbeat: Offbeat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = any_run(tmp_path / "a")
    (tmp_path / "report.html").write_text("old")

    def full(*_: object) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    code, _, err = offbeat(run)
    assert code == 2 and "cannot write report.html: No space left on device" in err
    assert (tmp_path / "report.html").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "report.html"]
