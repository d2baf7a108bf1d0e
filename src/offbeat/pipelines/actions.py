"""A pipeline as data: `Action`, `PipelineSchedule`, and their text form, the CSV of torch.distributed.pipelining.

    2F0                        stage 2 computes the forward pass of microbatch 0
    0B2                        stage 0 computes the whole backward pass of microbatch 2
    1I3   1W3                  ... only the gradients of its inputs, only those of its weights: together they are 1B3
    (0F3;7B2)OVERLAP_F_B       two of these at once: one begins when the inputs of both are there
    1SEND_F0   2RECV_F0        stage 1 sends the activations of microbatch 0, stage 2 expects them
    1SEND_B0   0RECV_B0        ... the gradients of its inputs, back to the stage before
    1REDUCE_GRAD               the gradients of stage 1 are complete: its weights are updated
    1UNSHARD   1RESHARD        the weights of stage 1 are gathered for FSDP, and given back

Words. A rank is a process. A stage is a consecutive piece of the model, numbered from the input. A rank has one stage,
or several in the interleaved and V-shaped schedules.

Laws. A rank carries out its row in order. One schedule is one minibatch and one update. A row that names no messages
stands for: receive just before, send just after (`messages.with_messages`).
`PipelineSchedule.from_csv(name, schedule.csv()) == schedule`.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from offbeat.errors import RequestError

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
REDUCE_GRAD, UNSHARD, RESHARD = "REDUCE_GRAD", "UNSHARD", "RESHARD"
OVERLAP = "OVERLAP_F_B"

COMPUTES = (FORWARD, BACKWARD, INPUT, WEIGHT)
MESSAGES = (SEND_F, RECV_F, SEND_B, RECV_B)
WITHOUT_MICROBATCH = (REDUCE_GRAD, UNSHARD, RESHARD)

NONE = -1  # the microbatch of an action that has none, and the stage of a pair
_SINGLE = re.compile(r"([0-9]{1,6})(SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_GRAD|UNSHARD|RESHARD|F|B|I|W)([0-9]{0,6})")
MOST_ACTIONS = 4_000_000


class Action(NamedTuple):
    """What a rank does next. `parts` are the actions of an overlapped pair."""

    stage: int
    kind: str
    microbatch: int = NONE
    parts: tuple[Action, ...] = ()

    @property
    def singles(self) -> tuple[Action, ...]:
        """Itself, or the actions of the pair."""
        return self.parts or (self,)

    @property
    def computes(self) -> bool:
        return self.kind in COMPUTES or self.kind == OVERLAP

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{'' if self.microbatch == NONE else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        word = text.strip()
        if word.startswith("(") and word.endswith(f"){OVERLAP}"):
            parts = tuple(cls.parse(part) for part in word[1 : -len(OVERLAP) - 1].split(";"))
            if len(parts) == 2 and all(part.kind in COMPUTES for part in parts):
                return cls(NONE, OVERLAP, NONE, parts)
        match = _SINGLE.fullmatch(word)
        if match is None or (match[2] in WITHOUT_MICROBATCH) == bool(match[3]):
            raise RequestError(
                f"an action is written like 2F0, 1SEND_F3, 0REDUCE_GRAD or (0F3;7B2)OVERLAP_F_B; got '{word[:40]}'"
            )
        return cls(int(match[1]), match[2], int(match[3]) if match[3] else NONE)


def overlap(one: Action, other: Action) -> Action:
    return Action(NONE, OVERLAP, NONE, (one, other))


Actions = tuple[Action, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSchedule:
    """The actions of every rank, in order. Whether they train a model is `prove`'s to say."""

    name: str
    microbatches: int
    rows: tuple[Actions, ...]
    placement: Mapping[int, int] = field(init=False, repr=False, compare=False)  # stage: the rank where it computes

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\S+", self.name):
            raise RequestError(f"the name of a pipeline is one word; got '{self.name}'")
        if not self.rows or self.microbatches < 1:
            raise RequestError(f"pipeline '{self.name}' needs at least 1 rank and 1 microbatch")
        places: dict[int, int] = {}
        for rank, row in enumerate(self.rows):
            for action in row:
                for single in action.singles:
                    if single.kind in COMPUTES:
                        places.setdefault(single.stage, rank)
                    if single.microbatch >= self.microbatches:
                        raise RequestError(
                            f"pipeline '{self.name}': rank {rank} has '{action}', but microbatches are "
                            f"0..{self.microbatches - 1}"
                        )
        object.__setattr__(self, "placement", dict(sorted(places.items())))

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        """Of the model: as many as ranks, or a multiple."""
        return max(self.placement, default=-1) + 1

    def places(self) -> Iterator[tuple[int, int, Action]]:
        """Every action with its rank and its place in the row."""
        for rank, row in enumerate(self.rows):
            for step, action in enumerate(row):
                yield rank, step, action

    def csv(self) -> str:
        """A line for each rank, as torch's `_load_csv` reads it."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(self.rows)
        return text.getvalue()

    @classmethod
    def from_csv(cls, name: str, text: str) -> PipelineSchedule:
        """From a file that this or torch's `_dump_csv` wrote, with or without messages. Empty cells are idle steps."""
        if len(text) > 16 * MOST_ACTIONS:
            raise RequestError(f"pipeline '{name}': the file is too large")
        try:
            rows = [
                tuple(_cell(name, rank, step, word) for step, word in enumerate(line) if word.strip())
                for rank, line in enumerate(csv.reader(io.StringIO(text)))
            ]
        except csv.Error as error:
            raise RequestError(f"pipeline '{name}' cannot be read as CSV: {error}") from None
        while rows and not rows[-1]:  # empty lines at the end of the file
            rows.pop()
        if () in rows:
            raise RequestError(
                f"pipeline '{name}': rank {rows.index(())} has no actions; each line is the row of a rank"
            )
        last = max((single.microbatch for row in rows for action in row for single in action.singles), default=-1)
        return cls(name=name, microbatches=last + 1, rows=tuple(rows))


def _cell(name: str, rank: int, step: int, word: str) -> Action:
    try:
        return Action.parse(word)
    except RequestError as error:
        raise RequestError(f"pipeline '{name}', rank {rank}, step {step + 1}: {error}") from None


def row_of(kind: str, stage: int, microbatches: Iterable[int]) -> list[Action]:
    return [Action(stage, kind, microbatch) for microbatch in microbatches]
