"""The telemetry of a run: what it ran on, the energy it took, and how far it is, for whoever watches from outside.

    machine.json   when it begins
    live.json      while it runs, at most twice a second: the latest of what was heard, for `offbeat watch`
    energy.json    when its processes have ended: from before they were started to after the last has gone, so that
                   loading, evaluating and saving are in it; by torchrun's first rank, from its task to its last word

Laws: a file that cannot be written is told once, in a note, and training goes on. Telemetry takes less than a
thousandth of one core's time: what takes much is written less often, and so is what waits for a slow disk. Each
live.json says when the next one is due, and that is kept, so that silence can be told from death. Of a run that came to
its end no live.json stays that says otherwise. One process of a run writes it. Evaluations are in metrics.jsonl.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from offbeat.energy import Energy, Meter
from offbeat.machine import machine_facts
from offbeat.runs.run_folder import RunDir
from offbeat.train.config import Config
from offbeat.train.trainer import Report, device_of

EVERY_S = 0.5  # from one writing of live.json to the next, at the least
# Of a core, that writing it takes; half of what is promised: the first and the last are not put off.
MOST_SHARE = 0.0005
MOST_WAIT = 0.005  # of the time, that a slow disk is waited for
NOTES = 20  # that are kept

Record = Mapping[str, Any]


class Live:
    """What a watcher needs to show what the run itself shows: the fields of live.json."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {
            "begin": None,
            "begun_s": None,
            "progress": {},  # the latest, by learner, each with when it was heard
            "first": {},  # from which the pace is known
            "before": {},  # when the epoch under way began: what is done of it is counted from here
            "update": None,  # at the latest evaluation
            "notes": [],  # the last of them
            "noted": 0,  # all of them
            "died": {},
            **dict.fromkeys(("saved", "energy", "end")),  # the latest record of its kind
            "failed": None,
            "over": False,
            "pid": os.getpid(),
        }
        self._epoch = 0

    def hear(self, record: Record, now_s: float) -> None:
        told = self.told
        match record["kind"]:
            case "begin":
                self._epoch = record.get("epoch") or 0
                told |= {"begin": record, "begun_s": now_s}
            case "progress":
                self._reach(record.get("epoch") or 0)
                heard = told["progress"][record["learner"]] = {**record, "heard_s": now_s}
                told["first"].setdefault(record["learner"], heard)
                told["died"].pop(record["learner"], None)
            case "evaluated":
                self._reach(record.get("epoch") or 0)
                told["update"] = record.get("update")
            case "note":
                told["notes"] = [*told["notes"], record][-NOTES:]
                told["noted"] += 1
            case "died" if record.get("learner") is not None:
                told["died"][record["learner"]] = record
            case "saved" | "end" | "energy" as kind:
                told[kind] = record

    def _reach(self, epoch: int) -> None:
        if epoch > self._epoch:
            self._epoch, self.told["before"] = epoch, dict(self.told["progress"])

    def as_json(self, now_s: float, next_s: float = EVERY_S) -> str:
        """`next_s`: after so many seconds there will be another."""
        return json.dumps({**self.told, "at_s": now_s, "next_s": next_s}, allow_nan=False)


class Telemetry:
    """Keeps them from `with` to its end. Records come by `hear`, which hands them on."""

    def __init__(
        self,
        config: Config,
        run: RunDir,
        segment: int,
        hear: Report,
        *,
        meter: Meter | None = None,
        clock: Callable[[], float] = time.monotonic,
        worked: Callable[[], float] = time.thread_time,
    ) -> None:
        self._config, self._run, self._segment, self._hear = config, run, segment, hear
        self._clock, self._worked = clock, worked
        devices = {device_of(config.device, learner) for learner in range(config.processes)}
        gpus = sorted(device.index or 0 for device in devices if device.type == "cuda")  # as CUDA counts them
        self._meter = Meter(gpus) if meter is None else meter
        self._live = Live()
        self._due_s, self._next_s = 0.0, EVERY_S
        self._complained: set[str] = set()
        self._begun = False
        self.energy: Energy | None = None

    def __enter__(self) -> Self:
        config = self._config
        device = device_of(config.device, 0).type
        facts = machine_facts(torch=torch.__version__, device=device, threads=config.train.threads)
        self._write(self._run.machine, lambda: _write_json(self._run.machine, facts))
        self._show()
        return self

    def begin(self) -> None:
        """From now on energy is measured. Not before learners are forked: what reads a GPU's counters (NVML) does not
        survive a fork, and torch in the child would complain of it."""
        if not self._begun:
            self._begun = True
            self._meter.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.measure()
        self._live.told["over"] = True
        if error is not None:
            self._live.told["failed"] = str(error) if isinstance(error, Exception) else "ended immediately"
        if not self._show() and self._live.told["end"] is not None:
            with suppress(OSError):
                self._run.live.unlink(missing_ok=True)  # it says that the run goes on: who looks would think it killed
                self._show()  # and now there may be room

    def note_failure(self, why: str) -> None:
        """The run came to its end, and has failed all the same, unless this is empty."""
        self._live.told["failed"] = why or None

    def hear(self, record: Record) -> None:
        """Also `turn`, which says only that time goes on."""
        if self._begun:
            self._meter.tick()
        self._live.hear(record, time.time())
        self._hear(record)
        if self._clock() >= self._due_s:
            self._show()

    def measure(self) -> Energy:
        """What was burnt up to now, when it is asked for first: all that train have ended."""
        if self.energy is None:
            self.begin()
            self.energy = energy = self._meter.stop()
            path = self._run.energy(self._segment)
            self._write(path, lambda: _write_json(path, energy.as_json()))
            self.hear({"kind": "energy", **energy.as_json()})
        return self.energy

    def _show(self) -> bool:
        """Whether it could be written. What it took is known too late for this one's word: it puts off the one after
        the next."""
        began_s, before_s, next_s = self._clock(), self._worked(), self._next_s
        shown = self._write(self._run.live, lambda: self._run.write_live(self._live.as_json(time.time(), next_s)))
        ended_s, worked_s = self._clock(), self._worked() - before_s
        self._due_s = ended_s + next_s
        self._next_s = max(EVERY_S, worked_s / MOST_SHARE, (ended_s - began_s) / MOST_WAIT)
        return shown

    def _write(self, path: Path, write: Callable[[], None]) -> bool:
        try:
            write()
            return True
        except (OSError, ValueError, TypeError) as error:  # a disk that is full, a record that JSON cannot say
            if path.name not in self._complained:
                self._complained.add(path.name)
                why = error.strerror if isinstance(error, OSError) else error
                self._hear({"kind": "note", "text": f"cannot write {path}: {why}"})
            return False


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
