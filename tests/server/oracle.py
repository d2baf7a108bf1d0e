"""The outsider: it knows what learners truly computed and what the coordinator said, and recomputes everything.

`LawError` names the law. It never looks into the machines, but for their own `check` and for how long their tables
are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from offbeat.policies import Apply, Cancel, Drop, Policy, Pushed, Resume, Send, Wake, Woke
from offbeat.policies.events import from_text
from offbeat.policies.stale import StaleDrop
from offbeat.server.coordinator.coordinator import Coordinator
from offbeat.server.coordinator.invariants import check
from offbeat.server.run_setting import RunSetting
from offbeat.server.wire import CancelWord, Committed, Go, Lease, Message, ShardJob, Weights
from server.pause_oracle import Key, LawError, PauseOracle, Stay, Vector, demand

WIDTH = 3  # numbers in a shard
CLIP_EPSILON = 1e-6
MOST_LATE_S = 0.5  # of a wake that is due, while there is a coordinator


class Truth(NamedTuple):
    """What a learner truly computed and pushed."""

    gradient: tuple[Vector, ...]  # by shard
    version: int
    samples: int
    leases: tuple[Lease, ...]
    lr: float
    absent: tuple[int, ...]
    finite: bool


def gradient_of(key: Key, version: int, samples: int, shards: int) -> tuple[Vector, ...]:
    """Small whole numbers that tell who computed them, at which version, and from what."""
    seed = key[0] * 7919 + key[1] * 104729 + key[2] * 1299709 + version * 15485863 + samples * 32452843
    return tuple(
        tuple(float(((seed + at * 86028121 + shard * 49979687) * 2654435761 >> 9) % 9 - 4) for at in range(WIDTH))
        for shard in range(shards)
    )


def mean_gradient(
    now: Vector, gradients: Sequence[Vector], scales: Sequence[float], reads: Sequence[Vector], compensation: float
) -> Vector:
    """What a shard feeds to its optimizer."""
    total = []
    for at in range(len(now)):
        value = 0.0
        for index, gradient in enumerate(gradients):
            one = gradient[at]
            if compensation:
                one += compensation * one * one * (now[at] - reads[index][at])
            value += scales[index] * one
        total.append(value / len(gradients))
    return tuple(total)


def stepped(now: Vector, mean: Vector, clip: float, lr: float, skip: Sequence[int]) -> Vector:
    return tuple(w if at in skip else w - lr * clip * g for at, (w, g) in enumerate(zip(now, mean, strict=True)))


def squares(vector: Vector) -> tuple[float, ...]:
    return tuple(one * one for one in vector)


class Update(NamedTuple):
    keys: tuple[Key, ...]
    scales: tuple[float, ...]
    reads: tuple[tuple[int, ...], ...]  # per gradient, the version of each lane that it was computed on


class Oracle:
    """See the module's text."""

    def __init__(self, setting: RunSetting, initial: tuple[Vector, ...]) -> None:
        self.setting = setting
        self.policy: Policy = setting.policy()  # for what it is, not for what it says
        self.independent, self.keeps_reads = setting.independent, setting.keeps_reads
        self.slots_made = setting.slots
        self.commit_groups = setting.shards if self.independent else 1
        self.history: list[list[Vector]] = [[vector] for vector in initial]  # by shard, by version
        self.updates: list[Update] = []
        self.truth: dict[Key, Truth] = {}
        self.keys: dict[int, Key] = {}  # by ticket
        self.fate: dict[Key, str] = {}
        self.positions: Counter[tuple[int, int]] = Counter()  # (epoch, position): how often it was applied
        self.cancelled: dict[tuple[int, int], int] = {}
        self.given: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {}  # pieces that an incarnation was last given
        self.due: dict[int, int] = {}  # the version that a learner is to be sent
        self.read_at: dict[Key, tuple[tuple[int, int], ...]] = {}  # pieces when its push was handled
        self.gos: dict[Key, Go] = {}
        self.weights: dict[Key, Weights] = {}  # with the number of what was asked in place of seq
        self.slots: dict[int, Key] = {}  # who was told to write there last
        self.committed = [0] * self.commit_groups
        self.buffers = [0] * self.commit_groups
        self.seeded = self.policy_started = False
        self.wake_s: float | None = None  # that was asked for last, and has not come
        self.woke = 0
        self.pauses = PauseOracle(setting)

    def goes_on_from(self, before: Oracle) -> None:
        """Its run was saved in its last pause: what was in those weights is applied, and all else is not."""
        saved = before.pauses.saved
        assert saved is not None
        self.history = [[vector] for vector in saved.weights]
        for update in before.updates[: saved.facts["version"]]:
            for key in update.keys:
                for _, epoch, start, count in before.truth[key].leases:
                    self.positions.update((epoch, at) for at in range(start, start + count))

    def group_of(self, shard: int) -> int:
        return shard if self.independent else 0

    def shards_of(self, group: int) -> range:
        return range(group, group + 1) if self.independent else range(self.setting.shards)

    def seed(self, initial: tuple[Vector, ...]) -> None:
        self.history, self.seeded = [[vector] for vector in initial], True

    # --- what learners do ---------------------------------------------------------------------------------------------

    def computed(self, key: Key, truth: Truth) -> None:
        demand(key not in self.truth, "a minibatch is computed once", key)
        self.truth[key] = truth

    def writes(self, slot: int, key: Key) -> None:
        owner = self.slots.get(slot)
        demand(owner is not None and owner[:2] == key[:2], "a slot is written by one learner", slot, owner, key)

    def fetched(self, key: Key, copies: dict[int, Vector], pieces: tuple[tuple[int, int], ...]) -> None:
        """A learner uses what it has read."""
        for shard, copy in copies.items():
            version = pieces[self.group_of(shard)][1]
            demand(
                copy == self.history[shard][version],
                "a fetch that is used is exactly one version",
                *(key, shard, version, copy, self.history[shard][version]),
            )

    def leads(self, stay: Stay, number: int, facts: dict[str, Any]) -> None:
        self.pauses.leads(stay, number, facts, self.committed)

    def has_led(self, stay: Stay, weights: tuple[Vector, ...], *, stop: bool) -> None:
        expected = tuple(self.history[shard][self.committed[self.group_of(shard)]] for shard in range(len(weights)))
        self.pauses.has_led(stay, weights, expected if self.seeded else weights, stop=stop)

    def acknowledged(self, key: Key) -> None:
        """Its learner got a later Go, and was not cancelled."""
        demand(key in self.fate, "nothing acknowledged is lost", key)

    # --- what the coordinator says ------------------------------------------------------------------------------------

    def handling(self, learner: int, incarnation: int, seq: int) -> None:
        """A push is about to be handled."""
        self.read_at.setdefault((learner, incarnation, seq), self.given.get((learner, incarnation), ()))

    def said(self, message: Message) -> None:
        self.pauses.said(message)
        if isinstance(message, CancelWord):
            who = message.learner, message.incarnation
            self.cancelled[who] = max(self.cancelled.get(who, 0), message.seq)
        elif isinstance(message, Go):
            key = (message.learner, message.incarnation, message.seq)
            if key in self.gos:
                demand(self.gos[key] == message, "a Go that is said again is the same", message)
                return
            self.gos[key] = message
            self.slots[message.slot] = key
            if message.pieces:
                self.given[message.learner, message.incarnation] = message.pieces
                if not self.independent:
                    versions = {version for _, version in message.pieces}
                    demand(versions == {message.version}, "a Go is sent with the weights of its version", message)
                due = self.due.get(message.learner)
                asked_since = self.independent and due is not None and message.version < due
                law = "a fetch is no older than what was acknowledged"
                demand(message.version == due or asked_since, law, message, due)
        elif isinstance(message, Weights):
            demand(self.seeded, "nobody reads before there are weights", message)
            key = (message.learner, message.incarnation, message.number)
            if key in self.weights:  # a Go may have come since: then that is what it has
                demand(self.weights[key] == message, "weights that are sent again are the same", message)
                return
            self.weights[key] = message
            if self.independent:  # else it is only looked at
                self.given[message.learner, message.incarnation] = message.pieces
            else:
                demand(message.version == message.pieces[0][1], "weights are called what they are", message)
        elif isinstance(message, Committed):
            before = self.committed[message.commit_group]
            demand(message.version == before + 1, "versions rise by one", before, message)
            demand(message.version < len(self.history[0]), "what is committed was decided", message)
            self.committed[message.commit_group], self.buffers[message.commit_group] = message.version, message.buffer

    def decided(self, record: dict[str, Any]) -> None:
        """A line of the run log."""
        event = from_text(record["event"])
        if isinstance(event, Woke) and self.policy_started:
            demand(self.wake_s is not None, "a wake that was asked for comes once", record)
            demand(event.at_s >= (self.wake_s or 0.0), "a wake does not come before its time", record, self.wake_s)
            self.wake_s = None
            self.woke += 1
        if isinstance(event, Pushed):
            incarnation, seq = record["seq"]
            key = (event.learner, incarnation, seq)
            truth = self.truth.get(key)
            if truth is None:
                raise LawError(f"what is taken was pushed: {key}")
            demand(key not in self.fate, "a push is taken once", key)
            demand(truth.finite, "what is not finite is not taken", key)
            said = truth.version, truth.samples, self._batch(key)
            found = event.version, event.samples, [tuple(piece) for piece in record["batch"]]
            demand(said == found, "a push is taken as it was computed", key, said, found)
            self.keys[event.ticket] = key
            self.fate[key] = "held"
            if self.policy.needs_drift:
                self._check_drift(key, event)
        for text, why in zip(record["commands"], record["why"], strict=True):
            command = from_text(text)
            if isinstance(command, Apply):
                self._apply([self.keys[ticket] for ticket in command.tickets], command.scales)
            elif isinstance(command, Drop):
                demand(bool(why), "every drop has a reason", command)
                self.fate[self.keys[command.ticket]] = "dropped"
            elif isinstance(command, Send):
                self.policy_started = True
                self.due[command.learner] = len(self.updates)
            elif isinstance(command, Wake):
                self.wake_s = command.at_s
            else:
                demand(isinstance(command, Cancel | Resume), "a command is one of six", command)

    def check_wake(self, coordinator: Coordinator, now_s: float, up_since_s: float) -> None:
        """After each message: the wake that was asked for last is pending, and is not forgotten over a restart."""
        pending = coordinator.policy.wake_at_s
        demand(pending == self.wake_s or coordinator.finished, "the pending wake is the one asked for last", pending)
        if self.wake_s is not None and not coordinator.pauses.holds_back and not coordinator.finished:
            due_s = coordinator.next_wake_s
            demand(due_s is not None, "a pending wake is not forgotten", self.wake_s, now_s)
            demand(due_s is not None and due_s >= self.wake_s, "a wake is put off, never brought forward", due_s)
            in_time = due_s is not None and now_s <= max(due_s, up_since_s) + MOST_LATE_S
            demand(in_time, "a wake comes when it is due", due_s, now_s)

    def _check_drift(self, key: Key, event: Pushed) -> None:
        if self._is_late(key):
            return  # it is dropped, whatever its drift
        reads = self.read_at[key]
        total = 0.0
        for shard, versions in enumerate(self.history):
            now, then = versions[len(self.updates)], versions[reads[self.group_of(shard)][1]]
            total += math.fsum((a - b) ** 2 for a, b in zip(now, then, strict=True))
        demand(
            event.drift is not None and math.isclose(event.drift, total, rel_tol=1e-9, abs_tol=1e-12),
            "drift is how far the weights have moved since they were read",
            *(event, total),
        )

    def _is_late(self, key: Key) -> bool:
        return key[2] <= self.cancelled.get(key[:2], 0)

    def _apply(self, keys: list[Key], scales: tuple[float, ...]) -> None:
        version = len(self.updates)
        for key in keys:
            truth = self.truth[key]
            demand(self.fate[key] == "held", "each push is applied at most once", key, self.fate[key])
            demand(not self._is_late(key), "a cancelled gradient is never applied", key)
            self.fate[key] = "applied"
            if self.policy.cancels:
                demand(truth.version == version, "with a barrier gradients are of the current version", key, truth)
            if isinstance(self.policy, StaleDrop):
                demand(version - truth.version <= self.policy.limit, "staleness is bounded", key, truth)
            for _, epoch, start, count in truth.leases:
                for at in range(start, start + count):
                    self.positions[epoch, at] += 1
                    demand(self.positions[epoch, at] == 1, "a sample is applied at most once", epoch, at, key)
        k = getattr(self.policy, "k", None)
        if k is not None and type(self.policy).__name__ in ("KBatchSync", "KBatchAsync"):
            demand(len(keys) == k, "an update has K gradients", keys)
        lr = self.truth[keys[-1]].lr
        if self.policy.cancels and all(self.truth[key].leases for key in keys):
            by_samples = sorted(zip(keys, scales, strict=True), key=lambda pair: self._batch(pair[0]))
            keys, scales = [key for key, _ in by_samples], tuple(scale for _, scale in by_samples)
        reads = tuple(tuple(version for _, version in self.read_at[key]) for key in keys)
        update = Update(tuple(keys), scales, reads)
        self.updates.append(update)
        means = [self.mean_of(update, version, shard) for shard in range(self.setting.shards)]
        skip = set(self.truth[keys[0]].absent).intersection(*(self.truth[key].absent for key in keys))
        for shard, mean in enumerate(means):
            clip = 1.0
            if self.setting.clip_norm:
                together = [one for other in self.shards_of(self.group_of(shard)) for one in squares(means[other])]
                clip = min(1.0, self.setting.clip_norm / (math.sqrt(math.fsum(together)) + CLIP_EPSILON))
            now = self.history[shard][version]
            self.history[shard].append(stepped(now, mean, clip, lr, sorted(skip)))

    def _batch(self, key: Key) -> list[tuple[int, ...]]:
        return [lease[1:] for lease in self.truth[key].leases]

    def mean_of(self, update: Update, version: int, shard: int) -> Vector:
        group, versions = self.group_of(shard), self.history[shard]
        return mean_gradient(
            versions[version],
            [self.truth[key].gradient[shard] for key in update.keys],
            update.scales,
            [versions[reads[group]] if reads else () for reads in update.reads],
            self.policy.rate.compensation,
        )

    # --- what servers do ----------------------------------------------------------------------------------------------

    def works(self, shard: int, job: ShardJob, buffers: list[list[float]], slots: list[list[list[float]]]) -> None:
        """A shard is about to do this job."""
        self.pauses.works(job)
        demand(1 <= job.version <= len(self.history[0]), "a shard does what was decided", job)
        source = self.history[shard][job.version - 1]
        demand(tuple(buffers[job.source]) == source, "an update starts from the version before", shard, job)
        if job.kind == "drift":
            return
        update = self.updates[job.version - 1]
        demand(len(job.slots) == len(update.keys), "an update has the gradients that were decided", job, update)
        demand(job.scales == update.scales, "gradients count as was decided", job, update)
        for index, (slot, key) in enumerate(zip(job.slots, update.keys, strict=True)):
            law = "what is applied is what its learner computed"
            demand(tuple(slots[slot][shard]) == self.truth[key].gradient[shard], law, shard, job, key)
            if self.keeps_reads:
                read = tuple(buffers[job.reads[index]])
                version = update.reads[index][self.group_of(shard)]
                demand(read == self.history[shard][version], "what a gradient was computed on is kept", shard, job, key)

    # --- after each event ---------------------------------------------------------------------------------------------

    def check(self, coordinator: Coordinator, memory: list[list[list[float]]]) -> None:
        """`memory`: by shard, by buffer."""
        check(coordinator)
        self.pauses.check(
            coordinator.pauses.number, 0 if coordinator.leases.book is None else coordinator.leases.book.epoch
        )
        for shard, buffers in enumerate(memory):
            group = self.group_of(shard)
            buffer, version = self.buffers[group], self.committed[group]
            if self.seeded:
                demand(
                    tuple(buffers[buffer]) == self.history[shard][version],
                    "parameters = initial - sum of applied updates",
                    *(shard, version, buffers[buffer], self.history[shard][version]),
                )
        learners, most = self.setting.learners, self.slots_made
        demand(len(coordinator.gradients) + len(coordinator.unmeasured_pushes) <= most + learners, "few gradients wait")
        for group_ in coordinator.grants.commit_groups:
            demand(len(group_.queue) <= most + 1, "few updates wait", len(group_.queue))
            demand(len(group_.pins) <= 3 * learners + most, "few buffers are pinned", group_.pins)
        for session in coordinator.sessions.values():
            demand(
                len(session.versions) <= 64 and len(session.nonces) <= 64, "few minibatches are open", session.versions
            )
            demand(len(session.kept_slots) <= most, "few slots are kept back", session.kept_slots)

    def finished(self, coordinator: Coordinator) -> None:
        """When all is over."""
        counts, fates = coordinator.counts, Counter(self.fate.values())
        bad = counts["dropped: not finite"]
        demand(
            self.committed == [len(self.updates)] * self.commit_groups, "all that was decided is done", self.committed
        )
        demand(counts["applied"] == fates["applied"], "applied is what was applied", counts, fates)
        demand(counts["received"] - bad == len(self.fate) + self.unmeasured(coordinator), "received is what came")
        demand(counts["received"] == counts["applied"] + counts["dropped"], "nothing waits at the end", counts)
        book = coordinator.leases.book
        if book is None:
            return
        ended = "dropped: the run ended before its update was full"
        first = 0 if self.setting.book is None else self.setting.book["epoch"]
        for epoch, buckets in book.counts.items():
            applied = sum(self.positions[epoch, at] for at in range(book.samples))
            demand(buckets["applied"] == applied, "samples are applied as they are counted", epoch, buckets, applied)
            if epoch < book.epoch:
                demand(buckets.total() == book.samples, "every sample is counted once", epoch, buckets)
                named = {"applied", "dropped: not finite", "not used", ended}
                if self.pauses.over:
                    named.add("dropped: its learner left before it was measured")
                if epoch < first:  # what waited for an update when that epoch was over, and the run was saved
                    named.add("held")
                demand(not self.setting.again or buckets.keys() <= named, "what was dropped is computed again", buckets)

    def unmeasured(self, coordinator: Coordinator) -> int:
        return coordinator.counts["dropped: its learner left before it was measured"]
