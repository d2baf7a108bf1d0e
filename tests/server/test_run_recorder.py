"""What the coordinator's process records of a run, from the messages alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offbeat.runs.log import Span, read_log
from offbeat.server.coordinator.coordinator import Coordinator
from offbeat.server.coordinator.run_recorder import RunRecorder
from offbeat.server.run_setting import RunSetting
from offbeat.server.wire import INPUT, Committed, Go, Push, ShardJob, Stop


def test_only_a_minibatch_that_was_interrupted_counts_as_stopped() -> None:
    recorder = RunRecorder(2)
    recorder.hear(Stop(0, 1, 1, began_s=1.0, ended_s=1.5), 1.6)
    recorder.hear(Stop(1, 1, 1), 1.6)  # cancelled before it began
    recorder.hear(Stop(0, 1, 1, began_s=1.0, ended_s=1.5), 1.7)  # said twice
    assert recorder.stopped == [(0, 0.5)]
    summary = json.loads(recorder.close(Coordinator(RunSetting(line="k-sync:1", learners=2))))
    assert summary["stopped"] == 1


class Recording:
    """A recorder with a log, and its spans when it is closed."""

    def __init__(self, path: Path) -> None:
        self.path, self.recorder = path, RunRecorder(1)
        self.recorder.open(path, {"strategy": "async"})

    def hear(self, message: INPUT, at_s: float) -> None:
        self.recorder.hear(message, at_s)

    def update(self, version: int, start_s: float, end_s: float) -> None:
        """The servers make a version; the job is said a second time."""
        for at_s in (start_s, (start_s + end_s) / 2):
            self.recorder.answered([ShardJob(0, version, "apply", version, 0, 1)], at_s)
        self.recorder.answered([Committed(0, version, 1)], end_s)

    def spans(self) -> list[Span]:
        self.recorder.close(None)
        return list(read_log(self.path).spans)


def _push(seq: int, began_s: float, ended_s: float) -> Push:
    return Push(0, 1, seq, seq - 1, began_s=began_s, ended_s=ended_s)


def _go(seq: int) -> Go:
    return Go(0, 1, seq, seq - 1, 0, pin=seq, pieces=((1, seq - 1),))


def test_between_two_minibatches_a_gradient_is_sent_waited_for_and_applied(tmp_path: Path) -> None:
    run = Recording(tmp_path / "log.jsonl")
    run.hear(_push(1, 1.0, 2.0), 2.25)
    run.update(1, 3.0, 3.5)
    run.recorder.answered([_go(2)], 3.5)
    run.hear(_push(2, 4.0, 5.0), 5.5)
    assert run.spans() == [
        Span(0, "compute", 1.0, 2.0, 0),
        Span(0, "send", 2.0, 2.25, 1),
        Span(0, "wait", 2.25, 3.0, 1),
        Span(0, "apply", 3.0, 3.5, 1),
        Span(0, "wait", 3.5, 4.0, 1),
        Span(0, "compute", 4.0, 5.0, 1),
    ]
    assert run.recorder.wait_s == [2.0], "the summary counts all of it as waiting"


def test_of_an_update_only_what_is_between_the_push_and_the_next_minibatch_counts(tmp_path: Path) -> None:
    run = Recording(tmp_path / "log.jsonl")
    run.hear(_push(1, 1.0, 2.0), 2.5)
    run.update(1, 2.25, 3.0)  # it was begun before the push was there
    run.recorder.answered([_go(2)], 3.0)
    run.hear(_push(2, 3.0, 4.0), 4.5)
    run.hear(_push(3, 4.25, 5.0), 5.0)  # it did not wait: the next begins while the gradient travels
    assert [(span.what, span.start_s, span.end_s) for span in run.spans() if span.what != "compute"] == [
        ("send", 2.0, 2.5),
        ("apply", 2.5, 3.0),
        ("send", 4.0, 4.25),
    ]


def test_a_pause_is_neither_waiting_nor_updating(tmp_path: Path) -> None:
    run = Recording(tmp_path / "log.jsonl")
    run.hear(_push(1, 1.0, 2.0), 2.25)
    run.update(1, 2.5, 3.0)
    run.recorder.pause(0, 4.0, 6.0, 1)
    run.recorder.answered([_go(2)], 6.0)
    run.hear(_push(2, 6.5, 7.0), 7.0)
    assert [(span.what, span.start_s, span.end_s) for span in run.spans() if span.what != "compute"] == [
        ("evaluate", 4.0, 6.0),
        ("send", 2.0, 2.25),
        ("wait", 2.25, 4.0),
        ("wait", 6.0, 6.5),
    ]
    assert run.recorder.wait_s == [pytest.approx(2.5)]
