"""offbeat watch: a training that runs in another shell, shown as it shows itself.

All is read from the run's folder: live.json, which the run replaces while it works, and metrics.jsonl. Laws: nothing is
written there, and the run does not notice; what is shown is what the run has heard, in the same order, so that bars and
rates are the same, half a second later. Whether it still runs is told by the lock on its folder and by its process: a
file stays when a run is killed. What learners print, and runs in virtual time, cannot be watched.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from offbeat.commands.base import Command, console, json_argument, print_json, say
from offbeat.commands.progress import Progress, Record
from offbeat.commands.view import (
    PlainView,
    View,
    evaluation_table,
    fact_lines,
    heading_lines,
    live_lines,
    summary,
    to_text,
    view_for,
)
from offbeat.errors import OffbeatError, RequestError
from offbeat.train.disk import is_alive
from offbeat.train.rundir import FOLDER, RunDir, is_held

LOOK_S = 0.2  # from look to look
FRESH_S = 10.0  # a run writes that often, and more; its process may be out of sight, in another container
TALLEST = 60  # lines of a picture that is printed once

STARTING, RUNNING, ENDED, FAILED, KILLED, NOTHING = "starting", "running", "ended", "failed", "killed", "nothing"


class Look(NamedTuple):
    """How a run is, and the snapshot that says so."""

    state: str
    live: Mapping[str, Any]

    @property
    def is_over(self) -> bool:
        return self.state not in (STARTING, RUNNING)


def look_at(run: RunDir, now_s: float | None = None) -> Look:
    held = is_held(run.path)  # first: who lets go has written its last words before
    live = run.read_live()
    if live is None:
        return Look(STARTING if held else NOTHING, {})
    if live.get("over"):
        return Look(FAILED if live.get("failed") or not live.get("end") else ENDED, live)
    pid, at_s = live.get("pid"), live.get("at_s") or 0.0
    there = isinstance(pid, int) and pid > 0 and is_alive(pid)
    if held and (there or (time.time() if now_s is None else now_s) - at_s < FRESH_S):
        return Look(RUNNING, live)
    return Look(ENDED if live.get("end") else KILLED, live)


def find_run(path: Path) -> RunDir:
    """The run in this folder; of a folder with runs, the newest that is running, or else the newest."""
    if (path / "config.json").exists():
        return RunDir(path)
    inside = [RunDir(one.parent) for one in path.glob("*/config.json")] if path.is_dir() else []
    looks = [(look_at(run), run) for run in inside]
    known = [(not look.is_over, _age(run), run) for look, run in looks if look.state != NOTHING]
    if not known:
        wrong = "is neither the folder of a run nor has one in it" if path.is_dir() else "is not there"
        raise RequestError(f"{path} {wrong}: name the folder of a run that offbeat train has made")
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

    def records(self, look: Look) -> Iterator[Record]:
        """What is new. The clock stands at each record's own time, and then at this look's."""
        live = look.live
        begin = _mapping(live.get("begin"))
        if begin and live.get("begun_s") != self._begun_s:  # torchrun may start it again
            self._begun_s = live.get("begun_s")
            self._heard_s, self.evaluations, self._seen = {}, [], {}
            self._clock.now_s = self._begun_s or self._clock.now_s
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

    def _evaluated(self, look: Look) -> Iterator[Record]:
        """No further than the snapshot: what is done of an epoch is counted from its beginning, as told there."""
        most = look.live.get("update")
        if self.evaluations and most == self._update and not look.is_over:
            return
        self._update = most
        found = [record for record in self._run.read_metrics() if record.get("kind") == "evaluated"]
        before = most is None and look.live["begin"].get("resumed")  # they are of the stretch before this one
        if not (look.is_over or before):
            found = [record for record in found if (record.get("update") or 0) <= (most or 0)]
        new, self.evaluations = found[len(self.evaluations) :], found
        yield from new


_ONCE = ("saved", "end", "energy")


def _mapping(told: Any) -> Mapping[str, Any]:
    return told if isinstance(told, dict) else {}


# --- the command --------------------------------------------------------------------------------------------------


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        type=Path,
        nargs="?",
        default=Path(FOLDER),
        metavar="RUN",
        help=f"the folder of a run, or a folder with runs: the newest that is running (default: {FOLDER})",
    )
    parser.add_argument("--once", action="store_true", help="print how far it is, and end")
    json_argument(parser)


def _run(given: argparse.Namespace) -> None:
    run = find_run(given.run)
    if run.is_simulated():
        raise RequestError(f"{run.path} was trained in virtual time, which cannot be watched; read its summary.txt")
    look = look_at(run)
    if look.state == NOTHING:
        raise RequestError(
            f"{run.path} has no live.json: it has not begun, or an older offbeat has trained it; read its summary.txt"
        )
    try:
        if given.json:
            print_json(as_json(run, look))
        elif given.once:
            print_once(run, look)
        else:
            follow(run, sys.stdout)
    except (KeyError, TypeError, AttributeError) as error:
        raise OffbeatError(f"{run.live} is not as a run writes it: {type(error).__name__}: {error}") from error


def follow(run: RunDir, out: TextIO) -> None:
    """Until the run is over. `OffbeatError` if it did not come to its end."""
    clock = Clock()
    state = Progress(clock)
    feed = Feed(run, clock, state)
    view: View = view_for(out, live=True, state=state) if out.isatty() else PlainView(_writer(out), state)
    try:
        while not (look := look_at(run)).is_over:
            _hand_on(feed, look, view.hear)
            view.hear({"kind": "turn"})
            time.sleep(LOOK_S)
        _hand_on(feed, look, view.hear)
    except BaseException:  # Ctrl-C, or nobody reads any more: the run has not ended, and nothing is said of its end
        view.close(leaving=True)
        raise
    view.close()
    if look.state in (FAILED, KILLED, NOTHING):
        raise OffbeatError(_fate(run, look))


def _hand_on(feed: Feed, look: Look, hear: Callable[[Record], None]) -> None:
    for record in feed.records(look):
        hear(record)


def _fate(run: RunDir, look: Look) -> str:
    if look.state == FAILED:
        return str(look.live.get("failed") or f"{run.path} ended without a result")
    if look.state == NOTHING:
        return f"{run.path} ended before it began"
    saved = run.checkpoints.is_dir() and any(run.checkpoints.glob("update-*"))
    onward = f"; go on from the last checkpoint with: offbeat train --resume {run.path}" if saved else ""
    return f"{run.path} was killed: its process {look.live.get('pid')} is gone{onward}"


def _writer(out: TextIO) -> Callable[[str], None]:
    """Of a reader that has gone it is told, unlike in a training: there is nothing else to do here."""

    def write(line: str) -> None:
        encoding = out.encoding or "utf-8"
        print(line.encode(encoding, "backslashreplace").decode(encoding), file=out, flush=True)

    return write


def _state(run: RunDir, look: Look) -> tuple[Progress, Feed]:
    clock = Clock()
    progress = Progress(clock)
    feed = Feed(run, clock, progress)
    _hand_on(feed, look, progress.hear)
    return progress, feed


def print_once(run: RunDir, look: Look) -> None:
    """A still picture."""
    progress, _ = _state(run, look)
    out = console()
    width = min(out.width, 120)
    lines = heading_lines(progress.begin, width) if progress.begin else []
    if look.is_over:
        table = evaluation_table(progress, width, len(progress.evaluations))
        lines += [*table, [], *fact_lines(summary(progress))]
    else:
        lines += live_lines(progress, width, TALLEST)
    for line in lines:
        out.print(to_text(line, ascii_only=not out.encoding.startswith("utf")), soft_wrap=True)
    for note in look.live.get("notes") or ():
        say(out, f"note: {note['text']}", style="dim")
    if look.state in (FAILED, KILLED):
        say(out, _fate(run, look), style="bold red")


def as_json(run: RunDir, look: Look) -> dict[str, Any]:
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
        "evaluations": feed.evaluations,
    }


COMMAND = Command(
    summary="look on while a training runs, from another shell",
    about="""Show a training that runs in another shell, or has ended, from what it writes into its folder: live on a
terminal until the run is over, in plain lines through a pipe. The training does not notice; Ctrl-C leaves it alone. Of
a run that has ended its summary is printed. If the run was killed or has failed, that is said and the exit code is 1.
What learners print is not shown, and runs in virtual time (offbeat simulate --recipe) cannot be watched.""",
    examples=("watch runs/digits", "watch runs/digits --once"),
    arguments=_arguments,
    run=_run,
)
