"""Asking the first process of a host or of the switch, and the programs that it has started. See init_process.py."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from offbeat.errors import LabError

_ANSWER_S = 30.0  # a host that does not answer for so long is given up
_MOST_BYTES = 65536


class InitProcess:
    """One end of the socket that it serves. When that is shut, it ends, and all that runs on its host with it."""

    def __init__(self, name: str, control: socket.socket) -> None:
        self.name = name
        self._control = control
        self._control.settimeout(_ANSWER_S)
        self._lock = threading.Lock()

    def ask(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Any:
        """Its answer; a `LabError` if it refuses, or is gone."""
        with self._lock:
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], list(descriptors))
            except OSError as error:
                gone = isinstance(error, BrokenPipeError | ConnectionResetError)
                why = "it is gone" if gone else f"this command cannot be sent: {error.strerror}"
                raise LabError(f"{self.name}: {why}") from None
            return self.receive()

    def receive(self) -> Any:
        try:
            data = self._control.recv(_MOST_BYTES)
        except TimeoutError:
            self._control.shutdown(socket.SHUT_RDWR)  # a late answer must not be taken for another's
            raise LabError(f"{self.name}: no answer in {_ANSWER_S:.0f} s") from None
        except OSError:
            data = b""
        if not data:
            raise LabError(f"{self.name}: it is gone")
        answer = json.loads(data)
        if "error" in answer:
            raise LabError(f"{self.name}: {answer['error']}")
        return answer["value"]

    def start(
        self,
        words: Sequence[str],
        *,
        output: int,
        environment: Mapping[str, str],
        directory: str,
        errors: int | None = None,
        input: int | None = None,
    ) -> tuple[int, int]:
        """A program: its pid there, and a descriptor from which its exit code is read when it has ended."""
        request = {"start": list(words), "environment": dict(environment), "directory": directory}
        reader, writer = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            streams = nothing if input is None else input, output, output if errors is None else errors
            return self.ask(request, (*streams, writer)), reader
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(nothing)
            os.close(writer)

    def shut(self) -> None:
        """It ends now, with all processes of its host."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Wait until it has ended and nothing of its host runs."""
        self.shut()
        with contextlib.suppress(OSError), self._control:
            while self._control.recv(_MOST_BYTES):
                pass


class HostProcess:
    """A program on a host. It is selectable: readable when it has ended."""

    def __init__(self, init: InitProcess, words: Sequence[str], *, pid: int, ended: int, output: int) -> None:
        self.words, self.pid = tuple(words), pid
        self._init = init
        self._ended, self._output = ended, output
        self._code: int | None = None
        self._text = ""

    def fileno(self) -> int:
        return self._ended

    @property
    def output(self) -> str:
        """What it has printed so far on stdout and stderr."""
        if self._output >= 0:
            with Path(f"/proc/self/fd/{self._output}").open(encoding="utf-8", errors="replace") as file:
                self._text = file.read()
        return self._text

    def wait(self, timeout_s: float = 60.0) -> int:
        """Its exit code, or minus the signal that killed it; a `TimeoutError` when it runs longer."""
        if self._code is None:
            ended = select.poll()  # not select.select, which knows descriptors up to 1,023
            ended.register(self._ended, select.POLLIN)
            if not ended.poll(1e3 * max(0.0, timeout_s)):
                raise TimeoutError(
                    f"{self._init.name}: '{' '.join(self.words)}' has been running for more than {timeout_s:g} s"
                )
            text = os.read(self._ended, 32)
            self._code = int(text) if text else -signal.SIGKILL  # its host has ended, and it too
        return self._code

    @property
    def has_ended(self) -> bool:
        try:
            self.wait(timeout_s=0.0)
        except TimeoutError:
            return False
        return True

    def send_signal(self, number: int) -> None:
        """To it and the processes that it has started in its group; nothing if it has ended."""
        with contextlib.suppress(LabError):
            self._init.ask({"signal": int(number), "pid": self.pid})

    def result(self, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        code = self.wait(timeout_s)
        return subprocess.CompletedProcess(list(self.words), code, self.output)

    def close(self) -> None:
        """Its descriptors; how it has ended and what it has printed is still known."""
        with contextlib.suppress(TimeoutError):
            self.wait(0.0)
        if self._ended >= 0:
            os.close(self._ended)
            self._ended = -1
        if self._output >= 0:
            self._text = self.output
            os.close(self._output)
            self._output = -1


class PipedProcess:
    """A program on a host that is talked to through pipes; used as one of `subprocess.Popen`'s."""

    def __init__(self, init: InitProcess, words: Sequence[str], environment: Mapping[str, str]) -> None:
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        ours_errors, theirs_errors = os.pipe()
        self.stdin: IO[bytes] | None = os.fdopen(ours_in, "wb", buffering=0)
        self.stdout, self.stderr = os.fdopen(ours_out, "rb"), os.fdopen(ours_errors, "rb")
        try:
            self.pid, ended = init.start(
                words,
                input=theirs_in,
                output=theirs_out,
                errors=theirs_errors,
                environment=environment,
                directory=str(Path.cwd()),
            )
        except BaseException:
            self._close_pipes()
            raise
        finally:
            for one in (theirs_in, theirs_out, theirs_errors):
                os.close(one)
        self._process = HostProcess(init, words, pid=self.pid, ended=ended, output=-1)

    def poll(self) -> int | None:
        try:
            return self._process.wait(0.0)
        except TimeoutError:
            return None

    def wait(self, timeout: float) -> int:
        try:
            return self._process.wait(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(self._process.words, timeout) from None

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    def end(self, within_s: float) -> None:
        """Wait until it has ended, and kill it then."""
        try:
            self._process.wait(within_s)
        except TimeoutError:
            self._process.send_signal(signal.SIGKILL)
        self._close_pipes()
        self._process.close()

    def _close_pipes(self) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
