"""Spans, the run log and its Chrome form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import LogError, RequestError
from offbeat.runs.log import WHAT, RunLog, Span, check_span, chrome_trace, read_log, write_chrome_trace, write_log

times = st.floats(0, 1e6)
spans = st.builds(
    lambda learner, what, start, more, version, cancelled: Span(learner, what, start, start + more, version, cancelled),
    st.integers(0, 100), st.sampled_from(WHAT), times, times, st.integers(0, 10**6), st.booleans(),
)  # fmt: skip
LOG = RunLog(
    run={"strategy": "k-sync:2", "learners": 2},
    spans=(Span(0, "compute", 0.0, 1.5, 0), Span(1, "compute", 0.0, 1.5, 0, cancelled=True)),
)


@given(st.lists(spans, max_size=8))
def test_a_log_is_read_back_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, some: list[Span]) -> None:
    path = tmp_path_factory.mktemp("log") / "run.jsonl"
    decisions = ({"event": "joined 0 @0.0", "commands": ["send 0"], "why": ["all \u2028 are \x85 there"]},)
    log = RunLog(run={"strategy": "ring", "seed": 7}, spans=tuple(some), decisions=decisions)
    write_log(path, log)
    assert read_log(path) == log


def test_the_same_log_gives_the_same_bytes_and_leaves_nothing_else(tmp_path: Path) -> None:
    write_log(tmp_path / "a", LOG)
    write_log(tmp_path / "b", LOG)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 3: not JSON"),
        ("[1]", "line 3: expected an object"),
        ('{"kind":"spam"}', "line 3: expected a line of kind 'span' or 'decision'; got 'spam'"),
        ('{"kind":"span","learner":0,"wat":"compute"}', "line 3: a span has no 'wat'; did you mean 'what'"),
        ('{"kind":"span","learner":true}', "line 3: 'learner' is missing or wrong: True"),
        (
            '{"kind":"span","learner":0,"what":"nap","start_s":0,"end_s":1,"version":0,"cancelled":false}',
            "line 3: a span is one of",
        ),
    ],
)
def test_a_wrong_line_is_named_with_its_number(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "run.jsonl"
    write_log(path, RunLog(run={}, spans=LOG.spans[:1]))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(LogError, match=says):
        read_log(path)


def test_a_log_that_cannot_be_written_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write_log(path, LOG)
    before = path.read_bytes()
    wrong = (
        RunLog(run={}, spans=(Span(0, "nap", 0, 1, 0),)),
        RunLog(run={"kind": "mine"}),
        RunLog(run={"format": 7}),
        RunLog(run={}, spans=(Span(0, "wait", 0, 1, 0, cancelled=1),)),  # type: ignore[arg-type]  # on purpose
        RunLog(run={}, spans=(Span(1.5, "wait", 0, 1, 0),)),  # type: ignore[arg-type]  # on purpose
    )
    for log in wrong:
        with pytest.raises(RequestError):
            write_log(path, log)
    assert path.read_bytes() == before
    blocked = tmp_path / "folder"
    blocked.mkdir()
    with pytest.raises(OSError, match="folder"):
        write_log(blocked, LOG)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["folder", "run.jsonl"]


def test_other_formats_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="cannot be read"):
        read_log(tmp_path / "nowhere")
    (tmp_path / "old").write_text('{"kind":"run","format":99}\n')
    with pytest.raises(LogError, match="format 99; this version reads format 1"):
        read_log(tmp_path / "old")
    (tmp_path / "empty").write_text("")
    with pytest.raises(LogError, match="is empty"):
        read_log(tmp_path / "empty")


@pytest.mark.parametrize(
    "span",
    [
        Span(0, "sleep", 0, 1, 0),
        Span(0, "wait", 2, 1, 0),
        Span(0, "wait", -1, 1, 0),
        Span(0, "wait", 0, float("nan"), 0),
        Span(-1, "wait", 0, 1, 0),
        Span(0, "wait", 0, 1, -1),
    ],
)
def test_an_impossible_span_is_refused(span: Span) -> None:
    with pytest.raises(RequestError):
        check_span(span)


def test_the_chrome_form_has_one_named_thread_a_learner_and_microseconds(tmp_path: Path) -> None:
    events = chrome_trace(LOG.spans)["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "learner 0", 1: "learner 1"}
    bars = [e for e in events if e["ph"] == "X"]
    assert [(b["ts"], b["dur"], b["name"]) for b in bars] == [
        (0.0, 1.5e6, "compute v0"),
        (0.0, 1.5e6, "compute v0 (cancelled)"),
    ]
    write_chrome_trace(tmp_path / "t.json", LOG.spans)
    assert json.loads((tmp_path / "t.json").read_text()) == chrome_trace(LOG.spans)


def test_a_trace_of_several_hosts_has_a_process_for_each(tmp_path: Path) -> None:
    spans = [Span(learner, "compute", 0.0, 1.0, 0) for learner in range(3)]
    write_chrome_trace(tmp_path / "trace.json", spans, name="run", hosts=("a", "a", "b"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert names == {0: "run, a", 1: "run, b"}
    assert [one["pid"] for one in events if one["ph"] == "X"] == [0, 0, 1]
