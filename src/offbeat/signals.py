"""Ctrl-C and SIGTERM in a command: the first unwinds it, so that nothing is left behind; a second ends it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

TOLD = (signal.SIGINT, signal.SIGTERM)


class _Stop:
    """The handler; it is installed once, however deep the `with terminable()` that ask for it are nested."""

    def __init__(self) -> None:
        self.asked = 0  # the first signal

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            end_at_once(number)
        self.asked = number
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """In it, a first signal raises `KeyboardInterrupt` or `SystemExit`, and a second ends the process at once."""
    here = threading.current_thread() is threading.main_thread()
    if not here or isinstance(signal.getsignal(signal.SIGTERM), _Stop):
        yield
        return
    stop = _Stop()
    before = {number: signal.signal(number, stop) for number in TOLD}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check() -> None:
    """Raise again what a first signal has raised: Python drops what is raised in some callbacks, as those of a fork."""
    stop = signal.getsignal(signal.SIGTERM)
    if isinstance(stop, _Stop) and stop.asked:
        raise SystemExit(128 + stop.asked)


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
