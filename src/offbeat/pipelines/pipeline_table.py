"""The named pipelines, and the table that lists them.

To add one, write a function that gives the rows of actions for so many ranks and microbatches, and its row in the table
below; the command line, the proof over all sizes and the ranking read the table. A row from outside comes in by
`offbeat.register_pipeline`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from offbeat import plugins
from offbeat import spec as grammar
from offbeat.errors import RequestError, unknown
from offbeat.pipelines.actions import (
    BACKWARD,
    FORWARD,
    INPUT,
    MOST_ACTIONS,
    WEIGHT,
    Action,
    PipelineSchedule,
    overlap,
    row_of,
)
from offbeat.pipelines.pipeline_proof import prove
from offbeat.spec import Param, parse_count

Rows = list[list[Action]]

# --- the rows of each -----------------------------------------------------------------------------------------------


def gpipe(ranks: int, microbatches: int) -> Rows:
    """Huang et al. 2019: all forward passes, then all backward passes."""
    every = range(microbatches)
    return [row_of(FORWARD, rank, every) + row_of(BACKWARD, rank, every) for rank in range(ranks)]


def _in_turns(first: int, *lines: Sequence[Action]) -> list[Action]:
    """`first` actions of the first line, then one of each line in turn, as long as there are any."""
    turns = zip_longest(lines[0][first:], *lines[1:])
    return [*lines[0][:first], *(action for turn in turns for action in turn if action is not None)]


def one_forward_one_backward(ranks: int, microbatches: int) -> Rows:
    """Narayanan et al. 2019 (PipeDream-Flush): as few forward passes ahead as keep every rank busy."""
    every = range(microbatches)
    return [
        _in_turns(min(ranks - 1 - rank, microbatches), row_of(FORWARD, rank, every), row_of(BACKWARD, rank, every))
        for rank in range(ranks)
    ]


def interleaved(ranks: int, microbatches: int, chunks: int) -> Rows:
    """Narayanan et al. 2021 (Megatron-LM): rank r has the stages r, r + ranks, ...; a round of microbatches goes
    through all of them before the next.
    """
    size = _round_size(ranks, microbatches)
    rounds = [range(first, first + size) for first in range(0, microbatches, size)]
    rows = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forwards = [action for some in rounds for stage in stages for action in row_of(FORWARD, stage, some)]
        backwards = [action for some in rounds for stage in stages[::-1] for action in row_of(BACKWARD, stage, some)]
        ahead = (chunks - 1) * size + 2 * (ranks - 1 - rank)
        rows.append(_in_turns(min(ahead, len(forwards)), forwards, backwards))
    return rows


def zb_h1(ranks: int, microbatches: int) -> Rows:
    """Qi et al. 2023 (Zero Bubble, H1): 1F1B in which rank r computes the gradients of its weights r turns later."""
    every = range(microbatches)
    rows = []
    for rank in range(ranks):
        late: list[Any] = [None] * rank
        lines = (row_of(FORWARD, rank, every), row_of(INPUT, rank, every), [*late, *row_of(WEIGHT, rank, every)])
        rows.append(_in_turns(min(ranks - 1 - rank, microbatches), *lines))
    return rows


class _Line:
    """One rank of a V: it has stage `rank` and, on the way back, stage `2 * ranks - 1 - rank`.

    `add("F0", "I1")` adds the next forward pass of the first and the next backward pass of the second.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.stages = (rank, 2 * ranks - 1 - rank)
        self.row: list[Action] = []
        self.done = {f"{kind}{chunk}": 0 for kind in "FIW" for chunk in (0, 1)}
        self.late: deque[Action] = deque()  # gradients of weights that are still to be computed

    def _next(self, word: str) -> Action:
        kind, chunk = word[0], int(word[1])
        counted = f"I{chunk}" if kind == BACKWARD else word
        action = Action(self.stages[chunk], kind, self.done[counted])
        self.done[counted] += 1
        if kind == BACKWARD:
            self.done[f"W{chunk}"] += 1
        if kind == INPUT:
            self.late.append(Action(action.stage, WEIGHT, action.microbatch))
        return action

    def add(self, *words: str) -> None:
        self.row += [self._next(word) for word in words]

    def add_pair(self, one: str, other: str) -> None:
        self.row.append(overlap(self._next(one), self._next(other)))

    def add_late(self) -> None:
        """The oldest gradients of weights that are still to be computed."""
        if self.late:
            self.row.append(self.late.popleft())


def zb_v(ranks: int, microbatches: int) -> Rows:
    """Qi et al. 2024 (Zero Bubble, V): two stages a rank; no rank waits once it has begun, where F = I = W."""
    enough = max(2 * ranks - 1, microbatches)  # the pattern needs so many; those that do not exist are left out
    rows = []
    for rank in range(ranks):
        line = _Line(rank, ranks)
        back = ranks - rank
        line.add(*["F0"] * (2 * back - 1), *["F1", "F0"] * rank, *["F1", "I1", "W1"] * back)
        while line.done["F1"] < enough:
            line.add(*(["F0"] if line.done["F0"] < enough else []), "I0", "W0", "F1", "I1", "W1")
        line.add(*["I0", "I1"] * rank, *["I0", "W0"] * back)
        line.add(*["W1"] * (enough - line.done["W1"]), *["W0"] * (enough - line.done["W0"]))
        rows.append([action for action in line.row if action.microbatch < microbatches])
    return rows


def dualpipe_v(ranks: int, microbatches: int) -> Rows:
    """DeepSeek-AI 2025 (DualPipe, cut in half): a forward and a backward pass of different microbatches overlap."""
    rows = []
    for rank in range(ranks):
        line = _Line(rank, ranks)
        before, after = ranks - rank - 1, rank + 1
        line.add(*["F0"] * (2 * before), *["F0", "F1"] * after)
        for _ in range(before):
            line.add("I1")
            line.add_late()
            line.add("F1")
        for turn in range(microbatches - 2 * ranks + after):
            if turn == 0 and before == 0:  # one after the other: the rank before waits for the forward pass
                line.add("F0", "B1")
            else:
                line.add_pair("F0", "B1")
            line.add_pair("F1", "B0")
        for _ in range(before):
            line.add("B1")
            line.add_pair("F1", "B0")
        # The second half of the last backward passes leaves its weights for later.
        whole = [2 * turn + chunk < after for turn in range(after) for chunk in (0, 1)]
        for place, at_once in enumerate(whole):
            line.add(f"{BACKWARD if at_once else INPUT}{1 - place % 2}")
        for _ in range(before):
            line.add_late()
            line.add("I0")
        while line.late:
            line.add_late()
        rows.append(line.row)
    return rows


# --- for which numbers they are defined; closed forms --------------------------------------------------------------


def _round_size(ranks: int, microbatches: int) -> int:
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        below, above = ranks * rounds, ranks * (rounds + 1)
        raise RequestError(
            f"{microbatches} microbatches cannot be divided into equal rounds of {ranks} or more; use "
            f"{below} or {above}"
        )
    return microbatches // rounds


def _check_dualpipe(ranks: int, microbatches: int) -> None:
    if microbatches < 2 * ranks:
        raise RequestError(f"{ranks} stages need at least {2 * ranks} microbatches; got {microbatches}")


class Unit(NamedTuple):
    """Seconds of one microbatch on one rank: forward, gradients of inputs, gradients of weights."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0


def _plain_bubble(ranks: int, microbatches: int, unit: Unit) -> float:
    return (ranks - 1) / (microbatches + ranks - 1)


def _interleaved_bubble(ranks: int, microbatches: int, unit: Unit, chunks: int) -> float | None:
    return None if microbatches % ranks else (ranks - 1) / (chunks * microbatches + ranks - 1)


def _zb_h1_bubble(ranks: int, microbatches: int, unit: Unit) -> float | None:
    if microbatches < ranks or unit.weight > min(unit.forward, unit.input):
        return None
    idle = (ranks - 1) * (unit.forward + unit.input - unit.weight)
    return idle / (microbatches * sum(unit) + idle)


# --- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineAlgorithm:
    """One row: a pipeline a user can name.

    `rows(ranks, microbatches, **options)` gives the actions of each rank. `check` refuses numbers for which it is not
    defined. `bubble(ranks, microbatches, unit, **options)` is the closed form of the bubble share with equal stages and
    no time for messages, or None where there is none; the tests hold the price to it. `lines` are tried in a ranking.
    """

    name: str
    summary: str
    rows: Callable[..., Sequence[Sequence[Action]]]
    check: Callable[..., object] = lambda ranks, microbatches: None
    bubble: Callable[..., float | None] = lambda ranks, microbatches, unit: None
    bubble_text: str = ""
    params: tuple[Param, ...] = ()
    lines: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()


_CHUNKS = Param(name="chunks", read=parse_count, positional=True, default=2, help="stages of each rank (default 2)")

PIPELINES: dict[str, PipelineAlgorithm] = {
    row.name: row
    for row in (
        PipelineAlgorithm(
            name="gpipe",
            summary="all forward passes, then all backward passes: holds the activations of all microbatches",
            rows=gpipe,
            bubble=_plain_bubble,
            bubble_text="(p-1)/(m+p-1)",
            lines=("gpipe",),
            examples=("gpipe",),
        ),
        PipelineAlgorithm(
            name="1f1b",
            summary="one forward, one backward in turn: GPipe's time, activations of at most p microbatches",
            rows=one_forward_one_backward,
            bubble=_plain_bubble,
            bubble_text="(p-1)/(m+p-1)",
            lines=("1f1b",),
            examples=("1f1b",),
        ),
        PipelineAlgorithm(
            name="interleaved-1f1b",
            summary="1F1B with several stages on each rank: a smaller bubble, more messages and activations",
            rows=interleaved,
            check=lambda ranks, microbatches, chunks: _round_size(ranks, microbatches),
            bubble=_interleaved_bubble,
            bubble_text="(p-1)/(vm+p-1), m a multiple of p",
            params=(_CHUNKS,),
            lines=("interleaved-1f1b:2", "interleaved-1f1b:4"),
            examples=("interleaved-1f1b", "interleaved-1f1b:3"),
        ),
        PipelineAlgorithm(
            name="zb-h1",
            summary="1F1B that computes the gradients of the weights later, in the bubble: a third of 1F1B's idle time",
            rows=zb_h1,
            bubble=_zb_h1_bubble,
            bubble_text="(p-1)(F+I-W)/(m(F+I+W)+(p-1)(F+I-W)), m >= p and W <= F, I",
            lines=("zb-h1",),
            examples=("zb-h1",),
        ),
        PipelineAlgorithm(
            name="zb-v",
            summary="two stages on each rank, placed in a V; no bubble between a rank's first and last action if "
            "F = I = W",
            rows=zb_v,
            lines=("zb-v",),
            examples=("zb-v",),
        ),
        PipelineAlgorithm(
            name="dualpipe-v",
            summary="two stages on each rank; forward and backward passes overlap; 2p microbatches or more",
            rows=dualpipe_v,
            check=_check_dualpipe,
            lines=("dualpipe-v",),
            examples=("dualpipe-v",),
        ),
    )
}

_TRIED = ((1, 1), (1, 4), (2, 4), (3, 6), (4, 8))  # ranks and microbatches with which a new row is built and proved


def find_pipeline(name: str) -> PipelineAlgorithm:
    """The row of this name, also from a plugin; a `RequestError` names what is near."""
    if name not in PIPELINES:
        plugins.load_known()
    if name not in PIPELINES:
        raise unknown("pipeline", name, PIPELINES)
    return PIPELINES[name]


def build_pipeline(text: str, *, stages: int, microbatches: int) -> PipelineSchedule:
    """The pipeline that a line like `1f1b` or `interleaved-1f1b:4` names, on so many ranks (`stages`).

    A `RequestError` says which word is wrong, or for which numbers it is defined.
    """
    spec = grammar.parse(text)
    row = find_pipeline(spec.name)
    if stages < 1 or microbatches < 1:
        raise RequestError(f"'{spec}' needs 1 or more stages and microbatches; got {stages} and {microbatches}")
    options = grammar.bind(spec, row.params)
    if stages * microbatches * (1 + options.get("chunks", 1)) > MOST_ACTIONS:
        raise RequestError(f"'{spec}' with {stages} stages and {microbatches} microbatches is too large")
    try:
        row.check(stages, microbatches, **options)
    except RequestError as error:
        raise RequestError(f"'{spec}': {error}") from None
    rows = tuple(tuple(actions) for actions in row.rows(stages, microbatches, **options))
    return PipelineSchedule(name=str(spec), microbatches=microbatches, rows=rows)


def closed_form(text: str, *, stages: int, microbatches: int, unit: Unit) -> float | None:
    """The bubble share by its formula, where the literature has one."""
    spec = grammar.parse(text)
    row = find_pipeline(spec.name)
    return row.bubble(stages, microbatches, unit, **grammar.bind(spec, row.params))


def register_pipeline(row: PipelineAlgorithm) -> None:
    """Add a pipeline of your own under its row's name; as `register_schedule`.

    Its lines are built and proved for some numbers of stages and microbatches first: a `ScheduleError` shows the wrong
    place in the table of actions.
    """
    plugins.check_new(row.name, PIPELINES, row.examples)
    PIPELINES[row.name] = row
    try:
        proved = 0
        for line in dict.fromkeys((*row.examples, *row.lines)):
            for stages, microbatches in _TRIED:
                try:
                    schedule = build_pipeline(line, stages=stages, microbatches=microbatches)
                except RequestError:
                    continue  # not defined for these
                prove(schedule)
                proved += 1
        if not proved:
            tried = ", ".join(f"{stages} x {microbatches}" for stages, microbatches in _TRIED)
            raise RequestError(f"the pipeline '{row.name}' is defined for none of stages x microbatches {tried}")
    except BaseException:
        del PIPELINES[row.name]
        raise
