"""The folder of a run, and who writes what into it.

    runs/digits-cnn-20261116-101500/
        config.json            the whole configuration: enough to run again
        machine.json           what it was trained on
        metrics.jsonl          a line for each evaluation
        log.jsonl              the run log: spans, and each decision of the policy; log.2.jsonl after a resume
        trace.json             the spans for Perfetto or chrome://tracing
        checkpoints/           the last ones
        weights.safetensors    the weights at the end
        summary.txt            what came of it, in words
        energy.json            joules, as far as they could be measured; energy.2.json after a resume
        live.json              how far it is, for `offbeat watch`; at the end, how it ended
        stacks.txt             where all learners were when one made no progress for too long
        losses.jsonl           a line for each host whose loss has cost updates

The learner who leads writes, and the others hand it their parts: those of a parameter server through the folder, which
they share on one host; those of an all-reduce through their process group, so that other hosts need no folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.errors import OffbeatError, RequestError
from offbeat.runs.disk import cut_to_lines, opened_folder, read_file, remove, replace_file
from offbeat.runs.untrusted import JsonLines, UnusableFile, parse, read_bytes

FOLDER = "runs"
# Fields of the configurations that version 0.1 wrote. They are read; whoever writes one now is told the new name.
RENAMED = {"train.rate": "train.lr", "train.rate_batch": "train.lr_batch"}
TIME_STAMP = "%Y%m%d-%H%M%S"  # as `time.strftime` has it
TARGET = "target accuracy reached"  # why a run has ended, before its last epoch
MOST_LIVE_BYTES = 16 << 20  # of live.json: many times what thousands of learners tell


def new_run_dir(name: str, where: Path | None, stamp: str) -> Path:
    """A new folder: the one that is named, or one of the run's name and the time (`TIME_STAMP`)."""
    if where is not None:
        check_free(where)
    first = Path(FOLDER) / f"{name}-{stamp}"
    for path in [first, *(Path(f"{first}-{attempt}") for attempt in range(2, 100))] if where is None else [where]:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=where is not None)  # it holds data and weights of the user's
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise RequestError(f"cannot create the run's folder {path}: {error.strerror}") from None
    raise OffbeatError(f"cannot find a free name for a run in {FOLDER}")


def resume_command(where: Path | str, why: str = "") -> str:
    """What continues a run that has ended for this reason."""
    return f"offbeat train --resume {where}" + (" --train.stop-at 0" if why == TARGET else "")


def check_free(where: Path, *, resumes: bool = True) -> None:
    """`RequestError` if a new run cannot have this folder."""
    if where.exists() and (not where.is_dir() or any(where.iterdir())):
        onward = f", or continue that run with --resume {where}" if resumes else ""
        raise RequestError(f"{where} already exists; choose a new folder{onward}")


ATTEMPTS, RETRY_S = 3, 0.02  # somebody who only asks whether a folder is locked has it for a moment


class FolderLock:
    """A run's folder is one run's at a time: a lock on the folder itself, which goes with the process."""

    def __init__(self, path: Path, sleep: Callable[[float], object]) -> None:
        self._descriptor = -1
        self._owner = os.getpid()
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            for left in reversed(range(ATTEMPTS)):
                try:
                    fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not left:
                        raise RequestError(f"{path} is in use by another run") from None
                    sleep(RETRY_S)
        except OSError as error:
            raise RequestError(f"cannot use the folder {path}: {error.strerror}") from None

    def release(self) -> None:
        """A fork has closed what it inherited, and its numbers are others': only the owner lets go."""
        if self._descriptor >= 0 and os.getpid() == self._owner:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.release()


def is_locked(path: Path) -> bool:
    """Whether a run has this folder now. Who asks does not keep a run from taking it."""
    with suppress(OSError), opened_folder(path) as folder:
        try:
            fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: of several who ask, none sees another
        except BlockingIOError:
            return True
    return False


# The fields of live.json whose type is relied on. What is in a record is whoever's that shows it.
_LIVE: dict[str, type] = {
    **dict.fromkeys(("begin", "progress", "first", "before", "died", "saved", "energy", "end"), dict),
    **dict.fromkeys(("update", "noted", "pid"), int),
    **dict.fromkeys(("begun_s", "at_s", "next_s"), float),
    "notes": list,
    "failed": str,
    "over": bool,
}


def _is_a(kind: type, value: Any) -> bool:
    """Of numbers, those that one can reckon with. None is of every type."""
    if value is None or kind not in (int, float):
        return value is None or isinstance(value, kind)
    return isinstance(value, kind | int) and not isinstance(value, bool) and abs(value) < 2**53  # not of infinity


class Evaluated:
    """What the evaluations of a run say of it, whoever holds them. Times are of training, evaluation left out."""

    __slots__ = ()
    metrics: tuple[Mapping[str, Any], ...]  # an evaluation each, one or more

    @property
    def seconds(self) -> float:
        return float(self.metrics[-1]["seconds"])

    @property
    def updates(self) -> int:
        return int(self.metrics[-1]["update"])

    @property
    def samples(self) -> int:
        """Applied ones."""
        return int(self.metrics[-1]["samples"])

    @property
    def accuracy(self) -> float | None:
        found = self.metrics[-1].get("accuracy")
        return None if found is None else float(found)


class LogFile(NamedTuple):
    """The log of one segment of a run: the first, or one after a resume. An unfinished one may still be written."""

    segment: int
    path: Path
    finished: bool


_LOG = re.compile(r"log(?:\.([1-9][0-9]{0,3}))?\.jsonl(\.unfinished)?")


class RunDir:
    """The names in a run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.trace = path / "trace.json"
        self.checkpoints = path / "checkpoints"
        self.weights = path / "weights.safetensors"
        self.summary = path / "summary.txt"
        self.machine = path / "machine.json"
        self.live = path / "live.json"
        self.stacks = path / "stacks.txt"
        self.losses = path / "losses.jsonl"
        self._stop = path / ".stop"
        self._lost = path / ".lost"
        self._parts = path / ".parts"

    def log(self, segment: int) -> Path:
        """Of the first segment of the run, or of one after a resume (2, 3, ...)."""
        return self.path / ("log.jsonl" if segment == 1 else f"log.{segment}.jsonl")

    def energy(self, segment: int) -> Path:
        """As for the log."""
        return self.path / ("energy.json" if segment == 1 else f"energy.{segment}.json")

    def logs(self) -> list[LogFile]:
        """Those that are there, in order; where a segment has two, the finished one."""
        found: dict[int, LogFile] = {}
        with suppress(OSError):
            for path in sorted(self.path.iterdir()):  # log.jsonl comes before log.jsonl.unfinished
                if match := _LOG.fullmatch(path.name):
                    segment = int(match[1] or 1)
                    found.setdefault(segment, LogFile(segment, path, match[2] is None))
        return [found[segment] for segment in sorted(found)]

    def next_segment(self) -> int:
        return 1 + max((log.segment for log in self.logs()), default=0)

    def is_simulated(self) -> bool:
        """Whether it was trained in virtual time."""
        with suppress(UnusableFile):
            return next(iter(JsonLines(self.log(1))), {}).get("simulated") is True
        return False

    def forget_results(self) -> None:
        """What the run has left at an earlier end: it goes on. The summary first, since it says that all is there."""
        for path in (self.summary, self.trace, self.weights):
            path.unlink(missing_ok=True)

    # --- config -----------------------------------------------------------------------------------------------------

    def write_config(self, text: str) -> None:
        try:
            replace_file(self.config, text.encode(), durable=True)
        except OSError as error:
            raise RequestError(f"cannot write {self.config}: {error.strerror}") from None

    def read_config(self) -> str:
        """Its JSON; `train.config_files.config_of_run` makes a `Config` of it."""
        try:
            return read_bytes(self.config).decode("utf-8")
        except (OSError, UnicodeDecodeError):
            raise RequestError(f"{self.path} is not the folder of a run: it has no config.json") from None

    # --- metrics ----------------------------------------------------------------------------------------------------

    def add_metrics(self, record: Mapping[str, Any]) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """All whole lines: the last may be cut off where a run was killed."""
        if not self.metrics.is_file():
            return []
        try:
            return list(JsonLines(self.metrics))
        except UnusableFile as file:
            raise OffbeatError(f"{self.metrics}: {file.why}") from None

    def note_loss(self, record: Mapping[str, Any]) -> None:
        with self.losses.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def read_losses(self) -> list[dict[str, Any]]:
        """Of hosts: why, the update from which the run went on, and how many updates were lost."""
        with suppress(UnusableFile):
            return list(JsonLines(self.losses)) if self.losses.is_file() else []
        return []

    def forget_metrics_after(self, update: int) -> None:
        """What was measured after the checkpoint that the run goes on from is measured again."""
        kept = [record for record in self.read_metrics() if record.get("update", 0) <= update]
        replace_file(self.metrics, "".join(json.dumps(record) + "\n" for record in kept).encode())

    # --- how far it is ------------------------------------------------------------------------------------------------

    def write_live(self, text: str) -> None:
        """Whole, or not at all: who reads it meanwhile has the one before. `OSError` if it cannot be written."""
        replace_file(self.live, text.encode())

    def read_live(self) -> dict[str, Any] | None:
        """None where there is none, or no whole one. A field is left out if it is not of its type."""
        try:
            with opened_folder(self.path) as folder:
                content = read_file(self.live.name, folder, MOST_LIVE_BYTES)
        except OSError:
            return None
        found = parse(content) if len(content) <= MOST_LIVE_BYTES else None
        if not isinstance(found, dict):
            return None
        return {name: value for name, value in found.items() if name not in _LIVE or _is_a(_LIVE[name], value)}

    # --- the wish to stop, of ranks that keep step with each other ----------------------------------------------------

    def ask_to_stop(self, update: int) -> None:
        """After this update. Who is first says when."""
        try:
            self._stop.symlink_to(str(update))  # whole, only if there is none, and without a block of a full disk
        except FileExistsError:
            pass
        except OSError as error:
            raise OffbeatError(
                f"cannot stop all learners after the same update: cannot write {self._stop}: {error.strerror}"
            ) from None

    def stops_after(self) -> int | None:
        """The last update, if somebody wants to stop."""
        try:
            return int(self._stop.readlink().name)
        except FileNotFoundError:
            return None

    def forget_stop(self) -> None:
        self._stop.unlink(missing_ok=True)

    # --- learners that are gone, while the others go on ---------------------------------------------------------------

    def note_lost(self, learner: int) -> None:
        """By who has started it."""
        self._lost.mkdir(exist_ok=True)
        (self._lost / str(learner)).touch()

    def lost(self) -> set[int]:
        return {int(path.name) for path in self._lost.glob("*")}

    # --- parts that learners of a server hand to the one who leads ----------------------------------------------------

    def hand_in(self, pause: int, learner: int, part: bytes) -> None:
        self._parts.mkdir(exist_ok=True)
        replace_file(self._parts / f"{pause}-{learner}", part)

    def handed_in(self, pause: int) -> dict[int, bytes]:
        """The parts of a pause, by learner. They stay until the next: should who leads die, another reads them."""
        parts: dict[int, bytes] = {}
        for path in sorted(self._parts.glob("*")) if self._parts.is_dir() else []:
            found = re.fullmatch(r"(\d+)-(\d+)", path.name)
            if found is not None and int(found[1]) <= pause:
                if int(found[1]) == pause:
                    parts[int(found[2])] = path.read_bytes()
                else:
                    path.unlink(missing_ok=True)
        return parts

    def tidy(self) -> None:
        """Nothing stays that only a running run needs. A log that was cut off keeps its whole lines."""
        self.forget_stop()
        for path in (one for name in (".stop.*", ".*.unfinished") for one in self.path.glob(name)):
            path.unlink(missing_ok=True)
        for path in self.path.glob("log*.jsonl.unfinished"):
            if cut_to_lines(path):
                path.replace(path.with_suffix(""))
            else:
                path.unlink()
        remove(self._parts)
        remove(self._lost)
