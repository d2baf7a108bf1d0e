"""Spans and the run log: one format for real and for simulated runs.

A log is JSON lines. The first line describes the run, each further line is a decision of a policy or a span:

    {"kind": "run", "format": 1, "strategy": "k-async:4", ...}
    {"kind": "decision", "event": "pushed 2 t7 v3 n1 @1.25", "commands": ["apply t7", "send 2"], "why": [...]}
    {"kind": "span", "learner": 2, "what": "compute", "start_s": 0.0, "end_s": 1.25, "version": 3, "cancelled": false}

Law: what `write_log` wrote, `read_log` gives back, and the same log gives the same bytes. `chrome_trace` gives the
trace-event form that Perfetto and chrome://tracing open.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.errors import LogError, RequestError, nearest

FORMAT = 1
WHAT = ("compute", "send", "wait", "apply", "evaluate")


class Span(NamedTuple):
    """One bar of a timeline: what a learner did, in seconds since the run's start.

    `version` is the version of the parameters it worked on. A cancelled span was given up at `end_s`.
    """

    learner: int
    what: str
    start_s: float
    end_s: float
    version: int
    cancelled: bool = False


def check_span(span: Span) -> Span:
    """The span itself, or a `RequestError` that names what is wrong with it."""
    whole = isinstance(span.learner, int) and isinstance(span.version, int) and isinstance(span.cancelled, bool)
    if not whole or isinstance(span.learner, bool) or isinstance(span.version, bool):
        raise RequestError(f"learner and version are whole numbers, cancelled is true or false; got {span}")
    if span.what not in WHAT:
        raise RequestError(f"a span is one of {', '.join(WHAT)}; got '{span.what}'{nearest(str(span.what), WHAT)}")
    if not (math.isfinite(span.start_s) and math.isfinite(span.end_s) and 0 <= span.start_s <= span.end_s):
        raise RequestError(f"a span needs 0 <= start_s <= end_s; got {span.start_s} and {span.end_s}")
    if span.learner < 0 or span.version < 0:
        raise RequestError(f"learner and version are 0 or more; got {span.learner} and {span.version}")
    return span


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLog:
    """What `run` says of itself (strategy, learners, seed, ...), its spans and its decisions, in the order written.

    `run` and the decisions are JSON data: text, numbers, lists and objects. A decision is an event of a policy with the
    commands that answered it; `policies.replay` reads them.
    """

    run: Mapping[str, Any]
    spans: tuple[Span, ...] = ()
    decisions: tuple[Mapping[str, Any], ...] = ()


def write_log(path: Path, log: RunLog) -> None:
    """Write the log, replacing what was there only when all of it is written; a failure leaves nothing behind."""
    for reserved in ("kind", "format"):
        if reserved in log.run:
            raise RequestError(f"a run must not say '{reserved}': the log does")
    lines = [_line({"kind": "run", "format": FORMAT, **log.run})]
    lines += [_line({"kind": "decision", **decision}) for decision in log.decisions]
    lines += [_line({"kind": "span", **check_span(span)._asdict()}) for span in log.spans]
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        unfinished.write_text("".join(lines), encoding="utf-8")
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


class LogWriter:
    """A log that is written while the run goes on; it is under its name when all of it is there."""

    def __init__(self, path: Path, run: Mapping[str, Any]) -> None:
        self.path = path
        self._unfinished = path.with_name(path.name + ".unfinished")
        self._file = self._unfinished.open("w", encoding="utf-8")
        self._file.write(_line({"kind": "run", "format": FORMAT, **run}))

    def decision(self, record: Mapping[str, Any]) -> None:
        self._file.write(_line({"kind": "decision", **record}))

    def span(self, span: Span) -> None:
        self._file.write(_line({"kind": "span", **check_span(span)._asdict()}))

    def close(self) -> None:
        self._file.close()
        self._unfinished.replace(self.path)


def read_log(path: Path) -> RunLog:
    """Read a log; a `LogError` names the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise LogError(f"cannot read the log {path}: {error}") from None
    if lines == [""]:
        raise LogError(f"{path} is empty: a log starts with a line of kind 'run'")
    records = [_record(path, number, line) for number, line in enumerate(lines, start=1)]
    head = records[0]
    if head.pop("kind", None) != "run":
        raise LogError(f"{path}, line 1: a log starts with a line of kind 'run'")
    written = head.pop("format", None)
    if written != FORMAT or isinstance(written, bool):
        raise LogError(f"{path}: format {written!r}; this version reads format {FORMAT}")
    spans: list[Span] = []
    decisions: list[Mapping[str, Any]] = []
    for number, record in enumerate(records[1:], start=2):
        kind = record.pop("kind", None)
        if kind == "span":
            spans.append(_span(path, number, record))
        elif kind == "decision":
            decisions.append(record)
        else:
            raise LogError(f"{path}, line {number}: expected a line of kind 'span' or 'decision'; got {kind!r}")
    return RunLog(run=head, spans=tuple(spans), decisions=tuple(decisions))


def chrome_trace(spans: Iterable[Span], *, name: str = "offbeat", process: int = 0) -> dict[str, Any]:
    """The spans as a trace-event object: one thread a learner, times in microseconds.

    The events of several runs can stand in one trace, if each has a `process` of its own.
    """
    events: list[dict[str, Any]] = [{"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}]
    bars: list[dict[str, Any]] = []
    learners: set[int] = set()
    for span in spans:
        check_span(span)
        learners.add(span.learner)
        bars.append(
            {
                "ph": "X",
                "pid": process,
                "tid": span.learner,
                "name": f"{span.what} v{span.version}" + (" (cancelled)" if span.cancelled else ""),
                "cat": span.what,
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": {"version": span.version, "cancelled": span.cancelled},
            }
        )
    for learner in sorted(learners):
        for key, value in (
            ("thread_name", {"name": f"learner {learner}"}),
            ("thread_sort_index", {"sort_index": learner}),
        ):
            events.append({"ph": "M", "pid": process, "tid": learner, "name": key, "args": value})
    return {"traceEvents": events + bars, "displayTimeUnit": "ms"}


def write_chrome_trace(path: Path, spans: Iterable[Span], *, name: str = "offbeat") -> None:
    path.write_text(json.dumps(chrome_trace(spans, name=name), allow_nan=False), encoding="utf-8")


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LogError(f"{path}, line {number}: not JSON ({error})") from None
    if not isinstance(record, dict):
        raise LogError(f"{path}, line {number}: expected an object; got {line[:40]}")
    return record


_FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "learner": int, "what": str, "start_s": (int, float), "end_s": (int, float), "version": int, "cancelled": bool,
}  # fmt: skip


def _span(path: Path, number: int, record: dict[str, Any]) -> Span:
    where = f"{path}, line {number}"
    for key in record:
        if key not in _FIELDS:
            raise LogError(f"{where}: a span has no '{key}'{nearest(key, _FIELDS)}")
    for key, kind in _FIELDS.items():
        value = record.get(key)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise LogError(f"{where}: '{key}' is missing or wrong: {value!r}")
    try:
        return check_span(Span(**record))
    except (RequestError, OverflowError) as error:
        raise LogError(f"{where}: {error}") from None
