"""A parameter server in simulated time: the real policy objects, simulated learners and links.

A learner computes, sends its gradient to the server (whose link all share), and waits for what the policy says. A
learner that is cancelled stops where it is; one that had already begun to send goes on, and its gradient comes late.
With no size and no latency the communication takes no time and costs no events. Where the cluster has cores, all that
is computed shares them: minibatches, and what a gradient costs on its way to the server and back.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from offbeat.errors import PolicyError, RequestError
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
    Wake,
    Woke,
    create,
    recorded,
)
from offbeat.policies.failures import policy_failures
from offbeat.runs.log import Span
from offbeat.simulate.cluster import Cluster, Wires
from offbeat.simulate.compute import failure_times
from offbeat.simulate.cores import Cores, CoreScheduler, Job
from offbeat.simulate.engine import (
    ARRIVE,
    ASK,
    CANCEL,
    CORES,
    END,
    FAIL,
    FINISH,
    LINK,
    REJOIN,
    RESUME,
    STOPPED,
    WAKE,
    WEIGHTS,
)
from offbeat.simulate.host_links import FETCHES, PUSHES, HostTransfers
from offbeat.simulate.links import FairLink
from offbeat.simulate.quick import go_quickly
from offbeat.simulate.result import Result, Tally

Entry = tuple[float, int, int, int]
PATIENCE = 200_000  # entries of the heap without an update, beside those that learners may need


class StandsStillError(RequestError):
    """No update will come any more: of what was asked for nothing is wrong but that."""


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
        raise RequestError(f"simulate at least 1 update; got {updates}")
    simulation = Simulation(strategy, cluster, updates, keep_spans, write)
    if simulation.policy.needs_drift:
        raise RequestError(f"'{strategy}': rate=drift needs weights, which a simulation does not have; remove the rate")
    if until_s < math.inf:
        heapq.heappush(simulation.heap, (until_s, END, 0, 0))
    simulation.go()
    return simulation.result()


class Simulation:
    """One run; `training` has learners that really train in it, and overrides what is said to be theirs."""

    def __init__(
        self,
        strategy: str,
        cluster: Cluster,
        updates: int,
        keep_spans: int,
        write: Callable[[dict[str, Any]], object] | None,
        *,
        corrects: bool = False,
        scaling: float = 1.0,
    ) -> None:
        count = cluster.learners
        self.cluster, self.updates, self.keep_spans = cluster, updates, keep_spans
        self.line = strategy
        self.policy = create(strategy, expect=count, corrects=corrects, scaling=scaling)
        self.handle: Callable[[Event], tuple[Command, ...]] = (
            self.policy.handle if write is None else recorded(self.policy, write)
        )
        self.rule = self.policy.rule
        self.draws = cluster.draws()
        self.samples = list(cluster.all_samples)
        self.now = 0.0
        self.heap: list[Entry] = []
        # Per learner; what every event touches is in arrays, which stay in the cache where lists of objects do not.
        # A planned finish holds the turn in which it was made; cancelling and failing begin a new turn, and void it.
        # A message (what is on its way to or from a learner) holds its life; failing begins a new one.
        self.turn = [0] * count
        self.life = [0] * count
        self.doing = ["away"] * count  # or compute, send, wait
        self.since = array("d", [0.0]) * count  # when it began that
        self.answered = array("d", [0.0]) * count  # when the policy last told it to go on
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
        self.wake = 0  # the number of the pending wake: an earlier one is void
        self.messages: dict[int, tuple[int, int, int]] = {}  # number -> (learner, its life, a version)
        self.message = 0
        self.weights_for = [-1] * count  # the latest message with weights
        self.pushing = [-1] * count  # the number of its gradient that is on its way
        self.queued = [-1] * count  # and that of the one that waits for it
        self.fetching = [False] * count
        self.wires = cluster.wires or Wires(size_bytes=0)
        self.latency_s, self.size_bytes = self.wires.latency_s, self.wires.size_bytes
        self.push_bytes = self.wires.push_bytes or self.rule.push_bytes(self.size_bytes)
        self.fetch_bytes = self.wires.fetch_bytes or self.rule.fetch_bytes(self.size_bytes)
        self.starts, self.sends = cluster.begins(), cluster.arrives()
        self.works = cluster.works()
        self.cores = cluster.cores or Cores(count=1, law=cluster.law)
        self.scheduler = CoreScheduler(self.cores.count)
        self.cores_turn = 0
        self.jobs = [-1] * count  # computing on shared cores
        beside = (self.works, self.starts, self.sends)
        self.instant = not self.size_bytes and not self.latency_s and all(one is None for one in beside)
        self.free = self.rule.fetch_every > 0  # learners push and fetch beside computing, and never wait
        self.overlaps = self.rule.overlaps  # learners compute on, up to so many minibatches, until they are answered
        self.ahead = [-1] * count  # so many since a push that is not answered, or whose answer is not taken; -1: none
        self.delays: Counter[int] = Counter()  # minibatches from pushes to taking what answered them
        shared = self.wires.server_bytes_per_s * self.wires.shards
        self.links = (FairLink(shared), FairLink(shared))  # to the server, from the server
        self.between = None if self.wires.hosts is None else HostTransfers(self.wires.hosts)  # in their place
        self.link_turn = [0, 0]
        self.full_since: float | None = None  # one of them
        self.tally = Tally()
        self.spans: list[Span] = []
        self.events = 0
        # So many entries of the heap without an update mean that there will be none.
        self.patience = PATIENCE + 1_000 * count * self.rule.push_every + 20 * self.policy.max_held(count)
        self.handlers: dict[int, Callable[[int, int], int | None]] = {
            FAIL: self._fail,
            STOPPED: self._stopped,
            ARRIVE: self._arrive,
            FINISH: self._finish,
            WEIGHTS: self._weights_arrive,
            ASK: self._asked,
            REJOIN: self._rejoin,
            CANCEL: self._cancel_arrives,
            LINK: self._link,
            CORES: self._worked,
            END: self._end,
            RESUME: self._resumed,
            WAKE: self._wake,
        }

    # --- the loop ------------------------------------------------------------------------------------------------

    def go(self) -> None:
        """To the end: by the quick loop where that is good for this run, else by the one for all."""
        if not self.is_plain:
            for _ in self.turns():
                pass
            return
        with policy_failures(self.line, self.policy):
            self._all_join()
            go_quickly(self)

    @property
    def is_plain(self) -> bool:
        """Whether `go_quickly` can do it: the same run at several times the speed, for simulations of many learners."""
        plain = self.rule.push_every == 1 and not (self.free or self.overlaps) and self.cluster.failures is None
        return plain and self.instant and not self.keep_spans and not self.policy.drops_held

    @property
    def is_over(self) -> bool:
        return self.policy.version >= self.updates

    def _all_join(self) -> None:
        for learner in range(self.cluster.learners):
            self._rejoin(learner, 0)

    def turns(self) -> Iterator[None]:
        """The event loop: one entry of the heap after the other."""
        with policy_failures(self.line, self.policy):
            self._all_join()
            taken, version = 0, 0
            while not self.is_over:
                if not self.heap or taken > self.patience:
                    raise self.stands_still()
                self.now, kind, learner, number = heapq.heappop(self.heap)
                self.events += self.handlers[kind](learner, number) or 0  # those that are not void, and count
                yield
                taken = 0 if self.policy.version > version else taken + 1
                version = self.policy.version

    def _end(self, learner: int, number: int) -> None:
        self.updates = self.policy.version

    def stands_still(self) -> StandsStillError:
        at = f"at update {self.policy.version}"
        return StandsStillError(
            f"the simulation makes no progress {at}, {self.now:.4g} s: no update in the last {self.patience} "
            "events, or no events left; do learners stay up long enough, and are the links fast enough?"
        )

    def _finish(self, learner: int, number: int) -> int:
        """A minibatch is computed."""
        if number != self.turn[learner]:
            return 0  # it was cancelled
        self._close(learner)
        self.done[learner] += 1
        if self.overlaps:
            self.ahead[learner] += self.ahead[learner] >= 0
            self.doing[learner] = "wait"
            self._proceed(learner)
            return 1
        pushes = self.done[learner] % self.rule.push_every == 0
        if not pushes or self._push(learner, self.rule.push_every):
            self._go_on(learner, computes=self.free or not pushes)
        return 1

    def _proceed(self, learner: int) -> None:
        """Between two minibatches of a learner that overlaps: take what has come, push if it is time, compute on.

        It stays as it is, waiting, where it may not go on before its last push is answered.
        """
        least, most = self.rule.delays
        self._take_weights(learner, least)
        if self.ahead[learner] < 0 and self.unpushed_s[learner] and self.done[learner] % self.rule.push_every == 0:
            self._push(learner, self.rule.push_every)
            self._take_weights(learner, least)  # where all that takes no time
        if self.ahead[learner] < most:
            self._compute(learner)
        else:
            self._stand(learner)

    def _stand(self, learner: int) -> None:
        """It may not go on before its last push is answered."""
        self.doing[learner] = "send" if self.pushing[learner] in self.flying else "wait"

    def _take_weights(self, learner: int, least: int = 0) -> None:
        """New weights, to which it adds what it has changed since its push; if they are there, and not too early."""
        weights = self.next_version[learner]
        if weights is None or 0 <= self.ahead[learner] < least:
            return
        self.version[learner], self.next_version[learner] = weights, None
        if self.ahead[learner] >= 0:
            self.delays[self.ahead[learner]] += 1
        self.ahead[learner] = -1

    def _push(self, learner: int, minibatches: int) -> bool:
        """What it has computed sets out; False: one at a time, it waits for the one before, and `_arrive` goes on."""
        self.sent += 1
        spent, self.unpushed_s[learner] = self.unpushed_s[learner], 0.0
        version = self.version[learner] if self.overlaps else self.oldest[learner]
        self.flying[self.sent] = (learner, version, spent, minibatches)
        self._packed(learner, self.sent)
        self.ahead[learner] = 0 if self.overlaps else -1
        self.doing[learner] = "send"
        if self.pushing[learner] in self.flying:
            self.queued[learner] = self.sent
            return False
        self._transmit(learner, self.sent)
        return True

    def _go_on(self, learner: int, *, computes: bool) -> None:
        """After a minibatch and perhaps the start of a push: fetch if it is time, and begin the next minibatch."""
        if self.free and self.done[learner] % self.rule.fetch_every == 0 and not self.fetching[learner]:
            self.fetching[learner] = not self.instant
            self._send_message(ASK, learner, 0)
        if computes:
            self._begin(learner)

    def _transmit(self, learner: int, number: int) -> None:
        """A gradient sets out."""
        self.pushing[learner] = number
        if self.instant:
            self._arrive(learner, number)
        elif self.size_bytes:
            self._depart(PUSHES, number, learner, self.push_bytes)
        elif self.works is not None:
            self._hand_in(learner, number)
        else:
            send_s = 0.0 if self.sends is None else self.sends.take(learner)
            self._plan(self.now + self.latency_s + send_s, ARRIVE, learner, number)

    def _hand_in(self, learner: int, number: int) -> None:
        """What a gradient costs on the cores, on its way to the policy."""
        self._work(self.cores.push_s, Job(ARRIVE, learner, number, urgent=True))
        if self.cores.behind_s:
            self._work(self.cores.behind_s, Job(None, learner, 0, urgent=True))

    def _arrive(self, learner: int, number: int) -> int:
        """A gradient is at the server."""
        gradient = self.flying.pop(number, None)
        if gradient is None:
            return 0  # its learner failed, and it was lost on the way
        self.ticket += 1
        self.gradients[self.ticket] = gradient
        blocked = not self.overlaps or (self.doing[learner] == "send" and not self.instant)
        if blocked and not self.free:
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

    def _link(self, which: int, number: int) -> None:
        """Something on a link has ended: a gradient on the way to the server, weights on the way from it."""
        if number != self.link_turn[which]:
            return  # something else began since, and moved the end
        between = self.between
        for one in self.links[which].finish(self.now) if between is None else between.finish(self.now, which):
            if which == PUSHES and one in self.flying and self.works is not None:
                self._hand_in(self.flying[one][0], one)
            elif which == PUSHES and one in self.flying:
                self._plan(self.now + self.latency_s, ARRIVE, self.flying[one][0], one)
            elif which == FETCHES and self.works is not None:
                self._work(self.cores.fetch_s, Job(WEIGHTS, self.messages[one][0], one, urgent=True))
            elif which == FETCHES:
                self._plan(self.now + self.latency_s, WEIGHTS, self.messages[one][0], one)
        self._watch(which)

    def _depart(self, which: int, number: int, learner: int, size_bytes: float) -> None:
        """A gradient, or weights, begin to travel."""
        if self.between is None:
            self.links[which].start(self.now, number, size_bytes, self.wires.cap(learner))
        else:
            self.between.start(self.now, which, number, learner, size_bytes)
        self._watch(which)

    def _recall(self, which: int, number: int) -> bool:
        """They travel no further; whether they were still under way."""
        if self.between is None:
            return self.links[which].remove(self.now, number)
        return self.between.remove(self.now, which, number)

    def _watch(self, which: int) -> None:
        """Something has begun or ended on a link: look when the next one ends, and count how long it is full."""
        if self.full_since is not None:
            self.tally.full_s += self.now - self.full_since
        between = self.between
        if between is None:
            self.full_since = self.now if self.links[0].is_full or self.links[1].is_full else None
        else:
            self.full_since = self.now if between.is_full else None
        for changed in (which,) if between is None else (PUSHES, FETCHES):  # there both directions share links
            self.link_turn[changed] += 1
            end = self.links[changed].next_end_s() if between is None else between.next_end_s(changed)
            if end < math.inf:
                self._plan(end, LINK, changed, self.link_turn[changed])

    # --- what the policy is told, and what it says -----------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        for command in self.handle(event):
            self._obey(command)

    def _obey(self, command: Command) -> None:
        match command:
            case Send():
                self.answered[command.learner] = self.now
                self._send(command.learner)
            case Resume():
                self.answered[command.learner] = self.now
                if not self.free:  # else it goes on anyway
                    self._send_message(RESUME, command.learner, self.policy.version)
            case Cancel():
                self._send_message(CANCEL, command.learner, self.policy.version)
            case Apply():
                self.count_update(sum([self.gradients[ticket][3] for ticket in command.tickets]))
                if self.cores.update_s:
                    self._work(self.cores.update_s, Job(None, 0, 0, urgent=True))
                for ticket in command.tickets:
                    del self.gradients[ticket]
            case Wake():
                self.wake += 1
                self._plan(max(self.now, command.at_s), WAKE, 0, self.wake)
            case Drop():
                _, _, spent, minibatches = self.gradients.pop(command.ticket)
                self.tally.dropped += minibatches
                self.tally.waste_s += spent
            case _:
                raise self.no_command(command)

    def no_command(self, said: object) -> PolicyError:
        return PolicyError(f"the policy '{self.line}' answers with {said!r}, which is not a command")

    def _wake(self, _: int, number: int) -> None:
        if number == self.wake:
            self._tell(Woke(self.now))

    def count_update(self, minibatches: int) -> None:
        taken = self.policy.last_update
        before = self.policy.version - 1
        self.tally.staleness.update([before - gradient.version for gradient in taken])
        self.tally.applied += minibatches
        self.tally.samples += sum([gradient.samples for gradient in taken])

    def _send(self, learner: int) -> None:
        """Weights set out."""
        if self.works is None and not self.size_bytes:
            self._send_message(WEIGHTS, learner, self.policy.version)
            return
        message, before = self._new_message(learner, self.policy.version), self.weights_for[learner]
        # Newer weights replace those on their way.
        if not self.size_bytes:
            given_up = self.scheduler.give_up(self.now, before)
            if given_up is not None:
                del self.messages[given_up.number]
            self.weights_for[learner] = self._work(self.cores.fetch_s, Job(WEIGHTS, learner, message, urgent=True))
        else:
            if self._recall(FETCHES, before):
                del self.messages[before]
            self.weights_for[learner] = message
            self._depart(FETCHES, message, learner, self.fetch_bytes)

    def _resumed(self, learner: int, message: int) -> int:
        version = self._receive(message)
        if version is not None and version >= self.void_below[learner] and self.doing[learner] == "wait":
            self._begin(learner)
        return 1

    def _weights_arrive(self, learner: int, message: int) -> int:
        version = self._receive(message)
        if version is None or version < self.void_below[learner]:
            return 0  # it has failed, or was cancelled before it could begin
        self.next_version[learner] = version
        self.fetching[learner] = False
        if self.doing[learner] == "wait":
            self._begin(learner)
        return 1

    def _begin(self, learner: int) -> None:
        """Start the next minibatch, on new weights if there are any."""
        if self.overlaps:
            self._proceed(learner)
        else:
            self._compute(learner)

    def _compute(self, learner: int) -> None:
        if self.doing[learner] == "wait":
            self.tally.fetch_s += self.now - max(self.since[learner], self.answered[learner])
        self._close(learner)
        weights = self.next_version[learner]
        if weights is not None and not self.overlaps:
            self.version[learner], self.next_version[learner] = weights, None
        if not self.unpushed_s[learner]:
            self.oldest[learner] = self.version[learner]
        self.doing[learner] = "compute"
        if self.works is None:
            self._plan(self.now + self.draws.take(learner), FINISH, learner, self.turn[learner])
        else:
            self.jobs[learner] = self._work(self.works.take(learner), Job(FINISH, learner, self.turn[learner]))

    # --- shared cores ------------------------------------------------------------------------------------------------

    def _work(self, seconds: float, job: Job) -> int:
        number = self.scheduler.start(self.now, seconds, job)
        self._watch_cores()
        return number

    def _give_up_work(self, learner: int) -> None:
        """What it computes, and what it has computed and not pushed, is lost."""
        if self.works is not None and self.scheduler.give_up(self.now, self.jobs[learner]) is not None:
            self._watch_cores()
        self._close(learner, cancelled=True)
        self.tally.waste_s += self.unpushed_s[learner]
        self.unpushed_s[learner] = 0.0

    def _watch_cores(self) -> None:
        self.cores_turn += 1
        end = self.scheduler.next_end_s()
        if end < math.inf:
            self._plan(end, CORES, 0, self.cores_turn)

    def _worked(self, _: int, number: int) -> None:
        """Some work is done: a minibatch, after which a slow learner sleeps, or a part of the way of a gradient."""
        if number != self.cores_turn:
            return  # something else began since, and moved the end
        for kind, learner, what, _urgent in self.scheduler.finish(self.now):
            if kind is None:
                continue
            wait_s = self.latency_s
            if kind == FINISH:
                computed_s = self.now - self.since[learner]
                wait_s = self.cluster.rest_s(learner, computed_s) + self.draws.take(learner)
            self._plan(self.now + wait_s, kind, learner, what)
        self._watch_cores()

    # --- being cancelled ---------------------------------------------------------------------------------------------

    def _cancel_arrives(self, learner: int, message: int) -> None:
        """All work at versions before the one in the message is void; a learner that does such work stops."""
        newer = self._receive(message)
        if newer is None:
            return
        self.void_below[learner] = newer
        waiting = self.next_version[learner]
        if waiting is not None and waiting < newer:
            self.next_version[learner] = None
        version = self.version[learner]
        if version >= newer or not (self.doing[learner] == "compute" or self._stops_sending(learner)):
            return  # it was faster, and its gradient will come late
        self._give_up_work(learner)
        self.tally.cancelled += 1
        self.done[learner] = 0
        self.doing[learner] = "wait"
        self.turn[learner] += 1
        self._send_message(STOPPED, learner, version)
        if self.next_version[learner] is not None:
            self._begin(learner)

    def _stops_sending(self, learner: int) -> bool:
        """On another host a cancel overtakes the gradient, and what is not sent of it yet is not sent."""
        number = self.pushing[learner]
        if self.between is None or self.doing[learner] != "send" or not self._recall(PUSHES, number):
            return False
        self._watch(PUSHES)
        self.tally.waste_s += self.flying.pop(number)[2]
        self._recalled(number)
        return True

    def _recalled(self, number: int) -> None:
        """The gradient that was sent under this number will not come."""

    def _stopped(self, learner: int, message: int) -> None:
        version = self._receive(message)
        if version is not None:
            self._tell(Stopped(learner, version, self.now))

    def _asked(self, learner: int, message: int) -> int:
        if self._receive(message) is not None:
            self._tell(Asked(learner, self.now))
        return 1

    # --- failures --------------------------------------------------------------------------------------------------

    def _fail(self, learner: int, number: int) -> None:
        assert self.cluster.failures is not None
        _, down = failure_times(self.cluster.failures, self.cluster.seed, int(self.draws.ids[learner]), number)
        self._give_up_work(learner)
        for number_sent in [sent for sent, gradient in self.flying.items() if gradient[0] == learner]:
            self.tally.waste_s += self.flying.pop(number_sent)[2]  # lost on the way
            self._recall(PUSHES, number_sent)
        if self._recall(FETCHES, self.weights_for[learner]):
            del self.messages[self.weights_for[learner]]
        if self.size_bytes:
            self._watch(0)
            self._watch(1)
        self.fetching[learner] = False
        self.tally.failed += 1
        self.doing[learner] = "away"
        self.next_version[learner] = None
        self.ahead[learner] = -1
        self.turn[learner] += 1
        self.life[learner] += 1
        self._tell(Left(learner, self.now))
        self._plan(self.now + down, REJOIN, learner, 0)

    def _rejoin(self, learner: int, done: int) -> None:
        self.since[learner] = self.now
        self.doing[learner] = "wait"
        self.done[learner] = done
        if self.cluster.failures is not None:
            life = self.life[learner]
            up, _ = failure_times(self.cluster.failures, self.cluster.seed, int(self.draws.ids[learner]), life)
            self._plan(self.now + up, FAIL, learner, life)
        self._tell(Joined(learner, self.now))

    # --- messages -----------------------------------------------------------------------------------------------------

    def _send_message(self, kind: int, learner: int, version: int) -> None:
        """A few bytes to or from a learner. They take the latency; without any they are read at once.

        Only a `Stopped` is never read at once: the policy is in the middle of the commands that led to it.
        """
        message = self._new_message(learner, version)
        if self.instant and kind != STOPPED:
            self.handlers[kind](learner, message)
        else:
            begins = self.starts if kind in (WEIGHTS, RESUME) else None
            start_s = 0.0 if begins is None else begins.take(learner)
            self._plan(self.now + self.latency_s + start_s, kind, learner, message)

    def _new_message(self, learner: int, version: int) -> int:
        self.message += 1
        self.messages[self.message] = (learner, self.life[learner], version)
        return self.message

    def _receive(self, message: int) -> int | None:
        """The version in a message; None where its learner has failed since."""
        learner, life, version = self.messages.pop(message)
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

    def result(self) -> Result:
        self.keep_spans = 0  # what is not finished is counted, but is no span
        for learner in range(self.cluster.learners):
            self._close(learner)
        return Result.of(
            strategy=self.line,
            learners=self.cluster.learners,
            updates=self.policy.version,
            seconds=self.now,
            events=self.events,
            tally=self.tally,
            spans=tuple(self.spans),
        )
