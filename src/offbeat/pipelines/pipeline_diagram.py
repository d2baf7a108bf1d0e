"""A pipeline as text: its table of actions, and the well-known diagram, a line for each rank and time to the right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from offbeat.pipelines.actions import Action, PipelineSchedule
from offbeat.schedules.grid import MARK

if TYPE_CHECKING:
    from offbeat.pipelines.pipeline_cost import ActionSpan, PipelinePrice

_MOST_WIDTH = 4000


def table_text(schedule: PipelineSchedule, *, marks: Mapping[int, int], around: int = 4) -> str:
    """The actions of every rank near the marked ones; `marks` has the step of a rank, which may be past its end."""
    lines = []
    for rank, row in enumerate(schedule.rows):
        center = min(marks.get(rank, max(marks.values())), len(row))
        first, last = max(0, center - around), min(len(row), center + around + 1)
        words = [*(str(action) for action in row[first:last]), *(["end"] if last == len(row) else [])]
        if rank in marks:
            words[center - first] = f"{MARK} {words[center - first]}"
        lines.append(f"rank {rank}  {'... ' if first else ''}{'  '.join(words)}{' ...' if last < len(row) else ''}")
    return "\n".join(lines)


def label_of(action: Action, *, with_stage: bool) -> str:
    """`F0`, or `4F0` where ranks have several stages; both of a pair."""
    return "+".join(str(one) if with_stage else f"{one.kind}{one.microbatch}" for one in action.singles)


def has_several_stages(schedule: PipelineSchedule) -> bool:
    return schedule.stages > schedule.ranks


def diagram(schedule: PipelineSchedule, price: PipelinePrice, *, width: int = 200) -> str:
    """Time goes to the right, to scale; blank is idle. What is wider than `width` goes on below."""
    with_stage = has_several_stages(schedule)
    spans = [span for span in price.spans if span.end_s > span.start_s]
    head = len(f"rank {schedule.ranks - 1}  ")
    scale = max(
        ((len(label_of(span.action, with_stage=with_stage)) + 1) / (span.end_s - span.start_s) for span in spans),
        default=1.0,
    )
    scale = min(scale, _MOST_WIDTH / price.seconds) if price.seconds else scale
    total = round(price.seconds * scale)
    rows = [
        _line([span for span in spans if span.rank == rank], scale, total, with_stage) for rank in range(schedule.ranks)
    ]
    room = max(20, width - head)
    bands = []
    for first in range(0, max(1, total), room):
        bands.append(
            "\n".join(f"rank {rank}".ljust(head) + row[first : first + room].rstrip() for rank, row in enumerate(rows))
        )
    return "\n\n".join(bands)


def _line(spans: Sequence[ActionSpan], scale: float, total: int, with_stage: bool) -> str:
    line = [" "] * total
    for span in spans:
        start, end = round(span.start_s * scale), round(span.end_s * scale)
        text = label_of(span.action, with_stage=with_stage).ljust(end - start - 1, "-")[: max(0, end - start)]
        line[start : start + len(text)] = text
    return "".join(line)
