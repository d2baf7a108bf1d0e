"""Folders as they are found: cut off, foreign, hostile, or still being written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offbeat.errors import RequestError
from offbeat.report.build import build
from offbeat.report.inputs import read_inputs, read_result
from offbeat.runs import untrusted
from offbeat.runs.run_record import read_run
from offbeat.runs.untrusted import clean, shorten
from report.handmade import any_run, decision, evaluation, span, write_result, write_run


def test_a_whole_run_is_read_without_a_problem(tmp_path: Path) -> None:
    run = read_run(any_run(tmp_path / "a", machine={"cores": 2}, energy={"seconds": 1.0, "joules": 2.0}))
    assert run.problems == () and run.finished and not run.simulated
    assert (run.name, len(run.metrics), len(run.segments[0].spans), len(run.segments[0].decisions)) == ("a", 2, 5, 4)
    assert run.machine == {"cores": 2} and run.energy[0].joules == 2.0
    assert run.segments[0].decisions[0].applies == [(1,)] and run.segments[0].run["strategy"] == "async"


def test_what_is_missing_is_named_and_the_rest_is_used(tmp_path: Path) -> None:
    for name, words in {
        "config.json": "config.json: is missing",
        "metrics.jsonl": "metrics.jsonl: is missing, so accuracy and time to target are unknown",
        "log.jsonl": "log.jsonl: is missing, so there is no timeline",
    }.items():
        folder = any_run(tmp_path / name)
        (folder / name).unlink()
        run = read_run(folder)
        assert run.problems == (words,) and not run.is_empty


def test_a_log_that_was_cut_off_keeps_its_whole_lines(tmp_path: Path) -> None:
    folder = any_run(tmp_path / "a")
    log = folder / "log.jsonl"
    log.write_bytes(log.read_bytes()[:-20])
    run = read_run(folder)
    assert run.problems == ("log.jsonl: 1 of 10 lines could not be read; first: line 10",)
    assert len(run.segments[0].decisions) == 3 and run.segments[0].unread == 1


GOOD = span(0, "compute", 1.0, 2.0)
WRONG_LINES: list[Any] = [
    {**GOOD, "start_s": float("nan")},
    {**GOOD, "end_s": float("inf")},
    {**GOOD, "start_s": -1.0},
    {**GOOD, "end_s": 0.5},
    {**GOOD, "start_s": "0"},
    {**GOOD, "start_s": None},
    {**GOOD, "end_s": 1e300},
    {**GOOD, "learner": -1},
    {**GOOD, "learner": True},
    {**GOOD, "learner": 10**12},
    {**GOOD, "learner": 10**400},
    {**GOOD, "version": 1.5},
    {**GOOD, "what": "nap"},
    {**GOOD, "what": ["compute"]},
    {**GOOD, "cancelled": 1},
    {"kind": "spam"},
    {"kind": ["span"]},
    [1, 2],
    "text",
    7,
    None,
    decision("pushed 0 t1 v0 n8 @nan"),
    decision("pushed 0 t1 v0 n8 @-1.0"),
    decision("jumped 0 @1.0"),
    decision("apply t1"),
    decision("pushed 0 t1 v0 n8 @1.0", "apply x1"),
    {"kind": "decision", "event": 7, "commands": []},
    {"kind": "decision", "event": "joined 0 @0.0", "commands": "send 0"},
    {"kind": "decision", "event": "joined 0 @0.0", "commands": [7]},
]


@pytest.mark.parametrize("line", WRONG_LINES, ids=lambda line: str(line)[:60])
def test_a_wrong_line_is_skipped_and_counted(tmp_path: Path, line: Any) -> None:
    run = read_run(write_run(tmp_path / "a", log=[GOOD, line, GOOD]))
    assert run.problems[-1] == "log.jsonl: 1 of 4 lines could not be read; first: line 3"
    assert len(run.segments[0].spans) == 2 and run.segments[0].decisions == ()


def test_deep_nesting_and_long_lines_are_wrong_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted, "LONGEST_LINE", 300_000)
    folder = write_run(tmp_path / "a", log=[GOOD])
    with (folder / "log.jsonl").open("ab") as file:
        file.write(b"[" * 200_000 + b"\n" + b"x" * 1_000_000 + b"\n" + b"9" * 100_000 + b"\n\xff\xfe\x00\n")
        file.write(json.dumps(GOOD).encode() + b"\n")
    run = read_run(folder)
    assert run.problems[-1] == "log.jsonl: 4 of 7 lines could not be read; first: line 3"
    assert len(run.segments[0].spans) == 2


def test_an_unfinished_log_is_read_and_the_run_is_called_unfinished(tmp_path: Path) -> None:
    folder = any_run(tmp_path / "a")
    (folder / "log.jsonl").rename(folder / "log.jsonl.unfinished")
    run = read_run(folder)
    assert not run.finished and len(run.segments[0].spans) == 5
    assert run.problems == ("the run is unfinished: it is still running or was killed",)
    any_run(folder)  # a finished one beside it is the one that counts
    assert read_run(folder).finished


def test_legs_after_a_resume_come_in_order_with_their_energy(tmp_path: Path) -> None:
    folder = any_run(tmp_path / "a", energy={"seconds": 1.0, "joules": 2.0})
    none = {"seconds": 1.0, "joules": None, "not_measured": ["no counter"]}
    for segment in (".10", ".2"):
        write_run(folder, log=[GOOD], segment=segment, energy=none)
    run = read_run(folder)
    assert [one.number for one in run.segments] == [1, 2, 10] == [one.segment for one in run.energy]
    assert run.energy[2].reasons == ("no counter",) and run.problems == ()


def test_another_format_is_not_guessed_at(tmp_path: Path) -> None:
    for written in (2, True, "1", None):
        folder = any_run(tmp_path / str(written), head={"format": written})
        run = read_run(folder)
        assert run.segments == () and run.problems == (f"log.jsonl: format {written!r}; this version reads format 1",)


def test_a_log_without_its_first_line_is_still_a_log(tmp_path: Path) -> None:
    folder = any_run(tmp_path / "a")
    log = folder / "log.jsonl"
    log.write_bytes(b"\n" + log.read_bytes().partition(b"\n")[2])
    run = read_run(folder)
    assert len(run.segments[0].spans) == 5 and run.segments[0].run == {} and run.problems == ()


def test_a_binary_log_is_given_up_early(tmp_path: Path) -> None:
    folder = any_run(tmp_path / "a")
    (folder / "log.jsonl").write_bytes(b"\x00\xff\n" * 100_000)
    assert read_run(folder).problems == (
        "log.jsonl: none of its first 1,000 lines could be read",
    )  # fmt: skip
    (folder / "log.jsonl").write_bytes(b"")
    assert read_run(folder).problems == ("log.jsonl: is empty",)


def test_folders_pipes_and_links_in_the_place_of_files_are_named(tmp_path: Path) -> None:
    folder = any_run(tmp_path / "a")
    for name in ("config.json", "metrics.jsonl", "log.jsonl"):
        (folder / name).unlink()
    (folder / "config.json").mkdir()
    os.mkfifo(folder / "log.jsonl")
    (folder / "metrics.jsonl").symlink_to("/dev/zero")
    (folder / "machine.json").symlink_to("nowhere")
    run = read_run(folder)
    assert run.is_empty and run.problems == (
        "config.json: is not a regular file",
        "metrics.jsonl: is not a regular file",
        "log.jsonl: is not a regular file",
        "machine.json: cannot be read: No such file or directory",
    )


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is not JSON, or was cut off"),
        (b'{"sync": "ri', "is not JSON, or was cut off"),
        (b"\x00\x01", "is not JSON, or was cut off"),
        (b"[" * 100_000, "is not JSON, or was cut off"),
        (b"[1]", "expected a JSON object; got a list"),
        (b'"text"', "expected a JSON object; got text"),
        (b"3", "expected a JSON object; got a number"),
    ],
)
def test_a_config_of_the_wrong_kind_is_one_sentence(tmp_path: Path, data: bytes, says: str) -> None:
    folder = any_run(tmp_path / "a")
    (folder / "config.json").write_bytes(data)
    run = read_run(folder)
    assert run.problems == (f"config.json: {says}",) and run.config == {} and run.metrics


def test_a_huge_json_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted, "LARGEST_JSON", 1 << 20)
    folder = any_run(tmp_path / "a")
    (folder / "config.json").write_bytes(b" " * (2 << 20))
    assert read_run(folder).problems == ("config.json: is larger than 1 MiB and was not read",)


def test_metrics_without_a_time_or_out_of_order_are_left_out(tmp_path: Path) -> None:
    lines = [
        evaluation(1, 1.0, 0.5, loss=float("nan")),
        evaluation(2, float("inf"), 0.5),
        evaluation(3, 0.5, 0.5),
        evaluation(4, 2.0, 1.5, samples=-1, dropped=[1]),
        {"seconds": 3.0, "update": True, "accuracy": "high"},
    ]
    run = read_run(any_run(tmp_path / "a", metrics=lines))
    assert run.problems == ("metrics.jsonl: 2 of 5 lines could not be read; first: line 2",)
    assert [(one.update, one.seconds, one.accuracy, one.loss) for one in run.metrics] == [
        (1, 1.0, 0.5, None), (4, 2.0, None, None), (None, 3.0, None, None),
    ]  # fmt: skip
    assert run.metrics[1].samples is None and run.metrics[1].dropped is None


# --- names --------------------------------------------------------------------------------------------------------


def test_runs_of_one_name_are_told_apart_by_the_folder_above_or_a_number(tmp_path: Path) -> None:
    paths = [any_run(tmp_path / "x" / "run"), any_run(tmp_path / "y" / "run"), any_run(tmp_path / "z")]
    assert [run.label for run in read_inputs(paths).runs] == ["x/run", "y/run", "z"]
    assert [run.label for run in read_inputs([paths[0], paths[0], paths[2]]).runs] == ["x/run", "x/run #2", "z"]


def test_hostile_names_stay_text_of_a_bounded_length() -> None:
    assert clean("<script>alert('x')</script>") == "<script>alert('x')</script>"
    assert clean("a\x00b\x1b[2Jc\u202ed\ud800\nz\u2028") == "a�b�[2Jc�d� z "
    assert clean("é😀ß") == "é😀ß"
    long = clean("x" * 10_000 + "end")
    assert len(long) == 500 and "…" in long
    assert shorten("a" * 40 + "b" * 40) == "a" * 30 + "…" + "b" * 29
    assert len(shorten("a" * 61)) == 60 and shorten("a" * 60) == "a" * 60


def test_long_names_are_short_in_charts_and_stay_apart(tmp_path: Path) -> None:
    names = ["n" * 100 + "1" + "n" * 100, "n" * 100 + "2" + "n" * 100]
    runs = read_inputs([any_run(tmp_path / name) for name in names]).runs
    assert len({run.label for run in runs}) == 2 and all(len(run.label) <= 60 for run in runs)
    assert all(name in run.name for name, run in zip(names, runs, strict=True))


# --- all that was asked for ---------------------------------------------------------------------------------------


def test_a_path_that_is_not_there_or_is_no_input_is_refused(tmp_path: Path) -> None:
    run = any_run(tmp_path / "a")
    with pytest.raises(RequestError, match=r"no such file or directory: .*nowhere"):
        read_inputs([run, tmp_path / "nowhere"])
    with pytest.raises(RequestError, match=r"expected the folder of a run, or the \.json file"):
        read_inputs([run / "log.jsonl"])
    with pytest.raises(RequestError, match="give the folder"):
        read_inputs([])


def test_if_nothing_can_be_read_all_reasons_are_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.json").write_text("{", encoding="utf-8")
    with pytest.raises(RequestError, match=r"nothing could be read: empty: config.json: is missing; .*; x.json: is"):
        read_inputs([tmp_path / "empty", tmp_path / "x.json"])
    found = read_inputs([tmp_path / "empty", any_run(tmp_path / "a"), tmp_path / "x.json"])
    assert len(found.runs) == 1 and len(found.problems) == 4


# --- benchmarks ---------------------------------------------------------------------------------------------------

ROW = {"strategy": "ring", "learners": 2, "seconds": 1.0, "speedup": 1.5}


def test_a_benchmark_is_read_with_what_it_lacks_as_none(tmp_path: Path) -> None:
    result = read_result(write_result(tmp_path / "s.json", "scaling", [ROW], recipe="tiny", later={"x": 1}))
    assert (result.kind, result.label, result.said("recipe"), result.problems) == ("scaling", "s", "tiny", ())
    assert result.rows[0]["seconds"] == 1.0 and result.rows[0]["joules"] is None


def test_wrong_values_of_a_benchmark_are_none_counted_and_the_first_is_named(tmp_path: Path) -> None:
    rows: list[Any] = [
        {**ROW, "seconds": "fast", "speedup": float("inf")},
        {**ROW, "seconds": -1.0, "ranked": "no"},
        {"strategy": 7, "learners": 2},
        [1],
        {},
    ]
    result = read_result(write_result(tmp_path / "s.json", "scaling", rows, curves=[7], notes=[1, "a"]))
    assert [row["seconds"] for row in result.rows] == [None, None] and result.notes == ("a",)
    # that infinity is no number is seen where files are read: it is None from there on
    assert result.problems == (
        "s.json: 6 values could not be read: 'seconds' of row 1, ...",
        "s.json: 1 point of its curves could not be read",
    )


def test_other_files_are_no_benchmarks(tmp_path: Path) -> None:
    for text, says in {
        '{"measured": "policies", "rows": []}': "expected a benchmark of scaling, accuracy, predictions",
        '{"measured": ["scaling"]}': "got no benchmark",
        "[]": "expected a JSON object; got a list",
    }.items():
        (tmp_path / "x.json").write_text(text, encoding="utf-8")
        result = read_result(tmp_path / "x.json")
        assert result.kind == "" and says in result.problems[0]


def test_points_of_curves_that_are_wrong_are_left_out(tmp_path: Path) -> None:
    points = [[1.0, 1, 0.5], [0.5, 2, 0.6], [2.0, 2], [2.0, 2, 1.5], "x", [3.0, 3, 0.75]]
    result = read_result(write_result(tmp_path / "a.json", "accuracy", [ROW], curves=[{"points": points}]))
    assert result.curves[0].points == ((1.0, 1, 0.5), (3.0, 3, 0.75)) and result.curves[0].strategy == "?"
    assert result.problems == ("a.json: 4 points of its curves could not be read",)


# --- whatever a file holds ----------------------------------------------------------------------------------------

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
keys = st.sampled_from(["kind", "learner", "what", "start_s", "end_s", "version", "cancelled", "event", "commands",
                        "format", "strategy", "learners", "update", "seconds", "accuracy", "loss", "samples", "dropped",
                        "sync", "train", "model", "joules", "not_measured", "measured", "rows", "curves", "points",
                        "target", "speedup", "predicted_s", "error", "machine", "definitions", "notes"])  # fmt: skip
words = st.sampled_from(["span", "decision", "run", "compute", "wait", "scaling", "accuracy", "predictions", "ring",
                         "k-async:2", "pushed 0 t1 v0 n8 @1.0", "apply t1", "drop t1"])  # fmt: skip
values = (
    words | anything | st.integers(0, 5) | st.lists(st.dictionaries(keys, words | anything, max_size=6), max_size=3)
)
records = st.dictionaries(keys, values, max_size=10)
contents = st.binary(max_size=60) | st.lists(records, max_size=5).map(
    lambda lines: "".join(json.dumps(line) + "\n" for line in lines).encode("utf-8", "surrogatepass")
)
NAMES = ("config.json", "metrics.jsonl", "log.jsonl", "log.2.jsonl.unfinished", "machine.json", "energy.json")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(NAMES), contents), contents)
def test_whatever_files_hold_they_are_read_and_a_page_is_built(
    tmp_path_factory: pytest.TempPathFactory, inside: dict[str, bytes], benchmark: bytes
) -> None:
    folder = any_run(tmp_path_factory.mktemp("any") / "run")
    for name, data in inside.items():
        (folder / name).write_bytes(data)
    (folder / "x.json").write_bytes(benchmark)
    run, result = read_run(folder), read_result(folder / "x.json")
    page = build([run], [result], problems=[*run.problems, *result.problems])
    assert page.sections and all(isinstance(problem, str) and "\n" not in problem for problem in page.problems)
