"""What a run is: the strategy, how many learners and shards there are, and when all learners pause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offbeat.codecs import Codec
from offbeat.errors import RequestError
from offbeat.policies import Policy, create
from offbeat.policies.memory import Vectors, keeps_reads, vectors_of

MOST_SLOTS = 1_000_000  # for gradients, of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetting:
    """What a run is: the line, how many learners and shards, and how much memory there is."""

    line: str
    learners: int
    shards: int = 1
    corrects: bool = False  # the steps of updates with stale gradients are shortened
    scaling: float = 1.0  # the learning rate was multiplied by this, for the number of gradients in an update
    again: bool = True  # what was cancelled is computed later; else it is counted as dropped
    clip_norm: float = 0.0  # 0: no clipping
    start_by_s: float | None = None  # begin with whoever is there by then
    in_place: bool = False  # each learner has a buffer of weights of its own to read, until it is given another
    pause_every: int = 0  # updates, after which all stand still for a while; 0: never
    pause_epochs: bool = False  # the same at the end of each epoch
    spread: bool = False  # each shard is on a host of its own; the first is that of the coordinator
    leaders: int = 0  # only the first so many give the initial weights and lead pauses; 0: all may
    book: dict[str, Any] | None = None  # of the samples, where a run goes on that was saved
    memory: dict[str, Any] | None = None  # of the policy, in the same way

    def __post_init__(self) -> None:
        if self.learners < 1 or self.shards < 1:
            raise RequestError(f"a run needs at least 1 learner and 1 server; got {self.learners} and {self.shards}")
        try:
            slots = self.slots
        except RequestError:
            raise
        except Exception as error:  # in the code of a policy from outside
            said = f"with {self.learners} learners: {type(error).__name__}: {error}"
            raise RequestError(f"the number of gradients that '{self.line}' holds cannot be computed {said}") from error
        if slots > MOST_SLOTS:
            raise RequestError(
                f"'{self.line}' holds up to {slots - self.learners + 1:,} gradients; the limit is {MOST_SLOTS:,}"
            )
        if self.spread and (self.codec is not None or self.down is not None):
            raise RequestError(
                f"'{self.line}': codecs need all servers on one host; remove codec= and down=, or --place spread"
            )

    def policy(self) -> Policy:
        """A fresh one. It begins when it is first woken, if not all are there before."""
        policy = create(self.line, expect=self.learners, start_by_s=0.0, corrects=self.corrects, scaling=self.scaling)
        policy.recall(self.memory or {})
        return policy

    @property
    def codec(self) -> Codec | None:
        """Of what is pushed."""
        return self.policy().rule.codec

    @property
    def down(self) -> Codec | None:
        """Of the weights that learners are sent."""
        return self.policy().rule.down

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
