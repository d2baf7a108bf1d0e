"""Random worlds in which some learners, and something in the place of a server, say whatever they like.

They are authenticated: a hostile learner speaks for its own number, a hostile server for its own shard. What they say
(`mutations`) passes the gate or is refused; what passes is what they have said, and the laws of the random worlds hold
with it: no push is lost or doubled, honest learners are never refused, weights are those of what was accepted, tables
stay small, no machine raises. When faults end the hostile ones are killed, and every run must come to its end.

What is believed, since nobody can know better: the first learner's word for how many samples an epoch has, and a
server's word that a job is done.

    cd tests && ../.venv/bin/python -m server.fuzz --messages 2000000
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from typing import Any

from offbeat.server.coordinator.session import LearnerSession, Sender
from offbeat.server.wire import (
    INPUT,
    Ask,
    Bye,
    Done,
    EndPause,
    EndRequest,
    Fetched,
    GiveBack,
    GroupCall,
    Hello,
    Message,
    Paused,
    PauseRequest,
    Push,
    Ready,
    Seeded,
    SentAway,
    Stop,
    Want,
    WireError,
    decode_input,
)
from server.actors import SGD, Learner, Life
from server.mutations import KINDS, Mutator
from server.oracle import Oracle, Truth
from server.pause_oracle import LawError, Led, PauseOracle, Stay
from server.world import LAYOUT, World

MOST_STATE_BYTES = 64 * 1024  # of a coordinator in one of these worlds
MOST_RATE = 0.01  # of a hostile learner: with a high one weights diverge, as it has said
# What a hostile learner says most: else few messages are of use to anybody, and little happens.
OFTEN = (Hello, Push, Push, Push, Stop, Ask, Fetched, Want, Want, GiveBack, Paused, GroupCall)


class Hostile(Learner):
    """A process that has the run's token, and no other intention than to say what it likes."""

    world: FuzzedWorld

    def _live(self) -> Life:
        world, refused = self.world, self.rng.choice((20, 200, 1000))
        while world.now < world.quiet_from_s and refused > 0:
            for _ in range(self.rng.choice((1, 10, 30))):
                if not world.down:
                    refused -= world.attack(world.mutator.frame(self._kinds()), world.sender_of(self))
            yield self.rng.uniform(0.02, 0.3)
        if refused <= 0:
            session = world.coordinator.sessions[self.learner]
            if not world.down and session.nonce in self.nonces and session.here:
                world._handle(SentAway(self.learner, session.incarnation, "it said what cannot be"))
        world.after(self.rng.uniform(0.1, 3), lambda: world._replace(self.learner))

    def _kinds(self) -> tuple[type[Message], ...]:
        return OFTEN if self.rng.random() < 0.9 else KINDS

    def hear(self, message: Message) -> None:
        pass


class LenientPauses(PauseOracle):
    """A hostile learner may lead a pause to its end, or the run, without looking at anything."""

    def said(self, message: Message) -> None:
        if isinstance(message, EndPause):
            self.over = self.over or message.over
        else:
            super().said(message)

    def has_led(self, stay: Stay, *given: Any, **named: Any) -> None:
        _, facts = self.reading.get(stay, (0, {"seeded": False}))
        if facts["seeded"]:
            super().has_led(stay, *given, **named)
        self.reading.pop(stay, None)  # before there are weights, somebody may write them meanwhile
        self.led.clear()

    def _lends(self, granted: object) -> None:
        pass

    @property
    def saved(self) -> Led | None:
        return None


class FuzzedOracle(Oracle):
    """A push that says what cannot be is taken and dropped, before the policy has decided anything."""

    def unmeasured(self, coordinator: Any) -> int:
        return super().unmeasured(coordinator) + int(coordinator.counts["dropped: impossible"])


class FuzzedWorld(World):
    """See the module's text."""

    def __init__(self, seed: int) -> None:
        self.hostile: set[int] = set()
        self.sent: Counter[str] = Counter()
        self.mutator = Mutator(seed, self._suited)
        super().__init__(seed)
        self.speaker = Sender("learner", 0)
        self.oracle = FuzzedOracle(self.setting, self.initial_of(0, 0))
        self.oracle.pauses = LenientPauses(self.setting)
        self.coordinator.write = self.oracle.decided
        self.quiet_from_s = max(self.quiet_from_s, 30.0)
        count = self.rng.randint(1, self.setting.learners - 1)
        self.hostile = set(self.rng.sample(range(self.setting.learners), count))
        for learner in self.hostile:
            self._replace(learner)
        self.after(0.1, self._lie_as_server)

    def sender_of(self, process: Learner) -> Sender:
        return Sender("learner", process.learner, self.known_as(process))

    def _replace(self, learner: int) -> None:
        if learner in self.hostile and self.now < self.quiet_from_s:
            self.places[learner].process.dead = True
            process = self.places[learner].process = Hostile(self, learner)
            self._start(process, 0.0)
        else:
            super()._replace(learner)

    def to_coordinator(self, message: Message, sender: Learner | None) -> None:
        self.mutator.note(message)
        super().to_coordinator(message, sender)

    def _lie_as_server(self) -> None:
        if self.now < self.quiet_from_s:
            shard = self.rng.randrange(self.setting.shards)
            sender = Sender("server", shard, generation=self.servers[shard].shard.generation)
            for _ in range(self.rng.choice((1, 3))):
                if not self.down:
                    self.attack(self.mutator.frame((Ready, Done)), sender)
            self.after(self.rng.uniform(0.05, 0.5), self._lie_as_server)

    # --- what they say ------------------------------------------------------------------------------------------------

    def attack(self, frame: bytes, sender: Sender) -> bool:
        """Say it; whether it was refused."""
        self.speaker = sender
        self.sent["messages"] += 1
        try:
            message = decode_input(frame)
        except WireError:
            self.sent["not a message"] += 1
            return True
        if self.coordinator.fault_of(message, sender, self.now, LAYOUT):
            self.sent["refused"] += 1
            return True
        if self._is_believed(message):
            self.sent["left out"] += 1
            return False
        self.sent["accepted"] += 1
        self._prepare(message)
        self._handle(message)
        self.mutator.note(message)
        return False

    def _is_believed(self, message: INPUT) -> bool:
        """What nobody can know better, and what would make numbers that are no numbers."""
        if isinstance(message, Want):
            return self.coordinator.leases.book is None and (message.of != self.samples or message.epoch > 0)
        if isinstance(message, Push):
            return any(abs(value) > MOST_RATE for hyper in message.hyper for value in hyper.values())
        if isinstance(message, Done):
            return any(
                (job.shard, job.number) == (message.shard, message.number) for job in self.coordinator.grants.repeat()
            )
        return False

    def _prepare(self, message: INPUT) -> None:
        """What the outsider has to know of it."""
        if isinstance(message, Hello):
            process = self.places[message.learner].process
            if message.nonce not in process.nonces:
                process.nonces.append(message.nonce)
        name = (message.learner, message.incarnation) if isinstance(message, Seeded) else None
        if name is not None and self.coordinator.seeder == name and not self.coordinator.seeded:
            for shard, vector in enumerate(self.initial_of(*name)):
                self.buffers[shard][0][:] = vector
        if isinstance(message, Push):
            session = self.coordinator.sessions[message.learner]
            key = (message.learner, message.incarnation, message.seq)
            open_ = message.seq in session.versions and message.seq > session.answered
            if session.here and session.incarnation == message.incarnation and open_ and session.slot is not None:
                book = self.coordinator.leases.book
                mine = {} if book is None else {lease.number: lease for lease in book.in_hand(message.learner)}
                self.oracle.truth[key] = Truth(
                    tuple(tuple(vector) for vector in self.slots[session.slot]),
                    message.version,
                    message.samples,
                    tuple(mine[number][:4] for number in dict.fromkeys(message.leases) if number in mine),
                    (message.hyper or session.hyper)[0]["lr"],
                    message.absent,
                    message.finite,
                )

    # --- what would fit -----------------------------------------------------------------------------------------------

    def _suited(self, kind: type[Message], name: str) -> Any:
        rng, sender = self.mutator.rng, self.speaker
        if sender.role == "server":
            jobs = [job.number for job in self.coordinator.grants.repeat() if job.shard == sender.number]
            served = {"shard": sender.number, "generation": sender.generation, "number": rng.choice([*jobs, 1])}
            return served.get(name)
        session = self.coordinator.sessions[sender.number]
        if kind is Hello:
            nonce = rng.choice((session.nonce or 1, self.new_nonce()))
            return {"learner": sender.number, "nonce": nonce, "table": "table", "after": sender.incarnation}.get(name)
        return self._suited_of(kind, name, session)

    def _suited_of(self, kind: type[Message], name: str, session: LearnerSession) -> Any:
        rng, machine = self.mutator.rng, self.coordinator
        match name:
            case "learner":
                return session.learner
            case "incarnation":  # one that has gone is answered so, and little else happens
                seldom = kind in (EndRequest, Bye, PauseRequest) and rng.random() < 0.9
                return max(0, session.incarnation - seldom)
            case "seq":
                return rng.choice(list(session.versions) or [session.seq])
            case "version":
                return max(session.versions.values(), default=machine.policy.version)
            case "samples" | "count":
                return rng.randint(1, 3)
            case "hyper":
                return [{**SGD, "lr": rng.choice((0.0, MOST_RATE))}] if rng.random() < 0.9 else []
            case "leases":
                book = machine.leases.book
                mine = [] if book is None else [lease.number for lease in book.in_hand(session.learner)]
                return rng.sample(mine, rng.randint(0, len(mine)))
            case "absent":
                return rng.choice(([], [0], [0, 1, 2], [2, 2]))
            case "ended_s":
                return rng.choice((0.0, self.now))
            case "began_s":
                return 0.0
            case "number":
                numbers = {Want: session.wanted, Ask: session.asked, GroupCall: machine.calls.last}
                return machine.pauses.number if kind is Paused else numbers.get(kind, 0) + 1
            case "pin":
                return session.pin
            case "epoch":
                return 0 if machine.leases.book is None else machine.leases.book.epoch
            case "of":
                return self.samples or None
            case "finite":
                return rng.random() < 0.9
            case "stop":
                return rng.random() < 0.02
        return None


def run(seed: int) -> FuzzedWorld:
    """One world to its end; a `LawError`, or whatever a machine raised, is a finding."""
    world = FuzzedWorld(seed)
    try:
        world.run()
    except LawError:
        if all(math.isfinite(one) for vectors in world.oracle.history for one in vectors[-1]):
            raise
        world.sent["left when weights diverged"] += 1  # and what is no number equals nothing
    size = len(world._state_bytes(world.coordinator))
    assert size < MOST_STATE_BYTES, f"a coordinator of {size} bytes"
    return world


def main() -> int:
    parser = argparse.ArgumentParser(description="random worlds with learners and servers that say what they like")
    parser.add_argument("--messages", type=int, default=2_000_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--most-s", type=float, default=math.inf)
    given = parser.parse_args()
    began_s, sent, seed, updates = time.perf_counter(), Counter[str](), given.first, 0
    while sent["messages"] < given.messages and time.perf_counter() - began_s < given.most_s:
        try:
            world = run(seed)
        except Exception as error:
            print(f"seed {seed}: {type(error).__name__}: {error}"[:2000])
            return 1
        sent += world.sent
        updates += world.story.updates
        seed += 1
    took_s = time.perf_counter() - began_s
    parts = ", ".join(f"{many:,} {name}" for name, many in sorted(sent.items()) if name != "messages")
    print(
        f"{sent['messages']:,} hostile messages in {seed - given.first} worlds, {updates:,} updates, {took_s:.0f} s: "
        f"{parts}; no law was broken and no machine raised"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
