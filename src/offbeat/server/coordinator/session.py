"""What the coordinator keeps of each learner, of each gradient, and of who says something."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from offbeat.server.wire import Go, Granted, GroupCall, Hyper, Want, Weights

NONCES_KEPT = 64  # of each learner: a Hello that was long on its way is no newcomer
SessionName = tuple[int, int]  # a learner and its incarnation


class Sender(NamedTuple):
    """Whom a message is from, as its connection knows it."""

    role: str  # "learner" or "server"
    number: int
    incarnation: int = 0  # of a learner: as whom it was welcome last
    generation: int = 0  # of a server


@dataclass(eq=False)
class LearnerSession:
    """One incarnation of a learner: what it was told, what it has answered, and what it waits for."""

    learner: int
    nonce: int = 0
    nonces: dict[int, int] = field(default_factory=dict)  # this one and those before, with their incarnations
    incarnation: int = 0
    here: bool = False  # it is this incarnation still
    in_policy: bool = False  # the policy knows of it
    seq: int = 0  # the latest minibatch that it was told, or is to be told, to compute
    answered: int = 0
    cancelled: int = 0
    unused: int = 0  # the last minibatch that it had begun whose gradient is not used: cancelled, or dropped at once
    residual_lost: bool = False  # its process ended with something that it had not sent
    void: int = 0  # minibatches up to this one were open when the policy was told that it is gone
    versions: dict[int, int] = field(default_factory=dict)  # of open minibatches
    pieces: tuple[tuple[int, int], ...] = ()  # the weights that it has: buffer and version by commit group
    slot: int | None = None
    kept_slots: list[tuple[int, int]] = field(default_factory=list)  # incarnations that may still write, and where
    grant: tuple[int, bool] | None = None  # a Go that waits: its version, and whether with weights
    ready: tuple[tuple[int, int], ...] | None = None  # the weights for it, pinned
    go: Go | None = None
    pin: int = 0
    read: int = 0  # the last of those that came with a Go and were read
    asked: int = 0
    weights: Weights | None = None
    wanted: int = 0  # number of the latest Want
    want: Want | None = None  # that waits
    granted: Granted | None = None
    call: GroupCall | None = None  # that waits
    non_finite: int = 0
    pause_announced: int = 0  # the last pause that it was told of,
    pause_entered: int = 0  # and the last that it has entered
    hyper: tuple[Hyper, ...] = ()
    logged: tuple[Hyper, ...] = ()  # as the log has them

    @property
    def name(self) -> SessionName:
        return self.learner, self.incarnation


@dataclass(slots=True, kw_only=True)
class Gradient:
    """A push that was taken, under its ticket, until the update that applies it is committed."""

    learner: int
    slot: int  # -1: none, since it will be dropped
    samples: int
    leases: tuple[int, ...]
    batch: list[tuple[int, int, int]] = field(default_factory=list)  # the same as (epoch, start, count)
    epochs: list[tuple[int, int]] = field(default_factory=list)  # (epoch, samples) counted as held, at an epoch's end
    absent: tuple[int, ...]
    hyper: tuple[Hyper, ...]
    pieces: tuple[tuple[int, int], ...]
