"""The parent's side: processes that are started, asked, watched and ended together.

Laws: one question is out at a time and every wait has a deadline. The first process that dies, answers with an error or
does not answer ends the run with one line that names it. After `close` no process is left.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from offbeat import plugins
from offbeat.errors import OffbeatError
from offbeat.lab.control import PipedProcess
from offbeat.number_format import format_seconds
from offbeat.processes.child import describe_exit, end_program, start_program
from offbeat.processes.launcher import thread_environment

if TYPE_CHECKING:
    from offbeat.server.supervisor import ServerPlan

_POLL_S = 0.5  # how often a process is checked whose pipe says nothing
_AFTERMATH_S = 0.5  # when one has died, its peers complain as well: the cause is sought among all of them
_GRACE_S = 10.0
_MOST_NOISE = 8192
_MOST_SAID = 200  # lines of learners that are kept
_NO_ANSWER: dict[str, Any] = {}


def program(module: str, *words: str) -> list[str]:
    return [sys.executable, "-P", "-u", "-m", f"offbeat.measure.{module}", *words]


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """One torch thread a learner; a run that this process itself is part of is not joined. Plugins are known to all."""
    kept = (name for name in os.environ if not name.startswith("OFFBEAT_") or name == plugins.VARIABLE)
    return {**{name: os.environ[name] for name in kept}, **thread_environment(1), **own}


class Child:
    """One process: what it answered last, and the end of what it complained about."""

    def __init__(self, name: str, process: subprocess.Popen[bytes] | PipedProcess) -> None:
        self.name = name
        self.answer = _NO_ANSWER
        self.closed = False  # its standard output has ended
        self._line = b""
        self._noise = b""
        self.process = process

    def tell(self, question: Mapping[str, object]) -> None:
        self.answer = _NO_ANSWER
        assert self.process.stdin is not None
        try:
            self.process.stdin.write((json.dumps(question) + "\n").encode())
        except BrokenPipeError:
            self.closed = True  # it has gone; whoever waits for the answer will say so

    def heard(self, data: bytes) -> None:
        """Part of its standard output: a line in braces is an answer, others are noise."""
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if line.lstrip().startswith(b"{"):
                self.answer = json.loads(line)
            else:
                self.complained(line + b"\n")

    def complained(self, data: bytes) -> None:
        self._noise = (self._noise + data)[-_MOST_NOISE:]

    def last_words(self) -> str:
        """The last line it wrote that says something."""
        lines = self._noise.decode(errors="replace").splitlines()
        said = [line.strip() for line in lines if any(letter.isalnum() for letter in line)]
        return said[-1] if said else "it said nothing"

    def failure(self) -> tuple[int, str] | None:
        """What is wrong with it, with how likely that is the cause and not a consequence; or nothing."""
        if "error" in self.answer:
            return 1, f"{self.name}: {self.answer['error']}"
        if not self.closed and self.process.poll() is None:
            return None
        try:
            code = self.process.wait(timeout=_AFTERMATH_S)
        except subprocess.TimeoutExpired:
            return 0, f"{self.name} closed its connection"
        if code == 0 and self.answer:
            return None  # a program of one answer
        if code < 0:
            return 2, f"{self.name} was killed by {describe_exit(code)}"
        return 0, f"{self.name} ended with exit code {code}: {self.last_words()}"


class Harness:
    """Processes that are asked together; as a context it leaves none behind."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(at_once=kind is not None)

    def start(
        self, name: str, words: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int] = ()
    ) -> Child:
        pipe = subprocess.PIPE
        return self.add(
            name, start_program(words, environment, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=pass_fds)
        )

    def add(self, name: str, process: subprocess.Popen[bytes] | PipedProcess) -> Child:
        """A process that is there already, with its three pipes."""
        child = Child(name, process)
        self.children.append(child)
        return child

    def ask(
        self, questions: Mapping[str, object] | Sequence[Mapping[str, object]], doing: str, first: int | None = None
    ) -> list[dict[str, Any]]:
        """The answers of all, or of the `first` so many; `doing` ends the sentence when it fails."""
        asked = self.children[:first]
        each = [questions] * len(asked) if isinstance(questions, Mapping) else questions
        for child, question in zip(asked, each, strict=True):
            child.tell(question)
        deadline = time.monotonic() + self.timeout_s
        with selectors.DefaultSelector() as selector:
            for child in self.children:
                self._listen(selector, child)
            while not all(child.answer for child in asked):
                left = deadline - time.monotonic()
                if left <= 0:
                    late = ", ".join(child.name for child in asked if not child.answer)
                    limit = format_seconds(self.timeout_s)
                    raise OffbeatError(f"bench: no answer from {late} within {limit} (--timeout), {doing}")
                self._hear(selector, min(left, _POLL_S))
                if any(child.failure() for child in self.children):
                    raise self._cause(selector, doing)
        return [child.answer for child in asked]

    def slowest_s(self, question: Mapping[str, object], doing: str, first: int | None = None) -> float:
        """The seconds of the slowest answer."""
        return max(float(answer["seconds"]) for answer in self.ask(question, doing, first))

    def _listen(self, selector: selectors.BaseSelector, child: Child) -> None:
        assert child.process.stdout is not None and child.process.stderr is not None
        if not child.closed:
            selector.register(child.process.stdout, selectors.EVENT_READ, (child, True))
        selector.register(child.process.stderr, selectors.EVENT_READ, (child, False))

    def _hear(self, selector: selectors.BaseSelector, wait_s: float) -> None:
        if not selector.get_map():
            time.sleep(wait_s)
        for key, _ in selector.select(wait_s):
            child, is_output = key.data
            data = os.read(key.fd, 65536)
            if not data:
                selector.unregister(key.fileobj)
                child.closed = child.closed or is_output
            elif is_output:
                child.heard(data)
            else:
                child.complained(data)

    def _cause(self, selector: selectors.BaseSelector, doing: str) -> OffbeatError:
        until = time.monotonic() + _AFTERMATH_S
        while (left := until - time.monotonic()) > 0:
            self._hear(selector, left)
        found = [failure for child in self.children if (failure := child.failure())]
        _, text = max(found, key=lambda failure: failure[0])
        return OffbeatError(f"bench: {text} ({doing})")

    def close(self, at_once: bool) -> None:
        """End all: by hanging up, which they understand, or at once; who stays is killed."""
        for child in self.children:
            if at_once:
                child.process.terminate()
            if child.process.stdin is not None:
                child.process.stdin.close()
                child.process.stdin = None
        deadline = time.monotonic() + _GRACE_S
        for child in self.children:
            left = deadline - time.monotonic()
            if isinstance(child.process, PipedProcess):
                child.process.end(left)
            else:
                end_program(child.process, left)


def supervise(plan: ServerPlan, doing: str, timeout_s: float) -> dict[int, str]:
    """A run of the real parameter server with learners' programs of ours: what each of them printed last.

    A learner that fails, and a run that takes too long, end it with one line that says which.
    """
    from offbeat.server.supervisor import Supervisor

    said: deque[tuple[str, str]] = deque(maxlen=_MOST_SAID)
    deadline = time.monotonic() + timeout_s

    def check() -> None:
        for learner, code in supervisor.exits.items():
            if code:
                words = [text for who, text in said if who == f"learner {learner}" and text.strip()]
                why = words[-1] if words else f"exit code {code}"
                raise OffbeatError(f"bench: learner {learner}: {why} ({doing})")
        if time.monotonic() > deadline:
            raise OffbeatError(f"bench: not finished within {format_seconds(timeout_s)} ({doing})")

    with Supervisor(plan, lambda name, text: said.append((name, text))) as supervisor:
        supervisor.start()
        if supervisor.watch(check) is None:
            raise OffbeatError(f"bench: the coordinator returned no result ({doing})")
    return {int(who.removeprefix("learner ")): text for who, text in said if who.startswith("learner ")}
