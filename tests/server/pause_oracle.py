"""What the outsider knows of pauses: who is here, who computes, who leads, and that nothing moves while one looks.

Who was given up may go on for a while, since it has not heard of it: what it does is nobody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from offbeat.leases import LeaseBook
from offbeat.server.run_setting import RunSetting
from offbeat.server.wire import Committed, EndPause, FenceWord, Granted, Message, Want, Welcome

Vector = tuple[float, ...]
Key = tuple[int, int, int]  # learner, incarnation, seq
Stay = tuple[int, int]  # learner, incarnation


class LawError(AssertionError):
    """A law, and what broke it."""


def demand(kept: bool, law: str, *found: object) -> None:
    if not kept:
        raise LawError(law + (": " + ", ".join(map(str, found)) if found else ""))


class Led(NamedTuple):
    """A pause that was led to its end."""

    number: int
    stay: Stay
    facts: dict[str, Any]
    weights: tuple[Vector, ...]  # by shard, as they were read
    stop: bool


class PauseOracle:
    """See the module's text."""

    def __init__(self, setting: RunSetting) -> None:
        self.setting = setting
        self.here: dict[int, int] = {}  # incarnation by learner
        self.given_up: dict[int, int] = {}  # the latest
        self.open: set[Key] = set()  # minibatches that are being computed
        self.reading: dict[Stay, tuple[int, dict[str, Any]]] = {}  # who leads now: number and facts
        self.led: list[Led] = []
        self.without: set[int] = set()  # pauses in which nobody was left
        self.ended_up_to = 0  # pauses up to this one have ended
        self.over = False
        self.wants: dict[Key, int] = {}  # the epoch of each Want, with its number in place of seq
        self.left = 0 if setting.book is None else int(setting.book["epoch"])  # epochs before this one may be left

    # --- what learners do ---------------------------------------------------------------------------------------------

    def begins(self, key: Key) -> None:
        """A minibatch."""
        if self.here.get(key[0]) == key[1]:
            demand(not self.reading, "in a pause nobody computes", key, self.reading)
            demand(not self.over, "nobody computes after the end", key)
            self.open.add(key)

    def ends(self, key: Key) -> None:
        self.open.discard(key)

    def leads(self, stay: Stay, number: int, facts: dict[str, Any], committed: Sequence[int]) -> None:
        """A learner was told to lead, and begins to look at the weights."""
        if self.here.get(stay[0]) != stay[1]:
            return
        demand(not self.reading, "one leads at a time", stay, self.reading)
        demand(not self.open, "in a pause nobody computes", number, self.open)
        demand(set(committed) == {facts["version"]}, "who leads knows the version", facts["version"], committed)
        book = facts["book"]
        if book is not None:
            demand(book["out"] == [], "what is out counts as not computed", book)
            LeaseBook(samples=book["samples"]).restore(book)
        self.reading[stay] = number, facts

    def has_led(self, stay: Stay, weights: tuple[Vector, ...], expected: tuple[Vector, ...], *, stop: bool) -> None:
        """It has seen all."""
        if stay not in self.reading:
            return
        number, facts = self.reading.pop(stay)
        demand(weights == expected, "who leads reads one version", weights, expected)
        before = [led.stay for led in self.led if led.number == number and self.here.get(led.stay[0]) == led.stay[1]]
        demand(not before, "a pause is led once", number, before, stay)
        self.led.append(Led(number, stay, facts, weights, stop))
        if facts["epoch_end"]:
            self.left = max(self.left, facts["book"]["epoch"])

    # --- what the coordinator says ------------------------------------------------------------------------------------

    def wanted(self, want: Want) -> None:
        self.wants[want.learner, want.incarnation, want.number] = want.epoch

    def said(self, message: Message) -> None:
        if isinstance(message, Welcome):
            if message.incarnation > self.given_up.get(message.learner, 0):
                self.here[message.learner] = message.incarnation
        elif isinstance(message, FenceWord):
            self._gives_up((message.learner, message.incarnation))
        elif isinstance(message, Committed):
            demand(not self.reading, "in a pause the weights stand still", message, self.reading)
        elif isinstance(message, Granted):
            self._lends(message)
        elif isinstance(message, EndPause):
            led = {one.number for one in self.led} | self.without
            ended = set(range(self.ended_up_to + 1, message.number + 1))
            demand(ended <= led, "a pause is led to its end", ended - led)
            self.ended_up_to = max(self.ended_up_to, message.number)
            if message.over and not self.over:
                last = self.led[-1]
                demand(last.stop or last.facts["halt"], "who leads last knows that it is the last", last)
                self.over = True

    def _gives_up(self, stay: Stay) -> None:
        self.given_up[stay[0]] = max(self.given_up.get(stay[0], 0), stay[1])
        if self.here.get(stay[0]) == stay[1]:
            del self.here[stay[0]]
        self.reading.pop(stay, None)
        self.open = {key for key in self.open if key[:2] != stay}

    def _lends(self, granted: Granted) -> None:
        if not self.setting.pause_epochs:
            return
        epoch = self.wants[granted.learner, granted.incarnation, granted.number]
        law = "an epoch is left after its pause"
        demand(granted.answer != "ended" or epoch < self.left, law, granted, epoch, self.left)
        demand(granted.lease is None or granted.lease[1] <= self.left, law, granted, self.left)

    def works(self, job: object) -> None:
        """A shard is about to do a job."""
        demand(not self.reading, "in a pause no update is under way", job, self.reading)

    def check(self, number: int, epoch: int) -> None:
        """After each event, with the number of the latest pause and the epoch that runs."""
        if not self.here:
            self.without.add(number)
            self.left = max(self.left, epoch)

    @property
    def saved(self) -> Led | None:
        """What a run that was ended by a pause goes on from."""
        return self.led[-1] if self.over else None
