"""The coordinator's process: carries messages between the machine and the world.

It owns the door. Every message that goes into the machine is written to the journal first; a coordinator that is
started on a journal goes through all of it, in silence, and is then where its predecessor was. Learners and servers
whose line was cut come back by themselves and ask again.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from offbeat import plugins
from offbeat.collectives import memory
from offbeat.collectives.rendezvous import credentials
from offbeat.errors import OffbeatError, PolicyError
from offbeat.policies.damping import CORRECT, KEEP
from offbeat.processes.child import state_of
from offbeat.server import handshake
from offbeat.server.arena import Arena, ArenaLayout, stamp
from offbeat.server.coordinator.coordinator import Coordinator
from offbeat.server.coordinator.ledger import Ledger
from offbeat.server.coordinator.session import LearnerSession, Setting
from offbeat.server.coordinator.stalls import stall_of
from offbeat.server.parameter_layout import ParameterLayout
from offbeat.server.wire import (
    FROM_LEARNER,
    INPUT,
    MOST_BYTES,
    Bye,
    Cancel,
    Committed,
    Done,
    Fence,
    Finish,
    Gone,
    Hello,
    Job,
    Message,
    Paused,
    Ready,
    Refused,
    Silent,
    Tick,
    Welcome,
    WireError,
    Woke,
    decode_input,
    encode,
)

LOOK_S = 0.25  # between two looks at who still lives
SILENCE_S = 3.0  # without a sign of life, after which a learner is given up
BUSY_S = 60.0  # the same of one whose process runs
TICK_S = 1.0
STALL_S = 3.0  # in which nothing can happen any more, after which the run is ended; messages are said again every 2 s
DRAIN_S = 5.0  # for the last updates, at the end
_RECORD = struct.Struct("<dI")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the coordinator is told by the supervisor."""

    setting: Setting
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


_encode_boss = msgspec.json.Encoder().encode
decode_boss = msgspec.json.Decoder(ToSupervisor).decode


def say(line: socket.socket, message: ToSupervisor, descriptors: list[int] | None = None) -> None:
    """To the other of supervisor and coordinator."""
    data = _encode_boss(message)
    socket.send_fds(line, [data], descriptors or [])


def now_stopped(pid: int) -> bool:
    return state_of(pid) in ("T", "t")


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
    """One who has come in."""

    def __init__(self, one: socket.socket, role: str, number: int) -> None:
        self.socket = one
        self.role, self.number = role, number
        self.nonce = self.incarnation = 0
        self.pid = credentials(one)[0]
        self.beat = -1
        self.heard_s = time.monotonic()
        self.silent = False


class CoordinatorProcess:
    """See the module's text."""

    def __init__(
        self,
        run: Run,
        listener: socket.socket,
        boss: socket.socket,
        journal: Journal,
        held: tuple[ParameterLayout, int] | None,
        pids: dict[int, int],  # of learners that came to a coordinator before, by nonce
    ) -> None:
        self.run, self.boss, self.journal = run, boss, journal
        self.setting = run.setting
        self.listener = listener
        self.selector = selectors.DefaultSelector()
        self.lines: list[PeerConnection] = []
        self.arena: Arena | None = None
        self.descriptor = -1
        self.machine: Coordinator | None = None
        self.ledger = Ledger(run.setting.learners)
        self.finishing_by_s: float | None = None
        self.ticked_s = 0.0
        self.stalled_since_s: float | None = None
        self.failed = False
        self.left: set[int] = set()  # learners that have said goodbye
        self.ended: set[int] = set()  # and those that will not be started again
        self.missing_since_s: dict[tuple[int, int], float] = {}
        self.pids = dict(pids)
        self.stays: dict[tuple[int, int], int] = {}  # learner and incarnation -> process
        if held is not None:
            self._furnish(*held)
            self._recover()

    # --- the machine and its memory ---------------------------------------------------------------------------------

    def _furnish(self, table: ParameterLayout, descriptor: int) -> None:
        """There is an arena: now there can be a machine."""
        setting = replace(self.setting, clip_norm=table.clip_norm, in_place=table.in_place)
        size_bytes = ArenaLayout(table, setting).size_bytes
        self.arena = Arena(memory.Segment(descriptor, size_bytes), table, setting)
        self.descriptor = descriptor
        facts = {"strategy": setting.line, "expect": setting.learners, "start_by_s": 0.0, "seed": self.run.seed}
        facts |= {"simulated": False, "rule": table.rule, "clip_norm": table.clip_norm, "gradients": table.gradients}
        facts |= {"staleness": CORRECT if setting.corrects else KEEP, "scaling": setting.scaling}
        self.ledger.push_bytes = self.arena.slots[0].nbytes
        self.ledger.fetch_bytes = 0 if table.in_place else self.arena.weights[0].nbytes
        self.ledger.open(self.run.log, facts | plugins.facts() | (self.run.facts or {}))
        self.machine = Coordinator(setting, self.ledger.decision)

    def _recover(self) -> None:
        assert self.machine is not None
        for message, at_s in self.journal.read():
            self.ledger.hear(message)
            for answer in self.machine.handle(message, at_s):
                if isinstance(answer, Welcome) and self.pids.get(answer.nonce):
                    self.stays[answer.learner, answer.incarnation] = self.pids[answer.nonce]
            self._note_rest(message)
        for word in self.machine.words():
            self._carry(word)
        self._say_quiet()

    def _make_arena(self, table: ParameterLayout) -> None:
        table.check()
        setting = replace(self.setting, clip_norm=table.clip_norm, in_place=table.in_place)
        _, descriptor = memory.create(ArenaLayout(table, setting).size_bytes, "the parameter server")
        self._furnish(table, descriptor)
        say(self.boss, ToSupervisor(what="arena", table=table), [descriptor])

    # --- the loop ---------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Until the supervisor says that the run is over, or is gone."""
        self.listener.setblocking(False)
        self._watch(self.listener, self._accept)
        self._watch(self.boss, self._hear_boss)
        self._say(ToSupervisor(what="ready", text="coordinator"))
        while self.finishing_by_s is None or not self._is_drained():
            for key, _ in self.selector.select(self._sleep_s()):
                key.data()
            self._wake()
            self._look_around()
        summary = self.ledger.close(self.machine)
        self._say(ToSupervisor(what="summary", text=summary))

    def _sleep_s(self) -> float:
        """Until the policy is to be woken, or the next look at who still lives."""
        due_s = None if self.machine is None else self.machine.next_wake_s
        if due_s is None:
            return LOOK_S
        return min(LOOK_S, max(0.0, due_s - (time.monotonic() - self.run.start_s)))

    def _wake(self) -> None:
        due_s = None if self.machine is None else self.machine.next_wake_s
        if due_s is not None and time.monotonic() - self.run.start_s >= due_s:
            self._tell(Woke())

    def _fail(self, why: str) -> None:
        """The run cannot go on, and starting again would not help: the supervisor ends it."""
        if not self.failed:
            self.failed = True
            self._say(ToSupervisor(what="failed", text=why))

    def _say(self, message: ToSupervisor) -> None:
        with contextlib.suppress(OSError):  # the supervisor is gone: so are we, soon
            say(self.boss, message)

    def _watch(self, one: Any, call: Callable[[], None]) -> None:
        self.selector.register(one, selectors.EVENT_READ, call)

    def _is_drained(self) -> bool:
        assert self.finishing_by_s is not None
        return self.machine is None or self.machine.desk.idle or time.monotonic() > self.finishing_by_s

    def _hear_boss(self) -> None:
        data = self.boss.recv(MOST_BYTES)
        if not data:
            raise SystemExit(0)  # the supervisor is gone: so is the run
        message = decode_boss(data)
        if message.what == "finish" and self.finishing_by_s is None:
            self.finishing_by_s = time.monotonic() + DRAIN_S
            self._tell(Finish())
        elif message.what == "begin":
            self.setting = replace(self.setting, start_by_s=message.at_s)
            if self.machine is not None:
                self.machine.setting = replace(self.machine.setting, start_by_s=message.at_s)
            self._tell(Tick())
        elif message.what == "ended":
            self.ended.add(message.number)
            if self.machine is not None:
                self._say_quiet()

    def _look_around(self) -> None:
        now = time.monotonic()
        if self.arena is not None:
            for line in [line for line in self.lines if line.role == "learner" and line.incarnation]:
                beat = self.arena.beat_word(line.number).get()
                if beat != line.beat:
                    line.beat, line.heard_s, line.silent = beat, now, False
                elif now - line.heard_s > self._patience_s(line) and not line.silent:
                    line.silent = True
                    silent_s = now - line.heard_s
                    self._say(
                        ToSupervisor(what="say", text=f"learner {line.number} is silent for {silent_s:.0f} s: given up")
                    )
                    self._tell(Silent(line.number, line.incarnation))
            self._look_for_the_lost(now)
        if now - self.ticked_s > TICK_S:
            self.ticked_s = now
            self._tell(Tick())
        self._watch_for_a_stall(now)

    def _watch_for_a_stall(self, now: float) -> None:
        machine = self.machine
        why = None if machine is None or self.finishing_by_s is not None else stall_of(machine)
        if machine is None or why is None or any(self._may_come(row) for row in machine.rows.values()):
            self.stalled_since_s = None
            return
        self.stalled_since_s = now if self.stalled_since_s is None else self.stalled_since_s
        if now - self.stalled_since_s > STALL_S:
            self._fail(why)

    def _may_come(self, row: LearnerSession) -> bool:
        """Whether a learner that is not here may come, or come again: it is started again, or was only silent."""
        return not row.here and row.learner not in self.left and row.learner not in self.ended

    def _patience_s(self, line: PeerConnection) -> float:
        """How long a learner may be silent: one that runs may just be busy, in one long call."""
        return SILENCE_S if now_stopped(line.pid) else BUSY_S

    def _look_for_the_lost(self, now: float) -> None:
        """Learners that were here when this coordinator came back, and have not come back themselves."""
        assert self.machine is not None
        connected = {(line.number, line.incarnation) for line in self.lines if line.role == "learner"}
        for one, pid in list(self.stays.items()):
            if one not in connected and state_of(pid) in ("", "Z", "X"):  # it writes to no memory any more
                del self.stays[one]
                self._tell(Gone(*one))
        here = {(row.learner, row.incarnation) for row in self.machine.rows.values() if row.here}
        self.missing_since_s = {one: self.missing_since_s.get(one, now) for one in here - connected}
        for one, since in list(self.missing_since_s.items()):
            if now - since > SILENCE_S:
                self._tell(Silent(*one))

    # --- lines ------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            one, _ = self.listener.accept()
        except OSError:
            return
        one.settimeout(handshake.INTRODUCTION_S)
        said = handshake.read_handshake(one, self.run.token)
        if isinstance(said, str):
            with contextlib.suppress(OSError):
                if said:
                    handshake.accept_peer(one, handshake.Accept(refused=said), None)
            one.close()
            return
        try:
            self._let_in(one, said)
        except OffbeatError as error:
            with contextlib.suppress(OSError):
                handshake.accept_peer(one, handshake.Accept(refused=str(error)), None)
            one.close()
        except OSError:
            one.close()

    def _let_in(self, one: socket.socket, said: handshake.Handshake) -> None:
        if self.arena is None:
            if said.table is None:
                raise OffbeatError("there is no model yet")
            self._make_arena(said.table)
        assert self.arena is not None
        table = self.arena.table
        if said.table is not None and said.table.digest != table.digest:
            raise OffbeatError(
                "its model or optimizer is not that of the others: the parameters must have the same names, shapes, "
                "types and order"
            )
        admission = handshake.Accept(
            table=table,
            setting=handshake.setting_as_data(self.arena.setting),
            seed=self.run.seed,
            start_s=self.run.start_s,
        )
        handshake.accept_peer(one, admission, self.descriptor)
        one.setblocking(False)
        line = PeerConnection(one, said.role, said.number)
        self.lines.append(line)
        self._watch(one, lambda: self._hear(line))

    def _hear(self, line: PeerConnection) -> None:
        """All that it has said."""
        while line in self.lines:
            try:
                data = line.socket.recv(MOST_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._cut(line)
                return
            try:
                message = decode_input(data)
                self._check_sender(line, message)
            except WireError:
                self._cut(line)
                return
            if isinstance(message, Hello):
                line.nonce = message.nonce
                self.pids[line.nonce] = line.pid
                self._say(ToSupervisor(what="learner", nonce=line.nonce, pid=line.pid))
            elif isinstance(message, Ready):
                self._say(ToSupervisor(what="ready", text=f"server {message.shard}"))
            self._tell(message, data)

    def _check_sender(self, line: PeerConnection, message: INPUT) -> None:
        if line.role == "learner":
            allowed = isinstance(message, FROM_LEARNER) and message.learner == line.number
        else:
            allowed = isinstance(message, Ready | Done) and message.shard == line.number
        if not allowed:
            raise WireError(f"{line.role} {line.number} may not say {message}")

    def _cut(self, line: PeerConnection) -> None:
        """It is gone, or was sent away."""
        self.selector.unregister(line.socket)
        line.socket.close()
        self.lines.remove(line)
        if line.role == "learner" and line.incarnation:
            self.stays.pop((line.number, line.incarnation), None)
            self._tell(Gone(line.number, line.incarnation))

    # --- in and out -------------------------------------------------------------------------------------------------

    def _tell(self, message: INPUT, data: bytes | None = None) -> None:
        machine = self.machine
        if machine is None or self.failed:
            return
        at_s = time.monotonic() - self.run.start_s
        self.journal.add(encode(message) if data is None else data, at_s)
        self._note(message)
        try:
            answers = machine.handle(message, at_s)
        except PolicyError as error:
            self._fail(str(error))
            return
        self._note_rest(message)
        for answer in answers:
            self._carry(answer)
        self._say_quiet()

    def _note_rest(self, message: INPUT) -> None:
        assert self.machine is not None
        if isinstance(message, Paused) and message.led and self.machine.rests.times:
            self.ledger.rest(message.learner, *self.machine.rests.times[-1], self.machine.policy.version)

    def _say_quiet(self) -> None:
        assert self.arena is not None and self.machine is not None
        machine = self.machine
        gone = all(not row.here and self._has_ended(row.learner) for row in machine.rows.values())
        quiet = machine.seeded and machine.desk.idle and gone
        word = self.arena.quiet_word()
        if word.get() != quiet:
            word.set(int(quiet))

    def _has_ended(self, learner: int) -> bool:
        """Whether it will not come again: it said goodbye, or whoever starts learners says so."""
        return not self.run.launched or learner in self.left or learner in self.ended

    def _note(self, message: INPUT) -> None:
        """For the books, and who has said goodbye."""
        self.ledger.hear(message)
        if isinstance(message, Bye):
            self.left.add(message.learner)
        elif isinstance(message, Hello):
            self.left.discard(message.learner)
        elif isinstance(message, Done) and self.finishing_by_s is not None:
            self.finishing_by_s = time.monotonic() + DRAIN_S  # it goes on

    def _carry(self, message: Message) -> None:
        """To whom it is for. What cannot be sent now is lost, and asked for again."""
        arena = self.arena
        assert arena is not None
        if isinstance(message, Cancel):
            arena.cancel_word(message.learner).set(stamp(message.incarnation, message.seq))
            return
        if isinstance(message, Fence):
            arena.fence_word(message.learner).set(message.incarnation)
            return
        if isinstance(message, Committed):
            version, buffer = arena.committed(message.lane)
            buffer.set(message.buffer)
            version.set(message.version)
            return
        for line in self._lines_for(message):
            with contextlib.suppress(OSError):
                line.socket.send(encode(message))
            if isinstance(message, Welcome):
                line.incarnation = message.incarnation
                self.stays[line.number, line.incarnation] = line.pid
                line.heard_s, line.silent = time.monotonic(), False

    def _lines_for(self, message: Message) -> list[PeerConnection]:
        if isinstance(message, Job):
            return [line for line in self.lines if (line.role, line.number) == ("server", message.shard)]
        mine = [line for line in self.lines if (line.role, line.number) == ("learner", message.learner)]  # type: ignore[attr-defined]  # all others are for a learner
        if isinstance(message, Welcome | Refused):
            return [line for line in mine if line.nonce == message.nonce]
        return [line for line in mine if line.incarnation == message.incarnation]  # type: ignore[attr-defined]  # as above
