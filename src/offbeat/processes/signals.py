"""Ctrl-C and SIGTERM in a command: the first unwinds it, so that nothing is left behind; a second ends it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from offbeat.errors import Terminated

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

TOLD = (signal.SIGINT, signal.SIGTERM)


class _Stop:
    """The handler; it is installed once, however deep the `with terminable()` that ask for it are nested.

    Python drops what is raised in some callbacks (of the garbage collector, a fork, a finalizer) and calls
    `sys.unraisablehook` instead. What this has raised is raised again then, a moment later.
    """

    def __init__(self) -> None:
        self._asked: BaseException | None = None  # raised by the first signal

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._asked is not None:
            end_at_once(number)
        self._asked = KeyboardInterrupt() if number == signal.SIGINT else Terminated(128 + number)
        raise self._asked

    def raise_again(self, dropped: UnraisableHookArgs) -> bool:
        if self._asked is None or dropped.exc_value is not self._asked:
            return False
        number = signal.SIGINT if isinstance(self._asked, KeyboardInterrupt) else signal.SIGTERM
        self._asked = None
        later = threading.Timer(0.01, os.kill, (os.getpid(), number))  # not now: this too may be in the callback
        later.daemon = True
        later.start()
        return True


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """In it, a first signal raises `KeyboardInterrupt` or `SystemExit`, and a second ends the process at once."""
    here = threading.current_thread() is threading.main_thread()
    if not here or isinstance(signal.getsignal(signal.SIGTERM), _Stop):
        yield
        return
    stop, hook = _Stop(), sys.unraisablehook

    def dropped(args: UnraisableHookArgs) -> None:
        if not stop.raise_again(args):
            hook(args)

    before = {number: signal.signal(number, stop) for number in TOLD}
    sys.unraisablehook = dropped
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def end_at_once(number: int) -> NoReturn:
    """Kill what this process has started, and end it without unwinding."""
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            for word in (task / "children").read_text(encoding="ascii").split():
                _kill(int(word))
    os._exit(128 + number)


def _kill(pid: int) -> None:
    """A child, and its process group where it leads one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
