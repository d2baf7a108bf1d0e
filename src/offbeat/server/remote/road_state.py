"""What a learner on another host may write to the servers' memory, and which weights it is sent: a state machine.

It sees every message that passes between the learner and the coordinator, and knows no clock, socket or tensor. A
gradient goes into the slot of the minibatch that the learner was told to compute last, until the learner has answered
it. Initial weights go to their place while the learner is asked for them. Everything else that comes is received and
thrown away: it is late. So bytes that arrive after a slot has changed hands do no harm.

Each pin is sent once: a Go that is said again does not send its weights again. A new connection is a new `RoadState`.
"""

from __future__ import annotations

from typing import NamedTuple

from offbeat.server.arena import stamp
from offbeat.server.remote.frames import GRADIENTS, Header, Region
from offbeat.server.wire import (
    INPUT,
    TO_LEARNER,
    Bye,
    EndPause,
    EnterPause,
    Fenced,
    Go,
    Hello,
    Pieces,
    Push,
    Refused,
    Seeded,
    Stop,
    Weights,
    Welcome,
)

GO_BUFFER, ASK_BUFFER = 0, 1  # of the learner's two: what a Go names, and what it asked for


class PinnedSend(NamedTuple):
    """Weights that are pinned for the learner, to be sent to it."""

    pin: int
    pieces: Pieces
    buffer: int  # of the learner's
    stamp: int  # of the minibatch that they are for; 0: of none
    incarnation: int
    extra: bool  # with what is not trained


class Target(NamedTuple):
    """Where bytes go."""

    region: Region
    which: int  # the slot, or the number of a state


class RoadState:
    """See the module's text."""

    def __init__(self) -> None:
        self.incarnation = 0
        self.seeding = False
        self.done = False  # it has said goodbye, or knows that the run is over
        self.pause = 0  # that the learner was called to last
        self._granted: Go | None = None
        self._sent = {GO_BUFFER: 0, ASK_BUFFER: 0}  # the latest pin, by buffer
        self._sent_extra = False
        self._nonce = 0

    def told(self, message: TO_LEARNER) -> PinnedSend | None:
        """A message to the learner passes: the weights that go with it, if any do."""
        if isinstance(message, Welcome):
            if message.incarnation != self.incarnation:
                self._stop_writing()
                self.incarnation = message.incarnation
                self._sent = {GO_BUFFER: 0, ASK_BUFFER: 0}
            self.seeding = message.seed
            return None
        if isinstance(message, Refused):
            self._stop_writing()
            return None
        if message.incarnation != self.incarnation:
            return None
        if isinstance(message, EndPause):
            self.done = self.done or message.over
        elif isinstance(message, EnterPause):
            self.pause = max(self.pause, message.number)
        elif isinstance(message, Fenced):
            self._stop_writing()
        elif isinstance(message, Go):
            if self._granted is None or message.seq > self._granted.seq:
                self._granted = message
            return self._pinned(GO_BUFFER, message.pin, message.pieces, stamp(message.incarnation, message.seq))
        elif isinstance(message, Weights):
            return self._pinned(ASK_BUFFER, message.pin, message.pieces, 0)
        return None

    def _pinned(self, buffer: int, pin: int, pieces: Pieces, minibatch: int) -> PinnedSend | None:
        if not pieces or pin <= self._sent[buffer]:
            return None
        self._sent[buffer] = pin
        extra, self._sent_extra = not self._sent_extra, True
        return PinnedSend(pin, pieces, buffer, minibatch, self.incarnation, extra)

    def filled_slot(self, message: Push) -> int | None:
        """The slot whose gradient is there now, as this message says; None: it is late, or has none."""
        go = self._granted
        if go is None or not message.finite or (message.incarnation, message.seq) != (go.incarnation, go.seq):
            return None
        return go.slot

    def frees_slots(self, message: INPUT) -> bool:
        """Whether the coordinator may give the learner's slot to another when it hears this."""
        return isinstance(message, Bye) or (isinstance(message, Hello) and message.nonce != self._nonce)

    def heard(self, message: INPUT) -> None:
        """A message of the learner passes: after it, what it has answered is written no more."""
        if self.frees_slots(message):
            self._stop_writing()
        if isinstance(message, Bye):
            self.done = True
        elif isinstance(message, Hello):
            self._nonce = message.nonce
        elif isinstance(message, Seeded):
            self.seeding = False
        elif isinstance(message, Push | Stop) and self._granted is not None and message.seq >= self._granted.seq:
            self._granted = None

    def _stop_writing(self) -> None:
        self._granted, self.seeding = None, False

    def target(self, header: Header) -> Target | None:
        """Where the bytes of a WRITE go; None: they are late, and go nowhere."""
        if header.region in GRADIENTS:
            go = self._granted
            if go is None or header.number != stamp(go.incarnation, go.seq):
                return None
            return Target(header.region, go.slot if header.region is Region.GRADIENT else header.which)
        if self.seeding and header.number == self.incarnation:
            return Target(header.region, header.which)
        return None
