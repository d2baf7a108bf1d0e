"""How the processes of a training share its model: `--parallel stages=2,schedule=1f1b,microbatches=8`.

A learner is a replica of the model. Without --parallel it is one process; with it, it is one for each of `stages`,
which follow the rows of a pipeline schedule. Process n is rank n % stages of replica n // stages.

Nothing here loads torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offbeat.errors import RequestError, nearest
from offbeat.spec import count_of

KEYS = ("stages", "schedule", "microbatches")
DEFAULT_SCHEDULE, AUTO = "1f1b", "auto"  # auto: the fastest that fits the memory, by what was measured
BY_DEFAULT = 4  # microbatches for each stage: of 1F1B's time a fifth is bubbles then, at most
_LARGEST = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`stages`: ranks of the pipeline; a schedule may place several stages of the model on each."""

    stages: int = 1
    schedule: str = ""  # none: there is no pipeline
    microbatches: int = 1  # that a replica's minibatch is split into

    def check(self, *, batch_size: int) -> None:
        """A `RequestError` where so small a minibatch does not fit. 0: not known yet."""
        if self.schedule and batch_size and self.microbatches > batch_size:
            raise RequestError(
                f"a minibatch of {count_of(batch_size, 'sample')} cannot be split into {self.microbatches} "
                f"microbatches; use microbatches={batch_size} or a larger train.batch_size"
            )


def process_names(learners: int, placement: Mapping[int, int]) -> tuple[str, ...]:
    """What the processes of these replicas are called, by the rank of each stage: "replica 1 stage 0"."""
    own: dict[int, list[str]] = {}
    for stage, rank in sorted(placement.items()):
        own.setdefault(rank, []).append(str(stage))
    stages = [f"stage{'s' if len(some) > 1 else ''} {', '.join(some)}" for _, some in sorted(own.items())]
    replicas = [f"replica {replica} " for replica in range(learners)] if learners > 1 else [""]
    return tuple(replica + name for replica in replicas for name in stages)


def layout_of(text: str) -> Layout:
    """Of what `--parallel` says; a `RequestError` where it cannot be read or the schedule is not defined for it."""
    if not text:
        return Layout()
    given: dict[str, str] = {}
    for word in text.split(","):
        key, equals, value = (part.strip() for part in word.partition("="))
        if key not in KEYS or not equals or key in given:
            hint = nearest(key, KEYS)
            raise RequestError(f"expected stages=2,schedule=1f1b,microbatches=8; got '{word.strip()}'{hint}")
        given[key] = value
    if "stages" not in given:
        raise RequestError(f"the number of stages is missing; write stages=2,{text}")
    stages = _count("stages", given["stages"])
    microbatches = _count("microbatches", given.get("microbatches", str(BY_DEFAULT * stages)))
    schedule = given.get("schedule", DEFAULT_SCHEDULE)
    from offbeat.pipelines.pipeline_table import build_pipeline

    if schedule != AUTO:
        build_pipeline(schedule, stages=stages, microbatches=microbatches)
    return Layout(stages=stages, schedule=schedule, microbatches=microbatches)


def _count(key: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= _LARGEST:
        raise RequestError(f"{key}: expected a whole number from 1 to {_LARGEST}; got '{text}'")
    return int(text)
