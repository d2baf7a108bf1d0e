"""The learners of a run on this machine: started, watched, started again, and ended together.

Laws: every line that a learner prints is passed on, with who printed it. After `close` no process is left. A learner
that was killed is started again as often as the plan says, in each `RESTARTS_S`; one that fails stays away, and so does
one that was asked to end. Programs for other hosts (`start_host`) are started once: they end by themselves when the run
does, or when their standard input is closed.

A `RankLauncher` is for the ranks of a process group, which find each other through a file in memory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from offbeat.errors import RequestError
from offbeat.processes.child import ChildProcess, RestartLimit, describe_exit, fork, spawn
from offbeat.processes.ssh_hosts import HostProgram

POLL_S = 0.2
RESTARTS_S = 600.0  # in which a learner is started again so often as the plan says
MOST_PROCESSES = 256  # of one kind that one machine is asked for: learners, servers, readers of all learners
GRACE_S = 3.0  # for learners to end when they are asked to
HOST_GRACE_S = 2 * GRACE_S  # for other hosts, whose learners have as long
SELF = "offbeat"  # who says what the launcher itself has to say
MOST_SUMMARY_BYTES = 1 << 20  # that ranks leave


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """What each learner runs: the words of a command, or a body that is called, with the learner's number, in a fork of
    this process. Where there is neither, learners come by themselves. `restarts` are of a learner that was killed, in
    `RESTARTS_S`: a long run survives more of them.
    """

    command: Sequence[str] = ()
    body: Callable[[int], int] | None = None
    environment: Mapping[str, str] | None = None
    restarts: int = 0

    @property
    def launches(self) -> bool:
        return bool(self.command) or self.body is not None


def check_processes(**asked: int) -> None:
    """`RequestError` if more processes of a kind are asked for than one machine should start."""
    for kind, many in asked.items():
        if many > MOST_PROCESSES:
            raise RequestError(f"expected at most {MOST_PROCESSES} {kind} on one machine; got {many}")


def thread_environment(threads: int) -> dict[str, str]:
    """How many threads torch and its libraries use in a process."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))


class Launcher:
    """See the module's text. `on_line(name, line)` is given what learners print, and what is worth knowing."""

    def __init__(self, plan: LaunchPlan, learners: int, on_line: Callable[[str, str], None]) -> None:
        self.plan, self.on_line = plan, on_line
        self.learners: dict[int, ChildProcess] = {}  # those that run
        self.exits: dict[int, int] = {}  # learner -> exit code
        self.recoveries: list[dict[str, Any]] = []  # of what was started again, and is not a learner
        self._limits = [RestartLimit(plan.restarts, RESTARTS_S) for _ in range(learners)]
        self._children: list[ChildProcess] = []
        self._selector = selectors.DefaultSelector()
        self._closing = self._ending = False
        self._given_up: set[int] = set()  # learners that are not started again
        self.hosts: dict[str, ChildProcess] = {}  # what was started for other hosts, and has not ended
        self._inputs: dict[str, int] = {}  # their standard inputs
        self._last_lines: dict[str, str] = {}  # that they printed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        self.close()

    def start(self) -> None:
        if self.plan.launches:
            for learner in range(len(self._limits)):
                self._start_learner(learner)

    def environment_of(self, learner: int) -> dict[str, str]:
        """What a learner has to know to find the run."""
        return {}

    def name_of(self, learner: int) -> str:
        return f"learner {learner}"

    def _start_learner(self, learner: int) -> None:
        name, body = self.name_of(learner), self.plan.body
        inherited = os.environ if self.plan.environment is None else self.plan.environment
        environment = {**inherited, **self.environment_of(learner)}

        def run() -> int:
            os.environ.update(environment)
            return 1 if body is None else body(learner)

        child = spawn(name, self.plan.command, environment) if body is None else fork(name, run)
        self.learners[learner] = child
        self._watch(child.output, lambda: self._relay(child))
        self._add(child, lambda code: self._learner_ended(learner, code))

    def start_host(self, program: HostProgram) -> None:
        """Start a program that brings the learners of another host; its standard input stays open."""
        reader, writer = os.pipe()
        try:
            child = spawn(program.name, program.words, os.environ, stdin=reader)
        except OSError as error:
            os.close(writer)
            raise RequestError(f"cannot start '{program.words[0]}': {error.strerror}") from None
        finally:
            os.close(reader)
        self.hosts[program.name], self._inputs[program.name] = child, writer
        self._watch(child.output, lambda: self._relay(child))
        self._add(child, lambda code: self._host_ended(program.name, code))
        with contextlib.suppress(BrokenPipeError):  # that it has ended is seen in a moment
            os.write(writer, program.given)  # a key: less than a pipe holds

    def _host_ended(self, name: str, code: int) -> None:
        del self.hosts[name]
        self._close_input(name)
        if code and not self._closing:
            self.on_line(SELF, f"{name} ended ({describe_exit(code)}); the run goes on without its learners")

    def _close_input(self, name: str) -> None:
        """Of a host: its learners leave then."""
        if name in self._inputs:
            os.close(self._inputs.pop(name))

    # --- watching ---------------------------------------------------------------------------------------------------

    def _add(self, child: ChildProcess, on_exit: Callable[[int], None]) -> None:
        """From now on `on_exit` is told how the child has ended."""
        self._children.append(child)
        self._watch(child.pidfd, lambda: self._ended(child, on_exit))

    def _watch(self, descriptor: int, call: Callable[[], object]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, call)

    def _unwatch(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)

    def poll(self) -> None:
        """Wait a little for something to happen, and see to what has."""
        for key, _ in self._selector.select(POLL_S):
            # What came before in this poll may have closed it, and its number gone to another.
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    def watch(self, on_poll: Callable[[], None] = lambda: None) -> str | None:
        """Until all learners have ended; what there is to say of the run, as `finish` does."""
        while self.learners:
            self.poll()
            on_poll()
        said = self.finish()
        end = time.monotonic() + GRACE_S
        while self.hosts and time.monotonic() < end:  # they hear of the end by themselves
            self.poll()
        return said

    def _relay(self, child: ChildProcess, *, last: bool = False) -> None:
        """Pass on what it has printed."""
        lines, ended = child.read_lines(last=last)
        if ended:
            self._unwatch(child.output)
            child.close_output()
        for line in lines:
            if child.name in self.hosts and line.strip():
                self._last_lines[child.name] = line.strip()
            self.on_line(child.name, line)

    def _ended(self, child: ChildProcess, on_exit: Callable[[int], None]) -> None:
        child.kill()  # what it may have left behind in its session
        if child.output >= 0:
            self._relay(child, last=True)
        self._unwatch(child.pidfd)
        self._children.remove(child)
        on_exit(child.wait())

    def _learner_ended(self, learner: int, code: int) -> None:
        del self.learners[learner]
        ended = self._closing or self._ending or learner in self._given_up
        if code < 0 and not ended and self._limits[learner].take():
            self.on_line(SELF, f"{self.name_of(learner)} died ({describe_exit(code)}) and is restarted")
            self._start_learner(learner)
            return
        if code and not self._closing:
            self.on_line(SELF, f"{self.name_of(learner)} ended: {describe_exit(code)}")
        self.exits[learner] = code

    # --- the end ----------------------------------------------------------------------------------------------------

    def ask_to_end(self, processes: AbstractSet[int] | None = None) -> set[int]:
        """Learners (of these processes, where they are named) are told that they should end (SIGTERM), and are given
        back; how they do is theirs. None is started again.
        """
        self._ending = True
        here = {child.pid for child in self.learners.values()}
        told = here if processes is None else here & processes
        for pid in told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        return told

    def give_up(self, learner: int) -> None:
        """Kill a learner, and do not start it again."""
        self._given_up.add(learner)
        self.learners[learner].kill()

    def kill_learners(self) -> None:
        """At once: they are not asked."""
        for child in self.learners.values():
            child.kill()

    def finish(self) -> str | None:
        """When all learners have ended: what there is to say of the run, as JSON, if anything."""
        return None

    def close(self) -> None:
        """End everything that is still there."""
        self._closing = True
        for child in self.learners.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
        for name in self.hosts:
            self._close_input(name)
        start = time.monotonic()
        while (self.learners and time.monotonic() < start + GRACE_S) or (
            self.hosts and time.monotonic() < start + HOST_GRACE_S
        ):
            self.poll()
        for child in self._children:
            child.kill()
        for child in self._children:
            child.wait()
        self._children.clear()
        self._selector.close()


class RankLauncher(Launcher):
    """Learners that are the ranks of a process group. They meet through a file in memory, which no other user can open.

    A program that makes its group itself meets in a store of torch's, unless `private`. That listens on loopback, where
    other users of this host reach it: it is a process of its own, which may end without harm to those who have met, and
    what ranks say of themselves there is signed with a secret that they have from here, in their environment.
    """

    def __init__(
        self, plan: LaunchPlan, learners: int, on_line: Callable[[str, str], None], *, private: bool = False
    ) -> None:
        super().__init__(plan, learners, on_line)
        self._secret = secrets.token_hex(32)
        self._file, self._summary = (os.memfd_create(f"offbeat-{name}") for name in ("store", "summary"))
        self._listener = None if private else socket.create_server(("127.0.0.1", 0))
        self._port = 0 if self._listener is None else int(self._listener.getsockname()[1])

    def environment_of(self, learner: int) -> dict[str, str]:
        ranks, here = str(len(self._limits)), f"/proc/{os.getpid()}/fd"
        found = {
            "RANK": str(learner),
            "LOCAL_RANK": str(learner),
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "OFFBEAT_SECRET": self._secret,
            "OFFBEAT_STORE": f"{here}/{self._file}",
        }
        if self._listener is None:
            return found
        return found | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there: no rank opens one
            "OFFBEAT_SUMMARY": f"{here}/{self._summary}",
        }

    def start(self) -> None:
        """Ranks first: those that come before the store wait in its queue."""
        super().start()
        if self._listener is None:
            return
        number = self._listener.fileno()
        program = Path(__file__).with_name("torch_store.py")
        words = [sys.executable, "-P", "-u", str(program), str(number), str(self._port)]
        self._add(spawn("store", words, os.environ, pass_fds=(number,), is_read=False), self._store_ended)
        self._listener.close()  # else ranks that connect when the store is gone would wait in its queue

    def _store_ended(self, code: int) -> None:
        if not self._closing:
            told = "programs that make their process group themselves cannot do so any more"
            self.on_line(SELF, f"torch's store on port {self._port} ended ({describe_exit(code)}): {told}")

    def finish(self) -> str | None:
        found = os.pread(self._summary, MOST_SUMMARY_BYTES, 0)
        return found.decode() if found else None

    def close(self) -> None:
        super().close()
        if self._listener is not None:
            self._listener.close()
        for file in (self._file, self._summary):
            if file >= 0:
                os.close(file)
        self._file = self._summary = -1
