"""The first process of each host, and of the switch: it holds their namespaces and starts programs in them.

`main` is a program of its own, without packages other than this one: the switch. It forks the hosts when it is asked
to. Each of them serves one socket:

    {"boot": NAME}                        with a socket: a new host, which serves it -> the pid of its first process
    {"start": WORDS, "environment": {...}, "directory": PATH}
                                          with stdin, stdout, stderr and a pipe for its exit code -> its pid
    {"signal": NUMBER, "pid": PID}        to the process group of a program that was started here

A request is one packet of JSON. It is answered by one packet: {"value": ...}, or {"error": TEXT}.

Laws: this process ends when the other end of its socket is shut or its parent dies. It is process 1 of its host, so the
kernel then kills every process of the host, and the namespaces go with the last one. None of them has a name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any, NoReturn

from offbeat.processes.child import die_with_parent
from offbeat.processes.signals import wake_on_child_exit

MOST_BYTES = 1 << 20  # of a request
MOST_DESCRIPTORS = 4
_NEW_MOUNTS, _NEW_UTS, _NEW_IPC, _NEW_USERS, _NEW_PIDS, _NEW_NETWORK = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_libc = ctypes.CDLL(None, use_errno=True)


def main(descriptor: int) -> None:
    """Serve this socket. A parent that dies before `die_with_parent` has shut its end of it, which does as well."""
    with socket.socket(fileno=descriptor) as control:
        try:
            _send(control, value=_become_switch())
        except OSError as error:
            _send(control, error=f"{error.strerror} ({error.filename})" if error.filename else str(error.strerror))
            return
        _serve(control)


def _become_switch() -> str:
    """Enter a network of its own, as root or else as root of a new user namespace; says which."""
    who = "root"
    try:
        _unshare(_NEW_NETWORK | _NEW_MOUNTS)
    except PermissionError:
        who = "user"
        user, group = os.geteuid(), os.getegid()
        _unshare(_NEW_USERS | _NEW_NETWORK | _NEW_MOUNTS)
        own = Path("/proc/self")
        (own / "setgroups").write_text("deny", encoding="ascii")
        (own / "uid_map").write_text(f"0 {user} 1", encoding="ascii")
        (own / "gid_map").write_text(f"0 {group} 1", encoding="ascii")
    die_with_parent()  # after the change of user, which forgets it
    return who


def _unshare(flags: int) -> None:
    if _libc.unshare(flags) != 0:
        number = ctypes.get_errno()
        limited = "the limit of namespaces is reached (/proc/sys/user/)"
        raise OSError(number, limited if number == errno.ENOSPC else os.strerror(number))


# --- requests -------------------------------------------------------------------------------------------------------


def _serve(control: socket.socket) -> None:
    """Answer requests until the other end is shut; collect every process that has ended, orphans too."""
    exits: dict[int, int] = {}  # pid -> where its exit code is written
    woken = wake_on_child_exit()
    while True:
        ready, _, _ = select.select([control.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _collect(exits)
        if control.fileno() not in ready:
            continue
        data, descriptors, _, _ = socket.recv_fds(control, MOST_BYTES, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return
        try:
            _send(control, value=_answer(json.loads(data), descriptors, exits))
        except OSError as error:
            _send(control, error=f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror))
        finally:
            for descriptor in descriptors:
                if descriptor not in exits.values():
                    os.close(descriptor)


def _send(control: socket.socket, **answer: Any) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # nobody listens: the next read ends this process
        control.send(json.dumps(answer).encode())


def _answer(request: dict[str, Any], descriptors: list[int], exits: dict[int, int]) -> int:
    if "boot" in request:
        return _boot(request["boot"], descriptors[0])
    if "signal" in request:
        if request["pid"] in exits:  # else it has ended, and the number may be another's
            os.killpg(request["pid"], request["signal"])
        return 0
    stdin, stdout, stderr, ended = descriptors
    process = subprocess.Popen(
        request["start"],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=request["environment"],
        cwd=request["directory"],
        start_new_session=True,
    )
    process.returncode = 0  # it is waited for by `_collect`
    exits[process.pid] = ended
    return process.pid


def _collect(exits: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            ended = exits.pop(pid, None)
            if ended is not None:
                with contextlib.suppress(BrokenPipeError):
                    os.write(ended, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(ended)


# --- hosts ----------------------------------------------------------------------------------------------------------


def _boot(name: str, control: int) -> int:
    """A new host. Its first process has a parent that stays outside and waits: so its end, which is that of every
    process of the host, is seen as the end of the socket.
    """
    reader, writer = os.pipe()
    if os.fork() == 0:
        _wait_for_host(name, control, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        told = pipe.read().decode()
    if not told.isdigit():
        raise OSError(0, told or "the host's first process was killed")
    return int(told)


def _wait_for_host(name: str, control: int, writer: int) -> NoReturn:
    try:
        die_with_parent()
        signal.set_wakeup_fd(-1)
        _close_all_but(control, writer)
        _unshare(_NEW_NETWORK | _NEW_MOUNTS | _NEW_UTS | _NEW_IPC | _NEW_PIDS)
        first = os.fork()
        if first == 0:
            die_with_parent()
            os.close(writer)
            socket.sethostname(name)
            with socket.socket(fileno=control) as own:
                _serve(own)
            os._exit(0)
        os.write(writer, str(first).encode())
        os.close(writer)
        os.waitpid(first, 0)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.write(writer, str(error.strerror).encode())
    finally:
        os._exit(1)


def _close_all_but(*kept: int) -> None:
    for word in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, no paths
        if int(word) > 2 and int(word) not in kept:
            with contextlib.suppress(OSError):  # the listing's own is closed by now
                os.close(int(word))
