"""Programs that begin with `import torch`, in forks of a process that has loaded it and nothing else.

The process reads a line for each program: its file, and the folder where it runs and where it leaves `out` and `err`.
It prints the exit code. Nothing of offbeat is loaded before a program does that, but what torch's autoload loads.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

LIMIT_S = 60  # ends only what hangs


class TorchNursery:
    """The tests' side."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, program: Path, folder: Path) -> subprocess.CompletedProcess[str]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(program), str(folder)]) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        out, err = ((folder / name).read_text(encoding="utf-8") for name in ("out", "err"))
        return subprocess.CompletedProcess([str(program)], code, out, err)


@contextmanager
def torch_nursery() -> Iterator[TorchNursery]:
    words = [sys.executable, __file__]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield TorchNursery(process)


def _program(path: str, folder: str) -> NoReturn:
    os.setsid()
    os.chdir(folder)
    null = os.open(os.devnull, os.O_RDONLY)
    out, err = (os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) for name in ("out", "err"))
    for number, descriptor in enumerate((null, out, err)):
        os.dup2(descriptor, number)
    os.closerange(3, 64)
    signal.alarm(LIMIT_S)
    sys.argv, sys.path[0] = [path], ""
    code = 1
    try:
        runpy.run_path(path, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    gc.disable()
    import torch._dynamo  # noqa: F401 - as the first step of any torch optimizer does

    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _program(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
