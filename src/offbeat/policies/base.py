"""What every policy shares: membership, bookkeeping, laws, snapshots.

A policy knows no clock, socket or tensor: time is a number in the event, gradients are tickets. `handle` is the only
mutator and is deterministic. An event that cannot have happened raises `EventError` and changes nothing.

For each learner a policy keeps a `LearnerState`: the version it was last given, the lowest version it may still
report, and whether a minibatch is open. After `Cancel` and `Send` the learner still owes one answer for the cancelled
minibatch: `Stopped`, or, if it was faster than the word, a late `Pushed`, which is dropped.

A new policy is a subclass. It must have `on_push`, `max_held` and `gradients_per_update`; where the defaults do not
fit also `on_join`, `on_leave`, `on_ask`, `on_wake`. It speaks through `send`, `resume`, `cancel`, `drop`, `apply` and
`wake`, which keep the books.

A policy is complete: whoever sizes memory, scales a learning rate, explains a result or restarts a run asks the policy
(the section "what it says of itself") and never which class it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

from offbeat.codecs import Codec
from offbeat.codecs.table import ITEM_BYTES
from offbeat.errors import EventError, RequestError
from offbeat.policies import sentences
from offbeat.policies.damping import Damping
from offbeat.policies.events import (
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
    as_text,
)
from offbeat.policies.rates import CONSTANT, Rate
from offbeat.policies.staleness import Staleness, estimated
from offbeat.policies.waiting import ComputeTimes, UpdateTime

# A named tuple made without its constructor: a simulation makes millions of these.
_new = tuple.__new__


class LearnerRule(NamedTuple):
    """What a learner does by itself: push after so many minibatches, ask for weights after so many (0: never).

    It pushes the sum of its gradients, or, with `delta`, by how much its own optimizer moved the weights. What it
    pushes is sent with `codec` and error feedback, and the weights that it is sent are rounded by `down`.

    `delays`: how many minibatches, at least and at most, it computes between a push and taking the weights that answer
    it. It takes them as soon as they are there, and waits for them after the most. (0, 0): it waits at once.
    """

    push_every: int = 1
    fetch_every: int = 0
    delta: bool = False
    delays: tuple[int, int] = (0, 0)
    codec: Codec | None = None
    down: Codec | None = None

    @property
    def overlaps(self) -> bool:
        """Whether it computes on while what it has pushed travels and is answered."""
        return self.delays[1] > 0

    def push_bytes(self, size_bytes: int) -> int:
        """What a push of a vector of so many bytes sends."""
        return coded_bytes(self.codec, size_bytes)

    def fetch_bytes(self, size_bytes: int) -> int:
        """The same for weights."""
        return coded_bytes(self.down, size_bytes)


def coded_bytes(codec: Codec | None, size_bytes: int) -> int:
    """The size of so many bytes of fp32 numbers as they are sent."""
    return size_bytes if codec is None else codec.size_bytes(-(-size_bytes // ITEM_BYTES))


@dataclass(slots=True, eq=False)
class LearnerState:
    """What the policy knows of one learner."""

    version: int = -1  # that it was last given; -1 before the first
    floor: int = -1  # the lowest version that it may still report
    computing: bool = False


# What is counted: issued = received + cancelled + lost + open minibatches, where received = held + applied + dropped,
# and `lost` are those that went with their learner.
COUNTS = ("last_ticket", "issued", "applied", "dropped", "cancelled", "lost")


class Policy:
    """The base of all policies; see the module's text."""

    rule = LearnerRule()
    cancels = False  # whether it ever cancels, so that late pushes of old versions are to be expected
    needs_loss = False  # whether what it does depends on the losses that it is told; a simulation has none
    needs_drift = False  # whether it must be told how far the weights have moved; a rate may need it too
    waits = True  # whether a learner that has pushed may have to wait; if not, `on_push` says `send_again` at once
    shortens_small_updates = False  # whether one of fewer gradients than the learning rate counts on is a shorter step
    drops_held = False  # whether it ever drops another gradient than the one that has just arrived
    extra_state: tuple[str, ...] = ()  # names of further attributes that are plain data, for snapshots
    sentence = staticmethod(sentences.in_general)  # that explains a simulated result
    kept_over_restart: tuple[str, ...] = ()  # those of them that a run which goes on from a checkpoint begins with

    def __init__(self, *, expect: int, rate: Rate = CONSTANT, start_by_s: float | None = None) -> None:
        self.expect = expect
        self.rate = rate
        self.needs_drift = type(self).needs_drift or rate.needs_drift
        self.start_by_s = start_by_s
        self.damping: Damping | None = None  # of stale updates, where the run corrects them
        self.started = False
        self.now_s = 0.0  # of the event that is being handled
        self.wake_at_s: float | None = None  # the pending wake
        self.version = 0
        self.learners: dict[int, LearnerState] = {}
        self.held: dict[int, Pushed] = {}  # by ticket, in order of arrival
        self.last_update: list[Pushed] = []  # the gradients of the latest update, for whoever reports staleness
        self.open = 0  # seats that are computing
        self.unsent: set[int] = set()  # who was cancelled and is to be sent weights, in the same answer
        self.last_ticket = -1  # tickets rise, so that no push can be applied twice
        self.issued = self.applied = self.dropped = self.cancelled = self.lost = 0

    # --- the seam ---------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> tuple[Command, ...]:
        """What is to be done about an event, in order."""
        if type(event) is not Pushed:
            return self._membership(event)
        learner, ticket, version, samples, drift, _, self.now_s = event
        seat = self.learners.get(learner)
        if seat is None or not seat.computing or not seat.floor <= version <= seat.version:
            raise self._illegal(event, seat)
        if ticket <= self.last_ticket or samples < 1 or (self.needs_drift and not (drift is not None and drift >= 0)):
            raise self._incomplete(event)
        self.last_ticket = ticket
        if version < seat.version and self.cancels:
            return (self._late(seat, event),)
        if self.waits:
            seat.computing = False
            self.open -= 1
        self.held[ticket] = event
        return self.on_push(event)

    def on_push(self, event: Pushed) -> tuple[Command, ...]:
        """The gradient is in `held` and its learner has stopped computing (if it may wait); say what happens now."""
        raise NotImplementedError

    def on_wake(self) -> tuple[Command, ...]:
        """The pending wake has come; there is none now. It may be about something that is settled since."""
        return ()

    def _late(self, seat: LearnerState, event: Pushed) -> Drop:
        """A learner was faster than the word that cancelled it."""
        seat.floor = event.version + 1
        self.cancelled -= 1  # it was counted when it was cancelled, and came after all
        self.dropped += 1
        return Drop(event.ticket, f"late: computed at version {event.version}, cancelled since")

    def on_join(self, learner: int) -> tuple[Command, ...]:
        """A learner joined a run that goes on."""
        return (self.send(learner, "it has joined"),)

    def on_leave(self, learner: int) -> tuple[Command, ...]:
        """A learner is gone; its seat is already empty, and what it had pushed stays and counts."""
        return ()

    def on_ask(self, learner: int) -> tuple[Command, ...]:
        """A learner gave up its minibatch and wants weights."""
        seat = self.learners[learner]
        floor = seat.floor
        seat.computing = False
        self.open -= 1
        self.cancelled += 1
        answer = self.send(learner, "it asked")
        if self.cancels:
            seat.floor = floor  # what it owed for work that was cancelled before may still come
        return (answer,)

    def _membership(self, event: Event) -> tuple[Command, ...]:
        """All events but a push, the most frequent first."""
        self.now_s = event.at_s
        if isinstance(event, Stopped):
            stopped = self.learners.get(event.learner)
            if stopped is None or not self.cancels or not stopped.floor <= event.version < stopped.version:
                raise self._illegal(event, stopped)
            stopped.floor = event.version + 1
            return ()
        if isinstance(event, Woke):
            return self._woke(event)
        seat = self.learners.get(event.learner)
        if isinstance(event, Joined):
            if seat is not None or event.learner < 0:
                raise self._illegal(event, seat)
            self.learners[event.learner] = LearnerState()
            if self.started:
                return self.on_join(event.learner)
            return self._start(f"all {self.expect} are there") if len(self.learners) >= self.expect else ()
        if seat is None:
            raise self._illegal(event, seat)
        if isinstance(event, Left):
            if seat.computing:
                self.open -= 1
                self.lost += 1
            del self.learners[event.learner]
            return self.on_leave(event.learner) if self.started else ()
        if isinstance(event, Asked) and seat.computing:
            return self.on_ask(event.learner)
        raise self._illegal(event, seat)

    def _woke(self, event: Woke) -> tuple[Command, ...]:
        if not self.started:
            due = self.start_by_s is not None and event.at_s >= self.start_by_s
            return self._start("the deadline has passed") if due and self.learners else ()
        if self.wake_at_s is None or event.at_s < self.wake_at_s:
            pending = "no wake is pending" if self.wake_at_s is None else f"the pending wake is at {self.wake_at_s} s"
            raise EventError(f"'{as_text(event)}' is impossible: {pending}")
        self.wake_at_s = None
        return self.on_wake()

    def _start(self, why: str) -> tuple[Command, ...]:
        self.started = True
        return tuple(command for learner in list(self.learners) for command in self.on_start(learner, why))

    def on_start(self, learner: int, why: str) -> tuple[Command, ...]:
        return (self.send(learner, why),)

    def _illegal(self, event: Event, seat: LearnerState | None) -> EventError:
        if seat is None:
            known = "it is not in the run" if not isinstance(event, Joined) else "a learner's number must be 0 or more"
        elif not self.started:
            known = "no weights were sent yet"
        elif not seat.computing:
            known = "it waits for weights"
        else:
            known = f"it is computing on version {seat.version}"
        return EventError(f"'{as_text(event)}' is impossible: {known}; the version is {self.version}")

    def _incomplete(self, event: Pushed) -> EventError:
        if event.ticket <= self.last_ticket:
            why = f"tickets must rise, and the last one was {self.last_ticket}"
        elif event.samples < 1:
            why = "a gradient needs at least 1 sample"
        else:
            why = f"the rate '{self.rate.text}' needs a drift of 0 or more"
        return EventError(f"'{as_text(event)}' is impossible: {why}")

    # --- commands, with their books --------------------------------------------------------------------------------

    def send(self, learner: int, why: str) -> Send:
        seat = self.learners[learner]
        if not seat.computing:
            seat.computing = True
            seat.floor = self.version
            self.open += 1
        elif learner in self.unsent:
            self.unsent.remove(learner)
        elif not self.rule.fetch_every:  # those fetch while they compute
            raise TypeError(
                f"{type(self).__name__} sends weights to learner {learner}, which is computing: cancel it first"
            )
        seat.version = self.version
        self.issued += 1
        return _new(Send, (learner, why))

    def send_again(self, learner: int, why: str) -> Send:
        """`send` to one who has just pushed, where nobody ever waits: its seat was never given up."""
        seat = self.learners[learner]
        seat.floor = seat.version = self.version
        self.issued += 1
        return _new(Send, (learner, why))

    def resume(self, learner: int, why: str) -> Resume:
        self.learners[learner].computing = True
        self.open += 1
        self.issued += 1
        return Resume(learner, why)

    def cancel(self, learner: int, why: str) -> Cancel:
        """Must be followed by `send` to the same learner, of weights that are newer than those it computes on."""
        seat = self.learners[learner]
        if not self.cancels:
            raise TypeError(f"{type(self).__name__} cancels, so its class must declare cancels = True")
        if not seat.computing or seat.version >= self.version:
            state = "does not compute" if not seat.computing else "computes on the current weights: apply first"
            raise TypeError(f"{type(self).__name__} cancels learner {learner}, which {state}")
        self.unsent.add(learner)
        self.cancelled += 1
        return Cancel(learner, why)

    def drop(self, ticket: int, why: str) -> Drop:
        arrives = ticket == self.last_ticket and self.held[ticket].at_s == self.now_s
        if not arrives and not self.drops_held:
            raise TypeError(
                f"{type(self).__name__} drops a gradient that it held, so its class must declare drops_held = True"
            )
        del self.held[ticket]
        self.dropped += 1
        return Drop(ticket, why)

    def apply(self, tickets: tuple[int, ...], why: str) -> Apply:
        self.last_update = gradients = [self.held.pop(ticket) for ticket in tickets]
        scales = self.rate.scales(gradients, self.version)
        damping = 1.0
        if self.damping is not None:
            ages = [self.version - gradient.version for gradient in gradients]
            counted_on = self.gradients_per_update(self.expect) if self.shortens_small_updates else 1
            damping = self.damping.of(ages, sum(scales) / len(scales), min(1.0, len(tickets) / counted_on))
        self.version += 1
        self.applied += len(tickets)
        return Apply(tickets, scales, why, damping)

    def correct_staleness(self, scaling: float = 1.0) -> None:
        """From now on the steps of updates with stale gradients are shortened; see `damping`.

        `scaling`: by how much the learning rate was multiplied for the gradients that are averaged in an update.
        """
        added_up = 1 if self.rule.delta else self.rule.push_every
        self.damping = Damping(expected=self._expected(), scaling=scaling, added_up=added_up, learners=self.expect)

    def _expected(self) -> float:
        return self.expected_staleness(self.expect).mean

    def staleness_note(self, what: str = "") -> str:
        """What is done about stale gradients, in one line; nothing where nothing is. `what`: by a known optimizer."""
        if self.damping is None or self.damping.now() == 1.0:
            return ""
        expected = self.expected_staleness(self.expect)
        done = what or f"SGD's steps are multiplied by {self.damping.now():.3g}, Adam's beta1 is lowered"
        return f"expected staleness {expected.mean:.3g} ({expected.formula}): {done} (--staleness keep turns this off)"

    def wake(self, at_s: float, why: str) -> Wake:
        """Ask to be told when this time has come; it replaces the wake that was pending."""
        if not math.isfinite(at_s):
            raise ValueError(f"a wake needs a finite time; got {at_s}")
        self.wake_at_s = at_s
        return Wake(at_s, why)

    # --- what it says of itself ------------------------------------------------------------------------------------

    def max_held(self, learners: int) -> int:
        """The most gradients that are held at once with so many learners, the one that has just arrived included.

        One that is dropped on arrival is not held. Whoever runs the policy has room for so many, and no more.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how many gradients it holds: define max_held")

    def gradients_per_update(self, learners: int) -> int:
        """How many pushes are averaged in one update; the fewest where that varies.

        The most with `shortens_small_updates`. The learning rate is multiplied by it, and its schedule counts on it.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not say how many gradients are in an update: define gradients_per_update"
        )

    def expected_staleness(self, learners: int) -> Staleness:
        return estimated((learners - 1) / self.gradients_per_update(learners), "about (P-1)/K")

    def expected_update(self, learners: int, times: ComputeTimes) -> UpdateTime | None:
        """Seconds per update if learners are alike and the network takes no time; None where no theory is known."""
        return None

    def waits_for_all(self, learners: int) -> bool:
        """Whether every update waits for every learner, so that the slowest sets the pace."""
        return False

    def same_timing_as(self, learners: int) -> str | None:
        """The simpler line that gives the same commands with so many learners (rates left aside), if there is one."""
        return None

    # What the server does with the mean of what learners have moved, where they push that (`rule.delta`): SGD.
    outer_optimizer: Mapping[str, float] = {"lr": 1.0, "momentum": 0.0, "nesterov": 0.0}

    def explain(self, result: sentences.Outcome) -> str:
        """One sentence on a simulated result."""
        return self.sentence(result)

    def kept(self) -> dict[str, Any]:
        """What `recall` makes of a fresh policy when the run goes on from a checkpoint; plain data."""
        measured = {} if self.damping is None else {"staleness": [self._expected(), self.damping.mean]}
        return measured | {name: deepcopy(getattr(self, name)) for name in self.kept_over_restart}

    def recall(self, kept: Mapping[str, Any]) -> None:
        expected, measured = kept.get("staleness", (None, 0.0))
        if self.damping is not None and expected == self._expected():  # else it was another strategy, or other learners
            self.damping.mean = measured
        for name in self.kept_over_restart:
            if name in kept:
                setattr(self, name, deepcopy(kept[name]))

    # --- laws ----------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise AssertionError, naming the law, where the books do not add up. For tests and for logs."""
        open_now = sum(seat.computing for seat in self.learners.values())
        laws = {
            "open is the number of learners that compute": self.open == open_now,
            "issued = held + applied + dropped + cancelled + lost + open": self.issued
            == len(self.held) + self.applied + self.dropped + self.cancelled + self.lost + open_now,
            "no count is negative": min(getattr(self, name) for name in COUNTS[1:]) >= 0,
            "nobody waits": self.waits or not self.started or open_now == len(self.learners),
            "no learner computes before the start": self.started or open_now == 0,
            "no learner is ahead of the version": all(seat.version <= self.version for seat in self.learners.values()),
            "no gradient is newer than the version": all(held.version <= self.version for held in self.held.values()),
            "at most `max_held` gradients are held": len(self.held) <= self.max_held(self._learners_known()),
        }
        for law, holds in (laws | self.laws()).items():
            assert holds, f"{type(self).__name__}: {law}"

    def laws(self) -> dict[str, bool]:
        """Further laws of one policy, by name, and whether they hold now."""
        return {}

    def _learners_known(self) -> int:
        """Those that are here, were expected, or have a gradient held."""
        return max(self.expect, len(self.learners.keys() | {held.learner for held in self.held.values()}))

    # --- snapshots -----------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """All state as plain data that JSON can hold."""
        return {
            "policy": type(self).__name__,
            "started": self.started,
            "version": self.version,
            "seats": [[learner, s.version, s.floor, s.computing] for learner, s in self.learners.items()],
            "held": [list(event) for event in self.held.values()],
            "wake_at_s": self.wake_at_s,
            "staleness_mean": None if self.damping is None else self.damping.mean,
            **{name: deepcopy(getattr(self, name)) for name in (*COUNTS, *self.extra_state)},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Become what `snapshot` described; a snapshot of another policy is refused, and changes nothing."""
        if state.get("policy") != type(self).__name__:
            raise RequestError(f"a snapshot of {state.get('policy')} is not one of {type(self).__name__}")
        try:
            seats = {learner: LearnerState(version, floor, bool(on)) for learner, version, floor, on in state["seats"]}
            held = {event[1]: Pushed(*event) for event in state["held"]}
            plain = {name: deepcopy(state[name]) for name in (*COUNTS, *self.extra_state, "started", "version")}
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError(f"the snapshot is incomplete: {error!r}") from None
        self.learners, self.held = seats, held
        self.wake_at_s = state.get("wake_at_s")  # version 0.1 had no wakes
        if self.damping is not None and state.get("staleness_mean") is not None:
            self.damping.mean = state["staleness_mean"]
        self.open = sum(seat.computing for seat in seats.values())
        for name, value in plain.items():
            setattr(self, name, value)


class EachGradient(Policy):
    """Every gradient is an update of its own, or is dropped: none is held from one event to the next."""

    def max_held(self, learners: int) -> int:
        return 1

    def gradients_per_update(self, learners: int) -> int:
        return 1


class HoldsK(Policy):
    """K gradients make an update: the K-th that arrives, and none before it."""

    def __init__(self, *, k: int, **common: Any) -> None:
        super().__init__(**common)
        self.k = k

    def max_held(self, learners: int) -> int:
        return self.k

    def gradients_per_update(self, learners: int) -> int:
        return self.k
