"""The folder of a run, read as far as it can be.

    read_run(path)         -> RunRecord       config.json, metrics.jsonl, log*.jsonl, machine.json, energy*.json

Laws. What a folder holds never raises: each file that is missing, cut off, foreign or wrong is one sentence in
`problems`, and everything else is still used. A line of a log that cannot be read is skipped and counted. All text is
clean (untrusted.py), all numbers are finite, and no time is negative.

What it must not know: torch (the typed configuration lives there: here it is plain JSON), and what the numbers mean.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.policies.replay import Decision, read_decision
from offbeat.runs import untrusted
from offbeat.runs.log import Span, read_lines
from offbeat.runs.run_folder import LogFile, RunDir

_ENERGY = re.compile(r"energy(?:\.([1-9][0-9]{0,3}))?\.json")


class HostRecord(NamedTuple):
    """A host of a run that has several: bytes that it sent to the others and received from them, how fast it does while
    it does, and how far its clock is ahead of the first host's."""

    name: str
    learners: int | None
    sent_bytes: int | None
    received_bytes: int | None
    sends_per_s: float | None
    receives_per_s: float | None
    clock_offset_s: float | None
    clock_uncertainty_s: float | None


class LinkRecord(NamedTuple):
    """Bytes from a host to another, and their share of all that went between hosts."""

    source: str
    target: str
    size_bytes: int | None
    share: float | None


class EvaluationRecord(NamedTuple):
    """A line of metrics.jsonl; None where it does not say. `dropped` are samples, up to then."""

    seconds: float
    update: int | None = None
    accuracy: float | None = None
    loss: float | None = None
    test_samples: int | None = None  # of which the accuracy is a share
    samples: int | None = None
    dropped: int | None = None
    epoch: float | None = None
    warning: str = ""  # that the training does not learn
    sent_bytes: int | None = None  # by all learners, up to then
    received_bytes: int | None = None
    wait_share: float | None = None  # of the learners' time
    slow_links: tuple[str, ...] = ()  # between hosts, in words
    hosts: tuple[HostRecord, ...] = ()  # where there are several
    learner_hosts: tuple[str, ...] = ()  # that of each learner, where they have a parameter server
    links: tuple[LinkRecord, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSegment:
    """One start-to-end of a run: the first, or one after a resume. Times begin anew in each."""

    number: int
    run: Mapping[str, Any] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()
    decisions: tuple[Decision, ...] = ()
    finished: bool = True
    unread: int = 0  # lines


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentEnergy:
    """What one segment took; joules are None where nothing could measure them. `reasons` say what is not in them."""

    segment: int
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
    metrics: tuple[EvaluationRecord, ...] = ()
    segments: tuple[RunSegment, ...] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)
    energy: tuple[SegmentEnergy, ...] = ()
    simulated: bool = False
    finished: bool = True
    problems: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.config and not self.metrics and not any(one.spans or one.decisions for one in self.segments)


def read_run(path: Path) -> RunRecord:
    """All of a folder that can be used."""
    return _Reader(path).record()


class _Reader:
    """Reads a folder, and keeps a sentence on each thing that is wrong with it."""

    def __init__(self, path: Path) -> None:
        self._run = RunDir(path)
        self._problems: list[str] = []
        try:
            self._entries = {entry.name for entry in path.iterdir()}
        except OSError as error:
            self._entries = set()
            self._say(f"the folder cannot be read: {error.strerror or type(error).__name__}")

    def _say(self, problem: str) -> None:
        if problem:
            self._problems.append(untrusted.clean(problem))

    def record(self) -> RunRecord:
        path = self._run.path
        name = untrusted.clean(path.name or path.resolve().name or "run")
        config = self._object(self._run.config, missing="is missing")
        metrics = self._metrics()
        segments = self._segments()
        machine = self._object(self._run.machine)
        measured = sorted(int(match[1] or 1) for name in self._entries if (match := _ENERGY.fullmatch(name)))
        energy = tuple(one for number in measured if (one := self._energy(number)) is not None)
        finished = not segments or segments[-1].finished  # an earlier segment that broke off was gone on with
        if not finished:
            self._say("the run is unfinished: it is still running or was killed")
        return RunRecord(
            name=name,
            label=untrusted.shorten(name, untrusted.LABEL),
            config=config,
            metrics=metrics,
            segments=segments,
            machine=machine,
            energy=energy,
            simulated=any(one.run.get("simulated") is True for one in segments),
            finished=finished,
            problems=tuple(self._problems),
        )

    def _is_there(self, path: Path, missing: str) -> bool:
        there = path.name in self._entries
        if not there and missing:
            self._say(f"{path.name}: {missing}")
        return there

    def _object(self, path: Path, *, missing: str = "") -> dict[str, Any]:
        if not self._is_there(path, missing):
            return {}
        try:
            return untrusted.read_json(path)
        except untrusted.UnusableFile as file:
            self._say(str(file))
            return {}

    def _metrics(self) -> tuple[EvaluationRecord, ...]:
        """In order of time; a line that does not say when it was measured cannot be drawn, and is left out."""
        if not self._is_there(self._run.metrics, "is missing, so accuracy and time to target are unknown"):
            return ()
        found: list[EvaluationRecord] = []
        lines = untrusted.JsonLines(self._run.metrics)
        try:
            for record in lines:
                seconds = untrusted.from_zero(record.get("seconds"))
                if seconds is None or (found and seconds < found[-1].seconds):
                    lines.skip("it has no time, or is out of order")
                else:
                    found.append(_evaluation(seconds, record))
        except untrusted.UnusableFile as file:
            self._say(str(file))
        self._say(lines.problem)
        return tuple(found)

    def _segments(self) -> tuple[RunSegment, ...]:
        logs = self._run.logs()
        if not logs:
            self._say(f"{self._run.log(1).name}: is missing, so there is no timeline")
        return tuple(one for log in logs if (one := self._segment(log)) is not None)

    def _segment(self, log: LogFile) -> RunSegment | None:
        lines = untrusted.JsonLines(log.path)
        try:
            run, spans, decisions = read_lines(lines, read_decision)
        except untrusted.UnusableFile as file:
            self._say(str(file))
            return None
        if not lines.number:
            self._say(f"{log.path.name}: is empty")
        self._say(lines.problem)
        return RunSegment(
            number=log.segment,
            run=untrusted.plain(run),
            spans=tuple(spans),
            decisions=tuple(decisions),
            finished=log.finished,
            unread=lines.skipped,
        )

    def _energy(self, segment: int) -> SegmentEnergy | None:
        path = self._run.energy(segment)
        data = self._object(path)
        if not data:
            return None
        joules = untrusted.from_zero(data.get("joules"))
        if joules is None and data.get("joules") is not None:
            self._say(f"{path.name}: 'joules' is not a number of joules")
        names = [
            untrusted.text(one.get("name")) for one in untrusted.items(data.get("sources")) if isinstance(one, dict)
        ]
        return SegmentEnergy(
            segment=segment,
            seconds=untrusted.from_zero(data.get("seconds")),
            joules=joules,
            sources=tuple(filter(None, names)),
            reasons=tuple(one for one in untrusted.items(data.get("not_measured")) if isinstance(one, str)),
        )


def _evaluation(seconds: float, record: Mapping[str, Any]) -> EvaluationRecord:
    dropped = record.get("dropped")
    many = [untrusted.count(one) for one in dropped.values()] if isinstance(dropped, dict) else None
    return EvaluationRecord(
        seconds=seconds,
        update=untrusted.count(record.get("update")),
        accuracy=untrusted.share(record.get("accuracy")),
        test_samples=untrusted.count(record.get("test_samples")),
        loss=untrusted.number(record.get("loss")),
        samples=untrusted.count(record.get("samples")),
        dropped=None if many is None else sum(one or 0 for one in many),
        epoch=untrusted.from_zero(record.get("epoch")),
        warning=untrusted.text(record.get("warning")),
        sent_bytes=untrusted.count(record.get("sent_bytes")),
        received_bytes=untrusted.count(record.get("received_bytes")),
        wait_share=untrusted.share(record.get("wait_share")),
        slow_links=tuple(filter(None, map(untrusted.text, untrusted.items(record.get("slow_links"))))),
        hosts=tuple(_host(one) for one in untrusted.items(record.get("hosts")) if isinstance(one, dict)),
        learner_hosts=tuple(map(untrusted.text, untrusted.items(record.get("learner_hosts")))),
        links=tuple(_link(one) for one in untrusted.items(record.get("links")) if isinstance(one, dict)),
    )


def _host(record: Mapping[str, Any]) -> HostRecord:
    return HostRecord(
        name=untrusted.text(record.get("name")),
        learners=untrusted.count(record.get("learners")),
        sent_bytes=untrusted.count(record.get("sent_bytes")),
        received_bytes=untrusted.count(record.get("received_bytes")),
        sends_per_s=untrusted.from_zero(record.get("sends_per_s")),
        receives_per_s=untrusted.from_zero(record.get("receives_per_s")),
        clock_offset_s=untrusted.number(record.get("clock_offset_s")),
        clock_uncertainty_s=untrusted.from_zero(record.get("clock_uncertainty_s")),
    )


def _link(record: Mapping[str, Any]) -> LinkRecord:
    return LinkRecord(
        source=untrusted.text(record.get("source")),
        target=untrusted.text(record.get("target")),
        size_bytes=untrusted.count(record.get("bytes")),
        share=untrusted.share(record.get("share")),
    )
