"""Spans and the run log: one format for real and for simulated runs.

A log is JSON lines. The first line describes the run, each further line is a decision of a policy or a span:

    {"kind": "run", "format": 1, "strategy": "k-async:4", ...}
    {"kind": "decision", "event": "pushed 2 t7 v3 n1 @1.25", "commands": ["apply t7", "send 2"], "why": [...]}
    {"kind": "span", "learner": 2, "what": "compute", "start_s": 0.0, "end_s": 1.25, "version": 3, "cancelled": false}

A span of a pipeline also has a label, the action that was computed: {..., "label": "1F3"}.

Laws: what `write_log` wrote, `read_log` gives back, and the same log gives the same bytes. One reader: strict, it
refuses the first line that is wrong and names it; lenient, it skips such lines and counts them. `chrome_trace` gives
the trace-event form that Perfetto and chrome://tracing open, `text_rows` a
drawing for a terminal. `pushed_spans` finds the span that made each push.
"""

from __future__ import annotations

import errno
import json
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from offbeat.errors import LogError, RequestError, nearest
from offbeat.policies.events import Pushed
from offbeat.policies.replay import LATEST_S, Decision
from offbeat.runs.untrusted import JsonLines, UnusableFile

FORMAT = 1
MOST_LEARNERS = 1_000_000
WHAT = ("compute", "send", "wait", "apply", "evaluate")


class Span(NamedTuple):
    """One bar of a timeline: what a learner did, in seconds since the run's start.

    `version` is the version of the parameters it worked on. A cancelled span was given up at `end_s`. `label` is the
    action of a pipeline, where it is one.
    """

    learner: int
    what: str
    start_s: float
    end_s: float
    version: int
    cancelled: bool = False
    label: str = ""


def check_span(span: Span) -> Span:
    """The span itself, or a `RequestError` that names what is wrong with it."""
    for (key, kind), value in zip(_FIELDS.items(), span, strict=True):
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise RequestError(f"'{key}' is missing or wrong: {value!r}")
    if span.what not in WHAT:
        raise RequestError(f"a span is one of {', '.join(WHAT)}; got '{span.what}'{nearest(span.what, WHAT)}")
    if not 0 <= span.start_s <= span.end_s < LATEST_S:  # NaN is not in any order
        raise RequestError(f"a span needs 0 <= start_s <= end_s < {LATEST_S:g}; got {span.start_s} and {span.end_s}")
    if not 0 <= span.learner < MOST_LEARNERS or not 0 <= span.version < 2**53:
        raise RequestError(f"learner and version are 0 or more, and bounded; got {span.learner} and {span.version}")
    return span


def read_span(record: Mapping[str, Any]) -> Span:
    """The span that a record of a log says; a `RequestError` if it says none."""
    for key in record:
        if key not in _FIELDS:
            raise RequestError(f"a span has no '{key}'{nearest(key, _FIELDS)}")
    given = (record.get(key, "" if key == "label" else None) for key in _FIELDS)
    return check_span(Span(*given))


_FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "learner": int, "what": str, "start_s": (int, float), "end_s": (int, float), "version": int, "cancelled": bool,
    "label": str,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLog:
    """What `run` says of itself (strategy, learners, seed, ...), its spans and its decisions, in the order written.

    `run` and the decisions are JSON data: text, numbers, lists and objects. A decision is an event of a policy with the
    commands that answered it; `policies.replay.read_decision` reads one.
    """

    run: Mapping[str, Any]
    spans: tuple[Span, ...] = ()
    decisions: tuple[Mapping[str, Any], ...] = ()


def write_log(path: Path, log: RunLog) -> None:
    """Write the log, replacing what was there only when all of it is written; a failure leaves nothing behind."""
    for reserved in ("kind", "format"):
        if reserved in log.run:
            raise RequestError(f"a run must not set '{reserved}'; the log sets it")
    writer = LogWriter(path, log.run)
    try:
        for decision in log.decisions:
            writer.decision(decision)
        for span in log.spans:
            writer.span(span)
        writer.close()
    except BaseException:
        writer.give_up()
        raise


class LogWriter:
    """A log that is written while the run goes on; it is under its name when all of it is there.

    `after`: one that was begun before is continued from there (`position`); what comes after that is forgotten.
    """

    def __init__(self, path: Path, run: Mapping[str, Any], *, after: int = 0) -> None:
        self.path = path
        self._unfinished = path.with_name(path.name + ".unfinished")
        head = _line({"kind": "run", "format": FORMAT, **run})
        self._file = self._unfinished.open("r+" if after else "w", encoding="utf-8")
        if not after:
            self._file.write(head)
        elif self.position() < after:
            raise OSError(errno.EIO, "it was cut off")
        else:
            self._file.truncate(after)
            self._file.seek(0, os.SEEK_END)

    def position(self) -> int:
        """How long it is, all of it written."""
        self._file.flush()
        return os.fstat(self._file.fileno()).st_size

    def decision(self, record: Mapping[str, Any]) -> None:
        self._file.write(_line({"kind": "decision", **record}))

    def span(self, span: Span) -> None:
        record = check_span(span)._asdict()
        if not span.label:
            del record["label"]
        self._file.write(_line({"kind": "span", **record}))

    def flush(self) -> None:
        """What was written can be read by others from now on."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()
        self._unfinished.replace(self.path)

    def leave(self) -> None:
        """As it is: another writer goes on with it, or begins anew."""
        self._file.close()

    def give_up(self) -> None:
        """Leave nothing behind."""
        self._file.close()
        self._unfinished.unlink(missing_ok=True)


def read_log(path: Path) -> RunLog:
    """Read a log strictly: a `LogError` names the line that is wrong."""
    lines = JsonLines(path, strict=True)
    try:
        run, spans, decisions = read_lines(lines, lambda record: record)
    except UnusableFile as file:
        raise LogError(f"{path}: {file.why}") from None
    if not lines.number:
        raise LogError(f"{path} is empty: a log starts with a line of kind 'run'")
    return RunLog(run=run, spans=tuple(spans), decisions=tuple(decisions))


D = TypeVar("D")


def read_lines(
    lines: JsonLines, decision: Callable[[Mapping[str, Any]], D]
) -> tuple[Mapping[str, Any], list[Span], list[D]]:
    """What the lines of a log say, in their order: of the run (nothing where the first line does not describe it), its
    spans and its decisions. `decision` makes what is kept of a decision's record, or raises `RequestError`.

    `UnusableFile` where it is a log of another format.
    """
    run: Mapping[str, Any] = {}
    spans: list[Span] = []
    decisions: list[D] = []
    for record in lines:
        kind = record.pop("kind", None)
        try:
            if kind == "run" and lines.number == 1:
                written = record.pop("format", None)
                if written != FORMAT or isinstance(written, bool):
                    raise UnusableFile(lines.path, f"format {written!r}; this version reads format {FORMAT}")
                run = record
            elif lines.number == 1 and lines.strict:
                raise RequestError("a log starts with a line of kind 'run'")
            elif kind == "span":
                spans.append(read_span(record))
            elif kind == "decision":
                decisions.append(decision(record))
            else:
                raise RequestError(f"expected a line of kind 'span' or 'decision'; got {kind!r}")
        except RequestError as error:
            lines.skip(str(error))
    return run, spans, decisions


# --- other forms of spans -------------------------------------------------------------------------------------------


def chrome_trace(
    spans: Iterable[Span], *, name: str = "offbeat", process: int = 0, hosts: Sequence[str] = ()
) -> dict[str, Any]:
    """The spans as a trace-event object: one thread a learner, times in microseconds.

    The events of several runs can stand in one trace, if each has a `process` of its own; a run of several `hosts` has
    as many.
    """
    return {"traceEvents": list(_trace_events(spans, name, process, hosts=hosts)), "displayTimeUnit": "ms"}


def _trace_events(
    spans: Iterable[Span], name: str, first: int, learners: Sequence[str] = (), hosts: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """One by one: a learner is named before its first span. A process of the trace is the run, or one of its hosts."""
    order = list(dict.fromkeys(hosts)) or [""]
    for at, host in enumerate(order):
        told = f"{name}, {host}" if host else name
        yield {"ph": "M", "pid": first + at, "name": "process_name", "args": {"name": told}}
    named: set[int] = set()
    for span in map(check_span, spans):
        process = first + (order.index(hosts[span.learner]) if span.learner < len(hosts) else 0)
        if span.learner not in named:
            named.add(span.learner)
            for key, value in (
                ("thread_name", {"name": dict(enumerate(learners)).get(span.learner, f"learner {span.learner}")}),
                ("thread_sort_index", {"sort_index": span.learner}),
            ):
                yield {"ph": "M", "pid": process, "tid": span.learner, "name": key, "args": value}
        yield {
            "ph": "X",
            "pid": process,
            "tid": span.learner,
            "name": f"{span.label or span.what} v{span.version}" + (" (cancelled)" if span.cancelled else ""),
            "cat": span.what,
            "ts": span.start_s * 1e6,
            "dur": (span.end_s - span.start_s) * 1e6,
            "args": {"version": span.version, "cancelled": span.cancelled},
        }


def write_chrome_trace(
    path: Path, spans: Iterable[Span], *, name: str = "offbeat", learners: Sequence[str] = (), hosts: Sequence[str] = ()
) -> None:
    """Event by event: however many spans there are, they are not in memory together. `learners` are their names, and
    `hosts` those of the host of each, where there are several."""
    with path.open("w", encoding="utf-8") as file:
        file.write('{"traceEvents": [')
        for number, event in enumerate(_trace_events(spans, name, 0, learners, hosts)):
            file.write((", " if number else "") + json.dumps(event, allow_nan=False))
        file.write('], "displayTimeUnit": "ms"}')


def names_in(path: Path, key: str = "names") -> Sequence[str]:
    """The names of the learners in a log that was written here, where they have names; or those of their `hosts`."""
    with path.open("rb") as file:
        try:
            named = json.loads(file.readline()).get(key)
        except (ValueError, AttributeError):
            return ()
    return tuple(map(str, named)) if isinstance(named, list) else ()


def stream_spans(path: Path) -> Iterator[Span]:
    """The spans of a log that was written here, one by one; other lines are not looked at. `LogError` for a wrong one.

    However long the log is, it is never in memory.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.startswith(_SPAN):
                try:
                    record = json.loads(line)
                    del record["kind"]
                    yield read_span(record)
                except (ValueError, RequestError) as error:
                    raise LogError(f"{path}, line {number}: {error}") from None


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"


_SPAN = b'{"kind":"span",'  # as `_line` writes it
_FILL = {"compute": "█", "send": "─", "wait": "·", "apply": "▒", "evaluate": "▚"}
_CANCELLED = "░"


class Piece(NamedTuple):
    """Some characters of a row; `version` is -1 where nothing was computed."""

    text: str
    version: int


def text_rows(spans: Sequence[Span], *, width: int, end_s: float | None = None) -> dict[int, list[Piece]]:
    """Spans as rows of text, one a learner, as textbooks draw them: `width` characters from 0 to `end_s` (default: the
    last end).

        learner 0 |0███████░░░1██████████2███|      0, 1, 2: version at which a minibatch was begun
        learner 1 |0████████████·1███████2███|      ░ cancelled work, · waiting, ─ sending

    A row is made of pieces, so that whoever prints it can colour each by its version.
    """
    end = max((span.end_s for span in spans), default=0.0) if end_s is None else end_s
    per_s = width / end if end else 0.0
    found: dict[int, list[Piece]] = {}
    for learner in sorted({span.learner for span in spans}):
        cells = [(" ", -1)] * width
        for span in sorted((one for one in spans if one.learner == learner), key=lambda one: one.start_s):
            first, last = round(span.start_s * per_s), round(span.end_s * per_s)
            fill = _CANCELLED if span.cancelled else _FILL[span.what]
            version = span.version if span.what == "compute" else -1
            for at in range(max(0, first), min(width, last)):
                label = span.what == "compute" and at == first
                cells[at] = (str(span.version)[-1] if label else fill, version)
        found[learner] = [
            Piece("".join(text for text, _ in some), version) for version, some in groupby(cells, key=itemgetter(1))
        ]
    return found


# --- which span made which push ---------------------------------------------------------------------------------------

# A log has both, and does not say which belongs to which: a push is of the last minibatch that its learner had finished
# when it arrived, and that no push before it was of.


def pushed_spans(spans: Sequence[Span], pushes: Iterable[Pushed]) -> dict[int, int]:
    """By ticket, the place of the span. A push of which no minibatch is in the log is left out."""
    ends: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
    for place, span in enumerate(spans):
        if span.what == "compute" and not span.cancelled:
            ends[span.learner].append((span.end_s, place))
    for some in ends.values():
        some.sort()
    found: dict[int, int] = {}
    taken = set()
    for push in pushes:
        at = bisect_right(ends[push.learner], (push.at_s, len(spans))) - 1
        while at >= 0 and ends[push.learner][at][1] in taken:
            at -= 1
        if at >= 0:
            found[push.ticket] = ends[push.learner][at][1]
            taken.add(found[push.ticket])
    return found


def minibatches_by_span(spans: Sequence[Span], decisions: Iterable[Decision], push_every: int) -> Mapping[int, int]:
    """By the place of a span that was pushed, how many minibatches it holds, where learners push after several.

    It is as many as the push has stretches of samples: the last one of an epoch may hold fewer.
    """
    stretches = {one.event: len(one.batch) for one in decisions if isinstance(one.event, Pushed)}
    places = pushed_spans(spans, stretches)
    return {
        places[push.ticket]: min(push_every, many) or push_every
        for push, many in stretches.items()
        if push.ticket in places
    }
