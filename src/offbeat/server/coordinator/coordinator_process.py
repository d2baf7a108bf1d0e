"""The coordinator's process: carries messages between the state machine, the sockets and shared memory.

It accepts connections, and waits for none of them. A message passes the gate, then the machine takes it, then it is
written to the journal, and only then is anything said about it. A coordinator that is started on a journal restores its
snapshot, goes through what came since, in silence, and is then where its predecessor was. Learners and servers whose
connection was cut connect again by themselves and ask again.

What makes the machine raise is not in the journal: machine and recorder are brought back from it as they were before,
the message is refused, and the run goes on.

The shard of a small model is in this process too (`inside`): telling another one would take longer than its update.
It is told and heard as one in a process of its own, but for the sockets; it is replaced together with the coordinator.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import select
import socket
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from offbeat import plugins
from offbeat.collectives import memory
from offbeat.collectives.rendezvous import credentials
from offbeat.errors import OffbeatError, PolicyError
from offbeat.policies.damping import CORRECT, KEEP
from offbeat.processes.child import Stopwatch, state_of
from offbeat.server import handshake
from offbeat.server.arena import Arena, ArenaLayout, stamp
from offbeat.server.coordinator import snapshot
from offbeat.server.coordinator.coordinator import Coordinator
from offbeat.server.coordinator.invariants import stall_of
from offbeat.server.coordinator.journal import Journal, JournalError
from offbeat.server.coordinator.run_recorder import RecorderState, RunRecorder
from offbeat.server.coordinator.session import Sender, SessionName
from offbeat.server.parameter_layout import ParameterLayout
from offbeat.server.remote.mirror import WAIT_S as MIRROR_WAIT_S
from offbeat.server.remote.mirror import MirrorJob, encode_job, vectors_of
from offbeat.server.run_setting import RunSetting
from offbeat.server.shard.optimizers import check_rule
from offbeat.server.shard.server_process import Shard, ShardMemory
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
    Gone,
    Hello,
    Paused,
    Ready,
    Refused,
    SentAway,
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
AGAIN_S = 1.0  # between two attempts to write a snapshot, where there is no room for it
MOST_NEWCOMERS = 64  # that have connected and not said who they are; of more, the oldest are sent away
MOST_OF_ONE = 8  # connections of one learner or server
MOST_AT_ONCE = 64  # connections that are accepted before the others are looked at
MOST_REFUSED = 3  # messages of one sender; more is no accident
MOST_SET_ASIDE = 16  # entries of a journal; with more of them it is not to be trusted
MOST_LETTERS = 500  # of what is told of a message


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorOptions:
    """What the coordinator is told by the supervisor."""

    setting: RunSetting
    token: str
    server_secret: str
    seed: int
    start_s: float
    log: Path | None = None
    facts: dict[str, Any] | None = None  # of the run, for its log
    launched: bool = False  # learners are started, and started again, by the supervisor
    learners_here: int | None = None  # those after them come from other hosts, and go as they like; None: all
    mirrors: bool = False  # a copy of the servers' state is kept on another host
    inside_items: int = 0  # a model of so many items or fewer, on one shard, is updated by the coordinator itself


class ToSupervisor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Between coordinator and supervisor.

    "arena": here is the memory, for this table; `number` servers are to be started. "ready": a server or the
    coordinator (`text`) works. "learner": this process has come, under this nonce. "replace": this server says what
    cannot be. "begin": not all learners will come; begin with those that are there. "ended": this learner will not
    come again. "server": this host has this shard. "placed": this learner is on this host. "lost": a server is lost
    with its host, and `number` hosts are left. "say": something worth knowing. "failed": the run cannot go on, and
    why. "finish": the run is over. "summary": what there is to tell of it.
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


class ProcessState(msgspec.Struct, kw_only=True):
    """What a snapshot holds."""

    machine: snapshot.MachineState
    recorder: RecorderState
    left: set[int]
    pids: dict[SessionName, int]


_states = msgspec.msgpack.Decoder(ProcessState)


class PeerConnection:
    """A learner or a server that was accepted."""

    def __init__(self, one: socket.socket, role: str, number: int, generation: int) -> None:
        self.socket = one
        self.role, self.number, self.generation = role, number, generation
        self.nonce = self.incarnation = 0
        self.pid = credentials(one)[0]
        self.beat = -1
        self.heard_s = time.monotonic()
        self.silent = False

    @property
    def session(self) -> SessionName:
        return self.number, self.incarnation

    @property
    def sender(self) -> Sender:
        return Sender(self.role, self.number, self.incarnation, self.generation)

    @property
    def patience_s(self) -> float:
        """How long a learner may be silent: one that runs may just be busy, in one long call."""
        return SILENCE_S if state_of(self.pid) in ("T", "t") else BUSY_S


class Mirroring:
    """The mirror, as the coordinator has it (`remote.mirror`)."""

    def __init__(self) -> None:
        self.one: PeerConnection | None = None
        self.sent_to: PeerConnection | None = None  # it has the job at hand
        self.fresh = False  # it has come, and was sent nothing
        self.absent = True  # and it is known: the run does not wait for it
        self.number = self.answered = 0  # jobs
        self.updates = self.without = 0  # that are mirrored, and are not
        self.sent_bytes = 0
        self.waited_s = 0.0
        self.stopped = Stopwatch()


class CoordinatorProcess:
    """See the module's text."""

    def __init__(
        self,
        options: CoordinatorOptions,
        listener: socket.socket,
        supervisor: socket.socket,
        journal: tuple[int, int],
        held: tuple[ParameterLayout, int] | None,
        pids: dict[int, int],  # of learners that came to a coordinator before, by nonce
    ) -> None:
        self.options, self.supervisor = options, supervisor
        self.setting = options.setting
        self.listener = listener
        self.poll = select.epoll()
        self.watched: dict[int, Callable[[], None]] = {}  # by descriptor: what is done when there is something to read
        self.inbox = handshake.Inbox()
        self.connections: list[PeerConnection] = []
        self.connections_of: defaultdict[tuple[str, int], list[PeerConnection]] = defaultdict(list)  # role and number
        self.newcomers: dict[socket.socket, float] = {}  # that have not said who they are, and since when
        self.refused: Counter[int] = Counter()  # messages, by the process that they were from
        self.sent_away: dict[int, str] = {}  # processes, and why
        self.set_aside = 0  # what this coordinator tells itself, and cannot take
        self.arena: Arena | None = None
        self.descriptor = -1
        self.machine: Coordinator | None = None
        self.inside: Shard | None = None
        self.jobs: deque[ShardJob] = deque()  # for it
        self.recorder = RunRecorder(options.setting.learners)
        self.finishing_by_s: float | None = None
        self.ticked_s = self.checked_s = 0.0
        self.stalled = Stopwatch()
        self.failed = False
        self.mirroring = Mirroring()
        self.left: set[int] = set()  # learners that have said goodbye
        self.ended: set[int] = set()  # and those that will not be started again
        self.missing_since_s: dict[SessionName, float] = {}
        self.pids = dict(pids)
        self.pids_by_session: dict[SessionName, int] = {}
        self.snapshot_from_s = 0.0  # not before
        self.unsaved = ""  # why no snapshot can be taken
        try:
            self.journal = Journal(journal)
            if held is not None:
                self.mirroring.absent = False  # its predecessor may have had one, which comes again
                self._open_arena(*held)
                self._recover()
                self._start_inside()
        except (JournalError, msgspec.MsgspecError) as error:
            self._fail(f"the coordinator cannot be restarted: {error}")

    # --- the machine and its memory ---------------------------------------------------------------------------------

    def _open_arena(self, table: ParameterLayout, held: int | None = None) -> None:
        """There is a model: now there is memory for it, made here if nobody holds it yet, and a machine."""
        table.check()
        check_rule(table)
        setting = self._setting_for(table)
        if setting.spread and table.in_place:
            raise OffbeatError("in_place=True needs all servers on the host of the learner; remove --place spread")
        if setting.spread and table.row_tables():
            raise OffbeatError(
                "embeddings with sparse gradients need all servers on one host; build them with sparse=False, or "
                "remove --place spread"
            )
        layout = ArenaLayout(table, setting)
        if held is None:
            spans = layout.spans_of(0) if setting.spread else None
            self.descriptor = memory.create(layout.size_bytes, "the parameter server", spans)[1]
        else:
            self.descriptor = held
        arena = Arena(memory.Segment(self.descriptor, layout.size_bytes), table, setting)
        if held is None:
            self._begin(arena, None)
            servers = 0 if self._is_inside(table) else setting.shards
            say(self.supervisor, "arena", [self.descriptor], table=table, number=servers)
        self.arena = arena  # not before there is a machine: who comes after one that was refused here is refused too
        if held is None:
            self._start_inside()

    def _setting_for(self, table: ParameterLayout) -> RunSetting:
        """With a buffer of weights for each learner where the model asks for it, or where that costs little."""
        own = table.in_place or (self._is_inside(table) and not self.setting.independent)
        return replace(self.setting, clip_norm=table.clip_norm, in_place=own)

    def _is_inside(self, table: ParameterLayout) -> bool:
        return self.setting.shards == 1 and table.items <= self.options.inside_items

    def _start_inside(self) -> None:
        """The shard in this process, if there is to be one; it says that it is ready, as another server would."""
        assert self.arena is not None and self.machine is not None
        if self._is_inside(self.arena.table):
            generation = self.machine.grants.generations.get(0, 0) + 1
            self.inside = Shard(0, generation, ShardMemory(self.arena, 0))
            self._handle(self.inside.ready())

    def _begin(self, arena: Arena, state: ProcessState | None) -> Coordinator:
        """A machine and a recorder: fresh ones, or as they were when the state was taken."""
        table = arena.table
        setting = self._setting_for(table)
        facts = {"strategy": setting.line, "expect": setting.learners, "start_by_s": 0.0, "seed": self.options.seed}
        facts |= {"simulated": False, "rule": table.rule, "clip_norm": table.clip_norm, "gradients": table.gradients}
        facts |= {"staleness": CORRECT if setting.corrects else KEEP, "scaling": setting.scaling}
        facts |= plugins.facts() | (self.options.facts or {})
        self.recorder.leave()
        self.recorder = RunRecorder(setting.learners)
        rule = setting.policy().rule
        self.recorder.push_bytes = rule.push_bytes(arena.slots[0].nbytes)
        self.recorder.fetch_bytes = 0 if table.in_place else rule.fetch_bytes(arena.weights[0].nbytes)
        self.recorder.reads_unsaid = setting.in_place
        self.recorder.open(self.options.log, facts, None if state is None else state.recorder)
        machine = Coordinator(setting, None if self.options.log is None else self.recorder.decision)
        if state is not None:
            snapshot.restore(machine, state.machine)
            self.left, self.pids_by_session = state.left, state.pids
        self.machine = machine
        return machine

    def _recover(self) -> None:
        """Be what the journal says. An entry that cannot be gone through is set aside, and all others are."""
        assert self.arena is not None
        aside: set[int] = set()
        while True:
            kept = self.journal.snapshot
            machine = self._begin(self.arena, _states.decode(kept) if kept else None)
            wrong = self._replay(machine, aside)
            if wrong is None:
                break
            aside.add(wrong)
            if len(aside) > MOST_SET_ASIDE:
                raise JournalError(f"{len(aside)} entries of its journal cannot be replayed")
        for word in machine.shared_words():
            self._deliver(word)
        self._publish_quiet(machine)
        if aside or self.journal.entries:
            self._take_snapshot()

    def _replay(self, machine: Coordinator, aside: set[int]) -> int | None:
        """All since the snapshot; the number of the entry that cannot be, if there is one."""
        for number, entry in enumerate(self.journal.read()):
            if number in aside:
                continue
            try:
                if not entry.whole:
                    raise WireError("its checksum is wrong")
                message = decode_input(entry.data)
                self.recorder.hear(message, entry.at_s)
                answers = machine.handle(message, entry.at_s)
                self._record(machine, message, answers, entry.at_s)
            except Exception as error:  # whatever it is, starting again would lead to the same place
                self._tell(f"entry {number} of the journal was skipped: {type(error).__name__}: {error}")
                return number
            self._note(message)
            for answer in answers:
                if isinstance(answer, Welcome) and self.pids.get(answer.nonce):
                    self.pids_by_session[answer.learner, answer.incarnation] = self.pids[answer.nonce]
        return None

    def _take_snapshot(self) -> bool:
        """From now on nothing that came before is needed; False where there is no room for it, or no way."""
        assert self.machine is not None
        if not self.unsaved:
            names = snapshot.unsaved_state(self.machine.policy, self.setting.policy())
            if names:
                self.unsaved = f"the policy changes {', '.join(names)}, which is not in its extra_state"
                self._tell(f"{self.unsaved}, so no snapshot of it can be saved and the journal keeps growing")
        if self.unsaved:
            return False
        state = ProcessState(
            machine=snapshot.take(self.machine),
            recorder=self.recorder.state(),
            left=self.left,
            pids=self.pids_by_session,
        )
        if self.journal.renew(msgspec.msgpack.encode(state)):
            return True
        self.snapshot_from_s = time.monotonic() + AGAIN_S
        return False

    def _keep(self, data: bytes, at_s: float) -> None:
        """Into the journal; a snapshot in its place where there is no room, or where it has become long."""
        was_whole = not self.journal.degraded
        try:
            self.journal.add(data, at_s)
        except OSError as error:
            if not self._take_snapshot() and was_whole:
                self._tell(
                    f"cannot write the journal: {error.strerror}; the run continues, but would end if its "
                    "coordinator were killed now"
                )
        else:
            if self.journal.due and not self.unsaved and time.monotonic() > self.snapshot_from_s:
                self._take_snapshot()

    # --- the loop ---------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Until the supervisor says that the run is over, or is gone."""
        torch.set_num_threads(1)  # of the updates that are made here
        self.listener.setblocking(False)
        self._watch(self.listener, self._accept)
        self._watch(self.supervisor, self._hear_supervisor)
        say(self.supervisor, "ready", text="coordinator")
        while not self._is_over():
            self.turn()
        say(self.supervisor, "summary", text=self._summary())

    def _summary(self) -> str:
        text, mirroring = self.recorder.close(self.machine), self.mirroring
        if not self.options.mirrors:
            return text
        told = {
            "updates": mirroring.updates,
            "without": mirroring.without,
            "waited_s": mirroring.waited_s,
            "bytes": mirroring.sent_bytes,
        }
        return json.dumps({**json.loads(text), "mirror": told})

    def turn(self) -> None:
        """Wait until somebody has something to say. One message of each is taken: nobody waits for a busy one."""
        for file, _ in self.poll.poll(min(LIVENESS_S, max(0.0, self._wake_in_s()))):
            if file in self.watched:  # else it was closed in this turn
                self.watched[file]()
        if self._wake_in_s() <= 0:
            self._handle(WakeDue())
        if time.monotonic() - self.checked_s >= LIVENESS_S:
            self._check_liveness()
        if self.mirroring.fresh and self.machine is not None and self.machine.seeded:  # it has nothing yet
            self._mirror_update(self.machine, time.monotonic() - self.options.start_s, is_new=False)

    def _watch(self, one: socket.socket, hear: Callable[[], None]) -> None:
        if one.fileno() not in self.watched:
            self.poll.register(one, select.EPOLLIN)
        self.watched[one.fileno()] = hear

    def _unwatch(self, one: socket.socket) -> None:
        """Before it is closed."""
        self.poll.unregister(one)
        del self.watched[one.fileno()]

    def _wake_in_s(self) -> float:
        """How long until the policy is to be woken."""
        due_s = None if self.machine is None else self.machine.next_wake_s
        return math.inf if due_s is None else due_s - (time.monotonic() - self.options.start_s)

    def _tell(self, text: str) -> None:
        """Something worth knowing, in one line."""
        line = " ".join(text.split())
        say(self.supervisor, "say", text=line if len(line) <= MOST_LETTERS else line[:MOST_LETTERS] + " ...")

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
        now = self.checked_s = time.monotonic()
        if self.arena is not None and self.machine is not None:
            for one in [one for one in self.connections if one.role == "learner" and one.incarnation]:
                beat = self.arena.learner_words[one.number][2].get()
                if beat != one.beat:
                    one.beat, one.heard_s, one.silent = beat, now, False
                elif now - one.heard_s > one.patience_s and not one.silent:
                    one.silent = True
                    self._tell(f"learner {one.number} has been silent for {now - one.heard_s:.0f} s and was dropped")
                    self._handle(Silent(*one.session))
            self._check_missing(self.machine, now)
        for newcomer, since_s in list(self.newcomers.items()):
            if now - since_s > handshake.HANDSHAKE_S:
                self._turn_away(newcomer)
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
        """All that have connected. Who has not said yet who it is is heard when it does: nobody waits for it."""
        for _ in range(MOST_AT_ONCE):
            try:
                one, _ = self.listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    for newcomer in list(self.newcomers):
                        self._turn_away(newcomer)
                return
            one.setblocking(False)
            self.newcomers[one] = time.monotonic()
            self._watch(one, partial(self._greet, one))
            self._greet(one)
            if len(self.newcomers) > MOST_NEWCOMERS:
                self._turn_away(next(iter(self.newcomers)))

    def _greet(self, one: socket.socket) -> None:
        """If it has said who it is, it is let in or refused."""
        if one not in self.newcomers:
            return
        try:
            said = handshake.read_handshake(one, self.options.token, self.options.server_secret)
            self._admit(one, said)
        except BlockingIOError:
            return
        except OffbeatError as error:
            with contextlib.suppress(OSError):
                handshake.accept_peer(one, handshake.Accept(refused=str(error)), None)
            self._turn_away(one)
        except OSError:
            self._turn_away(one)

    def _turn_away(self, one: socket.socket) -> None:
        """A newcomer, unless it was let in."""
        if self.newcomers.pop(one, None) is not None:
            self._unwatch(one)
            one.close()

    def _admit(self, one: socket.socket, said: handshake.Handshake) -> None:
        connection = PeerConnection(one, said.role, said.number, said.generation)
        if self.failed:
            raise OffbeatError("the run has failed")
        if connection.pid in self.sent_away:
            raise OffbeatError(f"it was removed from the run: {self.sent_away[connection.pid]}")
        same = self.connections_of[said.role, said.number]
        if len(same) >= MOST_OF_ONE:
            raise OffbeatError(f"{said.role} {said.number} has {len(same)} connections already")
        if self.arena is None:
            if said.role != "learner":  # of another host, which was there before any learner: it tries again
                self._turn_away(one)
                return
            if said.table is None:
                raise OffbeatError("no learner has sent a model yet")
            if said.number >= (self.setting.leaders or self.setting.learners):
                # The model of the run is that of its own hosts, and sizes the memory: this one tries again.
                self._turn_away(one)
                return
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
        del self.newcomers[one]
        self._add(connection)

    def _add(self, connection: PeerConnection) -> None:
        """From now on it is heard."""
        if connection.role == "mirror":
            if self.mirroring.one is not None:
                self._lose_mirror()
            self.mirroring.one, self.mirroring.fresh = connection, True
            self._watch(connection.socket, self._hear_mirror)
            return
        self.connections.append(connection)
        self.connections_of[connection.role, connection.number].append(connection)
        self._watch(connection.socket, lambda: self._receive(connection))

    # --- the mirror -------------------------------------------------------------------------------------------------

    def _mirror_update(self, machine: Coordinator, at_s: float, *, is_new: bool = True) -> None:
        """Until the mirror has what was committed last: nobody is heard or answered meanwhile, but who connects."""
        mirroring, group = self.mirroring, machine.grants.commit_groups[0]
        if machine.pauses.over:  # its last checkpoint is written, and hosts leave
            mirroring.fresh = False
            return
        began_s = time.monotonic()
        if mirroring.one is None and mirroring.absent:
            mirroring.without += 1
            return
        mirroring.fresh = False
        self.recorder.flush()  # whoever judges a run by its log finds each update there that was acknowledged
        facts = machine.resume_state() | {"epoch_end": False, "halt": False}
        facts["seconds"] = at_s - machine.begun_s - machine.pauses.paused_s
        missing_s = Stopwatch()
        while True:
            if mirroring.one is not None and mirroring.sent_to is not mirroring.one:
                mirroring.number += 1
                job = MirrorJob(mirroring.number, group.version, group.buffer, json.dumps(facts))
                mirroring.sent_to, mirroring.fresh = mirroring.one, False
                assert self.arena is not None
                mirroring.sent_bytes += sum(vector.nbytes for vector in vectors_of(self.arena, job).values())
                try:
                    mirroring.one.socket.send(encode_job(job))
                except OSError:
                    self._lose_mirror()
                except OffbeatError as error:
                    self._fail(str(error))
                    return
            if mirroring.one is not None and mirroring.answered == mirroring.number:
                break
            if missing_s.seconds(mirroring.one is None) > MIRROR_WAIT_S:
                mirroring.absent = True
                mirroring.without += is_new
                self._tell("the mirror is lost: updates are not mirrored until another successor is there")
                break
            self._wait_for_newcomers(mirroring)
        if mirroring.one is not None and mirroring.absent:
            mirroring.absent = False
            self._tell(f"version {group.version} is mirrored, and each one after it before it is acknowledged")
        mirroring.sent_to = None
        mirroring.updates += is_new and not mirroring.absent
        mirroring.waited_s += time.monotonic() - began_s

    def _wait_for_newcomers(self, mirroring: Mirroring) -> None:
        """For the mirror's answer too; one that is stopped is lost."""
        one = mirroring.one
        if one is not None and mirroring.stopped.seconds(state_of(one.pid) in ("T", "t")) > SILENCE_S:
            self._lose_mirror()
        waited = select.poll()
        for file in (self.listener, *self.newcomers, *(() if one is None else (one.socket,))):
            waited.register(file, select.POLLIN)
        for number, _ in waited.poll(1000 * LIVENESS_S):
            if number in self.watched:
                self.watched[number]()

    def _hear_mirror(self) -> None:
        assert self.mirroring.one is not None
        try:
            data = self.inbox.receive(self.mirroring.one.socket)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self.mirroring.answered = int.from_bytes(data, "little")
        else:
            self._lose_mirror()

    def _lose_mirror(self) -> None:
        assert self.mirroring.one is not None
        self._unwatch(self.mirroring.one.socket)
        self.mirroring.one.socket.close()
        self.mirroring.one = self.mirroring.sent_to = None

    def _receive(self, connection: PeerConnection) -> None:
        """One message that it has said."""
        try:
            data = self.inbox.receive(connection.socket)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._hear(connection, data)
        else:
            self._disconnect(connection)

    def _hear(self, connection: PeerConnection, data: bytes) -> None:
        """A message, through the gate."""
        assert self.machine is not None and self.arena is not None
        try:
            message = decode_input(data)
        except WireError as error:
            self._refuse(connection, str(error))
            return
        at_s = time.monotonic() - self.options.start_s
        fault = self.machine.fault_of(message, connection.sender, at_s, self.arena.table)
        if fault:
            self._refuse(connection, f"{type(message).__name__}: {fault}")
            return
        if isinstance(message, Hello):
            connection.nonce = message.nonce
            self.pids[connection.nonce] = connection.pid
            say(self.supervisor, "learner", nonce=connection.nonce, pid=connection.pid)
        elif isinstance(message, Ready):
            say(self.supervisor, "ready", text=f"server {message.shard}")
        self._handle(message, data, connection)

    def _refuse(self, connection: PeerConnection, why: str) -> None:
        """What it said cannot be: it changes nothing, and is counted. Who does so again and again is sent away."""
        self.recorder.refused += 1
        self.refused[connection.pid] += 1
        who = f"{connection.role} {connection.number}"
        if self.refused[connection.pid] <= MOST_REFUSED:
            self._tell(f"rejected a message from {who}: {why}")
        if self.refused[connection.pid] < MOST_REFUSED:
            return
        self.sent_away[connection.pid] = why[:MOST_LETTERS]
        if connection.role == "server":
            say(self.supervisor, "replace", number=connection.number, pid=connection.pid)
        elif connection.incarnation and not self.failed:
            self._handle(SentAway(*connection.session, why[:MOST_LETTERS]))
        if connection in self.connections:
            self._close(connection)  # it may still write to its memory: its process is watched until it ends

    def _disconnect(self, connection: PeerConnection) -> None:
        """It is gone."""
        self._close(connection)
        if connection.role == "learner" and connection.incarnation:
            self.pids_by_session.pop(connection.session, None)
            self._handle(Gone(*connection.session))

    def _close(self, connection: PeerConnection) -> None:
        self._unwatch(connection.socket)
        connection.socket.close()
        self.connections.remove(connection)
        self.connections_of[connection.role, connection.number].remove(connection)

    # --- in and out -------------------------------------------------------------------------------------------------

    def _handle(self, message: INPUT, data: bytes | None = None, sender: PeerConnection | None = None) -> None:
        """A message goes into the machine, and then what the shard in this process makes of the answers."""
        self._take(message, data, sender)
        while self.inside is not None and self.jobs:
            self._take(self.inside.handle(self.jobs.popleft()))

    def _take(self, message: INPUT, data: bytes | None = None, sender: PeerConnection | None = None) -> None:
        """A message goes into the machine and then to the journal, and what it answers to whom it is for."""
        machine = self.machine
        if machine is None or self.failed:
            return
        at_s = time.monotonic() - self.options.start_s
        try:
            self.recorder.hear(message, at_s)
            answers = machine.handle(message, at_s)
            self._record(machine, message, answers, at_s)
        except PolicyError as error:
            self._fail(str(error))
            return
        except Exception as error:  # half of it may be done: all is brought back as it was before
            self._undo(f"{type(message).__name__}: {type(error).__name__}: {error}", sender)
            return
        if self.options.mirrors and any(isinstance(answer, Committed) for answer in answers):
            self._mirror_update(machine, at_s)
        self._note(message)
        self._keep(encode(message) if data is None else data, at_s)
        for answer in answers:
            self._deliver(answer)
        self._publish_quiet(machine)

    def _undo(self, why: str, sender: PeerConnection | None) -> None:
        """The machine could not take a message: be as before it came, and refuse it."""
        left, pids, refused = self.left, self.pids_by_session, self.recorder.refused
        try:
            self._recover()
        except JournalError as error:
            self._fail(f"{why}; and {error}")
            return
        self.left, self.pids_by_session, self.recorder.refused = left, pids, refused
        if sender is not None:
            self._refuse(sender, why)
            return
        self.set_aside += 1
        self._tell(f"ignored an internal message of the coordinator: {why}")
        if self.set_aside > MOST_SET_ASIDE:
            self._fail(f"the coordinator cannot continue: {why}")

    def _note(self, message: INPUT) -> None:
        """Who has said goodbye, and whether updates go on."""
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
        here = self.options.learners_here
        elsewhere = () if here is None else range(here, self.setting.learners)
        quiet = (
            not any(one.here for one in machine.sessions.values())
            and machine.seeded
            and machine.grants.idle
            # They will not come again: they said goodbye, or whoever starts learners says so.
            and (not self.options.launched or machine.sessions.keys() <= self.left | self.ended | set(elsewhere))
        )
        if self.arena.quiet_word.get() != quiet:
            self.arena.quiet_word.set(int(quiet))

    def _deliver(self, message: OUTPUT) -> None:
        """To whom it is for. What cannot be sent now is lost, and asked for again."""
        arena = self.arena
        assert arena is not None
        if isinstance(message, CancelWord):
            arena.learner_words[message.learner][0].set(stamp(message.incarnation, message.seq))
        elif isinstance(message, FenceWord):
            arena.learner_words[message.learner][1].write(message.incarnation)
        elif isinstance(message, Committed):
            version, buffer = arena.committed[message.commit_group]
            buffer.write(message.buffer)
            version.write(message.version)
        elif self.inside is not None and isinstance(message, ShardJob):
            self.jobs.append(message)
        else:
            to = ("server", message.shard) if isinstance(message, ShardJob) else ("learner", message.learner)
            for connection in self.connections_of[to]:
                if not self._is_for(message, connection):
                    continue
                try:
                    connection.socket.send(encode(message))
                except OSError:
                    pass
                except WireError as error:
                    self._fail(str(error))
                if isinstance(message, Welcome):
                    if connection.incarnation != message.incarnation:  # it has come again, and is that one no longer
                        self.pids_by_session.pop(connection.session, None)
                    connection.incarnation = message.incarnation
                    self.pids_by_session[connection.session] = connection.pid
                    connection.heard_s, connection.silent = time.monotonic(), False

    def _is_for(self, message: ShardJob | TO_LEARNER, connection: PeerConnection) -> bool:
        """Whether it is for this one of those that it may be for."""
        if isinstance(message, ShardJob):
            return True
        if isinstance(message, Welcome | Refused):
            return connection.nonce == message.nonce
        return connection.incarnation == message.incarnation
