"""Learners that send their updates to each other, without a server: what one of them knows, and when it may go on.

A replica is the weights of one learner: the first weights, plus every update that the learner has applied, its own and
those of the others. Its *version vector* says how many updates of each learner these are. As all policies, a `Peer`
knows no clock, socket or tensor.

Laws. Updates of one learner are applied everywhere in the order in which it made them, each once. A learner begins no
minibatch while another has not confirmed `window` of its updates. So a learner's count in two version vectors differs
by at most `window`: two replicas of P learners differ by at most P * window updates, and with updates of norm D or less

    consensus distance = |replica - mean of all replicas| <= (P - 1) * window * D        (`farthest`)

The *staleness* of an update at a replica is how many updates that replica has applied which the update's gradient had
not seen. With equal learners and links that take no time it is P - 1 on average, as that of `async`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from offbeat import codecs
from offbeat import spec as grammar
from offbeat.errors import EventError, RequestError
from offbeat.spec import Param, choice, parse_count

WINDOW = 16
AVERAGE_EVERY = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRule:
    """What the learners of a line do."""

    sends: bool = True  # updates to each other; else they train apart
    average: int = AVERAGE_EVERY  # updates, of all learners together, from one mean of the replicas to the next
    window: int = WINDOW  # updates of a learner that another may not have confirmed
    codec: codecs.Codec | None = None
    start: str = "equal"  # weights, or each learner's "own"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    """A strategy of peers that a user can name; where a name is that of another strategy too, `form` is its first word.

    Its learning rate is that of the parameter-server line `paced_as`.
    """

    name: str
    summary: str
    params: tuple[Param, ...]
    form: str = ""
    sends: bool = True
    paced_as: str = "async"
    examples: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.name}:{self.form}" if self.form else self.name

    @property
    def own_params(self) -> tuple[Param, ...]:
        """What can be said behind the key."""
        return tuple(param for param in self.params if not (self.form and param.positional))


_ROWS = (
    PeerRow(
        name="all-to-all",
        form="async",
        summary="every learner sends its updates to every other, which applies them as they come; no server",
        params=(
            Param(name="form", read=choice("async"), positional=True, required=True, help="updates as they come"),
            Param(
                name="average",
                read=parse_count,
                default=AVERAGE_EVERY,
                help=f"updates from one mean of all replicas to the next (default {AVERAGE_EVERY})",
            ),
            Param(
                name="window",
                read=parse_count,
                default=WINDOW,
                help=f"updates of a learner that another may not have applied yet (default {WINDOW})",
            ),
            Param(name="codec", read=codecs.read_codec, help="what is sent instead of fp32, like int8 or top-k:0.01"),
        ),
        examples=("all-to-all:async", "all-to-all:async,average=50", "all-to-all:async,codec=int8"),
    ),
    PeerRow(
        name="average-once",
        summary="learners train apart, and the mean of their weights is taken at the end",
        params=(
            Param(
                name="start",
                read=choice("equal", "own"),
                default="equal",
                help="first weights: equal (default), or own: different ones on each learner",
            ),
        ),
        sends=False,
        examples=("average-once", "average-once:start=own"),
    ),
)
PEERS: dict[str, PeerRow] = {row.key: row for row in _ROWS}


def row_of(line: str) -> PeerRow | None:
    """The row that a line names, if it is one of peers."""
    spec = grammar.parse(line)
    return next((row for row in _ROWS if row.name == spec.name and (not row.form or row.form in spec.args)), None)


def rule_of(line: str) -> PeerRule:
    """What a line of peers says."""
    row = row_of(line)
    if row is None:
        raise RequestError(f"'{line}' is no strategy of peers; known: {', '.join(PEERS)}")
    options: dict[str, Any] = grammar.bind(grammar.parse(line), row.params)
    options.pop("form", None)
    return PeerRule(sends=row.sends, **options)


class Peer:
    """What one learner knows of the updates of all; see the module's text."""

    def __init__(self, me: int, members: Collection[int], *, window: int = WINDOW) -> None:
        if me not in members or window < 1:
            raise RequestError(f"learner {me} is not one of {sorted(members)}, or the window of {window} is below 1")
        self.me, self.window = me, window
        self.applied = dict.fromkeys(sorted(members), 0)  # the version vector
        self.confirmed = {other: 0 for other in self.applied if other != me}  # how many of mine each has applied

    @property
    def version(self) -> int:
        """How many updates are in the replica."""
        return sum(self.applied.values())

    @property
    def may_begin(self) -> bool:
        """Whether another minibatch can be begun now."""
        return self.applied[self.me] - min(self.confirmed.values(), default=self.applied[self.me]) < self.window

    def make(self, seen: Mapping[int, int]) -> int:
        """An own update is applied, whose gradient had seen these updates; its staleness."""
        if not self.may_begin:
            raise EventError(f"learner {self.me} has {self.window} updates that another has not confirmed")
        age = self.staleness(self.me, seen)
        self.applied[self.me] += 1
        return age

    def receive(self, source: int, number: int, seen: Mapping[int, int]) -> int:
        """Update `number` (from 1) of another learner is applied; its staleness."""
        if source == self.me or source not in self.applied:
            raise EventError(f"learner {self.me} cannot receive an update of learner {source}")
        if number != self.applied[source] + 1:
            raise EventError(
                f"learner {self.me} expects update {self.applied[source] + 1} of learner {source}; got {number}"
            )
        age = self.staleness(source, seen)
        self.applied[source] = number
        return age

    def confirm(self, other: int, count: int) -> None:
        """Another learner has applied so many of this one's updates."""
        if other not in self.confirmed or not self.confirmed[other] <= count <= self.applied[self.me]:
            raise EventError(f"learner {other} cannot confirm {count} updates of learner {self.me}")
        self.confirmed[other] = count

    def staleness(self, source: int, seen: Mapping[int, int]) -> int:
        """How many updates are in the replica that a gradient of `source` had not seen."""
        return sum(max(0, count - seen.get(one, 0)) for one, count in self.applied.items() if one != source)

    def has_all(self, made: Mapping[int, int]) -> bool:
        """Whether the replica has every update, where each learner has made so many."""
        return all(self.applied[one] == count for one, count in made.items())


def farthest(learners: int, window: int, largest: float) -> float:
    """The most that a replica can be from the mean of all, where no update is larger than this."""
    return (learners - 1) * window * largest
