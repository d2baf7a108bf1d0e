"""`offbeat train` as a process, without loading torch for each: it is a fork of the test's process.

A warden is forked, and from it the program, in a session and a folder of its own. The warden is where orphans go, so it
sees what is left behind when the program has ended. A blow is scripted at a point: the n-th time that somebody is
there, a signal goes out. Nothing is slept for, and every program is bounded in time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import pty
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
from torch import Tensor, nn

from offbeat import cli
from offbeat.processes.child import close_inherited
from offbeat.train import checkpoint, launch, results, trainer
from offbeat.train.reduced_trainer import ReducedTrainer
from offbeat.train.served_trainer import ServedTrainer
from offbeat.train.trainer import Trainer

LIMIT_S = 60.0  # ends only what hangs
LEFT_S = 5.0  # until what is left must have gone by itself
_PR_SET_CHILD_SUBREAPER = 36
EVERYBODY = "everybody"


# --- what is trained ----------------------------------------------------------------------------------------------


def norm_net(hidden: int = 24) -> nn.Module:
    """With chance (dropout) and with statistics of its own (batch norm)."""
    layers = (nn.Linear(64, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, 10))
    return nn.Sequential(nn.Flatten(), *layers)


def drop_net(hidden: int = 24) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, 10))


class Fails(nn.Module):
    """Prints, and raises in its n-th forward of a training; before the first there is a look at whether it works."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.layer, self.left = nn.Linear(64, 10), at

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            print(f"{self.left} to go", flush=True)
            self.left -= 1
            if self.left == 0:
                raise ValueError("this model has had enough")
        outputs: Tensor = self.layer(inputs.flatten(1))
        return outputs


def fails(at: int = 3) -> nn.Module:
    return Fails(at)


class Strikes(nn.Module):
    """Of rank 1: in its n-th forward of a training a signal goes out, unless the marker says that it did before."""

    def __init__(self, marker: str, at: int, signal_to_parent: int) -> None:
        super().__init__()
        self.net, self.marker, self.left, self.what = norm_net(), Path(marker), at, signal_to_parent

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and os.environ.get("RANK") == "1":
            self.left -= 1
            if self.left == 0 and not self.marker.exists():
                self.marker.touch()
                if self.what:
                    os.kill(os.getppid(), self.what)
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
        outputs: Tensor = self.net(inputs)
        return outputs


def strikes(marker: str, at: int = 12, signal_to_parent: int = 0) -> nn.Module:
    """Without a signal for its parent, which is torchrun, the process kills itself."""
    return Strikes(marker, at, signal_to_parent)


# --- blows --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Blow:
    """The `count`-th time that a process is at the point, `what` is sent to `whom`.

    Points: `reduced`, `served` (a learner of an all-reduce, of a server, begins a minibatch), `build` (it makes its
    model), `evaluate`, `write` (a file of a checkpoint is about to be written), `place` (a whole checkpoint is about to
    get its name), `born` (a learner was just forked); and of its end: `end`, `weights`, `conclude`, `summary` (about to
    be written). `learner` says whose point; None: anybody's. Whom: self,
    supervisor, everybody, group (the supervisor's, as Ctrl-C does), group twice (again when it has heeded).
    """

    point: str
    count: int = 1
    what: int = signal.SIGKILL
    whom: str = EVERYBODY
    learner: int | None = None
    times: int = 1  # that it strikes, one after the other
    late_s: float = 0.0  # that the process then takes before it goes on


def strike(blow: Blow) -> Callable[[], None]:
    """To be called in the program, before its command: lays the blow."""

    def lay() -> None:
        leader, folder = os.getpid(), Path.cwd()
        passed = 0

        def pass_by(number: int | None) -> None:
            nonlocal passed
            if blow.learner is not None and number != blow.learner:
                return
            passed += 1
            struck = len(list(folder.glob("struck-*")))
            if passed < blow.count or struck >= blow.times:
                return
            (folder / f"struck-{struck}").touch()
            _send(blow, leader)
            time.sleep(blow.late_s)

        owner, name, of = _POINTS[blow.point]
        for one in owner:
            original = getattr(one, name)

            @functools.wraps(original)
            def patched(*given: Any, _original: Any = original, **named: Any) -> Any:
                pass_by(of(given))
                return _original(*given, **named)

            setattr(one, name, patched)

    return lay


def _number(given: tuple[Any, ...]) -> int:
    learner: Trainer = given[0]
    return learner.number


_POINTS: dict[str, tuple[tuple[Any, ...], str, Callable[[tuple[Any, ...]], int | None]]] = {
    "build": ((Trainer,), "_build", _number),
    "evaluate": ((Trainer,), "_evaluate", _number),
    "write": ((checkpoint,), "write_file", lambda given: None),
    "place": ((checkpoint,), "_take_place", lambda given: None),
    "reduced": ((ReducedTrainer,), "_update", _number),
    "served": ((ServedTrainer,), "_minibatch", _number),
    "born": ((launch,), "_run_learner", lambda given: int(given[1])),
    "end": ((Trainer,), "_end", _number),
    "weights": ((trainer,), "write_weights", lambda given: None),
    "conclude": ((launch,), "conclude", lambda given: None),
    "summary": ((results,), "summary_of", lambda given: None),
}


def _send(blow: Blow, leader: int) -> None:
    if blow.whom == "self":
        os.kill(os.getpid(), blow.what)
    elif blow.whom == "supervisor":
        os.kill(leader, blow.what)
    elif blow.whom.startswith("group"):
        os.killpg(leader, blow.what)
        if blow.whom == "group twice":
            while "asked to stop" not in Path("out").read_text(encoding="utf-8"):
                time.sleep(0.005)
            os.killpg(leader, blow.what)
            time.sleep(LIMIT_S)  # it works on, whatever is asked of it
    else:
        for pid in (leader, *descendants(leader)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, blow.what)


# --- programs -----------------------------------------------------------------------------------------------------


class Ended(NamedTuple):
    """How a program ended, what it wrote, and who was still there a while later."""

    code: int
    out: str
    err: str
    left: list[str]

    @property
    def result(self) -> dict[str, Any]:
        """What `--json` printed."""
        answer: dict[str, Any] = json.loads(self.out)
        return answer


class Program:
    """A program that runs. `before` is called in it, first."""

    def __init__(
        self, folder: Path, words: Sequence[str], *, before: Sequence[Callable[[], None]] = (), terminal: bool = False
    ) -> None:
        self._folder, self.terminal = folder, -1
        for name in ("tmp", "out", "err"):
            path = folder / f"{name}"
            path.mkdir(exist_ok=True) if name == "tmp" else path.write_bytes(b"")
        for struck in folder.glob("struck-*"):
            struck.unlink()
        side = -1
        if terminal:
            self.terminal, side = pty.openpty()
        self._reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)  # loads much, the first time: before the fork
        self._warden = os.fork()
        if self._warden == 0:
            _be(lambda: _guard(folder, words, before, side, writer))
        os.close(writer)
        self._side = side  # kept open, so that what was shown can be read to its end
        self._seen = b""
        self.shown = b""  # on the terminal
        self.pid = int(self._line(LIMIT_S))

    def _line(self, limit_s: float) -> str:
        end = time.monotonic() + limit_s
        while b"\n" not in self._seen:
            watched = [self._reader] + ([self.terminal] if self.terminal >= 0 else [])
            ready = select.select(watched, [], [], max(0.0, end - time.monotonic()))[0]
            if not ready:
                written = "".join(Path(self._folder / name).read_text(errors="replace") for name in ("out", "err"))
                for pid in descendants(self._warden):
                    os.kill(pid, signal.SIGKILL)
                pytest.fail(f"still running after {limit_s:g} s; it wrote:\n{written[-4000:]}")
            if self.terminal in ready:
                self.shown += os.read(self.terminal, 65536)
            if self._reader in ready:
                data = os.read(self._reader, 65536)
                assert data, "the warden has died"
                self._seen += data
        line, _, self._seen = self._seen.partition(b"\n")
        return line.decode()

    def wait(self, limit_s: float = LIMIT_S) -> Ended:
        """Until it has ended, and all that it has started."""
        result = json.loads(self._line(limit_s))
        os.waitpid(self._warden, 0)
        os.close(self._reader)
        while self.terminal >= 0 and select.select([self.terminal], [], [], 0)[0]:
            self.shown += os.read(self.terminal, 65536)
        out, err = (Path(self._folder / name).read_text(encoding="utf-8") for name in ("out", "err"))
        left = [path.name for path in (self._folder / "tmp").iterdir() if not path.name.startswith("torchinductor")]
        assert not left, "temporary files are left"  # torch's own cache is meant to stay
        return Ended(result["code"], out, err, result["left"])

    def close(self) -> None:
        """Its terminal, if it had one."""
        os.close(self.terminal)
        os.close(self._side)


def offbeat(folder: Path, *words: str, blow: Blow | None = None, before: Callable[[], None] | None = None) -> Ended:
    """Run a command to its end."""
    first = [*([strike(blow)] if blow else []), *([before] if before else [])]
    return Program(folder, words, before=first).wait()


def _guard(folder: Path, words: Sequence[str], before: Sequence[Callable[[], None]], side: int, writer: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    os.setsid()
    leader = os.fork()
    if leader == 0:
        _be(lambda: _live(folder, words, before, side))
    if side >= 0:
        os.close(side)
    os.write(writer, f"{leader}\n".encode())
    code: int | None = None
    ended_s = 0.0
    with contextlib.suppress(ChildProcessError):
        while code is None or time.monotonic() - ended_s < LEFT_S:
            pid, status = os.waitpid(-1, 0 if code is None else os.WNOHANG)
            if pid == leader:
                code, ended_s = os.waitstatus_to_exitcode(status), time.monotonic()
            elif pid == 0:
                time.sleep(0.005)
    left = descendants(os.getpid())
    told = [Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").replace("\0", " ") for pid in left]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    os.write(writer, json.dumps({"code": code, "left": told}).encode() + b"\n")


def _live(folder: Path, words: Sequence[str], before: Sequence[Callable[[], None]], side: int) -> int:
    os.setsid()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    out, err = (os.open(folder / name, flags, 0o600) for name in ("out", "err"))
    null = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((null, side if side >= 0 else out, side if side >= 0 else err)):
        os.dup2(descriptor, number)
    close_inherited(set())
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - as long as the process lives
    sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115 - likewise
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    warnings.resetwarnings()
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder / "tmp")
    os.environ["TERM"], os.environ["COLUMNS"] = "xterm-256color", "100"
    os.chdir(folder)
    for call in before:
        call()
    return cli.main(list(words))


def _be(body: Callable[[], int | None]) -> NoReturn:
    """In a fork: this, and then nothing of the test any more."""
    code = 1
    try:
        code = body() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def descendants(root: int) -> list[int]:
    """All that come from a process, and are not dead."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents.setdefault(int(parent), []).append(int(path.parent.name))
    found, look = [], [root]
    while look:
        look = [child for one in look for child in parents.get(one, ())]
        found += look
    return found


def train_words(sync: str, learners: int, run: str = "run", **options: Any) -> list[str]:
    """A small training: 3 learners have 8 updates an epoch, and save every 3 of them."""
    model = "norm_net" if sync == "ring" else "drop_net"
    settings: dict[str, Any] = {
        "learners": learners,
        "train.batch-size": 64,
        "train.epochs": 2,
        "save.every-updates": 3,
    }
    settings |= {"model.name": f"train.programs:{model}", "save.keep": 2, "device": "cpu"}
    settings |= {name.replace("__", ".").replace("_", "-"): value for name, value in options.items()}
    told = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return ["train", "digits-softmax", "--sync", sync, "--run-dir", run, *told]


def resume_words(run: str = "run", *words: str) -> list[str]:
    return ["train", "--resume", run, *words]


def weights(folder: Path, run: str = "run") -> bytes:
    return (folder / run / "weights.safetensors").read_bytes()


def left_files(folder: Path, run: str = "run") -> list[str]:
    """Files that only a running run needs, or that are unfinished."""
    whole = {"config.json", "metrics.jsonl", "trace.json", "checkpoints", "weights.safetensors", "summary.txt"}
    whole |= {"machine.json", "live.json"}
    names = {str(path.relative_to(folder / run)) for path in (folder / run).rglob("*")}
    top = {name for name in names if "/" not in name and name not in whole and not name.startswith(("log.", "energy."))}
    return sorted(top | {name for name in names if name.startswith("checkpoints/.") or "unfinished" in name})
