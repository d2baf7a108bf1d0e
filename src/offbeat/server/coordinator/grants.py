"""Where slots and weights are handed out: which learner may write where, read what, and when.

A Go needs two things: the weights of its version, pinned from the moment they are there, and a slot for the gradient.
Pins of a learner end when it has read, or when other weights are pinned for it: then what it may still be reading is
for a minibatch that was cancelled before, which a word in shared memory tells it when it has read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from offbeat.server.coordinator.session import LearnerSession, Setting
from offbeat.server.coordinator.update_queue import CommitGroup, PendingUpdate, Pin
from offbeat.server.wire import Committed, Done, Go, Job, Ready, Weights

MOST_OPEN = 64  # minibatches of a learner that may still be answered; older ones were all cancelled


class Grants:
    """See the module's text."""

    def __init__(self, setting: Setting) -> None:
        groups = [[shard] for shard in range(setting.shards)] if setting.independent else [range(setting.shards)]
        self.lanes = [
            CommitGroup(index, shards, buffers=setting.buffers, clip_norm=setting.clip_norm)
            for index, shards in enumerate(groups)
        ]
        self.independent = setting.independent
        self.keeps_reads = setting.keeps_reads
        self.in_place = setting.in_place
        self.slots = setting.slots
        self.free_slots = list(range(setting.slots))
        self.generations: dict[int, int] = {}
        self.skew: Counter[int] = Counter()  # at each fetch: newest less oldest version of the shards

    # --- to learners ------------------------------------------------------------------------------------------------

    def grant(self, row: LearnerSession, version: int, *, weights: bool) -> None:
        """The learner is to compute its next minibatch, when all that it needs is there."""
        row.seq += 1
        row.versions[row.seq] = version
        if len(row.versions) > MOST_OPEN:
            del row.versions[min(row.versions)]
        row.grant, row.ready = (version, weights), None

    def give_out(self, rows: Iterable[LearnerSession]) -> list[Go]:
        """All that can go now."""
        return [go for row in rows if self._pin(row) and (go := self._go(row)) is not None]

    def _pin(self, row: LearnerSession) -> bool:
        """Whether the weights for the learner's grant are there, and pinned."""
        if row.grant is None:
            return False
        if row.ready is None:
            version, weights = row.grant
            if not weights:
                row.ready = ()
            elif self.independent or self.lanes[0].version >= version:
                row.ready = self._pieces(row, "go")
                self.unpin(row, "go", row.pin - 1)
        return row.ready is not None

    def _go(self, row: LearnerSession) -> Go | None:
        assert row.grant is not None and row.ready is not None
        if row.slot is None:
            if not self.free_slots:
                return None
            row.slot = self.free_slots.pop(0)
        version, weights = row.grant
        if weights:
            row.pieces = row.ready
        row.go = Go(row.learner, row.incarnation, row.seq, version, row.slot, row.pin, row.ready)
        row.grant = row.ready = None
        return row.go

    def send_weights(self, row: LearnerSession, version: int) -> Weights:
        """The answer to a learner that fetches beside its work; those that it asked for before it has read."""
        pieces = self._pieces(row, "ask")
        self.unpin(row, "ask", row.pin - 1)
        if self.independent:  # it goes on with these
            row.pieces = pieces
            if self.keeps_reads:
                self.unpin(row, "go", row.read)
        else:
            version = pieces[0][1]  # what was decided may not be there yet
        row.weights = Weights(row.learner, row.incarnation, row.asked, version, row.pin, pieces)
        return row.weights

    def _pieces(self, row: LearnerSession, kind: str) -> tuple[tuple[int, int], ...]:
        row.pin += 1
        pieces = tuple(lane.pin((kind, row.learner, row.pin)) for lane in self.lanes)
        versions = [version for _, version in pieces]
        self.skew[max(versions) - min(versions)] += 1
        return pieces

    def fetched(self, row: LearnerSession, pin: int) -> None:
        """It has read. Where a rate needs what it works on, or it works in place, the pin stays until it has others."""
        for kind in ("go", "ask"):
            if any((kind, row.learner, pin) in lane.pins for lane in self.lanes):
                row.read = pin if kind == "go" else row.read
                newer = self.independent and row.weights is not None and row.weights.pin > pin
                stays = self.keeps_reads or self.in_place
                if newer or not stays or (kind == "ask" and not self.independent):
                    self.unpin(row, kind, pin)

    def unpin(self, row: LearnerSession, kind: str, up_to: int) -> None:
        for lane in self.lanes:
            for pin in [pin for pin in lane.pins if pin[:2] == (kind, row.learner) and pin[2] <= up_to]:
                del lane.pins[pin]

    def keep_reads(self, pin: Pin, pieces: tuple[tuple[int, int], ...]) -> None:
        """Where a rate needs the weights that a gradient was computed on, they stay."""
        if self.keeps_reads:
            for lane, (buffer, _) in zip(self.lanes, pieces, strict=True):
                lane.pins[pin] = buffer

    def forget(self, pin: Pin) -> None:
        for lane in self.lanes:
            lane.pins.pop(pin, None)

    def clear(self, row: LearnerSession, *, may_wake: bool) -> None:
        """The learner is given up: its slot is free, unless it may still write there."""
        if row.slot is not None:
            if may_wake:
                row.limbo.append((row.incarnation, row.slot))
            else:
                self.free_slots.append(row.slot)
            row.slot = None
        self.unpin(row, "go", row.pin)
        self.unpin(row, "ask", row.pin)

    def clear_limbo(self, row: LearnerSession, incarnations: range) -> None:
        """These will not write any more."""
        self.free_slots += [slot for incarnation, slot in row.limbo if incarnation in incarnations]
        row.limbo = [one for one in row.limbo if one[0] not in incarnations]

    # --- to servers -------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return all(lane.idle for lane in self.lanes)

    @property
    def still(self) -> bool:
        """Whether nobody changes the weights, and all lanes have the same version. What waits may wait."""
        return not any(lane.job or self._is_behind(lane) for lane in self.lanes)

    def _is_behind(self, lane: CommitGroup) -> bool:
        """Whether others have done what this lane has to do next."""
        return bool(lane.queue) and lane.queue[0].lanes_left < len(self.lanes)

    def add(self, work: PendingUpdate) -> None:
        work.lanes_left = len(self.lanes)
        for lane in self.lanes:
            lane.queue.append(work)

    def start(self, *, only_behind: bool) -> list[Job]:
        """What can be done next; or only what brings all lanes to the same version."""
        return [job for lane in self.lanes if not only_behind or self._is_behind(lane) for job in lane.start()]

    def repeat(self) -> list[Job]:
        """What has not been answered yet."""
        return [job for lane in self.lanes for job in lane.job.values()]

    def ready(self, message: Ready) -> list[Job]:
        """A server is there: what it has to do."""
        if message.generation < self.generations.get(message.shard, 0):
            return []  # one that was replaced
        self.generations[message.shard] = message.generation
        return [job for job in self.repeat() if job.shard == message.shard]

    def done(self, message: Done) -> tuple[PendingUpdate | None, Committed | None]:
        """A server has answered: what is finished by that in its lane, and the version that is there now."""
        if message.generation != self.generations.get(message.shard):
            return None, None
        lane = next((lane for lane in self.lanes if message.shard in lane.shards), None)
        work = lane.done(message.shard, message.number, message.sums) if lane is not None else None
        if lane is None or work is None or work.drift:
            return work, None
        return work, Committed(lane.index, lane.version, lane.buffer)

    def release(self, ticket: int, slot: int) -> None:
        """A gradient is not needed any more."""
        if slot >= 0:
            self.free_slots.append(slot)
        self.forget(("ticket", ticket, 0))
