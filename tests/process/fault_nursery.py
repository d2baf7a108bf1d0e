"""Runs of `offbeat run` by the dozen, without importing torch for each: this program imports it once and forks.

It reads one line for each run: the folder with its `Order`. A warden is forked, and from it the supervisor, which forks
its learners where it would start programs; all else is as ever. The warden is where orphans go: it sees whatever is
left behind, ends it, and writes `result.json`. It also lets go on what was stopped, and ends a run that takes too long.
With "program" in the order the command itself is started, and learners are programs, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from offbeat import cli
from offbeat.server import supervisor
from offbeat.server.coordinator import coordinator_process, journal
from process import fault_points, fault_script
from process.forked_scripts import as_program, end, fork_scripts

LEFT_S = 3.0  # to see whether what is left goes by itself
_PR_SET_CHILD_SUBREAPER = 36


def _supervise(order: dict[str, Any], folder: Path) -> NoReturn:
    os.setsid()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    out, err = (os.open(folder / name, flags, 0o600) for name in ("out", "err"))
    as_program(out, err)
    tempfile.tempdir = os.environ["TMPDIR"] = str((folder / "tmp").resolve())
    words = [
        "run",
        *order["words"],
        "--staleness",
        "keep",  # the sums that are expected are of whole steps
        "--log",
        str(folder / "log"),
        "--json",
        fault_script.__file__,
        str(folder / "order"),
    ]
    if order.get("program"):
        os.execv(sys.executable, [sys.executable, "-c", "import offbeat.cli as c; raise SystemExit(c.main())", *words])
    coordinator_process.SILENCE_S = order.get("silence_s", coordinator_process.SILENCE_S)
    journal.SNAPSHOT_EVERY = 7  # these runs are short
    if not order.get("inside"):
        supervisor.INSIDE_ITEMS = 0
    supervisor.STOPPED_S = order.get("stopped_s", supervisor.STOPPED_S)
    fork_scripts()
    fault_points.services(order, folder)
    if order.get("planted"):
        fault_points.PLANTED[order["planted"]]()
    end(lambda: cli.main(words))


def _warden(folder: Path) -> None:
    order = json.loads((folder / "order").read_text(encoding="utf-8"))
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    began = time.monotonic()
    leader = os.fork()
    if leader == 0:
        _supervise(order, folder)
    result: dict[str, Any] = {"code": None, "timed_out": False}
    continued: set[str] = set()
    while result["code"] is None:
        for pid, status in _buried():
            if pid == leader:
                result["code"] = os.waitstatus_to_exitcode(status)
        _let_go_on(order, folder, continued)
        if time.monotonic() - began > order["limit_s"] and not result["timed_out"]:
            result["timed_out"] = True
            result["alive"] = [f"{pid} {_words(pid)} {_stack(pid)}" for pid in _tree(os.getpid())]
            os.kill(leader, signal.SIGKILL)
        time.sleep(0.005)
    ended = time.monotonic()
    result["seconds"] = ended - began
    while _has_children() and time.monotonic() - ended < LEFT_S:
        time.sleep(0.005)
    result["gone_s"] = time.monotonic() - ended
    result["left"] = [_words(pid) for pid in _tree(os.getpid())]
    for pid in _tree(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    (folder / "result.unfinished").write_text(json.dumps(result), encoding="utf-8")
    (folder / "result.unfinished").replace(folder / "result")


def _buried() -> list[tuple[int, int]]:
    """Children that have ended, and how."""
    found = []
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(ended)
    return found


def _has_children() -> bool:
    """Whether anything is left: whoever loses its parent becomes a child of the warden. A look through /proc may miss
    one whose parent ends meanwhile.
    """
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _let_go_on(order: dict[str, Any], folder: Path, continued: set[str]) -> None:
    for blow in order["blows"]:
        marker = folder / f"struck-{blow['name']}"
        if blow["what"] != "stop" or blow["name"] in continued or not marker.exists():
            continue
        if time.time() - marker.stat().st_mtime > order["stop_s"]:
            continued.add(blow["name"])
            pid = int(marker.read_text(encoding="utf-8"))
            if pid in _tree(os.getpid()):
                os.kill(pid, signal.SIGCONT)


def _tree(root: int) -> list[int]:
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


def _words(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").replace("\0", " ").strip()
    return ""


def _stack(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/wchan").read_text(encoding="utf-8")
    return ""


def _warm_up() -> None:
    """What torch imports only when it is used, it imports here and not in every learner."""
    model = fault_script.Model(fault_script.SIZES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    for batch in torch.utils.data.DataLoader(fault_script.Samples(), batch_size=24):
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    torch.set_num_threads(1)
    cli.load("run")
    _warm_up()
    gc.freeze()  # collections of the forks pass over all that is loaded here
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # wardens are not waited for: they leave a file
    for line in sys.stdin:
        if os.fork() == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            end(partial(_warden, Path(line.rstrip("\n"))))


if __name__ == "__main__":
    main()
