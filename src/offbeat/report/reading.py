"""The folders of runs, read as far as they can be.

    read_run(path)         -> RunRecord       config.json, metrics.jsonl, log*.jsonl, machine.json, energy*.json
    read_inputs(paths)     -> Inputs          folders of runs and JSON files of benchmarks, in the order given

Laws. What a folder holds never raises: each file that is missing, cut off, foreign or wrong is one sentence in
`problems`, and everything else is still used. A line of a log that cannot be read is skipped and counted. Only a path
that is not there, or a request of which nothing at all can be read, is refused. All text is clean (files.py), all
numbers are finite, and no time is negative.

What it must not know: torch (the typed configuration lives there: here it is plain JSON), and what the numbers mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.errors import RequestError
from offbeat.policies.events import EVENTS, Apply, Drop, Event, from_text
from offbeat.report import files
from offbeat.report.files import LABEL, Broken, clean, shorten
from offbeat.report.results import Result, read_result
from offbeat.runs.log import FORMAT, WHAT, Span

_LEG = re.compile(r"log(?:\.([1-9][0-9]{0,3}))?\.jsonl(\.unfinished)?")
_ENERGY = re.compile(r"energy(?:\.([1-9][0-9]{0,3}))?\.json")
_GIVE_UP = 1_000  # lines at the start of a log, none of which could be read: it is something else
_LARGEST_S = 1e12


class Decision(NamedTuple):
    """What a policy was told, and what it said of gradients; words to learners are left out."""

    event: Event
    applies: tuple[tuple[int, ...], ...] = ()  # tickets of each update
    drops: tuple[int, ...] = ()
    minibatches: int = 0  # of a push, where the log says of which stretches of the data it is


class Evaluation(NamedTuple):
    """A line of metrics.jsonl; None where it does not say. `dropped` are samples, up to then."""

    update: int | None
    seconds: float | None
    accuracy: float | None
    test_samples: int | None  # of which it is a share
    loss: float | None
    samples: int | None
    dropped: int | None
    epoch: float | None
    warning: str = ""  # that the training does not learn
    sent_bytes: int | None = None  # by all learners, up to then
    received_bytes: int | None = None
    wait_share: float | None = None  # of the learners' time


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """A stretch of a run: the first, or one after a resume. Times begin anew in each."""

    number: int
    run: Mapping[str, Any] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()
    decisions: tuple[Decision, ...] = ()
    finished: bool = True
    unread: int = 0  # lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """What one leg took; joules are None where nothing could measure them. `reasons` say what is not in them."""

    leg: int
    seconds: float | None
    joules: float | None
    sources: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What was found in a run's folder. `name` is whole, `label` is short enough for a chart."""

    name: str
    label: str
    config: Mapping[str, Any] = field(default_factory=dict)
    metrics: tuple[Evaluation, ...] = ()
    legs: tuple[Leg, ...] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)
    energy: tuple[Energy, ...] = ()
    simulated: bool = False
    finished: bool = True
    problems: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.config and not self.metrics and not any(leg.spans or leg.decisions for leg in self.legs)


class Inputs(NamedTuple):
    """All that a report is made of."""

    runs: tuple[RunRecord, ...]
    results: tuple[Result, ...]
    problems: tuple[str, ...]  # with the name of what they are of


# --- a run's folder -----------------------------------------------------------------------------------------------


def read_run(path: Path) -> RunRecord:
    """All of a folder that can be used."""
    problems: list[str] = []

    def say(text: str) -> None:
        problems.append(clean(text))

    name = clean(path.name or path.resolve().name or "run")
    entries = _entries(path, say)
    config = _object(path, "config.json", entries, say, needed=True)
    metrics = _metrics(path, entries, say)
    legs = _legs(path, entries, say)
    machine = _object(path, "machine.json", entries, say, needed=False)
    energy = _energies(path, entries, say)
    finished = not legs or legs[-1].finished  # an earlier stretch that broke off was gone on with
    if not finished:
        say("the run is unfinished: it is still running, or was stopped from outside")
    return RunRecord(
        name=name,
        label=shorten(name, LABEL),
        config=config,
        metrics=metrics,
        legs=legs,
        machine=machine,
        energy=energy,
        simulated=any(leg.run.get("simulated") is True for leg in legs),
        finished=finished,
        problems=tuple(problems),
    )


def _entries(path: Path, say: Callable[[str], None]) -> list[str]:
    try:
        return sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        say(f"the folder cannot be read: {error.strerror or type(error).__name__}")
        return []


def _object(
    path: Path, name: str, entries: Sequence[str], say: Callable[[str], None], *, needed: bool
) -> dict[str, Any]:
    if name not in entries:
        if needed:
            say(f"{name}: is missing")
        return {}
    try:
        return files.read_json(path / name)
    except Broken as broken:
        say(str(broken))
        return {}


def _metrics(path: Path, entries: Sequence[str], say: Callable[[str], None]) -> tuple[Evaluation, ...]:
    """In order of time; a line that does not say when it was measured cannot be drawn, and is left out."""
    if "metrics.jsonl" not in entries:
        say("metrics.jsonl: is missing: there is no accuracy and no time to it")
        return ()
    found: list[Evaluation] = []
    unread = _Unread("metrics.jsonl")
    try:
        for line in files.open_lines(path / "metrics.jsonl"):
            record = unread.heard(line)
            if record is None:
                continue
            read = _evaluation(record)
            backwards = bool(found) and read.seconds is not None and read.seconds < (found[-1].seconds or 0.0)
            if read.seconds is None or backwards:
                unread.count()
            else:
                found.append(read)
    except Broken as broken:
        say(str(broken))
    unread.tell(say)
    return tuple(found)


def _evaluation(record: Mapping[str, Any]) -> Evaluation:
    dropped = record.get("dropped")
    many = [files.count(one) for one in dropped.values()] if isinstance(dropped, dict) else None
    return Evaluation(
        update=files.count(record.get("update")),
        seconds=files.from_zero(record.get("seconds")),
        accuracy=files.share(record.get("accuracy")),
        test_samples=files.count(record.get("test_samples")),
        loss=files.number(record.get("loss")),
        samples=files.count(record.get("samples")),
        dropped=None if many is None else sum(one or 0 for one in many),
        epoch=files.from_zero(record.get("epoch")),
        warning=files.text(record.get("warning")),
        sent_bytes=files.count(record.get("sent_bytes")),
        received_bytes=files.count(record.get("received_bytes")),
        wait_share=files.share(record.get("wait_share")),
    )


def _energies(path: Path, entries: Sequence[str], say: Callable[[str], None]) -> tuple[Energy, ...]:
    found = []
    for name in entries:
        matched = _ENERGY.fullmatch(name)
        data = _object(path, name, entries, say, needed=False) if matched else {}
        if matched and data:
            reasons = data.get("not_measured")
            told = [one for one in reasons if isinstance(one, str)] if isinstance(reasons, list) else []
            joules = files.from_zero(data.get("joules"))
            if joules is None and data.get("joules") is not None:
                say(f"{name}: 'joules' is not a number of joules")
            found.append(
                Energy(
                    leg=int(matched[1] or 1),
                    seconds=files.from_zero(data.get("seconds")),
                    joules=joules,
                    sources=_sources(data.get("sources")),
                    reasons=tuple(told),
                )
            )
    return tuple(sorted(found, key=lambda one: one.leg))


def _sources(given: Any) -> tuple[str, ...]:
    """The names of counters."""
    told = [files.text(one.get("name")) for one in given if isinstance(one, dict)] if isinstance(given, list) else []
    return tuple(filter(None, told))


# --- logs ---------------------------------------------------------------------------------------------------------


class _Unread:
    """Lines that could not be read, of a file of lines."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines = self.bad = self.first = 0

    def heard(self, line: bytes | None) -> dict[str, Any] | None:
        """The object of a line; a line that holds none is counted."""
        self.lines += 1
        record = None if line is None else files.parse(line)
        if isinstance(record, dict):
            return record
        if line is None or line.strip():
            self.count()
        return None

    def count(self) -> None:
        self.bad += 1
        self.first = self.first or self.lines

    def tell(self, say: Callable[[str], None]) -> None:
        if self.bad:
            of = f"{self.bad:,} of {self.lines:,} line{'' if self.lines == 1 else 's'}"
            say(f"{self.name}: {of} could not be read; first: line {self.first:,}")


def _legs(path: Path, entries: Sequence[str], say: Callable[[str], None]) -> tuple[Leg, ...]:
    """The finished log of a stretch is taken before an unfinished one."""
    names: dict[int, tuple[str, bool]] = {}
    for name in entries:
        matched = _LEG.fullmatch(name)
        if matched is not None:
            number = int(matched[1] or 1)
            if number not in names or names[number][1]:
                names[number] = name, matched[2] is not None
    if not names:
        say("log.jsonl: is missing: there is no timeline")
    legs = [_leg(path / names[number][0], number, not names[number][1], say) for number in sorted(names)]
    return tuple(leg for leg in legs if leg is not None)


def _leg(path: Path, number: int, finished: bool, say: Callable[[str], None]) -> Leg | None:
    unread = _Unread(path.name)
    head: dict[str, Any] = {}
    spans: list[Span] = []
    decisions: list[Decision] = []
    try:
        for line in files.open_lines(path):
            record = unread.heard(line)
            if record is not None:
                kind = record.get("kind")
                if kind == "span":
                    span = _span(record)
                    if span is None:
                        unread.count()
                    else:
                        spans.append(span)
                elif kind == "decision":
                    decision = _decision(record)
                    if decision is None:
                        unread.count()
                    else:
                        decisions.append(decision)
                elif kind == "run" and unread.lines == 1:
                    written = record.get("format")
                    if written != FORMAT or isinstance(written, bool):
                        say(f"{path.name}: is of format {written!r}, and format {FORMAT} is read here")
                        return None
                    head = files.plain(record)
                else:
                    unread.count()
            if unread.bad == unread.lines == _GIVE_UP:
                say(f"{path.name}: is not a run log: none of its first {_GIVE_UP:,} lines could be read")
                return None
    except Broken as broken:
        say(str(broken))
        return None
    if not unread.lines:
        say(f"{path.name}: is empty")
    unread.tell(say)
    return Leg(
        number=number,
        run=head,
        spans=tuple(spans),
        decisions=tuple(decisions),
        finished=finished,
        unread=unread.bad,
    )


def _span(record: Mapping[str, Any]) -> Span | None:
    """As `trace.check_span` has it, without an exception for each."""
    learner, version = record.get("learner"), record.get("version")
    start, end, what = record.get("start_s"), record.get("end_s"), record.get("what")
    cancelled = record.get("cancelled", False)
    if type(learner) is not int or type(version) is not int or not 0 <= learner < 1_000_000:
        return None
    if not isinstance(start, float | int) or not isinstance(end, float | int) or what not in WHAT:
        return None
    if not 0 <= start <= end < _LARGEST_S or not 0 <= version < 2**53 or type(cancelled) is not bool:
        return None  # NaN is not in any order
    return Span(learner, what, float(start), float(end), version, cancelled)


def _decision(record: Mapping[str, Any]) -> Decision | None:
    said, commands = record.get("event"), record.get("commands")
    if not isinstance(said, str) or not isinstance(commands, list) or len(said) > 500:
        return None
    try:
        event = from_text(said)
        if not isinstance(event, EVENTS) or not 0 <= event.at_s < _LARGEST_S:
            return None
        applies: tuple[tuple[int, ...], ...] = ()
        drops: tuple[int, ...] = ()
        for text in commands:
            if text.startswith("apply"):
                command = from_text(text)
                assert isinstance(command, Apply)
                applies = (*applies, command.tickets)
            elif text.startswith("drop"):
                command = from_text(text)
                assert isinstance(command, Drop)
                drops = (*drops, command.ticket)
    except (RequestError, AssertionError, AttributeError, OverflowError):
        return None
    batch = record.get("batch")
    return Decision(event, applies, drops, len(batch) if isinstance(batch, list) else 0)


# --- all that was asked for ---------------------------------------------------------------------------------------


def read_inputs(paths: Sequence[Path]) -> Inputs:
    """Everything, with names told apart. `RequestError` for a path that is not there, or if nothing could be read."""
    if not paths:
        raise RequestError("name the folder of a run, or the JSON file of a benchmark")
    runs: list[tuple[Path, RunRecord]] = []
    results: list[Result] = []
    unusable: list[str] = []
    for path in paths:
        if path.is_dir():
            run = read_run(path)
            if run.is_empty:
                unusable += [f"{run.name}: {problem}" for problem in run.problems]
            else:
                runs.append((path, run))
        elif path.is_file() and path.name.endswith(".json"):
            result = read_result(path)
            if result.kind:
                results.append(result)
            else:
                unusable += result.problems
        elif path.exists():
            raise RequestError(f"{path}: expected the folder of a run, or the .json file of a benchmark")
        else:
            raise RequestError(f"{path} is not there; name the folder of a run, or the .json file of a benchmark")
    if not runs and not results:
        raise RequestError("nothing could be read: " + "; ".join(unusable))
    told = _told_apart(runs)
    problems = [f"{run.label}: {problem}" for run in told for problem in run.problems]
    problems += [problem for result in results for problem in result.problems]
    return Inputs(told, tuple(results), (*problems, *unusable))


def _told_apart(runs: Sequence[tuple[Path, RunRecord]]) -> tuple[RunRecord, ...]:
    """Runs of the same name get that of the folder above too, and where that is not enough a number."""
    labels = [run.label for _, run in runs]
    names = [run.name for _, run in runs]
    for at, (path, run) in enumerate(runs):
        if labels.count(run.label) > 1:
            above = clean(path.resolve().parent.name)
            names[at] = clean(f"{above}/{run.name}") if above else run.name
    seen: set[str] = set()
    told = []
    for (_, run), name in zip(runs, names, strict=True):
        label, number = shorten(name, LABEL), 1
        while label in seen:
            number += 1
            label = f"{shorten(name, LABEL - 6)} #{number}"
        seen.add(label)
        told.append(replace(run, name=name if number == 1 else f"{name} #{number}", label=label))
    return tuple(told)
