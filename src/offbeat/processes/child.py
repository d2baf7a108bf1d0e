"""A child process: forked from this one or started as a program; the kernel kills it when its parent dies.

A child whose output is read has a session of its own: Ctrl-C is for the parent, which ends the others in order, and
what the child starts can be ended with it. This file knows nothing of what the children do.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NoReturn

from offbeat.errors import OffbeatError
from offbeat.processes.signals import ENDING, is_ignored_hangup, kill_group, signals_deferred

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
_MOST_BYTES = 65536  # that are read at once, and of a line that does not end
_MOST_READS = 1000  # of what an ended child has left: a process that has left its group may print for ever


class LineReader:
    """Lines from a pipe, read without waiting. A line that does not end is cut."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._line = b""
        os.set_blocking(descriptor, False)

    def read_lines(self, *, last: bool = False) -> tuple[list[str], bool]:
        """Lines that have come meanwhile, and whether there will be no more. With `last`, all that is there."""
        data, ended = b"", last
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MOST_READS if last else 1):
                piece = os.read(self._descriptor, _MOST_BYTES)
                data += piece
                ended = ended or not piece
                if not piece:
                    break
        *lines, self._line = (self._line + data).split(b"\n")
        if self._line and (ended or len(self._line) > _MOST_BYTES):
            lines, self._line = [*lines, self._line], b""
        return [line.decode(errors="replace") for line in lines], ended


class ChildProcess:
    """A process that was started here. Its `pidfd` is readable when it has ended; `output` is -1 where none is read."""

    def __init__(self, name: str, pid: int, output: int = -1) -> None:
        self.name, self.pid, self.output = name, pid, output
        self.pidfd = os.pidfd_open(pid)
        self._stopped = Stopwatch()
        if output >= 0:
            self._reader = LineReader(output)

    def read_lines(self, *, last: bool = False) -> tuple[list[str], bool]:
        """Lines that it has printed meanwhile, and whether there will be no more. With `last`, all that is there."""
        return self._reader.read_lines(last=last)

    def close_output(self) -> None:
        if self.output >= 0:
            os.close(self.output)
            self.output = -1

    def is_stopped(self) -> bool:
        """As by SIGSTOP."""
        return state_of(self.pid) == "T"

    def stopped_s(self) -> float:
        """For how long it has been stopped."""
        return self._stopped.seconds(self.is_stopped())

    def kill(self) -> None:
        """It, and what it has started in its session."""
        kill_group(self.pid)

    def wait(self) -> int:
        """Its exit code, or minus the signal that killed it, when it has ended. It must not be used any more."""
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        self.close_output()
        return os.waitstatus_to_exitcode(status)


class Stopwatch:
    """For how long something has been so, from the first time that it was seen so."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def seconds(self, is_so: bool) -> float:
        now = time.monotonic()
        if not is_so:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now
        return 0.0 if self._since_s is None else now - self._since_s


class RestartLimit:
    """How often something may be started again: at most so many times in so many seconds."""

    def __init__(self, restarts: int, within_s: float) -> None:
        self._restarts, self._within_s = restarts, within_s
        self._times: deque[float] = deque(maxlen=restarts)

    def take(self) -> bool:
        """Whether it may be started once more, which is counted."""
        now = time.monotonic()
        if sum(now - at < self._within_s for at in self._times) >= self._restarts:
            return False
        self._times.append(now)
        return True


# --- starting -------------------------------------------------------------------------------------------------------


def start_program(
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int,
    stderr: int,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """A program in a session of its own, which dies with this process."""
    parent = os.getpid()

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
        die_with_parent(parent)

    with signals_deferred():
        return subprocess.Popen(
            list(words),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=dict(environment),
            pass_fds=pass_fds,
            bufsize=0,
            start_new_session=True,
            preexec_fn=prepare,
        )


def spawn(
    name: str,
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    pass_fds: Sequence[int] = (),
    is_read: bool = True,
    stdin: int = subprocess.DEVNULL,
) -> ChildProcess:
    """A program whose output is read here, or by nobody. `stdin` is a descriptor that it reads."""
    if not is_read:
        null = subprocess.DEVNULL
        process = start_program(words, environment, stdout=null, stderr=null, pass_fds=pass_fds)
        process.returncode = 0
        return ChildProcess(name, process.pid)
    reader, writer = os.pipe()
    process = start_program(words, environment, stdin=stdin, stdout=writer, stderr=writer, pass_fds=pass_fds)
    process.returncode = 0  # it is waited for by its descriptor
    os.close(writer)
    return ChildProcess(name, process.pid, reader)


def fork(
    name: str, body: Callable[[], object], *, keep: AbstractSet[int] = frozenset(), captured: bool = True
) -> ChildProcess:
    """A fork of this process, which must not have threads; its exit code is the number that `body` returns, or 0.

    It has no descriptors but `keep`. Where its output is not captured it shares ours, and our session: signals are for
    this process, which ends it, and the fork ignores them.
    """
    parent = os.getpid()
    reader, writer = os.pipe() if captured else (-1, -1)
    _flush()
    with signals_deferred():
        pid = os.fork()
        if pid == 0:
            if captured:
                os.setsid()
            for number in (one for one in ENDING if not is_ignored_hangup(one)):
                signal.signal(number, signal.SIG_IGN)  # forgets one that came before the session was its own
                if captured:
                    signal.signal(number, signal.SIG_DFL)
    if pid == 0:
        gc.freeze()  # what the parent has made stays here: collections pass over it, and its pages are not copied
        _run_to_end(name, body, parent, writer, keep)
    if captured:
        os.close(writer)
    return ChildProcess(name, pid, reader)


def _run_to_end(name: str, body: Callable[[], object], parent: int, writer: int, keep: AbstractSet[int]) -> NoReturn:
    code = 1
    try:
        die_with_parent(parent)
        if writer >= 0:
            ours = fcntl.fcntl(writer, fcntl.F_DUPFD, 3)  # whoever started us may have closed its own 0 to 2
            nothing = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((nothing, 0), (ours, 1), (ours, 2)):
                os.dup2(source, target)
        close_inherited(keep)
        returned = body()
        code = returned if isinstance(returned, int) else 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except OffbeatError as error:
        os.write(2, f"offbeat: {name}: {error}\n".encode())
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        with contextlib.suppress(BaseException):
            _flush()
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def die_with_parent(parent: int | None = None) -> None:
    """In a child: the kernel kills this process when the thread that started it ends, on Linux.

    With `parent`, the child ends at once where that process has died already.
    """
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def close_inherited(keep: AbstractSet[int]) -> None:
    """What a fork has inherited. The numbers stay taken, by nothing: some libraries (libuv, which torch's store is made
    of) close theirs again in every later fork, and so may objects that are dropped; they must not be another's by then.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, no paths
        number = int(name)
        if number > 2 and number not in keep and number != nothing:
            with contextlib.suppress(OSError):
                os.fstat(number)  # the listing itself had one, which is closed by now
                os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


# --- ends -----------------------------------------------------------------------------------------------------------


def end_program(process: subprocess.Popen[bytes], within_s: float) -> None:
    """Wait until it has ended, reading on so that a full pipe does not hold it up; then kill it and what it forked."""
    try:
        process.communicate(timeout=max(0.0, within_s))
    except subprocess.TimeoutExpired:
        kill_group(process.pid)
        process.wait()
    finally:
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def describe_exit(code: int) -> str:
    """`SIGKILL` or `exit code 3`."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"


def state_of(pid: int) -> str:
    """The kernel's letter for the state of a process: T stopped, Z dead and not yet waited for; "" for none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]
