"""Whoever has a lab starts the commands that its hosts ask for. See remote_shell.py."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from offbeat.errors import LabError, RequestError
from offbeat.lab import remote_shell
from offbeat.lab.hosts import Lab


class RemoteShell:
    """Serves requests of hosts until it is closed; `agent` is the command line in the place of ssh."""

    def __init__(self, lab: Lab, path: Path, environment: Mapping[str, str]) -> None:
        self.agent = f"{sys.executable} -I -S {remote_shell.__file__} {path}"
        self._lab, self._environment = lab, environment
        self._names = {name: host for host in range(lab.network.hosts)
                       for name in (lab.network.name(host), lab.network.address(host))}  # fmt: skip
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._serve, name="lab shell", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                one = self._listener.accept()[0]
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(one,), name="lab command", daemon=True).start()

    def _answer(self, one: socket.socket) -> None:
        with one:
            data, streams, _, _ = socket.recv_fds(one, remote_shell.MOST_BYTES, 3, socket.MSG_CMSG_CLOEXEC)
            answer: dict[str, int | str]
            try:
                answer = {"code": self._run(json.loads(data), streams, one)} if len(streams) == 3 else {}
            except (LabError, RequestError, ValueError) as error:
                answer = {"error": str(error)}
            finally:
                for stream in streams:
                    os.close(stream)
            try:
                one.send(json.dumps(answer).encode())
            except OSError:  # nobody waits for it
                return

    def _run(self, request: dict[str, str], streams: list[int], caller: socket.socket) -> int:
        if request["host"] not in self._names:
            raise RequestError(f"no host '{request['host']}' in this lab: {', '.join(self._names)}")
        process = self._lab.start_with(
            self._names[request["host"]], ["sh", "-c", request["command"]], streams, self._environment
        )
        try:
            ready, _, _ = select.select([process.fileno(), caller.fileno()], [], [])
            if process.fileno() not in ready:
                process.send_signal(signal.SIGKILL)
            return process.wait()
        finally:
            process.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
