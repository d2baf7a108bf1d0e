"""What a run is, and what the coordinator keeps of each learner and of each gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from offbeat.errors import RequestError
from offbeat.policies import Policy, create
from offbeat.policies.memory import Vectors, keeps_reads, vectors_of
from offbeat.server.wire import Call, Go, Granted, Hyper, Want, Weights

MOST_SLOTS = 1_000_000  # for gradients, of a run
NONCES_KEPT = 64  # of each learner: a Hello that was long on its way is no newcomer


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a run is: the line, how many learners and shards, and how much memory there is."""

    line: str
    learners: int
    shards: int = 1
    corrects: bool = False  # the steps of updates with stale gradients are shortened
    scaling: float = 1.0  # the learning rate was multiplied by this, for the number of gradients in an update
    again: bool = True  # what was cancelled is computed later; else it is counted as dropped
    clip_norm: float = 0.0  # 0: no clipping
    start_by_s: float | None = None  # begin with whoever is there by then
    in_place: bool = False  # learners compute on the servers' weights themselves, and copy nothing
    rest_every: int = 0  # updates, after which all stand still for a while; 0: never
    rest_epochs: bool = False  # the same at the end of each epoch
    book: dict[str, Any] | None = None  # of the samples, where a run goes on that was saved
    memory: dict[str, Any] | None = None  # of the policy, in the same way

    def __post_init__(self) -> None:
        if self.learners < 1 or self.shards < 1:
            raise RequestError(f"a run has 1 learner and 1 server or more; got {self.learners} and {self.shards}")
        try:
            slots = self.slots
        except RequestError:
            raise
        except Exception as error:  # in the code of a policy from outside
            said = f"with {self.learners} learners: {type(error).__name__}: {error}"
            raise RequestError(f"'{self.line}' cannot say how many gradients it holds {said}") from error
        if slots > MOST_SLOTS:
            raise RequestError(
                f"'{self.line}' holds up to {slots - self.learners + 1:,} gradients; there is room for {MOST_SLOTS:,}"
            )

    def policy(self) -> Policy:
        """A fresh one. It begins when it is first woken, if not all are there before."""
        policy = create(self.line, expect=self.learners, start_by_s=0.0, corrects=self.corrects, scaling=self.scaling)
        policy.recall(self.memory or {})
        return policy

    @property
    def independent(self) -> bool:
        """Whether shards commit by themselves."""
        return self.policy().rule.fetch_every > 0

    @property
    def keeps_reads(self) -> bool:
        """Whether the weights that a gradient was computed on are needed when it is applied."""
        return keeps_reads(self.policy())

    @property
    def slots(self) -> int:
        return self._vectors.gradients

    @property
    def buffers(self) -> int:
        return self._vectors.weights

    @property
    def _vectors(self) -> Vectors:
        return vectors_of(self.policy(), self.learners, in_place=self.in_place)


class LearnerSession:
    """A learner's session."""

    def __init__(self, learner: int) -> None:
        self.learner = learner
        self.nonce = 0
        self.nonces: dict[int, int] = {}  # this one and those before, with their incarnations
        self.incarnation = 0
        self.here = False  # it is this incarnation still
        self.seated = False  # the policy knows of it
        self.seq = 0  # the latest minibatch that it was told, or is to be told, to compute
        self.answered = 0
        self.cancelled = 0
        self.void = 0  # minibatches up to this one were open when the policy was told that it is gone
        self.versions: dict[int, int] = {}  # of open minibatches
        self.pieces: tuple[tuple[int, int], ...] = ()  # the weights that it has: buffer and version by lane
        self.slot: int | None = None
        self.limbo: list[tuple[int, int]] = []  # incarnations that may still write to a slot, and that slot
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
        self.call: Call | None = None  # that waits
        self.bad = 0
        self.called = self.rested = 0  # the last rests that it was called to, and has come to
        self.hyper: tuple[Hyper, ...] = ()
        self.logged: tuple[Hyper, ...] = ()  # as the log has them


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
