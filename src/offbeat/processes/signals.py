"""Ctrl-C, SIGTERM and SIGHUP: the first unwinds what runs, so that nothing is left behind; a second ends it at once.

This is the only file that installs a handler. A handler may note the first signals instead of raising them, for those
who end in order: a training that saves, a learner that stops after its minibatch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from offbeat.errors import Terminated

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STACKS = signal.SIGRTMIN + 6  # asks a learner for its stacks; programs of one's own have SIGUSR1 and SIGUSR2


class SignalHandler:
    """Notes the first `noted` signals, raises the next one, and ends the process at once when one more comes.

    Python drops what is raised in some callbacks (of the garbage collector, a fork, a finalizer) and calls
    `sys.unraisablehook` instead. What this has raised is raised again then, a moment later.
    """

    def __init__(self, noted: float = 0) -> None:
        self.received: list[int] = []
        self.on_noted: Callable[[], None] = lambda: None
        self._noted = noted
        self._raised: BaseException | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        if self._raised is not None:
            end_at_once(number)
        self.received.append(number)
        if len(self.received) <= self._noted:
            self.on_noted()
            return
        self._raised = ending_by(number)
        raise self._raised

    def install(self) -> dict[signal.Signals, Any]:
        """From now on; the handlers before. Under nohup SIGHUP stays ignored."""
        return {number: signal.signal(number, self) for number in ENDING if not is_ignored_hangup(number)}

    def raise_again(self, dropped: UnraisableHookArgs) -> bool:
        if self._raised is None or dropped.exc_value is not self._raised:
            return False
        self._raised = None
        number = self.received.pop()
        # Not now: this too may be in the callback. To this thread: one that sleeps is not woken by another's signal.
        later = threading.Timer(0.01, signal.pthread_kill, (threading.get_ident(), number))
        later.daemon = True
        later.start()
        return True


def is_ignored_hangup(number: int) -> bool:
    """Whether whoever started this process wants it to outlive its terminal."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def leave_terminal() -> None:
    """It is gone: what is still said goes nowhere, and must not fail."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(number).st_mode):
                os.dup2(nothing, number)
    os.close(nothing)


def ending_by(number: int) -> BaseException:
    """What a signal raises."""
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated(128 + number)


@contextlib.contextmanager
def terminable(noted: int = 0) -> Iterator[SignalHandler]:
    """In it, a signal raises `KeyboardInterrupt` or `SystemExit` (the first `noted` are noted instead), and one more
    ends the process at once. Where all that is nested ask for the same, the handler is installed once.
    """
    handler, hook = SignalHandler(noted), sys.unraisablehook
    here = threading.current_thread() is threading.main_thread()
    if not here or (not noted and isinstance(signal.getsignal(signal.SIGTERM), SignalHandler)):
        yield handler
        return

    def dropped(args: UnraisableHookArgs) -> None:
        if not handler.raise_again(args):
            hook(args)

    before = handler.install()
    sys.unraisablehook = dropped
    try:
        yield handler
    finally:
        sys.unraisablehook = hook
        for number, previous in before.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP come a little later: what they raise is lost in what Python calls around a fork."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def write_stacks_on_signal(descriptor: int) -> None:
    """When `STACKS` comes, write the Python stack of every thread there, whatever this process is doing."""
    faulthandler.register(STACKS, file=descriptor, all_threads=True, chain=False)


def ignore_interrupts() -> None:
    """Ctrl-C is for the process that waits for this one and ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def wake_on_child_exit() -> int:
    """A descriptor that is readable when a child has ended."""
    woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake)
    return woken


def end_at_once(number: int) -> NoReturn:
    """Kill what this process has started, and end it without unwinding."""
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            for word in (task / "children").read_text(encoding="ascii").split():
                kill_group(int(word))
    os._exit(128 + number)


def kill_group(pid: int) -> None:
    """Kill a child that was not waited for yet, and its process group where it leads one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
