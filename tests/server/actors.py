"""The processes of the simulated world: learners and servers, each a driver of the real machine.

A learner is a generator: it yields how long something takes, or None where it waits for word. Between two yields it may
be killed, or stopped for a long time; what comes meanwhile is heard when it goes on.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING

from offbeat.server.wire import (
    CancelWord,
    Done,
    EnterPause,
    Fenced,
    Granted,
    Lease,
    Message,
    Push,
    Ready,
    ShardJob,
    Stop,
    Weights,
)
from server.oracle import WIDTH, Truth, gradient_of, mean_gradient, squares, stepped
from server.pause_oracle import Key, Vector

if TYPE_CHECKING:
    from server.world import World

Life = Iterator[float | None]
SGD = dict.fromkeys(("momentum", "dampening", "weight_decay", "nesterov", "maximize"), 0.0)


def numbers(leases: Iterable[Lease]) -> tuple[int, ...]:
    return tuple(lease[0] for lease in leases)


class Learner:
    """One process of a learner."""

    def __init__(self, world: World, learner: int) -> None:
        self.world, self.learner = world, learner
        self.rng = world.rng
        self.nonces: list[int] = []
        self.client = world.kit.client(learner, "table", self._nonces())
        self.dead = self.cut = self.paused = self.waiting = False
        self.token = 0  # of the step that comes next
        self.heard_s = 0.0  # when something came that may be an answer
        self.called = False  # to a pause, since the last step
        self.mailbox: list[Message] = []
        self.epoch = 0
        self.batches: deque[Lease] = deque()
        self.stay = 0  # the nonce to which they belong
        self.version = 0  # of the weights that it has
        self.count = 0  # minibatches
        self.last: Key | None = None  # what it has pushed last
        self.life = self._live()

    def _nonces(self) -> Iterator[int]:
        while True:
            self.nonces.append(self.world.new_nonce())
            yield self.nonces[-1]

    # --- word -----------------------------------------------------------------------------------------------------

    def say(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, Push | Stop):
                self.world.oracle.pauses.ends((message.learner, message.incarnation, message.seq))
            self.world.to_coordinator(message, self)

    def hear(self, message: Message) -> None:
        if self.paused:
            self.mailbox.append(message)
        else:
            if isinstance(message, EnterPause):
                self.called = True
            else:
                self.heard_s = self.world.now
            self.say(self.client.receive(message))  # type: ignore[arg-type]  # the world sends what is to a learner
            self.world.wake(self)

    def look(self, *, fence: bool = True) -> None:
        """At the words in shared memory."""
        client, world = self.client, self.world
        incarnation, seq = world.cancel_words[self.learner]
        if client.incarnation and incarnation == client.incarnation:
            client.receive(CancelWord(self.learner, incarnation, seq))
        if fence and client.incarnation and world.fence_words[self.learner] >= client.incarnation:
            self.say(client.receive(Fenced(self.learner, client.incarnation)))

    # --- life -----------------------------------------------------------------------------------------------------

    def _live(self) -> Life:
        client, world = self.client, self.world
        self.say(client.join())
        while not self._is_done():
            if client.refused is not None:
                return
            if client.over:
                break
            self.look()
            if client.pause is not None and (client.go is None or self.rng.random() < 0.5):
                yield from self._pause()
            elif client.must_seed:
                yield from self._seed()
            elif not client.incarnation:
                yield None
            elif world.samples and not self._has_batch():
                yield from self._get_batch(wait=True)
            elif (
                self.rng.random() < world.looks
                and Weights not in client.answers
                and (client.seq or client.go is not None)
            ):
                yield from self._look_at_weights()
            elif client.go is None:
                yield from self._idle()
            else:
                yield from self._minibatch()
        world.places[self.learner].done = True
        self.say(client.bye())

    def _is_done(self) -> bool:
        world = self.world
        return self.epoch >= world.epochs if world.samples else world.places[self.learner].left <= 0

    def _pause(self) -> Life:
        """Where it waits. As `Connection` does, it stands still until the pause ends, it leads, or was given up."""
        client = self.client
        while (pause := client.take_pause()) is not None:
            stop = False
            if pause.lead:
                stop = yield from self._lead(pause)
            elif self.rng.random() < 0.3:
                yield self.rng.uniform(0, 1)
            self.say(client.paused(pause, stop=stop))
            while client.must_wait:
                yield None
                self.look()

    def _lead(self, pause: EnterPause) -> Generator[float | None, None, bool]:
        """Read all weights, slowly; whether the run is to end."""
        world, stay = self.world, (self.learner, pause.incarnation)
        facts = json.loads(pause.facts)
        world.oracle.leads(stay, pause.number, facts)
        copies = []
        for shard, buffers in enumerate(world.buffers):
            buffer = world.oracle.buffers[world.oracle.group_of(shard)]
            copy = []
            for at in range(WIDTH):
                copy.append(buffers[buffer][at])
                yield self.rng.uniform(0, 0.3)
            copies.append(tuple(copy))
        stop = self.rng.random() < world.stops
        world.oracle.has_led(stay, tuple(copies), stop=stop)
        return stop

    def _seed(self) -> Life:
        world, initial = self.world, self.world.initial_of(self.learner, self.client.incarnation)
        for shard, vector in enumerate(initial):
            for at, value in enumerate(vector):
                world.buffers[shard][0][at] = value
                if self.rng.random() < 0.3:
                    yield self.rng.uniform(0, 0.2)
        self.say(self.client.seeded())

    def _idle(self) -> Life:
        """While it waits: weights that have come are read at once, since nobody can write there before."""
        client = self.client
        if client.must_seed:
            yield from self._seed()
        elif Weights in client.answers:
            yield from self._take_weights((self.learner, client.incarnation, 0))
        else:
            yield None

    def _take_weights(self, key: Key) -> Life:
        weights = self.client.answers[Weights]
        assert isinstance(weights, Weights)
        if (yield from self._read(key, weights.pieces, weights.pin)):
            self.version = max(weights.version, self.version)
            self.client.answers.pop(Weights, None)

    def _look_at_weights(self) -> Life:
        """Not to work on them; but one that works by itself goes on with them."""
        client, nonce = self.client, self.client.nonce
        self.say(client.request_weights())
        while Weights not in client.answers and client.nonce == nonce and client.refused is None and not client.over:
            yield from self._idle()
            self.look()
        if Weights in client.answers and client.nonce == nonce and client.incarnation:
            yield from self._take_weights((self.learner, client.incarnation, 0))

    # --- data -----------------------------------------------------------------------------------------------------

    def _has_batch(self) -> bool:
        if self.stay != self.client.nonce:
            self.batches.clear()
        return bool(self.batches)

    def _get_batch(self, *, wait: bool) -> Life:
        client, world, nonce = self.client, self.world, self.client.nonce
        self.say(client.request_samples(epoch=self.epoch, count=world.batch, of=world.samples, wait=wait))
        while (
            Granted not in client.answers and client.nonce == nonce and client.refused is None and not client.cancelled
        ):
            if client.over:
                break
            self.look()
            yield from self._pause() if wait and client.pause is not None else self._idle()
        granted = client.answers.get(Granted)
        if not isinstance(granted, Granted) or client.nonce != nonce:
            return
        del client.answers[Granted]
        if granted.lease is not None:
            self.stay = nonce
            self.batches.append(granted.lease)
            if wait:
                while self.rng.random() < world.prefetch and client.nonce == nonce:
                    before = len(self.batches)
                    yield from self._get_batch(wait=False)
                    if len(self.batches) == before:
                        break
                if self.batches and client.nonce == nonce and self.rng.random() < world.give_back:
                    self.say(client.give_back((self.batches.pop()[0],), unused=self.rng.random() < 0.3))
        elif granted.answer == "ended" and wait:
            self.epoch += 1

    # --- a minibatch ------------------------------------------------------------------------------------------------

    def _minibatch(self) -> Life:
        client, world, rng = self.client, self.world, self.rng
        go = client.begin()
        key = (self.learner, client.incarnation, go.seq)
        world.oracle.pauses.begins(key)
        self._heard_of_the_last(key)
        if go.pieces:
            if not (yield from self._read(key, go.pieces, go.pin)):
                self.say(client.stop())
                return
            self.version = go.version
        rule = world.oracle.policy.rule
        version, leases = self.version if rule.fetch_every else go.version, list[Lease]()
        for done in range(rule.push_every):
            if world.samples:
                if done and not self._has_batch():
                    yield from self._get_batch(wait=False)
                if client.cancelled or not self._has_batch():
                    break
                leases.append(self.batches.popleft())
            for _ in range(rng.randint(1, 3)):
                yield rng.uniform(0.05, 0.5) * world.slowness[self.learner]
                self.look()
                if client.cancelled:
                    self.say(client.stop(numbers(leases)))
                    return
            self.count += 1
            if rule.fetch_every:
                yield from self._fetch(key, rule.fetch_every)
        if client.cancelled or (world.samples and not leases):
            self.say(client.stop(numbers(leases)))
            return
        yield from self._push(key, version, tuple(leases))

    def _heard_of_the_last(self, key: Key) -> None:
        """A Go says that the push before is in the books, unless that was cancelled."""
        last, (incarnation, seq) = self.last, self.world.cancel_words[self.learner]
        if last is not None and last[:2] == key[:2] and not (incarnation == last[1] and seq >= last[2]):
            self.world.oracle.acknowledged(last)

    def _read(self, key: Key, pieces: tuple[tuple[int, int], ...], pin: int) -> Generator[float | None, None, bool]:
        world, copies, nonce = self.world, dict[int, Vector](), self.client.nonce
        for group, (buffer, _) in enumerate(pieces):
            for shard in world.oracle.shards_of(group):
                copy = []
                for at in range(WIDTH):
                    copy.append(world.buffers[shard][buffer][at])
                    if self.rng.random() < 0.3:
                        yield self.rng.uniform(0, 0.3)
                copies[shard] = tuple(copy)
        self.look(fence=world.kit.looks_at_fence)
        if self.client.cancelled or self.client.nonce != nonce:
            return False
        world.oracle.fetched(key, copies, pieces)
        if not (world.setting.in_place and self.client.working):  # else its push says it
            self.say(self.client.fetched(pin))
        return True

    def _fetch(self, key: Key, every: int) -> Life:
        """Beside its work, as Downpour does."""
        client = self.client
        if self.count % every == 0 and Weights not in client.answers:
            self.say(client.request_weights())
            while self.world.patient and Weights not in client.answers and not client.cancelled and not client.over:
                yield None
                self.look()
        if Weights in client.answers and not client.cancelled:
            yield from self._take_weights(key)

    def _push(self, key: Key, version: int, leases: tuple[Lease, ...]) -> Life:
        client, world, rng = self.client, self.world, self.rng
        samples = sum(lease[3] for lease in leases) or rng.randint(1, 3)
        gradient = gradient_of(key, version, samples, world.setting.shards)
        finite = rng.random() >= world.non_finite[self.learner]
        lr = 1 / (8 + self.learner)
        absent = tuple(at for at in range(WIDTH) if rng.random() < 0.2)
        world.oracle.computed(key, Truth(gradient, version, samples, leases, lr, absent, finite))
        slot = client.slot
        for shard, vector in enumerate(gradient):
            for at, value in enumerate(vector):
                world.oracle.writes(slot, key)
                world.slots[slot][shard][at] = value if finite else float("inf")
                if rng.random() < 0.2:
                    yield rng.uniform(0, 0.3)
        if rng.random() < 0.5:
            self.look()
            if client.cancelled:
                self.say(client.stop(numbers(leases)))
                return
        world.places[self.learner].left -= 1
        hyper = ({**SGD, "lr": lr},)
        loss = float(rng.randint(1, 3))
        self.say(
            client.push(
                samples=samples,
                version=version,
                loss=loss,
                finite=finite,
                hyper=hyper,
                leases=numbers(leases),
                absent=absent,
            )
        )
        self.last = key if finite else None


class KilledError(Exception):
    """A server dies, in the middle of an update."""


class Memory:
    """What a shard works on; it outlives the server."""

    def __init__(self, world: World, shard: int) -> None:
        self.world, self.shard = world, shard
        self.finished = self.version = 0

    def apply(self, job: ShardJob) -> None:
        mean = self._mean(job)
        buffers = self.world.buffers[self.shard]
        target = stepped(tuple(buffers[job.source]), mean, job.clip, job.hyper[0]["lr"], job.skip)
        dies_at = self.world.dies_at()
        for at, value in enumerate(target):
            if at == dies_at:
                raise KilledError
            buffers[job.target][at] = value

    def finish(self, number: int, version: int) -> None:
        self.finished, self.version = number, version

    def norm(self, job: ShardJob) -> tuple[float, ...]:
        return squares(self._mean(job))

    def drift(self, job: ShardJob) -> tuple[float, ...]:
        world, buffers = self.world, self.world.buffers[self.shard]
        world.oracle.works(self.shard, job, buffers, world.slots)
        now, then = buffers[job.source], buffers[job.reads[0]]
        return tuple((a - b) ** 2 for a, b in zip(now, then, strict=True))

    def _mean(self, job: ShardJob) -> Vector:
        world, buffers = self.world, self.world.buffers[self.shard]
        world.oracle.works(self.shard, job, buffers, world.slots)
        gradients = [tuple(world.slots[slot][self.shard]) for slot in job.slots]
        reads = [tuple(buffers[read]) for read in job.reads]
        return mean_gradient(tuple(buffers[job.source]), gradients, job.scales, reads, job.compensation)


class Server:
    """One process of a server."""

    def __init__(self, world: World, memory: Memory, generation: int) -> None:
        self.world = world
        self.shard = world.kit.shard(memory.shard, generation, memory)
        self.dead = False
        self.paused_until = 0.0

    def hear(self, job: ShardJob) -> None:
        self.world.after(self.world.rng.uniform(0.01, 0.2), lambda: self._work(job))

    def beat(self) -> None:
        """Now and then it says that it is there."""
        if not self.dead:
            if self.world.now >= self.paused_until:
                self._say(self.shard.ready())
            self.world.after(4.0, self.beat)

    def _work(self, job: ShardJob) -> None:
        world = self.world
        if self.dead:
            return
        if world.now < self.paused_until:
            world.after(self.paused_until - world.now, lambda: self._work(job))
            return
        try:
            done = self.shard.handle(job)
        except KilledError:
            self._die()
            return
        if world.happens("server dies"):
            self._die()
            return
        if world.happens("server stops"):
            self.paused_until = world.now + world.rng.uniform(1, 15)
        self._say(done)

    def _die(self) -> None:
        self.dead = True
        self.world.after(self.world.rng.uniform(0.1, 5), lambda: self.world.new_server(self.shard))

    def _say(self, message: Done | Ready) -> None:
        self.world.to_coordinator(message, None)
