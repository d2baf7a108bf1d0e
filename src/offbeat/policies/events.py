"""What a policy is told (events) and what it answers (commands).

Both are values with a one-line text form, used in logs and in scenario files; from_text(as_text(x)) == x.

    joined 2 @0.5            left 2 @9.0          asked 2 @1.0            woke @30.0
    pushed 2 t7 v40 n32 loss=0.31 @12.84          stopped 2 v40 @12.9
    apply t7 t9 *1.0 *0.5    drop t8    cancel 1    send 0    resume 0    wake @30.0

`why` is for people: equality ignores it, and so does the text form. Version 0.1 wrote `tick` where `woke` stands now;
it is still read.

Named tuples, since a simulation makes millions of them; each compares equal only to its own kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from offbeat.errors import RequestError, unknown


class Joined(NamedTuple):
    """A learner is there and wants weights."""

    learner: int
    at_s: float = 0.0


class Left(NamedTuple):
    """A learner is gone: it said so, died, or was given up."""

    learner: int
    at_s: float = 0.0


class Pushed(NamedTuple):
    """A learner's gradient, computed at `version` from `samples` samples, has arrived under a ticket.

    `drift` is |w_now - w_read|^2, where a rate needs it; `loss` that of the minibatch.
    """

    learner: int
    ticket: int
    version: int
    samples: int = 1
    drift: float | None = None
    loss: float | None = None
    at_s: float = 0.0


class Stopped(NamedTuple):
    """A cancelled learner has stopped the minibatch that it computed at `version`."""

    learner: int
    version: int
    at_s: float = 0.0


class Asked(NamedTuple):
    """A learner wants weights without pushing."""

    learner: int
    at_s: float = 0.0


class Woke(NamedTuple):
    """The time has come that the policy asked to be woken at, or that a run may start without all learners."""

    at_s: float = 0.0


Event = Joined | Left | Pushed | Stopped | Asked | Woke


class Apply(NamedTuple):
    """Change the parameters by the optimizer fed with (1/n) * sum(scales[i] * gradient[i]); version + 1.

    The step is to be `damping` times as long in the end, however the optimizer does that (see `damping`).
    """

    tickets: tuple[int, ...]
    scales: tuple[float, ...]
    why: str = ""
    damping: float = 1.0


class Drop(NamedTuple):
    """Forget a gradient."""

    ticket: int
    why: str = ""


class Cancel(NamedTuple):
    """Stop what the learner computes, inside its forward or backward."""

    learner: int
    why: str = ""


class Send(NamedTuple):
    """Give the learner the current weights; it starts its next minibatch on them."""

    learner: int
    why: str = ""


class Resume(NamedTuple):
    """Let the learner start its next minibatch on the weights it has."""

    learner: int
    why: str = ""


class Wake(NamedTuple):
    """Tell the policy `Woke` at this time, not before. One wake is pending at most: a later one replaces it."""

    at_s: float
    why: str = ""


Command = Apply | Drop | Cancel | Send | Resume | Wake
EVENTS = (Joined, Left, Pushed, Stopped, Asked, Woke)
COMMANDS = (Apply, Drop, Cancel, Send, Resume, Wake)


def _compare_by(kinds: Iterable[type], compared: Callable[[Any], tuple[Any, ...]]) -> None:
    """Make these equal only to their own kind, and only in the compared fields."""

    def equal(self: Any, other: Any) -> bool:
        return type(self) is type(other) and compared(self) == compared(other)

    def different(self: Any, other: Any) -> bool:
        return not equal(self, other)

    def digest(self: Any) -> int:
        return hash((type(self), compared(self)))

    for kind in kinds:
        for name, method in (("__eq__", equal), ("__ne__", different), ("__hash__", digest)):
            setattr(kind, name, method)


_compare_by(EVENTS, tuple)
_compare_by((Drop, Cancel, Send, Resume, Wake), lambda command: command[:-1])  # all but `why`
_compare_by((Apply,), lambda command: (command.tickets, command.scales, command.damping))


# --- text -------------------------------------------------------------------------------------------------------

# Each kind: the word, and its fields in order as (mark, field). A mark stands before the value; fields that are None
# or left out are not written.
_FIELDS: dict[type, tuple[tuple[str, str], ...]] = {
    Joined: (("", "learner"), ("@", "at_s")),
    Left: (("", "learner"), ("@", "at_s")),
    Pushed: (
        ("", "learner"),
        ("t", "ticket"),
        ("v", "version"),
        ("n", "samples"),
        ("drift=", "drift"),
        ("loss=", "loss"),
        ("@", "at_s"),
    ),
    Stopped: (("", "learner"), ("v", "version"), ("@", "at_s")),
    Asked: (("", "learner"), ("@", "at_s")),
    Woke: (("@", "at_s"),),
    Drop: (("t", "ticket"),),
    Cancel: (("", "learner"),),
    Send: (("", "learner"),),
    Resume: (("", "learner"),),
    Wake: (("@", "at_s"),),
}
_KINDS = {kind.__name__.lower(): kind for kind in (*_FIELDS, Apply)} | {"tick": Woke}
_WHOLE = {"learner", "ticket", "version", "samples"}


def as_text(thing: Event | Command) -> str:
    """One line."""
    kind = type(thing)
    word = kind.__name__.lower()
    if isinstance(thing, Apply):
        ones = all(scale == 1.0 for scale in thing.scales)
        scales = [] if ones else [f"*{scale!r}" for scale in thing.scales]
        damped = [] if thing.damping == 1.0 else [f"x{thing.damping!r}"]
        return " ".join([word, *(f"t{ticket}" for ticket in thing.tickets), *scales, *damped])
    words = [f"{mark}{value}" for mark, name in _FIELDS[kind] if (value := getattr(thing, name)) is not None]
    return " ".join([word, *words])


def from_text(text: str) -> Event | Command:
    """The event or command that a line says; a `RequestError` if none."""
    word, *words = text.split() or [""]
    if word not in _KINDS:
        raise unknown("event or command", word, _KINDS)
    kind = _KINDS[word]
    try:
        if kind is Apply:
            tickets = tuple(int(w[1:]) for w in words if w.startswith("t"))
            scales = tuple(float(w[1:]) for w in words if w.startswith("*")) or (1.0,) * len(tickets)
            damping, *more = [float(w[1:]) for w in words if w.startswith("x")] or [1.0]
            if len(words) != sum(w[0] in "t*x" for w in words) or len(scales) != len(tickets) or not tickets:
                raise ValueError
            if more or not 0 < damping <= 1:
                raise ValueError
            return Apply(tickets, scales, damping=damping)
        values = {}
        fields = list(_FIELDS[kind])
        for given in words:
            while not (given.startswith(fields[0][0]) and (fields[0][0] or given[0].isdigit())):
                fields.pop(0)
            mark, name = fields.pop(0)
            number = given.removeprefix(mark)
            values[name] = int(number) if name in _WHOLE else float(number)
        thing: Event | Command = kind(**values)
        return thing
    except (ValueError, TypeError, IndexError):
        raise RequestError(
            f"expected an event or a command, like 'pushed 2 t7 v40' or 'apply t7 t9'; got '{text}'"
        ) from None
