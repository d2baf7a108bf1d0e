"""Slots, weights and updates: which learner may write where and read what, and which update the servers make next.

A Go needs two things: the weights of its version, pinned from the moment they are there, and a slot for the gradient.
Pins of a learner end when it has read, or when other weights are pinned for it: then what it may still be reading is
for a minibatch that was cancelled before, which a word in shared memory tells it when it has read.

A commit group is a set of shards that commit together. Policies with a common version have one, with all shards: an
update is there on all or on none. Downpour has one for each shard, and nothing keeps them together.

The weights lie in several buffers. An update is computed out of place, from the current buffer into one that nobody
reads, and then that one is current. Whoever is to read pins first: a pinned buffer is never written. Without a free
buffer the next update waits for a reader to finish.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import structs

from offbeat.server.coordinator.session import LearnerSession
from offbeat.server.run_setting import RunSetting
from offbeat.server.wire import Committed, Done, Go, Ready, ShardJob, Weights

MOST_OPEN = 64  # minibatches of a learner that may still be answered; older ones were all cancelled
Pin = tuple[str, int, int]  # ("go" or "ask", learner, number), ("unmeasured", learner, seq) or ("ticket", ticket, 0)
ANY_JOB = ShardJob(shard=0, number=0, kind="", version=0, source=0, target=0)


@dataclass(slots=True, kw_only=True)
class PendingUpdate:
    """An update, or with `drift` the question how far the weights have moved since a gradient was computed."""

    tickets: tuple[int, ...]
    job: ShardJob = ANY_JOB  # what all shards do alike
    reads: tuple[tuple[int, ...], ...] = ()  # per gradient: the buffer of each commit group
    drift: bool = False
    groups_left: int = 0
    sums: list[float] = field(default_factory=list)


def clip_of(sums: Iterable[float], most: float) -> float:
    """By what a gradient is to be multiplied so that its norm is at most this; as torch's clip_grad_norm_ does."""
    try:
        norm = math.sqrt(math.fsum(sums))
    except (OverflowError, ValueError):  # infinite, or what is no sum of squares
        norm = math.inf
    return min(1.0, most / (norm + 1e-6))


class CommitGroup:
    """One set of shards and what it does now; see the module's text."""

    def __init__(self, index: int, shards: Iterable[int], *, buffers: int, clip_norm: float) -> None:
        self.index = index
        self.shards = tuple(shards)
        self.buffers = buffers
        self.clip_norm = clip_norm
        self.version = 0
        self.buffer = 0  # that holds it
        self.pins: dict[Pin, int] = {}
        self.queue: deque[PendingUpdate] = deque()
        self.number = 0  # of the latest job
        self.job: dict[int, ShardJob] = {}  # what each shard that has not answered yet is to do
        self.sums: dict[int, tuple[float, ...]] = {}  # what the others have answered
        self.clip: float | None = None  # of the update at the head of the queue, once it is known

    def pin(self, pin: Pin) -> tuple[int, int]:
        """Keep the current buffer from being written; its number and its version."""
        self.pins[pin] = self.buffer
        return self.buffer, self.version

    def start(self) -> list[ShardJob]:
        """The jobs of the update at the head of the queue, if none of it is under way and a buffer is free."""
        if self.job or not self.queue:
            return []
        update = self.queue[0]
        kind = "drift" if update.drift else "norm" if self.clip_norm and self.clip is None else "apply"
        target = self._free_buffer() if kind == "apply" else self.buffer
        if target is None:
            return []
        self.number += 1
        self.sums = {}
        self.job = {
            shard: structs.replace(
                update.job,
                shard=shard,
                number=self.number,
                kind=kind,
                version=self.version + 1,
                source=self.buffer,
                target=target,
                reads=tuple([buffers[self.index] for buffers in update.reads]),
                clip=1.0 if self.clip is None else self.clip,
            )
            for shard in self.shards
        }
        return list(self.job.values())

    def done(self, shard: int, number: int, sums: tuple[float, ...]) -> PendingUpdate | None:
        """A shard has answered; the update, or question, if this was the last answer that it needed."""
        job = self.job.get(shard)
        if job is None or job.number != number:
            return None  # said before
        del self.job[shard]
        self.sums[shard] = sums
        if self.job:
            return None
        in_order = [one for shard in self.shards for one in self.sums[shard]]  # by shard, so by place in the vector
        if job.kind == "norm":
            self.clip = clip_of(in_order, self.clip_norm)
            return None
        update = self.queue.popleft()
        update.groups_left -= 1
        if job.kind == "drift":
            update.sums += in_order
        else:
            self.version += 1
            self.buffer = job.target
            self.clip = None
        return update

    def _free_buffer(self) -> int | None:
        taken = {self.buffer, *self.pins.values()}
        return next((buffer for buffer in range(self.buffers) if buffer not in taken), None)


class Grants:
    """See the module's text."""

    def __init__(self, setting: RunSetting) -> None:
        shards = range(setting.shards)
        self.independent = setting.independent
        self.commit_groups = [
            CommitGroup(index, members, buffers=setting.buffers, clip_norm=setting.clip_norm)
            for index, members in enumerate([[shard] for shard in shards] if self.independent else [shards])
        ]
        self._group_of = {shard: group for group in self.commit_groups for shard in group.shards}
        self.keeps_reads = setting.keeps_reads
        self.in_place = setting.in_place
        self.spread = setting.spread
        self.granted = 0  # Gos, where shards are spread
        self.slots = setting.slots
        self.free_slots = list(range(setting.slots))
        self.generations: dict[int, int] = {}
        self.skew: Counter[int] = Counter()  # at each fetch: newest less oldest version of the shards

    # --- to learners ------------------------------------------------------------------------------------------------

    def grant(self, session: LearnerSession, version: int, *, weights: bool) -> None:
        """The learner is to compute its next minibatch, when all that it needs is there."""
        session.seq += 1
        session.versions[session.seq] = version
        if len(session.versions) > MOST_OPEN:
            del session.versions[min(session.versions)]
        session.grant, session.ready = (version, weights), None

    def give_out(self, sessions: Iterable[LearnerSession]) -> list[Go]:
        """All that can go now."""
        granted = [session for session in sessions if session.grant is not None]
        if not granted:
            return []
        return [go for session in granted if self._pin(session) and (go := self._go(session)) is not None]

    def _pin(self, session: LearnerSession) -> bool:
        """Whether the weights for the learner's grant are there, and pinned."""
        if session.grant is None:
            return False
        if session.ready is None:
            version, weights = session.grant
            if not weights:
                session.ready = ()
            elif self.independent or self.commit_groups[0].version >= version:
                session.ready = self._pieces(session, "go")
                self.unpin(session, "go", session.pin - 1)
        return session.ready is not None

    def _go(self, session: LearnerSession) -> Go | None:
        assert session.grant is not None and session.ready is not None
        if session.slot is None:
            if not self.free_slots:
                return None
            session.slot = self.free_slots.pop(0)
        version, weights = session.grant
        if weights:
            session.pieces = session.ready
        self.granted += self.spread
        session.go = Go(
            *session.name, session.seq, version, session.slot, session.pin, session.ready, session.unused, self.granted
        )
        session.grant = session.ready = None
        return session.go

    def send_weights(self, session: LearnerSession, version: int) -> Weights:
        """The answer to a learner that fetches beside its work; those that it asked for before it has read."""
        pieces = self._pieces(session, "ask")
        self.unpin(session, "ask", session.pin - 1)
        if self.independent:  # it goes on with these
            session.pieces = pieces
            if self.keeps_reads:
                self.unpin(session, "go", session.read)
        else:
            version = pieces[0][1]  # what was decided may not be there yet
        session.weights = Weights(*session.name, session.asked, version, session.pin, pieces)
        return session.weights

    def _pieces(self, session: LearnerSession, kind: str) -> tuple[tuple[int, int], ...]:
        session.pin += 1
        pin = kind, session.learner, session.pin
        pieces = tuple([group.pin(pin) for group in self.commit_groups])
        versions = [version for _, version in pieces]
        self.skew[max(versions) - min(versions)] += 1
        return pieces

    def fetched(self, session: LearnerSession, pin: int) -> None:
        """It has read. Where a rate needs what it works on, or it works in place, the pin stays until it has others."""
        for kind in ("go", "ask"):
            if any((kind, session.learner, pin) in group.pins for group in self.commit_groups):
                session.read = pin if kind == "go" else session.read
                newer = self.independent and session.weights is not None and session.weights.pin > pin
                stays = self.keeps_reads or self.in_place
                if newer or not stays or (kind == "ask" and not self.independent):
                    self.unpin(session, kind, pin)

    def unpin(self, session: LearnerSession, kind: str, up_to: int) -> None:
        for group in self.commit_groups:
            learner, pins = session.learner, group.pins
            for pin in [pin for pin in pins if pin[1] == learner and pin[0] == kind and pin[2] <= up_to]:
                del pins[pin]

    def keep_reads(self, pin: Pin, pieces: tuple[tuple[int, int], ...]) -> None:
        """Where a rate needs the weights that a gradient was computed on, they stay."""
        if self.keeps_reads:
            for group, (buffer, _) in zip(self.commit_groups, pieces, strict=True):
                group.pins[pin] = buffer

    def forget(self, pin: Pin) -> None:
        for group in self.commit_groups:
            group.pins.pop(pin, None)

    def clear(self, session: LearnerSession, *, may_wake: bool) -> None:
        """The learner is given up: its slot is free, unless it may still write there."""
        if session.slot is not None:
            if may_wake:
                session.kept_slots.append((session.incarnation, session.slot))
            else:
                self.free_slots.append(session.slot)
            session.slot = None
        self.unpin(session, "go", session.pin)
        self.unpin(session, "ask", session.pin)

    def free_kept_slots(self, session: LearnerSession, incarnations: range) -> None:
        """These will not write any more."""
        self.free_slots += [slot for incarnation, slot in session.kept_slots if incarnation in incarnations]
        session.kept_slots = [one for one in session.kept_slots if one[0] not in incarnations]

    # --- to servers -------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not any(group.queue for group in self.commit_groups)

    @property
    def still(self) -> bool:
        """Whether nobody changes the weights, and all commit groups have the same version. What waits may wait."""
        return not any(group.job or self._is_behind(group) for group in self.commit_groups)

    def _is_behind(self, group: CommitGroup) -> bool:
        """Whether others have done what this commit group has to do next."""
        return bool(group.queue) and group.queue[0].groups_left < len(self.commit_groups)

    def add(self, update: PendingUpdate) -> None:
        update.groups_left = len(self.commit_groups)
        for group in self.commit_groups:
            group.queue.append(update)

    def start(self, *, only_behind: bool) -> list[ShardJob]:
        """What can be done next; or only what brings all commit groups to the same version."""
        groups = [group for group in self.commit_groups if group.queue and not group.job]
        if only_behind:
            groups = [group for group in groups if self._is_behind(group)]
        return [job for group in groups for job in group.start()]

    def repeat(self) -> list[ShardJob]:
        """What has not been answered yet."""
        return [job for group in self.commit_groups for job in group.job.values()]

    def ready(self, message: Ready) -> list[ShardJob]:
        """A server is there: what it has to do."""
        if message.generation < self.generations.get(message.shard, 0):
            return []  # one that was replaced
        self.generations[message.shard] = message.generation
        return [job for job in self.repeat() if job.shard == message.shard]

    def done(self, message: Done) -> tuple[PendingUpdate | None, Committed | None]:
        """A server has answered: what is finished by that in its commit group, and the version that is there now."""
        if message.generation != self.generations.get(message.shard):
            return None, None
        group = self._group_of.get(message.shard)
        update = group.done(message.shard, message.number, message.sums) if group is not None else None
        if group is None or update is None or update.drift:
            return update, None
        return update, Committed(group.index, group.version, group.buffer)

    def release(self, ticket: int, slot: int) -> None:
        """A gradient is not needed any more."""
        if slot >= 0:
            self.free_slots.append(slot)
        self.forget(("ticket", ticket, 0))
