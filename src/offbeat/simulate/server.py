"""A parameter server in simulated time: the real policy objects, simulated learners and links.

A learner computes, sends its gradient to the server (whose link all share), and waits for what the policy says. A
learner that is cancelled stops where it is; one that had already begun to send goes on, and its gradient comes late.
With no size and no latency the communication takes no time and costs no events.
"""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import insort
from collections.abc import Callable
from typing import Any

from offbeat.errors import RequestError
from offbeat.policies import (
    Apply,
    Asked,
    Cancel,
    Command,
    Drop,
    Event,
    Joined,
    Left,
    Pushed,
    Resume,
    Send,
    Stopped,
    create,
    recorded,
)
from offbeat.simulate.calendar import Calendar
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.compute import failure_times
from offbeat.simulate.engine import ARRIVE, ASK, CANCEL, END, FAIL, FINISH, LINK, REJOIN, RESUME, STOPPED, WEIGHTS
from offbeat.simulate.links import FairLink
from offbeat.simulate.result import Result, Tally
from offbeat.trace import Span

Entry = tuple[float, int, int, int]
PATIENCE = 200_000  # entries of the heap without an update, beside those that learners may need


def run(
    strategy: str,
    cluster: Cluster,
    *,
    updates: int,
    until_s: float = math.inf,
    keep_spans: int = 0,
    write: Callable[[dict[str, Any]], object] | None = None,
) -> Result:
    """Simulate until so many updates were made, or so many seconds have passed.

    The spans of work at the first `keep_spans` versions are kept; every decision of the policy goes to `write`.
    """
    if updates < 1:
        raise RequestError(f"simulate 1 update or more; got {updates}")
    simulation = Simulation(strategy, cluster, updates, keep_spans, write)
    if simulation.policy.needs_drift:
        raise RequestError(
            f"'{strategy}': a rate by drift needs weights, and a simulation has none; leave the rate out"
        )
    if until_s < math.inf:
        heapq.heappush(simulation.heap, (until_s, END, 0, 0))
    simulation.go()
    return simulation.result(strategy)


class Simulation:
    """One run; `training` has learners that really train in it, and overrides what is said to be theirs."""

    def __init__(
        self,
        strategy: str,
        cluster: Cluster,
        updates: int,
        keep_spans: int,
        write: Callable[[dict[str, Any]], object] | None,
    ) -> None:
        count = cluster.learners
        self.cluster, self.updates, self.keep_spans = cluster, updates, keep_spans
        self.policy = create(strategy, expect=count)
        self.handle: Callable[[Event], tuple[Command, ...]] = (
            self.policy.handle if write is None else recorded(self.policy, write)
        )
        self.rule = self.policy.rule
        self.draws = cluster.draws()
        self.samples = [1] * count
        self.samples[: len(cluster.samples)] = cluster.samples
        self.now = 0.0
        self.heap: list[Entry] = []
        # Per learner; what every event touches is in arrays, which stay in the cache where lists of objects do not.
        # A planned finish holds the turn in which it was made; cancelling and failing begin a new turn, and void it.
        # A letter (what is on its way to or from a learner) holds its life; failing begins a new one.
        self.turn = [0] * count
        self.life = [0] * count
        self.doing = ["away"] * count  # or compute, send, wait
        self.since = array("d", [0.0]) * count  # when it began that
        self.version = array("q", [0]) * count  # of the weights it works on
        self.next_version: list[int | None] = [None] * count  # weights that are there for its next minibatch
        self.void_below = [0] * count  # work at older versions than this was cancelled
        self.oldest = [0] * count  # version of the oldest work that it has not pushed yet
        self.unpushed_s = [0.0] * count  # and its seconds
        self.done = [0] * count  # minibatches, for pushing and fetching every so many
        # Gradients: (learner, version, seconds of compute, minibatches). On their way under a number of the learner's,
        # at the server under a ticket, given as they arrive.
        self.flying: dict[int, tuple[int, int, float, int]] = {}
        self.gradients: dict[int, tuple[int, int, float, int]] = {}
        self.sent = 0
        self.ticket = 0
        self.letters: dict[int, tuple[int, int, int]] = {}  # number -> (learner, its life, a version)
        self.letter = 0
        self.weights_for = [-1] * count  # the latest letter with weights
        self.pushing = [-1] * count  # the number of its gradient that is on its way
        self.queued = [-1] * count  # and that of the one that waits for it
        self.fetching = [False] * count
        wires = cluster.wires
        self.latency_s = 0.0 if wires is None else wires.latency_s
        self.size_bytes = 0 if wires is None else wires.size_bytes
        self.instant = not self.size_bytes and not self.latency_s
        self.free = self.rule.fetch_every > 0  # learners push and fetch beside computing, and never wait
        shared = math.inf if wires is None else wires.server_bytes_per_s * wires.shards
        self.links = (FairLink(shared), FairLink(shared))  # to the server, from the server
        self.link_turn = [0, 0]
        self.tally = Tally()
        self.spans: list[Span] = []
        self.events = 0
        # So many entries of the heap without an update mean that there will be none.
        self.patience = PATIENCE + 1_000 * count * self.rule.push_every + 20 * (getattr(self.policy, "k", None) or 0)
        self.handlers: dict[int, Callable[[int, int], int]] = {
            FAIL: self._fail,
            STOPPED: self._stopped,
            ARRIVE: self._arrive,
            FINISH: self._finish,
            WEIGHTS: self._weights_arrive,
            ASK: self._asked,
            REJOIN: self._rejoin,
            CANCEL: self._cancel_arrives,
            LINK: self._link,
            END: self._end,
            RESUME: self._resumed,
        }

    # --- the loop ------------------------------------------------------------------------------------------------

    def go(self) -> None:
        for learner in range(self.cluster.learners):
            self._rejoin(learner, 0)
        plain = self.rule.push_every == 1 and not self.free and self.cluster.failures is None
        if plain and self.instant and not self.keep_spans:
            self._go_quickly()
        taken, version = 0, 0
        while self.policy.version < self.updates:
            if not self.heap:
                raise self._stands_still()
            self.now, kind, learner, number = heapq.heappop(self.heap)
            self.events += self.handlers[kind](learner, number)
            taken = 0 if self.policy.version > version else taken + 1
            version = self.policy.version
            if taken > self.patience:
                raise self._stands_still()

    def _go_quickly(self) -> None:
        """The loop of `go` with all that can happen written out, for large simulations; a test compares the two.

        Good where communication takes no time, nobody fails, every minibatch is pushed and no spans are kept. Nearly
        all entries are then minibatches that finish and are answered by one `Send` to their learner: the inner loop.
        There an entry itself holds when and at which version its minibatch began, since arrays of 10,000 learners would
        cost more, and entries lie in a calendar, which is quicker than a heap of that size and has the same order. The
        arrays are right for whoever was sent weights outside the inner loop, which is whoever can be cancelled, and for
        all when the loop ends.
        """
        policy, handle, turn, doing = self.policy, self.handle, self.turn, self.doing
        version, since, samples = self.version, self.since, self.samples
        blocks, refill, updates = self.draws.blocks, self.draws.refill, self.updates
        new = tuple.__new__
        entries = [(at, kind, one, number, since[one], version[one]) for at, kind, one, number in self.heap]
        calendar = Calendar(entries, slots_per_s=self.cluster.learners / 64 / self._typical_wait())
        slots, today, begin_slot, begin_day = calendar.slots, calendar.today, calendar.begin_slot, calendar.begin_day
        ticket = at_entry = day = 0
        per_s = calendar.slots_per_s
        # Where nobody cancels, no entry is void; where nobody waits, a single command is a `Send` to who has pushed.
        cancels, waits = policy.cancels, policy.waits
        computed = waited = wasted = 0.0
        stopped: list[tuple[int, int]] = []
        while policy.version < updates:
            while True:
                while at_entry == len(today):
                    at_entry = 0
                    day = begin_day()
                    if day < 0:
                        raise self._stands_still()
                now, kind, learner, number, began, at_version = today[at_entry]
                at_entry += 1
                if kind != FINISH or (cancels and number != turn[learner]):
                    commands: tuple[Command, ...] = ()
                    break
                ticket += 1
                computed += now - began
                commands = handle(new(Pushed, (learner, ticket, at_version, samples[learner], None, None, now)))
                if waits or len(commands) != 1:
                    doing[learner] = "wait"
                    since[learner] = now
                    break
                at = now + (blocks[learner] or refill(learner)).pop()
                slot = int(at * per_s)
                if slot > day:
                    (slots.get(slot) or begin_slot(slot)).append((at, FINISH, learner, number, now, policy.version))
                else:
                    if at_entry > 4096:  # a long day: forget what is over
                        del today[:at_entry]
                        at_entry = 0
                    insort(today, (at, FINISH, learner, number, now, policy.version), at_entry)
            if kind == END:
                break
            for command in commands:
                if isinstance(command, Apply):
                    self._count_update()
                elif isinstance(command, Drop):  # what was pushed just now
                    self.tally.dropped += 1
                    wasted += now - began
                elif isinstance(command, Cancel):
                    other = command.learner
                    cut_short = now - since[other]
                    computed += cut_short
                    wasted += cut_short
                    doing[other] = "wait"
                    since[other] = now
                    turn[other] += 1
                    stopped.append((other, version[other]))
                else:
                    other = command.learner
                    waited += now - since[other]
                    doing[other] = "compute"
                    since[other] = now
                    if type(command) is Send:
                        version[other] = policy.version
                    at = now + (blocks[other] or refill(other)).pop()
                    slot = int(at * per_s)
                    entry = (at, FINISH, other, turn[other], now, version[other])
                    if slot > day:
                        (slots.get(slot) or begin_slot(slot)).append(entry)
                    else:
                        if at_entry > 4096:
                            del today[:at_entry]
                            at_entry = 0
                        insort(today, entry, at_entry)
            if stopped:
                self.tally.cancelled += len(stopped)
                for other, old in sorted(stopped) if policy.version < updates else ():
                    handle(new(Stopped, (other, old, now)))
                stopped.clear()
        for _, kind, learner, number, began, at_version in calendar.left(at_entry):
            if kind == FINISH and number == turn[learner]:
                since[learner], version[learner] = began, at_version
        self.now, self.ticket, self.events, self.updates = now, ticket, ticket, policy.version
        self.tally.seconds["compute"] += computed
        self.tally.seconds["wait"] += waited
        self.tally.waste_s += wasted

    def _typical_wait(self) -> float:
        """How far ahead entries lie, about: the calendar is right with any number, and quick with a good one."""
        ahead = sorted(at - self.now for at, kind, _, _ in self.heap if kind == FINISH)
        return max(ahead[len(ahead) // 2], 1e-9) if ahead else 1.0

    def _end(self, learner: int, number: int) -> int:
        self.updates = self.policy.version
        return 0

    def _stands_still(self) -> RequestError:
        at = f"at update {self.policy.version}"
        return RequestError(
            f"the run stands still {at}, {self.now:.4g} s: no update in the last {self.patience} events, or nothing "
            "left to happen; are learners up long enough to finish, and links fast enough?"
        )

    def _finish(self, learner: int, number: int) -> int:
        """A minibatch is computed."""
        if number != self.turn[learner]:
            return 0  # it was cancelled
        self._close(learner)
        self.done[learner] += 1
        pushes = self.done[learner] % self.rule.push_every == 0
        if pushes:
            self.sent += 1
            spent, self.unpushed_s[learner] = self.unpushed_s[learner], 0.0
            self.flying[self.sent] = (learner, self.oldest[learner], spent, self.rule.push_every)
            self._packed(learner, self.sent)
            self.doing[learner] = "send"
            if self.pushing[learner] in self.flying:
                self.queued[learner] = self.sent
                return 1  # one at a time: it waits until the one before is there, and `_arrive` goes on
            self._transmit(learner, self.sent)
        self._go_on(learner, computes=self.free or not pushes)
        return 1

    def _go_on(self, learner: int, *, computes: bool) -> None:
        """After a minibatch and perhaps the start of a push: fetch if it is time, and begin the next minibatch."""
        if self.free and self.done[learner] % self.rule.fetch_every == 0 and not self.fetching[learner]:
            self.fetching[learner] = not self.instant
            self._post(ASK, learner, 0)
        if computes:
            self._begin(learner)

    def _transmit(self, learner: int, number: int) -> None:
        """A gradient sets out."""
        self.pushing[learner] = number
        if self.instant:
            self._arrive(learner, number)
        elif self.size_bytes:
            assert self.cluster.wires is not None
            self.links[0].start(self.now, number, self.size_bytes, self.cluster.wires.cap(learner))
            self._watch(0)
        else:
            self._plan(self.now + self.latency_s, ARRIVE, learner, number)

    def _arrive(self, learner: int, number: int) -> int:
        """A gradient is at the server."""
        gradient = self.flying.pop(number, None)
        if gradient is None:
            return 0  # its learner failed, and it was lost on the way
        self.ticket += 1
        self.gradients[self.ticket] = gradient
        if not self.free:
            self._close(learner)
            self.doing[learner] = "wait"
        self._tell(self._pushed(learner, number))
        if self.doing[learner] == "wait" and self.next_version[learner] is not None:
            self._begin(learner)  # weights had come while it was still sending
        elif self.queued[learner] in self.flying:
            waiting, self.queued[learner] = self.queued[learner], -1
            self._transmit(learner, waiting)
            self._go_on(learner, computes=True)
        return 1

    def _packed(self, learner: int, number: int) -> None:
        """A gradient is ready to set out under this number."""

    def _pushed(self, learner: int, number: int) -> Pushed:
        """What the policy is told of the gradient that has just got a ticket."""
        _, version, _, minibatches = self.gradients[self.ticket]
        return Pushed(learner, self.ticket, version, self.samples[learner] * minibatches, None, None, self.now)

    def _link(self, which: int, number: int) -> int:
        """Something on a link has ended: a gradient on the way to the server, weights on the way from it."""
        if number != self.link_turn[which]:
            return 0  # something else began since, and moved the end
        for one in self.links[which].finish(self.now):
            if which == 0 and one in self.flying:
                self._plan(self.now + self.latency_s, ARRIVE, self.flying[one][0], one)
            elif which == 1:
                self._plan(self.now + self.latency_s, WEIGHTS, self.letters[one][0], one)
        self._watch(which)
        return 0

    def _watch(self, which: int) -> None:
        self.link_turn[which] += 1
        end = self.links[which].next_end_s()
        if end < math.inf:
            self._plan(end, LINK, which, self.link_turn[which])

    # --- what the policy is told, and what it says -----------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        for command in self.handle(event):
            self._obey(command)

    def _obey(self, command: Command) -> None:
        match command:
            case Send():
                self._send(command.learner)
            case Resume():
                if not self.free:  # else it goes on anyway
                    self._post(RESUME, command.learner, self.policy.version)
            case Cancel():
                self._post(CANCEL, command.learner, self.policy.version)
            case Apply():
                self._count_update()
                for ticket in command.tickets:
                    del self.gradients[ticket]
            case Drop():
                _, _, spent, minibatches = self.gradients.pop(command.ticket)
                self.tally.dropped += minibatches
                self.tally.waste_s += spent

    def _count_update(self) -> None:
        taken = self.policy.last_update
        before = self.policy.version - 1
        self.tally.staleness.update([before - gradient.version for gradient in taken])
        self.tally.applied += len(taken) * self.rule.push_every
        self.tally.samples += sum([gradient.samples for gradient in taken])

    def _send(self, learner: int) -> None:
        """Weights set out."""
        if not self.size_bytes:
            self._post(WEIGHTS, learner, self.policy.version)
            return
        assert self.cluster.wires is not None
        letter = self._letter(learner, self.policy.version)
        if self.links[1].remove(self.now, self.weights_for[learner]):  # newer weights replace those on their way
            del self.letters[self.weights_for[learner]]
        self.weights_for[learner] = letter
        self.links[1].start(self.now, letter, self.size_bytes, self.cluster.wires.cap(learner))
        self._watch(1)

    def _resumed(self, learner: int, letter: int) -> int:
        version = self._open(letter)
        if version is not None and version >= self.void_below[learner] and self.doing[learner] == "wait":
            self._begin(learner)
        return 1

    def _weights_arrive(self, learner: int, letter: int) -> int:
        version = self._open(letter)
        if version is None:
            return 0
        if version < self.void_below[learner]:
            return 0  # cancelled before it could begin
        self.next_version[learner] = version
        self.fetching[learner] = False
        if self.doing[learner] == "wait":
            self._begin(learner)
        return 1

    def _begin(self, learner: int) -> None:
        """Start the next minibatch, on new weights if there are any."""
        self._close(learner)
        weights = self.next_version[learner]
        if weights is not None:
            self.version[learner], self.next_version[learner] = weights, None
        if not self.unpushed_s[learner]:
            self.oldest[learner] = self.version[learner]
        self.doing[learner] = "compute"
        self._plan(self.now + self.draws.take(learner), FINISH, learner, self.turn[learner])

    def _cancel_arrives(self, learner: int, letter: int) -> int:
        """All work at versions before the one in the letter is void; a learner that does such work stops."""
        newer = self._open(letter)
        if newer is None:
            return 0
        self.void_below[learner] = newer
        waiting = self.next_version[learner]
        if waiting is not None and waiting < newer:
            self.next_version[learner] = None
        version = self.version[learner]
        if self.doing[learner] != "compute" or version >= newer:
            return 0  # it was faster, and its gradient will come late
        self._close(learner, cancelled=True)
        self.tally.waste_s += self.unpushed_s[learner]
        self.unpushed_s[learner] = 0.0
        self.tally.cancelled += 1
        self.done[learner] = 0
        self.doing[learner] = "wait"
        self.turn[learner] += 1
        self._post(STOPPED, learner, version)
        if self.next_version[learner] is not None:
            self._begin(learner)
        return 0

    def _stopped(self, learner: int, letter: int) -> int:
        version = self._open(letter)
        if version is not None:
            self._tell(Stopped(learner, version, self.now))
        return 0

    def _asked(self, learner: int, letter: int) -> int:
        if self._open(letter) is not None:
            self._tell(Asked(learner, self.now))
        return 1

    # --- failures --------------------------------------------------------------------------------------------------

    def _fail(self, learner: int, number: int) -> int:
        assert self.cluster.failures is not None
        _, down = failure_times(self.cluster.failures, self.cluster.seed, int(self.draws.ids[learner]), number)
        self._close(learner, cancelled=True)
        self.tally.waste_s += self.unpushed_s[learner]
        self.unpushed_s[learner] = 0.0
        for number_sent in [sent for sent, gradient in self.flying.items() if gradient[0] == learner]:
            self.tally.waste_s += self.flying.pop(number_sent)[2]  # lost on the way
            self.links[0].remove(self.now, number_sent)
        if self.links[1].remove(self.now, self.weights_for[learner]):
            del self.letters[self.weights_for[learner]]
        if self.size_bytes:
            self._watch(0)
            self._watch(1)
        self.fetching[learner] = False
        self.tally.failed += 1
        self.doing[learner] = "away"
        self.next_version[learner] = None
        self.turn[learner] += 1
        self.life[learner] += 1
        self._tell(Left(learner, self.now))
        self._plan(self.now + down, REJOIN, learner, 0)
        return 0

    def _rejoin(self, learner: int, number: int) -> int:
        self.since[learner] = self.now
        self.doing[learner] = "wait"
        self.done[learner] = 0
        if self.cluster.failures is not None:
            life = self.life[learner]
            up, _ = failure_times(self.cluster.failures, self.cluster.seed, int(self.draws.ids[learner]), life)
            self._plan(self.now + up, FAIL, learner, life)
        self._tell(Joined(learner, self.now))
        return 0

    # --- letters -----------------------------------------------------------------------------------------------------

    def _post(self, kind: int, learner: int, version: int) -> None:
        """A few bytes to or from a learner. They take the latency; without any they are read at once.

        Only a `Stopped` is never read at once: the policy is in the middle of the commands that led to it.
        """
        letter = self._letter(learner, version)
        if self.instant and kind != STOPPED:
            self.handlers[kind](learner, letter)
        else:
            self._plan(self.now + self.latency_s, kind, learner, letter)

    def _letter(self, learner: int, version: int) -> int:
        self.letter += 1
        self.letters[self.letter] = (learner, self.life[learner], version)
        return self.letter

    def _open(self, letter: int) -> int | None:
        """The version in a letter; None where its learner has failed since."""
        learner, life, version = self.letters.pop(letter)
        return version if life == self.life[learner] else None

    # --- books -----------------------------------------------------------------------------------------------------

    def _plan(self, at: float, kind: int, learner: int, number: int) -> None:
        heapq.heappush(self.heap, (at, kind, learner, number))

    def _close(self, learner: int, *, cancelled: bool = False) -> None:
        """End what the learner was doing and count the time."""
        what, start = self.doing[learner], self.since[learner]
        took = self.now - start
        self.since[learner] = self.now
        if what == "away":
            return
        self.tally.seconds[what] += took
        if what == "compute":
            self.unpushed_s[learner] += took
        if self.version[learner] < self.keep_spans and took > 0:
            self.spans.append(
                Span(learner, what, start, self.now, self.version[learner], cancelled and what == "compute")
            )

    def result(self, strategy: str) -> Result:
        self.keep_spans = 0  # what is not finished is counted, but is no span
        for learner in range(self.cluster.learners):
            self._close(learner)
        return Result.of(
            strategy=strategy,
            learners=self.cluster.learners,
            updates=self.policy.version,
            seconds=self.now,
            events=self.events,
            tally=self.tally,
            spans=tuple(self.spans),
        )
