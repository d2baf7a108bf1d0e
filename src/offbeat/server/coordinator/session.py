"""What the coordinator keeps of each learner and of each gradient."""

from __future__ import annotations

from dataclasses import dataclass, field

from offbeat.server.wire import Go, Granted, GroupCall, Hyper, Want, Weights

NONCES_KEPT = 64  # of each learner: a Hello that was long on its way is no newcomer
SessionName = tuple[int, int]  # a learner and its incarnation


class LearnerSession:
    """One incarnation of a learner: what it was told, what it has answered, and what it waits for."""

    def __init__(self, learner: int) -> None:
        self.learner = learner
        self.nonce = 0
        self.nonces: dict[int, int] = {}  # this one and those before, with their incarnations
        self.incarnation = 0
        self.here = False  # it is this incarnation still
        self.in_policy = False  # the policy knows of it
        self.seq = 0  # the latest minibatch that it was told, or is to be told, to compute
        self.answered = 0
        self.cancelled = 0
        self.void = 0  # minibatches up to this one were open when the policy was told that it is gone
        self.versions: dict[int, int] = {}  # of open minibatches
        self.pieces: tuple[tuple[int, int], ...] = ()  # the weights that it has: buffer and version by commit group
        self.slot: int | None = None
        self.kept_slots: list[tuple[int, int]] = []  # incarnations that may still write to a slot, and that slot
        self.grant: tuple[int, bool] | None = None  # a Go that waits: its version, and whether with weights
        self.ready: tuple[tuple[int, int], ...] | None = None  # the weights for it, pinned
        self.go: Go | None = None
        self.pin = 0
        self.read = 0  # the last of those that came with a Go and were read
        self.asked = 0
        self.weights: Weights | None = None
        self.wanted = 0  # number of the latest Want
        self.want: Want | None = None  # that waits
        self.granted: Granted | None = None
        self.call: GroupCall | None = None  # that waits
        self.non_finite = 0
        self.pause_announced = self.pause_entered = 0  # the last pauses that it was told of, and has entered
        self.hyper: tuple[Hyper, ...] = ()
        self.logged: tuple[Hyper, ...] = ()  # as the log has them

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
