"""offbeat watch: a training that runs in another shell, shown as it shows itself.

All is read from the run's folder: live.json, which the run replaces while it works, and metrics.jsonl. Laws: nothing is
written there, and the run does not notice; what is shown is what the run has heard, in the same order, so that bars and
rates are the same, half a second later. Whether it still runs is told by the lock on its folder and by its process: a
file stays when a run is killed. A folder may be anybody's: text out of it has nothing that a terminal would obey, and
what no run writes is an error in one line. What learners print, and runs in virtual time, cannot be watched.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from offbeat.commands.base import Command, Terminal, answer, option, print_line
from offbeat.commands.progress import Progress, Record
from offbeat.commands.view import (
    PlainView,
    View,
    evaluation_line,
    evaluation_table,
    fact_lines,
    heading_lines,
    live_lines,
    summary,
    to_text,
    view_for,
)
from offbeat.errors import OffbeatError, RequestError
from offbeat.processes.signals import signals_deferred, terminable
from offbeat.runs.disk import is_alive
from offbeat.runs.run_folder import FOLDER, RunDir, is_locked
from offbeat.runs.untrusted import UnusableFile, count, plain, read_json

LOOK_S = 0.2  # from look to look
FRESH_S = 10.0  # a run that is well is not silent for longer; its process may be out of sight, in another container
PATIENCE = 3  # nor for so many times what it said itself: a slow disk makes it write less often
LONGEST = 4000  # letters of a text
MOST_LEARNERS = 100_000
DEEPEST = 8  # what is in what, in a record
TALLEST = 60  # lines of a picture that is printed once

STARTING, RUNNING, ENDED, FAILED, KILLED, NOTHING = "starting", "running", "ended", "failed", "killed", "nothing"


class RunState(NamedTuple):
    """How a run is, and the snapshot that says so."""

    state: str
    live: Mapping[str, Any]

    @property
    def is_over(self) -> bool:
        return self.state not in (STARTING, RUNNING)


def read_state(run: RunDir, now_s: float | None = None) -> RunState:
    held = is_locked(run.path)  # first: who lets go has written its last words before
    found = run.read_live()
    if found is None:
        return RunState(STARTING if held else ENDED if _has_result(run) else NOTHING, {})
    live: dict[str, Any] = safe(found)
    if live.get("over"):
        return RunState(FAILED if live.get("failed") or not live.get("end") else ENDED, live)
    pid, silent_s = live.get("pid") or 0, (time.time() if now_s is None else now_s) - (live.get("at_s") or 0.0)
    there = pid > 0 and is_alive(pid)
    if held and (there or silent_s < max(FRESH_S, PATIENCE * (live.get("next_s") or 0.0))):
        return RunState(RUNNING, live)
    return RunState(ENDED if live.get("end") else KILLED, live)


def _has_result(run: RunDir) -> bool:
    """Whether it came to its end, by what it left; not what the stretch before a resume has left."""
    if run.is_simulated():
        return False
    with suppress(OSError):
        began = run.config.stat().st_mtime_ns
        found = [path.stat() for path in (run.summary, run.weights) if path.is_file()]
        return any(one.st_size and one.st_mtime_ns >= began for one in found)
    return False


def safe(value: Any) -> Any:
    """A JSON value whose text has no control characters, and whose numbers can be reckoned with (None for others)."""
    return plain(value, DEEPEST, letters=LONGEST, items=MOST_LEARNERS)


def _metrics(run: RunDir) -> list[dict[str, Any]]:
    return [safe(record) for record in run.read_metrics() if record.get("kind") == "evaluated"]


def find_run(path: Path) -> RunDir:
    """The run in this folder; of a folder with runs, the newest that is running, or else the newest."""
    if (path / "config.json").exists():
        return RunDir(path)
    inside = [RunDir(one.parent) for one in path.glob("*/config.json")] if path.is_dir() else []
    looks = [(read_state(run), run) for run in inside]
    known = [(not look.is_over, _age(run), run) for look, run in looks if look.state != NOTHING]
    if not known:
        wrong = "is not the folder of a run and contains none" if path.is_dir() else "does not exist"
        raise RequestError(f"{safe(str(path))} {wrong}; expected the folder of a run of offbeat train")
    return max(known, key=lambda one: one[:2])[2]


def _age(run: RunDir) -> float:
    return max((path.stat().st_mtime for path in (run.config, run.live) if path.exists()), default=0.0)


class Clock:
    """Turned by hand: what was heard before this look has its own time."""

    def __init__(self) -> None:
        self.now_s = time.time()

    def __call__(self) -> float:
        return self.now_s


class Feed:
    """The records that a run has heard, out of its snapshots: each once, in an order that could have been.

    Progress of long ago goes into the state by itself: rates and bars need it, and nobody wants to read it.
    """

    def __init__(self, run: RunDir, clock: Clock, state: Progress) -> None:
        self._run, self._clock, self._state = run, clock, state
        self._begun_s: float | None = None
        self._heard_s: dict[int, float] = {}  # of each learner, when the latest that was handed on was heard
        self.evaluations: list[dict[str, Any]] = []
        self._update: int | None = None  # of the snapshot by which they were read
        self._noted = 0
        self._seen: dict[str, Any] = {}  # the latest of its kind that was handed on

    def records(self, look: RunState) -> Iterator[Record]:
        """What is new. The clock stands at each record's own time, and then at this look's."""
        live = look.live
        begin = _mapping(live.get("begin"))
        if begin and live.get("begun_s") != self._begun_s:  # torchrun may start it again
            self._begun_s = live.get("begun_s")
            self._heard_s, self.evaluations, self._seen = {}, [], {}
            self._clock.now_s = self._begun_s or self._clock.now_s
            if (begin.get("learners") or 0) > MOST_LEARNERS:
                raise ValueError(f"{begin['learners']} learners")
            yield {**begin, "kind": "begin"}
        if begin:
            for old in ("first", "before"):
                for record in self._progress(live.get(old)):
                    self._state.hear(record)
            yield from self._evaluated(look)
            for record in self._progress(live.get("progress")):
                if look.is_over:
                    self._state.hear(record)
                else:
                    yield record
        # What a run is told last is not older than this.
        self._clock.now_s = (live.get("at_s") if look.is_over else None) or time.time()
        notes = list(live.get("notes") or ())
        new, self._noted = (live.get("noted") or len(notes)) - self._noted, live.get("noted") or len(notes)
        yield from ({"kind": "note", "text": note["text"]} for note in notes[max(0, len(notes) - new) :])
        for name, record in {**_mapping(live.get("died")), **{name: live.get(name) for name in _ONCE}}.items():
            if record and self._seen.get(name) != record:
                self._seen[name] = record
                yield record

    def _progress(self, told: Any) -> Iterator[Record]:
        for record in sorted(_mapping(told).values(), key=lambda record: float(record["heard_s"])):
            if record["heard_s"] > self._heard_s.get(record["learner"], 0.0):
                self._heard_s[record["learner"]] = self._clock.now_s = record["heard_s"]
                yield record

    def _evaluated(self, look: RunState) -> Iterator[Record]:
        """No further than the snapshot: what is done of an epoch is counted from its beginning, as told there."""
        most = look.live.get("update")
        if self.evaluations and most == self._update and not look.is_over:
            return
        self._update = most
        found = _metrics(self._run)
        before = most is None and look.live["begin"].get("resumed")  # they are of the stretch before this one
        if not (look.is_over or before):
            found = [record for record in found if (record.get("update") or 0) <= (most or 0)]
        new, self.evaluations = found[len(self.evaluations) :], found
        yield from new


_ONCE = ("saved", "end", "energy")


def _mapping(told: Any) -> Mapping[str, Any]:
    return told if isinstance(told, dict) else {}


# --- the command --------------------------------------------------------------------------------------------------


def _run(given: argparse.Namespace) -> None:
    run = find_run(given.run)
    name = safe(str(run.path))
    if run.is_simulated():
        raise RequestError(f"{name} was trained in virtual time and cannot be watched; see its summary.txt")
    look = read_state(run)
    if look.state == NOTHING:
        raise RequestError(
            f"{name} has no live.json: the run has not started, or an older version of offbeat trained it; see its "
            "summary.txt"
        )
    try:
        if given.json or given.once:
            answer(given, as_json(run, look) if given.json else None, lambda out: print_once(out, run, look))
        else:
            with terminable():
                look = follow(run, sys.stdout)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        why = safe(f"{type(error).__name__}: {error}")
        raise OffbeatError(f"{name}/live.json is malformed: {why}") from error
    if look.state in (FAILED, KILLED, NOTHING):
        raise OffbeatError(_fate(run, look))


def follow(run: RunDir, out: TextIO) -> RunState:
    """Until the run is over; how it ended."""
    clock = Clock()
    state = Progress(clock)
    feed = Feed(run, clock, state)
    view: View | None = None
    try:
        with signals_deferred():  # until it can be closed
            # Of a reader that has gone it is told, unlike in a training: there is nothing else to do here.
            write = partial(print_line, out)
            view = view_for(out, live=True, state=state) if out.isatty() else PlainView(write, state)
        while not (look := read_state(run)).is_over:
            _hand_on(feed, look, view.hear)
            view.hear({"kind": "turn"})
            time.sleep(LOOK_S)
        _hand_on(feed, look, view.hear)
    except BaseException:  # Ctrl-C, or nobody reads any more: the run has not ended, and nothing is said of its end
        if view is not None:
            view.close(leaving=True)
        raise
    if look.state == ENDED and not look.live:
        view.close(leaving=True)  # what it has heard is not of the end
        for line in _left_lines(run):
            print_line(out, line)
    else:
        view.close()
    return look


def _hand_on(feed: Feed, look: RunState, hear: Callable[[Record], None]) -> None:
    for record in feed.records(look):
        hear(record)


def _fate(run: RunDir, look: RunState) -> str:
    name = safe(str(run.path))
    if look.state == FAILED:
        return str(look.live.get("failed") or f"{name} ended without a result")
    if look.state == NOTHING:
        return f"{name} ended before training started"
    saved = run.checkpoints.is_dir() and any(run.checkpoints.glob("update-*"))
    onward = f"; continue from the last checkpoint with: offbeat train --resume {name}" if saved else ""
    return f"{name} was killed: its process {look.live.get('pid')} is gone{onward}"


def _left_lines(run: RunDir) -> list[str]:
    """Of a run that has ended and left no live.json: its disk was full, or an older offbeat has trained it."""
    found, epochs = _metrics(run)[-1:], None
    with suppress(UnusableFile):
        train = read_json(run.config).get("train")
        epochs = count(train.get("epochs")) if isinstance(train, dict) else None
    epochs = epochs or max((record.get("epoch") or 0 for record in found), default=0)
    where = safe(str(run.summary if run.summary.is_file() else run.weights))
    return [
        *(evaluation_line(record, epochs) for record in found),
        f"the run has ended and left no live.json; see {where}",
    ]


def _state(run: RunDir, look: RunState) -> tuple[Progress, Feed]:
    clock = Clock()
    progress = Progress(clock)
    feed = Feed(run, clock, progress)
    _hand_on(feed, look, progress.hear)
    return progress, feed


def print_once(out: Terminal, run: RunDir, look: RunState) -> None:
    """A still picture."""
    progress, _ = _state(run, look)
    ascii_only = not out.encoding.startswith("utf")
    width = min(out.width, 120)
    lines = heading_lines(progress.begin, width) if progress.begin else []
    if look.state == ENDED and not look.live:
        lines += [[(line, "")] for line in _left_lines(run)]
    elif look.is_over:
        table = evaluation_table(progress, width, len(progress.evaluations))
        lines += [*table, [], *fact_lines(summary(progress))]
    else:
        lines += live_lines(progress, width, TALLEST)
    lines += [[(f"note: {note['text']}", "dim")] for note in look.live.get("notes") or ()]
    for line in lines:
        out.print(to_text(line, ascii_only=ascii_only), soft_wrap=True)


def as_json(run: RunDir, look: RunState) -> dict[str, Any]:
    progress, feed = _state(run, look)
    kept = ("begin", "progress", "notes", "died", "saved", "energy", "end", "failed", "pid", "at_s")
    return {
        "run_dir": str(run.path),
        "state": look.state,
        "epoch": progress.epoch if progress.begin else None,
        "epochs": progress.epochs if progress.begin else None,
        "done": progress.done,
        "elapsed_s": progress.elapsed_s if progress.begin else None,
        "left_s": None if look.is_over else progress.left_s,
        "loss": progress.loss,
        "samples_per_s": None if look.is_over else progress.samples_per_s,
        "wait_share": progress.wait_share,
        **{name: look.live.get(name) for name in kept},
        "evaluations": feed.evaluations if look.live else _metrics(run),
    }


COMMAND = Command(
    summary="follow a training run from another terminal",
    about="""Follow a training run from another terminal, by reading the files in its folder: a live view on a terminal,
plain lines in a pipe, until the run ends. Watching does not affect the run, and Ctrl-C stops only the view. For a
finished run, the summary is printed. If the run was killed or failed, a message says so and the exit code is 1, also
with --once and --json.
The output of the learners is not shown. Runs in virtual time (offbeat simulate --recipe) cannot be watched.""",
    examples=("watch runs/digits", "watch runs/digits --once"),
    options=(
        option(
            "run",
            read=Path,
            nargs="?",
            default=Path(FOLDER),
            metavar="RUN",
            help="folder of a run, or a folder with several runs: then the newest run in progress is shown "
            f"(default: {FOLDER})",
        ),
        option("--once", action="store_true", help="print the current state and exit"),
    ),
    run=_run,
)
