"""A coordinator that comes back: from a snapshot and a short journal, with its log; and what it cannot take."""

from __future__ import annotations

import errno
import json
import os
import random
import socket
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.policies import Policy, replay
from offbeat.runs.log import read_log
from offbeat.server.coordinator import coordinator_process, journal
from offbeat.server.coordinator.coordinator import Coordinator
from offbeat.server.coordinator.coordinator_process import (
    MOST_REFUSED,
    MOST_SET_ASIDE,
    CoordinatorOptions,
    CoordinatorProcess,
    PeerConnection,
    decode_supervisor_message,
)
from offbeat.server.coordinator.journal import new_files
from offbeat.server.coordinator.snapshot import unsaved_state
from offbeat.server.parameter_layout import layout_of, model_tensors
from offbeat.server.run_setting import RunSetting
from offbeat.server.shard.server_process import Shard, ShardMemory
from offbeat.server.wire import (
    INPUT,
    Done,
    EnterPause,
    Fetched,
    Finish,
    Go,
    Hello,
    Paused,
    PauseRequest,
    Push,
    Ready,
    Seeded,
    ShardJob,
    Silent,
    Stop,
    Tick,
    Want,
    Welcome,
    encode,
)

SGD = {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": 0.0, "maximize": 0.0}


class Clock:
    """In the place of `time`: it moves on by a millisecond whenever somebody looks."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        self.now_s += 0.001
        return self.now_s


class LoneCoordinator:
    """A coordinator's process without sockets: what it says is kept, and learners and a server answer from here."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, line: str = "async", learners: int = 2, inside: int = 0
    ) -> None:
        self.clock = Clock()
        monkeypatch.setattr(coordinator_process, "time", self.clock)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        tensors, groups = model_tensors(model, optimizer)
        self.table = layout_of(model, tensors, groups, rule="sgd", states=())
        self.options = CoordinatorOptions(
            setting=RunSetting(line=line, learners=learners, shards=1),
            token="",
            server_secret="",
            seed=0,
            start_s=100.0,
            log=folder / "log",
            inside_items=inside,
        )
        self.files = new_files()
        self.mine, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.said: deque[Any] = deque()
        self.told: list[str] = []
        self.failed = ""
        self.process = CoordinatorProcess(self.options, self.listener, self.theirs, self.files, None, {})
        self._wrap()
        self.process._open_arena(self.table)
        if not inside:
            self.hear(Ready(0, 1))

    def _wrap(self) -> None:
        deliver = self.process._deliver

        def kept(message: Any) -> None:
            self.said.append(message)
            deliver(message)

        self.process._deliver = kept  # type: ignore[method-assign]  # to listen

    def hear(self, message: INPUT, sender: PeerConnection | None = None) -> None:
        self.process._handle(message, None, sender)

    def note(self) -> None:
        """What the supervisor was told."""
        self.mine.setblocking(False)
        while True:
            try:
                message = decode_supervisor_message(self.mine.recv(2**17))
            except BlockingIOError:
                return
            if message.what == "say":
                self.told.append(message.text)
            elif message.what == "failed":
                self.failed = message.text

    def restart(self, pids: dict[int, int] | None = None) -> None:
        """It is killed, and another comes in its place."""
        writer = self.process.recorder._writer
        if writer is not None:  # what it has not written yet is lost with it
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, writer._file.fileno())
            os.close(nothing)
            writer._file.close()
        held = (self.table, self.process.descriptor)
        self.process = CoordinatorProcess(self.options, self.listener, self.theirs, self.files, held, pids or {})
        self._wrap()

    def sender(self, learner: int) -> PeerConnection:
        """A connection that says it is this learner; its other end is dropped."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.close()
        theirs.setblocking(False)
        connection = PeerConnection(theirs, "learner", learner, 0)
        self.process._add(connection)
        return connection

    def start(self) -> None:
        for learner in range(self.options.setting.learners):
            self.hear(Hello(learner, 10 + learner, self.table.digest))
        self.hear(Seeded(0, 1))

    def work(self, messages: int, chance: random.Random, restarts: float = 0.0) -> None:
        """Learners and the server answer what they are told, in the order in which it was said."""
        for number in range(messages):
            if chance.random() < restarts:
                pending = list(self.said)
                self.restart()
                self.said = deque(pending)
            if number % 40 == 20:
                self.hear(PauseRequest(0, 1))
            answer = self._answer()
            self.hear(Tick() if answer is None else answer)

    def _answer(self) -> INPUT | None:
        at_s = self.clock.now_s - 100.0
        while self.said:
            told = self.said.popleft()
            if isinstance(told, ShardJob) and self.process.inside is None:
                return Done(told.shard, 1, told.number)
            if isinstance(told, EnterPause):
                return Paused(told.learner, told.incarnation, told.number, told.lead)
            if isinstance(told, Go):
                if told.pieces and told.pin:
                    self.hear(Fetched(told.learner, told.incarnation, told.pin))
                spent: Any = {"began_s": at_s, "ended_s": at_s + 0.0005}
                if told.seq <= self.machine.sessions[told.learner].cancelled:
                    return Stop(told.learner, told.incarnation, told.seq, version=told.version, **spent)
                loss = 1.0 + 1.0 / told.seq
                fields: Any = {"hyper": (SGD,), "loss": loss, **spent}
                return Push(told.learner, told.incarnation, told.seq, told.version, 3, **fields)
        return None

    @property
    def machine(self) -> Coordinator:
        assert self.process.machine is not None
        return self.process.machine

    def close(self) -> str:
        self.hear(Finish())
        text = self.process.recorder.close(self.machine)
        for one in (self.mine, self.theirs, self.listener):
            one.close()
        for file in self.files:
            os.close(file)
        return text


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Snapshots every few messages."""
    monkeypatch.setattr(journal, "SNAPSHOT_EVERY", 7)
    yield


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("line", ["async", "k-sync:1", "k-async:2", "async:rate=drift:1.0", "ssp:1"])
def test_log_and_summary_of_a_run_with_restarts_are_those_of_one_without(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name, restarts in (("without", 0.0), ("with", 0.05)):
        folder = tmp_path / name
        folder.mkdir()
        lone = LoneCoordinator(folder, monkeypatch, line)
        # The clock counts looks at it, and a restart looks too: times come from the messages alone.
        monkeypatch.setattr(lone.clock, "monotonic", lambda clock=lone.clock: clock.now_s)
        lone.start()
        handle = lone.process.__class__._handle

        def ticking(self: Any, *given: Any, clock: Clock = lone.clock, handle: Any = handle) -> None:
            clock.now_s += 0.001
            handle(self, *given)

        with monkeypatch.context() as patched:
            patched.setattr(CoordinatorProcess, "_handle", ticking)
            lone.work(300, random.Random(3), restarts)
            lone.note()
            assert not lone.failed and not lone.told, (lone.failed, lone.told)
            summary = lone.close()
        log = read_log(folder / "log")
        replay(log.run, log.decisions)
        found.append(((folder / "log").read_bytes(), json.loads(summary)))
    assert found[0][1]["updates"] > 20
    assert found[0] == found[1]


class Killed(BaseException):
    """In the place of a signal."""


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("line", ["async", "k-sync:1", "k-async:2", "async:rate=drift:1.0"])
def test_an_update_that_the_coordinator_makes_itself_is_made_once_however_often_it_is_killed(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone = LoneCoordinator(tmp_path, monkeypatch, line, inside=100)
    assert lone.process.inside is not None and lone.process.arena is not None
    for slot in lone.process.arena.slots:  # all gradients, and the learning rate, are 1
        slot.fill_(1.0)
    lone.start()
    chance, handle, apply = random.Random(5), Shard.handle, ShardMemory.apply

    def sometimes() -> None:
        if chance.random() < 0.05:
            raise Killed

    def struck_after(self: Shard, job: ShardJob) -> Done:
        done = handle(self, job)
        sometimes()
        return done

    def struck_before(self: ShardMemory, job: ShardJob) -> None:
        apply(self, job)  # the new weights are there, and nobody knows
        sometimes()

    monkeypatch.setattr(Shard, "handle", struck_after)
    monkeypatch.setattr(ShardMemory, "apply", struck_before)
    kills = 0
    for _ in range(400):
        try:
            answer = lone._answer()
            lone.hear(Tick() if answer is None else answer)
        except Killed:
            kills += 1
            with monkeypatch.context() as patched:
                patched.setattr(chance, "random", lambda: 1.0)
                lone.restart()
                for learner in range(2):  # they connect again, and ask
                    lone.hear(Hello(learner, 10 + learner, lone.table.digest))
    updates = lone.machine.policy.version
    version, buffer = lone.process.arena.committed[0]
    assert kills > 10 and updates > 60
    assert version.get() + len(lone.machine.grants.commit_groups[0].queue) == updates
    weights = lone.process.arena.weights[buffer.get()]
    if "rate" not in line:
        assert torch.equal(weights, torch.full_like(weights, -float(version.get())))
    lone.close()


def test_recovery_goes_through_what_came_since_the_last_snapshot_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone = LoneCoordinator(tmp_path, monkeypatch)
    lone.start()
    taken: list[INPUT] = []
    handle = Coordinator.handle

    def counted(self: Coordinator, message: INPUT, at_s: float) -> Any:
        taken.append(message)
        return handle(self, message, at_s)

    for _ in range(4):
        lone.work(900, random.Random(1))
        monkeypatch.setattr(Coordinator, "handle", counted)
        updates = lone.machine.policy.version
        lone.restart()
        monkeypatch.setattr(Coordinator, "handle", handle)
        assert lone.machine.policy.version == updates
        assert len(taken) <= journal.SNAPSHOT_EVERY
        taken.clear()
        assert sum(os.fstat(file).st_size for file in lone.files) < 1_000_000
    lone.close()


@pytest.mark.usefixtures("often")
def test_what_makes_the_machine_raise_is_refused_and_all_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(self: Coordinator, session: Any, message: Want) -> None:
        self.counts["half done"] += 1
        raise ZeroDivisionError("by a message")

    monkeypatch.setattr(Coordinator, "_want", raises)
    lone = LoneCoordinator(tmp_path, monkeypatch)
    lone.start()
    lone.work(100, random.Random(2))
    before = lone.machine.policy.version, dict(lone.machine.counts)
    sender = lone.sender(1)
    sender.incarnation = 1
    for number in range(MOST_REFUSED):
        lone.hear(Want(1, 1, number + 1, 0, 1, 9, False), sender)
        if number < MOST_REFUSED - 1:
            assert (lone.machine.policy.version, dict(lone.machine.counts)) == before
    lone.note()
    assert lone.told == ["rejected a message from learner 1: Want: ZeroDivisionError: by a message"] * MOST_REFUSED
    assert "half done" not in lone.machine.counts
    assert lone.process.recorder.refused == MOST_REFUSED
    assert not lone.machine.sessions[1].here, "and its sender is sent away"
    lone.restart()
    assert not lone.process.failed and not lone.machine.sessions[1].here
    lone.work(100, random.Random(2))
    assert lone.machine.policy.version > before[0], "the other goes on"
    lone.close()


def test_an_entry_that_cannot_be_gone_through_is_set_aside_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone = LoneCoordinator(tmp_path, monkeypatch)
    lone.start()
    lone.work(60, random.Random(4))
    written = lone.process.journal
    version = lone.machine.policy.version
    written.add(b"no message", 1.0)
    written.add(encode(Fetched(1, 1, 10**6)), 2.0)  # harmless
    written.add(encode(Done(0, 1, 10**6)), 2.0)
    entry = encode(Silent(0, 1))
    written.add(entry, 3.0)
    os.pwrite(written.descriptor, b"\xff", written.end - 2)  # and one whose bytes have changed since
    lone.restart()
    lone.note()
    assert [text.partition(":")[0].split(" ", 2)[2] for text in lone.told] == ["of the journal was skipped"] * 2
    assert "checksum is wrong" in lone.told[1]
    assert lone.machine.policy.version == version and lone.machine.sessions[0].here
    lone.restart()
    assert len(lone.told) == 2, "the next one does not meet them again"
    lone.close()


def test_a_journal_full_of_nonsense_ends_the_run_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lone = LoneCoordinator(tmp_path, monkeypatch)
    lone.start()
    for _ in range(MOST_SET_ASIDE + 2):
        lone.process.journal.add(b"nonsense", 1.0)
    lone.restart()
    lone.note()
    assert lone.failed.startswith("the coordinator cannot be restarted: ")
    lone.close()


def test_a_journal_that_cannot_be_written_is_told_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone = LoneCoordinator(tmp_path, monkeypatch)
    lone.start()
    write = os.pwrite

    def full(file: int, data: Any, at: int) -> int:
        if at + len(data) > os.fstat(file).st_size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data, at)

    version = lone.machine.policy.version
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        lone.work(100, random.Random(5))
    lone.note()
    assert lone.told == [
        "cannot write the journal: No space left on device; the run continues, but would end if its coordinator were "
        "killed now"
    ]
    assert lone.machine.policy.version > version + 10
    lone.clock.now_s += 10
    lone.work(1, random.Random(5))
    version = lone.machine.policy.version
    lone.restart()
    lone.note()
    assert not lone.failed and lone.machine.policy.version == version, "there was room for a snapshot again"
    lone.close()


def test_a_coordinator_that_is_killed_while_its_journal_is_not_whole_fails_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone = LoneCoordinator(tmp_path, monkeypatch)
    lone.start()
    with monkeypatch.context() as patched:
        patched.setattr(journal, "_write_all", lambda *given: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space")))
        lone.work(3, random.Random(5))
    lone.restart()
    lone.note()
    assert "killed while its journal could not be written" in lone.failed
    lone.close()


def test_the_coordinators_own_messages_cannot_loop_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coordinator, "_tick", lambda self, message: 1 / 0)
    lone = LoneCoordinator(tmp_path, monkeypatch)
    lone.start()
    for _ in range(MOST_SET_ASIDE + 1):
        assert not lone.failed
        lone.hear(Tick())
        lone.note()
    assert lone.failed == "the coordinator cannot continue: Tick: ZeroDivisionError: division by zero"
    lone.close()


def test_a_policy_with_state_that_it_does_not_name_keeps_the_whole_journal() -> None:
    class Forgetful(Policy):
        extra_state = ("known",)

        def __init__(self) -> None:
            super().__init__(expect=2)
            self.known, self.forgotten = 0, 0

    policy = Forgetful()
    assert unsaved_state(policy, Forgetful()) == []
    policy.known, policy.version = 3, 9
    assert unsaved_state(policy, Forgetful()) == []
    policy.forgotten = 1
    assert unsaved_state(policy, Forgetful()) == ["forgotten"]


def test_a_welcome_is_known_to_the_successor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a learner that dies with the coordinator would never be found dead."""
    lone = LoneCoordinator(tmp_path, monkeypatch)
    lone.process.pids = {10: 4711}
    lone.hear(Hello(0, 10, lone.table.digest))
    assert any(isinstance(told, Welcome) for told in lone.said)
    lone.restart({10: 4711})
    assert lone.process.pids_by_session == {(0, 1): 4711}
    lone.restart()
    assert lone.process.pids_by_session == {(0, 1): 4711}, "by the snapshot"
    lone.close()
