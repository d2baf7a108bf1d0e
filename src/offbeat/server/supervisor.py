"""The supervisor: starts coordinator, servers and, if asked to, learners; holds their memory; watches them.

Coordinator and servers are forked from here, where torch is loaded already: one that was killed is back at once, on the
same memory and the same journal. A process that was stopped for too long is killed, so that another can take its place.
When the supervisor itself is killed, the kernel ends all that it has started.

    supervisor --- coordinator --- learners
        |              |
        +---------- servers
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offbeat.collectives import memory
from offbeat.collectives.rendezvous import state_of
from offbeat.errors import OffbeatError
from offbeat.server import handshake
from offbeat.server.coordinator import coordinator_process
from offbeat.server.parameter_layout import ParameterLayout
from offbeat.server.run_setting import RunSetting
from offbeat.server.shard import server_process
from offbeat.server.wire import MOST_BYTES

STOPPED_S = 2.0  # after which a stopped server or coordinator is replaced
LOOK_S = 0.2
MOST_DRAIN_S = 600.0
GRACE_S = 3.0  # for learners to end when they are asked to
MOST_DEATHS, DEATHS_S = 8, 20.0  # of one server or of the coordinator: more than so many in so long, and the run ends
MOST_RESTARTS = 3  # of a learner that was killed
_TOLD = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run. Without words or a body for learners only the services are started: learners come by themselves.

    `learner` are the words of a command; `body` is called, with the learner's number, in a fork of this process.
    """

    setting: RunSetting
    learner: Sequence[str] = ()
    body: Callable[[int], int] | None = None
    environment: Mapping[str, str] | None = None
    seed: int = 0
    log: Path | None = None
    facts: Mapping[str, Any] | None = None
    restarts: int = MOST_RESTARTS
    store_port: int | None = None  # of a store on loopback: learners are ranks of a process group, without services

    @property
    def launches(self) -> bool:
        return bool(self.learner) or self.body is not None


class Member:
    """A process that was started here."""

    def __init__(self, role: str, number: int, pid: int) -> None:
        self.role, self.number, self.pid = role, number, pid
        self.watch = os.pidfd_open(pid)
        self.stopped_since_s: float | None = None
        self.given_up = False  # it was stopped for too long
        self.output = b""
        self.pipe = -1

    @property
    def name(self) -> str:
        return self.role if self.role == "coordinator" else f"{self.role} {self.number}"


class Supervisor:
    """See the module's text. `tell(name, line)` is given what learners print, and what is worth knowing."""

    def __init__(self, plan: Plan, tell: Callable[[str, str], None]) -> None:
        self.plan, self.tell = plan, tell
        self.token = secrets.token_hex(16)
        self.listener, self.name = handshake.new_listener()
        self.journal, path = tempfile.mkstemp(prefix="offbeat-journal-")
        Path(path).unlink()  # nobody else needs its name, and so nothing is left behind
        self.start_s = time.monotonic()
        self.held: tuple[ParameterLayout, int] | None = None
        self.selector = selectors.DefaultSelector()
        self.members: dict[int, Member] = {}  # by pid
        self.generations = [0] * plan.setting.shards
        self.restarted = [0] * plan.setting.learners
        self.exits: dict[int, int] = {}  # learner -> exit code
        self.begin_by_s: float | None = None  # with whoever is there: not all will come
        self.deaths: dict[tuple[str, int], deque[float]] = {}
        self.down: dict[str, tuple[float, str]] = {}  # who has died and is not back yet: since when, and how
        self.recoveries: list[dict[str, Any]] = []
        self.pids: dict[int, int] = {}  # of learners, by nonce: whoever comes in the coordinator's place must know
        self.summary: str | None = None
        self.draining = self.finishing = False
        self.boss: socket.socket | None = None
        self._quiet: memory.Segment | None = None

    # --- starting ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.plan.store_port is None:
            self._start_coordinator()
        if self.plan.launches:
            for learner in range(self.plan.setting.learners):
                self._start_learner(learner)

    def _start_coordinator(self) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.boss = mine
        run = coordinator_process.CoordinatorOptions(
            setting=replace(self.plan.setting, start_by_s=self.begin_by_s or self.plan.setting.start_by_s),
            token=self.token,
            seed=self.plan.seed,
            start_s=self.start_s,
            log=self.plan.log,
            launched=self.plan.launches,
            facts=dict(self.plan.facts or {}),
        )

        def body() -> None:
            coordinator_process.CoordinatorProcess(
                run, self.listener, theirs, coordinator_process.Journal(self.journal), self.held, self.pids
            ).serve()

        self._fork("coordinator", 0, body, keep={theirs.fileno(), self.listener.fileno(), self.journal})
        theirs.close()
        self._watch(mine, lambda: self._hear_boss(mine))
        self._say_ended(self.exits)
        if self.draining:
            self._say_finish()

    def _start_server(self, shard: int) -> None:
        self.generations[shard] += 1
        generation = self.generations[shard]
        self._fork("server", shard, lambda: server_process.serve(self.name, self.token, shard, generation), keep=set())

    def _fork(self, role: str, number: int, body: Callable[[], None], keep: set[int]) -> None:
        """A child with nothing but what it needs. Nothing runs in threads here, so forking is safe."""
        supervisor = os.getpid()
        with _undisturbed():
            pid = os.fork()
            if pid == 0:
                for told in _TOLD:  # these are for the supervisor, which ends all in order
                    signal.signal(told, signal.SIG_IGN)
        if pid == 0:
            code = 1
            try:
                _die_with(supervisor)
                self.selector.close()
                close_all_but(keep | ({self.held[1]} if self.held else set()))
                body()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except OffbeatError as error:
                os.write(2, f"offbeat: {role} {number}: {error}\n".encode())
            except BaseException:
                import traceback

                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(code)
        self._adopt(Member(role, number, pid))

    def environment_of(self, learner: int) -> dict[str, str]:
        """What a learner has to know to find the run."""
        setting = self.plan.setting
        if self.plan.store_port is not None:
            return {
                "RANK": str(learner),
                "LOCAL_RANK": str(learner),
                "WORLD_SIZE": str(setting.learners),
                "LOCAL_WORLD_SIZE": str(setting.learners),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.plan.store_port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there: no rank opens one
            }
        return {
            "OFFBEAT_DOOR": self.name,
            "OFFBEAT_TOKEN": self.token,
            "OFFBEAT_SYNC": setting.line,
            "OFFBEAT_LEARNER": str(learner),
            "OFFBEAT_LEARNERS": str(setting.learners),
        }

    def _start_learner(self, learner: int) -> None:
        reader, writer = os.pipe()
        supervisor = os.getpid()

        def begin() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _TOLD)
            _die_with(supervisor)

        environment = {
            **(os.environ if self.plan.environment is None else self.plan.environment),
            **self.environment_of(learner),
        }
        if self.plan.body is not None:
            pid = self._fork_learner(learner, environment, writer, self.plan.body)
        else:
            with _undisturbed():
                process = subprocess.Popen(
                    list(self.plan.learner),
                    stdin=subprocess.DEVNULL,
                    stdout=writer,
                    stderr=writer,
                    env=environment,
                    start_new_session=True,
                    preexec_fn=begin,
                )
            process.returncode = 0  # it is waited for here, by its descriptor
            pid = process.pid
        os.close(writer)
        member = Member("learner", learner, pid)
        member.pipe = reader
        os.set_blocking(reader, False)
        self._watch(reader, lambda: self._hear_learner(member))
        self._adopt(member)

    def _fork_learner(
        self, learner: int, environment: Mapping[str, str], writer: int, body: Callable[[int], int]
    ) -> int:
        """A learner that need not load anything again. Nothing runs in threads here, so forking is safe."""
        supervisor = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with _undisturbed():
            pid = os.fork()
            if pid == 0:
                os.setsid()
                for told in _TOLD:
                    signal.signal(told, signal.SIG_IGN)  # forgets a Ctrl-C that came before the session was its own
                    signal.signal(told, signal.SIG_DFL)
        if pid:
            return pid
        code = 1
        try:
            _die_with(supervisor)
            ours = fcntl.fcntl(writer, fcntl.F_DUPFD, 3)  # whoever started us may have closed its own 0 to 2
            nothing = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((nothing, 0), (ours, 1), (ours, 2)):
                os.dup2(source, target)
            self.selector.close()
            close_all_but(set())
            os.environ.update(environment)
            code = body(learner)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            import traceback

            os.write(2, traceback.format_exc().encode())
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _adopt(self, member: Member) -> None:
        self.members[member.pid] = member
        self._watch(member.watch, lambda: self._died(member))

    # --- watching ---------------------------------------------------------------------------------------------------

    def _watch(self, one: Any, call: Callable[[], object]) -> None:
        self.selector.register(one, selectors.EVENT_READ, call)

    def _unwatch(self, one: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(one)

    def _is_watched(self, key: selectors.SelectorKey) -> bool:
        """Still, and as the same: what came before in this turn may have closed it, and its number gone to another."""
        try:
            return self.selector.get_map()[key.fileobj] is key
        except (KeyError, ValueError):
            return False

    def turn(self) -> None:
        """One turn of the loop: what has happened, and a look at who is stopped."""
        for key, _ in self.selector.select(LOOK_S):
            if self._is_watched(key):
                key.data()
        now = time.monotonic()
        for member in list(self.members.values()):
            if member.role == "learner":
                continue
            if member.given_up:
                continue
            if state_of(member.pid) != "T":
                member.stopped_since_s = None
            elif member.stopped_since_s is None:
                member.stopped_since_s = now
            elif now - member.stopped_since_s > STOPPED_S:
                member.given_up = True
                os.kill(member.pid, signal.SIGKILL)

    def _hear_boss(self, line: socket.socket) -> bool:
        """What the coordinator says; whether it said something."""
        try:
            data, descriptors, _, _ = socket.recv_fds(line, MOST_BYTES, 2)
        except OSError:
            data, descriptors = b"", []
        if not data:
            self._unwatch(line)
            return False
        message = coordinator_process.decode_supervisor_message(data)
        if message.what == "arena" and self.held is None and message.table is not None:
            self.held = (message.table, descriptors.pop(0))
            self._quiet = memory.Segment(self.held[1], 4096)  # its first word says whether anybody is there
            for shard in range(self.plan.setting.shards):
                self._start_server(shard)
        elif message.what == "ready":
            self._is_back(message.text)
        elif message.what == "learner":
            self.pids[message.nonce] = message.pid
        elif message.what == "say":
            self.tell("offbeat", message.text)
        elif message.what == "summary":
            self.summary = message.text
        elif message.what == "failed":
            self.kill_learners()  # they wait for what does not come: asking them would take long
            raise OffbeatError(message.text)
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _hear_learner(self, member: Member) -> None:
        try:
            data = os.read(member.pipe, 65536)
        except BlockingIOError:
            return
        if data:
            *lines, member.output = (member.output + data).split(b"\n")
            if len(member.output) > 65536:
                lines, member.output = [*lines, member.output], b""
        else:
            lines = [member.output] if member.output else []
            self._unwatch(member.pipe)
            os.close(member.pipe)
            member.pipe = -1
        for line in lines:
            self.tell(member.name, line.decode(errors="replace"))

    def _died(self, member: Member) -> None:
        _, status = os.waitpid(member.pid, 0)
        self._unwatch(member.watch)
        os.close(member.watch)
        del self.members[member.pid]
        code = os.waitstatus_to_exitcode(status)
        if member.role == "learner":
            self._learner_ended(member, code)
            return
        if member.role == "coordinator" and self.boss is not None:
            while self._hear_boss(self.boss):  # its last words
                pass
            self.boss.close()
            self.boss = None
        if self.finishing or (member.role == "coordinator" and self.summary is not None):
            return
        self._count_death(member, code)
        since_s, how = time.monotonic(), f"died ({_how(code)})"
        if member.given_up and member.stopped_since_s is not None:
            since_s, how = member.stopped_since_s, "was stopped"
        self.down.setdefault(member.name, (since_s, how))
        if member.role == "server":
            self._start_server(member.number)
        else:
            self._start_coordinator()

    def _is_back(self, name: str) -> None:
        """A server or the coordinator works again, if it did not all the time."""
        if name in self.down:
            since_s, how = self.down.pop(name)
            seconds = time.monotonic() - since_s
            self.recoveries.append({"who": name, "how": how, "seconds": seconds})
            self.tell("offbeat", f"{name} {how}; another took its place after {seconds:.2f} s")

    def _count_death(self, member: Member, code: int) -> None:
        times = self.deaths.setdefault((member.role, member.number), deque(maxlen=MOST_DEATHS))
        times.append(time.monotonic())
        if len(times) == MOST_DEATHS and times[-1] - times[0] < DEATHS_S:
            raise OffbeatError(f"{member.name} died {MOST_DEATHS} times in {DEATHS_S:g} s, the last time: {_how(code)}")

    def _learner_ended(self, member: Member, code: int) -> None:
        _kill_group(member.pid)  # what it may have left behind
        for _ in range(1000):  # what it has printed; a process that has left its group may print for ever
            if member.pipe < 0:
                break
            before = member.pipe
            self._hear_learner(member)
            if member.pipe == before and not _has_more(member.pipe):
                self._unwatch(member.pipe)
                os.close(member.pipe)
                if member.output:
                    self.tell(member.name, member.output.decode(errors="replace"))
                member.pipe = -1
        learner = member.number
        if code < 0 and not self.finishing and self.restarted[learner] < self.plan.restarts:
            self.restarted[learner] += 1
            self.tell("offbeat", f"learner {learner} died ({_how(code)}) and is started again")
            self._start_learner(learner)
            return
        if code and not self.finishing:
            self.tell("offbeat", f"learner {learner} ended: {_how(code)}")
        self.exits[learner] = code
        self._say_ended([learner])
        if self.begin_by_s is None and self.boss is not None:  # if the run has not begun, it does without this one
            self.begin_by_s = time.monotonic() - self.start_s
            with contextlib.suppress(OSError):
                coordinator_process.say(self.boss, coordinator_process.ToSupervisor(what="begin", at_s=self.begin_by_s))

    def _say_ended(self, learners: Iterable[int]) -> None:
        for learner in learners:
            with contextlib.suppress(OSError):
                if self.boss is not None:
                    coordinator_process.say(self.boss, coordinator_process.ToSupervisor(what="ended", number=learner))

    def is_quiet(self) -> bool:
        """Whether no learner is in the run."""
        return self.held is None or self._quiet is None or bool(self._quiet.words[0])

    # --- the end ----------------------------------------------------------------------------------------------------

    def ask_to_end(self) -> None:
        """Learners are told that they should (SIGTERM); how they do is theirs."""
        for member in list(self.members.values()):
            if member.role == "learner":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGTERM)

    def kill_learners(self) -> None:
        """At once: they are not asked."""
        for member in self.members.values():
            if member.role == "learner":
                _kill_group(member.pid)

    @property
    def learners_left(self) -> int:
        return sum(member.role == "learner" for member in self.members.values())

    def _say_finish(self) -> None:
        if self.boss is not None:
            with contextlib.suppress(OSError):
                coordinator_process.say(self.boss, coordinator_process.ToSupervisor(what="finish"))

    def finish(self) -> str | None:
        """Let the last updates be made and the books be closed; the summary, as JSON."""
        if self.plan.store_port is not None:
            return None
        self.draining = True
        self._say_finish()
        end = time.monotonic() + MOST_DRAIN_S  # the coordinator waits as long as updates are being made
        while self.summary is None and time.monotonic() < end:
            self.turn()
        return self.summary

    def close(self) -> None:
        """End everything that is still there."""
        self.finishing = True
        learners = [member for member in self.members.values() if member.role == "learner"]
        for member in learners:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(member.pid, signal.SIGTERM)
        end = time.monotonic() + GRACE_S
        while self.learners_left and time.monotonic() < end:
            self.turn()
        for member in list(self.members.values()):
            if member.role == "learner":
                _kill_group(member.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
        for member in list(self.members.values()):
            os.waitpid(member.pid, 0)
            os.close(member.watch)
            if member.pipe >= 0:
                os.close(member.pipe)
        self.members.clear()
        self.selector.close()
        self.listener.close()
        os.close(self.journal)
        if self.boss is not None:
            self.boss.close()
        if self.held is not None:
            os.close(self.held[1])


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C and SIGTERM come a little later: what they raise is lost in what Python calls around a fork."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _TOLD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _TOLD)


def _how(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"


def _has_more(pipe: int) -> bool:
    import select

    return bool(select.select([pipe], [], [], 0)[0])


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _die_with(parent: int) -> None:
    """In a child: the kernel kills this process when its parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has died already
        os._exit(1)


def close_all_but(keep: set[int]) -> None:
    """What a fork has inherited. The numbers stay taken, by nothing: some libraries (libuv, which torch's store is made
    of) close theirs again in every later fork, and so may objects that are dropped; they must not be another's by then.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, no paths
        number = int(name)
        if number > 2 and number not in keep and number != nothing:
            with contextlib.suppress(OSError):
                os.fstat(number)  # the listing itself had one, which is closed by now
                os.dup2(nothing, number, inheritable=False)
    os.close(nothing)
