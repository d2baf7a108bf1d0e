"""Scripts of `offbeat run` without importing torch for each: learners are forked where programs would be started."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

from offbeat.processes import child


def fork_scripts() -> None:
    """From here on the supervisor of this process forks learners. What the script must find loaded is loaded before."""
    child.subprocess = SimpleNamespace(Popen=ForkedLearner, DEVNULL=-3)  # type: ignore[assignment, attr-defined]  # see above


class ForkedLearner:
    """In the place of subprocess.Popen: the script runs in a fork of this process."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        stdin: int,
        stdout: int,
        stderr: int,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        bufsize: int,
        start_new_session: bool,
        preexec_fn: Callable[[], None],
    ) -> None:
        self.returncode = 0
        self.pid = os.fork()
        if self.pid:
            return
        os.setsid()
        as_program(stdout, stderr, keep=pass_fds)
        preexec_fn()
        os.environ.clear()
        os.environ.update(env)
        script = words[words.index("-u") + 1 :]
        sys.argv = list(script)
        sys.path.insert(0, str(Path(script[0]).parent))
        end(lambda: runpy.run_path(script[0], run_name="__main__"))


def as_program(stdout: int, stderr: int, *, keep: Sequence[int] = ()) -> None:
    """As if just started: nothing open but these, and signals as they are by default."""
    null = os.open(os.devnull, os.O_RDWR)
    for number, descriptor in enumerate((null, stdout, stderr)):
        os.dup2(null if descriptor < 0 else descriptor, number)
    start = 3
    for number in (*sorted(keep), 1024):
        os.closerange(start, number)
        start = number + 1
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)


def end(body: Callable[[], object]) -> NoReturn:
    code = 1
    try:
        said = body()
        code = said if isinstance(said, int) else 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        try:
            sys.excepthook(*sys.exc_info())
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
