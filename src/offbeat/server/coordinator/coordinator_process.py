"""The coordinator's process: carries messages between the state machine, the sockets and shared memory.

It accepts connections. Every message that goes into the machine is written to the journal first; a coordinator that is
started on a journal goes through all of it, in silence, and is then where its predecessor was. Learners and servers
whose connection was cut connect again by themselves and ask again.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from offbeat import plugins
from offbeat.collectives import memory
from offbeat.collectives.rendezvous import credentials
from offbeat.errors import OffbeatError, PolicyError
from offbeat.policies.damping import CORRECT, KEEP
from offbeat.processes.child import Stopwatch, state_of
from offbeat.server import handshake
from offbeat.server.arena import Arena, ArenaLayout, stamp
from offbeat.server.coordinator.coordinator import Coordinator
from offbeat.server.coordinator.invariants import stall_of
from offbeat.server.coordinator.run_recorder import RunRecorder
from offbeat.server.coordinator.session import SessionName
from offbeat.server.parameter_layout import ParameterLayout
from offbeat.server.run_setting import RunSetting
from offbeat.server.wire import (
    INPUT,
    MOST_BYTES,
    OUTPUT,
    TO_LEARNER,
    Bye,
    CancelWord,
    Committed,
    Done,
    FenceWord,
    Finish,
    FromSession,
    Gone,
    Hello,
    Paused,
    Ready,
    Refused,
    ShardJob,
    Silent,
    Tick,
    WakeDue,
    Welcome,
    WireError,
    decode_input,
    encode,
)

LIVENESS_S = 0.25  # between two checks of who still lives
SILENCE_S = 3.0  # without a sign of life, after which a learner is given up
BUSY_S = 60.0  # the same of one whose process runs
TICK_S = 1.0
STALL_S = 3.0  # in which nothing can happen any more, after which the run is ended; messages are said again every 2 s
DRAIN_S = 5.0  # for the last updates, at the end
_RECORD = struct.Struct("<dI")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorOptions:
    """What the coordinator is told by the supervisor."""

    setting: RunSetting
    token: str
    seed: int
    start_s: float
    log: Path | None = None
    facts: dict[str, Any] | None = None  # of the run, for its log
    launched: bool = False  # learners are started, and started again, by the supervisor


class ToSupervisor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Between coordinator and supervisor.

    "arena": here is the memory, for this table. "ready": a server or the coordinator (`text`) works. "learner": this
    process has come, under this nonce. "begin": not all learners will come; begin with those that are there. "ended":
    this learner will not come again. "say": something worth knowing. "failed": the run cannot go on, and why. "finish":
    the run is over. "summary": what there is to tell of it.
    """

    what: str
    table: ParameterLayout | None = None
    text: str = ""
    nonce: int = 0
    pid: int = 0
    at_s: float = 0.0
    number: int = 0


_encode = msgspec.json.Encoder().encode
decode_supervisor_message = msgspec.json.Decoder(ToSupervisor).decode


def say(connection: socket.socket, what: str, descriptors: Sequence[int] = (), **fields: Any) -> None:
    """To the other of supervisor and coordinator; where that is gone, this one is soon."""
    with contextlib.suppress(OSError):
        socket.send_fds(connection, [_encode(ToSupervisor(what=what, **fields))], descriptors)


class Journal:
    """All that the machine has been told, in a file that outlives the process."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def add(self, data: bytes, at_s: float) -> None:
        os.write(self.descriptor, _RECORD.pack(at_s, len(data)) + data)

    def read(self) -> Iterator[tuple[INPUT, float]]:
        """From the start. A record that was being written when its writer was killed is not there."""
        with os.fdopen(os.dup(self.descriptor), "rb") as file:
            file.seek(0)
            end = 0
            while len(head := file.read(_RECORD.size)) == _RECORD.size:
                at_s, size = _RECORD.unpack(head)
                data = file.read(size)
                if len(data) < size:
                    break
                end += _RECORD.size + size
                yield decode_input(data), at_s
        os.ftruncate(self.descriptor, end)
        os.lseek(self.descriptor, end, os.SEEK_SET)


class PeerConnection:
    """A learner or a server that was accepted."""

    def __init__(self, one: socket.socket, role: str, number: int) -> None:
        self.socket = one
        self.role, self.number = role, number
        self.nonce = self.incarnation = 0
        self.pid = credentials(one)[0]
        self.beat = -1
        self.heard_s = time.monotonic()
        self.silent = False

    @property
    def session(self) -> SessionName:
        return self.number, self.incarnation

    @property
    def patience_s(self) -> float:
        """How long a learner may be silent: one that runs may just be busy, in one long call."""
        return SILENCE_S if state_of(self.pid) in ("T", "t") else BUSY_S


class CoordinatorProcess:
    """See the module's text."""

    def __init__(
        self,
        options: CoordinatorOptions,
        listener: socket.socket,
        supervisor: socket.socket,
        journal: Journal,
        held: tuple[ParameterLayout, int] | None,
        pids: dict[int, int],  # of learners that came to a coordinator before, by nonce
    ) -> None:
        self.options, self.supervisor, self.journal = options, supervisor, journal
        self.setting = options.setting
        self.listener = listener
        self.selector = selectors.DefaultSelector()
        self.connections: list[PeerConnection] = []
        self.arena: Arena | None = None
        self.descriptor = -1
        self.machine: Coordinator | None = None
        self.recorder = RunRecorder(options.setting.learners)
        self.finishing_by_s: float | None = None
        self.ticked_s = 0.0
        self.stalled = Stopwatch()
        self.failed = False
        self.left: set[int] = set()  # learners that have said goodbye
        self.ended: set[int] = set()  # and those that will not be started again
        self.missing_since_s: dict[SessionName, float] = {}
        self.pids = dict(pids)
        self.pids_by_session: dict[SessionName, int] = {}
        if held is not None:
            self._recover(self._open_arena(*held))

    # --- the machine and its memory ---------------------------------------------------------------------------------

    def _open_arena(self, table: ParameterLayout, held: int | None = None) -> Coordinator:
        """There is a model: now there is memory for it, made here if nobody holds it yet, and a machine."""
        table.check()
        setting = replace(self.setting, clip_norm=table.clip_norm, in_place=table.in_place)
        size_bytes = ArenaLayout(table, setting).size_bytes
        self.descriptor = memory.create(size_bytes, "the parameter server")[1] if held is None else held
        arena = Arena(memory.Segment(self.descriptor, size_bytes), table, setting)
        facts = {"strategy": setting.line, "expect": setting.learners, "start_by_s": 0.0, "seed": self.options.seed}
        facts |= {"simulated": False, "rule": table.rule, "clip_norm": table.clip_norm, "gradients": table.gradients}
        facts |= {"staleness": CORRECT if setting.corrects else KEEP, "scaling": setting.scaling}
        self.recorder.push_bytes = arena.slots[0].nbytes
        self.recorder.fetch_bytes = 0 if table.in_place else arena.weights[0].nbytes
        self.recorder.open(self.options.log, facts | plugins.facts() | (self.options.facts or {}))
        self.machine = Coordinator(setting, self.recorder.decision)
        self.arena = arena  # not before there is a machine: who comes after one that was refused here is refused too
        if held is None:
            say(self.supervisor, "arena", [self.descriptor], table=table)
        return self.machine

    def _recover(self, machine: Coordinator) -> None:
        for message, at_s in self.journal.read():
            self.recorder.hear(message, at_s)
            answers = machine.handle(message, at_s)
            for answer in answers:
                if isinstance(answer, Welcome) and self.pids.get(answer.nonce):
                    self.pids_by_session[answer.learner, answer.incarnation] = self.pids[answer.nonce]
            self._record(machine, message, answers, at_s)
        for word in machine.shared_words():
            self._deliver(word)
        self._publish_quiet(machine)

    # --- the loop ---------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Until the supervisor says that the run is over, or is gone."""
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self.selector.register(self.supervisor, selectors.EVENT_READ, self._hear_supervisor)
        say(self.supervisor, "ready", text="coordinator")
        while not self._is_over():
            for key, _ in self.selector.select(min(LIVENESS_S, max(0.0, self._wake_in_s()))):
                key.data()
            if self._wake_in_s() <= 0:
                self._handle(WakeDue())
            self._check_liveness()
        say(self.supervisor, "summary", text=self.recorder.close(self.machine))

    def _wake_in_s(self) -> float:
        """How long until the policy is to be woken."""
        due_s = None if self.machine is None else self.machine.next_wake_s
        return math.inf if due_s is None else due_s - (time.monotonic() - self.options.start_s)

    def _fail(self, why: str) -> None:
        """The run cannot go on, and starting again would not help: the supervisor ends it."""
        if not self.failed:
            self.failed = True
            say(self.supervisor, "failed", text=why)

    def _is_over(self) -> bool:
        if self.finishing_by_s is None:
            return False
        return self.machine is None or self.machine.grants.idle or time.monotonic() > self.finishing_by_s

    def _hear_supervisor(self) -> None:
        data = self.supervisor.recv(MOST_BYTES)
        if not data:
            raise SystemExit(0)  # the supervisor is gone: so is the run
        message = decode_supervisor_message(data)
        if message.what == "finish" and self.finishing_by_s is None:
            self.finishing_by_s = time.monotonic() + DRAIN_S
            self._handle(Finish())
        elif message.what == "begin":
            self.setting = replace(self.setting, start_by_s=message.at_s)
            if self.machine is not None:
                self.machine.setting = replace(self.machine.setting, start_by_s=message.at_s)
            self._handle(Tick())
        elif message.what == "ended":
            self.ended.add(message.number)
            if self.machine is not None:
                self._publish_quiet(self.machine)

    # --- who still lives --------------------------------------------------------------------------------------------

    def _check_liveness(self) -> None:
        now = time.monotonic()
        if self.arena is not None and self.machine is not None:
            for one in [one for one in self.connections if one.role == "learner" and one.incarnation]:
                beat = self.arena.learner_words[one.number][2].get()
                if beat != one.beat:
                    one.beat, one.heard_s, one.silent = beat, now, False
                elif now - one.heard_s > one.patience_s and not one.silent:
                    one.silent = True
                    say(
                        self.supervisor,
                        "say",
                        text=f"learner {one.number} has been silent for {now - one.heard_s:.0f} s and was dropped",
                    )
                    self._handle(Silent(*one.session))
            self._check_missing(self.machine, now)
        if now - self.ticked_s > TICK_S:
            self.ticked_s = now
            self._handle(Tick())
        self._check_stall()

    def _check_missing(self, machine: Coordinator, now: float) -> None:
        """Learners that were here when this coordinator came back, and have not come back themselves."""
        connected = {one.session for one in self.connections if one.role == "learner"}
        for name, pid in list(self.pids_by_session.items()):
            if name not in connected and state_of(pid) in ("", "Z", "X"):  # it writes to no memory any more
                del self.pids_by_session[name]
                self._handle(Gone(*name))
        here = {session.name for session in machine.sessions.values() if session.here}
        self.missing_since_s = {name: self.missing_since_s.get(name, now) for name in here - connected}
        for name, since in list(self.missing_since_s.items()):
            if now - since > SILENCE_S:
                self._handle(Silent(*name))

    def _check_stall(self) -> None:
        """End a run in which nothing can happen any more: no learner may come, or come again after it was silent."""
        machine = self.machine
        why = None if machine is None or self.finishing_by_s is not None else stall_of(machine)
        if machine is not None and why is not None:
            away = {session.learner for session in machine.sessions.values() if not session.here}
            why = None if away - self.left - self.ended else why
        if self.stalled.seconds(why is not None) > STALL_S and why is not None:
            self._fail(why)

    # --- connections ------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            one, _ = self.listener.accept()
        except OSError:
            return
        try:
            one.settimeout(handshake.HANDSHAKE_S)
            self._admit(one, handshake.read_handshake(one, self.options.token))
        except (OffbeatError, OSError) as error:
            if isinstance(error, OffbeatError):
                with contextlib.suppress(OSError):
                    handshake.accept_peer(one, handshake.Accept(refused=str(error)), None)
            one.close()

    def _admit(self, one: socket.socket, said: handshake.Handshake) -> None:
        if self.arena is None:
            if said.table is None:
                raise OffbeatError("no learner has sent a model yet")
            self._open_arena(said.table)
        assert self.arena is not None
        table = self.arena.table
        if said.table is not None and said.table.digest != table.digest:
            raise OffbeatError(
                "its model or optimizer is not that of the others: the parameters must have the same names, shapes, "
                "types and order"
            )
        accept = handshake.Accept(
            table=table,
            setting=replace(self.arena.setting, book=None, memory=None),
            seed=self.options.seed,
            start_s=self.options.start_s,
        )
        handshake.accept_peer(one, accept, self.descriptor)
        one.setblocking(False)
        connection = PeerConnection(one, said.role, said.number)
        self.connections.append(connection)
        self.selector.register(one, selectors.EVENT_READ, lambda: self._receive(connection))

    def _receive(self, connection: PeerConnection) -> None:
        """All that it has said."""
        while connection in self.connections:
            try:
                data = connection.socket.recv(MOST_BYTES)
                message = decode_input(data) if data else None
            except BlockingIOError:
                return
            except (OSError, WireError):
                message = None
            if message is None or not self._may_say(connection, message):
                self._disconnect(connection)
                return
            if isinstance(message, Hello):
                connection.nonce = message.nonce
                self.pids[connection.nonce] = connection.pid
                say(self.supervisor, "learner", nonce=connection.nonce, pid=connection.pid)
            elif isinstance(message, Ready):
                say(self.supervisor, "ready", text=f"server {message.shard}")
            self._handle(message, data)

    def _may_say(self, connection: PeerConnection, message: INPUT) -> bool:
        if connection.role == "learner":
            return isinstance(message, Hello | FromSession) and message.learner == connection.number
        return isinstance(message, Ready | Done) and message.shard == connection.number

    def _disconnect(self, connection: PeerConnection) -> None:
        """It is gone, or was sent away."""
        self.selector.unregister(connection.socket)
        connection.socket.close()
        self.connections.remove(connection)
        if connection.role == "learner" and connection.incarnation:
            self.pids_by_session.pop(connection.session, None)
            self._handle(Gone(*connection.session))

    # --- in and out -------------------------------------------------------------------------------------------------

    def _handle(self, message: INPUT, data: bytes | None = None) -> None:
        """A message goes through the journal into the machine, and what it answers to whom it is for."""
        machine = self.machine
        if machine is None or self.failed:
            return
        at_s = time.monotonic() - self.options.start_s
        self.journal.add(encode(message) if data is None else data, at_s)
        self._note(message, at_s)
        try:
            answers = machine.handle(message, at_s)
        except PolicyError as error:
            self._fail(str(error))
            return
        self._record(machine, message, answers, at_s)
        for answer in answers:
            self._deliver(answer)
        self._publish_quiet(machine)

    def _note(self, message: INPUT, at_s: float) -> None:
        """For the log, and who has said goodbye."""
        self.recorder.hear(message, at_s)
        if isinstance(message, Bye):
            self.left.add(message.learner)
        elif isinstance(message, Hello):
            self.left.discard(message.learner)
        elif isinstance(message, Done) and self.finishing_by_s is not None:
            self.finishing_by_s = time.monotonic() + DRAIN_S  # it goes on

    def _record(self, machine: Coordinator, message: INPUT, answers: list[OUTPUT], at_s: float) -> None:
        if isinstance(message, Paused) and message.led and machine.pauses.times:
            self.recorder.pause(message.learner, *machine.pauses.times[-1], machine.policy.version)
        self.recorder.answered(answers, at_s)

    def _publish_quiet(self, machine: Coordinator) -> None:
        """In shared memory, whether all learners have left for good and the weights are the last ones."""
        assert self.arena is not None
        here = any(one.here for one in machine.sessions.values())
        # Whether they will not come again: they said goodbye, or whoever starts learners says so.
        ended = not self.options.launched or machine.sessions.keys() <= self.left | self.ended
        quiet = machine.seeded and machine.grants.idle and not here and ended
        if self.arena.quiet_word.get() != quiet:
            self.arena.quiet_word.set(int(quiet))

    def _deliver(self, message: OUTPUT) -> None:
        """To whom it is for. What cannot be sent now is lost, and asked for again."""
        arena = self.arena
        assert arena is not None
        if isinstance(message, CancelWord):
            arena.learner_words[message.learner][0].set(stamp(message.incarnation, message.seq))
        elif isinstance(message, FenceWord):
            arena.learner_words[message.learner][1].set(message.incarnation)
        elif isinstance(message, Committed):
            version, buffer = arena.committed[message.commit_group]
            buffer.set(message.buffer)
            version.set(message.version)
        else:
            for connection in [one for one in self.connections if self._is_for(message, one)]:
                with contextlib.suppress(OSError):
                    connection.socket.send(encode(message))
                if isinstance(message, Welcome):
                    connection.incarnation = message.incarnation
                    self.pids_by_session[connection.session] = connection.pid
                    connection.heard_s, connection.silent = time.monotonic(), False

    def _is_for(self, message: ShardJob | TO_LEARNER, connection: PeerConnection) -> bool:
        if isinstance(message, ShardJob):
            return (connection.role, connection.number) == ("server", message.shard)
        if (connection.role, connection.number) != ("learner", message.learner):
            return False
        if isinstance(message, Welcome | Refused):
            return connection.nonce == message.nonce
        return connection.incarnation == message.incarnation
