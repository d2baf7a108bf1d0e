"""A simulated world around the parameter server's own machines: learners, servers, a coordinator, and what goes wrong.

Everything follows from a seed: the line, the sizes, which faults there are and when. Messages between any two are lost,
doubled, delayed and overtaken; lines are cut, both ways or one way, connections break with all that is on its way, and
are half-open until a heartbeat is missed; learners and servers are killed and stopped anywhere; the coordinator is
killed and brought back from its last snapshot and its journal since, which must be what its whole journal gives. The
outsider (`oracle`) looks at every event. Every message passes the gate, and what is honest is never refused there.
After a while faults end, and then every run must come to its end.

In some worlds all pause now and then, and in some of these a pause is the last one, and another world goes on from what
was saved there.

    cd tests && ../.venv/bin/python -m server.world --seeds 10000
"""

from __future__ import annotations

import argparse
import heapq
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from offbeat.errors import EventError
from offbeat.policies import POLICIES
from offbeat.server.coordinator import snapshot
from offbeat.server.coordinator.coordinator import Coordinator
from offbeat.server.coordinator.session import Sender
from offbeat.server.learner.connection import ConnectionState
from offbeat.server.parameter_layout import ParameterLayout
from offbeat.server.run_setting import RunSetting
from offbeat.server.shard.server_process import Shard
from offbeat.server.wire import (
    INPUT,
    TO_LEARNER,
    CancelWord,
    Done,
    FenceWord,
    Finish,
    Gone,
    Hello,
    Message,
    Push,
    Ready,
    Seeded,
    ShardJob,
    Silent,
    Tick,
    WakeDue,
    Want,
    decode_input,
    decode_output,
    encode,
)
from server.actors import Learner, Memory, Server
from server.oracle import WIDTH, Oracle
from server.pause_oracle import LawError, Led, Vector, demand

# The first example of every row; and, since weights that were read are kept then, rates of both kinds.
LINES = (
    *(session.examples[0] for session in POLICIES.values()),
    "async:rate=inverse",
    "async:rate=drift:1.0",
    "async:rate=delay-compensated:0.1",
    "k-async:2,rate=drift:1.0",
    "k-sync:2,rate=drift:1.0",
    "full-sync:rate=drift:1.0",
    "k-batch-sync:3,rate=delay-compensated:0.1",
    "k-batch-async:3,rate=delay-compensated:0.1",
    "stale-drop:2,rate=inverse",
    "ssp:1,rate=inverse-mean",
    "downpour:push=1,fetch=2,rate=drift:1.0",
    "downpour:push=2,fetch=3,rate=delay-compensated:0.1",
    "grace-sync:1,grace=2s",
    "grace-sync:2,grace=1s,rate=drift:1.0",
    "deadline-sync:4s",
    "deadline-sync:2s,rate=delay-compensated:0.1",
)

# What may go wrong, and the chances from which a seed draws: at each message, or at each step of a process.
FAULTS: dict[str, tuple[float, ...]] = {
    "lost": (0, 0, 0.02, 0.1, 0.3),
    "doubled": (0, 0, 0.05, 0.2),
    "late": (0, 0, 0.05, 0.2),
    "learner dies": (0, 0, 0.003, 0.01, 0.03),
    "learner stops": (0, 0, 0.003, 0.01, 0.03),
    "taken for dead": (0, 0, 0.05, 0.2),
    "server dies": (0, 0, 0.02, 0.1),
    "server stops": (0, 0, 0.02, 0.1),
    "coordinator dies": (0, 0, 0.003, 0.02),
    "line is cut": (0, 0, 0.02, 0.1),
}
# Of the line to a learner on another host. They are drawn apart from the others.
NETWORK_FAULTS: dict[str, tuple[float, ...]] = {
    "cut one way": (0, 0, 0.05, 0.2),  # what is sent that way vanishes; the other way is open
    "half-open": (0, 0, 0.05, 0.2),  # both ways, until the coordinator misses heartbeats
    "connection breaks": (0, 0, 0.05, 0.2),  # and with it all that is on its way
}
REMOTE = 0.5  # of the worlds have them
SNAPSHOTS = (0.0, 0.02, 0.2, 1.0)  # chances, at each message
PAUSING = 0.3  # of the worlds have pauses
OWN_BUFFERS = 0.3  # of worlds: each learner reads a buffer of its own, and does not say when it has
RETRY_S = 3.0
TICK_S = 2.0
MOST_CALM_EVENTS = 15_000  # that a run may take to its end when nothing goes wrong any more


class WorldLayout(ParameterLayout, frozen=True):
    """Each shard has `WIDTH` numbers, and each of them is a block."""

    @property
    def block(self) -> int:
        return 1

    def shard(self, shard: int, shards: int) -> tuple[int, int]:
        return shard * WIDTH, (shard + 1) * WIDTH


LAYOUT = WorldLayout((1,) * WIDTH, (0,) * WIDTH, 0, "float32", "float32", "sgd", (), 0.0, False, "table")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit:
    """The machines that the world is made of; a planted bug is another kit."""

    coordinator: type[Coordinator] = Coordinator
    client: type[ConnectionState] = ConnectionState
    shard: type[Shard] = Shard
    looks_at_fence: bool = True  # after reading
    journal_lag: int = 0  # messages at the end of the journal that a crash loses
    journals_wakes: bool = True


@dataclass(slots=True)
class Place:
    """A learner's place: one process after the other, until one has done all."""

    left: int
    process: Learner
    done: bool = False


@dataclass(slots=True)
class Story:
    """What has happened, for the summary."""

    events: int = 0
    calm_events: int = 0  # after the last fault
    updates: int = 0
    pauses: int = 0
    halted: bool = False
    faults: Counter[str] = field(default_factory=Counter)


class World:
    """See the module's text."""

    def __init__(self, seed: int, kit: Kit | None = None, line: str | None = None, after: World | None = None) -> None:
        self.seed, self.kit, self.before = seed, kit or Kit(), after
        self.saved: Led | None = None if after is None else after.oracle.pauses.saved
        self.rng: random.Random = random.Random(seed)
        rng = self.rng
        pauses = random.Random(f"rests of {seed}")
        self.pauses = pauses.random() < PAUSING
        self.halt_at_s = pauses.uniform(1, 40) if self.pauses and pauses.random() < 0.3 else None
        self.stops = pauses.choice((0, 0, 0.1)) if self.pauses else 0.0  # chance that who leads ends the run
        if after is not None:
            self.halt_at_s, self.stops = None, 0.0
        facts = {} if self.saved is None else self.saved.facts
        line = line or LINES[seed % len(LINES)]
        own_buffers = random.Random(f"buffers of {seed}").random() < OWN_BUFFERS
        self.setting = RunSetting(
            line=line,
            learners=rng.randint(2, 5),
            shards=rng.randint(1, 3),
            again=rng.random() < 0.6,
            clip_norm=rng.choice((0.0, 0.0, 2.0)),
            start_by_s=rng.choice((None, 5.0)),
            pause_every=pauses.choice((0, 1, 2, 3, 5)) if self.pauses else 0,
            pause_epochs=self.pauses and pauses.random() < 0.5,
            book=facts.get("book"),
            memory=facts.get("memory"),
            in_place=own_buffers and not RunSetting(line=line, learners=2).independent,
        )
        calm = rng.random() < 0.1
        self.chances = {name: 0.0 if calm else rng.choice(chances) for name, chances in FAULTS.items()}
        self.network = random.Random(f"network of {seed}")
        near = calm or self.network.random() >= REMOTE
        self.chances |= {
            name: 0.0 if near else self.network.choice(chances) for name, chances in NETWORK_FAULTS.items()
        }
        self.samples = rng.choice((0, rng.randint(7, 20), rng.randint(7, 20)))  # of an epoch; 0: no leases
        self.epochs, self.batch = rng.randint(2, 3), rng.randint(1, 3)
        self.prefetch, self.give_back = rng.choice((0, 0.5)), rng.choice((0, 0.1))
        self.non_finite = [rng.choice((0, 0, 0.1)) for _ in range(self.setting.learners)]
        if rng.random() < 0.05:
            self.non_finite[0] = 0.95  # it is sent away
        self.looks = rng.choice((0, 0, 0.1))  # chance that a learner asks for weights only to look at them
        self.patient = rng.random() < 0.5  # a learner that asks for weights waits for them
        self.slowness = [rng.choice((1, 1, 1, 5)) for _ in range(self.setting.learners)]
        self.quiet_from_s = rng.uniform(10, 60)
        self.story = Story()
        self.now = 0.0
        self.nonces = 0  # that were drawn
        self.stays: dict[tuple[int, int], int] = {}  # incarnation by learner and nonce, as whoever carries them knows
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        shards, learners = self.setting.shards, self.setting.learners
        self.buffers = [[[0.0] * WIDTH for _ in range(self.setting.buffers)] for _ in range(shards)]
        self.slots = [[[0.0] * WIDTH for _ in range(shards)] for _ in range(self.setting.slots)]
        self.cancel_words = [(0, 0)] * learners
        self.fence_words = [0] * learners
        self.cut_until = {"up": [0.0] * learners, "down": [0.0] * learners}  # what learners send, and what they hear
        self.connections = [0] * learners  # of each, how many have broken
        self.oracle: Oracle = Oracle(self.setting, self.initial_of(0, 0))
        if after is not None:
            self.oracle.goes_on_from(after.oracle)
        self.down = False
        self.journal: list[tuple[INPUT, float]] = []
        self.kept: tuple[bytes, int] = (b"", 0)  # a snapshot, and how long the journal was then
        self.snapshots = random.Random(f"snapshots of {seed}")
        self.snapshot_chance = self.snapshots.choice(SNAPSHOTS)
        if self.kit.journal_lag or not self.kit.journals_wakes:
            self.snapshot_chance = 0.0
        self.up_since_s = 0.0  # that this coordinator is there
        self.wake_planned_s: float | None = None  # the earliest at which somebody looks whether a wake is due
        self.coordinator = self.kit.coordinator(self.setting, self.oracle.decided)
        self.servers = [Server(self, Memory(self, shard), 1) for shard in range(shards)]
        for server in self.servers:
            server.beat()
        self.places = [Place(rng.randint(3, 8), Learner(self, learner)) for learner in range(learners)]
        for place in self.places:
            self._start(place.process, rng.uniform(0, 3))
        self.after(TICK_S, self._tick)
        if self.halt_at_s is not None:
            self.after(self.halt_at_s, self._halt)

    def initial_of(self, learner: int, incarnation: int) -> tuple[Vector, ...]:
        if self.saved is not None:
            return self.saved.weights
        first = 100.0 * learner + 10.0 * incarnation
        return tuple(tuple(first + shard + at for at in range(WIDTH)) for shard in range(self.setting.shards))

    # --- time -------------------------------------------------------------------------------------------------------

    def after(self, delay_s: float, deed: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._order, deed))

    def happens(self, fault: str) -> bool:
        chance = self.chances[fault]
        rng = self.network if fault in NETWORK_FAULTS else self.rng
        if chance and self.now < self.quiet_from_s and rng.random() < chance:
            self.story.faults[fault] += 1
            return True
        return False

    def run(self) -> Story:
        finishing = False
        while True:
            if all(place.done for place in self.places) and not self.down:
                if not finishing:
                    self.quiet_from_s, finishing = min(self.now, self.quiet_from_s), True
                    self._handle(Finish())
                if self.coordinator.grants.idle and not self.coordinator.unmeasured_pushes:
                    break
            self.story.events += 1
            self.story.calm_events += self.now >= self.quiet_from_s
            if self.story.calm_events > MOST_CALM_EVENTS:
                raise LawError(f"after faults stop, progress resumes: {self._state()}")
            self.now, _, deed = heapq.heappop(self._heap)
            deed()
        self.oracle.check(self.coordinator, self.buffers)
        self.oracle.finished(self.coordinator)
        self.story.updates = len(self.oracle.updates)
        self.story.pauses = len(self.oracle.pauses.led)
        self.story.halted = self.oracle.pauses.over
        if self.oracle.pauses.saved is not None:
            self._go_on()
        return self.story

    def _go_on(self) -> None:
        """Another run, from what was saved."""
        story = World(self.seed, self.kit, self.setting.line, after=self).run()
        self.story.events += story.events
        self.story.pauses += story.pauses
        self.story.updates += story.updates

    def _state(self) -> str:
        sessions = [
            {name: value for name, value in vars(session).items() if value and name not in ("hyper", "nonces")}
            for session in self.coordinator.sessions.values()
        ]
        clients = [vars(place.process.client) for place in self.places if not place.done]
        commit_groups = [vars(group) for group in self.coordinator.grants.commit_groups]
        grants = (
            self.coordinator.grants.free_slots,
            self.coordinator.leases.book and self.coordinator.leases.book.snapshot(),
        )
        return " ".join(map(str, (self.now, self.setting, *sessions, *clients, *commit_groups, grants)))

    # --- the network --------------------------------------------------------------------------------------------------

    def _carry(self, deliver: Callable[[], None]) -> None:
        if self.happens("lost"):
            return
        for _ in range(2 if self.happens("doubled") else 1):
            late = self.rng.uniform(1, 12) if self.happens("late") else 0.0
            self.after(late + self.rng.uniform(0.01, 0.3), deliver)

    def to_coordinator(self, message: Message, sender: Learner | None) -> None:
        told = decode_input(encode(message))
        connection = 0 if sender is None else self.connections[sender.learner]

        def arrive() -> None:
            if sender is None or (not sender.cut and self._is_open("up", sender.learner, connection)):
                self._check_gate(told, sender)
                self._handle(told)

        self._carry(arrive)

    def _check_gate(self, told: INPUT, sender: Learner | None) -> None:
        if isinstance(told, Ready | Done):
            who = Sender("server", told.shard, generation=told.generation)
        else:
            assert sender is not None
            who = Sender("learner", sender.learner, self.known_as(sender))
        fault = self.coordinator.fault_of(told, who, self.now, LAYOUT)
        demand(self.down or not fault, "what is honest is not refused", told, fault)

    def _from_coordinator(self, message: Message) -> None:
        if isinstance(message, CancelWord):
            self.cancel_words[message.learner] = message.incarnation, message.seq
        elif isinstance(message, FenceWord):
            self.fence_words[message.learner] = message.incarnation
        elif isinstance(message, ShardJob):
            self._carry(lambda: self.servers[message.shard].hear(message))
        elif isinstance(message, TO_LEARNER):
            connection = self.connections[message.learner]
            self._carry(lambda: self._to_learner(message.learner, message, connection))

    def _to_learner(self, learner: int, message: Message, connection: int) -> None:
        process = self.places[learner].process
        if not process.dead and self._is_open("down", learner, connection):
            process.hear(decode_output(encode(message)))

    def _is_open(self, way: str, learner: int, connection: int) -> bool:
        """Whether what was sent on this connection arrives."""
        return self.now >= self.cut_until[way][learner] and connection == self.connections[learner]

    # --- the coordinator ----------------------------------------------------------------------------------------------

    def _handle(self, message: INPUT) -> None:
        if self.down:
            return
        if isinstance(message, Push):
            self.oracle.handling(message.learner, message.incarnation, message.seq)
        elif isinstance(message, Want):
            self.oracle.pauses.wanted(message)
        was_seeded = self.coordinator.seeded
        said = self.coordinator.handle(message, self.now)
        if self.kit.journals_wakes or not isinstance(message, WakeDue):
            self.journal.append((message, self.now))
        if self.snapshots.random() < self.snapshot_chance:
            self.kept = self._state_bytes(self.coordinator), len(self.journal)
        if isinstance(message, Hello):
            session = self.coordinator.sessions[message.learner]
            self.stays[message.learner, session.nonce] = session.incarnation
        if isinstance(message, Seeded) and self.coordinator.seeded and not was_seeded:
            self.oracle.seed(self.initial_of(message.learner, message.incarnation))
        for one in said:
            self.oracle.said(one)
        self.oracle.check(self.coordinator, self.buffers)
        self.oracle.check_wake(self.coordinator, self.now, self.up_since_s)
        self._plan_wake()
        if self.happens("coordinator dies"):
            for one in said[: self.rng.randint(0, len(said))]:
                self._from_coordinator(one)
            self.down = True
            self.after(self.rng.uniform(0.1, 8), self._revive)
        else:
            for one in said:
                self._from_coordinator(one)

    def _revive(self) -> None:
        """Another coordinator, from the journal."""
        if self.kit.journal_lag:
            del self.journal[-self.kit.journal_lag :]
        self.coordinator = self._brought_back(b"", 0)
        state, length = self.kept
        if state:
            whole, self.coordinator = self.coordinator, self._brought_back(state, length)
            same = self._state_bytes(whole) == self._state_bytes(self.coordinator)
            demand(same, "a snapshot and what came since are the whole journal")
        self.coordinator.write = self.oracle.decided
        self.down = False
        for word in self.coordinator.shared_words():
            self._from_coordinator(word)
        self.oracle.check(self.coordinator, self.buffers)
        self.up_since_s = self.now
        self.oracle.check_wake(self.coordinator, self.now, self.up_since_s)
        self.wake_planned_s = None
        self._plan_wake()

    def _brought_back(self, state: bytes, length: int) -> Coordinator:
        """A coordinator from a snapshot, if there is one, and from the journal since."""
        coordinator = self.kit.coordinator(self.setting)
        if state:
            snapshot.restore(coordinator, snapshot.decode_state(state))
        for message, at_s in self.journal[length:]:
            coordinator.handle(message, at_s)
        return coordinator

    @staticmethod
    def _state_bytes(coordinator: Coordinator) -> bytes:
        return snapshot.encode_state(snapshot.take(coordinator))

    def _plan_wake(self) -> None:
        """Somebody looks when it is due; whoever carries the messages may be late, but not early."""
        due_s = self.coordinator.next_wake_s
        if due_s is not None and (self.wake_planned_s is None or due_s < self.wake_planned_s):
            self.wake_planned_s = max(due_s, self.now)
            late_s = random.Random(f"{self.seed} {due_s}").choice((0.0, 0.0, 0.01, 0.2))  # draws nothing from `rng`
            self.after(self.wake_planned_s + late_s - self.now, self._wake)

    def _wake(self) -> None:
        self.wake_planned_s = None
        due_s = None if self.down else self.coordinator.next_wake_s
        if due_s is not None and self.now >= due_s:
            self._handle(WakeDue())
        elif not self.down:
            self._plan_wake()

    def _tick(self) -> None:
        self._handle(Tick())
        self.after(TICK_S, self._tick)
        learner = self.rng.randrange(self.setting.learners)
        session = self.coordinator.sessions[learner]
        if self.happens("taken for dead") and session.here:
            self._handle(Silent(learner, session.incarnation))
        if self.happens("line is cut"):
            self._cut(learner, self.rng.uniform(0.5, 10), "up", "down")
        self._break_lines()

    def _cut(self, learner: int, length_s: float, *ways: str) -> None:
        for way in ways:
            self.cut_until[way][learner] = self.now + length_s

    def _break_lines(self) -> None:
        """What happens to the line of a learner on another host."""
        network = self.network
        learner, length_s = network.randrange(self.setting.learners), network.uniform(0.5, 20)
        process, missed_s = self.places[learner].process, network.uniform(0.1, length_s)
        if self.happens("cut one way"):
            way = network.choice(("up", "down"))
            self._cut(learner, length_s, way)
            if way == "up" and network.random() < 0.5:  # heartbeats go that way too
                self.after(missed_s, lambda: self._silent(process))
        if self.happens("half-open"):
            self._cut(learner, length_s, "up", "down")
            self.after(missed_s, lambda: self._silent(process))
        if self.happens("connection breaks"):
            self.connections[learner] += 1
            self.after(network.uniform(0.01, 3), lambda: self._silent(process))

    # --- processes ----------------------------------------------------------------------------------------------------

    def _start(self, process: Learner, delay_s: float) -> None:
        token = process.token
        self.after(delay_s, lambda: self._step(process, token))

    def wake(self, process: Learner) -> None:
        """Word has come."""
        if process.waiting:
            process.waiting = False
            process.token += 1
            self._start(process, 0.0)

    def _step(self, process: Learner, token: int) -> None:
        if process.dead or token != process.token:
            return
        if self.happens("learner dies"):
            self._kill(process)
            return
        if self.happens("learner stops"):
            self._stop(process)
            return
        if process.waiting or (process.called and self.now - process.heard_s >= RETRY_S):
            process.heard_s = self.now
            process.say(process.client.retry())
        process.called = False
        process.token += 1
        try:
            pause_s = next(process.life)
        except StopIteration:
            process.dead = True
            self.after(self.rng.uniform(0.1, 5), lambda: self._gone(process))
            if process.client.refused is not None:
                bad = "not finite" in process.client.refused and self.non_finite[process.learner] > 0
                if not bad and not (self.coordinator.pauses.over and process.client.refused == "the run has ended"):
                    raise EventError(f"nobody is sent away here: {process.client.refused}") from None
                self.places[process.learner].done = True
            return
        process.waiting = pause_s is None
        self._start(process, RETRY_S if pause_s is None else pause_s)

    def _halt(self) -> None:
        """One of those who are there wants the run to end."""
        there = [place.process for place in self.places if place.process.client.seq and not place.done]
        if not there and not all(place.done for place in self.places):  # real learners ask once the run has begun
            self.after(1.0, self._halt)
        for process in there[: self.rng.randint(1, 2)]:
            if not process.dead and not process.paused:
                process.say(process.client.request_end())

    def _kill(self, process: Learner) -> None:
        process.dead = True
        self.after(self.rng.uniform(0.1, 10), lambda: self._gone(process))
        self.after(self.rng.uniform(0.1, 8), lambda: self._replace(process.learner))

    def _replace(self, learner: int) -> None:
        process = self.places[learner].process = Learner(self, learner)
        self._start(process, 0.0)

    def _gone(self, process: Learner) -> None:
        """Whoever watches processes says so, until it is heard."""
        if self.down:
            self.after(1.0, lambda: self._gone(process))
            return
        process.cut = True
        known = self.known_as(process)
        if known:
            self._handle(Gone(process.learner, known))

    def new_nonce(self) -> int:
        """Never twice the same, and as a real one not to be guessed from those before."""
        self.nonces += 1
        return 1 + self.nonces * 0x9E3779B97F4A7C15 % (2**61 - 1)

    def known_as(self, process: Learner) -> int:
        """The latest incarnation of a process, as whoever carries messages knows it."""
        return max((self.stays.get((process.learner, nonce), 0) for nonce in process.nonces), default=0)

    def _stop(self, process: Learner) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        process.paused = True
        process.token += 1
        length_s = self.rng.uniform(0.5, 25)
        if self.rng.random() < 0.8:
            self.after(self.rng.uniform(0, length_s), lambda: self._silent(process))
        self.after(length_s, lambda: self._continue(process))

    def _silent(self, process: Learner) -> None:
        session = self.coordinator.sessions[process.learner]
        if session.nonce in process.nonces and session.here:
            self._handle(Silent(process.learner, session.incarnation))

    def _continue(self, process: Learner) -> None:
        process.paused = False
        process.token += 1
        self._start(process, 0.0)
        mail, process.mailbox = process.mailbox, []
        for message in mail:
            process.hear(message)

    def dies_at(self) -> int | None:
        """Where a server that is about to write an update is killed."""
        return self.rng.randrange(WIDTH) if self.happens("server dies") else None

    def new_server(self, shard: Shard) -> None:
        memory = shard.memory
        assert isinstance(memory, Memory)
        server = self.servers[memory.shard] = Server(self, memory, shard.generation + 1)
        server.beat()


def found_at(kit: Kit, seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first seed whose run breaks a law, and which. That a planted bug makes a machine fall over is no finding."""
    for seed in seeds:
        try:
            World(seed, kit).run()
        except AssertionError as error:
            return seed, str(error).split(":")[0]
        except (EventError, KeyError):
            continue
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="random worlds around the parameter server's machines")
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--most-failures", type=int, default=1)
    parser.add_argument("--most-text", type=int, default=300, help="characters that are shown of a failure")
    parser.add_argument("--only", default="", metavar="REGEX", help="lines that it is found in, like 'grace|deadline'")
    parser.add_argument("--planted", action="store_true", help="show at which seed each planted bug is found")
    given = parser.parse_args()
    began_s = time.perf_counter()
    events = updates = pauses = wakes = halted = failures = longest = 0
    faults: Counter[str] = Counter()
    lines = [line for line in LINES if re.search(given.only, line)]
    for seed in range(given.first, given.first + given.seeds):
        world = World(seed, line=lines[seed % len(lines)] if given.only else None)
        try:
            story = world.run()
        except Exception as error:
            failures += 1
            text = f"{type(error).__name__}: {error}"
            print(f"seed {seed}, {world.setting}: {text[: given.most_text]}", flush=True)
            if failures >= given.most_failures:
                return 1
            continue
        events += story.events
        updates += story.updates
        pauses += story.pauses
        halted += story.halted
        longest = max(longest, story.calm_events)
        faults += story.faults
        wakes += world.oracle.woke
    took_s = time.perf_counter() - began_s
    print(
        f"{given.seeds} seeds, {events} events, {updates} updates, {pauses} pauses, {wakes} wakes, "
        f"{faults.total()} faults, {halted} saved and gone on with: "
        f"{failures} failed, {took_s:.0f} s; "
        f"the longest way to the end without faults took {longest} events"
    )
    print(", ".join(f"{name} {count}" for name, count in sorted(faults.items())))
    if given.planted:
        from server.planted import KITS

        for name, kit in KITS.items():
            found = found_at(kit, range(2000))
            print(f"{name}: " + ("NOT FOUND" if found is None else f"seed {found[0]}, '{found[1]}'"), flush=True)
            failures += found is None
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
